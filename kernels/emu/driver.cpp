// SPDX-License-Identifier: Apache-2.0
//
// The emulator as a driver; see driver.h.
#include "kernels/emu/driver.h"

#include <stdio.h>
#include <string.h>

#include <functional>
#include <mutex>
#include <vector>

#include "kernels/emu/function.h"
#include "kernels/emu/global.h"

// What is given to a stream, done at once or recorded.
typedef std::function<int()> work;

struct kvq_gpu_graph {
    std::vector<work> nodes;
};

struct kvq_gpu_exec {
    std::vector<work> nodes;
};

struct kvq_gpu_stream {
    kvq_gpu_graph *capture; // being recorded; NULL if not
};

struct kvq_gpu_event {
    bool recorded;
};

namespace
{
struct device {
    kvq_emu_options options;
    std::vector<kvq_gpu_function> functions;
    gpu::emu_report report;
    std::recursive_mutex lock;
    void *context; // current; the same for all threads
    size_t stack = gpu::EMU_DEFAULT_STACK;
};
device dev;

typedef std::lock_guard<std::recursive_mutex> guard;

// Streams NULL and those not captured work at once.
int give(kvq_gpu_stream *stream, const work &w)
{
    guard g(dev.lock);
    if (stream && stream->capture) {
        stream->capture->nodes.push_back(w);
        return KVQ_GPU_OK;
    }
    return w();
}

// ---- Device, context, module ----

int init(unsigned)
{
    return KVQ_GPU_OK;
}

int version(int *value)
{
    *value = 13000;
    return KVQ_GPU_OK;
}

int error_name(int result, const char **name)
{
    switch (result) {
    case KVQ_GPU_INVALID_VALUE:
        *name = "invalid value";
        break;
    case KVQ_GPU_OUT_OF_MEMORY:
        *name = "out of memory";
        break;
    case KVQ_GPU_NOT_FOUND:
        *name = "not found";
        break;
    case KVQ_GPU_LAUNCH_FAILED:
        *name = "launch failed";
        break;
    default:
        *name = "error";
    }
    return KVQ_GPU_OK;
}

int error_text(int result, const char **text)
{
    *text = result == KVQ_GPU_LAUNCH_FAILED ? dev.report.text : "told by the emulator";
    return KVQ_GPU_OK;
}

int device_count(int *count)
{
    *count = 1;
    return KVQ_GPU_OK;
}

int device_get(int *number, int ordinal)
{
    *number = 0;
    return ordinal == 0 ? KVQ_GPU_OK : KVQ_GPU_INVALID_VALUE;
}

int device_name(char *name, int bytes, int)
{
    snprintf(name, (size_t)bytes, "kvq's emulator");
    return KVQ_GPU_OK;
}

int device_attribute(int *value, int attribute, int)
{
    switch (attribute) {
    case KVQ_GPU_MULTIPROCESSORS:
        *value = dev.options.multiprocessors;
        return KVQ_GPU_OK;
    case KVQ_GPU_CAPABILITY_MAJOR:
        *value = dev.options.capability / 10;
        return KVQ_GPU_OK;
    case KVQ_GPU_CAPABILITY_MINOR:
        *value = dev.options.capability % 10;
        return KVQ_GPU_OK;
    case KVQ_GPU_SHARED_PER_BLOCK:
        *value = (int)dev.options.shared_bytes;
        return KVQ_GPU_OK;
    default:
        return KVQ_GPU_INVALID_VALUE;
    }
}

int device_memory(size_t *bytes, int)
{
    *bytes = dev.options.memory;
    return KVQ_GPU_OK;
}

int context_retain(kvq_gpu_context **context, int)
{
    *context = (kvq_gpu_context *)&dev;
    return KVQ_GPU_OK;
}

int context_release(int)
{
    return KVQ_GPU_OK;
}

int context_set(kvq_gpu_context *context)
{
    dev.context = context;
    return KVQ_GPU_OK;
}

int context_get(kvq_gpu_context **context)
{
    *context = (kvq_gpu_context *)dev.context;
    return KVQ_GPU_OK;
}

int context_device(int *number)
{
    *number = 0;
    return dev.context ? KVQ_GPU_OK : 201; // invalid context
}

int context_sync()
{
    return KVQ_GPU_OK;
}

int module_load(kvq_gpu_module **module, const void *image)
{
    *module = (kvq_gpu_module *)&dev;
    return image ? KVQ_GPU_INVALID_VALUE : KVQ_GPU_OK;
}

int module_unload(kvq_gpu_module *)
{
    return KVQ_GPU_OK;
}

int module_function(kvq_gpu_function **function, kvq_gpu_module *, const char *name)
{
    for (kvq_gpu_function &f : dev.functions) {
        if (strcmp(f.kernel->name, name) == 0) {
            *function = &f;
            return KVQ_GPU_OK;
        }
    }
    return KVQ_GPU_NOT_FOUND;
}

int function_get(int *value, int attribute, kvq_gpu_function *function)
{
    return gpu::emu_function_get(value, attribute, function);
}

int function_set(kvq_gpu_function *function, int attribute, int value)
{
    return gpu::emu_function_set(function, attribute, value, dev.options.shared_bytes);
}

int limit_get(size_t *value, int limit)
{
    *value = dev.stack;
    return limit == KVQ_GPU_LIMIT_STACK ? KVQ_GPU_OK : KVQ_GPU_INVALID_VALUE;
}

int limit_set(int limit, size_t value)
{
    if (limit != KVQ_GPU_LIMIT_STACK)
        return KVQ_GPU_INVALID_VALUE;
    dev.stack = value;
    return KVQ_GPU_OK;
}

int function_blocks(int *blocks, kvq_gpu_function *, int threads, size_t shared)
{
    return gpu::emu_function_blocks(blocks, threads, shared, dev.options.shared_bytes);
}

int launch(kvq_gpu_function *f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
           unsigned block_y, unsigned block_z, unsigned shared, kvq_gpu_stream *stream, void **args,
           void **extra)
{
    guard g(dev.lock);
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    gpu::emu_job job;
    const int result = gpu::emu_make_job(f, grid, block, shared, args, extra, dev.options, &job,
                                         dev.report.text, sizeof(dev.report.text));
    return result ? result : give(stream, [=] { return job.run(&dev.report); });
}

// ---- Memory ----

int memory_info(size_t *free, size_t *total)
{
    guard g(dev.lock);
    const size_t used = gpu::emu_global_used();
    *total = dev.options.memory;
    *free = used < *total ? *total - used : 0;
    return KVQ_GPU_OK;
}

int memory_alloc(kvq_gpu_ptr *at, size_t bytes)
{
    guard g(dev.lock);
    size_t left, total;
    memory_info(&left, &total);
    if (bytes == 0)
        return KVQ_GPU_INVALID_VALUE;
    void *p = bytes <= left ? gpu::emu_global_alloc(bytes) : NULL;
    *at = (uintptr_t)p;
    return p ? KVQ_GPU_OK : KVQ_GPU_OUT_OF_MEMORY;
}

int memory_free(kvq_gpu_ptr at)
{
    guard g(dev.lock);
    return at == 0 || gpu::emu_global_free((void *)at) ? KVQ_GPU_OK : KVQ_GPU_INVALID_VALUE;
}

int host_alloc(void **at, size_t bytes, unsigned)
{
    *at = ::operator new(bytes);
    memset(*at, 0xff, bytes);
    return KVQ_GPU_OK;
}

int host_free(void *at)
{
    ::operator delete(at);
    return KVQ_GPU_OK;
}

// Whether device memory has these bytes; the message is the caller's business.
bool has(kvq_gpu_ptr at, size_t bytes)
{
    return bytes == 0 || gpu::emu_global_holds((const void *)at, bytes, true, ~0u);
}

int copy_in(kvq_gpu_ptr to, const void *from, size_t bytes, kvq_gpu_stream *stream)
{
    return give(stream, [=] {
        if (!has(to, bytes))
            return (int)KVQ_GPU_INVALID_VALUE;
        if (bytes > 0)
            memcpy((void *)to, from, bytes);
        return (int)KVQ_GPU_OK;
    });
}

int copy_out(void *to, kvq_gpu_ptr from, size_t bytes, kvq_gpu_stream *stream)
{
    return give(stream, [=] {
        if (!has(from, bytes))
            return (int)KVQ_GPU_INVALID_VALUE;
        if (bytes > 0)
            memcpy(to, (const void *)from, bytes);
        return (int)KVQ_GPU_OK;
    });
}

int copy_device(kvq_gpu_ptr to, kvq_gpu_ptr from, size_t bytes, kvq_gpu_stream *stream)
{
    return give(stream, [=] {
        if (!has(to, bytes) || !has(from, bytes))
            return (int)KVQ_GPU_INVALID_VALUE;
        if (bytes > 0)
            memmove((void *)to, (const void *)from, bytes);
        return (int)KVQ_GPU_OK;
    });
}

int fill8(kvq_gpu_ptr to, unsigned char value, size_t count, kvq_gpu_stream *stream)
{
    return give(stream, [=] {
        if (!has(to, count))
            return (int)KVQ_GPU_INVALID_VALUE;
        if (count > 0)
            memset((void *)to, value, count);
        return (int)KVQ_GPU_OK;
    });
}

int fill32(kvq_gpu_ptr to, unsigned value, size_t count, kvq_gpu_stream *stream)
{
    return give(stream, [=] {
        if (to % 4 != 0 || !has(to, 4 * count))
            return (int)KVQ_GPU_INVALID_VALUE;
        for (size_t i = 0; i < count; i++)
            memcpy((char *)to + 4 * i, &value, 4);
        return (int)KVQ_GPU_OK;
    });
}

// ---- What crosses processes, and what tells about memory: not here ----

int device_uuid(kvq_gpu_uuid *uuid, int)
{
    memset(uuid, 0, sizeof(*uuid));
    memcpy(uuid, "kvq-emulator", 12);
    return KVQ_GPU_OK;
}

// Any function, which refuses.
struct refusal {
    template <typename... Args> using function = int (*)(Args...);
    template <typename... Args> static int refuse(Args...)
    {
        return KVQ_GPU_NOT_SUPPORTED;
    }
    template <typename... Args> operator function<Args...>() const
    {
        return refuse<Args...>;
    }
};
const refusal memory_granularity, memory_create, memory_release, memory_retain, memory_export;
const refusal memory_import;
const refusal address_reserve, address_free, memory_map, memory_unmap, memory_access;
const refusal ipc_memory_get, ipc_memory_open, ipc_memory_close, ipc_event_get, ipc_event_open;
const refusal pointer_get, address_range, host_register, host_unregister, host_device;

// ---- Streams, events, graphs ----

int stream_create(kvq_gpu_stream **stream, unsigned)
{
    *stream = new kvq_gpu_stream();
    return KVQ_GPU_OK;
}

int stream_destroy(kvq_gpu_stream *stream)
{
    delete stream;
    return KVQ_GPU_OK;
}

// A stream that is captured may not be waited for.
int stream_sync(kvq_gpu_stream *stream)
{
    return stream && stream->capture ? 900 : KVQ_GPU_OK; // capture unsupported
}

int stream_wait(kvq_gpu_stream *, kvq_gpu_event *, unsigned)
{
    return KVQ_GPU_OK; // what was recorded before is done
}

// Nobody writes while this waits, so it waits for ever or not at all.
int stream_wait64(kvq_gpu_stream *stream, kvq_gpu_ptr at, uint64_t value, unsigned flags)
{
    return give(stream, [=] {
        uint64_t now;
        if (flags != KVQ_GPU_WAIT_AT_LEAST || at % 8 != 0 || !has(at, 8))
            return (int)KVQ_GPU_INVALID_VALUE;
        memcpy(&now, (const void *)at, 8);
        if ((int64_t)(now - value) >= 0)
            return (int)KVQ_GPU_OK;
        snprintf(dev.report.text, sizeof(dev.report.text),
                 "a stream waits for %llu, and %llu stands there", (unsigned long long)value,
                 (unsigned long long)now);
        return (int)KVQ_GPU_LAUNCH_FAILED;
    });
}

int stream_write64(kvq_gpu_stream *stream, kvq_gpu_ptr at, uint64_t value, unsigned)
{
    return give(stream, [=] {
        if (at % 8 != 0 || !has(at, 8))
            return (int)KVQ_GPU_INVALID_VALUE;
        memcpy((void *)at, &value, 8);
        return (int)KVQ_GPU_OK;
    });
}

int event_create(kvq_gpu_event **event, unsigned)
{
    *event = new kvq_gpu_event();
    return KVQ_GPU_OK;
}

int event_destroy(kvq_gpu_event *event)
{
    delete event;
    return KVQ_GPU_OK;
}

int event_record(kvq_gpu_event *event, kvq_gpu_stream *)
{
    event->recorded = true;
    return KVQ_GPU_OK;
}

int event_done(kvq_gpu_event *)
{
    return KVQ_GPU_OK;
}

int event_elapsed(float *, kvq_gpu_event *, kvq_gpu_event *)
{
    return KVQ_GPU_NOT_SUPPORTED; // there is no time in here
}

int capture_begin(kvq_gpu_stream *stream, int)
{
    if (!stream || stream->capture)
        return KVQ_GPU_INVALID_VALUE;
    stream->capture = new kvq_gpu_graph();
    return KVQ_GPU_OK;
}

int capture_end(kvq_gpu_stream *stream, kvq_gpu_graph **graph)
{
    if (!stream || !stream->capture)
        return KVQ_GPU_INVALID_VALUE;
    *graph = stream->capture;
    stream->capture = NULL;
    return KVQ_GPU_OK;
}

int graph_ready(kvq_gpu_exec **exec, kvq_gpu_graph *graph, unsigned long long)
{
    *exec = new kvq_gpu_exec();
    (*exec)->nodes = graph->nodes;
    return KVQ_GPU_OK;
}

int graph_launch(kvq_gpu_exec *exec, kvq_gpu_stream *)
{
    guard g(dev.lock);
    for (const work &w : exec->nodes)
        if (const int result = w())
            return result;
    return KVQ_GPU_OK;
}

int exec_destroy(kvq_gpu_exec *exec)
{
    delete exec;
    return KVQ_GPU_OK;
}

int graph_destroy(kvq_gpu_graph *graph)
{
    delete graph;
    return KVQ_GPU_OK;
}

int launch_host(kvq_gpu_stream *stream, void (*function)(void *), void *data)
{
    return give(stream, [=] {
        function(data);
        return (int)KVQ_GPU_OK;
    });
}

int stream_capturing(kvq_gpu_stream *stream, int *status)
{
    *status = stream && stream->capture ? KVQ_GPU_CAPTURE_ACTIVE : KVQ_GPU_CAPTURE_NONE;
    return KVQ_GPU_OK;
}

const auto stream_query = stream_sync;
const auto event_query = event_done, event_sync = event_done;
} // namespace

void kvq_emu_set(const struct kvq_emu_options *options)
{
    guard g(dev.lock);
    dev.options = gpu::emu_complete(options);
}

const struct kvq_gpu_driver *kvq_emu_driver_with(const struct kvq_emu_kernel *kernels, size_t n)
{
    static struct kvq_gpu_driver table;
    guard g(dev.lock);
    if (dev.options.seed == 0)
        kvq_emu_set(NULL);
    dev.functions.clear();
    for (size_t i = 0; i < n; i++)
        dev.functions.push_back({&kernels[i], gpu::EMU_DEFAULT_SHARED});
    dev.context = &dev;
    table.name = "emulator";
    table.kernels_inside = true;
#define FILL(field, symbol, args) table.field = field;
    KVQ_GPU_CALLS(FILL)
#undef FILL
    return &table;
}

size_t kvq_emu_allocations(void)
{
    guard g(dev.lock);
    return gpu::emu_global_pieces();
}

namespace gpu
{
const emu_report *emu_last_report()
{
    return &dev.report;
}
} // namespace gpu
