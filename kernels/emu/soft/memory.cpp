// SPDX-License-Identifier: Apache-2.0
//
// Memory of the software driver: what memory_alloc divides, pinned and registered host memory, and
// what is known of pointers.
//
// As with CUDA, small allocations share blocks of 2 MiB, and the lowest address that fits is taken,
// so that an address that was freed comes back soon.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <shared_mutex>

#include "kernels/emu/global.h"
#include "kernels/emu/soft/machine.h"

namespace soft
{
enum { ALIGN = 512, BLOCKS = 1 << 15 };

// ---- Who uses memory ----

static std::shared_mutex users;
static std::mutex gate; // so that a change is not kept waiting for ever

memory_use::memory_use()
{
    gate.lock();
    gate.unlock();
    users.lock_shared();
}

memory_use::~memory_use()
{
    users.unlock_shared();
}

memory_change::memory_change()
{
    guard g(gate);
    users.lock();
}

memory_change::~memory_change()
{
    users.unlock();
}

// ---- Physical memory ----

physical::~physical()
{
    if (fd >= 0)
        close(fd);
    if (taken >= 0)
        m.used[taken] -= bytes;
}

// Within the budget; it holds zeros. The name tells whoever opens it what it is.
physical_ptr new_physical(const char *kind, size_t bytes, int device, int *result)
{
    char name[64];
    physical_ptr p = std::make_shared<physical>();
    *result = KVQ_GPU_OUT_OF_MEMORY;
    if (bytes > m.set.gpu.memory || (m.used[device] += bytes) > m.set.gpu.memory) {
        m.used[device] -= bytes <= m.set.gpu.memory ? bytes : 0;
        return NULL;
    }
    p->bytes = bytes;
    p->taken = device;
    p->number = m.set.number[device];
    snprintf(name, sizeof(name), "kvq-emu-%s-%d", kind, p->number);
    p->fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (p->fd < 0 || ftruncate(p->fd, (off_t)bytes) != 0 ||
        fcntl(p->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return NULL;
    *result = KVQ_GPU_OK;
    return p;
}

// ---- Regions ----

static void tell_kernels(uintptr_t at, const region &r, size_t room)
{
    const bool all = r.kind == HOST || r.kind == REGISTERED;
    const uint32_t own = 1u << r.device;
    gpu::emu_piece p = {r.bytes, room, all ? ~0u : own, all ? ~0u : own, r.group};
    if (r.kind == MAPPING) {
        p.readable = r.readable;
        p.writable = r.writable;
    }
    gpu::emu_global_add((void *)at, p);
}

void add_region(uintptr_t at, const region &r)
{
    const bool whole = r.kind != ALLOCATION;
    tell_kernels(at, r, whole ? r.bytes : (r.bytes + 255) / 256 * 256);
    m.regions[at] = r;
}

static void remove_region(std::map<uintptr_t, region>::iterator found)
{
    gpu::emu_global_remove((void *)found->first);
    m.regions.erase(found);
}

std::map<uintptr_t, region>::iterator find_region(kvq_gpu_ptr at)
{
    auto found = m.regions.upper_bound(at);
    if (found == m.regions.begin())
        return m.regions.end();
    --found;
    return at - found->first < found->second.bytes ? found : m.regions.end();
}

bool usable(kvq_gpu_ptr at, size_t bytes, bool write)
{
    return gpu::emu_global_holds((const void *)at, bytes, write, ~0u);
}

bool pinned(const void *at, size_t bytes)
{
    guard g(m.lock);
    const auto found = find_region((uintptr_t)at);
    if (found == m.regions.end())
        return false;
    const region &r = found->second;
    return r.kind >= HOST && bytes <= r.bytes - ((uintptr_t)at - found->first);
}

// ---- Blocks ----

// Addresses for blocks, lowest first; 0 if there are none left. With m.lock held.
static uintptr_t take_addresses(size_t bytes)
{
    static uintptr_t start;
    uintptr_t at = start;
    if (!start) {
        void *all = mmap(NULL, (size_t)(BLOCKS + 1) * BLOCK, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED)
            return 0;
        at = start = ((uintptr_t)all + BLOCK - 1) / BLOCK * BLOCK;
    }
    for (const auto &b : m.blocks) {
        if (at + bytes <= b.first)
            break;
        at = b.first + b.second.memory->bytes;
    }
    return at + bytes <= start + (size_t)BLOCKS * BLOCK ? at : 0;
}

static std::map<uintptr_t, block>::iterator new_block(size_t bytes, int device, int *result)
{
    const size_t rounded = (bytes + BLOCK - 1) / BLOCK * BLOCK;
    const uintptr_t at = rounded >= bytes ? take_addresses(rounded) : 0;
    *result = KVQ_GPU_OUT_OF_MEMORY;
    if (!at)
        return m.blocks.end();
    physical_ptr memory = new_physical("block", rounded, device, result);
    if (*result)
        return m.blocks.end();
    if (mmap((void *)at, rounded, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory->fd, 0) ==
        MAP_FAILED) {
        *result = KVQ_GPU_OUT_OF_MEMORY;
        return m.blocks.end();
    }
    return m.blocks.insert({at, {memory, device, {}}}).first;
}

// Where `room` bytes fit between a block's pieces.
static bool find_room(const block &b, size_t room, size_t *offset)
{
    *offset = 0;
    for (const auto &piece : b.pieces) {
        if (*offset + room <= piece.first)
            return true;
        *offset = piece.first + piece.second;
    }
    return *offset + room <= b.memory->bytes;
}

// New memory holds NaN, as fp16 and as fp32, as far as that costs no time.
static void spoil(uintptr_t at, size_t bytes)
{
    if (bytes <= (size_t)64 << 20)
        memset((void *)at, 0xff, bytes);
}

int memory_alloc(kvq_gpu_ptr *at, size_t bytes)
{
    const size_t room = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    const context *c = current();
    size_t offset = 0;
    int result = KVQ_GPU_OK;
    if (!c || unsafe_now())
        return c ? KVQ_GPU_CAPTURE_UNSUPPORTED : KVQ_GPU_INVALID_CONTEXT;
    if (bytes == 0 || bytes > m.set.gpu.memory)
        return bytes ? KVQ_GPU_OUT_OF_MEMORY : KVQ_GPU_INVALID_VALUE;
    guard g(m.lock);
    auto found = m.blocks.begin();
    while (found != m.blocks.end() &&
           (found->second.device != c->device || !find_room(found->second, room, &offset)))
        ++found;
    if (found == m.blocks.end() || room >= BLOCK / 2) {
        found = new_block(bytes, c->device, &result);
        offset = 0;
    }
    if (result)
        return result;
    // What is large has its block alone.
    found->second.pieces[offset] = room >= BLOCK / 2 ? found->second.memory->bytes : room;
    *at = found->first + offset;
    spoil(*at, bytes);
    add_region(*at, {ALLOCATION, bytes, c->device, ++m.last_buffer, found->second.memory});
    return KVQ_GPU_OK;
}

// With memory_change and m.lock held.
static void drop_allocation(std::map<uintptr_t, region>::iterator found)
{
    auto b = m.blocks.upper_bound(found->first);
    --b;
    b->second.pieces.erase(found->first - b->first);
    remove_region(found);
    if (!b->second.pieces.empty())
        return;
    mmap((void *)b->first, b->second.memory->bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    m.blocks.erase(b);
}

// Waits for all work of the devices from `first` to `last`; meanwhile nobody else can give any.
static int sync_alone(int first, int last)
{
    std::unique_lock<std::shared_mutex> giving(m.giving);
    for (int i = first; i <= last; i++)
        if (const int result = sync_device(&m.contexts[i]))
            return result;
    return KVQ_GPU_OK;
}

// As CUDA's, this waits for all work of the device.
int memory_free(kvq_gpu_ptr at)
{
    int device;
    if (at == 0)
        return KVQ_GPU_OK;
    if (unsafe_now())
        return KVQ_GPU_CAPTURE_UNSUPPORTED;
    {
        guard g(m.lock);
        const auto found = m.regions.find(at);
        if (found == m.regions.end() || found->second.kind != ALLOCATION)
            return KVQ_GPU_INVALID_VALUE;
        device = found->second.device;
    }
    const int result = sync_alone(device, device);
    if (result)
        return result;
    memory_change change;
    guard g(m.lock);
    const auto found = m.regions.find(at);
    if (found == m.regions.end() || found->second.kind != ALLOCATION)
        return KVQ_GPU_INVALID_VALUE;
    drop_allocation(found);
    return KVQ_GPU_OK;
}

int memory_info(size_t *free, size_t *total)
{
    const context *c = current();
    if (!c)
        return KVQ_GPU_INVALID_CONTEXT;
    *total = m.set.gpu.memory;
    *free = *total - m.used[c->device];
    return KVQ_GPU_OK;
}

static void drop_import(std::map<uintptr_t, region>::iterator found)
{
    munmap((void *)found->first, found->second.bytes);
    remove_region(found);
}

void free_allocations(int device)
{
    memory_change change;
    guard g(m.lock);
    for (auto at = m.regions.begin(); at != m.regions.end();) {
        const auto found = at++;
        if (found->second.device != device)
            continue;
        if (found->second.kind == ALLOCATION)
            drop_allocation(found);
        else if (found->second.kind == IMPORT)
            drop_import(found);
    }
}

static std::map<uintptr_t, region>::iterator find_import(kvq_gpu_ptr at)
{
    auto found = m.regions.begin();
    while (found != m.regions.end() &&
           (found->second.kind != IMPORT || found->second.returned != at))
        ++found;
    return found;
}

int ipc_memory_close(kvq_gpu_ptr at)
{
    int device;
    {
        guard g(m.lock);
        const auto found = find_import(at);
        if (found == m.regions.end())
            return KVQ_GPU_INVALID_VALUE;
        device = found->second.device;
    }
    if (const int result = sync_alone(device, device))
        return result;
    memory_change change;
    guard g(m.lock);
    const auto found = find_import(at);
    if (found == m.regions.end())
        return KVQ_GPU_INVALID_VALUE;
    if (--found->second.opened == 0)
        drop_import(found);
    return KVQ_GPU_OK;
}

// ---- Host memory ----

static bool overlaps(uintptr_t at, size_t bytes)
{
    const auto found = find_region(at);
    const auto next = m.regions.upper_bound(at);
    return found != m.regions.end() || (next != m.regions.end() && next->first - at < bytes);
}

int host_alloc(void **at, size_t bytes, unsigned flags)
{
    const context *c = current();
    if (!c || unsafe_now())
        return c ? KVQ_GPU_CAPTURE_UNSUPPORTED : KVQ_GPU_INVALID_CONTEXT;
    if (bytes == 0 || flags > 7)
        return KVQ_GPU_INVALID_VALUE;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return KVQ_GPU_OUT_OF_MEMORY;
    spoil((uintptr_t)p, bytes);
    guard g(m.lock);
    add_region((uintptr_t)p, {HOST, bytes, c->device, ++m.last_buffer, NULL});
    *at = p;
    return KVQ_GPU_OK;
}

// Forgets a range that starts there, after all work that may use it. The size goes to *bytes.
static int drop_host(void *at, region_kind kind, int missing, size_t *bytes)
{
    if (unsafe_now())
        return KVQ_GPU_CAPTURE_UNSUPPORTED;
    if (const int result = sync_alone(0, m.set.devices - 1))
        return result;
    memory_change change;
    guard g(m.lock);
    const auto found = m.regions.find((uintptr_t)at);
    if (found == m.regions.end() || found->second.kind != kind)
        return missing;
    *bytes = found->second.bytes;
    remove_region(found);
    return KVQ_GPU_OK;
}

int host_free(void *at)
{
    size_t bytes;
    const int result = at ? drop_host(at, HOST, KVQ_GPU_INVALID_VALUE, &bytes) : KVQ_GPU_OK;
    if (at && !result)
        munmap(at, bytes);
    return result;
}

// Whether all its pages are there.
static bool mapped(const void *at, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t from = (uintptr_t)at / page * page;
    std::vector<unsigned char> in(((uintptr_t)at + bytes - from + page - 1) / page);
    return mincore((void *)from, (uintptr_t)at + bytes - from, in.data()) == 0;
}

int host_register(void *at, size_t bytes, unsigned flags)
{
    const context *c = current();
    if (!c || unsafe_now())
        return c ? KVQ_GPU_CAPTURE_UNSUPPORTED : KVQ_GPU_INVALID_CONTEXT;
    if (lacks(NO_REGISTER))
        return KVQ_GPU_NOT_SUPPORTED;
    if (!at || bytes == 0 || (uintptr_t)at + bytes < (uintptr_t)at || flags > 3 ||
        !mapped(at, bytes))
        return KVQ_GPU_INVALID_VALUE;
    guard g(m.lock);
    if (overlaps((uintptr_t)at, bytes))
        return KVQ_GPU_ALREADY_REGISTERED;
    add_region((uintptr_t)at, {REGISTERED, bytes, c->device, ++m.last_buffer, NULL});
    return KVQ_GPU_OK;
}

int host_unregister(void *at)
{
    size_t bytes;
    return drop_host(at, REGISTERED, KVQ_GPU_NOT_REGISTERED, &bytes);
}

int host_device(kvq_gpu_ptr *device, void *at, unsigned flags)
{
    guard g(m.lock);
    const auto found = find_region((uintptr_t)at);
    *device = 0;
    if (flags != 0 || found == m.regions.end() || found->second.kind < HOST)
        return KVQ_GPU_INVALID_VALUE;
    *device = (uintptr_t)at;
    return KVQ_GPU_OK;
}

// ---- What is known of a pointer ----

int address_range(kvq_gpu_ptr *base, size_t *bytes, kvq_gpu_ptr at)
{
    guard g(m.lock);
    const auto found = find_region(at);
    if (found == m.regions.end() || found->second.kind >= HOST)
        return KVQ_GPU_NOT_FOUND;
    if (base)
        *base = found->first;
    if (bytes)
        *bytes = found->second.bytes;
    return KVQ_GPU_OK;
}

int pointer_get(void *value, int attribute, kvq_gpu_ptr at)
{
    guard g(m.lock);
    const auto found = find_region(at);
    if (found == m.regions.end())
        return KVQ_GPU_INVALID_VALUE;
    const region &r = found->second;
    switch (attribute) {
    case KVQ_GPU_POINTER_CONTEXT:
        *(context **)value = r.kind == MAPPING ? NULL : &m.contexts[r.device];
        return KVQ_GPU_OK;
    case KVQ_GPU_POINTER_TYPE:
        *(unsigned *)value = r.kind >= HOST ? KVQ_GPU_TYPE_HOST : KVQ_GPU_TYPE_DEVICE;
        return KVQ_GPU_OK;
    case KVQ_GPU_POINTER_BUFFER:
        *(unsigned long long *)value = r.buffer;
        return KVQ_GPU_OK;
    case KVQ_GPU_POINTER_DEVICE:
        *(int *)value = r.device;
        return KVQ_GPU_OK;
    case KVQ_GPU_POINTER_LEGACY_IPC:
        *(int *)value = r.kind == ALLOCATION && !lacks(NO_LEGACY);
        return KVQ_GPU_OK;
    case KVQ_GPU_POINTER_RANGE_START:
        *(kvq_gpu_ptr *)value = found->first;
        return KVQ_GPU_OK;
    case KVQ_GPU_POINTER_RANGE_BYTES:
        *(size_t *)value = r.bytes;
        return KVQ_GPU_OK;
    case KVQ_GPU_POINTER_HANDLE_TYPES:
        *(unsigned long long *)value =
            r.kind == MAPPING && r.memory->fd_allowed ? KVQ_GPU_HANDLE_FD : 0;
        return KVQ_GPU_OK;
    default:
        return KVQ_GPU_INVALID_VALUE;
    }
}
} // namespace soft
