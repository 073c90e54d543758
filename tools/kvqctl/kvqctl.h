// SPDX-License-Identifier: Apache-2.0
//
// What the files of kvqctl share: exit statuses, the options of one run, asking the daemon, and
// printing. Errors go to standard error, results to standard output.
#ifndef KVQ_TOOLS_KVQCTL_KVQCTL_H
#define KVQ_TOOLS_KVQCTL_KVQCTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/wire.h"

// Exit statuses, promised to scripts in kvqctl(1).
enum {
    KVQ_EXIT_OK = 0,
    KVQ_EXIT_FAILED = 1,     // the daemon refused, or something else failed
    KVQ_EXIT_USAGE = 2,      // the command line is wrong
    KVQ_EXIT_NO_DAEMON = 3,  // nothing listens there, or it ended before it answered
    KVQ_EXIT_TIMEOUT = 4,    // it listens but did not answer in time
    KVQ_EXIT_NOT_FOUND = 5,  // no such session, client or namespace
    KVQ_EXIT_PERMISSION = 6, // this user may not
    KVQ_EXIT_PROBLEM = 7,    // doctor found a problem
    KVQ_EXIT_STOPPED = -1,   // within kvqctl: the user ended a command that goes on
};

// Limits on the command line: bits of which are given, and each of them; 0: none.
struct kvq__ctl_quota {
    uint32_t which;
    uint64_t limit[5]; // host, device, disk, sessions, tables
};

// What size is asked about; 0 or NULL: not given.
struct kvq__ctl_shape {
    const char *model; // a config.json or its folder, for what is not given
    const char *format;
    unsigned layers, kv_heads, head_dim, rollback, window;
    unsigned long tokens;
};

// Texts of an option that may be given several times.
enum { KVQ__CTL_MAX_FILTERS = 16 };
struct kvq__ctl_texts {
    size_t n;
    const char *texts[KVQ__CTL_MAX_FILTERS];
};

// Where a session is.
enum { KVQ__CTL_MEMORY = 1, KVQ__CTL_SAVED = 2, KVQ__CTL_REMOTE = 4 };

// One run: what the command line said, and the connection once there is one.
struct kvq__ctl {
    uint64_t given; // options, a bit for each row of their table
    const char *runtime_dir;
    const char *told_dir; // what runtime_dir comes from: an option, a variable; NULL: neither
    const char *connect;  // HOST:PORT of a daemon on another machine; NULL: runtime_dir
    const char *key_file; // with the key for it
    const char *server;   // key make: the daemon's public key
    const char *ns;       // NULL: the caller's own, or all of them in listings
    bool json;
    int timeout_ms;
    bool timeout_given;
    double interval;         // top: seconds between two looks
    unsigned long count;     // top, events: looks or events, 0 for no end
    int shard;               // move, restore: only this one; -1: not given
    unsigned shards;         // restore: so many; 0: as many as were saved
    unsigned wait_ms;        // move: for steps to end; 0: the daemon's default. drain: 0: for ever
    bool now;                // shutdown: without a drain
    bool again;              // save, push: also what is there already
    bool replace;            // import, pull: what is saved under that name
    const char *as;          // import, pull: another name; NULL: the file's, or the same
    const char *from;        // pull: the namespace on the remote store; NULL: the same
    const char *offline;     // verify: a folder that no daemon has; NULL: the daemon's
    double watch;            // seconds until the command is run again; 0: it is run once
    const char *event_kinds; // events: "K,K"; NULL: all
    const char *since;       // events: those of so long ago as well; NULL: from now on
    bool no_follow;          // events: none that are still to come
    struct kvq__ctl_quota quota;
    struct kvq__ctl_shape shape;
    const char *columns, *sort; // lists: which, and by which, "-" before it for the largest first
    struct kvq__ctl_texts filters;
    bool csv;
    bool dry_run;
    bool exact;        // a name of a session is the whole name
    bool whole_name;   // the beginning of a name does not do
    unsigned places;   // where sessions that the command names are, KVQ__CTL_MEMORY and so on
    const char *named; // the command's, as it was given, until it was looked for; NULL: none
    char *full_name;   // that it stands for; the command is to be run again with it
    bool quiet;        // refusals are not printed
    int stop_fd;       // readable once the user wants an end; -1: a signal ends the program
    bool ends_it;      // the daemon is asked to end: that its connection breaks needs no words
    struct kvq__transport *transport;
    uint32_t next_id;
    struct kvq_arena arenas[2]; // hold the last two replies; their memory lives as long as the run
    struct kvq_arena *page;     // holds the next one instead; NULL = none
};

// The daemon's runtime directory: the option, else as kvq_connect looks for it
// (proto/runtime_dir.h). Returns a static string.
const char *kvq__ctl_runtime_dir(const char *option);

// Sends the request and waits for its reply. Returns KVQ_EXIT_OK and a reply of status 0 that
// holds the expected result, valid until the next but one is asked for, or an exit status; then
// what went wrong and what to do has been printed, and *reply is NULL.
int kvq__ctl_ask(struct kvq__ctl *ctl, Kvq__Request *request, Kvq__Reply__ResultCase expected,
                 Kvq__Reply **reply);

// Where the run's daemon is, for kvq__transport_try; of another machine without the key. The path
// is in `path`.
struct kvq__transport_at;
void kvq__ctl_at(const struct kvq__ctl *ctl, struct kvq__transport_at *at, char *path, size_t size);
// The same in words, "in /run/kvqd" or "at gpu7:9648". In one of the buffers of kvq__ctl_text.
const char *kvq__ctl_where(const struct kvq__ctl *ctl);
// Says why nothing could be connected to, by kvq__transport_try's negative errno, and what to do.
// Returns the exit status for it.
int kvq__ctl_explain_connection(const struct kvq__ctl *ctl, const char *path, int error,
                                const char *text);

// From now on SIGINT and SIGTERM end nothing, but make ctl->stop_fd readable. An exit status.
int kvq__ctl_catch_stop(struct kvq__ctl *ctl);
// Waits so long, or until the user wants an end. Whether that is so.
bool kvq__ctl_wait(const struct kvq__ctl *ctl, double seconds);

// A session by its name, in the namespace that was given. It points to both.
Kvq__SessionRef kvq__ctl_ref(const struct kvq__ctl *ctl, char *name);

// Looks for the one name that begins with ctl->named, once the daemon knows no session of that name
// itself. True: it is in ctl->full_name, and the command begins anew. *told: several begin so, and
// that was printed.
bool kvq__ctl_complete_name(struct kvq__ctl *ctl, bool *told);

// Prints what went wrong in words, or the code's own, and returns the exit status for it.
int kvq__ctl_refused(int status, const char *text);

// A list that comes in pages, asked for to its end. The elements live until it is freed; `reply` is
// the first page's, and holds what is no element.
struct kvq__ctl_list {
    ProtobufCMessage **elements;
    size_t n, room;
    bool truncated; // a daemon of an earlier release gives the first page alone
    Kvq__Reply *reply;
    void **pages; // memory of the replies
    size_t n_pages;
};
// Where a kind of list stands in its messages, by offsets.
struct kvq__ctl_kind {
    Kvq__Reply__ResultCase result;
    size_t n, elements, truncated, next; // in the result's message
    const char *what, *remedy;           // the elements; what to do if the list is cut, or ""
};
#define KVQ__CTL_KIND(RESULT, TYPE, ELEMENTS, WHAT, REMEDY)                                        \
    {                                                                                              \
        .result = KVQ__REPLY__RESULT_##RESULT, .n = offsetof(TYPE, n_##ELEMENTS),                  \
        .elements = offsetof(TYPE, ELEMENTS), .truncated = offsetof(TYPE, truncated),              \
        .next = offsetof(TYPE, next), .what = (WHAT), .remedy = (REMEDY)                           \
    }
// Sends the request again and again, with *cursor (a field of its command) set to where the next
// page begins. As kvq__ctl_ask; the list is empty if it fails.
int kvq__ctl_ask_list(struct kvq__ctl *ctl, Kvq__Request *request, Kvq__Cursor **cursor,
                      const struct kvq__ctl_kind *kind, struct kvq__ctl_list *list);
void kvq__ctl_list_free(struct kvq__ctl_list *list);
// Frees the list that was printed. KVQ_EXIT_OK, or, if it was not whole, words on standard error
// and KVQ_EXIT_FAILED.
int kvq__ctl_list_end(struct kvq__ctl_list *list, const struct kvq__ctl_kind *kind);

// Prints the list as the command line asks, by its table of columns, and frees it. An exit status.
struct kvq__ctl_table;
int kvq__ctl_show_list(struct kvq__ctl *ctl, struct kvq__ctl_list *list,
                       const struct kvq__ctl_kind *kind, const struct kvq__ctl_table *table);

// The kinds of events of daemon/core/base/event_kinds.h, with NULL behind them.
extern const char *const kvq__ctl_event_kinds[];

// Commands. Arguments are those behind the command's words.
int kvq__ctl_status(struct kvq__ctl *ctl, char **args);
int kvq__ctl_ping(struct kvq__ctl *ctl, char **args);
int kvq__ctl_version(struct kvq__ctl *ctl, char **args);
int kvq__ctl_doctor(struct kvq__ctl *ctl, char **args);
int kvq__ctl_events(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_list(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_show(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_drop(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_move(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_park(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_prefetch(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_pin(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_unpin(struct kvq__ctl *ctl, char **args);
int kvq__ctl_prefix_status(struct kvq__ctl *ctl, char **args);
int kvq__ctl_prefix_drop(struct kvq__ctl *ctl, char **args);
int kvq__ctl_quota_list(struct kvq__ctl *ctl, char **args);
int kvq__ctl_quota_get(struct kvq__ctl *ctl, char **args);
int kvq__ctl_quota_set(struct kvq__ctl *ctl, char **args);
int kvq__ctl_quota_delete(struct kvq__ctl *ctl, char **args);
// Takes the value of --host-bytes (0), --device-bytes, --disk-bytes, --sessions (3) or
// --table-bytes. False: it is none.
bool kvq__ctl_quota_option(struct kvq__ctl *ctl, int which, const char *text);
int kvq__ctl_session_save(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_restore(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_export(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_import(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_push(struct kvq__ctl *ctl, char **args);
int kvq__ctl_session_pull(struct kvq__ctl *ctl, char **args);
int kvq__ctl_remote_status(struct kvq__ctl *ctl, char **args);
int kvq__ctl_remote_list(struct kvq__ctl *ctl, char **args);
int kvq__ctl_remote_remove(struct kvq__ctl *ctl, char **args);
int kvq__ctl_remote_cancel(struct kvq__ctl *ctl, char **args);
int kvq__ctl_storage_status(struct kvq__ctl *ctl, char **args);
int kvq__ctl_storage_list(struct kvq__ctl *ctl, char **args);
int kvq__ctl_storage_verify(struct kvq__ctl *ctl, char **args);
int kvq__ctl_storage_gc(struct kvq__ctl *ctl, char **args);
int kvq__ctl_storage_compact(struct kvq__ctl *ctl, char **args);
int kvq__ctl_format_list(struct kvq__ctl *ctl, char **args);
int kvq__ctl_drain(struct kvq__ctl *ctl, char **args);
int kvq__ctl_shutdown(struct kvq__ctl *ctl, char **args);
int kvq__ctl_config_get(struct kvq__ctl *ctl, char **args);
int kvq__ctl_config_set(struct kvq__ctl *ctl, char **args);
int kvq__ctl_config_reload(struct kvq__ctl *ctl, char **args);
int kvq__ctl_client_list(struct kvq__ctl *ctl, char **args);
int kvq__ctl_client_kick(struct kvq__ctl *ctl, char **args);
int kvq__ctl_key_make(struct kvq__ctl *ctl, char **args);
int kvq__ctl_key_show(struct kvq__ctl *ctl, char **args);
int kvq__ctl_completion(struct kvq__ctl *ctl, char **args);
int kvq__ctl_top(struct kvq__ctl *ctl, char **args);
int kvq__ctl_size(struct kvq__ctl *ctl, char **args);

// What top shares with other commands: two questions. The status has all namespaces
// once kvq__ctl_status_of was called; it is part of the list.
int kvq__ctl_ask_status(struct kvq__ctl *ctl, struct kvq__ctl_list *list);
Kvq__StatusReply *kvq__ctl_status_of(const struct kvq__ctl_list *list);
int kvq__ctl_ask_sessions(struct kvq__ctl *ctl, struct kvq__ctl_list *list);
// Likewise what is saved, and what is on the remote store.
int kvq__ctl_ask_saved(struct kvq__ctl *ctl, struct kvq__ctl_list *list);
int kvq__ctl_ask_remote(struct kvq__ctl *ctl, struct kvq__ctl_list *list);
int kvq__ctl_ask_clients(struct kvq__ctl *ctl, struct kvq__ctl_list *list);
int kvq__ctl_ask_quotas(struct kvq__ctl *ctl, struct kvq__ctl_list *list);
int kvq__ctl_ask_prefixes(struct kvq__ctl *ctl, struct kvq__ctl_list *list);
// One session by its name, one namespace's limits, the storage: valid as a reply of kvq__ctl_ask.
int kvq__ctl_ask_session(struct kvq__ctl *ctl, char *name, const Kvq__Session **session);
int kvq__ctl_ask_quota(struct kvq__ctl *ctl, char *ns, const Kvq__QuotaStatus **quota);
// Whether there is the namespace that was given, and this user may look at it. An exit status.
int kvq__ctl_check_namespace(struct kvq__ctl *ctl);
// What an import of the file would do.
int kvq__ctl_ask_import_look(struct kvq__ctl *ctl, char *file, const Kvq__ImportLook **look);
int kvq__ctl_ask_storage_status(struct kvq__ctl *ctl, const Kvq__StorageReply **storage);
// Whether any limit is given. An exit status, with the complaint printed.
int kvq__ctl_check_quota(const struct kvq__ctl *ctl);
// A client's number as it was typed. An exit status, with the complaint printed.
int kvq__ctl_client_number(const char *text, uint64_t *id);
// What a session is called in a command, its name, or #ID if it has none, with its shard; and what
// is done with it. In one of the buffers of kvq__ctl_text.
const char *kvq__ctl_session_label(const Kvq__Session *session);
const char *kvq__ctl_session_state(const Kvq__Session *session);

// {"kvqctl": OURS, "kvqd": THEIRS or null}.
void kvq__ctl_print_versions(const char *ours, const char *theirs);

// "dropped NAME", or as JSON {"dropped": "NAME"}.
void kvq__ctl_print_done(const struct kvq__ctl *ctl, const char *what, const char *name);

// Prints an object, or null if there was no memory for it, and deletes it.
struct cJSON;
void kvq__ctl_print_and_free(struct cJSON *json);
// Prints a message as one JSON object, its fields named as in proto/kvq.proto.
void kvq__ctl_print_json(const ProtobufCMessage *message);
// What the daemon says of a counter; 0: nothing, since it is older or younger.
uint64_t kvq__ctl_counter(const Kvq__StatusReply *status, const char *name);
// Prints messages as one JSON array.
void kvq__ctl_print_json_array(ProtobufCMessage *const *messages, size_t n);

// Prints a message as one JSON object on one line.
void kvq__ctl_print_json_message(const ProtobufCMessage *message);
// Prints {"status": ..., "sessions": ...} on one line.
void kvq__ctl_print_json_line(const ProtobufCMessage *status, ProtobufCMessage *const *sessions,
                              size_t n);

// Writes out what was printed. False: that could not be, now or before; the first time it says why,
// unless nobody reads any more.
bool kvq__ctl_flush(void);

// As printf, cut at 511 bytes, in one of a few static buffers, as all that follow.
const char *kvq__ctl_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Short forms for people, in one of a few static buffers: "1.5 GiB", "3 h 12 min".
const char *kvq__ctl_bytes(uint64_t bytes);
// "1 client", "2 clients".
const char *kvq__ctl_count(uint64_t n, const char *one);
const char *kvq__ctl_duration(uint64_t ms);
// "512.0 MiB of 1.0 GiB" and "2 of 10", or without a limit (0) what is used alone.
const char *kvq__ctl_of_bytes(uint64_t used, uint64_t limit);
const char *kvq__ctl_of(uint64_t used, uint64_t limit);

// Foreign text that goes to a terminal: control characters become '?', also those that change the
// order in which text stands. Static buffers as above.
const char *kvq__ctl_clean(const char *text);

#endif
