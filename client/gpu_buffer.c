// SPDX-License-Identifier: Apache-2.0
//
// The GPU's side of buffers: mapping what the daemon made, sharing what the engine has, and the
// host's memory where kernels of this process read and write it. Nothing here asks the daemon.
#include "client/internal.h"

#include <assert.h>
#include <string.h>
#include <unistd.h>

// ---- In a GPU's memory ----

int kvq__gpu_buffer_map(kvq_buffer *b)
{
    char text[KVQ__TEXT_BYTES / 2];
    assert(b->kind == KVQ__BUFFER_ARENA && b->piece.kind == KVQ_GPU_PIECE_NONE);
    if (b->allocation_bytes < b->bytes || b->allocation_bytes > SIZE_MAX)
        return kvq__set_error(KVQ_E_PROTOCOL, "the daemon made %llu bytes of GPU memory, not %zu",
                              (unsigned long long)b->allocation_bytes, b->bytes);
    int result =
        kvq_gpu_piece_map(b->here.driver, b->here.device, b->memfd, (size_t)b->allocation_bytes,
                          false, &b->piece, text, sizeof text);
    if (result != KVQ_GPU_OK)
        return kvq__set_error(kvq__gpu_code(result), "creating a buffer on a GPU: %s", text);
    b->at = b->piece.at;
    return KVQ_OK;
}

int kvq__gpu_buffer_export(const kvq_buffer *b, struct kvq_gpu_export *e)
{
    char text[KVQ__TEXT_BYTES / 2];
    int rc = KVQ_OK;
    assert(b->kind != KVQ__BUFFER_HOST);
    if (b->kind == KVQ__BUFFER_ARENA) {
        *e = (struct kvq_gpu_export){
            .base = b->at, .bytes = b->piece.bytes, .device = b->here.device, .fd = b->memfd};
        return KVQ_OK;
    }
    int result = kvq_gpu_memory_export(b->here.driver, b->at, b->bytes, e, text, sizeof text);
    if (result != KVQ_GPU_OK)
        return kvq__set_error(kvq__gpu_code(result), "importing a buffer of a GPU: %s", text);
    if (e->device != b->here.device)
        rc = kvq__set_error(KVQ_E_BUFFER,
                            "importing a buffer of a GPU: the memory is of device %d, the current "
                            "context of device %d; make a context of the memory's current",
                            e->device, b->here.device);
    else if (b->number && b->number != e->number)
        rc = kvq__set_error(
            KVQ_E_BUFFER,
            "the memory of a buffer of %zu bytes was freed and its address is another "
            "allocation's now; close the buffer",
            b->bytes);
    if (rc && e->fd >= 0)
        close(e->fd);
    return rc;
}

// ---- The host's, for kernels of this process ----

static size_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

// The engine has pinned it: as long as all of it is, that serves.
static int find_pinned(const kvq_buffer *b, const struct kvq__gpu_context *here, kvq_gpu_ptr *at)
{
    kvq_gpu_ptr last = 0;
    int result = here->driver->host_device(at, b->host, 0);
    if (result == KVQ_GPU_OK)
        result = here->driver->host_device(&last, b->host + b->bytes - 1, 0);
    return result == KVQ_GPU_OK && last - *at != b->bytes - 1 ? KVQ_GPU_INVALID_VALUE : result;
}

static int pin_buffer(kvq_buffer *b, const struct kvq__gpu_context *here)
{
    char text[KVQ__TEXT_BYTES / 2];
    kvq_gpu_ptr at = 0;
    assert(b->kind == KVQ__BUFFER_HOST && b->host && !b->pinned);
    int result =
        kvq_gpu_host_register(here->driver, b->host, whole_pages(b->bytes), &at, text, sizeof text);
    b->pinned = result == KVQ_GPU_OK;
    if (result == KVQ_GPU_ALREADY_REGISTERED)
        result = find_pinned(b, here, &at);
    if (result != KVQ_GPU_OK)
        return kvq__set_error(
            kvq__gpu_code(result),
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

int kvq__gpu_buffer_reach(const kvq_buffer *buffer, const struct kvq__gpu_context *here)
{
    kvq_buffer *b = (kvq_buffer *)(uintptr_t)buffer; // ours
    if (kvq__gpu_buffer_reached(b))
        return KVQ_OK;
    pthread_mutex_lock(&b->client->own);
    int rc = kvq__gpu_buffer_reached(b) ? KVQ_OK : pin_buffer(b, here);
    pthread_mutex_unlock(&b->client->own);
    return rc;
}

// Pinned memory has one address for all GPUs.
kvq_gpu_ptr kvq__gpu_buffer_at(const kvq_buffer *b, const struct kvq__gpu_context *here)
{
    if (b->kind == KVQ__BUFFER_HOST)
        return kvq_long_load(&b->reach);
    return b->here.context == here->context ? b->at : 0;
}

// ---- Both ----

// Work of this process may still be on its way to it: unmapping memory does not wait for that.
void kvq__gpu_buffer_release(kvq_buffer *b)
{
    assert(!b->pinned || b->kind == KVQ__BUFFER_HOST);
    if (!b->pinned && b->piece.kind == KVQ_GPU_PIECE_NONE)
        return;
    struct kvq_gpu_context *before = kvq__context_enter(&b->here);
    b->here.driver->context_sync();
    if (b->pinned)
        kvq_gpu_host_unregister(b->here.driver, b->host);
    kvq_gpu_piece_release(b->here.driver, &b->piece);
    kvq__context_leave(&b->here, before);
}

int kvq__gpu_buffer_read(const kvq_buffer *b, uint64_t offset, void *to, size_t n)
{
    char text[KVQ__TEXT_BYTES / 2];
    assert(b->kind != KVQ__BUFFER_HOST && offset <= b->bytes && n <= b->bytes - offset);
    const struct kvq_gpu_driver *driver = b->here.driver;
    struct kvq_gpu_context *before = kvq__context_enter(&b->here);
    int result = driver->context_sync();
    if (result == KVQ_GPU_OK)
        result = driver->copy_out(to, b->at + offset, n, NULL);
    if (result == KVQ_GPU_OK)
        result = driver->stream_sync(NULL);
    kvq__context_leave(&b->here, before);
    if (result == KVQ_GPU_OK)
        return KVQ_OK;
    kvq_gpu_fault(driver, result, "reading a buffer of a GPU", text, sizeof text);
    return kvq__set_error(kvq__gpu_code(result), "%s", text);
}
