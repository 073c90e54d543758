// SPDX-License-Identifier: Apache-2.0
//
// Buffers: memory that tensors travel in, on the host or on a GPU, made by the daemon or brought by
// the engine.
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int check_new_buffer(kvq_client *client, uint64_t offset, size_t bytes, kvq_buffer **buffer)
{
    long page = sysconf(_SC_PAGESIZE);
    if (!client || !buffer)
        return kvq__set_error(KVQ_E_INVALID, "a buffer needs a client and a place for its pointer");
    *buffer = NULL;
    if (bytes == 0)
        return kvq__set_error(KVQ_E_INVALID, "a buffer of 0 bytes: at least 1 is needed");
    if (bytes > KVQ_MAX_BUFFER_BYTES)
        return kvq__set_error(KVQ_E_LIMIT, "a buffer of %zu bytes: at most %llu are allowed", bytes,
                              KVQ_MAX_BUFFER_BYTES);
    if (offset % (uint64_t)page)
        return kvq__set_error(KVQ_E_BUFFER, "offset %llu is not a multiple of the page size %ld",
                              (unsigned long long)offset, page);
    return KVQ_OK;
}

// A buffer with nothing in it yet, in the client's list. NULL with the error text.
static kvq_buffer *make_buffer(kvq_client *client, uint64_t offset, size_t bytes)
{
    assert(bytes > 0 && bytes <= KVQ_MAX_BUFFER_BYTES);
    kvq_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer) {
        kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
        return NULL;
    }
    buffer->client = client;
    buffer->memfd = -1;
    buffer->offset = offset;
    buffer->bytes = bytes;
    buffer->refs = 1;
    pthread_mutex_lock(&client->table);
    TAILQ_INSERT_TAIL(&client->buffers, buffer, entry);
    pthread_mutex_unlock(&client->table);
    return buffer;
}

void kvq__buffer_keep(const kvq_buffer *buffer)
{
    kvq_buffer *b = (kvq_buffer *)(uintptr_t)buffer; // ours
    if (!b)
        return;
    assert(!b->closed);
    pthread_mutex_lock(&b->client->table);
    b->refs++;
    pthread_mutex_unlock(&b->client->table);
}

void kvq__buffer_let_go(const kvq_buffer *buffer)
{
    kvq_buffer *b = (kvq_buffer *)(uintptr_t)buffer; // ours
    if (!b)
        return;
    pthread_mutex_lock(&b->client->table);
    assert(b->refs > 0);
    bool last = --b->refs == 0;
    pthread_mutex_unlock(&b->client->table);
    if (last)
        free(b);
}

void kvq__buffer_free(kvq_buffer *buffer)
{
    kvq_client *client = buffer->client;
    assert(buffer->kind == KVQ__BUFFER_HOST || !buffer->host);
    pthread_mutex_lock(&client->table);
    TAILQ_REMOVE(&client->buffers, buffer, entry);
    buffer->closed = true;
    pthread_mutex_unlock(&client->table);
    kvq__gpu_buffer_release(buffer);
    if (buffer->host)
        munmap(buffer->host, buffer->bytes);
    if (buffer->memfd >= 0)
        close(buffer->memfd);
    kvq__buffer_let_go(buffer);
}

// The daemon's number for it, from its reply; and the memory, where that comes from the daemon.
static int take_buffer(void *to, struct kvq__call *call)
{
    kvq_buffer *buffer = to;
    const Kvq__CreateBufferReply *reply = call->reply->create_buffer;
    assert(buffer->id == 0 && call->n_fds <= 1);
    if (reply->buffer == 0 || reply->bytes < buffer->bytes)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon gave buffer %u of %llu bytes for %zu bytes",
                              reply->buffer, (unsigned long long)reply->bytes, buffer->bytes);
    pthread_mutex_lock(&buffer->client->table); // errors of other threads look buffers up
    buffer->id = reply->buffer;
    pthread_mutex_unlock(&buffer->client->table);
    buffer->allocation_bytes = reply->allocation_bytes;
    if (call->n_fds) {
        assert(buffer->memfd < 0);
        buffer->memfd = call->fds[0];
        call->fds[0] = -1;
    }
    return KVQ_OK;
}

// ---- Buffers that are there: telling the daemon ----

static ProtobufCBinaryData bytes_of(const void *data, size_t n)
{
    return (ProtobufCBinaryData){n, (uint8_t *)(uintptr_t)data};
}

// Hands buffer->memfd to the daemon and learns its id.
static int register_host(kvq_buffer *buffer)
{
    assert(buffer->kind == KVQ__BUFFER_HOST && buffer->memfd >= 0);
    Kvq__ImportBuffer message = KVQ__IMPORT_BUFFER__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = buffer->memfd,
                             .want = KVQ__REPLY__RESULT_CREATE_BUFFER,
                             .what = "importing a buffer",
                             .take = take_buffer,
                             .to = buffer};
    message.bytes = buffer->bytes;
    message.offset = buffer->offset;
    call.request.command_case = KVQ__REQUEST__COMMAND_IMPORT_BUFFER;
    call.request.import_buffer = &message;
    return kvq__ask(buffer->client, &call);
}

// What is told of an allocation: all of it, and where in it the buffer starts.
static int send_import(kvq_buffer *b, const struct kvq_gpu_export *e, uint64_t offset)
{
    Kvq__GpuMemory memory = KVQ__GPU_MEMORY__INIT;
    Kvq__ImportBuffer message = KVQ__IMPORT_BUFFER__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = e->fd,
                             .want = KVQ__REPLY__RESULT_CREATE_BUFFER,
                             .what = "importing a buffer of a GPU",
                             .take = take_buffer,
                             .to = b};
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
    return kvq__ask(b->client, &call);
}

// In the buffer's context.
static int register_gpu(kvq_buffer *b)
{
    struct kvq_gpu_export e;
    assert(b->kind != KVQ__BUFFER_HOST && b->at);
    int rc = kvq__gpu_buffer_export(b, &e);
    if (rc)
        return rc;
    rc = send_import(b, &e, b->at - e.base);
    if (rc == KVQ_OK)
        b->number = e.number;
    if (e.fd >= 0 && e.fd != b->memfd)
        close(e.fd);
    return rc;
}

int kvq__buffer_register(kvq_buffer *buffer)
{
    if (buffer->kind == KVQ__BUFFER_HOST)
        return register_host(buffer);
    struct kvq_gpu_context *before = kvq__context_enter(&buffer->here);
    int rc = register_gpu(buffer);
    kvq__context_leave(&buffer->here, before);
    return rc;
}

// ---- The host's ----

static int create_on_host(kvq_buffer *buffer)
{
    assert(buffer->memfd < 0 && !buffer->host);
    Kvq__CreateBuffer message = KVQ__CREATE_BUFFER__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = 1,
                             .want = KVQ__REPLY__RESULT_CREATE_BUFFER,
                             .what = "creating a buffer",
                             .take = take_buffer,
                             .to = buffer};
    message.bytes = buffer->bytes;
    call.request.command_case = KVQ__REQUEST__COMMAND_CREATE_BUFFER;
    call.request.create_buffer = &message;
    int rc = kvq__ask(buffer->client, &call);
    if (rc)
        return rc;
    rc = kvq__map(buffer->memfd, buffer->bytes, PROT_READ | PROT_WRITE, "a buffer", &buffer->data);
    buffer->host = buffer->data;
    return rc;
}

int kvq_buffer_create(kvq_client *client, size_t bytes, kvq_buffer **buffer)
{
    int rc = check_new_buffer(client, 0, bytes, buffer);
    if (rc)
        return rc;
    kvq_buffer *made = make_buffer(client, 0, bytes);
    if (!made)
        return KVQ_E_SYSTEM;
    rc = create_on_host(made);
    if (rc)
        kvq_buffer_close(&made);
    *buffer = made;
    return rc;
}

// The daemon reads and writes this memory: it must be writable and never get shorter under it.
static int check_memfd(int memfd, uint64_t offset, size_t bytes)
{
    struct stat st;
    int flags = fcntl(memfd, F_GETFL), seals = fcntl(memfd, F_GET_SEALS);
    if (flags < 0 || fstat(memfd, &st) < 0)
        return kvq__set_error(KVQ_E_BUFFER, "descriptor %d is not open", memfd);
    if (seals < 0)
        return kvq__set_error(KVQ_E_BUFFER,
                              "descriptor %d is not a memfd; make one with memfd_create(..., "
                              "MFD_ALLOW_SEALING)",
                              memfd);
    if ((flags & O_ACCMODE) != O_RDWR || (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)))
        return kvq__set_error(KVQ_E_BUFFER, "memfd %d is not writable for the daemon (seals %#x)",
                              memfd, (unsigned)seals);
    if (offset > (uint64_t)st.st_size || bytes > (uint64_t)st.st_size - offset)
        return kvq__set_error(KVQ_E_BUFFER,
                              "memfd %d has %lld bytes: %zu from offset %llu reach behind its end",
                              memfd, (long long)st.st_size, bytes, (unsigned long long)offset);
    if (!(seals & F_SEAL_SHRINK) && fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
        return kvq__set_error(
            KVQ_E_BUFFER,
            "memfd %d cannot be sealed against shrinking (seals %#x); make it with "
            "MFD_ALLOW_SEALING",
            memfd, (unsigned)seals);
    return KVQ_OK;
}

// The library's own mapping, for attention in this process.
static int map_imported(kvq_buffer *buffer)
{
    assert(buffer->memfd >= 0 && !buffer->host);
    void *mapping = mmap(NULL, buffer->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->memfd,
                         (off_t)buffer->offset);
    if (mapping == MAP_FAILED)
        return kvq__set_error_errno("cannot map %zu bytes of a memfd", buffer->bytes);
    buffer->host = mapping;
    return KVQ_OK;
}

int kvq_buffer_import_memfd(kvq_client *client, int memfd, uint64_t offset, size_t bytes,
                            kvq_buffer **buffer)
{
    int rc = check_new_buffer(client, offset, bytes, buffer);
    if (rc == KVQ_OK)
        rc = check_memfd(memfd, offset, bytes);
    if (rc)
        return rc;
    kvq_buffer *made = make_buffer(client, offset, bytes);
    if (!made)
        return KVQ_E_SYSTEM;
    made->memfd = fcntl(memfd, F_DUPFD_CLOEXEC, 0);
    if (made->memfd < 0)
        rc = kvq__set_error_errno("cannot duplicate descriptor %d", memfd);
    else
        rc = map_imported(made);
    if (rc == KVQ_OK)
        rc = kvq__buffer_register(made);
    if (rc)
        kvq_buffer_close(&made);
    *buffer = made;
    return rc;
}

// ---- On a GPU ----

static int create_arena(kvq_buffer *b)
{
    assert(b->kind == KVQ__BUFFER_ARENA && b->memfd < 0);
    Kvq__CreateBuffer message = KVQ__CREATE_BUFFER__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = 1,
                             .want = KVQ__REPLY__RESULT_CREATE_BUFFER,
                             .what = "creating a buffer on a GPU",
                             .take = take_buffer,
                             .to = b};
    message.bytes = b->bytes;
    message.gpu = bytes_of(b->here.uuid, sizeof b->here.uuid);
    call.request.command_case = KVQ__REQUEST__COMMAND_CREATE_BUFFER;
    call.request.create_buffer = &message;
    int rc = kvq__ask(b->client, &call);
    return rc ? rc : kvq__gpu_buffer_map(b);
}

int kvq_buffer_create_on(kvq_client *client, const char *gpu, size_t bytes, kvq_buffer **buffer)
{
    struct kvq__gpu_context here;
    char place[KVQ__PLACE_BYTES];
    int rc = check_new_buffer(client, 0, bytes, buffer);
    if (rc == KVQ_OK)
        rc = kvq__gpu_here(client, "creating a buffer on a GPU", &here);
    if (rc)
        return rc;
    kvq__gpu_place(client, here.uuid, place);
    if (gpu && !kvq_gpu_place_is(gpu, place))
        return kvq__set_error(
            KVQ_E_INVALID,
            "creating a buffer on %.60s: the current context is of %s; make one of "
            "that GPU current first",
            gpu, place);
    kvq_buffer *made = make_buffer(client, 0, bytes);
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

int kvq_buffer_import(kvq_client *client, void *device_pointer, size_t bytes, kvq_buffer **buffer)
{
    struct kvq__gpu_context here;
    int rc = check_new_buffer(client, 0, bytes, buffer);
    if (rc == KVQ_OK && !device_pointer)
        rc = kvq__set_error(KVQ_E_INVALID,
                            "importing a buffer of a GPU: the device pointer is NULL");
    if (rc == KVQ_OK)
        rc = kvq__gpu_here(client, "importing a buffer of a GPU", &here);
    if (rc)
        return rc;
    kvq_buffer *made = make_buffer(client, 0, bytes);
    if (!made)
        return KVQ_E_SYSTEM;
    made->kind = KVQ__BUFFER_TENSOR;
    made->here = here;
    made->at = (uintptr_t)device_pointer;
    rc = register_gpu(made);
    if (rc)
        kvq_buffer_close(&made);
    *buffer = made;
    return rc;
}

// ---- Any ----

void *kvq_buffer_device(const kvq_buffer *buffer)
{
    return buffer ? (void *)(uintptr_t)buffer->at : NULL;
}

void *kvq_buffer_data(const kvq_buffer *buffer)
{
    return buffer ? buffer->data : NULL;
}

size_t kvq_buffer_size(const kvq_buffer *buffer)
{
    return buffer ? buffer->bytes : 0;
}

static int ask_to_close(kvq_buffer *b, uint32_t patience_ms)
{
    Kvq__CloseBuffer message = KVQ__CLOSE_BUFFER__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "closing a buffer"};
    message.buffer = b->id;
    call.patience_ms = patience_ms;
    call.request.command_case = KVQ__REQUEST__COMMAND_CLOSE_BUFFER;
    call.request.close_buffer = &message;
    return kvq__ask(b->client, &call);
}

// The daemon answers when nothing in flight uses the buffer any more. Until then it may read and
// write the memory. A question that comes after that is refused, which is an answer as well.
void kvq_buffer_close(kvq_buffer **buffer)
{
    kvq_buffer *b = buffer ? *buffer : NULL;
    if (!b)
        return;
    enum { LEAST_MS = 1000, MOST_MS = 600000 }; // a daemon that is busy reads none of the questions
    uint32_t patience = b->client->timeout_ms > LEAST_MS ? b->client->timeout_ms : LEAST_MS;
    int rc = b->id ? ask_to_close(b, patience) : KVQ_OK;
    while (rc == KVQ_E_DEADLINE) {
        patience = patience < MOST_MS / 2 ? 2 * patience : MOST_MS;
        rc = ask_to_close(b, patience);
    }
    kvq__buffer_free(b);
    *buffer = NULL;
}
