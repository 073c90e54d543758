// SPDX-License-Identifier: Apache-2.0
//
// The simulation's operations: what must come of them, and whether it did.
#include <math.h>
#include <string.h>

#include "daemon/core/session/table.h"
#include "tests/core/sim.h"
#include <stdio.h>

// ---- What is asked of both ----

bool actor_has_step(const struct sim *sim, const struct actor *a)
{
    for (uint32_t i = 0; i < SIM_TRACKS; i++)
        if (sim->tracks[i].stepper == a)
            return true;
    return false;
}

bool track_is_complete(const struct track *t)
{
    if (t->spoiled && t->step_tokens)
        return false;
    for (uint32_t i = 0; i < MODEL_LAYERS; i++)
        if (t->step_tokens && t->model.layers[i].source == i && t->appended[i] != 2)
            return false;
    return true;
}

bool actor_all_complete(const struct sim *sim, const struct actor *a)
{
    for (uint32_t i = 0; i < SIM_TRACKS; i++)
        if (sim->tracks[i].stepper == a && !track_is_complete(&sim->tracks[i]))
            return false;
    return true;
}

bool op_appends(uint8_t op)
{
    return op == KVQ_OP_APPEND || op == KVQ_OP_APPEND_ATTEND;
}

bool op_attends(uint8_t op)
{
    return op == KVQ_OP_ATTEND || op == KVQ_OP_APPEND_ATTEND;
}

bool op_on_stream(const struct actor *a)
{
    return a->header.flags & KVQ_REQ_ON_STREAM;
}

static bool ends_alike(const struct track *t, const struct track *other)
{
    return t->model.tokens == other->model.tokens && t->step_tokens == other->step_tokens;
}

// Whether ending all of the step would end the step of a group whose shards differ.
static bool any_torn(struct sim *sim, const struct actor *a)
{
    for (uint32_t i = 0; i < SIM_TRACKS; i++) {
        const struct track *t = &sim->tracks[i];
        const struct track *other = t->stepper == a ? track_sibling(sim, t) : NULL;
        if (other && (other->prepared || other->stepper == a) && !ends_alike(t, other))
            return true;
    }
    return false;
}

// ---- What must come of it ----

static const struct sim *sim_of(const struct actor *a)
{
    static_assert(offsetof(struct sim, kit) == 0, "the kit comes first");
    return (const struct sim *)(const void *)a->member.kit;
}

static int predict_open(struct actor *a, uint32_t i, bool write)
{
    struct part *p = &a->parts[i];
    struct hold *h = p->hold;
    p->track = NULL;
    p->value = 0;
    if (!h->used || h->handle != a->entries[i].handle)
        return KVQ_E_STALE;
    if (h->taken)
        return KVQ_E_TAKEN;
    if (write && h->read_only)
        return KVQ_E_READ_ONLY;
    if (op_on_stream(a) && !h->track->streams)
        return KVQ_E_BUFFER;
    p->track = h->track;
    p->past = p->value = h->track->model.tokens;
    p->serial = h->track->step_serial;
    p->on_gpu = h->track->on_gpu;
    if (park_predict(sim_of(a), h->track))
        return park_predict(sim_of(a), h->track);
    if (a->member.queue->work[i].no_room) // where it belongs, and it is elsewhere
        return a->member.queue->work[i].no_room;
    // Others have waited: this actor's one queue would have to end the other shard's step.
    return h->track->prepared && !h->read_only ? KVQ_E_BUSY : 0;
}

static int predict_open_at(struct actor *a, uint32_t i, bool write)
{
    int rc = predict_open(a, i, write);
    bool in_step = a->header.step && a->header.op != KVQ_OP_STEP_BEGIN;
    if (rc < 0)
        return rc;
    if (a->parts[i].track->untold && !a->parts[i].hold->read_only) {
        a->parts[i].heard = true;
        a->parts[i].track->untold = false;
        return KVQ_E_NONFINITE;
    }
    bool told = a->parts[i].track->undone_by && !a->parts[i].hold->read_only;
    if (in_step && a->parts[i].track->stepper != a)
        return told ? KVQ_E_CANCELLED : KVQ_E_NO_STEP;
    if (a->entries[i].position != a->parts[i].past)
        return told ? KVQ_E_CANCELLED : KVQ_E_POSITION;
    return 0;
}

static int predict_append(struct actor *a, uint32_t i)
{
    const struct kvq_entry_wire *e = &a->entries[i];
    const struct track *t = a->parts[i].track;
    uint32_t layer = a->header.layer;
    if (e->append == 0)
        return 0;
    if (t->stepper != a)
        return KVQ_E_NO_STEP;
    if (a->parts[i].hold->read_only)
        return KVQ_E_READ_ONLY;
    if (e->append != t->step_tokens || t->model.layers[layer].source != layer || t->appended[layer])
        return KVQ_E_INVALID;
    return 0;
}

// A step that was asked to append what it cannot will not commit.
static int note_refused(struct actor *a, uint32_t i, int rc)
{
    struct track *t = a->parts[i].track;
    uint32_t layer = a->header.layer;
    if (rc < 0 && a->entries[i].append && a->header.step && t->stepper == a &&
        !a->parts[i].hold->read_only && t->model.layers[layer].source != layer)
        t->spoiled = true;
    return rc;
}

static int predict_attend(struct actor *a, uint32_t i)
{
    const struct kvq_entry_wire *e = &a->entries[i];
    const struct track *t = a->parts[i].track;
    uint32_t own = t->model.layers[a->header.layer].source;
    if (e->append == 0)
        return 0;
    if (!a->header.step)
        return KVQ_E_NO_STEP;
    if (e->append != t->step_tokens || e->queries > e->append)
        return KVQ_E_INVALID;
    if (a->header.op == KVQ_OP_ATTEND && !(a->header.flags & KVQ_REQ_PAST_ONLY) &&
        t->appended[own] != 2)
        return KVQ_E_INCOMPLETE;
    return 0;
}

// Whether the page table of another handle than the entry's shows more than so many tokens.
static bool is_shown(const struct sim *sim, const struct actor *a, uint32_t i,
                     const struct track *t, uint64_t tokens)
{
    struct kvq__handle *h;
    int rc = kvq__handle_get(a->member.client, a->entries[i].handle, &h);
    return kvq__tables_need(find_session(sim, t->id), rc ? NULL : h->table, tokens);
}

static int predict_back(const struct sim *sim, struct actor *a, uint32_t i, uint32_t back)
{
    int rc = predict_open_at(a, i, true);
    struct part *p = &a->parts[i];
    if (rc < 0)
        return rc;
    if (p->track->stepper)
        return KVQ_E_BUSY;
    if (back <= p->past - p->track->model.floor)
        return is_shown(sim, a, i, p->track, p->past - back) ? KVQ_E_BUSY : 0;
    p->value = p->track->model.floor;
    return KVQ_E_ROLLBACK;
}

static int predict_fork(struct sim *sim, struct actor *a, uint32_t i)
{
    struct part *p = &a->parts[i];
    uint64_t at = a->entries[i].position;
    int rc = predict_open(a, i, false);
    if (rc < 0)
        return rc;
    if (p->track->stepper || p->track->prepared)
        return KVQ_E_BUSY;
    if (at > p->past)
        return KVQ_E_POSITION;
    p->value = model_fork_at(&p->track->model, at);
    if (p->value != at)
        return KVQ_E_ROLLBACK;
    p->forked = track_new(sim, false, 0, 0);
    MUST(p->forked);
    p->forked->on_gpu = p->track->on_gpu;
    p->forked->shard = p->track->shard; // which it keeps, though it is in no group
    p->forked->streams = p->track->streams;
    model_fork(&p->track->model, &p->forked->model, at);
    p->forked->story = p->track->story;
    p->forked->known = p->track->known;
    ids_shorten(p->forked);
    memcpy(p->forked->ids, p->track->ids, sizeof p->track->ids);
    return 0;
}

static int predict_read(struct actor *a, uint32_t i)
{
    struct part *p = &a->parts[i];
    const struct kvq_entry_wire *e = &a->entries[i];
    int rc = predict_open(a, i, false);
    if (rc < 0)
        return rc;
    if (e->position > p->past)
        return KVQ_E_POSITION;
    uint64_t kept = model_kept(&p->track->model, a->header.layer), end = e->position + e->append;
    end = end < p->past ? end : p->past;
    p->from = kept > e->position ? kept : e->position;
    p->value = end > p->from ? end - p->from : 0;
    return 0;
}

static int predict_begin(struct sim *sim, const struct track *t)
{
    if (t->stepper)
        return KVQ_E_BUSY;
    return t->shards > 1 && !track_sibling(sim, t) ? KVQ_E_NO_SESSION : 0;
}

static int predict_end(struct sim *sim, struct part *p)
{
    const struct track *t = p->track, *other = track_sibling(sim, t);
    if (!track_is_complete(t))
        return KVQ_E_INCOMPLETE;
    p->torn = other && other->prepared && !ends_alike(t, other);
    if (!p->torn)
        return 0;
    p->value = other->model.tokens + other->step_tokens;
    return KVQ_E_POSITION;
}

static int predict(struct sim *sim, struct actor *a, uint32_t i)
{
    int rc;
    switch (a->header.op) {
    case KVQ_OP_STEP_BEGIN:
        rc = predict_open_at(a, i, true);
        return rc ? rc : predict_begin(sim, a->parts[i].track);
    case KVQ_OP_APPEND:
        rc = predict_open_at(a, i, true);
        return rc ? rc : note_refused(a, i, predict_append(a, i));
    case KVQ_OP_ATTEND:
        rc = predict_open_at(a, i, false);
        return rc ? rc : predict_attend(a, i);
    case KVQ_OP_APPEND_ATTEND:
        if ((rc = predict_open_at(a, i, false)))
            return rc;
        rc = predict_attend(a, i);
        return note_refused(a, i, rc ? rc : predict_append(a, i));
    case KVQ_OP_STEP_END:
        rc = predict_open_at(a, i, true);
        return rc ? rc : predict_end(sim, &a->parts[i]);
    case KVQ_OP_STEP_ABORT:
        return predict_open_at(a, i, true);
    case KVQ_OP_TRUNCATE:
        return predict_back(sim, a, i, a->entries[i].list_token);
    case KVQ_OP_ACCEPT:
        return predict_back(sim, a, i, a->entries[i].append);
    case KVQ_OP_FORK:
        return predict_fork(sim, a, i);
    case KVQ_OP_READ:
        return predict_read(a, i);
    case KVQ_OP_STEP:
        rc = predict_open_at(a, i, a->entries[i].append > 0);
        return rc ? rc : whole_predict(a, i);
    default:
        return predict_open_at(a, i, false);
    }
}

void op_acquired(struct sim *sim, struct actor *a)
{
    int status = kvq__queue_completion(a->member.queue)->status; // < 0: it has not come so far
    track_places(sim);
    for (uint32_t i = 0; i < a->header.count; i++) {
        struct part *p = &a->parts[i];
        p->forked = NULL;
        p->torn = false;
        p->heard = p->whole = p->committed = false;
        p->expect = predict(sim, a, i);
        // What waits for the other shard is refused only if this actor has to end it.
        const struct track *other = p->track ? track_sibling(sim, p->track) : NULL;
        if (p->expect == KVQ_E_BUSY && p->track->prepared && !p->hold->read_only)
            MUST((other && other->writer == a) || a->gone || status < 0);
        if (p->expect == 0 && a->header.op == KVQ_OP_STEP && status == 0)
            whole_began(a, i);
        if (p->expect == 0 && op_appends(a->header.op) && a->entries[i].append)
            p->track->appended[a->header.layer] = 1;
    }
}

// ---- Whether it did ----

// A request that was refused as a whole has told nobody anything.
static void unhear(struct actor *a)
{
    for (uint32_t i = 0; i < a->header.count; i++)
        if (a->parts[i].heard)
            a->parts[i].track->untold = true;
}

void op_went_on(struct sim *sim, struct actor *a)
{
    const struct kvq_result *results = kvq__queue_results(a->member.queue);
    bool stores = op_appends(a->header.op) || a->header.op == KVQ_OP_STEP;
    whole_follow(sim, a);
    for (uint32_t i = 0; stores && !a->gone && i < a->header.count; i++) {
        struct part *p = &a->parts[i];
        if (p->expect < 0 || p->refused || p->heard || results[i].status != KVQ_E_NONFINITE)
            continue;
        // A STEP on a GPU whose session was closed meanwhile is out of the step already.
        bool left = p->track->step_serial != p->serial;
        MUST(p->poisoned && (!left || a->header.op == KVQ_OP_STEP));
        if (!left)
            track_leave(sim, p->track);
        p->refused = true;
        p->whole = false;
    }
}

static void commit(struct sim *sim, struct track *t)
{
    t->known += t->step_told ? t->step_tokens : 0;
    model_commit(&t->model, t->step_tokens);
    sim->committed += t->step_tokens;
    track_leave_step(t);
}

// The end of a complete step: with that of the other shard, if there are two.
static void end_step(struct sim *sim, struct track *t)
{
    struct track *other = track_sibling(sim, t);
    if (t->shards == 1) {
        commit(sim, t);
        return;
    }
    MUST(other);
    t->stepper = NULL;
    t->prepared = true;
    if (!other->prepared)
        return;
    MUST(ends_alike(t, other));
    commit(sim, t);
    commit(sim, other);
    sim->pairs++;
}

static void apply_append(struct actor *a, uint32_t i)
{
    const struct kvq_entry_wire *e = &a->entries[i];
    struct part *p = &a->parts[i];
    if (e->append == 0)
        return;
    MUST(!p->poisoned);
    model_write(&p->track->model, a->header.layer, p->past, e->append,
                actor_k(a) + (size_t)e->row * SIM_ROW, actor_v(a) + (size_t)e->row * SIM_ROW,
                SIM_ROW);
    p->track->appended[a->header.layer] = 2;
}

static void apply_fork(struct sim *sim, struct actor *a, uint32_t i, uint64_t handle)
{
    struct part *p = &a->parts[i];
    struct kvq__session_info info;
    char text[KVQ_TEXT_BYTES];
    struct hold *h = a->holds;
    while (h < a->holds + SIM_HANDLES && h->used)
        h++;
    if (h == a->holds + SIM_HANDLES) { // nowhere to keep it
        MUST(kvq__session_close(a->member.client, handle, text) == 0);
        return;
    }
    MUST(kvq__session_info(a->member.client, handle, &info, text) == 0);
    *h = (struct hold){.used = true, .track = p->forked, .handle = handle};
    p->forked->alive = true;
    p->forked->id = info.id;
    p->forked->writer = a;
    sim->forks++;
}

static void apply_begin(struct sim *sim, struct actor *a, uint32_t i)
{
    const struct kvq_entry_wire *e = &a->entries[i];
    struct track *t = a->parts[i].track;
    t->stepper = a;
    t->step_serial++;
    t->step_tokens = e->append;
    t->joined = ++sim->joins;
    t->undone_by = 0;
    t->step_told = (a->header.flags & KVQ_REQ_TOKEN_IDS) && t->known == t->model.tokens;
    if (t->step_told)
        memcpy(t->ids + t->known, actor_ids(a) + e->q_row, e->append * sizeof(int32_t));
}

static void apply(struct sim *sim, struct actor *a, uint32_t i, const struct kvq_result *r)
{
    struct track *t = a->parts[i].track;
    // Stored, and then taken out of the step while it attended: nothing of it is left to compare.
    if (op_appends(a->header.op) && t->step_serial != a->parts[i].serial)
        return;
    switch (a->header.op) {
    case KVQ_OP_STEP_BEGIN:
        apply_begin(sim, a, i);
        break;
    case KVQ_OP_STEP_END:
        MUST(r->value == a->parts[i].past + t->step_tokens);
        end_step(sim, t);
        return;
    case KVQ_OP_STEP_ABORT:
        track_leave(sim, t);
        break;
    case KVQ_OP_TRUNCATE:
        t->model.tokens -= a->entries[i].list_token;
        ids_shorten(t);
        break;
    case KVQ_OP_ACCEPT:
        model_accept(&t->model, a->entries[i].append, a->lists[i], a->entries[i].list_token);
        ids_shorten(t);
        break;
    case KVQ_OP_FORK:
        apply_fork(sim, a, i, r->value);
        return;
    case KVQ_OP_STEP:
        whole_done(sim, a, i, r);
        return;
    case KVQ_OP_READ:
        MUST(r->value == a->parts[i].value);
        sim_check_read(sim, a, i);
        return;
    default:
        if (op_appends(a->header.op))
            apply_append(a, i);
        if (op_attends(a->header.op))
            sim_check_attend(sim, a, i);
    }
    bool changes = a->header.op == KVQ_OP_TRUNCATE || a->header.op == KVQ_OP_ACCEPT;
    MUST(r->value == (changes ? t->model.tokens : a->parts[i].past));
}

static void forget_append(const struct actor *a, const struct part *p)
{
    if (op_appends(a->header.op) && p->track->step_serial == p->serial &&
        p->track->appended[a->header.layer] == 1)
        p->track->appended[a->header.layer] = 0;
}

// An entry that was predicted to go through, but did not.
static void check_failed(struct sim *sim, struct actor *a, uint32_t i, int status)
{
    struct part *p = &a->parts[i];
    uint8_t op = a->header.op;
    bool new_memory = op == KVQ_OP_STEP_BEGIN || op == KVQ_OP_FORK || op == KVQ_OP_STEP;
    if (status == KVQ_E_NONFINITE) {
        MUST(p->refused);
    } else if (status == KVQ_E_CANCELLED) {
        MUST(!p->track->alive || p->track->step_serial != p->serial);
    } else {
        MUST(new_memory && (status == KVQ_E_NO_MEMORY || status == KVQ_E_QUOTA));
        MUST(status != KVQ_E_QUOTA || quota_was_met(sim));
        sim->failed_memory++;
    }
    forget_append(a, p);
}

// It was refused room where it was then; from where it is by now its buffers cannot be reached.
static bool was_elsewhere(const struct actor *a, const struct part *p, int status)
{
    bool takes = a->header.op == KVQ_OP_STEP_BEGIN || a->header.op == KVQ_OP_STEP;
    return takes && p->expect == KVQ_E_BUFFER &&
           (status == KVQ_E_NO_MEMORY || status == KVQ_E_QUOTA);
}

static void check_entry(struct sim *sim, struct actor *a, uint32_t i, const struct kvq_result *r)
{
    struct part *p = &a->parts[i];
    bool ended = a->header.op == KVQ_OP_STEP_END && (p->expect == KVQ_E_INCOMPLETE || p->torn);
    if (p->expect == 0 && r->status == 0) {
        apply(sim, a, i, r);
    } else if (p->expect == 0) {
        check_failed(sim, a, i, r->status);
        if (a->header.op == KVQ_OP_STEP)
            whole_done(sim, a, i, r);
    } else {
        MUST((r->status == p->expect && r->value == p->value) || was_elsewhere(a, p, r->status));
        sim->refused++;
        if (ended)
            track_leave(sim, p->track);
    }
    if (p->forked && !p->forked->alive) {
        model_free(&p->forked->model);
        p->forked->used = false;
    }
}

// Without entries: every session of the step.
static void check_all(struct sim *sim, struct actor *a, int status)
{
    bool ends = a->header.op == KVQ_OP_STEP_END, torn = ends && any_torn(sim, a);
    struct track *t;
    if (ends && (torn || !actor_all_complete(sim, a))) {
        MUST((torn && status == KVQ_E_POSITION) ||
             (!actor_all_complete(sim, a) && status == KVQ_E_INCOMPLETE));
        return;
    }
    MUST(status == 0);
    if (!ends)
        track_leave_all(sim, a);
    while ((t = track_last_joined(sim, a)))
        end_step(sim, t);
}

// A request refused as a whole.
static void check_refused(struct sim *sim, struct actor *a, int status)
{
    bool open = actor_has_step(sim, a);
    unhear(a);
    MUST(kvq__queue_completion(a->member.queue)->count == 0);
    if (status == KVQ_E_CANCELLED)
        MUST(a->gone || a->closing);
    else if (status == KVQ_E_DEADLINE)
        MUST(a->header.deadline_ns && sim->kit.now > a->header.deadline_ns);
    else if (a->header.op == KVQ_OP_STEP_BEGIN)
        MUST(status == KVQ_E_BUSY && open);
    else
        MUST(status == KVQ_E_NO_STEP && !open);
    for (uint32_t i = 0; i < a->header.count; i++) {
        struct part *p = &a->parts[i];
        if (p->expect == 0 && p->track && op_appends(a->header.op))
            forget_append(a, p);
        p->whole = false;
        if (p->forked) {
            model_free(&p->forked->model);
            p->forked->used = false;
        }
    }
    sim->refused++;
}

void op_done(struct sim *sim, struct actor *a)
{
    const struct kvq_completion *c = kvq__queue_completion(a->member.queue);
    const struct kvq_result *results = kvq__queue_results(a->member.queue);
    whole_follow(sim, a);
    MUST(c->seq == a->header.seq);
    sim_trace(sim, (uint64_t)c->status << 8 | a->header.op);
    for (uint32_t i = 0; c->status >= 0 && i < c->count; i++) {
        sim_trace(sim, (uint64_t)results[i].status);
        sim_trace(sim, results[i].value);
    }
    MUST(!op_on_stream(a) || a->gone || a->timeline[1] == a->header.signal);
    sim->streamed += op_on_stream(a) && c->status == 0;
    bool ends = a->header.op == KVQ_OP_STEP_END || a->header.op == KVQ_OP_STEP_ABORT;
    bool cut = a->gone || (a->closing && c->status == KVQ_E_CANCELLED);
    if (ends && a->header.count == 0 && actor_has_step(sim, a) && !cut) {
        check_all(sim, a, c->status);
        return;
    }
    if (c->status < 0) {
        check_refused(sim, a, c->status);
        return;
    }
    MUST(c->count == a->header.count);
    for (uint32_t i = 0; i < c->count; i++)
        check_entry(sim, a, i, &results[i]);
}
