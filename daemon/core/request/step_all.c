// SPDX-License-Identifier: Apache-2.0
//
// A whole step in one request: begin, append of all layers, commit, packing of what is due then,
// and the client's page tables of its sessions. Engines that attend in their own context need no
// other request; with append 0 it only packs and publishes.
#include <assert.h>

#include "daemon/core/request/admission.h"
#include "daemon/core/request/append.h"
#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/pack.h"
#include "daemon/core/request/step_all.h"
#include "daemon/core/request/token_ids.h"
#include "daemon/core/request/views.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/table.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// ---- Views of the layers ----

// From here on the request's K and V views are the layer's.
static void select_layer(struct kvq__queue *q, uint32_t layer)
{
    assert(layer < q->header.layer);
    q->header.k = q->layers[layer].k;
    q->header.v = q->layers[layer].v;
    q->buffers[KVQ__VIEW_K] = q->layer_buffers[layer][0];
    q->buffers[KVQ__VIEW_V] = q->layer_buffers[layer][1];
}

static bool has_tensors(const struct kvq__queue *q, uint32_t layer)
{
    return q->layers[layer].k.buffer || q->layers[layer].v.buffer;
}

// Layers may have no tensors: their sessions then need none, or append nothing.
static int open_layers(struct kvq__queue *q)
{
    for (uint32_t i = 0; i < q->header.layer; i++) {
        q->layer_buffers[i][0] = q->layer_buffers[i][1] = NULL;
        select_layer(q, i);
        int rc = has_tensors(q, i) ? kvq__append_open(q) : 0;
        if (rc < 0)
            return rc;
        q->layer_buffers[i][0] = q->buffers[KVQ__VIEW_K];
        q->layer_buffers[i][1] = q->buffers[KVQ__VIEW_V];
    }
    return 0;
}

// ---- Checks ----

static int check_tensors(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__session *s = q->work[i].session;
    int rc = 0;
    for (uint32_t l = 0; l < s->n_layers && rc == 0; l++) {
        select_layer(q, l);
        if (has_tensors(q, l) != kvq__layer_owns(s, l))
            return kvq__layer_owns(s, l) ? KVQ_E_INCOMPLETE : KVQ_E_INVALID;
        if (kvq__layer_owns(s, l))
            rc = kvq__append_reach(q, i, &s->layers[l].shape);
    }
    return rc;
}

static int check_step_all_room(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__table *t = w->handle->table;
    uint32_t append = q->entries[i].append;
    if (append > KVQ_MAX_STEP_TOKENS || w->session->tokens + append > KVQ_MAX_SESSION_TOKENS)
        return KVQ_E_LIMIT;
    return t && kvq__pages_of(w->session->tokens + append) > t->memory.pages ? KVQ_E_LIMIT : 0;
}

static int check_step_all(struct kvq__queue *q, uint32_t i)
{
    bool write = q->entries[i].append > 0;
    int rc = kvq__entry_open_at(q, i, write);
    if (rc < 0)
        return rc;
    struct kvq__session *s = q->work[i].session;
    uint32_t missing;
    if (s->n_layers != q->header.layer)
        rc = KVQ_E_SHAPE;
    else if (write && s->step)
        rc = KVQ_E_BUSY;
    else
        rc = check_step_all_room(q, i);
    if (rc == 0 && write && kvq__group_missing(s, &missing))
        return kvq__entry_fail_by(q, i, KVQ_E_NO_SESSION, s->tokens, missing);
    if (rc == 0 && write)
        rc = check_tensors(q, i);
    if (rc == 0)
        rc = kvq__ids_check(q, i, q->entries[i].append);
    return rc < 0 ? kvq__entry_fail(q, i, rc, s->tokens) : 0;
}

// Tokens of the session after the step.
static uint64_t tokens_of(const struct kvq__queue *q, uint32_t i)
{
    return q->work[i].past + q->entries[i].append;
}

// Whether a layer has to wait. On a GPU tables also wait until units that they name are packed.
static bool layer_must_wait(const struct kvq__queue *q, uint32_t i, const struct kvq__layer *l)
{
    const struct kvq__session *s = q->work[i].session;
    bool due = kvq__packed_at(s, l, tokens_of(q, i)) > l->packed;
    if (!s->pool->gpu)
        return due && l->packer;
    bool others = l->pack_stream && l->pack_stream->client != q->client;
    return due ? kvq__packs_must_wait(s, l, others ? NULL : l->pack_stream)
               : others && !kvq__work_stream_ended(l->pack_stream, l->pack_number);
}

static bool step_all_must_wait(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq__session *s = q->work[i].session;
    bool wait = s->exclusive || (q->entries[i].append > 0 && s->entries.tail > 0);
    for (uint32_t l = 0; l < s->n_layers && !wait; l++)
        wait = kvq__layer_owns(s, l) && layer_must_wait(q, i, &s->layers[l]);
    return wait;
}

// ---- Start ----

static int begin_step_all_entry(struct kvq__queue *q, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    if (q->entries[i].append == 0)
        return 0;
    if (s->step) // two entries name the session
        return kvq__entry_fail(q, i, KVQ_E_BUSY, s->tokens);
    int rc = kvq__ids_bring(q, i, q->entries[i].append);
    // The request took the pages before, unless an earlier entry of the session has failed.
    rc = rc ? rc : kvq__pages_reserve(s, tokens_of(q, i), NULL);
    if (rc < 0) {
        kvq__admission_untake(q, i);
        return kvq__entry_fail(q, i, rc, s->tokens);
    }
    kvq__step_join(&q->own_step, s, q->entries[i].append);
    q->work[i].step_serial = s->in_step.serial;
    kvq__hold_tail(q, i);
    return 0;
}

static void hold_step_all_entry(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    kvq__hold(q, i);
    if (q->entries[i].append == 0) // keeps what the entry publishes, whatever the writer does
        kvq__hold_reading(q, i);
    kvq__hold_packing(q, i, tokens_of(q, i));
    w->table = w->handle->table;
    if (w->table)
        w->table->uses++;
}

// An entry that publishes a session has it to itself. Named by several entries, the session would
// be published as it never was: a GPU's work for all entries is enqueued before any of it is done,
// and on the host one entry packs for all.
static void check_once(struct kvq__queue *q)
{
    uint64_t check = ++q->core->last.check;
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i) && q->entries[i].append > 0)
            q->work[i].session->entries.seen = check;
    for (uint32_t i = 0; i < q->header.count; i++) {
        if (!kvq__entry_alive(q, i) || q->entries[i].append > 0)
            continue;
        struct kvq__session *s = q->work[i].session;
        if (s->entries.seen == check)
            kvq__entry_fail(q, i, KVQ_E_BUSY, s->tokens);
        s->entries.seen = check;
    }
}

enum kvq__progress kvq__op_step(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_store_all, &kvq__pass_pack_all,
                                                     &kvq__pass_publish};
    if (q->header.step || q->header.layer == 0)
        return kvq__request_end(q, KVQ_E_INVALID);
    int rc = open_layers(q);
    rc = rc ? rc : kvq__ids_open(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_step_all(q, i) == 0 && step_all_must_wait(q, i))
            return KVQ__WAIT;
    check_once(q);
    if (!kvq__admission_take(q))
        return KVQ__WAIT;
    for (uint32_t i = 0; i < q->header.layer; i++) {
        kvq__buffer_use(q->client, q->layer_buffers[i][0], &q->held_buffers);
        kvq__buffer_use(q->client, q->layer_buffers[i][1], &q->held_buffers);
    }
    kvq__buffer_use(q->client, q->buffers[KVQ__VIEW_LIST], &q->held_buffers);
    kvq__step_open_own(q);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i) && begin_step_all_entry(q, i) == 0)
            hold_step_all_entry(q, i);
    kvq__step_close_if_empty(&q->own_step);
    q->packs.queue = NULL;
    return kvq__request_run(q, passes, 3);
}

// ---- Storing all layers ----

static bool take_step_all_memory(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    uint32_t layers = w->session->n_layers;
    w->n_pages = kvq__pages_spanned(w->past, tokens_of(q, i));
    assert(w->n_pages > 0);
    uint32_t items = w->n_pages * layers;
    w->pages = kvq__arena_take(q, items * sizeof *w->pages);
    w->all.sources = kvq__arena_take(q, layers * sizeof *w->all.sources);
    w->all.counts = kvq__arena_take(q, items * sizeof *w->all.counts);
    if (!w->pages || !w->all.sources || !w->all.counts || !kvq__store_list(q, i, &w->all.list))
        return false;
    for (uint32_t j = 0; j < items; j++)
        w->all.counts[j] = (struct kvq_store_counts){0};
    w->n_items = items;
    return true;
}

static int check_list(struct kvq__queue *q, uint32_t i, uint32_t layer)
{
    const struct kvq__entry *w = &q->work[i];
    select_layer(q, layer);
    return w->all.list
               ? kvq__paged_check(q, &q->entries[i], &w->session->layers[layer].shape, w->all.list)
               : 0;
}

struct kvq__source kvq__step_all_source(struct kvq__queue *q, uint32_t i, uint32_t layer)
{
    select_layer(q, layer);
    struct kvq__source source = kvq__store_source(q, i, q->work[i].all.list);
    source.k_view = &q->layers[layer].k;
    source.v_view = &q->layers[layer].v;
    return source;
}

// Where the layer's tokens come from, and the raw blocks that they go to.
static int find_layer(struct kvq__queue *q, uint32_t i, uint32_t layer)
{
    struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[layer];
    uint32_t first = (uint32_t)(w->past / KVQ_BLOCK_TOKENS);
    assert(first + w->n_pages <= w->session->n_pages);
    int rc = check_list(q, i, layer);
    w->all.sources[layer] = kvq__step_all_source(q, i, layer);
    for (uint32_t p = 0; p < w->n_pages; p++)
        w->pages[layer * w->n_pages + p] =
            (struct kvq_page){.raw = kvq__page(l, first + p)->raw.data};
    return rc;
}

static int find_layers(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__session *s = q->work[i].session;
    int rc = q->work[i].all.list ? kvq__list_copy(q, i, q->work[i].all.list) : 0;
    for (uint32_t l = 0; l < s->n_layers && rc == 0; l++)
        if (kvq__layer_owns(s, l))
            rc = q->gpu ? check_list(q, i, l) : find_layer(q, i, l);
    return rc;
}

// A page list is copied and checked anew for each wave, in the chunk that the wave has.
static bool take_on_gpu(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    w->n_pages = kvq__pages_spanned(w->past, tokens_of(q, i));
    return kvq__store_list(q, i, &w->all.list) && kvq__gpu_store_all_prepare(q, i);
}

static bool prepare_store(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    w->n_items = 0;
    if (q->gpu && (q->entries[i].append == 0 || s->dropped))
        kvq__gpu_part_none(q, i);
    if (q->entries[i].append == 0)
        return true;
    if (s->dropped || s->in_step.serial != w->step_serial) { // the step is over
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, w->past);
        return true;
    }
    if (!(q->gpu ? take_on_gpu(q, i) : take_step_all_memory(q, i)))
        return false;
    int rc = find_layers(q, i);
    if (rc < 0) {
        kvq__step_leave(s);
        kvq__entry_fail(q, i, rc, w->past);
    }
    return true;
}

static uint32_t count_step_all_items(const struct kvq__entry *w)
{
    return w->n_items;
}

// One page of one layer, all heads.
static void run_store(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    const struct kvq__entry *w = &q->work[i];
    uint32_t layer = item / w->n_pages, page = item % w->n_pages;
    const struct kvq__layer *l = &w->session->layers[layer];
    assert(item < w->n_items);
    struct kvq__store_part part = {l, &w->all.sources[layer], (uint8_t *)w->pages[item].raw, page,
                                   0};
    (void)workspace;
    if (!kvq__layer_owns(w->session, layer))
        return;
    for (; part.head < l->shape.kv_heads; part.head++)
        kvq__store_page(q, i, &part, &w->all.counts[item]);
}

static void finish_store(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    if (q->entries[i].append == 0 || s->pool->gpu) // a GPU's work has yet to end
        return;
    struct kvq_store_counts sum = kvq__store_counts_sum(w->all.counts, w->n_items);
    if (s->in_step.serial != w->step_serial) {
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, w->past);
    } else if (sum.nonfinite) {
        kvq__step_leave(s);
        kvq__entry_fail(q, i, KVQ_E_NONFINITE, s->tokens);
    } else {
        assert(s->in_step.layers == 0);
        s->in_step.layers = s->n_owned;
        s->saturated += sum.saturated;
        q->core->counts.steps += kvq__step_commit(s, &q->results[i]) == 0;
    }
}

const struct kvq__pass kvq__pass_store_all = {.prepare = prepare_store,
                                              .stages = {{count_step_all_items, run_store}},
                                              .n_stages = 1,
                                              .finish = finish_store,
                                              .gpu_wave = kvq__gpu_store_all_wave,
                                              .gpu_room = kvq__gpu_part_room};

// ---- Publishing ----

static bool prepare_publish(struct kvq__queue *q, uint32_t i)
{
    return !q->gpu || kvq__gpu_publish_prepare(q, i);
}

// The result if all values are finite: on a GPU nobody knows that yet.
static void finish_on_gpu(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__session *s = q->work[i].session;
    q->results[i].value = tokens_of(q, i);
    q->results[i].extents = s->ns->arenas[s->pool - q->core->pools].last_serial;
}

static void finish_publish(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    if (s->pool->gpu && !s->dropped) {
        finish_on_gpu(q, i);
        return;
    }
    if (s->dropped)
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
    else if (q->entries[i].append > 0) // another shard's entry may have undone the step
        kvq__step_recheck(s, &q->results[i]);
    if (!kvq__entry_alive(q, i) || s->in_step.prepared) // tables of groups wait for a later request
        return;
    if (w->table && !w->table->closed)
        kvq__table_publish_on_host(w->table, tokens_of(q, i));
    q->results[i].value = tokens_of(q, i);
    q->results[i].extents = s->ns->arenas[s->pool - q->core->pools].last_serial;
}

const struct kvq__pass kvq__pass_publish = {.prepare = prepare_publish,
                                            .finish = finish_publish,
                                            .gpu_wave = kvq__gpu_publish_wave,
                                            .gpu_room = kvq__gpu_part_room};
