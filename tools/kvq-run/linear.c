// SPDX-License-Identifier: Apache-2.0
//
// Weights are widened panel by panel (a panel stays in the L2 cache) and multiplied by BLAS, so a
// checkpoint needs no second copy in memory.
#include "tools/kvq-run/linear.h"

#include <stdlib.h>
#include <string.h>

#include <cblas.h>

enum { PANEL_VALUES = 128 * 1024 }; // 512 KiB as fp32

int linear_scratch_open(struct linear_scratch *s, uint32_t widest_row, struct problem *p)
{
    s->values = widest_row > PANEL_VALUES ? widest_row : PANEL_VALUES;
    s->panel = aligned_alloc(64, (s->values * sizeof(float) + 63) / 64 * 64);
    return s->panel ? 0 : problem_set(p, RUN_FAILED, "out of memory");
}

void linear_scratch_close(struct linear_scratch *s)
{
    free(s->panel);
    s->panel = NULL;
}

static void widen_bf16(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

// The exponent is rebased by a multiplication, which gets denormals right too; infinity and NaN
// need their exponent set by hand.
static void widen_f16(const uint16_t *in, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t magnitude = (uint32_t)(in[i] & 0x7fff) << 13, bits;
        float f;
        memcpy(&f, &magnitude, sizeof f);
        f *= 0x1p112f;
        memcpy(&bits, &f, sizeof bits);
        if (magnitude >= 0x7c00u << 13)
            bits |= 0x7f800000;
        bits |= (uint32_t)(in[i] & 0x8000) << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

void tensor_widen(const struct tensor *t, uint64_t from, uint64_t n, float *out)
{
    if (t->dtype == TENSOR_BF16)
        widen_bf16((const uint16_t *)t->data + from, n, out);
    else if (t->dtype == TENSOR_F16)
        widen_f16((const uint16_t *)t->data + from, n, out);
    else
        memcpy(out, (const float *)t->data + from, n * sizeof(float));
}

static void panel_product(const float *w, uint32_t rows, uint32_t cols, const float *x,
                          uint32_t tokens, float *y, uint32_t stride)
{
    if (tokens == 1)
        cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)rows, (int)cols, 1, w, (int)cols, x, 1, 0, y,
                    1);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)tokens, (int)rows, (int)cols, 1,
                    x, (int)cols, w, (int)cols, 0, y, (int)stride);
}

void linear(struct linear_scratch *s, const struct tensor *w, const struct tensor *bias,
            const float *x, uint32_t tokens, float *y)
{
    uint32_t rows = (uint32_t)w->shape[0], cols = (uint32_t)w->shape[1];
    uint32_t step = (uint32_t)(s->values / cols);
    for (uint32_t r = 0; r < rows; r += step) {
        uint32_t n = rows - r < step ? rows - r : step;
        const float *panel = s->panel;
        if (w->dtype == TENSOR_F32)
            panel = (const float *)w->data + (uint64_t)r * cols;
        else
            tensor_widen(w, (uint64_t)r * cols, (uint64_t)n * cols, s->panel);
        panel_product(panel, n, cols, x, tokens, y + r, rows);
    }
    if (!bias)
        return;
    for (uint32_t r = 0; r < rows; r++) {
        float b;
        tensor_widen(bias, r, 1, &b);
        for (uint32_t t = 0; t < tokens; t++)
            y[(uint64_t)t * rows + r] += b;
    }
}
