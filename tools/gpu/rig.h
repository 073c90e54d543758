// SPDX-License-Identifier: Apache-2.0
//
// The GPU kernels for tools/gpu/*.py: caches of random tokens in device memory, and the calls that
// are timed over them. A shared library with plain C functions, so that Python can run it in the
// same process, context and streams as the libraries it is compared with.
//
// Functions that can fail return 0, or -1 with a sentence in text. Pointers called `device` are
// addresses in device memory. One thread at a time.
#ifndef KVQ_TOOLS_GPU_RIG_H
#define KVQ_TOOLS_GPU_RIG_H

#include <stddef.h>
#include <stdint.h>

enum { RIG_TEXT = 1280 }; // bytes of every text

#define RIG_API __attribute__((visibility("default")))

struct rig;
struct rig_cache;

// The current context's device, or the first one. In a library built with the emulator, that.
RIG_API int rig_open(struct rig **rig, char *text);
RIG_API void rig_close(struct rig *rig);
RIG_API int rig_multiprocessors(const struct rig *rig);
RIG_API int rig_sync(const struct rig *rig, char *text);

// Caches of `sessions` sessions over `layers` layers, each layer in memory of its own. All hold the
// same few random blocks in different orders. Tokens are packed as the format's windows allow when
// a step has just ended.
struct rig_wish {
    const char *format;
    const uint32_t *tokens; // of each session
    uint32_t sessions, layers;
    uint32_t q_heads, kv_heads, head_dim;
    uint32_t dtype; // enum kvq_dtype, of raw tokens
    uint64_t seed;
};
RIG_API int rig_cache_make(struct rig *rig, const struct rig_wish *wish, struct rig_cache **cache,
                           char *text);
RIG_API void rig_cache_free(struct rig_cache *cache);

// What one attention over a layer reads: packed records and raw tokens, in bytes.
RIG_API uint64_t rig_cache_bytes(const struct rig_cache *cache);
RIG_API double rig_cache_bits(const struct rig_cache *cache);

// What attends: tensors of all sessions one after the other, [token][head][head_dim], contiguous.
struct rig_query {
    uint64_t q, out, lse;      // device; lse may be 0
    uint64_t fresh_k, fresh_v; // device; the step's own tokens, behind those in the cache
    uint32_t q_tokens;         // of each session
    uint32_t fresh_tokens;     // of each session; 0: the queries are the cache's newest tokens
    uint32_t dtype;            // enum kvq_dtype, of all but lse
};
// Prepares a layer's launches: to be done again when pointers change.
RIG_API int rig_cache_bind(struct rig_cache *cache, uint32_t layer, const struct rig_query *query,
                           char *text);

// One launch over a layer, in `stream` (the driver's handle; 0: default). blocks: size of the grid,
// 0: what fits the device. May be captured into a graph.
RIG_API int rig_attend(const struct rig_cache *cache, uint32_t layer, uint64_t stream,
                       uint32_t blocks, char *text);

// Tokens of one session's layer as the kernels see them: device fp32 [KV head][tokens][head_dim].
RIG_API int rig_read(const struct rig_cache *cache, uint32_t layer, uint32_t session, uint64_t k,
                     uint64_t v, uint64_t stream, char *text);

// Stores the fresh tokens of all sessions and layers that were bound with some, as at the end of a
// step; not into the caches, which stay what they are.
RIG_API int rig_store(struct rig_cache *cache, uint64_t stream, char *text);

// Packs one block of every session of every layer, as after 128 steps of decoding. Formats that
// keep more than blocks pack with what the cache has learned. *bytes: raw bytes read.
RIG_API int rig_pack(struct rig_cache *cache, uint64_t stream, uint64_t *bytes, char *text);

// What the device gives at best (kernels/cuda/probe.h). Each is one launch that may be timed.
enum rig_probe { RIG_PROBE_NOTHING, RIG_PROBE_MMA, RIG_PROBE_LOGIC };
// Reads n records; *blocks: how many blocks of threads run at a time.
RIG_API int rig_probe_read(struct rig *rig, uint64_t records, uint32_t record_bytes, uint32_t n,
                           uint64_t stream, uint32_t *blocks, char *text);
// Runs chains of so many instructions on all multiprocessors; *operations: multiplications and
// additions, or logic operations of threads. RIG_PROBE_NOTHING: a launch that does next to nothing.
RIG_API int rig_probe_rate(struct rig *rig, enum rig_probe probe, uint32_t rounds, uint64_t stream,
                           double *operations, char *text);
// *error: how far products of codes as fp16 subnormals are off, relative; 0 where they count in
// full, which the kernels rest on.
RIG_API int rig_probe_subnormals(struct rig *rig, double *error, char *text);

// Device memory, for callers without a library of their own.
RIG_API int rig_take(const struct rig *rig, uint64_t *device, size_t bytes, char *text);
RIG_API void rig_give(const struct rig *rig, uint64_t device);
RIG_API int rig_copy_in(const struct rig *rig, uint64_t device, const void *from, size_t bytes,
                        char *text);
RIG_API int rig_copy_out(const struct rig *rig, void *to, uint64_t device, size_t bytes,
                         char *text);

#endif
