// SPDX-License-Identifier: Apache-2.0
//
// The ids of tokens that requests bring, at a step's beginning or end.
#include "daemon/core/request/token_ids.h"

#include "daemon/core/request/views.h"
#include "daemon/core/state.h"

static bool brings_ids(const struct kvq__queue *q)
{
    return q->header.flags & KVQ_REQ_TOKEN_IDS;
}

int kvq__ids_open(struct kvq__queue *q)
{
    return brings_ids(q) ? kvq__list_open(q) : 0;
}

int kvq__ids_check(const struct kvq__queue *q, uint32_t i, uint32_t tokens)
{
    return brings_ids(q) && !kvq__list_at(q, q->entries[i].q_row, tokens) ? KVQ_E_BOUNDS : 0;
}

int kvq__ids_bring_late(struct kvq__queue *q, uint32_t i)
{
    uint32_t tokens = q->work[i].session->in_step.tokens;
    int rc = brings_ids(q) ? kvq__ids_check(q, i, tokens) : 0;
    return rc == 0 && brings_ids(q) ? kvq__ids_bring(q, i, tokens) : rc;
}

int kvq__ids_bring(struct kvq__queue *q, uint32_t i, uint32_t tokens)
{
    const int32_t *from = brings_ids(q) ? kvq__list_at(q, q->entries[i].q_row, tokens) : NULL;
    return kvq__ids_take(q->work[i].session, from, tokens);
}
