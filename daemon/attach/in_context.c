// SPDX-License-Identifier: Apache-2.0
//
// Commands of clients that attend in their own context: what they map, and their page tables.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/attach/attach.h"
#include "daemon/attach/internal.h"
#include "daemon/store/codebooks.h"
#include "kernels/cuda/bundle.h"
#include "kernels/layout.h"
#include "proto/format.h"

// ---- Kernels that clients launch ----

static void make_bundle(struct kvq__shm *shm, const struct kvq_gpu *kernels)
{
    char text[KVQ_TEXT_BYTES];
    size_t bytes = kvq_gpu_bundle_bytes(kvq_gpu_images(), kernels->image_capability);
    assert(shm->fd < 0);
    if (bytes && kvq__shm_create(shm, "kvq-kernels", bytes, true, text) == 0)
        kvq_gpu_bundle_write(kvq_gpu_images(), kernels->image_capability, shm->map);
}

void kvq__bundles_open(struct kvq__attach *a)
{
    for (uint32_t i = 0; i < KVQ_MAX_GPUS; i++)
        a->bundles[i].fd = -1;
    for (uint32_t i = 0; i < kvq__gpus_count(a->server->gpus); i++)
        make_bundle(&a->bundles[i], kvq__gpu_kernels(kvq__gpus_get(a->server->gpus, i)));
}

void kvq__bundles_close(struct kvq__attach *a)
{
    for (uint32_t i = 0; i < KVQ_MAX_GPUS; i++)
        kvq__shm_close(&a->bundles[i]);
}

// ---- Loop's thread ----

int kvq__open_pool_prepare(struct kvq__connection *c, char *text)
{
    const Kvq__OpenPool *open = c->request->open_pool;
    Kvq__OpenPoolReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    kvq__open_pool_reply__init(reply);
    int error = kvq__attach_agree(open->tables_min, open->tables_max, KVQ_TABLE_VERSION_MIN,
                                  KVQ_TABLE_VERSION_MAX, "page tables", &reply->tables, text);
    reply->layout = KVQ_LAYOUT_ID;
    reply->tells_again = true;
    c->reply.open_pool = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_OPEN_POOL;
    return error;
}

static int check_table(const Kvq__OpenTable *open, char *text)
{
    if (open->layers < 1 || open->layers > KVQ_MAX_LAYERS || open->tokens < 1 ||
        open->tokens > KVQ_MAX_SESSION_TOKENS) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "a page table for %u layers and %llu tokens; there can be 1 to %d and 1 to %d",
                 open->layers, (unsigned long long)open->tokens, KVQ_MAX_LAYERS,
                 KVQ_MAX_SESSION_TOKENS);
        return KVQ_E_LIMIT;
    }
    return 0;
}

static uint32_t pages_of(const Kvq__OpenTable *open)
{
    return (uint32_t)((open->tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS);
}

static struct kvq_table_page head_of(const Kvq__OpenTable *open)
{
    assert(open->layers >= 1 && open->layers <= KVQ_MAX_LAYERS);
    return (struct kvq_table_page){
        .magic = KVQ_SHM_MAGIC_TABLE,
        .version = KVQ_TABLE_VERSION_MAX,
        .layers = open->layers,
        .pages = pages_of(open),
        .layer_bytes = kvq_table_layer_bytes(pages_of(open)),
    };
}

int kvq__open_table_prepare(struct kvq__connection *c, char *text)
{
    assert(!c->table);
    const Kvq__OpenTable *open = c->request->open_table;
    Kvq__OpenTableReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    int error = check_table(open, text);
    if (error)
        return error;
    uint64_t bytes = kvq_table_bytes(open->layers, pages_of(open));
    c->table = open->gpu.len ? kvq__region_new_on(c, bytes, &open->gpu, &error, text)
                             : kvq__region_new_table(c, bytes, &error, text);
    if (!c->table)
        return error;
    kvq__region_count(c->table);
    if (open->gpu.len && open->copy)
        error = kvq__region_add_copy(c->table, bytes, text);
    if (error) {
        kvq__open_table_undo(c);
        return error;
    }
    if (c->table->host.shm.map)
        *(struct kvq_table_page *)c->table->host.shm.map = head_of(open);
    kvq__open_table_reply__init(reply);
    reply->bytes = bytes;
    c->reply.open_table = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_OPEN_TABLE;
    return 0;
}

int kvq__map_extents_prepare(struct kvq__connection *c, char *text)
{
    Kvq__MapExtentsReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    kvq__map_extents_reply__init(reply);
    reply->numbers = kvq_arena_alloc(&c->arena, KVQ_MAX_PACKET_FDS * sizeof *reply->numbers);
    c->reply.map_extents = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_MAP_EXTENTS;
    return reply->numbers ? 0 : kvq__attach_no_room(text);
}

int kvq__map_book_prepare(struct kvq__connection *c, char *text)
{
    Kvq__MapBookReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    kvq__map_book_reply__init(reply);
    c->reply.map_book = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_MAP_BOOK;
    return 0;
}

void kvq__open_pool_put(struct kvq__connection *c)
{
    const struct kvq__gpus *gpus = c->server->gpus;
    for (uint32_t i = 0; i < kvq__gpus_count(gpus); i++) {
        const char *place = kvq__gpu_uuid_text(kvq__gpus_get(gpus, i));
        const struct kvq__shm *bundle = &c->attach->bundles[i];
        if (strcmp(place, c->request->open_pool->place) != 0 || bundle->fd < 0)
            continue;
        c->reply.open_pool->kernels_bytes = bundle->bytes;
        c->fds[0] = bundle->fd;
        c->n_fds = 1;
    }
}

void kvq__open_table_put(struct kvq__connection *c)
{
    assert(c->n_fds == 0 && c->table);
    c->reply.open_table->allocation_bytes = c->table->piece.bytes;
    if (c->table->gpu)
        c->fds[c->n_fds++] = c->table->fd;
    if (c->table->host.shm.fd >= 0)
        c->fds[c->n_fds++] = c->table->host.shm.fd;
}

bool kvq__open_table_is_slow(const struct kvq__connection *c)
{
    return c->table->gpu != NULL;
}

// ---- A thread of libuv's ----

void kvq__open_table_make(struct kvq__connection *c)
{
    struct kvq_table_page head = head_of(c->request->open_table);
    assert(c->table->gpu);
    const struct kvq_gpu_driver *driver = kvq__gpu_driver(c->table->gpu);
    kvq__region_make(c->table);
    if (c->error)
        return;
    int result = driver->copy_in(c->table->at, &head, sizeof head, NULL);
    result = result ? result : driver->stream_sync(NULL);
    if (result == KVQ_GPU_OK)
        return;
    kvq_gpu_fault(driver, result, "writing a page table", c->text, sizeof c->text);
    c->error = KVQ_E_SYSTEM;
}

// ---- Loop's thread ----

// The reply has its descriptor by now, or nobody wants it.
void kvq__map_book_sent(struct kvq__connection *c)
{
    assert(c->book);
    kvq__codebooks_release(c->server->codebooks, c->book);
    c->book = NULL;
}

void kvq__open_table_sent(struct kvq__connection *c)
{
    kvq__region_close_fd(c->table);
    c->table = NULL;
}

void kvq__open_table_undo(struct kvq__connection *c)
{
    assert(c->table);
    kvq__region_give_back(c->table);
    c->table = NULL;
}

uint64_t kvq__open_table_made(const struct kvq__connection *c)
{
    return c->request->open_table->handle;
}

// ---- Poller's thread ----

static int describe_kernels(struct kvq__connection *c, const struct kvq__gpu *gpu, char *text)
{
    char *kernels = kvq_arena_alloc(&c->arena, KVQ_GPU_KERNELS_TEXT);
    if (!kernels)
        return kvq__attach_no_room(text);
    if (!kvq__gpu_exports(gpu)) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "memory of %s cannot be handed to other processes as file descriptors",
                 kvq__gpu_uuid_text(gpu));
        return KVQ_E_UNSUPPORTED;
    }
    kvq_gpu_kernels_text(kernels);
    c->reply.open_pool->kernels = kernels;
    return 0;
}

int kvq__open_pool_run(struct kvq__connection *c, char *text)
{
    struct kvq__pool_span span;
    int error = kvq__pool_span(c->server->core, c->request->open_pool->place, &span, text);
    if (error)
        return error;
    if (span.gpu && (error = describe_kernels(c, span.gpu, text)))
        return error;
    c->reply.open_pool->span = span.span;
    c->reply.open_pool->extent_bytes = span.unit;
    return 0;
}

static Kvq__TableLayer *table_layer_of(struct kvq_arena *arena,
                                       const struct kvq__layer_reading *from, uint32_t number)
{
    Kvq__TableLayer *layer = kvq_arena_alloc(arena, sizeof *layer);
    if (!layer)
        return NULL;
    kvq__table_layer__init(layer);
    layer->repeat = 1;
    layer->source_plus1 = from->source == number ? 0 : from->source + 1;
    layer->q_heads = from->shape.q_heads;
    layer->kv_heads = from->shape.kv_heads;
    layer->dim = kvq_row_dim(&from->shape);
    layer->dtype = from->shape.dtype;
    layer->v_rotation = from->shape.v_rotation;
    layer->window = from->shape.window;
    layer->softcap = from->shape.softcap;
    layer->scale = from->shape.scale;
    layer->format = kvq_format_message(arena, &from->format);
    return layer->format ? layer : NULL;
}

// Rows of layers that are read alike.
static bool is_alike(const struct kvq__layer_reading *a, uint32_t i,
                     const struct kvq__layer_reading *b, uint32_t j)
{
    return kvq_format_same(&a->format, &b->format) && kvq_shape_same(&a->shape, &b->shape) &&
           a->source == i && b->source == j;
}

static int put_layers(struct kvq__connection *c, const struct kvq__layer_reading *layers,
                      uint32_t n, char *text)
{
    Kvq__OpenTableReply *reply = c->reply.open_table;
    assert(n >= 1 && n <= KVQ_MAX_LAYERS);
    reply->layers = kvq_arena_alloc(&c->arena, n * sizeof *reply->layers);
    if (!reply->layers)
        return kvq__attach_no_room(text);
    for (uint32_t i = 0; i < n; i++) {
        if (i && is_alike(&layers[i - 1], i - 1, &layers[i], i)) {
            reply->layers[reply->n_layers - 1]->repeat++;
            continue;
        }
        Kvq__TableLayer *layer = table_layer_of(&c->arena, &layers[i], i);
        if (!layer)
            return kvq__attach_no_room(text);
        reply->layers[reply->n_layers++] = layer;
    }
    return 0;
}

static int describe_table(struct kvq__connection *c, uint64_t handle, char *text)
{
    uint8_t path = 0;
    struct kvq__layer_reading *layers = kvq_arena_alloc(&c->arena, KVQ_MAX_LAYERS * sizeof *layers);
    if (!layers)
        return kvq__attach_no_room(text);
    uint32_t shards = 0;
    int n = kvq__session_reading(c->client, handle, layers, &path, &shards, text);
    c->reply.open_table->path = path;
    c->reply.open_table->shards = shards;
    return n < 0 ? n : put_layers(c, layers, (uint32_t)n, text);
}

// A client asks again and again while its session is being moved.
int kvq__open_table_look(struct kvq__connection *c, char *text)
{
    return kvq__table_ask(c->client, c->request->open_table->handle, text);
}

int kvq__open_table_run(struct kvq__connection *c, char *text)
{
    const Kvq__OpenTable *open = c->request->open_table;
    assert(c->table->bytes == kvq_table_bytes(open->layers, pages_of(open)));
    struct kvq__table_memory memory = {.host = c->table->gpu ? NULL : c->table->host.shm.map,
                                       .on = c->table->gpu,
                                       .gpu = c->table->gpu ? c->table->at : 0,
                                       .copy = c->table->gpu ? c->table->host.shm.map : NULL,
                                       .layers = open->layers,
                                       .pages = pages_of(open)};
    int error = describe_table(c, open->handle, text);
    error = error ? error : kvq__table_open(c->client, open->handle, open->pool_at, &memory, text);
    if (error == 0)
        LIST_INSERT_HEAD(&c->tables, c->table, link);
    return error;
}

int kvq__map_extents_run(struct kvq__connection *c, char *text)
{
    struct kvq__extent_export extents[KVQ_MAX_PACKET_FDS];
    Kvq__MapExtentsReply *reply = c->reply.map_extents;
    bool more;
    int n = kvq__extents_tell(c->client, c->request->map_extents->handle, extents,
                              KVQ_MAX_PACKET_FDS, &reply->known, &more, text);
    if (n < 0)
        return n;
    // The pool's own: an extent that was told of stays as long as the client.
    assert(n <= KVQ_MAX_PACKET_FDS);
    for (int i = 0; i < n; i++) {
        reply->numbers[i] = extents[i].number;
        c->fds[i] = extents[i].memory->fd;
    }
    reply->n_numbers = c->n_fds = (uint32_t)n;
    reply->more = more;
    return 0;
}

uint64_t kvq__map_extents_made(const struct kvq__connection *c)
{
    return c->request->id;
}

// Poller's thread, for a cancel: nobody heard what was told.
int kvq__map_extents_unsay(struct kvq__connection *c, char *text)
{
    (void)text;
    kvq__extents_untell(c->client);
    return 0;
}

// Where a table of floats stands behind `values`; 0 for none, which nobody looks at.
static uint64_t offset_of_table(const float *table, const float *values)
{
    assert(!table || table >= values);
    return table ? (uint64_t)(table - values) : 0;
}

int kvq__map_book_run(struct kvq__connection *c, char *text)
{
    const Kvq__MapBook *map = c->request->map_book;
    Kvq__MapBookReply *reply = c->reply.map_book;
    struct kvq_book book;
    const float *values;
    size_t n;
    assert(!c->book);
    int error = kvq__session_book(c->client, map->handle, map->layer, &book, &c->book, text);
    if (error)
        return error;
    c->fds[0] = kvq__codebooks_memory(c->book, &values, &n, &reply->id);
    c->n_fds = 1;
    reply->bytes = n * sizeof *values;
    reply->smooth = offset_of_table(book.smooth, values);
    reply->k = offset_of_table(book.k, values);
    reply->v = offset_of_table(book.v, values);
    reply->k_head = book.k_head;
    reply->k_sub = book.k_sub;
    reply->v_head = book.v_head;
    reply->v_sub = book.v_sub;
    return 0;
}

int kvq__close_table_run(struct kvq__connection *c, char *text)
{
    return kvq__table_close(c->client, c->request->close_table->handle, text);
}

static void table_gone_on_loop(struct kvq__mail *mail)
{
    kvq__region_give_back((struct kvq__region *)mail); // its first member
}

void kvq__attach_table_gone(struct kvq__attach *attach, uint64_t client,
                            const struct kvq__table_memory *memory)
{
    struct kvq__connection *c;
    struct kvq__region *table = NULL;
    LIST_FOREACH (c, &attach->clients, client_link)
        if (c->client_id == client)
            break;
    if (c)
        LIST_FOREACH (table, &c->tables, link)
            if (memory->host ? table->host.shm.map == memory->host : table->at == memory->gpu)
                break;
    assert(table);
    LIST_REMOVE(table, link);
    kvq__mailbox_post(&c->server->box, &table->mail, table_gone_on_loop);
    if (c->detaching)
        kvq__connection_check_gone(c);
}
