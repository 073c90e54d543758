// SPDX-License-Identifier: Apache-2.0
//
// Buckets: device memory for the attentions of a step, as large as any within its limits needs.
// Each layer has a place of its own for its batch, so that launches are the same in every step.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// Two pieces are copied as one if no more lies between them: by PCIe's bandwidth that takes about
// as long as another copy's call. Not measured on a GPU.
enum { SLOTS = 3, ALIGN = 256, COPY_GAP = 64 << 10 };

// ---- How large ----

static struct kvq_gpu_layer gpu_layer(const struct kvq_bucket *b, const struct kvq__local_layer *l)
{
    return (struct kvq_gpu_layer){
        l->format, &l->shape, &l->book,
        kvq_gpu_attend_wide_rows(&b->local->pool->kernels, l->shape.k_dim), 0};
}

// Whether what one session needs, times all, is more than 32 bits number: items, counters, and the
// partial rows that tiles begin at.
static bool exceeds_words(const struct kvq_bucket *b, const struct kvq_gpu_attend_limits *one)
{
    const uint64_t each[] = {one->tiles, one->narrow_items, one->wide_items, one->counters,
                             one->partial_rows};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        if (each[i] > UINT32_MAX / b->max_sessions)
            return true;
    return false;
}

// What sessions of the bucket can need: of any number of tokens and queries.
static int count_layer(const struct kvq_bucket *b, const struct kvq__local_layer *l,
                       struct kvq_gpu_attend_limits *limits)
{
    struct kvq_shape shape = l->shape;
    assert(shape.kv_heads > 0 && shape.q_heads >= shape.kv_heads);
    struct kvq_gpu_layer layer = gpu_layer(b, l);
    layer.shape = &shape;
    struct kvq_gpu_attend_limits most;
    char text[256];
    shape.window = 0; // sees most
    if (kvq_gpu_attend_bound(&layer, b->max_tokens, b->max_queries, &most, text, sizeof text))
        return kvq__set_error(KVQ_E_LIMIT, "%s", text);
    *limits = (struct kvq_gpu_attend_limits){.sessions = b->max_sessions,
                                             .tiles = most.tiles * b->max_sessions,
                                             .narrow_items = most.narrow_items * b->max_sessions,
                                             .wide_items = most.wide_items * b->max_sessions,
                                             .narrow_rows = most.narrow_rows,
                                             .counters = most.counters * b->max_sessions,
                                             .partial_rows = most.partial_rows * b->max_sessions};
    if (exceeds_words(b, &most))
        return kvq__set_error(KVQ_E_LIMIT,
                              "kvq_bucket_open: %u sessions of %llu tokens and %u queries can be "
                              "cut into more items than kernels number; make it for fewer",
                              b->max_sessions, (unsigned long long)b->max_tokens, b->max_queries);
    // So that two sessions of one query each can share blocks in a captured launch, too.
    uint32_t two = 2u * l->shape.q_heads / l->shape.kv_heads;
    if (b->max_sessions > 1 && two <= kvq_gpu_attend_stack_rows(&layer) && two > most.narrow_rows)
        limits->narrow_rows = kvq_gpu_attend_stack_rows(&layer);
    return KVQ_OK;
}

// Layers have one workspace in turns, and so the same number of counters.
static size_t count_workspace(struct kvq_bucket *b)
{
    size_t most = 0;
    uint32_t counters = 0;
    for (uint32_t i = 0; i < b->n_layers; i++)
        counters = b->limits[i].counters > counters ? b->limits[i].counters : counters;
    assert(counters > 0);
    for (uint32_t i = 0; i < b->n_layers; i++) {
        const struct kvq_gpu_layer layer = gpu_layer(b, &b->layers[i]);
        b->limits[i].counters = counters;
        size_t bytes = kvq_gpu_attend_workspace_bytes(&layer, &b->limits[i]);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static int count_limits(struct kvq_bucket *b, size_t *workspace)
{
    int rc = KVQ_OK;
    for (uint32_t i = 0; i < b->n_layers && rc == KVQ_OK; i++) {
        rc = count_layer(b, &b->layers[i], &b->limits[i]);
        size_t bytes = kvq_gpu_attend_batch_bytes(&b->limits[i]);
        b->batch_at[i + 1] = b->batch_at[i] + (bytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    *workspace = rc ? 0 : count_workspace(b);
    return rc;
}

// ---- Opening and closing ----

static int take_host(struct kvq_bucket *b, const struct kvq__local_session *s)
{
    assert(!b->layers && b->n_layers == 0);
    b->layers = calloc(s->n_layers, sizeof *b->layers);
    b->limits = calloc(s->n_layers, sizeof *b->limits);
    b->batch_at = calloc(s->n_layers + 1u, sizeof *b->batch_at);
    b->narrow_rows = calloc(s->n_layers, sizeof *b->narrow_rows);
    b->order = calloc(b->max_sessions, sizeof *b->order);
    b->calls = calloc(b->max_sessions, sizeof *b->calls);
    b->shared = calloc(b->max_sessions, sizeof *b->shared);
    if (!b->layers || !b->limits || !b->batch_at || !b->narrow_rows || !b->order || !b->calls ||
        !b->shared)
        return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
    b->n_layers = s->n_layers;
    memcpy(b->layers, s->layers, s->n_layers * sizeof *b->layers);
    return KVQ_OK;
}

static int take_device(struct kvq_bucket *b, size_t workspace)
{
    const struct kvq_gpu_driver *d = b->local->here.driver;
    size_t bytes = b->batch_at[b->n_layers];
    assert(!b->batch && !b->workspace && bytes > 0);
    int result = d->memory_alloc(&b->batch, bytes);
    result = result ? result : d->fill8(b->batch, 0, bytes, NULL);
    result = result ? result : d->memory_alloc(&b->workspace, workspace);
    result = result ? result : d->fill8(b->workspace, 0, workspace, NULL);
    for (int i = 0; i < SLOTS && result == KVQ_GPU_OK; i++) {
        void *memory = NULL;
        result = d->host_alloc(&memory, bytes, KVQ_GPU_HOST_PORTABLE);
        b->slots[i].memory = memory;
        result = result ? result : d->event_create(&b->slots[i].passed, KVQ_GPU_EVENT_UNTIMED);
    }
    result = result ? result : d->stream_sync(NULL);
    return result ? kvq__local_fault(b->local, result, "taking memory for a bucket") : KVQ_OK;
}

static int open_here(struct kvq_bucket *b, kvq_session session)
{
    size_t workspace;
    const struct kvq__local_session *s = kvq__local_find(b->local, session);
    if (!s)
        return kvq__set_error(KVQ_E_STALE,
                              "kvq_bucket_open: session %#llx is not in this kvq_local",
                              (unsigned long long)session);
    int rc = take_host(b, s);
    if (rc == KVQ_OK)
        rc = count_limits(b, &workspace);
    return rc ? rc : take_device(b, workspace);
}

int kvq_bucket_open(kvq_local *local, const struct kvq_bucket_options *options, kvq_bucket **bucket)
{
    struct kvq_bucket_options taken, *o = &taken;
    if (bucket)
        *bucket = NULL;
    if (!options || !bucket)
        return kvq__set_error(KVQ_E_INVALID, "kvq_bucket_open: an argument is NULL");
    int rc = kvq__local_check(local);
    if (rc == KVQ_OK)
        rc = KVQ__SIZED_TAKE(o, options, "kvq_bucket_options");
    if (rc == KVQ_OK)
        rc = kvq__local_check_place(local, true);
    if (rc)
        return rc;
    if (o->max_tokens > local->max_tokens || o->max_sessions > KVQ_MAX_BATCH ||
        o->max_queries > KVQ_MAX_GPU_QUERIES)
        return kvq__set_error(
            KVQ_E_LIMIT,
            "kvq_bucket_open: %llu tokens, %u sessions, %u queries; at most %llu, %d "
            "and %d can be",
            (unsigned long long)o->max_tokens, o->max_sessions, o->max_queries,
            (unsigned long long)local->max_tokens, KVQ_MAX_BATCH, KVQ_MAX_GPU_QUERIES);
    kvq_bucket *b = calloc(1, sizeof *b);
    if (!b)
        return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
    b->local = local;
    LIST_INSERT_HEAD(&local->buckets, b, link);
    b->max_tokens = o->max_tokens ? o->max_tokens : local->max_tokens;
    b->max_sessions = o->max_sessions ? o->max_sessions : 1;
    b->max_queries = o->max_queries ? o->max_queries : 1;
    struct kvq_gpu_context *before = kvq__context_enter(&local->here);
    rc = *local->why ? KVQ_OK : open_here(b, o->session);
    kvq__context_leave(&local->here, before);
    if (rc)
        kvq_bucket_close(&b);
    *bucket = b;
    return rc;
}

static const char *const tensor_names[KVQ__TENSORS] = {"k", "v", "q", "out", "lse"};

struct kvq__tensors kvq__tensors_of(const struct kvq_work *w)
{
    return (struct kvq__tensors){{&w->k, &w->v, &w->q, &w->out, &w->lse}};
}

// What a layer was captured with is no longer needed.
static void forget_noted(struct kvq_bucket *b, uint32_t layer)
{
    const struct kvq__tensors tensors = kvq__tensors_of(&b->works[layer]);
    for (int i = 0; b->noted[layer] && i < KVQ__TENSORS; i++)
        kvq__buffer_let_go(tensors.at[i]->buffer);
    b->noted[layer] = false;
}

void kvq_bucket_close(kvq_bucket **bucket)
{
    kvq_bucket *b = bucket ? *bucket : NULL;
    if (!b)
        return;
    const struct kvq_gpu_driver *d = b->local->here.driver;
    struct kvq_gpu_context *before = kvq__context_enter(&b->local->here);
    if (b->local->bucket == b)
        kvq_local_abort(b->local);
    if (b->used)
        d->stream_sync(b->stream);
    for (uint32_t i = 0; i < KVQ__HANDLES; i++)
        if (b->local->sessions[i] && b->local->sessions[i]->bucket == b)
            b->local->sessions[i]->bucket = NULL;
    for (int i = 0; i < SLOTS; i++) {
        if (b->slots[i].memory)
            d->host_free(b->slots[i].memory);
        if (b->slots[i].passed)
            d->event_destroy(b->slots[i].passed);
    }
    if (b->batch)
        d->memory_free(b->batch);
    if (b->workspace)
        d->memory_free(b->workspace);
    kvq__context_leave(&b->local->here, before);
    LIST_REMOVE(b, link);
    for (uint32_t i = 0; i < KVQ_MAX_LAYERS; i++)
        forget_noted(b, i);
    free(b->layers);
    free(b->limits);
    free(b->batch_at);
    free(b->narrow_rows);
    free(b->order);
    free(b->calls);
    free(b->shared);
    free(b);
    *bucket = NULL;
}

// ---- What a graph was captured with ----

void kvq__bucket_note(struct kvq_bucket *b, const struct kvq_work *w)
{
    const struct kvq__tensors tensors = kvq__tensors_of(w);
    assert(w->layer < b->n_layers);
    for (int i = 0; i < KVQ__TENSORS; i++)
        kvq__buffer_keep(tensors.at[i]->buffer);
    forget_noted(b, w->layer);
    b->noted[w->layer] = true;
    b->works[w->layer] = *w;
}

int kvq__bucket_check_noted(const struct kvq_bucket *b)
{
    for (uint32_t l = 0; l < b->n_layers; l++) {
        const struct kvq__tensors tensors = kvq__tensors_of(&b->works[l]);
        for (int i = 0; b->noted[l] && i < KVQ__TENSORS; i++)
            if (tensors.at[i]->buffer && tensors.at[i]->buffer->closed)
                return kvq__set_error(KVQ_E_BUFFER,
                                      "step begin: a graph was captured with %s of layer %u in a "
                                      "buffer that was closed since; capture the layer again, or "
                                      "close the bucket",
                                      tensor_names[i], l);
    }
    return KVQ_OK;
}

bool kvq__buckets_captured(const struct kvq_local *local)
{
    const struct kvq_bucket *b;
    LIST_FOREACH (b, &local->buckets, link)
        if (memchr(b->noted, true, sizeof b->noted))
            return true;
    return false;
}

// ---- Steps ----

static bool is_another(const struct kvq_bucket *b, const struct kvq_gpu_stream *stream)
{
    return b->used && (stream != b->stream || stream == KVQ_GPU_STREAM_OF_THREAD);
}

int kvq__bucket_follow(const struct kvq_bucket *b, struct kvq_gpu_stream *stream)
{
    const struct kvq_gpu_driver *d = b->local->here.driver;
    if (!is_another(b, stream))
        return KVQ_OK;
    int result = d->event_record(b->slots[b->slot].passed, b->stream);
    result = result ? result : d->stream_wait(stream, b->slots[b->slot].passed, 0);
    return result ? kvq__local_fault(b->local, result, "waiting for a bucket's stream") : KVQ_OK;
}

int kvq__bucket_turn(struct kvq_bucket *b, struct kvq_gpu_stream *stream)
{
    const struct kvq_gpu_driver *d = b->local->here.driver;
    const bool moves = is_another(b, stream);
    int result = KVQ_GPU_OK;
    assert(b->slot < SLOTS);
    if (b->slots[b->slot].used)
        result = d->event_record(b->slots[b->slot].passed, b->stream);
    if (result == KVQ_GPU_OK && b->slots[b->slot].used && moves) // both use the batch and workspace
        result = d->stream_wait(stream, b->slots[b->slot].passed, 0);
    b->slot = (b->slot + 1) % SLOTS;
    if (result == KVQ_GPU_OK && b->slots[b->slot].used)
        result = d->event_query(b->slots[b->slot].passed);
    if (result == KVQ_GPU_NOT_READY) // the host is as many steps ahead as there are slots
        result = d->event_sync(b->slots[b->slot].passed);
    b->slots[b->slot].used = true;
    memset(b->filled, 0, sizeof b->filled);
    b->stream = stream;
    b->used = true;
    return result ? kvq__local_fault(b->local, result, "waiting for an earlier step") : KVQ_OK;
}

// The pages of an entry's layer, as the table's copy on the host has them.
static const struct kvq_table_layer *table_layer_of(const struct kvq_bucket *b, uint32_t layer,
                                                    const struct kvq_entry *e)
{
    const struct kvq__local_session *s = kvq__local_find(b->local, e->session);
    assert(s && layer < s->n_layers);
    return s->layers[s->layers[layer].source].pages;
}

static uint64_t first_block(const struct kvq_bucket *b, uint32_t layer, const struct kvq_entry *e)
{
    const struct kvq_table_layer *t = table_layer_of(b, layer, e);
    return t->n_pages ? ((const struct kvq_table_entry *)(const void *)(t + 1))->packed : 0;
}

// Shellsort: it takes no memory, and entries come in nearly the same order every time.
static void sort_by_block(struct kvq_bucket *b, uint32_t layer, const struct kvq_entry *entries,
                          uint32_t n)
{
    static const uint32_t gaps[] = {701, 301, 132, 57, 23, 10, 4, 1};
    for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++)
        for (uint32_t i = gaps[g], j; i < n; i++) {
            uint32_t moved = b->order[i];
            uint64_t block = first_block(b, layer, &entries[moved]);
            for (j = i; j >= gaps[g]; j -= gaps[g]) {
                if (first_block(b, layer, &entries[b->order[j - gaps[g]]]) <= block)
                    break;
                b->order[j] = b->order[j - gaps[g]];
            }
            b->order[j] = moved;
        }
}

static uint64_t common_tokens(const struct kvq_bucket *b, uint32_t layer, const struct kvq_entry *e,
                              const struct kvq_entry *before)
{
    const struct kvq_table_layer *t = table_layer_of(b, layer, e),
                                 *u = table_layer_of(b, layer, before);
    return kvq_gpu_attend_common((const struct kvq_page *)(const void *)(t + 1), t->n_pages,
                                 (const struct kvq_page *)(const void *)(u + 1), u->n_pages);
}

// Fills order, calls and shared. Returns how many entries there are; *shares: whether any do.
static uint32_t gather_calls(struct kvq_bucket *b, const struct kvq_work *w,
                             const struct kvq_entry *entries, uint32_t n, bool *shares)
{
    uint32_t m = 0;
    assert(n <= b->max_sessions);
    *shares = false;
    for (uint32_t i = 0; i < n; i++)
        if (entries[i].status == KVQ_OK)
            b->order[m++] = i;
    sort_by_block(b, w->layer, entries, m);
    for (uint32_t i = 0; i < m; i++) {
        const struct kvq_entry *e = &entries[b->order[i]];
        b->calls[i] = kvq__local_call(b->local, w, e);
        b->shared[i] = i ? common_tokens(b, w->layer, e, &entries[b->order[i - 1]]) : 0;
        *shares |= b->shared[i] > 0;
    }
    return m;
}

int kvq__bucket_fill(struct kvq_bucket *b, const struct kvq_work *w,
                     const struct kvq_entry *entries, uint32_t n, bool captured)
{
    char text[KVQ__TEXT_BYTES / 2];
    bool shares;
    assert(w->layer < b->n_layers && !b->filled[w->layer]);
    b->filled[w->layer] = true;
    const struct kvq_gpu_layer l = gpu_layer(b, &b->layers[w->layer]);
    struct kvq_gpu_attend_limits limits = b->limits[w->layer];
    uint8_t *batch = b->slots[b->slot].memory + b->batch_at[w->layer];
    uint32_t m = gather_calls(b, w, entries, n, &shares);
    if (shares && !captured)
        limits.narrow_rows = kvq_gpu_attend_stack_rows(&l);
    b->narrow_rows[w->layer] = limits.narrow_rows;
    if (m == 0) {
        memset(batch, 0, ALIGN); // no items
        return KVQ_OK;
    }
    return kvq_gpu_attend_fill(&l, b->calls, b->shared, m, &limits, batch, text, sizeof text)
               ? kvq__set_error(KVQ_E_LIMIT, "attention on a stream: %s", text)
               : KVQ_OK;
}

static int copy_piece(struct kvq_bucket *b, size_t from, size_t end)
{
    if (from == end)
        return KVQ_OK;
    const uint8_t *memory = b->slots[b->slot].memory;
    int result =
        b->local->here.driver->copy_in(b->batch + from, memory + from, end - from, b->stream);
    return result ? kvq__local_fault(b->local, result, "copying a batch to the GPU") : KVQ_OK;
}

// What was filled of the layers, in few copies: a batch has room for sessions of all lengths, and
// most often a small part of it is used.
int kvq__bucket_copy(struct kvq_bucket *b, uint32_t layer, uint32_t to)
{
    const uint8_t *memory = b->slots[b->slot].memory;
    size_t from = 0, end = 0;
    int rc = KVQ_OK;
    assert(layer < to && to <= b->n_layers);
    for (uint32_t l = layer; l < to && rc == KVQ_OK; l++) {
        size_t at = b->batch_at[l];
        if (!b->filled[l])
            continue;
        if (from == end || at - end > COPY_GAP) {
            rc = copy_piece(b, from, end);
            from = at;
        }
        end = at + kvq_gpu_attend_batch_used(&b->limits[l], memory + at);
    }
    return rc ? rc : copy_piece(b, from, end);
}

int kvq__bucket_launch(struct kvq_bucket *b, uint32_t layer, bool captured,
                       struct kvq_gpu_stream *stream)
{
    assert(layer < b->n_layers && b->workspace);
    char text[KVQ_GPU_TEXT];
    struct kvq_gpu_attend_launch launch = {.layer = gpu_layer(b, &b->layers[layer]),
                                           .limits = b->limits[layer],
                                           .batch = b->batch + b->batch_at[layer],
                                           .workspace = b->workspace,
                                           .stream = stream};
    if (!captured)
        launch.limits.narrow_rows = b->narrow_rows[layer];
    if (kvq_gpu_attend(&b->local->pool->kernels, &launch, text, sizeof text))
        return kvq__set_error(KVQ_E_SYSTEM, "launching attention: %.600s", text);
    return KVQ_OK;
}
