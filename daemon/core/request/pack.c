// SPDX-License-Identifier: Apache-2.0
//
// Packing whole units: for a request that is about to read them packed, and in the background
// before any request asks. A unit is packed once, when its tokens can no longer change.
#include "daemon/core/request/pack.h"

#include <assert.h>

#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/pack_error.h"
#include "daemon/core/request/step_all.h"
#include "daemon/core/session/finish.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// Addresses of the pages that hold tokens [first, end).
static void find_pack_pages(const struct kvq__layer *l, uint64_t first, uint64_t end,
                            struct kvq_page *pages)
{
    uint32_t from = (uint32_t)(first / KVQ_BLOCK_TOKENS);
    for (uint32_t i = from; i < kvq__pages_of(end); i++) {
        const struct kvq__pageref *p = kvq__page(l, i);
        pages[i - from].raw = p->raw.data;
        pages[i - from].packed = p->packed.data;
        assert(pages[i - from].raw); // pages that only learning reads are raw
    }
}

// Units of a session's layer to pack. `pages` starts with the page of `first`, and with page 0 if
// the format has yet to learn.
struct packing {
    const struct kvq__session *s;
    const struct kvq__layer *l;
    const struct kvq_page *pages;
    uint8_t *extras; // like the pages, an address copied before the job started
    uint64_t first, end;
    struct kvq__pack_sample *sample; // of one of these units; NULL: of none
};

// Formats with outliers or factors of the prompt are packed head by head, in the order of tokens;
// others unit by unit.
static bool is_serial(const struct kvq__layer *l)
{
    return l->extras_bytes > 0;
}

static uint32_t items_of(const struct kvq__layer *l, uint64_t first, uint64_t end)
{
    uint32_t units = (uint32_t)((end - first) / l->format->unit_tokens);
    assert(first < end && (end - first) % l->format->unit_tokens == 0);
    return is_serial(l) ? l->shape.kv_heads : units * l->shape.kv_heads;
}

static void pack_unit(const struct packing *p, uint64_t token, uint32_t head, void *workspace)
{
    uint64_t page = token / KVQ_BLOCK_TOKENS - p->first / KVQ_BLOCK_TOKENS;
    struct kvq_unit unit = {
        .raw_block = p->pages[page].raw,
        .packed_block = (uint8_t *)p->pages[page].packed, // the view's const is for readers
        .head = head,
        .first = (uint32_t)(token % KVQ_BLOCK_TOKENS),
        .block_start = token / KVQ_BLOCK_TOKENS * KVQ_BLOCK_TOKENS,
        .extras = p->extras,
        .learned = p->l->learn,
        .book = &p->l->book,
    };
    assert(unit.packed_block);
    kvq_pack(p->s->core->config.kernels, p->l->format, &p->l->shape, &unit, workspace);
    if (p->sample && p->sample->token == token && p->sample->head == head)
        kvq__pack_sample_measure(p->sample, p->s->core, p->l, &unit, workspace);
}

static void pack_head(const struct packing *p, uint32_t head, void *workspace)
{
    const struct kvq__layer *l = p->l;
    if (l->learn && !l->learned)
        kvq_learn(p->s->core->config.kernels, l->format, &l->shape, p->pages, l->learn, head,
                  p->extras, workspace);
    for (uint64_t token = p->first; token < p->end; token += l->format->unit_tokens)
        pack_unit(p, token, head, workspace);
}

static void pack_item(const struct packing *p, uint32_t item, void *workspace)
{
    uint32_t heads = p->l->shape.kv_heads;
    if (is_serial(p->l))
        pack_head(p, item, workspace);
    else
        pack_unit(p, p->first + (uint64_t)(item / heads) * p->l->format->unit_tokens, item % heads,
                  workspace);
}

// The end of the tokens that packing up to `end` reads; a format that has yet to learn reads more.
static uint64_t pages_end(const struct kvq__layer *l, uint64_t end)
{
    return l->learn > end && !l->learned ? l->learn : end;
}

static void note_packed(const struct kvq__session *s, struct kvq__layer *l, uint64_t end)
{
    l->packer = NULL;
    if ((s->dropped && !s->ended.finish.phase) || l->packed >= end)
        return;
    l->packed = end;
    l->learned = l->learn > 0;
    if (l->extras.data && !s->pool->gpu)
        kvq_outliers_publish(l->format, &l->shape, l->extras.data);
}

static void finish_layer(struct kvq__session *s, struct kvq__layer *l, uint64_t end)
{
    note_packed(s, l, end);
    if (!s->dropped)
        kvq__pages_release(s);
    kvq__finish_packed(s);
}

// ---- In a request ----

// Takes over packing from another entry of the session that has failed.
static void inherit_packing(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    for (uint32_t j = 0; j < q->header.count && !w->packing; j++) {
        struct kvq__entry *other = &q->work[j];
        if (other->session != w->session || !other->packing || kvq__entry_alive(q, j))
            continue;
        other->packing = false;
        w->packing = true;
    }
}

static bool prepare_pack(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    w->n_items = 0;
    if (!w->packing && kvq__source_layer(s, q->header.layer)->packer == q)
        inherit_packing(q, i);
    if (!w->packing)
        return true;
    if (s->dropped) {
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
        return true;
    }
    struct kvq__layer *l = kvq__source_layer(s, q->header.layer);
    assert(l->packer == q);
    uint64_t end = kvq__packed_at(s, l, w->past), first = l->packed;
    if (first >= end)
        return true;
    uint32_t pages = kvq__pages_spanned(first, pages_end(l, end));
    w->pages = kvq__arena_take(q, pages * sizeof *w->pages);
    if (!w->pages)
        return false;
    find_pack_pages(l, first, pages_end(l, end), w->pages);
    w->pack.first = first;
    w->pack.end = end;
    w->pack.extras = kvq__extras_ref(s, l).data;
    w->n_items = items_of(l, first, end);
    if (!s->pool->gpu)
        kvq__pack_sample_begin(s, (uint32_t)(l - s->layers), first, end, &w->sample);
    return true;
}

static uint32_t count_pack(const struct kvq__entry *w)
{
    return w->n_items;
}

static void run_pack(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    const struct kvq__entry *w = &q->work[i];
    struct packing p = {w->session,    kvq__source_layer(w->session, q->header.layer),
                        w->pages,      w->pack.extras,
                        w->pack.first, w->pack.end,
                        w->sample};
    pack_item(&p, item, workspace);
}

static void finish_pack(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    if (!w->packing)
        return;
    struct kvq__layer *l = kvq__source_layer(w->session, q->header.layer);
    assert(l->packer == q);
    w->packing = false;
    kvq__pack_sample_end(q->core, &w->sample);
    finish_layer(w->session, l, w->n_items ? kvq__packed_at(w->session, l, w->past) : 0);
}

const struct kvq__pass kvq__pass_pack = {.prepare = prepare_pack,
                                         .stages = {{count_pack, run_pack}},
                                         .n_stages = 1,
                                         .finish = finish_pack,
                                         .gpu_wave = kvq__gpu_pack_wave,
                                         .gpu_room = kvq__gpu_pack_room};

// ---- All layers, in a STEP ----

void kvq__hold_packing(struct kvq__queue *q, uint32_t i, uint64_t tokens)
{
    struct kvq__session *s = q->work[i].session;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        struct kvq__layer *layer = &s->layers[l];
        if (!kvq__layer_owns(s, l) || kvq__packed_at(s, layer, tokens) <= layer->packed ||
            layer->packer)
            continue;
        layer->packer = q;
        q->work[i].packing_all = true;
    }
}

void kvq__packing_release_layer(struct kvq__queue *q, struct kvq__session *s)
{
    struct kvq__layer *l = kvq__source_layer(s, q->header.layer);
    assert(l->packer == q);
    l->packer = NULL;
    if (!s->dropped)
        kvq__pack_queue(s);
}

void kvq__packing_release_all(struct kvq__queue *q, struct kvq__entry *w)
{
    struct kvq__session *s = w->session;
    for (uint32_t l = 0; l < s->n_layers; l++)
        if (s->layers[l].packer == q)
            s->layers[l].packer = NULL;
    w->packing_all = false;
    if (!s->dropped)
        kvq__pack_queue(s);
}

static bool take_pack_layer(struct kvq__queue *q, uint32_t i, uint32_t layer)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    struct kvq__layer *l = &s->layers[layer];
    uint64_t first = l->packed, end = kvq__packed_at(s, l, w->past + q->entries[i].append);
    if (l->packer != q || first >= end)
        return true;
    uint64_t to = pages_end(l, end);
    uint32_t n = kvq__pages_spanned(first, to);
    struct kvq_page *pages = kvq__arena_take(q, n * sizeof *pages);
    if (!pages)
        return false;
    find_pack_pages(l, first, to, pages);
    assert(w->packs.n < s->n_owned);
    w->packs.packs[w->packs.n++] =
        (struct kvq__layer_pack){layer, w->n_items, first, end, pages, kvq__extras_ref(s, l).data};
    w->n_items += items_of(l, first, end);
    if (!w->sample)
        kvq__pack_sample_begin(s, layer, first, end, &w->sample);
    return true;
}

static bool prepare_all(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    bool room = true;
    w->n_items = w->packs.n = 0;
    if (s->dropped)
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
    // The session's group has yet to commit, or was undone.
    if (w->packing_all && !s->pool->gpu && s->tokens < w->past + q->entries[i].append)
        kvq__packing_release_all(q, w);
    if (q->gpu && !s->dropped)
        return kvq__gpu_pack_all_prepare(q, i);
    if (q->gpu)
        kvq__gpu_part_none(q, i);
    if (s->dropped || !w->packing_all)
        return true;
    kvq__pack_sample_end(q->core, &w->sample); // from a wave that did not come about
    w->packs.packs = kvq__arena_take(q, s->n_owned * sizeof *w->packs.packs);
    room = w->packs.packs != NULL;
    for (uint32_t l = 0; l < s->n_layers && room; l++)
        if (kvq__layer_owns(s, l))
            room = take_pack_layer(q, i, l);
    return room;
}

static void run_all(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    const struct kvq__entry *w = &q->work[i];
    assert(w->packs.n > 0 && item < w->n_items);
    uint32_t at = w->packs.n - 1;
    while (w->packs.packs[at].first_item > item)
        at--;
    const struct kvq__layer_pack *p = &w->packs.packs[at];
    struct packing packing = {.s = w->session,
                              .l = &w->session->layers[p->layer],
                              .pages = p->pages,
                              .extras = p->extras,
                              .first = p->first,
                              .end = p->end,
                              .sample =
                                  w->sample && w->sample->layer == p->layer ? w->sample : NULL};
    (void)q;
    pack_item(&packing, item - p->first_item, workspace);
}

static void finish_all(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__session *s = w->session;
    if (!w->packing_all || s->pool->gpu)
        return;
    kvq__pack_sample_end(q->core, &w->sample);
    for (uint32_t j = 0; j < w->packs.n; j++)
        note_packed(s, &s->layers[w->packs.packs[j].layer], w->packs.packs[j].end);
    kvq__packing_release_all(q, w);
    if (!s->dropped)
        kvq__pages_release(s);
    kvq__finish_packed(s);
}

const struct kvq__pass kvq__pass_pack_all = {.prepare = prepare_all,
                                             .stages = {{count_pack, run_all}},
                                             .n_stages = 1,
                                             .finish = finish_all,
                                             .gpu_wave = kvq__gpu_pack_all_wave,
                                             .gpu_room = kvq__gpu_part_room};

// ---- In the background ----

static void run_background_pack(struct kvq__job *job, uint32_t item, void *workspace)
{
    struct kvq__packer *p = (void *)((char *)job - offsetof(struct kvq__packer, job));
    const struct kvq__layer *l = &p->session->layers[p->layer];
    struct packing packing = {p->session, l, p->pages, p->extras, p->first, p->end, p->sample};
    pack_item(&packing, item, workspace);
}

static void begin_background_pack(struct kvq__core *core, struct kvq__session *s, uint32_t layer)
{
    struct kvq__packer *p = &core->packing.packer;
    struct kvq__layer *l = &s->layers[layer];
    uint64_t most = (l->packed / KVQ_BLOCK_TOKENS + KVQ__PACKER_PAGES) * KVQ_BLOCK_TOKENS;
    assert(!p->session && !l->packer);
    p->session = s;
    p->layer = layer;
    p->first = l->packed;
    p->end = kvq__min(kvq__pack_due(s, layer), most);
    assert(p->first < p->end);
    assert(kvq__pages_spanned(p->first, pages_end(l, p->end)) <= KVQ__PACKER_PAGES);
    find_pack_pages(l, p->first, pages_end(l, p->end), p->pages);
    p->extras = kvq__extras_ref(s, l).data;
    p->job = (struct kvq__job){items_of(l, p->first, p->end), run_background_pack, false};
    kvq__pack_sample_begin(s, layer, p->first, p->end, &p->sample);
    l->packer = p;
    s->refs++; // not a use that would end the session's idle time
    kvq__flight_begin(core, &p->flight);
}

// Begins with the session's first layer that has units to pack and is not being packed. Returns
// whether any layer has; *begun if one was taken.
static bool try_session(struct kvq__core *core, struct kvq__session *s, bool *begun)
{
    bool any = false;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        if (kvq__pack_due(s, i) <= s->layers[i].packed)
            continue;
        any = true;
        if (s->layers[i].packer)
            continue;
        begin_background_pack(core, s, i);
        *begun = true;
        break;
    }
    return any;
}

struct kvq__job *kvq__background_start(struct kvq__core *core)
{
    bool begun = false;
    struct kvq__session *s = TAILQ_FIRST(&core->packing.host), *next;
    if (core->packing.packer.session)
        return NULL;
    for (; s && !begun; s = next) {
        next = TAILQ_NEXT(s, pack.link);
        if (!try_session(core, s, &begun))
            kvq__pack_unqueue(s);
    }
    s = begun ? NULL : kvq__finish_next(core); // live sessions come first
    if (s)
        try_session(core, s, &begun);
    return begun ? &core->packing.packer.job : NULL;
}

void kvq__background_done(struct kvq__core *core)
{
    struct kvq__packer *p = &core->packing.packer;
    struct kvq__session *s = p->session;
    assert(s && s->layers[p->layer].packer == p);
    kvq__pack_sample_end(core, &p->sample);
    finish_layer(s, &s->layers[p->layer], p->end);
    if (s->pack.queued) { // sessions take turns
        kvq__pack_unqueue(s);
        kvq__pack_queue(s);
    }
    p->session = NULL;
    kvq__session_unref(s);
    kvq__flight_end(core, &p->flight);
}
