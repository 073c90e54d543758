// SPDX-License-Identifier: Apache-2.0
//
// Buffers in the memory of GPUs: arenas that the daemon makes, and the engine's own allocations.
#include "client/internal.h"

#include <string.h>
#include <unistd.h>

static ProtobufCBinaryData bytes_of(const void *data, size_t n)
{
    return (ProtobufCBinaryData){n, (uint8_t *)(uintptr_t)data};
}

// ---- Arenas ----

static int map_arena(kvq_buffer *b, int fd, uint64_t allocation_bytes)
{
    char text[KVQ__TEXT_BYTES / 2];
    if (allocation_bytes < b->bytes || allocation_bytes > SIZE_MAX)
        return kvq__fail(KVQ_E_PROTOCOL, "the daemon made %llu bytes of GPU memory, not %zu",
                         (unsigned long long)allocation_bytes, b->bytes);
    int result = kvq_gpu_piece_map(b->here.driver, b->here.device, fd, (size_t)allocation_bytes,
                                   false, &b->piece, text, sizeof text);
    if (result != KVQ_GPU_OK)
        return kvq__fail(kvq__gpu_code(result), "creating a buffer on a GPU: %s", text);
    b->at = b->piece.at;
    return KVQ_OK;
}

static int create_arena(kvq_buffer *b)
{
    kvq_client *client = b->client;
    Kvq__CreateBuffer message = KVQ__CREATE_BUFFER__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = 1,
                             .want = KVQ__REPLY__RESULT_CREATE_BUFFER,
                             .what = "creating a buffer on a GPU"};
    uint64_t allocation_bytes = 0;
    message.bytes = b->bytes;
    message.gpu = bytes_of(b->here.uuid, sizeof b->here.uuid);
    call.request.command_case = KVQ__REQUEST__COMMAND_CREATE_BUFFER;
    call.request.create_buffer = &message;
    pthread_mutex_lock(&client->control);
    int rc = kvq__exchange(client, &call);
    if (rc == KVQ_OK) {
        b->memfd = call.fds[0];
        allocation_bytes = call.reply->create_buffer->allocation_bytes;
        rc = kvq__buffer_take_id(b, call.reply->create_buffer);
    }
    pthread_mutex_unlock(&client->control);
    return rc ? rc : map_arena(b, b->memfd, allocation_bytes);
}

int kvq_buffer_create_on(kvq_client *client, const char *gpu, size_t bytes, kvq_buffer **buffer)
{
    struct kvq__here here;
    char place[KVQ__PLACE_BYTES];
    int rc = kvq__buffer_check(client, 0, bytes, buffer);
    if (rc == KVQ_OK)
        rc = kvq__gpu_here(client, "creating a buffer on a GPU", &here);
    if (rc)
        return rc;
    kvq__gpu_place(client, here.uuid, place);
    if (gpu && !kvq_gpu_place_is(gpu, place))
        return kvq__fail(KVQ_E_INVALID,
                         "creating a buffer on %.60s: the current context is of %s; make one of "
                         "that GPU current first",
                         gpu, place);
    kvq_buffer *made = kvq__buffer_make(client, 0, bytes);
    if (!made)
        return KVQ_E_SYSTEM;
    made->kind = KVQ__BUFFER_ARENA;
    made->here = here;
    rc = create_arena(made);
    if (rc)
        kvq_buffer_close(&made);
    *buffer = made;
    return rc;
}

// ---- The engine's own ----

// What is told of an allocation: all of it, and where in it the buffer starts.
static int send_import(kvq_buffer *b, const struct kvq_gpu_export *e, uint64_t offset)
{
    kvq_client *client = b->client;
    Kvq__GpuMemory memory = KVQ__GPU_MEMORY__INIT;
    Kvq__ImportBuffer message = KVQ__IMPORT_BUFFER__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = e->fd,
                             .want = KVQ__REPLY__RESULT_CREATE_BUFFER,
                             .what = "importing a buffer of a GPU"};
    memory.gpu = bytes_of(b->here.uuid, sizeof b->here.uuid);
    memory.allocation_bytes = e->bytes;
    memory.number = e->number;
    if (e->fd < 0)
        memory.handle = bytes_of(e->handle.bytes, sizeof e->handle.bytes);
    message.bytes = b->bytes;
    message.offset = offset;
    message.gpu = &memory;
    call.request.command_case = KVQ__REQUEST__COMMAND_IMPORT_BUFFER;
    call.request.import_buffer = &message;
    pthread_mutex_lock(&client->control);
    int rc = kvq__exchange(client, &call);
    if (rc == KVQ_OK)
        rc = kvq__buffer_take_id(b, call.reply->create_buffer);
    pthread_mutex_unlock(&client->control);
    return rc;
}

// In the buffer's context.
static int register_tensor(kvq_buffer *b)
{
    char text[KVQ__TEXT_BYTES / 2];
    struct kvq_gpu_export e;
    int result = kvq_gpu_memory_export(b->here.driver, b->at, b->bytes, &e, text, sizeof text);
    if (result != KVQ_GPU_OK)
        return kvq__fail(kvq__gpu_code(result), "importing a buffer of a GPU: %s", text);
    int rc = KVQ_OK;
    if (e.device != b->here.device)
        rc = kvq__fail(KVQ_E_BUFFER,
                       "importing a buffer of a GPU: the memory is of device %d, the current "
                       "context of device %d; make a context of the memory's current",
                       e.device, b->here.device);
    else if (b->number && b->number != e.number)
        rc = kvq__fail(KVQ_E_BUFFER,
                       "the memory of a buffer of %zu bytes was freed and its address is another "
                       "allocation's now; close the buffer",
                       b->bytes);
    else
        rc = send_import(b, &e, b->at - e.base);
    if (rc == KVQ_OK)
        b->number = e.number;
    if (e.fd >= 0)
        close(e.fd);
    return rc;
}

int kvq_buffer_import(kvq_client *client, void *device_pointer, size_t bytes, kvq_buffer **buffer)
{
    struct kvq__here here;
    int rc = kvq__buffer_check(client, 0, bytes, buffer);
    if (rc == KVQ_OK && !device_pointer)
        rc = kvq__fail(KVQ_E_INVALID, "importing a buffer of a GPU: the device pointer is NULL");
    if (rc == KVQ_OK)
        rc = kvq__gpu_here(client, "importing a buffer of a GPU", &here);
    if (rc)
        return rc;
    kvq_buffer *made = kvq__buffer_make(client, 0, bytes);
    if (!made)
        return KVQ_E_SYSTEM;
    made->kind = KVQ__BUFFER_TENSOR;
    made->here = here;
    made->at = (uintptr_t)device_pointer;
    rc = register_tensor(made);
    if (rc)
        kvq_buffer_close(&made);
    *buffer = made;
    return rc;
}

// ---- The host's, for kernels of this process ----

static size_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

// The engine has pinned it: as long as all of it is, that serves.
static int find_pinned(const kvq_buffer *b, const struct kvq__here *here, kvq_gpu_ptr *at)
{
    kvq_gpu_ptr last = 0;
    int result = here->driver->host_device(at, b->host, 0);
    if (result == KVQ_GPU_OK)
        result = here->driver->host_device(&last, b->host + b->bytes - 1, 0);
    return result == KVQ_GPU_OK && last - *at != b->bytes - 1 ? KVQ_GPU_INVALID_VALUE : result;
}

static int pin(kvq_buffer *b, const struct kvq__here *here)
{
    char text[KVQ__TEXT_BYTES / 2];
    kvq_gpu_ptr at = 0;
    int result =
        kvq_gpu_host_register(here->driver, b->host, whole_pages(b->bytes), &at, text, sizeof text);
    b->pinned = result == KVQ_GPU_OK;
    if (result == KVQ_GPU_ALREADY_REGISTERED)
        result = find_pinned(b, here, &at);
    if (result != KVQ_GPU_OK)
        return kvq__fail(kvq__gpu_code(result),
                         "a buffer of %zu bytes in the host's memory cannot be pinned for the GPU "
                         "(%s); make buffers by kvq_buffer_create_on or kvq_buffer_import",
                         b->bytes, text);
    b->here = *here;
    kvq_long_store(&b->reach, at);
    return KVQ_OK;
}

bool kvq__gpu_buffer_reached(const kvq_buffer *b)
{
    return kvq_long_load(&b->reach) != 0;
}

int kvq__gpu_buffer_reach(const kvq_buffer *buffer, const struct kvq__here *here)
{
    kvq_buffer *b = (kvq_buffer *)(uintptr_t)buffer; // ours
    if (kvq__gpu_buffer_reached(b))
        return KVQ_OK;
    pthread_mutex_lock(&b->client->control);
    int rc = kvq__gpu_buffer_reached(b) ? KVQ_OK : pin(b, here);
    pthread_mutex_unlock(&b->client->control);
    return rc;
}

// Pinned memory has one address for all GPUs.
kvq_gpu_ptr kvq__gpu_buffer_at(const kvq_buffer *b, const struct kvq__here *here)
{
    if (b->kind == KVQ__BUFFER_HOST)
        return kvq_long_load(&b->reach);
    return b->here.context == here->context ? b->at : 0;
}

// Kernels may still be on their way to it.
static void unpin(kvq_buffer *b)
{
    struct kvq_gpu_context *before = kvq__gpu_enter(&b->here);
    b->here.driver->context_sync();
    kvq_gpu_host_unregister(b->here.driver, b->host);
    kvq__gpu_leave(&b->here, before);
}

// ---- Both ----

int kvq__gpu_buffer_register(kvq_buffer *b)
{
    const struct kvq_gpu_export arena = {
        .base = b->at, .bytes = b->piece.bytes, .device = b->here.device, .fd = b->memfd};
    if (b->kind == KVQ__BUFFER_ARENA)
        return send_import(b, &arena, 0);
    struct kvq_gpu_context *before = kvq__gpu_enter(&b->here);
    int rc = register_tensor(b);
    kvq__gpu_leave(&b->here, before);
    return rc;
}

void kvq__gpu_buffer_release(kvq_buffer *b)
{
    if (b->pinned)
        unpin(b);
    if (b->piece.kind == KVQ_GPU_PIECE_NONE)
        return;
    struct kvq_gpu_context *before = kvq__gpu_enter(&b->here);
    kvq_gpu_piece_release(b->here.driver, &b->piece);
    kvq__gpu_leave(&b->here, before);
}

int kvq__gpu_buffer_read(const kvq_buffer *b, uint64_t offset, void *to, size_t n)
{
    char text[KVQ__TEXT_BYTES / 2];
    const struct kvq_gpu_driver *driver = b->here.driver;
    struct kvq_gpu_context *before = kvq__gpu_enter(&b->here);
    int result = driver->copy_out(to, b->at + offset, n, NULL);
    if (result == KVQ_GPU_OK)
        result = driver->stream_sync(NULL);
    kvq__gpu_leave(&b->here, before);
    if (result == KVQ_GPU_OK)
        return KVQ_OK;
    kvq_gpu_fault(driver, result, "reading a buffer of a GPU", text, sizeof text);
    return kvq__fail(kvq__gpu_code(result), "%s", text);
}
