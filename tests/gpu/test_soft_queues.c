// SPDX-License-Identifier: Apache-2.0
//
// Hardware queues of the software driver: streams that share one keep each other waiting, others do
// not, and a queue that is full keeps the caller waiting.
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "proto/ring.h"
#include "tests/kits/soft_kit.h"

enum { QUEUES = 3, DEPTH = 16, STREAMS = 2 * QUEUES, MORE = 20 };

static struct kvq_gpu_stream *streams[STREAMS];
static uint64_t *words; // in pinned memory
static uint32_t given;

static int setup(void **state)
{
    void *memory;
    OK(drv.host_alloc(&memory, 4096, KVQ_GPU_HOST_MAPPED));
    words = memory;
    for (int i = 0; i < STREAMS; i++) {
        OK(drv.stream_create(&streams[i], KVQ_GPU_STREAM_OWN));
        words[i] = 0;
    }
    (void)state;
    return 0;
}

static int teardown(void **state)
{
    for (int i = 0; i < STREAMS; i++)
        OK(drv.stream_destroy(streams[i]));
    OK(drv.context_sync());
    OK(drv.host_free(words));
    (void)state;
    return 0;
}

static void write_word(int i)
{
    OK(drv.stream_write64(streams[i], (uintptr_t)&words[i], 1, 0));
}

static void wait_for_word(int i, int word)
{
    OK(drv.stream_wait64(streams[i], (uintptr_t)&words[word], 1, KVQ_GPU_WAIT_AT_LEAST));
}

// Streams take the queues in turn: 0 and QUEUES have one, and the others have others.
static void test_shared(void **state)
{
    soft_stall(streams[0], true);
    for (int i = 0; i < STREAMS; i++)
        write_word(i);
    for (int i = 0; i < STREAMS; i++)
        if (i % QUEUES != 0)
            OK(drv.stream_sync(streams[i]));
    assert_int_equal(drv.stream_query(streams[QUEUES]), KVQ_GPU_NOT_READY);
    assert_int_equal(kvq_word64_load_acquire(&words[QUEUES]), 0);
    soft_stall(streams[0], false);
    OK(drv.context_sync());
    assert_int_equal(kvq_word64_load_acquire(&words[QUEUES]), 1);
    (void)state;
}

// A wait stands in front of the very write that would end it; a store of the host's ends it.
static void test_wait_before_its_write(void **state)
{
    wait_for_word(1, QUEUES + 1);
    write_word(QUEUES + 1);
    write_word(2);
    OK(drv.stream_sync(streams[2]));
    assert_int_equal(drv.stream_query(streams[1]), KVQ_GPU_NOT_READY);
    assert_int_equal(drv.stream_query(streams[QUEUES + 1]), KVQ_GPU_NOT_READY);
    kvq_word64_store_release(&words[QUEUES + 1], 1);
    OK(drv.context_sync());
    (void)state;
}

static void *give_many(void *context)
{
    OK(drv.context_set(soft_context));
    for (int i = 0; i < MORE; i++) {
        write_word(0);
        kvq_word_store_release(&given, (uint32_t)i + 1);
    }
    return context;
}

static void test_depth(void **state)
{
    pthread_t thread;
    given = 0;
    soft_stall(streams[0], true);
    assert_int_equal(pthread_create(&thread, NULL, give_many, NULL), 0);
    while (kvq_word_load_acquire(&given) < DEPTH)
        sched_yield();
    for (int i = 0; i < MORE; i++) { // other queues take work
        write_word(1);
        OK(drv.stream_sync(streams[1]));
    }
    assert_int_equal(kvq_word_load_acquire(&given), DEPTH);
    soft_stall(streams[0], false);
    pthread_join(thread, NULL);
    OK(drv.stream_sync(streams[0]));
    assert_int_equal(given, MORE);
    (void)state;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_shared, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wait_before_its_write, setup, teardown),
        cmocka_unit_test_setup_teardown(test_depth, setup, teardown),
    };
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3", 1);
    setenv("KVQ_EMU_DEPTH", "16", 1);
    soft_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
