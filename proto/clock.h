// SPDX-License-Identifier: Apache-2.0
//
// The clock of deadlines and waits, which both sides of the rings read.
#ifndef KVQ_PROTO_CLOCK_H
#define KVQ_PROTO_CLOCK_H

#include <stdint.h>
#include <time.h>

// CLOCK_MONOTONIC in nanoseconds.
static inline uint64_t kvq_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif
