// SPDX-License-Identifier: Apache-2.0
//
// The table of options, and how values become part of the configuration. The file's grammar is
// in file.c.
#include "daemon/config/config.h"

#include <assert.h>
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config/internal.h"
#include "daemon/config/machine.h"
#include "daemon/log/log.h"
#include "proto/nearest.h"
#include "proto/status.h"

static const char *const bool_words[] = {"no", "yes", NULL};
static const char *const level_words[] = {"error", "warn", "info", "debug", NULL};
static const char *const huge_words[] = {"auto", "off", "require", NULL};
// A namespace's extents become as large as that so many make up the host's pool: each costs a
// descriptor and a mapping in each client that attends. They begin small (core/mem/extent.h).
enum { LEAST_GIVEN = 2 << 20, LEAST_EXTENT = 8 << 20, MOST_EXTENT = 64 << 20 };
enum { USUAL_EXTENTS = 1024 };

static const char *const backend_words[] = {"auto", "cpu", "gpu", "emu", NULL};
static const char *const path_words[] = {"exact", "fast", NULL};

#define FIELD(name) #name, offsetof(struct kvq_config, name), sizeof((struct kvq_config *)0)->name

#define LIVE    KVQ_OPTION_LIVE
#define RESTART KVQ_OPTION_RESTART

const struct kvq__option kvq__options[] = {
    {FIELD(runtime_dir), KVQ_OPTION_TEXT, "PATH", RESTART, .initial_text = "",
     .help = "directory of sockets and lock; $XDG_RUNTIME_DIR/kvqd, else /run/kvqd"},
    {FIELD(runtime_mode), KVQ_OPTION_MODE, "MODE", RESTART, .initial = 0750, .max = 0777,
     .help = "permissions of runtime_dir; who may enter it may connect"},
    {FIELD(runtime_group), KVQ_OPTION_TEXT, "GROUP", RESTART, .initial_text = "",
     .help = "group that owns runtime_dir; empty: the daemon's own"},
    {FIELD(pool_bytes), KVQ_OPTION_SIZE, "SIZE", RESTART, .initial = 0, .max = 1ull << 46,
     .help = "host memory for caches; 0: a quarter of the machine's, or of what its control group "
             "allows"},
    {FIELD(extent_bytes), KVQ_OPTION_SIZE, "SIZE", RESTART, .max = 1ull << 30,
     .help =
         "most memory that a pool hands to a namespace at once, a multiple of 2mb; 0: 64mb with "
         "GPUs, else 8mb to 64mb by pool_bytes"},
    {FIELD(huge_pages), KVQ_OPTION_WORD, "WORD", RESTART, .words = huge_words,
     .help =
         "use reserved huge pages (vm.nr_hugepages), where the kernel gives no transparent ones"},
    {FIELD(backend), KVQ_OPTION_WORD, "WORD", RESTART, .words = backend_words,
     .help = "gpu: do not start without a GPU; auto: use GPUs if there are any; emu: a software "
             "GPU, for tests"},
    {FIELD(gpus), KVQ_OPTION_TEXT, "UUID,..", RESTART, .initial_text = "",
     .help = "GPUs that may hold sessions (nvidia-smi -L lists them); empty: all"},
    {FIELD(gpu_bytes), KVQ_OPTION_SIZE, "SIZE", RESTART, .max = 1ull << 46,
     .help = "memory for caches on each GPU; 0: half of what is free at start"},
    {FIELD(gpu_driver), KVQ_OPTION_TEXT, "PATH", RESTART, .initial_text = "",
     .help = "the GPU driver's library; empty: libcuda.so.1"},
    {FIELD(workers), KVQ_OPTION_NUMBER, "N", RESTART, .max = KVQ_MAX_WORKERS,
     .help = "threads that compute, the poller included; 0: usable CPUs, from 8 on one less"},
    {FIELD(pin), KVQ_OPTION_WORD, "WORD", RESTART, .words = bool_words,
     .help = "bind each worker to a CPU of its own"},
    {FIELD(spin_us), KVQ_OPTION_NUMBER, "N", LIVE, .initial = 1000, .max = 1000000,
     .help = "microseconds that the poller spins at most before it sleeps; 0: it never spins"},
    {FIELD(keep_seconds), KVQ_OPTION_NUMBER, "N", LIVE, .initial = 600, .max = 1ull << 32,
     .help = "seconds that a named session outlives its last user"},
    {FIELD(prefix_keep_seconds), KVQ_OPTION_NUMBER, "N", LIVE, .initial = 3600, .max = 1ull << 32,
     .help = "seconds that a prefix outlives its last use, while there is room; 0: forever"},
    {FIELD(drain_ms), KVQ_OPTION_NUMBER, "N", LIVE, .initial = 5000, .max = 600000,
     .help = "milliseconds that running requests may take after SIGTERM"},
    {FIELD(max_clients), KVQ_OPTION_NUMBER, "N", LIVE, .initial = 256, .min = 1,
     .max = KVQ_MAX_CLIENTS, .help = "clients that may be attached at once"},
    {FIELD(host_bytes), KVQ_OPTION_SIZE, "SIZE", LIVE, .max = 1ull << 46,
     .help = "host memory of a namespace without a section of its own; 0: no limit"},
    {FIELD(device_bytes), KVQ_OPTION_SIZE, "SIZE", LIVE, .max = 1ull << 46,
     .help = "GPU memory of a namespace without a section of its own; 0: no limit"},
    {FIELD(disk_bytes), KVQ_OPTION_SIZE, "SIZE", LIVE, .max = 1ull << 50,
     .help = "bytes in storage_dir of a namespace without a section of its own; 0: no limit"},
    {FIELD(max_sessions), KVQ_OPTION_NUMBER, "N", LIVE, .initial = 65536, .max = UINT32_MAX,
     .help = "sessions of a namespace without a section of its own; 0: no limit"},
    {FIELD(table_bytes), KVQ_OPTION_SIZE, "SIZE", LIVE, .max = 1ull << 46,
     .help = "host memory for page tables, token ids and the like of a namespace without a section "
             "of its own; 0: a quarter of its host_bytes or the pool, 64mb at least"},
    {FIELD(client_bytes), KVQ_OPTION_SIZE, "SIZE", LIVE, .initial = 4ull << 30, .min = 1 << 20,
     .max = KVQ_MAX_BUFFER_BYTES, .help = "bytes of all buffers of one client"},
    {FIELD(buffer_bytes), KVQ_OPTION_SIZE, "SIZE", LIVE, .max = 1ull << 46,
     .help = "bytes of all buffers of all clients; 0: half of the machine's memory, or of what its "
             "control group allows; or client_bytes, where that was set and is more"},
    {FIELD(fast), KVQ_OPTION_WORD, "WORD", LIVE, .words = path_words, .initial = 1,
     .alias = "attention", .help = "attention path of sessions that do not choose one"},
    {FIELD(codebook_dir), KVQ_OPTION_TEXT, "PATH", RESTART, .initial_text = "",
     .help = "folder of codebooks: NAME.kvqbook serves formats FORMAT@NAME; empty: none"},
    {FIELD(storage_dir), KVQ_OPTION_TEXT, "PATH", RESTART, .initial_text = "",
     .help = "folder in which sessions are saved; empty: nothing is saved"},
    {FIELD(storage_bytes), KVQ_OPTION_SIZE, "SIZE", RESTART, .max = 1ull << 50,
     .help = "bytes that files in storage_dir may take; 0: no cap"},
    {FIELD(save_idle_seconds), KVQ_OPTION_NUMBER, "N", LIVE, .max = 1ull << 32,
     .help = "save named sessions that are idle for so many seconds; 0: never"},
    {FIELD(evict_idle_ms), KVQ_OPTION_NUMBER, "N", LIVE, .initial = 1000, .max = 3600000,
     .help = "milliseconds that a session must be idle before it makes room for others"},
    {FIELD(evict_above), KVQ_OPTION_NUMBER, "PERCENT", LIVE, .initial = 90, .max = 100,
     .help = "percent of a pool in use above which idle sessions leave it early; 0 or 100: never"},
    {FIELD(park_idle_seconds), KVQ_OPTION_NUMBER, "N", LIVE, .max = 1ull << 32,
     .help = "move sessions that are idle for so many seconds to storage_dir; 0: only for room"},
    {FIELD(pack_error_ms), KVQ_OPTION_NUMBER, "N", LIVE, .initial = 1000, .max = 3600000,
     .help = "milliseconds between two packed units that are compared with their values; 0: never"},
    {FIELD(save_on_drain), KVQ_OPTION_WORD, "WORD", LIVE, .words = bool_words, .initial = 1,
     .help = "save named sessions before the daemon ends"},
    {FIELD(remote_endpoint), KVQ_OPTION_TEXT, "URL", RESTART, .initial_text = "",
     .help = "S3-compatible store for pushed sessions, https://HOST[:PORT]; empty: none"},
    {FIELD(remote_bucket), KVQ_OPTION_TEXT, "NAME", RESTART, .initial_text = "",
     .help = "bucket of the remote store"},
    {FIELD(remote_prefix), KVQ_OPTION_TEXT, "PATH", RESTART, .initial_text = "",
     .help = "prefix of all keys in the bucket"},
    {FIELD(remote_region), KVQ_OPTION_TEXT, "NAME", RESTART, .initial_text = "",
     .help = "region of the remote store; empty: us-east-1, which most stores accept"},
    {FIELD(remote_ca_file), KVQ_OPTION_TEXT, "PATH", RESTART, .initial_text = "",
     .help = "certificates to trust for the remote store; empty: the system's"},
    {FIELD(remote_virtual_host), KVQ_OPTION_WORD, "WORD", RESTART, .words = bool_words,
     .help = "name the bucket in the host's name instead of the path"},
    {FIELD(remote_keys_file), KVQ_OPTION_TEXT, "PATH", RESTART, .initial_text = "",
     .help = "file of keys as the AWS tools write it; empty: AWS_ACCESS_KEY_ID and its companions"},
    {FIELD(remote_keys_section), KVQ_OPTION_TEXT, "NAME", RESTART, .initial_text = "",
     .help = "section of remote_keys_file; empty: default"},
    {FIELD(remote_part_bytes), KVQ_OPTION_SIZE, "SIZE", RESTART, .initial = 16 << 20,
     .min = 64 << 10, .max = 256 << 20,
     .help = "bytes of a part; each connection of a transfer holds one in memory"},
    {FIELD(remote_connections), KVQ_OPTION_NUMBER, "N", RESTART, .initial = 4, .min = 1, .max = 16,
     .help = "connections of a transfer, which send or fetch parts side by side"},
    {FIELD(remote_stall_seconds), KVQ_OPTION_NUMBER, "N", RESTART, .initial = 60, .min = 1,
     .max = 3600,
     .help = "seconds after which a request without progress is given up and tried again"},
    {FIELD(read_uids), KVQ_OPTION_IDS, "UID,..", LIVE,
     .help = "users with the role read: they see everything"},
    {FIELD(read_gids), KVQ_OPTION_IDS, "GID,..", LIVE, .help = "groups with that role"},
    {FIELD(operate_uids), KVQ_OPTION_IDS, "UID,..", LIVE,
     .help = "users with the role operate: they also save, move and end everybody's sessions"},
    {FIELD(operate_gids), KVQ_OPTION_IDS, "GID,..", LIVE, .help = "groups with that role"},
    {FIELD(admin_uids), KVQ_OPTION_IDS, "UID,..", LIVE,
     .help =
         "users with the role admin, besides root and the daemon's own: they may do everything"},
    {FIELD(admin_gids), KVQ_OPTION_IDS, "GID,..", LIVE, .help = "groups with that role"},
    {FIELD(control_address), KVQ_OPTION_TEXT, "ADDRESS", RESTART, .initial_text = "",
     .help = "address and port for kvqctl on other machines, as 0.0.0.0:9648, for those who have a "
             "key ([key NAME]); empty: none"},
    {FIELD(control_key_file), KVQ_OPTION_TEXT, "PATH", RESTART, .initial_text = "",
     .help = "the daemon's key for control_address, made by kvqctl key make"},
    {FIELD(http), KVQ_OPTION_WORD, "WORD", RESTART, .words = bool_words, .initial = 1,
     .help =
         "serve metrics, health and lists by HTTP, at http.sock in runtime_dir and http_address"},
    {FIELD(http_address), KVQ_OPTION_TEXT, "ADDRESS", RESTART, .initial_text = "127.0.0.1:9647",
     .help = "loopback address and port that HTTP is served at as well; empty: none"},
    {FIELD(log_level), KVQ_OPTION_WORD, "WORD", LIVE, .initial = KVQ_LOG_INFO, .words = level_words,
     .help =
         "level of the least important lines in the log; debug: also what was asked and refused"},
    {FIELD(log_file), KVQ_OPTION_TEXT, "PATH", LIVE, .initial_text = "",
     .help = "log file; empty: stderr"},
    {.name = NULL},
};
static_assert(sizeof kvq__options / sizeof *kvq__options <= KVQ_CONFIG_OPTIONS, "source[]");
static_assert(KVQ_CONFIG_OPTIONS <= 64, "bits of what the file has set");

bool kvq__config_was_given(const struct kvq_config *config, const char *name)
{
    const struct kvq__option *option = kvq__option_find(name);
    assert(option);
    return config->source[option - kvq__options] != KVQ_FROM_DEFAULT;
}

const char *kvq__option_name(const struct kvq__option *option)
{
    return option->alias ? option->alias : option->name;
}

// Names are the same with '-' and '_' and in any case, so that flags and environment match.
bool kvq__same_name(const char *a, const char *b)
{
    for (; *a && *b; a++, b++) {
        char x = *a == '-' ? '_' : *a, y = *b == '-' ? '_' : *b;
        x = x >= 'A' && x <= 'Z' ? (char)(x + 32) : x;
        y = y >= 'A' && y <= 'Z' ? (char)(y + 32) : y;
        if (x != y)
            return false;
    }
    return *a == *b;
}

const struct kvq__option *kvq__option_find(const char *name)
{
    for (const struct kvq__option *o = kvq__options; o->name; o++)
        if (kvq__same_name(kvq__option_name(o), name))
            return o;
    return NULL;
}

const char *kvq__option_nearest(const char *name)
{
    char given[64];
    const char *best = NULL;
    snprintf(given, sizeof given, "%s", name);
    for (char *c = given; *c; c++)
        *c = *c == '-' ? '_' : *c >= 'A' && *c <= 'Z' ? (char)(*c + 32) : *c;
    for (const struct kvq__option *o = kvq__options; o->name; o++) {
        const char *option = kvq__option_name(o);
        if (given[0] && strncmp(option, given, strlen(given)) == 0)
            return option; // it begins so
        if (kvq_word_resembles(given, option) &&
            (!best || kvq_word_distance(given, option) < kvq_word_distance(given, best)))
            best = option;
    }
    return best;
}

int kvq__config_refuse(char *text, const char *where, const char *format, ...)
{
    va_list arguments;
    int used = snprintf(text, KVQ_TEXT_BYTES, "%.200s: ", where);
    assert(used >= 0 && used < KVQ_TEXT_BYTES);
    va_start(arguments, format);
    vsnprintf(text + used, KVQ_TEXT_BYTES - (size_t)used, format, arguments);
    va_end(arguments);
    return KVQ_E_INVALID;
}

// Bytes of a unit's name, 0 if unknown. All units are powers of 1,024, whatever their spelling.
static uint64_t unit_bytes(const char *unit)
{
    static const char letters[] = "kmgt";
    if (!*unit || kvq__same_name(unit, "b"))
        return 1;
    char first[2] = {unit[0], 0}, letter[2] = {0};
    for (int i = 0; i < 4; i++) {
        letter[0] = letters[i];
        bool known = !unit[1] || kvq__same_name(unit + 1, "b") || kvq__same_name(unit + 1, "ib");
        if (kvq__same_name(first, letter) && known)
            return 1ull << (10 * (i + 1));
    }
    return 0;
}

// A whole decimal (or, for modes, octal) number with what follows it, or false.
static bool parse_number(const char *value, int base, uint64_t *number, const char **rest)
{
    char *end;
    if (*value < '0' || *value > '9')
        return false;
    errno = 0;
    *number = strtoull(value, &end, base);
    *rest = end + strspn(end, " ");
    return errno == 0;
}

int kvq__parse_size(const char *where, const char *name, const char *value, uint64_t *bytes,
                    char *text)
{
    const char *unit;
    if (!parse_number(value, 10, bytes, &unit) || unit_bytes(unit) == 0)
        return kvq__config_refuse(text, where,
                                  "%s is \"%.64s\"; a size is a whole number with b, kb, mb, gb or "
                                  "tb, as in 64mb",
                                  name, value);
    if (*bytes > UINT64_MAX / unit_bytes(unit))
        return kvq__config_refuse(
            text, where, "%s is \"%.64s\", which is more than any machine has", name, value);
    *bytes *= unit_bytes(unit);
    return 0;
}

int kvq__parse_ids(const char *where, const char *name, const char *value,
                   struct kvq_config_ids *ids, char *text)
{
    ids->n = 0;
    for (const char *at = value; *at;) {
        uint64_t id;
        const char *rest;
        at += strspn(at, " ");
        if (!parse_number(at, 10, &id, &rest) || id >= UINT32_MAX || (*rest && *rest != ','))
            return kvq__config_refuse(text, where,
                                      "%s is \"%.64s\"; give numbers below 4294967295 with commas "
                                      "between them, as `id -u NAME` prints them",
                                      name, value);
        if (ids->n == KVQ_MAX_NAMESPACE_IDS)
            return kvq__config_refuse(text, where, "%s lists more than %d numbers; use a group",
                                      name, KVQ_MAX_NAMESPACE_IDS);
        ids->id[ids->n++] = (uint32_t)id;
        at = *rest == ',' ? rest + 1 : rest;
    }
    return 0;
}

// For options of a number's type: within [min, max].
static int check_option_range(const struct kvq__option *o, const char *where, const char *value,
                              uint64_t number, char *text)
{
    assert(o->min <= o->max);
    if (number >= o->min && number <= o->max)
        return 0;
    char least[32], most[32];
    kvq__size_text(least, sizeof least, o->min, o->type);
    kvq__size_text(most, sizeof most, o->max, o->type);
    return kvq__config_refuse(text, where, "%s is \"%.64s\"; allowed is %s to %s",
                              kvq__option_name(o), value, least, most);
}

static int parse_word(const struct kvq__option *o, const char *where, const char *value,
                      uint64_t *number, char *text)
{
    char allowed[128] = "";
    size_t used = 0;
    for (unsigned i = 0; o->words[i]; i++) {
        if (kvq__same_name(o->words[i], value)) {
            *number = i;
            return 0;
        }
        used += (size_t)snprintf(allowed + used, sizeof allowed - used, "%s%s", i ? ", " : "",
                                 o->words[i]);
    }
    assert(used < sizeof allowed);
    return kvq__config_refuse(text, where, "%s is \"%.64s\"; allowed is %s", kvq__option_name(o),
                              value, allowed);
}

static int parse_text(const struct kvq__option *o, const char *where, const char *value,
                      char *field, char *text)
{
    size_t length = strlen(value);
    assert(o->type == KVQ_OPTION_TEXT);
    if (length >= o->size)
        return kvq__config_refuse(text, where, "%s is %zu bytes long; allowed is %zu",
                                  kvq__option_name(o), length, o->size - 1);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)value[i] < 0x20 || value[i] == 0x7f)
            return kvq__config_refuse(text, where, "%s holds a control character",
                                      kvq__option_name(o));
    memcpy(field, value, length + 1);
    return 0;
}

int kvq__option_set(struct kvq_config *config, const struct kvq__option *o,
                    enum kvq_config_source source, const char *where, const char *value, char *text)
{
    char *field = (char *)config + o->offset;
    const char *name = kvq__option_name(o), *rest = "";
    uint64_t number = 0;
    int error = 0;
    assert(o->offset + o->size <= sizeof *config && o - kvq__options < KVQ_CONFIG_OPTIONS);
    switch (o->type) {
    case KVQ_OPTION_TEXT:
        error = parse_text(o, where, value, field, text);
        break;
    case KVQ_OPTION_IDS:
        error = kvq__parse_ids(where, name, value, (struct kvq_config_ids *)field, text);
        break;
    case KVQ_OPTION_SIZE:
        error = kvq__parse_size(where, name, value, &number, text);
        break;
    case KVQ_OPTION_WORD:
        error = parse_word(o, where, value, &number, text);
        break;
    case KVQ_OPTION_NUMBER:
    case KVQ_OPTION_MODE:
        if (!parse_number(value, o->type == KVQ_OPTION_MODE ? 8 : 10, &number, &rest) || *rest)
            error = kvq__config_refuse(text, where, "%s is \"%.64s\"; give a whole %snumber", name,
                                       value, o->type == KVQ_OPTION_MODE ? "octal " : "");
        break;
    }
    if (error == 0 && o->type != KVQ_OPTION_TEXT && o->type != KVQ_OPTION_IDS) {
        error = o->type == KVQ_OPTION_WORD ? 0 : check_option_range(o, where, value, number, text);
        if (error == 0 && o->size == sizeof(bool))
            *(bool *)field = number != 0;
        else if (error == 0)
            *(uint64_t *)field = number;
    }
    if (error == 0)
        config->source[o - kvq__options] = (uint8_t)source;
    return error;
}

static const char *environment_value(char *const *environment, const char *name)
{
    size_t length = strlen(name);
    for (; environment && *environment; environment++)
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=')
            return *environment + length + 1;
    return NULL;
}

void kvq__config_defaults(struct kvq_config *config, char *const *environment)
{
    memset(config, 0, sizeof *config);
    config->ready_fd = config->lifetime_fd = -1;
    for (const struct kvq__option *o = kvq__options; o->name; o++) {
        char *field = (char *)config + o->offset;
        if (o->type == KVQ_OPTION_TEXT)
            snprintf(field, o->size, "%s", o->initial_text);
        else if (o->type != KVQ_OPTION_IDS && o->size == sizeof(bool))
            *(bool *)field = o->initial;
        else if (o->type != KVQ_OPTION_IDS && o->size == sizeof(uint64_t))
            *(uint64_t *)field = o->initial;
    }
    const char *xdg = environment_value(environment, "XDG_RUNTIME_DIR");
    snprintf(config->runtime_dir, sizeof config->runtime_dir, "%s/kvqd",
             xdg && *xdg ? xdg : "/run");
}

static int refuse_variable(const char *name, char *text)
{
    char nearest[64];
    const char *option = kvq__option_nearest(name + 5);
    assert(strncmp(name, "KVQD_", 5) == 0);
    if (!option)
        return kvq__config_refuse(text, name,
                                  "this variable is not known; kvqd --help lists all options");
    snprintf(nearest, sizeof nearest, "%s", option);
    for (char *c = nearest; *c; c++)
        *c = *c >= 'a' && *c <= 'z' ? (char)(*c - 32) : *c;
    return kvq__config_refuse(text, name, "this variable is not known; the nearest is KVQD_%s",
                              nearest);
}

static int load_environment(struct kvq_config *config, char *const *environment, char *text)
{
    for (; environment && *environment; environment++) {
        char name[64];
        const char *value = strchr(*environment, '=');
        if (strncmp(*environment, "KVQD_", 5) != 0 || !value)
            continue;
        size_t length = (size_t)(value - *environment);
        snprintf(name, sizeof name, "%.*s", (int)length, *environment);
        if (strcmp(name, "KVQD_CONFIG") == 0)
            continue;
        const struct kvq__option *o = kvq__option_find(name + 5);
        if (!o)
            return refuse_variable(name, text);
        int error = kvq__option_set(config, o, KVQ_FROM_ENVIRONMENT, name, value + 1, text);
        if (error)
            return error;
    }
    return 0;
}

// One walk over the flags. With only_special those are handled that say where to look (--config)
// and what to do; without it the options of the table.
static int load_flags(struct kvq_config *config, int argc, char *const *argv, bool only_special,
                      char *text)
{
    for (int i = 1; i < argc; i++) {
        struct kvq__flag flag;
        int error = kvq__flag_next(argc, argv, &i, &flag, text);
        if (error == 0 && flag.option && !only_special)
            error =
                kvq__option_set(config, flag.option, KVQ_FROM_FLAG, flag.name, flag.value, text);
        else if (error == 0 && !flag.option && only_special)
            error = kvq__flag_special(config, &flag, text);
        if (error)
            return error;
    }
    return 0;
}

// A path from / on, for kvqctl, which has another folder. What is not there stays as it is.
static void make_whole(char file[KVQ_CONFIG_PATH])
{
    char *whole = file[0] && file[0] != '/' ? realpath(file, NULL) : NULL;
    if (whole && strlen(whole) < KVQ_CONFIG_PATH)
        memcpy(file, whole, strlen(whole) + 1);
    free(whole);
}

int kvq__config_load(struct kvq_config *config, int argc, char *const *argv,
                     char *const *environment, char *text)
{
    kvq__config_defaults(config, environment);
    const char *file = environment_value(environment, "KVQD_CONFIG");
    if (file && strlen(file) >= sizeof config->file)
        return kvq__config_refuse(text, "KVQD_CONFIG", "the path is longer than %zu bytes",
                                  sizeof config->file - 1);
    snprintf(config->file, sizeof config->file, "%s", file ? file : "");
    int error = load_flags(config, argc, argv, true, text);
    if (error || config->help || config->version)
        return error;
    make_whole(config->file);
    if (config->file[0])
        error = kvq__config_read_files(config, text);
    if (error == 0)
        error = load_environment(config, environment, text);
    if (error == 0)
        error = load_flags(config, argc, argv, false, text);
    error = error ? error : kvq__config_resolve(config, text);
    return error ? error : kvq__config_check(config, text);
}

uint32_t kvq__usual_workers(uint32_t cpus)
{
    assert(cpus > 0);
    return cpus < 8 ? cpus : cpus - 1;
}

uint32_t kvq__usable_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return (uint32_t)CPU_COUNT(&set);
    return 1;
}

uint64_t kvq__usual_buffer_bytes(const struct kvq_config *config, uint64_t memory)
{
    if (!kvq__config_was_given(config, "client_bytes") || config->client_bytes < memory / 2)
        return memory / 2;
    return config->client_bytes < memory ? config->client_bytes : memory;
}

bool kvq__config_sets_buffer_bytes(const struct kvq_config *config,
                                   const struct kvq__machine *machine)
{
    return kvq__config_was_given(config, "buffer_bytes") &&
           config->buffer_bytes != kvq__usual_buffer_bytes(config, kvq__machine_most(machine));
}

uint64_t kvq__usual_extent(uint64_t pool_bytes)
{
    uint64_t bytes = LEAST_EXTENT;
    while (bytes < MOST_EXTENT && pool_bytes / bytes > USUAL_EXTENTS)
        bytes *= 2;
    return bytes;
}

static int resolve_pool(struct kvq_config *config, uint64_t memory, char *text)
{
    uint64_t pool = config->pool_bytes ? config->pool_bytes : memory / 4;
    uint64_t extent = config->extent_bytes ? config->extent_bytes : kvq__usual_extent(pool);
    if (extent % LEAST_GIVEN)
        return kvq__config_refuse(text, "extent_bytes", "%llu is not a multiple of 2mb",
                                  (unsigned long long)extent);
    if (config->pool_bytes == 0)
        config->pool_bytes = pool / extent * extent;
    if (config->pool_bytes < extent)
        return kvq__config_refuse(
            text, "pool_bytes",
            "%llu is less than one extent (of %llu bytes); raise it, or lower extent_bytes",
            (unsigned long long)config->pool_bytes, (unsigned long long)extent);
    config->host_extent_bytes = extent;
    config->gpu_extent_bytes = config->extent_bytes                ? config->extent_bytes
                               : config->pool_bytes >= MOST_EXTENT ? MOST_EXTENT
                                                                   : extent;
    return 0;
}

int kvq__config_resolve(struct kvq_config *config, char *text)
{
    struct kvq__machine machine;
    kvq__machine_read("", &machine);
    uint64_t memory = kvq__machine_most(&machine);
    int wrong = resolve_pool(config, memory, text);
    if (wrong)
        return wrong;
    if (config->buffer_bytes == 0)
        config->buffer_bytes = kvq__usual_buffer_bytes(config, memory);
    uint32_t cpus = kvq__usable_cpus();
    if (config->workers == 0)
        config->workers = kvq__usual_workers(cpus);
    if (config->workers > KVQ_MAX_WORKERS)
        config->workers = KVQ_MAX_WORKERS;
    if (config->runtime_dir[0] != '/')
        return kvq__config_refuse(text, "runtime_dir", "\"%.64s\" is not an absolute path",
                                  config->runtime_dir);
    if (strlen(config->runtime_dir) > KVQ_MAX_RUNTIME_DIR)
        return kvq__config_refuse(text, "runtime_dir",
                                  "%zu bytes long; allowed is %d, for socket paths are short",
                                  strlen(config->runtime_dir), KVQ_MAX_RUNTIME_DIR);
    int error = kvq__config_check_remote(config, text);
    return error ? error : kvq__config_check_keys(config, text);
}
