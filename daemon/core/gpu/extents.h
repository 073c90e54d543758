// SPDX-License-Identifier: Apache-2.0
//
// Extents on a GPU: memory for caches, zeroed, that clients can map where the driver has a way. To
// make one (create, map, zero, export) and to free one takes the driver's locks and may wait for
// the device, and so is not for the poller. Hence the reserve: a few extents that are ready, and
// those that were given back and are yet to be freed. The poller takes from it and gives to it;
// another thread does the rest, by kvq__reserve_work.
//
//     poller:  taken <- ready      given back
//                         ^             |
//     worker:     make ---+             +--> free
//
// All extents count against the GPU's budget, those in the reserve included. An attempt to make one
// that failed is the answer to all requests until the next tick; the first request after that has
// it tried again. A GPU without a reserve, and one whose memory cannot be mapped (that is freed
// when nothing runs there: kvq__gpu_free_later), makes and frees extents where it is asked to.
#ifndef KVQ_DAEMON_CORE_GPU_EXTENTS_H
#define KVQ_DAEMON_CORE_GPU_EXTENTS_H

#include "daemon/core/gpu/gpu.h"

struct kvq__memory_ops kvq__gpu_memory(struct kvq__gpu *gpu);

struct kvq__reserve_config {
    uint64_t extent_bytes; // the core's
    uint32_t mark;         // so many are kept ready, or what the budget leaves
    // There is work. Called on the poller's thread, maybe when there is none any more. NULL: the
    // caller of kvq__reserve_work calls it without being asked.
    void (*ask)(void *context);
    void *context;
};

// Before the core is opened. 0 (also for a GPU that has no use for one), or KVQ_E_NO_MEMORY.
int kvq__reserve_open(struct kvq__gpu *gpu, const struct kvq__reserve_config *config);
// After the core is closed, when nobody works on it. Frees what there is. None is fine.
void kvq__reserve_close(struct kvq__gpu *gpu);

// Makes one extent or frees one; false if there was nothing to do. Any thread, one at a time. None
// is fine.
bool kvq__reserve_work(struct kvq__gpu *gpu);

// Poller's thread. What failed may be tried again, and what nobody waits for any more is freed.
void kvq__reserve_tick(struct kvq__gpu *gpu);
// How many extents were made where they were asked for, since the caller could not wait.
uint64_t kvq__reserve_made_in_place(const struct kvq__gpu *gpu);

#endif
