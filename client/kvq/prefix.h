/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/prefix.h: sessions that begin with the same tokens share the blocks of these. For engines
 * whose requests have a system prompt, examples, or an earlier chat in common.
 *
 * Sessions that begin with the same tokens share the blocks of these, whichever client or engine
 * appended them, and after it has closed its session as well, for a while and as long as there is
 * room. The ids of tokens are told with the step that appends them (kvq_step_begin_ids,
 * kvq_step_work.ids, also of kvq_local_end), without a gap from the first token on. A session that
 * is created with kvq_session_options.prefix then has as many of these tokens as are there, as if
 * it had been forked there (info.tokens: its position); append the others.
 *
 * A daemon with storage_dir keeps the ids with the sessions that it saves, and finds what they
 * begin with on disk as well: requests wait until their layer is read. Where it cannot be read the
 * session begins with less; if it was open already, requests fail (KVQ_E_DAMAGED): open it anew.
 *
 * Shared are whole pages of 128 tokens that cannot change any more: behind max_rollback, and packed
 * in all layers. Nothing is shared that means something else: namespace (unless the configuration
 * says so), model, salt, adapter, layers, formats, dtype, v_rotation, attention and shard must be
 * equal, and the digests of images and audio among the tokens. `model` must be given. Layers with a
 * sliding window let a prefix end only where all is there that the window still sees. Sessions of
 * formats that keep sinks, outliers or factors of the prompt share by kvq_fork alone.
 *
 * Of a sharded session the shortest count of its shards is answered. Ranks that must begin alike
 * ask first, open with prefix.tokens set to that count, and look at info.tokens.
 */
#ifndef KVQ_PUBLIC_PREFIX_H
#define KVQ_PUBLIC_PREFIX_H

#include "session.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How many tokens of options->prefix a session created with these options would begin with: 0 or a
 * multiple of 128. Holds nothing: it may be less a moment later. KVQ_E_UNSUPPORTED where sessions
 * of these options share by forks alone, KVQ_E_BUFFER, KVQ_E_BOUNDS, or as kvq_session_open. */
KVQ_API KVQ_CHECK int kvq_lookup(kvq_client *client, const struct kvq_session_options *options,
                                 uint64_t *tokens);

/* Says what tokens stand for that are yet to be appended. Each span takes the place of those that
 * it overlaps. KVQ_E_POSITION (they are there already), KVQ_E_INVALID, KVQ_E_LIMIT. */
KVQ_API KVQ_CHECK int kvq_session_spans(kvq_client *client, kvq_session session,
                                        const struct kvq_span *spans, uint32_t n);

#ifdef __cplusplus
}
#endif

#endif
