// SPDX-License-Identifier: Apache-2.0
//
// Queries on their way into shared memory: for raw keys as they come, for packed keys transformed
// as the format transforms K. Each row is divided by the power of two below its largest value, so
// that neither fp16 nor what is multiplied with it is left; a factor of the logits gives it back.
//
// A warp works on one row at a time: lane l holds channels 64 i + 2 l and the next as x[2 i] and
// x[2 i + 1]. In shared memory rows of 16-bit values stand one after the other, their 16-byte
// chunks permuted: chunk c of row r stands at c ^ (r & 7).
#ifndef KVQ_KERNELS_CUDA_ATTEND_QUERY_H
#define KVQ_KERNELS_CUDA_ATTEND_QUERY_H

#include "kernels/codec_math.h"
#include "kernels/cuda/attend_item.h"

// Where 16-byte chunk `chunk` of row `row` stands.
template <int D> KVQ_DEVICE gpu::smem kvq_gpu_chunk(gpu::smem rows, int row, int chunk)
{
    return rows + row * (2 * D) + ((chunk ^ (row & 7)) << 4);
}

// Changes the sign of channels whose bit is set.
template <int D> KVQ_DEVICE void kvq_gpu_flip(const uint32_t signs[8], float x[D / 32])
{
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++) {
        const int c = 64 * (i >> 1) + 2 * gpu::lane() + (i & 1);
        x[i] = gpu::as_float(gpu::as_bits(x[i]) ^ (signs[c / 32] >> c % 32 << 31));
    }
}

// x * H / sqrt(D). Steps between channels of a lane, between lanes, and between a lane's pairs.
template <int D> KVQ_DEVICE void kvq_gpu_hadamard(float x[D / 32])
{
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i += 2) {
        const float a = x[i], b = x[i + 1];
        x[i] = a + b;
        x[i + 1] = a - b;
    }
    KVQ_UNROLL
    for (int d = 1; d < gpu::WARP; d *= 2) {
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++) {
            const float other = gpu::shuffle_xor(x[i], d);
            x[i] = gpu::lane() & d ? other - x[i] : x[i] + other;
        }
    }
    KVQ_UNROLL
    for (int h = 2; h < D / 32; h *= 2) {
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++) {
            if (i & h)
                continue;
            const float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
    const float norm = kvq__hadamard_norm(D);
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++)
        x[i] *= norm;
}

template <int D>
KVQ_DEVICE void kvq_gpu_rotate(const kvq_recipe &r, uint32_t rotation, float x[D / 32], bool back)
{
    if (rotation == KVQ_ROTATE_NONE)
        return;
    if (rotation == KVQ_ROTATE_SIGNED)
        kvq_gpu_flip<D>(back ? r.signs[1] : r.signs[0], x);
    kvq_gpu_hadamard<D>(x);
    if (rotation == KVQ_ROTATE_SIGNED)
        kvq_gpu_flip<D>(back ? r.signs[0] : r.signs[1], x);
}

// What K was divided by.
template <int D>
KVQ_DEVICE void kvq_gpu_multiply(const kvq_gpu_attend_args &a, const kvq_gpu_session &s,
                                 uint32_t head, float x[D / 32])
{
    const bool prompt = a.recipe.k_channel == KVQ_CHANNEL_PROMPT && s.extras;
    const bool book = a.recipe.k_channel == KVQ_CHANNEL_BOOK && a.book.smooth;
    if (!prompt && !book)
        return;
    const void *factors;
    if (prompt)
        factors = s.extras + (size_t)head * a.recipe.extras.record_bytes + a.recipe.extras.factors;
    else
        factors = a.book.smooth + (size_t)head * D;
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++)
        x[i] *= kvq__element(factors, prompt ? KVQ_F16 : KVQ_F32,
                             64 * (i >> 1) + 2 * gpu::lane() + (i & 1));
}

// Divides a row by the power of two below its largest value, which is returned.
template <int D> KVQ_DEVICE float kvq_gpu_normalize(float x[D / 32])
{
    float most = 0;
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++)
        most = fmaxf(most, fabsf(x[i]));
    for (int d = 1; d < gpu::WARP; d *= 2)
        most = fmaxf(most, gpu::shuffle_xor(most, d));
    uint32_t exponent = gpu::as_bits(most) & 0x7f800000u;
    exponent = exponent > 0x08000000u && exponent < 0x7f000000u ? exponent : 0x3f800000u;
    const float down = gpu::as_float(0x7f000000u - exponent);
    KVQ_UNROLL
    for (int i = 0; i < D / 32; i++)
        x[i] *= down;
    return gpu::as_float(exponent);
}

// Row r of a matrix of 16-bit values: fp16, or bf16, whose rest goes to a matrix of its own.
template <int D>
KVQ_DEVICE void kvq_gpu_put_row(gpu::smem rows, int r, const float x[D / 32], bool bf16,
                                gpu::smem rest)
{
    KVQ_UNROLL
    for (int i = 0; i < D / 64; i++) {
        const int chunk = 8 * i + (gpu::lane() >> 2), at = 4 * (gpu::lane() & 3);
        const float lo = x[2 * i], hi = x[2 * i + 1];
        const uint32_t two = bf16 ? gpu::pack2_bf16(lo, hi) : gpu::pack2(lo, hi);
        gpu::sts32(kvq_gpu_chunk<D>(rows, r, chunk) + at, two);
        if (bf16)
            gpu::sts32(kvq_gpu_chunk<D>(rest, r, chunk) + at,
                       gpu::pack2_bf16(lo - gpu::as_float(two << 16),
                                       hi - gpu::as_float(two & 0xffff0000u)));
    }
}

// Row r of the item's queries; NULL if there is no such row.
template <class R>
KVQ_DEVICE const uint8_t *kvq_gpu_find_query(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                             int r, uint32_t *dtype)
{
    const gpu::u32x2 owner = gpu::lds64(gpu::smem_start() + R::OWNERS + 8 * r);
    *dtype = KVQ_F32;
    if (owner.v[0] == ~0u)
        return NULL;
    const kvq_gpu_tile &tile = a.tiles[owner.v[0]];
    const kvq_gpu_session &s = a.sessions[tile.session];
    const uint32_t row = tile.first_row + owner.v[1];
    *dtype = s.q.dtype;
    return (const uint8_t *)s.q.data + (row / a.gqa) * s.q.token_stride +
           (int64_t)(h.item.head * a.gqa + row % a.gqa) * s.q.head_stride;
}

// Channels of N rows of queries as they came; zeros of those that are not there. Rows of 16 bits
// whose words are whole are all loaded before they become numbers.
template <int D, int N>
KVQ_DEVICE void kvq_gpu_load_rows(const kvq_gpu_attend_args &a, const uint8_t *const from[N],
                                  const uint32_t dtype[N], float x[N][D / 32])
{
    uint32_t words[N][D / 64] = {};
    bool plain = true;
    KVQ_UNROLL
    for (int n = 0; n < N; n++)
        plain &= from[n] == NULL || (dtype[n] != KVQ_F32 && (uintptr_t)from[n] % 4 == 0);
    KVQ_UNROLL
    for (int n = 0; n < N; n++)
        for (int i = 0; i < D / 64; i++)
            if (plain && from[n])
                words[n][i] = gpu::ldg32(from[n] + 2 * (64 * i + 2 * gpu::lane()));
    KVQ_UNROLL
    for (int n = 0; n < N; n++)
        for (int i = 0; i < D / 32; i++) {
            const uint32_t bits = i & 1 ? words[n][i >> 1] >> 16 : words[n][i >> 1] & 0xffff;
            if (plain)
                x[n][i] = dtype[n] == KVQ_BF16 ? gpu::as_float(bits << 16)
                                               : kvq__f16_to_f32((uint16_t)bits);
            else
                x[n][i] = from[n] ? kvq__element(from[n], (uint8_t)dtype[n],
                                                 64 * (i >> 1) + 2 * gpu::lane() + (i & 1))
                                  : 0;
            x[n][i] *= a.sign;
        }
}

// As K was transformed before it was packed.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_transform_query(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int r,
                                        float x[D / 32])
{
    const gpu::u32x2 owner = gpu::lds64(gpu::smem_start() + R::OWNERS + 8 * r);
    if (owner.v[0] == ~0u)
        return;
    kvq_gpu_multiply<D>(a, a.sessions[a.tiles[owner.v[0]].session], h.item.head, x);
    kvq_gpu_rotate<D>(a.recipe, a.recipe.k.rotation, x, false);
}

// Puts row r into shared memory, for packed keys or for raw ones, with its factor.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_put_query(const kvq_gpu_attend_args &a, int r, bool packed, float x[D / 32])
{
    const gpu::smem smem = gpu::smem_start();
    const gpu::smem rows = smem + (packed ? R::PACKED_QUERIES : R::QUERIES);
    const float factor = kvq_gpu_normalize<D>(x) * a.scale;
    kvq_gpu_put_row<D>(rows, r, x, !packed && a.recipe.dtype == KVQ_BF16, smem + R::REST);
    if (gpu::lane() == 0)
        kvq_gpu_put_float(smem + R::FACTORS + 8 * r + (packed ? 4 : 0), factor);
}

// Queries for raw keys, for packed ones, or, where they have places of their own, for both. Rows by
// warp, of which AHEAD are loaded together.
template <int D, class R, int AHEAD = 1>
KVQ_DEVICE void kvq_gpu_bring_queries(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, bool raw,
                                      bool packed)
{
    static_assert(R::ROWS % (KVQ_GPU_WARPS * AHEAD) == 0, "whole turns");
    KVQ_NO_UNROLL
    for (int first = gpu::warp(); first < R::ROWS; first += KVQ_GPU_WARPS * AHEAD) {
        float x[AHEAD][D / 32], y[D / 32];
        const uint8_t *from[AHEAD];
        uint32_t dtype[AHEAD];
        KVQ_UNROLL
        for (int n = 0; n < AHEAD; n++)
            from[n] = kvq_gpu_find_query<R>(a, h, first + KVQ_GPU_WARPS * n, &dtype[n]);
        kvq_gpu_load_rows<D, AHEAD>(a, from, dtype, x);
        KVQ_UNROLL
        for (int n = 0; n < AHEAD; n++) {
            const int r = first + KVQ_GPU_WARPS * n;
            KVQ_UNROLL
            for (int i = 0; i < D / 32; i++)
                y[i] = x[n][i];
            if (raw)
                kvq_gpu_put_query<D, R>(a, r, false, x[n]);
            if (packed) {
                kvq_gpu_transform_query<D, R>(a, h, r, y);
                kvq_gpu_put_query<D, R>(a, r, true, y);
            }
        }
    }
}

#endif
