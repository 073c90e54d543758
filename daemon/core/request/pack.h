// SPDX-License-Identifier: Apache-2.0
//
// Packing for a request, of all layers of a session (pack.c).
#ifndef KVQ_DAEMON_CORE_REQUEST_PACK_H
#define KVQ_DAEMON_CORE_REQUEST_PACK_H

#include "daemon/core/state.h"

// Holds for packing all layers that are packed less far than a view at so many tokens reads, and
// that nobody else is packing.
void kvq__hold_packing(struct kvq__queue *q, uint32_t i, uint64_t tokens);
void kvq__packing_release(struct kvq__queue *q, struct kvq__entry *w);

#endif
