// SPDX-License-Identifier: Apache-2.0
//
// Room that somebody has to make: what a caller asks for that was refused a block (evict_for of
// struct kvq__upward), and what comes of it. residency/evict.h says who goes. Part of state.h.
#ifndef KVQ_DAEMON_CORE_MEM_ROOM_H
#define KVQ_DAEMON_CORE_MEM_ROOM_H

#include "daemon/core/mem/pool.h"

// The most bytes that the refused namespace can have there at all.
uint64_t kvq__shortage_limit(const struct kvq__shortage *shortage);
// The bytes that are free there, and those that indexes of prefixes would give up, unless these
// become free only later. What can be taken may be less: free stretches lie in extents of other
// namespaces, or are too short.
uint64_t kvq__shortage_free(const struct kvq__shortage *shortage);

// How many sessions could not make room for a request, by the reason.
struct kvq__in_the_way {
    uint32_t in_use, pinned, young, nowhere; // nowhere: no place could take them
    // Until something changes, whoever needs more than so many bytes gets the same answer, if that
    // was NONE, or LATER and too late.
    uint64_t reach;
};

// Bytes that a request needs where there is no room for it.
struct kvq__need {
    uint64_t missing; // that are yet to be had
    uint64_t whole;   // with what its sessions have there
};

// What the request that takes pages just now needs of a place, or of a namespace below its limit
// (admission.c).
struct kvq__demand {
    uint64_t attempt;      // to take pages that it belongs to; that of another attempt is stale
    struct kvq__need need; // of the entries that have neither been refused nor got theirs
    bool refused;          // there is no room for more than in_the_way.reach bytes
    struct kvq__in_the_way in_the_way;
};

// Those that wait for room in a pool, or for a namespace's below its limit (admission.c).
TAILQ_HEAD(kvq__waiters, kvq__queue);

struct kvq__line {
    struct kvq__waiters waiters; // queues whose requests wait, or have; the oldest first
    uint64_t freed;              // changes whenever one of them may gain by what became free
    struct kvq__queue *unseen;   // those before it have seen that; NULL: all have
    uint64_t shown, extents;     // `freed`, and core->room.extents_made, then
};

// A namespace's requests among those that wait in a pool, or all that wait below a limit of it.
struct kvq__waits {
    uint32_t n;
    uint64_t evictions; // core->evict.ended when one of them last looked for sessions that may go
    uint64_t next_try, next_hope; // of one of them from the start: after a while, or since there
                                  // seems to be room
};

void kvq__line_open(struct kvq__line *line);
// How often blocks of a namespace in a pool have become free, for those who wait there and for
// those who wait below the namespace's limit.
struct kvq__freed {
    uint64_t in_pool, below_limit;
};
struct kvq__freed kvq__freed_of(struct kvq__namespace *ns, const struct kvq__pool *pool);
void kvq__freed_set(struct kvq__namespace *ns, const struct kvq__pool *pool,
                    struct kvq__freed freed);
// One more has.
void kvq__freed_note(struct kvq__namespace *ns, const struct kvq__pool *pool);

enum kvq__help {
    KVQ__HELP_NONE,  // no session that may leave would make enough room
    KVQ__HELP_LATER, // a session that would is not idle for long enough yet
    KVQ__HELP_NOW,   // an eviction is under way, or an ended session's memory is being freed;
                     // `freed` of the caller's line changes then
};

// A caller that waits looks for sessions that may go no more often than this, unless the last
// eviction under way has ended since.
#define KVQ__LEAST_LOOK_NS 5000000ull

// A request for room, by a caller that was refused a block.
struct kvq__eviction_request {
    const struct kvq__shortage *shortage;
    uint64_t need;                  // bytes that are missing there, at most
    uint64_t since;                 // when the caller began to wait
    uint64_t ticket;                // sessions that requests with a ticket up to it use, stay
    const struct kvq__session *own; // the caller's session: it stays, with its group; NULL = none
    struct kvq__in_the_way *in_the_way;
    uint64_t *look_at; // KVQ__HELP_LATER: when
};

#endif
