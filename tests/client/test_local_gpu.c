// SPDX-License-Identifier: Apache-2.0
//
// Attention in the engine's own context on a GPU, the software driver's: the same steps there, on
// the engine's stream or replayed from a captured graph, and by the daemon give the same bits.
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

#include "kernels/cuda/share.h"
#include "tests/client/local_gpu_kit.h"

// Sessions of their own, or the shards of one; a bucket for all of them.
static void open_all(const char *format, bool shards, struct lg_pair p[SESSIONS])
{
    for (int i = 0; i < SESSIONS; i++)
        lg_open_shard(format, shards ? i : -1, &p[i]);
    lg_open_bucket(p[0].here, 64);
}

// A kvq_local that attends here, with one pair and a bucket for it.
static void open_one(struct lg_pair *p)
{
    lg_open_local(KVQ_LOCAL_REQUIRE);
    lg_open_pair("oscar2", p);
    lg_open_bucket(p->here, 64);
}

static void close_all(struct lg_pair *p, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        lg_close_pair(&p[i]);
}

static void replay(const char *format, uint32_t prompt, uint32_t steps)
{
    struct lg_pair p[SESSIONS];
    lg_open_local(KVQ_LOCAL_REQUIRE);
    assert_null(kvq_local_why(rig.local));
    open_all(format, false, p);
    lg_step(p, 1, prompt, NULL);
    lg_step(p, SESSIONS, 5, NULL);
    struct kvq_gpu_exec *exec = lg_capture(p, SESSIONS);
    for (uint32_t i = 0; i < steps; i++)
        lg_step(p, i % 8 == 5 ? 1 : SESSIONS, 1, i % 50 == 7 ? NULL : exec);
    lg_end_capture(exec);
    close_all(p, SESSIONS);
}

// Both shards of a session: what a step commits on both is packed, and shown in the page tables,
// by whatever comes next.
static void test_shards(void **state)
{
    struct lg_pair p[SESSIONS];
    (void)state;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    open_all("oscar2", true, p);
    lg_step(p, SESSIONS, 40, NULL);
    lg_step(p, SESSIONS, 60, NULL);
    struct kvq_gpu_exec *exec = lg_capture(p, SESSIONS);
    for (uint32_t i = 0; i < 150; i++)
        lg_step(p, SESSIONS, 1, i % 20 == 7 ? NULL : exec);
    lg_end_capture(exec);
    close_all(p, SESSIONS);
}

// One graph, over 300 steps: units of 32 tokens are packed, and splits become two.
static void test_300_replays(void **state)
{
    (void)state;
    replay("oscar2", 60, 300);
}

// Layers have one workspace in turns: sums of one with 4 KV heads are none of the counters of one
// with 8, whose splits would else never be merged.
static void test_unequal_layers(void **state)
{
    enum { N = 4, PROMPT = 300, APPEND = 60 };
    struct lg_pair p[N];
    (void)state;
    rig.q_heads = rig.kv_heads[0] = 8;
    rig.kv_heads[1] = 4;
    rig.window = 0;
    rig.queries = 1;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    lg_open_pair("oscar2", &p[0]);
    const struct kvq_bucket_options o = {
        .size = sizeof o, .session = p[0].here, .max_sessions = N, .max_queries = 1};
    fine(kvq_bucket_open(rig.local, &o, &rig.bucket));
    for (uint32_t t = 0; t < PROMPT; t += APPEND)
        lg_step(&p[0], 1, APPEND, NULL);
    for (uint32_t i = 1; i < N; i++)
        lg_fork_pair(&p[0], PROMPT, &p[i]);
    for (uint32_t i = 0; i < 2; i++)
        lg_step(p, N, 1, NULL);
    struct kvq_gpu_exec *exec = lg_capture(p, N);
    for (uint32_t i = 0; i < 2; i++)
        lg_step(p, N, 1, exec);
    lg_end_capture(exec);
    close_all(p, N);
}

static void test_extras(void **state)
{
    (void)state;
    replay("innerq-hybrid", 220, 20);
}

// Where a session's extras lie is not known before its first step has ended. No step after that
// waits for the GPU for it.
static void test_waits(void **state)
{
    static const char *const formats[] = {"oscar2", "innerq-hybrid", "ott2", "oscar2:sink=32"};
    struct lg_pair p[SESSIONS];
    (void)state;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    for (uint32_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        open_all(formats[f], false, p);
        for (uint32_t i = 0; i < 10; i++) {
            lg_step(p, i < 5 ? 1 : SESSIONS, i % 5 ? 1 : 200, NULL); // the first ones of each
            if (i % 5 && rig.waits && kvq_queue_order(rig.queue) != KVQ_ORDER_HOST)
                fail_msg("%s, step %u: %llu waits", formats[f], i, (unsigned long long)rig.waits);
        }
        kvq_bucket_close(&rig.bucket);
        close_all(p, SESSIONS);
    }
}

static void test_raw(void **state)
{
    (void)state;
    replay("f16", 60, 10);
}

// Tensors in the host's memory, all or some: the bits of device tensors, by launches and replayed,
// and nothing is taken after the step that gave them first.
static void host_tensors(uint32_t parts)
{
    struct lg_pair p[SESSIONS];
    rig.on_host = parts;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    open_all("oscar2", false, p);
    lg_step(p, SESSIONS, 40, NULL);
    const struct kvq_soft_counts first = soft_counts();
    for (uint32_t i = 0; i < 3; i++)
        lg_step(p, SESSIONS, 30, NULL);
    struct kvq_soft_counts now = soft_counts();
    assert_memory_equal(&now, &first, sizeof now);
    struct kvq_gpu_exec *exec = lg_capture(p, SESSIONS);
    for (uint32_t i = 0; i < 10; i++)
        lg_step(p, SESSIONS, 1, i == 7 ? NULL : exec);
    lg_end_capture(exec);
    now = soft_counts();
    assert_memory_equal(&now, &first, sizeof now);
    close_all(p, SESSIONS);
    kvq_bucket_close(&rig.bucket);
    kvq_local_close(&rig.local);
}

static void test_host_tensors(void **state)
{
    (void)state;
    fine(kvq_buffer_create(rig.client, ARENA, &rig.host));
    host_tensors(15); // all
    host_tensors(3);  // K and V
    host_tensors(8);  // outputs
}

// ---- Blocks that sessions share ----

enum { FORKS = 4, PREFIX = 1024 };

// Steps of FORKS sessions, one token each, after prompts of more than PREFIX tokens: their own, or
// one and the same, forked. Every session adds two tokens by launches and two by a graph. *launched
// and *replayed: bytes that kernels here brought in the last step of both kinds.
static void share(bool forked, uint64_t *launched, uint64_t *replayed)
{
    struct lg_pair p[FORKS];
    const struct kvq_local_options options = {
        .size = sizeof options, .place = rig.gpu, .max_tokens = 2 * PREFIX};
    fine(kvq_local_open(rig.queue, &options, &rig.local));
    for (uint32_t i = 0; i < FORKS; i++) {
        if (i == 0 || !forked) {
            lg_open_pair("kivi2", &p[i]);
            const struct kvq_bucket_options o = {
                .size = sizeof o, .session = p[i].here, .max_sessions = FORKS, .max_queries = 64};
            if (i == 0)
                fine(kvq_bucket_open(rig.local, &o, &rig.bucket));
            for (uint32_t t = 0; t < PREFIX + 256; t += ROWS)
                lg_step(&p[i], 1, ROWS, NULL);
        } else {
            lg_fork_pair(&p[0], p[0].tokens, &p[i]);
        }
    }
    for (uint32_t i = 0; i < 2; i++)
        lg_step(p, FORKS, 1, NULL);
    *launched = rig.brought;
    struct kvq_gpu_exec *exec = lg_capture(p, FORKS);
    for (uint32_t i = 0; i < 2; i++)
        lg_step(p, FORKS, 1, exec);
    *replayed = rig.brought;
    lg_end_capture(exec);
    close_all(p, FORKS);
    kvq_bucket_close(&rig.bucket);
    kvq_local_close(&rig.local);
}

// Blocks that several entries of a call share are read once, not once for each; the outputs are
// those of the daemon, which shares as well.
static void test_shared(void **state)
{
    uint64_t launched, replayed, alone_launched, alone_replayed;
    (void)state;
    share(false, &alone_launched, &alone_replayed);
    share(true, &launched, &replayed);
    // Codes of K and V, 2 bits each, of layer 0; the other one sees but a window.
    const uint64_t saved = (FORKS - 1) * (uint64_t)PREFIX * KV_HEADS * DIM * 2 * 2 / 8;
    if (launched + saved > alone_launched || replayed + saved > alone_replayed)
        fail_msg("%llu and %llu bytes were read, %llu and %llu where nothing is shared",
                 (unsigned long long)launched, (unsigned long long)replayed,
                 (unsigned long long)alone_launched, (unsigned long long)alone_replayed);
}

// Memory that the engine made, and pinned itself.
static void test_host_tensors_of_engine(void **state)
{
    void *mapping;
    (void)state;
    int fd = memfd_create("engine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, ARENA), 0);
    fine(kvq_buffer_import_memfd(rig.client, fd, 0, ARENA, &rig.host));
    mapping = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(mapping, MAP_FAILED);
    close(fd);
    rig.mapping = mapping;
    host_tensors(15);
    kvq_buffer_close(&rig.host);
    rig.mapping = NULL;
    munmap(mapping, ARENA);
    fine(kvq_buffer_create(rig.client, ARENA, &rig.host));
    OK(drv.host_register(kvq_buffer_data(rig.host), ARENA, KVQ_GPU_HOST_MAPPED));
    host_tensors(15);
    OK(drv.host_unregister(kvq_buffer_data(rig.host)));
}

static void refused_in_capture(struct lg_batch *b, const char *words)
{
    struct kvq_gpu_graph *graph;
    const struct kvq_work w = lg_work_of(0, true);
    OK(drv.capture_begin(rig.stream, KVQ_GPU_CAPTURE_RELAXED));
    refused(KVQ_E_UNSUPPORTED, lg_attend(&w, b), words);
    OK(drv.capture_end(rig.stream, &graph));
    OK(drv.graph_destroy(graph));
}

// Memory that cannot be pinned, and a capture that a first use would spoil.
static void test_host_refusals(void **state)
{
    struct lg_pair p[1];
    (void)state;
    fine(kvq_buffer_create(rig.client, ARENA, &rig.host));
    open_one(p);
    struct lg_batch b = lg_batch_of(p, 1, 4, true);
    rig.on_host = 15;
    const struct kvq_work w = lg_work_of(0, true);
    refused_in_capture(&b, "before the capture begins");
    fine(lg_begin(&b));
    fine(b.entries[0].status);
    assert_int_equal(soft_fail("host_register", 1, false, KVQ_GPU_NOT_SUPPORTED), 0);
    refused(KVQ_E_UNSUPPORTED, lg_attend(&w, &b), "kvq_buffer_create_on");
    kvq_local_abort(rig.local);
    lg_step(p, 1, 4, NULL);
    rig.on_host = 0;
    lg_step(p, 1, 4, NULL);
    lg_close_pair(p);
}

static void test_through_daemon(void **state)
{
    struct lg_pair p[SESSIONS];
    (void)state;
    setenv("KVQ_LOCAL", "daemon", 1);
    lg_open_local(0);
    assert_non_null(strstr(kvq_local_why(rig.local), "KVQ_LOCAL"));
    open_all("oscar2", false, p);
    lg_step(p, SESSIONS, 40, NULL);
    for (uint32_t i = 0; i < 5; i++)
        lg_step(p, SESSIONS, 1, NULL);
    struct lg_batch b = lg_batch_of(p, 1, 1, true);
    refused_in_capture(&b, "through the daemon");
    close_all(p, SESSIONS);
}

// A driver that maps no memory for reading alone.
static void test_no_read_only(void **state)
{
    struct lg_pair p[SESSIONS];
    (void)state;
    lg_open_local(0);
    assert_null(kvq_local_why(rig.local));
    assert_int_equal(soft_fail("memory_access", 1, true, KVQ_GPU_INVALID_VALUE), 0);
    open_all("oscar2", false, p);
    assert_int_equal(soft_fail("memory_access", 0, false, 0), 0);
    assert_non_null(strstr(kvq_local_why(rig.local), "GPU memory"));
    lg_step(p, SESSIONS, 40, NULL);
    close_all(p, SESSIONS);
}

// Limits whose product is more than kernels number are refused, not cut to what is left of them.
static void test_bucket_too_large(void **state)
{
    struct lg_pair p[1];
    const struct kvq_local_options options = {
        .size = sizeof options, .place = rig.gpu, .max_tokens = 1 << 24};
    (void)state;
    rig.q_heads = rig.kv_heads[0] = rig.kv_heads[1] = 8;
    fine(kvq_local_open(rig.queue, &options, &rig.local));
    lg_open_pair("oscar2", p);
    const struct kvq_bucket_options o = {
        .size = sizeof o, .session = p->here, .max_sessions = 1024, .max_queries = 512};
    refused(KVQ_E_LIMIT, kvq_bucket_open(rig.local, &o, &rig.bucket), "more items than kernels");
    lg_open_bucket(p->here, 64);
    lg_step(p, 1, 4, NULL);
    lg_close_pair(p);
}

// What a step's begin and end hand over is of that step alone: no graph may repeat it.
static void test_steps_in_capture(void **state)
{
    struct lg_pair p[1];
    struct kvq_gpu_graph *graph;
    struct kvq_gpu_stream *first = rig.stream, *other;
    kvq_bucket *bucket;
    (void)state;
    open_one(p);
    lg_step(p, 1, 40, NULL);
    struct lg_batch b = lg_batch_of(p, 1, 1, true);
    OK(drv.stream_create(&other, KVQ_GPU_STREAM_OWN));
    OK(drv.capture_begin(first, KVQ_GPU_CAPTURE_RELAXED));
    refused(KVQ_E_UNSUPPORTED, lg_begin(&b), "step begin: the stream is being captured");
    rig.stream = other;
    refused(KVQ_E_UNSUPPORTED, lg_begin(&b), "step begin: the bucket's last stream");
    bucket = rig.bucket;
    lg_open_bucket(p->here, 64); // behind the session's last step, which is of the first bucket
    refused(KVQ_E_UNSUPPORTED, lg_begin(&b), "step begin: the bucket's last stream");
    kvq_bucket_close(&rig.bucket);
    rig.bucket = bucket;
    rig.stream = first;
    OK(drv.capture_end(first, &graph));
    OK(drv.graph_destroy(graph));
    lg_step(p, 1, 4, NULL);
    b = lg_batch_of(p, 1, 1, true);
    lg_all_fine(lg_begin(&b), &b);
    OK(drv.capture_begin(first, KVQ_GPU_CAPTURE_RELAXED));
    refused(KVQ_E_UNSUPPORTED, kvq_local_end_on_stream(rig.local, NULL, b.entries, 1, other),
            "step end: the bucket's last stream");
    OK(drv.capture_end(first, &graph));
    OK(drv.graph_destroy(graph));
    kvq_local_abort(rig.local);
    lg_step(p, 1, 1, NULL);
    OK(drv.stream_destroy(other));
    lg_close_pair(p);
}

// A graph reads and writes where its tensors lay: begin says so when they are gone.
static void test_captured_buffer_closed(void **state)
{
    struct lg_pair p[1];
    struct kvq_gpu_graph *graph;
    (void)state;
    open_one(p);
    lg_step(p, 1, 40, NULL);
    fine(kvq_buffer_create(rig.client, ARENA, &rig.host));
    rig.on_host = 8;
    lg_step(p, 1, 1, NULL); // which pins the buffer
    struct kvq_gpu_exec *exec = lg_capture(p, 1);
    lg_step(p, 1, 1, exec);
    lg_end_capture(exec);
    kvq_buffer_close(&rig.host);
    rig.on_host = 0;
    struct lg_batch b = lg_batch_of(p, 1, 1, true);
    refused(KVQ_E_BUFFER, lg_begin(&b), "with out of layer 0 in a buffer that was closed");
    OK(drv.capture_begin(rig.stream, KVQ_GPU_CAPTURE_RELAXED));
    const struct kvq_work w = lg_work_of(0, true);
    fine(lg_attend(&w, &b));
    OK(drv.capture_end(rig.stream, &graph));
    OK(drv.graph_destroy(graph));
    refused(KVQ_E_BUFFER, lg_begin(&b), "with out of layer 1 in a buffer that was closed");
    exec = lg_capture(p, 1);
    lg_step(p, 1, 1, exec);
    lg_end_capture(exec);
    lg_close_pair(p);
}

// What one session lacks does not take the others' page tables away under a captured graph.
static void test_graph_keeps_context(void **state)
{
    struct lg_pair p[SESSIONS];
    kvq_session late;
    const struct kvq_layer row = {.q_heads = 2, .kv_heads = 1, .k_dim = DIM, .v_dim = DIM};
    const struct kvq_session_options o = {
        .size = sizeof o, .layers = &row, .n_layers = 1, .format = "oscar2", .place = rig.gpu};
    (void)state;
    lg_open_local(0);
    open_all("oscar2", false, p);
    lg_step(p, SESSIONS, 40, NULL);
    struct kvq_gpu_exec *exec = lg_capture(p, SESSIONS);
    lg_step(p, SESSIONS, 1, exec);
    fine(kvq_session_open(rig.client, &o, &late, NULL));
    assert_int_equal(soft_fail("memory_access", 1, true, KVQ_GPU_INVALID_VALUE), 0);
    refused(KVQ_E_UNSUPPORTED, kvq_local_add(rig.local, late), "a captured graph keeps");
    assert_null(kvq_local_why(rig.local));
    for (int i = 0; i < 3; i++)
        lg_step(p, SESSIONS, 1, exec);
    lg_end_capture(exec);
    kvq_bucket_close(&rig.bucket);
    fine(kvq_local_add(rig.local, late));
    assert_non_null(kvq_local_why(rig.local));
    assert_int_equal(soft_fail("memory_access", 0, false, 0), 0);
    close_all(p, SESSIONS);
    fine(kvq_session_close(rig.client, late));
}

static void test_refusals(void **state)
{
    struct lg_pair p[1];
    kvq_local *host;
    kvq_client *other;
    kvq_buffer *elsewhere;
    (void)state;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    const struct kvq_bucket_options o = {.size = sizeof o, .session = 4711};
    refused(KVQ_E_STALE, kvq_bucket_open(rig.local, &o, &rig.bucket), "not in this");
    lg_open_pair("oscar2", p);
    OK(drv.context_set(NULL)); // whatever context is current
    lg_open_bucket(p->here, 4);
    OK(drv.context_set(soft_context));
    struct lg_batch b = lg_batch_of(p, 1, 4, true);
    struct kvq_work w = lg_work_of(0, true);
    refused(KVQ_E_INVALID, kvq_local_begin(rig.local, b.entries, 1), "have a stream");
    fine(kvq_local_open(rig.queue, NULL, &host));
    refused(KVQ_E_INVALID, kvq_local_begin_on_stream(host, rig.bucket, b.entries, 1, rig.stream),
            "no stream");
    kvq_local_close(&host);
    refused(KVQ_E_NO_STEP, lg_attend(&w, &b), "begin_on_stream");
    b.entries[0].queries = 5;
    fine(lg_begin(&b));
    refused(KVQ_E_LIMIT, b.entries[0].status, "entry 0");
    b.entries[0].queries = 4;
    b.entries[0].position = 3;
    fine(lg_begin(&b));
    refused(KVQ_E_POSITION, b.entries[0].status, "holds 0 tokens");
    b.entries[0].position = 0;
    fine(lg_begin(&b));
    fine(b.entries[0].status);
    fine(kvq_connect(&(struct kvq_connect_options){.size = sizeof(struct kvq_connect_options),
                                                   .runtime_dir = rig.daemon.directory},
                     &other));
    fine(kvq_buffer_create(other, ARENA, &elsewhere));
    w.q.buffer = elsewhere;
    refused(KVQ_E_BUFFER, lg_attend(&w, &b), "q");
    kvq_disconnect(&other);
    kvq_local_abort(rig.local);
    lg_step(p, 1, 4, NULL);
    lg_close_pair(p);
}

// An entry that a captured layer refuses at the begin, for a row far out of its buffer, is not in
// the step: a layer that is launched may write where it would have reached.
static void test_refused_rows_are_free(void **state)
{
    struct lg_pair p[SESSIONS];
    struct kvq_gpu_exec *exec;
    (void)state;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    open_all("oscar2", false, p);
    lg_step(p, SESSIONS, 40, NULL);
    rig.layers = 1;
    exec = lg_capture(p, SESSIONS);
    rig.layers = LAYERS;
    lg_fill();
    struct lg_batch there = lg_batch_of(p, 1, 1, false);
    struct lg_batch here = lg_batch_of(p, SESSIONS, 1, true);
    const struct kvq_work w = lg_work_of(1, true);
    lg_step_there(&there);
    here.entries[1].row = 1 << 20;
    fine(lg_begin(&here));
    assert_int_equal(here.entries[0].status, 0);
    refused(KVQ_E_BOUNDS, here.entries[1].status, "");
    OK(drv.graph_launch(exec, rig.stream));
    here.n = 1;
    lg_all_fine(lg_attend(&w, &here), &here);
    lg_all_fine(kvq_local_end_on_stream(rig.local, NULL, here.entries, 1, rig.stream), &here);
    OK(drv.stream_sync(rig.stream));
    lg_compare(1, p->tokens);
    lg_end_capture(exec);
    close_all(p, SESSIONS);
}

// Two calls for one layer before the stream has come to the first one: each has its own batch.
static void test_calls_ahead_of_the_stream(void **state)
{
    struct lg_pair p[SESSIONS];
    struct kvq_gpu_stream *other;
    (void)state;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    open_all("oscar2", false, p);
    lg_step(p, SESSIONS, 5, NULL);
    lg_fill();
    struct lg_batch there = lg_batch_of(p, SESSIONS, 4, false);
    struct lg_batch here = lg_batch_of(p, SESSIONS, 4, true);
    lg_step_there(&there);
    lg_all_fine(lg_begin(&here), &here);
    OK(drv.stream_create(&other, KVQ_GPU_STREAM_OWN));
    const struct kvq_work first = lg_work_of(0, true);
    refused(KVQ_E_INVALID,
            kvq_local_attend_on_stream(rig.local, rig.bucket, &first, here.entries, 1, other),
            "began the step on");
    OK(drv.stream_destroy(other));
    OK(drv.stream_sync(rig.stream)); // so that no call here waits for it
    soft_stall(rig.stream, true);
    for (uint32_t i = 0; i < rig.layers; i++) {
        const struct kvq_work w = lg_work_of(i, true);
        for (uint32_t s = 0; s < SESSIONS; s++) {
            struct lg_batch one = {.entries = {here.entries[s]}, .n = 1};
            lg_all_fine(lg_attend(&w, &one), &one);
        }
    }
    soft_stall(rig.stream, false);
    lg_all_fine(kvq_local_end_on_stream(rig.local, NULL, here.entries, SESSIONS, rig.stream),
                &here);
    OK(drv.stream_sync(rig.stream));
    lg_compare(here.q_rows, p->tokens);
    close_all(p, SESSIONS);
}

// The first layer of a step behind one that was ended here, and that the pair does not count yet.
static void attend_ahead(const struct lg_pair *p)
{
    struct lg_pair next = *p;
    next.tokens++;
    struct lg_batch b = lg_batch_of(&next, 1, 1, true);
    const struct kvq_work w = lg_work_of(0, true);
    lg_all_fine(lg_begin(&b), &b);
    lg_all_fine(lg_attend(&w, &b), &b);
}

// A step on another stream than the last: both use the bucket's memory, so it waits for that one.
static void test_another_stream(void **state)
{
    struct kvq_gpu_stream *first = rig.stream, *other;
    struct lg_pair p[1];
    (void)state;
    open_one(p);
    lg_step(p, 1, 40, NULL); // whose first request on a stream finds the order
    if (kvq_queue_order(rig.queue) == KVQ_ORDER_HOST)
        skip(); // the end of a step waits for the stream there
    OK(drv.stream_create(&other, KVQ_GPU_STREAM_OWN));
    OK(drv.stream_sync(first)); // so that no call here waits for it
    soft_stall(first, true);
    assert_int_equal(lg_step_here(p, p->tokens, 1), 0);
    rig.stream = other;
    attend_ahead(p);
    for (int i = 0; i < 100000; i++)
        assert_int_equal(drv.stream_query(other), KVQ_GPU_NOT_READY);
    soft_stall(first, false);
    OK(drv.stream_sync(first));
    OK(drv.stream_sync(other));
    kvq_local_abort(rig.local);
    rig.stream = first;
    kvq_bucket_close(&rig.bucket);
    OK(drv.stream_destroy(other));
    lg_close_pair(p);
}

// The end of a step on another stream is behind the step's attention, and the next step behind it.
static void test_end_on_another_stream(void **state)
{
    struct kvq_gpu_stream *first = rig.stream, *other;
    struct lg_pair p[1];
    (void)state;
    open_one(p);
    lg_step(p, 1, 40, NULL);
    if (kvq_queue_order(rig.queue) == KVQ_ORDER_HOST)
        skip(); // the end of a step waits for the stream there
    OK(drv.stream_create(&other, KVQ_GPU_STREAM_OWN));
    for (int i = 0; i < 2; i++) {
        struct kvq_gpu_stream *held = i ? other : first;
        struct lg_batch b = lg_batch_of(p, 1, 1, true);
        OK(drv.stream_sync(first));
        OK(drv.stream_sync(other));
        lg_all_fine(lg_begin(&b), &b);
        soft_stall(held, true);
        for (uint32_t layer = 0; layer < rig.layers; layer++) {
            const struct kvq_work w = lg_work_of(layer, true);
            lg_all_fine(lg_attend(&w, &b), &b);
        }
        lg_all_fine(kvq_local_end_on_stream(rig.local, NULL, b.entries, 1, other), &b);
        p->tokens++;
        b = lg_batch_of(p, 1, 1, true);
        lg_all_fine(lg_begin(&b), &b);
        const struct kvq_work w = lg_work_of(0, true);
        lg_all_fine(lg_attend(&w, &b), &b);
        int looks = 0;
        while (looks < 100000 && drv.stream_query(i ? first : other) == KVQ_GPU_NOT_READY)
            looks++;
        soft_stall(held, false);
        assert_int_equal(looks, 100000);
        kvq_local_abort(rig.local);
    }
    kvq_bucket_close(&rig.bucket);
    OK(drv.stream_sync(first));
    OK(drv.stream_sync(other));
    OK(drv.stream_destroy(other));
    lg_close_pair(p);
}

// A step on another stream, with another bucket: the session's table and blocks are what the last
// step leaves.
static void test_another_bucket(void **state)
{
    struct kvq_gpu_stream *first = rig.stream, *other;
    kvq_bucket *bucket;
    struct lg_pair p[1];
    const char *order = getenv("KVQ_GPU_ORDER");
    (void)state;
    if (order && strcmp(order, "host") == 0)
        skip(); // the end of a step waits for the stream there
    open_one(p);
    bucket = rig.bucket;
    lg_step(p, 1, 40, NULL);
    OK(drv.stream_create(&other, KVQ_GPU_STREAM_OWN));
    OK(drv.stream_sync(first));
    soft_stall(first, true);
    assert_int_equal(lg_step_here(p, p->tokens, 1), 0);
    rig.stream = other;
    lg_open_bucket(p->here, 64);
    attend_ahead(p);
    int looks = 0;
    while (looks < 100000 && drv.stream_query(other) == KVQ_GPU_NOT_READY)
        looks++;
    soft_stall(first, false);
    assert_int_equal(looks, 100000);
    OK(drv.stream_sync(first));
    OK(drv.stream_sync(other));
    kvq_local_abort(rig.local);
    rig.stream = first;
    kvq_bucket_close(&rig.bucket);
    kvq_bucket_close(&bucket);
    OK(drv.stream_destroy(other));
    lg_close_pair(p);
}

// A step that only reads, under way on one stream, and then a session that was changed, on another:
// its table is not written anew before the first stream has read it.
static void test_table_read_by_another_stream(void **state)
{
    struct kvq_gpu_stream *first = rig.stream, *other;
    struct kvq_gpu_event *read;
    struct lg_pair p[1];
    (void)state;
    open_one(p);
    lg_step(p, 1, 40, NULL);
    OK(drv.stream_create(&other, KVQ_GPU_STREAM_OWN));
    OK(drv.stream_sync(first));
    struct lg_batch b = lg_batch_of(p, 1, 0, true);
    b.entries[0].queries = 1;
    const struct kvq_work w = lg_work_of(0, true);
    lg_all_fine(lg_begin(&b), &b);
    soft_stall(first, true);
    lg_all_fine(lg_attend(&w, &b), &b);
    lg_all_fine(kvq_local_end_on_stream(rig.local, NULL, b.entries, 1, first), &b);
    OK(drv.event_create(&read, KVQ_GPU_EVENT_UNTIMED));
    OK(drv.event_record(read, first));
    const uint64_t to = p->tokens - 1;
    fine(kvq_truncate(rig.queue, b.entries, &to, 1));
    b.entries[0].position = to;
    soft_call_begin(first);
    rig.stream = other;
    lg_all_fine(lg_begin(&b), &b);
    assert_int_equal(drv.event_query(read), KVQ_GPU_OK);
    soft_call_end();
    kvq_local_abort(rig.local);
    rig.stream = first;
    kvq_bucket_close(&rig.bucket);
    OK(drv.stream_destroy(other));
    OK(drv.event_destroy(read));
    lg_close_pair(p);
}

// What is not finite is found when nobody waits; the next end tells, and the session stands as
// before the step that had it. Where the host orders requests it waits, and that end tells itself.
static void test_not_finite(void **state)
{
    struct lg_pair p[1];
    const float nan = __builtin_nanf("");
    (void)state;
    open_one(p);
    lg_step(p, 1, 30, NULL);
    bool waits = kvq_queue_order(rig.queue) == KVQ_ORDER_HOST;
    for (int round = 0; round < (waits ? 1 : 2); round++) {
        lg_fill();
        if (round == 0)
            OK(drv.copy_in(rig.at, &nan, sizeof nan, rig.stream));
        int ended = lg_step_here(p, p->tokens + (uint64_t)round, 1);
        assert_int_equal(ended, round == 0 && !waits ? 0 : KVQ_E_NONFINITE);
        OK(drv.stream_sync(rig.stream));
    }
    lg_step(p, 1, 1, NULL);
    lg_close_pair(p);
}

// What is mapped stays, and the stream goes on.
static void test_daemon_dies(void **state)
{
    struct lg_pair p[1];
    uint32_t lost;
    (void)state;
    open_one(p);
    lg_step(p, 1, 40, NULL);
    struct lg_batch b = lg_batch_of(p, 1, 1, true);
    const struct kvq_work w = lg_work_of(0, true);
    fine(lg_begin(&b));
    daemon_end(&rig.daemon, SIGKILL);
    fine(lg_attend(&w, &b));
    OK(drv.stream_sync(rig.stream));
    refused(KVQ_E_DISCONNECTED, kvq_local_end_on_stream(rig.local, NULL, b.entries, 1, rig.stream),
            "kvq_reattach");
    OK(drv.stream_sync(rig.stream));
    daemon_start(&rig.daemon);
    assert_int_equal(kvq_reattach(rig.client, &lost), KVQ_E_EPOCH);
    refused(KVQ_E_CANCELLED, lg_begin(&b), "open another");
    kvq_bucket_close(&rig.bucket);
    kvq_local_close(&rig.local);
    open_one(p);
    lg_step(p, 1, 40, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_shards, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_raw, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_unequal_layers, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_extras, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_waits, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_shared, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_host_tensors, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_host_tensors_of_engine, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_host_refusals, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_through_daemon, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_no_read_only, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_bucket_too_large, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_steps_in_capture, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_captured_buffer_closed, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_graph_keeps_context, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_refusals, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_calls_ahead_of_the_stream, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_refused_rows_are_free, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_another_stream, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_end_on_another_stream, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_another_bucket, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_table_read_by_another_stream, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_not_finite, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_daemon_dies, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_300_replays, lg_setup, lg_teardown),
    };
    lg_prepare();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return lg_cleanup() || failed;
}
