// SPDX-License-Identifier: Apache-2.0
//
// Pools: the memory of a place, cut into extents and these into blocks; see pool.c. And flights, by
// which blocks that running work may look at are not given out again. Part of state.h.
//
// An extent belongs to one namespace at a time; blocks of all sizes share it. A block is taken from
// the shortest free stretch of the namespace's extents that holds it, and only where there is none
// from another extent. So a block of n bytes is refused (KVQ_E_NO_MEMORY) only if each stretch that
// is free in the namespace's extents is shorter than n, and no extent is left that it may have.
// What is free and cannot be had is then
//
//     at most n bytes for each extent of the namespace, where it has given nothing back yet;
//     at most n bytes for each extent and each block in use of the namespace, in any case;
//     besides, what is free in the extents of other namespaces.
//
// A passing block is a raw one that is dropped as soon as its tokens are packed; a long step makes
// many. While less than half of the pool is taken, passing blocks have extents of their own, which
// become empty and go back to the system. An extent that also held a block that stays would not.
#ifndef KVQ_DAEMON_CORE_MEM_POOL_H
#define KVQ_DAEMON_CORE_MEM_POOL_H

#include <sys/queue.h>
#include <uv/tree.h>

#include "daemon/core/base/base.h"

// Who may still look at what was given up: flights until `at`, and of these none that does not hold
// or pack the session of the serial number `by` (0: nobody; KVQ__BY_SEVERAL: not known).
struct kvq__retired {
    uint64_t at, by;
};
#define KVQ__BY_SEVERAL UINT64_MAX

// A stretch of an extent: in use (referenced, or a deferred free), or free.
struct kvq__block {
    uint32_t refs;
    bool free;
    bool exempt;    // its namespace's limit does not count it: a move has copied it, or is about to
    uint64_t saved; // the store's id of its bytes, which do not change any more; 0 = none
    uint64_t at, bytes; // in its extent, multiples of 64
    struct kvq__extent *extent;
    struct kvq__retired retired;    // as it lost references
    TAILQ_ENTRY(kvq__block) beside; // of its extent, by address
    union {
        struct {
            TAILQ_ENTRY(kvq__block) deferred_link;
            LIST_ENTRY(kvq__block) given_link; // a deferred free: of the session that gave it up
        };
        STAILQ_ENTRY(kvq__block) link;   // among the extent's spare records
        RB_ENTRY(kvq__block) free_entry; // in its arena's free stretches
    };
};
STAILQ_HEAD(kvq__block_list, kvq__block);
LIST_HEAD(kvq__given_list, kvq__block);
TAILQ_HEAD(kvq__block_row, kvq__block);
RB_HEAD(kvq__block_tree, kvq__block);

// A counted reference to a block; data NULL = none.
struct kvq__ref {
    uint8_t *data;
    struct kvq__block *block;
};

// Records of blocks, allocated together.
struct kvq__records {
    SLIST_ENTRY(kvq__records) link;
    uint32_t n;
    struct kvq__block blocks[];
};

struct kvq__extent {
    TAILQ_ENTRY(kvq__extent) link; // in its arena's list, or the pool's list of empty ones
    struct kvq__memory memory;
    uint32_t number;             // in its pool
    struct kvq__arena *owner;    // NULL while empty
    struct kvq__namespace *last; // whose bytes it holds; NULL = zeroed
    bool passing;                // it holds passing blocks; see the top of this file
    // It was the namespace's so-many-th extent of the pool. 0: no client needs to map it, for no
    // page table has named one of its blocks.
    uint32_t serial;
    bool told;           // to a client: it will never be another namespace's
    uint64_t used_bytes; // of blocks in use; 0 only while it is empty
    uint64_t empty_since;
    struct kvq__block_row blocks; // all of them, without gaps; no two free ones side by side
    struct kvq__block_list spare; // records that no block has
    SLIST_HEAD(, kvq__records) records;
};
TAILQ_HEAD(kvq__extent_list, kvq__extent);

TAILQ_HEAD(kvq__session_list, kvq__session);

// The extents of one pool that a namespace has, and what is free in them.
struct kvq__arena {
    struct kvq__namespace *ns;
    struct kvq__pool *pool;
    struct kvq__extent_list extents;
    struct kvq__block_tree free[2];    // by extent.passing; the shortest first, then by address
    uint32_t last_serial;              // extents that it ever had
    struct kvq__session_list sessions; // of the namespace, there: see kvq__recent_put
    uint32_t n_sessions;               // of the list
    uint32_t n_ended;                  // that have ended, and have yet to give pages back
};

// The memory of one place: the host's or a GPU's. Blocks of a GPU have its addresses, which nobody
// here looks behind.
struct kvq__pool {
    struct kvq__gpu *gpu; // NULL: the host's
    struct kvq__memory_ops memory;
    uint64_t budget, extent_bytes;
    uint64_t extents_taken; // bytes of extents, the empty ones included
    uint64_t used_bytes;    // of blocks, deferred frees included
    uint32_t sessions;      // that are published
    uint32_t n_ended;       // of all namespaces' arenas there
    uint64_t huge_bytes;    // of extents in explicit huge pages
    uint64_t *numbers;      // a bit for each number, set if an extent has it
    uint32_t made;          // of memory.made, as it was seen last
    struct kvq__extent_list empty;
};

// A block that was refused: whose, where, and KVQ_E_NO_MEMORY (the pool), KVQ_E_QUOTA (the
// namespace's limit) or KVQ_E_BUSY (an extent for it is being made). code 0: none was.
struct kvq__shortage {
    struct kvq__namespace *ns;
    struct kvq__pool *pool;
    uint64_t bytes; // of the block
    int code;
    bool later; // there is some that the index alone has, once requests under way have ended
};

// Sessions that could not help a request, by what is in the way.
struct kvq__in_the_way {
    uint32_t in_use, pinned, young, nowhere; // nowhere: there is no place where they could go
};

enum kvq__help {
    KVQ__HELP_NONE,  // nothing that could go would help
    KVQ__HELP_LATER, // something is not old enough yet
    KVQ__HELP_NOW,   // an eviction is under way, or what has ended gives its memory back;
                     // core->freed changes by it
};

// Somebody who was refused a block.
struct kvq__eviction_request {
    const struct kvq__shortage *shortage;
    uint64_t need;                  // bytes that are missing there, at most
    uint64_t ticket;                // sessions of requests with the same or a lower one stay
    const struct kvq__session *own; // stays, with its group; NULL = none
    const struct kvq__queue *queue; // whose request asks; NULL: none does
    struct kvq__in_the_way *in_the_way;
    uint64_t *look_at; // KVQ__HELP_LATER: when
};
// Something whose jobs run; see the top of this file.
struct kvq__flight {
    TAILQ_ENTRY(kvq__flight) link;
    uint64_t number; // 0 = not under way
};

void kvq__arena_open(struct kvq__arena *arena, struct kvq__namespace *ns, struct kvq__pool *pool);
// The number of a GPU among the core's, from 0.
uint32_t kvq__gpu_index(const struct kvq__core *core, const struct kvq__gpu *gpu);
const char *kvq__pool_name(const struct kvq__pool *pool);              // "host" or the GPU's UUID
static inline uint32_t kvq__pool_extents(const struct kvq__pool *pool) // that it may have
{
    return (uint32_t)(pool->budget / pool->extent_bytes);
}
// Which of a namespace's limits counts the pool's blocks.
static inline enum kvq__limit kvq__pool_limit(const struct kvq__pool *pool)
{
    return pool->gpu ? KVQ__DEVICE_BYTES : KVQ__HOST_BYTES;
}
// 0, KVQ_E_QUOTA, KVQ_E_NO_MEMORY (after these core->shortage says the same) or KVQ_E_SYSTEM; while
// core->patient, also KVQ_E_BUSY, as core->shortage says, too: the caller asks again when
// core->extents_made has changed.
int kvq__block_new(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                   uint64_t bytes, struct kvq__ref *ref);
// As kvq__block_new, for a passing block.
int kvq__block_new_passing(struct kvq__core *core, struct kvq__namespace *ns,
                           struct kvq__pool *pool, uint64_t bytes, struct kvq__ref *ref);
// A page table is about to name the extent's blocks: clients have to know it from now on.
void kvq__extent_show(struct kvq__extent *extent);
// One that is to take the place of another, whose last reference goes once it has: where the same
// limit counts both it counts one of them, and asks nothing.
int kvq__block_replace(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                       uint64_t bytes, struct kvq__block *old, struct kvq__ref *ref);
struct kvq__ref kvq__block_share(struct kvq__ref ref);
// Says whether the limit of the block's namespace is to count it; until it is freed.
void kvq__block_exempt(struct kvq__block *block, bool exempt);
// What is dropped from here to kvq__drops_end is looked at by no flight after `last`; and by none
// at all once `giver` (NULL: not known) is quiet, if nobody else had it. Outside of such pairs any
// flight may look at it. Pairs do not nest.
void kvq__drops_begin(struct kvq__core *core, struct kvq__session *giver, uint64_t last);
void kvq__drops_end(struct kvq__core *core);
// Notes that who drops something just now gives it up.
void kvq__retire(const struct kvq__core *core, struct kvq__retired *retired);
// Gives the reference up and clears it. Accepts none.
void kvq__block_drop(struct kvq__core *core, struct kvq__ref *ref);
// As kvq__block_drop, for a reference that all of those who retired something gave up together.
void kvq__block_drop_as(struct kvq__core *core, struct kvq__ref *ref,
                        const struct kvq__retired *retired);
// As kvq__block_drop, for a reference by which no flight has looked at the block.
void kvq__block_let_go(struct kvq__core *core, struct kvq__ref *ref);
void kvq__flight_begin(struct kvq__core *core, struct kvq__flight *flight);
void kvq__flight_end(struct kvq__core *core, struct kvq__flight *flight);
// Frees blocks that no request under way can look at any more, as many as this turn may (ended.c),
// or all. True if there were any.
bool kvq__deferred_free(struct kvq__core *core, bool all);
// The session is about to be disposed of. False if this turn may do no more of it.
bool kvq__given_end(struct kvq__session *session);
// `to` becomes the flight that `from` was; `from` is then not under way.
void kvq__flight_move(struct kvq__core *core, struct kvq__flight *from, struct kvq__flight *to);
// Somebody waits for so many bytes of a namespace's in a pool that has room for them, and was told
// KVQ_E_BUSY: has extents made for that.
void kvq__pool_want(const struct kvq__namespace *ns, const struct kvq__pool *pool, uint64_t bytes);
// Looks whether extents were made that somebody waits for; true if some were.
bool kvq__pools_poll(struct kvq__core *core);
// Gives back extents that have been empty since before `now - age`.
void kvq__pools_trim(struct kvq__core *core, uint64_t age_ns);
uint64_t kvq__shortage_limit(
    const struct kvq__shortage *shortage); // bytes that there can be at all

#endif
