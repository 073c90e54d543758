// SPDX-License-Identifier: Apache-2.0
//
// Pages and the page table: which blocks hold a session's tokens, in which form a token is read,
// and what is due to be packed; see pages.c. It owns sheets, and the queues of sessions with units
// to pack. Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_PAGES_H
#define KVQ_DAEMON_CORE_SESSION_PAGES_H

#include <assert.h>

#include "daemon/core/session/session.h"
#include "kernels/sizes.h"

// Blocks of 128 positions of one layer.
struct kvq__pageref {
    struct kvq__ref packed, raw;
};

// Part of a session's page table: a few pages, of all layers that have pages of their own. Forks
// share sheets that are final (kvq__sheets_share); a sheet with more than one owner is never
// written.
enum { KVQ__SHEET_PAGES = KVQ_SHEET_PAGES };

struct kvq__sheet {
    uint32_t refs;               // sessions that have it, and moves that still hold it
    struct kvq__retired retired; // which flights may read its blocks through it, as for a block
    struct kvq__pageref pages[]; // KVQ__SHEET_PAGES of each such layer, in the order of layers
};

// The blocks of a page that exists, of a layer with pages of its own.
static inline struct kvq__pageref *kvq__page(const struct kvq__layer *l, uint32_t page)
{
    struct kvq__sheet *sheet = l->sheets[page / KVQ__SHEET_PAGES];
    return &sheet->pages[l->slot * KVQ__SHEET_PAGES + page % KVQ__SHEET_PAGES];
}
// How many owners the sheet of the page has; 1: this session alone.
static inline uint32_t kvq__page_owners(const struct kvq__layer *l, uint32_t page)
{
    return l->sheets[page / KVQ__SHEET_PAGES]->refs;
}

// Bytes of the packed blocks of pages [from, to): behind the codes of page 0 stand the layer's
// sinks.
static inline uint64_t kvq__packed_run_bytes(const struct kvq__layer *l, uint32_t from, uint32_t to)
{
    return to > from ? (to - from) * l->packed_bytes + (from == 0 ? l->sink_bytes : 0) : 0;
}
static inline uint64_t kvq__packed_block_bytes(const struct kvq__layer *l, uint32_t page)
{
    return kvq__packed_run_bytes(l, page, page + 1);
}

// How many of the first `tokens` tokens the page holds.
static inline uint16_t kvq__page_part(uint64_t tokens, uint32_t page)
{
    uint64_t start = (uint64_t)page * KVQ_BLOCK_TOKENS;
    if (tokens <= start)
        return 0;
    return (uint16_t)kvq__min(tokens - start, KVQ_BLOCK_TOKENS);
}
static inline uint32_t kvq__pages_of(uint64_t tokens)
{
    return (uint32_t)((tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS);
}
// How many pages the tokens [from, to) lie in.
static inline uint32_t kvq__pages_spanned(uint64_t from, uint64_t to)
{
    return kvq__pages_of(to) - (uint32_t)(from / KVQ_BLOCK_TOKENS);
}

// Bytes of a raw block in a pool that holds so many tokens of a page. A GPU's never grows.
static inline uint64_t kvq__raw_block_bytes(const struct kvq__pool *pool,
                                            const struct kvq__layer *l, uint32_t tokens)
{
    assert(tokens > 0 && tokens <= KVQ_BLOCK_TOKENS);
    return pool->gpu ? l->raw_bytes : kvq_raw_bytes(&l->raw_layout, kvq_raw_room(tokens));
}

// How many pages have packed blocks when the session has so many tokens: all of which a part may be
// packed by then.
uint32_t kvq__packed_pages(const struct kvq__session *s, const struct kvq__layer *l,
                           uint64_t tokens);
// Bytes that the layer's packed and raw blocks have in the pool at so many tokens, if nothing has
// been taken back.
uint64_t kvq__layer_block_bytes(const struct kvq__session *s, const struct kvq__layer *l,
                                const struct kvq__pool *pool, uint64_t tokens);

// How many of the first tokens are read from packed blocks by a reader whose committed count is
// `past`: a function of counts alone.
uint64_t kvq__packed_at(const struct kvq__session *s, const struct kvq__layer *layer,
                        uint64_t past);
// The same if prompt.exact were 0.
uint64_t kvq__packed_early(const struct kvq__session *s, const struct kvq__layer *layer,
                           uint64_t past);
static inline uint64_t kvq__first_kept(const struct kvq__layer *layer, uint64_t floor)
{
    return kvq_kept_from(layer->keep, floor);
}
// The layer's extras, wherever they stand; data is NULL where there are none, or no first page.
struct kvq__ref kvq__extras_ref(const struct kvq__session *s, const struct kvq__layer *layer);
// The extras that a view at `past` tokens reads; NULL while nothing is packed.
const uint8_t *kvq__extras_view(const struct kvq__session *s, const struct kvq__layer *layer,
                                uint64_t past);
// Copies the number of published outliers of each KV head into the queue's arena. *counts is NULL
// if the format has none. False if this wave has no room left.
bool kvq__outliers_view(struct kvq__queue *q, const struct kvq__layer *layer,
                        const uint8_t **counts);

// Makes the tables long enough for so many pages. 0, or as kvq__ns_allocate.
int kvq__pages_grow(struct kvq__session *s, uint32_t pages);
// Gives a new session, which has no pages yet, the first `sheets` of another one's sheets.
// Nothing in them may change any more. 0, or as kvq__ns_allocate.
int kvq__sheets_share(struct kvq__session *to, const struct kvq__session *from, uint32_t sheets);
// Drops all sheets of a session without pages.
void kvq__sheets_free(struct kvq__session *s);
// An empty sheet for so many layers; NULL as kvq__ns_allocate.
struct kvq__sheet *kvq__sheet_new(struct kvq__namespace *ns, uint32_t n_owned, int *rc);
// Drops a reference to a sheet of so many layers and clears the pointer. The last one drops the
// sheet's blocks.
void kvq__sheet_drop(struct kvq__namespace *ns, struct kvq__sheet **sheet, uint32_t n_owned,
                     const struct kvq__drop *drop);
// Tells the layers where the session's sheets are.
void kvq__sheets_place(struct kvq__session *s);
// Bytes of its page table. A shared sheet counts in equal parts for its owners.
uint64_t kvq__sheets_bytes(const struct kvq__session *s);
// Takes the last sheet off the session, with its pages. Returns the work: the number of its blocks,
// or 1 if other sessions have the sheet as well.
uint32_t kvq__sheets_pop(struct kvq__session *s, const struct kvq__drop *drop);
// Takes the last page off the session, or, if its sheet is shared, all pages of the sheet. Returns
// the work: the number of blocks visited.
uint32_t kvq__pages_pop(struct kvq__session *s, const struct kvq__drop *drop);
// Makes room for `tokens` tokens in all layers, or takes nothing. A newest raw block that is too
// short is replaced. Codes, and grant, as of kvq__block_new.
int kvq__pages_reserve(struct kvq__session *s, uint64_t tokens, struct kvq__grant *grant);
// Undoes kvq__pages_reserve down to so many pages. No request has seen them: they are free at once.
// While others' requests are under way a longer raw block stays.
void kvq__pages_unreserve(struct kvq__session *s, uint32_t keep);
// Drops all pages and extras. Its counts and ids stay, for whoever fetches it later.
void kvq__pages_empty(struct kvq__session *s);
// Drops the pages that `tokens` tokens do not need, and with the last page the extras. Ids of
// tokens stay: kvq__ids_cut cuts them.
void kvq__pages_trim(struct kvq__session *s, uint64_t tokens);
// Gives back what the newest raw blocks have room for and the session's tokens do not need.
void kvq__pages_shrink_to_fit(struct kvq__session *s);
// Drops the blocks that no view at or above the floor can read any more. Before, the index of
// prefixes gets the pages that are final.
void kvq__pages_release(struct kvq__session *s);
// The pages of `tokens` tokens as a view at `past` tokens sees them. Returns their number.
uint32_t kvq__pages_view(const struct kvq__session *s, uint32_t layer, uint64_t past,
                         uint64_t tokens, struct kvq_page *pages);

// ---- What is due to be packed ----

// Queues the session for packing in the background if any layer has whole units to pack.
void kvq__pack_queue(struct kvq__session *s);
// How many tokens of a layer are to be packed at the committed count, or before an ended session's
// memory goes (finish.h).
uint64_t kvq__pack_due(const struct kvq__session *s, uint32_t layer);
void kvq__pack_unqueue(struct kvq__session *s);

#endif
