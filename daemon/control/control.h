// SPDX-License-Identifier: Apache-2.0
//
// The control socket (ZeroMQ ROUTER). Functions belong to the loop's thread.
#ifndef KVQ_DAEMON_CONTROL_CONTROL_H
#define KVQ_DAEMON_CONTROL_CONTROL_H

#include "daemon/runtime/server.h"

int kvq__control_open(struct kvq__server *server, struct kvq__control **control, char *text);
// Takes no more messages, so that it becomes idle whoever goes on asking. NULL is fine.
void kvq__control_hush(struct kvq__control *control);
// Stops listening and closes its handles in the loop.
void kvq__control_end(struct kvq__control *control);
// Whether a connection that has asked for the daemon's end, or how far it is, is still there.
bool kvq__control_awaited(const struct kvq__control *control);
// True once nothing of it is at the poller any more.
bool kvq__control_idle(const struct kvq__control *control);
void kvq__control_free(struct kvq__control **control); // after the loop; NULL is fine

#endif
