// SPDX-License-Identifier: Apache-2.0
//
// What the daemon tells a service manager: that it serves, reads its configuration again or ends, a
// line about what it does, and that loop and poller are alive. The protocol is sd_notify(3)'s: one
// datagram for each message, to the socket that NOTIFY_SOCKET names. Loop's thread.
#ifndef KVQ_DAEMON_RUNTIME_SERVICE_H
#define KVQ_DAEMON_RUNTIME_SERVICE_H

#include "daemon/runtime/server.h"

enum { KVQ__SERVICE_LINE = 256 };

// Tells that the daemon serves, and goes on telling. *service is NULL where nobody wants to know:
// without NOTIFY_SOCKET, and with a lifetime_fd, since the daemon is then part of another process,
// whose socket that is. The poller runs. 0, or a negative code with text.
int kvq__service_open(struct kvq__server *server, struct kvq__service **service, char *text);
// The configuration is read again, and has been. NULL is fine, here and below.
void kvq__service_reloading(struct kvq__service *service);
void kvq__service_reloaded(struct kvq__service *service);
// The daemon ends: server->draining is set.
void kvq__service_stopping(struct kvq__service *service);
// It saves the sessions of server->drain now, at its end. The manager is asked to wait for as long
// as the next one is saved within five minutes.
void kvq__service_saving(struct kvq__service *service);

// Tells nothing more, and closes its handles in the loop.
void kvq__service_end(struct kvq__service *service);
// True once nothing of it is at the poller any more.
bool kvq__service_idle(const struct kvq__service *service);
void kvq__service_free(struct kvq__service **service); // after the loop

// The line for people, KVQ__SERVICE_LINE bytes with its NUL.
struct kvq__service_figures {
    uint32_t sessions, clients;
    uint64_t used_bytes, pool_bytes; // of all places together
    bool ends;
};
void kvq__service_line(const struct kvq__service_figures *figures, char *line);

#endif
