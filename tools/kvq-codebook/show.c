// SPDX-License-Identifier: Apache-2.0
//
// kvq-codebook show and verify: what a codebook says of itself.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <cjson/cJSON.h>

#include "proto/status.h"
#include "tools/kvq-codebook/commands.h"

struct range {
    float least, most;
};

static struct range range_of(const float *x, size_t n)
{
    struct range r = {n ? x[0] : 0, n ? x[0] : 0};
    for (size_t i = 1; i < n; i++) {
        r.least = x[i] < r.least ? x[i] : r.least;
        r.most = x[i] > r.most ? x[i] : r.most;
    }
    return r;
}

static const char *scope(uint32_t flags, uint32_t flag, const char *with, const char *without)
{
    return flags & flag ? with : without;
}

// ---- Text ----

static void print_side(const char *name, uint8_t bits, uint8_t vector)
{
    if (bits == 0)
        printf("%-11s no codebook\n", name);
    else
        printf("%-11s %u bits for %u channels (%u centroids, %.4g bits per value)\n", name, bits,
               vector, 1u << bits, (double)bits / vector);
}

static void print_head(const struct kvq_codebook *book)
{
    const struct kvq_codebook_header *h = kvq_codebook_head(book);
    printf("%-11s %s\n%-11s %s\n", "format", h->format, "model", *h->model ? h->model : "-");
    print_side("K", h->k_bits, h->k_vector);
    print_side("V", h->v_bits, h->v_vector);
    printf("%-11s %s, %s, %s\n", "tables",
           scope(h->flags, KVQ_CODEBOOK_GLOBAL, "for all layers", "per layer"),
           scope(h->flags, KVQ_CODEBOOK_OWN_HEADS, "per KV head", "heads share them"),
           scope(h->flags, KVQ_CODEBOOK_OWN_SUBS, "per sub-vector", "sub-vectors share them"));
    printf("%-11s %" PRIu64 " bytes, id %016" PRIx64 "\n", "file", h->bytes, kvq_codebook_id(book));
    printf("%-11s %s\n", "made", h->made);
}

static void print_layers(struct kvq_codebook *book)
{
    const struct kvq_codebook_header *h = kvq_codebook_head(book);
    printf("\n%5s %8s %8s  %-21s %-21s %s\n", "layer", "KV heads", "head_dim", "factors",
           "K centroids", "V centroids");
    for (uint32_t i = 0; i < h->layers; i++) {
        const struct kvq_codebook_row *row = kvq_codebook_row(book, i);
        struct kvq_codebook_tables t;
        kvq_codebook_tables(book, i, &t);
        printf("%5u %8u %8u ", i, row->kv_heads, row->dim);
        const float *parts[] = {t.smooth, t.k, t.v};
        const size_t sizes[] = {t.smooth_n, t.k_n, t.v_n};
        for (int p = 0; p < 3; p++) {
            struct range r = range_of(parts[p], sizes[p]);
            char text[48] = "-";
            if (sizes[p])
                snprintf(text, sizeof text, "%.4g to %.4g", (double)r.least, (double)r.most);
            printf(p < 2 ? " %-21s" : " %s", text);
        }
        putchar('\n');
    }
}

// ---- JSON ----

static cJSON *side_json(uint8_t bits, uint8_t vector)
{
    if (bits == 0)
        return cJSON_CreateNull();
    cJSON *side = cJSON_CreateObject();
    cJSON_AddNumberToObject(side, "bits", bits);
    cJSON_AddNumberToObject(side, "vector", vector);
    return side;
}

static void add_range(cJSON *to, const char *name, const float *x, size_t n)
{
    struct range r = range_of(x, n);
    cJSON *range = n ? cJSON_AddArrayToObject(to, name) : cJSON_AddNullToObject(to, name);
    if (n == 0)
        return;
    cJSON_AddItemToArray(range, cJSON_CreateNumber((double)r.least));
    cJSON_AddItemToArray(range, cJSON_CreateNumber((double)r.most));
}

static cJSON *layer_json(struct kvq_codebook *book, uint32_t layer)
{
    const struct kvq_codebook_row *row = kvq_codebook_row(book, layer);
    struct kvq_codebook_tables t;
    cJSON *json = cJSON_CreateObject();
    kvq_codebook_tables(book, layer, &t);
    cJSON_AddNumberToObject(json, "kv_heads", row->kv_heads);
    cJSON_AddNumberToObject(json, "head_dim", row->dim);
    add_range(json, "factors", t.smooth, t.smooth_n);
    add_range(json, "k_centroids", t.k, t.k_n);
    add_range(json, "v_centroids", t.v, t.v_n);
    return json;
}

static bool print_json(struct kvq_codebook *book)
{
    const struct kvq_codebook_header *h = kvq_codebook_head(book);
    char id[24];
    snprintf(id, sizeof id, "%016" PRIx64, kvq_codebook_id(book));
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "format", h->format);
    cJSON_AddStringToObject(json, "model", h->model);
    cJSON_AddStringToObject(json, "id", id);
    cJSON_AddNumberToObject(json, "bytes", (double)h->bytes);
    cJSON_AddStringToObject(json, "scope", scope(h->flags, KVQ_CODEBOOK_GLOBAL, "global", "layer"));
    cJSON_AddStringToObject(json, "heads",
                            scope(h->flags, KVQ_CODEBOOK_OWN_HEADS, "own", "shared"));
    cJSON_AddStringToObject(json, "subs", scope(h->flags, KVQ_CODEBOOK_OWN_SUBS, "own", "shared"));
    cJSON_AddItemToObject(json, "k", side_json(h->k_bits, h->k_vector));
    cJSON_AddItemToObject(json, "v", side_json(h->v_bits, h->v_vector));
    cJSON_AddStringToObject(json, "made", h->made);
    cJSON *layers = cJSON_AddArrayToObject(json, "layers");
    for (uint32_t i = 0; i < h->layers; i++)
        cJSON_AddItemToArray(layers, layer_json(book, i));
    char *text = cJSON_Print(json);
    bool fine = text && puts(text) >= 0;
    cJSON_free(text);
    cJSON_Delete(json);
    return fine;
}

// ---- Commands ----

static struct kvq_codebook *open_file(const struct options *o)
{
    struct kvq_codebook *book;
    char text[KVQ_TEXT_BYTES];
    if (kvq_codebook_open(o->file, &book, text, sizeof text))
        fprintf(stderr, "kvq-codebook: %s\n", text);
    return book;
}

int command_show(const struct options *o)
{
    struct kvq_codebook *book = open_file(o);
    bool fine = book != NULL;
    if (fine && o->json) {
        fine = print_json(book);
    } else if (fine) {
        print_head(book);
        print_layers(book);
    }
    kvq_codebook_close(&book);
    return fine && fflush(stdout) == 0 ? EXIT_DONE : EXIT_FAILED;
}

int command_verify(const struct options *o)
{
    struct kvq_codebook *book = open_file(o);
    bool fine = book != NULL;
    if (fine && !o->quiet)
        printf("%s: good; %s, %u layers, id %016" PRIx64 "\n", o->file, kvq_codebook_format(book),
               kvq_codebook_head(book)->layers, kvq_codebook_id(book));
    kvq_codebook_close(&book);
    return fine && fflush(stdout) == 0 ? EXIT_DONE : EXIT_FAILED;
}
