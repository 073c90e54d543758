// SPDX-License-Identifier: Apache-2.0
//
// A ZeroMQ DEALER to the daemon's control socket, here or on another machine. Knows bytes, not
// messages.
#ifndef KVQ_TOOLS_KVQCTL_TRANSPORT_H
#define KVQ_TOOLS_KVQCTL_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#include "proto/key_file.h"
#include "proto/limits.h"

struct kvq__transport;

int64_t kvq__ctl_now_ms(void); // CLOCK_MONOTONIC

// Where a daemon is: at a Unix path, or on another machine, with the keys of both ends.
struct kvq__transport_at {
    const char *path;
    const char *far; // HOST:PORT; NULL: the path
    const struct kvq_key_file *key;
};

// Connects. ZeroMQ would wait for ever for a peer that is not there or refuses, so a plain
// connection is tried first (kvq__transport_try). Errors are those, and with another machine
// -EACCES if the daemon does not know the key, -EPROTO if it is not the daemon whose key `server`
// is.
int kvq__transport_open(struct kvq__transport **transport, const struct kvq__transport_at *at,
                        int timeout_ms, char text[KVQ_TEXT_BYTES]);
// Whether a daemon listens there and would take a connection: 0, -EUSERS with the daemon's words if
// it refuses, -ETIMEDOUT if it does not say in time, -EHOSTUNREACH with a text if the host's name
// has no address, or the attempt's negative errno.
int kvq__transport_try(const struct kvq__transport_at *at, int timeout_ms,
                       char text[KVQ_TEXT_BYTES]);
void kvq__transport_close(struct kvq__transport **transport);

// Sends one message. 0 or a negative errno.
int kvq__transport_send(struct kvq__transport *transport, const void *data, size_t size);

// Receives one message of at most `capacity` bytes within the time. Returns its size, or
// -ETIMEDOUT, -EMSGSIZE, -EINTR (nothing has come yet), -ECANCELED once stop_fd (-1: none) is
// readable, -ECONNRESET once the connection that was there at the last send is lost, or another
// negative errno.
int kvq__transport_receive(struct kvq__transport *transport, void *data, size_t capacity,
                           int timeout_ms, int stop_fd);

#endif
