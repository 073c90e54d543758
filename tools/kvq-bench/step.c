// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench step: a decode step of a whole model's attention, through the daemon (a request for
// each layer) and in this program's own context (one request for all), by turns in one run on
// sessions that hold the same tokens. Both compute on one thread. The outputs are compared.
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvq.h"
#include "tools/kvq-bench/bench.h"
#include "tools/kvq-bench/daemon.h"

enum { LAYERS = 32, CHUNK = 2048, WARM_UP = 3 };

struct run {
    const struct bench_options *o;
    struct bench_output *out;
    struct bench_daemon daemon;
    kvq_client *client;
    kvq_queue *queue;
    kvq_local *local;
    kvq_buffer *buffer;
    struct kvq_tensor k, v, q, outputs[2];
    struct kvq_layer row;
    struct kvq_entry entry[2]; // through the daemon; here
    double us[2][BENCH_MAX_REPS], end_us[BENCH_MAX_REPS];
};

static int complain(const char *what, int status)
{
    fprintf(stderr, "kvq-bench: %s: %s\n", what, status ? kvq_strerror(status) : kvq_error_text());
    return -1;
}

// ---- The model ----

static int make_tensors(struct run *r)
{
    const struct bench_options *o = r->o;
    uint64_t kv = (uint64_t)CHUNK * o->kv_heads * o->head_dim * 2;
    uint64_t q = (uint64_t)o->q_heads * o->head_dim * 4;
    if (kvq_buffer_create(r->client, 2 * kv + 3 * q, &r->buffer))
        return complain("a buffer", 0);
    uint16_t *values = kvq_buffer_data(r->buffer);
    uint32_t seed = 1;
    for (uint64_t i = 0; i < kv; i++) { // K and V, as fp16 between -2 and 2
        seed = seed * 1664525 + 1013904223;
        values[i] = (uint16_t)((seed >> 16 & 0x8000) | (0x3000 + (seed >> 8 & 0x0fff)));
    }
    float *queries = (float *)(void *)(values + kv);
    for (uint64_t i = 0; i < q / 4; i++)
        queries[i] = (float)(i * 37 % 101) / 50 - 1;
    r->k = kvq_tensor_make(r->buffer, 0, o->kv_heads, o->head_dim, KVQ_DTYPE_F16);
    r->v = kvq_tensor_make(r->buffer, kv, o->kv_heads, o->head_dim, KVQ_DTYPE_F16);
    r->q = kvq_tensor_make(r->buffer, 2 * kv, o->q_heads, o->head_dim, KVQ_DTYPE_F32);
    r->outputs[0] = kvq_tensor_make(r->buffer, 2 * kv + q, o->q_heads, o->head_dim, KVQ_DTYPE_F32);
    r->outputs[1] = r->outputs[0];
    r->outputs[1].offset += q;
    return 0;
}

// Gives both sessions so many tokens.
static int fill(struct run *r, uint64_t tokens)
{
    struct kvq_tensor k[LAYERS], v[LAYERS];
    const struct kvq_step_work work = {.k = k, .v = v, .n_layers = LAYERS};
    for (int i = 0; i < LAYERS; i++) {
        k[i] = r->k;
        v[i] = r->v;
    }
    for (uint64_t at = 0; at < tokens;) {
        uint32_t n = tokens - at < CHUNK ? (uint32_t)(tokens - at) : CHUNK;
        for (int i = 0; i < 2; i++)
            r->entry[i] =
                (struct kvq_entry){.session = r->entry[i].session, .position = at, .append = n};
        if (kvq_step(r->queue, &work, r->entry, 2))
            return complain("filling", 0);
        for (int i = 0; i < 2; i++)
            if (r->entry[i].status)
                return complain("filling", r->entry[i].status);
        at += n;
    }
    for (int i = 0; i < 2; i++)
        r->entry[i] = (struct kvq_entry){
            .session = r->entry[i].session, .position = tokens, .append = 1, .queries = 1};
    return 0;
}

// ---- Steps ----

static int step_there(struct run *r, double *us)
{
    struct kvq_entry *e = &r->entry[0];
    struct kvq_work w = {.k = r->k, .v = r->v, .q = r->q, .out = r->outputs[0]};
    double start = bench_seconds();
    int rc = kvq_step_begin(r->queue, e, 1, &w.step);
    for (; w.layer < LAYERS && !rc && !e->status; w.layer++)
        rc = kvq_append_attend(r->queue, &w, e, 1);
    if (!rc && !e->status)
        rc = kvq_step_end(r->queue, w.step, e, 1);
    *us = (bench_seconds() - start) * 1e6;
    e->position = e->value;
    return rc || e->status ? complain("a step through the daemon", rc ? 0 : e->status) : 0;
}

static int step_here(struct run *r, double *us, double *end_us)
{
    struct kvq_entry *e = &r->entry[1];
    struct kvq_work w = {.k = r->k, .v = r->v, .q = r->q, .out = r->outputs[1]};
    double start = bench_seconds();
    int rc = kvq_local_begin(r->local, e, 1);
    for (; w.layer < LAYERS && !rc && !e->status; w.layer++)
        rc = kvq_local_attend(r->local, &w, e, 1);
    double end = bench_seconds();
    if (!rc && !e->status)
        rc = kvq_local_end(r->local, NULL, e, 1);
    *us = (bench_seconds() - start) * 1e6;
    *end_us = (bench_seconds() - end) * 1e6;
    e->position = e->value;
    return rc || e->status ? complain("a step in this context", rc ? 0 : e->status) : 0;
}

static int same_outputs(const struct run *r)
{
    const char *base = kvq_buffer_data(r->buffer);
    uint64_t bytes = r->outputs[1].offset - r->outputs[0].offset;
    if (memcmp(base + r->outputs[0].offset, base + r->outputs[1].offset, bytes) == 0)
        return 0;
    fprintf(stderr, "kvq-bench: the outputs differ\n");
    return -1;
}

static int time_steps(struct run *r)
{
    double ignored[2];
    for (int i = 0; i < WARM_UP; i++)
        if (step_there(r, ignored) || step_here(r, ignored, ignored + 1))
            return -1;
    for (uint32_t i = 0; i < r->o->reps; i++)
        if (step_there(r, &r->us[0][i]) || step_here(r, &r->us[1][i], &r->end_us[i]) ||
            same_outputs(r))
            return -1;
    return 0;
}

// ---- Rows ----

static int open_sessions(struct run *r, const char *format, uint8_t attention)
{
    const struct kvq_session_options o = {.size = sizeof o,
                                          .layers = &r->row,
                                          .n_layers = 1,
                                          .format = format,
                                          .attention = attention};
    for (int i = 0; i < 2; i++)
        if (kvq_session_open(r->client, &o, &r->entry[i].session, NULL))
            return complain("a session", 0);
    return kvq_local_add(r->local, r->entry[1].session) ? complain("a session", 0) : 0;
}

static void report(struct run *r, const char *format, const char *path, uint64_t tokens)
{
    double ratio[BENCH_MAX_REPS];
    for (uint32_t i = 0; i < r->o->reps; i++)
        ratio[i] = r->us[0][i] / r->us[1][i];
    double there = bench_median(r->us[0], r->o->reps), here = bench_median(r->us[1], r->o->reps);
    double faster = bench_median(ratio, r->o->reps), end = bench_median(r->end_us, r->o->reps);
    bench_note(r->out, "%-14s %-6s %8llu %12.0f %12.0f %10.1f %8.3f", format, path,
               (unsigned long long)tokens, there, here, end, faster);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "format", format);
    cJSON_AddStringToObject(row, "path", path);
    cJSON_AddNumberToObject(row, "tokens", (double)tokens);
    cJSON_AddNumberToObject(row, "daemon_us", there);
    cJSON_AddNumberToObject(row, "context_us", here);
    cJSON_AddNumberToObject(row, "end_us", end);
    cJSON_AddNumberToObject(row, "ratio", faster);
    cJSON_AddItemToArray(r->out->rows, row);
}

static int bench_row(struct run *r, const char *format, uint8_t attention, uint64_t tokens)
{
    int rc = open_sessions(r, format, attention);
    rc = rc ? rc : fill(r, tokens);
    rc = rc ? rc : time_steps(r);
    if (rc == 0)
        report(r, format, attention == KVQ_ATTENTION_FAST ? "fast" : "exact", tokens);
    for (int i = 0; i < 2; i++) {
        if (r->entry[i].session)
            kvq_session_close(r->client, r->entry[i].session);
        r->entry[i] = (struct kvq_entry){0};
    }
    return rc;
}

static int start(struct run *r)
{
    static const char *const options[] = {
        "--workers", "1", "--pin", "yes", "--pool-bytes", "12gb", "--client-bytes", "1gb", NULL};
    const struct kvq_connect_options co = {
        .size = sizeof co, .runtime_dir = r->daemon.folder, .name = "kvq-bench"};
    const struct kvq_local_options lo = {.size = sizeof lo, .flags = KVQ_LOCAL_REQUIRE};
    if (bench_daemon_start(&r->daemon, options))
        return -1;
    if (kvq_connect(&co, &r->client) || kvq_queue_open(r->client, &r->queue) ||
        kvq_local_open(r->queue, &lo, &r->local))
        return complain("connecting", 0);
    return make_tensors(r);
}

static int bench_all(struct run *r)
{
    const struct bench_options *o = r->o;
    int rc = 0;
    for (uint32_t f = 0; f < o->n_formats; f++)
        for (uint32_t i = 0; i < o->tokens.n; i++) {
            bool is_fast = bench_format_is_fast(o, f);
            if (!rc && (o->exact || !is_fast))
                rc = bench_row(r, bench_format_name(o, f), KVQ_ATTENTION_EXACT, o->tokens.value[i]);
            if (!rc && o->fast && is_fast)
                rc = bench_row(r, bench_format_name(o, f), KVQ_ATTENTION_FAST, o->tokens.value[i]);
        }
    return rc;
}

int bench_step(const struct bench_options *o)
{
    static struct run r; // large
    struct bench_output out;
    r = (struct run){.o = o, .out = &out};
    r.row = (struct kvq_layer){.q_heads = (uint16_t)o->q_heads,
                               .kv_heads = (uint16_t)o->kv_heads,
                               .k_dim = (uint16_t)o->head_dim,
                               .v_dim = (uint16_t)o->head_dim,
                               .repeat = LAYERS};
    if (bench_daemon_open(&r.daemon, o->kvqd))
        return 1;
    bench_output_open(&out, o->json);
    bench_note(&out, "%-14s %-6s %8s %12s %12s %10s %8s", "format", "path", "tokens", "daemon us",
               "context us", "of it end", "ratio");
    int rc = start(&r);
    rc = rc ? rc : bench_all(&r);
    kvq_disconnect(&r.client);
    rc = bench_daemon_stop(&r.daemon) ? -1 : rc;
    bench_output_close(&out);
    bench_daemon_close(&r.daemon);
    return rc ? 1 : 0;
}
