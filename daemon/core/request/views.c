// SPDX-License-Identifier: Apache-2.0
//
// Checks of what a request says about memory. Every number here is a client's and may be
// anything; ends are computed in 128 bits, so that nothing overflows.
#include "daemon/core/request/views.h"

#include <assert.h>
#include <string.h>

#include "daemon/core/state.h"
#include "proto/rows.h"

uint32_t kvq__dtype_bytes(uint8_t dtype)
{
    return dtype == KVQ_F16 || dtype == KVQ_BF16 ? 2 : dtype == KVQ_F32 ? 4 : 0;
}

const struct kvq_wire_view *kvq__view(const struct kvq__queue *q, uint32_t view)
{
    assert(view < KVQ__VIEWS);
    const struct kvq_wire_view *views[] = {&q->header.k,   &q->header.v,   &q->header.q,
                                           &q->header.out, &q->header.lse, &q->header.list};
    return views[view];
}

static bool is_padded(const struct kvq_wire_view *v)
{
    return !v->pad[0] && !v->pad[1] && !v->pad[2];
}

int kvq__view_open(struct kvq__queue *q, uint32_t view)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    uint32_t bytes = kvq__dtype_bytes(v->dtype);
    if (!is_padded(v))
        return KVQ_E_INVALID;
    struct kvq__buffer *b = kvq__buffer_get(q->client, v->buffer);
    if (!b)
        return KVQ_E_BUFFER;
    if (bytes == 0)
        return KVQ_E_DTYPE;
    if (v->offset > b->memory.bytes || v->token_stride > KVQ_MAX_BUFFER_BYTES ||
        v->head_stride > KVQ_MAX_BUFFER_BYTES)
        return KVQ_E_BOUNDS;
    if ((v->offset | v->token_stride | v->head_stride) % bytes)
        return KVQ_E_INVALID;
    q->buffers[view] = b;
    return 0;
}

// Rows [row, row + n) of heads x dim, by where they are in the view's buffer.
static struct kvq_rows rows_of(const struct kvq_wire_view *v, uint32_t heads, uint32_t dim,
                               uint64_t row, uint64_t n)
{
    return (struct kvq_rows){.start = v->offset,
                             .row_stride = v->token_stride,
                             .head_stride = v->head_stride,
                             .first = row,
                             .n = n,
                             .heads = heads,
                             .width = dim * kvq__dtype_bytes(v->dtype)};
}

int kvq__view_rows(const struct kvq__queue *q, uint32_t view, uint32_t heads, uint32_t dim,
                   uint64_t row, uint64_t n)
{
    const struct kvq_rows r = rows_of(kvq__view(q, view), heads, dim, row, n);
    assert(heads > 0 && q->buffers[view]);
    if (n == 0)
        return 0;
    if (kvq_rows_narrow(&r))
        return KVQ_E_INVALID;
    return kvq_rows_end(&r) <= q->buffers[view]->memory.bytes ? 0 : KVQ_E_BOUNDS;
}

uint8_t *kvq__view_data(const struct kvq__queue *q, uint32_t view, uint64_t row)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    const struct kvq__buffer_memory *m = &q->buffers[view]->memory;
    uint8_t *base = q->gpu ? (uint8_t *)(uintptr_t)m->gpu : m->host;
    assert(q->buffers[view]);
    return base + v->offset + row * v->token_stride;
}

int kvq__view_reach(const struct kvq__queue *q, uint32_t view, const struct kvq__session *s)
{
    const struct kvq__buffer_memory *m = &q->buffers[view]->memory;
    assert(q->buffers[view]);
    if (!s->pool->gpu)
        return m->host ? 0 : KVQ_E_BUFFER;
    if (!m->gpu || (m->on && m->on != s->pool->gpu))
        return KVQ_E_BUFFER;
    // Imported memory may start anywhere, and a GPU faults where a host would not.
    return m->gpu % kvq__dtype_bytes(kvq__view(q, view)->dtype) ? KVQ_E_INVALID : 0;
}

// ---- Outputs ----

// Rows of the entry in what the request writes.
static void written_rows(const struct kvq__queue *q, uint32_t i, uint64_t *from, uint64_t *to)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    bool read = q->header.op == KVQ_OP_READ;
    *from = read ? e->row : e->q_row;
    *to = *from + (read ? e->append : e->queries);
}

// How many entries in q->written begin before a row. Rows mostly come in order.
static uint32_t written_before(const struct kvq__queue *q, uint64_t row)
{
    uint64_t from, to;
    uint32_t low = 0, high = q->n_written, at = high - 1;
    while (low < high) {
        written_rows(q, q->written[at], &from, &to);
        if (from < row)
            low = at + 1;
        else
            high = at;
        at = (low + high) / 2;
    }
    return low;
}

int kvq__outputs_entry(struct kvq__queue *q, uint32_t i)
{
    uint64_t from, to, other_from, other_to;
    written_rows(q, i, &from, &to);
    if (from == to)
        return 0;
    uint32_t at = written_before(q, from);
    if (at > 0) {
        written_rows(q, q->written[at - 1], &other_from, &other_to);
        if (other_to > from)
            return KVQ_E_INVALID;
    }
    if (at < q->n_written) {
        written_rows(q, q->written[at], &other_from, &other_to);
        if (other_from < to)
            return KVQ_E_INVALID;
    }
    assert(q->n_written < KVQ_MAX_BATCH);
    memmove(&q->written[at + 1], &q->written[at], (q->n_written - at) * sizeof *q->written);
    q->written[at] = (uint16_t)i;
    q->n_written++;
    return 0;
}

// All that the request touches of a view's tensor, from its first row to its last; of entries with
// different shapes as if each had the largest.
static struct kvq_rows touched(const struct kvq__queue *q, uint32_t view)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    const struct kvq__buffer *b = q->buffers[view];
    bool tokens = view == KVQ__VIEW_K || view == KVQ__VIEW_V;
    struct kvq_rows r = {.row_stride = v->token_stride, .head_stride = v->head_stride};
    if (!b)
        return r;
    r.start = v->offset + (b->memory.gpu ? b->memory.gpu : (uint64_t)(uintptr_t)b->memory.host);
    for (uint32_t i = 0; i < q->header.count; i++) {
        const struct kvq_entry_wire *e = &q->entries[i];
        uint32_t row = tokens ? e->row : e->q_row, n = tokens ? e->append : e->queries;
        if (!kvq__entry_alive(q, i) || n == 0)
            continue;
        const struct kvq_shape *s = &q->work[i].session->layers[q->header.layer].shape;
        uint32_t dim = view == KVQ__VIEW_LSE ? 1 : kvq_row_dim(s);
        kvq_rows_add(&r, row, n, tokens ? s->kv_heads : s->q_heads,
                     dim * kvq__dtype_bytes(v->dtype));
    }
    return r;
}

int kvq__outputs_check(const struct kvq__queue *q)
{
    bool paged = q->header.flags & KVQ_REQ_PAGED_KV, reads = q->header.op == KVQ_OP_READ;
    bool appends = q->header.op == KVQ_OP_APPEND_ATTEND && !paged;
    struct kvq_rows k = {0}, v = {0};
    if (reads || appends) {
        k = touched(q, KVQ__VIEW_K);
        v = touched(q, KVQ__VIEW_V);
    }
    if (reads)
        return kvq_rows_fold(&k) || kvq_rows_fold(&v) || kvq_rows_meet(&k, &v) ? KVQ_E_INVALID : 0;
    const struct kvq_rows in[] = {touched(q, KVQ__VIEW_Q), k, v};
    const struct kvq_rows out = touched(q, KVQ__VIEW_OUT), lse = touched(q, KVQ__VIEW_LSE);
    return kvq_rows_clash(&out, &lse, in) ? KVQ_E_INVALID : 0;
}

// ---- Paged sources ----

uint32_t kvq__paged_count(const struct kvq_request *r, const struct kvq_entry_wire *e)
{
    uint64_t tokens = (uint64_t)e->list_token + e->append;
    assert(r->page_tokens > 0);
    return (uint32_t)((tokens + r->page_tokens - 1) / r->page_tokens);
}

// The first `to` tokens of one page.
static bool page_inside(const struct kvq__queue *q, uint32_t view, const struct kvq_shape *s,
                        uint32_t page, uint32_t to)
{
    uint64_t stride = view == KVQ__VIEW_K ? q->header.k_page_stride : q->header.v_page_stride;
    const struct kvq_rows r = rows_of(kvq__view(q, view), s->kv_heads, kvq_row_dim(s), 0, to);
    assert(to > 0 && to <= q->header.page_tokens && q->buffers[view]);
    return (kvq_wide)page * stride + kvq_rows_end(&r) <= q->buffers[view]->memory.bytes;
}

int kvq__paged_check(const struct kvq__queue *q, const struct kvq_entry_wire *e,
                     const struct kvq_shape *s, const int32_t *list)
{
    uint32_t n = kvq__paged_count(&q->header, e), size = q->header.page_tokens;
    uint32_t last = (uint32_t)(((uint64_t)e->list_token + e->append - 1) % size) + 1;
    const struct kvq_rows k = rows_of(&q->header.k, s->kv_heads, kvq_row_dim(s), 0, e->append);
    const struct kvq_rows v = rows_of(&q->header.v, s->kv_heads, kvq_row_dim(s), 0, e->append);
    if (kvq_rows_narrow(&k) || kvq_rows_narrow(&v))
        return KVQ_E_INVALID;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t to = i + 1 < n ? size : last;
        if (list[i] < 0 || !page_inside(q, KVQ__VIEW_K, s, (uint32_t)list[i], to) ||
            !page_inside(q, KVQ__VIEW_V, s, (uint32_t)list[i], to))
            return KVQ_E_BOUNDS;
    }
    return 0;
}

// ---- Lists ----

int kvq__list_open(struct kvq__queue *q)
{
    const struct kvq_wire_view *v = &q->header.list;
    if (!is_padded(v))
        return KVQ_E_INVALID;
    struct kvq__buffer *b = kvq__buffer_get(q->client, v->buffer);
    if (!b || !b->memory.host) // read here, wherever the sessions are
        return KVQ_E_BUFFER;
    if (v->offset > b->memory.bytes)
        return KVQ_E_BOUNDS;
    if (v->offset % sizeof(int32_t))
        return KVQ_E_INVALID;
    q->buffers[KVQ__VIEW_LIST] = b;
    return 0;
}

const int32_t *kvq__list_at(const struct kvq__queue *q, uint64_t element, uint64_t n)
{
    const struct kvq__buffer *b = q->buffers[KVQ__VIEW_LIST];
    assert(b);
    kvq_wide end = q->header.list.offset + ((kvq_wide)element + n) * sizeof(int32_t);
    if (end > b->memory.bytes)
        return NULL;
    return (const int32_t *)(const void *)(b->memory.host + q->header.list.offset) + element;
}
