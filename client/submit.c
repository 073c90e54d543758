// SPDX-License-Identifier: Apache-2.0
//
// Requests: from the caller's structures to the ring, and tickets.
//
// Only what the daemon could not say as well is checked here; the daemon judges each entry by
// itself, so that one session's mistake never fails another.
#include "client/internal.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { ENTRIES_AT_ONCE = 32, TICKET_SLOT_BITS = 3 };
static_assert(KVQ_QUEUE_CREDITS == 1 << TICKET_SLOT_BITS, "a ticket names its slot");

// kvq.h spells out the operations for engines; they are the protocol's.
static_assert((int)KVQ_DO_NOP == KVQ_OP_NOP && (int)KVQ_DO_STEP_BEGIN == KVQ_OP_STEP_BEGIN &&
                  (int)KVQ_DO_APPEND == KVQ_OP_APPEND && (int)KVQ_DO_ATTEND == KVQ_OP_ATTEND &&
                  (int)KVQ_DO_APPEND_ATTEND == KVQ_OP_APPEND_ATTEND &&
                  (int)KVQ_DO_STEP_END == KVQ_OP_STEP_END &&
                  (int)KVQ_DO_STEP_ABORT == KVQ_OP_STEP_ABORT &&
                  (int)KVQ_DO_TRUNCATE == KVQ_OP_TRUNCATE && (int)KVQ_DO_FORK == KVQ_OP_FORK &&
                  (int)KVQ_DO_ACCEPT == KVQ_OP_ACCEPT && (int)KVQ_DO_READ == KVQ_OP_READ &&
                  (int)KVQ_DO_STEP == KVQ_OP_STEP,
              "operations");
static_assert((int)KVQ_PAST_ONLY == KVQ_REQ_PAST_ONLY, "flags");

// ---- Building a request ----

// Which tensors an operation needs: bits of 1 k, 2 v, 4 q, 8 out, 16 a list.
static unsigned needed(unsigned op)
{
    switch (op) {
    case KVQ_OP_APPEND:
        return 3;
    case KVQ_OP_ATTEND:
        return 12;
    case KVQ_OP_APPEND_ATTEND:
        return 15;
    case KVQ_OP_ACCEPT:
        return 16;
    default:
        return 0;
    }
}

static int check_buffer(const kvq_queue *queue, unsigned op, const char *name,
                        const kvq_buffer *buffer)
{
    if (buffer->client != queue->client)
        return kvq__fail(KVQ_E_BUFFER, "%s: %s lies in a buffer of another connection",
                         kvq__op_name(op), name);
    if (buffer->id == 0)
        return kvq__fail(KVQ_E_BUFFER,
                         "%s: %s lies in a buffer that is not registered; call "
                         "kvq_reattach first",
                         kvq__op_name(op), name);
    return KVQ_OK;
}

int kvq__put_view(const kvq_queue *queue, unsigned op, const char *name, bool need,
                  const struct kvq_tensor *tensor, struct kvq_wire_view *view)
{
    if (!tensor->buffer && need)
        return kvq__fail(KVQ_E_BUFFER, "%s needs %s, but its buffer is NULL", kvq__op_name(op),
                         name);
    if (!tensor->buffer)
        return KVQ_OK;
    if (tensor->dtype < KVQ_DTYPE_F16 || tensor->dtype > KVQ_DTYPE_F32)
        return kvq__fail(KVQ_E_DTYPE,
                         "%s: dtype %u of %s is unknown; 1 (f16), 2 (bf16) and 3 (f32) are known",
                         kvq__op_name(op), tensor->dtype, name);
    *view = (struct kvq_wire_view){.offset = tensor->offset,
                                   .token_stride = tensor->token_stride,
                                   .head_stride = tensor->head_stride,
                                   .buffer = tensor->buffer->id,
                                   .dtype = tensor->dtype};
    return check_buffer(queue, op, name, tensor->buffer);
}

static int put_list(const kvq_queue *queue, unsigned op, bool need, const struct kvq_pages *pages,
                    struct kvq_request *r)
{
    if (!pages->list && (need || pages->page_tokens))
        return kvq__fail(KVQ_E_BUFFER, "%s needs a list, but its buffer is NULL", kvq__op_name(op));
    if (!pages->list)
        return KVQ_OK;
    r->list = (struct kvq_wire_view){
        .offset = pages->list_offset, .token_stride = sizeof(int32_t), .buffer = pages->list->id};
    if (pages->page_tokens && op != KVQ_OP_ACCEPT) {
        r->flags |= KVQ_REQ_PAGED_KV;
        r->page_tokens = pages->page_tokens;
        r->k_page_stride = pages->k_page_stride;
        r->v_page_stride = pages->v_page_stride;
    }
    return check_buffer(queue, op, "the list", pages->list);
}

// Ids and pages are lists both, and a request has one.
static int put_ids(const kvq_queue *queue, unsigned op, const struct kvq_ids *ids,
                   const struct kvq_pages *pages, struct kvq_request *r)
{
    if (!ids->buffer)
        return KVQ_OK;
    if (op != KVQ_OP_STEP_BEGIN && op != KVQ_OP_STEP_END && op != KVQ_OP_STEP)
        return kvq__fail(KVQ_E_INVALID,
                         "%s takes no token ids; they go with a step's beginning or its end",
                         kvq__op_name(op));
    if (pages->list && (pages->list != ids->buffer || pages->list_offset != ids->offset))
        return kvq__fail(KVQ_E_INVALID,
                         "%s: token ids must stand in the same buffer as the lists of pages, and "
                         "be counted from the same offset",
                         kvq__op_name(op));
    r->list = (struct kvq_wire_view){
        .offset = ids->offset, .token_stride = sizeof(int32_t), .buffer = ids->buffer->id};
    r->flags |= KVQ_REQ_TOKEN_IDS;
    return check_buffer(queue, op, "token ids", ids->buffer);
}

int kvq__put_work(const kvq_queue *queue, const struct kvq_work *w, struct kvq_request *r)
{
    unsigned need = needed(r->op);
    if (w->flags & ~(uint32_t)KVQ_PAST_ONLY)
        return kvq__fail(KVQ_E_INVALID, "%s: flags %#x are unknown; KVQ_PAST_ONLY (1) is known",
                         kvq__op_name(r->op), w->flags);
    r->flags = (uint16_t)w->flags;
    r->layer = w->layer;
    r->step = w->step;
    r->deadline_ns = w->deadline_ns;
    int rc = kvq__put_view(queue, r->op, "k", need & 1, &w->k, &r->k);
    if (rc == KVQ_OK)
        rc = kvq__put_view(queue, r->op, "v", need & 2, &w->v, &r->v);
    if (rc == KVQ_OK)
        rc = kvq__put_view(queue, r->op, "q", need & 4, &w->q, &r->q);
    if (rc == KVQ_OK)
        rc = kvq__put_view(queue, r->op, "out", need & 8, &w->out, &r->out);
    if (rc == KVQ_OK)
        rc = kvq__put_view(queue, r->op, "lse", false, &w->lse, &r->lse);
    if (rc == KVQ_OK)
        rc = put_list(queue, r->op, need & 16, &w->pages, r);
    return rc ? rc : put_ids(queue, r->op, &w->ids, &w->pages, r);
}

static int check_call(const kvq_queue *queue, unsigned op, const struct kvq_work *work,
                      const struct kvq_entry *entries, uint32_t n)
{
    if (!queue)
        return kvq__fail(KVQ_E_INVALID, "the queue is NULL");
    if (op >= KVQ_OP_COUNT)
        return kvq__fail(KVQ_E_INVALID, "operation %u is unknown; 0 to %d are known", op,
                         KVQ_OP_COUNT - 1);
    if (queue->dead)
        return kvq__fail(queue->dead, "%s: the connection was lost; kvq_reattach connects again",
                         kvq__op_name(op));
    if (n > KVQ_MAX_BATCH)
        return kvq__fail(KVQ_E_LIMIT, "%s of %u sessions: at most %d go into one request",
                         kvq__op_name(op), n, KVQ_MAX_BATCH);
    if (n > 0 && !entries)
        return kvq__fail(KVQ_E_INVALID, "%s of %u sessions, but entries is NULL", kvq__op_name(op),
                         n);
    if (n == 0 && op != KVQ_OP_NOP && op != KVQ_OP_STEP_END && op != KVQ_OP_STEP_ABORT)
        return kvq__fail(KVQ_E_INVALID, "%s of 0 sessions: at least 1 is needed", kvq__op_name(op));
    if (!work && (needed(op) || op == KVQ_OP_STEP_BEGIN || op == KVQ_OP_READ))
        return kvq__fail(KVQ_E_INVALID, "%s: work is NULL", kvq__op_name(op));
    return KVQ_OK;
}

// ---- Writing it to the ring ----

static struct kvq_entry_wire wire_entry(const struct kvq_entry *e)
{
    return (struct kvq_entry_wire){.handle = e->session,
                                   .position = e->position,
                                   .row = e->row,
                                   .q_row = e->q_row,
                                   .append = e->append,
                                   .queries = e->queries,
                                   .list_token = e->list_token};
}

static void write_entries(kvq_queue *queue, const struct kvq_entry *entries, uint32_t n)
{
    struct kvq_entry_wire wire[ENTRIES_AT_ONCE];
    size_t at = sizeof(struct kvq_request);
    for (uint32_t from = 0; from < n; from += ENTRIES_AT_ONCE) {
        uint32_t some = n - from < ENTRIES_AT_ONCE ? n - from : ENTRIES_AT_ONCE;
        for (uint32_t i = 0; i < some; i++)
            wire[i] = wire_entry(&entries[from + i]);
        kvq_ring_write(&queue->tx, at, wire, some * sizeof wire[0]);
        at += some * sizeof wire[0];
    }
}

static int send_request(kvq_queue *queue, const struct kvq__pending *p)
{
    uint32_t room;
    if (kvq_ring_room(&queue->tx, &room) || room < p->request.slots)
        return kvq__queue_kill(queue,
                               kvq__fail(KVQ_E_PROTOCOL,
                                         "queue %u: the daemon's count of taken requests makes no "
                                         "sense; kvq_reattach connects again",
                                         queue->id));
    kvq_ring_write(&queue->tx, 0, &p->request, sizeof p->request);
    write_entries(queue, p->entries, p->n);
    if (p->step)
        kvq__step_write(queue, p);
    kvq_ring_publish(&queue->tx, p->request.slots);
    const uint64_t one = 1;
    if (kvq_ring_sleeps(&queue->client->page->poller_sleeping) &&
        write(queue->wake_daemon, &one, sizeof one) < 0 && errno != EAGAIN)
        return kvq__queue_kill(queue, kvq__fail_errno("cannot wake the daemon"));
    return KVQ_OK;
}

static struct kvq__pending *free_slot(kvq_queue *queue)
{
    for (int i = 0; i < KVQ_QUEUE_CREDITS; i++)
        if (!queue->pending[i].ticket)
            return &queue->pending[i];
    return NULL;
}

static uint16_t slots_of(uint32_t n)
{
    return (uint16_t)((sizeof(struct kvq_request) + n * sizeof(struct kvq_entry_wire) +
                       KVQ_SLOT_BYTES - 1) /
                      KVQ_SLOT_BYTES);
}

int kvq_queue_wait_for_room(kvq_queue *queue, uint64_t timeout_ns)
{
    if (!queue)
        return kvq__fail(KVQ_E_INVALID, "the queue is NULL");
    queue->room_ns = timeout_ns;
    return KVQ_OK;
}

static void put_patience(const kvq_queue *queue, struct kvq_request *r)
{
    bool takes = r->op == KVQ_OP_STEP_BEGIN || r->op == KVQ_OP_STEP || r->op == KVQ_OP_FORK;
    if (!takes || queue->room_ns == 0)
        return;
    uint64_t now = kvq__now_ns();
    uint64_t end = queue->room_ns < UINT64_MAX - now ? now + queue->room_ns : UINT64_MAX;
    r->flags |= KVQ_REQ_WAIT_ROOM;
    if (r->deadline_ns == 0 || end < r->deadline_ns)
        r->deadline_ns = end;
}

int kvq__submit_make(kvq_queue *queue, unsigned op, struct kvq_work *work,
                     struct kvq_entry *entries, uint32_t n, struct kvq__pending **pending)
{
    int rc = check_call(queue, op, work, entries, n);
    if (rc)
        return rc;
    struct kvq__pending *p = free_slot(queue);
    if (!p)
        return kvq__fail(KVQ_E_CREDITS, "%s: %d tickets of this queue are open; wait for one first",
                         kvq__op_name(op), KVQ_QUEUE_CREDITS);
    p->request = (struct kvq_request){
        .op = (uint8_t)op, .count = (uint16_t)n, .slots = slots_of(n), .seq = queue->seq + 1};
    if (work) {
        if (op == KVQ_OP_STEP_BEGIN)
            work->step = (uint64_t)queue->id << 32 | ++queue->steps;
        rc = kvq__put_work(queue, work, &p->request);
        if (rc)
            return rc;
    }
    put_patience(queue, &p->request);
    p->n = n;
    p->entries = entries;
    p->done = p->any_failed = false;
    p->step = NULL;
    p->extents = NULL;
    *pending = p;
    return KVQ_OK;
}

int kvq__submit_send(kvq_queue *queue, struct kvq__pending *p)
{
    queue->seq++;
    p->ticket = ++queue->tickets << TICKET_SLOT_BITS | (uint64_t)(p - queue->pending);
    int rc = send_request(queue, p);
    if (rc)
        p->ticket = 0;
    return rc;
}

int kvq_submit(kvq_queue *queue, enum kvq_operation op, struct kvq_work *work,
               struct kvq_entry *entries, uint32_t n, kvq_ticket *ticket)
{
    struct kvq__pending *p = NULL;
    if (!ticket)
        return kvq__fail(KVQ_E_INVALID, "%s: ticket is NULL", kvq__op_name((unsigned)op));
    if ((unsigned)op == KVQ_OP_STEP)
        return kvq__fail(KVQ_E_INVALID, "step: has no ticket; call kvq_step");
    int rc = kvq__submit_make(queue, (unsigned)op, work, entries, n, &p);
    if (!p)
        return rc;
    rc = kvq__submit_send(queue, p);
    *ticket = p->ticket;
    return rc;
}

int kvq_wait(kvq_queue *queue, kvq_ticket ticket, uint64_t timeout_ns)
{
    if (!queue)
        return kvq__fail(KVQ_E_INVALID, "the queue is NULL");
    struct kvq__pending *p = &queue->pending[ticket % KVQ_QUEUE_CREDITS];
    if (ticket == 0 || p->ticket != ticket)
        return kvq__fail(KVQ_E_INVALID, "ticket %#llx is not open on this queue",
                         (unsigned long long)ticket);
    int rc = KVQ_OK;
    if (!p->done) {
        uint64_t now = timeout_ns == UINT64_MAX || timeout_ns == 0 ? 0 : kvq__now_ns();
        bool ever = timeout_ns >= UINT64_MAX - now;
        rc = kvq__queue_wait(queue, p, ever ? UINT64_MAX : now + timeout_ns);
    }
    if (!p->done)
        return rc == KVQ_E_DEADLINE
                   ? kvq__fail(rc, "%s: not done within %llu ns; the ticket stays open",
                               kvq__op_name(p->request.op), (unsigned long long)timeout_ns)
                   : rc;
    queue->shard = p->any_failed ? p->shard : 0;
    if (rc == KVQ_OK) // else this wait saw the queue die, and said how
        kvq__explain(queue, p);
    p->ticket = 0;
    return p->status;
}
