// SPDX-License-Identifier: Apache-2.0
//
// Sessions and steps in kvqd. This is all that an engine has to do to use it.
#include "tools/kvq-run/cache.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refused(int code, const char *what, struct problem *p)
{
    const char *detail = kvq_error_text();
    int exit_code = code == KVQ_E_NO_DAEMON ? RUN_NO_DAEMON : RUN_FAILED;
    return problem_set(p, exit_code, "%s: %s%s%s", what, kvq_strerror(code), *detail ? ": " : "",
                       detail);
}

// Four areas of the buffer, one after the other, each aligned to a cache line.
static uint64_t place(uint64_t *end, uint32_t tokens, uint32_t heads, uint32_t dim)
{
    uint64_t at = *end;
    *end = (at + (uint64_t)tokens * heads * dim * sizeof(float) + 63) & ~UINT64_C(63);
    return at;
}

static int make_areas(struct engine *e, const struct config *c, struct problem *p)
{
    uint64_t end = 0;
    uint64_t q = place(&end, e->step_tokens, c->q_heads, c->head_dim);
    uint64_t k = place(&end, e->step_tokens, c->kv_heads, c->head_dim);
    uint64_t v = place(&end, e->step_tokens, c->kv_heads, c->head_dim);
    e->layer_bytes = e->local ? end - k : 0;
    for (uint32_t i = 1; i < c->layers; i++)
        end += e->layer_bytes;
    uint64_t out = place(&end, e->step_tokens, c->q_heads, c->head_dim);
    e->ids_offset = place(&end, e->step_tokens, 1, 1);
    int rc = kvq_buffer_create(e->client, end, &e->buffer);
    if (rc)
        return refused(rc, "cannot get shared memory from kvqd", p);
    char *base = kvq_buffer_data(e->buffer);
    e->q = (float *)(base + q);
    e->k = (float *)(base + k);
    e->v = (float *)(base + v);
    e->out = (float *)(base + out);
    e->ids = (int32_t *)(base + e->ids_offset);
    e->tq = kvq_tensor_make(e->buffer, q, c->q_heads, c->head_dim, KVQ_DTYPE_F32);
    e->tk = kvq_tensor_make(e->buffer, k, c->kv_heads, c->head_dim, KVQ_DTYPE_F32);
    e->tv = kvq_tensor_make(e->buffer, v, c->kv_heads, c->head_dim, KVQ_DTYPE_F32);
    e->tout = kvq_tensor_make(e->buffer, out, c->q_heads, c->head_dim, KVQ_DTYPE_F32);
    return 0;
}

void engine_layer(struct engine *e, uint32_t layer)
{
    char *base = kvq_buffer_data(e->buffer);
    uint64_t at = layer * e->layer_bytes;
    e->k = (float *)(base + e->tk.offset + at);
    e->v = (float *)(base + e->tv.offset + at);
}

int engine_open(struct engine *e, const struct config *c, const char *runtime_dir, bool in_context,
                uint32_t step_tokens, struct problem *p)
{
    memset(e, 0, sizeof *e);
    e->step_tokens = step_tokens;
    struct kvq_connect_options o = {
        .size = sizeof o, .runtime_dir = runtime_dir, .name = "kvq-run"};
    int rc = kvq_connect(&o, &e->client);
    if (rc)
        return refused(rc, "cannot connect to kvqd", p);
    rc = kvq_queue_open(e->client, &e->queue);
    if (rc)
        return refused(rc, "cannot open a queue", p);
    e->daemon.size = sizeof e->daemon;
    rc = kvq_daemon_info(e->client, &e->daemon);
    if (rc)
        return refused(rc, "cannot ask the daemon about itself", p);
    rc = in_context ? kvq_local_open(e->queue, NULL, &e->local) : 0;
    if (rc)
        return refused(rc, "cannot attend in this process", p);
    if (e->local && kvq_local_why(e->local))
        fprintf(stderr, "kvq-run: attention goes through the daemon: %s\n",
                kvq_local_why(e->local));
    return make_areas(e, c, p);
}

void engine_close(struct engine *e)
{
    kvq_local_close(&e->local);
    kvq_buffer_close(&e->buffer);
    kvq_queue_close(&e->queue);
    kvq_disconnect(&e->client);
}

static struct kvq_layer layer_row(const struct config *c, uint32_t window, uint32_t repeat)
{
    return (struct kvq_layer){
        .q_heads = (uint16_t)c->q_heads,
        .kv_heads = (uint16_t)c->kv_heads,
        .k_dim = (uint16_t)c->head_dim,
        .v_dim = (uint16_t)c->head_dim,
        .window = window,
        .repeat = repeat,
    };
}

// Rows of the model's layers; returns how many.
static uint32_t layer_rows(const struct config *c, struct kvq_layer rows[2])
{
    uint32_t n = 0;
    uint32_t full = c->window && c->window_from < c->layers ? c->window_from : c->layers;
    if (full)
        rows[n++] = layer_row(c, 0, full);
    if (full < c->layers)
        rows[n++] = layer_row(c, c->window, c->layers - full);
    return n;
}

// A buffer with the prompt's ids, for the daemon to look them up. The last one stays out: its
// logits must be computed. Who begins with a prefix reads it packed, and so does whoever computes
// it, so that both say the same.
static int put_prompt(struct engine *e, const struct cache_options *o, kvq_buffer **buffer,
                      struct kvq_session_options *so)
{
    uint64_t n = o->prompt && o->prompt_ids ? o->prompt_ids - 1 : 0;
    int rc = n ? kvq_buffer_create(e->client, n * sizeof(int32_t), buffer) : 0;
    if (rc || n == 0)
        return rc;
    memcpy(kvq_buffer_data(*buffer), o->prompt, n * sizeof(int32_t));
    so->prefix = (struct kvq_prefix){.buffer = *buffer, .tokens = n};
    so->flags |= KVQ_OPEN_PACKED_PROMPT;
    return 0;
}

int cache_open(struct cache *k, struct engine *e, const struct config *c,
               const struct cache_options *o, struct problem *p)
{
    memset(k, 0, sizeof *k);
    k->engine = e;
    k->capture = o->capture;
    struct kvq_layer rows[2];
    uint32_t n = layer_rows(c, rows);
    struct kvq_session_options so = {
        .size = sizeof so,
        .ns = o->ns,
        .name = o->session,
        .model = o->model,
        .layers = rows,
        .n_layers = n,
        .format = o->format,
        .dtype = !strcmp(o->format, "bf16") ? KVQ_DTYPE_BF16 : KVQ_DTYPE_F16,
        .v_rotation = o->v_rotation,
        .attention = o->attention,
        .on_detach = o->keep ? KVQ_ON_DETACH_KEEP : KVQ_ON_DETACH_DEFAULT,
        .prompt_tokens = o->prompt_tokens,
        .place = e->local ? "host" : NULL, // where this process attends
    };
    struct kvq_session_info info = {.size = sizeof info};
    kvq_buffer *prompt = NULL;
    int rc = put_prompt(e, o, &prompt, &so);
    rc = rc ? rc : kvq_session_open(e->client, &so, &k->session, &info);
    if (rc == KVQ_E_EXISTS && o->may_unfold) {
        so.v_rotation = KVQ_V_ROTATION_DEFAULT;
        rc = kvq_session_open(e->client, &so, &k->session, &info);
    }
    kvq_buffer_close(&prompt);
    if (rc)
        return refused(rc, "cannot open a session", p);
    k->tokens = info.tokens;
    k->prefix = info.created ? info.prefix_tokens : 0;
    k->tells_ids = o->prompt != NULL;
    k->rotated = !strcmp(info.v_rotation, "engine");
    rc = e->local ? kvq_local_add(e->local, k->session) : 0;
    return rc ? refused(rc, "cannot map the session", p) : 0;
}

void cache_close(struct cache *k)
{
    if (k->session && k->engine->local)
        kvq_local_remove(k->engine->local, k->session);
    if (k->session)
        kvq_session_close(k->engine->client, k->session);
    k->session = 0;
}

int cache_save(struct cache *k, struct problem *p)
{
    int rc = kvq_session_save(k->engine->client, k->session);
    return rc ? refused(rc, "cannot save the session", p) : 0;
}

int cache_drop(struct cache *k, struct problem *p)
{
    if (k->engine->local)
        kvq_local_remove(k->engine->local, k->session);
    int rc = kvq_session_drop(k->engine->client, k->session);
    k->session = 0;
    return rc ? refused(rc, "cannot drop the session", p) : 0;
}

int cache_begin(struct cache *k, const uint32_t *ids, uint32_t tokens, struct problem *p)
{
    struct kvq_entry entry = {.session = k->session, .position = k->tokens, .append = tokens};
    struct engine *e = k->engine;
    const struct kvq_ids told = {k->tells_ids ? e->buffer : NULL, e->ids_offset};
    memcpy(e->ids, ids, tokens * sizeof *e->ids);
    int rc = e->local ? kvq_local_begin(e->local, &entry, 1)
                      : kvq_step_begin_ids(e->queue, &entry, 1, &told, &k->step);
    if (!rc)
        rc = entry.status;
    k->step_tokens = tokens;
    return rc ? refused(rc, "cannot begin a step", p) : 0;
}

int cache_attend(struct cache *k, uint32_t layer, struct problem *p)
{
    struct engine *e = k->engine;
    struct kvq_work work = {
        .step = k->step, .layer = layer, .q = e->tq, .k = e->tk, .v = e->tv, .out = e->tout};
    struct kvq_entry entry = {
        .session = k->session,
        .position = k->tokens,
        .append = k->step_tokens,
        .queries = (uint16_t)k->step_tokens,
    };
    work.k.offset += layer * e->layer_bytes;
    work.v.offset += layer * e->layer_bytes;
    int rc = e->local ? kvq_local_attend(e->local, &work, &entry, 1)
                      : kvq_append_attend(e->queue, &work, &entry, 1);
    if (!rc)
        rc = entry.status;
    if (rc)
        return refused(rc, "attention failed", p);
    rc = k->capture ? kvq_capture_append(k->capture, &work, &entry, 1) : 0;
    return rc ? refused(rc, "capturing failed", p) : 0;
}

int capture_open(const struct capture_options *o, const struct config *c, kvq_capture **capture,
                 struct problem *p)
{
    *capture = NULL;
    if (!o->path)
        return 0;
    struct kvq_layer rows[2];
    struct kvq_capture_options co = {.size = sizeof co,
                                     .layers = rows,
                                     .n_layers = layer_rows(c, rows),
                                     .model = o->model,
                                     .max_tokens = o->tokens,
                                     .queries = 1};
    int rc = kvq_capture_open(o->path, &co, capture);
    return rc ? refused(rc, "cannot capture", p) : 0;
}

int capture_close(kvq_capture **capture, struct problem *p)
{
    int rc = kvq_capture_close(capture);
    return rc ? refused(rc, "cannot finish the capture", p) : 0;
}

int cache_end(struct cache *k, struct problem *p)
{
    struct kvq_entry entry = {
        .session = k->session, .position = k->tokens, .append = k->step_tokens};
    struct engine *e = k->engine;
    const struct kvq_step_work told = {.ids = {k->tells_ids ? e->buffer : NULL, e->ids_offset}};
    int rc = e->local ? kvq_local_end(e->local, &told, &entry, 1)
                      : kvq_step_end(e->queue, k->step, &entry, 1);
    if (!rc)
        rc = entry.status;
    if (rc)
        return refused(rc, "cannot commit a step", p);
    k->tokens += k->step_tokens;
    return 0;
}

void cache_abort(struct cache *k)
{
    if (k->engine->local) {
        kvq_local_abort(k->engine->local);
        return;
    }
    // A failure here changes nothing: the daemon aborts the step when the session is closed.
    int rc = kvq_step_abort(k->engine->queue, k->step, NULL, 0);
    (void)rc;
}

int cache_info(struct cache *k, struct kvq_session_info *info, struct problem *p)
{
    *info = (struct kvq_session_info){.size = sizeof *info};
    int rc = kvq_session_info(k->engine->client, k->session, info);
    return rc ? refused(rc, "cannot ask about the session", p) : 0;
}
