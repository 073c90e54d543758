// SPDX-License-Identifier: Apache-2.0
//
// How a session is used just now, and which operations that forbids. Parking, moves, evictions,
// packing and saves ask kvq__session_uses, each with its own set.
#ifndef KVQ_DAEMON_CORE_SESSION_ACTIVITY_H
#define KVQ_DAEMON_CORE_SESSION_ACTIVITY_H

#include <stdbool.h>
#include <stdint.h>

struct kvq__session;

enum kvq__use {
    KVQ__USE_OPEN = 1 << 0,     // a client has it open
    KVQ__USE_STEP = 1 << 1,     // its step is open, or ended and not committed yet
    KVQ__USE_COMMIT = 1 << 2,   // a GPU commits its step
    KVQ__USE_REQUEST = 1 << 3,  // a request, a move or a save holds its blocks
    KVQ__USE_OWN = 1 << 4,      // background packing or its restore holds its blocks, for a while
    KVQ__USE_CHANGE = 1 << 5,   // a request changes committed tokens
    KVQ__USE_STREAM = 1 << 6,   // a GPU's stream still packs it
    KVQ__USE_TABLE = 1 << 7,    // a client attends to it in its own context
    KVQ__USE_MOVE = 1 << 8,     // it has a move, under way or queued
    KVQ__USE_PARK = 1 << 9,     // it has a ticket for parking or for coming back
    KVQ__USE_RESTORE = 1 << 10, // a restore fills it
    KVQ__USE_LOADING = 1 << 11, // some of its layers are yet to be read
    KVQ__USE_FETCH = 1 << 12,   // a request or a client wants it back from disk
    KVQ__USE_UNSAVED = 1 << 13, // its last change is not saved

    KVQ__USE_HELD = KVQ__USE_REQUEST | KVQ__USE_OWN,

    // Each set below forbids one operation: any use of the set does.

    // Parking it. A restore does not forbid that: a ticket waits until the restore has ended.
    KVQ__USES_PARK =
        KVQ__USE_STEP | KVQ__USE_CHANGE | KVQ__USE_REQUEST | KVQ__USE_MOVE | KVQ__USE_TABLE,
    // Freeing its blocks once it is parked.
    KVQ__USES_LEAVE = KVQ__USE_OWN | KVQ__USE_STREAM,
    // Evicting it.
    KVQ__USES_EVICT =
        KVQ__USES_PARK | KVQ__USE_RESTORE | KVQ__USE_LOADING | KVQ__USE_PARK | KVQ__USE_FETCH,
    // Copying it to another place.
    KVQ__USES_MOVE =
        KVQ__USE_STEP | KVQ__USE_CHANGE | KVQ__USE_LOADING | KVQ__USE_HELD | KVQ__USE_STREAM,
    // Packing its prompt before the prompt ends.
    KVQ__USES_PACK_PROMPT = KVQ__USE_HELD | KVQ__USE_COMMIT | KVQ__USE_CHANGE | KVQ__USE_MOVE |
                            KVQ__USE_PARK | KVQ__USE_RESTORE | KVQ__USE_LOADING,
    // Ending it in favour of the same session with another number of shards.
    KVQ__USES_REPLACE = KVQ__USE_OPEN | KVQ__USE_HELD | KVQ__USE_COMMIT | KVQ__USE_CHANGE |
                        KVQ__USE_MOVE | KVQ__USE_PARK | KVQ__USE_RESTORE | KVQ__USE_FETCH |
                        KVQ__USE_UNSAVED,
    // Freeing at once the blocks that it gives up.
    KVQ__USES_BLOCKS = KVQ__USE_HELD | KVQ__USE_STREAM,
    // Saving it as idle.
    KVQ__USES_IDLE = KVQ__USE_STEP | KVQ__USE_HELD,
};

// The uses of the set `of` that the session has now; 0: none. Poller's thread.
uint32_t kvq__session_uses(const struct kvq__session *session, uint32_t of);

#endif
