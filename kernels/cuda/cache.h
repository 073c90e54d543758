// SPDX-License-Identifier: Apache-2.0
//
// What the GPU does with caches besides attending: storing what an engine hands over, learning,
// packing, reading back and merging. Each function launches one kernel (packing of formats with
// outliers: two) for any number of layers and sessions at once; bytes written are those of
// kernels.h's functions of the same names, and so are the rules.
//
// Work lies in arrays in device memory, written by the caller before the work runs; a captured
// launch replays with whatever the arrays hold then, up to the numbers it was launched with. All
// pointers in these structs are the device's. An entry whose recipe is NULL is skipped.
//
// Work that depends on whether stored values are finite has a guard: a word that earlier work of
// the stream counts in. Entries whose guard is not 0 when their launch runs are skipped. NULL: no
// guard.
#ifndef KVQ_KERNELS_CUDA_CACHE_H
#define KVQ_KERNELS_CUDA_CACHE_H

#include "kernels/cuda/gpu.h"
#include "kernels/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVQ_GPU_CACHE_THREADS = 128 };

// Channels of a span's rows that packing has in shared memory at a time.
KVQ_INLINE uint32_t kvq_gpu_span_width(uint32_t dim, uint32_t span)
{
    return dim * span > 128 * 128 ? 128 : dim;
}

// ---- Work ----

// As struct kvq_store_counts, in words that a GPU adds to; from 2^31 on they count no further. The
// host may write `cancelled` at any time: stores that see that it is not 0 count one more value as
// not finite, so that what is guarded by `nonfinite` is done for all of their tokens or for none.
// The words lie in the host's memory, where nothing promises that a GPU's addition leaves a
// neighbour alone that the host writes meanwhile: what either side writes has lines of its own.
struct kvq_gpu_store_counts {
    uint32_t nonfinite, saturated, of_gpu[14];
    uint32_t cancelled, of_host[15];
};

// Tokens [start, start + tokens) of a session's layer, all KV heads, into raw records.
struct kvq_gpu_store_job {
    const struct kvq_recipe *recipe;
    struct kvq_view k, v;         // token 0 is the one at `start`
    const struct kvq_page *pages; // of the session; those of the tokens have raw blocks
    uint64_t start;
    struct kvq_gpu_store_counts *counts; // added to; NULL if nobody asks
    uint32_t tokens;
};

// What a session's layer learns before its first unit is packed, all KV heads (kvq_learn).
struct kvq_gpu_lesson {
    const struct kvq_recipe *recipe;
    const struct kvq_page *pages;
    uint8_t *extras;
    const uint32_t *guard;
    uint32_t tokens; // kvq_learn_tokens() of the session
};

// One unit of one layer, all KV heads; members as in struct kvq_unit.
struct kvq_gpu_unit {
    const struct kvq_recipe *recipe;
    const struct kvq_book *book;
    const uint8_t *raw_block;
    uint8_t *packed_block;
    uint8_t *extras;
    const uint32_t *guard; // of all units of a run the same
    uint64_t block_start;
    uint32_t first;
    uint32_t learned;
};

// Tokens [from, from + n) of a session's layer as fp32, [KV head][n][dim]. Tokens that no page
// holds are left untouched.
struct kvq_gpu_read_job {
    const struct kvq_recipe *recipe;
    const struct kvq_book *book;
    const struct kvq_page *pages;
    const uint8_t *extras;
    const uint8_t *pool; // as in struct kvq_attend
    float *k_out, *v_out;
    uint64_t from;
    uint32_t n, n_pages;
};

// Rows of bytes, a multiple of 4 each, from one place to another that does not overlap it.
struct kvq_gpu_copy {
    uint8_t *to;
    const uint8_t *from;
    const uint32_t *guard;
    uint64_t stride; // from row to row, in both
    uint32_t bytes, rows;
};

// Whether an entry is done.
#define KVQ_GPU_GOES(entry) (!(entry).guard || gpu::ldg32((entry).guard) == 0)

// Moves the raw rows of kept tokens together, all KV heads of a layer: token offset + list[i] to
// offset + i, counted from the first page on. Ascending.
struct kvq_gpu_keep {
    const struct kvq_recipe *recipe;
    const struct kvq_page *pages;
    const int32_t *list;
    uint32_t n, offset;
};

// Rows [head][n][dim] of fp32 to a tensor of the engine's, rounded as kvq_store rounds.
struct kvq_gpu_put {
    const float *from;
    uint8_t *to; // token 0, head 0
    int64_t token_stride, head_stride;
    uint32_t n, heads, dim;
    uint8_t dtype;
};

// ---- Arguments of the kernels ----

struct kvq_gpu_store_args {
    const struct kvq_gpu_store_job *jobs;
    uint32_t blocks; // to a job
};

struct kvq_gpu_learn_args {
    const struct kvq_gpu_lesson *lessons;
};

// Run i is units [runs[i], runs[i + 1]), which follow each other in one layer of one session.
struct kvq_gpu_compete_args {
    const struct kvq_gpu_unit *units;
    const uint32_t *runs;
};

struct kvq_gpu_pack_args {
    const struct kvq_gpu_unit *units;
    uint32_t parts; // blocks to a unit
};

struct kvq_gpu_read_args {
    const struct kvq_gpu_read_job *jobs;
    uint32_t heads;  // to a job
    uint32_t blocks; // to a job and head
};

struct kvq_gpu_copy_args {
    const struct kvq_gpu_copy *jobs;
    uint32_t blocks; // to a job
};

struct kvq_gpu_keep_args {
    const struct kvq_gpu_keep *jobs;
};

struct kvq_gpu_put_args {
    const struct kvq_gpu_put *jobs;
    uint32_t blocks; // to a job
};

struct kvq_gpu_merge_args {
    const float *out_a, *lse_a, *out_b, *lse_b;
    float *out, *lse;
    uint64_t rows;
    uint32_t dim;
};

// ---- Launching ----
//
// All return 0, or -1 with a sentence in text. `recipes` are the different ones of the work, on
// the host: they tell how large blocks of threads must be. Any that the device's copies do not
// match lead to work not done or refused.

struct kvq_gpu_work {
    const struct kvq_recipe *const *recipes;
    uint32_t n_recipes;
    uint32_t n; // entries of the array
    struct kvq_gpu_stream *stream;
};

// Launches that learning, packing and reading are at most; all else is one.
enum { KVQ_GPU_LEARN_LAUNCHES = 1, KVQ_GPU_PACK_LAUNCHES = 4, KVQ_GPU_READ_LAUNCHES = 3 };

// most: the largest `tokens` of the jobs, roughly; it only decides how many blocks there are.
int kvq_gpu_store(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                  uint32_t most, char *text, size_t n);

int kvq_gpu_learn(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr lessons,
                  char *text, size_t n);

// Units of formats with outliers stand in runs: one after the other where they are of the same
// layer of the same session, ascending; `runs` has n_runs + 1 numbers, as in struct
// kvq_gpu_compete_args. Without outliers runs may be 0.
int kvq_gpu_pack(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr units,
                 kvq_gpu_ptr runs, uint32_t n_runs, char *text, size_t n);

// most: the largest `n` of the jobs, roughly.
int kvq_gpu_read(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                 uint32_t most, char *text, size_t n);

// These take n jobs; recipes are not looked at.
int kvq_gpu_copy_rows(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                      char *text, size_t n);
// heads: the most that a job's layer has.
int kvq_gpu_keep_rows(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                      uint32_t heads, char *text, size_t n);
int kvq_gpu_put_rows(const struct kvq_gpu *gpu, const struct kvq_gpu_work *work, kvq_gpu_ptr jobs,
                     char *text, size_t n);

// kvq_merge_rows with device pointers.
int kvq_gpu_merge(const struct kvq_gpu *gpu, const struct kvq_gpu_merge_args *args,
                  struct kvq_gpu_stream *stream, char *text, size_t n);

#ifdef __cplusplus
}
#endif

#endif
