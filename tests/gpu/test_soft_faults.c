// SPDX-License-Identifier: Apache-2.0
//
// What the software driver can be told by its environment, its control file and its own functions:
// to fail, to stall, to lack something, to be another machine.
#include <sched.h>
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

static kvq_gpu_ptr alloc_words(void)
{
    const kvq_gpu_ptr at = alloc(4096);
    OK(drv.fill32(at, 0, 1024, NULL));
    OK(drv.context_sync());
    return at;
}

static void test_failures(void **state)
{
    const char *why;
    kvq_gpu_ptr at, second;
    assert_int_equal(soft_fail("no_such_call", 1, false, 1), -1);
    assert_int_equal(soft_fail("memory_alloc", 2, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    at = alloc(8);
    assert_int_equal(drv.memory_alloc(&second, 8), KVQ_GPU_OUT_OF_MEMORY);
    second = alloc(8);
    assert_int_equal(soft_fail("memory_free", 1, true, KVQ_GPU_INVALID_VALUE), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(drv.memory_free(at), KVQ_GPU_INVALID_VALUE);
    OK(drv.error_text(KVQ_GPU_INVALID_VALUE, &why));
    assert_string_equal(why, "a failure that was asked for");
    assert_int_equal(soft_fail("memory_free", 0, false, 0), 0);
    OK(drv.memory_free(at));
    OK(drv.memory_free(second));
    assert_int_equal(soft_fail("launch", 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    assert_int_equal(soft_bad_launch(stream), -1);
    OK(drv.stream_sync(stream)); // refused, and nothing else
    struct kvq_soft_counts now = soft_counts();
    soft_before.modules = now.modules; // of soft_bad_launch
    (void)state;
}

static void test_stalls(void **state)
{
    const kvq_gpu_ptr words = alloc_words();
    struct kvq_soft_control *control = soft_control();
    volatile uint32_t *held = &control->held;
    soft_stall(stream, true);
    OK(drv.stream_write64(stream, words, 1, 0));
    while (*held == 0)
        sched_yield();
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    OK(drv.stream_sync(NULL));
    soft_stall(stream, false);
    OK(drv.stream_sync(stream));
    assert_int_equal(word_at(words), 1);
    *(volatile uint32_t *)&control->stall = 1;
    OK(drv.stream_write64(stream, words, 2, 0));
    while (*held == 0)
        sched_yield();
    assert_int_equal(word_at(words), 1);
    *(volatile uint32_t *)&control->stall = 0;
    OK(drv.stream_sync(stream));
    assert_int_equal(word_at(words), 2);
    OK(drv.memory_free(words));
    (void)state;
}

// The environment's faults, each in a process of its own.
static void test_environment(void **state)
{
    struct soft_peer peer = soft_start("KVQ_EMU_FAIL=memory_alloc:2:2,ipc_memory_open:1+:1");
    soft_ask(&peer, SOFT_ALLOC, 8, 0, 0);
    assert_int_equal(soft_result(&peer, SOFT_ALLOC, 8, 0, 0), KVQ_GPU_OUT_OF_MEMORY);
    soft_ask(&peer, SOFT_ALLOC, 8, 0, 0);
    assert_int_equal(soft_result(&peer, SOFT_MEMORY_OPEN, 0, 0, 0), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(soft_end(&peer), 0);
    peer = soft_start("KVQ_EMU_FAIL=kernel:1:700");
    soft_ask(&peer, SOFT_BAD_LAUNCH, 0, 0, 0);
    assert_int_equal(soft_result(&peer, SOFT_SYNC, 0, 0, 0), KVQ_GPU_ILLEGAL_ADDRESS);
    assert_int_equal(soft_result(&peer, SOFT_SYNC, 0, 0, 0), KVQ_GPU_ILLEGAL_ADDRESS);
    assert_int_equal(soft_end(&peer), 0);
    peer = soft_start("KVQ_EMU_LACKS=fd,memory_ops,ipc_events,legacy_ipc,register");
    assert_int_equal(soft_result(&peer, SOFT_CREATE, SOFT_BLOCK, 1, 0), KVQ_GPU_NOT_SUPPORTED);
    soft_ask(&peer, SOFT_CREATE, SOFT_BLOCK, 0, 0);
    const uint64_t at = soft_ask(&peer, SOFT_ALLOC, 64, 0, 0);
    assert_int_equal(soft_result(&peer, SOFT_WRITE64, at, 1, 0), KVQ_GPU_NOT_SUPPORTED);
    assert_int_equal(soft_result(&peer, SOFT_EVENT_CREATE, 0, 0, 0), KVQ_GPU_NOT_SUPPORTED);
    assert_int_equal(soft_result(&peer, SOFT_MEMORY_GET, at, 0, 0), KVQ_GPU_NOT_SUPPORTED);
    assert_int_equal(soft_end(&peer), 0);
    (void)state;
}

// A program with settings that make no sense does not start.
static void test_wrong_settings(void **state)
{
    static const char *const wrong[] = {
        "KVQ_EMU_DEVICES=9",     "KVQ_EMU_DEVICES=",          "KVQ_EMU_MEMORY=1T",
        "KVQ_EMU_MEMORY=100",    "KVQ_EMU_LACKS=wheels",      "KVQ_EMU_FAIL=memory_alloc",
        "KVQ_EMU_FAIL=fly:1:1",  "KVQ_EMU_FAIL=init:0:1",     "KVQ_EMU_STALL=1:0:5",
        "KVQ_EMU_VISIBLE=0,2",   "KVQ_EMU_CONTROL=/no/where", "KVQ_EMU_SEED=-1",
        "KVQ_EMU_CAPABILITY=7x", "KVQ_EMU_DEVICES=0"};
    int status;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct soft_peer peer = soft_start(wrong[i]);
        close(peer.socket);
        waitpid(peer.pid, &status, 0);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    }
    (void)state;
}

// Faults and stalls that come from outside, through the control file.
static void test_control_file(void **state)
{
    char name[64];
    const int fd = memfd_create("control", 0);
    assert_int_equal(ftruncate(fd, 4096), 0);
    struct kvq_soft_control *control = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    snprintf(name, sizeof name, "KVQ_EMU_CONTROL=/proc/%d/fd/%d", getpid(), fd);
    struct soft_peer peer = soft_start(name);
    const uint64_t at = soft_ask(&peer, SOFT_ALLOC, 64, 0, 0);
    *(volatile uint32_t *)&control->stall = 1;
    soft_ask(&peer, SOFT_WRITE64, at, 1, 0);
    while (*(volatile uint32_t *)&control->held == 0)
        sched_yield();
    assert_int_equal(soft_result(&peer, SOFT_QUERY, 0, 0, 0), KVQ_GPU_NOT_READY);
    *(volatile uint32_t *)&control->stall = 0;
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    *(volatile uint32_t *)&control->fault = KVQ_GPU_INVALID_SPACE;
    assert_int_equal(soft_result(&peer, SOFT_SYNC, 0, 0, 0), KVQ_GPU_INVALID_SPACE);
    *(volatile uint32_t *)&control->fault = 0; // it stays
    assert_int_equal(soft_result(&peer, SOFT_ALLOC, 8, 0, 0), KVQ_GPU_INVALID_SPACE);
    assert_true(control->calls > 4);
    assert_int_equal(soft_end(&peer), 0);
    // The second work of its first stream begins an hour late.
    setenv("KVQ_EMU_STALL", "1:2:3600000", 1);
    peer = soft_start(name);
    unsetenv("KVQ_EMU_STALL");
    const uint64_t there = soft_ask(&peer, SOFT_ALLOC, 64, 0, 0);
    soft_ask(&peer, SOFT_WRITE64, there, 1, 0);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    *(volatile uint32_t *)&control->held = 0;
    soft_ask(&peer, SOFT_WRITE64, there, 2, 0);
    while (*(volatile uint32_t *)&control->held == 0)
        sched_yield();
    assert_int_equal(soft_result(&peer, SOFT_QUERY, 0, 0, 0), KVQ_GPU_NOT_READY);
    soft_kill(&peer);
    munmap(control, 4096);
    close(fd);
    (void)state;
}

// Another order of devices in another process: its device 0 is our device 1, by UUID too.
static void test_visible(void **state)
{
    struct soft_peer peer = soft_start("KVQ_EMU_VISIBLE=1");
    const struct soft_question question = {.op = SOFT_EXPORT,
                                           .a = soft_ask(&peer, SOFT_CREATE, SOFT_BLOCK, 1, 0)};
    kvq_gpu_memory memory;
    kvq_gpu_ptr at;
    int fd;
    assert_int_equal(soft_ask_fd(&peer, &question, -1, &fd).result, KVQ_GPU_OK);
    OK(drv.memory_import(&memory, (void *)(intptr_t)fd, KVQ_GPU_HANDLE_FD));
    OK(drv.address_reserve(&at, SOFT_BLOCK, 0, 0, 0));
    OK(drv.memory_map(at, SOFT_BLOCK, 0, memory, 0));
    assert_int_equal(get(KVQ_GPU_POINTER_DEVICE, at), 1);
    OK(drv.memory_unmap(at, SOFT_BLOCK));
    OK(drv.address_free(at, SOFT_BLOCK));
    OK(drv.memory_release(memory));
    close(fd);
    soft_kill(&peer);
    (void)state;
}

int main(int argc, char **argv)
{
    setenv("KVQ_EMU_DEVICES", "2", 0);
    soft_serve_if_peer(argc, argv);
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, soft_remember, soft_compare)
        TEST(test_failures),       TEST(test_stalls),       TEST(test_environment),
        TEST(test_wrong_settings), TEST(test_control_file), TEST(test_visible),
#undef TEST
    };
    soft_open();
    OK(drv.stream_create(&stream, KVQ_GPU_STREAM_OWN));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
