// SPDX-License-Identifier: Apache-2.0
//
// Changes of course: truncate, and accept, which keeps some of the last tokens. Both wait until no
// request reads the session, and while they wait no new reader starts.
#include <assert.h>
#include <string.h>

#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/views.h"
#include "daemon/core/session/table.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// The check of both operations for an entry: `back` tokens are to be looked at again.
static int check_change(struct kvq__queue *q, uint32_t i, uint64_t back)
{
    int rc = kvq__entry_open_at(q, i, true);
    if (rc < 0)
        return rc;
    struct kvq__session *s = q->work[i].session;
    assert(s->floor <= s->tokens);
    if (kvq__in_step(s))
        return kvq__entry_fail(q, i, KVQ_E_BUSY, s->tokens);
    if (back > s->tokens - s->floor)
        return kvq__entry_fail(q, i, KVQ_E_ROLLBACK, s->floor);
    if (kvq__tables_need(s, q->work[i].handle->table,
                         s->tokens - back)) // other clients read those tokens in their contexts
        return kvq__entry_fail(q, i, KVQ_E_BUSY, s->tokens);
    return 0;
}

static uint64_t back_of(const struct kvq__queue *q, uint32_t i)
{
    return q->header.op == KVQ_OP_ACCEPT ? q->entries[i].append : q->entries[i].list_token;
}

// Checks all entries and takes their sessions; false if the request must wait.
static bool take_sessions(struct kvq__queue *q)
{
    bool ready = true;
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_change(q, i, back_of(q, i)) == 0 && q->work[i].session->exclusive)
            return false;
    for (uint32_t i = 0; i < q->header.count; i++) {
        if (!kvq__entry_alive(q, i))
            continue;
        struct kvq__session *s = q->work[i].session;
        if (s->exclusive) { // the request names the session twice
            kvq__entry_fail(q, i, KVQ_E_BUSY, s->tokens);
            continue;
        }
        kvq__hold_exclusive(q, i);
        ready = ready && !kvq__is_read(s) && s->entries.tail == 0;
    }
    return ready;
}

// ---- Truncate ----

enum kvq__progress kvq__op_truncate(struct kvq__queue *q)
{
    if (!take_sessions(q))
        return KVQ__WAIT;
    for (uint32_t i = 0; i < q->header.count; i++) {
        if (!kvq__entry_alive(q, i))
            continue;
        struct kvq__session *s = q->work[i].session;
        assert(s->exclusive == q && q->entries[i].list_token <= s->tokens - s->floor);
        kvq__session_count(s, s->tokens - q->entries[i].list_token);
        kvq__session_changed(s);
        kvq__ids_cut(s, s->tokens);
        kvq__pages_trim(s, s->tokens);
        q->results[i].value = s->tokens;
    }
    return kvq__request_end(q, 0);
}

// ---- Accept ----

enum kvq__progress kvq__op_accept(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_accept};
    int rc = kvq__list_open(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    if (!take_sessions(q))
        return KVQ__WAIT;
    kvq__hold_buffers(q);
    return kvq__request_run(q, passes, 1);
}

// Copies the indices out of the client's reach, then checks them.
static int copy_list(struct kvq__queue *q, uint32_t i, int32_t *list)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    const volatile int32_t *from = kvq__list_at(q, e->row, e->list_token);
    int64_t last = -1;
    if (!from)
        return KVQ_E_BOUNDS;
    for (uint32_t j = 0; j < e->list_token; j++) {
        list[j] = from[j];
        if (list[j] <= last || list[j] >= (int64_t)e->append)
            return KVQ_E_INVALID;
        last = list[j];
    }
    return 0;
}

// Raw blocks of the last tokens, [layer][page].
static void find_accept_pages(struct kvq__entry *w, uint32_t first_page)
{
    const struct kvq__session *s = w->session;
    assert(first_page + w->n_pages <= s->n_pages);
    for (uint32_t i = 0; i < s->n_layers; i++)
        for (uint32_t p = 0; kvq__layer_owns(s, i) && p < w->n_pages; p++)
            w->pages[i * w->n_pages + p].raw = kvq__page(&s->layers[i], first_page + p)->raw.data;
}

static bool prepare_accept(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    const struct kvq_entry_wire *e = &q->entries[i];
    w->n_items = 0;
    if (w->session->dropped) {
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
        return true;
    }
    assert(e->append <= w->past);
    uint32_t first_page = (uint32_t)((w->past - e->append) / KVQ_BLOCK_TOKENS);
    w->n_pages = kvq__pages_spanned(w->past - e->append, w->past);
    w->pages = kvq__arena_take(q, (size_t)w->n_pages * w->session->n_layers * sizeof *w->pages);
    w->accept.list = kvq__arena_take(q, e->list_token * sizeof *w->accept.list);
    if (!w->pages || !w->accept.list)
        return false;
    int rc = copy_list(q, i, w->accept.list);
    if (rc < 0) {
        kvq__entry_fail(q, i, rc, w->past);
        return true;
    }
    find_accept_pages(w, first_page);
    w->n_items = w->session->n_layers;
    return true;
}

static uint32_t count_accept(const struct kvq__entry *w)
{
    return w->n_items;
}

static void move_token(const struct kvq__layer *l, const struct kvq_page *pages, uint64_t from,
                       uint64_t to)
{
    uint32_t a = from % KVQ_BLOCK_TOKENS, b = to % KVQ_BLOCK_TOKENS;
    const uint8_t *source = pages[from / KVQ_BLOCK_TOKENS].raw;
    uint8_t *target = (uint8_t *)pages[to / KVQ_BLOCK_TOKENS].raw;
    assert(to < from);
    for (uint32_t h = 0; h < l->shape.kv_heads; h++) {
        uint32_t at = kvq_raw_at(&l->raw_layout, h, a, false);
        uint32_t to_at = kvq_raw_at(&l->raw_layout, h, b, false), v = l->raw_layout.v_offset;
        memcpy(target + to_at, source + at, l->raw_layout.row_bytes);
        memcpy(target + to_at + v, source + at + v, l->raw_layout.row_bytes);
    }
}

// One layer. Tokens only move down, in ascending order, so none is overwritten unread.
static void run_accept(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[item];
    uint64_t start = w->past - q->entries[i].append;
    uint64_t offset = start % KVQ_BLOCK_TOKENS;
    (void)workspace;
    if (!kvq__layer_owns(w->session, item))
        return;
    for (uint32_t j = 0; j < q->entries[i].list_token; j++)
        if ((uint32_t)w->accept.list[j] != j)
            move_token(l, w->pages + (size_t)item * w->n_pages,
                       offset + (uint64_t)w->accept.list[j], offset + j);
}

// Ids follow their tokens while the list of those that stay is there.
static void finish_accept(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__entry *w = &q->work[i];
    const struct kvq_entry_wire *e = &q->entries[i];
    if (!w->session->dropped)
        kvq__ids_accept(w->session, e->append, w->accept.list, e->list_token);
}

static void end_accept(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    const struct kvq_entry_wire *e = &q->entries[i];
    struct kvq__session *s = w->session;
    if (s->dropped) {
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
        return;
    }
    assert(s->exclusive == q);
    assert(s->tokens == w->past);
    kvq__ids_commit(s, w->past - e->append, e->list_token);
    kvq__session_count(s, w->past - e->append + e->list_token);
    kvq__session_changed(s);
    kvq__ids_cut(s, s->tokens);
    kvq__pages_trim(s, s->tokens);
    q->results[i].value = s->tokens;
}

const struct kvq__pass kvq__pass_accept = {.prepare = prepare_accept,
                                           .stages = {{count_accept, run_accept}},
                                           .n_stages = 1,
                                           .finish = finish_accept,
                                           .end = end_accept,
                                           .gpu_wave = kvq__gpu_accept_wave,
                                           .gpu_room = kvq__gpu_accept_room};
