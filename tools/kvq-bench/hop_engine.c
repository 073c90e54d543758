// SPDX-License-Identifier: Apache-2.0
//
// An engine for `kvq-bench hop`: sessions on the bench's GPU, tensors in memory that the daemon
// made there, and requests in the order of the bench's stream.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/hop_engine.h"

// Tokens of a step while caches are filled: they stand in 16 bits until they are packed.
enum { AT_ONCE = 2048 };

int hop_fault(int code, const char *what, char *text)
{
    if (code)
        snprintf(text, HOP_TEXT, "%s: %s", what, kvq_error_text());
    return code ? -1 : 0;
}

// The first of a request's sessions that failed.
int hop_fault_of(int code, const struct kvq_entry *entries, uint32_t n, const char *what,
                 char *text)
{
    for (uint32_t i = 0; code == 0 && i < n; i++)
        if (entries[i].status) {
            snprintf(text, HOP_TEXT, "%s: %s", what, kvq_error_text());
            return -1;
        }
    return hop_fault(code, what, text);
}

static uint64_t most(const struct bench_list *list)
{
    uint64_t m = list->value[0]; // there is one
    for (uint32_t i = 1; i < list->n; i++)
        m = list->value[i] > m ? list->value[i] : m;
    return m;
}

// ---- Tensors ----

// fp16 numbers of size 2^-2 to 2^1, the same every time.
static void make_tokens(uint16_t *x, size_t n)
{
    uint64_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        uint32_t r = (uint32_t)(state >> 33);
        x[i] = (uint16_t)((r & 1) << 15 | (13 + (r >> 1 & 3)) << 10 | (r >> 3 & 1023));
    }
}

static int upload(struct hop_engine *e, uint64_t at, const void *from, size_t bytes, char *text)
{
    const struct kvq_gpu_driver *d = &e->gpu->driver;
    kvq_gpu_ptr to = (uintptr_t)kvq_buffer_device(e->buffer) + at;
    int result = d->copy_in(to, from, bytes, e->gpu->stream);
    result = result ? result : d->stream_sync(e->gpu->stream);
    return result ? kvq_gpu_fault(d, result, "copying to the GPU", text, HOP_TEXT) : 0;
}

static uint64_t whole(uint64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

// K, V, one token more of each, queries and outputs, in one buffer.
static int make_tensors(struct hop_engine *e, char *text)
{
    const struct hop_options *o = e->o;
    const uint64_t row = 2ull * o->kv_heads * o->head_dim, q_row = 2ull * o->q_heads * o->head_dim;
    const uint64_t tokens = most(&o->tokens), sessions = most(&o->sessions);
    e->v_at = whole(tokens * row);
    e->fresh_at = 2 * e->v_at;
    e->q_at = e->fresh_at + whole(2 * row);
    e->out_at = e->q_at + whole(sessions * q_row);
    uint64_t bytes = e->out_at + whole(2 * sessions * q_row);
    e->tokens = malloc(e->out_at);
    e->entries = calloc(sessions, sizeof *e->entries);
    if (!e->tokens || !e->entries) {
        snprintf(text, HOP_TEXT, "no memory for %llu tokens", (unsigned long long)tokens);
        return -1;
    }
    make_tokens(e->tokens, e->out_at / 2);
    if (hop_fault(kvq_buffer_create_on(e->client, NULL, bytes, &e->buffer), "a buffer", text))
        return -1;
    e->work.q = kvq_tensor_make(e->buffer, e->q_at, o->q_heads, o->head_dim, KVQ_DTYPE_F16);
    e->work.out = kvq_tensor_make(e->buffer, e->out_at, o->q_heads, o->head_dim, KVQ_DTYPE_F32);
    e->least_work.k = e->least_work.v =
        kvq_tensor_make(e->buffer, e->fresh_at, 1, 64, KVQ_DTYPE_F16);
    e->least_work.q = kvq_tensor_make(e->buffer, e->q_at, 1, 64, KVQ_DTYPE_F16);
    e->least_work.out = kvq_tensor_make(e->buffer, e->out_at, 1, 64, KVQ_DTYPE_F32);
    return upload(e, 0, e->tokens, e->out_at, text);
}

static void take_tokens(struct hop_engine *e, uint64_t at, uint64_t v_at)
{
    e->work.k = kvq_tensor_make(e->buffer, at, e->o->kv_heads, e->o->head_dim, KVQ_DTYPE_F16);
    e->work.v = e->work.k;
    e->work.v.offset = v_at;
}

// ---- Sessions ----

static int open_session(struct hop_engine *e, struct kvq_layer layer, const char *format,
                        struct kvq_entry *entry, char *text)
{
    const struct kvq_session_options options = {
        .size = sizeof options,
        .layers = &layer,
        .n_layers = 1,
        .format = format,
        .place = e->place,
        .attention = KVQ_ATTENTION_EXACT}; // whatever the daemon's configuration says
    *entry = (struct kvq_entry){.queries = 1};
    return hop_fault(kvq_session_open(e->client, &options, &entry->session, NULL), "a session",
                     text);
}

// Appends tokens to all layers of the sessions, all of them the same.
static int append(struct hop_engine *e, struct kvq_work *work, struct kvq_entry *entries,
                  uint32_t n, uint32_t layers, uint32_t tokens, char *text)
{
    for (uint32_t i = 0; i < n; i++)
        entries[i].append = tokens;
    int rc = kvq_step_begin(e->own, entries, n, &work->step);
    for (work->layer = 0; rc == 0 && work->layer < layers; work->layer++)
        rc = kvq_append(e->own, work, entries, n);
    rc = hop_fault_of(rc, entries, n, "appending", text);
    if (rc == 0)
        rc = hop_fault_of(kvq_step_end(e->own, work->step, entries, n), entries, n, "a step", text);
    for (uint32_t i = 0; i < n; i++) {
        entries[i].position = entries[i].value;
        entries[i].append = 0;
    }
    work->step = 0;
    work->layer = 0;
    return rc;
}

static int find_place(struct hop_engine *e, char *text)
{
    struct kvq_gpu_uuid uuid;
    struct kvq_gpu_info gpus[16];
    char hex[33];
    uint32_t n = 0;
    if (e->gpu->driver.device_uuid(&uuid, e->gpu->device) != KVQ_GPU_OK ||
        kvq_daemon_gpus(e->client, gpus, 16, &n))
        return hop_fault(-1, "asking for GPUs", text);
    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", uuid.bytes[i]);
    for (uint32_t i = 0; i < n && i < 16; i++) {
        size_t at = 0;
        for (const char *p = gpus[i].place + strlen("GPU-"); *p; p++)
            at += *p != '-' && hex[at] == *p;
        if (at == 32)
            memcpy(e->place, gpus[i].place, sizeof e->place);
    }
    if (e->place[0])
        return 0;
    snprintf(text, HOP_TEXT, "kvqd does not use the first GPU of this process");
    return -1;
}

int hop_engine_open(struct hop_engine **out, const struct hop_gpu *gpu, const struct hop_options *o,
                    const char *folder, char *text)
{
    const struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = folder, .name = "kvq-bench hop"};
    const struct kvq_layer least = {.q_heads = 1, .kv_heads = 1, .k_dim = 64, .v_dim = 64};
    struct hop_engine *e = calloc(1, sizeof *e);
    *out = e;
    if (!e) {
        snprintf(text, HOP_TEXT, "no memory");
        return -1;
    }
    e->gpu = gpu;
    e->o = o;
    if (hop_fault(kvq_connect(&options, &e->client), "connecting", text) ||
        hop_fault(kvq_queue_open(e->client, &e->own), "a queue", text) || find_place(e, text) ||
        make_tensors(e, text) || open_session(e, least, "f16", &e->least, text))
        return -1;
    return append(e, &e->least_work, &e->least, 1, 1, 1, text);
}

// How many of the first tokens are packed, once somebody has read them all.
static int find_packed(struct hop_engine *e, struct hop_case *c, char *text)
{
    struct kvq_session_info info = {.size = sizeof info};
    int rc = 0;
    for (e->work.layer = 0; rc == 0 && e->work.layer < e->o->layers; e->work.layer++)
        rc = kvq_attend(e->own, &e->work, e->entries, c->sessions);
    rc = hop_fault_of(rc, e->entries, c->sessions, "attending", text);
    if (rc == 0)
        rc =
            hop_fault(kvq_session_info(e->client, e->entries[0].session, &info), "a session", text);
    c->packed = rc == 0 ? c->tokens - info.full_precision_tokens : 0;
    return rc;
}

int hop_open_sessions(struct hop_engine *e, const struct hop_case *c, struct kvq_entry *entries,
                      uint32_t *n, char *text)
{
    const struct hop_options *o = e->o;
    const struct kvq_layer layer = {(uint16_t)o->q_heads, (uint16_t)o->kv_heads,
                                    (uint16_t)o->head_dim, (uint16_t)o->head_dim,
                                    .repeat = o->layers};
    const uint64_t row = 2ull * o->kv_heads * o->head_dim;
    int rc = 0;
    for (*n = 0; rc == 0 && *n < c->sessions; ++*n) {
        rc = open_session(e, layer, o->format, &entries[*n], text);
        entries[*n].q_row = *n;
    }
    for (uint64_t at = 0; rc == 0 && at < c->tokens; at += AT_ONCE) {
        uint64_t some = c->tokens - at < AT_ONCE ? c->tokens - at : AT_ONCE;
        take_tokens(e, at * row, e->v_at + at * row);
        rc = append(e, &e->work, entries, c->sessions, o->layers, (uint32_t)some, text);
    }
    take_tokens(e, e->fresh_at, e->fresh_at + row);
    return rc;
}

int hop_engine_fill(struct hop_engine *e, struct hop_case *c, char *text)
{
    const kvq_gpu_ptr memory = (uintptr_t)kvq_buffer_device(e->buffer);
    c->k = e->tokens;
    c->v = e->tokens + e->v_at / 2;
    c->fresh_k = memory + e->fresh_at;
    c->fresh_v = c->fresh_k + 2ull * e->o->kv_heads * e->o->head_dim;
    c->q = memory + e->q_at;
    c->out = memory + e->out_at;
    int rc = hop_open_sessions(e, c, e->entries, &e->n_entries, text);
    rc = rc ? rc : find_packed(e, c, text);
    return rc ? rc : hop_context_fill(e, c, text);
}

void hop_engine_empty(struct hop_engine *e)
{
    hop_context_empty(e);
    while (e->n_entries > 0)
        kvq_session_close(e->client, e->entries[--e->n_entries].session);
}

void hop_engine_close(struct hop_engine **engine)
{
    struct hop_engine *e = *engine;
    *engine = NULL;
    if (!e)
        return;
    hop_context_close(e);
    kvq_buffer_close(&e->buffer);
    kvq_disconnect(&e->client); // with its queues
    free(e->tokens);
    free(e->entries);
    free(e);
}

// ---- Requests ----

int hop_engine_order(struct hop_engine *e, uint32_t i, const char *order, char *text)
{
    setenv("KVQ_GPU_ORDER", order, 1);
    int rc = kvq_queue_open(e->client, &e->queue[i]);
    rc = rc ? rc : kvq_queue_prepare_streams(e->queue[i]);
    unsetenv("KVQ_GPU_ORDER");
    return hop_fault(rc, "a queue", text);
}

int hop_engine_attend(struct hop_engine *e, uint32_t i, uint32_t layer, char *text)
{
    e->work.layer = layer;
    int rc = kvq_attend_on_stream(e->queue[i], &e->work, e->entries, e->n_entries, e->gpu->stream);
    return hop_fault_of(rc, e->entries, e->n_entries, "attending", text);
}

int hop_engine_least(struct hop_engine *e, uint32_t i, char *text)
{
    int rc = kvq_attend_on_stream(e->queue[i], &e->least_work, &e->least, 1, e->gpu->stream);
    return hop_fault_of(rc, &e->least, 1, "attending to one token", text);
}

int hop_engine_begin(struct hop_engine *e, uint32_t i, char *text)
{
    for (uint32_t j = 0; j < e->n_entries; j++)
        e->entries[j].append = 1;
    int rc = kvq_step_begin(e->queue[i], e->entries, e->n_entries, &e->work.step);
    return hop_fault_of(rc, e->entries, e->n_entries, "beginning a step", text);
}

int hop_engine_append(struct hop_engine *e, uint32_t i, uint32_t layer, char *text)
{
    e->work.layer = layer;
    int rc = kvq_append_attend_on_stream(e->queue[i], &e->work, e->entries, e->n_entries,
                                         e->gpu->stream);
    return hop_fault_of(rc, e->entries, e->n_entries, "a layer of a step", text);
}

int hop_engine_end(struct hop_engine *e, uint32_t i, char *text)
{
    int rc = kvq_step_end(e->queue[i], e->work.step, e->entries, e->n_entries);
    rc = hop_fault_of(rc, e->entries, e->n_entries, "ending a step", text);
    for (uint32_t j = 0; rc == 0 && j < e->n_entries; j++) {
        e->entries[j].position = e->entries[j].value;
        e->entries[j].append = 0;
    }
    e->work.step = 0;
    return rc;
}
