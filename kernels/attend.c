// SPDX-License-Identifier: Apache-2.0
//
// Decode attention: how the work falls into items, what each query sees, and how partial results
// become one. Knows no instruction set.
//
// An item has up to 64 query rows: those of one or more KV heads, and for each head those of one
// tile of a session's query tokens, or of many sessions that share blocks. It takes 512 positions
// at a time, and of these one head after the other, because that is how blocks lie in memory: the
// records of all heads of 128 tokens stand side by side. Where the kernels multiply matrices, an
// item of a call with many query rows has 512 rows of one head.
#include <assert.h>

#include "kernels/attend.h"

// Query rows of one session: a tile of its query tokens, for each KV head of the item.
struct span {
    const struct kvq_attend_job *job;
    uint32_t tile;
    uint32_t first_token, tokens; // query tokens
    uint32_t first_row, rows;     // among the rows of a head
};

// What a batch is cut into. With 8 two threads took 1.04 to 1.2 times as long where that cuts more
// (docs/benchmarks/history.md), and as long elsewhere.
enum { ITEMS_PER_THREAD = 4 };

struct item {
    const struct kvq_kernels *k;
    const struct kvq_attend *a; // of the first span. Format, shape, book and pages are everybody's
    struct kvq__workspace *w;
    uint32_t head, heads, gqa, dim;
    uint32_t rows; // of a head
    uint32_t split_tokens;
    uint32_t n_spans;
    struct span span[KVQ_TILE_ROWS];
    bool packs, rotated; // rotated: ot is apart from o and must be rotated back
    bool fast, tall;
    uint64_t seen_from, seen_to; // what any row of the item sees lies in between
    struct kvq__reader reader;   // of the head whose turn it is
};

// ---- The plan ----

static uint64_t total_tokens(const struct kvq_attend *a)
{
    return a->past_tokens + a->step_tokens;
}

// About 16 splits or more: enough for threads, few enough that merging costs nothing. Tall tiles
// have many rows to merge, and most calls have many such tiles.
static uint32_t split_tokens_of(uint64_t total, bool tall)
{
    uint32_t split = tall ? 2 * KVQ_SPLIT_MIN : KVQ_SPLIT_MIN;
    while (split < KVQ_SPLIT_MAX && (uint64_t)split * 32 <= total)
        split *= 2;
    return split;
}

static uint32_t gqa_of(const struct kvq_shape *s)
{
    return (uint32_t)s->q_heads / s->kv_heads;
}

// Whether packed values have sums of their own, to be rotated back at the end.
static bool is_rotated(const struct kvq_attend *a)
{
    return kvq__v_rotation(a->format, a->shape) != KVQ_ROTATE_NONE;
}

uint32_t kvq__tile_rows(const struct kvq_attend *a, const struct kvq_attend_plan *plan)
{
    return kvq__min_u32(a->q_tokens, plan->tile_tokens) * gqa_of(a->shape);
}

// Floats of m (or l) of one partial of tiles of so many rows; keeps what follows aligned to 64
// bytes.
static size_t state_floats(uint32_t rows)
{
    return (rows + 15u) & ~15u;
}

static size_t partial_floats(const struct kvq_attend *a, uint32_t rows)
{
    size_t o = (size_t)rows * a->shape->v_dim;
    return 2 * state_floats(rows) + o * (is_rotated(a) ? 2 : 1);
}

static uint32_t head_groups(const struct kvq_attend *a, uint32_t heads)
{
    return (a->shape->kv_heads + heads - 1) / heads;
}

void kvq__count_items(const struct kvq_attend *a, struct kvq_attend_plan *plan)
{
    uint32_t splits = plan->parallel ? plan->n_splits - plan->first_split : 1;
    size_t partials = (size_t)a->shape->kv_heads * plan->n_tiles * plan->n_splits;
    size_t bytes = partial_floats(a, kvq__tile_rows(a, plan)) * sizeof(float);
    plan->items = head_groups(a, plan->heads) * plan->n_tiles * splits;
    plan->partial_bytes = plan->parallel ? partials * bytes : 0;
}

// KV heads to an item. Those of codebooks take turns item by item: each has tables of its own.
static uint32_t heads_at_once(const struct kvq_attend *a, const struct kvq_attend_plan *plan)
{
    if (plan->tall || kvq_has_centroids(a->format))
        return 1;
    return kvq__min_u32(a->shape->kv_heads, KVQ_TILE_ROWS / kvq__tile_rows(a, plan));
}

// Centroids are faster by their own loops, which look products up.
static bool is_tall(const struct kvq_kernels *k, const struct kvq_attend *a)
{
    return k->attend_chunk_tall && !kvq_has_centroids(a->format) &&
           (uint64_t)a->q_tokens * gqa_of(a->shape) >= KVQ__TALL_FROM;
}

// Fewer heads to an item, until there are as many items as were asked for.
static void part_heads(const struct kvq_attend *a, struct kvq_attend_plan *plan)
{
    kvq__count_items(a, plan);
    while (plan->items < plan->wanted && plan->heads > 1) {
        plan->heads = (plan->heads + 1) / 2;
        kvq__count_items(a, plan);
    }
}

void kvq_attend_plan(const struct kvq_kernels *k, const struct kvq_attend *a, uint32_t items,
                     struct kvq_attend_plan *plan)
{
    uint64_t total = total_tokens(a);
    uint32_t gqa = gqa_of(a->shape), per_tile;
    bool tall = is_tall(k, a);
    assert(a->q_tokens > 0 && a->q_tokens <= KVQ_MAX_QUERY_TOKENS);
    per_tile = (tall ? (uint32_t)KVQ__TALL_ROWS : (uint32_t)KVQ_TILE_ROWS) / gqa;
    *plan = (struct kvq_attend_plan){.split_tokens = split_tokens_of(total, tall),
                                     .tile_tokens = per_tile,
                                     .tall = tall,
                                     .wanted = items};
    plan->n_splits = (uint32_t)((total + plan->split_tokens - 1) / plan->split_tokens);
    if (plan->n_splits == 0)
        plan->n_splits = 1;
    plan->n_tiles = (a->q_tokens + per_tile - 1) / per_tile;
    plan->heads = heads_at_once(a, plan);
    kvq__count_items(a, plan);
    plan->parallel = plan->items < items && plan->n_splits > 1;
    part_heads(a, plan);
}

void kvq_attend_plan_whole(const struct kvq_attend *a, struct kvq_attend_plan *plan)
{
    assert(plan->n_members == 0 && plan->first_split == 0);
    plan->parallel = false;
    plan->heads = heads_at_once(a, plan);
    part_heads(a, plan);
}

// Unpacking, once for all queries, takes about as long as the products of one.
uint64_t kvq_attend_work(const struct kvq_shape *s, uint64_t tokens, uint32_t queries)
{
    uint64_t seen = (uint64_t)s->window + queries;
    if (s->window == 0 || seen > tokens)
        seen = tokens;
    return seen * s->kv_heads * (1 + (uint64_t)queries);
}

uint32_t kvq_attend_items(uint32_t threads)
{
    assert(threads > 0);
    return threads > 1 ? ITEMS_PER_THREAD * threads : 1;
}

uint32_t kvq_attend_part(uint32_t items, uint64_t work, uint64_t all)
{
    uint64_t piece = all / items + 1;
    assert(items > 0 && work <= all);
    return work > piece ? (uint32_t)((work + piece - 1) / piece) : 1;
}

static uint64_t work_of(const struct kvq_attend *a)
{
    return kvq_attend_work(a->shape, total_tokens(a), a->q_tokens);
}

void kvq_attend_plan_batch(const struct kvq_kernels *k, struct kvq_attend_job *const *jobs,
                           uint32_t n, uint32_t threads)
{
    uint32_t items = kvq_attend_items(threads);
    uint64_t all = 0;
    for (uint32_t i = 0; i < n; i++)
        all += work_of(&jobs[i]->call);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t part = kvq_attend_part(items, work_of(&jobs[i]->call), all);
        kvq_attend_plan(k, &jobs[i]->call, part, &jobs[i]->plan);
    }
}

uint32_t kvq_attend_merges(const struct kvq_attend_job *job)
{
    return job->plan.parallel ? job->call.shape->kv_heads * job->plan.n_tiles : 0;
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

static void extend_seen(struct item *it, const struct span *s)
{
    uint64_t lo, hi;
    for (uint32_t i = 0; i < s->tokens; i++) {
        visible(&s->job->call, s->first_token + i, &lo, &hi);
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

// What the rows of a head, of every head, see of a chunk.
static void set_ranges(struct item *it, const struct kvq__chunk *chunk)
{
    uint32_t n = chunk->groups * KVQ_GROUP_TOKENS;
    uint64_t lo, hi;
    for (uint32_t i = 0; i < it->n_spans; i++) {
        const struct span *s = &it->span[i];
        for (uint32_t t = 0; t < s->tokens; t++) {
            visible(&s->job->call, s->first_token + t, &lo, &hi);
            int32_t from = within(lo, chunk->start, n), to = within(hi, chunk->start, n);
            for (uint32_t r = t * it->gqa; r < (t + 1) * it->gqa; r++) {
                it->w->lo[s->first_row + r] = from;
                it->w->hi[s->first_row + r] = to;
            }
        }
    }
}

// ---- Sums ----

static void clear_sums(const struct item *it, struct kvq__sums *s)
{
    uint32_t rows = it->rows * it->heads;
    for (uint32_t r = 0; r < rows; r++) {
        s->m[r] = -INFINITY;
        s->l[r] = 0.0f;
    }
    memset(s->o, 0, sizeof(float) * rows * it->dim);
    if (it->rotated)
        memset(s->ot, 0, sizeof(float) * rows * it->dim);
}

// The sums of some rows, wherever they lie.
struct rows {
    float *m, *l, *o, *ot; // as in struct kvq__sums
};

static struct rows rows_at(const struct item *it, struct kvq__sums *s, uint32_t row)
{
    size_t at = (size_t)row * it->dim;
    return (struct rows){s->m + row, s->l + row, s->o + at, s->ot + at};
}

static struct rows rows_of_partial(const struct kvq_attend_job *job, uint32_t index)
{
    const struct kvq_attend *a = &job->call;
    uint32_t rows = kvq__tile_rows(a, &job->plan);
    float *m = (float *)job->partials + index * partial_floats(a, rows);
    size_t n = state_floats(rows), o = (size_t)rows * a->shape->v_dim;
    return (struct rows){m, m + n, m + 2 * n, m + 2 * n + o};
}

// Adds rows of a split to what came before it. Every plan merges with this function, in ascending
// order, and nothing that a row has not seen ever touches it.
static void merge_rows(const struct item *it, struct rows total, struct rows part, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) {
        if (part.m[r] == -INFINITY)
            continue;
        size_t at = (size_t)r * it->dim;
        float m = total.m[r] > part.m[r] ? total.m[r] : part.m[r];
        float fa = kvq__exp2(total.m[r] - m), fb = kvq__exp2(part.m[r] - m);
        total.m[r] = m;
        total.l[r] = total.l[r] * fa + part.l[r] * fb;
        it->k->blend_rows(total.o + at, &fa, part.o + at, &fb, 1, it->dim);
        if (it->rotated)
            it->k->blend_rows(total.ot + at, &fa, part.ot + at, &fb, 1, it->dim);
    }
}

static void copy_rows(const struct item *it, struct rows to, struct rows from, uint32_t n)
{
    memcpy(to.m, from.m, n * sizeof(float));
    memcpy(to.l, from.l, n * sizeof(float));
    memcpy(to.o, from.o, n * sizeof(float) * it->dim);
    if (it->rotated)
        memcpy(to.ot, from.ot, n * sizeof(float) * it->dim);
}

static uint32_t partial_index(const struct span *s, uint32_t head, uint32_t split)
{
    const struct kvq_attend_plan *p = &s->job->plan;
    return (head * p->n_tiles + s->tile) * p->n_splits + split;
}

// Hands the sums of a split to the sessions' partials.
static void save_partials(const struct item *it, uint32_t split)
{
    for (uint32_t h = 0; h < it->heads; h++)
        for (uint32_t i = 0; i < it->n_spans; i++) {
            const struct span *s = &it->span[i];
            uint32_t index = partial_index(s, it->head + h, split);
            struct rows part = rows_at(it, &it->w->part, h * it->rows + s->first_row);
            copy_rows(it, rows_of_partial(s->job, index), part, s->rows);
        }
}

// ---- Making an item ----

static struct item item_of(const struct kvq_kernels *k, const struct kvq_attend_job *job,
                           uint32_t head, uint32_t heads, void *workspace)
{
    const struct kvq_attend *a = &job->call;
    struct item it = {.k = k, .a = a, .w = workspace, .head = head, .heads = heads};
    it.gqa = gqa_of(a->shape);
    it.dim = a->shape->k_dim;
    it.split_tokens = job->plan.split_tokens;
    it.packs = !kvq_is_raw(a->format);
    it.rotated = is_rotated(a);
    it.tall = job->plan.tall;
    it.seen_from = UINT64_MAX;
    assert(head + heads <= a->shape->kv_heads);
    return it;
}

static void add_span(struct item *it, const struct kvq_attend_job *job, uint32_t tile)
{
    uint32_t per_tile = job->plan.tile_tokens, first = tile * per_tile;
    struct span *s = &it->span[it->n_spans++];
    *s = (struct span){.job = job, .tile = tile, .first_token = first, .first_row = it->rows};
    s->tokens = kvq__min_u32(per_tile, job->call.q_tokens - first);
    s->rows = s->tokens * it->gqa;
    it->rows += s->rows;
    assert(it->rows * it->heads <= (it->tall ? (uint32_t)KVQ__TALL_ROWS : (uint32_t)KVQ_TILE_ROWS));
    extend_seen(it, s);
}

// Queries for packed keys: times what K was divided by, then rotated like K.
static void transform_queries(struct item *it, struct kvq__lane *lane, uint32_t head)
{
    const struct kvq_format *f = it->a->format;
    float factors[KVQ_MAX_HEAD_DIM], *qt = it->w->qt + (size_t)lane->tile.slot * it->dim;
    bool scaled = kvq__factors(it->k, f, &lane->extras, it->a->book, head, it->dim, factors);
    if (!scaled && f->k_rotation == KVQ_ROTATE_NONE)
        return;
    memcpy(qt, lane->tile.q, sizeof(float) * it->rows * it->dim);
    for (uint32_t i = 0; scaled && i < it->rows * it->dim; i++)
        qt[i] *= factors[i % it->dim];
    kvq__rotate(it->k, f->k_rotation, qt, it->rows, it->dim, false);
    lane->tile.qt = qt;
}

static void load_queries(const struct item *it, const struct span *s, uint32_t head, float *q,
                         float factor)
{
    const struct kvq_attend *a = &s->job->call;
    const uint32_t dim = kvq_row_dim(a->shape);
    for (uint32_t r = 0; r < s->rows; r++, q += it->dim) {
        const uint8_t *src = a->q.data;
        src += (int64_t)(s->first_token + r / it->gqa) * a->q.token_stride;
        src += (int64_t)(head * it->gqa + r % it->gqa) * a->q.head_stride;
        it->k->load(src, a->q.dtype, q, dim);
        if (dim < it->dim)
            memset(q + dim, 0, sizeof *q * (it->dim - dim));
        it->k->scale_rows(q, &factor, 1, it->dim);
    }
}

static void prepare_queries(struct item *it, struct kvq__lane *lane, uint32_t head)
{
    const float log2e = 1.44269504f;
    float cap = it->a->shape->softcap, scale = it->a->shape->scale;
    float *q = it->w->q + (size_t)lane->tile.slot * it->dim;
    for (uint32_t i = 0; i < it->n_spans; i++)
        load_queries(it, &it->span[i], head, q + (size_t)it->span[i].first_row * it->dim,
                     cap != 0.0f ? scale / cap : scale * log2e);
    lane->tile.cap = cap * log2e;
    lane->tile.q = lane->tile.qt = q;
    if (it->packs)
        transform_queries(it, lane, head);
}

static void prepare_tile(const struct item *it, struct kvq__lane *lane, uint32_t slot)
{
    struct kvq__workspace *w = it->w;
    struct rows part = rows_at(it, &w->part, slot);
    lane->tile = (struct kvq__tile){
        .codec = &lane->codec,
        .slot = slot,
        .rows = it->rows,
        .dim = it->dim,
        .logits = w->logits,
        .m = part.m,
        .l = part.l,
        .o = part.o,
        .ot = it->rotated ? part.ot : part.o,
        .factor = w->factor,
        .lo = w->lo,
        .hi = w->hi,
        .group_f32 = w->group_f32,
        .scratch = w->scratch,
    };
}

// Everything that attending needs, once all spans are there.
static void prepare(struct item *it)
{
    const struct kvq_attend *a = it->a;
    for (uint32_t h = 0; h < it->heads; h++) {
        struct kvq__lane *lane = &it->w->lane[h];
        uint32_t head = it->head + h;
        lane->codec = kvq__codec_of(a->format, a->shape, a->book, head);
        lane->extras = kvq__extras_of(a->format, a->shape, a->extras, a->pool, head);
        prepare_tile(it, lane, h * it->rows);
        prepare_queries(it, lane, head);
        it->fast = a->path == KVQ_PATH_FAST && it->packs && it->k->has_fast &&
                   it->k->has_fast(&lane->codec, kvq__min_u32(it->rows, KVQ_TILE_ROWS));
        if (it->fast && !it->tall)
            it->k->prepare_fast(&lane->tile);
    }
    it->reader = (struct kvq__reader){.k = it->k,
                                      .a = a,
                                      .raw = kvq_raw_layout_of(a->shape),
                                      .dim = it->dim,
                                      .packs = it->packs,
                                      .seen_from = it->seen_from,
                                      .seen_to = it->seen_to};
}

// ---- Attending ----

// A stop on the way through a range: some positions, and the head whose turn it is.
struct stop {
    uint64_t at;
    uint32_t head; // of the item
};

static struct stop after(const struct item *it, struct stop here)
{
    if (here.head + 1 < it->heads)
        return (struct stop){here.at, here.head + 1};
    return (struct stop){here.at + KVQ__CHUNK, 0};
}

static void build(struct item *it, struct stop here, uint64_t to, struct kvq__assembled *room,
                  struct kvq__chunk *chunk)
{
    it->reader.head = it->head + here.head;
    it->reader.codec = &it->w->lane[here.head].codec;
    it->reader.extras = &it->w->lane[here.head].extras;
    uint32_t tokens = to - here.at < KVQ__CHUNK ? (uint32_t)(to - here.at) : KVQ__CHUNK;
    kvq__build_chunk(&it->reader, here.at, tokens, room, chunk);
}

static void attend_stop(struct item *it, struct stop here, const struct kvq__chunk *chunk)
{
    struct kvq__tile *tile = &it->w->lane[here.head].tile;
    if (here.head == 0)
        set_ranges(it, chunk);
    if (it->tall)
        it->k->attend_chunk_tall(it->k, tile, chunk, it->fast);
    else
        (it->fast ? it->k->attend_chunk_fast : it->k->attend_chunk)(it->k, tile, chunk);
}

// Attends to what the item sees of [begin, end). If `merging`, the sums of each split are merged
// into the total; else begin to end is one split, whose sums stay in part.
static void attend_range(struct item *it, uint64_t begin, uint64_t end, bool merging)
{
    struct kvq__chunk chunks[2];
    uint32_t split = it->split_tokens, now = 0;
    uint64_t from = it->seen_from > begin ? it->seen_from / KVQ__CHUNK * KVQ__CHUNK : begin;
    uint64_t to = it->seen_to < end ? it->seen_to : end;
    struct stop here = {.at = from};
    clear_sums(it, &it->w->part);
    if (from >= to)
        return;
    build(it, here, to, &it->w->assembled[now], &chunks[now]);
    while (here.at < to) {
        struct stop next = after(it, here);
        if (next.at < to) {
            build(it, next, to, &it->w->assembled[now ^ 1], &chunks[now ^ 1]);
            chunks[now].next = &chunks[now ^ 1];
            chunks[now ^ 1].fetched = true;
        }
        attend_stop(it, here, &chunks[now]);
        if (merging && next.head == 0 && (next.at % split == 0 || next.at >= to)) {
            merge_rows(it, rows_at(it, &it->w->total, 0), rows_at(it, &it->w->part, 0),
                       it->rows * it->heads);
            clear_sums(it, &it->w->part);
        }
        here = next;
        now ^= 1;
    }
}

// ---- Results ----

static void write_rows(const struct item *it, const struct span *s, uint32_t head, struct rows sums)
{
    const struct kvq_attend *a = &s->job->call;
    for (uint32_t r = 0; r < s->rows; r++) {
        int64_t token = s->first_token + r / it->gqa, q_head = head * it->gqa + r % it->gqa;
        uint8_t *out =
            (uint8_t *)a->out + token * a->out_token_stride + q_head * a->out_head_stride;
        it->k->save(sums.o + (size_t)r * it->dim, a->out_dtype, out, kvq_row_dim(a->shape));
        if (a->lse) {
            float *lse = (float *)(void *)((uint8_t *)a->lse + token * a->lse_token_stride);
            lse[q_head] =
                sums.l[r] == 0.0f ? -INFINITY : sums.m[r] * 0.693147181f + logf(sums.l[r]);
        }
    }
}

// Divides by l, rotates back what is rotated, and writes the rows of out and lse of one head.
static void finish(const struct item *it, uint32_t h)
{
    const struct kvq_attend *a = it->a;
    struct rows sums = rows_at(it, &it->w->total, h * it->rows);
    float *inverse = it->w->factor;
    for (uint32_t r = 0; r < it->rows; r++)
        inverse[r] = sums.l[r] == 0.0f ? 0.0f : 1.0f / sums.l[r];
    if (it->rotated) {
        kvq__rotate(it->k, kvq__v_rotation(a->format, a->shape), sums.ot, it->rows, it->dim, true);
        it->k->blend_rows(sums.o, inverse, sums.ot, inverse, it->rows, it->dim);
    } else {
        it->k->scale_rows(sums.o, inverse, it->rows, it->dim);
    }
    write_rows(it, &it->span[0], it->head + h, sums);
}

// Items of shared splits go first. They belong to the sessions of all members.
static void attend_shared(const struct kvq_kernels *k, const struct kvq_attend_job *job,
                          uint32_t index, void *workspace)
{
    const struct kvq_attend_plan *p = &job->plan;
    uint32_t split = index % p->first_split, rest = index / p->first_split;
    uint32_t stack = rest % p->stacks, head = rest / p->stacks * p->shared_heads;
    uint32_t heads = kvq__min_u32(p->shared_heads, job->call.shape->kv_heads - head);
    uint32_t end = kvq__min_u32((stack + 1) * p->stack_tiles, p->n_members * p->n_tiles);
    struct item it = item_of(k, job, head, heads, workspace);
    for (uint32_t i = stack * p->stack_tiles; i < end; i++)
        add_span(&it, p->members[i / p->n_tiles], i % p->n_tiles);
    prepare(&it);
    attend_range(&it, (uint64_t)split * p->split_tokens, (uint64_t)(split + 1) * p->split_tokens,
                 false);
    save_partials(&it, split);
}

static void attend_own(const struct kvq_kernels *k, const struct kvq_attend_job *job,
                       uint32_t index, void *workspace)
{
    const struct kvq_attend_plan *p = &job->plan;
    uint32_t splits = p->parallel ? p->n_splits - p->first_split : 1;
    uint32_t split = p->first_split + index % splits, rest = index / splits;
    uint32_t head = rest / p->n_tiles * p->heads;
    uint32_t heads = kvq__min_u32(p->heads, job->call.shape->kv_heads - head);
    struct item it = item_of(k, job, head, heads, workspace);
    add_span(&it, job, rest % p->n_tiles);
    prepare(&it);
    if (p->parallel) {
        uint64_t begin = (uint64_t)split * p->split_tokens;
        attend_range(&it, begin, begin + p->split_tokens, false);
        save_partials(&it, split);
        return;
    }
    clear_sums(&it, &it.w->total);
    attend_range(&it, 0, total_tokens(&job->call), true);
    for (uint32_t h = 0; h < heads; h++)
        finish(&it, h);
}

void kvq_attend_item(const struct kvq_kernels *k, const struct kvq_attend_job *job, uint32_t item,
                     void *workspace)
{
    if (item < job->plan.shared_items)
        attend_shared(k, job, item, workspace);
    else
        attend_own(k, job, item - job->plan.shared_items, workspace);
}

void kvq_attend_merge(const struct kvq_kernels *k, const struct kvq_attend_job *job, uint32_t index,
                      void *workspace)
{
    const struct kvq_attend_plan *p = &job->plan;
    struct item it = item_of(k, job, index / p->n_tiles, 1, workspace);
    assert(p->parallel);
    add_span(&it, job, index % p->n_tiles);
    clear_sums(&it, &it.w->total);
    for (uint32_t split = 0; split < p->n_splits; split++) {
        struct rows part = rows_of_partial(job, partial_index(&it.span[0], it.head, split));
        merge_rows(&it, rows_at(&it, &it.w->total, 0), part, it.rows);
    }
    finish(&it, 0);
}

size_t kvq_workspace_bytes(void)
{
    return sizeof(struct kvq__workspace);
}
