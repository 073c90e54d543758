// SPDX-License-Identifier: Apache-2.0
//
// See attach_gpu_kit.h.
#include "tests/edge/attach_gpu_kit.h"

#include <sched.h>

#include "tests/kits/unit.h"

struct kvq_gpu_uuid gpu_uuid;
struct kvq_soft_counts gpu_before;

void gpu_settles_at(size_t offset, uint64_t value)
{
    struct kvq_soft_counts now;
    do {
        sched_yield();
        now = soft_counts();
    } while (*(uint64_t *)((char *)&now + offset) != value);
}

void gpu_end(void)
{
    SETTLES(registered, 0);
    SETTLES(imports, 0);
    end_counting();
    const struct kvq_soft_counts now = soft_counts();
    assert_memory_equal(&now, &gpu_before, sizeof now);
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

void peer_put_create(Kvq__Request *request, Kvq__CreateBuffer *create, uint64_t bytes)
{
    kvq__request__init(request);
    kvq__create_buffer__init(create);
    create->bytes = bytes;
    create->gpu = bytes_of(&gpu_uuid, sizeof gpu_uuid);
    request->command_case = KVQ__REQUEST__COMMAND_CREATE_BUFFER;
    request->create_buffer = create;
}

int peer_create_on(struct peer *p, uint64_t bytes)
{
    Kvq__Request request;
    Kvq__CreateBuffer create;
    peer_put_create(&request, &create, bytes);
    return peer_ask(p, &request, NULL, 0);
}

int peer_import_on(struct peer *p, const struct told *told, uint64_t offset, uint64_t bytes)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
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
    request.command_case = KVQ__REQUEST__COMMAND_IMPORT_BUFFER;
    request.import_buffer = &message;
    return peer_ask(p, &request, &told->fd, told->by_handle ? 0 : 1);
}

int peer_open_timeline(struct peer *p, uint32_t queue, size_t uuid_bytes)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__OpenTimeline open = KVQ__OPEN_TIMELINE__INIT;
    open.queue = queue;
    open.gpu = bytes_of(&gpu_uuid, uuid_bytes);
    request.command_case = KVQ__REQUEST__COMMAND_OPEN_TIMELINE;
    request.open_timeline = &open;
    return peer_ask(p, &request, NULL, 0);
}

int peer_open_events(struct peer *p, uint32_t queue, size_t uuid_bytes)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__OpenEvents open = KVQ__OPEN_EVENTS__INIT;
    open.queue = queue;
    open.gpu = bytes_of(&gpu_uuid, uuid_bytes);
    request.command_case = KVQ__REQUEST__COMMAND_OPEN_EVENTS;
    request.open_events = &open;
    return peer_ask(p, &request, NULL, 0);
}

void gpu_begin(void)
{
    gpu_before = soft_counts();
    struct peer *p = peer_attached();
    assert_int_equal(peer_open_queue(p), 0);
    assert_int_equal(peer_open_timeline(p, p->reply->open_queue->queue, sizeof gpu_uuid), 0);
    peer_free(p);
    SETTLES(registered, 0);
    begin_counting();
    gpu_before = soft_counts();
}

uint32_t peer_made(const struct peer *p)
{
    return p->reply->create_buffer->buffer;
}

struct told told_allocate(const struct soft_peer *peer, uint64_t bytes, uint64_t *at)
{
    *at = soft_ask(peer, SOFT_ALLOC, bytes, 0, 0);
    const struct soft_question question = {.op = SOFT_MEMORY_GET, .a = *at};
    const struct soft_answer answer = soft_ask_fd(peer, &question, -1, NULL);
    struct told told = {.by_handle = true, .fd = -1, .bytes = bytes};
    assert_int_equal(answer.result, KVQ_GPU_OK);
    memcpy(&told.handle, answer.handle, sizeof told.handle);
    told.number = soft_ask(peer, SOFT_BUFFER, *at, 0, 0);
    return told;
}
