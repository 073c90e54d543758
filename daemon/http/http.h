// SPDX-License-Identifier: Apache-2.0
//
// The monitors' door: HTTP over a Unix socket in the runtime directory and on the loopback address.
// It shows and changes nothing. Functions belong to the loop's thread.
#ifndef KVQ_DAEMON_HTTP_HTTP_H
#define KVQ_DAEMON_HTTP_HTTP_H

#include "daemon/runtime/server.h"

struct kvq__http;

// Listens as the configuration says; *http is NULL if it says not to. KVQ_E_INVALID (no loopback
// address), KVQ_E_UNSUPPORTED (this build has no HTTP), KVQ_E_SYSTEM, KVQ_E_NO_MEMORY, each with a
// text. An address that is in use is an error only if the configuration names it.
int kvq__http_open(struct kvq__server *server, struct kvq__http **http, char *text);
// Ends all connections, and closes its handles in the loop. NULL is fine.
void kvq__http_end(struct kvq__http *http);
// True once nothing of it is at the poller any more.
bool kvq__http_idle(const struct kvq__http *http);
void kvq__http_free(struct kvq__http **http); // after the loop; NULL is fine

#endif
