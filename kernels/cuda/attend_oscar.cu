// SPDX-License-Identifier: Apache-2.0
//
// The kernels of decode attention over oscar blocks. Compiled by nvcc for the GPU and by a C++
// compiler for the emulator.
#include "kernels/cuda/attend_oscar.h"

#define KVQ_GPU_DEFINE(D, BITS)                                                                    \
    KVQ_GPU_ATTEND_OSCAR(D, BITS)                                                                  \
    {                                                                                              \
        kvq_gpu_attend_split<D, BITS>(a);                                                          \
    }

KVQ_GPU_ATTEND_OSCAR_ALL(KVQ_GPU_DEFINE)
