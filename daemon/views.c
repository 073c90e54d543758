// SPDX-License-Identifier: Apache-2.0
//
// Checks of what a request says about memory. Every number here is a client's and may be
// anything; ends are computed in 128 bits, so that nothing overflows.
#include "daemon/state.h"

typedef unsigned __int128 wide;

uint32_t kvq__dtype_bytes(uint8_t dtype)
{
    return dtype == KVQ_F16 || dtype == KVQ_BF16 ? 2 : dtype == KVQ_F32 ? 4 : 0;
}

const struct kvq_wire_view *kvq__view(const struct kvq__queue *q, uint32_t view)
{
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

// Whether [heads][dim] at `start` lies inside the view's buffer.
static bool is_inside(const struct kvq__queue *q, uint32_t view, wide start, uint32_t heads,
                      uint32_t dim)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    wide end =
        start + (wide)(heads - 1) * v->head_stride + (uint64_t)dim * kvq__dtype_bytes(v->dtype);
    return end <= q->buffers[view]->memory.bytes;
}

static bool overlaps(const struct kvq_wire_view *v, uint32_t heads, uint32_t dim, uint64_t n)
{
    uint64_t width = (uint64_t)dim * kvq__dtype_bytes(v->dtype);
    return (heads > 1 && v->head_stride < width) || (n > 1 && v->token_stride < width);
}

int kvq__view_rows(const struct kvq__queue *q, uint32_t view, uint32_t heads, uint32_t dim,
                   uint64_t row, uint64_t n)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    if (n == 0)
        return 0;
    if (overlaps(v, heads, dim, n))
        return KVQ_E_INVALID;
    wide last = v->offset + ((wide)row + n - 1) * v->token_stride;
    return is_inside(q, view, last, heads, dim) ? 0 : KVQ_E_BOUNDS;
}

uint8_t *kvq__view_data(const struct kvq__queue *q, uint32_t view, uint64_t row)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    const struct kvq__buffer_memory *m = &q->buffers[view]->memory;
    uint8_t *base = q->gpu ? (uint8_t *)(uintptr_t)m->gpu : m->host;
    return base + v->offset + row * v->token_stride;
}

int kvq__view_reach(const struct kvq__queue *q, uint32_t view, const struct kvq__session *s)
{
    const struct kvq__buffer_memory *m = &q->buffers[view]->memory;
    if (!s->pool->gpu)
        return m->host ? 0 : KVQ_E_BUFFER;
    if (!m->gpu || (m->on && m->on != s->pool->gpu))
        return KVQ_E_BUFFER;
    // Imported memory may start anywhere, and a GPU faults where a host would not.
    return m->gpu % kvq__dtype_bytes(kvq__view(q, view)->dtype) ? KVQ_E_INVALID : 0;
}

// ---- Paged sources ----

uint32_t kvq__paged_count(const struct kvq_request *r, const struct kvq_entry_wire *e)
{
    uint64_t tokens = (uint64_t)e->list_token + e->append;
    return (uint32_t)((tokens + r->page_tokens - 1) / r->page_tokens);
}

// The first `to` tokens of one page.
static bool page_inside(const struct kvq__queue *q, uint32_t view, const struct kvq_shape *s,
                        uint32_t page, uint32_t to)
{
    const struct kvq_wire_view *v = kvq__view(q, view);
    uint64_t stride = view == KVQ__VIEW_K ? q->header.k_page_stride : q->header.v_page_stride;
    wide last = v->offset + (wide)page * stride + (wide)(to - 1) * v->token_stride;
    return is_inside(q, view, last, s->kv_heads, view == KVQ__VIEW_K ? s->k_dim : s->v_dim);
}

int kvq__paged_check(const struct kvq__queue *q, const struct kvq_entry_wire *e,
                     const struct kvq_shape *s, const int32_t *list)
{
    uint32_t n = kvq__paged_count(&q->header, e), size = q->header.page_tokens;
    uint32_t last = (uint32_t)(((uint64_t)e->list_token + e->append - 1) % size) + 1;
    if (overlaps(&q->header.k, s->kv_heads, s->k_dim, e->append) ||
        overlaps(&q->header.v, s->kv_heads, s->v_dim, e->append))
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
    wide end = q->header.list.offset + ((wide)element + n) * sizeof(int32_t);
    if (end > b->memory.bytes)
        return NULL;
    return (const int32_t *)(const void *)(b->memory.host + q->header.list.offset) + element;
}
