// SPDX-License-Identifier: Apache-2.0
//
// Another engine's attention to time beside ours: any build of ggml, loaded at run time.
//
// Nothing of ggml is needed to build this. Of its public C interface the functions in the list
// below are looked up by name; all objects stay opaque, and the one structure handed over is
// ggml_init_params. The types' numbers are checked against the library's own names for them.
#ifndef KVQ_TOOLS_BENCH_PEER_GGML_H
#define KVQ_TOOLS_BENCH_PEER_GGML_H

#include <sched.h>

#include "tools/kvq-bench/cache.h"

// What is said where there is no library.
#define PEER_NONE                                                                                  \
    "no peer: --peer LIB times a ggml library beside us; docs/benchmarks/peers.md says how to "    \
    "build one"

// ---- The library (peer_ggml.c) ----

struct ggml_backend;
struct ggml_backend_buffer;
struct ggml_cgraph;
struct ggml_context;
struct ggml_tensor;

struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};

// Numbers of ggml's that never changed since its types have had names.
enum { GGML_F32 = 0, GGML_F16 = 1, GGML_Q4_0 = 2, GGML_Q8_0 = 8, GGML_I32 = 26 };
enum { GGML_MASK_ROWS = 64 }; // older versions want so many, however many queries there are

// X(what it returns, name, parameters)
#define PEER_FUNCTIONS(X)                                                                          \
    X(struct ggml_context *, ggml_init, (struct ggml_init_params params))                          \
    X(void, ggml_free, (struct ggml_context * ctx))                                                \
    X(size_t, ggml_tensor_overhead, (void))                                                        \
    X(size_t, ggml_graph_overhead_custom, (size_t size, bool grads))                               \
    X(size_t, ggml_row_size, (int type, int64_t n))                                                \
    X(const char *, ggml_type_name, (int type))                                                    \
    X(size_t, ggml_quantize_chunk,                                                                 \
      (int type, const float *from, void *to, int64_t start, int64_t rows, int64_t row_length,     \
       const float *importance))                                                                   \
    X(struct ggml_tensor *, ggml_new_tensor_4d,                                                    \
      (struct ggml_context * ctx, int type, int64_t n0, int64_t n1, int64_t n2, int64_t n3))       \
    X(struct ggml_tensor *, ggml_permute,                                                          \
      (struct ggml_context * ctx, struct ggml_tensor * a, int to0, int to1, int to2, int to3))     \
    X(struct ggml_tensor *, ggml_get_rows,                                                         \
      (struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * rows))              \
    X(struct ggml_tensor *, ggml_flash_attn_ext,                                                   \
      (struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k,                  \
       struct ggml_tensor * v, struct ggml_tensor * mask, float scale, float max_bias,             \
       float softcap))                                                                             \
    X(struct ggml_cgraph *, ggml_new_graph_custom,                                                 \
      (struct ggml_context * ctx, size_t size, bool grads))                                        \
    X(void, ggml_build_forward_expand, (struct ggml_cgraph * graph, struct ggml_tensor * tensor))  \
    X(struct ggml_backend_buffer *, ggml_backend_cpu_buffer_from_ptr, (void *data, size_t bytes))  \
    X(void, ggml_backend_tensor_alloc,                                                             \
      (struct ggml_backend_buffer * buffer, struct ggml_tensor * tensor, void *data))              \
    X(struct ggml_backend_buffer *, ggml_backend_alloc_ctx_tensors,                                \
      (struct ggml_context * ctx, struct ggml_backend * backend))                                  \
    X(void, ggml_backend_buffer_free, (struct ggml_backend_buffer * buffer))                       \
    X(void, ggml_backend_tensor_set,                                                               \
      (struct ggml_tensor * tensor, const void *data, size_t offset, size_t bytes))                \
    X(void, ggml_backend_tensor_get,                                                               \
      (const struct ggml_tensor *tensor, void *data, size_t offset, size_t bytes))                 \
    X(bool, ggml_backend_supports_op,                                                              \
      (struct ggml_backend * backend, const struct ggml_tensor *op))                               \
    X(int, ggml_backend_graph_compute,                                                             \
      (struct ggml_backend * backend, struct ggml_cgraph * graph))                                 \
    X(void, ggml_backend_free, (struct ggml_backend * backend))                                    \
    X(struct ggml_backend *, ggml_backend_cpu_init, (void))                                        \
    X(void, ggml_backend_cpu_set_n_threads, (struct ggml_backend * backend, int threads))

struct peer {
#define X(returns, name, parameters) returns(*name) parameters; // NOLINT: a type has no parentheses
    PEER_FUNCTIONS(X)
#undef X
    struct ggml_backend *backend;
    char version[64]; // "ggml 0.21.0", or "ggml" where the library does not say
    cpu_set_t cpus;   // that its threads may use, see peer_enter
};

// Loads what --peer names: libraries with commas between them, or folders that hold libggml.so, or
// libggml-base.so and libggml-cpu.so. Where a library needs others, they are looked for beside it.
// Call it before threads are pinned. False: complained; nothing is held then.
bool peer_open(struct peer *p, const char *libraries);

// The library stays loaded: threads of its own may still be running in it.
void peer_close(struct peer *p);

// Between these the caller may run on all CPUs, so that threads that the library starts are not
// bound to the caller's, and a crash is told to be the library's.
void peer_enter(struct peer *p);
void peer_leave(struct peer *p);

// ---- Its caches (peer_cache.c) ----

// How a layer of a cache lies in memory.
enum peer_layout {
    PEER_HEADS,  // every head's tokens in one piece: [kv_heads][tokens][head_dim]
    PEER_TOKENS, // every token's heads in one piece, as llama.cpp has it, and permuted for ggml
};

// The six caches that are timed: types by layouts.
enum { PEERS = 6 };
struct peer_kind {
    const char *name; // "ggml-f16"
    int type;
    const char *type_name; // ggml's
    enum peer_layout layout;
    const char *layout_name; // "heads", "tokens"
};
extern const struct peer_kind peer_kinds[PEERS]; // the first is what the column "vs peer" is about

// Layer after layer of attention over the tokens of `like`, in one graph, like one of ours
// larger than the last level cache, and like ours in huge pages.
struct peer_cache {
    struct peer *p;
    const struct peer_kind *kind;
    const struct bench_cache *like; // raw f16
    size_t row_bytes, side_bytes;   // of one head's token; of K or V of a layer
    size_t layer_bytes;             // what one attention reads
    uint32_t layers;
    struct bench_memory memory;
    uint8_t *rows[2]; // K and V of the random blocks, [kv_heads][BENCH_SOURCES][KVQ_BLOCK_TOKENS]
    uint8_t *mask, *data; // [layers][K and V], side_bytes each
    struct ggml_context *ctx;
    struct ggml_backend_buffer *ours, *theirs; // around `memory`; queries and outputs
    struct ggml_cgraph *graph;
    struct ggml_tensor **q, **out; // of each layer
};

// False: the library cannot, or there is no memory; complained, and nothing is held.
bool peer_cache_make(struct peer_cache *c, struct peer *p, const struct peer_kind *kind,
                     const struct bench_cache *like);
void peer_cache_free(struct peer_cache *c);

// Seconds a layer over all layers, on so many threads. NAN: the library reports an error.
double peer_cache_walk(struct peer_cache *c, unsigned threads);

// Relative error of its outputs as they stand, against double precision over the values that the
// library itself reads back from its cache: the worse of the first head of the first layer and
// the last head of the last. NAN: no memory, or the library reports an error.
double peer_cache_error(struct peer_cache *c);

#endif
