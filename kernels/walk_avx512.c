// SPDX-License-Identifier: Apache-2.0
//
// One chunk with the memory behind it kept busy: the common steps, each preceded by prefetching.
//
// The kernels compute about as long on a group as memory needs to deliver one, so what counts is
// that both happen at once, and the hardware's own prefetching gives up at every page and record.
// The rule is one for raw and packed groups: while the logits of group i are computed, V of group i
// is fetched, and during the values of group i, K of group i of the next chunk. So everything is
// asked for one pass ahead, in small doses, and the pieces in flight (K or V of 512 tokens, 128 KB
// at most for head_dim 128 in 16 bits) fit the second level cache.
#include "kernels/walk_avx512.h"

enum {
    PIECE = 8,    // tokens of raw rows between two doses
    DISTANCE = 2, // groups; of K in a chunk that no other came before
};

// Inlined by force: gcc 12 takes a function that only prefetches for one without effects, and
// drops the calls.
KVQ__INLINE void fetch(const void *from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        _mm_prefetch((const char *)from + i, _MM_HINT_T1);
}

static const struct kvq__walk *walk_of(const struct kvq__tile *tile)
{
    return tile->scratch;
}

static uint32_t index_of(const struct kvq__tile *tile, const float *logits)
{
    return (uint32_t)(logits - tile->logits) / KVQ_GROUP_TOKENS;
}

// Piece `part` of 4 of what group i of a chunk holds as K or V.
KVQ__INLINE void fetch_k(const struct kvq__tile *tile, const struct kvq__chunk *c, uint32_t i,
                         uint32_t part, uint32_t parts)
{
    if (!c || i >= c->groups)
        return;
    const struct kvq__group *g = &c->group[i];
    uint32_t bytes = tile->codec->layout.v_codes / parts;
    if (g->packed_tokens)
        fetch(g->packed.group + part * bytes, bytes);
    bytes = KVQ_GROUP_TOKENS * tile->dim * 2 / parts;
    if (g->raw_from < g->raw_to)
        fetch((const uint8_t *)g->raw_k + part * bytes, bytes);
}

KVQ__INLINE void fetch_v(const struct kvq__tile *tile, const struct kvq__chunk *c, uint32_t i,
                         uint32_t part, uint32_t parts)
{
    const struct kvq__group *g = &c->group[i];
    const struct kvq_layout *l = &tile->codec->layout;
    uint32_t bytes = (l->group_bytes - l->v_codes) / parts;
    if (g->packed_tokens)
        fetch(g->packed.group + l->v_codes + part * bytes, bytes);
    bytes = KVQ_GROUP_TOKENS * tile->dim * 2 / parts;
    if (g->raw_from < g->raw_to)
        fetch((const uint8_t *)g->raw_v + part * bytes, bytes);
}

static void qk_packed_ahead(const struct kvq__tile *tile, const struct kvq_packed *packed,
                            float *logits)
{
    const struct kvq__walk *w = walk_of(tile);
    uint32_t i = index_of(tile, logits);
    fetch_v(tile, w->chunk, i, 0, 1);
    if (!w->ready)
        fetch_k(tile, w->chunk, i + DISTANCE, 0, 1);
    kvq__qk_packed(w->steps, tile, packed, logits);
}

static void pv_packed_ahead(const struct kvq__tile *tile, const struct kvq_packed *packed,
                            const float *p)
{
    const struct kvq__walk *w = walk_of(tile);
    fetch_k(tile, w->chunk->next, index_of(tile, p), 0, 1);
    kvq__pv_packed(w->steps, tile, packed, p);
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void qk_raw_ahead(const struct kvq__tile *tile, const uint16_t *k, uint32_t from,
                         uint32_t to, float *logits)
{
    const struct kvq__walk *w = walk_of(tile);
    uint32_t i = index_of(tile, logits), parts = KVQ_GROUP_TOKENS / PIECE;
    for (uint32_t t = from; t < to; t = (t / PIECE + 1) * PIECE) {
        fetch_v(tile, w->chunk, i, t / PIECE, parts);
        if (!w->ready)
            fetch_k(tile, w->chunk, i + DISTANCE, t / PIECE, parts);
        w->steps->qk_raw(tile, k, t, least(to, (t / PIECE + 1) * PIECE), logits);
    }
}

static void pv_raw_ahead(const struct kvq__tile *tile, const uint16_t *v, uint32_t from,
                         uint32_t to, const float *p)
{
    const struct kvq__walk *w = walk_of(tile);
    for (uint32_t t = from; t < to; t = (t / PIECE + 1) * PIECE) {
        fetch_k(tile, w->chunk->next, index_of(tile, p), t / PIECE, KVQ_GROUP_TOKENS / PIECE);
        w->steps->pv_raw(tile, v, t, least(to, (t / PIECE + 1) * PIECE), p);
    }
}

void kvq__walk_chunk(const struct kvq_kernels *steps, struct kvq__tile *tile,
                     const struct kvq__chunk *chunk)
{
    struct kvq__walk *w = tile->scratch;
    struct kvq_kernels ahead = *steps;
    ahead.qk_packed[tile->codec->k.kind] = qk_packed_ahead;
    ahead.qk_raw = qk_raw_ahead;
    ahead.pv_packed[tile->codec->v.kind] = pv_packed_ahead;
    ahead.pv_raw = pv_raw_ahead;
    // In the first chunk of an item K itself has to be asked for on the way. (The memory may hold
    // anything before that chunk; then the worst is a chunk fetched twice or not.)
    w->ready = w->announced == chunk;
    w->announced = chunk->next;
    w->steps = steps;
    w->chunk = chunk;
    kvq__attend_chunk(&ahead, tile, chunk);
}

void kvq__init_avx512_walk(struct kvq_kernels *k)
{
    k->attend_chunk = kvq__walk_chunk;
}
