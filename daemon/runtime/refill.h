// SPDX-License-Identifier: Apache-2.0
//
// Threads that fill the reserves of extents (extents.h), one for each GPU. A thread sleeps until
// the poller has taken an extent or given one back. libuv's threads cannot do this: their work may
// wait for a client that never signals.
#ifndef KVQ_DAEMON_RUNTIME_REFILL_H
#define KVQ_DAEMON_RUNTIME_REFILL_H

#include "daemon/core/gpu/gpu.h"

enum { KVQ__RESERVE = 2 }; // extents that are kept ready on each GPU

struct kvq__refill;

// Opens the reserves as well. 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM with a text. `gpus` NULL is fine.
int kvq__refill_open(struct kvq__gpus *gpus, uint64_t extent_bytes, struct kvq__refill **refill,
                     char *text);
// After the core is closed, and before the GPUs are. NULL is fine.
void kvq__refill_close(struct kvq__refill **refill);

#endif
