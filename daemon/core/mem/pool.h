// SPDX-License-Identifier: Apache-2.0
//
// Pools: the memory of a place, which is cut into extents, and extents into blocks; see pool.c.
// Flights keep a block from being given out again while running work may read it. Part of state.h.
//
// An extent belongs to one namespace at a time, and holds blocks of all sizes. A new block is cut
// from the shortest free stretch of the namespace's extents that is long enough. If there is none,
// the namespace gets another extent. So a block of n bytes is refused (KVQ_E_NO_MEMORY) only if
// every free stretch in the namespace's extents is shorter than n, no empty extent that it may have
// is so long, and what is left of the budget holds none, empty extents that no client may have
// mapped being given back for it. Fragmentation then wastes
//
//     at most n bytes in each extent of the namespace, if it has freed no block yet;
//     at most n bytes for each extent and each block in use of the namespace, in any case;
//     what of the budget is too small for an extent that holds n;
//     and the free bytes in the extents of other namespaces.
//
// A passing block is a raw block that is dropped as soon as its tokens are packed; a long step
// makes many. While less than half of the pool is taken, passing blocks have extents of their own:
// these become empty and go back to the system, which an extent with a lasting block would not.
#ifndef KVQ_DAEMON_CORE_MEM_POOL_H
#define KVQ_DAEMON_CORE_MEM_POOL_H

#include <sys/queue.h>
#include <uv/tree.h>

#include "daemon/core/base/base.h"

enum { KVQ__BLOCK_GRAIN = 64 }; // blocks have multiples of it, and begin at such

// Who may still read a block that was given up: flights up to number `at`, and of these only
// flights that hold or pack the session with the serial number `by` (0: none; KVQ__BY_SEVERAL:
// any).
struct kvq__retired {
    uint64_t at, by;
};
#define KVQ__BY_SEVERAL UINT64_MAX

// Who may still read what somebody gives up: flights up to `last`. If only the session `giver`
// (NULL: unknown) had it, no flight reads it once that session is quiet.
struct kvq__drop {
    struct kvq__session *giver;
    uint64_t last, by; // by: as of struct kvq__retired
};

// A stretch of an extent: in use (referenced, or a deferred free), or free.
struct kvq__block {
    uint32_t refs;
    bool free;
    bool exempt;          // the namespace's limit does not count it, since a move counts its copy
    uint16_t indexes;     // how many of its references are pages' of indexes of prefixes
    uintptr_t index;      // of one: the address of its page's struct kvq__alone; of several: these
                          // addresses combined by XOR, so that what stays is that of the last
    uint64_t saved;       // the store's id of its bytes, which are final; 0: not saved
    uint64_t saved_sinks; // likewise of the sinks behind its codes
    uint64_t at, bytes;   // in its extent, multiples of 64
    struct kvq__extent *extent;
    struct kvq__retired retired;    // who may read it after the references that it has lost
    TAILQ_ENTRY(kvq__block) beside; // of its extent, by address
    union {
        struct {
            TAILQ_ENTRY(kvq__block) deferred_link;
            LIST_ENTRY(kvq__block) given_link; // in `given` of the session that gave it up
        };
        STAILQ_ENTRY(kvq__block) link;   // among the extent's spare records
        RB_ENTRY(kvq__block) free_entry; // in its arena's free stretches
    };
};
STAILQ_HEAD(kvq__block_list, kvq__block);
LIST_HEAD(kvq__given_list, kvq__block);
TAILQ_HEAD(kvq__block_row, kvq__block);
RB_HEAD(kvq__block_tree, kvq__block);

// What a page of an index of prefixes has alone (alone.c).
struct kvq__alone {
    struct kvq__alones *of; // of the index
    uint64_t bytes;         // of the page's blocks to which nothing else has a reference
    uint64_t since;         // when it had some again: the page was let go
    bool leaf;              // no page of the index comes behind it
    TAILQ_ENTRY(kvq__alone) link;
};
TAILQ_HEAD(kvq__alone_list, kvq__alone);

struct kvq__alones {
    uint64_t bytes;                  // sum over the pages
    struct kvq__alone_list lists[2]; // [leaf]; of pages that have bytes: those that have had some
                                     // for the longest time first
};

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

// A size that extents of a pool have, and the numbers of these: see extent.h.
struct kvq__extent_size {
    uint64_t bytes;
    uint32_t first; // the lowest number of an extent of this size; the next one's is as many units
                    // higher as the extent has
    uint32_t most, n; // how many there may be, and are
    uint64_t *taken;  // a bit for each number, set if an extent has it
};
enum { KVQ__EXTENT_SIZES = 10, KVQ__SMALL_EXTENTS = 256 };

struct kvq__extent {
    TAILQ_ENTRY(kvq__extent) link; // in its arena's list, or the pool's list of empty ones
    struct kvq__memory memory;
    struct kvq__extent_size *size; // of the pool's
    uint32_t number;               // in its pool
    struct kvq__arena *owner;      // NULL while empty
    struct kvq__namespace *last;   // the namespace whose bytes it still holds; NULL = zeroed
    bool passing;                  // it holds passing blocks; see the top of this file
    bool bare;                     // not all of its pages have been taken (bare.c),
    uint64_t back_after;           // and before this time nobody tries to again
    // Its number among the namespace's extents in this pool that clients may need to map, from 1.
    // 0: no page table has named a block of it.
    uint32_t serial;
    bool exported;       // a client was told of it and may map it: no other namespace gets it
    uint64_t used_bytes; // of blocks in use and deferred frees; 0 only in the pool's empty list
    uint64_t empty_since;
    struct kvq__block_row blocks; // all of them, without gaps; no two free ones side by side
    struct kvq__block_list spare; // unused records
    SLIST_HEAD(, kvq__records) records;
};
TAILQ_HEAD(kvq__extent_list, kvq__extent);

TAILQ_HEAD(kvq__session_list, kvq__session);

// The extents of one pool that a namespace has, and what is free in them.
struct kvq__arena {
    struct kvq__namespace *ns;
    struct kvq__pool *pool;
    struct kvq__extent_list extents;
    uint64_t extents_taken[2];         // [extent.passing]; bytes of these
    struct kvq__block_tree free[2];    // [extent.passing]; the shortest first, then by address
    uint32_t last_serial;              // the last that an extent got
    uint32_t mapped;                   // some client that is there was told of extents up to this
    struct kvq__session_list sessions; // of the namespace, with blocks there: kvq__recent_put
    uint32_t n_sessions;               // in this list
    uint32_t n_ended;                  // ended sessions that still have pages there
    uint64_t index_bytes;              // of blocks with one reference, by an index of prefixes
    uint64_t deferred_bytes;           // of deferred frees
};

// The memory of one place: the host or a GPU. Blocks on a GPU have device addresses, which the host
// never dereferences.
struct kvq__pool {
    struct kvq__gpu *gpu; // NULL: the host's
    struct kvq__memory_ops memory;
    uint64_t budget, extent_bytes; // extent_bytes: of the largest, what a block may have at most
    uint64_t extents_taken;        // bytes of extents, the empty ones included
    uint64_t used_bytes;           // of blocks, deferred frees included
    uint32_t sessions;             // that are published
    uint32_t n_ended;              // sum over the arenas of all namespaces
    uint64_t index_bytes;          // sum over the arenas of all namespaces
    uint64_t huge_bytes;           // of extents in explicit huge pages
    uint64_t *numbers;             // what sizes[].taken point into
    uint64_t number_words;         // so long
    uint32_t made;                 // what memory.made returned last
    uint32_t n_sizes;
    struct kvq__extent_size sizes[KVQ__EXTENT_SIZES]; // the smallest first
    struct kvq__extent_list empty;
};

// A block that was refused: for which namespace, in which pool, and why: KVQ_E_NO_MEMORY (the pool
// is full), KVQ_E_QUOTA (the namespace is at its limit), KVQ_E_BUSY (an extent for it is being
// made), or 0: none was refused.
struct kvq__shortage {
    struct kvq__namespace *ns;
    struct kvq__pool *pool;
    uint64_t bytes; // of the block
    int code;
    bool later; // the index has blocks that it can free when the requests under way have ended
};

// How a caller takes blocks, and what came of it.
struct kvq__grant {
    bool may_wait;                // the caller can try again later: KVQ_E_BUSY is an answer
    bool spares_prefixes;         // no block of an index of prefixes gives way for it
    bool bare;                    // the caller takes the block's pages himself: kvq__block_back
    struct kvq__shortage refused; // the last block that the pool refused the caller; zero at first
};

// Work under way that may read blocks; see the top of this file.
struct kvq__flight {
    TAILQ_ENTRY(kvq__flight) link;
    uint64_t number; // 0 = not under way
};

void kvq__arena_open(struct kvq__arena *arena, struct kvq__namespace *ns, struct kvq__pool *pool);
// The number of a GPU among the core's, from 0.
uint32_t kvq__gpu_index(const struct kvq__core *core, const struct kvq__gpu *gpu);
const char *kvq__pool_name(const struct kvq__pool *pool); // "host" or the GPU's UUID
// Extents of the pool lie in clients' addresses at multiples of this: the smallest one's bytes.
static inline uint64_t kvq__extent_unit(const struct kvq__pool *pool)
{
    return pool->sizes[0].bytes;
}
// The bytes of addresses that a client keeps for the pool.
uint64_t kvq__extents_span(const struct kvq__pool *pool);
// Opens a pool whose budget, extent_bytes and memory are set, with extents from so many bytes on. 0
// or KVQ_E_NO_MEMORY.
int kvq__extents_open(struct kvq__core *core, struct kvq__pool *pool, uint64_t smallest);
// After the last extent was given back. Accepts a pool that could not be opened.
void kvq__extents_close(struct kvq__core *core, struct kvq__pool *pool);
// The limit of a namespace that counts the blocks of this pool.
static inline enum kvq__limit kvq__pool_limit(const struct kvq__pool *pool)
{
    return pool->gpu ? KVQ__DEVICE_BYTES : KVQ__HOST_BYTES;
}
// Takes a block. 0, KVQ_E_QUOTA, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM; if grant->may_wait also
// KVQ_E_BUSY, after which the caller asks again when core->room.extents_made has changed. All but
// KVQ_E_SYSTEM are noted in grant->refused. grant NULL: the caller cannot wait, and does not ask
// why.
int kvq__block_new(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                   uint64_t bytes, struct kvq__grant *grant, struct kvq__ref *ref);
// As kvq__block_new, for a passing block.
int kvq__block_new_passing(struct kvq__core *core, struct kvq__namespace *ns,
                           struct kvq__pool *pool, uint64_t bytes, struct kvq__grant *grant,
                           struct kvq__ref *ref);
// Bare extents (bare.c): memory for a new extent; all pages of one, unless whoever has the grant
// takes those that he needs. 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM, for the former also KVQ_E_BUSY.
int kvq__extent_memory(const struct kvq__pool *pool, const struct kvq__grant *grant,
                       struct kvq__extent *extent);
int kvq__extent_back(const struct kvq__core *core, const struct kvq__pool *pool,
                     struct kvq__extent *extent, const struct kvq__grant *grant);
// The pages of a block that was taken with grant->bare, before anybody writes to it. Any thread,
// while the block is held. 0 or KVQ_E_NO_MEMORY.
int kvq__block_back(const struct kvq__pool *pool, const struct kvq__block *block);
// A page table is about to name the extent's blocks: clients have to know it from now on.
void kvq__extent_show(struct kvq__extent *extent);
// Takes a block that is to replace `old`, whose last reference is dropped then. If one limit counts
// both blocks, it counts only the new one, and refuses it only for what it is longer than `old`.
int kvq__block_replace(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                       uint64_t bytes, struct kvq__block *old, struct kvq__grant *grant,
                       struct kvq__ref *ref);
struct kvq__ref kvq__block_share(struct kvq__ref ref);
// Whether its one reference is of an index of prefixes.
static inline bool kvq__block_is_alone(const struct kvq__block *block)
{
    return block->refs == 1 && block->indexes == 1;
}
// Counts a block that has become so, or (is false) is about to be so no longer (alone.c).
void kvq__alone_count(const struct kvq__block *block, bool is);
// A reference of a page of an index of prefixes, which ends with kvq__block_unindex just before it
// is given up.
struct kvq__ref kvq__block_index(struct kvq__ref ref, const struct kvq__alone *alone);
void kvq__block_unindex(struct kvq__block *block, const struct kvq__alone *alone);
// The page is a leaf or none from now on, and stands before all others of these, or behind.
void kvq__alone_place(struct kvq__alone *alone, bool leaf, bool first);
// With `exempt` the limit of the block's namespace does not count it, until it is freed.
void kvq__block_exempt(struct kvq__block *block, bool exempt);
struct kvq__drop kvq__drop_by(struct kvq__session *giver, uint64_t last);
// Adds a drop (NULL: any flight may read it) to what is known of the flights that may read it.
void kvq__retire(const struct kvq__core *core, struct kvq__retired *retired,
                 const struct kvq__drop *drop);
// Gives the reference up and clears it. Accepts none. drop NULL: any flight may read it.
void kvq__block_drop(struct kvq__core *core, struct kvq__ref *ref, const struct kvq__drop *drop);
// Gives the end of a block back, if nobody else has the block and no flight may read it; else the
// block stays as it is. gain: as of kvq__block_drop_idle.
void kvq__block_shrink(struct kvq__core *core, struct kvq__block *block, uint64_t bytes, bool gain);
// As kvq__block_drop, for a reference of a shared sheet: `retired` is the sheet's.
void kvq__block_drop_as(struct kvq__core *core, struct kvq__ref *ref,
                        const struct kvq__retired *retired, const struct kvq__drop *drop);
// As kvq__block_drop, for a reference by which no flight has read the block.
void kvq__block_let_go(struct kvq__core *core, struct kvq__ref *ref);
// Whether the block has one reference, by which no request reads it, and no flight may read it
// through references that it has lost: then it is free as soon as that reference is dropped.
bool kvq__block_is_idle(const struct kvq__core *core, const struct kvq__block *block);
// Drops it. `gain`: who waits for room may gain by it, so that kvq__freed_note is called.
void kvq__block_drop_idle(struct kvq__core *core, struct kvq__ref *ref, bool gain);
void kvq__flight_begin(struct kvq__core *core, struct kvq__flight *flight);
void kvq__flight_end(struct kvq__core *core, struct kvq__flight *flight);
// Frees deferred blocks that no request under way can read any more: all of them, or as many as
// this turn may (ended.c). True if there were any.
bool kvq__deferred_free(struct kvq__core *core, bool all);
// Empties session->giver.given before the session is disposed of. False if this turn's work is used
// up.
bool kvq__given_end(struct kvq__session *session);
// Hands a flight over from `from` to `to`. `from` has none then.
void kvq__flight_move(struct kvq__core *core, struct kvq__flight *from, struct kvq__flight *to);
// Has extents made for a caller that was told KVQ_E_BUSY: the namespace waits for so many bytes in
// a pool that has room for them.
void kvq__pool_want(const struct kvq__namespace *ns, const struct kvq__pool *pool, uint64_t bytes);
// Looks whether extents were made that somebody waits for; true if some were.
bool kvq__pools_poll(struct kvq__core *core);
// Gives back extents that have been empty since before `now - age`, until these are so many bytes.
void kvq__pools_trim(struct kvq__core *core, uint64_t age_ns, uint64_t bytes);
// The same of one pool, however long they have been empty. How many bytes it gave back.
uint64_t kvq__pool_trim(struct kvq__core *core, struct kvq__pool *pool, uint64_t bytes);
#endif
