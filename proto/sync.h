// SPDX-License-Identifier: Apache-2.0
//
// Words that threads of one process share: counters, a compare-and-swap, and sleeping on a word.
// The words of shared memory, and loads and stores of 32 bits, are in proto/ring.h.
#ifndef KVQ_PROTO_SYNC_H
#define KVQ_PROTO_SYNC_H

#include <linux/futex.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "proto/ring.h"

// Adds and returns the new value. Releases what was written before and acquires what others
// released, so the last of several threads that count up sees the work of all.
static inline uint32_t kvq_word_add(uint32_t *word, uint32_t n)
{
    return __atomic_add_fetch(word, n, __ATOMIC_ACQ_REL);
}

// Replaces *expected by value if it is still there; else *expected becomes what is.
static inline bool kvq_word_swap_if(uint32_t *word, uint32_t *expected, uint32_t value)
{
    return __atomic_compare_exchange_n(word, expected, value, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

static inline uint64_t kvq_long_load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline void kvq_long_store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static inline void kvq_long_add(uint64_t *word, uint64_t n)
{
    __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
}

// Sleeps while *word is `value`, for at most `ns`. May return early for no reason.
static inline void kvq_word_sleep(const uint32_t *word, uint32_t value, uint64_t ns)
{
    struct timespec limit = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &limit, NULL, 0);
}

static inline void kvq_word_wake(const uint32_t *word, int threads)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
}

#endif
