/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/step.h: the work with sessions: steps of the model, each with K and V in, attention out. For
 * everybody.
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

/* One session's part in a request. Tensors are ragged: this session's tokens stand in rows
 * row, row + 1, ... of k and v, its queries in rows q_row, ... of q, out and lse. */
struct kvq_entry {
    kvq_session session;
    uint64_t position; /* the session's committed token count, else KVQ_E_POSITION */
    uint32_t row, q_row;
    uint32_t append;     /* tokens of this step (0: attend only) */
    uint16_t queries;    /* query tokens: the step's last; with append 0 behind all tokens */
    uint16_t list_token; /* paged: tokens to skip in the first page */
    /* Results. */
    int32_t status;
    uint64_t value; /* token count afterwards; fork: the new session; read: tokens read */
};

enum { KVQ_PAST_ONLY = 1 }; /* attend only to tokens before the step; merge the rest by LSE */

/* K and V in the engine's own paged cache: token t of an entry lies in page list[t / page_tokens]
 * at offset + page * page_stride + (t % page_tokens) * token_stride. `list` holds int32; an
 * entry's list starts at element `row`. */
struct kvq_pages {
    uint32_t page_tokens;
    uint64_t k_page_stride, v_page_stride;
    const kvq_buffer *list;
    uint64_t list_offset;
};

/* Ids of the tokens that a step appends, int32 in a buffer in the host's memory: an entry's start
 * at element `q_row`. */
struct kvq_ids {
    const kvq_buffer *buffer; /* NULL: none are told */
    uint64_t offset;          /* a multiple of 4 */
};

/* What a call on one layer reads and writes. The caller's: it may go when the call returns. */
struct kvq_work {
    uint64_t step; /* from kvq_step_begin */
    uint32_t layer, flags;
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    struct kvq_tensor k, v, q, out;
    struct kvq_tensor lse;  /* fp32 [rows][query heads]; optional */
    struct kvq_pages pages; /* page_tokens 0: not paged */
    struct kvq_ids ids;     /* of KVQ_DO_STEP_BEGIN or KVQ_DO_STEP_END */
};

/* Begins a step for n sessions (at most 1,024): checks positions, reserves memory for all layers,
 * so that no later call of the step fails for room. Entries that failed are not in the step.
 * *step is its number. KVQ_E_POSITION, KVQ_E_NO_MEMORY, KVQ_E_BUSY, KVQ_E_LIMIT, ... per entry. */
KVQ_API KVQ_CHECK int kvq_step_begin(kvq_queue *queue, struct kvq_entry *entries, uint32_t n,
                                     uint64_t *step);

/* The same, and says which tokens they are. */
KVQ_API KVQ_CHECK int kvq_step_begin_ids(kvq_queue *queue, struct kvq_entry *entries, uint32_t n,
                                         const struct kvq_ids *ids, uint64_t *step);

/* Hands over K and V of one layer for sessions of the step (all tokens of an entry at once;
 * fp32 is rounded to the window's dtype, saturating and counted; NaN and infinity fail that
 * session with KVQ_E_NONFINITE). */
KVQ_API KVQ_CHECK int kvq_append(kvq_queue *queue, const struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n);

/* Decode attention of one layer. Legal without a step (work->step 0) on committed tokens: then
 * entries have append 0. */
KVQ_API KVQ_CHECK int kvq_attend(kvq_queue *queue, const struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n);

/* kvq_append and kvq_attend in one request. What is written (out and lse here, k and v of kvq_read)
 * overlaps neither itself nor what the request reads, nor do the rows of two entries: else
 * KVQ_E_INVALID. */
KVQ_API KVQ_CHECK int kvq_append_attend(kvq_queue *queue, const struct kvq_work *work,
                                        struct kvq_entry *entries, uint32_t n);

/* Commits the step's sessions. One that lacks a layer, or was asked to append what it cannot (to a
 * layer without a cache of its own), fails with KVQ_E_INCOMPLETE and is out of the step,
 * as it was before: look at each entry's status. n 0 (entries may be NULL): all of the step's
 * sessions or, if one cannot be, none, with KVQ_E_INCOMPLETE; the step is then still open. On a GPU
 * it waits for the work, and a session whose values were not finite fails with KVQ_E_NONFINITE, is
 * out of the step; with n 0 that is the whole call's code, nothing is committed, and the step is
 * still open for the others, if there are any. */
KVQ_API KVQ_CHECK int kvq_step_end(kvq_queue *queue, uint64_t step, struct kvq_entry *entries,
                                   uint32_t n);

/* Leaves every session (n 0: all of the step) as it was before the step. */
KVQ_API KVQ_CHECK int kvq_step_abort(kvq_queue *queue, uint64_t step, struct kvq_entry *entries,
                                     uint32_t n);

/* A whole step in one request: K and V of all layers of its sessions, which all have so many
 * layers. The sessions are as after kvq_step_begin, kvq_append of each layer and kvq_step_end, or
 * as before: those codes per entry. Layers with kv_from have tensors without a buffer; all have the
 * same `pages` (page_tokens 0: not paged). */
struct kvq_step_work {
    const struct kvq_tensor *k, *v; /* n_layers each */
    uint32_t n_layers;
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    struct kvq_pages pages;
    struct kvq_ids ids; /* with pages: the same buffer and offset as their list */
};
KVQ_API KVQ_CHECK int kvq_step(kvq_queue *queue, const struct kvq_step_work *work,
                               struct kvq_entry *entries, uint32_t n);

/* A request that does nothing, through the same validation: measures the ring. */
KVQ_API KVQ_CHECK int kvq_nop(kvq_queue *queue, struct kvq_entry *entries, uint32_t n);

#ifdef __cplusplus
}
#endif

#endif
