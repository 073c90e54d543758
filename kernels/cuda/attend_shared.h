// SPDX-License-Identifier: Apache-2.0
//
// The fast source of codes with few parameters: K affine, of 2 or 3 bits, with a scale and a zero
// for each channel of a whole record, V of 2 bits with one scale for each token, affine or
// Lloyd-Max (OTT, kvq2).
//
// Products are those of attend_affine.h. K's parameters come with each group, which all warps copy:
// the record's others find them in L2. V's one scale goes into P once.
//
// Lloyd-Max: the four levels of a symmetric distribution are -p - q, q - p, p - q, p + q, so a
// level is p (2 b1 - 1) + q (2 b0 - 1) of the code's bits, and linear in each. Over p that is 2 b1
// + 2 q / p b0 - (1 + q / p). So bits are cut out one by one, as fp16 subnormals that count 1 and
// 2; b0 meets P times 2 q / p. What is taken off is summed out of the rounded numbers that the bits
// meet: values have no mean, so that a part of 2^-11 of it would show.
#ifndef KVQ_KERNELS_CUDA_ATTEND_SHARED_H
#define KVQ_KERNELS_CUDA_ATTEND_SHARED_H

#include "kernels/cuda/attend_affine.h"

// A stage: K's scales and zeros, then the group.
template <int D, int BITS> struct kvq_gpu_shared {
    typedef kvq_gpu_affine<D, BITS> A;
    static constexpr bool LLOYD = BITS == 3;
    static constexpr int GROUP = 4 * D;                 // where the group stands
    static constexpr int K_NORMS = A::PLANE + A::HIGH;  // in the group
    static constexpr int V_SCALES = A::PLANE;           // from V's codes on
    static constexpr int PARAMS = 2 * KVQ_GROUP_TOKENS; // bytes of norms, scales or zeros
    static constexpr int MOST = K_NORMS + PARAMS + V_SCALES + (LLOYD ? 1 : 2) * PARAMS;
    static constexpr int LEAST = MOST - PARAMS; // without norms
    static constexpr int BYTES = GROUP + MOST;
    static constexpr int WARP_BYTES = KVQ_GPU_STAGES * BYTES;
};

// Starts copying a group and its record's parameters of K, if wanted, as one batch.
template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_shared_fetch(const kvq_gpu_attend_args &a, gpu::smem to, gpu::smem entry,
                                     bool wanted)
{
    typedef kvq_gpu_shared<D, BITS> G;
    const kvq_layout &layout = a.recipe.layout;
    const gpu::u32x2 address = gpu::lds64(entry);
    const uint64_t group = address.v[0] | (uint64_t)address.v[1] << 32;
    const uint64_t record = group - layout.groups - (uint32_t)gpu::warp() * layout.group_bytes;
    const int own = gpu::lane() * 16;
    KVQ_UNROLL
    for (int i = 0; i < G::GROUP; i += 16 * gpu::WARP)
        gpu::copy16(to + own + i, (const uint8_t *)(uintptr_t)(record + (uint64_t)(own + i)),
                    wanted && own + i < G::GROUP);
    kvq_gpu_fetch<G::LEAST, G::MOST>(to + G::GROUP, address, wanted, (int)layout.group_bytes);
}

template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_shared_ahead(const kvq_gpu_attend_args &a, kvq_gpu_pipe &pipe, int from,
                                     int limit)
{
    typedef kvq_gpu_shared<D, BITS> G;
    kvq_gpu_set_pipe<kvq_gpu_room<D, NT>, G::BYTES, G::WARP_BYTES>(pipe, from, limit);
    KVQ_UNROLL
    for (int i = 0; i < KVQ_GPU_STAGES - 1; i++)
        kvq_gpu_shared_fetch<D, BITS>(a, pipe.use + i * G::BYTES, pipe.entry + 16 * i,
                                      from + i < limit);
}

// What Lloyd-Max codes are made of, see above.
struct kvq_gpu_levels {
    float p;
    uint32_t ratio; // 2 q / p, twice as fp16
};

KVQ_DEVICE kvq_gpu_levels kvq_gpu_levels_of(const kvq_recipe_side &v)
{
    const float p = 0.5f * (v.levels[0][3] + v.levels[0][2]);
    const float q = 0.5f * (v.levels[0][3] - v.levels[0][2]);
    const kvq_gpu_levels levels = {p, gpu::pack2(2 * q / p, 2 * q / p)};
    return levels;
}

// Adds up p, and, halved or not, the factors of the codes' bits, in every row.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_add_bit_sums(kvq_gpu_lane<D, NT> &l, const uint32_t p[NT][2][2],
                                     const uint32_t high[NT][2][2], const uint32_t low[NT][2][2])
{
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    const uint32_t halves[4] = {0x38003800u, 0x38003800u, 0x38003800u, 0x38003800u};
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int nt = i >> 1, half = i & 1;
        gpu::mma(l.total[nt], ones, p[nt][0][half], p[nt][1][half], l.total[nt]);
        gpu::mma(l.first[nt], ones, high[nt][0][half], high[nt][1][half], l.first[nt]);
        gpu::mma(l.second[nt], halves, low[nt][0][half], low[nt][1][half], l.second[nt]);
    }
}

// Adds one tile of 16 channels bit by bit: the codes' high bits times p, their low bits times
// `low`.
template <int NT>
KVQ_DEVICE void kvq_gpu_add_bits(float *const o[NT], const kvq_gpu_words<2> w[2],
                                 const uint32_t p[NT][2][2], const uint32_t low[NT][2][2], int u,
                                 int s)
{
    KVQ_UNROLL
    for (int m = 0; m < 2; m++) {
        uint32_t high_bits[4], low_bits[4];
        KVQ_UNROLL
        for (int i = 0; i < 4; i++) {
            const uint32_t word = w[i >> 1].low[m][2 * u + (i & 1)];
            high_bits[i] = word & (0x00020002u << 2 * s);
            low_bits[i] = word & (0x00010001u << 2 * s);
        }
        KVQ_UNROLL
        for (int nt = 0; nt < NT; nt++) {
            gpu::mma(o[nt], high_bits, p[nt][m][0], p[nt][m][1], o[nt]);
            gpu::mma(o[nt], low_bits, low[nt][m][0], low[nt][m][1], o[nt]);
        }
    }
}

template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_shared_values(kvq_gpu_lane<D, NT> &l, gpu::smem v, uint32_t ratio,
                                      const uint32_t p[NT][2][2])
{
    typedef kvq_gpu_shared<D, BITS> G;
    const gpu::u32x4 scale = gpu::lds128(v + G::V_SCALES + l.j * 16);
    uint32_t scaled[NT][2][2], low[NT][2][2];
    KVQ_UNROLL
    for (int i = 0; i < 4 * NT; i++) {
        const int nt = i >> 2, m = i >> 1 & 1, half = i & 1;
        scaled[nt][m][half] = gpu::mul2(p[nt][m][half], scale.v[i & 3]);
        low[nt][m][half] = G::LLOYD ? gpu::mul2(scaled[nt][m][half], ratio) : 0;
    }
    if (G::LLOYD)
        kvq_gpu_add_bit_sums<D, NT>(l, p, scaled, low);
    else
        kvq_gpu_add_sums<1>(l, v + G::V_SCALES + G::PARAMS, p);
    kvq_gpu_words<2> w[2];
    KVQ_UNROLL
    for (int t = 0; t < D / 16; t++) { // tile of channels
        const int c = t >> 1, u = D == 64 ? 0 : t & 1, s = D == 64 ? t : c & 3;
        if (D == 64 && t == 0)
            kvq_gpu_load_v64(w, v, v, l.g, l.j);
        if (D >= 128 && t % 8 == 0)
            kvq_gpu_load_v(w, v + t * 128, v, l.g, l.j);
        float *o[NT];
        for (int nt = 0; nt < NT; nt++)
            o[nt] = l.sums.o[nt][t];
        if (G::LLOYD)
            kvq_gpu_add_bits<NT>(o, w, scaled, low, u, s);
        else
            kvq_gpu_add_tile<2, NT>(o, w, scaled, u, s);
    }
}

// ---- A warp's groups of a split ----

template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_shared_loop(kvq_gpu_lane<D, NT> &l, const kvq_gpu_attend_args &a,
                                    kvq_gpu_pipe &pipe, int count, uint32_t ratio)
{
    typedef kvq_gpu_shared<D, BITS> G;
    const bool normed = a.recipe.k_token_scale != KVQ_SCALE_NONE;
    const int v = G::GROUP + G::K_NORMS + (normed ? G::PARAMS : 0);
    const gpu::smem end = pipe.entry + 16 * count;
    KVQ_NO_UNROLL
    while (pipe.entry < end) {
        const gpu::smem ahead = pipe.entry + 16 * (KVQ_GPU_STAGES - 1);
        kvq_gpu_wait_stage();
        kvq_gpu_shared_fetch<D, BITS>(a, pipe.fill, ahead, ahead < pipe.limit);
        const gpu::u32x2 tokens = gpu::lds64(pipe.entry + 8);
        const gpu::smem k = pipe.use + G::GROUP;
        const gpu::smem norms =
            normed ? k + G::K_NORMS : gpu::smem_start() + kvq_gpu_room<D, NT>::ONES;
        const kvq_gpu_staged staged = {k, norms, pipe.use + v, tokens.v[0], tokens.v[1]};
        float s[NT][2][4];
        uint32_t p[NT][2][2];
        kvq_gpu_logits<D, BITS, NT>(l, k, pipe.use, s);
        kvq_gpu_softmax<D, NT, true>(l, staged, a.cap, s, p);
        kvq_gpu_shared_values<D, BITS, NT>(l, staged.v, ratio, p);
        kvq_gpu_turn<kvq_gpu_room<D, NT>, G::BYTES, G::WARP_BYTES>(pipe);
    }
}

// `count` groups from where the pipe stands.
template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_attend_shared(const kvq_gpu_attend_args &a, kvq_gpu_pipe &pipe, int count,
                                      kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_lane<D, NT> l = {};
    kvq_gpu_begin<D, NT>(l, a.cap, (float)(1 << 21));
    kvq_gpu_keep_q<D, NT>(l);
    const bool lloyd = kvq_gpu_shared<D, BITS>::LLOYD;
    const kvq_gpu_levels none = {1, 0}, levels = lloyd ? kvq_gpu_levels_of(a.recipe.v) : none;
    kvq_gpu_shared_loop<D, BITS, NT>(l, a, pipe, count, levels.ratio);
    kvq_gpu_finish<D, NT>(l, levels.p, lloyd ? -levels.p : 1);
    sums = l.sums;
}

#endif
