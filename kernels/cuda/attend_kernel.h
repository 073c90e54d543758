// SPDX-License-Identifier: Apache-2.0
//
// The narrow attention kernels: what a block of threads does with its items. A source of packed
// keys and values is a struct with
//
//   BYTES                     of shared memory that it needs over the stages
//   RAW_STAGES                for raw tiles, of kvq_gpu_tile_room<D>::BYTES for each warp
//
// and a function kvq_gpu_take(source, a, h, sums) that adds up the warp's packed groups; all copies
// have landed when it returns.
#ifndef KVQ_KERNELS_CUDA_ATTEND_KERNEL_H
#define KVQ_KERNELS_CUDA_ATTEND_KERNEL_H

#include "kernels/cuda/attend_affine.h"
#include "kernels/cuda/attend_any.h"
#include "kernels/cuda/attend_raw.h"

template <int D, int NT, int BITS> struct kvq_gpu_affine_source {
    static constexpr int RAW_STAGES = 1;
    static constexpr int BYTES = KVQ_GPU_WARPS * kvq_gpu_affine<D, BITS>::WARP_BYTES;
};

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_affine_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                             const kvq_gpu_here &h, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_attend_affine<D, BITS, NT>(a, h, sums);
}

template <int D, int NT> struct kvq_gpu_any_source {
    static constexpr int RAW_STAGES = 1;
    static constexpr int BYTES = 0;
};

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_any_source<D, NT>, const kvq_gpu_attend_args &a,
                             const kvq_gpu_here &h, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_attend_any<D, NT>(a, h, sums);
}

// Raw formats have nothing packed.
template <int D, int NT> struct kvq_gpu_raw_source {
    static constexpr int RAW_STAGES = KVQ_GPU_RAW_STAGES(D);
    static constexpr int BYTES = 0;
};

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_raw_source<D, NT>, const kvq_gpu_attend_args &,
                             const kvq_gpu_here &, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_start(sums);
}

// Bytes of shared memory of a block.
template <int D, int NT, class SOURCE> constexpr int kvq_gpu_shared()
{
    const int raw = KVQ_GPU_WARPS * SOURCE::RAW_STAGES * kvq_gpu_tile_room<D>::BYTES;
    return kvq_gpu_room<D, NT>::bytes(SOURCE::BYTES > raw ? SOURCE::BYTES : raw);
}

#define KVQ_GPU_CHECK_BYTES(D, NT)                                                                 \
    static_assert(kvq_gpu_shared<D, NT, kvq_gpu_any_source<D, NT>>() ==                            \
                      KVQ_GPU_NARROW_BYTES(D, 8 * NT, KVQ_GPU_RAW_STAGE(D)),                       \
                  "the host knows the size");                                                      \
    static_assert(                                                                                 \
        kvq_gpu_shared<D, NT, kvq_gpu_raw_source<D, NT>>() ==                                      \
            KVQ_GPU_NARROW_BYTES(D, 8 * NT, KVQ_GPU_RAW_STAGES(D) * KVQ_GPU_RAW_STAGE(D)),         \
        "the host knows the size");                                                                \
    static_assert(kvq_gpu_shared<D, NT, kvq_gpu_affine_source<D, NT, 3>>() ==                      \
                      KVQ_GPU_NARROW_BYTES(D, 8 * NT, KVQ_GPU_AFFINE_STAGES(D, 3)),                \
                  "the host knows the size");
KVQ_GPU_CHECK_BYTES(64, 1)
KVQ_GPU_CHECK_BYTES(64, 2)
KVQ_GPU_CHECK_BYTES(128, 1)
KVQ_GPU_CHECK_BYTES(128, 2)
KVQ_GPU_CHECK_BYTES(256, 1)
#undef KVQ_GPU_CHECK_BYTES

template <int D, int NT, class SOURCE>
KVQ_DEVICE void kvq_gpu_attend_packed(const kvq_gpu_attend_args &a, const kvq_gpu_here &h)
{
    kvq_gpu_sums<D, NT> sums;
    kvq_gpu_take(SOURCE(), a, h, sums);
    gpu::block_sync(); // the sums stand where other warps' stages are
    kvq_gpu_publish(sums);
}

// One item whose queries are there, from the lists to the output.
template <int D, int NT, class SOURCE>
KVQ_DEVICE void kvq_gpu_attend_item(const kvq_gpu_attend_args &a, kvq_gpu_here &h)
{
    typedef kvq_gpu_room<D, NT> R;
    const uint32_t votes = kvq_gpu_vote<R>(h);
    if (votes & 1) {
        kvq_gpu_attend_packed<D, NT, SOURCE>(a, h);
        gpu::block_sync();
        kvq_gpu_combine<D, NT>(a, h, false, a.recipe.v.rotation);
        gpu::block_sync();
    }
    if (votes & 2) {
        kvq_gpu_attend_raw<D, NT, SOURCE::RAW_STAGES>(a, h);
        gpu::block_sync();
        kvq_gpu_combine<D, NT>(a, h, votes & 1, KVQ_ROTATE_NONE);
    }
    if (votes == 0)
        kvq_gpu_clear<D, R>(h);
    gpu::block_sync();
    kvq_gpu_leave<D, R>(a, h);
}

// The block's items: a stretch of the list, so that queries often serve several.
template <int D, int NT, class SOURCE>
KVQ_DEVICE void kvq_gpu_attend_all(const kvq_gpu_attend_args &a)
{
    typedef kvq_gpu_room<D, NT> R;
    const uint64_t n = *a.n_items, block = (uint64_t)gpu::block_x();
    const uint32_t first = (uint32_t)(n * block / gpu::grid_x());
    const uint32_t end = (uint32_t)(n * (block + 1) / gpu::grid_x());
    kvq_gpu_item before = {~0u, 0, 0, 0};
    if (gpu::thread() < 16)
        gpu::sts32(gpu::smem_start() + R::ONES + 4 * gpu::thread(), 0x3c003c00u);
    KVQ_NO_UNROLL
    for (uint32_t i = first; i < end; i++) {
        kvq_gpu_here h = kvq_gpu_enter<R>(a, i);
        gpu::block_sync();
        kvq_gpu_sum_up_rows<R>(h);
        if (h.item.tile != before.tile || h.item.tiles != before.tiles ||
            h.item.head != before.head) {
            kvq_gpu_bring_queries<D, R>(a, h, false);
            if (!a.recipe.is_raw)
                kvq_gpu_bring_queries<D, R>(a, h, true);
        }
        before = h.item;
        kvq_gpu_make_lists<R>(a, h);
        kvq_gpu_attend_item<D, NT, SOURCE>(a, h);
    }
}

// Blocks of threads that shall run on a multiprocessor at the same time, which bounds registers.
// Where it is two, three would make some spill.
constexpr int kvq_gpu_residents(int dim, int nt, int bits)
{
    const bool two = dim == 256 || (dim == 128 && nt == 2) || (bits == 4 && dim * nt >= 128);
    return two ? 2 : 3;
}

// Kernels are called kvq_gpu_attend_d128_b2_n1 and kvq_gpu_attend_d128_any_n1: 8 n query rows.
#define KVQ_GPU_ATTEND(NAME, D, NT, BITS, SOURCE)                                                  \
    KVQ_KERNEL_FOR(kvq_gpu_attend_##NAME, kvq_gpu_attend_args, a, KVQ_GPU_THREADS,                 \
                   kvq_gpu_residents(D, NT, BITS))                                                 \
    {                                                                                              \
        kvq_gpu_attend_all<D, NT, SOURCE>(a);                                                      \
    }
#define KVQ_GPU_ATTEND_AFFINE(D, BITS, NT)                                                         \
    KVQ_GPU_ATTEND(d##D##_b##BITS##_n##NT, D, NT, BITS,                                            \
                   KVQ_GPU_ARGUMENT(kvq_gpu_affine_source<D, NT, BITS>))
#define KVQ_GPU_ATTEND_ANY(D, NT)                                                                  \
    KVQ_GPU_ATTEND(d##D##_any_n##NT, D, NT, 0, KVQ_GPU_ARGUMENT(kvq_gpu_any_source<D, NT>))
#define KVQ_GPU_ATTEND_RAW(D, NT)                                                                  \
    KVQ_GPU_ATTEND(d##D##_raw_n##NT, D, NT, 0, KVQ_GPU_ARGUMENT(kvq_gpu_raw_source<D, NT>))
#define KVQ_GPU_ARGUMENT(...) __VA_ARGS__

#define KVQ_GPU_ATTEND_KINDS(D, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 2, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 3, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 4, NT)                                                                \
    KVQ_GPU_ATTEND_ANY(D, NT)                                                                      \
    KVQ_GPU_ATTEND_RAW(D, NT)

#endif
