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
 * Where this cannot be (the daemon has another version of the blocks' layout or of page tables, the
 * CPU lacks its instruction set, ..) the same calls go through the daemon, with the same results,
 * and kvq_local_why says why. KVQ_LOCAL=daemon in the environment asks for that. Policy stays with
 * the daemon: while a session is in a kvq_local its blocks stay as the last step left them for this
 * engine, whoever drops or truncates it.
 *
 * Unlike a step of the daemon's, this one takes memory at its end: with KVQ_E_NO_MEMORY or
 * KVQ_E_QUOTA there nothing of that session's step is kept, and the engine may end it again. And K
 * and V that are not finite (KVQ_E_NONFINITE) are found there, when attention has read them.
 *
 * If the daemon dies, what is mapped stays: kvq_local_attend goes on for the step under way, and
 * its end answers KVQ_E_DISCONNECTED. After kvq_reattach all calls answer KVQ_E_CANCELLED: close
 * the kvq_local and open another.
 */
#ifndef KVQ_PUBLIC_IN_CONTEXT_H
#define KVQ_PUBLIC_IN_CONTEXT_H

#include "step.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The sessions that attend here, and their step. It belongs to its queue's thread. */
typedef struct kvq_local kvq_local;

/* Fail with KVQ_E_UNSUPPORTED where it would go through the daemon. */
enum { KVQ_LOCAL_REQUIRE = 1 };

struct kvq_local_options {
    uint32_t size;       /* sizeof(struct kvq_local_options) */
    uint32_t flags;      /* KVQ_LOCAL */
    const char *place;   /* of its sessions: "host" (NULL too) or a kvq_gpu_info.place */
    uint64_t max_tokens; /* of a session, a step's included: so long are page tables; 0: 131,072 */
    /* The host: how many threads may be used at a time, the caller's included; 0: 1. `parallel`
     * calls item(arg, i) once for every i below n, in any order and on any threads, and returns
     * when all have returned. NULL: the library starts threads of its own, until the close. */
    uint32_t threads;
    void (*parallel)(void *context, uint32_t n, void (*item)(void *arg, uint32_t i), void *arg);
    void *parallel_context;
};

/* Belongs to the queue's thread. options may be NULL. Close it before the queue. */
KVQ_API KVQ_CHECK int kvq_local_open(kvq_queue *queue, const struct kvq_local_options *options,
                                     kvq_local **local);
KVQ_API void kvq_local_close(kvq_local **local);

/* NULL if attention runs here, else a sentence that says why it goes through the daemon. */
KVQ_API const char *kvq_local_why(const kvq_local *local);

/* Takes an open session in: maps what is not mapped yet. System calls; not for every step.
 * KVQ_E_LIMIT: it is longer than max_tokens. KVQ_E_EXISTS: another kvq_local of this client has it.
 * Closing the session takes it out. */
KVQ_API KVQ_CHECK int kvq_local_add(kvq_local *local, kvq_session session);
KVQ_API int kvq_local_remove(kvq_local *local, kvq_session session);

/* Begins a step of sessions that were added (append 0: of reading alone). A session that something
 * else has changed since (truncated, appended to by requests of its own) is looked at anew first,
 * with a request. Statuses per entry, as of kvq_step_begin. One step at a time. */
KVQ_API KVQ_CHECK int kvq_local_begin(kvq_local *local, struct kvq_entry *entries, uint32_t n);

/* As kvq_append_attend, or kvq_attend for entries with append 0; work->step is not looked at. k and
 * v must stay as they are until kvq_local_end; without a buffer they are those that were given
 * before, for this layer or the one whose cache it reads. KVQ_E_INVALID for paged K and V. */
KVQ_API KVQ_CHECK int kvq_local_attend(kvq_local *local, const struct kvq_work *work,
                                       struct kvq_entry *entries, uint32_t n);

/* Commits the step: hands over K and V of all layers as they were given to kvq_local_attend, or as
 * `work` says; with its k and v NULL it says what tokens they are (work->ids) and no more. Statuses
 * per entry, as of kvq_step. Entries that are left out are as before. */
KVQ_API KVQ_CHECK int kvq_local_end(kvq_local *local, const struct kvq_step_work *work,
                                    struct kvq_entry *entries, uint32_t n);

/* Ends the step, and leaves every session as it was before. */
KVQ_API void kvq_local_abort(kvq_local *local);

/* On a GPU the three calls have a stream (as in kvq_attend_on_stream, and in its order) and a
 * bucket: device memory for the attentions of a step of up to so many sessions and tokens. A bucket
 * serves one stream at a time. Its attentions may be captured into a graph:
 * kvq_local_attend_on_stream on a stream that is being captured only notes the tensors and
 * launches; kvq_local_begin_on_stream before each replay, outside of the graph, sets the bucket up
 * for the entries it is given, which may be others each time, up to the bucket's limits, and of any
 * lengths. Rows may differ; tensors are those of the capture. kvq_local_end_on_stream comes after
 * the replay, outside of it. Tensors may lie in buffers of the host: the first call that has one
 * pins it; if that call is captured it is refused (KVQ_E_UNSUPPORTED).
 * The next step's work begins, in the order of the stream, when the daemon has published. The host
 * may be one step ahead. */
typedef struct kvq_bucket kvq_bucket;

struct kvq_bucket_options {
    uint32_t size;         /* sizeof(struct kvq_bucket_options) */
    uint32_t max_sessions; /* in a step; 0: 1 */
    uint32_t max_queries;  /* of a session in a step; 0: 1 */
    kvq_session session;   /* any of those that it is for: their layers are alike */
    uint64_t max_tokens;   /* of a session, the step's included; 0: the kvq_local's */
};

KVQ_API KVQ_CHECK int kvq_bucket_open(kvq_local *local, const struct kvq_bucket_options *options,
                                      kvq_bucket **bucket);
/* When its stream has passed its last work. Before its kvq_local is closed. */
KVQ_API void kvq_bucket_close(kvq_bucket **bucket);

KVQ_API KVQ_CHECK int kvq_local_begin_on_stream(kvq_local *local, kvq_bucket *bucket,
                                                struct kvq_entry *entries, uint32_t n,
                                                void *stream);
KVQ_API KVQ_CHECK int kvq_local_attend_on_stream(kvq_local *local, kvq_bucket *bucket,
                                                 const struct kvq_work *work,
                                                 struct kvq_entry *entries, uint32_t n,
                                                 void *stream);
/* What only the GPU can find (KVQ_E_NONFINITE) is told by the session's next
 * kvq_local_end_on_stream or kvq_step (by KVQ_ORDER_HOST at once): that session is then as it was
 * before the step that had such values. */
KVQ_API KVQ_CHECK int kvq_local_end_on_stream(kvq_local *local, const struct kvq_step_work *work,
                                              struct kvq_entry *entries, uint32_t n, void *stream);

#ifdef __cplusplus
}
#endif

#endif
