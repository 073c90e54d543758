// SPDX-License-Identifier: Apache-2.0
//
// Launching the work of cache.h: which kernels, how many blocks, how much shared memory.
#include "kernels/cuda/cache.h"

#include <assert.h>
#include <stdio.h>

// Grids have as many blocks in x as there is work, and few in y, where CUDA allows 65,535.
enum {
    DIMS = 3,
    SELECT_BYTES = 3 * 1024,
    MERGE_BLOCKS = 1024,
    STORE_BLOCKS = 64,
    COPY_BLOCKS = 8,
    PUT_BLOCKS = 64,
    READ_BLOCKS = 1024
};

static const uint32_t dims[DIMS] = {64, 128, 256};

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

// Of all recipes of a head_dim (0: of any).
struct extent {
    uint32_t heads, parts, shared; // heads 0: there is no such recipe
    bool outliers;
};

// Rows of 32 tokens, then those of the longer side's span, then flags and norms: as pack.cu cuts
// its shared memory.
static uint32_t pack_shared(const struct kvq_recipe *r)
{
    uint32_t rows = KVQ_GROUP_TOKENS * (r->dim + 1), span = larger(r->k.span, r->v.span);
    if (span > KVQ_GROUP_TOKENS)
        rows += span * (kvq_gpu_span_width(r->dim, span) + 1);
    return 4 * (rows + KVQ_BLOCK_TOKENS + KVQ_GROUP_TOKENS);
}

static uint32_t read_shared(uint32_t dim)
{
    return 4 * (KVQ_GROUP_TOKENS * (dim + 1) + KVQ_GROUP_TOKENS);
}

static struct extent extent_of(const struct kvq_gpu_work *work, uint32_t dim)
{
    struct extent e = {0};
    for (uint32_t i = 0; i < work->n_recipes; i++) {
        const struct kvq_recipe *r = work->recipes[i];
        if (dim && r->dim != dim)
            continue;
        e.heads = larger(e.heads, r->kv_heads);
        e.parts = larger(e.parts, kvq_recipe_parts(r));
        e.shared = larger(e.shared, pack_shared(r));
        e.outliers |= r->outliers > 0;
    }
    return e;
}

static struct kvq_gpu_grid grid_of(const struct kvq_gpu_work *work, uint32_t x, uint32_t y,
                                   uint32_t shared)
{
    return (struct kvq_gpu_grid){
        .x = x, .y = y, .threads = KVQ_GPU_CACHE_THREADS, .shared = shared, .stream = work->stream};
}

// An address on the device as kernels take it.
#define DEVICE(type, address) ((const type *)(uintptr_t)(address))

int kvq_gpu_store(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                  uint32_t most, char *text, size_t n)
{
    uint32_t rows = smaller(most, 4 * STORE_BLOCKS) * extent_of(work, 0).heads * 2;
    uint32_t blocks = smaller(rows / 4 + 1, STORE_BLOCKS);
    struct kvq_gpu_store_args args = {DEVICE(struct kvq_gpu_store_job, jobs), blocks};
    struct kvq_gpu_grid grid = grid_of(work, work->n, blocks, 0);
    if (work->n == 0)
        return 0;
    return kvq_gpu_launch(gpu, KVQ_KERNEL_STORE, &grid, &args, sizeof args, text, n);
}

int kvq_gpu_learn(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr lessons,
                  char *text, size_t n)
{
    struct kvq_gpu_learn_args args = {DEVICE(struct kvq_gpu_lesson, lessons)};
    struct kvq_gpu_grid grid = grid_of(work, work->n, extent_of(work, 0).heads, SELECT_BYTES);
    if (work->n == 0)
        return 0;
    return kvq_gpu_launch(gpu, KVQ_KERNEL_LEARN, &grid, &args, sizeof args, text, n);
}

static int compete(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr units,
                   kvq_gpu_ptr runs, uint32_t n_runs, char *text, size_t n)
{
    struct kvq_gpu_compete_args args = {DEVICE(struct kvq_gpu_unit, units), DEVICE(uint32_t, runs)};
    struct kvq_gpu_grid grid = grid_of(work, n_runs, extent_of(work, 0).heads, SELECT_BYTES);
    if (n_runs == 0) {
        snprintf(text, n,
                 "units of a format with outliers are packed without runs; give the "
                 "order in which they follow each other");
        return -1;
    }
    return kvq_gpu_launch(gpu, KVQ_KERNEL_COMPETE, &grid, &args, sizeof args, text, n);
}

int kvq_gpu_pack(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr units,
                 kvq_gpu_ptr runs, uint32_t n_runs, char *text, size_t n)
{
    static const enum kvq_gpu_kernel kernels[DIMS] = {KVQ_KERNEL_PACK_D64, KVQ_KERNEL_PACK_D128,
                                                      KVQ_KERNEL_PACK_D256};
    if (work->n == 0)
        return 0;
    if (extent_of(work, 0).outliers && compete(gpu, work, units, runs, n_runs, text, n))
        return -1;
    for (int i = 0; i < DIMS; i++) {
        struct extent e = extent_of(work, dims[i]);
        struct kvq_gpu_pack_args args = {DEVICE(struct kvq_gpu_unit, units), e.parts};
        struct kvq_gpu_grid grid = grid_of(work, work->n * e.parts, e.heads, e.shared);
        if (e.heads && kvq_gpu_launch(gpu, kernels[i], &grid, &args, sizeof args, text, n))
            return -1;
    }
    return 0;
}

int kvq_gpu_read(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                 uint32_t most, char *text, size_t n)
{
    static const enum kvq_gpu_kernel kernels[DIMS] = {KVQ_KERNEL_READ_D64, KVQ_KERNEL_READ_D128,
                                                      KVQ_KERNEL_READ_D256};
    uint32_t blocks = smaller(most / KVQ_GROUP_TOKENS + 2, READ_BLOCKS);
    if (work->n == 0)
        return 0;
    for (int i = 0; i < DIMS; i++) {
        struct extent e = extent_of(work, dims[i]);
        struct kvq_gpu_read_args args = {DEVICE(struct kvq_gpu_read_job, jobs), e.heads, blocks};
        struct kvq_gpu_grid grid = grid_of(work, work->n * e.heads, blocks, read_shared(dims[i]));
        if (e.heads && kvq_gpu_launch(gpu, kernels[i], &grid, &args, sizeof args, text, n))
            return -1;
    }
    return 0;
}

int kvq_gpu_copy_rows(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                      char *text, size_t n)
{
    struct kvq_gpu_copy_args args = {DEVICE(struct kvq_gpu_copy, jobs), COPY_BLOCKS};
    struct kvq_gpu_grid grid = grid_of(work, work->n, COPY_BLOCKS, 0);
    if (work->n == 0)
        return 0;
    return kvq_gpu_launch(gpu, KVQ_KERNEL_COPY, &grid, &args, sizeof args, text, n);
}

int kvq_gpu_keep_rows(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                      uint32_t heads, char *text, size_t n)
{
    struct kvq_gpu_keep_args args = {DEVICE(struct kvq_gpu_keep, jobs)};
    struct kvq_gpu_grid grid = grid_of(work, work->n, heads, 0);
    if (work->n == 0)
        return 0;
    return kvq_gpu_launch(gpu, KVQ_KERNEL_KEEP, &grid, &args, sizeof args, text, n);
}

int kvq_gpu_put_rows(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                     char *text, size_t n)
{
    struct kvq_gpu_put_args args = {DEVICE(struct kvq_gpu_put, jobs), PUT_BLOCKS};
    struct kvq_gpu_grid grid = grid_of(work, work->n, PUT_BLOCKS, 0);
    if (work->n == 0)
        return 0;
    return kvq_gpu_launch(gpu, KVQ_KERNEL_PUT, &grid, &args, sizeof args, text, n);
}

int kvq_gpu_merge(const struct kvq_gpu *gpu, const struct kvq_gpu_merge_args *args,
                  struct kvq_gpu_stream *stream, char *text, size_t n)
{
    uint64_t blocks = (args->rows + 3) / 4;
    struct kvq_gpu_grid grid = {.x = blocks < MERGE_BLOCKS ? (uint32_t)blocks : MERGE_BLOCKS,
                                .threads = KVQ_GPU_CACHE_THREADS,
                                .stream = stream};
    if (args->rows == 0)
        return 0;
    return kvq_gpu_launch(gpu, KVQ_KERNEL_MERGE, &grid, args, sizeof *args, text, n);
}
