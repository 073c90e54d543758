// SPDX-License-Identifier: Apache-2.0
//
// The checker's whole calls: storing, packing, attending and reading with one instruction set,
// compared with C on the same input, in random shapes; and the fast path, where there is one.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/kernels/check.h"

static const double EXACT = 1e-5; // of the largest value of a row
static const double FAST = 0.05;  // of the length of all outputs; 2-bit noise itself is about 0.35

static const char *any_format(struct kvt_rng *rng, uint8_t dtype)
{
    const char *name = kvt_any_format(rng);
    bool raw = kvq_is_raw(kvt_format(name));
    return !raw ? name : dtype == KVQ_F16 ? "f16" : "bf16";
}

static struct kvq_shape any_shape(struct kvt_rng *rng)
{
    static const uint32_t gqas[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32};
    struct kvq_shape s = kvt_shape(gqas[kvt_below(rng, 11)], 1 + kvt_below(rng, 3),
                                   64u << kvt_below(rng, 3), KVQ_F16 + (uint8_t)kvt_below(rng, 2));
    s.v_rotation = (uint8_t)kvt_below(rng, 3);
    s.window = kvt_below(rng, 3) ? 0 : 1 + kvt_below(rng, 600);
    s.softcap = kvt_below(rng, 3) ? 0.0f : 20.0f;
    return s;
}

// ---- Storing ----

// A tensor with odd strides, aligned to its dtype only.
static uint8_t *odd_tensor(struct kvt_rng *rng, struct kvq_view *view, uint32_t tokens,
                           const struct kvq_shape *s)
{
    uint8_t dtype = KVQ_F16 + (uint8_t)kvt_below(rng, 3);
    size_t size = dtype == KVQ_F32 ? 4 : 2, row = s->k_dim * size;
    view->dtype = dtype;
    view->head_stride = (int64_t)(row + size * kvt_below(rng, 3));
    view->token_stride = view->head_stride * s->kv_heads + (int64_t)(size * kvt_below(rng, 5));
    uint8_t *data = kvt_guarded((size_t)view->token_stride * tokens, size);
    for (size_t i = 0; i < (size_t)view->token_stride * tokens; i++)
        data[i] = (uint8_t)kvt_u64(rng);
    view->data = data;
    return data;
}

static void check_store_call(const struct pair *p, struct kvt_rng *rng)
{
    struct kvq_shape s = any_shape(rng);
    struct kvq_raw_layout raw = kvq_raw_layout_of(&s);
    uint32_t slot = kvt_below(rng, 128), n = kvt_below(rng, 129 - slot);
    struct kvq_view k, v;
    uint8_t *dk = odd_tensor(rng, &k, n, &s), *dv = odd_tensor(rng, &v, n, &s);
    uint8_t *a = kvt_guarded(kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS), 0),
            *b = kvt_guarded(kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS), 0);
    struct kvq_store_counts ca = {0}, cb = {0};
    kvq_store(p->c, &s, &k, &v, s.kv_heads - 1, slot, n, a, &ca);
    kvq_store(p->k, &s, &k, &v, s.kv_heads - 1, slot, n, b, &cb);
    assert_memory_equal(&ca, &cb, sizeof ca);
    for (size_t i = 0; i < kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS) / 2; i++)
        assert_true(memcmp(a + 2 * i, b + 2 * i, 2) == 0 ||
                    (is_nan(a, s.dtype, i) && is_nan(b, s.dtype, i)));
    kvt_guarded_free(dk);
    kvt_guarded_free(dv);
    kvt_guarded_free(a);
    kvt_guarded_free(b);
}

// ---- Packing and reading ----

static void check_pack_call(const struct pair *p, struct kvt_rng *rng)
{
    struct kvq_shape s = any_shape(rng);
    const char *format = any_format(rng, s.dtype);
    enum kvt_kind kind = (enum kvt_kind)kvt_below(rng, KVT_KINDS);
    uint64_t seed = kvt_u64(rng);
    struct kvt_cache a = kvt_cache(p->c, format, s, 256, -1, kind, seed);
    struct kvt_cache b = kvt_cache(p->k, format, s, 256, -1, kind, seed);
    struct kvq_raw_layout raw = kvq_raw_layout_of(&s);
    struct kvq_layout l = kvq_layout_of(a.format, &s);
    assert_memory_equal(a.raw, b.raw, 2 * kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS));
    assert_memory_equal(a.blocks, b.blocks, 2 * kvq_block_bytes(&l, &s));
    kvt_cache_free(&a);
    kvt_cache_free(&b);
}

static void assert_rows_close(const float *got, const float *want, size_t rows, size_t dim,
                              double limit)
{
    double *wide = malloc(sizeof(double) * (rows * dim + 1));
    for (size_t i = 0; i < rows * dim; i++)
        wide[i] = want[i];
    double error = kvt_rel_error(got, wide, rows, dim);
    if (!(error <= limit))
        fail_msg("relative difference from C is %g, at most %g is allowed", error, limit);
    free(wide);
}

static void check_read_call(const struct pair *p, struct kvt_rng *rng)
{
    struct kvq_shape s = any_shape(rng);
    struct kvt_cache c =
        kvt_cache(p->c, any_format(rng, s.dtype), s, 300, -1, KVT_OUTLIERS, kvt_u64(rng));
    uint32_t from = kvt_below(rng, 300), n = kvt_below(rng, 320), head = kvt_below(rng, s.kv_heads);
    size_t bytes = sizeof(float) * n * s.k_dim;
    float *out[4];
    void *w = kvt_workspace();
    for (int i = 0; i < 4; i++)
        memset(out[i] = kvt_guarded(bytes, 4), 0, bytes);
    struct kvq_reading reading = kvt_reading(&c);
    uint32_t a = kvq_read_rows(p->c, &reading, from, n, head, out[0], out[1], w);
    uint32_t b = kvq_read_rows(p->k, &reading, from, n, head, out[2], out[3], w);
    assert_int_equal(a, b);
    assert_int_equal(a, from + n < 300 ? n : 300 - from);
    assert_rows_close(out[2], out[0], n, s.k_dim, EXACT);
    assert_rows_close(out[3], out[1], n, s.k_dim, EXACT);
    for (int i = 0; i < 4; i++)
        kvt_guarded_free(out[i]);
    kvt_guarded_free(w);
    kvt_cache_free(&c);
}

// ---- Attending ----

struct attending {
    struct kvt_cache c;
    struct kvt_request r[2];
    size_t rows;
};

static struct attending make_attending(const struct pair *p, struct kvt_rng *rng,
                                       const struct kvq_shape *s)
{
    struct attending at;
    uint32_t q = kvt_below(rng, 2) ? 1 : 1 + kvt_below(rng, 80);
    const char *name = any_format(rng, s->dtype);
    const struct kvq_format *f = kvt_format(name);
    bool book = kvq_has_centroids(f);
    // Long contexts, with several chunks a split, where they are cheap.
    bool cheap = q == 1 && (uint32_t)s->q_heads * s->k_dim <= 512 && !book;
    uint32_t tokens = 1 + kvt_below(rng, cheap ? 20000 : 1500);
    uint64_t seed = kvt_u64(rng);
    if (q > tokens)
        q = tokens;
    at.c = kvt_cache(p->c, name, *s, tokens, -1, KVT_NORMAL, seed);
    at.r[0] = kvt_request(&at.c, q, seed + 1);
    at.r[1] = kvt_request(&at.c, q, seed + 1);
    at.rows = (size_t)q * s->q_heads;
    at.r[0].a.flags = at.r[1].a.flags = kvt_below(rng, 4) ? 0 : KVQ_ATTEND_PAST_ONLY;
    return at;
}

static void free_attending(struct attending *at)
{
    kvt_request_free(&at->r[0]);
    kvt_request_free(&at->r[1]);
    kvt_cache_free(&at->c);
}

// The struct moves when it is returned, and the requests point at its shape.
static void point(struct attending *at)
{
    at->r[0].a.shape = at->r[1].a.shape = &at->c.shape;
}

static void check_attend_call(const struct pair *p, struct kvt_rng *rng)
{
    struct kvq_shape s = any_shape(rng);
    struct attending at = make_attending(p, rng, &s);
    point(&at);
    kvt_attend(p->c, &at.r[0].a, 1);
    kvt_attend(p->k, &at.r[1].a, 1 + kvt_below(rng, 20));
    assert_rows_close(at.r[1].out, at.r[0].out, at.rows, s.k_dim, EXACT);
    for (size_t i = 0; i < at.rows; i++)
        assert_true(at.r[0].lse[i] == at.r[1].lse[i] ||
                    fabsf(at.r[0].lse[i] - at.r[1].lse[i]) <= 1e-5f * fmaxf(1, at.r[0].lse[i]));
    free_attending(&at);
}

// A query with NaN gives NaN; the others give the bits that they give without it.
static void check_attend_nan(const struct pair *p, struct kvt_rng *rng)
{
    struct kvq_shape s = any_shape(rng);
    struct attending at = make_attending(p, rng, &s);
    point(&at);
    at.r[0].a.path = at.r[1].a.path = kvt_below(rng, 2) ? KVQ_PATH_FAST : KVQ_PATH_EXACT;
    uint32_t spoilt = kvt_below(rng, (uint32_t)at.rows), dim = s.k_dim;
    at.r[1].q[spoilt * dim + kvt_below(rng, dim)] = NAN;
    kvt_attend(p->k, &at.r[0].a, 1);
    kvt_attend(p->k, &at.r[1].a, 1);
    for (size_t i = 0; i < at.rows; i++) {
        const float *want = at.r[0].out + i * dim, *got = at.r[1].out + i * dim;
        if (i != spoilt || at.r[0].lse[i] == -INFINITY) { // or sees nothing
            assert_memory_equal(got, want, sizeof *got * dim);
            assert_memory_equal(&at.r[1].lse[i], &at.r[0].lse[i], sizeof(float));
            continue;
        }
        assert_true(isnan(at.r[1].lse[i]));
        for (uint32_t e = 0; e < dim; e++)
            assert_true(isnan(got[e]));
    }
    free_attending(&at);
}

// Keys and values of any size must not end in a crash or in what C does not give.
static void check_attend_extreme(const struct pair *p, struct kvt_rng *rng)
{
    struct kvq_shape s = any_shape(rng);
    struct kvt_cache c =
        kvt_cache(p->c, any_format(rng, s.dtype), s, 300, -1, KVT_EXTREME, kvt_u64(rng));
    struct kvt_request r = kvt_request(&c, 2, kvt_u64(rng));
    kvt_attend(p->k, &r.a, 1);
    for (size_t i = 0; i < (size_t)2 * s.q_heads * s.k_dim; i++)
        assert_true(isfinite(r.out[i]));
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

// ---- The fast path ----

void check_has_fast(const struct pair *p, struct kvt_rng *rng)
{
    (void)rng;
    assert_non_null(p->k->prepare_fast);
    assert_non_null(p->k->attend_chunk_fast);
}

// Preparing must leave all but the scratch as it is; the guards see to what lies around it.
void check_prepare_fast(const struct pair *p, struct kvt_rng *rng)
{
    uint32_t dim = 64u << kvt_below(rng, 3), rows = 1 + kvt_below(rng, KVQ_TILE_ROWS);
    struct kvq_shape s = kvt_shape(1, 1, dim, KVQ_F16);
    struct kvq__codec codec = kvq__codec_of(kvq_format_by_name("oscar2"), &s, NULL, 0);
    size_t bytes = sizeof(float) * rows * dim;
    float *q = kvt_guarded(bytes, 0), *copy = kvt_guarded(bytes, 0);
    void *scratch = kvt_guarded(KVQ__SCRATCH_BYTES, 0);
    kvt_fill(rng, (enum kvt_kind)kvt_below(rng, KVT_KINDS), q, rows, dim);
    memcpy(copy, q, bytes);
    struct kvq__tile tile = {.codec = &codec, .rows = rows, .dim = dim, .q = q, .qt = q};
    tile.scratch = scratch;
    if (p->k->has_fast(&codec, rows))
        p->k->prepare_fast(&tile);
    assert_memory_equal(q, copy, bytes);
    kvt_guarded_free(q);
    kvt_guarded_free(copy);
    kvt_guarded_free(scratch);
}

// Root of the summed squares of differences, relative to that of C's outputs.
static double l2_error(const float *got, const float *want, size_t n)
{
    double difference = 0, all = 1e-30;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        all += (double)want[i] * want[i];
    }
    return sqrt(difference / all);
}

void check_attend_chunk_fast(const struct pair *p, struct kvt_rng *rng)
{
    struct kvq_shape s = any_shape(rng);
    struct attending at = make_attending(p, rng, &s);
    point(&at);
    at.r[1].a.path = KVQ_PATH_FAST;
    kvt_attend(p->c, &at.r[0].a, 1);
    kvt_attend(p->k, &at.r[1].a, 1);
    double error = l2_error(at.r[1].out, at.r[0].out, at.rows * s.k_dim);
    if (!(error <= FAST))
        fail_msg("the fast path is %g off, at most %g is allowed", error, FAST);
    for (size_t i = 0; i < at.rows; i++)
        assert_true(at.r[0].lse[i] == at.r[1].lse[i] ||
                    fabsf(at.r[0].lse[i] - at.r[1].lse[i]) <= 0.05f);
    free_attending(&at);
}

const struct check check_calls[] = {
    {"kvq_store", 0, check_store_call, -1},    {"kvq_pack", 0, check_pack_call, -1},
    {"kvq_read_rows", 0, check_read_call, -1}, {"kvq_attend", 0, check_attend_call, -1},
    {"NaN in q", 0, check_attend_nan, -1},     {"extremes", 0, check_attend_extreme, -1},
};
const size_t n_check_calls = sizeof check_calls / sizeof *check_calls;
