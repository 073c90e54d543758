// SPDX-License-Identifier: Apache-2.0
//
// Extents on a GPU: zeroed memory for caches, which clients can map if the driver supports that. To
// make an extent (create, map, zero, export) or to free one takes the driver's locks and may wait
// for the device, so the poller must not do it. Instead there is a reserve: a few extents that are
// ready, and those that were given back but are not freed yet. The poller takes extents from the
// reserve and gives them back to it; another thread makes and frees them by kvq__reserve_work.
//
//     poller:  taken <- ready      given back
//                         ^             |
//     worker:     make ---+             +--> free
//
// All extents count against the GPU's budget, also those in the reserve. When making an extent
// fails, every caller gets that error until the next tick; then it is tried again. A GPU without a
// reserve makes and frees extents within the call, and so does one whose memory cannot be mapped
// (its memory is freed when nothing runs there: kvq__gpu_free_later).
#ifndef KVQ_DAEMON_CORE_GPU_EXTENTS_H
#define KVQ_DAEMON_CORE_GPU_EXTENTS_H

#include "daemon/core/gpu/gpu.h"

struct kvq__memory_ops kvq__gpu_memory(struct kvq__gpu *gpu);

struct kvq__reserve_config {
    uint64_t extent_bytes; // the core's
    uint32_t mark;         // extents to keep ready, as far as the budget allows
    // Asks for kvq__reserve_work, on the poller's thread; the work may be done already. NULL:
    // somebody calls kvq__reserve_work without being asked.
    void (*ask)(void *context);
    // Whether a descriptor may be taken for another extent; if not there is no memory. Poller's
    // thread and the worker's. NULL: always.
    bool (*may_make)(void *context);
    void *context;
};

// Before the core is opened. 0, also for a GPU that needs no reserve, or KVQ_E_NO_MEMORY.
int kvq__reserve_open(struct kvq__gpu *gpu, const struct kvq__reserve_config *config);
// After the core is closed and kvq__reserve_work has returned. Frees all extents. A GPU without a
// reserve is fine.
void kvq__reserve_close(struct kvq__gpu *gpu);

// Makes one extent or frees one; false if there was nothing to do. Any thread, one at a time. A GPU
// without a reserve is fine.
bool kvq__reserve_work(struct kvq__gpu *gpu);

// Poller's thread. Forgets a failure, and frees ready extents above the mark if nobody waits.
void kvq__reserve_tick(struct kvq__gpu *gpu);
// How many extents were made within a call, since the caller could not wait.
uint64_t kvq__reserve_made_in_place(const struct kvq__gpu *gpu);

#endif
