// SPDX-License-Identifier: Apache-2.0
//
// The wide attention kernels.
#include "kernels/cuda/attend_wide.h"

#define KVQ_GPU_ATTEND_WIDE(D)                                                                     \
    KVQ_KERNEL_FOR(kvq_gpu_attend_wide_d##D, kvq_gpu_attend_args, a, KVQ_GPU_THREADS, 2)           \
    {                                                                                              \
        kvq_gpu_wide_all<D>(a);                                                                    \
    }

KVQ_GPU_ATTEND_WIDE(64)
KVQ_GPU_ATTEND_WIDE(128)
KVQ_GPU_ATTEND_WIDE(256)
