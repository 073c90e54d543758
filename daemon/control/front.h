// SPDX-License-Identifier: Apache-2.0
//
// The front of the control socket. ZeroMQ accepts whoever comes and ends the process when it finds
// no descriptor to do so, so it is not let near the public socket: the front accepts, looks at the
// user and at what the user and all others hold, and refuses with words (proto/refusal.h). From the
// first bytes on that a connection sends it has a ZeroMQ socket of its own behind it, and the front
// passes bytes to and fro. What comes out of that socket is then known to be that peer's.
//
//   SILENT --first bytes--> PASSING --one side ends--> ENDING --ZeroMQ has closed its end--> gone
//     |                                                   ^
//     '--end, or another is let in instead--> gone        '-- another is let in instead
//
// Whoever is let in when there are as many as may be takes the place of the connection that was
// quiet for longest and has no request under way: of the same user, or, for an administrator, of
// anybody. Loop's thread.
#ifndef KVQ_DAEMON_CONTROL_FRONT_H
#define KVQ_DAEMON_CONTROL_FRONT_H

#include "daemon/runtime/server.h"

struct kvq__front;

// What is behind the front; numbers are below KVQ__FRONT_MOST, each of one connection at a time.
struct kvq__front_back {
    void *context;
    // Opens what answers this peer. A connected socket, which is the front's, or a negative code.
    int (*open)(void *context, uint32_t number, const struct kvq__peer *peer, char *text);
    // Whether a request is under way.
    bool (*busy)(void *context, uint32_t number);
    // Both ends are closed.
    void (*close)(void *context, uint32_t number);
};

enum {
    KVQ__FRONT_PLACES = 62,                  // connections at a time, at the most
    KVQ__FRONT_MOST = 2 * KVQ__FRONT_PLACES, // with those that are ending
};

int kvq__front_open(struct kvq__server *server, const struct kvq__front_back *back,
                    struct kvq__front **front, char *text);
// Takes nobody any more and ends all; the loop closes its handles.
void kvq__front_end(struct kvq__front *front);
void kvq__front_free(struct kvq__front **front); // after the loop; NULL is fine

#endif
