// SPDX-License-Identifier: Apache-2.0
//
// k-means: Lloyd's rounds from starts drawn by k-means++ (Arthur and Vassilvitskii, 2007). The same
// points, seed and rounds give the same bits on every machine.
//
// Drawing more than KMEANS_MOST_DRAWN starts would take longer than the rounds. Then the points are
// clustered into 4 * sqrt(k) parts, and each part into its share of the starts, by its number of
// points. Rounds pass over the parts that are too far from 16 neighbouring points to hold the
// nearest centroid of any; what they find is what comparing all would find.
#ifndef KVQ_TOOLS_KMEANS_H
#define KVQ_TOOLS_KMEANS_H

#include <stdint.h>

struct kmeans_result {
    uint32_t rounds;
    double error;  // sum of squared distances to the nearest centroid
    double energy; // sum of the points' squares
};

struct kmeans_job {
    const float *points; // [count][dim], finite
    uint32_t count, dim; // dim is at most 8
    uint32_t k;          // clusters
    uint32_t rounds;     // at most; fewer if a round gains less than one part in 10,000
    uint64_t seed;
    const float *starts; // [k][dim]; NULL: drawn
    // Called with what there is before each round and after the last; or NULL.
    void (*round)(void *context, const struct kmeans_result *so_far);
    void *context;
};

enum { KMEANS_MOST_DIM = 8, KMEANS_MOST_DRAWN = 4096 };

// Centroids [k][dim]. A point belongs to the nearest (sums in fp32, channel by channel, as codes
// are chosen), of equally near ones to the first. A cluster without points is given the farthest
// point of the largest cluster that still has different points. Where there are fewer different
// points than clusters, some centroids are the same. 0, or -1 for lack of memory.
int kmeans(const struct kmeans_job *job, float *centroids, struct kmeans_result *result);

// A well-mixed number from two (SplitMix64).
uint64_t kmeans_mix(uint64_t seed, uint64_t n);

#endif
