// SPDX-License-Identifier: Apache-2.0
//
// Attention over packed affine codes with classic dequantization, for comparison alone: codes
// become fp16 numbers and then, times scale plus zero, keys and values, before any product. What
// attend_affine.h saves by leaving codes as they are is measured against this (tools/gpu-check.sh,
// part ablation). A program whose kernels are compiled with KVQ_GPU_CLASSIC has it instead; copies,
// softmax and everything around are the same.
//
// The conversion is the fast one of published kernels: a pair of fields is ORed into the mantissas
// of 1024, one fused multiply-add takes off the 1024 and the power of four of their place, another
// makes the values. So it costs three instructions, where AND-only costs one.
#ifndef KVQ_KERNELS_CUDA_ATTEND_CLASSIC_H
#define KVQ_KERNELS_CUDA_ATTEND_CLASSIC_H

#include "kernels/cuda/attend_affine.h"

// 1024 twice, made of the ones in shared memory: were it a constant, the field's AND and OR would
// be two instructions, since one takes only one constant.
template <int D, int NT> KVQ_DEVICE uint32_t kvq_gpu_thousand()
{
    return gpu::lds32(gpu::smem_start() + kvq_gpu_room<D, NT>::ONES) + 0x28002800u;
}

// Two codes as a half2 of what they stand for.
template <int BITS>
KVQ_DEVICE uint32_t kvq_gpu_number(const kvq_gpu_words<BITS> &w, int e, int x, int s,
                                   uint32_t thousand, uint32_t scale, uint32_t zero)
{
    const uint32_t down[4] = {0x3c003c00u, 0x34003400u, 0x2c002c00u, 0x24002400u}; // 4^-s
    const uint32_t off[4] = {0xe400e400u, 0xdc00dc00u, 0xd400d400u, 0xcc00cc00u};  // -1024 4^-s
    const uint32_t code = gpu::fma2(kvq_gpu_field(w, e, x, s) | thousand, down[s], off[s]);
    return gpu::fma2(code, scale, zero);
}

// As kvq_gpu_logits, in units of 1.
template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_classic_logits(const kvq_gpu_lane<D, NT> &l, gpu::smem k, float s[NT][2][4])
{
    typedef kvq_gpu_affine<D, BITS> G;
    const uint32_t thousand = kvq_gpu_thousand<D, NT>();
    uint32_t scale[D / 8], zero[D / 8], q[NT][G::PAIRS];
    kvq_gpu_load_pairs<D>(scale, k + G::K_SCALES, l.j);
    kvq_gpu_load_pairs<D>(zero, k + G::K_ZEROS, l.j);
    for (int nt = 0; nt < NT; nt++)
        kvq_gpu_take_q<D, NT>(l, nt, false, q[nt]);
    kvq_gpu_words<BITS> w[2];
    KVQ_UNROLL
    for (int step = 0; step < G::STEPS; step++) {
        if (step % 8 == 0)
            kvq_gpu_load_k<D>(w, k, l.g, l.j, step >> 3);
        const int place = D == 64 ? step : (step & 7) >> 1;
        const int e[2] = {D == 64 ? 0 : step & 1, D == 64 ? 1 : step & 1};
        KVQ_UNROLL
        for (int m = 0; m < 2; m++) {
            uint32_t a[4];
            for (int i = 0; i < 4; i++) {
                const int b = kvq_gpu_pair<D>(step, i >> 1);
                a[i] = kvq_gpu_number(w[D == 64 ? 0 : i >> 1], e[i >> 1], 2 * m + (i & 1), place,
                                      thousand, scale[b], zero[b]);
            }
            const float none[4] = {0, 0, 0, 0};
            KVQ_UNROLL
            for (int nt = 0; nt < NT; nt++)
                gpu::mma(s[nt][m], a, q[nt][kvq_gpu_pair<D>(step, 0)],
                         q[nt][kvq_gpu_pair<D>(step, 1)], step == 0 ? none : s[nt][m]);
        }
    }
}

// Adds one tile of 16 channels, as kvq_gpu_add_tile.
template <int BITS, int NT>
KVQ_DEVICE void kvq_gpu_classic_tile(float *const o[NT], const kvq_gpu_words<BITS> w[2],
                                     const uint32_t p[NT][2][2], int u, int s, uint32_t thousand,
                                     const gpu::u32x4 &scale, const gpu::u32x4 &zero)
{
    KVQ_UNROLL
    for (int m = 0; m < 2; m++) {
        uint32_t a[4];
        for (int i = 0; i < 4; i++)
            a[i] = kvq_gpu_number(w[i >> 1], m, 2 * u + (i & 1), s, thousand,
                                  scale.v[2 * m + (i >> 1)], zero.v[2 * m + (i >> 1)]);
        KVQ_UNROLL
        for (int nt = 0; nt < NT; nt++)
            gpu::mma(o[nt], a, p[nt][m][0], p[nt][m][1], o[nt]);
    }
}

// As kvq_gpu_values, in units of 1 and with zeros.
template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_classic_values(kvq_gpu_lane<D, NT> &l, gpu::smem v,
                                       const uint32_t p[NT][2][2])
{
    typedef kvq_gpu_affine<D, BITS> G;
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    const uint32_t thousand = kvq_gpu_thousand<D, NT>();
    KVQ_UNROLL
    for (int nt = 0; nt < NT; nt++) {
        gpu::mma(l.total[nt], ones, p[nt][0][0], p[nt][1][0], l.total[nt]); // all k count alike
        gpu::mma(l.total[nt], ones, p[nt][0][1], p[nt][1][1], l.total[nt]);
    }
    kvq_gpu_words<BITS> w[2];
    KVQ_UNROLL
    for (int c = 0; c < G::V_GROUPS; c++) {
        if (D == 64 && c == 0)
            kvq_gpu_load_v64(w, v, v + G::PLANE, l.g, l.j);
        if (D >= 128 && c % 4 == 0)
            kvq_gpu_load_v(w, v + c * 256, v + G::PLANE + c * (BITS == 3 ? 128 : 256), l.g, l.j);
        const gpu::u32x4 scale = gpu::lds128(v + G::V_SCALES + c * 64 + l.j * 16);
        const gpu::u32x4 zero = gpu::lds128(v + G::V_ZEROS + c * 64 + l.j * 16);
        KVQ_UNROLL
        for (int u = 0; u < 2; u++) {
            float *o[NT];
            for (int nt = 0; nt < NT; nt++)
                o[nt] = l.sums.o[nt][2 * c + u];
            kvq_gpu_classic_tile<BITS, NT>(o, w, p, D == 64 ? 0 : u, D == 64 ? 2 * c + u : c & 3,
                                           thousand, scale, zero);
        }
    }
}

#endif
