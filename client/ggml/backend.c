// SPDX-License-Identifier: Apache-2.0
//
// kvq under an unmodified llama.cpp: a backend of ggml that is loaded by GGML_BACKEND_PATH. ggml
// offers each node over CPU memory to backends of the kind ACCEL before its own CPU backend; this
// one takes two kinds: the SET_ROWS that write llama.cpp's KV cache, and the FLASH_ATTN_EXT that
// read it. llama.cpp's own tensors then hold nothing.
//
// A SET_ROWS must be taken if, and only if, the attention that reads its rows is. ggml asks about
// every node of a graph before it computes it, and about several graphs before the first, so what
// it asked last is known when it asks about rows: the layouts below. Each is of one context: what
// the graphs of another one show says nothing of it.
#include "client/ggml/cache.h"
#include "kernels/kernels.h"
#include "proto/limits.h"

#include <assert.h>
#include <ggml-backend-impl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { CACHES = 8 }; // of a context

// What the graphs of a context showed of a cache, whose tensors all lie in one buffer.
struct layout {
    struct layout *next;
    const struct backend *context; // NULL: there was none
    const struct ggml_backend_buffer *buffer;
    void *base; // and size, of the buffer: another one may lie at its address later
    size_t size;
    int64_t cells;
    bool in_use;  // by a cache: all nodes that touch it are taken, and refused if they must be
    bool told;    // that layers are left to llama.cpp: one line on stderr is enough
    bool window;  // the layers have a sliding window, as far as the graphs showed it
    bool many;    // there are more layers than a session has: all are left
    bool settled; // .window stays: a graph was asked about in full
    uint32_t n;
    bool served[KVQ_GGML_LAYERS]; // the attention that was asked about last is one that kvqd serves
    bool read[KVQ_GGML_LAYERS];   // by something else than flash attention: never taken again
    struct kvq_ggml_layer layers[KVQ_GGML_LAYERS];
};

static pthread_mutex_t layouts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct layout *layouts;

// The backend of one llama_context.
struct backend {
    struct backend *next;
    pthread_t maker; // the thread that made the context
    struct kvq_ggml_daemon daemon;
    struct kvq_ggml_cache *caches[CACHES];
    const struct ggml_backend_buffer *buffers[CACHES];
    uint32_t n;
    bool told; // that its attention is no flash attention; under layouts_lock
};
static struct backend *contexts; // the newest first; under layouts_lock

// The context whose graph this thread asks about; NULL: not known, until one computes with the
// cache. ggml does not say it, but llama.cpp asks about a context's first graphs in the thread that
// makes the context, before that makes another one.
static struct backend *planning_context(void)
{
    struct backend *at = contexts;
    while (at && !pthread_equal(at->maker, pthread_self()))
        at = at->next;
    return at;
}

static const struct ggml_tensor *root(const struct ggml_tensor *tensor)
{
    return tensor && tensor->view_src ? tensor->view_src : tensor;
}

// Whether a tensor is K ('k') or V ('v') of a layer of llama.cpp's cache: "cache_k_l12".
static bool is_cache(const struct ggml_tensor *tensor, char kind, int *number)
{
    const char form[] = {'c', 'a', 'c', 'h', 'e', '_', kind, '_', 'l'};
    char *end;
    if (!tensor || !tensor->buffer || strncmp(tensor->name, form, sizeof form))
        return false;
    const long told = strtol(tensor->name + sizeof form, &end, 10);
    *number = (int)told;
    return end != tensor->name + sizeof form && *end == 0 && told >= 0 && told < INT32_MAX;
}

static struct layout *layout_of(const struct ggml_backend_buffer *buffer)
{
    struct layout *at = layouts;
    while (at && at->buffer != buffer)
        at = at->next;
    return at;
}

static void forget_layout(const struct ggml_backend_buffer *buffer)
{
    for (struct layout **at = &layouts; *at; at = &(*at)->next) {
        if ((*at)->buffer == buffer) {
            struct layout *gone = *at;
            *at = gone->next;
            free(gone);
            return;
        }
    }
}

// The place of a layer in its layout, in the order of llama.cpp's numbers; n if it is new.
static uint32_t index_in_layout(const struct layout *layout, int number)
{
    uint32_t i = 0;
    while (i < layout->n && layout->layers[i].number < number)
        i++;
    return i < layout->n && layout->layers[i].number == number ? i : layout->n;
}

// Whether a layer is of another cache than the one that was seen at its buffer's address.
static bool is_another(const struct layout *layout, const struct kvq_ggml_layer *layer)
{
    struct ggml_backend_buffer *buffer = layer->k->buffer;
    const uint32_t i = index_in_layout(layout, layer->number);
    return layout->cells != layer->k->ne[1] ||
           layout->base != ggml_backend_buffer_get_base(buffer) ||
           layout->size != ggml_backend_buffer_get_size(buffer) ||
           (i < layout->n && (layout->layers[i].k != layer->k || layout->layers[i].v != layer->v));
}

static struct layout *add_layout(const struct kvq_ggml_layer *layer)
{
    struct layout *layout = calloc(1, sizeof *layout);
    if (layout) {
        layout->context = planning_context();
        layout->buffer = layer->k->buffer;
        layout->base = ggml_backend_buffer_get_base(layer->k->buffer);
        layout->size = ggml_backend_buffer_get_size(layer->k->buffer);
        layout->cells = layer->k->ne[1];
        layout->next = layouts;
        layouts = layout;
    }
    return layout;
}

// Keeps what an attention says of its layer, whose place is *at then. NULL: there is no room.
static struct layout *keep_layer(const struct kvq_ggml_layer *layer, bool served, uint32_t *at)
{
    struct layout *layout = layout_of(layer->k->buffer);
    if (layout && is_another(layout, layer)) {
        forget_layout(layer->k->buffer);
        layout = NULL;
    }
    if (!layout)
        layout = add_layout(layer);
    if (!layout)
        return NULL;
    uint32_t i = index_in_layout(layout, layer->number);
    if (i == layout->n) {
        if (layout->n == KVQ_GGML_LAYERS) {
            if (!layout->many)
                kvq_ggml_refuse("a cache of more than %d layers is left to llama.cpp",
                                KVQ_GGML_LAYERS);
            layout->many = true;
            return NULL;
        }
        for (; i && layout->layers[i - 1].number > layer->number; i--) {
            layout->layers[i] = layout->layers[i - 1];
            layout->served[i] = layout->served[i - 1];
            layout->read[i] = layout->read[i - 1];
        }
        layout->read[i] = false;
        layout->settled = false;
        layout->n++;
    }
    assert(i < layout->n && layout->n <= KVQ_GGML_LAYERS);
    assert(i == 0 || layout->layers[i - 1].number < layer->number);
    layout->layers[i] = *layer;
    layout->served[i] = served;
    *at = i;
    return layout;
}

// NULL if an attention is one that kvqd serves, else what it has that kvqd does not serve.
static const char *unserved(const struct ggml_tensor *op, const struct kvq_ggml_layer *layer)
{
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    if (k->ne[0] > 256 || v->ne[0] != k->ne[0])
        return "heads of more than 256 dimensions, or of others in V than in K";
    if (layer->k->ne[0] != k->ne[0] * k->ne[2] || layer->v->ne[0] != layer->k->ne[0] ||
        q->ne[2] % k->ne[2] || q->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32)
        return "K, V or Q that are not laid out as kvq knows them";
    if (layer->k->ne[2] > KVQ_GGML_STREAMS)
        return "more than 64 sequences";
    if (q->ne[2] > KVQ_MAX_HEADS) // KV heads are as many at most
        return "more than 256 query heads";
    if (q->ne[2] / k->ne[2] > KVQ_MAX_GQA)
        return "more than 64 query heads for each KV head";
    if (!mask || mask->type != GGML_TYPE_F16)
        return "a mask of another kind";
    return kvq_ggml_extra(op);
}

// Whether layers have a sliding window, as far as the plan shows it: models with both kinds have
// two caches, with other layers in each, and fewer cells in that of the windows. llama.cpp keeps
// those: they are small, and a cell is no position there. Where both have as many, it keeps both.
static bool has_window(const struct layout *own)
{
    for (const struct layout *at = layouts; at; at = at->next) {
        if (at == own || at->context != own->context || at->cells < own->cells)
            continue;
        bool apart = true;
        for (uint32_t i = 0; apart && i < at->n; i++)
            apart = index_in_layout(own, at->layers[i].number) == own->n;
        if (apart)
            return true;
    }
    return false;
}

// Whether a layer's rows and its attention are taken.
static bool is_taken(const struct layout *layout, uint32_t i)
{
    assert(i < layout->n);
    return layout->served[i] && !layout->read[i] && !layout->window && !layout->many;
}

static bool takes_attention(const struct ggml_tensor *op)
{
    struct kvq_ggml_layer layer = {
        .k = root(op->src[1]), .v = root(op->src[2]), .shape = kvq_ggml_shape(op)};
    int number;
    uint32_t i;
    if (!is_cache(layer.k, 'k', &layer.number) || !is_cache(layer.v, 'v', &number) ||
        number != layer.number || layer.k->buffer != layer.v->buffer)
        return false;
    const char *why = unserved(op, &layer);
    struct layout *layout = keep_layer(&layer, !why, &i);
    if (!layout)
        return false;
    if (!layout->settled)
        layout->window = has_window(layout);
    else if (!why && layout->window)
        why = "a sliding window, or a cache as large as that of layers that have one";
    if (why && !layout->told) {
        layout->told = true;
        kvq_ggml_refuse("attention of layer %d, and of others like it, is left to llama.cpp; it "
                        "has %s",
                        layer.number, why);
    }
    return is_taken(layout, i);
}

// The layout that a cache's tensor is in, and its layer's place there; NULL: none.
static struct layout *find_layer(const struct ggml_tensor *tensor, uint32_t *i)
{
    int number;
    if (!is_cache(tensor, 'k', &number) && !is_cache(tensor, 'v', &number))
        return NULL;
    struct layout *layout = layout_of(tensor->buffer);
    *i = layout ? index_in_layout(layout, number) : 0;
    return layout && *i < layout->n ? layout : NULL;
}

// Whether a SET_ROWS is taken, as the attention behind it will be. Of a graph llama.cpp asks about
// the rows first. Where a layer's attention is known already, that was of an earlier graph, which
// was asked about in full: all caches of the context are known, and the answer is settled.
static bool takes_rows(const struct ggml_tensor *op)
{
    uint32_t i;
    struct layout *layout = find_layer(root(op), &i);
    if (!layout)
        return false;
    if (!layout->settled)
        layout->window = has_window(layout);
    layout->settled = true;
    return is_taken(layout, i) && op->src[0]->type == GGML_TYPE_F32 &&
           op->src[1]->type == GGML_TYPE_I64;
}

// Whether a node computes nothing; such nodes go to whichever backend ggml likes.
static bool is_view(const struct ggml_tensor *op)
{
    return op->op == GGML_OP_NONE || op->op == GGML_OP_RESHAPE || op->op == GGML_OP_VIEW ||
           op->op == GGML_OP_PERMUTE || op->op == GGML_OP_TRANSPOSE;
}

// Whether a node reads or writes a cache that kvqd has.
static bool touches_one_in_use(const struct ggml_tensor *op)
{
    uint32_t at;
    const struct layout *layout = find_layer(root(op), &at);
    bool touches = layout && layout->in_use;
    for (int i = 0; i < GGML_MAX_SRC && !touches; i++) {
        layout = find_layer(root(op->src[i]), &at);
        touches = layout && layout->in_use;
    }
    return touches;
}

// An attention of another kind reads the cache: its rows must be there. That nothing is kvq's then
// must not stay unsaid, once a context. V tells it: K is also read to turn its positions.
static void leave_cache(const struct ggml_tensor *op)
{
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        int number;
        uint32_t at;
        const struct ggml_tensor *source = root(op->src[i]);
        struct layout *layout = find_layer(source, &at);
        if (layout)
            layout->read[at] = true;
        struct backend *context = is_cache(source, 'v', &number) ? planning_context() : NULL;
        if (!context || context->told)
            continue;
        context->told = true;
        kvq_ggml_refuse("K and V of this context stay in llama.cpp's own cache, without kvq: flash "
                        "attention is off; set it (-fa on; llama-cpp-python: flash_attn=True)");
    }
}

static bool takes(const struct ggml_tensor *op)
{
    if (is_view(op) || touches_one_in_use(op))
        return true; // ggml's own backends would find nothing in a cache that kvqd has
    switch (op->op) {
    case GGML_OP_FLASH_ATTN_EXT:
        return takes_attention(op);
    case GGML_OP_SET_ROWS:
        return takes_rows(op);
    default:
        leave_cache(op);
        return false;
    }
}

static bool device_supports_op(ggml_backend_dev_t device, const struct ggml_tensor *op)
{
    (void)device;
    pthread_mutex_lock(&layouts_lock);
    const bool yes = takes(op);
    pthread_mutex_unlock(&layouts_lock);
    return yes;
}

// Whoever gave llama.cpp's cache other types than its usual one hears what holds for them.
static void tell_types(const struct layout *layout)
{
    struct kvq_ggml_asked asked;
    const enum ggml_type k = layout->layers[0].k->type, v = layout->layers[0].v->type;
    if ((k != GGML_TYPE_F16 || v != GGML_TYPE_F16) && kvq_ggml_ask(&asked))
        kvq_ggml_refuse("llama.cpp's cache types (-ctk %s, -ctv %s; type_k, type_v) have no "
                        "effect: kvqd holds K and V in %s, which KVQ_LLAMA_FORMAT says",
                        ggml_type_name(k), ggml_type_name(v), asked.format);
}

// A cache of what the graphs showed of this buffer; NULL: refused.
static struct kvq_ggml_cache *make_cache(struct backend *backend,
                                         const struct ggml_backend_buffer *buffer)
{
    struct kvq_ggml_cache *cache = NULL;
    if (backend->n == CACHES) {
        kvq_ggml_refuse("a context with more than %d caches is not served", CACHES);
        return NULL;
    }
    pthread_mutex_lock(&layouts_lock);
    struct layout *layout = layout_of(buffer);
    bool all = layout != NULL;
    for (uint32_t i = 0; all && i < layout->n; i++)
        all = is_taken(layout, i);
    if (all)
        cache = kvq_ggml_cache_new(&backend->daemon, layout->layers, layout->n);
    if (cache) {
        layout->context = layout->in_use ? layout->context : backend;
        layout->in_use = true;
        tell_types(layout);
    }
    pthread_mutex_unlock(&layouts_lock);
    if (!all)
        kvq_ggml_refuse("some layers of this model's cache are not served; unset "
                        "GGML_BACKEND_PATH");
    else if (!cache)
        kvq_ggml_refuse("no memory for a cache");
    else {
        backend->buffers[backend->n] = buffer;
        backend->caches[backend->n++] = cache;
    }
    return cache;
}

// The cache and the layer of a tensor; NULL: refused.
static struct kvq_ggml_cache *find_cache(struct backend *backend, const struct ggml_tensor *tensor,
                                         uint32_t *layer, bool *is_v)
{
    uint32_t i = 0;
    assert(backend->n <= CACHES);
    while (i < backend->n && backend->buffers[i] != tensor->buffer)
        i++;
    struct kvq_ggml_cache *cache =
        i < backend->n ? backend->caches[i] : make_cache(backend, tensor->buffer);
    const int at = cache ? kvq_ggml_cache_find(cache, tensor, is_v) : -1;
    if (cache && at < 0)
        kvq_ggml_refuse("%s is in no cache that llama.cpp planned with", tensor->name);
    *layer = (uint32_t)at;
    return at < 0 ? NULL : cache;
}

// llama.cpp has made something else of a cache than kvqd knows, and may go on over it.
static void lose_caches(struct backend *backend, const struct ggml_tensor *node)
{
    for (uint32_t i = 0; i < backend->n; i++) {
        bool touches = root(node)->buffer == backend->buffers[i];
        for (int j = 0; j < GGML_MAX_SRC; j++)
            touches |= node->src[j] && root(node->src[j])->buffer == backend->buffers[i];
        if (touches)
            kvq_ggml_cache_lose(backend->caches[i]);
    }
}

static bool compute_node(struct backend *backend, struct ggml_tensor *node)
{
    uint32_t layer;
    bool is_v;
    struct kvq_ggml_cache *cache;
    switch (node->op) {
    case GGML_OP_SET_ROWS:
        cache = find_cache(backend, root(node), &layer, &is_v);
        return cache && kvq_ggml_cache_rows(cache, layer, is_v, node);
    case GGML_OP_FLASH_ATTN_EXT:
        cache = find_cache(backend, root(node->src[1]), &layer, &is_v);
        return cache && kvq_ggml_cache_attend(cache, layer, node);
    default:
        if (is_view(node))
            return true;
        lose_caches(backend, node);
        return kvq_ggml_refuse("llama.cpp changes or reads K and V that kvqd has (%s), as for a "
                               "context shift; start without it, with a context (-c) that is long "
                               "enough",
                               ggml_op_name(node->op));
    }
}

static enum ggml_status backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph *graph)
{
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n; i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        if (node->flags & GGML_TENSOR_FLAG_COMPUTE && !compute_node(backend->context, node))
            return GGML_STATUS_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

static const char *backend_name(ggml_backend_t backend)
{
    (void)backend;
    return "kvq";
}

// Forgets a context that goes, and its caches, also those that it never computed with. Without any
// context, no layout is of a cache that is still there.
static void forget_context(const struct backend *own)
{
    struct backend **place = &contexts;
    while (*place && *place != own)
        place = &(*place)->next;
    assert(*place == own);
    *place = own->next;
    for (struct layout **at = &layouts; *at;) {
        struct layout *layout = *at;
        if (layout->context == own || !contexts) {
            *at = layout->next;
            free(layout);
        } else {
            at = &layout->next;
        }
    }
}

static void backend_free(ggml_backend_t backend)
{
    struct backend *own = backend->context;
    for (uint32_t i = 0; i < own->n; i++)
        kvq_ggml_cache_free(own->caches[i]);
    pthread_mutex_lock(&layouts_lock);
    forget_context(own);
    pthread_mutex_unlock(&layouts_lock);
    kvq_ggml_daemon_close(&own->daemon);
    free(own);
    free(backend);
}

static void backend_set_threads(ggml_backend_t backend, int threads)
{
    struct backend *own = backend->context;
    own->daemon.threads = threads;
}

static const char *device_name(ggml_backend_dev_t device)
{
    (void)device;
    return "kvq";
}

static const char *device_description(ggml_backend_dev_t device)
{
    (void)device;
    return "KV caches in kvqd";
}

static void device_memory(ggml_backend_dev_t device, size_t *unused, size_t *total)
{
    (void)device;
    *unused = *total = 0;
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t device)
{
    (void)device;
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void device_props(ggml_backend_dev_t device, struct ggml_backend_dev_props *props)
{
    memset(props, 0, sizeof *props);
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device)
{
    (void)device;
    return ggml_backend_cpu_buffer_type();
}

static bool device_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type)
{
    (void)device;
    return ggml_backend_buft_is_host(type);
}

// NULL, and a line on stderr, where no daemon is, or the environment asks for what there is not:
// llama.cpp then makes no context.
static ggml_backend_t device_init(ggml_backend_dev_t device, const char *params)
{
    (void)params;
    static uint8_t guid[16] = "kvq for ggml";
    ggml_backend_t backend = calloc(1, sizeof *backend);
    struct backend *own = calloc(1, sizeof *own);
    if (!backend || !own) {
        kvq_ggml_refuse("no memory for a backend");
        goto fail;
    }
    if (!kvq_ggml_daemon_open(&own->daemon))
        goto fail;
    pthread_mutex_lock(&layouts_lock);
    own->maker = pthread_self();
    own->next = contexts;
    contexts = own;
    pthread_mutex_unlock(&layouts_lock);
    backend->guid = &guid;
    backend->iface.get_name = backend_name;
    backend->iface.free = backend_free;
    backend->iface.graph_compute = backend_graph_compute;
    backend->device = device;
    backend->context = own;
    return backend;
fail:
    free(own);
    free(backend);
    return NULL;
}

static const char *reg_name(ggml_backend_reg_t reg)
{
    (void)reg;
    return "kvq";
}

static size_t reg_device_count(ggml_backend_reg_t reg)
{
    (void)reg;
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index)
{
    (void)index;
    static struct ggml_backend_device device = {.iface = {.get_name = device_name,
                                                          .get_description = device_description,
                                                          .get_memory = device_memory,
                                                          .get_type = device_type,
                                                          .get_props = device_props,
                                                          .init_backend = device_init,
                                                          .get_buffer_type = device_buffer_type,
                                                          .supports_op = device_supports_op,
                                                          .supports_buft = device_supports_buft}};
    device.reg = reg;
    return &device;
}

static void *reg_function(ggml_backend_reg_t reg, const char *name)
{
    (void)reg;
    return strcmp(name, "ggml_backend_set_n_threads") ? NULL : (void *)backend_set_threads;
}

// What ggml looks for in a library that it loads.
EXPORT ggml_backend_reg_t ggml_backend_init(void);
EXPORT ggml_backend_reg_t ggml_backend_init(void)
{
    static struct ggml_backend_reg reg = {.api_version = GGML_BACKEND_API_VERSION,
                                          .iface = {.get_name = reg_name,
                                                    .get_device_count = reg_device_count,
                                                    .get_device = reg_device,
                                                    .get_proc_address = reg_function}};
    if (strcmp(ggml_op_name(GGML_OP_SET_ROWS), "SET_ROWS") ||
        strcmp(ggml_op_name(GGML_OP_FLASH_ATTN_EXT), "FLASH_ATTN_EXT")) {
        kvq_ggml_refuse("this llama.cpp is another version than libkvq-ggml.so was built for; "
                        "build it against this one's sources");
        return NULL;
    }
    return &reg;
}
