// SPDX-License-Identifier: Apache-2.0
//
// The threads that run items beside the poller. The poller gives out items through a short ring
// that any number of workers take from; neither side takes a lock, and nobody enters the kernel
// while workers are awake. Idle workers spin shortly if there are CPUs to spare, then sleep.
#ifndef KVQ_DAEMON_RUNTIME_WORKERS_H
#define KVQ_DAEMON_RUNTIME_WORKERS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/runtime/schedule.h"
#include "proto/clock.h"
#include "proto/shm.h"

struct kvq__workers;

struct kvq__workers_config {
    uint32_t threads;             // besides the poller; 0 is fine
    uint32_t slots;               // jobs under way at most
    bool pin;                     // bind the i-th to CPU i + 1 of those usable
    struct kvq_daemon_page *page; // says whether anybody may spin; counts who is awake
    // A job's last item was run by a worker. Called on its thread.
    void (*finished)(void *context);
    void *context;
};

// Starts the threads. 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM with a text.
int kvq__workers_open(const struct kvq__workers_config *config, struct kvq__workers **workers,
                      char *text);
// Ends them. No item may be under way. NULL is fine.
void kvq__workers_close(struct kvq__workers **workers);

// The rest is for the poller's thread.

// How many items may be given out now, so that few wait in the ring while the schedule could
// change.
uint32_t kvq__workers_room(const struct kvq__workers *workers);
// Registers `work` under its slot, a number below config.slots. None of its items is under way.
void kvq__workers_slot(struct kvq__workers *workers, uint32_t slot, struct kvq__work *work);
// Gives out one item. Call kvq__workers_wake after one or several, with how many.
void kvq__workers_give(struct kvq__workers *workers, struct kvq__work *work, uint32_t item);
void kvq__workers_wake(struct kvq__workers *workers, uint32_t items);
// Takes back an item that no worker has taken yet; false if there is none.
bool kvq__workers_take(struct kvq__workers *workers, struct kvq__work **work, uint32_t *item);

// Runs one item on the calling thread, and counts its cost and that it is done. True for the job's
// last item; afterwards only the poller may touch the work.
bool kvq__work_run(struct kvq__work *work, uint32_t item, void *workspace);

// Memory that one thread's kernels work in, some MB; released with free. NULL: no memory. Pages of
// it are resident once kernels have touched them, and most kernels touch those of 64 query rows.
void *kvq__workspace_new(void);

// Binds the calling thread to the i-th CPU that the process may use (they start again from the
// first when there are fewer). 0 or KVQ_E_SYSTEM.
int kvq__pin_thread(uint32_t i);

#endif
