/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/edit.h: shortening sessions, forking them, keeping a branch of a tree of drafts, and reading
 * back what they hold. For speculative decoding, beam search, and for tools.
 */
#ifndef KVQ_PUBLIC_EDIT_H
#define KVQ_PUBLIC_EDIT_H

#include "step.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Shortens each session to `tokens[i]` tokens, at most entry.position (else KVQ_E_INVALID for the
 * whole call). Within max_rollback the session is as if the rest had never been; deeper:
 * KVQ_E_ROLLBACK, nothing is changed, and entry.value is the shortest length it can be given.
 * Overwrites entry.list_token. The sessions must have no open step. */
KVQ_API KVQ_CHECK int kvq_truncate(kvq_queue *queue, struct kvq_entry *entries,
                                   const uint64_t *tokens, uint32_t n);

/* A new unnamed session of this client with the first entry.position tokens of each; shares
 * what is packed. entry.value is its handle, to be closed like any other. The source must have
 * no open step. KVQ_E_ROLLBACK if it cannot be forked there; entry.value says where it can. */
KVQ_API KVQ_CHECK int kvq_fork(kvq_queue *queue, struct kvq_entry *entries, uint32_t n);

/* Of the last entry.append tokens (at most max_rollback) keeps those at `list_token` indices,
 * ascending int32 at element `row` of the list, and moves them together: tree drafts. */
KVQ_API KVQ_CHECK int kvq_accept(kvq_queue *queue, const kvq_buffer *list, uint64_t list_offset,
                                 struct kvq_entry *entries, uint32_t n);

/* Tokens [position, position + append) of one layer, dequantized, in the engine's basis, into
 * work->k and work->v: token t at row `row` + t - position. Rows of tokens that the session does
 * not have (behind its end, or let go behind the layer's sliding window) are left untouched;
 * entry.value is the number of tokens written. */
KVQ_API KVQ_CHECK int kvq_read(kvq_queue *queue, const struct kvq_work *work,
                               struct kvq_entry *entries, uint32_t n);

#ifdef __cplusplus
}
#endif

#endif
