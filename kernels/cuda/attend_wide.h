// SPDX-License-Identifier: Apache-2.0
//
// The wide attention kernels, for 64 query rows: prefill over a cached prefix, and more query heads
// to a KV head than the narrow kernels take. Queries are the M side of matrix products, 16 rows to
// a warp:
//
//   logits   S[row][token]   = Q K^T
//   output   O[row][channel] = P V
//
// Step by step each of the four warps brings a tile of 16 tokens into shared memory, dequantized or
// raw as in attend_any.h and attend_raw.h, and then attends with its rows to the tiles of all four.
// So a block is unpacked once for 64 rows. First all packed tokens, then, after values are rotated
// back, all raw ones; running maxima, sums and output stay with the warp all the way.
#ifndef KVQ_KERNELS_CUDA_ATTEND_WIDE_H
#define KVQ_KERNELS_CUDA_ATTEND_WIDE_H

#include "kernels/cuda/attend_any.h"
#include "kernels/cuda/attend_raw.h"

// Shared memory, as struct kvq_gpu_room has it where names are the same. Queries are those of the
// phase; the tiles and, after them, the output take turns.
template <int D> struct kvq_gpu_wide_room {
    typedef kvq_gpu_tile_room<D> T;
    static constexpr int ROWS = KVQ_GPU_WIDE_ROWS;
    static constexpr bool PLAIN = D < 256;                     // else registers are short
    static constexpr int TILES = D == 256 ? 2 : KVQ_GPU_WARPS; // attended to at once: registers
    static constexpr int RANGES = 0;
    static constexpr int OWNERS = RANGES + 8 * ROWS;
    static constexpr int PLACES = OWNERS + 8 * ROWS;
    static constexpr int FACTORS = PLACES + 16 * ROWS;
    static constexpr int STATE = FACTORS + 8 * ROWS;
    static constexpr int LAST = STATE + 8 * ROWS;
    static constexpr int HERE = LAST + 4 * ROWS;
    static constexpr int POOLED = HERE + 96;
    static constexpr int VOTES = POOLED + 256;
    static constexpr int PACKED = VOTES + 64;
    static constexpr int LIST_BYTES = 16 * (KVQ_GPU_RUN_BLOCKS + KVQ_GPU_STAGES - 1);
    static constexpr int RAW = PACKED + KVQ_GPU_WARPS * LIST_BYTES;
    static constexpr int RAW_END = RAW + KVQ_GPU_WARPS * KVQ_GPU_RAW_TILES * 8;
    static constexpr int QUERIES = (RAW_END + 127) / 128 * 128; // and the rest of bf16 ones
    static constexpr int PACKED_QUERIES = QUERIES;
    static constexpr int QUERY_BYTES = ROWS * 2 * D;
    static constexpr int STAGES = QUERIES + 2 * QUERY_BYTES;
    static constexpr int OUT = STAGES;
    static constexpr int BYTES = STAGES + KVQ_GPU_WARPS * T::BYTES;
    static_assert(ROWS * D * 4 <= KVQ_GPU_WARPS * T::BYTES, "the output fits the tiles");
};

// A warp's 16 rows; lane = 4 g + j has rows g and g + 8 as [0] and [1].
template <int D> struct kvq_gpu_rows {
    float m[2], l[2];   // l: this lane's part until the end
    float o[D / 8][4];  // channels 8 t + 2 j and the next: row g, row g + 8
    float factor[2];    // of logits
    int from[2], to[2]; // what they see
    float cap;
    gpu::smem queries, rest; // of the warp's rows
};

// How many tiles each warp's list has.
struct kvq_gpu_counts {
    int tiles[KVQ_GPU_WARPS];
    int own, most;
};

template <class R> KVQ_DEVICE kvq_gpu_counts kvq_gpu_count_tiles(int own)
{
    const gpu::smem votes = gpu::smem_start() + R::VOTES;
    kvq_gpu_counts c;
    gpu::block_sync(); // nobody reads the votes before any more
    if (gpu::lane() == 0)
        gpu::sts32(votes + 4 * gpu::warp(), (uint32_t)own);
    gpu::block_sync();
    c.own = own;
    c.most = 0;
    for (int w = 0; w < KVQ_GPU_WARPS; w++) {
        c.tiles[w] = (int)gpu::lds32(votes + 4 * w);
        c.most = kvq_gpu_max(c.most, c.tiles[w]);
    }
    return c;
}

template <int D> KVQ_DEVICE void kvq_gpu_rows_start(kvq_gpu_rows<D> &r)
{
    r = {};
    r.m[0] = r.m[1] = KVQ_GPU_NOTHING;
}

// The phase's queries and what goes with them.
template <int D>
KVQ_DEVICE void kvq_gpu_rows_enter(const kvq_gpu_attend_args &a, kvq_gpu_rows<D> &r, bool packed)
{
    typedef kvq_gpu_wide_room<D> R;
    const gpu::smem smem = gpu::smem_start();
    r.cap = a.cap;
    r.queries = smem + R::QUERIES + 16 * gpu::warp() * 2 * D;
    r.rest = r.queries + R::QUERY_BYTES;
    for (int i = 0; i < 2; i++) {
        const int row = 16 * gpu::warp() + (gpu::lane() >> 2) + 8 * i;
        const gpu::u32x2 range = gpu::lds64(smem + R::RANGES + 8 * row);
        r.factor[i] = kvq_gpu_get_float(smem + R::FACTORS + 8 * row + (packed ? 4 : 0));
        r.from[i] = (int)range.v[0];
        r.to[i] = (int)range.v[1];
    }
}

// s[2 w + n][2 i + e]: row g + 8 i, token 8 n + 2 j + e of the tile of warp first + w; `queries`
// times K.
template <int D, bool BF16>
KVQ_DEVICE void kvq_gpu_wide_products(const kvq_gpu_counts &counts, int step, int first,
                                      gpu::smem queries,
                                      float s[2 * kvq_gpu_wide_room<D>::TILES][4])
{
    typedef kvq_gpu_wide_room<D> R;
    typedef kvq_gpu_tile_room<D> T;
    const int matrix = gpu::lane() >> 3, row = gpu::lane() & 7;
    KVQ_UNROLL
    for (int c = 0; c < D / 16; c++) {
        uint32_t q[4];
        gpu::ldmatrix(q, kvq_gpu_chunk<D>(queries, row + 8 * (matrix & 1), 2 * c + (matrix >> 1)));
        KVQ_UNROLL
        for (int w = 0; w < R::TILES; w++) {
            uint32_t k[4];
            if (step >= counts.tiles[first + w])
                continue;
            const gpu::smem tile = gpu::smem_start() + R::STAGES + (first + w) * T::BYTES;
            gpu::ldmatrix(
                k, kvq_gpu_chunk<D>(tile + T::K, row + 8 * (matrix >> 1), 2 * c + (matrix & 1)));
            kvq_gpu_mma<BF16>(s[2 * w], q, k[0], k[1]);
            kvq_gpu_mma<BF16>(s[2 * w + 1], q, k[2], k[3]);
        }
    }
}

// Logits in powers of two, -inf where the row does not see the token.
template <int D>
KVQ_DEVICE void kvq_gpu_wide_scale(const kvq_gpu_counts &counts, int step, int first,
                                   const kvq_gpu_rows<D> &r,
                                   float s[2 * kvq_gpu_wide_room<D>::TILES][4])
{
    typedef kvq_gpu_wide_room<D> R;
    typedef kvq_gpu_tile_room<D> T;
    KVQ_UNROLL
    for (int n = 0; n < 2 * kvq_gpu_wide_room<D>::TILES; n++) {
        const bool there = step < counts.tiles[first + n / 2];
        const gpu::smem tile = gpu::smem_start() + R::STAGES + (first + n / 2) * T::BYTES;
        const int at = 4 * (8 * (n & 1) + 2 * (gpu::lane() & 3));
        gpu::u32x2 rels = {{~0u, ~0u}}, norms = {{0, 0}};
        if (there) {
            rels = gpu::lds64(tile + T::RELS + at);
            norms = gpu::lds64(tile + T::NORMS + at);
        }
        KVQ_UNROLL
        for (int x = 0; x < 4; x++) {
            const int i = x >> 1, rel = (int)rels.v[x & 1];
            float logit = s[n][x] * (r.factor[i] * gpu::as_float(norms.v[x & 1]));
            if (r.cap != 0)
                logit = kvq_gpu_cap(r.cap, logit);
            s[n][x] = rel >= r.from[i] && rel < r.to[i] ? logit : -INFINITY;
        }
    }
}

// Raises the running maxima that a logit passes by more than 2^KVQ_GPU_GROWTH.
template <int D>
KVQ_DEVICE void kvq_gpu_wide_raise(kvq_gpu_rows<D> &r,
                                   const float s[2 * kvq_gpu_wide_room<D>::TILES][4])
{
    float most[2];
    bool some = false;
    KVQ_UNROLL
    for (int i = 0; i < 2; i++) {
        most[i] = -INFINITY;
        for (int n = 0; n < 2 * kvq_gpu_wide_room<D>::TILES; n++)
            most[i] = fmaxf(most[i], fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        for (int d = 1; d < 4; d *= 2)
            most[i] = fmaxf(most[i], gpu::shuffle_xor(most[i], d));
        some |= kvq_gpu_passes(most[i], r.m[i]);
    }
    if (!gpu::any(some))
        return;
    KVQ_UNROLL
    for (int i = 0; i < 2; i++) {
        const float m = kvq_gpu_passes(most[i], r.m[i]) ? most[i] : r.m[i];
        const float shrink = gpu::power2(r.m[i] - m);
        r.m[i] = m;
        r.l[i] *= shrink;
        for (int t = 0; t < D / 8; t++) {
            r.o[t][2 * i] *= shrink;
            r.o[t][2 * i + 1] *= shrink;
        }
    }
}

// Adds the values of warp w's tile with weights s, and what fp16 or bf16 weights leave.
template <int D, bool BF16>
KVQ_DEVICE void kvq_gpu_wide_values(kvq_gpu_rows<D> &r, int w, const float s[2][4])
{
    typedef kvq_gpu_wide_room<D> R;
    typedef kvq_gpu_tile_room<D> T;
    const int matrix = gpu::lane() >> 3, row = gpu::lane() & 7;
    uint32_t p[4], rest[4];
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) { // row g, row g + 8; then tokens from 8 on
        const float lo = s[i >> 1][2 * (i & 1)], hi = s[i >> 1][2 * (i & 1) + 1];
        p[i] = BF16 ? gpu::pack2_bf16(lo, hi) : gpu::pack2(lo, hi);
        if (BF16)
            rest[i] = gpu::pack2_bf16(lo - gpu::as_float(p[i] << 16),
                                      hi - gpu::as_float(p[i] & 0xffff0000u));
    }
    KVQ_UNROLL
    for (int c = 0; c < D / 8; c += 2) {
        uint32_t v[4];
        gpu::ldmatrix_trans(v, kvq_gpu_chunk<D>(gpu::smem_start() + R::STAGES + w * T::BYTES + T::V,
                                                row + 8 * (matrix & 1), c + (matrix >> 1)));
        KVQ_UNROLL
        for (int n = 0; n < 2; n++) {
            kvq_gpu_mma<BF16>(r.o[c + n], p, v[2 * n], v[2 * n + 1]);
            if (BF16)
                kvq_gpu_mma<BF16>(r.o[c + n], rest, v[2 * n], v[2 * n + 1]);
        }
    }
}

// Attends to some of a step's tiles, from warp `first`'s on.
template <int D, bool BF16>
KVQ_DEVICE void kvq_gpu_wide_some(kvq_gpu_rows<D> &r, const kvq_gpu_counts &counts, int step,
                                  int first)
{
    constexpr int TILES = kvq_gpu_wide_room<D>::TILES;
    float s[2 * TILES][4] = {};
    kvq_gpu_wide_products<D, BF16>(counts, step, first, r.queries, s);
    if (BF16)
        kvq_gpu_wide_products<D, BF16>(counts, step, first, r.rest, s);
    kvq_gpu_wide_scale<D>(counts, step, first, r, s);
    kvq_gpu_wide_raise<D>(r, s);
    KVQ_UNROLL
    for (int n = 0; n < 2 * TILES; n++)
        for (int x = 0; x < 4; x++) {
            s[n][x] = gpu::power2(s[n][x] - r.m[x >> 1]);
            r.l[x >> 1] += s[n][x];
        }
    KVQ_UNROLL
    for (int w = 0; w < TILES; w++)
        if (step < counts.tiles[first + w])
            kvq_gpu_wide_values<D, BF16>(r, first + w, s + 2 * w);
}

// Attends to the tiles of a step.
template <int D, bool BF16>
KVQ_DEVICE void kvq_gpu_wide_attend(kvq_gpu_rows<D> &r, const kvq_gpu_counts &counts, int step)
{
    KVQ_UNROLL
    for (int first = 0; first < KVQ_GPU_WARPS; first += kvq_gpu_wide_room<D>::TILES)
        kvq_gpu_wide_some<D, BF16>(r, counts, step, first);
}

// ---- Phases ----

template <int D>
KVQ_DEVICE void kvq_gpu_wide_packed(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                    kvq_gpu_rows<D> &r, const kvq_gpu_counts &counts)
{
    typedef kvq_gpu_wide_room<D> R;
    const gpu::smem own = gpu::smem_start() + R::STAGES + gpu::warp() * kvq_gpu_tile_room<D>::BYTES;
    KVQ_NO_UNROLL
    for (int step = 0; step < counts.most; step++) {
        if (step < counts.own)
            kvq_gpu_bring_packed<D, R>(a, h, step, own);
        gpu::block_sync();
        kvq_gpu_wide_attend<D, false>(r, counts, step);
        gpu::block_sync();
    }
}

template <int D, bool BF16>
KVQ_DEVICE void kvq_gpu_wide_raw(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                 const kvq_gpu_part &part, kvq_gpu_rows<D> &r,
                                 const kvq_gpu_counts &counts)
{
    typedef kvq_gpu_wide_room<D> R;
    const gpu::smem own = gpu::smem_start() + R::STAGES + gpu::warp() * kvq_gpu_tile_room<D>::BYTES;
    KVQ_NO_UNROLL
    for (int step = 0; step < counts.most; step++) {
        kvq_gpu_fetch_raw<D, R>(a, h, part, step, own);
        gpu::copy_wait<0>();
        gpu::block_sync();
        kvq_gpu_wide_attend<D, BF16>(r, counts, step);
        gpu::block_sync();
    }
}

// The output to shared memory, or back from there. Between two syncs of the block.
template <int D> KVQ_DEVICE void kvq_gpu_rows_put(const kvq_gpu_rows<D> &r)
{
    typedef kvq_gpu_wide_room<D> R;
    const int row = 16 * gpu::warp() + (gpu::lane() >> 2);
    const gpu::smem out = gpu::smem_start() + R::OUT + 4 * (row * D + 2 * (gpu::lane() & 3));
    KVQ_UNROLL
    for (int t = 0; t < D / 8; t++)
        for (int x = 0; x < 4; x++)
            kvq_gpu_put_float(out + 4 * (8 * (x >> 1) * D + 8 * t + (x & 1)), r.o[t][x]);
}

template <int D> KVQ_DEVICE void kvq_gpu_rows_get(kvq_gpu_rows<D> &r)
{
    typedef kvq_gpu_wide_room<D> R;
    const int row = 16 * gpu::warp() + (gpu::lane() >> 2);
    const gpu::smem out = gpu::smem_start() + R::OUT + 4 * (row * D + 2 * (gpu::lane() & 3));
    KVQ_UNROLL
    for (int t = 0; t < D / 8; t++)
        for (int x = 0; x < 4; x++)
            r.o[t][x] = kvq_gpu_get_float(out + 4 * (8 * (x >> 1) * D + 8 * t + (x & 1)));
}

// Rotates the warp's sums of packed values back.
template <int D>
KVQ_DEVICE void kvq_gpu_rows_rotate(const kvq_gpu_attend_args &a, kvq_gpu_rows<D> &r)
{
    typedef kvq_gpu_wide_room<D> R;
    kvq_gpu_rows_put<D>(r);
    gpu::warp_sync();
    KVQ_NO_UNROLL
    for (int row = 16 * gpu::warp(); row < 16 * gpu::warp() + 16; row++) {
        const gpu::smem out = gpu::smem_start() + R::OUT + 4 * row * D;
        float x[D / 32];
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++)
            x[i] = kvq_gpu_get_float(out + 4 * (64 * (i >> 1) + 2 * gpu::lane() + (i & 1)));
        kvq_gpu_rotate<D>(a.recipe, a.recipe.v.rotation, x, true);
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++)
            kvq_gpu_put_float(out + 4 * (64 * (i >> 1) + 2 * gpu::lane() + (i & 1)), x[i]);
    }
    gpu::warp_sync();
    kvq_gpu_rows_get<D>(r);
}

// Where kvq_gpu_wide_hand_over looks for them.
template <int D> KVQ_DEVICE void kvq_gpu_rows_end(kvq_gpu_rows<D> &r)
{
    typedef kvq_gpu_wide_room<D> R;
    kvq_gpu_rows_put<D>(r);
    for (int i = 0; i < 2; i++) {
        const gpu::smem state =
            gpu::smem_start() + R::STATE + 8 * (16 * gpu::warp() + (gpu::lane() >> 2) + 8 * i);
        for (int d = 1; d < 4; d *= 2)
            r.l[i] += gpu::shuffle_xor(r.l[i], d);
        if ((gpu::lane() & 3) == 0) {
            kvq_gpu_put_float(state, r.m[i]);
            kvq_gpu_put_float(state + 4, r.l[i]);
        }
    }
}

// Hands over the sums, rows by warp.
template <int D>
KVQ_DEVICE void kvq_gpu_wide_hand_over(const kvq_gpu_attend_args &a, const kvq_gpu_here &h)
{
    typedef kvq_gpu_wide_room<D> R;
    const gpu::smem smem = gpu::smem_start();
    KVQ_NO_UNROLL
    for (int row = gpu::warp(); row < h.rows; row += KVQ_GPU_WARPS) {
        const gpu::u32x2 ml = gpu::lds64(smem + R::STATE + 8 * row);
        float o[D / 32];
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++)
            o[i] = kvq_gpu_get_float(smem + R::OUT + 4 * row * D +
                                     4 * (64 * (i >> 1) + 2 * gpu::lane() + (i & 1)));
        kvq_gpu_hand_over<D, R>(a, h, 0, row, gpu::as_float(ml.v[0]), gpu::as_float(ml.v[1]), o);
    }
}

// ---- Items ----

template <int D>
KVQ_DEVICE void kvq_gpu_wide_item(const kvq_gpu_attend_args &a, const kvq_gpu_here &h)
{
    typedef kvq_gpu_wide_room<D> R;
    kvq_gpu_rows<D> r;
    kvq_gpu_rows_start<D>(r);
    const kvq_gpu_part part = kvq_gpu_list_pool<R>(a, h, 0);
    const kvq_gpu_counts packed = kvq_gpu_count_tiles<R>(2 * part.packed_end);
    if (packed.most > 0) {
        kvq_gpu_bring_queries<D, R>(a, h, false, true);
        gpu::block_sync();
        kvq_gpu_rows_enter<D>(a, r, true);
        kvq_gpu_wide_packed<D>(a, h, r, packed);
        if (a.recipe.v.rotation != KVQ_ROTATE_NONE)
            kvq_gpu_rows_rotate<D>(a, r);
    }
    const kvq_gpu_counts raw = kvq_gpu_count_tiles<R>(part.raw_end);
    if (raw.most > 0) {
        kvq_gpu_bring_queries<D, R>(a, h, true, false);
        gpu::block_sync();
        kvq_gpu_rows_enter<D>(a, r, false);
        if (a.recipe.dtype == KVQ_BF16)
            kvq_gpu_wide_raw<D, true>(a, h, part, r, raw);
        else
            kvq_gpu_wide_raw<D, false>(a, h, part, r, raw);
    }
    kvq_gpu_rows_end<D>(r);
    gpu::block_sync();
    kvq_gpu_wide_hand_over<D>(a, h);
    gpu::block_sync();
    kvq_gpu_leave<D, R>(a, h);
}

// The block's items, one at a time: their queries take long anyhow.
template <int D> KVQ_DEVICE void kvq_gpu_wide_all(const kvq_gpu_attend_args &a)
{
    typedef kvq_gpu_wide_room<D> R;
    static_assert(R::BYTES == KVQ_GPU_WIDE_BYTES(D), "the host knows the size");
    KVQ_NO_UNROLL
    for (uint32_t i = (uint32_t)gpu::block_x(); i < *a.n_items; i += (uint32_t)gpu::grid_x()) {
        kvq_gpu_here h = kvq_gpu_enter<R>(a, i, i + 1);
        gpu::block_sync();
        kvq_gpu_make_lists<R>(a, h);
        kvq_gpu_remember<R>(h);
        kvq_gpu_wide_item<D>(a, h);
    }
}

#endif
