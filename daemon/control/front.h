// SPDX-License-Identifier: Apache-2.0
//
// The front of the control socket. ZeroMQ accepts every connection, and ends the process when it
// has no descriptor left to do so. Therefore the front, and not ZeroMQ, listens on the public
// socket: it accepts, checks the user and how many connections the user and all others have, and
// refuses with a sentence (proto/refusal.h). It listens on control_address, too, if there is one;
// who comes from there is nobody until his key is known (keys.h). When a connection sends its first
// bytes, the front opens a ZeroMQ socket for it alone and passes bytes to and fro. So every message
// from that socket is that peer's.
//
//   SILENT --first bytes--> PASSING --one side ends--> ENDING --ZeroMQ has closed its end--> gone
//     |                                                   ^
//     '--end, or another is let in instead--> gone        '-- another is let in instead
//
// When all places are taken, a new connection displaces the one that was quiet for longest and has
// no request under way: one of the same user, or, for an administrator, of any user. Those from
// other machines are as one user, and do not displace whose key is known.
//
// ZeroMQ stops reading when so many whole messages wait, but keeps all parts of a message until its
// last one, however many come. So the front adds up what it has passed of each connection that was
// not taken yet, and ends the connection above KVQ__FRONT_UNTAKEN. Loop's thread.
#ifndef KVQ_DAEMON_CONTROL_FRONT_H
#define KVQ_DAEMON_CONTROL_FRONT_H

#include "daemon/control/roles.h"
#include "daemon/runtime/server.h"
#include "proto/limits.h"

struct kvq__front;

// What is behind the front; numbers are below KVQ__FRONT_MOST, each of one connection at a time.
struct kvq__front_backend {
    void *context;
    // Opens what answers this peer. A connected socket, which is the front's, or a negative code.
    int (*open)(void *context, uint32_t number, const struct kvq__asker *asker, char *text);
    // Whether a request is under way.
    bool (*busy)(void *context, uint32_t number);
    // Whether it is somebody from another machine whose key is known.
    bool (*known)(void *context, uint32_t number);
    // Both ends are closed.
    void (*close)(void *context, uint32_t number);
};

enum {
    KVQ__FRONT_PLACES = 62,                  // connections at a time, at the most
    KVQ__FRONT_MOST = 2 * KVQ__FRONT_PLACES, // with those that are ending

    // So many whole messages wait in ZeroMQ, which then stops reading. Few: a part of a message
    // that is sent as two bytes takes 64 in ZeroMQ, so KVQ__FRONT_UNTAKEN bytes take 32 times that.
    KVQ__FRONT_WAITING = 8,
    // Bytes of a connection that ZeroMQ may have: twice what a peer can have there that sends
    // requests of one part, to leave room for what ZeroMQ and the system have between the two ends.
    KVQ__FRONT_UNTAKEN = 2 * (KVQ__FRONT_WAITING + 1) * KVQ_MAX_MESSAGE,
    KVQ__FRONT_FRAME = 64, // the most that ZMTP and CURVE add to a part
};

// ZeroMQ gave messages of that connection: so many bytes, with KVQ__FRONT_FRAME for each part.
void kvq__front_took(struct kvq__front *front, uint32_t number, size_t bytes);
int kvq__front_open(struct kvq__server *server, const struct kvq__front_backend *backend,
                    struct kvq__front **front, char *text);
// Takes nobody any more and ends all; the loop closes its handles.
void kvq__front_end(struct kvq__front *front);
void kvq__front_free(struct kvq__front **front); // after the loop; NULL is fine

#endif
