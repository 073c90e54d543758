// SPDX-License-Identifier: Apache-2.0
//
// What the fast path's 8-bit products cost, against what quantizing costs: both as the length of a
// difference of all outputs, fast from exact and exact from attention over the raw tokens. No more
// than a quarter: with sinks, sinks whose values are small, and channels much larger than others.
// More, but less than quantizing, in 3 and 4 bits where each group has one weight beside which all
// others round to 0, and values do not cancel.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "tests/kernels/kvtest.h"

static const double MOST = 0.25;
static const double MOST_KVQ2 = 0.15; // one and a half times the most of some seeds
static const double MOST_LOST = 1;    // weights that round to 0, 3 and 4 bits

enum { TOKENS = 1024, QUERIES = 4, MANY_QUERIES = 17, GQA = 4, SINK = 3, ONE = 9 };

static const struct kvq_kernels *all_kernels[KVQ_ISA_BEST + 1];
static int n_kernels;

struct data {
    const char *name;
    float mass;       // of the softmax on the sink token, about; 0: there is none
    float value;      // what the sink's value is multiplied with
    float k_channels; // what a few channels are multiplied with
    float v_channels;
    float k_one;  // what one channel of keys is multiplied with: of formats that can take it
    bool unseen;  // queries are 0 in that channel, so that the others are what counts
    float spread; // of all keys and values
    bool alike;   // all tokens: sums are as large as they can be
    float
        weight; // of one token of 32, in those of each other; values are all alike. 0: random ones
};

static const struct data all_data[] = {
    {.name = "N(0, 1)", .spread = 1},
    {.name = "sink, mass 0.28", .mass = 0.28f, .value = 1, .spread = 1},
    {.name = "sink, mass 0.28, V x 0.05", .mass = 0.28f, .value = 0.05f, .spread = 1},
    {.name = "sink, mass 0.28, V x 0.01", .mass = 0.28f, .value = 0.01f, .spread = 1},
    {.name = "sink, mass 0.9, V x 0.05", .mass = 0.9f, .value = 0.05f, .spread = 1},
    {.name = "sink, mass 0.9, V x 0.01", .mass = 0.9f, .value = 0.01f, .spread = 1},
    {.name = "outlier channels of K", .k_channels = 10, .v_channels = 1, .spread = 1},
    {.name = "outlier channels of V", .k_channels = 1, .v_channels = 10, .spread = 1},
    {.name = "outlier channels of K and V", .k_channels = 20, .v_channels = 20, .spread = 1},
    {.name = "one channel of K x 100", .k_one = 100, .spread = 1},
    {.name = "K x 3,000 where q is 0", .k_one = 3000, .unseen = true, .spread = 1},
    {.name = "small values", .spread = 0.01f},
    {.name = "all tokens alike", .spread = 1, .alike = true},
    {.name = "V alike, one of 32 x 600", .spread = 1, .alike = true, .weight = 600},
};

// What all queries have in common, and the sink's key points to.
static float common(uint32_t c)
{
    return c * 37 % 64 < 32 ? 0.5f : -0.5f;
}

static void fill_data(const void *data, const struct kvq_shape *s, float *k, float *v,
                      uint32_t tokens)
{
    const struct data *d = data;
    struct kvt_rng rng = {.state = kvt_seed() + 1 +
                                   (uint64_t)(d - all_data)}; // queries have the seed itself
    kvt_fill(&rng, KVT_NORMAL, k, tokens, s->k_dim);
    kvt_fill(&rng, KVT_NORMAL, v, tokens, s->k_dim);
    for (uint32_t i = 0; i < tokens * s->k_dim; i++) {
        bool strong = i % s->k_dim % 61 == 7;
        k[i] *= strong && d->k_channels > 0 ? d->k_channels : 1;
        k[i] *= i % s->k_dim == ONE && d->k_one > 0 ? d->k_one : 1;
        v[i] *= d->spread * (strong && d->v_channels > 0 ? d->v_channels : 1);
    }
    for (uint32_t t = 1; d->alike && t < tokens; t++) {
        memcpy(k + t * s->k_dim, k, sizeof *k * s->k_dim);
        memcpy(v + t * s->k_dim, v, sizeof *v * s->k_dim);
    }
    for (uint32_t i = 0; d->weight > 0 && i < tokens * s->k_dim; i++)
        k[i] = i / s->k_dim % 32 == SINK
                   ? common(i % s->k_dim) * logf(d->weight) / (0.25f * sqrtf(s->k_dim))
                   : 0;
    if (d->mass == 0)
        return;
    // The other logits have a variance of 1.25.
    float logit = logf((float)tokens) + 0.625f + logf(d->mass / (1 - d->mass));
    for (uint32_t c = 0; c < s->k_dim; c++) {
        k[SINK * s->k_dim + c] = common(c) * logit / (0.25f * sqrtf(s->k_dim));
        v[SINK * s->k_dim + c] *= d->value;
    }
}

static double distance(const float *a, const float *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sqrt(sum);
}

static float *attend(const struct kvq_kernels *k, struct kvt_request *r, size_t n)
{
    float *out = malloc(sizeof *out * n);
    kvt_attend(k, &r->a, 1);
    memcpy(out, r->out, sizeof *out * n);
    return out;
}

static double most_of(const char *format, const struct data *d)
{
    if (d->weight > 0)
        return format[strlen(format) - 1] > '2' ? MOST_LOST : MOST;
    return strcmp(format, "kvq2") == 0 ? MOST_KVQ2 : MOST;
}

// One very strong channel of keys costs more in other formats, and with AMX (docs/formats.md).
static bool takes(const struct kvq_kernels *k, const char *format, const struct data *d)
{
    return d->k_one == 0 ||
           (strcmp(format, "kivi4") == 0 && strcmp(kvq_kernels_isa(k), "amx") != 0);
}

// Fails if the fast path of one instruction set is further from the exact one than it may be.
static void compare(const struct kvq_kernels *k, const char *format, uint32_t dim,
                    const struct data *d)
{
    struct kvq_shape shape = kvt_shape(GQA, 1, dim, KVQ_F16);
    struct kvt_cache c = kvt_cache_of(all_kernels[0], format, shape, TOKENS, -1, fill_data, d);
    // What AMX does itself begins with so many; with fewer it is AVX-512.
    uint32_t queries = strcmp(kvq_kernels_isa(k), "amx") == 0 ? MANY_QUERIES : QUERIES;
    struct kvt_request r = kvt_request(&c, queries, kvt_seed());
    size_t n = (size_t)queries * GQA * dim;
    static const float zeros[MANY_QUERIES * GQA * KVQ_MAX_HEAD_DIM];
    for (size_t i = 0; i < n; i++)
        r.q[i] = d->unseen && i % dim == ONE
                     ? 0
                     : (d->weight > 0 ? 0 : r.q[i]) + common(i % dim); // weights are as they say
    assert_true(kvq_kernels_has_fast(k, c.format, &shape));
    float *exact = attend(k, &r, n);
    r.a.path = KVQ_PATH_FAST;
    float *fast = attend(k, &r, n);
    r.a.path = KVQ_PATH_EXACT;
    for (uint32_t i = 0; i < c.n_pages; i++)
        c.pages[i].packed_tokens = 0;
    float *raw = attend(k, &r, n);
    double noise = distance(exact, raw, n), error = distance(fast, exact, n);
    double all = distance(raw, zeros, n), most = most_of(format, d);
    printf("%-7s %-7s %3u  %-28s quantizing %5.1f%%  fast %5.2f%%  %4.2f\n", kvq_kernels_isa(k),
           format, (unsigned)dim, d->name, 100 * noise / all, 100 * error / all, error / noise);
    if (!(error <= most * noise))
        fail_msg("the fast path costs %.2f of what quantizing costs, at most %.2f is allowed",
                 error / noise, most);
    free(exact);
    free(fast);
    free(raw);
    kvt_request_free(&r);
    kvt_cache_free(&c);
}

// In software all takes minutes: there one size of heads has all data, and the others the first.
static bool takes_long(uint32_t dim, size_t data)
{
#ifdef KVQ_AVX512_IN_SOFTWARE
    return dim > 64 && data > 0 && !getenv("KVQ_FULL");
#else
    (void)dim, (void)data;
    return false;
#endif
}

static void test_fast(void **state)
{
    static const char *const formats[] = {"oscar2", "oscar3", "oscar4", "kivi2", "kivi4", "kvq2"};
    (void)state;
    for (int i = 0; i < n_kernels; i++)
        for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
            for (uint32_t dim = 64; dim <= KVQ_MAX_HEAD_DIM; dim *= 2)
                for (size_t d = 0; d < sizeof all_data / sizeof *all_data; d++)
                    if (takes(all_kernels[i], formats[f], &all_data[d]) && !takes_long(dim, d))
                        compare(all_kernels[i], formats[f], dim, &all_data[d]);
}

static void fill_zero_values(const void *data, const struct kvq_shape *s, float *k, float *v,
                             uint32_t tokens)
{
    struct kvt_rng rng = {.state = kvt_seed()};
    (void)data;
    kvt_fill(&rng, KVT_NORMAL, k, tokens, s->k_dim);
    memset(v, 0, sizeof *v * tokens * s->k_dim);
}

// Values of 0 have scales of 0, and stay 0 by whatever they are multiplied.
static void test_zero_values(void **state)
{
    static const char *const formats[] = {"oscar2", "kivi4", "kvq2", "kvq2-s0"};
    (void)state;
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (uint32_t dim = 64; dim <= KVQ_MAX_HEAD_DIM; dim *= 2) {
            struct kvt_cache c =
                kvt_cache_of(all_kernels[0], formats[f], kvt_shape(GQA, 1, dim, KVQ_F16), TOKENS,
                             -1, fill_zero_values, NULL);
            struct kvt_request r = kvt_request(&c, QUERIES, kvt_seed());
            r.a.path = KVQ_PATH_FAST;
            for (int i = 0; i < n_kernels; i++) {
                kvt_attend(all_kernels[i], &r.a, 1);
                for (size_t at = 0; at < (size_t)QUERIES * GQA * dim; at++)
                    assert_true(r.out[at] == 0);
            }
            kvt_request_free(&r);
            kvt_cache_free(&c);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_fast),
                                       cmocka_unit_test(test_zero_values)};
    if (kvt_lacks_amx())
        return 77; // skipped
    for (int isa = kvt_lowest_isa(KVQ_ISA_AVX2); isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        struct kvq_shape s = kvt_shape(GQA, 1, 64, KVQ_F16);
        if (kvq_kernels_has_fast(k, kvt_format("oscar2"), &s) &&
            (n_kernels == 0 || k != all_kernels[n_kernels - 1]))
            all_kernels[n_kernels++] = k;
    }
    return n_kernels ? cmocka_run_group_tests(tests, NULL, NULL) : 77;
}
