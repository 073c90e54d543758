// SPDX-License-Identifier: Apache-2.0
//
// The fast source of InnerQ's codes: K symmetric, 3 bits, with a scale for each token and 32
// channels; V of 2 or 3 bits with a scale for each channel of 32 tokens, symmetric or hybrid.
//
// Scales thus stand across from those of attend_affine.h, on the side where the cache is A:
//
//   V    A scale belongs to a row of the output tile. Products of codes and P are summed over the
//        group's 32 tokens and then added to the output, scaled. What all codes are off by (4 or 2,
//        or a hybrid channel's zero) meets the group's sum of P.
//   K    A product runs over channels of all scales, since each lane's channels are another 16. So
//        codes become numbers: one instruction makes code - 4 of a field in the mantissa of 1024,
//        exactly, and one multiplies by the token's scale.
//
// A lane needs V's scales of 2 D / 16 channels that lie 8 apart. ldmatrix brings what one of its
// products with a 1 spreads to all lanes, as fp32: rows are channels, k counts channels by 8, and
// column n picks a tile: i where n is even, i + 4 where it is odd.
#ifndef KVQ_KERNELS_CUDA_ATTEND_INNERQ_H
#define KVQ_KERNELS_CUDA_ATTEND_INNERQ_H

#include "kernels/cuda/attend_affine.h"
#include "kernels/cuda/attend_classic.h"

// Where the parts of a group lie. Its stages stand where those of affine codes of 3 bits would.
template <int D, int BITS> struct kvq_gpu_innerq {
    static constexpr int CODES = KVQ_GROUP_TOKENS * D / 8; // bytes of one bit of each
    static constexpr int K_SCALES = 3 * CODES;
    static constexpr int V = K_SCALES + 2 * D;
    static constexpr int V_SCALES = V + BITS * CODES;
    static constexpr int V_ZEROS = V_SCALES + 2 * D; // of hybrid ones
    static constexpr int BYTES = V_ZEROS + (BITS == 2 ? 2 * D : 0);
    static constexpr int WARP_BYTES = kvq_gpu_affine<D, 3>::WARP_BYTES;
    static_assert(KVQ_GPU_STAGES * BYTES <= WARP_BYTES, "the stages have room");
};

// ---- Logits ----

// Scales of tokens 4 g to 4 g + 3, each twice, for the channels of row 4 `half` + j of a slab.
template <int D>
KVQ_DEVICE void kvq_gpu_token_scales(uint32_t scale[4], gpu::smem scales, int g, int j, int slab,
                                     int half)
{
    const int group = 4 * slab + 2 * half + (j >> 1);
    const gpu::u32x2 x = gpu::lds64(scales + group * 2 * KVQ_GROUP_TOKENS + 8 * g);
    for (int i = 0; i < 4; i++)
        scale[i] = gpu::permute(x.v[i >> 1], 0, i & 1 ? 0x3232 : 0x1010);
}

// Two codes of 3 bits as a half2 of what they stand for. The sum of 4 and 1024 4^-s is an fp16.
KVQ_DEVICE uint32_t kvq_gpu_signed(const kvq_gpu_words<3> &w, int e, int x, int s,
                                   uint32_t thousand, uint32_t scale)
{
    const uint32_t down[4] = {0x3c003c00u, 0x34003400u, 0x2c002c00u, 0x24002400u}; // 4^-s
    const uint32_t off[4] = {0xe404e404u, 0xdc10dc10u, 0xd440d440u, 0xcd00cd00u};  // -1024 4^-s - 4
    return gpu::mul2(gpu::fma2(kvq_gpu_field(w, e, x, s) | thousand, down[s], off[s]), scale);
}

// As kvq_gpu_logits, in units of 1.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_innerq_logits(const kvq_gpu_lane<D, NT> &l, gpu::smem k, gpu::smem scales,
                                      float s[NT][2][4])
{
    const uint32_t thousand = kvq_gpu_thousand<D, NT>();
    uint32_t scale[2][4], q[NT][D / 8];
    for (int nt = 0; nt < NT; nt++) {
        if (D == 256) // too many to be kept
            kvq_gpu_load_q<D>(q[nt], l.queries, 8 * nt + l.g, l.j);
        else
            kvq_gpu_take_q<D, NT>(l, nt, false, q[nt]);
    }
    kvq_gpu_words<3> w[2];
    KVQ_UNROLL
    for (int step = 0; step < D / 16; step++) {
        if (step % 8 == 0) {
            kvq_gpu_load_k<D>(w, k, l.g, l.j, step >> 3);
            for (int half = 0; half < (D == 64 ? 1 : 2); half++)
                kvq_gpu_token_scales<D>(scale[half], scales, l.g, l.j, step >> 3, half);
        }
        const int place = D == 64 ? step : (step & 7) >> 1;
        const int e[2] = {D == 64 ? 0 : step & 1, D == 64 ? 1 : step & 1};
        KVQ_UNROLL
        for (int m = 0; m < 2; m++) {
            const float none[4] = {0, 0, 0, 0};
            uint32_t a[4];
            for (int i = 0; i < 4; i++) {
                const int half = D == 64 ? 0 : i >> 1, x = 2 * m + (i & 1);
                a[i] = kvq_gpu_signed(w[half], e[i >> 1], x, place, thousand, scale[half][x]);
            }
            KVQ_UNROLL
            for (int nt = 0; nt < NT; nt++)
                gpu::mma(s[nt][m], a, q[nt][kvq_gpu_pair<D>(step, 0)],
                         q[nt][kvq_gpu_pair<D>(step, 1)], step == 0 ? none : s[nt][m]);
        }
    }
}

// ---- Output ----

// The operand that picks tiles i and i + 4, by number.
struct kvq_gpu_picks {
    uint32_t low[4], high[4];
};

KVQ_DEVICE kvq_gpu_picks kvq_gpu_make_picks(int g, int j)
{
    kvq_gpu_picks p;
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) {
        p.low[i] = i == j && !(g & 1) ? 0x3c00 : 0;
        p.high[i] = i == j && (g & 1) ? 0x3c00 : 0;
    }
    return p;
}

// Numbers of all channels, with the bits asked for, 128 to an operand: channel 64 x + 16 j + g is
// k = 8 x + 2 j of row g, and 64 x + 16 j + 8 + g that of row g + 8. Odd k are picked by nobody.
template <int D>
KVQ_DEVICE void kvq_gpu_load_channels(uint32_t a[4 * ((D + 64) / 128)], gpu::smem at, uint32_t bits)
{
    uint32_t r[4];
    gpu::ldmatrix_trans(r, at + gpu::lane() * 16 % (2 * D));
    KVQ_UNROLL
    for (int i = 0; i < 2 * ((D + 64) / 128); i++) {
        const uint32_t x = r[i % (D / 64)] & bits;
        a[2 * i] = x;
        a[2 * i + 1] = x >> 16;
    }
}

// What is added for a tile of 16 channels at position `s` of their words.
template <int D, int BITS, int NT, bool HYBRID>
KVQ_DEVICE void kvq_gpu_add_innerq(kvq_gpu_lane<D, NT> &l, const kvq_gpu_words<BITS> w[2], int tile,
                                   const float scale[2], const float zero[2],
                                   const float sum[NT][4], const uint32_t p[NT][2][2])
{
    const int u = D == 64 ? 0 : tile & 1, s = D == 64 ? tile : tile >> 1 & 3;
    const float unit = (float)(1 << 2 * s) / (1 << 24); // of a code
    float o[NT][4], *at[NT];
    KVQ_UNROLL
    for (int nt = 0; nt < NT; nt++) {
        for (int i = 0; i < 4; i++)
            o[nt][i] = HYBRID ? 0 : sum[nt][i & 1] * (-unit * (1 << (BITS - 1)));
        at[nt] = o[nt];
    }
    kvq_gpu_add_tile<BITS, NT>(at, w, p, u, s);
    KVQ_UNROLL
    for (int i = 0; i < 4 * NT; i++) {
        float &to = l.sums.o[i >> 2][tile][i & 3];
        to = fmaf(o[i >> 2][i & 3], scale[i >> 1 & 1], to);
        if (HYBRID)
            to = fmaf(sum[i >> 2][i & 1] * unit, zero[i >> 1 & 1], to);
    }
}

// Tiles i and, with more than 64 channels, i + 4 of a slab.
template <int D, int BITS, int NT, bool HYBRID>
KVQ_DEVICE void kvq_gpu_innerq_tiles(kvq_gpu_lane<D, NT> &l, const kvq_gpu_words<BITS> w[2],
                                     int slab, int i, const kvq_gpu_picks &pick,
                                     const uint32_t *scales, const uint32_t *zeros,
                                     const float sum[NT][4], const uint32_t p[NT][2][2])
{
    const float none[4] = {0, 0, 0, 0};
    float scale[4], zero[4] = {0, 0, 0, 0};
    gpu::mma(scale, scales + 4 * slab, pick.low[i], pick.high[i], none);
    if (HYBRID)
        gpu::mma(zero, zeros + 4 * slab, pick.low[i], pick.high[i], none);
    KVQ_UNROLL
    for (int x = 0; x < (D == 64 ? 1 : 2); x++) {
        const float own[2] = {scale[x], scale[2 + x]}, own_zero[2] = {zero[x], zero[2 + x]};
        kvq_gpu_add_innerq<D, BITS, NT, HYBRID>(l, w, 8 * slab + i + 4 * x, own, own_zero, sum, p);
    }
}

template <int D, int BITS, int NT, bool HYBRID>
KVQ_DEVICE void kvq_gpu_innerq_values(kvq_gpu_lane<D, NT> &l, gpu::smem group,
                                      const kvq_gpu_picks &pick, const uint32_t p[NT][2][2])
{
    typedef kvq_gpu_innerq<D, BITS> G;
    constexpr int SLABS = (D + 64) / 128, PLANE = 2 * G::CODES;
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    const gpu::smem v = group + G::V;
    float sum[NT][4] = {};
    KVQ_UNROLL
    for (int nt = 0; nt < NT; nt++) {
        gpu::mma(sum[nt], ones, p[nt][0][0], p[nt][1][0], sum[nt]); // all k count alike
        gpu::mma(sum[nt], ones, p[nt][0][1], p[nt][1][1], sum[nt]);
        for (int n = 0; n < 2; n++)
            l.total[nt][n] += sum[nt][n];
    }
    uint32_t scales[4 * SLABS], zeros[4 * SLABS];
    kvq_gpu_load_channels<D>(scales, group + G::V_SCALES, 0x7fff7fffu);
    if (HYBRID)
        kvq_gpu_load_channels<D>(zeros, group + G::V_ZEROS, ~0u);
    kvq_gpu_words<BITS> w[2];
    KVQ_UNROLL
    for (int slab = 0; slab < SLABS; slab++) {
        if (D == 64)
            kvq_gpu_load_v64(w, v, v + PLANE, l.g, l.j);
        else
            kvq_gpu_load_v(w, v + slab * 1024, v + PLANE + slab * (BITS == 3 ? 512 : 1024), l.g,
                           l.j);
        KVQ_UNROLL
        for (int i = 0; i < 4; i++)
            kvq_gpu_innerq_tiles<D, BITS, NT, HYBRID>(l, w, slab, i, pick, scales, zeros, sum, p);
    }
}

// ---- A warp's groups of a split ----

// Bytes of a group, which are those from stage to stage.
template <int D, int BITS, bool HYBRID> struct kvq_gpu_innerq_stage {
    static constexpr int BYTES =
        HYBRID ? kvq_gpu_innerq<D, BITS>::BYTES : kvq_gpu_innerq<D, BITS>::V_ZEROS;
};

KVQ_DEVICE bool kvq_gpu_is_hybrid(const kvq_gpu_attend_args &a, int bits)
{
    return bits == 2 && a.recipe.v.has_zeros;
}

template <int D, int BITS, int NT, bool HYBRID>
KVQ_DEVICE void kvq_gpu_innerq_fill(kvq_gpu_pipe &pipe, int from, int limit)
{
    constexpr int BYTES = kvq_gpu_innerq_stage<D, BITS, HYBRID>::BYTES;
    kvq_gpu_fill_stages<kvq_gpu_room<D, NT>, BYTES, BYTES, BYTES,
                        kvq_gpu_innerq<D, BITS>::WARP_BYTES>(pipe, from, limit, BYTES);
}

template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_innerq_ahead(const kvq_gpu_attend_args &a, kvq_gpu_pipe &pipe, int from,
                                     int limit)
{
    if (kvq_gpu_is_hybrid(a, BITS))
        kvq_gpu_innerq_fill<D, BITS, NT, true>(pipe, from, limit);
    else
        kvq_gpu_innerq_fill<D, BITS, NT, false>(pipe, from, limit);
}

template <int D, int BITS, int NT, bool HYBRID>
KVQ_DEVICE void kvq_gpu_innerq_loop(kvq_gpu_lane<D, NT> &l, const kvq_gpu_attend_args &a,
                                    kvq_gpu_pipe &pipe, int count)
{
    typedef kvq_gpu_innerq<D, BITS> G;
    constexpr int BYTES = kvq_gpu_innerq_stage<D, BITS, HYBRID>::BYTES;
    const kvq_gpu_picks pick = kvq_gpu_make_picks(l.g, l.j);
    const gpu::smem end = pipe.entry + 16 * count;
    KVQ_NO_UNROLL
    while (pipe.entry < end) {
        kvq_gpu_next_stage<BYTES, BYTES>(pipe, BYTES);
        const gpu::smem use = pipe.use;
        const gpu::u32x2 tokens = gpu::lds64(pipe.entry + 8);
        const kvq_gpu_staged staged = {use, 0, use + G::V, tokens.v[0], tokens.v[1]};
        float s[NT][2][4];
        uint32_t p[NT][2][2];
        kvq_gpu_innerq_logits<D, NT>(l, use, use + G::K_SCALES, s);
        kvq_gpu_softmax<D, NT, false>(l, staged, a.cap, s, p);
        kvq_gpu_innerq_values<D, BITS, NT, HYBRID>(l, use, pick, p);
        kvq_gpu_turn<kvq_gpu_room<D, NT>, BYTES, G::WARP_BYTES>(pipe);
    }
}

// `count` groups from where the pipe stands.
template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_attend_innerq(const kvq_gpu_attend_args &a, kvq_gpu_pipe &pipe, int count,
                                      kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_lane<D, NT> l = {};
    kvq_gpu_begin<D, NT>(l, a.cap, 1);
    if (D < 256)
        kvq_gpu_keep_q<D, NT>(l);
    if (kvq_gpu_is_hybrid(a, BITS))
        kvq_gpu_innerq_loop<D, BITS, NT, true>(l, a, pipe, count);
    else
        kvq_gpu_innerq_loop<D, BITS, NT, false>(l, a, pipe, count);
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++)
        l.sums.l[i >> 1][i & 1] = l.total[i >> 1][i & 1];
    KVQ_UNROLL
    for (int i = 0; i < 4 * NT * (D / 16); i++) {
        const int nt = i / (D / 4), t = i / 4 % (D / 16), s = D == 64 ? t : t >> 1 & 3;
        l.sums.o[nt][t][i & 3] *= (float)(1 << (24 - 2 * s));
    }
    sums = l.sums;
}

#endif
