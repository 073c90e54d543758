// SPDX-License-Identifier: Apache-2.0
//
// Packed groups of any codec: a warp dequantizes 16 tokens at a time into a tile of fp16 rows, and
// attend_tile.h does the rest. K's norms are factors of the logits.
#ifndef KVQ_KERNELS_CUDA_ATTEND_ANY_H
#define KVQ_KERNELS_CUDA_ATTEND_ANY_H

#include "kernels/cuda/attend_tile.h"
#include "kernels/cuda/dequant.h"

// Rows of K or V of tokens [first, first + 16) of a group, to rows of a tile: Lloyd-Max of any
// width, code by code.
template <int D>
KVQ_DEVICE void kvq_gpu_dequant_rows(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                     int first, gpu::smem rows)
{
    KVQ_NO_UNROLL
    for (int i = gpu::lane(); i < KVQ_GPU_TILE_TOKENS * D / 2; i += gpu::WARP) {
        const int t = i / (D / 2), c = i % (D / 2) * 2;
        gpu::sts32(kvq_gpu_chunk<D>(rows, t, c / 8) + c % 8 * 2,
                   kvq_gpu_scalar2(side, p, v, D, first + t, c));
    }
}

// The same of plain codecs. K: a lane takes 16 channels of some tokens.
template <int D, int BITS, bool LLOYD, bool CHANNELS>
KVQ_DEVICE void kvq_gpu_plain_k_rows(const kvq_recipe_side &side, const kvq_gpu_packed &p,
                                     int first, gpu::smem rows)
{
    constexpr int PARTS = D / 16, APART = gpu::WARP / PARTS, N = KVQ_GPU_TILE_TOKENS / APART;
    const int part = gpu::lane() % PARTS, own = gpu::lane() / PARTS;
    const kvq_gpu_plain plain = kvq_gpu_plain_of(side);
    kvq_gpu_k_cells<N, BITS> k;
    kvq_gpu_load_k<N, BITS, CHANNELS>(side, plain, p, D, first + own, APART, part, k);
    KVQ_UNROLL
    for (int n = 0; n < N; n++) {
        const int t = own + n * APART;
        uint32_t x[8];
        kvq_gpu_plain_k<N, BITS, LLOYD, CHANNELS>(plain, k, n, x);
        const gpu::u32x4 lower = {{x[0], x[1], x[2], x[3]}}, upper = {{x[4], x[5], x[6], x[7]}};
        gpu::sts128(kvq_gpu_chunk<D>(rows, t, 2 * part), lower);
        gpu::sts128(kvq_gpu_chunk<D>(rows, t, 2 * part + 1), upper);
    }
}

// V: a lane takes four pairs of channels of four tokens.
template <int D, int BITS, bool LLOYD, bool CHANNELS>
KVQ_DEVICE void kvq_gpu_plain_v_rows(const kvq_recipe_side &side, const kvq_gpu_packed &p,
                                     int first, gpu::smem rows)
{
    constexpr int PAIRS = D / 8; // of channels at position 0
    const kvq_gpu_plain plain = kvq_gpu_plain_of(side);
    KVQ_NO_UNROLL
    for (int i = gpu::lane(); i < 4 * PAIRS; i += gpu::WARP) {
        const int pair = i % PAIRS, set = i / PAIRS, t = 8 * (set >> 1) + (set & 1);
        const int c = D == 64 ? 2 * pair : pair / 16 * 128 + pair % 16 * 2;
        kvq_gpu_place_words<BITS> words[2];
        for (int n = 0; n < 2; n++)
            words[n] = kvq_gpu_place_words_at<BITS>(
                p.codes, D, kvq__v_place(BITS, D, kvq_gpu_v_index(D, first + t, c + n)));
        kvq_gpu_params<8> params;
        kvq_gpu_v_params<CHANNELS>(side.row, p.scales, D, first + t, c, params.scales);
        if (plain.has_zeros)
            kvq_gpu_v_params<CHANNELS>(side.row, p.zeros, D, first + t, c, params.zeros);
        kvq_gpu_complete<8>(plain, params);
        KVQ_UNROLL
        for (int s = 0; s < 4; s++) {
            uint32_t x[4];
            kvq_gpu_plain_v<BITS, LLOYD, CHANNELS>(plain, words, s, params, x);
            KVQ_UNROLL
            for (int k = 0; k < 4; k++) { // chunks of the positions differ in bits of their own
                const int row = t + 2 * k, chunk = (c / 8) ^ (row & 7);
                const int step = (int)kvq_gpu_v_step(D, s) / 8;
                gpu::sts32(rows + row * 2 * D + ((chunk ^ step) << 4) + c % 8 * 2, x[k]);
            }
        }
    }
}

template <int D, int BITS, bool LLOYD, bool CHANNELS>
KVQ_DEVICE void kvq_gpu_plain_side(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                   int first, gpu::smem rows)
{
    if (v)
        kvq_gpu_plain_v_rows<D, BITS, LLOYD, CHANNELS>(side, p, first, rows);
    else
        kvq_gpu_plain_k_rows<D, BITS, LLOYD, CHANNELS>(side, p, first, rows);
}

template <int D, int BITS, bool LLOYD>
KVQ_DEVICE void kvq_gpu_plain_rows(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                   int first, gpu::smem rows)
{
    if (!LLOYD && side.row.axis == KVQ_PER_CHANNEL)
        kvq_gpu_plain_side<D, BITS, LLOYD, true>(side, p, v, first, rows);
    else
        kvq_gpu_plain_side<D, BITS, LLOYD, false>(side, p, v, first, rows);
}

// The same of codebooks: a lane takes sub-vectors of a token, some at a time.
template <int D, int VECTOR>
KVQ_DEVICE void kvq_gpu_book_rows(const kvq_recipe_side &side, const kvq_gpu_packed &p, int first,
                                  gpu::smem rows)
{
    constexpr int SUBS = D / VECTOR, AHEAD = 4, APART = gpu::WARP / KVQ_GPU_TILE_TOKENS;
    const int t = gpu::lane() % KVQ_GPU_TILE_TOKENS;
    KVQ_NO_UNROLL
    for (int i = gpu::lane() / KVQ_GPU_TILE_TOKENS; i < SUBS; i += APART * AHEAD) {
        uint32_t codes[AHEAD], x[AHEAD][VECTOR / 2];
        KVQ_UNROLL
        for (int n = 0; n < AHEAD; n++)
            codes[n] = kvq__book_code(p.codes, side.row.bits, SUBS, i + APART * n, first + t);
        KVQ_UNROLL
        for (int n = 0; n < AHEAD; n++)
            kvq_gpu_centroid<VECTOR>(p, i + APART * n, codes[n], x[n]);
        KVQ_UNROLL
        for (int n = 0; n < AHEAD; n++) {
            KVQ_UNROLL
            for (int k = 0; k < VECTOR / 2; k++) {
                const int c = (i + APART * n) * VECTOR + 2 * k;
                gpu::sts32(kvq_gpu_chunk<D>(rows, t, c / 8) + c % 8 * 2, x[n][k]);
            }
        }
    }
}

// Rows of K or V of tokens [first, first + 16) of a group, to rows of a tile.
template <int D>
KVQ_DEVICE void kvq_gpu_side_rows(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                  int first, gpu::smem rows)
{
    const uint32_t bits = side.row.bits, vector = side.row.vector;
    if (side.row.codec == KVQ_CODEC_BOOK && vector == 4)
        kvq_gpu_book_rows<D, 4>(side, p, first, rows);
    else if (side.row.codec == KVQ_CODEC_BOOK && vector == 8)
        kvq_gpu_book_rows<D, 8>(side, p, first, rows);
    else if (side.row.codec == KVQ_CODEC_BOOK)
        kvq_gpu_book_rows<D, 2>(side, p, first, rows);
    else if (!kvq_gpu_is_plain(side.row))
        kvq_gpu_dequant_rows<D>(side, p, v, first, rows);
    else if (side.row.codec == KVQ_CODEC_LLOYD)
        kvq_gpu_plain_rows<D, 2, true>(side, p, v, first, rows);
    else if (bits == 1)
        kvq_gpu_plain_rows<D, 1, false>(side, p, v, first, rows);
    else if (bits == 2)
        kvq_gpu_plain_rows<D, 2, false>(side, p, v, first, rows);
    else if (bits == 3)
        kvq_gpu_plain_rows<D, 3, false>(side, p, v, first, rows);
    else if (bits == 4)
        kvq_gpu_plain_rows<D, 4, false>(side, p, v, first, rows);
    else
        kvq_gpu_plain_rows<D, 8, false>(side, p, v, first, rows);
}

// Tokens [first, first + 16) of a group into a tile.
template <int D>
KVQ_DEVICE void kvq_gpu_dequant_tile(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                     const uint8_t *record, int first, gpu::smem tile)
{
    typedef kvq_gpu_tile_room<D> T;
    const kvq_recipe &r = a.recipe;
    const kvq_gpu_packed k = kvq_gpu_packed_at(r, a.book, false, record, gpu::warp(), h.item.head);
    const kvq_gpu_packed v = kvq_gpu_packed_at(r, a.book, true, record, gpu::warp(), h.item.head);
    kvq_gpu_side_rows<D>(r.k, k, false, first, tile + T::K);
    kvq_gpu_side_rows<D>(r.v, v, true, first, tile + T::V);
}

// The norm of the lane's token of the tile; 1 of formats without norms.
KVQ_DEVICE float kvq_gpu_norm_of(const kvq_gpu_attend_args &a, const uint8_t *record, int first)
{
    if (a.recipe.k_token_scale == KVQ_SCALE_NONE)
        return 1;
    const kvq_packed at = kvq_packed_at(&a.recipe.layout, (uint8_t *)record, (uint32_t)gpu::warp());
    const uint16_t *norms = (const uint16_t *)(at.group + a.recipe.layout.k_norms);
    return kvq__f16_to_f32(norms[first + gpu::lane() % KVQ_GPU_TILE_TOKENS]);
}

// Rel and norm of each token of the tile; tokens without a bit in `mask` are not there.
template <int D>
KVQ_DEVICE void kvq_gpu_label_tile(int first, uint32_t mask, int rel, float norm, gpu::smem tile)
{
    typedef kvq_gpu_tile_room<D> T;
    const int t = first + gpu::lane() % KVQ_GPU_TILE_TOKENS;
    if (gpu::lane() < KVQ_GPU_TILE_TOKENS) {
        gpu::sts32(tile + T::RELS + 4 * gpu::lane(), mask >> t & 1 ? (uint32_t)(rel + t) : ~0u);
        kvq_gpu_put_float(tile + T::NORMS + 4 * gpu::lane(), norm);
    }
}

// Has the group of the list's next entry come nearer, if there is one.
KVQ_DEVICE void kvq_gpu_prefetch_group(const kvq_gpu_attend_args &a, const gpu::u32x2 &next)
{
    const uint64_t at = next.v[0] | (uint64_t)next.v[1] << 32;
    const uint32_t line = 128;
    for (uint32_t i = line * (uint32_t)gpu::lane(); at && i < a.recipe.layout.group_bytes;
         i += line * gpu::WARP)
        gpu::prefetch((const uint8_t *)(uintptr_t)at + i);
}

// Brings tile i of the warp's list of packed groups, each of which has two. `i` counts from the
// run's first group on. Returns whether logits of the group need more than a product.
template <int D, class R>
KVQ_DEVICE bool kvq_gpu_bring_packed(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int i,
                                     gpu::smem tile)
{
    const gpu::smem list = gpu::smem_start() + R::PACKED + gpu::warp() * R::LIST_BYTES;
    const gpu::u32x4 entry = gpu::lds128(list + 16 * (i / 2));
    const uint64_t at = entry.v[0] | (uint64_t)entry.v[1] << 32;
    const uint8_t *record = (const uint8_t *)(uintptr_t)at - a.recipe.layout.groups -
                            gpu::warp() * a.recipe.layout.group_bytes;
    const int first = i % 2 * KVQ_GPU_TILE_TOKENS;
    const int rel = (int)(entry.v[3] & ~(1u << KVQ_GPU_SPECIAL));
    if (i % 2 == 0)
        kvq_gpu_prefetch_group(a, gpu::lds64(list + 16 * (i / 2 + 1)));
    const float norm = kvq_gpu_norm_of(a, record, first); // loaded before the rest
    kvq_gpu_dequant_tile<D>(a, h, record, first, tile);
    kvq_gpu_label_tile<D>(first, entry.v[2], rel, norm, tile);
    return entry.v[3] >> KVQ_GPU_SPECIAL;
}

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_attend_any(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                   const kvq_gpu_part &part, kvq_gpu_sums<D, NT> &sums)
{
    typedef kvq_gpu_room<D, NT> R;
    const gpu::smem tile =
        gpu::smem_start() + R::STAGES + gpu::warp() * kvq_gpu_tile_room<D>::BYTES;
    const kvq_gpu_columns<NT> columns = kvq_gpu_columns_of<D, NT>(a, true);
    kvq_gpu_start(sums);
    KVQ_NO_UNROLL
    for (int i = 2 * part.packed; i < 2 * part.packed_end; i++) {
        kvq_gpu_bring_packed<D, R>(a, h, i, tile);
        gpu::warp_sync();
        kvq_gpu_tile_attend<D, NT, false>(sums, tile, columns);
        gpu::warp_sync();
    }
    kvq_gpu_tile_end(sums);
}

#endif
