// SPDX-License-Identifier: Apache-2.0
//
// Products of activations (fp32) with weights that stay in their file's dtype.
#ifndef KVQ_RUN_LINEAR_H
#define KVQ_RUN_LINEAR_H

#include <stdint.h>

#include "tools/kvq-run/tensors.h"

// Panel of weight rows widened to fp32 at a time; one per thread of use.
struct linear_scratch {
    float *panel;
    uint64_t values;
};

int linear_scratch_open(struct linear_scratch *s, uint32_t widest_row, struct problem *p);
void linear_scratch_close(struct linear_scratch *s);

// y[tokens][rows] = x[tokens][cols] * w^T + bias, w is [rows][cols]; bias may be NULL. Rows of x
// and y are contiguous. The product is BLAS's sgemm on panels of w.
void linear(struct linear_scratch *s, const struct tensor *w, const struct tensor *bias,
            const float *x, uint32_t tokens, float *y);

// Values [from, from + n) of a tensor as fp32.
void tensor_widen(const struct tensor *t, uint64_t from, uint64_t n, float *out);

#endif
