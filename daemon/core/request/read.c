// SPDX-License-Identifier: Apache-2.0
//
// Read: K and V of committed tokens back into a client's tensors, as attention sees them.
#include <assert.h>
#include <string.h>

#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/views.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

enum { CHUNK = KVQ_GROUP_TOKENS }; // tokens of one item

// ---- Start ----

static int open_read_views(struct kvq__queue *q)
{
    int rc = kvq__view_open(q, KVQ__VIEW_K);
    return rc ? rc : kvq__view_open(q, KVQ__VIEW_V);
}

static int check_read(struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    int rc = kvq__entry_open(q, i, false);
    if (rc < 0)
        return rc;
    struct kvq__session *s = q->work[i].session;
    if (q->header.layer >= s->n_layers)
        return kvq__entry_fail(q, i, KVQ_E_SHAPE, s->tokens);
    if (e->position > s->tokens)
        return kvq__entry_fail(q, i, KVQ_E_POSITION, s->tokens);
    const struct kvq_shape *shape = &s->layers[q->header.layer].shape;
    const uint32_t dim = kvq_row_dim(shape);
    rc = kvq__view_reach(q, KVQ__VIEW_K, s);
    rc = rc ? rc : kvq__view_reach(q, KVQ__VIEW_V, s);
    if (rc == 0)
        rc = kvq__view_rows(q, KVQ__VIEW_K, shape->kv_heads, dim, e->row, e->append);
    if (rc == 0)
        rc = kvq__view_rows(q, KVQ__VIEW_V, shape->kv_heads, dim, e->row, e->append);
    if (rc == 0)
        rc = kvq__outputs_entry(q, i);
    return rc < 0 ? kvq__entry_fail(q, i, rc, s->tokens) : 0;
}

// Which of the tokens asked for are there: not behind the window, not past the end.
static void find_range(struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    struct kvq__entry *w = &q->work[i];
    const struct kvq__session *s = w->session;
    uint64_t kept = kvq__first_kept(kvq__source_layer(s, q->header.layer), s->floor);
    uint64_t end = e->position + e->append;
    end = end < s->tokens ? end : s->tokens;
    w->read.from = kept > e->position ? kept : e->position;
    w->read.tokens = end > w->read.from ? (uint32_t)(end - w->read.from) : 0;
    q->results[i].value = w->read.tokens;
}

enum kvq__progress kvq__op_read(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_pack, &kvq__pass_read};
    int rc = open_read_views(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_read(q, i) == 0 && kvq__read_must_wait(q, i, q->header.layer))
            return KVQ__WAIT;
    rc = kvq__outputs_check(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    kvq__hold_buffers(q);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i)) {
            find_range(q, i);
            kvq__hold_layer(q, i, q->header.layer);
        }
    return kvq__request_run(q, passes, 2);
}

// ---- The pass ----

static bool prepare_read(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    w->n_items = 0;
    if (w->session->dropped) {
        w->part.more = false;
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
        return true;
    }
    assert(w->reading && w->read.tokens <= w->past);
    w->pages = kvq__arena_take(q, kvq__pages_of(w->past) * sizeof *w->pages);
    if (!w->pages)
        return false;
    w->n_pages = kvq__pages_view(w->session, q->header.layer, w->past, w->past, w->pages);
    const struct kvq__session *s = w->session;
    const struct kvq__layer *own = kvq__source_layer(s, q->header.layer);
    w->read.extras = kvq__extras_view(s, own, w->past);
    if (!kvq__outliers_view(q, own, &w->read.pool))
        return false;
    uint32_t chunks = (w->read.tokens + CHUNK - 1) / CHUNK;
    w->n_items = chunks * w->session->layers[q->header.layer].shape.kv_heads;
    return q->gpu ? kvq__gpu_read_prepare(q, i) : true;
}

static uint32_t count_read(const struct kvq__entry *w)
{
    return w->n_items;
}

// Rounds to the client's 16-bit dtype as storing does: a strip begins with the rows of K of its
// first head. K and V have the same head_dim.
static const uint8_t *round_rows(const struct kvq__queue *q, const float *rows, uint32_t n,
                                 uint8_t dtype, const struct kvq_shape *shape, uint8_t *strip)
{
    struct kvq_shape one = *shape; // rows of k_dim here, whatever the client's are
    one.head_dim = 0;
    struct kvq_store_counts ignored = {0};
    struct kvq_view from = {rows, (int64_t)(sizeof(float) * shape->k_dim), 0, KVQ_F32};
    assert(n <= CHUNK);
    one.dtype = dtype;
    kvq_store(q->core->config.kernels, &one, &from, &from, 0, 0, n, strip, &ignored);
    return strip;
}

// Writes rows [0, n) from row-major `from`, which has rows of k_dim, into a view.
static void scatter(const struct kvq__queue *q, uint32_t view, uint64_t row, uint32_t head,
                    uint32_t n, const void *from, const struct kvq_shape *shape)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    uint8_t *to = kvq__view_data(q, view, row) + head * v->head_stride;
    size_t value = kvq__dtype_bytes(v->dtype), stride = shape->k_dim * value;
    for (uint32_t t = 0; t < n; t++)
        memcpy(to + t * v->token_stride, (const uint8_t *)from + t * stride,
               kvq_row_dim(shape) * value);
}

static void run_read(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    _Alignas(64) float k_rows[CHUNK * KVQ_MAX_HEAD_DIM], v_rows[CHUNK * KVQ_MAX_HEAD_DIM];
    _Alignas(64) uint8_t strip[CHUNK * KVQ_MAX_HEAD_DIM * 4]; // of one head
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[q->header.layer];
    uint32_t head = item % l->shape.kv_heads;
    uint32_t first = item / l->shape.kv_heads * CHUNK;
    assert(first < w->read.tokens && l->shape.k_dim <= KVQ_MAX_HEAD_DIM);
    uint32_t n = w->read.tokens - first < CHUNK ? w->read.tokens - first : CHUNK;
    uint64_t from = w->read.from + first;
    uint64_t row = q->entries[i].row + (from - q->entries[i].position);
    struct kvq_reading reading = {
        .format = l->format,
        .shape = &l->shape,
        .pages = w->pages,
        .n_pages = w->n_pages,
        .book = &kvq__source_layer(w->session, q->header.layer)->book,
        .extras = w->read.extras,
        .pool = w->read.pool,
    };
    kvq_read_rows(q->core->config.kernels, &reading, from, n, head, k_rows, v_rows, workspace);
    for (uint32_t view = KVQ__VIEW_K; view <= KVQ__VIEW_V; view++) {
        const float *rows = view == KVQ__VIEW_K ? k_rows : v_rows;
        uint8_t dtype = kvq__view(q, view)->dtype;
        const void *source = rows;
        if (dtype != KVQ_F32)
            source = round_rows(q, rows, n, dtype, &l->shape, strip);
        scatter(q, view, row, head, n, source, &l->shape);
    }
}

const struct kvq__pass kvq__pass_read = {.prepare = prepare_read,
                                         .stages = {{count_read, run_read}},
                                         .n_stages = 1,
                                         .gpu_wave = kvq__gpu_read_wave,
                                         .gpu_room = kvq__gpu_read_room,
                                         .gpu_ops = kvq__gpu_read_ops};
