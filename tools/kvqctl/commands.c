// SPDX-License-Identifier: Apache-2.0
// The table of commands. A row is all that a command needs besides the function that does it.
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/dry_run.h"
#include "tools/kvqctl/kvqctl.h"
#include "tools/kvqctl/table.h"

const struct kvq__ctl_command kvq__ctl_commands[] = {
    {.words = {"status"},
     .heading = "The daemon",
     .run = kvq__ctl_status,
     .about = "memory, sessions, clients and work of the daemon",
     .repeats = true},
    {.words = {"top"},
     .by_namespace = true,
     .run = kvq__ctl_top,
     .about = "status and sessions, live; q ends it",
     .more =
         "On a terminal: arrows, Page Up, Page Down, Home and End scroll, s sorts by the next\n"
         "column, r reverses the order, q ends it. Elsewhere it prints the first 20 sessions\n"
         "again and again. With --json one object a line. Without --sort the largest come first.\n"
         "attentions/s are those that the daemon computes: engines that attend in their own "
         "context\n"
         "tell it of their steps alone.\n",
     .sorts = &kvq__ctl_sessions},
    {.words = {"ping"}, .run = kvq__ctl_ping, .about = "measures how fast the daemon answers"},
    {.words = {"version"},
     .run = kvq__ctl_version,
     .about = "the versions of kvqctl and of the daemon"},
    {.words = {"doctor"},
     .run = kvq__ctl_doctor,
     .about = "finds problems of this machine and the daemon, and says what to do",
     .more = "Works without a daemon, too. Exit status 7 if doctor found a problem.\n"},
    {.words = {"events"},
     .by_namespace = true,
     .run = kvq__ctl_events,
     .about = "follows what happens in the daemon, a line for each event",
     .more = "Until it is interrupted, or --count N events were printed. --kind K[,K] and\n"
             "--namespace NS choose. --since TIME begins with the last events, of which the\n"
             "daemon keeps 512; with --no-follow it ends behind them, and begins with all of\n"
             "them without --since. Goes on when the daemon is started again. It takes the role\n"
             "read.\n"},
    {.words = {"drain"},
     .run = kvq__ctl_drain,
     .about = "ends the daemon in good order, and waits for it",
     .more = "The daemon takes nothing new, lets open steps end (drain_ms), saves sessions as on\n"
             "SIGTERM, and ends. Prints how that went: exit status 1 if the daemon cut steps off\n"
             "or could not save sessions. --wait MS: waits no longer; the daemon goes on ending.\n"
             "It takes the role admin.\n",
     .preview = kvq__ctl_preview_drain},
    {.words = {"shutdown"},
     .run = kvq__ctl_shutdown,
     .about = "ends the daemon in good order, without waiting for it",
     .more = "As drain, but returns at once. --now: the daemon ends at once, as by a second\n"
             "signal, with status 1; what is not saved is lost. It takes the role admin.\n",
     .preview = kvq__ctl_preview_shutdown},
    {.words = {"config", "get"},
     .heading = "Its configuration",
     .argument = "[NAME]",
     .run = kvq__ctl_config_get,
     .about = "the configuration in effect, and where it comes from",
     .more = "All options, or the one of that name: value, default, where the value comes from\n"
             "(default, file, conf.d/NAME, environment, flag, or command: config set), and when a\n"
             "new value takes effect (live: while the daemon runs). It takes the role read.\n"},
    {.words = {"config", "set"},
     .argument = "NAME VALUE",
     .run = kvq__ctl_config_set,
     .about = "sets a live option until the next reload or restart",
     .more = "VALUE as in the configuration file. It takes the role admin.\n"},
    {.words = {"config", "reload"},
     .run = kvq__ctl_config_reload,
     .about = "reads the configuration again, and reopens the log",
     .more = "As SIGHUP does. Prints what has changed and what needs a restart. If the\n"
             "configuration has an error, nothing changes. --dry-run checks it, and says what\n"
             "would change. It takes the role admin.\n",
     .preview = kvq__ctl_preview_reload},
    {.words = {"session", "list"},
     .heading = "Sessions",
     .by_namespace = true,
     .run = kvq__ctl_session_list,
     .about = "the sessions this user may see",
     .repeats = true,
     .table = &kvq__ctl_sessions},
    {.words = {"session", "show"},
     .argument = "NAME",
     .run = kvq__ctl_session_show,
     .about = "one session: shape, memory, compression",
     .more = "NAME is a session's name, or #ID of an unnamed one as the list shows it. The\n"
             "beginning of a name will do if no other name begins so.\n",
     .places = KVQ__CTL_MEMORY},
    {.words = {"session", "drop"},
     .argument = "NAME",
     .run = kvq__ctl_session_drop,
     .about = "destroys a session and its cache",
     .more = "NAME is a session's name, or #ID of an unnamed one. Deletes the saved session, too.\n"
             "There is no way back. An engine that has the session open gets KVQ_E_STALE.\n",
     .places = KVQ__CTL_MEMORY | KVQ__CTL_SAVED,
     .whole_name = true,
     .preview = kvq__ctl_preview_drop},
    {.words = {"session", "move"},
     .argument = "NAME PLACE",
     .run = kvq__ctl_session_move,
     .about = "moves a session's memory to another place",
     .more =
         "NAME is a session's name, or #ID of an unnamed one. Moves all its shards, or one\n"
         "with --shard. PLACE is host, or a GPU as status lists it. The session may be open:\n"
         "the move begins when its step and its requests have ended (--wait MS, else 10 s),\n"
         "and new requests wait for the move. Then its engine must hand over tensors in memory\n"
         "that PLACE can access.\n",
     .places = KVQ__CTL_MEMORY},
    {.words = {"session", "park"},
     .argument = "NAME",
     .run = kvq__ctl_session_park,
     .about = "writes a session to disk and frees its memory",
     .more = "NAME is a session's name, or #ID of an unnamed one. Parks all its shards. The\n"
             "session may be open, but not in use. Its handles stay valid: the next request loads\n"
             "it.\n",
     .places = KVQ__CTL_MEMORY},
    {.words = {"session", "prefetch"},
     .argument = "NAME",
     .run = kvq__ctl_session_prefetch,
     .about = "loads a parked session before a request needs it",
     .more = "Ends when all of it is in memory.\n",
     .places = KVQ__CTL_MEMORY},
    {.words = {"session", "pin"},
     .argument = "NAME",
     .run = kvq__ctl_session_pin,
     .about = "keeps a session in memory: the daemon never parks it",
     .more =
         "Until session unpin, session drop, or the end of the daemon. Loads a parked session.\n",
     .places = KVQ__CTL_MEMORY},
    {.words = {"session", "unpin"},
     .argument = "NAME",
     .run = kvq__ctl_session_unpin,
     .about = "lets the daemon park it again",
     .places = KVQ__CTL_MEMORY},
    {.words = {"session", "save"},
     .argument = "NAME",
     .run = kvq__ctl_session_save,
     .about = "writes a session to the daemon's storage_dir",
     .more = "Writes the committed tokens of all its shards; only blocks that are new since the\n"
             "last save. The session may be open and in a step. Ends when the save is durable.\n"
             "--again writes an unchanged session, too.\n",
     .places = KVQ__CTL_MEMORY},
    {.words = {"session", "restore"},
     .argument = "NAME",
     .run = kvq__ctl_session_restore,
     .about = "loads a saved session into memory",
     .more = "Ends when all of it is in memory. Engines need not wait for this: opening a saved\n"
             "session restores it, too. --shard N restores that shard (default 0). --shards N\n"
             "restores it with N shards instead of those saved, each with its part of the KV\n"
             "heads; without --shard all. A session that is in memory or parked is left as it\n"
             "is: session prefetch brings one that is parked back.\n",
     .places = KVQ__CTL_SAVED},
    {.words = {"session", "export"},
     .argument = "NAME FILE",
     .run = kvq__ctl_session_export,
     .about = "writes a saved session to one file, for another machine",
     .more = "Exports the last save: run session save first. The daemon writes the file, and\n"
             "none that is there already without --replace. It takes the role admin.\n",
     .places = KVQ__CTL_SAVED,
     .preview = kvq__ctl_preview_export},
    {.words = {"session", "import"},
     .by_namespace = true,
     .argument = "FILE",
     .run = kvq__ctl_session_import,
     .about = "adds an exported session to the storage",
     .more =
         "Under the names in the file, or --namespace NAME and --as NAME; --replace replaces a\n"
         "saved session of that name. --dry-run says what stands in the way. It takes the role\n"
         "admin.\n",
     .preview = kvq__ctl_preview_import},
    {.words = {"session", "push"},
     .argument = "NAME",
     .run = kvq__ctl_session_push,
     .about = "uploads a session to the remote store",
     .more =
         "Saves the session first if it has changed. The session may be open. Shows the\n"
         "progress; the push goes on without this command, and remote cancel ID ends it. After\n"
         "a failure the next push sends only the missing parts. --again sends all of the\n"
         "session, over what is there: for a pull that has met a wrong checksum.\n",
     .places = KVQ__CTL_MEMORY | KVQ__CTL_SAVED},
    {.words = {"session", "pull"},
     .argument = "NAME",
     .run = kvq__ctl_session_pull,
     .about = "downloads a session from the remote store into the storage",
     .more =
         "An open then restores it. --as NAME, --namespace NAME: its name here; --from NAME:\n"
         "the namespace that it was pushed from, if another. --replace replaces a saved\n"
         "session, never one in memory. The pull goes on without this command, as a push does.\n",
     .places = KVQ__CTL_REMOTE,
     .preview = kvq__ctl_preview_pull},
    {.words = {"prefix", "status"},
     .heading = "Prefixes that sessions share",
     .by_namespace = true,
     .run = kvq__ctl_prefix_status,
     .about = "the prefixes that new sessions can share",
     .more = "For each namespace: cached tokens and their bytes, how many of them no session uses\n"
             "(idle: evicted first), lookups and hits, tokens that sessions shared, and tokens\n"
             "that were evicted.\n",
     .repeats = true,
     .table = &kvq__ctl_prefixes},
    {.words = {"prefix", "drop"},
     .by_namespace = true,
     .run = kvq__ctl_prefix_drop,
     .about = "frees the prefixes that no session uses",
     .more = "Of one namespace (--namespace NAME), or of all that you may use. Blocks of sessions\n"
             "stay, and the daemon still finds prefixes of saved sessions on disk.\n",
     .preview = kvq__ctl_preview_prefix_drop},
    {.words = {"client", "list"},
     .heading = "Clients, and limits of namespaces",
     .run = kvq__ctl_client_list,
     .about = "the engines that are connected",
     .repeats = true,
     .table = &kvq__ctl_clients},
    {.words = {"client", "kick"},
     .argument = "ID",
     .run = kvq__ctl_client_kick,
     .about = "closes a client's connection",
     .more = "The daemon drops its unnamed sessions, and those with on_detach drop; its other\n"
             "named ones stand at their last commit. It takes the role operate.\n",
     .preview = kvq__ctl_preview_kick},
    {.words = {"quota", "list"},
     .run = kvq__ctl_quota_list,
     .about = "the limits of namespaces, and their usage",
     .more = "Bytes of blocks on the host, on GPUs and on disk, and sessions in memory, for the\n"
             "namespaces that this user may see.\n",
     .repeats = true,
     .table = &kvq__ctl_quotas},
    {.words = {"quota", "get"},
     .argument = "NS",
     .run = kvq__ctl_quota_get,
     .about = "one namespace's limits, usage, and refused requests",
     .repeats = true},
    {.words = {"quota", "set"},
     .argument = "NS",
     .run = kvq__ctl_quota_set,
     .about = "sets limits of a namespace while the daemon runs",
     .more =
         "--host-bytes, --device-bytes, --disk-bytes, --table-bytes (SIZE, as 10gb),\n"
         "--sessions (N); none: no limit. Each replaces the configuration's limit; limits that\n"
         "are not given stay. A limit below the usage takes nothing away, but the daemon\n"
         "refuses more until the usage is below it. The daemon keeps limits in storage_dir\n"
         "over restarts. It takes the role admin.\n",
     .preview = kvq__ctl_preview_quota_set},
    {.words = {"quota", "delete"},
     .argument = "NS",
     .run = kvq__ctl_quota_delete,
     .about = "restores the configuration's limits of a namespace",
     .more = "It takes the role admin.\n",
     .preview = kvq__ctl_preview_quota_delete},
    {.words = {"storage", "status"},
     .heading = "The storage",
     .run = kvq__ctl_storage_status,
     .about = "what the storage holds, and its space on disk",
     .repeats = true},
    {.words = {"storage", "list"},
     .by_namespace = true,
     .run = kvq__ctl_storage_list,
     .about = "the saved sessions",
     .repeats = true,
     .table = &kvq__ctl_saved_sessions},
    {.words = {"storage", "verify"},
     .run = kvq__ctl_storage_verify,
     .about = "reads and checks the whole storage",
     .more = "By the running daemon, or with --offline DIR in a storage that no daemon has open.\n"
             "Exit status 7 if verify found damage.\n"},
    {.words = {"storage", "gc"},
     .run = kvq__ctl_storage_gc,
     .about = "removes segments without live blocks",
     .preview = kvq__ctl_preview_gc},
    {.words = {"storage", "compact"},
     .run = kvq__ctl_storage_compact,
     .about = "moves live blocks together, and frees the rest",
     .preview = kvq__ctl_preview_compact},
    {.words = {"remote", "status"},
     .heading = "The remote store",
     .run = kvq__ctl_remote_status,
     .about = "the remote store, and recent pushes and pulls",
     .more = "Your own; with the role read all.\n",
     .repeats = true},
    {.words = {"remote", "list"},
     .by_namespace = true,
     .run = kvq__ctl_remote_list,
     .about = "the sessions on the remote store",
     .repeats = true,
     .table = &kvq__ctl_remote_sessions},
    {.words = {"remote", "remove"},
     .argument = "NAME",
     .run = kvq__ctl_remote_remove,
     .about = "deletes a session from the remote store",
     .more = "The session stays in the storage and in memory here. There is no way back.\n",
     .places = KVQ__CTL_REMOTE,
     .whole_name = true,
     .preview = kvq__ctl_preview_remove},
    {.words = {"remote", "cancel"},
     .argument = "ID",
     .run = kvq__ctl_remote_cancel,
     .about = "ends a push or pull",
     .more = "ID is its number as remote status shows it. The next try goes on where this one\n"
             "ended.\n"},
    {.words = {"format", "list"},
     .heading = "Formats and sizes",
     .run = kvq__ctl_format_list,
     .about = "the formats that sessions can ask for by name",
     .more = "Formats of the configuration first, layer by layer where layers differ; then those\n"
             "to begin with, marked *. FAST: CPUs have a fast path for it. GPU: GPUs have a loop\n"
             "for it, and not only the slow one for all formats. PREFIX: sessions that begin\n"
             "alike can share blocks. NEEDS: a codebook's name goes behind an @. Names may also\n"
             "join built-in formats, or change them by suffixes and single stages; see formats.md\n"
             "in share/doc/kvqd.\n",
     .repeats = true,
     .table = &kvq__ctl_formats},
    {.words = {"size"},
     .run = kvq__ctl_size,
     .about = "how much memory sessions will take",
     .more = "Of --sessions N (default 1) sessions of --tokens N tokens in a --format NAME, or in\n"
             "each of several, for the model in a folder:\n"
             "  kvqctl size --model DIR --format kvq2,oscar4,f16 --tokens 32768 --sessions 8\n"
             "(config.json, or the text_config in it; what it does not say is not guessed),\n"
             "or for one of --layers N layers with --kv-heads N KV heads of --head-dim N each:\n"
             "  kvqctl size --format kvq2 --layers 32 --kv-heads 8 --head-dim 128 --tokens 32768\n"
             "--rollback N: tokens that engines may take back. --window N: the sliding window of\n"
             "the layers. Asks no daemon, and knows no formats of a configuration.\n"},
    {.words = {"key", "make"},
     .heading = "Keys, and completion for shells",
     .argument = "FILE",
     .run = kvq__ctl_key_make,
     .about = "makes a key for kvqctl on another machine, or for the daemon",
     .more = "Writes FILE, which is yours alone, and prints the public key: for the daemon's\n"
             "control_key_file, or with --server HEX (the daemon's public key) for a user, who\n"
             "then needs a section in the daemon's configuration, which is printed.\n"},
    {.words = {"key", "show"},
     .argument = "FILE",
     .run = kvq__ctl_key_show,
     .about = "the public key of such a file, or the section for it",
     .more =
         "As key make prints it: of a daemon's key the key alone; of a user's key the section\n"
         "[key NAME] for the daemon's configuration. With --json the object has it as public.\n"},
    {.words = {"completion"},
     .by_namespace = true,
     .argument = "SHELL",
     .run = kvq__ctl_completion,
     .about = "a script that completes command lines of kvqctl",
     .more = "SHELL is bash, zsh or fish: source <(kvqctl completion bash). Names of sessions come "
             "from the\n"
             "daemon, if it answers within 300 ms. With a command in place of SHELL, as \"session "
             "drop\", it\n"
             "prints the names that this command could take.\n"},
};

const size_t kvq__ctl_n_commands = sizeof kvq__ctl_commands / sizeof *kvq__ctl_commands;
