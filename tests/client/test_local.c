// SPDX-License-Identifier: Apache-2.0
//
// Attention in the engine's own context, on the host: the same steps there and by the daemon give
// the same bits, for every family of formats, across packing, truncation, forks and threads.
#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/in_context/in_context.h"
#include "tests/client/local_kit.h"

enum { LAYERS = 3, KV_HEADS = 2, DIM = 64 };

// What computes in one thread is done so many times less where that takes minutes.
#ifdef __SANITIZE_THREAD__
enum { LESS = 10 };
#else
enum { LESS = 1 };
#endif

// Threads are the library's own where parallel is NULL.
static void open_threads(uint32_t threads, bool own)
{
    struct kvq_local_options o = {.size = sizeof o,
                                  .max_tokens = 2048,
                                  .flags = KVQ_LOCAL_REQUIRE,
                                  .threads = threads,
                                  .parallel = threads > 1 && !own ? local_parallel : NULL};
    fine(kvq_local_open(rig.queue, &o, &rig.local));
    assert_null(kvq_local_why(rig.local));
}

static void open_local(uint32_t threads)
{
    open_threads(threads, false);
}

// ---- The same bits ----

static void long_run(const char *format, uint16_t q_heads, uint32_t prompt, uint32_t steps)
{
    struct local_model m;
    struct local_pair pair;
    struct kvq_session_options o = {
        .size = sizeof o, .format = format, .prompt_tokens = prompt, .max_rollback = 4};
    local_model(&m, LAYERS, q_heads, KV_HEADS, DIM);
    local_open_pair(&m, &o, &pair);
    local_step(&m, &pair, 1, &prompt, 0, true);
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t append = i % 50 == 49 ? 3 : 1;
        local_step(&m, &pair, 1, &append, 0, true);
    }
    local_same_cache(&m, &pair);
    local_close_pair(&pair);
}

static void test_formats(void **state)
{
    static const char *const formats[] = {"f16",  "oscar2",    "kvq2",         "innerq-hybrid",
                                          "ott2", "kivi2-fit", "vecinfer-2@v", "million-4@m"};
    (void)state;
    open_local(1);
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i += LESS)
        long_run(formats[i], 4, 150 + 30 * (uint32_t)i, 40);
}

static void test_300_steps(void **state)
{
    (void)state;
    open_local(1);
    long_run("oscar2", 8, 200, 300 / LESS);
}

static void test_shapes(void **state)
{
    // The last one's tokens as they come fill more than the smallest extent.
    static const uint16_t heads[][2] = {{2, 2}, {16, 2}, {3, 1}, {64, 1}, {80, 80}};
    struct kvq_session_options o = {.size = sizeof o,
                                    .format = "oscar2",
                                    .dtype = KVQ_DTYPE_BF16,
                                    .attention = KVQ_ATTENTION_FAST};
    const uint32_t prompt = 140, one = 1;
    (void)state;
    open_local(1);
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        struct local_model m;
        struct local_pair pair;
        local_model(&m, LAYERS, heads[i][0], heads[i][1], DIM);
        m.dtype = i % 2 ? KVQ_DTYPE_BF16 : KVQ_DTYPE_F16;
        m.out_dtype = i % 2 ? KVQ_DTYPE_F16 : KVQ_DTYPE_BF16;
        local_open_pair(&m, &o, &pair);
        local_step(&m, &pair, 1, &prompt, 0, true);
        for (uint32_t j = 0; j < 20; j++)
            local_step(&m, &pair, 1, &one, 0, true);
        local_close_pair(&pair);
    }
}

// Batches of sessions of all lengths, some of which only read, on one thread or several; steps
// that are given up, and attention to what was there before the step.
static void ragged(uint32_t threads, bool own)
{
    enum { N = 5 };
    struct local_model m;
    struct local_pair pairs[N];
    struct kvq_session_options o = {
        .size = sizeof o, .format = "oscar2", .attention = KVQ_ATTENTION_FAST};
    uint32_t append[N];
    open_threads(threads, own);
    local_model(&m, LAYERS, 8, KV_HEADS, DIM);
    for (uint32_t i = 0; i < N; i++) {
        local_open_pair(&m, &o, &pairs[i]);
        append[i] = 1 + 170 * i;
    }
    local_step(&m, pairs, N, append, 0, true);
    for (uint32_t i = 0; i < 24 / LOCAL_PART; i++) {
        for (uint32_t j = 0; j < N; j++)
            append[j] = local_random(4) ? local_random(3) : 40;
        local_step(&m, pairs, N, append, i % 4 == 1 ? KVQ_PAST_ONLY : 0, i % 4 != 2);
    }
    for (uint32_t i = 0; i < N; i++)
        local_close_pair(&pairs[i]);
}

static void test_ragged(void **state)
{
    (void)state;
    ragged(1, false);
}

// ---- Items ----

// A session of so many tokens, in steps of at most 256, and what it is attended to by.
static struct kvq_entry grown(uint32_t number, uint32_t tokens)
{
    char name[16];
    snprintf(name, sizeof name, "s%u", number);
    struct kvq_entry e = {.session = local_open_small(name, 0, 1)};
    fine(kvq_local_add(rig.local, e.session));
    while (e.position < tokens) {
        uint64_t left = tokens - e.position;
        fine(local_small_step(rig.local, &e, 1, left < 256 ? (uint32_t)left : 256));
        e.position = e.value;
    }
    e.append = 0;
    e.q_row = number;
    return e;
}

// A long session among short ones has most of the items, for no thread to be left with all of it.
static void test_items_by_work(void **state)
{
    enum { N = 16, THREADS = 4 };
    struct kvq_entry entries[N];
    struct local_model m;
    uint32_t items = 0;
    (void)state;
    open_local(THREADS);
    local_model(&m, 1, 4, KV_HEADS, DIM);
    for (uint32_t i = 0; i < N; i++)
        entries[i] = grown(i, i == N - 1 ? 2000 : 30);
    struct kvq_work w = local_small_work(&m, 0);
    w.k = w.v = (struct kvq_tensor){0};
    fine(kvq_local_begin(rig.local, entries, N));
    fine(kvq_local_attend(rig.local, &w, entries, N));
    for (uint32_t i = 0; i < N; i++) {
        const struct kvq_attend_job *job = &rig.local->jobs[i];
        fine(entries[i].status);
        assert_int_equal(job->call.past_tokens, entries[i].position);
        if (i < N - 1)
            assert_int_equal(job->plan.items, 1);
        items += job->plan.items;
    }
    assert_true(rig.local->jobs[N - 1].plan.items >= THREADS);
    assert_true(items >= kvq_attend_items(THREADS));
    kvq_local_abort(rig.local);
}

// ---- Shards ----

static void open_shard(const struct local_model *m, const char *name, uint16_t shard,
                       kvq_session *session)
{
    const struct kvq_session_options o = {.size = sizeof o,
                                          .name = name,
                                          .layers = m->rows,
                                          .n_layers = m->layers,
                                          .format = "oscar2",
                                          .max_rollback = 4,
                                          .shard = shard,
                                          .shards = 2};
    fine(kvq_session_open(rig.client, &o, session, NULL));
}

// Both shards of a session in one request.
static void test_shards(void **state)
{
    struct local_model m;
    struct local_pair pairs[2] = {{0}};
    uint32_t append[2] = {150, 150};
    (void)state;
    open_local(1);
    local_model(&m, LAYERS, 4, KV_HEADS, DIM);
    for (uint16_t i = 0; i < 2; i++) {
        open_shard(&m, "here", i, &pairs[i].here);
        open_shard(&m, "there", i, &pairs[i].there);
        fine(kvq_local_add(rig.local, pairs[i].here));
    }
    local_step(&m, pairs, 2, append, 0, true);
    for (uint32_t i = 0; i < 60; i++) {
        append[0] = append[1] = 1 + i % 5;
        local_step(&m, pairs, 2, append, 0, i % 7 != 3);
    }
    for (uint32_t i = 0; i < 2; i++) {
        local_same_cache(&m, &pairs[i]);
        local_close_pair(&pairs[i]);
    }
}

// K and V of all layers, for ends of steps that were not attended to.
static int end_rank(kvq_local *local, const struct local_model *m, struct kvq_entry *e)
{
    struct kvq_tensor kv[LOCAL_LAYERS] = {{0}};
    for (uint32_t i = 0; i < m->layers; i++)
        if (m->rows[i].kv_from == 0)
            kv[i] = kvq_tensor_make(rig.buffer, 0, KV_HEADS, DIM, KVQ_DTYPE_F32);
    const struct kvq_step_work work = {.k = kv, .v = kv, .n_layers = m->layers};
    return kvq_local_end(local, &work, e, 1);
}

// A shard with each of two ranks: one's end is answered at once, both commit with the other's.
static void test_ranks(void **state)
{
    const struct kvq_local_options o = {
        .size = sizeof o, .max_tokens = 2048, .flags = KVQ_LOCAL_REQUIRE};
    struct local_model m;
    struct kvq_entry e[2];
    struct kvq_session_info info = {.size = sizeof info};
    kvq_session shards[2];
    kvq_local *locals[2];
    kvq_queue *queue;
    uint64_t tokens = 0;
    (void)state;
    open_local(1);
    local_model(&m, LAYERS, 4, KV_HEADS, DIM);
    fine(kvq_queue_open(rig.client, &queue));
    fine(kvq_local_open(queue, &o, &locals[1]));
    locals[0] = rig.local;
    for (uint16_t i = 0; i < 2; i++) {
        open_shard(&m, "it", i, &shards[i]);
        fine(kvq_local_add(locals[i], shards[i]));
    }
    for (uint32_t turn = 0; turn < 40; turn++) {
        uint32_t first = turn % 2, append = turn ? 1 + turn % 3 : 130;
        for (uint32_t i = 0; i < 2; i++) {
            e[i] = (struct kvq_entry){.session = shards[i], .position = tokens, .append = append};
            fine(kvq_local_begin(locals[i], &e[i], 1));
            fine(e[i].status);
        }
        if (turn % 5 == 4) { // given up by one, and begun anew
            kvq_local_abort(locals[first]);
            fine(kvq_local_begin(locals[first], &e[first], 1));
            fine(e[first].status);
        }
        for (uint32_t i = first, n = 0; n < 2; i = 1 - i, n++) {
            fine(end_rank(locals[i], &m, &e[i]));
            fine(e[i].status);
            assert_int_equal(e[i].value, tokens + append);
            fine(kvq_session_info(rig.client, shards[i], &info));
            assert_int_equal(info.group_tokens, n ? tokens + append : tokens);
        }
        tokens += append;
    }
    // One ends its step, the other leaves: nobody has it, and who ended it is told.
    e[0] = (struct kvq_entry){.session = shards[0], .position = tokens, .append = 1};
    fine(kvq_local_begin(locals[0], &e[0], 1));
    fine(end_rank(locals[0], &m, &e[0]));
    kvq_local_close(&locals[1]);
    fine(kvq_session_close(rig.client, shards[1]));
    e[0] = (struct kvq_entry){.session = shards[0], .position = tokens + 1, .append = 1};
    fine(kvq_local_begin(locals[0], &e[0], 1));
    assert_int_equal(e[0].status, KVQ_E_CANCELLED);
    kvq_queue_close(&queue);
    fine(kvq_session_close(rig.client, shards[0]));
}

static void test_threads(void **state)
{
    (void)state;
    ragged(4, false);
}

static uint32_t threads_here(void)
{
    uint32_t n = 0;
    DIR *d = opendir("/proc/self/task");
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

// The library's threads: the same bits, as many as were asked for, and none is left.
static void test_own_threads(void **state)
{
    uint32_t before = threads_here();
    (void)state;
    ragged(3, true);
    assert_int_equal(threads_here(), before + 2);
    kvq_local_close(&rig.local);
    assert_int_equal(threads_here(), before);
}

// Taken back by ordinary calls between two steps: pages are looked at anew.
static void truncate_pair(struct local_pair *pair, uint64_t tokens)
{
    for (int side = 0; side < 2; side++) {
        struct kvq_entry e = {.session = side ? pair->there : pair->here, .position = pair->tokens};
        fine(kvq_truncate(rig.queue, &e, &tokens, 1));
        fine(e.status);
    }
    pair->tokens = tokens;
}

static void test_rollback(void **state)
{
    struct local_model m;
    struct local_pair pair;
    struct kvq_session_options o = {.size = sizeof o,
                                    .format = "innerq-small:rot=signed:k_codec=lloyd:k_group=0",
                                    .max_rollback = 8};
    const uint32_t prompt = 250, draft = 6, one = 1;
    (void)state;
    open_local(1);
    local_model(&m, LAYERS, 4, KV_HEADS, DIM);
    local_open_pair(&m, &o, &pair);
    local_step(&m, &pair, 1, &prompt, 0, true);
    for (uint32_t i = 0; i < 12; i++) {
        local_step(&m, &pair, 1, &draft, 0, true);
        truncate_pair(&pair, pair.tokens - local_random(7));
        local_step(&m, &pair, 1, &one, 0, true);
        truncate_pair(&pair, pair.tokens - 1);
        local_plain_step(&m, &pair, 1, i % 2);
        local_step(&m, &pair, 1, &one, 0, true);
    }
    local_same_cache(&m, &pair);
    local_close_pair(&pair);
}

// The same count as before, but other tokens, in another block: only that something was asked of
// the daemon meanwhile tells.
static void test_changed_between(void **state)
{
    struct local_model m;
    struct local_pair pair;
    struct kvq_session_options o = {.size = sizeof o, .format = "oscar2", .max_rollback = 8};
    const uint32_t prompt = 258, one = 1;
    (void)state;
    open_local(1);
    local_model(&m, LAYERS, 4, KV_HEADS, DIM);
    local_open_pair(&m, &o, &pair);
    local_step(&m, &pair, 1, &prompt, 0, true);
    for (int whole_here = 0; whole_here < 2; whole_here++) {
        truncate_pair(&pair, 254);
        local_plain_step(&m, &pair, 4, whole_here);
        local_step(&m, &pair, 1, &one, 0, false);
    }
    local_same_cache(&m, &pair);
    local_close_pair(&pair);
}

// Forks share their blocks, and the one who attends unpacks them once.
static void test_forks(void **state)
{
    enum { N = 4 };
    struct local_model m;
    struct local_pair pairs[N];
    struct kvq_session_options o = {
        .size = sizeof o, .format = "oscar2", .attention = KVQ_ATTENTION_FAST};
    uint32_t append[N] = {1200, 1, 1, 1};
    (void)state;
    open_local(4);
    local_model(&m, LAYERS, 8, KV_HEADS, DIM);
    local_open_pair(&m, &o, &pairs[0]);
    local_step(&m, pairs, 1, append, 0, true);
    for (uint32_t i = 1; i < N; i++) {
        struct kvq_entry e[2] = {{.session = pairs[0].here, .position = pairs[0].tokens},
                                 {.session = pairs[0].there, .position = pairs[0].tokens}};
        fine(kvq_fork(rig.queue, e, 2));
        pairs[i] = (struct local_pair){e[0].value, e[1].value, pairs[0].tokens};
        fine(kvq_local_add(rig.local, pairs[i].here));
    }
    append[0] = 1;
    for (uint32_t i = 0; i < 70 / LOCAL_PART; i++)
        local_step(&m, pairs, N, append, 0, true);
    for (uint32_t i = 0; i < N; i++)
        local_close_pair(&pairs[i]);
}

// ---- No request ----

// Beginning and attending need no daemon; while it is stopped they go on.
static void test_without_requests(void **state)
{
    struct local_model m;
    (void)state;
    open_local(1);
    local_model(&m, 1, 4, KV_HEADS, DIM);
    struct kvq_entry e = {.session = local_open_small("quiet", 0, 1)};
    fine(kvq_local_add(rig.local, e.session));
    fine(local_small_step(rig.local, &e, 1, 200));
    e.position = e.value;
    e.append = 1;
    kill(rig.daemon.pid, SIGSTOP);
    struct kvq_work w = local_small_work(&m, 0);
    fine(kvq_local_begin(rig.local, &e, 1));
    for (int i = 0; i < 3; i++)
        fine(kvq_local_attend(rig.local, &w, &e, 1));
    kill(rig.daemon.pid, SIGCONT);
    fine(kvq_local_end(rig.local, NULL, &e, 1));
    assert_int_equal(e.value, 201);
}

// ---- Through the daemon ----

static void through(const char *words)
{
    struct kvq_local_options o = {.size = sizeof o, .max_tokens = 2048, .flags = KVQ_LOCAL_REQUIRE};
    struct local_model m;
    struct local_pair pairs[2];
    struct kvq_session_options options = {.size = sizeof options, .format = "oscar2"};
    uint32_t append[2] = {150, 300};
    refused(KVQ_E_UNSUPPORTED, kvq_local_open(rig.queue, &o, &rig.local), words);
    assert_null(rig.local);
    o.flags = 0;
    fine(kvq_local_open(rig.queue, &o, &rig.local));
    assert_non_null(strstr(kvq_local_why(rig.local), words));
    local_model(&m, LAYERS, 4, KV_HEADS, DIM);
    local_open_pair(&m, &options, &pairs[0]);
    local_open_pair(&m, &options, &pairs[1]);
    for (uint32_t i = 0; i < 12; i++) {
        local_step(&m, pairs, 2, append, i == 5 ? KVQ_PAST_ONLY : 0, i != 3);
        append[0] = i % 3;
        append[1] = 1;
    }
    local_close_pair(&pairs[0]);
    local_close_pair(&pairs[1]);
}

static void test_through_daemon(void **state)
{
    (void)state;
    setenv("KVQ_LOCAL", "daemon", 1);
    through("KVQ_LOCAL=daemon");
    unsetenv("KVQ_LOCAL");
}

static void test_other_instructions(void **state)
{
    struct kvq_daemon_info info = {.size = sizeof info};
    (void)state;
    fine(kvq_daemon_info(rig.client, &info));
    if (strcmp(info.isa, "c") == 0)
        skip();
    const char *mask = getenv("KVQ_CPU_MASK");
    char before[16];
    snprintf(before, sizeof before, "%s", mask ? mask : "");
    setenv("KVQ_CPU_MASK", "c", 1); // for this process, not for the daemon
    through("this process can use c");
    setenv("KVQ_CPU_MASK", before, 1);
}

// ---- What is refused ----

static void test_refusals(void **state)
{
    struct local_model m;
    (void)state;
    open_local(1);
    local_model(&m, 2, 4, KV_HEADS, DIM);
    struct kvq_entry e = {.session = local_open_small("a", 0, 2), .append = 3, .queries = 1},
                     twice[2];
    struct kvq_work w = local_small_work(&m, 0);
    fine(kvq_local_begin(rig.local, &e, 1));
    refused(KVQ_E_STALE, e.status, "step begin, entry 0");
    refused(KVQ_E_STALE, e.status, "kvq_local_add it first");
    fine(kvq_local_add(rig.local, e.session));
    fine(kvq_local_add(rig.local, e.session));
    refused(KVQ_E_NO_STEP, kvq_local_end(rig.local, NULL, &e, 1), "kvq_local_begin");
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    refused(KVQ_E_NO_STEP, e.status, "attend, entry 0");
    refused(KVQ_E_NO_STEP, e.status, "kvq_local_begin begins one");
    e.position = 7;
    fine(kvq_local_begin(rig.local, &e, 1));
    refused(KVQ_E_POSITION, e.status, "holds 0 tokens");
    assert_int_equal(e.value, 0);
    e.position = 0;
    e.append = 2049;
    fine(kvq_local_begin(rig.local, &e, 1));
    refused(KVQ_E_LIMIT, e.status, "max_tokens");
    e.append = 3;
    twice[0] = twice[1] = e;
    fine(kvq_local_begin(rig.local, twice, 2));
    assert_int_equal(twice[0].status, 0);
    refused(KVQ_E_BUSY, twice[1].status, "entry 1");
    refused(KVQ_E_BUSY, kvq_local_begin(rig.local, &e, 1), "kvq_local_abort");
    refused(KVQ_E_BUSY, kvq_local_remove(rig.local, e.session), "step");
}

static void test_refused_attention(void **state)
{
    struct local_model m;
    (void)state;
    open_local(1);
    local_model(&m, 2, 4, KV_HEADS, DIM);
    struct kvq_entry e = {.session = local_open_small("a", 0, 2), .append = 3, .queries = 1};
    struct kvq_work w = local_small_work(&m, 0);
    fine(kvq_local_add(rig.local, e.session));
    fine(kvq_local_begin(rig.local, &e, 1));
    w.layer = 2;
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    refused(KVQ_E_SHAPE, e.status, "2 layers");
    w = local_small_work(&m, 0);
    e.queries = 4;
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    refused(KVQ_E_INVALID, e.status, "4 query tokens");
    e.queries = 1;
    e.row = 1 << 20;
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    refused(KVQ_E_BOUNDS, e.status, "k rows 1048576");
    e.row = 0;
    w.out.token_stride = 6;
    e.queries = 3;
    refused(KVQ_E_INVALID, kvq_local_attend(rig.local, &w, &e, 1), "out");
    e.queries = 1;
    w = local_small_work(&m, 0);
    w.k.buffer = w.v.buffer = NULL;
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    refused(KVQ_E_INCOMPLETE, e.status, "append K and V of this layer");
    w = local_small_work(&m, 0);
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    fine(e.status);
    struct kvq_work next = local_small_work(&m, 1);
    next.k.offset = w.out.offset;
    next.v = w.k;
    next.out = w.v; // of layer 0, which is read until the step's end
    refused(KVQ_E_INVALID, kvq_local_attend(rig.local, &next, &e, 1), "overlaps");
    next = local_small_work(&m, 1);
    fine(kvq_local_attend(rig.local, &next, &e, 1));
    fine(e.status);
    w = local_small_work(&m, 0);
    w.pages.page_tokens = 16;
    w.pages.list = rig.buffer;
    refused(KVQ_E_INVALID, kvq_local_attend(rig.local, &w, &e, 1), "paged");
}

static void test_options(void **state)
{
    struct kvq_local_options o = {.size = sizeof o, .flags = 8};
    (void)state;
    refused(KVQ_E_INVALID, kvq_local_open(rig.queue, &o, &rig.local), "flags 0x8");
    o = (struct kvq_local_options){.size = sizeof(struct kvq_local_options), .threads = 257};
    refused(KVQ_E_INVALID, kvq_local_open(rig.queue, &o, &rig.local), "256 at most");
    o = (struct kvq_local_options){.size = sizeof(struct kvq_local_options),
                                   .max_tokens = UINT64_C(1) << 30};
    refused(KVQ_E_LIMIT, kvq_local_open(rig.queue, &o, &rig.local), "max_tokens");
    o = (struct kvq_local_options){.size = sizeof(struct kvq_local_options), .max_tokens = 128};
    fine(kvq_local_open(rig.queue, &o, &rig.local));
    struct kvq_entry e = {.session = local_open_small("long", 0, 1)};
    fine(kvq_local_add(rig.local, e.session));
    fine(local_small_step(rig.local, &e, 1, 100));
    e.position = 100;
    e.append = 29;
    fine(kvq_local_begin(rig.local, &e, 1));
    refused(KVQ_E_LIMIT, e.status, "at most 128");
    kvq_local *second;
    fine(kvq_local_open(rig.queue, NULL, &second));
    refused(KVQ_E_EXISTS, kvq_local_add(second, e.session), "kvq_local_remove it there");
    kvq_local_close(&second);
    fine(kvq_local_remove(rig.local, e.session));
    refused(KVQ_E_STALE, kvq_local_remove(rig.local, e.session), "not in this");
    refused(KVQ_E_STALE, kvq_local_add(rig.local, 12345), "not open");
}

// An engine's own memfd is read in place, too.
static void test_imported(void **state)
{
    (void)state;
    kvq_buffer *mine;
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 4 << 20), 0);
    fine(kvq_buffer_import_memfd(rig.client, fd, 4096, 2 << 20, &mine));
    kvq_buffer *before = rig.buffer;
    rig.buffer = mine;
    open_local(1);
    struct kvq_entry e = {.session = local_open_small("m", 0, 1)};
    fine(kvq_local_add(rig.local, e.session));
    fine(local_small_step(rig.local, &e, 1, 10));
    rig.buffer = before;
    kvq_buffer_close(&mine);
    close(fd);
}

// ---- What others do ----

static kvq_client *second_client(kvq_queue **queue)
{
    const struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = rig.daemon.directory, .name = "second"};
    kvq_client *client;
    fine(kvq_connect(&options, &client));
    fine(kvq_queue_open(client, queue));
    return client;
}

static kvq_session open_there(kvq_client *client, const char *name, uint32_t flags)
{
    struct kvq_session_options o = {
        .size = sizeof o, .name = name, .flags = flags | KVQ_OPEN_MUST_EXIST};
    kvq_session s;
    fine(kvq_session_open(client, &o, &s, NULL));
    return s;
}

// A reader in another engine follows the writer when it likes, and stands still meanwhile.
static void test_reader(void **state)
{
    kvq_queue *queue;
    kvq_local *local;
    kvq_buffer *buffer, *before = rig.buffer;
    (void)state;
    open_local(1);
    struct kvq_entry e = {.session = local_open_small("book", 0, 1)};
    fine(kvq_local_add(rig.local, e.session));
    fine(local_small_step(rig.local, &e, 1, 300));
    kvq_client *client = second_client(&queue);
    fine(kvq_local_open(queue, NULL, &local));
    fine(kvq_buffer_create(client, 2 << 20, &buffer));
    struct kvq_entry r = {.session = open_there(client, "book", KVQ_OPEN_READ_ONLY),
                          .position = 300};
    fine(kvq_local_add(local, r.session));
    rig.buffer = buffer;
    fine(local_small_step(local, &r, 1, 0));
    refused(KVQ_E_READ_ONLY, local_small_step(local, &r, 1, 1), "without KVQ_OPEN_READ_ONLY");
    rig.buffer = before;
    for (int i = 0; i < 200; i++) {
        e.position = e.value;
        fine(local_small_step(rig.local, &e, 1, 1));
    }
    rig.buffer = buffer;
    fine(local_small_step(local, &r, 1, 0)); // still as at 300
    r.position = 500;
    fine(local_small_step(local, &r, 1, 0));
    r.position = 501;
    refused(KVQ_E_POSITION, local_small_step(local, &r, 1, 0), "holds 500 tokens");
    r.position = 500;
    fine(local_small_step(local, &r, 1, 0));
    rig.buffer = before;
    fine(kvq_session_drop(rig.client, e.session));
    rig.buffer = buffer;
    fine(local_small_step(local, &r, 1, 0)); // its blocks stay
    kvq_disconnect(&client);
    rig.buffer = before;
}

static void test_taken_over(void **state)
{
    kvq_queue *queue;
    (void)state;
    open_local(1);
    struct kvq_entry e = {.session = local_open_small("prize", 0, 1)};
    fine(kvq_local_add(rig.local, e.session));
    fine(local_small_step(rig.local, &e, 1, 50));
    kvq_client *client = second_client(&queue);
    open_there(client, "prize", KVQ_OPEN_TAKE_OVER);
    e.position = 50;
    refused(KVQ_E_TAKEN, local_small_step(rig.local, &e, 1, 1), "TAKE_OVER");
    kvq_disconnect(&client);
    // Closed by its own engine: the handle's place may be another's then.
    struct kvq_entry f = {.session = local_open_small("other", 0, 1)};
    fine(kvq_local_add(rig.local, f.session));
    fine(kvq_session_close(rig.client, f.session));
    refused(KVQ_E_STALE, local_small_step(rig.local, &f, 1, 1), "");
    f.session = local_open_small("another", 0, 1);
    f.position = 0;
    fine(kvq_local_add(rig.local, f.session));
    fine(local_small_step(rig.local, &f, 1, 1));
}

// ---- When the daemon dies ----

static void test_daemon_dies(void **state)
{
    struct local_model m;
    uint32_t lost;
    (void)state;
    open_local(1);
    local_model(&m, 1, 4, KV_HEADS, DIM);
    struct kvq_entry e = {.session = local_open_small("torn", 0, 1)};
    fine(kvq_local_add(rig.local, e.session));
    fine(local_small_step(rig.local, &e, 1, 200));
    e.position = 200;
    e.append = 1;
    struct kvq_work w = local_small_work(&m, 0);
    fine(kvq_local_begin(rig.local, &e, 1));
    daemon_end(&rig.daemon, SIGKILL);
    fine(kvq_local_attend(rig.local, &w, &e, 1)); // what is mapped stays
    fine(e.status);
    refused(KVQ_E_DISCONNECTED, kvq_local_end(rig.local, NULL, &e, 1), "kvq_reattach");
    refused(KVQ_E_DISCONNECTED, kvq_local_begin(rig.local, &e, 1), "kvq_reattach");
    daemon_start(&rig.daemon);
    assert_int_equal(kvq_reattach(rig.client, &lost), KVQ_E_EPOCH);
    assert_int_equal(lost, 1);
    refused(KVQ_E_CANCELLED, kvq_local_begin(rig.local, &e, 1), "open another");
    kvq_local_close(&rig.local);
    open_local(1);
    e = (struct kvq_entry){.session = local_open_small("torn", 0, 1)};
    fine(kvq_local_add(rig.local, e.session));
    fine(local_small_step(rig.local, &e, 1, 200));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_formats, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_300_steps, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_shapes, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_ragged, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_threads, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_own_threads, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_items_by_work, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_shards, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_ranks, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_rollback, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_changed_between, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_forks, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_without_requests, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_through_daemon, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_other_instructions, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_refusals, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_refused_attention, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_options, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_imported, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_reader, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_taken_over, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_daemon_dies, local_setup, local_teardown),
    };
    local_prepare(LAYERS, KV_HEADS, DIM);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return local_cleanup() || failed;
}
