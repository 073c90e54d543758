// SPDX-License-Identifier: Apache-2.0
//
// The last events of this run, numbered from 1 on, for those who ask what has happened: kvqctl by
// the control socket, and HTTP. Loop's thread.
#ifndef KVQ_DAEMON_RUNTIME_HISTORY_H
#define KVQ_DAEMON_RUNTIME_HISTORY_H

#include <stdint.h>

#include "proto/wire.h"

enum { KVQ__HISTORY_EVENTS = 512, KVQ__EVENT_BYTES = 2 * KVQ_NAME_BYTES + 352 };

struct kvq__history {
    uint64_t last; // number of the newest; 0: there was none
    struct {
        uint16_t bytes; // 0: that event was lost
        uint8_t packed[KVQ__EVENT_BYTES];
    } kept[KVQ__HISTORY_EVENTS]; // number n at n % KVQ__HISTORY_EVENTS
};

// Gives the event its number, and keeps it; the oldest one makes room. Its texts are not valid
// afterwards.
void kvq__history_add(struct kvq__history *history, Kvq__Event *event);
// So many events happened that nobody has; their numbers are nobody's.
void kvq__history_lose(struct kvq__history *history, uint32_t count);
// The number of the first that is kept and comes behind number `after`; above last: there is none.
uint64_t kvq__history_first(const struct kvq__history *history, uint64_t after);
// One that is kept. NULL: the arena is full.
Kvq__Event *kvq__history_get(const struct kvq__history *history, uint64_t number,
                             struct kvq_arena *arena);

#endif
