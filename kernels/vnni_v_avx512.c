// SPDX-License-Identifier: Apache-2.0
//
// Values of packed groups with byte dot products. See vnni_avx512.c for the method.
//
// Registers of the dot products: 8 accumulators (4 rows, two registers of codes) and as many sums,
// the codes, their table and masks, the broadcast weights. Of 3 and 4 bits two positions, whose
// codes share a byte once the planes are joined, are unpacked together: beside 8 products that
// takes 3 instructions of the pipes that shuffle. One position of 32 words took 7, and they bounded
// the loop.
#include "kernels/vnni_v_avx512.h"

enum { V16_TOP = 2890 }; // what the largest weight and 1 become as int16: 2890^2 / 2^15 < 255

// What a code less its middle is multiplied with for the product: 16 where it comes from the upper
// half of a byte, or may.
static inline int code_step(uint32_t bits)
{
    return bits == 2 ? 2 : 16;
}

// ---- V: p * scale as u8, for all groups of the chunk ----
//
// A token's weight is p times the largest of its scales (one for each 32 channels), and a scale is
// taken as a part of that one. The step of a row's bytes is thus set by the largest p * scale there
// is: not by a token with a large p and small values, nor by one with large values that nobody
// looks at.

// p of 16 tokens in the order of the slots in which scales and zeros stand.
static inline __m512i slots_from_tokens(void)
{
    return _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
}

// Slots, in the order in which kvq__to_int16 leaves them, in the order of sets: in 128-bit lane i
// the four tokens of set i and those of set i + 4; set 2 j + half are tokens 8 j + half + {0, 2, 4,
// 6}.
static inline __m512i sets_from_slots(void)
{
    static const uint16_t order[32] = {0,  8,  1,  9,  4,  12, 5,  13, 2,  10, 3,
                                       11, 6,  14, 7,  15, 16, 24, 17, 25, 20, 28,
                                       21, 29, 18, 26, 19, 27, 22, 30, 23, 31};
    return _mm512_loadu_si512(order);
}

// Where the four weights of a channel group and set stand: two groups to a register, two sets to
// a lane, as the two packs leave them.
KVQ__INLINE uint32_t weight_at(uint32_t group, uint32_t set)
{
    return 64 * (group / 2) + 16 * (set % 4) + 8 * (group % 2) + 4 * (set / 4);
}

// Scales as int16 in the order of sets, and middles in the order of slots.
KVQ__INLINE void open_v(struct kvq__vnni *v, uint32_t index, __m512 centre, uint32_t dim)
{
    const struct kvq_packed *packed = &v->chunk->group[index].packed;
    const uint8_t *scales = packed->v_scales, *zeros = packed->v_zeros;
    const struct kvq__ahead ahead = kvq__ahead_of_step(v, 0, index, dim);
    struct kvq__opened *g = &v->opened[index];
    kvq__find_largest(scales, dim, g->largest);
    __m512 fa = _mm512_div_ps(_mm512_set1_ps(V16_TOP), _mm512_load_ps(g->largest));
    __m512 fb = _mm512_div_ps(_mm512_set1_ps(V16_TOP), _mm512_load_ps(g->largest + 16));
    for (uint32_t i = 0; i < dim; i += KVQ_GROUP_CHANNELS) {
        __m512 a = kvq__load_f16(scales + 2 * i), b = kvq__load_f16(scales + 2 * i + 32);
        __m512i x = _mm512_permutexvar_epi16(sets_from_slots(), kvq__to_int16(a, b, fa, fb));
        _mm512_store_si512(g->scale16 + i, x);
        __m512 za = kvq__load_f16(zeros + 2 * i), zb = kvq__load_f16(zeros + 2 * i + 32);
        kvq__fetch_twice(ahead, 2 * (size_t)i);
        _mm512_store_ps(g->middle + i, _mm512_fmadd_ps(a, centre, za));
        _mm512_store_ps(g->middle + i + 16, _mm512_fmadd_ps(b, centre, zb));
    }
}

// p of up to four rows into the order of slots, and what makes int16 of them. That of tokens which
// are not packed, and of outliers, is 0 by now (attend_chunk.c).
KVQ__INLINE void sort_weights(const struct kvq__tile *tile, uint32_t group, uint32_t first,
                              int rows)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const float *p = tile->logits + (size_t)first * KVQ__LOGITS_STRIDE + group * KVQ_GROUP_TOKENS;
    const float *largest = v->opened[group].largest;
    __m512 la = _mm512_load_ps(largest), lb = _mm512_load_ps(largest + 16);
    // With this floor nothing overflows; weights below it count nothing.
    __m512 top[KVQ__TILE4];
    for (int i = 0; i < KVQ__TILE4; i++)
        top[i] = _mm512_set1_ps(1e-30f);
    KVQ__UNROLL
    for (int i = 0; i < rows; i++) {
        __m512 a = _mm512_load_ps(p + i * KVQ__LOGITS_STRIDE);
        __m512 b = _mm512_load_ps(p + i * KVQ__LOGITS_STRIDE + 16);
        a = _mm512_permutexvar_ps(slots_from_tokens(), a);
        b = _mm512_permutexvar_ps(slots_from_tokens(), b);
        _mm512_store_ps(v->p[group][i], a);
        _mm512_store_ps(v->p[group][i] + 16, b);
        top[i] = _mm512_max_ps(top[i], _mm512_mul_ps(a, la));
        top[i] = _mm512_max_ps(top[i], _mm512_mul_ps(b, lb));
    }
    __m128 x = _mm512_castps512_ps128(kvq__max4(top[0], top[1], top[2], top[3]));
    _mm_store_ps(v->weigh[group], _mm_div_ps(_mm_set1_ps(V16_TOP), x));
    const float unit = 32768.0f / (V16_TOP * V16_TOP) / (float)code_step(tile->codec->v_bits);
    _mm_store_ps(v->unit[group] + first, _mm_mul_ps(x, _mm_set1_ps(unit)));
}

KVQ__INLINE void scale_weights(const struct kvq__tile *tile, uint32_t group, uint32_t first,
                               uint32_t dim, int rows)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    const int16_t *scale = v->opened[group].scale16;
    const float *largest = v->opened[group].largest;
    __m512 la = _mm512_load_ps(largest), lb = _mm512_load_ps(largest + 16);
    uint8_t *bytes = kvq__vnni_bytes(tile, group, first, dim);
    const struct kvq__ahead ahead = kvq__ahead_of_step(v, 1, group, dim);
    KVQ__UNROLL
    for (int i = 0; i < rows; i++) {
        const float *p = v->p[group][i];
        __m512 weigh = _mm512_set1_ps(v->weigh[group][i]);
        __m512i p16 = kvq__to_int16(_mm512_load_ps(p), _mm512_load_ps(p + 16),
                                    _mm512_mul_ps(la, weigh), _mm512_mul_ps(lb, weigh));
        p16 = _mm512_permutexvar_epi16(sets_from_slots(), p16);
        for (uint32_t c = 0; c < dim; c += 2 * KVQ_GROUP_CHANNELS) {
            __m512i a = _mm512_mulhrs_epi16(p16, _mm512_load_si512(scale + c));
            __m512i b = _mm512_mulhrs_epi16(p16, _mm512_load_si512(scale + c + 32));
            _mm512_store_si512(bytes + (size_t)i * dim + c, _mm512_packus_epi16(a, b));
        }
        kvq__fetch_share(ahead, dim, i, rows);
    }
}

// ---- V of four levels: p * scale as u8 at once ----

// The bytes of up to four rows, in the order of sets, and what 1 is worth.
KVQ__INLINE void weigh_lloyd(const struct kvq__tile *tile, uint32_t group, uint32_t first, int rows)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const float *p = tile->logits + (size_t)first * KVQ__LOGITS_STRIDE + group * KVQ_GROUP_TOKENS;
    const float *scale = v->opened[group].largest;
    uint8_t *bytes = kvq__vnni_bytes(tile, group, first, KVQ_GROUP_TOKENS);
    const __m128i sets =
        _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15); // from tokens
    __m512 a[KVQ__TILE4], b[KVQ__TILE4], top[KVQ__TILE4];
    for (int i = 0; i < KVQ__TILE4; i++)
        top[i] = _mm512_set1_ps(1e-30f);
    KVQ__UNROLL
    for (int i = 0; i < rows; i++) {
        const float *at = p + i * KVQ__LOGITS_STRIDE;
        a[i] = _mm512_mul_ps(_mm512_load_ps(at), _mm512_load_ps(scale));
        b[i] = _mm512_mul_ps(_mm512_load_ps(at + 16), _mm512_load_ps(scale + 16));
        top[i] = _mm512_max_ps(top[i], _mm512_max_ps(a[i], b[i]));
    }
    _Alignas(16) float weigh[KVQ__TILE4];
    __m128 x = _mm512_castps512_ps128(kvq__max4(top[0], top[1], top[2], top[3]));
    _mm_store_ps(weigh, _mm_div_ps(_mm_set1_ps(255.0f), x));
    const float unit = KVQ__LLOYD2_UNIT / 255.0f;
    _mm_store_ps(v->unit[group] + first, _mm_mul_ps(x, _mm_set1_ps(unit)));
    KVQ__UNROLL
    for (int i = 0; i < rows; i++) {
        __m512 w = _mm512_set1_ps(weigh[i]);
        __m128i c = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(a[i], w)));
        __m128i d = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(b[i], w)));
        uint8_t *to = bytes + i * KVQ_GROUP_TOKENS;
        _mm_store_si128((void *)to, _mm_shuffle_epi8(c, sets));
        _mm_store_si128((void *)(to + 16), _mm_shuffle_epi8(d, sets));
    }
}

static void prepare_lloyd(const struct kvq__tile *tile)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (v->chunk->group[i].packed_tokens)
            kvq__load_slots(v->chunk->group[i].packed.v_scales, v->opened[i].largest);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        for (uint32_t i = 0; i < v->chunk->groups; i++)
            if (v->chunk->group[i].packed_tokens)
                KVQ__BY_ROWS(tile->rows - r, weigh_lloyd(tile, i, r, ROWS));
}

// ---- V: both ----

KVQ__INLINE void prepare_rows(const struct kvq__tile *tile, uint32_t first, uint32_t dim, int rows)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (v->chunk->group[i].packed_tokens)
            sort_weights(tile, i, first, rows);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (v->chunk->group[i].packed_tokens)
            scale_weights(tile, i, first, dim, rows);
    if (dim == 64)
        kvq__sum_middles(tile, first, 0, 2, rows);
    for (uint32_t slab = 0; slab < dim / KVQ__SLAB; slab++)
        kvq__sum_middles(tile, first, KVQ__AT_ONCE * slab, KVQ__AT_ONCE, rows);
}

KVQ__INLINE void prepare_v(const struct kvq__tile *tile, uint32_t dim)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    __m512 centre = _mm512_set1_ps(kvq__centre_of(tile->codec->v_bits));
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (v->chunk->group[i].packed_tokens)
            open_v(v, i, centre, dim);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        KVQ__BY_ROWS(tile->rows - r, prepare_rows(tile, r, dim, ROWS));
}

void kvq__vnni_prepare_v(const struct kvq__tile *tile)
{
    if (tile->codec->v.kind == KVQ__FOUR_LEVELS)
        prepare_lloyd(tile);
    else
        KVQ__BY_DIM(tile->dim, prepare_v(tile, DIM));
}

// ---- V: dot products ----

// Entry i is the code that stands in i, less its middle, times 16.
KVQ__INLINE __m512i nibble_table(int bits)
{
    _Alignas(64) int8_t table[64];
    int most = (1 << bits) - 1;
    for (int i = 0; i < 64; i++)
        table[i] = (int8_t)(16 * (i & most) - 8 * most);
    return _mm512_load_si512(table);
}

KVQ__INLINE __m512 add_scaled(__m512 sum, __m512i acc, float unit)
{
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), _mm512_set1_ps(unit), sum);
}

// What one pass multiplies of a word. Affine codes of 2 bits: one position of 32 words, which have
// their weights in common; others: two positions of 16 words, which are unpacked in common.
KVQ__INLINE bool by_halves(struct kvq__v_how how)
{
    return how.bits == 2 && !how.lloyd;
}

// Positions n and n + 2 of the bytes of 16 words, n being 0 or 1, or one position of two halves:
// codes less their middle, times what code_step says, or levels.
struct pair {
    __m512i first, second;
};

// vpermb looks at 6 bits of a byte.
KVQ__INLINE struct pair pair_of_levels(__m512i x, int n, struct kvq__v_how how)
{
    __m512i upper = n ? _mm512_srli_epi16(x, 2) : x;
    return (struct pair){_mm512_permutexvar_epi8(x, kvq__v_table(2 * n, how)),
                         _mm512_permutexvar_epi8(upper, kvq__v_table(4, how))};
}

// Words of row `row` of a plane, half z, as they lie: those of set 2 j + half still have their
// halves exchanged if swapped(j).
KVQ__INLINE __m512i load_words(const uint8_t *plane, unsigned row, unsigned z, unsigned j,
                               uint32_t dim)
{
    return _mm512_load_si512(plane +
                             (dim == 64 ? 64 * row : KVQ__ROW_BYTES * row + 64 * (z ^ j >> 1)));
}

KVQ__INLINE bool swapped(unsigned j, uint32_t dim)
{
    return dim == 64 ? j >> 1 : j & 1;
}

// The high plane of a set, shifted so that the upper bits of the codes at positions n and n + 2
// meet the lower ones in a nibble. Of 3-bit codes two sets share a row, and what stands in the
// nibble's highest bit is another code's.
KVQ__INLINE __m512i upper_bits(__m512i high, unsigned set, int n, int bits)
{
    if (bits == 3 && set % 2)
        return n ? _mm512_srli_epi16(high, 1) : _mm512_slli_epi16(high, 1);
    return n ? high : _mm512_slli_epi16(high, 2);
}

// Of the two nibbles of a byte the lower one is looked up. The upper one is 16 times the code
// already, as a byte with or without a sign: the difference is the same.
KVQ__INLINE struct pair pair_of_nibbles(__m512i x, struct kvq__v_how how)
{
    __m512i high = _mm512_and_si512(x, _mm512_set1_epi8(how.bits == 3 ? 0x70 : (char)0xf0));
    return (struct pair){_mm512_permutexvar_epi8(x, nibble_table(how.bits)),
                         _mm512_sub_epi8(high, _mm512_set1_epi8(how.bits == 3 ? 56 : 120))};
}

KVQ__INLINE struct pair pair_of(const struct kvq__v_planes *p, unsigned set, unsigned z,
                                uint32_t dim, int n, struct kvq__v_how how)
{
    if (by_halves(how))
        return (struct pair){kvq__v_code(p, set, 0, dim, n, how),
                             kvq__v_code(p, set, 1, dim, n, how)};
    unsigned j = set / 2, row = dim == 64 ? set ^ (j & 1) : set;
    __m512i x = load_words(p->low, row, z, j, dim);
    if (how.bits > 2) {
        __m512i high = load_words(p->high, how.bits == 3 ? j : row, z, j, dim);
        high = upper_bits(high, set, n, how.bits);
        x = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x33), n ? _mm512_srli_epi16(x, 2) : x, high,
                                      0xca);
    }
    if (swapped(j, dim))
        x = _mm512_shuffle_i64x2(x, x, KVQ__SWAP_HALVES);
    return how.bits == 2 ? pair_of_levels(x, n, how) : pair_of_nibbles(x, how);
}

// The V planes of one group from a slab on, and the bytes of the first row that meet position n.
struct operands {
    struct kvq__v_planes planes;
    const uint8_t *weights;
    uint32_t stride; // bytes of a row
};

KVQ__INLINE struct operands operands_of(const struct kvq__tile *tile, uint32_t group,
                                        uint32_t first, uint32_t pass, uint32_t dim, int n,
                                        struct kvq__v_how how)
{
    uint32_t stride = how.lloyd ? KVQ_GROUP_TOKENS : dim;
    uint32_t at = pass / 4 * KVQ__SLAB + weight_at((uint32_t)n, 0);
    if (dim == 64 && !by_halves(how))
        at = 0; // positions 0 and 1 are of the first channel group, 2 and 3 of the second
    return (struct operands){
        .planes = kvq__v_planes_of(tile, group, pass, dim, how),
        .weights = kvq__vnni_bytes(tile, group, first, stride) + (how.lloyd ? 0 : at),
        .stride = stride,
    };
}

// One set of four tokens, 16 words.
KVQ__INLINE void v_set(__m512i acc[][2], const struct operands *p, unsigned set, unsigned z,
                       uint32_t dim, int rows, int n, struct kvq__v_how how)
{
    kvq__v_fetch(&p->planes, set, 8, how);
    struct pair code = pair_of(&p->planes, set, z, dim, n, how);
    for (int i = 0; i < rows; i++) {
        const uint8_t *at = p->weights + (size_t)i * p->stride;
        at += how.lloyd ? 4 * set : weight_at(0, set);
        __m512i weights = kvq__broadcast_word(at);
        acc[i][0] = _mm512_dpbusd_epi32(acc[i][0], weights, code.first);
        if (how.bits > 2) // positions n and n + 2 are two channel groups apart, or one
            weights = kvq__broadcast_word(at + weight_at(dim == 64 ? 1 : 2, 0));
        acc[i][1] = _mm512_dpbusd_epi32(acc[i][1], weights, code.second);
    }
}

// Where the k-th sums of a pass are. A channel group has two halves z of one position, at head_dim
// 64 two positions.
KVQ__INLINE uint32_t sums_at(uint32_t pass, int n, uint32_t k, uint32_t dim, struct kvq__v_how how)
{
    if (by_halves(how))
        return 32 * pass + 16 * k;
    if (dim == 64)
        return 16 * ((uint32_t)n + 2 * k);
    return pass / 4 * KVQ__SLAB + 32 * ((uint32_t)n + 2 * k) + 16 * (pass % 2);
}

// Up to four rows times 32 of the chunk's channels, of all its groups: only so many
// channels, for the sums to stay in registers.
KVQ__INLINE void pv_pass(const struct kvq__tile *tile, uint32_t first, uint32_t pass, uint32_t dim,
                         int rows, int n, struct kvq__v_how how)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const unsigned z = dim == 64 ? 0 : pass % 2;
    __m512 sum[KVQ__TILE4][2];
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (uint32_t group = 0; group < v->chunk->groups; group++) {
        if (v->chunk->group[group].packed_tokens == 0)
            continue;
        struct operands p = operands_of(tile, group, first, pass, dim, n, how);
        __m512i acc[KVQ__TILE4][2];
        for (int i = 0; i < rows; i++)
            acc[i][0] = acc[i][1] = _mm512_setzero_si512();
        KVQ__UNROLL
        for (unsigned set = 0; set < 8; set++)
            v_set(acc, &p, set, z, dim, rows, n, how);
        const float *unit = v->unit[group] + first;
        for (int i = 0; i < rows; i++)
            for (int k = 0; k < 2; k++)
                sum[i][k] = add_scaled(sum[i][k], acc[i][k], unit[i]);
    }
    for (int i = 0; i < rows; i++)
        for (uint32_t k = 0; k < 2; k++)
            _mm512_store_ps(v->o[first + (uint32_t)i] + sums_at(pass, n, k, dim, how), sum[i][k]);
}

KVQ__INLINE void pv_rows(const struct kvq__tile *tile, uint32_t first, uint32_t dim, int rows,
                         struct kvq__v_how how)
{
    if (dim == 64) {
        pv_pass(tile, first, 0, dim, rows, 0, how);
        pv_pass(tile, first, 1, dim, rows, 1, how);
        return;
    }
    for (uint32_t pass = 0; pass < dim / KVQ_GROUP_CHANNELS; pass += 4) {
        pv_pass(tile, first, pass, dim, rows, 0, how);
        pv_pass(tile, first, pass + 1, dim, rows, by_halves(how) ? 1 : 0, how);
        pv_pass(tile, first, pass + 2, dim, rows, by_halves(how) ? 2 : 1, how);
        pv_pass(tile, first, pass + 3, dim, rows, by_halves(how) ? 3 : 1, how);
    }
}

KVQ__INLINE void pv_groups(const struct kvq__tile *tile, uint32_t dim, struct kvq__v_how how)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t i = 0; i < KVQ_BLOCK_GROUPS && i < v->chunk->groups; i++)
        kvq__fetch_rest(v, i, dim, how.bits);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        KVQ__BY_ROWS(tile->rows - r, pv_rows(tile, r, dim, ROWS, how));
    }
}

static void pv_affine(const struct kvq__tile *tile)
{
    KVQ__BY_BITS(tile->codec->v_bits,
                 KVQ__BY_DIM(tile->dim, pv_groups(tile, DIM, (struct kvq__v_how){BITS, false})));
}

static void pv_lloyd(const struct kvq__tile *tile)
{
    KVQ__BY_DIM(tile->dim, pv_groups(tile, DIM, (struct kvq__v_how){2, true}));
}

void kvq__vnni_pv(const struct kvq__tile *tile)
{
    if (tile->codec->v.kind == KVQ__FOUR_LEVELS)
        pv_lloyd(tile);
    else
        pv_affine(tile);
}

// ---- The chunk's sums ----

// The sums of p * middle over all tokens, of four channel groups.
KVQ__INLINE __m512 middles(const struct kvq__vnni *v, uint32_t r, uint32_t from, uint32_t n)
{
    __m512 x[KVQ__AT_ONCE];
    for (uint32_t g = 0; g < KVQ__AT_ONCE; g++)
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
    bool lloyd = tile->codec->v.kind == KVQ__FOUR_LEVELS;
    __m512 sums = lloyd ? _mm512_setzero_ps() : middles(v, r, slab * KVQ__AT_ONCE, n);
    for (uint32_t g = 0; g < n; g++) {
        __m512 bias = _mm512_permutexvar_ps(_mm512_set1_epi32((int32_t)g), sums);
        uint32_t c = slab * KVQ__SLAB + g * KVQ_GROUP_CHANNELS;
        float *out = tile->ot + (size_t)r * tile->dim + c;
        if (n < KVQ__AT_ONCE)
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
            flush(tile, r, slab, KVQ__AT_ONCE);
    }
}
