// SPDX-License-Identifier: Apache-2.0
//
// What clients of the attach socket get and give back while work on the GPU does not go on, as if
// another client never signalled.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "daemon/core/gpu/gpu.h"
#include "proto/limits.h"
#include "proto/status.h"
#include "tests/edge/attach_gpu_kit.h"

static void on_stall(struct kvq__server *server, void *stream)
{
    kvq__gpu_may_wait(kvq__gpus_get(server->gpus, 0), stream);
}

static void on_end(struct kvq__server *server, void *stream)
{
    kvq__gpu_waits_no_more(kvq__gpus_get(server->gpus, 0), stream);
}

// A stream as those are that the daemon has for its clients.
static struct kvq_gpu_stream *stall_gpu(kvq_gpu_ptr *word)
{
    struct kvq_gpu_stream *stream;
    OK(drv.context_set(soft_context));
    OK(drv.stream_create(&stream, KVQ_GPU_STREAM_OWN));
    OK(drv.memory_alloc(word, 64));
    soft_stall(stream, true);
    OK(drv.fill32(*word, 0, 1, stream));
    attach_in_loop(on_stall, stream);
    return stream;
}

static void end_stall(struct kvq_gpu_stream *stream, kvq_gpu_ptr word)
{
    attach_in_loop(on_end, stream);
    soft_stall(stream, false);
    OK(drv.stream_sync(stream));
    OK(drv.stream_destroy(stream));
    OK(drv.memory_free(word));
}

// To take host memory from GPUs is to wait for all that they do. Nobody waits for that but that
// memory: imports are closed, memory of the GPU comes back, clients end. It counts on meanwhile.
static void test_given_back_beside_a_stalled(void **state)
{
    enum { MIB = 1 << 20 };
    (void)state;
    gpu_begin();
    kvq_gpu_ptr word;
    uint64_t at;
    struct soft_peer engine = soft_start(NULL);
    struct told told = told_allocate(&engine, SOFT_BLOCK, &at);
    struct kvq_gpu_stream *stream = stall_gpu(&word);
    struct peer *p = peer_attached();
    assert_int_equal(peer_open_queue(p), 0);
    const uint32_t queue = p->reply->open_queue->queue;
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), 0);
    assert_int_equal(peer_close_queue(p, queue), 0);
    assert_int_equal(peer_create_buffer(p, 5 * MIB), 0);
    assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
    assert_int_equal(peer_create_buffer(p, 5 * MIB), KVQ_E_LIMIT); // of 8 that it may have
    assert_int_equal(peer_import_on(p, &told, 0, 4096), 0);
    assert_int_equal(peer_close_buffer(p, peer_made(p)), 0); // when it is closed here
    assert_int_equal(soft_counts().imports, gpu_before.imports);
    assert_int_equal(peer_create_on(p, 2 * MIB), 0);
    peer_free(p); // when it is gone
    SETTLES(memories, 0);
    assert_true(soft_counts().registered > gpu_before.registered);
    end_stall(stream, word);
    SETTLES(registered, 0);
    p = peer_attached();
    assert_int_equal(peer_create_buffer(p, 8 * MIB), 0); // nothing counts any more
    peer_free(p);
    assert_int_equal(soft_end(&engine), 0);
    SETTLES(registered, 0);
    gpu_end();
}

// A user who opens and closes host memory while the GPU stands still gets a bounded number of it;
// what orders that client's requests next needs none.
static void test_flood_beside_a_stalled(void **state)
{
    (void)state;
    gpu_begin();
    kvq_gpu_ptr word;
    struct kvq_gpu_stream *stream = stall_gpu(&word);
    struct peer *p = peer_attached();
    uint32_t n = 0;
    while (peer_create_buffer(p, 4096) == 0) {
        assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
        assert_true(++n <= KVQ_MAX_LETTING_GO);
    }
    assert_int_equal(p->reply->status, KVQ_E_LIMIT);
    peer_says(p, "yet to let go");
    assert_int_equal(n, KVQ_MAX_LETTING_GO / 2); // as much stays free for other users
    assert_int_equal(peer_open_queue(p), 0);
    const uint32_t queue = p->reply->open_queue->queue;
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), KVQ_E_UNSUPPORTED);
    peer_says(p, "yet to let go");
    assert_int_equal(peer_create_on(p, 4096), 0); // memory of the GPU is no part of that
    end_stall(stream, word);
    SETTLES(registered, 0);
    assert_int_equal(peer_create_buffer(p, 4096), 0);
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), 0);
    peer_free(p);
    SETTLES(registered, 0);
    gpu_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_given_back_beside_a_stalled, attach_start,
                                        attach_stop),
        cmocka_unit_test_setup_teardown(test_flood_beside_a_stalled, attach_start, attach_stop),
    };
    soft_serve_if_peer(argc, argv);
    soft_open();
    if (drv.device_uuid(&gpu_uuid, 0))
        return 1;
    attach_gpus(KVQ_EMU_LIBRARY);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
