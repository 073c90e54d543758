// SPDX-License-Identifier: Apache-2.0
//
// Which ports the poller looks at in a turn. Warm ports are looked at in every turn, client by
// client. A port without a request for a while is cold: of it the poller reads one word, the tail
// of its request ring, and of cold ports so many in a turn that each has its look every
// KVQ__COLD_NS, or in every turn where turns are longer. So clients that are connected and idle
// cost the others next to nothing. All functions run on the poller's thread.
#ifndef KVQ_DAEMON_RUNTIME_PORTS_H
#define KVQ_DAEMON_RUNTIME_PORTS_H

#include "daemon/runtime/poller.h"

enum {
    KVQ__COLD_NS = 200000, // a cold port waits for its look so long at most, or a turn
    KVQ__COLD_LOOKS = 64,  // and a turn has so many looks at least
};

// A cold port: its request ring's tail differs from `head` once it has a request.
struct kvq__cold {
    const uint32_t *tail;
    uint32_t head;
    struct kvq__port *port;
};

struct kvq__ports {
    uint32_t n;                      // warm and cold
    struct kvq__member_list members; // with warm ports
    uint32_t n_cold;
    uint32_t next; // cold port that the next look begins with
    uint64_t swept_ns;
    struct kvq__cold cold[KVQ_MAX_PORTS];
    uint32_t free_slots[KVQ_MAX_PORTS]; // from n on
};

void kvq__ports_init(struct kvq__ports *ports);

// There is room for one more. It is warm, and has a slot for its work.
void kvq__ports_join(struct kvq__ports *ports, struct kvq__port *port);
// Gives the slot back.
void kvq__ports_leave(struct kvq__ports *ports, struct kvq__port *port);

// The port in the ring of its member's warm ports.
struct kvq__port *kvq__ports_after(const struct kvq__port *port);

// The port is warm and idle, its ring is empty, and its member is not broken.
void kvq__ports_cool(struct kvq__ports *ports, struct kvq__port *port);
// Nothing happens to a port that is warm.
void kvq__ports_warm(struct kvq__ports *ports, struct kvq__port *port);
void kvq__ports_warm_member(struct kvq__ports *ports, struct kvq__member *member);

// Looks at the cold ports that are due at the time `now`. Those with requests become warm.
void kvq__ports_sweep(struct kvq__ports *ports, uint64_t now);
// Looks at all cold ports. True if any became warm.
bool kvq__ports_sweep_all(struct kvq__ports *ports);

#endif
