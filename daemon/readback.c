// SPDX-License-Identifier: Apache-2.0
//
// Read: K and V of committed tokens back into a client's tensors, as attention sees them.
#include <string.h>

#include "daemon/state.h"

enum { CHUNK = 32 }; // tokens of one item

// ---- Start ----

static int open_views(struct kvq__queue *q)
{
    int rc = kvq__view_open(q, KVQ__VIEW_K);
    return rc ? rc : kvq__view_open(q, KVQ__VIEW_V);
}

static int check_entry(struct kvq__queue *q, uint32_t i)
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
    rc = kvq__view_rows(q, KVQ__VIEW_K, shape->kv_heads, shape->k_dim, e->row, e->append);
    if (rc == 0)
        rc = kvq__view_rows(q, KVQ__VIEW_V, shape->kv_heads, shape->v_dim, e->row, e->append);
    return rc < 0 ? kvq__entry_fail(q, i, rc, s->tokens) : 0;
}

enum kvq__progress kvq__op_read(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_pack, &kvq__pass_read};
    int rc = open_views(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_entry(q, i) == 0 && kvq__read_must_wait(q, i, q->header.layer))
            return KVQ__WAIT;
    kvq__hold_buffers(q);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i))
            kvq__hold_layer(q, i, q->header.layer);
    return kvq__request_run(q, passes, 2);
}

// ---- The pass ----

// How many of the tokens asked for are there: not behind the window, not past the end.
static uint64_t tokens_there(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    const struct kvq__session *s = q->work[i].session;
    const struct kvq__layer *l = &s->layers[s->layers[q->header.layer].source];
    uint64_t end = e->position + e->append, past = q->work[i].past;
    uint64_t from = (uint64_t)l->first_page * KVQ_BLOCK_TOKENS;
    end = end < past ? end : past;
    from = from > e->position ? from : e->position;
    return end > from ? end - from : 0;
}

static bool prepare(struct kvq__queue *q, uint32_t i)
{
    struct kvq__work *w = &q->work[i];
    const struct kvq_entry_wire *e = &q->entries[i];
    w->n_items = 0;
    if (w->session->dropped) {
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
        return true;
    }
    w->pages = kvq__arena_take(q, kvq__pages_of(w->past) * sizeof *w->pages);
    if (!w->pages)
        return false;
    w->n_pages = kvq__pages_view(w->session, q->header.layer, w->past, w->past, w->pages);
    uint64_t most = w->past - e->position;
    w->read.tokens = e->append < most ? e->append : most;
    uint32_t chunks = (uint32_t)((w->read.tokens + CHUNK - 1) / CHUNK);
    w->n_items = chunks * w->session->layers[q->header.layer].shape.kv_heads;
    q->results[i].value = tokens_there(q, i);
    return true;
}

static uint32_t count(const struct kvq__work *w)
{
    return w->n_items;
}

// Rounds to the client's 16-bit dtype as storing does: the first rows of a raw record are K's.
// K and V have the same head_dim.
static const uint8_t *round_rows(const struct kvq__queue *q, const float *rows, uint32_t n,
                                 uint8_t dtype, const struct kvq_shape *shape, uint8_t *record)
{
    struct kvq_shape one = *shape;
    struct kvq_store_counts ignored = {0};
    struct kvq_view from = {rows, (int64_t)(sizeof(float) * shape->k_dim), 0, KVQ_F32};
    one.dtype = dtype;
    kvq_store(q->core->config.kernels, &one, &from, &from, 0, 0, n, record, &ignored);
    return record;
}

// Writes rows [0, n) from row-major `from` into a view.
static void scatter(const struct kvq__queue *q, uint32_t view, uint64_t row, uint32_t head,
                    uint32_t n, const void *from, size_t row_bytes)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    uint8_t *to = kvq__view_data(q, view, row) + head * v->head_stride;
    for (uint32_t t = 0; t < n; t++)
        memcpy(to + t * v->token_stride, (const uint8_t *)from + t * row_bytes, row_bytes);
}

// Tokens of a chunk from `first` on that lie behind the window and are gone.
static uint32_t gone(const struct kvq__work *w, uint64_t first, uint32_t n)
{
    uint32_t t = 0;
    while (t < n && w->pages[(first + t) / KVQ_BLOCK_TOKENS].tokens == 0)
        t++;
    return t;
}

static void run(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    _Alignas(64) float k_rows[CHUNK * KVQ_MAX_HEAD_DIM], v_rows[CHUNK * KVQ_MAX_HEAD_DIM];
    _Alignas(64) uint8_t record[KVQ_BLOCK_TOKENS * KVQ_MAX_HEAD_DIM * 4];
    const struct kvq__work *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[q->header.layer];
    uint32_t head = item % l->shape.kv_heads;
    uint64_t first = (uint64_t)(item / l->shape.kv_heads) * CHUNK, from;
    uint32_t n = (uint32_t)(w->read.tokens - first < CHUNK ? w->read.tokens - first : CHUNK);
    uint32_t skip = gone(w, q->entries[i].position + first, n);
    if (skip == n)
        return;
    first += skip;
    from = q->entries[i].position + first;
    kvq_read(q->core->config.kernels, l->format, &l->shape, w->pages, w->n_pages, from, n - skip,
             head, k_rows, v_rows, workspace);
    for (uint32_t view = KVQ__VIEW_K; view <= KVQ__VIEW_V; view++) {
        const float *rows = view == KVQ__VIEW_K ? k_rows : v_rows;
        uint8_t dtype = kvq__view(q, view)->dtype;
        uint64_t row = q->entries[i].row + first;
        size_t row_bytes = (size_t)l->shape.k_dim * kvq__dtype_bytes(dtype);
        const void *source = rows;
        if (dtype != KVQ_F32)
            source = round_rows(q, rows, n - skip, dtype, &l->shape, record);
        scatter(q, view, row, head, n - skip, source, row_bytes);
    }
}

const struct kvq__pass kvq__pass_read = {prepare, {{count, run}}, 1, NULL};
