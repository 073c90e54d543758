// SPDX-License-Identifier: Apache-2.0
//
// Append: K and V of one layer into the raw blocks that the step reserved.
#include "daemon/core/request/append.h"

#include <assert.h>

#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/views.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// ---- Checks ----

int kvq__append_open(struct kvq__queue *q)
{
    const struct kvq_request *r = &q->header;
    int rc = kvq__view_open(q, KVQ__VIEW_K);
    if (rc == 0)
        rc = kvq__view_open(q, KVQ__VIEW_V);
    if (rc < 0 || !(r->flags & KVQ_REQ_PAGED_KV))
        return rc;
    if (r->page_tokens == 0)
        return KVQ_E_INVALID;
    if ((r->k_page_stride % kvq__dtype_bytes(r->k.dtype)) ||
        (r->v_page_stride % kvq__dtype_bytes(r->v.dtype)))
        return KVQ_E_INVALID;
    return kvq__list_open(q);
}

int kvq__append_reach(const struct kvq__queue *q, uint32_t i, const struct kvq_shape *s)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    int rc = kvq__view_reach(q, KVQ__VIEW_K, q->work[i].session);
    rc = rc ? rc : kvq__view_reach(q, KVQ__VIEW_V, q->work[i].session);
    if (rc)
        return rc;
    if (q->header.flags & KVQ_REQ_PAGED_KV)
        return e->list_token < q->header.page_tokens ? 0 : KVQ_E_INVALID; // pages come later
    uint32_t dim = kvq_row_dim(s);
    rc = kvq__view_rows(q, KVQ__VIEW_K, s->kv_heads, dim, e->row, e->append);
    return rc ? rc : kvq__view_rows(q, KVQ__VIEW_V, s->kv_heads, dim, e->row, e->append);
}

void kvq__append_refused(struct kvq__queue *q, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    uint32_t layer = q->header.layer;
    if (!s || !q->step || s->step != q->step || q->work[i].handle->read_only ||
        q->entries[i].append == 0)
        return;
    s->in_step.spoiled |= layer >= s->n_layers || !kvq__layer_owns(s, layer);
}

static int check_append(struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    struct kvq__session *s = q->work[i].session;
    uint32_t layer = q->header.layer;
    if (layer >= s->n_layers)
        return kvq__entry_fail(q, i, KVQ_E_SHAPE, s->tokens);
    if (e->append == 0)
        return 0;
    if (s->step != q->step || !q->step)
        return kvq__entry_fail(q, i, KVQ_E_NO_STEP, s->tokens);
    if (q->work[i].handle->read_only)
        return kvq__entry_fail(q, i, KVQ_E_READ_ONLY, s->tokens);
    if (e->append != s->in_step.tokens || !kvq__layer_owns(s, layer) ||
        s->layers[layer].append != KVQ__NOT_APPENDED)
        return kvq__entry_fail(q, i, KVQ_E_INVALID, s->tokens);
    int rc = kvq__append_reach(q, i, &s->layers[layer].shape);
    return rc < 0 ? kvq__entry_fail(q, i, rc, s->tokens) : 0;
}

int kvq__append_check(struct kvq__queue *q, uint32_t i)
{
    int rc = check_append(q, i);
    if (rc < 0)
        kvq__append_refused(q, i);
    return rc;
}

void kvq__append_hold(struct kvq__queue *q, uint32_t i)
{
    assert(q->entries[i].append == 0 ||
           q->work[i].session->layers[q->header.layer].append == KVQ__NOT_APPENDED);
    if (q->entries[i].append)
        q->work[i].session->layers[q->header.layer].append = KVQ__APPENDING;
    kvq__hold_tail(q, i);
}

void kvq__append_failed(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__entry *w = &q->work[i];
    if (!w->tail_use || q->entries[i].append == 0 || w->session->in_step.serial != w->step_serial)
        return;
    struct kvq__layer *l = &w->session->layers[q->header.layer];
    if (l->append == KVQ__APPENDING)
        l->append = KVQ__NOT_APPENDED;
}

enum kvq__progress kvq__op_append(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_store};
    if (kvq__request_step(q) < 0 || !q->step)
        return kvq__request_end(q, KVQ_E_NO_STEP);
    int rc = kvq__append_open(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    kvq__hold_buffers(q);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_open_at(q, i, true) == 0 && kvq__append_check(q, i) == 0)
            kvq__append_hold(q, i);
    return kvq__request_run(q, passes, 1);
}

// ---- The pass ----

int kvq__list_copy(struct kvq__queue *q, uint32_t i, int32_t *list)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    uint32_t n = kvq__paged_count(&q->header, e);
    const volatile int32_t *from = kvq__list_at(q, e->row, n);
    if (!from)
        return KVQ_E_BOUNDS;
    for (uint32_t j = 0; j < n; j++)
        list[j] = from[j];
    return 0;
}

// A paged source: copies the page list, then checks it.
static int take_list(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__entry *w = &q->work[i];
    assert(w->store.list);
    int rc = kvq__list_copy(q, i, w->store.list);
    return rc ? rc
              : kvq__paged_check(q, &q->entries[i], &w->session->layers[q->header.layer].shape,
                                 w->store.list);
}

bool kvq__store_list(struct kvq__queue *q, uint32_t i, int32_t **list)
{
    *list = NULL;
    if (!(q->header.flags & KVQ_REQ_PAGED_KV))
        return true;
    *list = kvq__arena_take(q, kvq__paged_count(&q->header, &q->entries[i]) * sizeof **list);
    return *list != NULL;
}

static void find_append_pages(struct kvq__entry *w, const struct kvq__layer *l)
{
    uint32_t first = (uint32_t)(w->past / KVQ_BLOCK_TOKENS);
    assert(first + w->n_pages <= w->session->n_pages);
    for (uint32_t p = 0; p < w->n_pages; p++)
        w->pages[p] = (struct kvq_page){.raw = kvq__page(l, first + p)->raw.data};
}

static bool take_append_memory(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[q->header.layer];
    w->n_pages = kvq__pages_spanned(w->past, w->past + q->entries[i].append);
    assert(w->n_pages > 0);
    uint32_t items = w->n_pages * l->shape.kv_heads;
    w->pages = kvq__arena_take(q, w->n_pages * sizeof *w->pages);
    // On a GPU the session's counts are added to.
    w->store.counts = kvq__arena_take(q, items * sizeof *w->store.counts);
    if (!w->pages || !w->store.counts || !kvq__store_list(q, i, &w->store.list))
        return false;
    w->n_items = items;
    for (uint32_t j = 0; j < items; j++)
        w->store.counts[j] = (struct kvq_store_counts){0};
    find_append_pages(w, l);
    return true;
}

static bool prepare_append(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    bool paged = q->header.flags & KVQ_REQ_PAGED_KV;
    w->n_items = 0;
    if (q->entries[i].append == 0)
        return true;
    if (w->session->in_step.serial != w->step_serial) { // dropped, taken over, aborted
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, w->past);
        return true;
    }
    if (!take_append_memory(q, i))
        return false;
    w->store.source = kvq__store_source(q, i, w->store.list);
    int rc = paged ? take_list(q, i) : 0;
    if (rc < 0) // the layer gets nothing; the step goes on
        kvq__entry_fail(q, i, rc, w->past);
    return true;
}

static uint32_t count_append(const struct kvq__entry *w)
{
    return w->n_items;
}

struct kvq__source kvq__store_source(const struct kvq__queue *q, uint32_t i, const int32_t *list)
{
    uint32_t row = list ? 0 : q->entries[i].row;
    return (struct kvq__source){kvq__view_data(q, KVQ__VIEW_K, row),
                                kvq__view_data(q, KVQ__VIEW_V, row), kvq__view(q, KVQ__VIEW_K),
                                kvq__view(q, KVQ__VIEW_V), list};
}

uint32_t kvq__store_run(const struct kvq__queue *q, uint32_t i, const struct kvq__source *source,
                        uint32_t t, struct kvq_view *k, struct kvq_view *v)
{
    const struct kvq_request *r = &q->header;
    const struct kvq_wire_view *kv = source->k_view, *vv = source->v_view;
    uint64_t row = t, page = 0;
    uint32_t run = UINT32_MAX;
    assert(t < q->entries[i].append);
    if (source->list) {
        uint64_t at = (uint64_t)q->entries[i].list_token + t;
        page = (uint64_t)source->list[at / r->page_tokens];
        row = at % r->page_tokens;
        run = r->page_tokens - (uint32_t)row;
    }
    *k = (struct kvq_view){source->k + page * r->k_page_stride + row * kv->token_stride,
                           (int64_t)kv->token_stride, (int64_t)kv->head_stride, kv->dtype};
    *v = (struct kvq_view){source->v + page * r->v_page_stride + row * vv->token_stride,
                           (int64_t)vv->token_stride, (int64_t)vv->head_stride, vv->dtype};
    return run;
}

void kvq__store_page(const struct kvq__queue *q, uint32_t i, const struct kvq__store_part *part,
                     struct kvq_store_counts *counts)
{
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = part->layer;
    uint64_t start = (w->past / KVQ_BLOCK_TOKENS + part->page) * KVQ_BLOCK_TOKENS;
    uint64_t from = kvq__max(start, w->past), end = w->past + q->entries[i].append;
    uint64_t to = kvq__min(start + KVQ_BLOCK_TOKENS, end);
    assert(part->head < l->shape.kv_heads);
    while (from < to) {
        struct kvq_view k, v;
        uint64_t n = kvq__store_run(q, i, part->source, (uint32_t)(from - w->past), &k, &v);
        n = kvq__min(n, to - from);
        kvq_store(q->core->config.kernels, &l->shape, &k, &v, part->head, (uint32_t)(from - start),
                  (uint32_t)n, part->raw, counts);
        from += n;
    }
}

// The part of one page that one head has.
static void run_append(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[q->header.layer];
    uint32_t head = item % l->shape.kv_heads, page = item / l->shape.kv_heads;
    assert(page < w->n_pages);
    struct kvq__store_part part = {l, &w->store.source, (uint8_t *)w->pages[page].raw, page, head};
    (void)workspace;
    kvq__store_page(q, i, &part, &w->store.counts[item]);
}

struct kvq_store_counts kvq__store_counts_sum(const struct kvq_store_counts *counts, uint32_t n)
{
    struct kvq_store_counts sum = {0};
    for (uint32_t i = 0; i < n; i++) {
        sum.nonfinite += counts[i].nonfinite;
        sum.saturated += counts[i].saturated;
    }
    return sum;
}

static void finish_append(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    if (w->n_items == 0)
        return;
    struct kvq_store_counts sum = kvq__store_counts_sum(w->store.counts, w->n_items);
    if (s->in_step.serial != w->step_serial) {
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, w->past);
    } else if (sum.nonfinite) {
        kvq__step_leave(s);
        kvq__entry_fail(q, i, KVQ_E_NONFINITE, s->tokens);
    } else {
        assert(s->layers[q->header.layer].append == KVQ__APPENDING);
        assert(s->in_step.layers < s->n_owned);
        s->layers[q->header.layer].append = KVQ__APPENDED;
        s->in_step.layers++;
        s->saturated += sum.saturated;
    }
}

const struct kvq__pass kvq__pass_store = {.prepare = prepare_append,
                                          .stages = {{count_append, run_append}},
                                          .n_stages = 1,
                                          .finish = finish_append,
                                          .gpu_wave = kvq__gpu_store_wave,
                                          .gpu_room = kvq__gpu_store_room};
