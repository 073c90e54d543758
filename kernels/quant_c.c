// SPDX-License-Identifier: Apache-2.0
//
// Groups of 32 tokens in plain C: choosing scale, zero and codes, and the way between codes and
// the planes of layout.h. The quantizer's arithmetic is part of the format, step by step:
//
//   range = max - min;  s = fp16(range / (2^b - 1))                 (saturating)
//   s > 0:   z = rint(-min / s);  zero = fp16(0 - z * s);  inv = 1 / s
//            code = clamp(rint((x - zero) * inv), 0, 2^b - 1)
//   s == 0:  zero = fp16(min + 0);  code = 0
//
// all in fp32, each operation rounded to nearest even, s and zero used as stored. "0 -" and
// "+ 0" turn a negative zero into a positive one, so that the order in which an instruction set
// finds the minimum cannot show.
#include "kernels/internal.h"
#include "kernels/kernels_c.h"

enum { SLAB = 128, MAX_CODES = KVQ_GROUP_TOKENS * KVQ_MAX_HEAD_DIM };

// ---- Codes and planes ----

static uint32_t slab_width(uint32_t dim)
{
    return dim < SLAB ? dim : SLAB;
}

static uint32_t *word_at(uint8_t *planes, uint32_t byte, uint32_t word)
{
    return (uint32_t *)(void *)(planes + byte) + word;
}

// Puts a code into its low and high word; `odd` picks the bit of a 1-bit plane's pair.
static void put_code(uint32_t *low, uint32_t *high, uint32_t bits, uint32_t bit, uint32_t odd,
                     uint32_t code)
{
    *low |= (code & 3u) << bit;
    if (bits == 3)
        *high |= (code >> 2) << (bit + odd);
    else if (bits == 4)
        *high |= (code >> 2) << bit;
}

static uint8_t get_code(uint32_t low, uint32_t high, uint32_t bits, uint32_t bit, uint32_t odd)
{
    uint32_t code = low >> bit & 3u;
    if (bits == 3)
        code |= (high >> (bit + odd) & 1u) << 2;
    else if (bits == 4)
        code |= (high >> bit & 3u) << 2;
    return (uint8_t)code;
}

// Where the words of one (row, token) of K or one (set, word) of V are.
struct words {
    uint32_t *low, *high;
    uint32_t odd;
};

static struct words k_words(uint8_t *planes, uint32_t bits, uint32_t dim, uint32_t slab,
                            uint32_t row, uint32_t token)
{
    uint32_t width = slab_width(dim), half = width / 32;
    struct words w;
    w.low = word_at(planes, slab * 8 * width, row * 32 + kvq_k_word(row, token));
    w.odd = bits == 3 && row >= half;
    uint32_t high_row = w.odd ? row - half : row;
    w.high = w.low;
    if (bits > 2)
        w.high = word_at(planes, 8 * dim + slab * (bits - 2) * 4 * width,
                         high_row * 32 + kvq_k_word(high_row, token));
    return w;
}

static struct words v_words(uint8_t *planes, uint32_t bits, uint32_t dim, uint32_t slab, uint32_t j,
                            uint32_t half, uint32_t word)
{
    uint32_t width = slab_width(dim), row_words = width / 4;
    uint32_t row = 2 * j + (dim == 64 ? half ^ (j & 1u) : half);
    struct words w = {.odd = half};
    w.low = word_at(planes, slab * 8 * width, row * row_words + word);
    w.high = w.low;
    if (bits > 2)
        w.high = word_at(planes, 8 * dim + slab * (bits - 2) * 4 * width,
                         (bits == 3 ? j : row) * row_words + word);
    return w;
}

// Channel within its slab of word `word` of the sets j, at position s of each byte.
static uint32_t v_channel(uint32_t dim, uint32_t j, uint32_t word, uint32_t s)
{
    if (dim == 64) {
        uint32_t at = word ^ 8 * (j >> 1);
        return 32 * (s >> 1) + 16 * (s & 1u) + 8 * (at & 1u) + (at >> 1);
    }
    return 32 * s + 16 * (word >> 1 & 1u) + 8 * (word & 1u) + ((word >> 2) ^ 2 * j);
}

static void pack_k_codes(uint32_t bits, uint32_t dim, const uint8_t *codes, uint8_t *planes)
{
    uint32_t width = slab_width(dim);
    memset(planes, 0, KVQ_GROUP_TOKENS * dim * bits / 8);
    for (uint32_t c0 = 0; c0 < dim; c0 += 16)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
            struct words w = k_words(planes, bits, dim, c0 / width, c0 % width / 16, t);
            for (uint32_t c = c0; c < c0 + 16; c++)
                put_code(w.low, w.high, bits, kvq_k_bit(c), w.odd, codes[t * dim + c]);
        }
}

static void unpack_k_codes(uint32_t bits, uint32_t dim, const uint8_t *planes, uint8_t *codes)
{
    uint32_t width = slab_width(dim);
    for (uint32_t c0 = 0; c0 < dim; c0 += 16)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
            struct words w = k_words((uint8_t *)planes, bits, dim, c0 / width, c0 % width / 16, t);
            for (uint32_t c = c0; c < c0 + 16; c++)
                codes[t * dim + c] = get_code(*w.low, *w.high, bits, kvq_k_bit(c), w.odd);
        }
}

// One pass over all codes of V, packing or unpacking.
static void walk_v(uint32_t bits, uint32_t dim, uint8_t *planes, uint8_t *codes, bool packing)
{
    uint32_t width = slab_width(dim);
    for (uint32_t i = 0; i < dim / width * 8 * (width / 4); i++) {
        uint32_t word = i % (width / 4), set = i / (width / 4) % 8, slab = i / (width * 2);
        uint32_t j = set / 2, half = set % 2;
        struct words w = v_words(planes, bits, dim, slab, j, half, word);
        for (uint32_t p = 0; p < 16; p++) {
            uint32_t s = p / 4, k = p % 4;
            uint32_t channel = slab * SLAB + v_channel(dim, j, word, s);
            uint8_t *code = &codes[(8 * j + 2 * k + half) * dim + channel];
            if (packing)
                put_code(w.low, w.high, bits, 8 * k + 2 * s, w.odd, *code);
            else
                *code = get_code(*w.low, *w.high, bits, 8 * k + 2 * s, w.odd);
        }
    }
}

// ---- Affine quantization ----

struct affine {
    uint16_t scale, zero; // as stored
    float inv, offset;    // 1 / scale, or 0 if scale is 0; zero in fp32
};

static struct affine affine_of(float min, float max, uint32_t bits)
{
    struct affine a = {.scale = kvq__f32_to_f16((max - min) / (float)((1u << bits) - 1))};
    float scale = kvq__f16_to_f32(a.scale);
    if (scale > 0.0f) {
        a.inv = 1.0f / scale;
        a.zero = kvq__f32_to_f16(0.0f - rintf(-min / scale) * scale);
    } else {
        a.zero = kvq__f32_to_f16(min + 0.0f);
    }
    a.offset = kvq__f16_to_f32(a.zero);
    return a;
}

static uint8_t code_of(const struct affine *a, float x, uint32_t bits)
{
    float code = rintf((x - a->offset) * a->inv);
    float top = (float)((1u << bits) - 1);
    code = code > 0.0f ? code : 0.0f;
    return (uint8_t)(code < top ? code : top);
}

// Quantizes 32 values that stand `stride` apart.
static struct affine quantize(const float *x, size_t stride, uint32_t bits, uint8_t *codes)
{
    float min = x[0], max = x[0];
    for (size_t i = 1; i < 32; i++) {
        min = x[i * stride] < min ? x[i * stride] : min;
        max = x[i * stride] > max ? x[i * stride] : max;
    }
    struct affine a = affine_of(min, max, bits);
    for (size_t i = 0; i < 32; i++)
        codes[i * stride] = code_of(&a, x[i * stride], bits);
    return a;
}

static void quant_k_c(const struct kvq__codec *c, const float *rows, uint8_t *group)
{
    uint8_t codes[MAX_CODES];
    uint16_t *scales = (uint16_t *)(void *)(group + c->layout.k_scales);
    uint16_t *zeros = (uint16_t *)(void *)(group + c->layout.k_zeros);
    for (uint32_t i = 0; i < c->dim; i++) {
        struct affine a = quantize(rows + i, c->dim, c->k_bits, codes + i);
        scales[i] = a.scale;
        zeros[i] = a.zero;
    }
    pack_k_codes(c->k_bits, c->dim, codes, group);
}

static void quant_v_c(const struct kvq__codec *c, const float *rows, uint8_t *group)
{
    uint8_t codes[MAX_CODES];
    uint16_t *scales = (uint16_t *)(void *)(group + c->layout.v_scales);
    uint16_t *zeros = (uint16_t *)(void *)(group + c->layout.v_zeros);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t i = 0; i < c->dim; i += KVQ_GROUP_CHANNELS) {
            size_t at = (size_t)t * c->dim + i;
            struct affine a = quantize(rows + at, 1, c->v_bits, codes + at);
            scales[i + kvq_v_slot(t)] = a.scale;
            zeros[i + kvq_v_slot(t)] = a.zero;
        }
    memset(group + c->layout.v_codes, 0, KVQ_GROUP_TOKENS * c->dim * c->v_bits / 8);
    walk_v(c->v_bits, c->dim, group + c->layout.v_codes, codes, true);
}

// ---- And back ----

void kvq__dequant_k_c(const struct kvq__codec *c, const uint8_t *group, float *rows)
{
    uint8_t codes[MAX_CODES] = {0};
    float scale[KVQ_MAX_HEAD_DIM], zero[KVQ_MAX_HEAD_DIM];
    const uint16_t *scales = (const uint16_t *)(const void *)(group + c->layout.k_scales);
    const uint16_t *zeros = (const uint16_t *)(const void *)(group + c->layout.k_zeros);
    const uint16_t *norms = (const uint16_t *)(const void *)(group + c->layout.k_norms);
    unpack_k_codes(c->k_bits, c->dim, group, codes);
    for (uint32_t i = 0; i < c->dim; i++) {
        scale[i] = kvq__f16_to_f32(scales[i]);
        zero[i] = kvq__f16_to_f32(zeros[i]);
    }
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        float norm = c->has_norms ? kvq__f16_to_f32(norms[t]) : 1.0f;
        for (uint32_t i = 0; i < c->dim; i++)
            rows[t * c->dim + i] = norm * (scale[i] * (float)codes[t * c->dim + i] + zero[i]);
    }
}

void kvq__dequant_v_c(const struct kvq__codec *c, const uint8_t *group, float *rows)
{
    uint8_t codes[MAX_CODES] = {0};
    const uint16_t *scales = (const uint16_t *)(const void *)(group + c->layout.v_scales);
    const uint16_t *zeros = (const uint16_t *)(const void *)(group + c->layout.v_zeros);
    walk_v(c->v_bits, c->dim, (uint8_t *)group + c->layout.v_codes, codes, false);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t i = 0; i < c->dim; i++) {
            uint32_t at = i / KVQ_GROUP_CHANNELS * KVQ_GROUP_CHANNELS + kvq_v_slot(t);
            float scale = kvq__f16_to_f32(scales[at]), zero = kvq__f16_to_f32(zeros[at]);
            rows[t * c->dim + i] = scale * (float)codes[t * c->dim + i] + zero;
        }
}

void kvq__init_quant_c(struct kvq_kernels *k)
{
    k->quant_k = quant_k_c;
    k->quant_v = quant_v_c;
    k->dequant_k = kvq__dequant_k_c;
    k->dequant_v = kvq__dequant_v_c;
}
