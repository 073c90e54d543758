// SPDX-License-Identifier: Apache-2.0
//
// One step of attention: the logits of a chunk, one softmax step, the values. Made of the entries
// of the table, so that it serves every instruction set that does not bring its own.
#include "kernels/internal.h"

static void logits_of_group(const struct kvq_kernels *k, const struct kvq__tile *tile,
                            const struct kvq__group *g, float *logits)
{
    if (g->packed_tokens)
        k->qk_packed(tile, g->packed, logits);
    if (g->raw_from < g->raw_to)
        k->qk_raw(tile, g->raw_k, g->raw_from, g->raw_to, logits);
}

// What nobody holds is never seen.
static void hide(const struct kvq__tile *tile, uint32_t held, float *logits)
{
    for (uint32_t r = 0; r < tile->rows; r++)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
            if (!(held >> t & 1u))
                logits[(size_t)r * KVQ__LOGITS_STRIDE + t] = -INFINITY;
}

static void rescale(const struct kvq_kernels *k, struct kvq__tile *tile)
{
    bool changed = false;
    for (uint32_t r = 0; r < tile->rows; r++)
        changed |= tile->factor[r] != 1.0f;
    if (!changed)
        return;
    k->scale_rows(tile->o, tile->factor, tile->rows, tile->dim);
    if (tile->ot != tile->o)
        k->scale_rows(tile->ot, tile->factor, tile->rows, tile->dim);
}

// A packed group is always taken whole: what comes from raw rows must not count in it.
static void values_of_mixed(const struct kvq_kernels *k, const struct kvq__tile *tile,
                            const struct kvq__group *g, float *p)
{
    float kept[KVQ_TILE_ROWS][KVQ_GROUP_TOKENS];
    size_t n = sizeof(float) * (KVQ_GROUP_TOKENS - g->packed_tokens);
    for (uint32_t r = 0; r < tile->rows; r++) {
        float *tail = p + (size_t)r * KVQ__LOGITS_STRIDE + g->packed_tokens;
        memcpy(kept[r], tail, n);
        memset(tail, 0, n);
    }
    k->pv_packed(tile, g->packed, p);
    for (uint32_t r = 0; r < tile->rows; r++)
        memcpy(p + (size_t)r * KVQ__LOGITS_STRIDE + g->packed_tokens, kept[r], n);
    k->pv_raw(tile, g->raw_v, g->raw_from, g->raw_to, p);
}

static void values_of_group(const struct kvq_kernels *k, const struct kvq__tile *tile,
                            const struct kvq__group *g, float *p)
{
    bool raw = g->raw_from < g->raw_to;
    if (g->packed_tokens && raw)
        values_of_mixed(k, tile, g, p);
    else if (g->packed_tokens)
        k->pv_packed(tile, g->packed, p);
    else if (raw)
        k->pv_raw(tile, g->raw_v, g->raw_from, g->raw_to, p);
}

void kvq__attend_chunk(const struct kvq_kernels *k, struct kvq__tile *tile,
                       const struct kvq__chunk *chunk)
{
    uint32_t n = chunk->groups * KVQ_GROUP_TOKENS;
    for (uint32_t i = 0; i < chunk->groups; i++)
        logits_of_group(k, tile, &chunk->group[i], tile->logits + i * KVQ_GROUP_TOKENS);
    if (tile->cap != 0.0f)
        k->softcap(tile, n);
    for (uint32_t i = 0; i < chunk->groups; i++)
        if (chunk->group[i].held != UINT32_MAX)
            hide(tile, chunk->group[i].held, tile->logits + i * KVQ_GROUP_TOKENS);
    k->softmax(tile, n);
    rescale(k, tile);
    for (uint32_t i = 0; i < chunk->groups; i++)
        values_of_group(k, tile, &chunk->group[i], tile->logits + i * KVQ_GROUP_TOKENS);
}
