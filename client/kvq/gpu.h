/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/gpu.h: the daemon's GPUs, buffers in their memory, and calls in the order of a stream. For
 * engines whose tensors or sessions are in a GPU's memory.
 */
#ifndef KVQ_PUBLIC_GPU_H
#define KVQ_PUBLIC_GPU_H

#include "ticket.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A GPU of the daemon. */
struct kvq_gpu_info {
    char place[48]; /* "GPU-01234567-89ab-cdef-0123-456789abcdef", or "MIG-.." */
    char name[64];  /* "NVIDIA H200" */
};

/* Fills up to `max` elements with the GPUs that can hold sessions, and *n with their number; 0 if
 * the daemon works on CPUs alone. This process needs no GPU for the call. */
KVQ_API int kvq_daemon_gpus(kvq_client *client, struct kvq_gpu_info *gpus, uint32_t max,
                            uint32_t *n);

/* ---- Buffers in a GPU's memory ---- */

/* The daemon makes a zeroed buffer in the memory of a GPU, and the library maps the buffer
 * read-write at the address that kvq_buffer_device returns. `gpu` is a kvq_gpu_info.place; NULL is
 * the GPU of the current context. The calling thread's current CUDA context must be of that GPU.
 * The memory stays until kvq_buffer_close, even if the daemon dies. Close the buffer before you
 * destroy the context. KVQ_E_UNSUPPORTED (the daemon has no GPU, or not this one), KVQ_E_NO_MEMORY,
 * KVQ_E_LIMIT. */
KVQ_API KVQ_CHECK int kvq_buffer_create_on(kvq_client *client, const char *gpu, size_t bytes,
                                           kvq_buffer **buffer);

/* Registers the engine's own device memory: `bytes` from a device pointer of the calling thread's
 * current CUDA context, anywhere in an allocation. Copies nothing. The engine must not free the
 * memory before kvq_buffer_close has returned; an engine that cannot promise that uses
 * kvq_buffer_create_on. Any number of buffers may lie in one allocation. kvq_buffer_close of the
 * buffer also waits until no work of the daemon on GPUs waits for an engine: an engine that stands
 * still within a call .._on_stream holds it up until that engine goes on or ends.
 * The daemon can import memory by cudaMalloc (PyTorch's, unless expandable_segments is on), and
 * memory by cuMemCreate that may be exported as a file descriptor. For other memory the call fails
 * with KVQ_E_BUFFER or KVQ_E_UNSUPPORTED, and the error text says why and what to do. The daemon
 * then has access to the whole allocation, not to this piece alone. */
KVQ_API KVQ_CHECK int kvq_buffer_import(kvq_client *client, void *device_pointer, size_t bytes,
                                        kvq_buffer **buffer);

/* The device pointer of a buffer in a GPU's memory, for which kvq_buffer_data is NULL; NULL for a
 * buffer on the host. */
KVQ_API void *kvq_buffer_device(const kvq_buffer *buffer);

/* ---- On a stream: in the order of a GPU's work, without waiting ---- */

/* Append, attend and read for sessions on a GPU, in the order of a stream of the engine (a CUstream
 * or cudaStream_t of the calling thread's current context; NULL is the default stream). The
 * daemon's GPU work begins when the stream has finished the work before the call, and later work of
 * the stream begins when the daemon's work has ended. The host waits for neither: the GPU may still
 * be computing the tensors when the engine makes the call, and only later work of the stream may
 * read the results, not the host.
 *
 * The calls return when the daemon has checked the request and enqueued its work: codes and
 * statuses are those of the checks. kvq_step_end, which waits for the step's work, reports what
 * only the GPU can find (KVQ_E_NONFINITE). When the daemon refuses a request, the stream goes on
 * and the tensors are untouched. When the daemon dies, the stream goes on as well, and calls return
 * KVQ_E_DISCONNECTED; do not use what the stream has computed since.
 *
 * A step of a session to which another client has written begins when that client's stream has done
 * its calls for the session, however long the stream stands still.
 *
 * Tensors lie in buffers of the session's GPU, or in buffers on the host that the daemon could
 * register with its GPU. They must stay until the stream has passed the call. All streams of one
 * queue are of one GPU and pass its calls in turn. A stream that is being captured into a graph is
 * refused with KVQ_E_UNSUPPORTED.
 *
 * The first call finds out how the two streams can wait for each other. WORDS: by words in memory,
 * where the GPUs of both processes can wait for words. Else EVENTS, where processes can share
 * events: each call waits until the daemon has enqueued its work, but not for that work; CUDA does
 * not say what happens to the stream if the daemon dies. Else HOST: the library synchronizes the
 * stream before the request, and the call returns when its work is done; slower, with the same
 * results. KVQ_GPU_ORDER=words, =events or =host in the environment forces one of them. The library
 * loads libcuda.so.1, or the driver that KVQ_GPU_DRIVER names. */
enum { KVQ_ORDER_NONE = 0, KVQ_ORDER_WORDS = 1, KVQ_ORDER_EVENTS = 2, KVQ_ORDER_HOST = 3 };

/* How this queue's calls order streams; KVQ_ORDER_NONE before the first call. Asks nobody. */
KVQ_API int kvq_queue_order(const kvq_queue *queue);

/* Does now, for the GPU of the current context, what the first call .._on_stream would do: some
 * system and driver calls. It waits until the daemon has enqueued what other queues of the client
 * have submitted on streams. For engines that capture graphs later, or that measure. */
KVQ_API KVQ_CHECK int kvq_queue_prepare_streams(kvq_queue *queue);

KVQ_API KVQ_CHECK int kvq_append_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                           struct kvq_entry *entries, uint32_t n, void *stream);
KVQ_API KVQ_CHECK int kvq_attend_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                           struct kvq_entry *entries, uint32_t n, void *stream);
KVQ_API KVQ_CHECK int kvq_append_attend_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                                  struct kvq_entry *entries, uint32_t n,
                                                  void *stream);
KVQ_API KVQ_CHECK int kvq_read_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                         struct kvq_entry *entries, uint32_t n, void *stream);

/* One of these four with a ticket. With KVQ_ORDER_WORDS the call does not even wait for the
 * daemon's checks. KVQ_E_INVALID for any other operation. */
KVQ_API KVQ_CHECK int kvq_submit_on_stream(kvq_queue *queue, enum kvq_operation op,
                                           struct kvq_work *work, struct kvq_entry *entries,
                                           uint32_t n, void *stream, kvq_ticket *ticket);

#ifdef __cplusplus
}
#endif

#endif
