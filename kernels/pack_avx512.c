// SPDX-License-Identifier: Apache-2.0
//
// Quantizing with scalar codecs, AVX-512. The bytes are those of quant_c.c, which says what is
// computed and in what order.
//
// First come scales, zeros and what turns values into codes, sixteen scales at a time: those per
// channel lie in lanes as the rows come, those per token are found in the rows and then transposed
// into lanes. A second walk over the rows makes codes of four tokens and 16 channels at a time,
// which pack to a register of bytes (pack_avx512.h), and planes_avx512.c planes of these.
#include "kernels/pack_avx512.h"
#include "kernels/lanes_avx512.h"

enum { MAX_SCALES = KVQ_MAX_HEAD_DIM }; // of a group of 32 tokens

// Calls something with CODEC as a constant.
#define BY_CODEC(codec, call)                                                                      \
    do {                                                                                           \
        if ((codec) == KVQ_CODEC_AFFINE) {                                                         \
            enum { CODEC = KVQ_CODEC_AFFINE };                                                     \
            call;                                                                                  \
        } else if ((codec) == KVQ_CODEC_SYMMETRIC) {                                               \
            enum { CODEC = KVQ_CODEC_SYMMETRIC };                                                  \
            call;                                                                                  \
        } else {                                                                                   \
            enum { CODEC = KVQ_CODEC_HYBRID };                                                     \
            call;                                                                                  \
        }                                                                                          \
    } while (0)

// What turns values into codes: clamp(rint((x - offset) * inv) + shift, low, high). `top` is
// high - shift. Scale and zero are as stored.
struct coder {
    __m512 offset, inv, top;
    __m512i shift, low;
    __m512 scale, zero;
};

// The same of all scales: [dim] per channel, [set][32 tokens] per token. Symmetric codecs have no
// offset, and only of hybrid ones the other three differ from scale to scale.
struct coders {
    _Alignas(64) float offset[MAX_SCALES], inv[MAX_SCALES], top[MAX_SCALES];
    _Alignas(64) int32_t shift[MAX_SCALES], low[MAX_SCALES];
};

// Where scales and zeros go; zeros NULL for codecs without. V's per token go to slots.
struct place {
    uint8_t *scales, *zeros;
    bool slots;
};

// A group of 32 tokens of one side.
struct work {
    const struct kvq__side *side;
    uint32_t dim;
    bool v;
    const float *rows;
    struct place at;
    uint8_t *quads;
    const uint8_t *ahead; // raw rows that are fetched meanwhile
};

// ---- One group in each lane ----

// Value i of 16 groups at x + i * stride.
struct groups {
    const float *x;
    size_t stride;
    uint32_t n;
};

KVQ__INLINE __m512 value_at(const struct groups *g, uint32_t i)
{
    return _mm512_loadu_ps(g->x + i * g->stride);
}

// The least and the largest value, or the largest |x|.
struct range {
    __m512 min, max, top;
};

KVQ__INLINE __m512 inverse(__m512 x)
{
    __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    return _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), x);
}

// What does not depend on the values.
KVQ__INLINE struct coder affine_codes(uint32_t bits)
{
    struct coder c = {.top = kvq__all((float)((1u << bits) - 1))};
    c.shift = c.low = _mm512_setzero_si512();
    return c;
}

KVQ__INLINE struct coder symmetric_codes(uint32_t bits, bool full)
{
    int32_t half = 1 << (bits - 1);
    struct coder c = {.offset = _mm512_setzero_ps(), .top = kvq__all((float)(half - 1))};
    c.shift = _mm512_set1_epi32(half);
    c.low = _mm512_set1_epi32(full ? 0 : 1);
    return c;
}

KVQ__INLINE struct coder affine_coder(const struct range *r, uint32_t bits, bool integer)
{
    const __m512 none = _mm512_setzero_ps();
    struct coder c = affine_codes(bits);
    c.scale = kvq__as_half((r->max - r->min) / c.top);
    c.inv = inverse(c.scale);
    __m512 zero = r->min + none;
    if (integer) {
        __m512 steps = kvq__rint(kvq__negative(r->min) / c.scale);
        zero = kvq__if_greater(c.scale, none, none - steps * c.scale, zero);
    }
    c.zero = c.offset = kvq__as_half(zero);
    return c;
}

// Numbers in steps from the smallest on, and the line of codec_math.h that is nearest to them.
struct fit {
    _Alignas(64) float u[KVQ_MAX_HEAD_DIM][16];
    uint32_t n;
    __m512 most, top, sum_u;
    __m512 scale, offset;
};

KVQ__INLINE __m512 fit_code(const struct fit *f, __m512 inv, __m512 u)
{
    __m512 q = kvq__rint((u - f->offset) * inv);
    return _mm512_min_ps(_mm512_max_ps(q, _mm512_setzero_ps()), f->top);
}

static void fit_round(struct fit *f)
{
    const __m512 none = _mm512_setzero_ps(), inv = kvq__all(1.0f) / f->scale;
    const __m512 more = kvq__all((float)f->n / KVQ__FIT_ENDS);
    const __m512 all = kvq__all((float)f->n) + kvq__all(2.0f) * more;
    __m512 low = fit_code(f, inv, none), high = fit_code(f, inv, f->most);
    __m512 sum_q = more * (low + high), sum_qq = more * (low * low + high * high);
    __m512 sum_uq = more * f->most * high;
    for (uint32_t i = 0; i < f->n; i++) {
        __m512 u = _mm512_load_ps(f->u[i]), q = fit_code(f, inv, u);
        sum_q = sum_q + q;
        sum_qq = _mm512_fmadd_ps(q, q, sum_qq); // q * q is exact
        sum_uq = sum_uq + u * q;
    }
    __m512 spread = all * sum_qq - sum_q * sum_q;
    __m512 scale = (all * sum_uq - f->sum_u * sum_q) / spread;
    __mmask16 good =
        _mm512_cmp_ps_mask(spread, none, _CMP_GT_OQ) & _mm512_cmp_ps_mask(scale, none, _CMP_GT_OQ);
    f->offset = _mm512_mask_div_ps(f->offset, good, f->sum_u - scale * sum_q, all);
    f->scale = _mm512_mask_mov_ps(f->scale, good, scale);
}

static struct coder fitted_coder(const struct groups *g, const struct range *r, uint32_t bits)
{
    const __m512 none = _mm512_setzero_ps();
    struct coder c = affine_coder(r, bits, false);
    __m512 range = r->max - r->min, step = range / c.top, per = kvq__all(1.0f) / step;
    struct fit f;
    f.n = g->n;
    f.most = range * per;
    f.top = c.top;
    f.scale = kvq__all(1.0f);
    f.offset = none;
    f.sum_u = kvq__all((float)g->n / KVQ__FIT_ENDS) * f.most;
    for (uint32_t i = 0; i < g->n; i++) {
        __m512 u = (value_at(g, i) - r->min) * per;
        _mm512_store_ps(f.u[i], u);
        f.sum_u = f.sum_u + u;
    }
    for (int round = 0; round < KVQ__FIT_ROUNDS; round++)
        fit_round(&f);
    __mmask16 some = _mm512_cmp_ps_mask(c.scale, none, _CMP_GT_OQ);
    __m512 zero = kvq__as_half(r->min + f.offset * step + none);
    c.zero = c.offset = _mm512_mask_mov_ps(c.zero, some, zero);
    c.scale = _mm512_mask_mov_ps(c.scale, some, kvq__as_half(f.scale * step));
    c.inv = inverse(c.scale);
    return c;
}

KVQ__INLINE struct coder symmetric_coder(const struct range *r, uint32_t bits, bool full)
{
    float half = (float)(1u << (bits - 1));
    struct coder c = symmetric_codes(bits, full);
    c.scale = kvq__as_half(r->top / kvq__all(full ? half : half - 1.0f));
    c.inv = inverse(c.scale);
    c.zero = kvq__as_half(kvq__all(0.0f) - kvq__all(half) * c.scale);
    return c;
}

// NaN becomes the lowest code: `top` is not taken for it, and the conversion makes it -2^31. What
// is below 0 of affine codes becomes 0 later.
KVQ__INLINE __m512i code_of(const struct coder *c, __m512 x, int codec)
{
    if (codec != KVQ_CODEC_SYMMETRIC)
        x = x - c->offset;
    __m512i code = _mm512_cvtps_epi32(_mm512_min_ps(c->top, x * c->inv));
    if (codec == KVQ_CODEC_AFFINE)
        return code;
    return _mm512_max_epi32(_mm512_add_epi32(code, c->shift), c->low);
}

// The code as a number; `low` and `shift` are those of the codec, as numbers.
KVQ__INLINE __m512 error_at(const struct coder *c, __m512 x, __m512 low, __m512 shift, int codec)
{
    __m512 code = codec == KVQ_CODEC_AFFINE ? (x - c->offset) * c->inv : x * c->inv;
    code = kvq__rint(_mm512_min_ps(_mm512_max_ps(code, low - shift), c->top));
    if (codec != KVQ_CODEC_AFFINE)
        code = code + shift;
    return _mm512_abs_ps(x - (c->scale * code + c->zero));
}

// Affine groups tell by the sign of their scale.
static struct coder hybrid_coder(const struct groups *g, const struct range *r,
                                 const struct kvq_side *row)
{
    struct coder s = symmetric_coder(r, row->bits, row->full);
    struct coder a = affine_coder(r, kvq__hybrid_bits(row->bits, row->full), false);
    const __m512 none = _mm512_setzero_ps();
    const __m512 low = _mm512_cvtepi32_ps(s.low), shift = _mm512_cvtepi32_ps(s.shift);
    __m512 sum_s = none, sum_a = none;
    for (uint32_t i = 0; i < g->n; i++) {
        __m512 x = value_at(g, i);
        sum_s = sum_s + error_at(&s, x, low, shift, KVQ_CODEC_SYMMETRIC);
        sum_a = sum_a + error_at(&a, x, none, none, KVQ_CODEC_AFFINE);
    }
    __mmask16 own = _mm512_cmp_ps_mask(sum_a, sum_s, _CMP_GT_OQ); // symmetric
    a.scale = _mm512_mask_mov_ps(kvq__negative(a.scale), own, s.scale);
    a.zero = _mm512_mask_mov_ps(a.zero, own, s.zero);
    a.offset = _mm512_mask_mov_ps(a.offset, own, s.offset);
    a.inv = _mm512_mask_mov_ps(a.inv, own, s.inv);
    a.top = _mm512_mask_mov_ps(a.top, own, s.top);
    a.shift = _mm512_mask_mov_epi32(a.shift, own, s.shift);
    a.low = _mm512_mask_mov_epi32(a.low, own, s.low);
    return a;
}

KVQ__INLINE struct coder coder_of(const struct kvq_side *row, const struct groups *g,
                                  const struct range *r, int codec)
{
    if (codec == KVQ_CODEC_AFFINE && row->zero == KVQ_ZERO_FITTED)
        return fitted_coder(g, r, row->bits);
    if (codec == KVQ_CODEC_AFFINE)
        return affine_coder(r, row->bits, row->zero == KVQ_ZERO_INTEGER);
    if (codec == KVQ_CODEC_SYMMETRIC)
        return symmetric_coder(r, row->bits, row->full);
    return hybrid_coder(g, r, row);
}

KVQ__INLINE void put_params(const struct place *at, uint32_t i, __m512 scale, __m512 zero)
{
    kvq__store_half(at->scales + 2 * i, at->slots ? kvq__to_slots(scale) : scale);
    if (at->zeros)
        kvq__store_half(at->zeros + 2 * i, at->slots ? kvq__to_slots(zero) : zero);
}

// Scales i to i + 15.
KVQ__INLINE void put_coder(struct coders *all, const struct place *at, uint32_t i, struct coder c,
                           int codec)
{
    put_params(at, i, c.scale, c.zero);
    _mm512_store_ps(all->inv + i, c.inv);
    if (codec != KVQ_CODEC_SYMMETRIC)
        _mm512_store_ps(all->offset + i, c.offset);
    if (codec == KVQ_CODEC_HYBRID) {
        _mm512_store_ps(all->top + i, c.top);
        _mm512_store_si512(all->shift + i, c.shift);
        _mm512_store_si512(all->low + i, c.low);
    }
}

// ---- Per channel ----

KVQ__INLINE struct range range_down(const struct groups *g, int codec)
{
    struct range r = {.min = value_at(g, 0), .max = value_at(g, 0), .top = _mm512_setzero_ps()};
    for (uint32_t i = 0; i < g->n; i++) {
        __m512 x = value_at(g, i);
        if (codec != KVQ_CODEC_AFFINE)
            r.top = _mm512_max_ps(_mm512_abs_ps(x), r.top);
        if (codec == KVQ_CODEC_SYMMETRIC)
            continue;
        r.min = _mm512_min_ps(x, r.min);
        r.max = _mm512_max_ps(x, r.max);
    }
    return r;
}

// Of the group and others behind it that share scales.
KVQ__INLINE void code_channels(const struct work *w, struct coders *all, int codec)
{
    for (uint32_t c = 0; c < w->dim; c += 16) {
        struct groups g = {w->rows + c, w->dim, w->side->span};
        struct range r = range_down(&g, codec);
        put_coder(all, &w->at, c, coder_of(&w->side->row, &g, &r, codec), codec);
    }
}

// ---- Per token ----

enum fold { MIN, MAX, SUM };

KVQ__INLINE __m512 fold(__m512 a, __m512 b, enum fold how)
{
    if (how == SUM)
        return a + b;
    return how == MIN ? _mm512_min_ps(a, b) : _mm512_max_ps(a, b);
}

// Registers of 16 tokens, each folded into one lane: halves, quarters and so on with each other, in
// the order of the table's sumsq. The token that comes i-th:
KVQ__INLINE uint32_t token_at(uint32_t i)
{
    return (i & 5) << 1 | (i & 10) >> 1;
}

// First the halves of the registers i and i + 8 become one register,
KVQ__INLINE __m512 fold_halves(__m512 a, __m512 b, enum fold how)
{
    return fold(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee), how);
}

// and then these eight.
KVQ__INLINE __m512 fold_lanes(__m512 *x, enum fold how)
{
    for (int i = 0; i < 4; i++)
        x[i] = fold(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x88),
                    _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd), how);
    for (int i = 0; i < 2; i++) {
        __m512d a = _mm512_castps_pd(x[i]), b = _mm512_castps_pd(x[i + 2]);
        x[i] = fold(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)), how);
    }
    return fold(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xdd), how);
}

// Of n channels of one token.
KVQ__INLINE struct range range_of(const float *row, uint32_t n, bool symmetric)
{
    __m512 x = _mm512_loadu_ps(row);
    struct range r = {.min = x, .max = x, .top = _mm512_abs_ps(x)};
    for (uint32_t i = 16; i < n; i += 16) {
        x = _mm512_loadu_ps(row + i);
        r.min = _mm512_min_ps(x, r.min);
        r.max = _mm512_max_ps(x, r.max);
        r.top = _mm512_max_ps(_mm512_abs_ps(x), r.top);
    }
    if (symmetric)
        r.max = r.top;
    return r;
}

// Of 16 tokens, one in each lane.
KVQ__INLINE struct range range_across(const float *rows, uint32_t dim, uint32_t n, bool symmetric)
{
    __m512 low[8], high[8];
    for (uint32_t i = 0; i < 8; i++) {
        struct range a = range_of(rows + token_at(i) * dim, n, symmetric);
        struct range b = range_of(rows + token_at(i + 8) * dim, n, symmetric);
        low[i] = fold_halves(a.min, b.min, MIN);
        high[i] = fold_halves(a.max, b.max, MAX);
    }
    struct range r;
    r.top = r.max = r.min = fold_lanes(high, MAX);
    if (!symmetric)
        r.min = fold_lanes(low, MIN);
    return r;
}

static void transpose_rows(const float *rows, uint32_t dim, float *out)
{
    for (uint32_t c = 0; c < dim; c += 16)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += 16) {
            __m512 x[16];
            for (uint32_t i = 0; i < 16; i++)
                x[i] = _mm512_loadu_ps(rows + (size_t)(t + i) * dim + c);
            kvq__transpose(x);
            for (uint32_t i = 0; i < 16; i++)
                _mm512_storeu_ps(out + (size_t)(c + i) * KVQ_GROUP_TOKENS + t, x[i]);
        }
}

// Whether sums go value by value, down the rows transposed.
KVQ__INLINE bool needs_columns(const struct kvq_side *row, int codec)
{
    return codec == KVQ_CODEC_HYBRID || (codec == KVQ_CODEC_AFFINE && row->zero == KVQ_ZERO_FITTED);
}

// Scales `at` to at + 15. `columns` are the rows transposed, where they are needed.
KVQ__INLINE struct coder coder_across(const struct work *w, const float *columns, uint32_t at,
                                      int codec)
{
    uint32_t set = at / KVQ_GROUP_TOKENS, t = at % KVQ_GROUP_TOKENS, n = w->side->row.group;
    const float *rows = w->rows + (size_t)t * w->dim + (size_t)set * n;
    struct groups g = {columns + (size_t)set * n * KVQ_GROUP_TOKENS + t, KVQ_GROUP_TOKENS, n};
    struct range r;
    if (needs_columns(&w->side->row, codec))
        r = range_down(&g, codec);
    else if (n == KVQ_GROUP_CHANNELS)
        r = range_across(rows, w->dim, KVQ_GROUP_CHANNELS, codec == KVQ_CODEC_SYMMETRIC);
    else
        r = range_across(rows, w->dim, n, codec == KVQ_CODEC_SYMMETRIC);
    return coder_of(&w->side->row, &g, &r, codec);
}

KVQ__INLINE void code_tokens(const struct work *w, struct coders *all, int codec)
{
    _Alignas(64) float columns[KVQ__GROUP_F32];
    uint32_t scales = w->dim / w->side->row.group * KVQ_GROUP_TOKENS;
    if (needs_columns(&w->side->row, codec))
        transpose_rows(w->rows, w->dim, columns);
    for (uint32_t i = 0; i < scales; i += 16)
        put_coder(all, &w->at, i, coder_across(w, columns, i, codec), codec);
}

// ---- Codes ----

// Lane L of the result holds the bytes of lanes L of the four. What is negative becomes 0.
KVQ__INLINE __m512i to_bytes(const __m512i *q)
{
    return _mm512_packus_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
}

KVQ__INLINE __m512 number_of(const float *all, uint32_t at, bool by_token)
{
    return by_token ? _mm512_set1_ps(all[at]) : _mm512_load_ps(all + at);
}

KVQ__INLINE __m512i word_of(const int32_t *all, uint32_t at, bool by_token)
{
    return by_token ? _mm512_set1_epi32(all[at]) : _mm512_load_si512(all + at);
}

// Completes what all scales share by scale (by_token) or scales from `at` on.
KVQ__INLINE void complete(struct coder *c, const struct coders *all, uint32_t at, bool by_token,
                          int codec)
{
    c->inv = number_of(all->inv, at, by_token);
    if (codec != KVQ_CODEC_SYMMETRIC)
        c->offset = number_of(all->offset, at, by_token);
    if (codec == KVQ_CODEC_HYBRID) {
        c->top = number_of(all->top, at, by_token);
        c->shift = word_of(all->shift, at, by_token);
        c->low = word_of(all->low, at, by_token);
    }
}

// Quad i of the group.
KVQ__INLINE void put_quad(const struct work *w, uint32_t i, const __m512i *q)
{
    _mm512_store_si512(w->quads + (size_t)64 * i, to_bytes(q));
    _mm_prefetch((const char *)w->ahead + (size_t)128 * i, _MM_HINT_T0);
    _mm_prefetch((const char *)w->ahead + (size_t)128 * i + 64, _MM_HINT_T0);
}

KVQ__INLINE void put_codes(const struct work *w, const struct coders *all, bool by_token, int codec)
{
    const struct kvq_side *row = &w->side->row;
    const uint32_t dim = w->dim, step = kvq__set_step(w->v), group = by_token ? row->group : dim;
    struct coder coder =
        codec == KVQ_CODEC_AFFINE ? affine_codes(row->bits) : symmetric_codes(row->bits, row->full);
    for (uint32_t set = 0, i = 0; set < KVQ__SETS; set++)
        for (uint32_t c = 0; c < dim; c += 16, i++) {
            __m512i q[4];
            for (uint32_t k = 0; k < 4; k++) {
                uint32_t t = kvq__set_token(set, w->v) + k * step;
                complete(&coder, all, by_token ? c / group * KVQ_GROUP_TOKENS + t : c, by_token,
                         codec);
                q[k] = code_of(&coder, _mm512_loadu_ps(w->rows + (size_t)t * dim + c), codec);
            }
            put_quad(w, i, q);
        }
}

// `scaled`: these are not the first tokens that share scales.
KVQ__INLINE void put_grid(const struct work *w, struct coders *all, bool scaled, int codec)
{
    if (w->side->row.axis == KVQ_PER_TOKEN) {
        code_tokens(w, all, codec);
        put_codes(w, all, true, codec);
        return;
    }
    if (!scaled)
        code_channels(w, all, codec);
    put_codes(w, all, false, codec);
}

// ---- Lloyd-Max ----

// Which of up to 15 midpoints is the next one: the numbers from -LIMIT to LIMIT in 31 cells. No
// cell has two midpoints, and none is near the end of a cell, so that rounding cannot matter.
#define LIMIT 2.5f
#define CELLS 6.0f // a unit
enum { FIRST_CELL = -16 };

struct cells {
    __m512 midpoint[2]; // of a cell, or a larger one
    __m512i below[2];   // how many are below
    __m512 squares;     // of levels
};

static struct cells cells_of(const float *levels, uint32_t bits)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    uint32_t n = (1u << bits) - 1;
    struct cells cells;
    __m512 low = _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), levels);
    __m512 high = _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), levels + 1);
    __m512 midpoints = kvq__all(0.5f) * (low + high);
    midpoints = _mm512_mask_mov_ps(kvq__all(INFINITY), (__mmask16)((1u << n) - 1), midpoints);
    for (int i = 0; i < 2; i++) {
        __m512i cell = _mm512_add_epi32(lane, _mm512_set1_epi32(16 * i + FIRST_CELL));
        __m512 start = (_mm512_cvtepi32_ps(cell) - kvq__all(0.5f)) / kvq__all(CELLS);
        cells.below[i] = _mm512_setzero_si512();
        for (uint32_t m = 0; m < n; m++) {
            __m512 midpoint = _mm512_permutexvar_ps(_mm512_set1_epi32((int)m), midpoints);
            __mmask16 under = _mm512_cmp_ps_mask(start, midpoint, _CMP_GT_OQ);
            cells.below[i] =
                _mm512_mask_add_epi32(cells.below[i], under, cells.below[i], _mm512_set1_epi32(1));
        }
        cells.midpoint[i] = _mm512_permutexvar_ps(cells.below[i], midpoints);
    }
    __m512 all = _mm512_maskz_loadu_ps((__mmask16)((2u << n) - 1), levels);
    cells.squares = all * all;
    return cells;
}

// The number of midpoints below x: those below its cell, and the cell's own. NaN has none.
KVQ__INLINE __m512i nearest(const struct cells *cells, __m512 x)
{
    // Numbers from 2^23 on are whole; the lowest bits of these are the cell's.
    const __m512 whole = kvq__all(12582912.0f - (float)FIRST_CELL);
    __m512 y = _mm512_min_ps(_mm512_max_ps(x, kvq__all(-LIMIT)), kvq__all(LIMIT));
    __m512i cell = _mm512_castps_si512(_mm512_fmadd_ps(y, kvq__all(CELLS), whole));
    __m512 midpoint = _mm512_permutex2var_ps(cells->midpoint[0], cell, cells->midpoint[1]);
    __m512i below = _mm512_permutex2var_epi32(cells->below[0], cell, cells->below[1]);
    __mmask16 more = _mm512_cmp_ps_mask(x, midpoint, _CMP_GT_OQ);
    return _mm512_mask_add_epi32(below, more, below, _mm512_set1_epi32(1));
}

// Channels [from, from + n) of the group.
struct lloyd {
    const struct work *w;
    uint32_t from, n;
    _Alignas(64) float inv[KVQ_GROUP_TOKENS], sums[KVQ_GROUP_TOKENS][16];
};

KVQ__INLINE __m512 squares(const float *row, uint32_t n)
{
    __m512 sum = _mm512_setzero_ps();
    for (uint32_t c = 0; c < n; c += 16) {
        __m512 x = _mm512_loadu_ps(row + c);
        sum = sum + x * x;
    }
    return sum;
}

// Sums of squares of tokens t to t + 15.
static __m512 sum_values(const struct lloyd *l, uint32_t t)
{
    const uint32_t dim = l->w->dim;
    const float *rows = l->w->rows + (size_t)t * dim + l->from;
    __m512 x[8];
    for (uint32_t i = 0; i < 8; i++)
        x[i] = fold_halves(squares(rows + token_at(i) * dim, l->n),
                           squares(rows + token_at(i + 8) * dim, l->n), SUM);
    return fold_lanes(x, SUM);
}

// The same of what put_set has left.
static __m512 sum_levels(const struct lloyd *l, uint32_t t)
{
    __m512 x[8];
    for (uint32_t i = 0; i < 8; i++)
        x[i] = fold_halves(_mm512_load_ps(l->sums[t + token_at(i)]),
                           _mm512_load_ps(l->sums[t + token_at(i + 8)]), SUM);
    return fold_lanes(x, SUM);
}

// The codes of a set, and what its levels' squares add up to.
KVQ__INLINE void put_set(struct lloyd *l, const struct cells *cells, uint32_t set)
{
    const struct work *w = l->w;
    const uint32_t dim = w->dim, t = kvq__set_token(set, w->v), step = kvq__set_step(w->v);
    __m512 inv[4], sum[4];
    for (uint32_t k = 0; k < 4; k++) {
        inv[k] = _mm512_set1_ps(l->inv[t + k * step]);
        sum[k] = _mm512_setzero_ps();
    }
    for (uint32_t c = l->from; c < l->from + l->n; c += 16) {
        __m512i q[4];
        for (uint32_t k = 0; k < 4; k++) {
            const float *x = w->rows + (size_t)(t + k * step) * dim + c;
            q[k] = nearest(cells, _mm512_loadu_ps(x) * inv[k]);
            sum[k] = sum[k] + _mm512_permutexvar_ps(q[k], cells->squares);
        }
        put_quad(w, (set * dim + c) / 16, q);
    }
    for (uint32_t k = 0; k < 4; k++)
        _mm512_store_ps(l->sums[t + k * step], sum[k]);
}

// Scale `i` of each token. Tokens whose norm is 0 get NaN for an inverse, and so the lowest codes.
static void put_lloyd(struct lloyd *l, const float *levels, uint32_t bits, uint32_t i)
{
    const struct cells cells = cells_of(levels, bits);
    __m512 sums[2];
    for (uint32_t half = 0; half < 2; half++) {
        sums[half] = sum_values(l, 16 * half);
        __m512 norm = kvq__sqrt(sums[half] / kvq__all((float)l->n));
        __m512 inv = kvq__if_greater(norm, kvq__all(0.0f), kvq__all(1.0f) / norm, kvq__all(NAN));
        _mm512_store_ps(l->inv + 16 * half, inv);
    }
    for (uint32_t set = 0; set < KVQ__SETS; set++)
        put_set(l, &cells, set);
    for (uint32_t half = 0; half < 2; half++) {
        __m512 scale = kvq__sqrt(sums[half] / sum_levels(l, 16 * half));
        scale = kvq__min(scale, kvq__all(65504.0f));
        put_params(&l->w->at, i * KVQ_GROUP_TOKENS + 16 * half, scale, scale);
    }
}

static void put_levels(const struct work *w)
{
    const struct kvq__side *side = w->side;
    uint32_t wide = side->row.wide ? w->dim / 4 : 0;
    struct lloyd l = {.w = w, .n = wide};
    if (wide)
        put_lloyd(&l, side->wide_levels, side->row.bits + 1u, 0);
    l.from = wide;
    l.n = w->dim - wide;
    put_lloyd(&l, side->levels, side->row.bits, wide ? 1 : 0);
}

// ---- One side ----

static struct place place_for(const struct kvq__side *side, const struct kvq_packed *p, bool v)
{
    struct place at = {v ? p->v_scales : p->k_scales, NULL, v && side->row.axis == KVQ_PER_TOKEN};
    if (side->row.codec == KVQ_CODEC_AFFINE || side->row.codec == KVQ_CODEC_HYBRID)
        at.zeros = v ? p->v_zeros : p->k_zeros;
    return at;
}

static void quant(const struct kvq__codec *c, bool v, const float *rows, uint8_t *record,
                  uint32_t first)
{
    _Alignas(64) uint8_t quads[KVQ__QUADS];
    const uint8_t *ahead = (const uint8_t *)(c->ahead ? c->ahead : (uintptr_t)rows);
    struct work w = {v ? &c->v : &c->k, c->dim, v, rows, {0}, quads, ahead};
    struct coders all;
    for (uint32_t i = 0; i < w.side->span / KVQ_GROUP_TOKENS; i++) {
        struct kvq_packed p = kvq_packed_at(&c->layout, record, first + i);
        w.at = place_for(w.side, &p, v);
        if (w.side->row.codec == KVQ_CODEC_LLOYD)
            put_levels(&w);
        else
            BY_CODEC(w.side->row.codec, put_grid(&w, &all, i > 0, CODEC));
        kvq__put_planes_avx512(w.side, c->dim, quads,
                               p.group + (v ? c->layout.v_codes : c->layout.k_codes), v);
        w.rows += (size_t)KVQ_GROUP_TOKENS * c->dim;
        w.ahead += (size_t)KVQ_GROUP_TOKENS * 2 * c->dim;
    }
}

static void quant_k_avx512(const struct kvq__codec *c, const float *rows, uint8_t *record,
                           uint32_t first)
{
    quant(c, false, rows, record, first);
}

static void quant_v_avx512(const struct kvq__codec *c, const float *rows, uint8_t *record,
                           uint32_t first)
{
    quant(c, true, rows, record, first);
}

void kvq__init_avx512_pack(struct kvq_kernels *k)
{
    for (int kind = KVQ__SCALAR; kind < KVQ__BOOK; kind++) {
        k->quant_k[kind] = quant_k_avx512;
        k->quant_v[kind] = quant_v_avx512;
    }
}
