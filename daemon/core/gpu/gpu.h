// SPDX-License-Identifier: Apache-2.0
//
// The GPUs that the daemon uses: opened at start, each with its primary context, the kernels and a
// stream of the daemon's own for small copies. What is enqueued for clients goes to work streams
// (work_stream.h).
//
// Every failure comes with a sentence in text (KVQ_TEXT_BYTES). The fault of a kernel is sticky, as
// in CUDA: from then on every call on that GPU fails, and the daemon has to end.
#ifndef KVQ_DAEMON_CORE_GPU_GPU_H
#define KVQ_DAEMON_CORE_GPU_GPU_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/core/base/base.h"
#include "kernels/cuda/cache.h"

enum { KVQ__GPU_NAME = 96, KVQ__GPU_UUID_TEXT = 48 };

struct kvq__gate;
struct kvq__gpus;
struct kvq__reserve;

struct kvq__gpus_config {
    const char *driver;                 // the driver's library; NULL or empty: libcuda.so.1
    const struct kvq_gpu_driver *table; // tests: this driver, and no library; else NULL
    const char *devices;                // UUIDs with commas between; NULL or empty: all
    uint64_t bytes;                     // for caches, on each; 0: half of what is free at start
    uint64_t extent_bytes;              // as in struct kvq__core_config, never 0
};

// Opens the driver and every GPU asked for. Without a list of them those that cannot be opened, or
// that this program has no kernels for, are skipped. 0, KVQ_E_UNSUPPORTED if there is no driver or
// no GPU that can be used, KVQ_E_INVALID for a UUID that is not there; of a GPU in the list
// KVQ_E_UNSUPPORTED, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
int kvq__gpus_open(const struct kvq__gpus_config *config, struct kvq__gpus **gpus, char *text);
// Why the i-th of those that were skipped was; NULL behind the last one.
const char *kvq__gpus_skipped(const struct kvq__gpus *gpus, uint32_t i);
// After the core and all connections are gone. NULL is fine.
void kvq__gpus_close(struct kvq__gpus **gpus);

// These accept NULL for no GPUs.
uint32_t kvq__gpus_count(const struct kvq__gpus *gpus);
struct kvq__gpu *const *kvq__gpus_list(const struct kvq__gpus *gpus);
struct kvq__gpu *kvq__gpus_get(const struct kvq__gpus *gpus, uint32_t i);
struct kvq__gpu *kvq__gpus_find(const struct kvq__gpus *gpus, const uint8_t uuid[16]);

const struct kvq_gpu_driver *kvq__gpu_driver(const struct kvq__gpu *gpu);
const struct kvq_gpu *kvq__gpu_kernels(const struct kvq__gpu *gpu);
int kvq__gpu_device(const struct kvq__gpu *gpu); // the driver's number, good in this process alone
const uint8_t *kvq__gpu_uuid(const struct kvq__gpu *gpu);
const char *kvq__gpu_uuid_text(const struct kvq__gpu *gpu); // "GPU-.." or "MIG-.."
const char *kvq__gpu_name(const struct kvq__gpu *gpu);
bool kvq__gpu_has_memory_ops(const struct kvq__gpu *gpu); // stream_wait64 and stream_write64 work
bool kvq__gpu_maps(const struct kvq__gpu *gpu);           // memory is made apart from addresses
bool kvq__gpu_exports(const struct kvq__gpu *gpu);        // memory for caches has descriptors
bool kvq__gpu_has_events(const struct kvq__gpu *gpu);     // that other processes can open

// Makes the GPU's context the current one of the calling thread. 0 or a result of the driver. Any
// thread; cheap if the context is current already.
int kvq__gpu_enter(const struct kvq__gpu *gpu);

// The daemon's own streams on a GPU. Their work never waits for a client. They exist as long as the
// GPU is open, and any thread may enqueue work.
enum kvq__gpu_stream {
    KVQ__GPU_STREAM_SMALL,        // small copies below
    KVQ__GPU_STREAM_COPIES,       // sessions that move to the host or come from there
    KVQ__GPU_STREAM_COMMON,       // work of all clients that have no streams of their own
    KVQ__GPU_STREAM_COMMON_WATCH, // wakes the poller when work of COMMON has ended
    KVQ__GPU_STREAMS,
};
struct kvq_gpu_stream *kvq__gpu_stream(const struct kvq__gpu *gpu, enum kvq__gpu_stream which);

// The streams of a process share hardware queues: CUDA_DEVICE_MAX_CONNECTIONS of them, and for
// copies CUDA_DEVICE_MAX_COPY_CONNECTIONS, which the daemon sets to 32 unless they are set. A
// stream that waits blocks the work behind it in its hardware queue, also that of other streams. So
// only a stream that has a hardware queue alone may wait for a client. kvq__gpu_take_queues takes
// two of them; false if fewer are left.
bool kvq__gpu_take_queues(struct kvq__gpu *gpu);
void kvq__gpu_give_queues(struct kvq__gpu *gpu);

// What stands before calls of the driver that wait for all streams, also for those (gate.h).
struct kvq__gate *kvq__gpu_gate(const struct kvq__gpu *gpu);
uint32_t kvq__gpu_connections(const struct kvq__gpu *gpu);
// How many clients can have streams of their own, two each, besides the daemon's. Any thread.
uint32_t kvq__gpu_clients_alone(const struct kvq__gpu *gpu);

// Bytes that caches may take on the GPU; and its reserve (extents.h), which extents.c sets.
uint64_t kvq__gpu_budget(const struct kvq__gpu *gpu);
struct kvq__reserve **kvq__gpu_reserve(struct kvq__gpu *gpu);

// Small copies between host and GPU on the stream KVQ__GPU_STREAM_SMALL; the call waits until that
// stream is idle, and for no other. 0 or KVQ_E_SYSTEM. One thread at a time, as for all below.
int kvq__gpu_put(struct kvq__gpu *gpu, kvq_gpu_ptr to, const void *from, size_t bytes);
int kvq__gpu_take(struct kvq__gpu *gpu, void *to, kvq_gpu_ptr from, size_t bytes);
// Writes a word that a stream may wait for. Where the driver has no memory for that the word stays
// as it is, which is no fault: call it again until the stream has gone on.
void kvq__gpu_poke(struct kvq__gpu *gpu, kvq_gpu_ptr at, uint64_t value);

// Copies a layer's codebooks to the GPU; callers with the same tables share one copy. 0 with device
// pointers in *copy, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM. kvq__gpu_book_release with the same *book
// gives the copy back.
int kvq__gpu_book(struct kvq__gpu *gpu, const struct kvq_format *format,
                  const struct kvq_shape *shape, const struct kvq_book *book,
                  struct kvq_book *copy);
void kvq__gpu_book_release(struct kvq__gpu *gpu, const struct kvq_book *book);
// Memory that kvq__gpu_sweep frees.
void kvq__gpu_free_later(struct kvq__gpu *gpu, kvq_gpu_ptr memory);
// Frees this memory, unless a stream there waits for a client. The driver waits for the whole GPU,
// so call it when nothing runs there. The poller's thread, or that of kvq__gpus_close.
void kvq__gpu_sweep(struct kvq__gpu *gpu);

// Counters of the values that a step stores, in host memory that the GPU writes. NULL: no memory.
struct kvq__gpu_counts {
    struct kvq_gpu_store_counts *host;
    kvq_gpu_ptr at;
    struct kvq__gpu_counts *next; // free ones
};
struct kvq__gpu_counts *kvq__gpu_counts_new(struct kvq__gpu *gpu);
void kvq__gpu_counts_free(struct kvq__gpu *gpu, struct kvq__gpu_counts *counts);

// Asks the driver whether a kernel has faulted. Returns the first fault that was seen, or NULL.
const char *kvq__gpu_look(struct kvq__gpu *gpu);
// The first fault that was seen, or NULL.
const char *kvq__gpu_fault(const struct kvq__gpu *gpu);
// Notes a result that is not success; returns KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
int kvq__gpu_failed(struct kvq__gpu *gpu, int result, const char *what);
// The same of a call that an order depends on, such as a signal that somebody waits for: it is a
// fault, whatever the result. Returns KVQ_E_SYSTEM.
int kvq__gpu_order_lost(struct kvq__gpu *gpu, int result, const char *what);
// The same of something that has a sentence; returns KVQ_E_SYSTEM.
int kvq__gpu_faulted(struct kvq__gpu *gpu, const char *text);

#endif
