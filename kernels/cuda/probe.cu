// SPDX-License-Identifier: Apache-2.0
//
// The kernels of probe.h.
#include "kernels/cuda/probe.h"

#include "kernels/emu/dialect.h"

KVQ_KERNEL(kvq_gpu_probe_mma, kvq_gpu_probe_mma_args, p)
{
    const int lane = gpu::lane();
    float d[4];
    gpu::mma(d, p.a + 4 * lane, p.b[2 * lane], p.b[2 * lane + 1], p.c + 4 * lane);
    for (int i = 0; i < 4; i++)
        p.d[4 * lane + i] = d[i];
}
