// SPDX-License-Identifier: Apache-2.0
//
// The narrow attention kernels: what a block of threads does with its items. A source of packed
// keys and values is a struct with
//
//   BYTES                     of shared memory that it needs over the stages
//   TABLES                    bytes of shared memory behind everything else
//   FOURS                     which channels are where in its sums, see kvq_gpu_publish
//   RAW_STAGES                for raw tiles, of kvq_gpu_tile_room<D>::BYTES for each warp
//
// and a function kvq_gpu_take(source, a, h, sums) that adds up the warp's packed groups; all copies
// have landed when it returns.
#ifndef KVQ_KERNELS_CUDA_ATTEND_KERNEL_H
#define KVQ_KERNELS_CUDA_ATTEND_KERNEL_H

#include "kernels/cuda/attend_affine.h"
#include "kernels/cuda/attend_any.h"
#include "kernels/cuda/attend_book.h"
#include "kernels/cuda/attend_classic.h"
#include "kernels/cuda/attend_innerq.h"
#include "kernels/cuda/attend_raw.h"

template <int D, int NT, int BITS> struct kvq_gpu_affine_source {
    static constexpr bool FOURS = false;
    static constexpr int TABLES = 0, RAW_STAGES = 1;
    static constexpr int BYTES = KVQ_GPU_WARPS * kvq_gpu_affine<D, BITS>::WARP_BYTES;
};

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_affine_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                             const kvq_gpu_here &h, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_attend_affine<D, BITS, NT>(a, h, sums);
}

template <int D, int NT, int BITS> struct kvq_gpu_innerq_source {
    static constexpr bool FOURS = false;
    static constexpr int TABLES = 0, RAW_STAGES = 1;
    static constexpr int BYTES = KVQ_GPU_WARPS * kvq_gpu_innerq<D, BITS>::WARP_BYTES;
};

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_innerq_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                             const kvq_gpu_here &h, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_attend_innerq<D, BITS, NT>(a, h, sums);
}

template <int D, int NT> struct kvq_gpu_any_source {
    static constexpr bool FOURS = false;
    static constexpr int TABLES = 0, RAW_STAGES = 1;
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
    static constexpr bool FOURS = false;
    static constexpr int TABLES = 0, RAW_STAGES = KVQ_GPU_RAW_STAGES(D);
    static constexpr int BYTES = 0;
};

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_raw_source<D, NT>, const kvq_gpu_attend_args &,
                             const kvq_gpu_here &, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_start(sums);
}

template <int D, int NT> struct kvq_gpu_book_source {
    static constexpr bool FOURS = true;
    static constexpr int TABLES = kvq_gpu_book<D>::TABLES, RAW_STAGES = 1;
    static constexpr int BYTES = KVQ_GPU_WARPS * kvq_gpu_book<D>::WARP_BYTES;
};

// Bytes of shared memory of a block: where the tables begin, and all.
template <int D, int NT, class SOURCE> struct kvq_gpu_size {
    static constexpr int RAW = KVQ_GPU_WARPS * SOURCE::RAW_STAGES * kvq_gpu_tile_room<D>::BYTES;
    static constexpr int TABLES =
        kvq_gpu_room<D, NT>::bytes(SOURCE::BYTES > RAW ? SOURCE::BYTES : RAW);
    static constexpr int BYTES = TABLES + SOURCE::TABLES;
};

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_book_source<D, NT>, const kvq_gpu_attend_args &a,
                             const kvq_gpu_here &h, kvq_gpu_sums<D, NT> &sums)
{
    typedef kvq_gpu_book_source<D, NT> S;
    kvq_gpu_attend_book<D, NT>(a, h, gpu::smem_start() + kvq_gpu_size<D, NT, S>::TABLES, sums);
}

// What a source keeps from item to item; `first`: there is nothing yet.
template <class SOURCE>
KVQ_DEVICE void kvq_gpu_prepare(SOURCE, const kvq_gpu_attend_args &, uint32_t, bool)
{
}

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_prepare(kvq_gpu_book_source<D, NT>, const kvq_gpu_attend_args &a,
                                uint32_t head, bool first)
{
    typedef kvq_gpu_book_source<D, NT> S;
    if (first || a.book.k_head || a.book.v_head)
        kvq_gpu_load_tables<D>(a, head, gpu::smem_start() + kvq_gpu_size<D, NT, S>::TABLES);
}

#define KVQ_GPU_CHECK_SIZE(D, NT, SOURCE, STAGES, TABLES)                                          \
    static_assert(kvq_gpu_size<D, NT, SOURCE>::BYTES ==                                            \
                      KVQ_GPU_NARROW_BYTES(D, 8 * NT, STAGES) + (TABLES),                          \
                  "the host knows the size");
#define KVQ_GPU_CHECK_BYTES(D, NT)                                                                 \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_any_source<D, NT>), KVQ_GPU_RAW_STAGE(D),   \
                       0)                                                                          \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_raw_source<D, NT>),                         \
                       KVQ_GPU_RAW_STAGES(D) * KVQ_GPU_RAW_STAGE(D), 0)                            \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_affine_source<D, NT, 3>),                   \
                       KVQ_GPU_AFFINE_STAGES(D, 3), 0)                                             \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_innerq_source<D, NT, 2>),                   \
                       KVQ_GPU_AFFINE_STAGES(D, 3), 0)                                             \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_book_source<D, NT>), KVQ_GPU_RAW_STAGE(D),  \
                       KVQ_GPU_TABLES)
#define KVQ_GPU_ARGUMENT(...) __VA_ARGS__
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
    kvq_gpu_publish<D, NT, SOURCE::FOURS>(sums);
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
        if (h.item.head != before.head || i == first)
            kvq_gpu_prepare(SOURCE(), a, h.item.head, i == first);
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
// Where it is two, three would make some spill, or there is no more shared memory.
constexpr int kvq_gpu_residents(int dim, int nt, int bits)
{
    const bool two =
        dim == 256 || (dim == 128 && nt == 2) || bits == 8 || (bits == 4 && dim * nt >= 128);
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
#define KVQ_GPU_ATTEND_INNERQ(D, BITS, NT)                                                         \
    KVQ_GPU_ATTEND(d##D##_iq##BITS##_n##NT, D, NT, (NT) == 2 ? 4 : (BITS) + 1,                     \
                   KVQ_GPU_ARGUMENT(kvq_gpu_innerq_source<D, NT, BITS>))
#define KVQ_GPU_ATTEND_ANY(D, NT)                                                                  \
    KVQ_GPU_ATTEND(d##D##_any_n##NT, D, NT, 0, KVQ_GPU_ARGUMENT(kvq_gpu_any_source<D, NT>))
#define KVQ_GPU_ATTEND_RAW(D, NT)                                                                  \
    KVQ_GPU_ATTEND(d##D##_raw_n##NT, D, NT, 0, KVQ_GPU_ARGUMENT(kvq_gpu_raw_source<D, NT>))
#define KVQ_GPU_ATTEND_BOOK(D, NT)                                                                 \
    KVQ_GPU_ATTEND(d##D##_book_n##NT, D, NT, 8, KVQ_GPU_ARGUMENT(kvq_gpu_book_source<D, NT>))

#define KVQ_GPU_ATTEND_KINDS(D, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 2, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 3, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 4, NT)                                                                \
    KVQ_GPU_ATTEND_INNERQ(D, 2, NT)                                                                \
    KVQ_GPU_ATTEND_INNERQ(D, 3, NT)                                                                \
    KVQ_GPU_ATTEND_BOOK(D, NT)                                                                     \
    KVQ_GPU_ATTEND_ANY(D, NT)                                                                      \
    KVQ_GPU_ATTEND_RAW(D, NT)

#endif
