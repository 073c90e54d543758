// SPDX-License-Identifier: Apache-2.0
//
// AVX2's fast path is there twice: by vpmaddubsw, whose sums must not overflow 16 bits, and by
// AVX-VNNI's vpdpbusd. Both give the same bits, whatever the format and the number of query rows,
// also where all codes and weights are as large as they get. The second is compiled here over plain
// C; where the CPU has the instruction, all other tests of AVX2's fast path run it.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/internal.h"
#include "tests/kernels/kvtest.h"

enum { TOKENS = 1200, QUERIES = 2 };

static struct kvq_kernels words, vnni; // by vpmaddubsw, by vpdpbusd

// Random rows; or one row and its opposite by turns, whose codes are all 0 or the largest.
static void fill(const void *data, const struct kvq_shape *s, float *k, float *v, uint32_t tokens)
{
    struct kvt_rng rng = {.state = kvt_seed()};
    kvt_fill(&rng, KVT_NORMAL, k, tokens, s->k_dim);
    kvt_fill(&rng, KVT_NORMAL, v, tokens, s->k_dim);
    for (uint32_t t = 0; *(const bool *)data && t < tokens; t++)
        for (uint32_t c = 0; c < s->k_dim; c++) {
            k[t * s->k_dim + c] = t % 2 ? -3.0f : 3.0f;
            v[t * s->k_dim + c] = c % 2 ? -3.0f : 3.0f;
        }
}

static void compare(const char *format, uint32_t dim, uint32_t gqa, bool largest)
{
    struct kvq_shape shape = kvt_shape(gqa, 1, dim, KVQ_F16);
    struct kvt_cache c = kvt_cache_of(&words, format, shape, TOKENS, -1, fill, &largest);
    struct kvt_request r = kvt_request(&c, QUERIES, kvt_seed());
    size_t rows = (size_t)QUERIES * gqa, n = rows * dim;
    for (size_t i = 0; largest && i < n; i++)
        r.q[i] = 0.01f;
    float *out = malloc(n * sizeof *out), *lse = malloc(rows * sizeof *lse);
    assert_true(out && lse);
    r.a.path = KVQ_PATH_FAST;
    kvt_attend(&words, &r.a, 1);
    memcpy(out, r.out, n * sizeof *out);
    memcpy(lse, r.lse, rows * sizeof *lse);
    memset(r.out, 0, n * sizeof *r.out);
    kvt_attend(&vnni, &r.a, 1);
    if (memcmp(out, r.out, n * sizeof *out) != 0 || memcmp(lse, r.lse, rows * sizeof *lse) != 0)
        fail_msg("%s at head_dim %u with %u rows differs%s", format, dim, (uint32_t)rows,
                 largest ? ", all codes 0 or the largest" : "");
    free(out);
    free(lse);
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

static void test_same_bits(void **state)
{
    static const char *const formats[] = {"oscar2", "oscar3", "oscar4", "kivi2", "kivi4", "kvq2"};
    (void)state;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        for (uint32_t dim = 64; dim <= KVQ_MAX_HEAD_DIM; dim *= 2)
            for (uint32_t gqa = 1; gqa <= 3; gqa++) {
                compare(formats[i], dim, gqa, false);
                compare(formats[i], dim, gqa, true);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_bits)};
    const struct kvq_kernels *k = kvq_kernels_get(KVQ_ISA_AVX2);
    if (strcmp(kvq_kernels_isa(k), "avx2") != 0) {
        printf("the CPU lacks AVX2\n");
        return 77;
    }
    words = vnni = *k;
    kvq__init_avx2_bytes(&words);
    kvq__init_avxvnni_bytes(&vnni);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
