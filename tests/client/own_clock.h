// SPDX-License-Identifier: Apache-2.0
//
// What libkvq takes for the system's clock, poll and recvmsg, in the threads that a test says.
#ifndef KVQ_TESTS_OWN_CLOCK_H
#define KVQ_TESTS_OWN_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

// The calling thread's clock. It stands still but for waits for the daemon, the first `skips` of
// which end at once, as if their time had passed.
extern _Thread_local struct own_clock {
    bool on;
    uint32_t n, skips;
    uint64_t now_ns, waited_ms[16]; // of the first waits
} own_clock;

// The calling thread's next wait for the daemon calls this first; NULL: nothing.
extern _Thread_local void (*own_wait)(void);

// The calling thread's next wait on a condition without a limit, as for its turn, calls this first.
extern _Thread_local void (*own_turn_wait)(void);
// Its next such wait with a limit calls this first, and ends only when it is woken; by own_clock
// more time has passed then than the limit is.
extern _Thread_local void (*own_late_turn)(void);

// Waits of the calling thread for the daemon fail, as the system says of nothing that is ours.
extern _Thread_local bool own_wait_fails;

// Of the packets that the calling thread receives, the one of this number from now on loses its
// descriptors: the process has as many as it may have. 0: none.
extern _Thread_local uint32_t own_loss;

#endif
