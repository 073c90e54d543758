// SPDX-License-Identifier: Apache-2.0
//
// What clients of the attach socket get and give back while work on the GPU does not go on, as if
// another client never signalled.
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "daemon/core/gpu/gate.h"
#include "proto/limits.h"
#include "proto/ring.h"
#include "proto/status.h"
#include "proto/sync.h"
#include "tests/edge/attach_gpu_kit.h"
#include "tests/kits/unit.h"

// A stream as those are that the daemon has for its clients, and a word. These clients have none of
// the daemon's, so this thread is the one that makes streams wait.
struct engine {
    const struct kvq__gpu *gpu;
    struct kvq__gate *gate;
    struct kvq_gpu_stream *stream;
    kvq_gpu_ptr word;
};

static void on_open(struct kvq__server *server, void *context)
{
    struct engine *e = context;
    e->gpu = kvq__gpus_get(server->gpus, 0);
    e->gate = kvq__gpu_gate(e->gpu);
}

static struct engine engine_open(void)
{
    struct engine e;
    attach_in_loop(on_open, &e);
    OK(drv.context_set(soft_context));
    OK(drv.stream_create(&e.stream, KVQ_GPU_STREAM_OWN));
    OK(drv.memory_alloc(&e.word, 64));
    kvq_word64_store_release((uint64_t *)(uintptr_t)e.word, 0);
    kvq__gate_add(e.gate, e.gpu, e.stream);
    return e;
}

static void engine_close(struct engine *e)
{
    kvq__gate_remove(e->gate, e->stream);
    OK(drv.stream_sync(e->stream));
    OK(drv.stream_destroy(e->stream));
    OK(drv.memory_free(e->word));
}

// Gives its stream work that does not go on, when the gate lets it.
static void engine_stall(const struct engine *e)
{
    soft_stall(e->stream, true);
    while (!kvq__gate_enter(e->gate))
        sched_yield();
    OK(drv.fill32(e->word, 0, 1, e->stream));
    kvq__gate_leave(e->gate);
}

static void engine_signal(const struct engine *e)
{
    soft_stall(e->stream, false);
    OK(drv.stream_sync(e->stream));
}

static struct engine stall_gpu(void)
{
    struct engine e = engine_open();
    engine_stall(&e);
    return e;
}

static void end_stall(struct engine *e)
{
    engine_signal(e);
    engine_close(e);
}

// Returns when the daemon has tried again to go through, and was there from the beginning.
static void await_attempts(const struct engine *e)
{
    const uint64_t before = kvq_long_load(&e->gate->attempts);
    while (kvq_long_load(&e->gate->attempts) < before + 2)
        sched_yield();
}

// Work is given to the GPU for this client.
static void goes_on(struct peer *p)
{
    assert_int_equal(peer_create_on(p, 4096), 0);
    assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
}

// To take host memory from GPUs is to wait for all that they do. Nobody waits for that but that
// memory: memory of the GPU comes back, clients end. It counts on meanwhile.
GPU_TEST(test_given_back_beside_a_stalled)
{
    enum { MIB = 1 << 20 };
    struct engine engine = stall_gpu();
    struct peer *p = peer_attached();
    const uint32_t queue = peer_queue(p);
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), 0);
    assert_int_equal(peer_close_queue(p, queue), 0);
    assert_int_equal(peer_close_buffer(p, peer_buffer(p, 5 * MIB)), 0);
    assert_int_equal(peer_create_buffer(p, 5 * MIB), KVQ_E_LIMIT); // of 8 that it may have
    assert_int_equal(peer_create_on(p, 2 * MIB), 0);
    peer_free(p); // when it is gone
    SETTLES(memories, 0);
    assert_true(soft_counts().registered > gpu_before.registered);
    end_stall(&engine);
    SETTLES(registered, 0);
    p = peer_attached();
    assert_int_equal(peer_create_buffer(p, 8 * MIB), 0); // nothing counts any more
    peer_free(p);
    SETTLES(registered, 0);
}

// So is closing an import by handle. Whoever closes it waits, since only then the memory may be
// freed; others go on.
EXPORTER_TEST(test_import_beside_a_stalled)
{
    uint64_t at;
    struct told told = told_allocate(SOFT_BLOCK, &at);
    struct engine engine = stall_gpu();
    struct peer *p = peer_attached(), *other = peer_attached();
    assert_int_equal(peer_import_on(p, &told, 0, 4096), 0);
    peer_send_close(p, peer_made(p));
    await_attempts(&engine);
    goes_on(other);
    assert_int_equal(soft_counts().imports, gpu_before.imports + 1);
    engine_signal(&engine);
    assert_int_equal(peer_answer(p), 0);
    assert_int_equal(soft_counts().imports, gpu_before.imports);
    engine_close(&engine);
}

// A client that ends has its slot back soon, with its imports open. Its memory's handle may be that
// of other memory by now: nobody gets the old memory by it.
EXPORTER_TEST(test_ends_beside_a_stalled)
{
    uint64_t at, again;
    struct told told = told_allocate(SOFT_BLOCK, &at);
    struct engine engine = stall_gpu();
    for (int closes = 0; closes < 2; closes++) {
        struct peer *p = peer_attached();
        assert_int_equal(peer_import_on(p, &told, 0, 4096), 0);
        if (closes)
            peer_send_close(p, peer_made(p)); // and does not wait for the answer
        peer_free(p);
        assert_int_equal(soft_counts().imports, gpu_before.imports + 1);
    }
    struct peer *other = peer_attached();
    goes_on(other);
    soft_ask(&exporter, SOFT_FREE, at, 0, 0);
    struct told young = told_allocate(SOFT_BLOCK, &again);
    assert_memory_equal(&young.handle, &told.handle, sizeof told.handle);
    assert_int_equal(peer_import_on(other, &young, 0, 4096), KVQ_E_BUFFER);
    peer_says(other, "was freed while its buffers were open");
    engine_signal(&engine);
    SETTLES(imports, 0);
    while (peer_import_on(other, &young, 0, 4096) != 0) // the loop is told a little later
        sched_yield();
    peer_free(other);
    SETTLES(imports, 0);
    engine_close(&engine);
}

// One client stands still, memory is to be given back, another one stands still: when the first
// goes on others do as well, and when both have gone on the memory comes back.
GPU_TEST(test_one_after_another)
{
    struct engine first = stall_gpu(), second = engine_open();
    struct peer *p = peer_attached(), *other = peer_attached();
    assert_int_equal(peer_close_buffer(p, peer_buffer(p, 4096)), 0);
    await_attempts(&first);
    engine_stall(&second);
    engine_signal(&first);
    await_attempts(&first);
    goes_on(other);
    assert_true(soft_counts().registered > gpu_before.registered);
    engine_stall(&first);
    engine_signal(&second);
    await_attempts(&first);
    goes_on(other);
    assert_true(soft_counts().registered > gpu_before.registered);
    engine_signal(&first);
    SETTLES(registered, 0);
    engine_close(&first);
    engine_close(&second);
}

// An engine that gives requests ahead always has one that waits for it, and signals it only when it
// has given the next, or there is no room for that. Memory comes back beside it.
GPU_TEST(test_beside_one_that_is_ahead)
{
    enum { AHEAD = 2 };
    struct engine engine = engine_open();
    uint64_t *word = (uint64_t *)(uintptr_t)engine.word, given = 0, signalled = 0;
    struct peer *p = peer_attached();
    for (int i = 0; i < 3; i++) {
        for (; given < signalled + AHEAD; given++)
            OK(drv.stream_wait64(engine.stream, engine.word, given + 1, KVQ_GPU_WAIT_AT_LEAST));
        assert_int_equal(peer_close_buffer(p, peer_buffer(p, 4096)), 0);
        while (soft_counts().registered != gpu_before.registered) {
            if (kvq__gate_enter(engine.gate)) {
                OK(drv.stream_wait64(engine.stream, engine.word, ++given, KVQ_GPU_WAIT_AT_LEAST));
                kvq__gate_leave(engine.gate);
            } else if (signalled < given) {
                kvq_word64_store_release(word, ++signalled);
            }
            while (signalled + AHEAD < given)
                kvq_word64_store_release(word, ++signalled);
            sched_yield();
        }
    }
    kvq_word64_store_release(word, given);
    engine_close(&engine);
}

// What the driver does not say about a stream counts as a stream that waits, but for a driver that
// says nothing any more; and no event is needed that might not be had.
GPU_TEST(test_silent_driver)
{
    struct engine engine = engine_open();
    while (!kvq__gate_is_clear(engine.gate, NULL)) // streams of clients before may clear memory
        sched_yield();
    attach_hold_poller(); // so that nobody else asks
    assert_int_equal(soft_fail("stream_query", 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    assert_false(kvq__gate_is_clear(engine.gate, NULL));
    assert_int_equal(soft_fail("context_get", 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    assert_int_equal(soft_fail("context_set", 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    assert_false(kvq__gate_is_clear(engine.gate, NULL));
    assert_int_equal(soft_fail("stream_query", 1, false, KVQ_GPU_ILLEGAL_ADDRESS), 0);
    assert_int_equal(soft_fail("memory_info", 1, false, KVQ_GPU_ILLEGAL_ADDRESS), 0);
    assert_true(kvq__gate_is_clear(engine.gate, NULL)); // after a fault nothing waits
    engine_stall(&engine);
    assert_false(kvq__gate_is_clear(engine.gate, engine.gpu));
    attach_release_poller();
    struct peer *p = peer_attached(), *other = peer_attached();
    assert_int_equal(peer_create_buffer(p, 4096), 0);
    assert_int_equal(soft_fail("event_create", 1, true, KVQ_GPU_OUT_OF_MEMORY), 0);
    assert_int_equal(soft_fail("event_record", 1, true, KVQ_GPU_OUT_OF_MEMORY), 0);
    assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
    await_attempts(&engine);
    goes_on(other);
    assert_true(soft_counts().registered > gpu_before.registered);
    assert_int_equal(soft_fail("event_create", 0, false, 0), 0);
    assert_int_equal(soft_fail("event_record", 0, false, 0), 0);
    engine_signal(&engine);
    SETTLES(registered, 0);
    engine_close(&engine);
}

// A client that is gone gives all signals of its timelines, also while something holds the poller
// up.
GPU_TEST(test_gone_beside_a_held_poller)
{
    struct peer *p = peer_attached();
    assert_int_equal(peer_open_timeline(p, peer_queue(p), sizeof gpu_uuid), 0);
    assert_int_equal(p->n_fds, 1);
    struct kvq_timeline_page *page =
        mmap(NULL, KVQ_TIMELINE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds[0], 0);
    assert_true(page != MAP_FAILED);
    attach_hold_poller();
    assert_int_equal(shutdown(p->fd, SHUT_WR), 0);
    while (kvq_word64_load_acquire(&page->ready) != INT64_MAX)
        sched_yield();
    attach_release_poller();
    munmap(page, KVQ_TIMELINE_BYTES);
}

// A user who opens and closes host memory while the GPU stands still gets a bounded number of it;
// what orders that client's requests next needs none.
GPU_TEST(test_flood_beside_a_stalled)
{
    struct engine engine = stall_gpu();
    struct peer *p = peer_attached();
    uint32_t n = 0;
    while (peer_create_buffer(p, 4096) == 0) {
        assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
        assert_true(++n <= KVQ_MAX_LETTING_GO);
    }
    assert_int_equal(p->reply->status, KVQ_E_LIMIT);
    peer_says(p, "yet to let go");
    assert_int_equal(n, KVQ_MAX_LETTING_GO / 2); // as much stays free for other users
    const uint32_t queue = peer_queue(p);
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), KVQ_E_UNSUPPORTED);
    peer_says(p, "yet to let go");
    assert_int_equal(peer_create_on(p, 4096), 0); // memory of the GPU is no part of that
    end_stall(&engine);
    SETTLES(registered, 0);
    while (peer_create_buffer(p, 4096) != 0) // the loop is told a little later
        sched_yield();
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), 0);
    peer_free(p);
    SETTLES(registered, 0);
}

int main(int argc, char **argv)
{
    soft_serve_if_peer(argc, argv);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); // all streams have hardware queues alone
    gpu_attach();
    return run_all(NULL, NULL);
}
