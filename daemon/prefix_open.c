// SPDX-License-Identifier: Apache-2.0
//
// Asking the index: how much of a prompt is there, and a new session that begins with it.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/open.h"
#include "daemon/prefix.h"
#include "daemon/state.h"

// ---- The client's ids ----

static int open_source(struct kvq__client *client, const struct kvq__prefix_spec *spec,
                       struct kvq__id_source *source, char *text)
{
    if (spec->tokens > KVQ_MAX_SESSION_TOKENS)
        return kvq__fail(text, KVQ_E_LIMIT, "a prefix of %llu tokens; a session holds %d",
                         (unsigned long long)spec->tokens, KVQ_MAX_SESSION_TOKENS);
    const struct kvq__buffer *b = kvq__buffer_get(client, spec->buffer);
    if (!b || !b->memory.host)
        return kvq__fail(text, KVQ_E_BUFFER,
                         "token ids in buffer %u, which is no buffer of this client in the host's "
                         "memory; register one",
                         spec->buffer);
    uint64_t bytes = spec->tokens * sizeof(int32_t);
    if (spec->offset % sizeof(int32_t) || spec->offset > b->memory.bytes ||
        bytes > b->memory.bytes - spec->offset)
        return kvq__fail(text, KVQ_E_BOUNDS,
                         "%llu token ids at offset %llu of buffer %u, which has %llu bytes; they "
                         "take 4 bytes each and start at a multiple of 4",
                         (unsigned long long)spec->tokens, (unsigned long long)spec->offset,
                         spec->buffer, (unsigned long long)b->memory.bytes);
    *source = (struct kvq__id_source){b->memory.host + spec->offset,
                                      (uint32_t)(spec->tokens / KVQ_BLOCK_TOKENS),
                                      (uint32_t)(spec->stored / KVQ_BLOCK_TOKENS)};
    return 0;
}

void kvq__ids_copy(const struct kvq__id_source *source, uint32_t page, int32_t *ids)
{
    const volatile int32_t *from = (const volatile int32_t *)(const volatile void *)source->at;
    for (uint32_t t = 0; t < KVQ_BLOCK_TOKENS; t++)
        ids[t] = from[(size_t)page * KVQ_BLOCK_TOKENS + t];
}

// ---- How much is there ----

struct match {
    struct kvq__namespace *ns; // whose index it is
    struct kvq__node *node;    // the last page; NULL: nothing is there
    uint32_t pages;
};

// Where each layer's blocks have been there without a gap since.
struct runs {
    uint32_t since[KVQ_MAX_LAYERS];
};

static void run_on(struct runs *runs, const struct kvq__node *node)
{
    for (uint32_t i = 0; i < node->n_layers; i++)
        if (!node->pages[i].packed.block && !node->pages[i].raw.block)
            runs->since[i] = node->page + 1;
}

// Whether a session can begin with so many tokens: each layer has what can still be seen.
static bool suffices(const struct runs *runs, const struct kvq__session *s, uint64_t tokens)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i) &&
            (uint64_t)runs->since[at++] * KVQ_BLOCK_TOKENS > kvq__first_kept(&s->layers[i], tokens))
            return false;
    return true;
}

// All shards must have the page, of a session of several; what is in a store others will find.
static bool all_shards(const struct kvq__session *s, const struct kvq__prefixes *p,
                       const uint8_t *chain)
{
    for (uint32_t i = 0; s->shards > 1 && i < s->shards; i++)
        if (i != s->shard && !kvq__prefix_has_shard(p, chain, i))
            return false;
    return true;
}

static struct match match_in(const struct kvq__session *s, struct kvq__namespace *ns,
                             const struct kvq__id_source *source)
{
    const struct kvq__prefixes *p = &ns->prefixes;
    struct match best = {.ns = ns};
    struct runs runs = {0};
    struct kvq__node *parent = NULL;
    uint8_t chain[KVQ__HASH_BYTES];
    int32_t ids[KVQ_BLOCK_TOKENS];
    kvq__prefix_root(s, ns->name, chain);
    for (uint32_t page = 0; page < source->pages; page++) {
        kvq__ids_copy(source, page, ids);
        kvq__prefix_chain(s->core, chain, ids, s->ids.spans, s->ids.n_spans, page);
        struct kvq__node *node = kvq__prefix_find(p, chain, s->ids.layers, s->shard, s->pool);
        if (!node || node->parent != parent || memcmp(node->ids, ids, sizeof ids) != 0 ||
            (page >= source->stored && !all_shards(s, p, chain)))
            break;
        run_on(&runs, node);
        if (suffices(&runs, s, ((uint64_t)page + 1) * KVQ_BLOCK_TOKENS)) {
            best.node = node;
            best.pages = page + 1;
        }
        parent = node;
    }
    return best;
}

// Its own namespace's, and those that share theirs with it.
static struct match match_all(const struct kvq__session *s, const struct kvq__id_source *source)
{
    struct kvq__namespace *ns;
    kvq__prefix_seal_all(s->ns);
    struct match best = match_in(s, s->ns, source);
    TAILQ_FOREACH (ns, &s->core->namespaces, link) {
        if (ns == s->ns || !kvq__namespace_shares(ns, s->ns->name))
            continue;
        kvq__prefix_seal_all(ns);
        struct match other = match_in(s, ns, source);
        best = other.pages > best.pages ? other : best;
    }
    return best;
}

// ---- Beginning with it ----

static void adopt_layer(struct kvq__session *s, struct kvq__layer *l, uint64_t tokens)
{
    l->first_page = (uint32_t)(kvq__first_kept(l, tokens) / KVQ_BLOCK_TOKENS);
    l->raw_page = l->first_page;
    if (l->packed_bytes == 0)
        return;
    l->base = l->packed = tokens; // as in a fork: below, tokens are only there packed
    l->raw_page = s->n_pages;
}

static void adopt_page(struct kvq__session *s, const struct kvq__node *node)
{
    const struct kvq__pageref *from = node->pages;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        if (node->page >= l->first_page) {
            l->pages[node->page].packed = kvq__block_share(from->packed);
            l->pages[node->page].raw = kvq__block_share(from->raw);
        }
        from++;
    }
    memcpy(s->ids.at + (size_t)node->page * KVQ_BLOCK_TOKENS, node->ids, sizeof node->ids);
}

void kvq__prefix_counts(struct kvq__session *s, uint64_t tokens)
{
    s->n_pages = (uint32_t)(tokens / KVQ_BLOCK_TOKENS);
    s->tokens = s->floor = tokens;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i))
            adopt_layer(s, &s->layers[i], tokens);
}

static int adopt(struct kvq__session *s, const struct match *match)
{
    uint64_t tokens = (uint64_t)match->pages * KVQ_BLOCK_TOKENS;
    assert(match->node);
    int rc = kvq__pages_grow(s, match->pages);
    rc = rc ? rc : kvq__ids_grow(s, tokens);
    if (rc < 0)
        return rc;
    kvq__prefix_counts(s, tokens);
    s->prefix_tokens = s->ids.known = tokens;
    s->foreign = match->ns != s->ns;
    s->commits++; // none of it is saved
    for (const struct kvq__node *node = match->node; node; node = node->parent)
        adopt_page(s, node);
    if (!s->foreign) {
        s->ids.sealed = match->pages;
        memcpy(s->ids.chain, match->node->chain, KVQ__HASH_BYTES);
    }
    kvq__prefix_touch(s->core, &match->ns->prefixes, match->node);
    s->ns->prefixes.hit_tokens += tokens;
    return 0;
}

static int identify(struct kvq__client *client, struct kvq__session *s,
                    const struct kvq__prefix_spec *spec, struct kvq__id_source *source, char *text)
{
    int rc = open_source(client, spec, source, text);
    rc = rc ? rc : kvq__ids_spans(s, spec->spans, spec->n_spans, text);
    return rc ? rc : kvq__ids_identify(s, text);
}

static int find(struct kvq__client *client, struct kvq__session *s,
                const struct kvq__prefix_spec *spec, struct match *match, char *text)
{
    struct kvq__id_source source;
    int rc = identify(client, s, spec, &source, text);
    if (rc < 0)
        return rc;
    *match = match_all(s, &source);
    s->ns->prefixes.lookups++;
    s->ns->prefixes.hits += match->pages > 0;
    return 0;
}

int kvq__prefix_adopt(struct kvq__client *client, struct kvq__session *s,
                      const struct kvq__prefix_spec *spec, char *text)
{
    struct match match;
    if (spec->tokens == 0) // it may say what images there are all the same
        return kvq__ids_spans(s, spec->spans, spec->n_spans, text);
    int rc = find(client, s, spec, &match, text);
    if (rc < 0 || match.pages == 0)
        return rc;
    rc = adopt(s, &match);
    return rc < 0 ? kvq__fail(text, rc, "no memory for a session of %u pages", match.pages) : 0;
}

static int sketch(struct kvq__client *client, const struct kvq__session_spec *spec,
                  struct kvq__session **s, char *text)
{
    struct kvq__namespace *ns;
    int rc = kvq__spec_check(spec, text);
    if (rc == 0 && spec->n_layers == 0)
        rc = kvq__fail(text, KVQ_E_INVALID,
                       "no layers given; what a session can share depends on them");
    if (rc == 0)
        rc = kvq__namespace_get(client->core, &client->peer, spec->ns, &ns, text);
    return rc ? rc : kvq__session_build(client->core, ns, spec, s, text);
}

int kvq__prefix_lookup(struct kvq__client *client, const struct kvq__session_spec *spec,
                       uint64_t *tokens, char *text)
{
    struct kvq__session *s;
    struct match match;
    *tokens = 0;
    int rc = sketch(client, spec, &s, text);
    if (rc)
        return rc;
    rc = find(client, s, &spec->prefix, &match, text);
    if (rc == 0)
        *tokens = (uint64_t)match.pages * KVQ_BLOCK_TOKENS;
    kvq__session_free(s);
    return rc;
}

int kvq__prefix_sketch(struct kvq__client *client, const struct kvq__session_spec *spec,
                       struct kvq__session **s, struct kvq__id_source *source, uint32_t *pages,
                       char *text)
{
    *s = NULL;
    int rc = sketch(client, spec, s, text);
    if (rc)
        return rc;
    rc = identify(client, *s, &spec->prefix, source, text);
    if (rc) {
        kvq__session_free(*s);
        *s = NULL;
        return rc;
    }
    *pages = match_all(*s, source).pages;
    return 0;
}

int kvq__session_spans(struct kvq__client *client, uint64_t handle, const struct kvq__span *spans,
                       uint32_t n, char *text)
{
    struct kvq__handle *h;
    int rc = kvq__handle_get(client, handle, &h);
    if (rc < 0)
        return kvq__fail(text, rc, "handle %#llx is no open session of this client",
                         (unsigned long long)handle);
    if (h->read_only)
        return kvq__fail(text, KVQ_E_READ_ONLY,
                         "what images a session's tokens stand for its writer says");
    for (uint32_t i = 0; i < n; i++)
        if (spans[i].first < h->session->tokens)
            return kvq__fail(text, KVQ_E_POSITION,
                             "span %u begins at token %llu; the session has %llu already: tell "
                             "spans before their tokens are appended",
                             i, (unsigned long long)spans[i].first,
                             (unsigned long long)h->session->tokens);
    rc = kvq__ids_spans(h->session, spans, n, text);
    h->session->commits += rc == 0 && n > 0; // to be saved before the tokens themselves
    return rc;
}

// ---- Telling ----

// Of blocks that nobody else has.
static uint64_t idle_bytes(const struct kvq__prefixes *p)
{
    const struct kvq__node *node;
    uint64_t bytes = 0;
    for (uint32_t b = 0; b < p->n_buckets; b++)
        LIST_FOREACH (node, &p->buckets[b], link)
            for (uint32_t i = 0; i < node->n_layers; i++) {
                const struct kvq__block *block = node->pages[i].packed.block
                                                     ? node->pages[i].packed.block
                                                     : node->pages[i].raw.block;
                if (block && block->refs == 1)
                    bytes += block->extent->owner->block_bytes;
            }
    return bytes;
}

uint32_t kvq__core_prefixes(const struct kvq__core *core, const struct kvq__peer *peer,
                            struct kvq__prefix_info *out, uint32_t max)
{
    const struct kvq__namespace *ns;
    uint32_t n = 0;
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        const struct kvq__prefixes *p = &ns->prefixes;
        if (!kvq__namespace_allows(ns, peer) || (p->n_nodes == 0 && p->lookups == 0))
            continue;
        if (n < max) {
            out[n] = (struct kvq__prefix_info){.pages = p->n_nodes,
                                               .bytes = p->bytes,
                                               .idle_bytes = idle_bytes(p),
                                               .lookups = p->lookups,
                                               .hits = p->hits,
                                               .hit_tokens = p->hit_tokens,
                                               .evicted = p->evicted};
            snprintf(out[n].ns, sizeof out[n].ns, "%s", ns->name);
        }
        n++;
    }
    return n;
}
