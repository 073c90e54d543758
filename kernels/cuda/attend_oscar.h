// SPDX-License-Identifier: Apache-2.0
//
// Decode attention over packed blocks on tensor cores: the piece that proves kernels/layout.h.
//
// One thread block of four warps works on one KV head and one split of its blocks; warp w owns
// group w (32 tokens) of every block and keeps a running maximum and output of its own, so warps
// never wait for each other inside the loop. The cache is the A operand of mma, up to 8 query
// heads are the 8 columns of B:
//
//   logits   S^T[token][head]   = K Q^T     two tiles of 16 tokens, k runs over channels
//   output   O^T[channel][head] = V^T P^T   tiles of 16 channels, k runs over tokens
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
#ifndef KVQ_KERNELS_CUDA_ATTEND_OSCAR_H
#define KVQ_KERNELS_CUDA_ATTEND_OSCAR_H

#include "kernels/emu/dialect.h"
#include "kernels/layout.h"

enum {
    KVQ_GPU_HEADS = 8, // columns of an mma: query heads per KV head
    KVQ_GPU_WARPS = 4, // one per group of a block
    KVQ_GPU_THREADS = KVQ_GPU_WARPS * gpu::WARP,
    KVQ_GPU_STAGES = 3, // groups in shared memory per warp
    KVQ_GPU_GROWTH = 8, // log2 by which a logit may pass the running maximum
};

// Arguments of one launch of KVQ_GPU_THREADS threads a block; grid: x = splits, y = KV heads. A
// split without packed tokens gets l = 0. Numbers stay in fp16 as long as V scales are below 255
// (values that span less than 765 within 32 channels at 2 bits) and K scales below 4094.
struct kvq_gpu_attend {
    const uint8_t *pool;   // packed blocks of one layer
    const uint32_t *table; // for each 128 tokens of the session, the block's index in the pool
    uint64_t block_bytes;  // record_bytes * KV heads
    uint32_t groups;       // packed groups of 32 tokens in the session
    uint32_t split_blocks; // blocks in a split
    uint32_t heads;        // query heads per KV head, 1 to 8
    float scale;           // softmax scale times log2(e), above 0
    const uint16_t *q;     // fp16 [KV head][head][D], already in the basis of the packed keys
    float *ml;             // [KV head][split][head][2]: maximum m in units of log2, and l
    float *o;              // [KV head][split][head][D]: sum of 2^(logit - m) v; l the sum of 2^..
};

// Where the parts of a group lie, as kernels/layout.h section 2 says, for the compiler to fold.
template <int D, int BITS> struct kvq_gpu_group {
    static constexpr int PLANE = KVQ_GROUP_TOKENS * D / 4; // low plane, bytes
    static constexpr int HIGH = BITS == 2 ? 0 : BITS == 3 ? PLANE / 2 : PLANE;
    static constexpr int K_SCALES = PLANE + HIGH;
    static constexpr int K_ZEROS = K_SCALES + 2 * D;
    static constexpr int K_NORMS = K_ZEROS + 2 * D;
    static constexpr int V_CODES = K_NORMS + 2 * KVQ_GROUP_TOKENS;
    static constexpr int V_SCALES = V_CODES + PLANE + HIGH;
    static constexpr int V_ZEROS = V_SCALES + 2 * D;
    static constexpr int BYTES = V_ZEROS + 2 * D;
    static constexpr int RECORD = KVQ_BLOCK_GROUPS * BYTES;

    static constexpr int V_GROUPS = D / KVQ_GROUP_CHANNELS;
    static constexpr int STEPS = D / 16; // mma steps of 16 channels in a logit
    static constexpr int PAIRS = D / 8;  // half2 of Q in a lane

    static constexpr int WARP_BYTES = KVQ_GPU_STAGES * BYTES;
    static constexpr int SMEM = KVQ_GPU_WARPS * WARP_BYTES; // dynamic shared memory of a block
};

// Four words of a lane, cut into byte e (of either half of a word) at bits 0 to 7 of the halves.
template <int BITS> struct kvq_gpu_words {
    uint32_t low[2][4];
    uint32_t high[2][4]; // field moved to stand two above its low field; unused at 2 bits
};

// What a lane keeps for the whole split.
template <int D> struct kvq_gpu_lane {
    int g, j;
    uint32_t q[D / 8];         // Q over the largest power of two in its row, natural
    uint32_t q_places[D / 8];  // times 2^(3 - 2s), s the position of the channel's code
    float to_log2[2];          // from accumulator units to log2 units, heads 2j and 2j + 1
    float m[2];                // running maximum of heads 2j and 2j + 1, in units of log2
    float o[D / 16][4];        // tile (16 channels), position's power of two still in it
    float first[4], second[4]; // sum of p times zero, by channel group; see kvq_gpu_sums
    float total[4];            // sum of p
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

// ---- Logits ----

// K words of a slab's rows j (w[0]) and j + 4 (w[1]; D = 64 has rows 0 to 3 only): word x is
// token 4 g + x, channels 16 row + 4 s + 2 e + h. Tile m holds token 4 g + 2 m in its row g and
// 4 g + 2 m + 1 in row g + 8, so word x = 2 m + (row >> 3).
template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_load_k(kvq_gpu_words<BITS> w[2], gpu::smem group, int g, int j, int slab)
{
    typedef kvq_gpu_group<D, BITS> G;
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

// Sum of q times zero over the channels, alike in all rows. A is the zeros as they were loaded,
// so that no register moves: even pairs meet Q in rows 0 to 7, odd pairs in rows 8 to 15, and
// the rows where a pair meets another's Q are left.
template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_zero_sums(const kvq_gpu_lane<D> &l, gpu::smem group, float c[4])
{
    typedef kvq_gpu_group<D, BITS> G;
    const float unit = 1.0f / (1 << 21); // what one code counts in the sums that follow
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
    uint32_t zero[G::PAIRS];
    kvq_gpu_load_pairs<D>(zero, group + G::K_ZEROS, l.j);
    KVQ_UNROLL
    for (int i = 0; i < G::PAIRS; i += 4) {
        gpu::mma(even, zero + i, l.q[i], l.q[i + 2], even);
        gpu::mma(odd, zero + i, l.q[i + 1], l.q[i + 3], odd);
    }
    for (int n = 0; n < 2; n++)
        c[n] = c[n + 2] = (even[n] + odd[n + 2]) * unit;
}

// s[m][2 rh + n]: logit of token 4 g + 2 m + rh and head 2 j + n, before norm, in units of 2^-21.
template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_logits(const kvq_gpu_lane<D> &l, gpu::smem group, float s[2][4])
{
    typedef kvq_gpu_group<D, BITS> G;
    float zero[4];
    kvq_gpu_zero_sums<D, BITS>(l, group, zero);
    uint32_t q[G::PAIRS];
    kvq_gpu_load_pairs<D>(q, group + G::K_SCALES, l.j);
    KVQ_UNROLL
    for (int i = 0; i < G::PAIRS; i++)
        q[i] = gpu::mul2(q[i], l.q_places[i]);
    kvq_gpu_words<BITS> w[2];
    KVQ_UNROLL
    for (int step = 0; step < G::STEPS; step++) {
        const int slab = step >> 3;
        if (step % 8 == 0)
            kvq_gpu_load_k<D>(w, group, l.g, l.j, slab);
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
            gpu::mma(s[m], a, q[b0], q[b1], step == 0 ? zero : s[m]);
        }
    }
}

// ---- Softmax ----

// Raises the running maximum if any logit of the warp passes it by more than 2^KVQ_GPU_GROWTH.
template <int D> KVQ_DEVICE void kvq_gpu_raise(kvq_gpu_lane<D> &l, const float s[2][4])
{
    float most[2];
    bool passed = false;
    for (int n = 0; n < 2; n++) {
        most[n] = fmaxf(fmaxf(s[0][n], s[0][2 + n]), fmaxf(s[1][n], s[1][2 + n]));
        for (int d = 4; d < gpu::WARP; d *= 2)
            most[n] = fmaxf(most[n], gpu::shuffle_xor(most[n], d));
        passed |= most[n] * l.to_log2[n] - l.m[n] > KVQ_GPU_GROWTH;
    }
    if (!gpu::any(passed))
        return;
    for (int n = 0; n < 2; n++) {
        const float m = fmaxf(l.m[n], most[n] * l.to_log2[n]);
        const float shrink = gpu::power2(l.m[n] - m);
        l.m[n] = m;
        for (int r = n; r < 4; r += 2) {
            for (int i = 0; i < D / 16; i++)
                l.o[i][r] *= shrink;
            l.first[r] *= shrink;
            l.second[r] *= shrink;
            l.total[r] *= shrink;
        }
    }
}

// From logits to p = 2^(logit - m) as B operands: p[m][half] has k = 2j and 2j + 1 for half 0,
// k = 2j + 8, + 9 for half 1, of head g. k < 8 is token 4 k + 2 m, k >= 8 is 4 (k - 8) + 2 m + 1;
// so a lane holds tokens 8 j + x and 8 j + 4 + x with x = 2 m + half.
template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_softmax(kvq_gpu_lane<D> &l, gpu::smem group, float s[2][4],
                                uint32_t p[2][2])
{
    const gpu::u32x2 norms =
        gpu::lds64(group + kvq_gpu_group<D, BITS>::K_NORMS + l.g * 8); // tokens 4 g to 4 g + 3
    for (int m = 0; m < 2; m++) {
        const float norm[2] = {gpu::low(norms.v[m]), gpu::high(norms.v[m])};
        for (int i = 0; i < 4; i++)
            s[m][i] *= norm[i >> 1];
    }
    kvq_gpu_raise(l, s);
    for (int m = 0; m < 2; m++) {
        for (int half = 0; half < 2; half++) {
            float x[2];
            for (int n = 0; n < 2; n++)
                x[n] = gpu::power2(s[m][2 * half + n] * l.to_log2[n] - l.m[n]);
            p[m][half] = gpu::transpose(gpu::pack2(x[0], x[1]));
        }
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
template <int BITS>
KVQ_DEVICE void kvq_gpu_tile(float o[4], const kvq_gpu_words<BITS> w[2], const uint32_t p[2][2],
                             int u, int s)
{
    KVQ_UNROLL
    for (int m = 0; m < 2; m++) {
        const uint32_t a[4] = {
            kvq_gpu_field(w[0], m, 2 * u, s), kvq_gpu_field(w[0], m, 2 * u + 1, s),
            kvq_gpu_field(w[1], m, 2 * u, s), kvq_gpu_field(w[1], m, 2 * u + 1, s)};
        gpu::mma(o, a, p[m][0], p[m][1], o);
    }
}

// Adds zero times p in row = channel group, and p in every row. Again A is the zeros as loaded:
// half 0 of P meets them in rows 0 to 7 (first), half 1 in rows 8 to 15 (second).
template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_sums(kvq_gpu_lane<D> &l, gpu::smem group, const uint32_t p[2][2])
{
    typedef kvq_gpu_group<D, BITS> G;
    const int row = l.g % G::V_GROUPS; // slots 8 j + 2 x of the group: half2 number x
    const gpu::u32x4 zero = gpu::lds128(group + G::V_ZEROS + row * 64 + l.j * 16);
    gpu::mma(l.first, zero.v, p[0][0], p[1][0], l.first);
    gpu::mma(l.second, zero.v, p[0][1], p[1][1], l.second);
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    gpu::mma(l.total, ones, p[0][0], p[1][0], l.total); // any pairs: all k count alike
    gpu::mma(l.total, ones, p[0][1], p[1][1], l.total);
}

template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_values(kvq_gpu_lane<D> &l, gpu::smem group, const uint32_t p[2][2])
{
    typedef kvq_gpu_group<D, BITS> G;
    const gpu::smem codes = group + G::V_CODES;
    kvq_gpu_sums<D, BITS>(l, group, p);
    kvq_gpu_words<BITS> w[2];
    KVQ_UNROLL
    for (int c = 0; c < G::V_GROUPS; c++) {
        if (D == 64 && c == 0)
            kvq_gpu_load_v64(w, codes, codes + G::PLANE, l.g, l.j);
        if (D >= 128 && c % 4 == 0)
            kvq_gpu_load_v(w, codes + c * 256, codes + G::PLANE + c * (BITS == 3 ? 128 : 256), l.g,
                           l.j);
        const gpu::u32x4 scale = gpu::lds128(group + G::V_SCALES + c * 64 + l.j * 16);
        uint32_t scaled[2][2];
        for (int x = 0; x < 4; x++)
            scaled[x >> 1][x & 1] = gpu::mul2(p[x >> 1][x & 1], scale.v[x]);
        for (int u = 0; u < 2; u++) {
            const int s = D == 64 ? 2 * c + u : c & 3;
            kvq_gpu_tile(l.o[2 * c + u], w, scaled, D == 64 ? 0 : u, s);
        }
    }
}

// ---- One split ----

// Q of head g as fragments. Each row is divided by the power of two below its largest value, so
// that neither Q times a scale nor its smallest place leaves fp16; to_log2 gives it back.
template <int D>
KVQ_DEVICE void kvq_gpu_load_q(kvq_gpu_lane<D> &l, const kvq_gpu_attend &a, int kv_head)
{
    const uint32_t *q = (const uint32_t *)a.q + ((size_t)kv_head * a.heads + l.g) * (D / 2);
    float most = 0;
    KVQ_UNROLL
    for (int i = 0; i < D / 8; i++) {
        l.q[i] = (uint32_t)l.g < a.heads ? q[(i >> 3) * 32 + l.j * 8 + (i & 7)] : 0;
        most = fmaxf(most, fmaxf(fabsf(gpu::low(l.q[i])), fabsf(gpu::high(l.q[i]))));
    }
    most = fmaxf(most, gpu::shuffle_xor(most, 1));
    most = fmaxf(most, gpu::shuffle_xor(most, 2));
    const uint32_t exponent = most > 0 ? gpu::as_bits(most) & 0x7f800000u : 0x3f800000u;
    const float down = gpu::as_float(0x7f000000u - exponent);
    KVQ_UNROLL
    for (int i = 0; i < D / 8; i++) {
        const float place = 8.0f / (float)(1 << 2 * ((i & 7) >> 1)); // pair 2 s + e of its row
        const float lo = gpu::low(l.q[i]) * down, hi = gpu::high(l.q[i]) * down;
        l.q[i] = gpu::pack2(lo, hi);
        l.q_places[i] = gpu::pack2(lo * place, hi * place);
    }
    const float up = gpu::as_float(exponent) * a.scale * (float)(1 << 21);
    for (int n = 0; n < 2; n++)
        l.to_log2[n] = gpu::shuffle(up, 4 * (2 * l.j + n));
}

// Starts copying a group, if wanted, as one batch.
template <int BYTES> KVQ_DEVICE void kvq_gpu_fetch(gpu::smem to, const uint8_t *from, bool wanted)
{
    const int own = gpu::lane() * 16;
    KVQ_UNROLL
    for (int at = 0; at < BYTES; at += 16 * gpu::WARP)
        gpu::copy16(to + own + at, from + own + at, wanted && own < BYTES - at);
    gpu::copy_commit();
}

// All groups of this warp: group `warp` of each block of the split. Block numbers are read one
// pass before they are needed.
template <int D, int BITS>
KVQ_DEVICE void kvq_gpu_loop(kvq_gpu_lane<D> &l, const kvq_gpu_attend &a, uint32_t count)
{
    typedef kvq_gpu_group<D, BITS> G;
    const gpu::smem stages = gpu::smem_start() + gpu::warp() * G::WARP_BYTES;
    const uint8_t *record =
        a.pool + (size_t)gpu::block_y() * G::RECORD + (size_t)gpu::warp() * G::BYTES;
    const uint32_t *table = a.table + (size_t)gpu::block_x() * a.split_blocks;
    uint32_t ahead = 0, block = count > 0 ? table[0] : 0;
    gpu::smem fill = stages, use = stages;
    const gpu::smem last = stages + (KVQ_GPU_STAGES - 1) * G::BYTES;
    for (; ahead < KVQ_GPU_STAGES - 1; ahead++, fill += G::BYTES) {
        kvq_gpu_fetch<G::BYTES>(fill, record + block * a.block_bytes, ahead < count);
        block = ahead + 1 < count ? table[ahead + 1] : 0;
    }
    KVQ_NO_UNROLL
    for (uint32_t i = 0; i < count; i++, ahead++) {
        gpu::copy_wait<KVQ_GPU_STAGES - 2>();
        gpu::warp_sync(); // the copies of all lanes are there, and all have left the stage to fill
        kvq_gpu_fetch<G::BYTES>(fill, record + block * a.block_bytes, ahead < count);
        block = ahead + 1 < count ? table[ahead + 1] : 0;
        float s[2][4];
        uint32_t p[2][2];
        kvq_gpu_logits<D, BITS>(l, use, s);
        kvq_gpu_softmax<D, BITS>(l, use, s, p);
        kvq_gpu_values<D, BITS>(l, use, p);
        fill = fill == last ? stages : fill + G::BYTES;
        use = use == last ? stages : use + G::BYTES;
    }
}

// Scratch of the merge, in floats, over the stages: maxima, sums and outputs of each warp.
template <int D> struct kvq_gpu_merge {
    static constexpr int ROWS = D / 32 + 1; // of sums: zeros by channel group, then p
    static constexpr int STRIDE = D + 4;    // so that a warp's stores meet no bank conflict
    static constexpr int MAXIMA = 0;
    static constexpr int SUMS = MAXIMA + KVQ_GPU_WARPS * KVQ_GPU_HEADS;
    static constexpr int OUT = SUMS + KVQ_GPU_WARPS * KVQ_GPU_HEADS * ROWS;
    static constexpr int FLOATS = OUT + KVQ_GPU_WARPS * KVQ_GPU_HEADS * STRIDE;
};

KVQ_DEVICE void kvq_gpu_put(int index, float x)
{
    gpu::sts32(gpu::smem_start() + 4 * index, gpu::as_bits(x));
}

KVQ_DEVICE float kvq_gpu_get(int index)
{
    return gpu::as_float(gpu::lds32(gpu::smem_start() + 4 * index));
}

// A warp's share, with the power of two of every position undone.
template <int D> KVQ_DEVICE void kvq_gpu_publish(const kvq_gpu_lane<D> &l)
{
    typedef kvq_gpu_merge<D> M;
    for (int n = 0; n < 2; n++) {
        const int head = gpu::warp() * KVQ_GPU_HEADS + 2 * l.j + n;
        if (l.g < D / 32)
            kvq_gpu_put(M::SUMS + head * M::ROWS + l.g, l.first[n] + l.second[2 + n]);
        if (l.g == 0) {
            kvq_gpu_put(M::SUMS + head * M::ROWS + D / 32, l.total[n]);
            kvq_gpu_put(M::MAXIMA + head, l.m[n]);
        }
        KVQ_UNROLL
        for (int i = 0; i < D / 8; i++) {
            const int s = D == 64 ? i >> 1 : (i >> 2) & 3, rows = 8 * (i & 1);
            const float x = l.o[i >> 1][n + 2 * (i & 1)] * (float)(1 << (24 - 2 * s));
            kvq_gpu_put(M::OUT + head * M::STRIDE + 16 * (i >> 1) + rows + l.g, x);
        }
    }
}

// Adds up the four warps' shares of one head and writes its maximum, sum and output. Threads
// beyond the channels repeat the last one's work, so that warps stay whole.
template <int D> KVQ_DEVICE void kvq_gpu_write(const kvq_gpu_attend &a, int head, size_t row)
{
    typedef kvq_gpu_merge<D> M;
    float weight[KVQ_GPU_WARPS], most = -1e30f, l = 0;
    for (int w = 0; w < KVQ_GPU_WARPS; w++) {
        weight[w] = kvq_gpu_get(M::MAXIMA + w * KVQ_GPU_HEADS + head);
        most = fmaxf(most, weight[w]);
    }
    for (int w = 0; w < KVQ_GPU_WARPS; w++) {
        weight[w] = gpu::power2(weight[w] - most);
        l += weight[w] * kvq_gpu_get(M::SUMS + (w * KVQ_GPU_HEADS + head) * M::ROWS + D / 32);
    }
    for (int first = 0; first < D; first += KVQ_GPU_THREADS) {
        const int c = first + gpu::thread() < D ? first + gpu::thread() : D - 1;
        float o = 0;
        for (int w = 0; w < KVQ_GPU_WARPS; w++) {
            const int at = w * KVQ_GPU_HEADS + head;
            o += weight[w] * (kvq_gpu_get(M::OUT + at * M::STRIDE + c) +
                              kvq_gpu_get(M::SUMS + at * M::ROWS + c / 32));
        }
        a.o[row * D + c] = o;
    }
    if (gpu::thread() == 0) {
        a.ml[row * 2] = most;
        a.ml[row * 2 + 1] = l;
    }
}

template <int D, int BITS> KVQ_DEVICE void kvq_gpu_attend_split(const kvq_gpu_attend &a)
{
    typedef kvq_gpu_group<D, BITS> G;
    static_assert(4 * kvq_gpu_merge<D>::FLOATS <= G::SMEM, "the merge's scratch fits the stages");
    kvq_gpu_lane<D> l = {};
    l.g = gpu::lane() >> 2;
    l.j = gpu::lane() & 3;
    l.m[0] = l.m[1] = -1e30f;
    kvq_gpu_load_q(l, a, gpu::block_y());
    const uint32_t first = gpu::block_x() * a.split_blocks;
    const uint32_t own = (a.groups + KVQ_GPU_WARPS - 1 - gpu::warp()) / KVQ_GPU_WARPS;
    const uint32_t left = own > first ? own - first : 0;
    kvq_gpu_loop<D, BITS>(l, a, left < a.split_blocks ? left : a.split_blocks);
    gpu::block_sync();
    kvq_gpu_publish(l);
    gpu::block_sync();
    const size_t row = ((size_t)gpu::block_y() * gpu::grid_x() + gpu::block_x()) * a.heads;
    for (uint32_t head = 0; head < a.heads; head++)
        kvq_gpu_write<D>(a, head, row + head);
}

// The kernels, one for each head_dim and number of bits: kvq_gpu_attend_d128_b2 and so on.
#define KVQ_GPU_ATTEND_OSCAR(D, BITS) KVQ_KERNEL(kvq_gpu_attend_d##D##_b##BITS, kvq_gpu_attend, a)
#define KVQ_GPU_ATTEND_OSCAR_ALL(DO)                                                               \
    DO(64, 2) DO(64, 3) DO(64, 4) DO(128, 2) DO(128, 3) DO(128, 4) DO(256, 2) DO(256, 3) DO(256, 4)

#define KVQ_GPU_DECLARE(D, BITS) KVQ_GPU_ATTEND_OSCAR(D, BITS);
KVQ_GPU_ATTEND_OSCAR_ALL(KVQ_GPU_DECLARE)
#undef KVQ_GPU_DECLARE

#endif
