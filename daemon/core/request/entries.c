// SPDX-License-Identifier: Apache-2.0
//
// The entries of a request of any operation: their results, the sessions that they name, and what
// they hold of these. kvq__request_release in request.c gives all that back, and ends what the
// operation has begun with it.
#include <assert.h>

#include "daemon/core/session/group.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// ---- Results and sessions ----

int kvq__entry_fail(struct kvq__queue *q, uint32_t i, int code, uint64_t value)
{
    assert(code < 0 && i < q->header.count);
    q->results[i].status = code;
    q->results[i].value = value;
    return code;
}

int kvq__entry_fail_by(struct kvq__queue *q, uint32_t i, int code, uint64_t value, uint32_t shard)
{
    assert(shard < KVQ_MAX_SHARDS);
    q->results[i].shard = shard + 1;
    return kvq__entry_fail(q, i, code, value);
}

int kvq__entry_open(struct kvq__queue *q, uint32_t i, bool write)
{
    struct kvq__handle *h;
    int rc = kvq__handle_get(q->client, q->entries[i].handle, &h);
    if (rc == 0 && write && h->read_only)
        rc = KVQ_E_READ_ONLY;
    if (rc < 0)
        return kvq__entry_fail(q, i, rc, 0);
    if (kvq__is_on_stream(q) && kvq__home_of(h->session)->gpu != q->timeline.gpu)
        return kvq__entry_fail(q, i, KVQ_E_BUFFER, 0);                     // a stream is one GPU's
    if (kvq__is_offloaded(h->session) || kvq__is_turning_back(h->session)) // it could not come back
        return kvq__entry_fail(q, i, h->session->fetch.error, h->session->tokens);
    q->work[i].handle = h;
    q->work[i].session = h->session;
    q->work[i].past = h->session->tokens;
    q->work[i].step_serial = h->session->in_step.serial;
    q->results[i].value = h->session->tokens;
    if (q->work[i].no_room)
        return kvq__entry_fail(q, i, q->work[i].no_room, h->session->tokens);
    if (kvq__is_on_stream(q) && h->session->pool->gpu != q->timeline.gpu)
        return kvq__entry_fail(q, i, KVQ_E_DRAINING, h->session->tokens); // it goes home no more
    if (kvq__group_asks(q, h) != KVQ__PREPARED_NOT) // this wait would never end: others have waited
        return kvq__entry_fail_by(q, i, KVQ_E_BUSY, h->session->tokens,
                                  kvq__group_awaited(h->session));
    return 0;
}

// Fails the entry. If another shard has ended the session's step, the writer learns that first.
static int step_lost(struct kvq__queue *q, uint32_t i, int code)
{
    const struct kvq__session *s = q->work[i].session;
    if (s->in_step.undone_by && !q->work[i].handle->read_only)
        return kvq__entry_fail_by(q, i, KVQ_E_CANCELLED, s->tokens, s->in_step.undone_by - 1);
    return kvq__entry_fail(q, i, code, s->tokens);
}

// Whether the entry reports to the session's writer that values of its last STEP were not finite.
// One request does so, however often it is tried.
static bool report_nonfinite(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    if (s->in_step.nonfinite_unreported && !w->handle->read_only) {
        w->reports_nonfinite = true;
        w->reported_serial = s->in_step.serial;
        s->in_step.nonfinite_unreported = false;
    }
    return w->reports_nonfinite;
}

int kvq__entry_open_at(struct kvq__queue *q, uint32_t i, bool write)
{
    int rc = kvq__entry_open(q, i, write);
    if (rc < 0)
        return rc;
    struct kvq__session *s = q->work[i].session;
    if (report_nonfinite(q, i))
        return kvq__entry_fail(q, i, KVQ_E_NONFINITE, s->tokens);
    if (q->step && s->step != q->step)
        return step_lost(q, i, KVQ_E_NO_STEP);
    if (q->entries[i].position != s->tokens)
        return step_lost(q, i, KVQ_E_POSITION);
    return 0;
}

// ---- What entries hold ----

void kvq__hold(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    assert(i < q->header.count && w->session && (w->session->refs > 0 || !w->held));
    if (!w->held)
        kvq__session_ref(w->session);
    w->held = true;
    q->holding = true;
}

void kvq__hold_reading(struct kvq__queue *q, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    assert(!q->work[i].reading);
    kvq__hold(q, i);
    q->work[i].reading = kvq__reading_begin(s);
}

void kvq__hold_tail(struct kvq__queue *q, uint32_t i)
{
    assert(!q->work[i].tail_use);
    kvq__hold(q, i);
    q->work[i].tail_use = true;
    q->work[i].session->entries.tail++;
}

void kvq__hold_exclusive(struct kvq__queue *q, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    if (s->exclusive == q)
        return;
    assert(!s->exclusive);
    kvq__hold(q, i);
    q->work[i].exclusive = true;
    s->exclusive = q;
}

void kvq__hold_buffers(struct kvq__queue *q)
{
    for (uint32_t v = 0; v < KVQ__VIEWS; v++)
        kvq__buffer_use(q->client, q->buffers[v], &q->held_buffers);
}

// On a GPU the work of two work streams has no order: what another work stream packs must have
// ended, and outliers are added only while nobody reads them.
static bool gpu_must_wait(const struct kvq__queue *q, const struct kvq__session *s,
                          const struct kvq__layer *l, bool due)
{
    bool others = l->pack_stream && l->pack_stream->client != q->client;
    return (others && !kvq__work_stream_ended(l->pack_stream, l->pack_number)) ||
           (due && l->format->outliers && kvq__is_read(s));
}

bool kvq__read_must_wait(const struct kvq__queue *q, uint32_t i, uint32_t layer)
{
    const struct kvq__session *s = q->work[i].session;
    const struct kvq__layer *l = kvq__source_layer(s, layer);
    bool due = kvq__packed_at(s, l, q->work[i].past) > l->packed;
    return (s->exclusive && s->exclusive != q) || (due && (l->packer || s->in_step.committing)) ||
           (s->pool->gpu && gpu_must_wait(q, s, l, due));
}

void kvq__hold_layer(struct kvq__queue *q, uint32_t i, uint32_t layer)
{
    struct kvq__session *s = q->work[i].session;
    struct kvq__layer *l = kvq__source_layer(s, layer);
    kvq__hold_reading(q, i);
    if (kvq__packed_at(s, l, q->work[i].past) <= l->packed || l->packer)
        return; // another entry of this request packs it
    l->packer = q;
    q->work[i].packing = true;
}
