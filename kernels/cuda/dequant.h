// SPDX-License-Identifier: Apache-2.0
//
// Any codec's values: what a group of layout.h says, still in the transformed basis and without K's
// norm. For codecs without a loop of their own. Codes of 1 to 4 and 8 bits, and of Lloyd-Max with
// 2, become numbers by the word ("plain"), codebooks' by the sub-vector, others one by one.
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

// Channel c of token t (0 to 31).
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

// Channels c and c + 1 as fp16, values beyond its range at its ends.
KVQ_DEVICE uint32_t kvq_gpu_scalar2(const kvq_recipe_side &side, const kvq_gpu_packed &p, bool v,
                                    uint32_t dim, uint32_t t, uint32_t c)
{
    const float most = 65504.0f;
    const float lo = kvq_gpu_scalar(side, p, v, dim, t, c);
    const float hi = kvq_gpu_scalar(side, p, v, dim, t, c + 1);
    return gpu::pack2(fminf(fmaxf(lo, -most), most), fminf(fmaxf(hi, -most), most));
}

// ---- Codebooks ----

// The channels of a code, as fp16 two by two, values beyond its range at its ends.
template <int VECTOR>
KVQ_DEVICE void kvq_gpu_centroid(const kvq_gpu_packed &p, uint32_t sub, uint32_t code,
                                 uint32_t x[VECTOR / 2])
{
    const float most = 65504.0f, *at = p.book + sub * p.book_sub + code * VECTOR;
    KVQ_UNROLL
    for (int k = 0; k < VECTOR / 2; k++) {
        const gpu::u32x2 two = gpu::ldg64(at + 2 * k);
        x[k] = gpu::pack2(fminf(fmaxf(gpu::as_float(two.v[0]), -most), most),
                          fminf(fmaxf(gpu::as_float(two.v[1]), -most), most));
    }
}

// ---- Plain codecs, two values at a time ----
//
// Bytes i and i + 2 of a word hold two codes that become fp16 at once: of K channels c and c + 1 of
// a token, of V tokens t and t + 4 of a channel.

// Those of all scalar codecs whose codes have 1 to 4 or 8 bits in all channels, but of Lloyd-Max
// only with 2 bits.
KVQ_DEVICE bool kvq_gpu_is_plain(const kvq_side &row)
{
    const bool lloyd = row.codec == KVQ_CODEC_LLOYD;
    return row.codec != KVQ_CODEC_BOOK && !row.wide && (!lloyd || row.bits == 2);
}

// The words of a place: of 8 bits one for each position.
template <int BITS> struct kvq_gpu_place_words {
    uint32_t v[BITS == 8 ? 4 : 2];
};

template <int BITS>
KVQ_DEVICE kvq_gpu_place_words<BITS> kvq_gpu_place_words_at(const uint8_t *codes, uint32_t dim,
                                                            const kvq__place &place)
{
    kvq_gpu_place_words<BITS> w;
    if (BITS == 8) {
        for (uint32_t s = 0; s < 4; s++)
            w.v[BITS == 8 ? s : 0] = kvq_gpu_word(codes + kvq__byte_word(dim, place.low, s));
        return w;
    }
    w.v[0] = BITS == 1 ? 0 : kvq_gpu_word(codes + place.low);
    w.v[1] = BITS == 2 ? 0 : kvq_gpu_word(codes + place.high) >> place.odd;
    return w;
}

// The codes of bytes e and e + 2, position s.
template <int BITS>
KVQ_DEVICE uint32_t kvq_gpu_codes2(const kvq_gpu_place_words<BITS> &w, uint32_t s, uint32_t e)
{
    const uint32_t thousand = 0x64006400u; // 1024 + code, as fp16, then less 1024
    const uint32_t bit = 8 * e + 2 * s;
    uint32_t x = thousand;
    if (BITS == 8) {
        x = gpu::permute(w.v[BITS == 8 ? s : 0], thousand, e | 5 << 4 | (e + 2) << 8 | 5 << 12);
    } else {
        const uint32_t more = w.v[1] >> bit;
        if (BITS > 1)
            x |= w.v[0] >> bit & 0x00030003u;
        if (BITS == 1)
            x |= more & 0x00010001u;
        if (BITS == 3)
            x |= (more & 0x00010001u) << 2;
        if (BITS == 4)
            x |= (more & 0x00030003u) << 2;
    }
    return gpu::fma2(x, 0x3c003c00u, 0xe400e400u);
}

// What a codec needs besides its scales and zeros, as two fp16 each. Lloyd-Max's levels of 2 bits
// are -b, -a, a and b.
struct kvq_gpu_plain {
    uint32_t a, more;          // bits of a; b's bits less a's, once
    uint32_t offset;           // of codes whose zeros are not kept, in scales
    bool has_zeros, is_marked; // scales have a hybrid's mark
};

KVQ_DEVICE kvq_gpu_plain kvq_gpu_plain_of(const kvq_recipe_side &side)
{
    const uint32_t a = gpu::pack2(side.levels[0][2], side.levels[0][2]);
    const uint32_t b = gpu::pack2(side.levels[0][3], side.levels[0][3]);
    const float half = -(float)(1 << (side.row.bits - 1));
    kvq_gpu_plain plain;
    plain.a = a;
    plain.more = (b - a) & 0xffff;
    plain.offset = gpu::pack2(half, half);
    plain.has_zeros = side.row.codec != KVQ_CODEC_SYMMETRIC && side.row.codec != KVQ_CODEC_LLOYD;
    plain.is_marked = side.row.codec == KVQ_CODEC_HYBRID;
    return plain;
}

KVQ_DEVICE uint32_t kvq_gpu_lloyd2(const kvq_gpu_plain &plain, uint32_t word, uint32_t bit)
{
    const uint32_t codes = word >> bit, outer = ~(codes ^ codes >> 1) & 0x00010001u;
    const uint32_t size = outer * plain.more + plain.a; // no carry between the halves
    return size | (~(codes << 14) & 0x80008000u);
}

// Scales and zeros of N times two values.
template <int N> struct kvq_gpu_params {
    uint32_t scales[N], zeros[N];
};

// After the scales, and the zeros of codecs that have them, are loaded.
template <int N>
KVQ_DEVICE void kvq_gpu_complete(const kvq_gpu_plain &plain, kvq_gpu_params<N> &params)
{
    if (plain.is_marked) {
        KVQ_UNROLL
        for (int i = 0; i < N; i++)
            params.scales[i] &= 0x7fff7fffu;
    }
    if (!plain.has_zeros) {
        KVQ_UNROLL
        for (int i = 0; i < N; i++)
            params.zeros[i] = gpu::mul2(params.scales[i], plain.offset);
    }
}

template <int BITS, bool LLOYD>
KVQ_DEVICE uint32_t kvq_gpu_plain2(const kvq_gpu_plain &plain, const kvq_gpu_place_words<BITS> &w,
                                   uint32_t s, uint32_t e, uint32_t scale, uint32_t zero)
{
    if (LLOYD)
        return gpu::mul2(kvq_gpu_lloyd2(plain, w.v[0], 8 * e + 2 * s), scale);
    return gpu::fma2(kvq_gpu_codes2<BITS>(w, s, e), scale, zero);
}

// Half h of a word, twice.
KVQ_DEVICE uint32_t kvq_gpu_twice(uint32_t word, uint32_t h)
{
    return gpu::permute(word, 0, h ? 0x3232 : 0x1010);
}

// Scales (zeros) of token t's channels from c on before it: the first of their set.
KVQ_DEVICE uint32_t kvq_gpu_set_of(const kvq_side &row, uint32_t c)
{
    return (c >> gpu::popcount(row.group - 1u)) * KVQ_GROUP_TOKENS; // groups are powers of two
}

// Parameters of 16 channels, two by two.
KVQ_DEVICE void kvq_gpu_k_channels(const uint16_t *params, uint32_t found[8])
{
    const gpu::u32x4 lower = gpu::ldg128(params), upper = gpu::ldg128(params + 8);
    KVQ_UNROLL
    for (int i = 0; i < 8; i++)
        found[i] = i < 4 ? lower.v[i & 3] : upper.v[i & 3];
}

// Parameters of N tokens, each twice.
template <int N>
KVQ_DEVICE void kvq_gpu_k_tokens(const uint16_t *params, uint32_t apart, uint32_t found[8])
{
    static_assert(N <= 8, "they have room");
    KVQ_UNROLL
    for (uint32_t n = 0; n < 8; n++)
        found[n] = n < N ? gpu::ldg16(params + n * apart) * 0x10001u : 0;
}

// K: 16 channels of N tokens, loaded, with parameters of pairs of channels, or of tokens.
template <int N, int BITS> struct kvq_gpu_k_cells {
    kvq_gpu_place_words<BITS> words[N];
    kvq_gpu_params<8> params;
};

// Channels 16 row to 16 row + 15 of tokens t, t + apart..
template <int N, int BITS, bool CHANNELS>
KVQ_DEVICE void kvq_gpu_load_k(const kvq_recipe_side &side, const kvq_gpu_plain &plain,
                               const kvq_gpu_packed &p, uint32_t dim, uint32_t t, uint32_t apart,
                               uint32_t row, kvq_gpu_k_cells<N, BITS> &k)
{
    KVQ_UNROLL
    for (uint32_t n = 0; n < N; n++)
        k.words[n] = kvq_gpu_place_words_at<BITS>(
            p.codes, dim, kvq__k_place(BITS, dim, row * KVQ_GROUP_TOKENS + t + n * apart));
    if (CHANNELS) {
        kvq_gpu_k_channels(p.scales + 16 * row, k.params.scales);
        if (plain.has_zeros)
            kvq_gpu_k_channels(p.zeros + 16 * row, k.params.zeros);
    } else {
        const uint32_t at = kvq_gpu_set_of(side.row, 16 * row) + t;
        kvq_gpu_k_tokens<N>(p.scales + at, apart, k.params.scales);
        if (plain.has_zeros)
            kvq_gpu_k_tokens<N>(p.zeros + at, apart, k.params.zeros);
    }
    kvq_gpu_complete<8>(plain, k.params);
}

// Channels of token n, as 8 pairs in order.
template <int N, int BITS, bool LLOYD, bool CHANNELS>
KVQ_DEVICE void kvq_gpu_plain_k(const kvq_gpu_plain &plain, const kvq_gpu_k_cells<N, BITS> &k,
                                int n, uint32_t pairs[8])
{
    KVQ_UNROLL
    for (int i = 0; i < 8; i++)
        pairs[i] = kvq_gpu_plain2<BITS, LLOYD>(plain, k.words[n], i >> 1, i & 1,
                                               k.params.scales[CHANNELS ? i : n],
                                               k.params.zeros[CHANNELS ? i : n]);
}

// V: channel of position s behind that of position 0.
KVQ_DEVICE uint32_t kvq_gpu_v_step(uint32_t dim, uint32_t s)
{
    return dim == 64 ? 32 * (s >> 1) + 16 * (s & 1) : 32 * s;
}

// Parameters of a lane's values of V at all positions, two for each: of tokens t and t + 4, and of
// t + 2 and t + 6; or, of codecs with CHANNELS, of channel c and of c + 1.
template <bool CHANNELS>
KVQ_DEVICE void kvq_gpu_v_params(const kvq_side &row, const uint16_t *params, uint32_t dim,
                                 uint32_t t, uint32_t c, uint32_t found[8])
{
    KVQ_UNROLL
    for (uint32_t s = 0; s < 4; s++) {
        const uint32_t channel = c + kvq_gpu_v_step(dim, s);
        if (CHANNELS) {
            const uint32_t two = gpu::ldg32(params + channel);
            found[2 * s] = kvq_gpu_twice(two, 0);
            found[2 * s + 1] = kvq_gpu_twice(two, 1);
        } else {
            const uint16_t *at = params + kvq_gpu_set_of(row, channel) + kvq_v_slot(t);
            found[2 * s] = gpu::ldg32(at);
            found[2 * s + 1] = gpu::ldg32(at + 4);
        }
    }
}

// V: position s of two places next to each other: two channels of tokens t + 2 k, pair by pair.
template <int BITS, bool LLOYD, bool CHANNELS>
KVQ_DEVICE void kvq_gpu_plain_v(const kvq_gpu_plain &plain, const kvq_gpu_place_words<BITS> w[2],
                                uint32_t s, const kvq_gpu_params<8> &params, uint32_t pairs[4])
{
    KVQ_UNROLL
    for (uint32_t e = 0; e < 2; e++) {
        uint32_t x[2]; // tokens t + 2 e and t + 2 e + 4 of both channels
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t at = 2 * s + (CHANNELS ? i : e);
            x[i] =
                kvq_gpu_plain2<BITS, LLOYD>(plain, w[i], s, e, params.scales[at], params.zeros[at]);
        }
        pairs[e] = gpu::permute(x[0], x[1], 0x5410);
        pairs[e + 2] = gpu::permute(x[0], x[1], 0x7632);
    }
}

#endif
