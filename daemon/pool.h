// SPDX-License-Identifier: Apache-2.0
//
// Pools: the memory of a place, cut into extents and these into blocks; see pool.c. And flights, by
// which blocks that running work may look at are not given out again. Part of state.h.
#ifndef KVQ_DAEMON_POOL_H
#define KVQ_DAEMON_POOL_H

#include <sys/queue.h>

#include "daemon/core.h"

struct kvq__block {
    uint32_t refs;
    bool exempt;    // its namespace's limit does not count it: a move has copied it, or is about to
    uint64_t saved; // the store's id of its bytes, which do not change any more; 0 = none
    struct kvq__extent *extent;
    uint64_t retired_at; // when it last lost a reference: the last flight that may look at it
    STAILQ_ENTRY(kvq__block) link; // in its extent's free list, or in limbo
};
STAILQ_HEAD(kvq__block_list, kvq__block);

// A counted reference to a block; data NULL = none.
struct kvq__ref {
    uint8_t *data;
    struct kvq__block *block;
};

struct kvq__extent {
    TAILQ_ENTRY(kvq__extent) link; // in its class's list, or the pool's list of empty ones
    struct kvq__memory memory;
    uint32_t number;             // in its pool
    struct kvq__class *owner;    // NULL while empty
    struct kvq__namespace *last; // whose bytes it holds; NULL = zeroed
    uint32_t serial;             // it was the namespace's so-many-th extent of the pool
    bool told;                   // to a client: it will never be another namespace's
    struct kvq__block *blocks;
    uint32_t n_blocks, used; // used: referenced or in limbo
    uint64_t empty_since;
    struct kvq__block_list free;
};
TAILQ_HEAD(kvq__extent_list, kvq__extent);

// The extents of one pool and namespace that are cut into blocks of one size.
struct kvq__class {
    LIST_ENTRY(kvq__class) link;
    struct kvq__namespace *ns;
    struct kvq__pool *pool;
    uint64_t block_bytes;
    struct kvq__extent_list extents; // those with free blocks first
};

// The memory of one place: the host's or a GPU's. Blocks of a GPU have its addresses, which nobody
// here looks behind.
struct kvq__pool {
    struct kvq__gpu *gpu; // NULL: the host's
    struct kvq__memory_ops memory;
    uint64_t budget, extent_bytes;
    uint64_t extents_taken; // bytes of extents, the empty ones included
    uint64_t used_bytes;    // of blocks, limbo included
    uint64_t huge_bytes;    // of extents in explicit huge pages
    uint64_t *numbers;      // a bit for each number, set if an extent has it
    struct kvq__extent_list empty;
};

// A block that was refused: whose, where, and KVQ_E_NO_MEMORY (the pool) or KVQ_E_QUOTA (the
// namespace's limit). code 0: none was.
struct kvq__shortage {
    struct kvq__namespace *ns;
    struct kvq__pool *pool;
    uint64_t bytes; // of the block
    int code;
};

// Something whose jobs run; see the top of this file.
struct kvq__flight {
    TAILQ_ENTRY(kvq__flight) link;
    uint64_t number; // 0 = not under way
};

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
// 0, KVQ_E_QUOTA, KVQ_E_NO_MEMORY (after these core->shortage says the same) or KVQ_E_SYSTEM.
int kvq__block_new(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                   uint64_t bytes, struct kvq__ref *ref);
// One that is to take the place of another, whose last reference goes once it has: where the same
// limit counts both it counts one of them, and asks nothing.
int kvq__block_replace(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                       uint64_t bytes, struct kvq__block *old, struct kvq__ref *ref);
struct kvq__ref kvq__block_share(struct kvq__ref ref);
// Says whether the limit of the block's namespace is to count it; until it is freed.
void kvq__block_exempt(struct kvq__block *block, bool exempt);
// Gives the reference up and clears it. Accepts none.
void kvq__block_drop(struct kvq__core *core, struct kvq__ref *ref);
void kvq__flight_begin(struct kvq__core *core, struct kvq__flight *flight);
void kvq__flight_end(struct kvq__core *core, struct kvq__flight *flight);
// `to` becomes the flight that `from` was; `from` is then not under way.
void kvq__flight_move(struct kvq__core *core, struct kvq__flight *from, struct kvq__flight *to);
// Gives back extents that have been empty since before `now - age`.
void kvq__pools_trim(struct kvq__core *core, uint64_t age_ns);

#endif
