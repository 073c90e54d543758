// SPDX-License-Identifier: Apache-2.0
//
// kvq-codebook make: from a capture file to a codebook, layer by layer.
//
// A checkpoint is the codebook so far, saved after each layer. What it says on how it is made must
// be what this run would say, so that a run taken up again writes the bytes of one that was not
// interrupted.
#define XXH_INLINE_ALL
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "proto/status.h"
#include "storage/capture.h"
#include "tools/kvq-codebook/commands.h"

struct making {
    const struct options *o;
    struct kvq_capture_file *capture;
    struct kvq_codebook *book;
    struct kvq_format format;
    struct kvq_codebook_row rows[KVQ_MAX_LAYERS];
    uint64_t tokens;
    char made[KVQ_CODEBOOK_MADE_BYTES - 32]; // room for a checkpoint's count
    char text[1024];
};

// ---- The capture ----

// Tokens of all sequences, one after the other, as the training counts them.
static int read_capture(void *context, uint32_t layer, bool v, uint32_t head, uint64_t from,
                        uint64_t tokens, float *out, char *text, size_t n)
{
    const struct making *m = context;
    uint32_t dim = m->rows[layer].dim, width = kvq_capture_file_row(m->capture, layer)->k_dim;
    int rc = KVQ_OK;
    for (uint32_t s = 0; tokens > 0 && rc == KVQ_OK; s++) {
        uint64_t have = kvq_capture_file_tokens(m->capture, s);
        if (from >= have) {
            from -= have;
            continue;
        }
        uint64_t some = have - from < tokens ? have - from : tokens;
        rc = kvq_capture_file_read(m->capture, s, layer, v ? KVQ_CAPTURE_V : KVQ_CAPTURE_K, head,
                                   from, some, out, text, n);
        if (rc == KVQ_OK)
            train_pad_rows(out, some, width, dim);
        out += some * dim;
        tokens -= some;
        from = 0;
    }
    return rc;
}

static int digest_of(struct making *m, uint64_t *digest)
{
    static uint8_t piece[1 << 16];
    XXH3_state_t state;
    ssize_t got = -1;
    int fd = open(m->o->capture, O_RDONLY | O_CLOEXEC);
    XXH3_64bits_reset(&state);
    while (fd >= 0 && (got = read(fd, piece, sizeof piece)) > 0)
        XXH3_64bits_update(&state, piece, (size_t)got);
    int failed = errno;
    if (fd >= 0)
        close(fd);
    *digest = XXH3_64bits_digest(&state);
    if (got == 0)
        return KVQ_OK;
    snprintf(m->text, sizeof m->text, "%s: cannot be read: %s", m->o->capture, strerror(failed));
    return KVQ_E_SYSTEM;
}

static int take_rows(struct making *m)
{
    const struct kvq_capture_info *info = kvq_capture_file_info(m->capture);
    for (uint32_t i = 0; i < info->layers; i++) {
        const struct kvq_capture_row *row = kvq_capture_file_row(m->capture, i);
        if (row->k_dim != row->v_dim) {
            snprintf(m->text, sizeof m->text,
                     "%s: layer %u has head_dim %u for K and %u for V; they have to be equal",
                     m->o->capture, i, row->k_dim, row->v_dim);
            return KVQ_E_SHAPE;
        }
        uint16_t stored = kvq_stored_dim(row->k_dim);
        m->rows[i] = (struct kvq_codebook_row){row->kv_heads, stored ? stored : row->k_dim};
    }
    for (uint32_t s = 0; s < info->sequences; s++)
        m->tokens += kvq_capture_file_tokens(m->capture, s);
    if (m->tokens > 0)
        return KVQ_OK;
    snprintf(m->text, sizeof m->text, "%s: holds no tokens", m->o->capture);
    return KVQ_E_INVALID;
}

static int open_capture(struct making *m)
{
    int rc = kvq_capture_file_open(m->o->capture, &m->capture, m->text, sizeof m->text);
    if (rc == KVQ_OK)
        rc = take_rows(m);
    if (rc)
        return rc;
    uint64_t torn = kvq_capture_file_info(m->capture)->torn_bytes, digest;
    if (torn > 0)
        fprintf(stderr,
                "kvq-codebook: %s was not closed; its last %" PRIu64 " bytes are no whole "
                "chunk and are left out\n",
                m->o->capture, torn);
    rc = digest_of(m, &digest);
    char samples[32];
    if (m->o->train.samples)
        snprintf(samples, sizeof samples, "%u", m->o->train.samples);
    else if (m->format.k.bits == 16 || m->format.v.bits == 16)
        snprintf(samples, sizeof samples, "%u", TRAIN_MOST_SAMPLES);
    else
        snprintf(samples, sizeof samples, "%u-per-centroid", TRAIN_SAMPLES_PER_CENTROID);
    snprintf(m->made, sizeof m->made,
             "seed=%" PRIu64 " samples=%s iterations=%u tokens=%" PRIu64
             " sequences=%u source=%016" PRIx64 " program=kvq-codebook/" KVQ_VERSION,
             m->o->train.seed, samples, m->o->train.rounds, m->tokens,
             kvq_capture_file_info(m->capture)->sequences, digest);
    return rc;
}

// ---- Checkpoints ----

static int save_checkpoint(struct making *m, uint32_t layers_done)
{
    char made[KVQ_CODEBOOK_MADE_BYTES];
    if (!m->o->resume)
        return KVQ_OK;
    snprintf(made, sizeof made, "%s done=%u", m->made, layers_done);
    return kvq_codebook_save_part(m->book, m->o->resume, made, m->text, sizeof m->text);
}

// Layers that the checkpoint has and this run would make just so. 0 if it is another run's.
static uint32_t layers_in(const struct making *m, const struct kvq_codebook *part)
{
    const struct kvq_codebook_header *ours = kvq_codebook_head(m->book);
    const struct kvq_codebook_header *its = kvq_codebook_head(part);
    static const char word[] = " done=";
    size_t n = strlen(m->made);
    unsigned long done;
    char *end;
    if (strcmp(its->format, ours->format) != 0 || its->layers != ours->layers ||
        its->flags != (ours->flags | KVQ_CODEBOOK_PART) ||
        memcmp(its->model, ours->model, sizeof its->model) != 0)
        return 0;
    for (uint32_t i = 0; i < ours->layers; i++)
        if (memcmp(kvq_codebook_row(part, i), &m->rows[i], sizeof m->rows[i]) != 0)
            return 0;
    if (strncmp(its->made, m->made, n) != 0 || strncmp(its->made + n, word, sizeof word - 1) != 0)
        return 0;
    done = strtoul(its->made + n + sizeof word - 1, &end, 10);
    return *end || done > ours->layers ? 0 : (uint32_t)done;
}

static void copy_layer(struct kvq_codebook *to, struct kvq_codebook *from, uint32_t layer)
{
    struct kvq_codebook_tables a, b;
    kvq_codebook_tables(to, layer, &a);
    kvq_codebook_tables(from, layer, &b);
    if (a.smooth)
        memcpy(a.smooth, b.smooth, a.smooth_n * sizeof(float));
    if (a.k)
        memcpy(a.k, b.k, a.k_n * sizeof(float));
    if (a.v)
        memcpy(a.v, b.v, a.v_n * sizeof(float));
}

// *done layers come from the checkpoint, if there is one.
static int take_up(struct making *m, uint32_t *done)
{
    struct kvq_codebook *part;
    *done = 0;
    if (!m->o->resume || access(m->o->resume, F_OK) != 0)
        return KVQ_OK;
    int rc = kvq_codebook_open_part(m->o->resume, &part, m->text, sizeof m->text);
    if (rc)
        return rc;
    *done = layers_in(m, part);
    for (uint32_t i = 0; i < *done; i++)
        copy_layer(m->book, part, i);
    if (*done == 0) {
        snprintf(m->text, sizeof m->text,
                 "%s: is the checkpoint of another run (%s, %s); give its options and capture, or "
                 "remove it",
                 m->o->resume, kvq_codebook_format(part), kvq_codebook_head(part)->made);
        rc = KVQ_E_INVALID;
    } else if (!m->o->quiet) {
        fprintf(stderr, "%u of %u layers are in %s\n", *done, kvq_codebook_head(m->book)->layers,
                m->o->resume);
    }
    kvq_codebook_close(&part);
    return rc;
}

// ---- Making ----

static void progress(void *context, const struct train_table *t)
{
    const struct making *m = context;
    char layers[64];
    if (t->layers == 1)
        snprintf(layers, sizeof layers, "layer %u of %u", t->layer,
                 kvq_codebook_head(m->book)->layers);
    else
        snprintf(layers, sizeof layers, "layers %u to %u", t->layer, t->layer + t->layers - 1);
    fprintf(stderr, "%s: table %u of %u for %s: %u sub-vectors, %u iterations, error %.2f%%\n",
            layers, t->number, t->tables, t->v ? "V" : "K", t->points, t->rounds, 100 * t->error);
}

static void tell_round(void *context, const struct train_table *t)
{
    const struct making *m = context;
    fprintf(stderr, "layer %u: table %u of %u for %s: iteration %u of at most %u, error %.2f%%\n",
            t->layer, t->number, t->tables, t->v ? "V" : "K", t->rounds, m->o->train.rounds,
            100 * t->error);
}

static int train_all(struct making *m)
{
    const struct kvq_codebook_header *head = kvq_codebook_head(m->book);
    const struct train_source source = {.context = m, .tokens = m->tokens, .read = read_capture};
    struct train_options options = m->o->train;
    uint32_t step = head->flags & KVQ_CODEBOOK_GLOBAL ? head->layers : 1, done;
    options.progress = m->o->quiet ? NULL : progress;
    options.round = m->o->quiet ? NULL : tell_round;
    options.context = m;
    int rc = take_up(m, &done);
    for (uint32_t i = done; i < head->layers && rc == KVQ_OK; i += step) {
        rc = train_layer(m->book, i, &source, &options, m->text, sizeof m->text);
        if (rc == KVQ_OK)
            rc = save_checkpoint(m, i + step);
    }
    return rc;
}

static int make(struct making *m)
{
    int rc = kvq_format_parse(m->o->format, &m->format, m->text, sizeof m->text);
    if (rc)
        return KVQ_E_FORMAT;
    rc = open_capture(m);
    if (rc)
        return rc;
    const struct kvq_capture_info *info = kvq_capture_file_info(m->capture);
    const struct kvq_codebook_plan plan = {.format = &m->format,
                                           .rows = m->rows,
                                           .layers = info->layers,
                                           .flags = m->o->flags,
                                           .model = info->model};
    rc = kvq_codebook_new(&plan, &m->book, m->text, sizeof m->text);
    if (rc == KVQ_OK)
        rc = kvq_codebook_try_save(m->o->out, m->text, sizeof m->text);
    if (rc == KVQ_OK && m->o->resume)
        rc = kvq_codebook_try_save(m->o->resume, m->text, sizeof m->text);
    if (rc == KVQ_OK)
        rc = train_all(m);
    if (rc == KVQ_OK)
        rc = kvq_codebook_save(m->book, m->o->out, m->made, m->text, sizeof m->text);
    if (rc == KVQ_OK && m->o->resume)
        unlink(m->o->resume);
    return rc;
}

int command_make(const struct options *o)
{
    struct making *m = calloc(1, sizeof *m);
    if (!m) {
        fprintf(stderr, "kvq-codebook: no memory\n");
        return EXIT_FAILED;
    }
    m->o = o;
    int rc = make(m);
    if (rc)
        fprintf(stderr, "kvq-codebook: %s\n", m->text);
    else if (!o->quiet)
        fprintf(stderr, "%s: %" PRIu64 " bytes, id %016" PRIx64 "\n", o->out,
                kvq_codebook_head(m->book)->bytes, kvq_codebook_id(m->book));
    kvq_codebook_close(&m->book);
    kvq_capture_file_close(&m->capture);
    free(m);
    return rc ? EXIT_FAILED : EXIT_DONE;
}
