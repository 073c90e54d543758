// SPDX-License-Identifier: Apache-2.0
// kvqctl: administers kvqd from the command line. This file reads the command line; the commands
// stand in the table below and in files of their own.
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/limits.h"
#include "tools/kvqctl/kvqctl.h"
#include "tools/kvqctl/transport.h"

struct command {
    const char *words[2];
    const char *argument; // its name, or several with blanks between, or NULL for none
    int (*run)(struct kvq__ctl *ctl, char **args);
    const char *about;
    const char *more; // for --help
};

static const struct command commands[] = {
    {{"status"}, NULL, kvq__ctl_status, "memory, sessions, clients and work of the daemon", ""},
    {{"ping"}, NULL, kvq__ctl_ping, "measures how fast the daemon answers", ""},
    {{"version"}, NULL, kvq__ctl_version, "the versions of kvqctl and of the daemon", ""},
    {{"doctor"},
     NULL,
     kvq__ctl_doctor,
     "finds problems of this machine and the daemon, and says what to do",
     "Works without a daemon, too. Exit status 7 if doctor found a problem.\n"},
    {{"session", "list"}, NULL, kvq__ctl_session_list, "the sessions this user may see", ""},
    {{"session", "show"},
     "NAME",
     kvq__ctl_session_show,
     "one session: shape, memory, compression",
     "NAME is a session's name, or #ID of an unnamed one as the list shows it.\n"},
    {{"session", "drop"},
     "NAME",
     kvq__ctl_session_drop,
     "destroys a session and its cache",
     "NAME is a session's name, or #ID of an unnamed one. Deletes the saved session, too. There "
     "is\n"
     "no way back. An engine that has the session open gets KVQ_E_STALE.\n"},
    {{"session", "move"},
     "NAME PLACE",
     kvq__ctl_session_move,
     "moves a session's memory to another place",
     "NAME is a session's name, or #ID of an unnamed one. Moves all its shards, or one with\n"
     "--shard. PLACE is host, or a GPU as status lists it. The session may be open: the move\n"
     "begins when its step and its requests have ended (--wait MS, else 10 s), and new requests\n"
     "wait for the move. Then its engine must hand over tensors in memory that PLACE can "
     "access.\n"},
    {{"session", "park"},
     "NAME",
     kvq__ctl_session_park,
     "writes a session to disk and frees its memory",
     "NAME is a session's name, or #ID of an unnamed one. Parks all its shards. The session may "
     "be\n"
     "open, but not in use. Its handles stay valid: the next request loads it.\n"},
    {{"session", "prefetch"},
     "NAME",
     kvq__ctl_session_prefetch,
     "loads a parked session before a request needs it",
     "Ends when all of it is in memory.\n"},
    {{"session", "pin"},
     "NAME",
     kvq__ctl_session_pin,
     "keeps a session in memory: the daemon never parks it",
     "Until session unpin, session drop, or the end of the daemon. Loads a parked session.\n"},
    {{"session", "unpin"}, "NAME", kvq__ctl_session_unpin, "lets the daemon park it again", ""},
    {{"prefix", "status"},
     NULL,
     kvq__ctl_prefix_status,
     "the prefixes that new sessions can share",
     "For each namespace: cached tokens and their bytes, how many of them no session uses (idle:\n"
     "evicted first), lookups and hits, tokens that sessions shared, and tokens that were "
     "evicted.\n"},
    {{"prefix", "drop"},
     NULL,
     kvq__ctl_prefix_drop,
     "frees the prefixes that no session uses",
     "Of one namespace (--namespace NAME), or of all that you may use. Blocks of sessions stay, "
     "and\n"
     "the daemon still finds prefixes of saved sessions on disk.\n"},
    {{"session", "save"},
     "NAME",
     kvq__ctl_session_save,
     "writes a session to the daemon's storage_dir",
     "Writes the committed tokens of all its shards; only blocks that are new since the last "
     "save.\n"
     "The session may be open and in a step. Ends when the save is durable. --again writes an\n"
     "unchanged session, too.\n"},
    {{"session", "restore"},
     "NAME",
     kvq__ctl_session_restore,
     "loads a saved session into memory",
     "Ends when all of it is in memory. Engines need not wait for this: opening a saved session\n"
     "restores it, too. --shard N restores that shard (default 0). --shards N restores it with N\n"
     "shards instead of those saved, each with its part of the KV heads; without --shard all.\n"},
    {{"session", "export"},
     "NAME FILE",
     kvq__ctl_session_export,
     "writes a saved session to one file, for another machine",
     "Exports the last save: run session save first. The daemon writes the file. Only root and the "
     "daemon's\n"
     "own user may do this.\n"},
    {{"session", "import"},
     "FILE",
     kvq__ctl_session_import,
     "adds an exported session to the storage",
     "Under the names in the file, or --namespace NAME and --as NAME; --replace replaces a saved\n"
     "session of that name. Only root and the daemon's own user may do this.\n"},
    {{"session", "push"},
     "NAME",
     kvq__ctl_session_push,
     "uploads a session to the remote store",
     "Saves the session first if it has changed. The session may be open. Shows the progress; the\n"
     "push goes on without this command, and remote cancel ID ends it. After a failure the next\n"
     "push sends only the missing parts.\n"},
    {{"session", "pull"},
     "NAME",
     kvq__ctl_session_pull,
     "downloads a session from the remote store into the storage",
     "An open then restores it. --as NAME, --namespace NAME: its name here; --from NAME: the\n"
     "namespace that it was pushed from, if another. --replace replaces a saved session, never\n"
     "one in memory. The pull goes on without this command, as a push does.\n"},
    {{"remote", "status"},
     NULL,
     kvq__ctl_remote_status,
     "the remote store, and recent pushes and pulls",
     "Your own; administrators see all.\n"},
    {{"remote", "list"}, NULL, kvq__ctl_remote_list, "the sessions on the remote store", ""},
    {{"remote", "remove"},
     "NAME",
     kvq__ctl_remote_remove,
     "deletes a session from the remote store",
     "The session stays in the storage and in memory here. There is no way back.\n"},
    {{"remote", "cancel"},
     "ID",
     kvq__ctl_remote_cancel,
     "ends a push or pull",
     "ID is its number as remote status shows it. The next try goes on where this one ended.\n"},
    {{"storage", "status"},
     NULL,
     kvq__ctl_storage_status,
     "what the storage holds, and its space on disk",
     ""},
    {{"storage", "list"}, NULL, kvq__ctl_storage_list, "the saved sessions", ""},
    {{"storage", "verify"},
     NULL,
     kvq__ctl_storage_verify,
     "reads and checks the whole storage",
     "By the running daemon, or with --offline DIR in a storage that no daemon has open. Exit\n"
     "status 7 if verify found damage.\n"},
    {{"storage", "gc"}, NULL, kvq__ctl_storage_gc, "removes segments without live blocks", ""},
    {{"storage", "compact"},
     NULL,
     kvq__ctl_storage_compact,
     "moves live blocks together, and frees the rest",
     ""},
    {{"quota", "list"},
     NULL,
     kvq__ctl_quota_list,
     "the limits of namespaces, and their usage",
     "Bytes of blocks on the host, on GPUs and on disk, and sessions in memory, for the "
     "namespaces\n"
     "that this user may see.\n"},
    {{"quota", "get"},
     "NS",
     kvq__ctl_quota_get,
     "one namespace's limits, usage, and refused requests",
     ""},
    {{"quota", "set"},
     "NS",
     kvq__ctl_quota_set,
     "sets limits of a namespace while the daemon runs",
     "--host-bytes, --device-bytes, --disk-bytes, --table-bytes (SIZE, as 10gb), --sessions (N);\n"
     "none: no limit. Each replaces the configuration's limit; limits that are not given stay.\n"
     "A limit below the usage takes nothing away, but the daemon refuses more until the usage is\n"
     "below it. The daemon keeps limits in storage_dir over restarts. Only root and the daemon's\n"
     "own user may do this.\n"},
    {{"quota", "delete"},
     "NS",
     kvq__ctl_quota_delete,
     "restores the configuration's limits of a namespace",
     "Only root and the daemon's own user may do this.\n"},
    {{"format", "list"},
     NULL,
     kvq__ctl_format_list,
     "the formats that sessions can ask for by name",
     "Formats of the configuration first, layer by layer where layers differ. Names may also join\n"
     "built-in formats, or change them by suffixes and single stages; see docs/formats.md.\n"},
    {{"client", "list"}, NULL, kvq__ctl_client_list, "the engines that are connected", ""},
    {{"client", "kick"},
     "ID",
     kvq__ctl_client_kick,
     "closes a client's connection",
     "The daemon drops its unnamed sessions; its named ones stand at their last commit. Only root\n"
     "and the daemon's own user may do this.\n"},
    {{"top"},
     NULL,
     kvq__ctl_top,
     "status and sessions, live; Ctrl-C ends it",
     "With --json one object a line.\n"},
};

enum { OPTION_QUOTA = 256 }; // from here on five, in the order of struct kvq__ctl_quota

enum { N_COMMANDS = sizeof commands / sizeof *commands };

static const char options_help[] =
    "Options:\n"
    "  --runtime-dir DIR  where the daemon's sockets are (else $KVQ_RUNTIME_DIR, else\n"
    "                     $XDG_RUNTIME_DIR/kvqd, else /run/kvqd)\n"
    "  --namespace NAME   sessions of this namespace (default: list: all; others: uid-N)\n"
    "  --json             print JSON, for scripts\n"
    "  --timeout MS       how long to wait for an answer (default 5000)\n"
    "  --interval S       top: seconds between two updates (default 2)\n"
    "  --count N          top: stop after N updates (default 0: never)\n"
    "  --shard N          session move, restore: only this shard\n"
    "  --shards N         session restore: number of shards\n"
    "  --wait MS          session move: how long to wait for steps to end (default 10000)\n"
    "  --again            session save: write an unchanged session, too\n"
    "  --as NAME          session import, pull: name of the session here\n"
    "  --from NAME        session pull: namespace on the remote store (default: as here)\n"
    "  --replace          session import, pull: replace a saved session of that name\n"
    "  --offline DIR      storage verify: a storage that no daemon has open\n"
    "  --host-bytes SIZE  quota set: memory on the host (as 10gb; none: no limit)\n"
    "  --device-bytes SIZE  quota set: memory on all GPUs together\n"
    "  --disk-bytes SIZE  quota set: bytes of saved sessions\n"
    "  --sessions N       quota set: sessions in memory, each shard counted\n"
    "  --table-bytes SIZE quota set: page tables and token ids on the host\n"
    "  --help, --version\n"
    "Exit status: 0 done; 1 refused or failed; 2 wrong command line; 3 no daemon there;\n"
    "4 no answer in time; 5 no such session or client; 6 not permitted; 7 doctor or verify found\n"
    "a problem.\n";

// Of one command, of those that begin with a word, or (both NULL) of all.
static void print_help(const struct command *only, const char *word)
{
    printf("kvqctl %s: administers kvqd, the daemon that owns quantized KV caches\n\n"
           "usage: kvqctl [options] COMMAND\n\n",
           KVQ_VERSION);
    for (size_t i = 0; i < N_COMMANDS; i++) {
        const struct command *c = &commands[i];
        char line[64];
        snprintf(line, sizeof line, "%s%s%s%s%s", c->words[0], c->words[1] ? " " : "",
                 c->words[1] ? c->words[1] : "", c->argument ? " " : "",
                 c->argument ? c->argument : "");
        if (only ? only == c : !word || strcmp(word, c->words[0]) == 0)
            printf("  %-23s %s\n", line, c->about);
    }
    printf("\n%s%s%s", only ? only->more : "", only && *only->more ? "\n" : "", options_help);
}

static int bad_usage(const char *what, const char *value)
{
    fprintf(stderr, "kvqctl: %s%s%s\nkvqctl --help lists the commands and options.\n", what,
            value ? " " : "", value ? value : "");
    return KVQ_EXIT_USAGE;
}

// A number within the range, or -1.
static double number_option(const char *text, double least, double most)
{
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (errno || end == text || *end || !isfinite(value) || value < least || value > most)
        return -1;
    return value;
}

// Words in a command's `argument`.
static int count_arguments(const struct command *c)
{
    int n = c->argument ? 1 : 0;
    for (const char *at = c->argument; at && *at; at++)
        n += *at == ' ';
    return n;
}

// The command that the words name, with *used of them taken; NULL if there is none.
static const struct command *find_command(char **words, int n, int *used)
{
    for (size_t i = 0; i < N_COMMANDS; i++) {
        const struct command *c = &commands[i];
        *used = c->words[1] ? 2 : 1;
        if (n >= *used && strcmp(words[0], c->words[0]) == 0 &&
            (!c->words[1] || strcmp(words[1], c->words[1]) == 0))
            return c;
    }
    return NULL;
}

// Takes one option into ctl. 0, or an exit status with the complaint printed.
static int take_option(struct kvq__ctl *ctl, int option)
{
    double number = 0;
    switch (option) {
    case 'd':
        ctl->runtime_dir = optarg;
        return 0;
    case 'n':
        ctl->ns = optarg;
        return 0;
    case 'j':
        ctl->json = true;
        return 0;
    case 'a':
        ctl->again = true;
        return 0;
    case 'A':
        ctl->as = optarg;
        return 0;
    case 'f':
        ctl->from = optarg;
        return 0;
    case 'r':
        ctl->replace = true;
        return 0;
    case 'o':
        ctl->offline = optarg;
        return 0;
    case 't':
        ctl->timeout_given = true;
        ctl->timeout_ms = (int)(number = number_option(optarg, 1, 3600000));
        return number < 0 ? bad_usage("--timeout is 1 to 3600000 milliseconds, not", optarg) : 0;
    case 'i':
        ctl->interval = number = number_option(optarg, 0.1, 3600);
        return number < 0 ? bad_usage("--interval is 0.1 to 3600 seconds, not", optarg) : 0;
    case 'c':
        ctl->count = (unsigned long)(number = number_option(optarg, 0, 1e9));
        return number < 0 ? bad_usage("--count is 0 to 1000000000, not", optarg) : 0;
    case 's':
        ctl->shard = (int)(number = number_option(optarg, 0, KVQ_MAX_SHARDS - 1));
        return number < 0 ? bad_usage("--shard is 0 to 63, not", optarg) : 0;
    case 'S':
        ctl->shards = (unsigned)(number = number_option(optarg, 1, KVQ_MAX_SHARDS));
        return number < 0 ? bad_usage("--shards is 1 to 64, not", optarg) : 0;
    case 'w':
        ctl->wait_ms = (unsigned)(number = number_option(optarg, 1, 3600000));
        return number < 0 ? bad_usage("--wait is 1 to 3600000 milliseconds, not", optarg) : 0;
    case OPTION_QUOTA + 3:
        return kvq__ctl_quota_option(ctl, 3, optarg)
                   ? 0
                   : bad_usage("--sessions is a number, or none, not", optarg);
    case OPTION_QUOTA:
    case OPTION_QUOTA + 1:
    case OPTION_QUOTA + 2:
    case OPTION_QUOTA + 4:
        return kvq__ctl_quota_option(ctl, option - OPTION_QUOTA, optarg)
                   ? 0
                   : bad_usage("a limit is a size, as 10gb, or none, not", optarg);
    default:
        return bad_usage("that option is unknown or lacks its value", NULL);
    }
}

// Whether commands begin with the word, as "storage status" with "storage".
static bool begins_commands(const char *word)
{
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (commands[i].words[1] && strcmp(word, commands[i].words[0]) == 0)
            return true;
    return false;
}

static int no_command(char **words, int n)
{
    if (n == 0)
        return bad_usage("what to do?", NULL);
    if (!begins_commands(words[0]))
        return bad_usage("there is no command", words[0]);
    fprintf(stderr, "kvqctl: there %s \"%s\"\nkvqctl %s --help lists what there is.\n",
            n > 1 ? "is no such command behind" : "has to be more behind", words[0], words[0]);
    return KVQ_EXIT_USAGE;
}

static int run_command(struct kvq__ctl *ctl, char **words, int n, bool help)
{
    int used = 0;
    const struct command *command = n > 0 ? find_command(words, n, &used) : NULL;
    bool group = n == 1 && !command && begins_commands(words[0]);
    if (help && (command || group || n == 0)) {
        print_help(command, group ? words[0] : NULL);
        return KVQ_EXIT_OK;
    }
    if (!command)
        return no_command(words, n);
    if (n - used != count_arguments(command))
        return bad_usage(command->argument ? "this command takes" : "too much behind",
                         command->argument ? command->argument : words[used - 1]);
    return command->run(ctl, words + used);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"runtime-dir", required_argument, NULL, 'd'},
        {"namespace", required_argument, NULL, 'n'},
        {"json", no_argument, NULL, 'j'},
        {"timeout", required_argument, NULL, 't'},
        {"interval", required_argument, NULL, 'i'},
        {"count", required_argument, NULL, 'c'},
        {"shard", required_argument, NULL, 's'},
        {"shards", required_argument, NULL, 'S'},
        {"wait", required_argument, NULL, 'w'},
        {"again", no_argument, NULL, 'a'},
        {"as", required_argument, NULL, 'A'},
        {"from", required_argument, NULL, 'f'},
        {"replace", no_argument, NULL, 'r'},
        {"offline", required_argument, NULL, 'o'},
        {"host-bytes", required_argument, NULL, OPTION_QUOTA},
        {"device-bytes", required_argument, NULL, OPTION_QUOTA + 1},
        {"disk-bytes", required_argument, NULL, OPTION_QUOTA + 2},
        {"sessions", required_argument, NULL, OPTION_QUOTA + 3},
        {"table-bytes", required_argument, NULL, OPTION_QUOTA + 4},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'},
        {NULL, 0, NULL, 0},
    };
    struct kvq__ctl ctl = {.timeout_ms = 5000, .interval = 2, .shard = -1};
    bool help = false;
    int option, result = 0;
    while (result == 0 && (option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (option == 'v') {
            printf("kvqctl %s\n", KVQ_VERSION);
            return KVQ_EXIT_OK;
        }
        if (option == 'h')
            help = true;
        else
            result = take_option(&ctl, option);
    }
    if (result)
        return result;
    ctl.runtime_dir = kvq__ctl_runtime_dir(ctl.runtime_dir);
    result = run_command(&ctl, argv + optind, argc - optind, help);
    kvq__transport_close(&ctl.transport);
    return fflush(stdout) == 0 ? result : KVQ_EXIT_FAILED;
}
