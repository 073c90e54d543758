// SPDX-License-Identifier: Apache-2.0
//
// Functions and launches of the emulated drivers; see function.h.
#include "kernels/emu/function.h"

#include <stdio.h>
#include <string.h>

#include "kernels/emu/global.h"

namespace gpu
{
kvq_emu_options emu_complete(const kvq_emu_options *options)
{
    kvq_emu_options o = options ? *options : kvq_emu_options();
    o.seed = o.seed ? o.seed : 1;
    o.multiprocessors = o.multiprocessors ? o.multiprocessors : 132;
    o.capability = o.capability ? o.capability : 90;
    o.shared_bytes = o.shared_bytes ? o.shared_bytes : 227 * 1024;
    o.memory = o.memory ? o.memory : (uint64_t)64 << 30;
    return o;
}

int emu_function_get(int *value, int attribute, const kvq_gpu_function *function)
{
    *value = 0;
    if (attribute == KVQ_GPU_DYNAMIC_SHARED)
        *value = (int)function->dynamic_shared;
    if (attribute == KVQ_GPU_LOCAL_BYTES && strstr(function->kernel->name, "attend_wide"))
        *value = EMU_WIDE_STACK;
    return KVQ_GPU_OK;
}

int emu_function_set(kvq_gpu_function *function, int attribute, int value, uint32_t most_shared)
{
    if (attribute != KVQ_GPU_DYNAMIC_SHARED || value < 0 || (uint32_t)value > most_shared)
        return KVQ_GPU_INVALID_VALUE;
    function->dynamic_shared = (uint32_t)value;
    return KVQ_GPU_OK;
}

// As many as their shared memory allows, since nothing else is known here.
int emu_function_blocks(int *blocks, int threads, size_t shared, uint32_t most_shared)
{
    const size_t each = shared + 1024, by_shared = (most_shared + 1024) / each;
    const size_t by_threads = 2048 / (size_t)threads;
    *blocks = (int)(by_shared < by_threads ? by_shared : by_threads);
    return KVQ_GPU_OK;
}

int emu_job::run(emu_report *report) const
{
    char spilled[256];
    if (emu_launch(kernel->run, args.data(), shape, report) != 0)
        return KVQ_GPU_LAUNCH_FAILED;
    if (!emu_global_spilled(spilled, sizeof(spilled)))
        return KVQ_GPU_OK;
    snprintf(report->text, sizeof(report->text), "%s: %s", kernel->name, spilled);
    return KVQ_GPU_LAUNCH_FAILED;
}

// Why a launch cannot be, or NULL; the value that is wrong goes to *value.
static const char *refusal(const kvq_gpu_function *f, const unsigned grid[3],
                           const unsigned block[3], unsigned shared, void **args, void **extra,
                           size_t *value)
{
    *value = 0;
    if (args || !extra || extra[0] != (void *)1 || extra[2] != (void *)2)
        return "the emulator takes arguments as one buffer";
    *value = *(const size_t *)extra[3];
    if (*value != f->kernel->bytes)
        return "launched with an argument of another size than it has";
    *value = grid[1];
    if (grid[0] == 0 || grid[1] == 0 || grid[1] > 65535 || grid[2] != 1 || block[1] != 1 ||
        block[2] != 1)
        return "a grid that a GPU or the emulator cannot have";
    *value = block[0];
    if (block[0] == 0 || block[0] % 32 != 0 || block[0] > 1024)
        return "threads must be a multiple of 32, at most 1024";
    *value = shared;
    return shared > f->dynamic_shared ? "more shared memory than the function was allowed" : NULL;
}

int emu_make_job(const kvq_gpu_function *function, const unsigned grid[3], const unsigned block[3],
                 unsigned shared, void **args, void **extra, const kvq_emu_options &options,
                 emu_job *job, char *text, size_t n)
{
    size_t value;
    const char *why = refusal(function, grid, block, shared, args, extra, &value);
    if (why) {
        snprintf(text, n, "%s: %s (%zu)", function->kernel->name, why, value);
        return KVQ_GPU_LAUNCH_FAILED;
    }
    const size_t bytes = function->kernel->bytes;
    job->kernel = function->kernel;
    job->args.resize((bytes + 7) / 8);
    job->shape = {(int)grid[0], (int)grid[1],     (int)block[0], shared,
                  options.seed, options.truncate, true};
    memcpy(job->args.data(), extra[1], bytes);
    return KVQ_GPU_OK;
}
} // namespace gpu
