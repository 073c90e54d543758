// SPDX-License-Identifier: Apache-2.0
//
// Transfers to and from the remote store (storage/remote.h): pushes, pulls, lists and removals.
//
// A transfer is a task (internal.h), which has a thread of its own while it talks to the remote
// store, so that a slow one keeps no file from being read or written; so many at a time, the others
// queue. What a push sends is exported beside whoever writes to the store; only the import at the
// end of a pull is one of those who write, and waits for its turn with them. While it runs, nobody
// opens a session of that name: who tries waits until it has ended.
//
// Everything here belongs to the loop's thread.
#ifndef KVQ_DAEMON_STORE_TRANSFER_H
#define KVQ_DAEMON_STORE_TRANSFER_H

#include "daemon/store/internal.h"
#include "storage/remote.h"

enum kvq__transfer_kind {
    KVQ__TRANSFER_PUSH,
    KVQ__TRANSFER_PULL,
    KVQ__TRANSFER_REMOVE,
    KVQ__TRANSFER_LIST,
};

enum kvq__transfer_phase {
    KVQ__TRANSFER_QUEUED,
    KVQ__TRANSFER_SAVING,
    KVQ__TRANSFER_TALKING, // to the remote store
    KVQ__TRANSFER_WAITING, // for the name: opens and saves that began before
    KVQ__TRANSFER_IMPORTING,
    KVQ__TRANSFER_ENDED,
};

// What transfers that failed have left, for the next try: so long, and so many files beside those
// that have failed since the folder was looked through.
enum { KVQ__LEFT_SECONDS = 86400, KVQ__LEFT_FILES = 8 };

struct kvq__transfer {
    TAILQ_ENTRY(kvq__transfer) link;
    struct kvq__desk *desk;
    uint64_t id;
    enum kvq__transfer_kind kind;
    enum kvq__transfer_phase phase;
    uint32_t uid;                                     // who asked for it: a user,
    uint8_t key[32];                                  // or a key from another machine
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];    // here
    char far_ns[KVQ_NAME_BYTES], far[KVQ_NAME_BYTES]; // there; a list's may be empty: all
    bool replace;                                     // of a pull
    bool again;                                       // of a push
    struct kvq__task *asker; // who waits for a list or a removal, which have no ticket

    bool in_line;    // waits for one of the threads
    bool talks;      // it has one
    uint32_t cancel; // a word: not 0 once it is to end
    uv_thread_t thread;
    struct kvq__mail mail;
    struct kvq__task task; // all of it
    char *path;            // what a pull has fetched, or some of it
    bool left;             // a failure may leave a file

    uint64_t done, all; // long words: bytes, as the thread tells them
    struct kvq_remote_moved moved;
    uint64_t begun, ended;
    int rc;
    char text[KVQ_TEXT_BYTES];
};

TAILQ_HEAD(kvq__transfers, kvq__transfer);

// The store jobs' part for the remote store.
struct kvq__desk {
    struct kvq__jobs *jobs;
    struct kvq__transfers transfers; // in the order of their ids; ended ones stay a while
    uint32_t n_talking, n_asking;    // of those with and without a ticket
    uint32_t failed;                 // and may have left files since the folder was swept
    bool sweeping;
    uint64_t wanted, swept; // bytes, where somebody sweeps who needs room,
    const char *kept;       // and the file that he goes on with; NULL: none
    uv_work_t sweep;
    uint32_t stop; // a word: not 0 once all are to end
    uint64_t last_id;
    char folder[KVQ_CONFIG_PATH + 16];
};

// Begins a transfer behind the task that calls this; it belongs to the desk from now on. KVQ_E_BUSY
// if one of that session is under way, KVQ_E_LIMIT if too many are, KVQ_E_NO_MEMORY; then it is
// still the caller's. When it has ended, its asker is woken, and it is gone.
int kvq__transfer_add(struct kvq__desk *desk, struct kvq__transfer *x, char *text);
// One that has not been forgotten, NULL: none of that id that a user may see.
struct kvq__transfer *kvq__transfer_find(struct kvq__desk *desk, uint64_t id,
                                         const struct kvq__peer *peer);
bool kvq__transfer_visible(const struct kvq__transfer *x, const struct kvq__peer *peer);
// It ends soon, and what was transferred is kept for the next try.
void kvq__transfer_cancel(struct kvq__transfer *x);
// "sending", "done"
const char *kvq__transfer_phase(const struct kvq__transfer *x);
const char *kvq__transfer_kind(const struct kvq__transfer *x);

// Opens the remote store as the configuration has it, watched by the transfer (NULL: by nobody).
// Any thread. 0, or a code with a text.
int kvq__remote_connect(const struct kvq_config *config, struct kvq__transfer *x,
                        struct kvq_remote **remote, char *text);
// On a transfer's thread, for a list: fills in asker->reply. A code with a text in x->text.
int kvq__transfer_list(struct kvq__transfer *x, struct kvq_remote *remote);

#endif
