// SPDX-License-Identifier: Apache-2.0
//
// The kernels of list.h for the emulator, by name.
#include "kernels/cuda/list.h"

#include "kernels/cuda/attend.h"
#include "kernels/cuda/cache.h"
#include "kernels/cuda/probe.h"
#include "kernels/emu/driver.h"

#define DECLARE(ID, name, type) void name(const type &);
KVQ_GPU_KERNELS(DECLARE)

#define RUN(ID, name, type)                                                                        \
    static void run_##name(const void *args)                                                       \
    {                                                                                              \
        name(*(const type *)args);                                                                 \
    }
KVQ_GPU_KERNELS(RUN)

static const struct kvq_emu_kernel kernels[] = {
#define ROW(ID, name, type) {#name, run_##name, sizeof(type)},
    KVQ_GPU_KERNELS(ROW)};

const struct kvq_emu_kernel *kvq_emu_kernels(size_t *n)
{
    *n = KVQ_KERNELS;
    return kernels;
}

const struct kvq_gpu_driver *kvq_emu_driver(void)
{
    return kvq_emu_driver_with(kernels, KVQ_KERNELS);
}
