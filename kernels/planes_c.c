// SPDX-License-Identifier: Apache-2.0
//
// The way between codes, one byte each in [32 tokens][dim], and the planes of layout.h. In plain C.
#include "kernels/internal.h"
#include "kernels/kernels_c.h"

enum { SLAB = 128 };

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
    if (bits == 1) {
        *high |= code << (bit + odd);
        return;
    }
    *low |= (code & 3u) << bit;
    if (bits == 3)
        *high |= (code >> 2) << (bit + odd);
    else if (bits == 4)
        *high |= (code >> 2) << bit;
}

static uint8_t get_code(uint32_t low, uint32_t high, uint32_t bits, uint32_t bit, uint32_t odd)
{
    if (bits == 1)
        return high >> (bit + odd) & 1u;
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

// Where the high plane of a slab starts. Codes of 1 bit have no other.
static uint32_t high_plane(uint32_t bits, uint32_t dim, uint32_t slab, uint32_t width)
{
    return bits == 1 ? slab * 4 * width : 8 * dim + slab * (bits - 2) * 4 * width;
}

static struct words k_words(uint8_t *planes, uint32_t bits, uint32_t dim, uint32_t slab,
                            uint32_t row, uint32_t token)
{
    uint32_t width = slab_width(dim), half = width / 32;
    struct words w;
    w.low = word_at(planes, slab * 8 * width, row * 32 + kvq_k_word(row, token));
    w.odd = bits % 2 == 1 && row >= half;
    uint32_t high_row = w.odd ? row - half : row;
    w.high = w.low;
    if (bits != 2)
        w.high = word_at(planes, high_plane(bits, dim, slab, width),
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
    if (bits != 2)
        w.high = word_at(planes, high_plane(bits, dim, slab, width),
                         (bits == 4 ? row : j) * row_words + word);
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

// Codes of 1 bit have no low plane and those of 2 bits no high one: nothing is to be read there.
static void move_code(const struct words *w, uint32_t bits, uint32_t bit, uint8_t *code,
                      bool packing)
{
    if (packing)
        put_code(w->low, w->high, bits, bit, w->odd, *code);
    else
        *code = get_code(bits == 1 ? 0 : *w->low, bits == 2 ? 0 : *w->high, bits, bit, w->odd);
}

// ---- Codes of 8 bits ----

static void move_byte(uint8_t *byte, uint8_t *code, bool packing)
{
    if (packing)
        *byte = *code;
    else
        *code = *byte;
}

// Where the code stands whose 2-bit field would be at `bit` of a word of the low plane.
static uint8_t *byte_code(uint8_t *planes, uint32_t dim, uint32_t low_byte, uint32_t bit)
{
    return planes + (bit % 8 / 2) * 8 * dim + low_byte + bit / 8;
}

static uint32_t byte_of(const uint8_t *planes, const uint32_t *word)
{
    return (uint32_t)((const uint8_t *)word - planes);
}

// ---- The third bit of the first quarter of the channels ----

static void put_wide(uint32_t dim, const uint8_t *codes, uint8_t *wide)
{
    memset(wide, 0, dim);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t c = 0; c < dim / 4; c++)
            wide[t * (dim / 32) + c / 8] |= (uint8_t)((codes[t * dim + c] >> 2) << c % 8);
}

static void get_wide(uint32_t dim, const uint8_t *wide, uint8_t *codes)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t c = 0; c < dim / 4; c++)
            codes[t * dim + c] |= (uint8_t)((wide[t * (dim / 32) + c / 8] >> c % 8 & 1u) << 2);
}

// ---- K ----

static void walk_k(uint32_t bits, uint32_t dim, uint8_t *planes, uint8_t *codes, bool packing)
{
    uint32_t width = slab_width(dim);
    for (uint32_t i = 0; i < dim / 16 * KVQ_GROUP_TOKENS; i++) {
        uint32_t c0 = i / KVQ_GROUP_TOKENS * 16, t = i % KVQ_GROUP_TOKENS;
        struct words w = k_words(planes, bits == 8 ? 2 : bits, dim, c0 / width, c0 % width / 16, t);
        for (uint32_t c = c0; c < c0 + 16; c++) {
            uint8_t *code = &codes[t * dim + c];
            if (bits == 8)
                move_byte(byte_code(planes, dim, byte_of(planes, w.low), kvq_k_bit(c)), code,
                          packing);
            else
                move_code(&w, bits, kvq_k_bit(c), code, packing);
        }
    }
}

// ---- V ----

static void walk_v(uint32_t bits, uint32_t dim, uint8_t *planes, uint8_t *codes, bool packing)
{
    uint32_t width = slab_width(dim);
    for (uint32_t i = 0; i < dim / width * 8 * (width / 4); i++) {
        uint32_t word = i % (width / 4), set = i / (width / 4) % 8, slab = i / (width * 2);
        uint32_t j = set / 2, half = set % 2;
        struct words w = v_words(planes, bits == 8 ? 2 : bits, dim, slab, j, half, word);
        for (uint32_t p = 0; p < 16; p++) {
            uint32_t s = p / 4, k = p % 4, bit = 8 * k + 2 * s;
            uint32_t channel = slab * SLAB + v_channel(dim, j, word, s);
            uint8_t *code = &codes[(8 * j + 2 * k + half) * dim + channel];
            if (bits == 8)
                move_byte(byte_code(planes, dim, byte_of(planes, w.low), bit), code, packing);
            else
                move_code(&w, bits, bit, code, packing);
        }
    }
}

// ---- Either ----

typedef void walk_fn(uint32_t bits, uint32_t dim, uint8_t *planes, uint8_t *codes, bool packing);

static void put_side(walk_fn *walk, const struct kvq__side *side, uint32_t dim,
                     const uint8_t *codes, uint8_t *planes)
{
    uint32_t bits = side->row.bits;
    memset(planes, 0, KVQ_GROUP_TOKENS * dim * bits / 8);
    walk(bits, dim, planes, (uint8_t *)codes, true);
    if (side->row.wide)
        put_wide(dim, codes, planes + KVQ_GROUP_TOKENS * dim * bits / 8);
}

static void get_side(walk_fn *walk, const struct kvq__side *side, uint32_t dim,
                     const uint8_t *planes, uint8_t *codes)
{
    uint32_t bits = side->row.bits;
    walk(bits, dim, (uint8_t *)planes, codes, false);
    if (side->row.wide)
        get_wide(dim, planes + KVQ_GROUP_TOKENS * dim * bits / 8, codes);
}

void kvq__put_k_codes(const struct kvq__side *side, uint32_t dim, const uint8_t *codes,
                      uint8_t *planes)
{
    put_side(walk_k, side, dim, codes, planes);
}

void kvq__get_k_codes(const struct kvq__side *side, uint32_t dim, const uint8_t *planes,
                      uint8_t *codes)
{
    get_side(walk_k, side, dim, planes, codes);
}

void kvq__put_v_codes(const struct kvq__side *side, uint32_t dim, const uint8_t *codes,
                      uint8_t *planes)
{
    put_side(walk_v, side, dim, codes, planes);
}

void kvq__get_v_codes(const struct kvq__side *side, uint32_t dim, const uint8_t *planes,
                      uint8_t *codes)
{
    get_side(walk_v, side, dim, planes, codes);
}
