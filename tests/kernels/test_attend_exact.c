// SPDX-License-Identifier: Apache-2.0
//
// Attention of every instruction set, exact path, against double precision over the same cache.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "tests/kernels/kvtest.h"

// The promise is 1e-3. What fp32 reaches is printed at the end, and held to a limit near it.
static const double LIMIT = 2e-5;

static const struct kvq_kernels *all_kernels[KVQ_ISA_BEST + 1];
static int n_kernels;
static double worst;

// What the oracle says about a request.
struct answer {
    double *out, *lse;
};

static struct answer ask(const struct kvq_attend *a)
{
    size_t rows = (size_t)a->q_tokens * a->shape->q_heads;
    struct answer want = {malloc(sizeof(double) * (rows * a->shape->k_dim + 1)),
                          malloc(sizeof(double) * (rows + 1))};
    kvt_oracle(a, want.out, want.lse);
    return want;
}

static void free_answer(struct answer *want)
{
    free(want->out);
    free(want->lse);
}

// Compares what is in the request's out and lse with the answer.
static void compare_with(const struct kvt_request *r, const struct answer *want, double limit)
{
    size_t rows = (size_t)r->a.q_tokens * r->a.shape->q_heads;
    double error = kvt_rel_error(r->out, want->out, rows, r->a.shape->k_dim);
    for (size_t i = 0; i < rows; i++) {
        if (want->lse[i] == -INFINITY)
            assert_true(r->lse[i] == -INFINITY);
        else
            assert_true(fabs(r->lse[i] - want->lse[i]) <= limit * fmax(1, fabs(want->lse[i])));
    }
    if (r->a.out_dtype == KVQ_F32)
        worst = fmax(worst, error);
    if (!(error <= limit))
        fail_msg("relative error %g, at most %g is allowed", error, limit);
}

static void compare(const struct kvt_request *r, double limit)
{
    struct answer want = ask(&r->a);
    compare_with(r, &want, limit);
    free_answer(&want);
}

// Runs a request on every instruction set and compares each with the oracle.
static void check(struct kvt_request *r)
{
    size_t rows = (size_t)r->a.q_tokens * r->a.shape->q_heads;
    struct answer want = ask(&r->a);
    for (int i = 0; i < n_kernels; i++) {
        memset(r->out, 0xee, sizeof(float) * rows * r->a.shape->k_dim);
        kvt_attend(all_kernels[i], &r->a, 1);
        compare_with(r, &want, LIMIT);
    }
    free_answer(&want);
}

// Packed by the fastest instruction set; the bytes are the same on all.
static struct kvt_cache packed_cache(const char *format, struct kvq_shape shape, uint32_t tokens,
                                     uint64_t seed)
{
    return kvt_cache(all_kernels[n_kernels - 1], format, shape, tokens, -1, KVT_NORMAL, seed);
}

static void check_shape(const char *format, struct kvq_shape shape, uint32_t tokens,
                        uint32_t q_tokens)
{
    struct kvt_cache c = packed_cache(format, shape, tokens, kvt_seed() + tokens);
    struct kvt_request r = kvt_request(&c, q_tokens, kvt_seed() + 1);
    check(&r);
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

static uint8_t dtype_of(const struct kvq_format *f)
{
    return f->raw_dtype ? f->raw_dtype : KVQ_F16;
}

// Searching 4,096 centroids takes a while.
static bool has_large_book(const struct kvq_format *f)
{
    return (f->k.codec == KVQ_CODEC_BOOK && f->k.bits > 8) ||
           (f->v.codec == KVQ_CODEC_BOOK && f->v.bits > 8);
}

static void test_all_formats(void **state)
{
    (void)state;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        for (uint32_t dim = 64; dim <= (has_large_book(f) ? 64 : 256); dim *= 2)
            check_shape(f->name, kvt_shape(4, 2, dim, dtype_of(f)), 300, 2);
}

// Every word that a name can have, alone and with others.
static void test_composed_formats(void **state)
{
    static const char *const names[] = {
        "oscar2-g64",      "oscar3-g128-fm", "oscar4-max",        "oscar3-mean-norot",
        "oscar2-noscale",  "oscar2-s32-w17", "kivi1-g128",        "kivi4-g64+oscar3-g64",
        "ott2-s32",        "ott2-o0",        "innerq-small-full", "innerq-hybrid-full",
        "quarot4-g128",    "int8-g64",       "innerq-base-g64",   "innerq-hybrid-g128-nosmooth",
        "kivi2+int8",      "kivi4-s64",      "turboquant4+k8v4",  "innerq-base+turboquant2.5",
        "vecinfer-2+int8", "oscar2-xh-g128", "oscar4+vecinfer-1", "vecinfer-k8x10v2x8"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        check_shape(names[i], kvt_shape(2, 2, i % 2 ? 128 : 64, i % 3 ? KVQ_F16 : KVQ_BF16), 300,
                    1);
    check_shape("k8v4", kvt_shape(2, 1, 256, KVQ_BF16), 300, 1);
    check_shape("oscar2-g128", kvt_shape(2, 1, 256, KVQ_F16), 300, 1);
    check_shape("innerq-hybrid-g64", kvt_shape(2, 1, 256, KVQ_F16), 300, 1);
}

// A row with stages changed at random, as a name of 64 bytes; false if that is no format.
static bool random_name(struct kvt_rng *rng, char *name)
{
    static const char *const changes[] = {
        "rot=none",      "rot=hadamard",  "rot=signed",       "vrot=signed",   "vrot=hadamard",
        "scale=none",    "scale=xh",      "scale=mean",       "channel=none",  "channel=prompt",
        "kcodec=affine", "kcodec=lloyd",  "kcodec=symmetric", "kcodec=hybrid", "vcodec=affine",
        "vcodec=lloyd",  "vcodec=hybrid", "vcodec=symmetric", "kbits=1",       "kbits=2",
        "kbits=3",       "kbits=8",       "vbits=1",          "vbits=3",       "vbits=4",
        "kgroup=0",      "kgroup=64",     "kgroup=128",       "vgroup=0",      "vgroup=32",
        "vgroup=128",    "kaxis=token",   "kaxis=channel",    "vaxis=token",   "vaxis=channel",
        "zero=minimum",  "zero=integer",  "kfull=1",          "vfull=1",       "sink=32",
        "recent=40",     "unit=32",       "unit=64",          "outliers=2",    "kwide=1"};
    struct kvq_format f;
    char text[400];
    uint32_t rows = 0, n = sizeof changes / sizeof *changes;
    while (kvq_formats[rows].name[0])
        rows++;
    size_t at = (size_t)snprintf(name, 64, "%s", kvq_formats[kvt_below(rng, rows)].name);
    for (uint32_t i = 1 + kvt_below(rng, 4); i && at < 46; i--)
        at += (size_t)snprintf(name + at, 64 - at, ":%s", changes[kvt_below(rng, n)]);
    return kvq_format_parse(name, &f, text, sizeof text) == 0 && !kvq_is_raw(&f) &&
           !has_large_book(&f);
}

// Whatever can be composed and is not refused is computed as its stages say.
static void test_random_compositions(void **state)
{
    struct kvt_rng rng = {.state = kvt_seed()};
    char name[KVQ_FORMAT_NAME];
    (void)state;
    for (int done = 0; done < 60;) {
        if (!random_name(&rng, name))
            continue;
        check_shape(name, kvt_shape(2, 2, kvt_below(&rng, 2) ? 128 : 64, KVQ_F16), 300, 1);
        done++;
    }
}

static void test_gqa(void **state)
{
    static const char *const names[] = {"f16",    "bf16",          "oscar2",
                                        "oscar3", "oscar4",        "quarot2",
                                        "ott2",   "innerq-hybrid", "turboquant2.5"};
    static const uint32_t gqas[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (size_t g = 0; g < sizeof gqas / sizeof *gqas; g++)
            for (uint32_t dim = 64; dim <= (i < 4 ? 256 : 64); dim *= 2)
                check_shape(names[i], kvt_shape(gqas[g], 1, dim, dtype_of(kvt_format(names[i]))),
                            300, 1);
}

enum { STRONG = 32 }; // channels

static void fill_strong_values(const void *data, const struct kvq_shape *s, float *k, float *v,
                               uint32_t tokens)
{
    struct kvt_rng rng = {.state = kvt_seed()};
    kvt_fill(&rng, KVT_NORMAL, k, tokens, s->k_dim);
    kvt_fill(&rng, KVT_NORMAL, v, tokens, s->k_dim);
    for (uint32_t i = 0; i < tokens * s->k_dim; i++)
        v[i] *= i % s->k_dim < STRONG ? *(const float *)data : 1.0f;
}

// Values of 32 channels that are 1,000 times as large cost the other channels nothing.
static void test_strong_values(void **state)
{
    static const char *const names[] = {"kivi2", "kivi4", "oscar3"};
    const float strong = 1000.0f;
    (void)state;
    for (uint32_t n = 0; n < 9; n++) {
        const uint32_t dim = 64u << n / 3;
        struct kvt_cache c =
            kvt_cache_of(all_kernels[0], names[n % 3], kvt_shape(3, 1, dim, KVQ_F16), 700, -1,
                         fill_strong_values, &strong);
        struct kvt_request r = kvt_request(&c, 1, kvt_seed());
        struct answer want = ask(&r.a);
        for (int i = 0; i < n_kernels; i++) {
            kvt_attend(all_kernels[i], &r.a, 1);
            for (uint32_t at = 0; at < 3 * dim; at++)
                if (at % dim < STRONG)
                    r.out[at] = 0, want.out[at] = 0;
            compare_with(&r, &want, LIMIT);
        }
        free_answer(&want);
        kvt_request_free(&r);
        kvt_cache_free(&c);
    }
}

static void test_several_heads_and_long(void **state)
{
    (void)state;
    check_shape("oscar2", kvt_shape(4, 3, 128, KVQ_F16), 2600, 1);
    check_shape("oscar2-xh", kvt_shape(2, 4, 64, KVQ_BF16), 1111, 3);
    check_shape("oscar3", kvt_shape(1, 2, 256, KVQ_BF16), 4200, 1);
    check_shape("oscar4", kvt_shape(8, 1, 128, KVQ_F16), 9000, 1);
    check_shape("f16", kvt_shape(4, 2, 128, KVQ_F16), 5000, 1);
    check_shape("bf16", kvt_shape(4, 2, 64, KVQ_BF16), 777, 2);
}

// So long that a split is several chunks, and sums are rescaled within it.
static void test_several_chunks(void **state)
{
    struct kvq_shape rotated = kvt_shape(2, 1, 64, KVQ_F16);
    (void)state;
    rotated.v_rotation = KVQ_V_ROT_DAEMON;
    check_shape("oscar2", kvt_shape(2, 1, 64, KVQ_F16), 17000, 2);
    check_shape("oscar3", rotated, 16500, 1);
    check_shape("f16", kvt_shape(1, 1, 64, KVQ_F16), 33500, 1);
}

static void test_query_tokens(void **state)
{
    static const uint32_t counts[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 512};
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        check_shape("oscar2", kvt_shape(3, 1, 64, KVQ_F16), 640, counts[i]);
        check_shape("f16", kvt_shape(2, 1, 64, KVQ_F16), 530, counts[i]);
    }
}

// ---- Masks ----

static void with_request(const char *format, struct kvq_shape shape, uint32_t tokens,
                         uint32_t q_tokens,
                         void (*change)(struct kvt_cache *, struct kvt_request *))
{
    struct kvt_cache c = packed_cache(format, shape, tokens, kvt_seed() + 2);
    struct kvt_request r = kvt_request(&c, q_tokens, kvt_seed() + 3);
    if (change)
        change(&c, &r);
    check(&r);
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

static void test_window(void **state)
{
    static const uint32_t windows[] = {1, 2, 31, 100, 128, 300, 512, 5000};
    (void)state;
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        struct kvq_shape shape = kvt_shape(2, 2, 128, KVQ_F16);
        shape.window = windows[i];
        with_request("oscar2", shape, 1400, 5, NULL);
        with_request("f16", shape, 1400, 70, NULL);
    }
}

static void test_softcap(void **state)
{
    static const float caps[] = {0.5f, 2.0f, 8.0f, 32.0f};
    (void)state;
    for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
        struct kvq_shape shape = kvt_shape(4, 1, 128, KVQ_F16);
        shape.softcap = caps[i];
        shape.scale = 0.5f;
        with_request("oscar2", shape, 600, 2, NULL);
        with_request("f16", shape, 600, 2, NULL);
    }
}

static void test_v_rotation(void **state)
{
    (void)state;
    for (uint32_t dim = 64; dim <= 256; dim *= 2)
        for (uint32_t rotation = KVQ_V_ROT_NONE; rotation <= KVQ_V_ROT_DAEMON; rotation++) {
            struct kvq_shape shape = kvt_shape(4, 2, dim, KVQ_F16);
            shape.v_rotation = (uint8_t)rotation;
            with_request("oscar2", shape, 700, 3, NULL);
            with_request("oscar3", shape, 700, 3, NULL);
            with_request("f16", shape, 700, 3, NULL);
        }
}

static void set_past_only(struct kvt_cache *c, struct kvt_request *r)
{
    (void)c;
    r->a.flags = KVQ_ATTEND_PAST_ONLY;
}

static void test_past_only(void **state)
{
    struct kvq_shape windowed = kvt_shape(4, 1, 64, KVQ_F16);
    (void)state;
    windowed.window = 50;
    with_request("oscar2", kvt_shape(4, 1, 64, KVQ_F16), 700, 20, set_past_only);
    with_request("oscar2", windowed, 700, 80, set_past_only); // the last rows see nothing
    with_request("f16", kvt_shape(4, 1, 64, KVQ_F16), 40, 40, set_past_only);
}

static void set_earlier(struct kvt_cache *c, struct kvt_request *r)
{
    (void)c;
    r->a.q_start = 100; // attends without having appended, in the middle of the cache
    r->a.past_tokens = 700;
    r->a.step_tokens = 0;
}

static void set_beyond(struct kvt_cache *c, struct kvt_request *r)
{
    set_earlier(c, r);
    r->a.q_start = 5000;
}

static void test_positions(void **state)
{
    (void)state;
    with_request("oscar2", kvt_shape(2, 1, 64, KVQ_F16), 700, 30, set_earlier);
    with_request("oscar2", kvt_shape(2, 1, 64, KVQ_F16), 700, 30, set_beyond);
}

static void shorten_pages(struct kvt_cache *c, struct kvt_request *r)
{
    (void)r;
    c->pages[0].tokens = 77; // packed
    c->pages[1].tokens = 0;
    c->pages[2].tokens = 1;
    c->pages[c->n_pages - 1].tokens = 3; // raw
}

static void test_short_pages(void **state)
{
    (void)state;
    with_request("oscar2", kvt_shape(4, 2, 128, KVQ_F16), 700, 3, shorten_pages);
    with_request("oscar4", kvt_shape(70 / 2, 1, 64, KVQ_F16), 700, 3, shorten_pages);
    with_request("f16", kvt_shape(4, 2, 128, KVQ_F16), 700, 3, shorten_pages);
}

// A fork in the middle of a packed block: the shared tokens packed, later ones raw, in one group.
// What must not be read is NaN.
static void mix_pages(struct kvt_cache *c, struct kvt_request *r)
{
    static const uint16_t packed[] = {128, 77, 32, 0};
    (void)r;
    for (uint32_t i = 0; i < 4; i++) {
        c->pages[i].packed_tokens = packed[i];
        kvt_spoil(&c->shape, c->pages[i].raw, 0, packed[i]);
        if (kvq_is_raw(c->format))
            kvt_spoil(&c->shape, c->pages[i].packed, packed[i], 128);
    }
    c->pages[3].packed = NULL;
}

static void test_mixed_pages(void **state)
{
    struct kvq_shape rotated = kvt_shape(4, 2, 128, KVQ_F16);
    rotated.v_rotation = KVQ_V_ROT_DAEMON;
    (void)state;
    with_request("oscar2", kvt_shape(4, 2, 128, KVQ_F16), 700, 3, mix_pages);
    with_request("oscar3", rotated, 700, 70, mix_pages);
    with_request("f16", kvt_shape(4, 2, 128, KVQ_F16), 700, 3, mix_pages);
}

// Raw blocks without the rows of packed tokens, as a fork may have them: sink tokens and outliers
// are in the extras alone.
static void spoil_raw(struct kvt_cache *c, struct kvt_request *r)
{
    (void)r;
    for (uint32_t i = 0; i < c->n_pages; i++)
        kvt_spoil(&c->shape, c->pages[i].raw, 0, c->pages[i].packed_tokens);
}

// Sealed pages without a window.
static void drop_raw(struct kvt_cache *c, struct kvt_request *r)
{
    spoil_raw(c, r);
    for (uint32_t i = 0; i < c->n_pages; i++)
        if (c->pages[i].packed_tokens == c->pages[i].tokens)
            c->pages[i].raw = NULL;
}

static void test_without_raw(void **state)
{
    static const char *const names[] = {"kivi-sink2", "ott2",   "ott2-oscar",      "innerq-base",
                                        "ott2-s96",   "oscar3", "turboquant3-s64", "int8-s32"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        with_request(names[i], kvt_shape(3, 2, 64, KVQ_F16), 700, 2, drop_raw);
        with_request(names[i], kvt_shape(1, 2, 128, KVQ_BF16), 512, 1, drop_raw);
        with_request(names[i], kvt_shape(2, 2, 64, KVQ_BF16), 300, 2, spoil_raw);
    }
}

// Attention that was given an earlier number of outliers does not see those that came since.
static void forget_outliers(struct kvt_cache *c, struct kvt_request *r)
{
    static uint8_t pool[2];
    for (uint32_t h = 0; h < 2; h++) {
        kvq_outliers_publish(c->format, &c->shape, c->extras);
        uint32_t count = kvq_outliers_published(c->format, &c->shape, c->extras, h);
        assert_true(count >= 3);
        pool[h] = (uint8_t)(count - 1 - h);
    }
    r->a.pool = pool;
}

static void test_earlier_pool(void **state)
{
    (void)state;
    with_request("ott2", kvt_shape(3, 2, 64, KVQ_F16), 700, 2, forget_outliers);
}

static void hide_all(struct kvt_cache *c, struct kvt_request *r)
{
    (void)c;
    r->a.n_pages = 0;
}

static void test_nothing_visible(void **state)
{
    (void)state;
    struct kvt_cache c = kvt_cache(all_kernels[0], "oscar2", kvt_shape(2, 1, 64, KVQ_F16), 200, -1,
                                   KVT_NORMAL, kvt_seed());
    struct kvt_request r = kvt_request(&c, 2, kvt_seed());
    for (int i = 0; i < n_kernels; i++)
        for (int empty = 0; empty < 2; empty++) {
            hide_all(&c, &r);
            r.a.past_tokens = empty ? 0 : 198;
            r.a.step_tokens = empty ? 0 : 2;
            memset(r.out, 0xee, sizeof(float) * 2 * 2 * 64);
            kvt_attend(all_kernels[i], &r.a, empty ? 100 : 1);
            for (int e = 0; e < 2 * 2 * 64; e++)
                assert_true(r.out[e] == 0.0f);
            for (int e = 0; e < 4; e++)
                assert_true(r.lse[e] == -INFINITY);
        }
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

// ---- The fresh tail ----

static void test_fresh_is_raw(void **state)
{
    (void)state;
    for (uint32_t fresh = 1; fresh <= 512; fresh = fresh * 5 + 2)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            struct kvq_shape shape = kvt_shape(2, 2, 64, bf16 ? KVQ_BF16 : KVQ_F16);
            struct kvt_cache c = kvt_cache(all_kernels[0], "oscar2", shape, 700, 128, KVT_NORMAL,
                                           kvt_seed() + fresh);
            struct kvt_request r = kvt_request(&c, fresh, kvt_seed());
            size_t n = (size_t)fresh * shape.q_heads * 64, first = (size_t)(700 - fresh) * 2 * 64;
            float *paged = malloc(sizeof(float) * n);
            for (int i = 0; i < n_kernels; i++) {
                r.a.fresh_tokens = 0;
                kvt_attend(all_kernels[i], &r.a, 1);
                memcpy(paged, r.out, sizeof(float) * n);
                r.a.fresh_start = 700 - fresh;
                r.a.fresh_tokens = fresh;
                r.a.fresh_k = kvt_view(c.k + first, 2, 64);
                r.a.fresh_v = kvt_view(c.v + first, 2, 64);
                uint16_t kept = c.pages[c.n_pages - 1].tokens;
                c.pages[c.n_pages - 1].tokens = kept > fresh ? (uint16_t)(kept - fresh) : 0;
                kvt_attend(all_kernels[i], &r.a, 1);
                assert_memory_equal(paged, r.out, sizeof(float) * n);
                compare(&r, LIMIT);
                c.pages[c.n_pages - 1].tokens = kept;
            }
            free(paged);
            kvt_request_free(&r);
            kvt_cache_free(&c);
        }
}

// ---- Types at the edges ----

static uint16_t to_half(double x, uint8_t dtype)
{
    for (uint32_t h = 0; h < 0x8000; h++) { // the nearest by search, which needs no rounding rule
        double at = dtype == KVQ_F16 ? kvt_f16((uint16_t)h) : kvt_bf16((uint16_t)h);
        if (at >= fabs(x))
            return (uint16_t)(h | (x < 0 ? 0x8000u : 0));
    }
    return 0;
}

static void test_dtypes(void **state)
{
    static const double out_limit[] = {0, 6e-4 + 1e-4, 5e-3, 1e-4};
    (void)state;
    for (uint32_t q_dtype = KVQ_F16; q_dtype <= KVQ_BF16; q_dtype++)
        for (uint32_t out_dtype = KVQ_F16; out_dtype <= KVQ_F32; out_dtype++) {
            struct kvt_cache c = kvt_cache(all_kernels[0], "oscar2", kvt_shape(2, 2, 64, KVQ_F16),
                                           300, -1, KVT_NORMAL, kvt_seed());
            struct kvt_request r = kvt_request(&c, 2, kvt_seed());
            uint16_t q[2 * 4 * 64 + 4], out[2 * 4 * 100];
            for (size_t i = 0; i < 2 * 4 * 64; i++)
                q[i + 1] = to_half(r.q[i], q_dtype);
            r.a.q = (struct kvq_view){q + 1, 2 * 4 * 64, 2 * 64, q_dtype};
            r.a.out_dtype = (uint8_t)out_dtype;
            for (int i = 0; i < n_kernels; i++) {
                if (out_dtype != KVQ_F32) { // strides with gaps
                    r.a.out = out;
                    r.a.out_head_stride = 2 * 100;
                    r.a.out_token_stride = 2 * 400;
                }
                kvt_attend(all_kernels[i], &r.a, 1);
                for (int e = 0; e < 2 * 4 * 64 && out_dtype != KVQ_F32; e++) {
                    uint16_t half = out[e / 64 * 100 + e % 64];
                    r.out[e] = (float)(out_dtype == KVQ_F16 ? kvt_f16(half) : kvt_bf16(half));
                }
                compare(&r, out_limit[out_dtype]);
            }
            kvt_request_free(&r);
            kvt_cache_free(&c);
        }
}

// fp32 keys and values rounded to an fp16 cache, against attention over the fp32 ones.
static void test_f16_rounding(void **state)
{
    double before = worst;
    (void)state;
    struct kvt_cache c = kvt_cache(all_kernels[0], "f16", kvt_shape(4, 1, 128, KVQ_F16), 500, -1,
                                   KVT_NORMAL, kvt_seed());
    struct kvt_request r = kvt_request(&c, 1, kvt_seed()), exact = r;
    struct kvq_shape unrounded = c.shape;
    unrounded.dtype = KVQ_F32; // the oracle then takes the fresh tail as it is
    exact.a.shape = &unrounded;
    exact.a.fresh_tokens = 500;
    exact.a.fresh_k = kvt_view(c.k, 1, 128);
    exact.a.fresh_v = kvt_view(c.v, 1, 128);
    for (int i = 0; i < n_kernels; i++) {
        kvt_attend(all_kernels[i], &r.a, 1);
        compare(&exact, 1e-3);
    }
    worst = before;
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

static void test_output_saturates(void **state)
{
    (void)state;
    struct kvq_shape shape = kvt_shape(1, 1, 64, KVQ_BF16);
    struct kvt_cache c = kvt_cache(all_kernels[0], "bf16", shape, 32, 0, KVT_NORMAL, kvt_seed());
    struct kvt_request r = kvt_request(&c, 1, kvt_seed());
    uint16_t out[64], *values = (uint16_t *)(void *)(c.raw + 32 * 2 * 64);
    for (int i = 0; i < 32 * 64; i++)
        values[i] = i % 2 ? 0x4f00 : 0xcf00; // about 2^31
    r.a.out = out;
    r.a.out_dtype = KVQ_F16;
    for (int i = 0; i < n_kernels; i++) {
        kvt_attend(all_kernels[i], &r.a, 1);
        for (int e = 0; e < 64; e++)
            assert_int_equal(out[e], e % 2 ? 0x7bff : 0xfbff);
    }
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

// ---- NaN ----

static void assert_row(const struct kvt_request *r, uint32_t row, bool nan)
{
    uint32_t dim = r->a.shape->k_dim;
    assert_int_equal(isnan(r->lse[row]) != 0, nan);
    for (uint32_t e = 0; e < dim; e++)
        assert_int_equal(isnan(r->out[(size_t)row * dim + e]) != 0, nan);
}

// One of the rows has a NaN in its query, of these bits: it alone becomes NaN, on both paths.
static void check_nan_query(const char *format, float cap, uint32_t window, uint32_t q_tokens,
                            uint32_t bits)
{
    struct kvq_shape shape = kvt_shape(4, 2, 128, dtype_of(kvt_format(format)));
    shape.softcap = cap;
    shape.window = window;
    struct kvt_cache c = packed_cache(format, shape, 1300, kvt_seed());
    struct kvt_request r = kvt_request(&c, q_tokens, kvt_seed());
    memcpy(&r.q[5 * 128 + 77], &bits, sizeof bits);
    for (int i = 0; i < n_kernels; i++)
        for (uint32_t path = KVQ_PATH_EXACT; path <= KVQ_PATH_FAST; path++)
            for (uint32_t items = 1; items <= 20; items += 19) {
                r.a.path = (uint8_t)path;
                kvt_attend(all_kernels[i], &r.a, items);
                for (uint32_t row = 0; row < 4 * q_tokens; row++)
                    assert_row(&r, row, row == 5);
            }
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

static void test_nan_queries(void **state)
{
    static const char *const names[] = {"f16",   "bf16",          "oscar2", "oscar4",
                                        "kivi4", "turboquant2.5", "kvq2",   "vecinfer-4"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (uint32_t window = 0; window <= 100; window += 100) {
            check_nan_query(names[i], 0.0f, window, 2, 0x7fc00000);
            check_nan_query(names[i], 20.0f, window, 2, 0x7fc00000);
        }
    for (size_t i = 0; i < 3; i++) { // many rows, and NaN as GPUs make it
        check_nan_query(names[i], 0.0f, 0, 40, 0x7fffffff);
        check_nan_query(names[i], 20.0f, 0, 40, 0x7fffe000);
    }
}

// ---- Tile registers ----

// A thread's own configuration of tiles is there again after attention: libraries of engines make
// it once.
static void test_tiles_stay(void **state)
{
    (void)state;
    if (strcmp(kvq_kernels_isa(all_kernels[n_kernels - 1]), "amx") != 0)
        skip();
#if defined(__x86_64__) && !defined(KVQ_AVX512_IN_SOFTWARE)
    static _Alignas(64) uint8_t own[64] = {1, [16] = 12, [48] = 3}, after[64];
    struct kvt_cache c = packed_cache("oscar2", kvt_shape(4, 1, 128, KVQ_F16), 300, kvt_seed());
    struct kvt_request r = kvt_request(&c, 32, kvt_seed());
    __asm__ volatile("ldtilecfg %0" ::"m"(own));
    kvt_attend(all_kernels[n_kernels - 1], &r.a, 1);
    __asm__ volatile("sttilecfg %0" : "=m"(after));
    __asm__ volatile("tilerelease");
    assert_memory_equal(after, own, sizeof own);
    kvt_attend(all_kernels[n_kernels - 1], &r.a, 1);
    __asm__ volatile("sttilecfg %0" : "=m"(after));
    assert_int_equal(after[0], 0);
    kvt_request_free(&r);
    kvt_cache_free(&c);
#endif
}

// ---- Overflow ----

// Keys at token `at` that with like queries make a logit of inf - inf, or of infinity.
struct overflow {
    uint32_t at;
    float second;
};

static void fill_overflow(const void *data, const struct kvq_shape *s, float *k, float *v,
                          uint32_t tokens)
{
    const struct overflow *o = data;
    struct kvt_rng rng = {.state = kvt_seed()};
    kvt_fill(&rng, KVT_NORMAL, k, tokens, s->k_dim);
    kvt_fill(&rng, KVT_NORMAL, v, tokens, s->k_dim);
    memset(k + (size_t)o->at * s->k_dim, 0, sizeof *k * s->k_dim);
    k[(size_t)o->at * s->k_dim] = 3e38f;
    k[(size_t)o->at * s->k_dim + 1] = o->second;
}

// Row 0 overflows, row 1 has nothing to do with it.
static void check_overflow(struct overflow o, float cap, bool nan)
{
    struct kvq_shape shape = kvt_shape(2, 1, 64, KVQ_BF16);
    shape.softcap = cap;
    struct kvt_cache c = kvt_cache_of(all_kernels[0], "bf16", shape, 700, -1, fill_overflow, &o);
    struct kvt_request r = kvt_request(&c, 1, kvt_seed());
    memset(r.q, 0, sizeof *r.q * 64);
    r.q[0] = r.q[1] = 1000.0f;
    r.q[64] = r.q[65] = 0.0f;
    for (int i = 0; i < n_kernels; i++) {
        kvt_attend(all_kernels[i], &r.a, 1);
        assert_row(&r, 0, nan);
        assert_row(&r, 1, false);
    }
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

static void test_overflowing_logits(void **state)
{
    (void)state;
    for (uint32_t at = 0; at < 700; at += 233) {
        check_overflow((struct overflow){at, -3e38f}, 0.0f, true);
        check_overflow((struct overflow){at, -3e38f}, 20.0f, true);
        check_overflow((struct overflow){at, 3e38f}, 0.0f, true);
        check_overflow((struct overflow){at, 3e38f}, 20.0f, false);
    }
}

// ---- Merging ----

static void test_merge(void **state)
{
    (void)state;
    struct kvt_cache c = kvt_cache(all_kernels[0], "oscar2", kvt_shape(4, 1, 64, KVQ_F16), 900, -1,
                                   KVT_NORMAL, kvt_seed());
    struct kvt_request whole = kvt_request(&c, 1, kvt_seed()),
                       left = kvt_request(&c, 1, kvt_seed()),
                       right = kvt_request(&c, 1, kvt_seed());
    struct kvq_page pages[8];
    memcpy(pages, c.pages, sizeof pages);
    for (int i = 0; i < 8; i++)
        pages[i].tokens = i < 3 ? 0 : pages[i].tokens;
    left.a.n_pages = 3;
    right.a.pages = pages;
    kvt_attend(all_kernels[0], &whole.a, 1);
    kvt_attend(all_kernels[0], &left.a, 1);
    kvt_attend(all_kernels[0], &right.a, 1);
    kvq_merge_rows(left.out, left.lse, right.out, right.lse, left.out, left.lse, 4, 64);
    memcpy(whole.out, left.out, sizeof(float) * 4 * 64);
    memcpy(whole.lse, left.lse, sizeof(float) * 4);
    compare(&whole, 1e-5);

    float none[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, garbage[4 * 64];
    memset(garbage, 0xff, sizeof garbage); // NaN
    kvq_merge_rows(garbage, none, left.out, left.lse, right.out, right.lse, 4, 64);
    assert_memory_equal(right.out, left.out, sizeof garbage);
    kvq_merge_rows(garbage, none, garbage, none, right.out, right.lse, 4, 64);
    for (int i = 0; i < 4 * 64; i++)
        assert_true(right.out[i] == 0.0f);
    assert_true(right.lse[3] == -INFINITY);
    left.lse[2] = NAN; // is not lost beside nothing
    kvq_merge_rows(left.out, left.lse, garbage, none, right.out, right.lse, 4, 64);
    assert_true(isnan(right.lse[2]) && isnan(right.out[2 * 64]) && !isnan(right.lse[3]));
    kvq_merge_rows(garbage, none, left.out, left.lse, right.out, right.lse, 4, 64);
    assert_true(isnan(right.lse[2]) && isnan(right.out[2 * 64]) && !isnan(right.lse[3]));
    kvt_request_free(&whole);
    kvt_request_free(&left);
    kvt_request_free(&right);
    kvt_cache_free(&c);
}

static int largest_error(void **state)
{
    (void)state;
    printf("largest relative error of fp32 outputs: %.2e\n", worst);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_formats),
        cmocka_unit_test(test_composed_formats),
        cmocka_unit_test(test_random_compositions),
        cmocka_unit_test(test_gqa),
        cmocka_unit_test(test_strong_values),
        cmocka_unit_test(test_several_heads_and_long),
        cmocka_unit_test(test_several_chunks),
        cmocka_unit_test(test_query_tokens),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_softcap),
        cmocka_unit_test(test_v_rotation),
        cmocka_unit_test(test_past_only),
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_short_pages),
        cmocka_unit_test(test_mixed_pages),
        cmocka_unit_test(test_without_raw),
        cmocka_unit_test(test_earlier_pool),
        cmocka_unit_test(test_nothing_visible),
        cmocka_unit_test(test_fresh_is_raw),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_f16_rounding),
        cmocka_unit_test(test_output_saturates),
        cmocka_unit_test(test_nan_queries),
        cmocka_unit_test(test_tiles_stay),
        cmocka_unit_test(test_overflowing_logits),
        cmocka_unit_test(test_merge),
    };
    if (kvt_lacks_amx())
        return 77; // skipped
    for (int isa = KVQ_ISA_C; isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        if (n_kernels == 0 || k != all_kernels[n_kernels - 1])
            all_kernels[n_kernels++] = k;
    }
    return cmocka_run_group_tests(tests, NULL, largest_error);
}
