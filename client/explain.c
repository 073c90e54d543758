// SPDX-License-Identifier: Apache-2.0
//
// Texts for what failed on a ring. A completion has room for a code and a number only; what the
// request asked for, how long its buffers are and what shape the session has is known here.
#include "client/internal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/kernels.h"
#include "proto/rows.h"

enum { EXTENTS = 5 }; // views of a request: k, v, q, out, lse

struct subject {
    kvq_queue *queue;
    const struct kvq_request *request;
    const struct kvq_step_work *step; // STEP: its layers; else NULL
    const struct kvq_entry *entry;
    uint32_t index;
    uint32_t shard;                     // 1 + the other shard that caused it; 0: none
    const struct kvq__handle *handle;   // NULL: not open here
    char where[128 + KVQ__SHOWN_BYTES]; // "append, layer 3, entry 5 (session "chat")"
};

static bool has_layer(unsigned op)
{
    return op == KVQ_OP_APPEND || op == KVQ_OP_ATTEND || op == KVQ_OP_APPEND_ATTEND ||
           op == KVQ_OP_READ;
}

static void name_request(char *where, size_t size, const struct kvq_request *r)
{
    if (has_layer(r->op))
        snprintf(where, size, "%s, layer %u", kvq__op_name(r->op), r->layer);
    else
        snprintf(where, size, "%s", kvq__op_name(r->op));
}

// ---- Where a view ends ----

struct extent {
    const char *name;
    const struct kvq_wire_view *view;
    uint64_t first, rows; // first row and number of rows
    uint32_t heads, dim, value_bytes;
};

// The byte behind the last one touched; UINT64_MAX if it does not fit 64 bits.
static uint64_t end_of(const struct extent *e)
{
    unsigned __int128 end = e->view->offset;
    if (e->rows == 0 || e->heads == 0)
        return 0;
    end += (unsigned __int128)(e->first + e->rows - 1) * e->view->token_stride;
    end += (unsigned __int128)(e->heads - 1) * e->view->head_stride;
    end += (uint64_t)e->dim * e->value_bytes;
    return end < UINT64_MAX ? (uint64_t)end : UINT64_MAX;
}

static size_t buffer_bytes(const kvq_client *client, uint32_t id)
{
    const struct kvq_buffer *b;
    TAILQ_FOREACH (b, &client->buffers, entry)
        if (b->id == id)
            return b->bytes;
    return 0;
}

static uint32_t value_bytes(uint8_t dtype)
{
    return dtype == KVQ_DTYPE_F32 ? 4 : 2;
}

// What the request touches of each view, by the session's shape. Returns how many there are.
static uint32_t extents_of(const struct subject *s, struct extent *out)
{
    const struct kvq_request *r = s->request;
    const struct kvq_entry *e = s->entry;
    const struct kvq__shape *shape = s->handle->shape;
    uint32_t n = 0;
    if (!shape || r->layer >= shape->layers)
        return 0;
    uint32_t kv = shape->layer[r->layer].kv_heads, qh = shape->layer[r->layer].q_heads;
    uint32_t kd = shape->layer[r->layer].k_dim, vd = shape->layer[r->layer].v_dim;
    if (!(r->flags & KVQ_REQ_PAGED_KV)) {
        out[n++] = (struct extent){"k", &r->k, e->row, e->append, kv, kd, value_bytes(r->k.dtype)};
        out[n++] = (struct extent){"v", &r->v, e->row, e->append, kv, vd, value_bytes(r->v.dtype)};
    }
    out[n++] = (struct extent){"q", &r->q, e->q_row, e->queries, qh, kd, value_bytes(r->q.dtype)};
    out[n++] =
        (struct extent){"out", &r->out, e->q_row, e->queries, qh, vd, value_bytes(r->out.dtype)};
    out[n++] = (struct extent){"lse", &r->lse, e->q_row, e->queries, qh, 1, 4};
    assert(n <= EXTENTS);
    return n;
}

// The first of n extents that ends behind its buffer.
static bool explain_extents(const struct subject *s, const char *where,
                            const struct extent *extents, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct extent *e = &extents[i];
        size_t bytes = buffer_bytes(s->queue->client, e->view->buffer);
        uint64_t end = end_of(e);
        if (e->view->buffer == 0 || end <= bytes)
            continue;
        kvq__set_error(KVQ_E_BOUNDS,
                       "%s: %s rows %" PRIu64 " to %" PRIu64 " (offset %" PRIu64
                       ", strides %" PRIu64 " and %" PRIu64 ", %u heads of %u) end at byte %" PRIu64
                       ", its buffer has %zu bytes",
                       where, e->name, e->first, e->first + e->rows - 1, e->view->offset,
                       e->view->token_stride, e->view->head_stride, e->heads, e->dim, end, bytes);
        return true;
    }
    return false;
}

static bool explain_step_bounds(const struct subject *s)
{
    const struct kvq__shape *shape = s->handle ? s->handle->shape : NULL;
    const struct kvq_entry *e = s->entry;
    uint32_t layers = shape && s->step && !s->step->pages.page_tokens ? s->step->n_layers : 0;
    for (uint32_t i = 0; i < layers && i < shape->layers; i++) {
        const struct kvq_step_layer l = kvq__step_layer(s->queue, s->step, i);
        uint32_t heads = shape->layer[i].kv_heads;
        const struct extent extents[2] = {
            {"k", &l.k, e->row, e->append, heads, shape->layer[i].k_dim, value_bytes(l.k.dtype)},
            {"v", &l.v, e->row, e->append, heads, shape->layer[i].v_dim, value_bytes(l.v.dtype)}};
        char where[sizeof s->where + 24];
        snprintf(where, sizeof where, "%s, layer %u", s->where, i);
        if (explain_extents(s, where, extents, 2))
            return true;
    }
    return false;
}

static bool explain_bounds(const struct subject *s)
{
    struct extent extents[EXTENTS];
    if (s->request->op == KVQ_OP_STEP)
        return explain_step_bounds(s);
    uint32_t n = has_layer(s->request->op) && s->handle ? extents_of(s, extents) : 0;
    return explain_extents(s, s->where, extents, n);
}

// ---- Bytes that overlap ----

// Of one tensor: strides by which rows or heads overlap.
static bool explain_strides(const struct subject *s)
{
    struct extent extents[EXTENTS];
    uint32_t n = s->handle ? extents_of(s, extents) : 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct extent *e = &extents[i];
        uint64_t width = (uint64_t)e->dim * e->value_bytes;
        bool lse = e->view == &s->request->lse && e->view->head_stride != width;
        if (e->view->buffer == 0 || e->rows == 0 ||
            !((e->heads > 1 && (e->view->head_stride < width || lse)) ||
              (e->rows > 1 && e->view->token_stride < width)))
            continue;
        kvq__set_error(KVQ_E_INVALID,
                       "%s: %s has strides of %" PRIu64 " bytes from token to token and %" PRIu64
                       " from head to head; a head's row has %" PRIu64
                       " bytes, and rows and heads do not overlap%s",
                       s->where, e->name, e->view->token_stride, e->view->head_stride, width,
                       lse ? "; heads of lse stand side by side" : "");
        return true;
    }
    return false;
}

// Of a request that writes: rows that an entry before this one writes.
static bool explain_shared_rows(const struct subject *s)
{
    const struct kvq_entry *e = s->entry, *first = e - s->index;
    bool read = s->request->op == KVQ_OP_READ;
    uint64_t from = read ? e->row : e->q_row, to = from + (read ? e->append : e->queries);
    for (uint32_t i = 0; s->request->op != KVQ_OP_APPEND && i < s->index; i++) {
        uint64_t other = read ? first[i].row : first[i].q_row;
        uint64_t end = other + (read ? first[i].append : first[i].queries);
        if (first[i].status || from >= end || other >= to)
            continue;
        kvq__set_error(KVQ_E_INVALID,
                       "%s: rows %" PRIu64 " to %" PRIu64
                       " are written for this entry, and rows %" PRIu64 " to %" PRIu64
                       " for entry %u; give each entry rows of its own (%s)",
                       s->where, from, to - 1, other, end - 1, i, read ? "row" : "q_row");
        return true;
    }
    return false;
}

// Adds what an entry touches, as if each had the largest shape.
static void widen(struct kvq_rows *r, const struct extent *e)
{
    uint64_t to = r->first + r->n;
    uint32_t width = e->dim * e->value_bytes;
    if (e->view->buffer == 0 || e->rows == 0)
        return;
    r->start = e->view->offset;
    r->row_stride = e->view->token_stride;
    r->head_stride = e->view->head_stride;
    r->first = r->n == 0 || e->first < r->first ? e->first : r->first;
    r->n = (e->first + e->rows > to ? e->first + e->rows : to) - r->first;
    r->heads = e->heads > r->heads ? e->heads : r->heads;
    r->width = width > r->width ? width : r->width;
}

// Of a whole request, which the daemon refuses if what it writes overlaps itself or what it reads.
static bool explain_overlap(kvq_queue *queue, const struct kvq__pending *p, const char *where)
{
    const struct kvq_request *r = &p->request;
    const struct kvq_wire_view *views[EXTENTS] = {&r->k, &r->v, &r->q, &r->out, &r->lse};
    static const char *const names[EXTENTS] = {"k", "v", "q", "out", "lse"};
    struct kvq_rows rows[EXTENTS] = {0};
    struct extent extents[EXTENTS];
    uint32_t from = r->op == KVQ_OP_READ ? 0 : 3, to = r->op == KVQ_OP_READ ? 2 : EXTENTS;
    if (p->status != KVQ_E_INVALID || !has_layer(r->op) || (r->flags & KVQ_REQ_PAGED_KV))
        return false;
    pthread_mutex_lock(&queue->client->table);
    for (uint32_t i = 0; i < p->n; i++) {
        struct subject s = {.queue = queue, .request = r, .entry = &p->entries[i]};
        s.handle = kvq__handle_find(queue->client, p->entries[i].session);
        uint32_t n = s.handle ? extents_of(&s, extents) : 0;
        for (uint32_t j = 0; j < n; j++)
            widen(&rows[j], &extents[j]);
    }
    pthread_mutex_unlock(&queue->client->table);
    for (uint32_t i = from; i < to; i++)
        for (uint32_t j = 0; j < EXTENTS; j++) {
            bool same = views[i]->buffer && views[i]->buffer == views[j]->buffer;
            if (!same || !(i == j ? kvq_rows_fold(&rows[i]) : kvq_rows_meet(&rows[i], &rows[j])))
                continue;
            kvq__set_error(KVQ_E_INVALID,
                           "%s: %s is written and overlaps %s in its buffer (offsets %" PRIu64
                           " and %" PRIu64 ")",
                           where, names[i], i == j ? "itself" : names[j], views[i]->offset,
                           views[j]->offset);
            return true;
        }
    return false;
}

// ---- What failed, by code ----

static bool explain_layer(const struct subject *s)
{
    const struct kvq__shape *shape = s->handle ? s->handle->shape : NULL;
    uint32_t layer = s->request->layer;
    if (shape && s->request->op == KVQ_OP_STEP && layer != shape->layers) {
        kvq__set_error(KVQ_E_SHAPE, "%s: K and V of %u layers were given, the session has %u",
                       s->where, layer, shape->layers);
        return true;
    }
    if (!has_layer(s->request->op) || !shape || layer < shape->layers)
        return false;
    kvq__set_error(KVQ_E_SHAPE, "%s: the session has %u layers, 0 to %u", s->where, shape->layers,
                   shape->layers - 1);
    return true;
}

static bool explain_limits(const struct subject *s)
{
    const struct kvq_entry *e = s->entry;
    if (s->request->op == KVQ_OP_FORK) // of a fork the daemon limits nothing else by this code
        kvq__set_error(
            KVQ_E_LIMIT,
            "%s: this client has %d sessions open, the most it can have; it was not forked; "
            "close some (kvq_session_close), or fork from another client",
            s->where, KVQ_MAX_OPEN);
    else if (e->append > KVQ_MAX_STEP_TOKENS)
        kvq__set_error(KVQ_E_LIMIT, "%s: %u tokens, at most %d go into one step", s->where,
                       e->append, KVQ_MAX_STEP_TOKENS);
    else if (e->queries > KVQ_MAX_QUERY_TOKENS)
        kvq__set_error(KVQ_E_LIMIT, "%s: %u query tokens, at most %d go into one call", s->where,
                       e->queries, KVQ_MAX_QUERY_TOKENS);
    else if (e->position + e->append > KVQ_MAX_SESSION_TOKENS)
        kvq__set_error(KVQ_E_LIMIT,
                       "%s: %" PRIu64 " and %u more tokens, a session holds at most %d", s->where,
                       e->position, e->append, KVQ_MAX_SESSION_TOKENS);
    else if (e->queries > KVQ_MAX_GPU_QUERIES)
        kvq__set_error(KVQ_E_LIMIT,
                       "%s: %u query tokens, at most %d go into one call for a session on a GPU",
                       s->where, e->queries, KVQ_MAX_GPU_QUERIES);
    else if (s->request->op == KVQ_OP_ATTEND || s->request->op == KVQ_OP_APPEND_ATTEND)
        kvq__set_error(KVQ_E_LIMIT,
                       "%s: one query token's attention to %" PRIu64
                       " tokens needs more memory than the daemon keeps for a call; keep sessions "
                       "of this shape shorter",
                       s->where, e->position + e->append);
    else
        return false;
    return true;
}

static bool explain_position(const struct subject *s)
{
    kvq__set_error(KVQ_E_POSITION,
                   "%s: position %" PRIu64 " was given, the session holds %" PRIu64
                   " tokens; nothing was done; take its count from kvq_session_info and send again "
                   "what lies behind it",
                   s->where, s->entry->position, s->entry->value);
    return true;
}

static bool explain_stale(const struct subject *s)
{
    kvq__set_error(
        KVQ_E_STALE, "%s: the handle is %s; its session was closed, dropped or lost; open it again",
        s->where, s->handle ? "known here, but no longer to the daemon" : "not open here");
    return true;
}

static bool explain_rollback(const struct subject *s)
{
    const struct kvq_entry *e = s->entry;
    if (s->request->op == KVQ_OP_FORK)
        kvq__set_error(KVQ_E_ROLLBACK,
                       "%s: it cannot be forked at %" PRIu64 " tokens, but at %" PRIu64
                       "; nothing was changed; forks begin where packed blocks end, and anywhere "
                       "in the newest tokens (max_rollback of them, and those not packed yet)",
                       s->where, e->position, e->value);
    else
        kvq__set_error(KVQ_E_ROLLBACK,
                       "%s: %u tokens back from %" PRIu64
                       " is too far; it can be shortened to %" PRIu64
                       " tokens and no further, nothing was changed; a session created with a "
                       "larger max_rollback (at most %d) can go further back",
                       s->where, s->request->op == KVQ_OP_TRUNCATE ? e->list_token : e->append,
                       e->position, e->value, KVQ_MAX_ROLLBACK);
    return true;
}

static bool appends(const struct kvq_request *r)
{
    return r->op == KVQ_OP_APPEND || r->op == KVQ_OP_APPEND_ATTEND;
}

// Whether K and V were handed to a layer that reads another's cache.
static bool appends_elsewhere(const struct subject *s, uint32_t *source)
{
    const struct kvq_request *r = s->request;
    const struct kvq__shape *shape = s->handle ? s->handle->shape : NULL;
    if (!appends(r) || !shape || r->layer >= shape->layers || s->entry->append == 0)
        return false;
    *source = shape->layer[r->layer].source;
    return *source != r->layer;
}

// A code of many causes; those that can be seen from here.
static bool explain_invalid(const struct subject *s)
{
    const struct kvq_request *r = s->request;
    const struct kvq_entry *e = s->entry;
    bool attends = r->op == KVQ_OP_ATTEND || r->op == KVQ_OP_APPEND_ATTEND;
    bool paged = r->flags & KVQ_REQ_PAGED_KV;
    uint32_t source;
    if (attends && e->queries == 0)
        kvq__set_error(KVQ_E_INVALID, "%s: 0 query tokens, at least 1 is needed", s->where);
    else if (attends && e->append && e->queries > e->append)
        kvq__set_error(KVQ_E_INVALID, "%s: %u query tokens, but the step has only %u tokens",
                       s->where, e->queries, e->append);
    else if (paged && e->list_token >= r->page_tokens)
        kvq__set_error(KVQ_E_INVALID, "%s: %u tokens to skip in the first page, pages hold %u",
                       s->where, e->list_token, r->page_tokens);
    else if (r->op == KVQ_OP_ACCEPT)
        kvq__set_error(KVQ_E_INVALID, "%s: its list of %u indices must be ascending and below %u",
                       s->where, e->list_token, e->append);
    else if (appends_elsewhere(s, &source))
        kvq__set_error(
            KVQ_E_INVALID,
            "%s: the layer has no cache of its own, it reads that of layer %u (kv_from): hand "
            "K and V to that layer alone; this step can only be aborted",
            s->where, source);
    else if (explain_strides(s) || explain_shared_rows(s))
        return true;
    else if (appends(r) && e->append && !paged)
        kvq__set_error(KVQ_E_INVALID,
                       "%s: the step has K and V of this layer already (all %u tokens are given at "
                       "once, once for each layer), or was begun with another number of tokens",
                       s->where, e->append);
    else if (r->op == KVQ_OP_APPEND || attends)
        kvq__set_error(
            KVQ_E_INVALID,
            "%s: %u tokens: all tokens of the step are appended at once, once for each "
            "layer with a cache of its own; strides and offsets are multiples of the dtype's "
            "size, rows and heads do not overlap, and no two entries write the same rows "
            "(q_row %u, %u queries)",
            s->where, e->append, e->q_row, e->queries);
    else if (r->op == KVQ_OP_READ)
        kvq__set_error(
            KVQ_E_INVALID,
            "%s: strides and offsets are multiples of the dtype's size, rows and heads do "
            "not overlap, and no two entries write the same rows (row %u, %u tokens)",
            s->where, e->row, e->append);
    else
        return false;
    return true;
}

static const char *kind_of_place(const kvq_client *client, const struct kvq_wire_view *view)
{
    const struct kvq_buffer *b;
    TAILQ_FOREACH (b, &client->buffers, entry)
        if (b->id == view->buffer)
            return b->kind == KVQ__BUFFER_HOST ? "the host" : "a GPU";
    return "none";
}

// Of an entry: the buffers are there, but this session's place cannot reach one of them.
static bool explain_reach(const struct subject *s)
{
    const struct kvq_request *r = s->request;
    const kvq_client *c = s->queue->client;
    if (!has_layer(r->op))
        return false;
    kvq__set_error(
        KVQ_E_BUFFER,
        "%s: a tensor lies where the session cannot reach it (k: %s, v: %s, q: %s, out: %s, "
        "lse: %s); of sessions on a GPU they lie on that GPU, or in host memory that the "
        "daemon could register; of sessions on the host in host memory%s",
        s->where, kind_of_place(c, &r->k), kind_of_place(c, &r->v), kind_of_place(c, &r->q),
        kind_of_place(c, &r->out), kind_of_place(c, &r->lse),
        r->flags & KVQ_REQ_ON_STREAM ? "; or the session is not of the GPU whose stream was given"
                                     : "");
    return true;
}

// Failures of one shard of a session that another one is the cause of.
static bool explain_shard(const struct subject *s)
{
    assert(s->shard > 0);
    uint32_t shard = s->shard - 1;
    switch (s->entry->status) {
    case KVQ_E_NO_SESSION:
        kvq__set_error(
            KVQ_E_NO_SESSION,
            "%s: shard %u of this session does not exist; all its shards are opened before "
            "the first step of any",
            s->where, shard);
        return true;
    case KVQ_E_CANCELLED:
        kvq__set_error(
            KVQ_E_CANCELLED,
            "%s: shard %u left the step (it was aborted, closed or taken over, its client "
            "died, or its K or V were not whole or not finite), so no shard has it; this one "
            "stands at %" PRIu64 " tokens; begin the step again on all of them",
            s->where, shard, s->entry->value);
        return true;
    case KVQ_E_BUSY:
        kvq__set_error(
            KVQ_E_BUSY,
            "%s: its step has ended and waits for shard %u, whose step this very queue would "
            "have to end first; end the step on all shards before anything else",
            s->where, shard);
        return true;
    case KVQ_E_POSITION:
        kvq__set_error(
            KVQ_E_POSITION,
            "%s: shard %u began its step at another count, or ends it at another (%" PRIu64
            " tokens): nothing was committed on any shard; kvqctl session show says where "
            "each stands; truncate those that are ahead, and append alike to all",
            s->where, shard, s->entry->value);
        return true;
    default:
        return false;
    }
}

static bool explain_code(const struct subject *s)
{
    if (s->shard && explain_shard(s))
        return true;
    switch (s->entry->status) {
    case KVQ_E_BOUNDS:
        return explain_bounds(s);
    case KVQ_E_SHAPE:
        return explain_layer(s);
    case KVQ_E_LIMIT:
        return explain_limits(s);
    case KVQ_E_POSITION:
        return explain_position(s);
    case KVQ_E_STALE:
        return explain_stale(s);
    case KVQ_E_ROLLBACK:
        return explain_rollback(s);
    case KVQ_E_INVALID:
        return explain_invalid(s);
    case KVQ_E_BUFFER:
        return explain_reach(s);
    default:
        return false;
    }
}

static const char *advice_of_incomplete(const struct kvq_request *r)
{
    if (r->op == KVQ_OP_ATTEND)
        return "append K and V of this layer, or of the one in its kv_from, before it attends";
    if (r->count == 0)
        return "the step is still open: append what is missing and end the step again, or abort it";
    return "append every layer that has a cache of its own, once, before the step's end; the "
           "session stands as before the step";
}

// What else the caller may want to know, by code; NULL if the code's own text says it all.
static const char *advice_for(int code, const struct kvq_request *r)
{
    switch (code) {
    case KVQ_E_NO_MEMORY:
        return "close or drop sessions, wait for room (kvq_queue_wait_for_room), or give the "
               "daemon "
               "a larger pool_bytes, or a storage_dir where idle sessions go; its log says what is "
               "in the way";
    case KVQ_E_NONFINITE:
        return r->op == KVQ_OP_STEP ? "look at the engine's K and V, layer by layer"
                                    : "look at the engine's K and V before this layer";
    case KVQ_E_INCOMPLETE:
        return advice_of_incomplete(r);
    case KVQ_E_NO_STEP:
        return "begin a step with this session, and give its number in work->step; a step that was "
               "begun has ended, or another writer took the session over: the next begin says so";
    case KVQ_E_BUSY:
        if (r->op == KVQ_OP_TRUNCATE || r->op == KVQ_OP_ACCEPT)
            return "end or abort the open step first; if none is open, another client reads "
                   "tokens that would go in its own context: try again when it has moved on";
        return "end or abort the open step first";
    case KVQ_E_READ_ONLY:
        return "open the session without KVQ_OPEN_READ_ONLY to write";
    case KVQ_E_TAKEN:
        return "another client opened it with KVQ_OPEN_TAKE_OVER; this handle can only be closed";
    case KVQ_E_BUFFER:
        return "register the buffer, and do not close it while calls use it";
    case KVQ_E_INVALID:
        return "offsets and strides are multiples of the dtype's size; what is written (out and "
               "lse, or k and v of a read) overlaps neither itself nor what is read";
    case KVQ_E_SHAPE:
        return "rows, heads or tokens differ from what the session or the step was opened with";
    default:
        return NULL;
    }
}

static void explain_entry(kvq_queue *queue, const struct kvq__pending *p, uint32_t index)
{
    assert(index < p->n && p->entries[index].status);
    struct subject s = {.queue = queue,
                        .request = &p->request,
                        .step = p->step,
                        .entry = &p->entries[index],
                        .index = index,
                        .shard = p->shard};
    char request[80], session[KVQ__SHOWN_BYTES];
    pthread_mutex_lock(&queue->client->table);
    s.handle = kvq__handle_find(queue->client, s.entry->session);
    name_request(request, sizeof request, &p->request);
    snprintf(s.where, sizeof s.where, "%s, entry %u (%s)", request, index,
             kvq__handle_shown(queue->client, s.entry->session, session));
    if (!explain_code(&s)) {
        const char *more = advice_for(s.entry->status, s.request);
        kvq__set_error(s.entry->status, "%s: position %" PRIu64 ", %u tokens, %u queries: %s%s%s",
                       s.where, s.entry->position, s.entry->append, s.entry->queries,
                       kvq_strerror(s.entry->status), more ? "; " : "", more ? more : "");
    }
    pthread_mutex_unlock(&queue->client->table);
}

// What is wrong with a view whatever the entries are. A buffer that this client does not have is
// none of it.
static bool explain_view(const kvq_queue *queue, int code, const char *where, const char *name,
                         const struct kvq_wire_view *v)
{
    const struct {
        const char *name;
        uint64_t bytes;
    } parts[] = {
        {"offset", v->offset}, {"token_stride", v->token_stride}, {"head_stride", v->head_stride}};
    size_t bytes = v->buffer ? buffer_bytes(queue->client, v->buffer) : 0;
    bool outside = bytes && code == KVQ_E_BOUNDS && v->offset > bytes;
    if (outside)
        kvq__set_error(code, "%s: %s begins at byte %" PRIu64 ", its buffer has %zu bytes", where,
                       name, v->offset, bytes);
    for (size_t i = 0; bytes && code == KVQ_E_INVALID && i < sizeof parts / sizeof *parts; i++)
        if (parts[i].bytes % value_bytes(v->dtype)) {
            kvq__set_error(code,
                           "%s: %s has the %s %" PRIu64 ", which is no multiple of the %u bytes of "
                           "its dtype",
                           where, name, parts[i].name, parts[i].bytes, value_bytes(v->dtype));
            return true;
        }
    return outside;
}

static bool explain_views(const kvq_queue *queue, const struct kvq__pending *p, const char *where)
{
    const struct kvq_request *r = &p->request;
    const struct {
        const char *name;
        const struct kvq_wire_view *view;
    } views[] = {{"k", &r->k}, {"v", &r->v}, {"q", &r->q}, {"out", &r->out}, {"lse", &r->lse}};
    uint32_t layers = p->step ? p->step->n_layers : 0;
    bool told = false;
    if (p->status != KVQ_E_INVALID && p->status != KVQ_E_BOUNDS)
        return false;
    pthread_mutex_lock(&queue->client->table);
    for (size_t i = 0; has_layer(r->op) && !told && i < sizeof views / sizeof *views; i++)
        told = explain_view(queue, p->status, where, views[i].name, views[i].view);
    for (uint32_t i = 0; !told && i < layers; i++) {
        const struct kvq_step_layer l = kvq__step_layer(queue, p->step, i);
        char layer[112];
        snprintf(layer, sizeof layer, "%s, layer %u", where, i);
        told = explain_view(queue, p->status, layer, "k", &l.k) ||
               explain_view(queue, p->status, layer, "v", &l.v);
    }
    pthread_mutex_unlock(&queue->client->table);
    return told;
}

static void explain_request(kvq_queue *queue, const struct kvq__pending *p)
{
    assert(p->status);
    char where[80];
    const char *more = advice_for(p->status, &p->request);
    if (p->status == KVQ_E_DEADLINE && (p->request.flags & KVQ_REQ_WAIT_ROOM))
        more = "there may have been no room in memory all the time: kvqctl status says so";
    static_assert(KVQ_MAX_STEPS == 64, "the text below, and step.h");
    if (p->status == KVQ_E_LIMIT && p->request.op == KVQ_OP_STEP_BEGIN)
        more = "a client may have 64 open steps: end one, or put more sessions into one step";
    name_request(where, sizeof where, &p->request);
    if (explain_views(queue, p, where) || explain_overlap(queue, p, where))
        return;
    if (p->status == KVQ_E_DISCONNECTED || p->status == KVQ_E_CANCELLED)
        kvq__set_error(p->status,
                       "%s of %u sessions: the connection was lost before the answer came%s", where,
                       p->n, p->status == KVQ_E_CANCELLED ? "" : "; kvq_reattach connects again");
    else
        kvq__set_error(p->status, "%s of %u sessions (step %#" PRIx64 "): %s%s%s", where, p->n,
                       p->request.step, kvq_strerror(p->status), more ? "; " : "",
                       more ? more : "");
}

void kvq__explain(kvq_queue *queue, const struct kvq__pending *p)
{
    if (p->status) {
        explain_request(queue, p);
        return;
    }
    for (uint32_t i = 0; i < p->n; i++) {
        if (p->entries[i].status) {
            explain_entry(queue, p, i);
            return;
        }
    }
}
