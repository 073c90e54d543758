// SPDX-License-Identifier: Apache-2.0
//
// Rows of fp32 in shared memory and what packing and reading do with them: loading, transforms,
// norms. Device code, for blocks of KVQ_GPU_CACHE_THREADS threads.
//
// A row is `stride` words apart from the next, an odd number: threads that work on neighbouring
// channels of a token meet no bank conflict, nor do those that work on one channel of neighbouring
// tokens, nor teams. A team is half a warp, lane i of which works on channels 16 j + i: that is the
// order in which the format adds numbers up (docs/formats.md).
//
// Every function is for all threads of a block. Functions that say "between syncs" leave it to the
// caller that everybody has written before anybody reads.
#ifndef KVQ_KERNELS_CUDA_ROWS_H
#define KVQ_KERNELS_CUDA_ROWS_H

#include "kernels/codec_math.h"
#include "kernels/cuda/cache.h"
#include "kernels/emu/dialect.h"

enum { KVQ_GPU_TEAM = 16 };

struct kvq_gpu_rows {
    gpu::smem at;
    uint32_t stride; // words
};

KVQ_DEVICE gpu::smem kvq_gpu_at(kvq_gpu_rows rows, uint32_t t, uint32_t c)
{
    return rows.at + 4 * (t * rows.stride + c);
}

KVQ_DEVICE float kvq_gpu_get(gpu::smem at)
{
    return gpu::as_float(gpu::lds32(at));
}

KVQ_DEVICE void kvq_gpu_put(gpu::smem at, float x)
{
    gpu::sts32(at, gpu::as_bits(x));
}

// ---- Teams ----

KVQ_DEVICE uint32_t kvq_gpu_team_lane()
{
    return (uint32_t)gpu::lane() % KVQ_GPU_TEAM;
}

// Token of this team in step i of four over 32 tokens. The teams of a warp are 16 tokens apart.
KVQ_DEVICE uint32_t kvq_gpu_team_token(uint32_t i)
{
    return 4 * (uint32_t)gpu::warp() + i + 16 * ((uint32_t)gpu::lane() / KVQ_GPU_TEAM);
}

// Lane i += lane i + 8, then + 4, + 2, + 1; every lane gets lane 0's.
KVQ_DEVICE float kvq_gpu_team_sum(float x)
{
    KVQ_UNROLL
    for (int half = KVQ_GPU_TEAM / 2; half > 0; half /= 2)
        x += gpu::shuffle_xor(x, half);
    return x;
}

KVQ_DEVICE float kvq_gpu_team_most(float x)
{
    KVQ_UNROLL
    for (int half = KVQ_GPU_TEAM / 2; half > 0; half /= 2) {
        const float other = gpu::shuffle_xor(x, half);
        x = other > x ? other : x;
    }
    return x;
}

// ---- Raw rows ----

// The rows of a head in a raw block, from a token to the end of its strip.
KVQ_DEVICE const uint16_t *kvq_gpu_raw_rows(const kvq_recipe &r, const uint8_t *block,
                                            uint32_t head, uint32_t token, bool v)
{
    return (const uint16_t *)(block + kvq_raw_at(&r.raw, head, token, v));
}

// `n` rows of raw numbers, as packing sees them. Between syncs.
template <int D>
KVQ_DEVICE void kvq_gpu_load_rows(kvq_gpu_rows rows, const uint16_t *raw, uint8_t dtype, uint32_t n)
{
    for (uint32_t i = gpu::thread(); i < n * D; i += KVQ_GPU_CACHE_THREADS)
        kvq_gpu_put(kvq_gpu_at(rows, i / D, i % D), kvq__packable(gpu::ldg16(raw + i), dtype));
}

// ---- Transforms ----

KVQ_DEVICE float kvq_gpu_flipped(float x, const uint32_t *signs, uint32_t c)
{
    return gpu::as_float(gpu::as_bits(x) ^ signs[c / 32] >> c % 32 << 31);
}

// Pairs of values h, 2 h, .. apart, ascending.
template <int N> KVQ_DEVICE void kvq_gpu_butterflies(float x[N])
{
    KVQ_UNROLL
    for (int h = 1; h < N; h *= 2) {
        KVQ_UNROLL
        for (int i = 0; i < N; i++) {
            if (i & h)
                continue;
            const float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
}

// Rotates 32 rows, or, back, undoes it. Between syncs.
template <int D>
KVQ_DEVICE void kvq_gpu_rotate(const kvq_recipe &r, uint8_t rotation, kvq_gpu_rows rows, bool back)
{
    const bool sign = rotation == KVQ_ROTATE_SIGNED;
    if (rotation == KVQ_ROTATE_NONE)
        return;
    // The pairs within 16 channels, by a thread for each 16; then those further apart, by teams.
    for (uint32_t q = gpu::warp(); q < D / 16; q += KVQ_GPU_CACHE_THREADS / gpu::WARP) {
        const gpu::smem at = kvq_gpu_at(rows, gpu::lane(), 16 * q);
        float x[16];
        KVQ_UNROLL
        for (int i = 0; i < 16; i++) {
            x[i] = kvq_gpu_get(at + 4 * i);
            if (sign)
                x[i] = kvq_gpu_flipped(x[i], r.signs[back], 16 * q + i);
        }
        kvq_gpu_butterflies<16>(x);
        KVQ_UNROLL
        for (int i = 0; i < 16; i++)
            kvq_gpu_put(at + 4 * i, x[i]);
    }
    gpu::block_sync();
    for (uint32_t step = 0; step < 4; step++) {
        const gpu::smem at = kvq_gpu_at(rows, kvq_gpu_team_token(step), kvq_gpu_team_lane());
        float x[D / 16];
        KVQ_UNROLL
        for (int j = 0; j < D / 16; j++)
            x[j] = kvq_gpu_get(at + 64 * j);
        kvq_gpu_butterflies<D / 16>(x);
        KVQ_UNROLL
        for (int j = 0; j < D / 16; j++) {
            x[j] *= kvq__hadamard_norm(D);
            if (sign)
                x[j] = kvq_gpu_flipped(x[j], r.signs[!back], 16 * j + kvq_gpu_team_lane());
            kvq_gpu_put(at + 64 * j, x[j]);
        }
    }
    gpu::block_sync();
}

// ---- Channel factors ----

// What K's channel c was divided by; 1 where nothing was.
KVQ_DEVICE float kvq_gpu_factor(const kvq_recipe &r, const uint8_t *extras, const kvq_book *book,
                                uint32_t head, uint32_t c)
{
    if (r.k_channel == KVQ_CHANNEL_PROMPT && extras) {
        const uint8_t *record = extras + (size_t)head * r.extras.record_bytes;
        return kvq__f16_to_f32(gpu::ldg16(record + r.extras.factors + 2 * c));
    }
    if (r.k_channel == KVQ_CHANNEL_BOOK && book && book->smooth)
        return book->smooth[head * r.dim + c];
    return 1.0f;
}

// Divides 32 rows of K by their channels' factors, or, back, multiplies. What a factor below 1
// takes beyond the limits of packing is limited again. Between syncs.
template <int D>
KVQ_DEVICE void kvq_gpu_scale_channels(const kvq_recipe &r, const uint8_t *extras,
                                       const kvq_book *book, uint32_t head, kvq_gpu_rows rows,
                                       bool back)
{
    if (r.k_channel == KVQ_CHANNEL_NONE)
        return;
    for (uint32_t c = gpu::thread(); c < D; c += KVQ_GPU_CACHE_THREADS) {
        const float own = kvq_gpu_factor(r, extras, book, head, c);
        const float factor = back ? own : 1.0f / own;
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
            const gpu::smem at = kvq_gpu_at(rows, t, c);
            const float x = kvq_gpu_get(at) * factor;
            kvq_gpu_put(at, back ? x : kvq__limited(x));
        }
    }
    gpu::block_sync();
}

#endif
