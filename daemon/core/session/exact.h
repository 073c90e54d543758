// SPDX-License-Identifier: Apache-2.0
//
// Prompts that are attended in full precision (exact.c). Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_EXACT_H
#define KVQ_DAEMON_CORE_SESSION_EXACT_H

#include "daemon/core/session/session.h"

// How many tokens of a new session's prompt are kept in 16 bits until it has ended: all, or none
// where that takes more than a share of its place or of its namespace's limit.
uint64_t kvq__exact_fits(const struct kvq__session *session, uint64_t prompt_tokens);
// Bytes of a session that such a prompt has and would not have if it were packed as it comes.
uint64_t kvq__exact_bytes(const struct kvq__session *session);
// Has prompts packed that hold what is missing, those first that hold most, if that is enough with
// the bytes that are free and those that others may give. KVQ__HELP_NOW while some are being
// packed, KVQ__HELP_LATER if requests under way or a GPU come first, KVQ__HELP_NONE if there is
// nothing to be had of them.
enum kvq__help kvq__exact_give_way(struct kvq__core *core,
                                   const struct kvq__eviction_request *asked, uint64_t free,
                                   uint64_t others);

// Its count has changed, or it is published; and it ends.
void kvq__exact_note(struct kvq__session *session);
void kvq__exact_leave(struct kvq__session *session);
// Nothing uses it any more: its prompt may be packed.
void kvq__exact_unused(struct kvq__session *session);

#endif
