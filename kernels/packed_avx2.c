// SPDX-License-Identifier: Apache-2.0
//
// Attention over packed groups in fp32, AVX2: the exact path.
//
// A lane is a token (K) or a channel (V), so nothing is ever added across lanes. Codes of 2 and 3
// bits become values by a permutation, which looks up the lowest bits of each word in a table of 4
// or 8 floats: scale * code + zero of one channel (K) or one token (V). With 2 bits the tables of a
// group are made before it is read, with 3 each in a register by one FMA; codes of 4 bits are
// converted and take that FMA themselves. Multiplying q or p with the scales instead would save the
// tables, but the zeros' share would then have to cancel between two large sums when a group holds
// one outlier.
//
// Registers, four rows to one unpacking: 8 accumulators (4 rows, 16 words), 2 registers of words
// and 2 of values, a table, a broadcast. One or two rows take 32 words, for more of them to be
// under way.
#include "kernels/avx2.h"

enum { MAX_WORDS = 4 }; // registers of 8 words

// Floats that are kept of a scale and its zero: with 2 bits a table, else the two of them.
KVQ__INLINE uint32_t param_floats(int bits)
{
    return bits == 2 ? 4 : 2;
}

// What codes of one channel (of one token) stand for.
struct values {
    __m256 a, b; // the table; of 4 bits scale and zero
};

// Parameter i, a constant, of those from a multiple of 8 on.
KVQ__INLINE struct values values_of(const float *params, uint32_t i, int bits)
{
    if (bits == 2) {
        const float *table = params + 32 * (i / 8) + 8 * (i % 4) + 4 * (i / 4 % 2);
        return (struct values){_mm256_broadcast_ps((const void *)table), _mm256_setzero_ps()};
    }
    __m256 a = _mm256_broadcast_ss(params + 2 * i), b = _mm256_broadcast_ss(params + 2 * i + 1);
    if (bits == 4)
        return (struct values){a, b};
    const __m256 codes = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    return (struct values){_mm256_fmadd_ps(codes, a, b), b};
}

// Of the codes whose lowest bit is bit `at` of each word.
KVQ__INLINE __m256 value(const struct values *v, __m256i words, int at, int bits)
{
    __m256i code = _mm256_srli_epi32(words, at);
    if (bits == 2)
        return _mm256_permutevar_ps(v->a, code);
    if (bits == 3)
        return _mm256_permutevar8x32_ps(v->a, code);
    code = _mm256_and_si256(code, _mm256_set1_epi32(15));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), v->a, v->b);
}

// The tables of eight codes, in the order that a transposition in halves leaves.
KVQ__INLINE void put_tables(float *params, __m256 *x)
{
    kvq__transpose4(x);
    for (int k = 0; k < 4; k++)
        _mm256_store_ps(params + 8 * k, x[k]);
}

// What values_of looks up, of n scales and zeros.
KVQ__INLINE void open_params(const uint8_t *scales, const uint8_t *zeros, uint32_t n, float *params,
                             int bits)
{
    for (uint32_t i = 0; i < n; i += 8) {
        __m256 a = kvq__load8(scales + 2 * i, KVQ_F16), b = kvq__load8(zeros + 2 * i, KVQ_F16);
        if (bits == 2) {
            __m256 x[4] = {b};
            for (int code = 1; code < 4; code++)
                x[code] = _mm256_fmadd_ps(_mm256_set1_ps((float)code), a, b);
            put_tables(params + 4 * i, x);
        } else {
            __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
            _mm256_store_ps(params + 2 * i, _mm256_permute2f128_ps(low, high, 0x20));
            _mm256_store_ps(params + 2 * i + 8, _mm256_permute2f128_ps(low, high, 0x31));
        }
    }
}

KVQ__INLINE __m256i load(const uint8_t *p)
{
    return _mm256_load_si256((const void *)p);
}

// The planes of one operand of a group, and its parameters.
struct packed {
    const uint8_t *low, *high, *ahead;
    uint32_t dim;
    uint32_t apart; // V: parameters from one channel group to the next; 0 where all share them
    _Alignas(32) float params[4 * KVQ_MAX_HEAD_DIM];
};

// ---- K ----

// Tokens 8 y to 8 y + 7 of row r of the planes: even and odd positions, which with 2 bits are one.
KVQ__INLINE void load_k(const struct packed *p, uint32_t r, uint32_t y, __m256i *even, __m256i *odd,
                        int bits)
{
    __m256i low = load(p->low + KVQ__ROW_BYTES * r + 32 * (y ^ (r & 3))), high;
    *even = *odd = low;
    if (bits == 2)
        return;
    if (bits == 4) {
        high = load(p->high + KVQ__ROW_BYTES * r + 32 * (y ^ (r & 3)));
    } else { // rows r and r + half a slab share a row of bits
        uint32_t half = p->dim == 64 ? 2 : 4, row = r / (2 * half) * half + r % half;
        high = load(p->high + KVQ__ROW_BYTES * row + 32 * (y ^ (r % half)));
        high = _mm256_srl_epi16(high, _mm_cvtsi32_si128(r % (2 * half) >= half));
        high = _mm256_and_si256(high, _mm256_set1_epi8(0x55));
    }
    *even = kvq__join_planes(low, high, 0);
    *odd = kvq__join_planes(low, high, 1);
}

// The four channels at position s of a row of the planes, whose parameters and queries are given,
// times up to four rows of q; n registers of tokens.
KVQ__INLINE void k_position(__m256 acc[][MAX_WORDS], const __m256i *words, const float *params,
                            const float *q, uint32_t dim, int s, int rows, uint32_t n, int bits)
{
    for (uint32_t c = 4 * (uint32_t)s; c < 4 * (uint32_t)s + 4; c++) {
        struct values v = values_of(params, c, bits);
        int at = (int)kvq_k_bit(c) - (bits == 2 ? 0 : s % 2 * 2);
        __m256 x[MAX_WORDS];
        for (uint32_t z = 0; z < n; z++)
            x[z] = value(&v, words[z], at, bits);
        for (int i = 0; i < rows; i++) {
            __m256 y = _mm256_broadcast_ss(q + (uint32_t)i * dim + c);
            for (uint32_t z = 0; z < n; z++)
                acc[i][z] = _mm256_fmadd_ps(x[z], y, acc[i][z]);
        }
    }
}

// 16 channels, row r of the planes.
KVQ__INLINE void k_row(__m256 acc[][MAX_WORDS], const struct packed *p, const float *q, uint32_t r,
                       uint32_t y, int rows, uint32_t n, int bits)
{
    const float *params = p->params + 16 * r * param_floats(bits);
    __m256i even[MAX_WORDS], odd[MAX_WORDS];
    for (uint32_t z = 0; z < n; z++)
        load_k(p, r, y + z, &even[z], &odd[z], bits);
    kvq__fetch_bytes(p->ahead + 16 * (r * 4 + y) * ((uint32_t)bits + 1), 16 * n * (bits + 1u));
    q += 16 * r;
    k_position(acc, even, params, q, p->dim, 0, rows, n, bits);
    k_position(acc, odd, params, q, p->dim, 1, rows, n, bits);
    k_position(acc, even, params, q, p->dim, 2, rows, n, bits);
    k_position(acc, odd, params, q, p->dim, 3, rows, n, bits);
}

// n registers of tokens from 8 y on.
KVQ__INLINE void k_words(const struct packed *p, const float *norm, const float *q, float *logits,
                         uint32_t y, int rows, uint32_t n, int bits)
{
    __m256 acc[KVQ__TILE4][MAX_WORDS];
    for (int i = 0; i < rows; i++)
        for (uint32_t z = 0; z < n; z++)
            acc[i][z] = _mm256_setzero_ps();
    for (uint32_t r = 0; r < p->dim / 16; r++)
        k_row(acc, p, q, r, y, rows, n, bits);
    for (int i = 0; i < rows; i++)
        for (uint32_t z = 0; z < n; z++)
            _mm256_storeu_ps(logits + i * KVQ__LOGITS_STRIDE + 8 * (y + z),
                             _mm256_mul_ps(acc[i][z], _mm256_load_ps(norm + 8 * (y + z))));
}

KVQ__INLINE void qk_rows(const struct packed *p, const float *norm, const float *q, float *logits,
                         int rows, int bits)
{
    const uint32_t n = rows <= 2 ? 4 : 2;
    for (uint32_t y = 0; y < 4; y += n)
        k_words(p, norm, q, logits, y, rows, n, bits);
}

KVQ__INLINE void qk_group(const struct kvq__tile *tile, const struct kvq_packed *packed,
                          struct packed *p, const float *norm, float *logits, int bits)
{
    const float *q = tile->qt;
    open_params(packed->k_scales, packed->k_zeros, p->dim, p->params, bits);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        KVQ__BY_ROWS(tile->rows - r, qk_rows(p, norm, q, logits, ROWS, bits));
        p->ahead = p->low; // what was asked for once is on its way
        q += KVQ__TILE4 * tile->dim;
        logits += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
    }
}

static void qk_packed_avx2(const struct kvq__tile *tile, const struct kvq_packed *packed,
                           float *logits)
{
    const struct kvq__codec *c = tile->codec;
    _Alignas(32) float norm[KVQ_GROUP_TOKENS];
    struct packed p;
    kvq__fetch_beside_k(tile, packed);
    p.low = packed->group + c->layout.k_codes;
    p.high = p.low + 8 * c->dim;
    p.ahead = tile->ahead ? tile->ahead : p.low;
    p.dim = c->dim;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += 8) {
        const uint8_t *norms = packed->group + c->layout.k_norms + 2 * t;
        _mm256_store_ps(norm + t, c->has_norms ? kvq__load8(norms, KVQ_F16) : _mm256_set1_ps(1.0f));
    }
    KVQ__BY_BITS(c->k_bits, qk_group(tile, packed, &p, norm, logits, BITS));
}

// ---- V ----

// Words 8 y to 8 y + 7 of set (j, half) of a slab, at position s alone.
KVQ__INLINE __m256i load_v(const struct packed *p, uint32_t slab, uint32_t set, uint32_t y, int s,
                           bool wide, int bits)
{
    uint32_t j = set / 2, half = set % 2;
    const uint8_t *low_plane = p->low + 8 * KVQ__SLAB * slab;
    const uint8_t *high_plane = p->high + (bits == 3 ? 4 : 8) * KVQ__SLAB * slab;
    uint32_t at = wide ? KVQ__ROW_BYTES * set + 32 * (y ^ j)
                       : 64 * (2 * j + (half ^ (j & 1))) + 32 * (y ^ (j >> 1));
    __m256i low = load(low_plane + at), high;
    if (bits == 2)
        return low;
    if (bits == 4) {
        high = load(high_plane + at);
    } else {
        at = wide ? KVQ__ROW_BYTES * j + 32 * (y ^ j) : 64 * j + 32 * (y ^ (j >> 1));
        high = _mm256_srl_epi16(load(high_plane + at), _mm_cvtsi32_si128((int)half));
        high = _mm256_and_si256(high, _mm256_set1_epi8(0x55));
    }
    return kvq__join_planes(low, high, s % 2);
}

// A set of four tokens at position s: n registers of words from 8 y on. Parameters of the k-th
// token stand at slots 0, 4, 1, 5, p at every second token.
KVQ__INLINE void v_set(__m256 acc[][MAX_WORDS], const struct packed *v, const float *params,
                       const float *p, uint32_t slab, uint32_t set, uint32_t y, int rows,
                       uint32_t n, bool wide, int s, int bits)
{
    __m256i words[MAX_WORDS];
    for (uint32_t z = 0; z < n; z++)
        words[z] = load_v(v, slab, set, y + z, s, wide, bits);
    for (int k = 0; k < 4; k++) {
        struct values values = values_of(params, (uint32_t)(k / 2 + 4 * (k % 2)), bits);
        __m256 x[MAX_WORDS];
        for (uint32_t z = 0; z < n; z++)
            x[z] = value(&values, words[z], 8 * k + (bits == 2 ? 2 * s : s / 2 * 4), bits);
        for (int i = 0; i < rows; i++) {
            __m256 weight = _mm256_broadcast_ss(p + i * KVQ__LOGITS_STRIDE + 2 * k);
            for (uint32_t z = 0; z < n; z++)
                acc[i][z] = _mm256_fmadd_ps(x[z], weight, acc[i][z]);
        }
    }
}

// n registers of words from 8 y on, at position s of a slab: sums of all sets, in the order of
// words, for up to four rows.
KVQ__INLINE void v_words(const struct packed *v, uint32_t group, const float *p,
                         float sums[][KVQ_GROUP_CHANNELS], uint32_t y, int rows, uint32_t n,
                         bool wide, int s, int bits)
{
    __m256 acc[KVQ__TILE4][MAX_WORDS];
    for (int i = 0; i < rows; i++)
        for (uint32_t z = 0; z < n; z++)
            acc[i][z] = _mm256_setzero_ps();
    for (uint32_t set = 0; set < 8; set++) {
        uint32_t first = 8 * (set / 2), odd = set % 2;
        const float *params = v->params + (group * v->apart + first) * param_floats(bits) +
                              odd * (bits == 2 ? 16 : 4);
        kvq__fetch_bytes(v->ahead + 4 * ((8 * group + set) * 4 + y) * ((uint32_t)bits + 1),
                         4 * n * (bits + 1u));
        v_set(acc, v, params, p + first + odd, group / 4, set, y, rows, n, wide, s, bits);
    }
    for (int i = 0; i < rows; i++)
        for (uint32_t z = 0; z < n; z++)
            _mm256_store_ps(sums[i] + 8 * (y + z), acc[i][z]);
}

// Position s of a slab; o is where its channels start.
KVQ__INLINE void v_position(const struct packed *v, uint32_t slab, const float *p, float *o,
                            int rows, bool wide, int s, int bits)
{
    const uint32_t words = wide ? 4 : 2, n = wide && rows <= 2 ? 4 : 2;
    _Alignas(32) float sums[KVQ__TILE4][KVQ_GROUP_CHANNELS];
    uint32_t group = wide ? 4 * slab + (uint32_t)s : (uint32_t)s / 2;
    for (uint32_t y = 0; y < words; y += n)
        v_words(v, group, p, sums, y, rows, n, wide, s, bits);
    for (int i = 0; i < rows; i++, o += v->dim) {
        __m256 x[MAX_WORDS];
        kvq__channels_of_words(sums[i], words, x);
        for (uint32_t a = 0; a < words; a++)
            _mm256_store_ps(o + 8 * a, _mm256_add_ps(_mm256_load_ps(o + 8 * a), x[a]));
    }
}

KVQ__INLINE void v_slab(const struct packed *v, uint32_t slab, const float *p, float *o, int rows,
                        bool wide, int bits)
{
    const uint32_t channels = wide ? 32 : 16;
    v_position(v, slab, p, o, rows, wide, 0, bits);
    v_position(v, slab, p, o + channels, rows, wide, 1, bits);
    v_position(v, slab, p, o + 2 * channels, rows, wide, 2, bits);
    v_position(v, slab, p, o + 3 * channels, rows, wide, 3, bits);
}

KVQ__INLINE void pv_rows(const struct packed *v, const float *p, float *o, int rows, int bits)
{
    if (v->dim == 64)
        v_slab(v, 0, p, o, rows, false, bits);
    for (uint32_t slab = 0; slab < v->dim / KVQ__SLAB; slab++)
        v_slab(v, slab, p, o + slab * KVQ__SLAB, rows, true, bits);
}

KVQ__INLINE void pv_group(const struct kvq__tile *tile, struct packed *v, const float *p, int bits)
{
    float *o = tile->ot;
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        KVQ__BY_ROWS(tile->rows - r, pv_rows(v, p, o, ROWS, bits));
        v->ahead = v->low;
        p += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
        o += KVQ__TILE4 * tile->dim;
    }
}

// All but the parameters.
static void start_v(struct packed *v, const struct kvq__tile *tile, const struct kvq_packed *packed)
{
    v->low = packed->group + tile->codec->layout.v_codes;
    v->high = v->low + 8 * tile->dim;
    v->ahead = tile->ahead ? tile->ahead : v->low;
    v->dim = tile->dim;
}

KVQ__INLINE void pv_affine(const struct kvq__tile *tile, const struct kvq_packed *packed,
                           const float *p, int bits)
{
    struct packed v;
    start_v(&v, tile, packed);
    v.apart = KVQ_GROUP_TOKENS;
    open_params(packed->v_scales, packed->v_zeros, v.dim, v.params, bits);
    pv_group(tile, &v, p, bits);
}

static void pv_packed_avx2(const struct kvq__tile *tile, const struct kvq_packed *packed,
                           const float *p)
{
    KVQ__BY_BITS(tile->codec->v_bits, pv_affine(tile, packed, p, BITS));
}

// One scale of a token serves all its channels, and its table is that times the four levels.
static void pv_four_levels(const struct kvq__tile *tile, const struct kvq_packed *packed,
                           const float *p)
{
    const float *levels = tile->codec->v.levels;
    struct packed v;
    start_v(&v, tile, packed);
    v.apart = 0;
    for (uint32_t i = 0; i < KVQ_GROUP_TOKENS; i += 8) {
        __m256 x[4], scale = kvq__load8(packed->v_scales + 2 * i, KVQ_F16);
        for (int code = 0; code < 4; code++)
            x[code] = _mm256_mul_ps(scale, _mm256_set1_ps(levels[code]));
        put_tables(v.params + 4 * i, x);
    }
    pv_group(tile, &v, p, 2);
}

void kvq__init_avx2_packed(struct kvq_kernels *k)
{
    k->qk_packed[KVQ__PER_CHANNEL_32] = k->qk_packed[KVQ__PER_CHANNEL] = qk_packed_avx2;
    k->pv_packed[KVQ__PER_TOKEN_32] = pv_packed_avx2;
    k->pv_packed[KVQ__FOUR_LEVELS] = pv_four_levels;
}
