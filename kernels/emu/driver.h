// SPDX-License-Identifier: Apache-2.0
//
// The table of kernels/cuda/driver.h filled by the emulator: device memory is host memory, a device
// pointer is a pointer, work is done at once when it is given to a stream (or recorded while the
// stream is captured), and functions are those of a list in this program.
//
// A launch that the emulator refuses ends with KVQ_GPU_LAUNCH_FAILED, and error_text tells why,
// with the source lines. New device memory holds NaN; writing behind an allocation is found after
// the launch, reading there by the words of the dialect or by a crash.
//
// For tests: any thread may call, one works at a time; memory that runs out ends the process.
#ifndef KVQ_KERNELS_EMU_DRIVER_H
#define KVQ_KERNELS_EMU_DRIVER_H

#include "kernels/cuda/driver.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvq_emu_kernel {
    const char *name;
    void (*run)(const void *args);
    size_t bytes; // of the argument
};

// The device. Zeros become: seed 1, 132 multiprocessors, compute capability 9.0, 227 KiB of shared
// memory for a block, 64 GiB of device memory.
struct kvq_emu_options {
    uint64_t seed; // draws every order
    bool truncate; // how an mma sums, see emu.h
    int multiprocessors;
    int capability; // 10 * major + minor
    uint32_t shared_bytes;
    uint64_t memory;
};
void kvq_emu_set(const struct kvq_emu_options *options); // NULL: all zeros

// The emulator with every kernel of kernels/cuda/list.h, and that list alone; defined there, in
// registry.cpp.
const struct kvq_gpu_driver *kvq_emu_driver(void);
const struct kvq_emu_kernel *kvq_emu_kernels(size_t *n);

// The same with a list of a test's own. There is one device: the latest list counts.
const struct kvq_gpu_driver *kvq_emu_driver_with(const struct kvq_emu_kernel *kernels, size_t n);

size_t kvq_emu_allocations(void); // pieces of device memory not freed yet

#ifdef __cplusplus
}

#include "kernels/emu/emu.h"

namespace gpu
{
// How the last launch ended.
const emu_report *emu_last_report();
} // namespace gpu
#endif

#endif
