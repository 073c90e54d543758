// SPDX-License-Identifier: Apache-2.0
//
// From keys and values to smoothing factors and centroids (VecInfer, section 3; MILLION, section
// 3), layer by layer, into a codebook that storage/codebook.h holds.
#ifndef KVQ_TOOLS_CODEBOOK_TRAIN_H
#define KVQ_TOOLS_CODEBOOK_TRAIN_H

#include "storage/codebook.h"

enum {
    TRAIN_MOST_ROUNDS = 30,
    TRAIN_MOST_SAMPLES = 1 << 20,
    TRAIN_SAMPLES_PER_CENTROID = 64, // TRAIN_MOST_SAMPLES for one table at most
};

// Where keys and values come from. Every layer and head has the same number of tokens.
struct train_source {
    void *context;
    uint64_t tokens;
    // Tokens [from, from + tokens) of K, or V, of one KV head as fp32 [tokens][dim], with the dim
    // of the codebook's row. 0, or a negative KVQ_E code with a sentence.
    int (*read)(void *context, uint32_t layer, bool v, uint32_t head, uint64_t from,
                uint64_t tokens, float *out, char *text, size_t n);
};

struct train_table {
    uint32_t layer, layers; // the first it was made of, and how many
    bool v;
    uint32_t number, tables; // of the layer
    uint32_t points, rounds;
    double error; // sum of squared errors over the points' sum of squares
};

struct train_options {
    uint64_t seed;
    uint32_t rounds;  // of k-means, at most TRAIN_MOST_ROUNDS
    uint32_t samples; // sub-vectors for one table, at most; 0: 64 for each centroid
    void (*progress)(void *context, const struct train_table *table); // or NULL
    // Of tables that take long (more than KMEANS_MOST_DRAWN centroids), before each round; or NULL.
    void (*round)(void *context, const struct train_table *table);
    void *context;
};

// Fills in factors and tables of one layer, or, of a global codebook, those of all layers (`layer`
// is then 0). Its bits depend on source, seed, rounds and samples alone. K is divided by its
// factors and rotated as the format says before it is cut into sub-vectors; V is rotated if the
// format says so. Samples are spread evenly over everything that a table serves.
// 0 or a KVQ_E code with a sentence: E_NONFINITE, E_LIMIT (fewer sub-vectors than centroids),
// E_NO_MEMORY, or what the source returned.
int train_layer(struct kvq_codebook *book, uint32_t layer, const struct train_source *source,
                const struct train_options *options, char *text, size_t n);

// For sources: makes n rows of `width` values rows as the daemon stores them, of `stored` values
// with zeros behind; in place.
void train_pad_rows(float *rows, uint64_t n, uint32_t width, uint32_t stored);

#endif
