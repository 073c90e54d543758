// SPDX-License-Identifier: Apache-2.0
//
// Attend: one layer's attention for a batch of sessions, over committed tokens and those of the
// step. Layers that must be read packed are packed first.
#include <assert.h>

#include "daemon/core/request/append.h"
#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/views.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// The work, as kvq_attend_work counts it, that a thread does in the time that it takes to wake
// another thread, and later the client, which sleeps once no CPU is left to wait on: 512 tokens of
// 8 KV heads. That took 0.2 ms on the virtual machine of two CPUs that it was measured on.
enum { BRIEF_WORK = 512 * 8 * 2 };

static bool is_append(const struct kvq__queue *q)
{
    return q->header.op == KVQ_OP_APPEND_ATTEND;
}

// ---- Checks ----

static int open_attend_views(struct kvq__queue *q)
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

static int check_reach(const struct kvq__queue *q, const struct kvq__session *s)
{
    int rc = kvq__view_reach(q, KVQ__VIEW_Q, s);
    rc = rc ? rc : kvq__view_reach(q, KVQ__VIEW_OUT, s);
    return rc || !q->buffers[KVQ__VIEW_LSE] ? rc : kvq__view_reach(q, KVQ__VIEW_LSE, s);
}

static int check_rows(const struct kvq__queue *q, uint32_t i, const struct kvq_shape *s)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    const uint32_t dim = kvq_row_dim(s);
    int rc = check_reach(q, q->work[i].session);
    if (rc == 0)
        rc = kvq__view_rows(q, KVQ__VIEW_Q, s->q_heads, dim, e->q_row, e->queries);
    if (rc == 0)
        rc = kvq__view_rows(q, KVQ__VIEW_OUT, s->q_heads, dim, e->q_row, e->queries);
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
    if (e->append != s->in_step.tokens || e->queries > e->append)
        return KVQ_E_INVALID;
    bool needs = !(q->header.flags & KVQ_REQ_PAST_ONLY) && !is_append(q);
    if (needs && kvq__source_layer(s, q->header.layer)->append != KVQ__APPENDED)
        return KVQ_E_INCOMPLETE;
    return 0;
}

static int check_attend(struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    struct kvq__session *s = q->work[i].session;
    int rc = 0;
    if (q->header.layer >= s->n_layers)
        rc = KVQ_E_SHAPE;
    else if (e->queries == 0)
        rc = KVQ_E_INVALID;
    else if (e->queries > (s->pool->gpu ? KVQ_MAX_GPU_QUERIES : KVQ_MAX_QUERY_TOKENS))
        rc = KVQ_E_LIMIT;
    else if (e->append)
        rc = check_tail(q, i);
    if (rc == 0)
        rc = check_rows(q, i, &s->layers[q->header.layer].shape);
    if (rc == 0 && s->pool->gpu && !kvq__gpu_attend_fits(q, i))
        rc = KVQ_E_LIMIT; // only this entry fails, before any of its work
    if (rc < 0 && is_append(q))
        kvq__append_refused(q, i);
    return rc < 0 ? kvq__entry_fail(q, i, rc, s->tokens) : 0;
}

// ---- Start ----

static void add_work(struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    const struct kvq__session *s = q->work[i].session;
    const struct kvq_shape *shape = &s->layers[q->header.layer].shape;
    q->work[i].attend_work = kvq_attend_work(shape, s->tokens + e->append, e->queries);
    q->work_of_all += q->work[i].attend_work;
}

static void hold_attend_entry(struct kvq__queue *q, uint32_t i)
{
    add_work(q, i);
    if (is_append(q))
        kvq__append_hold(q, i);
    else if (q->entries[i].append)
        kvq__hold_tail(q, i);
    kvq__hold_layer(q, i, q->header.layer);
    q->core->counts.attends++;
}

static int check_outputs(struct kvq__queue *q, uint32_t i)
{
    int rc = kvq__outputs_entry(q, i);
    return rc < 0 ? kvq__entry_fail(q, i, rc, q->work[i].session->tokens) : 0;
}

// False if an entry must wait.
static bool check_entries(struct kvq__queue *q)
{
    for (uint32_t i = 0; i < q->header.count; i++) {
        bool fine = kvq__entry_open_at(q, i, false) == 0 && check_attend(q, i) == 0 &&
                    (!is_append(q) || kvq__append_check(q, i) == 0) && check_outputs(q, i) == 0;
        if (fine && kvq__read_must_wait(q, i, q->header.layer))
            return false;
    }
    return true;
}

static enum kvq__progress start_attend(struct kvq__queue *q, const struct kvq__pass *const *passes,
                                       uint32_t n_passes)
{
    int rc = kvq__request_step(q);
    if (rc == 0)
        rc = open_attend_views(q);
    if (rc == 0 && is_append(q))
        rc = kvq__append_open(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    if (!check_entries(q))
        return KVQ__WAIT;
    rc = kvq__outputs_check(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    kvq__hold_buffers(q);
    q->work_of_all = 0;
    for (uint32_t i = 0; i < q->header.count; i++) {
        if (!kvq__entry_alive(q, i))
            continue;
        // A session may stand in two entries, but it is appended to only once.
        if (!is_append(q) || kvq__append_check(q, i) == 0)
            hold_attend_entry(q, i);
    }
    return kvq__request_run(q, passes, n_passes);
}

enum kvq__progress kvq__op_attend(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_pack, &kvq__pass_attend};
    return start_attend(q, passes, 2);
}

enum kvq__progress kvq__op_append_attend(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_store, &kvq__pass_pack,
                                                     &kvq__pass_attend};
    return start_attend(q, passes, 3);
}

// ---- The pass ----

static struct kvq_attend call_of(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq_request *r = &q->header;
    const struct kvq_entry_wire *e = &q->entries[i];
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[r->layer];
    assert(e->append == 0 || e->queries <= e->append);
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

bool kvq__attend_brief(const struct kvq__queue *q)
{
    uint64_t workers = q->core->config.workers;
    return q->work_of_all * (workers - 1) <= BRIEF_WORK * workers;
}

// All entries together are cut into a few items for every worker.
static void plan_attend(struct kvq__queue *q, struct kvq__entry *w)
{
    struct kvq_attend_job *job = &w->attend;
    uint32_t workers = q->core->config.workers, items = 1;
    if (workers > 1 && !kvq__attend_brief(q))
        items = kvq_attend_part(kvq_attend_items(workers), w->attend_work, q->work_of_all);
    kvq_attend_plan(q->core->config.kernels, &job->call, items, &job->plan);
    if (job->plan.partial_bytes && !job->partials)
        job->partials = kvq__arena_take(q, job->plan.partial_bytes);
    if (job->plan.partial_bytes && !job->partials)
        kvq_attend_plan_whole(&job->call, &job->plan);
}

static bool prepare_attend(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    bool tail = q->entries[i].append > 0;
    assert(w->reading && kvq__is_read(s));
    if (s->dropped || (tail && s->in_step.serial != w->step_serial)) {
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, w->past);
        return true;
    }
    bool past_only = q->header.flags & KVQ_REQ_PAST_ONLY;
    uint64_t tokens = w->past + (past_only ? 0 : q->entries[i].append);
    w->pages = kvq__arena_take(q, kvq__pages_of(tokens) * sizeof *w->pages);
    if (!w->pages)
        return false;
    w->n_pages = kvq__pages_view(s, q->header.layer, w->past, tokens, w->pages);
    w->attend = (struct kvq_attend_job){.call = call_of(q, i)};
    const struct kvq__layer *own = kvq__source_layer(s, q->header.layer);
    w->attend.call.book = q->gpu ? &own->gpu_book : &own->book;
    w->attend.call.extras = kvq__extras_view(s, own, w->past);
    if (!kvq__outliers_view(q, own, &w->attend.call.pool))
        return false;
    if (!q->gpu)
        plan_attend(q, w);
    return true;
}

// Blocks that sessions of the wave share are unpacked once, if there is room for the partials.
static void gather_shared_blocks(struct kvq__queue *q)
{
    struct kvq_attend_job **jobs =
        kvq__arena_take(q, (q->wave_to - q->wave_from) * sizeof(struct kvq_attend_job *));
    uint32_t n = 0;
    for (uint32_t i = q->wave_from; jobs && i < q->wave_to; i++)
        if (kvq__entry_alive(q, i))
            jobs[n++] = &q->work[i].attend;
    if (n < 2 || !kvq_attend_share(jobs, n))
        return;
    bool room = true;
    for (uint32_t i = 0; room && i < n; i++) {
        if (jobs[i]->plan.partial_bytes && !jobs[i]->partials)
            jobs[i]->partials = kvq__arena_take(q, jobs[i]->plan.partial_bytes);
        room = jobs[i]->partials || jobs[i]->plan.partial_bytes == 0;
    }
    for (uint32_t i = q->wave_from; !room && i < q->wave_to; i++)
        if (kvq__entry_alive(q, i))
            plan_attend(q, &q->work[i]);
}

static uint32_t count_attend_items(const struct kvq__entry *w)
{
    return w->attend.plan.items;
}

static void run_attend_item(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    assert(item < q->work[i].attend.plan.items);
    kvq_attend_item(q->core->config.kernels, &q->work[i].attend, item, workspace);
}

static uint32_t count_merges(const struct kvq__entry *w)
{
    return kvq_attend_merges(&w->attend);
}

static void run_merge(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    kvq_attend_merge(q->core->config.kernels, &q->work[i].attend, item, workspace);
}

const struct kvq__pass kvq__pass_attend = {
    .prepare = prepare_attend,
    .gather = gather_shared_blocks,
    .stages = {{count_attend_items, run_attend_item}, {count_merges, run_merge}},
    .n_stages = 2,
    .gpu_wave = kvq__gpu_attend_wave,
    .gpu_room = kvq__gpu_attend_room,
    .gpu_ops = kvq__gpu_attend_ops,
};
