// SPDX-License-Identifier: Apache-2.0
//
// What the warps add up becomes a split's sums, a tile's, and output: each time in a fixed order,
// so that no bit depends on who came when. Sums of a row are its running maximum m in powers of
// two, l = sum of 2^(logit - m), and o = sum of 2^(logit - m) v; l = 0 where it saw nothing.
#ifndef KVQ_KERNELS_CUDA_ATTEND_SUMS_H
#define KVQ_KERNELS_CUDA_ATTEND_SUMS_H

#include "kernels/cuda/attend_query.h"

static constexpr float KVQ_GPU_NOTHING = -1e30f; // the maximum before anything was seen

// Sums of the query columns 8 nt + 2 j + n in a warp, lane = 4 g + j. o: tiles of 16 channels,
// channel g of column n at [n], channel g + 8 at [2 + n]. m and l are the same in all g.
template <int D, int NT> struct kvq_gpu_sums {
    float m[NT][2], l[NT][2];
    float o[NT][D / 16][4];
};

// Whether a row's logits pass its running maximum by so much that it must rise; never in company:
// what other rows do must not show.
KVQ_DEVICE bool kvq_gpu_passes(float most, float m)
{
    return most - m > KVQ_GPU_GROWTH;
}

// ---- The warps' sums, in shared memory ----

// FOURS: tile 2 q + i has channels 32 q + 4 g + 2 i and the next in rows g and g + 8 instead.
template <int D, int NT, bool FOURS>
KVQ_DEVICE void kvq_gpu_publish(const kvq_gpu_sums<D, NT> &sums)
{
    typedef kvq_gpu_room<D, NT> R;
    const int g = gpu::lane() >> 2, j = gpu::lane() & 3;
    const gpu::smem smem = gpu::smem_start();
    KVQ_UNROLL
    for (int c = 0; c < 2 * NT; c++) {
        const int nt = c >> 1, n = c & 1, row = gpu::warp() * R::ROWS + 8 * nt + 2 * j + n;
        if (g == 0) {
            kvq_gpu_put_float(smem + R::WARP_STATE + 8 * row, sums.m[nt][n]);
            kvq_gpu_put_float(smem + R::WARP_STATE + 8 * row + 4, sums.l[nt][n]);
        }
        KVQ_UNROLL
        for (int i = 0; i < D / 8; i++) {
            const int channel = FOURS ? 32 * (i >> 2) + 4 * g + (i & 3) : 8 * i + g;
            kvq_gpu_put_float(smem + R::WARP_OUT + row * R::STRIDE + 4 * channel,
                              sums.o[nt][i >> 1][n + 2 * (i & 1)]);
        }
    }
}

// m and l of a row: what the item has so far (if `before`), then the warps'. weight[0] is for
// what it has.
template <class R>
KVQ_DEVICE void kvq_gpu_weigh(int row, bool before, float weight[KVQ_GPU_WARPS + 1], float *m,
                              float *l)
{
    const gpu::smem smem = gpu::smem_start();
    float sum[KVQ_GPU_WARPS + 1] = {};
    weight[0] = KVQ_GPU_NOTHING;
    if (before) {
        weight[0] = kvq_gpu_get_float(smem + R::STATE + 8 * row);
        sum[0] = kvq_gpu_get_float(smem + R::STATE + 8 * row + 4);
    }
    for (int w = 0; w < KVQ_GPU_WARPS; w++) {
        const gpu::smem state = smem + R::WARP_STATE + 8 * (w * R::ROWS + row);
        weight[w + 1] = kvq_gpu_get_float(state);
        sum[w + 1] = kvq_gpu_get_float(state + 4);
    }
    *m = KVQ_GPU_NOTHING;
    for (int w = 0; w <= KVQ_GPU_WARPS; w++)
        *m = fmaxf(*m, weight[w]);
    *l = 0;
    for (int w = 0; w <= KVQ_GPU_WARPS; w++) {
        weight[w] = gpu::power2(weight[w] - *m);
        *l += weight[w] * sum[w];
    }
}

// Adds the warps' sums to what the item has (if `before`) and rotates them back before that, if
// the format rotates. Rows by warp, one after the other; between two syncs of the block.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_combine(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, bool before,
                                uint32_t rotation)
{
    typedef kvq_gpu_room<D, NT> R;
    const gpu::smem smem = gpu::smem_start();
    KVQ_NO_UNROLL
    for (int row = gpu::warp(); row < h.rows; row += KVQ_GPU_WARPS) {
        float weight[KVQ_GPU_WARPS + 1], m, l, x[D / 32];
        kvq_gpu_weigh<R>(row, before, weight, &m, &l);
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++) {
            const int c = 64 * (i >> 1) + 2 * gpu::lane() + (i & 1);
            x[i] = 0;
            for (int w = 0; w < KVQ_GPU_WARPS; w++)
                x[i] += weight[w + 1] * kvq_gpu_get_float(smem + R::WARP_OUT + 4 * c +
                                                          (w * R::ROWS + row) * R::STRIDE);
        }
        kvq_gpu_rotate<D>(a.recipe, rotation, x, true);
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++) {
            const int c = 64 * (i >> 1) + 2 * gpu::lane() + (i & 1);
            const gpu::smem out = smem + R::OUT + 4 * (row * D + c);
            kvq_gpu_put_float(out, before ? weight[0] * kvq_gpu_get_float(out) + x[i] : x[i]);
        }
        gpu::warp_sync(); // everybody has read the state
        if (gpu::lane() == 0) {
            kvq_gpu_put_float(smem + R::STATE + 8 * row, m);
            kvq_gpu_put_float(smem + R::STATE + 8 * row + 4, l);
        }
    }
}

// What an item has that saw nothing.
template <int D, class R> KVQ_DEVICE void kvq_gpu_clear(const kvq_gpu_here &h)
{
    const gpu::smem smem = gpu::smem_start();
    if (gpu::thread() < h.rows) {
        kvq_gpu_put_float(smem + R::STATE + 8 * gpu::thread(), KVQ_GPU_NOTHING);
        kvq_gpu_put_float(smem + R::STATE + 8 * gpu::thread() + 4, 0);
    }
    for (int i = gpu::thread(); i < h.rows * D; i += KVQ_GPU_THREADS)
        kvq_gpu_put_float(smem + R::OUT + 4 * i, 0);
}

// ---- Output ----

KVQ_DEVICE void kvq_gpu_save(void *at, uint32_t dtype, int i, float x)
{
    if (dtype == KVQ_F32)
        gpu::stg32((float *)at + i, gpu::as_bits(x));
    else
        gpu::stg16((uint16_t *)at + i, kvq__stored(x, (uint8_t)dtype));
}

// Row `left` of a tile: m, l and o of its channels 64 i + 2 lane.. become output. By one warp.
template <int D>
KVQ_DEVICE void kvq_gpu_write_row(const kvq_gpu_attend_args &a, const kvq_gpu_tile &tile,
                                  uint32_t head, uint32_t left, float m, float l,
                                  const float o[D / 32])
{
    const kvq_gpu_session &s = a.sessions[tile.session];
    const uint32_t row = tile.first_row + left, token = row / a.gqa;
    const uint32_t q_head = head * a.gqa + row % a.gqa;
    const float inverse = l == 0 ? 0 : 1 / l; // of NaN NaN
    uint8_t *out = (uint8_t *)s.out + token * s.out_token_stride + q_head * s.out_head_stride;
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++) {
        const int c = 64 * (i >> 1) + 2 * gpu::lane() + (i & 1);
        kvq_gpu_save(out, s.out_dtype, c, o[i] * inverse);
    }
    if (s.lse && gpu::lane() == 0) {
        float *lse = (float *)((uint8_t *)s.lse + token * s.lse_token_stride);
        const float x = l == 0 ? -INFINITY : m * 0.693147181f + logf(l);
        gpu::stg32(lse + q_head, gpu::as_bits(x));
    }
}

// ---- Partials in global memory ----

// Row `left` of a tile's split.
KVQ_DEVICE size_t kvq_gpu_partial(const kvq_gpu_session &s, const kvq_gpu_tile &tile, uint32_t head,
                                  uint32_t split, uint32_t left)
{
    return tile.partial + ((size_t)head * s.splits + split) * tile.rows + left;
}

KVQ_DEVICE float kvq_gpu_fetch_float(const float *at)
{
    return gpu::as_float(gpu::ldg32(at));
}

// Merges all splits of a row and writes it. By one warp.
template <int D>
KVQ_DEVICE void kvq_gpu_merge_row(const kvq_gpu_attend_args &a, const kvq_gpu_tile &tile,
                                  uint32_t head, uint32_t left)
{
    const kvq_gpu_session &s = a.sessions[tile.session];
    const size_t first = kvq_gpu_partial(s, tile, head, 0, left), step = tile.rows;
    float m = KVQ_GPU_NOTHING, l = 0, o[D / 32] = {};
    KVQ_NO_UNROLL
    for (uint32_t i = gpu::lane(); i < s.splits; i += gpu::WARP)
        m = fmaxf(m, kvq_gpu_fetch_float(a.partial_ml + 2 * (first + i * step)));
    for (int d = 1; d < gpu::WARP; d *= 2)
        m = fmaxf(m, gpu::shuffle_xor(m, d));
    KVQ_UNROLL_BY(4)
    for (uint32_t split = 0; split < s.splits; split++) {
        const size_t row = first + split * step;
        const float weight = gpu::power2(kvq_gpu_fetch_float(a.partial_ml + 2 * row) - m);
        l += weight * kvq_gpu_fetch_float(a.partial_ml + 2 * row + 1);
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++) {
            const int c = 64 * (i >> 1) + 2 * gpu::lane() + (i & 1);
            o[i] += weight * kvq_gpu_fetch_float(a.partial_o + row * D + c);
        }
    }
    kvq_gpu_write_row<D>(a, tile, head, left, m, l, o);
}

// Row `row` of the item: to the output if its tile has one split, else to the partials.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_hand_over(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int row)
{
    const gpu::smem smem = gpu::smem_start();
    const gpu::u32x2 owner = gpu::lds64(smem + R::OWNERS + 8 * row);
    const kvq_gpu_tile &tile = a.tiles[owner.v[0]];
    const kvq_gpu_session &s = a.sessions[tile.session];
    const float m = kvq_gpu_get_float(smem + R::STATE + 8 * row);
    const float l = kvq_gpu_get_float(smem + R::STATE + 8 * row + 4);
    float o[D / 32];
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++)
        o[i] = kvq_gpu_get_float(smem + R::OUT + 4 * row * D +
                                 4 * (64 * (i >> 1) + 2 * gpu::lane() + (i & 1)));
    if (s.splits == 1) {
        kvq_gpu_write_row<D>(a, tile, h.item.head, owner.v[1], m, l, o);
        return;
    }
    const size_t to =
        kvq_gpu_partial(s, tile, h.item.head, h.item.split - s.first_split, owner.v[1]);
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++)
        gpu::stg32(a.partial_o + to * D + 64 * (i >> 1) + 2 * gpu::lane() + (i & 1),
                   gpu::as_bits(o[i]));
    if (gpu::lane() == 0) {
        gpu::stg32(a.partial_ml + 2 * to, gpu::as_bits(m));
        gpu::stg32(a.partial_ml + 2 * to + 1, gpu::as_bits(l));
    }
}

// Hands over the item's sums and merges the tiles whose last item this was. All threads, after a
// sync of the block; nothing in shared memory is in use afterwards.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_leave(const kvq_gpu_attend_args &a, const kvq_gpu_here &h)
{
    const gpu::smem last = gpu::smem_start() + R::VOTES;
    KVQ_NO_UNROLL
    for (int row = gpu::warp(); row < h.rows; row += KVQ_GPU_WARPS)
        kvq_gpu_hand_over<D, R>(a, h, row);
    KVQ_NO_UNROLL
    for (uint32_t t = h.item.tile; t < h.item.tile + h.item.tiles; t++) {
        const kvq_gpu_tile &tile = a.tiles[t];
        const uint32_t splits = a.sessions[tile.session].splits;
        gpu::block_sync(); // all rows are handed over, and nobody reads the last tile's vote
        if (gpu::thread() == 0 && splits > 1)
            gpu::sts32(last, gpu::fetch_inc(a.counters + t * a.kv_heads + h.item.head,
                                            splits - 1) == splits - 1);
        gpu::block_sync();
        if (splits == 1 || gpu::lds32(last) == 0)
            continue;
        KVQ_NO_UNROLL
        for (uint32_t row = gpu::warp(); row < tile.rows; row += KVQ_GPU_WARPS)
            kvq_gpu_merge_row<D>(a, tile, h.item.head, row);
    }
    gpu::block_sync();
}

#endif
