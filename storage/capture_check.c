// SPDX-License-Identifier: Apache-2.0
//
// A capture file's first reading: header, rows and every chunk with its check.
#define XXH_INLINE_ALL
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "proto/status.h"
#include "storage/capture_internal.h"

enum { PIECE = 1 << 16 };

int kvq__read_at(int fd, uint64_t at, void *data, uint64_t n, const struct kvq__complaint *c)
{
    uint8_t *to = data;
    while (n > 0) {
        ssize_t got = pread(fd, to, n, (off_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return kvq__complain(c, KVQ_E_SYSTEM, "cannot read: %s", strerror(errno));
        if (got == 0)
            return kvq__complain(c, KVQ_E_INVALID, "ends at byte %llu, in the middle of something",
                                 (unsigned long long)at);
        to += got;
        at += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return KVQ_OK;
}

// ---- Header and rows ----

static int check_row(const struct kvq_capture_row *r, uint32_t layer,
                     const struct kvq__complaint *c)
{
    if (r->q_heads == 0 && r->kv_heads == 0 && r->k_dim == 0 && r->v_dim == 0)
        return KVQ_OK; // it reads another layer's cache
    if (r->kv_heads == 0 || r->kv_heads > KVQ_MAX_HEADS || r->q_heads > KVQ_MAX_HEADS ||
        r->q_heads == 0 || r->q_heads % r->kv_heads)
        return kvq__complain(c, KVQ_E_INVALID,
                             "layer %u has %u query heads and %u KV heads; 1 to %d are possible, a "
                             "whole number of query heads for each KV head",
                             layer, r->q_heads, r->kv_heads, KVQ_MAX_HEADS);
    if (r->k_dim == 0 || r->k_dim > KVQ_MAX_CAPTURE_DIM || r->v_dim == 0 ||
        r->v_dim > KVQ_MAX_CAPTURE_DIM)
        return kvq__complain(c, KVQ_E_LIMIT, "layer %u has head_dim %u and %u; 1 to %d are allowed",
                             layer, r->k_dim, r->v_dim, KVQ_MAX_CAPTURE_DIM);
    return KVQ_OK;
}

static int check_capture_header(const struct kvq_capture_file *f,
                                const struct kvq_capture_header *h, const struct kvq__complaint *c)
{
    if (memcmp(h->magic, KVQ_CAPTURE_MAGIC, sizeof h->magic) != 0)
        return kvq__complain(c, KVQ_E_INVALID,
                             "is no capture file: it does not begin with " KVQ_CAPTURE_MAGIC);
    if (h->layers == 0 || h->layers > KVQ_MAX_LAYERS)
        return kvq__complain(c, KVQ_E_LIMIT, "has %u layers; 1 to %d are allowed", h->layers,
                             KVQ_MAX_LAYERS);
    if (h->flags & ~(uint32_t)KVQ_CAPTURE_HAS_QUERIES)
        return kvq__complain(c, KVQ_E_INVALID, "has flags %#x; 1 (queries) is known", h->flags);
    if (!memchr(h->model, 0, sizeof h->model))
        return kvq__complain(c, KVQ_E_INVALID, "has a model name without an end");
    if (h->chunks > KVQ_MAX_CAPTURE_CHUNKS)
        return kvq__complain(c, KVQ_E_LIMIT, "has %llu chunks; at most %d are allowed",
                             (unsigned long long)h->chunks, KVQ_MAX_CAPTURE_CHUNKS);
    if (h->chunks && h->bytes != f->bytes)
        return kvq__complain(c, KVQ_E_INVALID, "is %llu bytes long; its header says %llu",
                             (unsigned long long)f->bytes, (unsigned long long)h->bytes);
    return KVQ_OK;
}

int kvq__capture_header(struct kvq_capture_file *f, struct kvq_capture_header *h,
                        const struct kvq__complaint *c)
{
    int rc = kvq__read_at(f->fd, 0, h, sizeof *h, c);
    if (rc == KVQ_OK)
        rc = check_capture_header(f, h, c);
    if (rc == KVQ_OK)
        rc = kvq__read_at(f->fd, sizeof *h, f->rows, h->layers * sizeof f->rows[0], c);
    if (rc)
        return rc;
    XXH3_state_t state;
    struct kvq_capture_header plain = *h;
    plain.check = 0;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, &plain, sizeof plain);
    XXH3_64bits_update(&state, f->rows, h->layers * sizeof f->rows[0]);
    if (XXH3_64bits_digest(&state) != h->check)
        return kvq__complain(c, KVQ_E_INVALID, "is damaged: its header's check is wrong");
    for (uint32_t i = 0; i < h->layers && rc == KVQ_OK; i++)
        rc = check_row(&f->rows[i], i, c);
    f->info.layers = h->layers;
    f->info.has_queries = h->flags & KVQ_CAPTURE_HAS_QUERIES;
    f->info.closed = h->chunks > 0;
    memcpy(f->info.model, h->model, sizeof h->model);
    return rc;
}

// ---- Chunks ----

static int check_chunk(const struct kvq_capture_file *f, const struct kvq_capture_chunk *k,
                       uint64_t at, const struct kvq__complaint *c)
{
    unsigned long long where = at;
    if (k->layer >= f->info.layers || f->rows[k->layer].kv_heads == 0)
        return kvq__complain(c, KVQ_E_INVALID,
                             "chunk at %llu is of layer %u, which has no keys of its own", where,
                             k->layer);
    if (k->sequence >= KVQ_MAX_CAPTURE_SEQUENCES)
        return kvq__complain(c, KVQ_E_LIMIT,
                             "chunk at %llu is of sequence %u; at most %d are "
                             "allowed",
                             where, k->sequence, KVQ_MAX_CAPTURE_SEQUENCES);
    if (k->tokens == 0 || k->tokens > KVQ_MAX_STEP_TOKENS || k->position > KVQ_MAX_SESSION_TOKENS)
        return kvq__complain(c, KVQ_E_LIMIT,
                             "chunk at %llu has %u tokens from position %llu; 1 to "
                             "%d up to position %d are allowed",
                             where, k->tokens, (unsigned long long)k->position, KVQ_MAX_STEP_TOKENS,
                             KVQ_MAX_SESSION_TOKENS);
    if (!kvq_capture_element(k->k_dtype) || !kvq_capture_element(k->v_dtype) ||
        !kvq_capture_element(k->q_dtype) != !f->info.has_queries)
        return kvq__complain(c, KVQ_E_DTYPE, "chunk at %llu has dtypes %u, %u, %u of K, V, Q",
                             where, k->k_dtype, k->v_dtype, k->q_dtype);
    if (k->bytes != kvq_capture_data_bytes(&f->rows[k->layer], k))
        return kvq__complain(c, KVQ_E_INVALID, "chunk at %llu has %llu bytes; its shape needs %llu",
                             where, (unsigned long long)k->bytes,
                             (unsigned long long)kvq_capture_data_bytes(&f->rows[k->layer], k));
    return KVQ_OK;
}

static int check_data(const struct kvq_capture_file *f, const struct kvq_capture_chunk *k,
                      uint64_t at, uint8_t *piece, const struct kvq__complaint *c)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (uint64_t done = 0; done < k->bytes;) {
        uint64_t some = k->bytes - done < PIECE ? k->bytes - done : PIECE;
        int rc = kvq__read_at(f->fd, at + done, piece, some, c);
        if (rc)
            return rc;
        XXH3_64bits_update(&state, piece, some);
        done += some;
    }
    if (XXH3_64bits_digest(&state) != k->data_check)
        return kvq__complain(c, KVQ_E_INVALID,
                             "is damaged: the check of the data at byte %llu is "
                             "wrong",
                             (unsigned long long)at);
    return KVQ_OK;
}

static int keep_chunk(struct kvq_capture_file *f, const struct kvq_capture_chunk *k, uint64_t data,
                      const struct kvq__complaint *c)
{
    assert(data + k->bytes <= f->bytes);
    if (f->n_chunks == KVQ_MAX_CAPTURE_CHUNKS)
        return kvq__complain(c, KVQ_E_LIMIT, "has more than %d chunks", KVQ_MAX_CAPTURE_CHUNKS);
    if (f->n_chunks == f->room) {
        uint32_t room = f->room ? 2 * f->room : 256;
        struct kvq__chunk_at *more = realloc(f->chunks, room * sizeof *more);
        if (!more)
            return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory for a list of %u chunks", room);
        f->chunks = more;
        f->room = room;
    }
    f->chunks[f->n_chunks++] =
        (struct kvq__chunk_at){.data = data,
                               .position = k->position,
                               .sequence = k->sequence,
                               .tokens = k->tokens,
                               .layer = k->layer,
                               .dtype = {k->k_dtype, k->v_dtype, k->q_dtype}};
    return KVQ_OK;
}

// One chunk at `at`; *next is where the one behind it starts, or `at` if a file that was not
// closed ends here.
static int read_capture_chunk(struct kvq_capture_file *f, uint64_t at, uint8_t *piece,
                              uint64_t *next, const struct kvq__complaint *c)
{
    struct kvq_capture_chunk k;
    *next = at;
    if (!f->info.closed && f->bytes - at < sizeof k)
        return KVQ_OK;
    int rc = kvq__read_at(f->fd, at, &k, sizeof k, c);
    if (rc)
        return rc;
    if (k.magic != KVQ_CAPTURE_CHUNK_MAGIC ||
        XXH3_64bits(&k, offsetof(struct kvq_capture_chunk, check)) != k.check)
        return f->info.closed
                   ? kvq__complain(c, KVQ_E_INVALID, "is damaged: no whole chunk at byte %llu",
                                   (unsigned long long)at)
                   : KVQ_OK;
    rc = check_chunk(f, &k, at, c);
    if (rc)
        return rc;
    uint64_t end =
        at + sizeof k + (k.bytes + KVQ_CAPTURE_ALIGN - 1) / KVQ_CAPTURE_ALIGN * KVQ_CAPTURE_ALIGN;
    assert(end > at);
    if (end > f->bytes)
        return f->info.closed ? kvq__complain(c, KVQ_E_INVALID,
                                              "chunk at %llu reaches behind the "
                                              "end",
                                              (unsigned long long)at)
                              : KVQ_OK;
    rc = check_data(f, &k, at + sizeof k, piece, c);
    if (rc == KVQ_OK)
        rc = keep_chunk(f, &k, at + sizeof k, c);
    *next = end;
    return rc;
}

int kvq__capture_chunks(struct kvq_capture_file *f, const struct kvq_capture_header *h,
                        const struct kvq__complaint *c)
{
    uint8_t *piece = malloc(PIECE);
    assert(f->n_chunks == 0 && h->layers == f->info.layers);
    int rc = piece ? KVQ_OK : kvq__complain(c, KVQ_E_NO_MEMORY, "no memory to read it with");
    uint64_t at = kvq_capture_first_chunk(h->layers), next = at;
    while (rc == KVQ_OK && at < f->bytes) {
        rc = read_capture_chunk(f, at, piece, &next, c);
        if (next == at)
            break;
        at = next;
    }
    free(piece);
    if (rc)
        return rc;
    f->info.torn_bytes = f->bytes > at ? f->bytes - at : 0;
    if (f->info.closed && f->n_chunks != h->chunks)
        return kvq__complain(c, KVQ_E_INVALID, "has %u chunks; its header says %llu", f->n_chunks,
                             (unsigned long long)h->chunks);
    return KVQ_OK;
}
