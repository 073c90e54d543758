/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/queue.h: a thread's requests to the daemon. For everybody: each thread that works with
 * sessions opens a queue of its own.
 *
 * A queue belongs to one thread at a time. Calls on different queues run in parallel. One queue at
 * a time may write a session.
 */
#ifndef KVQ_PUBLIC_QUEUE_H
#define KVQ_PUBLIC_QUEUE_H

#include "client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A pair of rings in shared memory: requests to the daemon, completions from the daemon. */
typedef struct kvq_queue kvq_queue;

/* Opens a queue. Release with kvq_queue_close. KVQ_E_LIMIT, or as any control call. */
KVQ_API KVQ_CHECK int kvq_queue_open(kvq_client *client, kvq_queue **queue);

/* Closes the queue. The daemon aborts the steps that were begun on the queue and have not ended:
 * their sessions are as before the step. If the queue made calls .._on_stream, waits first until
 * the GPU has finished the work that this process gave it. Accepts NULL and pointers to NULL. */
KVQ_API void kvq_queue_close(kvq_queue **queue);

/* Sets how long kvq_step_begin, kvq_step, kvq_local_end and kvq_fork of this queue wait for memory
 * when no idle session can be evicted. 0, the default: these calls do not wait, and fail with
 * KVQ_E_NO_MEMORY or KVQ_E_QUOTA. Else they wait until memory is free, and fail with KVQ_E_DEADLINE
 * after timeout_ns or at their own deadline, whichever comes first. The time counts from the call
 * and is for all that the call waits for, also for a parked session to be loaded: give more than a
 * load takes. A request that waits holds no memory; a request that could never fit fails at once.
 * Have no step open in another queue meanwhile: the request may wait for that step's memory. */
KVQ_API int kvq_queue_wait_for_room(kvq_queue *queue, uint64_t timeout_ns);

#ifdef __cplusplus
}
#endif

#endif
