// SPDX-License-Identifier: Apache-2.0
//
// The same bits however the work is spread: 1, 2 and 5 threads, splits in one item or in many,
// one session alone or in a batch of 64, tiles of one query or of many, blocks of its own or shared
// with others. Every instruction set, both paths.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/internal.h"
#include "kernels/pool.h"
#include "tests/kernels/kvtest.h"

static const struct kvq_kernels *all_kernels[KVQ_ISA_BEST + 1];
static int n_kernels;
static pthread_t caller;

struct session {
    struct kvt_cache c;
    struct kvt_request r;
    float *want, *want_lse; // of this session alone, in one thread
    size_t rows, values;
};

static struct session *open_session(const char *format, struct kvq_shape shape, uint32_t tokens,
                                    uint32_t q_tokens, uint64_t seed)
{
    struct session *s = calloc(1, sizeof *s);
    s->c = kvt_cache(all_kernels[n_kernels - 1], format, shape, tokens, -1, KVT_NORMAL, seed);
    s->r = kvt_request(&s->c, q_tokens, seed + 1);
    s->rows = (size_t)q_tokens * shape.q_heads;
    s->values = s->rows * shape.k_dim;
    s->want = malloc(sizeof(float) * s->values);
    s->want_lse = malloc(sizeof(float) * s->rows);
    return s;
}

static void close_session(struct session *s)
{
    kvt_request_free(&s->r);
    kvt_cache_free(&s->c);
    free(s->want);
    free(s->want_lse);
    free(s);
}

static void remember(struct session *s, const struct kvq_kernels *k)
{
    kvt_attend(k, &s->r.a, 1);
    memcpy(s->want, s->r.out, sizeof(float) * s->values);
    memcpy(s->want_lse, s->r.lse, sizeof(float) * s->rows);
    memset(s->r.out, 0xee, sizeof(float) * s->values);
    memset(s->r.lse, 0xee, sizeof(float) * s->rows);
}

static void assert_same_bits(const struct session *s)
{
    assert_memory_equal(s->r.out, s->want, sizeof(float) * s->values);
    assert_memory_equal(s->r.lse, s->want_lse, sizeof(float) * s->rows);
}

static struct session *typical(int i, uint64_t seed)
{
    struct kvq_shape s = kvt_shape(4, 2, 128, KVQ_F16);
    switch (i) {
    case 0:
        return open_session("oscar2", s, 1300, 1, seed);
    case 1:
        return open_session("f16", s, 600, 3, seed);
    case 2:
        s.v_rotation = KVQ_V_ROT_DAEMON;
        s.window = 500;
        return open_session("oscar3", s, 900, 70, seed);
    case 4:
        s.window = 500;
        return open_session("vecinfer-4", s, 900, 70, seed);
    default:
        s.softcap = 30.0f;
        return open_session("oscar4", s, 130, 1, seed);
    }
}

static void test_plans_and_threads(void **state)
{
    static const unsigned threads[] = {1, 2, 5};
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int isa = 0; isa < n_kernels; isa++)
            for (uint32_t path = KVQ_PATH_EXACT; path <= KVQ_PATH_FAST; path++) {
                struct session *s = typical(i, kvt_seed());
                s->r.a.path = (uint8_t)path;
                remember(s, all_kernels[isa]);
                kvt_attend(all_kernels[isa], &s->r.a, 2);
                assert_same_bits(s);
                memset(s->r.out, 0xee, sizeof(float) * s->values);
                kvt_attend(all_kernels[isa], &s->r.a, UINT32_MAX);
                assert_same_bits(s);
                memset(s->r.out, 0xee, sizeof(float) * s->values);
                kvt_attend_whole(all_kernels[isa], &s->r.a, UINT32_MAX);
                assert_same_bits(s);
                for (int n = 0; n < 3; n++) {
                    memset(s->r.out, 0xee, sizeof(float) * s->values);
                    kvt_attend_threads(all_kernels[isa], &s->r.a, threads[n]);
                    assert_same_bits(s);
                }
                close_session(s);
            }
}

// Where there is no room for partials, heads and tiles alone keep threads at work.
static void test_plans_without_partials(void **state)
{
    static const struct {
        uint32_t gqa, tokens, queries;
    } calls[] = {{1, 500, 1}, {4, 500, 4}, {4, 1000000, 1}, {8, 500000, 1}, {8, 130000, 4}};
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (uint32_t wanted = 1; wanted <= 64; wanted *= 2) {
            const struct kvq_shape shape = kvt_shape(calls[i].gqa, 8, 128, KVQ_F16);
            const struct kvq_attend a = {.format = kvt_format("kvq2"),
                                         .shape = &shape,
                                         .past_tokens = calls[i].tokens,
                                         .q_start = calls[i].tokens,
                                         .q_tokens = calls[i].queries};
            struct kvq_attend_plan plan;
            kvq_attend_plan(kvq_kernels_get(KVQ_ISA_C), &a, wanted, &plan);
            uint32_t most = shape.kv_heads * plan.n_tiles;
            kvq_attend_plan_whole(&a, &plan);
            assert_true(!plan.parallel && plan.partial_bytes == 0);
            assert_true(plan.items >= (wanted < most ? wanted : most) && plan.items <= most);
        }
}

static void attend_batch(const struct kvq_kernels *k, struct session **s, uint32_t n,
                         unsigned threads)
{
    const struct kvq_attend *attends[64];
    struct kvq_pool *pool;
    for (uint32_t i = 0; i < n; i++) {
        attends[i] = &s[i]->r.a;
        memset(s[i]->r.out, 0xee, sizeof(float) * s[i]->values);
    }
    assert_int_equal(kvq_pool_open(&pool, threads, threads == 2), 0);
    assert_int_equal(kvq_pool_threads(pool), threads);
    for (int twice = 0; twice < 2; twice++)
        assert_int_equal(kvq_pool_attend(pool, k, attends, n), 0);
    assert_int_equal(kvq_pool_attend(pool, k, attends, 0), 0);
    kvq_pool_close(&pool);
    for (uint32_t i = 0; i < n; i++)
        assert_same_bits(s[i]);
}

// The C kernels are slow, and what is above them does not ask which they are: a quarter of these.
static void test_batch(void **state)
{
    struct session *s[64];
    (void)state;
    for (int i = 0; i < 64; i++)
        s[i] = typical(i % 4 == 2 ? 3 : i % 4, kvt_seed() + (uint64_t)i);
    for (int isa = 0; isa < n_kernels; isa++) {
        uint32_t n = isa == 0 && n_kernels > 1 ? 16 : 64;
        for (uint32_t i = 0; i < n; i++)
            remember(s[i], all_kernels[isa]);
        attend_batch(all_kernels[isa], s, n, 2);
        attend_batch(all_kernels[isa], s, n, 5);
        attend_batch(all_kernels[isa], s, 3, 5); // so few that splits are spread
    }
    for (int i = 0; i < 64; i++)
        close_session(s[i]);
}

// Each query of a long step alone gives the bits that it gives among the others. Where 64 rows and
// more are multiplied as matrices: so many of them, wherever they stand in a tile.
static void check_tiles(const struct kvq_kernels *k, struct session *s)
{
    const struct kvq_shape *shape = &s->c.shape;
    size_t token_values = (size_t)shape->q_heads * 128;
    bool tall = strcmp(kvq_kernels_isa(k), "amx") == 0;
    uint32_t n = tall ? 64u * shape->kv_heads / shape->q_heads : 1, last = 69 - n + 1;
    float *out = malloc(sizeof(float) * token_values * n);
    struct kvq_attend few = s->r.a;
    assert_true(s->r.a.q_tokens >= 70 && n < 70);
    remember(s, k);
    few.q_tokens = n;
    few.out = out;
    few.lse = NULL;
    for (uint32_t i = 0; i <= last; i += last < 23 ? 1 : 23) {
        few.q_start = s->r.a.q_start + i;
        few.q.data = s->r.q + i * token_values;
        kvt_attend(k, &few, 1);
        assert_memory_equal(out, s->want + i * token_values, sizeof(float) * token_values * n);
    }
    free(out);
}

static void test_tiles(void **state)
{
    (void)state;
    for (int isa = 0; isa < n_kernels; isa++)
        for (uint32_t path = KVQ_PATH_EXACT; path <= KVQ_PATH_FAST; path++)
            for (int i = 2; i <= 4; i += 2) {
                struct session *s = typical(i, kvt_seed());
                s->r.a.path = (uint8_t)path;
                check_tiles(all_kernels[isa], s);
                close_session(s);
            }
}

// ---- Sessions that share blocks ----

enum { FAMILY = 20, PREFIX = 18 }; // pages: 4 splits and a half

// Sessions of many lengths. All but three start with pages of the first; two have fewer of them.
static void open_family(struct session **s, const char *format, uint32_t q_tokens)
{
    struct kvq_shape shape = kvt_shape(4, 3, 128, KVQ_F16);
    for (uint32_t i = 0; i < FAMILY; i++) {
        uint32_t tokens = i == 7 ? PREFIX * KVQ_BLOCK_TOKENS + q_tokens : 2400 + 37 * i;
        uint32_t pages = i % 8 == 5 ? 0 : i == 2 ? 3 : i == 3 ? 9 : PREFIX;
        s[i] = open_session(format, shape, tokens, q_tokens, kvt_seed() + i);
        s[i]->r.a.shape = &s[0]->c.shape;
        for (uint32_t page = 0; page < pages; page++)
            s[i]->c.pages[page] = s[0]->c.pages[page];
        if (pages) // sinks, which go with the first page
            s[i]->r.a.extras = s[0]->r.a.extras;
    }
}

static void check_family(const char *format, uint32_t q_tokens, uint32_t path)
{
    struct session *s[FAMILY];
    open_family(s, format, q_tokens);
    for (int isa = 0; isa < n_kernels; isa++) {
        for (int i = 0; i < FAMILY; i++) {
            s[i]->r.a.path = (uint8_t)path;
            remember(s[i], all_kernels[isa]);
        }
        attend_batch(all_kernels[isa], s, FAMILY, 1);
        attend_batch(all_kernels[isa], s, FAMILY, 5);
        attend_batch(all_kernels[isa], s + 6, 2, 2); // one of them all shared
    }
    for (int i = 0; i < FAMILY; i++)
        close_session(s[i]);
}

static void test_shared(void **state)
{
    (void)state;
    check_family("oscar2", 3, KVQ_PATH_FAST); // 12 rows: 5 sessions fill a tile
#ifndef __SANITIZE_THREAD__                   // ThreadSanitizer takes a minute for each
    check_family("oscar2", 1, KVQ_PATH_EXACT);
    check_family("oscar4", 1, KVQ_PATH_FAST);
    check_family("vecinfer-2", 1, KVQ_PATH_EXACT);
    check_family("f16", 1, KVQ_PATH_EXACT);
    check_family("kvq2", 1, KVQ_PATH_FAST);
#endif
}

static uint32_t plan_family(struct session **s, struct kvq_attend_job *job,
                            struct kvq_attend_job **order)
{
    uint32_t members = 0;
    for (int i = 0; i < FAMILY; i++) {
        job[i] = (struct kvq_attend_job){.call = s[i]->r.a};
        kvq_attend_plan(kvq_kernels_get(KVQ_ISA_C), &job[i].call, 1, &job[i].plan);
        order[i] = &job[i];
    }
    bool any = kvq_attend_share(order, FAMILY);
    for (int i = 0; i < FAMILY; i++)
        members += job[i].plan.n_members;
    assert_int_equal(any, members > 0);
    return members;
}

// Who shares, and that what is shared is done once.
static void test_shared_plans(void **state)
{
    struct session *s[FAMILY];
    struct kvq_attend_job job[FAMILY], *order[FAMILY];
    (void)state;
    open_family(s, "oscar2", 1);
    assert_int_equal(plan_family(s, job, order), 0); // would gain nothing
    for (int i = 0; i < FAMILY; i++)
        s[i]->r.a.path = KVQ_PATH_FAST;
    assert_int_equal(plan_family(s, job, order), FAMILY - 4);
    assert_ptr_equal(job[0].plan.members, order);
    assert_int_equal(job[0].plan.first_split, 4);
    assert_int_equal(job[0].plan.stacks, 1);
    assert_int_equal(job[0].plan.shared_items, 3 * 4);
    assert_int_equal(job[1].plan.items, job[1].plan.n_splits - 4);
    assert_int_equal(job[5].plan.first_split, 0);
    s[1]->r.a.path = KVQ_PATH_EXACT;
    s[4]->r.a.q_tokens = 2;
    s[6]->r.a.format = kvt_format("oscar2-g64");
    s[8]->r.a.extras = (const uint8_t *)s;
    assert_int_equal(plan_family(s, job, order), FAMILY - 8);
    for (int i = 0; i < FAMILY; i++)
        s[i]->r.a.fresh_tokens = s[i]->r.a.fresh_start = 0;
    s[9]->r.a.fresh_tokens = 1;
    s[9]->r.a.fresh_start = 255;
    assert_int_equal(plan_family(s, job, order), FAMILY - 9);
    for (int i = 0; i < FAMILY; i++)
        close_session(s[i]);
    open_family(s, "kvq2", 1);
    for (int i = 0; i < FAMILY; i++)
        s[i]->r.a.path = KVQ_PATH_FAST;
    assert_int_equal(plan_family(s, job, order), FAMILY - 4);
    s[1]->r.a.extras = s[5]->r.a.extras; // sinks of another session
    s[4]->r.a.format = s[6]->r.a.format =
        kvt_format("kvq2:outliers=3"); // outliers are each one's own
    assert_int_equal(plan_family(s, job, order), FAMILY - 7);
    for (int i = 0; i < FAMILY; i++)
        close_session(s[i]);
}

static void test_packing(void **state)
{
    (void)state;
    struct kvt_cache c = kvt_cache(all_kernels[0], "oscar2", kvt_shape(1, 3, 128, KVQ_F16), 1024,
                                   -1, KVT_NORMAL, kvt_seed());
    struct kvq_raw_layout raw = kvq_raw_layout_of(&c.shape);
    struct kvq_layout l = kvq_layout_of(c.format, &c.shape);
    size_t bytes = kvq_block_bytes(&l, &c.shape);
    uint8_t *blocks = kvt_guarded(8 * bytes, 0);
    for (unsigned threads = 1; threads <= 5; threads += 2) {
        struct kvq_pack_job jobs[8];
        struct kvq_pool *pool;
        memset(blocks, 0, 8 * bytes);
        for (int i = 0; i < 8; i++)
            jobs[i] = (struct kvq_pack_job){
                c.format,
                &c.shape,
                {.raw_block = c.raw + i * kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS),
                 .packed_block = blocks + i * bytes}};
        assert_int_equal(kvq_pool_open(&pool, threads, false), 0);
        kvq_pool_pack(pool, all_kernels[n_kernels - 1], jobs, 8);
        kvq_pool_pack(pool, all_kernels[n_kernels - 1], jobs, 0);
        kvq_pool_close(&pool);
        assert_memory_equal(blocks, c.blocks, 8 * bytes);
    }
    kvt_guarded_free(blocks);
    kvt_cache_free(&c);
}

// ---- What a pool cuts ----

static pthread_mutex_t count_lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t loads;

// Each item loads the queries of its heads, so that splits of their own are seen.
static void counted_load(const void *src, uint8_t dtype, float *dst, size_t n)
{
    pthread_mutex_lock(&count_lock);
    loads++;
    pthread_mutex_unlock(&count_lock);
    all_kernels[n_kernels - 1]->load(src, dtype, dst, n);
}

// Rows of queries that the items of kvq_attend_plan_batch load.
static uint32_t loads_of(const struct kvq_kernels *k, const struct kvq_attend *const *attends,
                         uint32_t n, uint32_t threads)
{
    struct kvq_attend_job jobs[8], *all[8];
    uint32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        jobs[i] = (struct kvq_attend_job){.call = *attends[i]};
        all[i] = &jobs[i];
    }
    kvq_attend_plan_batch(k, all, n, threads);
    for (uint32_t i = 0; i < n; i++)
        sum += (jobs[i].plan.parallel ? jobs[i].plan.n_splits : 1) * attends[i]->shape->q_heads;
    return sum;
}

// The plans of a pool are those of daemon and engines, which test_scaling plays: 8 sessions are not
// cut for two threads, 4 are, and nothing is for one.
static void test_pool_plans(void **state)
{
    static const struct {
        uint32_t sessions;
        unsigned threads;
        bool cut;
    } cases[] = {{8, 2, false}, {4, 2, true}, {1, 1, false}, {8, 5, true}};
    struct kvq_kernels counting = *all_kernels[n_kernels - 1];
    const struct kvq_attend *attends[8];
    struct session *s[8];
    (void)state;
    counting.load = counted_load;
    for (uint32_t i = 0; i < 8; i++) {
        s[i] = open_session("oscar2", kvt_shape(4, 2, 64, KVQ_F16), 1024, 1, kvt_seed());
        attends[i] = &s[i]->r.a;
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kvq_pool *pool;
        uint32_t n = cases[i].sessions, want = loads_of(&counting, attends, n, cases[i].threads);
        assert_int_equal(want > n * attends[0]->shape->q_heads, cases[i].cut);
        assert_int_equal(kvq_pool_open(&pool, cases[i].threads, false), 0);
        loads = 0;
        assert_int_equal(kvq_pool_attend(pool, &counting, attends, n), 0);
        assert_int_equal(loads, want);
        kvq_pool_close(&pool);
    }
    for (uint32_t i = 0; i < 8; i++)
        close_session(s[i]);
}

static void test_pool_refuses(void **state)
{
    struct kvq_pool *pool;
    (void)state;
    assert_true(kvq_pool_open(&pool, 0, false) < 0);
    assert_null(pool);
    assert_true(kvq_pool_open(&pool, KVQ_POOL_MAX_THREADS + 1, false) < 0);
    kvq_pool_close(&pool);
}

// 0 for the caller's items; else 4, and 1 if SIGTERM is blocked, and 2 if SIGSEGV is.
static void blocked(void *context, uint32_t item, void *workspace)
{
    sigset_t now;
    (void)workspace;
    pthread_sigmask(SIG_BLOCK, NULL, &now);
    ((int *)context)[item] = pthread_equal(pthread_self(), caller)
                                 ? 0
                                 : 4 + sigismember(&now, SIGTERM) + 2 * sigismember(&now, SIGSEGV);
}

// Signals are for the program's threads.
static void test_signals(void **state)
{
    enum { ITEMS = 4096 };
    static int seen[ITEMS];
    struct kvq_pool *pool;
    int others = 0;
    (void)state;
    caller = pthread_self();
    assert_int_equal(kvq_pool_open(&pool, 4, false), 0);
    for (int round = 0; round < 10000 && others == 0; round++) {
        kvq_pool_run(pool, blocked, seen, ITEMS);
        for (int i = 0; i < ITEMS; i++) {
            others += seen[i] != 0;
            assert_true(seen[i] == 0 || seen[i] == 5);
        }
    }
    assert_true(others > 0);
    kvq_pool_close(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plans_and_threads),
        cmocka_unit_test(test_plans_without_partials),
        cmocka_unit_test(test_batch),
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_shared),
        cmocka_unit_test(test_shared_plans),
        cmocka_unit_test(test_packing),
        cmocka_unit_test(test_pool_plans),
        cmocka_unit_test(test_pool_refuses),
        cmocka_unit_test(test_signals),
    };
#ifdef __SANITIZE_THREAD__
    // Threads meet in the driver and the pool, which are the same above every instruction set.
    const int first = KVQ_ISA_BEST;
#else
    const int first = KVQ_ISA_C;
#endif
    if (kvt_lacks_amx())
        return 77; // skipped
    for (int isa = first; isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        if (n_kernels == 0 || k != all_kernels[n_kernels - 1])
            all_kernels[n_kernels++] = k;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
