// SPDX-License-Identifier: Apache-2.0
//
// Handles of memory_alloc's memory for other processes, and the counts.
//
// A handle names the process, the block of memory and the place in it, and nothing that tells
// memory now there from memory that was there before: after a free and another allocation it can
// be the same to the byte, as CUDA's can. Opening it looks up what the exporter has mapped at that
// address now; but while it is open, opening it again gives the same memory as before.
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/emu/soft/machine.h"

namespace soft
{
// What the 64 bytes of a handle are.
struct memory_name {
    char magic[8];
    uint32_t named; // pid that is compared
    int32_t pid;    // and the one that is opened
    uint64_t block, bytes, offset;
    int32_t number; // of the device
};
static_assert(sizeof(memory_name) <= sizeof(kvq_gpu_ipc_memory), "a handle has 64 bytes");

static const char memory_magic[8] = {'k', 'v', 'q', 'm', 'e', 'm', 'o', 'r'};

int ipc_memory_get(kvq_gpu_ipc_memory *handle, kvq_gpu_ptr at)
{
    if (lacks(NO_LEGACY))
        return KVQ_GPU_NOT_SUPPORTED;
    guard g(m.lock);
    const auto found = find_region(at);
    if (found == m.regions.end() || found->second.kind != ALLOCATION)
        return KVQ_GPU_INVALID_VALUE;
    auto b = m.blocks.upper_bound(at);
    --b;
    memory_name name = {};
    memcpy(name.magic, memory_magic, sizeof(memory_magic));
    name.named = m.set.pid;
    name.pid = getpid();
    name.block = b->first;
    name.bytes = b->second.memory->bytes;
    name.offset = found->first - b->first;
    name.number = b->second.memory->number;
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &name, sizeof(name));
    return KVQ_GPU_OK;
}

// The file that a process has mapped at an address; 0 if it is not a block of ours.
static ino_t mapped_there(int pid, uint64_t address, uint64_t bytes)
{
    char path[64], *line = NULL;
    size_t room = 0;
    ino_t inode = 0;
    snprintf(path, sizeof(path), "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    while (maps && !inode && getline(&line, &room, maps) > 0) {
        unsigned long long from, to, number;
        if (sscanf(line, "%llx-%llx %*s %*s %*s %llu", &from, &to, &number) == 3 &&
            from == address && to == address + bytes && strstr(line, "/memfd:kvq-emu-block-"))
            inode = (ino_t)number;
    }
    free(line);
    if (maps)
        fclose(maps);
    return inode;
}

// That file, opened through a descriptor that the process has for it; -1 if there is none.
static int open_theirs(int pid, ino_t inode, uint64_t bytes)
{
    char path[64];
    struct stat st;
    int fd = -1;
    snprintf(path, sizeof(path), "/proc/%d/fd", pid);
    DIR *all = opendir(path);
    const struct dirent *one;
    while (all && fd < 0 && (one = readdir(all))) {
        if (fstatat(dirfd(all), one->d_name, &st, 0) != 0 || st.st_ino != inode ||
            (uint64_t)st.st_size != bytes)
            continue;
        fd = openat(dirfd(all), one->d_name, O_RDWR | O_CLOEXEC);
        if (fd >= 0 && (fstat(fd, &st) != 0 || st.st_ino != inode)) {
            close(fd);
            fd = -1;
        }
    }
    if (all)
        closedir(all);
    return fd;
}

// One that is open already, with m.lock held.
static bool open_again(const kvq_gpu_ipc_memory &handle, kvq_gpu_ptr *at)
{
    for (auto &r : m.regions) {
        if (r.second.kind != IMPORT || memcmp(&r.second.handle, &handle, sizeof(handle)) != 0)
            continue;
        r.second.opened++;
        *at = r.second.returned;
        return true;
    }
    return false;
}

static int map_theirs(const memory_name &name, physical_ptr *memory, void **base)
{
    const ino_t inode = mapped_there(name.pid, name.block, name.bytes);
    *memory = std::make_shared<physical>();
    (*memory)->fd = inode ? open_theirs(name.pid, inode, name.bytes) : -1;
    (*memory)->bytes = name.bytes;
    (*memory)->number = name.number;
    if ((*memory)->fd < 0)
        return KVQ_GPU_INVALID_VALUE;
    *base = mmap(NULL, name.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (*memory)->fd, 0);
    return *base == MAP_FAILED ? KVQ_GPU_MAP_FAILED : KVQ_GPU_OK;
}

int ipc_memory_open(kvq_gpu_ptr *at, kvq_gpu_ipc_memory handle, unsigned flags)
{
    const context *c = current();
    memory_name name;
    physical_ptr memory;
    void *base;
    memcpy(&name, &handle, sizeof(name));
    if (!c || unsafe_now())
        return c ? KVQ_GPU_CAPTURE_UNSUPPORTED : KVQ_GPU_INVALID_CONTEXT;
    if (lacks(NO_LEGACY))
        return KVQ_GPU_NOT_SUPPORTED;
    if (flags != KVQ_GPU_IPC_LAZY_PEER ||
        memcmp(name.magic, memory_magic, sizeof(memory_magic)) != 0 || name.bytes == 0 ||
        name.bytes % BLOCK != 0 || name.offset >= name.bytes)
        return KVQ_GPU_INVALID_VALUE;
    if (name.named == m.set.pid || name.pid == getpid())
        return KVQ_GPU_INVALID_CONTEXT;
    const int device = find_device(name.number);
    if (device < 0 || m.set.number[c->device] != name.number)
        return device < 0 ? KVQ_GPU_INVALID_DEVICE : KVQ_GPU_INVALID_CONTEXT;
    guard g(m.lock);
    if (open_again(handle, at))
        return KVQ_GPU_OK;
    const int result = map_theirs(name, &memory, &base);
    if (result)
        return result;
    region r = {IMPORT, name.bytes, device, ++m.last_buffer, memory};
    r.returned = *at = (uintptr_t)base + name.offset;
    r.opened = 1;
    r.handle = handle;
    add_region((uintptr_t)base, r);
    return KVQ_GPU_OK;
}
} // namespace soft

using namespace soft;

void kvq_soft_counts(struct kvq_soft_counts *counts)
{
    *counts = {};
    {
        guard g(m.lock);
        uint64_t *const by_kind[] = {&counts->allocations, &counts->mappings, &counts->imports,
                                     &counts->host, &counts->registered};
        for (const auto &r : m.regions)
            ++*by_kind[r.second.kind];
        for (const auto &one : m.memories)
            counts->memories += one.second.count;
        counts->reservations = m.reservations.size();
        counts->modules = m.modules;
        for (int i = 0; i < MAX_DEVICES; i++) {
            counts->contexts += (uint64_t)m.contexts[i].retained;
            counts->bytes += m.used[i];
        }
    }
    guard g(m.order);
    counts->streams = m.streams.size();
    counts->events = m.events.size();
    counts->graphs = m.graphs.size() + m.execs.size();
}
