// SPDX-License-Identifier: Apache-2.0
//
// How much of a prompt is there: in the index, and by what hashes a store knows it. An ask is made
// of a session as it is wanted; its pages' hashes, which are most of the work, can be computed on
// any thread; the index is then looked at in pieces, for a prompt may have thousands of pages, and
// the poller has others to serve meanwhile.
#include <assert.h>
#include <string.h>

#include "daemon/core/session/group.h"
#include "daemon/core/session/open.h"
#include "daemon/core/session/prefix.h"
#include "daemon/core/session/prefix_ask.h"
#include "daemon/core/state.h"

enum { PIECE_PAGES = 8 }; // looked at in the index between two turns of the poller

// ---- The client's ids ----

static int open_source(struct kvq__client *client, const struct kvq__prefix_spec *spec,
                       struct kvq__prefix_ask *ask, char *text)
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
    ask->ids = b->memory.host + spec->offset;
    ask->pages = (uint32_t)(spec->tokens / KVQ_BLOCK_TOKENS);
    return 0;
}

// They stay where the client can change them at any time: a page is copied, then looked at.
static void copy_token_ids(const struct kvq__prefix_ask *ask, uint32_t page, int32_t *ids)
{
    const volatile int32_t *from = (const volatile int32_t *)(const volatile void *)ask->ids;
    assert(page < ask->pages);
    for (uint32_t t = 0; t < KVQ_BLOCK_TOKENS; t++)
        ids[t] = from[(size_t)page * KVQ_BLOCK_TOKENS + t];
}

// ---- Making one ----

static size_t chains_bytes(const struct kvq__prefix_ask *ask)
{
    return ask->pages * sizeof *ask->spaces[0].chains;
}

// Memory for the hashes is had here, where it can be counted for who asks, and not by the thread
// that computes them.
static int add_space(struct kvq__prefix_ask *ask, struct kvq__namespace *ns)
{
    struct kvq__prefix_space *space = &ask->spaces[ask->n_spaces];
    int rc = 0;
    assert(ask->n_spaces <= KVQ_MAX_NAMESPACES);
    space->chains = ask->pages ? kvq__ns_allocate(ask->like->ns, chains_bytes(ask), &rc) : NULL;
    if (rc < 0)
        return rc;
    ask->n_spaces++;
    space->ns = ns;
    space->name = ns->name;
    kvq__prefix_root(ask->like, ns->name, space->root);
    return 0;
}

static int add_spaces(struct kvq__prefix_ask *ask, char *text)
{
    const struct kvq__session *s = ask->like;
    struct kvq__namespace *ns;
    int rc = add_space(ask, s->ns);
    TAILQ_FOREACH (ns, &s->core->namespaces, link)
        if (rc == 0 && ns != s->ns && kvq__namespace_shares(ns, s->ns->name) &&
            ask->n_spaces <= KVQ_MAX_NAMESPACES)
            rc = add_space(ask, ns);
    return rc < 0 ? kvq__ns_refused(s->ns, rc, "the hashes of a prefix", text) : 0;
}

static void ask_free(struct kvq__prefix_ask *ask)
{
    for (uint32_t i = 0; i < ask->n_spaces; i++)
        kvq__ns_deallocate(ask->like->ns, ask->spaces[i].chains, chains_bytes(ask));
    kvq__deallocate(ask->core, ask, sizeof *ask);
}

static int make_ask(struct kvq__client *client, struct kvq__session *like,
                    const struct kvq__prefix_spec *spec, struct kvq__prefix_ask **out, char *text)
{
    struct kvq__prefix_ask *ask = kvq__allocate(like->core, sizeof *ask);
    *out = NULL;
    if (!ask)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory to look for a prefix");
    ask->core = like->core;
    ask->like = like;
    ask->ns = like->ns->name;
    ask->place = kvq__pool_name(like->pool);
    int rc = open_source(client, spec, ask, text);
    rc = rc ? rc : kvq__ids_spans(like, spec->spans, spec->n_spans, text);
    rc = rc ? rc : kvq__ids_identify(like, text);
    rc = rc ? rc : add_spaces(ask, text);
    if (rc < 0) {
        ask_free(ask);
        return rc;
    }
    *out = ask;
    return 0;
}

// A session as it is wanted, to be looked at and freed.
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
    return rc ? rc : kvq__session_build(ns, spec, s, text);
}

static int ask_like_sketch(struct kvq__client *client, const struct kvq__session_spec *spec,
                           struct kvq__prefix_ask **ask, char *text)
{
    struct kvq__session *s;
    *ask = NULL;
    int rc = sketch(client, spec, &s, text);
    if (rc)
        return rc;
    rc = make_ask(client, s, &spec->prefix, ask, text);
    if (rc)
        kvq__session_free(s);
    else
        (*ask)->own = true;
    return rc;
}

static bool has_page(struct kvq__client *client, const struct kvq__session_spec *spec)
{
    struct kvq__namespace *ns;
    char text[KVQ_TEXT_BYTES];
    if (!spec->name || !spec->name[0] ||
        kvq__namespace_get(client->core, &client->peer, spec->ns, &ns, text) != 0)
        return false;
    const struct kvq__session *first = kvq__session_named(ns, spec->name);
    return first && kvq__group_member(first, spec->shard);
}

int kvq__prefix_ask(struct kvq__client *client, const struct kvq__session_spec *spec,
                    struct kvq__prefix_ask **ask, char *text)
{
    *ask = NULL;
    if (spec->prefix.tokens < KVQ_BLOCK_TOKENS ||
        (spec->flags & (KVQ__OPEN_MUST_EXIST | KVQ__OPEN_READ_ONLY)) || has_page(client, spec))
        return 0;
    return ask_like_sketch(client, spec, ask, text);
}

void kvq__prefix_ask_end(struct kvq__prefix_ask **pointer)
{
    struct kvq__prefix_ask *ask = *pointer;
    *pointer = NULL;
    if (!ask)
        return;
    struct kvq__session *like = ask->own ? ask->like : NULL;
    ask_free(ask);
    if (like)
        kvq__session_free(like);
}

// ---- Hashes ----

static void hash_space(struct kvq__prefix_ask *ask, struct kvq__prefix_space *space)
{
    const struct kvq__ids *like = &ask->like->ids;
    uint8_t chain[KVQ__HASH_BYTES];
    int32_t ids[KVQ_BLOCK_TOKENS];
    memcpy(chain, space->root, sizeof chain);
    for (uint32_t i = 0; i < ask->pages; i++) {
        copy_token_ids(ask, i, ids);
        kvq__prefix_chain(ask->core, chain, ids, like->spans, like->n_spans, i);
        memcpy(space->chains[i], chain, sizeof chain);
    }
}

void kvq__prefix_ask_hash(struct kvq__prefix_ask *ask)
{
    for (uint32_t i = 0; i < ask->n_spaces; i++)
        hash_space(ask, &ask->spaces[i]);
}

bool kvq__prefix_ask_same(const struct kvq__prefix_ask *a, const struct kvq__prefix_ask *b,
                          uint32_t pages)
{
    assert(a->n_spaces > 0 && b->n_spaces > 0);
    return pages > 0 && pages <= a->pages && pages <= b->pages && a->like->pool == b->like->pool &&
           a->like->shard == b->like->shard &&
           memcmp(a->like->ids.layers, b->like->ids.layers, KVQ__HASH_BYTES) == 0 &&
           memcmp(a->spaces[0].chains[pages - 1], b->spaces[0].chains[pages - 1],
                  KVQ__HASH_BYTES) == 0;
}

void kvq__prefix_ask_stored(const struct kvq__prefix_ask *ask, uint32_t space,
                            uint8_t (*hashes)[32])
{
    const struct kvq__session *like = ask->like;
    assert(space < ask->n_spaces);
    for (uint32_t i = 0; i < ask->pages; i++)
        kvq__prefix_stored(ask->core, ask->spaces[space].chains[i], like->ids.layers, like->shard,
                           hashes[i]);
}

// ---- Looking at the index ----

static void run_on(struct kvq__prefix_ask *ask, const struct kvq__node *node)
{
    assert(node->n_layers <= KVQ_MAX_LAYERS);
    for (uint32_t i = 0; i < node->n_layers; i++)
        if (!node->pages[i].packed.block && !node->pages[i].raw.block)
            ask->since[i] = node->page + 1;
}

// Whether a session can begin with so many tokens: each layer has what can still be seen.
static bool suffices(const struct kvq__prefix_ask *ask, uint64_t tokens)
{
    const struct kvq__session *s = ask->like;
    uint32_t at = 0;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i) &&
            (uint64_t)ask->since[at++] * KVQ_BLOCK_TOKENS > kvq__first_kept(&s->layers[i], tokens))
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

static struct kvq__node *node_of(const struct kvq__prefix_ask *ask, uint32_t space, uint32_t page)
{
    const struct kvq__session *like = ask->like;
    assert(space < ask->n_spaces && page < ask->pages);
    return kvq__prefix_find(&ask->spaces[space].ns->prefixes, ask->spaces[space].chains[page],
                            like->ids.layers, like->shard, like->pool);
}

// Looks at the next page of the namespace that is being looked at. False if it has no more.
static bool match_page(struct kvq__prefix_ask *ask, const struct kvq__node **before)
{
    const struct kvq__prefix_space *space = &ask->spaces[ask->at];
    uint32_t page = ask->at_page;
    int32_t ids[KVQ_BLOCK_TOKENS];
    assert(ask->at < ask->n_spaces && page <= ask->pages);
    if (page == ask->pages)
        return false;
    const struct kvq__node *node = node_of(ask, ask->at, page);
    if (!node || node->parent != *before)
        return false;
    copy_token_ids(ask, page, ids);
    if (memcmp(node->ids, ids, sizeof ids) != 0 ||
        (page >= ask->stored && !all_shards(ask->like, &space->ns->prefixes, space->chains[page])))
        return false;
    run_on(ask, node);
    if (page + 1 > ask->here && suffices(ask, ((uint64_t)page + 1) * KVQ_BLOCK_TOKENS)) {
        ask->best = ask->at;
        ask->here = page + 1;
    }
    *before = node;
    ask->at_page++;
    return true;
}

// Pages may have been given up since the last piece: the one before is looked for anew.
static bool match_piece(struct kvq__prefix_ask *ask)
{
    const struct kvq__node *before = NULL;
    if (ask->at_page == 0)
        kvq__prefix_seal_all(ask->like->core);
    else if (!(before = node_of(ask, ask->at, ask->at_page - 1)))
        return false;
    for (uint32_t n = 0; n < PIECE_PAGES; n++)
        if (!match_page(ask, &before))
            return false;
    return true;
}

bool kvq__prefix_ask_match(struct kvq__prefix_ask *ask)
{
    assert(ask->at <= ask->n_spaces && ask->here <= ask->pages);
    if (ask->at < ask->n_spaces && !match_piece(ask)) {
        ask->at++;
        ask->at_page = 0;
        memset(ask->since, 0, sizeof ask->since);
    }
    return ask->at == ask->n_spaces;
}

void kvq__prefix_ask_again(struct kvq__prefix_ask *ask, uint32_t stored)
{
    assert(stored <= ask->pages);
    ask->at = ask->at_page = ask->here = ask->best = 0;
    ask->stored = stored;
    memset(ask->since, 0, sizeof ask->since);
}

struct kvq__node *kvq__prefix_ask_found(const struct kvq__prefix_ask *ask,
                                        const struct kvq__session *s)
{
    if (ask->here == 0 || s->pool != ask->like->pool || s->shard != ask->like->shard ||
        memcmp(s->ids.layers, ask->like->ids.layers, sizeof s->ids.layers) != 0)
        return NULL;
    return node_of(ask, ask->best, ask->here - 1);
}

static void answer_now(struct kvq__prefix_ask *ask)
{
    kvq__prefix_ask_hash(ask);
    while (!kvq__prefix_ask_match(ask))
        continue;
}

int kvq__prefix_ask_now(struct kvq__client *client, struct kvq__session *s,
                        const struct kvq__prefix_spec *spec, struct kvq__prefix_ask **ask,
                        char *text)
{
    int rc = make_ask(client, s, spec, ask, text);
    if (rc == 0)
        answer_now(*ask);
    return rc;
}

int kvq__prefix_lookup(struct kvq__client *client, const struct kvq__session_spec *spec,
                       uint64_t *tokens, char *text)
{
    struct kvq__prefix_ask *own = NULL;
    const struct kvq__prefix_ask *ask = spec->prefix.ask;
    *tokens = 0;
    if (!ask) {
        int rc = ask_like_sketch(client, spec, &own, text);
        if (rc < 0)
            return rc;
        answer_now(own);
        ask = own;
    }
    struct kvq__prefixes *p = &ask->like->ns->prefixes;
    p->lookups++;
    p->hits += ask->here > 0;
    *tokens = (uint64_t)ask->here * KVQ_BLOCK_TOKENS;
    kvq__prefix_ask_end(&own);
    return 0;
}
