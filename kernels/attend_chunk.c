// SPDX-License-Identifier: Apache-2.0
//
// One step of attention: the logits of a chunk, one softmax step, the values. Made of the entries
// of the table, so that it serves every instruction set that does not bring its own.
//
// It also says what each step should prefetch, for the kernels compute about as long on a group as
// memory needs to deliver one, and the hardware's own prefetching gives up at every record. Each
// step fetches what the same step of the next chunk will read. It is asked for a line at a time
// between the instructions of the kernels: bursts fill the queue of misses, and already bursts of
// eight lines cost a fifth of what memory delivers. The chunk ahead (512 tokens, 256 KB for
// head_dim 128 in 16 bits) fits the second level cache.
#include "kernels/internal.h"

static const uint8_t *keys_of(const struct kvq__group *g)
{
    return g->packed_tokens ? g->packed.group : (const uint8_t *)g->raw_k;
}

static const uint8_t *values_of(const struct kvq__tile *tile, const struct kvq__group *g)
{
    return g->packed_tokens ? g->packed.group + tile->codec->layout.v_codes
                            : (const uint8_t *)g->raw_v;
}

void kvq__logits_of_outliers(const struct kvq_kernels *k, const struct kvq__tile *tile,
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

// `done`: those of the packed tokens are there already.
static void logits_of_group(const struct kvq_kernels *k, const struct kvq__tile *tile,
                            const struct kvq__group *g, bool done, float *logits)
{
    if (g->packed_tokens && !done)
        kvq__qk_packed(k, tile, &g->packed, logits);
    if (g->pooled)
        kvq__logits_of_outliers(k, tile, g, logits);
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

void kvq__rescale(const struct kvq_kernels *k, const struct kvq__tile *tile, float *o)
{
    for (uint32_t r = 0; r < tile->rows; r++)
        if (tile->factor[r] != 1.0f)
            k->scale_rows(o + (size_t)r * tile->dim, &tile->factor[r], 1, tile->dim);
}

void kvq__finish_logits(const struct kvq_kernels *k, struct kvq__tile *tile,
                        const struct kvq__chunk *chunk)
{
    uint32_t n = chunk->groups * KVQ_GROUP_TOKENS;
    if (tile->cap != 0.0f)
        k->softcap(tile, n);
    for (uint32_t i = 0; i < chunk->groups; i++)
        if (chunk->group[i].held != UINT32_MAX)
            hide(tile, chunk->group[i].held, tile->logits + i * KVQ_GROUP_TOKENS);
}

void kvq__weigh(const struct kvq_kernels *k, struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    kvq__finish_logits(k, tile, chunk);
    k->softmax(tile, chunk->groups * KVQ_GROUP_TOKENS);
    kvq__rescale(k, tile, tile->o);
    if (tile->ot != tile->o)
        kvq__rescale(k, tile, tile->ot);
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

void kvq__leave_packed(const struct kvq_kernels *k, const struct kvq__tile *tile,
                       const struct kvq__group *g, float *p)
{
    if (g->packed_tokens == 0)
        return;
    for (uint32_t r = 0; r < tile->rows && g->packed_tokens < KVQ_GROUP_TOKENS; r++)
        memset(p + (size_t)r * KVQ__LOGITS_STRIDE + g->packed_tokens, 0,
               sizeof(float) * (KVQ_GROUP_TOKENS - g->packed_tokens));
    if (g->pooled)
        values_of_outliers(k, tile, g, p);
}

static void values_of_raw(const struct kvq_kernels *k, const struct kvq__tile *tile,
                          const struct kvq__group *g, float *p)
{
    if (g->raw_from < g->raw_to)
        k->pv_raw(tile, g->raw_v, g->raw_from, g->raw_to, p);
    kvq__leave_packed(k, tile, g, p);
}

static void all_logits(const struct kvq_kernels *k, struct kvq__tile *tile,
                       const struct kvq__chunk *chunk)
{
    const struct kvq__chunk *next = chunk->next;
    uint8_t kind = tile->codec->k.kind;
    bool done = k->qk_chunk[kind] && k->qk_chunk[kind](tile, chunk);
    for (uint32_t i = 0; i < chunk->groups; i++) {
        tile->ahead = next && i < next->groups ? keys_of(&next->group[i]) : NULL;
        logits_of_group(k, tile, &chunk->group[i], done, tile->logits + i * KVQ_GROUP_TOKENS);
    }
    tile->ahead = NULL;
}

static void all_values(const struct kvq_kernels *k, struct kvq__tile *tile,
                       const struct kvq__chunk *chunk)
{
    const struct kvq__chunk *next = chunk->next;
    uint8_t kind = tile->codec->v.kind;
    for (uint32_t i = 0; i < chunk->groups; i++) {
        tile->ahead = next && i < next->groups ? values_of(tile, &next->group[i]) : NULL;
        values_of_raw(k, tile, &chunk->group[i], tile->logits + i * KVQ_GROUP_TOKENS);
    }
    if (!k->pv_chunk[kind] || !k->pv_chunk[kind](tile, chunk))
        for (uint32_t i = 0; i < chunk->groups; i++) {
            tile->ahead = next && i < next->groups ? values_of(tile, &next->group[i]) : NULL;
            if (chunk->group[i].packed_tokens)
                kvq__pv_packed(k, tile, &chunk->group[i].packed,
                               tile->logits + i * KVQ_GROUP_TOKENS);
        }
    tile->ahead = NULL;
}

void kvq__attend_chunk(const struct kvq_kernels *k, struct kvq__tile *tile,
                       const struct kvq__chunk *chunk)
{
    all_logits(k, tile, chunk);
    kvq__weigh(k, tile, chunk);
    all_values(k, tile, chunk);
}
