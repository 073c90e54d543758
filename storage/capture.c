// SPDX-License-Identifier: Apache-2.0
//
// Capture files: opening, the index of sequences, and reading tokens as fp32.
#include "storage/capture.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/status.h"
#include "storage/capture_internal.h"

int kvq__complain(const struct kvq__complaint *c, int code, const char *format, ...)
{
    if (c->size == 0)
        return code;
    int used = snprintf(c->text, c->size, "%s: ", c->name);
    if (used < 0 || (size_t)used >= c->size)
        return code;
    va_list args;
    va_start(args, format);
    vsnprintf(c->text + used, c->size - (size_t)used, format, args);
    va_end(args);
    return code;
}

// ---- Sequences ----

static int by_chunk_place(const void *a, const void *b)
{
    const struct kvq__chunk_at *x = a, *y = b;
    if (x->sequence != y->sequence)
        return x->sequence < y->sequence ? -1 : 1;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return (x->position > y->position) - (x->position < y->position);
}

static struct kvq__run *run_of(const struct kvq_capture_file *f, uint32_t sequence, uint32_t layer)
{
    assert(sequence < f->info.sequences && layer < f->info.layers);
    return &f->runs[(size_t)sequence * f->info.layers + layer];
}

static int add_to_run(struct kvq_capture_file *f, uint32_t i, const struct kvq__complaint *c)
{
    const struct kvq__chunk_at *k = &f->chunks[i];
    struct kvq__run *r = run_of(f, k->sequence, k->layer);
    if (r->count == 0) {
        r->first = i;
        r->start = k->position;
    } else if (k->position != r->start + r->tokens) {
        return kvq__complain(c, KVQ_E_INVALID,
                             "sequence %u, layer %u: a chunk starts at position %llu, the one "
                             "before it ends at %llu",
                             k->sequence, k->layer, (unsigned long long)k->position,
                             (unsigned long long)(r->start + r->tokens));
    }
    assert(i == r->first + r->count);
    r->count++;
    r->tokens += k->tokens;
    return KVQ_OK;
}

uint64_t kvq_capture_file_tokens(const struct kvq_capture_file *file, uint32_t sequence)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t layer = 0; layer < file->info.layers; layer++) {
        uint64_t n = run_of(file, sequence, layer)->tokens;
        if (file->rows[layer].kv_heads)
            least = n < least ? n : least;
    }
    return least == UINT64_MAX ? 0 : least;
}

static int check_starts(const struct kvq_capture_file *f, uint32_t sequence,
                        const struct kvq__complaint *c)
{
    const struct kvq__run *first = NULL;
    for (uint32_t layer = 0; layer < f->info.layers; layer++) {
        const struct kvq__run *r = run_of(f, sequence, layer);
        if (r->count == 0)
            continue;
        if (first && r->start != first->start)
            return kvq__complain(
                c, KVQ_E_INVALID, "sequence %u starts at position %llu, but in layer %u at %llu",
                sequence, (unsigned long long)first->start, layer, (unsigned long long)r->start);
        first = first ? first : r;
    }
    return KVQ_OK;
}

static int index_sequences(struct kvq_capture_file *f, const struct kvq__complaint *c)
{
    if (f->n_chunks == 0)
        return KVQ_OK;
    qsort(f->chunks, f->n_chunks, sizeof *f->chunks, by_chunk_place);
    f->info.sequences = f->chunks[f->n_chunks - 1].sequence + 1;
    if (f->info.sequences > f->n_chunks)
        return kvq__complain(c, KVQ_E_INVALID, "numbers a sequence %u, but has only %u chunks",
                             f->info.sequences - 1, f->n_chunks);
    f->runs = calloc((size_t)f->info.sequences * f->info.layers, sizeof *f->runs);
    if (!f->runs)
        return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory for %u sequences of %u layers",
                             f->info.sequences, f->info.layers);
    int rc = KVQ_OK;
    for (uint32_t i = 0; i < f->n_chunks && rc == KVQ_OK; i++)
        rc = add_to_run(f, i, c);
    for (uint32_t s = 0; s < f->info.sequences && rc == KVQ_OK; s++) {
        rc = check_starts(f, s, c);
        f->info.tokens += kvq_capture_file_tokens(f, s);
    }
    return rc;
}

// ---- Opening ----

static int take_file_size(struct kvq_capture_file *f, const struct kvq__complaint *c)
{
    struct stat st;
    if (fstat(f->fd, &st) < 0)
        return kvq__complain(c, KVQ_E_SYSTEM, "cannot be looked at: %s", strerror(errno));
    if (!S_ISREG(st.st_mode))
        return kvq__complain(c, KVQ_E_INVALID, "is not a file");
    f->bytes = (uint64_t)st.st_size;
    return KVQ_OK;
}

int kvq_capture_file_open_fd(int fd, const char *name, struct kvq_capture_file **file, char *text,
                             size_t n)
{
    const struct kvq__complaint c = {name, text, n};
    struct kvq_capture_header header;
    *file = NULL;
    struct kvq_capture_file *f = calloc(1, sizeof *f);
    if (!f) {
        close(fd);
        return kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory to open it");
    }
    f->fd = fd;
    int rc = take_file_size(f, &c);
    if (rc == KVQ_OK)
        rc = kvq__capture_header(f, &header, &c);
    if (rc == KVQ_OK)
        rc = kvq__capture_chunks(f, &header, &c);
    if (rc == KVQ_OK)
        rc = index_sequences(f, &c);
    if (rc)
        kvq_capture_file_close(&f);
    *file = f;
    return rc;
}

int kvq_capture_file_open(const char *path, struct kvq_capture_file **file, char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    *file = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return kvq__complain(&c, KVQ_E_SYSTEM, "cannot be opened: %s", strerror(errno));
    return kvq_capture_file_open_fd(fd, path, file, text, n);
}

void kvq_capture_file_close(struct kvq_capture_file **file)
{
    struct kvq_capture_file *f = file ? *file : NULL;
    if (!f)
        return;
    close(f->fd);
    free(f->chunks);
    free(f->runs);
    free(f);
    *file = NULL;
}

const struct kvq_capture_info *kvq_capture_file_info(const struct kvq_capture_file *file)
{
    return &file->info;
}

const struct kvq_capture_row *kvq_capture_file_row(const struct kvq_capture_file *file,
                                                   uint32_t layer)
{
    assert(layer < file->info.layers);
    return &file->rows[layer];
}

// ---- Reading ----

static float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static float from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u)
        return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // The multiplication moves the exponent's bias and is exact for subnormals, too.
    float f = float_of(rest << 13) * 0x1p112f;
    return sign ? -f : f;
}

// n elements at the end of `out`'s own memory become fp32 in place: 16-bit elements take the upper
// half, so that ascending conversion never writes what is still to be read.
static void widen(uint8_t dtype, float *out, uint64_t n)
{
    assert(dtype >= 1 && dtype <= 3);
    if (dtype == 3)
        return;
    const uint8_t *from = (const uint8_t *)out + 2 * n;
    for (uint64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, from + 2 * i, sizeof h);
        out[i] = dtype == 1 ? from_f16(h) : float_of((uint32_t)h << 16);
    }
}

// Where in a chunk's data a part of it starts, and its dim.
static uint64_t part_offset(const struct kvq_capture_row *row, const struct kvq__chunk_at *k,
                            enum kvq_capture_part part, uint32_t *dim)
{
    uint64_t element[3], heads_k = row->kv_heads;
    for (int i = 0; i < 3; i++)
        element[i] = kvq_capture_element(k->dtype[i]);
    uint64_t k_bytes = heads_k * k->tokens * row->k_dim * element[KVQ_CAPTURE_K];
    uint64_t v_bytes = heads_k * k->tokens * row->v_dim * element[KVQ_CAPTURE_V];
    *dim = part == KVQ_CAPTURE_V ? row->v_dim : row->k_dim;
    return part == KVQ_CAPTURE_K ? 0 : part == KVQ_CAPTURE_V ? k_bytes : k_bytes + v_bytes;
}

static int read_piece(const struct kvq_capture_file *f, const struct kvq__chunk_at *k,
                      enum kvq_capture_part part, uint32_t head, uint64_t from, uint64_t tokens,
                      float *out, const struct kvq__complaint *c)
{
    uint32_t dim;
    uint64_t element = kvq_capture_element(k->dtype[part]);
    uint64_t at = k->data + part_offset(&f->rows[k->layer], k, part, &dim) +
                  ((uint64_t)head * k->tokens + from) * dim * element;
    uint64_t n = tokens * dim;
    assert(from <= k->tokens && tokens <= k->tokens - from && at + n * element <= f->bytes);
    int rc = kvq__read_at(f->fd, at, (uint8_t *)out + (4 - element) * n, n * element, c);
    if (rc == KVQ_OK)
        widen(k->dtype[part], out, n);
    return rc;
}

static int check_read(const struct kvq_capture_file *f, uint32_t sequence, uint32_t layer,
                      enum kvq_capture_part part, uint32_t head, uint64_t from, uint64_t tokens,
                      const struct kvq__complaint *c)
{
    if (sequence >= f->info.sequences || layer >= f->info.layers)
        return kvq__complain(c, KVQ_E_BOUNDS,
                             "there is no sequence %u, layer %u; %u and %u there are", sequence,
                             layer, f->info.sequences, f->info.layers);
    if (part == KVQ_CAPTURE_Q && !f->info.has_queries)
        return kvq__complain(c, KVQ_E_BOUNDS, "holds no queries");
    uint32_t heads = part == KVQ_CAPTURE_Q ? f->rows[layer].q_heads : f->rows[layer].kv_heads;
    uint64_t have = kvq_capture_file_tokens(f, sequence);
    if (head >= heads || from > have || tokens > have - from)
        return kvq__complain(c, KVQ_E_BOUNDS,
                             "head %u, tokens %llu to %llu: the sequence has %u heads and %llu "
                             "tokens",
                             head, (unsigned long long)from, (unsigned long long)(from + tokens),
                             heads, (unsigned long long)have);
    return KVQ_OK;
}

int kvq_capture_file_read(const struct kvq_capture_file *file, uint32_t sequence, uint32_t layer,
                          enum kvq_capture_part part, uint32_t head, uint64_t from, uint64_t tokens,
                          float *out, char *text, size_t n)
{
    const struct kvq__complaint c = {"capture", text, n};
    int rc = check_read(file, sequence, layer, part, head, from, tokens, &c);
    if (rc)
        return rc;
    const struct kvq__run *run = run_of(file, sequence, layer);
    uint32_t dim = part == KVQ_CAPTURE_V ? file->rows[layer].v_dim : file->rows[layer].k_dim;
    for (uint32_t i = run->first; tokens > 0 && rc == KVQ_OK; i++) {
        assert(i < run->first + run->count);
        const struct kvq__chunk_at *k = &file->chunks[i];
        uint64_t start = k->position - run->start, skip = from - start;
        if (from >= start + k->tokens)
            continue;
        uint64_t some = k->tokens - skip < tokens ? k->tokens - skip : tokens;
        rc = read_piece(file, k, part, head, skip, some, out, &c);
        out += some * dim;
        from += some;
        tokens -= some;
    }
    return rc;
}
