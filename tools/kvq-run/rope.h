// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding, halves paired as Hugging Face does (i with i + head_dim / 2).
#ifndef KVQ_RUN_ROPE_H
#define KVQ_RUN_ROPE_H

#include <stdint.h>

#include "tools/kvq-run/config.h"

// Radians per position for each of head_dim / 2 pairs, scaling applied.
void rope_frequencies(const struct rope_config *r, uint32_t head_dim, float *freq);

// cos and sin for `n` positions from `first`, times the kind's attention factor.
void rope_tables(const struct rope_config *r, const float *freq, uint32_t half, uint64_t first,
                 uint32_t n, float *cos_out, float *sin_out);

// Rotates x[heads][2 * half] in place.
void rope_apply(float *x, uint32_t heads, uint32_t half, const float *c, const float *s);

#endif
