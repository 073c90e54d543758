// SPDX-License-Identifier: Apache-2.0
//
// Packets of the attach socket with the descriptors beside them. Nothing here blocks.
#ifndef KVQ_DAEMON_RUNTIME_PACKET_H
#define KVQ_DAEMON_RUNTIME_PACKET_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/core/core.h"
#include "proto/limits.h"

struct kvq__packet {
    uint8_t bytes[KVQ_MAX_MESSAGE];
    size_t length;
    int fds[KVQ_MAX_PACKET_FDS]; // close-on-exec, the holder's
    uint32_t n_fds;
};

// Receives a packet with up to two descriptors; a request has one at most, and a refusal can say
// that there were two. 1: a packet; 0: none is there now; KVQ_E_DISCONNECTED: the peer has closed
// its end; KVQ_E_PROTOCOL with a text: the packet was too long or had too many descriptors. If it
// is not 1, no descriptor is left open.
int kvq__packet_receive(int socket, struct kvq__packet *packet, char *text);
// Closes the descriptors. Of sockets, without waiting until all is sent.
void kvq__packet_close_fds(struct kvq__packet *packet);
// Closes the socket, and before that what is beside packets that nobody received, in the same way.
void kvq__packet_end(int socket, struct kvq__packet *packet);

// The descriptors stay the caller's. 0; KVQ_E_DISCONNECTED when the peer is gone or does not read
// what it was sent; KVQ_E_LIMIT when the kernel lets this user have no more descriptors on their
// way, to whomever (it allows RLIMIT_NOFILE): without any the packet can be sent.
int kvq__packet_send(int socket, const void *bytes, size_t length, const int *fds, uint32_t n_fds);

// The peer of a connected socket: user, process and groups as the kernel noted them at connect. If
// pidfd is not NULL, *pidfd becomes readable when that process ends (-1 with a text if the kernel
// gives no such descriptor). 0 or KVQ_E_SYSTEM with a text.
int kvq__socket_peer(int socket, struct kvq__peer *peer, int *pidfd, char *text);

#endif
