// SPDX-License-Identifier: Apache-2.0
//
// The state of AVX2's byte products and what their files share: bytes_avx2.c (the chunk, and the
// method in words), bytes_k_avx2.c and bytes_v_avx2.c (the two operands). These three are compiled
// twice: as they are, and as kvq__avxvnni_* with KVQ__AVXVNNI for CPUs that have vpdpbusd without
// AVX-512 (AVX-VNNI). Both sum the same whole numbers, so their results are the same to the bit.
#ifndef KVQ_KERNELS_BYTES_AVX2_H
#define KVQ_KERNELS_BYTES_AVX2_H

#include <immintrin.h>

#include "kernels/avx2.h"

#ifdef KVQ__AVXVNNI
#define kvq__init_avx2_bytes kvq__init_avxvnni_bytes
#define kvq__bytes_prepare_k kvq__avxvnni_prepare_k
#define kvq__bytes_qk        kvq__avxvnni_qk
#define kvq__bytes_prepare_v kvq__avxvnni_prepare_v
#define kvq__bytes_pv        kvq__avxvnni_pv
#define kvq__bytes_flush     kvq__avxvnni_flush
#endif

enum {
    KVQ__INT16_TOP = 32000, // what the largest |q| and K scale become as int16
    KVQ__MAX_VGROUPS = KVQ_MAX_HEAD_DIM / KVQ_GROUP_CHANNELS,
};

// What all rows share of a group's K (or V): scales as int16, in the order in which they meet q16
// (or p), and in fp32 what the middle of the codes stands for, of channels (or of [channel group]
// [token in the order of sets]). Besides, the value of 1 in K's scales, and each token's largest
// scale of V, which those of V are parts of. V of four levels has nothing but `largest`.
struct kvq__opened {
    _Alignas(64) int16_t scale16[KVQ_MAX_HEAD_DIM];
    _Alignas(64) float middle[KVQ_MAX_HEAD_DIM];
    _Alignas(64) float largest[KVQ_GROUP_TOKENS];
    float unit;
};

// Lives in the tile's scratch memory from prepare_fast on. Of groups without packed tokens nothing
// is set.
struct kvq__bytes {
    const struct kvq__chunk *chunk;
    const struct kvq_kernels *exact; // the table that the steps in between come from
    // The group whose opened K, bytes, units and biases serve this one: the first of its record
    // that is packed, where scales stand before a record's groups, else itself.
    uint8_t k_of[KVQ__CHUNK_GROUPS];
    // Of all tiles of the item, by slot.
    _Alignas(64) int16_t q16[KVQ_TILE_ROWS][KVQ_MAX_HEAD_DIM]; // in the order of opened scales
    float q_unit[KVQ_TILE_ROWS + KVQ__TILE4];                  // max |q| / KVQ__INT16_TOP
    // Of the chunk: first of K, then of V.
    struct kvq__opened opened[KVQ__CHUNK_GROUPS];
    int32_t factor[KVQ__CHUNK_GROUPS][KVQ_TILE_ROWS]; // that makes int16 of q * scale bytes
    float unit[KVQ__CHUNK_GROUPS][KVQ_TILE_ROWS];     // value of 1 in a dot product
    float bias[KVQ__CHUNK_GROUPS][KVQ_TILE_ROWS];     // of logits
    uint8_t bytes[KVQ__CHUNK * KVQ_TILE_ROWS * KVQ_MAX_HEAD_DIM / KVQ_GROUP_TOKENS];
    // Sums of the chunk: values, in the order of the layout; p * middle.
    float o[KVQ_TILE_ROWS][KVQ_MAX_HEAD_DIM];
    float middle[KVQ_TILE_ROWS][KVQ__MAX_VGROUPS][8];
};
static_assert(sizeof(struct kvq__bytes) <= KVQ__SCRATCH_BYTES, "the workspace holds the state");

static inline struct kvq__bytes *kvq__bytes_of(const struct kvq__tile *tile)
{
    return tile->scratch;
}

// The bytes of one row in one group. Rows stand close, for a tile of few of them to stay in the
// first level cache.
static inline uint8_t *kvq__row_bytes(const struct kvq__tile *tile, uint32_t group, uint32_t row)
{
    return kvq__bytes_of(tile)->bytes + ((size_t)group * tile->rows + row) * tile->dim;
}

static inline float kvq__centre_of(uint32_t bits)
{
    return 0.5f * (float)((1 << bits) - 1);
}

// The largest of n fp16 numbers that are not negative: they are ordered like their bits.
static inline float kvq__max_f16(const uint8_t *p, uint32_t n)
{
    __m256i m = _mm256_load_si256((const void *)p);
    for (uint32_t i = 16; i < n; i += 16)
        m = _mm256_max_epu16(m, _mm256_load_si256((const void *)(p + 2 * i)));
    __m128i q = _mm_max_epu16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    // phminposuw finds a minimum, of the complements.
    q = _mm_minpos_epu16(_mm_xor_si128(q, _mm_set1_epi16(-1)));
    // A scale of 0 would give 0 / 0 below; the smallest fp16 number does no harm.
    return fmaxf(_cvtsh_ss((uint16_t)~_mm_extract_epi16(q, 0)), 0x1p-24f);
}

// a * fa and b * fb as int16, in the order of vpackssdw.
static inline __m256i kvq__to_int16(__m256 a, __m256 b, __m256 fa, __m256 fb)
{
    return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(a, fa)),
                              _mm256_cvtps_epi32(_mm256_mul_ps(b, fb)));
}

// Channels 4 s + {0, 1, 2, 3} of K stand in bytes 0, 2, 1, 3 of a word of codes; of int16 here.
static inline __m256i kvq__byte_order(__m256i x)
{
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order));
}

KVQ__INLINE __m256i kvq__broadcast_word(const uint8_t *p)
{
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm256_set1_epi32(word);
}

#ifdef KVQ__AVXVNNI
// Adds 8 sums of four products, each product an unsigned times a signed byte, to 32 bits.
KVQ__INLINE __m256i kvq__add_products(__m256i acc, __m256i u8, __m256i s8)
{
    return _mm256_dpbusd_avx_epi32(acc, u8, s8);
}

KVQ__INLINE __m256i kvq__widen(__m256i sum, __m256i acc)
{
    return _mm256_add_epi32(sum, acc);
}
#else
// Adds 16 sums of two products, each product an unsigned times a signed byte, to 16 bits. The empty
// statement keeps gcc from putting off the additions, which costs a register for each product.
KVQ__INLINE __m256i kvq__add_products(__m256i acc, __m256i u8, __m256i s8)
{
    acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(u8, s8));
    __asm__("" : "+x"(acc));
    return acc;
}

// Adds pairs of them to 32 bits.
KVQ__INLINE __m256i kvq__widen(__m256i sum, __m256i acc)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(acc, _mm256_set1_epi16(1)));
}
#endif

// Logits of a chunk: queries into bytes for all its groups, then products group by group.
void kvq__bytes_prepare_k(const struct kvq__tile *tile);
void kvq__bytes_qk(const struct kvq__tile *tile, const struct kvq_packed *packed, float *logits);

// Values likewise: p into bytes, then products, summed in the state, and flushed from there.
void kvq__bytes_prepare_v(const struct kvq__tile *tile);
void kvq__bytes_pv(const struct kvq__tile *tile, const struct kvq_packed *packed, const float *p);
void kvq__bytes_flush(const struct kvq__tile *tile);

#endif
