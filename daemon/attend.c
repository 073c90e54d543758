// SPDX-License-Identifier: Apache-2.0
//
// Attend: one layer's attention for a batch of sessions, over committed tokens and those of the
// step. Packs first what has to be read packed.
#include "daemon/state.h"

static bool is_append(const struct kvq__queue *q)
{
    return q->header.op == KVQ_OP_APPEND_ATTEND;
}

// ---- Checks ----

static int open_views(struct kvq__queue *q)
{
    int rc = kvq__view_open(q, KVQ__VIEW_Q);
    if (rc == 0)
        rc = kvq__view_open(q, KVQ__VIEW_OUT);
    if (rc == 0 && q->header.lse.buffer)
        rc = kvq__view_open(q, KVQ__VIEW_LSE);
    if (rc == 0 && q->header.lse.buffer && q->header.lse.dtype != KVQ_F32)
        rc = KVQ_E_DTYPE;
    return rc;
}

static int check_rows(const struct kvq__queue *q, uint32_t i, const struct kvq_shape *s)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    int rc = kvq__view_rows(q, KVQ__VIEW_Q, s->q_heads, s->k_dim, e->q_row, e->queries);
    if (rc == 0)
        rc = kvq__view_rows(q, KVQ__VIEW_OUT, s->q_heads, s->v_dim, e->q_row, e->queries);
    if (rc < 0 || !q->buffers[KVQ__VIEW_LSE])
        return rc;
    if (s->q_heads > 1 && q->header.lse.head_stride != sizeof(float))
        return KVQ_E_INVALID;
    return kvq__view_rows(q, KVQ__VIEW_LSE, s->q_heads, 1, e->q_row, e->queries);
}

// Whether the step's K and V of this layer are there, or come with this request.
static int check_tail(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    const struct kvq__session *s = q->work[i].session;
    if (!q->step || s->step != q->step)
        return KVQ_E_NO_STEP;
    if (e->append != s->step_tokens || e->queries > e->append)
        return KVQ_E_INVALID;
    bool needs = !(q->header.flags & KVQ_REQ_PAST_ONLY) && !is_append(q);
    if (needs && s->layers[s->layers[q->header.layer].source].append != KVQ__APPENDED)
        return KVQ_E_INCOMPLETE;
    return 0;
}

static int check_entry(struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    struct kvq__session *s = q->work[i].session;
    int rc = 0;
    if (q->header.layer >= s->n_layers)
        rc = KVQ_E_SHAPE;
    else if (e->queries == 0)
        rc = KVQ_E_INVALID;
    else if (e->queries > KVQ_MAX_STEP_QUERIES)
        rc = KVQ_E_LIMIT;
    else if (e->append)
        rc = check_tail(q, i);
    if (rc == 0)
        rc = check_rows(q, i, &s->layers[q->header.layer].shape);
    return rc < 0 ? kvq__entry_fail(q, i, rc, s->tokens) : 0;
}

// ---- Start ----

// Splits become items of their own only if there are too few items without.
static bool needs_splits(const struct kvq__queue *q)
{
    uint64_t items = 0;
    for (uint32_t i = 0; i < q->header.count; i++) {
        if (!kvq__entry_alive(q, i))
            continue;
        const struct kvq_shape *s = &q->work[i].session->layers[q->header.layer].shape;
        uint32_t per_tile = KVQ_TILE_ROWS / (s->q_heads / s->kv_heads);
        items += s->kv_heads * ((q->entries[i].queries + per_tile - 1) / per_tile);
    }
    return q->core->config.workers > 1 && items < 4ull * q->core->config.workers;
}

static void hold_entry(struct kvq__queue *q, uint32_t i)
{
    if (is_append(q))
        kvq__append_hold(q, i);
    else if (q->entries[i].append)
        kvq__hold_tail(q, i);
    kvq__hold_layer(q, i, q->header.layer);
    q->core->attends++;
}

// False if an entry must wait.
static bool check_entries(struct kvq__queue *q)
{
    for (uint32_t i = 0; i < q->header.count; i++) {
        bool fine = kvq__entry_open_at(q, i, false) == 0 && check_entry(q, i) == 0 &&
                    (!is_append(q) || kvq__append_check(q, i) == 0);
        if (fine && kvq__read_must_wait(q, i, q->header.layer))
            return false;
    }
    return true;
}

static enum kvq__progress start(struct kvq__queue *q, const struct kvq__pass *const *passes,
                                uint32_t n_passes)
{
    int rc = kvq__request_step(q);
    if (rc == 0)
        rc = open_views(q);
    if (rc == 0 && is_append(q))
        rc = kvq__append_open(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    if (!check_entries(q))
        return KVQ__WAIT;
    kvq__hold_buffers(q);
    for (uint32_t i = 0; i < q->header.count; i++) {
        if (!kvq__entry_alive(q, i))
            continue;
        // A session may stand in two entries, but it is appended to only once.
        if (!is_append(q) || kvq__append_check(q, i) == 0)
            hold_entry(q, i);
    }
    q->parallel = needs_splits(q);
    return kvq__request_run(q, passes, n_passes);
}

enum kvq__progress kvq__op_attend(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_pack, &kvq__pass_attend};
    return start(q, passes, 2);
}

enum kvq__progress kvq__op_append_attend(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_store, &kvq__pass_pack,
                                                     &kvq__pass_attend};
    return start(q, passes, 3);
}

// ---- The pass ----

static struct kvq_attend call_of(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq_request *r = &q->header;
    const struct kvq_entry_wire *e = &q->entries[i];
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[r->layer];
    struct kvq_attend a = {
        .format = l->format,
        .shape = &l->shape,
        .pages = w->pages,
        .n_pages = w->n_pages,
        .flags = r->flags & KVQ_REQ_PAST_ONLY ? KVQ_ATTEND_PAST_ONLY : 0,
        .path = w->session->path,
        .past_tokens = w->past,
        .step_tokens = e->append,
        .q_start = w->past + (e->append ? e->append - e->queries : 0),
        .q_tokens = e->queries,
        .q = {kvq__view_data(q, KVQ__VIEW_Q, e->q_row), (int64_t)r->q.token_stride,
              (int64_t)r->q.head_stride, r->q.dtype},
        .out = kvq__view_data(q, KVQ__VIEW_OUT, e->q_row),
        .out_token_stride = (int64_t)r->out.token_stride,
        .out_head_stride = (int64_t)r->out.head_stride,
        .out_dtype = r->out.dtype,
        .lse_token_stride = (int64_t)r->lse.token_stride,
    };
    if (q->buffers[KVQ__VIEW_LSE])
        a.lse = (float *)(void *)kvq__view_data(q, KVQ__VIEW_LSE, e->q_row);
    return a;
}

static void plan(struct kvq__queue *q, struct kvq__entry *w)
{
    w->attend.partials = NULL;
    kvq_attend_plan(&w->attend.call, q->parallel, &w->attend.plan);
    if (w->attend.plan.partial_bytes == 0)
        return;
    w->attend.partials = kvq__arena_take(q, w->attend.plan.partial_bytes);
    if (!w->attend.partials) // the same bits, from fewer items
        kvq_attend_plan(&w->attend.call, false, &w->attend.plan);
}

static bool prepare(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    bool tail = q->entries[i].append > 0;
    if (s->dropped || (tail && s->step_serial != w->step_serial)) {
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, w->past);
        return true;
    }
    bool past_only = q->header.flags & KVQ_REQ_PAST_ONLY;
    uint64_t tokens = w->past + (past_only ? 0 : q->entries[i].append);
    w->pages = kvq__arena_take(q, kvq__pages_of(tokens) * sizeof *w->pages);
    if (!w->pages)
        return false;
    w->n_pages = kvq__pages_view(s, q->header.layer, w->past, tokens, w->pages);
    w->attend.call = call_of(q, i);
    const struct kvq__layer *own = &s->layers[s->layers[q->header.layer].source];
    w->attend.call.book = &own->book;
    w->attend.call.extras = kvq__extras_view(s, own, w->past);
    if (!kvq__outliers_view(q, own, &w->attend.call.pool))
        return false;
    plan(q, w);
    return true;
}

static uint32_t count_items(const struct kvq__entry *w)
{
    return w->attend.plan.items;
}

static void run_item(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    const struct kvq__entry *w = &q->work[i];
    kvq_attend_item(q->core->config.kernels, &w->attend.call, &w->attend.plan, item,
                    w->attend.partials, workspace);
}

static uint32_t count_merges(const struct kvq__entry *w)
{
    const struct kvq_attend_plan *p = &w->attend.plan;
    return p->parallel ? w->attend.call.shape->kv_heads * p->n_tiles : 0;
}

static void run_merge(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    const struct kvq__entry *w = &q->work[i];
    kvq_attend_merge(q->core->config.kernels, &w->attend.call, &w->attend.plan, item,
                     w->attend.partials, workspace);
}

const struct kvq__pass kvq__pass_attend = {
    prepare, {{count_items, run_item}, {count_merges, run_merge}}, 2, NULL};
