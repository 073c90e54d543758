// SPDX-License-Identifier: Apache-2.0
//
// Packing for a request: who holds a layer for it (pack.c).
#ifndef KVQ_DAEMON_CORE_REQUEST_PACK_H
#define KVQ_DAEMON_CORE_REQUEST_PACK_H

#include "daemon/core/state.h"

// Holds for packing all layers that are packed less far than a view at so many tokens reads, and
// that no other is packing.
void kvq__hold_packing(struct kvq__queue *q, uint32_t i, uint64_t tokens);
// Ends holds of the request, which has failed or is done: of all layers, as above; or of the
// request's one layer, as of kvq__hold_layer. What is still due is packed in the background.
void kvq__packing_release_all(struct kvq__queue *q, struct kvq__entry *w);
void kvq__packing_release_layer(struct kvq__queue *q, struct kvq__session *s);

#endif
