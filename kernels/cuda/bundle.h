// SPDX-License-Identifier: Apache-2.0
//
// Kernels handed from one process to another, so that both run the very same ones on a GPU and get
// the same bits: as one piece of bytes, with all images that one of them has loaded.
#ifndef KVQ_KERNELS_CUDA_BUNDLE_H
#define KVQ_KERNELS_CUDA_BUNDLE_H

#include "kernels/cuda/gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVQ_GPU_KERNELS_TEXT = 160 };

// What whoever fills the arguments of attention and whoever compiled its kernels must agree about,
// as text: a hash of the sources of both (CMakeLists.txt) and the sizes of structs. Kernels that
// came with another text cannot be launched by this program.
void kvq_gpu_kernels_text(char text[KVQ_GPU_KERNELS_TEXT]);

// Bytes of a bundle of those images that have the capability, as kvq_gpu.image_capability says it
// of the ones that are open; 0 if that is 0: the driver has the kernels inside, and every process
// has them for itself.
size_t kvq_gpu_bundle_bytes(const struct kvq_gpu_image *images, int capability);
void kvq_gpu_bundle_write(const struct kvq_gpu_image *images, int capability, void *bundle);

// As kvq_gpu_open, with the kernels of a bundle, which must stay as it is during the call only.
// Its numbers are not believed; the machine code inside is. `bytes` 0: those inside the driver.
int kvq_gpu_open_bundle(struct kvq_gpu *gpu, const struct kvq_gpu_driver *driver,
                        const void *bundle, size_t bytes, char *text, size_t n);

#ifdef __cplusplus
}
#endif

#endif
