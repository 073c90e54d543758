// SPDX-License-Identifier: Apache-2.0
//
// Synthetic caches with what the papers describe, and queries aimed at keys. All is seeded; the
// same seed gives the same numbers.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"

enum { SINKS = 4, OUTLIER_CHANNELS = QUALITY_LEAST_DIM, SEGMENT = 256 };

const char *const quality_synthetic[] = {"smooth",         "outlier-channels", "offset-channels",
                                         "low-norm-sinks", "mixed-modalities", "huge-tokens",
                                         "imbalance-0.00", "imbalance-0.25",   "imbalance-0.50",
                                         "imbalance-1.00", "imbalance-1.50",   NULL};

bool quality_data_take(struct quality_data *d, const char *name, uint32_t heads, uint32_t tokens,
                       uint32_t dim, uint32_t queries)
{
    size_t n = (size_t)heads * tokens * dim;
    *d = (struct quality_data){
        .heads = heads, .tokens = tokens, .dim = dim, .queries = queries, .layer = UINT32_MAX};
    snprintf(d->name, sizeof d->name, "%s", name);
    d->k = calloc(n, sizeof *d->k);
    d->v = calloc(n, sizeof *d->v);
    d->q = calloc((size_t)heads * queries * dim, sizeof *d->q);
    d->position = calloc(queries, sizeof *d->position);
    if (d->k && d->v && d->q && d->position)
        return true;
    fprintf(stderr, "kvq-bench: no memory for %u tokens\n", tokens);
    quality_data_free(d);
    return false;
}

void quality_data_free(struct quality_data *d)
{
    free(d->k);
    free(d->v);
    free(d->q);
    free(d->position);
    *d = (struct quality_data){0};
}

// ---- Random numbers ----

static uint64_t next(uint64_t *state) // SplitMix64
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint32_t below(uint64_t *state, uint32_t n)
{
    return (uint32_t)((next(state) >> 32) * n >> 32);
}

static void normal(uint64_t seed, float *x, size_t n) // N(0, 1), by Box and Muller
{
    for (size_t i = 0; i < n; i++) {
        double u = ((double)(next(&seed) >> 11) + 1) * 0x1p-53;
        double v = (double)(next(&seed) >> 11) * 0x1p-53;
        x[i] = (float)(sqrt(-2 * log(u)) * cos(2 * M_PI * v));
    }
}

static bool among(uint32_t x, const uint32_t *list, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (list[i] == x)
            return true;
    return false;
}

// OUTLIER_CHANNELS different channels.
static void draw_channels(uint64_t *state, uint32_t dim, uint32_t *channel)
{
    for (uint32_t i = 0; i < OUTLIER_CHANNELS; i++)
        do
            channel[i] = below(state, dim);
        while (among(channel[i], channel, i));
}

static void scale_token(float *row, uint32_t dim, double factor)
{
    for (uint32_t c = 0; c < dim; c++)
        row[c] = (float)(row[c] * factor);
}

// ---- The caches: each changes N(0, 1) numbers of one head ----

// What belongs to a model (which channels, which means) and what belongs to a text.
struct sources {
    uint64_t model, text;
};

// Few channels of large values: around zero, or (offset) around a large value of their own.
static void outlier_channels(const struct quality_data *d, struct sources *s, float *k, bool offset)
{
    uint32_t channel[OUTLIER_CHANNELS];
    draw_channels(&s->model, d->dim, channel);
    for (uint32_t i = 0; i < OUTLIER_CHANNELS; i++) {
        float sign = below(&s->model, 2) ? 1.0f : -1.0f;
        for (uint32_t t = 0; t < d->tokens; t++) {
            float *x = &k[(size_t)t * d->dim + channel[i]];
            *x = offset ? *x + sign * 10.0f : *x * 10.0f;
        }
    }
}

// The first tokens, and one in 512 of the others, are small; channels have offsets, as where such
// tokens are seen in models.
static void low_norm_sinks(const struct quality_data *d, struct sources *s, float *k, float *v)
{
    outlier_channels(d, s, k, true);
    for (uint32_t t = 0; t < d->tokens; t++)
        if (t < SINKS || below(&s->text, 512) == 0) {
            scale_token(k + (size_t)t * d->dim, d->dim, 0.05);
            scale_token(v + (size_t)t * d->dim, d->dim, 0.05);
        }
}

// Text and images by turns: norms 8 times apart, each kind with a mean of its own.
static void mixed_modalities(const struct quality_data *d, struct sources *s, float *k)
{
    float mean[2][KVQ_MAX_HEAD_DIM];
    normal(next(&s->model), &mean[0][0], 2 * KVQ_MAX_HEAD_DIM);
    for (uint32_t t = 0; t < d->tokens; t++) {
        uint32_t kind = t / SEGMENT % 2;
        float *row = k + (size_t)t * d->dim;
        for (uint32_t c = 0; c < d->dim; c++)
            row[c] += mean[kind][c];
        scale_token(row, d->dim, kind ? 8 : 1);
    }
}

static void huge_tokens(const struct quality_data *d, struct sources *s, float *k)
{
    for (uint32_t t = 0; t < d->tokens; t++)
        if (below(&s->text, 100) == 0)
            scale_token(k + (size_t)t * d->dim, d->dim, 10);
}

// Norms of tokens spread log-normally. Sigma 0 leaves all tokens with the same norm.
static void imbalance(const struct quality_data *d, struct sources *s, float *k, double sigma)
{
    for (uint32_t t = 0; t < d->tokens; t++) {
        float *row = k + (size_t)t * d->dim, z;
        double sum = 0;
        normal(next(&s->text), &z, 1);
        for (uint32_t c = 0; c < d->dim; c++)
            sum += (double)row[c] * row[c];
        scale_token(row, d->dim, sqrt(d->dim / sum) * exp(sigma * (double)z));
    }
}

static bool fill_head(const struct quality_data *d, const char *name, struct sources *s, float *k,
                      float *v)
{
    if (strcmp(name, "smooth") == 0)
        return true;
    if (strcmp(name, "outlier-channels") == 0)
        outlier_channels(d, s, k, false);
    else if (strcmp(name, "offset-channels") == 0)
        outlier_channels(d, s, k, true);
    else if (strcmp(name, "low-norm-sinks") == 0)
        low_norm_sinks(d, s, k, v);
    else if (strcmp(name, "mixed-modalities") == 0)
        mixed_modalities(d, s, k);
    else if (strcmp(name, "huge-tokens") == 0)
        huge_tokens(d, s, k);
    else if (strncmp(name, "imbalance-", 10) == 0)
        imbalance(d, s, k, strtod(name + 10, NULL));
    else
        return false;
    return true;
}

bool quality_fill(struct quality_data *d, const char *name, uint64_t model, uint64_t seed)
{
    size_t n = (size_t)d->tokens * d->dim;
    struct sources s = {model, seed};
    for (uint32_t h = 0; h < d->heads; h++) {
        normal(next(&s.text), d->k + h * n, n);
        normal(next(&s.text), d->v + h * n, n);
        if (!fill_head(d, name, &s, d->k + h * n, d->v + h * n))
            return false;
    }
    return true;
}

// ---- Queries ----

// Mean and standard deviation of each channel.
static void channel_moments(const float *k, uint32_t tokens, uint32_t dim, double *mean,
                            double *deviation)
{
    for (uint32_t c = 0; c < dim; c++) {
        double sum = 0, squares = 0;
        for (uint32_t t = 0; t < tokens; t++) {
            double x = (double)k[(size_t)t * dim + c];
            sum += x;
            squares += x * x;
        }
        mean[c] = sum / tokens;
        deviation[c] = sqrt(fmax(squares / tokens - mean[c] * mean[c], 1e-12));
    }
}

// The largest of n probabilities whose logits are stretched by `factor`.
static double top_mass(const double *logit, uint32_t n, double factor)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        max = fmax(max, logit[i] * factor);
    for (uint32_t i = 0; i < n; i++)
        sum += exp(logit[i] * factor - max);
    return 1 / sum;
}

// How far logits have to be stretched for the likeliest token to hold `mass`: by bisection, since
// the mass grows with the factor.
static double stretch(const double *logit, uint32_t n, double mass)
{
    double low = 0, high = 1;
    while (top_mass(logit, n, high) < mass && high < 1e6)
        high *= 2;
    for (int i = 0; i < 50; i++) {
        double middle = (low + high) / 2;
        if (top_mass(logit, n, middle) < mass)
            low = middle;
        else
            high = middle;
    }
    return high;
}

// One query: towards a key as it differs from the others, channel by channel in units of their
// spread, and some noise.
static void aim_one(const struct quality_data *d, const float *k, const double *mean,
                    const double *deviation, double mass, double scale, uint64_t *state,
                    double *logit, float *q)
{
    float noise[KVQ_MAX_HEAD_DIM];
    const float *target = k + (size_t)below(state, d->tokens) * d->dim;
    normal(next(state), noise, d->dim);
    for (uint32_t c = 0; c < d->dim; c++)
        q[c] =
            (float)(((target[c] - mean[c]) / deviation[c] + 0.5 * (double)noise[c]) / deviation[c]);
    for (uint32_t t = 0; t < d->tokens; t++) {
        const float *row = k + (size_t)t * d->dim;
        double sum = 0;
        for (uint32_t c = 0; c < d->dim; c++)
            sum += (double)q[c] * row[c];
        logit[t] = sum * scale;
    }
    scale_token(q, d->dim, stretch(logit, d->tokens, mass));
}

void quality_aim(struct quality_data *d, double mass, uint64_t seed, double softmax_scale)
{
    double mean[KVQ_MAX_HEAD_DIM], deviation[KVQ_MAX_HEAD_DIM];
    double *logit = malloc(d->tokens * sizeof *logit);
    uint64_t state = seed;
    for (uint32_t h = 0; h < d->heads && logit; h++) {
        const float *k = d->k + (size_t)h * d->tokens * d->dim;
        channel_moments(k, d->tokens, d->dim, mean, deviation);
        for (uint32_t i = 0; i < d->queries; i++) {
            d->position[i] = d->tokens - 1;
            aim_one(d, k, mean, deviation, mass, softmax_scale, &state, logit,
                    d->q + ((size_t)h * d->queries + i) * d->dim);
        }
    }
    free(logit);
}
