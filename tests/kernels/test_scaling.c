// SPDX-License-Identifier: Apache-2.0
//
// How batches are cut into items, and what that leaves for threads to do: the real plans, on
// threads that exist on paper alone. Each takes the next item when it is free, and an item takes as
// long as its tokens, KV heads and queries say. Prints the share of the threads' time that is
// spent on items, and fails where it falls below what is written beside a batch.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/kernels/kvtest.h"

enum {
    MOST_SESSIONS = 256,
    MOST_THREADS = 64,
    // In tokens of one KV head and query, of which a microsecond holds about 60 on the fast path of
    // one thread: what an item costs besides, and what merging one partial does.
    ITEM_COSTS = 60,
    PARTIAL_COSTS = 10,
};

struct batch {
    const char *what;
    uint32_t sessions, tokens, queries; // of most of them
    uint32_t tokens_of_last;            // 0: the same
    uint32_t kv_heads;
    double least[3]; // share of the time with 2, 16 and 64 threads
};

// Of Llama-3.1-8B's shape, but for the last two: 1 KV head, as with Gemma 3, and 40, without GQA.
static const struct batch batches[] = {
    {"1 of 512", 1, 512, 1, 0, 8, {0.85, 0.40, 0.09}},
    {"1 of 4,096", 1, 4096, 1, 0, 8, {0.95, 0.85, 0.80}},
    {"1 of 32,768", 1, 32768, 1, 0, 8, {0.97, 0.95, 0.90}},
    {"1 of 131,072", 1, 131072, 1, 0, 8, {0.97, 0.97, 0.95}},
    {"8 of 4,096", 8, 4096, 1, 0, 8, {0.97, 0.95, 0.90}},
    {"64 of 1,024", 64, 1024, 1, 0, 8, {0.97, 0.90, 0.85}},
    {"200 of 512", 200, 512, 1, 0, 8, {0.97, 0.90, 0.75}},
    {"7 of 512, 1 of 32,768", 8, 512, 1, 32768, 8, {0.95, 0.85, 0.80}},
    {"63 of 512, 1 of 131,072", 64, 512, 1, 131072, 8, {0.95, 0.90, 0.85}},
    {"199 of 512, 1 of 131,072", 200, 512, 1, 131072, 8, {0.95, 0.90, 0.80}},
    {"1 of 4,096, 512 queries", 1, 4096, 512, 0, 8, {0.95, 0.95, 0.90}},
    {"16 of 2,048, 1 KV head", 16, 2048, 1, 0, 1, {0.95, 0.95, 0.85}},
    {"1 of 4,096, 40 KV heads", 1, 4096, 1, 0, 40, {0.95, 0.95, 0.90}},
};

// ---- Threads on paper ----

struct paper {
    uint32_t threads;
    uint64_t busy_until[MOST_THREADS];
    uint64_t work;
};

// The thread that is free first takes it.
static void take(struct paper *p, uint64_t cost)
{
    uint32_t first = 0;
    for (uint32_t i = 1; i < p->threads; i++)
        if (p->busy_until[i] < p->busy_until[first])
            first = i;
    p->busy_until[first] += cost;
    p->work += cost;
}

// All have ended what they took.
static uint64_t meet(struct paper *p)
{
    uint64_t last = 0;
    for (uint32_t i = 0; i < p->threads; i++)
        last = p->busy_until[i] > last ? p->busy_until[i] : last;
    for (uint32_t i = 0; i < p->threads; i++)
        p->busy_until[i] = last;
    return last;
}

// ---- A batch ----

static uint64_t tokens_of(const struct batch *b, uint32_t i)
{
    return b->tokens_of_last && i + 1 == b->sessions ? b->tokens_of_last : b->tokens;
}

static void plan(const struct batch *b, const struct kvq_shape *s, uint32_t threads,
                 struct kvq_attend_job *jobs)
{
    struct kvq_attend_job *all[MOST_SESSIONS];
    for (uint32_t i = 0; i < b->sessions; i++) {
        uint64_t tokens = tokens_of(b, i);
        jobs[i] = (struct kvq_attend_job){.call = {.format = kvt_format("kvq2"),
                                                   .shape = s,
                                                   .past_tokens = tokens,
                                                   .q_start = tokens - b->queries,
                                                   .q_tokens = b->queries}};
        all[i] = &jobs[i];
    }
    kvq_attend_plan_batch(kvq_kernels_get(KVQ_ISA_C), all, b->sessions, threads);
}

// Items are numbered as kvq_attend_item numbers them: the split last.
static uint64_t cost_of(const struct kvq_attend_job *job, uint32_t item)
{
    const struct kvq_attend_plan *p = &job->plan;
    const struct kvq_attend *a = &job->call;
    uint32_t splits = p->parallel ? p->n_splits : 1, split = item % splits, rest = item / splits;
    uint32_t tile = rest % p->n_tiles, head = rest / p->n_tiles * p->heads;
    uint64_t from = (uint64_t)split * p->split_tokens;
    uint64_t tokens = p->parallel ? a->past_tokens - from : a->past_tokens;
    if (p->parallel && tokens > p->split_tokens)
        tokens = p->split_tokens;
    uint32_t heads = a->shape->kv_heads - head, queries = a->q_tokens - tile * p->tile_tokens;
    heads = heads > p->heads ? p->heads : heads;
    queries = queries > p->tile_tokens ? p->tile_tokens : queries;
    return ITEM_COSTS + tokens * heads * (1 + queries) / 2;
}

static double share(const struct batch *b, uint32_t threads)
{
    static struct kvq_attend_job jobs[MOST_SESSIONS];
    struct kvq_shape s = kvt_shape(4, b->kv_heads, 128, KVQ_F16);
    struct paper p = {.threads = threads};
    plan(b, &s, threads, jobs);
    for (uint32_t i = 0; i < b->sessions; i++)
        for (uint32_t item = 0; item < jobs[i].plan.items; item++)
            take(&p, cost_of(&jobs[i], item));
    meet(&p);
    for (uint32_t i = 0; i < b->sessions; i++)
        for (uint32_t m = 0; m < kvq_attend_merges(&jobs[i]); m++)
            take(&p, (uint64_t)PARTIAL_COSTS * jobs[i].plan.n_splits);
    return (double)p.work / ((double)meet(&p) * threads);
}

static void test_threads_have_work(void **state)
{
    static const uint32_t threads[] = {2, 16, 64};
    bool fine = true;
    (void)state;
    printf("%-28s", "share of the time, threads:");
    for (int n = 0; n < 3; n++)
        printf(" %6u", threads[n]);
    printf("\n");
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        printf("%-28s", batches[i].what);
        for (int n = 0; n < 3; n++) {
            double x = share(&batches[i], threads[n]);
            printf(" %5.2f%s", x, x < batches[i].least[n] ? "!" : " ");
            fine &= x >= batches[i].least[n];
        }
        printf("\n");
    }
    assert_true(fine);
}

// Parts of a batch: at least one item each, and together about what was asked for.
static void test_parts(void **state)
{
    (void)state;
    assert_int_equal(kvq_attend_part(8, 10000, 80000), 1);
    assert_int_equal(kvq_attend_part(64, 10000, 80000), 8);
    assert_int_equal(kvq_attend_part(64, 1, 1000000), 1);
    assert_int_equal(kvq_attend_part(64, 0, 0), 1);
    assert_int_equal(kvq_attend_part(64, 1000000, 1000000), 64);
    struct kvq_shape s = kvt_shape(4, 8, 128, KVQ_F16);
    assert_true(kvq_attend_work(&s, 4096, 1) == 4 * kvq_attend_work(&s, 1024, 1));
    s.window = 1024; // of 4,096 tokens it reads no more than these, and the query's own
    assert_true(kvq_attend_work(&s, 4096, 1) < 2 * kvq_attend_work(&s, 1024, 1));
    // No numbers that a daemon can meet are too large.
    s.kv_heads = 64;
    s.window = 0;
    uint64_t most = kvq_attend_work(&s, (uint64_t)1 << 32, KVQ_MAX_QUERY_TOKENS);
    assert_true(most > kvq_attend_work(&s, ((uint64_t)1 << 32) - 1, KVQ_MAX_QUERY_TOKENS));
    assert_true(most * 1024 / 1024 == most);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_threads_have_work),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
