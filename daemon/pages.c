// SPDX-License-Identifier: Apache-2.0
//
// Page tables: which blocks hold a session's tokens, and in which form a token is read.
//
// A page is 128 positions of one layer. It has a raw block from the step that reaches it and, for
// formats that pack, a packed block reserved at the same time, so that packing cannot fail for
// room. Its raw block goes when every view that is still possible reads the page packed.
#include <assert.h>
#include <string.h>

#include "daemon/state.h"
#include "daemon/table.h"

enum { FIRST_PAGES = 8 };

uint64_t kvq__packed_at(const struct kvq__session *s, const struct kvq__layer *layer, uint64_t past)
{
    if (layer->packed_bytes == 0)
        return 0;
    uint64_t back = (uint64_t)s->max_rollback + layer->format->recent_tokens;
    if (past < (uint64_t)layer->learn + s->max_rollback)
        return layer->base;
    uint64_t unit = layer->format->unit_tokens;
    uint64_t packed = past > back ? (past - back) / unit * unit : 0;
    return packed > layer->base ? packed : layer->base;
}

// ---- Room ----

static size_t table_bytes(const struct kvq__session *s, uint32_t capacity)
{
    return (size_t)capacity * s->n_owned * sizeof(struct kvq__pageref);
}

static void table_place(struct kvq__session *s, struct kvq__pageref *table, uint32_t capacity)
{
    struct kvq__pageref *next = table;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        if (l->pages)
            memcpy(next, l->pages, s->n_pages * sizeof *next);
        l->pages = next;
        next += capacity;
    }
}

int kvq__pages_grow(struct kvq__session *s, uint32_t pages)
{
    uint32_t capacity = s->page_capacity ? s->page_capacity : FIRST_PAGES;
    if (pages <= s->page_capacity)
        return 0;
    while (capacity < pages)
        capacity *= 2;
    struct kvq__pageref *table = kvq__allocate(s->core, table_bytes(s, capacity));
    if (!table)
        return KVQ_E_NO_MEMORY;
    table_place(s, table, capacity);
    kvq__deallocate(s->core, s->table, table_bytes(s, s->page_capacity));
    s->table = table;
    s->page_capacity = capacity;
    return 0;
}

static int extras_fill(struct kvq__session *s, struct kvq__layer *l)
{
    size_t bytes = kvq_extras_bytes(l->format, &l->shape);
    if (bytes == 0 || l->extras.data)
        return 0;
    int rc = kvq__block_new(s->core, s->ns, s->pool, bytes, &l->extras);
    return rc ? rc : kvq__extras_init(s, l);
}

static int page_fill(struct kvq__session *s, struct kvq__layer *l, uint32_t page)
{
    struct kvq__pageref *p = &l->pages[page];
    int rc = extras_fill(s, l);
    if (rc == 0)
        rc = kvq__block_new(s->core, s->ns, s->pool, l->raw_bytes, &p->raw);
    if (rc == 0 && l->packed_bytes)
        rc = kvq__block_new(s->core, s->ns, s->pool, l->packed_bytes, &p->packed);
    return rc;
}

int kvq__pages_reserve(struct kvq__session *s, uint64_t tokens)
{
    uint32_t had = s->n_pages, want = kvq__pages_of(tokens);
    int rc = kvq__pages_grow(s, want);
    while (rc == 0 && s->n_pages < want) {
        uint32_t page = s->n_pages++;
        for (uint32_t i = 0; rc == 0 && i < s->n_layers; i++)
            if (kvq__layer_owns(s, i))
                rc = page_fill(s, &s->layers[i], page);
    }
    if (rc < 0)
        kvq__pages_untake(s, had);
    return rc;
}

void kvq__pages_untake(struct kvq__session *s, uint32_t keep)
{
    uint64_t freed = s->core->freed; // nobody who waits for room gains by it
    if (s->n_pages > keep)
        kvq__tables_dirty(s, keep);
    while (s->n_pages > keep) {
        s->n_pages--;
        for (uint32_t i = 0; i < s->n_layers; i++) {
            struct kvq__pageref *p = kvq__layer_owns(s, i) ? &s->layers[i].pages[s->n_pages] : NULL;
            if (!p)
                continue;
            kvq__block_drop_idle(s->core, &p->raw);
            kvq__block_drop_idle(s->core, &p->packed);
        }
    }
    for (uint32_t i = 0; i < s->n_layers && keep == 0; i++)
        kvq__block_drop_idle(s->core, &s->layers[i].extras);
    s->core->freed = freed;
}

static void page_drop(struct kvq__session *s, struct kvq__pageref *p)
{
    kvq__block_drop(s->core, &p->raw);
    kvq__block_drop(s->core, &p->packed);
}

void kvq__pages_trim(struct kvq__session *s, uint64_t tokens)
{
    uint32_t keep = kvq__pages_of(tokens);
    kvq__ids_cut(s, tokens);
    if (s->n_pages > keep)
        kvq__tables_dirty(s, keep);
    while (s->n_pages > keep) {
        s->n_pages--;
        for (uint32_t i = 0; i < s->n_layers; i++)
            if (kvq__layer_owns(s, i))
                page_drop(s, &s->layers[i].pages[s->n_pages]);
    }
    for (uint32_t i = 0; i < s->n_layers && keep == 0; i++)
        kvq__block_drop(s->core, &s->layers[i].extras);
}

// ---- What nobody can read any more ----

static void release_window(struct kvq__session *s, struct kvq__layer *l, uint64_t floor)
{
    uint64_t kept = kvq__first_kept(l, floor);
    if (l->learn && !l->learned) // all of the prompt is needed for it
        return;
    while ((uint64_t)l->first_page * KVQ_BLOCK_TOKENS < kept)
        page_drop(s, &l->pages[l->first_page++]);
    uint64_t freed = (uint64_t)l->first_page * KVQ_BLOCK_TOKENS;
    if (l->packed_bytes && l->packed < freed)
        l->packed = freed;
    if (l->raw_page < l->first_page)
        l->raw_page = l->first_page;
}

static void release_raw(struct kvq__session *s, struct kvq__layer *l, uint64_t floor)
{
    uint64_t packed = kvq__packed_at(s, l, floor);
    packed = packed < l->packed ? packed : l->packed;
    while ((uint64_t)(l->raw_page + 1) * KVQ_BLOCK_TOKENS <= packed)
        kvq__block_drop(s->core, &l->pages[l->raw_page++].raw);
}

void kvq__pages_release(struct kvq__session *s)
{
    uint64_t floor = s->floor;
    if (s->away)
        return;
    kvq__prefix_seal(s); // before anything of it goes
    s->release_due = s->reading > 0 && s->reading_floor < floor;
    if (s->release_due)
        floor = s->reading_floor;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        if (!kvq__layer_owns(s, i))
            continue;
        release_window(s, &s->layers[i], floor);
        release_raw(s, &s->layers[i], floor);
    }
}

// ---- Views ----

uint32_t kvq__pages_view(const struct kvq__session *s, uint32_t layer, uint64_t past,
                         uint64_t tokens, struct kvq_page *pages)
{
    const struct kvq__layer *l = &s->layers[s->layers[layer].source];
    uint64_t packed = kvq__packed_at(s, l, past);
    uint32_t n = kvq__pages_of(tokens);
    assert(packed <= tokens && n <= s->n_pages);
    memset(pages, 0, l->first_page * sizeof *pages);
    for (uint32_t i = l->first_page; i < n; i++) {
        pages[i].packed = l->pages[i].packed.data;
        pages[i].raw = l->pages[i].raw.data;
        pages[i].tokens = kvq__page_part(tokens, i);
        pages[i].packed_tokens = kvq__page_part(packed, i);
        assert(pages[i].raw || pages[i].packed_tokens == pages[i].tokens);
    }
    return n;
}

const uint8_t *kvq__extras_view(const struct kvq__session *s, const struct kvq__layer *layer,
                                uint64_t past)
{
    return kvq__packed_at(s, layer, past) ? layer->extras.data : NULL;
}

bool kvq__outliers_view(struct kvq__queue *q, const struct kvq__layer *layer,
                        const uint8_t **counts)
{
    *counts = NULL;
    // A GPU takes those that are there when it comes to it: kvq__read_must_wait sees to the order.
    if (layer->format->outliers == 0 || !layer->extras.data || q->gpu)
        return true;
    uint8_t *own = kvq__arena_take(q, layer->shape.kv_heads);
    if (!own)
        return false;
    for (uint32_t h = 0; h < layer->shape.kv_heads; h++)
        own[h] =
            (uint8_t)kvq_outliers_published(layer->format, &layer->shape, layer->extras.data, h);
    *counts = own;
    return true;
}
