// SPDX-License-Identifier: Apache-2.0
//
// The calls that wait: each submits one request and waits for its ticket.
#include "client/internal.h"

static int submit_and_wait(kvq_queue *queue, enum kvq_operation op, struct kvq_work *work,
                           struct kvq_entry *entries, uint32_t n)
{
    kvq_ticket ticket;
    int rc = kvq_submit(queue, op, work, entries, n, &ticket);
    return rc ? rc : kvq_wait(queue, ticket, UINT64_MAX);
}

static int submit_work_and_wait(kvq_queue *queue, enum kvq_operation op,
                                const struct kvq_work *work, struct kvq_entry *entries, uint32_t n)
{
    struct kvq_work copy;
    if (!work)
        return kvq__set_error(KVQ_E_INVALID, "%s: work is NULL", kvq__op_name((unsigned)op));
    copy = *work;
    return submit_and_wait(queue, op, &copy, entries, n);
}

int kvq_step_begin(kvq_queue *queue, struct kvq_entry *entries, uint32_t n, uint64_t *step)
{
    return kvq_step_begin_ids(queue, entries, n, &(struct kvq_ids){0}, step);
}

int kvq_step_begin_ids(kvq_queue *queue, struct kvq_entry *entries, uint32_t n,
                       const struct kvq_ids *ids, uint64_t *step)
{
    struct kvq_work work = {0};
    if (!step || !ids)
        return kvq__set_error(KVQ_E_INVALID, "kvq_step_begin: step or ids is NULL");
    work.ids = *ids;
    int rc = submit_and_wait(queue, KVQ_DO_STEP_BEGIN, &work, entries, n);
    *step = work.step;
    return rc;
}

int kvq_append(kvq_queue *queue, const struct kvq_work *work, struct kvq_entry *entries, uint32_t n)
{
    return submit_work_and_wait(queue, KVQ_DO_APPEND, work, entries, n);
}

int kvq_attend(kvq_queue *queue, const struct kvq_work *work, struct kvq_entry *entries, uint32_t n)
{
    return submit_work_and_wait(queue, KVQ_DO_ATTEND, work, entries, n);
}

int kvq_append_attend(kvq_queue *queue, const struct kvq_work *work, struct kvq_entry *entries,
                      uint32_t n)
{
    return submit_work_and_wait(queue, KVQ_DO_APPEND_ATTEND, work, entries, n);
}

int kvq_step_end(kvq_queue *queue, uint64_t step, struct kvq_entry *entries, uint32_t n)
{
    return kvq__step_end_ids(queue, step, &(struct kvq_ids){0}, entries, n);
}

int kvq__step_end_ids(kvq_queue *queue, uint64_t step, const struct kvq_ids *ids,
                      struct kvq_entry *entries, uint32_t n)
{
    struct kvq_work work = {.step = step, .ids = *ids};
    return submit_and_wait(queue, KVQ_DO_STEP_END, &work, entries, n);
}

// On the ring a truncation counts the tokens to drop, in 16 bits. More than that is deeper than
// any rollback reaches, and so is the largest count.
static int count_dropped(struct kvq_entry *entries, const uint64_t *tokens, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (tokens[i] > entries[i].position)
            return kvq__set_error(
                KVQ_E_INVALID,
                "truncate, entry %u: to %llu tokens, but the session has %llu; nothing "
                "was done",
                i, (unsigned long long)tokens[i], (unsigned long long)entries[i].position);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint64_t dropped = entries[i].position - tokens[i];
        entries[i].list_token = (uint16_t)(dropped < UINT16_MAX ? dropped : UINT16_MAX);
    }
    return KVQ_OK;
}

int kvq_truncate(kvq_queue *queue, struct kvq_entry *entries, const uint64_t *tokens, uint32_t n)
{
    if (n > 0 && (!entries || !tokens))
        return kvq__set_error(KVQ_E_INVALID, "truncate of %u sessions, but an array is NULL", n);
    int rc = count_dropped(entries, tokens, n);
    return rc ? rc : submit_and_wait(queue, KVQ_DO_TRUNCATE, NULL, entries, n);
}

int kvq_fork(kvq_queue *queue, struct kvq_entry *entries, uint32_t n)
{
    return submit_and_wait(queue, KVQ_DO_FORK, NULL, entries, n);
}

int kvq_accept(kvq_queue *queue, const kvq_buffer *list, uint64_t list_offset,
               struct kvq_entry *entries, uint32_t n)
{
    struct kvq_work work = {.pages = {.list = list, .list_offset = list_offset}};
    return submit_and_wait(queue, KVQ_DO_ACCEPT, &work, entries, n);
}

int kvq_read(kvq_queue *queue, const struct kvq_work *work, struct kvq_entry *entries, uint32_t n)
{
    return submit_work_and_wait(queue, KVQ_DO_READ, work, entries, n);
}

int kvq_nop(kvq_queue *queue, struct kvq_entry *entries, uint32_t n)
{
    return submit_and_wait(queue, KVQ_DO_NOP, NULL, entries, n);
}

struct kvq_tensor kvq_tensor_make(const kvq_buffer *buffer, uint64_t offset, uint32_t heads,
                                  uint32_t dim, uint8_t dtype)
{
    uint64_t row = (dtype == KVQ_DTYPE_F32 ? 4 : 2) * (uint64_t)dim;
    return (struct kvq_tensor){.buffer = buffer,
                               .offset = offset,
                               .token_stride = heads * row,
                               .head_stride = row,
                               .dtype = dtype};
}
