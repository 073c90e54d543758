// SPDX-License-Identifier: Apache-2.0
//
// Prefixes that a store has: what the store is told of a session's pages. prefix_ask.c asks it.
#include <stdlib.h>
#include <string.h>

#include "daemon/core/residency/saved_internal.h"
#include "daemon/core/session/prefix.h"

// ---- What others can begin with ----

static bool is_owner(const struct kvq__saved *saved, uint32_t layer)
{
    return saved->layers[layer].row.kv_from < 0;
}

// Tokens of the layer that must stay readable, for itself and layers that read it; 0: all.
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
        if ((uint64_t)l->first_page * KVQ_BLOCK_TOKENS > kvq_kept_from(keep_of(saved, i), tokens))
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

static struct kvq__span *copy_prefix_spans(const struct kvq__save_shard *shard)
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
    struct kvq__span *spans = copy_prefix_spans(shard);
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
