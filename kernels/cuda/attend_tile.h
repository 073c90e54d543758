// SPDX-License-Identifier: Apache-2.0
//
// Attention over tiles of 16 tokens whose K and V lie in shared memory as rows of 16-bit values:
// raw tokens of the window, sink tokens, outliers and the fresh tail, raw formats, and what
// dequant.h makes of any packed codec.
//
// The cache is the A operand of mma as in attend_affine.h, query columns are N. fp16 takes one
// product. bf16 has too few bits for queries and weights, so each of these is the sum of two bf16
// numbers and every product is done twice.
#ifndef KVQ_KERNELS_CUDA_ATTEND_TILE_H
#define KVQ_KERNELS_CUDA_ATTEND_TILE_H

#include "kernels/cuda/attend_sums.h"

// A tile in shared memory: rows of K, rows of V, rel of each token (-1: none), and a factor of
// its logits.
template <int D> struct kvq_gpu_tile_room {
    static constexpr int K = 0;
    static constexpr int V = KVQ_GPU_TILE_TOKENS * 2 * D;
    static constexpr int RELS = 2 * V;
    static constexpr int NORMS = RELS + 4 * KVQ_GPU_TILE_TOKENS;
    static constexpr int BYTES = NORMS + 4 * KVQ_GPU_TILE_TOKENS;
};

// What a warp needs besides its sums: which queries to use, and what its columns see.
template <int NT> struct kvq_gpu_columns {
    gpu::smem queries, rest; // rest: of bf16 queries
    float factor[NT][2];     // of logits
    int from[NT][2], to[NT][2];
    float cap; // 0: none
};

template <int D, int NT> KVQ_DEVICE void kvq_gpu_start(kvq_gpu_sums<D, NT> &sums)
{
    sums = {};
    for (int nt = 0; nt < NT; nt++)
        sums.m[nt][0] = sums.m[nt][1] = KVQ_GPU_NOTHING;
}

// `packed`: the queries for packed keys.
template <int D, int NT>
KVQ_DEVICE kvq_gpu_columns<NT> kvq_gpu_columns_of(const kvq_gpu_attend_args &a, bool packed)
{
    typedef kvq_gpu_room<D, NT> R;
    const gpu::smem smem = gpu::smem_start();
    kvq_gpu_columns<NT> c;
    c.queries = smem + (packed ? R::PACKED_QUERIES : R::QUERIES);
    c.rest = smem + R::REST;
    c.cap = a.cap;
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int row = 8 * (i >> 1) + 2 * (gpu::lane() & 3) + (i & 1);
        const gpu::u32x2 range = gpu::lds64(smem + R::RANGES + 8 * row);
        c.factor[i >> 1][i & 1] = kvq_gpu_get_float(smem + R::FACTORS + 8 * row + (packed ? 4 : 0));
        c.from[i >> 1][i & 1] = (int)range.v[0];
        c.to[i >> 1][i & 1] = (int)range.v[1];
    }
    return c;
}

// cap * tanh(x).
KVQ_DEVICE float kvq_gpu_cap(float cap, float x)
{
    const float two_log2e = 2.88539008f;
    return cap - 2 * cap * gpu::reciprocal(1 + gpu::power2(two_log2e * x));
}

template <bool BF16>
KVQ_DEVICE void kvq_gpu_mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (BF16)
        gpu::mma_bf16(d, a, b0, b1, d);
    else
        gpu::mma(d, a, b0, b1, d);
}

// s[nt][2 rh + n] += sum of q k over the channels, for token g + 8 rh. `part` picks the queries.
template <int D, int NT, bool BF16>
KVQ_DEVICE void kvq_gpu_tile_logits(gpu::smem tile, gpu::smem queries, gpu::smem rest,
                                    float s[NT][4])
{
    typedef kvq_gpu_tile_room<D> T;
    const int matrix = gpu::lane() >> 3, row = gpu::lane() & 7;
    KVQ_UNROLL
    for (int step = 0; step < D / 16; step += 2) {
        uint32_t k[2][4];
        for (int i = 0; i < 2; i++)
            gpu::ldmatrix(k[i], kvq_gpu_chunk<D>(tile + T::K, row + 8 * (matrix & 1),
                                                 2 * (step + i) + (matrix >> 1)));
        KVQ_UNROLL
        for (int nt = 0; nt < NT; nt++) {
            uint32_t q[4];
            gpu::ldmatrix(q, kvq_gpu_chunk<D>(queries, 8 * nt + row, 2 * step + matrix));
            kvq_gpu_mma<BF16>(s[nt], k[0], q[0], q[1]);
            kvq_gpu_mma<BF16>(s[nt], k[1], q[2], q[3]);
            if (BF16) {
                gpu::ldmatrix(q, kvq_gpu_chunk<D>(rest, 8 * nt + row, 2 * step + matrix));
                kvq_gpu_mma<BF16>(s[nt], k[0], q[0], q[1]);
                kvq_gpu_mma<BF16>(s[nt], k[1], q[2], q[3]);
            }
        }
    }
}

// Logits in powers of two, -inf where the column does not see the token.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_tile_scale(gpu::smem tile, const kvq_gpu_columns<NT> &c, float s[NT][4])
{
    typedef kvq_gpu_tile_room<D> T;
    const int g = gpu::lane() >> 2;
    KVQ_UNROLL
    for (int rh = 0; rh < 2; rh++) {
        const int rel = (int)gpu::lds32(tile + T::RELS + 4 * (g + 8 * rh));
        const float norm = kvq_gpu_get_float(tile + T::NORMS + 4 * (g + 8 * rh));
        KVQ_UNROLL
        for (int i = 0; i < 2 * NT; i++) {
            const int nt = i >> 1, n = i & 1;
            float x = s[nt][2 * rh + n] * (c.factor[nt][n] * norm);
            if (c.cap != 0)
                x = kvq_gpu_cap(c.cap, x);
            s[nt][2 * rh + n] = rel >= c.from[nt][n] && rel < c.to[nt][n] ? x : -INFINITY;
        }
    }
}

// Raises the running maxima that a logit passes by more than 2^KVQ_GPU_GROWTH.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_tile_raise(kvq_gpu_sums<D, NT> &sums, const float s[NT][4])
{
    float most[NT][2];
    bool passed = false;
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int nt = i >> 1, n = i & 1;
        float x = fmaxf(s[nt][n], s[nt][2 + n]);
        for (int d = 4; d < gpu::WARP; d *= 2)
            x = fmaxf(x, gpu::shuffle_xor(x, d));
        most[nt][n] = x;
        passed |= kvq_gpu_passes(x, sums.m[nt][n]);
    }
    if (!gpu::any(passed))
        return;
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int nt = i >> 1, n = i & 1;
        const float m = sums.m[nt][n];
        const float now = kvq_gpu_passes(most[nt][n], m) ? most[nt][n] : m;
        const float shrink = gpu::power2(m - now);
        sums.m[nt][n] = now;
        sums.l[nt][n] *= shrink;
        for (int t = 0; t < D / 16; t++) {
            sums.o[nt][t][n] *= shrink;
            sums.o[nt][t][2 + n] *= shrink;
        }
    }
}

// Adds the tile's values with weights s = 2^(logit - m).
template <int D, int NT, bool BF16>
KVQ_DEVICE void kvq_gpu_tile_values(kvq_gpu_sums<D, NT> &sums, gpu::smem tile, const float s[NT][4])
{
    typedef kvq_gpu_tile_room<D> T;
    const int matrix = gpu::lane() >> 3, row = gpu::lane() & 7;
    uint32_t p[NT][2], rest[NT][2];
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const float lo = s[i >> 1][2 * (i & 1)], hi = s[i >> 1][2 * (i & 1) + 1];
        const uint32_t two = BF16 ? gpu::pack2_bf16(lo, hi) : gpu::pack2(lo, hi);
        p[i >> 1][i & 1] = gpu::transpose(two);
        if (BF16)
            rest[i >> 1][i & 1] = gpu::transpose(gpu::pack2_bf16(
                lo - gpu::as_float(two << 16), hi - gpu::as_float(two & 0xffff0000u)));
    }
    KVQ_UNROLL
    for (int t = 0; t < D / 16; t++) {
        uint32_t v[4];
        gpu::ldmatrix_trans(
            v, kvq_gpu_chunk<D>(tile + T::V, row + 8 * (matrix >> 1), 2 * t + (matrix & 1)));
        KVQ_UNROLL
        for (int nt = 0; nt < NT; nt++) {
            kvq_gpu_mma<BF16>(sums.o[nt][t], v, p[nt][0], p[nt][1]);
            if (BF16)
                kvq_gpu_mma<BF16>(sums.o[nt][t], v, rest[nt][0], rest[nt][1]);
        }
    }
}

// One tile. l is added up lane by lane, see kvq_gpu_tile_end.
template <int D, int NT, bool BF16>
KVQ_DEVICE void kvq_gpu_tile_attend(kvq_gpu_sums<D, NT> &sums, gpu::smem tile,
                                    const kvq_gpu_columns<NT> &c)
{
    float s[NT][4] = {};
    kvq_gpu_tile_logits<D, NT, BF16>(tile, c.queries, c.rest, s);
    kvq_gpu_tile_scale<D, NT>(tile, c, s);
    kvq_gpu_tile_raise<D, NT>(sums, s);
    KVQ_UNROLL
    for (int i = 0; i < 4 * NT; i++) {
        const int nt = i >> 2, n = i & 1;
        s[nt][i & 3] = gpu::power2(s[nt][i & 3] - sums.m[nt][n]);
        sums.l[nt][n] += s[nt][i & 3];
    }
    kvq_gpu_tile_values<D, NT, BF16>(sums, tile, s);
}

template <int D, int NT> KVQ_DEVICE void kvq_gpu_tile_end(kvq_gpu_sums<D, NT> &sums)
{
    for (int i = 0; i < 2 * NT; i++)
        for (int d = 4; d < gpu::WARP; d *= 2)
            sums.l[i >> 1][i & 1] += gpu::shuffle_xor(sums.l[i >> 1][i & 1], d);
}

#endif
