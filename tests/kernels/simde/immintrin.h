// SPDX-License-Identifier: Apache-2.0
//
// AVX-512 in software, for tests alone: the kernels' *_avx512.c include this file instead of the
// compiler's header of the same name. SIMDe (Debian's libsimde-dev) has most of the intrinsics.
// Those that the kernels use and its version 0.7.4 lacks stand below, lane by lane.
#ifndef KVQ_TESTS_SIMDE_IMMINTRIN_H
#define KVQ_TESTS_SIMDE_IMMINTRIN_H

#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define KVQ__SHIM static inline __attribute__((always_inline))

// A register by its parts. Shims read and write registers through these alone.
union kvq__lanes512 {
    float f32[16];
    int32_t i32[16];
    uint16_t u16[32];
    uint64_t u64[8];
    __m256 half[2];
    __m256i halfi[2];
    __m128 quarter[4];
    simde__m512 ps;
    simde__m512i si;
};

union kvq__lanes256 {
    uint8_t u8[32];
    uint16_t u16[16];
    __m128i half[2];
    __m256i si;
};

// ---- Loading and storing ----

KVQ__SHIM __m256i kvq__maskz_loadu_epi16(uint16_t mask, const void *p)
{
    union kvq__lanes256 x = {{0}};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            memcpy(&x.u16[i], (const uint16_t *)p + i, sizeof x.u16[i]);
    return x.si;
}
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16(mask, p) kvq__maskz_loadu_epi16(mask, p)

KVQ__SHIM simde__m512 kvq__mask_loadu_ps(simde__m512 from, uint16_t mask, const void *p)
{
    union kvq__lanes512 x = {.ps = from};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            memcpy(&x.f32[i], (const float *)p + i, sizeof x.f32[i]);
    return x.ps;
}
#undef _mm512_mask_loadu_ps
#define _mm512_mask_loadu_ps(from, mask, p) kvq__mask_loadu_ps(from, mask, p)
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(mask, p) kvq__mask_loadu_ps(simde_mm512_setzero_ps(), mask, p)

KVQ__SHIM void kvq__mask_storeu_ps(void *p, uint16_t mask, simde__m512 from)
{
    union kvq__lanes512 x = {.ps = from};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            memcpy((float *)p + i, &x.f32[i], sizeof x.f32[i]);
}
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(p, mask, from) kvq__mask_storeu_ps(p, mask, from)

KVQ__SHIM simde__m512i kvq__i32gather(simde__m512i at, const void *p, int scale)
{
    union kvq__lanes512 x = {.si = at};
    for (int i = 0; i < 16; i++)
        memcpy(&x.i32[i], (const char *)p + (ptrdiff_t)x.i32[i] * scale, sizeof x.i32[i]);
    return x.si;
}
#undef _mm512_i32gather_epi32
#define _mm512_i32gather_epi32(at, p, scale) kvq__i32gather(at, p, scale)
#undef _mm512_i32gather_ps
#define _mm512_i32gather_ps(at, p, scale) simde_mm512_castsi512_ps(kvq__i32gather(at, p, scale))

// ---- From one type to another: by halves, with AVX2 ----

KVQ__SHIM simde__m512 kvq__cvtepi32_ps(simde__m512i from)
{
    union kvq__lanes512 x = {.si = from};
    for (int i = 0; i < 2; i++)
        x.half[i] = _mm256_cvtepi32_ps(x.halfi[i]);
    return x.ps;
}
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(x) kvq__cvtepi32_ps(x)

KVQ__SHIM simde__m512i kvq__cvtps_epi32(simde__m512 from)
{
    union kvq__lanes512 x = {.ps = from};
    for (int i = 0; i < 2; i++)
        x.halfi[i] = _mm256_cvtps_epi32(x.half[i]);
    return x.si;
}
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(x) kvq__cvtps_epi32(x)

KVQ__SHIM __m128i kvq__cvtepi32_epi8(simde__m512i from)
{
    union kvq__lanes512 x = {.si = from};
    union kvq__lanes256 h;
    for (int i = 0; i < 16; i++)
        h.u8[i] = (uint8_t)x.i32[i];
    return h.half[0];
}
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8(x) kvq__cvtepi32_epi8(x)

KVQ__SHIM simde__m512 kvq__cvtph_ps(__m256i from)
{
    union kvq__lanes256 h = {.si = from};
    union kvq__lanes512 x;
    for (int i = 0; i < 2; i++)
        x.half[i] = _mm256_cvtph_ps(h.half[i]);
    return x.ps;
}
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(x) kvq__cvtph_ps(x)

// Rounding is always to nearest even in the kernels.
KVQ__SHIM __m256i kvq__cvtps_ph(simde__m512 from)
{
    union kvq__lanes512 x = {.ps = from};
    union kvq__lanes256 h;
    for (int i = 0; i < 2; i++)
        h.half[i] = _mm256_cvtps_ph(x.half[i], _MM_FROUND_TO_NEAREST_INT);
    return h.si;
}
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding)                                                               \
    __extension__({                                                                                \
        _Static_assert(((rounding) & ~_MM_FROUND_NO_EXC) == _MM_FROUND_TO_NEAREST_INT, "nearest"); \
        kvq__cvtps_ph(x);                                                                          \
    })

KVQ__SHIM simde__m512i kvq__cvtepu16_epi32(__m256i from)
{
    union kvq__lanes256 h = {.si = from};
    union kvq__lanes512 x;
    for (int i = 0; i < 2; i++)
        x.halfi[i] = _mm256_cvtepu16_epi32(h.half[i]);
    return x.si;
}
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(x) kvq__cvtepu16_epi32(x)

KVQ__SHIM simde__m512i kvq__cvtepu8_epi16(__m256i from)
{
    union kvq__lanes256 h = {.si = from};
    union kvq__lanes512 x;
    for (int i = 0; i < 2; i++)
        x.halfi[i] = _mm256_cvtepu8_epi16(h.half[i]);
    return x.si;
}
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16(x) kvq__cvtepu8_epi16(x)

KVQ__SHIM simde__m512i kvq__cvtepu8_epi32(__m128i from)
{
    union kvq__lanes512 x;
    x.halfi[0] = _mm256_cvtepu8_epi32(from);
    x.halfi[1] = _mm256_cvtepu8_epi32(_mm_srli_si128(from, 8));
    return x.si;
}
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(x) kvq__cvtepu8_epi32(x)

KVQ__SHIM simde__m512i kvq__cvtepu8_epi64(__m128i from)
{
    union kvq__lanes512 x;
    x.halfi[0] = _mm256_cvtepu8_epi64(from);
    x.halfi[1] = _mm256_cvtepu8_epi64(_mm_srli_si128(from, 4));
    return x.si;
}
#undef _mm512_cvtepu8_epi64
#define _mm512_cvtepu8_epi64(x) kvq__cvtepu8_epi64(x)

KVQ__SHIM float kvq__cvtss_f32(simde__m512 from)
{
    union kvq__lanes512 x = {.ps = from};
    return x.f32[0];
}
#undef _mm512_cvtss_f32
#define _mm512_cvtss_f32(x) kvq__cvtss_f32(x)

// ---- Arithmetic ----

// x less x rounded as `how` says, to whole numbers. Infinity gives 0.
KVQ__SHIM simde__m512 kvq__reduce_ps(simde__m512 from)
{
    union kvq__lanes512 x = {.ps = from};
    for (int i = 0; i < 16; i++)
        x.f32[i] = isinf(x.f32[i]) ? 0.0f : x.f32[i] - floorf(x.f32[i]);
    return x.ps;
}
#undef _mm512_reduce_ps
#define _mm512_reduce_ps(x, how)                                                                   \
    __extension__({                                                                                \
        _Static_assert((how) == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), "downwards");         \
        kvq__reduce_ps(x);                                                                         \
    })

KVQ__SHIM simde__m512i kvq__srai_epi32(simde__m512i from, int bits)
{
    union kvq__lanes512 x = {.si = from};
    for (int i = 0; i < 2; i++)
        x.halfi[i] = _mm256_srai_epi32(x.halfi[i], bits);
    return x.si;
}
#undef _mm512_srai_epi32
#define _mm512_srai_epi32(x, bits) kvq__srai_epi32(x, bits)

// ---- Moving lanes ----

KVQ__SHIM __m256 kvq__extractf32x8(simde__m512 from, int half)
{
    union kvq__lanes512 x = {.ps = from};
    return x.half[half];
}
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(x, half) kvq__extractf32x8(x, half)

KVQ__SHIM simde__m512 kvq__permute_ps(simde__m512 from, int order)
{
    union kvq__lanes512 x = {.ps = from}, y;
    for (int i = 0; i < 16; i++)
        y.f32[i] = x.f32[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
    return y.ps;
}
#undef _mm512_permute_ps
#define _mm512_permute_ps(x, order) kvq__permute_ps(x, order)

KVQ__SHIM simde__m512 kvq__shuffle_f32x4(simde__m512 a, simde__m512 b, int order)
{
    union kvq__lanes512 x = {.ps = a}, y = {.ps = b}, z;
    for (int i = 0; i < 4; i++)
        z.quarter[i] = (i < 2 ? x : y).quarter[order >> 2 * i & 3];
    return z.ps;
}
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, order) kvq__shuffle_f32x4(a, b, order)
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2(a, b, order)                                                          \
    simde_mm512_castps_si512(                                                                      \
        kvq__shuffle_f32x4(simde_mm512_castsi512_ps(a), simde_mm512_castsi512_ps(b), order))
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4(a, b, order) _mm512_shuffle_i64x2(a, b, order)

// ---- bf16 ----

// To nearest even; subnormal numbers to 0, NaN to a quiet one.
KVQ__SHIM uint16_t kvq__round_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x))
        return (uint16_t)(bits >> 16 | 0x40);
    if ((bits & 0x7f800000) == 0)
        return (uint16_t)(bits >> 16 & 0x8000);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

KVQ__SHIM simde__m512i kvq__cvtne2ps_pbh(simde__m512 above, simde__m512 below)
{
    union kvq__lanes512 a = {.ps = above}, b = {.ps = below}, x;
    for (int i = 0; i < 16; i++) {
        x.u16[i] = kvq__round_bf16(b.f32[i]);
        x.u16[i + 16] = kvq__round_bf16(a.f32[i]);
    }
    return x.si;
}
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh(above, below) kvq__cvtne2ps_pbh(above, below)

// ---- AMX: eight registers of 16 rows of 16 words ----

static _Thread_local struct {
    uint32_t word[16][16];
} kvq__tile_registers[8];
static _Thread_local bool kvq__tiles_configured;

// `c`: what ldtilecfg reads. The kernels use whole registers alone.
KVQ__SHIM void kvq__tile_loadconfig(const void *c)
{
    const uint8_t *bytes = c;
    assert(bytes[0] == 1);
    for (int i = 0; i < 8; i++)
        assert(bytes[16 + 2 * i] == 64 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == 16);
    memset(kvq__tile_registers, 0, sizeof kvq__tile_registers);
    kvq__tiles_configured = true;
}

KVQ__SHIM void kvq__tile_move(int tile, void *at, size_t stride, bool store)
{
    assert(kvq__tiles_configured);
    for (int r = 0; r < 16; r++) {
        uint8_t *row = (uint8_t *)at + (size_t)r * stride;
        uint32_t *word = kvq__tile_registers[tile].word[r];
        memcpy(store ? (void *)row : word, store ? (const void *)word : row, 64);
    }
}

KVQ__SHIM float kvq__bf16_of(uint32_t word, bool upper)
{
    union {
        uint32_t u;
        float f;
    } x = {upper ? word & 0xffff0000 : word << 16};
    return x.f;
}

// As Intel writes it down: sums of the lower and of the upper halves, which are then added.
KVQ__SHIM void kvq__tile_dots(int c, int a, int b)
{
    assert(kvq__tiles_configured);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float lower = 0, upper = 0, sum;
            for (int k = 0; k < 16; k++) {
                uint32_t x = kvq__tile_registers[a].word[m][k];
                uint32_t y = kvq__tile_registers[b].word[k][n];
                lower += kvq__bf16_of(x, false) * kvq__bf16_of(y, false);
                upper += kvq__bf16_of(x, true) * kvq__bf16_of(y, true);
            }
            memcpy(&sum, &kvq__tile_registers[c].word[m][n], sizeof sum);
            sum += lower + upper;
            memcpy(&kvq__tile_registers[c].word[m][n], &sum, sizeof sum);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(c)         kvq__tile_loadconfig(c)
#define _tile_release()             (kvq__tiles_configured = false)
#define _tile_zero(t)               memset(kvq__tile_registers + (t), 0, 16 * 16 * sizeof(uint32_t))
#define _tile_loadd(t, at, stride)  kvq__tile_move(t, (void *)(uintptr_t)(at), stride, false)
#define _tile_stored(t, at, stride) kvq__tile_move(t, at, stride, true)
#define _tile_dpbf16ps(c, a, b)     kvq__tile_dots(c, a, b)

#endif
