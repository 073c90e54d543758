// SPDX-License-Identifier: Apache-2.0
//
// Kernels as a driver has them: functions with attributes, and launches whose shape and argument
// are checked before anything runs. What both emulated drivers share.
#ifndef KVQ_KERNELS_EMU_FUNCTION_H
#define KVQ_KERNELS_EMU_FUNCTION_H

#include <vector>

#include "kernels/emu/driver.h"

struct kvq_gpu_function {
    const kvq_emu_kernel *kernel;
    uint32_t dynamic_shared; // most that a launch may ask for
};

namespace gpu
{
enum {
    EMU_DEFAULT_SHARED = 48 * 1024,
    EMU_DEFAULT_STACK = 1024,
    EMU_WIDE_STACK = 1280, // of wide attention, about what nvcc 13.0 makes of it for sm_90a
};

// Zeros of the options become what kvq_emu_set says.
kvq_emu_options emu_complete(const kvq_emu_options *options);

int emu_function_get(int *value, int attribute, const kvq_gpu_function *function);
int emu_function_set(kvq_gpu_function *function, int attribute, int value, uint32_t most_shared);
int emu_function_blocks(int *blocks, int threads, size_t shared, uint32_t most_shared);

// A launch that has been checked, with a copy of its argument.
struct emu_job {
    const kvq_emu_kernel *kernel;
    emu_shape shape;
    std::vector<uint64_t> args;        // aligned as any struct is
    int run(emu_report *report) const; // KVQ_GPU_OK or KVQ_GPU_LAUNCH_FAILED, report saying why
};

// The arguments are cuLaunchKernel's: grid and block have x, y and z. KVQ_GPU_OK, or
// KVQ_GPU_LAUNCH_FAILED and a sentence in text.
int emu_make_job(const kvq_gpu_function *function, const unsigned grid[3], const unsigned block[3],
                 unsigned shared, void **args, void **extra, const kvq_emu_options &options,
                 emu_job *job, char *text, size_t n);
} // namespace gpu

#endif
