// SPDX-License-Identifier: Apache-2.0
//
// One step of attention: the logits of a chunk, one softmax step, the values. Made of the entries
// of the table, so that it serves every instruction set that does not bring its own.
#include "kernels/internal.h"

// Outliers are packed, too, but their raw rows count.
static void logits_of_outliers(const struct kvq_kernels *k, const struct kvq__tile *tile,
                               const struct kvq__group *g, float *logits)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        if (g->pooled >> t & 1u)
            k->qk_raw(tile, g->pool_k + (size_t)g->pool_row[t] * tile->dim, 0, 1, logits + t);
}

void kvq__qk_packed(const struct kvq_kernels *k, const struct kvq__tile *tile,
                    const struct kvq_packed *packed, float *logits)
{
    uint8_t kind = tile->codec->k.kind;
    if (k->qk_packed[kind]) {
        k->qk_packed[kind](tile, packed, logits);
    } else {
        k->dequant_k[kind](tile->codec, packed, tile->group_f32);
        k->dot_rows(tile, tile->qt, tile->group_f32, logits);
    }
}

static void logits_of_group(const struct kvq_kernels *k, const struct kvq__tile *tile,
                            const struct kvq__group *g, float *logits)
{
    if (g->packed_tokens)
        kvq__qk_packed(k, tile, &g->packed, logits);
    if (g->pooled)
        logits_of_outliers(k, tile, g, logits);
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

void kvq__pv_packed(const struct kvq_kernels *k, const struct kvq__tile *tile,
                    const struct kvq_packed *packed, const float *p)
{
    uint8_t kind = tile->codec->v.kind;
    if (k->pv_packed[kind]) {
        k->pv_packed[kind](tile, packed, p);
    } else {
        k->dequant_v[kind](tile->codec, packed, tile->group_f32);
        k->sum_rows(tile, p, tile->group_f32, tile->ot);
    }
}

// Outliers count with their raw rows and then no more.
static void values_of_outliers(const struct kvq_kernels *k, const struct kvq__tile *tile,
                               const struct kvq__group *g, float *p)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        if (!(g->pooled >> t & 1u))
            continue;
        k->pv_raw(tile, g->pool_v + (size_t)g->pool_row[t] * tile->dim, 0, 1, p + t);
        for (uint32_t r = 0; r < tile->rows; r++)
            p[(size_t)r * KVQ__LOGITS_STRIDE + t] = 0.0f;
    }
}

// Then a packed group is taken whole, so nothing else of it may count any more.
static void values_of_group(const struct kvq_kernels *k, const struct kvq__tile *tile,
                            const struct kvq__group *g, float *p)
{
    if (g->raw_from < g->raw_to)
        k->pv_raw(tile, g->raw_v, g->raw_from, g->raw_to, p);
    if (g->packed_tokens == 0)
        return;
    for (uint32_t r = 0; r < tile->rows && g->packed_tokens < KVQ_GROUP_TOKENS; r++)
        memset(p + (size_t)r * KVQ__LOGITS_STRIDE + g->packed_tokens, 0,
               sizeof(float) * (KVQ_GROUP_TOKENS - g->packed_tokens));
    if (g->pooled)
        values_of_outliers(k, tile, g, p);
    kvq__pv_packed(k, tile, &g->packed, p);
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
