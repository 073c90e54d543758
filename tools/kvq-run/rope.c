// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding and its scalings: linear (Chen 2023), llama3 (Llama 3.1), YaRN (Peng 2023).
#include "tools/kvq-run/rope.h"

#include <math.h>

static double llama3(const struct rope_config *r, double f)
{
    double wavelength = 2 * M_PI / f;
    double low = r->original_positions / r->low_freq_factor;
    double high = r->original_positions / r->high_freq_factor;
    if (wavelength < high)
        return f;
    if (wavelength > low)
        return f / r->factor;
    double smooth = (r->original_positions / wavelength - r->low_freq_factor) /
                    (r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * f / r->factor + smooth * f;
}

// The pair whose wave turns `rotations` times over the original context.
static double yarn_pair(const struct rope_config *r, double rotations, uint32_t head_dim)
{
    return head_dim * log(r->original_positions / (rotations * 2 * M_PI)) / (2 * log(r->theta));
}

static double yarn(const struct rope_config *r, uint32_t head_dim, uint32_t i, double f)
{
    double low = fmax(floor(yarn_pair(r, r->beta_fast, head_dim)), 0);
    double high = fmin(ceil(yarn_pair(r, r->beta_slow, head_dim)), head_dim - 1);
    double span = high > low ? high - low : 0.001;
    double ramp = fmin(fmax((i - low) / span, 0), 1);
    return ramp * f / r->factor + (1 - ramp) * f;
}

void rope_frequencies(const struct rope_config *r, uint32_t head_dim, float *freq)
{
    for (uint32_t i = 0; i < head_dim / 2; i++) {
        double f = pow(r->theta, -2.0 * i / head_dim);
        if (r->kind == ROPE_LINEAR)
            f /= r->factor;
        else if (r->kind == ROPE_LLAMA3)
            f = llama3(r, f);
        else if (r->kind == ROPE_YARN)
            f = yarn(r, head_dim, i, f);
        freq[i] = (float)f;
    }
}

void rope_tables(const struct rope_config *r, const float *freq, uint32_t half, uint64_t first,
                 uint32_t n, float *cos_out, float *sin_out)
{
    double m = r->kind == ROPE_YARN ? r->attention_factor : 1;
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t i = 0; i < half; i++) {
            double angle = (double)freq[i] * (double)(first + t);
            cos_out[(uint64_t)t * half + i] = (float)(m * cos(angle));
            sin_out[(uint64_t)t * half + i] = (float)(m * sin(angle));
        }
}

void rope_apply(float *x, uint32_t heads, uint32_t half, const float *c, const float *s)
{
    for (uint32_t h = 0; h < heads; h++, x += 2 * half)
        for (uint32_t i = 0; i < half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = a * c[i] - b * s[i];
            x[i + half] = b * c[i] + a * s[i];
        }
}
