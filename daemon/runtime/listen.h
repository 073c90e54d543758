// SPDX-License-Identifier: Apache-2.0
//
// A listening socket, mostly a Unix socket in the runtime directory: attach, control and HTTP each
// have one. Loop's thread.
#ifndef KVQ_DAEMON_RUNTIME_LISTEN_H
#define KVQ_DAEMON_RUNTIME_LISTEN_H

#include <stdbool.h>
#include <sys/socket.h>
#include <uv.h>

#include "daemon/config/address.h"

struct kvq__door {
    int fd;
    bool open;
    uv_poll_t poll;
    uv_timer_t pause; // while there is no descriptor to accept with
    void *context;
    // Called for each connection. The function owns the descriptor, which is non-blocking.
    void (*enter)(void *context, int fd);
    char path[108]; // of a Unix socket that the door has made; else empty
};

// Listens at directory/name; whoever may enter the directory may connect. type: SOCK_STREAM or
// SOCK_SEQPACKET. 0 or KVQ_E_SYSTEM with a text.
int kvq__door_open(struct kvq__door *door, uv_loop_t *loop, const char *directory, const char *name,
                   int type, char *text);
// The same over a socket that listens already, and is the door's from now on, also if this fails.
int kvq__door_open_fd(struct kvq__door *door, uv_loop_t *loop, int fd, char *text);
// Listens there. 0 or KVQ_E_SYSTEM with a text, the reason alone.
int kvq__door_open_tcp(struct kvq__door *door, uv_loop_t *loop,
                       const struct kvq__listen_address *address, char *text);
// Accepts no more connections; the loop closes the handles. Does nothing if the door is not open.
void kvq__door_close(struct kvq__door *door);

#endif
