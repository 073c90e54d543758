// SPDX-License-Identifier: Apache-2.0
//
// Packed groups of any codec: a warp dequantizes 16 tokens at a time into a tile of fp16 rows, and
// attend_tile.h does the rest. K's norms are factors of the logits.
#ifndef KVQ_KERNELS_CUDA_ATTEND_ANY_H
#define KVQ_KERNELS_CUDA_ATTEND_ANY_H

#include "kernels/cuda/attend_tile.h"
#include "kernels/cuda/dequant.h"

// Tokens [first, first + 16) of a group into a tile.
template <int D>
KVQ_DEVICE void kvq_gpu_dequant_tile(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                     const uint8_t *record, int first, gpu::smem tile)
{
    typedef kvq_gpu_tile_room<D> T;
    const int group = gpu::warp();
    const kvq_gpu_packed k = kvq_gpu_packed_at(a.recipe, a.book, false, record, group, h.item.head);
    const kvq_gpu_packed v = kvq_gpu_packed_at(a.recipe, a.book, true, record, group, h.item.head);
    KVQ_NO_UNROLL
    for (int i = gpu::lane(); i < KVQ_GPU_TILE_TOKENS * D / 2; i += gpu::WARP) {
        const int t = i / (D / 2), c = i % (D / 2) * 2, at = c % 8 * 2;
        gpu::sts32(kvq_gpu_chunk<D>(tile + T::K, t, c / 8) + at,
                   kvq_gpu_dequant2(a.recipe.k, k, false, D, first + t, c));
        gpu::sts32(kvq_gpu_chunk<D>(tile + T::V, t, c / 8) + at,
                   kvq_gpu_dequant2(a.recipe.v, v, true, D, first + t, c));
    }
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

// Brings tile i of the warp's list of packed groups, each of which has two.
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
    kvq_gpu_dequant_tile<D>(a, h, record, first, tile);
    kvq_gpu_label_tile<D>(a, record, first, entry.v[2], rel, tile);
}

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_attend_any(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                   kvq_gpu_sums<D, NT> &sums)
{
    typedef kvq_gpu_room<D, NT> R;
    const gpu::smem tile =
        gpu::smem_start() + R::STAGES + gpu::warp() * kvq_gpu_tile_room<D>::BYTES;
    const kvq_gpu_columns<NT> columns = kvq_gpu_columns_of<D, NT>(a, true);
    kvq_gpu_start(sums);
    KVQ_NO_UNROLL
    for (int i = 0; i < 2 * h.n_packed; i++) {
        kvq_gpu_bring_packed<D, R>(a, h, i, tile);
        gpu::warp_sync();
        kvq_gpu_tile_attend<D, NT, false>(sums, tile, columns);
        gpu::warp_sync();
    }
    kvq_gpu_tile_end(sums);
}

#endif
