// SPDX-License-Identifier: Apache-2.0
//
// What one user may hold of what all share, and how the process never runs out of descriptors.
//
// ZeroMQ ends the process when accept finds no free descriptor, so some are kept: an engine, or
// memory for its sessions, gets a descriptor only while more than kvq__descriptors_kept() are free.
// Those that are kept serve the control socket, the store and libraries. How many are open is asked
// of the kernel each time, because libraries open and close their own, some of them later than
// their calls return. Any thread.
#ifndef KVQ_DAEMON_RUNTIME_DESCRIPTORS_H
#define KVQ_DAEMON_RUNTIME_DESCRIPTORS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    KVQ__FILES_NEEDED = 64, // kvqd starts with no lower limit
    KVQ__FILES_SPARE = 8,   // for the store and libraries: nothing that users cause takes these
    KVQ__FILES_KEPT_LEAST = 23,
    KVQ__FILES_KEPT_MOST = 256,
    // Of a control connection: its two sides, and ZeroMQ's end, listening socket and mailbox.
    KVQ__FILES_OF_CONTROL = 5,
    KVQ__FILES_OF_CONNECTION = 2, // of an engine's: socket and pidfd
    KVQ__FILES_OF_QUEUE = 5,      // two rings, an eventfd, a pair of sockets
};

// The soft limit of open files.
uint32_t kvq__descriptors_limit(void);
// How many may still be opened; 0 where the kernel does not say.
uint32_t kvq__descriptors_free(void);
// How many must stay free when an engine gets one.
uint32_t kvq__descriptors_kept(void);

// Whether somebody who holds `own` of something may have `more` when all users together hold `used`
// of `most`: as much must stay free for others as they then hold themselves. So one user gets half,
// the next a quarter or more, and however many users take what they can, some is left for the next.
bool kvq__share_allows(uint64_t own, uint64_t more, uint64_t used, uint64_t most);

#endif
