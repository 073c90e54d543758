// SPDX-License-Identifier: Apache-2.0
//
// The store jobs own the store of saved sessions (storage/store.h) and bring it and the core
// together. Whatever reads or writes files runs on libuv's threads; one task at a time writes, and
// those of one name go one after the other (queue.h). Everything here belongs to the loop's thread.
#ifndef KVQ_DAEMON_STORE_STORE_H
#define KVQ_DAEMON_STORE_STORE_H

#include <sys/queue.h>
#include <uv.h>

#include "daemon/core/core.h"
#include "daemon/core/residency/reshard.h"
#include "daemon/runtime/mailbox.h"
#include "daemon/store/queue.h"
#include "proto/wire.h"

struct kvq__server;
struct kvq__jobs;
struct kvq__save;
struct kvq__found;
struct kvq__loading;
struct kvq__transfer;
struct kvq__prefix_ask;
struct kvq_store_space;

// A command that has to do with the store, embedded by who gives it; or the store jobs' own save.
struct kvq__task {
    // The giver's, who keeps what they point to until `done` is called on the loop's thread.
    const Kvq__Request *request;
    struct kvq_arena *arena;
    Kvq__Reply *reply;
    const struct kvq__peer *peer;
    struct kvq__client *client;             // NULL: not attached
    void (*before)(struct kvq__task *task); // on one of libuv's threads, before an open; or NULL
    void (*done)(struct kvq__task *task);

    // The store jobs'.
    struct kvq__jobs *jobs;
    TAILQ_ENTRY(kvq__task) link, room_link;
    struct kvq__mail mail, copied_mail;
    uv_work_t work;
    void (*step)(struct kvq__task *task);  // what comes next, on the thread that it was sent to
    void (*later)(struct kvq__task *task); // once it has waited for memory
    void (*then)(struct kvq__task *task);  // and once memory is there
    void (*begun_load)(struct kvq__task *task); // and once reading has begun
    void (*read)(struct kvq__task *task);       // and once all is read; NULL: nobody waits
    void (*next)(struct kvq__task *task);       // once that is over, or the namespace is known
    bool writes, again, unchanged, own, quiet, looked_again;
    bool at_poller;              // the poller's thread may write to it; the loop's own
    struct kvq__reshard_as as;   // shards 0: as many as were saved
    struct kvq__hold hold;       // of the name that it is about
    struct kvq__write_turn turn; // to write
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES], text[KVQ_TEXT_BYTES];
    const char *doing;                     // for people; NULL: what the request says
    char working[2 * KVQ_NAME_BYTES + 64]; // what was being done, and how many waited, when it came
    uint32_t queued;
    uint64_t stored; // the session in the store that it is about; 0: none
    int rc;
    uint64_t begun;
    // A save that was set aside: when it is tried again, for how many ms that is, and was in all.
    uint64_t try_at, try_after, waited;
    uint64_t tokens, written_blocks, written_bytes, kept_blocks;
    struct kvq__save *save;
    struct kvq__found *found;
    struct kvq__loading *loading;     // that is begun
    struct kvq__loading *reading;     // that is read while the task goes on; NULL: it has ended
    struct kvq__transfer *transfer;   // that is being asked for
    struct kvq__prefix_ask *ask;      // for what the session begins with; NULL: none
    uint32_t pages;                   // that the store has of it
    bool asked_again, has_asked;      // the store: since something was damaged; and read all it has
    const struct kvq__store_job *job; // of the core's, so that a session is parked; else NULL
    struct kvq__override limits;      // that are to be a namespace's
    struct kvq_store_space *spaces;   // what namespaces have on disk now
    size_t n_spaces;
    bool counted;
};

// Opens the store, if the configuration has one. 0, or a code with a text.
int kvq__jobs_open(struct kvq__server *server, struct kvq__jobs **jobs, char *text);
// Nothing is under way. NULL is fine.
void kvq__jobs_close(struct kvq__jobs **jobs);
// True once nothing is under way. Before it, nothing new is begun: see kvq__jobs_end.
bool kvq__jobs_idle(const struct kvq__jobs *jobs);
void kvq__jobs_end(struct kvq__jobs *jobs);

// Whether a command is for the store jobs.
bool kvq__jobs_takes(const struct kvq__jobs *jobs, const Kvq__Request *request);
// Whether there are requests of this command that it takes.
bool kvq__jobs_knows(Kvq__Request__CommandCase command);
// Takes it; task->done follows, maybe at once.
void kvq__jobs_start(struct kvq__jobs *jobs, struct kvq__task *task);
// Poller's thread: the core has orders (saved.h).
void kvq__jobs_wants(struct kvq__jobs *jobs);
// Saves all named sessions that are not saved, if the configuration says so; then calls done.
void kvq__jobs_drain(struct kvq__jobs *jobs, void (*done)(struct kvq__server *server));

#endif
