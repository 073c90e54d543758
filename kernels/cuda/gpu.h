// SPDX-License-Identifier: Apache-2.0
//
// The kernels of one device, loaded into the caller's current context and launched by number.
#ifndef KVQ_KERNELS_CUDA_GPU_H
#define KVQ_KERNELS_CUDA_GPU_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/list.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KVQ_GPU_MAX_MODULES = 16,
    KVQ_GPU_MAX_ARGS = 4096, // bytes of a kernel's argument
    KVQ_GPU_TEXT = 1280,     // bytes of text that hold every message, the emulator's included
};

// Compiled kernels for one compute capability, inside this program.
struct kvq_gpu_image {
    int capability; // 10 * major + minor
    bool only;      // runs on that capability alone, not on later minor ones
    const char *name;
    const void *bytes, *end;
};

// What this program was built with, ended by one whose name is NULL; that one alone if it was
// built without CUDA.
const struct kvq_gpu_image *kvq_gpu_images(void);
// The major version of CUDA whose compiler made them; 0: there are none.
int kvq_gpu_images_cuda(void);

// To be read only. Any number of threads may launch.
struct kvq_gpu {
    const struct kvq_gpu_driver *driver;
    int device;
    int capability;        // 10 * major + minor
    int image_capability;  // of the images that were loaded; 0: the kernels are in the driver
    int multiprocessors;   // of the device
    uint32_t shared_bytes; // most dynamic shared memory that a block can have
    struct kvq_gpu_module *modules[KVQ_GPU_MAX_MODULES];
    int n_modules;
    struct kvq_gpu_function *functions[KVQ_KERNELS];
};

// Loads the kernels into the current context, whose device they then run on. May wait for the
// context's work, so that no launch does. 0, or -1 with a sentence in text; nothing is left behind
// then.
int kvq_gpu_open(struct kvq_gpu *gpu, const struct kvq_gpu_driver *driver, char *text, size_t n);

// The same with these images, ended by one whose name is NULL, all of them whole; NULL: with the
// kernels inside the driver.
int kvq_gpu_open_images(struct kvq_gpu *gpu, const struct kvq_gpu_driver *driver,
                        const struct kvq_gpu_image *images, char *text, size_t n);

// In the same context, when no launch is under way any more. A zeroed struct is fine.
void kvq_gpu_close(struct kvq_gpu *gpu);

struct kvq_gpu_grid {
    uint32_t x, y;    // blocks; y = 0 means 1
    uint32_t threads; // of a block: a multiple of 32, at most what the kernel was made for
    uint32_t shared;  // bytes of dynamic shared memory, at most gpu->shared_bytes
    struct kvq_gpu_stream *stream;
};

// Starts a kernel; args, `bytes` long, is its argument and is copied. 0, or -1 with a sentence in
// text. As everywhere in CUDA, faults of earlier work may be told here, and this one's later.
int kvq_gpu_launch(const struct kvq_gpu *gpu, enum kvq_gpu_kernel kernel,
                   const struct kvq_gpu_grid *grid, const void *args, size_t bytes, char *text,
                   size_t n);

const char *kvq_gpu_kernel_name(enum kvq_gpu_kernel kernel);

// Blocks of this shape that one multiprocessor can run at the same time; 0, or -1 with text.
int kvq_gpu_blocks(const struct kvq_gpu *gpu, enum kvq_gpu_kernel kernel, uint32_t threads,
                   uint32_t shared, int *blocks, char *text, size_t n);

#ifdef __cplusplus
}
#endif

#endif
