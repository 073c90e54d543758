/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq.h: the client library of kvqd, the daemon that owns quantized KV caches.
 *
 * An engine connects, opens a queue for each of its threads, registers the memory that holds its
 * tensors, and opens sessions. Then, for every step of the model:
 *
 *     kvq_step_begin     the sessions of the batch, their token counts, tokens to come
 *     kvq_append_attend  for each layer: K and V in, Q in, attention output and LSE out
 *     kvq_step_end       commits: only now the tokens are part of the session
 *
 * Return values: 0 or a negative KVQ_E code; kvq_error_text() has the details in words.
 *
 * Threads: any number of threads may use a kvq_client (calls on a client take a lock and are not
 * for the hot path). A kvq_queue belongs to one thread at a time. Calls on different queues run in
 * parallel. One queue at a time may write a session.
 *
 * Ownership: the comment of a function that returns an object through a pointer to pointer names
 * the function that releases the object and sets the pointer to NULL. The library takes nothing
 * over from the caller: it copies arguments, and reads tensors in place until the call (or its
 * ticket) is done.
 *
 * A process that forks must not use the library's objects in the child.
 *
 * Each topic has a header, which a program may include alone:
 */
#ifndef KVQ_H
#define KVQ_H

/* What every engine needs. */
#include "kvq/buffer.h"  /* memory that holds tensors */
#include "kvq/client.h"  /* connecting to the daemon */
#include "kvq/error.h"   /* codes, and words for what failed */
#include "kvq/queue.h"   /* a thread's requests to the daemon */
#include "kvq/session.h" /* opening, closing and describing sessions */
#include "kvq/step.h"    /* appending K and V, attention, committing */

/* What some need. */
#include "kvq/capture.h"    /* K, V and Q into a file */
#include "kvq/edit.h"       /* truncating, forking, accepting drafts, reading back */
#include "kvq/gpu.h"        /* GPUs, buffers in their memory, calls on streams */
#include "kvq/in_context.h" /* attention in the engine's own threads or stream */
#include "kvq/merge.h"      /* merging two attentions by their LSE */
#include "kvq/prefix.h"     /* sharing the blocks of equal prefixes */
#include "kvq/residency.h"  /* moving, parking, pinning, saving, restoring */
#include "kvq/shards.h"     /* a model that runs as several shards */
#include "kvq/ticket.h"     /* the calls of a step without waiting */

#endif
