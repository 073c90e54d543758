// SPDX-License-Identifier: Apache-2.0
//
// What save.c and restore.c share with each other and with the tests that count references.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_SAVED_INTERNAL_H
#define KVQ_DAEMON_CORE_RESIDENCY_SAVED_INTERNAL_H

#include "daemon/core/residency/residency.h"
#include "daemon/core/residency/saved.h"
#include "daemon/core/state.h"

// ---- Ways to and from a GPU (staging.c) ----

// A stream and pinned memory, for one thread at a time. It is kept for the next thread, since
// freeing such memory waits for the whole GPU.
struct kvq__staging;

// Poller's thread. NULL if memory is short. For sessions on the host it is plain memory.
struct kvq__staging *kvq__staging_take(struct kvq__core *core, struct kvq__gpu *gpu);
void kvq__staging_give(struct kvq__core *core, struct kvq__staging **staging);
// Any thread. At least `bytes` of the staging memory; NULL if memory is short.
void *kvq__staging_memory(struct kvq__staging *staging, size_t bytes);
// Copy to and from the staging memory (`at` bytes into it), and wait for that. 0 or KVQ_E_SYSTEM.
int kvq__staging_fetch(struct kvq__staging *staging, const uint8_t *from, size_t bytes);
int kvq__staging_bring(struct kvq__staging *staging, uint8_t *to, size_t at, size_t bytes);

// ---- Parts (save.c) ----

// The parts of a session at its committed count, layer by layer: of a layer first its pages, packed
// before raw, then its extras. Calls each() for every part; stops when it returns < 0.
struct kvq__part_of {
    struct kvq__part part; // id is 0
    struct kvq__ref ref;   // the session's, of a page or of what a page holds
    uint32_t tokens;       // tokens in the part, of a page's parts
    bool final;            // the part cannot change any more
};
// Where a block keeps the store's id of a final part.
static inline uint64_t *kvq__saved_id(struct kvq__block *block, uint32_t kind)
{
    return kind == KVQ__PART_EXTRAS ? &block->saved_sinks : &block->saved;
}
int kvq__parts_walk(struct kvq__session *s,
                    int (*each)(void *context, const struct kvq__part_of *p), void *context);

// ---- Saves ----

// One part's memory.
struct kvq__kept {
    struct kvq__ref ref; // of a final part, or of any before it is copied
    uint8_t *copy;       // of a part that may change
    uint32_t tokens;
    bool final;
};
struct kvq__save_shard {
    struct kvq__session *session; // held until it is copied; after that it may end
    uint8_t reading;              // of kvq__reading_begin
    struct kvq__saved saved;
    struct kvq__part *parts; // the blocks' parts, then the ids' parts
    struct kvq__kept *held;  // of blocks
    uint32_t n, room, n_ids; // n: parts of blocks; n_ids: parts of ids
    int32_t *ids;            // saved.known ids
    struct kvq__saved_span *spans;
    bool shares; // others can begin with its tokens, known by:
    uint8_t root[KVQ__HASH_BYTES], layers[KVQ__HASH_BYTES];
    struct kvq__staging *staging; // NULL on the host
};
struct kvq__save {
    LIST_ENTRY(kvq__save) link;
    struct kvq__core *core;
    struct kvq__namespace *ns;
    bool holding;
    bool parks, kept; // parks: as its spec says; kept: as the session's was
    uint64_t stamp;
    uint32_t n_shards;
    uint64_t ids[KVQ_MAX_SHARDS]; // of the sessions
    uint64_t commits[KVQ_MAX_SHARDS];
    struct kvq__save_shard shards[KVQ_MAX_SHARDS];
};

// Counts saves that hold blocks of the session while they are written.
uint32_t kvq__session_saves(const struct kvq__session *session);

// ---- Restores ----

struct kvq__arriving {
    struct kvq__ref ref; // a share of the session's block
    uint64_t bytes, id;
    uint64_t at; // in the staging memory
    uint32_t part, layer, kind;
    bool final;
    bool bare; // the block's memory pages may not be taken yet
};
struct kvq__restore {
    LIST_ENTRY(kvq__restore) link;
    struct kvq__core *core;
    struct kvq__session *session; // pinned
    struct kvq__arriving *arriving;
    uint32_t n, room;
    uint32_t at;                  // the first part of the layers that are yet to come
    uint32_t lost;                // a word: the session was dropped
    bool cut;                     // it has less tokens than were saved
    bool entered;                 // the session is there for others
    bool fetches;                 // a session that is parked
    bool turns_back;              // a fetch that has failed: its session is to be offloaded again
    char why[KVQ_TEXT_BYTES / 2]; // why its memory could not be had
    uint64_t bytes;
    struct kvq__restore_spec spec;
    uint32_t layer, page;       // of the block that is reserved next
    uint64_t reserved;          // bytes
    struct kvq__grant grant;    // of the last try to take some
    uint64_t ticket;            // among those that wait for room; 0 = it found room so far
    uint64_t since;             // when it began to wait
    uint64_t looked, evictions; // when it last looked for sessions to evict; evictions ended then
    struct kvq__staging *staging;
    // Of a prefix: pages that the index was given, the hash of the last, the nodes among them that
    // are this session's, and sessions that began with some.
    uint32_t offered;
    uint8_t chain[KVQ__HASH_BYTES];
    struct kvq__node_list nodes;
    LIST_HEAD(, kvq__follower) followers;
};

// Takes some of the session's blocks: enum kvq__advance as kvq__restore_reserve, or
// KVQ_E_NO_MEMORY, KVQ_E_QUOTA or KVQ_E_SYSTEM, after which the session has no block.
int kvq__restore_take(struct kvq__restore *restore, char *text);
// As kvq__restore_rooms, on the host: takes the memory pages of the parts' blocks. Returns for how
// many parts there were some.
uint32_t kvq__restore_back(const struct kvq__restore *restore, const uint32_t *which, uint32_t n);

// ---- Sessions that begin with a prefix while it is read (restore_follow.c) ----
//
// The index gets the pages of a prefix as soon as their memory is there, and whoever begins with
// them shares the blocks at once. Its requests on a layer wait until every restore that it follows
// has read that layer. If one of these fails the session is given up like one that is restored
// itself: nothing can be committed before all layers are there, so nothing is lost with it.

struct kvq__follower {
    LIST_ENTRY(kvq__follower) of_restore, of_session;
    struct kvq__restore *restore;
    struct kvq__session *session;
};

// Gives the index some of the pages. KVQ__MORE, or KVQ__COMPLETE: the index has all of them, or as
// many as it had memory for.
int kvq__restore_offer(struct kvq__restore *restore);
// A layer has come.
void kvq__follow_layer(struct kvq__restore *restore, uint32_t layer);
// follow_done: all layers have come. follow_failed: no layer comes any more, so the index forgets
// the pages, and sessions that began with them answer with that status.
void kvq__follow_done(struct kvq__restore *restore);
void kvq__follow_failed(struct kvq__restore *restore, int status);
// One restore less has yet to read the layer. True if no layer of the session is yet to be read.
bool kvq__layer_came(struct kvq__session *session, uint32_t layer);

#endif
