// SPDX-License-Identifier: Apache-2.0
//
// Fair shares of what all users share, and descriptors that are kept free for the daemon itself.
//
// ZeroMQ ends the process when accept finds no free descriptor. So some descriptors are kept free
// for the control socket, the store and libraries: an engine, or memory for its sessions, gets one
// only while more than kvq__descriptors_kept() are free. The kernel says each time how many are
// open, since libraries open and close descriptors of their own, some after their calls return. Any
// thread.
#ifndef KVQ_DAEMON_RUNTIME_DESCRIPTORS_H
#define KVQ_DAEMON_RUNTIME_DESCRIPTORS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    KVQ__FILES_NEEDED = 72, // kvqd starts with no lower limit
    KVQ__FILES_SPARE = 8,   // for the store and libraries: nothing that users cause takes these
    KVQ__FILES_KEPT_LEAST = 23,
    KVQ__FILES_KEPT_MOST = 256,
    // A control connection: its two sides, ZeroMQ's end, listening socket and mailbox.
    KVQ__FILES_OF_CONTROL = 5,
    KVQ__FILES_OF_CONNECTION = 2, // an engine's connection: socket and pidfd
    KVQ__FILES_OF_QUEUE = 5,      // two rings, an eventfd, a pair of sockets
};

// The soft limit of open files.
uint32_t kvq__descriptors_limit(void);
// How many may still be opened; 0 where the kernel does not say.
uint32_t kvq__descriptors_free(void);
// How many must stay free when an engine gets one.
uint32_t kvq__descriptors_kept(void);

// Whether a user who holds `own` of a resource may have `more` of it, when all users together hold
// `used` of `most`. The rule: as much must stay free for others as the user holds then. So the
// first user gets at most half, the next a quarter or more, and something is always left for one
// more user.
bool kvq__share_allows(uint64_t own, uint64_t more, uint64_t used, uint64_t most);

#endif
