// SPDX-License-Identifier: Apache-2.0
//
// The fast source of packed keys and values: affine codes of 2, 3 or 4 bits, K's scales and zeros
// per channel of 32 tokens, V's per token of 32 channels (OScaR, KIVI, OTT with groups of 32),
// norms of K or not.
//
// Warp w owns group w (32 tokens) of every block and keeps a running maximum and output of its own,
// so warps never wait for each other inside a split. The cache is the A operand of mma, 8 query
// rows are the columns of B; with NT = 2 there are 16:
//
//   logits   S^T[token][row]   = K Q^T     two tiles of 16 tokens, k runs over channels
//   output   O^T[channel][row] = V^T P^T   tiles of 16 channels, k runs over tokens
//
// Codes are never converted. A field of 2 bits at bit 2s, cut out by one AND, *is* the fp16
// subnormal code * 4^s * 2^-24; the 4^s is undone in Q (logits) or at the end (output). Scales of K
// go into Q once per group, scales of V into P; the zeros of K start the accumulators, the zeros
// of V and the sum of P are one more tile of A. High planes (3 and 4 bits) are ORed in above the
// low field, which still fits the 10 bits of a subnormal.
//
// Lane = 4 g + j throughout. Which token, channel and position a register holds is worked out
// beside each load below; layout.h has the byte order.
//
// This version copies each warp's group by 16-byte asynchronous copies of that warp (sm_80 and
// later). A producer warp with bulk copies (sm_90) would take those instructions out of the loop.
#ifndef KVQ_KERNELS_CUDA_ATTEND_AFFINE_H
#define KVQ_KERNELS_CUDA_ATTEND_AFFINE_H

#include "kernels/cuda/attend_tile.h"

// Where the parts of a group lie, as kernels/layout.h section 2 says, for the compiler to fold.
// Those of V count from the end of K's norms, or of K's zeros if there are no norms.
template <int D, int BITS> struct kvq_gpu_affine {
    static constexpr int PLANE = KVQ_GROUP_TOKENS * D / 4; // low plane, bytes
    static constexpr int HIGH = BITS == 2 ? 0 : BITS == 3 ? PLANE / 2 : PLANE;
    static constexpr int K_SCALES = PLANE + HIGH;
    static constexpr int K_ZEROS = K_SCALES + 2 * D;
    static constexpr int K_NORMS = K_ZEROS + 2 * D;
    static constexpr int NORMS = 2 * KVQ_GROUP_TOKENS;
    static constexpr int V_SCALES = PLANE + HIGH;
    static constexpr int V_ZEROS = V_SCALES + 2 * D;
    static constexpr int BYTES = K_NORMS + NORMS + V_ZEROS + 2 * D; // with norms

    static constexpr int V_GROUPS = D / KVQ_GROUP_CHANNELS;
    static constexpr int STEPS = D / 16; // mma steps of 16 channels in a logit
    static constexpr int PAIRS = D / 8;  // half2 of Q in a lane

    static constexpr int WARP_BYTES = KVQ_GPU_STAGES * BYTES;
};

// A group in shared memory.
struct kvq_gpu_staged {
    gpu::smem k, norms, v;
    uint32_t mask; // tokens that count
    uint32_t rel;  // with bit KVQ_GPU_SPECIAL as in the list
};

// What a lane keeps for the whole split. With 16 rows queries stay in shared memory, for want of
// registers.
template <int D, int NT> struct kvq_gpu_lane {
    static constexpr int KEPT = NT == 1 ? D / 8 : 1;
    int g, j;
    float unit;                        // accumulator units in a logit: 2^21, without 4^s 2^-24 1
    gpu::smem queries;                 // for packed keys
    uint32_t q[KEPT];                  // natural
    uint32_t q_places[KEPT];           // times 2^(3 - 2s), s the position of the channel's code
    float to_log2[NT][2];              // from accumulator units to log2 units; 1 with a soft-cap
    float first[NT][4], second[NT][4]; // sum of p times zero, by channel group
    float total[NT][4];                // sum of p
    kvq_gpu_sums<D, NT> sums;          // position's power of two still in o; l unused
};

// Four words of a lane, cut into byte e (of either half of a word) at bits 0 to 7 of the halves.
template <int BITS> struct kvq_gpu_words {
    uint32_t low[2][4];
    uint32_t high[2][4]; // field moved to stand two above its low field; unused at 2 bits
};

// ---- Fields of words ----

// The words' second byte comes down by a shift; every position then fits a subnormal.
template <int BITS> KVQ_DEVICE void kvq_gpu_set_low(kvq_gpu_words<BITS> &w, int x, uint32_t word)
{
    w.low[0][x] = word;
    w.low[1][x] = word >> 8;
}

// At 4 bits the high field stands at bit 2s of the word. At 3 bits it is one bit, at 2s + odd.
template <int BITS>
KVQ_DEVICE void kvq_gpu_set_high(kvq_gpu_words<BITS> &w, int x, uint32_t word, int odd)
{
    w.high[0][x] = word << (2 - odd);
    w.high[1][x] = word >> (6 + odd);
}

// Two codes, times 4^s 2^-24, as a half2.
template <int BITS>
KVQ_DEVICE uint32_t kvq_gpu_field(const kvq_gpu_words<BITS> &w, int e, int x, int s)
{
    uint32_t codes = w.low[e][x] & (0x00030003u << 2 * s);
    if (BITS == 3)
        codes |= w.high[e][x] & (0x00040004u << 2 * s);
    if (BITS == 4)
        codes |= w.high[e][x] & (0x000c000cu << 2 * s);
    return codes;
}

// ---- Queries ----

// Channel parameters of a group as the lane's half2 pairs; four pairs of a row come by one load.
template <int D> KVQ_DEVICE void kvq_gpu_load_pairs(uint32_t pairs[D / 8], gpu::smem at, int j)
{
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++) {
        const gpu::u32x4 x = gpu::lds128(at + (i >> 1) * 128 + j * 32 + (i & 1) * 16);
        for (int k = 0; k < 4; k++)
            pairs[4 * i + k] = x.v[k];
    }
}

// Pairs of query row 8 nt + g in the same order.
template <int D>
KVQ_DEVICE void kvq_gpu_load_q(uint32_t pairs[D / 8], gpu::smem queries, int row, int j)
{
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++) {
        const gpu::u32x4 x =
            gpu::lds128(kvq_gpu_chunk<D>(queries, row, 8 * (i >> 1) + 2 * j + (i & 1)));
        for (int k = 0; k < 4; k++)
            pairs[4 * i + k] = x.v[k];
    }
}

// Times 2^(3 - 2s): pair 2 s + e of its row.
template <int D> KVQ_DEVICE void kvq_gpu_place(uint32_t places[D / 8], const uint32_t pairs[D / 8])
{
    const uint32_t place[4] = {0x48004800u, 0x40004000u, 0x38003800u, 0x30003000u};
    KVQ_UNROLL
    for (int i = 0; i < D / 8; i++)
        places[i] = gpu::mul2(pairs[i], place[(i & 7) >> 1]);
}

// The lane's pairs of query row 8 nt + g, or their places.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_take_q(const kvq_gpu_lane<D, NT> &l, int nt, bool places,
                               uint32_t pairs[D / 8])
{
    if (NT == 1) {
        KVQ_UNROLL
        for (int i = 0; i < D / 8; i++)
            pairs[i] = places ? l.q_places[i % l.KEPT] : l.q[i % l.KEPT];
    } else {
        kvq_gpu_load_q<D>(pairs, l.queries, 8 * nt + l.g, l.j);
        if (places)
            kvq_gpu_place<D>(pairs, pairs);
    }
}

// ---- Logits ----

// K words of a slab's rows j (w[0]) and j + 4 (w[1]; D = 64 has rows 0 to 3 only): word x is
// token 4 g + x, channels 16 row + 4 s + 2 e + h. Tile m holds token 4 g + 2 m in its row g and
// 4 g + 2 m + 1 in row g + 8, so word x = 2 m + (row >> 3).
template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_load_k(kvq_gpu_words<BITS> w[2], gpu::smem group, int g, int j, int slab)
{
    typedef kvq_gpu_affine<D, BITS> G;
    constexpr int HALVES = D == 64 ? 1 : 2;
    const gpu::smem high = group + G::PLANE;
    const int at = j * 128 + (g ^ 2 * j) * 16;
    gpu::u32x4 x[2] = {};
    for (int half = 0; half < HALVES; half++) {
        x[half] = gpu::lds128(group + slab * 1024 + half * 512 + at);
        for (int i = 0; i < 4; i++)
            kvq_gpu_set_low(w[half], i, x[half].v[i]);
    }
    for (int half = 0; BITS == 4 && half < HALVES; half++)
        x[half] = gpu::lds128(high + slab * 1024 + half * 512 + at);
    if (BITS == 3 && D >= 128) // rows j and j + 4 share a row
        x[0] = x[1] = gpu::lds128(high + slab * 512 + at);
    if (BITS == 3 && D == 64) // rows 0 and 2 share a row, 1 and 3 another
        x[0] = gpu::lds128(high + (j & 1) * 128 + (g ^ 2 * (j & 1)) * 16);
    for (int half = 0; BITS > 2 && half < HALVES; half++)
        for (int i = 0; i < 4; i++)
            kvq_gpu_set_high(w[half], i,
                             D == 64 && BITS == 3 ? x[half].v[i] >> (j >> 1) : x[half].v[i],
                             BITS == 3 ? half : 0);
}

// The half2 of Q (and of scales and zeros, which lie in natural order) that mma step `step` takes
// as its k = 2j.. (half 0) or k = 2j + 8.. (half 1). Pairs 0 to 7 of a row are its channels in
// order, pair 2 s + e; a lane's rows are j, j + 4 (and the same of the second slab).
template <int D> KVQ_DEVICE constexpr int kvq_gpu_pair(int step, int half)
{
    return D == 64 ? 2 * step + half : (step >> 3) * 16 + half * 8 + (step & 7);
}

// Sum of q times zero over the channels, alike in all rows. A is the zeros as they were loaded,
// so that no register moves: even pairs meet Q in rows 0 to 7, odd pairs in rows 8 to 15, and
// the rows where a pair meets another's Q are left.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_zero_sums(const kvq_gpu_lane<D, NT> &l, gpu::smem zeros, float c[NT][4])
{
    const float unit = 1.0f / (1 << 21); // what one code counts in the sums that follow
    uint32_t zero[D / 8], q[D / 8];
    kvq_gpu_load_pairs<D>(zero, zeros, l.j);
    KVQ_UNROLL
    for (int nt = 0; nt < NT; nt++) {
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
        kvq_gpu_take_q<D, NT>(l, nt, false, q);
        KVQ_UNROLL
        for (int i = 0; i < D / 8; i += 4) {
            gpu::mma(even, zero + i, q[i], q[i + 2], even);
            gpu::mma(odd, zero + i, q[i + 1], q[i + 3], odd);
        }
        for (int n = 0; n < 2; n++)
            c[nt][n] = c[nt][n + 2] = (even[n] + odd[n + 2]) * unit;
    }
}

// Queries times the group's scales of K.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_scale_q(const kvq_gpu_lane<D, NT> &l, gpu::smem scales,
                                uint32_t q[NT][D / 8])
{
    uint32_t scale[D / 8];
    kvq_gpu_load_pairs<D>(scale, scales, l.j);
    KVQ_UNROLL
    for (int nt = 0; nt < NT; nt++) {
        kvq_gpu_take_q<D, NT>(l, nt, true, q[nt]);
        KVQ_UNROLL
        for (int i = 0; i < D / 8; i++)
            q[nt][i] = gpu::mul2(q[nt][i], scale[i]);
    }
}

// s[nt][m][2 rh + n]: logit of token 4 g + 2 m + rh and row 8 nt + 2 j + n, before norm, in units
// of 2^-21. The group's scales are at `scales`, its zeros behind them.
template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_logits(const kvq_gpu_lane<D, NT> &l, gpu::smem k, gpu::smem scales,
                               float s[NT][2][4])
{
    typedef kvq_gpu_affine<D, BITS> G;
    float zero[NT][4];
    kvq_gpu_zero_sums<D, NT>(l, scales + 2 * D, zero);
    uint32_t q[NT][G::PAIRS];
    kvq_gpu_scale_q<D, NT>(l, scales, q);
    kvq_gpu_words<BITS> w[2];
    KVQ_UNROLL
    for (int step = 0; step < G::STEPS; step++) {
        const int slab = step >> 3;
        if (step % 8 == 0)
            kvq_gpu_load_k<D>(w, k, l.g, l.j, slab);
        // D = 64: one row a lane, so k = 2j.. is byte 0 and k = 2j + 8.. byte 1 of the same word.
        const int place = D == 64 ? step : (step & 7) >> 1;
        const int e0 = D == 64 ? 0 : step & 1, e1 = D == 64 ? 1 : step & 1;
        const kvq_gpu_words<BITS> &upper = w[D == 64 ? 0 : 1];
        const int b0 = kvq_gpu_pair<D>(step, 0), b1 = kvq_gpu_pair<D>(step, 1);
        KVQ_UNROLL
        for (int m = 0; m < 2; m++) {
            const uint32_t a[4] = {
                kvq_gpu_field(w[0], e0, 2 * m, place), kvq_gpu_field(w[0], e0, 2 * m + 1, place),
                kvq_gpu_field(upper, e1, 2 * m, place), kvq_gpu_field(upper, e1, 2 * m + 1, place)};
            KVQ_UNROLL
            for (int nt = 0; nt < NT; nt++)
                gpu::mma(s[nt][m], a, q[nt][b0], q[nt][b1], step == 0 ? zero[nt] : s[nt][m]);
        }
    }
}

// ---- Softmax ----

// Soft-capped logits in powers of two. `norm` is done before.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_cap_logits(const kvq_gpu_lane<D, NT> &l, float cap, float s[NT][2][4])
{
    typedef kvq_gpu_room<D, NT> R;
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int row = 8 * (i >> 1) + 2 * l.j + (i & 1);
        const float unit = kvq_gpu_get_float(gpu::smem_start() + R::FACTORS + 8 * row + 4) * l.unit;
        for (int x = 0; x < 4; x++) {
            float &logit = s[i >> 1][x >> 1][2 * (x & 1) + (i & 1)];
            logit = kvq_gpu_cap(cap, logit * unit);
        }
    }
}

// Takes out what rows do not see, at the edges of what they see and where tokens are missing.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_mask_logits(const kvq_gpu_lane<D, NT> &l, const kvq_gpu_staged &staged,
                                    float s[NT][2][4])
{
    typedef kvq_gpu_room<D, NT> R;
    const int rel = (int)(staged.rel & ~(1u << KVQ_GPU_SPECIAL));
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int row = 8 * (i >> 1) + 2 * l.j + (i & 1);
        const gpu::u32x2 range = gpu::lds64(gpu::smem_start() + R::RANGES + 8 * row);
        const uint32_t seen =
            staged.mask & kvq_gpu_bits((int)range.v[0] - rel, (int)range.v[1] - rel);
        for (int x = 0; x < 4; x++)
            if (!(seen >> (4 * l.g + x) & 1))
                s[i >> 1][x >> 1][2 * (x & 1) + (i & 1)] = -INFINITY;
    }
}

// Raises the running maxima that a logit passes by more than 2^KVQ_GPU_GROWTH.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_raise(kvq_gpu_lane<D, NT> &l, const float s[NT][2][4])
{
    float most[NT][2];
    bool passes[NT][2], some = false;
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int nt = i >> 1, n = i & 1;
        float x = fmaxf(fmaxf(s[nt][0][n], s[nt][0][2 + n]), fmaxf(s[nt][1][n], s[nt][1][2 + n]));
        for (int d = 4; d < gpu::WARP; d *= 2)
            x = fmaxf(x, gpu::shuffle_xor(x, d));
        most[nt][n] = x;
        passes[nt][n] = fmaf(x, l.to_log2[nt][n], -l.sums.m[nt][n]) > KVQ_GPU_GROWTH;
        some |= passes[nt][n];
    }
    if (!gpu::any(some))
        return;
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int nt = i >> 1, n = i & 1;
        const float before = l.sums.m[nt][n];
        const float m = passes[nt][n] ? most[nt][n] * l.to_log2[nt][n] : before;
        const float shrink = gpu::power2(before - m);
        l.sums.m[nt][n] = m;
        for (int r = n; r < 4; r += 2) {
            for (int t = 0; t < D / 16; t++)
                l.sums.o[nt][t][r] *= shrink;
            l.first[nt][r] *= shrink;
            l.second[nt][r] *= shrink;
            l.total[nt][r] *= shrink;
        }
    }
}

// From logits to p = 2^(logit - m) as B operands: p[nt][m][half] has k = 2j and 2j + 1 for half 0,
// k = 2j + 8, + 9 for half 1, of row 8 nt + g. k < 8 is token 4 k + 2 m, k >= 8 is
// 4 (k - 8) + 2 m + 1; so a lane holds tokens 8 j + x and 8 j + 4 + x with x = 2 m + half.
template <int D, int NT, bool NORMED>
KVQ_DEVICE void kvq_gpu_softmax(kvq_gpu_lane<D, NT> &l, const kvq_gpu_staged &staged, float cap,
                                float s[NT][2][4], uint32_t p[NT][2][2])
{
    if (NORMED) {
        const gpu::u32x2 norms = gpu::lds64(staged.norms + l.g * 8); // tokens 4 g to 4 g + 3
        KVQ_UNROLL
        for (int m = 0; m < 2; m++) {
            const float norm[2] = {gpu::low(norms.v[m]), gpu::high(norms.v[m])};
            for (int i = 0; i < 4 * NT; i++)
                s[i >> 2][m][i & 3] *= norm[i >> 1 & 1];
        }
    }
    if (staged.rel >> KVQ_GPU_SPECIAL) {
        if (cap != 0)
            kvq_gpu_cap_logits<D, NT>(l, cap, s);
        kvq_gpu_mask_logits<D, NT>(l, staged, s);
    }
    kvq_gpu_raise<D, NT>(l, s);
    KVQ_UNROLL
    for (int i = 0; i < 4 * NT; i++) {
        const int nt = i >> 2, m = i >> 1 & 1, half = i & 1;
        float x[2];
        for (int n = 0; n < 2; n++)
            x[n] = gpu::power2(fmaf(s[nt][m][2 * half + n], l.to_log2[nt][n], -l.sums.m[nt][n]));
        p[nt][m][half] = gpu::transpose(gpu::pack2(x[0], x[1]));
    }
}

// ---- Output ----

// V words of the sets (j, 0) and (j, 1): word x = 2 u + rh is channel 32 s + 16 u + 8 rh + g of
// the slab, byte k token 8 j + 2 k + half. So byte e and byte e + 2, the two halves of field e, are
// tokens 8 j + 2 e + half and 8 j + 4 + 2 e + half, as P has them for m = e.
template <int BITS>
KVQ_DEVICE void kvq_gpu_load_v(kvq_gpu_words<BITS> w[2], gpu::smem low, gpu::smem high, int g,
                               int j)
{
    const int chunk = (g ^ 2 * j) * 16, at = 2 * j * 128 + chunk;
    gpu::u32x4 x[2];
    for (int half = 0; half < 2; half++) {
        x[half] = gpu::lds128(low + at + half * 128);
        for (int i = 0; i < 4; i++)
            kvq_gpu_set_low(w[half], i, x[half].v[i]);
    }
    for (int half = 0; BITS == 4 && half < 2; half++)
        x[half] = gpu::lds128(high + at + half * 128);
    if (BITS == 3) // both sets share a row
        x[0] = x[1] = gpu::lds128(high + j * 128 + chunk);
    for (int half = 0; BITS > 2 && half < 2; half++)
        for (int i = 0; i < 4; i++)
            kvq_gpu_set_high(w[half], i, x[half].v[i], BITS == 3 ? half : 0);
}

// The same for D = 64: word x is rh alone, channel 32 (s >> 1) + 16 (s & 1) + 8 rh + g.
template <int BITS>
KVQ_DEVICE void kvq_gpu_load_v64(kvq_gpu_words<BITS> w[2], gpu::smem low, gpu::smem high, int g,
                                 int j)
{
    const int word = (2 * g ^ 8 * (j >> 1)) * 4;
    gpu::u32x2 x[2];
    for (int half = 0; half < 2; half++) {
        x[half] = gpu::lds64(low + (2 * j + (half ^ (j & 1))) * 64 + word);
        for (int i = 0; i < 2; i++)
            kvq_gpu_set_low(w[half], i, x[half].v[i]);
    }
    for (int half = 0; BITS == 4 && half < 2; half++)
        x[half] = gpu::lds64(high + (2 * j + (half ^ (j & 1))) * 64 + word);
    if (BITS == 3)
        x[0] = x[1] = gpu::lds64(high + j * 64 + word);
    for (int half = 0; BITS > 2 && half < 2; half++)
        for (int i = 0; i < 2; i++)
            kvq_gpu_set_high(w[half], i, x[half].v[i], BITS == 3 ? half : 0);
}

// Adds one tile of 16 channels: `u` picks its words, `s` its position.
template <int BITS, int NT>
KVQ_DEVICE void kvq_gpu_add_tile(float *const o[NT], const kvq_gpu_words<BITS> w[2],
                                 const uint32_t p[NT][2][2], int u, int s)
{
    KVQ_UNROLL
    for (int m = 0; m < 2; m++) {
        const uint32_t a[4] = {
            kvq_gpu_field(w[0], m, 2 * u, s), kvq_gpu_field(w[0], m, 2 * u + 1, s),
            kvq_gpu_field(w[1], m, 2 * u, s), kvq_gpu_field(w[1], m, 2 * u + 1, s)};
        KVQ_UNROLL
        for (int nt = 0; nt < NT; nt++)
            gpu::mma(o[nt], a, p[nt][m][0], p[nt][m][1], o[nt]);
    }
}

// Adds zero times p in row = channel group, and p in every row. Again A is the zeros as loaded:
// half 0 of P meets them in rows 0 to 7 (first), half 1 in rows 8 to 15 (second).
template <int GROUPS, int D, int NT>
KVQ_DEVICE void kvq_gpu_add_sums(kvq_gpu_lane<D, NT> &l, gpu::smem zeros,
                                 const uint32_t p[NT][2][2])
{
    const int row = l.g % GROUPS; // slots 8 j + 2 x of the group: half2 number x
    const gpu::u32x4 zero = gpu::lds128(zeros + row * 64 + l.j * 16);
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    KVQ_UNROLL
    for (int nt = 0; nt < NT; nt++) {
        gpu::mma(l.first[nt], zero.v, p[nt][0][0], p[nt][1][0], l.first[nt]);
        gpu::mma(l.second[nt], zero.v, p[nt][0][1], p[nt][1][1], l.second[nt]);
        gpu::mma(l.total[nt], ones, p[nt][0][0], p[nt][1][0], l.total[nt]); // all k count alike
        gpu::mma(l.total[nt], ones, p[nt][0][1], p[nt][1][1], l.total[nt]);
    }
}

template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_values(kvq_gpu_lane<D, NT> &l, gpu::smem v, const uint32_t p[NT][2][2])
{
    typedef kvq_gpu_affine<D, BITS> G;
    kvq_gpu_add_sums<G::V_GROUPS>(l, v + G::V_ZEROS, p);
    kvq_gpu_words<BITS> w[2];
    KVQ_UNROLL
    for (int c = 0; c < G::V_GROUPS; c++) {
        if (D == 64 && c == 0)
            kvq_gpu_load_v64(w, v, v + G::PLANE, l.g, l.j);
        if (D >= 128 && c % 4 == 0)
            kvq_gpu_load_v(w, v + c * 256, v + G::PLANE + c * (BITS == 3 ? 128 : 256), l.g, l.j);
        const gpu::u32x4 scale = gpu::lds128(v + G::V_SCALES + c * 64 + l.j * 16);
        uint32_t scaled[NT][2][2];
        KVQ_UNROLL
        for (int i = 0; i < 4 * NT; i++)
            scaled[i >> 2][i >> 1 & 1][i & 1] =
                gpu::mul2(p[i >> 2][i >> 1 & 1][i & 1], scale.v[i & 3]);
        KVQ_UNROLL
        for (int u = 0; u < 2; u++) {
            float *o[NT];
            for (int nt = 0; nt < NT; nt++)
                o[nt] = l.sums.o[nt][2 * c + u];
            kvq_gpu_add_tile<BITS, NT>(o, w, scaled, D == 64 ? 0 : u, D == 64 ? 2 * c + u : c & 3);
        }
    }
}

// ---- A warp's groups of a split ----

// Whether keys and values are made of codes before the products, by the functions of
// attend_classic.h: in a build that measures what leaving codes as they are saves.
#ifdef KVQ_GPU_CLASSIC
constexpr bool kvq_gpu_is_classic = true;
#else
constexpr bool kvq_gpu_is_classic = false;
#endif
template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_classic_logits(const kvq_gpu_lane<D, NT> &l, gpu::smem k,
                                       float s[NT][2][4]);
template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_classic_values(kvq_gpu_lane<D, NT> &l, gpu::smem v,
                                       const uint32_t p[NT][2][2]);

// Everything but the queries.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_begin(kvq_gpu_lane<D, NT> &l, float cap, float unit)
{
    typedef kvq_gpu_room<D, NT> R;
    const gpu::smem smem = gpu::smem_start();
    l.g = gpu::lane() >> 2;
    l.j = gpu::lane() & 3;
    l.unit = unit;
    l.queries = smem + R::PACKED_QUERIES;
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int row = 8 * (i >> 1) + 2 * l.j + (i & 1);
        const float factor = kvq_gpu_get_float(smem + R::FACTORS + 8 * row + 4);
        l.to_log2[i >> 1][i & 1] = cap != 0 ? 1 : factor * unit;
    }
    kvq_gpu_start(l.sums);
}

template <int D, int NT> KVQ_DEVICE void kvq_gpu_keep_q(kvq_gpu_lane<D, NT> &l)
{
    uint32_t q[D / 8], places[D / 8];
    if (NT > 1)
        return;
    kvq_gpu_load_q<D>(q, l.queries, l.g, l.j);
    kvq_gpu_place<D>(places, q);
    KVQ_UNROLL
    for (int i = 0; i < l.KEPT; i++) {
        l.q[i] = q[i];
        l.q_places[i] = places[i];
    }
}

// Where a warp stands in its list: the entry that it attends to next, the end of those that it may
// copy ahead, and the stages that are read and filled next.
struct kvq_gpu_pipe {
    gpu::smem entry, limit, use, fill;
};

// Starts copying a group, if wanted, as one batch. LEAST: bytes of the smallest group.
template <int LEAST, int MOST>
KVQ_DEVICE void kvq_gpu_fetch(gpu::smem to, gpu::u32x2 address, bool wanted, int bytes)
{
    const int own = gpu::lane() * 16, step = 16 * gpu::WARP;
    const uint64_t from = (address.v[0] | (uint64_t)address.v[1] << 32) + (uint64_t)own;
    KVQ_UNROLL
    for (int i = 0; i < MOST; i += step)
        gpu::copy16(to + own + i, (const uint8_t *)(uintptr_t)(from + (uint64_t)i),
                    wanted && (i + step <= LEAST || own < bytes - i));
    gpu::copy_commit();
}

// Entry `i` of this warp's list of packed groups.
template <class R> KVQ_DEVICE gpu::smem kvq_gpu_packed_entry(int i)
{
    return gpu::smem_start() + R::PACKED + gpu::warp() * R::LIST_BYTES + 16 * i;
}

// Sets out for entries [from, limit) of the list. STRIDE: from stage to stage.
template <class R, int STRIDE, int WARP_BYTES>
KVQ_DEVICE void kvq_gpu_set_pipe(kvq_gpu_pipe &pipe, int from, int limit)
{
    pipe.entry = kvq_gpu_packed_entry<R>(from);
    pipe.limit = kvq_gpu_packed_entry<R>(limit);
    pipe.use = gpu::smem_start() + R::STAGES + gpu::warp() * WARP_BYTES;
    pipe.fill = pipe.use + (KVQ_GPU_STAGES - 1) * STRIDE;
}

// The same, and fills all stages but one.
template <class R, int LEAST, int MOST, int STRIDE, int WARP_BYTES>
KVQ_DEVICE void kvq_gpu_fill_stages(kvq_gpu_pipe &pipe, int from, int limit, int bytes)
{
    kvq_gpu_set_pipe<R, STRIDE, WARP_BYTES>(pipe, from, limit);
    KVQ_UNROLL
    for (int i = 0; i < KVQ_GPU_STAGES - 1; i++)
        kvq_gpu_fetch<LEAST, MOST>(pipe.use + i * STRIDE, gpu::lds64(pipe.entry + 16 * i),
                                   from + i < limit, bytes);
}

// Waits for the stage to use: then all lanes' copies are there, and all have left the one to fill.
KVQ_DEVICE void kvq_gpu_wait_stage()
{
    gpu::copy_wait<KVQ_GPU_STAGES - 2>();
    gpu::warp_sync();
}

// Waits for the stage to use, and starts on the one to fill.
template <int LEAST, int MOST>
KVQ_DEVICE void kvq_gpu_next_stage(const kvq_gpu_pipe &pipe, int bytes)
{
    const gpu::smem ahead = pipe.entry + 16 * (KVQ_GPU_STAGES - 1);
    kvq_gpu_wait_stage();
    kvq_gpu_fetch<LEAST, MOST>(pipe.fill, gpu::lds64(ahead), ahead < pipe.limit, bytes);
}

// Goes on by one stage. STRIDE: from stage to stage.
template <class R, int STRIDE, int WARP_BYTES> KVQ_DEVICE void kvq_gpu_turn(kvq_gpu_pipe &pipe)
{
    const gpu::smem stages = gpu::smem_start() + R::STAGES + gpu::warp() * WARP_BYTES;
    pipe.fill = pipe.use;
    pipe.use = pipe.use == stages + (KVQ_GPU_STAGES - 1) * STRIDE ? stages : pipe.use + STRIDE;
    pipe.entry += 16;
}

template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_affine_ahead(const kvq_gpu_attend_args &a, kvq_gpu_pipe &pipe, int from,
                                     int limit)
{
    typedef kvq_gpu_affine<D, BITS> G;
    kvq_gpu_fill_stages<kvq_gpu_room<D, NT>, G::BYTES - G::NORMS, G::BYTES, G::BYTES,
                        G::WARP_BYTES>(pipe, from, limit, (int)a.recipe.layout.group_bytes);
}

template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_affine_loop(kvq_gpu_lane<D, NT> &l, const kvq_gpu_attend_args &a,
                                    kvq_gpu_pipe &pipe, int count)
{
    typedef kvq_gpu_affine<D, BITS> G;
    typedef kvq_gpu_room<D, NT> R;
    const bool normed = a.recipe.k_token_scale != KVQ_SCALE_NONE;
    const int bytes = (int)a.recipe.layout.group_bytes;
    const int v = G::K_NORMS + (normed ? G::NORMS : 0);
    const gpu::smem end = pipe.entry + 16 * count;
    KVQ_NO_UNROLL
    while (pipe.entry < end) {
        kvq_gpu_next_stage<G::BYTES - G::NORMS, G::BYTES>(pipe, bytes);
        const gpu::u32x2 tokens = gpu::lds64(pipe.entry + 8);
        const gpu::smem norms = normed ? pipe.use + G::K_NORMS : gpu::smem_start() + R::ONES;
        const kvq_gpu_staged staged = {pipe.use, norms, pipe.use + v, tokens.v[0], tokens.v[1]};
        float s[NT][2][4];
        uint32_t p[NT][2][2];
        if (kvq_gpu_is_classic)
            kvq_gpu_classic_logits<D, BITS, NT>(l, staged.k, s);
        else
            kvq_gpu_logits<D, BITS, NT>(l, staged.k, staged.k + G::K_SCALES, s);
        kvq_gpu_softmax<D, NT, true>(l, staged, a.cap, s, p);
        if (kvq_gpu_is_classic)
            kvq_gpu_classic_values<D, BITS, NT>(l, staged.v, p);
        else
            kvq_gpu_values<D, BITS, NT>(l, staged.v, p);
        kvq_gpu_turn<R, G::BYTES, G::WARP_BYTES>(pipe);
    }
}

// Undoes the power of two of every position, multiplies by `unit`, and adds `zero` times the zeros'
// part. Channel group c's is in the lanes with g = c.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_finish(kvq_gpu_lane<D, NT> &l, float unit, float zero)
{
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++) {
        const int nt = i >> 1, n = i & 1;
        l.sums.l[nt][n] = l.total[nt][n];
        const float zeros = (l.first[nt][n] + l.second[nt][2 + n]) * zero;
        KVQ_UNROLL
        for (int t = 0; t < D / 16; t++) {
            const float own = gpu::shuffle(zeros, 4 * (t >> 1) + l.j);
            const int s = D == 64 ? t : (t >> 1) & 3;
            for (int rh = 0; rh < 2; rh++)
                l.sums.o[nt][t][2 * rh + n] =
                    fmaf(l.sums.o[nt][t][2 * rh + n],
                         kvq_gpu_is_classic ? 1 : unit * (float)(1 << (24 - 2 * s)), own);
        }
    }
}

// `count` groups from where the pipe stands.
template <int D, int BITS, int NT>
KVQ_DEVICE void kvq_gpu_attend_affine(const kvq_gpu_attend_args &a, kvq_gpu_pipe &pipe, int count,
                                      kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_lane<D, NT> l = {};
    kvq_gpu_begin<D, NT>(l, a.cap, kvq_gpu_is_classic ? 1 : (float)(1 << 21));
    kvq_gpu_keep_q<D, NT>(l);
    kvq_gpu_affine_loop<D, BITS, NT>(l, a, pipe, count);
    kvq_gpu_finish<D, NT>(l, 1, 1);
    sums = l.sums;
}

#endif
