// SPDX-License-Identifier: Apache-2.0
//
// What save.c and restore.c share, and the tests that count references.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_SAVED_INTERNAL_H
#define KVQ_DAEMON_CORE_RESIDENCY_SAVED_INTERNAL_H

#include "daemon/core/residency/residency.h"
#include "daemon/core/residency/saved.h"
#include "daemon/core/state.h"

// ---- Ways to and from a GPU (staging.c) ----

// A stream and pinned memory that one thread at a time uses. It is kept for the next one, since
// freeing such memory waits for the whole GPU.
struct kvq__staging;

// Poller's thread. NULL without memory. For sessions on the host it is plain memory.
struct kvq__staging *kvq__staging_take(struct kvq__core *core, struct kvq__gpu *gpu);
void kvq__staging_give(struct kvq__core *core, struct kvq__staging **staging);
// Any thread. At least `bytes` of its memory; NULL if there is none.
void *kvq__staging_memory(struct kvq__staging *staging, size_t bytes);
// Copies to and from its memory (`at` bytes into it), and waits for that. 0 or KVQ_E_SYSTEM.
int kvq__staging_fetch(struct kvq__staging *staging, const uint8_t *from, size_t bytes);
int kvq__staging_bring(struct kvq__staging *staging, uint8_t *to, size_t at, size_t bytes);

// ---- Parts (save.c) ----

// The parts that a session at its committed count has: in the order of layers, of each its pages',
// packed before raw, and then its extras. Calls each() for every one; stops when it returns < 0.
struct kvq__part_of {
    struct kvq__part part; // id is 0
    struct kvq__ref ref;   // the session's, of a page or of what stands in one
    uint32_t tokens;       // that it holds, of a page's
    bool final;            // it cannot change any more
};
// Where the block has the store's id of such a part, if that is final.
static inline uint64_t *kvq__saved_id(struct kvq__block *block, uint32_t kind)
{
    return kind == KVQ__PART_EXTRAS ? &block->saved_sinks : &block->saved;
}
int kvq__parts_walk(struct kvq__session *s,
                    int (*each)(void *context, const struct kvq__part_of *p), void *context);

// ---- Saves ----

// One part's memory.
struct kvq__kept {
    struct kvq__ref ref; // of a final one, or of any before it is copied
    uint8_t *copy;       // of one that may change
    uint32_t tokens;
    bool final;
};
struct kvq__save_shard {
    struct kvq__session *session; // held, until it is copied; then only if it is still there
    uint8_t reading;              // of kvq__reading_begin
    struct kvq__saved saved;
    struct kvq__part *parts; // those of blocks, then those of ids
    struct kvq__kept *held;  // of blocks
    uint32_t n, room, n_ids; // blocks, and parts of ids
    int32_t *ids;            // saved.known of them
    struct kvq__saved_span *spans;
    bool shares; // others can begin with its tokens, which are then known by:
    uint8_t root[KVQ__HASH_BYTES], layers[KVQ__HASH_BYTES];
    struct kvq__staging *staging; // NULL on the host
};
struct kvq__save {
    LIST_ENTRY(kvq__save) link;
    struct kvq__core *core;
    struct kvq__namespace *ns;
    bool holding;
    bool parks, kept; // as of its spec; as of the session when it began
    uint64_t stamp;
    uint32_t n_shards;
    uint64_t ids[KVQ_MAX_SHARDS]; // of the sessions
    uint64_t commits[KVQ_MAX_SHARDS];
    struct kvq__save_shard shards[KVQ_MAX_SHARDS];
};

// Saves that hold blocks of the session while they are written.
uint32_t kvq__session_saves(const struct kvq__session *session);

// ---- Restores ----

struct kvq__arriving {
    struct kvq__ref ref; // a share of the session's block
    uint64_t bytes, id;
    uint64_t at; // in the staging memory
    uint32_t part, layer, kind;
    bool final;
    bool bare; // its pages may not have been taken yet
};
struct kvq__restore {
    LIST_ENTRY(kvq__restore) link;
    struct kvq__core *core;
    struct kvq__session *session; // pinned
    struct kvq__arriving *arriving;
    uint32_t n, room;
    uint32_t at;                  // the first of the layers that are yet to come
    uint32_t lost;                // a word: the session was dropped
    bool cut;                     // it has less tokens than were saved
    bool entered;                 // the session is there for others
    bool fetches;                 // a session that is parked
    bool turns_back;              // a fetch that has failed: its session is to be offloaded again
    char why[KVQ_TEXT_BYTES / 2]; // its memory could not be had
    uint64_t bytes;
    struct kvq__restore_spec spec;
    uint32_t layer, page;       // of the block that is reserved next
    uint64_t reserved;          // bytes
    struct kvq__grant grant;    // of the last try to take some
    uint64_t ticket;            // among those that wait for room; 0 = it has found some so far
    uint64_t since;             // when it began to
    uint64_t looked, evictions; // when it last looked who may go, and evictions_ended then
    struct kvq__staging *staging;
    // Of a prefix: pages that the index was given, the hash of the last of them, those of them that
    // are this session's, and sessions that began with some.
    uint32_t offered;
    uint8_t chain[KVQ__HASH_BYTES];
    struct kvq__node_list nodes;
    LIST_HEAD(, kvq__follower) followers;
};

// Takes some of its blocks: enum kvq__advance as kvq__restore_reserve, or KVQ_E_NO_MEMORY,
// KVQ_E_QUOTA or KVQ_E_SYSTEM: then it has none.
int kvq__restore_take(struct kvq__restore *restore, char *text);
// As kvq__restore_rooms, on the host: takes the pages of the blocks that these go to. For how many
// there were some.
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

// Gives the index some of the pages. KVQ__MORE, or KVQ__COMPLETE: it has been given all, or as many
// as there was memory for.
int kvq__restore_offer(struct kvq__restore *restore);
// A layer has come.
void kvq__follow_layer(struct kvq__restore *restore, uint32_t layer);
// All layers have come; or there are none to come any more: the index forgets the pages, and those
// that began with them answer with that status.
void kvq__follow_done(struct kvq__restore *restore);
void kvq__follow_failed(struct kvq__restore *restore, int status);
// One restore less is to read the layer. True if nothing of the session is to be read any more.
bool kvq__layer_came(struct kvq__session *session, uint32_t layer);

#endif
