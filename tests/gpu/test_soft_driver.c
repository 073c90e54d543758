// SPDX-License-Identifier: Apache-2.0
//
// The software driver within one process: devices and contexts, memory, streams, events, graphs,
// and what it refuses. test_soft_faults has what it can be told to get wrong, test_soft_peers what
// crosses processes, test_soft_order the orders of streams.
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/kits/soft_kit.h"

static struct kvq_gpu_stream *stream; // one of our own

static kvq_gpu_ptr alloc(size_t bytes)
{
    kvq_gpu_ptr at;
    OK(drv.memory_alloc(&at, bytes));
    return at;
}

// Words that streams wait for, all zero.
static kvq_gpu_ptr alloc_words(void)
{
    const kvq_gpu_ptr at = alloc(4096);
    OK(drv.fill32(at, 0, 1024, NULL));
    OK(drv.context_sync());
    return at;
}

static uint64_t get(int attribute, kvq_gpu_ptr at)
{
    uint64_t value = 0;
    OK(drv.pointer_get(&value, attribute, at));
    return value;
}

static uint64_t word_at(kvq_gpu_ptr at)
{
    return *(volatile uint64_t *)at;
}

static struct kvq_gpu_stream *new_stream(unsigned flags)
{
    struct kvq_gpu_stream *s;
    OK(drv.stream_create(&s, flags));
    return s;
}

static void wait_for(struct kvq_gpu_stream *s, kvq_gpu_ptr at, uint64_t value)
{
    OK(drv.stream_wait64(s, at, value, KVQ_GPU_WAIT_AT_LEAST));
}

// ---- Devices and contexts ----

static void test_devices(void **state)
{
    static const int has[] = {KVQ_GPU_HAS_MAPPING, KVQ_GPU_HAS_HANDLE_FD, KVQ_GPU_HAS_MEMORY_OPS,
                              KVQ_GPU_HAS_IPC_EVENTS, KVQ_GPU_HAS_HOST_REGISTER};
    struct kvq_gpu_uuid one, two;
    int count, device, value;
    char name[64];
    size_t bytes;
    assert_true(drv.kernels_inside);
    OK(drv.device_count(&count));
    assert_int_equal(count, 2);
    OK(drv.device_get(&device, 1));
    assert_int_equal(drv.device_get(&device, 2), KVQ_GPU_INVALID_DEVICE);
    OK(drv.device_name(name, sizeof name, 0));
    OK(drv.device_memory(&bytes, 0));
    assert_int_equal(bytes, 64 << 20);
    OK(drv.device_uuid(&one, 0));
    OK(drv.device_uuid(&two, 1));
    assert_memory_not_equal(&one, &two, sizeof one);
    for (size_t i = 0; i < sizeof has / sizeof has[0]; i++) {
        OK(drv.device_attribute(&value, has[i], 0));
        assert_int_equal(value, 1);
    }
    (void)state;
}

static void *other_thread(void *seen)
{
    int device;
    drv.context_get((struct kvq_gpu_context **)seen);
    return (void *)(intptr_t)drv.context_device(&device);
}

// What is current is each thread's own; a context is there as long as it is retained.
static void test_contexts(void **state)
{
    struct kvq_gpu_context *second, *seen = soft_context;
    pthread_t thread;
    void *result;
    kvq_gpu_ptr at;
    int device;
    assert_int_equal(pthread_create(&thread, NULL, other_thread, &seen), 0);
    pthread_join(thread, &result);
    assert_int_equal((intptr_t)result, KVQ_GPU_INVALID_CONTEXT);
    assert_null(seen);
    OK(drv.context_retain(&second, 1));
    OK(drv.context_retain(&second, 1));
    OK(drv.context_set(second));
    OK(drv.context_device(&device));
    assert_int_equal(device, 1);
    const kvq_gpu_ptr there = alloc(100);
    assert_int_equal(get(KVQ_GPU_POINTER_DEVICE, there), 1);
    assert_int_equal(get(KVQ_GPU_POINTER_CONTEXT, there), (uintptr_t)second);
    assert_int_equal(drv.fill8(there, 0, 1, stream), KVQ_GPU_INVALID_HANDLE); // of device 0
    struct kvq_gpu_stream *s = new_stream(0);
    struct kvq_gpu_event *event;
    OK(drv.event_create(&event, 0));
    OK(drv.fill8(there, 0, 1, s));
    OK(drv.context_release(1));
    OK(drv.context_device(&device));
    OK(drv.context_release(1)); // and all that was in it
    assert_int_equal(drv.context_device(&device), KVQ_GPU_INVALID_CONTEXT);
    assert_int_equal(drv.memory_alloc(&at, 100), KVQ_GPU_INVALID_CONTEXT);
    assert_int_equal(drv.context_release(1), KVQ_GPU_INVALID_CONTEXT);
    OK(drv.context_set(soft_context));
    assert_int_equal(drv.memory_free(there), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.stream_destroy(s), KVQ_GPU_INVALID_HANDLE);
    assert_int_equal(drv.event_destroy(event), KVQ_GPU_INVALID_HANDLE);
    (void)state;
}

// A forked child has no driver, and ends all the same, whatever streams did when it was made.
static void test_fork(void **state)
{
    const kvq_gpu_ptr at = alloc(SOFT_BLOCK);
    kvq_gpu_ptr none;
    int status;
    fflush(stdout);
    for (int i = 0; i < 8; i++) {
        for (unsigned value = 0; value < 20; value++)
            OK(drv.fill32(at, value, SOFT_BLOCK / 4, stream));
        const pid_t child = fork();
        if (child == 0) // nor may it look for leaks: its streams' threads are not there to end
            _exit(drv.memory_alloc(&none, 8) == KVQ_GPU_NOT_INITIALIZED ? 0 : 1);
        waitpid(child, &status, 0);
        assert_int_equal(status, 0);
    }
    OK(drv.memory_free(at));
    (void)state;
}

// ---- Memory ----

static void test_memory(void **state)
{
    const kvq_gpu_ptr a = alloc(1000), b = alloc(1000);
    kvq_gpu_ptr base;
    size_t bytes, left, total;
    uint32_t value = 0;
    OK(drv.copy_out(&value, a + 996, 4, NULL));
    assert_int_equal(value, 0xffffffff); // NaN
    assert_int_equal(b - a, 1024);
    assert_int_equal(soft_counts().bytes, SOFT_BLOCK); // one block for both
    OK(drv.memory_info(&left, &total));
    assert_int_equal(total - left, SOFT_BLOCK);
    OK(drv.address_range(&base, &bytes, b + 999));
    assert_int_equal(base, b);
    assert_int_equal(bytes, 1000);
    assert_int_equal(drv.address_range(&base, &bytes, b + 1000), KVQ_GPU_NOT_FOUND);
    assert_int_equal(get(KVQ_GPU_POINTER_RANGE_START, b + 7), b);
    assert_int_equal(get(KVQ_GPU_POINTER_RANGE_BYTES, b + 7), 1000);
    assert_int_equal(get(KVQ_GPU_POINTER_TYPE, b), KVQ_GPU_TYPE_DEVICE);
    assert_int_equal(get(KVQ_GPU_POINTER_LEGACY_IPC, b), 1);
    assert_int_equal(get(KVQ_GPU_POINTER_HANDLE_TYPES, b), 0);
    assert_int_not_equal(get(KVQ_GPU_POINTER_BUFFER, a), get(KVQ_GPU_POINTER_BUFFER, b));
    assert_int_equal(drv.fill8(a + 999, 0, 2, NULL), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.pointer_get(&bytes, KVQ_GPU_POINTER_TYPE, 4096), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.memory_free(a + 4), KVQ_GPU_INVALID_VALUE);
    const uint64_t buffer = get(KVQ_GPU_POINTER_BUFFER, a);
    OK(drv.memory_free(a));
    assert_int_equal(drv.memory_free(a), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(alloc(900), a); // the lowest that fits, and yet another buffer
    assert_int_not_equal(get(KVQ_GPU_POINTER_BUFFER, a), buffer);
    OK(drv.memory_free(a));
    OK(drv.memory_free(b));
    OK(drv.memory_free(0));
    (void)state;
}

static void *free_it(void *at)
{
    drv.context_set(soft_context);
    return (void *)(intptr_t)drv.memory_free((uintptr_t)at);
}

// Freeing waits for the work that uses the memory.
static void test_free_waits(void **state)
{
    const kvq_gpu_ptr words = alloc_words(), at = alloc(SOFT_BLOCK);
    volatile uint32_t *calls = &soft_control()->calls;
    pthread_t thread;
    void *result;
    wait_for(stream, words, 1);
    OK(drv.fill8(at, 1, SOFT_BLOCK, stream));
    const uint32_t made = *calls;
    assert_int_equal(pthread_create(&thread, NULL, free_it, (void *)at), 0);
    while (*calls < made + 2)
        sched_yield();
    assert_int_equal(get(KVQ_GPU_POINTER_RANGE_BYTES, at), SOFT_BLOCK);
    *(volatile uint64_t *)words = 1;
    pthread_join(thread, &result);
    assert_int_equal((intptr_t)result, KVQ_GPU_OK);
    OK(drv.stream_sync(stream));
    OK(drv.memory_free(words));
    (void)state;
}

static void test_budget(void **state)
{
    const kvq_gpu_ptr most = alloc((size_t)62 << 20);
    const struct kvq_gpu_allocation what = {.type = KVQ_GPU_ALLOCATION_PINNED,
                                            .location = {KVQ_GPU_LOCATION_DEVICE, 0}};
    kvq_gpu_memory memory;
    kvq_gpu_ptr at;
    assert_int_equal(drv.memory_alloc(&at, (size_t)3 << 20), KVQ_GPU_OUT_OF_MEMORY);
    assert_int_equal(drv.memory_alloc(&at, SIZE_MAX), KVQ_GPU_OUT_OF_MEMORY);
    assert_int_equal(drv.memory_alloc(&at, 0), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.memory_create(&memory, 2 * SOFT_BLOCK, &what, 0), KVQ_GPU_OUT_OF_MEMORY);
    OK(drv.memory_create(&memory, SOFT_BLOCK, &what, 0));
    assert_int_equal(drv.memory_alloc(&at, 8), KVQ_GPU_OUT_OF_MEMORY);
    OK(drv.memory_release(memory));
    at = alloc(8);
    OK(drv.memory_free(at));
    OK(drv.memory_free(most));
    (void)state;
}

// Two pieces of physical memory side by side, with rights of their own, and how long they live.
static void test_mapping(void **state)
{
    const struct kvq_gpu_allocation what = {.type = KVQ_GPU_ALLOCATION_PINNED,
                                            .handle_types = KVQ_GPU_HANDLE_FD,
                                            .location = {KVQ_GPU_LOCATION_DEVICE, 0}};
    struct kvq_gpu_access access = {{KVQ_GPU_LOCATION_DEVICE, 0}, KVQ_GPU_ACCESS_READ_WRITE};
    kvq_gpu_memory one, two, again;
    kvq_gpu_ptr at;
    size_t unit;
    OK(drv.memory_granularity(&unit, &what, KVQ_GPU_GRANULARITY_MINIMUM));
    assert_int_equal(unit, SOFT_BLOCK);
    assert_int_equal(drv.memory_create(&one, unit + 1, &what, 0), KVQ_GPU_INVALID_VALUE);
    OK(drv.memory_create(&one, unit, &what, 0));
    OK(drv.memory_create(&two, unit, &what, 0));
    OK(drv.address_reserve(&at, 4 * unit, 8 * unit, 0, 0));
    assert_int_equal(at % (8 * unit), 0);
    OK(drv.memory_map(at, unit, 0, one, 0));
    OK(drv.memory_map(at + unit, unit, 0, two, 0));
    assert_int_equal(drv.memory_map(at, unit, 0, two, 0), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.memory_map(at + 4 * unit, unit, 0, two, 0), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.fill8(at, 1, 8, stream), KVQ_GPU_INVALID_VALUE); // no right yet
    OK(drv.memory_access(at, 2 * unit, &access, 1));
    OK(drv.fill8(at + unit - 8, 0x11, 16, stream)); // across both
    assert_int_equal(drv.fill8(at + 2 * unit - 8, 1, 16, stream), KVQ_GPU_INVALID_VALUE);
    OK(drv.memory_retain(&again, (void *)(at + 5)));
    assert_int_equal(again, one);
    OK(drv.memory_release(one));
    OK(drv.memory_release(again));
    assert_int_equal(drv.memory_release(one), KVQ_GPU_INVALID_VALUE);
    OK(drv.stream_sync(stream));
    assert_int_equal(word_at(at + unit - 8), 0x1111111111111111);
    assert_int_equal(get(KVQ_GPU_POINTER_LEGACY_IPC, at), 0);
    assert_int_equal(get(KVQ_GPU_POINTER_HANDLE_TYPES, at), KVQ_GPU_HANDLE_FD);
    assert_int_equal(get(KVQ_GPU_POINTER_RANGE_START, at + unit + 1), at + unit);
    assert_int_equal(get(KVQ_GPU_POINTER_CONTEXT, at), 0);
    access.flags = KVQ_GPU_ACCESS_READ;
    OK(drv.memory_access(at, unit, &access, 1));
    assert_int_equal(drv.fill8(at, 1, 8, stream), KVQ_GPU_INVALID_VALUE);
    OK(drv.copy_device(at + unit, at, 64, stream));
    OK(drv.stream_sync(stream));
    assert_int_equal(drv.address_free(at, 4 * unit), KVQ_GPU_INVALID_VALUE); // still mapped
    assert_int_equal(drv.memory_unmap(at, unit / 2), KVQ_GPU_INVALID_VALUE);
    OK(drv.memory_unmap(at, 2 * unit));
    assert_int_equal(soft_counts().bytes - soft_before.bytes, unit); // two has its handle
    OK(drv.memory_map(at + 2 * unit, unit, 0, two, 0));
    OK(drv.memory_unmap(at + 2 * unit, unit));
    OK(drv.memory_release(two));
    assert_int_equal(drv.address_free(at, unit), KVQ_GPU_INVALID_VALUE);
    OK(drv.address_free(at, 4 * unit));
    (void)state;
}

static void test_host_memory(void **state)
{
    static uint64_t mine[64];
    kvq_gpu_ptr device;
    void *pinned;
    OK(drv.host_alloc(&pinned, 4096, KVQ_GPU_HOST_PORTABLE | KVQ_GPU_HOST_MAPPED));
    OK(drv.host_device(&device, (char *)pinned + 8, 0));
    assert_int_equal(device, (uintptr_t)pinned + 8);
    assert_int_equal(get(KVQ_GPU_POINTER_TYPE, device), KVQ_GPU_TYPE_HOST);
    assert_int_equal(drv.host_device(&device, mine, 0), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.stream_write64(stream, (uintptr_t)mine, 1, 0), KVQ_GPU_INVALID_VALUE);
    OK(drv.host_register(mine, sizeof mine, KVQ_GPU_HOST_MAPPED));
    assert_int_equal(drv.host_register(mine + 3, 8, 0), KVQ_GPU_ALREADY_REGISTERED);
    assert_int_equal(drv.host_register((void *)4096, 8, 0), KVQ_GPU_INVALID_VALUE);
    OK(drv.host_device(&device, mine, 0));
    OK(drv.stream_write64(stream, device, 17, 0));
    wait_for(stream, device, 17);
    OK(drv.stream_sync(stream));
    assert_int_equal(mine[0], 17);
    assert_int_equal(drv.host_unregister(mine + 1), KVQ_GPU_NOT_REGISTERED);
    assert_int_equal(drv.host_free(mine), KVQ_GPU_INVALID_VALUE);
    OK(drv.host_unregister(mine));
    OK(drv.host_free(pinned));
    (void)state;
}

// ---- Streams ----

static void set_word(void *at)
{
    *(volatile uint64_t *)at = 1;
}

// A stream that waits holds up itself, and nobody else.
static void test_waiting(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    struct kvq_gpu_stream *other = new_stream(KVQ_GPU_STREAM_OWN);
    wait_for(stream, words, 3);
    OK(drv.fill32(words + 64, 5, 1, stream));
    OK(drv.fill32(words + 128, 6, 1, other));
    OK(drv.stream_sync(other));
    assert_int_equal(word_at(words + 128), 6);
    assert_int_equal(word_at(words + 64), 0);
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    OK(drv.stream_write64(other, words, 2, 0));
    OK(drv.stream_sync(other));
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    OK(drv.stream_write64(other, words, 3, 0));
    OK(drv.stream_sync(stream));
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_OK);
    assert_int_equal(word_at(words + 64), 5);
    // Cyclic: what is up to 2^63 - 1 ahead counts as reached, what is more counts as before.
    OK(drv.stream_write64(other, words, UINT64_MAX - 1, 0));
    wait_for(other, words, UINT64_MAX - 2);
    OK(drv.stream_sync(other));
    wait_for(stream, words, 1);
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    OK(drv.stream_write64(other, words, INT64_MAX, 0)); // the poison
    OK(drv.stream_sync(stream));
    assert_int_equal(drv.stream_wait64(stream, words + 4, 0, 0), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.stream_wait64(stream, words + 4096, 0, 0), KVQ_GPU_INVALID_VALUE);
    OK(drv.stream_destroy(other));
    OK(drv.memory_free(words));
    (void)state;
}

// A stream that is destroyed still does its work.
static void test_destroyed_stream(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    struct kvq_gpu_stream *doomed = new_stream(KVQ_GPU_STREAM_OWN);
    wait_for(doomed, words, 1);
    OK(drv.stream_write64(doomed, words + 8, 2, 0));
    OK(drv.stream_destroy(doomed));
    assert_int_equal(drv.stream_sync(doomed), KVQ_GPU_INVALID_HANDLE);
    OK(drv.stream_write64(stream, words, 1, 0));
    wait_for(stream, words + 8, 2);
    OK(drv.stream_sync(stream));
    OK(drv.memory_free(words));
    (void)state;
}

// The default stream waits for blocking streams and they for it; streams of our own do neither.
static void test_default_stream(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    struct kvq_gpu_stream *blocking = new_stream(0);
    wait_for(blocking, words, 1);
    OK(drv.stream_write64(NULL, words + 8, 1, 0));
    OK(drv.stream_write64(stream, words + 16, 1, 0));
    OK(drv.stream_sync(stream));
    assert_int_equal(drv.stream_query(NULL), KVQ_GPU_NOT_READY);
    assert_int_equal(word_at(words + 8), 0);
    OK(drv.stream_write64(stream, words, 1, 0));
    OK(drv.stream_sync(NULL));
    assert_int_equal(word_at(words + 8), 1);
    wait_for(NULL, words, 2);
    OK(drv.stream_write64(blocking, words + 24, 1, 0));
    OK(drv.stream_write64(stream, words + 32, 1, 0));
    OK(drv.stream_sync(stream));
    assert_int_equal(drv.stream_query(blocking), KVQ_GPU_NOT_READY);
    OK(drv.stream_write64(stream, words, 2, 0));
    OK(drv.stream_sync(blocking));
    assert_int_equal(word_at(words + 24), 1);
    OK(drv.stream_destroy(blocking));
    OK(drv.memory_free(words));
    (void)state;
}

static int of_a_call;

static void call_inside(void *unused)
{
    kvq_gpu_ptr at;
    (void)unused;
    of_a_call = drv.memory_alloc(&at, 8);
}

static void test_host_functions(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    uint64_t seen = 0;
    wait_for(stream, words, 1);
    OK(drv.launch_host(stream, set_word, &seen));
    OK(drv.launch_host(stream, call_inside, NULL));
    assert_int_equal(*(volatile uint64_t *)&seen, 0);
    *(volatile uint64_t *)words = 1; // by the host: seen, if not at once
    OK(drv.stream_sync(stream));
    assert_int_equal(seen, 1);
    assert_int_equal(of_a_call, KVQ_GPU_NOT_PERMITTED);
    OK(drv.memory_free(words));
    (void)state;
}

// Pageable memory may change after the call, pinned memory may not: it is read later.
static void test_copies(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    uint64_t pageable = 5, *pinned;
    OK(drv.host_alloc((void **)&pinned, 4096, 0));
    pinned[0] = 6;
    pinned[1] = 0;
    wait_for(stream, words, 1);
    OK(drv.copy_in(words + 8, &pageable, 8, stream));
    OK(drv.copy_in(words + 16, pinned, 8, stream));
    OK(drv.copy_out(pinned + 1, words + 8, 8, stream)); // returns before it is done
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    pageable = pinned[0] = 7;
    *(volatile uint64_t *)words = 1;
    OK(drv.copy_out(&pageable, words + 8, 8, stream)); // returns when it is done
    assert_int_equal(pageable, 5);
    assert_int_equal(pinned[1], 5);
    assert_int_equal(word_at(words + 16), 7);
    OK(drv.copy_in(words, NULL, 0, stream));
    OK(drv.host_free(pinned));
    OK(drv.memory_free(words));
    (void)state;
}

// ---- Events ----

static void test_events(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    struct kvq_gpu_stream *other = new_stream(KVQ_GPU_STREAM_OWN);
    struct kvq_gpu_event *a, *b;
    float elapsed;
    OK(drv.event_create(&a, 0));
    OK(drv.event_create(&b, 0));
    assert_int_equal(drv.event_create(&b, KVQ_GPU_EVENT_SHARED), KVQ_GPU_INVALID_VALUE);
    OK(drv.event_query(a)); // never recorded
    wait_for(stream, words, 1);
    OK(drv.event_record(a, stream));
    assert_int_equal(drv.event_query(a), KVQ_GPU_NOT_READY);
    OK(drv.stream_wait(other, a, 0));
    OK(drv.fill32(words + 8, 1, 1, other));
    OK(drv.event_record(b, other));
    OK(drv.event_record(a, other)); // the wait above is for the record before
    assert_int_equal(drv.event_elapsed(&elapsed, a, b), KVQ_GPU_NOT_READY);
    assert_int_equal(drv.stream_query(other), KVQ_GPU_NOT_READY);
    assert_int_equal(word_at(words + 8), 0);
    *(volatile uint64_t *)words = 1;
    OK(drv.event_sync(b));
    assert_int_equal(word_at(words + 8), 1);
    OK(drv.event_sync(a));
    OK(drv.event_elapsed(&elapsed, b, a));
    assert_true(elapsed >= 0);
    OK(drv.event_record(a, other));
    OK(drv.event_destroy(a)); // while it is used
    OK(drv.event_destroy(b));
    assert_int_equal(drv.event_query(a), KVQ_GPU_INVALID_HANDLE);
    OK(drv.stream_destroy(other));
    OK(drv.memory_free(words));
    (void)state;
}

// ---- Graphs ----

static void add_three(void *at)
{
    *(volatile uint64_t *)at = *(volatile uint64_t *)at * 10 + 3;
}

static void add_four(void *at)
{
    *(volatile uint64_t *)at = *(volatile uint64_t *)at * 10 + 4;
}

// Forked over two streams and joined; one branch waits for a word that the other writes.
static struct kvq_gpu_graph *capture(kvq_gpu_ptr words, struct kvq_gpu_stream *other)
{
    struct kvq_gpu_graph *graph;
    struct kvq_gpu_event *fork_, *join;
    int status;
    OK(drv.event_create(&fork_, KVQ_GPU_EVENT_UNTIMED));
    OK(drv.event_create(&join, KVQ_GPU_EVENT_UNTIMED));
    OK(drv.capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED));
    OK(drv.fill32(words, 0, 4, stream));
    OK(drv.event_record(fork_, stream));
    OK(drv.stream_wait(other, fork_, 0));
    OK(drv.stream_capturing(other, &status));
    assert_int_equal(status, KVQ_GPU_CAPTURE_ACTIVE);
    wait_for(stream, words, 1);
    OK(drv.launch_host(stream, add_three, (void *)(words + 8)));
    OK(drv.launch_host(other, add_four, (void *)(words + 8)));
    OK(drv.stream_write64(other, words, 1, 0));
    OK(drv.event_record(join, other));
    OK(drv.stream_wait(stream, join, 0));
    OK(drv.copy_device(words + 16, words + 8, 8, stream));
    assert_int_equal(drv.event_query(join), KVQ_GPU_CAPTURED_EVENT);
    OK(drv.capture_end(stream, &graph));
    OK(drv.stream_capturing(other, &status));
    assert_int_equal(status, KVQ_GPU_CAPTURE_NONE);
    OK(drv.event_destroy(fork_));
    OK(drv.event_destroy(join));
    return graph;
}

static void test_graph(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    struct kvq_gpu_stream *other = new_stream(KVQ_GPU_STREAM_OWN);
    struct kvq_gpu_graph *graph = capture(words, other);
    struct kvq_gpu_exec *exec;
    OK(drv.stream_sync(stream));
    assert_int_equal(word_at(words + 8), 0); // nothing ran
    OK(drv.graph_ready(&exec, graph, 0));
    OK(drv.graph_destroy(graph));
    for (uint64_t seed = 0; seed < 20; seed++) {
        soft_seed(seed);
        OK(drv.graph_launch(exec, seed % 2 ? stream : other));
        OK(drv.graph_launch(exec, seed % 3 ? stream : other));
        OK(drv.stream_sync(stream));
        OK(drv.stream_sync(other));
        assert_int_equal(word_at(words + 16), 43);
    }
    soft_seed(0);
    wait_for(stream, words + 64, 1);
    OK(drv.graph_launch(exec, stream)); // in the stream's order
    OK(drv.exec_destroy(exec));         // and to its end
    OK(drv.stream_write64(other, words + 16, 0, 0));
    OK(drv.stream_sync(other));
    assert_int_equal(word_at(words + 16), 0);
    OK(drv.stream_write64(other, words + 64, 1, 0));
    OK(drv.stream_sync(stream));
    assert_int_equal(word_at(words + 16), 43);
    OK(drv.stream_destroy(other));
    OK(drv.memory_free(words));
    (void)state;
}

// A graph launched while another is captured becomes part of it, in its place.
static void test_graph_in_graph(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    struct kvq_gpu_stream *other = new_stream(KVQ_GPU_STREAM_OWN);
    struct kvq_gpu_graph *inner = capture(words, other), *outer;
    struct kvq_gpu_exec *exec, *all;
    OK(drv.graph_ready(&exec, inner, 0));
    OK(drv.capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED));
    OK(drv.stream_write64(stream, words + 16, 7, 0));
    OK(drv.launch_host(stream, add_three, (void *)(words + 16))); // 73
    OK(drv.copy_device(words + 24, words + 16, 8, stream));
    OK(drv.graph_launch(exec, stream));
    OK(drv.launch_host(stream, add_four, (void *)(words + 16))); // of 43
    OK(drv.capture_end(stream, &outer));
    OK(drv.graph_ready(&all, outer, 0));
    for (uint64_t seed = 1; seed <= 30; seed++) {
        soft_seed(seed);
        OK(drv.graph_launch(all, other));
        OK(drv.stream_sync(other));
        assert_int_equal(word_at(words + 24), 73);
        assert_int_equal(word_at(words + 16), 434);
    }
    soft_seed(0);
    OK(drv.exec_destroy(exec));
    OK(drv.exec_destroy(all));
    OK(drv.graph_destroy(inner));
    OK(drv.graph_destroy(outer));
    OK(drv.stream_destroy(other));
    OK(drv.memory_free(words));
    (void)state;
}

static void end_capture(int result)
{
    struct kvq_gpu_graph *graph;
    assert_int_equal(drv.capture_end(stream, &graph), result);
    if (result)
        assert_null(graph);
    else
        OK(drv.graph_destroy(graph));
}

// What a capture cannot have, and what that does to it.
static void test_captures_refused(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    struct kvq_gpu_stream *other = new_stream(0);
    struct kvq_gpu_event *event;
    struct kvq_gpu_graph *graph;
    kvq_gpu_ptr at;
    int status;
    OK(drv.event_create(&event, 0));
    OK(drv.event_record(event, other));
    assert_int_equal(drv.capture_end(stream, &graph), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.capture_begin(NULL, 2), KVQ_GPU_CAPTURE_UNSUPPORTED);
    OK(drv.capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED));
    at = alloc(8); // allowed, as is freeing if nothing blocks
    assert_int_equal(drv.stream_wait(stream, event, 0), KVQ_GPU_CAPTURE_ISOLATION);
    OK(drv.stream_capturing(stream, &status));
    assert_int_equal(status, KVQ_GPU_CAPTURE_BROKEN);
    assert_int_equal(drv.fill8(words, 0, 8, stream), KVQ_GPU_CAPTURE_INVALIDATED);
    end_capture(KVQ_GPU_CAPTURE_INVALIDATED);
    OK(drv.memory_free(at));
    OK(drv.capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED));
    assert_int_equal(drv.stream_sync(stream), KVQ_GPU_CAPTURE_UNSUPPORTED);
    end_capture(KVQ_GPU_CAPTURE_INVALIDATED);
    OK(drv.capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED));
    OK(drv.event_record(event, stream));
    OK(drv.stream_wait(other, event, 0));
    OK(drv.fill8(words, 0, 8, other));
    assert_int_equal(drv.capture_end(other, &graph), KVQ_GPU_CAPTURE_UNMATCHED);
    assert_int_equal(drv.fill8(words, 0, 8, NULL), KVQ_GPU_CAPTURE_IMPLICIT);
    end_capture(KVQ_GPU_CAPTURE_INVALIDATED);
    OK(drv.capture_begin(stream, KVQ_GPU_CAPTURE_RELAXED));
    OK(drv.event_record(event, stream));
    OK(drv.stream_wait(other, event, 0));
    OK(drv.fill8(words, 0, 8, other));
    end_capture(KVQ_GPU_CAPTURE_UNJOINED);
    OK(drv.capture_begin(stream, 0)); // global: nobody may allocate
    assert_int_equal(drv.memory_alloc(&at, 8), KVQ_GPU_CAPTURE_UNSUPPORTED);
    end_capture(KVQ_GPU_CAPTURE_INVALIDATED);
    OK(drv.capture_begin(stream, 0));
    OK(drv.fill8(words, 0, 8, stream));
    end_capture(KVQ_GPU_OK);
    OK(drv.event_destroy(event));
    OK(drv.stream_destroy(other));
    OK(drv.memory_free(words));
    (void)state;
}

int main(int argc, char **argv)
{
    setenv("KVQ_EMU_DEVICES", "2", 0);
    setenv("KVQ_EMU_MEMORY", "64M", 0);
    soft_serve_if_peer(argc, argv);
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, soft_remember, soft_compare)
        TEST(test_devices),          TEST(test_contexts),         TEST(test_fork),
        TEST(test_memory),           TEST(test_free_waits),       TEST(test_budget),
        TEST(test_mapping),          TEST(test_host_memory),      TEST(test_waiting),
        TEST(test_destroyed_stream), TEST(test_default_stream),   TEST(test_host_functions),
        TEST(test_copies),           TEST(test_events),           TEST(test_graph),
        TEST(test_graph_in_graph),   TEST(test_captures_refused),
#undef TEST
    };
    soft_open();
    OK(drv.stream_create(&stream, KVQ_GPU_STREAM_OWN));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
