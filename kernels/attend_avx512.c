// SPDX-License-Identifier: Apache-2.0
//
// Attention over packed groups in fp32, AVX-512: the exact path.
//
// A lane is a token (K) or a channel (V), so nothing is ever added across lanes. Codes become
// floats by vpermps, which looks up the low 4 bits of each word in a table of 16 floats: one
// shift and two lookups serve two 2-bit codes of 16 words, with tables that each see one half of
// the nibble. Codes of 3 and 4 bits are joined to nibbles first and looked up whole. Scales and
// zeros never meet the codes: K's are multiplied with q once a group, V's with p, and the zeros'
// share of a sum is the same for all tokens (K) or channels of a group (V).
//
// Registers, four rows to one unpacking. K: 16 accumulators (4 rows, 2 positions, 32 tokens), 4
// words, 4 codes, 2 tables, 2 broadcasts of q. V: 16 accumulators (4 rows, 2 positions, 32 words),
// the rest alike. 16 FMA stand beside 6 unpacking instructions: the FMA units are the limit.
#include "kernels/avx512.h"

enum { MAX_GROUPS = KVQ_MAX_HEAD_DIM / KVQ_GROUP_CHANNELS };

// Two codes of each byte's nibbles: a looks up the even positions, b the odd ones.
struct tables {
    __m512 a, b;
};

struct words {
    __m512i a, b;
};

KVQ__INLINE struct tables tables_of(int bits)
{
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (bits > 2)
        return (struct tables){all, all};
    return (struct tables){
        _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3),
        _mm512_setr_ps(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
    };
}

KVQ__INLINE struct words join(__m512i low, __m512i high, int bits)
{
    if (bits == 2)
        return (struct words){low, low};
    struct kvq__nibbles n = kvq__join_planes(low, high);
    return (struct words){n.even, n.odd};
}

KVQ__INLINE void shift(struct words *w, unsigned count)
{
    w->a = _mm512_srli_epi32(w->a, count);
    w->b = _mm512_srli_epi32(w->b, count);
}

// ---- K ----

// The high plane's share of row r, as 2-bit fields.
KVQ__INLINE __m512i k_high(const uint8_t *high, uint32_t dim, uint32_t r, unsigned z, int bits)
{
    if (bits == 4)
        return kvq__load_row(high + KVQ__ROW_BYTES * r, z, r & 3);
    uint32_t in_slab = dim < KVQ__SLAB ? dim / 16 : KVQ__SLAB / 16, half = in_slab / 2;
    uint32_t row = r / in_slab * half + r % half;
    __m512i x = kvq__load_row(high + KVQ__ROW_BYTES * row, z, r % half & 3);
    x = r % in_slab >= half ? _mm512_srli_epi16(x, 1) : x;
    return _mm512_and_si512(x, _mm512_set1_epi8(0x55));
}

// The lowest nibble of all words: the channel of qs and the one 4 behind it.
KVQ__INLINE void k_nibble(__m512 acc[][2][2], struct words *w, const struct tables *t,
                          const float (*qs)[KVQ_MAX_HEAD_DIM], uint32_t channel, int rows)
{
    __m512 a0 = _mm512_permutexvar_ps(w[0].a, t->a), a1 = _mm512_permutexvar_ps(w[1].a, t->a);
    __m512 b0 = _mm512_permutexvar_ps(w[0].b, t->b), b1 = _mm512_permutexvar_ps(w[1].b, t->b);
    for (int i = 0; i < rows; i++) {
        __m512 qa = _mm512_set1_ps(qs[i][channel]), qb = _mm512_set1_ps(qs[i][channel + 4]);
        acc[i][0][0] = _mm512_fmadd_ps(a0, qa, acc[i][0][0]);
        acc[i][0][1] = _mm512_fmadd_ps(a1, qa, acc[i][0][1]);
        acc[i][1][0] = _mm512_fmadd_ps(b0, qb, acc[i][1][0]);
        acc[i][1][1] = _mm512_fmadd_ps(b1, qb, acc[i][1][1]);
    }
    shift(&w[0], 4);
    shift(&w[1], 4);
}

// q * scale, and the sums of q * zero.
KVQ__INLINE void scale_queries(const struct kvq__codec *c, const uint8_t *group, const float *q,
                               float (*qs)[KVQ_MAX_HEAD_DIM], float *bias, int rows)
{
    const uint8_t *scales = group + c->layout.k_scales, *zeros = group + c->layout.k_zeros;
    __m512 sum[KVQ__TILE4];
    for (int i = 0; i < KVQ__TILE4; i++)
        sum[i] = _mm512_setzero_ps();
    for (uint32_t j = 0; j < c->dim; j += 16) {
        __m512 scale = kvq__load_f16(scales + 2 * j), zero = kvq__load_f16(zeros + 2 * j);
        for (int i = 0; i < rows; i++) {
            __m512 x = _mm512_load_ps(q + (uint32_t)i * c->dim + j);
            _mm512_store_ps(qs[i] + j, _mm512_mul_ps(x, scale));
            sum[i] = _mm512_fmadd_ps(x, zero, sum[i]);
        }
    }
    __m512 sums = kvq__sum4(sum[0], sum[1], sum[2], sum[3]);
    _mm_storeu_ps(bias, _mm512_castps512_ps128(sums));
}

KVQ__INLINE void qk_rows(const struct kvq__codec *c, const uint8_t *group, const float *q,
                         float *logits, int rows, int bits)
{
    _Alignas(64) float qs[KVQ__TILE4][KVQ_MAX_HEAD_DIM];
    float bias[KVQ__TILE4];
    const struct tables t = tables_of(bits);
    const uint8_t *low = group + c->layout.k_codes, *high = low + 8 * c->dim;
    __m512 acc[KVQ__TILE4][2][2];
    scale_queries(c, group, q, qs, bias, rows);
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < 2; n++)
            acc[i][n][0] = acc[i][n][1] = _mm512_setzero_ps();
    for (uint32_t r = 0; r < c->dim / 16; r++) {
        struct words w[2];
        for (unsigned z = 0; z < 2; z++) {
            __m512i x = kvq__load_row(low + KVQ__ROW_BYTES * r, z, r & 3);
            w[z] = join(x, bits > 2 ? k_high(high, c->dim, r, z, bits) : x, bits);
        }
        // Nibble n: byte n / 2 = 2 h + e, positions 2 (n % 2) and the next; layout.h, 4.
        k_nibble(acc, w, &t, qs, 16 * r, rows);
        k_nibble(acc, w, &t, qs, 16 * r + 8, rows);
        k_nibble(acc, w, &t, qs, 16 * r + 2, rows);
        k_nibble(acc, w, &t, qs, 16 * r + 10, rows);
        k_nibble(acc, w, &t, qs, 16 * r + 1, rows);
        k_nibble(acc, w, &t, qs, 16 * r + 9, rows);
        k_nibble(acc, w, &t, qs, 16 * r + 3, rows);
        k_nibble(acc, w, &t, qs, 16 * r + 11, rows);
    }
    const uint8_t *norms = group + c->layout.k_norms;
    __m512 norm0 = c->has_norms ? kvq__load_f16(norms) : _mm512_set1_ps(1.0f);
    __m512 norm1 = c->has_norms ? kvq__load_f16(norms + 32) : norm0;
    for (int i = 0; i < rows; i++, logits += KVQ__LOGITS_STRIDE) {
        // The bias comes last: it may be large, and would cost every sum before it its last bits.
        __m512 b = _mm512_set1_ps(bias[i]);
        __m512 s0 = _mm512_add_ps(_mm512_add_ps(acc[i][0][0], acc[i][1][0]), b);
        __m512 s1 = _mm512_add_ps(_mm512_add_ps(acc[i][0][1], acc[i][1][1]), b);
        _mm512_storeu_ps(logits, _mm512_mul_ps(s0, norm0));
        _mm512_storeu_ps(logits + 16, _mm512_mul_ps(s1, norm1));
    }
}

KVQ__INLINE void qk_group(const struct kvq__tile *tile, const uint8_t *group, float *logits,
                          int bits)
{
    const float *q = tile->qt;
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        switch (tile->rows - r) {
        case 1:
            qk_rows(tile->codec, group, q, logits, 1, bits);
            break;
        case 2:
            qk_rows(tile->codec, group, q, logits, 2, bits);
            break;
        case 3:
            qk_rows(tile->codec, group, q, logits, 3, bits);
            break;
        default:
            qk_rows(tile->codec, group, q, logits, 4, bits);
        }
        q += KVQ__TILE4 * tile->dim;
        logits += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
    }
}

static void qk_packed_avx512(const struct kvq__tile *tile, const uint8_t *group, float *logits)
{
    switch (tile->codec->k_bits) {
    case 2:
        qk_group(tile, group, logits, 2);
        break;
    case 3:
        qk_group(tile, group, logits, 3);
        break;
    default:
        qk_group(tile, group, logits, 4);
    }
}

// ---- V ----

// p * scale in token order, and the sums of p * zero, of one row; per channel group.
struct weights {
    _Alignas(64) float w[MAX_GROUPS][KVQ_GROUP_TOKENS];
    _Alignas(64) float zero[MAX_GROUPS];
};

// Slots are 0, 4, 1, 5, 2, 6, 3, 7 of each 8 tokens; this is the way back.
static inline __m512i tokens_from_slots(void)
{
    static const uint16_t order[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12,
                                       14, 9,  11, 13, 15, 16, 18, 20, 22, 17, 19,
                                       21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
    return _mm512_loadu_si512(order);
}

struct pair {
    __m512 first, second;
};

static inline struct pair load_slots(const uint8_t *p)
{
    __m512i x = _mm512_permutexvar_epi16(tokens_from_slots(), _mm512_load_si512(p));
    return (struct pair){_mm512_cvtph_ps(_mm512_castsi512_si256(x)),
                         _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1))};
}

KVQ__INLINE void weigh(const struct kvq__codec *c, const uint8_t *group, const float *p,
                       struct weights *w, int rows)
{
    __m512 sum[KVQ__TILE4][4];
    for (uint32_t g = 0; g < c->dim / KVQ_GROUP_CHANNELS; g++) {
        struct pair scale = load_slots(group + c->layout.v_scales + 64 * g);
        struct pair zero = load_slots(group + c->layout.v_zeros + 64 * g);
        for (int i = 0; i < rows; i++) {
            __m512 p0 = _mm512_loadu_ps(p + i * KVQ__LOGITS_STRIDE);
            __m512 p1 = _mm512_loadu_ps(p + i * KVQ__LOGITS_STRIDE + 16);
            _mm512_store_ps(w[i].w[g], _mm512_mul_ps(p0, scale.first));
            _mm512_store_ps(w[i].w[g] + 16, _mm512_mul_ps(p1, scale.second));
            sum[i][g % 4] = _mm512_fmadd_ps(p1, zero.second, _mm512_mul_ps(p0, zero.first));
            if (g % 4 == 1)
                sum[i][2] = sum[i][3] = _mm512_setzero_ps();
            if (g % 4 == 3 || g == 1) {
                __m512 s = kvq__sum4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
                _mm_store_ps(w[i].zero + (g & ~3u), _mm512_castps512_ps128(s));
            }
        }
    }
}

// The high plane's share of set (j, half), lanes z, as 2-bit fields.
KVQ__INLINE __m512i v_high(const uint8_t *high, unsigned j, unsigned half, unsigned z, int bits)
{
    if (bits == 4)
        return kvq__load_row(high + KVQ__ROW_BYTES * (2 * j + half), z, j);
    __m512i x = kvq__load_row(high + KVQ__ROW_BYTES * j, z, j);
    return _mm512_and_si512(half ? _mm512_srli_epi16(x, 1) : x, _mm512_set1_epi8(0x55));
}

// Sums of 32 channels, in the order of the layout's words, to natural order, and into out.
static inline void add_wide(float *out, __m512 a, __m512 b, float zero)
{
    // Channel 16 u + 8 rh + g, g = 4 z + i, is word 4 i + 2 u + rh of half z.
    const __m512i first =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    __m512 z = _mm512_set1_ps(zero);
    __m512 x = _mm512_add_ps(_mm512_permutex2var_ps(a, first, b), z);
    __m512 y = _mm512_add_ps(_mm512_permutex2var_ps(a, second, b), z);
    _mm512_store_ps(out, _mm512_add_ps(_mm512_load_ps(out), x));
    _mm512_store_ps(out + 16, _mm512_add_ps(_mm512_load_ps(out + 16), y));
}

// Two of the four positions (n: the first or second two) of one slab of 128 channels.
KVQ__INLINE void pv_half_slab(const uint8_t *low, const uint8_t *high, const struct weights *w,
                              uint32_t slab, uint32_t n, float *out, uint32_t dim, int rows,
                              int bits)
{
    const struct tables t = tables_of(bits);
    uint32_t g = 4 * slab + 2 * n;
    __m512 acc[KVQ__TILE4][2][2];
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 2; s++)
            acc[i][s][0] = acc[i][s][1] = _mm512_setzero_ps();
    for (unsigned set = 0; set < 8; set++) {
        unsigned j = set / 2, half = set % 2;
        struct words x[2];
        for (unsigned z = 0; z < 2; z++) {
            __m512i y = kvq__load_row(low + KVQ__ROW_BYTES * set, z, j);
            x[z] = join(y, bits > 2 ? v_high(high, j, half, z, bits) : y, bits);
            if (n)
                shift(&x[z], 4);
        }
        for (unsigned k = 0; k < 4; k++) {
            __m512 a0 = _mm512_permutexvar_ps(x[0].a, t.a), a1 = _mm512_permutexvar_ps(x[1].a, t.a);
            __m512 b0 = _mm512_permutexvar_ps(x[0].b, t.b), b1 = _mm512_permutexvar_ps(x[1].b, t.b);
            for (int i = 0; i < rows; i++) {
                __m512 wa = _mm512_set1_ps(w[i].w[g][8 * j + 2 * k + half]);
                __m512 wb = _mm512_set1_ps(w[i].w[g + 1][8 * j + 2 * k + half]);
                acc[i][0][0] = _mm512_fmadd_ps(a0, wa, acc[i][0][0]);
                acc[i][0][1] = _mm512_fmadd_ps(a1, wa, acc[i][0][1]);
                acc[i][1][0] = _mm512_fmadd_ps(b0, wb, acc[i][1][0]);
                acc[i][1][1] = _mm512_fmadd_ps(b1, wb, acc[i][1][1]);
            }
            shift(&x[0], 8);
            shift(&x[1], 8);
        }
    }
    for (int i = 0; i < rows; i++, out += dim)
        for (uint32_t s = 0; s < 2; s++)
            add_wide(out + 32 * (g + s), acc[i][s][0], acc[i][s][1], w[i].zero[g + s]);
}

// head_dim 64: one register a set; positions 2 n and 2 n + 1 belong to channel group n.
KVQ__INLINE void pv_64(const uint8_t *low, const uint8_t *high, const struct weights *w, float *out,
                       int rows, int bits)
{
    const struct tables t = tables_of(bits);
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m512 acc[KVQ__TILE4][4];
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 4; s++)
            acc[i][s] = _mm512_setzero_ps();
    for (unsigned set = 0; set < 8; set++) {
        unsigned j = set / 2, half = set % 2, row = 2 * j + (half ^ (j & 1));
        __m512i x = kvq__load_row_64(low, row, j), y = x;
        if (bits == 4)
            y = kvq__load_row_64(high, row, j);
        if (bits == 3) {
            y = kvq__load_row_64(high, j, j);
            y = _mm512_and_si512(half ? _mm512_srli_epi16(y, 1) : y, _mm512_set1_epi8(0x55));
        }
        struct words c = join(x, y, bits);
        for (unsigned nibble = 0; nibble < 8; nibble++, shift(&c, 4)) {
            uint32_t n = nibble % 2, token = 8 * j + nibble / 2 * 2 + half;
            __m512 a = _mm512_permutexvar_ps(c.a, t.a), b = _mm512_permutexvar_ps(c.b, t.b);
            for (int i = 0; i < rows; i++) {
                __m512 weight = _mm512_set1_ps(w[i].w[n][token]);
                acc[i][2 * n] = _mm512_fmadd_ps(a, weight, acc[i][2 * n]);
                acc[i][2 * n + 1] = _mm512_fmadd_ps(b, weight, acc[i][2 * n + 1]);
            }
        }
    }
    for (int i = 0; i < rows; i++, out += 64)
        for (int s = 0; s < 4; s++) {
            __m512 x = _mm512_permutexvar_ps(order, acc[i][s]); // word 2 g + rh: channel 8 rh + g
            x = _mm512_add_ps(x, _mm512_set1_ps(w[i].zero[s / 2]));
            _mm512_store_ps(out + 16 * s, _mm512_add_ps(_mm512_load_ps(out + 16 * s), x));
        }
}

KVQ__INLINE void pv_rows(const struct kvq__codec *c, const uint8_t *group, const float *p,
                         float *out, int rows, int bits)
{
    const uint8_t *low = group + c->layout.v_codes, *high = low + 8 * c->dim;
    const uint32_t low_slab = KVQ_GROUP_TOKENS * KVQ__SLAB / 4;
    const uint32_t high_slab = bits == 3 ? low_slab / 2 : low_slab;
    struct weights w[KVQ__TILE4];
    weigh(c, group, p, w, rows);
    if (c->dim == 64)
        pv_64(low, high, w, out, rows, bits);
    for (uint32_t slab = 0; slab < c->dim / KVQ__SLAB; slab++) {
        const uint8_t *l = low + slab * low_slab, *h = high + slab * high_slab;
        pv_half_slab(l, h, w, slab, 0, out, c->dim, rows, bits);
        pv_half_slab(l, h, w, slab, 1, out, c->dim, rows, bits);
    }
}

KVQ__INLINE void pv_group(const struct kvq__tile *tile, const uint8_t *group, const float *p,
                          int bits)
{
    float *out = tile->ot;
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        switch (tile->rows - r) {
        case 1:
            pv_rows(tile->codec, group, p, out, 1, bits);
            break;
        case 2:
            pv_rows(tile->codec, group, p, out, 2, bits);
            break;
        case 3:
            pv_rows(tile->codec, group, p, out, 3, bits);
            break;
        default:
            pv_rows(tile->codec, group, p, out, 4, bits);
        }
        p += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
        out += KVQ__TILE4 * tile->dim;
    }
}

static void pv_packed_avx512(const struct kvq__tile *tile, const uint8_t *group, const float *p)
{
    switch (tile->codec->v_bits) {
    case 2:
        pv_group(tile, group, p, 2);
        break;
    case 3:
        pv_group(tile, group, p, 3);
        break;
    default:
        pv_group(tile, group, p, 4);
    }
}

void kvq__init_avx512_attend(struct kvq_kernels *k)
{
    k->qk_packed = qk_packed_avx512;
    k->pv_packed = pv_packed_avx512;
}
