// SPDX-License-Identifier: Apache-2.0
//
// Reading a cache back, of every instruction set: what attention sees, in the engine's basis.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "tests/kernels/kvtest.h"

static const float UNTOUCHED = 12345.0f;

static const struct kvq_kernels *all_kernels[KVQ_ISA_BEST + 1];
static int n_kernels;

static void compare_row(const float *got, const double *want, uint32_t dim, double largest)
{
    for (uint32_t c = 0; c < dim; c++)
        if (!(fabs(got[c] - want[c]) <= 2e-6 * largest + 1e-7))
            fail_msg("read %.9g, the oracle has %.9g", (double)got[c], want[c]);
}

// Reads [from, from + n) of every head and compares with the oracle, token by token.
static void check_read(const struct kvt_cache *c, uint64_t from, uint32_t n)
{
    uint32_t dim = c->shape.k_dim;
    struct kvt_request r = kvt_request(c, 1, 1);
    float *k_out = kvt_guarded(sizeof(float) * n * dim, 4);
    float *v_out = kvt_guarded(sizeof(float) * n * dim, 4);
    void *workspace = kvt_workspace();
    for (uint32_t i = 0; i < (uint32_t)n_kernels * c->shape.kv_heads; i++) {
        const struct kvq_kernels *kernels = all_kernels[i / c->shape.kv_heads];
        uint32_t head = i % c->shape.kv_heads, count = 0;
        for (uint32_t j = 0; j < n * dim; j++)
            k_out[j] = v_out[j] = UNTOUCHED;
        struct kvq_reading reading = kvt_reading(c);
        // Pages before the first one that is asked for need not be there.
        reading.first_page = from / KVQ_BLOCK_TOKENS < reading.n_pages && i % 2
                                 ? (uint32_t)(from / KVQ_BLOCK_TOKENS)
                                 : 0;
        reading.pages += reading.first_page;
        reading.n_pages -= reading.first_page;
        uint32_t got = kvq_read_rows(kernels, &reading, from, n, head, k_out, v_out, workspace);
        for (uint32_t t = 0; t < n; t++) {
            double k[KVQ_MAX_HEAD_DIM], v[KVQ_MAX_HEAD_DIM];
            if (kvt_key(&r.a, head, from + t, k, v)) {
                compare_row(k_out + (size_t)t * dim, k, dim, 50.0);
                compare_row(v_out + (size_t)t * dim, v, dim, 50.0);
                count++;
            } else {
                assert_true(k_out[(size_t)t * dim] == UNTOUCHED);
                assert_true(v_out[(size_t)t * dim + dim - 1] == UNTOUCHED);
            }
        }
        assert_int_equal(got, count);
    }
    kvt_guarded_free(k_out);
    kvt_guarded_free(v_out);
    kvt_guarded_free(workspace);
    kvt_request_free(&r);
}

static struct kvt_cache cache_of(const struct kvq_format *f, uint32_t dim, uint8_t rotation)
{
    struct kvq_shape s = kvt_shape(2, 2, dim, f->raw_dtype ? f->raw_dtype : KVQ_F16);
    s.v_rotation = (uint8_t)rotation;
    return kvt_cache(all_kernels[n_kernels - 1], f->name, s, 400, -1, KVT_OUTLIERS, kvt_seed());
}

// Searching 4,096 centroids takes a while.
static bool has_large_book(const struct kvq_format *f)
{
    return (f->k.codec == KVQ_CODEC_BOOK && f->k.bits > 8) ||
           (f->v.codec == KVQ_CODEC_BOOK && f->v.bits > 8);
}

static void test_all_formats(void **state)
{
    (void)state;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        for (uint32_t dim = 64; dim <= (has_large_book(f) ? 64 : 256); dim *= 2)
            for (uint32_t rotation = KVQ_V_ROT_NONE;
                 rotation <= (kvt_has_huge_book(f) ? KVQ_V_ROT_NONE : KVQ_V_ROT_DAEMON);
                 rotation++) {
                struct kvt_cache c = cache_of(f, dim, rotation);
                check_read(&c, 0, 400);
                check_read(&c, 77, 1);
                check_read(&c, 250, 200); // beyond the end
                check_read(&c, 5000, 3);
                kvt_cache_free(&c);
            }
}

static void test_short_and_mixed_pages(void **state)
{
    (void)state;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        struct kvt_cache c = cache_of(f, has_large_book(f) ? 64 : 128, KVQ_V_ROT_DAEMON);
        c.pages[0].tokens = 70;
        c.pages[1].packed_tokens = 45;
        c.pages[2].tokens = 0;
        check_read(&c, 3, 397);
        check_read(&c, 90, 100); // starts where the page holds nothing
        kvt_cache_free(&c);
    }
}

// Sink tokens and outliers come back as they were stored, with and without a raw block.
static void test_without_raw(void **state)
{
    static const char *const names[] = {"kivi-sink2", "ott2", "innerq-hybrid", "ott2-oscar-s64",
                                        "oscar2-s32"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct kvt_cache c = cache_of(kvt_format(names[i]), 64, KVQ_V_ROT_NONE);
        check_read(&c, 0, 400);
        c.pages[0].raw = c.pages[1].raw = NULL;
        check_read(&c, 0, 400);
        check_read(&c, 20, 130);
        kvt_cache_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_formats),
        cmocka_unit_test(test_short_and_mixed_pages),
        cmocka_unit_test(test_without_raw),
    };
    for (int isa = KVQ_ISA_C; isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        if (n_kernels == 0 || k != all_kernels[n_kernels - 1])
            all_kernels[n_kernels++] = k;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
