// SPDX-License-Identifier: Apache-2.0
//
// Storing what engines hand over, and merging attentions: a warp for each row.
#include "kernels/codec_math.h"
#include "kernels/cuda/cache.h"
#include "kernels/emu/dialect.h"

// ---- Storing ----

struct kvq_gpu_counted {
    uint32_t nonfinite, saturated;
};

KVQ_DEVICE uint32_t kvq_gpu_store_one(float x, uint8_t dtype, kvq_gpu_counted &counted)
{
    counted.nonfinite += !kvq__is_finite(x);
    counted.saturated += kvq__saturates(x, dtype);
    return kvq__stored(x, dtype);
}

// Row n of a job: tokens, of each all heads, of each K and V.
KVQ_DEVICE void kvq_gpu_store_row(const kvq_gpu_store_job &job, uint64_t n,
                                  kvq_gpu_counted &counted)
{
    const kvq_recipe &r = *job.recipe;
    const bool v = n & 1;
    const uint32_t head = (uint32_t)(n / 2 % r.kv_heads);
    const uint64_t token = n / 2 / r.kv_heads, position = job.start + token;
    const kvq_view &view = v ? job.v : job.k;
    const uint8_t *from = (const uint8_t *)view.data + (int64_t)token * view.token_stride +
                          (int64_t)head * view.head_stride;
    uint8_t *to = (uint8_t *)job.pages[position / KVQ_BLOCK_TOKENS].raw +
                  kvq_raw_at(&r.raw, head, position % KVQ_BLOCK_TOKENS, v);
    for (uint32_t c = 2 * gpu::lane(); c < r.dim; c += 2 * gpu::WARP) {
        const float low = kvq__element(from, view.dtype, c);
        const float high = kvq__element(from, view.dtype, c + 1);
        gpu::stg32(to + 2 * c, kvq_gpu_store_one(low, r.dtype, counted) |
                                   kvq_gpu_store_one(high, r.dtype, counted) << 16);
    }
}

// So many values that are not finite a thread counts at most. 65,536 tokens of 32 layers, 8 KV
// heads and head_dim 128 have 2^32 values: a count of them all would wrap around to none.
constexpr uint32_t KVQ_GPU_MOST_COUNTED = 4096;

// From half of the range on nothing is added. Threads that have looked before add no more than
// KVQ_GPU_MOST_COUNTED values that are not finite each, and fewer than 2^19 threads run on a GPU at
// a time: that is less than the other half. (Saturated values are counted for people alone.)
KVQ_DEVICE void kvq_gpu_count(uint32_t *at, uint32_t n)
{
    if (n && gpu::fetch_max(at, 0) < 0x80000000u)
        gpu::fetch_add(at, n);
}

KVQ_KERNEL(kvq_gpu_store_all, kvq_gpu_store_args, a)
{
    const kvq_gpu_store_job &job = a.jobs[gpu::block_x()];
    kvq_gpu_counted counted = {0, 0};
    if (!job.recipe)
        return;
    const uint32_t warps = KVQ_GPU_CACHE_THREADS / gpu::WARP;
    const uint64_t rows = (uint64_t)job.tokens * job.recipe->kv_heads * 2;
    for (uint64_t n = gpu::block_y() * warps + gpu::warp(); n < rows; n += a.blocks * warps)
        kvq_gpu_store_row(job, n, counted);
    if (job.counts) {
        const bool first = gpu::block_y() == 0 && gpu::thread() == 0;
        counted.nonfinite += first && gpu::ldg32(&job.counts->cancelled) != 0;
        const bool many = counted.nonfinite > KVQ_GPU_MOST_COUNTED;
        kvq_gpu_count(&job.counts->nonfinite, many ? KVQ_GPU_MOST_COUNTED : counted.nonfinite);
        kvq_gpu_count(&job.counts->saturated, counted.saturated);
    }
}

// ---- Moving ----

KVQ_DEVICE void kvq_gpu_copy_row(uint8_t *to, const uint8_t *from, uint32_t bytes, uint32_t thread,
                                 uint32_t threads)
{
    for (uint32_t i = 4 * thread; i < bytes; i += 4 * threads)
        gpu::stg32(to + i, gpu::ldg32(from + i));
}

KVQ_KERNEL(kvq_gpu_copy_all, kvq_gpu_copy_args, a)
{
    const kvq_gpu_copy &job = a.jobs[gpu::block_x()];
    if (!KVQ_GPU_GOES(job))
        return;
    for (uint32_t row = gpu::block_y(); row < job.rows; row += a.blocks)
        kvq_gpu_copy_row(job.to + row * job.stride, job.from + row * job.stride, job.bytes,
                         gpu::thread(), KVQ_GPU_CACHE_THREADS);
}

// One KV head: K by the first half of the block, V by the second. Tokens only move down, one after
// the other, so none is overwritten unread.
KVQ_KERNEL(kvq_gpu_keep_all, kvq_gpu_keep_args, a)
{
    const kvq_gpu_keep &job = a.jobs[gpu::block_x()];
    const uint32_t half = KVQ_GPU_CACHE_THREADS / 2, head = gpu::block_y();
    const kvq_recipe &r = *job.recipe;
    if (head >= r.kv_heads)
        return;
    const bool v = (uint32_t)gpu::thread() >= half;
    for (uint32_t i = 0; i < job.n; i++) {
        const uint32_t from = job.offset + (uint32_t)job.list[i], to = job.offset + i;
        const uint8_t *source = job.pages[from / KVQ_BLOCK_TOKENS].raw +
                                kvq_raw_at(&r.raw, head, from % KVQ_BLOCK_TOKENS, v);
        uint8_t *target = (uint8_t *)job.pages[to / KVQ_BLOCK_TOKENS].raw +
                          kvq_raw_at(&r.raw, head, to % KVQ_BLOCK_TOKENS, v);
        if (from != to)
            kvq_gpu_copy_row(target, source, 2 * r.dim, gpu::thread() % half, half);
        gpu::block_sync();
    }
}

KVQ_DEVICE void kvq_gpu_put_one(uint8_t *to, uint8_t dtype, uint32_t c, float x)
{
    if (dtype == KVQ_F32)
        ((float *)to)[c] = x;
    else
        ((uint16_t *)to)[c] = kvq__stored(x, dtype);
}

KVQ_KERNEL(kvq_gpu_put_all, kvq_gpu_put_args, a)
{
    const kvq_gpu_put &job = a.jobs[gpu::block_x()];
    for (uint64_t row = gpu::block_y(); row < (uint64_t)job.heads * job.n; row += a.blocks) {
        uint8_t *to = job.to + (int64_t)(row % job.n) * job.token_stride +
                      (int64_t)(row / job.n) * job.head_stride;
        for (uint32_t c = gpu::thread(); c < job.dim; c += KVQ_GPU_CACHE_THREADS)
            kvq_gpu_put_one(to, job.dtype, c, job.from[row * job.dim + c]);
    }
}

// ---- Merging ----

KVQ_KERNEL(kvq_gpu_merge_all, kvq_gpu_merge_args, a)
{
    const uint32_t warps = KVQ_GPU_CACHE_THREADS / gpu::WARP;
    for (uint64_t r = gpu::block_x() * warps + gpu::warp(); r < a.rows;
         r += gpu::grid_x() * warps) {
        const float lse_a = gpu::as_float(gpu::ldg32(a.lse_a + r));
        const float lse_b = gpu::as_float(gpu::ldg32(a.lse_b + r));
        const kvq__merge m = kvq__merge_of(lse_a, lse_b);
        gpu::warp_sync(); // lse may be one of the inputs
        for (uint64_t i = r * a.dim + gpu::lane(); i < (r + 1) * a.dim; i += gpu::WARP)
            gpu::stg32(a.out + i, gpu::as_bits(kvq__merged(&m, a.out_a[i], a.out_b[i])));
        if (gpu::lane() == 0)
            gpu::stg32(a.lse + r, gpu::as_bits(m.lse));
    }
}
