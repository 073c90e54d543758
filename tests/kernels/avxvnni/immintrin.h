// SPDX-License-Identifier: Apache-2.0
//
// Stands in the place of the compiler's immintrin.h where test_avxvnni compiles AVX2's fast path:
// AVX-VNNI's vpdpbusd in plain C, for CPUs that have none.
#ifndef KVQ_TESTS_KERNELS_AVXVNNI_IMMINTRIN_H
#define KVQ_TESTS_KERNELS_AVXVNNI_IMMINTRIN_H

#include_next <immintrin.h>
#include <stdint.h>
#include <string.h>

__attribute__((target("avx2"))) static inline __m256i kvt_dpbusd(__m256i acc, __m256i u8,
                                                                 __m256i s8)
{
    int32_t sum[8];
    uint8_t a[32];
    int8_t b[32];
    memcpy(sum, &acc, sizeof sum);
    memcpy(a, &u8, sizeof a);
    memcpy(b, &s8, sizeof b);
    for (int i = 0; i < 32; i++)
        sum[i / 4] += a[i] * b[i];
    memcpy(&acc, sum, sizeof acc);
    return acc;
}

#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 kvt_dpbusd

#endif
