// SPDX-License-Identifier: Apache-2.0
//
// Where the keys of one KV head lie: what a page table says, as chunks of groups. Rows that do not
// lie in one piece are put together here.
#include <assert.h>

#include "kernels/attend.h"

static bool is_fresh(const struct kvq_attend *a, uint64_t position)
{
    return position >= a->fresh_start && position - a->fresh_start < a->fresh_tokens;
}

static bool touches_fresh(const struct kvq_attend *a, uint64_t position)
{
    return a->fresh_tokens && position + KVQ_GROUP_TOKENS > a->fresh_start &&
           position < a->fresh_start + a->fresh_tokens;
}

static const struct kvq_page *page_of(const struct kvq_attend *a, uint64_t position)
{
    uint64_t i = position / KVQ_BLOCK_TOKENS;
    return i < a->n_pages ? &a->pages[i] : NULL;
}

// How many of the 32 positions from `at` on lie below `count`.
static uint32_t covered(uint32_t count, uint32_t at)
{
    return count <= at ? 0 : kvq__min_u32(count - at, KVQ_GROUP_TOKENS);
}

// The rows of K or V of a raw block from token `at` on, to the end of its strip.
static const uint16_t *raw_rows(const struct kvq__reader *r, const uint8_t *block, uint32_t at,
                                bool v)
{
    return (const uint16_t *)(const void *)(block + kvq_raw_at(&r->raw, r->head, at, v));
}

static void set_raw(const struct kvq__reader *r, const uint8_t *block, uint32_t at, uint32_t from,
                    uint32_t to, struct kvq__group *g)
{
    g->raw_k = raw_rows(r, block, at, false);
    g->raw_v = raw_rows(r, block, at, true);
    g->raw_from = from;
    g->raw_to = to;
}

// The first tokens: in the extras once their unit is packed. A fork's raw block may lack them then.
static void set_sink(const struct kvq__reader *r, const struct kvq_page *page, uint32_t at,
                     uint32_t held, bool packed, struct kvq__group *g)
{
    if (!packed) {
        set_raw(r, page->raw, at, 0, held, g);
        return;
    }
    g->raw_k = r->extras->sink_k + (size_t)at * r->dim;
    g->raw_v = r->extras->sink_v + (size_t)at * r->dim;
    g->raw_from = 0;
    g->raw_to = held;
}

// Which of the packed positions are outliers.
static void set_pooled(const struct kvq__reader *r, uint64_t position, struct kvq__group *g)
{
    const struct kvq_outliers *p = r->extras->pool;
    for (uint32_t i = 0; i < r->extras->pool_count; i++) {
        uint64_t t = p->position[i] - position;
        if (p->position[i] < position || t >= g->packed_tokens)
            continue;
        g->pooled |= 1u << t;
        g->pool_row[t] = (uint8_t)i;
    }
    g->pool_k = r->extras->pool_k;
    g->pool_v = r->extras->pool_v;
}

// The group at `position` as the page table has it, into an empty one. Returns false if its raw
// rows come from two places (a raw format's from both blocks of the page, sinks' from the extras
// and the raw block) and must be put together.
static bool find_group(const struct kvq__reader *r, uint64_t position, struct kvq__group *g)
{
    const struct kvq_page *page = page_of(r->a, position);
    uint32_t at = (uint32_t)(position % KVQ_BLOCK_TOKENS);
    uint32_t held = page ? covered(page->tokens, at) : 0;
    if (held == 0)
        return true;
    uint32_t packed = kvq__min_u32(covered(page->packed_tokens, at), held);
    g->held = (uint32_t)((UINT64_C(1) << held) - 1);
    if (!r->packs) {
        set_raw(r, packed ? page->packed : page->raw, at, 0, held, g);
        return packed == 0 || packed == held;
    }
    if (position < r->a->format->sink_tokens) {
        set_sink(r, page, at, held, packed > 0, g);
        return packed == 0 || packed == held;
    }
    if (packed) {
        const uint8_t *record = page->packed + (size_t)r->head * r->codec->layout.record_bytes;
        g->packed = kvq_packed_at(&r->codec->layout, (uint8_t *)record, at / KVQ_GROUP_TOKENS);
        g->packed_tokens = packed;
        set_pooled(r, position, g);
    }
    if (packed < held)
        set_raw(r, page->raw, at, packed, held, g);
    return true;
}

// Rounds one fresh token as kvq_store would have.
static void store_fresh(const struct kvq__reader *r, uint64_t position, uint16_t *k, uint16_t *v)
{
    const struct kvq_attend *a = r->a;
    struct kvq_store_counts ignored = {0};
    int64_t t = (int64_t)(position - a->fresh_start);
    const uint8_t *src_k = a->fresh_k.data, *src_v = a->fresh_v.data;
    src_k += t * a->fresh_k.token_stride + r->head * a->fresh_k.head_stride;
    src_v += t * a->fresh_v.token_stride + r->head * a->fresh_v.head_stride;
    kvq__store_row(r->k, a->shape, src_k, a->fresh_k.dtype, k, &ignored);
    kvq__store_row(r->k, a->shape, src_v, a->fresh_v.dtype, v, &ignored);
}

static void copy_raw(const struct kvq__reader *r, uint64_t position, uint16_t *k, uint16_t *v)
{
    const struct kvq_page *page = page_of(r->a, position);
    uint32_t at = (uint32_t)(position % KVQ_BLOCK_TOKENS);
    const bool packed = at < page->packed_tokens;
    const uint8_t *block = packed ? page->packed : page->raw;
    const bool sink = packed && r->packs;
    const uint16_t *from_k =
        sink ? r->extras->sink_k + (size_t)at * r->dim : raw_rows(r, block, at, false);
    const uint16_t *from_v =
        sink ? r->extras->sink_v + (size_t)at * r->dim : raw_rows(r, block, at, true);
    memcpy(k, from_k, sizeof *k * r->dim);
    memcpy(v, from_v, sizeof *v * r->dim);
}

// Puts the raw rows of a group together at k and v, each [32][dim]: fresh ones, those of either
// block of the page, and sinks. Rows that nobody holds are zero.
static void assemble(const struct kvq__reader *r, uint64_t position, uint16_t *k, uint16_t *v,
                     struct kvq__group *g)
{
    uint32_t dim = r->dim;
    g->raw_k = k;
    g->raw_v = v;
    g->raw_from = g->raw_to = g->packed_tokens;
    for (uint32_t t = g->packed_tokens; t < KVQ_GROUP_TOKENS; t++) {
        if (is_fresh(r->a, position + t)) {
            store_fresh(r, position + t, k + (size_t)t * dim, v + (size_t)t * dim);
            g->held |= 1u << t;
        } else if (g->held >> t & 1u) {
            copy_raw(r, position + t, k + (size_t)t * dim, v + (size_t)t * dim);
        } else {
            memset(k + (size_t)t * dim, 0, sizeof *k * dim);
            memset(v + (size_t)t * dim, 0, sizeof *v * dim);
        }
        if (g->held >> t & 1u)
            g->raw_to = t + 1;
    }
}

// What a group is before anything is found; assigned whole, so that no field can be forgotten. It
// has no initializer, which would make gcc 12 clear the group by rep stosq instead of copying this
// through registers: that took longer than finding the group.
static const struct kvq__group empty;

static void build_group(const struct kvq__reader *r, uint64_t position, uint16_t *k, uint16_t *v,
                        struct kvq__group *g)
{
    *g = empty;
    if (position + KVQ_GROUP_TOKENS <= r->seen_from || position >= r->seen_to)
        return;
    bool whole = find_group(r, position, g);
    if (!whole || touches_fresh(r->a, position)) {
        assert(!is_fresh(r->a, position) || g->packed_tokens == 0);
        assemble(r, position, k, v, g);
    }
}

void kvq__build_chunk(const struct kvq__reader *r, uint64_t start, uint32_t tokens,
                      struct kvq__assembled *room, struct kvq__chunk *chunk)
{
    size_t group_values = (size_t)KVQ_GROUP_TOKENS * r->dim;
    chunk->start = start;
    chunk->groups = (tokens + KVQ_GROUP_TOKENS - 1) / KVQ_GROUP_TOKENS;
    chunk->next = NULL;
    chunk->fetched = false;
    for (uint32_t i = 0; i < chunk->groups; i++)
        build_group(r, start + (uint64_t)i * KVQ_GROUP_TOKENS, room->k + i * group_values,
                    room->v + i * group_values, &chunk->group[i]);
}
