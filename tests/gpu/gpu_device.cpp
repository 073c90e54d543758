// SPDX-License-Identifier: Apache-2.0
//
// See gpu_device.h.
#include "tests/gpu/gpu_device.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/emu/driver.h"

enum { SKIPPED = 77 };

bool gpu_device_is_emulated(void)
{
    return getenv("KVQ_GPU") == NULL;
}

static void need(const kvq_gpu_driver *d, int result, const char *what)
{
    char text[512];
    if (result == KVQ_GPU_OK)
        return;
    kvq_gpu_fault(d, result, what, text, sizeof(text));
    printf("KVQ_GPU=%s: %s; skipped\n", getenv("KVQ_GPU"), text);
    exit(SKIPPED);
}

static const kvq_gpu_driver *open_gpu(int number)
{
    static kvq_gpu_driver d;
    static kvq_gpu_context *context;
    char text[512];
    int device;
    if (context)
        return &d;
    if (kvq_gpu_driver_open(&d, getenv("KVQ_GPU_DRIVER"), text, sizeof(text)) != 0) {
        printf("KVQ_GPU=%d: %s; skipped\n", number, text);
        exit(SKIPPED);
    }
    need(&d, d.init(0), "starting the driver");
    need(&d, d.device_get(&device, number), "looking for the GPU");
    need(&d, d.context_retain(&context, device), "making a context");
    need(&d, d.context_set(context), "making the context current");
    return &d;
}

const struct kvq_gpu_driver *gpu_device(void)
{
    return gpu_device_is_emulated() ? kvq_emu_driver()
                                    : open_gpu((int)strtol(getenv("KVQ_GPU"), NULL, 10));
}
