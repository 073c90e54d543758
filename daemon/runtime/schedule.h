// SPDX-License-Identifier: Apache-2.0
//
// Chooses the next item to run. Decode goes before prefill. Clients share the time fairly, by
// deficit round-robin that charges an item's cost after it has run; the queues of a client take
// turns. All functions run on the poller's thread. Workers touch only the counters that are marked.
#ifndef KVQ_DAEMON_RUNTIME_SCHEDULE_H
#define KVQ_DAEMON_RUNTIME_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/core/core.h"

enum kvq__urgency { KVQ__DECODE, KVQ__PREFILL, KVQ__URGENCIES };

enum {
    KVQ__QUANTUM_NS = 200000, // time that a client gets in one round
    KVQ__PREFILL_SHARE = 8, // one pick in so many looks at prefill first, so that it makes progress
    KVQ__DECODE_TOKENS = 16, // more tokens than these in one entry make it a prefill
};

struct kvq__share; // a client's part

// A job under way.
struct kvq__work {
    struct kvq__job *job;
    struct kvq__share *share; // NULL: background work
    uint32_t n_items;
    uint32_t picked;   // items given out
    uint32_t done;     // items run; workers count it up
    uint32_t slot;     // its number in the workers' table
    uint64_t begun_ns; // when its request's work began; 0: not yet. The poller's own
    enum kvq__urgency urgency;
    TAILQ_ENTRY(kvq__work) link; // in the share's list while picked < n_items
};

TAILQ_HEAD(kvq__work_list, kvq__work);

struct kvq__share {
    uint64_t cost_ns; // time of all items run; workers count it up
    uint64_t charged_ns;
    int64_t deficit_ns;
    struct kvq__work_list work[KVQ__URGENCIES];
    TAILQ_ENTRY(kvq__share) link[KVQ__URGENCIES]; // in the schedule's list while work is not empty
};

TAILQ_HEAD(kvq__share_list, kvq__share);

struct kvq__schedule {
    struct kvq__share_list shares[KVQ__URGENCIES];
    uint32_t n_shares[KVQ__URGENCIES];
    uint32_t picks;
};

void kvq__schedule_init(struct kvq__schedule *schedule);
void kvq__share_init(struct kvq__share *share);

// Class of a request, from the copy that the poller made of it.
enum kvq__urgency kvq__urgency_of(const struct kvq_request *request,
                                  const struct kvq_entry_wire *entries);

// work->job, share, urgency and n_items are set; picked and done become 0.
void kvq__schedule_add(struct kvq__schedule *schedule, struct kvq__work *work);

// The next item to run, in *item; NULL if there is none.
struct kvq__work *kvq__schedule_pick(struct kvq__schedule *schedule, uint32_t *item);

// Whether all items that wait are the work's.
bool kvq__schedule_only(const struct kvq__schedule *schedule, const struct kvq__work *work);
bool kvq__schedule_empty(const struct kvq__schedule *schedule);

#endif
