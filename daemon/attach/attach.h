// SPDX-License-Identifier: Apache-2.0
//
// The attach socket, for those who open and close the daemon and who end clients. Functions belong
// to the loop's thread unless they say otherwise.
#ifndef KVQ_DAEMON_ATTACH_ATTACH_H
#define KVQ_DAEMON_ATTACH_ATTACH_H

#include "daemon/runtime/server.h"
#include "proto/wire.h"

int kvq__attach_open(struct kvq__server *server, struct kvq__attach **attach, char *text);
// Takes no new connections.
void kvq__attach_refuse(struct kvq__attach *attach);
// Ends all connections and their clients; they are gone when kvq__attach_idle says so.
void kvq__attach_end_all(struct kvq__attach *attach);
uint32_t kvq__attach_count(const struct kvq__attach *attach);
bool kvq__attach_idle(const struct kvq__attach *attach);
// Ends the client of that id, if it is there.
void kvq__attach_kick(struct kvq__attach *attach, uint64_t client);
// Whether this room has a part in a command; others may run on its socket as well.
bool kvq__attach_takes(Kvq__Request__CommandCase command);
// Whether it is administration, which this socket refuses.
bool kvq__attach_refuses(Kvq__Request__CommandCase command);
// After the loop has closed its handles; count is 0. NULL is fine.
void kvq__attach_free(struct kvq__attach **attach);
// Poller's thread: the core's buffer_gone, with the connection as the owner.
void kvq__attach_buffer_gone(void *owner, uint32_t buffer);
// Likewise its table_gone.
void kvq__attach_table_gone(struct kvq__attach *attach, uint64_t client,
                            const struct kvq__table_memory *memory);

#endif
