/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/shards.h: the contract of `shard` and `shards` of kvq_session_options. For engines that run
 * a model as several shards (tensor parallel, pipeline). This header declares nothing.
 *
 * A model that runs as several shards, by KV heads or by layers, has one session with as many
 * shards. Each rank, usually a process of its own, opens its shard by the same name with its own
 * `shard` (and layers, and place). All ranks give the same `shards`, model, max_rollback,
 * prompt_tokens, v_rotation, dtype and on_detach, else KVQ_E_EXISTS. Each shard has a handle, a
 * writer and a token count of its own. An engine works with a shard as with an unsharded session,
 * with these differences:
 *
 * - A step is one step of all shards. kvq_step_begin returns KVQ_E_NO_SESSION until every shard has
 *   been opened once: let all ranks open their shards before the first step.
 * - kvq_step_end of a shard checks the shard's part of the step and returns at once; entry.value is
 *   the token count after the commit. The daemon commits the tokens on all shards at once, when the
 *   last shard has ended its step. Later requests through the handle wait until then (give them a
 *   deadline if a rank may never end the step); readers see the committed tokens. After its
 *   kvq_step_end the shard may be closed, and its client may even die.
 * - If a shard leaves the step before its kvq_step_end (abort, close, take-over, death of its
 *   client, KVQ_E_NONFINITE, KVQ_E_INCOMPLETE), the daemon commits the step on no shard: all stand
 *   as before. The other shards' next call on that step, or behind its tokens, returns
 *   KVQ_E_CANCELLED, or KVQ_E_NO_STEP if the step has no other session; kvq_error_text names the
 *   shard that left.
 * - All shards begin the step at the same count and append as many tokens; else the last shard's
 *   kvq_step_end returns KVQ_E_POSITION, and the daemon commits the step on no shard. kvq_truncate
 *   and kvq_accept act on one shard: call them alike on all shards. A rank may begin the next step
 *   before the others have made that call.
 * - One queue can write several shards: in one request, or by ending the step of all shards before
 *   it begins the next step of any (else KVQ_E_BUSY). Sessions without a name, and so forks, have
 *   no other shards: each is alone. `shard` and `shards` only keep the prefixes of its tokens apart
 *   from those of other shards.
 * - kvq_session_drop of one shard drops all. keep_seconds counts from the last close of any shard.
 *   An open with n_layers 0 and shards 0 opens a shard as it is.
 * - A saved session can be opened with another number of shards (operations.md in share/doc/kvqd).
 */
#ifndef KVQ_PUBLIC_SHARDS_H
#define KVQ_PUBLIC_SHARDS_H

#include "session.h"

#endif
