// SPDX-License-Identifier: Apache-2.0
//
// Keys, values and queries of all layers of a model: from a capture file, or from the model over a
// text; and codebooks trained on such.
#include <stdlib.h>
#include <string.h>

#include "storage/capture.h"
#include "tools/kvq-bench/quality_model.h"

enum { STEP = 128, LEAST_TOKENS = 512 };

// ---- One layer's data ----

// A multiple of 64 tokens, with a unit of 128 half filled.
static uint32_t usable(uint64_t tokens)
{
    uint32_t n = (uint32_t)(tokens / 64);
    return 64 * (n % 2 ? n : n - 1);
}

// Memory for a layer. Its queries come from the second half of the positions, evenly spread; those
// of all query heads of a KV head are the KV head's.
static int take_layer(const struct quality_options *o, struct quality_data *d, uint32_t layer,
                      uint64_t tokens, uint32_t heads, uint32_t gqa, uint32_t dim,
                      struct problem *p)
{
    char name[64];
    uint32_t positions = o->queries < gqa ? 1 : o->queries / gqa;
    snprintf(name, sizeof name, "layer-%u x%g", layer, o->outliers);
    if (!quality_data_take(d, name, heads, usable(tokens), dim, positions * gqa))
        return problem_set(p, RUN_FAILED, "out of memory");
    d->layer = layer;
    d->from = o->from;
    for (uint32_t i = 0; i < d->queries; i++)
        d->position[i] = d->tokens - 1 - i / gqa * (d->tokens / 2 / positions);
    return 0;
}

void quality_layers_free(struct quality_data **layer, uint32_t layers)
{
    for (uint32_t i = 0; *layer && i < layers; i++)
        quality_data_free(&(*layer)[i]);
    free(*layer);
    *layer = NULL;
}

// ---- From a capture file ----

static int read_head(const struct kvq_capture_file *f, uint32_t sequence, struct quality_data *d,
                     uint32_t h, uint32_t gqa, char *text, size_t n)
{
    size_t at = (size_t)h * d->tokens * d->dim;
    int rc = kvq_capture_file_read(f, sequence, d->layer, KVQ_CAPTURE_K, h, 0, d->tokens, d->k + at,
                                   text, n);
    if (rc == 0)
        rc = kvq_capture_file_read(f, sequence, d->layer, KVQ_CAPTURE_V, h, 0, d->tokens, d->v + at,
                                   text, n);
    for (uint32_t i = 0; i < d->queries && rc == 0; i++)
        rc = kvq_capture_file_read(f, sequence, d->layer, KVQ_CAPTURE_Q, h * gqa + i % gqa,
                                   d->position[i], 1, d->q + ((size_t)h * d->queries + i) * d->dim,
                                   text, n);
    return rc;
}

// Layers that have no numbers of their own, or that kvqd would not store, are not measured.
static int check_row(const struct quality_options *o, uint32_t layer,
                     const struct kvq_capture_row *row, struct problem *p)
{
    if (row->kv_heads == 0)
        return problem_set(p, RUN_FAILED,
                           "%s: layer %u has 0 KV heads, it reads another layer's cache; capture a "
                           "model whose layers all have caches of their own",
                           o->capture, layer);
    if (row->k_dim != row->v_dim)
        return problem_set(p, RUN_FAILED,
                           "%s: layer %u has head_dim %u for K and %u for V, and kvqd stores equal "
                           "ones; capture a model that has them",
                           o->capture, layer, row->k_dim, row->v_dim);
    if (!kvq_stored_dim(row->k_dim))
        return problem_set(p, RUN_FAILED,
                           "%s: layer %u has head_dim %u, and kvqd stores up to %d; capture a "
                           "model with narrower heads",
                           o->capture, layer, row->k_dim, KVQ_MAX_HEAD_DIM);
    return 0;
}

static int read_layers(const struct quality_options *o, const struct kvq_capture_file *f,
                       struct quality_data *layer, struct problem *p)
{
    const struct kvq_capture_info *info = kvq_capture_file_info(f);
    uint32_t longest = 0;
    char text[400];
    for (uint32_t s = 1; s < info->sequences; s++)
        if (kvq_capture_file_tokens(f, s) > kvq_capture_file_tokens(f, longest))
            longest = s;
    uint64_t tokens = info->sequences ? kvq_capture_file_tokens(f, longest) : 0;
    tokens = tokens < o->tokens ? tokens : o->tokens;
    if (!info->has_queries || tokens < LEAST_TOKENS)
        return problem_set(p, RUN_FAILED, "%s: needs queries and a sequence of %d tokens",
                           o->capture, LEAST_TOKENS);
    for (uint32_t i = 0; i < info->layers; i++) {
        const struct kvq_capture_row *row = kvq_capture_file_row(f, i);
        uint32_t gqa = row->kv_heads ? row->q_heads / row->kv_heads : 0;
        if (check_row(o, i, row, p) ||
            take_layer(o, &layer[i], i, tokens, row->kv_heads, gqa, row->k_dim, p))
            return -1;
        for (uint32_t h = 0; h < row->kv_heads; h++)
            if (read_head(f, longest, &layer[i], h, gqa, text, sizeof text))
                return problem_set(p, RUN_FAILED, "%s", text);
    }
    return 0;
}

static int from_file(const struct quality_options *o, struct quality_data **layer, uint32_t *layers,
                     struct problem *p)
{
    struct kvq_capture_file *f;
    char text[400];
    if (kvq_capture_file_open(o->capture, &f, text, sizeof text))
        return problem_set(p, RUN_FAILED, "%s", text);
    *layers = kvq_capture_file_info(f)->layers;
    *layer = calloc(*layers, sizeof **layer);
    int rc = *layer ? read_layers(o, f, *layer, p) : problem_set(p, RUN_FAILED, "out of memory");
    kvq_capture_file_close(&f);
    return rc;
}

// ---- From a model ----

struct running {
    struct quality_model model;
    struct engine engine;
    struct quality_cache cache;
    uint32_t *ids;
    uint64_t n_ids;
};

static int run_text(struct running *x, uint64_t room, struct problem *p)
{
    const struct config *c = &x->model.model.config;
    uint32_t ids[STEP], bos = c->bos >= 0;
    for (uint64_t at = 0, n = 0; at < room && at < x->n_ids; at += n) {
        for (n = 0; n < STEP && at + n < room && at + n < x->n_ids; n++)
            ids[n] = at + n < bos ? (uint32_t)c->bos : x->ids[at + n - bos];
        if (model_step(&x->model.model, &x->cache.base, ids, (uint32_t)n, 0, NULL, p))
            return -1;
    }
    return x->cache.base.tokens < LEAST_TOKENS
               ? problem_set(p, RUN_FAILED, "the text has less than %d tokens", LEAST_TOKENS)
               : 0;
}

static int run_model(const struct quality_options *o, const char *text, uint32_t from,
                     struct running *x, struct problem *p)
{
    struct quality_method f16;
    const struct config *c = &x->model.model.config;
    char why[400];
    if (quality_method_parse("f16", &f16, why, sizeof why))
        return problem_set(p, RUN_FAILED, "%s", why);
    if (quality_model_open(&x->model, o->model, STEP, o->outliers, p) ||
        quality_text(c, text, from, o->tokens, &x->ids, &x->n_ids, p) ||
        quality_engine_open(&x->engine, c, STEP, p) ||
        quality_cache_open(&x->cache, &x->engine, c, &f16, o->tokens, NULL, true, p))
        return -1;
    return run_text(x, c->positions && c->positions < o->tokens ? c->positions : o->tokens, p);
}

static void close_running(struct running *x)
{
    quality_cache_close(&x->cache);
    quality_engine_close(&x->engine);
    free(x->ids);
    quality_model_close(&x->model);
}

static int copy_layer(const struct running *x, struct quality_data *d, uint32_t gqa,
                      struct problem *p)
{
    const struct quality_layer *l = &x->cache.layer[d->layer];
    size_t all = (size_t)l->tokens * d->dim, rows = (size_t)d->tokens * d->dim;
    float *k = malloc(2 * all * sizeof *k);
    if (!k)
        return problem_set(p, RUN_FAILED, "out of memory");
    for (uint32_t h = 0; h < d->heads; h++) {
        quality_layer_read(l, false, h, k, k + all);
        memcpy(d->k + h * rows, k, rows * sizeof *k);
        memcpy(d->v + h * rows, k + all, rows * sizeof *k);
        for (uint32_t i = 0; i < d->queries; i++) {
            const float *token = x->cache.queries + (d->layer * x->cache.room + d->position[i]) *
                                                        l->shape.q_heads * d->dim;
            memcpy(d->q + ((size_t)h * d->queries + i) * d->dim,
                   token + (h * gqa + i % gqa) * d->dim, d->dim * sizeof *k);
        }
    }
    free(k);
    return 0;
}

static int from_model(const struct quality_options *o, const char *text, uint32_t from,
                      struct quality_data **layer, uint32_t *layers, struct problem *p)
{
    struct running x = {0};
    const struct config *c = &x.model.model.config;
    int rc = run_model(o, text, from, &x, p);
    if (rc == 0) {
        *layers = c->layers;
        *layer = calloc(c->layers, sizeof **layer);
        rc = *layer ? 0 : problem_set(p, RUN_FAILED, "out of memory");
    }
    for (uint32_t i = 0; rc == 0 && i < c->layers; i++) {
        uint32_t gqa = c->q_heads / c->kv_heads;
        rc = take_layer(o, &(*layer)[i], i, x.cache.base.tokens, c->kv_heads, gqa, c->head_dim, p);
        if (rc == 0)
            rc = copy_layer(&x, &(*layer)[i], gqa, p);
    }
    close_running(&x);
    return rc;
}

int quality_layers_make(const struct quality_options *o, struct quality_data **layer,
                        uint32_t *layers, struct problem *p)
{
    *layer = NULL;
    *layers = 0;
    return o->capture ? from_file(o, layer, layers, p)
                      : from_model(o, o->text, o->from, layer, layers, p);
}

// ---- Codebooks ----

int quality_books_make(struct quality_books *b, const struct quality_method *m,
                       const struct quality_options *o, struct problem *p)
{
    struct quality_data *data = NULL;
    uint32_t layers = 0;
    *b = (struct quality_books){0};
    if (!quality_wants_book(m))
        return 0;
    if (!o->model || !(o->book_text || o->text))
        return problem_set(p, RUN_FAILED, "%s needs --model and a text to train codebooks on",
                           m->name);
    int rc = o->book_text ? from_model(o, o->book_text, 0, &data, &layers, p)
                          : from_model(o, o->text, o->book_from, &data, &layers, p);
    if (rc == 0) {
        *b = (struct quality_books){calloc(layers, sizeof *b->layer),
                                    calloc(layers, sizeof *b->book), layers};
        if (!b->layer || !b->book)
            rc = problem_set(p, RUN_FAILED, "out of memory");
    }
    for (uint32_t i = 0; i < layers && rc == 0; i++) {
        char text[KVQ_TEXT_BYTES];
        if (!quality_book_train(&b->layer[i], m, &data[i], 1 + i, text, sizeof text))
            rc = problem_set(p, RUN_FAILED, "%s: %s", m->name, text);
        b->book[i] = b->layer[i].book;
    }
    quality_layers_free(&data, layers);
    return rc;
}

void quality_books_free(struct quality_books *b)
{
    for (uint32_t i = 0; b->layer && i < b->layers; i++)
        quality_book_free(&b->layer[i]);
    free(b->layer);
    free(b->book);
    *b = (struct quality_books){0};
}

int quality_books_check(const struct quality_books *b, const struct quality_method *m,
                        const struct quality_data *layer, uint32_t layers, struct problem *p)
{
    if (b->layer && b->layers != layers)
        return problem_set(p, RUN_FAILED,
                           "%s: --model has %u layers, and what is measured has %u; codebooks need "
                           "the model of the capture",
                           m->name, b->layers, layers);
    for (uint32_t i = 0; b->layer && i < layers; i++) {
        const struct kvq_codebook_row *row = kvq_codebook_row(b->layer[i].codebook, 0);
        uint32_t dim = kvq_stored_dim(layer[i].dim);
        if (row->kv_heads != layer[i].heads || row->dim != dim)
            return problem_set(p, RUN_FAILED,
                               "%s: layer %u of --model has %u KV heads stored with head_dim %u, "
                               "and what is measured %u with %u; codebooks need the model of the "
                               "capture",
                               m->name, i, row->kv_heads, row->dim, layer[i].heads, dim);
    }
    return 0;
}
