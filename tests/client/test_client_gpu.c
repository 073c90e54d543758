// SPDX-License-Identifier: Apache-2.0
//
// libkvq on a GPU, the software driver's: this process is the engine, with streams and memory of
// its own, and kvqd is another process that is stopped, killed and started again.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/kvq.h"
#include "kernels/cuda/share.h"
#include "tests/kits/daemon_kit.h"
#include "tests/kits/soft_kit.h"

enum { TOKENS = 70, DIM = 64, Q_HEADS = 4, KV_HEADS = 2, ARENA = 1 << 20 };

static struct {
    struct daemon daemon;
    kvq_client *client;
    kvq_queue *queue;
    char gpu[48];
    struct kvq_gpu_stream *stream;
    struct kvq_soft_counts before;
    int files;
    int order;         // that is to come out
    const char *asked; // by force; or NULL
    const char *lacks; // what the daemon's driver does not have; or NULL
} rig = {.order = KVQ_ORDER_WORDS};

// Before the new process becomes kvqd.
static void take_from_driver(void)
{
    if (rig.lacks)
        setenv("KVQ_EMU_LACKS", rig.lacks, 1);
}

static int setup(void **state)
{
    (void)state;
    struct kvq_gpu_info gpu;
    uint32_t n;
    rig.before = soft_counts();
    rig.files = soft_open_files();
    setenv("KVQ_GPU_ORDER", rig.asked ? rig.asked : "", 1);
    daemon_start(&rig.daemon);
    const struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = rig.daemon.directory, .timeout_ms = 20000};
    fine(kvq_connect(&options, &rig.client));
    fine(kvq_queue_open(rig.client, &rig.queue));
    fine(kvq_daemon_gpus(rig.client, &gpu, 1, &n));
    assert_int_equal(n, 1);
    assert_int_equal(strncmp(gpu.place, "GPU-", 4), 0);
    assert_true(gpu.name[0]);
    memcpy(rig.gpu, gpu.place, sizeof rig.gpu);
    OK(drv.stream_create(&rig.stream, KVQ_GPU_STREAM_OWN));
    return 0;
}

// Nothing is left here, and the daemon leaves in good order.
static int teardown(void **state)
{
    (void)state;
    kvq_disconnect(&rig.client);
    rig.queue = NULL;
    soft_stall(rig.stream, false);
    OK(drv.stream_sync(rig.stream));
    OK(drv.stream_destroy(rig.stream));
    if (rig.daemon.pid)
        daemon_end(&rig.daemon, SIGTERM);
    const struct kvq_soft_counts now = soft_counts();
    assert_memory_equal(&now, &rig.before, sizeof now);
    assert_int_equal(soft_open_files(), rig.files);
    return 0;
}

// ---- A small model ----

struct run {
    kvq_buffer *buffer; // of ARENA bytes
    struct kvq_work work;
    struct kvq_entry entry;
};

static float value_of(uint32_t token, uint32_t i, uint32_t salt)
{
    return (float)((token * 131 + i * 17 + salt * 71) % 211) / 105 - 1;
}

static void put_tensors(struct run *r)
{
    r->work.k = kvq_tensor_make(r->buffer, 0, KV_HEADS, DIM, KVQ_DTYPE_F32);
    r->work.v = kvq_tensor_make(r->buffer, 128 << 10, KV_HEADS, DIM, KVQ_DTYPE_F32);
    r->work.q = kvq_tensor_make(r->buffer, 256 << 10, Q_HEADS, DIM, KVQ_DTYPE_F32);
    r->work.out = kvq_tensor_make(r->buffer, 512 << 10, Q_HEADS, DIM, KVQ_DTYPE_F32);
    r->work.lse = kvq_tensor_make(r->buffer, 768 << 10, Q_HEADS, 1, KVQ_DTYPE_F32);
}

// K, V and Q of tokens from `first` on, as they lie in a buffer.
static uint8_t *inputs(uint32_t first, uint32_t tokens)
{
    static uint8_t bytes[512 << 10];
    float *k = (float *)bytes, *v = (float *)(bytes + (128 << 10));
    float *q = (float *)(bytes + (256 << 10));
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t i = 0; i < KV_HEADS * DIM; i++) {
            k[t * KV_HEADS * DIM + i] = value_of(first + t, i, 1);
            v[t * KV_HEADS * DIM + i] = value_of(first + t, i, 2);
        }
        for (uint32_t i = 0; i < Q_HEADS * DIM; i++)
            q[t * Q_HEADS * DIM + i] = value_of(first + t, i, 3);
    }
    return bytes;
}

static void open_session(struct run *r, const char *place)
{
    static const struct kvq_layer layer = {
        .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM};
    const struct kvq_session_options options = {
        .size = sizeof options, .layers = &layer, .n_layers = 1, .format = "k8v4", .place = place};
    struct kvq_session_info info = {.size = sizeof info};
    fine(kvq_session_open(rig.client, &options, &r->entry.session, &info));
    assert_string_equal(info.place, place);
    bool gpu = strcmp(place, "host") != 0;
    assert_true(gpu == (strcmp(info.isa, "sm_90") == 0)); // the software driver's capability
    assert_string_equal(info.attention, gpu ? "gpu" : "exact");
}

static void begin_step(struct run *r, uint32_t tokens)
{
    r->entry.append = tokens;
    r->entry.queries = (uint16_t)tokens;
    fine(kvq_step_begin(rig.queue, &r->entry, 1, &r->work.step));
    fine(r->entry.status);
}

static void end_step(struct run *r)
{
    fine(kvq_step_end(rig.queue, r->work.step, &r->entry, 1));
    fine(r->entry.status);
    r->entry.position = r->entry.value;
}

// The output and LSE of TOKENS tokens in one step and one more in another, on the host.
static void on_host(float *out, float *one)
{
    struct run r = {0};
    fine(kvq_buffer_create(rig.client, ARENA, &r.buffer));
    put_tensors(&r);
    open_session(&r, "host");
    uint8_t *memory = kvq_buffer_data(r.buffer);
    for (uint32_t n = TOKENS; n; n = n == TOKENS ? 1 : 0) {
        begin_step(&r, n);
        memcpy(memory, inputs(n == TOKENS ? 0 : TOKENS, n), 512 << 10);
        fine(kvq_append_attend(rig.queue, &r.work, &r.entry, 1));
        fine(r.entry.status);
        end_step(&r);
        memcpy(n == TOKENS ? out : one, memory + (512 << 10),
               (size_t)n * Q_HEADS * DIM * sizeof(float));
    }
    fine(kvq_session_close(rig.client, r.entry.session));
    kvq_buffer_close(&r.buffer);
}

static void compare(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!(a[i] - b[i] < 2e-3f && b[i] - a[i] < 2e-3f))
            fail_msg("value %zu is %f and %f", i, (double)a[i], (double)b[i]);
}

// The same in the order of the engine's stream, tensors at a device address.
static void on_stream(struct run *r, kvq_gpu_ptr at, float *out, float *one)
{
    static float results[TOKENS * Q_HEADS * DIM];
    for (uint32_t n = TOKENS; n; n = n == TOKENS ? 1 : 0) {
        const uint8_t *from = inputs(n == TOKENS ? 0 : TOKENS, n);
        begin_step(r, n);
        OK(drv.copy_in(at, from, 512 << 10, rig.stream));
        fine(kvq_append_on_stream(rig.queue, &r->work, &r->entry, 1, rig.stream));
        fine(r->entry.status);
        fine(kvq_attend_on_stream(rig.queue, &r->work, &r->entry, 1, rig.stream));
        fine(r->entry.status);
        size_t bytes = (size_t)n * Q_HEADS * DIM * sizeof(float);
        OK(drv.copy_out(results, at + (512 << 10), bytes, rig.stream));
        OK(drv.stream_sync(rig.stream));
        memcpy(n == TOKENS ? out : one, results, bytes);
        end_step(r);
    }
}

static float host_out[TOKENS * Q_HEADS * DIM], host_one[Q_HEADS * DIM];
static float gpu_out[TOKENS * Q_HEADS * DIM], gpu_one[Q_HEADS * DIM];

static void same_as_on_host(struct run *r, kvq_gpu_ptr at)
{
    put_tensors(r);
    open_session(r, rig.gpu);
    on_stream(r, at, gpu_out, gpu_one);
    on_host(host_out, host_one);
    compare(gpu_out, host_out, TOKENS * Q_HEADS * DIM);
    compare(gpu_one, host_one, Q_HEADS * DIM);
    fine(kvq_session_close(rig.client, r->entry.session));
    kvq_buffer_close(&r->buffer);
}

// ---- Tests ----

static void test_arena(void **state)
{
    (void)state;
    struct run r = {0};
    refused(KVQ_E_INVALID, kvq_buffer_create_on(rig.client, "GPU-other", ARENA, &r.buffer),
            "the current context is of GPU-");
    OK(drv.context_set(NULL));
    refused(KVQ_E_INVALID, kvq_buffer_create_on(rig.client, NULL, ARENA, &r.buffer),
            "no current CUDA context");
    OK(drv.context_set(soft_context));
    refused(KVQ_E_LIMIT, kvq_buffer_create_on(rig.client, NULL, 1 << 30, &r.buffer),
            "client_bytes");
    assert_null(r.buffer);
    fine(kvq_buffer_create_on(rig.client, rig.gpu, ARENA, &r.buffer));
    assert_null(kvq_buffer_data(r.buffer));
    assert_int_equal(kvq_buffer_size(r.buffer), ARENA);
    assert_int_equal(kvq_queue_order(rig.queue), KVQ_ORDER_NONE);
    same_as_on_host(&r, (uintptr_t)kvq_buffer_device(r.buffer));
    assert_int_equal(kvq_queue_order(rig.queue), rig.order);
}

// Memory of cudaMalloc, by handle; the daemon is another process.
static void test_import(void **state)
{
    (void)state;
    struct run r = {0};
    kvq_gpu_ptr at;
    OK(drv.memory_alloc(&at, 4 * ARENA));
    refused(KVQ_E_BUFFER,
            kvq_buffer_import(rig.client, (void *)(uintptr_t)at, 4 * ARENA + 1, &r.buffer),
            "reach beyond their allocation");
    fine(kvq_buffer_import(rig.client, (void *)(uintptr_t)(at + ARENA), ARENA, &r.buffer));
    assert_true(kvq_buffer_device(r.buffer) == (void *)(uintptr_t)(at + ARENA));
    same_as_on_host(&r, at + ARENA);
    OK(drv.memory_free(at));
}

// Memory of cuMemCreate, by descriptor, and what cannot be handed over at all.
static void test_import_mapped(void **state)
{
    (void)state;
    char text[KVQ_GPU_TEXT];
    struct run r = {0};
    struct kvq_gpu_piece piece;
    static uint8_t host[64];
    assert_int_equal(kvq_gpu_piece_make(&drv, 0, ARENA, &piece, text, sizeof text), 0);
    fine(kvq_buffer_import(rig.client, (void *)(uintptr_t)piece.at, ARENA, &r.buffer));
    same_as_on_host(&r, piece.at);
    kvq_gpu_piece_release(&drv, &piece);
    refused(KVQ_E_BUFFER, kvq_buffer_import(rig.client, host, sizeof host, &r.buffer),
            "no address that CUDA knows");
    refused(KVQ_E_INVALID, kvq_buffer_import(rig.client, NULL, 64, &r.buffer), "is NULL");
    kvq_gpu_ptr at;
    OK(drv.memory_alloc(&at, ARENA));
    assert_int_equal(soft_fail("ipc_memory_get", 1, false, KVQ_GPU_NOT_SUPPORTED), 0);
    refused(KVQ_E_UNSUPPORTED,
            kvq_buffer_import(rig.client, (void *)(uintptr_t)at, ARENA, &r.buffer), "IPC handle");
    OK(drv.memory_free(at));
}

// Lets the stream go on, but not at once.
static void *let_go(void *context)
{
    const struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = rig.daemon.directory, .timeout_ms = 20000};
    kvq_client *client;
    for (int i = 0; i < 5; i++) {
        if (kvq_connect(&options, &client) == KVQ_OK)
            kvq_disconnect(&client);
    }
    soft_stall(rig.stream, false);
    return context;
}

// The request is sent when the stream has made the tensors, and not before.
static void test_host_order_waits(void **state)
{
    (void)state;
    struct run r = {0};
    pthread_t thread;
    setenv("KVQ_GPU_ORDER", "host", 1);
    fine(kvq_buffer_create_on(rig.client, NULL, 2 * ARENA, &r.buffer));
    put_tensors(&r);
    open_session(&r, rig.gpu);
    kvq_gpu_ptr at = (uintptr_t)kvq_buffer_device(r.buffer);
    fine(kvq_queue_prepare_streams(rig.queue));
    OK(drv.copy_in(at + ARENA, inputs(0, TOKENS), 512 << 10, NULL));
    OK(drv.stream_sync(NULL));
    begin_step(&r, TOKENS);
    soft_stall(rig.stream, true);
    OK(drv.copy_device(at, at + ARENA, 512 << 10, rig.stream));
    assert_int_equal(pthread_create(&thread, NULL, let_go, NULL), 0);
    fine(kvq_append_attend_on_stream(rig.queue, &r.work, &r.entry, 1, rig.stream));
    pthread_join(thread, NULL);
    OK(drv.copy_out(gpu_out, at + (512 << 10), sizeof gpu_out, rig.stream));
    OK(drv.stream_sync(rig.stream));
    end_step(&r);
    on_host(host_out, host_one);
    compare(gpu_out, host_out, TOKENS * Q_HEADS * DIM);
    kvq_buffer_close(&r.buffer);
}

// Without words or events the host waits, and the results are the same.
static void test_host_order(void **state)
{
    (void)state;
    struct run r = {0};
    setenv("KVQ_GPU_ORDER", "host", 1);
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &r.buffer));
    same_as_on_host(&r, (uintptr_t)kvq_buffer_device(r.buffer));
    assert_int_equal(kvq_queue_order(rig.queue), KVQ_ORDER_HOST);
}

// A new queue, of which `call` fails once, when order is asked for (NULL: whichever there is).
static void new_queue(const char *order, const char *call)
{
    kvq_queue_close(&rig.queue);
    setenv("KVQ_GPU_ORDER", order ? order : "", 1);
    fine(kvq_queue_open(rig.client, &rig.queue));
    if (call)
        assert_int_equal(soft_fail(call, 1, false, KVQ_GPU_NOT_SUPPORTED), 0);
}

// What there is in this place is found out, not believed; what is asked for is not replaced.
static void test_which_order(void **state)
{
    (void)state;
    static const char *const words[] = {"host_register", "stream_write64", "stream_wait64"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        new_queue(NULL, words[i]);
        fine(kvq_queue_prepare_streams(rig.queue));
        assert_int_equal(kvq_queue_order(rig.queue), KVQ_ORDER_EVENTS);
    }
    new_queue(NULL, "stream_wait64");
    assert_int_equal(soft_fail("ipc_event_open", 9, false, KVQ_GPU_NOT_SUPPORTED), 0);
    fine(kvq_queue_prepare_streams(rig.queue));
    assert_int_equal(kvq_queue_order(rig.queue), KVQ_ORDER_HOST);
    new_queue("words", "stream_write64");
    refused(KVQ_E_UNSUPPORTED, kvq_queue_prepare_streams(rig.queue), "KVQ_GPU_ORDER=words");
    new_queue("events", "ipc_event_open");
    refused(KVQ_E_UNSUPPORTED, kvq_queue_prepare_streams(rig.queue), "share /dev/shm");
    new_queue("nonsense", NULL);
    refused(KVQ_E_INVALID, kvq_queue_prepare_streams(rig.queue), "words, events or host");
    new_queue("events", NULL);
    fine(kvq_queue_prepare_streams(rig.queue));
    assert_int_equal(kvq_queue_order(rig.queue), KVQ_ORDER_EVENTS);
    new_queue(NULL, NULL);
    fine(kvq_queue_prepare_streams(rig.queue));
    assert_int_equal(kvq_queue_order(rig.queue), KVQ_ORDER_WORDS);
}

// The calls return while the stream has yet to make the tensors.
static void test_nobody_waits(void **state)
{
    (void)state;
    struct run r = {0};
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &r.buffer));
    put_tensors(&r);
    open_session(&r, rig.gpu);
    kvq_gpu_ptr at = (uintptr_t)kvq_buffer_device(r.buffer);
    begin_step(&r, TOKENS);
    soft_stall(rig.stream, true);
    OK(drv.copy_in(at, inputs(0, TOKENS), 512 << 10, rig.stream));
    // Not even the first call waits for the GPU, which opens the timeline.
    fine(kvq_append_attend_on_stream(rig.queue, &r.work, &r.entry, 1, rig.stream));
    fine(r.entry.status);
    assert_int_equal(drv.stream_query(rig.stream), KVQ_GPU_NOT_READY);
    // Another queue's host session is served meanwhile.
    kvq_queue *mine = rig.queue;
    fine(kvq_queue_open(rig.client, &rig.queue));
    on_host(host_out, host_one);
    kvq_queue_close(&rig.queue);
    rig.queue = mine;
    soft_stall(rig.stream, false);
    OK(drv.copy_out(gpu_out, at + (512 << 10), sizeof gpu_out, rig.stream));
    OK(drv.stream_sync(rig.stream));
    end_step(&r);
    compare(gpu_out, host_out, TOKENS * Q_HEADS * DIM);
    kvq_buffer_close(&r.buffer);
}

// A request that is refused lets the stream go on.
static void test_refused(void **state)
{
    (void)state;
    struct run r = {0};
    int status;
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &r.buffer));
    put_tensors(&r);
    open_session(&r, rig.gpu);
    begin_step(&r, 1);
    for (int i = 0; i < 2; i++) {
        struct kvq_entry wrong = r.entry;
        struct kvq_work work = r.work;
        wrong.position += i == 0;
        work.k.offset = i == 1 ? ARENA : 0;
        status = kvq_append_on_stream(rig.queue, &work, &wrong, 1, rig.stream);
        assert_true(status || wrong.status);
        OK(drv.stream_sync(rig.stream)); // would wait for ever
    }
    kvq_ticket ticket;
    refused(
        KVQ_E_INVALID,
        kvq_submit_on_stream(rig.queue, KVQ_DO_STEP_END, &r.work, &r.entry, 1, rig.stream, &ticket),
        "cannot run on a stream");
    OK(drv.capture_begin(rig.stream, KVQ_GPU_CAPTURE_RELAXED));
    refused(KVQ_E_UNSUPPORTED, kvq_append_on_stream(rig.queue, &r.work, &r.entry, 1, rig.stream),
            "being captured");
    struct kvq_gpu_graph *graph;
    OK(drv.capture_end(rig.stream, &graph));
    OK(drv.graph_destroy(graph));
    bool words = rig.order == KVQ_ORDER_WORDS;
    const char *tell = words ? "stream_write64" : "event_record";
    assert_int_equal(soft_fail(tell, 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    refused(KVQ_E_NO_MEMORY, kvq_append_on_stream(rig.queue, &r.work, &r.entry, 1, rig.stream),
            "tell the daemon");
    // If the stream cannot be made to wait, the host has waited.
    OK(drv.copy_in((uintptr_t)kvq_buffer_device(r.buffer), inputs(0, 1), 512 << 10, rig.stream));
    const char *wait = words ? "stream_wait64" : "stream_wait";
    assert_int_equal(soft_fail(wait, 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    refused(KVQ_E_NO_MEMORY, kvq_append_on_stream(rig.queue, &r.work, &r.entry, 1, rig.stream),
            "wait for the daemon");
    end_step(&r); // it was appended
    assert_int_equal(r.entry.position, 1);
    begin_step(&r, 1);
    r.work.layer = 7; // which there is not: the step will not commit
    status = kvq_append_on_stream(rig.queue, &r.work, &r.entry, 1, rig.stream);
    assert_true(status || r.entry.status);
    OK(drv.stream_sync(rig.stream));
    r.work.layer = 0;
    fine(kvq_append_on_stream(rig.queue, &r.work, &r.entry, 1, rig.stream));
    OK(drv.stream_sync(rig.stream));
    status = kvq_step_end(rig.queue, r.work.step, &r.entry, 1);
    assert_int_equal(status ? status : r.entry.status, KVQ_E_INCOMPLETE);
    kvq_buffer_close(&r.buffer);
}

// Tickets on a stream: eight at once, in their order.
static void test_tickets(void **state)
{
    (void)state;
    struct run r = {0};
    struct kvq_entry entries[8];
    kvq_ticket tickets[8], more;
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &r.buffer));
    put_tensors(&r);
    open_session(&r, rig.gpu);
    kvq_gpu_ptr at = (uintptr_t)kvq_buffer_device(r.buffer);
    begin_step(&r, TOKENS);
    OK(drv.copy_in(at, inputs(0, TOKENS), 512 << 10, rig.stream));
    for (int i = 0; i < 8; i++) {
        entries[i] = r.entry;
        fine(kvq_submit_on_stream(rig.queue, i ? KVQ_DO_ATTEND : KVQ_DO_APPEND, &r.work,
                                  &entries[i], 1, rig.stream, &tickets[i]));
    }
    refused(
        KVQ_E_CREDITS,
        kvq_submit_on_stream(rig.queue, KVQ_DO_ATTEND, &r.work, &entries[0], 1, rig.stream, &more),
        "8 tickets");
    for (int i = 0; i < 8; i++) {
        fine(kvq_wait(rig.queue, tickets[i], UINT64_MAX));
        fine(entries[i].status);
    }
    OK(drv.copy_out(gpu_out, at + (512 << 10), sizeof gpu_out, rig.stream));
    OK(drv.stream_sync(rig.stream));
    end_step(&r);
    on_host(host_out, host_one);
    compare(gpu_out, host_out, TOKENS * Q_HEADS * DIM);
    kvq_buffer_close(&r.buffer);
}

// The daemon is killed while the engine's stream waits for it: the stream goes on, calls say so,
// and when there is a daemon again everything is as before, at the same addresses.
static void test_daemon_killed(void **state)
{
    (void)state;
    struct run arena = {0}, tensor = {0};
    kvq_gpu_ptr own;
    uint32_t lost = 0;
    OK(drv.memory_alloc(&own, ARENA));
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &arena.buffer));
    fine(kvq_buffer_import(rig.client, (void *)(uintptr_t)own, ARENA, &tensor.buffer));
    put_tensors(&arena);
    open_session(&arena, rig.gpu);
    kvq_gpu_ptr at = (uintptr_t)kvq_buffer_device(arena.buffer);
    begin_step(&arena, TOKENS);
    soft_stall(rig.stream, true);
    OK(drv.copy_in(at, inputs(0, TOKENS), 512 << 10, rig.stream));
    fine(kvq_append_attend_on_stream(rig.queue, &arena.work, &arena.entry, 1, rig.stream));
    fine(kvq_attend_on_stream(rig.queue, &arena.work, &arena.entry, 1, rig.stream));
    daemon_end(&rig.daemon, SIGKILL);
    soft_stall(rig.stream, false);
    OK(drv.stream_sync(rig.stream)); // would wait for ever
    refused(KVQ_E_DISCONNECTED,
            kvq_attend_on_stream(rig.queue, &arena.work, &arena.entry, 1, rig.stream), "");
    OK(drv.stream_sync(rig.stream));
    // The daemon's memory is still here, and is only the engine's now.
    OK(drv.copy_in(at, inputs(5, 1), 4096, rig.stream));
    OK(drv.copy_out(gpu_one, at, 4 * DIM, rig.stream));
    OK(drv.stream_sync(rig.stream));
    assert_memory_equal(gpu_one, inputs(5, 1), 4 * DIM);
    assert_int_not_equal(kvq_reattach(rig.client, &lost), KVQ_OK); // nobody is there yet
    daemon_start(&rig.daemon);
    assert_int_equal(kvq_reattach(rig.client, &lost), KVQ_E_EPOCH);
    assert_int_equal(lost, 1);
    assert_int_equal(kvq_queue_order(rig.queue), rig.order);
    assert_true((uintptr_t)kvq_buffer_device(arena.buffer) == at);
    arena.entry = tensor.entry = (struct kvq_entry){0};
    same_as_on_host(&arena, at);
    same_as_on_host(&tensor, own);
    OK(drv.memory_free(own));
}

// Imported memory that was freed meanwhile is not registered anew.
static void test_reattach_with_freed_memory(void **state)
{
    (void)state;
    kvq_buffer *buffer;
    kvq_gpu_ptr at, again;
    OK(drv.memory_alloc(&at, ARENA));
    fine(kvq_buffer_import(rig.client, (void *)(uintptr_t)at, ARENA, &buffer));
    OK(drv.memory_free(at));
    OK(drv.memory_alloc(&again, ARENA));
    assert_true(again == at);
    refused(KVQ_E_BUFFER, kvq_reattach(rig.client, NULL), "was freed");
    kvq_buffer_close(&buffer);
    fine(kvq_reattach(rig.client, NULL));
    OK(drv.memory_free(again));
}

static size_t capture(struct run *r, const char *path, uint8_t *bytes, size_t size)
{
    static const struct kvq_layer layer = {
        .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM};
    const struct kvq_capture_options options = {
        .size = sizeof options, .layers = &layer, .n_layers = 1, .queries = 1};
    kvq_capture *c;
    put_tensors(r);
    r->entry = (struct kvq_entry){.session = 1, .append = TOKENS, .queries = TOKENS};
    fine(kvq_capture_open(path, &options, &c));
    fine(kvq_capture_append(c, &r->work, &r->entry, 1));
    assert_int_equal(kvq_capture_tokens(c), TOKENS);
    fine(kvq_capture_close(&c));
    FILE *file = fopen(path, "rb");
    size_t n = fread(bytes, 1, size, file);
    fclose(file);
    unlink(path);
    return n;
}

// What is captured of tensors on a GPU is what is captured of the same in host memory.
static void test_capture(void **state)
{
    (void)state;
    static uint8_t of_host[1 << 20], of_gpu[1 << 20];
    struct run host = {0}, gpu = {0};
    char path[96];
    snprintf(path, sizeof path, "%s/capture", rig.daemon.directory);
    fine(kvq_buffer_create(rig.client, ARENA, &host.buffer));
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &gpu.buffer));
    memcpy(kvq_buffer_data(host.buffer), inputs(0, TOKENS), 512 << 10);
    OK(drv.copy_in((uintptr_t)kvq_buffer_device(gpu.buffer), inputs(0, TOKENS), 512 << 10, NULL));
    size_t n = capture(&host, path, of_host, sizeof of_host);
    assert_true(n > TOKENS * DIM * sizeof(float) && n < sizeof of_host);
    assert_int_equal(capture(&gpu, path, of_gpu, sizeof of_gpu), n);
    assert_memory_equal(of_gpu, of_host, n);
    kvq_buffer_close(&host.buffer);
    kvq_buffer_close(&gpu.buffer);
}

// Tensors that a stream of the engine's has yet to write are captured as it writes them: the
// default stream does not wait for that stream.
static void test_capture_behind_a_stream(void **state)
{
    (void)state;
    static uint8_t late[1 << 20], in_time[1 << 20];
    struct run gpu = {0};
    char path[96];
    void *pinned;
    snprintf(path, sizeof path, "%s/capture", rig.daemon.directory);
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &gpu.buffer));
    const kvq_gpu_ptr at = (uintptr_t)kvq_buffer_device(gpu.buffer);
    OK(drv.host_alloc(&pinned, 512 << 10, KVQ_GPU_HOST_PORTABLE));
    memcpy(pinned, inputs(0, TOKENS), 512 << 10);
    OK(drv.stream_sync(rig.stream));
    soft_stall(rig.stream, true);
    OK(drv.copy_in(at, pinned, 512 << 10, rig.stream));
    soft_call_begin(rig.stream);
    size_t n = capture(&gpu, path, in_time, sizeof in_time);
    soft_call_end();
    OK(drv.stream_sync(rig.stream));
    assert_int_equal(capture(&gpu, path, late, sizeof late), n);
    assert_memory_equal(in_time, late, n);
    OK(drv.host_free(pinned));
    kvq_buffer_close(&gpu.buffer);
}

// Work of the engine's own streams may still be on its way to memory that is unmapped.
static void test_close_waits(void **state)
{
    (void)state;
    kvq_buffer *buffer;
    struct kvq_gpu_event *passed;
    fine(kvq_buffer_create_on(rig.client, NULL, ARENA, &buffer));
    const kvq_gpu_ptr at = (uintptr_t)kvq_buffer_device(buffer);
    OK(drv.event_create(&passed, KVQ_GPU_EVENT_UNTIMED));
    OK(drv.stream_sync(rig.stream));
    soft_stall(rig.stream, true);
    OK(drv.copy_device(at + ARENA / 2, at, ARENA / 2, rig.stream));
    OK(drv.event_record(passed, rig.stream));
    soft_call_begin(rig.stream);
    kvq_buffer_close(&buffer);
    assert_int_equal(drv.event_query(passed), KVQ_GPU_OK);
    soft_call_end();
    OK(drv.event_destroy(passed));
}

// The example is an engine of its own, in one process more.
static void test_example(void **state)
{
    (void)state;
    char line[256] = "";
    setenv("KVQ_RUNTIME_DIR", rig.daemon.directory, 1);
    FILE *output = popen(KVQ_EXAMPLE, "r");
    assert_non_null(output);
    assert_non_null(fgets(line, sizeof line, output));
    assert_int_equal(pclose(output), 0);
    assert_int_equal(strncmp(line, "44 tokens on ", 13), 0);
    assert_non_null(strstr(line, rig.order == KVQ_ORDER_WORDS ? "streams ordered by words"
                                                              : "streams ordered by events"));
    float out = strtof(strstr(line, "output ") + 7, NULL);
    assert_true(out >= 1 && out < 2); // a mean of values between 1 and 2
}

int main(int argc, char **argv)
{
#define WITH_DAEMON(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
    const struct CMUnitTest tests[] = {
        WITH_DAEMON(test_arena),
        WITH_DAEMON(test_import),
        WITH_DAEMON(test_import_mapped),
        WITH_DAEMON(test_host_order),
        WITH_DAEMON(test_which_order),
        WITH_DAEMON(test_host_order_waits),
        WITH_DAEMON(test_nobody_waits),
        WITH_DAEMON(test_refused),
        WITH_DAEMON(test_tickets),
        WITH_DAEMON(test_capture),
        WITH_DAEMON(test_capture_behind_a_stream),
        WITH_DAEMON(test_close_waits),
        WITH_DAEMON(test_example),
        WITH_DAEMON(test_daemon_killed),
        WITH_DAEMON(test_reattach_with_freed_memory),
    };
    const struct CMUnitTest by_host[] = {
        WITH_DAEMON(test_arena),
        WITH_DAEMON(test_import),
        WITH_DAEMON(test_import_mapped),
        WITH_DAEMON(test_host_order_waits),
        WITH_DAEMON(test_reattach_with_freed_memory),
    };
    const struct CMUnitTest by_events[] = {
        WITH_DAEMON(test_arena),   WITH_DAEMON(test_nobody_waits), WITH_DAEMON(test_refused),
        WITH_DAEMON(test_tickets), WITH_DAEMON(test_example),      WITH_DAEMON(test_daemon_killed),
    };
    soft_serve_if_peer(argc, argv);
    setenv("KVQ_GPU_DRIVER", KVQ_EMU_LIBRARY, 1);
    soft_open();
    daemon_prepare(&rig.daemon);
    rig.daemon.flags = soft_daemon_flags;
    rig.daemon.before = take_from_driver;
    int failed;
    if (getenv("CUDA_DEVICE_MAX_CONNECTIONS")) { // so few that the daemon has none for a client
        rig.order = KVQ_ORDER_HOST;
        failed = cmocka_run_group_tests_name("few hardware queues", by_host, NULL, NULL);
        return daemon_cleanup(&rig.daemon) || failed;
    }
    failed = cmocka_run_group_tests_name("words", tests, NULL, NULL);
    rig.order = KVQ_ORDER_EVENTS;
    rig.asked = "events";
    failed += cmocka_run_group_tests_name("events", by_events, NULL, NULL);
    rig.asked = NULL;
    rig.lacks = "memory_ops";
    failed += cmocka_run_group_tests_name("no words there", by_events, NULL, NULL);
    rig.order = KVQ_ORDER_HOST;
    rig.lacks = "memory_ops,ipc_events";
    failed += cmocka_run_group_tests_name("neither there", by_host, NULL, NULL);
    return daemon_cleanup(&rig.daemon) || failed;
}
