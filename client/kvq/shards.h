/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/shards.h: the contract of `shard` and `shards` of kvq_session_options. For engines that run
 * a model as several shards (tensor parallel, pipeline). It declares nothing of its own.
 *
 * A model that runs as several shards, by KV heads or by layers, has one session with as many
 * shards: each is opened by the same name with its own `shard` (and layers, and place), usually by
 * a process of its own, and all with the same `shards`, model, max_rollback, prompt_tokens,
 * v_rotation, dtype and on_detach, else KVQ_E_EXISTS. Each shard has a handle, a writer and a token
 * count of its own. An engine works with a shard as with a session that has no others, but for
 * this:
 *
 * - A step is one step of all shards. kvq_step_begin answers KVQ_E_NO_SESSION as long as a shard
 *   was never opened: let all ranks open theirs before the first step.
 * - kvq_step_end of a shard checks it and returns at once; entry.value is the token count that it
 *   will have. The tokens are committed, on all shards at once, when the last shard has ended its
 *   step. What is asked for through the handle that ended it waits until then (give a deadline if
 *   that may take for ever); readers see the committed tokens.
 *   A shard that has ended its step may be closed, and its client may even die.
 * - If a shard that has not ended the step leaves it (abort, close, take-over, death of its client,
 *   KVQ_E_NONFINITE, KVQ_E_INCOMPLETE) no shard has it, not those either that had ended it: all
 *   stand as before. The others' next call on that step, or behind its tokens, answers
 *   KVQ_E_CANCELLED, or KVQ_E_NO_STEP where the step has no other session; kvq_error_text names the
 *   shard.
 * - All shards begin the step at the same count and append as many tokens; else the last one's
 *   kvq_step_end answers KVQ_E_POSITION and no shard has it. kvq_truncate and kvq_accept act on
 *   one shard, so do the same on all of them; a step may be begun before all have.
 * - One queue can write several shards: in one request, or end all before any begins anew (else
 *   KVQ_E_BUSY). Forks are unnamed and therefore sessions of their own.
 * - Dropping one drops all; the time that a named session is kept counts from the last close of
 *   any. With n_layers 0 and shards 0 a shard is opened as it is.
 * - Saved, it can be opened with another number of shards: see docs/architecture.md.
 */
#ifndef KVQ_PUBLIC_SHARDS_H
#define KVQ_PUBLIC_SHARDS_H

#include "session.h"

#endif
