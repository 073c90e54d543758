// SPDX-License-Identifier: Apache-2.0
//
// Quantizing groups of 32 tokens, AVX-512: affine codes of 2 to 4 bits, K per channel of 32 tokens,
// V per token of 32 channels. The bytes are those of quant_c.c.
//
// Channels stand in lanes. Four registers of codes become one of bytes, whose 128-bit lane L holds
// channels 4 L to 4 L + 3 of four tokens; what is left are shifts of whole registers, and one
// shuffle that brings the bytes of a word together.
#include "kernels/lanes_avx512.h"

enum { MAX_DIM = KVQ_MAX_HEAD_DIM };

// What turns values into codes, for each scale: code = (x - offset) * inv.
struct affine {
    _Alignas(64) float inv[MAX_DIM], offset[MAX_DIM];
    bool integer; // zeros are multiples of the scale
};

// ---- Scales and codes ----

// Sixteen groups, entries i to i + 15: see quant_c.c for the steps. Their scales and zeros go to
// the last two.
KVQ__INLINE void affine16(struct affine *a, uint32_t i, __m512 min, __m512 max, int bits,
                          __m256i *scales, __m256i *zeros)
{
    const __m512 none = _mm512_setzero_ps();
    __m512 levels = _mm512_set1_ps((float)((1 << bits) - 1));
    *scales = kvq__to_half(_mm512_div_ps(_mm512_sub_ps(max, min), levels));
    __m512 scale = _mm512_cvtph_ps(*scales);
    __mmask16 spread = _mm512_cmp_ps_mask(scale, none, _CMP_GT_OQ);
    __m512 steps = _mm512_div_ps(_mm512_xor_ps(min, _mm512_set1_ps(-0.0f)), scale);
    steps = _mm512_roundscale_ps(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 zero = _mm512_add_ps(min, none);
    if (a->integer)
        zero = _mm512_mask_sub_ps(zero, spread, none, _mm512_mul_ps(steps, scale));
    *zeros = kvq__to_half(zero);
    _mm512_store_ps(a->inv + i, _mm512_maskz_div_ps(spread, _mm512_set1_ps(1.0f), scale));
    _mm512_store_ps(a->offset + i, _mm512_cvtph_ps(*zeros));
}

// Codes as 32-bit numbers that may be negative: packing to bytes makes those 0, as NaN becomes.
KVQ__INLINE __m512i codes16(__m512 x, __m512 inv, __m512 offset, int bits)
{
    const __m512 top = _mm512_set1_ps((float)((1 << bits) - 1));
    __m512 code = _mm512_mul_ps(_mm512_sub_ps(x, offset), inv);
    return _mm512_cvtps_epi32(_mm512_min_ps(top, code)); // of NaN the code, which becomes -2^31
}

// Lane L of the result holds the bytes of lanes L of the four.
KVQ__INLINE __m512i to_bytes(__m512i a, __m512i b, __m512i c, __m512i d)
{
    return _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
}

// ---- Planes: fields of codes that stand at positions 0 to 3 of a byte ----

KVQ__INLINE __m512i masked(__m512i x, int mask)
{
    return _mm512_and_si512(x, _mm512_set1_epi8((char)mask));
}

KVQ__INLINE __m512i join(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i abc = _mm512_ternarylogic_epi32(a, b, c, 0xfe);
    return _mm512_or_si512(abc, d);
}

KVQ__INLINE __m512i low_fields(const __m512i *s, int bits)
{
    __m512i x[4];
    for (int i = 0; i < 4; i++)
        x[i] = bits == 2 ? s[i] : masked(s[i], 3);
    return join(x[0], _mm512_slli_epi16(x[1], 2), _mm512_slli_epi16(x[2], 4),
                _mm512_slli_epi16(x[3], 6));
}

// The upper two bits of 4, or the third of 3.
KVQ__INLINE __m512i high_fields(const __m512i *s, int bits)
{
    __m512i x[4];
    for (int i = 0; i < 4; i++)
        x[i] = masked(s[i], bits == 3 ? 0x04 : 0x0c);
    return join(_mm512_srli_epi16(x[0], 2), x[1], _mm512_slli_epi16(x[2], 2),
                _mm512_slli_epi16(x[3], 4));
}

// Row r of a plane's slab of K: 16 words of tokens 16 z on, chunks permuted by layout.h, 4.
KVQ__INLINE __m512i *k_place(uint8_t *row, uint32_t r, uint32_t z)
{
    return (__m512i *)(void *)(row + 64 * (z ^ (r & 3) >> 1));
}

KVQ__INLINE __m512i k_order(__m512i words, uint32_t r)
{
    return r & 1 ? _mm512_shuffle_i64x2(words, words, KVQ__SWAP_HALVES) : words;
}

// ---- K ----

KVQ__INLINE void range_k(const float *rows, uint32_t dim, int bits, struct affine *a,
                         uint8_t *scales, uint8_t *zeros)
{
    for (uint32_t c = 0; c < dim; c += 16) {
        __m512 min = _mm512_loadu_ps(rows + c), max = min;
        __m256i scale, zero;
        for (uint32_t t = 1; t < KVQ_GROUP_TOKENS; t++) {
            __m512 x = _mm512_loadu_ps(rows + (size_t)t * dim + c);
            min = _mm512_min_ps(x, min);
            max = _mm512_max_ps(x, max);
        }
        affine16(a, c, min, max, bits, &scale, &zero);
        _mm256_storeu_si256((void *)(scales + 2 * c), scale);
        _mm256_storeu_si256((void *)(zeros + 2 * c), zero);
    }
}

// s[i] lane j = x[j] lane i, lanes of 128 bits.
KVQ__INLINE void transpose_lanes(const __m512i *x, __m512i *s)
{
    __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
    __m512i c = _mm512_shuffle_i32x4(x[2], x[3], 0x44), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    s[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    s[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    s[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    s[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

// Channels c to c + 15 of 16 tokens from `rows` on: s[i] has a word for each token, whose bytes are
// channels c + 4 i to c + 4 i + 3.
KVQ__INLINE void codes_k(const float *rows, uint32_t dim, uint32_t c, const struct affine *a,
                         int bits, __m512i *s)
{
    __m512 inv = _mm512_load_ps(a->inv + c), offset = _mm512_load_ps(a->offset + c);
    __m512i x[4];
    for (uint32_t i = 0; i < 4; i++) {
        __m512i q[4];
        for (uint32_t t = 0; t < 4; t++)
            q[t] =
                codes16(_mm512_loadu_ps(rows + (size_t)(4 * i + t) * dim + c), inv, offset, bits);
        x[i] = to_bytes(q[0], q[1], q[2], q[3]);
    }
    transpose_lanes(x, s);
}

// Byte 2 h + e of a word belongs to channels 2 e + h of their four.
KVQ__INLINE __m512i k_bytes(__m512i x)
{
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    return _mm512_shuffle_epi8(x, order);
}

// Row r of the slab's R rows; rows r and r + R / 2 share a row of bits.
KVQ__INLINE void put_k_high(__m512i words, uint8_t *high, uint32_t r, uint32_t slab_rows,
                            uint32_t z, int bits)
{
    uint32_t own = bits == 3 ? r % (slab_rows / 2) : r;
    __m512i *at = k_place(high + KVQ__ROW_BYTES * own, own, z);
    words = k_order(words, own);
    if (own != r)
        words = _mm512_or_si512(*at, _mm512_slli_epi16(words, 1));
    *at = words;
}

KVQ__INLINE void put_k(const float *rows, uint32_t dim, const struct affine *a, int bits,
                       uint8_t *planes)
{
    const uint32_t slab_rows = dim == 64 ? 4 : KVQ__SLAB / 16;
    uint8_t *high = planes + 8 * dim;
    for (uint32_t row = 0; row < dim / 16; row++) {
        uint32_t slab = row / slab_rows, r = row % slab_rows;
        uint32_t high_rows = bits == 3 ? slab_rows / 2 : slab_rows;
        for (uint32_t z = 0; z < 2; z++) {
            __m512i s[4];
            codes_k(rows + (size_t)16 * z * dim, dim, 16 * row, a, bits, s);
            *k_place(planes + KVQ__ROW_BYTES * row, r, z) =
                k_order(k_bytes(low_fields(s, bits)), r);
            if (bits > 2)
                put_k_high(k_bytes(high_fields(s, bits)), high + KVQ__ROW_BYTES * high_rows * slab,
                           r, slab_rows, z, bits);
        }
    }
}

KVQ__INLINE void quantize_k(const struct kvq__codec *c, const float *rows, uint8_t *record,
                            uint32_t first, uint32_t dim, int bits)
{
    struct kvq_packed p = kvq_packed_at(&c->layout, record, first);
    struct affine a;
    a.integer = c->k.row.zero == KVQ_ZERO_INTEGER;
    range_k(rows, dim, bits, &a, p.k_scales, p.k_zeros);
    put_k(rows, dim, &a, bits, p.group + c->layout.k_codes);
}

static void quant_k_avx512(const struct kvq__codec *c, const float *rows, uint8_t *record,
                           uint32_t first)
{
    KVQ__BY_BITS(c->k_bits, KVQ__BY_DIM(c->dim, quantize_k(c, rows, record, first, DIM, BITS)));
}

// ---- V ----

// The smallest (largest) of each of 16 registers' lanes, that of register i in lane i.
KVQ__INLINE __m512 pick(__m512 a, __m512 b, bool largest)
{
    return largest ? _mm512_max_ps(a, b) : _mm512_min_ps(a, b);
}

KVQ__INLINE __m512 pick_lanes(const __m512 *x, bool largest)
{
    __m512 w[8], y[4], u[2];
    for (int i = 0; i < 8; i++)
        w[i] = pick(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]),
                    _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]), largest);
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(w[2 * i]), b = _mm512_castps_pd(w[2 * i + 1]);
        y[i] = pick(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)), largest);
    }
    for (int i = 0; i < 2; i++)
        u[i] = pick(_mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0x44),
                    _mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0xee), largest);
    return pick(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd),
                largest);
}

// Tokens t to t + 15, from their order to that of slots.
KVQ__INLINE __m256i to_slots(__m256i x)
{
    const __m256i order = _mm256_setr_epi16(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return _mm256_permutexvar_epi16(order, x);
}

KVQ__INLINE void range_v(const float *rows, uint32_t dim, int bits, struct affine *a,
                         uint8_t *scales, uint8_t *zeros)
{
    for (uint32_t c = 0; c < dim; c += KVQ_GROUP_CHANNELS)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += 16) {
            __m512 low[16], high[16];
            __m256i scale, zero;
            for (uint32_t i = 0; i < 16; i++) {
                const float *p = rows + (size_t)(t + i) * dim + c;
                __m512 x = _mm512_loadu_ps(p), y = _mm512_loadu_ps(p + 16);
                low[i] = _mm512_min_ps(x, y);
                high[i] = _mm512_max_ps(x, y);
            }
            affine16(a, c + t, pick_lanes(low, false), pick_lanes(high, true), bits, &scale, &zero);
            _mm256_storeu_si256((void *)(scales + 2 * (c + t)), to_slots(scale));
            _mm256_storeu_si256((void *)(zeros + 2 * (c + t)), to_slots(zero));
        }
}

// Channels c to c + 15 of the four tokens of set (j, half), as bytes: lane L holds channels
// c + 4 L on, token after token.
KVQ__INLINE __m512i codes_v(const float *rows, uint32_t dim, uint32_t set, uint32_t c,
                            const struct affine *a, int bits)
{
    uint32_t first = 8 * (set / 2) + set % 2;
    __m512i q[4];
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t t = first + 2 * k, group = c / KVQ_GROUP_CHANNELS * KVQ_GROUP_CHANNELS + t;
        q[k] = codes16(_mm512_loadu_ps(rows + (size_t)t * dim + c), _mm512_set1_ps(a->inv[group]),
                       _mm512_set1_ps(a->offset[group]), bits);
    }
    return to_bytes(q[0], q[1], q[2], q[3]);
}

// From token after token to channel after channel, in each lane.
KVQ__INLINE __m512i v_bytes(__m512i x)
{
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm512_shuffle_epi8(x, order);
}

// The words of a set of one slab: low[u], high[u] lane 8 rh + g. Position s of a word stands `step`
// channels behind position s - 1.
struct v_words {
    __m512i low[2], high[2];
};

KVQ__INLINE struct v_words words_v(const float *rows, uint32_t dim, uint32_t slab, uint32_t set,
                                   const struct affine *a, int bits)
{
    struct v_words w = {0};
    uint32_t step = dim == 64 ? 16 : 32;
    for (uint32_t u = 0; u < step / 16; u++) {
        __m512i s[4];
        for (uint32_t i = 0; i < 4; i++)
            s[i] = codes_v(rows, dim, set, slab * KVQ__SLAB + step * i + 16 * u, a, bits);
        w.low[u] = v_bytes(low_fields(s, bits));
        if (bits > 2)
            w.high[u] = v_bytes(high_fields(s, bits));
    }
    return w;
}

// The row of a set: word 4 (g ^ 2 j) + 2 u + rh, at head_dim 64 (2 g + rh) ^ 8 (j >> 1).
KVQ__INLINE void put_v_row(const __m512i *w, uint32_t dim, uint32_t j, uint8_t *row)
{
    if (dim == 64) {
        const __m512i order =
            _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
        __m512i x = _mm512_permutexvar_epi32(order, w[0]);
        if (j >> 1)
            x = _mm512_shuffle_i64x2(x, x, KVQ__SWAP_HALVES);
        _mm512_store_si512(row, x);
        return;
    }
    const __m512i order =
        _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    for (uint32_t half = 0; half < 2; half++) {
        __m512i own = _mm512_add_epi32(order, _mm512_set1_epi32(4 * (int)half));
        __m512i x = _mm512_permutex2var_epi32(w[0], own, w[1]); // g = 4 half to 4 half + 3
        *k_place(row, j, half) = k_order(x, j);
    }
}

KVQ__INLINE void put_v(const float *rows, uint32_t dim, const struct affine *a, int bits,
                       uint8_t *planes)
{
    const uint32_t row_bytes = dim == 64 ? 64 : KVQ__ROW_BYTES;
    uint8_t *high = planes + 8 * dim;
    for (uint32_t slab = 0; slab < (dim + KVQ__SLAB - 1) / KVQ__SLAB; slab++)
        for (uint32_t j = 0; j < 4; j++) {
            struct v_words w[2];
            for (uint32_t half = 0; half < 2; half++) {
                w[half] = words_v(rows, dim, slab, 2 * j + half, a, bits);
                uint32_t row = 8 * slab + 2 * j + (dim == 64 ? half ^ (j & 1) : half);
                put_v_row(w[half].low, dim, j, planes + row * row_bytes);
                if (bits == 4)
                    put_v_row(w[half].high, dim, j, high + row * row_bytes);
            }
            if (bits == 3) {
                for (int u = 0; u < 2; u++)
                    w[0].high[u] =
                        _mm512_or_si512(w[0].high[u], _mm512_slli_epi16(w[1].high[u], 1));
                put_v_row(w[0].high, dim, j, high + (4 * slab + j) * row_bytes);
            }
        }
}

KVQ__INLINE void quantize_v(const struct kvq__codec *c, const float *rows, uint8_t *record,
                            uint32_t first, uint32_t dim, int bits)
{
    struct kvq_packed p = kvq_packed_at(&c->layout, record, first);
    struct affine a;
    a.integer = c->v.row.zero == KVQ_ZERO_INTEGER;
    range_v(rows, dim, bits, &a, p.v_scales, p.v_zeros);
    put_v(rows, dim, &a, bits, p.group + c->layout.v_codes);
}

static void quant_v_avx512(const struct kvq__codec *c, const float *rows, uint8_t *record,
                           uint32_t first)
{
    KVQ__BY_BITS(c->v_bits, KVQ__BY_DIM(c->dim, quantize_v(c, rows, record, first, DIM, BITS)));
}

void kvq__init_avx512_pack(struct kvq_kernels *k)
{
    k->quant_k[KVQ__PER_CHANNEL_32] = quant_k_avx512;
    k->quant_v[KVQ__PER_TOKEN_32] = quant_v_avx512;
}
