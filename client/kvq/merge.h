/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/merge.h: merging two attentions over disjoint keys. For engines that attend to some tokens
 * themselves (KVQ_PAST_ONLY).
 */
#ifndef KVQ_PUBLIC_MERGE_H
#define KVQ_PUBLIC_MERGE_H

#include "error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Merges two attentions over disjoint keys by their LSE: rows x dim fp32, lse rows. Outputs may
 * alias either input. A side with lse -inf counts for nothing. Pure function. */
KVQ_API void kvq_merge_states(const float *out_a, const float *lse_a, const float *out_b,
                              const float *lse_b, float *out, float *lse, size_t rows, size_t dim);

#ifdef __cplusplus
}
#endif

#endif
