// SPDX-License-Identifier: Apache-2.0
//
// Physical memory mapped at reserved addresses, and its descriptors for other processes.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/emu/global.h"
#include "kernels/emu/soft/machine.h"

namespace soft
{
static int check(const kvq_gpu_allocation *what)
{
    if (lacks(NO_MAPPING))
        return KVQ_GPU_NOT_SUPPORTED;
    if (!what || what->type != KVQ_GPU_ALLOCATION_PINNED ||
        what->location.type != KVQ_GPU_LOCATION_DEVICE ||
        (what->handle_types & ~KVQ_GPU_HANDLE_FD) || what->platform)
        return KVQ_GPU_INVALID_VALUE;
    if (what->location.id < 0 || what->location.id >= m.set.devices)
        return KVQ_GPU_INVALID_DEVICE;
    return what->handle_types && lacks(NO_FD) ? KVQ_GPU_NOT_SUPPORTED : KVQ_GPU_OK;
}

int memory_granularity(size_t *bytes, const kvq_gpu_allocation *what, int)
{
    *bytes = BLOCK;
    return check(what);
}

int memory_create(kvq_gpu_memory *memory, size_t bytes, const kvq_gpu_allocation *what,
                  unsigned long long flags)
{
    int result = check(what);
    if (!result && (flags || bytes == 0 || bytes % BLOCK != 0))
        result = KVQ_GPU_INVALID_VALUE;
    if (result)
        return result;
    physical_ptr p = new_physical("memory", bytes, what->location.id, &result);
    if (result)
        return result;
    p->fd_allowed = what->handle_types & KVQ_GPU_HANDLE_FD;
    guard g(m.lock);
    *memory = ++m.last_memory;
    m.memories[*memory] = {p, 1};
    return KVQ_GPU_OK;
}

int memory_release(kvq_gpu_memory memory)
{
    guard g(m.lock);
    const auto found = m.memories.find(memory);
    if (found == m.memories.end())
        return KVQ_GPU_INVALID_VALUE;
    if (--found->second.count == 0)
        m.memories.erase(found);
    return KVQ_GPU_OK;
}

// The handle of what is mapped there: the one that is still held, or a new one.
int memory_retain(kvq_gpu_memory *memory, void *at)
{
    guard g(m.lock);
    const auto found = find_region((uintptr_t)at);
    if (found == m.regions.end() || found->second.kind != MAPPING)
        return KVQ_GPU_INVALID_VALUE;
    for (auto &one : m.memories) {
        if (one.second.memory != found->second.memory)
            continue;
        one.second.count++;
        *memory = one.first;
        return KVQ_GPU_OK;
    }
    *memory = ++m.last_memory;
    m.memories[*memory] = {found->second.memory, 1};
    return KVQ_GPU_OK;
}

int memory_export(void *handle, kvq_gpu_memory memory, int type, unsigned long long flags)
{
    guard g(m.lock);
    const auto found = m.memories.find(memory);
    if (found == m.memories.end() || flags || type != KVQ_GPU_HANDLE_FD ||
        !found->second.memory->fd_allowed)
        return KVQ_GPU_INVALID_VALUE;
    const int fd = fcntl(found->second.memory->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return KVQ_GPU_SYSTEM;
    memcpy(handle, &fd, sizeof(fd));
    return KVQ_GPU_OK;
}

// The descriptor stays the caller's. Any other file is refused.
int memory_import(kvq_gpu_memory *memory, void *handle, int type)
{
    char path[64], name[64];
    struct stat st;
    int number;
    if (lacks(NO_MAPPING) || lacks(NO_FD))
        return KVQ_GPU_NOT_SUPPORTED;
    if (type != KVQ_GPU_HANDLE_FD)
        return KVQ_GPU_INVALID_VALUE;
    const int fd = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return KVQ_GPU_INVALID_VALUE;
    physical_ptr p = std::make_shared<physical>();
    p->fd = fd;
    p->fd_allowed = true;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(path, name, sizeof(name) - 1);
    name[n > 0 ? n : 0] = '\0';
    if (sscanf(name, "/memfd:kvq-emu-memory-%d", &number) != 1 || fstat(fd, &st) != 0 ||
        !(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK))
        return KVQ_GPU_INVALID_VALUE;
    if (find_device(number) < 0)
        return KVQ_GPU_INVALID_DEVICE;
    p->bytes = (size_t)st.st_size;
    p->number = number;
    guard g(m.lock);
    *memory = ++m.last_memory;
    m.memories[*memory] = {p, 1};
    return KVQ_GPU_OK;
}

// ---- Addresses ----

int address_reserve(kvq_gpu_ptr *at, size_t bytes, size_t alignment, kvq_gpu_ptr wanted,
                    unsigned long long flags)
{
    const size_t unit = alignment > BLOCK ? alignment : BLOCK;
    if (lacks(NO_MAPPING))
        return KVQ_GPU_NOT_SUPPORTED;
    if (bytes == 0 || bytes % BLOCK != 0 || (alignment & (alignment - 1)) || flags ||
        bytes + unit < bytes)
        return KVQ_GPU_INVALID_VALUE;
    void *all = mmap((void *)(wanted / BLOCK * BLOCK), bytes + unit, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        return KVQ_GPU_OUT_OF_MEMORY;
    const uintptr_t from = (uintptr_t)all, start = (from + unit - 1) / unit * unit;
    if (start > from)
        munmap(all, start - from);
    munmap((void *)(start + bytes), from + unit - start);
    guard g(m.lock);
    m.reservations[ *at = start] = bytes;
    return KVQ_GPU_OK;
}

// The first mapping that reaches into [at, at + bytes), or end(). With m.lock held.
static std::map<uintptr_t, region>::iterator first_mapping(uintptr_t at, size_t bytes)
{
    auto found = find_region(at);
    if (found == m.regions.end())
        found = m.regions.lower_bound(at);
    return found != m.regions.end() && found->first < at + bytes ? found : m.regions.end();
}

int address_free(kvq_gpu_ptr at, size_t bytes)
{
    guard g(m.lock);
    const auto found = m.reservations.find(at);
    if (found == m.reservations.end() || found->second != bytes ||
        first_mapping(at, bytes) != m.regions.end())
        return KVQ_GPU_INVALID_VALUE;
    m.reservations.erase(found);
    munmap((void *)at, bytes);
    return KVQ_GPU_OK;
}

// ---- Mappings ----

int memory_map(kvq_gpu_ptr at, size_t bytes, size_t offset, kvq_gpu_memory memory,
               unsigned long long flags)
{
    guard g(m.lock);
    const auto found = m.memories.find(memory);
    auto reserved = m.reservations.upper_bound(at);
    if (found == m.memories.end() || reserved == m.reservations.begin() || flags || offset ||
        bytes == 0 || bytes % BLOCK != 0 || at % BLOCK != 0 || bytes > found->second.memory->bytes)
        return KVQ_GPU_INVALID_VALUE;
    --reserved;
    if (at - reserved->first > reserved->second ||
        bytes > reserved->second - (at - reserved->first))
        return KVQ_GPU_INVALID_VALUE;
    if (first_mapping(at, bytes) != m.regions.end())
        return KVQ_GPU_INVALID_VALUE; // which is what CUDA says, not ALREADY_MAPPED
    const physical_ptr &p = found->second.memory;
    if (mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED)
        return KVQ_GPU_OUT_OF_MEMORY;
    add_region(at, {MAPPING, bytes, find_device(p->number), ++m.last_buffer, p, reserved->first});
    return KVQ_GPU_OK;
}

// Whether [at, at + bytes) is made of whole mappings, with m.lock held.
static bool whole(uintptr_t at, size_t bytes)
{
    const uintptr_t end = at + bytes;
    for (auto found = m.regions.find(at); at < end; ++found) {
        if (found == m.regions.end() || found->first != at || found->second.kind != MAPPING)
            return false;
        at += found->second.bytes;
    }
    return bytes > 0 && at == end;
}

int memory_unmap(kvq_gpu_ptr at, size_t bytes)
{
    memory_change change;
    guard g(m.lock);
    if (!whole(at, bytes))
        return KVQ_GPU_INVALID_VALUE;
    for (auto found = m.regions.find(at); found != m.regions.end() && found->first < at + bytes;) {
        gpu::emu_global_remove((void *)found->first);
        found = m.regions.erase(found);
    }
    mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    return KVQ_GPU_OK;
}

int memory_access(kvq_gpu_ptr at, size_t bytes, const kvq_gpu_access *access, size_t count)
{
    memory_change change;
    guard g(m.lock);
    if (!access || count == 0 || !whole(at, bytes))
        return KVQ_GPU_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type != KVQ_GPU_LOCATION_DEVICE || access[i].location.id < 0 ||
            access[i].location.id >= m.set.devices || access[i].flags < 0 || access[i].flags > 3 ||
            access[i].flags == 2)
            return KVQ_GPU_INVALID_VALUE;
    for (auto found = m.regions.find(at); found != m.regions.end() && found->first < at + bytes;
         ++found) {
        region r = found->second;
        for (size_t i = 0; i < count; i++) {
            const uint32_t bit = 1u << access[i].location.id;
            r.readable = access[i].flags & 1 ? r.readable | bit : r.readable & ~bit;
            r.writable = access[i].flags & 2 ? r.writable | bit : r.writable & ~bit;
        }
        const int rights = (r.readable ? PROT_READ : 0) | (r.writable ? PROT_WRITE : 0);
        if (mprotect((void *)found->first, r.bytes, rights) != 0)
            return KVQ_GPU_SYSTEM;
        add_region(found->first, r);
    }
    return KVQ_GPU_OK;
}
} // namespace soft
