// SPDX-License-Identifier: Apache-2.0
//
// kernels/cuda/share.h on the software driver, with another process at the other end. After each
// test nothing is left of what it made; whichever call of the driver fails, nothing is left either.
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/cuda/share.h"
#include "tests/kits/soft_kit.h"

static char text[KVQ_GPU_TEXT];
static struct kvq_soft_counts before;
static int files;

static int remember(void **state)
{
    (void)state;
    before = soft_counts();
    files = soft_open_files();
    return 0;
}

static int compare(void **state)
{
    (void)state;
    const struct kvq_soft_counts now = soft_counts();
    assert_memory_equal(&now, &before, sizeof now);
    assert_int_equal(soft_open_files(), files);
    return 0;
}

static void says(const char *words)
{
    if (!strstr(text, words))
        fail_msg("\"%s\" does not say \"%s\"", text, words);
}

static struct kvq_gpu_piece make(size_t bytes)
{
    struct kvq_gpu_piece piece;
    if (kvq_gpu_piece_make(&drv, 0, bytes, &piece, text, sizeof text) != KVQ_GPU_OK)
        fail_msg("%s", text);
    return piece;
}

static int export_of(const struct kvq_gpu_piece *piece)
{
    int fd;
    assert_int_equal(kvq_gpu_piece_export(&drv, piece, &fd, text, sizeof text), KVQ_GPU_OK);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    return fd;
}

static uint64_t word_at(kvq_gpu_ptr at)
{
    uint64_t value = 0;
    OK(drv.copy_out(&value, at, sizeof value, NULL));
    OK(drv.stream_sync(NULL));
    return value;
}

static void put_word(kvq_gpu_ptr at, uint32_t value)
{
    OK(drv.fill32(at, value, 2, NULL));
    OK(drv.stream_sync(NULL));
}

static void test_make(void **state)
{
    (void)state;
    size_t unit;
    assert_int_equal(kvq_gpu_piece_unit(&drv, 0, &unit, text, sizeof text), KVQ_GPU_OK);
    assert_int_equal(unit, SOFT_BLOCK);
    static const size_t sizes[][2] = {
        {1, SOFT_BLOCK}, {SOFT_BLOCK, SOFT_BLOCK}, {SOFT_BLOCK + 1, 2 * SOFT_BLOCK}};
    for (int i = 0; i < 3; i++) {
        struct kvq_gpu_piece piece = make(sizes[i][0]);
        assert_int_equal(piece.bytes, sizes[i][1]);
        put_word(piece.at + piece.bytes - 8, 5); // all of it may be written
        kvq_gpu_piece_release(&drv, &piece);
        assert_int_equal(piece.kind, KVQ_GPU_PIECE_NONE);
        kvq_gpu_piece_release(&drv, &piece);
    }
    struct kvq_gpu_piece piece;
    assert_int_not_equal(kvq_gpu_piece_make(&drv, 0, 0, &piece, text, sizeof text), KVQ_GPU_OK);
    says("0 bytes");
    assert_int_not_equal(kvq_gpu_piece_make(&drv, 0, SIZE_MAX, &piece, text, sizeof text),
                         KVQ_GPU_OK);
}

static void test_map(void **state)
{
    (void)state;
    struct kvq_gpu_piece piece = make(3 * SOFT_BLOCK), writing, reading;
    int fd = export_of(&piece);
    assert_int_equal(
        kvq_gpu_piece_map(&drv, 0, fd, piece.bytes, false, &writing, text, sizeof text),
        KVQ_GPU_OK);
    assert_int_equal(kvq_gpu_piece_map(&drv, 0, fd, piece.bytes, true, &reading, text, sizeof text),
                     KVQ_GPU_OK);
    put_word(writing.at + SOFT_BLOCK, 77);
    assert_true(word_at(piece.at + SOFT_BLOCK) == (77 | 77ull << 32));
    assert_true(word_at(reading.at + SOFT_BLOCK) == (77 | 77ull << 32));
    kvq_gpu_piece_release(&drv, &piece); // the others keep the memory
    put_word(writing.at, 78);
    assert_true(word_at(reading.at) == (78 | 78ull << 32));
    kvq_gpu_piece_release(&drv, &writing);
    kvq_gpu_piece_release(&drv, &reading);
    struct kvq_gpu_piece none;
    static const size_t wrong[] = {0, SOFT_BLOCK - 1, SOFT_BLOCK + 4096};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kvq_gpu_piece_map(&drv, 0, fd, wrong[i], false, &none, text, sizeof text),
                         KVQ_GPU_INVALID_VALUE);
        says("must be a multiple of 2097152");
    }
    assert_int_not_equal(
        kvq_gpu_piece_map(&drv, 0, fd, 4 * SOFT_BLOCK, false, &none, text, sizeof text),
        KVQ_GPU_OK); // more than there is
    close(fd);
    fd = memfd_create("test", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, SOFT_BLOCK), 0);
    assert_int_not_equal(
        kvq_gpu_piece_map(&drv, 0, fd, SOFT_BLOCK, false, &none, text, sizeof text),
        KVQ_GPU_OK); // no GPU's memory
    close(fd);
}

// Over addresses that are kept for it: for reading, and nothing stays of what fails.
static int map_at(int fd, kvq_gpu_ptr there, size_t bytes)
{
    kvq_gpu_memory memory;
    int result = kvq_gpu_memory_import(&drv, fd, &memory, text, sizeof text);
    return result ? result
                  : kvq_gpu_memory_map_at(&drv, 0, memory, there, bytes, text, sizeof text);
}

static void test_map_at(void **state)
{
    (void)state;
    struct kvq_gpu_piece piece = make(2 * SOFT_BLOCK);
    kvq_gpu_ptr at;
    int fd = export_of(&piece);
    OK(drv.address_reserve(&at, 6 * SOFT_BLOCK, 0, 0, 0));
    const kvq_gpu_ptr there = at + 2 * SOFT_BLOCK;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(
            soft_fail(i ? "memory_map" : "memory_access", 1, false, KVQ_GPU_INVALID_VALUE), 0);
        assert_int_equal(map_at(fd, there, piece.bytes),
                         i ? KVQ_GPU_INVALID_VALUE : KVQ_GPU_NOT_SUPPORTED);
        says(i ? "mapping GPU memory" : "allowing access to GPU memory");
    }
    assert_int_equal(map_at(fd, there, piece.bytes), KVQ_GPU_OK);
    put_word(piece.at + SOFT_BLOCK, 79);
    assert_true(word_at(there + SOFT_BLOCK) == (79 | 79ull << 32));
    kvq_gpu_piece_release(&drv, &piece); // the mapping keeps the memory
    assert_true(word_at(there + SOFT_BLOCK) == (79 | 79ull << 32));
    OK(drv.memory_unmap(there, 2 * SOFT_BLOCK));
    OK(drv.address_free(at, 6 * SOFT_BLOCK));
    close(fd);
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

static void test_open(void **state)
{
    (void)state;
    struct soft_peer peer = soft_start(NULL);
    uint64_t there = soft_ask(&peer, SOFT_ALLOC, SOFT_BLOCK + 4096, 0, 0);
    struct kvq_gpu_ipc_memory handle = handle_of(&peer, there);
    struct kvq_gpu_piece piece, again;
    assert_int_equal(kvq_gpu_piece_open(&drv, &handle, &piece, text, sizeof text), KVQ_GPU_OK);
    assert_true(piece.bytes >= SOFT_BLOCK + 4096);
    soft_ask(&peer, SOFT_FILL, there + 4096, 9, 2);
    soft_ask(&peer, SOFT_SYNC, 0, 0, 0);
    assert_true(word_at(piece.at + 4096) == (9 | 9ull << 32));
    assert_int_equal(kvq_gpu_piece_open(&drv, &handle, &again, text, sizeof text), KVQ_GPU_OK);
    assert_true(again.at == piece.at);
    kvq_gpu_piece_release(&drv, &again);
    assert_true(word_at(piece.at + 4096) == (9 | 9ull << 32));
    kvq_gpu_piece_release(&drv, &piece);
    memset(&handle, 0x5a, sizeof handle);
    assert_int_not_equal(kvq_gpu_piece_open(&drv, &handle, &piece, text, sizeof text), KVQ_GPU_OK);
    says("opening a CUDA IPC handle");
    soft_ask(&peer, SOFT_FREE, there, 0, 0);
    assert_int_equal(soft_end(&peer), 0);
    // One's own cannot be opened.
    kvq_gpu_ptr own;
    OK(drv.memory_alloc(&own, 4096));
    OK(drv.ipc_memory_get(&handle, own));
    assert_int_equal(kvq_gpu_piece_open(&drv, &handle, &piece, text, sizeof text),
                     KVQ_GPU_INVALID_CONTEXT);
    OK(drv.memory_free(own));
}

static void test_export(void **state)
{
    (void)state;
    struct kvq_gpu_export e;
    kvq_gpu_ptr at;
    OK(drv.memory_alloc(&at, 3 * SOFT_BLOCK));
    assert_int_equal(kvq_gpu_memory_export(&drv, at + 1000, SOFT_BLOCK, &e, text, sizeof text),
                     KVQ_GPU_OK);
    assert_true(e.base == at && e.bytes == 3 * SOFT_BLOCK && e.fd == -1 && e.device == 0);
    uint64_t number = e.number;
    assert_int_equal(
        kvq_gpu_memory_export(&drv, at + SOFT_BLOCK, SOFT_BLOCK, &e, text, sizeof text),
        KVQ_GPU_OK);
    assert_true(e.number == number);
    assert_int_equal(kvq_gpu_memory_export(&drv, at + 8, 3 * SOFT_BLOCK, &e, text, sizeof text),
                     KVQ_GPU_INVALID_VALUE);
    says("reach beyond their allocation of 6291456 bytes");
    OK(drv.memory_free(at));

    struct kvq_gpu_piece piece = make(SOFT_BLOCK), mapped; // memory by cuMemCreate
    assert_int_equal(kvq_gpu_memory_export(&drv, piece.at + 64, 64, &e, text, sizeof text),
                     KVQ_GPU_OK);
    assert_true(e.base == piece.at && e.bytes == SOFT_BLOCK && e.fd >= 0 && e.number != number);
    assert_true(fcntl(e.fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(kvq_gpu_piece_map(&drv, 0, e.fd, e.bytes, false, &mapped, text, sizeof text),
                     KVQ_GPU_OK);
    put_word(piece.at + 64, 3);
    assert_true(word_at(mapped.at + 64) == (3 | 3ull << 32));
    close(e.fd);
    kvq_gpu_piece_release(&drv, &mapped);
    kvq_gpu_piece_release(&drv, &piece);
}

// Memory as PyTorch's expandable segments have it: by cuMemCreate, not to be exported.
static void test_not_exportable(void **state)
{
    (void)state;
    const struct kvq_gpu_allocation what = {.type = KVQ_GPU_ALLOCATION_PINNED,
                                            .location = {KVQ_GPU_LOCATION_DEVICE, 0}};
    const struct kvq_gpu_access access = {{KVQ_GPU_LOCATION_DEVICE, 0}, KVQ_GPU_ACCESS_READ_WRITE};
    kvq_gpu_memory memory;
    kvq_gpu_ptr at;
    struct kvq_gpu_export e;
    OK(drv.memory_create(&memory, SOFT_BLOCK, &what, 0));
    OK(drv.address_reserve(&at, SOFT_BLOCK, 0, 0, 0));
    OK(drv.memory_map(at, SOFT_BLOCK, 0, memory, 0));
    OK(drv.memory_access(at, SOFT_BLOCK, &access, 1));
    assert_int_equal(kvq_gpu_memory_export(&drv, at, 64, &e, text, sizeof text),
                     KVQ_GPU_NOT_SUPPORTED);
    says("expandable_segments:False");
    says("kvq_buffer_create_on");
    OK(drv.memory_unmap(at, SOFT_BLOCK));
    OK(drv.address_free(at, SOFT_BLOCK));
    OK(drv.memory_release(memory));
    static uint8_t nothing[64];
    assert_int_equal(kvq_gpu_memory_export(&drv, (uintptr_t)nothing, 64, &e, text, sizeof text),
                     KVQ_GPU_INVALID_VALUE);
    says("no address that CUDA knows");
    void *host;
    OK(drv.host_alloc(&host, 4096, KVQ_GPU_HOST_MAPPED));
    assert_int_equal(kvq_gpu_memory_export(&drv, (uintptr_t)host, 64, &e, text, sizeof text),
                     KVQ_GPU_INVALID_VALUE);
    says("is host memory");
    OK(drv.host_free(host));
}

static void test_host(void **state)
{
    (void)state;
    kvq_gpu_ptr at;
    uint64_t *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_int_equal(kvq_gpu_host_register(&drv, page, 8192, &at, text, sizeof text), KVQ_GPU_OK);
    OK(drv.stream_write64(NULL, at + 4096, 1ull << 40, 0));
    OK(drv.stream_sync(NULL));
    assert_true(page[512] == 1ull << 40);
    kvq_gpu_ptr twice;
    assert_int_not_equal(kvq_gpu_host_register(&drv, page, 8192, &twice, text, sizeof text),
                         KVQ_GPU_OK);
    says("registering 8192 bytes of host memory");
    kvq_gpu_host_unregister(&drv, page);
    munmap(page, 8192);
}

// ---- Whichever call fails ----

static int all_of_it(void)
{
    struct kvq_gpu_piece piece, mapped = {0};
    struct kvq_gpu_export e = {.fd = -1};
    int fd = -1;
    int result = kvq_gpu_piece_make(&drv, 0, 100, &piece, text, sizeof text);
    if (result == KVQ_GPU_OK)
        result = kvq_gpu_piece_export(&drv, &piece, &fd, text, sizeof text);
    if (result == KVQ_GPU_OK)
        result = kvq_gpu_piece_map(&drv, 0, fd, piece.bytes, true, &mapped, text, sizeof text);
    if (result == KVQ_GPU_OK)
        result = kvq_gpu_memory_export(&drv, mapped.at, 64, &e, text, sizeof text);
    if (e.fd >= 0)
        close(e.fd);
    if (fd >= 0)
        close(fd);
    kvq_gpu_piece_release(&drv, &mapped);
    kvq_gpu_piece_release(&drv, &piece);
    return result;
}

static void test_failures(void **state)
{
    (void)state;
    static const struct {
        const char *call;
        uint64_t n;
    } calls[] = {
        {"memory_granularity", 1}, {"memory_create", 1}, {"address_reserve", 1},
        {"memory_map", 1},         {"memory_access", 1}, {"memory_export", 1},
        {"memory_granularity", 2}, {"memory_import", 1}, {"address_reserve", 2},
        {"memory_map", 2},         {"memory_access", 2}, {"pointer_get", 1},
        {"pointer_get", 2},        {"pointer_get", 3},   {"address_range", 1},
        {"memory_retain", 1},      {"memory_export", 2},
    };
    assert_int_equal(all_of_it(), KVQ_GPU_OK);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        text[0] = 0;
        assert_int_equal(soft_fail(calls[i].call, calls[i].n, false, KVQ_GPU_OUT_OF_MEMORY), 0);
        assert_int_equal(all_of_it(), KVQ_GPU_OUT_OF_MEMORY);
        assert_true(strlen(text) > 20);
        soft_fail(calls[i].call, 0, false, 0);
        assert_int_equal(compare(NULL), 0);
    }
}

static void test_failures_of_legacy(void **state)
{
    (void)state;
    struct soft_peer peer = soft_start(NULL);
    uint64_t there = soft_ask(&peer, SOFT_ALLOC, SOFT_BLOCK, 0, 0);
    const struct kvq_gpu_ipc_memory handle = handle_of(&peer, there);
    struct kvq_gpu_piece piece;
    static const char *const calls[] = {"ipc_memory_open", "address_range"};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(soft_fail(calls[i], 1, false, KVQ_GPU_MAP_FAILED), 0);
        assert_int_equal(kvq_gpu_piece_open(&drv, &handle, &piece, text, sizeof text),
                         KVQ_GPU_MAP_FAILED);
        assert_true(soft_counts().imports == before.imports + i); // when to close is the caller's
        assert_int_equal(piece.bytes, 0);
        kvq_gpu_piece_release(&drv, &piece);
        assert_true(soft_counts().imports == before.imports);
    }
    kvq_gpu_ptr at;
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_int_equal(soft_fail("host_device", 1, false, KVQ_GPU_INVALID_VALUE), 0);
    assert_int_equal(kvq_gpu_host_register(&drv, page, 4096, &at, text, sizeof text),
                     KVQ_GPU_INVALID_VALUE);
    assert_true(soft_counts().registered == before.registered);
    munmap(page, 4096);
    assert_int_equal(soft_end(&peer), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_make, remember, compare),
        cmocka_unit_test_setup_teardown(test_map, remember, compare),
        cmocka_unit_test_setup_teardown(test_map_at, remember, compare),
        cmocka_unit_test_setup_teardown(test_open, remember, compare),
        cmocka_unit_test_setup_teardown(test_export, remember, compare),
        cmocka_unit_test_setup_teardown(test_not_exportable, remember, compare),
        cmocka_unit_test_setup_teardown(test_host, remember, compare),
        cmocka_unit_test_setup_teardown(test_failures, remember, compare),
        cmocka_unit_test_setup_teardown(test_failures_of_legacy, remember, compare),
    };
    soft_serve_if_peer(argc, argv);
    soft_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
