// SPDX-License-Identifier: Apache-2.0
//
// Every kernel there is: what the host launches by number, what cubins are searched for, and what
// the emulator has by name. X(ID, name, type of its one argument).
//
// A kernel is made by KVQ_KERNEL(name, type, a) in a .cu file (kernels/cuda/CMakeLists.txt lists
// those); its argument's type is a plain C struct in a header that registry.cpp includes.
#ifndef KVQ_KERNELS_CUDA_LIST_H
#define KVQ_KERNELS_CUDA_LIST_H

#define KVQ_GPU_KERNELS(X) X(PROBE_MMA, kvq_gpu_probe_mma, struct kvq_gpu_probe_mma_args)

enum kvq_gpu_kernel {
#define KVQ_GPU_ID(ID, name, type) KVQ_KERNEL_##ID,
    KVQ_GPU_KERNELS(KVQ_GPU_ID)
#undef KVQ_GPU_ID
        KVQ_KERNELS
};

#endif
