// SPDX-License-Identifier: Apache-2.0
//
// The skeleton of attention on the GPU: what an item's rows see, which groups of 32 tokens are read
// packed and which tokens are read raw, and where things stand in shared memory. attend_query.h
// brings the queries there, attend_affine.h and attend_tile.h are sources of keys and values,
// attend_sums.h takes what they add up.
//
// A block of threads takes a run of items at a time: the same rows and KV head, splits one after
// the other. What the splits have in common, down to the list of their groups, is found once for
// the run; sums are made and handed over split by split, so that no bit depends on how long runs
// are.
//
// Warp w of a block of threads owns group w of every 128-token block of the run. Positions are
// counted from the run's start ("rel") wherever 32 bits hold them.
#ifndef KVQ_KERNELS_CUDA_ATTEND_ITEM_H
#define KVQ_KERNELS_CUDA_ATTEND_ITEM_H

#include "kernels/cuda/attend.h"
#include "kernels/emu/dialect.h"

enum {
    KVQ_GPU_RUN_BLOCKS = gpu::WARP, // 128-token blocks of a run at most: one for each lane
    KVQ_GPU_TILE_TOKENS = 16,       // tokens of a tile of raw rows
    // Of a warp: two of each group, and one for those of the split's outliers that it reads.
    KVQ_GPU_RAW_TILES = 2 * KVQ_GPU_RUN_BLOCKS + 1,
    KVQ_GPU_STAGES = 3, // packed groups in shared memory per warp
    KVQ_GPU_GROWTH = 4, // log2 by which a logit may pass the running maximum
};
static_assert((int)KVQ_GPU_SPLIT_MAX <= KVQ_GPU_RUN_BLOCKS * KVQ_BLOCK_TOKENS,
              "a run has one split at least");

// Shared memory of a block of threads, in bytes from its start. Stages (of packed groups or raw
// tiles) take turns with the sums of the warps, or, where there is room, are apart from them: then
// the next split's groups are on their way while a split's sums are handed over.
template <int D, int NT> struct kvq_gpu_room {
    static constexpr int ROWS = 8 * NT;
    static constexpr int ROW = 2 * D;                  // bytes of a row of 16-bit values
    static constexpr int RANGES = 0;                   // [ROWS]: first and end of what the row sees
    static constexpr int OWNERS = RANGES + 8 * ROWS;   // [ROWS]: tile (~0: no row), row in the tile
    static constexpr int PLACES = OWNERS + 8 * ROWS;   // [ROWS]: struct kvq_gpu_partials
    static constexpr int FACTORS = PLACES + 16 * ROWS; // [ROWS]: of raw logits, of packed ones
    static constexpr int STATE = FACTORS + 8 * ROWS;   // [ROWS]: maximum, sum
    static constexpr int LAST = STATE + 8 * ROWS;      // [tile]: whether this run was its last
    static constexpr int HERE = LAST + 4 * ROWS;       // [8] words of the run, then [warp][4]
    static constexpr int POOLED = HERE + 96;           // [warp][TILE_TOKENS] rel
    static constexpr int VOTES = POOLED + 256;         // [warp][2] words that all threads are told
    static constexpr int ONES = VOTES + 64;            // [32] fp16
    // Lists: [warp][RUN_BLOCKS] packed groups and empty entries behind them, which are read ahead;
    // [warp][RAW_TILES] raw tiles.
    static constexpr int PACKED = ONES + 64;
    static constexpr int LIST_BYTES = 16 * (KVQ_GPU_RUN_BLOCKS + KVQ_GPU_STAGES - 1);
    static constexpr int RAW = PACKED + KVQ_GPU_WARPS * LIST_BYTES;
    static constexpr int RAW_END = RAW + KVQ_GPU_WARPS * KVQ_GPU_RAW_TILES * 8;
    static constexpr int QUERIES = (RAW_END + 127) / 128 * 128; // raw, raw's rest (bf16), packed
    static constexpr int QUERY_BYTES = ROWS * ROW;
    static constexpr int REST = QUERIES + QUERY_BYTES;
    static constexpr int PACKED_QUERIES = REST + QUERY_BYTES;
    static constexpr int OUT = QUERIES + 3 * QUERY_BYTES; // [ROWS][D] fp32
    static constexpr int STAGES = OUT + ROWS * D * 4;

    // Sums of the warps, over the stages or behind them: [warp][ROWS] maximum and sum, then
    // [warp][ROWS] output.
    static constexpr int STRIDE = 4 * (D + 4); // so that a warp's stores meet no bank conflict
    static constexpr int SUMS_OUT = KVQ_GPU_WARPS * ROWS * 8;
    static constexpr int SUMS_BYTES = SUMS_OUT + KVQ_GPU_WARPS * ROWS * STRIDE;
};

// What every thread knows about the run. It is kept in shared memory, for want of registers. Masks
// have a bit for each 128-token block of the run.
struct kvq_gpu_here {
    kvq_gpu_item item;              // the first
    const kvq_gpu_session *session; // of the first tile; the others' pages are the same
    uint64_t start;                 // position of the run's first token
    int splits, split_tokens;
    int rows;
    uint32_t packed, raw_low, raw_high; // which of this warp's groups have packed tokens, and raw
                                        // ones in their first and second half
    int pooled;                         // rel of the outlier that this lane reads, or -1
};

// What the rows see, rel: nothing is seen outside of the first range, and all of the second by
// every row.
struct kvq_gpu_sight {
    int from, to, full_from, full_to;
};

// A split's share of a warp's lists, as numbers of entries.
struct kvq_gpu_part {
    int packed, packed_end;
    int raw, raw_end; // the tile of outliers, if there is one, is raw_end - 1
    bool pool;
};

// Where the partial sums of a row begin, and how far the next split's are from a split's; 0: the
// row has one split.
struct kvq_gpu_partials {
    uint64_t first;
    uint32_t step, unused;
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

// Where the partial sums of row `left` of a tile are, split by split from the session's first on.
KVQ_DEVICE kvq_gpu_partials kvq_gpu_partials_of(const kvq_gpu_session &s, const kvq_gpu_tile &tile,
                                                uint32_t head, uint32_t left)
{
    const kvq_gpu_partials place = {tile.partial + (uint64_t)head * s.splits * tile.rows + left,
                                    s.splits == 1 ? 0 : tile.rows, 0};
    return place;
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
        from = kvq_gpu_within(lo, h.start, h.splits * h.split_tokens);
        to = kvq_gpu_within(hi, h.start, h.splits * h.split_tokens);
        kvq_gpu_partials place = kvq_gpu_partials_of(s, a.tiles[tile], h.item.head, left);
        place.first += (uint64_t)(h.item.split - s.first_split) * place.step;
        const gpu::u32x4 words = {
            {(uint32_t)place.first, (uint32_t)(place.first >> 32), place.step, 0}};
        gpu::sts128(smem + R::PLACES + 16 * row, words);
    }
    gpu::sts32(smem + R::RANGES + 8 * row, (uint32_t)from);
    gpu::sts32(smem + R::RANGES + 8 * row + 4, (uint32_t)to);
    gpu::sts32(smem + R::OWNERS + 8 * row, tile < end ? tile : ~0u);
    gpu::sts32(smem + R::OWNERS + 8 * row + 4, left);
}

// The same by every lane.
KVQ_DEVICE int kvq_gpu_least(int x)
{
    for (int d = 1; d < gpu::WARP; d *= 2)
        x = kvq_gpu_min(x, (int)gpu::shuffle_xor_bits((uint32_t)x, d));
    return x;
}

template <class R> KVQ_DEVICE kvq_gpu_sight kvq_gpu_sight_of(const kvq_gpu_here &h)
{
    kvq_gpu_sight sight = {KVQ_GPU_RUN_BLOCKS * KVQ_BLOCK_TOKENS, 0, 0,
                           KVQ_GPU_RUN_BLOCKS * KVQ_BLOCK_TOKENS};
    const int first = R::ROWS > gpu::WARP ? gpu::lane() : 0;
    KVQ_NO_UNROLL
    for (int r = first; r<h.rows; r += R::ROWS> gpu::WARP ? gpu::WARP : 1) {
        const gpu::u32x2 range = gpu::lds64(gpu::smem_start() + R::RANGES + 8 * r);
        sight.from = kvq_gpu_min(sight.from, (int)range.v[0]);
        sight.to = kvq_gpu_max(sight.to, (int)range.v[1]);
        sight.full_from = kvq_gpu_max(sight.full_from, (int)range.v[0]);
        sight.full_to = kvq_gpu_min(sight.full_to, (int)range.v[1]);
    }
    if (R::ROWS > gpu::WARP) {
        sight.from = kvq_gpu_least(sight.from);
        sight.to = -kvq_gpu_least(-sight.to);
        sight.full_from = -kvq_gpu_least(-sight.full_from);
        sight.full_to = kvq_gpu_least(sight.full_to);
    }
    return sight;
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
// parts of the group or not all of it. Entries of both lists stand in the order of the blocks.
enum { KVQ_GPU_SPECIAL = 31 };
static constexpr uint32_t KVQ_GPU_OF_POOL = ~0u; // as rel of a raw tile: rows of the pool

KVQ_DEVICE uint32_t kvq_gpu_lanes_below()
{
    return (1u << gpu::lane()) - 1;
}

// Numbers of the bits of `mask` below bit `end`.
KVQ_DEVICE int kvq_gpu_count_below(uint32_t mask, int end)
{
    return gpu::popcount(mask & kvq_gpu_bits(0, end));
}

template <class R>
KVQ_DEVICE void kvq_gpu_list_packed(const kvq_gpu_attend_args &a, kvq_gpu_here &h,
                                    const kvq_gpu_sight &sight, const kvq_gpu_group &g, int rel)
{
    const gpu::smem list = gpu::smem_start() + R::PACKED + gpu::warp() * R::LIST_BYTES;
    h.packed = gpu::ballot(g.packed != 0);
    const int at = gpu::popcount(h.packed & kvq_gpu_lanes_below());
    const bool partly = g.packed != ~0u || rel < sight.full_from || rel + 32 > sight.full_to;
    const uint64_t address = (uint64_t)(uintptr_t)g.at;
    const gpu::u32x4 entry = {
        {(uint32_t)address, (uint32_t)(address >> 32), g.packed,
         (uint32_t)rel | (uint32_t)(partly || a.cap != 0) << KVQ_GPU_SPECIAL}};
    const gpu::u32x4 empty = {{0, 0, 0, 0}};
    if (g.packed)
        gpu::sts128(list + 16 * at, entry);
    if (gpu::lane() < KVQ_GPU_STAGES - 1)
        gpu::sts128(list + 16 * (gpu::popcount(h.packed) + gpu::lane()), empty);
}

KVQ_DEVICE void kvq_gpu_put_raw(gpu::smem entry, uint32_t mask, uint32_t rel)
{
    gpu::sts32(entry, mask);
    gpu::sts32(entry + 4, rel);
}

// Tiles of 16 tokens as a mask and rel, block by block.
template <class R> KVQ_DEVICE void kvq_gpu_list_raw(kvq_gpu_here &h, uint32_t raw, uint32_t rel)
{
    const gpu::smem list = gpu::smem_start() + R::RAW + 8 * gpu::warp() * KVQ_GPU_RAW_TILES;
    const uint32_t low = raw & 0xffff, high = raw >> 16, below = kvq_gpu_lanes_below();
    h.raw_low = gpu::ballot(low != 0);
    h.raw_high = gpu::ballot(high != 0);
    int at = gpu::popcount(h.raw_low & below) + gpu::popcount(h.raw_high & below);
    if (low)
        kvq_gpu_put_raw(list + 8 * at++, low, rel);
    if (high)
        kvq_gpu_put_raw(list + 8 * at, high, rel + KVQ_GPU_TILE_TOKENS);
}

// Rel of entry i of the pool if it is one of the run's packed tokens that rows see, or -1.
KVQ_DEVICE int kvq_gpu_pool_rel(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                const kvq_gpu_sight &sight, uint32_t i)
{
    const kvq_gpu_pool pool = kvq_gpu_pool_of(a, *h.session, h.item.head);
    if (i >= pool.count)
        return -1;
    const uint64_t p = pool.entries->position[i];
    if (p < h.start + (uint64_t)sight.from || p >= h.start + (uint64_t)sight.to)
        return -1;
    return kvq_gpu_is_packed(a.recipe, kvq_gpu_page_at(*h.session, p), p) ? (int)(p - h.start) : -1;
}

// Finds this warp's groups, lane i that of block i of the run.
template <class R> KVQ_DEVICE void kvq_gpu_make_lists(const kvq_gpu_attend_args &a, kvq_gpu_here &h)
{
    const kvq_gpu_sight sight = kvq_gpu_sight_of<R>(h);
    const int lane = gpu::lane(), warp = gpu::warp();
    const int rel = lane * KVQ_BLOCK_TOKENS + warp * KVQ_GROUP_TOKENS;
    kvq_gpu_group g = {0, 0, NULL};
    if (rel < sight.to && rel + KVQ_GROUP_TOKENS > sight.from)
        g = kvq_gpu_find_group(a, *h.session, h.item.head, h.start + (uint64_t)rel);
    const uint32_t seen = kvq_gpu_bits(sight.from - rel, sight.to - rel);
    g.packed &= seen;
    g.raw &= seen;
    kvq_gpu_list_packed<R>(a, h, sight, g, rel);
    kvq_gpu_list_raw<R>(h, g.raw, (uint32_t)rel);
    h.pooled = -1;
    if (a.recipe.outliers && lane < KVQ_GPU_TILE_TOKENS)
        h.pooled = kvq_gpu_pool_rel(a, h, sight, (uint32_t)(warp * KVQ_GPU_TILE_TOKENS + lane));
    gpu::warp_sync();
}

// Which lanes have an outlier of split `split` of the run.
KVQ_DEVICE uint32_t kvq_gpu_pooled_in(const kvq_gpu_here &h, int split)
{
    const int from = split * h.split_tokens;
    return gpu::ballot(h.pooled >= from && h.pooled < from + h.split_tokens);
}

// Split `split` of the run's share of this warp's lists, without outliers.
KVQ_DEVICE kvq_gpu_part kvq_gpu_part_of(const kvq_gpu_here &h, int split)
{
    const int blocks = h.split_tokens / KVQ_BLOCK_TOKENS, from = split * blocks, to = from + blocks;
    kvq_gpu_part part;
    part.packed = kvq_gpu_count_below(h.packed, from);
    part.packed_end = kvq_gpu_count_below(h.packed, to);
    part.raw = kvq_gpu_count_below(h.raw_low, from) + kvq_gpu_count_below(h.raw_high, from);
    part.raw_end = kvq_gpu_count_below(h.raw_low, to) + kvq_gpu_count_below(h.raw_high, to);
    part.pool = false;
    return part;
}

// The same with its outliers, which are listed now.
template <class R>
KVQ_DEVICE kvq_gpu_part kvq_gpu_list_pool(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                          int split)
{
    kvq_gpu_part part = kvq_gpu_part_of(h, split);
    if (!a.recipe.outliers)
        return part;
    const uint32_t mask = kvq_gpu_pooled_in(h, split);
    gpu::warp_sync(); // all have read the last split's
    if (gpu::lane() == 0)
        kvq_gpu_put_raw(gpu::smem_start() + R::RAW +
                            8 * ((gpu::warp() + 1) * KVQ_GPU_RAW_TILES - 1),
                        mask, KVQ_GPU_OF_POOL);
    gpu::warp_sync();
    part.pool = mask != 0;
    part.raw_end += part.pool;
    return part;
}

// Which splits of the run have packed groups, and which have raw tiles, in this warp's lists or,
// where all threads have been told, in any warp's.
struct kvq_gpu_votes {
    uint32_t packed, raw;
};

// This warp's, for all threads of the block, which are told after their next sync.
template <class R> KVQ_DEVICE void kvq_gpu_vote(const kvq_gpu_attend_args &a, const kvq_gpu_here &h)
{
    const int blocks = h.split_tokens / KVQ_BLOCK_TOKENS;
    kvq_gpu_votes own = {0, 0};
    KVQ_NO_UNROLL
    for (int s = 0; s < h.splits; s++) {
        const uint32_t some = kvq_gpu_bits(s * blocks, (s + 1) * blocks);
        const bool pool = a.recipe.outliers && kvq_gpu_pooled_in(h, s);
        own.packed |= (uint32_t)((h.packed & some) != 0) << s;
        own.raw |= (uint32_t)(((h.raw_low | h.raw_high) & some) != 0 || pool) << s;
    }
    if (gpu::lane() == 0) {
        gpu::sts32(gpu::smem_start() + R::VOTES + 8 * gpu::warp(), own.packed);
        gpu::sts32(gpu::smem_start() + R::VOTES + 8 * gpu::warp() + 4, own.raw);
    }
}

template <class R> KVQ_DEVICE kvq_gpu_votes kvq_gpu_count_votes()
{
    kvq_gpu_votes all = {0, 0};
    for (int w = 0; w < KVQ_GPU_WARPS; w++) {
        const gpu::u32x2 words = gpu::lds64(gpu::smem_start() + R::VOTES + 8 * w);
        all.packed |= words.v[0];
        all.raw |= words.v[1];
    }
    return all;
}

// ---- Runs ----

// How many of the items from i on, before `end`, are splits one after the other of the same rows
// and head as item i.
KVQ_DEVICE int kvq_gpu_run_at(const kvq_gpu_attend_args &a, const kvq_gpu_item &item, uint32_t i,
                              uint32_t end)
{
    const uint32_t at = i + (uint32_t)gpu::lane();
    bool same = false;
    if (at < end) {
        const kvq_gpu_item &other = a.items[at];
        same = other.tile == item.tile && other.tiles == item.tiles && other.head == item.head &&
               other.split == item.split + (uint32_t)gpu::lane();
    }
    const uint32_t others = ~gpu::ballot(same);
    return others ? gpu::popcount((others & (0 - others)) - 1) : gpu::WARP;
}

// Everything about the run at item number i but its queries. All threads; what the rows are told is
// there after the next sync of the block.
template <class R>
KVQ_DEVICE kvq_gpu_here kvq_gpu_enter(const kvq_gpu_attend_args &a, uint32_t i, uint32_t end)
{
    kvq_gpu_here h = {};
    h.item = a.items[i];
    h.splits = kvq_gpu_run_at(a, h.item, i, end);
    h.session = &a.sessions[a.tiles[h.item.tile].session];
    h.split_tokens = (int)h.session->split_tokens;
    h.splits = kvq_gpu_min(h.splits, KVQ_GPU_RUN_BLOCKS * KVQ_BLOCK_TOKENS / h.split_tokens);
    h.start = (uint64_t)h.item.split * h.session->split_tokens;
    for (uint32_t t = 0; t < h.item.tiles; t++)
        h.rows += (int)a.tiles[h.item.tile + t].rows;
    kvq_gpu_set_row<R>(a, h);
    return h;
}

// Where all threads find the run again; they do after the next sync of the block.
template <class R> KVQ_DEVICE void kvq_gpu_remember(const kvq_gpu_here &h)
{
    const gpu::smem here = gpu::smem_start() + R::HERE;
    const gpu::u32x4 item = {
        {h.item.tile, h.item.tiles | (uint32_t)h.item.head << 16, h.item.split, 0}};
    const gpu::u32x4 size = {{(uint32_t)h.splits, (uint32_t)h.split_tokens, (uint32_t)h.rows, 0}};
    const gpu::u32x4 own = {{h.packed, h.raw_low, h.raw_high, 0}};
    if (gpu::thread() == 0) {
        gpu::sts128(here, item);
        gpu::sts128(here + 16, size);
    }
    if (gpu::lane() == 0)
        gpu::sts128(here + 32 + 16 * gpu::warp(), own);
    if (gpu::lane() < KVQ_GPU_TILE_TOKENS)
        gpu::sts32(gpu::smem_start() + R::POOLED +
                       4 * (gpu::warp() * KVQ_GPU_TILE_TOKENS + gpu::lane()),
                   (uint32_t)h.pooled);
}

template <class R> KVQ_DEVICE kvq_gpu_here kvq_gpu_recall(const kvq_gpu_attend_args &a)
{
    const gpu::smem here = gpu::smem_start() + R::HERE;
    const gpu::u32x4 item = gpu::lds128(here), size = gpu::lds128(here + 16);
    const gpu::u32x4 own = gpu::lds128(here + 32 + 16 * gpu::warp());
    kvq_gpu_here h = {};
    h.item.tile = item.v[0];
    h.item.tiles = (uint16_t)item.v[1];
    h.item.head = (uint16_t)(item.v[1] >> 16);
    h.item.split = item.v[2];
    h.session = &a.sessions[a.tiles[h.item.tile].session];
    h.splits = (int)size.v[0];
    h.split_tokens = (int)size.v[1];
    h.rows = (int)size.v[2];
    h.start = (uint64_t)h.item.split * size.v[1];
    h.packed = own.v[0];
    h.raw_low = own.v[1];
    h.raw_high = own.v[2];
    h.pooled = -1;
    if (a.recipe.outliers && gpu::lane() < KVQ_GPU_TILE_TOKENS)
        h.pooled = (int)gpu::lds32(gpu::smem_start() + R::POOLED +
                                   4 * (gpu::warp() * KVQ_GPU_TILE_TOKENS + gpu::lane()));
    return h;
}

#endif
