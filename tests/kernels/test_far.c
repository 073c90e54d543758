// SPDX-License-Identifier: Apache-2.0
//
// Tokens that are far from all others of their group of keys: the exact path is as exact for the
// others as without them, on every instruction set, and which rows share a tile changes no bit.
#include "tests/kits/unit.h"

#include "tests/kernels/kvtest.h"

enum { TOKENS = 512, HEADS = 8, APART = 64, DIMS = 3 };

static const struct kvq_kernels *all_kernels[KVQ_ISA_BEST + 1];
static int n_kernels;

// N(0, 1), but for one token of 64, all of whose channels are what `data` says.
static void fill_far(const void *data, const struct kvq_shape *s, float *k, float *v,
                     uint32_t tokens)
{
    struct kvt_rng rng = {.state = kvt_seed()};
    kvt_fill(&rng, KVT_NORMAL, k, tokens, s->k_dim);
    kvt_fill(&rng, KVT_NORMAL, v, tokens, s->k_dim);
    for (uint32_t t = 7; t < tokens; t += APART)
        for (uint32_t c = 0; c < s->k_dim; c++)
            k[t * s->k_dim + c] = *(const float *)data;
}

// Each row alone, whose tile mates have other queries.
static void expect_same_alone(const struct kvq_kernels *k, struct kvt_request *r, uint32_t dim)
{
    float q[HEADS * 256], out[HEADS * 256];
    memcpy(q, r->q, HEADS * dim * sizeof *q);
    memcpy(out, r->out, HEADS * dim * sizeof *out);
    for (uint32_t own = 0; own < HEADS; own++) {
        for (uint32_t i = 0; i < HEADS * dim; i++)
            r->q[i] = i / dim == own ? q[i] : q[i] * 1e-3f;
        kvt_attend(k, &r->a, 1);
        assert_memory_equal(r->out + own * dim, out + own * dim, dim * sizeof *out);
    }
    memcpy(r->q, q, HEADS * dim * sizeof *q);
}

static void check_far(const char *format, uint32_t dim, float far)
{
    struct kvt_cache c = kvt_cache_of(all_kernels[0], format, kvt_shape(HEADS, 1, dim, KVQ_F16),
                                      TOKENS, -1, fill_far, &far);
    struct kvt_request r = kvt_request(&c, 1, kvt_seed());
    double want[HEADS * 256], lse[HEADS];
    for (uint32_t i = 0; i < HEADS * dim; i++)
        r.q[i] += 0.3f; // they see the far tokens against them
    kvt_oracle(&r.a, want, lse);
    for (int i = 0; i < n_kernels; i++) {
        kvt_attend(all_kernels[i], &r.a, 1);
        double error = kvt_rel_error(r.out, want, HEADS, dim);
        if (!(error < 1e-5))
            fail_msg("%s %s, head_dim %u, keys of %g: off by %.2g", kvq_kernels_isa(all_kernels[i]),
                     format, dim, (double)far, error);
        expect_same_alone(all_kernels[i], &r, dim);
    }
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

// Rotated, such a token is one strong channel, for which the rotation of queries is not exact
// enough: at 30,000 no path is.
PLAIN_TEST(test_far_keys)
{
    static const char *const names[] = {"kivi2", "kivi4", "oscar4-noscale", "oscar2", "kvq2"};
    static const float far[] = {-10, -100, -1000, -30000};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        for (uint32_t i = 0; i < DIMS; i++)
            for (size_t m = 0; m < (n < 2 ? 4 : 3); m++)
                check_far(names[n], 64u << i, far[m]);
}

int main(void)
{
    if (kvt_lacks_amx())
        return 77; // skipped
    for (int isa = KVQ_ISA_C; isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        if (n_kernels == 0 || k != all_kernels[n_kernels - 1])
            all_kernels[n_kernels++] = k;
    }
    return run_all(NULL, NULL);
}
