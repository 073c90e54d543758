// SPDX-License-Identifier: Apache-2.0
//
// The poller: the thread that owns the core. It looks at the queues' request rings, copies each
// request once into private memory, hands it to the core, runs the core's jobs together with the
// workers, and publishes completions. It spins while work comes often and there are CPUs to
// spare, and else sleeps until an eventfd is written (proto/shm.h has the protocol).
//
// Fairness: in a turn the poller starts or continues requests of each client up to the same number
// of units, which count a request and its entries, however many queues the client has. Meanwhile
// workers that are awake get items. Then the poller runs items for at least as long as all that
// took, or for 10 ms if that is less. The schedule shares the time for items among clients
// (schedule.h). While requests wait, background work gets a slice of each turn as well.
//
// Other threads reach it through its mailbox alone: what is posted there is delivered on the
// poller's thread between two looks at the rings, and may call the core and the functions marked
// "poller's thread" below.
#ifndef KVQ_DAEMON_RUNTIME_POLLER_H
#define KVQ_DAEMON_RUNTIME_POLLER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/core/base/histogram.h"
#include "daemon/core/core.h"
#include "daemon/runtime/mailbox.h"
#include "daemon/runtime/schedule.h"
#include "proto/ring.h"

struct kvq__poller;

struct kvq__poller_config {
    struct kvq__core *core;
    struct kvq_daemon_page *page; // the poller writes its sleep flag and runnable_clients
    uint32_t workers;             // threads that run items, the poller included; at least 1
    uint64_t spin_ns;             // longest time to spin; 0: never
    bool pin;
    uint64_t (*clock)(void); // nanoseconds; NULL: CLOCK_MONOTONIC
};

struct kvq__port;
TAILQ_HEAD(kvq__port_list, kvq__port);

// A client, as the poller sees it. Zero-initialize; embed it where it is needed.
struct kvq__member {
    struct kvq__share share;
    bool broken; // is no longer served; signals that its GPU work waits for are given for it
    // Called on the poller's thread, once, when the client broke the rules of its rings. The text
    // is the complaint. The owner should then end the client.
    void (*complain)(struct kvq__member *member, const char *text);

    // The poller's own.
    uint32_t n_ports;
    TAILQ_ENTRY(kvq__member) link;    // among the members that have warm ports
    struct kvq__port_list warm, cold; // ports.h; valid while there are ports
    uint32_t n_warm;
    struct kvq__port *next; // where the next turn's look begins; NULL without warm ports
};
TAILQ_HEAD(kvq__member_list, kvq__member);

//   IDLE     the poller looks for the next request in the ring
//   RUN      items of its request are to be run, or are running
//   WAIT     its request is tried again when other work has ended, or some time has passed
//   GPU      its request waits for work on GPUs
//   CLOSING  the port is closed when its queue's work on GPUs has ended
enum kvq__port_state {
    KVQ__PORT_IDLE,
    KVQ__PORT_RUN,
    KVQ__PORT_WAIT,
    KVQ__PORT_GPU,
    KVQ__PORT_CLOSING,
};

// A queue, as the poller sees it. The owner fills the first part, and keeps the mappings and
// descriptors until `closed` was called.
struct kvq__port {
    struct kvq__member *member;
    struct kvq__queue *queue;       // the core's; closed by the poller
    const struct kvq_req_page *req; // the client writes it
    struct kvq_cq_page *cq;
    int request_event;                      // eventfd that the client writes
    int client_wake;                        // socket: each wake-up is 8 bytes
    void (*closed)(struct kvq__port *port); // poller's thread; after kvq__port_remove

    // The poller's own.
    TAILQ_ENTRY(kvq__port) link; // in its member's warm or cold ports
    struct kvq__work work;
    struct kvq_ring_rx rx;
    struct kvq_ring_tx tx;
    enum kvq__port_state state;
    bool closing;
    uint32_t cold;       // its place among the cold ports; UINT32_MAX: it is warm
    uint64_t active_ns;  // when the last request came
    uint64_t warm_until; // without another request
    uint64_t retry_ns;   // WAIT: when to try again in any case
    uint64_t taken_ns;   // when its request was taken off the ring
    uint64_t waited_ns;  // how long its request has been in WAIT, the present time left out
    uint64_t wait_at;    // WAIT: since when
    uint32_t seen_ended; // WAIT: the poller's `ended` when it began to wait
};

// How long requests took: from when one was taken off its ring until its completion was published.
struct kvq__latencies {
    struct kvq__histogram request[KVQ_OP_COUNT]; // by operation; one without a name counts as NOP
    struct kvq__histogram wait;  // of these, for room, other sessions' work or their turn; 0 too
    struct kvq__histogram queue; // of these, until the work began, whatever kept it; 0 too
    struct kvq__histogram background; // packing that no request waited for, a job at a time
};

// Starts the poller and its workers. 0, or a negative code with a text.
int kvq__poller_open(const struct kvq__poller_config *config, struct kvq__poller **poller,
                     char *text);
// Ends the threads. All ports must have been removed. Then the caller owns the core. NULL is fine.
void kvq__poller_close(struct kvq__poller **poller);

// Any thread.
struct kvq__mailbox *kvq__poller_box(struct kvq__poller *poller);

// Poller's thread.
const struct kvq__latencies *kvq__poller_latencies(const struct kvq__poller *poller);
// Poller's thread: as spin_ns of struct kvq__poller_config, from now on.
void kvq__poller_spin(struct kvq__poller *poller, uint64_t ns);

// Poller's thread. KVQ_E_LIMIT when KVQ_MAX_PORTS are served already, KVQ_E_SYSTEM.
int kvq__port_add(struct kvq__poller *poller, struct kvq__port *port, char *text);
// Takes no more requests from the port, ends the one under way, closes the core's queue, then calls
// port->closed, maybe within this call.
void kvq__port_remove(struct kvq__poller *poller, struct kvq__port *port);

#endif
