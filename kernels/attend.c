// SPDX-License-Identifier: Apache-2.0
//
// Decode attention: how the keys of a session fall into splits, chunks and groups, what each
// query sees of them, and how partial results become one. Knows no instruction set.
#include <assert.h>

#include "kernels/internal.h"

// The sums of one tile, wherever they lie: in the workspace or among the partials.
struct sums {
    float *m, *l, *o, *ot; // as in struct kvq__tile
};

// One item of work: a tile of query rows of one KV head.
struct item {
    const struct kvq_kernels *k;
    const struct kvq_attend *a;
    const struct kvq_attend_plan *plan;
    struct kvq__workspace *w;
    struct kvq__codec codec;
    struct kvq__extras extras;
    struct kvq_layout raw;
    uint32_t head, gqa;
    uint32_t first_token, tokens; // query tokens of the tile
    uint32_t rows, dim;
    bool packs, rotated;         // rotated: ot is apart from o and must be rotated back
    uint64_t seen_from, seen_to; // what any row of the tile sees lies in between
    struct kvq__tile tile;
};

// ---- The plan ----

static uint64_t total_tokens(const struct kvq_attend *a)
{
    return a->past_tokens + a->step_tokens;
}

// About 16 splits or more: enough for threads, few enough that merging costs nothing.
static uint32_t split_tokens_of(uint64_t total)
{
    uint32_t split = KVQ_SPLIT_MIN;
    while (split < KVQ_SPLIT_MAX && (uint64_t)split * 32 <= total)
        split *= 2;
    return split;
}

static uint32_t gqa_of(const struct kvq_shape *s)
{
    return (uint32_t)s->q_heads / s->kv_heads;
}

static uint32_t tokens_per_tile(const struct kvq_shape *s)
{
    return KVQ_TILE_ROWS / gqa_of(s);
}

// Whether packed values have sums of their own, to be rotated back at the end.
static bool is_rotated(const struct kvq_attend *a)
{
    return kvq__v_rotation(a->format, a->shape) != KVQ_ROTATE_NONE;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t largest_tile_rows(const struct kvq_attend *a)
{
    return min_u32(a->q_tokens, tokens_per_tile(a->shape)) * gqa_of(a->shape);
}

// Floats of m (or l) of one partial; keeps what follows aligned to 64 bytes.
static size_t state_floats(const struct kvq_attend *a)
{
    return (largest_tile_rows(a) + 15u) & ~15u;
}

static size_t partial_floats(const struct kvq_attend *a)
{
    size_t o = (size_t)largest_tile_rows(a) * a->shape->v_dim;
    return 2 * state_floats(a) + o * (is_rotated(a) ? 2 : 1);
}

void kvq_attend_plan(const struct kvq_attend *a, bool parallel, struct kvq_attend_plan *plan)
{
    uint64_t total = total_tokens(a);
    uint32_t per_tile = tokens_per_tile(a->shape);
    assert(a->q_tokens > 0 && a->q_tokens <= KVQ_MAX_QUERY_TOKENS);
    plan->split_tokens = split_tokens_of(total);
    plan->n_splits = (uint32_t)((total + plan->split_tokens - 1) / plan->split_tokens);
    if (plan->n_splits == 0)
        plan->n_splits = 1;
    plan->n_tiles = (a->q_tokens + per_tile - 1) / per_tile;
    plan->parallel = parallel && plan->n_splits > 1;
    plan->items = a->shape->kv_heads * plan->n_tiles * (plan->parallel ? plan->n_splits : 1);
    plan->partial_bytes = plan->parallel ? plan->items * partial_floats(a) * sizeof(float) : 0;
}

// ---- What is seen ----

// Query token i sees the positions [*lo, *hi).
static void visible(const struct kvq_attend *a, uint32_t i, uint64_t *lo, uint64_t *hi)
{
    uint64_t position = a->q_start + i, total = total_tokens(a);
    uint64_t window = a->shape->window;
    *lo = window && position + 1 > window ? position + 1 - window : 0;
    *hi = a->flags & KVQ_ATTEND_PAST_ONLY ? a->past_tokens : position + 1;
    if (*hi > total)
        *hi = total;
    if (*lo > *hi)
        *lo = *hi;
}

static void find_seen(struct item *it)
{
    uint64_t lo, hi;
    visible(it->a, it->first_token, &it->seen_from, &it->seen_to);
    for (uint32_t i = 1; i < it->tokens; i++) {
        visible(it->a, it->first_token + i, &lo, &hi);
        it->seen_from = lo < it->seen_from ? lo : it->seen_from;
        it->seen_to = hi > it->seen_to ? hi : it->seen_to;
    }
}

static int32_t within(uint64_t position, uint64_t start, uint32_t n)
{
    if (position <= start)
        return 0;
    return position - start < n ? (int32_t)(position - start) : (int32_t)n;
}

static void set_ranges(struct item *it, const struct kvq__chunk *chunk)
{
    uint64_t lo, hi;
    for (uint32_t r = 0; r < it->rows; r++) {
        visible(it->a, it->first_token + r / it->gqa, &lo, &hi);
        it->tile.lo[r] = within(lo, chunk->start, chunk->groups * KVQ_GROUP_TOKENS);
        it->tile.hi[r] = within(hi, chunk->start, chunk->groups * KVQ_GROUP_TOKENS);
    }
}

// ---- Where keys lie ----

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
    return count <= at ? 0 : min_u32(count - at, KVQ_GROUP_TOKENS);
}

// The raw rows (K or V) of a block of raw records from token `at` on.
static const uint16_t *raw_rows(const struct item *it, const uint8_t *block, uint32_t at, bool v)
{
    const uint8_t *record = block + (size_t)it->head * it->raw.record_bytes;
    record += v ? it->raw.v_offset : 0;
    return (const uint16_t *)(const void *)record + (size_t)at * it->dim;
}

static void set_raw(const struct item *it, const uint8_t *block, uint32_t at, uint32_t from,
                    uint32_t to, struct kvq__group *g)
{
    g->raw_k = raw_rows(it, block, at, false);
    g->raw_v = raw_rows(it, block, at, true);
    g->raw_from = from;
    g->raw_to = to;
}

// The first tokens: in the raw block as long as there is one.
static void set_sink(const struct item *it, const struct kvq_page *page, uint32_t at, uint32_t held,
                     struct kvq__group *g)
{
    if (page->raw) {
        set_raw(it, page->raw, at, 0, held, g);
        return;
    }
    g->raw_k = it->extras.sink_k + (size_t)at * it->dim;
    g->raw_v = it->extras.sink_v + (size_t)at * it->dim;
    g->raw_from = 0;
    g->raw_to = held;
}

// Which of the packed positions are outliers.
static void set_pooled(const struct item *it, uint64_t position, struct kvq__group *g)
{
    const struct kvq_outliers *p = it->extras.pool;
    for (uint32_t i = 0; i < it->extras.pool_count; i++) {
        uint64_t t = p->position[i] - position;
        if (p->position[i] < position || t >= g->packed_tokens)
            continue;
        g->pooled |= 1u << t;
        g->pool_row[t] = (uint8_t)i;
    }
    g->pool_k = it->extras.pool_k;
    g->pool_v = it->extras.pool_v;
}

// The group at `position` as the page table has it. Returns false if a raw format's rows come
// from both blocks of the page and must be put together.
static bool find_group(const struct item *it, uint64_t position, struct kvq__group *g)
{
    const struct kvq_page *page = page_of(it->a, position);
    uint32_t at = (uint32_t)(position % KVQ_BLOCK_TOKENS);
    uint32_t held = page ? covered(page->tokens, at) : 0;
    *g = (struct kvq__group){0};
    if (held == 0)
        return true;
    uint32_t packed = min_u32(covered(page->packed_tokens, at), held);
    g->held = (uint32_t)((UINT64_C(1) << held) - 1);
    if (!it->packs) {
        set_raw(it, packed ? page->packed : page->raw, at, 0, held, g);
        return packed == 0 || packed == held;
    }
    if (position < it->a->format->sink_tokens) {
        set_sink(it, page, at, held, g);
        return true;
    }
    if (packed) {
        const uint8_t *record = page->packed + (size_t)it->head * it->codec.layout.record_bytes;
        g->packed = kvq_packed_at(&it->codec.layout, (uint8_t *)record, at / KVQ_GROUP_TOKENS);
        g->packed_tokens = packed;
        set_pooled(it, position, g);
    }
    if (packed < held)
        set_raw(it, page->raw, at, packed, held, g);
    return true;
}

// Rounds one fresh token as kvq_store would have.
static void store_fresh(const struct item *it, uint64_t position, uint16_t *k, uint16_t *v)
{
    const struct kvq_attend *a = it->a;
    struct kvq_store_counts ignored = {0};
    int64_t t = (int64_t)(position - a->fresh_start);
    const uint8_t *src_k = a->fresh_k.data, *src_v = a->fresh_v.data;
    src_k += t * a->fresh_k.token_stride + it->head * a->fresh_k.head_stride;
    src_v += t * a->fresh_v.token_stride + it->head * a->fresh_v.head_stride;
    it->k->store(src_k, a->fresh_k.dtype, k, it->codec.raw_dtype, it->dim, &ignored);
    it->k->store(src_v, a->fresh_v.dtype, v, it->codec.raw_dtype, it->dim, &ignored);
}

static void copy_raw(const struct item *it, uint64_t position, uint16_t *k, uint16_t *v)
{
    const struct kvq_page *page = page_of(it->a, position);
    uint32_t at = (uint32_t)(position % KVQ_BLOCK_TOKENS);
    const uint8_t *block = at < page->packed_tokens ? page->packed : page->raw;
    memcpy(k, raw_rows(it, block, at, false), sizeof *k * it->dim);
    memcpy(v, raw_rows(it, block, at, true), sizeof *v * it->dim);
}

// Puts the raw rows of a group together at k and v, each [32][dim]: fresh ones, and those of
// either block of the page. Rows that nobody holds are zero.
static void assemble(const struct item *it, uint64_t position, uint16_t *k, uint16_t *v,
                     struct kvq__group *g)
{
    uint32_t dim = it->dim;
    g->raw_k = k;
    g->raw_v = v;
    g->raw_from = g->raw_to = g->packed_tokens;
    for (uint32_t t = g->packed_tokens; t < KVQ_GROUP_TOKENS; t++) {
        if (is_fresh(it->a, position + t)) {
            store_fresh(it, position + t, k + (size_t)t * dim, v + (size_t)t * dim);
            g->held |= 1u << t;
        } else if (g->held >> t & 1u) {
            copy_raw(it, position + t, k + (size_t)t * dim, v + (size_t)t * dim);
        } else {
            memset(k + (size_t)t * dim, 0, sizeof *k * dim);
            memset(v + (size_t)t * dim, 0, sizeof *v * dim);
        }
        if (g->held >> t & 1u)
            g->raw_to = t + 1;
    }
}

static void build_group(const struct item *it, uint64_t position, uint16_t *k, uint16_t *v,
                        struct kvq__group *g)
{
    *g = (struct kvq__group){0};
    if (position + KVQ_GROUP_TOKENS <= it->seen_from || position >= it->seen_to)
        return;
    bool whole = find_group(it, position, g);
    if (!whole || touches_fresh(it->a, position)) {
        assert(!is_fresh(it->a, position) || g->packed_tokens == 0);
        assemble(it, position, k, v, g);
    }
}

// The chunk of [start, end), or of its first `step` positions if it is longer.
static void build_chunk(const struct item *it, uint64_t start, uint64_t end, uint32_t step,
                        struct kvq__assembled *room, struct kvq__chunk *chunk)
{
    size_t group_values = (size_t)KVQ_GROUP_TOKENS * it->dim;
    uint32_t n = end - start < step ? (uint32_t)(end - start) : step;
    chunk->start = start;
    chunk->groups = (n + KVQ_GROUP_TOKENS - 1) / KVQ_GROUP_TOKENS;
    chunk->next = NULL;
    for (uint32_t i = 0; i < chunk->groups; i++)
        build_group(it, start + (uint64_t)i * KVQ_GROUP_TOKENS, room->k + i * group_values,
                    room->v + i * group_values, &chunk->group[i]);
}

// ---- Sums ----

static struct sums sums_in(struct kvq__sums *s, bool rotated)
{
    return (struct sums){s->m, s->l, s->o, rotated ? s->ot : s->o};
}

static struct sums sums_of_partial(const struct kvq_attend *a, void *partials, uint32_t index)
{
    float *m = (float *)partials + index * partial_floats(a);
    size_t n = state_floats(a), o = (size_t)largest_tile_rows(a) * a->shape->v_dim;
    return (struct sums){m, m + n, m + 2 * n, m + 2 * n + (is_rotated(a) ? o : 0)};
}

static void clear_sums(const struct item *it, const struct sums *s)
{
    size_t n = (size_t)it->rows * it->dim;
    for (uint32_t r = 0; r < it->rows; r++) {
        s->m[r] = -INFINITY;
        s->l[r] = 0.0f;
    }
    memset(s->o, 0, n * sizeof(float));
    if (s->ot != s->o)
        memset(s->ot, 0, n * sizeof(float));
}

static bool is_empty(const struct item *it, const struct sums *s)
{
    for (uint32_t r = 0; r < it->rows; r++)
        if (s->m[r] != -INFINITY)
            return false;
    return true;
}

// Adds a split to what came before it. Every plan merges with this function, in ascending order.
static void merge_sums(const struct item *it, const struct sums *total, const struct sums *part)
{
    float *fa = it->w->factor, *fb = it->w->other_factor;
    if (is_empty(it, part))
        return;
    for (uint32_t r = 0; r < it->rows; r++) {
        float m = total->m[r] > part->m[r] ? total->m[r] : part->m[r];
        fa[r] = m == -INFINITY ? 1.0f : kvq__exp2(total->m[r] - m);
        fb[r] = m == -INFINITY ? 0.0f : kvq__exp2(part->m[r] - m);
        total->m[r] = m;
        total->l[r] = total->l[r] * fa[r] + part->l[r] * fb[r];
    }
    it->k->blend_rows(total->o, fa, part->o, fb, it->rows, it->dim);
    if (it->rotated)
        it->k->blend_rows(total->ot, fa, part->ot, fb, it->rows, it->dim);
}

// ---- One item ----

static struct item item_of(const struct kvq_kernels *k, const struct kvq_attend *a,
                           const struct kvq_attend_plan *plan, uint32_t index, void *workspace)
{
    struct item it = {.k = k, .a = a, .plan = plan, .w = workspace};
    uint32_t per_tile = tokens_per_tile(a->shape);
    it.raw = kvq_layout_raw(a->shape);
    it.gqa = gqa_of(a->shape);
    it.head = index / plan->n_tiles;
    it.first_token = index % plan->n_tiles * per_tile;
    it.tokens = min_u32(per_tile, a->q_tokens - it.first_token);
    it.rows = it.tokens * it.gqa;
    it.codec = kvq__codec_of(a->format, a->shape, a->book, it.head);
    it.dim = it.codec.dim;
    it.packs = !kvq_is_raw(a->format);
    it.extras = kvq__extras_of(a->format, a->shape, a->extras, a->pool, it.head);
    it.rotated = is_rotated(a);
    assert(it.head < a->shape->kv_heads);
    find_seen(&it);
    return it;
}

// Queries for packed keys: times what K was divided by, then rotated like K.
static void transform_queries(struct item *it)
{
    const struct kvq_format *f = it->a->format;
    float factors[KVQ_MAX_HEAD_DIM], *qt = it->w->qt;
    bool scaled = kvq__factors(f, &it->extras, it->a->book, it->head, it->dim, factors);
    if (!scaled && f->k_rotation == KVQ_ROTATE_NONE)
        return;
    memcpy(qt, it->w->q, sizeof(float) * it->rows * it->dim);
    for (uint32_t i = 0; scaled && i < it->rows * it->dim; i++)
        qt[i] *= factors[i % it->dim];
    kvq__rotate(it->k, f->k_rotation, qt, it->rows, it->dim, false);
    it->tile.qt = qt;
}

static void load_queries(struct item *it)
{
    const struct kvq_attend *a = it->a;
    const float log2e = 1.44269504f;
    float cap = a->shape->softcap;
    float factor = cap != 0.0f ? a->shape->scale / cap : a->shape->scale * log2e;
    for (uint32_t r = 0; r < it->rows; r++) {
        const uint8_t *src = a->q.data;
        src += (int64_t)(it->first_token + r / it->gqa) * a->q.token_stride;
        src += (int64_t)(it->head * it->gqa + r % it->gqa) * a->q.head_stride;
        it->k->load(src, a->q.dtype, it->w->q + (size_t)r * it->dim, it->dim);
        it->w->factor[r] = factor;
    }
    it->k->scale_rows(it->w->q, it->w->factor, it->rows, it->dim);
    it->tile.cap = cap * log2e;
    it->tile.q = it->tile.qt = it->w->q;
    if (it->packs)
        transform_queries(it);
}

static bool is_fast(const struct item *it)
{
    return it->a->path == KVQ_PATH_FAST && it->packs && it->k->has_fast &&
           it->k->has_fast(&it->codec, it->rows);
}

static void prepare_tile(struct item *it, const struct sums *part)
{
    struct kvq__workspace *w = it->w;
    struct kvq__tile *t = &it->tile;
    t->codec = &it->codec;
    t->rows = it->rows;
    t->dim = it->dim;
    t->logits = w->logits;
    t->m = part->m;
    t->l = part->l;
    t->o = part->o;
    t->ot = part->ot;
    t->factor = w->factor;
    t->lo = w->lo;
    t->hi = w->hi;
    t->group_f32 = w->group_f32;
    t->scratch = w->scratch;
    load_queries(it);
    if (is_fast(it))
        it->k->prepare_fast(t);
}

// Attends to what the tile sees of [begin, end). With a total, sums of each split are merged
// into it; without, begin to end is one split, whose sums stay in part.
static void attend_range(struct item *it, uint64_t begin, uint64_t end, const struct sums *part,
                         const struct sums *total)
{
    struct kvq__chunk chunks[2];
    uint32_t split = it->plan->split_tokens, step = min_u32(KVQ__CHUNK, split), now = 0;
    uint64_t from = it->seen_from > begin ? it->seen_from / step * step : begin;
    uint64_t to = it->seen_to < end ? it->seen_to : end;
    bool fast = is_fast(it);
    clear_sums(it, part);
    if (from >= to)
        return;
    build_chunk(it, from, to, step, &it->w->assembled[now], &chunks[now]);
    for (uint64_t at = from; at < to; at += step, now ^= 1) {
        if (at + step < to) {
            build_chunk(it, at + step, to, step, &it->w->assembled[now ^ 1], &chunks[now ^ 1]);
            chunks[now].next = &chunks[now ^ 1];
        }
        set_ranges(it, &chunks[now]);
        (fast ? it->k->attend_chunk_fast : it->k->attend_chunk)(it->k, &it->tile, &chunks[now]);
        if (total && ((at + step) % split == 0 || at + step >= to)) {
            merge_sums(it, total, part);
            clear_sums(it, part);
        }
    }
}

// Divides by l, rotates back what is rotated, and writes the tile's rows of out and lse.
static void finish(const struct item *it, const struct sums *s)
{
    const struct kvq_attend *a = it->a;
    float *inverse = it->w->factor;
    for (uint32_t r = 0; r < it->rows; r++)
        inverse[r] = s->l[r] == 0.0f ? 0.0f : 1.0f / s->l[r];
    if (it->rotated) {
        kvq__rotate(it->k, kvq__v_rotation(a->format, a->shape), s->ot, it->rows, it->dim, true);
        it->k->blend_rows(s->o, inverse, s->ot, inverse, it->rows, it->dim);
    } else {
        it->k->scale_rows(s->o, inverse, it->rows, it->dim);
    }
    for (uint32_t r = 0; r < it->rows; r++) {
        int64_t token = it->first_token + r / it->gqa, head = it->head * it->gqa + r % it->gqa;
        uint8_t *out = (uint8_t *)a->out + token * a->out_token_stride + head * a->out_head_stride;
        it->k->save(s->o + (size_t)r * it->dim, a->out_dtype, out, it->dim);
        if (a->lse) {
            float *lse = (float *)(void *)((uint8_t *)a->lse + token * a->lse_token_stride);
            lse[head] = s->l[r] == 0.0f ? -INFINITY : s->m[r] * 0.693147181f + logf(s->l[r]);
        }
    }
}

void kvq_attend_item(const struct kvq_kernels *k, const struct kvq_attend *a,
                     const struct kvq_attend_plan *plan, uint32_t item, void *partials,
                     void *workspace)
{
    uint32_t splits = plan->parallel ? plan->n_splits : 1;
    struct item it = item_of(k, a, plan, item / splits, workspace);
    if (plan->parallel) {
        uint64_t begin = (uint64_t)(item % splits) * plan->split_tokens;
        struct sums part = sums_of_partial(a, partials, item);
        prepare_tile(&it, &part);
        attend_range(&it, begin, begin + plan->split_tokens, &part, NULL);
        return;
    }
    struct sums part = sums_in(&it.w->part, it.rotated);
    struct sums total = sums_in(&it.w->total, it.rotated);
    prepare_tile(&it, &part);
    clear_sums(&it, &total);
    attend_range(&it, 0, total_tokens(a), &part, &total);
    finish(&it, &total);
}

void kvq_attend_merge(const struct kvq_kernels *k, const struct kvq_attend *a,
                      const struct kvq_attend_plan *plan, uint32_t index, const void *partials,
                      void *workspace)
{
    assert(plan->parallel);
    struct item it = item_of(k, a, plan, index, workspace);
    struct sums total = sums_in(&it.w->total, it.rotated);
    clear_sums(&it, &total);
    for (uint32_t split = 0; split < plan->n_splits; split++) {
        struct sums part = sums_of_partial(a, (void *)partials, index * plan->n_splits + split);
        merge_sums(&it, &total, &part);
    }
    finish(&it, &total);
}

size_t kvq_workspace_bytes(void)
{
    return sizeof(struct kvq__workspace);
}
