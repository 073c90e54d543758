// SPDX-License-Identifier: Apache-2.0
//
// How often something took how long: buckets whose upper bounds are 1, 2, 4, .. microseconds, up to
// 8 seconds, and one for what took longer. One thread owns a histogram.
#ifndef KVQ_DAEMON_CORE_BASE_HISTOGRAM_H
#define KVQ_DAEMON_CORE_BASE_HISTOGRAM_H

#include <stdint.h>

enum { KVQ__BUCKETS = 25 };

struct kvq__histogram {
    uint64_t count[KVQ__BUCKETS]; // of bucket i alone: at most 2^i microseconds; the last: no bound
    uint64_t sum_ns;
};

static inline void kvq__histogram_add(struct kvq__histogram *h, uint64_t ns)
{
    uint64_t us = ns / 1000 + (ns % 1000 != 0);
    uint32_t bucket = us <= 1 ? 0 : 64 - (uint32_t)__builtin_clzll(us - 1);
    h->count[bucket < KVQ__BUCKETS ? bucket : KVQ__BUCKETS - 1]++;
    h->sum_ns += ns;
}

#endif
