// SPDX-License-Identifier: Apache-2.0
// The table of commands. A row is all that a command needs besides the function that does it.
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"

const struct kvq__ctl_command kvq__ctl_commands[] = {
    {{"status"},
     NULL,
     kvq__ctl_status,
     "memory, sessions, clients and work of the daemon",
     "",
     true},
    {{"ping"}, NULL, kvq__ctl_ping, "measures how fast the daemon answers", "", false},
    {{"version"}, NULL, kvq__ctl_version, "the versions of kvqctl and of the daemon", "", false},
    {{"doctor"},
     NULL,
     kvq__ctl_doctor,
     "finds problems of this machine and the daemon, and says what to do",
     "Works without a daemon, too. Exit status 7 if doctor found a problem.\n",
     false},
    {{"events"},
     NULL,
     kvq__ctl_events,
     "follows what happens in the daemon, a line for each event",
     "Until it is interrupted, or --count N events were printed. --kind K[,K] and --namespace NS\n"
     "choose. Goes on when the daemon is started again; what happened meanwhile is missing. Only "
     "root\n"
     "and the daemon's own user may do this.\n",
     false},
    {{"session", "list"}, NULL, kvq__ctl_session_list, "the sessions this user may see", "", true},
    {{"session", "show"},
     "NAME",
     kvq__ctl_session_show,
     "one session: shape, memory, compression",
     "NAME is a session's name, or #ID of an unnamed one as the list shows it. The beginning of a\n"
     "name will do if no other name begins so.\n",
     false},
    {{"session", "drop"},
     "NAME",
     kvq__ctl_session_drop,
     "destroys a session and its cache",
     "NAME is a session's name, or #ID of an unnamed one. Deletes the saved session, too. There "
     "is\n"
     "no way back. An engine that has the session open gets KVQ_E_STALE.\n",
     false},
    {{"session", "move"},
     "NAME PLACE",
     kvq__ctl_session_move,
     "moves a session's memory to another place",
     "NAME is a session's name, or #ID of an unnamed one. Moves all its shards, or one with\n"
     "--shard. PLACE is host, or a GPU as status lists it. The session may be open: the move\n"
     "begins when its step and its requests have ended (--wait MS, else 10 s), and new requests\n"
     "wait for the move. Then its engine must hand over tensors in memory that PLACE can "
     "access.\n",
     false},
    {{"session", "park"},
     "NAME",
     kvq__ctl_session_park,
     "writes a session to disk and frees its memory",
     "NAME is a session's name, or #ID of an unnamed one. Parks all its shards. The session may "
     "be\n"
     "open, but not in use. Its handles stay valid: the next request loads it.\n",
     false},
    {{"session", "prefetch"},
     "NAME",
     kvq__ctl_session_prefetch,
     "loads a parked session before a request needs it",
     "Ends when all of it is in memory.\n",
     false},
    {{"session", "pin"},
     "NAME",
     kvq__ctl_session_pin,
     "keeps a session in memory: the daemon never parks it",
     "Until session unpin, session drop, or the end of the daemon. Loads a parked session.\n",
     false},
    {{"session", "unpin"},
     "NAME",
     kvq__ctl_session_unpin,
     "lets the daemon park it again",
     "",
     false},
    {{"prefix", "status"},
     NULL,
     kvq__ctl_prefix_status,
     "the prefixes that new sessions can share",
     "For each namespace: cached tokens and their bytes, how many of them no session uses (idle:\n"
     "evicted first), lookups and hits, tokens that sessions shared, and tokens that were "
     "evicted.\n",
     true},
    {{"prefix", "drop"},
     NULL,
     kvq__ctl_prefix_drop,
     "frees the prefixes that no session uses",
     "Of one namespace (--namespace NAME), or of all that you may use. Blocks of sessions stay, "
     "and\n"
     "the daemon still finds prefixes of saved sessions on disk.\n",
     false},
    {{"session", "save"},
     "NAME",
     kvq__ctl_session_save,
     "writes a session to the daemon's storage_dir",
     "Writes the committed tokens of all its shards; only blocks that are new since the last "
     "save.\n"
     "The session may be open and in a step. Ends when the save is durable. --again writes an\n"
     "unchanged session, too.\n",
     false},
    {{"session", "restore"},
     "NAME",
     kvq__ctl_session_restore,
     "loads a saved session into memory",
     "Ends when all of it is in memory. Engines need not wait for this: opening a saved session\n"
     "restores it, too. --shard N restores that shard (default 0). --shards N restores it with N\n"
     "shards instead of those saved, each with its part of the KV heads; without --shard all.\n",
     false},
    {{"session", "export"},
     "NAME FILE",
     kvq__ctl_session_export,
     "writes a saved session to one file, for another machine",
     "Exports the last save: run session save first. The daemon writes the file. Only root and the "
     "daemon's\n"
     "own user may do this.\n",
     false},
    {{"session", "import"},
     "FILE",
     kvq__ctl_session_import,
     "adds an exported session to the storage",
     "Under the names in the file, or --namespace NAME and --as NAME; --replace replaces a saved\n"
     "session of that name. Only root and the daemon's own user may do this.\n",
     false},
    {{"session", "push"},
     "NAME",
     kvq__ctl_session_push,
     "uploads a session to the remote store",
     "Saves the session first if it has changed. The session may be open. Shows the progress; the\n"
     "push goes on without this command, and remote cancel ID ends it. After a failure the next\n"
     "push sends only the missing parts.\n",
     false},
    {{"session", "pull"},
     "NAME",
     kvq__ctl_session_pull,
     "downloads a session from the remote store into the storage",
     "An open then restores it. --as NAME, --namespace NAME: its name here; --from NAME: the\n"
     "namespace that it was pushed from, if another. --replace replaces a saved session, never\n"
     "one in memory. The pull goes on without this command, as a push does.\n",
     false},
    {{"remote", "status"},
     NULL,
     kvq__ctl_remote_status,
     "the remote store, and recent pushes and pulls",
     "Your own; administrators see all.\n",
     true},
    {{"remote", "list"}, NULL, kvq__ctl_remote_list, "the sessions on the remote store", "", true},
    {{"remote", "remove"},
     "NAME",
     kvq__ctl_remote_remove,
     "deletes a session from the remote store",
     "The session stays in the storage and in memory here. There is no way back.\n",
     false},
    {{"remote", "cancel"},
     "ID",
     kvq__ctl_remote_cancel,
     "ends a push or pull",
     "ID is its number as remote status shows it. The next try goes on where this one ended.\n",
     false},
    {{"storage", "status"},
     NULL,
     kvq__ctl_storage_status,
     "what the storage holds, and its space on disk",
     "",
     true},
    {{"storage", "list"}, NULL, kvq__ctl_storage_list, "the saved sessions", "", true},
    {{"storage", "verify"},
     NULL,
     kvq__ctl_storage_verify,
     "reads and checks the whole storage",
     "By the running daemon, or with --offline DIR in a storage that no daemon has open. Exit\n"
     "status 7 if verify found damage.\n",
     false},
    {{"storage", "gc"},
     NULL,
     kvq__ctl_storage_gc,
     "removes segments without live blocks",
     "",
     false},
    {{"storage", "compact"},
     NULL,
     kvq__ctl_storage_compact,
     "moves live blocks together, and frees the rest",
     "",
     false},
    {{"quota", "list"},
     NULL,
     kvq__ctl_quota_list,
     "the limits of namespaces, and their usage",
     "Bytes of blocks on the host, on GPUs and on disk, and sessions in memory, for the "
     "namespaces\n"
     "that this user may see.\n",
     true},
    {{"quota", "get"},
     "NS",
     kvq__ctl_quota_get,
     "one namespace's limits, usage, and refused requests",
     "",
     true},
    {{"quota", "set"},
     "NS",
     kvq__ctl_quota_set,
     "sets limits of a namespace while the daemon runs",
     "--host-bytes, --device-bytes, --disk-bytes, --table-bytes (SIZE, as 10gb), --sessions (N);\n"
     "none: no limit. Each replaces the configuration's limit; limits that are not given stay.\n"
     "A limit below the usage takes nothing away, but the daemon refuses more until the usage is\n"
     "below it. The daemon keeps limits in storage_dir over restarts. Only root and the daemon's\n"
     "own user may do this.\n",
     false},
    {{"quota", "delete"},
     "NS",
     kvq__ctl_quota_delete,
     "restores the configuration's limits of a namespace",
     "Only root and the daemon's own user may do this.\n",
     false},
    {{"format", "list"},
     NULL,
     kvq__ctl_format_list,
     "the formats that sessions can ask for by name",
     "Formats of the configuration first, layer by layer where layers differ. Names may also join\n"
     "built-in formats, or change them by suffixes and single stages; see docs/formats.md.\n",
     true},
    {{"drain"},
     NULL,
     kvq__ctl_drain,
     "ends the daemon in good order, and waits for it",
     "The daemon takes nothing new, lets open steps end (drain_ms), saves sessions as on SIGTERM,\n"
     "and ends. Prints how that went: exit status 1 if the daemon cut steps off or could not save\n"
     "sessions. --wait MS: waits no longer; the daemon goes on ending. Only administrators may do\n"
     "this.\n",
     false},
    {{"shutdown"},
     NULL,
     kvq__ctl_shutdown,
     "ends the daemon in good order, without waiting for it",
     "As drain, but returns at once. --now: the daemon ends at once, as by a second signal, with\n"
     "status 1; what is not saved is lost. Only administrators may do this.\n",
     false},
    {{"config", "get"},
     "[NAME]",
     kvq__ctl_config_get,
     "the configuration in effect, and where it comes from",
     "All options, or the one of that name: value, default, where the value comes from (default,\n"
     "file, conf.d/NAME, environment, flag, or command: config set), and when a new value takes\n"
     "effect (live: while the daemon runs). Only administrators may do this.\n",
     false},
    {{"config", "set"},
     "NAME VALUE",
     kvq__ctl_config_set,
     "sets a live option until the next reload or restart",
     "VALUE as in the configuration file. Only administrators may do this.\n",
     false},
    {{"config", "reload"},
     NULL,
     kvq__ctl_config_reload,
     "reads the configuration again, and reopens the log",
     "As SIGHUP does. Prints what has changed and what needs a restart. If the configuration has\n"
     "an error, nothing changes. Only administrators may do this.\n",
     false},
    {{"size"},
     NULL,
     kvq__ctl_size,
     "how much memory sessions will take",
     "Of --sessions N (default 1) sessions of --tokens N tokens in a --format NAME, for a\n"
     "model of --layers N layers with --kv-heads N KV heads of --head-dim N each. --rollback N:\n"
     "tokens that engines may take back. --window N: the sliding window of these layers. Asks no\n"
     "daemon, and knows no formats of a configuration.\n",
     false},
    {{"client", "list"}, NULL, kvq__ctl_client_list, "the engines that are connected", "", true},
    {{"client", "kick"},
     "ID",
     kvq__ctl_client_kick,
     "closes a client's connection",
     "The daemon drops its unnamed sessions, and those with on_detach drop; its other named ones\n"
     "stand at their last commit. Only root\n"
     "and the daemon's own user may do this.\n",
     false},
    {{"completion"},
     "SHELL",
     kvq__ctl_completion,
     "a script that completes command lines of kvqctl",
     "SHELL is bash, zsh or fish: source <(kvqctl completion bash). Names of sessions come from "
     "the\n"
     "daemon, if it answers within 300 ms. With a command in place of SHELL, as \"session drop\", "
     "it\n"
     "prints the names that this command could take.\n",
     false},
    {{"top"},
     NULL,
     kvq__ctl_top,
     "status and sessions, live; q ends it",
     "On a terminal: arrows, Page Up, Page Down, Home and End scroll, s sorts by the next column, "
     "r\n"
     "reverses the order, q ends it. Elsewhere it prints the 20 largest sessions again and again.\n"
     "With --json one object a line.\n",
     false},
};

const size_t kvq__ctl_n_commands = sizeof kvq__ctl_commands / sizeof *kvq__ctl_commands;
