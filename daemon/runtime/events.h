// SPDX-License-Identifier: Apache-2.0
//
// Events of the core, on their way from the poller's thread to the log and to those who ask.
#ifndef KVQ_DAEMON_RUNTIME_EVENTS_H
#define KVQ_DAEMON_RUNTIME_EVENTS_H

#include <stdbool.h>

#include "daemon/core/core.h"

struct kvq__server;

// The core's event callback; context is the struct kvq__server. Poller's thread. Events that come
// faster than the loop takes them are dropped, warnings last. Their count is logged before the next
// one that is not, whose number leaves a gap of that count. Events of level debug are for the log
// alone: they have no numbers, nobody is given them, and those that are dropped do not count.
void kvq__event_from_core(void *context, const struct kvq__event *event);

// Loop's thread: logs and keeps it at once.
void kvq__event_tell(struct kvq__server *server, const struct kvq__event *event);
// Loop's thread: whether no event is on its way to the loop.
bool kvq__events_idle(void);

#endif
