// SPDX-License-Identifier: Apache-2.0
//
// Capture files (layout: proto/capture.h): writes K, V and Q of what an engine appends.
#define XXH_INLINE_ALL
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "proto/capture.h"

// A session as it is being captured: the step it is in, and where that stands in the file.
struct track {
    kvq_session session;
    uint64_t position; // of the step
    uint32_t append;   // tokens of the step
    uint32_t take;     // of these, how many are captured
    uint32_t sequence;
    uint8_t seen[KVQ_MAX_LAYERS]; // layers that had their part of the step
};

struct kvq_capture {
    int fd, failed;
    bool queries;
    uint32_t sequences, n_tracks;
    uint64_t max_tokens, tokens, chunks, end;
    uint8_t *data; // one chunk with its header
    size_t room;
    struct kvq_capture_header header;
    struct kvq_capture_row rows[KVQ_MAX_LAYERS];
    struct track *tracks; // KVQ_MAX_CAPTURE_SESSIONS of them, taken as needed
};

// ---- Writing ----

static int write_at(kvq_capture *c, uint64_t at, const void *data, size_t n)
{
    assert(c->fd >= 0);
    const uint8_t *from = data;
    while (n > 0) {
        ssize_t put = pwrite(c->fd, from, n, (off_t)at);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return c->failed = kvq__set_error_errno("cannot write the capture file at byte %llu",
                                                    (unsigned long long)at);
        from += put;
        at += (uint64_t)put;
        n -= (size_t)put;
    }
    return KVQ_OK;
}

static int write_head(kvq_capture *c)
{
    assert(c->header.layers > 0 && c->header.layers <= KVQ_MAX_LAYERS);
    XXH3_state_t state;
    size_t rows = c->header.layers * sizeof c->rows[0];
    c->header.check = 0;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, &c->header, sizeof c->header);
    XXH3_64bits_update(&state, c->rows, rows);
    c->header.check = XXH3_64bits_digest(&state);
    int rc = write_at(c, 0, &c->header, sizeof c->header);
    return rc ? rc : write_at(c, sizeof c->header, c->rows, rows);
}

// ---- Opening ----

static int put_row(kvq_capture *c, const struct kvq_layer *l)
{
    assert(c->header.layers < KVQ_MAX_LAYERS);
    uint32_t layer = c->header.layers++;
    if (l->kv_from > KVQ_MAX_LAYERS)
        return kvq__set_error(
            KVQ_E_SHAPE,
            "capturing layer %u: kv_from is %u; 0 is a cache of its own, 1 to %d are "
            "layers 0 to %d",
            layer, l->kv_from, KVQ_MAX_LAYERS, KVQ_MAX_LAYERS - 1);
    if (l->kv_from && l->kv_from - 1 != layer)
        return KVQ_OK; // all 0: it has no keys of its own
    if (l->kv_heads == 0 || l->q_heads == 0 || l->q_heads % l->kv_heads ||
        l->q_heads > KVQ_MAX_HEADS || l->k_dim == 0 || l->k_dim > KVQ_MAX_CAPTURE_DIM ||
        l->v_dim == 0 || l->v_dim > KVQ_MAX_CAPTURE_DIM)
        return kvq__set_error(
            KVQ_E_SHAPE,
            "capturing layer %u: %u query heads, %u KV heads, head_dim %u and %u; at "
            "most %d heads and head_dim %d can be, and none may be 0",
            layer, l->q_heads, l->kv_heads, l->k_dim, l->v_dim, KVQ_MAX_HEADS, KVQ_MAX_CAPTURE_DIM);
    c->rows[layer] = (struct kvq_capture_row){l->q_heads, l->kv_heads, l->k_dim, l->v_dim};
    return KVQ_OK;
}

static int put_rows(kvq_capture *c, const struct kvq_capture_options *o)
{
    for (uint32_t i = 0; i < o->n_layers; i++) {
        uint32_t repeat = o->layers[i].repeat ? o->layers[i].repeat : 1;
        if (repeat > KVQ_MAX_LAYERS - c->header.layers)
            return kvq__set_error(KVQ_E_LIMIT, "capturing more than %d layers", KVQ_MAX_LAYERS);
        for (uint32_t r = 0; r < repeat; r++) {
            int rc = put_row(c, &o->layers[i]);
            if (rc)
                return rc;
        }
    }
    return c->header.layers ? KVQ_OK : kvq__set_error(KVQ_E_INVALID, "capturing 0 layers");
}

static int fill_header(kvq_capture *c, const struct kvq_capture_options *o)
{
    size_t length = o->model ? strlen(o->model) : 0;
    if (length >= sizeof c->header.model || (o->model && !kvq_text_valid(o->model, length)))
        return kvq__set_error(
            KVQ_E_INVALID, "the capture's model name has %zu bytes; up to %zu of UTF-8 are allowed",
            length, sizeof c->header.model - 1);
    memcpy(c->header.magic, KVQ_CAPTURE_MAGIC, sizeof c->header.magic);
    if (o->model)
        memcpy(c->header.model, o->model, length);
    c->header.flags = o->queries ? KVQ_CAPTURE_HAS_QUERIES : 0;
    c->queries = o->queries;
    c->max_tokens = o->max_tokens ? o->max_tokens : UINT64_MAX;
    return put_rows(c, o);
}

static int take_capture_options(struct kvq_capture_options *to,
                                const struct kvq_capture_options *from)
{
    int rc = KVQ__SIZED_TAKE(to, from, "kvq_capture_options");
    if (rc == KVQ_OK && to->n_layers && !to->layers)
        rc = kvq__set_error(KVQ_E_INVALID, "a capture of %u rows of layers at NULL", to->n_layers);
    return rc;
}

int kvq_capture_open(const char *path, const struct kvq_capture_options *options,
                     kvq_capture **capture)
{
    if (!path || !capture || !options)
        return kvq__set_error(KVQ_E_INVALID, "a capture needs a path, options, and a place for its "
                                             "pointer");
    *capture = NULL;
    struct kvq_capture_options o;
    int rc = take_capture_options(&o, options);
    if (rc)
        return rc;
    kvq_capture *c = calloc(1, sizeof *c);
    if (!c)
        return kvq__set_error_errno("no memory for a capture");
    c->fd = -1;
    rc = fill_header(c, &o);
    if (rc)
        goto error;
    c->tracks = calloc(KVQ_MAX_CAPTURE_SESSIONS, sizeof *c->tracks);
    c->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    rc = !c->tracks || c->fd < 0 ? kvq__set_error_errno("cannot make %s", path) : write_head(c);
    if (rc)
        goto error;
    c->end = kvq_capture_first_chunk(c->header.layers);
    *capture = c;
    return KVQ_OK;
error:
    if (c->fd >= 0)
        close(c->fd);
    free(c->tracks);
    free(c);
    return rc;
}

// ---- Steps and sequences ----

static struct track *find_track(kvq_capture *c, kvq_session session)
{
    for (uint32_t i = 0; i < c->n_tracks; i++)
        if (c->tracks[i].session == session)
            return &c->tracks[i];
    return NULL;
}

static struct track *new_track(kvq_capture *c, kvq_session session)
{
    uint32_t i = c->n_tracks < KVQ_MAX_CAPTURE_SESSIONS ? c->n_tracks++
                                                        : c->sequences % KVQ_MAX_CAPTURE_SESSIONS;
    c->tracks[i] = (struct track){.session = session};
    return &c->tracks[i];
}

// Which step of which sequence an entry's layer belongs to. NULL: nothing of it is captured.
static struct track *track_step(kvq_capture *c, const struct kvq_entry *e, uint32_t layer)
{
    struct track *t = find_track(c, e->session);
    bool same = t && e->position == t->position && e->append == t->append && !t->seen[layer];
    if (!same) {
        bool next = t && t->take == t->append && e->position == t->position + t->append;
        if (c->tokens >= c->max_tokens || (!next && c->sequences == KVQ_MAX_CAPTURE_SEQUENCES))
            return NULL;
        t = t ? t : new_track(c, e->session);
        t->sequence = next ? t->sequence : c->sequences++;
        t->position = e->position;
        t->append = e->append;
        uint64_t left = c->max_tokens - c->tokens;
        t->take = e->append < left ? e->append : (uint32_t)left;
        c->tokens += t->take;
        assert(c->tokens <= c->max_tokens);
        memset(t->seen, 0, sizeof t->seen);
    }
    t->seen[layer] = 1;
    return t;
}

// ---- One tensor of one entry ----

struct source {
    const struct kvq_tensor *tensor;
    const char *name;
    uint32_t heads, dim;
    uint32_t row;                  // of the entry's first token
    const struct kvq_pages *pages; // NULL or page_tokens 0: not paged
    uint64_t page_stride;
    uint32_t list_row, list_token;
};

static int copy_from_buffer(const kvq_buffer *b, uint64_t offset, void *to, uint64_t n,
                            const char *name)
{
    if (offset > b->bytes || n > b->bytes - offset)
        return kvq__set_error(KVQ_E_BOUNDS,
                              "capturing %s: %llu bytes at %llu reach behind the buffer's %zu",
                              name, (unsigned long long)n, (unsigned long long)offset, b->bytes);
    if (b->kind != KVQ__BUFFER_HOST)
        return kvq__gpu_buffer_read(b, offset, to, n);
    assert(b->host);
    memcpy(to, b->host + offset, n);
    return KVQ_OK;
}

// Offset of a token's row of head 0.
static int token_offset(const struct source *s, uint32_t t, uint64_t *offset)
{
    const struct kvq_pages *p = s->pages;
    if (!p || !p->page_tokens) {
        *offset = s->tensor->offset + ((uint64_t)s->row + t) * s->tensor->token_stride;
        return KVQ_OK;
    }
    int32_t page = 0;
    uint64_t i = (uint64_t)s->list_token + t;
    int rc = copy_from_buffer(p->list, p->list_offset + 4 * (s->list_row + i / p->page_tokens),
                              &page, sizeof page, "the list of pages");
    if (rc == KVQ_OK && page < 0)
        rc = kvq__set_error(KVQ_E_BOUNDS, "capturing %s: page %d", s->name, page);
    *offset = s->tensor->offset + (uint64_t)page * s->page_stride +
              i % p->page_tokens * s->tensor->token_stride;
    return rc;
}

// Writes [heads][tokens][dim] to `to`.
static int gather_rows(const struct source *s, uint32_t tokens, uint8_t *to)
{
    uint64_t row = s->dim * kvq_capture_element(s->tensor->dtype);
    for (uint32_t t = 0; t < tokens; t++) {
        uint64_t at;
        int rc = token_offset(s, t, &at);
        for (uint32_t h = 0; h < s->heads && rc == KVQ_OK; h++)
            rc = copy_from_buffer(s->tensor->buffer, at + h * s->tensor->head_stride,
                                  to + ((uint64_t)h * tokens + t) * row, row, s->name);
        if (rc)
            return rc;
    }
    return KVQ_OK;
}

// ---- Chunks ----

static int make_room(kvq_capture *c, size_t bytes)
{
    if (bytes <= c->room)
        return KVQ_OK;
    uint8_t *more = realloc(c->data, bytes);
    if (!more)
        return kvq__set_error_errno("no memory for %zu bytes of a capture", bytes);
    c->data = more;
    c->room = bytes;
    return KVQ_OK;
}

// A chunk whose data stands behind the room for its header.
static int write_chunk(kvq_capture *c, struct kvq_capture_chunk *k)
{
    uint64_t whole = (k->bytes + KVQ_CAPTURE_ALIGN - 1) / KVQ_CAPTURE_ALIGN * KVQ_CAPTURE_ALIGN;
    assert(sizeof *k + whole <= c->room);
    memset(c->data + sizeof *k + k->bytes, 0, whole - k->bytes);
    k->data_check = XXH3_64bits(c->data + sizeof *k, k->bytes);
    k->check = XXH3_64bits(k, offsetof(struct kvq_capture_chunk, check));
    memcpy(c->data, k, sizeof *k);
    int rc = write_at(c, c->end, c->data, sizeof *k + whole);
    if (rc)
        return rc;
    c->end += sizeof *k + whole;
    c->chunks++;
    return KVQ_OK;
}

static int append_entry(kvq_capture *c, const struct kvq_work *w, const struct kvq_entry *e)
{
    const struct kvq_capture_row *r = &c->rows[w->layer];
    const struct track *t = track_step(c, e, w->layer);
    if (!t || t->take == 0 || c->chunks == KVQ_MAX_CAPTURE_CHUNKS)
        return KVQ_OK;
    struct kvq_capture_chunk k = {.magic = KVQ_CAPTURE_CHUNK_MAGIC,
                                  .layer = (uint16_t)w->layer,
                                  .k_dtype = w->k.dtype,
                                  .v_dtype = w->v.dtype,
                                  .q_dtype = c->queries ? w->q.dtype : 0,
                                  .sequence = t->sequence,
                                  .tokens = t->take,
                                  .position = t->position};
    k.bytes = kvq_capture_data_bytes(r, &k);
    int rc = make_room(c, sizeof k + k.bytes + KVQ_CAPTURE_ALIGN);
    const struct source sources[] = {
        {&w->k, "k", r->kv_heads, r->k_dim, e->row, &w->pages, w->pages.k_page_stride, e->row,
         e->list_token},
        {&w->v, "v", r->kv_heads, r->v_dim, e->row, &w->pages, w->pages.v_page_stride, e->row,
         e->list_token},
        {&w->q, "q", r->q_heads, r->k_dim, e->q_row, NULL, 0, 0, 0},
    };
    uint8_t *to = c->data + sizeof k;
    for (int i = 0; i < (c->queries ? 3 : 2) && rc == KVQ_OK; i++) {
        rc = gather_rows(&sources[i], t->take, to);
        to += (uint64_t)sources[i].heads * t->take * sources[i].dim *
              kvq_capture_element(sources[i].tensor->dtype);
    }
    assert(rc || to == c->data + sizeof k + k.bytes);
    rc = rc ? rc : write_chunk(c, &k);
    c->failed = rc; // of a step that was begun, a layer without its chunk is a gap
    return rc;
}

static int check_captured(const struct kvq_tensor *t, const char *name)
{
    if (!t->buffer)
        return kvq__set_error(KVQ_E_BUFFER, "capturing needs %s, but its buffer is NULL", name);
    if (!kvq_capture_element(t->dtype))
        return kvq__set_error(KVQ_E_DTYPE, "capturing %s: dtype %u is unknown", name, t->dtype);
    return KVQ_OK;
}

static int check_queries(const struct kvq_entry *entries, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (entries[i].status == KVQ_OK && entries[i].append &&
            entries[i].queries != entries[i].append)
            return kvq__set_error(KVQ_E_INVALID, "capturing %u query tokens for %u tokens",
                                  entries[i].queries, entries[i].append);
    return KVQ_OK;
}

static int check_append(const kvq_capture *c, const struct kvq_work *w,
                        const struct kvq_entry *entries, uint32_t n)
{
    if (!c || !w || (n && !entries))
        return kvq__set_error(KVQ_E_INVALID, "capturing needs a capture, work and entries");
    if (c->failed)
        return kvq__set_error(c->failed,
                              "the capture failed before: nothing more is written to it");
    if (w->layer >= c->header.layers || c->rows[w->layer].kv_heads == 0)
        return kvq__set_error(KVQ_E_SHAPE, "capturing layer %u: it has no keys of its own",
                              w->layer);
    if (w->pages.page_tokens && !w->pages.list)
        return kvq__set_error(KVQ_E_BUFFER, "capturing pages needs a list, but its buffer is NULL");
    int rc = check_captured(&w->k, "k");
    if (rc == KVQ_OK)
        rc = check_captured(&w->v, "v");
    if (rc == KVQ_OK && c->queries)
        rc = check_captured(&w->q, "q");
    return rc || !c->queries ? rc : check_queries(entries, n);
}

int kvq_capture_append(kvq_capture *capture, const struct kvq_work *work,
                       const struct kvq_entry *entries, uint32_t n)
{
    int rc = check_append(capture, work, entries, n);
    for (uint32_t i = 0; i < n && rc == KVQ_OK; i++)
        if (entries[i].status == KVQ_OK && entries[i].append > 0)
            rc = append_entry(capture, work, &entries[i]);
    return rc;
}

// ---- Closing ----

uint64_t kvq_capture_tokens(const kvq_capture *capture)
{
    return capture ? capture->tokens : 0;
}

int kvq_capture_close(kvq_capture **capture)
{
    kvq_capture *c = capture ? *capture : NULL;
    if (!c)
        return KVQ_OK;
    *capture = NULL;
    assert(c->fd >= 0 && c->end >= kvq_capture_first_chunk(c->header.layers));
    int rc = c->failed;
    // Behind the last whole chunk may stand a part of one that found no room.
    if (ftruncate(c->fd, (off_t)c->end) < 0 && rc == KVQ_OK)
        rc = kvq__set_error_errno("cannot set the length of the capture file");
    if (rc == KVQ_OK) {
        c->header.chunks = c->chunks;
        c->header.bytes = c->chunks ? c->end : 0;
        c->header.tokens = c->tokens;
        rc = write_head(c);
    }
    if (close(c->fd) < 0 && rc == KVQ_OK)
        rc = kvq__set_error_errno("cannot close the capture file");
    free(c->data);
    free(c->tracks);
    free(c);
    return rc;
}
