// SPDX-License-Identifier: Apache-2.0
//
// Every kernel there is: what the host launches by number, what cubins are searched for, and what
// the emulator has by name. X(ID, name, type of its one argument).
//
// A kernel is made by KVQ_KERNEL(name, type, a) in a .cu file (kernels/cuda/CMakeLists.txt lists
// those); its argument's type is a plain C struct in a header that registry.cpp includes.
#ifndef KVQ_KERNELS_CUDA_LIST_H
#define KVQ_KERNELS_CUDA_LIST_H

#include "kernels/cuda/attend_list.h"

// clang-format off
#define KVQ_GPU_KERNELS(X)                                                                         \
    X(PROBE_MMA, kvq_gpu_probe_mma, struct kvq_gpu_probe_mma_args)                                 \
    X(PROBE_READ, kvq_gpu_probe_read, struct kvq_gpu_probe_read_args)                              \
    X(PROBE_MMA_RATE, kvq_gpu_probe_mma_rate, struct kvq_gpu_probe_rate_args)                      \
    X(PROBE_LOGIC_RATE, kvq_gpu_probe_logic_rate, struct kvq_gpu_probe_rate_args)                  \
    X(STORE, kvq_gpu_store_all, struct kvq_gpu_store_args)                                         \
    X(LEARN, kvq_gpu_learn_all, struct kvq_gpu_learn_args)                                         \
    X(COMPETE, kvq_gpu_compete, struct kvq_gpu_compete_args)                                       \
    X(PACK_D64, kvq_gpu_pack_d64, struct kvq_gpu_pack_args)                                        \
    X(PACK_D128, kvq_gpu_pack_d128, struct kvq_gpu_pack_args)                                      \
    X(PACK_D256, kvq_gpu_pack_d256, struct kvq_gpu_pack_args)                                      \
    X(READ_D64, kvq_gpu_read_d64, struct kvq_gpu_read_args)                                        \
    X(READ_D128, kvq_gpu_read_d128, struct kvq_gpu_read_args)                                      \
    X(READ_D256, kvq_gpu_read_d256, struct kvq_gpu_read_args)                                      \
    X(COPY, kvq_gpu_copy_all, struct kvq_gpu_copy_args)                                            \
    X(KEEP, kvq_gpu_keep_all, struct kvq_gpu_keep_args)                                            \
    X(PUT, kvq_gpu_put_all, struct kvq_gpu_put_args)                                               \
    X(MERGE, kvq_gpu_merge_all, struct kvq_gpu_merge_args)                                         \
    KVQ_GPU_ATTEND_KERNELS(X)
// clang-format on

enum kvq_gpu_kernel {
#define KVQ_GPU_ID(ID, name, type) KVQ_KERNEL_##ID,
    KVQ_GPU_KERNELS(KVQ_GPU_ID)
#undef KVQ_GPU_ID
        KVQ_KERNELS
};

#endif
