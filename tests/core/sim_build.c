// SPDX-License-Identifier: Apache-2.0
//
// The simulation's operations, as chance makes them up.
#include <math.h>
#include <string.h>

#include "tests/core/sim.h"

// ---- The actor's buffer ----

uint64_t actor_bytes(void)
{
    return sizeof(float) *
           (2 * SIM_TENSOR + 2 * SIM_QUERIES + SIM_LSES + SIM_LISTS + SIM_MAX_TOKENS);
}

float *actor_k(struct actor *a)
{
    return (float *)(void *)a->member.memory;
}

float *actor_v(struct actor *a)
{
    return actor_k(a) + SIM_TENSOR;
}

float *actor_q(struct actor *a)
{
    return actor_v(a) + SIM_TENSOR;
}

float *actor_out(struct actor *a)
{
    return actor_q(a) + SIM_QUERIES;
}

float *actor_lse(struct actor *a)
{
    return actor_out(a) + SIM_QUERIES;
}

static int32_t *actor_list(struct actor *a)
{
    return (int32_t *)(void *)(actor_lse(a) + SIM_LSES);
}

int32_t *actor_ids(struct actor *a)
{
    return actor_list(a) + SIM_LISTS;
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

static uint8_t choose_op(struct sim *sim, struct actor *a)
{
    static const uint8_t in_step[] = {
        KVQ_OP_APPEND_ATTEND, KVQ_OP_APPEND_ATTEND, KVQ_OP_APPEND_ATTEND, KVQ_OP_APPEND_ATTEND,
        KVQ_OP_APPEND,        KVQ_OP_APPEND,        KVQ_OP_ATTEND,        KVQ_OP_READ};
    static const uint8_t rare[] = {KVQ_OP_STEP_ABORT, KVQ_OP_TRUNCATE, KVQ_OP_FORK,
                                   KVQ_OP_STEP_BEGIN, KVQ_OP_ACCEPT,   KVQ_OP_NOP};
    static const uint8_t outside[] = {
        KVQ_OP_STEP_BEGIN, KVQ_OP_STEP_BEGIN, KVQ_OP_STEP_BEGIN, KVQ_OP_STEP_BEGIN, KVQ_OP_ATTEND,
        KVQ_OP_READ,       KVQ_OP_TRUNCATE,   KVQ_OP_ACCEPT,     KVQ_OP_FORK,       KVQ_OP_STEP,
        KVQ_OP_STEP,       KVQ_OP_STEP,       KVQ_OP_STEP};
    if (kit_chance(&sim->kit, 10))
        return rare[kit_below(&sim->kit, sizeof rare)];
    if (actor_has_step(sim, a) && kit_chance(&sim->kit, actor_all_complete(sim, a) ? 80 : 3))
        return KVQ_OP_STEP_END;
    if (actor_has_step(sim, a))
        return in_step[kit_below(&sim->kit, sizeof in_step)];
    return outside[kit_below(&sim->kit, sizeof outside)];
}

static bool of_step(uint8_t op)
{
    return op_appends(op) || op == KVQ_OP_STEP_END || op == KVQ_OP_STEP_ABORT;
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
        fits = fits && (op != KVQ_OP_STEP || !h->track || h->track->shards == 1);
        // Nor both shards of one to the end of a step: what becomes of one is the other's fate.
        const struct track *other = of_step(op) && h->track ? track_sibling(sim, h->track) : NULL;
        for (uint32_t j = 0; j < n; j++)
            fits = fits && (!h->track || a->parts[j].hold->track != h->track) &&
                   (!other || op_appends(op) || a->parts[j].hold->track != other);
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
    // Of an append on a stream only the step's end tells: test_core_gpu looks at that.
    bool told = a->header.op == KVQ_OP_STEP || !(a->header.flags & KVQ_REQ_ON_STREAM);
    p->poisoned = e->append && told && kit_chance(&sim->kit, 2);
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
    if (op == KVQ_OP_STEP_BEGIN || (op == KVQ_OP_STEP && kit_chance(&sim->kit, 80)))
        e->append = choose_append(sim, t, tokens);
    fill_ids(sim, a, i);
    if (t && a->header.step &&
        (op_appends(op) || (op == KVQ_OP_ATTEND && kit_chance(&sim->kit, 80))))
        e->append = t->step_tokens;
    if (op_attends(op)) {
        uint32_t most = e->append && e->append < SIM_MAX_QUERIES ? e->append : SIM_MAX_QUERIES;
        e->queries = (uint16_t)(1 + kit_below(&sim->kit, kit_chance(&sim->kit, 60) ? 1 : most));
    }
    if (op_appends(op) || op == KVQ_OP_STEP)
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
        if (op_appends(a->header.op) && t->model.layers[i].source == i && !t->appended[i])
            return i;
    return layer;
}

static bool can_stream(uint8_t op)
{
    return op_appends(op) || op_attends(op) || op == KVQ_OP_READ || op == KVQ_OP_STEP;
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
    if (op == KVQ_OP_STEP_BEGIN && !actor_has_step(sim, a))
        a->step = ++a->steps;
    if (op == KVQ_OP_STEP_BEGIN || of_step(op) ||
        (op == KVQ_OP_ATTEND && kit_chance(&sim->kit, 60)))
        a->header.step = a->step;
    if (op_attends(op) && kit_chance(&sim->kit, 15))
        a->header.flags = KVQ_REQ_PAST_ONLY;
    a->header.layer = choose_layer(sim, a);
    if (op == KVQ_OP_STEP)
        whole_fill(a);
    if (a->timeline && can_stream(op) && kit_chance(&sim->kit, 60)) {
        a->header.flags |= KVQ_REQ_ON_STREAM;
        a->header.signal = ++a->signal;
    }
    if (op == KVQ_OP_STEP_BEGIN && kit_chance(&sim->kit, 90)) {
        a->header.flags |= KVQ_REQ_TOKEN_IDS;
        a->header.list = view_of(a, actor_ids(a), 1, 1);
    }
    fill_floats(sim, actor_q(a), op_attends(op) ? SIM_QUERIES : 0);
    for (uint32_t i = 0; i < n; i++) {
        const struct track *t = a->parts[i].hold->track;
        fill_entry(sim, a, i);
        if (t && t->prepared && kit_chance(&sim->kit, 60))
            a->header.deadline_ns = sim->kit.now + 1000000ull * kit_below(&sim->kit, 3000);
    }
    bool takes = op == KVQ_OP_STEP_BEGIN || op == KVQ_OP_STEP || op == KVQ_OP_FORK;
    if (takes && kit_chance(&sim->kit, 30)) {
        a->header.flags |= KVQ_REQ_WAIT_ROOM;
        a->header.deadline_ns = sim->kit.now + 1000000ull * kit_below(&sim->kit, 9000) + 1;
    }
    return true;
}
