// SPDX-License-Identifier: Apache-2.0
//
// Values of packed groups with byte products. See bytes_avx2.c for the method.
//
// Registers of the products: 8 accumulators (4 rows, 16 words), 2 registers of codes, the
// broadcast weights, a product, a mask and a table. Each position is taken by itself, since two of
// them would need 16 accumulators.
#include "kernels/bytes_avx2.h"

enum {
    V16_TOP = 2890, // what the largest weight and 1 become as int16: 2890^2 / 2^15 < 255
    SETS = 8,
};

// What the loops are written out for: codes of so many bits with a scale and a zero for 32
// channels, or of four levels with one scale for a token.
struct how {
    int bits;
    bool lloyd;
};

// ---- p * scale as u8, for all groups of the chunk ----
//
// A token's weight is p times the largest of its scales (one for each 32 channels), and a scale is
// taken as a part of that one. The step of a row's bytes is thus set by the largest p * scale there
// is: not by a token with a large p and small values, nor by one with large values that nobody
// looks at.

// Tokens 8 j to 8 j + 7 in the order of sets: set 2 j + half, then k, for token 8 j + 2 k + half.
static inline __m256 sets_from_tokens(__m256 x)
{
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

// And from the eight slots in which their scales stand, as fp16.
static inline __m256 sets_from_slots(__m128i x)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_ps(_mm256_cvtph_ps(x), order);
}

static inline __m256 load_sets(const uint8_t *p)
{
    return sets_from_slots(_mm_load_si128((const void *)p));
}

// Where the four weights of a set stand, as the two packs leave them.
KVQ__INLINE uint32_t weight_at(uint32_t set)
{
    return 16 * (set % 2) + 4 * (set / 2);
}

// The largest scale of each of 16 tokens, none of them 0: fp16 that is not negative is ordered like
// its bits.
KVQ__INLINE void find_largest(const uint8_t *scales, uint32_t dim, float *largest)
{
    __m256i m = _mm256_set1_epi16(1); // a scale of 0 would give 0 / 0
    for (uint32_t i = 0; i < dim; i += KVQ_GROUP_CHANNELS)
        m = _mm256_max_epu16(m, _mm256_load_si256((const void *)(scales + 2 * i)));
    _mm256_store_ps(largest, sets_from_slots(_mm256_castsi256_si128(m)));
    _mm256_store_ps(largest + 8, sets_from_slots(_mm256_extracti128_si256(m, 1)));
}

KVQ__INLINE void open_v(struct kvq__bytes *v, const struct kvq__codec *c, uint32_t index,
                        uint32_t dim)
{
    const struct kvq_packed *packed = &v->chunk->group[index].packed;
    struct kvq__opened *g = &v->opened[index];
    __m256 centre = _mm256_set1_ps(kvq__centre_of(c->v_bits)), top = _mm256_set1_ps(V16_TOP);
    for (uint32_t half = 0; half < KVQ_GROUP_TOKENS; half += 16) {
        const uint8_t *scales = packed->v_scales + 2 * half, *zeros = packed->v_zeros + 2 * half;
        float *largest = g->largest + half;
        find_largest(scales, dim, largest);
        __m256 fa = _mm256_div_ps(top, _mm256_load_ps(largest));
        __m256 fb = _mm256_div_ps(top, _mm256_load_ps(largest + 8));
        for (uint32_t i = 0; i < dim; i += KVQ_GROUP_CHANNELS) {
            __m256 a = load_sets(scales + 2 * i), b = load_sets(scales + 2 * i + 16);
            _mm256_store_si256((void *)(g->scale16 + i + half), kvq__to_int16(a, b, fa, fb));
            __m256 za = load_sets(zeros + 2 * i), zb = load_sets(zeros + 2 * i + 16);
            _mm256_store_ps(g->middle + i + half, _mm256_fmadd_ps(a, centre, za));
            _mm256_store_ps(g->middle + i + half + 8, _mm256_fmadd_ps(b, centre, zb));
        }
    }
}

// Tokens that are not packed, and outliers, count nothing here: out of `from`, into `room`.
static const float *without(const struct kvq__group *g, const float *from, float *room)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        room[t] = t < g->packed_tokens && !(g->pooled >> t & 1u) ? from[t] : 0.0f;
    return room;
}

// p of one row in the order of sets; returns the largest weight in eights.
KVQ__INLINE __m256 sort_weights(const struct kvq__group *g, const float *largest, const float *p,
                                float *sorted)
{
    // With this floor nothing overflows; weights below it count nothing.
    __m256 top = _mm256_set1_ps(1e-30f);
    _Alignas(32) float room[KVQ_GROUP_TOKENS];
    if (__builtin_expect(g->packed_tokens < KVQ_GROUP_TOKENS || g->pooled, 0))
        p = without(g, p, room);
    for (uint32_t j = 0; j < KVQ_GROUP_TOKENS; j += 8) {
        __m256 x = sets_from_tokens(_mm256_load_ps(p + j));
        top = _mm256_max_ps(top, _mm256_mul_ps(x, _mm256_load_ps(largest + j)));
        _mm256_store_ps(sorted + j, x);
    }
    return top;
}

// Bytes and sums of p * middle of one row, whose sorted p are given.
KVQ__INLINE void scale_weights(const struct kvq__opened *g, const float *p, float factor,
                               uint32_t dim, uint8_t *bytes, float middle[][8])
{
    __m256 x[4], f[4];
    for (uint32_t j = 0; j < 4; j++) {
        x[j] = _mm256_load_ps(p + 8 * j);
        f[j] = _mm256_mul_ps(_mm256_load_ps(g->largest + 8 * j), _mm256_set1_ps(factor));
    }
    __m256i low = kvq__to_int16(x[0], x[1], f[0], f[1]);
    __m256i high = kvq__to_int16(x[2], x[3], f[2], f[3]);
    for (uint32_t c = 0; c < dim; c += KVQ_GROUP_CHANNELS) {
        const __m256i *scale = (const void *)(g->scale16 + c);
        __m256i a = _mm256_mulhrs_epi16(low, _mm256_load_si256(scale));
        __m256i b = _mm256_mulhrs_epi16(high, _mm256_load_si256(scale + 1));
        _mm256_store_si256((void *)(bytes + c), _mm256_packus_epi16(a, b));
        __m256 sum = _mm256_load_ps(middle[c / KVQ_GROUP_CHANNELS]);
        for (uint32_t j = 0; j < 4; j++)
            sum = _mm256_fmadd_ps(x[j], _mm256_load_ps(g->middle + c + 8 * j), sum);
        _mm256_store_ps(middle[c / KVQ_GROUP_CHANNELS], sum);
    }
}

KVQ__INLINE void scale_rows(const struct kvq__tile *tile, uint32_t group, uint32_t first,
                            uint32_t dim, int rows)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    const struct kvq__opened *g = &v->opened[group];
    const float *p = tile->logits + (size_t)first * KVQ__LOGITS_STRIDE + group * KVQ_GROUP_TOKENS;
    _Alignas(32) float sorted[KVQ__TILE4][KVQ_GROUP_TOKENS];
    _Alignas(16) float factor[KVQ__TILE4];
    __m256 top[KVQ__TILE4];
    for (int i = 0; i < KVQ__TILE4; i++)
        top[i] = _mm256_set1_ps(1e-30f);
    for (int i = 0; i < rows; i++)
        top[i] = sort_weights(&v->chunk->group[group], g->largest, p + i * KVQ__LOGITS_STRIDE,
                              sorted[i]);
    __m128 x = kvq__max4(top[0], top[1], top[2], top[3]);
    _mm_store_ps(factor, _mm_div_ps(_mm_set1_ps(V16_TOP), x));
    // Codes are multiplied as 2 * code - (2^bits - 1), twice the distance from their middle.
    const float unit = 0.5f * 32768.0f / (V16_TOP * V16_TOP);
    _mm_store_ps(v->unit[group] + first, _mm_mul_ps(x, _mm_set1_ps(unit)));
    for (int i = 0; i < rows; i++) {
        uint32_t r = first + (uint32_t)i;
        scale_weights(g, sorted[i], factor[i], dim, kvq__row_bytes(tile, group, r), v->middle[r]);
    }
}

// V of four levels: the bytes of a row are those of its tokens, and nothing else is needed.
KVQ__INLINE void weigh_lloyd(const struct kvq__tile *tile, uint32_t group, uint32_t row)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    const float *p = tile->logits + (size_t)row * KVQ__LOGITS_STRIDE + group * KVQ_GROUP_TOKENS;
    const float *scale = v->opened[group].largest;
    _Alignas(32) float sorted[KVQ_GROUP_TOKENS];
    float top = kvq__max_all(sort_weights(&v->chunk->group[group], scale, p, sorted));
    __m256 f[4];
    for (uint32_t j = 0; j < 4; j++)
        f[j] = _mm256_mul_ps(_mm256_load_ps(scale + 8 * j), _mm256_set1_ps(255.0f / top));
    const float *x = sorted;
    __m256i low = kvq__to_int16(_mm256_load_ps(x), _mm256_load_ps(x + 8), f[0], f[1]);
    __m256i high = kvq__to_int16(_mm256_load_ps(x + 16), _mm256_load_ps(x + 24), f[2], f[3]);
    uint8_t *bytes = kvq__row_bytes(tile, group, row);
    _mm256_store_si256((void *)bytes, _mm256_packus_epi16(low, high));
    v->unit[group][row] = top * (KVQ__LLOYD2_UNIT / 255.0f);
}

static void prepare_lloyd(const struct kvq__tile *tile)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    for (uint32_t r = 0; r < tile->rows; r++) {
        memset(v->o[r], 0, tile->dim * sizeof(float));
        memset(v->middle[r], 0, sizeof v->middle[r]);
    }
    for (uint32_t i = 0; i < v->chunk->groups; i++) {
        if (v->chunk->group[i].packed_tokens == 0)
            continue;
        const uint8_t *scales = v->chunk->group[i].packed.v_scales;
        for (uint32_t n = 0; n < KVQ_GROUP_TOKENS; n += 8)
            _mm256_store_ps(v->opened[i].largest + n, load_sets(scales + 2 * n));
        for (uint32_t r = 0; r < tile->rows; r++)
            weigh_lloyd(tile, i, r);
    }
}

KVQ__INLINE void prepare_rows(const struct kvq__tile *tile, uint32_t first, uint32_t dim, int rows)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    for (uint32_t r = first; r < first + (uint32_t)rows; r++) {
        memset(v->o[r], 0, dim * sizeof(float));
        memset(v->middle[r], 0, sizeof v->middle[r]);
    }
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (v->chunk->group[i].packed_tokens)
            scale_rows(tile, i, first, dim, rows);
}

KVQ__INLINE void prepare_v(const struct kvq__tile *tile, uint32_t dim)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (v->chunk->group[i].packed_tokens)
            open_v(v, tile->codec, i, dim);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        KVQ__BY_ROWS(tile->rows - r, prepare_rows(tile, r, dim, ROWS));
}

void kvq__bytes_prepare_v(const struct kvq__tile *tile)
{
    if (tile->codec->v.kind == KVQ__FOUR_LEVELS)
        prepare_lloyd(tile);
    else
        KVQ__BY_DIM(tile->dim, prepare_v(tile, DIM));
}

// ---- Products ----

// The planes of V of a group, from a slab on, and half of its words (at head_dim 64 all).
struct planes {
    struct kvq__half low, high;
    const uint8_t *ahead; // what to fetch meanwhile
};

struct slab {
    const uint8_t *low, *high, *ahead;
};

// Lines that half of the words of a position fetch: of codes, and of scales and zeros. V of four
// levels has one line of scales in all.
KVQ__INLINE int lines_of(struct how how)
{
    return how.bits + !how.lloyd;
}

static inline __m256i load(const uint8_t *p)
{
    return _mm256_load_si256((const void *)p);
}

// Entry i is 2 * code - (2^bits - 1), or the level, for the code i, or where a nibble holds two
// codes of 2 bits, for its lower (odd 0) or upper one.
KVQ__INLINE __m256i table_of(int odd, struct how how)
{
    int8_t table[16];
    for (int i = 0; i < 16; i++) {
        int code = how.bits > 2 ? i : odd ? i >> 2 : i & 3;
        table[i] = (int8_t)(how.lloyd ? kvq__lloyd2_byte(code) : 2 * code - ((1 << how.bits) - 1));
    }
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
}

// Words 8 z to 8 z + 7 of the half. Set and z are constants.
KVQ__INLINE __m256i load_low(const struct kvq__half *plane, uint32_t set, uint32_t z, bool wide)
{
    uint32_t j = set / 2, half = set % 2;
    if (wide)
        return kvq__load_words(plane, set, z, j);
    return load(plane->at[0] + 64 * (2 * j + (half ^ (j & 1))) + 32 * (z ^ (j >> 1)));
}

// Of the high plane, as 2-bit fields.
KVQ__INLINE __m256i load_high(const struct kvq__half *plane, uint32_t set, uint32_t z, bool wide,
                              int bits)
{
    uint32_t j = set / 2;
    if (bits == 4)
        return load_low(plane, set, z, wide);
    __m256i x =
        wide ? kvq__load_words(plane, j, z, j) : load(plane->at[0] + 64 * j + 32 * (z ^ (j >> 1)));
    return _mm256_and_si256(set % 2 ? _mm256_srli_epi16(x, 1) : x, _mm256_set1_epi8(0x55));
}

// What the codes at position s stand for.
KVQ__INLINE __m256i v_codes(const struct planes *p, uint32_t set, uint32_t z, bool wide, int s,
                            struct how how)
{
    __m256i x = load_low(&p->low, set, z, wide);
    if (how.bits > 2)
        x = kvq__join_planes(x, load_high(&p->high, set, z, wide, how.bits), s % 2);
    x = _mm256_and_si256(s >= 2 ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(15));
    return _mm256_shuffle_epi8(table_of(s % 2, how), x);
}

// Sets `from` to `from` + 3 at position s.
KVQ__INLINE void v_sets(__m256i acc[][2], const struct planes *p, uint32_t from,
                        const uint8_t *const *w, int rows, bool wide, int s, struct how how)
{
    for (uint32_t set = from; set < from + 4; set++) {
        __m256i c0 = v_codes(p, set, 0, wide, s, how), c1 = v_codes(p, set, 1, wide, s, how);
        for (int i = 0; i < rows; i++) {
            __m256i x = kvq__broadcast_word(w[i] + weight_at(set));
            acc[i][0] = kvq__add_products(acc[i][0], x, c0);
            acc[i][1] = kvq__add_products(acc[i][1], x, c1);
        }
    }
}

KVQ__INLINE void add_sum(float *o, __m256i sum, __m256 unit)
{
    _mm256_store_ps(o, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), unit, _mm256_load_ps(o)));
}

// Position s of half of the words of a slab. 16 bits hold the sums of 8 sets, with 4 bits and with
// four levels of 4.
KVQ__INLINE void v_half(const struct planes *p, float *o, const uint8_t *const *w,
                        const float *unit, int rows, bool wide, int s, struct how how)
{
    __m256i acc[KVQ__TILE4][2], sum[KVQ__TILE4][2];
    for (int i = 0; i < rows; i++)
        acc[i][0] = acc[i][1] = sum[i][0] = sum[i][1] = _mm256_setzero_si256();
    for (int line = 0; line < lines_of(how); line++)
        kvq__fetch(p->ahead + 64 * line);
    v_sets(acc, p, 0, w, rows, wide, s, how);
    for (int i = 0; (how.bits == 4 || how.lloyd) && i < rows; i++)
        for (int z = 0; z < 2; z++) {
            sum[i][z] = kvq__widen(sum[i][z], acc[i][z]);
            acc[i][z] = _mm256_setzero_si256();
        }
    v_sets(acc, p, 4, w, rows, wide, s, how);
    for (int i = 0; i < rows; i++, o += KVQ_MAX_HEAD_DIM) {
        __m256 x = _mm256_set1_ps(unit[i]);
        add_sum(o, kvq__widen(sum[i][0], acc[i][0]), x);
        add_sum(o + 8, kvq__widen(sum[i][1], acc[i][1]), x);
    }
}

// Position s of a slab, whose sums and weights o and w are.
KVQ__INLINE void v_position(const struct slab *v, float *o, const uint8_t *const *w,
                            const float *unit, int rows, bool wide, int s, struct how how)
{
    const uint8_t *at[KVQ__TILE4];
    for (int i = 0; i < rows; i++)
        at[i] = w[i] + (how.lloyd ? 0 : KVQ_GROUP_CHANNELS * (wide ? s : s / 2));
    for (uint32_t half = 0; half < (wide ? 2u : 1u); half++) {
        uint32_t i = (wide ? 2 : 1) * (uint32_t)s + half;
        struct planes p = {kvq__half_of(v->low, half), kvq__half_of(v->high, half),
                           v->ahead + 64 * i * (uint32_t)lines_of(how)};
        v_half(&p, o + 16 * i, at, unit, rows, wide, s, how);
    }
}

KVQ__INLINE void v_slab(const struct slab *v, float *o, const uint8_t *const *w, const float *unit,
                        int rows, bool wide, struct how how)
{
    v_position(v, o, w, unit, rows, wide, 0, how);
    v_position(v, o, w, unit, rows, wide, 1, how);
    v_position(v, o, w, unit, rows, wide, 2, how);
    v_position(v, o, w, unit, rows, wide, 3, how);
}

// Adds up to four rows times one group of V to the chunk's sums.
KVQ__INLINE void pv_rows(const struct kvq__tile *tile, struct slab slab, uint32_t group,
                         uint32_t first, int rows, struct how how)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    const uint8_t *w[KVQ__TILE4];
    const float *unit = v->unit[group] + first;
    for (int i = 0; i < rows; i++)
        w[i] = kvq__row_bytes(tile, group, first + (uint32_t)i);
    if (tile->dim == 64)
        v_slab(&slab, v->o[first], w, unit, rows, false, how);
    for (uint32_t c = 0; c + KVQ__SLAB <= tile->dim; c += KVQ__SLAB) {
        v_slab(&slab, v->o[first] + c, w, unit, rows, true, how);
        slab.low += KVQ__SLAB * 8;
        slab.high += KVQ__SLAB * (how.bits == 3 ? 4 : 8);
        slab.ahead += KVQ__SLAB * 4 * lines_of(how);
        for (int i = 0; i < rows; i++)
            w[i] += how.lloyd ? 0 : KVQ__SLAB;
    }
}

KVQ__INLINE void pv_group(const struct kvq__tile *tile, const struct kvq_packed *packed,
                          const float *p, struct how how)
{
    const uint8_t *codes = packed->group + tile->codec->layout.v_codes;
    const uint8_t *ahead = tile->ahead ? tile->ahead : codes;
    uint32_t group = (uint32_t)(p - tile->logits) / KVQ_GROUP_TOKENS;
    if (how.lloyd)
        kvq__fetch(ahead + tile->codec->layout.v_scales - tile->codec->layout.v_codes);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        struct slab slab = {codes, codes + 8 * tile->dim, ahead};
        KVQ__BY_ROWS(tile->rows - r, pv_rows(tile, slab, group, r, ROWS, how));
        ahead = codes; // what was asked for once is on its way
    }
}

void kvq__bytes_pv(const struct kvq__tile *tile, const struct kvq_packed *packed, const float *p)
{
    if (tile->codec->v.kind == KVQ__FOUR_LEVELS)
        pv_group(tile, packed, p, (struct how){2, true});
    else
        KVQ__BY_BITS(tile->codec->v_bits, pv_group(tile, packed, p, (struct how){BITS, false}));
}

// ---- The chunk's sums ----

void kvq__bytes_flush(const struct kvq__tile *tile)
{
    const struct kvq__bytes *v = kvq__bytes_of(tile);
    const uint32_t n = tile->dim == 64 ? 2 : 4; // registers at one position
    for (uint32_t r = 0; r < tile->rows; r++) {
        float *out = tile->ot + (size_t)r * tile->dim;
        for (uint32_t c = 0; c < tile->dim; c += 8 * n) {
            float middle = kvq__sum_all(_mm256_load_ps(v->middle[r][c / KVQ_GROUP_CHANNELS]));
            __m256 x[4], bias = _mm256_set1_ps(middle);
            kvq__channels_of_words(v->o[r] + c, n, x);
            for (uint32_t i = 0; i < n; i++) {
                __m256 sum = _mm256_add_ps(_mm256_load_ps(out + c + 8 * i), x[i]);
                _mm256_store_ps(out + c + 8 * i, _mm256_add_ps(sum, bias));
            }
        }
    }
}
