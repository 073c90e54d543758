// SPDX-License-Identifier: Apache-2.0
//
// The parts that measure one layer at a time: bytes of the formats, synthetic caches, and caches of
// a model.
#include <math.h>
#include <stdlib.h>

#include "tools/kvq-bench/quality_model.h"

enum { HEADS = 2 };
static const double masses[] = {0.1, 0.5, 0.9};
enum { MASSES = sizeof masses / sizeof *masses };

static struct kvq_shape shape_of(uint32_t heads, uint32_t dim)
{
    struct kvq_shape s = {.q_heads = (uint16_t)heads,
                          .kv_heads = (uint16_t)heads,
                          .dtype = KVQ_F16,
                          .scale = 1.0f / sqrtf((float)dim)};
    kvq_shape_set_dims(&s, (uint16_t)dim, (uint16_t)dim);
    return s;
}

// ---- Bytes ----

int quality_part_formats(const struct quality_options *o, struct quality_results *r)
{
    static const uint32_t lengths[] = {1024, 4096, 32768, 131072};
    static const char *const names[] = {"1024", "4096", "32768", "131072"};
    struct kvq_shape s = shape_of(8, o->head_dim);
    for (uint32_t i = 0; i < o->n_methods; i++) {
        const struct quality_method *m = &o->method[i];
        char key[512];
        snprintf(key, sizeof key, "format|%u|%s", o->head_dim, m->name);
        if (quality_results_has(r, key))
            continue;
        cJSON *j = cJSON_CreateObject(), *bytes = cJSON_AddObjectToObject(j, "at");
        cJSON_AddStringToObject(j, "part", "format");
        cJSON_AddStringToObject(j, "method", m->name);
        cJSON_AddNumberToObject(j, "head_dim", o->head_dim);
        cJSON_AddStringToObject(j, "source", m->kind ? "control" : m->f.source);
        cJSON_AddNumberToObject(j, "bytes", quality_packed_bytes(m, &s));
        cJSON_AddNumberToObject(j, "bits", quality_packed_bytes(m, &s) * 8 / (2.0 * o->head_dim));
        cJSON_AddNumberToObject(j, "sink", m->f.sink_tokens);
        cJSON_AddNumberToObject(j, "recent", m->f.recent_tokens);
        cJSON_AddNumberToObject(j, "unit", m->f.unit_tokens);
        for (int n = 0; n < 4; n++)
            cJSON_AddNumberToObject(bytes, names[n], quality_bytes_at(m, &s, lengths[n]));
        if (!quality_results_put(r, key, j))
            return 1;
    }
    return 0;
}

// ---- One measurement ----

static void add_number(cJSON *j, const char *name, double x)
{
    if (isfinite(x))
        cJSON_AddNumberToObject(j, name, x);
    else
        cJSON_AddNullToObject(j, name);
}

struct measuring {
    const struct quality_options *o;
    struct quality_results *r;
    const char *part;
    struct quality_inputs inputs; // of captured
    struct quality_books *books;  // likewise, [methods]
};

// aim: the mass that the likeliest token holds, or 0 for a model's own queries.
static int measure(const struct measuring *x, const struct quality_data *d,
                   const struct quality_method *m, const struct kvq_book *book, double aim,
                   uint64_t seed)
{
    const struct quality_options *o = x->o;
    char key[512], text[400];
    struct quality_error e;
    snprintf(key, sizeof key, "%s|%s|%u|%u|%u|%u|%g|%llu|%g|%s|%016llx", x->part, d->name, d->dim,
             d->from, d->tokens, d->queries, aim, (unsigned long long)seed, o->budget_bits, m->name,
             (unsigned long long)quality_inputs_of(&x->inputs, m));
    if (quality_results_has(x->r, key))
        return 0;
    if (quality_measure(m, d, book, 1 / sqrt(d->dim), o->budget_bits, &e, text, sizeof text)) {
        fprintf(stderr, "kvq-bench: %s\n", text);
        return 1;
    }
    cJSON *j = cJSON_CreateObject();
    cJSON_AddStringToObject(j, "part", x->part);
    cJSON_AddStringToObject(j, "data", d->name);
    cJSON_AddNumberToObject(j, "head_dim", d->dim);
    quality_inputs_put(&x->inputs, j);
    cJSON_AddNumberToObject(j, "aim", aim);
    cJSON_AddNumberToObject(j, "seed", (double)seed);
    cJSON_AddNumberToObject(j, "budget", o->budget_bits);
    cJSON_AddStringToObject(j, "method", m->name);
    add_number(j, "k", e.k);
    add_number(j, "v", e.v);
    add_number(j, "logits", e.logits);
    add_number(j, "k_token", e.k_token);
    add_number(j, "out", e.out);
    add_number(j, "out_k", e.out_k);
    add_number(j, "out_windows", e.out_windows);
    add_number(j, "out_bytes", e.out_bytes);
    return quality_results_put(x->r, key, j) ? 0 : 1;
}

// ---- Synthetic caches ----

enum { TRAINING_SEED = 777 };

// The method's codebook for such caches, from another text.
static int synthetic_book(const struct quality_options *o, const char *name, uint64_t seed,
                          const struct quality_method *m, struct quality_book *b)
{
    struct quality_data d;
    *b = (struct quality_book){0};
    if (!quality_wants_book(m))
        return 0;
    if (!quality_data_take(&d, name, HEADS, o->tokens, o->head_dim, 1))
        return 1;
    char text[KVQ_TEXT_BYTES];
    bool fine = quality_fill(&d, name, seed * 1000, seed * 1000 + TRAINING_SEED);
    if (fine && !quality_book_train(b, m, &d, seed, text, sizeof text)) {
        fprintf(stderr, "kvq-bench: %s: %s\n", m->name, text);
        fine = false;
    }
    quality_data_free(&d);
    return fine ? 0 : 1;
}

static int run_synthetic(const struct measuring *x, const char *name, uint64_t seed)
{
    const struct quality_options *o = x->o;
    struct quality_data d;
    if (!quality_data_take(&d, name, HEADS, o->tokens, o->head_dim, o->queries))
        return 1;
    int status = quality_fill(&d, name, seed * 1000, seed * 1000) ? 0 : 1;
    for (uint32_t i = 0; i < o->n_methods && status == 0; i++) {
        const struct quality_method *m = &o->method[i];
        struct quality_book b;
        status = synthetic_book(o, name, seed, m, &b);
        for (int a = 0; a < MASSES && status == 0; a++) {
            quality_aim(&d, masses[a], seed * 1000 + 500 + (uint64_t)a, 1 / sqrt(d.dim));
            status = measure(x, &d, m, &b.book, masses[a], seed);
        }
        quality_book_free(&b);
    }
    quality_data_free(&d);
    return status;
}

int quality_part_synthetic(const struct quality_options *o, struct quality_results *r)
{
    const struct measuring x = {.o = o, .r = r, .part = "synthetic"};
    int status = 0;
    for (const char *const *name = quality_synthetic; *name && status == 0; name++)
        for (uint64_t seed = o->first_seed; seed < o->first_seed + o->seeds && status == 0; seed++)
            status = run_synthetic(&x, *name, seed);
    return status;
}

// ---- Caches of a model ----

// The model's own queries, and queries aimed at keys in their place.
static int measure_all(const struct measuring *x, struct quality_data *d)
{
    const struct quality_options *o = x->o;
    int status = 0;
    for (int aimed = 0; aimed < 2; aimed++) {
        if (aimed)
            quality_aim(d, 0.5, 1, 1 / sqrt(d->dim));
        for (uint32_t i = 0; i < o->n_methods && status == 0; i++)
            status =
                measure(x, d, &o->method[i], x->books[i].book ? &x->books[i].book[d->layer] : NULL,
                        aimed ? 0.5 : 0, (uint64_t)aimed);
    }
    return status;
}

static int make_inputs(struct measuring *x, struct quality_data **layer, uint32_t *layers,
                       struct problem *p)
{
    const struct quality_options *o = x->o;
    if (quality_inputs_read(&x->inputs, o, !o->capture, o->capture ? o->capture : o->text, p) ||
        quality_layers_make(o, layer, layers, p))
        return -1;
    for (uint32_t i = 0; i < o->n_methods; i++)
        if (quality_books_make(&x->books[i], &o->method[i], o, p) ||
            quality_books_check(&x->books[i], &o->method[i], *layer, *layers, p))
            return -1;
    return 0;
}

int quality_part_captured(const struct quality_options *o, struct quality_results *r)
{
    struct measuring x = {.o = o, .r = r, .part = "captured"};
    struct quality_data *layer = NULL;
    uint32_t layers = 0;
    struct problem p = {0};
    x.books = calloc(o->n_methods, sizeof *x.books);
    int status = x.books && make_inputs(&x, &layer, &layers, &p) == 0 ? 0 : 1;
    for (uint32_t i = 0; i < layers && status == 0; i++)
        status = measure_all(&x, &layer[i]);
    if (*p.text)
        fprintf(stderr, "kvq-bench: %s\n", p.text);
    for (uint32_t i = 0; x.books && i < o->n_methods; i++)
        quality_books_free(&x.books[i]);
    free(x.books);
    quality_layers_free(&layer, layers);
    return status;
}
