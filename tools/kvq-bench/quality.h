// SPDX-License-Identifier: Apache-2.0
//
// What the files of `kvq-bench quality` share.
//
// A method is a format of the table, one with stages changed, or a control. A layer is a cache of
// one layer under a method, in this process: keys and values as they were, and as attention sees
// them. Everything measured becomes one line of JSON in the results file, which
// tools/quality/report.py makes the tables, plots and verdicts of. What is in the file already is
// not measured again; keys name the model, the texts and the capture by what they hold.
#ifndef KVQ_TOOLS_BENCH_QUALITY_H
#define KVQ_TOOLS_BENCH_QUALITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cjson/cJSON.h>

#include "kernels/kernels.h"
#include "storage/codebook.h"

// ---- Methods (quality_method.c) ----

enum quality_kind {
    QUALITY_FORMAT,
    QUALITY_DROPPED, // control: what other methods pack is gone
    QUALITY_INT2,    // control: 2 bits, one scale and zero for each token and head
};

struct quality_method {
    char name[160];
    enum quality_kind kind;
    struct kvq_format f; // of controls: f16 with oscar2's windows
};

// Takes "dropped", "int2-token", or a format's name, which may have up to 159 characters here,
// with stages changed as in "NAME:stage=value:.." (docs/formats.md).
// 0, or -1 with a sentence in text.
int quality_method_parse(const char *name, struct quality_method *m, char *text, size_t n);

// Bytes of a packed token of one KV head, K and V, with all parameters and the zeros behind rows.
double quality_packed_bytes(const struct quality_method *m, const struct kvq_shape *s);
// Bytes that a KV head takes in a session of so many tokens: packed and raw blocks, and what the
// format keeps besides.
double quality_bytes_at(const struct quality_method *m, const struct kvq_shape *s, uint64_t tokens);
// How many of the newest of `tokens` tokens can stay in full precision, where the others are packed
// in whole units, for `budget` bytes of such a session; -1 if the method takes more than that.
int64_t quality_window_for(const struct quality_method *m, const struct kvq_shape *s,
                           uint64_t tokens, double budget);

// ---- One layer's cache (quality_layer.c) ----

struct quality_layer {
    struct quality_method m;
    struct kvq_shape shape;
    uint64_t room, tokens;
    uint64_t packed; // tokens [sink, packed) are packed
    uint32_t learn;
    bool learned;
    size_t raw_bytes, packed_bytes; // of one block
    uint8_t *raw, *seen, *blocks, *extras;
    struct kvq_page *pages, *seen_pages;
    const struct kvq_book *book;
    float *rows; // a block of K and of V of one head, as stored
    void *workspace;
};

// A cache of up to `room` tokens. layer is its number in the model, for formats that treat the
// first ones apart; book may be NULL. 0, or -1 with a sentence. Release with quality_layer_close,
// also after a failure.
int quality_layer_open(struct quality_layer *l, const struct quality_method *m,
                       const struct kvq_shape *shape, uint32_t layer, uint64_t room,
                       uint64_t prompt_tokens, const struct kvq_book *book, char *text, size_t n);
void quality_layer_close(struct quality_layer *l);
void quality_layer_clear(struct quality_layer *l); // as after opening

// Appends n tokens [n][kv_heads][dim]. Here and below dim is the engine's, kvq_row_dim(); zeros are
// stored behind, and what they became is not read back.
void quality_layer_append(struct quality_layer *l, const float *k, const float *v, uint32_t n);
// Packs what is due: whole units that end `recent` tokens before the end of the cache.
void quality_layer_settle(struct quality_layer *l, uint64_t recent);
// Tokens [0, tokens) of a head as they were (seen false) and as attention sees them, [tokens][dim].
// Those that are gone (QUALITY_DROPPED: [0, packed)) are zeros.
void quality_layer_read(const struct quality_layer *l, bool seen, uint32_t head, float *k,
                        float *v);
// Attention of n query tokens [n][q_heads][dim], the last ones of the cache, on the exact path.
void quality_layer_attend(const struct quality_layer *l, const float *q, uint32_t n, float *out);

// ---- Data (quality_data.c) ----

// K and V of one layer, [heads][tokens][dim], and queries of each KV head, [heads][queries][dim],
// each of which sees the tokens up to and with its position. dim is the engine's, 1 to 256.
struct quality_data {
    char name[64];
    uint32_t heads, tokens, dim, queries, layer;
    uint32_t from; // where in the text it starts
    float *k, *v, *q;
    uint32_t *position; // [queries], the same for all heads
};

bool quality_data_take(struct quality_data *d, const char *name, uint32_t heads, uint32_t tokens,
                       uint32_t dim, uint32_t queries); // memory; false: none, complained
void quality_data_free(struct quality_data *d);

// Names of the synthetic data, ended by NULL.
extern const char *const quality_synthetic[];
// Fills K and V by name ("smooth", .., "imbalance-0.50"); false: no such name. `model` decides what
// stays from text to text (outlier channels, means), `seed` the rest.
bool quality_fill(struct quality_data *d, const char *name, uint64_t model, uint64_t seed);
// Fills Q: each query is aimed at a random key, and stretched until the likeliest token holds
// `mass` of the attention.
void quality_aim(struct quality_data *d, double mass, uint64_t seed, double softmax_scale);

// ---- Codebooks (quality_book.c) ----

// Smoothing factors and centroids of one layer, trained for one method.
struct quality_book {
    struct kvq_book book; // pointers into the codebook
    struct kvq_codebook *codebook;
};

bool quality_wants_book(const struct quality_method *m);
// K and V of d are the training data; Q is not looked at. Seeded. False: not possible, with a
// sentence in text, and nothing is held.
bool quality_book_train(struct quality_book *b, const struct quality_method *m,
                        const struct quality_data *d, uint64_t seed, char *text, size_t n);
void quality_book_free(struct quality_book *b);

// ---- Errors (quality_metric.c) ----

// Relative errors: 2-norms of differences over 2-norms, over all heads and queries. Those of K, V
// and logits are over packed tokens alone, logits without their mean over these tokens.
struct quality_error {
    double k, v, logits;
    double k_token;     // mean of the relative errors of single keys
    double out;         // with the method's own windows
    double out_k;       // the same, but V as it was
    double out_windows; // with the same windows for all: 32 first and 128 last tokens
    double out_bytes;   // with windows as large as the budget allows; NaN if it is beyond
};

// Sets both sides' inputs up, packs, measures. budget_bits are for each value that the engine has.
// 0, or -1 with a sentence.
int quality_measure(const struct quality_method *m, const struct quality_data *d,
                    const struct kvq_book *book, double softmax_scale, double budget_bits,
                    struct quality_error *e, char *text, size_t n);

// ---- Results (quality_results.c) ----

struct quality_results {
    FILE *file;
    char **done; // keys, sorted
    size_t n_done;
};

// Opens (and makes) the file, reads which keys are there. False: complained.
bool quality_results_open(struct quality_results *r, const char *path);
void quality_results_close(struct quality_results *r);
bool quality_results_has(const struct quality_results *r, const char *key);
// Writes one line with the key and takes `line` over. False: complained.
bool quality_results_put(struct quality_results *r, const char *key, cJSON *line);

// The last part of a path: results do not tell where files lie.
const char *quality_base_name(const char *path);

// ---- The command (quality.c) and its parts ----

enum {
    QUALITY_MAX_METHODS = 128,
    QUALITY_LEAST_DIM = 4, // of synthetic caches: so many channels of theirs are outliers
};

struct quality_options {
    const char *results, *model, *text, *capture, *items;
    const char *book_text; // what codebooks are trained on; NULL: text, from book_from on
    struct quality_method method[QUALITY_MAX_METHODS];
    uint32_t n_methods;
    uint32_t tokens, queries, first_seed, seeds, from, book_from, bytes, context, step, head_dim;
    double outliers; // factor of the outliers put into the weights
    double budget_bits;
};

int quality_main(int argc, char **argv);

// Each part returns the exit status.
int quality_part_formats(const struct quality_options *o, struct quality_results *r);
int quality_part_synthetic(const struct quality_options *o, struct quality_results *r);
int quality_part_captured(const struct quality_options *o, struct quality_results *r);
int quality_part_perplexity(const struct quality_options *o, struct quality_results *r);
int quality_part_recall(const struct quality_options *o, struct quality_results *r);

#endif
