// SPDX-License-Identifier: Apache-2.0
//
// Flags of the command line, and the configuration as text: --help and --print-config.
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config/internal.h"
#include "daemon/log/log.h"
#include "proto/status.h"

// ---- Flags ----

static const struct special {
    const char *name, *brief, *argument, *help;
} specials[] = {
    {"--config", "-c", "PATH", "configuration file (KVQD_CONFIG)"},
    {"--ready-fd", NULL, "N", "write a line to this descriptor when clients may connect"},
    {"--lifetime-fd", NULL, "N", "end when the other end of this pipe is closed"},
    {"--print-config", NULL, NULL, "print the configuration in effect and leave"},
    {"--foreground", "-n", NULL, "stay in the foreground (it always does)"},
    {"--help", "-h", NULL, "print this and leave"},
    {"--version", "-V", NULL, "print the version and leave"},
};
enum { SPECIALS = sizeof specials / sizeof *specials };

static const struct special *special_find(const char *name)
{
    for (size_t i = 0; i < SPECIALS; i++)
        if (strcmp(specials[i].name, name) == 0 ||
            (specials[i].brief && strcmp(specials[i].brief, name) == 0))
            return &specials[i];
    return NULL;
}

// "--pool-bytes": the option's name as a flag.
static void flag_name(char *out, size_t size, const char *option)
{
    snprintf(out, size, "--%s", option);
    for (char *c = out; *c; c++)
        *c = *c == '_' ? '-' : *c;
}

static int refuse_flag(const char *name, bool is_long, char *text)
{
    char nearest[48];
    const char *option = is_long ? kvq__option_nearest(name + 2) : NULL;
    if (!option)
        return kvq__config_refuse(text, name, "not known; see kvqd --help");
    flag_name(nearest, sizeof nearest, option);
    return kvq__config_refuse(text, name, "not known; the nearest is %s; see kvqd --help", nearest);
}

int kvq__flag_next(int argc, char *const *argv, int *at, struct kvq__flag *flag, char *text)
{
    assert(*at < argc);
    const char *argument = argv[*at];
    size_t length = strcspn(argument, "=");
    snprintf(flag->name, sizeof flag->name, "%.*s", (int)(length < 63 ? length : 63), argument);
    const struct special *special = special_find(flag->name);
    bool is_long = strncmp(flag->name, "--", 2) == 0;
    flag->option = is_long && !special ? kvq__option_find(flag->name + 2) : NULL;
    flag->value = argument[length] == '=' ? argument + length + 1 : NULL;
    if (!flag->option && !special)
        return refuse_flag(flag->name, is_long, text);
    bool wants = flag->option || special->argument;
    if (!wants && flag->value)
        return kvq__config_refuse(text, flag->name, "takes no value");
    if (wants && !flag->value) {
        if (*at + 1 >= argc)
            return kvq__config_refuse(text, flag->name, "needs a value; see kvqd --help");
        flag->value = argv[++*at];
    }
    return 0;
}

static int read_descriptor(const struct kvq__flag *flag, int *out, char *text)
{
    char *end;
    assert(flag->value);
    long fd = strtol(flag->value, &end, 10);
    if (*end || end == flag->value || fd < 0 || fd > 65535)
        return kvq__config_refuse(text, flag->name, "\"%.64s\" is not the number of a descriptor",
                                  flag->value);
    *out = (int)fd;
    return 0;
}

int kvq__flag_special(struct kvq_config *config, const struct kvq__flag *flag, char *text)
{
    const char *name = special_find(flag->name)->name;
    assert(!flag->option);
    if (strcmp(name, "--help") == 0) {
        config->help = true;
    } else if (strcmp(name, "--version") == 0) {
        config->version = true;
    } else if (strcmp(name, "--print-config") == 0) {
        config->print = true;
    } else if (strcmp(name, "--config") == 0) {
        if (strlen(flag->value) >= sizeof config->file)
            return kvq__config_refuse(text, flag->name, "the path is longer than %zu bytes",
                                      sizeof config->file - 1);
        snprintf(config->file, sizeof config->file, "%s", flag->value);
    } else if (strcmp(name, "--ready-fd") == 0) {
        return read_descriptor(flag, &config->ready_fd, text);
    } else if (strcmp(name, "--lifetime-fd") == 0) {
        return read_descriptor(flag, &config->lifetime_fd, text);
    }
    return 0;
}

// ---- Texts ----

struct out {
    char *at;
    size_t room;
};

__attribute__((format(printf, 2, 3))) static void put(struct out *out, const char *format, ...)
{
    va_list arguments;
    assert(out->room > 0);
    va_start(arguments, format);
    int written = vsnprintf(out->at, out->room, format, arguments);
    va_end(arguments);
    size_t used = written < 0 ? 0 : (size_t)written;
    used = used < out->room ? used : out->room - 1;
    out->at += used;
    out->room -= used;
}

void kvq__size_text(char *out, size_t size, uint64_t value, enum kvq__option_type type)
{
    static const char *const units[] = {"", "kb", "mb", "gb", "tb"};
    unsigned unit = 0;
    if (type == KVQ_OPTION_MODE) {
        snprintf(out, size, "%04llo", (unsigned long long)value);
        return;
    }
    while (type == KVQ_OPTION_SIZE && unit < 4 && value && value % 1024 == 0) {
        value /= 1024;
        unit++;
    }
    snprintf(out, size, "%llu%s", (unsigned long long)value, units[unit]);
}

enum { HELP_LEFT = 26, HELP_COLUMNS = 80 };

// A row of the help: a flag and its text, in lines of HELP_COLUMNS at most.
static void put_row(struct out *out, const char *left, const char *text)
{
    size_t at = (size_t)snprintf(NULL, 0, "  %-*s", HELP_LEFT - 2, left);
    put(out, "  %-*s", HELP_LEFT - 2, left);
    while (*text) {
        size_t word = strcspn(text, " ");
        if (at + 1 + word > HELP_COLUMNS) {
            put(out, "\n%*s", HELP_LEFT, "");
            at = HELP_LEFT;
        }
        put(out, " %.*s", (int)word, text);
        at += 1 + word;
        text += word + strspn(text + word, " ");
    }
    put(out, "\n");
}

static const char *when_name(const struct kvq__option *o)
{
    assert(o->when == KVQ_OPTION_LIVE || o->when == KVQ_OPTION_RESTART);
    return o->when == KVQ_OPTION_LIVE ? "live" : "restart";
}

static void put_option(struct out *out, const struct kvq__option *o)
{
    char flag[48], left[64], value[32], text[512];
    struct out help = {text, sizeof text};
    flag_name(flag, sizeof flag, kvq__option_name(o));
    snprintf(left, sizeof left, "%s %s", flag, o->argument);
    put(&help, "%s", o->help);
    if (o->type == KVQ_OPTION_WORD) {
        put(&help, " (");
        for (unsigned i = 0; o->words[i]; i++)
            put(&help, "%s%s", i ? ", " : "", o->words[i]);
        put(&help, "; default %s; %s)", o->words[o->initial], when_name(o));
    } else if (o->type == KVQ_OPTION_TEXT && *o->initial_text) {
        put(&help, " (default %s; %s)", o->initial_text, when_name(o));
    } else if (o->type != KVQ_OPTION_TEXT && o->type != KVQ_OPTION_IDS) {
        kvq__size_text(value, sizeof value, o->initial, o->type);
        put(&help, " (default %s; %s)", value, when_name(o));
    } else {
        put(&help, " (%s)", when_name(o));
    }
    put_row(out, left, text);
}

void kvq__config_help(char *text, size_t size)
{
    struct out out = {text, size};
    char left[64];
    put(&out, "usage: kvqd [flags]\n\n"
              "Owns the quantized KV caches of LLM sessions and computes attention over them.\n"
              "Engines reach it through libkvq, people through kvqctl.\n\n");
    for (size_t i = 0; i < SPECIALS; i++) {
        const struct special *s = &specials[i];
        snprintf(left, sizeof left, "%s%s%s%s%s", s->brief ? s->brief : "", s->brief ? ", " : "",
                 s->name, s->argument ? " " : "", s->argument ? s->argument : "");
        put_row(&out, left, s->help);
    }
    put(&out, "\nOptions. Each may also stand in the file, as `pool_bytes = 30gb`, or in the\n"
              "environment, as KVQD_POOL_BYTES=30gb. Flags win over the environment, and the\n"
              "environment over the file. Sizes are whole numbers with b, kb, mb, gb or tb\n"
              "(powers of 1024). SIGHUP and kvqctl config reload read the file again: options\n"
              "marked live then take effect, those marked restart at the next start.\n\n");
    for (const struct kvq__option *o = kvq__options; o->name; o++)
        put_option(&out, o);
    put(&out,
        "\nIn the file, a section says who may use a namespace besides administrators, and\n"
        "how much it may hold; other users have the namespace uid-N of their own.\n\n"
        "  [namespace team-a]\n  uids = 1000, 1001\n  gids = 2000\n  host_bytes = 10gb\n"
        "  device_bytes = 4gb\n  disk_bytes = 100gb\n  table_bytes = 1gb\n  max_sessions = 100\n"
        "  share_prefixes_with = team-b\n\n"
        "Another section is a format of your own, which sessions ask for by name: K as in\n"
        "one format and V as in another (or both as in `base`), with single stages\n"
        "changed, and other formats for some layers. `kvqctl format list` shows them.\n\n"
        "  [format mymix]\n  k = oscar2-g64\n  v = innerq-hybrid\n  recent = 64\n"
        "  layers = 0-1:k8v4, 31:int8\n\n"
        "And another one is somebody who comes from another machine with a key, to\n"
        "control_address. Roles are read, operate and admin.\n\n"
        "  [key alice]\n  public = 64 hexadecimal digits\n  role = operate\n\n"
        "SIGTERM and SIGINT refuse new work, finish what runs, and leave; a second one\n"
        "leaves at once. SIGHUP reopens the log file and reads the configuration again.\n");
}

static void put_ids(struct out *out, const struct kvq_config_ids *ids)
{
    for (uint32_t i = 0; i < ids->n; i++)
        put(out, "%s%u", i ? ", " : "", ids->id[i]);
}

static void put_whole(struct out *out, const struct kvq__option *o, uint64_t number)
{
    char value[32];
    if (o->type == KVQ_OPTION_WORD)
        snprintf(value, sizeof value, "%s", o->words[number]);
    else
        kvq__size_text(value, sizeof value, number, o->type);
    put(out, "%s", value);
}

static void put_value(struct out *out, const struct kvq_config *config, const struct kvq__option *o)
{
    const char *field = (const char *)config + o->offset;
    if (o->type == KVQ_OPTION_TEXT)
        put(out, "%s", field);
    else if (o->type == KVQ_OPTION_IDS)
        put_ids(out, (const struct kvq_config_ids *)field);
    else
        put_whole(out, o,
                  o->size == sizeof(bool) ? *(const bool *)field : *(const uint64_t *)field);
}

void kvq__option_value(char *text, size_t size, const struct kvq_config *config,
                       const struct kvq__option *o)
{
    struct out out = {text, size};
    *text = 0;
    put_value(&out, config, o);
}

void kvq__option_initial(char *text, size_t size, const struct kvq__option *o)
{
    struct out out = {text, size};
    *text = 0;
    if (o->type == KVQ_OPTION_TEXT)
        put(&out, "%s", o->initial_text);
    else if (o->type != KVQ_OPTION_IDS)
        put_whole(&out, o, o->initial);
}

const char *kvq__source_name(const struct kvq_config *config, size_t option, char *text,
                             size_t size)
{
    static const char *const names[] = {"default", "file", "environment", "flag", "command"};
    uint8_t source = config->source[option];
    const char *file = config->source_file[option];
    assert(source < sizeof names / sizeof *names);
    if (source == KVQ_FROM_FILE && *file)
        snprintf(text, size, "conf.d/%s", file);
    else
        snprintf(text, size, "%s", names[source]);
    return text;
}

// The stages one a line, then the ranges one a line.
static void put_own_format(struct out *out, const struct kvq_config *config, uint32_t index)
{
    const struct kvq_config_format *f = &config->formats[index];
    const struct kvq__own_format *own = &config->own_formats[index];
    assert(index < config->n_formats);

    static const char *const keys[] = {"base", "k", "v"};
    put(out, "\n[format %s]\n", own->name);
    for (int i = 0; i < KVQ_CONFIG_FORMAT_LAYERS; i++)
        if (f->names[i][0])
            put(out, "%s = %s\n", keys[i], f->names[i]);
    for (const char *at = f->stages; *at;) {
        int name = (int)strcspn(at, "="), length = (int)strcspn(at, ":");
        put(out, "%.*s = %.*s\n", name, at, length - name - 1, at + name + 1);
        at += length + (at[length] == ':');
    }
    for (uint32_t i = 0; i < own->n_ranges; i++) {
        // What a format of this file has behind '@' stands in its own section.
        const struct kvq__layer_range *range = &own->ranges[i];
        const struct kvq__own_format *other = kvq__config_own_format(config, range->row.name);
        put(out, "layers = %u-%u:%s\n", range->first, range->last,
            other ? other->name : range->row.name);
    }
}

void kvq__format_section(char *text, size_t size, const struct kvq_config *config, uint32_t index)
{
    struct out out = {text, size};
    put_own_format(&out, config, index);
}

enum { KEY_UIDS, KEY_GIDS, KEY_SIZES, KEY_SESSIONS = KEY_SIZES + 4, KEY_SHARE };

const char *kvq__namespace_key(unsigned key)
{
    static const char *const keys[] = {
        "uids",       "gids",        "host_bytes",   "device_bytes",
        "disk_bytes", "table_bytes", "max_sessions", "share_prefixes_with"};
    return key < sizeof keys / sizeof *keys ? keys[key] : NULL;
}

void kvq__namespace_value(char *text, size_t size, const struct kvq_config *config,
                          const struct kvq_config_namespace *ns, unsigned key)
{
    const uint64_t sizes[] = {ns->host_bytes, ns->device_bytes, ns->disk_bytes, ns->table_bytes};
    struct out out = {text, size};
    char value[32];
    *text = 0;
    if (key == KEY_UIDS || key == KEY_GIDS) {
        put_ids(&out, key == KEY_UIDS ? &ns->uids : &ns->gids);
    } else if (key == KEY_SESSIONS) {
        put(&out, "%llu", (unsigned long long)kvq__config_sessions(config, ns));
    } else if (key == KEY_SHARE) {
        for (uint32_t i = 0; i < ns->n_share_with; i++)
            put(&out, "%s%s", i ? ", " : "", ns->share_with[i]);
    } else {
        kvq__size_text(value, sizeof value, sizes[key - KEY_SIZES], KVQ_OPTION_SIZE);
        put(&out, "%s", value);
    }
}

static void put_namespace(struct out *out, const struct kvq_config *config,
                          const struct kvq_config_namespace *ns)
{
    char value[KVQ_MAX_SHARE_WITH * (KVQ_NAME_BYTES + 2)];
    const char *key;
    put(out, "\n[namespace %s]\n", ns->name);
    for (unsigned i = 0; (key = kvq__namespace_key(i)); i++) {
        kvq__namespace_value(value, sizeof value, config, ns, i);
        if (i != KEY_SHARE || *value)
            put(out, "%s = %s\n", key, value);
    }
}

static void put_key(struct out *out, const struct kvq_config_key *k)
{
    char value[96];
    const char *key;
    put(out, "\n[key %s]\n", k->name);
    for (unsigned i = 0; (key = kvq__config_key_key(i)); i++) {
        kvq__config_key_value(value, sizeof value, k, i);
        put(out, "%s = %s\n", key, value);
    }
}

void kvq__config_print(const struct kvq_config *config, char *text, size_t size)
{
    struct out out = {text, size};
    char source[KVQ_CONFIG_NAME + 16];
    for (const struct kvq__option *o = kvq__options; o->name; o++) {
        kvq__source_name(config, (size_t)(o - kvq__options), source, sizeof source);
        put(&out, "# %s, %s\n%s = ", source, when_name(o), kvq__option_name(o));
        put_value(&out, config, o);
        put(&out, "\n");
    }
    for (uint32_t i = 0; i < config->n_namespaces; i++)
        put_namespace(&out, config, &config->namespaces[i]);
    for (uint32_t i = 0; i < config->n_formats; i++)
        put_own_format(&out, config, i);
    for (uint32_t i = 0; i < config->n_keys; i++)
        put_key(&out, &config->keys[i]);
}
