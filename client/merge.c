// SPDX-License-Identifier: Apache-2.0
//
// Merging two attentions over disjoint keys by their log-sum-exp.
#include "client/kvq.h"
#include "kernels/kernels.h"

void kvq_merge_states(const float *out_a, const float *lse_a, const float *out_b,
                      const float *lse_b, float *out, float *lse, size_t rows, size_t dim)
{
    kvq_merge_rows(out_a, lse_a, out_b, lse_b, out, lse, rows, dim);
}
