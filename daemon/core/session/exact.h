// SPDX-License-Identifier: Apache-2.0
//
// Prompts that are attended in full precision (exact.c). Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_EXACT_H
#define KVQ_DAEMON_CORE_SESSION_EXACT_H

#include "daemon/core/mem/room.h"
#include "daemon/core/session/session.h"

// How many tokens of a new session's prompt stay in 16 bits until the prompt has ended: all of
// them, or none if they would take more than 1 / KVQ_EXACT_PROMPT_SHARE of the pool or of the
// namespace's limit.
uint64_t kvq__exact_fits(const struct kvq__session *session, uint64_t prompt_tokens);
// Bytes of raw blocks that the session has only because its prompt is kept in 16 bits.
uint64_t kvq__exact_bytes(const struct kvq__session *session);
// Packs prompts early to make room, the largest first, if that is enough together with the bytes
// that are free and that evictions may give (`others`). KVQ__HELP_NOW while prompts are being
// packed, KVQ__HELP_LATER if requests under way or a GPU have to end first, KVQ__HELP_NONE if
// prompts cannot help. *reach: so much there would be if all prompts gave way; 0: none can.
enum kvq__help kvq__exact_give_way(struct kvq__core *core,
                                   const struct kvq__eviction_request *asked, uint64_t free,
                                   uint64_t others, uint64_t *reach);

// The session's count has changed, it was published, or has come back from disk; and it ends, or
// goes there.
void kvq__exact_note(struct kvq__session *session);
void kvq__exact_leave(struct kvq__session *session);
// No request uses the session any more: its prompt may be packed if it gives way.
void kvq__exact_unused(struct kvq__session *session);

#endif
