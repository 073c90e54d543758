// SPDX-License-Identifier: Apache-2.0
//
// The state of attention with byte dot products and what its files share: vnni_avx512.c (the chunk,
// and the method in words), vnni_k_avx512.c and vnni_v_avx512.c (the two operands as bytes, the
// fast path), digits_k_avx512.c and digits_v_avx512.c (as numbers of three digits, the exact path).
#ifndef KVQ_KERNELS_VNNI_AVX512_H
#define KVQ_KERNELS_VNNI_AVX512_H

#include <immintrin.h>

#include "kernels/avx512.h"

enum {
    KVQ__INT16_TOP = 32000, // what the largest |q| and K scale become as int16
    KVQ__DIGITS = 3,        // of a number on the exact path
    KVQ__MAX_VGROUPS = KVQ_MAX_HEAD_DIM / KVQ_GROUP_CHANNELS,
};

// What the largest |q * scale| becomes: the largest number of three digits up to 127, less what two
// roundings of fp32 may add.
#define KVQ__DIGITS_TOP 8355708.0f

// What all rows share of a group's K (or V): scales as int16, in the order in which they meet q16
// (or p), and in fp32 what the middle of the codes stands for, of channels (or of [channel group]
// [slot]). Besides, the value of 1 in K's scales, and each token's largest scale of V, by slots,
// which those of V are parts of. V of four levels has nothing but `largest`, by tokens.
// The exact path has scales in fp32, what code 0 of K stands for, and tokens of V by sets.
struct kvq__opened {
    union {
        _Alignas(64) int16_t scale16[KVQ_MAX_HEAD_DIM];
        _Alignas(64) float scale[KVQ_MAX_HEAD_DIM];
    };
    _Alignas(64) float middle[KVQ_MAX_HEAD_DIM];
    _Alignas(64) float largest[KVQ_GROUP_TOKENS];
    float unit;
};

// Lives in the tile's scratch memory from prepare_fast on. Of groups without packed tokens nothing
// is set.
struct kvq__vnni {
    const struct kvq__chunk *chunk;
    const uint8_t *ahead[2];  // two records of the next chunk, to be fetched in this pass
    const uint8_t *behind[2]; // the end of what was fetched before each of them
    size_t ahead_of_dots;     // bytes of such a record that the steps before the dot products fetch
    // The group whose opened K, bytes, units and biases serve this one: the first of its record
    // that is packed, where scales stand before a record's groups, else itself.
    uint8_t k_of[KVQ__CHUNK_GROUPS];
    // Of all tiles of the item, by slot.
    _Alignas(64) int16_t q16[KVQ_TILE_ROWS][KVQ_MAX_HEAD_DIM]; // in the order of opened scales
    int16_t abs16[KVQ_TILE_ROWS][KVQ_MAX_HEAD_DIM];            // |q16|
    float q_unit[KVQ_TILE_ROWS + KVQ__TILE4];                  // max |q| / KVQ__INT16_TOP
    // Of the chunk: first of K, then of V.
    _Alignas(64) struct kvq__opened opened[KVQ__CHUNK_GROUPS];
    int32_t factor[KVQ__CHUNK_GROUPS][KVQ_TILE_ROWS]; // that makes int16 of q * scale bytes
    // Value of 1 in a dot product; of V on the exact path [32 channels][row], for the chunk.
    float unit[KVQ__CHUNK_GROUPS][KVQ_TILE_ROWS];
    float bias[KVQ__CHUNK_GROUPS][KVQ_TILE_ROWS];             // of logits
    float p[KVQ__CHUNK_GROUPS][KVQ__TILE4][KVQ_GROUP_TOKENS]; // of four rows, in the order of slots
    float weigh[KVQ__CHUNK_GROUPS][KVQ__TILE4];               // that makes int16 of them
    uint8_t bytes[KVQ__CHUNK * KVQ_TILE_ROWS * KVQ_MAX_HEAD_DIM / KVQ_GROUP_TOKENS];
    // Of four rows: 16 bytes for four numbers, the word of their lowest digits first; or the second
    // digits of q * scale, in the order of its bytes.
    _Alignas(64) uint8_t digits[KVQ__CHUNK_GROUPS][KVQ__TILE4][4 * KVQ_MAX_HEAD_DIM];
    // Sums of the chunk: values, in the order of the layout; p * middle.
    float o[KVQ_TILE_ROWS][KVQ_MAX_HEAD_DIM];
    float middle[KVQ_TILE_ROWS][KVQ__MAX_VGROUPS][16];
    // Of keys with strong channels, of four rows: which words of a row's bytes have second digits,
    // bit by bit, and which rows' products are too coarse for bytes.
    uint64_t strong_words[KVQ__CHUNK_GROUPS];
    uint8_t coarse_rows[KVQ__CHUNK_GROUPS];
};
static_assert(sizeof(struct kvq__vnni) <= KVQ__SCRATCH_BYTES, "the workspace holds the state");

static inline struct kvq__vnni *kvq__vnni_of(const struct kvq__tile *tile)
{
    return tile->scratch;
}

// The bytes of one row in one group. Rows stand close, for a tile of few of them to stay in the
// first level cache.
KVQ__INLINE uint8_t *kvq__vnni_bytes(const struct kvq__tile *tile, uint32_t group, uint32_t row,
                                     uint32_t dim)
{
    return kvq__vnni_of(tile)->bytes + ((size_t)group * tile->rows + row) * dim;
}

static inline float kvq__centre_of(uint32_t bits)
{
    return 0.5f * (float)((1 << bits) - 1);
}

// The largest of n fp16 numbers that are not negative, in the lowest lane: they are ordered like
// their bits.
KVQ__INLINE __m128 kvq__max_f16(const uint8_t *p, uint32_t n)
{
    __m512i m = _mm512_load_si512(p);
    for (uint32_t i = 32; i < n; i += 32)
        m = _mm512_max_epu16(m, _mm512_load_si512(p + 2 * i));
    __m256i h = _mm256_max_epu16(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
    __m128i q = _mm_max_epu16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    // phminposuw finds a minimum, of the complements.
    q = _mm_minpos_epu16(_mm_xor_si128(q, _mm_set1_epi16(-1)));
    return _mm_cvtph_ps(_mm_xor_si128(q, _mm_set1_epi16(-1)));
}

// Sets the value of 1 in a group's int16 scales. Returns what makes them of the fp16 ones.
KVQ__INLINE __m512 kvq__open_unit(struct kvq__opened *g, const uint8_t *scales, int top,
                                  uint32_t dim)
{
    // A scale of 0 would give 0 / 0; the smallest fp16 number does no harm.
    __m128 max = _mm_max_ss(kvq__max_f16(scales, dim), _mm_set_ss(0x1p-24f));
    _mm_store_ss(&g->unit, _mm_mul_ss(max, _mm_set_ss(1.0f / (float)top)));
    return _mm512_broadcastss_ps(_mm_div_ss(_mm_set_ss((float)top), max));
}

// a * fa and b * fb as int16, in the order of vpackssdw.
static inline __m512i kvq__to_int16(__m512 a, __m512 b, __m512 fa, __m512 fb)
{
    return _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(a, fa)),
                              _mm512_cvtps_epi32(_mm512_mul_ps(b, fb)));
}

// Channels 4 s + {0, 1, 2, 3} stand in bytes 0, 2, 1, 3 of a word of codes: the shuffle of int16.
static inline __m512i kvq__byte_order(void)
{
    return _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
}

KVQ__INLINE __m512i kvq__broadcast_word(const uint8_t *p)
{
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
}

// A number from its three digits of base 256, lowest first.
KVQ__INLINE __m512 kvq__of_digits(const __m512i *d)
{
    const __m512 base = _mm512_set1_ps(256.0f);
    __m512 x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[2]), base, _mm512_cvtepi32_ps(d[1]));
    return _mm512_fmadd_ps(x, base, _mm512_cvtepi32_ps(d[0]));
}

// ---- Prefetching ----
//
// While K of a chunk is multiplied, the first two of the next chunk's four records are fetched,
// and the other two during V; the first eight groups bring the first record, the others the second.
// The order is that of memory, which the hardware's prefetching follows, and the lines are asked
// for one by one wherever time is spent: in the steps that make bytes, `open` and `scale`, and in
// the dot products, at two places for each 16 channels of K or four tokens of V.
//
// Of lines that were asked for once, 1 to 3 of 100 were not there on a Zen 4 (docs/benchmarks.md),
// and such a line costs the whole way to memory. So each is asked for once more, kvq__lag bytes
// after the first time, and the last lines of a record with the first ones of the next.
enum { KVQ__RECORDS_AHEAD = 2, KVQ__GROUPS_A_RECORD = KVQ__CHUNK_GROUPS / KVQ__RECORDS_AHEAD };

// What one stretch of lines is asked for by: the lines themselves, and those to ask for once more.
struct kvq__ahead {
    const uint8_t *first, *again;
};

// 24 lines at head_dim 128. A multiple of what a step or the products fetch for a group.
KVQ__INLINE size_t kvq__lag(uint32_t dim)
{
    return (size_t)12 * dim;
}

// What to fetch from byte `at` of a group's record on.
KVQ__INLINE struct kvq__ahead kvq__ahead_at(const struct kvq__vnni *v, uint32_t group, size_t at,
                                            uint32_t dim)
{
    uint32_t i = group / KVQ__GROUPS_A_RECORD;
    const uint8_t *first = v->ahead[i] + at;
    if (at < kvq__lag(dim))
        return (struct kvq__ahead){first, v->behind[i] + at};
    return (struct kvq__ahead){first, first - kvq__lag(dim)};
}

KVQ__INLINE void kvq__fetch_twice(struct kvq__ahead ahead, size_t at)
{
    kvq__fetch(ahead.first + at);
    kvq__fetch(ahead.again + at);
}

// A step that makes bytes fetches a line for each 32 channels; what follows are the lines for each
// 16 channels in the products, as many as codes have bits. For kvq2 the products alone fetch whole
// records: 2.75 bits a number fit three lines, and the steps run once for a record.

// Bytes of a record that come before the share of one group in the dot products.
KVQ__INLINE size_t kvq__ahead_of_group(const struct kvq__vnni *v, uint32_t group, uint32_t dim,
                                       int lines)
{
    return v->ahead_of_dots + (size_t)dim * 4 * (group % KVQ__GROUPS_A_RECORD) * (uint32_t)lines;
}

// The share of one group in step 0 or 1: a line for each 32 channels.
KVQ__INLINE struct kvq__ahead kvq__ahead_of_step(const struct kvq__vnni *v, uint32_t step,
                                                 uint32_t group, uint32_t dim)
{
    size_t i = step * KVQ__GROUPS_A_RECORD + group % KVQ__GROUPS_A_RECORD;
    return kvq__ahead_at(v, group, 2 * i * dim, dim);
}

// The lines of that share that row n of so many rows fetches.
KVQ__INLINE void kvq__fetch_share(struct kvq__ahead ahead, uint32_t dim, int n, int rows)
{
    int lines = (int)dim / 32;
    for (int i = n * lines / rows; i < (n + 1) * lines / rows; i++)
        kvq__fetch_twice(ahead, 64 * (size_t)i);
}

// The lines that are left, one for each group's norms, at the end of a record; by groups 0 to 3.
KVQ__INLINE void kvq__fetch_rest(const struct kvq__vnni *v, uint32_t group, uint32_t dim, int lines)
{
    if (!v->ahead_of_dots)
        return;
    size_t rest = v->ahead_of_dots + (size_t)4 * dim * (uint32_t)lines * KVQ__GROUPS_A_RECORD;
    for (int i = 0; i < KVQ__RECORDS_AHEAD; i++)
        kvq__fetch(v->ahead[i] + rest + 64 * group);
}

// The planes of one operand of a group, from a slab on.
struct kvq__planes {
    const uint8_t *low, *high;
    struct kvq__ahead ahead; // what to fetch meanwhile, see kvq__fetch_place
    uint32_t dim;
};

KVQ__INLINE struct kvq__planes kvq__planes_of(const struct kvq__tile *tile, uint32_t group,
                                              const uint8_t *codes, uint32_t dim, int bits)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    if (group < KVQ_BLOCK_GROUPS)
        kvq__fetch_rest(v, group, dim, bits);
    size_t at = kvq__ahead_of_group(v, group, dim, bits);
    return (struct kvq__planes){codes, codes + 8 * dim, kvq__ahead_at(v, group, at, dim), dim};
}

KVQ__INLINE void kvq__next_slab(struct kvq__planes *p, int bits)
{
    p->low += KVQ_GROUP_TOKENS * KVQ__SLAB / 4;
    p->high += KVQ_GROUP_TOKENS * KVQ__SLAB / (bits == 3 ? 8 : 4);
    p->ahead.first += 4 * KVQ__SLAB * bits;
    p->ahead.again += 4 * KVQ__SLAB * bits;
}

KVQ__INLINE void kvq__fetch_place(const struct kvq__planes *p, unsigned place, int bits)
{
    unsigned n = (unsigned)bits;
    for (unsigned i = place * n / 2; i < (place + 1) * n / 2; i++)
        kvq__fetch_twice(p->ahead, 64 * (size_t)i);
}

// K's high plane of row r of a slab of n rows, as 2-bit fields.
KVQ__INLINE __m512i kvq__load_k_high(const struct kvq__planes *p, unsigned r, unsigned n,
                                     unsigned z, int bits)
{
    if (bits == 4)
        return kvq__load_row(p->high + KVQ__ROW_BYTES * r, z, r & 3);
    // Two rows of a slab share one row of bits.
    unsigned row = r % (n / 2);
    __m512i x = kvq__load_row(p->high + KVQ__ROW_BYTES * row, z, row & 3);
    x = r >= n / 2 ? _mm512_srli_epi16(x, 1) : x;
    return _mm512_and_si512(x, _mm512_set1_epi8(0x55));
}

// Logits of a chunk: queries into bytes for all its groups, then dot products group by group.
void kvq__vnni_prepare_k(const struct kvq__tile *tile);
void kvq__vnni_qk(const struct kvq__tile *tile);

// The same where a few channels may be much stronger than the others: theirs have two digits.
void kvq__vnni_qk_strong(const struct kvq__tile *tile);

// Values likewise: p into bytes, then dot products, summed in the state, and flushed from there.
void kvq__vnni_prepare_v(const struct kvq__tile *tile);
void kvq__vnni_pv(const struct kvq__tile *tile);
void kvq__vnni_flush(const struct kvq__tile *tile);

// Logits and values of a chunk on the exact path. Values are left in the state as well.
void kvq__digits_qk(const struct kvq__tile *tile);
void kvq__digits_pv(const struct kvq__tile *tile);

#endif
