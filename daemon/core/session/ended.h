// SPDX-License-Identifier: Apache-2.0
//
// Sessions that have ended, whose memory is not free yet (ended.c). It owns core->freeing.ended and
// core->finishing. Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_ENDED_H
#define KVQ_DAEMON_CORE_SESSION_ENDED_H

#include "daemon/core/session/session.h"

// Whole pages that the session can leave to the index of prefixes.
static inline uint32_t kvq__ended_pages(const struct kvq__session *s)
{
    return (uint32_t)(kvq__min(s->ids.known, s->tokens) / KVQ_BLOCK_TOKENS);
}
// The session is about to end with its shards, since nobody needs it any more: those that can are
// finished first (finish.h).
void kvq__ended_finish_first(struct kvq__session *session);
// Frees the session's memory in pieces, the first ones at once: its pages, and the rest when no
// request references it any more. Not before it is finished.
void kvq__ended_add(struct kvq__session *session);
// It is, or is given up: its memory goes from the next turn on.
void kvq__ended_finished(struct kvq__session *session);
void kvq__ended_give_up(struct kvq__core *core); // all that are being finished
// Gives up those whose memory helps against the shortage.
void kvq__ended_give_way(struct kvq__core *core, const struct kvq__shortage *shortage);
bool kvq__ended_poll(struct kvq__core *core); // a piece; true if there was something to do
// Whether freeing the ended sessions can satisfy the block that was refused. Those that are being
// finished are given up for it.
bool kvq__ended_helps(struct kvq__core *core, const struct kvq__shortage *shortage);
// Frees one ended session of the namespace at once, for its bookkeeping memory. False: there is
// none.
bool kvq__ended_reclaim(struct kvq__namespace *ns);
void kvq__ended_close(struct kvq__core *core); // frees all at once; nothing is under way

#endif
