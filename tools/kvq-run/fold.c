// SPDX-License-Identifier: Apache-2.0
//
// See fold.h. A row's values are added and subtracted by columns, and a column's by rows, with the
// same butterflies.
#include "tools/kvq-run/fold.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "tools/kvq-run/linear.h"

// dim vectors of n values, each `stride` behind the one before.
static void rotate(float *x, uint32_t dim, uint64_t n, uint64_t stride)
{
    float scale = 1.0f / sqrtf((float)dim);
    for (uint32_t half = 1; half < dim; half *= 2)
        for (uint32_t i = 0; i < dim; i++) {
            if (i & half) // the other one of a pair
                continue;
            float *a = x + i * stride, *b = a + half * stride;
            for (uint64_t j = 0; j < n; j++) {
                float sum = a[j] + b[j], difference = a[j] - b[j];
                a[j] = sum;
                b[j] = difference;
            }
        }
    for (uint32_t i = 0; i < dim; i++)
        for (uint64_t j = 0; j < n; j++)
            x[i * stride + j] *= scale;
}

static int widen(const struct tensor *from, struct tensor *out, struct problem *p)
{
    uint64_t n = from->shape[0] * (from->dims == 2 ? from->shape[1] : 1);
    float *x = aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64);
    *out = *from;
    out->data = x;
    out->dtype = TENSOR_F32;
    if (!x)
        return problem_set(p, RUN_FAILED, "out of memory");
    tensor_widen(from, 0, n, x);
    return 0;
}

int fold_rows(const struct tensor *from, uint32_t dim, struct tensor *out, struct problem *p)
{
    assert(dim && !(dim & (dim - 1)) && from->shape[0] % dim == 0);
    uint64_t columns = from->dims == 2 ? from->shape[1] : 1;
    if (widen(from, out, p))
        return -1;
    float *x = (float *)(uintptr_t)out->data;
    for (uint64_t row = 0; row < from->shape[0]; row += dim)
        rotate(x + row * columns, dim, columns, columns);
    return 0;
}

int fold_columns(const struct tensor *from, uint32_t dim, struct tensor *out, struct problem *p)
{
    assert(dim && !(dim & (dim - 1)) && from->dims == 2 && from->shape[1] % dim == 0);
    if (widen(from, out, p))
        return -1;
    float *x = (float *)(uintptr_t)out->data;
    for (uint64_t at = 0; at < from->shape[0] * from->shape[1]; at += dim)
        rotate(x + at, dim, 1, 1);
    return 0;
}

void fold_free(struct tensor *out)
{
    free((void *)(uintptr_t)out->data);
    out->data = NULL;
}
