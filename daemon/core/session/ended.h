// SPDX-License-Identifier: Apache-2.0
//
// Sessions that have ended, whose memory is not free yet (ended.c). It owns core->ended. Part of
// state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_ENDED_H
#define KVQ_DAEMON_CORE_SESSION_ENDED_H

#include "daemon/core/session/session.h"

// Frees the session's memory in pieces, the first ones at once: its pages, and the rest when no
// request references it any more.
void kvq__ended_add(struct kvq__session *session);
bool kvq__ended_poll(struct kvq__core *core); // a piece; true if there was something to do
// Whether freeing the ended sessions can satisfy the block that was refused.
bool kvq__ended_helps(const struct kvq__core *core, const struct kvq__shortage *shortage);
// Frees one ended session of the namespace at once, for its bookkeeping memory. False: there is
// none.
bool kvq__ended_reclaim(struct kvq__namespace *ns);
void kvq__ended_close(struct kvq__core *core); // frees all at once; nothing is under way

#endif
