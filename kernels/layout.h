// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a block, once and for all backends.
//
// A block holds 128 consecutive tokens of one layer: one record per KV head, one after the
// other, each self-contained and a multiple of 64 bytes. The same bytes lie in host memory, in
// device memory, on disk and on the wire. This file is the only place that knows offsets.
//
// 1. Raw records (format f16 and bf16, and the window of every session)
//
//      K [128 tokens][head_dim_k] 16-bit      V [128 tokens][head_dim_v] 16-bit
//
// 2. Quantized records: four groups of 32 tokens, one after the other. Each group owns its
//    bytes, in this order (D = head_dim, b = bits, all parts multiples of 64 bytes):
//
//      K codes   32 * D * bk / 8      low plane (2 bits of each code), then the high plane
//      K scales  D fp16               per channel, natural order
//      K zeros   D fp16               per channel, the value of code 0 (the offset)
//      K norms   32 fp16              per token, natural order; absent if the format has none
//      V codes   32 * D * bv / 8      low plane, then the high plane
//      V scales  D/32 * 32 fp16       [channel group of 32][token slot], see 5
//      V zeros   D/32 * 32 fp16       likewise
//
//    Dequantized: k[t][c] = norm[t] * (scale[c] * code + zero[c]);  v likewise with its own.
//
// 3. Planes. A code of 2 bits is one entry of the low plane. 4 bits: code = low + 4 * high, the
//    high plane shaped like the low one. 3 bits: the high plane has 1 bit per code, half as
//    many bytes. So one order serves 2, 3 and 4 bits.
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
#ifndef KVQ_KERNELS_LAYOUT_H
#define KVQ_KERNELS_LAYOUT_H

#include <assert.h>
#include <stdint.h>

enum {
    KVQ_BLOCK_TOKENS = 128,  // tokens in a sealed block
    KVQ_GROUP_TOKENS = 32,   // tokens that share a K scale; the unit of a quantized record
    KVQ_GROUP_CHANNELS = 32, // channels that share a V scale
    KVQ_BLOCK_GROUPS = KVQ_BLOCK_TOKENS / KVQ_GROUP_TOKENS,
    KVQ_RECORD_ALIGN = 64,
    KVQ_LAYOUT_ID = 1, // written into sessions and files; changes with any byte above
};

// Byte offsets within one quantized group, and sizes; made once per (format, dims).
struct kvq_layout {
    uint32_t k_codes, k_scales, k_zeros, k_norms; // k_norms == v_codes if the format has none
    uint32_t v_codes, v_scales, v_zeros;
    uint32_t group_bytes;  // 0 for raw formats
    uint32_t v_offset;     // raw records: where V starts
    uint32_t record_bytes; // one KV head, 128 tokens; multiple of KVQ_RECORD_ALIGN
};

// Word index, within a K row of 32 words, of token t (0..31) in row r.
static inline uint32_t kvq_k_word(uint32_t r, uint32_t t)
{
    return (((t >> 2) ^ (2u * (r & 3u))) << 2) + (t & 3u);
}

// Bit, within a K word, where the 2-bit field of channel c starts.
static inline uint32_t kvq_k_bit(uint32_t c)
{
    return 16u * (c & 1u) + 8u * ((c >> 1) & 1u) + 2u * ((c >> 2) & 3u);
}

// Slot of token t (0..31) among the 32 scales of one V channel group.
static inline uint32_t kvq_v_slot(uint32_t t)
{
    return 8u * (t >> 3) + 2u * (t & 3u) + ((t >> 2) & 1u);
}

static_assert(KVQ_BLOCK_TOKENS % KVQ_GROUP_TOKENS == 0, "a block is whole groups");

#endif
