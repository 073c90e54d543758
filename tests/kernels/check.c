// SPDX-License-Identifier: Apache-2.0
//
// Compares every function of every instruction set with C: random and extreme numbers, odd sizes,
// views that are aligned to their dtype only, and guard bytes around all memory. Bytes that are
// stored must be the same; other results within 1e-5. KVQ_SEED chooses other numbers;
// KVQ_CPU_MASK lowers what is checked. What an instruction set does not replace is not run twice.
//
// This file checks the entries of the table one by one, check_calls.c whole calls.
#include <assert.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/kernels/check.h"

static const float TOLERANCE = 1e-5f;

// Fills n floats with numbers of a random kind.
static void fill(struct kvt_rng *rng, float *x, uint32_t rows, uint32_t dim)
{
    kvt_fill(rng, (enum kvt_kind)kvt_below(rng, KVT_KINDS), x, rows, dim);
}

static uint32_t any_dim(struct kvt_rng *rng)
{
    return 64u << kvt_below(rng, 3);
}

static void assert_close(float got, float want, float scale)
{
    bool same = got == want || (isnan(got) && isnan(want));
    if (!same && !(fabsf(got - want) <= TOLERANCE * scale + 1e-30f))
        fail_msg("got %.9g, C has %.9g, allowed difference %.3g", (double)got, (double)want,
                 (double)(TOLERANCE * scale));
}

// ---- Numbers ----

static size_t dtype_size(uint8_t dtype)
{
    return dtype == KVQ_F32 ? 4 : 2;
}

// Any bits at all, so that infinities, NaN and subnormals come often.
static void any_bits(struct kvt_rng *rng, uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)kvt_u64(rng);
}

static void check_load(const struct pair *p, struct kvt_rng *rng)
{
    for (uint32_t dtype = KVQ_F16; dtype <= KVQ_F32; dtype++) {
        size_t n = kvt_below(rng, 600);
        uint8_t *src = kvt_guarded(n * dtype_size(dtype), dtype_size(dtype));
        float *a = kvt_guarded(n * sizeof(float), 0), *b = kvt_guarded(n * sizeof(float), 0);
        any_bits(rng, src, n * dtype_size(dtype));
        p->c->load(src, dtype, a, n);
        p->k->load(src, dtype, b, n);
        for (size_t i = 0; i < n; i++)
            assert_true(kvq__bits(a[i]) == kvq__bits(b[i]) || (isnan(a[i]) && isnan(b[i])));
        kvt_guarded_free(src);
        kvt_guarded_free(a);
        kvt_guarded_free(b);
    }
}

// fp32 numbers near every rounding boundary of the 16-bit types.
static void rounding_cases(struct kvt_rng *rng, float *x, size_t n)
{
    fill(rng, x, 1, (uint32_t)n);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)kvt_u64(rng);
        if (kvt_below(rng, 3) == 0)
            x[i] = kvq__float(bits & (kvt_below(rng, 2) ? 0xfffff000u : 0xffffffffu));
        if (kvt_below(rng, 9) == 0)
            x[i] = kvq__float((bits & 0x80000000u) | 0x477fe000u) + (float)kvt_below(rng, 40);
    }
}

static void check_save(const struct pair *p, struct kvt_rng *rng)
{
    for (uint32_t dtype = KVQ_F16; dtype <= KVQ_F32; dtype++) {
        size_t n = kvt_below(rng, 600), size = dtype_size(dtype);
        float *x = kvt_guarded(n * sizeof *x, 0);
        uint8_t *a = kvt_guarded(n * size, size), *b = kvt_guarded(n * size, size);
        rounding_cases(rng, x, n);
        p->c->save(x, dtype, a, n);
        p->k->save(x, dtype, b, n);
        for (size_t i = 0; i < n; i++)
            if (!isnan(x[i]))
                assert_memory_equal(a + i * size, b + i * size, size);
            else
                assert_true(is_nan(a, dtype, i) && is_nan(b, dtype, i));
        kvt_guarded_free(x);
        kvt_guarded_free(a);
        kvt_guarded_free(b);
    }
}

static void check_store(const struct pair *p, struct kvt_rng *rng)
{
    for (uint32_t from = KVQ_F16; from <= KVQ_F32; from++)
        for (uint32_t to = KVQ_F16; to <= KVQ_BF16; to++) {
            size_t n = kvt_below(rng, 300), size = dtype_size(from);
            struct kvq_store_counts ca = {3, 4}, cb = {3, 4};
            uint8_t *src = kvt_guarded(n * size, size);
            uint16_t *a = kvt_guarded(2 * n, 2), *b = kvt_guarded(2 * n, 2);
            any_bits(rng, src, n * size);
            if (from == KVQ_F32)
                rounding_cases(rng, (float *)(void *)src, n);
            p->c->store(src, from, a, to, n, &ca);
            p->k->store(src, from, b, to, n, &cb);
            assert_memory_equal(&ca, &cb, sizeof ca);
            for (size_t i = 0; i < n; i++)
                assert_true(a[i] == b[i] || (is_nan(a, to, i) && is_nan(b, to, i)));
            kvt_guarded_free(src);
            kvt_guarded_free(a);
            kvt_guarded_free(b);
        }
}

// ---- Rows ----

struct rows {
    uint32_t n, dim;
    float *a, *b, *factor;
};

static struct rows two_copies(struct kvt_rng *rng)
{
    struct rows r = {.n = 1 + kvt_below(rng, 70), .dim = any_dim(rng)};
    size_t bytes = sizeof(float) * r.n * r.dim;
    r.a = kvt_guarded(bytes, 0);
    r.b = kvt_guarded(bytes, 0);
    r.factor = kvt_guarded(sizeof(float) * r.n, 0);
    fill(rng, r.a, r.n, r.dim);
    fill(rng, r.factor, r.n, 1);
    memcpy(r.b, r.a, bytes);
    return r;
}

static void free_rows(struct rows *r)
{
    kvt_guarded_free(r->a);
    kvt_guarded_free(r->b);
    kvt_guarded_free(r->factor);
}

static void check_hadamard(const struct pair *p, struct kvt_rng *rng)
{
    struct rows r = two_copies(rng);
    const uint32_t *before = kvt_below(rng, 2) ? kvq_signs_before : NULL;
    const uint32_t *after = kvt_below(rng, 2) ? kvq_signs_after : NULL;
    p->c->hadamard(r.a, r.n, r.dim, before, after);
    p->k->hadamard(r.b, r.n, r.dim, before, after);
    assert_memory_equal(r.a, r.b, sizeof(float) * r.n * r.dim);
    free_rows(&r);
}

typedef void sums_fn(const float *rows, uint32_t n, uint32_t dim, float *sums);

static void compare_row_sums(sums_fn *c, sums_fn *k, struct kvt_rng *rng)
{
    struct rows r = two_copies(rng);
    float *sums = kvt_guarded(sizeof(float) * r.n, 0);
    c(r.a, r.n, r.dim, sums);
    k(r.b, r.n, r.dim, r.factor);
    assert_memory_equal(sums, r.factor, sizeof(float) * r.n);
    kvt_guarded_free(sums);
    free_rows(&r);
}

static void check_sumsq(const struct pair *p, struct kvt_rng *rng)
{
    compare_row_sums(p->c->sumsq, p->k->sumsq, rng);
}

static void check_sum_abs(const struct pair *p, struct kvt_rng *rng)
{
    compare_row_sums(p->c->sum_abs, p->k->sum_abs, rng);
}

static void check_sum_columns(const struct pair *p, struct kvt_rng *rng)
{
    struct rows r = two_copies(rng);
    bool left_out[70];
    float *a = kvt_guarded(sizeof *a * r.dim, 0), *b = kvt_guarded(sizeof *b * r.dim, 0);
    for (uint32_t i = 0; i < r.n; i++)
        left_out[i] = kvt_below(rng, 4) == 0;
    p->c->sum_columns(r.a, r.n, r.dim, left_out, a);
    p->k->sum_columns(r.b, r.n, r.dim, left_out, b);
    assert_memory_equal(a, b, sizeof *a * r.dim);
    kvt_guarded_free(a);
    kvt_guarded_free(b);
    free_rows(&r);
}

static void check_scale_rows(const struct pair *p, struct kvt_rng *rng)
{
    struct rows r = two_copies(rng);
    p->c->scale_rows(r.a, r.factor, r.n, r.dim);
    p->k->scale_rows(r.b, r.factor, r.n, r.dim);
    assert_memory_equal(r.a, r.b, sizeof(float) * r.n * r.dim);
    free_rows(&r);
}

static void check_scale_columns(const struct pair *p, struct kvt_rng *rng)
{
    struct rows r = two_copies(rng);
    float *factor = kvt_guarded(sizeof *factor * r.dim, 0);
    fill(rng, factor, 1, r.dim);
    p->c->scale_columns(r.a, factor, r.n, r.dim);
    p->k->scale_columns(r.b, factor, r.n, r.dim);
    assert_memory_equal(r.a, r.b, sizeof(float) * r.n * r.dim);
    kvt_guarded_free(factor);
    free_rows(&r);
}

static void check_blend_rows(const struct pair *p, struct kvt_rng *rng)
{
    struct rows r = two_copies(rng);
    float *other = kvt_guarded(sizeof(float) * r.n * r.dim, 0);
    fill(rng, other, r.n, r.dim);
    for (size_t i = 0; i < (size_t)r.n * r.dim; i++)
        other[i] = fabsf(other[i]) > 1e3f ? 1e3f : other[i];
    float *fb = kvt_guarded(sizeof(float) * r.n, 0);
    kvt_fill(rng, KVT_NORMAL, fb, r.n, 1);
    float *start = kvt_guarded(sizeof(float) * r.n * r.dim, 0);
    memcpy(start, r.a, sizeof(float) * r.n * r.dim);
    p->c->blend_rows(r.a, r.factor, other, fb, r.n, r.dim);
    p->k->blend_rows(r.b, r.factor, other, fb, r.n, r.dim);
    for (size_t i = 0; i < (size_t)r.n * r.dim; i++)
        assert_close(r.b[i], r.a[i],
                     fabsf(start[i] * r.factor[i / r.dim]) + fabsf(other[i] * fb[i / r.dim]));
    kvt_guarded_free(start);
    kvt_guarded_free(other);
    kvt_guarded_free(fb);
    free_rows(&r);
}

// ---- Groups ----

// A codec whose K (or V) is of the pair's kind.
static struct kvq__codec any_codec(const struct pair *p, struct kvt_rng *rng, uint32_t rows, bool v)
{
    for (int tries = 0; tries < 10000; tries++) {
        struct kvq_shape s =
            kvt_shape(rows, 1, any_dim(rng), kvt_below(rng, 2) ? KVQ_F16 : KVQ_BF16);
        const struct kvq_format *f = kvt_format(kvt_any_format(rng));
        if (kvq_is_raw(f))
            continue;
        struct kvq__codec c = kvq__codec_of(f, &s, kvt_book(f, &s), 0);
        const struct kvq__side *side = v ? &c.v : &c.k;
        if (p->kind < 0 || side->kind == p->kind)
            return c;
    }
    fail_msg("none of kvt_any_format's has %s of kind %d", v ? "V" : "K", p->kind);
    return (struct kvq__codec){0};
}

static void set_norms(struct kvt_rng *rng, const struct kvq__codec *c, uint8_t *record)
{
    uint8_t *group = kvq_packed_at(&c->layout, record, 0).group;
    uint16_t *norms = (uint16_t *)(void *)(group + c->layout.k_norms);
    for (int t = 0; t < KVQ_GROUP_TOKENS && c->has_norms; t++)
        norms[t] = kvq__f32_to_f16(0.1f + 8.0f * fabsf(kvt_normal(rng)));
}

// A record with a first group of normal numbers.
static uint8_t *any_record(struct kvt_rng *rng, const struct pair *p, const struct kvq__codec *c)
{
    uint8_t *record = kvt_guarded(c->layout.record_bytes, 0);
    float *rows = kvt_guarded(sizeof(float) * KVQ_BLOCK_TOKENS * c->dim, 0);
    enum kvt_kind kind = (enum kvt_kind)kvt_below(rng, KVT_EXTREME);
    kvt_fill(rng, kind, rows, KVQ_BLOCK_TOKENS, c->dim);
    p->c->quant_k[c->k.kind](c, rows, record, 0);
    kvt_fill(rng, kind, rows, KVQ_BLOCK_TOKENS, c->dim);
    p->c->quant_v[c->v.kind](c, rows, record, 0);
    set_norms(rng, c, record);
    kvt_guarded_free(rows);
    return record;
}

static void compare_quant(const struct pair *p, struct kvt_rng *rng, bool v)
{
    struct kvq__codec c = any_codec(p, rng, 1, v);
    const struct kvq__side *side = v ? &c.v : &c.k;
    float *rows = kvt_guarded(sizeof(float) * side->span * c.dim, 0);
    uint8_t *a = kvt_guarded(c.layout.record_bytes, 0), *b = kvt_guarded(c.layout.record_bytes, 0);
    uint32_t first = kvt_below(rng, KVQ_BLOCK_TOKENS / side->span) * side->span / KVQ_GROUP_TOKENS;
    fill(rng, rows, side->span, c.dim);
    (v ? p->c->quant_v : p->c->quant_k)[side->kind](&c, rows, a, first);
    (v ? p->k->quant_v : p->k->quant_k)[side->kind](&c, rows, b, first);
    assert_memory_equal(a, b, c.layout.record_bytes); // untouched parts hold the guard's pattern
    kvt_guarded_free(rows);
    kvt_guarded_free(a);
    kvt_guarded_free(b);
}

static void check_quant_k(const struct pair *p, struct kvt_rng *rng)
{
    compare_quant(p, rng, false);
}

static void check_quant_v(const struct pair *p, struct kvt_rng *rng)
{
    compare_quant(p, rng, true);
}

static void compare_dequant(const struct pair *p, struct kvt_rng *rng, bool v)
{
    struct kvq__codec c = any_codec(p, rng, 1, v);
    size_t n = (size_t)32 * c.dim;
    uint8_t *record = any_record(rng, p, &c), kind = v ? c.v.kind : c.k.kind;
    struct kvq_packed packed = kvq_packed_at(&c.layout, record, 0);
    float *a = kvt_guarded(sizeof(float) * n, 0), *b = kvt_guarded(sizeof(float) * n, 0);
    (v ? p->c->dequant_v : p->c->dequant_k)[kind](&c, &packed, a);
    (v ? p->k->dequant_v : p->k->dequant_k)[kind](&c, &packed, b);
    float largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(a[i]));
    for (size_t i = 0; i < n; i++)
        assert_close(b[i], a[i], largest);
    kvt_guarded_free(record);
    kvt_guarded_free(a);
    kvt_guarded_free(b);
}

static void check_dequant_k(const struct pair *p, struct kvt_rng *rng)
{
    compare_dequant(p, rng, false);
}

static void check_dequant_v(const struct pair *p, struct kvt_rng *rng)
{
    compare_dequant(p, rng, true);
}

// ---- Attention ----

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

static void make_tile(struct bench *b, struct kvq__tile *t, uint32_t rows)
{
    uint32_t dim = b->codec.dim;
    t->codec = &b->codec;
    t->rows = rows;
    t->dim = dim;
    t->q = t->qt = b->q;
    t->logits = floats((size_t)rows * KVQ__LOGITS_STRIDE);
    t->m = floats(KVQ_TILE_ROWS);
    t->l = floats(KVQ_TILE_ROWS);
    t->factor = floats(KVQ_TILE_ROWS);
    t->lo = kvt_guarded(sizeof(int32_t) * KVQ_TILE_ROWS, 0);
    t->hi = kvt_guarded(sizeof(int32_t) * KVQ_TILE_ROWS, 0);
    t->o = floats((size_t)rows * dim);
    t->ot = floats((size_t)rows * dim);
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

static struct bench *make_bench(const struct pair *p, struct kvt_rng *rng, bool v)
{
    struct bench *b = calloc(1, sizeof *b);
    uint32_t rows = any_rows(rng);
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
    make_tile(b, &b->tile[0], rows);
    make_tile(b, &b->tile[1], rows);
    return b;
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

static void check_qk_packed(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    kvq__qk_packed(p->c, &b->tile[0], &b->packed, b->tile[0].logits);
    kvq__qk_packed(p->k, &b->tile[1], &b->packed, b->tile[1].logits);
    p->c->dequant_k[b->codec.k.kind](&b->codec, &b->packed, b->tile[0].group_f32);
    compare_logits(b, 0, 32);
    free_bench(b);
}

// Any rows will do as fp32 keys: those of the group.
static void check_dot_rows(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    p->c->dequant_k[b->codec.k.kind](&b->codec, &b->packed, b->tile[0].group_f32);
    p->c->dot_rows(&b->tile[0], b->q, b->tile[0].group_f32, b->tile[0].logits);
    p->k->dot_rows(&b->tile[1], b->q, b->tile[0].group_f32, b->tile[1].logits);
    compare_logits(b, 0, 32);
    free_bench(b);
}

static void check_qk_raw(const struct pair *p, struct kvt_rng *rng)
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

static void check_softcap(const struct pair *p, struct kvt_rng *rng)
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

static void check_softmax(const struct pair *p, struct kvt_rng *rng)
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

static void compare_sums(const struct bench *b, bool transformed, bool softmax)
{
    const struct kvq__tile *c = &b->tile[0], *k = &b->tile[1];
    const float *a = transformed ? c->ot : c->o, *x = transformed ? k->ot : k->o;
    for (uint32_t r = 0; r < c->rows; r++) {
        float largest = 0;
        for (uint32_t i = 0; i < c->dim; i++)
            largest = fmaxf(largest, fabsf(a[(size_t)r * c->dim + i]));
        largest *= softmax ? softmax_slack(c, r) : 1;
        for (uint32_t i = 0; i < c->dim; i++)
            assert_close(x[(size_t)r * c->dim + i], a[(size_t)r * c->dim + i], largest);
    }
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

static void check_pv_packed(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, true);
    fill_weights(rng, b);
    kvq__pv_packed(p->c, &b->tile[0], &b->packed, b->tile[0].logits);
    kvq__pv_packed(p->k, &b->tile[1], &b->packed, b->tile[1].logits);
    compare_sums(b, true, false);
    compare_sums(b, false, false);
    free_bench(b);
}

static void check_sum_rows(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    fill_weights(rng, b);
    p->c->dequant_k[b->codec.k.kind](&b->codec, &b->packed, b->tile[0].group_f32);
    p->c->sum_rows(&b->tile[0], b->tile[0].logits, b->tile[0].group_f32, b->tile[0].ot);
    p->k->sum_rows(&b->tile[1], b->tile[1].logits, b->tile[0].group_f32, b->tile[1].ot);
    compare_sums(b, true, false);
    compare_sums(b, false, false);
    free_bench(b);
}

static void check_pv_raw(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    uint32_t to = 1 + kvt_below(rng, 32), from = kvt_below(rng, to);
    fill_weights(rng, b);
    p->c->pv_raw(&b->tile[0], b->raw, from, to, b->tile[0].logits);
    p->k->pv_raw(&b->tile[1], b->raw, from, to, b->tile[1].logits);
    compare_sums(b, true, false);
    compare_sums(b, false, false);
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

static void check_attend_chunk(const struct pair *p, struct kvt_rng *rng)
{
    struct bench *b = make_bench(p, rng, false);
    struct kvq__chunk chunk = {.groups = 1 + kvt_below(rng, KVQ__CHUNK_GROUPS)};
    for (uint32_t i = 0; i < chunk.groups; i++) {
        struct kvq__group *g = &chunk.group[i];
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
    any_state(rng, b, chunk.groups * 32);
    for (uint32_t r = 0; r < b->tile[0].rows * b->codec.dim; r++)
        b->q[r] *= 0.02f;
    p->c->attend_chunk(p->c, &b->tile[0], &chunk);
    p->k->attend_chunk(p->k, &b->tile[1], &chunk);
    for (uint32_t r = 0; r < b->tile[0].rows; r++) {
        assert_close(b->tile[1].m[r], b->tile[0].m[r], softmax_slack(&b->tile[0], r));
        assert_close(b->tile[1].l[r], b->tile[0].l[r],
                     b->tile[0].l[r] * softmax_slack(&b->tile[0], r));
    }
    compare_sums(b, true, true);
    compare_sums(b, false, true);
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
    for (uint32_t r = 0; r < c->rows; r++)
        for (uint32_t i = 0; i < KVQ__LOGITS_STRIDE; i++) {
            size_t at = (size_t)r * KVQ__LOGITS_STRIDE + i;
            bool new = !v &&done &&i < chunk.groups *KVQ_GROUP_TOKENS;
            float scale = new ? length(c->q + (size_t)r * c->dim, c->dim) *
                                    length(c->group_f32 + i % KVQ_GROUP_TOKENS * c->dim, c->dim)
                              : 0.0f;
            assert_close(k->logits[at], c->logits[at], scale);
        }
    compare_sums(b, true, false);
    compare_sums(b, false, false);
    free_bench(b);
}

static void check_qk_chunk(const struct pair *p, struct kvt_rng *rng)
{
    compare_chunk(p, rng, false);
}

static void check_pv_chunk(const struct pair *p, struct kvt_rng *rng)
{
    compare_chunk(p, rng, true);
}

// ---- The list ----

#define ENTRY(name)                                                                                \
    {                                                                                              \
#name, offsetof(struct kvq_kernels, name), check_##name, -1                                \
    }
#define ENTRY_OF(name, kind, word)                                                                 \
    {                                                                                              \
#name word, offsetof(struct kvq_kernels, name[kind]), check_##name, kind                   \
    }
#define ENTRIES(name)                                                                              \
    ENTRY_OF(name, KVQ__SCALAR, " scalar"), ENTRY_OF(name, KVQ__PER_CHANNEL_32, " per channel"),   \
        ENTRY_OF(name, KVQ__PER_TOKEN_32, " per token"), ENTRY_OF(name, KVQ__BOOK, " book")

static const struct check entries[] = {
    ENTRY(load),          ENTRY(save),        ENTRY(store),        ENTRY(hadamard),
    ENTRY(sumsq),         ENTRY(sum_abs),     ENTRY(sum_columns),  ENTRY(scale_rows),
    ENTRY(scale_columns), ENTRY(blend_rows),  ENTRY(dot_rows),     ENTRY(sum_rows),
    ENTRIES(quant_k),     ENTRIES(quant_v),   ENTRIES(dequant_k),  ENTRIES(dequant_v),
    ENTRIES(qk_packed),   ENTRIES(pv_packed), ENTRIES(qk_chunk),   ENTRIES(pv_chunk),
    ENTRY(qk_raw),        ENTRY(softcap),     ENTRY(softmax),      ENTRY(pv_raw),
    ENTRY(attend_chunk),  ENTRY(has_fast),    ENTRY(prepare_fast), ENTRY(attend_chunk_fast),
};
enum { CHECKS = sizeof entries / sizeof *entries };

// A function that is added to the table and not to the list stops the build here.
static_assert(sizeof(struct kvq_kernels) ==
                  offsetof(struct kvq_kernels, load) + CHECKS * sizeof(void (*)(void)),
              "an entry of struct kvq_kernels has no check");

// ---- Running ----

enum { ROUNDS = 25 };

// Where AVX-512 runs in software (tests/kernels/simde) the others are not checked once more.
#ifdef KVQ_AVX512_IN_SOFTWARE
enum { LOWEST = KVQ_ISA_AVX512 };
#else
enum { LOWEST = KVQ_ISA_C };
#endif

struct job {
    const struct check *check;
    struct pair pair;
    char name[64];
};

static bool same_entry(const struct job *job)
{
    size_t at = job->check->offset;
    return at && memcmp((const char *)job->pair.c + at, (const char *)job->pair.k + at,
                        sizeof(void (*)(void))) == 0;
}

static void run_job(void **state)
{
    const struct job *job = *state;
    for (uint64_t round = 0; round < ROUNDS && !same_entry(job); round++) {
        struct kvt_rng rng = {.state = kvt_seed() + 1000 * round};
        job->check->run(&job->pair, &rng);
    }
}

static void add_jobs(struct job *jobs, struct CMUnitTest *tests, size_t *n, const struct pair *pair)
{
    for (size_t i = 0; i < CHECKS + n_check_calls; i++, (*n)++) {
        struct job *job = &jobs[*n];
        job->check = i < CHECKS ? &entries[i] : &check_calls[i - CHECKS];
        job->pair = *pair;
        job->pair.kind = job->check->kind;
        snprintf(job->name, sizeof job->name, "%s %s%s", pair->k->name, job->check->name,
                 same_entry(job) ? " (C's own)" : "");
        tests[*n] = (struct CMUnitTest){job->name, run_job, NULL, NULL, job};
    }
}

int main(void)
{
    static struct job jobs[3 * (CHECKS + 16)];
    static struct CMUnitTest tests[3 * (CHECKS + 16)];
    size_t n = 0;
    assert(n_check_calls <= 16);
    struct pair pair = {kvq_kernels_get(KVQ_ISA_C), NULL, -1};
    for (int isa = LOWEST; isa <= KVQ_ISA_AVX512; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        if (k == pair.k)
            continue;
        pair.k = k;
        add_jobs(jobs, tests, &n, &pair);
    }
    return _cmocka_run_group_tests("check", tests, n, NULL, NULL);
}
