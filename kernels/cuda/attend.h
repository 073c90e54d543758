// SPDX-License-Identifier: Apache-2.0
//
// Attention on the GPU: what the host hands to the kernels, and how it launches them.
//
// A batch is one attention of any number of sessions over one layer; results are those of struct
// kvq_attend (kernels.h), each session's a function of that session alone, to the bit: neither the
// batch around it nor the size of the grid changes them. What changes from step to step lies in
// device memory, made by kvq_gpu_attend_fill as one piece of bytes; the launches' own arguments
// stay the same as long as limits, format, shape and addresses do. So a captured graph replays for
// any lengths within its limits.
//
//   1. kvq_gpu_attend_needs: how large a batch is. Take its limits, or larger ones.
//   2. memory on the device: kvq_gpu_attend_batch_bytes for the batch, copied there before every
//      step; kvq_gpu_attend_workspace_bytes for the workspace, zeroed once. Launches one after the
//      other may have one workspace, also for layers of different shapes, if their limits have the
//      same number of counters: those stand first, and sums behind them.
//   3. kvq_gpu_attend_fill, and a copy to the device.
//   4. kvq_gpu_attend: one launch, or two if the limits have both kinds of tiles. Nothing else may
//      use the workspace at the same time.
//
// How the work is cut. The query rows (tokens x heads of the group) of a session and KV head form
// tiles: one of up to 16 rows (8 at head_dim 256) on the narrow kernels, where queries are the N
// side of matrix products, or tiles of 128 rows (64 at head_dim 256, and where blocks have little
// shared memory) on the wide kernels, where they are the M side. The keys form splits of 512 to
// 2,048 tokens, so that no session has more than 32 below 64K tokens; those of wide sessions are as
// long as leaves enough items for a whole GPU, up to 4,096. An item is one KV head, one split and
// one tile, or tiles of several sessions that share the split's blocks. Whoever finishes the last
// item of a tile merges its splits, in ascending order.
//
// Numbers: fp16 and bf16 products with sums in fp32. Codes whose scales and offsets leave fp16 are
// computed with within its range: scales of V below 4,094 and of K below 4,094, other values below
// 65,504 in size.
#ifndef KVQ_KERNELS_CUDA_ATTEND_H
#define KVQ_KERNELS_CUDA_ATTEND_H

#include "kernels/cuda/gpu.h"
#include "kernels/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KVQ_GPU_WARPS = 4, // one per group of a block
    KVQ_GPU_THREADS = 32 * KVQ_GPU_WARPS,
    KVQ_GPU_SPLIT_MIN = 512,
    KVQ_GPU_SPLIT_MAX = 2048,
    KVQ_GPU_SPLITS = 32,      // wished for, as long as the split has not reached its largest size
    KVQ_GPU_NARROW_ROWS = 16, // a session with more goes to the wide kernels
    KVQ_GPU_WIDE_SPLIT_MAX = 4096,
    KVQ_GPU_WIDE_ITEMS = 256,    // of whole splits, that a session has where its splits grow
    KVQ_GPU_MAX_SESSIONS = 4096, // in a batch
    KVQ_GPU_MAX_QUERIES = 512,   // query tokens of a session in a batch
};

// ---- What lies in device memory ----

// One session's layer, as in struct kvq_attend; all pointers are the device's.
struct kvq_gpu_session {
    const struct kvq_page *pages;
    const uint8_t *extras, *pool;
    uint64_t past_tokens, step_tokens, fresh_start, q_start;
    struct kvq_view fresh_k, fresh_v, q;
    void *out;
    int64_t out_token_stride, out_head_stride;
    float *lse;
    int64_t lse_token_stride;
    uint32_t n_pages, fresh_tokens, q_tokens, flags;
    uint32_t split_tokens;
    uint32_t first_split, splits; // those that its queries may see; at least one
    uint8_t out_dtype;
};

// Query rows of one session: row r is query token r / gqa, head r % gqa of the KV head's.
struct kvq_gpu_tile {
    uint32_t session;
    uint32_t first_row, rows;
    uint32_t partial; // partial rows before its own: [KV head][split][row]
};

struct kvq_gpu_item {
    uint32_t tile;   // the first
    uint16_t tiles;  // more than one: of sessions that share the split
    uint16_t head;   // KV head
    uint32_t split;  // number from the session's first token on
    uint32_t before; // what the items before it cost, in units of 32 tokens; narrow ones
};

// ---- What a launch is told ----

// Words from the number of narrow items to that of the splits that all rows have, 0 where they
// differ, and to the cost of all narrow items.
enum { KVQ_GPU_WHOLE_WORD = 2, KVQ_GPU_COST_WORD = 3 };

struct kvq_gpu_attend_args {
    const struct kvq_gpu_session *sessions;
    const struct kvq_gpu_tile *tiles;
    const struct kvq_gpu_item *items;
    const uint32_t *n_items; // and behind it, from KVQ_GPU_WHOLE_WORD on, what struct header has
    uint32_t *counters;      // [tile][KV head], 0 between launches
    float *partial_ml;       // [partial row][2]: maximum in powers of two, sum
    float *partial_o;        // [partial row][head_dim]: sum of 2^(logit - m) v
    uint32_t kv_heads, gqa, window;
    // q times `sign` and k gives the logit after a factor of `scale`: in powers of two, or, with a
    // soft-cap, in parts of the cap, which counts `cap` powers of two.
    float sign, scale, cap;
    struct kvq_book book; // with pointers of the device; zeros if the format has none
    struct kvq_recipe recipe;
};

// ---- Shared memory of the narrow kernels, in bytes ----
//
// As struct kvq_gpu_room (attend_item.h) has it, which is checked against this. stages: bytes;
// apart: whether the warps' sums stand behind them.

#define KVQ_GPU_MOST(a, b)      ((a) > (b) ? (a) : (b))
#define KVQ_GPU_RAW_STAGES(dim) ((dim) == 256 ? 2 : 3)
#define KVQ_GPU_RAW_STAGE(dim)  (4 * (64 * (dim) + 128))
#define KVQ_GPU_AFFINE_STAGES(dim, bits)                                                           \
    (12 * (KVQ_GROUP_TOKENS * (dim) * (bits) / 8 * 2 + 8 * (dim) + 2 * KVQ_GROUP_TOKENS))
#define KVQ_GPU_SHARED_STAGES(dim, bits)                                                           \
    (12 * (4 * (dim) + KVQ_GROUP_TOKENS * (dim) * ((bits) + 2) / 8 +                               \
           ((bits) == 3 ? 4 : 6) * KVQ_GROUP_TOKENS))
#define KVQ_GPU_LISTS           (96 + 256 + 4 * 34 * 16 + 4 * 65 * 8)
#define KVQ_GPU_SUMS(dim, rows) (32 * (rows) + 16 * (rows) * ((dim) + 4))
#define KVQ_GPU_NARROW_BYTES(dim, rows, stages, apart)                                             \
    ((52 * (rows) + 128 + KVQ_GPU_LISTS + 127) / 128 * 128 + 10 * (rows) * (dim) +                 \
     ((apart) ? (stages) + KVQ_GPU_SUMS(dim, rows)                                                 \
              : KVQ_GPU_MOST(stages, KVQ_GPU_SUMS(dim, rows))))

// Affine codes' sums are apart where as many blocks run on a multiprocessor of 227 KB then.
#define KVQ_GPU_APART(dim, rows, bits)                                                             \
    ((dim) == 64 || ((dim) == 128 && ((bits) <= 3 || (rows) <= 8)))

// Codebooks' tables stand behind the rest.
#define KVQ_GPU_TABLES (256 * 256)

// Of the wide ones for items of at most so many rows, struct kvq_gpu_wide_room (attend_wide.h).
#define KVQ_GPU_WIDE_BYTES(dim, rows)                                                              \
    ((52 * (rows) + 96 + KVQ_GPU_LISTS + 4 * 64 * 8 + 127) / 128 * 128 + 2 * (rows) * (dim) +      \
     KVQ_GPU_RAW_STAGE(dim) + ((dim) == 256 ? 2 * (rows) * (dim) : KVQ_GPU_RAW_STAGE(dim)))

// ---- The host's side ----

struct kvq_gpu_attend_limits {
    uint32_t sessions, tiles, narrow_items, wide_items;
    uint32_t
        narrow_rows;   // of the largest narrow item, 8 or 16: so many, too, of sessions that share
    uint32_t counters; // one for each tile and KV head; alike in all that have one workspace
    uint64_t partial_rows;
};

// The layer that a batch is about; `book` has the host's struct with pointers of the device.
struct kvq_gpu_layer {
    const struct kvq_format *format;
    const struct kvq_shape *shape;
    const struct kvq_book *book; // NULL: none
    uint32_t wide_rows;          // kvq_gpu_attend_wide_rows of the device that it is for
    // Not 0: all calls are parts of one on the wide kernels, and have its splits of so many tokens,
    // however few rows they have themselves. As kvq_gpu_attend_wide_split says of the whole one.
    uint32_t wide_split;
};

// How many rows the device's blocks have shared memory for on the wide kernels of this head_dim:
// 128 (never at 256); 64, as on those of capability 8.6, 8.9 and 12.x at 128; or 0, as there at
// 256: then the narrow ones take all rows.
uint32_t kvq_gpu_attend_wide_rows(const struct kvq_gpu *gpu, uint32_t dim);

// What `wide_split` is of a layer whose calls are parts of this one: queries that are cut have the
// bits then that they have together. 0: the narrow kernels take it, and its parts as well.
uint32_t kvq_gpu_attend_wide_split(const struct kvq_gpu_layer *layer,
                                   const struct kvq_attend *call);

// What n attentions need. Sessions of `calls` have device pointers in pages, extras, pool, fresh
// views, q, out and lse; format, shape, path and book are not looked at. `shared` says how many of
// their first tokens, in whole blocks, lie in the same blocks as those of the call before; NULL:
// none. 0, or -1 with a sentence in text.
int kvq_gpu_attend_needs(const struct kvq_gpu_layer *layer, const struct kvq_attend *calls,
                         const uint64_t *shared, uint32_t n, struct kvq_gpu_attend_limits *needs,
                         char *text, size_t text_n);

// What one session of at most so many tokens and queries can need, whatever it has of both: with
// fewer of these it may have more splits.
int kvq_gpu_attend_bound(const struct kvq_gpu_layer *layer, uint64_t tokens, uint32_t queries,
                         struct kvq_gpu_attend_limits *needs, char *text, size_t text_n);

// How many bytes of a batch that was filled kernels may read: no more of it needs to be copied.
size_t kvq_gpu_attend_batch_used(const struct kvq_gpu_attend_limits *limits, const void *batch);

// How many of the first tokens of two sessions lie in the same packed blocks; pages are the host's.
uint64_t kvq_gpu_attend_common(const struct kvq_page *a, uint32_t n_a, const struct kvq_page *b,
                               uint32_t n_b);
// Query rows of the largest narrow item that this layer's sessions can make together.
uint32_t kvq_gpu_attend_stack_rows(const struct kvq_gpu_layer *layer);

size_t kvq_gpu_attend_batch_bytes(const struct kvq_gpu_attend_limits *limits);
size_t kvq_gpu_attend_workspace_bytes(const struct kvq_gpu_layer *layer,
                                      const struct kvq_gpu_attend_limits *limits);

// Writes the batch, kvq_gpu_attend_batch_bytes long, 16-byte aligned, on the host. 0, or -1 with a
// sentence in text if it does not fit the limits.
int kvq_gpu_attend_fill(const struct kvq_gpu_layer *layer, const struct kvq_attend *calls,
                        const uint64_t *shared, uint32_t n,
                        const struct kvq_gpu_attend_limits *limits, void *batch, char *text,
                        size_t text_n);

struct kvq_gpu_attend_launch {
    struct kvq_gpu_layer layer;
    struct kvq_gpu_attend_limits limits;
    kvq_gpu_ptr batch, workspace; // on the device
    uint32_t blocks;              // of the grid; 0: as many as can run at the same time
    struct kvq_gpu_stream *stream;
};
// One kernel for narrow items, if the limits have some, and one for wide ones.
int kvq_gpu_attend(const struct kvq_gpu *gpu, const struct kvq_gpu_attend_launch *launch,
                   char *text, size_t n);

#ifdef __cplusplus
}
#endif

#endif
