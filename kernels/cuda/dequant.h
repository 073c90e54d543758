// SPDX-License-Identifier: Apache-2.0
//
// Any codec's values: what a group of layout.h says, still in the transformed basis and without K's
// norm. For codecs without a loop of their own; codes are looked up one by one.
#ifndef KVQ_KERNELS_CUDA_DEQUANT_H
#define KVQ_KERNELS_CUDA_DEQUANT_H

#include "kernels/emu/dialect.h"
#include "kernels/planes.h"
#include "kernels/recipe.h"

// One side of one group.
struct kvq_gpu_packed {
    const uint8_t *codes;
    const uint16_t *scales, *zeros;
    const float *book; // centroids of sub-vector 0
    uint64_t book_sub; // floats to those of the next
};

// Group `group` (0 to 3) of a record of KV head `head`.
KVQ_DEVICE kvq_gpu_packed kvq_gpu_packed_at(const kvq_recipe &r, const kvq_book &book, bool v,
                                            const uint8_t *record, int group, uint32_t head)
{
    const kvq_packed at = kvq_packed_at(&r.layout, (uint8_t *)record, (uint32_t)group);
    kvq_gpu_packed p;
    p.codes = at.group + (v ? r.layout.v_codes : r.layout.k_codes);
    p.scales = (const uint16_t *)(v ? at.v_scales : at.k_scales);
    p.zeros = (const uint16_t *)(v ? at.v_zeros : at.k_zeros);
    p.book = (v ? book.v : book.k) + head * (v ? book.v_head : book.k_head);
    p.book_sub = v ? book.v_sub : book.k_sub;
    return p;
}

KVQ_DEVICE uint32_t kvq_gpu_word(const uint8_t *at)
{
    return *(const uint32_t *)at;
}

// ---- Codes ----

// Number of V's place that holds channel c of token t (planes.h).
KVQ_DEVICE uint32_t kvq_gpu_v_index(uint32_t dim, uint32_t t, uint32_t c)
{
    const uint32_t row_words = kvq__slab_width(dim) / 4, j = t >> 3, set = 2 * j + (t & 1);
    const uint32_t g = c & 7, rh = c >> 3 & 1, u = c >> 4 & 1;
    const uint32_t word = dim == 64 ? (2 * g + rh) ^ 8 * (j >> 1) : 4 * (g ^ 2 * j) + 2 * u + rh;
    return (c / 128 * 8 + set) * row_words + word;
}

KVQ_DEVICE uint32_t kvq_gpu_scalar_code(uint32_t bits, bool v, const uint8_t *codes, uint32_t dim,
                                        uint32_t t, uint32_t c)
{
    const kvq__place p = v ? kvq__v_place(bits, dim, kvq_gpu_v_index(dim, t, c))
                           : kvq__k_place(bits, dim, c / 16 * KVQ_GROUP_TOKENS + t);
    const uint32_t byte = v ? t % 8 / 2 : 2 * (c & 1) + (c >> 1 & 1);
    const uint32_t s = v ? dim == 64 ? 2 * (c >> 5) + (c >> 4 & 1) : c % 128 / 32 : c / 4 % 4;
    if (bits == 8)
        return codes[kvq__byte_word(dim, p.low, s) + byte];
    const uint32_t low = bits == 1 ? 0 : kvq_gpu_word(codes + p.low);
    const uint32_t high = bits == 2 ? 0 : kvq_gpu_word(codes + p.high);
    return kvq__code_of(bits, kvq__cell_bit(byte, s), p.odd, low, high);
}

// The bit that channels of the first quarter have besides.
KVQ_DEVICE uint32_t kvq_gpu_wide_bit(uint32_t bits, const uint8_t *codes, uint32_t dim, uint32_t t,
                                     uint32_t c)
{
    const uint8_t *wide = codes + KVQ_GROUP_TOKENS * dim * bits / 8;
    return (uint32_t)(wide[kvq__wide_byte(dim, t, c)] >> c % 8 & 1) << bits;
}

// ---- Values ----

// Number of the scale of channel c of token t.
KVQ_DEVICE uint32_t kvq_gpu_scale_at(const kvq_side &row, bool v, uint32_t dim, uint32_t t,
                                     uint32_t c)
{
    if (row.axis == KVQ_PER_CHANNEL)
        return c;
    const uint32_t set = row.wide ? c >= dim / 4 : c / row.group;
    return set * KVQ_GROUP_TOKENS + (v ? kvq_v_slot(t) : t);
}

KVQ_DEVICE float kvq_gpu_scalar(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                uint32_t dim, uint32_t t, uint32_t c)
{
    const uint32_t bits = side.row.bits, at = kvq_gpu_scale_at(side.row, v, dim, t, c);
    const bool wide = side.row.wide && c < dim / 4;
    const float scale = fabsf(kvq__f16_to_f32(p.scales[at]));
    uint32_t code = kvq_gpu_scalar_code(bits, v, p.codes, dim, t, c);
    if (wide)
        code |= kvq_gpu_wide_bit(bits, p.codes, dim, t, c);
    if (side.row.codec == KVQ_CODEC_LLOYD)
        return scale * side.levels[wide][code];
    const float zero = side.row.codec == KVQ_CODEC_SYMMETRIC ? kvq__symmetric_zero(scale, bits)
                                                             : kvq__f16_to_f32(p.zeros[at]);
    return kvq__value(scale, (float)code, zero);
}

// Channel c of token t (0 to 31).
KVQ_DEVICE float kvq_gpu_dequant(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                 uint32_t dim, uint32_t t, uint32_t c)
{
    const uint32_t vector = side.row.vector;
    if (side.row.codec != KVQ_CODEC_BOOK)
        return kvq_gpu_scalar(side, p, v, dim, t, c);
    const uint32_t sub = c / vector;
    const uint32_t code = kvq__book_code(p.codes, side.row.bits, dim / vector, sub, t);
    return p.book[sub * p.book_sub + code * vector + c % vector];
}

// Channels c and c + 1 as fp16, values beyond its range at its ends.
KVQ_DEVICE uint32_t kvq_gpu_dequant2(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                     uint32_t dim, uint32_t t, uint32_t c)
{
    const float most = 65504.0f;
    const float lo = kvq_gpu_dequant(side, p, v, dim, t, c);
    const float hi = kvq_gpu_dequant(side, p, v, dim, t, c + 1);
    return gpu::pack2(fminf(fmaxf(lo, -most), most), fminf(fmaxf(hi, -most), most));
}

#endif
