// SPDX-License-Identifier: Apache-2.0
//
// Merging two attentions over disjoint keys by their log-sum-exp.
#include <math.h>
#include <string.h>

#include "client/kvq.h"

static void merge_row(const float *a, float lse_a, const float *b, float lse_b, float *out,
                      float *lse, size_t dim)
{
    // A side that saw nothing may hold anything in its output: it is not even multiplied by 0.
    if (lse_a == -INFINITY || lse_b == -INFINITY) {
        const float *side = lse_a == -INFINITY ? b : a;
        float side_lse = lse_a == -INFINITY ? lse_b : lse_a;
        for (size_t i = 0; i < dim; i++)
            out[i] = side_lse == -INFINITY ? 0 : side[i];
        *lse = side_lse;
        return;
    }
    float top = lse_a > lse_b ? lse_a : lse_b;
    float weight_a = expf(lse_a - top), weight_b = expf(lse_b - top);
    float sum = weight_a + weight_b;
    for (size_t i = 0; i < dim; i++)
        out[i] = (a[i] * weight_a + b[i] * weight_b) / sum;
    *lse = top + logf(sum);
}

void kvq_merge_states(const float *out_a, const float *lse_a, const float *out_b,
                      const float *lse_b, float *out, float *lse, size_t rows, size_t dim)
{
    for (size_t r = 0; r < rows; r++)
        merge_row(out_a + r * dim, lse_a[r], out_b + r * dim, lse_b[r], out + r * dim, &lse[r],
                  dim);
}
