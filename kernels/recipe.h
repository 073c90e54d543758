// SPDX-License-Identifier: Apache-2.0
//
// A format resolved for one shape, as plain numbers in one piece of memory: for kernels that cannot
// reach the table of formats and its strings, as on a GPU.
#ifndef KVQ_KERNELS_RECIPE_H
#define KVQ_KERNELS_RECIPE_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVQ_MAX_LEVELS = 16 };

// How one side, K or V, becomes codes, and where they stand.
struct kvq_recipe_side {
    struct kvq_side row;             // group resolved: channels or tokens per scale
    uint16_t span;                   // tokens that are quantized together: 32, 64 or 128
    uint8_t rotation;                // enum kvq_rotation
    uint8_t has_zeros;               // the record has a zero for each scale
    float levels[2][KVQ_MAX_LEVELS]; // Lloyd-Max; [1] of the wide quarter
};

struct kvq_recipe {
    struct kvq_layout layout;        // of packed records; only record_bytes if the format is raw
    struct kvq_raw_layout raw;       // of raw blocks
    struct kvq_extras_layout extras; // record_bytes 0 if the format has none
    struct kvq_recipe_side k, v;
    uint32_t signs[2][8]; // before and after the signed rotation, see layout.h
    uint32_t dim, kv_heads;
    uint32_t unit_tokens, sink_tokens;
    uint32_t outliers, pool_room;     // pool_room: outliers and displaced ones
    uint8_t is_raw, dtype;            // dtype of raw blocks, enum kvq_dtype
    uint8_t k_channel, k_token_scale; // enum kvq_k_channel, enum kvq_token_scale
};

// The shape must have passed kvq_shape_check.
struct kvq_recipe kvq_recipe_of(const struct kvq_format *f, const struct kvq_shape *s);

// Parts that a unit falls into, each of which can be packed on its own: K's spans, then V's.
KVQ_INLINE uint32_t kvq_recipe_parts(const struct kvq_recipe *r)
{
    return r->unit_tokens / r->k.span + r->unit_tokens / r->v.span;
}

#ifdef __cplusplus
}
#endif

#endif
