// SPDX-License-Identifier: Apache-2.0
//
// See attach_gpu_kit.h.
#include "tests/edge/attach_gpu_kit.h"

#include <sched.h>

#include "tests/kits/unit.h"

struct kvq_gpu_uuid gpu_uuid;
struct kvq_soft_counts gpu_before;
struct soft_peer exporter;

void gpu_attach(void)
{
    soft_open();
    if (drv.device_uuid(&gpu_uuid, 0))
        abort();
    attach_gpus(KVQ_EMU_LIBRARY);
}

void gpu_settles_at(size_t offset, uint64_t value)
{
    struct kvq_soft_counts now;
    do {
        sched_yield();
        now = soft_counts();
    } while (*(uint64_t *)((char *)&now + offset) != value);
}

int gpu_stop(void **state)
{
    peer_free_all();
    SETTLES(registered, 0);
    SETTLES(imports, 0);
    peer_free_all(); // the loop has had a turn
    const struct kvq_soft_counts now = soft_counts();
    int rc = attach_stop_counting(state);
    assert_memory_equal(&now, &gpu_before, sizeof now);
    return rc;
}

void peer_says(const struct peer *p, const char *words)
{
    assert_says(p->reply->text, words);
}

// ---- Requests ----

ProtobufCBinaryData bytes_of(const void *data, size_t n)
{
    return (ProtobufCBinaryData){n, (uint8_t *)(uintptr_t)data};
}

void peer_send_create_on(struct peer *p, uint64_t bytes)
{
    Kvq__CreateBuffer create = KVQ__CREATE_BUFFER__INIT;
    create.bytes = bytes;
    create.gpu = bytes_of(&gpu_uuid, sizeof gpu_uuid);
    peer_send_request(p, &REQUEST(CREATE_BUFFER, create_buffer, &create), NULL, 0);
}

int peer_create_on(struct peer *p, uint64_t bytes)
{
    peer_send_create_on(p, bytes);
    return peer_answer(p);
}

int peer_import_on(struct peer *p, const struct told *told, uint64_t offset, uint64_t bytes)
{
    Kvq__ImportBuffer message = KVQ__IMPORT_BUFFER__INIT;
    Kvq__GpuMemory memory = KVQ__GPU_MEMORY__INIT;
    memory.gpu = bytes_of(&gpu_uuid, sizeof gpu_uuid);
    if (told->by_handle)
        memory.handle = bytes_of(&told->handle, sizeof told->handle);
    memory.allocation_bytes = told->bytes;
    memory.number = told->number;
    message.bytes = bytes;
    message.offset = offset;
    message.gpu = &memory;
    return peer_ask(p, &REQUEST(IMPORT_BUFFER, import_buffer, &message), &told->fd,
                    told->by_handle ? 0 : 1);
}

int peer_open_timeline(struct peer *p, uint32_t queue, size_t uuid_bytes)
{
    Kvq__OpenTimeline open = KVQ__OPEN_TIMELINE__INIT;
    open.queue = queue;
    open.gpu = bytes_of(&gpu_uuid, uuid_bytes);
    return peer_ask(p, &REQUEST(OPEN_TIMELINE, open_timeline, &open), NULL, 0);
}

int peer_open_events(struct peer *p, uint32_t queue, size_t uuid_bytes)
{
    Kvq__OpenEvents open = KVQ__OPEN_EVENTS__INIT;
    open.queue = queue;
    open.gpu = bytes_of(&gpu_uuid, uuid_bytes);
    return peer_ask(p, &REQUEST(OPEN_EVENTS, open_events, &open), NULL, 0);
}

void gpu_count(void)
{
    gpu_before = soft_counts();
    struct peer *p = peer_attached();
    assert_int_equal(peer_open_timeline(p, peer_queue(p), sizeof gpu_uuid), 0);
    peer_free(p);
    SETTLES(registered, 0);
    begin_counting();
    gpu_before = soft_counts();
}

int gpu_start(void **state)
{
    int rc = attach_start(state);
    gpu_count();
    return rc;
}

int gpu_start_exporter(void **state)
{
    int rc = gpu_start(state);
    exporter = soft_start(NULL);
    return rc;
}

int gpu_stop_exporter(void **state)
{
    peer_free_all();
    int status = soft_end(&exporter), rc = gpu_stop(state);
    assert_int_equal(status, 0);
    return rc;
}

uint32_t peer_made(const struct peer *p)
{
    return p->reply->create_buffer->buffer;
}

struct told told_allocate(uint64_t bytes, uint64_t *at)
{
    *at = soft_ask(&exporter, SOFT_ALLOC, bytes, 0, 0);
    const struct soft_question question = {.op = SOFT_MEMORY_GET, .a = *at};
    const struct soft_answer answer = soft_ask_fd(&exporter, &question, -1, NULL);
    struct told told = {.by_handle = true, .fd = -1, .bytes = bytes};
    assert_int_equal(answer.result, KVQ_GPU_OK);
    memcpy(&told.handle, answer.handle, sizeof told.handle);
    told.number = soft_ask(&exporter, SOFT_BUFFER, *at, 0, 0);
    return told;
}
