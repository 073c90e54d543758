// SPDX-License-Identifier: Apache-2.0
//
// Attention over packed groups in fp32, AVX-512: the exact path of formats that the loops over
// digits (vnni_avx512.c) do not know as a whole, and of what prompts with AMX leave over.
//
// A lane is a token (K) or a channel (V), so nothing is ever added across lanes. Codes become
// values by vpermps, which looks up the low 4 bits of each word in a table of 16 floats: scale *
// code + zero of one channel (K) or one token (V), made in a register by one FMA. One shift and
// two lookups serve two 2-bit codes of 16 words, with tables that each see one half of the nibble;
// codes of 3 and 4 bits are joined to nibbles first and looked up whole. Multiplying q or p with
// the scales instead would save the tables' FMA, but the zeros' share would then have to cancel
// between two large sums when a group holds one outlier.
//
// Registers, four rows to one unpacking: 16 accumulators (4 rows, 2 positions, 2 halves of a row
// of words), 4 words, 2 tables, 4 values, a broadcast. 16 FMA stand beside 8 instructions of
// unpacking, so the FMA units are the limit.
#include "kernels/avx512.h"

enum { SLABS = KVQ_MAX_HEAD_DIM / KVQ__SLAB };

struct words {
    __m512i a, b;
};

// What the 16 values of a nibble stand for, before scale and zero: a's are those of even positions,
// b's of odd.
struct codes {
    __m512 a, b;
};

// Codes stand for themselves, or those of 2 bits for four levels.
KVQ__INLINE struct codes codes_of(int bits, const float *levels)
{
    static const float own[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512 all = _mm512_loadu_ps(own);
    if (bits > 2)
        return (struct codes){all, all};
    const __m512i two = _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    const __m512i four = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m512 x = _mm512_broadcast_f32x4(_mm_loadu_ps(levels ? levels : own));
    return (struct codes){_mm512_permutexvar_ps(two, x), _mm512_permutexvar_ps(four, x)};
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

// Scale and zero in fp32, of one slab: of channels for K, of [channel group][token] for V.
struct affine {
    _Alignas(64) float scale[KVQ__SLAB];
    _Alignas(64) float zero[KVQ__SLAB];
};

KVQ__INLINE __m512 table(__m512 codes, const struct affine *a, uint32_t i)
{
    return _mm512_fmadd_ps(codes, _mm512_set1_ps(a->scale[i]), _mm512_set1_ps(a->zero[i]));
}

// The lowest nibble of all words: channel c and the one 4 behind it.
KVQ__INLINE void k_nibble(__m512 acc[][2][2], struct words *w, const struct codes *codes,
                          const struct affine *slab, const float *q, uint32_t dim, uint32_t c,
                          int rows)
{
    const struct affine *f = slab + c / KVQ__SLAB;
    uint32_t in_slab = c % KVQ__SLAB;
    __m512 ta = table(codes->a, f, in_slab), tb = table(codes->b, f, in_slab + 4);
    __m512 a0 = _mm512_permutexvar_ps(w[0].a, ta), a1 = _mm512_permutexvar_ps(w[1].a, ta);
    __m512 b0 = _mm512_permutexvar_ps(w[0].b, tb), b1 = _mm512_permutexvar_ps(w[1].b, tb);
    for (int i = 0; i < rows; i++) {
        const float *at = q + (uint32_t)i * dim + c;
        __m512 qa = _mm512_set1_ps(at[0]), qb = _mm512_set1_ps(at[4]);
        acc[i][0][0] = _mm512_fmadd_ps(a0, qa, acc[i][0][0]);
        acc[i][0][1] = _mm512_fmadd_ps(a1, qa, acc[i][0][1]);
        acc[i][1][0] = _mm512_fmadd_ps(b0, qb, acc[i][1][0]);
        acc[i][1][1] = _mm512_fmadd_ps(b1, qb, acc[i][1][1]);
    }
    shift(&w[0], 4);
    shift(&w[1], 4);
}

KVQ__INLINE void qk_rows(const struct kvq__codec *c, const uint8_t *group, const struct affine *f,
                         const float *q, const uint8_t *ahead, float *logits, int rows, int bits)
{
    const struct codes codes = codes_of(bits, NULL);
    const uint8_t *low = group + c->layout.k_codes, *high = low + 8 * c->dim;
    uint32_t dim = c->dim;
    __m512 acc[KVQ__TILE4][2][2];
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < 2; n++)
            acc[i][n][0] = acc[i][n][1] = _mm512_setzero_ps();
    for (uint32_t r = 0; r < dim / 16; r++) {
        struct words w[2];
        if (ahead)
            kvq__fetch_lines(ahead + 64 * (bits + 1) * r, bits + 1);
        for (unsigned z = 0; z < 2; z++) {
            __m512i x = kvq__load_row(low + KVQ__ROW_BYTES * r, z, r & 3);
            w[z] = join(x, bits > 2 ? k_high(high, dim, r, z, bits) : x, bits);
        }
        // Nibble n: byte n / 2 = 2 h + e, positions 2 (n % 2) and the next; layout.h, 4.
        k_nibble(acc, w, &codes, f, q, dim, 16 * r, rows);
        k_nibble(acc, w, &codes, f, q, dim, 16 * r + 8, rows);
        k_nibble(acc, w, &codes, f, q, dim, 16 * r + 2, rows);
        k_nibble(acc, w, &codes, f, q, dim, 16 * r + 10, rows);
        k_nibble(acc, w, &codes, f, q, dim, 16 * r + 1, rows);
        k_nibble(acc, w, &codes, f, q, dim, 16 * r + 9, rows);
        k_nibble(acc, w, &codes, f, q, dim, 16 * r + 3, rows);
        k_nibble(acc, w, &codes, f, q, dim, 16 * r + 11, rows);
    }
    const uint8_t *norms = group + c->layout.k_norms;
    __m512 norm0 = c->has_norms ? kvq__load_f16(norms) : _mm512_set1_ps(1.0f);
    __m512 norm1 = c->has_norms ? kvq__load_f16(norms + 32) : norm0;
    for (int i = 0; i < rows; i++, logits += KVQ__LOGITS_STRIDE) {
        __m512 s0 = _mm512_add_ps(acc[i][0][0], acc[i][1][0]);
        __m512 s1 = _mm512_add_ps(acc[i][0][1], acc[i][1][1]);
        _mm512_storeu_ps(logits, _mm512_mul_ps(s0, norm0));
        _mm512_storeu_ps(logits + 16, _mm512_mul_ps(s1, norm1));
    }
}

KVQ__INLINE void qk_group(const struct kvq__tile *tile, const struct kvq_packed *packed,
                          float *logits, int bits)
{
    const struct kvq__codec *c = tile->codec;
    const uint8_t *group = packed->group;
    const float *q = tile->qt;
    const uint8_t *ahead = tile->ahead;
    struct affine f[SLABS];
    kvq__fetch_beside_k(tile, packed);
    for (uint32_t i = 0; i < c->dim; i += 16) {
        const uint8_t *scale = packed->k_scales, *zero = packed->k_zeros;
        _mm512_store_ps(f[i / KVQ__SLAB].scale + i % KVQ__SLAB, kvq__load_f16(scale + 2 * i));
        _mm512_store_ps(f[i / KVQ__SLAB].zero + i % KVQ__SLAB, kvq__load_f16(zero + 2 * i));
    }
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        switch (tile->rows - r) {
        case 1:
            qk_rows(c, group, f, q, ahead, logits, 1, bits);
            break;
        case 2:
            qk_rows(c, group, f, q, ahead, logits, 2, bits);
            break;
        case 3:
            qk_rows(c, group, f, q, ahead, logits, 3, bits);
            break;
        default:
            qk_rows(c, group, f, q, ahead, logits, 4, bits);
        }
        ahead = NULL; // what was asked for once is on its way
        q += KVQ__TILE4 * tile->dim;
        logits += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
    }
}

void kvq__qk_packed_avx512(const struct kvq__tile *tile, const struct kvq_packed *packed,
                           float *logits)
{
    switch (tile->codec->k_bits) {
    case 2:
        qk_group(tile, packed, logits, 2);
        break;
    case 3:
        qk_group(tile, packed, logits, 3);
        break;
    default:
        qk_group(tile, packed, logits, 4);
    }
}

// ---- V ----

// The high plane's share of set (j, half), lanes z, as 2-bit fields.
KVQ__INLINE __m512i v_high(const uint8_t *high, unsigned j, unsigned half, unsigned z, int bits)
{
    if (bits == 4)
        return kvq__load_row(high + KVQ__ROW_BYTES * (2 * j + half), z, j);
    __m512i x = kvq__load_row(high + KVQ__ROW_BYTES * j, z, j);
    return _mm512_and_si512(half ? _mm512_srli_epi16(x, 1) : x, _mm512_set1_epi8(0x55));
}

// Sums of 32 channels, in the order of the layout's words, to natural order, and into out.
static inline void add_wide(float *out, __m512 a, __m512 b)
{
    // Channel 16 u + 8 rh + g, g = 4 z + i, is word 4 i + 2 u + rh of half z.
    const __m512i first =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    __m512 x = _mm512_permutex2var_ps(a, first, b), y = _mm512_permutex2var_ps(a, second, b);
    _mm512_store_ps(out, _mm512_add_ps(_mm512_load_ps(out), x));
    _mm512_store_ps(out + 16, _mm512_add_ps(_mm512_load_ps(out + 16), y));
}

// What V's codes are.
struct how {
    int bits;
    const float *levels; // NULL: affine
};

// Two of the four positions (n: the first or second two) of one slab of 128 channels.
KVQ__INLINE void pv_half_slab(const uint8_t *low, const uint8_t *high, const struct affine *f,
                              const float *p, const uint8_t *ahead, uint32_t n, float *out,
                              uint32_t dim, int rows, struct how how)
{
    const struct codes codes = codes_of(how.bits, how.levels);
    const int bits = how.bits;
    __m512 acc[KVQ__TILE4][2][2];
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 2; s++)
            acc[i][s][0] = acc[i][s][1] = _mm512_setzero_ps();
    for (unsigned set = 0; set < 8; set++) {
        unsigned j = set / 2, half = set % 2;
        struct words x[2];
        if (ahead)
            kvq__fetch_lines(ahead + 64 * (bits + 1) * set, bits + 1);
        for (unsigned z = 0; z < 2; z++) {
            __m512i y = kvq__load_row(low + KVQ__ROW_BYTES * set, z, j);
            x[z] = join(y, bits > 2 ? v_high(high, j, half, z, bits) : y, bits);
            if (n)
                shift(&x[z], 4);
        }
        for (unsigned k = 0; k < 4; k++) {
            uint32_t t = 8 * j + 2 * k + half;
            __m512 ta = table(codes.a, f, 64 * n + t), tb = table(codes.b, f, 64 * n + 32 + t);
            __m512 a0 = _mm512_permutexvar_ps(x[0].a, ta), a1 = _mm512_permutexvar_ps(x[1].a, ta);
            __m512 b0 = _mm512_permutexvar_ps(x[0].b, tb), b1 = _mm512_permutexvar_ps(x[1].b, tb);
            for (int i = 0; i < rows; i++) {
                __m512 w = _mm512_set1_ps(p[(uint32_t)i * KVQ__LOGITS_STRIDE + t]);
                acc[i][0][0] = _mm512_fmadd_ps(a0, w, acc[i][0][0]);
                acc[i][0][1] = _mm512_fmadd_ps(a1, w, acc[i][0][1]);
                acc[i][1][0] = _mm512_fmadd_ps(b0, w, acc[i][1][0]);
                acc[i][1][1] = _mm512_fmadd_ps(b1, w, acc[i][1][1]);
            }
            shift(&x[0], 8);
            shift(&x[1], 8);
        }
    }
    for (int i = 0; i < rows; i++, out += dim)
        for (uint32_t s = 0; s < 2; s++)
            add_wide(out + 64 * n + 32 * s, acc[i][s][0], acc[i][s][1]);
}

// head_dim 64: one register a set; positions 2 n and 2 n + 1 belong to channel group n.
KVQ__INLINE void pv_64(const uint8_t *low, const uint8_t *high, const struct affine *f,
                       const float *p, const uint8_t *ahead, float *out, int rows, struct how how)
{
    const struct codes codes = codes_of(how.bits, how.levels);
    const int bits = how.bits;
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m512 acc[KVQ__TILE4][4];
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 4; s++)
            acc[i][s] = _mm512_setzero_ps();
    for (unsigned set = 0; set < 8; set++) {
        unsigned j = set / 2, half = set % 2, row = 2 * j + (half ^ (j & 1));
        if (ahead)
            kvq__fetch_lines(ahead + 32 * (bits + 1) * set, (bits + 2) / 2);
        __m512i x = kvq__load_row_64(low, row, j), y = x;
        if (bits == 4)
            y = kvq__load_row_64(high, row, j);
        if (bits == 3) {
            y = kvq__load_row_64(high, j, j);
            y = _mm512_and_si512(half ? _mm512_srli_epi16(y, 1) : y, _mm512_set1_epi8(0x55));
        }
        struct words c = join(x, y, bits);
        for (unsigned t = 8 * j + half; t < 8 * j + 8; t += 2)
            for (uint32_t n = 0; n < 2; n++) {
                __m512 a = _mm512_permutexvar_ps(c.a, table(codes.a, f, 32 * n + t));
                __m512 b = _mm512_permutexvar_ps(c.b, table(codes.b, f, 32 * n + t));
                for (int i = 0; i < rows; i++) {
                    __m512 w = _mm512_set1_ps(p[(uint32_t)i * KVQ__LOGITS_STRIDE + t]);
                    acc[i][2 * n] = _mm512_fmadd_ps(a, w, acc[i][2 * n]);
                    acc[i][2 * n + 1] = _mm512_fmadd_ps(b, w, acc[i][2 * n + 1]);
                }
                shift(&c, 4);
            }
    }
    for (int i = 0; i < rows; i++, out += 64)
        for (int s = 0; s < 4; s++) {
            __m512 x = _mm512_permutexvar_ps(order, acc[i][s]); // word 2 g + rh: channel 8 rh + g
            _mm512_store_ps(out + 16 * s, _mm512_add_ps(_mm512_load_ps(out + 16 * s), x));
        }
}

KVQ__INLINE void pv_rows(const struct kvq__codec *c, const uint8_t *group, const struct affine *f,
                         const float *p, const uint8_t *ahead, float *out, int rows, struct how how)
{
    const uint8_t *low = group + c->layout.v_codes, *high = low + 8 * c->dim;
    const uint32_t low_slab = KVQ_GROUP_TOKENS * KVQ__SLAB / 4;
    const uint32_t high_slab = how.bits == 3 ? low_slab / 2 : low_slab;
    if (c->dim == 64) {
        pv_64(low, high, f, p, ahead, out, rows, how);
        return;
    }
    for (uint32_t slab = 0; slab < c->dim / KVQ__SLAB; slab++)
        for (uint32_t n = 0; n < 2; n++)
            pv_half_slab(low + slab * low_slab, high + slab * high_slab, &f[slab], p,
                         n || !ahead ? NULL : ahead + slab * 8 * 64 * (size_t)(how.bits + 1), n,
                         out + slab * KVQ__SLAB, c->dim, rows, how);
}

// Scales and zeros for [channel group][token]. Of four levels a token's scale serves all groups.
KVQ__INLINE void open_v(const struct kvq__codec *c, const uint8_t *group, struct affine *f,
                        struct how how)
{
    for (uint32_t i = 0; i < c->dim; i += KVQ_GROUP_TOKENS) {
        float *scale = f[i / KVQ__SLAB].scale + i % KVQ__SLAB;
        float *zero = f[i / KVQ__SLAB].zero + i % KVQ__SLAB;
        kvq__load_slots(group + c->layout.v_scales + (how.levels ? 0 : 2 * i), scale);
        if (how.levels)
            memset(zero, 0, KVQ_GROUP_TOKENS * sizeof *zero);
        else
            kvq__load_slots(group + c->layout.v_zeros + 2 * i, zero);
    }
}

KVQ__INLINE void pv_group(const struct kvq__tile *tile, const uint8_t *group, const float *p,
                          struct how how)
{
    const struct kvq__codec *c = tile->codec;
    float *out = tile->ot;
    const uint8_t *ahead = tile->ahead;
    struct affine f[SLABS];
    open_v(c, group, f, how);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        switch (tile->rows - r) {
        case 1:
            pv_rows(c, group, f, p, ahead, out, 1, how);
            break;
        case 2:
            pv_rows(c, group, f, p, ahead, out, 2, how);
            break;
        case 3:
            pv_rows(c, group, f, p, ahead, out, 3, how);
            break;
        default:
            pv_rows(c, group, f, p, ahead, out, 4, how);
        }
        ahead = NULL;
        p += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
        out += KVQ__TILE4 * tile->dim;
    }
}

static void pv_packed_avx512(const struct kvq__tile *tile, const struct kvq_packed *packed,
                             const float *p)
{
    const uint8_t *group = packed->group;
    switch (tile->codec->v_bits) {
    case 2:
        pv_group(tile, group, p, (struct how){2, NULL});
        break;
    case 3:
        pv_group(tile, group, p, (struct how){3, NULL});
        break;
    default:
        pv_group(tile, group, p, (struct how){4, NULL});
    }
}

static void pv_four_levels(const struct kvq__tile *tile, const struct kvq_packed *packed,
                           const float *p)
{
    pv_group(tile, packed->group, p, (struct how){2, tile->codec->v.levels});
}

void kvq__init_avx512_attend(struct kvq_kernels *k)
{
    k->qk_packed[KVQ__PER_CHANNEL_32] = k->qk_packed[KVQ__PER_CHANNEL] = kvq__qk_packed_avx512;
    k->pv_packed[KVQ__PER_TOKEN_32] = pv_packed_avx512;
    k->pv_packed[KVQ__FOUR_LEVELS] = pv_four_levels;
}
