// SPDX-License-Identifier: Apache-2.0
//
// The checker's entries of attention: the steps of a chunk, and whole chunks.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/kernels/check.h"

// A tile with everything it points to. The second copy of what is written is for the other table.
struct bench {
    struct kvq__codec codec;
    struct kvq__tile tile[2]; // for C and for the other
    float *q;
    uint8_t *record;
    struct kvq_packed packed; // its first group
    uint16_t *raw;
};

static float *floats(size_t n)
{
    float *x = kvt_guarded(sizeof(float) * n, 0);
    memset(x, 0, sizeof(float) * n);
    return x;
}

static uint32_t any_rows(struct kvt_rng *rng)
{
    return kvt_below(rng, 3) ? 1 + kvt_below(rng, 16) : 1 + kvt_below(rng, KVQ_TILE_ROWS);
}

// `room`: rows that there is memory for.
static void make_tile(struct bench *b, struct kvq__tile *t, uint32_t rows, uint32_t room)
{
    uint32_t dim = b->codec.dim;
    t->codec = &b->codec;
    t->rows = rows;
    t->dim = dim;
    t->q = t->qt = b->q;
    t->logits = floats((size_t)room * KVQ__LOGITS_STRIDE);
    t->m = floats(KVQ__TALL_ROWS);
    t->l = floats(KVQ__TALL_ROWS);
    t->factor = floats(KVQ__TALL_ROWS);
    t->lo = kvt_guarded(sizeof(int32_t) * KVQ__TALL_ROWS, 0);
    t->hi = kvt_guarded(sizeof(int32_t) * KVQ__TALL_ROWS, 0);
    t->o = floats((size_t)room * dim);
    t->ot = floats((size_t)room * dim);
    t->group_f32 = floats((size_t)32 * dim);
    t->scratch = kvt_guarded(KVQ__SCRATCH_BYTES, 0);
}

static void free_tile(struct kvq__tile *t)
{
    kvt_guarded_free(t->logits);
    kvt_guarded_free(t->m);
    kvt_guarded_free(t->l);
    kvt_guarded_free(t->factor);
    kvt_guarded_free(t->lo);
    kvt_guarded_free(t->hi);
    kvt_guarded_free(t->o);
    kvt_guarded_free(t->ot);
    kvt_guarded_free(t->group_f32);
    kvt_guarded_free(t->scratch);
}

static struct bench *make_bench_of(const struct pair *p, struct kvt_rng *rng, bool v, uint32_t rows,
                                   uint32_t room)
{
    struct bench *b = calloc(1, sizeof *b);
    b->codec = any_codec(p, rng, rows, v);
    size_t n = (size_t)32 * b->codec.dim;
    b->q = floats((size_t)rows * b->codec.dim);
    kvt_fill(rng, KVT_NORMAL, b->q, rows, b->codec.dim);
    b->record = any_record(rng, p, &b->codec);
    b->packed = kvq_packed_at(&b->codec.layout, b->record, 0);
    float *raw = floats(n);
    struct kvq_store_counts counts = {0};
    kvt_fill(rng, KVT_OUTLIERS, raw, 32, b->codec.dim);
    b->raw = kvt_guarded(2 * n, 0);
    p->c->store(raw, KVQ_F32, b->raw, b->codec.raw_dtype, n, &counts);
    kvt_guarded_free(raw);
    make_tile(b, &b->tile[0], rows, room);
    make_tile(b, &b->tile[1], rows, room);
    return b;
}

static struct bench *make_bench(const struct pair *p, struct kvt_rng *rng, bool v)
{
    uint32_t rows = any_rows(rng);
    return make_bench_of(p, rng, v, rows, rows);
}

static void free_bench(struct bench *b)
{
    free_tile(&b->tile[0]);
    free_tile(&b->tile[1]);
    kvt_guarded_free(b->q);
    kvt_guarded_free(b->record);
    kvt_guarded_free(b->raw);
    free(b);
}

static float length(const float *x, uint32_t dim)
{
    float sum = 0;
    for (uint32_t i = 0; i < dim; i++)
        sum += x[i] * x[i];
    return sqrtf(sum);
}

// Compares the first 32 logits of all rows; keys are those in the C tile's group_f32.
static void compare_logits(const struct bench *b, uint32_t from, uint32_t to)
{
    const struct kvq__tile *t = b->tile;
    for (uint32_t r = 0; r < t->rows; r++)
        for (uint32_t i = 0; i < KVQ__LOGITS_STRIDE; i++) {
            size_t at = (size_t)r * KVQ__LOGITS_STRIDE + i;
            float scale = i < from || i >= to
                              ? 0.0f
                              : length(t->q + (size_t)r * t->dim, t->dim) *
                                    length(t->group_f32 + (size_t)i * t->dim, t->dim);
            assert_close(b->tile[1].logits[at], t->logits[at], scale);
        }
}

void check_qk_packed(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    kvq__qk_packed(p->c, &b->tile[0], &b->packed, b->tile[0].logits);
    kvq__qk_packed(p->k, &b->tile[1], &b->packed, b->tile[1].logits);
    p->c->dequant_k[b->codec.k.kind](&b->codec, &b->packed, b->tile[0].group_f32);
    compare_logits(b, 0, 32);
    free_bench(b);
}

// Any rows will do as fp32 keys: those of the group.
void check_dot_rows(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    p->c->dequant_k[b->codec.k.kind](&b->codec, &b->packed, b->tile[0].group_f32);
    p->c->dot_rows(&b->tile[0], b->q, b->tile[0].group_f32, b->tile[0].logits);
    p->k->dot_rows(&b->tile[1], b->q, b->tile[0].group_f32, b->tile[1].logits);
    compare_logits(b, 0, 32);
    free_bench(b);
}

void check_qk_raw(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    uint32_t to = 1 + kvt_below(rng, 32), from = kvt_below(rng, to);
    p->c->qk_raw(&b->tile[0], b->raw, from, to, b->tile[0].logits);
    p->k->qk_raw(&b->tile[1], b->raw, from, to, b->tile[1].logits);
    p->c->load(b->raw, b->codec.raw_dtype, b->tile[0].group_f32, (size_t)32 * b->codec.dim);
    compare_logits(b, from, to);
    free_bench(b);
}

static void fill_logits(struct kvt_rng *rng, struct bench *b, float spread)
{
    size_t n = (size_t)b->tile[0].rows * KVQ__LOGITS_STRIDE;
    for (size_t i = 0; i < n; i++) {
        float odd = kvt_below(rng, 40) ? -INFINITY : kvt_below(rng, 2) ? NAN : INFINITY;
        float x = kvt_below(rng, 50) ? spread * kvt_normal(rng) : odd;
        b->tile[0].logits[i] = b->tile[1].logits[i] = x;
    }
}

void check_softcap(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    uint32_t n = 32 * (1 + kvt_below(rng, KVQ__CHUNK_GROUPS));
    fill_logits(rng, b, kvt_below(rng, 2) ? 3.0f : 0.01f);
    b->tile[0].cap = b->tile[1].cap = 0.5f + (float)kvt_below(rng, 80);
    p->c->softcap(&b->tile[0], n);
    p->k->softcap(&b->tile[1], n);
    for (uint32_t r = 0; r < b->tile[0].rows; r++)
        for (uint32_t i = 0; i < KVQ__LOGITS_STRIDE; i++) {
            size_t at = (size_t)r * KVQ__LOGITS_STRIDE + i;
            assert_close(b->tile[1].logits[at], b->tile[0].logits[at],
                         i < n ? b->tile[0].cap * 0.1f : 0);
        }
    free_bench(b);
}

static void any_state(struct kvt_rng *rng, struct bench *b, uint32_t n)
{
    for (uint32_t r = 0; r < b->tile[0].rows; r++) {
        bool fresh = kvt_below(rng, 2);
        int32_t hi = (int32_t)kvt_below(rng, n + 1), lo = (int32_t)kvt_below(rng, (uint32_t)hi + 1);
        if (kvt_below(rng, 3) == 0)
            lo = 0;
        for (int i = 0; i < 2; i++) {
            b->tile[i].m[r] = fresh ? -INFINITY : (float)(r % 7);
            b->tile[i].l[r] = fresh ? 0.0f : 1.5f;
            b->tile[i].lo[r] = lo;
            b->tile[i].hi[r] = hi;
        }
    }
}

void check_softmax(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    uint32_t n = 32 * (1 + kvt_below(rng, KVQ__CHUNK_GROUPS));
    struct kvq__tile *c = &b->tile[0], *k = &b->tile[1];
    fill_logits(rng, b, kvt_below(rng, 3) ? 8.0f : 500.0f);
    any_state(rng, b, n);
    p->c->softmax(c, n);
    p->k->softmax(k, n);
    for (uint32_t r = 0; r < c->rows; r++) {
        assert_close(k->m[r], c->m[r], 0);
        assert_close(k->l[r], c->l[r], c->l[r]);
        assert_close(k->factor[r], c->factor[r], 1);
        for (uint32_t i = 0; i < KVQ__LOGITS_STRIDE; i++) {
            size_t at = (size_t)r * KVQ__LOGITS_STRIDE + i;
            bool seen = (int32_t)i >= c->lo[r] && (int32_t)i < c->hi[r];
            assert_close(k->logits[at], c->logits[at], seen ? 1 : 0);
        }
    }
    free_bench(b);
}

// What went through the softmax has errors of logits as relative errors: 2^(x + d) ~ 2^x (1 + d).
static float softmax_slack(const struct kvq__tile *t, uint32_t r)
{
    return 1 + (isfinite(t->m[r]) ? fabsf(t->m[r]) : 0);
}

// `times`: of the slack of what went through the softmax; 0 if nothing did.
static void compare_sums_of_softmax(const struct bench *b, bool transformed, float times)
{
    const struct kvq__tile *c = &b->tile[0], *k = &b->tile[1];
    const float *a = transformed ? c->ot : c->o, *x = transformed ? k->ot : k->o;
    for (uint32_t r = 0; r < c->rows; r++) {
        float largest = 0;
        for (uint32_t i = 0; i < c->dim; i++)
            largest = fmaxf(largest, fabsf(a[(size_t)r * c->dim + i]));
        largest *= times != 0 ? times * softmax_slack(c, r) : 1;
        for (uint32_t i = 0; i < c->dim; i++)
            assert_close(x[(size_t)r * c->dim + i], a[(size_t)r * c->dim + i], largest);
    }
}

static void compare_sums(const struct bench *b, bool transformed)
{
    compare_sums_of_softmax(b, transformed, 0);
}

static void fill_weights(struct kvt_rng *rng, struct bench *b)
{
    const struct kvq__tile *t = b->tile;
    for (size_t i = 0; i < (size_t)t->rows * KVQ__LOGITS_STRIDE; i++)
        b->tile[0].logits[i] = b->tile[1].logits[i] =
            kvt_below(rng, 4) ? fabsf(kvt_normal(rng)) * 0.3f : 0.0f;
    for (size_t i = 0; i < (size_t)t->rows * t->dim; i++) {
        b->tile[0].o[i] = b->tile[1].o[i] = kvt_normal(rng);
        b->tile[0].ot[i] = b->tile[1].ot[i] = kvt_normal(rng);
    }
}

void check_pv_packed(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, true);
    fill_weights(rng, b);
    kvq__pv_packed(p->c, &b->tile[0], &b->packed, b->tile[0].logits);
    kvq__pv_packed(p->k, &b->tile[1], &b->packed, b->tile[1].logits);
    compare_sums(b, true);
    compare_sums(b, false);
    free_bench(b);
}

void check_sum_rows(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    fill_weights(rng, b);
    p->c->dequant_k[b->codec.k.kind](&b->codec, &b->packed, b->tile[0].group_f32);
    p->c->sum_rows(&b->tile[0], b->tile[0].logits, b->tile[0].group_f32, b->tile[0].ot);
    p->k->sum_rows(&b->tile[1], b->tile[1].logits, b->tile[0].group_f32, b->tile[1].ot);
    compare_sums(b, true);
    compare_sums(b, false);
    free_bench(b);
}

void check_pv_raw(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    uint32_t to = 1 + kvt_below(rng, 32), from = kvt_below(rng, to);
    fill_weights(rng, b);
    p->c->pv_raw(&b->tile[0], b->raw, from, to, b->tile[0].logits);
    p->k->pv_raw(&b->tile[1], b->raw, from, to, b->tile[1].logits);
    compare_sums(b, true);
    compare_sums(b, false);
    free_bench(b);
}

// Some packed positions whose raw rows count instead.
static void add_outliers(struct kvt_rng *rng, const struct bench *b, struct kvq__group *g)
{
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t t = kvt_below(rng, g->packed_tokens);
        g->pooled |= 1u << t;
        g->pool_row[t] = (uint8_t)kvt_below(rng, 32);
    }
    g->pool_k = g->pool_v = b->raw;
}

static void fill_chunk(struct kvt_rng *rng, const struct bench *b, struct kvq__chunk *chunk)
{
    for (uint32_t i = 0; i < chunk->groups; i++) {
        struct kvq__group *g = &chunk->group[i];
        uint32_t packed = kvt_below(rng, 3) ? 32 : kvt_below(rng, 33), kind = kvt_below(rng, 6);
        g->held = kind == 0 ? 0 : kind == 1 ? (uint32_t)kvt_u64(rng) : UINT32_MAX;
        if (g->held == 0)
            continue;
        if (packed)
            g->packed = b->packed;
        g->packed_tokens = packed;
        if (packed && kvt_below(rng, 4) == 0)
            add_outliers(rng, b, g);
        g->raw_from = packed;
        g->raw_to = 32;
        g->raw_k = g->raw_v = b->raw;
    }
}

// With errors that may be so many times as large as elsewhere.
static void compare_attention(const struct bench *b, float times)
{
    for (uint32_t r = 0; r < b->tile[0].rows; r++) {
        float slack = times * softmax_slack(&b->tile[0], r);
        assert_close(b->tile[1].m[r], b->tile[0].m[r], slack);
        assert_close(b->tile[1].l[r], b->tile[0].l[r], b->tile[0].l[r] * slack);
    }
    compare_sums_of_softmax(b, true, times);
    compare_sums_of_softmax(b, false, times);
}

void check_attend_chunk(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    struct kvq__chunk chunk = {.groups = 1 + kvt_below(rng, KVQ__CHUNK_GROUPS)};
    fill_chunk(rng, b, &chunk);
    any_state(rng, b, chunk.groups * 32);
    for (uint32_t r = 0; r < b->tile[0].rows * b->codec.dim; r++)
        b->q[r] *= 0.02f;
    p->c->attend_chunk(p->c, &b->tile[0], &chunk);
    p->k->attend_chunk(p->k, &b->tile[1], &chunk);
    compare_attention(b, 1);
    free_bench(b);
}

// As formats and calls have it: with sums in one place or two, queries of packed keys apart, or a
// soft-cap. The caller puts back what it had.
static void any_setting(struct kvt_rng *rng, struct bench *b, float *qt)
{
    bool shared = kvt_below(rng, 2), apart = kvt_below(rng, 2);
    float cap = kvt_below(rng, 3) ? 0.0f : 1.0f;
    for (uint32_t i = 0; i < b->tile[0].rows * b->codec.dim; i++)
        qt[i] = -0.75f * b->q[i];
    for (int i = 0; i < 2; i++) {
        b->tile[i].ot = shared ? b->tile[i].o : b->tile[i].ot;
        b->tile[i].qt = apart ? qt : b->tile[i].q;
        b->tile[i].cap = cap;
    }
}

// Two chunks, for what is kept from one to the next. The fast path has factors of 8 bits.
void check_attend_chunk_tall(const struct pair *p, struct kvt_rng *rng)
{
    bool fast = kvt_below(rng, 2);
    uint32_t rows = 1 + kvt_below(rng, KVQ__TALL_ROWS), most = KVQ__CHUNK_GROUPS;
    struct bench *b = make_bench_of(p, rng, false, rows, (rows + 31) / 32 * 32);
    struct kvq__chunk chunk = {.groups = 1 + kvt_below(rng, most)}, next = {.groups = most};
    float *ot[2] = {b->tile[0].ot, b->tile[1].ot}, *qt = floats((size_t)rows * b->codec.dim);
    fill_chunk(rng, b, &chunk);
    fill_chunk(rng, b, &next);
    any_state(rng, b, chunk.groups * 32);
    for (uint32_t r = 0; r < rows * b->codec.dim; r++)
        b->q[r] *= fast ? 0.001f : 0.02f; // for errors of logits are absolute
    any_setting(rng, b, qt);
    p->c->attend_chunk(p->c, &b->tile[0], &chunk);
    p->c->attend_chunk(p->c, &b->tile[0], &next);
    p->k->attend_chunk_tall(p->k, &b->tile[1], &chunk, fast);
    p->k->attend_chunk_tall(p->k, &b->tile[1], &next, fast);
    compare_attention(b, fast ? 1000 : 1);
    for (int i = 0; i < 2; i++)
        b->tile[i].ot = ot[i];
    kvt_guarded_free(qt);
    free_bench(b);
}

// A loop over a chunk's packed groups gives what group by group gives.
static void compare_chunk(const struct pair *p, struct kvt_rng *rng, bool v)
{
    struct bench *b = make_bench(p, rng, v);
    struct kvq__chunk chunk = {.groups = 1 + kvt_below(rng, KVQ__CHUNK_GROUPS)};
    struct kvq__tile *c = &b->tile[0], *k = &b->tile[1];
    for (uint32_t i = 0; i < chunk.groups; i++) {
        chunk.group[i].packed = b->packed;
        chunk.group[i].packed_tokens = kvt_below(rng, 5) ? KVQ_GROUP_TOKENS : 0;
    }
    fill_weights(rng, b);
    bool done = v ? p->k->pv_chunk[p->kind](k, &chunk) : p->k->qk_chunk[p->kind](k, &chunk);
    for (uint32_t i = 0; i < chunk.groups && done; i++) {
        float *at = c->logits + i * KVQ_GROUP_TOKENS;
        if (chunk.group[i].packed_tokens && v)
            kvq__pv_packed(p->c, c, &b->packed, at);
        else if (chunk.group[i].packed_tokens)
            kvq__qk_packed(p->c, c, &b->packed, at);
    }
    p->c->dequant_k[b->codec.k.kind](&b->codec, &b->packed, c->group_f32);
    // Whole numbers are as exact as the group's scales and zeros are large.
    float keys[KVQ_GROUP_TOKENS], longest = 0.0f;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        keys[t] = length(c->group_f32 + t * c->dim, c->dim);
        longest = fmaxf(longest, keys[t]);
    }
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS && kvq__fits_bytes(&b->codec); t++)
        keys[t] = longest;
    for (uint32_t r = 0; r < c->rows; r++)
        for (uint32_t i = 0; i < KVQ__LOGITS_STRIDE; i++) {
            size_t at = (size_t)r * KVQ__LOGITS_STRIDE + i;
            bool new = !v &&done &&i < chunk.groups *KVQ_GROUP_TOKENS;
            float scale =
                new ? length(c->q + (size_t)r * c->dim, c->dim) * keys[i % KVQ_GROUP_TOKENS] : 0.0f;
            assert_close(k->logits[at], c->logits[at], scale);
        }
    compare_sums(b, true);
    compare_sums(b, false);
    free_bench(b);
}

void check_qk_chunk(const struct pair *p, struct kvt_rng *rng)
{
    compare_chunk(p, rng, false);
}

void check_pv_chunk(const struct pair *p, struct kvt_rng *rng)
{
    compare_chunk(p, rng, true);
}
