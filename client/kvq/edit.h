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
 * whole call). Within max_rollback the session is as if the engine had never appended the tokens
 * behind. Deeper: KVQ_E_ROLLBACK; the session is unchanged, and entry.value is the smallest count
 * that a truncation can reach. Overwrites entry.list_token. KVQ_E_BUSY: the session has an open
 * step, or another client reads tokens behind `tokens[i]` in its own context (in_context.h); the
 * engine may try again when that is over. */
KVQ_API KVQ_CHECK int kvq_truncate(kvq_queue *queue, struct kvq_entry *entries,
                                   const uint64_t *tokens, uint32_t n);

/* Forks each session at entry.position tokens: a new unnamed session of this client, which shares
 * the packed blocks. entry.value is its handle, which the engine closes like any other. The source
 * must have no open step. A session can be forked where packed blocks end (each multiple of 128
 * tokens in most formats; formats.md has the tokens of a unit) and anywhere within its newest
 * tokens: max_rollback of them, and those that are not packed yet; but not where tokens are gone
 * that a layer's window sees there, nor within what a format has learned from (0 excepted).
 * Elsewhere: KVQ_E_ROLLBACK; entry.value is then a position before it where a fork is possible, 0
 * if no other is. */
KVQ_API KVQ_CHECK int kvq_fork(kvq_queue *queue, struct kvq_entry *entries, uint32_t n);

/* Accepts a branch of a tree of drafts. Of the last entry.append tokens (at most max_rollback) each
 * session keeps `list_token` tokens and moves them together; their indices are ascending int32 at
 * element `row` of the list. KVQ_E_ROLLBACK and KVQ_E_BUSY as of kvq_truncate. */
KVQ_API KVQ_CHECK int kvq_accept(kvq_queue *queue, const kvq_buffer *list, uint64_t list_offset,
                                 struct kvq_entry *entries, uint32_t n);

/* Reads K and V of tokens [position, position + append) of one layer, dequantized and in the basis
 * that the engine appended them in, into work->k and work->v: token t at row `row` + t - position.
 * The call does not write rows of tokens that the session lacks (behind its end, or freed behind
 * the layer's sliding window); entry.value is the number of tokens written. */
KVQ_API KVQ_CHECK int kvq_read(kvq_queue *queue, const struct kvq_work *work,
                               struct kvq_entry *entries, uint32_t n);

#ifdef __cplusplus
}
#endif

#endif
