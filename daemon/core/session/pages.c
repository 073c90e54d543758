// SPDX-License-Identifier: Apache-2.0
//
// Page tables: which blocks hold a session's tokens, and in which form a token is read.
//
// A page is 128 positions of one layer. It has a raw block from the step that reaches it; on the
// host one that has room for 32 tokens at first and is replaced by a longer one as they come. A
// packed block joins it, for formats that pack, at the step after which some of it may be packed,
// so that packing cannot fail for room. The raw block goes when every view that is still possible
// reads the page packed.
#include <assert.h>
#include <string.h>

#include "daemon/core/session/table.h"
#include "daemon/core/state.h"

enum { LONG_STEP = 4 }; // pages

// kvq_session_bytes_of tells no less than there is.
static_assert(sizeof(struct kvq__session) <= KVQ_SESSION_BOOKS, "sizes.h knows a session's size");
static_assert(sizeof(struct kvq__layer) <= KVQ_LAYER_BOOKS, "sizes.h knows a layer's size");
static_assert(sizeof(struct kvq__sheet) <= KVQ_SHEET_BOOKS, "sizes.h knows a sheet's size");
static_assert(sizeof(struct kvq__pageref) == KVQ_PAGE_BOOKS, "sizes.h knows a page's size");

static uint64_t packed_after(const struct kvq__session *s, const struct kvq__layer *layer,
                             uint64_t raw, uint64_t past)
{
    if (layer->packed_bytes == 0)
        return 0;
    uint64_t packed = kvq_packed_tokens(layer->format, s->max_rollback, raw, past);
    return kvq__max(packed, layer->base);
}

uint64_t kvq__packed_at(const struct kvq__session *s, const struct kvq__layer *layer, uint64_t past)
{
    uint64_t raw = kvq__max(layer->learn, s->prompt.exact);
    return packed_after(s, layer, raw, past);
}

uint64_t kvq__packed_early(const struct kvq__session *s, const struct kvq__layer *layer,
                           uint64_t past)
{
    return packed_after(s, layer, layer->learn, past);
}

// ---- Sheets ----

static size_t sheet_bytes(uint32_t n_owned)
{
    return sizeof(struct kvq__sheet) +
           (size_t)n_owned * KVQ__SHEET_PAGES * sizeof(struct kvq__pageref);
}

void kvq__sheets_place(struct kvq__session *s)
{
    uint32_t slot = 0;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        if (!kvq__layer_owns(s, i))
            continue;
        s->layers[i].sheets = s->sheets;
        s->layers[i].slot = slot++;
    }
    assert(slot == s->n_owned);
}

// Room for so many sheets.
static int grow_sheet_directory(struct kvq__session *s, uint32_t sheets)
{
    uint32_t room = kvq_sheet_room(s->sheet_room, sheets);
    assert(s->n_sheets <= s->sheet_room);
    if (room == s->sheet_room)
        return 0;
    int rc = 0;
    struct kvq__sheet **all = kvq__ns_allocate(s->ns, room * sizeof *all, &rc);
    if (!all)
        return rc;
    if (s->sheets)
        memcpy(all, s->sheets, s->n_sheets * sizeof *all);
    kvq__ns_deallocate(s->ns, s->sheets, s->sheet_room * sizeof *all);
    s->sheets = all;
    s->sheet_room = room;
    kvq__sheets_place(s);
    return 0;
}

struct kvq__sheet *kvq__sheet_new(struct kvq__namespace *ns, uint32_t n_owned, int *rc)
{
    assert(n_owned > 0);
    struct kvq__sheet *sheet = kvq__ns_allocate(ns, sheet_bytes(n_owned), rc);
    if (sheet)
        sheet->refs = 1;
    return sheet;
}

int kvq__pages_grow(struct kvq__session *s, uint32_t pages)
{
    uint32_t want = kvq_sheets_of(pages);
    int rc = grow_sheet_directory(s, want);
    while (rc == 0 && s->n_sheets < want) {
        assert(s->n_sheets < s->sheet_room);
        struct kvq__sheet *sheet = kvq__sheet_new(s->ns, s->n_owned, &rc);
        if (sheet)
            s->sheets[s->n_sheets++] = sheet;
    }
    return rc;
}

int kvq__sheets_share(struct kvq__session *to, const struct kvq__session *from, uint32_t sheets)
{
    assert(sheets * KVQ__SHEET_PAGES <= from->n_pages);
    assert(to->n_sheets == 0 && to->n_owned == from->n_owned && sheets <= from->n_sheets);
    int rc = grow_sheet_directory(to, sheets);
    for (; rc == 0 && to->n_sheets < sheets; to->n_sheets++) {
        to->sheets[to->n_sheets] = from->sheets[to->n_sheets];
        to->sheets[to->n_sheets]->refs++;
    }
    to->n_pages = to->n_sheets * KVQ__SHEET_PAGES;
    return rc;
}

static void page_drop(struct kvq__core *core, struct kvq__pageref *p, const struct kvq__drop *drop)
{
    kvq__block_drop(core, &p->raw, drop);
    kvq__block_drop(core, &p->packed, drop);
}

void kvq__sheet_drop(struct kvq__namespace *ns, struct kvq__sheet **pointer, uint32_t n_owned,
                     const struct kvq__drop *drop)
{
    struct kvq__core *core = ns->core;
    struct kvq__sheet *sheet = *pointer;
    *pointer = NULL;
    if (!sheet)
        return;
    assert(sheet->refs > 0);
    kvq__retire(core, &sheet->retired, drop);
    if (--sheet->refs > 0)
        return;
    for (uint32_t i = 0; i < n_owned * KVQ__SHEET_PAGES; i++) {
        kvq__block_drop_as(core, &sheet->pages[i].raw, &sheet->retired, drop);
        kvq__block_drop_as(core, &sheet->pages[i].packed, &sheet->retired, drop);
    }
    kvq__ns_deallocate(ns, sheet, sheet_bytes(n_owned));
}

uint32_t kvq__sheets_pop(struct kvq__session *s, const struct kvq__drop *drop)
{
    assert(s->n_sheets > 0);
    uint32_t last = s->n_sheets - 1;
    uint32_t work = s->sheets[last]->refs > 1 ? 1 : 2 * s->n_owned * KVQ__SHEET_PAGES;
    kvq__sheet_drop(s->ns, &s->sheets[last], s->n_owned, drop);
    s->n_sheets = last;
    if (s->n_pages > last * KVQ__SHEET_PAGES)
        s->n_pages = last * KVQ__SHEET_PAGES;
    return work;
}

static void sheets_cut(struct kvq__session *s, uint32_t keep, const struct kvq__drop *drop)
{
    while (s->n_sheets > keep)
        kvq__sheet_drop(s->ns, &s->sheets[--s->n_sheets], s->n_owned, drop);
}

void kvq__sheets_free(struct kvq__session *s)
{
    assert(s->n_pages == 0);
    sheets_cut(s, 0, NULL); // they name no blocks any more
    kvq__ns_deallocate(s->ns, s->sheets, s->sheet_room * sizeof *s->sheets);
    s->sheets = NULL;
    s->sheet_room = 0;
    for (uint32_t i = 0; i < s->n_layers; i++)
        s->layers[i].sheets = NULL;
}

uint64_t kvq__sheets_bytes(const struct kvq__session *s)
{
    uint64_t bytes = s->sheet_room * sizeof *s->sheets;
    for (uint32_t i = 0; i < s->n_sheets; i++)
        bytes += sheet_bytes(s->n_owned) / s->sheets[i]->refs;
    return bytes;
}

// ---- Room ----

// A page that is about to change; its sheet has no other owner.
static struct kvq__pageref *own_page(const struct kvq__layer *l, uint32_t page)
{
    assert(kvq__page_owners(l, page) == 1);
    return kvq__page(l, page);
}

static int extras_fill(struct kvq__session *s, struct kvq__layer *l, struct kvq__grant *grant)
{
    if (l->extras_bytes == 0 || l->extras.data)
        return 0;
    int rc = kvq__block_new(s->core, s->ns, s->pool, l->extras_bytes, grant, &l->extras);
    return rc ? rc : kvq__extras_init(s, l);
}

uint32_t kvq__packed_pages(const struct kvq__session *s, const struct kvq__layer *l,
                           uint64_t tokens)
{
    uint64_t due = kvq__packed_early(s, l, tokens);
    assert(due <= tokens || due == l->base);
    return l->packed_bytes ? kvq__pages_of(kvq__max(due, l->packed)) : 0;
}

uint64_t kvq__layer_block_bytes(const struct kvq__session *s, const struct kvq__layer *l,
                                const struct kvq__pool *pool, uint64_t tokens)
{
    uint32_t pages = kvq__pages_of(tokens), packed = kvq__packed_pages(s, l, tokens);
    uint64_t bytes = kvq__packed_run_bytes(l, l->first_page, packed);
    if (pages > l->raw_page)
        bytes += (uint64_t)(pages - 1 - l->raw_page) * l->raw_bytes +
                 kvq__raw_block_bytes(pool, l, kvq__page_part(tokens, pages - 1));
    return bytes;
}

// A raw block for the page, or a longer one in place of what it has. Readers that are under way
// keep the old one.
static int raw_fill(struct kvq__session *s, struct kvq__layer *l, uint32_t page, uint64_t bytes,
                    bool passing, struct kvq__grant *grant)
{
    struct kvq__pageref *p = own_page(l, page);
    struct kvq__ref longer = {0};
    if (!p->raw.block)
        return passing ? kvq__block_new_passing(s->core, s->ns, s->pool, bytes, grant, &p->raw)
                       : kvq__block_new(s->core, s->ns, s->pool, bytes, grant, &p->raw);
    assert(!s->pool->gpu && p->raw.block->bytes < bytes);
    int rc = kvq__block_replace(s->core, s->ns, s->pool, bytes, p->raw.block, grant, &longer);
    if (rc < 0)
        return rc;
    memcpy(longer.data, p->raw.data, p->raw.block->bytes);
    kvq__tables_dirty(s, page);
    struct kvq__drop drop = kvq__session_drop_by(s, UINT64_MAX);
    struct kvq__freed freed = kvq__freed_of(s->ns, s->pool);
    kvq__block_drop(s->core, &p->raw, &drop);
    kvq__freed_set(s->ns, s->pool, freed); // it has taken more: nobody who waits gains by it
    p->raw = longer;
    return 0;
}

// Raw blocks with room for all tokens below `tokens`, from the page that was the last one on. Pages
// that end at `passing` or before get passing ones.
static int raws_fill(struct kvq__session *s, struct kvq__layer *l, uint64_t tokens,
                     uint64_t passing, struct kvq__grant *grant)
{
    uint32_t end = kvq__pages_of(tokens), page = end;
    int rc = 0;
    assert(end == s->n_pages);
    while (page > l->raw_page && !kvq__page(l, page - 1)->raw.block)
        page--;
    if (page > l->raw_page) // the one that was the last may need a longer block
        page--;
    for (; rc == 0 && page < end; page++) {
        const struct kvq__block *had = kvq__page(l, page)->raw.block;
        uint64_t bytes = kvq__raw_block_bytes(s->pool, l, kvq__page_part(tokens, page));
        if (!had || had->bytes < bytes)
            rc = raw_fill(s, l, page, bytes, (page + 1ull) * KVQ_BLOCK_TOKENS <= passing, grant);
    }
    return rc;
}

// Packed blocks of all pages of which a part may be packed at so many tokens.
static int packed_fill(struct kvq__session *s, struct kvq__layer *l, uint64_t tokens,
                       struct kvq__grant *grant)
{
    uint32_t end = kvq__packed_pages(s, l, tokens), page = end;
    int rc = 0;
    assert(end <= s->n_pages);
    while (page > l->first_page && !kvq__page(l, page - 1)->packed.block)
        page--;
    for (; rc == 0 && page < end; page++)
        rc = kvq__block_new(s->core, s->ns, s->pool, kvq__packed_block_bytes(l, page), grant,
                            &own_page(l, page)->packed);
    return rc;
}

int kvq__pages_reserve(struct kvq__session *s, uint64_t tokens, struct kvq__grant *grant)
{
    uint32_t had = s->n_pages, want = kvq__pages_of(tokens);
    assert(!kvq__is_offloaded(s));
    if (want < had) // another entry of the request has taken more
        return 0;
    int rc = kvq__pages_grow(s, want);
    // A client that attends in its own context reads the pages of a step of few tokens before they
    // are packed. Clients keep what they have mapped of a GPU's memory, whatever is in it.
    bool is_long = !s->pool->gpu && want >= had + LONG_STEP;
    uint64_t fewest = tokens > s->max_rollback ? tokens - s->max_rollback : 0; // after a rollback
    if (rc == 0 && s->n_pages < want)
        s->n_pages = want;
    for (uint32_t i = 0; rc == 0 && i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        uint64_t passing = is_long ? kvq__packed_early(s, l, fewest) : 0;
        rc = want ? extras_fill(s, l, grant) : 0;
        rc = rc ? rc : raws_fill(s, l, tokens, passing, grant);
        rc = rc ? rc : packed_fill(s, l, tokens, grant);
    }
    if (rc < 0)
        kvq__pages_unreserve(s, had);
    return rc;
}

// How a block goes: like any other, with a drop; or at once, since no request has seen it, and
// without waking those who wait for room.
struct leaving {
    const struct kvq__drop *drop;
    bool unseen;
};

static const struct leaving unseen = {.unseen = true};

static void leave_block(struct kvq__core *core, struct kvq__ref *ref, const struct leaving *how)
{
    if (how->unseen)
        kvq__block_drop_idle(core, ref, false);
    else
        kvq__block_drop(core, ref, how->drop);
}

// A shared sheet is taken off as a whole: all of it lies below the floor, and is never written.
static uint32_t pop_page(struct kvq__session *s, const struct leaving *how)
{
    uint32_t last = s->n_pages - 1, sheet = last / KVQ__SHEET_PAGES;
    assert(sheet < s->n_sheets);
    if (s->sheets[sheet]->refs > 1) {
        sheets_cut(s, sheet, how->drop);
        s->n_pages = sheet * KVQ__SHEET_PAGES;
        return 1;
    }
    s->n_pages = last;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        if (!kvq__layer_owns(s, i))
            continue;
        struct kvq__pageref *p = kvq__page(&s->layers[i], last);
        leave_block(s->core, &p->raw, how);
        leave_block(s->core, &p->packed, how);
    }
    return 2 * s->n_owned;
}

uint32_t kvq__pages_pop(struct kvq__session *s, const struct kvq__drop *drop)
{
    return pop_page(s, &(struct leaving){.drop = drop});
}

static void pages_cut(struct kvq__session *s, uint32_t keep, const struct leaving *how)
{
    if (s->n_pages > keep) {
        kvq__tables_dirty(s, keep);
        while (s->n_pages > keep)
            pop_page(s, how);
        assert(s->n_pages == keep);
    }
    if (keep > 0)
        return;
    for (uint32_t i = 0; i < s->n_layers; i++)
        leave_block(s->core, &s->layers[i].extras, how);
}

// What a layer took for tokens that there will not be: the end of its newest raw block, and packed
// blocks that nothing is packed into yet.
static void layer_shrink(struct kvq__session *s, struct kvq__layer *l, uint64_t tokens,
                         const struct leaving *how)
{
    uint32_t end = kvq__pages_of(tokens), page = kvq__packed_pages(s, l, tokens);
    assert(end == s->n_pages);
    page = page > l->first_page ? page : l->first_page;
    for (; page < end && !l->packer && kvq__page(l, page)->packed.block; page++)
        leave_block(s->core, &own_page(l, page)->packed, how);
    if (end == 0 || end - 1 < l->raw_page)
        return;
    struct kvq__block *raw = kvq__page(l, end - 1)->raw.block;
    uint64_t bytes = kvq__raw_block_bytes(s->pool, l, kvq__page_part(tokens, end - 1));
    if (raw && raw->bytes > bytes && kvq__page_owners(l, end - 1) == 1)
        kvq__block_shrink(s->core, raw, bytes, !how->unseen);
}

// Skips unpublished sessions, which are freed whole, and sessions whose page count a waiting
// request has raised: that request still needs the pages.
static void layers_shrink(struct kvq__session *s, uint64_t tokens, const struct leaving *how)
{
    if (!s->published || s->n_pages != kvq__pages_of(tokens))
        return;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i))
            layer_shrink(s, &s->layers[i], tokens, how);
}

void kvq__pages_unreserve(struct kvq__session *s, uint32_t keep)
{
    assert(keep <= s->n_pages);
    pages_cut(s, keep, &unseen);
    layers_shrink(s, s->tokens + s->in_step.tokens, &unseen);
}

void kvq__pages_shrink_to_fit(struct kvq__session *s)
{
    struct kvq__drop drop = kvq__session_drop_by(s, UINT64_MAX);
    layers_shrink(s, s->tokens + s->in_step.tokens, &(struct leaving){.drop = &drop});
}

void kvq__pages_trim(struct kvq__session *s, uint64_t tokens)
{
    struct kvq__drop drop = kvq__session_drop_by(s, UINT64_MAX);
    const struct leaving how = {.drop = &drop};
    pages_cut(s, kvq__pages_of(tokens), &how);
    if (!kvq__is_offloaded(s))
        layers_shrink(s, tokens, &how);
}

void kvq__pages_empty(struct kvq__session *s)
{
    struct kvq__drop drop = kvq__session_drop_by(s, UINT64_MAX);
    pages_cut(s, 0, &(struct leaving){.drop = &drop});
}

// ---- What nobody can read any more ----

static void release_window(struct kvq__session *s, struct kvq__layer *l, uint64_t floor,
                           const struct kvq__drop *drop)
{
    uint64_t kept = kvq__first_kept(l, floor);
    if (l->learn && !l->learned) // all of the prompt is needed for it
        return;
    assert(kept <= (uint64_t)s->n_pages * KVQ_BLOCK_TOKENS);
    while ((uint64_t)l->first_page * KVQ_BLOCK_TOKENS < kept)
        page_drop(s->core, own_page(l, l->first_page++), drop);
    uint64_t freed = (uint64_t)l->first_page * KVQ_BLOCK_TOKENS;
    if (l->packed_bytes && l->packed < freed)
        l->packed = freed;
    if (l->raw_page < l->first_page)
        l->raw_page = l->first_page;
}

static void release_raw(struct kvq__session *s, struct kvq__layer *l, uint64_t floor,
                        const struct kvq__drop *drop)
{
    uint64_t packed = kvq__packed_at(s, l, floor);
    packed = kvq__min(packed, l->packed);
    assert(packed <= (uint64_t)s->n_pages * KVQ_BLOCK_TOKENS && l->raw_page >= l->first_page);
    while ((uint64_t)(l->raw_page + 1) * KVQ_BLOCK_TOKENS <= packed)
        kvq__block_drop(s->core, &own_page(l, l->raw_page++)->raw, drop);
}

void kvq__pages_release(struct kvq__session *s)
{
    uint64_t floor = kvq__release_floor(s);
    if (kvq__is_offloaded(s))
        return;
    kvq__prefix_seal(s); // before anything of it goes
    s->entries.readers.release_due = floor < s->floor;
    struct kvq__drop drop = kvq__session_drop_by(s, UINT64_MAX);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        if (!kvq__layer_owns(s, i))
            continue;
        release_window(s, &s->layers[i], floor, &drop);
        release_raw(s, &s->layers[i], floor, &drop);
    }
}

// ---- Views ----

uint32_t kvq__pages_view(const struct kvq__session *s, uint32_t layer, uint64_t past,
                         uint64_t tokens, struct kvq_page *pages)
{
    const struct kvq__layer *l = kvq__source_layer(s, layer);
    uint64_t packed = kvq__packed_at(s, l, past);
    uint32_t n = kvq__pages_of(tokens);
    assert(packed <= tokens && n <= s->n_pages);
    memset(pages, 0, l->first_page * sizeof *pages);
    for (uint32_t i = l->first_page; i < n; i++) {
        const struct kvq__pageref *p = kvq__page(l, i);
        pages[i].packed = p->packed.data;
        pages[i].raw = p->raw.data;
        pages[i].tokens = kvq__page_part(tokens, i);
        pages[i].packed_tokens = kvq__page_part(packed, i);
        assert(pages[i].raw || pages[i].packed_tokens == pages[i].tokens);
    }
    return n;
}

struct kvq__ref kvq__extras_ref(const struct kvq__session *s, const struct kvq__layer *l)
{
    struct kvq__ref ref = {0};
    if (l->sink_bytes == 0)
        return l->extras;
    if (s->n_pages > 0 && l->first_page == 0)
        ref = kvq__page(l, 0)->packed;
    if (ref.block)
        ref.data += l->packed_bytes;
    return ref;
}

const uint8_t *kvq__extras_view(const struct kvq__session *s, const struct kvq__layer *layer,
                                uint64_t past)
{
    return kvq__packed_at(s, layer, past) ? kvq__extras_ref(s, layer).data : NULL;
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

// ---- What is due to be packed ----

uint64_t kvq__pack_due(const struct kvq__session *s, uint32_t layer)
{
    const struct kvq__layer *l = &s->layers[layer];
    if (!kvq__layer_owns(s, layer))
        return 0;
    if (s->dropped)
        return l->packed_bytes && s->ended.finish.phase == KVQ__FINISH_PACKS ? s->ended.finish.due
                                                                             : 0;
    return kvq__packed_at(s, l, s->tokens);
}

static struct kvq__session_list *list_of(const struct kvq__session *s)
{
    return s->pool->gpu ? &s->core->packing.gpus : &s->core->packing.host;
}

void kvq__pack_queue(struct kvq__session *s)
{
    if (s->pack.queued || s->dropped || kvq__is_offloaded(s))
        return;
    for (uint32_t i = 0; i < s->n_layers && !s->pack.queued; i++)
        s->pack.queued = kvq__pack_due(s, i) > s->layers[i].packed;
    if (s->pack.queued)
        TAILQ_INSERT_TAIL(list_of(s), s, pack.link);
}

void kvq__pack_unqueue(struct kvq__session *s)
{
    if (s->pack.queued)
        TAILQ_REMOVE(list_of(s), s, pack.link);
    s->pack.queued = false;
}
