// SPDX-License-Identifier: Apache-2.0
//
// Requests, from the caller's structures to the bytes of the ring: what an operation takes, what
// travels of a tensor, and where it all stands.
#include "client/internal.h"

#include <assert.h>

enum { ENTRIES_AT_ONCE = 32 };

// kvq/ticket.h spells out the operations for engines; they are the protocol's.
static_assert((int)KVQ_DO_NOP == KVQ_OP_NOP && (int)KVQ_DO_STEP_BEGIN == KVQ_OP_STEP_BEGIN &&
                  (int)KVQ_DO_APPEND == KVQ_OP_APPEND && (int)KVQ_DO_ATTEND == KVQ_OP_ATTEND &&
                  (int)KVQ_DO_APPEND_ATTEND == KVQ_OP_APPEND_ATTEND &&
                  (int)KVQ_DO_STEP_END == KVQ_OP_STEP_END &&
                  (int)KVQ_DO_STEP_ABORT == KVQ_OP_STEP_ABORT &&
                  (int)KVQ_DO_TRUNCATE == KVQ_OP_TRUNCATE && (int)KVQ_DO_FORK == KVQ_OP_FORK &&
                  (int)KVQ_DO_ACCEPT == KVQ_OP_ACCEPT && (int)KVQ_DO_READ == KVQ_OP_READ &&
                  (int)KVQ_DO_STEP == KVQ_OP_STEP,
              "operations");
static_assert((int)KVQ_PAST_ONLY == KVQ_REQ_PAST_ONLY, "flags");

// ---- Operations ----

const char *kvq__op_name(unsigned op)
{
    static const char *const names[KVQ_OP_COUNT] = {
        "nop",      "step begin", "append",   "attend", "append and attend",
        "step end", "step abort", "truncate", "fork",   "accept",
        "read",     "step",
    };
    return op < KVQ_OP_COUNT ? names[op] : "unknown operation";
}

// Which tensors an operation needs.
enum { NEEDS_K = 1, NEEDS_V = 2, NEEDS_Q = 4, NEEDS_OUT = 8, NEEDS_LIST = 16 };

static unsigned needs_of(unsigned op)
{
    static const uint8_t needs[KVQ_OP_COUNT] = {
        [KVQ_OP_APPEND] = NEEDS_K | NEEDS_V,
        [KVQ_OP_ATTEND] = NEEDS_Q | NEEDS_OUT,
        [KVQ_OP_APPEND_ATTEND] = NEEDS_K | NEEDS_V | NEEDS_Q | NEEDS_OUT,
        [KVQ_OP_ACCEPT] = NEEDS_LIST,
    };
    return op < KVQ_OP_COUNT ? needs[op] : 0;
}

bool kvq__op_takes_work(unsigned op)
{
    return needs_of(op) || op == KVQ_OP_STEP_BEGIN || op == KVQ_OP_READ;
}

// ---- Tensors and lists ----

static int check_buffer(const kvq_queue *queue, unsigned op, const char *name,
                        const kvq_buffer *buffer)
{
    if (buffer->client != queue->client)
        return kvq__set_error(KVQ_E_BUFFER, "%s: %s lies in a buffer of another connection",
                              kvq__op_name(op), name);
    if (buffer->id == 0)
        return kvq__set_error(KVQ_E_BUFFER,
                              "%s: %s lies in a buffer that is not registered; call "
                              "kvq_reattach first",
                              kvq__op_name(op), name);
    return KVQ_OK;
}

int kvq__put_view(const kvq_queue *queue, unsigned op, const char *name, bool need,
                  const struct kvq_tensor *tensor, struct kvq_wire_view *view)
{
    if (!tensor->buffer && need)
        return kvq__set_error(KVQ_E_BUFFER, "%s needs %s, but its buffer is NULL", kvq__op_name(op),
                              name);
    if (!tensor->buffer)
        return KVQ_OK;
    if (tensor->dtype < KVQ_DTYPE_F16 || tensor->dtype > KVQ_DTYPE_F32)
        return kvq__set_error(
            KVQ_E_DTYPE, "%s: dtype %u of %s is unknown; 1 (f16), 2 (bf16) and 3 (f32) are known",
            kvq__op_name(op), tensor->dtype, name);
    *view = (struct kvq_wire_view){.offset = tensor->offset,
                                   .token_stride = tensor->token_stride,
                                   .head_stride = tensor->head_stride,
                                   .buffer = tensor->buffer->id,
                                   .dtype = tensor->dtype};
    return check_buffer(queue, op, name, tensor->buffer);
}

static int put_list(const kvq_queue *queue, unsigned op, bool need, const struct kvq_pages *pages,
                    struct kvq_request *r)
{
    if (!pages->list && (need || pages->page_tokens))
        return kvq__set_error(KVQ_E_BUFFER, "%s needs a list, but its buffer is NULL",
                              kvq__op_name(op));
    if (!pages->list)
        return KVQ_OK;
    r->list = (struct kvq_wire_view){
        .offset = pages->list_offset, .token_stride = sizeof(int32_t), .buffer = pages->list->id};
    if (pages->page_tokens && op != KVQ_OP_ACCEPT) {
        r->flags |= KVQ_REQ_PAGED_KV;
        r->page_tokens = pages->page_tokens;
        r->k_page_stride = pages->k_page_stride;
        r->v_page_stride = pages->v_page_stride;
    }
    return check_buffer(queue, op, "the list", pages->list);
}

// Ids and pages are lists both, and a request has one.
static int put_ids(const kvq_queue *queue, unsigned op, const struct kvq_ids *ids,
                   const struct kvq_pages *pages, struct kvq_request *r)
{
    if (!ids->buffer)
        return KVQ_OK;
    if (op != KVQ_OP_STEP_BEGIN && op != KVQ_OP_STEP_END && op != KVQ_OP_STEP)
        return kvq__set_error(KVQ_E_INVALID,
                              "%s takes no token ids; they go with a step's beginning or its end",
                              kvq__op_name(op));
    if (pages->list && (pages->list != ids->buffer || pages->list_offset != ids->offset))
        return kvq__set_error(
            KVQ_E_INVALID,
            "%s: token ids must stand in the same buffer as the lists of pages, and "
            "be counted from the same offset",
            kvq__op_name(op));
    r->list = (struct kvq_wire_view){
        .offset = ids->offset, .token_stride = sizeof(int32_t), .buffer = ids->buffer->id};
    r->flags |= KVQ_REQ_TOKEN_IDS;
    return check_buffer(queue, op, "token ids", ids->buffer);
}

int kvq__put_work(const kvq_queue *queue, const struct kvq_work *w, struct kvq_request *r)
{
    unsigned needs = needs_of(r->op);
    assert(r->op < KVQ_OP_COUNT);
    if (w->flags & ~(uint32_t)KVQ_PAST_ONLY)
        return kvq__set_error(KVQ_E_INVALID,
                              "%s: flags %#x are unknown; KVQ_PAST_ONLY (1) is known",
                              kvq__op_name(r->op), w->flags);
    r->flags = (uint16_t)w->flags;
    r->layer = w->layer;
    r->step = w->step;
    r->deadline_ns = w->deadline_ns;
    int rc = kvq__put_view(queue, r->op, "k", needs & NEEDS_K, &w->k, &r->k);
    if (rc == KVQ_OK)
        rc = kvq__put_view(queue, r->op, "v", needs & NEEDS_V, &w->v, &r->v);
    if (rc == KVQ_OK)
        rc = kvq__put_view(queue, r->op, "q", needs & NEEDS_Q, &w->q, &r->q);
    if (rc == KVQ_OK)
        rc = kvq__put_view(queue, r->op, "out", needs & NEEDS_OUT, &w->out, &r->out);
    if (rc == KVQ_OK)
        rc = kvq__put_view(queue, r->op, "lse", false, &w->lse, &r->lse);
    if (rc == KVQ_OK)
        rc = put_list(queue, r->op, needs & NEEDS_LIST, &w->pages, r);
    return rc ? rc : put_ids(queue, r->op, &w->ids, &w->pages, r);
}

// ---- On the ring ----

struct kvq_step_layer kvq__step_layer(const kvq_queue *queue, const struct kvq_step_work *w,
                                      uint32_t layer)
{
    struct kvq_step_layer l = {0};
    assert(layer < w->n_layers);
    kvq__put_view(queue, KVQ_OP_STEP, "k", false, &w->k[layer], &l.k);
    kvq__put_view(queue, KVQ_OP_STEP, "v", false, &w->v[layer], &l.v);
    return l;
}

static struct kvq_entry_wire wire_entry(const struct kvq_entry *e)
{
    return (struct kvq_entry_wire){.handle = e->session,
                                   .position = e->position,
                                   .row = e->row,
                                   .q_row = e->q_row,
                                   .append = e->append,
                                   .queries = e->queries,
                                   .list_token = e->list_token};
}

static void write_entries(kvq_queue *queue, const struct kvq_entry *entries, uint32_t n)
{
    struct kvq_entry_wire wire[ENTRIES_AT_ONCE];
    size_t at = sizeof(struct kvq_request);
    for (uint32_t from = 0; from < n; from += ENTRIES_AT_ONCE) {
        uint32_t some = n - from < ENTRIES_AT_ONCE ? n - from : ENTRIES_AT_ONCE;
        for (uint32_t i = 0; i < some; i++)
            wire[i] = wire_entry(&entries[from + i]);
        kvq_ring_write(&queue->tx, at, wire, some * sizeof wire[0]);
        at += some * sizeof wire[0];
    }
}

// K and V of a step's layers stand behind its entries.
static void write_layers(kvq_queue *queue, const struct kvq__pending *p)
{
    const struct kvq_step_work *w = p->step;
    assert(p->request.slots == kvq_request_slots(p->n, w->n_layers));
    size_t at = (size_t)kvq_request_slots(p->n, 0) * KVQ_SLOT_BYTES;
    for (uint32_t i = 0; i < w->n_layers; i++) {
        const struct kvq_step_layer layer = kvq__step_layer(queue, w, i);
        kvq_ring_write(&queue->tx, at + i * sizeof layer, &layer, sizeof layer);
    }
}

void kvq__request_write(kvq_queue *queue, const struct kvq__pending *p)
{
    assert(p->request.count == p->n);
    kvq_ring_write(&queue->tx, 0, &p->request, sizeof p->request);
    write_entries(queue, p->entries, p->n);
    if (p->step)
        write_layers(queue, p);
}
