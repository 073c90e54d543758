// SPDX-License-Identifier: Apache-2.0
//
// Whose work comes when, with kvqd and this process as an engine on the software driver: several
// streams of one queue, several queues, and streams that stand still. CUDA_DEVICE_MAX_CONNECTIONS
// in the environment is the daemon's; streams of this process have a hardware queue each.
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/internal.h"
#include "client/kvq.h"
#include "proto/wire.h"
#include "tests/kits/daemon_kit.h"
#include "tests/kits/soft_kit.h"

enum { DIM = 64, Q_HEADS = 2, KV_HEADS = 1, SESSIONS = 2, PART = 1 << 16, INPUTS = PART / 2 };

static const uint32_t bits_of_1 = 0x3f800000, bits_of_5 = 0x40a00000;

static struct {
    struct daemon daemon;
    char connections[16]; // of the daemon; empty: as it likes
    kvq_client *client;
    kvq_queue *queue;
    kvq_buffer *buffer;
    kvq_gpu_ptr at;
    char gpu[48];
    struct kvq_gpu_stream *streams[SESSIONS];
    struct kvq_work works[SESSIONS]; // of one session each
    struct kvq_entry entries[SESSIONS];
} rig;

// Before the new process becomes kvqd.
static void give_connections(void)
{
    unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (rig.connections[0])
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", rig.connections, 1);
}

static kvq_client *connect_client(void)
{
    const struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = rig.daemon.directory, .timeout_ms = 20000};
    kvq_client *client;
    fine(kvq_connect(&options, &client));
    return client;
}

// Of a session with a name: that shard of two.
static struct kvq_session_options session_options(const char *name, uint16_t shard)
{
    static const struct kvq_layer layer = {
        .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM};
    return (struct kvq_session_options){.size = sizeof(struct kvq_session_options),
                                        .name = name,
                                        .layers = &layer,
                                        .n_layers = 1,
                                        .format = "f16",
                                        .place = rig.gpu,
                                        .shard = name ? shard : 0,
                                        .shards = name ? 2 : 0};
}

// K, V and Q of a session's step lie in the first half of its part of the buffer.
static void put_session(uint32_t i)
{
    const struct kvq_session_options options = session_options(NULL, 0);
    struct kvq_work *w = &rig.works[i];
    uint64_t at = (uint64_t)i * PART;
    w->k = kvq_tensor_make(rig.buffer, at, KV_HEADS, DIM, KVQ_DTYPE_F32);
    w->v = kvq_tensor_make(rig.buffer, at + INPUTS / 4, KV_HEADS, DIM, KVQ_DTYPE_F32);
    w->q = kvq_tensor_make(rig.buffer, at + INPUTS / 2, Q_HEADS, DIM, KVQ_DTYPE_F32);
    w->out = kvq_tensor_make(rig.buffer, at + INPUTS, Q_HEADS, DIM, KVQ_DTYPE_F32);
    rig.entries[i] = (struct kvq_entry){.append = 1, .queries = 1};
    fine(kvq_session_open(rig.client, &options, &rig.entries[i].session, NULL));
}

static int setup(void **state)
{
    struct kvq_gpu_info gpu;
    uint32_t n;
    (void)state;
    daemon_start(&rig.daemon);
    rig.client = connect_client();
    fine(kvq_queue_open(rig.client, &rig.queue));
    fine(kvq_daemon_gpus(rig.client, &gpu, 1, &n));
    memcpy(rig.gpu, gpu.place, sizeof rig.gpu);
    fine(kvq_buffer_create_on(rig.client, NULL, (SESSIONS + 1) * PART, &rig.buffer));
    rig.at = (uintptr_t)kvq_buffer_device(rig.buffer);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        OK(drv.stream_create(&rig.streams[i], KVQ_GPU_STREAM_OWN));
        put_session(i);
    }
    fine(kvq_queue_prepare_streams(rig.queue));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < SESSIONS; i++) {
        soft_stall(rig.streams[i], false);
        OK(drv.stream_sync(rig.streams[i]));
        OK(drv.stream_destroy(rig.streams[i]));
    }
    kvq_disconnect(&rig.client);
    daemon_end(&rig.daemon, SIGTERM);
    return 0;
}

// ---- What tests do ----

// The step's tensors of a session, on a stream.
static void put(uint32_t i, uint32_t bits, struct kvq_gpu_stream *stream)
{
    OK(drv.fill32(rig.at + (kvq_gpu_ptr)i * PART, bits, INPUTS / 4, stream));
}

// What the daemon gave back, once the stream has passed it.
static float output(uint32_t i, struct kvq_gpu_stream *stream)
{
    float value = 0;
    OK(drv.copy_out(&value, rig.at + (kvq_gpu_ptr)i * PART + INPUTS, sizeof value, stream));
    OK(drv.stream_sync(stream));
    return value;
}

// The daemon and the driver come to everything that they can do now.
static void others_work(void)
{
    for (int i = 0; i < 5; i++) {
        kvq_client *client = connect_client();
        kvq_disconnect(&client);
    }
}

// ---- Several streams of one queue ----

// Each stream makes the tensors of one session, stands still before, and goes on in any order.
static void on_two_streams(uint32_t first)
{
    uint64_t step;
    for (uint32_t i = 0; i < SESSIONS; i++)
        put(i, bits_of_5, rig.streams[0]);
    OK(drv.stream_sync(rig.streams[0]));
    fine(kvq_step_begin(rig.queue, rig.entries, SESSIONS, &step));
    for (uint32_t i = 0; i < SESSIONS; i++)
        soft_stall(rig.streams[i], true);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        rig.works[i].step = step;
        put(i, bits_of_1, rig.streams[i]);
        fine(kvq_append_attend_on_stream(rig.queue, &rig.works[i], &rig.entries[i], 1,
                                         rig.streams[i]));
        fine(rig.entries[i].status);
    }
    for (uint32_t i = 0; i < SESSIONS; i++) {
        soft_stall(rig.streams[(first + i) % SESSIONS], false);
        others_work();
    }
    for (uint32_t i = 0; i < SESSIONS; i++)
        assert_true(output(i, rig.streams[i]) == 1);
    fine(kvq_step_end(rig.queue, step, rig.entries, SESSIONS));
    for (uint32_t i = 0; i < SESSIONS; i++) {
        fine(rig.entries[i].status);
        rig.entries[i].position = rig.entries[i].value;
    }
}

// The daemon begins no request before its own stream has come to it, however far others are.
static void test_two_streams(void **state)
{
    (void)state;
    if (kvq_queue_order(rig.queue) != KVQ_ORDER_WORDS)
        skip(); // the host waits for each stream
    for (uint32_t i = 0; i < 2 * SESSIONS; i++)
        on_two_streams(i % SESSIONS);
}

// ---- Several queues ----

struct chain {
    kvq_queue *queues[SESSIONS];
    struct kvq_gpu_event *event;
    uint32_t first;
};

// Both sessions' requests, on a queue and a stream each, the second stream behind the first.
static void *submit_chain(void *context)
{
    const struct chain *c = context;
    kvq_ticket tickets[SESSIONS];
    OK(drv.context_set(soft_context));
    for (uint32_t j = 0; j < SESSIONS; j++) {
        const uint32_t i = (c->first + j) % SESSIONS;
        if (j)
            OK(drv.stream_wait(rig.streams[i], c->event, 0));
        put(i, bits_of_1, rig.streams[i]);
        fine(kvq_submit_on_stream(c->queues[i], KVQ_DO_APPEND_ATTEND, &rig.works[i],
                                  &rig.entries[i], 1, rig.streams[i], &tickets[i]));
        OK(drv.event_record(c->event, rig.streams[i]));
    }
    for (uint32_t i = 0; i < SESSIONS; i++)
        fine(kvq_wait(c->queues[i], tickets[i], UINT64_MAX));
    return NULL;
}

// The driver of this process comes to everything that it can do.
static void streams_work(void)
{
    struct kvq_gpu_stream *stream;
    OK(drv.stream_create(&stream, KVQ_GPU_STREAM_OWN));
    for (int i = 0; i < 100; i++) {
        OK(drv.fill32(rig.at + (kvq_gpu_ptr)SESSIONS * PART, 0, 1, stream));
        OK(drv.stream_sync(stream));
    }
    OK(drv.stream_destroy(stream));
}

// The daemon finds what has come on both queues at once, and looks at either first.
static void test_two_queues(void **state)
{
    struct chain c = {.queues = {rig.queue}};
    (void)state;
    if (kvq_queue_order(rig.queue) != KVQ_ORDER_WORDS)
        skip(); // the host waits for each stream
    fine(kvq_queue_open(rig.client, &c.queues[1]));
    fine(kvq_queue_prepare_streams(c.queues[1]));
    OK(drv.event_create(&c.event, KVQ_GPU_EVENT_UNTIMED));
    for (uint32_t round = 0; round < 5 * SESSIONS; round++) {
        pthread_t thread;
        c.first = round % SESSIONS;
        for (uint32_t i = 0; i < SESSIONS; i++)
            fine(kvq_step_begin(c.queues[i], &rig.entries[i], 1, &rig.works[i].step));
        kill(rig.daemon.pid, SIGSTOP);
        assert_int_equal(pthread_create(&thread, NULL, submit_chain, &c), 0);
        streams_work();
        kill(rig.daemon.pid, SIGCONT);
        pthread_join(thread, NULL);
        for (uint32_t i = 0; i < SESSIONS; i++) {
            fine(rig.entries[i].status);
            assert_true(output(i, rig.streams[i]) == 1); // would wait for ever
            fine(kvq_step_end(c.queues[i], rig.works[i].step, &rig.entries[i], 1));
            fine(rig.entries[i].status);
            rig.entries[i].position = rig.entries[i].value;
        }
    }
    OK(drv.event_destroy(c.event));
}

// ---- Several clients ----

struct engine {
    kvq_client *client;
    kvq_queue *queue;
    kvq_buffer *buffer;
    kvq_gpu_ptr at;
    struct kvq_gpu_stream *stream;
    struct kvq_work work;
    struct kvq_entry entry;
};

// With a session of its own, or with the second of two shards of the one that has that name.
static void engine_open(struct engine *e, const char *name)
{
    const struct kvq_session_options options = session_options(name, 1);
    *e = (struct engine){.client = connect_client(), .entry = {.append = 1, .queries = 1}};
    fine(kvq_queue_open(e->client, &e->queue));
    fine(kvq_buffer_create_on(e->client, NULL, PART, &e->buffer));
    e->at = (uintptr_t)kvq_buffer_device(e->buffer);
    e->work.k = kvq_tensor_make(e->buffer, 0, KV_HEADS, DIM, KVQ_DTYPE_F32);
    e->work.v = kvq_tensor_make(e->buffer, INPUTS / 4, KV_HEADS, DIM, KVQ_DTYPE_F32);
    e->work.q = kvq_tensor_make(e->buffer, INPUTS / 2, Q_HEADS, DIM, KVQ_DTYPE_F32);
    e->work.out = kvq_tensor_make(e->buffer, INPUTS, Q_HEADS, DIM, KVQ_DTYPE_F32);
    OK(drv.stream_create(&e->stream, KVQ_GPU_STREAM_OWN));
    fine(kvq_session_open(e->client, &options, &e->entry.session, NULL));
    fine(kvq_queue_prepare_streams(e->queue));
    assert_int_not_equal(kvq_queue_order(e->queue), KVQ_ORDER_EVENTS);
}

static void engine_begin(struct engine *e, bool stalled)
{
    fine(kvq_step_begin(e->queue, &e->entry, 1, &e->work.step));
    soft_stall(e->stream, stalled);
    OK(drv.fill32(e->at, bits_of_1, INPUTS / 4, e->stream));
    fine(kvq_append_attend_on_stream(e->queue, &e->work, &e->entry, 1, e->stream));
    fine(e->entry.status);
}

static void engine_end(struct engine *e)
{
    float value = 0;
    soft_stall(e->stream, false);
    OK(drv.copy_out(&value, e->at + INPUTS, sizeof value, e->stream));
    OK(drv.stream_sync(e->stream));
    assert_true(value == 1);
    fine(kvq_step_end(e->queue, e->work.step, &e->entry, 1));
    fine(e->entry.status);
    e->entry.position = e->entry.value;
}

static void engine_close(struct engine *e)
{
    kvq_disconnect(&e->client);
    OK(drv.stream_destroy(e->stream));
}

// Streams that stand still keep no other client waiting, and go on when they are let, however few
// hardware queues the daemon has. Those for whom there is none left wait on the host.
static void test_stalled_clients(void **state)
{
    enum { ENGINES = 6 };
    struct engine engines[ENGINES];
    bool words[ENGINES];
    (void)state;
    for (int i = 0; i < ENGINES; i++) {
        engine_open(&engines[i], NULL);
        words[i] = kvq_queue_order(engines[i].queue) == KVQ_ORDER_WORDS;
        if (words[i] && i + 1 < ENGINES)
            engine_begin(&engines[i], true);
        for (int step = 0; step < 3 && !(words[i] && i + 1 < ENGINES); step++) {
            engine_begin(&engines[i], false);
            engine_end(&engines[i]);
        }
    }
    if (!rig.connections[0])
        assert_true(words[ENGINES - 1]);
    for (int i = 0; i + 1 < ENGINES; i++)
        if (words[i])
            engine_end(&engines[i]);
    for (int i = 0; i < ENGINES; i++)
        engine_close(&engines[i]);
}

// ---- A queue that becomes the second one ----

// A step of the second session on a queue that has no timeline yet, behind all that the first
// stream has.
static void *second_queue(void *context)
{
    struct kvq_gpu_stream *stream = rig.streams[0];
    kvq_queue *queue = context;
    OK(drv.context_set(soft_context));
    fine(kvq_step_begin(queue, &rig.entries[1], 1, &rig.works[1].step));
    put(1, bits_of_1, stream);
    fine(kvq_append_attend_on_stream(queue, &rig.works[1], &rig.entries[1], 1, stream));
    fine(rig.entries[1].status);
    return NULL;
}

// The first queue's request was sent while there was no other, so its stream waits for the daemon,
// and the daemon does not enqueue it yet: the session waits for its other shard. The second queue's
// request comes behind that stream, and the daemon must not enqueue it before.
static void becomes_two_queues(const char *order)
{
    struct engine other;
    const struct kvq_session_options options = session_options("shared", 0);
    struct kvq_work work = rig.works[0];
    struct kvq_entry entry = {.append = 1, .queries = 1};
    kvq_queue *queue;
    kvq_ticket ticket;
    pthread_t thread;
    if (kvq_queue_order(rig.queue) != KVQ_ORDER_WORDS)
        skip(); // the host waits for each stream
    fine(kvq_queue_open(rig.client, &queue));
    fine(kvq_session_open(rig.client, &options, &entry.session, NULL));
    engine_open(&other, "shared");
    engine_begin(&other, false);
    fine(kvq_step_begin(rig.queue, &entry, 1, &work.step));
    put(0, bits_of_1, rig.streams[0]);
    fine(kvq_append_attend_on_stream(rig.queue, &work, &entry, 1, rig.streams[0]));
    fine(kvq_step_end(rig.queue, work.step, &entry, 1));
    fine(entry.status);
    work.step = 0;
    entry = (struct kvq_entry){.session = entry.session, .position = 1, .queries = 1};
    fine(kvq_submit_on_stream(rig.queue, KVQ_DO_ATTEND, &work, &entry, 1, rig.streams[0], &ticket));
    setenv("KVQ_GPU_ORDER", order, 1);
    assert_int_equal(pthread_create(&thread, NULL, second_queue, queue), 0);
    others_work(); // without the wait the second queue's request is enqueued by now
    engine_end(&other);
    fine(kvq_wait(rig.queue, ticket, UINT64_MAX));
    fine(entry.status);
    pthread_join(thread, NULL);
    unsetenv("KVQ_GPU_ORDER");
    for (uint32_t i = 0; i < SESSIONS; i++)
        assert_true(output(i, rig.streams[0]) == 1); // would wait for ever
    fine(kvq_step_end(queue, rig.works[1].step, &rig.entries[1], 1));
    fine(rig.entries[1].status);
    engine_close(&other);
}

static void test_becomes_two_queues(void **state)
{
    (void)state;
    becomes_two_queues("words");
}

static void test_becomes_two_with_events(void **state)
{
    (void)state;
    becomes_two_queues("events");
}

// ---- Clients that go ----

// What a client asks for and does not wait for the answer of.
static void ask(const kvq_client *client, Kvq__Request *request)
{
    uint8_t bytes[256];
    size_t length;
    request->id = client->next_id + 1;
    request->protocol = client->info.protocol;
    assert_int_equal(kvq_request_pack(request, bytes, sizeof bytes, &length), 0);
    assert_int_equal(send(client->socket, bytes, length, MSG_NOSIGNAL), length);
}

// A client goes whose command waits for a stream of its own that stands still for ever: the close
// of a buffer that is in use. The daemon ends its end once all is given back.
static void test_gone_while_closing(void **state)
{
    struct engine e;
    char bytes[KVQ_TEXT_BYTES];
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__CloseBuffer close_buffer = KVQ__CLOSE_BUFFER__INIT;
    (void)state;
    engine_open(&e, NULL);
    if (kvq_queue_order(e.queue) != KVQ_ORDER_WORDS) {
        engine_close(&e);
        skip(); // the host waits for each stream
    }
    engine_begin(&e, true);
    close_buffer.buffer = e.buffer->id;
    request.close_buffer = &close_buffer;
    request.command_case = KVQ__REQUEST__COMMAND_CLOSE_BUFFER;
    ask(e.client, &request);
    shutdown(e.client->socket, SHUT_WR);
    while (recv(e.client->socket, bytes, sizeof bytes, 0) > 0)
        ;
    soft_stall(e.stream, false);
    OK(drv.stream_sync(e.stream));
    engine_close(&e);
}

// The daemon dies, and the driver has no memory for the write that lets a stream go: the write is
// made again. A store of the host's alone need not wake a stream.
static void test_no_memory_to_let_go(void **state)
{
    struct engine e;
    (void)state;
    engine_open(&e, NULL);
    if (kvq_queue_order(e.queue) != KVQ_ORDER_WORDS) {
        engine_close(&e);
        skip(); // no stream waits
    }
    const uint64_t before = soft_calls("stream_write64");
    assert_int_equal(soft_fail("stream_write64", 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    daemon_end(&rig.daemon, SIGKILL);
    // Both clients write once, and the one that was refused twice.
    while (soft_calls("stream_write64") < before + 3) // would wait for ever
        sched_yield();
    engine_close(&e);
    daemon_start(&rig.daemon);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_two_streams, setup, teardown),
        cmocka_unit_test_setup_teardown(test_two_queues, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stalled_clients, setup, teardown),
        cmocka_unit_test_setup_teardown(test_becomes_two_queues, setup, teardown),
        cmocka_unit_test_setup_teardown(test_becomes_two_with_events, setup, teardown),
        cmocka_unit_test_setup_teardown(test_gone_while_closing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_memory_to_let_go, setup, teardown),
    };
    soft_serve_if_peer(argc, argv);
    setenv("KVQ_GPU_DRIVER", KVQ_EMU_LIBRARY, 1);
    const char *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    snprintf(rig.connections, sizeof rig.connections, "%s", connections ? connections : "");
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    soft_open();
    daemon_prepare(&rig.daemon);
    rig.daemon.flags = soft_daemon_flags;
    rig.daemon.before = give_connections;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return daemon_cleanup(&rig.daemon) || failed;
}
