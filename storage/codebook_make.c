// SPDX-License-Identifier: Apache-2.0
//
// Codebook files: making one in memory, and writing it.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/status.h"
#include "storage/codebook_internal.h"
#include "storage/io.h"

// ---- In memory ----

// The rest of `to` is 0 already. What is not printable ASCII would be refused when read.
static void set_text(char *to, size_t size, const char *from)
{
    size_t n = strnlen(from, size - 1);
    for (size_t i = 0; i < n; i++)
        to[i] = from[i] >= ' ' && from[i] <= '~' ? from[i] : '?';
}

static void fill_header(struct kvq_codebook_header *h, const struct kvq_codebook_plan *plan)
{
    const struct kvq_format *f = plan->format;
    bool k = f->k.codec == KVQ_CODEC_BOOK, v = f->v.codec == KVQ_CODEC_BOOK;
    *h = (struct kvq_codebook_header){
        .version = KVQ_CODEBOOK_VERSION,
        .layers = plan->layers,
        .flags = plan->flags | (f->k_channel == KVQ_CHANNEL_BOOK ? KVQ_CODEBOOK_FACTORS : 0),
        .dtype = KVQ_F32,
        .k_rotation = f->k_rotation,
        .k_token_scale = f->k_token_scale,
        .v_rotation = f->v_rotation,
        .k_bits = k ? f->k.bits : 0,
        .v_bits = v ? f->v.bits : 0,
        .k_vector = k ? f->k.vector : 0,
        .v_vector = v ? f->v.vector : 0,
    };
    memcpy(h->magic, KVQ_CODEBOOK_MAGIC, sizeof h->magic);
    set_text(h->format, sizeof h->format, f->name);
    set_text(h->model, sizeof h->model, plan->model ? plan->model : "");
}

// The size that the header has to state is what kvq__codebook_check expects.
static int set_size(struct kvq_codebook *book, const struct kvq__complaint *c)
{
    const struct kvq__complaint silent = {"", NULL, 0};
    kvq__codebook_check(book, &silent);
    book->head.bytes =
        kvq__codebook_front(book->head.layers) + (uint64_t)book->n_values * sizeof(float);
    return kvq__codebook_check(book, c);
}

static int check_plan(const struct kvq_codebook_plan *plan, const struct kvq__complaint *c)
{
    if (plan->layers == 0 || plan->layers > KVQ_MAX_LAYERS)
        return kvq__complain(c, KVQ_E_LIMIT, "has %u layers; 1 to %d are allowed", plan->layers,
                             KVQ_MAX_LAYERS);
    if (!kvq_has_centroids(plan->format))
        return kvq__complain(c, KVQ_E_FORMAT,
                             "format %s has no codebooks; vecinfer-* and million-* have",
                             plan->format->name);
    if (plan->format->k.codec == KVQ_CODEC_BOOK && plan->format->k_token_scale != KVQ_SCALE_NONE)
        return kvq__complain(
            c, KVQ_E_FORMAT,
            "format %s scales each key by its norm; no codebooks are made for that",
            plan->format->name);
    if (plan->format->k.codec == KVQ_CODEC_BOOK && plan->format->k_channel == KVQ_CHANNEL_PROMPT)
        return kvq__complain(c, KVQ_E_FORMAT,
                             "format %s divides K by what it learns from each prompt; no codebook "
                             "can be made ahead of that",
                             plan->format->name);
    return KVQ_OK;
}

int kvq_codebook_new(const struct kvq_codebook_plan *plan, struct kvq_codebook **out, char *text,
                     size_t n)
{
    const struct kvq__complaint c = {"codebook", text, n};
    *out = NULL;
    int rc = check_plan(plan, &c);
    if (rc)
        return rc;
    struct kvq_codebook *book = calloc(1, sizeof *book);
    if (book)
        book->memory = -1;
    if (!book)
        return kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory");
    fill_header(&book->head, plan);
    memcpy(book->rows, plan->rows, plan->layers * sizeof *plan->rows);
    rc = set_size(book, &c);
    if (rc == KVQ_OK) {
        assert(book->n_values > 0);
        size_t bytes = book->n_values * sizeof(float);
        book->values = aligned_alloc(KVQ_CODEBOOK_ALIGN, bytes);
        if (book->values)
            memset(book->values, 0, bytes);
        else
            rc = kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory for tables of %zu bytes", bytes);
    }
    struct kvq_codebook_tables t;
    for (uint32_t i = 0; i < plan->layers && rc == KVQ_OK; i++) {
        kvq_codebook_tables(book, i, &t);
        for (size_t j = 0; j < t.smooth_n; j++)
            t.smooth[j] = 1.0f;
    }
    if (rc)
        kvq_codebook_close(&book);
    *out = book;
    return rc;
}

void kvq_codebook_tables(struct kvq_codebook *book, uint32_t layer, struct kvq_codebook_tables *t)
{
    const struct kvq_codebook_header *h = &book->head;
    const struct kvq_codebook_row *row = &book->rows[layer];
    const struct kvq__codebook_place *at = &book->places[layer];
    assert(layer < h->layers);
    *t = (struct kvq_codebook_tables){0};
    if (row->kv_heads == 0)
        return;
    if (h->flags & KVQ_CODEBOOK_FACTORS)
        t->smooth_n = (size_t)row->kv_heads * row->dim;
    t->k_n = kvq__codebook_tables(h, row, false) * kvq__codebook_table(h, false);
    t->v_n = kvq__codebook_tables(h, row, true) * kvq__codebook_table(h, true);
    assert(at->k + t->k_n <= book->n_values && at->v + t->v_n <= book->n_values);
    t->smooth = t->smooth_n ? book->values + at->smooth : NULL;
    t->k = t->k_n ? book->values + at->k : NULL;
    t->v = t->v_n ? book->values + at->v : NULL;
}

// ---- In a file ----

static int write_bytes(int fd, const void *data, size_t n, const struct kvq__complaint *c)
{
    const uint8_t *from = data;
    while (n > 0) {
        ssize_t done = write(fd, from, n);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return kvq__complain(c, KVQ_E_SYSTEM, "cannot be written: %s", strerror(errno));
        from += done;
        n -= (size_t)done;
    }
    return KVQ_OK;
}

static int write_book(int fd, const struct kvq_codebook *book, const struct kvq__complaint *c)
{
    static const uint8_t zeros[KVQ_CODEBOOK_ALIGN];
    size_t rows = book->head.layers * sizeof book->rows[0];
    assert(sizeof book->head + rows <= kvq__codebook_front(book->head.layers));
    int rc = write_bytes(fd, &book->head, sizeof book->head, c);
    if (rc == KVQ_OK)
        rc = write_bytes(fd, book->rows, rows, c);
    if (rc == KVQ_OK)
        rc = write_bytes(fd, zeros,
                         kvq__codebook_front(book->head.layers) - sizeof book->head - rows, c);
    if (rc == KVQ_OK)
        rc = write_bytes(fd, book->values, book->n_values * sizeof *book->values, c);
    if (rc == KVQ_OK && fsync(fd) < 0)
        rc = kvq__complain(c, KVQ_E_SYSTEM, "cannot be written: %s", strerror(errno));
    return rc;
}

// Opens the file beside path that will be renamed over path; its name goes to temporary.
static int open_beside(const char *path, char temporary[PATH_MAX], int *fd,
                       const struct kvq__complaint *c)
{
    struct stat st;
    int length = snprintf(temporary, PATH_MAX, "%s.tmp-%d", path, (int)getpid());
    if (length < 0 || length >= PATH_MAX)
        return kvq__complain(c, KVQ_E_LIMIT, "the path is too long; at most %d bytes are allowed",
                             PATH_MAX - 20);
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return kvq__complain(c, KVQ_E_INVALID, "is there and is not a file; nothing was written");
    unlink(temporary); // of a process of that number that died
    *fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (*fd < 0)
        return kvq__complain(c, KVQ_E_SYSTEM, "cannot be created: %s", strerror(errno));
    return KVQ_OK;
}

static int write_book_file(const struct kvq_codebook *book, const char *path,
                           const struct kvq__complaint *c)
{
    char temporary[PATH_MAX];
    int fd, rc = open_beside(path, temporary, &fd, c);
    if (rc)
        return rc;
    rc = write_book(fd, book, c);
    close(fd);
    if (rc == KVQ_OK && rename(temporary, path) < 0)
        rc = kvq__complain(c, KVQ_E_SYSTEM, "cannot be put in place: %s", strerror(errno));
    if (rc)
        unlink(temporary);
    else // a file system that cannot do it is no failure
        (void)kvq_io_sync_parent(kvq_io_posix(), path);
    return rc;
}

static void make_folders_of(const char *path)
{
    char folder[PATH_MAX];
    if (strlen(path) >= sizeof folder)
        return;
    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
        mkdir(folder, 0777); // where this fails the open says why
    }
}

int kvq_codebook_try_save(const char *path, char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    char temporary[PATH_MAX];
    int fd;
    make_folders_of(path);
    int rc = open_beside(path, temporary, &fd, &c);
    if (rc)
        return rc;
    close(fd);
    unlink(temporary);
    return KVQ_OK;
}

static int save_book(struct kvq_codebook *book, const char *path, const char *made, bool part,
                     char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    assert(book->values);
    if (strlen(made) >= sizeof book->head.made)
        return kvq__complain(&c, KVQ_E_LIMIT, "the text on how it was made has %zu bytes; %zu fit",
                             strlen(made), sizeof book->head.made - 1);
    memset(book->head.made, 0, sizeof book->head.made);
    set_text(book->head.made, sizeof book->head.made, made);
    int rc = kvq__codebook_check_values(book, &c);
    if (rc)
        return rc;
    book->head.flags &= ~(uint32_t)KVQ_CODEBOOK_PART;
    book->head.flags |= part ? KVQ_CODEBOOK_PART : 0;
    book->head.data_check = kvq__codebook_data_check(book);
    book->head.check = kvq__codebook_head_check(book);
    rc = write_book_file(book, path, &c);
    if (rc == KVQ_OK)
        book->id = book->head.check;
    return rc;
}

int kvq_codebook_save(struct kvq_codebook *book, const char *path, const char *made, char *text,
                      size_t n)
{
    return save_book(book, path, made, false, text, n);
}

int kvq_codebook_save_part(struct kvq_codebook *book, const char *path, const char *made,
                           char *text, size_t n)
{
    return save_book(book, path, made, true, text, n);
}
