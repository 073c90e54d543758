// SPDX-License-Identifier: Apache-2.0
//
// The narrow attention kernels: what a block of threads does with its items. A source of packed
// keys and values is a struct with
//
//   BYTES                     of shared memory that its stages take
//   APART                     whether the warps' sums have room of their own beside the stages
//   TABLES                    bytes of shared memory behind everything else
//   FOURS                     which channels are where in its sums, see kvq_gpu_publish
//   RAW_STAGES                for raw tiles, of kvq_gpu_tile_room<D>::BYTES for each warp
//
// and functions
//
//   kvq_gpu_ahead(source, a, pipe, from, limit)     starts copying entries [from, limit) of a list
//   kvq_gpu_take(source, a, split, pipe, sums)      adds up the warp's packed groups of a split
#ifndef KVQ_KERNELS_CUDA_ATTEND_KERNEL_H
#define KVQ_KERNELS_CUDA_ATTEND_KERNEL_H

#include "kernels/cuda/attend_affine.h"
#include "kernels/cuda/attend_any.h"
#include "kernels/cuda/attend_book.h"
#include "kernels/cuda/attend_classic.h"
#include "kernels/cuda/attend_innerq.h"
#include "kernels/cuda/attend_raw.h"
#include "kernels/cuda/attend_shared.h"

// ---- Sources ----

// How many packed groups this warp has of a split.
template <class R> KVQ_DEVICE int kvq_gpu_groups_of(const kvq_gpu_attend_args &a, int split)
{
    const kvq_gpu_part part = kvq_gpu_part_of(kvq_gpu_recall<R>(a), split);
    return part.packed_end - part.packed;
}

template <int D, int NT, int BITS> struct kvq_gpu_affine_source {
    static constexpr bool FOURS = false, APART = KVQ_GPU_APART(D, 8 * NT, BITS);
    static constexpr int TABLES = 0, RAW_STAGES = 1;
    static constexpr int BYTES = KVQ_GPU_WARPS * kvq_gpu_affine<D, BITS>::WARP_BYTES;
};

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_ahead(kvq_gpu_affine_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                              kvq_gpu_pipe &pipe, int from, int limit)
{
    kvq_gpu_affine_ahead<D, BITS, NT>(a, pipe, from, limit);
}

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_affine_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                             int split, kvq_gpu_pipe &pipe, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_attend_affine<D, BITS, NT>(a, pipe, kvq_gpu_groups_of<kvq_gpu_room<D, NT>>(a, split),
                                       sums);
}

template <int D, int NT, int BITS> struct kvq_gpu_shared_source {
    static constexpr bool FOURS = false, APART = KVQ_GPU_APART(D, 8 * NT, BITS);
    static constexpr int TABLES = 0, RAW_STAGES = 1;
    static constexpr int BYTES = KVQ_GPU_WARPS * kvq_gpu_shared<D, BITS>::WARP_BYTES;
};

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_ahead(kvq_gpu_shared_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                              kvq_gpu_pipe &pipe, int from, int limit)
{
    kvq_gpu_shared_ahead<D, BITS, NT>(a, pipe, from, limit);
}

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_shared_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                             int split, kvq_gpu_pipe &pipe, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_attend_shared<D, BITS, NT>(a, pipe, kvq_gpu_groups_of<kvq_gpu_room<D, NT>>(a, split),
                                       sums);
}

template <int D, int NT, int BITS> struct kvq_gpu_innerq_source {
    static constexpr bool FOURS = false, APART = KVQ_GPU_APART(D, 8 * NT, 3);
    static constexpr int TABLES = 0, RAW_STAGES = 1;
    static constexpr int BYTES = KVQ_GPU_WARPS * kvq_gpu_innerq<D, BITS>::WARP_BYTES;
};

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_ahead(kvq_gpu_innerq_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                              kvq_gpu_pipe &pipe, int from, int limit)
{
    kvq_gpu_innerq_ahead<D, BITS, NT>(a, pipe, from, limit);
}

template <int D, int NT, int BITS>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_innerq_source<D, NT, BITS>, const kvq_gpu_attend_args &a,
                             int split, kvq_gpu_pipe &pipe, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_attend_innerq<D, BITS, NT>(a, pipe, kvq_gpu_groups_of<kvq_gpu_room<D, NT>>(a, split),
                                       sums);
}

// Dequantizes where the groups lie.
template <int D, int NT> struct kvq_gpu_any_source {
    static constexpr bool FOURS = false, APART = false;
    static constexpr int TABLES = 0, RAW_STAGES = 1;
    static constexpr int BYTES = 0;
};

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_ahead(kvq_gpu_any_source<D, NT>, const kvq_gpu_attend_args &,
                              kvq_gpu_pipe &, int, int)
{
}

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_any_source<D, NT>, const kvq_gpu_attend_args &a, int split,
                             kvq_gpu_pipe &, kvq_gpu_sums<D, NT> &sums)
{
    const kvq_gpu_here h = kvq_gpu_recall<kvq_gpu_room<D, NT>>(a);
    kvq_gpu_attend_any<D, NT>(a, h, kvq_gpu_part_of(h, split), sums);
}

// Raw formats have nothing packed.
template <int D, int NT> struct kvq_gpu_raw_source {
    static constexpr bool FOURS = false, APART = false;
    static constexpr int TABLES = 0, RAW_STAGES = KVQ_GPU_RAW_STAGES(D);
    static constexpr int BYTES = 0;
};

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_ahead(kvq_gpu_raw_source<D, NT>, const kvq_gpu_attend_args &,
                              kvq_gpu_pipe &, int, int)
{
}

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_raw_source<D, NT>, const kvq_gpu_attend_args &, int,
                             kvq_gpu_pipe &, kvq_gpu_sums<D, NT> &sums)
{
    kvq_gpu_start(sums);
}

template <int D, int NT> struct kvq_gpu_book_source {
    static constexpr bool FOURS = true, APART = false;
    static constexpr int TABLES = kvq_gpu_book<D>::TABLES, RAW_STAGES = 1;
    static constexpr int BYTES = KVQ_GPU_WARPS * kvq_gpu_book<D>::WARP_BYTES;
};

// Where the warps' sums and the tables stand in shared memory, and how much a block of threads has.
template <int D, int NT, class SOURCE> struct kvq_gpu_size {
    typedef kvq_gpu_room<D, NT> R;
    static constexpr int RAW = KVQ_GPU_WARPS * SOURCE::RAW_STAGES * kvq_gpu_tile_room<D>::BYTES;
    static constexpr int STAGES = SOURCE::BYTES > RAW ? SOURCE::BYTES : RAW;
    static constexpr int SUMS = R::STAGES + (SOURCE::APART ? STAGES : 0);
    static constexpr int SUMS_END = SUMS + R::SUMS_BYTES;
    static constexpr int TABLES = R::STAGES + STAGES > SUMS_END ? R::STAGES + STAGES : SUMS_END;
    static constexpr int BYTES = TABLES + SOURCE::TABLES;
};

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_ahead(kvq_gpu_book_source<D, NT>, const kvq_gpu_attend_args &,
                              kvq_gpu_pipe &pipe, int from, int limit)
{
    kvq_gpu_book_ahead<D, NT>(pipe, from, limit);
}

template <int D, int NT>
KVQ_DEVICE void kvq_gpu_take(kvq_gpu_book_source<D, NT>, const kvq_gpu_attend_args &a, int split,
                             kvq_gpu_pipe &pipe, kvq_gpu_sums<D, NT> &sums)
{
    typedef kvq_gpu_book_source<D, NT> S;
    kvq_gpu_attend_book<D, NT>(a, pipe, kvq_gpu_groups_of<kvq_gpu_room<D, NT>>(a, split),
                               gpu::smem_start() + kvq_gpu_size<D, NT, S>::TABLES, sums);
}

// What a source keeps from run to run; `first`: there is nothing yet.
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

#define KVQ_GPU_CHECK_SIZE(D, NT, SOURCE, STAGES, APART, TABLES)                                   \
    static_assert(kvq_gpu_size<D, NT, SOURCE>::BYTES ==                                            \
                      KVQ_GPU_NARROW_BYTES(D, 8 * NT, STAGES, APART) + (TABLES),                   \
                  "the host knows the size");
#define KVQ_GPU_CHECK_AFFINE(D, NT, BITS)                                                          \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_affine_source<D, NT, BITS>),                \
                       KVQ_GPU_MOST(KVQ_GPU_AFFINE_STAGES(D, BITS), KVQ_GPU_RAW_STAGE(D)),         \
                       KVQ_GPU_APART(D, 8 * NT, BITS), 0)
#define KVQ_GPU_CHECK_SHARED(D, NT, BITS)                                                          \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_shared_source<D, NT, BITS>),                \
                       KVQ_GPU_MOST(KVQ_GPU_SHARED_STAGES(D, BITS), KVQ_GPU_RAW_STAGE(D)),         \
                       KVQ_GPU_APART(D, 8 * NT, BITS), 0)
#define KVQ_GPU_CHECK_BYTES(D, NT)                                                                 \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_any_source<D, NT>), KVQ_GPU_RAW_STAGE(D),   \
                       false, 0)                                                                   \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_raw_source<D, NT>),                         \
                       KVQ_GPU_RAW_STAGES(D) * KVQ_GPU_RAW_STAGE(D), false, 0)                     \
    KVQ_GPU_CHECK_AFFINE(D, NT, 2)                                                                 \
    KVQ_GPU_CHECK_AFFINE(D, NT, 3)                                                                 \
    KVQ_GPU_CHECK_AFFINE(D, NT, 4)                                                                 \
    KVQ_GPU_CHECK_SHARED(D, NT, 2)                                                                 \
    KVQ_GPU_CHECK_SHARED(D, NT, 3)                                                                 \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_innerq_source<D, NT, 2>),                   \
                       KVQ_GPU_AFFINE_STAGES(D, 3), KVQ_GPU_APART(D, 8 * NT, 3), 0)                \
    KVQ_GPU_CHECK_SIZE(D, NT, KVQ_GPU_ARGUMENT(kvq_gpu_book_source<D, NT>), KVQ_GPU_RAW_STAGE(D),  \
                       false, KVQ_GPU_TABLES)
#define KVQ_GPU_ARGUMENT(...) __VA_ARGS__
KVQ_GPU_CHECK_BYTES(64, 1)
KVQ_GPU_CHECK_BYTES(64, 2)
KVQ_GPU_CHECK_BYTES(128, 1)
KVQ_GPU_CHECK_BYTES(128, 2)
KVQ_GPU_CHECK_BYTES(256, 1)
#undef KVQ_GPU_CHECK_BYTES

// ---- Splits ----

// Up to which split, from `split` on, groups may be copied ahead: raw tiles take the stages, so not
// beyond the next split that has some.
template <class SOURCE>
KVQ_DEVICE int kvq_gpu_last_ahead(const kvq_gpu_here &h, const kvq_gpu_votes &votes, int split)
{
    const uint32_t raw = votes.raw >> split;
    if (!SOURCE::APART)
        return split;
    if (raw == 0)
        return h.splits - 1;
    return split + gpu::popcount((raw & (0 - raw)) - 1);
}

// Starts copying the groups of splits `split` to `last`, as far as there are stages.
template <class R, class SOURCE>
KVQ_DEVICE void kvq_gpu_start_splits(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int split,
                                     int last, kvq_gpu_pipe &pipe)
{
    const int blocks = h.split_tokens / KVQ_BLOCK_TOKENS;
    kvq_gpu_ahead(SOURCE(), a, pipe, kvq_gpu_count_below(h.packed, split * blocks),
                  kvq_gpu_count_below(h.packed, (last + 1) * blocks));
}

// The sums of a split's packed groups, combined.
template <int D, int NT, class SOURCE>
KVQ_DEVICE void kvq_gpu_attend_packed(const kvq_gpu_attend_args &a, int split, bool raw,
                                      kvq_gpu_pipe &pipe)
{
    typedef kvq_gpu_room<D, NT> R;
    constexpr int SUMS = kvq_gpu_size<D, NT, SOURCE>::SUMS;
    kvq_gpu_sums<D, NT> sums;
    kvq_gpu_take(SOURCE(), a, split, pipe, sums);
    gpu::block_sync(); // nobody reads stages or sums that these sums are written over
    kvq_gpu_publish<D, NT, SUMS, SOURCE::FOURS>(sums);
    gpu::block_sync();
    kvq_gpu_combine<D, NT, SUMS>(a, kvq_gpu_recall<R>(a), split, false, raw, a.recipe.v.rotation);
}

// The sums of a split's raw tiles, combined with those of its packed groups, if it has some.
template <int D, int NT, class SOURCE>
KVQ_DEVICE void kvq_gpu_add_raw(const kvq_gpu_attend_args &a, int split, bool packed)
{
    typedef kvq_gpu_room<D, NT> R;
    constexpr int SUMS = kvq_gpu_size<D, NT, SOURCE>::SUMS;
    const kvq_gpu_here h = kvq_gpu_recall<R>(a);
    kvq_gpu_sums<D, NT> sums;
    kvq_gpu_attend_raw<D, NT, SOURCE::RAW_STAGES>(a, h, kvq_gpu_list_pool<R>(a, h, split), sums);
    gpu::block_sync();
    kvq_gpu_publish<D, NT, SUMS, false>(sums);
    gpu::block_sync();
    kvq_gpu_combine<D, NT, SUMS>(a, h, split, packed, false, KVQ_ROTATE_NONE);
}

// One split whose queries are there and whose groups are on their way, from the lists to its sums
// in the partials, or its output.
template <int D, int NT, class SOURCE>
KVQ_DEVICE void kvq_gpu_attend_split(const kvq_gpu_attend_args &a, int split, kvq_gpu_pipe &pipe)
{
    typedef kvq_gpu_room<D, NT> R;
    const kvq_gpu_votes votes = kvq_gpu_count_votes<R>();
    const bool packed = votes.packed >> split & 1, raw = votes.raw >> split & 1;
    if (packed)
        kvq_gpu_attend_packed<D, NT, SOURCE>(a, split, raw, pipe);
    if (packed && raw)
        gpu::block_sync(); // the sums have been read that raw tiles are written over
    if (raw)
        kvq_gpu_add_raw<D, NT, SOURCE>(a, split, packed);
    if (!packed && !raw)
        kvq_gpu_saw_nothing<D, R>(a, kvq_gpu_recall<R>(a), split);
}

// ---- Runs ----

// A run whose queries and lists are there; split 0's groups are on their way.
template <int D, int NT, class SOURCE>
KVQ_DEVICE void kvq_gpu_attend_run(const kvq_gpu_attend_args &a, int splits, kvq_gpu_pipe &pipe)
{
    typedef kvq_gpu_room<D, NT> R;
    int last = 0; // split whose groups are copied ahead
    KVQ_NO_UNROLL
    for (int split = 0; split < splits; split++) {
        if (split > last) {
            const kvq_gpu_here h = kvq_gpu_recall<R>(a);
            gpu::block_sync(); // the stages are free
            last = kvq_gpu_last_ahead<SOURCE>(h, kvq_gpu_count_votes<R>(), split);
            kvq_gpu_start_splits<R, SOURCE>(a, h, split, last, pipe);
        }
        kvq_gpu_attend_split<D, NT, SOURCE>(a, split, pipe);
    }
    gpu::block_sync(); // all rows are handed over
    kvq_gpu_leave<D, R>(a, kvq_gpu_recall<R>(a));
}

// Whether the queries in shared memory, which are those of the item before, are item i's as well.
KVQ_DEVICE bool kvq_gpu_has_queries(const kvq_gpu_attend_args &a, uint32_t i, uint32_t first)
{
    if (i == first)
        return false;
    const kvq_gpu_item &before = a.items[i - 1], &item = a.items[i];
    return item.tile == before.tile && item.tiles == before.tiles && item.head == before.head;
}

// Enters the run at item i of a stretch that begins with `first` and ends before `end`: lists its
// groups, starts on copying them, and brings its queries. Returns how many splits it has.
template <int D, int NT, class SOURCE>
KVQ_DEVICE int kvq_gpu_begin_run(const kvq_gpu_attend_args &a, uint32_t i, uint32_t first,
                                 uint32_t end, kvq_gpu_pipe &pipe)
{
    typedef kvq_gpu_room<D, NT> R;
    kvq_gpu_here h = kvq_gpu_enter<R>(a, i, end);
    gpu::block_sync();
    kvq_gpu_make_lists<R>(a, h);
    kvq_gpu_start_splits<R, SOURCE>(a, h, 0, 0, pipe);
    kvq_gpu_remember<R>(h);
    kvq_gpu_vote<R>(a, h);
    if (i == first || a.items[i - 1].head != h.item.head)
        kvq_gpu_prepare(SOURCE(), a, h.item.head, i == first);
    if (!kvq_gpu_has_queries(a, i, first))
        kvq_gpu_bring_queries<D, R>(a, h, true, !a.recipe.is_raw);
    gpu::block_sync();
    return h.splits;
}

// The first item before which at least `cost` lies, n if there is none: in steps that leave a 32nd.
KVQ_DEVICE uint32_t kvq_gpu_item_after(const kvq_gpu_attend_args &a, uint32_t n, uint32_t cost)
{
    uint32_t from = 0, to = n; // it is one of (from, to], or from
    while (to > from) {
        const uint32_t step = (to - from + gpu::WARP - 1) / gpu::WARP;
        const uint32_t at = from + (uint32_t)gpu::lane() * step;
        const int below = gpu::popcount(gpu::ballot(at < to && a.items[at].before < cost));
        if (below == 0)
            return from;
        const uint32_t end = from + (uint32_t)below * step;
        from = end - step + 1;
        to = end < to ? end : to;
    }
    return from;
}

// Where block number `block`'s stretch of the list begins: for shares of equal cost where rows have
// different numbers of splits; else for equal shares of items, or of whole rows of splits if
// nobody's share grows by more than an eighth.
KVQ_DEVICE uint32_t kvq_gpu_stretch(const kvq_gpu_attend_args &a, uint32_t block)
{
    const uint32_t n = a.n_items[0], whole = a.n_items[KVQ_GPU_WHOLE_WORD];
    const uint32_t grid = (uint32_t)gpu::grid_x();
    if (whole == 0)
        return kvq_gpu_item_after(
            a, n, (uint32_t)((uint64_t)a.n_items[KVQ_GPU_COST_WORD] * block / grid));
    const uint32_t all = n / whole, most = (all + grid - 1) / grid * whole;
    if (8 * most <= 9 * ((n + grid - 1) / grid))
        return (uint32_t)((uint64_t)all * block / grid) * whole;
    return (uint32_t)((uint64_t)n * block / grid);
}

// The block's items: a stretch of the list, so that runs are long and queries often serve several.
template <int D, int NT, class SOURCE>
KVQ_DEVICE void kvq_gpu_attend_all(const kvq_gpu_attend_args &a)
{
    typedef kvq_gpu_room<D, NT> R;
    const uint32_t first = kvq_gpu_stretch(a, (uint32_t)gpu::block_x());
    const uint32_t end = kvq_gpu_stretch(a, (uint32_t)gpu::block_x() + 1);
    if (gpu::thread() < 16)
        gpu::sts32(gpu::smem_start() + R::ONES + 4 * gpu::thread(), 0x3c003c00u);
    KVQ_NO_UNROLL
    for (uint32_t i = first; i < end;) {
        kvq_gpu_pipe pipe = {0, 0, 0, 0};
        const int splits = kvq_gpu_begin_run<D, NT, SOURCE>(a, i, first, end, pipe);
        kvq_gpu_attend_run<D, NT, SOURCE>(a, splits, pipe);
        i += (uint32_t)splits;
    }
}

// Whether a multiprocessor has shared memory for three blocks with sums apart from their stages, as
// those of capability 9 and 10 have.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr bool kvq_gpu_is_roomy = false;
#else
constexpr bool kvq_gpu_is_roomy = true;
#endif

// Blocks of threads that shall run on a multiprocessor at the same time, which bounds registers.
// Where it is two, three would make some spill, or there is no more shared memory.
constexpr int kvq_gpu_residents(int dim, int nt, int bits)
{
    const bool two = dim == 256 || nt == 2 || bits == 8 || (dim == 128 && bits >= 3) ||
                     (dim == 128 && bits == 2 && !kvq_gpu_is_roomy);
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
#define KVQ_GPU_ATTEND_SHARED(D, BITS, NT)                                                         \
    KVQ_GPU_ATTEND(d##D##_s##BITS##_n##NT, D, NT, BITS,                                            \
                   KVQ_GPU_ARGUMENT(kvq_gpu_shared_source<D, NT, BITS>))
#define KVQ_GPU_ATTEND_INNERQ(D, BITS, NT)                                                         \
    KVQ_GPU_ATTEND(d##D##_iq##BITS##_n##NT, D, NT, (NT) == 2 ? 4 : (BITS) + 1,                     \
                   KVQ_GPU_ARGUMENT(kvq_gpu_innerq_source<D, NT, BITS>))
#define KVQ_GPU_ATTEND_ANY(D, NT)                                                                  \
    KVQ_GPU_ATTEND(d##D##_any_n##NT, D, NT, 8, KVQ_GPU_ARGUMENT(kvq_gpu_any_source<D, NT>))
#define KVQ_GPU_ATTEND_RAW(D, NT)                                                                  \
    KVQ_GPU_ATTEND(d##D##_raw_n##NT, D, NT, 0, KVQ_GPU_ARGUMENT(kvq_gpu_raw_source<D, NT>))
#define KVQ_GPU_ATTEND_BOOK(D, NT)                                                                 \
    KVQ_GPU_ATTEND(d##D##_book_n##NT, D, NT, 8, KVQ_GPU_ARGUMENT(kvq_gpu_book_source<D, NT>))

#define KVQ_GPU_ATTEND_KINDS(D, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 2, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 3, NT)                                                                \
    KVQ_GPU_ATTEND_AFFINE(D, 4, NT)                                                                \
    KVQ_GPU_ATTEND_SHARED(D, 2, NT)                                                                \
    KVQ_GPU_ATTEND_SHARED(D, 3, NT)                                                                \
    KVQ_GPU_ATTEND_INNERQ(D, 2, NT)                                                                \
    KVQ_GPU_ATTEND_INNERQ(D, 3, NT)                                                                \
    KVQ_GPU_ATTEND_BOOK(D, NT)                                                                     \
    KVQ_GPU_ATTEND_ANY(D, NT)                                                                      \
    KVQ_GPU_ATTEND_RAW(D, NT)

#endif
