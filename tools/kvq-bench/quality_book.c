// SPDX-License-Identifier: Apache-2.0
//
// Codebooks for measurements, made of the keys and values of one layer: smoothing factors, and
// centroids by k-means with seeded starts (k-means++), at most 30 rounds.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"

enum { ROUNDS = 30, POINTS_PER_CENTROID = 64, MOST_POINTS = 65536 };

struct clusters {
    uint32_t k, dim, points;
    const float *point;            // [points][dim]
    float *centroid, *transposed;  // [k][dim], [dim][k]
    float *half_square, *distance; // [k]
    double *sum;                   // [k][dim]
    uint32_t *count, *of;
    float *nearest; // [points], squared distance
};

static uint64_t next(uint64_t *state) // SplitMix64
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double uniform(uint64_t *state)
{
    return (double)(next(state) >> 11) * 0x1p-53;
}

// ---- k-means ----

static float square_distance(const float *a, const float *b, uint32_t dim)
{
    float sum = 0;
    for (uint32_t i = 0; i < dim; i++)
        sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sum;
}

// Starts: each is a point drawn by its squared distance from the nearest start so far.
static void draw_starts(struct clusters *c, uint64_t *state)
{
    uint32_t from = (uint32_t)(uniform(state) * c->points);
    for (uint32_t i = 0; i < c->points; i++)
        c->nearest[i] = INFINITY;
    for (uint32_t j = 0; j < c->k; j++) {
        memcpy(c->centroid + (size_t)j * c->dim, c->point + (size_t)from * c->dim,
               c->dim * sizeof *c->centroid);
        double sum = 0;
        for (uint32_t i = 0; i < c->points; i++) {
            float d = square_distance(c->point + (size_t)i * c->dim,
                                      c->centroid + (size_t)j * c->dim, c->dim);
            c->nearest[i] = d < c->nearest[i] ? d : c->nearest[i];
            sum += (double)c->nearest[i];
        }
        double stop = uniform(state) * sum;
        for (from = 0; from + 1 < c->points && stop > (double)c->nearest[from]; from++)
            stop -= (double)c->nearest[from];
    }
}

static void prepare(struct clusters *c)
{
    for (uint32_t j = 0; j < c->k; j++) {
        c->half_square[j] = 0;
        for (uint32_t i = 0; i < c->dim; i++) {
            float x = c->centroid[(size_t)j * c->dim + i];
            c->transposed[(size_t)i * c->k + j] = x;
            c->half_square[j] += x * x / 2;
        }
    }
}

// Each point to its nearest centroid, of equal ones the first; returns the sum of squares.
static double assign(struct clusters *c)
{
    double sum = 0;
    prepare(c);
    for (uint32_t p = 0; p < c->points; p++) {
        const float *x = c->point + (size_t)p * c->dim;
        memcpy(c->distance, c->half_square, c->k * sizeof *c->distance);
        for (uint32_t i = 0; i < c->dim; i++)
            for (uint32_t j = 0; j < c->k; j++)
                c->distance[j] -= x[i] * c->transposed[(size_t)i * c->k + j];
        uint32_t best = 0;
        for (uint32_t j = 1; j < c->k; j++)
            best = c->distance[j] < c->distance[best] ? j : best;
        c->of[p] = best;
        c->nearest[p] = square_distance(x, c->centroid + (size_t)best * c->dim, c->dim);
        sum += (double)c->nearest[p];
    }
    return sum;
}

// An empty cluster gets the point that is worst served by the largest one.
static void fill_empty(struct clusters *c, uint32_t empty)
{
    uint32_t largest = 0, worst = 0;
    float most = -1;
    for (uint32_t j = 1; j < c->k; j++)
        largest = c->count[j] > c->count[largest] ? j : largest;
    for (uint32_t p = 0; p < c->points; p++)
        if (c->of[p] == largest && c->nearest[p] > most) {
            most = c->nearest[p];
            worst = p;
        }
    memcpy(c->centroid + (size_t)empty * c->dim, c->point + (size_t)worst * c->dim,
           c->dim * sizeof *c->centroid);
    c->nearest[worst] = 0;
    c->count[largest]--;
}

static void move(struct clusters *c)
{
    memset(c->sum, 0, (size_t)c->k * c->dim * sizeof *c->sum);
    memset(c->count, 0, c->k * sizeof *c->count);
    for (uint32_t p = 0; p < c->points; p++) {
        c->count[c->of[p]]++;
        for (uint32_t i = 0; i < c->dim; i++)
            c->sum[(size_t)c->of[p] * c->dim + i] += (double)c->point[(size_t)p * c->dim + i];
    }
    for (uint32_t j = 0; j < c->k; j++)
        for (uint32_t i = 0; i < c->dim && c->count[j]; i++)
            c->centroid[(size_t)j * c->dim + i] =
                (float)(c->sum[(size_t)j * c->dim + i] / c->count[j]);
    for (uint32_t j = 0; j < c->k; j++)
        if (c->count[j] == 0)
            fill_empty(c, j);
}

static bool take_clusters(struct clusters *c)
{
    size_t k = c->k, kd = k * c->dim;
    c->transposed = malloc(kd * sizeof(float));
    c->half_square = malloc(k * sizeof(float));
    c->distance = malloc(k * sizeof(float));
    c->sum = malloc(kd * sizeof(double));
    c->count = malloc(k * sizeof(uint32_t));
    c->of = malloc(c->points * sizeof(uint32_t));
    c->nearest = malloc(c->points * sizeof(float));
    return c->transposed && c->half_square && c->distance && c->sum && c->count && c->of &&
           c->nearest;
}

// Centroids [k][dim] of the points. False: no memory.
static bool cluster(const float *point, uint32_t points, uint32_t dim, uint32_t k, uint64_t seed,
                    float *centroid)
{
    struct clusters c = {.k = k, .dim = dim, .points = points, .point = point};
    c.centroid = centroid;
    bool fine = take_clusters(&c);
    double last = INFINITY;
    if (fine)
        draw_starts(&c, &seed);
    for (int round = 0; fine && round < ROUNDS; round++) {
        double sum = assign(&c);
        if (sum > last * 0.999)
            break;
        last = sum;
        move(&c);
    }
    void *rooms[] = {c.transposed, c.half_square, c.distance, c.sum, c.count, c.of, c.nearest};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        free(rooms[i]);
    return fine;
}

// ---- Layers ----

// Factors of each head and channel, as VecInfer takes them.
static void smooth_factors(const struct quality_data *d, float *factor)
{
    for (uint32_t h = 0; h < d->heads; h++)
        for (uint32_t c = 0; c < d->dim; c++) {
            float most = 0;
            for (uint32_t t = 0; t < d->tokens; t++)
                most = fmaxf(most, fabsf(d->k[((size_t)h * d->tokens + t) * d->dim + c]));
            factor[h * d->dim + c] = fmaxf(sqrtf(most), 1e-5f);
        }
}

static void rotate(float *row, uint32_t dim)
{
    for (uint32_t h = 1; h < dim; h *= 2)
        for (uint32_t i = 0; i < dim; i++)
            if (!(i & h)) {
                float a = row[i], b = row[i + h];
                row[i] = a + b;
                row[i + h] = a - b;
            }
    for (uint32_t i = 0; i < dim; i++)
        row[i] /= sqrtf((float)dim);
}

// K (or V) as it is before it is cut into sub-vectors; NULL: no memory.
static float *transformed(const struct quality_method *m, const struct quality_data *d,
                          const float *factor, bool v)
{
    size_t rows = (size_t)d->heads * d->tokens;
    float *x = malloc(rows * d->dim * sizeof *x);
    if (!x)
        return NULL;
    memcpy(x, v ? d->v : d->k, rows * d->dim * sizeof *x);
    for (size_t r = 0; r < rows && !v; r++) {
        for (uint32_t c = 0; c < d->dim && factor; c++)
            x[r * d->dim + c] /= factor[r / d->tokens * d->dim + c];
        if (m->f.k_rotation == KVQ_ROTATE_HADAMARD)
            rotate(x + r * d->dim, d->dim);
    }
    return x;
}

// Trains one side's table over all heads and sub-vectors.
static bool train_side(const struct quality_method *m, const struct quality_data *d, bool v,
                       uint64_t seed, const float *factor, float *table)
{
    const struct kvq_side *side = v ? &m->f.v : &m->f.k;
    uint32_t k = 1u << side->bits, dim = side->vector;
    size_t all = (size_t)d->heads * d->tokens * (d->dim / dim);
    uint32_t most = k * POINTS_PER_CENTROID < MOST_POINTS ? k * POINTS_PER_CENTROID : MOST_POINTS;
    uint32_t points = all < most ? (uint32_t)all : most;
    float *x = transformed(m, d, factor, v), *sample = malloc((size_t)points * dim * sizeof *x);
    bool fine = x && sample;
    for (uint32_t i = 0; fine && i < points; i++) // spread evenly, at a random place in each part
        memcpy(sample + (size_t)i * dim,
               x + (size_t)(((double)i + uniform(&seed)) * (double)all / points) * dim,
               dim * sizeof *x);
    fine = fine && cluster(sample, points, dim, k, seed, table);
    free(x);
    free(sample);
    return fine;
}

static size_t table_size(const struct kvq_side *side)
{
    return side->codec == KVQ_CODEC_BOOK ? (size_t)side->vector << side->bits : 0;
}

bool quality_wants_book(const struct quality_method *m)
{
    return m->kind == QUALITY_FORMAT &&
           (m->f.k.codec == KVQ_CODEC_BOOK || m->f.v.codec == KVQ_CODEC_BOOK ||
            m->f.k_channel == KVQ_CHANNEL_BOOK);
}

bool quality_book_train(struct quality_book *b, const struct quality_method *m,
                        const struct quality_data *d, uint64_t seed)
{
    size_t factors = (size_t)d->heads * d->dim;
    size_t k = table_size(&m->f.k), v = table_size(&m->f.v);
    *b = (struct quality_book){.memory = malloc((factors + k + v) * sizeof(float))};
    if (!b->memory)
        return false;
    float *factor = m->f.k_channel == KVQ_CHANNEL_BOOK ? b->memory : NULL;
    b->book =
        (struct kvq_book){.smooth = factor, .k = b->memory + factors, .v = b->memory + factors + k};
    if (factor)
        smooth_factors(d, factor);
    bool fine = (!k || train_side(m, d, false, seed, factor, b->memory + factors)) &&
                (!v || train_side(m, d, true, seed + 1, NULL, b->memory + factors + k));
    if (!fine)
        quality_book_free(b);
    return fine;
}

void quality_book_free(struct quality_book *b)
{
    free(b->memory);
    *b = (struct quality_book){0};
}
