// SPDX-License-Identifier: Apache-2.0
//
// Pieces of a GPU's memory that can cross processes, and host memory that a GPU can reach. The
// daemon makes its pools and staging arenas of them and opens what engines bring; libkvq exports
// and maps the same.
//
// Calls work on the calling thread's current context, whose device is `device` where one is given;
// a piece is released in the context it was made in. Different pieces may be used from different
// threads; one piece belongs to one thread at a time. Most of it takes the driver's locks and may
// take milliseconds: it is not for hot paths. Closing an OPENED piece and unregistering host
// memory, also where kvq_gpu_host_register fails halfway, wait for all work of the device, and
// meanwhile nobody gives work to any stream. Nothing else here waits for work on streams.
//
// Functions that can fail return KVQ_GPU_OK or the driver's result (KVQ_GPU_OUT_OF_MEMORY, ..;
// KVQ_GPU_INVALID_VALUE for what is refused here), and then a sentence in text, what to do
// included; the piece is zeroed then and nothing is left behind.
#ifndef KVQ_KERNELS_CUDA_SHARE_H
#define KVQ_KERNELS_CUDA_SHARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/driver.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kvq_gpu_piece_kind {
    KVQ_GPU_PIECE_NONE = 0,
    KVQ_GPU_PIECE_MADE,   // physical memory made here
    KVQ_GPU_PIECE_MAPPED, // physical memory that came as a file descriptor
    KVQ_GPU_PIECE_OPENED, // an allocation of another process, opened by its IPC handle
};

// Zero-initialize. To be read only.
struct kvq_gpu_piece {
    enum kvq_gpu_piece_kind kind;
    kvq_gpu_ptr at;        // its first byte, here
    size_t bytes;          // that may be touched: all of the allocation
    kvq_gpu_memory memory; // MADE: the physical memory
};

// The unit that the device gives physical memory in, a power of two (2 MiB as a rule).
int kvq_gpu_piece_unit(const struct kvq_gpu_driver *driver, int device, size_t *unit, char *text,
                       size_t n);

// Makes memory of at least `bytes` (at least 1; rounded up to the unit), maps it for reading and
// writing, and lets it be exported. What it holds is not defined: it may be another program's, so
// clear it before anybody sees it.
int kvq_gpu_piece_make(const struct kvq_gpu_driver *driver, int device, size_t bytes,
                       struct kvq_gpu_piece *piece, char *text, size_t n);

// A descriptor, close-on-exec and the caller's, by which another process (or this one) maps a
// piece that was made here. The memory lives as long as any piece or descriptor of it does.
int kvq_gpu_piece_export(const struct kvq_gpu_driver *driver, const struct kvq_gpu_piece *piece,
                         int *fd, char *text, size_t n);

// Maps the whole allocation behind a descriptor, whose size is `bytes` (what the exporter says;
// the driver refuses more than there is). The descriptor stays the caller's and is not needed any
// more. With read_only, kernels that write there fault.
int kvq_gpu_piece_map(const struct kvq_gpu_driver *driver, int device, int fd, size_t bytes,
                      bool read_only, struct kvq_gpu_piece *piece, char *text, size_t n);

// The same for reading alone, over addresses that the caller has reserved, in two calls: who has
// other memory mapped there can keep that until it is known that the descriptor is any good. The
// second one maps all of the memory, and releases it whether it could or not. It makes no piece:
// memory_unmap takes the mapping away.
int kvq_gpu_memory_import(const struct kvq_gpu_driver *driver, int fd, kvq_gpu_memory *memory,
                          char *text, size_t n);
int kvq_gpu_memory_map_at(const struct kvq_gpu_driver *driver, int device, kvq_gpu_memory memory,
                          kvq_gpu_ptr at, size_t bytes, char *text, size_t n);

// Opens an allocation of another process by its CUDA IPC handle, whole; how long it is, the driver
// says. Opening the same allocation several times gives the same address and is counted by the
// driver, each to be released. One's own process's handles cannot be opened. Whether the handle
// still means the allocation that the exporter speaks of, only the exporter knows. A failure may
// leave a piece without a length, to be released as well: closing waits for all streams, and only
// the caller knows when it may.
int kvq_gpu_piece_open(const struct kvq_gpu_driver *driver, const struct kvq_gpu_ipc_memory *handle,
                       struct kvq_gpu_piece *piece, char *text, size_t n);

// Unmaps or closes it and zeroes the struct; a zeroed one is fine. No work may touch it any more:
// that is the caller's to know, and only closing an OPENED one waits for any.
void kvq_gpu_piece_release(const struct kvq_gpu_driver *driver, struct kvq_gpu_piece *piece);

// How memory of this process can be handed to another. `at` is any address within it.
struct kvq_gpu_export {
    kvq_gpu_ptr base; // of the whole allocation
    size_t bytes;     // of the whole allocation
    uint64_t number;  // of the allocation, never the same again in this process
    int device;       // whose memory it is
    int fd;           // the caller's, close-on-exec; -1: by handle
    struct kvq_gpu_ipc_memory handle;
};

// Exports the allocation around [at, at + bytes): by a legacy handle where it has one, else by a
// descriptor. KVQ_GPU_NOT_SUPPORTED, with the reason and the remedy, for memory whose allocator
// cannot export it.
int kvq_gpu_memory_export(const struct kvq_gpu_driver *driver, kvq_gpu_ptr at, size_t bytes,
                          struct kvq_gpu_export *out, char *text, size_t n);

// Makes host memory known to all contexts of this process, so that kernels and stream operations
// can use it: at *device for them. `at` is page-aligned. The memory is then pinned.
int kvq_gpu_host_register(const struct kvq_gpu_driver *driver, void *at, size_t bytes,
                          kvq_gpu_ptr *device, char *text, size_t n);
// Before the memory is unmapped, when no work uses it any more. Waits, as said above.
void kvq_gpu_host_unregister(const struct kvq_gpu_driver *driver, void *at);

#ifdef __cplusplus
}
#endif

#endif
