// SPDX-License-Identifier: Apache-2.0
//
// The configuration file: options of the table at the top (or under [kvqd]), then sections
// [namespace NAME], [format NAME] (formats.c) and [key NAME] (roles.c).
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/config/internal.h"
#include "proto/status.h"
#include "proto/wire.h"

struct parse {
    struct kvq_config *config;
    char *text;
    const char *source_file;             // of options
    uint64_t set;                        // options seen in the file
    uint32_t set_in[KVQ_MAX_NAMESPACES]; // keys seen there, of each section of the configuration
    uint32_t first_format;               // of the file
    uint8_t set_in_key[KVQ_MAX_KEYS];    // as set_in, of sections [key NAME]
    int error;
};

// Complaints are written without their place, which kvq__config_parse puts in front.
static const char nowhere[] = "";

static int refuse_key(struct parse *p, const char *section, const char *name)
{
    const char *nearest = kvq__option_nearest(name);
    if (*section)
        p->error =
            kvq__config_refuse(p->text, nowhere,
                               "%.64s is not known in [%.64s]; known are uids, gids, "
                               "host_bytes, device_bytes, disk_bytes, table_bytes, max_sessions, "
                               "share_prefixes_with",
                               name, section);
    else
        p->error = kvq__config_refuse(p->text, nowhere, "%.64s is not known; %s%s", name,
                                      nearest ? "the nearest is " : "kvqd --help lists all options",
                                      nearest ? nearest : "");
    return 0;
}

static int refuse_twice(struct parse *p, const char *name)
{
    p->error = kvq__config_refuse(p->text, nowhere,
                                  "%.64s is set twice (or continued on a line "
                                  "that starts with a blank); set it once",
                                  name);
    return 0;
}

// The service manager starts kvqd in another folder than somebody in a terminal does, and sessions
// that were saved are to be found again.
static int check_whole_path(struct parse *p, const char *name, const char *value)
{
    if (!kvq__same_name(name, "storage_dir") || !*value || *value == '/')
        return 0;
    return kvq__config_refuse(p->text, nowhere,
                              "storage_dir is \"%.100s\", which depends on the folder that kvqd is "
                              "started in; give a path that begins with /",
                              value);
}

static int handle_option(struct parse *p, const char *name, const char *value)
{
    const struct kvq__option *o = kvq__option_find(name);
    assert(p->error == 0);
    if (!o)
        return refuse_key(p, "", name);
    uint64_t bit = 1ull << (o - kvq__options);
    if (p->set & bit)
        return refuse_twice(p, name);
    p->set |= bit;
    p->error = check_whole_path(p, name, value);
    if (p->error == 0)
        p->error = kvq__option_set(p->config, o, KVQ_FROM_FILE, nowhere, value, p->text);
    snprintf(p->config->source_file[o - kvq__options], KVQ_CONFIG_NAME, "%s", p->source_file);
    return p->error == 0;
}

bool kvq__config_is_namespace(const char *name)
{
    return *name && *name != '#' && kvq_text_valid(name, strlen(name)) && !strpbrk(name, " /");
}

static struct kvq_config_namespace *find_namespace_section(struct parse *p, const char *name)
{
    struct kvq_config *config = p->config;
    assert(config->n_namespaces <= KVQ_MAX_NAMESPACES && p->error == 0);
    for (uint32_t i = 0; i < config->n_namespaces; i++)
        if (strcmp(config->namespaces[i].name, name) == 0)
            return &config->namespaces[i];
    if (config->n_namespaces == KVQ_MAX_NAMESPACES) {
        p->error =
            kvq__config_refuse(p->text, nowhere, "more than %d namespaces", KVQ_MAX_NAMESPACES);
        return NULL;
    }
    if (!kvq__config_is_namespace(name)) {
        p->error = kvq__config_refuse(p->text, nowhere,
                                      "[namespace %.48s]: a name is 1 to 37 characters of UTF-8 "
                                      "without blanks, slashes or a # in front",
                                      name);
        return NULL;
    }
    struct kvq_config_namespace *ns = &config->namespaces[config->n_namespaces++];
    memset(ns, 0, sizeof *ns);
    snprintf(ns->name, sizeof ns->name, "%s", name);
    return ns;
}

// Names with commas between.
static int parse_share_with(struct parse *p, const char *value, struct kvq_config_namespace *ns)
{
    ns->n_share_with = 0;
    for (const char *at = value; *at;) {
        at += strspn(at, " ,");
        int n = (int)strcspn(at, ",");
        int length = n;
        while (length && at[length - 1] == ' ')
            length--;
        if (length == 0)
            break;
        if (length >= KVQ_NAME_BYTES || ns->n_share_with == KVQ_MAX_SHARE_WITH)
            return kvq__config_refuse(p->text, nowhere,
                                      "share_prefixes_with is \"%.64s\"; allowed are %d names of "
                                      "namespaces with commas between, or *",
                                      value, KVQ_MAX_SHARE_WITH);
        char *name = ns->share_with[ns->n_share_with++];
        snprintf(name, KVQ_NAME_BYTES, "%.*s", length, at);
        if (!kvq__config_is_namespace(name)) // "*" is like one
            return kvq__config_refuse(p->text, nowhere,
                                      "share_prefixes_with has \"%.48s\", which cannot be a "
                                      "namespace's name: these are without blanks and slashes, and "
                                      "without a # in front; put commas between names",
                                      name);
        at += n;
    }
    return 0;
}

enum { KEY_SHARE = 2, KEY_SESSIONS };

uint64_t kvq__config_sessions(const struct kvq_config *config,
                              const struct kvq_config_namespace *ns)
{
    return ns->set & 1u << KEY_SESSIONS ? ns->max_sessions : config->max_sessions;
}

static int handle_namespace(struct parse *p, const char *section, const char *name,
                            const char *value)
{
    static const char *const keys[] = {"uids",         "gids",       "share_prefixes_with",
                                       "max_sessions", "host_bytes", "device_bytes",
                                       "disk_bytes",   "table_bytes"};
    enum { N = sizeof keys / sizeof *keys };
    unsigned key = 0;
    while (key < N && !kvq__same_name(keys[key], name))
        key++;
    if (key == N)
        return refuse_key(p, section, name);
    struct kvq_config_namespace *ns = find_namespace_section(p, section + strlen("namespace "));
    if (!ns)
        return 0;
    uint32_t *set_here = &p->set_in[ns - p->config->namespaces];
    if (*set_here & 1u << key)
        return refuse_twice(p, name);
    *set_here |= 1u << key;
    ns->set |= 1u << key;
    if (key < 2) {
        p->error = kvq__parse_ids(nowhere, name, value, key ? &ns->gids : &ns->uids, p->text);
    } else if (key == KEY_SHARE) {
        p->error = parse_share_with(p, value, ns);
    } else {
        uint64_t *const numbers[] = {&ns->max_sessions, &ns->host_bytes, &ns->device_bytes,
                                     &ns->disk_bytes, &ns->table_bytes};
        assert(key - KEY_SESSIONS < sizeof numbers / sizeof *numbers);
        uint64_t *number = numbers[key - KEY_SESSIONS];
        p->error = kvq__parse_size(nowhere, name, value, number, p->text);
        if (p->error == 0 && key == KEY_SESSIONS && *number > UINT32_MAX)
            p->error = kvq__config_refuse(
                p->text, nowhere, "max_sessions is \"%.64s\"; allowed is 0 to 4294967295", value);
        else if (p->error == 0 && *number > KVQ_MAX_QUOTA_BYTES)
            p->error = kvq__config_refuse(p->text, nowhere,
                                          "%.32s is \"%.64s\"; allowed is 0 to "
                                          "1024tb",
                                          name, value);
    }
    return p->error == 0;
}

static int check_format_file(struct parse *p, const char *format)
{
    const struct kvq__own_format *own = kvq__config_own_format(p->config, format);
    if (!own || own >= p->config->own_formats + p->first_format)
        return 0;
    return kvq__config_refuse(
        p->text, nowhere,
        "[format %.48s] stands in an earlier file as well; put all of it into "
        "one file",
        format);
}

// What other programs would not take for a part of the value.
static int check_value(struct parse *p, const char *name, const char *value)
{
    size_t length = strlen(value);
    bool quoted = length > 1 && strchr("\"'", value[0]) && value[length - 1] == value[0];
    for (const char *at = value; (at = strchr(at, '#')); at++)
        if (at == value || at[-1] == ' ' || at[-1] == '\t')
            return kvq__config_refuse(p->text, nowhere,
                                      "%.64s is \"%.100s\": a # behind a value would be part of "
                                      "it; begin a comment there with a blank and ;",
                                      name, value);
    if (quoted)
        return kvq__config_refuse(p->text, nowhere,
                                  "%.64s is %.100s: the quotes would be part of it; leave them out",
                                  name, value);
    return 0;
}

// What follows the word that a section's name begins with; NULL: it begins with another.
static const char *name_in(const char *section, const char *kind)
{
    size_t length = strlen(kind);
    return strncmp(section, kind, length) == 0 ? section + length : NULL;
}

// A section is there from its header on, whether keys follow or not.
static int handle_header(struct parse *p, const char *section)
{
    const char *name;
    if (kvq__same_name(section, "kvqd"))
        return 0;
    if ((name = name_in(section, "namespace ")))
        return find_namespace_section(p, name) ? 0 : KVQ_E_INVALID;
    if ((name = name_in(section, "format "))) {
        int error = check_format_file(p, name);
        return error ? error : kvq__config_format_begin(p->config, name, p->text);
    }
    if ((name = name_in(section, "key ")))
        return kvq__config_key_begin(p->config, name, p->text);
    return kvq__config_refuse(p->text, nowhere,
                              "section [%.64s] is not known; known are [kvqd], "
                              "[namespace NAME], [format NAME] and [key NAME]",
                              section);
}

static bool handle_line(void *context, const char *section, const char *key, const char *value)
{
    struct parse *p = context;
    assert(p->error == 0);
    p->error = key ? check_value(p, key, value) : handle_header(p, section);
    if (p->error || !key)
        return p->error == 0;
    if (!*section || kvq__same_name(section, "kvqd"))
        return handle_option(p, key, value);
    if (name_in(section, "namespace "))
        return handle_namespace(p, section, key, value);
    if (name_in(section, "format "))
        p->error = kvq__config_format_line(p->config, section, key, value, p->text);
    else
        p->error = kvq__config_key_line(p->config, section, key, value, p->set_in_key, p->text);
    return p->error == 0;
}

static bool is_other_line(void *format, const char *section, const char *key, const char *value)
{
    const char *name = key ? NULL : name_in(section, "format ");
    (void)value;
    return !name || strcmp(name, format) != 0;
}

int kvq__config_parse(struct kvq_config *config, const char *name, const char *source_file,
                      const char *contents, char *text)
{
    char complaint[KVQ_TEXT_BYTES] = "", where[KVQ_CONFIG_PATH + KVQ_CONFIG_NAME + 32];
    char what_format[KVQ_TEXT_BYTES + KVQ_FORMAT_NAME + 16];
    struct parse p = {.config = config,
                      .text = complaint,
                      .source_file = source_file,
                      .first_format = config->n_formats};
    const char *what = NULL, *format = "";
    int line = kvq__ini_read(contents, handle_line, &p, &what);
    if (line && !what) {
        assert(strncmp(complaint, ": ", 2) == 0);
        what = complaint + strlen(": ");
    }
    if (line == 0 && kvq__config_formats_end(config, p.first_format, &format, complaint) != 0) {
        line = kvq__ini_read(contents, is_other_line, (void *)format, &what);
        snprintf(what_format, sizeof what_format, "[format %s]%s", format, complaint);
        what = what_format;
    }
    if (line == 0)
        return 0;
    snprintf(where, sizeof where, "%s:%d", name, line);
    return kvq__config_refuse(text, where, "%s", what);
}

// Bytes from the front of the file, `room` at most; -1 with errno.
static ssize_t read_whole(int fd, char *contents, size_t room)
{
    size_t length = 0;
    ssize_t got = 1;
    while (got != 0 && length < room) {
        got = read(fd, contents + length, room - length);
        if (got < 0 && errno != EINTR)
            return -1;
        length += got > 0 ? (size_t)got : 0;
    }
    assert(length <= room);
    return (ssize_t)length;
}

// What comes through a pipe may come later, and comes once, but a reload reads the file again.
// /dev/null may stand for an empty file. Whoever may write to a file decides who has which role.
// Its owner may be anybody: who named the file chose its owner, and where user ids are mapped, as
// in a container without root, the machine's root is nobody.
static int check_kind(int fd, const char *path, char *text)
{
    struct stat status;
    if (fstat(fd, &status) != 0 || (!S_ISREG(status.st_mode) && !S_ISCHR(status.st_mode)))
        return kvq__config_refuse(text, path,
                                  "is no regular file; give the path of one (a reload could not "
                                  "read a pipe again)");
    if (S_ISREG(status.st_mode) && status.st_mode & S_IWOTH)
        return kvq__config_refuse(text, path, "everybody may write to it (mode %04o); chmod o-w",
                                  status.st_mode & 07777);
    return 0;
}

int kvq__config_read_file(struct kvq_config *config, const char *path, const char *source_file,
                          char *text)
{
    int error = 0;
    char *contents = NULL;
    ssize_t length = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd >= 0)
        error = check_kind(fd, path, text);
    if (error) {
        close(fd);
        return error;
    }
    if (fd >= 0)
        contents = calloc(1, KVQ_MAX_CONFIG + 1);
    if (contents)
        length = read_whole(fd, contents, KVQ_MAX_CONFIG);
    if (length < 0)
        error = kvq__config_refuse(text, path, "cannot read it: %s", strerror(errno));
    else if (length == KVQ_MAX_CONFIG)
        error = kvq__config_refuse(text, path, "longer than %d bytes", KVQ_MAX_CONFIG - 1);
    else if (memchr(contents, 0, (size_t)length))
        error = kvq__config_refuse(text, path, "holds NUL characters; is it a text file?");
    else
        error = kvq__config_parse(config, path, source_file, contents, text);
    free(contents);
    if (fd >= 0)
        close(fd);
    return error;
}
