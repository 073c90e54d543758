// SPDX-License-Identifier: Apache-2.0
// Bytes of sessions, from counts.
#include "kernels/sizes.h"

struct kvq_layer_bytes kvq_layer_bytes_of(const struct kvq_format *f, const struct kvq_shape *s)
{
    struct kvq_layout packed = kvq_layout_of(f, s);
    struct kvq_raw_layout raw = kvq_raw_layout_of(s);
    bool sinks = kvq_extras_are_sinks(f);
    return (struct kvq_layer_bytes){.packed = kvq_is_raw(f) ? 0 : kvq_block_bytes(&packed, s),
                                    .raw = kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS),
                                    .sinks = sinks ? kvq_extras_bytes(f, s) : 0,
                                    .extras = sinks ? 0 : kvq_extras_bytes(f, s)};
}

uint64_t kvq_packed_tokens(const struct kvq_format *f, uint32_t max_rollback, uint64_t raw,
                           uint64_t past)
{
    uint64_t back = (uint64_t)max_rollback + f->recent_tokens;
    if (kvq_is_raw(f) || past < raw + max_rollback || past <= back)
        return 0;
    return (past - back) / f->unit_tokens * f->unit_tokens;
}

uint32_t kvq_sheet_room(uint32_t room, uint32_t sheets)
{
    if (sheets <= room)
        return room;
    room = room ? room : KVQ_FIRST_SHEETS;
    while (room < sheets)
        room *= 2;
    return room;
}

// A row that is not the table's own is kept with the session, as is what its first layers have
// instead.
static uint64_t books_of(const struct kvq_format *f, uint32_t layers, uint32_t pages)
{
    uint64_t sheets = kvq_sheets_of(pages);
    uint64_t sheet = KVQ_SHEET_BOOKS + (uint64_t)layers * KVQ_SHEET_PAGES * KVQ_PAGE_BOOKS;
    const struct kvq_format *row = kvq_format_by_name(f->name);
    bool own = !row || !kvq_format_same(row, f) || (f->outliers && f->plain_layers);
    return KVQ_SESSION_BOOKS + layers * (KVQ_LAYER_BOOKS + (own ? sizeof *f : 0)) + sheets * sheet +
           kvq_sheet_room(0, (uint32_t)sheets) * sizeof(void *);
}

static uint64_t pages_of(uint64_t tokens)
{
    return (tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS;
}

// Of the raw block that holds the newest of so many tokens, of which there are some.
static uint64_t newest_bytes(const struct kvq_shape *s, uint64_t tokens)
{
    struct kvq_raw_layout raw = kvq_raw_layout_of(s);
    return kvq_raw_bytes(&raw, kvq_raw_room((uint32_t)((tokens - 1) % KVQ_BLOCK_TOKENS) + 1));
}

// Raw blocks stay while a view that is still possible, after a rollback, reads tokens of them.
static void add_layer(const struct kvq_format *f, const struct kvq_shape *s, uint64_t tokens,
                      uint32_t max_rollback, struct kvq_session_bytes *all)
{
    struct kvq_layer_bytes one = kvq_layer_bytes_of(f, s);
    uint64_t pages = pages_of(tokens);
    uint64_t floor = tokens > max_rollback ? tokens - max_rollback : 0;
    uint32_t learn = kvq_learn_tokens(f, 0);
    uint64_t settled = kvq_packed_tokens(f, max_rollback, learn, floor);
    uint64_t first = kvq_kept_from(s->window, floor);
    uint64_t packed = pages_of(kvq_packed_tokens(f, max_rollback, learn, tokens));
    uint64_t raws = pages - (settled > first ? settled : first) / KVQ_BLOCK_TOKENS;
    uint64_t raw = raws ? (raws - 1) * one.raw + newest_bytes(s, tokens) : 0;
    first /= KVQ_BLOCK_TOKENS;
    all->packed += one.packed ? (packed > first ? packed - first : 0) * one.packed : raw;
    all->packed += packed && first == 0 ? one.sinks : 0;
    all->window += (one.packed ? raw : 0) + (pages ? one.extras : 0);
    uint64_t seen = s->window && s->window < tokens ? s->window : tokens;
    all->plain += 2 * seen * s->kv_heads * 2 * kvq_row_dim(s);
}

struct kvq_session_bytes kvq_session_bytes_of(const struct kvq_format *f, const struct kvq_shape *s,
                                              const uint32_t *windows, uint32_t layers,
                                              uint64_t tokens, uint32_t max_rollback)
{
    struct kvq_session_bytes all = {0};
    struct kvq_format plain = *f;
    struct kvq_shape layer = *s;
    plain.outliers = 0;
    for (uint32_t i = 0; i < layers; i++) {
        layer.window = windows ? windows[i] : s->window;
        add_layer(i < f->plain_layers ? &plain : f, &layer, tokens, max_rollback, &all);
    }
    all.books = books_of(f, layers, (uint32_t)((tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS));
    return all;
}
