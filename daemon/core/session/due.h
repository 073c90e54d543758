// SPDX-License-Identifier: Apache-2.0
//
// When published sessions are looked at (due.c). It owns the timer wheel, core->due.slots. Part of
// state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_DUE_H
#define KVQ_DAEMON_CORE_SESSION_DUE_H

#include "daemon/core/session/session.h"

void kvq__dues_open(struct kvq__core *core);
// Schedules the look at the end of its keep time, and of its other shards'.
void kvq__due_set(struct kvq__session *session);
void kvq__due_clear(struct kvq__session *session);
// Ends sessions whose keep time is over, some of them if there are many.
void kvq__dues_tick(struct kvq__core *core);

#endif
