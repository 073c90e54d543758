// SPDX-License-Identifier: Apache-2.0
//
// Sessions that have ended and have yet to leave their last pages to the index of prefixes
// (finish.c): those of core->finishing (ended.h), one after the other. Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_FINISH_H
#define KVQ_DAEMON_CORE_SESSION_FINISH_H

#include "daemon/core/session/session.h"

// Takes the first session further, if it does not wait for packing. True if there was something to
// do.
bool kvq__finish_poll(struct kvq__core *core);
// The session that is to be packed in the background now; NULL: none is.
struct kvq__session *kvq__finish_next(const struct kvq__core *core);
// Something of a session was packed.
void kvq__finish_packed(struct kvq__session *session);

#endif
