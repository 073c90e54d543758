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

enum { LANES = 16, PART_ROUNDS = 8 };
static const double LEAST_GAIN = 1e-4;

// What takes the time is compiled for AVX2 as well. No sum changes its order and nothing is fused,
// so the bits are the same.
#ifdef __x86_64__
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

// Centroids next to each other in the table, and a ball that holds them.
struct part {
    uint32_t points;   // of how many it was made
    uint32_t first, n; // centroids
    float centre[KMEANS_MOST_DIM], radius;
};

struct clusters {
    const struct kmeans_job *job;
    const float *points; // the job's, or those by parts
    struct part *part;   // NULL: there are none
    uint32_t parts;
    uint32_t *part_of; // of each point
    float *centroid;   // [k][dim], the caller's
    uint32_t blocks;   // of points; the last one is filled up with zeros that nobody counts
    float *block;      // [blocks][dim][LANES]
    uint32_t *of;      // [blocks * LANES]: cluster of each point
    float *distance;   // likewise: its squared distance
    double *sum;       // [k][dim]
    double *spread;    // [k]: sum of squared distances
    uint32_t *count;   // [k]
    uint64_t drawn;    // random numbers so far
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
    return c->points + (size_t)p * c->job->dim;
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

// Whether a part may hold a centroid that is as near to one of 16 points as `least` says. Rounding
// is far smaller than the part in 10,000 that is allowed for it.
static inline bool may_hold(const struct part *part, const float *block, uint32_t dim,
                            const float *least)
{
    float d[LANES];
    bool may = false;
    distances(block, part->centre, dim, d);
    for (uint32_t l = 0; l < LANES; l++) {
        float far = sqrtf(d[l]) * 0.9999f - part->radius;
        may |= !(far > 0 && far * far > least[l] * 1.0001f);
    }
    return may;
}

static inline void nearest_in(const struct clusters *c, const struct part *part, const float *block,
                              uint32_t dim, float *least, uint32_t *of)
{
    for (uint32_t j = part->first; j < part->first + part->n; j++)
        nearer(block, c->centroid + (size_t)j * dim, dim, j, least, of);
}

// As assign_block. How near the nearest centroid is at most is known from the points' own parts.
static inline void assign_by_parts(const struct clusters *c, uint32_t b, uint32_t dim, float *least,
                                   uint32_t *of)
{
    const float *block = c->block + (size_t)b * dim * LANES;
    const uint32_t *own = c->part_of + (size_t)b * LANES;
    float most[LANES], best[LANES];
    uint32_t who[LANES] = {0};
    for (uint32_t l = 0; l < LANES; l++)
        most[l] = best[l] = INFINITY;
    for (uint32_t l = 0; l < LANES; l++)
        if (l == 0 || own[l] != own[l - 1])
            nearest_in(c, &c->part[own[l]], block, dim, most, who);
    memset(who, 0, sizeof who);
    for (uint32_t i = 0; i < c->parts; i++)
        if (may_hold(&c->part[i], block, dim, most))
            nearest_in(c, &c->part[i], block, dim, best, who);
    memcpy(least, best, sizeof best);
    memcpy(of, who, sizeof who);
}

// Every point to its nearest centroid. Returns the sum of squared distances.
FAST static double assign(struct clusters *c)
{
    uint32_t k = c->job->k, dim = c->job->dim;
    double sum = 0;
    for (uint32_t b = 0; b < c->blocks; b++) {
        const float *block = c->block + (size_t)b * dim * LANES;
        float *least = c->distance + (size_t)b * LANES;
        uint32_t *of = c->of + (size_t)b * LANES;
        if (c->part && dim == 8) // constants, for the compiler's sake
            assign_by_parts(c, b, 8, least, of);
        else if (c->part)
            assign_by_parts(c, b, dim, least, of);
        else if (dim == 2)
            assign_block(block, c->centroid, k, 2, least, of);
        else if (dim == 4)
            assign_block(block, c->centroid, k, 4, least, of);
        else if (dim == 8)
            assign_block(block, c->centroid, k, 8, least, of);
        else
            assign_block(block, c->centroid, k, dim, least, of);
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

FAST static void draw_starts(struct clusters *c)
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

// ---- Parts ----

static void place_parts(struct clusters *c)
{
    uint32_t dim = c->job->dim;
    for (uint32_t i = 0; i < c->parts; i++) {
        struct part *part = &c->part[i];
        const float *first = centroid(c, part->first);
        float most = 0;
        for (uint32_t d = 0; d < dim; d++) {
            double sum = 0;
            for (uint32_t j = 0; j < part->n; j++)
                sum += (double)first[j * dim + d];
            part->centre[d] = part->n ? (float)(sum / part->n) : 0;
        }
        for (uint32_t j = 0; j < part->n; j++) {
            float sum = 0;
            for (uint32_t d = 0; d < dim; d++) {
                float x = first[j * dim + d] - part->centre[d];
                sum += x * x;
            }
            most = fmaxf(most, sum);
        }
        part->radius = sqrtf(most) * 1.0001f;
    }
}

// Each part's share of the centroids, by its points; what is left goes where a centroid has most.
static void share_centroids(struct clusters *c)
{
    uint32_t k = c->job->k, left = k, at = 0;
    for (uint32_t i = 0; i < c->parts; i++) {
        c->part[i].n = (uint32_t)((uint64_t)k * c->part[i].points / c->job->count);
        left -= c->part[i].n;
    }
    for (; left > 0; left--) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < c->parts; i++)
            if ((uint64_t)c->part[i].points * (c->part[best].n + 1) >
                (uint64_t)c->part[best].points * (c->part[i].n + 1))
                best = i;
        c->part[best].n++;
    }
    for (uint32_t i = 0; i < c->parts; at += c->part[i++].n) {
        assert(c->part[i].n <= c->part[i].points);
        c->part[i].first = at;
    }
    assert(at == k);
}

// Points part by part, in the order that they have.
static void sort_points(struct clusters *c, const uint32_t *of, float *sorted)
{
    uint32_t dim = c->job->dim, at = 0;
    for (uint32_t p = 0; p < c->job->count; p++)
        c->part[of[p]].points++;
    for (uint32_t i = 0; i < c->parts; at += c->part[i++].points)
        c->part[i].first = at;
    for (uint32_t p = 0; p < c->job->count; p++) {
        uint32_t to = c->part[of[p]].first++;
        memcpy(sorted + (size_t)to * dim, point(c, p), dim * sizeof(float));
        c->part_of[to] = of[p];
    }
    for (uint32_t p = c->job->count; p < c->blocks * LANES; p++)
        c->part_of[p] = c->part_of[c->job->count - 1];
    c->points = sorted;
}

// The starts of one part after the other. 0, or -1 for lack of memory.
static int cluster_parts(struct clusters *c)
{
    struct kmeans_job job = {.dim = c->job->dim, .rounds = PART_ROUNDS};
    struct kmeans_result result;
    int rc = 0;
    for (uint32_t i = 0, from = 0; i < c->parts && rc == 0; from += c->part[i++].points) {
        job.points = point(c, from);
        job.count = c->part[i].points;
        job.k = c->part[i].n;
        job.seed = kmeans_mix(c->job->seed, 1 + (uint64_t)i);
        if (job.k > 0)
            rc = kmeans(&job, centroid(c, c->part[i].first), &result);
    }
    return rc;
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
    else if (!c->part)
        draw_starts(c);
    for (result->rounds = 0;; result->rounds++) {
        place_parts(c);
        result->error = assign(c);
        if (job->round)
            job->round(job->context, result);
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

// Splits the points into parts and makes the starts of each. 0, or -1 for lack of memory.
static int split(struct clusters *c, float **sorted)
{
    const struct kmeans_job *job = c->job;
    struct kmeans_job rough = *job;
    struct kmeans_result result;
    c->parts = rough.k = (uint32_t)(4 * sqrt((double)job->k));
    rough.rounds = PART_ROUNDS;
    rough.round = NULL;
    float *centres = malloc((size_t)rough.k * job->dim * sizeof *centres);
    *sorted = malloc((size_t)job->count * job->dim * sizeof **sorted);
    c->part = calloc(c->parts, sizeof *c->part);
    c->part_of = calloc((size_t)c->blocks * LANES, sizeof *c->part_of);
    int rc = centres && *sorted && c->part && c->part_of ? kmeans(&rough, centres, &result) : -1;
    if (rc == 0) {
        for (uint32_t b = 0; b < c->blocks; b++)
            assign_block(c->block + (size_t)b * job->dim * LANES, centres, c->parts, job->dim,
                         c->distance + (size_t)b * LANES, c->of + (size_t)b * LANES);
        sort_points(c, c->of, *sorted);
        share_centroids(c);
        rc = cluster_parts(c);
    }
    free(centres);
    return rc;
}

int kmeans(const struct kmeans_job *job, float *centroids, struct kmeans_result *result)
{
    assert(job->count > 0 && job->k > 0 && job->dim > 0 && job->dim <= KMEANS_MOST_DIM);
    struct clusters c = {.job = job, .points = job->points, .centroid = centroids};
    float *sorted = NULL;
    c.blocks = job->count / LANES + (job->count % LANES > 0);
    size_t all = (size_t)c.blocks * LANES;
    c.block = calloc(all * job->dim, sizeof *c.block);
    c.of = calloc(all, sizeof *c.of);
    c.distance = calloc(all, sizeof *c.distance);
    c.sum = calloc((size_t)job->k * job->dim, sizeof *c.sum);
    c.spread = calloc(job->k, sizeof *c.spread);
    c.count = calloc(job->k, sizeof *c.count);
    bool fine = c.block && c.of && c.distance && c.sum && c.spread && c.count;
    if (fine)
        to_blocks(&c, result);
    if (fine && job->k > KMEANS_MOST_DRAWN && job->count >= job->k && !job->starts) {
        fine = split(&c, &sorted) == 0;
        if (fine)
            to_blocks(&c, result);
    }
    if (fine)
        run(&c, result);
    free(sorted);
    free(c.part_of);
    free(c.part);
    free(c.count);
    free(c.spread);
    free(c.sum);
    free(c.distance);
    free(c.of);
    free(c.block);
    return fine ? 0 : -1;
}
