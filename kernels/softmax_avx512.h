// SPDX-License-Identifier: Apache-2.0
//
// The softmax step of a row, AVX-512.
//
// A row of 512 logits is 32 registers' worth: one pass for the maximum with 2 chains, one for the
// powers of two with the same, so that neither waits for its own additions. Rows that see
// everything, all but a few in practice, take loops without masks.
#ifndef KVQ_SOFTMAX_AVX512_H
#define KVQ_SOFTMAX_AVX512_H

#include <immintrin.h>

#include "kernels/avx512.h"

enum { KVQ__SOFTMAX_CHAINS = 2 };
static_assert(16 * KVQ__SOFTMAX_CHAINS == KVQ_GROUP_TOKENS, "a step of the loops is a group");

// A second reader of the weights of some groups, which rounds them to bf16. `take` gets the 32
// weights of a group, the first 16 in a.
struct kvq__taker {
    void (*take)(void *to, uint32_t group, __m512 a, __m512 b);
    void *to;
    uint32_t groups; // of the chunk, a bit each; 0 where there is no taker
};

// Lanes of tokens t to t + 15 that lie in [lo, hi).
KVQ__INLINE __mmask16 kvq__seen(int32_t t, int32_t lo, int32_t hi)
{
    int32_t from = lo - t, to = hi - t;
    from = from < 0 ? 0 : from > 16 ? 16 : from;
    to = to < 0 ? 0 : to > 16 ? 16 : to;
    return (__mmask16)(to > from ? (0xffffu << from) & (0xffffu >> (16 - to)) : 0);
}

KVQ__INLINE float kvq__row_max(const float *x, int32_t n, int32_t lo, int32_t hi, bool masked)
{
    __m512 low = _mm512_set1_ps(-INFINITY), top[KVQ__SOFTMAX_CHAINS] = {low, low};
    for (int32_t t = 0; t < n; t += 16 * KVQ__SOFTMAX_CHAINS)
        for (int32_t i = 0; i < KVQ__SOFTMAX_CHAINS; i++) {
            int32_t at = t + 16 * i;
            __m512 y = masked ? _mm512_mask_loadu_ps(low, kvq__seen(at, lo, hi), x + at)
                              : _mm512_loadu_ps(x + at);
            top[i] = _mm512_max_ps(y, top[i]); // max_ps returns the second if one is NaN
        }
    return _mm512_cvtss_f32(kvq__max_all(_mm512_max_ps(top[0], top[1])));
}

KVQ__INLINE float kvq__row_powers(float *x, int32_t n, int32_t lo, int32_t hi, float max,
                                  bool masked, struct kvq__taker taker)
{
    __m512 m = _mm512_set1_ps(max),
           sum[KVQ__SOFTMAX_CHAINS] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int32_t t = 0; t < n; t += 16 * KVQ__SOFTMAX_CHAINS) {
        __m512 p[KVQ__SOFTMAX_CHAINS];
        uint32_t group = (uint32_t)t / KVQ_GROUP_TOKENS;
        bool takes = taker.groups >> group & 1u;
        for (int32_t i = 0; i < KVQ__SOFTMAX_CHAINS; i++) {
            int32_t at = t + 16 * i;
            __m512 y = _mm512_sub_ps(_mm512_loadu_ps(x + at), m);
            p[i] = takes ? kvq__exp2_rough(y) : kvq__exp2_ps(y);
            p[i] = masked ? _mm512_maskz_mov_ps(kvq__seen(at, lo, hi), p[i]) : p[i];
            sum[i] = _mm512_add_ps(sum[i], p[i]);
            _mm512_storeu_ps(x + at, p[i]);
        }
        if (takes)
            taker.take(taker.to, group, p[0], p[1]);
    }
    return _mm512_cvtss_f32(kvq__sum_all(_mm512_add_ps(sum[0], sum[1])));
}

// The weights of a row are 0.
KVQ__INLINE float kvq__take_none(struct kvq__taker taker, float factor)
{
    for (uint32_t left = taker.groups; left; left &= left - 1)
        taker.take(taker.to, (uint32_t)__builtin_ctz(left), _mm512_setzero_ps(),
                   _mm512_setzero_ps());
    return factor;
}

// As kvq_kernels.softmax, for one row: weights take the place of its n logits, and what old sums
// are to be multiplied with is returned. Those of the taker's groups are no better than bf16.
KVQ__INLINE float kvq__softmax_row(float *x, int32_t n, int32_t lo, int32_t hi, float *m, float *l,
                                   struct kvq__taker taker)
{
    bool masked = lo > 0 || hi < n;
    float max = masked ? kvq__row_max(x, n, lo, hi, true) : kvq__row_max(x, n, lo, hi, false);
    max = max > *m ? max : *m;
    if (max == -INFINITY && !kvq__sees_nan(x, lo, hi)) {
        memset(x, 0, (size_t)n * sizeof *x);
        return kvq__take_none(taker, 1.0f);
    }
    float factor = kvq__exp2(*m - max);
    float sum = masked ? kvq__row_powers(x, n, lo, hi, max, true, taker)
                       : kvq__row_powers(x, n, lo, hi, max, false, taker);
    if (isunordered(max, sum))
        return kvq__take_none(taker, kvq__spoil_row(x, n, m, l));
    *m = max;
    *l = *l * factor + sum;
    return factor;
}

#endif
