// SPDX-License-Identifier: Apache-2.0
//
// Tickets: requests that were sent, until somebody has waited for them.
//
// Only what the daemon could not say as well is checked here; the daemon judges each entry by
// itself, so that one session's mistake never fails another.
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

enum { TICKET_SLOT_BITS = 3 };
static_assert(KVQ_QUEUE_CREDITS == 1 << TICKET_SLOT_BITS, "a ticket names its slot");

static int check_call(const kvq_queue *queue, unsigned op, const struct kvq_work *work,
                      const struct kvq_entry *entries, uint32_t n)
{
    if (!queue)
        return kvq__set_error(KVQ_E_INVALID, "the queue is NULL");
    if (op >= KVQ_OP_COUNT)
        return kvq__set_error(KVQ_E_INVALID, "operation %u is unknown; 0 to %d are known", op,
                              KVQ_OP_COUNT - 1);
    if (queue->dead)
        return kvq__set_error(queue->dead,
                              "%s: the connection was lost; kvq_reattach connects again",
                              kvq__op_name(op));
    if (n > KVQ_MAX_BATCH)
        return kvq__set_error(KVQ_E_LIMIT, "%s of %u sessions: at most %d go into one request",
                              kvq__op_name(op), n, KVQ_MAX_BATCH);
    if (n > 0 && !entries)
        return kvq__set_error(KVQ_E_INVALID, "%s of %u sessions, but entries is NULL",
                              kvq__op_name(op), n);
    if (n == 0 && op != KVQ_OP_NOP && op != KVQ_OP_STEP_END && op != KVQ_OP_STEP_ABORT)
        return kvq__set_error(KVQ_E_INVALID, "%s of 0 sessions: at least 1 is needed",
                              kvq__op_name(op));
    if (!work && kvq__op_takes_work(op))
        return kvq__set_error(KVQ_E_INVALID, "%s: work is NULL", kvq__op_name(op));
    return KVQ_OK;
}

// ---- Sending ----

static int publish_request(kvq_queue *queue, const struct kvq__pending *p)
{
    uint32_t room;
    assert(p->ticket && !p->done);
    if (kvq_ring_room(&queue->tx, &room) || room < p->request.slots)
        return kvq__queue_kill(
            queue, kvq__set_error(KVQ_E_PROTOCOL,
                                  "queue %u: the daemon's count of taken requests makes no "
                                  "sense; kvq_reattach connects again",
                                  queue->id));
    kvq__request_write(queue, p);
    kvq_ring_publish(&queue->tx, p->request.slots);
    const uint64_t one = 1;
    if (kvq_ring_sleeps(&queue->client->page->poller_sleeping) &&
        write(queue->wake_daemon, &one, sizeof one) < 0 && errno != EAGAIN)
        return kvq__queue_kill(queue, kvq__set_error_errno("cannot wake the daemon"));
    return KVQ_OK;
}

// One that a ticket can name.
static struct kvq__pending *free_slot(kvq_queue *queue)
{
    for (int i = 0; i < KVQ_QUEUE_CREDITS; i++)
        if (!queue->pending[i].ticket)
            return &queue->pending[i];
    return NULL;
}

int kvq_queue_wait_for_room(kvq_queue *queue, uint64_t timeout_ns)
{
    if (!queue)
        return kvq__set_error(KVQ_E_INVALID, "the queue is NULL");
    queue->room_ns = timeout_ns;
    return KVQ_OK;
}

static void put_patience(const kvq_queue *queue, struct kvq_request *r)
{
    bool takes = r->op == KVQ_OP_STEP_BEGIN || r->op == KVQ_OP_STEP || r->op == KVQ_OP_FORK;
    if (!takes || queue->room_ns == 0)
        return;
    uint64_t now = kvq_now_ns();
    uint64_t end = queue->room_ns < UINT64_MAX - now ? now + queue->room_ns : UINT64_MAX;
    r->flags |= KVQ_REQ_WAIT_ROOM;
    if (r->deadline_ns == 0 || end < r->deadline_ns)
        r->deadline_ns = end;
}

static int fill(kvq_queue *queue, struct kvq__pending *p, unsigned op, struct kvq_work *work,
                struct kvq_entry *entries, uint32_t n)
{
    assert(!p->ticket && n <= KVQ_MAX_BATCH);
    p->request = (struct kvq_request){.op = (uint8_t)op,
                                      .count = (uint16_t)n,
                                      .slots = (uint16_t)kvq_request_slots(n, 0),
                                      .seq = queue->seq + 1};
    if (work) {
        if (op == KVQ_OP_STEP_BEGIN)
            work->step = (uint64_t)queue->id << 32 | ++queue->steps;
        int rc = kvq__put_work(queue, work, &p->request);
        if (rc)
            return rc;
    }
    put_patience(queue, &p->request);
    p->n = n;
    p->entries = entries;
    p->done = p->any_failed = false;
    p->step = NULL;
    p->extents = NULL;
    return KVQ_OK;
}

int kvq__submit_make(kvq_queue *queue, unsigned op, struct kvq_work *work,
                     struct kvq_entry *entries, uint32_t n, struct kvq__pending **pending)
{
    int rc = check_call(queue, op, work, entries, n);
    if (rc)
        return rc;
    struct kvq__pending *p = free_slot(queue);
    if (!p)
        return kvq__set_error(KVQ_E_CREDITS,
                              "%s: %d tickets of this queue are open; wait for one first",
                              kvq__op_name(op), KVQ_QUEUE_CREDITS);
    rc = fill(queue, p, op, work, entries, n);
    if (rc == KVQ_OK)
        *pending = p;
    return rc;
}

int kvq__submit_send(kvq_queue *queue, struct kvq__pending *p)
{
    assert(!p->ticket && p >= queue->pending && p < queue->pending + KVQ__PENDING);
    queue->seq++;
    assert(p->request.seq == queue->seq); // nothing was sent since it was made
    p->ticket =
        ++queue->tickets << TICKET_SLOT_BITS | (uint64_t)(p - queue->pending) % KVQ_QUEUE_CREDITS;
    int rc = publish_request(queue, p);
    if (rc)
        p->ticket = 0;
    return rc;
}

int kvq_submit(kvq_queue *queue, enum kvq_operation op, struct kvq_work *work,
               struct kvq_entry *entries, uint32_t n, kvq_ticket *ticket)
{
    struct kvq__pending *p = NULL;
    if (!ticket)
        return kvq__set_error(KVQ_E_INVALID, "%s: ticket is NULL", kvq__op_name((unsigned)op));
    if ((unsigned)op == KVQ_OP_STEP)
        return kvq__set_error(KVQ_E_INVALID, "step: has no ticket; call kvq_step");
    int rc = kvq__submit_make(queue, (unsigned)op, work, entries, n, &p);
    if (rc)
        return rc;
    assert(p);
    rc = kvq__submit_send(queue, p);
    *ticket = p->ticket;
    return rc;
}

// Tells what came of a request that is done, and closes its ticket. `rc`: of the wait for it.
static int collect(kvq_queue *queue, struct kvq__pending *p, int rc)
{
    assert(p->ticket && p->done);
    queue->shard = p->any_failed ? p->shard : 0;
    if (rc == KVQ_OK) // else this wait saw the queue die, and said how
        kvq__explain(queue, p);
    p->ticket = 0;
    return p->status;
}

int kvq_wait(kvq_queue *queue, kvq_ticket ticket, uint64_t timeout_ns)
{
    if (!queue)
        return kvq__set_error(KVQ_E_INVALID, "the queue is NULL");
    struct kvq__pending *p = &queue->pending[ticket % KVQ_QUEUE_CREDITS];
    if (ticket == 0 || p->ticket != ticket)
        return kvq__set_error(KVQ_E_INVALID, "ticket %#llx is not open on this queue",
                              (unsigned long long)ticket);
    int rc = KVQ_OK;
    if (!p->done) {
        uint64_t now = timeout_ns == UINT64_MAX || timeout_ns == 0 ? 0 : kvq_now_ns();
        bool ever = timeout_ns >= UINT64_MAX - now;
        rc = kvq__queue_wait(queue, p, ever ? UINT64_MAX : now + timeout_ns);
    }
    if (!p->done)
        return rc == KVQ_E_DEADLINE
                   ? kvq__set_error(rc, "%s: not done within %llu ns; the ticket stays open",
                                    kvq__op_name(p->request.op), (unsigned long long)timeout_ns)
                   : rc;
    return collect(queue, p, rc);
}

int kvq_step_abort(kvq_queue *queue, uint64_t step, struct kvq_entry *entries, uint32_t n)
{
    struct kvq_work work = {.step = step};
    int rc = check_call(queue, KVQ_OP_STEP_ABORT, &work, entries, n);
    if (rc == KVQ_OK)
        rc = kvq__queue_await_credit(queue);
    if (rc)
        return rc;
    struct kvq__pending *p = &queue->pending[KVQ__PENDING - 1];
    rc = fill(queue, p, KVQ_OP_STEP_ABORT, &work, entries, n);
    if (rc == KVQ_OK)
        rc = kvq__submit_send(queue, p);
    if (rc)
        return rc;
    rc = kvq__queue_wait(queue, p, UINT64_MAX);
    return collect(queue, p, rc);
}
