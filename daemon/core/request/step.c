// SPDX-License-Identifier: Apache-2.0
//
// Steps, from the beginning, which reserves all that a step will need, to commit or abort.
#include <assert.h>

#include "daemon/core/request/admission.h"
#include "daemon/core/request/gpu_commit.h"
#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/token_ids.h"
#include "daemon/core/session/group.h"
#include "daemon/core/state.h"

struct kvq__step *kvq__step_find(struct kvq__client *client, uint64_t number)
{
    for (uint32_t i = 0; number && i < KVQ_MAX_STEPS; i++)
        if (client->steps[i].number == number)
            return &client->steps[i];
    return NULL;
}

// ---- Joining and leaving ----

static void step_open(struct kvq__step *step, struct kvq__queue *q, uint64_t number)
{
    assert(step->number == 0 && number > 0 && !q->ending);
    step->number = number;
    step->queue = q;
    LIST_INIT(&step->sessions);
    q->client->n_steps++;
    q->core->n_steps++;
}

void kvq__step_open_own(struct kvq__queue *q)
{
    if (q->own_step.number == 0)
        step_open(&q->own_step, q, UINT64_MAX);
}

static struct kvq__step *step_new(struct kvq__queue *q, uint64_t number)
{
    for (uint32_t i = 0; i < KVQ_MAX_STEPS; i++) {
        struct kvq__step *step = &q->client->steps[i];
        if (step->number)
            continue;
        step_open(step, q, number);
        return step;
    }
    return NULL;
}

void kvq__step_close_if_empty(struct kvq__step *step)
{
    if (step->number == 0 || !LIST_EMPTY(&step->sessions))
        return;
    struct kvq__client *client = step->queue->client;
    assert(client->n_steps > 0 && client->core->n_steps > 0);
    step->number = 0;
    client->n_steps--;
    client->core->n_steps--;
}

static void reset_layers(struct kvq__session *s)
{
    s->in_step.layers = 0;
    s->in_step.tokens = 0;
    s->in_step.spoiled = false;
    for (uint32_t i = 0; i < s->n_layers; i++)
        s->layers[i].append = KVQ__NOT_APPENDED;
}

void kvq__step_part(struct kvq__session *s)
{
    struct kvq__step *step = s->step;
    if (!step)
        return;
    LIST_REMOVE(s, in_step.link);
    s->step = NULL;
    kvq__step_close_if_empty(step);
}

void kvq__step_over(struct kvq__session *s)
{
    assert(!s->in_step.committing && (!s->in_step.prepared || s->core->n_prepared > 0));
    kvq__step_part(s);
    s->core->n_prepared -= s->in_step.prepared;
    s->in_step.prepared = false;
    s->in_step.serial++;
    reset_layers(s);
    kvq__ids_cut(s, s->tokens);
    kvq__pages_trim(s, s->tokens);
}

void kvq__step_undo(struct kvq__session *s)
{
    assert(kvq__in_step(s));
    if (s->in_step.committing)
        kvq__gpu_commit_cancel(s);
    else
        kvq__step_over(s);
}

void kvq__step_leave(struct kvq__session *s)
{
    if (kvq__in_step(s))
        kvq__step_undo(s);
    kvq__group_undo(s);
}

void kvq__step_join(struct kvq__step *step, struct kvq__session *s, uint32_t tokens)
{
    assert(step->number && !kvq__in_step(s) && !s->exclusive);
    reset_layers(s);
    s->step = step;
    s->in_step.serial++;
    s->in_step.undone_by = 0;
    s->in_step.tokens = tokens;
    if (s->in_step.counts)
        *s->in_step.counts->host = (struct kvq_gpu_store_counts){0};
    kvq__session_used(s);
    LIST_INSERT_HEAD(&step->sessions, s, in_step.link);
}

bool kvq__step_nonfinite(const struct kvq__session *s)
{
    return s->in_step.counts && s->in_step.counts->host->nonfinite > 0;
}

static bool is_complete(const struct kvq__session *s)
{
    assert(s->in_step.layers <= s->n_owned);
    return s->in_step.tokens == 0 || (s->in_step.layers == s->n_owned && !s->in_step.spoiled);
}

void kvq__step_publish(struct kvq__session *s)
{
    assert(is_complete(s));
    kvq__ids_commit(s, s->tokens, s->in_step.tokens);
    kvq__session_count(s, s->tokens + s->in_step.tokens);
    s->saving.commits += s->in_step.tokens > 0;
    s->saturated += s->in_step.counts ? s->in_step.counts->host->saturated : 0;
    s->core->counts.appended_tokens += s->in_step.tokens;
    if (s->tokens > s->max_rollback && s->tokens - s->max_rollback > s->floor)
        s->floor = s->tokens - s->max_rollback;
    assert(kvq__pages_of(s->tokens) <= s->n_pages);
    kvq__session_used(s);
    kvq__step_over(s);
    kvq__pages_release(s);
    kvq__pack_queue(s);
}

static int check_commit(const struct kvq__session *s)
{
    return kvq__step_nonfinite(s) ? KVQ_E_NONFINITE : is_complete(s) ? 0 : KVQ_E_INCOMPLETE;
}

// Takes a shard's step to its group. If the group cannot commit, `result` names the shard that
// differs.
static int prepare_commit(struct kvq__session *s, struct kvq_result *result)
{
    const struct kvq__session *other;
    assert(s->group && !s->in_step.prepared);
    kvq__step_part(s);
    s->in_step.prepared = true;
    s->core->n_prepared++;
    int rc = kvq__group_commit(s, &other);
    if (other) {
        result->shard = other->shard + 1;
        result->value = other->tokens + other->in_step.tokens;
    }
    return rc;
}

int kvq__step_commit(struct kvq__session *s, struct kvq_result *result)
{
    int rc = check_commit(s);
    *result = (struct kvq_result){.value = s->tokens + (rc ? 0 : s->in_step.tokens)};
    if (rc == 0 && s->group)
        rc = prepare_commit(s, result);
    else if (rc == 0)
        kvq__step_publish(s);
    if (rc < 0)
        kvq__step_leave(s);
    return result->status = rc;
}

void kvq__step_recheck(const struct kvq__session *s, struct kvq_result *result)
{
    if (result->status < 0 || s->in_step.prepared || s->tokens == result->value)
        return;
    *result = (struct kvq_result){
        .status = KVQ_E_CANCELLED, .shard = s->in_step.undone_by, .value = s->tokens};
}

// ---- Begin ----

static int check_begin(struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    int rc = kvq__entry_open_at(q, i, true);
    if (rc < 0)
        return rc;
    struct kvq__session *s = q->work[i].session;
    uint32_t missing;
    if (s->step)
        return kvq__entry_fail(q, i, KVQ_E_BUSY, s->tokens);
    if (kvq__group_missing(s, &missing))
        return kvq__entry_fail_by(q, i, KVQ_E_NO_SESSION, s->tokens, missing);
    if (e->append > KVQ_MAX_STEP_TOKENS || s->tokens + e->append > KVQ_MAX_SESSION_TOKENS)
        return kvq__entry_fail(q, i, KVQ_E_LIMIT, s->tokens);
    rc = kvq__ids_check(q, i, e->append);
    return rc < 0 ? kvq__entry_fail(q, i, rc, s->tokens) : 0;
}

// Whether something under way still uses what the step would write.
static bool step_must_wait(const struct kvq__session *s)
{
    return s->exclusive || s->entries.tail > 0;
}

static bool begin_step_entry(struct kvq__queue *q, struct kvq__step *step, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    if (check_begin(q, i) < 0) // again: two entries may name one session
        return false;
    int rc = kvq__ids_bring(q, i, q->entries[i].append);
    // The request took the pages before, unless an earlier entry of the session has failed.
    if (rc == 0 && q->entries[i].append > 0)
        rc = kvq__pages_reserve(s, s->tokens + q->entries[i].append, NULL);
    if (rc < 0) {
        kvq__entry_fail(q, i, rc, s->tokens);
        return false;
    }
    kvq__step_join(step, s, q->entries[i].append);
    return true;
}

enum kvq__progress kvq__op_step_begin(struct kvq__queue *q)
{
    uint64_t number = q->header.step;
    if (number == 0)
        return kvq__request_end(q, KVQ_E_INVALID);
    if (kvq__step_find(q->client, number))
        return kvq__request_end(q, KVQ_E_BUSY);
    int rc = kvq__ids_open(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_begin(q, i) == 0 && step_must_wait(q->work[i].session))
            return KVQ__WAIT;
    struct kvq__step *step = step_new(q, number);
    if (!step)
        return kvq__request_end(q, KVQ_E_LIMIT);
    if (!kvq__admission_take(q)) {
        kvq__step_close_if_empty(step);
        return KVQ__WAIT;
    }
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i) && !begin_step_entry(q, step, i))
            kvq__admission_untake(q, i);
    kvq__step_close_if_empty(step); // if no entry got in
    q->completion.value = number;
    return kvq__request_end(q, 0);
}

// ---- End and abort ----

static int check_end(struct kvq__queue *q, uint32_t i)
{
    return kvq__entry_open_at(q, i, true);
}

static void end_entry(struct kvq__queue *q, uint32_t i)
{
    if (check_end(q, i) < 0) // again: an earlier entry may have ended or undone the step
        return;
    int rc = kvq__ids_bring_late(q, i);
    if (rc < 0)
        kvq__entry_fail(q, i, rc, q->work[i].session->tokens);
    else
        kvq__step_commit(q->work[i].session, &q->results[i]);
}

// A request without entries commits all of the step's sessions or none.
static int end_all(struct kvq__step *step)
{
    struct kvq__session *s;
    struct kvq_result result;
    uint64_t number = step->number;
    int rc = 0;
    LIST_FOREACH (s, &step->sessions, in_step.link) {
        rc = check_commit(s);
        if (rc == 0 && !kvq__group_fits(s))
            rc = KVQ_E_POSITION;
        if (rc == KVQ_E_NONFINITE)
            kvq__step_leave(s);
        if (rc)
            return rc;
    }
    while (step->number == number && rc == 0)
        rc = kvq__step_commit(LIST_FIRST(&step->sessions), &result);
    return rc;
}

// Whether a GPU has yet to end some of the step's work.
static bool is_under_way(const struct kvq__step *step)
{
    const struct kvq__session *s;
    LIST_FOREACH (s, &step->sessions, in_step.link)
        if (kvq__step_under_way(s))
            return true;
    return false;
}

enum kvq__progress kvq__op_step_end(struct kvq__queue *q)
{
    uint64_t before = q->core->counts.appended_tokens;
    int rc = 0;
    if (kvq__request_step(q) < 0 || !q->step)
        return kvq__request_end(q, KVQ_E_NO_STEP);
    if (is_under_way(q->step))
        return KVQ__WAIT;
    if (q->header.count == 0 && q->header.flags) // whose ids?
        return kvq__request_end(q, KVQ_E_INVALID);
    rc = kvq__ids_open(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    if (q->header.count == 0)
        rc = end_all(q->step);
    for (uint32_t i = 0; i < q->header.count; i++)
        end_entry(q, i);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i))
            kvq__step_recheck(q->work[i].session, &q->results[i]);
    kvq__pack_on_gpus(q->core);
    q->core->counts.steps += q->core->counts.appended_tokens > before;
    return kvq__request_end(q, rc);
}

enum kvq__progress kvq__op_step_abort(struct kvq__queue *q)
{
    if (kvq__request_step(q) < 0 || !q->step)
        return kvq__request_end(q, KVQ_E_NO_STEP);
    uint64_t number = q->step->number;
    for (uint32_t i = 0; i < q->header.count; i++)
        check_end(q, i);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i)) // shards of other entries may leave with it
            kvq__step_leave(q->work[i].session);
    if (q->header.count == 0)
        while (q->step->number == number)
            kvq__step_leave(LIST_FIRST(&q->step->sessions));
    return kvq__request_end(q, 0);
}
