// SPDX-License-Identifier: Apache-2.0
//
// Prefixes: sessions that begin with the same tokens share the blocks of these.
//
// Each namespace has an index of pages of 128 tokens that cannot change any more. A page is known
// by a keyed hash (BLAKE2b) of its token ids, of the digests of images or audio among them, and of
// the hash of the page before; the first one's goes back to all that the sessions have in common
// whose tokens mean the same (prefix.c, kvq__ids_identify). A page's node holds a reference to each
// block of its session's layers, and so they outlive that session. On a hit ids, layers and parent
// are compared as well, so a wrong hit would take more than a collision.
//
// What can be shared: pages below the floor whose units are packed in all layers (raw formats:
// stored). Formats that keep something besides blocks (sinks, outliers, factors of the prompt) have
// that of one session alone; they share by forks. Layers with a sliding window have let go of pages
// behind it; a node then lacks their blocks, and a prefix can end there only if none is needed.
//
// Nodes are given up, leaves first and the one that was used longest ago before others, before
// anything fails for want of memory, and when nobody has used them for a while.
#ifndef KVQ_DAEMON_CORE_SESSION_PREFIX_H
#define KVQ_DAEMON_CORE_SESSION_PREFIX_H

#include <sys/queue.h>

#include "daemon/core/core.h"

struct kvq__block;
struct kvq__layer;
struct kvq__namespace;
struct kvq__pageref;
struct kvq__part;
struct kvq__pool;
struct kvq__prefix_ask;
struct kvq__ref;
struct kvq__session;

enum { KVQ__HASH_BYTES = 32 };

// ---- What a session's tokens are (ids.c) ----

enum { KVQ__IDS_PART = 1024 };

// Forks share those that are full and lie below the floor; what is shared is not written any more.
struct kvq__ids_part {
    uint32_t refs;
    uint64_t stored; // the store's id, 0 = none; only of those below the floor
    int32_t at[KVQ__IDS_PART];
};

struct kvq__ids {
    struct kvq__ids_part **parts; // NULL until somebody has told some
    uint32_t n_parts, room;       // parts that there are; that `parts` has room for
    uint64_t known;               // those of tokens [0, known) are there
    bool pending;                 // those of the open step stand behind the committed ones'
    bool identified;              // root and layers are known
    struct kvq__span *spans;
    uint32_t n_spans;
    uint8_t root[KVQ__HASH_BYTES], layers[KVQ__HASH_BYTES];
    uint32_t sealed; // pages that the index was given
    uint8_t chain[KVQ__HASH_BYTES];
};

// Where the id of a token stands, which there is room for, and those of the tokens behind it in its
// part.
static inline int32_t *kvq__ids_at(const struct kvq__ids *ids, uint64_t token)
{
    return &ids->parts[token / KVQ__IDS_PART]->at[token % KVQ__IDS_PART];
}
// Copies the ids of tokens [0, known) out.
void kvq__ids_read(const struct kvq__ids *ids, int32_t *out);
// Copies the ids of so many tokens, once, behind those of the session's tokens, where they wait for
// kvq__ids_commit. NULL: nothing is known of the tokens to come. 0, or as kvq__ns_allocate.
int kvq__ids_take(struct kvq__session *session, const volatile int32_t *from, uint32_t tokens);
// So many tokens were committed behind `had`.
void kvq__ids_commit(struct kvq__session *session, uint64_t had, uint64_t tokens);
// The session has no more than so many tokens from now on.
void kvq__ids_cut(struct kvq__session *session, uint64_t tokens);
// Of the last `append` tokens those at these indices are to stay: their ids move behind the tokens
// before, and wait for kvq__ids_commit.
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
// Gives back the last part, of which nothing is known any more.
void kvq__ids_pop(struct kvq__session *session);
void kvq__ids_free(struct kvq__session *session);

// ---- The index (prefix.c) ----

struct kvq__node {
    LIST_ENTRY(kvq__node) link;     // in its bucket
    TAILQ_ENTRY(kvq__node) leaf;    // among those without children
    struct kvq__node *parent;       // the page before; NULL: it is the first
    struct kvq__pool *pool;         // where its blocks lie
    uint32_t children, page, shard; // page: its number, from 0
    uint32_t n_layers;              // with blocks
    uint64_t used_at, bytes;        // bytes: of the blocks it names
    uint8_t chain[KVQ__HASH_BYTES], layers[KVQ__HASH_BYTES];
    int32_t ids[KVQ_BLOCK_TOKENS];
    struct kvq__pageref *pages; // of each layer that has its own
    struct kvq__restore *from;  // that is to read its blocks yet; NULL: they are there
    LIST_ENTRY(kvq__node) from_link;
};
LIST_HEAD(kvq__node_list, kvq__node);
TAILQ_HEAD(kvq__leaf_list, kvq__node);

// Why a page is given up.
enum kvq__eviction { KVQ__EVICT_ROOM, KVQ__EVICT_AGE, KVQ__EVICT_DROP, KVQ__EVICTIONS };

struct kvq__prefixes {
    struct kvq__namespace *ns;      // whose bookkeeping memory the nodes are
    const struct kvq__node *keep;   // is not given up just now; NULL = none
    struct kvq__node_list *buckets; // NULL: nothing was ever shared
    uint32_t n_buckets, n_nodes;
    struct kvq__leaf_list leaves; // the one used longest ago first
    uint64_t bytes, lookups, hits, hit_tokens, evicted;
    struct {
        uint64_t pages[KVQ__EVICTIONS], bytes;
    } untold; // evicted since the last event
    uint64_t told_at;
};

static inline void kvq__prefixes_init(struct kvq__prefixes *prefixes, struct kvq__namespace *ns)
{
    *prefixes = (struct kvq__prefixes){.ns = ns};
    TAILQ_INIT(&prefixes->leaves);
}
// What the hashes go back to. 0, or KVQ_E_UNSUPPORTED with a text: the session cannot share.
int kvq__ids_identify(struct kvq__session *session, char *text);
// The hash of the first page's predecessor, for the sessions of a namespace.
void kvq__prefix_root(const struct kvq__session *session, const char *ns, uint8_t *root);
// The hash of a page: of its predecessor's, its ids, and what of the spans lies in it.
void kvq__prefix_chain(const struct kvq__core *core, uint8_t *chain, const int32_t *ids,
                       const struct kvq__span *spans, uint32_t n_spans, uint32_t page);
// What a store knows the page by.
void kvq__prefix_stored(const struct kvq__core *core, const uint8_t *chain, const uint8_t *layers,
                        uint32_t shard, uint8_t *out);
// What the layer's codebook is known by; 0: it has none.
uint64_t kvq__layer_book(const struct kvq__session *s, const struct kvq__layer *l);
struct kvq__node *kvq__prefix_find(const struct kvq__prefixes *prefixes, const uint8_t *chain,
                                   const uint8_t *layers, uint32_t shard,
                                   const struct kvq__pool *pool);
// Whether any session of that shard had the page.
bool kvq__prefix_has_shard(const struct kvq__prefixes *prefixes, const uint8_t *chain,
                           uint32_t shard);
// Gives the index the next page of a session whose blocks are yet to be read. *chain is the hash of
// the page before it, and becomes its own. NULL: memory is missing, or that page was given up.
// *made: the index did not have it, and the node's blocks are this session's.
struct kvq__node *kvq__prefix_offer(struct kvq__session *session, uint32_t page, uint8_t *chain,
                                    bool *made);
// Takes back what was offered: the node names no blocks any more.
void kvq__prefix_withdraw(struct kvq__core *core, struct kvq__prefixes *prefixes,
                          struct kvq__node *node);
// Gives the index the session's pages that cannot change any more. Where memory is missing it is
// tried again.
void kvq__prefix_seal(struct kvq__session *session);
// The same for all sessions whose pages can have become final since they were last looked at.
void kvq__prefix_seal_all(struct kvq__core *core);
// Notes that the session is one of these, if it is; or that it is none any more.
void kvq__prefix_note(struct kvq__session *session);
void kvq__prefix_unnote(struct kvq__session *session);
// The node and those before it were just used.
void kvq__prefix_touch(struct kvq__core *core, struct kvq__prefixes *prefixes,
                       struct kvq__node *node);
// A block was refused with this code: gives one node up that keeps memory which would help. False
// if there is none.
bool kvq__prefix_reclaim(struct kvq__core *core, const struct kvq__namespace *ns,
                         const struct kvq__pool *pool, int code);
// The namespace is at its limit of bookkeeping bytes: gives the page up that was used longest ago.
// False if there is none.
bool kvq__prefix_reclaim_node(struct kvq__namespace *ns);
void kvq__prefixes_tick(struct kvq__core *core); // seals, and gives up what nobody uses
void kvq__prefixes_close(struct kvq__core *core, struct kvq__namespace *ns);

// ---- What it needs of blocks and namespaces (pool.c, namespace.c) ----

// Whether the last reference to the block is one by which no request looks at it, and none that is
// under way does since before: then it is free at once when it is dropped.
bool kvq__block_is_idle(const struct kvq__core *core, const struct kvq__block *block);
void kvq__block_drop_idle(struct kvq__core *core, struct kvq__ref *ref);
// Whether sessions of the namespace of that name may share this one's prefixes.
bool kvq__namespace_shares(const struct kvq__namespace *ns, const char *with);

// ---- Looking and opening with one (prefix_ask.c, prefix_open.c; more: prefix_ask.h) ----

// An ask for what a new session, which nobody sees yet, could begin with, hashed and matched at
// once. 0, or what is wrong with the ids, or KVQ_E_UNSUPPORTED or KVQ_E_NO_MEMORY.
int kvq__prefix_ask_now(struct kvq__client *client, struct kvq__session *session,
                        const struct kvq__prefix_spec *spec, struct kvq__prefix_ask **ask,
                        char *text);
// The last page that was found, if it is still there and the session can have it; else NULL.
struct kvq__node *kvq__prefix_ask_found(const struct kvq__prefix_ask *ask,
                                        const struct kvq__session *session);
// The session's pages and counts are those of one that has only that many tokens, packed as a
// session is that begins with them.
void kvq__prefix_counts(struct kvq__session *session, uint64_t tokens);

// Gives a new session, which nobody sees yet, as many of the tokens as are there. 0, or what is
// wrong with the ids, or KVQ_E_UNSUPPORTED or KVQ_E_NO_MEMORY.
int kvq__prefix_adopt(struct kvq__client *client, struct kvq__session *session,
                      const struct kvq__prefix_spec *spec, char *text);

#endif
