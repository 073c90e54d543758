/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/in_context.h: attention in the engine's own context, without a request for each layer. For
 * engines whose layers are short next to a request.
 *
 * The library maps the blocks of the engine's sessions read-only and runs the daemon's own kernels:
 * on the host in the engine's threads, on a GPU in the engine's stream. K and V of the step are
 * read where they lie. Once per step one request hands them to the daemon, which stores and packs
 * them and publishes the next page table. Outputs are those of kvq_append_attend to the bit.
 *
 *     kvq_local_begin(local, entries, n)            no request: checks positions
 *     kvq_local_attend(local, &work, entries, n)    each layer: no request
 *     kvq_local_end(local, NULL, entries, n)        one request for all layers
 *
 * If attention cannot run here (the daemon has another version of the blocks' layout or of page
 * tables, the CPU lacks the daemon's instruction set, ..), the same calls go through the daemon,
 * with the same results, and kvq_local_why says why. KVQ_LOCAL=daemon in the environment asks for
 * that. The daemon still decides about memory: while a session is in a kvq_local, this engine sees
 * the session's blocks as the last step left them, even if another client drops or truncates the
 * session.
 *
 * A step of kvq_step_begin reserves memory at its beginning, this step at its end: if kvq_local_end
 * fails for a session with KVQ_E_NO_MEMORY or KVQ_E_QUOTA, the daemon has committed nothing of that
 * session's step. The session stays in the step, also where the calls go through the daemon, and
 * the engine may call kvq_local_end again; so it may where the call fails with KVQ_E_DEADLINE,
 * after kvq_queue_wait_for_room or at work->deadline_ns. kvq_local_end also finds K and V that are
 * not finite (KVQ_E_NONFINITE), after attention has read them. KVQ_E_UNSUPPORTED with a value past
 * the entry's position: the step is committed, but the GPU took no work to show it here; the next
 * kvq_local_begin, at that value, asks for it again.
 *
 * If the daemon dies, the mapped memory stays: kvq_local_attend goes on for the step under way, and
 * kvq_local_end returns KVQ_E_DISCONNECTED. After kvq_reattach all calls return KVQ_E_CANCELLED:
 * close the kvq_local and open another.
 */
#ifndef KVQ_PUBLIC_IN_CONTEXT_H
#define KVQ_PUBLIC_IN_CONTEXT_H

#include "step.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The sessions that attend in this process, and their step. Belongs to its queue's thread. */
typedef struct kvq_local kvq_local;

/* Fail with KVQ_E_UNSUPPORTED instead of attending through the daemon. */
enum { KVQ_LOCAL_REQUIRE = 1 };

struct kvq_local_options {
    uint32_t size;       /* sizeof(struct kvq_local_options) */
    uint32_t flags;      /* KVQ_LOCAL */
    const char *place;   /* where its sessions are: "host" (NULL too) or a kvq_gpu_info.place */
    uint64_t max_tokens; /* of a session, its step included; sizes page tables; 0: 131,072 */
    /* For the host: how many threads may attend at a time, the caller's included; 0: 1. `parallel`
     * calls item(arg, i) once for every i below n, in any order and on any threads, and returns
     * when all calls have returned. NULL: the library has threads of its own until the close. */
    uint32_t threads;
    void (*parallel)(void *context, uint32_t n, void (*item)(void *arg, uint32_t i), void *arg);
    void *parallel_context;
};

/* Opens a kvq_local, which belongs to the queue's thread. options may be NULL. The first one for a
 * GPU may wait for the work that the current context was given before. Release with
 * kvq_local_close, before the queue is closed. */
KVQ_API KVQ_CHECK int kvq_local_open(kvq_queue *queue, const struct kvq_local_options *options,
                                     kvq_local **local);

/* For kvq_local_options.parallel, in an engine whose own operations run in an OpenMP runtime that
 * the engine's code cannot write regions for (PyTorch's, from Python). Runs the items on the
 * threads of the next region of that runtime, in the calling thread's team. parallel_context is the
 * address of the runtime's function GOMP_parallel, which GNU's, LLVM's and Intel's runtimes have.
 * An engine that is compiled with OpenMP writes `#pragma omp parallel for` instead. */
KVQ_API void kvq_local_openmp(void *gomp_parallel, uint32_t n, void (*item)(void *arg, uint32_t i),
                              void *arg);

/* Ends a step that is open, as kvq_local_abort does, and lets go of the kvq_local's sessions, which
 * stay open in the client. Accepts NULL and pointers to NULL. Waits for a daemon that does not
 * answer once, and then only sends word for the other sessions. Where the connection takes no more
 * (of several hundred) the daemon keeps their page tables until the sessions are closed:
 * kvq_local_add answers KVQ_E_EXISTS for them. */
KVQ_API void kvq_local_close(kvq_local **local);

/* NULL if attention runs here, else a sentence that says why it goes through the daemon. */
KVQ_API const char *kvq_local_why(const kvq_local *local);

/* Adds an open session, and maps those of its blocks that are not mapped yet. Makes system calls;
 * not for every step. A session that is being moved, as one that had to leave its GPU is when it is
 * opened, is waited for; KVQ_E_BUSY: for kvq_connect_options.timeout_ms in vain. If attention to
 * the session cannot run here, all sessions of the kvq_local go through the daemon from now on.
 * With KVQ_LOCAL_REQUIRE, or where a graph was captured (below), the call fails instead:
 * KVQ_E_UNSUPPORTED. KVQ_E_LIMIT: the session is longer than max_tokens. KVQ_E_EXISTS: another
 * kvq_local of this client has the session. */
KVQ_API KVQ_CHECK int kvq_local_add(kvq_local *local, kvq_session session);

/* Takes a session out, which stays open in the client, and unmaps its page table. Call it before
 * kvq_session_close: no step takes a closed session, but its page table stays mapped until a
 * session that gets the same place in the client's table of sessions is added, or the kvq_local is
 * closed. KVQ_E_BUSY: the session is in the step. KVQ_E_STALE: the session is not in this
 * kvq_local. */
KVQ_API int kvq_local_remove(kvq_local *local, kvq_session session);

/* Begins a step of sessions that were added; an entry with append 0 only reads. If another call
 * changed a session since its last step here (a truncation, an append through the queue), the
 * library first asks the daemon for the new page table, with one request. Statuses per entry, as of
 * kvq_step_begin; KVQ_E_STALE, too, for a session that was not added. One step at a time. */
KVQ_API KVQ_CHECK int kvq_local_begin(kvq_local *local, struct kvq_entry *entries, uint32_t n);

/* As kvq_append_attend, or kvq_attend for entries with append 0; ignores work->step. The bytes of k
 * and v must not change before kvq_local_end. If k and v have no buffer, attention reads the K and
 * V of an earlier call of this step, for this layer or the layer whose cache it reads.
 * KVQ_E_INVALID for paged K and V; per entry KVQ_E_STALE for a session that was not added, and
 * KVQ_E_NO_STEP for one that kvq_local_begin did not begin a step with. */
KVQ_API KVQ_CHECK int kvq_local_attend(kvq_local *local, const struct kvq_work *work,
                                       struct kvq_entry *entries, uint32_t n);

/* Commits the step: hands the daemon K and V of all layers, from the calls of kvq_local_attend or
 * from `work`. If work->k and work->v are NULL, `work` only gives the ids of the tokens
 * (work->ids). Statuses per entry, as of kvq_step; KVQ_E_INCOMPLETE if the last kvq_local_attend
 * that gave an entry's K and V of a layer failed, and `work` does not give them. Sessions of the
 * step without an entry here stay as before the step. */
KVQ_API KVQ_CHECK int kvq_local_end(kvq_local *local, const struct kvq_step_work *work,
                                    struct kvq_entry *entries, uint32_t n);

/* Ends the step, and leaves every session as it was before the step. Needs no ticket. */
KVQ_API void kvq_local_abort(kvq_local *local);

/* On a GPU the three calls take a stream (as kvq_attend_on_stream, and in its order) and a bucket:
 * device memory for the attentions of a step within the bucket's limits. A bucket serves one
 * stream at a time: kvq_local_attend_on_stream takes the stream that the step was begun on, or one
 * that is being captured (KVQ_E_INVALID). The step may be ended, and the next one begun, on another
 * stream, which then waits for this one, and so does the stream of a step with another bucket for
 * the last steps of its sessions; so destroy a stream only when the bucket has moved on or is
 * closed. A layer may be attended to in several calls; from the third of such layers on, a call may
 * wait until the stream has come to the earlier ones.
 *
 * A CUDA graph may capture the attentions of a bucket. On a stream that is being captured,
 * kvq_local_attend_on_stream only records the tensors and the launches. Before each replay, outside
 * of the graph, kvq_local_begin_on_stream sets the bucket up for its entries: any sessions of any
 * lengths and rows within the bucket's limits. The tensors are those of the capture; an entry that
 * does not fit them is not in the step, and its status says why. Call
 * kvq_local_end_on_stream after the replay, outside of the graph. Both are refused with
 * KVQ_E_UNSUPPORTED while their stream, or the one that they would wait for, is being captured:
 * what they hand over would be a part of the graph. The buffers of the captured tensors must stay
 * open: after kvq_buffer_close of one of them kvq_local_begin_on_stream fails with KVQ_E_BUFFER,
 * until the layer is captured again. While a bucket has captured layers its kvq_local attends here
 * and nowhere else: kvq_local_add refuses a session that cannot be attended to here with
 * KVQ_E_UNSUPPORTED, and the other sessions go on.
 *
 * Tensors may lie in buffers on the host: the first call with such a buffer pins the buffer, and is
 * refused with KVQ_E_UNSUPPORTED if its stream is being captured. The work of the next step begins,
 * in the order of the stream, when the daemon has published the page tables. The host may be one
 * step ahead. */
typedef struct kvq_bucket kvq_bucket;

struct kvq_bucket_options {
    uint32_t size;         /* sizeof(struct kvq_bucket_options) */
    uint32_t max_sessions; /* in a step; 0: 1 */
    uint32_t max_queries;  /* of a session in a step; 0: 1 */
    kvq_session session;   /* any session of the bucket; all have equal layers */
    uint64_t max_tokens;   /* of a session, the step's included; 0: the kvq_local's */
};

KVQ_API KVQ_CHECK int kvq_bucket_open(kvq_local *local, const struct kvq_bucket_options *options,
                                      kvq_bucket **bucket);
/* Waits until the bucket's stream has finished its work, then frees the bucket. Close the bucket
 * before its kvq_local. Accepts NULL and pointers to NULL. */
KVQ_API void kvq_bucket_close(kvq_bucket **bucket);

KVQ_API KVQ_CHECK int kvq_local_begin_on_stream(kvq_local *local, kvq_bucket *bucket,
                                                struct kvq_entry *entries, uint32_t n,
                                                void *stream);
KVQ_API KVQ_CHECK int kvq_local_attend_on_stream(kvq_local *local, kvq_bucket *bucket,
                                                 const struct kvq_work *work,
                                                 struct kvq_entry *entries, uint32_t n,
                                                 void *stream);
/* If only the GPU can find a failure (KVQ_E_NONFINITE), the session's next kvq_local_end_on_stream
 * or kvq_step reports it (with KVQ_ORDER_HOST this call does): the session is then as it was before
 * the step with such values. */
KVQ_API KVQ_CHECK int kvq_local_end_on_stream(kvq_local *local, const struct kvq_step_work *work,
                                              struct kvq_entry *entries, uint32_t n, void *stream);

#ifdef __cplusplus
}
#endif

#endif
