// SPDX-License-Identifier: Apache-2.0
//
// Sessions of a llama.cpp cache, one for each of its streams, and the steps over them. Short steps
// attend in this process (kvq_local_*), with K and V of all layers in buffers until the step's end;
// longer ones, of prompts, go through the daemon layer by layer.
#include "client/ggml/stream.h"

#include <assert.h>
#include <ggml.h>
#include <stdlib.h>
#include <string.h>

enum {
    NEAR_ROWS = 64,          // tokens of a step that attends in this process, at most
    FAR_ROWS = 32768,        // tokens of one session in a request to kvqd, at most
    ALIGNMENT = 64,          // of tensors in a buffer
    MINUS_INFINITY = 0xfc00, // in fp16: a masked cell
};

// What a step's tensors travel in: K and V of the kept layers by turns, Q, the output, and the
// numbers of the tokens.
struct desk {
    kvq_buffer *buffer;
    uint32_t rows, kept; // tokens; layers whose K and V have a place each
    uint64_t kv_bytes;   // of K, or of V
    uint64_t q_at, out_at, ids_at;
};

enum state { IDLE, GIVEN, UNDER_WAY };

struct kvq_ggml_cache {
    struct kvq_ggml_sessions all;
    struct kvq_ggml_stream streams[KVQ_GGML_STREAMS];
    struct desk near, far, *desk; // desk: the step's
    uint32_t remade;              // the daemon's, when the streams' sessions were opened

    // The step.
    enum state state;
    uint32_t next, n;                           // layer; streams in it
    uint32_t rows, each;                        // tokens; of each stream
    bool has_k, has_v;                          // of the next layer
    const void *mask, *mask_data;               // that was looked at
    uint64_t number;                            // the daemon's, of a long step
    struct kvq_entry entries[KVQ_GGML_STREAMS]; // .position: the tokens before it
    uint32_t which[KVQ_GGML_STREAMS];           // their streams

    struct kvq_ggml_layer layers[]; // all.n_layers
};

// What ggml keeps in an attention's op_params.
struct params {
    float scale, alibi, softcap;
};

static struct params params_of(const struct ggml_tensor *attention)
{
    struct params params;
    memcpy(&params, attention->op_params, sizeof params);
    return params;
}

struct kvq_layer kvq_ggml_shape(const struct ggml_tensor *attention)
{
    const struct ggml_tensor *q = attention->src[0], *k = attention->src[1], *v = attention->src[2];
    const struct params params = params_of(attention);
    return (struct kvq_layer){.q_heads = (uint16_t)q->ne[2],
                              .kv_heads = (uint16_t)k->ne[2],
                              .k_dim = (uint16_t)k->ne[0],
                              .v_dim = (uint16_t)v->ne[0],
                              .scale = params.scale,
                              .softcap = params.softcap};
}

const char *kvq_ggml_extra(const struct ggml_tensor *attention)
{
    return params_of(attention).alibi != 0 ? "ALiBi" : attention->src[4] ? "attention sinks" : NULL;
}

struct kvq_ggml_cache *kvq_ggml_cache_new(struct kvq_ggml_daemon *daemon,
                                          const struct kvq_ggml_layer *layers, uint32_t n)
{
    assert(n > 0 && n <= KVQ_GGML_LAYERS);
    struct kvq_ggml_cache *cache = calloc(1, sizeof *cache + n * sizeof *layers);
    if (cache) {
        memcpy(cache->layers, layers, n * sizeof *layers);
        kvq_ggml_sessions_init(&cache->all, daemon, cache->layers, n);
        cache->remade = daemon->remade;
    }
    return cache;
}

void kvq_ggml_cache_free(struct kvq_ggml_cache *cache)
{
    if (!cache)
        return;
    kvq_local_close(&cache->all.local);
    for (uint32_t i = 0; i < KVQ_GGML_STREAMS; i++)
        kvq_ggml_stream_close(&cache->all, &cache->streams[i]);
    kvq_buffer_close(&cache->near.buffer);
    kvq_buffer_close(&cache->far.buffer);
    free(cache);
}

int kvq_ggml_cache_find(const struct kvq_ggml_cache *cache, const struct ggml_tensor *tensor,
                        bool *is_v)
{
    const uint32_t n = cache->all.n_layers;
    for (uint32_t i = 0; i < n; i++) { // from the layer on that is expected
        const struct kvq_ggml_layer *layer = &cache->layers[(cache->next + i) % n];
        *is_v = layer->v == tensor;
        if (*is_v || layer->k == tensor)
            return (int)(layer - cache->layers);
    }
    return -1;
}

// ---- Buffers --------------------------------------------------------------------------------

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1);
}

// The largest heads * dim of K and of Q; layers of one model are alike but for few.
static uint64_t widest(const struct kvq_ggml_cache *cache, bool of_q)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < cache->all.n_layers; i++) {
        const struct kvq_layer *shape = &cache->layers[i].shape;
        const uint64_t own = (uint64_t)(of_q ? shape->q_heads : shape->kv_heads) * shape->k_dim;
        most = own > most ? own : most;
    }
    return most;
}

static char *desk_at(const struct kvq_ggml_cache *cache, uint64_t offset)
{
    assert(offset < kvq_buffer_size(cache->desk->buffer));
    return (char *)kvq_buffer_data(cache->desk->buffer) + offset;
}

// The desk of a step of so many tokens. A prompt's goes when decoding begins.
static bool take_desk(struct kvq_ggml_cache *cache, uint32_t rows)
{
    assert(rows > 0 && rows <= FAR_ROWS);
    const bool near = rows <= NEAR_ROWS;
    struct desk *desk = cache->desk = near ? &cache->near : &cache->far;
    if (near)
        kvq_buffer_close(&cache->far.buffer);
    if (desk->buffer && desk->rows >= rows)
        return true;
    kvq_buffer_close(&desk->buffer);
    desk->rows = near ? NEAR_ROWS : rows;
    desk->kept = near ? cache->all.n_layers : 1;
    const uint64_t q_bytes = aligned(desk->rows * widest(cache, true) * sizeof(float));
    desk->kv_bytes = aligned(desk->rows * widest(cache, false) * sizeof(float));
    desk->q_at = 2 * desk->kept * desk->kv_bytes;
    desk->out_at = desk->q_at + q_bytes;
    desk->ids_at = desk->out_at + q_bytes;
    const uint64_t bytes = desk->ids_at + desk->rows * sizeof(int32_t);
    const int code = kvq_buffer_create(cache->all.daemon->client, bytes, &desk->buffer);
    return !code || kvq_ggml_failed("no buffer for a step", code);
}

// Where K or V of a layer lies.
static uint64_t kv_offset(const struct desk *desk, uint32_t layer, bool is_v)
{
    assert(desk->kept > 0);
    return (2 * (layer % desk->kept) + is_v) * desk->kv_bytes;
}

// ---- Steps ----------------------------------------------------------------------------------

static bool is_near(const struct kvq_ggml_cache *cache)
{
    return cache->desk == &cache->near;
}

// Leaves the sessions as they were before the step; always false.
static bool give_up_step(struct kvq_ggml_cache *cache)
{
    if (cache->state == UNDER_WAY && is_near(cache)) {
        kvq_local_abort(cache->all.local);
    } else if (cache->state == UNDER_WAY) {
        const int code = kvq_step_abort(cache->all.daemon->queue, cache->number, NULL, 0);
        if (code && code != KVQ_E_DISCONNECTED) // the daemon gives up what a client had
            kvq_ggml_failed("a step stays open", code);
    }
    cache->state = IDLE;
    cache->next = 0;
    cache->has_k = cache->has_v = false;
    return false;
}

static bool refuse_step(struct kvq_ggml_cache *cache, const char *what, int code)
{
    kvq_ggml_failed(what, code);
    return give_up_step(cache);
}

// The code of a request, or the first one of its entries that is none of 0.
static int code_of(const struct kvq_ggml_cache *cache, int code)
{
    for (uint32_t i = 0; i < cache->n && code == 0; i++)
        code = cache->entries[i].status;
    return code;
}

// A sequence that begins at the first token needs nothing of what was before: if the connection is
// lost, it has one made anew. All sessions of the old one are gone.
static bool connect_anew(struct kvq_ggml_cache *cache)
{
    bool first = false, connected = true;
    for (uint32_t i = 0; i < cache->n; i++)
        first |= cache->entries[i].position == 0;
    if (first)
        connected = kvq_ggml_daemon_again(cache->all.daemon);
    if (cache->remade != cache->all.daemon->remade) {
        kvq_local_close(&cache->all.local);
        for (uint32_t i = 0; i < KVQ_GGML_STREAMS; i++)
            kvq_ggml_stream_forget(&cache->all, &cache->streams[i]);
        cache->remade = cache->all.daemon->remade;
    }
    return connected;
}

// Learns from the cells of a forward's tokens which streams it has, and where they go on.
static bool plan_step(struct kvq_ggml_cache *cache, const struct ggml_tensor *cells)
{
    const int64_t *cell = cells->data, rows = cells->ne[0], size = (int64_t)cache->all.cells;
    uint32_t n = 0;
    assert(cache->state == IDLE);
    if (rows > FAR_ROWS)
        return kvq_ggml_refuse("a step of %lld tokens is longer than %d; start with a smaller "
                               "--ubatch-size",
                               (long long)rows, FAR_ROWS);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t stream = cell[i] / size;
        if (n && stream == cache->which[n - 1]) {
            if (cell[i] != cell[i - 1] + 1)
                return kvq_ggml_refuse("llama.cpp scatters a sequence over its cells; start with "
                                       "one sequence (-np 1), or one stream for each (--no-kv-"
                                       "unified)");
            cache->entries[n - 1].append++;
            continue;
        }
        if (n == KVQ_GGML_STREAMS || stream < 0 || stream >= KVQ_GGML_STREAMS)
            return kvq_ggml_refuse("more than %d streams are not served", KVQ_GGML_STREAMS);
        cache->which[n] = (uint32_t)stream;
        cache->entries[n++] = (struct kvq_entry){.position = (uint64_t)(cell[i] % size),
                                                 .append = 1,
                                                 .row = (uint32_t)i,
                                                 .q_row = (uint32_t)i};
    }
    cache->n = n;
    cache->rows = (uint32_t)rows;
    cache->each = n ? (uint32_t)rows / n : 0;
    for (uint32_t i = 0; i < n; i++) {
        if (cache->entries[i].append != cache->each)
            return kvq_ggml_refuse("a step with %u tokens of one stream and %u of another",
                                   cache->entries[i].append, cache->each);
    }
    return n && connect_anew(cache) && take_desk(cache, cache->rows);
}

bool kvq_ggml_cache_rows(struct kvq_ggml_cache *cache, uint32_t layer, bool is_v,
                         const struct ggml_tensor *node)
{
    assert(layer < cache->all.n_layers);
    const struct ggml_tensor *rows = node->src[0], *cells = node->src[1];
    const struct kvq_layer *shape = &cache->layers[layer].shape;
    const size_t width = (size_t)shape->kv_heads * shape->k_dim * sizeof(float);
    if (layer == 0 && cache->state != IDLE &&
        (cache->state == UNDER_WAY || (is_v ? cache->has_v : cache->has_k)))
        give_up_step(cache); // llama.cpp has left the last forward
    if (layer == 0 && cache->state == IDLE) {
        if (!plan_step(cache, cells))
            return give_up_step(cache);
        cache->state = GIVEN;
    }
    if (cache->state == IDLE || layer != cache->next || (uint64_t)cells->ne[0] != cache->rows ||
        (size_t)rows->ne[0] * sizeof(float) != width || (uint64_t)rows->ne[1] != cache->rows) {
        kvq_ggml_refuse("rows of layer %d came where layer %d's were expected",
                        cache->layers[layer].number, cache->layers[cache->next].number);
        return give_up_step(cache);
    }
    char *to = desk_at(cache, kv_offset(cache->desk, layer, is_v));
    for (uint32_t i = 0; i < cache->rows; i++)
        memcpy(to + i * width, (const char *)rows->data + i * rows->nb[1], width);
    *(is_v ? &cache->has_v : &cache->has_k) = true;
    return true;
}

// Whether a token sees the cells up to its own and no others.
static bool is_causal(const uint16_t *row, int64_t cells, uint64_t seen)
{
    uint16_t others = 0;
    for (uint64_t i = 0; i < seen; i++)
        others |= row[i];
    for (uint64_t i = seen; i < (uint64_t)cells; i++)
        others |= row[i] ^ MINUS_INFINITY;
    return others == 0;
}

static bool check_mask(const struct kvq_ggml_cache *cache, const struct ggml_tensor *mask)
{
    for (uint32_t s = 0; s < cache->n; s++) {
        const char *rows = (const char *)mask->data + (mask->ne[3] > 1 ? s * mask->nb[3] : 0);
        for (uint32_t t = 0; t < cache->each; t++) {
            const uint64_t seen = cache->entries[s].position + t + 1;
            if (seen > (uint64_t)mask->ne[0] ||
                !is_causal((const void *)(rows + t * mask->nb[1]), mask->ne[0], seen))
                return kvq_ggml_refuse(
                    "a token does not see all tokens before it, and only these: sequences that "
                    "share cells (start with -np 1, or --no-kv-unified), a sliding window, or a "
                    "mask of another kind; these are not served");
        }
    }
    return true;
}

// Whether a layer's attention is that of the tokens that have K and V, over what they may see.
// Layers share a mask but for few models.
static bool check_attention(struct kvq_ggml_cache *cache, uint32_t layer,
                            const struct ggml_tensor *attention)
{
    const struct kvq_layer *planned = &cache->layers[layer].shape, now = kvq_ggml_shape(attention);
    const struct ggml_tensor *q = attention->src[0], *mask = attention->src[3];
    if (q->ne[1] != cache->each || q->ne[3] != cache->n)
        return kvq_ggml_refuse("layer %d asks for %lld tokens of %lld streams, where %u of %u were "
                               "expected",
                               cache->layers[layer].number, (long long)q->ne[1],
                               (long long)q->ne[3], cache->each, cache->n);
    if (now.q_heads != planned->q_heads || now.kv_heads != planned->kv_heads ||
        now.k_dim != planned->k_dim || now.v_dim != planned->v_dim || q->ne[0] != now.k_dim ||
        now.scale != planned->scale || now.softcap != planned->softcap || kvq_ggml_extra(attention))
        return kvq_ggml_refuse("layer %d attends with other heads, another scale, soft-cap or bias "
                               "than it was planned with",
                               cache->layers[layer].number);
    if (cache->next && mask == cache->mask && mask->data == cache->mask_data)
        return true;
    cache->mask = mask;
    cache->mask_data = mask->data;
    return check_mask(cache, mask);
}

static bool begin_step(struct kvq_ggml_cache *cache)
{
    assert(cache->state == GIVEN && cache->n > 0);
    const struct kvq_ids told = {cache->desk->buffer, cache->desk->ids_at};
    int32_t *ids = (void *)desk_at(cache, told.offset);
    for (uint32_t i = 0; i < cache->n; i++) {
        const uint32_t which = cache->which[i];
        struct kvq_ggml_stream *stream = &cache->streams[which];
        struct kvq_entry *entry = &cache->entries[i];
        if (!kvq_ggml_stream_go_to(&cache->all, stream, which, entry->position, entry->append))
            return false;
        kvq_ggml_stream_number(&cache->all, stream, entry->append, ids + entry->row);
        entry->session = stream->session;
        entry->queries = (uint16_t)entry->append;
    }
    const int code = is_near(cache) ? kvq_local_begin(cache->all.local, cache->entries, cache->n)
                                    : kvq_step_begin_ids(cache->all.daemon->queue, cache->entries,
                                                         cache->n, &told, &cache->number);
    if (code)
        return kvq_ggml_failed("no step", code);
    bool any = is_near(cache); // of the streams is in it; else the daemon has no such step
    for (uint32_t i = 0; i < cache->n; i++)
        any = any || cache->entries[i].status == 0;
    cache->state = any ? UNDER_WAY : GIVEN;
    const int worst = code_of(cache, code);
    return !worst || refuse_step(cache, "no step", worst);
}

// Ends the step behind its last layer.
static bool end_step(struct kvq_ggml_cache *cache)
{
    assert(cache->state == UNDER_WAY && cache->next == cache->all.n_layers);
    const struct kvq_step_work work = {.ids = {cache->desk->buffer, cache->desk->ids_at}};
    const int code =
        is_near(cache)
            ? kvq_local_end(cache->all.local, &work, cache->entries, cache->n)
            : kvq_step_end(cache->all.daemon->queue, cache->number, cache->entries, cache->n);
    for (uint32_t i = 0; i < cache->n; i++) {
        if (code == 0 && cache->entries[i].status == 0)
            kvq_ggml_stream_committed(&cache->all, &cache->streams[cache->which[i]],
                                      cache->which[i], cache->entries[i].value);
    }
    const int worst = code_of(cache, code);
    if (worst)
        return refuse_step(cache, "the step's tokens are not stored", worst);
    cache->state = IDLE;
    cache->next = 0;
    return true;
}

// Q [streams][heads][tokens][dim] by its strides into rows [tokens][heads][dim].
static void take_queries(const struct kvq_ggml_cache *cache, const struct ggml_tensor *q)
{
    const size_t head = (size_t)q->ne[0] * sizeof(float), heads = (size_t)q->ne[2];
    assert(cache->n * cache->each == cache->rows);
    char *to = desk_at(cache, cache->desk->q_at);
    for (uint32_t s = 0; s < cache->n; s++) {
        for (uint32_t t = 0; t < cache->each; t++) {
            const char *from = (const char *)q->data + s * q->nb[3] + t * q->nb[1];
            for (size_t h = 0; h < heads; h++, to += head)
                memcpy(to, from + h * q->nb[2], head);
        }
    }
}

bool kvq_ggml_cache_attend(struct kvq_ggml_cache *cache, uint32_t layer, struct ggml_tensor *node)
{
    assert(layer < cache->all.n_layers);
    const struct kvq_layer *shape = &cache->layers[layer].shape;
    if (layer != cache->next || !cache->has_k || !cache->has_v) {
        kvq_ggml_refuse("layer %d attends without new K and V", cache->layers[layer].number);
        return give_up_step(cache);
    }
    if (!check_attention(cache, layer, node) || (cache->state == GIVEN && !begin_step(cache)))
        return give_up_step(cache);
    take_queries(cache, node->src[0]);
    const kvq_buffer *buffer = cache->desk->buffer;
    const uint32_t dim = shape->k_dim;
    const struct kvq_work work = {
        .step = is_near(cache) ? 0 : cache->number,
        .layer = layer,
        .k = kvq_tensor_make(buffer, kv_offset(cache->desk, layer, false), shape->kv_heads, dim,
                             KVQ_DTYPE_F32),
        .v = kvq_tensor_make(buffer, kv_offset(cache->desk, layer, true), shape->kv_heads, dim,
                             KVQ_DTYPE_F32),
        .q = kvq_tensor_make(buffer, cache->desk->q_at, shape->q_heads, dim, KVQ_DTYPE_F32),
        .out = kvq_tensor_make(buffer, cache->desk->out_at, shape->q_heads, dim, KVQ_DTYPE_F32)};
    const int code = code_of(
        cache, is_near(cache)
                   ? kvq_local_attend(cache->all.local, &work, cache->entries, cache->n)
                   : kvq_append_attend(cache->all.daemon->queue, &work, cache->entries, cache->n));
    if (code)
        return refuse_step(cache, "attention failed", code);
    memcpy(node->data, desk_at(cache, cache->desk->out_at),
           (size_t)cache->rows * shape->q_heads * dim * sizeof(float));
    cache->has_k = cache->has_v = false;
    cache->next++;
    return cache->next < cache->all.n_layers || end_step(cache);
}

void kvq_ggml_cache_lose(struct kvq_ggml_cache *cache)
{
    give_up_step(cache);
    for (uint32_t i = 0; i < KVQ_GGML_STREAMS; i++) {
        if (cache->streams[i].session)
            cache->streams[i].stamp = KVQ_GGML_LOST;
    }
}
