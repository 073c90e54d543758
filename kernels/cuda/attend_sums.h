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

// SUMS: where they stand. FOURS: tile 2 q + i has channels 32 q + 4 g + 2 i and the next in rows g
// and g + 8 instead.
template <int D, int NT, int SUMS, bool FOURS>
KVQ_DEVICE void kvq_gpu_publish(const kvq_gpu_sums<D, NT> &sums)
{
    typedef kvq_gpu_room<D, NT> R;
    const int g = gpu::lane() >> 2, j = gpu::lane() & 3;
    const gpu::smem smem = gpu::smem_start();
    KVQ_UNROLL
    for (int c = 0; c < 2 * NT; c++) {
        const int nt = c >> 1, n = c & 1, row = gpu::warp() * R::ROWS + 8 * nt + 2 * j + n;
        if (g == 0) {
            kvq_gpu_put_float(smem + SUMS + 8 * row, sums.m[nt][n]);
            kvq_gpu_put_float(smem + SUMS + 8 * row + 4, sums.l[nt][n]);
        }
        KVQ_UNROLL
        for (int i = 0; i < D / 8; i++) {
            const int channel = FOURS ? 32 * (i >> 2) + 4 * g + (i & 3) : 8 * i + g;
            kvq_gpu_put_float(smem + SUMS + R::SUMS_OUT + row * R::STRIDE + 4 * channel,
                              sums.o[nt][i >> 1][n + 2 * (i & 1)]);
        }
    }
}

// m and l of a row: what the item has so far (if `before`), then the warps'. weight[0] is for
// what it has.
template <class R, int SUMS>
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
        const gpu::smem state = smem + SUMS + 8 * (w * R::ROWS + row);
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

KVQ_DEVICE float kvq_gpu_fetch_float(const float *at)
{
    return gpu::as_float(gpu::ldg32(at));
}

// o += weight times the lane's channels of a partial row.
template <int D>
KVQ_DEVICE void kvq_gpu_add_partial(float o[D / 32], float weight, const float *row)
{
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i += 2) {
        const gpu::u32x2 two = gpu::ldg64(row + 32 * i + 2 * gpu::lane());
        o[i] += weight * gpu::as_float(two.v[0]);
        o[i + 1] += weight * gpu::as_float(two.v[1]);
    }
}

// Merges all splits of a row and writes it. By one warp.
template <int D>
KVQ_DEVICE void kvq_gpu_merge_row(const kvq_gpu_attend_args &a, const kvq_gpu_tile &tile,
                                  uint32_t head, uint32_t left)
{
    const kvq_gpu_session &s = a.sessions[tile.session];
    const kvq_gpu_partials place = kvq_gpu_partials_of(s, tile, head, left);
    const uint32_t splits = s.splits, lane = (uint32_t)gpu::lane();
    float m = KVQ_GPU_NOTHING, l = 0, o[D / 32] = {};
    KVQ_NO_UNROLL
    for (uint32_t i = lane; i < splits; i += gpu::WARP)
        m = fmaxf(m, kvq_gpu_fetch_float(a.partial_ml + 2 * (place.first + i * place.step)));
    for (int d = 1; d < gpu::WARP; d *= 2)
        m = fmaxf(m, gpu::shuffle_xor(m, d));
    KVQ_NO_UNROLL
    for (uint32_t from = 0; from < splits; from += gpu::WARP) {
        float weight = 0, part = 0; // of split from + lane
        if (from + lane < splits) {
            const gpu::u32x2 ml =
                gpu::ldg64(a.partial_ml + 2 * (place.first + (from + lane) * (size_t)place.step));
            weight = gpu::power2(gpu::as_float(ml.v[0]) - m);
            part = weight * gpu::as_float(ml.v[1]);
        }
        const int some = splits - from < gpu::WARP ? (int)(splits - from) : gpu::WARP;
        KVQ_UNROLL_BY(8)
        for (int i = 0; i < some; i++) {
            const size_t row = place.first + (from + (uint32_t)i) * (size_t)place.step;
            l += gpu::shuffle(part, i);
            kvq_gpu_add_partial<D>(o, gpu::shuffle(weight, i), a.partial_o + row * D);
        }
    }
    kvq_gpu_write_row<D>(a, tile, head, left, m, l, o);
}

// A row's sums of split `split` of the run: to the output if its tile has no other split, else to
// the partials. By one warp.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_hand_over(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int split,
                                  int row, float m, float l, const float o[D / 32])
{
    const gpu::u32x4 words = gpu::lds128(gpu::smem_start() + R::PLACES + 16 * row);
    if (words.v[2] == 0) {
        const gpu::u32x2 owner = gpu::lds64(gpu::smem_start() + R::OWNERS + 8 * row);
        kvq_gpu_write_row<D>(a, a.tiles[owner.v[0]], h.item.head, owner.v[1], m, l, o);
        return;
    }
    const size_t to = (words.v[0] | (size_t)words.v[1] << 32) + (size_t)split * words.v[2];
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i += 2) {
        const gpu::u32x2 two = {{gpu::as_bits(o[i]), gpu::as_bits(o[i + 1])}};
        gpu::stg64(a.partial_o + to * D + 32 * i + 2 * gpu::lane(), two);
    }
    const gpu::u32x2 ml = {{gpu::as_bits(m), gpu::as_bits(l)}};
    if (gpu::lane() == 0)
        gpu::stg64(a.partial_ml + 2 * to, ml);
}

// ---- A split's sums ----

// Keeps a row's sums until the split's raw tokens come to them.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_keep(int row, float m, float l, const float o[D / 32])
{
    const gpu::smem smem = gpu::smem_start();
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++)
        kvq_gpu_put_float(smem + R::OUT + 4 * (row * D + 64 * (i >> 1) + 2 * gpu::lane() + (i & 1)),
                          o[i]);
    if (gpu::lane() == 0) {
        kvq_gpu_put_float(smem + R::STATE + 8 * row, m);
        kvq_gpu_put_float(smem + R::STATE + 8 * row + 4, l);
    }
}

// Adds the warps' sums of a split to what it has (if `before`) and rotates them back before that,
// if the format rotates; hands them over if they are all (`after` is none), else keeps them. Rows
// by warp, one after the other; between two syncs of the block.
template <int D, int NT, int SUMS>
KVQ_DEVICE void kvq_gpu_combine(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int split,
                                bool before, bool after, uint32_t rotation)
{
    typedef kvq_gpu_room<D, NT> R;
    const gpu::smem smem = gpu::smem_start();
    KVQ_NO_UNROLL
    for (int row = gpu::warp(); row < h.rows; row += KVQ_GPU_WARPS) {
        float weight[KVQ_GPU_WARPS + 1], m, l, x[D / 32];
        kvq_gpu_weigh<R, SUMS>(row, before, weight, &m, &l);
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++) {
            const int c = 64 * (i >> 1) + 2 * gpu::lane() + (i & 1);
            x[i] = 0;
            for (int w = 0; w < KVQ_GPU_WARPS; w++)
                x[i] += weight[w + 1] * kvq_gpu_get_float(smem + SUMS + R::SUMS_OUT + 4 * c +
                                                          (w * R::ROWS + row) * R::STRIDE);
        }
        kvq_gpu_rotate<D>(a.recipe, rotation, x, true);
        const gpu::smem out = smem + R::OUT + 4 * row * D;
        KVQ_UNROLL
        for (int i = 0; i < D / 32 && before; i++)
            x[i] = weight[0] *
                       kvq_gpu_get_float(out + 4 * (64 * (i >> 1) + 2 * gpu::lane() + (i & 1))) +
                   x[i];
        if (after)
            kvq_gpu_keep<D, R>(row, m, l, x);
        else
            kvq_gpu_hand_over<D, R>(a, h, split, row, m, l, x);
    }
}

// A split of which no row sees anything.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_saw_nothing(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int split)
{
    const float none[D / 32] = {};
    KVQ_NO_UNROLL
    for (int row = gpu::warp(); row < h.rows; row += KVQ_GPU_WARPS)
        kvq_gpu_hand_over<D, R>(a, h, split, row, KVQ_GPU_NOTHING, 0, none);
}

// Counts the run's splits as done and merges the tiles whose last ones these were. All threads,
// after a sync of the block behind the last split's hand-over.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_leave(const kvq_gpu_attend_args &a, const kvq_gpu_here &h)
{
    const uint32_t own = (uint32_t)gpu::thread(), tiles = h.item.tiles, n = (uint32_t)h.splits;
    const gpu::smem last = gpu::smem_start() + R::LAST;
    if (own < tiles) {
        const uint32_t t = h.item.tile + own, splits = a.sessions[a.tiles[t].session].splits;
        uint32_t *counter = a.counters + t * a.kv_heads + h.item.head;
        const bool all = splits > 1 && gpu::fetch_count(counter, n) + n == splits;
        if (all)
            gpu::stg32(counter, 0); // for the next launch
        gpu::sts32(last + 4 * (int)own, all);
    }
    gpu::block_sync();
    KVQ_NO_UNROLL
    for (uint32_t t = 0; t < tiles; t++) {
        if (gpu::lds32(last + 4 * (int)t) == 0)
            continue;
        const kvq_gpu_tile &tile = a.tiles[h.item.tile + t];
        KVQ_NO_UNROLL
        for (uint32_t row = (uint32_t)gpu::warp(); row < tile.rows; row += KVQ_GPU_WARPS)
            kvq_gpu_merge_row<D>(a, tile, h.item.head, row);
    }
}

#endif
