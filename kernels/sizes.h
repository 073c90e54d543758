// SPDX-License-Identifier: Apache-2.0
//
// What a session takes of memory, from counts alone. The daemon keeps its sessions by these
// functions, and `kvqctl size` asks them before there is a session.
#ifndef KVQ_KERNELS_SIZES_H
#define KVQ_KERNELS_SIZES_H

#include "kernels/kernels.h"

// One layer's bytes: of a packed block (0 for raw formats), of a raw one, of the sinks that stand
// behind the codes of the first packed block, and of the extras, which a session has once. Formats
// whose extras are sinks alone have sinks, the others extras, if they keep any.
struct kvq_layer_bytes {
    uint64_t packed, raw, sinks, extras;
};

// The shape must have passed kvq_shape_check with this format.
struct kvq_layer_bytes kvq_layer_bytes_of(const struct kvq_format *f, const struct kvq_shape *s);

// How many of the first `past` tokens are read packed, in whole units. Nothing is packed before
// `raw` tokens are there for good; the last max_rollback ones may be taken back. 0 for raw formats.
uint64_t kvq_packed_tokens(const struct kvq_format *f, uint32_t max_rollback, uint64_t raw,
                           uint64_t past);

// How many tokens a raw block has room for that holds so many, 1 to 128: it grows in steps, each
// twice as long as the one before.
static inline uint32_t kvq_raw_room(uint32_t tokens)
{
    uint32_t room = KVQ_GROUP_TOKENS;
    while (room < tokens)
        room *= 2;
    return room;
}

// The first token, rounded down to a page, that views at `floor` tokens or more may still read of a
// layer whose last `keep` tokens stay readable (0: all). Pages before it are freed.
static inline uint64_t kvq_kept_from(uint32_t keep, uint64_t floor)
{
    uint64_t behind = keep && floor + 1 > keep ? floor + 1 - keep : 0;
    return behind / KVQ_BLOCK_TOKENS * KVQ_BLOCK_TOKENS;
}

// What the host's memory keeps of a session besides blocks. The daemon's structs are no larger.
enum {
    KVQ_SESSION_BOOKS = 2048, // of the session itself
    KVQ_LAYER_BOOKS = 448,    // of each layer
    KVQ_SHEET_BOOKS = 32,     // of each sheet, besides its pages
    KVQ_PAGE_BOOKS = 32,      // of each page of each layer
    KVQ_SHEET_PAGES = 4,      // pages of each layer in a sheet
    KVQ_FIRST_SHEETS = 2,     // that a session makes room for at first
};

// Sheets that so many pages need.
static inline uint32_t kvq_sheets_of(uint32_t pages)
{
    return (pages + KVQ_SHEET_PAGES - 1) / KVQ_SHEET_PAGES;
}

// How long the list of sheets becomes that has `room` and needs `sheets`.
uint32_t kvq_sheet_room(uint32_t room, uint32_t sheets);

// A session of so many tokens in layers of one shape, on the host: on a GPU its newest raw block
// has room for 128 tokens from the first on. Nobody shares its blocks, the daemon knows no token
// ids of it, and it has packed what is due. `windows` has the sliding window of each layer, 0 for
// none, in place of the shape's; NULL: all layers have the shape's.
struct kvq_session_bytes {
    uint64_t packed; // packed blocks with their sinks; raw blocks of a raw format
    uint64_t window; // raw blocks and extras of other formats
    uint64_t books;  // what is kept besides blocks; the daemon's own figure is no larger
    uint64_t plain;  // 16 bits for each value that layers still see, and nothing else
};
struct kvq_session_bytes kvq_session_bytes_of(const struct kvq_format *f, const struct kvq_shape *s,
                                              const uint32_t *windows, uint32_t layers,
                                              uint64_t tokens, uint32_t max_rollback);

#endif
