// SPDX-License-Identifier: Apache-2.0
//
// Sink tokens of one group that come from two places: those below packed_tokens from the extras,
// the others from the raw block, or fresh from the caller.
#include "tests/kits/unit.h"

#include "tests/kernels/kvtest.h"

enum { HEADS = 2, GQA = 3, DIM = 64, TOKENS = 128, QUERIES = 2 };

static struct kvt_cache cache;

static int setup(void **state)
{
    cache = kvt_cache(kvq_kernels_get(KVQ_ISA_C), "kvq2", kvt_shape(GQA, HEADS, DIM, KVQ_F16),
                      TOKENS, -1, KVT_NORMAL, kvt_seed());
    return 0;
}

static int teardown(void **state)
{
    kvt_cache_free(&cache);
    return 0;
}

static void check(struct kvt_request *r)
{
    enum { ROWS = QUERIES * HEADS * GQA };
    double want[ROWS * DIM], lse[ROWS];
    kvt_oracle(&r->a, want, lse);
    for (int isa = KVQ_ISA_C; isa <= KVQ_ISA_BEST; isa++) {
        kvt_attend(kvq_kernels_get(isa), &r->a, 1);
        double error = kvt_rel_error(r->out, want, ROWS, DIM);
        if (!(error < 1e-5))
            fail_msg("%s: off by %.2g", kvq_kernels_isa(kvq_kernels_get(isa)), error);
    }
}

TEST(test_raw_behind_packed)
{
    struct kvt_request r = kvt_request(&cache, QUERIES, kvt_seed());
    struct kvq_store_counts counts = {0};
    const struct kvq_view other = kvt_view(cache.v, HEADS, DIM); // than the extras have
    cache.pages[0].packed_tokens = 16;
    for (uint32_t head = 0; head < HEADS; head++)
        kvq_store(kvq_kernels_get(KVQ_ISA_C), &cache.shape, &other, &other, head, 16, 16, cache.raw,
                  &counts);
    kvt_spoil(&cache.shape, cache.raw, 0, 16);
    check(&r);
    kvt_request_free(&r);
}

TEST(test_fresh_behind_packed)
{
    enum { PAST = 20, FRESH = 4 };
    struct kvt_request r = kvt_request(&cache, QUERIES, kvt_seed());
    cache.pages[0] =
        (struct kvq_page){.packed = cache.blocks, .tokens = PAST, .packed_tokens = PAST};
    r.a.past_tokens = r.a.fresh_start = PAST;
    r.a.step_tokens = r.a.fresh_tokens = FRESH;
    r.a.q_start = PAST + FRESH - QUERIES;
    r.a.fresh_k = kvt_view(cache.k + PAST * HEADS * DIM, HEADS, DIM);
    r.a.fresh_v = kvt_view(cache.v + PAST * HEADS * DIM, HEADS, DIM);
    check(&r);
    kvt_request_free(&r);
}

int main(void)
{
    if (kvt_lacks_amx())
        return 77; // skipped
    return run_all(NULL, NULL);
}
