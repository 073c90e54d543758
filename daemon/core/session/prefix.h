// SPDX-License-Identifier: Apache-2.0
//
// Prefixes: sessions that begin with the same tokens share the blocks of these.
//
// Each namespace has an index of final pages of 128 tokens. The key of a page is a keyed hash
// (BLAKE2b) of its token ids, of the digests of images or audio among them, and of the hash of the
// page before. The first page's hash begins with everything that sessions must have in common for
// their tokens to mean the same (prefix.c, kvq__ids_identify). The node of a page references the
// blocks of all layers, so they outlive the session. A hit also compares ids, layers and parent, so
// that a collision of hashes alone gives no wrong hit.
//
// Pages can be shared if they lie below the floor and their units are packed in all layers (raw
// formats: stored). Formats with outliers or factors of the prompt cannot: these belong to one
// session; such sessions share by forks. Layers with a sliding window have freed pages behind it;
// nodes then lack these blocks, and a prefix can end there only if none of them is needed.
//
// Nodes are evicted before anything fails for want of memory, and when nobody has used them for a
// while: leaves first, the one that sessions have let go of for the longest time before others.
#ifndef KVQ_DAEMON_CORE_SESSION_PREFIX_H
#define KVQ_DAEMON_CORE_SESSION_PREFIX_H

#include <sys/queue.h>

#include "daemon/core/core.h"
#include "daemon/core/mem/pool.h"

struct kvq__layer;
struct kvq__namespace;
struct kvq__pageref;
struct kvq__part;
struct kvq__prefix_ask;
struct kvq__session;

enum { KVQ__HASH_BYTES = 32 };

// ---- What a session's tokens are (ids.c) ----

enum { KVQ__IDS_PART = 1024 };

// Forks share full parts below the floor. A shared part is never written.
struct kvq__ids_part {
    uint32_t refs;
    uint64_t stored; // the store's id, 0 = none; only of those below the floor
    int32_t at[KVQ__IDS_PART];
};

struct kvq__ids {
    struct kvq__ids_part **parts; // NULL until somebody has told some
    uint32_t n_parts, room;       // parts that there are; that `parts` has room for
    uint64_t known;               // those of tokens [0, known) are there
    bool pending;                 // ids of the open step stand behind those of the committed tokens
    bool identified;              // root and layers are known
    struct kvq__span *spans;
    uint32_t n_spans;
    uint8_t root[KVQ__HASH_BYTES], layers[KVQ__HASH_BYTES];
    uint32_t sealed; // pages that the index was given
    uint32_t again;  // pages up to here are no new ones: they come by turns
    uint8_t chain[KVQ__HASH_BYTES];
};

// The place of a token's id, followed by those of the next tokens in its part. There must be room
// for the token.
static inline int32_t *kvq__ids_at(const struct kvq__ids *ids, uint64_t token)
{
    return &ids->parts[token / KVQ__IDS_PART]->at[token % KVQ__IDS_PART];
}
// Copies the ids of tokens [0, known) out.
void kvq__ids_read(const struct kvq__ids *ids, int32_t *out);
// Copies the ids of so many tokens, once, behind those of the session's tokens; kvq__ids_commit
// makes them known. from NULL: the ids of the tokens to come are unknown. 0, or as
// kvq__ns_allocate.
int kvq__ids_take(struct kvq__session *session, const volatile int32_t *from, uint32_t tokens);
// So many tokens were committed behind `had`.
void kvq__ids_commit(struct kvq__session *session, uint64_t had, uint64_t tokens);
// The index is to be given the pages from the first one on again.
void kvq__ids_restart(struct kvq__ids *ids);
// The session has no more than so many tokens from now on.
void kvq__ids_cut(struct kvq__session *session, uint64_t tokens);
// Of the last `append` tokens only those at the indices of the list stay: moves their ids to the
// front of these, for kvq__ids_commit.
void kvq__ids_accept(struct kvq__session *session, uint32_t append, const int32_t *list,
                     uint32_t n);
// A new session with the first `at` tokens of another. 0, or as kvq__ns_allocate.
int kvq__ids_fork(struct kvq__session *to, const struct kvq__session *from, uint64_t at);
// A session that is restored has these, and no others.
int kvq__ids_set(struct kvq__session *session, const int32_t *ids, uint64_t known);
// Makes room for so many. 0, or as kvq__ns_allocate.
int kvq__ids_grow(struct kvq__session *session, uint64_t tokens);
// Adds spans; each takes the place of those that it overlaps. 0, KVQ_E_INVALID, KVQ_E_LIMIT, or
// as kvq__ns_allocate; then nothing was added.
int kvq__ids_spans(struct kvq__session *session, const struct kvq__span *spans, uint32_t n,
                   char *text);
uint64_t kvq__ids_bytes(const struct kvq__session *session);
// Drops the last part, which holds no known ids any more.
void kvq__ids_pop(struct kvq__session *session);
void kvq__ids_free(struct kvq__session *session);

// ---- What a page is known by (prefix_hash.c) ----

// 0, or KVQ_E_UNSUPPORTED with a text: the session cannot share.
int kvq__ids_shareable(const struct kvq__session *session, char *text);
// The same, and computes ids->root and ids->layers.
int kvq__ids_identify(struct kvq__session *session, char *text);
// The hash of the first page's predecessor, for the sessions of a namespace.
void kvq__prefix_root(const struct kvq__session *session, const char *ns, uint8_t *root);
// Turns `chain` from the hash of the page before into that of this page: of its ids and of the
// parts of the spans that lie in it.
void kvq__prefix_chain(const struct kvq__core *core, uint8_t *chain, const int32_t *ids,
                       const struct kvq__span *spans, uint32_t n_spans, uint32_t page);
// The key of the page in a store.
void kvq__prefix_stored(const struct kvq__core *core, const uint8_t *chain, const uint8_t *layers,
                        uint32_t shard, uint8_t *out);
// The number of the layer's codebook (config.codebook_id); 0: it has none.
uint64_t kvq__layer_book(const struct kvq__session *s, const struct kvq__layer *l);

// ---- The index (prefix.c) ----

struct kvq__node {
    LIST_ENTRY(kvq__node) link;     // in its bucket
    TAILQ_ENTRY(kvq__node) leaf;    // among those without children
    struct kvq__node *parent;       // the page before; NULL: it is the first
    struct kvq__pool *pool;         // where its blocks lie
    uint32_t children, page, shard; // page: its number, from 0
    uint32_t n_layers;              // with blocks
    uint64_t used_at, bytes;        // bytes: of the blocks it names
    struct kvq__alone alone;        // what of these nothing else has
    uint8_t chain[KVQ__HASH_BYTES], layers[KVQ__HASH_BYTES];
    int32_t ids[KVQ_BLOCK_TOKENS];
    struct kvq__pageref *pages; // of each layer that has its own
    struct kvq__restore *from;  // the restore that is reading its blocks; NULL: they are there
    LIST_ENTRY(kvq__node) from_link;
};
LIST_HEAD(kvq__node_list, kvq__node);
TAILQ_HEAD(kvq__leaf_list, kvq__node);

// Why a page is evicted.
enum kvq__eviction { KVQ__EVICT_ROOM, KVQ__EVICT_AGE, KVQ__EVICT_DROP, KVQ__EVICTIONS };

struct kvq__prefixes {
    struct kvq__namespace *ns;      // whose bookkeeping memory the nodes are
    const struct kvq__node *keep;   // must not be evicted at the moment; NULL = none
    struct kvq__node_list *buckets; // NULL: nothing was ever shared
    uint32_t n_buckets, n_nodes;
    struct kvq__leaf_list leaves; // the one used longest ago first
    uint64_t bytes, lookups, hits, asked_tokens, hit_tokens, evicted;
    struct kvq__alones alone; // of `bytes`, what nothing else has a reference to
    struct {
        uint64_t pages[KVQ__EVICTIONS], bytes;
    } unreported;              // evicted since the last event
    uint64_t evicted_event_at; // when that was; 0: never
};

static inline void kvq__prefixes_init(struct kvq__prefixes *prefixes, struct kvq__namespace *ns)
{
    *prefixes = (struct kvq__prefixes){.ns = ns};
    TAILQ_INIT(&prefixes->leaves);
    TAILQ_INIT(&prefixes->alone.lists[false]);
    TAILQ_INIT(&prefixes->alone.lists[true]);
}
struct kvq__node *kvq__prefix_find(const struct kvq__prefixes *prefixes, const uint8_t *chain,
                                   const uint8_t *layers, uint32_t shard,
                                   const struct kvq__pool *pool);
// Whether any session of that shard had the page.
bool kvq__prefix_has_shard(const struct kvq__prefixes *prefixes, const uint8_t *chain,
                           uint32_t shard);
// Adds the next page of a session whose blocks are yet to be read to the index. *chain is the hash
// of the page before, and becomes that of this page. NULL: there is no memory, or the page before
// was evicted. *made: the index did not have the page, and the node references this session's
// blocks.
struct kvq__node *kvq__prefix_offer(struct kvq__session *session, uint32_t page, uint8_t *chain,
                                    bool *made);
// Takes an offer back: the node drops its blocks, and is evicted if it is a leaf.
void kvq__prefix_withdraw(struct kvq__core *core, struct kvq__prefixes *prefixes,
                          struct kvq__node *node);
// Adds the session's final pages to the index, as many as there is memory for. Of those that have
// not come with a step since the last call, as restored ones and ones that were evicted, it adds
// config.seal_pages at most; a later call goes on.
void kvq__prefix_seal(struct kvq__session *session);
// The same for all sessions of core->seals, which share config.seal_pages.
void kvq__prefix_seal_all(struct kvq__core *core);
// Puts the session into core->seals if its next page may become final without another commit, or
// takes it out.
void kvq__prefix_note(struct kvq__session *session);
void kvq__prefix_unnote(struct kvq__session *session);
// Marks the node and its predecessors as used now.
void kvq__prefix_touch(struct kvq__core *core, struct kvq__prefixes *prefixes,
                       struct kvq__node *node);
// A block was refused with this code: evicts one node that keeps memory which would help. False if
// there is none. *later (NULL is accepted): some would help once the requests under way have ended.
bool kvq__prefix_reclaim(struct kvq__core *core, const struct kvq__namespace *ns,
                         const struct kvq__pool *pool, int code, bool *later);
// The namespace is at its limit of table bytes: evicts the leaf that was used longest ago. False if
// there is none.
bool kvq__prefix_reclaim_node(struct kvq__namespace *ns);
void kvq__prefixes_tick(struct kvq__core *core); // seals final pages, evicts unused ones
void kvq__prefixes_close(struct kvq__core *core, struct kvq__namespace *ns);

// ---- Looking and opening with one (prefix_ask.c, prefix_open.c; more: prefix_ask.h) ----

// Asks which prefix a new, unpublished session could begin with, and answers at once. 0, a code for
// wrong ids, KVQ_E_UNSUPPORTED or KVQ_E_NO_MEMORY.
int kvq__prefix_ask_now(struct kvq__client *client, struct kvq__session *session,
                        const struct kvq__prefix_spec *spec, struct kvq__prefix_ask **ask,
                        char *text);
// The last page that was found, if it is still there and the session can have it; else NULL.
struct kvq__node *kvq__prefix_ask_found(const struct kvq__prefix_ask *ask,
                                        const struct kvq__session *session);
// Sets the session's pages and counts to those of a session that begins with so many tokens of a
// prefix.
void kvq__prefix_counts(struct kvq__session *session, uint64_t tokens);

// Has a new, unpublished session begin with the longest prefix that the index has. 0, a code for
// wrong ids, KVQ_E_UNSUPPORTED or KVQ_E_NO_MEMORY.
int kvq__prefix_adopt(struct kvq__client *client, struct kvq__session *session,
                      const struct kvq__prefix_spec *spec, char *text);

#endif
