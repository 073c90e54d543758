// SPDX-License-Identifier: Apache-2.0
//
// Opening with the kernels inside this program. Apart from gpu.c, so that a program that gets its
// kernels from elsewhere, as libkvq does from the daemon, does without the images.
#include "kernels/cuda/gpu.h"

#include <string.h>

int kvq_gpu_open(struct kvq_gpu *gpu, const struct kvq_gpu_driver *driver, char *text, size_t n)
{
    if (!driver->kernels_inside && kvq_gpu_driver_check(driver, kvq_gpu_images_cuda(), text, n)) {
        memset(gpu, 0, sizeof *gpu);
        return -1;
    }
    return kvq_gpu_open_images(gpu, driver, driver->kernels_inside ? NULL : kvq_gpu_images(), text,
                               n);
}
