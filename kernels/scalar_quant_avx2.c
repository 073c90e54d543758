// SPDX-License-Identifier: Apache-2.0
//
// Quantizing with scalar codecs, AVX2. The bytes are those of quant_c.c, which says what is
// computed and in what order.
//
// A lane is a group of values that share a scale, and all sums run down the group's values in
// their order, as in C. Groups per channel lie like that in the rows as they come; for those per
// token the rows are transposed first. Codes are a byte each until kvq__put_planes_avx2.
#include "kernels/lanes_avx2.h"
#include "kernels/scalar_avx2.h"

enum { GROUP_CODES = KVQ_GROUP_TOKENS * KVQ_MAX_HEAD_DIM, SUMS = 16 };

// Groups in lanes: value i of all of them at x + i * stride.
struct groups {
    const float *x;
    uint8_t *codes; // like x
    size_t stride;
    uint32_t n;
};

// What turns values into codes: rint((x - offset) * inv) + shift, within [low, high]. Parameters
// are as stored.
struct coder {
    kvq__floats offset, inv, shift, low, high;
    kvq__floats scale, zero;
};

KVQ__INLINE kvq__floats value_at(const struct groups *g, uint32_t i)
{
    return kvq__load(g->x + i * g->stride);
}

KVQ__INLINE kvq__floats inverse(kvq__floats x)
{
    const kvq__floats none = kvq__all(0.0f);
    return kvq__if_greater(x, none, kvq__all(1.0f) / x, none);
}

// `x - 0` and `+ 0` change no bit that could show: codes are whole numbers.
KVQ__INLINE kvq__floats code_of(const struct coder *c, kvq__floats x)
{
    kvq__floats code = kvq__rint((x - c->offset) * c->inv) + c->shift;
    return kvq__min(kvq__max(code, c->low), c->high); // NaN becomes the lowest
}

// ---- Affine and symmetric ----

// Numbers in steps from the smallest on, and the line of codec_math.h that is nearest to them.
struct fit {
    kvq__floats min, per, most, top; // per: 1 / step
    kvq__floats scale, offset;
};

KVQ__INLINE kvq__floats fit_code(const struct fit *f, kvq__floats inv, kvq__floats u)
{
    kvq__floats q = kvq__rint((u - f->offset) * inv);
    return kvq__min(kvq__max(q, kvq__all(0.0f)), f->top);
}

static void fit_round(const struct groups *g, struct fit *f)
{
    const kvq__floats none = kvq__all(0.0f), one = kvq__all(1.0f), inv = one / f->scale;
    const kvq__floats more = kvq__all((float)g->n / KVQ__FIT_ENDS);
    const kvq__floats all = kvq__all((float)g->n) + kvq__all(2.0f) * more;
    kvq__floats low = fit_code(f, inv, none), high = fit_code(f, inv, f->most);
    kvq__floats sum_q = more * (low + high), sum_qq = more * (low * low + high * high);
    kvq__floats sum_u = more * f->most, sum_uq = sum_u * high;
    for (uint32_t i = 0; i < g->n; i++) {
        kvq__floats u = (value_at(g, i) - f->min) * f->per, q = fit_code(f, inv, u);
        sum_q = sum_q + q;
        sum_qq = sum_qq + q * q;
        sum_u = sum_u + u;
        sum_uq = sum_uq + u * q;
    }
    kvq__floats spread = all * sum_qq - sum_q * sum_q;
    kvq__floats scale = (all * sum_uq - sum_u * sum_q) / spread;
    scale = kvq__if_greater(spread, none, scale, none);
    f->offset = kvq__if_greater(scale, none, (sum_u - scale * sum_q) / all, f->offset);
    f->scale = kvq__if_greater(scale, none, scale, f->scale);
}

// Where there is a scale at all.
static void fit(const struct groups *g, struct coder *c, kvq__floats min, kvq__floats range)
{
    const kvq__floats none = kvq__all(0.0f), step = range / c->high, some = c->scale;
    const kvq__floats per = kvq__all(1.0f) / step;
    struct fit f = {min, per, range * per, c->high, kvq__all(1.0f), none};
    for (int round = 0; round < KVQ__FIT_ROUNDS; round++)
        fit_round(g, &f);
    c->zero = kvq__if_greater(some, none, kvq__as_half(min + f.offset * step + none), c->zero);
    c->scale = kvq__if_greater(some, none, kvq__as_half(f.scale * step), some);
}

static struct coder affine_coder(const struct groups *g, uint32_t bits, enum kvq_zero kind)
{
    const kvq__floats none = kvq__all(0.0f), top = kvq__all((float)((1u << bits) - 1));
    kvq__floats min = value_at(g, 0), max = min;
    for (uint32_t i = 1; i < g->n; i++) {
        kvq__floats x = value_at(g, i);
        min = kvq__min(x, min);
        max = kvq__max(x, max);
    }
    struct coder c = {.shift = none, .low = none, .high = top};
    c.scale = kvq__as_half((max - min) / top);
    kvq__floats zero = min + none;
    if (kind == KVQ_ZERO_INTEGER) {
        kvq__floats steps = kvq__rint(kvq__negative(min) / c.scale);
        zero = kvq__if_greater(c.scale, none, none - steps * c.scale, zero);
    }
    c.zero = kvq__as_half(zero);
    if (kind == KVQ_ZERO_FITTED)
        fit(g, &c, min, max - min);
    c.offset = c.zero;
    c.inv = inverse(c.scale);
    return c;
}

static struct coder symmetric_coder(const struct groups *g, uint32_t bits, bool full)
{
    float half = (float)(1u << (bits - 1)), levels = full ? half : half - 1.0f;
    kvq__floats top = kvq__all(0.0f);
    for (uint32_t i = 0; i < g->n; i++)
        top = kvq__max(kvq__abs(value_at(g, i)), top);
    struct coder c = {.offset = kvq__all(0.0f), .shift = kvq__all(half)};
    c.low = kvq__all(half - levels);
    c.high = kvq__all(half + half - 1.0f);
    c.scale = kvq__as_half(top / kvq__all(levels));
    c.inv = inverse(c.scale);
    c.zero = kvq__as_half(kvq__all(0.0f) - kvq__all(half) * c.scale);
    return c;
}

static void put_codes(const struct groups *g, const struct coder *c)
{
    for (uint32_t i = 0; i < g->n; i++)
        kvq__store_bytes(g->codes + i * g->stride, code_of(c, value_at(g, i)));
}

// ---- Hybrid ----

KVQ__INLINE kvq__floats error_at(const struct coder *c, kvq__floats x)
{
    return kvq__abs(x - (c->scale * code_of(c, x) + c->zero));
}

// Affine groups tell by the sign of their scale.
static void hybrid(const struct groups *g, const struct kvq_side *row, kvq__floats *scale,
                   kvq__floats *zero)
{
    struct coder s = symmetric_coder(g, row->bits, row->full);
    struct coder a = affine_coder(g, row->full ? row->bits : row->bits - 1u, KVQ_ZERO_MINIMUM);
    kvq__floats sum_s = kvq__all(0.0f), sum_a = sum_s;
    for (uint32_t i = 0; i < g->n; i++) {
        kvq__floats x = value_at(g, i);
        sum_s = sum_s + error_at(&s, x);
        sum_a = sum_a + error_at(&a, x);
    }
    for (uint32_t i = 0; i < g->n; i++) {
        kvq__floats x = value_at(g, i);
        kvq__floats code = kvq__if_greater(sum_a, sum_s, code_of(&s, x), code_of(&a, x));
        kvq__store_bytes(g->codes + i * g->stride, code);
    }
    *scale = kvq__if_greater(sum_a, sum_s, s.scale, kvq__negative(a.scale));
    *zero = kvq__if_greater(sum_a, sum_s, s.zero, a.zero);
}

// ---- Lloyd-Max ----

// Adds up 16 sums in the order of the table's sumsq.
KVQ__INLINE kvq__floats sum_of(kvq__floats *lane)
{
    for (int half = SUMS / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] + lane[i + half];
    return lane[0];
}

static kvq__floats sum_of_squares(const struct groups *g)
{
    kvq__floats lane[SUMS];
    for (int i = 0; i < SUMS; i++)
        lane[i] = kvq__all(0.0f);
    for (uint32_t j = 0; j < g->n; j += SUMS)
        for (uint32_t i = 0; i < SUMS; i++) {
            kvq__floats x = value_at(g, j + i);
            lane[i] = lane[i] + x * x;
        }
    return sum_of(lane);
}

// Codes, and the sum of squares of their levels.
KVQ__INLINE kvq__floats put_levels(const struct groups *g, const float *levels, int bits,
                                   kvq__floats norm)
{
    const kvq__floats none = kvq__all(0.0f), lowest = kvq__all(-INFINITY), inv = inverse(norm);
    const struct kvq__levels table = kvq__levels_of(levels, bits, bits > 3 ? 4 : 3);
    _Alignas(64) float midpoints[16] = {0};
    kvq__floats lane[SUMS];
    for (uint32_t i = 1; i < 1u << bits; i++)
        midpoints[i - 1] = 0.5f * (levels[i - 1] + levels[i]);
    for (int i = 0; i < SUMS; i++)
        lane[i] = none;
    for (uint32_t j = 0; j < g->n; j += SUMS)
        for (uint32_t i = 0; i < SUMS; i++) {
            kvq__floats x = value_at(g, j + i) * inv;
            kvq__words code =
                kvq__count_below(kvq__if_greater(norm, none, x, lowest), midpoints, bits);
            kvq__store_words(g->codes + (j + i) * g->stride, code);
            x = kvq__look_up(&table, code, 0, bits > 3 ? 4 : 3);
            lane[i] = lane[i] + x * x;
        }
    return sum_of(lane);
}

static kvq__floats lloyd(const struct groups *g, const float *levels, uint32_t bits)
{
    kvq__floats sum = sum_of_squares(g), squares;
    kvq__floats norm = kvq__sqrt(sum / kvq__all((float)g->n));
    if (bits == 2)
        squares = put_levels(g, levels, 2, norm);
    else if (bits == 3)
        squares = put_levels(g, levels, 3, norm);
    else
        squares = put_levels(g, levels, 4, norm);
    return kvq__min(kvq__sqrt(sum / squares), kvq__all(65504.0f));
}

// ---- One side ----

// Codes, and scales and zeros as many as there are lanes. `wide`: of one bit more.
static void quantize(const struct kvq__side *side, bool wide, const struct groups *g,
                     kvq__floats *scale, kvq__floats *zero)
{
    const struct kvq_side *row = &side->row;
    *zero = kvq__all(0.0f);
    if (row->codec == KVQ_CODEC_LLOYD) {
        *scale = lloyd(g, wide ? side->wide_levels : side->levels, row->bits + wide);
    } else if (row->codec == KVQ_CODEC_HYBRID) {
        hybrid(g, row, scale, zero);
    } else {
        struct coder c = row->codec == KVQ_CODEC_AFFINE ? affine_coder(g, row->bits, row->zero)
                                                        : symmetric_coder(g, row->bits, row->full);
        put_codes(g, &c);
        *scale = c.scale;
        *zero = c.zero;
    }
}

// Where one side's parameters and codes of a group of tokens go; zeros NULL for codecs without.
struct place {
    uint8_t *scales, *zeros, *codes;
};

static struct place place_of(const struct kvq__codec *c, uint8_t *record, uint32_t i, bool v)
{
    const struct kvq__side *side = v ? &c->v : &c->k;
    struct kvq_packed p = kvq_packed_at(&c->layout, record, i);
    bool zeros = side->row.codec == KVQ_CODEC_AFFINE || side->row.codec == KVQ_CODEC_HYBRID;
    struct place at = {v ? p.v_scales : p.k_scales, v ? p.v_zeros : p.k_zeros,
                       p.group + (v ? c->layout.v_codes : c->layout.k_codes)};
    if (!zeros)
        at.zeros = NULL;
    return at;
}

static void put_params(const struct place *at, uint32_t i, kvq__floats scale, kvq__floats zero)
{
    kvq__store_half(at->scales + 2 * i, scale);
    if (at->zeros)
        kvq__store_half(at->zeros + 2 * i, zero);
}

// Codes of [span][dim].
static void per_channel(const struct kvq__side *side, uint32_t dim, const float *rows,
                        const struct place *at, uint8_t *codes)
{
    for (uint32_t c = 0; c < dim; c += KVQ__LANES) {
        kvq__floats scale, zero;
        quantize(side, false, &(struct groups){rows + c, codes + c, dim, side->span}, &scale,
                 &zero);
        put_params(at, c, scale, zero);
    }
}

static void transpose_rows(const float *rows, uint32_t dim, float *out)
{
    for (uint32_t c = 0; c < dim; c += KVQ__LANES)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += KVQ__LANES) {
            kvq__floats x[KVQ__LANES];
            for (uint32_t i = 0; i < KVQ__LANES; i++)
                x[i] = kvq__load(rows + (size_t)(t + i) * dim + c);
            kvq__transpose(x);
            for (uint32_t i = 0; i < KVQ__LANES; i++)
                kvq__store(out + (size_t)(c + i) * KVQ_GROUP_TOKENS + t, x[i]);
        }
}

// Codes of [dim][32] from rows transposed likewise. V's parameters go to slots.
static void per_token(const struct kvq__side *side, uint32_t dim, const float *columns,
                      const struct place *at, uint8_t *codes, bool v)
{
    uint32_t sets = side->row.wide ? 2 : dim / side->row.group;
    for (uint32_t set = 0, from = 0, n; set < sets; set++, from += n) {
        bool wide = side->row.wide && set == 0;
        n = wide ? dim / 4 : side->row.wide ? dim - dim / 4 : side->row.group;
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += KVQ__LANES) {
            size_t first = (size_t)from * KVQ_GROUP_TOKENS + t;
            struct groups g = {columns + first, codes + first, KVQ_GROUP_TOKENS, n};
            kvq__floats scale, zero;
            quantize(side, wide, &g, &scale, &zero);
            put_params(at, set * KVQ_GROUP_TOKENS + t, v ? kvq__to_slots(scale) : scale,
                       v ? kvq__to_slots(zero) : zero);
        }
    }
}

static void quant(const struct kvq__codec *c, bool v, const float *rows, uint8_t *record,
                  uint32_t first)
{
    const struct kvq__side *side = v ? &c->v : &c->k;
    _Alignas(64) float columns[KVQ__GROUP_F32];
    _Alignas(64) uint8_t codes[KVQ_BLOCK_GROUPS * GROUP_CODES];
    for (uint32_t i = 0; i < side->span / KVQ_GROUP_TOKENS; i++) {
        struct place at = place_of(c, record, first + i, v);
        uint8_t *own = codes + (size_t)i * KVQ_GROUP_TOKENS * c->dim;
        bool by_token = side->row.axis == KVQ_PER_TOKEN;
        if (by_token) {
            transpose_rows(rows, c->dim, columns);
            per_token(side, c->dim, columns, &at, own, v);
        } else if (i == 0) {
            per_channel(side, c->dim, rows, &at, codes);
        }
        kvq__put_planes_avx2(side, c->dim, own, by_token, at.codes, v);
    }
}

void kvq__quant_k_avx2(const struct kvq__codec *c, const float *rows, uint8_t *record,
                       uint32_t first)
{
    quant(c, false, rows, record, first);
}

void kvq__quant_v_avx2(const struct kvq__codec *c, const float *rows, uint8_t *record,
                       uint32_t first)
{
    quant(c, true, rows, record, first);
}

// Kinds that have functions of their own for one side come here with the other, and with zeros that
// are fitted.
void kvq__init_avx2_scalar_quant(struct kvq_kernels *k)
{
    for (int kind = KVQ__SCALAR; kind < KVQ__BOOK; kind++) {
        if (kind != KVQ__PER_CHANNEL_32) // pack_avx2.c
            k->quant_k[kind] = kvq__quant_k_avx2;
        if (kind != KVQ__PER_TOKEN_32)
            k->quant_v[kind] = kvq__quant_v_avx2;
    }
}
