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

// Fills n floats with numbers of a random kind.
static void fill(struct kvt_rng *rng, float *x, uint32_t rows, uint32_t dim)
{
    kvt_fill(rng, (enum kvt_kind)kvt_below(rng, KVT_KINDS), x, rows, dim);
}

static uint32_t any_dim(struct kvt_rng *rng)
{
    return 64u << kvt_below(rng, 3);
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
struct kvq__codec any_codec(const struct pair *p, struct kvt_rng *rng, uint32_t rows, bool v)
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
uint8_t *any_record(struct kvt_rng *rng, const struct pair *p, const struct kvq__codec *c)
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
        ENTRY_OF(name, KVQ__PER_TOKEN_32, " per token"),                                           \
        ENTRY_OF(name, KVQ__PER_CHANNEL, " per channel of more"),                                  \
        ENTRY_OF(name, KVQ__FOUR_LEVELS, " four levels"), ENTRY_OF(name, KVQ__BOOK, " book")

static const struct check entries[] = {
    ENTRY(load),
    ENTRY(save),
    ENTRY(store),
    ENTRY(hadamard),
    ENTRY(sumsq),
    ENTRY(sum_abs),
    ENTRY(sum_columns),
    ENTRY(scale_rows),
    ENTRY(scale_columns),
    ENTRY(blend_rows),
    ENTRY(dot_rows),
    ENTRY(sum_rows),
    ENTRIES(quant_k),
    ENTRIES(quant_v),
    ENTRIES(dequant_k),
    ENTRIES(dequant_v),
    ENTRIES(qk_packed),
    ENTRIES(pv_packed),
    ENTRIES(qk_chunk),
    ENTRIES(pv_chunk),
    ENTRY(qk_raw),
    ENTRY(softcap),
    ENTRY(softmax),
    ENTRY(pv_raw),
    ENTRY(attend_chunk),
    ENTRY(attend_chunk_tall),
    ENTRY(has_fast),
    ENTRY(prepare_fast),
    ENTRY(attend_chunk_fast),
};
enum { CHECKS = sizeof entries / sizeof *entries };

// A function that is added to the table and not to the list stops the build here.
static_assert(sizeof(struct kvq_kernels) ==
                  offsetof(struct kvq_kernels, load) + CHECKS * sizeof(void (*)(void)),
              "an entry of struct kvq_kernels has no check");

// ---- Running ----

enum { ROUNDS = 25 };

struct job {
    const struct check *check;
    struct pair pair;
    char name[64];
};

// The function is that of the instruction set below, C's at last, and has been checked there.
static bool same_entry(const struct job *job)
{
    const char *k = (const char *)job->pair.k;
    const char *below = (const char *)kvq_kernels_get(job->pair.k->isa - 1);
    size_t at = job->check->offset;
    return at && memcmp(below + at, k + at, sizeof(void (*)(void))) == 0;
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
        snprintf(job->name, sizeof job->name, "%s %s%s", kvq_kernels_isa(pair->k), job->check->name,
                 same_entry(job) ? " (not its own)" : "");
        tests[*n] = (struct CMUnitTest){job->name, run_job, NULL, NULL, job};
    }
}

int main(void)
{
    static struct job jobs[4 * (CHECKS + 16)];
    static struct CMUnitTest tests[4 * (CHECKS + 16)];
    size_t n = 0;
    assert(n_check_calls <= 16);
    struct pair pair = {kvq_kernels_get(KVQ_ISA_C), NULL, -1};
    if (kvt_lacks_amx())
        return 77; // skipped
    for (int isa = kvt_lowest_isa(KVQ_ISA_C); isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        if (k == pair.k)
            continue;
        pair.k = k;
        add_jobs(jobs, tests, &n, &pair);
    }
    return _cmocka_run_group_tests("check", tests, n, NULL, NULL);
}
