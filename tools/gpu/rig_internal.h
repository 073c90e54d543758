// SPDX-License-Identifier: Apache-2.0
//
// What the files of the rig share.
#ifndef KVQ_TOOLS_GPU_RIG_INTERNAL_H
#define KVQ_TOOLS_GPU_RIG_INTERNAL_H

#include "kernels/cuda/attend.h"
#include "kernels/cuda/cache.h"
#include "kernels/kernels.h"
#include "tools/gpu/rig.h"

struct rig {
    const struct kvq_gpu_driver *driver;
    struct kvq_gpu_driver own; // zeros with the emulator
    struct kvq_gpu gpu;
    uint64_t sums; // device: where probes leave what nobody reads; 0 before the first
};

// 0, or -1 with what failed and why.
int rig__fault(const struct rig *rig, int result, const char *what, char *text);

// New device memory with a copy of these bytes.
int rig__put(const struct rig *rig, uint64_t *device, const void *from, size_t bytes, char *text);

#endif
