// SPDX-License-Identifier: Apache-2.0
//
// The ids of tokens that a request brings (token_ids.c).
#ifndef KVQ_DAEMON_CORE_REQUEST_TOKEN_IDS_H
#define KVQ_DAEMON_CORE_REQUEST_TOKEN_IDS_H

#include "daemon/core/state.h"

// The ids that a request brings: 0, also if it brings none, or what kvq__list_open says.
int kvq__ids_open(struct kvq__queue *queue);
// Whether those of so many tokens of an entry's lie inside the list: 0 or KVQ_E_BOUNDS.
int kvq__ids_check(const struct kvq__queue *queue, uint32_t entry, uint32_t tokens);
// Copies the ids, once, behind those of the session's tokens. If the request brings none, the ids
// of the tokens to come are unknown. 0, or as kvq__ns_allocate.
int kvq__ids_bring(struct kvq__queue *queue, uint32_t entry, uint32_t tokens);
// The same at the end of a step, for its tokens. If the request brings none, ids that came at the
// step's beginning stay. 0, KVQ_E_BOUNDS, or as kvq__ns_allocate.
int kvq__ids_bring_late(struct kvq__queue *queue, uint32_t entry);

#endif
