// SPDX-License-Identifier: Apache-2.0
//
// Rows that are narrower than they are stored, of every instruction set: the same bits as of rows
// with zeros behind, and nothing behind them is read or written.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "tests/kernels/kvtest.h"

enum { TOKENS = 300, GQA = 3, KV_HEADS = 2 };

static const float UNTOUCHED = 12345.0f;

// One case, and what stands behind the first `dim` values of a row.
struct rows {
    uint32_t dim;
    float behind;
    uint64_t seed;
};

static void set_behind(float *x, size_t rows, uint32_t stored, const struct rows *r)
{
    for (size_t i = 0; i < rows; i++)
        for (uint32_t c = r->dim; c < stored; c++)
            x[i * stored + c] = r->behind;
}

static void fill(const void *data, const struct kvq_shape *s, float *k, float *v, uint32_t tokens)
{
    const struct rows *r = data;
    struct kvt_rng rng = {.state = r->seed};
    const uint32_t channels = (uint32_t)s->kv_heads * s->k_dim;
    kvt_fill(&rng, KVT_OUTLIERS, k, tokens, channels);
    kvt_fill(&rng, KVT_OUTLIERS, v, tokens, channels);
    set_behind(k, (size_t)tokens * s->kv_heads, s->k_dim, r);
    set_behind(v, (size_t)tokens * s->kv_heads, s->k_dim, r);
}

// A cache of rows of r->dim: with zeros behind, which the shape counts as part of the row, or with
// NaN, which it does not.
static struct kvt_cache cache_of(const struct kvq_kernels *k, const char *format, struct rows *r,
                                 bool narrow)
{
    const struct kvq_format *f = kvt_format(format);
    struct kvq_shape s = kvt_shape(GQA, KV_HEADS, 64, f->raw_dtype ? f->raw_dtype : KVQ_F16);
    const uint16_t dim = narrow ? (uint16_t)r->dim : kvq_stored_dim(r->dim);
    kvq_shape_set_dims(&s, dim, dim);
    s.v_rotation = KVQ_V_ROT_DAEMON;
    s.scale = 1 / sqrtf((float)r->dim);
    r->behind = narrow ? NAN : 0.0f;
    return kvt_cache_of(k, format, s, TOKENS, -1, fill, r);
}

static struct kvt_request request_of(const struct kvt_cache *c, struct rows *r, uint32_t queries,
                                     uint32_t fresh)
{
    struct kvt_request made = kvt_request(c, queries, r->seed + 1);
    const uint32_t dim = c->shape.k_dim, first = (TOKENS - fresh) * KV_HEADS * dim;
    r->behind = c->shape.head_dim ? NAN : 0.0f;
    set_behind(made.q, (size_t)queries * c->shape.q_heads, dim, r);
    for (size_t i = 0; i < (size_t)queries * c->shape.q_heads * dim; i++)
        made.out[i] = UNTOUCHED;
    if (fresh) {
        made.a.fresh_start = TOKENS - fresh;
        made.a.fresh_tokens = fresh;
        made.a.fresh_k = kvt_view(c->k + first, KV_HEADS, dim);
        made.a.fresh_v = kvt_view(c->v + first, KV_HEADS, dim);
    }
    return made;
}

static void compare_attention(const struct kvq_kernels *k, const struct kvt_cache *wide,
                              const struct kvt_cache *narrow, struct rows *r, uint32_t queries,
                              uint32_t fresh)
{
    const uint32_t stored = wide->shape.k_dim;
    for (uint8_t path = KVQ_PATH_EXACT; path <= KVQ_PATH_FAST; path++) {
        struct kvt_request a = request_of(wide, r, queries, fresh);
        struct kvt_request b = request_of(narrow, r, queries, fresh);
        a.a.path = b.a.path = path;
        kvt_attend(k, &a.a, 1 + queries % 3);
        kvt_attend(k, &b.a, 1 + queries % 3);
        const size_t rows = (size_t)queries * wide->shape.q_heads;
        assert_memory_equal(a.lse, b.lse, rows * sizeof *a.lse);
        for (size_t i = 0; i < rows; i++) {
            const float *want = a.out + i * stored, *got = b.out + i * stored;
            assert_memory_equal(got, want, r->dim * sizeof *got);
            assert_true(isfinite(got[0]));
            for (uint32_t c = r->dim; c < stored; c++)
                assert_true(got[c] == UNTOUCHED && fabsf(want[c]) < 1e6f);
        }
        kvt_request_free(&a);
        kvt_request_free(&b);
    }
}

static void check_rows(const struct kvq_kernels *k, const char *format, uint32_t dim)
{
    struct rows r = {.dim = dim, .seed = kvt_seed() + dim};
    struct kvt_cache wide = cache_of(k, format, &r, false), narrow = cache_of(k, format, &r, true);
    struct kvq_raw_layout raw = kvq_raw_layout_of(&wide.shape);
    struct kvq_layout l = kvq_layout_of(wide.format, &wide.shape);
    assert_int_equal(wide.shape.head_dim, 0);
    assert_int_equal(narrow.shape.head_dim, dim);
    assert_int_equal(kvq_row_dim(&narrow.shape), dim);
    assert_int_equal(narrow.shape.k_dim, wide.shape.k_dim);
    // Blocks whose tokens are all there: where nobody stored, they hold what was there before.
    assert_memory_equal(wide.raw, narrow.raw, 2 * kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS));
    assert_memory_equal(wide.blocks, narrow.blocks, 2 * kvq_block_bytes(&l, &wide.shape));
    compare_attention(k, &wide, &narrow, &r, 1, 0);
    compare_attention(k, &wide, &narrow, &r, 1, 1);
    compare_attention(k, &wide, &narrow, &r, 37, 37);
    kvt_cache_free(&wide);
    kvt_cache_free(&narrow);
}

static void test_rows(void **state)
{
    static const char *const formats[] = {"f16",   "bf16",          "oscar2",     "oscar3", "kvq2",
                                          "kivi2", "innerq-hybrid", "vecinfer-2", "ott2"};
#ifdef KVQ_AVX512_IN_SOFTWARE
    static const uint32_t dims[] = {50, 96, 255};
#else
    static const uint32_t dims[] = {1, 16, 50, 80, 96, 100, 112, 160, 255};
#endif
    const struct kvq_kernels *last = NULL;
    (void)state;
    for (int isa = kvt_lowest_isa(KVQ_ISA_C); isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        for (size_t f = 0; k != last && f < sizeof formats / sizeof *formats; f++)
            for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
                check_rows(k, formats[f], dims[d]);
        last = k;
    }
}

// ---- Dims ----

static void test_dims(void **state)
{
    struct kvq_shape s = kvt_shape(4, 8, 128, KVQ_F16);
    char text[200];
    (void)state;
    for (uint16_t dim = 0; dim <= 300; dim++) {
        uint16_t stored = dim == 0 || dim > 256 ? 0 : dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
        kvq_shape_set_dims(&s, dim, dim);
        assert_int_equal(kvq_stored_dim(dim), stored);
        assert_int_equal(kvq_row_dim(&s), dim);
        assert_int_equal(s.k_dim, stored ? stored : dim);
        assert_int_equal(kvq_shape_check(&s, kvt_format("oscar2"), text, sizeof text) == 0,
                         stored != 0);
    }
    kvq_shape_set_dims(&s, 96, 80); // nor are these any
    assert_true(s.k_dim == 96 && s.v_dim == 80 && s.head_dim == 0);
    struct kvq_shape other = s;
    kvq_shape_set_dims(&s, 96, 96);
    kvq_shape_set_dims(&other, 112, 112);
    assert_false(kvq_shape_same(&s, &other));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_dims),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
