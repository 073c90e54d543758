// SPDX-License-Identifier: Apache-2.0
//
// Values of packed groups with byte dot products. See vnni_avx512.c for the method.
//
// Registers of the dot products: 16 accumulators (4 rows, 2 positions, 32 words), 2 registers of
// words and their 4 codes, 2 tables, the broadcast weights. Positions are taken in pairs since
// all four would need 32 accumulators. The weights are the unsigned operand, which cannot come
// from memory as a broadcast, so each broadcast serves two registers of words.
#include "kernels/vnni_avx512.h"

enum { V16_TOP = 2890 }; // what the largest p and V scale become as int16: 2890^2 / 2^15 < 255

// ---- V: p * scale as u8, for all groups of a batch ----

// From slots, in which scales and zeros stand, to tokens: slots are 0, 4, 1, 5, .. of each 8 tokens.
static inline __m512i tokens_from_slots(void)
{
    static const uint16_t order[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12,
                                       14, 9,  11, 13, 15, 16, 18, 20, 22, 17, 19,
                                       21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
    return _mm512_loadu_si512(order);
}

// The weights of two channel groups as the two packs leave them: lane i has, of either group, the
// tokens 4 i to 4 i + 3 and 16 more. Here byte 32 g + 4 (2 j + half) + k becomes token 8 j + 2 k +
// half: the four of a set stand together.
static inline __m512i sets_from_packs(void)
{
    _Alignas(64) uint8_t order[64];
    for (unsigned i = 0; i < 64; i++) {
        unsigned t = i % 32 / 8 * 8 + i % 4 * 2 + i / 4 % 2;
        order[i] = (uint8_t)(t % 16 / 4 * 16 + i / 32 * 8 + t / 16 * 4 + t % 4);
    }
    return _mm512_load_si512(order);
}

// Where the four weights of a channel group and a set stand.
KVQ__INLINE uint32_t weight_at(uint32_t group, uint32_t set)
{
    return 32 * group + 4 * set;
}

// p of one row; tokens that are not packed, and outliers, count nothing here.
KVQ__INLINE void load_p(const struct kvq__tile *tile, const struct kvq__batch *b, uint32_t i,
                        uint32_t r, __m512 *p)
{
    uint32_t n = b->group[i]->packed_tokens;
    __mmask32 mask = (n < KVQ_GROUP_TOKENS ? (1u << n) - 1 : UINT32_MAX) & ~b->group[i]->pooled;
    const float *at =
        tile->logits + (size_t)r * KVQ__LOGITS_STRIDE + b->index[i] * KVQ_GROUP_TOKENS;
    p[0] = _mm512_maskz_loadu_ps((__mmask16)mask, at);
    p[1] = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), at + 16);
}

// p of up to four rows of group i as int16, with a step of its own for each row.
KVQ__INLINE void weigh(const struct kvq__tile *tile, const struct kvq__batch *b, uint32_t i,
                       uint32_t first, uint32_t dim, int rows)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    float max = kvq__max_f16(b->group[i]->packed.group + tile->codec->layout.v_scales, dim);
    __m512 p[KVQ__TILE4][2], top[KVQ__TILE4];
    // p is at most 1, so with this floor nothing overflows; all weights are 0 then.
    for (int n = 0; n < KVQ__TILE4; n++)
        top[n] = _mm512_set1_ps(1e-30f);
    for (int n = 0; n < rows; n++) {
        load_p(tile, b, i, first + (uint32_t)n, p[n]);
        top[n] = _mm512_max_ps(top[n], _mm512_max_ps(p[n][0], p[n][1]));
    }
    __m512 x = kvq__max4(top[0], top[1], top[2], top[3]);
    __m512 by = _mm512_div_ps(_mm512_set1_ps(V16_TOP), x);
    for (uint32_t line = 0; line < dim / 32; line++)
        kvq__fetch_step(v, 0, b->index[i], 32 * line, dim, tile->codec->v_bits);
    for (int n = 0; n < rows; n++) {
        __m512 f = _mm512_permutexvar_ps(_mm512_set1_epi32(n), by);
        _mm512_store_si512(v->p16[i][n], kvq__to_int16(p[n][0], p[n][1], f));
    }
    v->v_factor[i] = V16_TOP / max;
    // Codes are multiplied as 2 * code - (2^bits - 1), twice the distance from their middle.
    __m128 unit = _mm_set1_ps(max / V16_TOP * (0.5f * 32768.0f / V16_TOP));
    _mm_store_ps(v->unit[i] + first, _mm_mul_ps(_mm512_castps512_ps128(x), unit));
}

// One channel group of a group, in the order of tokens: scales as int16, packed; the middles.
KVQ__INLINE __m512i open_v(const struct kvq__codec *c, const uint8_t *group, uint32_t channels,
                           float factor, __m512 *middle)
{
    const __m512i order = tokens_from_slots();
    const __m512 centre = _mm512_set1_ps(kvq__centre_of(c->v_bits));
    const uint8_t *scales = group + c->layout.v_scales, *zeros = group + c->layout.v_zeros;
    __m512i s = _mm512_permutexvar_epi16(order, _mm512_load_si512(scales + 64 * channels));
    __m512i z = _mm512_permutexvar_epi16(order, _mm512_load_si512(zeros + 64 * channels));
    __m512 a = _mm512_cvtph_ps(_mm512_castsi512_si256(s));
    __m512 b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(s, 1));
    __m512 za = _mm512_cvtph_ps(_mm512_castsi512_si256(z));
    __m512 zb = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(z, 1));
    middle[0] = _mm512_fmadd_ps(a, centre, za);
    middle[1] = _mm512_fmadd_ps(b, centre, zb);
    return kvq__to_int16(a, b, _mm512_set1_ps(factor));
}

// Two channel groups, from `channels` on: the bytes of up to four rows in all groups of the batch,
// and the sums of p * middle.
KVQ__INLINE void scale_weights(const struct kvq__tile *tile, const struct kvq__batch *b,
                               uint32_t first, uint32_t channels, int rows)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const __m512i order = sets_from_packs();
    __m512 sum[KVQ__TILE4][2];
    for (int n = 0; n < rows; n++)
        for (uint32_t g = 0; g < 2; g++)
            sum[n][g] = _mm512_load_ps(v->middle[first + (uint32_t)n][channels + g]);
    for (uint32_t i = 0; i < b->n; i++) {
        __m512 p[2], middle[2][2];
        __m512i scale[2];
        for (uint32_t g = 0; g < 2; g++)
            scale[g] = open_v(tile->codec, b->group[i]->packed.group, channels + g, v->v_factor[i],
                              middle[g]);
        for (int n = 0; n < rows; n++) {
            uint8_t *bytes = kvq__vnni_bytes(tile, i, first + (uint32_t)n);
            __m512i p16 = _mm512_load_si512(v->p16[i][n]);
            if (n % 2 == 0)
                kvq__fetch_step(v, 1, b->index[i], 32 * (channels + (uint32_t)n / 2), tile->dim,
                                tile->codec->v_bits);
            __m512i w = _mm512_packus_epi16(_mm512_mulhrs_epi16(scale[0], p16),
                                            _mm512_mulhrs_epi16(scale[1], p16));
            _mm512_store_si512(bytes + 32 * channels, _mm512_permutexvar_epi8(order, w));
            load_p(tile, b, i, first + (uint32_t)n, p);
            for (uint32_t g = 0; g < 2; g++) {
                sum[n][g] = _mm512_fmadd_ps(p[0], middle[g][0], sum[n][g]);
                sum[n][g] = _mm512_fmadd_ps(p[1], middle[g][1], sum[n][g]);
            }
        }
    }
    for (int n = 0; n < rows; n++)
        for (uint32_t g = 0; g < 2; g++)
            _mm512_store_ps(v->middle[first + (uint32_t)n][channels + g], sum[n][g]);
}

KVQ__INLINE void prepare_rows(const struct kvq__tile *tile, const struct kvq__batch *b,
                              uint32_t first, int rows)
{
    for (uint32_t i = 0; i < b->n; i++)
        weigh(tile, b, i, first, tile->dim, rows);
    for (uint32_t c = 0; c < tile->dim / KVQ_GROUP_CHANNELS; c += 2)
        scale_weights(tile, b, first, c, rows);
}

// ---- V: dot products ----

// Entry i is 2 * code - (2^bits - 1) for the code in the lowest 4 bits of i, or where there are
// two bits, in the two from bit `at` on.
KVQ__INLINE __m512i table_of(int bits, int at)
{
    _Alignas(64) int8_t table[64];
    for (int i = 0; i < 64; i++)
        table[i] = (int8_t)(2 * (i >> at & (bits == 2 ? 3 : 15)) - ((1 << bits) - 1));
    return _mm512_load_si512(table);
}

// Positions odd and odd + 2 of a word, centred and doubled. vpermb looks at 6 bits of a byte.
KVQ__INLINE void part_pair(__m512i *code, __m512i low, __m512i high, int odd, int bits)
{
    __m512i x, y;
    if (bits == 2) {
        x = y = odd ? _mm512_srli_epi16(low, 2) : low;
    } else {
        struct kvq__nibbles n = kvq__join_planes(low, high);
        x = odd ? n.odd : n.even;
        y = _mm512_srli_epi16(x, 4);
    }
    code[0] = _mm512_permutexvar_epi8(x, table_of(bits, 0));
    code[1] = _mm512_permutexvar_epi8(y, table_of(bits, bits == 2 ? 4 : 0));
}

KVQ__INLINE void add_sum(float *o, __m512i acc, float unit)
{
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), _mm512_set1_ps(unit), _mm512_load_ps(o));
    _mm512_store_ps(o, sum);
}

// The high plane of set (j, half), lanes z, as 2-bit fields.
KVQ__INLINE __m512i load_v_high(const uint8_t *high, unsigned j, unsigned half, unsigned z,
                                int bits)
{
    if (bits == 4)
        return kvq__load_row(high + KVQ__ROW_BYTES * (2 * j + half), z, j);
    __m512i x = kvq__load_row(high + KVQ__ROW_BYTES * j, z, j);
    return _mm512_and_si512(half ? _mm512_srli_epi16(x, 1) : x, _mm512_set1_epi8(0x55));
}

// One set of four tokens (set is a constant), positions odd and odd + 2, both halves of the lanes.
KVQ__INLINE void v_set(__m512i acc[][2][2], const struct kvq__planes *p, unsigned set,
                       const uint8_t *const *w, int rows, int odd, int bits)
{
    unsigned j = set / 2, half = set % 2;
    __m512i code[2][2];
    kvq__fetch_place(p, 8 * (unsigned)odd + set, bits);
    for (unsigned z = 0; z < 2; z++) {
        __m512i x = kvq__load_row(p->low + KVQ__ROW_BYTES * set, z, j);
        part_pair(code[z], x, bits > 2 ? load_v_high(p->high, j, half, z, bits) : x, odd, bits);
    }
    for (uint32_t s = 0; s < 2; s++)
        for (int i = 0; i < rows; i++) {
            __m512i weights = kvq__broadcast_word(w[i] + weight_at((uint32_t)odd + 2 * s, set));
            acc[i][s][0] = _mm512_dpbusd_epi32(acc[i][s][0], weights, code[0][s]);
            acc[i][s][1] = _mm512_dpbusd_epi32(acc[i][s][1], weights, code[1][s]);
        }
}

// Half of the positions of one slab of 128 channels, whose weights and sums w and o are.
KVQ__INLINE void pv_half_slab(const struct kvq__planes *p, float *o, const uint8_t *const *w,
                              const float *unit, int rows, int odd, int bits)
{
    __m512i acc[KVQ__TILE4][2][2];
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 2; s++)
            acc[i][s][0] = acc[i][s][1] = _mm512_setzero_si512();
    // Written out, for otherwise every address would have to be computed.
    v_set(acc, p, 0, w, rows, odd, bits);
    v_set(acc, p, 1, w, rows, odd, bits);
    v_set(acc, p, 2, w, rows, odd, bits);
    v_set(acc, p, 3, w, rows, odd, bits);
    v_set(acc, p, 4, w, rows, odd, bits);
    v_set(acc, p, 5, w, rows, odd, bits);
    v_set(acc, p, 6, w, rows, odd, bits);
    v_set(acc, p, 7, w, rows, odd, bits);
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 2; s++) {
            float *at = o + i * KVQ_MAX_HEAD_DIM + 32 * (odd + 2 * s);
            add_sum(at, acc[i][s][0], unit[i]);
            add_sum(at + 16, acc[i][s][1], unit[i]);
        }
}

// head_dim 64: rows of one register, channel group s / 2 at position s.
KVQ__INLINE void pv_64(const struct kvq__planes *p, float *o, const uint8_t *const *w,
                       const float *unit, int rows, int bits)
{
    __m512i acc[KVQ__TILE4][4];
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 4; s++)
            acc[i][s] = _mm512_setzero_si512();
    for (unsigned set = 0; set < 8; set++) {
        unsigned j = set / 2, half = set % 2;
        kvq__fetch_place(p, set, bits);
        __m512i low = kvq__load_row_64(p->low, 2 * j + (half ^ (j & 1)), j), high = low;
        if (bits == 4) {
            high = kvq__load_row_64(p->high, 2 * j + (half ^ (j & 1)), j);
        } else if (bits == 3) {
            high = kvq__load_row_64(p->high, j, j);
            high = half ? _mm512_srli_epi16(high, 1) : high;
            high = _mm512_and_si512(high, _mm512_set1_epi8(0x55));
        }
        __m512i even[2], odd[2];
        part_pair(even, low, high, 0, bits);
        part_pair(odd, low, high, 1, bits);
        for (int i = 0; i < rows; i++)
            for (uint32_t n = 0; n < 2; n++) {
                __m512i weights = kvq__broadcast_word(w[i] + weight_at(n, set));
                acc[i][2 * n] = _mm512_dpbusd_epi32(acc[i][2 * n], weights, even[n]);
                acc[i][2 * n + 1] = _mm512_dpbusd_epi32(acc[i][2 * n + 1], weights, odd[n]);
            }
    }
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 4; s++)
            add_sum(o + i * KVQ_MAX_HEAD_DIM + 16 * s, acc[i][s], unit[i]);
}

// Adds up to four rows times group `at` of the batch to the chunk's sums.
KVQ__INLINE void pv_rows(const struct kvq__tile *tile, const struct kvq__batch *b, uint32_t at,
                         uint32_t first, int rows, int bits)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const uint8_t *w[KVQ__TILE4], *low = b->group[at]->packed.group + tile->codec->layout.v_codes;
    struct kvq__planes p = kvq__planes_of(tile, b->index[at], low, bits);
    for (int i = 0; i < rows; i++)
        w[i] = kvq__vnni_bytes(tile, at, first + (uint32_t)i);
    const float *unit = v->unit[at] + first;
    if (p.dim == 64)
        pv_64(&p, v->o[first], w, unit, rows, bits);
    for (uint32_t slab = 0; slab < p.dim / KVQ__SLAB; slab++) {
        pv_half_slab(&p, v->o[first] + slab * KVQ__SLAB, w, unit, rows, 0, bits);
        pv_half_slab(&p, v->o[first] + slab * KVQ__SLAB, w, unit, rows, 1, bits);
        kvq__next_slab(&p, bits);
        for (int i = 0; i < rows; i++)
            w[i] += KVQ__SLAB;
    }
}

KVQ__INLINE void pv_batch(const struct kvq__tile *tile, const struct kvq__batch *b, uint32_t first,
                          int rows, int bits)
{
    prepare_rows(tile, b, first, rows);
    for (uint32_t i = 0; i < b->n; i++)
        pv_rows(tile, b, i, first, rows, bits);
}

void kvq__vnni_values(const struct kvq__tile *tile, const struct kvq__batch *b)
{
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        switch (tile->codec->v_bits) {
        case 2:
            KVQ__BY_ROWS(tile->rows - r, pv_batch(tile, b, r, ROWS, 2));
            break;
        case 3:
            KVQ__BY_ROWS(tile->rows - r, pv_batch(tile, b, r, ROWS, 3));
            break;
        default:
            KVQ__BY_ROWS(tile->rows - r, pv_batch(tile, b, r, ROWS, 4));
        }
}

// ---- The chunk's sums ----

enum { AT_ONCE = 4 }; // channel groups

void kvq__vnni_clear(const struct kvq__tile *tile)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t r = 0; r < tile->rows; r++) {
        memset(v->o[r], 0, tile->dim * sizeof(float));
        memset(v->middle[r], 0, tile->dim / KVQ_GROUP_CHANNELS * sizeof v->middle[r][0]);
    }
}

// The sums of p * middle over all tokens, of four channel groups.
KVQ__INLINE __m512 middles(const struct kvq__vnni *v, uint32_t r, uint32_t from, uint32_t n)
{
    __m512 x[AT_ONCE];
    for (uint32_t g = 0; g < AT_ONCE; g++)
        x[g] = g < n ? _mm512_load_ps(v->middle[r][from + g]) : _mm512_setzero_ps();
    return kvq__sum4(x[0], x[1], x[2], x[3]);
}

// Channels 16 u + 8 rh + g of a group of 32, g = 4 z + i: word 4 i + 2 u + rh of half z.
static void add_wide(const float *sums, __m512 bias, float *out)
{
    const __m512i first =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    __m512 a = _mm512_load_ps(sums), b = _mm512_load_ps(sums + 16);
    __m512 x = _mm512_add_ps(_mm512_permutex2var_ps(a, first, b), bias);
    __m512 y = _mm512_add_ps(_mm512_permutex2var_ps(a, second, b), bias);
    _mm512_store_ps(out, _mm512_add_ps(_mm512_load_ps(out), x));
    _mm512_store_ps(out + 16, _mm512_add_ps(_mm512_load_ps(out + 16), y));
}

// head_dim 64: channel 16 s + 8 rh + g is word 2 g + rh.
static void add_narrow(const float *sums, __m512 bias, float *out)
{
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (uint32_t i = 0; i < 32; i += 16) {
        __m512 x = _mm512_permutexvar_ps(order, _mm512_load_ps(sums + i));
        x = _mm512_add_ps(_mm512_load_ps(out + i), _mm512_add_ps(x, bias));
        _mm512_store_ps(out + i, x);
    }
}

// One slab of 128 channels, or all 64.
KVQ__INLINE void flush(const struct kvq__tile *tile, uint32_t r, uint32_t slab, uint32_t n)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    __m512 sums = middles(v, r, slab * AT_ONCE, n);
    for (uint32_t g = 0; g < n; g++) {
        __m512 bias = _mm512_permutexvar_ps(_mm512_set1_epi32((int32_t)g), sums);
        uint32_t c = slab * KVQ__SLAB + g * KVQ_GROUP_CHANNELS;
        float *out = tile->ot + (size_t)r * tile->dim + c;
        if (n < AT_ONCE)
            add_narrow(v->o[r] + c, bias, out);
        else
            add_wide(v->o[r] + c, bias, out);
    }
}

void kvq__vnni_flush(const struct kvq__tile *tile)
{
    for (uint32_t r = 0; r < tile->rows; r++) {
        if (tile->dim == 64)
            flush(tile, r, 0, 2);
        for (uint32_t slab = 0; slab < tile->dim / KVQ__SLAB; slab++)
            flush(tile, r, slab, AT_ONCE);
    }
}
