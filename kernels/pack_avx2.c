// SPDX-License-Identifier: Apache-2.0
//
// Groups of 32 tokens, AVX2: quantizing and back. The bytes are those of quant_c.c.
//
// K is quantized with channels in lanes (minimum and maximum run down the tokens) and coded with
// tokens in lanes, after an 8 by 8 transposition, since a word of the layout is one token: the
// sixteen codes of a word are shifted and joined without leaving their lane. A word of V is one
// channel, so V needs no transposition of values, only of finished words.
#include "kernels/avx2.h"
#include "kernels/scalar_avx2.h"

enum { MAX_DIM = KVQ_MAX_HEAD_DIM, MAX_GROUPS = MAX_DIM / KVQ_GROUP_CHANNELS, SLAB = 128 };

// What turns values into codes: code = (x - offset) * inv.
struct affine {
    float inv[MAX_GROUPS * KVQ_GROUP_TOKENS], offset[MAX_GROUPS * KVQ_GROUP_TOKENS];
    uint16_t scale[MAX_GROUPS * KVQ_GROUP_TOKENS], zero[MAX_GROUPS * KVQ_GROUP_TOKENS];
    bool integer; // zeros are multiples of the scale
};

// Eight groups at once, entries i to i + 7; see quant_c.c for the steps.
static void affine8(struct affine *a, uint32_t i, __m256 min, __m256 max, uint32_t bits)
{
    const __m256 none = _mm256_setzero_ps();
    __m256 levels = _mm256_set1_ps((float)((1u << bits) - 1));
    __m128i scale16 = kvq__to_f16(_mm256_div_ps(_mm256_sub_ps(max, min), levels));
    __m256 scale = _mm256_cvtph_ps(scale16);
    __m256 spread = _mm256_cmp_ps(scale, none, _CMP_GT_OQ);
    __m256 z = _mm256_div_ps(_mm256_xor_ps(min, _mm256_set1_ps(-0.0f)), scale);
    z = _mm256_round_ps(z, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 zero = _mm256_add_ps(min, none);
    if (a->integer)
        zero = _mm256_blendv_ps(zero, _mm256_sub_ps(none, _mm256_mul_ps(z, scale)), spread);
    __m128i zero16 = kvq__to_f16(zero);
    __m256 inv = _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1.0f), scale), spread);
    _mm_storeu_si128((void *)(a->scale + i), scale16);
    _mm_storeu_si128((void *)(a->zero + i), zero16);
    _mm256_storeu_ps(a->inv + i, inv);
    _mm256_storeu_ps(a->offset + i, _mm256_cvtph_ps(zero16));
}

KVQ__INLINE __m256i code8(__m256 x, __m256 inv, __m256 offset, __m256 top)
{
    __m256 code = _mm256_mul_ps(_mm256_sub_ps(x, offset), inv);
    code = _mm256_round_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    code = _mm256_min_ps(_mm256_max_ps(code, _mm256_setzero_ps()), top); // NaN becomes 0
    return _mm256_cvtps_epi32(code);
}

static uint32_t slab_width(uint32_t dim)
{
    return dim < SLAB ? dim : SLAB;
}

// Words of the low plane, and of the high plane's bits before they find their place.
struct words {
    __m256i low, high;
};

KVQ__INLINE void put(struct words *w, __m256i code, uint32_t bit)
{
    __m256i shift = _mm256_set1_epi32((int)bit);
    __m256i low = _mm256_and_si256(code, _mm256_set1_epi32(3));
    w->low = _mm256_or_si256(w->low, _mm256_sllv_epi32(low, shift));
    w->high = _mm256_or_si256(w->high, _mm256_sllv_epi32(_mm256_srli_epi32(code, 2), shift));
}

// ---- K ----

static void range_k(const float *rows, uint32_t dim, uint32_t bits, struct affine *a)
{
    for (uint32_t c = 0; c < dim; c += 8) {
        __m256 min = _mm256_loadu_ps(rows + c), max = min;
        for (uint32_t t = 1; t < KVQ_GROUP_TOKENS; t++) {
            __m256 x = _mm256_loadu_ps(rows + (size_t)t * dim + c);
            min = _mm256_min_ps(x, min);
            max = _mm256_max_ps(x, max);
        }
        affine8(a, c, min, max, bits);
    }
}

// x[i] lane j becomes x[j] lane i.
KVQ__INLINE void transpose8(__m256 *x)
{
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int n = 0; n < 2; n++) {
            b[i + 2 * n] = _mm256_shuffle_ps(a[i + n], a[i + n + 2], 0x44);
            b[i + 2 * n + 1] = _mm256_shuffle_ps(a[i + n], a[i + n + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

// The words of 8 tokens (rows points at the first) and the 16 channels from c.
static struct words words_k(const float *rows, uint32_t dim, uint32_t c, const struct affine *a,
                            __m256 top)
{
    struct words w = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (uint32_t first = c; first < c + 16; first += 8) {
        __m256 x[8];
        for (uint32_t t = 0; t < 8; t++)
            x[t] = _mm256_loadu_ps(rows + (size_t)t * dim + first);
        transpose8(x);
        for (uint32_t i = 0; i < 8; i++)
            put(&w,
                code8(x[i], _mm256_set1_ps(a->inv[first + i]), _mm256_set1_ps(a->offset[first + i]),
                      top),
                kvq_k_bit(first + i));
    }
    return w;
}

// Where 8 words of a K row stand: eights of tokens are permuted as a whole.
static void *k_eight(const uint8_t *plane, uint32_t row, uint32_t in_slab, uint32_t t)
{
    return (void *)(plane + 128 * row + 32 * ((t / 8) ^ (in_slab & 3u)));
}

// A row and the one half a slab above it share a row of the 1-bit plane.
struct high_row {
    uint32_t row, in_slab, odd;
};

static struct high_row high_k(uint32_t dim, uint32_t r, uint32_t bits)
{
    uint32_t rows = slab_width(dim) / 16, in_slab = r % rows;
    if (bits == 4)
        return (struct high_row){r, in_slab, 0};
    uint32_t half = rows / 2;
    return (struct high_row){r / rows * half + in_slab % half, in_slab % half, in_slab / half};
}

static void quant_k_avx2(const struct kvq__codec *c, const float *rows, uint8_t *record,
                         uint32_t first)
{
    if (c->k.row.zero == KVQ_ZERO_FITTED) {
        kvq__quant_k_avx2(c, rows, record, first);
        return;
    }
    uint8_t *group = kvq_packed_at(&c->layout, record, first).group;
    struct affine a;
    a.integer = c->k.row.zero == KVQ_ZERO_INTEGER;
    uint32_t dim = c->dim, in_slab = slab_width(dim) / 16;
    uint8_t *low = group + c->layout.k_codes, *high = low + 8 * dim;
    const __m256 top = _mm256_set1_ps((float)((1u << c->k_bits) - 1));
    range_k(rows, dim, c->k_bits, &a);
    memcpy(group + c->layout.k_scales, a.scale, 2 * dim);
    memcpy(group + c->layout.k_zeros, a.zero, 2 * dim);
    for (uint32_t r = 0; r < dim / 16; r++)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += 8) {
            struct words w = words_k(rows + (size_t)t * dim, dim, 16 * r, &a, top);
            _mm256_store_si256(k_eight(low, r, r % in_slab, t), w.low);
            if (c->k_bits == 2)
                continue;
            struct high_row h = high_k(dim, r, c->k_bits);
            __m256i *p = k_eight(high, h.row, h.in_slab, t);
            if (h.odd)
                w.high = _mm256_or_si256(_mm256_load_si256(p), _mm256_slli_epi32(w.high, 1));
            _mm256_store_si256(p, w.high);
        }
}

// 8 channels of one token: codes at the given bits of its words, dequantized.
KVQ__INLINE void dequant8(float *out, uint32_t low, uint32_t high, __m256i bits, __m256 scale,
                          __m256 zero, float norm, int code_bits)
{
    const __m256i three = _mm256_set1_epi32(3);
    __m256i code = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)low), bits), three);
    if (code_bits > 2) {
        __m256i h = _mm256_srlv_epi32(_mm256_set1_epi32((int)high), bits);
        h = _mm256_and_si256(h, code_bits == 3 ? _mm256_set1_epi32(1) : three);
        code = _mm256_or_si256(code, _mm256_slli_epi32(h, 2));
    }
    __m256 x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), scale, zero);
    _mm256_storeu_ps(out, _mm256_mul_ps(x, _mm256_set1_ps(norm)));
}

// 16 channels of all tokens.
KVQ__INLINE void dequant_k_row(const struct kvq__codec *c, const uint8_t *group, const float *norm,
                               float *rows, uint32_t r, int bits)
{
    const uint8_t *low = group + c->layout.k_codes, *high = low + 8 * c->dim;
    const uint8_t *scales = group + c->layout.k_scales + 32 * r;
    const uint8_t *zeros = group + c->layout.k_zeros + 32 * r;
    // kvq_k_bit of channels 0 to 7; those of 8 to 15 are 4 higher.
    const __m256i first = _mm256_setr_epi32(0, 16, 8, 24, 2, 18, 10, 26);
    const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(4));
    __m256 scale0 = kvq__load8(scales, KVQ_F16), scale1 = kvq__load8(scales + 16, KVQ_F16);
    __m256 zero0 = kvq__load8(zeros, KVQ_F16), zero1 = kvq__load8(zeros + 16, KVQ_F16);
    struct high_row h = high_k(c->dim, r, (uint32_t)bits);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        const uint32_t *l = (const uint32_t *)k_eight(low, r, r & 3, t) + t % 8;
        uint32_t high_word = 0;
        if (bits > 2)
            high_word = ((const uint32_t *)k_eight(high, h.row, h.in_slab, t))[t % 8] >> h.odd;
        float *out = rows + (size_t)t * c->dim + 16 * r;
        dequant8(out, *l, high_word, first, scale0, zero0, norm[t], bits);
        dequant8(out + 8, *l, high_word, second, scale1, zero1, norm[t], bits);
    }
}

static void dequant_k_avx2(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    const uint8_t *group = packed->group;
    float norm[KVQ_GROUP_TOKENS];
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += 8) {
        __m256 x = _mm256_set1_ps(1.0f);
        if (c->has_norms)
            x = kvq__load8(group + c->layout.k_norms + 2 * t, KVQ_F16);
        _mm256_storeu_ps(norm + t, x);
    }
    for (uint32_t r = 0; r < c->dim / 16; r++) {
        if (c->k_bits == 2)
            dequant_k_row(c, group, norm, rows, r, 2);
        else if (c->k_bits == 3)
            dequant_k_row(c, group, norm, rows, r, 3);
        else
            dequant_k_row(c, group, norm, rows, r, 4);
    }
}

// ---- V ----

static void range_v(const float *rows, uint32_t dim, uint32_t bits, struct affine *a)
{
    for (uint32_t c = 0; c < dim; c += KVQ_GROUP_CHANNELS) {
        float min[KVQ_GROUP_TOKENS], max[KVQ_GROUP_TOKENS];
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
            const float *p = rows + (size_t)t * dim + c;
            __m256 x = _mm256_loadu_ps(p), low = x, high = x;
            for (uint32_t i = 8; i < KVQ_GROUP_CHANNELS; i += 8) {
                x = _mm256_loadu_ps(p + i);
                low = _mm256_min_ps(x, low);
                high = _mm256_max_ps(x, high);
            }
            min[t] = kvq__min_all(low);
            max[t] = kvq__max_all(high);
        }
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += 8)
            affine8(a, c + t, _mm256_loadu_ps(min + t), _mm256_loadu_ps(max + t), bits);
    }
}

// Words of set (j, half), 8 lanes of consecutive channels: at position s those from
// first + s * step on. Groups of 32 channels have their numbers 32 apart in `a`.
static struct words words_v(const float *rows, uint32_t dim, uint32_t set, uint32_t first,
                            uint32_t step, const struct affine *a, __m256 top)
{
    struct words w = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (uint32_t k = 0; k < 4; k++)
        for (uint32_t s = 0; s < 4; s++) {
            uint32_t t = set / 2 * 8 + 2 * k + set % 2, c = first + s * step;
            uint32_t group = c / KVQ_GROUP_CHANNELS * KVQ_GROUP_CHANNELS + t;
            __m256i code =
                code8(_mm256_loadu_ps(rows + (size_t)t * dim + c), _mm256_set1_ps(a->inv[group]),
                      _mm256_set1_ps(a->offset[group]), top);
            put(&w, code, 8 * k + 2 * s);
        }
    return w;
}

// head_dim 128 and 256: w[n] lane g is word 4 * (g ^ 2 j) + n. Both ways are this transposition
// of four by eight, which is its own inverse on each half.
KVQ__INLINE void transpose4(__m256i *w)
{
    __m256i a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpackhi_epi32(w[0], w[1]);
    __m256i c = _mm256_unpacklo_epi32(w[2], w[3]), d = _mm256_unpackhi_epi32(w[2], w[3]);
    w[0] = _mm256_unpacklo_epi64(a, c);
    w[1] = _mm256_unpackhi_epi64(a, c);
    w[2] = _mm256_unpacklo_epi64(b, d);
    w[3] = _mm256_unpackhi_epi64(b, d);
}

static void save_wide(uint8_t *row, uint32_t j, __m256i *w)
{
    transpose4(w);
    for (uint32_t g = 0; g < 4; g++) {
        _mm_store_si128((void *)(row + 16 * (g ^ 2 * j)), _mm256_castsi256_si128(w[g]));
        _mm_store_si128((void *)(row + 16 * ((g + 4) ^ 2 * j)), _mm256_extracti128_si256(w[g], 1));
    }
}

static void load_wide(const uint8_t *row, uint32_t j, __m256i *w)
{
    for (uint32_t g = 0; g < 4; g++) {
        __m128i a = _mm_load_si128((const void *)(row + 16 * (g ^ 2 * j)));
        __m128i b = _mm_load_si128((const void *)(row + 16 * ((g + 4) ^ 2 * j)));
        w[g] = _mm256_set_m128i(b, a);
    }
    transpose4(w);
}

// head_dim 64: w[rh] lane g is word (2 g + rh) ^ 8 * (j >> 1).
static void save_narrow(uint8_t *row, uint32_t j, const __m256i *w)
{
    __m256i low = _mm256_unpacklo_epi32(w[0], w[1]), high = _mm256_unpackhi_epi32(w[0], w[1]);
    uint32_t swap = 32 * (j >> 1);
    _mm256_store_si256((void *)(row + swap), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_store_si256((void *)(row + (32 ^ swap)), _mm256_permute2x128_si256(low, high, 0x31));
}

static void load_narrow(const uint8_t *row, uint32_t j, __m256i *w)
{
    uint32_t swap = 32 * (j >> 1);
    __m256i a = _mm256_load_si256((const void *)(row + swap)); // g 0 to 3
    __m256i b = _mm256_load_si256((const void *)(row + (32 ^ swap)));
    __m256i low = _mm256_permute2x128_si256(a, b, 0x20),
            high = _mm256_permute2x128_si256(a, b, 0x31);
    __m256 even = _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), 0x88);
    __m256 odd = _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), 0xdd);
    w[0] = _mm256_castps_si256(even);
    w[1] = _mm256_castps_si256(odd);
}

// Where the rows of a set are, in bytes from the start of the planes.
struct v_rows {
    uint32_t low, high;
};

static struct v_rows v_rows(uint32_t dim, uint32_t bits, uint32_t slab, uint32_t set)
{
    uint32_t j = set / 2, half = set % 2, row_bytes = slab_width(dim);
    uint32_t row = dim == 64 ? 2 * j + (half ^ (j & 1u)) : set;
    return (struct v_rows){
        slab * 8 * row_bytes + row * row_bytes,
        8 * dim + slab * (bits - 2) * 4 * row_bytes + (bits == 3 ? j : row) * row_bytes,
    };
}

static void save_words(uint8_t *row, uint32_t dim, uint32_t j, __m256i *w)
{
    if (dim == 64)
        save_narrow(row, j, w);
    else
        save_wide(row, j, w);
}

static void load_words(const uint8_t *row, uint32_t dim, uint32_t j, __m256i *w)
{
    if (dim == 64)
        load_narrow(row, j, w);
    else
        load_wide(row, j, w);
}

static void quant_v_avx2(const struct kvq__codec *c, const float *rows, uint8_t *record,
                         uint32_t first)
{
    if (c->v.row.zero == KVQ_ZERO_FITTED) {
        kvq__quant_v_avx2(c, rows, record, first);
        return;
    }
    uint8_t *group = kvq_packed_at(&c->layout, record, first).group;
    struct affine a;
    a.integer = c->v.row.zero == KVQ_ZERO_INTEGER;
    uint32_t dim = c->dim, lanes = slab_width(dim) / 32, step = dim == 64 ? 16 : 32;
    uint8_t *planes = group + c->layout.v_codes;
    const __m256 top = _mm256_set1_ps((float)((1u << c->v_bits) - 1));
    range_v(rows, dim, c->v_bits, &a);
    for (uint32_t i = 0; i < dim; i++) {
        uint32_t slot = (i & ~31u) + kvq_v_slot(i & 31u);
        ((uint16_t *)(void *)(group + c->layout.v_scales))[slot] = a.scale[i];
        ((uint16_t *)(void *)(group + c->layout.v_zeros))[slot] = a.zero[i];
    }
    for (uint32_t slab = 0; slab < dim / slab_width(dim); slab++) {
        __m256i kept[4]; // the even set's high words, for those of the odd one to join
        for (uint32_t set = 0; set < 8; set++) {
            __m256i low[4], high[4];
            for (uint32_t n = 0; n < lanes; n++) {
                struct words w = words_v(rows, dim, set, slab * SLAB + 8 * n, step, &a, top);
                low[n] = w.low;
                high[n] = w.high;
                if (c->v_bits == 3 && set % 2)
                    high[n] = _mm256_or_si256(kept[n], _mm256_slli_epi32(w.high, 1));
                kept[n] = w.high;
            }
            struct v_rows at = v_rows(dim, c->v_bits, slab, set);
            save_words(planes + at.low, dim, set / 2, low);
            if (c->v_bits > 2)
                save_words(planes + at.high, dim, set / 2, high);
        }
    }
}

// One set, 8 lanes of channels from first on, as words_v.
KVQ__INLINE void dequant_v_words(float *rows, uint32_t dim, uint32_t set, uint32_t first,
                                 uint32_t step, __m256i low, __m256i high, const float *scale,
                                 const float *zero, int bits)
{
    const __m256i three = _mm256_set1_epi32(3);
    for (uint32_t k = 0; k < 4; k++)
        for (uint32_t s = 0; s < 4; s++) {
            uint32_t t = set / 2 * 8 + 2 * k + set % 2, c = first + s * step;
            uint32_t group = c / KVQ_GROUP_CHANNELS * KVQ_GROUP_CHANNELS + t;
            __m256i code = _mm256_and_si256(low, three);
            if (bits > 2) {
                __m256i h = _mm256_and_si256(high, bits == 3 ? _mm256_set1_epi32(1) : three);
                code = _mm256_or_si256(code, _mm256_slli_epi32(h, 2));
            }
            __m256 x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(scale[group]),
                                       _mm256_set1_ps(zero[group]));
            _mm256_storeu_ps(rows + (size_t)t * dim + c, x);
            low = _mm256_srli_epi32(low, 2);
            high = _mm256_srli_epi32(high, 2);
        }
}

// fp16 in slots to fp32 in tokens.
static void load_slots(const uint8_t *p, float *out, uint32_t n)
{
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (uint32_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_permutevar8x32_ps(kvq__load8(p + 2 * i, KVQ_F16), order));
}

static void dequant_v_avx2(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    const uint8_t *group = packed->group;
    float scale[MAX_DIM], zero[MAX_DIM];
    uint32_t dim = c->dim, lanes = slab_width(dim) / 32, step = dim == 64 ? 16 : 32;
    const uint8_t *planes = group + c->layout.v_codes;
    load_slots(group + c->layout.v_scales, scale, dim);
    load_slots(group + c->layout.v_zeros, zero, dim);
    for (uint32_t i = 0; i < dim / slab_width(dim) * 8; i++) {
        uint32_t slab = i / 8, set = i % 8;
        struct v_rows at = v_rows(dim, c->v_bits, slab, set);
        __m256i low[4], high[4];
        load_words(planes + at.low, dim, set / 2, low);
        load_words(planes + (c->v_bits > 2 ? at.high : at.low), dim, set / 2, high);
        for (uint32_t n = 0; n < lanes; n++) {
            uint32_t first = slab * SLAB + 8 * n;
            if (c->v_bits == 2)
                dequant_v_words(rows, dim, set, first, step, low[n], high[n], scale, zero, 2);
            else if (c->v_bits == 3)
                dequant_v_words(rows, dim, set, first, step, low[n],
                                _mm256_srli_epi32(high[n], (int)(set % 2)), scale, zero, 3);
            else
                dequant_v_words(rows, dim, set, first, step, low[n], high[n], scale, zero, 4);
        }
    }
}

void kvq__init_avx2_pack(struct kvq_kernels *k)
{
    k->quant_k[KVQ__PER_CHANNEL_32] = quant_k_avx2;
    k->quant_v[KVQ__PER_TOKEN_32] = quant_v_avx2;
    k->dequant_k[KVQ__PER_CHANNEL_32] = dequant_k_avx2;
    k->dequant_v[KVQ__PER_TOKEN_32] = dequant_v_avx2;
}
