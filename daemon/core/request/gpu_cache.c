// SPDX-License-Identifier: Apache-2.0
//
// Storing, reading back and changing caches on a GPU, with one launch for all entries of a wave, or
// as many as the work stream's workspace asks for.
#include <assert.h>
#include <string.h>

#include "daemon/core/request/append.h"
#include "daemon/core/request/fork.h"
#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/views.h"

static const struct kvq__layer *own_layer(const struct kvq__queue *q, uint32_t i)
{
    return kvq__source_layer(q->work[i].session, q->header.layer);
}

// An array of jobs that a wave fills and launches.
#define THERE(wave, array) ((kvq_gpu_ptr)(uintptr_t)kvq__wave_there(wave, array))

// ---- Store ----

// Jobs of an entry: one, or one for each run of tokens in the engine's pages.
static uint32_t count_store_jobs(const struct kvq__queue *q, uint32_t i)
{
    return q->work[i].store.list ? kvq__paged_count(&q->header, &q->entries[i]) : 1;
}

size_t kvq__gpu_store_room(const struct kvq__queue *q, uint32_t i)
{
    if (q->work[i].n_items == 0)
        return 0;
    return count_store_jobs(q, i) * sizeof(struct kvq_gpu_store_job) + KVQ__RECIPE_ROOM;
}

static void fill_store(struct kvq__wave *wave, uint32_t i, struct kvq_gpu_store_job **next)
{
    struct kvq__queue *q = wave->queue;
    const struct kvq__entry *w = &q->work[i];
    const struct kvq_recipe *recipe = kvq__wave_recipe(wave, own_layer(q, i));
    const struct kvq_page *pages = kvq__wave_there(wave, w->pages);
    uint32_t n = q->entries[i].append;
    for (uint32_t t = 0; t < n; (*next)++) {
        struct kvq_gpu_store_job job = {
            .recipe = kvq__wave_there(wave, recipe),
            .pages = pages - w->past / KVQ_BLOCK_TOKENS, // the session's page 0
            .start = w->past + t,
            .counts = (void *)(uintptr_t)w->session->in_step.counts->at,
        };
        uint32_t run = kvq__store_run(q, i, &w->store.source, t, &job.k, &job.v);
        assert(run > 0);
        job.tokens = run < n - t ? run : n - t;
        t += job.tokens;
        **next = job;
    }
}

int kvq__gpu_store_wave(struct kvq__queue *q)
{
    struct kvq__wave wave;
    uint32_t n = 0, most = 0;
    kvq__wave_begin(&wave, q);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (kvq__wave_has(q, i)) {
            n += count_store_jobs(q, i);
            most = q->entries[i].append > most ? q->entries[i].append : most;
        }
    struct kvq_gpu_store_job *jobs = kvq__wave_take(&wave, n * sizeof *jobs), *next = jobs;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (kvq__wave_has(q, i))
            fill_store(&wave, i, &next);
    assert((size_t)(next - jobs) <= n);
    int rc = kvq__wave_copy(&wave);
    struct kvq_gpu_work work = kvq__wave_work(&wave, (uint32_t)(next - jobs));
    return rc ? rc
              : kvq__wave_launched(&wave, 1,
                                   kvq_gpu_store(kvq__gpu_kernels(wave.stream->gpu), &work,
                                                 THERE(&wave, jobs), most, wave.text,
                                                 sizeof wave.text));
}

// ---- Read ----

// Tokens are read in pieces; as many are launched together as fit the workspace side by side. An
// entry may be long, so a wave takes only some of its pieces.
enum {
    READ_PIECES = 32,
    READ_OPS = KVQ_GPU_READ_LAUNCHES + 1, // of what is launched together
};

static uint64_t read_bytes(const struct kvq_shape *s, uint32_t tokens)
{
    return (uint64_t)tokens * s->kv_heads * s->k_dim * 2 * sizeof(float);
}

// Tokens of an entry that fit the workspace at a time.
static uint32_t read_piece(const struct kvq__core *core, const struct kvq_shape *s)
{
    return (uint32_t)(core->config.work_stream_workspace / read_bytes(s, 1));
}

static uint32_t read_pieces(const struct kvq__queue *q, uint32_t i, uint32_t tokens)
{
    uint32_t piece = read_piece(q->core, &own_layer(q, i)->shape);
    assert(piece > 0);
    return (tokens + piece - 1) / piece;
}

enum { READ_PIECE_ROOM = sizeof(struct kvq_gpu_read_job) + 2 * sizeof(struct kvq_gpu_put) };

bool kvq__gpu_read_prepare(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    uint32_t from = w->part.more ? w->part.to : 0, left = w->read.tokens - from;
    size_t used = q->arena_used + q->wave_room + KVQ__WAVE_ROOM + KVQ__RECIPE_ROOM;
    uint32_t n = read_pieces(q, i, left), ops = kvq__work_stream_ops_left(q->stream);
    size_t most = used < q->arena_bytes ? (q->arena_bytes - used) / READ_PIECE_ROOM : 0;
    uint32_t deep = ops > q->wave_ops ? (ops - q->wave_ops) / READ_OPS : 0;
    n = n < READ_PIECES ? n : READ_PIECES;
    n = n < deep ? n : deep;
    n = n < most ? n : (uint32_t)most;
    if (n == 0 && left > 0)
        return false;
    uint64_t tokens = (uint64_t)n * read_piece(q->core, &own_layer(q, i)->shape);
    w->part.from = from;
    w->part.to = tokens < left ? from + (uint32_t)tokens : w->read.tokens;
    w->part.room = n * READ_PIECE_ROOM + KVQ__RECIPE_ROOM;
    w->part.ops = n * READ_OPS;
    w->part.more = w->part.to < w->read.tokens;
    return true;
}

size_t kvq__gpu_read_room(const struct kvq__queue *q, uint32_t i)
{
    return q->work[i].part.room;
}

uint32_t kvq__gpu_read_ops(const struct kvq__queue *q, uint32_t i)
{
    return q->work[i].part.ops;
}

static struct kvq_gpu_put put_of(const struct kvq__queue *q, uint32_t i, uint32_t view,
                                 uint64_t from, uint32_t n, const float *rows)
{
    const struct kvq_shape *s = &own_layer(q, i)->shape;
    const struct kvq_wire_view *v = kvq__view(q, view);
    uint64_t row = q->entries[i].row + (from - q->entries[i].position);
    assert(from >= q->entries[i].position);
    return (struct kvq_gpu_put){.from = rows,
                                .to = kvq__view_data(q, view, row),
                                .token_stride = (int64_t)v->token_stride,
                                .head_stride = (int64_t)v->head_stride,
                                .n = n,
                                .heads = s->kv_heads,
                                .dim = s->k_dim,
                                .dtype = v->dtype};
}

// The wave's pieces, and which of them are launched together.
struct reading {
    struct kvq__wave wave;
    struct kvq_gpu_read_job *jobs;
    struct kvq_gpu_put *puts; // two for each
    uint32_t n;
    uint64_t used; // bytes of the workspace, by those since the last launch
};

// Adds pieces of an entry where the workspace has room for them, or else at its beginning.
static void fill_reads(struct reading *r, uint32_t i)
{
    const struct kvq__queue *q = r->wave.queue;
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = own_layer(q, i);
    const uint32_t most = read_piece(q->core, &l->shape);
    struct kvq_gpu_read_job job = {
        .recipe = kvq__wave_there(&r->wave, kvq__wave_recipe(&r->wave, l)),
        .book = kvq__wave_there(&r->wave, kvq__wave_book(&r->wave, l)),
        .pages = kvq__wave_there(&r->wave, w->pages),
        .extras = w->read.extras,
        .pool = w->read.pool,
        .n_pages = w->n_pages,
    };
    for (uint32_t t = w->part.from; t < w->part.to; t += job.n) {
        job.from = w->read.from + t;
        job.n = w->part.to - t < most ? w->part.to - t : most;
        const uint64_t bytes = read_bytes(&l->shape, job.n);
        r->used = r->used + bytes > q->core->config.work_stream_workspace ? 0 : r->used;
        job.k_out = (float *)(uintptr_t)(r->wave.stream->workspace + r->used);
        job.v_out = job.k_out + (size_t)l->shape.kv_heads * job.n * l->shape.k_dim;
        r->used += bytes;
        assert(r->used <= q->core->config.work_stream_workspace);
        r->puts[2 * r->n] = put_of(q, i, KVQ__VIEW_K, job.from, job.n, job.k_out);
        r->puts[2 * r->n + 1] = put_of(q, i, KVQ__VIEW_V, job.from, job.n, job.v_out);
        r->jobs[r->n++] = job;
    }
}

// Launches the pieces [from, to), which lie side by side.
static int launch_reads(struct reading *r, uint32_t from, uint32_t to)
{
    struct kvq__wave *wave = &r->wave;
    const struct kvq_gpu *gpu = kvq__gpu_kernels(wave->stream->gpu);
    assert(from < to && to <= r->n);
    struct kvq_gpu_work jobs = kvq__wave_work(wave, to - from);
    struct kvq_gpu_work puts = kvq__wave_work(wave, 2 * (to - from));
    uint32_t most = 0;
    for (uint32_t i = from; i < to; i++)
        most = r->jobs[i].n > most ? r->jobs[i].n : most;
    int failed =
        kvq_gpu_read(gpu, &jobs, THERE(wave, r->jobs + from), most, wave->text, sizeof wave->text);
    failed = failed ? failed
                    : kvq_gpu_put_rows(gpu, &puts, THERE(wave, r->puts + 2 * from), wave->text,
                                       sizeof wave->text);
    return kvq__wave_launched(wave, READ_OPS, failed);
}

int kvq__gpu_read_wave(struct kvq__queue *q)
{
    struct reading r = {.n = 0};
    uint32_t n = 0;
    kvq__wave_begin(&r.wave, q);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (kvq__wave_has(q, i))
            n += read_pieces(q, i, q->work[i].part.to - q->work[i].part.from);
    r.jobs = kvq__wave_take(&r.wave, n * sizeof *r.jobs);
    r.puts = kvq__wave_take(&r.wave, 2 * (size_t)n * sizeof *r.puts);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (kvq__wave_has(q, i))
            fill_reads(&r, i);
    assert(r.n == n);
    int rc = kvq__wave_copy(&r.wave);
    const float *workspace = (const float *)(uintptr_t)r.wave.stream->workspace;
    for (uint32_t from = 0, to; rc == 0 && from < n; from = to) {
        for (to = from + 1; to < n && r.jobs[to].k_out != workspace; to++)
            ;
        rc = launch_reads(&r, from, to);
    }
    return rc;
}

// ---- Accept ----

size_t kvq__gpu_accept_room(const struct kvq__queue *q, uint32_t i)
{
    uint32_t layers = q->work[i].session->n_owned;
    return layers * (sizeof(struct kvq_gpu_keep) + KVQ__RECIPE_ROOM);
}

static void fill_keeps(struct kvq__wave *wave, uint32_t i, struct kvq_gpu_keep *jobs, uint32_t *n,
                       uint32_t *heads)
{
    const struct kvq__queue *q = wave->queue;
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__session *s = w->session;
    uint64_t start = w->past - q->entries[i].append;
    for (uint32_t layer = 0; layer < s->n_layers; layer++) {
        const struct kvq__layer *l = &s->layers[layer];
        if (!kvq__layer_owns(s, layer))
            continue;
        jobs[(*n)++] = (struct kvq_gpu_keep){
            .recipe = kvq__wave_there(wave, kvq__wave_recipe(wave, l)),
            .pages = kvq__wave_there(wave, w->pages + (size_t)layer * w->n_pages),
            .list = kvq__wave_there(wave, w->accept.list),
            .n = q->entries[i].list_token,
            .offset = (uint32_t)(start % KVQ_BLOCK_TOKENS),
        };
        *heads = l->shape.kv_heads > *heads ? l->shape.kv_heads : *heads;
    }
}

int kvq__gpu_accept_wave(struct kvq__queue *q)
{
    struct kvq__wave wave;
    uint32_t room = 0, n = 0, heads = 0;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        room += kvq__wave_has(q, i) ? q->work[i].session->n_owned : 0;
    kvq__wave_begin_for(&wave, q, room);
    struct kvq_gpu_keep *jobs = kvq__wave_take(&wave, room * sizeof *jobs);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (kvq__wave_has(q, i))
            fill_keeps(&wave, i, jobs, &n, &heads);
    assert(n == room);
    int rc = n ? kvq__wave_copy(&wave) : 0;
    struct kvq_gpu_work work = kvq__wave_work(&wave, n);
    return rc || n == 0 ? rc
                        : kvq__wave_launched(&wave, 1,
                                             kvq_gpu_keep_rows(kvq__gpu_kernels(wave.stream->gpu),
                                                               &work, THERE(&wave, jobs), heads,
                                                               wave.text, sizeof wave.text));
}

// ---- Fork ----

// Of a raw block: whole strips, then rows of K and of V. Of a packed one: codes, then sinks.
enum { FORK_JOBS = 3 };

size_t kvq__gpu_fork_room(const struct kvq__queue *q, uint32_t i)
{
    return FORK_JOBS * (size_t)q->work[i].n_items * sizeof(struct kvq_gpu_copy);
}

// K and V of every head: of so many sinks, half a record apart.
static struct kvq_gpu_copy *fill_sinks(const struct kvq__layer *l, const struct kvq__copy *c,
                                       struct kvq_gpu_copy *next)
{
    uint64_t record = l->sink_bytes / l->shape.kv_heads, row = 2ull * l->shape.k_dim;
    for (uint32_t half = 0; half < 2 && c->sinks; half++) {
        uint64_t at = l->packed_bytes + half * record / 2;
        *next++ = (struct kvq_gpu_copy){.to = c->to + at,
                                        .from = c->from + at,
                                        .stride = record,
                                        .bytes = (uint32_t)(c->sinks * row),
                                        .rows = l->shape.kv_heads};
    }
    return next;
}

static struct kvq_gpu_copy *fill_copy(const struct kvq__layer *l, const struct kvq__copy *c,
                                      struct kvq_gpu_copy *next)
{
    const struct kvq_raw_layout *raw = &l->raw_layout;
    uint32_t strips = c->tokens / KVQ_GROUP_TOKENS, rest = c->tokens % KVQ_GROUP_TOKENS;
    assert(!c->packed || c->tokens % KVQ_GROUP_TOKENS == 0);
    if (c->packed) {
        size_t n =
            l->layout.groups + (size_t)(c->tokens / KVQ_GROUP_TOKENS) * l->layout.group_bytes;
        *next++ = (struct kvq_gpu_copy){c->to,       c->from,          NULL, l->layout.record_bytes,
                                        (uint32_t)n, l->shape.kv_heads};
        return fill_sinks(l, c, next);
    }
    size_t k = (size_t)strips * raw->strip_bytes, v = k + raw->v_offset;
    if (strips)
        *next++ =
            (struct kvq_gpu_copy){c->to, c->from, NULL, raw->strip_bytes, raw->strip_bytes, strips};
    for (size_t at = k; rest && at <= v; at += raw->v_offset)
        *next++ = (struct kvq_gpu_copy){c->to + at,      c->from + at,          NULL,
                                        raw->part_bytes, rest * raw->row_bytes, l->shape.kv_heads};
    return next;
}

int kvq__gpu_fork_wave(struct kvq__queue *q)
{
    struct kvq__wave wave;
    uint32_t n = 0;
    kvq__wave_begin(&wave, q);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        n += kvq__wave_has(q, i) ? FORK_JOBS * q->work[i].n_items : 0;
    struct kvq_gpu_copy *jobs = kvq__wave_take(&wave, n * sizeof *jobs), *next = jobs;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        for (uint32_t j = 0; kvq__wave_has(q, i) && j < q->work[i].n_items; j++) {
            const struct kvq__copy *c = &q->work[i].fork.copies[j];
            next = fill_copy(&q->work[i].session->layers[c->layer], c, next);
        }
    assert((size_t)(next - jobs) <= n);
    if (next == jobs)
        return 0;
    int rc = kvq__wave_copy(&wave);
    struct kvq_gpu_work work = kvq__wave_work(&wave, (uint32_t)(next - jobs));
    return rc ? rc
              : kvq__wave_launched(&wave, 1,
                                   kvq_gpu_copy_rows(kvq__gpu_kernels(wave.stream->gpu), &work,
                                                     THERE(&wave, jobs), wave.text,
                                                     sizeof wave.text));
}
