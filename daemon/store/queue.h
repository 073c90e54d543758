// SPDX-License-Identifier: Apache-2.0
//
// Who may go, and who waits, of those who have to do with the store. No thread, socket or file:
// the store jobs pass in what comes next, and tests may do so too. One thread, the loop's.
//
// Names. A session's name has one order of events, in memory and in the store together. Who looks
// for it in the store to make it in memory holds the name from before that look until the session
// is in memory; who changes what is stored under it (a save, a drop, an import) holds it alone, a
// drop from before the session leaves memory until it has left the store. So nobody restores what
// is being deleted, and nobody deletes what was saved after the drop.
//
// Turns. One at a time writes to the store, and a few read sessions from it. Namespaces have their
// turns one after the other, and within one it is first come, first served. Of those that read one
// namespace never has all, so that others do not wait for the end of what it reads.
//
// A name is taken before a turn is waited for, never in a turn: else two could wait for each other.
#ifndef KVQ_DAEMON_STORE_QUEUE_H
#define KVQ_DAEMON_STORE_QUEUE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "proto/limits.h"

// ---- Names ----

enum kvq__hold_kind {
    KVQ__HOLD_NONE,
    KVQ__HOLD_LOOK, // beside others who look
    KVQ__HOLD_ALONE,
};

// Of one who holds a name or waits for it; zeros at first.
struct kvq__hold {
    TAILQ_ENTRY(kvq__hold) link;
    enum kvq__hold_kind kind;
    bool queued, held; // queued: it holds the name, or waits for it
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    void (*go)(struct kvq__hold *hold);
};
TAILQ_HEAD(kvq__holds, kvq__hold);

enum { KVQ__NAME_BUCKETS = 256 };
struct kvq__names {
    struct kvq__holds buckets[KVQ__NAME_BUCKETS]; // each in the order in which they came
};

void kvq__names_init(struct kvq__names *names);
bool kvq__names_empty(const struct kvq__names *names);
// Takes the name as hold->kind says, and calls go(), at once or when those who came before and are
// in its way have given it back.
void kvq__name_take(struct kvq__names *names, struct kvq__hold *hold, const char *ns,
                    const char *name, void (*go)(struct kvq__hold *hold));
// Whether nobody holds it, nor waits for it.
bool kvq__name_is_free(struct kvq__names *names, const char *ns, const char *name);
// Gives it back, or stops waiting for it. Fine if it has none.
void kvq__name_give(struct kvq__names *names, struct kvq__hold *hold);

// ---- Turns ----

struct kvq__write_turn;
TAILQ_HEAD(kvq__turn_list, kvq__write_turn);

// Of one whose turn it is, or who waits for it; zeros at first.
struct kvq__write_turn {
    TAILQ_ENTRY(kvq__write_turn) link;
    struct kvq__turn_list behind; // of its namespace, if it is the first of it
    bool queued;
    char ns[KVQ_NAME_BYTES];
    void (*go)(struct kvq__write_turn *turn);
};

struct kvq__turns {
    struct kvq__turn_list first; // of each namespace that waits, in the order of their turns
    struct kvq__write_turn *now; // whose turn it is, who came last; NULL: that is over
    uint32_t most, most_of;      // at a time, and of one namespace
    struct kvq__turn_list going; // those under way
    uint32_t under_way;
    uint32_t n; // that wait
};

void kvq__turns_init(struct kvq__turns *turns, uint32_t most, uint32_t most_of);
// Calls go() when it is its turn, maybe at once. ns is empty for what is no namespace's.
void kvq__turn_wait(struct kvq__turns *turns, struct kvq__write_turn *turn, const char *ns,
                    void (*go)(struct kvq__write_turn *turn));
// The next one that waits in a namespace, behind a turn or, with NULL, the first. NULL: none.
struct kvq__write_turn *kvq__turn_after(const struct kvq__turns *turns, const char *ns,
                                        const struct kvq__write_turn *turn);
// It waits no more.
void kvq__turn_leave(struct kvq__turns *turns, struct kvq__write_turn *turn);
// Its turn is over.
void kvq__turn_end(struct kvq__turns *turns, struct kvq__write_turn *turn);

#endif
