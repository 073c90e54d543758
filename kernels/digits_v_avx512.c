// SPDX-License-Identifier: Apache-2.0
//
// Values of packed groups on the exact path, by byte dot products. vnni_avx512.c has the method.
//
// Registers of the dot products: 12 accumulators (4 rows, 16 words, 3 digits), the codes, their
// table, the broadcast weights. A chunk's sums stay whole numbers until its last token.
#include "kernels/vnni_v_avx512.h"

enum { SET_BYTES = 16, GROUP_SETS = KVQ_GROUP_TOKENS / 4 };

// What the largest weight becomes: 2^24 less what two roundings of fp32 may add.
#define WEIGHT_TOP 16777212.0f

// ---- p * scale as numbers of three digits ----
//
// Tokens stand in the order of sets: set 2 j + half has tokens 8 j + half + {0, 2, 4, 6}.

KVQ__INLINE __m512 sets_from_tokens(__m512 x)
{
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return _mm512_permutexvar_ps(order, x);
}

// fp16 numbers of 32 tokens, which stand in slots.
KVQ__INLINE __m512i sets_from_slots(__m512i x)
{
    static const uint16_t order[32] = {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,
                                       13, 10, 14, 11, 15, 16, 20, 17, 21, 18, 22,
                                       19, 23, 24, 28, 25, 29, 26, 30, 27, 31};
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), x);
}

// Scales of a group: of four levels one for a token, else for 32 channels of it.
KVQ__INLINE uint32_t scales_of(uint32_t dim, struct kvq__v_how how)
{
    return how.lloyd ? KVQ_GROUP_TOKENS : dim;
}

KVQ__INLINE void load_sets(const uint8_t *p, __m512 *out)
{
    __m512i x = sets_from_slots(_mm512_load_si512(p));
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
    out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
}

// Scales, and what the middle of the codes stands for.
KVQ__INLINE void open_v(struct kvq__vnni *v, uint32_t index, uint32_t dim, struct kvq__v_how how)
{
    const struct kvq_packed *packed = &v->chunk->group[index].packed;
    const struct kvq__ahead ahead = kvq__ahead_of_step(v, 0, index, dim);
    struct kvq__opened *g = &v->opened[index];
    const __m512 centre = _mm512_set1_ps(kvq__centre_of((uint32_t)how.bits));
    for (uint32_t i = 0; i < scales_of(dim, how); i += KVQ_GROUP_TOKENS) {
        __m512 scale[2], zero[2];
        load_sets(packed->v_scales + 2 * i, scale);
        if (!how.lloyd) {
            load_sets(packed->v_zeros + 2 * i, zero);
            kvq__fetch_twice(ahead, 2 * (size_t)i);
        }
        for (int n = 0; n < 2; n++) {
            _mm512_store_ps(g->scale + i + 16 * n, scale[n]);
            if (!how.lloyd)
                _mm512_store_ps(g->middle + i + 16 * n, _mm512_fmadd_ps(scale[n], centre, zero[n]));
        }
    }
}

// p of up to four rows into the order of sets. That of tokens which are not packed, and of
// outliers, is 0 by now (attend_chunk.c).
KVQ__INLINE void sort_weights(const struct kvq__tile *tile, uint32_t first, int rows)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const float *p = tile->logits + (size_t)first * KVQ__LOGITS_STRIDE;
    for (uint32_t group = 0; group < v->chunk->groups; group++, p += KVQ_GROUP_TOKENS)
        for (int i = 0; v->chunk->group[group].packed_tokens && i < rows; i++)
            for (int n = 0; n < 2; n++) {
                __m512 x = _mm512_load_ps(p + i * KVQ__LOGITS_STRIDE + 16 * n);
                _mm512_store_ps(v->p[group][i] + 16 * n, sets_from_tokens(x));
            }
}

// What makes numbers of three digits of the largest p * scale of up to four rows and the scales
// from `at` on, those of 32 channels, in the whole chunk. With one step for all channels, those
// whose values are much smaller than others' would be lost.
KVQ__INLINE void find_factors(const struct kvq__tile *tile, uint32_t first, uint32_t at,
                              float *factor, int rows, struct kvq__v_how how)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    __m512 top[KVQ__TILE4];
    for (int i = 0; i < KVQ__TILE4; i++)
        top[i] = _mm512_set1_ps(1e-30f); // with this floor nothing overflows
    for (uint32_t group = 0; group < v->chunk->groups; group++) {
        if (!v->chunk->group[group].packed_tokens)
            continue;
        for (int n = 0; n < 2; n++) {
            __m512 scale = _mm512_load_ps(v->opened[group].scale + at + 16 * n);
            for (int i = 0; i < rows; i++) {
                __m512 x = _mm512_mul_ps(_mm512_load_ps(v->p[group][i] + 16 * n), scale);
                top[i] = _mm512_max_ps(top[i], x);
            }
        }
    }
    __m128 most = _mm512_castps512_ps128(kvq__max4(top[0], top[1], top[2], top[3]));
    // Codes are multiplied as 2 * code - (2^bits - 1), twice the distance from their middle.
    const float step = how.lloyd ? KVQ__LLOYD2_UNIT : 0.5f;
    float *unit = v->unit[at / KVQ_GROUP_CHANNELS] + first;
    _mm_store_ps(unit, _mm_mul_ps(most, _mm_set1_ps(step / WEIGHT_TOP)));
    _mm_store_ps(factor, _mm_div_ps(_mm_set1_ps(WEIGHT_TOP), most));
}

// `factor`: [32 channels][row].
KVQ__INLINE void write_weights(const struct kvq__tile *tile, uint32_t group, const float *factor,
                               uint32_t dim, int rows, struct kvq__v_how how)
{
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const float *scale = v->opened[group].scale;
    const struct kvq__ahead ahead = kvq__ahead_of_step(v, 1, group, dim);
    for (int i = 0; i < rows; i++) {
        __m512 p[2] = {_mm512_load_ps(v->p[group][i]), _mm512_load_ps(v->p[group][i] + 16)};
        for (uint32_t c = 0; c < scales_of(dim, how); c += 16) {
            __m512 f = _mm512_set1_ps(factor[c / KVQ_GROUP_CHANNELS * KVQ__TILE4 + (uint32_t)i]);
            __m512 x = _mm512_mul_ps(p[c / 16 % 2], _mm512_load_ps(scale + c));
            __m512i d = _mm512_cvtps_epi32(_mm512_mul_ps(x, f));
            _mm512_store_si512(v->digits[group][i] + 4 * c, _mm512_shuffle_epi8(d, order));
        }
        if (!how.lloyd)
            kvq__fetch_share(ahead, dim, i, rows);
    }
}

// ---- Dot products ----

// Up to four rows times 16 channels, half z of a pass of 32, of all groups of the chunk.
KVQ__INLINE void pv_half(const struct kvq__tile *tile, uint32_t first, uint32_t pass, unsigned z,
                         uint32_t dim, int rows, int s, struct kvq__v_how how)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    __m512i acc[KVQ__TILE4][KVQ__DIGITS];
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < KVQ__DIGITS; k++)
            acc[i][k] = _mm512_setzero_si512();
    for (uint32_t group = 0; group < v->chunk->groups; group++) {
        if (v->chunk->group[group].packed_tokens == 0)
            continue;
        struct kvq__v_planes p = kvq__v_planes_of(tile, group, pass, dim, how);
        const uint8_t *weights =
            v->digits[group][0] + (how.lloyd ? 0 : pass * GROUP_SETS * SET_BYTES);
        KVQ__UNROLL
        for (unsigned set = 0; set < GROUP_SETS; set++) {
            kvq__v_fetch(&p, 2 * set + z, 2 * GROUP_SETS, how);
            __m512i code = kvq__v_code(&p, set, z, dim, s, how);
            const uint8_t *at = weights + SET_BYTES * set;
            for (int i = 0; i < rows; i++, at += sizeof v->digits[0][0])
                for (int k = 0; k < KVQ__DIGITS; k++)
                    acc[i][k] =
                        _mm512_dpbusd_epi32(acc[i][k], kvq__broadcast_word(at + 4 * k), code);
        }
    }
    for (int i = 0; i < rows; i++) {
        __m512 unit = _mm512_set1_ps(v->unit[how.lloyd ? 0 : pass][first + (uint32_t)i]);
        float *o = v->o[first + (uint32_t)i] + 32 * pass + 16 * z;
        _mm512_store_ps(o, _mm512_mul_ps(kvq__of_digits(acc[i]), unit));
    }
}

KVQ__INLINE void pv_pass(const struct kvq__tile *tile, uint32_t first, uint32_t pass, uint32_t dim,
                         int rows, int s, struct kvq__v_how how)
{
    pv_half(tile, first, pass, 0, dim, rows, s, how);
    pv_half(tile, first, pass, 1, dim, rows, s, how);
}

KVQ__INLINE void pv_rows(const struct kvq__tile *tile, uint32_t first, uint32_t dim, int rows,
                         struct kvq__v_how how)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    _Alignas(16) float factor[KVQ__MAX_VGROUPS * KVQ__TILE4];
    sort_weights(tile, first, rows);
    for (uint32_t at = 0; at < scales_of(dim, how); at += KVQ_GROUP_CHANNELS)
        find_factors(tile, first, at, factor + at / KVQ_GROUP_CHANNELS * KVQ__TILE4, rows, how);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (v->chunk->group[i].packed_tokens)
            write_weights(tile, i, factor, dim, rows, how);
    if (!how.lloyd && dim == 64)
        kvq__sum_middles(tile, first, 0, 2, rows);
    for (uint32_t slab = 0; !how.lloyd && slab < dim / KVQ__SLAB; slab++)
        kvq__sum_middles(tile, first, KVQ__AT_ONCE * slab, KVQ__AT_ONCE, rows);
    for (uint32_t pass = 0; pass < dim / KVQ_GROUP_CHANNELS; pass += 2) {
        if (pass % 4 == 0) {
            pv_pass(tile, first, pass, dim, rows, 0, how);
            pv_pass(tile, first, pass + 1, dim, rows, 1, how);
        } else {
            pv_pass(tile, first, pass, dim, rows, 2, how);
            pv_pass(tile, first, pass + 1, dim, rows, 3, how);
        }
    }
}

KVQ__INLINE void pv_chunk(const struct kvq__tile *tile, uint32_t dim, struct kvq__v_how how)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t i = 0; i < KVQ_BLOCK_GROUPS && i < v->chunk->groups; i++)
        kvq__fetch_rest(v, i, dim, how.bits);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (v->chunk->group[i].packed_tokens)
            open_v(v, i, dim, how);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        KVQ__BY_ROWS(tile->rows - r, pv_rows(tile, r, dim, ROWS, how));
}

static void pv_affine(const struct kvq__tile *tile)
{
    KVQ__BY_BITS(tile->codec->v_bits,
                 KVQ__BY_DIM(tile->dim, pv_chunk(tile, DIM, (struct kvq__v_how){BITS, false})));
}

void kvq__digits_pv(const struct kvq__tile *tile)
{
    if (tile->codec->v.kind == KVQ__FOUR_LEVELS)
        KVQ__BY_DIM(tile->dim, pv_chunk(tile, DIM, (struct kvq__v_how){2, true}));
    else
        pv_affine(tile);
}
