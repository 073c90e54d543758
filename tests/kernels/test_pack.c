// SPDX-License-Identifier: Apache-2.0
//
// Packing: known answers, edge cases of the numbers, sizes, and the same bytes whatever the
// pieces that tokens came in. The bytes of other instruction sets are compared in check.c.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/internal.h"
#include "tests/kernels/kvtest.h"

static const struct kvq_kernels *kernels;

// A row of the table without a transform or a token scale, to see the quantizer alone.
static struct kvq_format plain_format(uint32_t bits)
{
    struct kvq_format f = *kvq_format_by_name("oscar2");
    f.k_rotation = KVQ_ROTATE_NONE;
    f.k_token_scale = KVQ_SCALE_NONE;
    f.k.bits = f.v.bits = (uint8_t)bits;
    f.unit_tokens = 32;
    return f;
}

// One group of 32 tokens of one head, packed.
struct packed {
    struct kvq_shape shape;
    struct kvq_format format;
    float *k, *v;   // [32][dim], as given
    uint8_t *group; // what came out
    struct kvq_store_counts counts;
    uint8_t *raw, *block;
};

static struct packed packed_of(const struct kvq_format *f, uint32_t dim, uint8_t dtype)
{
    struct packed p = {.shape = kvt_shape(1, 1, dim, dtype), .format = *f};
    p.format.unit_tokens = 32;
    struct kvq_raw_layout raw = kvq_raw_layout_of(&p.shape);
    struct kvq_layout l = kvq_layout_of(&p.format, &p.shape);
    p.k = kvt_guarded(sizeof(float) * 32 * dim, 0);
    p.v = kvt_guarded(sizeof(float) * 32 * dim, 0);
    p.raw = kvt_guarded(kvq_raw_bytes(&raw, 32), 0);
    p.block = p.group = kvt_guarded(l.record_bytes, 0);
    return p;
}

static void pack(struct packed *p)
{
    void *workspace = kvt_workspace();
    struct kvq_view k = kvt_view(p->k, 1, p->shape.k_dim), v = kvt_view(p->v, 1, p->shape.k_dim);
    kvq_store(kernels, &p->shape, &k, &v, 0, 0, 32, p->raw, &p->counts);
    kvq_pack(kernels, &p->format, &p->shape,
             &(struct kvq_unit){.raw_block = p->raw, .packed_block = p->block}, workspace);
    kvt_guarded_free(workspace);
}

static void free_packed(struct packed *p)
{
    kvt_guarded_free(p->k);
    kvt_guarded_free(p->v);
    kvt_guarded_free(p->raw);
    kvt_guarded_free(p->block);
}

static double key(const struct packed *p, uint32_t t, uint32_t c)
{
    return kvt_group_k(p->group, p->shape.k_dim, p->format.k.bits,
                       p->format.k_token_scale != KVQ_SCALE_NONE, t, c);
}

static double value(const struct packed *p, uint32_t t, uint32_t c)
{
    struct kvq_layout l = kvq_layout_of(&p->format, &p->shape);
    return kvt_group_v(p->group + l.v_codes, p->shape.k_dim, p->format.v.bits, t, c);
}

static uint16_t u16_at(const uint8_t *p, uint32_t i)
{
    uint16_t x;
    memcpy(&x, p + 2 * i, 2);
    return x;
}

// ---- Known answers ----

// The quantizer again, from its description in docs/formats.md, one number at a time. The nearest
// fp16 is found by search.
static double nearest_f16(double x)
{
    uint16_t best = 0;
    for (uint32_t h = 0; h <= 0x7bff; h++) {
        double d = fabs(kvt_f16((uint16_t)h) - fabs(x)), least = fabs(kvt_f16(best) - fabs(x));
        if (d < least || (d == least && h % 2 == 0))
            best = (uint16_t)h;
    }
    return x < 0 ? -kvt_f16(best) : kvt_f16(best);
}

static void expect(const float *x, uint32_t stride, uint32_t bits, double *want)
{
    float min = x[0], max = x[0];
    double top = (1 << bits) - 1;
    for (int i = 1; i < 32; i++) {
        min = fminf(min, x[i * stride]);
        max = fmaxf(max, x[i * stride]);
    }
    float scale = (float)nearest_f16((max - min) / (float)top);
    float zero = (float)nearest_f16(-rintf(-min / scale) * scale), inverse = 1 / scale;
    for (int i = 0; i < 32; i++) {
        double code = fmin(fmax(rintf((x[i * stride] - zero) * inverse), 0), top);
        want[i] = (double)scale * code + zero;
    }
}

static void test_known_answers(void **state)
{
    (void)state;
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (uint32_t dim = 64; dim <= 256; dim *= 2) {
            struct kvq_format f = plain_format(bits);
            struct packed p = packed_of(&f, dim, KVQ_F16);
            struct kvt_rng rng = {.state = kvt_seed()};
            double want[32];
            kvt_fill(&rng, KVT_NORMAL, p.k, 32, dim);
            kvt_fill(&rng, KVT_NORMAL, p.v, 32, dim);
            for (uint32_t i = 0; i < 32 * dim; i++) { // representable, so that storing is exact
                p.k[i] = roundf(p.k[i] * 128) / 128;
                p.v[i] = roundf(p.v[i] * 128) / 128;
            }
            pack(&p);
            for (uint32_t c = 0; c < dim; c += 1 + c % 7) {
                expect(p.k + c, dim, bits, want);
                for (uint32_t t = 0; t < 32; t++)
                    assert_true(key(&p, t, c) == want[t]);
            }
            for (uint32_t t = 0; t < 32; t += 5)
                for (uint32_t g = 0; g < dim; g += 32) {
                    expect(p.v + t * dim + g, 1, bits, want);
                    for (uint32_t c = 0; c < 32; c++)
                        assert_true(value(&p, t, g + c) == want[c]);
                }
            free_packed(&p);
        }
}

// The order of the operations, which is part of the format, on numbers where it shows.
static void test_order_of_operations(void **state)
{
    struct kvt_rng rng = {.state = kvt_seed()};
    float *x = kvt_guarded(sizeof(float) * 256, 0), *sum = kvt_guarded(sizeof(float), 0);
    (void)state;
    for (uint32_t dim = 64; dim <= 256; dim *= 2) {
        float a[256], b[256], lanes[16] = {0};
        kvt_fill(&rng, KVT_NORMAL, x, 1, dim);
        for (uint32_t i = 0; i < dim; i++) {
            a[i] = x[i];
            lanes[i % 16] += x[i] * x[i];
        }
        for (uint32_t h = 1; h < dim; h *= 2) {
            for (uint32_t i = 0; i < dim; i++)
                b[i] = i & h ? a[i ^ h] - a[i] : a[i] + a[i ^ h];
            memcpy(a, b, sizeof a);
        }
        for (uint32_t step = 8; step > 0; step /= 2)
            for (uint32_t i = 0; i < step; i++)
                lanes[i] += lanes[i + step];
        kernels->sumsq(x, 1, dim, sum);
        kernels->hadamard(x, 1, dim, NULL, NULL);
        assert_true(*sum == lanes[0]);
        for (uint32_t i = 0; i < dim; i++)
            assert_true(x[i] == a[i] * (float)(1 / sqrt(dim)));
    }
    kvt_guarded_free(x);
    kvt_guarded_free(sum);
}

// Whole formats: each transformed key lies within one step of its code, since an integer zero
// point may clamp half a step at either end, and rounding takes another half.
static void test_reconstruction(void **state)
{
    (void)state;
    for (const struct kvq_format *f = kvq_format_by_name("oscar2"); f->k_token_scale; f++)
        for (uint32_t dim = 64; dim <= 256; dim *= 2) {
            struct packed p = packed_of(f, dim, KVQ_F16);
            struct kvt_rng rng = {.state = kvt_seed() + dim};
            const uint8_t *scales = p.group + 32 * dim * f->k.bits / 8;
            kvt_fill(&rng, KVT_OUTLIERS, p.k, 32, dim);
            kvt_fill(&rng, KVT_OUTLIERS, p.v, 32, dim);
            pack(&p);
            for (uint32_t t = 0; t < 32; t++) {
                double norm = kvt_f16(u16_at(scales + 4 * dim, t)), sum = 0;
                for (uint32_t c = 0; c < dim; c++) {
                    double rotated = 0; // by the definition of the Sylvester matrix
                    for (uint32_t i = 0; i < dim; i++)
                        rotated += (__builtin_popcount(i & c) % 2 ? -1 : 1) * p.k[t * dim + i];
                    rotated /= sqrt(dim);
                    sum += rotated * rotated;
                    double step = norm * kvt_f16(u16_at(scales, c));
                    assert_true(fabs(key(&p, t, c) - rotated) <= 1.01 * step + 1e-3 * norm);
                }
                assert_true(fabs(norm - sqrt(sum)) <= 1e-3 * sqrt(sum));
            }
            free_packed(&p);
        }
}

// What the oracle reads back in the engine's basis is near what was handed over: keys and values
// were rotated when packed if and only if they are rotated back.
static void test_rotation(void **state)
{
    (void)state;
    for (uint32_t rotation = KVQ_V_ROT_NONE; rotation <= KVQ_V_ROT_DAEMON; rotation++) {
        struct kvq_shape s = kvt_shape(1, 2, 128, KVQ_F16);
        double k[128], v[128], off_k = 0, off_v = 0, all = 0;
        s.v_rotation = (uint8_t)rotation;
        struct kvt_cache c = kvt_cache(kernels, "oscar4", s, 128, -1, KVT_NORMAL, kvt_seed());
        struct kvt_request r = kvt_request(&c, 1, 1);
        for (uint32_t t = 0; t < 128; t++) {
            assert_true(kvt_key(&r.a, 1, t, k, v));
            for (uint32_t i = 0; i < 128; i++) {
                size_t at = (size_t)(2 * t + 1) * 128 + i;
                off_k += pow(k[i] - c.k[at], 2);
                off_v += pow(v[i] - c.v[at], 2);
                all += pow(c.k[at], 2);
            }
        }
        assert_true(off_k < 0.02 * all && off_v < 0.02 * all);
        kvt_request_free(&r);
        kvt_cache_free(&c);
    }
}

// OScaR, appendix I: a token with one huge channel beside a small one. Divided by their norms
// they are of a size, and the small one survives; without, it is lost.
static void test_token_scaling(void **state)
{
    (void)state;
    struct kvq_format scaled = plain_format(2), unscaled = scaled;
    scaled.k_token_scale = KVQ_SCALE_L2_HEAD;
    struct packed a = packed_of(&scaled, 64, KVQ_F16), b = packed_of(&unscaled, 64, KVQ_F16);
    for (uint32_t i = 0; i < 32 * 64; i++) {
        uint32_t t = i / 64, c = i % 64;
        a.k[i] = c > 3 ? 0.0f : t % 2 ? 0.1f : c == 3 ? 100.0f : 1.0f;
        a.v[i] = b.v[i] = 0.0f;
        b.k[i] = a.k[i];
    }
    pack(&a);
    pack(&b);
    const uint8_t *norms = a.group + 32 * 64 * 2 / 8 + 4 * 64;
    assert_true(kvt_f16(u16_at(norms, 0)) == nearest_f16(sqrt(10003)));
    double norm = kvt_f16(u16_at(norms, 1));
    assert_true(fabs(norm - 0.2) < 1e-3);
    assert_true(fabs(key(&a, 1, 0) / norm - 0.5) < 0.02);
    assert_true(fabs(key(&a, 0, 0) / kvt_f16(u16_at(norms, 0)) - 0.01) < 0.02);
    assert_true(fabs(key(&a, 1, 3) - 0.1) < 0.02);
    assert_true(key(&b, 1, 3) == 0.0);
    free_packed(&a);
    free_packed(&b);
}

static uint64_t fnv(const uint8_t *p, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

// The bytes of the formats, frozen. If this fails, either a kernel is wrong, or KVQ_LAYOUT_ID
// must change, since caches on disk would be misread.
static void test_frozen_bytes(void **state)
{
    static const struct {
        const char *format;
        uint32_t dim;
        uint64_t hash;
    } frozen[] = {
        {"oscar2", 128, 0x1e312cd40624e0c6u},
        {"oscar3", 128, 0x0cb7d47f9c9182d3u},
        {"oscar4", 128, 0x184b0a82424dbe74u},
        {"oscar2", 64, 0xa47e5a91f8de640eu},
        {"oscar3", 64, 0x3777b559337118ddu},
        {"oscar3", 256, 0x6ef7996a9788f682u},
        {"oscar2-xh", 128, 0x61ff7de88160e230u},
        {"f16", 128, 0x6acb5d066f1dbd81u},
        {"kivi1", 128, 0x8b87caa3a3ea6df5u},
        {"kivi1", 64, 0x8e4d814c4f1ee99bu},
        {"kivi2", 128, 0x52b6e64169ca798du},
        {"kivi4", 256, 0xf0f8c31e08cf8d52u},
        {"ott2-o0", 128, 0x73967e790ec4362eu},
        {"oscar2-max", 128, 0x7f86648d90857b2cu},
        {"oscar2-mean-g64", 128, 0x391f1827bec0f76bu},
        {"innerq-base-nosmooth-s0", 128, 0xdc63f2453c480611u},
        {"innerq-hybrid-nosmooth-s0", 128, 0x5c77667cd1efed14u},
        {"innerq-small-nosmooth-s0-full", 64, 0x693ad5e14aaf6d06u},
        {"quarot2", 128, 0x913c1e0381b1be82u},
        {"turboquant2.5", 128, 0x4f08b2108016c5a5u},
        {"turboquant2.5", 64, 0x4f3f084a045da36bu},
        {"turboquant-k4v3", 128, 0x7a9de7b0d446a7edu},
        {"int8", 128, 0x349c14ddc62baf61u},
        {"int8", 256, 0xc1aeb374df5c3d48u},
        {"k8v4", 64, 0xe245afd71c01fba3u},
        {"oscar3-g128+turboquant3:vbits=2", 128, 0xe5f1cea767217eabu},
        {"oscar3-g128+turboquant3:vbits=2", 64, 0x7af47c52b6fd2b5du},
        {"kvq2-fm-s0", 128, 0x86b06038fc720c72u},
        {"kvq2-fm-s0", 64, 0x83c8b275e636f3d8u},
        {"kvq2-s0", 128, 0xd0eb7b552b8d7f82u},
        {"oscar2-fit", 64, 0x37b7815f51867ba9u},
    };
    (void)state;
    for (size_t i = 0; i < sizeof frozen / sizeof *frozen; i++) {
        struct kvq_shape s = kvt_shape(1, 2, frozen[i].dim, KVQ_F16);
        struct kvt_cache c = kvt_cache(kernels, frozen[i].format, s, 128, -1, KVT_NORMAL, 4711);
        for (uint32_t j = 0; j < 128 * 2 * frozen[i].dim; j++) { // simple numbers, no libm
            c.k[j] = (float)((j * 2654435761u >> 20) % 257) / 64.0f - 2.0f;
            c.v[j] = (float)((j * 2246822519u >> 20) % 263) / 64.0f - 2.0f;
        }
        struct kvq_layout l = kvq_layout_of(c.format, &s);
        struct kvq_view k = kvt_view(c.k, 2, s.k_dim), v = kvt_view(c.v, 2, s.k_dim);
        struct kvq_store_counts counts = {0};
        void *workspace = kvt_workspace();
        for (uint32_t h = 0; h < 2; h++)
            kvq_store(kernels, &s, &k, &v, h, 0, 128, c.raw, &counts);
        uint32_t unit = c.format->unit_tokens;
        assert_null(c.extras);
        for (uint32_t i = 0; i < 2 * 128 / unit; i++)
            kvq_pack(kernels, c.format, &s,
                     &(struct kvq_unit){.raw_block = c.raw,
                                        .packed_block = c.blocks,
                                        .head = i % 2,
                                        .first = i / 2 * unit},
                     workspace);
        uint64_t hash = fnv(c.blocks, kvq_block_bytes(&l, &s));
        if (hash != frozen[i].hash)
            fail_msg("%s at head_dim %u has bytes 0x%016llx", frozen[i].format, frozen[i].dim,
                     (unsigned long long)hash);
        kvt_guarded_free(workspace);
        kvt_cache_free(&c);
    }
}

// ---- Edges ----

static void fill_all(struct packed *p, float k, float v)
{
    for (uint32_t i = 0; i < 32u * p->shape.k_dim; i++) {
        p->k[i] = k;
        p->v[i] = v;
    }
}

static void test_constant_groups(void **state)
{
    static const float values[] = {0.0f, 1.0f, -3.140625f, 65504.0f, 0x1p-24f, -0x1p-14f};
    (void)state;
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
            struct kvq_format f = plain_format(bits);
            struct packed p = packed_of(&f, 64, KVQ_F16);
            fill_all(&p, values[i], -values[i]);
            pack(&p);
            for (uint32_t t = 0; t < 32; t++)
                for (uint32_t c = 0; c < 64; c++) {
                    assert_true(key(&p, t, c) == values[i]);
                    assert_true(value(&p, t, c) == -values[i]);
                }
            free_packed(&p);
        }
}

static void test_zeros(void **state)
{
    (void)state;
    struct packed p = packed_of(kvq_format_by_name("oscar2"), 128, KVQ_F16);
    fill_all(&p, -0.0f, 0.0f);
    p.v[5] = -0.0f; // of mixed sign, to whose bytes the order of a minimum must not matter
    pack(&p);
    struct kvq_layout l = kvq_layout_of(&p.format, &p.shape);
    for (uint32_t t = 0; t < 32; t++) {
        assert_int_equal(u16_at(p.group + l.k_norms, t), 0x3c00); // a norm of 0 is stored as 1
        for (uint32_t c = 0; c < 128; c++) {
            assert_true(key(&p, t, c) == 0.0);
            assert_true(value(&p, t, c) == 0.0);
        }
    }
    for (uint32_t i = 0; i < 128; i++) {
        assert_int_equal(u16_at(p.group + l.k_zeros, i), 0);
        assert_int_equal(u16_at(p.group + l.v_zeros, i), 0);
    }
    free_packed(&p);
}

// A zero that comes out of the zero point, from either side, has no sign.
static void test_zero_has_no_sign(void **state)
{
    static const float lowest[] = {-0.1f, -0.0f, 0.0f, 0.1f};
    (void)state;
    for (size_t i = 0; i < sizeof lowest / sizeof *lowest; i++) {
        struct kvq_format f = plain_format(2);
        struct packed p = packed_of(&f, 64, KVQ_F16);
        struct kvq_layout l = kvq_layout_of(&p.format, &p.shape);
        for (uint32_t j = 0; j < 32 * 64; j++)
            p.k[j] = p.v[j] = (j / 64 + j % 64) % 2 ? 3.0f : lowest[i];
        pack(&p);
        for (uint32_t j = 0; j < 64; j++) {
            assert_int_equal(u16_at(p.group + l.k_zeros, j), 0);
            assert_int_equal(u16_at(p.group + l.v_zeros, j), 0);
        }
        free_packed(&p);
    }
}

// Everything finite, and keys within a step of what was given, at both ends of the range.
static void check_scale_of_numbers(float factor, uint8_t dtype, double floor)
{
    for (const struct kvq_format *f = kvq_format_by_name("oscar2"); strcmp(f->name, "oscar2-xh");
         f++) {
        struct packed p = packed_of(f, 128, dtype);
        struct kvt_rng rng = {.state = kvt_seed() + f->k.bits};
        kvt_fill(&rng, KVT_NORMAL, p.k, 32, 128);
        for (uint32_t i = 0; i < 32 * 128; i++)
            p.v[i] = p.k[i] = fmaxf(fminf(p.k[i], 2.0f), -2.0f) * factor;
        pack(&p);
        struct kvq_layout l = kvq_layout_of(&p.format, &p.shape);
        for (uint32_t t = 0; t < 32; t++)
            for (uint32_t c = 0; c < 128; c++) {
                uint32_t slot = c / 32 * 32 + kvq_v_slot(t);
                double step = kvt_f16(u16_at(p.group + l.v_scales, slot));
                double error = fabs(value(&p, t, c) - p.v[t * 128 + c]);
                assert_true(isfinite(key(&p, t, c)) && isfinite(value(&p, t, c)));
                assert_true(error <= 1.01 * step + floor);
            }
        free_packed(&p);
    }
}

static void test_small_and_large(void **state)
{
    (void)state;
    // A scale below 2^-14 is a multiple of 2^-24 and may be off by half of that, times 15 steps.
    check_scale_of_numbers(0x1p-20f, KVQ_F16, 0x1p-21);
    check_scale_of_numbers(0x1p-24f, KVQ_F16, 0x1p-21);
    check_scale_of_numbers(0x1p-60f, KVQ_BF16, 0x1p-24);
    check_scale_of_numbers(0x1p-126f, KVQ_BF16, 0x1p-24);
    check_scale_of_numbers(32000.0f, KVQ_F16, 64.0);
    check_scale_of_numbers(0x1p126f, KVQ_BF16, INFINITY); // beyond fp16's reach: finite, no more
}

// Keys whose norm fp16 cannot hold: the stored norm stops at 65504 and the scales take the rest.
static void test_huge_norms(void **state)
{
    (void)state;
    struct packed p = packed_of(kvq_format_by_name("oscar4"), 128, KVQ_BF16);
    struct kvq_layout l = kvq_layout_of(&p.format, &p.shape);
    struct kvt_rng rng = {.state = kvt_seed()};
    kvt_fill(&rng, KVT_NORMAL, p.k, 32, 128);
    for (uint32_t i = 0; i < 32 * 128; i++) {
        p.k[i] *= 1e8f;
        p.v[i] = 0.0f;
    }
    pack(&p);
    for (uint32_t t = 0; t < 32; t++) {
        double error = 0, all = 0, rotated[128];
        assert_int_equal(u16_at(p.group + l.k_norms, t), 0x7bff);
        for (uint32_t c = 0; c < 128; c++) {
            rotated[c] = 0;
            for (uint32_t i = 0; i < 128; i++)
                rotated[c] += (__builtin_popcount(i & c) % 2 ? -1 : 1) * p.k[t * 128 + i];
            rotated[c] /= sqrt(128);
            error += pow(key(&p, t, c) - rotated[c], 2);
            all += rotated[c] * rotated[c];
        }
        assert_true(error < 0.02 * all);
    }
    free_packed(&p);
}

static void test_store_counts(void **state)
{
    (void)state;
    struct packed p = packed_of(kvq_format_by_name("oscar2"), 64, KVQ_F16);
    fill_all(&p, 1.0f, 2.0f);
    p.k[3] = NAN;
    p.k[70] = INFINITY;
    p.v[9] = -INFINITY;
    p.v[10] = 1e6f;
    p.v[11] = -65520.0f;
    p.v[12] = 65504.0f;
    struct kvq_view k = kvt_view(p.k, 1, 64), v = kvt_view(p.v, 1, 64);
    kvq_store(kernels, &p.shape, &k, &v, 0, 0, 32, p.raw, &p.counts);
    assert_int_equal(p.counts.nonfinite, 3);
    assert_int_equal(p.counts.saturated, 2);
    const uint8_t *raw_v = p.raw + kvq_raw_layout_of(&p.shape).v_offset;
    assert_int_equal(u16_at(raw_v, 10), 0x7bff);
    assert_int_equal(u16_at(raw_v, 11), 0xfbff);
    assert_int_equal(u16_at(raw_v, 12), 0x7bff);
    assert_true(isnan(kvt_f16(u16_at(p.raw, 3))));
    free_packed(&p);
}

// ---- The same bytes ----

static void test_pieces(void **state)
{
    static const uint32_t pieces[] = {1, 17, 128, 512, 640};
    struct kvq_shape s = kvt_shape(2, 2, 64, KVQ_F16);
    (void)state;
    struct kvt_cache whole = kvt_cache(kernels, "oscar3", s, 640, -1, KVT_OUTLIERS, kvt_seed());
    struct kvq_raw_layout raw = kvq_raw_layout_of(&s);
    struct kvq_layout l = kvq_layout_of(whole.format, &s);
    size_t raw_bytes = kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS), bytes = kvq_block_bytes(&l, &s);
    uint8_t *window = kvt_guarded(raw_bytes, 0), *blocks = kvt_guarded(5 * bytes, 0);
    void *workspace = kvt_workspace();
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        memset(blocks, 0, 5 * bytes);
        for (uint32_t t = 0, n; t < 640; t += n) {
            uint32_t left = pieces[i] - t % pieces[i], slot = t % 128;
            n = left < 128 - slot ? left : 128 - slot; // what is left of the piece, and of the unit
            n = n < 640 - t ? n : 640 - t;
            struct kvq_view k = kvt_view(whole.k + t * 128, 2, 64);
            struct kvq_view v = kvt_view(whole.v + t * 128, 2, 64);
            struct kvq_store_counts counts = {0};
            for (uint32_t h = 0; h < 2; h++)
                kvq_store(kernels, &s, &k, &v, h, slot, n, window, &counts);
            for (uint32_t h = 0; h < 2 && slot + n == 128; h++)
                kvq_pack(kernels, whole.format, &s,
                         &(struct kvq_unit){.raw_block = window,
                                            .packed_block = blocks + t / 128 * bytes,
                                            .head = h},
                         workspace);
        }
        assert_memory_equal(blocks, whole.blocks, 5 * bytes);
    }
    kvt_guarded_free(workspace);
    kvt_guarded_free(window);
    kvt_guarded_free(blocks);
    kvt_cache_free(&whole);
}

// The norm across heads stands in every head's record, and is what the heads' norms add up to.
static void test_cross_head_norm(void **state)
{
    (void)state;
    struct kvq_shape s = kvt_shape(1, 3, 64, KVQ_F16);
    struct kvt_cache one = kvt_cache(kernels, "oscar2", s, 128, -1, KVT_OUTLIERS, kvt_seed());
    struct kvt_cache cross = kvt_cache(kernels, "oscar2-xh", s, 128, -1, KVT_OUTLIERS, kvt_seed());
    struct kvq_layout l = kvq_layout_of(one.format, &s);
    for (uint32_t t = 0; t < 128; t++) {
        double sum = 0;
        size_t at = (size_t)t / 32 * l.group_bytes + l.k_norms;
        for (uint32_t h = 0; h < 3; h++)
            sum += pow(kvt_f16(u16_at(one.blocks + h * l.record_bytes + at, t % 32)), 2);
        double norm = kvt_f16(u16_at(cross.blocks + at, t % 32));
        assert_true(fabs(norm - sqrt(sum)) < 1e-3 * norm);
        for (uint32_t h = 1; h < 3; h++)
            assert_int_equal(u16_at(cross.blocks + h * l.record_bytes + at, t % 32),
                             u16_at(cross.blocks + at, t % 32));
    }
    kvt_cache_free(&one);
    kvt_cache_free(&cross);
}

// A placeholder's norm across heads is that of the row that stands for it, as if all heads had that
// row: neither the sink token's own, nor one of keys that channel factors have divided.
static void test_norms_of_placeholders(void **state)
{
    static const char *const formats[] = {"oscar2-xh-s32-g128",
                                          "innerq-base:scale=xh:kaxis=channel:kgroup=128:unit=128"};
    (void)state;
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        struct kvq_shape s = kvt_shape(1, 3, 64, KVQ_F16);
        struct kvt_cache c = kvt_cache(kernels, formats[f], s, 256, -1, KVT_NORMAL, kvt_seed());
        struct kvq_layout l = kvq_layout_of(c.format, &s);
        assert_int_equal(c.format->sink_tokens, 32);
        for (uint32_t h = 0; h < 3; h++) {
            const uint8_t *norms = c.blocks + h * l.record_bytes + l.groups + l.k_norms;
            double sum = 0;
            for (uint32_t i = 0; i < 64; i++) {
                double mean = 0;
                for (uint32_t t = 32; t < 128; t++)
                    mean += c.k[(size_t)(3 * t + h) * 64 + i] / 96;
                sum += mean * mean;
            }
            for (uint32_t t = 0; t < 32; t++)
                assert_true(fabs(kvt_f16(u16_at(norms, t)) - sqrt(3 * sum)) < 0.01 * sqrt(sum));
        }
        kvt_cache_free(&c);
    }
}

// ---- Sizes and shapes ----

static void test_sizes(void **state)
{
    static const struct {
        const char *format;
        uint32_t dim, bytes; // per token and head
    } sizes[] = {{"oscar2", 128, 98}, {"oscar3", 128, 130}, {"oscar4", 128, 162},
                 {"oscar2", 64, 50},  {"oscar2", 256, 194}, {"oscar2-xh", 128, 98},
                 {"f16", 128, 512},   {"bf16", 64, 256}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const struct kvq_format *f = kvq_format_by_name(sizes[i].format);
        struct kvq_shape s = kvt_shape(4, 8, sizes[i].dim, f->raw_dtype ? f->raw_dtype : KVQ_F16);
        struct kvq_layout l = kvq_layout_of(f, &s);
        assert_int_equal(l.record_bytes, 128 * sizes[i].bytes);
        assert_int_equal(kvq_block_bytes(&l, &s), 8 * 128 * sizes[i].bytes);
        assert_true(kvq_bits_per_value(f, &s) == sizes[i].bytes * 8.0 / (2 * sizes[i].dim));
        assert_int_equal(l.record_bytes % KVQ_RECORD_ALIGN, 0);
    }
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        assert_ptr_equal(kvq_format_by_name(f->name), f);
    assert_null(kvq_format_by_name("oscar5"));
}

static void refused(struct kvq_shape s, const char *format, const char *part)
{
    char text[200] = "";
    assert_int_equal(kvq_shape_check(&s, kvq_format_by_name(format), text, sizeof text), -1);
    if (!strstr(text, part))
        fail_msg("\"%s\" does not say \"%s\"", text, part);
}

static void test_shapes(void **state)
{
    struct kvq_shape good = kvt_shape(4, 8, 128, KVQ_F16), s = good;
    char text[200];
    (void)state;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        s.dtype = f->raw_dtype ? f->raw_dtype : KVQ_F16;
        assert_int_equal(kvq_shape_check(&s, f, text, sizeof text), 0);
    }
    s = good, s.kv_heads = 0, refused(s, "oscar2", "0 KV heads");
    s = good, s.q_heads = 31, refused(s, "oscar2", "31 query heads are not a multiple of 8");
    s = good, s.q_heads = 8 * 65, refused(s, "oscar2", "at most 64");
    s = good, s.k_dim = s.v_dim = 272, refused(s, "oscar2", "head_dim 272");
    s = good, s.k_dim = s.v_dim = 96, refused(s, "oscar2", "head_dim 96 is stored as 128");
    s = good, s.head_dim = 128,
    refused(s, "oscar2", "rows of head_dim 128 are not stored with 128");
    s = good, s.head_dim = 48, refused(s, "oscar2", "rows of head_dim 48 are not stored with 128");
    s = good, s.head_dim = 96, s.v_rotation = KVQ_V_ROT_ENGINE, refused(s, "oscar2", "not 96");
    s = good, s.v_dim = 64, refused(s, "oscar2", "128 for K and 64 for V");
    s = good, s.dtype = KVQ_F32, refused(s, "oscar2", "dtype 3");
    s = good, refused(s, "bf16", "format bf16 holds bf16");
    s = good, s.v_rotation = 3, refused(s, "oscar2", "v_rotation 3");
    s = good, s.softcap = -1, refused(s, "oscar2", "soft-cap is -1");
    s = good, s.softcap = NAN, refused(s, "oscar2", "soft-cap");
    s = good, s.scale = INFINITY, refused(s, "oscar2", "softmax scale is inf");
    s = good, s.scale = 0, refused(s, "oscar2", "softmax scale is 0");
}

// ---- Which instruction set ----

static void test_choice(void **state)
{
    (void)state;
    setenv("KVQ_CPU_MASK", "c", 1);
    assert_string_equal(kvq_kernels_isa(kvq_kernels_get(KVQ_ISA_BEST)), "c");
    setenv("KVQ_CPU_MASK", "avx2", 1);
    assert_string_not_equal(kvq_kernels_isa(kvq_kernels_get(KVQ_ISA_BEST)), "avx512");
    unsetenv("KVQ_CPU_MASK");
    assert_string_equal(kvq_kernels_isa(kvq_kernels_get(KVQ_ISA_C)), "c");
    assert_ptr_equal(kvq_kernels_get(-1), kvq_kernels_get(KVQ_ISA_C));
    assert_ptr_equal(kvq_kernels_get(99), kvq_kernels_get(KVQ_ISA_BEST));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answers),
        cmocka_unit_test(test_reconstruction),
        cmocka_unit_test(test_order_of_operations),
        cmocka_unit_test(test_rotation),
        cmocka_unit_test(test_token_scaling),
        cmocka_unit_test(test_frozen_bytes),
        cmocka_unit_test(test_constant_groups),
        cmocka_unit_test(test_zeros),
        cmocka_unit_test(test_small_and_large),
        cmocka_unit_test(test_huge_norms),
        cmocka_unit_test(test_store_counts),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_cross_head_norm),
        cmocka_unit_test(test_norms_of_placeholders),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_zero_has_no_sign),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_choice),
    };
    kernels = kvq_kernels_get(KVQ_ISA_BEST);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
