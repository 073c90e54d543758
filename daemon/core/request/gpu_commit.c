// SPDX-License-Identifier: Apache-2.0
//
// See gpu_commit.h.
#include "daemon/core/request/gpu_commit.h"

#include <assert.h>

#include "daemon/core/session/group.h"
#include "daemon/core/session/table.h"
#include "proto/ring.h"

void kvq__gpu_commit_begin(struct kvq__session *s)
{
    assert(s->step && !s->in_step.committing);
    s->in_step.committing = true;
    s->core->n_committing++;
    kvq__step_part(s);
}

void kvq__gpu_commit_cancel(struct kvq__session *s)
{
    assert(s->in_step.counts);
    assert(s->in_step.committing);
    kvq_word_store_release(&s->in_step.counts->host->cancelled, 1);
}

// Units that were enqueued to be packed are packed now, or will not be at all.
static void note_packs(struct kvq__session *s, bool done)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        if (done && l->enqueued > l->packed) {
            l->packed = l->enqueued;
            l->learned = l->learn > 0;
        }
        l->enqueued = 0;
    }
}

// A STEP that could not enqueue all its stores is no step. A group is not packed before all its
// shards have committed: any of them can still be undone.
static int status_of(const struct kvq__session *s)
{
    const struct kvq_gpu_store_counts *counts = s->in_step.counts->host;
    bool partial = s->in_step.layers < s->n_owned;
    assert(s->in_step.layers <= s->n_owned);
    if (counts->nonfinite && !counts->cancelled && !s->dropped)
        return KVQ_E_NONFINITE;
    return s->dropped || counts->nonfinite || partial || (s->group && counts->cancelled)
               ? KVQ_E_CANCELLED
               : 0;
}

static void undo(struct kvq__session *s, struct kvq__table *table)
{
    // Whoever cancelled the step has undone the other shards, which may be in their next step.
    bool cancelled = s->in_step.counts->host->cancelled;
    kvq__step_over(s);
    if (!cancelled)
        kvq__group_undo(s);
    if (table)
        kvq__table_lost(table);
}

void kvq__gpu_commit(struct kvq__session *s, struct kvq__table *table, struct kvq_result *result)
{
    struct kvq_result own = {0};
    int rc = status_of(s);
    assert(s->core->n_committing > 0 && (!table || table->uses > 0));
    assert(s->in_step.committing);
    s->in_step.committing = false;
    s->core->n_committing--;
    note_packs(s, rc == 0);
    if (rc == 0) {
        rc = kvq__step_commit(s, &own);
        s->core->counts.steps += rc == 0;
    } else if (!s->dropped) {
        undo(s, table);
        own = (struct kvq_result){.status = rc, .value = s->tokens};
    } else {
        own.status = rc;
    }
    if (result)
        *result = own;
    else
        s->in_step.nonfinite_unreported = rc == KVQ_E_NONFINITE && s->writer;
}

// A later entry may have undone a prepared shard. An entry that failed behind its stores reports
// that they commit; if they do not, their own status counts.
void kvq__gpu_commit_all(struct kvq__queue *q)
{
    for (uint32_t i = 0; i < q->header.count; i++) {
        struct kvq__entry *w = &q->work[i];
        struct kvq_result result, *had = &q->results[i];
        if (!w->commits_on_gpu)
            continue;
        w->commits_on_gpu = false;
        kvq__gpu_commit(w->session, w->table, &result);
        result.extents = had->extents;
        *had = had->status < 0 && result.status == 0 ? *had : result;
    }
    for (uint32_t i = 0; i < q->header.count; i++)
        if (q->header.op == KVQ_OP_STEP && q->entries[i].append > 0 && kvq__entry_alive(q, i) &&
            !q->work[i].session->dropped)
            kvq__step_recheck(q->work[i].session, &q->results[i]);
}

bool kvq__gpu_commit_asks(const struct kvq__queue *q, uint32_t i, const struct kvq__handle *h)
{
    const struct kvq__session *s = h->session;
    uint8_t op = q->header.op;
    if (!s->in_step.committing)
        return false;
    if (!h->read_only || op == KVQ_OP_FORK)
        return true;
    return op != KVQ_OP_READ && q->entries[i].position != s->tokens;
}
