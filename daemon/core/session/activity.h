// SPDX-License-Identifier: Apache-2.0
//
// Who uses a session just now, and what may be done to it meanwhile. This is the one place that
// answers: parking, moves, evictions, packing and saves ask it with a set of their own.
#ifndef KVQ_DAEMON_CORE_SESSION_ACTIVITY_H
#define KVQ_DAEMON_CORE_SESSION_ACTIVITY_H

#include <stdbool.h>
#include <stdint.h>

struct kvq__session;

enum kvq__use {
    KVQ__USE_OPEN = 1 << 0,    // a client has it open
    KVQ__USE_STEP = 1 << 1,    // its step is open, or ended and not committed yet
    KVQ__USE_COMMIT = 1 << 2,  // a GPU commits its step
    KVQ__USE_REQUEST = 1 << 3, // a request, a move or a save holds its blocks
    KVQ__USE_OWN = 1 << 4, // the packer of its own accord, or its restore, holds them: not for long
    KVQ__USE_CHANGE = 1 << 5,   // a request changes what is committed
    KVQ__USE_STREAM = 1 << 6,   // a GPU's stream still packs it
    KVQ__USE_TABLE = 1 << 7,    // a client attends to it in its own context
    KVQ__USE_MOVE = 1 << 8,     // a move has it, or it waits for one
    KVQ__USE_PARK = 1 << 9,     // a ticket to park it or to bring it back
    KVQ__USE_RESTORE = 1 << 10, // a restore has it
    KVQ__USE_LOADING = 1 << 11, // some of its layers are yet to be read
    KVQ__USE_FETCH = 1 << 12,   // somebody wants it back from disk
    KVQ__USE_UNSAVED = 1 << 13, // its last change is not saved

    KVQ__USE_HELD = KVQ__USE_REQUEST | KVQ__USE_OWN,

    // What forbids ..
    KVQ__USES_PARK = KVQ__USE_STEP | KVQ__USE_CHANGE | KVQ__USE_REQUEST | KVQ__USE_MOVE |
                     KVQ__USE_TABLE, // .. to park it, but for what still reads it from disk
    KVQ__USES_EVICT = KVQ__USES_PARK | KVQ__USE_RESTORE | KVQ__USE_LOADING | KVQ__USE_PARK |
                      KVQ__USE_FETCH, // .. to evict it
    KVQ__USES_MOVE = KVQ__USE_STEP | KVQ__USE_CHANGE | KVQ__USE_LOADING | KVQ__USE_HELD |
                     KVQ__USE_STREAM, // .. to copy it to another place
    KVQ__USES_PACK_PROMPT = KVQ__USE_HELD | KVQ__USE_COMMIT | KVQ__USE_CHANGE | KVQ__USE_MOVE |
                            KVQ__USE_PARK | KVQ__USE_RESTORE |
                            KVQ__USE_LOADING, // .. to pack its prompt before that ends
    KVQ__USES_REPLACE = KVQ__USE_OPEN | KVQ__USE_HELD | KVQ__USE_COMMIT | KVQ__USE_CHANGE |
                        KVQ__USE_MOVE | KVQ__USE_PARK | KVQ__USE_RESTORE | KVQ__USE_FETCH |
                        KVQ__USE_UNSAVED,               // .. to end it for one with other shards
    KVQ__USES_BLOCKS = KVQ__USE_HELD | KVQ__USE_STREAM, // .. to free what it gives up at once
    KVQ__USES_LEAVE = KVQ__USE_OWN | KVQ__USE_STREAM,   // .. the same, once it is being parked
    KVQ__USES_IDLE = KVQ__USE_STEP | KVQ__USE_HELD,     // .. to call it idle
};

// Those of a set of enum kvq__use that there are; 0: none. Poller's thread.
uint32_t kvq__session_uses(const struct kvq__session *session, uint32_t of);

#endif
