/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/prefix.h: prefix caching: sessions that begin with the same tokens share the blocks of these
 * tokens. For engines whose requests have a system prompt, examples, or an earlier chat in common.
 *
 * A session may share the blocks of a prefix whichever client or engine appended the tokens. The
 * daemon keeps the blocks for a while after the last session of a prefix was closed, as long as
 * there is room. Engines give the ids of tokens with the step that appends them
 * (kvq_step_begin_ids, kvq_step_work.ids, also of kvq_local_end), without a gap from the first
 * token on. A session that is created with kvq_session_options.prefix begins with as many of these
 * tokens as the daemon has, as after a fork (info.tokens: its position); append the others.
 *
 * A daemon with storage_dir keeps the ids with the sessions that it saves, and finds prefixes on
 * disk as well: requests wait until the daemon has read the layer that they need. If a prefix
 * cannot be read, the session begins with fewer tokens; in a session that is already open, requests
 * fail with KVQ_E_DAMAGED: open the session anew.
 *
 * Sessions share whole pages of 128 tokens that cannot change any more: behind max_rollback, and
 * packed in all layers. When a session on the host ends because nobody needs it any more (its last
 * handle is closed, and it has no name or KVQ_ON_DETACH_DROP; kvq_session_drop; its client ended),
 * the daemon packs the rest of its whole pages in the background, those within max_rollback as
 * well, and other sessions find them a moment after the call. It gives that up if somebody is
 * refused the memory, or if it drains. Sessions share only if they agree in namespace (unless the
 * configuration says otherwise), model, salt, adapter, layers, formats, dtype, v_rotation,
 * attention and shard, and in the digests of images and audio among the tokens. `model` must be
 * set. In a layer with a sliding window a prefix can end only where the daemon has all tokens that
 * the window still sees. Sessions of formats that keep outliers or factors of the prompt share by
 * kvq_fork alone.
 *
 * For a sharded session the daemon answers the smallest count of its shards. Ranks that must begin
 * at the same token ask first, open with prefix.tokens set to that count, and check info.tokens.
 */
#ifndef KVQ_PUBLIC_PREFIX_H
#define KVQ_PUBLIC_PREFIX_H

#include "session.h"

#define KVQ_DIGEST_BYTES 16

#ifdef __cplusplus
extern "C" {
#endif

/* Counts the tokens of options->prefix that a session created with these options would begin with:
 * 0 or a multiple of 128. The call holds no blocks: the count may be smaller a moment later.
 * KVQ_E_UNSUPPORTED where sessions of these options share by forks alone, KVQ_E_BUFFER,
 * KVQ_E_BOUNDS, or as kvq_session_open. */
KVQ_API KVQ_CHECK int kvq_lookup(kvq_client *client, const struct kvq_session_options *options,
                                 uint64_t *tokens);

/* Says which of the tokens that the session will append stand for images or audio. A span replaces
 * earlier spans that overlap it. KVQ_E_POSITION (the session has these tokens already),
 * KVQ_E_INVALID, KVQ_E_LIMIT. */
KVQ_API KVQ_CHECK int kvq_session_spans(kvq_client *client, kvq_session session,
                                        const struct kvq_span *spans, uint32_t n);

/* Digest of bytes, for `model` (of all weights) and for spans: XXH3's of 128 bits, most significant
 * byte first; the same on every machine and in every version of libkvq. Reads as fast as memory
 * does; 0 bytes have a digest, too. Where a user could gain by an image that has another one's
 * digest, take SHA-256: XXH3's can be forged. Pure function, for any thread. */
KVQ_API void kvq_digest(const void *data, size_t bytes, uint8_t digest[KVQ_DIGEST_BYTES]);

#ifdef __cplusplus
}
#endif

#endif
