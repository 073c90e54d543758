// SPDX-License-Identifier: Apache-2.0
// The table of options, and the reading of the command line by it.
#include <assert.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "proto/limits.h"
#include "proto/nearest.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"

#define AT(FIELD) offsetof(struct kvq__ctl, FIELD)
#define FILTERS   "given at most 16 times"
static_assert(KVQ__CTL_MAX_FILTERS == 16, "FILTERS says another number");

const struct kvq__ctl_option kvq__ctl_options[] = {
    {"runtime-dir", "DIR", KVQ__CTL_TEXT, AT(runtime_dir), 0, 0, NULL,
     "where the daemon's sockets are (else $KVQ_RUNTIME_DIR, else that of\n"
     "$XDG_RUNTIME_DIR/kvqd and /run/kvqd in which there are some)",
     NULL},
    {"connect", "HOST:PORT", KVQ__CTL_TEXT, AT(connect), 0, 0, NULL,
     "a daemon on another machine, at its control_address (else\n"
     "$KVQ_CONNECT, else none); it needs --key",
     NULL},
    {"key", "FILE", KVQ__CTL_TEXT, AT(key_file), 0, 0, NULL,
     "this user's key for it (else $KVQ_KEY), by kvqctl key make", NULL},
    {"server", "HEX", KVQ__CTL_TEXT, AT(server), 0, 0, NULL,
     "key make: the daemon's public key, for a user's key", "key make"},
    {"namespace", "NAME", KVQ__CTL_TEXT, AT(ns), 0, 0, NULL,
     "sessions, prefixes or events of this namespace (default: lists,\n"
     "events: all; others: uid-N)",
     NULL},
    {"json", NULL, KVQ__CTL_FLAG, AT(json), 0, 0, NULL, "print JSON, for scripts", NULL},
    {"timeout", "MS", KVQ__CTL_INT, AT(timeout_ms), 1, 3600000, "1 to 3600000 milliseconds",
     "how long to wait for an answer (default 5000; commands that read or\n"
     "write files, or ask the remote store, wait longer)",
     NULL},
    {"interval", "S", KVQ__CTL_REAL, AT(interval), 0.1, 3600, "0.1 to 3600 seconds",
     "top: seconds between two updates (default 2)", "top"},
    {"count", "N", KVQ__CTL_ULONG, AT(count), 0, 1e9, "0 to 1000000000",
     "top, events: stop after N updates or events (default 0: never)", "top, events"},
    {"watch", "S", KVQ__CTL_REAL, AT(watch), 0.1, 3600, "0.1 to 3600 seconds",
     "status, lists: again every S seconds, until Ctrl-C", NULL},
    {"kind", "K[,K]", KVQ__CTL_TEXT, AT(event_kinds), 0, 0, NULL,
     "events: only those of these kinds", "events"},
    {"since", "TIME", KVQ__CTL_TEXT, AT(since), 0, 0, NULL,
     "events: also those of the last TIME (10min, 2h)", "events"},
    {"no-follow", NULL, KVQ__CTL_FLAG, AT(no_follow), 0, 0, NULL,
     "events: those that there are, without waiting for more", "events"},
    {"shard", "N", KVQ__CTL_INT, AT(shard), 0, KVQ_MAX_SHARDS - 1, "0 to 63",
     "session move, restore: only this shard", "session move, session restore"},
    {"shards", "N", KVQ__CTL_UNSIGNED, AT(shards), 1, KVQ_MAX_SHARDS, "1 to 64",
     "session restore: number of shards", "session restore"},
    {"wait", "MS", KVQ__CTL_UNSIGNED, AT(wait_ms), 1, 3600000, "1 to 3600000 milliseconds",
     "session move: how long to wait for steps to end (default 10000)\n"
     "drain: how long to wait for the daemon's end (default: forever)",
     "session move, drain"},
    {"now", NULL, KVQ__CTL_FLAG, AT(now), 0, 0, NULL,
     "shutdown: without letting steps end, and without saving", "shutdown"},
    {"again", NULL, KVQ__CTL_FLAG, AT(again), 0, 0, NULL,
     "session save: write an unchanged session, too;\n"
     "session push: send all of it, over what is there",
     "session save, session push"},
    {"as", "NAME", KVQ__CTL_TEXT, AT(as), 0, 0, NULL,
     "session import, pull: name of the session here", "session import, session pull"},
    {"from", "NAME", KVQ__CTL_TEXT, AT(from), 0, 0, NULL,
     "session pull: namespace on the remote store (default: as here)", "session pull, completion"},
    {"replace", NULL, KVQ__CTL_FLAG, AT(replace), 0, 0, NULL,
     "session import, pull: replace a saved session of that name;\n"
     "session export: overwrite the file",
     "session export, session import, session pull"},
    {"offline", "DIR", KVQ__CTL_TEXT, AT(offline), 0, 0, NULL,
     "storage verify: a storage that no daemon has open", "storage verify"},
    {"host-bytes", "SIZE", KVQ__CTL_LIMIT, 0, 0, 0, "a size, as 10gb, or none",
     "quota set: memory on the host (as 10gb; none: no limit)", "quota set"},
    {"device-bytes", "SIZE", KVQ__CTL_LIMIT, 1, 0, 0, "a size, as 10gb, or none",
     "quota set: memory on all GPUs together", "quota set"},
    {"disk-bytes", "SIZE", KVQ__CTL_LIMIT, 2, 0, 0, "a size, as 10gb, or none",
     "quota set: bytes of saved sessions", "quota set"},
    {"sessions", "N", KVQ__CTL_LIMIT, 3, 0, 0, "a number, or none",
     "quota set: sessions in memory, each shard counted;\n"
     "size: how many sessions (default 1)",
     "quota set, size"},
    {"table-bytes", "SIZE", KVQ__CTL_LIMIT, 4, 0, 0, "a size, as 10gb, or none",
     "quota set: page tables and token ids on the host", "quota set"},
    {"model", "DIR", KVQ__CTL_TEXT, AT(shape.model), 0, 0, NULL,
     "size: folder with the model's config.json, or that file; other\n"
     "options stand in for its numbers",
     "size"},
    {"format", "F[,F]", KVQ__CTL_TEXT, AT(shape.format), 0, 0, NULL,
     "size: format of the sessions, or several (kvqctl format list;\n"
     "formats.md in share/doc/kvqd)",
     "size"},
    {"layers", "N", KVQ__CTL_UNSIGNED, AT(shape.layers), 1, KVQ_MAX_LAYERS, "1 to 256",
     "size: layers of the model", "size"},
    {"kv-heads", "N", KVQ__CTL_UNSIGNED, AT(shape.kv_heads), 1, KVQ_MAX_HEADS, "1 to 256",
     "size: KV heads of a layer", "size"},
    {"head-dim", "N", KVQ__CTL_UNSIGNED, AT(shape.head_dim), 1, KVQ_MAX_HEAD_DIM, "1 to 256",
     "size: channels of a KV head (1 to 256; stored as 64, 128 or\n256)", "size"},
    {"tokens", "N", KVQ__CTL_ULONG, AT(shape.tokens), 1, KVQ_MAX_SESSION_TOKENS, "1 to 16777216",
     "size: tokens of a session", "size"},
    {"rollback", "N", KVQ__CTL_UNSIGNED, AT(shape.rollback), 0, KVQ_MAX_ROLLBACK, "0 to 1024",
     "size: max_rollback of the sessions (default 0)", "size"},
    {"window", "N", KVQ__CTL_UNSIGNED, AT(shape.window), 1, KVQ_MAX_SESSION_TOKENS, "1 to 16777216",
     "size: tokens that the layers see (default: all); with --model those\n"
     "with a sliding window",
     "size"},
    {"columns", "C[,C]", KVQ__CTL_TEXT, AT(columns), 0, 0, NULL,
     "lists: these columns (session list --help names a list's)", NULL},
    {"sort", "[-]C", KVQ__CTL_TEXT, AT(sort), 0, 0, NULL,
     "lists, top: by this column; with - the largest first", NULL},
    {"filter", "C=VALUE", KVQ__CTL_TEXTS, AT(filters), 0, 0, FILTERS,
     "lists: only these; also !=, <, >, ~ (holds the text). Again:\n"
     "all must hold. VALUE may be a size (2gb) or a duration (10min)",
     NULL},
    {"csv", NULL, KVQ__CTL_FLAG, AT(csv), 0, 0, NULL, "lists: comma-separated values", NULL},
    {"dry-run", NULL, KVQ__CTL_FLAG, AT(dry_run), 0, 0, NULL,
     "drop, remove, kick, ..: say what would go, and do nothing", NULL},
    {"exact", NULL, KVQ__CTL_FLAG, AT(exact), 0, 0, NULL,
     "session commands: NAME is the whole name, for scripts", NULL},
    {"help", NULL, KVQ__CTL_HELP, 0, 0, 0, NULL, "what a command does, or this", NULL},
    {"version", NULL, KVQ__CTL_VERSION, 0, 0, 0, NULL, "the version of kvqctl", NULL},
};

const size_t kvq__ctl_n_options = sizeof kvq__ctl_options / sizeof *kvq__ctl_options;

static_assert(sizeof kvq__ctl_options / sizeof *kvq__ctl_options <= 64, "a bit for each");

enum { N_OPTIONS = sizeof kvq__ctl_options / sizeof *kvq__ctl_options, FIRST = 256 };

// A number within the option's range. False: it is none.
static bool parse_number(const struct kvq__ctl_option *o, const char *text, double *number)
{
    char *end;
    errno = 0;
    *number = strtod(text, &end);
    bool whole = o->kind == KVQ__CTL_REAL || *number == floor(*number);
    return !errno && end != text && !*end && isfinite(*number) && whole && *number >= o->least &&
           *number <= o->most;
}

static bool take_number(struct kvq__ctl *ctl, const struct kvq__ctl_option *o, const char *text)
{
    double number;
    void *field = (char *)ctl + o->at;
    if (!parse_number(o, text, &number))
        return false;
    if (o->kind == KVQ__CTL_INT)
        *(int *)field = (int)number;
    else if (o->kind == KVQ__CTL_UNSIGNED)
        *(unsigned *)field = (unsigned)number;
    else if (o->kind == KVQ__CTL_ULONG)
        *(unsigned long *)field = (unsigned long)number;
    else
        *(double *)field = number;
    return true;
}

// False: there are as many as there may be.
static bool add_text(struct kvq__ctl_texts *texts, const char *value)
{
    if (texts->n == KVQ__CTL_MAX_FILTERS)
        return false;
    texts->texts[texts->n++] = value;
    return true;
}

// Takes one option into ctl. An exit status.
static int take_option(struct kvq__ctl *ctl, const struct kvq__ctl_option *o, char *value,
                       struct kvq__ctl_asked *asked)
{
    bool good = true;
    switch (o->kind) {
    case KVQ__CTL_FLAG:
        *(bool *)((char *)ctl + o->at) = true;
        break;
    case KVQ__CTL_TEXT:
        *(const char **)((char *)ctl + o->at) = value;
        break;
    case KVQ__CTL_TEXTS:
        good = add_text((struct kvq__ctl_texts *)((char *)ctl + o->at), value);
        break;
    case KVQ__CTL_LIMIT:
        good = kvq__ctl_quota_option(ctl, (int)o->at, value);
        break;
    case KVQ__CTL_HELP:
        asked->help = true;
        break;
    case KVQ__CTL_VERSION:
        asked->version = true;
        break;
    default:
        good = take_number(ctl, o, value);
    }
    ctl->given |= 1ull << (o - kvq__ctl_options);
    if (good)
        return KVQ_EXIT_OK;
    fprintf(stderr, "kvqctl: --%s is %s, not '%s'\n", o->name, o->must, kvq__ctl_clean(value));
    return KVQ_EXIT_USAGE;
}

static int unknown_option(const char *given)
{
    char name[64];
    const struct kvq__ctl_option *best = NULL;
    const char *at = given + strspn(given, "-");
    snprintf(name, sizeof name, "%.*s", (int)strcspn(at, "="), at);
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct kvq__ctl_option *o = &kvq__ctl_options[i];
        if (kvq_word_resembles(name, o->name) &&
            (!best || kvq_word_distance(name, o->name) < kvq_word_distance(name, best->name)))
            best = o;
    }
    fprintf(stderr, "kvqctl: there is no option '%.*s'", (int)strcspn(given, "="),
            kvq__ctl_clean(given));
    if (best)
        fprintf(stderr, "; did you mean '--%s'?", best->name);
    fprintf(stderr, "\nkvqctl --help lists the options.");
    if (given[0] == '-' && given[1] != '-')
        fprintf(stderr,
                " A name that begins with - goes behind --, as in kvqctl session show -- %s.",
                kvq__ctl_clean(given));
    fprintf(stderr, "\n");
    return KVQ_EXIT_USAGE;
}

// The word that getopt_long refused: it goes on to the next one behind a word's last letter, as it
// does behind a long option.
static const char *refused_word(int letter, char **argv)
{
    const char *given = argv[optind - 1];
    size_t n = strlen(given);
    bool last = n > 1 && given[0] == '-' && given[1] != '-' && given[n - 1] == (char)letter;
    return letter == 0 || letter >= FIRST || last ? given : argv[optind];
}

static int refuse(int option, int index, char **argv)
{
    const char *given = refused_word(optopt, argv);
    if (option == ':') {
        const struct kvq__ctl_option *o = &kvq__ctl_options[index];
        fprintf(stderr, "kvqctl: --%s needs a value behind it: %s\n", o->name, o->value);
        return KVQ_EXIT_USAGE;
    }
    if (index >= 0) {
        fprintf(stderr, "kvqctl: --%s takes no value: %s\n", kvq__ctl_options[index].name,
                kvq__ctl_clean(given));
        return KVQ_EXIT_USAGE;
    }
    return unknown_option(given);
}

// Whether a list of commands, "top, session move", holds these words.
static bool is_among(const char *list, const char *words)
{
    size_t n = strlen(words);
    for (const char *at = list; *at;) {
        size_t length = strcspn(at, ",");
        if (length == n && memcmp(at, words, n) == 0)
            return true;
        at += length + strspn(at + length, ", ");
    }
    return false;
}

bool kvq__ctl_is_own_option(const struct kvq__ctl_option *o, const struct kvq__ctl_command *command)
{
    if (o->of)
        return is_among(o->of, kvq__ctl_words(command));
    switch (o->at) {
    case AT(ns):
        return command->places != 0 || command->by_namespace;
    case AT(sort):
        return command->table || command->sorts;
    case AT(columns):
    case AT(filters):
    case AT(csv):
        return command->table != NULL;
    case AT(watch):
        return command->repeats;
    case AT(dry_run):
        return command->preview != NULL;
    case AT(exact):
        return command->places != 0;
    default:
        return false;
    }
}

int kvq__ctl_check_options(const struct kvq__ctl *ctl, const struct kvq__ctl_command *command)
{
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct kvq__ctl_option *o = &kvq__ctl_options[i];
        if (!(ctl->given & 1ull << i) || kvq__ctl_is_own_option(o, command))
            continue;
        if (o->kind == KVQ__CTL_TEXT && o->at == AT(ns))
            return kvq__ctl_bad_usage("--namespace is for sessions, prefixes and events, not for",
                                      kvq__ctl_words(command));
        if (!o->of)
            continue;
        return kvq__ctl_bad_usage(kvq__ctl_text("--%s is for %s, not for", o->name, o->of),
                                  kvq__ctl_words(command));
    }
    // An empty text, as of a script's unset variable, would mean all namespaces, or uid-N.
    if (ctl->ns && !*ctl->ns)
        return kvq__ctl_bad_usage("--namespace is a name, not the empty text ''; leave it out for "
                                  "the namespaces that kvqctl --help names",
                                  NULL);
    return KVQ_EXIT_OK;
}

int kvq__ctl_take_options(struct kvq__ctl *ctl, int argc, char **argv, int *first,
                          struct kvq__ctl_asked *asked)
{
    struct option options[N_OPTIONS + 1];
    int option, result = KVQ_EXIT_OK;
    memset(options, 0, sizeof options);
    for (int i = 0; i < N_OPTIONS; i++) {
        options[i].name = kvq__ctl_options[i].name;
        options[i].has_arg = kvq__ctl_options[i].value ? required_argument : no_argument;
        options[i].val = FIRST + i;
    }
    opterr = 0;
    while (result == KVQ_EXIT_OK && (option = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        if (option == 'h')
            asked->help = true;
        else if (option == '?' || option == ':')
            result = refuse(option, optopt >= FIRST ? optopt - FIRST : -1, argv);
        else
            result = take_option(ctl, &kvq__ctl_options[option - FIRST], optarg, asked);
    }
    *first = optind;
    ctl->timeout_given = ctl->timeout_ms > 0;
    if (!ctl->timeout_given)
        ctl->timeout_ms = 5000;
    return result;
}
