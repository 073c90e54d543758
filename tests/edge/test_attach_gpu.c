// SPDX-License-Identifier: Apache-2.0
//
// The attach socket of a daemon with GPUs (the software driver's): buffers in their memory, imports
// of other processes' memory, timelines. At the end of each test every descriptor, mapping, handle
// and byte of GPU memory must be gone again.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/cuda/bundle.h"
#include "kernels/cuda/share.h"
#include "proto/shm.h"
#include "proto/status.h"
#include "tests/edge/attach_gpu_kit.h"
#include "tests/kits/soft_kit.h"
#include "tests/kits/unit.h"

static uint64_t word_at(kvq_gpu_ptr at)
{
    uint64_t value = 1;
    OK(drv.copy_out(&value, at, sizeof value, NULL));
    OK(drv.stream_sync(NULL));
    return value;
}

// ---- Tests ----

GPU_TEST(test_hello)
{
    struct peer *p = peer_attached();
    const Kvq__HelloReply *hello = p->reply->hello;
    assert_int_equal(hello->n_gpus, 1);
    assert_int_equal(hello->gpus[0]->uuid.len, sizeof gpu_uuid);
    assert_memory_equal(hello->gpus[0]->uuid.data, &gpu_uuid, sizeof gpu_uuid);
    assert_true(hello->gpus[0]->name[0]);
}

GPU_TEST(test_create)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq_gpu_piece piece;
    struct peer *p = peer_attached();
    assert_int_equal(peer_create_on(p, 0), KVQ_E_INVALID);
    assert_int_equal(peer_create_on(p, (8 << 20) + 1), KVQ_E_LIMIT);
    assert_int_equal(peer_create_on(p, UINT64_MAX), KVQ_E_LIMIT);
    assert_int_equal(peer_create_on(p, 4096), 0);
    assert_int_equal(p->n_fds, 1);
    assert_int_equal(p->reply->create_buffer->bytes, 4096);
    assert_int_equal(p->reply->create_buffer->allocation_bytes, SOFT_BLOCK);
    assert_true(p->reply->create_buffer->on_gpu);
    assert_int_equal(
        kvq_gpu_piece_map(&drv, 0, p->fds[0], SOFT_BLOCK, false, &piece, text, sizeof text), 0);
    for (size_t i = 0; i < SOFT_BLOCK; i += SOFT_BLOCK / 8)
        assert_true(word_at(piece.at + i) == 0);
    assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
    assert_true(word_at(piece.at) == 0); // ours still
    kvq_gpu_piece_release(&drv, &piece);
}

// What a client closed counts until it is gone, since it may go on using it, and is given to the
// same client alone, cleared.
GPU_TEST(test_closed_memory_counts)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq_gpu_piece kept;
    struct peer *p = peer_attached();
    uint32_t buffers[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(peer_create_on(p, SOFT_BLOCK), 0);
        buffers[i] = peer_made(p);
    }
    assert_int_equal(
        kvq_gpu_piece_map(&drv, 0, p->fds[0], SOFT_BLOCK, false, &kept, text, sizeof text), 0);
    OK(drv.fill8(kept.at, 0xee, SOFT_BLOCK, NULL));
    OK(drv.stream_sync(NULL));
    assert_int_equal(peer_create_on(p, 1), KVQ_E_LIMIT);
    assert_int_equal(peer_close_buffer(p, buffers[3]), 0);
    assert_int_equal(peer_create_buffer(p, 4096), KVQ_E_LIMIT); // of the host's neither
    assert_int_equal(peer_create_on(p, SOFT_BLOCK + 1), KVQ_E_LIMIT);
    struct peer *other = peer_attached();
    assert_int_equal(peer_create_on(other, SOFT_BLOCK), 0);
    peer_free(other);
    const uint64_t taken = soft_counts().memories;
    for (int i = 0; i < 20; i++) {
        assert_int_equal(peer_create_on(p, SOFT_BLOCK - 1), 0);
        assert_true(word_at(kept.at) == 0 && word_at(kept.at + SOFT_BLOCK - 8) == 0);
        assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
        assert_true(soft_counts().memories == taken);
    }
    assert_int_equal(peer_create_on(p, 100), 0);
    kvq_gpu_piece_release(&drv, &kept);
}

// Nor does it cease to count where the driver refuses to make a buffer of it again.
GPU_TEST(test_closed_memory_that_is_refused)
{
    static const char *const calls[] = {"fill8", "memory_export"};
    struct peer *p = peer_attached();
    for (int i = 0; i < 4; i++)
        assert_int_equal(peer_create_on(p, SOFT_BLOCK), 0);
    assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
    const uint64_t taken = soft_counts().memories;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        assert_int_equal(soft_fail(calls[i], 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
        assert_int_equal(peer_create_on(p, SOFT_BLOCK), KVQ_E_NO_MEMORY);
        assert_int_equal(soft_fail(calls[i], 0, false, 0), 0);
        assert_true(soft_counts().memories == taken);
        assert_int_equal(peer_create_buffer(p, 4096), KVQ_E_LIMIT);
        assert_int_equal(peer_create_on(p, SOFT_BLOCK), 0);
        assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
    }
}

EXPORTER_TEST(test_import_by_handle)
{
    uint64_t at;
    struct told told = told_allocate(8 * SOFT_BLOCK, &at);
    struct peer *p = peer_attached();
    uint32_t buffers[3];
    // More than client_bytes: it is the engine's own.
    assert_int_equal(peer_import_on(p, &told, 0, 8 * SOFT_BLOCK), 0);
    assert_true(p->reply->create_buffer->on_gpu);
    assert_int_equal(p->n_fds, 0);
    buffers[0] = peer_made(p);
    for (int i = 1; i < 3; i++) {
        assert_int_equal(peer_import_on(p, &told, (uint64_t)i * 512, 4096), 0);
        buffers[i] = peer_made(p);
    }
    assert_int_equal(soft_counts().imports, gpu_before.imports + 1); // opened once
    assert_int_equal(peer_close_buffer(p, buffers[1]), 0);
    assert_int_equal(peer_close_buffer(p, buffers[0]), 0);
    assert_int_equal(soft_counts().imports, gpu_before.imports + 1);
    assert_int_equal(peer_close_buffer(p, buffers[2]), 0);
    assert_int_equal(soft_counts().imports, gpu_before.imports); // once it is answered
    // Bounds are the driver's, whatever the client says.
    static const uint64_t wrong[][2] = {{1, 8 * SOFT_BLOCK}, {8 * SOFT_BLOCK, 1},
                                        {UINT64_MAX, 1},     {0, 8 * SOFT_BLOCK + 1},
                                        {1ull << 63, 1},     {16 * SOFT_BLOCK, 4096}};
    told.bytes = 1ull << 40;
    for (int i = 0; i < 6; i++) {
        assert_int_equal(peer_import_on(p, &told, wrong[i][0], wrong[i][1]), KVQ_E_BUFFER);
        peer_says(p, "reach beyond the allocation, which has 16777216 bytes by the driver");
    }
    assert_int_equal(peer_import_on(p, &told, 0, 0), KVQ_E_INVALID);
    assert_int_equal(soft_counts().imports, gpu_before.imports);
    assert_int_equal(peer_import_on(p, &told, 0, 4096), 0); // left for the end
    peer_free(p);
    assert_int_equal(soft_counts().imports, gpu_before.imports);
    soft_ask(&exporter, SOFT_FREE, at, 0, 0);
}

// The handle of a freed allocation may be a new one's, to the byte.
EXPORTER_TEST(test_handle_used_again)
{
    uint64_t at, again;
    struct told old = told_allocate(SOFT_BLOCK, &at);
    struct peer *p = peer_attached(), *other = peer_attached();
    assert_int_equal(peer_import_on(p, &old, 0, 4096), 0);
    uint32_t buffer = peer_made(p);
    soft_ask(&exporter, SOFT_FREE, at, 0, 0);
    struct told young = told_allocate(SOFT_BLOCK, &again);
    assert_true(again == at);
    assert_memory_equal(&young.handle, &old.handle, sizeof old.handle);
    assert_true(young.number != old.number);
    assert_int_equal(peer_import_on(p, &young, 0, 4096), KVQ_E_BUFFER);
    peer_says(p, "was freed while its buffers were open");
    assert_int_equal(peer_import_on(other, &young, 0, 4096), KVQ_E_BUFFER);
    assert_int_equal(peer_close_buffer(p, buffer), 0);
    assert_int_equal(peer_import_on(p, &young, 0, 4096), 0);
    assert_int_equal(peer_import_on(other, &young, 0, 4096), 0); // of the same process, say
    // What the daemon has open is the new memory.
    soft_ask(&exporter, SOFT_FILL, again, 5, 2);
    soft_ask(&exporter, SOFT_SYNC, 0, 0, 0);
    struct kvq_gpu_piece look;
    char text[KVQ_GPU_TEXT];
    assert_int_equal(kvq_gpu_piece_open(&drv, &young.handle, &look, text, sizeof text), 0);
    assert_true(word_at(look.at) == (5 | 5ull << 32));
    kvq_gpu_piece_release(&drv, &look);
}

// The handle of memory that was freed opens nothing.
EXPORTER_TEST(test_handle_of_freed_memory)
{
    uint64_t at;
    struct told told = told_allocate(SOFT_BLOCK, &at);
    soft_ask(&exporter, SOFT_FREE, at, 0, 0);
    struct peer *p = peer_attached();
    assert_int_equal(peer_import_on(p, &told, 0, 4096), KVQ_E_BUFFER);
    peer_says(p, "opening a CUDA IPC handle: invalid value");
    assert_int_equal(soft_counts().imports, gpu_before.imports);
    told = told_allocate(SOFT_BLOCK, &at); // and then it works
    assert_int_equal(peer_import_on(p, &told, 0, 4096), 0);
}

// A client of another user; NULL where this one may not be anybody else.
static struct peer *peer_of_nobody(void)
{
    enum { NOBODY = 65534 };
    struct peer *p = NULL;
    if (geteuid() != 0 || chmod(attach_directory(), 0755) != 0)
        return NULL;
    // Of this thread alone, unlike seteuid().
    if (syscall(SYS_setresuid, -1, NOBODY, -1) == 0)
        p = peer_attached();
    assert_int_equal(syscall(SYS_setresuid, -1, 0, -1), 0);
    return p;
}

// Handles are no secrets: who has seen one of another user's does not get at the memory by it.
EXPORTER_TEST(test_handle_of_another_user)
{
    uint64_t at;
    struct told told = told_allocate(SOFT_BLOCK, &at);
    struct peer *p = peer_attached(), *nobody = peer_of_nobody();
    assert_int_equal(peer_import_on(p, &told, 0, 4096), 0);
    if (nobody) {
        assert_int_equal(peer_import_on(nobody, &told, 0, 4096), KVQ_E_PERMISSION);
        peer_says(nobody, "belongs to a client of another user (uid 0)");
        told.number++;
        assert_int_equal(peer_import_on(nobody, &told, 0, 4096), KVQ_E_PERMISSION);
        peer_free(nobody);
    }
}

GPU_TEST(test_refused_imports)
{
    struct told told = {.by_handle = true, .fd = -1, .number = 1};
    struct peer *p = peer_attached();
    kvq_gpu_ptr own;
    OK(drv.memory_alloc(&own, SOFT_BLOCK)); // the daemon is in this process
    OK(drv.ipc_memory_get(&told.handle, own));
    assert_int_equal(peer_import_on(p, &told, 0, 4096), KVQ_E_BUFFER);
    peer_says(p, "which CUDA cannot open; attach from another process");
    peer_says(p, "kvq_buffer_create_on");
    OK(drv.memory_free(own));
    memset(&told.handle, 0x77, sizeof told.handle);
    assert_int_not_equal(peer_import_on(p, &told, 0, 4096), 0);

    Kvq__ImportBuffer message = KVQ__IMPORT_BUFFER__INIT;
    Kvq__Request request = REQUEST(IMPORT_BUFFER, import_buffer, &message);
    Kvq__GpuMemory memory = KVQ__GPU_MEMORY__INIT;
    memory.gpu = bytes_of(&gpu_uuid, sizeof gpu_uuid);
    memory.handle = bytes_of(&told.handle, 63);
    message.bytes = 4096;
    message.gpu = &memory;
    assert_int_equal(peer_ask(p, &request, NULL, 0), KVQ_E_INVALID);
    peer_says(p, "handle of 63 bytes; it has 64");
    memory.handle = bytes_of(&told.handle, 64);
    memory.gpu = bytes_of(&gpu_uuid, 15);
    assert_int_equal(peer_ask(p, &request, NULL, 0), KVQ_E_INVALID);
    peer_says(p, "named by 15 bytes");
    struct kvq_gpu_uuid wrong = gpu_uuid;
    wrong.bytes[15] ^= 1;
    memory.gpu = bytes_of(&wrong, sizeof wrong);
    assert_int_equal(peer_ask(p, &request, NULL, 0), KVQ_E_UNSUPPORTED);
    peer_says(p, "none of this daemon's 1 (the first is GPU-");
    int fd = memfd_create("test", MFD_CLOEXEC);
    memory.gpu = bytes_of(&gpu_uuid, sizeof gpu_uuid);
    assert_int_equal(peer_ask(p, &request, &fd, 1), KVQ_E_PROTOCOL); // a handle and a descriptor
    peer_free(p);
    p = peer_attached();
    memory.handle.len = 0;
    assert_int_equal(peer_ask(p, &request, NULL, 0), KVQ_E_PROTOCOL); // neither
    peer_free(p);
    p = peer_attached();
    struct told memfd = {.fd = fd, .bytes = SOFT_BLOCK, .number = 3};
    assert_int_not_equal(peer_import_on(p, &memfd, 0, 4096), 0); // not a GPU's memory
    close(fd);
}

GPU_TEST(test_import_by_descriptor)
{
    char text[KVQ_GPU_TEXT];
    struct kvq_gpu_piece piece;
    assert_int_equal(kvq_gpu_piece_make(&drv, 0, 4 * SOFT_BLOCK, &piece, text, sizeof text), 0);
    struct told told = {.bytes = piece.bytes, .number = 12};
    assert_int_equal(kvq_gpu_piece_export(&drv, &piece, &told.fd, text, sizeof text), 0);
    const uint64_t mappings = soft_counts().mappings;
    struct peer *p = peer_attached();
    assert_int_equal(peer_import_on(p, &told, 0, piece.bytes), 0);
    uint32_t first = peer_made(p);
    assert_int_equal(peer_import_on(p, &told, 4096, 4096), 0);
    assert_true(soft_counts().mappings == mappings + 1);
    assert_int_equal(peer_import_on(p, &told, piece.bytes - 4095, 4096), KVQ_E_BUFFER);
    told.number = 0; // not known: mapped anew each time
    assert_int_equal(peer_import_on(p, &told, 0, 4096), 0);
    uint32_t third = peer_made(p);
    assert_true(soft_counts().mappings == mappings + 2);
    assert_int_equal(peer_close_buffer(p, third), 0);
    assert_int_equal(peer_close_buffer(p, first), 0);
    assert_true(soft_counts().mappings == mappings + 1);
    told.number = 13;
    told.bytes = 2 * piece.bytes; // more than there is
    assert_int_not_equal(peer_import_on(p, &told, 0, 4096), 0);
    told.bytes = piece.bytes - 1;
    assert_int_equal(peer_import_on(p, &told, 0, 4096), KVQ_E_BUFFER);
    peer_says(p, "must be a multiple of 2097152");
    peer_free(p);
    assert_true(soft_counts().mappings == mappings);
    close(told.fd);
    kvq_gpu_piece_release(&drv, &piece);
}

GPU_TEST(test_timeline)
{
    struct peer *p = peer_attached();
    uint32_t queue = peer_queue(p);
    peer_close_fds(p);
    assert_int_equal(peer_open_timeline(p, queue + 1, sizeof gpu_uuid), KVQ_E_INVALID);
    peer_says(p, "no queue");
    SETTLES(registered, 0);
    assert_int_equal(peer_open_timeline(p, queue, 3), KVQ_E_INVALID);
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), 0);
    assert_int_equal(p->n_fds, 1);
    assert_int_equal(soft_counts().registered, gpu_before.registered + 1);
    int seals = fcntl(p->fds[0], F_GET_SEALS);
    assert_true(seals & F_SEAL_SHRINK && seals & F_SEAL_GROW && seals & F_SEAL_SEAL);
    struct kvq_timeline_page *page =
        mmap(NULL, KVQ_TIMELINE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds[0], 0);
    assert_true(page != MAP_FAILED);
    assert_int_equal(page->magic, KVQ_SHM_MAGIC_TIMELINE);
    assert_int_equal(page->version, KVQ_PROTOCOL_MAX);
    assert_true(page->ready == 0 && page->done == 0);
    munmap(page, KVQ_TIMELINE_BYTES);
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), KVQ_E_EXISTS);
    SETTLES(registered, 1);
    assert_int_equal(peer_close_queue(p, queue), 0);
    SETTLES(registered, 0);
    assert_int_equal(peer_open_timeline(p, peer_queue(p), sizeof gpu_uuid), 0);
    peer_cancel(p, p->next_id); // goes with its queue
}

// Events of the daemon's: the handles differ, and nothing is left of what no queue took.
GPU_TEST(test_events)
{
    enum { ALL = 2 * KVQ_QUEUE_EVENTS };
    struct peer *p = peer_attached();
    uint32_t queue = peer_queue(p);
    peer_close_fds(p);
    assert_int_equal(peer_open_events(p, queue + 1, sizeof gpu_uuid), KVQ_E_INVALID);
    peer_says(p, "no queue");
    SETTLES(events, 0);
    assert_int_equal(peer_open_events(p, queue, 3), KVQ_E_INVALID);
    assert_int_equal(soft_fail("event_create", ALL, false, KVQ_GPU_OUT_OF_MEMORY), 0);
    assert_int_equal(peer_open_events(p, queue, sizeof gpu_uuid), KVQ_E_NO_MEMORY);
    SETTLES(events, 0);
    assert_int_equal(soft_fail("ipc_event_get", 2, false, KVQ_GPU_SYSTEM), 0);
    assert_int_equal(peer_open_events(p, queue, sizeof gpu_uuid), KVQ_E_UNSUPPORTED);
    peer_says(p, "making events");
    SETTLES(events, 0);
    // Words that no request has used do not stand in the way.
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), 0);
    peer_close_fds(p);
    assert_int_equal(peer_open_events(p, queue, sizeof gpu_uuid), 0);
    assert_int_equal(p->n_fds, 0);
    const Kvq__OpenEventsReply *reply = p->reply->open_events;
    assert_true(reply->n_ready == KVQ_QUEUE_EVENTS && reply->n_done == KVQ_QUEUE_EVENTS);
    for (size_t i = 0; i < reply->n_ready; i++) {
        assert_true(reply->ready[i].len == 64 && reply->done[i].len == 64);
        assert_memory_not_equal(reply->ready[i].data, reply->done[i].data, 64);
        if (i)
            assert_memory_not_equal(reply->ready[i].data, reply->ready[i - 1].data, 64);
    }
    SETTLES(events, ALL);
    assert_int_equal(peer_open_events(p, queue, sizeof gpu_uuid), KVQ_E_EXISTS);
    peer_says(p, "timeline already");
    SETTLES(events, ALL);
    assert_int_equal(peer_open_timeline(p, queue, sizeof gpu_uuid), KVQ_E_EXISTS);
    assert_int_equal(peer_close_queue(p, queue), 0);
    SETTLES(events, 0);
    assert_int_equal(peer_open_events(p, peer_queue(p), sizeof gpu_uuid), 0);
    peer_cancel(p, p->next_id); // goes with its queue
}

GPU_TEST(test_host_memory)
{
    struct peer *p = peer_attached();
    assert_int_equal(peer_create_buffer(p, 10000), 0);
    assert_true(p->reply->create_buffer->on_gpu);
    assert_int_equal(soft_counts().registered, gpu_before.registered + 1);
    uint32_t buffer = peer_made(p);
    static const char *const calls[] = {"host_register", "host_device"};
    for (int i = 0; i < 2; i++) { // no failure, but no GPU can use it
        assert_int_equal(soft_fail(calls[i], 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
        assert_int_equal(peer_create_buffer(p, 10000), 0);
        assert_false(p->reply->create_buffer->on_gpu);
        // What cannot be reached stays registered, since unregistering could wait for a client.
        assert_int_equal(soft_counts().registered, gpu_before.registered + 1 + i);
        assert_int_equal(peer_close_buffer(p, peer_made(p)), 0);
        SETTLES(registered, 1);
    }
    assert_int_equal(peer_close_buffer(p, buffer), 0);
    SETTLES(registered, 0);
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 8192), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    assert_int_equal(peer_import(p, &fd, 1, 4096, 4000), 0);
    assert_true(p->reply->create_buffer->on_gpu);
    close(fd);
    assert_int_equal(peer_open_queue(p), 0);
    assert_int_equal(soft_fail("host_register", 1, false, KVQ_GPU_NOT_SUPPORTED), 0);
    assert_int_equal(peer_open_timeline(p, p->reply->open_queue->queue, sizeof gpu_uuid),
                     KVQ_E_UNSUPPORTED);
    peer_says(p, "registering 4096 bytes");
    assert_int_equal(peer_open_timeline(p, 1, sizeof gpu_uuid), 0); // and then it works
}

// Whatever the driver refuses, the client hears of it and nothing is left.
EXPORTER_TEST(test_failing_driver)
{
    static const char *const making[] = {"memory_granularity", "memory_create", "address_reserve",
                                         "memory_map",         "memory_access", "fill8",
                                         "memory_export"};
    static const char *const opening[] = {"ipc_memory_open", "address_range"};
    uint64_t at;
    struct told told = told_allocate(SOFT_BLOCK, &at);
    struct peer *p = peer_attached();
    for (size_t i = 0; i < sizeof making / sizeof *making; i++) {
        assert_int_equal(soft_fail(making[i], 1, false, KVQ_GPU_OUT_OF_MEMORY), 0);
        assert_int_equal(peer_create_on(p, 6 << 20), KVQ_E_NO_MEMORY);
        assert_true(strlen(p->reply->text) > 20);
        SETTLES(bytes, 0);
        SETTLES(reservations, 0);
    }
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(soft_fail(opening[i], 1, false, KVQ_GPU_MAP_FAILED), 0);
        assert_int_equal(peer_import_on(p, &told, 0, 4096), KVQ_E_BUFFER);
        assert_true(soft_counts().imports == gpu_before.imports);
    }
    assert_int_equal(peer_create_on(p, 6 << 20), 0); // none of it was counted
    assert_int_equal(peer_import_on(p, &told, 0, 4096), 0);
}

// While the driver takes its time over one client's memory, the others are served; and if that
// client goes meanwhile, nothing is left of it. Memory that was registered is given back when the
// GPU has come to an end, and nobody waits for that.
GPU_TEST(test_slow_driver)
{
    for (int dies = 0; dies < 2; dies++) {
        struct peer *p = peer_attached(), *other = peer_attached();
        const uint64_t memories = soft_counts().memories;
        soft_stall(NULL, true); // the stream that memory is cleared on
        peer_send_create_on(p, 4096);
        while (soft_counts().memories == memories)
            sched_yield(); // it is being made, and then waits to be cleared
        assert_int_equal(peer_close_buffer(other, peer_buffer(other, 4096)), 0);
        if (dies)
            assert_int_equal(shutdown(p->fd, SHUT_WR), 0);
        assert_int_equal(peer_open_queue(other), 0);
        soft_stall(NULL, false);
        if (!dies)
            assert_int_equal(peer_answer(p), 0);
        peer_free(p);
        peer_free(other);
        assert_true(soft_counts().memories == memories);
    }
}

// ---- In-context mode ----

static int open_pool(struct peer *p, const char *place)
{
    Kvq__OpenPool open = KVQ__OPEN_POOL__INIT;
    open.place = (char *)(uintptr_t)place;
    open.tables_min = KVQ_TABLE_VERSION_MIN;
    open.tables_max = KVQ_TABLE_VERSION_MAX;
    return peer_ask(p, &REQUEST(OPEN_POOL, open_pool, &open), NULL, 0);
}

static int open_table(struct peer *p, uint64_t handle, bool on_gpu, uint32_t layers, bool copy)
{
    return peer_open_table(p, handle, layers, bytes_of(&gpu_uuid, on_gpu ? sizeof gpu_uuid : 0),
                           copy);
}

static int close_table(struct peer *p, uint64_t handle)
{
    Kvq__CloseTable close = {PROTOBUF_C_MESSAGE_INIT(&kvq__close_table__descriptor), handle};
    return peer_ask(p, &REQUEST(CLOSE_TABLE, close_table, &close), NULL, 0);
}

// What the client reads on the host of a table, and cannot write.
static void check_copy(int fd, uint64_t bytes)
{
    assert_ptr_equal(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    const struct kvq_table_page *page = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(page, MAP_FAILED);
    assert_int_equal(page->magic, KVQ_SHM_MAGIC_TABLE);
    assert_int_equal(page->pages, (PEER_TABLE_TOKENS + 127) / 128);
    munmap((void *)(uintptr_t)page, bytes);
}

// A page table lies in the GPU's memory, where its client maps it; what is refused leaves nothing.
GPU_TEST(test_tables)
{
    struct peer *first = peer_attached(); // with a session the daemon takes what it keeps for all
    assert_int_equal(peer_open_session(first, "first"), 0);
    peer_free(first);
    gpu_count();
    char text[KVQ_TEXT_BYTES], ours[KVQ_GPU_KERNELS_TEXT];
    struct kvq_gpu_piece piece;
    struct kvq_table_page head;
    struct peer *p = peer_attached();
    assert_int_equal(peer_open_session(p, "one"), 0);
    const uint64_t handle = p->reply->session->handle;
    char place[64];
    snprintf(place, sizeof place, "%s", p->reply->session->place);
    assert_memory_equal(place, "GPU-", 4);
    assert_int_equal(open_pool(p, "GPU-none"), KVQ_E_INVALID);
    assert_int_equal(open_pool(p, place), 0);
    kvq_gpu_kernels_text(ours);
    assert_string_equal(p->reply->open_pool->kernels, ours);
    assert_int_equal(p->reply->open_pool->kernels_bytes, 0); // its driver has them inside
    assert_int_equal(p->n_fds, 0);
    assert_true(p->reply->open_pool->span >= p->reply->open_pool->extent_bytes);
    assert_int_equal(open_table(p, handle, false, 1, false), KVQ_E_INVALID);
    peer_says(p, place);
    assert_int_equal(open_table(p, handle, true, 2, false), KVQ_E_SHAPE);
    assert_int_equal(open_table(p, handle + 1, true, 1, false), KVQ_E_STALE);
    assert_int_equal(open_table(p, handle, true, 1, false), 0);
    assert_int_equal(p->n_fds, 1);
    const uint64_t bytes = p->reply->open_table->allocation_bytes;
    assert_true(bytes >= p->reply->open_table->bytes && bytes % SOFT_BLOCK == 0);
    OK(kvq_gpu_piece_map(&drv, 0, p->fds[0], bytes, true, &piece, text, sizeof text));
    OK(drv.copy_out(&head, piece.at, sizeof head, NULL));
    OK(drv.stream_sync(NULL));
    assert_int_equal(head.magic, KVQ_SHM_MAGIC_TABLE);
    assert_int_equal(head.pages, (100000 + 127) / 128);
    assert_int_equal(head.tokens, 0);
    kvq_gpu_piece_release(&drv, &piece);
    const uint64_t created = soft_calls("memory_create");
    assert_int_equal(open_table(p, handle, true, 1, false), KVQ_E_EXISTS);
    assert_int_equal(open_table(p, handle, true, 1, true), KVQ_E_EXISTS);
    assert_int_equal(soft_calls("memory_create"), created); // what cannot be is not made
    assert_int_equal(close_table(p, handle), 0);
    assert_int_equal(close_table(p, handle), KVQ_E_STALE);
    assert_int_equal(open_table(p, handle, true, 1, true), 0);
    assert_int_equal(p->n_fds, 2);
    check_copy(p->fds[1], p->reply->open_table->bytes);
    assert_int_equal(close_table(p, handle), 0);
    assert_int_equal(open_table(p, handle, true, 1, true), 0); // goes with its client
}

int main(int argc, char **argv)
{
    soft_serve_if_peer(argc, argv);
    gpu_attach();
    return run_all(NULL, NULL);
}
