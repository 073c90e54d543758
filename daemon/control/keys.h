// SPDX-License-Identifier: Apache-2.0
//
// Who may come from another machine. A socket that answers such a connection speaks ZeroMQ's CURVE
// with the daemon's key, and while it shakes hands ZeroMQ asks here, by ZAP, whether the peer's key
// may come in. Loop's thread.
#ifndef KVQ_DAEMON_CONTROL_KEYS_H
#define KVQ_DAEMON_CONTROL_KEYS_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

struct kvq__keys;

// Whether the key (32 bytes) of the connection with that serial may come in.
typedef bool kvq__keys_ask(void *context, uint64_t serial, const uint8_t *public_key);

// Reads the daemon's key, and answers in that ZeroMQ context. 0, or a code with a text.
int kvq__keys_open(uv_loop_t *loop, void *zmq_context, const char *key_file, kvq__keys_ask *ask,
                   void *context, struct kvq__keys **keys, char *text);
// Makes a socket that is not bound yet take connections with known keys alone. Whether it did.
bool kvq__keys_secure(const struct kvq__keys *keys, void *socket, uint64_t serial);
// Answers what waits. NULL is fine.
void kvq__keys_look(struct kvq__keys *keys);
// Answers no more; the loop closes its handle. NULL is fine.
void kvq__keys_end(struct kvq__keys *keys);
void kvq__keys_free(struct kvq__keys **keys); // after the loop, before its context; NULL is fine

#endif
