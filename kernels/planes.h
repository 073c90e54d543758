// SPDX-License-Identifier: Apache-2.0
//
// Where the codes of a group lie in its planes, as kernels/layout.h, 3 to 5 and 7, says: the way
// from a word to the codes that it holds, for C and for CUDA C.
//
// Scalar codes: a side has KVQ_GROUP_TOKENS * dim / 16 places of 16 codes each. A place is a word
// of the low plane; its bits beyond 2 are in a word of the high plane, which at 3 bits (and at 1
// bit, where there is no low plane) two places share: then one of the two is odd.
#ifndef KVQ_KERNELS_PLANES_H
#define KVQ_KERNELS_PLANES_H

#include "kernels/codec_math.h"

struct kvq__place {
    uint32_t low, high;      // byte offsets of its words; of codes of 2 bits only low counts
    uint32_t odd;            // 1: its bits stand one above the other place's, in the high word
    uint32_t token, channel; // where its codes begin; see kvq__k_cell and kvq__v_cell
    uint32_t word, set;      // V: the word in its row, and the set (2 j + half)
};

// One of a place's 16 codes: byte i, position s.
struct kvq__cell {
    uint32_t token, channel;
};

KVQ_INLINE uint32_t kvq__slab_width(uint32_t dim)
{
    return dim < 128 ? dim : 128;
}

// Where the high plane of a slab starts. Codes of 1 bit have no other plane.
KVQ_INLINE uint32_t kvq__high_plane(uint32_t bits, uint32_t dim, uint32_t slab)
{
    uint32_t width = kvq__slab_width(dim);
    return bits == 1 ? slab * 4 * width : 8 * dim + slab * (bits - 2) * 4 * width;
}

// Whether two places share a high word.
KVQ_INLINE bool kvq__shares_high(uint32_t bits)
{
    return bits == 1 || bits == 3;
}

// Places come in runs of so many; of two runs each, place i of the first and place i of the second
// share a high word if any do, and those of the second are odd.
KVQ_INLINE uint32_t kvq__run_of(bool v, uint32_t dim)
{
    return v ? kvq__slab_width(dim) / 4 : kvq__slab_width(dim) / 32 * KVQ_GROUP_TOKENS;
}

// Place i of K: row i / 32 (of 16 channels), token i % 32.
KVQ_INLINE struct kvq__place kvq__k_place(uint32_t bits, uint32_t dim, uint32_t i)
{
    uint32_t width = kvq__slab_width(dim), half = width / 32;
    uint32_t token = i % KVQ_GROUP_TOKENS, channel = i / KVQ_GROUP_TOKENS * 16;
    uint32_t slab = channel / width, row = channel % width / 16;
    bool odd = kvq__shares_high(bits) && row >= half;
    uint32_t high_row = odd ? row - half : row;
    struct kvq__place p = {0, 0, odd, token, channel, 0, 0};
    p.low = slab * 8 * width + 4 * (row * 32 + kvq_k_word(row, token));
    p.high = kvq__high_plane(bits, dim, slab) + 4 * (high_row * 32 + kvq_k_word(high_row, token));
    return p;
}

KVQ_INLINE struct kvq__cell kvq__k_cell(const struct kvq__place *p, uint32_t i, uint32_t s)
{
    struct kvq__cell c = {p->token, p->channel + 4 * s + 2 * (i & 1u) + (i >> 1)};
    return c;
}

// Channel within its slab of word `word` of the sets (j, 0) and (j, 1), at position s of a byte.
KVQ_INLINE uint32_t kvq__v_channel(uint32_t dim, uint32_t j, uint32_t word, uint32_t s)
{
    if (dim == 64) {
        uint32_t at = word ^ 8 * (j >> 1);
        return 32 * (s >> 1) + 16 * (s & 1u) + 8 * (at & 1u) + (at >> 1);
    }
    return 32 * s + 16 * (word >> 1 & 1u) + 8 * (word & 1u) + ((word >> 2) ^ 2 * j);
}

// Place i of V: words of a row next to each other, then sets, then slabs.
KVQ_INLINE struct kvq__place kvq__v_place(uint32_t bits, uint32_t dim, uint32_t i)
{
    uint32_t width = kvq__slab_width(dim), row_words = width / 4;
    uint32_t word = i % row_words, set = i / row_words % 8, slab = i / (row_words * 8);
    uint32_t j = set / 2, half = set % 2, row = 2 * j + (dim == 64 ? half ^ (j & 1u) : half);
    struct kvq__place p = {0, 0, kvq__shares_high(bits) ? half : 0, 0, slab * width, word, set};
    p.token = 8 * j + half;
    p.low = slab * 8 * width + 4 * (row * row_words + word);
    p.high = kvq__high_plane(bits, dim, slab) +
             4 * ((kvq__shares_high(bits) ? j : row) * row_words + word);
    return p;
}

KVQ_INLINE struct kvq__cell kvq__v_cell(const struct kvq__place *p, uint32_t dim, uint32_t i,
                                        uint32_t s)
{
    struct kvq__cell c = {p->token + 2 * i,
                          p->channel + kvq__v_channel(dim, p->set / 2, p->word, s)};
    return c;
}

// Bit of a word where byte i, position s begins.
KVQ_INLINE uint32_t kvq__cell_bit(uint32_t i, uint32_t s)
{
    return 8 * i + 2 * s;
}

// What a code adds to its low word and to its high one.
KVQ_INLINE uint32_t kvq__low_bits(uint32_t bits, uint32_t bit, uint32_t code)
{
    return bits == 1 ? 0 : (code & 3u) << bit;
}

KVQ_INLINE uint32_t kvq__high_bits(uint32_t bits, uint32_t bit, uint32_t odd, uint32_t code)
{
    return (bits == 1 ? code : code >> 2) << (bit + odd);
}

KVQ_INLINE uint32_t kvq__code_of(uint32_t bits, uint32_t bit, uint32_t odd, uint32_t low,
                                 uint32_t high)
{
    uint32_t more = high >> (bit + odd) & (bits == 4 ? 3u : 1u);
    if (bits == 1)
        return more;
    return (low >> bit & 3u) | (bits == 2 ? 0 : more << 2);
}

// Codes of 8 bits: byte offset of position s's word of a place.
KVQ_INLINE uint32_t kvq__byte_word(uint32_t dim, uint32_t low, uint32_t s)
{
    return s * 8 * dim + low;
}

// The third bit of channel c of token t where the first quarter is wide, within its plane.
KVQ_INLINE uint32_t kvq__wide_byte(uint32_t dim, uint32_t t, uint32_t c)
{
    return t * (dim / 32) + c / 8;
}

// Codebooks: the width of the plane that a code's lowest bits stand in, and of that of the others.
KVQ_INLINE uint32_t kvq__book_low(uint32_t bits)
{
    return bits >= 8 ? 8 : bits >= 4 ? 4 : 2;
}

KVQ_INLINE uint32_t kvq__book_high(uint32_t bits)
{
    return bits - kvq__book_low(bits);
}

// Where sub-vector m's row of each plane starts, in bytes from the codes' start.
KVQ_INLINE uint32_t kvq__book_low_row(uint32_t bits, uint32_t m)
{
    return m * kvq__book_low(bits) * KVQ_GROUP_TOKENS / 8;
}

KVQ_INLINE uint32_t kvq__book_high_row(uint32_t bits, uint32_t subs, uint32_t m)
{
    return kvq__book_low_row(bits, subs) + m * kvq__book_high(bits) * KVQ_GROUP_TOKENS / 8;
}

// Field t of a row of a plane.
KVQ_INLINE uint32_t kvq__book_field(const uint8_t *row, uint32_t width, uint32_t t)
{
    return (uint32_t)row[width * t / 8] >> width * t % 8 & ((1u << width) - 1);
}

KVQ_INLINE uint32_t kvq__book_code(const uint8_t *codes, uint32_t bits, uint32_t subs, uint32_t m,
                                   uint32_t t)
{
    uint32_t low = kvq__book_low(bits), high = kvq__book_high(bits);
    uint32_t code = kvq__book_field(codes + kvq__book_low_row(bits, m), low, t);
    if (high == 0)
        return code;
    return code | kvq__book_field(codes + kvq__book_high_row(bits, subs, m), high, t) << low;
}

#endif
