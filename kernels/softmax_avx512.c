// SPDX-License-Identifier: Apache-2.0
//
// The softmax step and the soft-cap of a chunk, AVX-512.
//
// A row of 512 logits is 32 registers' worth: one pass for the maximum with 4 chains, one for
// the powers of two with the same, so that neither waits for its own additions. Rows that see
// everything, all but a few in practice, take loops without masks.
#include "kernels/avx512.h"

enum { CHAINS = 2 };

// Lanes of tokens t to t + 15 that lie in [lo, hi).
KVQ__INLINE __mmask16 seen(int32_t t, int32_t lo, int32_t hi)
{
    int32_t from = lo - t, to = hi - t;
    from = from < 0 ? 0 : from > 16 ? 16 : from;
    to = to < 0 ? 0 : to > 16 ? 16 : to;
    return (__mmask16)(to > from ? (0xffffu << from) & (0xffffu >> (16 - to)) : 0);
}

KVQ__INLINE float row_max(const float *x, int32_t n, int32_t lo, int32_t hi, bool masked)
{
    __m512 low = _mm512_set1_ps(-INFINITY), top[CHAINS] = {low, low};
    for (int32_t t = 0; t < n; t += 16 * CHAINS)
        for (int32_t i = 0; i < CHAINS; i++) {
            int32_t at = t + 16 * i;
            __m512 y = masked ? _mm512_mask_loadu_ps(low, seen(at, lo, hi), x + at)
                              : _mm512_loadu_ps(x + at);
            top[i] = _mm512_max_ps(y, top[i]); // max_ps returns the second if one is NaN
        }
    return _mm512_cvtss_f32(kvq__max_all(_mm512_max_ps(top[0], top[1])));
}

KVQ__INLINE float row_powers(float *x, int32_t n, int32_t lo, int32_t hi, float max, bool masked)
{
    __m512 m = _mm512_set1_ps(max), sum[CHAINS] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int32_t t = 0; t < n; t += 16 * CHAINS)
        for (int32_t i = 0; i < CHAINS; i++) {
            int32_t at = t + 16 * i;
            __m512 p = kvq__exp2_ps(_mm512_sub_ps(_mm512_loadu_ps(x + at), m));
            p = masked ? _mm512_maskz_mov_ps(seen(at, lo, hi), p) : p;
            sum[i] = _mm512_add_ps(sum[i], p);
            _mm512_storeu_ps(x + at, p);
        }
    return _mm512_cvtss_f32(kvq__sum_all(_mm512_add_ps(sum[0], sum[1])));
}

static float softmax_row(float *x, int32_t n, int32_t lo, int32_t hi, float *m, float *l)
{
    bool masked = lo > 0 || hi < n;
    float max = masked ? row_max(x, n, lo, hi, true) : row_max(x, n, lo, hi, false);
    max = max > *m ? max : *m;
    if (max == -INFINITY && !kvq__sees_nan(x, lo, hi)) {
        memset(x, 0, (size_t)n * sizeof *x);
        return 1.0f;
    }
    float factor = kvq__exp2(*m - max);
    float sum = masked ? row_powers(x, n, lo, hi, max, true) : row_powers(x, n, lo, hi, max, false);
    if (isunordered(max, sum))
        return kvq__spoil_row(x, n, m, l);
    *m = max;
    *l = *l * factor + sum;
    return factor;
}

static void softmax_avx512(struct kvq__tile *tile, uint32_t n)
{
    for (uint32_t r = 0; r < tile->rows; r++)
        tile->factor[r] = softmax_row(tile->logits + (size_t)r * KVQ__LOGITS_STRIDE, (int32_t)n,
                                      tile->lo[r], tile->hi[r], &tile->m[r], &tile->l[r]);
}

void kvq__init_avx512_softmax(struct kvq_kernels *k)
{
    k->softmax = softmax_avx512;
}
