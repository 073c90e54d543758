// SPDX-License-Identifier: Apache-2.0
//
// What the daemon tells of a session's layers: shapes, formats, and the codebooks behind them. The
// kernels take these for granted, so whatever makes no sense is refused here.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "proto/format.h"

// ---- Formats ----

static bool is_unit(uint32_t tokens)
{
    return tokens == 32 || tokens == 64 || tokens == 128;
}

static int keep_format(struct kvq__pool *pool, const struct kvq_format *f,
                       const struct kvq_format **out)
{
    struct kvq__row *row;
    LIST_FOREACH (row, &pool->rows, link)
        if (kvq_format_same(&row->format, f))
            break;
    if (!row) {
        row = calloc(1, sizeof *row);
        if (!row)
            return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
        row->format = *f;
        LIST_INSERT_HEAD(&pool->rows, row, link);
    }
    *out = &row->format;
    return KVQ_OK;
}

static int take_format(struct kvq__pool *pool, const Kvq__TableFormat *m,
                       const struct kvq_format **out)
{
    struct kvq_format f = {.name = "as the daemon has it", .source = ""};
    char why[KVQ__TEXT_BYTES / 2] = "a number is out of range";
    if (!kvq_format_of_message(m, &f) || !is_unit(f.unit_tokens) ||
        (!kvq_is_raw(&f) && kvq_format_check(&f, why, sizeof why)))
        return kvq__set_error(KVQ_E_VERSION,
                              "this library does not know a format of the daemon's: %s", why);
    return keep_format(pool, &f, out);
}

// ---- Layers ----

static int take_layer(struct kvq__pool *pool, const Kvq__TableLayer *m, uint32_t number,
                      struct kvq__local_layer *layer)
{
    struct kvq_narrow n = {false};
    char why[KVQ__TEXT_BYTES / 2] = "a number is out of range";
    int rc = take_format(pool, m->format, &layer->format);
    if (rc)
        return rc;
    layer->source = m->source_plus1 ? m->source_plus1 - 1 : number;
    layer->shape = (struct kvq_shape){
        .q_heads = kvq_narrow_short(&n, m->q_heads),
        .kv_heads = kvq_narrow_short(&n, m->kv_heads),
        .dtype = kvq_narrow_byte(&n, m->dtype, KVQ_BF16),
        .v_rotation = kvq_narrow_byte(&n, m->v_rotation, KVQ_V_ROT_DAEMON),
        .window = m->window,
        .softcap = m->softcap,
        .scale = m->scale,
    };
    uint16_t dim = kvq_narrow_short(&n, m->dim);
    kvq_shape_set_dims(&layer->shape, dim, dim);
    if (n.wrong || m->kv_heads > KVQ_MAX_HEADS || (pool->here.driver && layer->shape.head_dim) ||
        kvq_shape_check(&layer->shape, layer->format, why, sizeof why))
        return kvq__set_error(KVQ_E_PROTOCOL, "the daemon's layer %u makes no sense: %s", number,
                              why);
    return KVQ_OK;
}

static int take_layers(struct kvq__pool *pool, const Kvq__OpenTableReply *r,
                       struct kvq__local_session *s)
{
    uint32_t layer = 0;
    for (size_t i = 0; i < r->n_layers; i++) {
        if (r->layers[i]->repeat > s->n_layers - layer)
            return kvq__set_error(KVQ_E_PROTOCOL, "the daemon tells of more than %u layers",
                                  s->n_layers);
        for (uint32_t j = 0; j < r->layers[i]->repeat; j++, layer++) {
            assert(layer < s->n_layers);
            int rc = take_layer(pool, r->layers[i], layer, &s->layers[layer]);
            if (rc)
                return rc;
        }
    }
    if (layer < s->n_layers)
        return kvq__set_error(KVQ_E_PROTOCOL, "the daemon tells of %u layers, %u were asked for",
                              layer, s->n_layers);
    for (uint32_t i = 0; i < layer; i++)
        if (s->layers[i].source >= layer ||
            s->layers[s->layers[i].source].source != s->layers[i].source)
            return kvq__set_error(KVQ_E_PROTOCOL, "layer %u of the daemon's reads layer %u", i,
                                  s->layers[i].source);
    return KVQ_OK;
}

int kvq__reading_take(struct kvq__pool *pool, const Kvq__OpenTableReply *reply,
                      struct kvq__local_session *s)
{
    assert(!s->layers);
    s->layers = calloc(s->n_layers, sizeof *s->layers);
    if (!s->layers)
        return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
    if (reply->path > KVQ_PATH_FAST)
        return kvq__set_error(KVQ_E_VERSION, "the daemon computes by path %u, 0 and 1 are known",
                              reply->path);
    s->path = (uint8_t)reply->path;
    s->sharded = reply->shards > 1;
    return take_layers(pool, reply, s);
}

// ---- Codebooks ----

static struct kvq__book *find_book(struct kvq__pool *pool, uint64_t id)
{
    struct kvq__book *book;
    LIST_FOREACH (book, &pool->books, link)
        if (book->id == id)
            break;
    return book;
}

static int map_book(struct kvq__pool *pool, const Kvq__MapBookReply *r, int fd,
                    struct kvq__book **out)
{
    struct kvq__book *book = calloc(1, sizeof *book);
    size_t bytes = r->bytes;
    void *mapping = NULL;
    if (!book)
        return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
    int rc = r->bytes > 0 && r->bytes <= KVQ_MAX_CODEBOOK_BYTES
                 ? kvq__map(fd, bytes, PROT_READ, "a codebook", &mapping)
                 : kvq__set_error(KVQ_E_PROTOCOL, "the daemon's codebook has %llu bytes",
                                  (unsigned long long)r->bytes);
    if (rc) {
        free(book);
        return rc;
    }
    book->id = r->id;
    book->bytes = r->bytes;
    book->values = mapping;
    rc = pool->here.driver ? kvq__pool_gpu_book(pool, book) : KVQ_OK;
    if (rc) {
        munmap(mapping, bytes);
        free(book);
        return rc;
    }
    LIST_INSERT_HEAD(&pool->books, book, link);
    *out = book;
    return KVQ_OK;
}

// Floats from `at` on that the tables of one side take.
static bool fits_book(const struct kvq__book *book, uint64_t at, uint64_t most)
{
    uint64_t floats = book->bytes / sizeof(float);
    return at <= floats && most <= floats - at;
}

static const float *tables_of(const struct kvq__book *book)
{
    return book->there ? (const float *)(uintptr_t)book->there : book->values;
}

// One side's tables: [kv_heads][dim / vector] of them, 2^bits centroids of `vector` floats each.
static const float *take_side(const struct kvq__book *book, const struct kvq_side *side,
                              const struct kvq_shape *s, uint64_t at, uint64_t head, uint64_t sub)
{
    const uint64_t most = KVQ_MAX_CODEBOOK_BYTES;
    assert(side->codec == KVQ_CODEC_BOOK && side->vector > 0);
    if (head > most || sub > most || at > most)
        return NULL;
    uint64_t table = ((uint64_t)1 << side->bits) * side->vector;
    uint64_t subs = s->k_dim / side->vector;
    uint64_t end = (s->kv_heads - 1u) * head + (subs - 1) * sub + table;
    return fits_book(book, at, end) ? tables_of(book) + at : NULL;
}

static bool take_tables(const struct kvq__book *book, const Kvq__MapBookReply *r,
                        struct kvq__local_layer *layer)
{
    const struct kvq_format *f = layer->format;
    const struct kvq_shape *s = &layer->shape;
    struct kvq_book *b = &layer->book;
    bool whole = true;
    *b = (struct kvq_book){
        .k_head = r->k_head, .k_sub = r->k_sub, .v_head = r->v_head, .v_sub = r->v_sub};
    if (f->k_channel == KVQ_CHANNEL_BOOK) {
        whole = fits_book(book, r->smooth, (uint64_t)s->kv_heads * s->k_dim);
        b->smooth = whole ? tables_of(book) + r->smooth : NULL;
    }
    if (f->k.codec == KVQ_CODEC_BOOK)
        b->k = take_side(book, &f->k, s, r->k, r->k_head, r->k_sub);
    if (f->v.codec == KVQ_CODEC_BOOK)
        b->v = take_side(book, &f->v, s, r->v, r->v_head, r->v_sub);
    return whole && !b->k == (f->k.codec != KVQ_CODEC_BOOK) &&
           !b->v == (f->v.codec != KVQ_CODEC_BOOK);
}

// Whose codebook it is.
struct reader {
    struct kvq__pool *pool;
    struct kvq__local_layer *layer;
    uint32_t number;
};

static int take_book(void *to, struct kvq__call *call)
{
    const struct reader *reader = to;
    const Kvq__MapBookReply *r = call->reply->map_book;
    struct kvq__book *book = find_book(reader->pool, r->id);
    int rc = book ? KVQ_OK : map_book(reader->pool, r, call->fds[0], &book);
    if (rc)
        return rc;
    assert(book);
    return take_tables(book, r, reader->layer)
               ? KVQ_OK
               : kvq__set_error(KVQ_E_PROTOCOL, "the daemon's codebook of layer %u ends too early",
                                reader->number);
}

static int ask_book(kvq_client *client, struct kvq__pool *pool, uint64_t handle, uint32_t number,
                    struct kvq__local_layer *layer)
{
    struct reader reader = {pool, layer, number};
    Kvq__MapBook message = KVQ__MAP_BOOK__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = 1,
                             .want = KVQ__REPLY__RESULT_MAP_BOOK,
                             .what = "mapping a codebook",
                             .take = take_book,
                             .to = &reader};
    message.handle = handle;
    message.layer = number;
    call.request.command_case = KVQ__REQUEST__COMMAND_MAP_BOOK;
    call.request.map_book = &message;
    return kvq__ask(client, &call);
}

static bool needs_book(const struct kvq_format *f)
{
    return f->k_channel == KVQ_CHANNEL_BOOK || kvq_has_centroids(f);
}

int kvq__reading_books(kvq_client *client, struct kvq__pool *pool, struct kvq__local_session *s)
{
    int rc = KVQ_OK;
    for (uint32_t i = 0; i < s->n_layers && rc == KVQ_OK; i++)
        if (needs_book(s->layers[i].format))
            rc = ask_book(client, pool, s->handle, i, &s->layers[i]);
    return rc;
}
