// SPDX-License-Identifier: Apache-2.0
//
// The fast source of codebook codes: 8 bits for 4 channels, K and V each with one table that all
// sub-vectors share (VecInfer, MILLION).
//
// No table of q times centroids, which would cost as much again for every query row: codes are
// looked up, and what comes is multiplied as in attend_affine.h. Both tables stand in shared memory
// as fp16, every entry 16 times, so that the 16 lanes that are served at a time find it each in
// banks of its own: entry e at 256 e, its copies of K 8 bytes apart, then those of V. A code and
// the lane's copy make an address with one permutation of bytes.
//
// Lane = 4 g + j. K: sub-vector 4 p + j is one half of the lane's part of mma step p (its channels
// are k = 2 j, 2 j + 1, 2 j + 8, 2 j + 9 there), for tokens 4 g to 4 g + 3, which are rows as in
// attend_affine.h. V: sub-vector 8 q + g, for tokens 8 j to 8 j + 7; its channels 4 (8 q + g) + i
// are row g (even i) or g + 8 of tile 2 q + (i >> 1).
#ifndef KVQ_KERNELS_CUDA_ATTEND_BOOK_H
#define KVQ_KERNELS_CUDA_ATTEND_BOOK_H

#include "kernels/cuda/attend_affine.h"

template <int D> struct kvq_gpu_book {
    static constexpr int SUBS = D / 4;
    static constexpr int V = SUBS * KVQ_GROUP_TOKENS; // where V's codes stand
    static constexpr int BYTES = 2 * V;               // of a group
    static constexpr int WARP_BYTES = KVQ_GPU_STAGES * BYTES;
    static constexpr int COPIES = 16, V_TABLE = 8 * COPIES, ENTRY = 2 * V_TABLE;
    static constexpr int TABLES = 256 * ENTRY;
};

// Both tables of a KV head into shared memory at `to`, by all threads.
template <int D>
KVQ_DEVICE void kvq_gpu_load_tables(const kvq_gpu_attend_args &a, uint32_t head, gpu::smem to)
{
    typedef kvq_gpu_book<D> B;
    const float *k = a.book.k + head * a.book.k_head, *v = a.book.v + head * a.book.v_head;
    KVQ_NO_UNROLL
    for (int i = gpu::thread(); i < 256 * B::ENTRY / 16; i += KVQ_GPU_THREADS) {
        const int entry = i / (B::ENTRY / 16), copy = i % (B::ENTRY / 16);
        const float *from = (copy < B::V_TABLE / 16 ? k : v) + 4 * entry;
        const uint32_t lo = gpu::pack2(from[0], from[1]), hi = gpu::pack2(from[2], from[3]);
        const gpu::u32x4 two = {{lo, hi, lo, hi}};
        gpu::sts128(to + 16 * i, two);
    }
}

// The entry of the code in byte `i` of a word; own: the lane's copy.
KVQ_DEVICE gpu::u32x2 kvq_gpu_look_up(gpu::smem table, uint32_t codes, int i, uint32_t own)
{
    return gpu::lds64(table + gpu::permute(codes, own, 0x5504u | (uint32_t)i << 4));
}

// q[2 half + i]: channels 16 (p + i) + 4 j + 2 half of query row 8 nt + g, in the order in which
// products take them.
template <int D>
KVQ_DEVICE void kvq_gpu_load_book_q(gpu::smem queries, int row, int j, int p, uint32_t q[4])
{
    KVQ_UNROLL
    for (int i = 0; i < 4; i++)
        q[i] = gpu::lds32(kvq_gpu_chunk<D>(queries, row, 2 * (p + (i & 1)) + (j >> 1)) +
                          8 * (j & 1) + 4 * (i >> 1));
}

// The same from where they are kept.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_book_q(const kvq_gpu_lane<D, NT> &l, int nt, int p, uint32_t q[4])
{
    if (NT > 1 || D == 256) {
        kvq_gpu_load_book_q<D>(l.queries, 8 * nt + l.g, l.j, p, q);
    } else {
        KVQ_UNROLL
        for (int i = 0; i < 4; i++)
            q[i] = l.q[(2 * p + i) % l.KEPT];
    }
}

// s[nt][m][2 rh + n]: logit of token 4 g + 2 m + rh and row 8 nt + 2 j + n. An entry lands in two
// neighbouring registers, and stays there: as the same channels of rows g and g + 8. So its first
// half meets Q's first halves in rows 0 to 7 of one product, its second half Q's second halves in
// rows 8 to 15 of another, and what other halves meet is left.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_book_logits(const kvq_gpu_lane<D, NT> &l, gpu::smem codes, gpu::smem table,
                                    uint32_t own, float s[NT][2][4])
{
    float first[NT][4][4] = {}, second[NT][4][4] = {}; // [nt][token 4 g + x]
    KVQ_UNROLL
    for (int p = 0; p < D / 16; p += 2) {
        uint32_t word[2], q[NT][4];
        for (int i = 0; i < 2; i++)
            word[i] = gpu::lds32(codes + (4 * (p + i) + l.j) * KVQ_GROUP_TOKENS + 4 * l.g);
        KVQ_UNROLL
        for (int nt = 0; nt < NT; nt++)
            kvq_gpu_book_q<D, NT>(l, nt, p, q[nt]);
        KVQ_UNROLL
        for (int x = 0; x < 4; x++) {
            const gpu::u32x2 a = kvq_gpu_look_up(table, word[0], x, own);
            const gpu::u32x2 b = kvq_gpu_look_up(table, word[1], x, own);
            const uint32_t k[4] = {a.v[0], a.v[1], b.v[0], b.v[1]};
            KVQ_UNROLL
            for (int nt = 0; nt < NT; nt++) {
                gpu::mma(first[nt][x], k, q[nt][0], q[nt][1], first[nt][x]);
                gpu::mma(second[nt][x], k, q[nt][2], q[nt][3], second[nt][x]);
            }
        }
    }
    KVQ_UNROLL
    for (int i = 0; i < 8 * NT; i++) {
        const int nt = i >> 3, x = i >> 1 & 3, n = i & 1;
        s[nt][x >> 1][2 * (x & 1) + n] = first[nt][x][n] + second[nt][x][2 + n];
    }
}

// Adds the values of sub-vectors 8 q + g.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_book_tiles(kvq_gpu_lane<D, NT> &l, int q, const gpu::u32x2 &codes,
                                   gpu::smem table, uint32_t own, const uint32_t p[NT][2][2])
{
    // Token 8 j + x and token 8 j + 4 + x are halves of one register, as P has them.
    KVQ_UNROLL
    for (int m = 0; m < 2; m++) {
        uint32_t v[2][2][2]; // half of P, channels 0 and 1 or 2 and 3, channel
        KVQ_UNROLL
        for (int half = 0; half < 2; half++) {
            const gpu::u32x2 a = kvq_gpu_look_up(table, codes.v[0], 2 * m + half, own);
            const gpu::u32x2 b = kvq_gpu_look_up(table, codes.v[1], 2 * m + half, own);
            for (int i = 0; i < 2; i++) {
                v[half][i][0] = gpu::permute(a.v[i], b.v[i], 0x5410);
                v[half][i][1] = gpu::permute(a.v[i], b.v[i], 0x7632);
            }
        }
        KVQ_UNROLL
        for (int i = 0; i < 2; i++) {
            const uint32_t x[4] = {v[0][i][0], v[0][i][1], v[1][i][0], v[1][i][1]};
            KVQ_UNROLL
            for (int nt = 0; nt < NT; nt++)
                gpu::mma(l.sums.o[nt][2 * q + i], x, p[nt][m][0], p[nt][m][1],
                         l.sums.o[nt][2 * q + i]);
        }
    }
}

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_book_values(kvq_gpu_lane<D, NT> &l, gpu::smem codes, gpu::smem table,
                                    uint32_t own, const uint32_t p[NT][2][2])
{
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    KVQ_UNROLL
    for (int nt = 0; nt < NT; nt++) {
        gpu::mma(l.total[nt], ones, p[nt][0][0], p[nt][1][0], l.total[nt]);
        gpu::mma(l.total[nt], ones, p[nt][0][1], p[nt][1][1], l.total[nt]);
    }
    KVQ_UNROLL
    for (int q = 0; q < D / 32; q++)
        kvq_gpu_book_tiles<D, NT>(
            l, q, gpu::lds64(codes + (8 * q + l.g) * KVQ_GROUP_TOKENS + 8 * l.j), table, own, p);
}

template <int D, int NT> KVQ_DEVICE void kvq_gpu_book_ahead(kvq_gpu_pipe &pipe, int from, int limit)
{
    typedef kvq_gpu_book<D> B;
    kvq_gpu_fill_stages<kvq_gpu_room<D, NT>, B::BYTES, B::BYTES, B::BYTES, B::WARP_BYTES>(
        pipe, from, limit, B::BYTES);
}

// The tables are at `table`.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_book_loop(kvq_gpu_lane<D, NT> &l, const kvq_gpu_attend_args &a,
                                  kvq_gpu_pipe &pipe, int count, gpu::smem table)
{
    typedef kvq_gpu_book<D> B;
    typedef kvq_gpu_room<D, NT> R;
    const uint32_t own = 8 * (gpu::lane() % B::COPIES);
    const gpu::smem end = pipe.entry + 16 * count;
    KVQ_NO_UNROLL
    while (pipe.entry < end) {
        kvq_gpu_next_stage<B::BYTES, B::BYTES>(pipe, B::BYTES);
        const gpu::u32x2 tokens = gpu::lds64(pipe.entry + 8);
        const kvq_gpu_staged staged = {pipe.use, 0, pipe.use + B::V, tokens.v[0], tokens.v[1]};
        float s[NT][2][4];
        uint32_t p[NT][2][2];
        kvq_gpu_book_logits<D, NT>(l, staged.k, table, own, s);
        kvq_gpu_softmax<D, NT, false>(l, staged, a.cap, s, p);
        kvq_gpu_book_values<D, NT>(l, staged.v, table + B::V_TABLE, own, p);
        kvq_gpu_turn<R, B::BYTES, B::WARP_BYTES>(pipe);
    }
}

// `count` groups from where the pipe stands.
template <int D, int NT>
KVQ_DEVICE void kvq_gpu_attend_book(const kvq_gpu_attend_args &a, kvq_gpu_pipe &pipe, int count,
                                    gpu::smem table, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_lane<D, NT> l = {};
    kvq_gpu_begin<D, NT>(l, a.cap, 1);
    KVQ_UNROLL
    for (int p = 0; p < D / 16 && NT == 1; p += 2)
        kvq_gpu_load_book_q<D>(l.queries, l.g, l.j, p, l.q + 2 * p % l.KEPT);
    // Loads of neighbours become one, whose registers are then copied for every product; what comes
    // from another operation may be wherever it is wanted.
    KVQ_UNROLL
    for (int i = 0; i < l.KEPT && NT == 1; i++)
        l.q[i] = gpu::shuffle_bits(l.q[i], gpu::lane());
    kvq_gpu_book_loop<D, NT>(l, a, pipe, count, table);
    KVQ_UNROLL
    for (int i = 0; i < 2 * NT; i++)
        l.sums.l[i >> 1][i & 1] = l.total[i >> 1][i & 1];
    sums = l.sums;
}

#endif
