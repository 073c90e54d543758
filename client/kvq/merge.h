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

/* Merges two attentions over disjoint keys by their log-sum-exp (LSE). out_a, out_b and out are
 * fp32 [rows][dim]; lse_a, lse_b and lse are fp32 [rows]. out and lse may alias either input. A row
 * with LSE -inf saw no key and adds nothing. Pure function, for any thread. */
KVQ_API void kvq_merge_states(const float *out_a, const float *lse_a, const float *out_b,
                              const float *lse_b, float *out, float *lse, size_t rows, size_t dim);

#ifdef __cplusplus
}
#endif

#endif
