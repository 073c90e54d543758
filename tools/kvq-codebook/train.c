// SPDX-License-Identifier: Apache-2.0
//
// Training: factors first, then one sample of sub-vectors and one k-means for each table.
#include "tools/kvq-codebook/train.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/layout.h"
#include "proto/status.h"
#include "tools/kvq-codebook/kmeans.h"

enum { PIECE = 256 }; // tokens read at once

static const float LEAST_FACTOR = 1e-5f;

struct training {
    struct kvq_codebook *book;
    const struct kvq_codebook_header *head;
    const struct train_source *source;
    const struct train_options *options;
    float rows[PIECE * KVQ_MAX_HEAD_DIM];
    char *text;
    size_t n;
};

// What a set of tables is made of: some layers, one head or all, K or V.
struct part {
    uint32_t layer, layers;
    uint32_t head; // UINT32_MAX: all
    bool v;
};

static int fail(const struct training *t, int code, const char *what)
{
    snprintf(t->text, t->n, "%s", what);
    return code;
}

// ---- Rows ----

void train_pad_rows(float *rows, uint64_t n, uint32_t width, uint32_t stored)
{
    assert(width <= stored);
    if (width == stored)
        return;
    for (uint64_t i = n; i-- > 0;) {
        memmove(rows + i * stored, rows + i * width, width * sizeof *rows);
        memset(rows + i * stored + width, 0, (stored - width) * sizeof *rows);
    }
}

static int read_rows(struct training *t, const struct part *p, uint32_t layer, uint32_t head,
                     uint64_t from, uint64_t tokens)
{
    uint32_t dim = kvq_codebook_row(t->book, layer)->dim;
    int rc = t->source->read(t->source->context, layer, p->v, head, from, tokens, t->rows, t->text,
                             t->n);
    for (uint64_t i = 0; i < tokens * dim && rc == KVQ_OK; i++)
        if (!isfinite(t->rows[i])) {
            snprintf(t->text, t->n,
                     "layer %u, KV head %u, token %llu: %s holds NaN or infinity; capture again "
                     "without that text",
                     layer, head, (unsigned long long)(from + i / dim), p->v ? "V" : "K");
            rc = KVQ_E_NONFINITE;
        }
    return rc;
}

static void flip(float *row, uint32_t dim, const uint32_t *signs)
{
    for (uint32_t c = 0; c < dim; c++)
        if (signs[c / 32] >> c % 32 & 1)
            row[c] = -row[c];
}

// The order of the operations is that of packing (docs/formats.md).
static void rotate(float *row, uint32_t dim, uint8_t rotation)
{
    if (rotation == KVQ_ROTATE_NONE)
        return;
    if (rotation == KVQ_ROTATE_SIGNED)
        flip(row, dim, kvq_signs_before);
    for (uint32_t h = 1; h < dim; h *= 2)
        for (uint32_t i = 0; i < dim; i++)
            if (!(i & h)) {
                float a = row[i], b = row[i + h];
                row[i] = a + b;
                row[i + h] = a - b;
            }
    float scale = (float)(1 / sqrt(dim));
    for (uint32_t c = 0; c < dim; c++)
        row[c] *= scale;
    if (rotation == KVQ_ROTATE_SIGNED)
        flip(row, dim, kvq_signs_after);
}

// Rows as they are when packing cuts them into sub-vectors.
static void transform(struct training *t, const struct part *p, uint32_t layer, uint32_t head,
                      uint64_t tokens)
{
    uint32_t dim = kvq_codebook_row(t->book, layer)->dim;
    struct kvq_codebook_tables tables;
    kvq_codebook_tables(t->book, layer, &tables);
    for (uint64_t i = 0; i < tokens; i++) {
        float *row = t->rows + i * dim;
        for (uint32_t c = 0; c < dim && tables.smooth && !p->v; c++)
            row[c] *= 1.0f / tables.smooth[(size_t)head * dim + c];
        rotate(row, dim, p->v ? t->head->v_rotation : t->head->k_rotation);
    }
}

// ---- Factors ----

// sqrt(max |K_c|) of each KV head and channel (VecInfer, section 3).
static int make_factors(struct training *t, uint32_t layer)
{
    const struct part k = {.layer = layer, .layers = 1, .v = false};
    const struct kvq_codebook_row *row = kvq_codebook_row(t->book, layer);
    struct kvq_codebook_tables tables;
    kvq_codebook_tables(t->book, layer, &tables);
    for (uint32_t h = 0; h < row->kv_heads && tables.smooth; h++) {
        float *factor = tables.smooth + (size_t)h * row->dim;
        memset(factor, 0, row->dim * sizeof *factor);
        for (uint64_t from = 0; from < t->source->tokens; from += PIECE) {
            uint64_t some = t->source->tokens - from < PIECE ? t->source->tokens - from : PIECE;
            int rc = read_rows(t, &k, layer, h, from, some);
            if (rc)
                return rc;
            for (uint64_t i = 0; i < some * row->dim; i++)
                factor[i % row->dim] = fmaxf(factor[i % row->dim], fabsf(t->rows[i]));
        }
        for (uint32_t c = 0; c < row->dim; c++)
            factor[c] = fmaxf(sqrtf(factor[c]), LEAST_FACTOR);
    }
    return KVQ_OK;
}

// ---- Samples ----

// Picks are spread evenly: pick i lies in the i-th of `points` equal parts of everything.
struct sampling {
    uint64_t total, seed;
    uint32_t points, next; // how many, and the next one's number
    uint32_t width;        // floats of a pick: a sub-vector, or a row if each has its own table
    float *out;            // [points][width]
};

static uint64_t edge(const struct sampling *s, uint64_t i)
{
    return i * (s->total / s->points) + i * (s->total % s->points) / s->points;
}

static uint64_t pick(const struct sampling *s)
{
    if (s->next == s->points)
        return UINT64_MAX;
    uint64_t low = edge(s, s->next), high = edge(s, s->next + 1ull);
    return low + kmeans_mix(s->seed, s->next) % (high - low);
}

static bool in_part(const struct part *p, uint32_t head)
{
    return p->head == UINT32_MAX || p->head == head;
}

// Picks from one head of one layer; *base counts all that came before.
static int sample_head(struct training *t, const struct part *p, uint32_t layer, uint32_t head,
                       struct sampling *s, uint64_t *base)
{
    uint32_t per_row = kvq_codebook_row(t->book, layer)->dim / s->width;
    for (uint64_t from = 0; from < t->source->tokens; from += PIECE) {
        uint64_t some = t->source->tokens - from < PIECE ? t->source->tokens - from : PIECE;
        uint64_t end = *base + some * per_row;
        if (pick(s) < end) {
            int rc = read_rows(t, p, layer, head, from, some);
            if (rc)
                return rc;
            transform(t, p, layer, head, some);
        }
        for (uint64_t at; (at = pick(s)) < end; s->next++)
            memcpy(s->out + (size_t)s->next * s->width, t->rows + (at - *base) * s->width,
                   s->width * sizeof(float));
        *base = end;
    }
    return KVQ_OK;
}

static int sample(struct training *t, const struct part *p, struct sampling *s)
{
    uint64_t base = 0;
    int rc = KVQ_OK;
    for (uint32_t i = p->layer; i < p->layer + p->layers; i++)
        for (uint32_t h = 0; h < kvq_codebook_row(t->book, i)->kv_heads && rc == KVQ_OK; h++)
            if (in_part(p, h))
                rc = sample_head(t, p, i, h, s, &base);
    return rc;
}

static uint64_t count_vectors(const struct training *t, const struct part *p, uint32_t width)
{
    uint64_t total = 0;
    for (uint32_t i = p->layer; i < p->layer + p->layers; i++) {
        const struct kvq_codebook_row *row = kvq_codebook_row(t->book, i);
        for (uint32_t h = 0; h < row->kv_heads; h++)
            total += in_part(p, h) ? t->source->tokens * (row->dim / width) : 0;
    }
    return total;
}

// ---- Tables ----

struct rounds {
    const struct train_options *options;
    struct train_table table;
};

static void tell_round(void *context, const struct kmeans_result *so_far)
{
    struct rounds *r = context;
    r->table.rounds = so_far->rounds;
    r->table.error = so_far->energy > 0 ? so_far->error / so_far->energy : 0;
    r->options->round(r->options->context, &r->table);
}

static int cluster(struct training *t, struct kmeans_job *job, struct train_table *report,
                   float *table)
{
    struct kmeans_result result;
    struct rounds rounds = {t->options, *report};
    rounds.table.points = job->count;
    rounds.table.number++;
    job->context = &rounds;
    job->round = t->options->round && job->k > KMEANS_MOST_DRAWN ? tell_round : NULL;
    if (kmeans(job, table, &result))
        return fail(t, KVQ_E_NO_MEMORY, "no memory for k-means; give fewer --samples");
    report->points = job->count;
    report->rounds = result.rounds;
    report->error = result.energy > 0 ? result.error / result.energy : 0;
    report->number++;
    if (t->options->progress)
        t->options->progress(t->options->context, report);
    return KVQ_OK;
}

// The tables of one part from its sample: one, or one for each sub-vector.
static int cluster_sample(struct training *t, const struct part *p, const struct sampling *s,
                          struct train_table *report, float *table)
{
    uint32_t vector = p->v ? t->head->v_vector : t->head->k_vector;
    uint32_t k = 1u << (p->v ? t->head->v_bits : t->head->k_bits), subs = s->width / vector;
    struct kmeans_job job = {
        .points = s->out, .count = s->points, .dim = vector, .k = k, .rounds = t->options->rounds};
    float *slice = subs > 1 ? malloc((size_t)s->points * vector * sizeof *slice) : NULL;
    if (subs > 1 && !slice)
        return fail(t, KVQ_E_NO_MEMORY, "no memory for samples; give fewer --samples");
    int rc = KVQ_OK;
    for (uint32_t m = 0; m < subs && rc == KVQ_OK; m++) {
        for (uint32_t i = 0; slice && i < s->points; i++)
            memcpy(slice + (size_t)i * vector, s->out + (size_t)i * s->width + m * vector,
                   vector * sizeof *slice);
        job.points = slice ? slice : s->out;
        job.seed = kmeans_mix(s->seed, UINT32_MAX + (uint64_t)m + 1);
        rc = cluster(t, &job, report, table + (size_t)m * k * vector);
    }
    free(slice);
    return rc;
}

static int make_tables(struct training *t, const struct part *p, struct train_table *report,
                       float *table)
{
    uint32_t vector = p->v ? t->head->v_vector : t->head->k_vector;
    uint32_t k = 1u << (p->v ? t->head->v_bits : t->head->k_bits);
    bool subs = t->head->flags & KVQ_CODEBOOK_OWN_SUBS;
    struct sampling s = {.width = subs ? kvq_codebook_row(t->book, p->layer)->dim : vector};
    uint64_t name = ((uint64_t)p->layer << 32 | (p->head & 0xffffu)) << 1 | p->v;
    s.seed = kmeans_mix(t->options->seed, name);
    s.total = count_vectors(t, p, s.width);
    uint64_t most = t->options->samples ? t->options->samples : k * TRAIN_SAMPLES_PER_CENTROID;
    if (most > TRAIN_MOST_SAMPLES)
        most = TRAIN_MOST_SAMPLES;
    s.points = (uint32_t)(s.total < most ? s.total : most);
    if (s.points < k) {
        snprintf(t->text, t->n,
                 "layer %u: %u sub-vectors of %s for %u centroids; there must be as many at least. "
                 "Capture more tokens, give more --samples, or let heads, sub-vectors or layers "
                 "share tables",
                 p->layer, s.points, p->v ? "V" : "K", k);
        return KVQ_E_LIMIT;
    }
    s.out = malloc((size_t)s.points * s.width * sizeof *s.out);
    if (!s.out)
        return fail(t, KVQ_E_NO_MEMORY, "no memory for samples; give fewer --samples");
    int rc = sample(t, p, &s);
    if (rc == KVQ_OK)
        rc = cluster_sample(t, p, &s, report, table);
    free(s.out);
    return rc;
}

static int make_side(struct training *t, uint32_t layer, uint32_t layers, bool v)
{
    struct kvq_codebook_tables tables;
    kvq_codebook_tables(t->book, layer, &tables);
    float *table = v ? tables.v : tables.k;
    size_t n = v ? tables.v_n : tables.k_n;
    if (!table)
        return KVQ_OK;
    uint32_t heads = kvq_codebook_row(t->book, layer)->kv_heads;
    size_t one = (size_t)(v ? t->head->v_vector : t->head->k_vector)
                 << (v ? t->head->v_bits : t->head->k_bits);
    struct train_table report = {
        .layer = layer, .layers = layers, .v = v, .tables = (uint32_t)(n / one)};
    struct part part = {.layer = layer, .layers = layers, .head = UINT32_MAX, .v = v};
    if (!(t->head->flags & KVQ_CODEBOOK_OWN_HEADS))
        return make_tables(t, &part, &report, table);
    int rc = KVQ_OK;
    for (part.head = 0; part.head < heads && rc == KVQ_OK; part.head++)
        rc = make_tables(t, &part, &report, table + n / heads * part.head);
    return rc;
}

int train_layer(struct kvq_codebook *book, uint32_t layer, const struct train_source *source,
                const struct train_options *options, char *text, size_t n)
{
    const struct kvq_codebook_header *head = kvq_codebook_head(book);
    bool global = head->flags & KVQ_CODEBOOK_GLOBAL;
    struct training *t = malloc(sizeof *t);
    if (!t) {
        snprintf(text, n, "no memory");
        return KVQ_E_NO_MEMORY;
    }
    *t = (struct training){.book = book, .head = head, .source = source, .options = options};
    t->text = text;
    t->n = n;
    uint32_t end = global ? head->layers : layer + 1;
    int rc = KVQ_OK;
    for (uint32_t i = layer; i < end && rc == KVQ_OK; i++)
        rc = make_factors(t, i);
    while (layer < end && kvq_codebook_row(book, layer)->kv_heads == 0)
        layer++; // it reads another layer's cache
    for (int v = 0; v < 2 && rc == KVQ_OK && layer < end; v++)
        rc = make_side(t, layer, end - layer, v);
    free(t);
    return rc;
}
