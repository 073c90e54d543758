// SPDX-License-Identifier: Apache-2.0
//
// What the files of the store jobs share.
#ifndef KVQ_DAEMON_STORE_INTERNAL_H
#define KVQ_DAEMON_STORE_INTERNAL_H

#include "daemon/runtime/server.h"
#include "daemon/store/codebooks.h"
#include "daemon/store/saved_wire.h"
#include "daemon/store/store.h"
#include "storage/store.h"

TAILQ_HEAD(kvq__tasks, kvq__task);

struct kvq__desk;
struct kvq__used_name;

enum {
    KVQ__UNSAVED_BATCH = 64,     // sessions that are asked for at a time
    KVQ__SCANS_AT_ONCE = 2,      // verifies and exports side by side, of a namespace one
    KVQ__READ_AT_ONCE = 3,       // restores that read side by side,
    KVQ__READ_AT_ONCE_OF = 2,    // and of one namespace
    KVQ__SPARE_BYTES = 16 << 20, // what a save needs on disk besides its blocks
};

// Tells the poller that a layer is there.
struct kvq__layer_mail {
    struct kvq__mail mail;
    struct kvq__restore *restore;
    uint32_t layer;
};

// A session that is being restored: a task of its own, beside the one that asked for it.
struct kvq__loading {
    struct kvq__task task; // ns, rc, text, begun; its turn is to read
    struct kvq__restore *restore;
    struct kvq__found *found;
    struct kvq__task *asker; // that learns of the end; NULL: none
    bool awaited;            // the asker waits for the end
    bool fetches, prefix;
    struct kvq__layer_mail layers[KVQ_MAX_LAYERS];
    uint64_t tokens, first_ns, bytes;
};

// Limits that were set at run time, as the file has them.
struct kvq__limits {
    struct kvq__turns turns;  // of those who set some
    struct kvq__override *at; // KVQ_MAX_OVERRIDES of them
    uint32_t n;
};

struct kvq__jobs {
    struct kvq__server *server;
    struct kvq_store *store; // NULL: nothing is saved
    struct kvq__fibers fibers;
    struct kvq__names names;
    struct kvq__turns turns;    // of those that write
    struct kvq__turns scans;    // of those that read all of the store, or of a session, to its end
    struct kvq__tasks sleepers; // who wait for time to pass
    uint32_t n_tasks, n_own;    // n_own: of these, the store jobs' own saves
    uv_timer_t alarm, tick;     // alarm: for the sleeper who is first
    bool timers;
    uint32_t leaving; // a word, which other threads may look at: 1 once the daemon begins to end
    uint32_t ended;   // likewise: 1 once it closes, behind the saves before its end
    struct kvq__store_times times;

    struct kvq__mail unsaved_mail; // at the poller while asking
    bool asking, draining, drain_begun;
    uint32_t n_unsaved;
    struct kvq__unsaved unsaved[KVQ__UNSAVED_BATCH];
    uint32_t which;
    uint64_t idle_ns;                            // that such sessions have been idle for
    void (*drained)(struct kvq__server *server); // still to be called; NULL: nobody waits for it

    struct kvq__desk *desk; // NULL: there is no remote store

    struct kvq__mail wants_mail, stop_mail;
    bool wanted, deaf; // poller's thread: the mail is on its way; no orders are taken any more

    struct kvq__limits limits;
    bool reloading, reload_again; // for a signal; and one has come since

    struct kvq__turns reads; // of loadings

    struct kvq_store_use *used; // not yet in the store
    uint32_t n_used, room_used;
    struct kvq__used_name *named; // likewise
    uint32_t n_named, room_named;
    bool untidy;         // something was written since there was nothing to be compacted
    bool unswept;        // there may be unnamed sessions of an earlier run,
    bool sweeping;       // of which some are being deleted,
    uint32_t swept;      // and so many were; who has his turn to write counts them
    bool watching;       // somebody looks at the store
    uint64_t watched_ns; // when that began, the last time

    struct kvq__tasks beginning; // to read prefixes, which the index does not show yet
    struct kvq__tasks waiting;   // for one of these, which is what they want, too
};

// ---- task.c: a task, and how it waits ----
//
// While a call waits, others run: what belongs to the loop's thread may have changed when the call
// returns. A step on another thread has the task to itself until then.

// Gives it what it needs to be started. 0, or KVQ_E_NO_MEMORY with a text. Any thread.
int kvq__task_make(struct kvq__jobs *jobs, struct kvq__task *task);
// Runs it; if a task calls this, behind that one. When run() returns, the task gives back its name
// and its turn, and its rc and text go into its reply; done() follows.
void kvq__task_start(struct kvq__task *task, void (*run)(struct kvq__task *task));

// All that follow are called by the task itself, and wait.

// For a call on the poller's thread, which owns the core.
void kvq__task_at_poller(struct kvq__task *task, void (*call)(struct kvq__task *task));
// The same for what takes long: until a piece returns true, others have their turn in between.
void kvq__task_at_poller_in_pieces(struct kvq__task *task, bool (*piece)(struct kvq__task *task));
// For a call on one of libuv's threads, which may read and write files.
void kvq__task_at_work(struct kvq__task *task, void (*call)(struct kvq__task *task));
// For some milliseconds to pass.
void kvq__task_sleep(struct kvq__task *task, uint64_t ms);
// For the name that task->ns and task->name are, before its turn is waited for. What the task goes
// on to find in memory and in the store is then as it stays, until it ends.
void kvq__task_take_name(struct kvq__task *task, enum kvq__hold_kind kind);
// For its turn to write to the store; or until another one has written it in his (task->along).
void kvq__task_take_turn(struct kvq__task *task);
// For its turn of others, in which it does not write. ns: whose it is, empty: nobody's.
void kvq__task_take_turn_of(struct kvq__task *task, struct kvq__turns *turns, const char *ns);
// Its turn is over, if it has one: it counts what is on disk now, and gives back its name and its
// turn. Whoever has no more to do need not call this.
void kvq__task_end_turn(struct kvq__task *task);
// For somebody to wake it.
void kvq__task_wait(struct kvq__task *task);

// Not by the task itself: goes on with one that waits to be woken.
void kvq__task_wake(struct kvq__task *task);
// It waits for a turn no more: whoever calls this writes it in his own, then wakes it.
void kvq__task_go_along(struct kvq__task *task);
// Gives back its name and its turn, in which it has written nothing.
void kvq__task_step_aside(struct kvq__task *task);
static inline struct kvq__task *kvq__task_of_turn(struct kvq__write_turn *turn)
{
    return (struct kvq__task *)((char *)turn - offsetof(struct kvq__task, turn));
}

void kvq__jobs_tell(struct kvq__jobs *jobs, enum kvq__event_kind kind, const char *ns,
                    const char *name, const char *text);

// ---- watch.c: what those see who watch the store ----

// Such a job has ended with rc: it counts as failed unless it ended well, was called off, or asked
// for what is not there, or not to be had just now.
void kvq__jobs_note_end(struct kvq__jobs *jobs, enum kvq__store_time what, int rc);
// Looks at the store, if that is due.
void kvq__jobs_watch(struct kvq__jobs *jobs);

// Poller's thread. KVQ_E_EXISTS with a text if task->ns and name are in memory: what is stored of
// it is not replaced then. The task holds the name alone, so that it does not come meanwhile.
int kvq__jobs_refuse_here(struct kvq__task *task);

// ---- tidy.c ----

// A session of the store (0: none) was used just now.
void kvq__jobs_used(struct kvq__jobs *jobs, uint64_t session);
// The same by name, whether or not the store has it.
void kvq__jobs_used_name(struct kvq__jobs *jobs, const char *ns, const char *name, uint32_t shard);
// Writes down all that were, at the end: blocks for it.
void kvq__jobs_note_used(struct kvq__jobs *jobs);
// Does some of what can wait, if nobody else has anything to do.
void kvq__jobs_tidy(struct kvq__jobs *jobs);
// Frees that much on disk if it can. Whether it freed anything. On a thread of libuv's, in the turn
// of a task that writes.
bool kvq__jobs_make_room(struct kvq__jobs *jobs, uint64_t bytes);
// The same for what a task was refused by its rc, also at a limit of its namespace, which sessions
// of an earlier run may take up. Whether it may fit now.
bool kvq__jobs_help(const struct kvq__task *task, uint64_t bytes);
// What is being written and read just now, empty: nothing; and how many wait to write.
void kvq__jobs_working(const struct kvq__jobs *jobs, bool names, char *out, size_t n,
                       uint32_t *queued);

// ---- list.c ----

// LIST_SAVED. Waits.
void kvq__jobs_list(struct kvq__task *task);

// ---- save.c ----

// Saves the session that task->ns and name, or its request, are about. Waits. task->rc says what
// came of it.
void kvq__jobs_save(struct kvq__task *task);

// Blocks that were put in a save, of which sessions that come after may have the same ones.
struct kvq__same_blocks {
    void *root; // of tsearch()
};
void kvq__same_blocks_free(struct kvq__same_blocks *same);

enum { KVQ__SCRATCH_BYTES = KVQ__SAVED_BYTES + KVQ_WIRE_ARENA };
// Puts all of task->save into `out`, and counts it in the task. 0 or a code with a text. On a
// thread of libuv's.
int kvq__jobs_write(struct kvq__task *task, struct kvq_save *out, struct kvq__same_blocks *same,
                    uint8_t scratch[KVQ__SCRATCH_BYTES]);
// The same for kvq__save_copy: the poller then lets the session go on.
int kvq__jobs_copy(struct kvq__task *task);
// Bytes of its parts that the store does not have, or may not. Asked for before any is written:
// from then on parts have ids, which they keep if the save is undone.
uint64_t kvq__jobs_unsaved_bytes(const struct kvq__task *task);
// Reads all that is stored of a session without a name and checks it: once it is parked nobody has
// another copy. 0, KVQ_E_DAMAGED, after which a save puts what is damaged anew, or another code. On
// a thread of libuv's.
int kvq__jobs_read_back(struct kvq__task *task);
// How it has ended, as an event.
void kvq__jobs_tell_saved(struct kvq__task *task);

// ---- batch.c ----

enum { KVQ__BATCH_BYTES = 64 << 20 }; // a transaction takes in no more once it has so much to write

// Sessions that are written in one transaction, as tasks of which each has its save.
struct kvq__batch {
    struct kvq__jobs *jobs;
    struct kvq__task **tasks;
    uint32_t n;
    bool full;             // nothing can be made room with
    uint32_t transactions; // so far
};
// On a thread of libuv's, in the turn of a task that writes. Both leave alone tasks that have no
// save or an rc of their own; each task's rc and text say what came of it. First what may change is
// copied, and the poller lets the sessions go on.
void kvq__batch_copy(struct kvq__batch *batch);
void kvq__batch_write(struct kvq__batch *batch);

// ---- drain.c ----

// Begins to save what is not saved, if the store jobs are to and nobody else saves of its own
// accord.
void kvq__jobs_drain_on(struct kvq__jobs *jobs);

// ---- read.c ----

// Reads all of the kvq__loading that the task begins. On a thread of libuv's.
void kvq__jobs_read(struct kvq__task *task);

// ---- quota.c ----

// Reads the file of limits that were set and puts them in effect; before anything else runs.
int kvq__jobs_quotas_open(struct kvq__jobs *jobs, char *text);
void kvq__jobs_quotas_close(struct kvq__jobs *jobs);
// SET_QUOTA or DELETE_QUOTA. Waits.
void kvq__jobs_set_quota(struct kvq__task *task);
// Tells the store of the limits on disk that the configuration has. 0, or a code with a text.
int kvq__jobs_tell_limits(struct kvq__jobs *jobs, char *text);
// After a task that may have changed what is on disk: tells the core what namespaces have there
// now. Waits.
void kvq__jobs_count(struct kvq__task *task);

// ---- settings.c ----

// GET_CONFIG, SET_CONFIG, RELOAD_CONFIG and LOOK_AT_RELOAD. The last three wait.
void kvq__jobs_get_config(struct kvq__task *task);
void kvq__jobs_set_config(struct kvq__task *task);
void kvq__jobs_reload_config(struct kvq__task *task);
void kvq__jobs_look_at_reload(struct kvq__task *task);

// ---- restore.c ----

// OPEN_SESSION and RESTORE_SESSION. Both wait.
void kvq__jobs_open_session(struct kvq__task *task);
void kvq__jobs_restore(struct kvq__task *task);
// All that the store has of a shard, and how far all shards are good. The task says whose.
int kvq__found_read(struct kvq__task *task, const struct kvq_store_session *s,
                    struct kvq__found *found);

// ---- reshard.c ----

// Shard task->as of what was saved with another number of shards, of which s is one.
int kvq__found_reshard(struct kvq__task *task, const struct kvq_store_session *s,
                       struct kvq__found *found);
void kvq__found_clear(struct kvq__found *found);
// Where a part lies, or the first of several blocks; with the bytes of the part.
struct kvq_stored kvq__found_block(const struct kvq__found *found, uint32_t part);
// Reads n parts of one that is put together.
int kvq__found_gather(struct kvq_store *store, const struct kvq__found *found,
                      const uint32_t *parts, uint32_t n, void *const *rooms, char *text);

// A job to fetch a session. Waits.
void kvq__jobs_fetch(struct kvq__task *task);
// The stamp of what is stored as task->ns and name. 0 or a code with a text; any thread of libuv's.
int kvq__jobs_stamp(struct kvq__task *task, uint64_t *stamp);
// Whether all of that is there, as far as is known, with this stamp. Likewise.
bool kvq__jobs_is_whole(struct kvq__task *task, uint64_t stamp);

// ---- park.c ----

// No more orders are taken; those that were end.
void kvq__jobs_stop_orders(struct kvq__jobs *jobs);
// Begins to delete sessions without a name that a run before has left, if there may be some: some
// in each transaction, in the turns of others. The loop's thread.
void kvq__jobs_sweep(struct kvq__jobs *jobs);
// Deletes all of them now, or those of a namespace if not NULL, for who lacks room. How many. On a
// thread of libuv's, in the turn of a task that writes.
uint32_t kvq__jobs_sweep_all(struct kvq__jobs *jobs, const char *ns);

// ---- remote.c: commands ----

// Checks what the configuration says of a remote store. 0, or a code with a text.
int kvq__jobs_remote_open(struct kvq__jobs *jobs, char *text);
void kvq__jobs_remote_close(struct kvq__jobs *jobs);
// Commands (commands.c has the table).
void kvq__jobs_push(struct kvq__task *task);
void kvq__jobs_pull(struct kvq__task *task);
void kvq__jobs_list_remote(struct kvq__task *task);
void kvq__jobs_remove_remote(struct kvq__task *task);
void kvq__jobs_ask_transfer(struct kvq__task *task);
void kvq__jobs_cancel_transfer(struct kvq__task *task);
void kvq__jobs_remote_status(struct kvq__task *task);
// Says why there is no remote store; returns KVQ_E_UNSUPPORTED.
int kvq__jobs_refuse_remote(struct kvq__task *task);

// ---- commands.c ----

// Finds the namespace that the peer means, and may use: task->ns, or task->rc < 0. Waits.
void kvq__jobs_resolve(struct kvq__task *task, const char *ns, const char *name);
// KVQ_E_INVALID with a text if a session of that name is neither exported nor imported.
int kvq__jobs_check_name(struct kvq__task *task, const char *name);
// Poller's thread: task->rc < 0 with a text if nothing is imported into task->ns.
void kvq__jobs_check_imported(struct kvq__task *task);
// Poller's thread, with the name held alone. What is stored as task->ns and name was imported, or
// is gone: nothing that stood there before, because a session was parked, is deleted any more.
void kvq__jobs_keep(struct kvq__task *task);
// Looks on for who reads long, with the jobs as its context: a daemon that ends does not wait until
// all of a store, or of a file, has been read. Any thread.
int kvq__jobs_look_for_end(void *context, uint64_t done, uint64_t all);
// The same for who holds the turn to write: it looks for the daemon's first wish to end, since the
// saves before its end wait for that turn.
int kvq__jobs_look_for_leave(void *context, uint64_t done, uint64_t all);
// What a task that writes does, for people.
const char *kvq__jobs_doing(const struct kvq__task *task);

// ---- look.c ----

// LOOK_AT_IMPORT. Waits.
void kvq__jobs_look(struct kvq__task *task);

// ---- transfer.c ----

// All end soon, and no new ones begin.
void kvq__transfers_stop(struct kvq__jobs *jobs);
// Removes what transfers have left, if no transfer runs and the disk lacks room for so many bytes.
// Whether it freed anything. Called by a task; waits.
bool kvq__transfers_make_room(struct kvq__task *task, uint64_t bytes);

// What the store has of one shard.
struct kvq__found {
    struct kvq__saved saved;
    struct kvq_stored *blocks;
    struct kvq__part *parts; // in the same order
    uint32_t n;
    uint64_t good;                // tokens that can be had, of all shards
    struct kvq__book_holds books; // that it needs
    // Of one that is put together of others, as reshard.h has it: all shards that were saved. It
    // has no blocks of its own then.
    struct kvq__found *sources;
    uint32_t n_sources;
    struct kvq__range *ranges;
    uint32_t *first;
    bool ahead;
};
void kvq__found_free(struct kvq__found **found);
// What the session is; then what blocks it has, and the ids of its tokens, up to found->good. On
// one of libuv's threads.
int kvq__found_meta(struct kvq__task *task, const struct kvq_store_session *session,
                    struct kvq__found *found);
int kvq__found_blocks(struct kvq__task *task, const struct kvq_store_session *session,
                      struct kvq__found *found);
// Reads the codebooks that task->found needs, which holds them from then on.
void kvq__found_books(struct kvq__task *task);

// As what it is made: in a namespace and place, and if so many tokens are given as that prefix.
struct kvq__begin {
    const char *ns, *place;
    uint64_t prefix_tokens;
    // Poller's thread: called at once when there is memory, or there is none; before anybody else
    // sees the session. NULL: nothing is.
    void (*then)(struct kvq__task *task);
};
// Makes task->found in memory, and takes memory for it. Waits. Then task->loading is what is to be
// read; NULL: nothing is, or it failed (task->rc).
void kvq__load_begin(struct kvq__task *task, const struct kvq__begin *as);
// Begins to read that, if anything is: task->reading, until it has ended.
void kvq__load_start(struct kvq__task *task);
// Waits until that has ended, and has its task->rc then.
void kvq__load_wait(struct kvq__task *task);
// It goes on without the task.
void kvq__load_leave(struct kvq__task *task);

// ---- prefix.c ----

// If the store has more of the prefix than memory, it is read, or is being read, when this returns.
// Whatever came of it, task->ask is what the session begins with. Waits.
void kvq__jobs_prefix(struct kvq__task *task);
// LOOKUP_PREFIX. Waits.
void kvq__jobs_lookup(struct kvq__task *task);
// The key that hashes are keyed with: the store's, made if there is none. 0 or a code with a text.
int kvq__prefix_key(struct kvq_io *io, const char *folder, uint8_t key[32], char *text);

#endif
