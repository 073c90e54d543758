// SPDX-License-Identifier: Apache-2.0
//
// Physical memory and its mappings, IPC handles and registered host memory; see share.h.
#include "kernels/cuda/share.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// Words for a result of the driver, and the result.
static int fault(const struct kvq_gpu_driver *driver, int result, const char *what, char *text,
                 size_t n)
{
    kvq_gpu_fault(driver, result, what, text, n);
    return result;
}

static struct kvq_gpu_allocation describe(int device)
{
    return (struct kvq_gpu_allocation){.type = KVQ_GPU_ALLOCATION_PINNED,
                                       .handle_types = KVQ_GPU_HANDLE_FD,
                                       .location = {KVQ_GPU_LOCATION_DEVICE, device}};
}

int kvq_gpu_piece_unit(const struct kvq_gpu_driver *driver, int device, size_t *unit, char *text,
                       size_t n)
{
    const struct kvq_gpu_allocation what = describe(device);
    int result = driver->memory_granularity(unit, &what, KVQ_GPU_GRANULARITY_RECOMMENDED);
    if (result != KVQ_GPU_OK)
        return fault(driver, result, "asking for the unit of GPU memory", text, n);
    if (*unit > 0 && (*unit & (*unit - 1)) == 0)
        return KVQ_GPU_OK;
    snprintf(text, n, "the driver gives GPU memory in units of %zu bytes, no power of two", *unit);
    return KVQ_GPU_INVALID_VALUE;
}

// ---- Mapping physical memory ----

// Maps all of it over reserved addresses.
static int map_at(const struct kvq_gpu_driver *driver, int device, kvq_gpu_memory memory,
                  kvq_gpu_ptr at, size_t bytes, bool read_only, char *text, size_t n)
{
    const struct kvq_gpu_access access = {{KVQ_GPU_LOCATION_DEVICE, device},
                                          read_only ? KVQ_GPU_ACCESS_READ
                                                    : KVQ_GPU_ACCESS_READ_WRITE};
    int result = driver->memory_map(at, bytes, 0, memory, 0);
    if (result != KVQ_GPU_OK)
        return fault(driver, result, "mapping GPU memory", text, n);
    result = driver->memory_access(at, bytes, &access, 1);
    if (result == KVQ_GPU_INVALID_VALUE && read_only) // the one thing here that a driver may lack
        result = KVQ_GPU_NOT_SUPPORTED;
    if (result == KVQ_GPU_OK)
        return result;
    fault(driver, result, "allowing access to GPU memory", text, n);
    driver->memory_unmap(at, bytes);
    return result;
}

// Maps all of it at addresses of its own. On success the piece has address and size.
static int map(const struct kvq_gpu_driver *driver, int device, kvq_gpu_memory memory, size_t bytes,
               bool read_only, struct kvq_gpu_piece *piece, char *text, size_t n)
{
    kvq_gpu_ptr at = 0;
    int result = driver->address_reserve(&at, bytes, 0, 0, 0);
    if (result != KVQ_GPU_OK)
        return fault(driver, result, "reserving addresses for GPU memory", text, n);
    result = map_at(driver, device, memory, at, bytes, read_only, text, n);
    if (result != KVQ_GPU_OK) {
        driver->address_free(at, bytes);
        return result;
    }
    piece->at = at;
    piece->bytes = bytes;
    return KVQ_GPU_OK;
}

int kvq_gpu_memory_import(const struct kvq_gpu_driver *driver, int fd, kvq_gpu_memory *memory,
                          char *text, size_t n)
{
    int result = driver->memory_import(memory, (void *)(uintptr_t)fd, KVQ_GPU_HANDLE_FD);
    return result == KVQ_GPU_OK
               ? result
               : fault(driver, result, "opening GPU memory that came as a file descriptor", text,
                       n);
}

int kvq_gpu_memory_map_at(const struct kvq_gpu_driver *driver, int device, kvq_gpu_memory memory,
                          kvq_gpu_ptr at, size_t bytes, char *text, size_t n)
{
    assert(at && bytes > 0);
    int result = map_at(driver, device, memory, at, bytes, true, text, n);
    driver->memory_release(memory); // the mapping holds it
    return result;
}

int kvq_gpu_piece_make(const struct kvq_gpu_driver *driver, int device, size_t bytes,
                       struct kvq_gpu_piece *piece, char *text, size_t n)
{
    const struct kvq_gpu_allocation what = describe(device);
    size_t unit;
    *piece = (struct kvq_gpu_piece){0};
    int result = kvq_gpu_piece_unit(driver, device, &unit, text, n);
    if (result != KVQ_GPU_OK)
        return result;
    if (bytes == 0 || bytes > SIZE_MAX - unit) {
        snprintf(text, n, "%zu bytes of GPU memory cannot be made", bytes);
        return KVQ_GPU_INVALID_VALUE;
    }
    size_t whole = (bytes + unit - 1) & ~(unit - 1);
    kvq_gpu_memory memory;
    result = driver->memory_create(&memory, whole, &what, 0);
    if (result != KVQ_GPU_OK) {
        char doing[80];
        snprintf(doing, sizeof doing, "making %zu bytes of memory on GPU %d", whole, device);
        return fault(driver, result, doing, text, n);
    }
    result = map(driver, device, memory, whole, false, piece, text, n);
    if (result != KVQ_GPU_OK) {
        driver->memory_release(memory);
        return result;
    }
    piece->kind = KVQ_GPU_PIECE_MADE;
    piece->memory = memory;
    return KVQ_GPU_OK;
}

static int export_memory(const struct kvq_gpu_driver *driver, kvq_gpu_memory memory, int *fd,
                         char *text, size_t n)
{
    int made = -1;
    int result = driver->memory_export(&made, memory, KVQ_GPU_HANDLE_FD, 0);
    if (result != KVQ_GPU_OK)
        return fault(driver, result, "exporting GPU memory as a file descriptor", text, n);
    fcntl(made, F_SETFD, FD_CLOEXEC);
    *fd = made;
    return KVQ_GPU_OK;
}

int kvq_gpu_piece_export(const struct kvq_gpu_driver *driver, const struct kvq_gpu_piece *piece,
                         int *fd, char *text, size_t n)
{
    assert(piece->kind == KVQ_GPU_PIECE_MADE);
    *fd = -1;
    return export_memory(driver, piece->memory, fd, text, n);
}

int kvq_gpu_piece_map(const struct kvq_gpu_driver *driver, int device, int fd, size_t bytes,
                      bool read_only, struct kvq_gpu_piece *piece, char *text, size_t n)
{
    size_t unit;
    kvq_gpu_memory memory;
    *piece = (struct kvq_gpu_piece){0};
    int result = kvq_gpu_piece_unit(driver, device, &unit, text, n);
    if (result != KVQ_GPU_OK)
        return result;
    if (bytes == 0 || bytes % unit != 0) {
        snprintf(
            text, n,
            "an allocation of %zu bytes of GPU memory: it must be a multiple of %zu, and whole",
            bytes, unit);
        return KVQ_GPU_INVALID_VALUE;
    }
    result = kvq_gpu_memory_import(driver, fd, &memory, text, n);
    if (result != KVQ_GPU_OK)
        return result;
    result = map(driver, device, memory, bytes, read_only, piece, text, n);
    driver->memory_release(memory); // the mapping holds it
    if (result == KVQ_GPU_OK)
        piece->kind = KVQ_GPU_PIECE_MAPPED;
    return result;
}

// ---- Legacy handles ----

int kvq_gpu_piece_open(const struct kvq_gpu_driver *driver, const struct kvq_gpu_ipc_memory *handle,
                       struct kvq_gpu_piece *piece, char *text, size_t n)
{
    kvq_gpu_ptr at = 0, base = 0;
    size_t bytes = 0;
    *piece = (struct kvq_gpu_piece){0};
    int result = driver->ipc_memory_open(&at, *handle, KVQ_GPU_IPC_LAZY_PEER);
    if (result != KVQ_GPU_OK)
        return fault(driver, result, "opening a CUDA IPC handle", text, n);
    result = driver->address_range(&base, &bytes, at);
    if (result != KVQ_GPU_OK || at < base || at - base >= bytes) {
        if (result == KVQ_GPU_OK)
            snprintf(text, n, "the driver places a CUDA IPC handle outside of its allocation");
        else
            fault(driver, result, "asking how long the memory behind a CUDA IPC handle is", text,
                  n);
        *piece = (struct kvq_gpu_piece){KVQ_GPU_PIECE_OPENED, at, 0, 0};
        return result != KVQ_GPU_OK ? result : KVQ_GPU_INVALID_VALUE;
    }
    *piece = (struct kvq_gpu_piece){KVQ_GPU_PIECE_OPENED, at, bytes - (size_t)(at - base), 0};
    return KVQ_GPU_OK;
}

// Nothing can be done about failures here: after a fault of a kernel every call fails, and the
// driver takes all back when the process ends.
void kvq_gpu_piece_release(const struct kvq_gpu_driver *driver, struct kvq_gpu_piece *piece)
{
    if (piece->kind == KVQ_GPU_PIECE_OPENED) {
        driver->ipc_memory_close(piece->at);
    } else if (piece->kind != KVQ_GPU_PIECE_NONE) {
        driver->memory_unmap(piece->at, piece->bytes);
        driver->address_free(piece->at, piece->bytes);
        if (piece->kind == KVQ_GPU_PIECE_MADE)
            driver->memory_release(piece->memory);
    }
    *piece = (struct kvq_gpu_piece){0};
}

// ---- Exporting what somebody else allocated ----

// What the driver knows of an address.
struct about {
    unsigned type;
    int device, legacy;
    unsigned long long number, handle_types;
};

static int ask(const struct kvq_gpu_driver *driver, kvq_gpu_ptr at, struct about *about, char *text,
               size_t n)
{
    *about = (struct about){0};
    int result = driver->pointer_get(&about->type, KVQ_GPU_POINTER_TYPE, at);
    if (result == KVQ_GPU_INVALID_VALUE) {
        snprintf(text, n, "%#llx is no address that CUDA knows; give a pointer to device memory",
                 (unsigned long long)at);
        return result;
    }
    if (result == KVQ_GPU_OK && about->type != KVQ_GPU_TYPE_DEVICE) {
        snprintf(text, n,
                 "%#llx is host memory; import host memory by its memfd, or create a buffer in "
                 "host memory",
                 (unsigned long long)at);
        return KVQ_GPU_INVALID_VALUE;
    }
    if (result == KVQ_GPU_OK)
        result = driver->pointer_get(&about->device, KVQ_GPU_POINTER_DEVICE, at);
    if (result == KVQ_GPU_OK)
        result = driver->pointer_get(&about->number, KVQ_GPU_POINTER_BUFFER, at);
    if (result != KVQ_GPU_OK)
        return fault(driver, result, "asking about a device address", text, n);
    // Memory of kinds that these attributes are not for has neither.
    if (driver->pointer_get(&about->legacy, KVQ_GPU_POINTER_LEGACY_IPC, at) != KVQ_GPU_OK)
        about->legacy = 0;
    if (driver->pointer_get(&about->handle_types, KVQ_GPU_POINTER_HANDLE_TYPES, at) != KVQ_GPU_OK)
        about->handle_types = 0;
    return KVQ_GPU_OK;
}

static int not_exportable(kvq_gpu_ptr at, char *text, size_t n)
{
    snprintf(text, n,
             "the memory at %#llx cannot be opened by another process: its allocator (PyTorch with "
             "expandable_segments, cudaMallocAsync, an engine's sleep mode, or managed memory) did "
             "not ask for that; allocate it with cudaMalloc (PYTORCH_CUDA_ALLOC_CONF="
             "expandable_segments:False), or copy into a buffer of kvq_buffer_create_on",
             (unsigned long long)at);
    return KVQ_GPU_NOT_SUPPORTED;
}

static int export_fd(const struct kvq_gpu_driver *driver, struct kvq_gpu_export *out, char *text,
                     size_t n)
{
    kvq_gpu_memory memory;
    int result = driver->memory_retain(&memory, (void *)(uintptr_t)out->base);
    if (result != KVQ_GPU_OK)
        return fault(driver, result, "looking for the physical memory of a device address", text,
                     n);
    result = export_memory(driver, memory, &out->fd, text, n);
    driver->memory_release(memory);
    return result;
}

int kvq_gpu_memory_export(const struct kvq_gpu_driver *driver, kvq_gpu_ptr at, size_t bytes,
                          struct kvq_gpu_export *out, char *text, size_t n)
{
    struct about about;
    *out = (struct kvq_gpu_export){.fd = -1};
    int result = ask(driver, at, &about, text, n);
    if (result != KVQ_GPU_OK)
        return result;
    result = driver->address_range(&out->base, &out->bytes, at);
    if (result != KVQ_GPU_OK)
        return fault(driver, result, "asking for the allocation around a device address", text, n);
    if (at < out->base || at - out->base > out->bytes || bytes > out->bytes - (at - out->base)) {
        snprintf(text, n,
                 "%zu bytes from %#llx reach beyond their allocation of %zu bytes at %#llx; where "
                 "an allocator strings small ones together (PyTorch with expandable_segments), "
                 "turn that off, or use a buffer of kvq_buffer_create_on",
                 bytes, (unsigned long long)at, out->bytes, (unsigned long long)out->base);
        return KVQ_GPU_INVALID_VALUE;
    }
    out->number = about.number;
    out->device = about.device;
    if (!about.legacy)
        return about.handle_types & KVQ_GPU_HANDLE_FD ? export_fd(driver, out, text, n)
                                                      : not_exportable(at, text, n);
    result = driver->ipc_memory_get(&out->handle, out->base);
    return result == KVQ_GPU_OK ? result
                                : fault(driver, result, "making a CUDA IPC handle", text, n);
}

// ---- Host memory ----

int kvq_gpu_host_register(const struct kvq_gpu_driver *driver, void *at, size_t bytes,
                          kvq_gpu_ptr *device, char *text, size_t n)
{
    *device = 0;
    int result = driver->host_register(at, bytes, KVQ_GPU_HOST_PORTABLE | KVQ_GPU_HOST_MAPPED);
    if (result != KVQ_GPU_OK) {
        char doing[80];
        snprintf(doing, sizeof doing, "registering %zu bytes of host memory with the GPU", bytes);
        return fault(driver, result, doing, text, n);
    }
    result = driver->host_device(device, at, 0);
    if (result == KVQ_GPU_OK)
        return result;
    fault(driver, result, "asking for the GPU's address of host memory", text, n);
    driver->host_unregister(at);
    return result;
}

void kvq_gpu_host_unregister(const struct kvq_gpu_driver *driver, void *at)
{
    driver->host_unregister(at);
}
