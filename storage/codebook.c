// SPDX-License-Identifier: Apache-2.0
//
// Codebook files: opening, and handing a layer's tables to the kernels.
#include "storage/codebook_internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/status.h"

// ---- Opening ----

static int check_size(int fd, struct kvq_codebook *book, const struct kvq__complaint *c)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return kvq__complain(c, KVQ_E_SYSTEM, "cannot be looked at: %s", strerror(errno));
    if (!S_ISREG(st.st_mode))
        return kvq__complain(c, KVQ_E_INVALID, "is not a file");
    if (st.st_size < (off_t)sizeof book->head)
        return kvq__complain(c, KVQ_E_INVALID, "is no codebook: it has %lld bytes, a header %zu",
                             (long long)st.st_size, sizeof book->head);
    int rc = kvq__read_at(fd, 0, &book->head, sizeof book->head, c);
    if (rc)
        return rc;
    if (memcmp(book->head.magic, KVQ_CODEBOOK_MAGIC, sizeof book->head.magic) == 0 &&
        book->head.bytes != (uint64_t)st.st_size)
        return kvq__complain(c, KVQ_E_INVALID, "is %lld bytes long; its header says %llu",
                             (long long)st.st_size, (unsigned long long)book->head.bytes);
    return KVQ_OK;
}

static int read_front(int fd, struct kvq_codebook *book, const struct kvq__complaint *c)
{
    const struct kvq_codebook_header *h = &book->head;
    bool known = memcmp(h->magic, KVQ_CODEBOOK_MAGIC, sizeof h->magic) == 0 &&
                 h->version == KVQ_CODEBOOK_VERSION && h->layers <= KVQ_MAX_LAYERS;
    uint32_t layers = known ? h->layers : 0; // if 0, kvq__codebook_check says why not
    int rc = kvq__read_at(fd, sizeof *h, book->rows, layers * sizeof book->rows[0], c);
    if (rc)
        return rc;
    if (layers && kvq__codebook_head_check(book) != h->check)
        return kvq__complain(c, KVQ_E_INVALID, "is damaged: the check of its header is wrong");
    return kvq__codebook_check(book, c);
}

// Memory that other processes can be given to read: nobody can write it but through this mapping,
// or change its size.
static int take_memory(struct kvq_codebook *book, const struct kvq__complaint *c)
{
    size_t bytes = book->n_values ? book->n_values * sizeof(float) : KVQ_CODEBOOK_ALIGN;
    void *mapping = MAP_FAILED;
    assert(!book->values && book->mapped == 0 && book->memory < 0);
    book->memory = memfd_create("kvq-codebook", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (book->memory >= 0 && ftruncate(book->memory, (off_t)bytes) == 0)
        mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, book->memory, 0);
    if (mapping == MAP_FAILED ||
        fcntl(book->memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE) < 0)
        return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory for its %llu bytes: %s",
                             (unsigned long long)book->head.bytes, strerror(errno));
    book->values = mapping;
    book->mapped = bytes;
    return KVQ_OK;
}

static int read_values(int fd, struct kvq_codebook *book, const struct kvq__complaint *c)
{
    static const uint8_t zeros[KVQ_CODEBOOK_ALIGN];
    uint8_t between[KVQ_CODEBOOK_ALIGN];
    uint64_t front = kvq__codebook_front(book->head.layers);
    uint64_t rows = sizeof book->head + book->head.layers * sizeof book->rows[0];
    assert(rows <= front && front - rows <= sizeof between);
    int rc = take_memory(book, c);
    if (rc)
        return rc;
    rc = kvq__read_at(fd, rows, between, front - rows, c);
    if (rc == KVQ_OK)
        rc = kvq__read_at(fd, front, book->values, book->n_values * sizeof(float), c);
    if (rc)
        return rc;
    if (memcmp(between, zeros, front - rows) != 0 ||
        kvq__codebook_data_check(book) != book->head.data_check)
        return kvq__complain(c, KVQ_E_INVALID, "is damaged: the check of its tables is wrong");
    return kvq__codebook_check_values(book, c);
}

static int check_part(const struct kvq_codebook *book, bool part, const struct kvq__complaint *c)
{
    bool is_part = book->head.flags & KVQ_CODEBOOK_PART;
    if (is_part && !part)
        return kvq__complain(c, KVQ_E_INVALID,
                             "is not finished; kvq-codebook make --resume goes on with it");
    if (!is_part && part)
        return kvq__complain(c, KVQ_E_INVALID, "is a finished codebook and no checkpoint");
    return KVQ_OK;
}

// `fd` is closed in any case.
static int open_book(int fd, const char *name, bool part, struct kvq_codebook **out, char *text,
                     size_t n)
{
    const struct kvq__complaint c = {name, text, n};
    struct kvq_codebook *book = calloc(1, sizeof *book);
    int rc = book ? KVQ_OK : kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory to open it");
    if (book)
        book->memory = -1;
    if (rc == KVQ_OK)
        rc = check_size(fd, book, &c);
    if (rc == KVQ_OK)
        rc = read_front(fd, book, &c);
    if (rc == KVQ_OK)
        rc = check_part(book, part, &c);
    if (rc == KVQ_OK)
        rc = read_values(fd, book, &c);
    if (rc == KVQ_OK)
        book->id = book->head.check;
    else
        kvq_codebook_close(&book);
    close(fd);
    *out = book;
    return rc;
}

static int open_path(const char *path, bool part, struct kvq_codebook **out, char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    *out = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return kvq__complain(&c, KVQ_E_SYSTEM, "cannot be opened: %s", strerror(errno));
    return open_book(fd, path, part, out, text, n);
}

int kvq_codebook_open_fd(int fd, const char *name, struct kvq_codebook **out, char *text, size_t n)
{
    return open_book(fd, name, false, out, text, n);
}

int kvq_codebook_open(const char *path, struct kvq_codebook **out, char *text, size_t n)
{
    return open_path(path, false, out, text, n);
}

int kvq_codebook_open_part(const char *path, struct kvq_codebook **out, char *text, size_t n)
{
    return open_path(path, true, out, text, n);
}

void kvq_codebook_close(struct kvq_codebook **book)
{
    if (!book || !*book)
        return;
    if ((*book)->mapped)
        munmap((*book)->values, (*book)->mapped);
    else
        free((*book)->values);
    if ((*book)->memory >= 0)
        close((*book)->memory);
    free(*book);
    *book = NULL;
}

// ---- What it says ----

const char *kvq_codebook_format(const struct kvq_codebook *book)
{
    return book->head.format;
}

uint64_t kvq_codebook_id(const struct kvq_codebook *book)
{
    return book->id;
}

int kvq_codebook_memory(const struct kvq_codebook *book, const float **values, size_t *n)
{
    assert(book->values);
    *values = book->values;
    *n = book->n_values;
    return book->memory;
}

const struct kvq_codebook_header *kvq_codebook_head(const struct kvq_codebook *book)
{
    return &book->head;
}

const struct kvq_codebook_row *kvq_codebook_row(const struct kvq_codebook *book, uint32_t layer)
{
    assert(layer < book->head.layers);
    return &book->rows[layer];
}

// ---- Does it fit? ----

static bool fits_side(char letter, const struct kvq_side *side, uint8_t bits, uint8_t vector,
                      const struct kvq__complaint *c)
{
    if (bits == 0)
        kvq__complain(c, 0, "holds no tables for %c", letter);
    else if (bits != side->bits || vector != side->vector)
        kvq__complain(c, 0,
                      "has tables for %c of %u bits for %u channels; the format needs %u for %u",
                      letter, bits, vector, side->bits, side->vector);
    else
        return true;
    return false;
}

static bool fits_k(const struct kvq_codebook_header *h, const struct kvq_format *f,
                   const struct kvq__complaint *c)
{
    bool factors = h->flags & KVQ_CODEBOOK_FACTORS;
    if (!fits_side('K', &f->k, h->k_bits, h->k_vector, c))
        return false;
    if (h->k_rotation != f->k_rotation)
        kvq__complain(c, 0, "was made of keys with rotation %u; the format has %u", h->k_rotation,
                      f->k_rotation);
    else if (h->k_token_scale != f->k_token_scale)
        kvq__complain(c, 0, "was made of keys with token scale %u; the format has %u",
                      h->k_token_scale, f->k_token_scale);
    else if (f->k_channel != (factors ? KVQ_CHANNEL_BOOK : KVQ_CHANNEL_NONE))
        kvq__complain(c, 0, "was made of keys %s smoothing; the format is otherwise",
                      factors ? "with" : "without");
    else
        return true;
    return false;
}

static bool fits_v(const struct kvq_codebook_header *h, const struct kvq_format *f,
                   const struct kvq_shape *s, const struct kvq__complaint *c)
{
    uint8_t rotation = f->v_rotation;
    if (rotation == KVQ_ROTATE_NONE && s->v_rotation == KVQ_V_ROT_DAEMON)
        rotation = KVQ_ROTATE_HADAMARD;
    if (!fits_side('V', &f->v, h->v_bits, h->v_vector, c))
        return false;
    if (h->v_rotation == rotation)
        return true;
    kvq__complain(c, 0,
                  "was made of values with rotation %u; the session's have %u (v_rotation "
                  "none leaves them as they come)",
                  h->v_rotation, rotation);
    return false;
}

bool kvq_codebook_fits(const struct kvq_codebook *book, uint32_t layer, const struct kvq_format *f,
                       const struct kvq_shape *s, char *text, size_t n)
{
    const struct kvq_codebook_header *h = &book->head;
    const struct kvq__complaint c = {"codebook", text, n};
    if (!kvq_has_centroids(f))
        return true;
    if (layer >= h->layers) {
        kvq__complain(&c, 0, "has layers 0 to %u; there is no layer %u in it", h->layers - 1,
                      layer);
        return false;
    }
    const struct kvq_codebook_row *r = &book->rows[layer];
    if (r->kv_heads != s->kv_heads || r->dim != s->k_dim || r->dim != s->v_dim) {
        kvq__complain(&c, 0,
                      "layer %u has %u KV heads of %u channels in it; the session's has %u of %u",
                      layer, r->kv_heads, r->dim, s->kv_heads, s->k_dim);
        return false;
    }
    return (f->k.codec != KVQ_CODEC_BOOK || fits_k(h, f, &c)) &&
           (f->v.codec != KVQ_CODEC_BOOK || fits_v(h, f, s, &c));
}

// ---- A layer ----

void kvq_codebook_layer(const struct kvq_codebook *book, uint32_t layer, struct kvq_book *out)
{
    const struct kvq_codebook_header *h = &book->head;
    assert(layer < h->layers && book->rows[layer].kv_heads > 0);
    const struct kvq__codebook_place *at = &book->places[layer];
    assert(at->smooth <= book->n_values && at->k <= book->n_values && at->v <= book->n_values);
    bool heads = h->flags & KVQ_CODEBOOK_OWN_HEADS, subs = h->flags & KVQ_CODEBOOK_OWN_SUBS;
    size_t k = kvq__codebook_table(h, false), v = kvq__codebook_table(h, true);
    uint16_t dim = book->rows[layer].dim;
    *out = (struct kvq_book){
        .smooth = h->flags & KVQ_CODEBOOK_FACTORS ? book->values + at->smooth : NULL,
        .k = k ? book->values + at->k : NULL,
        .v = v ? book->values + at->v : NULL,
        .k_sub = subs ? k : 0,
        .v_sub = subs ? v : 0,
    };
    if (heads && k)
        out->k_head = subs ? k * (dim / h->k_vector) : k;
    if (heads && v)
        out->v_head = subs ? v * (dim / h->v_vector) : v;
}
