// SPDX-License-Identifier: Apache-2.0
//
// Opens the daemon, drains it and closes it. Everything here belongs to the loop's thread.
#ifndef KVQ_DAEMON_LIFECYCLE_H
#define KVQ_DAEMON_LIFECYCLE_H

#include "daemon/runtime/server.h"

// Makes the runtime directory and takes its lock. 0, KVQ_E_PERMISSION, KVQ_E_SYSTEM, or
// KVQ_E_BUSY with the other daemon's pid in the text.
int kvq__server_lock(struct kvq__server *server, char *text);

// Opens core, poller, sockets: from here on clients may connect. server->config is resolved and
// the lock is held. On failure what was opened is closed by kvq__server_close.
int kvq__server_open(struct kvq__server *server, char *text);
// Refuses new work, lets what runs finish within config.drain_ms, then calls server->drained.
void kvq__server_drain(struct kvq__server *server);
// Ends every client and closes everything; runs the loop until that is done, or, where there are
// GPUs, calls server->stuck after KVQ__CLOSE_MS. Also after a failed open.
enum { KVQ__CLOSE_MS = 3000 };
void kvq__server_close(struct kvq__server *server);

#endif
