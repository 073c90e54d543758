// SPDX-License-Identifier: Apache-2.0
//
// Attention in the engine's threads: the daemon's own kernels over the pages that the tables name,
// with the step's K and V where they lie.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/pool.h"
#include "proto/rows.h"

enum { ALIGN = 64 };

static_assert((int)KVQ__LOCAL_THREADS <= (int)KVQ_POOL_MAX_THREADS, "a pool has so many");

// ---- Memory, once ----

static void *reserve_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED)
        return memory;
    kvq__set_error_errno("no %zu bytes of memory for attention", bytes);
    return NULL;
}

static size_t workspace_bytes(void)
{
    return (kvq_workspace_bytes() + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t jobs_bytes(void)
{
    return KVQ_MAX_BATCH * sizeof(struct kvq_attend_job);
}

// The library's own threads have workspaces of their own.
static size_t workspaces_bytes(const struct kvq_local *local)
{
    return (local->parallel ? local->threads : 1) * workspace_bytes();
}

static int start_workers(struct kvq_local *local)
{
    int error = local->threads > 1 && !local->parallel
                    ? kvq_pool_open(&local->workers, local->threads, false)
                    : 0;
    if (error == 0)
        return KVQ_OK;
    return kvq__set_error(KVQ_E_SYSTEM, "kvq_local_open: %u threads cannot be started: %s",
                          local->threads, strerror(-error));
}

int kvq__attend_open(struct kvq_local *local)
{
    assert(!local->jobs && !local->workers);
    local->jobs = reserve_memory(jobs_bytes());
    local->partials = local->jobs ? reserve_memory(KVQ__LOCAL_PARTIALS) : NULL;
    local->workspaces = local->partials ? reserve_memory(workspaces_bytes(local)) : NULL;
    return local->workspaces ? start_workers(local) : KVQ_E_SYSTEM;
}

void kvq__attend_close(struct kvq_local *local)
{
    if (local->jobs)
        munmap(local->jobs, jobs_bytes());
    if (local->partials)
        munmap(local->partials, KVQ__LOCAL_PARTIALS);
    if (local->workspaces)
        munmap(local->workspaces, workspaces_bytes(local));
    kvq_pool_close(&local->workers);
}

// ---- Tensors ----

static uint32_t element_bytes(const struct kvq_tensor *t)
{
    return t->dtype == KVQ_DTYPE_F32 ? 4 : 2;
}

// Its buffer's first byte for whoever attends: this process, or kernels of its GPU. 0: there is
// none.
static uint64_t base_of(const struct kvq_local *local, const struct kvq_tensor *t)
{
    assert(t->buffer);
    return local->here.driver ? kvq__gpu_buffer_at(t->buffer, &local->here)
                              : (uintptr_t)t->buffer->host;
}

// What does not depend on an entry, as the daemon checks it.
static int check_attend_tensor(const struct kvq_local *local, const struct kvq_tensor *t)
{
    if (!t->buffer)
        return KVQ_OK;
    uint64_t base = base_of(local, t);
    if (base == 0)
        return KVQ_E_BUFFER; // of another place
    if (base % element_bytes(t))
        return KVQ_E_INVALID;
    if (t->offset > t->buffer->bytes || t->token_stride > KVQ_MAX_BUFFER_BYTES ||
        t->head_stride > KVQ_MAX_BUFFER_BYTES)
        return KVQ_E_BOUNDS;
    return (t->offset | t->token_stride | t->head_stride) % element_bytes(t) ? KVQ_E_INVALID
                                                                             : KVQ_OK;
}

// Rows [row, row + n) of heads x dim.
static int check_rows(const struct kvq_tensor *t, uint32_t heads, uint32_t dim, uint64_t row,
                      uint64_t n)
{
    const struct kvq_rows r = {.start = t->offset,
                               .row_stride = t->token_stride,
                               .head_stride = t->head_stride,
                               .first = row,
                               .n = n,
                               .heads = heads,
                               .width = dim * element_bytes(t)};
    if (n == 0)
        return KVQ_OK;
    if (kvq_rows_narrow(&r))
        return KVQ_E_INVALID;
    return kvq_rows_end(&r) <= t->buffer->bytes ? KVQ_OK : KVQ_E_BOUNDS;
}

static uint8_t *row_at(const struct kvq_local *local, const struct kvq_tensor *t, uint64_t row)
{
    return (uint8_t *)(uintptr_t)base_of(local, t) + t->offset + row * t->token_stride;
}

static struct kvq_view view_at(const struct kvq_local *local, const struct kvq_tensor *t,
                               uint64_t row)
{
    return (struct kvq_view){row_at(local, t, row), (int64_t)t->token_stride,
                             (int64_t)t->head_stride, t->dtype};
}

// ---- One entry ----

// What one entry asks for.
struct part {
    const struct kvq_work *work;
    const struct kvq_entry *entry;
    const struct kvq__local_session *session;
    const struct kvq__local_layer *layer, *source;
    const struct kvq_tensor *k, *v; // of the step; NULL: none are needed
};

static int check_queries(const struct kvq_local *local, const struct part *p)
{
    const struct kvq_entry *e = p->entry;
    const struct kvq_shape *s = &p->layer->shape;
    const struct kvq_work *w = p->work;
    if (e->queries == 0 || (e->append && e->queries > e->append))
        return KVQ_E_INVALID;
    if (e->queries > (local->here.driver ? KVQ_MAX_GPU_QUERIES : KVQ_MAX_QUERY_TOKENS))
        return KVQ_E_LIMIT;
    int rc = check_rows(&w->q, s->q_heads, kvq_row_dim(s), e->q_row, e->queries);
    if (rc == KVQ_OK)
        rc = check_rows(&w->out, s->q_heads, kvq_row_dim(s), e->q_row, e->queries);
    if (rc || !w->lse.buffer)
        return rc;
    if (s->q_heads > 1 && w->lse.head_stride != sizeof(float))
        return KVQ_E_INVALID;
    return check_rows(&w->lse, s->q_heads, 1, e->q_row, e->queries);
}

// The step's K and V: given with this call, or by an earlier one for the layer that is read.
static int find_tail(const struct kvq_local *local, struct part *p)
{
    const struct kvq_entry *e = p->entry;
    const struct kvq_shape *s = &p->layer->shape;
    bool owns = p->layer->source == p->work->layer;
    if (e->append == 0)
        return KVQ_OK;
    if (p->work->k.buffer && !owns)
        return KVQ_E_INVALID;
    p->k = p->work->k.buffer ? &p->work->k : &local->k[p->layer->source];
    p->v = p->work->k.buffer ? &p->work->v : &local->v[p->layer->source];
    if (!p->k->buffer) {
        p->k = p->v = NULL;
        return p->work->flags & KVQ_PAST_ONLY ? KVQ_OK : KVQ_E_INCOMPLETE;
    }
    int rc = check_rows(p->k, s->kv_heads, kvq_row_dim(s), e->row, e->append);
    return rc ? rc : check_rows(p->v, s->kv_heads, kvq_row_dim(s), e->row, e->append);
}

static int check_part(const struct kvq_local *local, struct part *p)
{
    int rc = kvq__local_member(local, p->entry);
    if (rc)
        return rc;
    p->session = kvq__local_find(local, p->entry->session);
    if (p->work->layer >= p->session->n_layers)
        return KVQ_E_SHAPE;
    p->layer = &p->session->layers[p->work->layer];
    p->source = &p->session->layers[p->layer->source];
    rc = find_tail(local, p);
    return rc ? rc : check_queries(local, p);
}

// ---- What a call writes ----

bool kvq__local_row_taken(const struct kvq_entry *entries, uint32_t i, uint64_t *from, uint64_t *to)
{
    uint64_t row = entries[i].q_row, end = row + entries[i].queries;
    for (uint32_t j = row < *to && *from < end ? 0 : i; j < i; j++) {
        const struct kvq_entry *other = &entries[j];
        if (other->status == KVQ_OK && row < (uint64_t)other->q_row + other->queries &&
            other->q_row < end)
            return true;
    }
    *from = row < *from ? row : *from;
    *to = end > *to ? end : *to;
    return false;
}

// What the entries without an error touch of a layer's tensors: of K and V (tokens), or of Q, out
// and lse. Widths are in values, and nothing is said of where the tensor is.
static struct kvq_rows touched_by(const struct kvq_local *local, const struct kvq_entry *entries,
                                  uint32_t n, uint32_t layer, bool tokens)
{
    struct kvq_rows all = {0};
    for (uint32_t i = 0; i < n; i++) {
        const struct kvq_entry *e = &entries[i];
        if (e->status || (tokens ? e->append : e->queries) == 0)
            continue;
        const struct kvq__local_session *s = kvq__local_find(local, e->session);
        assert(s);
        if (layer >= s->n_layers)
            continue;
        const struct kvq_shape *shape = &s->layers[layer].shape;
        if (tokens)
            kvq_rows_add(&all, e->row, e->append, shape->kv_heads, kvq_row_dim(shape));
        else
            kvq_rows_add(&all, e->q_row, e->queries, shape->q_heads, kvq_row_dim(shape));
    }
    return all;
}

// The same rows of one tensor, of so many values each.
static struct kvq_rows touched_rows(const struct kvq_local *local, const struct kvq_tensor *t,
                                    const struct kvq_rows *all, uint32_t values)
{
    struct kvq_rows r = *all;
    if (!t->buffer)
        return (struct kvq_rows){0};
    r.start = (uint64_t)(uintptr_t)row_at(local, t, 0);
    r.row_stride = t->token_stride;
    r.head_stride = t->head_stride;
    r.width = values * element_bytes(t);
    return r;
}

// K and V that an earlier layer of the step gave are read until its end, too.
static bool meets_step(const struct kvq_local *local, const struct kvq_rows *out,
                       const struct kvq_rows *lse)
{
    for (uint32_t l = 0; l < local->n_layers; l++)
        for (int j = 0; j < 2 && local->k[l].buffer; j++)
            if (kvq_rows_meet(out, &local->given[l][j]) || kvq_rows_meet(lse, &local->given[l][j]))
                return true;
    return false;
}

int kvq__local_check_outputs(const struct kvq_local *local, const struct kvq_work *w,
                             const struct kvq_entry *entries, uint32_t n, bool captured)
{
    uint32_t i = 0;
    while (i < n && entries[i].status)
        i++;
    if (i == n)
        return KVQ_OK;
    const struct kvq_rows q = touched_by(local, entries, n, w->layer, false);
    const struct kvq_rows kv = touched_by(local, entries, n, w->layer, true);
    const struct kvq_rows out = touched_rows(local, &w->out, &q, q.width);
    const struct kvq_rows lse = touched_rows(local, &w->lse, &q, 1);
    const struct kvq_rows in[] = {touched_rows(local, &w->q, &q, q.width),
                                  touched_rows(local, &w->k, &kv, kv.width),
                                  touched_rows(local, &w->v, &kv, kv.width)};
    bool bad = kvq_rows_clash(&out, &lse, in);
    bad = bad || (!captured && meets_step(local, &out, &lse));
    if (!bad)
        return KVQ_OK;
    return kvq__set_error(
        KVQ_E_INVALID,
        "attend, layer %u of %u sessions: out (offset %llu, strides %llu and %llu) or "
        "lse overlaps itself, the other, or Q, K or V of the step, which are read "
        "until its end",
        w->layer, n, (unsigned long long)w->out.offset, (unsigned long long)w->out.token_stride,
        (unsigned long long)w->out.head_stride);
}

// ---- The call of the kernels ----

// The pages of what is committed: kernels on a GPU read the table there, which by then says what
// its copy says here.
static void put_pages(const struct part *p, struct kvq_attend *a)
{
    const struct kvq_table_layer *t = p->source->pages;
    uint64_t past = p->session->past;
    if (p->session->piece.at) {
        a->pages = (const struct kvq_page *)(uintptr_t)p->source->pages_there;
        a->n_pages = (uint32_t)((past + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS);
        a->extras = past ? (const uint8_t *)(uintptr_t)t->extras : NULL;
    } else {
        a->pages = (const struct kvq_page *)(const void *)(t + 1);
        a->n_pages = t->n_pages;
        a->extras = (const uint8_t *)(uintptr_t)t->extras;
        a->pool = t->extras && p->source->format->outliers ? t->outliers : NULL;
    }
}

static struct kvq_attend call_of(const struct kvq_local *local, const struct part *p)
{
    const struct kvq_work *w = p->work;
    const struct kvq_entry *e = p->entry;
    assert(p->session->in_step && p->session->past == e->position);
    struct kvq_attend a = {
        .format = p->layer->format,
        .shape = &p->layer->shape,
        .flags = w->flags & KVQ_PAST_ONLY ? KVQ_ATTEND_PAST_ONLY : 0,
        .path = p->session->path,
        .book = &p->source->book,
        .past_tokens = p->session->past,
        .step_tokens = e->append,
        .q_start = p->session->past + (e->append ? e->append - e->queries : 0),
        .q_tokens = e->queries,
        .q = view_at(local, &w->q, e->q_row),
        .out = row_at(local, &w->out, e->q_row),
        .out_token_stride = (int64_t)w->out.token_stride,
        .out_head_stride = (int64_t)w->out.head_stride,
        .out_dtype = w->out.dtype,
        .lse_token_stride = (int64_t)w->lse.token_stride,
    };
    put_pages(p, &a);
    if (w->lse.buffer)
        a.lse = (float *)(void *)row_at(local, &w->lse, e->q_row);
    if (p->k && !(a.flags & KVQ_ATTEND_PAST_ONLY)) {
        a.fresh_start = p->session->past;
        a.fresh_tokens = e->append;
        a.fresh_k = view_at(local, p->k, e->row);
        a.fresh_v = view_at(local, p->v, e->row);
    }
    return a;
}

int kvq__local_check_part(const struct kvq_local *local, const struct kvq_work *work,
                          const struct kvq_entry *entry)
{
    struct part p = {.work = work, .entry = entry};
    return check_part(local, &p);
}

struct kvq_attend kvq__local_call(const struct kvq_local *local, const struct kvq_work *work,
                                  const struct kvq_entry *entry)
{
    struct part p = {.work = work, .entry = entry};
    int rc = check_part(local, &p);
    assert(rc == KVQ_OK);
    (void)rc;
    return call_of(local, &p);
}

// ---- Plans ----

// Partial results of jobs that threads share; false if there is no room for another's.
static bool take_partials(struct kvq_local *local, struct kvq_attend_job *job, size_t *used)
{
    assert(*used <= KVQ__LOCAL_PARTIALS);
    size_t bytes = (job->plan.partial_bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (bytes > KVQ__LOCAL_PARTIALS - *used)
        return false;
    job->partials = bytes ? local->partials + *used : NULL;
    *used += bytes;
    return true;
}

// The same bits, whatever the plan.
static void plan_all(struct kvq_local *local, uint32_t n)
{
    size_t used = 0;
    kvq_attend_plan_batch(local->kernels, local->sorted, n, local->threads);
    for (uint32_t i = 0; i < n; i++) {
        struct kvq_attend_job *job = local->sorted[i];
        if (!take_partials(local, job, &used))
            kvq_attend_plan_whole(&job->call, &job->plan);
    }
}

// Blocks that sessions share are unpacked once, if there is room for the partial results.
static bool share_blocks(struct kvq_local *local, uint32_t n)
{
    size_t used = 0;
    if (n < 2 || !kvq_attend_share(local->sorted, n))
        return true;
    for (uint32_t i = 0; i < n; i++)
        if (!take_partials(local, local->sorted[i], &used))
            return false;
    return true;
}

static void plan_jobs(struct kvq_local *local, uint32_t n)
{
    assert(n > 0 && n <= KVQ_MAX_BATCH);
    plan_all(local, n);
    if (!share_blocks(local, n))
        plan_all(local, n);
}

// ---- Threads ----

// A stage that lanes work on: each has a workspace, and takes the next item until there is none.
struct stage {
    const struct kvq_local *local;
    void (*run)(const struct kvq_kernels *k, const struct kvq_attend_job *job, uint32_t item,
                void *workspace);
    uint32_t n_jobs, n_items;
    uint32_t taken; // a word
};

static void run_items(struct stage *s, void *workspace)
{
    const struct kvq_local *local = s->local;
    uint32_t item, job = 0;
    while ((item = kvq_word_add(&s->taken, 1) - 1) < s->n_items) {
        while (item >= local->first_item[job + 1])
            job++;
        assert(job < s->n_jobs);
        s->run(local->kernels, local->sorted[job], item - local->first_item[job], workspace);
    }
}

static void run_lane(void *arg, uint32_t lane)
{
    struct stage *s = arg;
    run_items(s, s->local->workspaces + lane * workspace_bytes());
}

static void run_worker(void *arg, uint32_t lane, void *workspace)
{
    (void)lane;
    run_items(arg, workspace);
}

static void run_stage(struct stage *s)
{
    const struct kvq_local *local = s->local;
    uint32_t lanes = local->threads < s->n_items ? local->threads : s->n_items;
    assert(lanes <= 1 || local->workers || local->parallel);
    if (lanes > 1 && local->workers)
        kvq_pool_run(local->workers, run_worker, s, lanes);
    else if (lanes > 1)
        local->parallel(local->parallel_context, lanes, run_lane, s);
    else if (lanes == 1)
        run_lane(s, 0);
}

static void run_jobs(struct kvq_local *local, uint32_t n)
{
    struct stage items = {.local = local, .run = kvq_attend_item, .n_jobs = n};
    struct stage merges = {.local = local, .run = kvq_attend_merge, .n_jobs = n};
    local->first_item[0] = 0;
    for (uint32_t i = 0; i < n; i++)
        local->first_item[i + 1] = items.n_items += local->sorted[i]->plan.items;
    run_stage(&items);
    for (uint32_t i = 0; i < n; i++)
        local->first_item[i + 1] = merges.n_items += kvq_attend_merges(local->sorted[i]);
    run_stage(&merges);
}

// ---- The call ----

static bool same_tensor(const struct kvq_tensor *a, const struct kvq_tensor *b)
{
    return a->buffer == b->buffer && a->offset == b->offset && a->token_stride == b->token_stride &&
           a->head_stride == b->head_stride && a->dtype == b->dtype;
}

// For the step's end, which hands them to the daemon.
void kvq__local_note(struct kvq_local *local, const struct kvq_work *w)
{
    assert(w->layer < KVQ_MAX_LAYERS);
    struct kvq_tensor *k = &local->k[w->layer], *v = &local->v[w->layer];
    bool again = k->buffer && same_tensor(k, &w->k) && same_tensor(v, &w->v);
    local->mixed |= k->buffer && !again;
    if (!again)
        memset(local->given[w->layer], 0, sizeof local->given[w->layer]);
    *k = w->k;
    *v = w->v;
    if (local->n_layers <= w->layer)
        local->n_layers = w->layer + 1;
}

void kvq__local_note_rows(struct kvq_local *local, const struct kvq_work *w,
                          const struct kvq_entry *entries, uint32_t n)
{
    assert(w->layer < local->n_layers && local->k[w->layer].buffer);
    struct kvq_rows *given = local->given[w->layer];
    const struct kvq_rows all = touched_by(local, entries, n, w->layer, true);
    const struct kvq_rows rows[] = {touched_rows(local, &w->k, &all, all.width),
                                    touched_rows(local, &w->v, &all, all.width)};
    for (int j = 0; j < 2; j++) {
        if (given[j].n)
            kvq_rows_add(&given[j], rows[j].first, rows[j].n, rows[j].heads, rows[j].width);
        else
            given[j] = rows[j];
    }
}

int kvq__local_check_work(const struct kvq_local *local, const struct kvq_work *w)
{
    const struct kvq_tensor *tensors[] = {&w->k, &w->v, &w->q, &w->out, &w->lse};
    struct kvq_request request = {.op = w->k.buffer ? KVQ_OP_APPEND_ATTEND : KVQ_OP_ATTEND};
    int rc = kvq__put_work(local->queue, w, &request);
    if (rc == KVQ_OK && w->pages.page_tokens)
        rc = kvq__set_error(KVQ_E_INVALID,
                            "attend: K and V cannot be paged where attention is in the "
                            "engine's context");
    if (rc == KVQ_OK && w->lse.buffer && w->lse.dtype != KVQ_DTYPE_F32)
        rc = kvq__set_error(KVQ_E_DTYPE, "attend: lse is fp32 (3); dtype %u was given",
                            w->lse.dtype);
    for (int i = 0; i < 5 && rc == KVQ_OK; i++) {
        static const char *const names[] = {"k", "v", "q", "out", "lse"};
        rc = check_attend_tensor(local, tensors[i]);
        if (rc)
            kvq__set_error(rc, "attend, layer %u: %s (offset %llu, strides %llu and %llu): %s",
                           w->layer, names[i], (unsigned long long)tensors[i]->offset,
                           (unsigned long long)tensors[i]->token_stride,
                           (unsigned long long)tensors[i]->head_stride, kvq_strerror(rc));
    }
    return rc;
}

// Makes a job of each entry that can be: *made of them.
static int make_jobs(struct kvq_local *local, const struct kvq_work *work,
                     struct kvq_entry *entries, uint32_t n, uint32_t *made)
{
    uint32_t m = 0;
    uint64_t from = UINT64_MAX, to = 0;
    bool appends = false;
    assert(n <= KVQ_MAX_BATCH);
    for (uint32_t i = 0; i < n; i++) {
        struct part p = {.work = work, .entry = &entries[i]};
        entries[i].status = check_part(local, &p);
        entries[i].value = entries[i].position;
        if (entries[i].status == KVQ_OK && kvq__local_row_taken(entries, i, &from, &to))
            entries[i].status = KVQ_E_INVALID;
        if (entries[i].status)
            continue;
        appends |= entries[i].append > 0;
        local->jobs[m] = (struct kvq_attend_job){.call = call_of(local, &p)};
        local->sorted[m] = &local->jobs[m];
        m++;
    }
    *made = m;
    int rc = kvq__local_check_outputs(local, work, entries, n, false);
    if (rc == KVQ_OK && appends && work->k.buffer) {
        kvq__local_note(local, work);
        kvq__local_note_rows(local, work, entries, n);
    }
    return rc;
}

static int attend_here(struct kvq_local *local, const struct kvq_work *work,
                       struct kvq_entry *entries, uint32_t n)
{
    uint32_t m;
    int rc = kvq__local_check_work(local, work);
    if (rc == KVQ_OK)
        rc = make_jobs(local, work, entries, n, &m);
    if (rc)
        return rc;
    if (m) {
        plan_jobs(local, m);
        run_jobs(local, m);
    }
    if (m < n)
        kvq__local_explain(local, work->k.buffer ? KVQ_OP_APPEND_ATTEND : KVQ_OP_ATTEND, work,
                           entries, n);
    return KVQ_OK;
}

int kvq_local_attend(kvq_local *local, const struct kvq_work *work, struct kvq_entry *entries,
                     uint32_t n)
{
    int rc = kvq__local_check_attend(local, work, entries, n);
    if (rc)
        return rc;
    rc = kvq__local_check_place(local, false);
    if (rc)
        return rc;
    if (*local->why)
        return kvq__through_attend(local, work, entries, n);
    rc = attend_here(local, work, entries, n);
    kvq__local_gave(local, work, entries, n, rc);
    return rc;
}
