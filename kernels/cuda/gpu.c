// SPDX-License-Identifier: Apache-2.0
//
// Loading and launching kernels; see gpu.h.
#include "kernels/cuda/gpu.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static const char *const names[KVQ_KERNELS] = {
#define NAME(ID, name, type) [KVQ_KERNEL_##ID] = #name,
    KVQ_GPU_KERNELS(NAME)
#undef NAME
};

const char *kvq_gpu_kernel_name(enum kvq_gpu_kernel kernel)
{
    assert((unsigned)kernel < KVQ_KERNELS);
    return names[kernel];
}

static int ask_device(struct kvq_gpu *gpu, char *text, size_t n)
{
    const struct kvq_gpu_driver *d = gpu->driver;
    int major = 0, minor = 0, shared = 0;
    int result = d->context_device(&gpu->device);
    if (result)
        return kvq_gpu_fault(d, result, "no GPU context is current in this thread", text, n);
    result = d->device_attribute(&major, KVQ_GPU_CAPABILITY_MAJOR, gpu->device);
    if (!result)
        result = d->device_attribute(&minor, KVQ_GPU_CAPABILITY_MINOR, gpu->device);
    if (!result)
        result = d->device_attribute(&gpu->multiprocessors, KVQ_GPU_MULTIPROCESSORS, gpu->device);
    if (!result)
        result = d->device_attribute(&shared, KVQ_GPU_SHARED_PER_BLOCK, gpu->device);
    if (result)
        return kvq_gpu_fault(d, result, "asking the GPU what it is", text, n);
    gpu->capability = 10 * major + minor;
    gpu->shared_bytes = (uint32_t)shared;
    return 0;
}

static int load_module(struct kvq_gpu *gpu, const char *name, const void *image, char *text,
                       size_t n)
{
    char what[128];
    assert(gpu->n_modules < KVQ_GPU_MAX_MODULES);
    int result = gpu->driver->module_load(&gpu->modules[gpu->n_modules], image);
    snprintf(what, sizeof what, "loading the kernels of %s", name);
    if (result)
        return kvq_gpu_fault(gpu->driver, result, what, text, n);
    gpu->n_modules++;
    return 0;
}

static bool runs(const struct kvq_gpu_image *image, int capability)
{
    return image->only
               ? image->capability == capability
               : image->capability / 10 == capability / 10 && image->capability <= capability;
}

// All images of the best capability that runs on this device.
static int load_images(struct kvq_gpu *gpu, const struct kvq_gpu_image *images, char *text,
                       size_t n)
{
    int best = 0;
    if (!images->name) {
        snprintf(text, n,
                 "this program was built without GPU kernels: build it with "
                 "-DKVQ_CUDA=ON, which needs nvcc");
        return -1;
    }
    for (const struct kvq_gpu_image *i = images; i->name; i++)
        if (runs(i, gpu->capability) && i->capability > best)
            best = i->capability;
    if (!best) {
        snprintf(text, n,
                 "this program has no kernels for a GPU of compute capability %d.%d: build it "
                 "with -DKVQ_CUDA_ARCHITECTURES=%d",
                 gpu->capability / 10, gpu->capability % 10, gpu->capability);
        return -1;
    }
    for (const struct kvq_gpu_image *i = images; i->name; i++)
        if (i->capability == best && load_module(gpu, i->name, i->bytes, text, n))
            return -1;
    gpu->image_capability = best;
    return 0;
}

// Finds a kernel in whatever module has it and allows it all the shared memory there is.
static int find_kernel(struct kvq_gpu *gpu, int kernel, char *text, size_t n)
{
    const struct kvq_gpu_driver *d = gpu->driver;
    struct kvq_gpu_function *f = NULL;
    int fixed = 0, result = KVQ_GPU_NOT_FOUND;
    for (int i = 0; i < gpu->n_modules && result == KVQ_GPU_NOT_FOUND; i++)
        result = d->module_function(&f, gpu->modules[i], names[kernel]);
    if (!result)
        result = d->function_get(&fixed, KVQ_GPU_STATIC_SHARED, f);
    if (!result)
        result = d->function_set(f, KVQ_GPU_DYNAMIC_SHARED, (int)gpu->shared_bytes - fixed);
    if (result)
        return kvq_gpu_fault(d, result, names[kernel], text, n);
    gpu->functions[kernel] = f;
    return 0;
}

// A thread's stack is as large as any kernel so far has needed, and the driver makes it larger in
// the launch of one that needs more. That launch waits for all work of the context: also for a
// stream that waits for a client. So the stack is made large enough here. Where it cannot be, that
// is left to the launches.
static int take_stack(const struct kvq_gpu *gpu, char *text, size_t n)
{
    const struct kvq_gpu_driver *d = gpu->driver;
    int bytes = 0, most = 0, result = KVQ_GPU_OK;
    size_t has = 0;
    for (int kernel = 0; kernel < KVQ_KERNELS && result == KVQ_GPU_OK; kernel++) {
        result = d->function_get(&bytes, KVQ_GPU_LOCAL_BYTES, gpu->functions[kernel]);
        most = bytes > most ? bytes : most;
    }
    if (result)
        return kvq_gpu_fault(d, result, "asking what the kernels need", text, n);
    if (d->limit_get(&has, KVQ_GPU_LIMIT_STACK) == KVQ_GPU_OK && has < (size_t)most)
        d->limit_set(KVQ_GPU_LIMIT_STACK, (size_t)most);
    return 0;
}

int kvq_gpu_open_images(struct kvq_gpu *gpu, const struct kvq_gpu_driver *driver,
                        const struct kvq_gpu_image *images, char *text, size_t n)
{
    memset(gpu, 0, sizeof *gpu);
    gpu->driver = driver;
    if (ask_device(gpu, text, n))
        goto error;
    if (images ? load_images(gpu, images, text, n) : load_module(gpu, driver->name, NULL, text, n))
        goto error;
    for (int kernel = 0; kernel < KVQ_KERNELS; kernel++)
        if (find_kernel(gpu, kernel, text, n))
            goto error;
    if (take_stack(gpu, text, n))
        goto error;
    return 0;
error:
    kvq_gpu_close(gpu);
    return -1;
}

void kvq_gpu_close(struct kvq_gpu *gpu)
{
    for (int i = gpu->n_modules; i-- > 0;)
        gpu->driver->module_unload(gpu->modules[i]);
    memset(gpu, 0, sizeof *gpu);
}

int kvq_gpu_launch(const struct kvq_gpu *gpu, enum kvq_gpu_kernel kernel,
                   const struct kvq_gpu_grid *grid, const void *args, size_t bytes, char *text,
                   size_t n)
{
    // The driver API takes an argument of known size either way; so sizes can be checked.
    void *extra[] = {(void *)1, (void *)args, (void *)2, &bytes, NULL};
    assert((unsigned)kernel < KVQ_KERNELS && bytes <= KVQ_GPU_MAX_ARGS);
    assert(grid->threads > 0 && grid->threads % 32 == 0);
    if (grid->shared > gpu->shared_bytes) {
        snprintf(text, n, "%s takes %u bytes of shared memory, and a block of this GPU has %u",
                 names[kernel], grid->shared, gpu->shared_bytes);
        return -1;
    }
    int result = gpu->driver->launch(gpu->functions[kernel], grid->x, grid->y ? grid->y : 1, 1,
                                     grid->threads, 1, 1, grid->shared, grid->stream, NULL, extra);
    return result ? kvq_gpu_fault(gpu->driver, result, names[kernel], text, n) : 0;
}

int kvq_gpu_blocks(const struct kvq_gpu *gpu, enum kvq_gpu_kernel kernel, uint32_t threads,
                   uint32_t shared, int *blocks, char *text, size_t n)
{
    int result = gpu->driver->function_blocks(blocks, gpu->functions[kernel], (int)threads, shared);
    return result ? kvq_gpu_fault(gpu->driver, result, names[kernel], text, n) : 0;
}
