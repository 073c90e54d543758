// SPDX-License-Identifier: Apache-2.0
//
// The codecs: the levels of Lloyd and Max, and every code and parameter of every format against
// its definition, in double precision, from numbers that are put through the stages before.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/internal.h"
#include "tests/kernels/kvtest.h"

static const struct kvq_kernels *kernels;

// ---- Lloyd and Max ----

static void test_lloyd(void **state)
{
    (void)state;
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (uint32_t i = 0; i < 1u << bits; i++)
            if (!(fabs(kvq__lloyd(bits)[i] - kvt_lloyd(bits, i)) < 1e-6))
                fail_msg("level %u of %u bits is %.9g, and should be %.9g", i, bits,
                         (double)kvq__lloyd(bits)[i], kvt_lloyd(bits, i));
}

// ---- One unit, and what its codec was given ----

struct unit {
    struct kvq_format format;
    struct kvt_cache c;
    struct kvt_request r;
    uint32_t dim, tokens;
    double *k, *v;         // [tokens][dim]: what was to be coded, in the transformed basis
    double *k_row, *v_row; // [tokens]: the largest of |x| of the row before, for tolerances
    bool exact_k, exact_v; // no transform: k (v) are exactly what was handed over
};

static double largest(const double *x, uint32_t n, uint32_t stride)
{
    double most = 0;
    for (uint32_t i = 0; i < n; i++)
        most = fmax(most, fabs(x[(size_t)i * stride]));
    return most;
}

// Into a rotated basis: its inverse with the signs the other way round.
static void rotate(uint8_t rotation, double *x, uint32_t dim)
{
    bool flips = rotation == KVQ_ROTATE_SIGNED;
    for (uint32_t i = 0; i < dim && flips; i++)
        x[i] *= kvq_signs_before[i / 32] >> i % 32 & 1 ? -1 : 1;
    if (rotation != KVQ_ROTATE_NONE)
        kvt_rotate_back(KVQ_ROTATE_HADAMARD, x, dim);
    for (uint32_t i = 0; i < dim && flips; i++)
        x[i] *= kvq_signs_after[i / 32] >> i % 32 & 1 ? -1 : 1;
}

// The stages of K before its codec, in double precision, from what the raw block holds.
static void transform_k(const struct unit *u, uint32_t t, double *x)
{
    const struct kvq_format *f = &u->format;
    for (uint32_t c = 0; c < u->dim && f->k_channel == KVQ_CHANNEL_PROMPT; c++)
        x[c] /= kvt_f16(((uint16_t *)(void *)u->c.extras)[c]);
    for (uint32_t c = 0; c < u->dim && f->k_channel == KVQ_CHANNEL_BOOK; c++)
        x[c] /= u->c.book->smooth[c];
    rotate(f->k_rotation, x, u->dim);
    double norm = kvt_stored(f, u->dim, u->c.blocks, false, t, 0).norm;
    for (uint32_t c = 0; c < u->dim; c++)
        x[c] /= norm;
}

// Packs a block by a format without sinks and outliers, whose rows its codecs never see.
static struct unit unit_of(const char *name, uint32_t dim, uint8_t dtype, enum kvt_kind kind,
                           float limit)
{
    static struct kvq_format kept;
    struct unit u = {.dim = dim, .tokens = 128};
    u.c = kvt_cache(kernels, name, kvt_shape(1, 1, dim, dtype), 128, 0, kind, kvt_seed() + dim);
    kvt_guarded_free(u.c.extras);
    kept = *u.c.format;
    kept.sink_tokens = kept.outliers = 0;
    u.format = kept;
    u.c.format = &kept;
    u.c.extras = kvq_extras_bytes(&kept, &u.c.shape)
                     ? kvt_guarded(kvq_extras_bytes(&kept, &u.c.shape), 0)
                     : NULL;
    void *workspace = kvt_workspace();
    struct kvq_store_counts counts = {0};
    float gain = limit > 1e30f ? 1e38f : 1.0f; // up to where fp32 and bf16 end
    for (uint32_t i = 0; i < 128 * dim; i++) {
        u.c.k[i] = fminf(fmaxf(u.c.k[i] * gain, -limit), limit);
        u.c.v[i] = fminf(fmaxf(u.c.v[i] * gain, -limit), limit);
    }
    struct kvq_view k = kvt_view(u.c.k, 1, dim), v = kvt_view(u.c.v, 1, dim);
    kvq_store(kernels, &u.c.shape, &k, &v, 0, 0, 128, u.c.raw, &counts);
    if (u.c.extras)
        kvq_extras_init(&kept, &u.c.shape, u.c.extras);
    if (kvq_learn_tokens(&kept, 128))
        kvq_learn(kernels, &kept, &u.c.shape, u.c.pages, 128, 0, u.c.extras, workspace);
    for (uint32_t t = 0; t < 128; t += kept.unit_tokens)
        kvq_pack(kernels, &kept, &u.c.shape,
                 &(struct kvq_unit){.raw_block = u.c.raw,
                                    .packed_block = u.c.blocks,
                                    .first = t,
                                    .extras = u.c.extras,
                                    .learned = kvq_learn_tokens(&kept, 128),
                                    .book = u.c.book},
                 workspace);
    kvt_guarded_free(workspace);
    return u;
}

static void transform(struct unit *u)
{
    size_t n = sizeof(double) * u->tokens * u->dim;
    const struct kvq_format *f = &u->format;
    u->k = malloc(n), u->v = malloc(n);
    u->k_row = malloc(sizeof(double) * u->tokens), u->v_row = malloc(sizeof(double) * u->tokens);
    u->exact_k = !f->k_channel && !f->k_rotation && !f->k_token_scale;
    u->exact_v = !f->v_rotation;
    u->r = kvt_request(&u->c, 1, 1); // packed_tokens is 0: the oracle reads the raw block
    for (uint32_t t = 0; t < u->tokens; t++) {
        double *k = u->k + t * u->dim, *v = u->v + t * u->dim;
        assert_true(kvt_key(&u->r.a, 0, t, k, v));
        transform_k(u, t, k);
        rotate(f->v_rotation, v, u->dim);
        u->k_row[t] = sqrt(u->dim) * largest(k, u->dim, 1);
        u->v_row[t] = sqrt(u->dim) * largest(v, u->dim, 1);
    }
}

static void free_unit(struct unit *u)
{
    kvt_request_free(&u->r);
    free(u->k);
    free(u->v);
    free(u->k_row);
    free(u->v_row);
    kvt_cache_free(&u->c);
}

// ---- Every code and parameter against its definition ----

// The values that share a scale, and what is stored for them.
struct share {
    const struct kvq_side *side;
    uint32_t n, bits;
    bool exact;
    double x[KVQ_MAX_HEAD_DIM], slack[KVQ_MAX_HEAD_DIM];
    struct kvt_stored got[KVQ_MAX_HEAD_DIM];
    double worst; // largest slack
};

// The nearest fp16, by search.
static double to_f16(double x)
{
    uint32_t low = 0, high = 0x7bff;
    while (low < high) { // the largest that is not above
        uint32_t middle = (low + high + 1) / 2;
        if (kvt_f16((uint16_t)middle) <= fabs(x))
            low = middle;
        else
            high = middle - 1;
    }
    double down = kvt_f16((uint16_t)low), up = low < 0x7bff ? kvt_f16((uint16_t)(low + 1)) : down;
    double to_down = fabs(x) - down, to_up = up - fabs(x);
    double y = to_up < to_down || (to_up == to_down && low % 2) ? up : down;
    return x < 0 ? -y : y;
}

// A parameter is as the definition has it: to the bit if nothing came before the codec, else as
// near as its input is known.
static void assert_param(const struct share *s, const char *what, double got, double want)
{
    double slack = s->exact ? 0 : fabs(want) * 0x1p-10 + s->worst + 0x1p-24;
    if (!(fabs(got - want) <= slack))
        fail_msg("%s is %.9g, the definition gives %.9g", what, got, want);
}

// No code would have been nearer than the stored one; `value` is what a code reads back as.
static void assert_nearest(const struct share *s, uint32_t from, uint32_t to,
                           double (*value)(const struct share *, const struct kvt_stored *,
                                           uint32_t))
{
    for (uint32_t i = 0; i < s->n; i++) {
        double off = fabs(s->x[i] - value(s, &s->got[i], s->got[i].code));
        if (s->got[i].code < from || s->got[i].code > to)
            fail_msg("code %u is outside %u..%u", s->got[i].code, from, to);
        for (uint32_t code = from; code <= to; code++)
            if (!(off <= fabs(s->x[i] - value(s, &s->got[i], code)) + s->slack[i]))
                fail_msg("%.9g became code %u, but %u is nearer", s->x[i], s->got[i].code, code);
    }
}

static double affine_value(const struct share *s, const struct kvt_stored *p, uint32_t code)
{
    (void)s;
    return fabs(p->scale) * code + p->zero;
}

static double symmetric_value(const struct share *s, const struct kvt_stored *p, uint32_t code)
{
    return fabs(p->scale) * ((double)code - (1 << (s->bits - 1)));
}

static double lloyd_value(const struct share *s, const struct kvt_stored *p, uint32_t code)
{
    double sum = 0; // what is compared with the levels is x over the root of the mean square
    (void)p;
    for (uint32_t i = 0; i < s->n; i++)
        sum += s->x[i] * s->x[i];
    return sqrt(sum / s->n) * kvt_lloyd(s->bits, code);
}

static void range_of(const struct share *s, double *min, double *max)
{
    *min = *max = s->x[0];
    for (uint32_t i = 1; i < s->n; i++) {
        *min = fmin(*min, s->x[i]);
        *max = fmax(*max, s->x[i]);
    }
}

static uint32_t fits; // groups whose parameters were held against those of the definition

// What n numbers lose if they are coded with a scale and zero as stored: the sum of squares.
static double loss_with(const struct share *s, double scale, double zero)
{
    double sum = 0, top = (1u << s->bits) - 1;
    for (uint32_t i = 0; i < s->n; i++) {
        double code = scale > 0 ? rint((s->x[i] - zero) / scale) : 0;
        sum += pow(s->x[i] - (scale * fmin(fmax(code, 0), top) + zero), 2);
    }
    return sum;
}

// The line through codes and numbers that is nearest, three times over, the ends counting as a
// sixteenth of the numbers more each: what docs/formats.md promises. False if a
// number lies so near to the middle of two codes that either may be taken.
static bool fit(const struct share *s, double *scale, double *zero)
{
    double min, max, top = (1u << s->bits) - 1, middle = INFINITY, more = s->n / 16.0;
    range_of(s, &min, &max);
    *scale = (max - min) / top, *zero = min;
    for (int round = 0; round < 3; round++) {
        double n = 0, q = 0, qq = 0, x = 0, xq = 0;
        for (uint32_t i = 0; i < s->n + 2; i++) { // the last two are the ends once more
            double value = i < s->n ? s->x[i] : i == s->n ? min : max, y = value - min;
            double u = (value - *zero) / *scale, code = fmin(fmax(rint(u), 0), top);
            double w = i < s->n ? 1 : more, slack = i < s->n ? s->slack[i] : s->worst;
            middle = fmin(middle, fabs(fabs(u - rint(u)) - 0.5) - slack / *scale);
            n += w, q += w * code, qq += w * code * code, x += w * y, xq += w * y * code;
        }
        *scale = (n * xq - x * q) / (n * qq - q * q);
        *zero = min + (x - *scale * q) / n;
    }
    return middle > 1e-4;
}

// Parameters by least squares, which lose no more than those of the definition, but for fp16's
// rounding.
static void check_fitted(const struct share *s)
{
    double scale, zero, min, max, got = fabs(s->got[0].scale);
    range_of(s, &min, &max);
    if (!((float)to_f16(((float)max - (float)min) / (float)((1u << s->bits) - 1)) > 0)) {
        assert_param(s, "a zero of what is all the same", s->got[0].zero, to_f16((float)min));
    } else if (fit(s, &scale, &zero)) {
        double step = fabs(zero) + fabs(scale) * ((1u << s->bits) - 1);
        double least = loss_with(s, to_f16(scale), to_f16(zero));
        double lost = loss_with(s, got, s->got[0].zero), slack = s->n * pow(step * 0x1p-11, 2);
        if (!(lost <= 1.002 * least + 4 * slack + 0x1p-40))
            fail_msg("%g is lost by fitted parameters, %g by the definition's", lost, least);
        fits++;
    }
    assert_nearest(s, 0, (1u << s->bits) - 1, affine_value);
}

static void check_affine(const struct share *s, uint32_t bits, bool integer)
{
    double min, max, scale = fabs(s->got[0].scale), zero = s->got[0].zero;
    range_of(s, &min, &max);
    float range = (float)max - (float)min, top = (float)((1u << bits) - 1);
    assert_param(s, "an affine scale", scale, to_f16(range / top));
    if (integer && scale > 0) {
        float steps = s->exact ? rintf((float)-min / (float)scale) : (float)rint(-zero / scale);
        // Beyond, a rounded scale makes many integers possible, or fp16 ends.
        if (fabs(-min / scale) < 1e4 && fabs(zero) < 65504)
            assert_param(s, "an integer zero", zero, to_f16(0.0f - steps * (float)scale));
    } else {
        assert_param(s, "a minimum", zero, to_f16((float)min));
    }
    assert_nearest(s, 0, (1u << bits) - 1, affine_value);
}

static void check_symmetric(const struct share *s)
{
    uint32_t half = 1u << (s->bits - 1), n = s->side->full ? half : half - 1;
    float most = (float)largest(s->x, s->n, 1);
    assert_param(s, "a symmetric scale", fabs(s->got[0].scale), to_f16(most / (float)n));
    if (s->got[0].scale != 0)
        assert_nearest(s, half - n, 2 * half - 1, symmetric_value);
    for (uint32_t i = 0; i < s->n && s->got[0].scale == 0; i++)
        assert_int_equal(s->got[i].code, half);
}

// Sum of |x - value| if the group were coded with scale and zero, codes low to high.
static float error_with(const struct share *s, float scale, float zero, float low, float high)
{
    float sum = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        float code = scale > 0 ? rintf(((float)s->x[i] - zero) * (1 / scale)) : 0;
        code = fminf(fmaxf(code, low), high);
        sum += fabsf((float)s->x[i] - (scale * code + zero));
    }
    return sum;
}

// InnerQ: the mode with the smaller sum of |error|, affine of equal ones.
static void check_hybrid(const struct share *s)
{
    float half = (float)(1u << (s->bits - 1)), n = s->side->full ? half : half - 1;
    uint32_t own_bits = s->side->full ? s->bits : s->bits - 1;
    double min, max;
    range_of(s, &min, &max);
    float top = (float)((1u << own_bits) - 1);
    float own = (float)to_f16(((float)max - (float)min) / top), zero = (float)to_f16(min);
    float both = (float)to_f16((float)largest(s->x, s->n, 1) / n);
    float error_own = error_with(s, own, zero, 0, top);
    float error_both = error_with(s, both, 0, -n, half - 1); // exact: codes times one scale
    bool affine = signbit(s->got[0].scale);
    if (fabsf(error_own - error_both) > 1e-5f * error_both || error_own == error_both)
        assert_int_equal(affine, error_own <= error_both);
    if (affine) {
        check_affine(s, own_bits, false);
    } else {
        check_symmetric(s); // and reads back as an affine one would
        assert_true(s->got[0].zero == -(double)half * s->got[0].scale);
    }
}

static void check_lloyd(const struct share *s)
{
    double x = 0, level = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        x += s->x[i] * s->x[i];
        level += pow(kvt_lloyd(s->bits, s->got[i].code), 2);
    }
    if (x > 0)
        assert_nearest(s, 0, (1u << s->bits) - 1, lloyd_value);
    double want = x > 0 ? fmin(sqrt(x / level), 65504) : 0, got = s->got[0].scale;
    if (!(fabs(got - want) <= want * 0x1p-10 + 0x1p-24))
        fail_msg("a scale is %.9g, the corrected norm is %.9g", got, want);
}

static void check_share(const struct share *s)
{
    switch (s->side->codec) {
    case KVQ_CODEC_AFFINE:
        if (s->side->zero == KVQ_ZERO_FITTED)
            check_fitted(s);
        else
            check_affine(s, s->bits, s->side->zero == KVQ_ZERO_INTEGER);
        break;
    case KVQ_CODEC_SYMMETRIC:
        check_symmetric(s);
        break;
    case KVQ_CODEC_HYBRID:
        check_hybrid(s);
        break;
    default:
        check_lloyd(s);
    }
}

// n values from (t, c) on, one channel or one token along.
static void check_run(const struct unit *u, bool v, uint32_t t, uint32_t c, uint32_t n)
{
    const struct kvq_side *side = v ? &u->format.v : &u->format.k;
    bool channel = side->axis == KVQ_PER_CHANNEL;
    struct share s = {.side = side, .n = n, .exact = v ? u->exact_v : u->exact_k};
    s.bits = side->bits + (side->wide && c < u->dim / 4);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t ti = t + (channel ? i : 0), ci = c + (channel ? 0 : i);
        s.x[i] = (v ? u->v : u->k)[ti * u->dim + ci];
        s.slack[i] = 1e-6 * (s.exact ? fabs(s.x[i]) : (v ? u->v_row : u->k_row)[ti]);
        s.got[i] = kvt_stored(&u->format, u->dim, u->c.blocks, v, ti, ci);
        s.worst = fmax(s.worst, s.slack[i]);
        assert_true(s.got[i].scale == s.got[0].scale && s.got[i].zero == s.got[0].zero);
    }
    for (uint32_t i = 0; i < n && s.exact; i++) // fp32 arithmetic: a few units in the last place
        s.slack[i] += 1e-6 * largest(s.x, n, 1);
    check_share(&s);
}

static void check_book(const struct unit *u, bool v)
{
    const struct kvq_side *side = v ? &u->format.v : &u->format.k;
    const float *book = v ? u->c.book->v : u->c.book->k;
    size_t sub_floats = v ? u->c.book->v_sub : u->c.book->k_sub;
    for (uint32_t t = 0; t < u->tokens; t += 7)
        for (uint32_t c = 0; c < u->dim; c += side->vector) {
            const double *x = (v ? u->v : u->k) + t * u->dim + c;
            const float *table = book + c / side->vector * sub_floats;
            uint32_t got = kvt_stored(&u->format, u->dim, u->c.blocks, v, t, c).code;
            double least = INFINITY, own = 0, size = 0;
            for (uint32_t i = 0; i < 1u << side->bits; i++) {
                double sum = 0;
                for (uint32_t j = 0; j < side->vector; j++)
                    sum += pow(x[j] - table[i * side->vector + j], 2);
                least = fmin(least, sum);
                own = i == got ? sum : own;
            }
            for (uint32_t j = 0; j < side->vector; j++)
                size += x[j] * x[j];
            assert_true(got < 1u << side->bits);
            if (!(own <= least + 1e-5 * (size + least)))
                fail_msg("a centroid at %g was chosen, the nearest is at %g", own, least);
        }
}

static void check_side(const struct unit *u, bool v)
{
    const struct kvq_side *side = v ? &u->format.v : &u->format.k;
    uint32_t dim = u->dim, group = side->group == 0 || side->group > dim ? dim : side->group;
    if (side->codec == KVQ_CODEC_BOOK) {
        check_book(u, v);
    } else if (side->axis == KVQ_PER_CHANNEL) {
        for (uint32_t t = 0; t < u->tokens; t += side->group)
            for (uint32_t c = 0; c < dim; c++)
                check_run(u, v, t, c, side->group);
    } else if (side->wide) {
        for (uint32_t t = 0; t < u->tokens; t++) {
            check_run(u, v, t, 0, dim / 4);
            check_run(u, v, t, dim / 4, dim - dim / 4);
        }
    } else {
        for (uint32_t t = 0; t < u->tokens; t++)
            for (uint32_t c = 0; c < dim; c += group)
                check_run(u, v, t, c, group);
    }
}

static void check_limited(const char *name, uint32_t dim, uint8_t dtype, enum kvt_kind kind,
                          float limit)
{
    struct unit u = unit_of(name, dim, dtype, kind, limit);
    transform(&u);
    check_side(&u, false);
    check_side(&u, true);
    free_unit(&u);
}

static void check_codes(const char *name, uint32_t dim, uint8_t dtype, enum kvt_kind kind)
{
    // Symmetric groups of a hybrid side need room for -2 (or -4, ..) times their scale.
    bool hybrid = strstr(name, "hybrid") != NULL;
    check_limited(name, dim, dtype, kind, hybrid ? 16000 : 65504);
}

static void test_codes(void **state)
{
    static const char *const composed[] = {"oscar2-g64",
                                           "oscar3-g128-fm",
                                           "oscar2-max",
                                           "oscar2-mean",
                                           "innerq-small-g64-full",
                                           "innerq-hybrid-full",
                                           "innerq-hybrid-g128",
                                           "int8-full",
                                           "quarot2-g128-norot",
                                           "kivi4-g64",
                                           "oscar4-norot-noscale",
                                           "innerq-base-nosmooth",
                                           "oscar2-fit",
                                           "kivi1-fit",
                                           "kivi2-g128-fit",
                                           "quarot4:v_zero=fitted",
                                           "kvq2-fit"};
    (void)state;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        for (uint32_t kind = KVT_NORMAL; kind < KVT_KINDS && !kvq_is_raw(f); kind++)
            if (!kvt_has_huge_book(f) || kind == KVT_OUTLIERS)
                check_codes(f->name, kind ? 64 : 128, KVQ_F16, (enum kvt_kind)kind);
    for (size_t i = 0; i < sizeof composed / sizeof *composed; i++)
        for (uint32_t kind = KVT_NORMAL; kind < KVT_KINDS; kind++)
            check_codes(composed[i], 64u << kind % 3, kind % 2 ? KVQ_BF16 : KVQ_F16,
                        (enum kvt_kind)kind);
    assert_true(fits > 1000);
}

// Scales so small that fp16 rounds them far down: codes meet the ends of their range.
static void test_small_scales(void **state)
{
    static const char *const names[] = {"int8", "int8-full", "innerq-base", "innerq-base-full",
                                        "k8v4"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        check_limited(names[i], 64, KVQ_F16, KVT_NORMAL, 0x1p-22f);
        check_limited(names[i], 64, KVQ_F16, KVT_NORMAL, 0x1p-17f);
    }
}

// Of equal centroids the one with the lowest number; ties between modes go to the affine one.
static void test_ties(void **state)
{
    (void)state;
    struct unit u = unit_of("million-2", 64, KVQ_F16, KVT_NORMAL, 65504);
    float table[256 * 4];
    struct kvq_book book = {.k = table, .v = table};
    void *workspace = kvt_workspace();
    for (uint32_t i = 0; i < 256 * 4; i++)
        table[i] = (float)(i / 4 % 8) - 4.0f; // every centroid 32 times
    kvq_pack(kernels, &u.format, &u.c.shape,
             &(struct kvq_unit){.raw_block = u.c.raw, .packed_block = u.c.blocks, .book = &book},
             workspace);
    for (uint32_t t = 0; t < 128; t++)
        for (uint32_t c = 0; c < 64; c += 4) {
            assert_true(kvt_stored(&u.format, 64, u.c.blocks, false, t, c).code < 8);
            assert_true(kvt_stored(&u.format, 64, u.c.blocks, true, t, c).code < 8);
        }
    kvt_guarded_free(workspace);
    kvt_cache_free(&u.c);
    u = unit_of("innerq-hybrid", 64, KVQ_F16, KVT_NORMAL, 0.0f); // all zero: both without error
    for (uint32_t i = 0; i < 128 * 64; i++) {
        struct kvt_stored v = kvt_stored(&u.format, 64, u.c.blocks, true, i / 64, i % 64);
        assert_true(signbit(v.scale) && v.scale == 0 && v.zero == 0 && v.code == 0);
    }
    kvt_cache_free(&u.c);
}

// ---- Edges, for every format ----

static void read_back(const struct unit *u, double *k, double *v)
{
    struct kvq_page page = {.packed = u->c.blocks, .tokens = 128, .packed_tokens = 128};
    struct kvt_request r = kvt_request(&u->c, 1, 1);
    r.a.pages = &page;
    r.a.n_pages = 1;
    for (uint32_t t = 0; t < 128; t++)
        assert_true(kvt_key(&r.a, 0, t, k + t * u->dim, v + t * u->dim));
    kvt_request_free(&r);
}

// Everything is finite, zeros come back as zeros, and what affine codes alone hold of a constant
// is that constant.
static void check_edges(const struct kvq_format *f, uint8_t dtype, enum kvt_kind kind, float limit)
{
    struct unit u = unit_of(f->name, 64, dtype, kind, limit);
    double *k = malloc(sizeof(double) * 128 * 64), *v = malloc(sizeof(double) * 128 * 64);
    read_back(&u, k, v);
    for (uint32_t i = 0; i < 128 * 64; i++) {
        if (!isfinite(k[i]) || !isfinite(v[i]))
            fail_msg("%s reads back %g and %g", f->name, k[i], v[i]);
        if (limit == 0 && f->k.codec != KVQ_CODEC_BOOK)
            assert_true(k[i] == 0);
        if (limit == 0 && f->v.codec != KVQ_CODEC_BOOK)
            assert_true(v[i] == 0);
    }
    free(k);
    free(v);
    kvt_cache_free(&u.c);
}

static void test_edges(void **state)
{
    (void)state;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        if (kvq_is_raw(f))
            continue;
        check_edges(f, KVQ_F16, KVT_NORMAL, 0.0f);
        if (kvt_has_huge_book(f))
            continue;
        check_edges(f, KVQ_F16, KVT_EXTREME, 65504.0f);
        check_edges(f, KVQ_F16, KVT_NORMAL, 0x1p-24f); // denormals only
        check_edges(f, KVQ_BF16, KVT_NORMAL, 0x1p-130f);
        check_edges(f, KVQ_BF16, KVT_EXTREME, 3e38f);
    }
}

static void test_constant_groups(void **state)
{
    static const char *const names[] = {
        "kivi1", "kivi2-g64", "kivi4", "ott2", "int8", "quarot2-norot", "innerq-hybrid-nosmooth"};
    static const float values[] = {1.0f, -3.140625f, 65504.0f, 0x1p-24f, -0x1p-14f};
    double *k = malloc(sizeof(double) * 128 * 256), *v = malloc(sizeof(double) * 128 * 256);
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (size_t j = 0; j < sizeof values / sizeof *values; j++) {
            struct unit u = unit_of(names[i], 64u << i % 3, KVQ_F16, KVT_NORMAL, 0.0f);
            void *workspace = kvt_workspace();
            struct kvq_raw_layout raw = kvq_raw_layout_of(&u.c.shape);
            uint16_t *at = (void *)u.c.raw;
            for (uint32_t e = 0; e < kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS) / 2; e++)
                at[e] = kvq__f32_to_f16(values[j]);
            for (uint32_t t = 0; t < 128; t += u.format.unit_tokens)
                kvq_pack(kernels, &u.format, &u.c.shape,
                         &(struct kvq_unit){
                             .raw_block = u.c.raw, .packed_block = u.c.blocks, .first = t},
                         workspace);
            read_back(&u, k, v);
            for (uint32_t e = 0; e < 128 * u.dim; e++) {
                if (u.format.k.codec == KVQ_CODEC_AFFINE)
                    assert_true(k[e] == values[j]);
                if (u.format.v.codec != KVQ_CODEC_SYMMETRIC)
                    assert_true(v[e] == values[j]);
                assert_true(fabs(k[e] - values[j]) <= fabsf(values[j]) * 0x1p-10f + 0x1p-18f);
            }
            kvt_guarded_free(workspace);
            kvt_cache_free(&u.c);
        }
    free(k);
    free(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lloyd),        cmocka_unit_test(test_codes),
        cmocka_unit_test(test_small_scales), cmocka_unit_test(test_ties),
        cmocka_unit_test(test_edges),        cmocka_unit_test(test_constant_groups),
    };
    kernels = kvq_kernels_get(KVQ_ISA_BEST);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
