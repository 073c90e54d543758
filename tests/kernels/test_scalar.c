// SPDX-License-Identifier: Apache-2.0
//
// Scalar codecs, every one of them: all codecs, bits, axes, groups, zeros and head_dims, whether a
// named format has them or not. What each instruction set's functions write must be C's bytes, and
// what they read C's values within 1e-5. Nothing outside a group's own bytes is touched, and what
// is finite stays finite. check.c tries some of this with random shapes.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kernels/internal.h"
#include "tests/kernels/kvtest.h"

enum { MAX_SIDES = 256, MAX_ROWS = 9 };

static struct kvq_side sides[MAX_SIDES];
static size_t n_sides;

// ---- All sides ----

// Adds a side if a format may have it.
static void add_side(struct kvq_side side)
{
    char text[300];
    struct kvq_format f = {.name = "side", .k = side, .v = side, .unit_tokens = 128};
    if (kvq_format_check(&f, text, sizeof text) == 0) {
        assert_true(n_sides < MAX_SIDES);
        sides[n_sides++] = side;
    }
}

// All choices of a codec's own.
static void add_codec(struct kvq_side side)
{
    bool affine = side.codec == KVQ_CODEC_AFFINE, lloyd = side.codec == KVQ_CODEC_LLOYD;
    for (uint8_t choice = 0; choice <= (affine ? KVQ_ZERO_FITTED : 1); choice++) {
        struct kvq_side s = side;
        s.zero = affine ? choice : 0;
        s.full = !affine && !lloyd ? choice : 0;
        s.wide = lloyd ? choice : 0;
        add_side(s);
    }
}

static void add_sides(void)
{
    static const uint8_t bits[] = {1, 2, 3, 4, 8};
    static const uint16_t groups[] = {0, 32, 64, 128};
    for (uint8_t codec = KVQ_CODEC_AFFINE; codec <= KVQ_CODEC_LLOYD; codec++)
        for (size_t b = 0; b < sizeof bits; b++)
            for (uint8_t axis = KVQ_PER_CHANNEL; axis <= KVQ_PER_TOKEN; axis++)
                for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
                    add_codec((struct kvq_side){
                        .codec = codec, .bits = bits[b], .axis = axis, .group = groups[g]});
}

// ---- One of them ----

struct run {
    const struct kvq_kernels *c, *k;
    struct kvt_rng rng;
    struct kvq_side side;
    struct kvq__codec codec;
    uint32_t dim;
    bool v;
    float *rows; // [128][dim]
    uint8_t *record;
};

static void fail_at(const struct run *r, const char *what, double got, double want)
{
    const struct kvq_side *s = &r->side;
    fail_msg("%s, %s of %c, codec %u, %u bits, %s, group %u, zero %u, full %u, wide %u, dim %u: "
             "%.9g, C has %.9g",
             kvq_kernels_isa(r->k), what, r->v ? 'V' : 'K', s->codec, s->bits,
             s->axis == KVQ_PER_CHANNEL ? "per channel" : "per token", s->group, s->zero, s->full,
             s->wide, r->dim, got, want);
}

static void compare(const struct run *r, const char *what, const float *got, const float *want,
                    size_t n, const float *scale, size_t row)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(got[i] - want[i]) <= 1e-5f * scale[i / row] + 1e-30f))
            fail_at(r, what, (double)got[i], (double)want[i]);
}

static float largest(const float *x, size_t n)
{
    float top = 0;
    for (size_t i = 0; i < n; i++)
        top = fmaxf(top, fabsf(x[i]));
    return top;
}

static void quantize(const struct run *r, const struct kvq_kernels *k, uint8_t *record)
{
    const struct kvq__side *side = r->v ? &r->codec.v : &r->codec.k;
    for (uint32_t t = 0; t < KVQ_BLOCK_TOKENS; t += side->span)
        (r->v ? k->quant_v : k->quant_k)[side->kind](&r->codec, r->rows + (size_t)t * r->dim,
                                                     record, t / KVQ_GROUP_TOKENS);
}

static void set_norms(struct run *r)
{
    for (uint32_t g = 0; g < KVQ_BLOCK_GROUPS && r->codec.has_norms; g++) {
        struct kvq_packed packed = kvq_packed_at(&r->codec.layout, r->record, g);
        uint16_t *norms = (uint16_t *)(void *)(packed.group + r->codec.layout.k_norms);
        for (int t = 0; t < KVQ_GROUP_TOKENS; t++)
            norms[t] = kvq__f32_to_f16(0.1f + fabsf(kvt_normal(&r->rng)));
    }
}

// Numbers at the ends of what quantizing meets; kinds from KVT_KINDS on.
enum { ZEROS = KVT_KINDS, SIGNED_ZEROS, CONSTANT, SUBNORMAL, TINY, HUGE_NUMBERS, TIES, MIXED, ALL };

static float edge(struct kvt_rng *rng, int kind, uint32_t t, uint32_t c)
{
    float x = kvt_normal(rng);
    switch (kind) {
    case ZEROS:
        return 0.0f;
    case SIGNED_ZEROS:
        return x < 0 ? -0.0f : 0.0f;
    case CONSTANT:
        return -3.140625f;
    case SUBNORMAL:
        return x * 0x1p-140f;
    case TINY: // around the smallest scale that fp16 holds
        return x * 0x1p-22f;
    case HUGE_NUMBERS: // what packing limits numbers to: their squares are infinite
        return x < 0 ? -0x1p119f : x * 0x1p117f;
    case TIES:
        return 0.5f * (float)((int)kvt_below(rng, 17) - 8);
    default: // by channels and by tokens
        return edge(rng, ZEROS + (int)((t % 7 == 3 ? c % 3 : c % 5 + t / 32) % (MIXED - ZEROS)), t,
                    c);
    }
}

static void fill(struct kvt_rng *rng, int kind, float *rows, uint32_t dim)
{
    if (kind < KVT_KINDS)
        kvt_fill(rng, (enum kvt_kind)kind, rows, KVQ_BLOCK_TOKENS, dim);
    for (uint32_t i = 0; i < KVQ_BLOCK_TOKENS * dim && kind >= KVT_KINDS; i++)
        rows[i] = edge(rng, kind, i / dim, i % dim);
}

static struct run start(const struct kvq_kernels *k, const struct kvq_side *side, uint32_t dim,
                        bool v, int kind)
{
    static uint64_t seed;
    struct kvq_format f = {.name = "side", .k = *side, .v = *side, .unit_tokens = 128};
    struct kvq_shape s = kvt_shape(1, 1, dim, KVQ_F16);
    f.k_token_scale = dim == 128 ? KVQ_SCALE_L2_HEAD : KVQ_SCALE_NONE;
    struct run r = {.c = kvq_kernels_get(KVQ_ISA_C), .k = k, .rng = {kvt_seed() + seed++}};
    r.side = *side;
    r.dim = dim;
    r.v = v;
    r.codec = kvq__codec_of(&f, &s, NULL, 0);
    r.rows = kvt_guarded(sizeof(float) * KVQ_BLOCK_TOKENS * dim, 0);
    r.record = kvt_guarded(r.codec.layout.record_bytes, 0);
    fill(&r.rng, kind, r.rows, dim);
    quantize(&r, r.c, r.record);
    return r;
}

static void finish(struct run *r)
{
    kvt_guarded_free(r->rows);
    kvt_guarded_free(r->record);
}

// ---- Quantizing ----

// The same bytes; also those that no function may touch, which hold the guard's pattern.
static void check_quant(struct run *r)
{
    uint8_t *other = kvt_guarded(r->codec.layout.record_bytes, 0);
    quantize(r, r->k, other);
    for (uint32_t i = 0; i < r->codec.layout.record_bytes; i++)
        if (other[i] != r->record[i])
            fail_at(r, "a byte", other[i], r->record[i]);
    kvt_guarded_free(other);
}

// ---- Reading ----

static void check_dequant(struct run *r, uint32_t group)
{
    size_t n = (size_t)KVQ_GROUP_TOKENS * r->dim;
    float *a = kvt_guarded(sizeof(float) * n, 0), *b = kvt_guarded(sizeof(float) * n, 0);
    struct kvq_packed packed = kvq_packed_at(&r->codec.layout, r->record, group);
    uint8_t kind = r->v ? r->codec.v.kind : r->codec.k.kind;
    (r->v ? r->c->dequant_v : r->c->dequant_k)[kind](&r->codec, &packed, a);
    (r->v ? r->k->dequant_v : r->k->dequant_k)[kind](&r->codec, &packed, b);
    float scale = largest(a, n);
    compare(r, "a value", b, a, n, &scale, n);
    for (size_t i = 0; i < n; i++)
        assert_true(isfinite(b[i]));
    kvt_guarded_free(a);
    kvt_guarded_free(b);
}

static struct kvq__tile tile_of(const struct run *r, uint32_t rows, float *q, float *ot)
{
    struct kvq__tile t = {.codec = &r->codec, .rows = rows, .dim = r->dim, .q = q, .qt = q};
    t.o = t.ot = ot;
    t.group_f32 = kvt_guarded(sizeof(float) * KVQ_GROUP_TOKENS * r->dim, 0);
    t.ahead = r->record; // prefetching may read what it likes, and change nothing
    return t;
}

static float length(const float *x, uint32_t n)
{
    float sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrtf(sum);
}

static void check_logits(struct run *r, const struct kvq_packed *packed, uint32_t rows)
{
    size_t n = (size_t)MAX_ROWS * KVQ__LOGITS_STRIDE;
    float *q = kvt_guarded(sizeof(float) * rows * r->dim, 0), longest = 0;
    float *a = kvt_guarded(sizeof(float) * n, 0), *b = kvt_guarded(sizeof(float) * n, 0);
    kvt_fill(&r->rng, KVT_NORMAL, q, rows, r->dim);
    struct kvq__tile tile = tile_of(r, rows, q, NULL);
    kvq__qk_packed(r->c, &tile, packed, a);
    kvq__qk_packed(r->k, &tile, packed, b);
    r->c->dequant_k[r->codec.k.kind](&r->codec, packed, tile.group_f32);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        longest = fmaxf(longest, length(tile.group_f32 + t * r->dim, r->dim));
    for (uint32_t i = 0; i < rows; i++) {
        float scale = length(q + i * r->dim, r->dim) * longest;
        compare(r, "a logit", b + i * KVQ__LOGITS_STRIDE, a + i * KVQ__LOGITS_STRIDE,
                KVQ_GROUP_TOKENS, &scale, KVQ_GROUP_TOKENS);
        memset(b + i * KVQ__LOGITS_STRIDE, 0, sizeof(float) * KVQ_GROUP_TOKENS);
        memset(a + i * KVQ__LOGITS_STRIDE, 0, sizeof(float) * KVQ_GROUP_TOKENS);
    }
    assert_memory_equal(a, b, sizeof(float) * n); // the rest is as it was
    kvt_guarded_free(tile.group_f32);
    kvt_guarded_free(q);
    kvt_guarded_free(a);
    kvt_guarded_free(b);
}

static void check_sums(struct run *r, const struct kvq_packed *packed, uint32_t rows)
{
    size_t n = (size_t)rows * r->dim;
    float *p = kvt_guarded(sizeof(float) * rows * KVQ__LOGITS_STRIDE, 0), scale[MAX_ROWS];
    float *a = kvt_guarded(sizeof(float) * n, 0), *b = kvt_guarded(sizeof(float) * n, 0);
    struct kvq__tile ta = tile_of(r, rows, NULL, a), tb = tile_of(r, rows, NULL, b);
    for (size_t i = 0; i < (size_t)rows * KVQ__LOGITS_STRIDE; i++)
        p[i] = kvt_below(&r->rng, 4) ? fabsf(kvt_normal(&r->rng)) : 0.0f;
    for (size_t i = 0; i < n; i++)
        a[i] = b[i] = kvt_normal(&r->rng);
    kvq__pv_packed(r->c, &ta, packed, p);
    kvq__pv_packed(r->k, &tb, packed, p);
    for (uint32_t i = 0; i < rows; i++)
        scale[i] = largest(a + i * r->dim, r->dim);
    compare(r, "a sum", b, a, n, scale, r->dim);
    kvt_guarded_free(ta.group_f32);
    kvt_guarded_free(tb.group_f32);
    kvt_guarded_free(p);
    kvt_guarded_free(a);
    kvt_guarded_free(b);
}

// A row's result is the same to the bit whatever other rows stand in the tile.
static void check_rows(struct run *r, const struct kvq_packed *packed)
{
    static const uint32_t counts[] = {2, 3, 4, 6, 8, MAX_ROWS};
    size_t logits = (size_t)MAX_ROWS * KVQ__LOGITS_STRIDE, n = (size_t)MAX_ROWS * r->dim;
    float *q = kvt_guarded(sizeof(float) * n, 0), *p = kvt_guarded(sizeof(float) * logits, 0);
    float *a = kvt_guarded(sizeof(float) * logits, 0), *b = kvt_guarded(sizeof(float) * logits, 0);
    kvt_fill(&r->rng, KVT_NORMAL, q, MAX_ROWS, r->dim);
    kvt_fill(&r->rng, KVT_NORMAL, p, MAX_ROWS, KVQ__LOGITS_STRIDE);
    uint32_t rows = counts[kvt_below(&r->rng, sizeof counts / sizeof *counts)];
    uint32_t stride = r->v ? r->dim : KVQ__LOGITS_STRIDE;
    memset(a, 0, sizeof(float) * logits);
    memset(b, 0, sizeof(float) * logits);
    struct kvq__tile all = tile_of(r, rows, q, a);
    (r->v ? kvq__pv_packed(r->k, &all, packed, p) : kvq__qk_packed(r->k, &all, packed, a));
    for (uint32_t i = 0; i < rows; i++) {
        struct kvq__tile one = tile_of(r, 1, q + i * r->dim, b + i * stride);
        if (r->v)
            kvq__pv_packed(r->k, &one, packed, p + i * KVQ__LOGITS_STRIDE);
        else
            kvq__qk_packed(r->k, &one, packed, b + i * stride);
        kvt_guarded_free(one.group_f32);
    }
    for (uint32_t i = 0; i < rows * stride; i++)
        if (kvq__bits(a[i]) != kvq__bits(b[i]))
            fail_at(r, "a row among others", (double)a[i], (double)b[i]);
    kvt_guarded_free(all.group_f32);
    kvt_guarded_free(q);
    kvt_guarded_free(p);
    kvt_guarded_free(a);
    kvt_guarded_free(b);
}

static void check_read(struct run *r)
{
    static const uint32_t rows[] = {1, 2, 3, 4, 5, 7, MAX_ROWS};
    uint32_t group = kvt_below(&r->rng, KVQ_BLOCK_GROUPS);
    struct kvq_packed packed = kvq_packed_at(&r->codec.layout, r->record, group);
    set_norms(r);
    check_dequant(r, group);
    uint32_t n = rows[kvt_below(&r->rng, sizeof rows / sizeof *rows)];
    if (r->v)
        check_sums(r, &packed, n);
    else
        check_logits(r, &packed, n);
    check_rows(r, &packed);
}

static void check_edges(struct run *r)
{
    check_dequant(r, kvt_below(&r->rng, KVQ_BLOCK_GROUPS));
}

// ---- All of them ----

static void for_all(int kind, void (*check)(struct run *r))
{
    for (int isa = KVQ_ISA_AVX2; isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        if (k->isa != isa)
            continue;
        for (size_t i = 0; i < n_sides; i++)
            for (uint32_t at = 0; at < 6; at++) {
                if (kind > KVT_OUTLIERS && at / 2 != (i + (size_t)kind) % 3)
                    continue; // a head_dim for each is enough there
                struct run r = start(k, &sides[i], 64u << at / 2, at % 2, kind);
                check(&r);
                finish(&r);
            }
    }
}

static void test_quant(void **state)
{
    (void)state;
    for (int kind = 0; kind < ALL; kind++)
        for_all(kind, check_quant);
}

static void test_read(void **state)
{
    (void)state;
    for (int kind = 0; kind < KVT_EXTREME; kind++)
        for_all(kind, check_read);
}

// What numbers at the ends became reads back finite.
static void test_read_edges(void **state)
{
    (void)state;
    for (int kind = KVT_EXTREME; kind < ALL; kind++)
        for_all(kind, check_edges);
}

// How many there are follows from what formats may have.
static void test_sides(void **state)
{
    (void)state;
    assert_int_equal(n_sides, 105 + 56 + 42 + 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sides),
        cmocka_unit_test(test_read),
        cmocka_unit_test(test_read_edges),
        cmocka_unit_test(test_quant),
    };
    add_sides();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
