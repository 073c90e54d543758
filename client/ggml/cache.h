// SPDX-License-Identifier: Apache-2.0
//
// cache.h: one KV cache of llama.cpp, held by kvqd.
//
// llama.cpp hands over a forward layer by layer: rows of K, rows of V, then attention. The first
// layer's rows begin a step, the last layer's attention ends it:
//
//     IDLE --rows of layer 0--> GIVEN --attention of layer 0--> UNDER WAY --of the last--> IDLE
//
// A failure at any place leads back to IDLE, and leaves every session as it was before the step.
// Everything here is used by the thread that computes a context's graph, and by no other.
#ifndef KVQ_GGML_CACHE_H
#define KVQ_GGML_CACHE_H

#include "client/ggml/daemon.h"
#include "proto/limits.h"

struct ggml_tensor;

enum {
    KVQ_GGML_LAYERS = KVQ_MAX_LAYERS, // of a cache
    KVQ_GGML_STREAMS = 64,            // sequences of a cache that llama.cpp keeps apart
};

// A layer of a cache, as llama.cpp's graphs show it.
struct kvq_ggml_layer {
    const struct ggml_tensor *k, *v; // llama.cpp's own tensors [streams][cells][heads * dim]
    struct kvq_layer shape;
    int number; // llama.cpp's
};

struct kvq_ggml_cache;

// A cache of these layers, which are copied. Opens nothing yet. NULL: no memory.
struct kvq_ggml_cache *kvq_ggml_cache_new(struct kvq_ggml_daemon *daemon,
                                          const struct kvq_ggml_layer *layers, uint32_t n);
// Closes its sessions. Accepts NULL.
void kvq_ggml_cache_free(struct kvq_ggml_cache *cache);

// Which of its layers has this tensor as K (or V, then *is_v), or -1.
int kvq_ggml_cache_find(const struct kvq_ggml_cache *cache, const struct ggml_tensor *tensor,
                        bool *is_v);

// Takes the rows of a SET_ROWS into a layer's K or V. False: refused, with a line on stderr.
bool kvq_ggml_cache_rows(struct kvq_ggml_cache *cache, uint32_t layer, bool is_v,
                         const struct ggml_tensor *node);

// Computes a layer's FLASH_ATTN_EXT. False: refused, with a line on stderr.
bool kvq_ggml_cache_attend(struct kvq_ggml_cache *cache, uint32_t layer, struct ggml_tensor *node);

// llama.cpp has changed the cache by itself: what goes on over it is refused until it begins anew.
void kvq_ggml_cache_lose(struct kvq_ggml_cache *cache);

// What a FLASH_ATTN_EXT says of its layer's shape, scale and soft-cap.
struct kvq_layer kvq_ggml_shape(const struct ggml_tensor *attention);
// Whether it has what kvqd does not serve: NULL, "ALiBi" or "attention sinks".
const char *kvq_ggml_extra(const struct ggml_tensor *attention);

#endif
