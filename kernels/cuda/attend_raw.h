// SPDX-License-Identifier: Apache-2.0
//
// Tokens that are read as they were handed over: where the rows of a tile lie, and how they get
// into shared memory. Rows may come from anywhere: raw blocks, the extras' sink tokens and
// outliers, and the caller's own tensors with their strides and dtypes, rounded as kvq_store does.
#ifndef KVQ_KERNELS_CUDA_ATTEND_RAW_H
#define KVQ_KERNELS_CUDA_ATTEND_RAW_H

#include "kernels/cuda/attend_tile.h"

// One row of K or V. Rows of the raw dtype that stand at a multiple of 16 bytes are copied; those
// of any other dtype or place are converted one by one.
enum kvq_gpu_row_kind { KVQ_GPU_NO_ROW, KVQ_GPU_COPIED, KVQ_GPU_CONVERTED };

struct kvq_gpu_source {
    const uint8_t *at;
    uint32_t kind, dtype;
};

KVQ_DEVICE kvq_gpu_source kvq_gpu_source_at(const uint8_t *at, uint32_t dtype, uint32_t raw_dtype)
{
    const bool whole = dtype == raw_dtype && (uintptr_t)at % 16 == 0;
    const kvq_gpu_source s = {at, (uint32_t)(whole ? KVQ_GPU_COPIED : KVQ_GPU_CONVERTED), dtype};
    return s;
}

// The row of K or V at a position that is read raw.
template <int D>
KVQ_DEVICE kvq_gpu_source kvq_gpu_source_of(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                            uint64_t position, bool v)
{
    const kvq_gpu_session &s = *h.session;
    const kvq_recipe &r = a.recipe;
    const size_t head = h.item.head;
    if (kvq_gpu_is_fresh(s, position)) {
        const kvq_view &view = v ? s.fresh_v : s.fresh_k;
        const int64_t t = (int64_t)(position - s.fresh_start);
        return kvq_gpu_source_at((const uint8_t *)view.data + t * view.token_stride +
                                     (int64_t)head * view.head_stride,
                                 view.dtype, r.dtype);
    }
    const kvq_page page = kvq_gpu_page_at(s, position);
    const uint32_t at = (uint32_t)(position % KVQ_BLOCK_TOKENS);
    if (!r.is_raw && at < page.packed_tokens)
        return kvq_gpu_source_at(s.extras + head * r.extras.record_bytes +
                                     (v ? r.extras.sink_v : r.extras.sink_k) + at * 2 * D,
                                 r.dtype, r.dtype);
    const uint8_t *block = r.is_raw && at < page.packed_tokens ? page.packed : page.raw;
    return kvq_gpu_source_at(block + kvq_raw_at(&r.raw, (uint32_t)head, at, v), r.dtype, r.dtype);
}

// Lanes 0 to 15 find the rows of K of tile i of the split's, lanes 16 to 31 those of V, and each
// its token's rel (-1: none).
template <int D, class R>
KVQ_DEVICE kvq_gpu_source kvq_gpu_find_row(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                           const kvq_gpu_part &part, int i, int *rel)
{
    const int t = gpu::lane() % KVQ_GPU_TILE_TOKENS;
    const bool v = gpu::lane() >= KVQ_GPU_TILE_TOKENS;
    const bool pooled = part.pool && part.raw + i == part.raw_end - 1;
    const int at = pooled ? KVQ_GPU_RAW_TILES - 1 : part.raw + i;
    const gpu::u32x2 entry =
        gpu::lds64(gpu::smem_start() + R::RAW + 8 * (gpu::warp() * KVQ_GPU_RAW_TILES + at));
    const kvq_gpu_source none = {NULL, KVQ_GPU_NO_ROW, 0};
    *rel = -1;
    if (!(entry.v[0] >> t & 1))
        return none;
    if (entry.v[1] == KVQ_GPU_OF_POOL) {
        const kvq_gpu_pool pool = kvq_gpu_pool_of(a, *h.session, h.item.head);
        const uint32_t row = (uint32_t)(gpu::warp() * KVQ_GPU_TILE_TOKENS + t);
        *rel = (int)gpu::lds32(gpu::smem_start() + R::POOLED + 4 * (int)row);
        return kvq_gpu_source_at((v ? pool.v : pool.k) + row * 2 * D, a.recipe.dtype,
                                 a.recipe.dtype);
    }
    *rel = (int)entry.v[1] + t;
    return kvq_gpu_source_of<D>(a, h, h.start + (uint64_t)*rel, v);
}

KVQ_DEVICE uint64_t kvq_gpu_shuffle_address(const uint8_t *at, int from)
{
    const uint64_t bits = (uint64_t)(uintptr_t)at;
    return gpu::shuffle_bits((uint32_t)bits, from) |
           (uint64_t)gpu::shuffle_bits((uint32_t)(bits >> 32), from) << 32;
}

// Starts copying the rows that can be copied, as one batch.
template <int D> KVQ_DEVICE void kvq_gpu_copy_rows(gpu::smem tile, const kvq_gpu_source &source)
{
    constexpr int CHUNKS = D / 8, ROWS_AT_ONCE = gpu::WARP / CHUNKS;
    const int own = gpu::lane() / CHUNKS, chunk = gpu::lane() % CHUNKS;
    const uint32_t copied = gpu::ballot(source.kind == KVQ_GPU_COPIED);
    KVQ_UNROLL_BY(4)
    for (int r = 0; r < gpu::WARP; r += ROWS_AT_ONCE) {
        const uint64_t from = kvq_gpu_shuffle_address(source.at, r + own) + (uint64_t)(16 * chunk);
        gpu::copy16(kvq_gpu_chunk<D>(tile, r + own, chunk), (const uint8_t *)(uintptr_t)from,
                    copied >> (r + own) & 1);
    }
    gpu::copy_commit();
}

// Elements c and c + 1 of a row, as kvq_store writes them.
KVQ_DEVICE uint32_t kvq_gpu_stored2(const uint8_t *row, uint32_t from, uint32_t to, int c)
{
    const uint32_t lo = kvq__stored(kvq__element(row, (uint8_t)from, c), (uint8_t)to);
    const uint32_t hi = kvq__stored(kvq__element(row, (uint8_t)from, c + 1), (uint8_t)to);
    return lo | hi << 16;
}

// Writes the other rows: converted ones, and zeros for tokens that are not there.
template <int D>
KVQ_DEVICE void kvq_gpu_write_rows(gpu::smem tile, const kvq_gpu_source &source, uint32_t raw_dtype)
{
    uint32_t others = gpu::ballot(source.kind != KVQ_GPU_COPIED);
    KVQ_NO_UNROLL
    for (int r = 0; others; r++, others >>= 1) {
        if (!(others & 1))
            continue;
        const uint8_t *from = (const uint8_t *)(uintptr_t)kvq_gpu_shuffle_address(source.at, r);
        const uint32_t dtype = gpu::shuffle_bits(source.dtype, r);
        const bool there = gpu::shuffle_bits(source.kind, r) == KVQ_GPU_CONVERTED;
        for (int i = 0; i < D / 64; i++) {
            const int c = 64 * i + 2 * gpu::lane();
            const uint32_t two = there ? kvq_gpu_stored2(from, dtype, raw_dtype, c) : 0;
            gpu::sts32(
                kvq_gpu_chunk<D>(tile, r, 8 * i + (gpu::lane() >> 2)) + 4 * (gpu::lane() & 3), two);
        }
    }
}

// Brings tile i of the split's into a stage; one batch of copies.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_fetch_raw(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                  const kvq_gpu_part &part, int i, gpu::smem tile)
{
    typedef kvq_gpu_tile_room<D> T;
    if (part.raw + i >= part.raw_end) {
        gpu::copy_commit();
        return;
    }
    int rel;
    const kvq_gpu_source source = kvq_gpu_find_row<D, R>(a, h, part, i, &rel);
    kvq_gpu_copy_rows<D>(tile, source);
    kvq_gpu_write_rows<D>(tile, source, a.recipe.dtype);
    if (gpu::lane() < KVQ_GPU_TILE_TOKENS) {
        gpu::sts32(tile + T::RELS + 4 * gpu::lane(), (uint32_t)rel);
        kvq_gpu_put_float(tile + T::NORMS + 4 * gpu::lane(), 1);
    }
}

// The split's raw tiles of this warp, through STAGES stages.
template <int D, int NT, int STAGES, bool BF16>
KVQ_DEVICE void kvq_gpu_raw_loop(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                 const kvq_gpu_part &part, kvq_gpu_sums<D, NT> &sums)
{
    typedef kvq_gpu_room<D, NT> R;
    typedef kvq_gpu_tile_room<D> T;
    const kvq_gpu_columns<NT> columns = kvq_gpu_columns_of<D, NT>(a, false);
    const gpu::smem stages = gpu::smem_start() + R::STAGES + gpu::warp() * STAGES * T::BYTES;
    const gpu::smem last = stages + (STAGES - 1) * T::BYTES;
    gpu::smem fill = stages, use = stages;
    for (int i = 0; i < STAGES - 1; i++, fill += T::BYTES)
        kvq_gpu_fetch_raw<D, R>(a, h, part, i, fill);
    KVQ_NO_UNROLL
    for (int i = 0; i < part.raw_end - part.raw; i++) {
        if (STAGES > 1) {
            gpu::copy_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
            gpu::warp_sync(); // the rows are there, and all lanes have left the stage to fill
        }
        kvq_gpu_fetch_raw<D, R>(a, h, part, i + STAGES - 1, fill);
        if (STAGES == 1) {
            gpu::copy_wait<0>();
            gpu::warp_sync();
        }
        kvq_gpu_tile_attend<D, NT, BF16>(sums, use, columns);
        if (STAGES == 1)
            gpu::warp_sync();
        fill = fill == last ? stages : fill + T::BYTES;
        use = use == last ? stages : use + T::BYTES;
    }
}

template <int D, int NT, int STAGES>
KVQ_DEVICE void kvq_gpu_attend_raw(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                   const kvq_gpu_part &part, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_start(sums);
    if (a.recipe.dtype == KVQ_BF16)
        kvq_gpu_raw_loop<D, NT, STAGES, true>(a, h, part, sums);
    else
        kvq_gpu_raw_loop<D, NT, STAGES, false>(a, h, part, sums);
    kvq_gpu_tile_end(sums);
}

#endif
