// SPDX-License-Identifier: Apache-2.0
//
// See rig.h: devices and memory here, caches in rig_cache.c.
#include "tools/gpu/rig_internal.h"

#include <stdio.h>
#include <stdlib.h>

#ifdef RIG_EMULATED
#include "kernels/emu/driver.h"
#endif

int rig__fault(const struct rig *rig, int result, const char *what, char *text)
{
    return result == KVQ_GPU_OK ? 0 : kvq_gpu_fault(rig->driver, result, what, text, RIG_TEXT);
}

static int open_driver(struct rig *rig, char *text)
{
#ifdef RIG_EMULATED
    rig->driver = kvq_emu_driver();
    (void)text;
    return 0;
#else
    rig->driver = &rig->own;
    return kvq_gpu_driver_open(&rig->own, NULL, text, RIG_TEXT);
#endif
}

// The context that is current, as a library beside us made it; else the first device's.
static int find_context(struct rig *rig, char *text)
{
    const struct kvq_gpu_driver *d = rig->driver;
    struct kvq_gpu_context *context = NULL;
    int device;
    if (rig__fault(rig, d->init(0), "starting the driver", text))
        return -1;
    if (d->context_get(&context) == KVQ_GPU_OK && context)
        return 0;
    if (rig__fault(rig, d->device_get(&device, 0), "looking for a GPU", text) ||
        rig__fault(rig, d->context_retain(&context, device), "making a context", text))
        return -1;
    return rig__fault(rig, d->context_set(context), "making the context current", text);
}

int rig_open(struct rig **rig, char *text)
{
    struct rig *r = calloc(1, sizeof *r);
    *rig = r;
    if (!r) {
        snprintf(text, RIG_TEXT, "no memory");
        return -1;
    }
    if (open_driver(r, text) || find_context(r, text) ||
        kvq_gpu_open(&r->gpu, r->driver, text, RIG_TEXT)) {
        rig_close(r);
        *rig = NULL;
        return -1;
    }
    return 0;
}

void rig_close(struct rig *rig)
{
    if (rig->driver)
        rig_give(rig, rig->sums);
    if (rig->gpu.driver)
        kvq_gpu_close(&rig->gpu);
    kvq_gpu_driver_close(&rig->own);
    free(rig);
}

int rig_multiprocessors(const struct rig *rig)
{
    return rig->gpu.multiprocessors;
}

int rig_sync(const struct rig *rig, char *text)
{
    return rig__fault(rig, rig->driver->context_sync(), "waiting for the device", text);
}

// ---- Memory ----

int rig_take(const struct rig *rig, uint64_t *device, size_t bytes, char *text)
{
    return rig__fault(rig, rig->driver->memory_alloc(device, bytes ? bytes : 1),
                      "taking device memory", text);
}

void rig_give(const struct rig *rig, uint64_t device)
{
    if (device)
        rig->driver->memory_free(device);
}

int rig_copy_in(const struct rig *rig, uint64_t device, const void *from, size_t bytes, char *text)
{
    return rig__fault(rig, rig->driver->copy_in(device, from, bytes, NULL), "copying to the device",
                      text) ||
                   rig_sync(rig, text)
               ? -1
               : 0;
}

int rig_copy_out(const struct rig *rig, void *to, uint64_t device, size_t bytes, char *text)
{
    return rig__fault(rig, rig->driver->copy_out(to, device, bytes, NULL),
                      "copying from the device", text) ||
                   rig_sync(rig, text)
               ? -1
               : 0;
}

int rig__put(const struct rig *rig, uint64_t *device, const void *from, size_t bytes, char *text)
{
    return rig_take(rig, device, bytes, text) || rig_copy_in(rig, *device, from, bytes, text) ? -1
                                                                                              : 0;
}
