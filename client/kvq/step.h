/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/step.h: steps of the model: the engine hands over K, V and Q of each layer, and gets the
 * output of attention. For everybody.
 *
 *     kvq_step_begin     the sessions of the batch, their token counts, tokens to come
 *     kvq_append_attend  for each layer: K and V in, Q in, attention output and LSE out
 *     kvq_step_end       commits: only now the tokens are part of the session
 *
 * kvq_step does a whole step in one request, for engines that attend themselves. ticket.h has the
 * same calls without waiting; edit.h shortens, forks and reads sessions.
 */
#ifndef KVQ_PUBLIC_STEP_H
#define KVQ_PUBLIC_STEP_H

#include "queue.h"
#include "session.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One session's part in a request. Tensors are ragged: the session's tokens are rows row, row + 1,
 * ... of k and v, its queries are rows q_row, ... of q, out and lse. */
struct kvq_entry {
    kvq_session session;
    uint64_t position; /* the session's committed token count, else KVQ_E_POSITION */
    uint32_t row, q_row;
    uint32_t append;     /* tokens of this step (0: attend only) */
    uint16_t queries;    /* query tokens: the last of the step; with append 0 they stand behind
                          * the session's tokens, one behind the other, and see all of these that
                          * the layer's window leaves them. For nodes of a tree that stand at one
                          * depth, on a layer with a window, make one call for each depth */
    uint16_t list_token; /* paged: tokens to skip in the first page */
    /* Results, for use after a call that returned 0. A call that fails as a whole sets status to
     * its code and value to 0; where the library refuses the call itself, both stay as they are. */
    int32_t status;
    uint64_t value; /* token count after the call; fork: the new session; read: tokens read */
};

enum { KVQ_PAST_ONLY = 1 }; /* attend only to tokens before the step (see merge.h) */

/* K and V in the engine's own paged cache: token t of an entry lies in page list[t / page_tokens]
 * at offset + page * page_stride + (t % page_tokens) * token_stride. `list` holds int32; an
 * entry's list starts at element `row`. */
struct kvq_pages {
    uint32_t page_tokens;
    uint64_t k_page_stride, v_page_stride;
    const kvq_buffer *list;
    uint64_t list_offset;
};

/* Ids of the tokens that a step appends: int32 in a buffer on the host. An entry's ids start at
 * element `q_row`. */
struct kvq_ids {
    const kvq_buffer *buffer; /* NULL: the engine gives no ids */
    uint64_t offset;          /* a multiple of 4 */
};

/* What a call on one layer reads and writes. The caller may free the structure when the call
 * returns. */
struct kvq_work {
    uint64_t step; /* from kvq_step_begin */
    uint32_t layer, flags;
    /* CLOCK_MONOTONIC; 0: none. A request whose work has not begun by then ends with KVQ_E_DEADLINE
     * and has done nothing; one whose work has begun goes on to its end. A call that
     * waits returns with the daemon's answer, however late that is: a daemon that is stopped
     * (SIGSTOP) holds up the call. kvq_wait has a deadline of its own, without the daemon. */
    uint64_t deadline_ns;
    struct kvq_tensor k, v, q, out;
    struct kvq_tensor lse;  /* fp32 [rows][query heads]; optional */
    struct kvq_pages pages; /* page_tokens 0: not paged */
    struct kvq_ids ids;     /* of KVQ_DO_STEP_BEGIN or KVQ_DO_STEP_END */
};

/* Begins a step of n sessions (at most 1,024): checks positions, and reserves memory for all
 * layers, so that no later call of the step fails for lack of memory. One call is excepted: an end
 * that brings token ids (KVQ_DO_STEP_END of ticket.h) needs room for the ids, and an entry that
 * gets none fails with KVQ_E_NO_MEMORY or KVQ_E_QUOTA and stays in the step. *step is the step's
 * number, by which any queue of the client may append, attend and end; the step is open until it
 * ends, or `queue` is closed. Entries that failed are not in the step: KVQ_E_POSITION,
 * KVQ_E_NO_MEMORY, KVQ_E_BUSY, KVQ_E_LIMIT, KVQ_E_TAKEN, ... per entry: look at each entry's
 * status. KVQ_E_LIMIT of the call: the client has 64 open steps, the most that it can have. */
KVQ_API KVQ_CHECK int kvq_step_begin(kvq_queue *queue, struct kvq_entry *entries, uint32_t n,
                                     uint64_t *step);

/* As kvq_step_begin, with the ids of the tokens. */
KVQ_API KVQ_CHECK int kvq_step_begin_ids(kvq_queue *queue, struct kvq_entry *entries, uint32_t n,
                                         const struct kvq_ids *ids, uint64_t *step);

/* Hands over K and V of one layer for sessions of the step, all tokens of an entry at once. The
 * daemon rounds fp32 to the dtype of the window; it clamps values beyond that range and counts them
 * (saturated_values). A session with NaN or infinity fails with KVQ_E_NONFINITE and leaves the
 * step. */
KVQ_API KVQ_CHECK int kvq_append(kvq_queue *queue, const struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n);

/* Attention of one layer over the session's tokens and those of the step. Without a step
 * (work->step 0, entries with append 0) over the committed tokens. KVQ_E_INCOMPLETE: K and V of the
 * layer are not appended yet; the session stays in the step. KVQ_E_LIMIT: on a GPU, the partial
 * sums of one token are more than the daemon has memory for (128 heads of 128 over two million
 * tokens). */
KVQ_API KVQ_CHECK int kvq_attend(kvq_queue *queue, const struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n);

/* kvq_append and kvq_attend in one request. The bytes that a request writes (out and lse here, k
 * and v of kvq_read) must overlap neither each other nor the bytes that it reads, and no two
 * entries may write the same rows: else KVQ_E_INVALID. */
KVQ_API KVQ_CHECK int kvq_append_attend(kvq_queue *queue, const struct kvq_work *work,
                                        struct kvq_entry *entries, uint32_t n);

/* Commits the step's sessions; look at each entry's status. A session that lacks a layer, or got K
 * and V for a layer without a cache of its own, fails with KVQ_E_INCOMPLETE: it leaves the step and
 * stands as before. With n 0 (entries may be NULL) the call commits all sessions of the step, or
 * none if one fails: then it returns KVQ_E_INCOMPLETE, and the step stays open. On a GPU the call
 * waits for the step's work. A session with values that are not finite fails with KVQ_E_NONFINITE
 * and leaves the step; with n 0 that is the code of the call, which then commits nothing, and the
 * step stays open for the other sessions, if there are any. */
KVQ_API KVQ_CHECK int kvq_step_end(kvq_queue *queue, uint64_t step, struct kvq_entry *entries,
                                   uint32_t n);

/* Ends the step for n sessions (n 0: all sessions of the step), and leaves them as they were before
 * the step. Needs no ticket: while 8 requests are under way it waits for one of them. */
KVQ_API KVQ_CHECK int kvq_step_abort(kvq_queue *queue, uint64_t step, struct kvq_entry *entries,
                                     uint32_t n);

/* A whole step in one request: K and V of all layers. All sessions of the step have n_layers
 * layers. Afterwards each session stands as after kvq_step_begin, kvq_append of each layer and
 * kvq_step_end, or as before: codes per entry as of these calls. On a GPU an entry that fails with
 * KVQ_E_UNSUPPORTED and a value past its position has been committed; its page table could not be
 * written (see kvq_local_end_on_stream). Tensors of layers with kv_from have no buffer. `pages`
 * holds for all layers (page_tokens 0: not paged). */
struct kvq_step_work {
    const struct kvq_tensor *k, *v; /* n_layers each */
    uint32_t n_layers;
    uint64_t deadline_ns; /* as of kvq_work */
    struct kvq_pages pages;
    struct kvq_ids ids; /* with pages: the same buffer and offset as their list */
};
KVQ_API KVQ_CHECK int kvq_step(kvq_queue *queue, const struct kvq_step_work *work,
                               struct kvq_entry *entries, uint32_t n);

/* A request that does nothing but pass the daemon's checks: measures the ring. */
KVQ_API KVQ_CHECK int kvq_nop(kvq_queue *queue, struct kvq_entry *entries, uint32_t n);

#ifdef __cplusplus
}
#endif

#endif
