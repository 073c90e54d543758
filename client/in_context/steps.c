// SPDX-License-Identifier: Apache-2.0
//
// Steps of in-context mode: beginning without a request, ending with one.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <string.h>

enum { PENDING = 1 }; // of an entry's status, until its session was looked at

static const struct kvq_tensor no_tensors[KVQ_MAX_LAYERS];

// ---- Looking at sessions anew ----

// The count that its table was published at; UINT64_MAX if that is not known.
static uint64_t published_at(const struct kvq__local_session *s)
{
    if (!s->table || s->piece.at)
        return s->published;
    return s->table->number ? s->table->tokens : UINT64_MAX;
}

static bool is_known(const struct kvq_local *local, const struct kvq__local_session *s)
{
    const kvq_client *c = local->client;
    uint32_t changes = kvq_word_load_acquire(&c->changes[kvq__handle_index(s->handle)]);
    return published_at(s) != UINT64_MAX && !s->lacking && changes == s->changes &&
           kvq_word_load_acquire(&c->all_changes) == s->all_changes;
}

// After a request that published its table: what is new in it.
static int look_at(struct kvq_local *local, struct kvq__local_session *s, uint32_t extents)
{
    const kvq_client *c = local->client;
    s->changes = kvq_word_load_acquire(&c->changes[kvq__handle_index(s->handle)]);
    s->all_changes = kvq_word_load_acquire(&c->all_changes);
    s->lacking |= extents > s->known;
    int rc = s->lacking ? kvq__pool_extend(local->client, local->pool, s->handle, &s->known) : 0;
    s->lacking = rc != KVQ_OK;
    return rc || !s->table ? rc : kvq__page_table_check(s);
}

// The next entries of pending sessions that have equally many layers, as a request that only
// publishes. Returns how many.
static uint32_t gather_pending(struct kvq_local *local, const struct kvq_entry *entries, uint32_t n,
                               struct kvq_step_work *work)
{
    uint32_t m = 0;
    *work = (struct kvq_step_work){.k = no_tensors, .v = no_tensors};
    for (uint32_t i = 0; i < n; i++) {
        if (entries[i].status != PENDING)
            continue;
        const struct kvq__local_session *s = kvq__local_find(local, entries[i].session);
        assert(s && m < KVQ_MAX_BATCH);
        work->n_layers = work->n_layers ? work->n_layers : s->n_layers;
        if (s->n_layers != work->n_layers)
            continue;
        local->some[m] =
            (struct kvq_entry){.session = entries[i].session, .position = entries[i].position};
        local->extents[m] = 0;
        local->some_of[m++] = i;
    }
    return m;
}

static int take_published(struct kvq_local *local, struct kvq_entry *e, uint32_t j)
{
    struct kvq__local_session *s = kvq__local_find(local, e->session);
    assert(s && e->status == PENDING);
    e->status = local->some[j].status;
    e->value = local->some[j].value;
    s->published = UINT64_MAX;
    if (e->status)
        return KVQ_OK;
    int rc = look_at(local, s, local->extents[j]);
    s->published = e->value;
    if (rc == KVQ_OK && published_at(s) != e->position)
        rc = kvq__set_error(
            KVQ_E_PROTOCOL,
            "the daemon published a page table for %llu tokens of a session with %llu",
            (unsigned long long)published_at(s), (unsigned long long)e->position);
    return rc;
}

// Whose fault it is that a request of begin failed: a shard that stands in its answer alone.
static void blame(struct kvq_local *local, uint32_t m)
{
    uint32_t j = 0;
    while (j < m && local->some[j].status == KVQ_OK)
        j++;
    if (j < m && (!local->blamed || local->some_of[j] < local->blamed_entry)) {
        local->blamed = local->queue->shard;
        local->blamed_entry = local->some_of[j];
    }
}

// What streams still read is about to be written: those of pending sessions' last steps, which may
// be others than this step's.
static int await_readers(const struct kvq_local *local, const struct kvq_entry *entries, uint32_t n)
{
    const struct kvq_bucket *last = NULL;
    int result = KVQ_GPU_OK;
    for (uint32_t i = 0; i < n && result == KVQ_GPU_OK; i++) {
        const struct kvq__local_session *s = kvq__local_find(local, entries[i].session);
        if (entries[i].status != PENDING || !s->bucket || s->bucket == last)
            continue;
        last = s->bucket;
        result = local->here.driver->stream_sync(last->stream);
    }
    return result ? kvq__local_fault(local, result, "waiting for an earlier step") : KVQ_OK;
}

static int publish_pending(struct kvq_local *local, struct kvq_entry *entries, uint32_t n)
{
    struct kvq_step_work work;
    uint32_t m;
    int waited = await_readers(local, entries, n);
    if (waited)
        return waited;
    while ((m = gather_pending(local, entries, n, &work))) {
        int rc = kvq__step_run(local->queue, &work, local->some, m, local->extents);
        blame(local, m);
        for (uint32_t j = 0; rc == KVQ_OK && j < m; j++)
            rc = take_published(local, &entries[local->some_of[j]], j);
        if (rc)
            return rc;
    }
    return KVQ_OK;
}

// ---- Begin ----

int kvq__local_begin(struct kvq_local *local, struct kvq_entry *entries, uint32_t n)
{
    bool failed = false, pending = false;
    assert(!local->stepping && local->n_members == 0);
    local->blamed = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct kvq_entry *e = &entries[i];
        e->status = kvq__local_judge(local, e);
        e->value = e->position;
        if (e->status)
            continue;
        const struct kvq__local_session *s = kvq__local_find(local, e->session);
        if (!is_known(local, s) || published_at(s) != e->position)
            e->status = PENDING;
        pending |= e->status == PENDING;
    }
    int rc = pending ? publish_pending(local, entries, n) : KVQ_OK;
    if (rc)
        return rc;
    for (uint32_t i = 0; i < n; i++) {
        if (entries[i].status == KVQ_OK)
            entries[i].status = kvq__local_judge(local, &entries[i]); // for those that come twice
        if (entries[i].status == KVQ_OK)
            kvq__local_join(local, &entries[i]);
        assert(entries[i].status != PENDING);
        failed |= entries[i].status != KVQ_OK;
    }
    if (failed)
        kvq__local_explain(local, KVQ_OP_STEP_BEGIN, NULL, entries, n);
    return KVQ_OK;
}

int kvq_local_begin(kvq_local *local, struct kvq_entry *entries, uint32_t n)
{
    int rc = kvq__local_check_call(local, "step begin", entries, n);
    if (rc)
        return rc;
    if (local->stepping)
        return kvq__set_error(KVQ_E_BUSY, "step begin: this kvq_local's step is still open; "
                                          "kvq_local_end or kvq_local_abort ends it");
    rc = kvq__local_check_place(local, false);
    if (rc)
        return rc;
    if (*local->why)
        return kvq__through_begin(local, entries, n);
    rc = kvq__local_begin(local, entries, n);
    if (rc) // nobody is in
        for (uint32_t i = 0; i < n; i++)
            entries[i].status = rc;
    return rc;
}

// ---- End ----

// Entries that have something to commit go to local->some; the others have nothing to lose. `ours`:
// K and V are those that the attends gave.
static uint32_t gather_end(struct kvq_local *local, struct kvq_entry *entries, uint32_t n,
                           bool ours)
{
    uint32_t m = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct kvq_entry *e = &entries[i];
        struct kvq__local_session *s = kvq__local_find(local, e->session);
        e->status = kvq__local_member(local, e);
        if (e->status == KVQ_OK && e->append != s->append)
            e->status = KVQ_E_INVALID;
        if (e->status == KVQ_OK && ours && memchr(s->lacks, 1, sizeof s->lacks))
            e->status = KVQ_E_INCOMPLETE;
        e->value = e->position;
        if (e->status || e->append == 0)
            continue;
        assert(s->in_step && m < KVQ_MAX_BATCH);
        local->some[m] = *e;
        local->extents[m] = 0;
        local->some_of[m++] = i;
    }
    return m;
}

// What cannot be mapped now is looked for again when the session's next step begins.
static void take_end(struct kvq_local *local, struct kvq_entry *entries, uint32_t m)
{
    for (uint32_t j = 0; j < m; j++) {
        struct kvq_entry *e = &entries[local->some_of[j]];
        struct kvq__local_session *s = kvq__local_find(local, e->session);
        assert(s && s->in_step);
        e->status = local->some[j].status;
        e->value = local->some[j].value;
        s->published = e->status || s->sharded ? UINT64_MAX : e->value;
        if (e->status == KVQ_OK && look_at(local, s, local->extents[j]))
            s->lacking = true;
    }
}

// Whether the first failure is the request's, which has been explained.
static bool failed_there(const struct kvq_local *local, const struct kvq_entry *entries, uint32_t n,
                         uint32_t m)
{
    uint32_t first = 0, j = 0;
    while (first < n && entries[first].status == KVQ_OK)
        first++;
    while (j < m && local->some_of[j] != first)
        j++;
    return j < m;
}

static int commit_step(struct kvq_local *local, const struct kvq_step_work *work, uint32_t m)
{
    assert(m > 0);
    if (!local->bucket)
        return kvq__step_run(local->queue, work, local->some, m, local->extents);
    return kvq__timeline_step(local->queue, work, local->some, m, local->extents, local->stream);
}

int kvq__local_end(struct kvq_local *local, const struct kvq_step_work *work,
                   struct kvq_entry *entries, uint32_t n)
{
    assert(local->stepping);
    bool ours = !work || (!work->k && !work->v);
    uint32_t m = gather_end(local, entries, n, ours);
    struct kvq_step_work own = work ? *work : (struct kvq_step_work){0};
    if (ours && m && local->mixed)
        return kvq__set_error(
            KVQ_E_INVALID, "step end: K or V of a layer was given twice, in different tensors; say "
                           "in `work` which are the step's");
    if (ours && m) {
        own.k = local->k;
        own.v = local->v;
        own.n_layers = kvq__local_find(local, local->some[0].session)->n_layers;
    }
    int rc = m ? commit_step(local, &own, m) : KVQ_OK;
    if (rc) {
        if (local->queue->dead)
            kvq__local_over(local);
        return rc;
    }
    take_end(local, entries, m);
    if (m < n && !failed_there(local, entries, n, m))
        kvq__local_explain(local, KVQ_OP_STEP_END, NULL, entries, n);
    kvq__local_keep(local, entries, n);
    return KVQ_OK;
}

int kvq_local_end(kvq_local *local, const struct kvq_step_work *work, struct kvq_entry *entries,
                  uint32_t n)
{
    int rc = kvq__local_check_call(local, "step end", entries, n);
    if (rc)
        return rc;
    if (!local->stepping)
        return kvq__set_error(KVQ_E_NO_STEP,
                              "step end: no step was begun; kvq_local_begin begins one");
    rc = kvq__local_check_place(local, false);
    if (rc)
        return rc;
    return *local->why ? kvq__through_end(local, work, entries, n)
                       : kvq__local_end(local, work, entries, n);
}

void kvq_local_abort(kvq_local *local)
{
    if (!local || !local->stepping)
        return;
    if (local->step && kvq__local_check(local) == KVQ_OK)
        kvq__through_abort(local);
    kvq__local_over(local);
}
