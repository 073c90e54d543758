// SPDX-License-Identifier: Apache-2.0
//
// kvq-run's model with its caches in this process, one method in all layers.
#ifndef KVQ_TOOLS_BENCH_QUALITY_MODEL_H
#define KVQ_TOOLS_BENCH_QUALITY_MODEL_H

#include "tools/kvq-bench/quality.h"
#include "tools/kvq-run/model.h"

// What model.c takes for kvqd: struct cache comes first, and quality_cache.c has the functions of
// tools/kvq-run/cache.h that model.c calls.
struct quality_cache {
    struct cache base;
    struct quality_layer *layer;
    uint32_t layers;
    float *queries; // [layers][room][q_heads][dim] of every step; NULL: not kept
    uint64_t room;
};

// Areas for q, k, v and outputs of one step. -1 with a sentence.
int quality_engine_open(struct engine *e, const struct config *c, uint32_t step_tokens,
                        struct problem *p);
void quality_engine_close(struct engine *e);

// books: one for each layer, or NULL. Release with quality_cache_close, also after a failure.
int quality_cache_open(struct quality_cache *q, struct engine *e, const struct config *c,
                       const struct quality_method *m, uint64_t room, const struct kvq_book *books,
                       bool keep_queries, struct problem *p);
void quality_cache_close(struct quality_cache *q);
void quality_cache_clear(struct quality_cache *q);

// The model with outliers that leave its function as it is: of each KV head two RoPE pairs of
// channels of K, and four channels of V, times `factor`; Q and the output projection divided.
struct quality_model {
    struct model model;
    struct tensor *changed; // tensors of our own
    uint32_t n_changed;
};
int quality_model_open(struct quality_model *m, const char *dir, uint32_t step_tokens,
                       double factor, struct problem *p);
void quality_model_close(struct quality_model *m);

// Tokens of a text: its bytes for models whose vocabulary is bytes, else numbers separated by
// white space; of these `most`, or as many as there are, after the first `from`. A BOS is not among
// them. *ids is the caller's to free.
int quality_text(const struct config *c, const char *path, uint64_t from, uint64_t most,
                 uint32_t **ids, uint64_t *n, struct problem *p);

// K, V and the model's own queries of every layer: from the options' capture file if there is one,
// else from the model over the options' text with an f16 cache. *layer is released with
// quality_layers_free, also after a failure.
int quality_layers_make(const struct quality_options *o, struct quality_data **layer,
                        uint32_t *layers, struct problem *p);
void quality_layers_free(struct quality_data **layer, uint32_t layers);

// Codebooks of a method for every layer; NULL pointers if the method needs none.
struct quality_books {
    struct quality_book *layer;
    struct kvq_book *book; // the same, as the kernels take them
    uint32_t layers;
};

// Trains on the model over the options' book_text, or over their text from book_from on. Released
// with quality_books_free, also after a failure.
int quality_books_make(struct quality_books *b, const struct quality_method *m,
                       const struct quality_options *o, struct problem *p);
void quality_books_free(struct quality_books *b);
// Whether they fit these layers: a capture may be of another model. 0, or -1 with a sentence.
int quality_books_check(const struct quality_books *b, const struct quality_method *m,
                        const struct quality_data *layer, uint32_t layers, struct problem *p);

// Hashes of what a part measures, and of what its codebooks are trained on. They belong to the keys
// of results: what was measured of another model, or of a file that holds something else now, is no
// answer.
struct quality_inputs {
    uint64_t data, books;
};

// data is of the file and, if `model`, of the options' model.
int quality_inputs_read(struct quality_inputs *in, const struct quality_options *o, bool model,
                        const char *path, struct problem *p);
uint64_t quality_inputs_of(const struct quality_inputs *in, const struct quality_method *m);
void quality_inputs_put(const struct quality_inputs *in, cJSON *line); // the line's "inputs"

// log_softmax in double precision.
void quality_log_softmax(const float *logits, uint32_t n, double *out);

#endif
