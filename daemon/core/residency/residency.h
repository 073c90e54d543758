// SPDX-License-Identifier: Apache-2.0
//
// What a session's beginning and end are to residency.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_RESIDENCY_H
#define KVQ_DAEMON_CORE_RESIDENCY_RESIDENCY_H

#include "daemon/core/state.h"

// The session, which has taken the blocks of the node and of those before it, follows whatever is
// yet to read them. 0 or KVQ_E_NO_MEMORY.
int kvq__follow(struct kvq__session *session, const struct kvq__node *last);
// The session ends, or is never to be seen.
void kvq__follow_leave(struct kvq__session *session);
// The session is about to end: what reads its blocks may stop.
void kvq__restore_drop(struct kvq__session *session);

// Ways to and from GPUs, which nobody uses any more.
void kvq__stagings_close(struct kvq__core *core);

#endif
