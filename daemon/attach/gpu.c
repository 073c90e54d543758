// SPDX-License-Identifier: Apache-2.0
//
// Memory of GPUs that crosses the process border: staging buffers made here, clients' own
// allocations opened here, and host memory made known to GPUs. The driver may take long over any
// of it, so it works on threads of libuv's. return.c gives it back.
//
// An allocation of a client's is opened once and counted. Its handle proves nothing: the handle of
// memory that was freed can be that of new memory at the same address, and while the old one is
// open here the driver gives the old memory for it. The client's number of the allocation tells
// them apart, and the old one must be closed first.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/attach/internal.h"

static const struct kvq_gpu_driver *gpu_driver_of(const struct kvq__gpu *gpu)
{
    return kvq__gpu_driver(gpu);
}

static int code_of(int result)
{
    assert(result != KVQ_GPU_OK);
    switch (result) {
    case KVQ_GPU_OUT_OF_MEMORY:
        return KVQ_E_NO_MEMORY;
    case KVQ_GPU_INVALID_VALUE:
    case KVQ_GPU_INVALID_HANDLE:
    case KVQ_GPU_INVALID_CONTEXT:
    case KVQ_GPU_MAP_FAILED:
        return KVQ_E_BUFFER;
    case KVQ_GPU_NOT_SUPPORTED:
        return KVQ_E_UNSUPPORTED;
    default:
        return KVQ_E_SYSTEM;
    }
}

int kvq__attach_gpu(const struct kvq__connection *c, const ProtobufCBinaryData *uuid,
                    struct kvq__gpu **gpu, char *text)
{
    const struct kvq__gpus *gpus = c->server->gpus;
    if (uuid->len != sizeof(struct kvq_gpu_uuid)) {
        snprintf(text, KVQ_TEXT_BYTES, "a GPU named by %zu bytes; a UUID has %zu", uuid->len,
                 sizeof(struct kvq_gpu_uuid));
        return KVQ_E_INVALID;
    }
    *gpu = kvq__gpus_find(gpus, uuid->data);
    if (*gpu)
        return 0;
    if (kvq__gpus_count(gpus) == 0)
        snprintf(text, KVQ_TEXT_BYTES,
                 "this daemon has no GPU; use buffers in the host's memory, or configure one");
    else
        snprintf(text, KVQ_TEXT_BYTES,
                 "the GPU that was named is none of this daemon's %u (the first is %s); kvqctl "
                 "doctor lists them",
                 kvq__gpus_count(gpus), kvq__gpu_uuid_text(kvq__gpus_get(gpus, 0)));
    return KVQ_E_UNSUPPORTED;
}

// ---- Staging buffers ----

static struct kvq__spare *find_spare(struct kvq__connection *c, const struct kvq__gpu *gpu,
                                     uint64_t bytes)
{
    struct kvq__spare *spare;
    LIST_FOREACH (spare, &c->spares, link)
        if (spare->gpu == gpu && spare->piece.bytes == bytes)
            return spare;
    return NULL;
}

struct kvq__region *kvq__region_new_on(struct kvq__connection *c, uint64_t bytes,
                                       const ProtobufCBinaryData *uuid, int *error, char *text)
{
    struct kvq__gpu *gpu;
    size_t unit = 1;
    *error = kvq__attach_gpu(c, uuid, &gpu, text);
    if (*error)
        return NULL;
    int result =
        kvq_gpu_piece_unit(gpu_driver_of(gpu), kvq__gpu_device(gpu), &unit, text, KVQ_TEXT_BYTES);
    if (result != KVQ_GPU_OK) {
        *error = code_of(result);
        return NULL;
    }
    uint64_t whole =
        bytes > KVQ_MAX_BUFFER_BYTES ? bytes : (bytes + unit - 1) & ~(uint64_t)(unit - 1);
    struct kvq__spare *spare = find_spare(c, gpu, whole);
    kvq__connection_count(c, 0, spare ? whole : 0);
    struct kvq__region *region = kvq__region_alloc(c, bytes, whole, error, text);
    kvq__connection_count(c, spare && !region ? whole : 0, 0);
    if (!region)
        return NULL;
    region->gpu = gpu;
    if (spare) {
        region->piece = spare->piece;
        region->shared = true; // its client may have it mapped still
        LIST_REMOVE(spare, link);
        free(spare);
    }
    return region;
}

static int make_region_piece(struct kvq__region *r, char *text)
{
    const struct kvq_gpu_driver *driver = gpu_driver_of(r->gpu);
    int result = KVQ_GPU_OK;
    assert(!r->import && r->at == 0);
    if (r->piece.kind == KVQ_GPU_PIECE_NONE)
        result = kvq_gpu_piece_make(driver, kvq__gpu_device(r->gpu), r->bytes, &r->piece, text,
                                    KVQ_TEXT_BYTES);
    if (result != KVQ_GPU_OK)
        return result;
    result = driver->fill8(r->piece.at, 0, r->piece.bytes, NULL);
    result = result ? result : driver->stream_sync(NULL);
    if (result != KVQ_GPU_OK) {
        kvq_gpu_fault(driver, result, "zeroing a buffer", text, KVQ_TEXT_BYTES);
        return result;
    }
    result = kvq_gpu_piece_export(driver, &r->piece, &r->fd, text, KVQ_TEXT_BYTES);
    r->shared |= result == KVQ_GPU_OK;
    r->at = r->piece.at;
    return result;
}

// ---- Clients' allocations ----

static bool same_handle(const struct kvq__import *import, const struct kvq__gpu *gpu,
                        const ProtobufCBinaryData *handle)
{
    assert(handle->len == sizeof import->handle.bytes);
    return import->by_handle && import->gpu == gpu &&
           memcmp(import->handle.bytes, handle->data, handle->len) == 0;
}

// Whether a handle may be opened, of which this import has the same bytes.
static int check_same(const struct kvq__import *import, uint32_t uid, uint64_t client,
                      const struct kvq__connection *c, const Kvq__GpuMemory *memory, char *text)
{
    if (uid != c->peer.uid) {
        snprintf(text, KVQ_TEXT_BYTES, "this memory belongs to a client of another user (uid %u)",
                 uid);
        return KVQ_E_PERMISSION;
    }
    if (import->number == memory->number)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "the allocation (number %llu) has the handle of an earlier one (number %llu) that was "
             "freed while its buffers were open (client %llu); close those first, then import "
             "again",
             (unsigned long long)memory->number, (unsigned long long)import->number,
             (unsigned long long)client);
    return KVQ_E_BUFFER;
}

// The same of those that are closed, but that the driver has yet to let go of.
static int check_closed(const struct kvq__letting_gos *list, const struct kvq__connection *c,
                        const struct kvq__gpu *gpu, const Kvq__GpuMemory *memory, char *text)
{
    const struct kvq__letting_go *l;
    int error = 0;
    STAILQ_FOREACH (l, list, link)
        if (!error && l->import && same_handle(l->import, gpu, &memory->handle))
            error = check_same(l->import, l->uid, l->client, c, memory, text);
    return error;
}

// Whether a handle may be opened, whoever has opened the same bytes before.
static int check_handle(const struct kvq__connection *c, const struct kvq__gpu *gpu,
                        const Kvq__GpuMemory *memory, char *text)
{
    const struct kvq__connection *other;
    const struct kvq__import *import;
    int error = kvq__attach_check_pins(c, text);
    TAILQ_FOREACH (other, &c->attach->connections, link)
        LIST_FOREACH (import, &other->imports, link)
            if (!error && same_handle(import, gpu, &memory->handle))
                error = check_same(import, other->peer.uid, other->id, c, memory, text);
    error = error ? error : check_closed(&c->attach->letting_go, c, gpu, memory, text);
    return error ? error : check_closed(&c->attach->let_go, c, gpu, memory, text);
}

// The allocation, if this client has it open.
static struct kvq__import *find_import(struct kvq__connection *c, const struct kvq__gpu *gpu,
                                       const Kvq__GpuMemory *memory)
{
    struct kvq__import *import;
    LIST_FOREACH (import, &c->imports, link) {
        if (import->closing || import->gpu != gpu || import->number != memory->number)
            continue;
        if (memory->handle.len
                ? same_handle(import, gpu, &memory->handle)
                : !import->by_handle && import->number && import->bytes == memory->allocation_bytes)
            return import;
    }
    return NULL;
}

static struct kvq__import *new_import(struct kvq__connection *c, struct kvq__gpu *gpu,
                                      const Kvq__GpuMemory *memory)
{
    struct kvq__import *import = calloc(1, sizeof *import);
    if (!import)
        return NULL;
    import->gpu = gpu;
    import->number = memory->number;
    import->bytes = memory->allocation_bytes;
    import->by_handle = memory->handle.len > 0;
    import->letting_go = import->by_handle ? calloc(1, sizeof *import->letting_go) : NULL;
    if (import->by_handle && !import->letting_go) {
        free(import);
        return NULL;
    }
    if (import->by_handle)
        memcpy(import->handle.bytes, memory->handle.data, sizeof import->handle.bytes);
    LIST_INSERT_HEAD(&c->imports, import, link);
    return import;
}

static int check_import(const struct kvq__connection *c, const Kvq__ImportBuffer *m,
                        struct kvq__gpu **gpu, char *text)
{
    const size_t handle = m->gpu->handle.len, whole = sizeof(struct kvq_gpu_ipc_memory);
    int error = kvq__attach_gpu(c, &m->gpu->gpu, gpu, text);
    if (error)
        return error;
    if (handle && handle != whole) {
        snprintf(text, KVQ_TEXT_BYTES, "a CUDA IPC handle of %zu bytes; it has %zu", handle, whole);
        return KVQ_E_INVALID;
    }
    if (m->bytes == 0 || m->bytes > KVQ_MAX_BUFFER_BYTES) {
        snprintf(text, KVQ_TEXT_BYTES, "a buffer of %llu bytes; it can have 1 to %llu",
                 (unsigned long long)m->bytes, KVQ_MAX_BUFFER_BYTES);
        return KVQ_E_INVALID;
    }
    return handle ? check_handle(c, *gpu, m->gpu, text) : 0;
}

struct kvq__region *kvq__region_import_on(struct kvq__connection *c, int fd,
                                          const Kvq__ImportBuffer *m, int *error, char *text)
{
    struct kvq__gpu *gpu;
    *error = check_import(c, m, &gpu, text);
    if (*error)
        return NULL;
    // Its bytes are the client's own and count against nothing here; the number of buffers does.
    struct kvq__region *region = kvq__region_alloc(c, m->bytes, 0, error, text);
    if (!region)
        return NULL;
    struct kvq__import *import = find_import(c, gpu, m->gpu);
    import = import ? import : new_import(c, gpu, m->gpu);
    if (!import) {
        *error = KVQ_E_NO_MEMORY;
        free(region);
        return NULL;
    }
    assert(!import->closing);
    import->users++;
    region->import = import;
    region->gpu = gpu;
    region->offset = m->offset;
    region->fd = fd;
    return region;
}

// The pid namespace of a process, "pid:[4026531836]".
static bool namespace_of(uint32_t pid, char *name, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/ns/pid", pid);
    ssize_t n = readlink(path, name, size - 1);
    name[n < 0 ? 0 : n] = 0;
    return n > 0;
}

// Why a handle that a client made cannot be opened, as far as that can be known, and what to do.
static void explain_handle(const struct kvq__connection *c, char *text)
{
    char ours[64], theirs[64];
    size_t n = strlen(text);
    const char *why;
    if (c->peer.pid == (uint32_t)getpid())
        why = "the handle is of this process itself, which CUDA cannot open; attach from another "
              "process";
    else if (c->peer.pid == 0 ||
             (namespace_of((uint32_t)getpid(), ours, sizeof ours) &&
              namespace_of(c->peer.pid, theirs, sizeof theirs) && strcmp(ours, theirs) != 0))
        why = "client and daemon are in different pid namespaces, where this often fails; share "
              "one (docker --pid, Kubernetes hostPID)";
    else
        why = "has the memory been freed meanwhile? Do both use the same GPU, MIG instance and "
              "driver?";
    if (n < KVQ_TEXT_BYTES)
        snprintf(text + n, KVQ_TEXT_BYTES - n, "; %s; buffers of kvq_buffer_create_on always work",
                 why);
}

static int open_import(struct kvq__region *r, char *text)
{
    struct kvq__import *import = r->import;
    const struct kvq_gpu_driver *driver = gpu_driver_of(r->gpu);
    assert(import->users > 0 && !import->closing);
    if (import->piece.kind != KVQ_GPU_PIECE_NONE)
        return KVQ_GPU_OK;
    if (!import->by_handle)
        return kvq_gpu_piece_map(driver, kvq__gpu_device(r->gpu), r->fd, import->bytes, false,
                                 &import->piece, text, KVQ_TEXT_BYTES);
    int result =
        kvq_gpu_piece_open(driver, &import->handle, &import->piece, text, KVQ_TEXT_BYTES / 2);
    if (result != KVQ_GPU_OK)
        explain_handle(r->connection, text);
    return result;
}

static int place_import(struct kvq__region *r, char *text)
{
    int result = open_import(r, text);
    kvq__region_close_fd(r);
    if (result != KVQ_GPU_OK)
        return result;
    const struct kvq_gpu_piece *piece = &r->import->piece;
    if (r->offset > piece->bytes || r->bytes > piece->bytes - r->offset) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%llu bytes from offset %llu reach beyond the allocation, which has %zu bytes by "
                 "the driver",
                 (unsigned long long)r->bytes, (unsigned long long)r->offset, piece->bytes);
        return KVQ_GPU_INVALID_VALUE;
    }
    r->at = piece->at + r->offset;
    return KVQ_GPU_OK;
}

// ---- Host memory ----

static size_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

// The address that all GPUs have for registered memory; 0, with a text: there is none.
static kvq_gpu_ptr common_address(const struct kvq__gpus *gpus, void *memory, char *text)
{
    kvq_gpu_ptr at = 0, other;
    for (uint32_t i = 0; i < kvq__gpus_count(gpus); i++) {
        const struct kvq__gpu *gpu = kvq__gpus_get(gpus, i);
        int result = kvq__gpu_enter(gpu);
        result = result ? result : gpu_driver_of(gpu)->host_device(&other, memory, 0);
        if (result != KVQ_GPU_OK) {
            kvq_gpu_fault(gpu_driver_of(gpu), result, "asking for the GPU's address of host memory",
                          text, KVQ_TEXT_BYTES);
            return 0;
        }
        if (i > 0 && other != at) {
            snprintf(text, KVQ_TEXT_BYTES, "the GPUs have different addresses for host memory");
            return 0;
        }
        at = other;
    }
    return at;
}

// Registers it with all GPUs, which must agree about its address. Without one, or if this fails,
// they cannot reach it, and text says why.
static void reach(const struct kvq__gpus *gpus, struct kvq__pinned *p, char *text)
{
    const struct kvq_gpu_driver *driver = gpu_driver_of(kvq__gpus_get(gpus, 0));
    size_t bytes = whole_pages(p->shm.bytes);
    int result = kvq__gpu_enter(kvq__gpus_get(gpus, 0));
    result = result ? result
                    : driver->host_register(p->shm.map, bytes,
                                            KVQ_GPU_HOST_PORTABLE | KVQ_GPU_HOST_MAPPED);
    if (result != KVQ_GPU_OK) {
        char doing[80];
        snprintf(doing, sizeof doing, "registering %zu bytes of host memory with the GPU", bytes);
        kvq_gpu_fault(driver, result, doing, text, KVQ_TEXT_BYTES);
        free(p->letting_go);
        p->letting_go = NULL;
        return;
    }
    p->at = common_address(gpus, p->shm.map, text); // 0: unregistering it at once could wait
}

// What it takes to let go of it again is taken here: see let_go.c.
static void pin(const struct kvq__gpus *gpus, struct kvq__pinned *p, char *text)
{
    assert(p->shm.map && !p->letting_go);
    p->at = 0;
    p->letting_go = calloc(1, sizeof *p->letting_go);
    if (p->letting_go)
        reach(gpus, p, text);
    else
        snprintf(text, KVQ_TEXT_BYTES, "no memory");
}

void kvq__open_timeline_make(struct kvq__connection *c)
{
    struct kvq__pinned *p = &c->timeline;
    assert(!p->shm.map);
    c->error = kvq__shm_create(&p->shm, "kvq-timeline", KVQ_TIMELINE_BYTES, false, c->text);
    if (c->error)
        return;
    struct kvq_timeline_page *page = p->shm.map;
    page->magic = KVQ_SHM_MAGIC_TIMELINE;
    page->version = KVQ_PROTOCOL_MAX;
    pin(c->server->gpus, p, c->text);
    if (p->at)
        return;
    c->error = KVQ_E_UNSUPPORTED;
    if (!p->letting_go) // else it is given back with its command
        kvq__shm_close(&p->shm);
}

// ---- Making ----

void kvq__region_make(struct kvq__region *r)
{
    struct kvq__connection *c = r->connection;
    char text[KVQ_TEXT_BYTES];
    assert(r->at == 0);
    c->error = 0;
    if (!r->gpu) { // not being able to is no failure: the memory is then of no use to GPUs
        pin(c->server->gpus, &r->host, text);
        r->at = r->host.at;
        return;
    }
    int result = kvq__gpu_enter(r->gpu);
    if (result != KVQ_GPU_OK)
        kvq_gpu_fault(gpu_driver_of(r->gpu), result, "using the GPU", c->text, sizeof c->text);
    else
        result = r->import ? place_import(r, c->text) : make_region_piece(r, c->text);
    c->error = result == KVQ_GPU_OK ? 0 : code_of(result);
}
