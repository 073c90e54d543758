// SPDX-License-Identifier: Apache-2.0
//
// What the kernels take for granted about a GPU, as kernels that show it.
#ifndef KVQ_KERNELS_CUDA_PROBE_H
#define KVQ_KERNELS_CUDA_PROBE_H

#include <stdint.h>

// One mma, by one warp: d = a b + c with fragments as kernels/emu/dialect.h has them. Tells whether
// fp16 subnormals count in full, which unpacking rests on, and how sums are rounded.
struct kvq_gpu_probe_mma_args {
    const uint32_t *a; // [32 lanes][4]
    const uint32_t *b; // [32 lanes][2]
    const float *c;    // [32 lanes][4]
    float *d;          // [32 lanes][4]
};

#endif
