// SPDX-License-Identifier: Apache-2.0
//
// The store jobs own the store of saved sessions (storage/store.h) and bring it and the core
// together. A task is a function on a fiber of the loop's thread (runtime/fiber.h), which waits
// for its steps on other threads: what reads or writes files runs on libuv's, what needs the core
// on the poller's. One task at a time writes, and those of one name go one after the other
// (queue.h). Everything here belongs to the loop's thread.
//
//   MADE --start--> RUNNING <--> WAITING for another thread, its name, its turn, or time to pass
//                      |
//                      `--> ENDED, done() is called on the loop's own stack
#ifndef KVQ_DAEMON_STORE_STORE_H
#define KVQ_DAEMON_STORE_STORE_H

#include <sys/queue.h>
#include <uv.h>

#include "daemon/core/base/histogram.h"
#include "daemon/core/core.h"
#include "daemon/core/residency/reshard.h"
#include "daemon/runtime/fiber.h"
#include "daemon/runtime/mailbox.h"
#include "daemon/runtime/server.h"
#include "daemon/store/queue.h"
#include "proto/wire.h"

struct kvq__server;
struct kvq__jobs;
struct kvq__save;
struct kvq__found;
struct kvq__begin;
struct kvq__change;
struct kvq__loading;
struct kvq__transfer;
struct kvq__prefix_ask;
struct kvq_store_space;
struct kvq_store_freed;
struct kvq__look;
struct kvq__batch;

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
    struct kvq__fiber fiber;
    void (*run)(struct kvq__task *task);   // all that it does
    void (*call)(struct kvq__task *task);  // what it waits for, on another thread
    bool (*piece)(struct kvq__task *task); // likewise, called until it returns true
    TAILQ_ENTRY(kvq__task) link, sleep_link;
    struct kvq__mail mail, copied_mail;
    uv_work_t work;
    uint64_t wake_at; // when it has slept enough
    bool writes, again, unchanged, own, quiet;
    bool committed;            // its transaction (batch.c)
    bool answered;             // by what is in memory
    bool at_poller;            // the poller's thread may write to it; the loop's own
    struct kvq__reshard_as as; // shards 0: as many as were saved
    struct kvq__hold hold;     // of the name that it is about
    struct kvq__turns *turns;  // that it has a turn of, or waits for one; NULL: of none
    struct kvq__write_turn turn;
    bool has_turn, along; // along: it is written in the turn of another task
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES], text[KVQ_TEXT_BYTES];
    const char *doing;                     // for people; NULL: what the request says
    char working[2 * KVQ_NAME_BYTES + 64]; // what was being done, and how many waited, when it came
    uint32_t queued;
    uint64_t stored; // the session in the store that it is about; 0: none
    int rc;
    uint64_t begun;
    bool set_aside; // a save whose session cannot be taken hold of as yet
    uint64_t tokens, written_blocks, written_bytes, kept_blocks;
    struct kvq__save *save;
    uint64_t needed;          // bytes that the save is to write, counted before it writes any
    struct kvq__batch *batch; // that it writes in its turn
    struct kvq__found *found;
    const struct kvq__begin *begin;   // as what it is loaded
    struct kvq__loading *loading;     // that is begun
    struct kvq__loading *reading;     // that is read while the task goes on; NULL: it has ended
    struct kvq__transfer *transfer;   // that is being asked for
    struct kvq__prefix_ask *ask;      // for what the session begins with; NULL: none
    uint32_t pages;                   // that the store has of it
    const struct kvq__store_job *job; // of the core's, so that a session is parked; else NULL
    struct kvq__override limits;      // that are to be a namespace's
    struct kvq__change *change;       // of the configuration
    struct kvq_store_space *spaces;   // what namespaces have on disk now
    size_t n_spaces;
    struct kvq__look *look;        // at a file that may be imported
    struct kvq_store_freed *freed; // of a pass over the store, and whether there is more to do
};

// How long what has ended well took, from when it was asked for.
struct kvq__store_times {
    struct kvq__histogram of[KVQ__TIMES];
};
const struct kvq__store_times *kvq__jobs_times(const struct kvq__jobs *jobs);

// Opens the store, if the configuration has one. 0, or a code with a text.
int kvq__jobs_open(struct kvq__server *server, struct kvq__jobs **jobs, char *text);
// Before the core is closed, with nothing under way and the poller ended: deletes what is stored of
// sessions that have ended and whose turn has not come. NULL is fine.
void kvq__jobs_forget_last(struct kvq__jobs *jobs);
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
// Reopens the log file, reads the configuration again and puts what can change in effect: at once
// or, if that is being done, once more when it has ended. The log says what came of it.
void kvq__jobs_reload(struct kvq__jobs *jobs);
// Saves all named sessions that are not saved, if the configuration says so; then calls done.
void kvq__jobs_drain(struct kvq__jobs *jobs, void (*done)(struct kvq__server *server));

#endif
