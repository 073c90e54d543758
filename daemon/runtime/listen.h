// SPDX-License-Identifier: Apache-2.0
//
// A listening Unix socket in the runtime directory, for the attach and the control socket alike.
// Loop's thread.
#ifndef KVQ_DAEMON_RUNTIME_LISTEN_H
#define KVQ_DAEMON_RUNTIME_LISTEN_H

#include <stdbool.h>
#include <uv.h>

struct kvq__door {
    int fd;
    bool open;
    uv_poll_t poll;
    uv_timer_t pause; // while there is no descriptor to accept with
    void *context;
    // Called for each connection. The function owns the descriptor, which is non-blocking.
    void (*enter)(void *context, int fd);
    char path[108]; // of the socket
};

// Listens at directory/name; whoever may enter the directory may connect. type: SOCK_STREAM or
// SOCK_SEQPACKET. 0 or KVQ_E_SYSTEM with a text.
int kvq__door_open(struct kvq__door *door, uv_loop_t *loop, const char *directory, const char *name,
                   int type, char *text);
// Accepts no more connections; the loop closes the handles. Does nothing if the door is not open.
void kvq__door_close(struct kvq__door *door);

#endif
