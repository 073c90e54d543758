// SPDX-License-Identifier: Apache-2.0
//
// Scalar codecs in plain C: choosing scale, zero and codes of a group of values, and the way back.
// The arithmetic is that of codec_math.h.
#include "kernels/internal.h"
#include "kernels/kernels_c.h"

enum { MOST = KVQ_MAX_HEAD_DIM, MAX_CODES = KVQ_GROUP_TOKENS * KVQ_MAX_HEAD_DIM };

// ---- One group of n values ----

static float lowest(const float *x, uint32_t n)
{
    float min = x[0];
    for (uint32_t i = 1; i < n; i++)
        min = x[i] < min ? x[i] : min;
    return min;
}

static float highest(const float *x, uint32_t n)
{
    float max = x[0];
    for (uint32_t i = 1; i < n; i++)
        max = x[i] > max ? x[i] : max;
    return max;
}

static void codes_of(const float *x, uint32_t n, struct kvq__grid grid, uint8_t *codes)
{
    for (uint32_t i = 0; i < n; i++)
        codes[i] = (uint8_t)kvq__code(&grid, x[i]);
}

static struct kvq__params fitted(const float *x, uint32_t n, float min, float max, uint32_t bits)
{
    struct kvq__fit fit = kvq__fit_from(min, max, bits);
    for (int round = 0; round < KVQ__FIT_ROUNDS; round++) {
        float inverse = 1.0f / fit.scale;
        struct kvq__fit_sums sums = kvq__fit_ends(&fit, inverse, n);
        for (uint32_t i = 0; i < n; i++)
            kvq__fit_add(&fit, inverse, x[i], &sums);
        kvq__fit_line(&fit, &sums, n);
    }
    return kvq__fit_params(&fit);
}

static struct kvq__params affine(const float *x, uint32_t n, uint32_t bits, uint8_t zero,
                                 uint8_t *codes)
{
    float min = lowest(x, n), max = highest(x, n);
    struct kvq__params p = kvq__affine_params(min, max, bits, zero == KVQ_ZERO_INTEGER);
    if (zero == KVQ_ZERO_FITTED && kvq__f16_to_f32(p.scale) > 0.0f)
        p = fitted(x, n, min, max, bits);
    codes_of(x, n, kvq__affine_grid(p, bits), codes);
    return p;
}

static struct kvq__params symmetric(const float *x, uint32_t n, uint32_t bits, bool full,
                                    uint8_t *codes)
{
    float top = 0.0f;
    for (uint32_t i = 0; i < n; i++)
        top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
    struct kvq__params p = kvq__symmetric_params(top, bits, full);
    codes_of(x, n, kvq__symmetric_grid(p, bits, full), codes);
    return p;
}

static float error_of(const float *x, uint32_t n, struct kvq__params p, const uint8_t *codes)
{
    float scale = kvq__f16_to_f32(p.scale), zero = kvq__f16_to_f32(p.zero), sum = 0.0f;
    for (uint32_t i = 0; i < n; i++)
        sum += kvq__error(x[i], scale, (float)codes[i], zero);
    return sum;
}

static struct kvq__params hybrid(const float *x, uint32_t n, uint32_t bits, bool full,
                                 uint8_t *codes)
{
    uint8_t own[MOST];
    struct kvq__params s = symmetric(x, n, bits, full, codes);
    struct kvq__params a = affine(x, n, kvq__hybrid_bits(bits, full), KVQ_ZERO_MINIMUM, own);
    if (error_of(x, n, a, own) > error_of(x, n, s, codes))
        return s;
    memcpy(codes, own, n);
    a.scale |= KVQ__HYBRID_AFFINE;
    return a;
}

static struct kvq__params lloyd(const float *x, uint32_t n, const float *levels, uint32_t bits,
                                uint8_t *codes)
{
    float level[MOST], sum = kvq__sumsq(x, n), norm = kvq__lloyd_norm(sum, n);
    float inverse = kvq__lloyd_inverse(norm);
    for (uint32_t i = 0; i < n; i++) {
        codes[i] = 0;
        if (norm > 0.0f)
            codes[i] = (uint8_t)kvq__nearest_level(x[i] * inverse, levels, 1u << bits);
        level[i] = levels[codes[i]];
    }
    return (struct kvq__params){.scale = kvq__lloyd_scale(sum, kvq__sumsq(level, n))};
}

// Codes of n values that stand `stride` apart; `wide` for those with one more bit.
static struct kvq__params quantize(const struct kvq__side *side, bool wide, const float *x,
                                   size_t stride, uint32_t n, uint8_t *codes)
{
    float values[MOST];
    uint8_t own[MOST];
    struct kvq__params p;
    for (uint32_t i = 0; i < n; i++)
        values[i] = x[i * stride];
    const struct kvq_side *row = &side->row;
    if (row->codec == KVQ_CODEC_AFFINE)
        p = affine(values, n, row->bits, row->zero, own);
    else if (row->codec == KVQ_CODEC_SYMMETRIC)
        p = symmetric(values, n, row->bits, row->full, own);
    else if (row->codec == KVQ_CODEC_HYBRID)
        p = hybrid(values, n, row->bits, row->full, own);
    else
        p = lloyd(values, n, wide ? side->wide_levels : side->levels, row->bits + wide, own);
    for (uint32_t i = 0; i < n; i++)
        codes[i * stride] = own[i];
    return p;
}

// ---- One side of a span of tokens ----

static uint32_t k_slot(uint32_t t)
{
    return t;
}

// Where one side's parameters and codes of group i of a record are.
struct place {
    uint16_t *scales, *zeros; // zeros NULL if the codec stores none
    uint8_t *codes;
    uint32_t (*slot)(uint32_t token);
};

static bool stores_zeros(const struct kvq__side *side)
{
    return side->row.codec == KVQ_CODEC_AFFINE || side->row.codec == KVQ_CODEC_HYBRID;
}

static struct place place_of(const struct kvq__codec *c, const struct kvq_packed *p, bool v)
{
    const struct kvq__side *side = v ? &c->v : &c->k;
    struct place at = {.scales = (void *)(v ? p->v_scales : p->k_scales),
                       .zeros = (void *)(v ? p->v_zeros : p->k_zeros),
                       .codes = p->group + (v ? c->layout.v_codes : c->layout.k_codes),
                       .slot = v ? kvq_v_slot : k_slot};
    if (!stores_zeros(side))
        at.zeros = NULL;
    return at;
}

static void put_params(const struct place *at, uint32_t i, struct kvq__params p)
{
    at->scales[i] = p.scale;
    if (at->zeros)
        at->zeros[i] = p.zero;
}

static void per_channel(const struct kvq__side *side, uint32_t dim, const float *rows,
                        const struct place *at, uint8_t *codes)
{
    for (uint32_t i = 0; i < dim; i++)
        put_params(at, i, quantize(side, false, rows + i, dim, side->span, codes + i));
}

// Channels of the `set`-th scale of a token: [*from, *from + *n).
static void channels_of(const struct kvq__side *side, uint32_t dim, uint32_t set, uint32_t *from,
                        uint32_t *n)
{
    if (side->row.wide) {
        *from = set ? dim / 4 : 0;
        *n = set ? dim - dim / 4 : dim / 4;
    } else {
        *from = set * side->row.group;
        *n = side->row.group;
    }
}

static uint32_t sets_of(const struct kvq__side *side, uint32_t dim)
{
    return side->row.wide ? 2 : dim / side->row.group;
}

static void per_token(const struct kvq__side *side, uint32_t dim, const float *rows,
                      const struct place *at, uint8_t *codes)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t set = 0, from, n; set < sets_of(side, dim); set++) {
            channels_of(side, dim, set, &from, &n);
            struct kvq__params p = quantize(side, side->row.wide && set == 0, rows + t * dim + from,
                                            1, n, codes + t * dim + from);
            put_params(at, set * KVQ_GROUP_TOKENS + at->slot(t), p);
        }
}

static void quant(const struct kvq__codec *c, bool v, const float *rows, uint8_t *record,
                  uint32_t first)
{
    const struct kvq__side *side = v ? &c->v : &c->k;
    uint8_t codes[KVQ_BLOCK_GROUPS * MAX_CODES];
    for (uint32_t i = 0; i < side->span / KVQ_GROUP_TOKENS; i++) {
        struct kvq_packed packed = kvq_packed_at(&c->layout, record, first + i);
        struct place at = place_of(c, &packed, v);
        uint8_t *own = codes + (size_t)i * KVQ_GROUP_TOKENS * c->dim;
        if (side->row.axis == KVQ_PER_TOKEN)
            per_token(side, c->dim, rows, &at, own);
        else if (i == 0)
            per_channel(side, c->dim, rows, &at, codes);
        (v ? kvq__put_v_codes : kvq__put_k_codes)(side, c->dim, own, at.codes);
    }
}

static void quant_k_c(const struct kvq__codec *c, const float *rows, uint8_t *record,
                      uint32_t first)
{
    quant(c, false, rows, record, first);
}

static void quant_v_c(const struct kvq__codec *c, const float *rows, uint8_t *record,
                      uint32_t first)
{
    quant(c, true, rows, record, first);
}

// ---- And back ----

// n values that stand next to each other, with one scale and zero.
static void values_of(const struct kvq__side *side, bool wide, const struct place *at, uint32_t i,
                      const uint8_t *codes, uint32_t n, float *x)
{
    const float *levels = wide ? side->wide_levels : side->levels;
    float scale = fabsf(kvq__f16_to_f32(at->scales[i])), zero = 0.0f;
    if (side->row.codec == KVQ_CODEC_SYMMETRIC)
        zero = kvq__symmetric_zero(scale, side->row.bits);
    else if (at->zeros)
        zero = kvq__f16_to_f32(at->zeros[i]);
    for (uint32_t j = 0; j < n; j++)
        x[j] = kvq__value(scale, levels ? levels[codes[j]] : (float)codes[j], zero);
}

static void dequant(const struct kvq__codec *c, bool v, const struct kvq_packed *packed,
                    float *rows)
{
    const struct kvq__side *side = v ? &c->v : &c->k;
    uint8_t codes[MAX_CODES] = {0};
    uint32_t dim = c->dim;
    struct place at = place_of(c, packed, v);
    (v ? kvq__get_v_codes : kvq__get_k_codes)(side, dim, at.codes, codes);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        if (side->row.axis == KVQ_PER_CHANNEL) {
            for (uint32_t i = 0; i < dim; i++)
                values_of(side, false, &at, i, codes + t * dim + i, 1, rows + t * dim + i);
            continue;
        }
        for (uint32_t set = 0, from, n; set < sets_of(side, dim); set++) {
            channels_of(side, dim, set, &from, &n);
            values_of(side, side->row.wide && set == 0, &at, set * KVQ_GROUP_TOKENS + at.slot(t),
                      codes + t * dim + from, n, rows + t * dim + from);
        }
    }
}

void kvq__apply_norms(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    const uint16_t *norms = (const uint16_t *)(const void *)(packed->group + c->layout.k_norms);
    for (uint32_t t = 0; c->has_norms && t < KVQ_GROUP_TOKENS; t++) {
        float norm = kvq__f16_to_f32(norms[t]);
        for (uint32_t i = 0; i < c->dim; i++)
            rows[t * c->dim + i] *= norm;
    }
}

void kvq__dequant_k_c(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    dequant(c, false, packed, rows);
    kvq__apply_norms(c, packed, rows);
}

void kvq__dequant_v_c(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    dequant(c, true, packed, rows);
}

void kvq__init_quant_c(struct kvq_kernels *k)
{
    for (int kind = KVQ__SCALAR; kind < KVQ__BOOK; kind++) {
        k->quant_k[kind] = quant_k_c;
        k->quant_v[kind] = quant_v_c;
        k->dequant_k[kind] = kvq__dequant_k_c;
        k->dequant_v[kind] = kvq__dequant_v_c;
    }
}
