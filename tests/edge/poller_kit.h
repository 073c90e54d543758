// SPDX-License-Identifier: Apache-2.0
//
// The poller and its workers with real threads and rings, over a fake core. Clients are threads of
// the test program. Waits are for a state, and end by it.
#ifndef KVQ_TESTS_POLLER_KIT_H
#define KVQ_TESTS_POLLER_KIT_H

#include "daemon/runtime/poller.h"
#include "tests/kits/fake_core.h"

struct rig {
    struct kvq__core core;
    struct kvq_daemon_page page;
    struct kvq__poller *poller;
};

// One client with one queue, or another queue of the client `of`. What the poller's thread touches
// comes first.
struct fake_client {
    struct kvq__member member;
    struct fake_client *of; // NULL: it is a client of its own
    struct kvq__port port;
    struct kvq__mail add, remove;
    struct rig *rig;
    struct kvq__queue *queue;
    uint32_t added, closed, complaints;
    char complaint[128];
    // The client's side.
    struct kvq_req_page *req;
    struct kvq_cq_page *cq;
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
    int event, wake_daemon_side, wake;
};

extern struct rig rig;
extern struct fake_client c; // the first one of most tests

void wait_for_word(const uint32_t *word, uint32_t value);

void rig_open(struct rig *rig, uint32_t workers, uint64_t spin_ns);
void client_open(struct fake_client *c, struct rig *rig);
void queue_open(struct fake_client *c, struct rig *rig, struct fake_client *of);
void client_close(struct fake_client *c);
void client_leave(struct fake_client *c); // its port is to be closed
void client_free(struct fake_client *c);  // whose port is closed
// The rig with one client.
void begin(uint32_t workers, uint64_t spin_ns);
void end(void);

void wake_poller(struct fake_client *c);
struct kvq_request make_request(uint8_t op, uint32_t seq, uint32_t layer, uint16_t count);
void put_request(struct fake_client *c, const struct kvq_request *r);
bool try_completion(struct fake_client *c, struct kvq_completion *out);
void await_completion(struct fake_client *c, struct kvq_completion *out);
// Puts the request, and awaits and checks its completion.
struct kvq_completion call(struct fake_client *c, uint8_t op, uint32_t seq, uint32_t layer,
                           uint16_t count);
// Background work of so many items has begun, which waits at the gate.
void begin_background(struct fake_client *c, uint32_t items, const uint32_t *gate);

// Mail that keeps the poller until the gate opens.
struct held {
    struct kvq__mail mail; // first
    uint32_t there, gate;
};
void hold_poller(struct kvq__mail *mail);

#endif
