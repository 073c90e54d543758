// SPDX-License-Identifier: Apache-2.0
//
// What the software driver lets processes share: physical memory by descriptor, allocations and
// events by handle, timeline words; and what is left of it when one of them is killed.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/kits/soft_kit.h"

static struct kvq_gpu_stream *stream;

static uint64_t read_word(kvq_gpu_ptr at)
{
    uint64_t value = 0;
    OK(drv.copy_out(&value, at, sizeof value, stream));
    return value;
}

// Maps an imported memory of one block here.
static kvq_gpu_ptr map_here(kvq_gpu_memory memory, int rights)
{
    const struct kvq_gpu_access access = {{KVQ_GPU_LOCATION_DEVICE, 0}, rights};
    kvq_gpu_ptr at;
    OK(drv.address_reserve(&at, SOFT_BLOCK, 0, 0, 0));
    OK(drv.memory_map(at, SOFT_BLOCK, 0, memory, 0));
    OK(drv.memory_access(at, SOFT_BLOCK, &access, 1));
    return at;
}

static void unmap_here(kvq_gpu_ptr at)
{
    OK(drv.memory_unmap(at, SOFT_BLOCK));
    OK(drv.address_free(at, SOFT_BLOCK));
}

// A block of memory that the peer makes and both map. Its number and address there are told.
struct shared {
    uint64_t memory, there;
    kvq_gpu_ptr here;
};

static struct shared share(const struct soft_peer *peer, int rights)
{
    struct shared s;
    kvq_gpu_memory memory;
    int fd;
    s.memory = soft_ask(peer, SOFT_CREATE, SOFT_BLOCK, 1, 0);
    s.there = soft_ask(peer, SOFT_MAP, s.memory, SOFT_BLOCK, KVQ_GPU_ACCESS_READ_WRITE);
    const struct soft_question question = {.op = SOFT_EXPORT, .a = s.memory};
    assert_int_equal(soft_ask_fd(peer, &question, -1, &fd).result, KVQ_GPU_OK);
    OK(drv.memory_import(&memory, (void *)(intptr_t)fd, KVQ_GPU_HANDLE_FD));
    close(fd);
    s.here = map_here(memory, rights);
    OK(drv.memory_release(memory)); // the mapping keeps it
    return s;
}

static struct kvq_gpu_ipc_memory handle_of(const struct soft_peer *peer, uint64_t at)
{
    const struct soft_question question = {.op = SOFT_MEMORY_GET, .a = at};
    const struct soft_answer answer = soft_ask_fd(peer, &question, -1, NULL);
    struct kvq_gpu_ipc_memory handle;
    assert_int_equal(answer.result, KVQ_GPU_OK);
    memcpy(&handle, answer.handle, sizeof handle);
    return handle;
}

static kvq_gpu_ptr open_here(struct kvq_gpu_ipc_memory handle)
{
    kvq_gpu_ptr at;
    OK(drv.ipc_memory_open(&at, handle, KVQ_GPU_IPC_LAZY_PEER));
    return at;
}

// ---- Descriptors ----

static void test_descriptor(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
    soft_ask(&peer, SOFT_FILL, s.there, 7, 2);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    assert_int_equal(read_word(s.here), 7 | (uint64_t)7 << 32);
    OK(drv.fill32(s.here + 8, 9, 2, stream));
    OK(drv.stream_sync(stream));
    assert_int_equal(soft_ask(&peer, SOFT_READ, s.there + 8, 0, 0), 9 | (uint64_t)9 << 32);
    // What the peer gives back stays as long as it is mapped here.
    soft_ask(&peer, SOFT_RELEASE, s.memory, 0, 0);
    soft_ask(&peer, SOFT_UNMAP, s.there, SOFT_BLOCK, 0);
    assert_int_equal(soft_ask(&peer, SOFT_COUNTS, 1, 0, 0), 0);
    assert_int_equal(read_word(s.here), 7 | (uint64_t)7 << 32);
    soft_kill(&peer);
    assert_int_equal(read_word(s.here + 8), 9 | (uint64_t)9 << 32);
    unmap_here(s.here);
    (void)state;
}

// Read-only memory: the driver refuses to write there, and the host cannot.
static void test_read_only(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ);
    int status;
    soft_ask(&peer, SOFT_FILL, s.there, 5, 2);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    assert_int_equal(read_word(s.here), 5 | (uint64_t)5 << 32);
    assert_int_equal(drv.fill32(s.here, 1, 1, stream), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.stream_write64(stream, s.here, 1, 0), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.copy_device(s.here, s.here + 64, 8, stream), KVQ_GPU_INVALID_VALUE);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile uint64_t *)s.here = 1;
        _exit(0);
    }
    waitpid(child, &status, 0);
    assert_false(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(drv.stream_wait64(stream, s.here, 5, KVQ_GPU_WAIT_AT_LEAST)); // waiting is reading
    OK(drv.stream_sync(stream));
    soft_kill(&peer);
    unmap_here(s.here);
    (void)state;
}

static void test_wrong_descriptors(void **state)
{
    kvq_gpu_memory memory;
    struct soft_peer peer = soft_start(NULL);
    const int plain = memfd_create("plain", MFD_CLOEXEC);
    const int named = memfd_create("kvq-emu-memory-0", MFD_CLOEXEC); // no seals
    const int wrong[] = {plain, named, 0, 999, -1, peer.socket};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_int_equal(drv.memory_import(&memory, (void *)(intptr_t)wrong[i], KVQ_GPU_HANDLE_FD),
                         KVQ_GPU_INVALID_VALUE);
    const uint64_t closed = soft_ask(&peer, SOFT_CREATE, SOFT_BLOCK, 0, 0);
    assert_int_equal(soft_result(&peer, SOFT_EXPORT, closed, 0, 0), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(soft_end(&peer), 0);
    close(plain);
    close(named);
    (void)state;
}

// ---- Handles of allocations ----

// Small allocations share a block: the handle leads to the allocation, the block comes with it.
static void test_handle(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const uint64_t first = soft_ask(&peer, SOFT_ALLOC, 1000, 0, 0);
    const uint64_t second = soft_ask(&peer, SOFT_ALLOC, 1000, 0, 0);
    kvq_gpu_ptr base;
    size_t bytes;
    assert_true(second > first && second - first < 4096);
    soft_ask(&peer, SOFT_FILL, second, 3, 2);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    const struct kvq_gpu_ipc_memory handle = handle_of(&peer, second + 8); // as of its start
    const kvq_gpu_ptr here = open_here(handle);
    assert_int_equal(read_word(here), 3 | (uint64_t)3 << 32);
    OK(drv.address_range(&base, &bytes, here));
    assert_int_equal(bytes, SOFT_BLOCK);
    assert_int_equal(here - base, second % SOFT_BLOCK);
    assert_int_equal(open_here(handle), here); // counted
    OK(drv.ipc_memory_close(here));
    assert_int_equal(read_word(here), 3 | (uint64_t)3 << 32);
    OK(drv.ipc_memory_close(here));
    assert_int_equal(drv.ipc_memory_close(here), KVQ_GPU_INVALID_VALUE);
    uint64_t value;
    assert_int_equal(drv.copy_out(&value, here, 8, stream), KVQ_GPU_INVALID_VALUE);
    soft_kill(&peer);
    (void)state;
}

static void test_own_handle(void **state)
{
    struct kvq_gpu_ipc_memory handle;
    kvq_gpu_ptr own, at;
    OK(drv.memory_alloc(&own, 64));
    OK(drv.ipc_memory_get(&handle, own));
    assert_int_equal(drv.ipc_memory_open(&at, handle, KVQ_GPU_IPC_LAZY_PEER),
                     KVQ_GPU_INVALID_CONTEXT);
    OK(drv.memory_free(own));
    (void)state;
}

// After a free, another allocation has the same address and the same handle, and another buffer.
static void test_same_handle_again(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const uint64_t first = soft_ask(&peer, SOFT_ALLOC, SOFT_BLOCK, 0, 0);
    const uint64_t buffer = soft_ask(&peer, SOFT_BUFFER, first, 0, 0);
    const struct kvq_gpu_ipc_memory handle = handle_of(&peer, first);
    soft_ask(&peer, SOFT_FILL, first, 1, 2);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    const kvq_gpu_ptr old = open_here(handle);
    soft_ask(&peer, SOFT_FREE, first, 0, 0);
    assert_int_equal(read_word(old), 1 | (uint64_t)1 << 32); // stale, and there
    const uint64_t second = soft_ask(&peer, SOFT_ALLOC, SOFT_BLOCK, 0, 0);
    const struct kvq_gpu_ipc_memory again = handle_of(&peer, second);
    assert_int_equal(second, first);
    assert_memory_equal(&handle, &again, sizeof handle);
    assert_int_not_equal(soft_ask(&peer, SOFT_BUFFER, second, 0, 0), buffer);
    soft_ask(&peer, SOFT_FILL, second, 2, 2);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    // While the old one is open, the handle leads to it; then to the new one.
    assert_int_equal(open_here(again), old);
    assert_int_equal(read_word(old), 1 | (uint64_t)1 << 32);
    OK(drv.ipc_memory_close(old));
    OK(drv.ipc_memory_close(old));
    const kvq_gpu_ptr here = open_here(again);
    assert_int_equal(read_word(here), 2 | (uint64_t)2 << 32);
    OK(drv.ipc_memory_close(here));
    soft_ask(&peer, SOFT_FREE, second, 0, 0);
    kvq_gpu_ptr none;
    assert_int_equal(drv.ipc_memory_open(&none, again, KVQ_GPU_IPC_LAZY_PEER),
                     KVQ_GPU_INVALID_VALUE);
    soft_kill(&peer);
    (void)state;
}

static void test_wrong_handles(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const uint64_t there = soft_ask(&peer, SOFT_ALLOC, 64, 0, 0);
    const struct kvq_gpu_ipc_memory handle = handle_of(&peer, there);
    kvq_gpu_ptr at;
    for (size_t i = 0; i < sizeof handle.bytes; i++) {
        struct kvq_gpu_ipc_memory wrong = handle;
        wrong.bytes[i] ^= 0x81;
        if (drv.ipc_memory_open(&at, wrong, KVQ_GPU_IPC_LAZY_PEER) == KVQ_GPU_OK)
            OK(drv.ipc_memory_close(at));
    }
    struct kvq_gpu_ipc_memory zeros = {{0}};
    assert_int_equal(drv.ipc_memory_open(&at, zeros, KVQ_GPU_IPC_LAZY_PEER), KVQ_GPU_INVALID_VALUE);
    assert_int_equal(drv.ipc_memory_open(&at, handle, 0), KVQ_GPU_INVALID_VALUE);
    const uint64_t memory = soft_ask(&peer, SOFT_CREATE, SOFT_BLOCK, 1, 0);
    const uint64_t mapped = soft_ask(&peer, SOFT_MAP, memory, SOFT_BLOCK, 3);
    assert_int_equal(soft_result(&peer, SOFT_MEMORY_GET, mapped, 0, 0), KVQ_GPU_INVALID_VALUE);
    soft_kill(&peer);
    assert_int_equal(drv.ipc_memory_open(&at, handle, KVQ_GPU_IPC_LAZY_PEER),
                     KVQ_GPU_INVALID_VALUE);
    (void)state;
}

// Two processes whose pid values are equal, as in two containers.
static void test_equal_pids(void **state)
{
    struct soft_peer one = soft_start("KVQ_EMU_PID=7"), two = soft_start("KVQ_EMU_PID=7");
    struct soft_question question = {.op = SOFT_MEMORY_OPEN};
    const struct kvq_gpu_ipc_memory handle = handle_of(&one, soft_ask(&one, SOFT_ALLOC, 64, 0, 0));
    memcpy(question.handle, &handle, sizeof handle);
    assert_int_equal(soft_ask_fd(&two, &question, -1, NULL).result, KVQ_GPU_INVALID_CONTEXT);
    OK(drv.ipc_memory_close(open_here(handle)));
    soft_kill(&one);
    soft_kill(&two);
    (void)state;
}

// ---- Timeline words ----

// Both sides' streams alone drive a count up; the hosts wait at its end.
static void test_words_both_ways(void **state)
{
    enum { ROUNDS = 200 };
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
    soft_ask(&peer, SOFT_FILL, s.there, 0, 1024);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    for (uint64_t i = 1; i <= ROUNDS; i++) {
        OK(drv.fill32(s.here + 1024, (unsigned)i, 2, stream));
        OK(drv.stream_write64(stream, s.here, i, 0));
        OK(drv.stream_wait64(stream, s.here + 8, i, KVQ_GPU_WAIT_AT_LEAST));
        soft_ask(&peer, SOFT_WAIT64, s.there, i, 0);
        soft_ask(&peer, SOFT_FILL, s.there + 2048 + 8 * i, (unsigned)i, 2);
        soft_ask(&peer, SOFT_WRITE64, s.there + 8, i, 0);
    }
    OK(drv.stream_sync(stream));
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    assert_int_equal(read_word(s.here), ROUNDS);
    assert_int_equal(read_word(s.here + 8), ROUNDS);
    assert_int_equal(read_word(s.here + 2048 + 8 * ROUNDS), ROUNDS | (uint64_t)ROUNDS << 32);
    soft_kill(&peer);
    unmap_here(s.here);
    (void)state;
}

// A store by the peer's host tells nobody, and is seen all the same.
static void test_host_store(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
    OK(drv.fill32(s.here, 0, 2, stream));
    OK(drv.stream_sync(stream));
    OK(drv.stream_wait64(stream, s.here, 5, KVQ_GPU_WAIT_AT_LEAST));
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    soft_ask(&peer, SOFT_STORE, s.there, 5, 0);
    OK(drv.stream_sync(stream));
    // Also where only the upper half of the word changes.
    OK(drv.stream_wait64(stream, s.here, (uint64_t)1 << 40, KVQ_GPU_WAIT_AT_LEAST));
    soft_ask(&peer, SOFT_STORE, s.there, 5 | (uint64_t)1 << 40, 0);
    OK(drv.stream_sync(stream));
    soft_kill(&peer);
    unmap_here(s.here);
    (void)state;
}

// A peer that was to write a word is killed: this side's stream waits on until it is poisoned.
static void test_killed_before_writing(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
    struct kvq_gpu_stream *other;
    OK(drv.fill32(s.here, 0, 4, stream));
    OK(drv.stream_sync(stream));
    OK(drv.stream_create(&other, KVQ_GPU_STREAM_OWN));
    OK(drv.stream_wait64(stream, s.here, 3, KVQ_GPU_WAIT_AT_LEAST));
    soft_ask(&peer, SOFT_WAIT64, s.there + 8, 1, 0); // for ever
    soft_ask(&peer, SOFT_WRITE64, s.there, 3, 0);
    soft_kill(&peer);
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    OK(drv.stream_write64(other, s.here, INT64_MAX, 0));
    OK(drv.stream_sync(stream));
    OK(drv.stream_destroy(other));
    unmap_here(s.here);
    (void)state;
}

// Killed while it writes all the time, again and again.
static void test_killed_at_work(void **state)
{
    for (int round = 0; round < 8; round++) {
        struct soft_peer peer = soft_start(NULL);
        const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
        soft_ask(&peer, SOFT_FILL, s.there, 0, 2);
        for (uint64_t i = 1; i <= 40; i++) {
            soft_tell(&peer, SOFT_FILL, s.there + 4096, (unsigned)i, 100000);
            soft_tell(&peer, SOFT_WRITE64, s.there, i, 0);
        }
        OK(drv.stream_wait64(stream, s.here, (uint64_t)round, KVQ_GPU_WAIT_AT_LEAST));
        OK(drv.stream_sync(stream));
        soft_kill(&peer);
        const uint64_t reached = read_word(s.here);
        assert_true(reached >= (uint64_t)round && reached <= 40);
        unmap_here(s.here);
    }
    (void)state;
}

// ---- Events ----

static struct kvq_gpu_ipc_event event_handle(const struct soft_peer *peer, uint64_t event)
{
    const struct soft_question question = {.op = SOFT_EVENT_GET, .a = event};
    const struct soft_answer answer = soft_ask_fd(peer, &question, -1, NULL);
    struct kvq_gpu_ipc_event handle;
    assert_int_equal(answer.result, KVQ_GPU_OK);
    memcpy(&handle, answer.handle, sizeof handle);
    return handle;
}

// A wait is for the record that was made before it, not for a later one.
static void test_events(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
    const uint64_t theirs = soft_ask(&peer, SOFT_EVENT_CREATE, 0, 0, 0);
    struct kvq_gpu_event *event;
    OK(drv.fill32(s.here, 0, 64, stream));
    OK(drv.stream_sync(stream));
    OK(drv.ipc_event_open(&event, event_handle(&peer, theirs)));
    OK(drv.stream_wait(stream, event, 0)); // never recorded: nothing to wait for
    OK(drv.stream_sync(stream));
    soft_ask(&peer, SOFT_WAIT64, s.there, 1, 0);
    soft_ask(&peer, SOFT_FILL, s.there + 64, 6, 2);
    soft_ask(&peer, SOFT_RECORD, theirs, 0, 0);
    assert_int_equal(drv.event_query(event), KVQ_GPU_NOT_READY);
    OK(drv.stream_wait(stream, event, 0));
    OK(drv.copy_device(s.here + 72, s.here + 64, 8, stream));
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    soft_ask(&peer, SOFT_STORE, s.there, 1, 0);
    OK(drv.stream_sync(stream));
    assert_int_equal(read_word(s.here + 72), 6 | (uint64_t)6 << 32);
    OK(drv.event_sync(event));
    // The importer records, the exporter waits.
    OK(drv.fill32(s.here + 128, 8, 2, stream));
    OK(drv.event_record(event, stream));
    soft_ask(&peer, SOFT_STREAM_WAIT, theirs, 0, 0);
    assert_int_equal(soft_ask(&peer, SOFT_READ, s.there + 128, 0, 0), 8 | (uint64_t)8 << 32);
    OK(drv.event_destroy(event));
    soft_kill(&peer);
    unmap_here(s.here);
    (void)state;
}

// Waiting for an event that was destroyed, or whose process was killed, ends.
static void test_events_that_end(void **state)
{
    struct kvq_gpu_event *destroyed, *killed, *mine;
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
    const uint64_t one = soft_ask(&peer, SOFT_EVENT_CREATE, 0, 0, 0);
    const uint64_t two = soft_ask(&peer, SOFT_EVENT_CREATE, 0, 0, 0);
    struct kvq_gpu_ipc_event handle = event_handle(&peer, one);
    OK(drv.ipc_event_open(&destroyed, handle));
    OK(drv.ipc_event_open(&killed, event_handle(&peer, two)));
    soft_ask(&peer, SOFT_FILL, s.there, 0, 2);
    soft_ask(&peer, SOFT_WAIT64, s.there, 1, 0); // for ever
    soft_ask(&peer, SOFT_RECORD, one, 0, 0);
    soft_ask(&peer, SOFT_RECORD, two, 0, 0);
    OK(drv.stream_wait(stream, destroyed, 0));
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    soft_ask(&peer, SOFT_EVENT_DESTROY, one, 0, 0);
    OK(drv.stream_sync(stream));
    soft_ask(&peer, SOFT_EVENT_CREATE, 0, 0, 0); // in the same place
    OK(drv.event_record(destroyed, stream));
    OK(drv.stream_wait(stream, destroyed, 0));
    OK(drv.stream_wait(stream, killed, 0));
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    soft_kill(&peer);
    OK(drv.stream_sync(stream));
    OK(drv.event_destroy(destroyed));
    OK(drv.event_destroy(killed));
    assert_int_equal(drv.ipc_event_open(&mine, handle), KVQ_GPU_INVALID_HANDLE);
    memset(&handle, 0x5a, sizeof handle);
    assert_int_equal(drv.ipc_event_open(&mine, handle), KVQ_GPU_INVALID_HANDLE);
    OK(drv.event_create(&mine, KVQ_GPU_EVENT_UNTIMED));
    assert_int_equal(drv.ipc_event_get(&handle, mine), KVQ_GPU_INVALID_HANDLE);
    OK(drv.event_destroy(mine));
    OK(drv.event_create(&mine, KVQ_GPU_EVENT_UNTIMED | KVQ_GPU_EVENT_SHARED));
    OK(drv.ipc_event_get(&handle, mine));
    assert_int_equal(drv.ipc_event_open(&killed, handle), KVQ_GPU_INVALID_CONTEXT);
    OK(drv.event_destroy(mine));
    unmap_here(s.here);
    (void)state;
}

// Waiting for a record ends as well when the process is killed that made it on an event of ours.
static void test_records_that_end(void **state)
{
    struct kvq_gpu_event *event;
    struct soft_question open = {.op = SOFT_EVENT_OPEN};
    struct kvq_gpu_ipc_event handle;
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
    OK(drv.event_create(&event, KVQ_GPU_EVENT_UNTIMED | KVQ_GPU_EVENT_SHARED));
    OK(drv.ipc_event_get(&handle, event));
    memcpy(open.handle, &handle, sizeof handle);
    const struct soft_answer opened = soft_ask_fd(&peer, &open, -1, NULL);
    assert_int_equal(opened.result, KVQ_GPU_OK);
    soft_ask(&peer, SOFT_RECORD, opened.value, 0, 0);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    OK(drv.stream_wait(stream, event, 0));
    OK(drv.stream_sync(stream));
    soft_ask(&peer, SOFT_FILL, s.there, 0, 2);
    soft_ask(&peer, SOFT_WAIT64, s.there, 1, 0); // for ever
    soft_ask(&peer, SOFT_RECORD, opened.value, 0, 0);
    OK(drv.stream_wait(stream, event, 0));
    assert_int_equal(drv.stream_query(stream), KVQ_GPU_NOT_READY);
    soft_kill(&peer);
    OK(drv.stream_sync(stream));
    OK(drv.event_destroy(event));
    unmap_here(s.here);
    (void)state;
}

// More of them than one page has places for; each one is itself.
static void test_many_events(void **state)
{
    enum { EVENTS = 70 };
    struct soft_peer peer = soft_start(NULL);
    const uint64_t words = soft_ask(&peer, SOFT_ALLOC, 4096, 0, 0);
    struct kvq_gpu_event *here[EVENTS];
    uint64_t there[EVENTS];
    soft_ask(&peer, SOFT_FILL, words, 0, 1024);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    for (int i = 0; i < EVENTS; i++) {
        there[i] = soft_ask(&peer, SOFT_EVENT_CREATE, 0, 0, 0);
        OK(drv.ipc_event_open(&here[i], event_handle(&peer, there[i])));
    }
    soft_ask(&peer, SOFT_WAIT64, words, 1, 0);
    for (int i = 0; i < EVENTS; i += 2)
        soft_ask(&peer, SOFT_RECORD, there[i], 0, 0);
    for (int i = 0; i < EVENTS; i++)
        assert_int_equal(drv.event_query(here[i]), i % 2 ? KVQ_GPU_OK : KVQ_GPU_NOT_READY);
    soft_ask(&peer, SOFT_STORE, words, 1, 0);
    for (int i = 0; i < EVENTS; i++) {
        OK(drv.event_sync(here[i]));
        OK(drv.event_destroy(here[i]));
    }
    soft_kill(&peer);
    (void)state;
}

// ---- Ends ----

// A process that ends with work in flight, by exit, ends well.
static void test_exit_at_work(void **state)
{
    for (int round = 0; round < 4; round++) {
        struct soft_peer peer = soft_start(NULL);
        const uint64_t at = soft_ask(&peer, SOFT_ALLOC, SOFT_BLOCK, 0, 0);
        soft_ask(&peer, SOFT_FILL, at, 0, 2);
        for (int i = 0; i < round * 10; i++)
            soft_ask(&peer, SOFT_FILL, at + 64, 1, 100000);
        if (round % 2)
            soft_ask(&peer, SOFT_WAIT64, at, 1, 0);
        assert_int_equal(soft_end(&peer), 0);
    }
    (void)state;
}

// A kernel that fails breaks its own process for good, and no other.
static void test_sticky(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const struct shared s = share(&peer, KVQ_GPU_ACCESS_READ_WRITE);
    soft_ask(&peer, SOFT_FILL, s.there, 4, 2);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    soft_ask(&peer, SOFT_BAD_LAUNCH, 0, 0, 0);
    assert_int_equal(soft_result(&peer, SOFT_SYNC, 0, 0, 0), KVQ_GPU_LAUNCH_FAILED);
    assert_int_equal(soft_result(&peer, SOFT_ALLOC, 64, 0, 0), KVQ_GPU_LAUNCH_FAILED);
    assert_int_equal(soft_result(&peer, SOFT_FILL, s.there, 5, 2), KVQ_GPU_LAUNCH_FAILED);
    assert_int_equal(read_word(s.here), 4 | (uint64_t)4 << 32);
    assert_int_equal(soft_end(&peer), 0);
    unmap_here(s.here);
    (void)state;
}

// Kernels are held to the rights of mapped memory.
static void test_kernel_without_rights(void **state)
{
    struct soft_peer peer = soft_start(NULL);
    const uint64_t memory = soft_ask(&peer, SOFT_CREATE, SOFT_BLOCK, 1, 0);
    const uint64_t at = soft_ask(&peer, SOFT_MAP, memory, SOFT_BLOCK, KVQ_GPU_ACCESS_NONE);
    soft_ask(&peer, SOFT_BAD_LAUNCH, at, 0, 0);
    assert_int_equal(soft_result(&peer, SOFT_SYNC, 0, 0, 0), KVQ_GPU_LAUNCH_FAILED);
    assert_int_equal(soft_end(&peer), 0);
    (void)state;
}

int main(int argc, char **argv)
{
    soft_serve_if_peer(argc, argv);
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, soft_remember, soft_compare)
        TEST(test_descriptor),
        TEST(test_read_only),
        TEST(test_wrong_descriptors),
        TEST(test_handle),
        TEST(test_own_handle),
        TEST(test_same_handle_again),
        TEST(test_wrong_handles),
        TEST(test_equal_pids),
        TEST(test_words_both_ways),
        TEST(test_host_store),
        TEST(test_killed_before_writing),
        TEST(test_killed_at_work),
        TEST(test_events),
        TEST(test_events_that_end),
        TEST(test_records_that_end),
        TEST(test_many_events),
        TEST(test_exit_at_work),
        TEST(test_sticky),
        TEST(test_kernel_without_rights),
#undef TEST
    };
    soft_open();
    OK(drv.stream_create(&stream, KVQ_GPU_STREAM_OWN));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
