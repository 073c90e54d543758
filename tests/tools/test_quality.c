// SPDX-License-Identifier: Apache-2.0
//
// The quality bench: its generators make what they say, its errors are those of an independent
// model, its windows and bytes add up, and the worked example of OScaR's appendix I.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tools/kvq-bench/quality.h"
#include "tools/kvq-bench/quality_model.h"

enum { DIM = 64, HEADS = 2, TOKENS = 640 };

static char text[400];

static struct quality_method method(const char *name)
{
    struct quality_method m;
    if (quality_method_parse(name, &m, text, sizeof text))
        fail_msg("%s: %s", name, text);
    return m;
}

static struct kvq_shape shape(uint32_t dim)
{
    return (struct kvq_shape){.q_heads = HEADS,
                              .kv_heads = HEADS,
                              .k_dim = (uint16_t)dim,
                              .v_dim = (uint16_t)dim,
                              .dtype = KVQ_F16,
                              .scale = 0.125f};
}

static struct quality_data make(const char *name, uint32_t queries)
{
    struct quality_data d;
    assert_true(quality_data_take(&d, name, HEADS, TOKENS, DIM, queries));
    assert_true(quality_fill(&d, name, 4, 5));
    quality_aim(&d, 0.5, 6, 0.125);
    return d;
}

static struct quality_error measure(const char *name, const struct quality_data *d, double budget)
{
    struct quality_method m = method(name);
    struct quality_error e;
    if (quality_measure(&m, d, NULL, 0.125, budget, &e, text, sizeof text))
        fail_msg("%s: %s", name, text);
    return e;
}

// ---- Methods ----

static void test_names(void **unused)
{
    (void)unused;
    struct quality_method m = method("oscar2:rot=none:scale=max:kbits=3:zero=minimum:recent=64");
    assert_int_equal(m.f.k_rotation, KVQ_ROTATE_NONE);
    assert_int_equal(m.f.k_token_scale, KVQ_SCALE_MAX);
    assert_int_equal(m.f.k.bits, 3);
    assert_int_equal(m.f.v.bits, 2);
    assert_int_equal(m.f.k.zero, KVQ_ZERO_MINIMUM);
    assert_int_equal(m.f.v.zero, KVQ_ZERO_MINIMUM);
    assert_int_equal(m.f.recent_tokens, 64);
    assert_int_equal(method("dropped").kind, QUALITY_DROPPED);
    assert_int_equal(method("int2-token").kind, QUALITY_INT2);
    static const char *const wrong[] = {
        "oscar9",          "oscar2:rot",      "oscar2:rot=odd",    "oscar2:kbits=x",
        "oscar2:kbits=-2", "oscar2:colour=1", "oscar2:recent=1e3", "oscar2:kbits=9999",
        "oscar2:kbits=7"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (!quality_method_parse(wrong[i], &m, text, sizeof text) || !*text)
            fail_msg("%s was taken", wrong[i]);
}

// ---- Generators ----

static double deviation(const struct quality_data *d, uint32_t channel, double *mean)
{
    double sum = 0, squares = 0;
    for (uint32_t t = 0; t < d->tokens; t++) {
        double x = (double)d->k[(size_t)t * d->dim + channel];
        sum += x;
        squares += x * x;
    }
    *mean = sum / d->tokens;
    return sqrt(squares / d->tokens - *mean * *mean);
}

static double norm(const struct quality_data *d, uint32_t t)
{
    double sum = 0;
    for (uint32_t c = 0; c < d->dim; c++)
        sum += (double)d->k[(size_t)t * d->dim + c] * (double)d->k[(size_t)t * d->dim + c];
    return sqrt(sum);
}

static void test_channels(void **unused)
{
    (void)unused;
    struct quality_data wide = make("outlier-channels", 1), offset = make("offset-channels", 1);
    uint32_t n_wide = 0, n_offset = 0;
    for (uint32_t c = 0; c < DIM; c++) {
        double mean;
        n_wide += deviation(&wide, c, &mean) > 7;
        assert_true(fabs(mean) < 2);
        assert_true(deviation(&offset, c, &mean) < 1.5);
        n_offset += fabs(mean) > 9;
    }
    assert_int_equal(n_wide, 4);
    assert_int_equal(n_offset, 4);
    quality_data_free(&wide);
    quality_data_free(&offset);
}

static void test_tokens(void **unused)
{
    (void)unused;
    struct quality_data flat = make("imbalance-0.00", 1), huge = make("huge-tokens", 1);
    struct quality_data mixed = make("mixed-modalities", 1), sinks = make("low-norm-sinks", 1);
    uint32_t n_huge = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        assert_true(fabs(norm(&flat, t) - sqrt(DIM)) < 1e-4);
        n_huge += norm(&huge, t) > 40;
    }
    assert_in_range(n_huge, 1, TOKENS / 20);
    assert_true(norm(&mixed, 256) > 3 * norm(&mixed, 0));
    assert_true(norm(&mixed, 256) > 3 * norm(&mixed, 512));
    assert_true(norm(&sinks, 0) < 0.1 * norm(&sinks, 10));
    struct quality_data again = make("low-norm-sinks", 1);
    size_t n = (size_t)HEADS * TOKENS * DIM * sizeof(float);
    assert_memory_equal(again.k, sinks.k, n);
    assert_true(quality_fill(&again, "low-norm-sinks", 4, 99));
    assert_memory_not_equal(again.k, sinks.k, n);
    assert_false(quality_fill(&again, "no-such-data", 1, 1));
    struct quality_data *all[] = {&flat, &huge, &mixed, &sinks, &again};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        quality_data_free(all[i]);
}

// Weights of one query over n keys, independent of the bench's own attention.
static void weights(const float *q, const float *k, uint32_t n, double *p)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t t = 0; t < n; t++) {
        p[t] = 0;
        for (uint32_t c = 0; c < DIM; c++)
            p[t] += 0.125 * (double)q[c] * (double)k[(size_t)t * DIM + c];
        max = p[t] > max ? p[t] : max;
    }
    for (uint32_t t = 0; t < n; t++)
        sum += p[t] = exp(p[t] - max);
    for (uint32_t t = 0; t < n; t++)
        p[t] /= sum;
}

static void test_aim(void **unused)
{
    (void)unused;
    static const double masses[] = {0.1, 0.5, 0.9};
    double p[TOKENS];
    for (const char *const *name = quality_synthetic; *name; name++) {
        struct quality_data d = make(*name, 3);
        for (int m = 0; m < 3; m++) {
            quality_aim(&d, masses[m], 7, 0.125);
            for (uint32_t i = 0; i < 3; i++) {
                double top = 0;
                weights(d.q + i * DIM, d.k, TOKENS, p);
                for (uint32_t t = 0; t < TOKENS; t++)
                    top = fmax(top, p[t]);
                if (fabs(top - masses[m]) > 1e-3)
                    fail_msg("%s: the likeliest token holds %g instead of %g", *name, top,
                             masses[m]);
            }
        }
        quality_data_free(&d);
    }
}

// ---- Errors ----

static void test_f16_is_exact(void **unused)
{
    (void)unused;
    struct quality_data d = make("offset-channels", 4);
    struct quality_error e = measure("f16", &d, 16);
    assert_true(e.k == 0 && e.v == 0 && e.logits == 0 && e.k_token == 0);
    assert_true(e.out == 0 && e.out_windows == 0 && e.out_bytes == 0 && e.out_k == 0);
    assert_true(isnan(measure("f16", &d, 15).out_bytes));
    // More bits, less error; all of it beyond the budget of 4.
    struct quality_error two = measure("oscar2", &d, 4), four = measure("oscar4", &d, 4);
    assert_true(two.k > 2 * four.k && two.v > 2 * four.v && two.logits > 2 * four.logits);
    assert_true(two.out > 2 * four.out && four.out > 0 && isnan(four.out_bytes));
    quality_data_free(&d);
}

// As fp16 holds it.
static float rounded(float x)
{
    int e;
    frexpf(x, &e);
    float step = ldexpf(1, (e < -13 ? -13 : e) - 11);
    return rintf(x / step) * step;
}

// Squared error, and squares, of head 0's output where tokens [0, packed) are replaced.
static void output_error(const struct quality_data *d, const float *seen_k, const float *seen_v,
                         bool gone, uint32_t packed, uint32_t head, double *error, double *square)
{
    double p[TOKENS], s[TOKENS];
    size_t base = (size_t)head * TOKENS * DIM;
    float *k = malloc(sizeof(float) * TOKENS * DIM), *v = malloc(sizeof(float) * TOKENS * DIM);
    assert_true(k && v);
    for (size_t i = 0; i < (size_t)TOKENS * DIM; i++) {
        k[i] = rounded(d->k[base + i]);
        v[i] = rounded(d->v[base + i]);
    }
    for (uint32_t i = 0; i < d->queries; i++) {
        const float *q = d->q + ((size_t)head * d->queries + i) * DIM;
        uint32_t from = gone ? packed : 0;
        weights(q, k, TOKENS, p);
        float *mixed = malloc(sizeof(float) * TOKENS * DIM);
        assert_non_null(mixed);
        memcpy(mixed, k, sizeof(float) * TOKENS * DIM);
        if (!gone)
            memcpy(mixed, seen_k + base, sizeof(float) * packed * DIM);
        weights(q, mixed + (size_t)from * DIM, TOKENS - from, s + from);
        for (uint32_t c = 0; c < DIM; c++) {
            double was = 0, is = 0;
            for (uint32_t t = 0; t < TOKENS; t++) {
                was += p[t] * (double)v[t * DIM + c];
                if (t >= from)
                    is += s[t] * (double)(t < packed ? seen_v[base + t * DIM + c] : v[t * DIM + c]);
            }
            *error += (is - was) * (is - was);
            *square += was * was;
        }
        free(mixed);
    }
    free(k);
    free(v);
}

// 2 bits for each token, as the control promises, from the numbers as fp16 holds them.
static void int2(const float *from, float *to)
{
    for (size_t row = 0; row < (size_t)HEADS * TOKENS; row++) {
        float x[DIM], min = INFINITY, max = -INFINITY;
        for (uint32_t c = 0; c < DIM; c++) {
            x[c] = rounded(from[row * DIM + c]);
            min = fminf(min, x[c]);
            max = fmaxf(max, x[c]);
        }
        for (uint32_t c = 0; c < DIM; c++)
            to[row * DIM + c] =
                rounded(min + rintf((x[c] - min) / ((max - min) / 3)) * ((max - min) / 3));
    }
}

static double relative(const float *was, const float *is, uint32_t packed)
{
    double error = 0, square = 0;
    for (uint32_t h = 0; h < HEADS; h++)
        for (size_t i = (size_t)h * TOKENS * DIM; i < (size_t)(h * TOKENS + packed) * DIM; i++) {
            double x = (double)rounded(was[i]);
            error += ((double)is[i] - x) * ((double)is[i] - x);
            square += x * x;
        }
    return sqrt(error / square);
}

static void test_controls(void **unused)
{
    (void)unused;
    struct quality_data d = make("outlier-channels", 3);
    size_t n = (size_t)HEADS * TOKENS * DIM;
    float *k = malloc(n * sizeof *k), *v = malloc(n * sizeof *v);
    assert_true(k && v);
    int2(d.k, k);
    int2(d.v, v);
    struct quality_error e = measure("int2-token", &d, 16);
    assert_true(fabs(e.k - relative(d.k, k, 640)) < 1e-6);
    assert_true(fabs(e.v - relative(d.v, v, 640)) < 1e-6);
    double error = 0, square = 0;
    for (uint32_t h = 0; h < HEADS; h++)
        output_error(&d, k, v, false, 640, h, &error, &square);
    assert_true(fabs(e.out - sqrt(error / square)) < 1e-6);
    // The same windows for all: 32 first and 128 last tokens.
    error = square = 0;
    for (uint32_t h = 0; h < HEADS; h++) {
        for (size_t i = (size_t)h * TOKENS * DIM; i < ((size_t)h * TOKENS + 32) * DIM; i++) {
            k[i] = rounded(d.k[i]);
            v[i] = rounded(d.v[i]);
        }
        output_error(&d, k, v, false, 512, h, &error, &square);
    }
    assert_true(fabs(e.out_windows - sqrt(error / square)) < 1e-6);
    // Dropped: 10 bits a value pay for 400 tokens in full precision, which are three blocks.
    e = measure("dropped", &d, 10);
    assert_true(e.k == 1 && e.v == 1 && fabs(e.logits - 1) < 1e-12 && e.out == 1);
    error = square = 0;
    for (uint32_t h = 0; h < HEADS; h++)
        output_error(&d, NULL, NULL, true, 640 - 384, h, &error, &square);
    assert_true(fabs(e.out_bytes - sqrt(error / square)) < 1e-6);
    free(k);
    free(v);
    quality_data_free(&d);
}

// ---- Windows of a layer ----

static void expect_packed(const char *name, uint64_t tokens, uint64_t packed)
{
    struct quality_method m = method(name);
    struct kvq_shape s = shape(DIM);
    struct quality_layer l;
    float *zeros = calloc((size_t)tokens * HEADS * DIM, sizeof *zeros);
    assert_non_null(zeros);
    assert_int_equal(quality_layer_open(&l, &m, &s, 9, tokens, 0, NULL, text, sizeof text), 0);
    quality_layer_append(&l, zeros, zeros, (uint32_t)tokens);
    quality_layer_settle(&l, m.f.recent_tokens);
    if (l.packed != packed)
        fail_msg("%s: %u of %u tokens are packed, not %u", name, (unsigned)l.packed,
                 (unsigned)tokens, (unsigned)packed);
    quality_layer_close(&l);
    free(zeros);
}

static void test_windows(void **unused)
{
    (void)unused;
    expect_packed("f16", 300, 0);
    expect_packed("oscar2", 127, 0);
    expect_packed("oscar2", 128, 128);
    expect_packed("oscar2", 383, 256);
    expect_packed("kivi-sink2", 255, 128);
    expect_packed("kivi-sink2", 256, 160);
    expect_packed("dropped", 383, 256);
    // Formats that learn from the prompt wait for its first 128 tokens.
    expect_packed("innerq-base", 127, 0);
    expect_packed("innerq-base", 128, 32);
}

// ---- Codebooks ----

// V that consists of 256 different sub-vectors of 4 channels, well apart: training finds nearly
// all of them.
static void test_codebooks(void **unused)
{
    (void)unused;
    struct quality_method m = method("vecinfer-2");
    struct quality_data d = make("outlier-channels", 1);
    assert_int_equal(m.f.v.vector, 4);
    assert_int_equal(m.f.v.bits, 8);
    size_t n = (size_t)HEADS * TOKENS * DIM;
    for (size_t i = 0; i < n; i++) {
        size_t word = i / 4 * 2654435761u >> 5 & 255;
        d.v[i] = (float)(word >> 2 * (i % 4) & 3);
    }
    struct quality_book a, again, other;
    char text[KVQ_TEXT_BYTES];
    assert_true(quality_book_train(&a, &m, &d, 1, text, sizeof text));
    assert_true(quality_book_train(&again, &m, &d, 1, text, sizeof text));
    assert_true(quality_book_train(&other, &m, &d, 2, text, sizeof text));
    assert_memory_equal(a.book.k, again.book.k, 1024 * sizeof(float));
    assert_memory_not_equal(a.book.k, other.book.k, 1024 * sizeof(float));
    uint32_t found = 0;
    for (uint32_t word = 0; word < 256; word++)
        for (uint32_t j = 0, same = 0; j < 256 && same < 4; j++, found += same == 4) {
            same = 0;
            for (uint32_t i = 0; i < 4; i++)
                same += a.book.v[4 * j + i] == (float)(word >> 2 * i & 3);
        }
    assert_in_range(found, 230, 256);
    // Factors are the root of the channel's largest key; outlier channels have the large ones.
    float most = 0;
    for (uint32_t t = 0; t < TOKENS; t++)
        most = fmaxf(most, fabsf(d.k[(size_t)(TOKENS + t) * DIM + 7]));
    assert_true(fabsf(a.book.smooth[DIM + 7] - sqrtf(most)) < 1e-6f);
    quality_book_free(&a);
    quality_book_free(&again);
    quality_book_free(&other);
    m = method("vecinfer-2-nosmooth");
    assert_true(quality_book_train(&a, &m, &d, 1, text, sizeof text));
    assert_null(a.book.smooth);
    quality_book_free(&a);
    // What a method does to keys and values, it does for training; also one with a name that is no
    // format's, and with codes of this kind for V alone.
    m = method("innerq-base+vecinfer-k4x8v4x8:rot=signed:vrot=hadamard:recent=1024:unit=128");
    assert_true(quality_book_train(&again, &m, &d, 1, text, sizeof text));
    quality_book_free(&again);
    // Nothing can be trained for keys that are scaled by what each token is.
    assert_int_equal(quality_method_parse("vecinfer-2:scale=l2", &m, text, sizeof text), -1);
    assert_non_null(strstr(text, "not divided by a token's scale"));
    quality_data_free(&d);
}

// ---- OScaR, appendix I ----

enum { KEYS = 128 };
static const double example_a[4] = {1, 1, 1, 100}, example_b[4] = {0.1, 0.1, 0.1, 0.1};

static double length(const double x[4])
{
    return sqrt(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
}

// Keys that are a and b by turns, each 16 times over, as a format gives them back: the first a and
// the first b in *a and *b, the norms stored with them in norms (if it is not NULL).
static void store_example(const char *name, float *a, float *b, double norms[2])
{
    static float keys[KEYS * HEADS * DIM], zeros[KEYS * HEADS * DIM];
    static float k[KEYS * DIM], v[KEYS * DIM];
    for (uint32_t i = 0; i < KEYS * HEADS * DIM; i++)
        keys[i] = (float)(i / (HEADS * DIM) % 2 ? example_b : example_a)[i % 4];
    struct quality_method m = method(name);
    struct kvq_shape s = shape(DIM);
    struct quality_layer l;
    assert_int_equal(quality_layer_open(&l, &m, &s, 9, KEYS, 0, NULL, text, sizeof text), 0);
    quality_layer_append(&l, keys, zeros, KEYS);
    quality_layer_settle(&l, 0);
    quality_layer_read(&l, true, 0, k, v);
    memcpy(a, k, 4 * sizeof *a);
    memcpy(b, k + DIM, 4 * sizeof *b);
    if (norms) {
        struct kvq_layout layout = kvq_layout_of(&m.f, &s);
        uint16_t stored[2];
        memcpy(stored, l.blocks + layout.groups + layout.k_norms, sizeof stored);
        for (int i = 0; i < 2; i++) // fp16, and no subnormal one
            norms[i] = ldexp(1024 + stored[i] % 1024, stored[i] / 1024 - 25);
    }
    quality_layer_close(&l);
}

// a = (1, 1, 1, 100), b = (0.1, 0.1, 0.1, 0.1). Divided by its norm, b becomes 0.5 and the ones of
// a become 0.01: they share a scale with b, and scaling alone loses them.
static void test_appendix_i(void **unused)
{
    (void)unused;
    float a[4], b[4];
    double norms[2];
    assert_true(fabs(0.1 / length(example_b) - 0.5) < 1e-12);
    assert_true(fabs(1 / length(example_a) - 0.01) < 1e-5);
    store_example("oscar2-norot", a, b, norms);
    assert_true(fabs(norms[0] - 4 * length(example_a)) < 0.2);
    assert_true(fabs(norms[1] - 4 * length(example_b)) < 1e-3);
    for (int i = 0; i < 3; i++)
        assert_true(a[i] == 0);
    assert_true(fabsf(b[0] - 0.1f) < 0.01f);
    // Without scaling the ones stay, and b is lost beside them.
    store_example("oscar2-norot-noscale", a, b, NULL);
    for (int i = 0; i < 3; i++)
        assert_true(fabsf(a[i] - 1) < 0.2f);
    assert_true(b[0] == 0);
    // Rotation alone does not bring b back; both stages do, and keep a to 2% of its length.
    store_example("oscar2-noscale", a, b, NULL);
    assert_true(b[0] == 0);
    store_example("oscar2", a, b, NULL);
    assert_true(fabsf(b[0] - 0.1f) < 0.01f && fabsf(a[3] - 100) < 2);
    for (int i = 0; i < 3; i++)
        assert_true(fabsf(a[i] - 1) < 2);
}

// ---- Results ----

// What was written is found by the next run, also behind a line that was cut off.
static void test_results(void **unused)
{
    (void)unused;
    char path[] = "/tmp/kvq-results-XXXXXX";
    struct quality_results r;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    static const char cut[] = "{\"key\":\"first\"}\n{\"key\":\"cut";
    assert_int_equal(write(fd, cut, strlen(cut)), (ssize_t)strlen(cut));
    close(fd);
    assert_true(quality_results_open(&r, path));
    assert_true(quality_results_has(&r, "first"));
    assert_false(quality_results_has(&r, "cut"));
    assert_true(quality_results_put(&r, "second|\"quoted\"", cJSON_CreateObject()));
    quality_results_close(&r);
    assert_true(quality_results_open(&r, path));
    assert_int_equal(r.n_done, 2);
    assert_true(quality_results_has(&r, "second|\"quoted\""));
    quality_results_close(&r);
    unlink(path);
    assert_false(quality_results_open(&r, "/no/such/place"));
    assert_string_equal(quality_base_name("/a/b"), "b");
    assert_string_equal(quality_base_name("b"), "b");
}

// ---- What is measured again ----

struct counted {
    struct quality_results r;
    char results[32], text[32], dir[4096];
    size_t lines;
};

static void count_open(struct counted *c)
{
    const char *source = getenv("KVQ_SOURCE_DIR");
    if (!source)
        skip();
    *c = (struct counted){.results = "/tmp/kvq-results-XXXXXX", .text = "/tmp/kvq-text-XXXXXX"};
    snprintf(c->dir, sizeof c->dir, "%s/tools/model/kvq-bytes", source);
    int fds[] = {mkstemp(c->results), mkstemp(c->text)};
    assert_true(fds[0] >= 0 && fds[1] >= 0);
    close(fds[0]);
    close(fds[1]);
}

static void count_close(struct counted *c)
{
    unlink(c->results);
    unlink(c->text);
}

static void write_text(const char *path, char fill)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 700; i++)
        fputc(i % 7 ? fill : ' ', f);
    fclose(f);
}

// Runs a part as one run of the program does; so many lines must have come.
static void expect_lines(struct counted *c, const struct quality_options *o,
                         int (*part)(const struct quality_options *, struct quality_results *),
                         size_t more)
{
    assert_true(quality_results_open(&c->r, c->results));
    assert_int_equal(part(o, &c->r), 0);
    quality_results_close(&c->r);
    assert_true(quality_results_open(&c->r, c->results));
    size_t lines = c->r.n_done;
    quality_results_close(&c->r);
    if (lines - c->lines != more)
        fail_msg("%zu lines came, not %zu", lines - c->lines, more);
    c->lines = lines;
}

// The last line has this part.
static void expect_last(const struct counted *c, const char *part)
{
    char line[2048] = "";
    FILE *f = fopen(c->results, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f))
        ;
    fclose(f);
    if (!strstr(line, part))
        fail_msg("%s is not in %s", part, line);
}

static void test_synthetic_keys(void **unused)
{
    (void)unused;
    struct counted c;
    count_open(&c);
    struct quality_options o = {.tokens = 512,
                                .queries = 1,
                                .first_seed = 1,
                                .seeds = 1,
                                .head_dim = 64,
                                .budget_bits = 3.5,
                                .method = {method("f16")},
                                .n_methods = 1};
    size_t names = 0;
    while (quality_synthetic[names])
        names++;
    expect_lines(&c, &o, quality_part_synthetic, 3 * names);
    expect_lines(&c, &o, quality_part_synthetic, 0);
    o.head_dim = 128;
    expect_lines(&c, &o, quality_part_synthetic, 3 * names);
    count_close(&c);
}

// The same name with another text in it is another measurement, and so is another model.
static void test_text_keys(void **unused)
{
    (void)unused;
    struct counted c;
    count_open(&c);
    struct quality_options o = {.model = c.dir,
                                .text = c.text,
                                .tokens = 512,
                                .queries = 1,
                                .bytes = 40,
                                .context = 40,
                                .step = 20,
                                .outliers = 1,
                                .budget_bits = 3.5,
                                .method = {method("f16")},
                                .n_methods = 1};
    for (char fill = 'a'; fill <= 'b'; fill++) {
        write_text(c.text, fill);
        expect_lines(&c, &o, quality_part_perplexity, 1);
        expect_lines(&c, &o, quality_part_perplexity, 0);
        expect_last(&c, "\"kl_error\":null");           // one block
        expect_lines(&c, &o, quality_part_captured, 8); // 4 layers, own queries and aimed ones
        expect_lines(&c, &o, quality_part_captured, 0);
    }
    count_close(&c);
}

// What codebooks are trained on belongs to the methods that have some, and to no other.
static void test_book_keys(void **unused)
{
    (void)unused;
    struct counted c;
    count_open(&c);
    struct quality_method book = method("vecinfer-2"), none = method("oscar2");
    struct quality_options o = {.model = c.dir, .text = c.text, .book_from = 100, .tokens = 512};
    struct quality_options changed[4];
    struct quality_inputs first, other;
    struct problem p = {0};
    char path[sizeof c.dir + 16];
    snprintf(path, sizeof path, "%s/config.json", c.dir);
    o.method[0] = book;
    o.n_methods = 1;
    for (int i = 0; i < 4; i++)
        changed[i] = o;
    changed[0].book_text = path;
    changed[1].book_from = 200;
    changed[2].tokens = 1024;
    write_text(c.text, 'a');
    assert_int_equal(quality_inputs_read(&first, &o, true, path, &p), 0);
    for (int i = 0; i < 4; i++) {
        if (i == 3)
            write_text(c.text, 'b');
        assert_int_equal(quality_inputs_read(&other, &changed[i], true, path, &p), 0);
        assert_true(quality_inputs_of(&first, &none) == quality_inputs_of(&other, &none));
        if (quality_inputs_of(&first, &book) == quality_inputs_of(&other, &book))
            fail_msg("other training data (%d) have the same key", i);
    }
    assert_int_equal(quality_inputs_read(&other, &o, false, path, &p), 0);
    assert_true(quality_inputs_of(&first, &none) != quality_inputs_of(&other, &none));
    assert_int_equal(quality_inputs_read(&other, &o, true, "/no/such/file", &p), -1);
    assert_non_null(strstr(p.text, "/no/such/file"));
    count_close(&c);
}

// ---- The model ----

// Bytes are tokens for some models; for others a text is a list of numbers.
static void test_text(void **unused)
{
    (void)unused;
    char path[] = "/tmp/kvq-text-XXXXXX";
    struct config c = {.vocab = 257, .bytes = true};
    struct problem p = {0};
    uint32_t *ids;
    uint64_t n;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "12 256\n7 300", 12), 12);
    close(fd);
    assert_int_equal(quality_text(&c, path, 1, 3, &ids, &n, &p), 0);
    assert_true(n == 3 && ids[0] == '2' && ids[1] == ' ' && ids[2] == '2');
    free(ids);
    assert_int_equal(quality_text(&c, path, 20, 3, &ids, &n, &p), 0);
    assert_int_equal(n, 0);
    free(ids);
    c.bytes = false;
    assert_int_equal(quality_text(&c, path, 0, 3, &ids, &n, &p), -1);
    assert_non_null(strstr(p.text, "\"300\" is no token id below 257"));
    free(ids);
    c.vocab = 301;
    p = (struct problem){0};
    assert_int_equal(quality_text(&c, path, 1, 2, &ids, &n, &p), 0);
    assert_true(n == 2 && ids[0] == 256 && ids[1] == 7);
    free(ids);
    unlink(path);
}

// Outliers in the weights leave the function as it is, and are there.
static void test_outliers(void **unused)
{
    (void)unused;
    char dir[4096];
    const char *source = getenv("KVQ_SOURCE_DIR");
    if (!source)
        skip();
    snprintf(dir, sizeof dir, "%s/tools/model/kvq-bytes", source);
    static const char prompt[] = "The query planner is recommended when a table has an index.";
    enum { N = sizeof prompt - 1 };
    float *logits[2];
    double largest[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        struct quality_model m;
        struct problem p = {0};
        struct engine e;
        struct quality_cache cache;
        struct quality_method f16 = method("f16");
        uint32_t ids[N];
        for (uint32_t t = 0; t < N; t++)
            ids[t] = (uint8_t)prompt[t];
        assert_int_equal(quality_model_open(&m, dir, N, i ? 30 : 1, &p), 0);
        const struct config *c = &m.model.config;
        assert_int_equal(quality_engine_open(&e, c, N, &p), 0);
        assert_int_equal(quality_cache_open(&cache, &e, c, &f16, N, NULL, false, &p), 0);
        logits[i] = malloc(N * c->vocab * sizeof(float));
        assert_int_equal(model_step(&m.model, &cache.base, ids, N, N, logits[i], &p), 0);
        float *k = malloc(2 * N * c->head_dim * sizeof *k);
        quality_layer_read(&cache.layer[2], false, 0, k, k + N * c->head_dim);
        for (uint32_t j = 0; j < N * c->head_dim; j++)
            largest[i] = fmax(largest[i], fabs((double)k[j]));
        free(k);
        quality_cache_close(&cache);
        quality_engine_close(&e);
        quality_model_close(&m);
    }
    for (uint32_t j = 0; j < N * 257; j++)
        assert_true(fabsf(logits[0][j] - logits[1][j]) < 0.05f);
    assert_true(largest[1] > 5 * largest[0]);
    free(logits[0]);
    free(logits[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),          cmocka_unit_test(test_channels),
        cmocka_unit_test(test_tokens),         cmocka_unit_test(test_aim),
        cmocka_unit_test(test_f16_is_exact),   cmocka_unit_test(test_controls),
        cmocka_unit_test(test_windows),        cmocka_unit_test(test_codebooks),
        cmocka_unit_test(test_appendix_i),     cmocka_unit_test(test_results),
        cmocka_unit_test(test_text),           cmocka_unit_test(test_outliers),
        cmocka_unit_test(test_synthetic_keys), cmocka_unit_test(test_text_keys),
        cmocka_unit_test(test_book_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
