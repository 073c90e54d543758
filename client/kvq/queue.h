/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/queue.h: a thread's way to the daemon. For everybody: each thread that works with sessions
 * opens a queue of its own.
 *
 * A queue belongs to one thread at a time. Calls on different queues run in parallel. One session
 * may be written from one queue at a time.
 */
#ifndef KVQ_PUBLIC_QUEUE_H
#define KVQ_PUBLIC_QUEUE_H

#include "client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A pair of rings in shared memory: requests there, completions back. */
typedef struct kvq_queue kvq_queue;

/* Release with kvq_queue_close. KVQ_E_LIMIT, or as any control call. */
KVQ_API KVQ_CHECK int kvq_queue_open(kvq_client *client, kvq_queue **queue);

/* Accepts NULL and pointers to NULL. After calls .._on_stream it first waits until the GPU has done
 * what this process gave it. */
KVQ_API void kvq_queue_close(kvq_queue **queue);

/* How long kvq_step_begin, kvq_step and kvq_fork of this queue wait where memory is short and no
 * idle session can make room: 0, the default: not at all, they are refused with KVQ_E_NO_MEMORY or
 * KVQ_E_QUOTA. Else until somebody frees some; after that, or at their own deadline if sooner, they
 * end with KVQ_E_DEADLINE. They hold nothing meanwhile; what could never fit is refused at once.
 * Have no step open in another queue then: its memory may be just what is missing. */
KVQ_API int kvq_queue_wait_for_room(kvq_queue *queue, uint64_t timeout_ns);

#ifdef __cplusplus
}
#endif

#endif
