// SPDX-License-Identifier: Apache-2.0
//
// Values of packed groups with byte dot products. See vnni_avx512.c for the method.
//
// Registers of the dot products: 16 accumulators (4 rows, 2 positions, 32 words), 2 registers of
// words and their 4 codes, 2 masks, the broadcast weights. Positions are taken in pairs since
// all four would need 32 accumulators. The weights are the unsigned operand, which cannot come
// from memory as a broadcast, so each broadcast serves two registers of words.
#include "kernels/vnni_avx512.h"

enum { V16_TOP = 2890 }; // what the largest p and V scale become as int16: 2890^2 / 2^15 < 255

// ---- V: p * scale as u8, for all groups of the chunk ----

struct v_scales {
    __m512i scale16[KVQ__MAX_VGROUPS]; // int16, in the order of the weights
    __m512 zero[KVQ__MAX_VGROUPS][2];  // value of the centre of the codes, in the order of sets
    float unit;                        // of scale16
    float centre;
};

// Tokens in the order of sets: set 2 j + half, then k, for token 8 j + 2 k + half. Of 16 tokens:
static inline __m512i sets_from_tokens(void)
{
    return _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
}

// And of the 32 slots in which the scales stand.
static inline __m512i sets_from_slots(void)
{
    static const uint16_t order[32] = {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,
                                       13, 10, 14, 11, 15, 16, 20, 17, 21, 18, 22,
                                       19, 23, 24, 28, 25, 29, 26, 30, 27, 31};
    return _mm512_loadu_si512(order);
}

// Where the four weights of a channel group and set stand: two groups to a register, two sets to
// a lane, as the two packs leave them.
KVQ__INLINE uint32_t weight_at(uint32_t group, uint32_t set)
{
    return 64 * (group / 2) + 16 * (set % 4) + 8 * (group % 2) + 4 * (set / 4);
}

KVQ__INLINE void open_v(struct v_scales *g, const struct kvq__codec *c, const uint8_t *group,
                        uint32_t dim)
{
    const uint8_t *scales = group + c->layout.v_scales, *zeros = group + c->layout.v_zeros;
    float max = kvq__max_f16(scales, dim);
    g->unit = max / V16_TOP;
    g->centre = kvq__centre_of(c->v_bits);
    __m512 factor = _mm512_set1_ps(V16_TOP / max), centre = _mm512_set1_ps(g->centre);
    for (uint32_t i = 0; i < dim / KVQ_GROUP_CHANNELS; i++) {
        __m512i s = _mm512_permutexvar_epi16(sets_from_slots(), _mm512_load_si512(scales + 64 * i));
        __m512i z = _mm512_permutexvar_epi16(sets_from_slots(), _mm512_load_si512(zeros + 64 * i));
        __m512 a = _mm512_cvtph_ps(_mm512_castsi512_si256(s));
        __m512 b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(s, 1));
        __m512 za = _mm512_cvtph_ps(_mm512_castsi512_si256(z));
        __m512 zb = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(z, 1));
        g->scale16[i] = kvq__to_int16(a, b, factor);
        g->zero[i][0] = _mm512_fmadd_ps(a, centre, za);
        g->zero[i][1] = _mm512_fmadd_ps(b, centre, zb);
    }
}

// One row's weights of one group, its unit, and what the weights say about zeros and centres.
KVQ__INLINE void weigh(const struct kvq__tile *tile, const struct v_scales *g, uint32_t group,
                       uint32_t r, __m512 p0, __m512 p1, uint32_t dim)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    uint8_t *bytes = kvq__vnni_bytes(tile, group, r);
    // p is at most 1, so with this floor nothing overflows; all weights are 0 then.
    __m512 top = _mm512_max_ps(kvq__max_all(_mm512_max_ps(p0, p1)), _mm512_set1_ps(1e-30f));
    __m512i p16 = kvq__to_int16(p0, p1, _mm512_div_ps(_mm512_set1_ps(V16_TOP), top));
    float unit = _mm512_cvtss_f32(top) * g->unit * (32768.0f / V16_TOP);
    v->unit[group][r] = unit;
    __m512 taken = _mm512_set1_ps(unit * g->centre);
    for (uint32_t i = 0; i < dim / KVQ_GROUP_CHANNELS; i += 2) {
        __m512i b = _mm512_packus_epi16(_mm512_mulhrs_epi16(p16, g->scale16[i]),
                                        _mm512_mulhrs_epi16(p16, g->scale16[i + 1]));
        _mm512_store_si512(bytes + 32 * i, b);
        __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), b, _mm512_set1_epi8(1));
        float *t = v->taken[r][i / 2];
        _mm512_store_ps(t, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), taken, _mm512_load_ps(t)));
    }
    for (uint32_t i = 0; i < dim / KVQ_GROUP_CHANNELS; i++) {
        __m512 b = _mm512_fmadd_ps(p0, g->zero[i][0], _mm512_load_ps(v->zero[r][i]));
        _mm512_store_ps(v->zero[r][i], _mm512_fmadd_ps(p1, g->zero[i][1], b));
    }
}

KVQ__INLINE void prepare_v(const struct kvq__tile *tile, const struct kvq__group *from,
                           uint32_t group, uint32_t dim)
{
    struct v_scales g;
    open_v(&g, tile->codec, from->packed, dim);
    // Tokens that are not packed count nothing here.
    uint32_t n = from->packed_tokens;
    __mmask32 mask = n < KVQ_GROUP_TOKENS ? (1u << n) - 1 : UINT32_MAX;
    const float *p = tile->logits + (size_t)group * KVQ_GROUP_TOKENS;
    for (uint32_t r = 0; r < tile->rows; r++, p += KVQ__LOGITS_STRIDE) {
        __m512 p0 = _mm512_maskz_loadu_ps((__mmask16)mask, p);
        __m512 p1 = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), p + 16);
        weigh(tile, &g, group, r, _mm512_permutexvar_ps(sets_from_tokens(), p0),
              _mm512_permutexvar_ps(sets_from_tokens(), p1), dim);
    }
}

void kvq__vnni_prepare_v(const struct kvq__tile *tile, const struct kvq__group *from,
                         uint32_t group)
{
    if (tile->dim == 64)
        prepare_v(tile, from, group, 64);
    else if (tile->dim == 128)
        prepare_v(tile, from, group, 128);
    else
        prepare_v(tile, from, group, 256);
}

// ---- V: dot products ----

// Positions odd and odd + 2 of a word; the second one's codes times 16 for 2 and 3 bits, which
// saves a shift and is made good in `add_sum`. (4-bit codes times 16 would look negative.)
KVQ__INLINE void part_pair(__m512i *code, __m512i low, __m512i high, int odd, int bits)
{
    const __m512i mask = _mm512_set1_epi8(bits == 2 ? 0x03 : 0x0f);
    __m512i x;
    if (bits == 2) {
        x = odd ? _mm512_srli_epi16(low, 2) : low;
    } else {
        struct kvq__nibbles n = kvq__join_planes(low, high);
        x = odd ? n.odd : n.even;
    }
    code[0] = _mm512_and_si512(x, mask);
    if (bits == 4)
        code[1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
    else
        code[1] = _mm512_and_si512(x, _mm512_set1_epi8(bits == 2 ? 0x30 : 0x70));
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

// One set of four tokens, positions odd and odd + 2, both halves of the lanes.
KVQ__INLINE void v_set(__m512i acc[][2][2], const uint8_t *low, const uint8_t *high, unsigned j,
                       unsigned half, const uint8_t *const *w, uint32_t first_group, int rows,
                       int odd, int bits)
{
    __m512i code[2][2];
    for (unsigned z = 0; z < 2; z++) {
        __m512i x = kvq__load_row(low + KVQ__ROW_BYTES * (2 * j + half), z, j);
        part_pair(code[z], x, bits > 2 ? load_v_high(high, j, half, z, bits) : x, odd, bits);
    }
    for (uint32_t s = 0; s < 2; s++)
        for (int i = 0; i < rows; i++) {
            uint32_t at = weight_at(first_group + 2 * s, 2 * j + half);
            __m512i weights = kvq__broadcast_word(w[i] + at);
            acc[i][s][0] = _mm512_dpbusd_epi32(acc[i][s][0], weights, code[0][s]);
            acc[i][s][1] = _mm512_dpbusd_epi32(acc[i][s][1], weights, code[1][s]);
        }
}

// Half of the positions of one slab of 128 channels.
KVQ__INLINE void pv_half_slab(const struct kvq__planes *p, uint32_t slab, float *o,
                              const uint8_t *const *w, const float *unit, int rows, int odd,
                              int bits)
{
    const uint8_t *low = p->low + slab * (KVQ_GROUP_TOKENS * KVQ__SLAB / 4);
    const uint8_t *high = p->high + slab * (KVQ_GROUP_TOKENS * KVQ__SLAB / (bits == 3 ? 8 : 4));
    uint32_t first = 4 * slab + (uint32_t)odd;
    __m512i acc[KVQ__TILE4][2][2];
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 2; s++)
            acc[i][s][0] = acc[i][s][1] = _mm512_setzero_si512();
    for (unsigned j = 0; j < 4; j += 2) {
        if (p->ahead && !odd)
            kvq__fetch_lines(p->ahead + 128 * (size_t)(bits + 1) * (4 * slab + j), 2 * bits + 2);
        v_set(acc, low, high, j, 0, w, first, rows, odd, bits);
        v_set(acc, low, high, j, 1, w, first, rows, odd, bits);
        if (p->ahead && !odd)
            kvq__fetch_lines(p->ahead + 128 * (size_t)(bits + 1) * (4 * slab + j + 1),
                             2 * bits + 2);
        v_set(acc, low, high, j + 1, 0, w, first, rows, odd, bits);
        v_set(acc, low, high, j + 1, 1, w, first, rows, odd, bits);
    }
    for (int i = 0; i < rows; i++)
        for (int s = 0; s < 2; s++) {
            float *at = o + i * KVQ_MAX_HEAD_DIM + 32 * (first + 2 * (uint32_t)s);
            float f = s && bits < 4 ? unit[i] / 16 : unit[i];
            add_sum(at, acc[i][s][0], f);
            add_sum(at + 16, acc[i][s][1], f);
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
        if (p->ahead)
            kvq__fetch_lines(p->ahead + 32 * (size_t)(bits + 1) * set, (bits + 2) / 2);
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
            add_sum(o + i * KVQ_MAX_HEAD_DIM + 16 * s, acc[i][s],
                    s > 1 && bits < 4 ? unit[i] / 16 : unit[i]);
}

// Adds up to four rows times one group of V to the chunk's sums.
KVQ__INLINE void pv_rows(const struct kvq__tile *tile, const struct kvq__planes *p, uint32_t group,
                         uint32_t first, int rows, int bits)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const uint8_t *w[KVQ__TILE4];
    for (int i = 0; i < rows; i++)
        w[i] = kvq__vnni_bytes(tile, group, first + (uint32_t)i);
    const float *unit = v->unit[group] + first;
    if (p->dim == 64)
        pv_64(p, v->o[first], w, unit, rows, bits);
    for (uint32_t slab = 0; slab < p->dim / KVQ__SLAB; slab++) {
        pv_half_slab(p, slab, v->o[first], w, unit, rows, 0, bits);
        pv_half_slab(p, slab, v->o[first], w, unit, rows, 1, bits);
    }
}

KVQ__INLINE void pv_group(const struct kvq__tile *tile, const uint8_t *packed, const float *p_row,
                          int bits)
{
    const uint8_t *low = packed + tile->codec->layout.v_codes;
    struct kvq__planes p = {low, low + 8 * tile->dim, tile->ahead, tile->dim};
    uint32_t group = (uint32_t)(p_row - tile->logits) / KVQ_GROUP_TOKENS;
    if (p.ahead)
        kvq__fetch(p.ahead + tile->codec->layout.k_norms);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        switch (tile->rows - r) {
        case 1:
            pv_rows(tile, &p, group, r, 1, bits);
            break;
        case 2:
            pv_rows(tile, &p, group, r, 2, bits);
            break;
        case 3:
            pv_rows(tile, &p, group, r, 3, bits);
            break;
        default:
            pv_rows(tile, &p, group, r, 4, bits);
        }
        p.ahead = NULL;
    }
}

void kvq__vnni_pv(const struct kvq__tile *tile, const uint8_t *packed, const float *p)
{
    switch (tile->codec->v_bits) {
    case 2:
        pv_group(tile, packed, p, 2);
        break;
    case 3:
        pv_group(tile, packed, p, 3);
        break;
    default:
        pv_group(tile, packed, p, 4);
    }
}

// ---- The chunk's sums ----

void kvq__vnni_clear(const struct kvq__tile *tile)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t r = 0; r < tile->rows; r++) {
        memset(v->o[r], 0, tile->dim * sizeof(float));
        memset(v->zero[r], 0, sizeof v->zero[r]);
        memset(v->taken[r], 0, sizeof v->taken[r]);
    }
}

// What all 32 channels of group g get for zeros and centres.
static __m512 bias_of(const struct kvq__vnni *v, uint32_t r, uint32_t g)
{
    __m512 taken = _mm512_maskz_load_ps(g & 1 ? 0xcccc : 0x3333, v->taken[r][g / 2]);
    return kvq__sum_all(_mm512_sub_ps(_mm512_load_ps(v->zero[r][g]), taken));
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

void kvq__vnni_flush(const struct kvq__tile *tile)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t r = 0; r < tile->rows; r++)
        for (uint32_t c = 0; c < tile->dim; c += KVQ_GROUP_CHANNELS) {
            __m512 bias = bias_of(v, r, c / KVQ_GROUP_CHANNELS);
            float *out = tile->ot + (size_t)r * tile->dim + c;
            if (tile->dim == 64)
                add_narrow(v->o[r] + c, bias, out);
            else
                add_wide(v->o[r] + c, bias, out);
        }
}
