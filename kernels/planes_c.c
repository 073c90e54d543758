// SPDX-License-Identifier: Apache-2.0
//
// The way between codes, one byte each in [32 tokens][dim], and the planes of layout.h. In plain C.
#include "kernels/internal.h"
#include "kernels/kernels_c.h"
#include "kernels/planes.h"

static uint32_t *word_at(uint8_t *planes, uint32_t byte)
{
    return (uint32_t *)(void *)(planes + byte);
}

// ---- One place ----

// Codes of 1 bit have no low plane and those of 2 bits no high one: nothing is to be read there.
static void move_code(const struct kvq__place *p, uint32_t bits, uint32_t bit, uint8_t *planes,
                      uint8_t *code, bool packing)
{
    uint32_t *low = word_at(planes, p->low), *high = word_at(planes, p->high);
    if (!packing) {
        *code =
            (uint8_t)kvq__code_of(bits, bit, p->odd, bits == 1 ? 0 : *low, bits == 2 ? 0 : *high);
        return;
    }
    if (bits != 1)
        *low |= kvq__low_bits(bits, bit, *code);
    if (bits != 2)
        *high |= kvq__high_bits(bits, bit, p->odd, *code);
}

static void move_byte(uint8_t *byte, uint8_t *code, bool packing)
{
    if (packing)
        *byte = *code;
    else
        *code = *byte;
}

// ---- The third bit of the first quarter of the channels ----

static void put_wide(uint32_t dim, const uint8_t *codes, uint8_t *wide)
{
    memset(wide, 0, dim);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t c = 0; c < dim / 4; c++)
            wide[kvq__wide_byte(dim, t, c)] |= (uint8_t)((codes[t * dim + c] >> 2) << c % 8);
}

static void get_wide(uint32_t dim, const uint8_t *wide, uint8_t *codes)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t c = 0; c < dim / 4; c++)
            codes[t * dim + c] |= (uint8_t)((wide[kvq__wide_byte(dim, t, c)] >> c % 8 & 1u) << 2);
}

// ---- K and V ----

static void walk(bool v, uint32_t bits, uint32_t dim, uint8_t *planes, uint8_t *codes, bool packing)
{
    for (uint32_t n = 0; n < dim / 16 * KVQ_GROUP_TOKENS; n++) {
        struct kvq__place p = v ? kvq__v_place(bits, dim, n) : kvq__k_place(bits, dim, n);
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t s = 0; s < 4; s++) {
                struct kvq__cell c = v ? kvq__v_cell(&p, dim, i, s) : kvq__k_cell(&p, i, s);
                uint8_t *code = &codes[c.token * dim + c.channel];
                if (bits == 8)
                    move_byte(planes + kvq__byte_word(dim, p.low, s) + i, code, packing);
                else
                    move_code(&p, bits, kvq__cell_bit(i, s), planes, code, packing);
            }
    }
}

static void walk_k(uint32_t bits, uint32_t dim, uint8_t *planes, uint8_t *codes, bool packing)
{
    walk(false, bits, dim, planes, codes, packing);
}

static void walk_v(uint32_t bits, uint32_t dim, uint8_t *planes, uint8_t *codes, bool packing)
{
    walk(true, bits, dim, planes, codes, packing);
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
