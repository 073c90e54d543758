// SPDX-License-Identifier: Apache-2.0
//
// Attention of `kvq-bench hop` in this process's own context, over the daemon's memory: launched
// layer by layer, or replayed from a graph.
#include <stdio.h>
#include <stdlib.h>

#include "tools/kvq-bench/hop_engine.h"

int hop_context_open(struct hop_engine *e, char *text)
{
    struct hop_context *x = &e->context;
    const struct kvq_local_options options = {
        .size = sizeof options, .place = e->place, .flags = KVQ_LOCAL_REQUIRE};
    int rc = x->queue ? 0 : kvq_queue_open(e->client, &x->queue);
    rc = rc ? rc : kvq_local_open(x->queue, &options, &x->local);
    return hop_fault(rc, "attention in this context", text);
}

static void set_appends(struct hop_context *x, bool append)
{
    for (uint32_t i = 0; i < x->n_entries; i++)
        x->entries[i].append = append;
}

int hop_context_attend(struct hop_engine *e, uint32_t layer, bool append, char *text)
{
    struct hop_context *x = &e->context;
    struct kvq_work work = e->work;
    work.layer = layer;
    if (!append)
        work.k.buffer = work.v.buffer = NULL;
    int rc = kvq_local_attend_on_stream(x->local, x->bucket, &work, x->entries, x->n_entries,
                                        e->gpu->stream);
    return hop_fault_of(rc, x->entries, x->n_entries, "attending in this context", text);
}

// A step's attentions as a graph, for entries of any later step.
static int capture(struct hop_engine *e, char *text)
{
    const struct kvq_gpu_driver *d = &e->gpu->driver;
    struct kvq_gpu_graph *graph = NULL;
    int result = d->capture_begin(e->gpu->stream, KVQ_GPU_CAPTURE_RELAXED), rc = 0;
    set_appends(&e->context, true);
    for (uint32_t l = 0; result == KVQ_GPU_OK && rc == 0 && l < e->o->layers; l++)
        rc = hop_context_attend(e, l, true, text);
    result = result ? result : d->capture_end(e->gpu->stream, &graph);
    if (result == KVQ_GPU_OK && rc == 0)
        result = d->graph_ready(&e->context.step, graph, 0);
    if (graph)
        d->graph_destroy(graph);
    if (result && rc == 0)
        rc = kvq_gpu_fault(d, result, "capturing a step", text, HOP_TEXT);
    return rc;
}

int hop_context_fill(struct hop_engine *e, const struct hop_case *c, char *text)
{
    struct hop_context *x = &e->context;
    if (!x->local)
        return 0;
    x->entries = calloc(c->sessions, sizeof *x->entries);
    if (!x->entries) {
        snprintf(text, HOP_TEXT, "no memory");
        return -1;
    }
    int rc = hop_open_sessions(e, c, x->entries, &x->n_entries, text);
    for (uint32_t i = 0; rc == 0 && i < x->n_entries; i++)
        rc = hop_fault(kvq_local_add(x->local, x->entries[i].session), "mapping a session", text);
    const struct kvq_bucket_options options = {
        .size = sizeof options, .session = x->entries[0].session, .max_sessions = c->sessions};
    rc = rc ? rc : hop_fault(kvq_bucket_open(x->local, &options, &x->bucket), "a bucket", text);
    return rc ? rc : capture(e, text);
}

void hop_context_empty(struct hop_engine *e)
{
    struct hop_context *x = &e->context;
    if (x->local)
        kvq_local_abort(x->local);
    if (x->step)
        e->gpu->driver.exec_destroy(x->step);
    kvq_bucket_close(&x->bucket);
    while (x->n_entries > 0)
        kvq_session_close(e->client, x->entries[--x->n_entries].session);
    free(x->entries);
    x->entries = NULL;
    x->step = NULL;
}

void hop_context_close(struct hop_engine *e)
{
    hop_context_empty(e);
    kvq_local_close(&e->context.local);
    kvq_queue_close(&e->context.queue);
}

// ---- Steps ----

int hop_context_begin(struct hop_engine *e, bool append, char *text)
{
    struct hop_context *x = &e->context;
    set_appends(x, append);
    int rc =
        kvq_local_begin_on_stream(x->local, x->bucket, x->entries, x->n_entries, e->gpu->stream);
    return hop_fault_of(rc, x->entries, x->n_entries, "beginning a step in this context", text);
}

int hop_context_replay(struct hop_engine *e, char *text)
{
    const struct kvq_gpu_driver *d = &e->gpu->driver;
    int result = d->graph_launch(e->context.step, e->gpu->stream);
    return result ? kvq_gpu_fault(d, result, "replaying a step", text, HOP_TEXT) : 0;
}

// A step is over when the daemon has stored and published it: the stream of the next one's first
// work has waited for that.
static int await_published(struct hop_engine *e, char *text)
{
    const struct kvq_gpu_driver *d = &e->gpu->driver;
    int rc = hop_context_begin(e, false, text);
    int result = rc ? KVQ_GPU_OK : d->stream_sync(e->gpu->stream);
    kvq_local_abort(e->context.local);
    return result ? kvq_gpu_fault(d, result, "waiting for a step", text, HOP_TEXT) : rc;
}

int hop_context_end(struct hop_engine *e, bool append, char *text)
{
    struct hop_context *x = &e->context;
    if (!append) {
        kvq_local_abort(x->local);
        return 0;
    }
    int rc = kvq_local_end_on_stream(x->local, NULL, x->entries, x->n_entries, e->gpu->stream);
    rc = hop_fault_of(rc, x->entries, x->n_entries, "ending a step in this context", text);
    for (uint32_t i = 0; rc == 0 && i < x->n_entries; i++)
        x->entries[i].position = x->entries[i].value;
    return rc ? rc : await_published(e, text);
}
