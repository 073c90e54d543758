// SPDX-License-Identifier: Apache-2.0
//
// Codebooks for measurements, trained as kvq-codebook trains them, of the keys and values of one
// layer. One table for all heads and sub-vectors serves K, and one V.
#include <math.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"
#include "tools/kvq-codebook/train.h"

// For one table: 16 for each of 4,096 centroids, and at least 4 for each of 65,536.
enum { MOST_SAMPLES = 65536, LEAST_PER_CENTROID = 4 };

static bool is_book(const struct kvq_side *side)
{
    return side->codec == KVQ_CODEC_BOOK;
}

bool quality_wants_book(const struct quality_method *m)
{
    return m->kind == QUALITY_FORMAT &&
           (is_book(&m->f.k) || is_book(&m->f.v) || m->f.k_channel == KVQ_CHANNEL_BOOK);
}

static void add(char *name, const char *stage, const char *value)
{
    size_t n = strlen(name);
    snprintf(name + n, KVQ_FORMAT_NAME - n, ":%s=%s", stage, value);
}

// The format that does to keys and values what the method does before it takes codes. Methods may
// have names that are no format's, and a codebook's format has to have one. A side that has no
// codes of this kind gets a codebook that nobody reads.
static int format_of(const struct quality_method *m, struct kvq_format *f, char *text, size_t n)
{
    static const char *const rotations[] = {"none", "hadamard", "signed"};
    static const char *const scales[] = {"none", "l2", "xh", "max", "mean"};
    const struct kvq_side any = {.vector = 8, .bits = 8};
    bool own_k = is_book(&m->f.k);
    const struct kvq_side *k = own_k ? &m->f.k : &any, *v = is_book(&m->f.v) ? &m->f.v : &any;
    char name[KVQ_FORMAT_NAME];
    snprintf(name, sizeof name, "vecinfer-k%ux%uv%ux%u", k->vector, k->bits, v->vector, v->bits);
    if (m->f.k_channel != KVQ_CHANNEL_BOOK)
        add(name, "channel", own_k && m->f.k_channel == KVQ_CHANNEL_PROMPT ? "prompt" : "none");
    if (m->f.k_rotation != KVQ_ROTATE_HADAMARD)
        add(name, "rot", rotations[m->f.k_rotation]);
    if (m->f.v_rotation != KVQ_ROTATE_NONE)
        add(name, "vrot", rotations[m->f.v_rotation]);
    if (own_k && m->f.k_token_scale != KVQ_SCALE_NONE)
        add(name, "scale", scales[m->f.k_token_scale]);
    return kvq_format_parse(name, f, text, n);
}

static int read_data(void *context, uint32_t layer, bool v, uint32_t head, uint64_t from,
                     uint64_t tokens, float *out, char *text, size_t n)
{
    const struct quality_data *d = context;
    const float *rows = (v ? d->v : d->k) + ((size_t)head * d->tokens + from) * d->dim;
    (void)layer;
    (void)text;
    (void)n;
    memcpy(out, rows, tokens * d->dim * sizeof *out);
    train_pad_rows(out, tokens, d->dim, kvq_stored_dim(d->dim));
    return 0;
}

bool quality_book_train(struct quality_book *b, const struct quality_method *m,
                        const struct quality_data *d, uint64_t seed, char *text, size_t n)
{
    struct kvq_format f;
    struct kvq_codebook_row row = {(uint16_t)d->heads, kvq_stored_dim(d->dim)};
    const struct kvq_codebook_plan plan = {.format = &f, .rows = &row, .layers = 1};
    const struct train_source source = {
        .context = (void *)d, .tokens = d->tokens, .read = read_data};
    struct train_options options = {.seed = seed, .rounds = TRAIN_MOST_ROUNDS};
    *b = (struct quality_book){0};
    int rc = format_of(m, &f, text, n);
    if (rc == 0)
        rc = kvq_codebook_new(&plan, &b->codebook, text, n);
    if (rc)
        return false;
    uint32_t centroids = 1u << (f.k.bits > f.v.bits ? f.k.bits : f.v.bits);
    if (centroids * TRAIN_SAMPLES_PER_CENTROID > MOST_SAMPLES)
        options.samples = MOST_SAMPLES;
    if (centroids * LEAST_PER_CENTROID > MOST_SAMPLES)
        options.samples = centroids * LEAST_PER_CENTROID;
    rc = train_layer(b->codebook, 0, &source, &options, text, n);
    if (rc == 0)
        kvq_codebook_layer(b->codebook, 0, &b->book);
    else
        quality_book_free(b);
    return rc == 0;
}

void quality_book_free(struct quality_book *b)
{
    kvq_codebook_close(&b->codebook);
    *b = (struct quality_book){0};
}
