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

// Reads records into shared memory as attention does, PROBE_STAGES of them on their way in each
// block, and nothing else: what memory gives at best. 32 threads a block, PROBE_STAGES records and
// 64 bytes of shared memory.
enum { KVQ_GPU_PROBE_STAGES = 4 };

struct kvq_gpu_probe_read_args {
    const uint8_t *records;
    uint32_t record_bytes; // a multiple of 512
    uint32_t n_records;
    uint32_t *sums; // [blocks][32]: so that the reading is not for nothing
};

// Chains of instructions that depend only on themselves, PROBE_CHAINS in every thread: products of
// tensor cores (4,096 operations of a warp each), or three-input logic (one operation of a thread).
enum { KVQ_GPU_PROBE_CHAINS = 8 };

struct kvq_gpu_probe_rate_args {
    uint32_t rounds; // instructions in a chain
    uint32_t seed;
    uint32_t *sums; // [blocks][128]
};

#endif
