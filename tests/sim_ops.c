// SPDX-License-Identifier: Apache-2.0
//
// The simulation's operations: how they are made up, what must come of them, and whether it did.
#include <math.h>
#include <string.h>

#include "tests/sim.h"

// ---- The actor's buffer ----

enum {
    TENSOR = SIM_ROWS * SIM_ROW,
    QUERY_ROWS = SIM_BATCH * SIM_MAX_QUERIES,
    QUERIES = QUERY_ROWS * SIM_ROW,
    LSES = QUERY_ROWS * SIM_HEADS,
    LISTS = SIM_BATCH * SIM_MAX_STEP,
};

uint64_t actor_bytes(void)
{
    return sizeof(float) * (2 * TENSOR + 2 * QUERIES + LSES + LISTS + SIM_MAX_TOKENS);
}

float *actor_k(struct actor *a)
{
    return (float *)(void *)a->member.memory;
}

float *actor_v(struct actor *a)
{
    return actor_k(a) + TENSOR;
}

float *actor_q(struct actor *a)
{
    return actor_v(a) + TENSOR;
}

float *actor_out(struct actor *a)
{
    return actor_q(a) + QUERIES;
}

float *actor_lse(struct actor *a)
{
    return actor_out(a) + QUERIES;
}

static int32_t *actor_list(struct actor *a)
{
    return (int32_t *)(void *)(actor_lse(a) + LSES);
}

int32_t *actor_ids(struct actor *a)
{
    return actor_list(a) + LISTS;
}

static struct kvq_wire_view view_of(struct actor *a, const void *at, uint32_t heads, uint32_t dim)
{
    uint64_t offset = (uint64_t)((const uint8_t *)at - a->member.memory);
    return kit_view(&a->member, offset, heads, dim, KVQ_F32);
}

static void set_views(struct actor *a)
{
    a->header.k = view_of(a, actor_k(a), SIM_HEADS, SIM_DIM);
    a->header.v = view_of(a, actor_v(a), SIM_HEADS, SIM_DIM);
    a->header.q = view_of(a, actor_q(a), SIM_HEADS, SIM_DIM);
    a->header.out = view_of(a, actor_out(a), SIM_HEADS, SIM_DIM);
    a->header.lse = view_of(a, actor_lse(a), SIM_HEADS, 1);
    a->header.list = view_of(a, actor_list(a), 1, 1);
}

// ---- Making one up ----

static bool has_step(const struct sim *sim, const struct actor *a)
{
    for (uint32_t i = 0; i < SIM_TRACKS; i++)
        if (sim->tracks[i].stepper == a)
            return true;
    return false;
}

static bool is_complete(const struct track *t)
{
    for (uint32_t i = 0; i < MODEL_LAYERS; i++)
        if (t->step_tokens && t->model.layers[i].source == i && t->appended[i] != 2)
            return false;
    return true;
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

static bool all_complete(const struct sim *sim, const struct actor *a)
{
    for (uint32_t i = 0; i < SIM_TRACKS; i++)
        if (sim->tracks[i].stepper == a && !is_complete(&sim->tracks[i]))
            return false;
    return true;
}

static uint8_t choose_op(struct sim *sim, struct actor *a)
{
    static const uint8_t in_step[] = {
        KVQ_OP_APPEND_ATTEND, KVQ_OP_APPEND_ATTEND, KVQ_OP_APPEND_ATTEND, KVQ_OP_APPEND_ATTEND,
        KVQ_OP_APPEND,        KVQ_OP_APPEND,        KVQ_OP_ATTEND,        KVQ_OP_READ};
    static const uint8_t rare[] = {KVQ_OP_STEP_ABORT, KVQ_OP_TRUNCATE, KVQ_OP_FORK,
                                   KVQ_OP_STEP_BEGIN, KVQ_OP_ACCEPT,   KVQ_OP_NOP};
    static const uint8_t outside[] = {KVQ_OP_STEP_BEGIN, KVQ_OP_STEP_BEGIN, KVQ_OP_STEP_BEGIN,
                                      KVQ_OP_STEP_BEGIN, KVQ_OP_ATTEND,     KVQ_OP_READ,
                                      KVQ_OP_TRUNCATE,   KVQ_OP_ACCEPT,     KVQ_OP_FORK};
    if (kit_chance(&sim->kit, 10))
        return rare[kit_below(&sim->kit, sizeof rare)];
    if (has_step(sim, a) && kit_chance(&sim->kit, all_complete(sim, a) ? 80 : 3))
        return KVQ_OP_STEP_END;
    if (has_step(sim, a))
        return in_step[kit_below(&sim->kit, sizeof in_step)];
    return outside[kit_below(&sim->kit, sizeof outside)];
}

static bool is_append(uint8_t op)
{
    return op == KVQ_OP_APPEND || op == KVQ_OP_APPEND_ATTEND;
}

static bool is_attend(uint8_t op)
{
    return op == KVQ_OP_ATTEND || op == KVQ_OP_APPEND_ATTEND;
}

static bool of_step(uint8_t op)
{
    return is_append(op) || op == KVQ_OP_STEP_END || op == KVQ_OP_STEP_ABORT;
}

// Distinct sessions that the operation mostly makes sense for.
static uint32_t choose_holds(struct sim *sim, struct actor *a, uint8_t op)
{
    uint32_t n = 0, start = kit_below(&sim->kit, SIM_HANDLES);
    uint32_t most = 1 + kit_below(&sim->kit, SIM_BATCH);
    for (uint32_t i = 0; i < SIM_HANDLES && n < most; i++) {
        struct hold *h = &a->holds[(start + i) % SIM_HANDLES];
        bool fits = h->used && (!of_step(op) || kit_chance(&sim->kit, 3) ||
                                (h->track && h->track->stepper == a));
        // Nor both shards of one to the end of a step: what becomes of one is the other's fate.
        const struct track *other = of_step(op) && h->track ? track_sibling(sim, h->track) : NULL;
        for (uint32_t j = 0; j < n; j++)
            fits = fits && (!h->track || a->parts[j].hold->track != h->track) &&
                   (!other || is_append(op) || a->parts[j].hold->track != other);
        if (fits)
            a->parts[n++] = (struct part){.hold = h};
    }
    return n;
}

static uint32_t choose_append(struct sim *sim, const struct track *t, uint64_t tokens)
{
    static const uint32_t most[] = {1, 1, 1, 4, 17, 40, 128, SIM_MAX_STEP};
    uint32_t n = 1 + kit_below(&sim->kit, most[kit_below(&sim->kit, 8)]);
    if (t && t->shards > 1 && kit_chance(&sim->kit, 95)) // as many as the other shard's writer
        n = 1 + (uint32_t)((tokens * 2654435761u >> 9) % 90);
    if (tokens + n > SIM_MAX_TOKENS)
        n = 0;
    return n;
}

static void fill_floats(struct sim *sim, float *at, size_t n)
{
    for (size_t i = 0; i < n; i++)
        at[i] = kit_float(&sim->kit);
}

static void fill_side(struct sim *sim, struct actor *a, uint32_t i, uint32_t side)
{
    const struct kvq_entry_wire *e = &a->entries[i];
    const struct track *t = a->parts[i].hold->track;
    float *rows = (side ? actor_v(a) : actor_k(a)) + (size_t)e->row * SIM_ROW;
    if (t && t->stepper == a && t->step_told && e->append == t->step_tokens)
        ids_rows(t, a->header.layer, side, t->model.tokens, e->append, rows);
    else
        fill_floats(sim, rows, (size_t)e->append * SIM_ROW);
}

static void fill_append(struct sim *sim, struct actor *a, uint32_t i)
{
    struct kvq_entry_wire *e = &a->entries[i];
    struct part *p = &a->parts[i];
    fill_side(sim, a, i, 0);
    fill_side(sim, a, i, 1);
    // On a stream only the step's end tells: test_core_gpu looks at that.
    p->poisoned = e->append && !(a->header.flags & KVQ_REQ_ON_STREAM) && kit_chance(&sim->kit, 2);
    if (p->poisoned) {
        uint32_t row = e->row + kit_below(&sim->kit, e->append);
        float *tensor = kit_chance(&sim->kit, 50) ? actor_k(a) : actor_v(a);
        tensor[(size_t)row * SIM_ROW + kit_below(&sim->kit, SIM_DIM)] =
            kit_chance(&sim->kit, 50) ? NAN : -INFINITY;
    }
}

static void fill_list(struct sim *sim, struct actor *a, uint32_t i)
{
    struct kvq_entry_wire *e = &a->entries[i];
    const struct track *track = a->parts[i].hold->track;
    uint64_t start = track ? track->model.tokens - e->append : 0;
    // What moves has been computed behind other tokens, and is no longer what its ids say: where
    // they are known only the last ones go.
    bool known = track && track->model.tokens >= e->append && track->known > start;
    uint32_t most = known ? kit_below(&sim->kit, e->append + 1) : e->append;
    for (uint32_t t = 0; t < most; t++)
        if (known || kit_chance(&sim->kit, 60))
            a->lists[i][e->list_token++] = (int32_t)t;
    memcpy(actor_list(a) + e->row, a->lists[i], e->list_token * sizeof(int32_t));
}

// Tokens that it has more than the other shard.
static uint32_t ahead_of_sibling(struct sim *sim, const struct track *t)
{
    const struct track *other = t ? track_sibling(sim, t) : NULL;
    return other && other->model.tokens < t->model.tokens
               ? (uint32_t)(t->model.tokens - other->model.tokens)
               : 0;
}

// Those of the story, with a slip now and then.
static void fill_ids(struct sim *sim, struct actor *a, uint32_t i)
{
    struct kvq_entry_wire *e = &a->entries[i];
    const struct track *t = a->parts[i].hold->track;
    uint64_t from = t ? t->model.tokens : 0;
    int32_t *to = actor_ids(a) + (size_t)i * SIM_MAX_STEP;
    if (!(a->header.flags & KVQ_REQ_TOKEN_IDS))
        return;
    e->q_row = i * SIM_MAX_STEP;
    for (uint32_t n = 0; n < e->append; n++)
        to[n] = story_id(t ? t->story : 0, from + n);
    if (e->append && kit_chance(&sim->kit, 4))
        to[kit_below(&sim->kit, e->append)] = -1;
}

static void fill_entry(struct sim *sim, struct actor *a, uint32_t i)
{
    struct kvq_entry_wire *e = &a->entries[i];
    const struct track *t = a->parts[i].hold->track;
    uint64_t tokens = t ? t->model.tokens + (t->prepared ? t->step_tokens : 0) : 0;
    uint32_t back = t ? t->model.max_rollback + 1 : 1;
    uint8_t op = a->header.op;
    *e = (struct kvq_entry_wire){.handle = a->parts[i].hold->handle, .position = tokens};
    e->row = i * SIM_MAX_STEP;
    e->q_row = i * SIM_MAX_QUERIES;
    if (op == KVQ_OP_STEP_BEGIN)
        e->append = choose_append(sim, t, tokens);
    fill_ids(sim, a, i);
    if (t && a->header.step &&
        (is_append(op) || (op == KVQ_OP_ATTEND && kit_chance(&sim->kit, 80))))
        e->append = t->step_tokens;
    if (is_attend(op)) {
        uint32_t most = e->append && e->append < SIM_MAX_QUERIES ? e->append : SIM_MAX_QUERIES;
        e->queries = (uint16_t)(1 + kit_below(&sim->kit, kit_chance(&sim->kit, 60) ? 1 : most));
    }
    if (is_append(op))
        fill_append(sim, a, i);
    uint32_t ahead = ahead_of_sibling(sim, t);
    bool even = t && t->shards > 1 && kit_chance(&sim->kit, 80);
    if (op == KVQ_OP_TRUNCATE)
        e->list_token = (uint16_t)(even ? ahead : kit_below(&sim->kit, back + back / 4 + 1));
    if (op == KVQ_OP_ACCEPT) {
        e->append = even ? 0 : kit_below(&sim->kit, back + back / 8);
        fill_list(sim, a, i);
    }
    if (op == KVQ_OP_READ) {
        e->position = kit_below(&sim->kit, (uint32_t)tokens + 1);
        e->append = kit_below(&sim->kit, SIM_MAX_STEP);
    }
    if (op == KVQ_OP_FORK && kit_chance(&sim->kit, 70))
        e->position = kit_below(&sim->kit, (uint32_t)tokens + 1);
    if (kit_chance(&sim->kit, 2))
        e->position++;
    if (kit_chance(&sim->kit, 2))
        e->handle += 1ull << 32;
}

// A layer that the step still needs, mostly.
static uint32_t choose_layer(struct sim *sim, const struct actor *a)
{
    const struct track *t = a->header.count ? a->parts[0].hold->track : NULL;
    uint32_t layer = kit_below(&sim->kit, MODEL_LAYERS);
    for (uint32_t i = 0; t && kit_chance(&sim->kit, 95) && i < MODEL_LAYERS; i++)
        if (is_append(a->header.op) && t->model.layers[i].source == i && !t->appended[i])
            return i;
    return layer;
}

static bool can_stream(uint8_t op)
{
    return is_append(op) || is_attend(op) || op == KVQ_OP_READ;
}

static bool is_on_stream(const struct actor *a)
{
    return a->header.flags & KVQ_REQ_ON_STREAM;
}

bool op_build(struct sim *sim, struct actor *a)
{
    uint8_t op = choose_op(sim, a);
    uint32_t n = choose_holds(sim, a, op);
    bool ends = op == KVQ_OP_STEP_END || op == KVQ_OP_STEP_ABORT;
    if (n == 0 && op != KVQ_OP_NOP)
        return false;
    if (ends && kit_chance(&sim->kit, 50))
        n = 0; // all of the step
    a->header = kit_header(op, (uint16_t)n);
    set_views(a);
    if (op == KVQ_OP_STEP_BEGIN && !has_step(sim, a))
        a->step = ++a->steps;
    if (op == KVQ_OP_STEP_BEGIN || of_step(op) ||
        (op == KVQ_OP_ATTEND && kit_chance(&sim->kit, 60)))
        a->header.step = a->step;
    if (is_attend(op) && kit_chance(&sim->kit, 15))
        a->header.flags = KVQ_REQ_PAST_ONLY;
    a->header.layer = choose_layer(sim, a);
    if (a->timeline && can_stream(op) && kit_chance(&sim->kit, 60)) {
        a->header.flags |= KVQ_REQ_ON_STREAM;
        a->header.signal = ++a->signal;
    }
    if (op == KVQ_OP_STEP_BEGIN && kit_chance(&sim->kit, 90)) {
        a->header.flags |= KVQ_REQ_TOKEN_IDS;
        a->header.list = view_of(a, actor_ids(a), 1, 1);
    }
    fill_floats(sim, actor_q(a), is_attend(op) ? QUERIES : 0);
    for (uint32_t i = 0; i < n; i++) {
        const struct track *t = a->parts[i].hold->track;
        fill_entry(sim, a, i);
        if (t && t->prepared && kit_chance(&sim->kit, 60))
            a->header.deadline_ns = sim->kit.now + 1000000ull * kit_below(&sim->kit, 3000);
    }
    return true;
}

// ---- What must come of it ----

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
    if (is_on_stream(a) && !h->track->streams)
        return KVQ_E_BUFFER;
    p->track = h->track;
    p->past = p->value = h->track->model.tokens;
    p->serial = h->track->step_serial;
    p->on_gpu = h->track->on_gpu;
    // Others have waited: this actor's one queue would have to end the other shard's step.
    return h->track->prepared && !h->read_only ? KVQ_E_BUSY : 0;
}

static int predict_open_at(struct actor *a, uint32_t i, bool write)
{
    int rc = predict_open(a, i, write);
    bool in_step = a->header.step && a->header.op != KVQ_OP_STEP_BEGIN;
    if (rc < 0)
        return rc;
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

static int predict_back(struct actor *a, uint32_t i, uint32_t back)
{
    int rc = predict_open_at(a, i, true);
    struct part *p = &a->parts[i];
    if (rc < 0)
        return rc;
    if (p->track->stepper)
        return KVQ_E_BUSY;
    if (back <= p->past - p->track->model.floor)
        return 0;
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
    if (!is_complete(t))
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
        return rc ? rc : predict_append(a, i);
    case KVQ_OP_ATTEND:
    case KVQ_OP_APPEND_ATTEND:
        rc = predict_open_at(a, i, false);
        rc = rc ? rc : predict_attend(a, i);
        return rc || a->header.op == KVQ_OP_ATTEND ? rc : predict_append(a, i);
    case KVQ_OP_STEP_END:
        rc = predict_open_at(a, i, true);
        return rc ? rc : predict_end(sim, &a->parts[i]);
    case KVQ_OP_STEP_ABORT:
        return predict_open_at(a, i, true);
    case KVQ_OP_TRUNCATE:
        return predict_back(a, i, a->entries[i].list_token);
    case KVQ_OP_ACCEPT:
        return predict_back(a, i, a->entries[i].append);
    case KVQ_OP_FORK:
        return predict_fork(sim, a, i);
    case KVQ_OP_READ:
        return predict_read(a, i);
    default:
        return predict_open_at(a, i, false);
    }
}

void op_acquired(struct sim *sim, struct actor *a)
{
    track_places(sim);
    for (uint32_t i = 0; i < a->header.count; i++) {
        struct part *p = &a->parts[i];
        p->forked = NULL;
        p->torn = false;
        p->expect = predict(sim, a, i);
        if (p->expect == 0 && is_append(a->header.op) && a->entries[i].append)
            p->track->appended[a->header.layer] = 1;
    }
}

// ---- Whether it did ----

void op_went_on(struct sim *sim, struct actor *a)
{
    const struct kvq_result *results = kvq__queue_results(a->member.queue);
    for (uint32_t i = 0; is_append(a->header.op) && i < a->header.count; i++) {
        struct part *p = &a->parts[i];
        if (p->expect < 0 || p->refused || results[i].status != KVQ_E_NONFINITE)
            continue;
        MUST(p->poisoned && p->track->step_serial == p->serial);
        track_leave(sim, p->track);
        p->refused = true;
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
    if (is_append(a->header.op) && t->step_serial != a->parts[i].serial)
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
    case KVQ_OP_READ:
        MUST(r->value == a->parts[i].value);
        sim_check_read(sim, a, i);
        return;
    default:
        if (is_append(a->header.op))
            apply_append(a, i);
        if (is_attend(a->header.op))
            sim_check_attend(sim, a, i);
    }
    bool changes = a->header.op == KVQ_OP_TRUNCATE || a->header.op == KVQ_OP_ACCEPT;
    MUST(r->value == (changes ? t->model.tokens : a->parts[i].past));
}

static void forget_append(const struct actor *a, const struct part *p)
{
    if (is_append(a->header.op) && p->track->step_serial == p->serial &&
        p->track->appended[a->header.layer] == 1)
        p->track->appended[a->header.layer] = 0;
}

// An entry that was predicted to go through, but did not.
static void check_failed(struct sim *sim, struct actor *a, uint32_t i, int status)
{
    struct part *p = &a->parts[i];
    bool new_memory = a->header.op == KVQ_OP_STEP_BEGIN || a->header.op == KVQ_OP_FORK;
    if (status == KVQ_E_NONFINITE) {
        MUST(p->refused);
    } else if (status == KVQ_E_CANCELLED) {
        MUST(!p->track->alive || p->track->step_serial != p->serial);
    } else {
        MUST(new_memory && (status == KVQ_E_NO_MEMORY || status == KVQ_E_QUOTA));
        sim->failed_memory++;
    }
    forget_append(a, p);
}

static void check_entry(struct sim *sim, struct actor *a, uint32_t i, const struct kvq_result *r)
{
    struct part *p = &a->parts[i];
    bool ended = a->header.op == KVQ_OP_STEP_END && (p->expect == KVQ_E_INCOMPLETE || p->torn);
    if (p->expect == 0 && r->status == 0) {
        apply(sim, a, i, r);
    } else if (p->expect == 0) {
        check_failed(sim, a, i, r->status);
    } else {
        MUST(r->status == p->expect && r->value == p->value);
        sim->refused++;
        if (ended)
            track_leave(sim, p->track);
    }
    if (p->forked && !p->forked->alive) {
        model_free(&p->forked->model);
        p->forked->used = false;
    }
}

static struct track *last_joined(struct sim *sim, const struct actor *a)
{
    struct track *last = NULL;
    for (uint32_t i = 0; i < SIM_TRACKS; i++) {
        struct track *t = &sim->tracks[i];
        if (t->stepper == a && (!last || t->joined > last->joined))
            last = t;
    }
    return last;
}

// Without entries: every session of the step.
static void check_all(struct sim *sim, struct actor *a, int status)
{
    bool ends = a->header.op == KVQ_OP_STEP_END, torn = ends && any_torn(sim, a);
    struct track *t;
    if (ends && (torn || !all_complete(sim, a))) {
        MUST((torn && status == KVQ_E_POSITION) ||
             (!all_complete(sim, a) && status == KVQ_E_INCOMPLETE));
        return;
    }
    MUST(status == 0);
    while ((t = last_joined(sim, a))) {
        if (ends)
            end_step(sim, t);
        else
            track_leave(sim, t);
    }
}

// A request refused as a whole.
static void check_refused(struct sim *sim, struct actor *a, int status)
{
    bool open = has_step(sim, a);
    MUST(kvq__queue_completion(a->member.queue)->count == 0);
    if (status == KVQ_E_CANCELLED)
        MUST(a->gone);
    else if (status == KVQ_E_DEADLINE)
        MUST(a->header.deadline_ns && sim->kit.now > a->header.deadline_ns);
    else if (a->header.op == KVQ_OP_STEP_BEGIN)
        MUST(status == KVQ_E_BUSY && open);
    else
        MUST(status == KVQ_E_NO_STEP && !open);
    for (uint32_t i = 0; i < a->header.count; i++) {
        struct part *p = &a->parts[i];
        if (p->expect == 0 && p->track && is_append(a->header.op))
            forget_append(a, p);
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
    MUST(c->seq == a->header.seq);
    MUST(!is_on_stream(a) || a->gone || a->timeline[1] == a->header.signal);
    sim->streamed += is_on_stream(a) && c->status == 0;
    bool ends = a->header.op == KVQ_OP_STEP_END || a->header.op == KVQ_OP_STEP_ABORT;
    if (ends && a->header.count == 0 && has_step(sim, a) && !a->gone) {
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
