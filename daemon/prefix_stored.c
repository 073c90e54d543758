// SPDX-License-Identifier: Apache-2.0
//
// Prefixes that a store has: what it is told of a session's pages, and what a client's ask is when
// put to it. What it answers is a hint: blocks are shared only once the index has them, where ids
// are compared.
#include <stdlib.h>
#include <string.h>

#include "daemon/group.h"
#include "daemon/prefix.h"
#include "daemon/saved_internal.h"

// ---- What others can begin with ----

static bool is_owner(const struct kvq__saved *saved, uint32_t layer)
{
    return saved->layers[layer].row.kv_from < 0;
}

// Tokens that must stay readable of the layer's pages, for itself and those that read them; 0: all.
static uint32_t keep_of(const struct kvq__saved *saved, uint32_t layer)
{
    uint32_t keep = saved->layers[layer].row.window;
    for (uint32_t i = 0; i < saved->n_layers && keep; i++) {
        const struct kvq__layer_row *row = &saved->layers[i].row;
        if (row->kv_from == (int32_t)layer)
            keep = row->window == 0 || row->window > keep ? row->window : keep;
    }
    return keep;
}

bool kvq__saved_can_begin(const struct kvq__saved *saved, uint64_t tokens)
{
    if (tokens > saved->known || tokens > saved->floor || tokens > saved->tokens)
        return false;
    for (uint32_t i = 0; i < saved->n_layers; i++) {
        const struct kvq__saved_layer *l = &saved->layers[i];
        if (!is_owner(saved, i))
            continue;
        if (!kvq_is_raw(&l->format) && l->packed < tokens)
            return false;
        if ((uint64_t)l->first_page * KVQ_BLOCK_TOKENS > kvq__kept_from(keep_of(saved, i), tokens))
            return false;
    }
    return true;
}

// ---- What a store is told ----

// Pages that cannot change any more, whether or not a window still has the first ones.
static uint32_t final_pages(const struct kvq__saved *saved)
{
    uint64_t final = saved->known < saved->floor ? saved->known : saved->floor;
    for (uint32_t i = 0; i < saved->n_layers; i++) {
        const struct kvq__saved_layer *l = &saved->layers[i];
        if (is_owner(saved, i) && !kvq_is_raw(&l->format) && l->packed < final)
            final = l->packed;
    }
    return (uint32_t)(final / KVQ_BLOCK_TOKENS);
}

static struct kvq__span *copy_spans(const struct kvq__save_shard *shard)
{
    struct kvq__span *spans = calloc(shard->saved.n_spans + 1, sizeof *spans);
    for (uint32_t i = 0; spans && i < shard->saved.n_spans; i++) {
        spans[i].first = shard->spans[i].first;
        spans[i].tokens = shard->spans[i].tokens;
        memcpy(spans[i].digest, shard->spans[i].digest, sizeof spans[i].digest);
    }
    return spans;
}

int kvq__save_prefixes(const struct kvq__save *save, uint32_t n,
                       int (*each)(void *context, const uint8_t hash[32]), void *context)
{
    const struct kvq__save_shard *shard = &save->shards[n];
    uint32_t pages = shard->shares ? final_pages(&shard->saved) : 0;
    uint8_t chain[KVQ__HASH_BYTES], hash[KVQ__HASH_BYTES];
    struct kvq__span *spans = copy_spans(shard);
    int rc = spans ? 0 : KVQ_E_NO_MEMORY;
    memcpy(chain, shard->root, sizeof chain);
    for (uint32_t i = 0; i < pages && rc == 0; i++) {
        kvq__prefix_chain(save->core, chain, shard->ids + (size_t)i * KVQ_BLOCK_TOKENS, spans,
                          shard->saved.n_spans, i);
        kvq__prefix_stored(save->core, chain, shard->layers, shard->saved.shard, hash);
        rc = each(context, hash);
    }
    free(spans);
    return rc;
}

// ---- What it is asked ----

static bool is_there(const struct kvq__session *like, const char *name)
{
    const struct kvq__session *first = name && name[0] ? kvq__session_named(like->ns, name) : NULL;
    return first && kvq__group_member(first, like->shard);
}

static void add_space(struct kvq__prefix_ask *ask, const struct kvq__session *s,
                      const struct kvq__namespace *ns)
{
    struct kvq__prefix_space *space = &ask->spaces[ask->n_spaces++];
    space->name = ns->name;
    kvq__prefix_root(s, ns->name, space->root);
}

static void add_spaces(struct kvq__prefix_ask *ask, const struct kvq__session *s)
{
    const struct kvq__namespace *ns;
    add_space(ask, s, s->ns);
    TAILQ_FOREACH (ns, &s->core->namespaces, link)
        if (ns != s->ns && kvq__namespace_shares(ns, s->ns->name) &&
            ask->n_spaces <= KVQ_MAX_NAMESPACES)
            add_space(ask, s, ns);
}

static struct kvq__prefix_ask *make_ask(struct kvq__session *s, const struct kvq__id_source *source,
                                        uint32_t here)
{
    struct kvq__prefix_ask *ask = kvq__allocate(s->core, sizeof *ask);
    if (!ask)
        return NULL;
    *ask = (struct kvq__prefix_ask){.core = s->core,
                                    .ids = source->at,
                                    .pages = source->pages,
                                    .here = here,
                                    .shard = s->shard,
                                    .shards = s->shards,
                                    .ns = s->ns->name,
                                    .place = kvq__pool_name(s->pool),
                                    .spans = s->ids.spans, // the sketch's, that ends
                                    .n_spans = s->ids.n_spans};
    s->ids.spans = NULL;
    s->ids.n_spans = 0;
    memcpy(ask->layers, s->ids.layers, sizeof ask->layers);
    add_spaces(ask, s);
    return ask;
}

int kvq__prefix_ask(struct kvq__client *client, const struct kvq__session_spec *spec,
                    struct kvq__prefix_ask **ask, char *text)
{
    struct kvq__session *s;
    struct kvq__id_source source;
    uint32_t here;
    *ask = NULL;
    if (spec->prefix.tokens < KVQ_BLOCK_TOKENS ||
        (spec->flags & (KVQ__OPEN_MUST_EXIST | KVQ__OPEN_READ_ONLY)))
        return 0;
    int rc = kvq__prefix_sketch(client, spec, &s, &source, &here, text);
    if (rc < 0)
        return rc;
    if (here < source.pages && !is_there(s, spec->name))
        *ask = make_ask(s, &source, here); // or it goes on without
    kvq__session_free(s);
    return 0;
}

void kvq__prefix_ask_end(struct kvq__prefix_ask **pointer)
{
    struct kvq__prefix_ask *ask = *pointer;
    *pointer = NULL;
    if (!ask)
        return;
    kvq__deallocate(ask->core, ask->spans, ask->n_spans * sizeof *ask->spans);
    kvq__deallocate(ask->core, ask, sizeof *ask);
}

void kvq__prefix_ask_hashes(const struct kvq__prefix_ask *ask, uint32_t space,
                            uint8_t (*hashes)[32])
{
    const struct kvq__id_source source = {.at = ask->ids, .pages = ask->pages};
    uint8_t chain[KVQ__HASH_BYTES];
    int32_t ids[KVQ_BLOCK_TOKENS];
    memcpy(chain, ask->spaces[space].root, sizeof chain);
    for (uint32_t i = 0; i < ask->pages; i++) {
        kvq__ids_copy(&source, i, ids);
        kvq__prefix_chain(ask->core, chain, ids, ask->spans, ask->n_spans, i);
        kvq__prefix_stored(ask->core, chain, ask->layers, ask->shard, hashes[i]);
    }
}
