// SPDX-License-Identifier: Apache-2.0
//
// Devices, contexts, modules and functions of the software driver.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "kernels/cuda/list.h"
#include "kernels/emu/soft/machine.h"

namespace soft
{
machine &m = *new machine;

static thread_local context *mine;

context *current()
{
    guard g(m.lock);
    return mine && mine->retained > 0 ? mine : NULL;
}

int find_device(int number)
{
    for (int i = 0; i < m.set.devices; i++)
        if (m.set.number[i] == number)
            return i;
    return -1;
}

bool lacks(unsigned what)
{
    return m.set.lacks & what;
}

static bool is_device(int device)
{
    return device >= 0 && device < m.set.devices;
}

// ---- Start and end ----

// Threads that are still at work find out; what touches memory has ended when this returns. Then
// objects of this library may be destroyed.
static void end()
{
    if (m.pid != getpid())
        return; // a child, which has none of the threads
    m.ended = true;
    m.last_change = new memory_change;
}

int init(unsigned flags)
{
    static std::mutex once;
    static int result = -1;
    static char text[256];
    guard g(once);
    if (flags != 0)
        return KVQ_GPU_INVALID_VALUE;
    if (result < 0) {
        size_t n;
        const kvq_emu_kernel *kernels = kvq_emu_kernels(&n);
        for (size_t i = 0; i < n; i++)
            m.functions.push_back({&kernels[i], gpu::EMU_DEFAULT_SHARED});
        result = read_settings(text, sizeof(text));
        for (int i = 0; i < m.set.devices; i++)
            m.contexts[i].device = i;
        atexit(end);
        m.pid = getpid();
    }
    if (result)
        refuse("%s", text);
    return result;
}

int version(int *value)
{
    *value = 13000;
    return KVQ_GPU_OK;
}

static const struct {
    int result;
    const char *name, *text;
} results[] = {
    {KVQ_GPU_OK, "success", "no error"},
    {KVQ_GPU_INVALID_VALUE, "invalid value", "an argument is out of its range"},
    {KVQ_GPU_OUT_OF_MEMORY, "out of memory", "the device's budget has no room for it"},
    {KVQ_GPU_NOT_INITIALIZED, "not initialized", "cuInit was not called in this process"},
    {KVQ_GPU_DEINITIALIZED, "deinitialized", "the process is ending"},
    {KVQ_GPU_NO_DEVICE, "no device", "KVQ_EMU_DEVICES is 0"},
    {KVQ_GPU_INVALID_DEVICE, "invalid device", "there is no such device"},
    {KVQ_GPU_INVALID_CONTEXT, "invalid context", "no context, or not one for this"},
    {KVQ_GPU_MAP_FAILED, "map failed", "the memory cannot be mapped"},
    {KVQ_GPU_ALREADY_MAPPED, "already mapped", "something is mapped there"},
    {KVQ_GPU_SYSTEM, "operating system", "a system call failed"},
    {KVQ_GPU_INVALID_HANDLE, "invalid handle", "there is nothing that this handle names"},
    {KVQ_GPU_NOT_FOUND, "not found", "there is nothing of that name"},
    {KVQ_GPU_NOT_READY, "not ready", "work that was asked about is not done"},
    {KVQ_GPU_ILLEGAL_ADDRESS, "illegal address", "memory was used that is not there"},
    {KVQ_GPU_ALREADY_REGISTERED, "host memory already registered", "part of it is"},
    {KVQ_GPU_NOT_REGISTERED, "host memory not registered", "no range starts there"},
    {KVQ_GPU_INVALID_SPACE, "invalid address space", "memory of another kind was meant"},
    {KVQ_GPU_LAUNCH_FAILED, "launch failed", "a kernel failed"},
    {KVQ_GPU_NOT_PERMITTED, "not permitted", "host functions may not call the driver"},
    {KVQ_GPU_NOT_SUPPORTED, "not supported", "KVQ_EMU_LACKS says so"},
    {KVQ_GPU_CAPTURE_UNSUPPORTED, "capture unsupported", "not while a stream is captured"},
    {KVQ_GPU_CAPTURE_INVALIDATED, "capture invalidated", "an earlier error broke the capture"},
    {KVQ_GPU_CAPTURE_UNMATCHED, "capture unmatched", "captures end where they began"},
    {KVQ_GPU_CAPTURE_UNJOINED, "capture unjoined", "a stream was forked and not joined"},
    {KVQ_GPU_CAPTURE_ISOLATION, "capture isolation", "it would wait for work outside"},
    {KVQ_GPU_CAPTURE_IMPLICIT, "capture implicit", "the default stream would join"},
    {KVQ_GPU_CAPTURED_EVENT, "captured event", "its latest record is a capture's"},
};

int error_name(int result, const char **name)
{
    *name = NULL;
    for (const auto &r : results)
        if (r.result == result)
            *name = r.name;
    return *name ? KVQ_GPU_OK : KVQ_GPU_INVALID_VALUE;
}

int error_text(int result, const char **text)
{
    *text = last_text(result);
    for (const auto &r : results)
        if (r.result == result && !*text)
            *text = r.text;
    return *text ? KVQ_GPU_OK : KVQ_GPU_INVALID_VALUE;
}

// ---- Devices ----

int device_count(int *count)
{
    *count = m.set.devices;
    return KVQ_GPU_OK;
}

int device_get(int *device, int ordinal)
{
    *device = ordinal;
    return is_device(ordinal) ? KVQ_GPU_OK : KVQ_GPU_INVALID_DEVICE;
}

int device_name(char *name, int bytes, int device)
{
    if (!is_device(device))
        return KVQ_GPU_INVALID_DEVICE;
    snprintf(name, (size_t)bytes, "kvq's software GPU %d", m.set.number[device]);
    return KVQ_GPU_OK;
}

int device_attribute(int *value, int attribute, int device)
{
    if (!is_device(device))
        return KVQ_GPU_INVALID_DEVICE;
    const int values[][2] = {{KVQ_GPU_MULTIPROCESSORS, m.set.gpu.multiprocessors},
                             {KVQ_GPU_CAPABILITY_MAJOR, m.set.gpu.capability / 10},
                             {KVQ_GPU_CAPABILITY_MINOR, m.set.gpu.capability % 10},
                             {KVQ_GPU_SHARED_PER_BLOCK, (int)m.set.gpu.shared_bytes},
                             {KVQ_GPU_HAS_HOST_REGISTER, !lacks(NO_REGISTER)},
                             {KVQ_GPU_HAS_MAPPING, !lacks(NO_MAPPING)},
                             {KVQ_GPU_HAS_HANDLE_FD, !lacks(NO_MAPPING) && !lacks(NO_FD)},
                             {KVQ_GPU_HAS_MEMORY_OPS, !lacks(NO_MEMORY_OPS)},
                             {KVQ_GPU_HAS_IPC_EVENTS, !lacks(NO_IPC_EVENTS)}};
    for (const auto &v : values) {
        if (v[0] != attribute)
            continue;
        *value = v[1];
        return KVQ_GPU_OK;
    }
    return KVQ_GPU_INVALID_VALUE;
}

int device_memory(size_t *bytes, int device)
{
    *bytes = m.set.gpu.memory;
    return is_device(device) ? KVQ_GPU_OK : KVQ_GPU_INVALID_DEVICE;
}

// The same for all processes, whatever ordinals they have for the device.
int device_uuid(kvq_gpu_uuid *uuid, int device)
{
    if (!is_device(device))
        return KVQ_GPU_INVALID_DEVICE;
    memcpy(uuid->bytes, "kvq-emulated-GPU", 16);
    uuid->bytes[15] = (uint8_t)m.set.number[device];
    return KVQ_GPU_OK;
}

// ---- Contexts ----

int context_retain(kvq_gpu_context **handle, int device)
{
    if (!is_device(device))
        return KVQ_GPU_INVALID_DEVICE;
    context *c = &m.contexts[device];
    guard g(m.lock);
    if (c->retained++ == 0)
        make_standard(c);
    *handle = (kvq_gpu_context *)c;
    return KVQ_GPU_OK;
}

// The last one takes everything of the context with it.
int context_release(int device)
{
    if (!is_device(device))
        return KVQ_GPU_INVALID_DEVICE;
    context *c = &m.contexts[device];
    {
        guard g(m.lock);
        if (c->retained == 0)
            return KVQ_GPU_INVALID_CONTEXT;
        if (c->retained > 1) {
            c->retained--;
            return KVQ_GPU_OK;
        }
    }
    sync_device(c);
    close_streams(c);
    destroy_events(c);
    free_allocations(device);
    guard g(m.lock);
    c->retained = 0;
    c->stack = 0;
    return KVQ_GPU_OK;
}

int context_set(kvq_gpu_context *handle)
{
    context *c = (context *)handle;
    if (c && (c < m.contexts || c >= m.contexts + m.set.devices))
        return KVQ_GPU_INVALID_CONTEXT;
    mine = c;
    return KVQ_GPU_OK;
}

int context_get(kvq_gpu_context **handle)
{
    *handle = (kvq_gpu_context *)mine;
    return KVQ_GPU_OK;
}

int context_device(int *device)
{
    const context *c = current();
    if (!c)
        return KVQ_GPU_INVALID_CONTEXT;
    *device = c->device;
    return KVQ_GPU_OK;
}

int context_sync()
{
    context *c = current();
    return c ? sync_device(c) : KVQ_GPU_INVALID_CONTEXT;
}

// ---- Modules and functions ----

int module_load(kvq_gpu_module **module, const void *image)
{
    if (!current())
        return KVQ_GPU_INVALID_CONTEXT;
    if (image)
        return KVQ_GPU_INVALID_VALUE; // kernels are inside
    guard g(m.lock);
    m.modules++;
    *module = (kvq_gpu_module *)&m;
    return KVQ_GPU_OK;
}

int module_unload(kvq_gpu_module *module)
{
    guard g(m.lock);
    if (module != (kvq_gpu_module *)&m || m.modules == 0)
        return KVQ_GPU_INVALID_HANDLE;
    m.modules--;
    return KVQ_GPU_OK;
}

int module_function(kvq_gpu_function **function, kvq_gpu_module *module, const char *name)
{
    if (module != (kvq_gpu_module *)&m)
        return KVQ_GPU_INVALID_HANDLE;
    for (kvq_gpu_function &f : m.functions) {
        if (strcmp(f.kernel->name, name) != 0)
            continue;
        *function = &f;
        return KVQ_GPU_OK;
    }
    return KVQ_GPU_NOT_FOUND;
}

int function_get(int *value, int attribute, kvq_gpu_function *function)
{
    guard g(m.lock);
    return gpu::emu_function_get(value, attribute, function);
}

int function_set(kvq_gpu_function *function, int attribute, int value)
{
    guard g(m.lock);
    return gpu::emu_function_set(function, attribute, value, m.set.gpu.shared_bytes);
}

static size_t stack_of(const context *c)
{
    guard g(m.lock);
    return c->stack ? c->stack : (size_t)gpu::EMU_DEFAULT_STACK;
}

int limit_get(size_t *value, int limit)
{
    const context *c = current();
    if (!c)
        return KVQ_GPU_INVALID_CONTEXT;
    *value = stack_of(c);
    return limit == KVQ_GPU_LIMIT_STACK ? KVQ_GPU_OK : KVQ_GPU_INVALID_VALUE;
}

// The memory of all stacks is made anew, so nothing runs meanwhile.
int limit_set(int limit, size_t value)
{
    context *c = current();
    if (!c)
        return KVQ_GPU_INVALID_CONTEXT;
    if (limit != KVQ_GPU_LIMIT_STACK || value == 0)
        return KVQ_GPU_INVALID_VALUE;
    const int result = sync_device(c);
    guard g(m.lock);
    c->stack = result ? c->stack : value;
    return result;
}

// As a launch does for a kernel that needs more stack than there is.
static int grow_stack(kvq_gpu_function *f)
{
    int bytes = 0;
    const context *c = current();
    function_get(&bytes, KVQ_GPU_LOCAL_BYTES, f);
    return c && (size_t)bytes > stack_of(c) ? limit_set(KVQ_GPU_LIMIT_STACK, (size_t)bytes)
                                            : KVQ_GPU_OK;
}

int function_blocks(int *blocks, kvq_gpu_function *, int threads, size_t shared)
{
    return gpu::emu_function_blocks(blocks, threads, shared, m.set.gpu.shared_bytes);
}

// Kernels run one at a time, whatever their device.
static int run_kernel(const gpu::emu_job &job, const run_at &at)
{
    static std::mutex one;
    static gpu::emu_report report;
    guard g(one);
    memory_use use;
    gpu::emu_job mine = job;
    int result = count(CALL_kernel);
    mine.shape.seed = at.draw | 1;
    mine.shape.device = at.device;
    if (!result)
        result = mine.run(&report), m.brought += report.brought;
    else
        snprintf(report.text, sizeof(report.text), "%s: a fault that was asked for",
                 job.kernel->name);
    if (result)
        fault(result, report.text);
    return result;
}

int launch(kvq_gpu_function *f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
           unsigned block_y, unsigned block_z, unsigned shared, kvq_gpu_stream *stream, void **args,
           void **extra)
{
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    gpu::emu_job job;
    char text[512];
    int result;
    {
        guard g(m.lock);
        result = gpu::emu_make_job(f, grid, block, shared, args, extra, m.set.gpu, &job, text,
                                   sizeof(text));
    }
    if (result) {
        refuse("%s", text);
        return KVQ_GPU_INVALID_VALUE; // nothing ran, so nothing is broken
    }
    result = grow_stack(f);
    work w;
    w.run = [=](const run_at &at) { return run_kernel(job, at); };
    return result ? result : give(stream, std::move(w));
}
} // namespace soft
