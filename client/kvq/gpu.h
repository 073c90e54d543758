/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/gpu.h: which GPUs there are, buffers in their memory, and calls in the order of a stream. For
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
    char name[64];  /* for people: "NVIDIA H200" */
};

/* Fills up to `max` elements with the GPUs that sessions can live on, and *n with how many there
 * are; 0 if the daemon works on CPUs alone. Needs no GPU here. */
KVQ_API int kvq_daemon_gpus(kvq_client *client, struct kvq_gpu_info *gpus, uint32_t max,
                            uint32_t *n);

/* ---- Buffers in a GPU's memory ---- */

/* A buffer in the memory of a GPU, made by the daemon, zeroed, mapped read-write here: at the
 * address of kvq_buffer_device. The calling thread's current CUDA context must be of that GPU,
 * which `gpu` names as kvq_gpu_info.place does (NULL: the current context's). The buffer lives as
 * long as this process has it, also without the daemon. Destroy the context only after closing it.
 * KVQ_E_UNSUPPORTED (the daemon has no GPU, or not this one), KVQ_E_NO_MEMORY, KVQ_E_LIMIT. */
KVQ_API KVQ_CHECK int kvq_buffer_create_on(kvq_client *client, const char *gpu, size_t bytes,
                                           kvq_buffer **buffer);

/* Registers the engine's own device memory: `bytes` from a device pointer of the calling thread's
 * current CUDA context, anywhere in an allocation. Nothing is copied. The memory must not be freed
 * before kvq_buffer_close has returned; an engine that cannot promise that uses
 * kvq_buffer_create_on.
 * Any number of buffers may lie in one allocation. Memory by cudaMalloc can be imported (PyTorch's,
 * unless expandable_segments is on), and memory by cuMemCreate that may be exported as a file
 * descriptor; other memory is refused with KVQ_E_BUFFER or KVQ_E_UNSUPPORTED, and the text says why
 * and what to do. The daemon can then reach the whole allocation, not this piece alone. */
KVQ_API KVQ_CHECK int kvq_buffer_import(kvq_client *client, void *device_pointer, size_t bytes,
                                        kvq_buffer **buffer);

/* The device pointer of a buffer in a GPU's memory, else NULL. kvq_buffer_data is then NULL. */
KVQ_API void *kvq_buffer_device(const kvq_buffer *buffer);

/* ---- On a stream: in the order of a GPU's work, without waiting ---- */

/* Append, attend and read for sessions on a GPU, in the order of a stream of the engine (a CUstream
 * or cudaStream_t of the calling thread's current context; NULL is the default stream). The
 * daemon's GPU work begins when the stream has come here, and what is given to the stream
 * afterwards begins when that work has ended. The host waits for neither: tensors may still be
 * being computed when the call is made, and results are there for later work of the stream, not for
 * the host.
 *
 * The calls return when the daemon has checked the request and enqueued its work: codes and
 * statuses are those of the checks. What only the GPU can find (KVQ_E_NONFINITE) is told by
 * kvq_step_end, which waits for the step's work. A request that is refused lets the stream go on,
 * its tensors untouched. If the daemon dies the stream goes on as well, and calls answer
 * KVQ_E_DISCONNECTED; what the stream computed since is not to be trusted.
 *
 * Tensors lie in buffers of the session's GPU, or in the host's where the daemon could make them
 * known to its GPU; they must stay until the stream has passed the call. All streams of one queue
 * are of one GPU and pass its calls in turn; those being captured are refused (KVQ_E_UNSUPPORTED).
 *
 * How the two streams wait for each other is found out at the first call: by words in memory where
 * both sides' GPUs can wait for those; else by events, where processes can share them (each call
 * then waits until the daemon has enqueued its work, but not for that work; and CUDA does not say
 * what becomes of the stream if the daemon dies); else the host waits (the stream is synchronized
 * before the request, and the call returns when its work is done): slower, but the same results.
 * KVQ_GPU_ORDER=words, =events or =host in the environment chooses by force. The GPU is reached
 * through libcuda.so.1, or what KVQ_GPU_DRIVER names. */
enum { KVQ_ORDER_NONE = 0, KVQ_ORDER_WORDS = 1, KVQ_ORDER_EVENTS = 2, KVQ_ORDER_HOST = 3 };

/* How this queue's calls order streams; KVQ_ORDER_NONE before the first. */
KVQ_API int kvq_queue_order(const kvq_queue *queue);

/* Does now, for the current context's GPU, what the first call would do: some system and driver
 * calls. For engines that capture graphs later, or measure. */
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

/* These four with a ticket: with words it does not even wait for the checks. Other operations are
 * refused with KVQ_E_INVALID. */
KVQ_API KVQ_CHECK int kvq_submit_on_stream(kvq_queue *queue, enum kvq_operation op,
                                           struct kvq_work *work, struct kvq_entry *entries,
                                           uint32_t n, void *stream, kvq_ticket *ticket);

#ifdef __cplusplus
}
#endif

#endif
