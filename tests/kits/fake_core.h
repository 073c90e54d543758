// SPDX-License-Identifier: Apache-2.0
//
// A stand-in for the daemon's core, for tests of the poller: requests do what their header says.
//
//   NOP      done at once; every entry's position comes back as its result
//   ATTEND   a job of `layer` items; the completion's value is the number of items that were run
//   APPEND   waits `layer` times, then is done
//   READ     waits until no background work is under way
#ifndef KVQ_TESTS_FAKE_CORE_H
#define KVQ_TESTS_FAKE_CORE_H

#include "daemon/core/core.h"

enum { FAKE_ITEMS = 1024 };

struct kvq__queue {
    struct kvq_request header;
    struct kvq_entry_wire entries[KVQ_MAX_BATCH];
    struct kvq_step_layer layers[KVQ_MAX_LAYERS];
    struct kvq_result results[KVQ_MAX_BATCH];
    struct kvq_completion completion;
    struct kvq__job job;
    uint32_t runs[FAKE_ITEMS]; // how often each item was run; each by one thread only
    uint32_t waits;
    bool closed, under_way;
    // How many requests of all queues had started when this one had, and when it was done.
    uint32_t started_at, done_at;
    // Items of the job wait here until the test lets them go, if `gate` is set.
    const uint32_t *gate;
    // The same, but only those that a worker runs; it counts them.
    const uint32_t *worker_gate;
    const uint32_t *start_gate; // a request begins once it is not 0
    uint32_t held_by_worker;
    uint32_t endings;   // calls of kvq__queue_ending
    uint32_t done_turn; // core.turns when a request was done last
};

struct kvq__core {
    uint32_t turns, ticks, background_items, background_begun, background_run, background_done;
    const uint32_t *background_gate; // like a queue's
    struct kvq__job background;
};

// A clock for the poller that only its work moves, if that, and how many items it runs between two
// looks at the rings. To be set before it starts, and read when it has ended.
struct fake_time {
    bool still;                     // nothing moves it
    uint64_t now, look_ns, item_ns; // what a look and an item take
    uint32_t items, most;           // since the last look; between any two
    uint64_t told, behind; // what the core was told last; how far at most that was behind the time
                           // when a request went on
};
extern struct fake_time fake_time;
uint64_t fake_clock(void);

struct kvq__queue *fake_queue_new(void);
void fake_queue_free(struct kvq__queue *queue);

#endif
