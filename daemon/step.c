// SPDX-License-Identifier: Apache-2.0
//
// Steps: from their beginning, which reserves all that they will need, to commit or abort.
#include <assert.h>

#include "daemon/state.h"

struct kvq__step *kvq__step_find(struct kvq__client *client, uint64_t number)
{
    for (uint32_t i = 0; number && i < KVQ_MAX_STEPS; i++)
        if (client->steps[i].number == number)
            return &client->steps[i];
    return NULL;
}

// ---- Joining and leaving ----

static struct kvq__step *step_new(struct kvq__client *client, uint64_t number)
{
    for (uint32_t i = 0; i < KVQ_MAX_STEPS; i++) {
        struct kvq__step *step = &client->steps[i];
        if (step->number)
            continue;
        step->number = number;
        step->client = client;
        LIST_INIT(&step->sessions);
        client->n_steps++;
        client->core->n_steps++;
        return step;
    }
    return NULL;
}

static void step_close_if_empty(struct kvq__step *step)
{
    if (!LIST_EMPTY(&step->sessions))
        return;
    step->number = 0;
    step->client->n_steps--;
    step->client->core->n_steps--;
}

static void reset_layers(struct kvq__session *s)
{
    s->step_layers = 0;
    s->step_tokens = 0;
    for (uint32_t i = 0; i < s->n_layers; i++)
        s->layers[i].append = KVQ__NOT_APPENDED;
}

void kvq__step_leave(struct kvq__session *s)
{
    struct kvq__step *step = s->step;
    if (!step)
        return;
    LIST_REMOVE(s, step_link);
    s->step = NULL;
    s->step_serial++;
    reset_layers(s);
    kvq__pages_trim(s, s->tokens);
    step_close_if_empty(step);
}

static void step_join(struct kvq__step *step, struct kvq__session *s, uint32_t tokens)
{
    reset_layers(s);
    s->step = step;
    s->step_serial++;
    s->step_tokens = tokens;
    if (s->counts)
        *s->counts->host = (struct kvq_gpu_store_counts){0};
    s->idle_since = s->core->now;
    LIST_INSERT_HEAD(&step->sessions, s, step_link);
}

bool kvq__step_nonfinite(const struct kvq__session *s)
{
    return s->counts && s->counts->host->nonfinite > 0;
}

static bool is_complete(const struct kvq__session *s)
{
    return s->step_tokens == 0 || s->step_layers == s->n_owned;
}

static void commit(struct kvq__session *s)
{
    assert(is_complete(s));
    s->tokens += s->step_tokens;
    s->saturated += s->counts ? s->counts->host->saturated : 0;
    s->core->appended_tokens += s->step_tokens;
    if (s->tokens > s->max_rollback && s->tokens - s->max_rollback > s->floor)
        s->floor = s->tokens - s->max_rollback;
    s->idle_since = s->core->now;
    kvq__step_leave(s);
    kvq__pages_release(s);
    kvq__pack_queue(s);
}

// ---- Begin ----

static int check_begin(struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    int rc = kvq__entry_open_at(q, i, true);
    if (rc < 0)
        return rc;
    struct kvq__session *s = q->work[i].session;
    if (s->step)
        return kvq__entry_fail(q, i, KVQ_E_BUSY, s->tokens);
    if (e->append > KVQ_MAX_STEP_TOKENS || s->tokens + e->append > KVQ_MAX_SESSION_TOKENS)
        return kvq__entry_fail(q, i, KVQ_E_LIMIT, s->tokens);
    return 0;
}

// Something under way still uses what the step would write.
static bool must_wait(const struct kvq__session *s)
{
    return s->exclusive || s->tail_use > 0;
}

static bool begin_entry(struct kvq__queue *q, struct kvq__step *step, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    if (check_begin(q, i) < 0) // again, for a session may stand in two entries
        return false;
    int rc = kvq__pages_reserve(s, s->tokens + q->entries[i].append);
    if (rc < 0) {
        kvq__entry_fail(q, i, rc, s->tokens);
        return false;
    }
    step_join(step, s, q->entries[i].append);
    return true;
}

enum kvq__progress kvq__op_step_begin(struct kvq__queue *q)
{
    uint64_t number = q->header.step;
    if (number == 0)
        return kvq__request_end(q, KVQ_E_INVALID);
    if (kvq__step_find(q->client, number))
        return kvq__request_end(q, KVQ_E_BUSY);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_begin(q, i) == 0 && must_wait(q->work[i].session))
            return KVQ__WAIT;
    struct kvq__step *step = step_new(q->client, number);
    if (!step)
        return kvq__request_end(q, KVQ_E_LIMIT);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i))
            begin_entry(q, step, i);
    step_close_if_empty(step); // if no entry got in
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
    struct kvq__session *s = q->work[i].session;
    if (check_end(q, i) < 0)
        return;
    if (kvq__step_nonfinite(s)) {
        kvq__step_leave(s);
        q->results[i].status = KVQ_E_NONFINITE;
    } else if (is_complete(s)) {
        commit(s);
    } else {
        kvq__step_leave(s);
        q->results[i].status = KVQ_E_INCOMPLETE;
    }
    q->results[i].value = s->tokens;
}

// Without entries it is all of the step's sessions or none.
static int end_all(struct kvq__step *step)
{
    struct kvq__session *s, *next;
    for (s = LIST_FIRST(&step->sessions); s; s = next) {
        next = LIST_NEXT(s, step_link);
        if (kvq__step_nonfinite(s)) {
            kvq__step_leave(s);
            return KVQ_E_NONFINITE;
        }
        if (!is_complete(s))
            return KVQ_E_INCOMPLETE;
    }
    for (s = LIST_FIRST(&step->sessions); s; s = next) {
        next = LIST_NEXT(s, step_link);
        commit(s);
    }
    return 0;
}

// Whether a GPU has yet to end some of the step.
static bool is_under_way(const struct kvq__step *step)
{
    const struct kvq__session *s;
    LIST_FOREACH (s, &step->sessions, step_link)
        if (kvq__step_under_way(s))
            return true;
    return false;
}

enum kvq__progress kvq__op_step_end(struct kvq__queue *q)
{
    uint64_t before = q->core->appended_tokens;
    int rc = 0;
    if (kvq__request_step(q) < 0 || !q->step)
        return kvq__request_end(q, KVQ_E_NO_STEP);
    if (is_under_way(q->step))
        return KVQ__WAIT;
    if (q->header.count == 0)
        rc = end_all(q->step);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_end(q, i) == 0)
            end_entry(q, i);
    q->core->steps += q->core->appended_tokens > before;
    return kvq__request_end(q, rc);
}

enum kvq__progress kvq__op_step_abort(struct kvq__queue *q)
{
    if (kvq__request_step(q) < 0 || !q->step)
        return kvq__request_end(q, KVQ_E_NO_STEP);
    uint64_t number = q->step->number;
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_end(q, i) == 0)
            kvq__step_leave(q->work[i].session);
    while (q->header.count == 0 && q->step->number == number)
        kvq__step_leave(LIST_FIRST(&q->step->sessions));
    return kvq__request_end(q, 0);
}
