// SPDX-License-Identifier: Apache-2.0
//
// k-means. Points lie in blocks of 16, channel by channel, so that compilers can work on all of a
// block at once without changing the order of any sum.
#include "tools/kvq-codebook/kmeans.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16 };
static const double LEAST_GAIN = 1e-4;

struct clusters {
    const struct kmeans_job *job;
    float *centroid; // [k][dim], the caller's
    uint32_t blocks; // of points; the last one is filled up with zeros that nobody counts
    float *block;    // [blocks][dim][LANES]
    uint32_t *of;    // [blocks * LANES]: cluster of each point
    float *distance; // likewise: its squared distance
    double *sum;     // [k][dim]
    double *spread;  // [k]: sum of squared distances
    uint32_t *count; // [k]
    uint64_t drawn;  // random numbers so far
};

uint64_t kmeans_mix(uint64_t seed, uint64_t n)
{
    uint64_t z = seed + (n + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double uniform(struct clusters *c)
{
    return (double)(kmeans_mix(c->job->seed, c->drawn++) >> 11) * 0x1p-53;
}

static const float *point(const struct clusters *c, uint32_t p)
{
    return c->job->points + (size_t)p * c->job->dim;
}

static float *centroid(const struct clusters *c, uint32_t j)
{
    return c->centroid + (size_t)j * c->job->dim;
}

// ---- Distances ----

static inline void distances(const float *block, const float *to, uint32_t dim, float *out)
{
    float sum[LANES] = {0};
    for (uint32_t i = 0; i < dim; i++)
        for (uint32_t l = 0; l < LANES; l++) {
            float d = block[i * LANES + l] - to[i];
            sum[l] += d * d;
        }
    memcpy(out, sum, sizeof sum);
}

// Distances that are less than those so far replace them, and j their clusters.
static inline void nearer(const float *block, const float *to, uint32_t dim, uint32_t j,
                          float *least, uint32_t *of)
{
    float d[LANES];
    distances(block, to, dim, d);
    for (uint32_t l = 0; l < LANES; l++) {
        of[l] = d[l] < least[l] ? j : of[l];
        least[l] = d[l] < least[l] ? d[l] : least[l];
    }
}

static inline void assign_block(const float *block, const float *centroids, uint32_t k,
                                uint32_t dim, float *least, uint32_t *of)
{
    float best[LANES];
    uint32_t who[LANES] = {0};
    for (uint32_t l = 0; l < LANES; l++)
        best[l] = INFINITY;
    for (uint32_t j = 0; j < k; j++)
        nearer(block, centroids + (size_t)j * dim, dim, j, best, who);
    memcpy(least, best, sizeof best);
    memcpy(of, who, sizeof who);
}

// Every point to its nearest centroid. Returns the sum of squared distances.
static double assign(struct clusters *c)
{
    uint32_t k = c->job->k, dim = c->job->dim;
    double sum = 0;
    for (uint32_t b = 0; b < c->blocks; b++) {
        const float *block = c->block + (size_t)b * dim * LANES;
        float *least = c->distance + (size_t)b * LANES;
        uint32_t *of = c->of + (size_t)b * LANES;
        switch (dim) { // constants, for the compiler's sake
        case 2:
            assign_block(block, c->centroid, k, 2, least, of);
            break;
        case 4:
            assign_block(block, c->centroid, k, 4, least, of);
            break;
        case 8:
            assign_block(block, c->centroid, k, 8, least, of);
            break;
        default:
            assign_block(block, c->centroid, k, dim, least, of);
        }
    }
    for (uint32_t p = 0; p < c->job->count; p++)
        sum += (double)c->distance[p];
    return sum;
}

// ---- Starts ----

// A point, drawn by its squared distance from the nearest start so far.
static uint32_t draw(struct clusters *c)
{
    double sum = 0, stop;
    for (uint32_t p = 0; p < c->job->count; p++)
        sum += (double)c->distance[p];
    stop = uniform(c) * sum;
    uint32_t last = 0;
    for (uint32_t p = 0; p < c->job->count; p++) {
        if (c->distance[p] > 0)
            last = p; // never one that is a start already
        stop -= (double)c->distance[p];
        if (stop < 0)
            break;
    }
    return last;
}

static void draw_starts(struct clusters *c)
{
    uint32_t dim = c->job->dim;
    uint32_t next = (uint32_t)(uniform(c) * c->job->count);
    for (size_t p = 0; p < (size_t)c->blocks * LANES; p++)
        c->distance[p] = INFINITY;
    for (uint32_t j = 0; j < c->job->k; j++) {
        memcpy(centroid(c, j), point(c, next), dim * sizeof(float));
        for (uint32_t b = 0; b < c->blocks; b++)
            nearer(c->block + (size_t)b * dim * LANES, centroid(c, j), dim, j,
                   c->distance + (size_t)b * LANES, c->of + (size_t)b * LANES);
        next = draw(c);
    }
}

// ---- Rounds ----

static void count_members(struct clusters *c)
{
    memset(c->count, 0, c->job->k * sizeof *c->count);
    memset(c->spread, 0, c->job->k * sizeof *c->spread);
    for (uint32_t p = 0; p < c->job->count; p++) {
        c->count[c->of[p]]++;
        c->spread[c->of[p]] += (double)c->distance[p];
    }
}

// The largest cluster gives its farthest point to an empty one. False if no cluster has different
// points any more.
static bool split_largest(struct clusters *c, uint32_t empty)
{
    uint32_t largest = UINT32_MAX, far = UINT32_MAX;
    for (uint32_t j = 0; j < c->job->k; j++)
        if (c->count[j] > 1 && c->spread[j] > 0 &&
            (largest == UINT32_MAX || c->count[j] > c->count[largest]))
            largest = j;
    if (largest == UINT32_MAX)
        return false;
    for (uint32_t p = 0; p < c->job->count; p++)
        if (c->of[p] == largest && (far == UINT32_MAX || c->distance[p] > c->distance[far]))
            far = p;
    c->of[far] = empty;
    c->count[empty] = 1;
    c->count[largest]--;
    c->spread[largest] -= (double)c->distance[far];
    c->distance[far] = 0;
    return true;
}

// Centroids become the means of their points. One that has none stays where it is.
static void move(struct clusters *c)
{
    uint32_t k = c->job->k, dim = c->job->dim;
    memset(c->sum, 0, (size_t)k * dim * sizeof *c->sum);
    for (uint32_t p = 0; p < c->job->count; p++)
        for (uint32_t i = 0; i < dim; i++)
            c->sum[(size_t)c->of[p] * dim + i] += (double)point(c, p)[i];
    for (uint32_t j = 0; j < k; j++)
        for (uint32_t i = 0; i < dim && c->count[j]; i++)
            centroid(c, j)[i] = (float)(c->sum[(size_t)j * dim + i] / c->count[j]);
}

static void run(struct clusters *c, struct kmeans_result *result)
{
    const struct kmeans_job *job = c->job;
    double last = INFINITY;
    if (job->starts)
        memcpy(c->centroid, job->starts, (size_t)job->k * job->dim * sizeof(float));
    else
        draw_starts(c);
    for (result->rounds = 0;; result->rounds++) {
        result->error = assign(c);
        if (result->rounds == job->rounds || result->error > last * (1 - LEAST_GAIN) ||
            result->error == 0)
            return;
        last = result->error;
        count_members(c);
        for (uint32_t j = 0; j < job->k; j++)
            if (c->count[j] == 0 && !split_largest(c, j))
                break;
        move(c);
    }
}

// ---- Memory ----

static void to_blocks(struct clusters *c, struct kmeans_result *result)
{
    uint32_t dim = c->job->dim;
    result->energy = 0;
    for (uint32_t p = 0; p < c->job->count; p++)
        for (uint32_t i = 0; i < dim; i++) {
            float x = point(c, p)[i];
            c->block[((size_t)(p / LANES) * dim + i) * LANES + p % LANES] = x;
            result->energy += (double)x * (double)x;
        }
}

int kmeans(const struct kmeans_job *job, float *centroids, struct kmeans_result *result)
{
    assert(job->count > 0 && job->k > 0 && job->dim > 0 && job->dim <= KMEANS_MOST_DIM);
    struct clusters c = {.job = job, .centroid = centroids};
    c.blocks = job->count / LANES + (job->count % LANES > 0);
    size_t all = (size_t)c.blocks * LANES;
    c.block = calloc(all * job->dim, sizeof *c.block);
    c.of = calloc(all, sizeof *c.of);
    c.distance = calloc(all, sizeof *c.distance);
    c.sum = calloc((size_t)job->k * job->dim, sizeof *c.sum);
    c.spread = calloc(job->k, sizeof *c.spread);
    c.count = calloc(job->k, sizeof *c.count);
    bool fine = c.block && c.of && c.distance && c.sum && c.spread && c.count;
    if (fine) {
        to_blocks(&c, result);
        run(&c, result);
    }
    free(c.count);
    free(c.spread);
    free(c.sum);
    free(c.distance);
    free(c.of);
    free(c.block);
    return fine ? 0 : -1;
}
