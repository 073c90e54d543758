// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a block, once and for all backends.
//
// A block holds 128 consecutive tokens of one layer. The same bytes lie in host memory, in device
// memory, on disk and on the wire. This file is the only place that knows offsets.
//
// 1. Raw blocks (format f16 and bf16, and the window of every session): four strips of 32 tokens,
//    one after the other. A strip has a part for each KV head:
//
//      K [32 tokens][head_dim_k] 16-bit      V [32 tokens][head_dim_v] 16-bit
//
//    A raw block that ends behind an earlier strip is the beginning of a whole one, so a reader
//    need not know how long it is.
//
// 2. Quantized blocks: one record per KV head, one after the other, each self-contained and a
//    multiple of 64 bytes: parameters that more than 32 tokens share, if the format has any, then
//    four groups of 32 tokens, one after the other. Each group owns its bytes, in this order
//    (D = head_dim, b = bits, all parts multiples of 64 bytes; what a format lacks is absent):
//
//      K codes   32 * D * bk / 8      low plane (2 bits of each code), then the high plane
//      K scales  fp16                 see below
//      K zeros   fp16                 shaped like the scales, the value of code 0 (the offset)
//      K norms   32 fp16              per token, natural order
//      V codes   32 * D * bv / 8      low plane, then the high plane
//      V scales  fp16
//      V zeros   fp16
//
//    Scales per channel: D fp16 in natural order, for 32 tokens. If they serve G = 64 or 128
//    tokens they stand before the first group instead: 128 / G sets of D scales and D zeros of K,
//    then those of V.
//    Scales per token, for G channels each: [D / G][32 tokens]; K in natural order, V by the slots
//    of 5. Formats whose first quarter of channels has one more bit ("wide") have two scales for
//    each token, first that of the quarter, then that of the rest.
//
//    Dequantized: k[t][c] = norm[t] * (scale * code + zero);  v likewise without a norm.
//    Symmetric codecs have no zeros: the value is scale * (code - 2^(b-1)). Lloyd-Max codecs have
//    scale * level[code]. In hybrid groups the scale's sign bit says that the group was quantized
//    with its own offset (one bit); its absolute value and the zero are used as for affine ones.
//    Codebook formats have codes alone, see 7.
//
// 3. Planes. A code of 2 bits is one entry of the low plane. 4 bits: code = low + 4 * high, the
//    high plane shaped like the low one. 3 bits: the high plane has 1 bit per code, half as
//    many bytes. So one order serves 2, 3 and 4 bits. 1 bit: only a plane like the high one of
//    3 bits. 8 bits: four planes shaped like the low one, numbered s = 0, 1, 2, 3; byte i of a
//    word of plane s is the whole code whose 2 bits would stand at position s in byte i of the
//    low plane: what unpacking position s of a low plane gives.
//    "Wide" formats: the low plane, then [32 tokens][D / 4 bits], the third bit of channel c of
//    token t at bit c % 8 of byte t * D / 32 + c / 8; V likewise.
//
// 4. K planes of a group: rows of 128 bytes, one row r per 16 channels; a row has one 32-bit
//    word per token. Within a row the 16-byte chunks (4 tokens) are permuted:
//
//      word index of token t in row r = ((t >> 2) ^ 2 * (r & 3)) * 4 + (t & 3)
//
//    so that 8 lanes of a warp that read 16 bytes each, of 4 rows, meet no bank conflict, and
//    a 64-byte load still is one word for each of 16 tokens.
//    Within a word, channel c = 16 r + 4 s + 2 e + h (s 0..3, e 0..1, h 0..1) has its low-plane
//    bits at bit 16 h + 8 e + 2 s: byte 2h+e, position s. (x >> 2s) & 0x03030303 gives four
//    channels as bytes, for byte dot products; x & (0x00030003 << 2p), p = 4e + s, gives two
//    neighbouring channels as the halves of a half2, for tensor-core fragments.
//    1-bit plane: rows r and r + R/2 (R rows in a slab of min(D, 128) channels) share a row,
//    numbered as r within the half; channel bits as above, plus 1 for the upper row.
//    D = 256 is two slabs of 128 channels, one after the other, in each plane.
//
// 5. V planes of a group: one row per set of four tokens. Set (j, half), j 0..3, half 0..1,
//    holds the tokens t = 8 j + 2 k + half, k 0..3; byte k of each word belongs to the k-th.
//      D >= 128: 128-byte row number 2 j + half; word index 4 * (g ^ 2 j) + 2 u + rh holds, at
//        position s of each byte, channel 32 s + 16 u + 8 rh + g  (g 0..7, u, rh 0..1, s 0..3).
//        D = 256: two slabs.
//      D == 64: 64-byte row number 2 j + (half ^ (j & 1)); word index (2 g + rh) ^ 8 * (j >> 1)
//        holds at position s channel 32 * (s >> 1) + 16 * (s & 1) + 8 rh + g.
//    1-bit plane: one row for each j; set (j, half) has its bits at 8 k + 2 s + half.
//    V scale and zero of token t stand at slot 8 * (t >> 3) + 2 * (t & 3) + ((t >> 2) & 1) of
//    their channel group: the two halves of a fragment register are neighbours.
//
// 6. Extras of a session's layer: one record per KV head, each part a multiple of 64 bytes and
//    absent if the format has no use for it.
//
//      factors   D fp16                        channel factors learned from the prompt
//      pool      struct kvq_outliers             positions and scores of outliers
//      K, V      [pool entries][D] 16-bit      their rows, as handed over
//      K, V      [sink tokens][D] 16-bit       the first tokens, as handed over
//
// 7. Codebook codes of a group: M = D / vector rows of 32 codes, one row per sub-vector in
//    ascending order; first the lowest l bits of all rows, then the other h of all rows. Token t
//    is at bit l * t (h * t) of a row; l + h = 2+1, 4+0, 4+2, 8+0, 8+2, 8+4 or 8+8 bits of a code.
#ifndef KVQ_KERNELS_LAYOUT_H
#define KVQ_KERNELS_LAYOUT_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A small function of a header that GPU kernels use, too.
#ifdef __CUDACC__
#define KVQ_INLINE static __host__ __device__ __forceinline__
#else
#define KVQ_INLINE static inline
#endif

enum {
    KVQ_BLOCK_TOKENS = 128,  // tokens in a sealed block
    KVQ_GROUP_TOKENS = 32,   // tokens that share a K scale; the unit of a quantized record
    KVQ_GROUP_CHANNELS = 32, // channels that share a V scale
    KVQ_BLOCK_GROUPS = KVQ_BLOCK_TOKENS / KVQ_GROUP_TOKENS,
    KVQ_RECORD_ALIGN = 64,
    KVQ_POOL_ENTRIES = 64, // outliers of one KV head at most
    KVQ_LAYOUT_ID = 2,     // written into sessions and files; changes with any byte above
};

// Byte offsets within one quantized group, and sizes; made once per (format, dims).
struct kvq_layout {
    uint32_t k_codes, k_scales, k_zeros, k_norms; // k_norms == v_codes if the format has none
    uint32_t v_codes, v_scales, v_zeros;
    uint32_t group_bytes;  // 0 for raw formats
    uint32_t record_bytes; // one KV head, 128 tokens; multiple of KVQ_RECORD_ALIGN
    // Parameters before the first group: k_set (v_set) bytes serve k_span (v_span) tokens, scales
    // and then zeros. Where a set is 0 bytes long, parameters stand in the groups.
    uint32_t groups; // where the first group stands
    uint32_t k_set, v_set, v_sets;
    uint32_t k_span, v_span;
};

// Where the rows of a raw block stand, as counts of bytes.
struct kvq_raw_layout {
    uint32_t row_bytes;   // of K, and of V, of one token and head
    uint32_t v_offset;    // where V starts in a head's part of a strip
    uint32_t part_bytes;  // of a head in a strip; a multiple of KVQ_RECORD_ALIGN
    uint32_t strip_bytes; // of all heads
};

// Offset of a token's row in a raw block. Rows of the tokens behind it in its strip follow.
KVQ_INLINE size_t kvq_raw_at(const struct kvq_raw_layout *l, uint32_t head, uint32_t token, bool v)
{
    return (size_t)(token / KVQ_GROUP_TOKENS) * l->strip_bytes + (size_t)head * l->part_bytes +
           (v ? l->v_offset : 0) + token % KVQ_GROUP_TOKENS * l->row_bytes;
}

// Bytes of a raw block with room for so many tokens.
KVQ_INLINE uint32_t kvq_raw_bytes(const struct kvq_raw_layout *l, uint32_t tokens)
{
    return (tokens + KVQ_GROUP_TOKENS - 1) / KVQ_GROUP_TOKENS * l->strip_bytes;
}

// Where the parts of one quantized group are. Norms and codes are at the layout's offsets.
struct kvq_packed {
    uint8_t *group; // NULL if there is none
    uint8_t *k_scales, *k_zeros;
    uint8_t *v_scales, *v_zeros;
};

// Group i of a record.
KVQ_INLINE struct kvq_packed kvq_packed_at(const struct kvq_layout *l, uint8_t *record, uint32_t i)
{
    struct kvq_packed p;
    p.group = record + l->groups + i * l->group_bytes;
    p.k_scales = p.group + l->k_scales;
    p.k_zeros = p.group + l->k_zeros;
    p.v_scales = p.group + l->v_scales;
    p.v_zeros = p.group + l->v_zeros;
    if (l->k_set) {
        p.k_scales = record + i * KVQ_GROUP_TOKENS / l->k_span * l->k_set;
        p.k_zeros = p.k_scales + l->k_set / 2;
    }
    if (l->v_set) {
        p.v_scales = record + l->v_sets + i * KVQ_GROUP_TOKENS / l->v_span * l->v_set;
        p.v_zeros = p.v_scales + l->v_set / 2;
    }
    return p;
}

// Outliers of one KV head: the tokens that stay raw. Entries are in the order in which they were
// chosen. The `outliers` smallest scores among them are what later tokens compete with.
struct kvq_outliers {
    uint32_t count;
    uint32_t published; // what readers may look at; see kvq_outliers_publish
    uint64_t frozen_at; // position of the unit that found no more room; UINT64_MAX before
    uint64_t position[KVQ_POOL_ENTRIES];
    float score[KVQ_POOL_ENTRIES];
};

// Byte offsets within one KV head's extras.
struct kvq_extras_layout {
    uint32_t factors, pool, pool_k, pool_v, sink_k, sink_v;
    uint32_t record_bytes; // 0 if the format has no extras
};

// Word index, within a K row of 32 words, of token t (0..31) in row r.
KVQ_INLINE uint32_t kvq_k_word(uint32_t r, uint32_t t)
{
    return (((t >> 2) ^ (2u * (r & 3u))) << 2) + (t & 3u);
}

// Bit, within a K word, where the 2-bit field of channel c starts.
KVQ_INLINE uint32_t kvq_k_bit(uint32_t c)
{
    return 16u * (c & 1u) + 8u * ((c >> 1) & 1u) + 2u * ((c >> 2) & 3u);
}

// Slot of token t (0..31) among the 32 scales of one V channel group.
KVQ_INLINE uint32_t kvq_v_slot(uint32_t t)
{
    return 8u * (t >> 3) + 2u * (t & 3u) + ((t >> 2) & 1u);
}

// The signs of KVQ_ROTATE_SIGNED: channel c is multiplied with -1 before (after) the transform if
// bit c % 32 of word c / 32 is set. Random numbers, fixed for ever.
static const uint32_t kvq_signs_before[8] = {0xd2a98b26u, 0x625eee7bu, 0x1f4e6a30u, 0x9cb7d3e5u,
                                             0x47c1908fu, 0xe83d52b6u, 0x3b96fa14u, 0xa5704ec9u};
static const uint32_t kvq_signs_after[8] = {0x8d1f63bau, 0x36e9c450u, 0xc7528e9du, 0x0ba4f7e3u,
                                            0x71dc296eu, 0xf4803b95u, 0x5a6fe1c8u, 0x29d3b047u};

static_assert(KVQ_BLOCK_TOKENS % KVQ_GROUP_TOKENS == 0, "a block is whole groups");

#endif
