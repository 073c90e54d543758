// SPDX-License-Identifier: Apache-2.0
//
// Packed groups of any codec: a warp dequantizes 16 tokens at a time into a tile of fp16 rows, and
// attend_tile.h does the rest. K's norms are factors of the logits.
#ifndef KVQ_KERNELS_CUDA_ATTEND_ANY_H
#define KVQ_KERNELS_CUDA_ATTEND_ANY_H

#include "kernels/cuda/attend_tile.h"
#include "kernels/cuda/dequant.h"

// Rows of K or V of tokens [first, first + 16) of a group, to rows of a tile: any codec.
template <int D>
KVQ_DEVICE void kvq_gpu_dequant_rows(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                     int first, gpu::smem rows)
{
    KVQ_NO_UNROLL
    for (int i = gpu::lane(); i < KVQ_GPU_TILE_TOKENS * D / 2; i += gpu::WARP) {
        const int t = i / (D / 2), c = i % (D / 2) * 2;
        gpu::sts32(kvq_gpu_chunk<D>(rows, t, c / 8) + c % 8 * 2,
                   kvq_gpu_dequant2(side, p, v, D, first + t, c));
    }
}

// The same of plain codecs. K: a lane takes 16 channels of a token.
template <int D>
KVQ_DEVICE void kvq_gpu_plain_k_rows(const kvq_side &side, const kvq_gpu_packed &p, int first,
                                     gpu::smem rows)
{
    KVQ_NO_UNROLL
    for (int i = gpu::lane(); i < D; i += gpu::WARP) {
        const int t = i % KVQ_GPU_TILE_TOKENS, row = i / KVQ_GPU_TILE_TOKENS;
        uint32_t x[8];
        kvq_gpu_plain_k(side, p, D, first + t, row, x);
        const gpu::u32x4 lower = {{x[0], x[1], x[2], x[3]}}, upper = {{x[4], x[5], x[6], x[7]}};
        gpu::sts128(kvq_gpu_chunk<D>(rows, t, 2 * row), lower);
        gpu::sts128(kvq_gpu_chunk<D>(rows, t, 2 * row + 1), upper);
    }
}

// V: a lane takes four pairs of channels of four tokens.
template <int D>
KVQ_DEVICE void kvq_gpu_plain_v_rows(const kvq_side &side, const kvq_gpu_packed &p, int first,
                                     gpu::smem rows)
{
    constexpr int PAIRS = D / 8; // of channels at position 0
    KVQ_NO_UNROLL
    for (int i = gpu::lane(); i < 4 * PAIRS; i += gpu::WARP) {
        const int pair = i % PAIRS, set = i / PAIRS, t = 8 * (set >> 1) + (set & 1);
        const int c = D == 64 ? 2 * pair : pair / 16 * 128 + pair % 16 * 2;
        const kvq_gpu_words2 words = kvq_gpu_v_words2(side, p, D, first + t, c);
        KVQ_NO_UNROLL
        for (int s = 0; s < 4; s++) {
            const int channel = c + (D == 64 ? 32 * (s >> 1) + 16 * (s & 1) : 32 * s);
            KVQ_UNROLL
            for (int k = 0; k < 4; k++)
                gpu::sts32(kvq_gpu_chunk<D>(rows, t + 2 * k, channel / 8) + channel % 8 * 2,
                           kvq_gpu_plain_v(side, p, D, words, s, k, first + t + 2 * k, channel));
        }
    }
}

// Tokens [first, first + 16) of a group into a tile.
template <int D, bool PLAIN>
KVQ_DEVICE void kvq_gpu_dequant_tile(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                     const uint8_t *record, int first, gpu::smem tile)
{
    typedef kvq_gpu_tile_room<D> T;
    const kvq_recipe &r = a.recipe;
    const kvq_gpu_packed k = kvq_gpu_packed_at(r, a.book, false, record, gpu::warp(), h.item.head);
    const kvq_gpu_packed v = kvq_gpu_packed_at(r, a.book, true, record, gpu::warp(), h.item.head);
    if (PLAIN && kvq_gpu_is_plain(r.k.row))
        kvq_gpu_plain_k_rows<D>(r.k.row, k, first, tile + T::K);
    else
        kvq_gpu_dequant_rows<D>(r.k, k, false, first, tile + T::K);
    if (PLAIN && kvq_gpu_is_plain(r.v.row))
        kvq_gpu_plain_v_rows<D>(r.v.row, v, first, tile + T::V);
    else
        kvq_gpu_dequant_rows<D>(r.v, v, true, first, tile + T::V);
}

// Rel and norm of each token of the tile; tokens without a bit in `mask` are not there.
template <int D>
KVQ_DEVICE void kvq_gpu_label_tile(const kvq_gpu_attend_args &a, const uint8_t *record, int first,
                                   uint32_t mask, int rel, gpu::smem tile)
{
    typedef kvq_gpu_tile_room<D> T;
    const int t = first + gpu::lane() % KVQ_GPU_TILE_TOKENS;
    const kvq_packed at = kvq_packed_at(&a.recipe.layout, (uint8_t *)record, (uint32_t)gpu::warp());
    const uint16_t *norms = (const uint16_t *)(at.group + a.recipe.layout.k_norms);
    const bool has_norms = a.recipe.k_token_scale != KVQ_SCALE_NONE;
    if (gpu::lane() < KVQ_GPU_TILE_TOKENS) {
        gpu::sts32(tile + T::RELS + 4 * gpu::lane(), mask >> t & 1 ? (uint32_t)(rel + t) : ~0u);
        kvq_gpu_put_float(tile + T::NORMS + 4 * gpu::lane(),
                          has_norms ? kvq__f16_to_f32(norms[t]) : 1);
    }
}

// Brings tile i of the warp's list of packed groups, each of which has two. `i` counts from the
// run's first group on.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_bring_packed(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int i,
                                     gpu::smem tile)
{
    const gpu::u32x4 entry =
        gpu::lds128(gpu::smem_start() + R::PACKED + gpu::warp() * R::LIST_BYTES + 16 * (i / 2));
    const uint64_t at = entry.v[0] | (uint64_t)entry.v[1] << 32;
    const uint8_t *record = (const uint8_t *)(uintptr_t)at - a.recipe.layout.groups -
                            gpu::warp() * a.recipe.layout.group_bytes;
    const int first = i % 2 * KVQ_GPU_TILE_TOKENS;
    const int rel = (int)(entry.v[3] & ~(1u << KVQ_GPU_SPECIAL));
    kvq_gpu_dequant_tile<D, R::PLAIN>(a, h, record, first, tile);
    kvq_gpu_label_tile<D>(a, record, first, entry.v[2], rel, tile);
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
