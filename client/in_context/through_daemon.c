// SPDX-License-Identifier: Apache-2.0
//
// The calls of in-context mode through the daemon: a step of its own, a request for each layer.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <stdio.h>

// ---- Parts of a batch ----

// Entries of one kind, and which of the caller's they are.
struct batch {
    struct kvq_entry *entries;
    uint32_t *of;
    uint32_t n;
};

static void batch_put(struct batch *b, const struct kvq_entry *entries, uint32_t i)
{
    assert(b->n < KVQ_MAX_BATCH);
    b->entries[b->n] = entries[i];
    b->of[b->n++] = i;
}

static void batch_take(const struct batch *b, struct kvq_entry *entries)
{
    for (uint32_t j = 0; j < b->n; j++) {
        entries[b->of[j]].status = b->entries[j].status;
        entries[b->of[j]].value = b->entries[j].value;
    }
}

static struct batch first_batch(struct kvq_local *local)
{
    return (struct batch){local->some, local->some_of, 0};
}

static struct batch second_batch(struct kvq_local *local)
{
    return (struct batch){local->others, local->others_of, 0};
}

static bool any_failed(const struct kvq_entry *entries, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (entries[i].status)
            return true;
    return false;
}

// ---- Begin ----

int kvq__through_begin(struct kvq_local *local, struct kvq_entry *entries, uint32_t n)
{
    struct batch b = first_batch(local);
    assert(!local->stepping && local->step == 0);
    for (uint32_t i = 0; i < n; i++) {
        entries[i].status = kvq__local_judge(local, &entries[i]);
        entries[i].value = entries[i].position;
        if (entries[i].status == KVQ_OK && entries[i].append)
            batch_put(&b, entries, i);
    }
    bool failed = any_failed(entries, n);
    int rc = b.n ? kvq_step_begin(local->queue, b.entries, b.n, &local->step) : KVQ_OK;
    if (rc) {
        local->step = 0;
        return rc;
    }
    batch_take(&b, entries);
    for (uint32_t i = 0; i < n; i++)
        if (entries[i].status == KVQ_OK)
            kvq__local_join(local, &entries[i]);
    if (failed)
        kvq__local_explain(local, KVQ_OP_STEP_BEGIN, NULL, entries, n);
    if (!local->stepping)
        local->step = 0; // the daemon has no step without sessions
    return KVQ_OK;
}

// ---- Attend ----

static int run_batch(struct kvq_local *local, unsigned op, const struct kvq_work *work,
                     struct batch *b, struct kvq_entry *entries)
{
    struct kvq_work w = *work;
    if (b->n == 0)
        return KVQ_OK;
    w.step = b->entries[0].append ? local->step : 0;
    if (op == KVQ_OP_ATTEND)
        w.k = w.v = (struct kvq_tensor){0};
    int rc;
    if (local->here.driver)
        rc = op == KVQ_OP_ATTEND
                 ? kvq_attend_on_stream(local->queue, &w, b->entries, b->n, local->stream)
                 : kvq_append_attend_on_stream(local->queue, &w, b->entries, b->n, local->stream);
    else
        rc = op == KVQ_OP_ATTEND ? kvq_attend(local->queue, &w, b->entries, b->n)
                                 : kvq_append_attend(local->queue, &w, b->entries, b->n);
    if (rc == KVQ_OK)
        batch_take(b, entries);
    for (uint32_t j = 0; rc == KVQ_OK && op == KVQ_OP_APPEND_ATTEND && j < b->n; j++)
        if (b->entries[j].status == KVQ_OK)
            kvq__local_find(local, b->entries[j].session)->appended[w.layer] = 1;
    return rc;
}

static bool appends(const struct kvq_local *local, const struct kvq_work *work,
                    const struct kvq_entry *e)
{
    const struct kvq__local_session *s = kvq__local_find(local, e->session);
    return work->k.buffer && e->append &&
           (work->layer >= KVQ_MAX_LAYERS || !s->appended[work->layer]);
}

// Those that append, those that attend in the step, and those that attend outside of it.
static int attend_all(struct kvq_local *local, const struct kvq_work *work,
                      struct kvq_entry *entries, uint32_t n)
{
    struct batch append = first_batch(local), tail = second_batch(local), past;
    for (uint32_t i = 0; i < n; i++) {
        if (entries[i].status == KVQ_OK && appends(local, work, &entries[i]))
            batch_put(&append, entries, i);
        else if (entries[i].status == KVQ_OK && entries[i].append)
            batch_put(&tail, entries, i);
    }
    int rc = run_batch(local, KVQ_OP_APPEND_ATTEND, work, &append, entries);
    if (rc == KVQ_OK)
        rc = run_batch(local, KVQ_OP_ATTEND, work, &tail, entries);
    past = first_batch(local);
    for (uint32_t i = 0; i < n; i++)
        if (entries[i].status == KVQ_OK && entries[i].append == 0)
            batch_put(&past, entries, i);
    return rc ? rc : run_batch(local, KVQ_OP_ATTEND, work, &past, entries);
}

int kvq__through_attend(struct kvq_local *local, const struct kvq_work *work,
                        struct kvq_entry *entries, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        entries[i].status = kvq__local_member(local, &entries[i]);
        entries[i].value = entries[i].position;
    }
    bool failed = any_failed(entries, n);
    int rc = attend_all(local, work, entries, n);
    if (rc == KVQ_OK && failed)
        kvq__local_explain(local, work->k.buffer ? KVQ_OP_APPEND_ATTEND : KVQ_OP_ATTEND, work,
                           entries, n);
    return rc;
}

// ---- End ----

// K and V of layers that no call of the step gave: `work` has them.
static int append_layer(struct kvq_local *local, const struct kvq_step_work *work, uint32_t layer,
                        struct kvq_entry *entries, uint32_t n)
{
    struct batch b = first_batch(local);
    assert(layer < work->n_layers && layer < KVQ_MAX_LAYERS);
    struct kvq_work w = {.step = local->step,
                         .layer = layer,
                         .deadline_ns = work->deadline_ns,
                         .k = work->k[layer],
                         .v = work->v[layer],
                         .pages = work->pages};
    if (!w.k.buffer)
        return KVQ_OK;
    for (uint32_t i = 0; i < n; i++)
        if (entries[i].status == KVQ_OK && entries[i].append &&
            !kvq__local_find(local, entries[i].session)->appended[layer])
            batch_put(&b, entries, i);
    int rc = KVQ_OK;
    if (b.n && local->here.driver)
        rc = kvq_append_on_stream(local->queue, &w, b.entries, b.n, local->stream);
    else if (b.n)
        rc = kvq_append(local->queue, &w, b.entries, b.n);
    if (rc == KVQ_OK)
        batch_take(&b, entries);
    for (uint32_t j = 0; rc == KVQ_OK && j < b.n; j++)
        if (b.entries[j].status == KVQ_OK)
            kvq__local_find(local, b.entries[j].session)->appended[layer] = 1;
    return rc;
}

static int append_rest(struct kvq_local *local, const struct kvq_step_work *work,
                       struct kvq_entry *entries, uint32_t n)
{
    bool given = work && (work->k || work->v);
    if (given && (!work->k || !work->v || work->n_layers > KVQ_MAX_LAYERS))
        return kvq__set_error(
            KVQ_E_INVALID, "step end of %u layers, at most %d; k and v are both NULL or both not",
            work->n_layers, KVQ_MAX_LAYERS);
    int rc = KVQ_OK;
    for (uint32_t i = 0; given && i < work->n_layers && rc == KVQ_OK; i++)
        rc = append_layer(local, work, i, entries, n);
    return rc;
}

// Those of the step that were not committed and may not try again. What the step's end said of them
// stays said: they may have left the step by themselves, and then cannot be aborted.
static void abort_others(struct kvq_local *local, const struct kvq_entry *entries, uint32_t n)
{
    char told[KVQ__TEXT_BYTES];
    struct batch b = first_batch(local);
    snprintf(told, sizeof told, "%s", kvq_error_text());
    for (uint32_t i = 0; i < n; i++) {
        struct kvq__local_session *s = kvq__local_find(local, entries[i].session);
        if (s && (entries[i].status == KVQ_OK || kvq__local_may_retry(entries[i].status)))
            s->in_step = false;
    }
    for (uint32_t i = 0; i < local->n_members; i++) {
        const struct kvq__local_session *s = local->members[i];
        assert(b.n < KVQ_MAX_BATCH);
        if (s->in_step && s->append)
            local->some[b.n++] =
                (struct kvq_entry){.session = s->handle, .position = s->past, .append = s->append};
    }
    int rc = b.n ? kvq_step_abort(local->queue, local->step, b.entries, b.n) : KVQ_OK;
    if (rc || any_failed(b.entries, b.n))
        kvq__set_error(KVQ_E_NO_STEP, "%s", told);
}

int kvq__through_end(struct kvq_local *local, const struct kvq_step_work *work,
                     struct kvq_entry *entries, uint32_t n)
{
    assert(local->stepping);
    for (uint32_t i = 0; i < n; i++) {
        const struct kvq__local_session *s = kvq__local_find(local, entries[i].session);
        entries[i].status = kvq__local_member(local, &entries[i]);
        if (entries[i].status == KVQ_OK && entries[i].append != s->append)
            entries[i].status = KVQ_E_INVALID;
        entries[i].value = entries[i].position;
    }
    const struct kvq_ids ids = work ? work->ids : (struct kvq_ids){0};
    bool failed = any_failed(entries, n);
    int rc = append_rest(local, work, entries, n);
    struct batch b = first_batch(local);
    for (uint32_t i = 0; i < n && rc == KVQ_OK; i++)
        if (entries[i].status == KVQ_OK && entries[i].append)
            batch_put(&b, entries, i);
    if (rc == KVQ_OK && b.n)
        rc = kvq__step_end_ids(local->queue, local->step, &ids, b.entries, b.n);
    if (rc && !local->queue->dead)
        return rc;
    if (rc == KVQ_OK) {
        batch_take(&b, entries);
        abort_others(local, entries, n);
    }
    if (rc == KVQ_OK && failed)
        kvq__local_explain(local, KVQ_OP_STEP_END, NULL, entries, n);
    if (rc)
        kvq__local_over(local);
    else
        kvq__local_keep(local, entries, n);
    return rc;
}

void kvq__through_abort(struct kvq_local *local)
{
    assert(local->step);
    int rc = kvq_step_abort(local->queue, local->step, NULL, 0);
    (void)rc; // the step is over, whatever was said of it
}
