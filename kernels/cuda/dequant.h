// SPDX-License-Identifier: Apache-2.0
//
// Any codec's values: what a group of layout.h says, still in the transformed basis and without K's
// norm. For codecs without a loop of their own. Codes are looked up one by one, or, where they have
// 2 to 4 bits with a scale and zero, by the word ("plain").
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

// ---- Plain codecs, two values at a time ----

KVQ_DEVICE bool kvq_gpu_is_plain(const kvq_side &row)
{
    return row.bits >= 2 && row.bits <= 4 && !row.wide &&
           (row.codec == KVQ_CODEC_AFFINE || row.codec == KVQ_CODEC_SYMMETRIC ||
            row.codec == KVQ_CODEC_HYBRID);
}

// Scales and zeros of channels c and c + 1 of a token, c even.
struct kvq_gpu_params2 {
    uint32_t scale, zero;
};

KVQ_DEVICE uint32_t kvq_gpu_param2(const kvq_side &row, const uint16_t *params, uint32_t at)
{
    if (row.axis == KVQ_PER_CHANNEL)
        return *(const uint32_t *)(params + at);
    return params[at] | (uint32_t)params[at] << 16;
}

KVQ_DEVICE kvq_gpu_params2 kvq_gpu_params2_at(const kvq_side &row, const kvq_gpu_packed &p, bool v,
                                              uint32_t dim, uint32_t t, uint32_t c)
{
    const uint32_t at = kvq_gpu_scale_at(row, v, dim, t, c);
    kvq_gpu_params2 r;
    r.scale = kvq_gpu_param2(row, p.scales, at) & 0x7fff7fffu; // without hybrid's mark
    if (row.codec == KVQ_CODEC_SYMMETRIC) {
        const float half = -(float)(1 << (row.bits - 1));
        r.zero = gpu::mul2(r.scale, gpu::pack2(half, half));
    } else {
        r.zero = kvq_gpu_param2(row, p.zeros, at);
    }
    return r;
}

// Values of two codes in the low bits of both halves of `low`, and of `high`.
KVQ_DEVICE uint32_t kvq_gpu_plain2(uint32_t bits, uint32_t low, uint32_t high,
                                   const kvq_gpu_params2 &params)
{
    uint32_t x = 0x64006400u | (low & 0x00030003u); // 1024 + code, as fp16
    if (bits == 3)
        x |= (high & 0x00010001u) << 2;
    if (bits == 4)
        x |= (high & 0x00030003u) << 2;
    const uint32_t code = gpu::fma2(x, 0x3c003c00u, 0xe400e400u); // times 1, less 1024
    return gpu::fma2(code, params.scale, params.zero);
}

// K: channels 16 row to 16 row + 15 of token t, as 8 pairs in order.
KVQ_DEVICE void kvq_gpu_plain_k(const kvq_side &side, const kvq_gpu_packed &p, uint32_t dim,
                                uint32_t t, uint32_t row, uint32_t pairs[8])
{
    const kvq__place place = kvq__k_place(side.bits, dim, row * KVQ_GROUP_TOKENS + t);
    const uint32_t low = kvq_gpu_word(p.codes + place.low);
    const uint32_t high = side.bits == 2 ? 0 : kvq_gpu_word(p.codes + place.high) >> place.odd;
    KVQ_UNROLL
    for (uint32_t i = 0; i < 8; i++) { // pair 2 s + e stands at bit 8 e + 2 s of both halves
        const uint32_t bit = 8 * (i & 1) + 2 * (i >> 1);
        pairs[i] = kvq_gpu_plain2(side.bits, low >> bit, high >> bit,
                                  kvq_gpu_params2_at(side, p, false, dim, t, 16 * row + 2 * i));
    }
}

// V: the words of channels c and c + 1 of token t, which hold tokens t + 2 k at byte k.
struct kvq_gpu_words2 {
    uint32_t low[2], high[2];
};

KVQ_DEVICE kvq_gpu_words2 kvq_gpu_v_words2(const kvq_side &side, const kvq_gpu_packed &p,
                                           uint32_t dim, uint32_t t, uint32_t c)
{
    kvq_gpu_words2 w = {{0, 0}, {0, 0}};
    KVQ_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        const kvq__place place = kvq__v_place(side.bits, dim, kvq_gpu_v_index(dim, t, c + i));
        w.low[i] = kvq_gpu_word(p.codes + place.low);
        if (side.bits > 2)
            w.high[i] = kvq_gpu_word(p.codes + place.high) >> place.odd;
    }
    return w;
}

// Position s of byte k of both: channels `channel` and the next of token t.
KVQ_DEVICE uint32_t kvq_gpu_plain_v(const kvq_side &side, const kvq_gpu_packed &p, uint32_t dim,
                                    const kvq_gpu_words2 &w, uint32_t s, uint32_t k, uint32_t t,
                                    uint32_t channel)
{
    const uint32_t picks = k | (4 + k) << 8; // to the low bytes of both halves
    return kvq_gpu_plain2(side.bits, gpu::permute(w.low[0] >> 2 * s, w.low[1] >> 2 * s, picks),
                          gpu::permute(w.high[0] >> 2 * s, w.high[1] >> 2 * s, picks),
                          kvq_gpu_params2_at(side, p, true, dim, t, channel));
}

#endif
