// SPDX-License-Identifier: Apache-2.0
//
// The cubins that the build made, inside the program. gpu_images.h, which the build writes, lists
// them: X(name of the .cu file, architecture, capability, only, path); nothing without CUDA.
#include "kernels/cuda/gpu.h"
#include "kernels/cuda/gpu_images.h"

#define EMBED(file, arch, capability, only, path)                                                  \
    __asm__(".section .rodata\n.balign 64\n"                                                       \
            "kvq__gpu_" #file "_" #arch ":\n.incbin \"" path "\"\n"                                \
            "kvq__gpu_" #file "_" #arch "_end:\n.balign 64\n.previous\n");                         \
    extern const char kvq__gpu_##file##_##arch[], kvq__gpu_##file##_##arch##_end[];
KVQ_GPU_IMAGES(EMBED)

static const struct kvq_gpu_image images[] = {
#define IMAGE(file, arch, capability, only, path)                                                  \
    {capability, only, #file "." #arch, kvq__gpu_##file##_##arch, kvq__gpu_##file##_##arch##_end},
    KVQ_GPU_IMAGES(IMAGE){0, false, NULL, NULL, NULL},
};

const struct kvq_gpu_image *kvq_gpu_images(void)
{
    return images;
}

int kvq_gpu_images_cuda(void)
{
    return KVQ_GPU_IMAGES_CUDA;
}
