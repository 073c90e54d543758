// SPDX-License-Identifier: Apache-2.0
//
// The index of prefixes: the nodes, and who gives way when memory is short. See prefix.h.
#include "daemon/core/session/prefix.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

#define NS_PER_SECOND 1000000000ull
enum { FIRST_BUCKETS = 64, EXPIRE_AT_ONCE = 64 }; // leaves of an index that one tick looks at

// ---- The table ----

static struct kvq__node_list *node_bucket(const struct kvq__prefixes *p, const uint8_t *chain)
{
    uint32_t hash;
    assert((p->n_buckets & (p->n_buckets - 1)) == 0);
    memcpy(&hash, chain, sizeof hash); // no hash of a hash: it is as good as random
    return &p->buckets[hash & (p->n_buckets - 1)];
}

struct kvq__node *kvq__prefix_find(const struct kvq__prefixes *p, const uint8_t *chain,
                                   const uint8_t *layers, uint32_t shard,
                                   const struct kvq__pool *pool)
{
    struct kvq__node *node;
    if (!p->buckets)
        return NULL;
    LIST_FOREACH (node, node_bucket(p, chain), link)
        if (node->shard == shard && node->pool == pool &&
            memcmp(node->chain, chain, KVQ__HASH_BYTES) == 0 &&
            memcmp(node->layers, layers, KVQ__HASH_BYTES) == 0)
            return node;
    return NULL;
}

bool kvq__prefix_has_shard(const struct kvq__prefixes *p, const uint8_t *chain, uint32_t shard)
{
    const struct kvq__node *node;
    if (p->buckets)
        LIST_FOREACH (node, node_bucket(p, chain), link)
            if (node->shard == shard && memcmp(node->chain, chain, KVQ__HASH_BYTES) == 0)
                return true;
    return false;
}

static int table_grow(struct kvq__prefixes *p)
{
    struct kvq__prefixes old = *p;
    struct kvq__node *node;
    uint32_t n = p->buckets ? 2 * p->n_buckets : FIRST_BUCKETS;
    if (p->n_nodes < p->n_buckets)
        return 0;
    struct kvq__node_list *buckets = kvq__ns_try(p->ns, n * sizeof *buckets);
    if (!buckets)
        return p->buckets ? 0 : KVQ_E_NO_MEMORY; // it works as it is, only slower
    p->buckets = buckets;
    p->n_buckets = n;
    for (uint32_t i = 0; i < old.n_buckets; i++)
        while ((node = LIST_FIRST(&old.buckets[i]))) {
            LIST_REMOVE(node, link);
            LIST_INSERT_HEAD(node_bucket(p, node->chain), node, link);
        }
    kvq__ns_deallocate(p->ns, old.buckets, old.n_buckets * sizeof *old.buckets);
    return 0;
}

// ---- Nodes ----

static void node_free(struct kvq__prefixes *p, struct kvq__node *node)
{
    assert(node->children == 0 && node->alone.bytes == 0);
    if (node->from)
        LIST_REMOVE(node, from_link);
    kvq__ns_deallocate(p->ns, node->pages, node->n_layers * sizeof *node->pages);
    kvq__ns_deallocate(p->ns, node, sizeof *node);
}

static struct kvq__node *node_new(struct kvq__prefixes *p, uint32_t n_layers)
{
    struct kvq__node *node = kvq__ns_try(p->ns, sizeof *node);
    if (!node)
        return NULL;
    node->n_layers = n_layers;
    node->alone = (struct kvq__alone){.of = &p->alone, .leaf = true};
    node->pages = kvq__ns_try(p->ns, n_layers * sizeof *node->pages);
    if (!node->pages) {
        node_free(p, node);
        return NULL;
    }
    return node;
}

static uint64_t share(const struct kvq__node *node, struct kvq__ref *to,
                      const struct kvq__ref *from)
{
    if (to->block || !from->block)
        return 0;
    *to = kvq__block_index(*from, &node->alone);
    return from->block->bytes;
}

// The block is free at once if no request reads it.
static void unshare(struct kvq__core *core, const struct kvq__node *node, struct kvq__ref *ref)
{
    if (ref->block)
        kvq__block_unindex(ref->block, &node->alone);
    kvq__block_drop_idle(core, ref, true);
}

// Adds references to the final blocks that the node lacks: packed ones, or raw ones of raw formats.
static void node_fill(struct kvq__prefixes *p, struct kvq__node *node, const struct kvq__session *s)
{
    assert(node->page < s->n_pages && node->n_layers == s->n_owned);
    struct kvq__pageref *to = node->pages;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        uint64_t bytes = 0;
        if (!kvq__layer_owns(s, i))
            continue;
        if (node->page >= l->first_page && l->packed_bytes)
            bytes = share(node, &to->packed, &kvq__page(l, node->page)->packed);
        else if (node->page >= l->first_page)
            bytes = share(node, &to->raw, &kvq__page(l, node->page)->raw);
        node->bytes += bytes;
        p->bytes += bytes;
        to++;
    }
}

// Leaves stand in the order of their last use. A new one belongs at the end, and one whose last
// child was evicted near the front or the end: the place is looked for from both.
static void leaf_insert(struct kvq__prefixes *p, struct kvq__node *node)
{
    struct kvq__node *before = TAILQ_FIRST(&p->leaves);
    struct kvq__node *after = TAILQ_LAST(&p->leaves, kvq__leaf_list);
    assert(node->children == 0);
    while (before && before->used_at <= node->used_at && after->used_at > node->used_at) {
        p->ns->core->lookup.looks++;
        before = TAILQ_NEXT(before, leaf);
        after = TAILQ_PREV(after, kvq__leaf_list, leaf);
    }
    if (!after)
        TAILQ_INSERT_HEAD(&p->leaves, node, leaf);
    else if (after->used_at <= node->used_at)
        TAILQ_INSERT_AFTER(&p->leaves, after, node, leaf);
    else
        TAILQ_INSERT_BEFORE(before, node, leaf);
}

static void node_insert(struct kvq__prefixes *p, struct kvq__node *node)
{
    assert(!node->parent || node->parent->page + 1 == node->page);
    LIST_INSERT_HEAD(node_bucket(p, node->chain), node, link);
    p->n_nodes++;
    if (node->parent && node->parent->children++ == 0) {
        TAILQ_REMOVE(&p->leaves, node->parent, leaf);
        kvq__alone_place(&node->parent->alone, false, false);
    }
    leaf_insert(p, node);
}

// Takes the node out of the index. Its blocks are free at once if no request reads them.
static void node_evict(struct kvq__core *core, struct kvq__prefixes *p, struct kvq__node *node,
                       enum kvq__eviction why)
{
    assert(node != p->keep && p->n_nodes > 0 && p->bytes >= node->bytes);
    assert(!node->parent || node->parent->children > 0);
    assert(node->children == 0);
    for (uint32_t i = 0; i < node->n_layers; i++) {
        unshare(core, node, &node->pages[i].raw);
        unshare(core, node, &node->pages[i].packed);
    }
    LIST_REMOVE(node, link);
    TAILQ_REMOVE(&p->leaves, node, leaf);
    p->n_nodes--;
    p->bytes -= node->bytes;
    p->evicted++;
    p->unreported.pages[why]++;
    p->unreported.bytes += node->bytes;
    if (node->parent && --node->parent->children == 0) {
        leaf_insert(p, node->parent);
        kvq__alone_place(&node->parent->alone, true, node->parent->used_at <= node->used_at);
    }
    node_free(p, node);
}

void kvq__prefix_touch(struct kvq__core *core, struct kvq__prefixes *p, struct kvq__node *node)
{
    if (node && node->children == 0) {
        TAILQ_REMOVE(&p->leaves, node, leaf);
        TAILQ_INSERT_TAIL(&p->leaves, node, leaf);
    }
    for (; node; node = node->parent)
        node->used_at = core->now;
}

// ---- Giving pages to the index ----

// Whether the page is final: all its units are read from a store, packed, and done on the GPU.
static bool is_final(const struct kvq__session *s, uint32_t page)
{
    uint64_t end = ((uint64_t)page + 1) * KVQ_BLOCK_TOKENS;
    uint64_t settled = s->ended.finish.phase ? s->ended.finish.due : s->floor;
    if (end > s->ids.known || end > settled || s->n_loading > 0 || kvq__is_offloaded(s))
        return false;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i) || l->packed_bytes == 0)
            continue;
        if (l->packed < end || !kvq__work_stream_ended(l->pack_stream, l->pack_number))
            return false;
    }
    return true;
}

static const int32_t *page_ids(const struct kvq__session *s, uint32_t page)
{
    assert(((uint64_t)page + 1) * KVQ_BLOCK_TOKENS <= s->ids.known);
    return kvq__ids_at(&s->ids, (uint64_t)page * KVQ_BLOCK_TOKENS);
}

// A node of the page that the index does not have yet. 0 or KVQ_E_NO_MEMORY.
static int add_node(struct kvq__session *s, uint32_t page, const uint8_t *chain,
                    struct kvq__node *parent, struct kvq__node **out)
{
    struct kvq__prefixes *p = &s->ns->prefixes;
    assert((page == 0) == (parent == NULL));
    p->keep = parent; // others may have to make room for this page
    struct kvq__node *node = table_grow(p) < 0 ? NULL : node_new(p, s->n_owned);
    p->keep = NULL;
    if (!node)
        return KVQ_E_NO_MEMORY;
    node->parent = parent;
    node->page = page;
    node->shard = s->shard;
    node->pool = s->pool;
    node->used_at = s->core->now;
    memcpy(node->chain, chain, KVQ__HASH_BYTES);
    memcpy(node->layers, s->ids.layers, KVQ__HASH_BYTES);
    memcpy(node->ids, page_ids(s, node->page), sizeof node->ids);
    node_insert(p, node);
    *out = node;
    return 0;
}

static struct kvq__node *find_own_node(const struct kvq__session *s, const uint8_t *chain)
{
    return kvq__prefix_find(&s->ns->prefixes, chain, s->ids.layers, s->shard, s->pool);
}

// Adds the next page to the index. *parent is the node before, and becomes the new one. False: no
// memory.
static bool seal_page(struct kvq__session *s, struct kvq__node **parent)
{
    struct kvq__ids *ids = &s->ids;
    uint8_t chain[KVQ__HASH_BYTES];
    assert(ids->identified);
    memcpy(chain, ids->chain, sizeof chain);
    kvq__prefix_chain(s->core, chain, page_ids(s, ids->sealed), ids->spans, ids->n_spans,
                      ids->sealed);
    struct kvq__node *node = find_own_node(s, chain);
    if (!node && add_node(s, ids->sealed, chain, *parent, &node) < 0)
        return false;
    node_fill(&s->ns->prefixes, node, s);
    memcpy(ids->chain, chain, sizeof chain);
    ids->sealed++;
    *parent = node;
    return true;
}

// The node of the last sealed page. If it was evicted, or the session has moved, sealing starts
// again from the first page.
static struct kvq__node *last_sealed(struct kvq__session *s)
{
    struct kvq__node *node = s->ids.sealed ? find_own_node(s, s->ids.chain) : NULL;
    assert(!node || node->page + 1 == s->ids.sealed);
    if (!node) {
        kvq__ids_restart(&s->ids);
        memcpy(s->ids.chain, s->ids.root, sizeof s->ids.root);
    }
    return node;
}

struct kvq__node *kvq__prefix_offer(struct kvq__session *s, uint32_t page, uint8_t *chain,
                                    bool *made)
{
    struct kvq__node *parent = page ? find_own_node(s, chain) : NULL;
    *made = false;
    if (page && !parent)
        return NULL;
    kvq__prefix_chain(s->core, chain, page_ids(s, page), s->ids.spans, s->ids.n_spans, page);
    struct kvq__node *node = find_own_node(s, chain);
    if (!node && add_node(s, page, chain, parent, &node) == 0) {
        node_fill(&s->ns->prefixes, node, s);
        *made = true;
    }
    return node;
}

void kvq__prefix_unnote(struct kvq__session *s)
{
    if (s->seal.listed)
        TAILQ_REMOVE(&s->core->seals, s, seal.link);
    s->seal.listed = false;
}

// Whether its next page becomes final without another commit: when all is packed that is due, or
// what is under way has ended.
static bool may_seal(struct kvq__session *s)
{
    uint64_t end = ((uint64_t)s->ids.sealed + 1) * KVQ_BLOCK_TOKENS;
    if (end > s->ids.known || end > s->floor || kvq__is_offloaded(s) || s->dropped)
        return false;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (kvq__layer_owns(s, i) && l->packed_bytes && l->packed < end &&
            kvq__pack_due(s, i) < end)
            return false;
    }
    return kvq__ids_identify(s, NULL) == 0;
}

void kvq__prefix_note(struct kvq__session *s)
{
    bool may = may_seal(s);
    if (may && !s->seal.listed)
        TAILQ_INSERT_TAIL(&s->core->seals, s, seal.link);
    else if (!may)
        kvq__prefix_unnote(s);
    s->seal.listed = may;
}

// Adds what has become final, and at most *left pages that are no new ones: a session whose pages
// were evicted begins with its first one again, and one that was restored has never begun. Both may
// have as many as there are.
static void seal(struct kvq__session *s, uint32_t *left)
{
    bool under_way = s->pool->gpu && s->entries.tail > 0;
    if (s->ids.known < KVQ_BLOCK_TOKENS || under_way || !is_final(s, s->ids.sealed) ||
        s->core->up->move_asks(s)) // whose blocks are about to be others
        return;
    if (kvq__ids_identify(s, NULL) < 0)
        return;
    struct kvq__node *parent = last_sealed(s);
    for (;;) {
        bool again = s->ids.sealed < s->ids.again;
        if ((again && *left == 0) || !is_final(s, s->ids.sealed) || !seal_page(s, &parent))
            return;
        *left -= again;
    }
}

void kvq__prefix_seal(struct kvq__session *s)
{
    uint32_t left = s->core->config.seal_pages;
    seal(s, &left);
    kvq__prefix_note(s);
}

// Moves those before the session behind the others.
static void start_with(struct kvq__core *core, const struct kvq__session *first)
{
    struct kvq__session *s;
    assert(first->seal.listed);
    while ((s = TAILQ_FIRST(&core->seals)) != first) {
        TAILQ_REMOVE(&core->seals, s, seal.link);
        TAILQ_INSERT_TAIL(&core->seals, s, seal.link);
    }
}

void kvq__prefix_seal_all(struct kvq__core *core)
{
    struct kvq__session *s = TAILQ_FIRST(&core->seals), *next;
    uint32_t left = core->config.seal_pages;
    for (; s && left > 0; s = next) {
        next = TAILQ_NEXT(s, seal.link);
        core->lookup.looks++;
        seal(s, &left);
        kvq__prefix_note(s);
    }
    if (s) // the others come first next time
        start_with(core, s);
}

// ---- Giving way ----

// The memory that is looked for in the index. ns not NULL: memory that counts for the namespace's
// limit of such pools. Else: memory in that pool, or in any if pool is NULL.
struct sought {
    const struct kvq__namespace *ns;
    const struct kvq__pool *pool;
    bool later; // some was seen that is free only when the requests under way have ended
};

// Whether dropping the reference frees memory at once that helps.
static bool frees_block(const struct kvq__core *core, const struct kvq__ref *ref,
                        struct sought *sought)
{
    const struct kvq__arena *arena = ref->block ? ref->block->extent->owner : NULL;
    const struct kvq__namespace *ns = sought->ns;
    const struct kvq__pool *pool = sought->pool;
    assert(!ns || pool);
    if (!arena || (ns && arena->ns != ns))
        return false;
    bool helps =
        ns ? kvq__pool_limit(arena->pool) == kvq__pool_limit(pool) : !pool || arena->pool == pool;
    bool idle = helps && kvq__block_is_idle(core, ref->block);
    sought->later |= helps && !idle && ref->block->refs == 1;
    return idle;
}

static bool frees(const struct kvq__core *core, const struct kvq__node *node, struct sought *sought)
{
    for (uint32_t i = 0; i < node->n_layers; i++)
        if (frees_block(core, &node->pages[i].raw, sought) ||
            frees_block(core, &node->pages[i].packed, sought))
            return true;
    return false;
}

static bool frees_any(const struct kvq__core *core, const struct kvq__node *node)
{
    return frees(core, node, &(struct sought){0});
}

static bool is_empty_node(const struct kvq__node *node)
{
    return node->bytes == 0;
}

static struct kvq__node *node_alone(struct kvq__alone *alone)
{
    return (struct kvq__node *)((uint8_t *)alone - offsetof(struct kvq__node, alone));
}

// Of the leaves that have blocks alone: those that sessions hold are passed by, however many.
static struct kvq__node *oldest(struct kvq__core *core, const struct kvq__prefixes *p,
                                struct sought *sought)
{
    struct kvq__alone *a;
    TAILQ_FOREACH (a, &p->alone.lists[true], link) {
        core->lookup.looks++;
        if (frees(core, node_alone(a), sought))
            return node_alone(a);
    }
    return NULL;
}

static void shed_ref(struct kvq__core *core, struct kvq__prefixes *p, struct kvq__node *node,
                     struct kvq__ref *ref)
{
    uint64_t bytes = ref->block->bytes;
    assert(node->bytes >= bytes && p->bytes >= bytes);
    node->bytes -= bytes;
    p->bytes -= bytes;
    unshare(core, node, ref);
}

static bool shed_node(struct kvq__core *core, struct kvq__prefixes *p, struct kvq__node *node,
                      struct sought *sought)
{
    bool any = false;
    for (uint32_t i = 0; i < node->n_layers; i++) {
        struct kvq__pageref *page = &node->pages[i];
        struct kvq__ref *ref = page->packed.block ? &page->packed : &page->raw;
        if (!frees_block(core, ref, sought))
            continue;
        shed_ref(core, p, node, ref);
        any = true;
    }
    return any;
}

// Drops blocks that only the index has, of nodes that stay: those behind a sliding window.
static bool shed(struct kvq__core *core, struct kvq__prefixes *p, struct sought *sought)
{
    struct kvq__alone *a;
    for (uint32_t i = 0; i < 2; i++)
        TAILQ_FOREACH (a, &p->alone.lists[i], link) {
            core->lookup.looks++;
            if (shed_node(core, p, node_alone(a), sought))
                return true;
        }
    return false;
}

// Whether any index has a block alone that would help.
static bool has_alone(const struct kvq__core *core, const struct kvq__namespace *ns,
                      const struct kvq__pool *pool)
{
    enum kvq__limit which = kvq__pool_limit(pool);
    if (!ns)
        return pool->index_bytes > 0;
    for (uint32_t i = 0; i < core->n_pools; i++)
        if (kvq__pool_limit(&core->pools[i]) == which && ns->arenas[i].index_bytes > 0)
            return true;
    return false;
}

// The node, and those before it of which nothing is left.
static void evict_empty(struct kvq__core *core, struct kvq__prefixes *p, struct kvq__node *node,
                        enum kvq__eviction why)
{
    do {
        struct kvq__node *parent = node->parent;
        node_evict(core, p, node, why);
        node = parent;
    } while (node && node->children == 0 && is_empty_node(node));
}

// Gives up one node, or a block of one that stays; false if there is none.
static bool reclaim(struct kvq__core *core, struct sought *sought)
{
    struct kvq__namespace *at;
    struct kvq__prefixes *of = NULL;
    struct kvq__node *first = NULL;
    if (!has_alone(core, sought->ns, sought->pool))
        return false;
    TAILQ_FOREACH (at, &core->namespaces, link) {
        if (at->prefixes.alone.bytes == 0)
            continue;
        struct kvq__node *node = oldest(core, &at->prefixes, sought);
        if (node && (!first || node->alone.since < first->alone.since)) {
            first = node;
            of = &at->prefixes;
        }
    }
    if (first) {
        evict_empty(core, of, first, KVQ__EVICT_ROOM);
        return true;
    }
    TAILQ_FOREACH (at, &core->namespaces, link)
        if (at->prefixes.alone.bytes > 0 && shed(core, &at->prefixes, sought))
            return true;
    return false;
}

// At a quota only blocks of that namespace help, in whichever index; in a full pool any block there
// does.
bool kvq__prefix_reclaim(struct kvq__core *core, const struct kvq__namespace *ns,
                         const struct kvq__pool *pool, int code, bool *later)
{
    struct sought sought = {.ns = code == KVQ_E_QUOTA ? ns : NULL, .pool = pool};
    assert(code == KVQ_E_QUOTA || code == KVQ_E_NO_MEMORY);
    bool any = reclaim(core, &sought);
    if (later)
        *later = sought.later;
    return any;
}

// Frees the node's own memory; other owners may keep its blocks.
bool kvq__prefix_reclaim_node(struct kvq__namespace *ns)
{
    struct kvq__prefixes *p = &ns->prefixes;
    struct kvq__node *node = TAILQ_FIRST(&p->leaves);
    if (node && node == p->keep)
        node = TAILQ_NEXT(node, leaf);
    if (!node)
        return false;
    node_evict(ns->core, p, node, KVQ__EVICT_ROOM);
    return true;
}

// Evicts leaves that were not used for long; what is left of them goes in the next ticks. A leaf
// whose blocks sessions have counts as used now.
static void expire(struct kvq__core *core, struct kvq__prefixes *p)
{
    struct kvq__node *node;
    uint64_t keep = core->config.prefix_keep_ns;
    for (uint32_t i = 0; i < EXPIRE_AT_ONCE && keep && (node = TAILQ_FIRST(&p->leaves)); i++) {
        assert(node->used_at <= core->now);
        if (core->now - node->used_at < keep)
            return;
        if (is_empty_node(node) || frees_any(core, node))
            node_evict(core, p, node, KVQ__EVICT_AGE);
        else
            kvq__prefix_touch(core, p, node);
    }
}

static void tell_evicted(struct kvq__core *core, struct kvq__namespace *ns)
{
    struct kvq__prefixes *p = &ns->prefixes;
    const uint64_t *pages = p->unreported.pages;
    uint64_t all = pages[KVQ__EVICT_ROOM] + pages[KVQ__EVICT_AGE] + pages[KVQ__EVICT_DROP];
    char text[192];
    if (all == 0 || (p->evicted_event_at && core->now - p->evicted_event_at < NS_PER_SECOND))
        return;
    snprintf(text, sizeof text,
             "%llu tokens, %llu bytes: %llu tokens for room, %llu that nobody used for long, %llu "
             "dropped",
             (unsigned long long)all * KVQ_BLOCK_TOKENS, (unsigned long long)p->unreported.bytes,
             (unsigned long long)pages[KVQ__EVICT_ROOM] * KVQ_BLOCK_TOKENS,
             (unsigned long long)pages[KVQ__EVICT_AGE] * KVQ_BLOCK_TOKENS,
             (unsigned long long)pages[KVQ__EVICT_DROP] * KVQ_BLOCK_TOKENS);
    p->evicted_event_at = core->now;
    memset(&p->unreported, 0, sizeof p->unreported);
    kvq__event(core, KVQ__EVENT_PREFIX_EVICTED, ns->name, "", 0, text);
}

void kvq__prefix_withdraw(struct kvq__core *core, struct kvq__prefixes *p, struct kvq__node *node)
{
    for (uint32_t i = 0; i < node->n_layers; i++) {
        struct kvq__pageref *page = &node->pages[i];
        if (page->packed.block)
            shed_ref(core, p, node, &page->packed);
        if (page->raw.block)
            shed_ref(core, p, node, &page->raw);
    }
    if (node->children == 0 && is_empty_node(node))
        evict_empty(core, p, node, KVQ__EVICT_DROP);
}

// ---- Dropping ----

// Leaves, and what they leave as leaves.
static void drop_leaves(struct kvq__core *core, struct kvq__prefixes *p)
{
    struct kvq__node *node = TAILQ_FIRST(&p->leaves), *next;
    for (; node; node = next) {
        next = TAILQ_NEXT(node, leaf); // no parent of it, which is no leaf yet
        core->lookup.looks++;
        while (node && node->children == 0 && (is_empty_node(node) || frees_any(core, node))) {
            struct kvq__node *parent = node->parent;
            node_evict(core, p, node, KVQ__EVICT_DROP);
            node = parent;
        }
    }
}

static uint64_t used_bytes(const struct kvq__core *core)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < core->n_pools; i++)
        bytes += core->pools[i].used_bytes;
    return bytes;
}

int kvq__core_drop_prefixes(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                            uint64_t *pages, uint64_t *bytes, char *text)
{
    struct kvq__namespace *ns, *only = NULL;
    struct kvq__node *node;
    uint64_t before = used_bytes(core);
    int rc = name && *name ? kvq__namespace_get(core, peer, name, &only, text) : 0;
    *pages = *bytes = 0;
    if (rc < 0)
        return rc;
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        struct kvq__prefixes *p = &ns->prefixes;
        uint32_t had = p->n_nodes;
        if (p->alone.bytes == 0 || (only ? ns != only : !kvq__namespace_allows(ns, peer)))
            continue;
        drop_leaves(core, p);
        for (uint32_t b = 0; b < p->n_buckets && p->alone.bytes > 0; b++)
            LIST_FOREACH (node, &p->buckets[b], link) {
                core->lookup.looks++;
                shed_node(core, p, node, &(struct sought){0});
            }
        assert(p->n_nodes <= had);
        *pages += had - p->n_nodes;
    }
    assert(used_bytes(core) <= before);
    *bytes = before - used_bytes(core);
    return 0;
}

void kvq__prefixes_tick(struct kvq__core *core)
{
    struct kvq__namespace *ns;
    kvq__prefix_seal_all(core);
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        expire(core, &ns->prefixes);
        tell_evicted(core, ns);
    }
}

void kvq__prefixes_close(struct kvq__core *core, struct kvq__namespace *ns)
{
    struct kvq__prefixes *p = &ns->prefixes;
    struct kvq__node *node;
    while ((node = TAILQ_FIRST(&p->leaves)))
        node_evict(core, p, node, KVQ__EVICT_DROP);
    assert(p->n_nodes == 0 && p->bytes == 0);
    kvq__ns_deallocate(ns, p->buckets, p->n_buckets * sizeof *p->buckets);
    kvq__prefixes_init(p, ns);
}
