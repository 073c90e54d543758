// SPDX-License-Identifier: Apache-2.0
//
// The skeleton of attention on the GPU: what an item's rows see, which groups of 32 tokens of its
// split are read packed and which tokens are read raw, and where things stand in shared memory.
// attend_query.h brings the queries there, attend_affine.h and attend_tile.h are sources of keys
// and values, attend_sums.h takes what they add up.
//
// Warp w of a block of threads owns group w of every 128-token block of the split. Positions are
// counted from the split's start ("rel") wherever 32 bits hold them.
#ifndef KVQ_KERNELS_CUDA_ATTEND_ITEM_H
#define KVQ_KERNELS_CUDA_ATTEND_ITEM_H

#include "kernels/cuda/attend.h"
#include "kernels/emu/dialect.h"

enum {
    KVQ_GPU_SPLIT_BLOCKS = KVQ_GPU_SPLIT_MAX / KVQ_BLOCK_TOKENS,
    KVQ_GPU_TILE_TOKENS = 16, // tokens of a tile of raw rows
    KVQ_GPU_RAW_TILES =
        2 * KVQ_GPU_SPLIT_BLOCKS + 1, // of a warp: a group's two, and one of the pool
    KVQ_GPU_STAGES = 3,               // packed groups in shared memory per warp
    KVQ_GPU_GROWTH = 4,               // log2 by which a logit may pass the running maximum
};

// Shared memory of a block of threads, in bytes from its start. Stages (of packed groups or raw
// tiles) take turns with the sums of the warps.
template <int D, int NT> struct kvq_gpu_room {
    static constexpr int ROWS = 8 * NT;
    static constexpr bool PLAIN = true;               // plain codecs are dequantized by the word
    static constexpr int ROW = 2 * D;                 // bytes of a row of 16-bit values
    static constexpr int RANGES = 0;                  // [ROWS]: first and end of what the row sees
    static constexpr int OWNERS = RANGES + 8 * ROWS;  // [ROWS]: tile (~0: no row), row in the tile
    static constexpr int FACTORS = OWNERS + 8 * ROWS; // [ROWS]: of raw logits, of packed ones
    static constexpr int STATE = FACTORS + 8 * ROWS;  // [ROWS]: maximum, sum
    static constexpr int VOTES = STATE + 8 * ROWS;    // [8] words that all threads are told
    static constexpr int ONES = VOTES + 64;           // [32] fp16
    // Lists: [warp][SPLIT_BLOCKS] packed groups and empty entries behind them, which are read
    // ahead; [warp][RAW_TILES] raw tiles.
    static constexpr int PACKED = ONES + 64;
    static constexpr int LIST_BYTES = 16 * (KVQ_GPU_SPLIT_BLOCKS + KVQ_GPU_STAGES - 1);
    static constexpr int RAW = PACKED + KVQ_GPU_WARPS * LIST_BYTES;
    static constexpr int RAW_END = RAW + KVQ_GPU_WARPS * KVQ_GPU_RAW_TILES * 8;
    static constexpr int QUERIES = (RAW_END + 127) / 128 * 128; // raw, raw's rest (bf16), packed
    static constexpr int QUERY_BYTES = ROWS * ROW;
    static constexpr int PACKED_QUERIES = QUERIES + 2 * QUERY_BYTES;
    static constexpr int OUT = QUERIES + 3 * QUERY_BYTES; // [ROWS][D] fp32
    static constexpr int STAGES = OUT + ROWS * D * 4;

    // Sums of the warps, over the stages.
    static constexpr int STRIDE = 4 * (D + 4); // so that a warp's stores meet no bank conflict
    static constexpr int WARP_STATE = STAGES;  // [warp][ROWS]: maximum, sum
    static constexpr int WARP_OUT = WARP_STATE + KVQ_GPU_WARPS * ROWS * 8; // [warp][ROWS]
    static constexpr int SUMS_END = WARP_OUT + KVQ_GPU_WARPS * ROWS * STRIDE;

    static constexpr int bytes(int stages) // of a block whose stages take so many
    {
        return STAGES + stages > SUMS_END ? STAGES + stages : SUMS_END;
    }
};

// What every thread knows about the item.
struct kvq_gpu_here {
    kvq_gpu_item item;
    const kvq_gpu_session *session; // of the first tile; the others' pages are the same
    uint64_t start;                 // position of the split's first token
    int tokens;                     // of a split
    int rows;
    int seen_from, seen_to; // rel: what any row sees lies in between
    int full_from, full_to; // rel: what lies in between every row sees
    int n_packed, n_raw;    // entries of this warp's lists
};

KVQ_DEVICE int kvq_gpu_min(int a, int b)
{
    return a < b ? a : b;
}

KVQ_DEVICE int kvq_gpu_max(int a, int b)
{
    return a > b ? a : b;
}

// Bits [from, to), cut to 0 to 31.
KVQ_DEVICE uint32_t kvq_gpu_bits(int from, int to)
{
    const uint32_t below = from <= 0 ? 0 : from >= 32 ? ~0u : (1u << from) - 1;
    const uint32_t end = to <= 0 ? 0 : to >= 32 ? ~0u : (1u << to) - 1;
    return end & ~below;
}

// A distance from `start`, cut to what a split has.
KVQ_DEVICE int kvq_gpu_within(uint64_t position, uint64_t start, int tokens)
{
    if (position <= start)
        return 0;
    return position - start < (uint64_t)tokens ? (int)(position - start) : tokens;
}

KVQ_DEVICE void kvq_gpu_put_float(gpu::smem at, float x)
{
    gpu::sts32(at, gpu::as_bits(x));
}

KVQ_DEVICE float kvq_gpu_get_float(gpu::smem at)
{
    return gpu::as_float(gpu::lds32(at));
}

// ---- Rows ----

// Query token `token` of a session sees positions [*lo, *hi).
KVQ_DEVICE void kvq_gpu_visible(const kvq_gpu_session &s, uint32_t window, uint32_t token,
                                uint64_t *lo, uint64_t *hi)
{
    const uint64_t position = s.q_start + token, total = s.past_tokens + s.step_tokens;
    *lo = window && position + 1 > window ? position + 1 - window : 0;
    *hi = s.flags & KVQ_ATTEND_PAST_ONLY ? s.past_tokens : position + 1;
    *hi = *hi < total ? *hi : total;
    *lo = *lo < *hi ? *lo : *hi;
}

// Threads below ROWS: whose row theirs is, and what it sees.
template <class R>
KVQ_DEVICE void kvq_gpu_set_row(const kvq_gpu_attend_args &a, const kvq_gpu_here &h)
{
    const int row = gpu::thread();
    const gpu::smem smem = gpu::smem_start();
    if (row >= R::ROWS)
        return;
    uint32_t tile = h.item.tile, left = (uint32_t)row;
    const uint32_t end = tile + h.item.tiles;
    while (tile < end && left >= a.tiles[tile].rows)
        left -= a.tiles[tile++].rows;
    int from = 0, to = 0;
    if (tile < end) {
        const kvq_gpu_session &s = a.sessions[a.tiles[tile].session];
        uint64_t lo, hi;
        kvq_gpu_visible(s, a.window, (a.tiles[tile].first_row + left) / a.gqa, &lo, &hi);
        from = kvq_gpu_within(lo, h.start, h.tokens);
        to = kvq_gpu_within(hi, h.start, h.tokens);
    }
    gpu::sts32(smem + R::RANGES + 8 * row, (uint32_t)from);
    gpu::sts32(smem + R::RANGES + 8 * row + 4, (uint32_t)to);
    gpu::sts32(smem + R::OWNERS + 8 * row, tile < end ? tile : ~0u);
    gpu::sts32(smem + R::OWNERS + 8 * row + 4, left);
}

template <class R> KVQ_DEVICE void kvq_gpu_sum_up_rows(kvq_gpu_here &h)
{
    h.seen_from = h.full_to = h.tokens;
    h.seen_to = h.full_from = 0;
    KVQ_NO_UNROLL
    for (int r = 0; r < h.rows; r++) {
        const gpu::u32x2 range = gpu::lds64(gpu::smem_start() + R::RANGES + 8 * r);
        h.seen_from = kvq_gpu_min(h.seen_from, (int)range.v[0]);
        h.seen_to = kvq_gpu_max(h.seen_to, (int)range.v[1]);
        h.full_from = kvq_gpu_max(h.full_from, (int)range.v[0]);
        h.full_to = kvq_gpu_min(h.full_to, (int)range.v[1]);
    }
}

// ---- Outliers ----

struct kvq_gpu_pool {
    const kvq_outliers *entries; // NULL if there are none
    uint32_t count;
    const uint8_t *k, *v; // rows
};

KVQ_DEVICE kvq_gpu_pool kvq_gpu_pool_of(const kvq_gpu_attend_args &a, const kvq_gpu_session &s,
                                        uint32_t head)
{
    kvq_gpu_pool p = {NULL, 0, NULL, NULL};
    if (!a.recipe.outliers || !s.extras)
        return p;
    const uint8_t *record = s.extras + (size_t)head * a.recipe.extras.record_bytes;
    p.entries = (const kvq_outliers *)(record + a.recipe.extras.pool);
    p.count = s.pool ? s.pool[head] : p.entries->count;
    p.k = record + a.recipe.extras.pool_k;
    p.v = record + a.recipe.extras.pool_v;
    return p;
}

// ---- Groups ----

// The 32 positions of a group: which are read from the packed block, which raw.
struct kvq_gpu_group {
    uint32_t packed, raw;
    const uint8_t *at; // packed
};

KVQ_DEVICE kvq_page kvq_gpu_page_at(const kvq_gpu_session &s, uint64_t position)
{
    const kvq_page none = {NULL, NULL, 0, 0};
    const uint64_t i = position / KVQ_BLOCK_TOKENS;
    return i < s.n_pages ? s.pages[i] : none;
}

KVQ_DEVICE bool kvq_gpu_is_fresh(const kvq_gpu_session &s, uint64_t position)
{
    return position >= s.fresh_start && position - s.fresh_start < s.fresh_tokens;
}

// Whether what counts at a position that a page holds is its packed form (outliers included).
KVQ_DEVICE bool kvq_gpu_is_packed(const kvq_recipe &r, const kvq_page &page, uint64_t position)
{
    const uint32_t at = (uint32_t)(position % KVQ_BLOCK_TOKENS);
    return !r.is_raw && position >= r.sink_tokens && at < page.packed_tokens && at < page.tokens;
}

KVQ_DEVICE kvq_gpu_group kvq_gpu_find_group(const kvq_gpu_attend_args &a, const kvq_gpu_session &s,
                                            uint32_t head, uint64_t position)
{
    const kvq_page page = kvq_gpu_page_at(s, position);
    const int at = (int)(position % KVQ_BLOCK_TOKENS);
    kvq_gpu_group g = {0, kvq_gpu_bits(0, page.tokens - at), NULL};
    if (!a.recipe.is_raw && position >= a.recipe.sink_tokens)
        g.packed = g.raw & kvq_gpu_bits(0, page.packed_tokens - at);
    if (g.packed)
        g.at = page.packed + (size_t)head * a.recipe.layout.record_bytes + a.recipe.layout.groups +
               at / KVQ_GROUP_TOKENS * a.recipe.layout.group_bytes;
    g.raw &= ~g.packed;
    const uint64_t end = s.fresh_start + s.fresh_tokens;
    if (s.fresh_tokens && s.fresh_start < position + KVQ_GROUP_TOKENS && end > position)
        g.raw |= kvq_gpu_bits(kvq_gpu_within(s.fresh_start, position, KVQ_GROUP_TOKENS),
                              kvq_gpu_within(end, position, KVQ_GROUP_TOKENS));
    const kvq_gpu_pool pool = kvq_gpu_pool_of(a, s, head);
    for (uint32_t i = 0; i < pool.count; i++) {
        const uint64_t p = pool.entries->position[i];
        if (p >= position && p - position < KVQ_GROUP_TOKENS)
            g.packed &= ~(1u << (p - position));
    }
    return g;
}

// ---- Lists ----

// Entries of a warp's list of packed groups: address of the group, mask of tokens, and rel with
// bit 31 set if logits need more than a product: the soft-cap, or masks where rows see different
// parts of the group or not all of it.
enum { KVQ_GPU_SPECIAL = 31 };
static constexpr uint32_t KVQ_GPU_OF_POOL = ~0u; // as rel of a raw tile: rows of the pool

KVQ_DEVICE uint32_t kvq_gpu_lanes_below()
{
    return (1u << gpu::lane()) - 1;
}

template <class R>
KVQ_DEVICE void kvq_gpu_list_packed(const kvq_gpu_attend_args &a, kvq_gpu_here &h,
                                    const kvq_gpu_group &g, int rel)
{
    const gpu::smem list = gpu::smem_start() + R::PACKED + gpu::warp() * R::LIST_BYTES;
    const uint32_t who = gpu::ballot(g.packed != 0);
    const int at = gpu::popcount(who & kvq_gpu_lanes_below());
    const bool partly = g.packed != ~0u || rel < h.full_from || rel + 32 > h.full_to;
    const uint64_t address = (uint64_t)(uintptr_t)g.at;
    const gpu::u32x4 entry = {
        {(uint32_t)address, (uint32_t)(address >> 32), g.packed,
         (uint32_t)rel | (uint32_t)(partly || a.cap != 0) << KVQ_GPU_SPECIAL}};
    const gpu::u32x4 empty = {{0, 0, 0, 0}};
    h.n_packed = gpu::popcount(who);
    if (g.packed)
        gpu::sts128(list + 16 * at, entry);
    if (gpu::lane() < KVQ_GPU_STAGES - 1)
        gpu::sts128(list + 16 * (h.n_packed + gpu::lane()), empty);
}

// Tiles of 16 tokens: each lane brings a mask and rel, entries stand in the lanes' order.
template <class R> KVQ_DEVICE void kvq_gpu_list_raw(kvq_gpu_here &h, uint32_t mask, uint32_t rel)
{
    const uint32_t who = gpu::ballot(mask != 0);
    const int at = h.n_raw + gpu::popcount(who & kvq_gpu_lanes_below());
    const gpu::smem entry = gpu::smem_start() + R::RAW + 8 * (gpu::warp() * KVQ_GPU_RAW_TILES + at);
    if (mask) {
        gpu::sts32(entry, mask);
        gpu::sts32(entry + 4, rel);
    }
    h.n_raw += gpu::popcount(who);
}

// Rel of entry i of the pool if it is one of the split's packed tokens that rows see, or -1.
KVQ_DEVICE int kvq_gpu_pool_rel(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                const kvq_gpu_pool &pool, uint32_t i)
{
    if (i >= pool.count)
        return -1;
    const uint64_t p = pool.entries->position[i];
    if (p < h.start + (uint64_t)h.seen_from || p >= h.start + (uint64_t)h.seen_to)
        return -1;
    return kvq_gpu_is_packed(a.recipe, kvq_gpu_page_at(*h.session, p), p) ? (int)(p - h.start) : -1;
}

// Finds this warp's groups, lane i that of block i of the split.
template <class R> KVQ_DEVICE void kvq_gpu_make_lists(const kvq_gpu_attend_args &a, kvq_gpu_here &h)
{
    const int lane = gpu::lane(), warp = gpu::warp();
    const int rel = lane * KVQ_BLOCK_TOKENS + warp * KVQ_GROUP_TOKENS;
    kvq_gpu_group g = {0, 0, NULL};
    if (rel < h.seen_to && rel + KVQ_GROUP_TOKENS > h.seen_from)
        g = kvq_gpu_find_group(a, *h.session, h.item.head, h.start + (uint64_t)rel);
    const uint32_t seen = kvq_gpu_bits(h.seen_from - rel, h.seen_to - rel);
    g.packed &= seen;
    g.raw &= seen;
    kvq_gpu_list_packed<R>(a, h, g, rel);
    h.n_raw = 0;
    kvq_gpu_list_raw<R>(h, g.raw & 0xffff, (uint32_t)rel);
    kvq_gpu_list_raw<R>(h, g.raw >> 16, (uint32_t)rel + 16);
    const kvq_gpu_pool pool = kvq_gpu_pool_of(a, *h.session, h.item.head);
    const uint32_t entry = (uint32_t)(warp * KVQ_GPU_TILE_TOKENS + lane);
    const bool pooled = lane < KVQ_GPU_TILE_TOKENS && kvq_gpu_pool_rel(a, h, pool, entry) >= 0;
    const uint32_t mask = gpu::ballot(pooled);
    kvq_gpu_list_raw<R>(h, lane == 0 ? mask : 0, KVQ_GPU_OF_POOL);
}

// Tells all threads of the block whether any warp has packed groups (bit 0), raw tiles (bit 1).
template <class R> KVQ_DEVICE uint32_t kvq_gpu_vote(const kvq_gpu_here &h)
{
    const gpu::smem votes = gpu::smem_start() + R::VOTES;
    if (gpu::lane() == 0)
        gpu::sts32(votes + 4 * gpu::warp(), (h.n_packed > 0) | (h.n_raw > 0) << 1);
    gpu::block_sync();
    uint32_t all = 0;
    for (int w = 0; w < KVQ_GPU_WARPS; w++)
        all |= gpu::lds32(votes + 4 * w);
    return all;
}

// ---- Items ----

// Everything about item number i but its queries. All threads; what the rows are told is there
// after the next sync of the block.
template <class R> KVQ_DEVICE kvq_gpu_here kvq_gpu_enter(const kvq_gpu_attend_args &a, uint32_t i)
{
    kvq_gpu_here h = {};
    h.item = a.items[i];
    h.session = &a.sessions[a.tiles[h.item.tile].session];
    h.tokens = (int)h.session->split_tokens;
    h.start = (uint64_t)h.item.split * h.session->split_tokens;
    for (uint32_t t = 0; t < h.item.tiles; t++)
        h.rows += (int)a.tiles[h.item.tile + t].rows;
    kvq_gpu_set_row<R>(a, h);
    return h;
}

#endif
