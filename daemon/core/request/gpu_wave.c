// SPDX-License-Identifier: Apache-2.0
//
// See gpu_wave.h.
#include "daemon/core/request/gpu_wave.h"

#include <assert.h>
#include <string.h>

void *kvq__wave_take(struct kvq__wave *wave, size_t bytes)
{
    void *memory = kvq__arena_take(wave->queue, bytes);
    assert(memory);
    return memory;
}

void kvq__wave_begin_for(struct kvq__wave *wave, struct kvq__queue *q, uint32_t n)
{
    assert(q->stream && q->wave_start <= q->arena_used);
    *wave = (struct kvq__wave){.queue = q, .stream = q->stream, .copied = q->wave_start};
    wave->recipes = kvq__wave_take(wave, n * sizeof *wave->recipes);
    wave->formats = kvq__wave_take(wave, n * sizeof *wave->formats);
}

void kvq__wave_begin(struct kvq__wave *wave, struct kvq__queue *q)
{
    kvq__wave_begin_for(wave, q, q->wave_to - q->wave_from);
}

// Of the same format, and of shapes that differ in nothing that a recipe has.
static bool is_same(const struct kvq_recipe *a, const struct kvq_recipe *b)
{
    return a->dim == b->dim && a->kv_heads == b->kv_heads && a->dtype == b->dtype &&
           a->v.rotation == b->v.rotation && a->raw.strip_bytes == b->raw.strip_bytes;
}

const struct kvq_recipe *kvq__wave_recipe(struct kvq__wave *wave, const struct kvq__layer *l)
{
    struct kvq_recipe recipe = kvq_recipe_of(l->format, &l->shape);
    for (uint32_t i = 0; i < wave->n_recipes; i++)
        // Formats have one row for each name in a session, but not over sessions.
        if (kvq_format_same(wave->formats[i], l->format) && is_same(wave->recipes[i], &recipe))
            return wave->recipes[i];
    struct kvq_recipe *own = kvq__wave_take(wave, sizeof *own);
    memcpy(own, &recipe, sizeof recipe);
    wave->formats[wave->n_recipes] = l->format;
    wave->recipes[wave->n_recipes++] = own;
    return own;
}

const struct kvq_book *kvq__wave_book(struct kvq__wave *wave, const struct kvq__layer *l)
{
    if (!l->gpu_book.k && !l->gpu_book.v)
        return NULL;
    struct kvq_book *own = kvq__wave_take(wave, sizeof *own);
    *own = l->gpu_book;
    return own;
}

const void *kvq__wave_there(const struct kvq__wave *wave, const void *host)
{
    const uint8_t *from = wave->stream->host;
    assert(!host || ((const uint8_t *)host >= from &&
                     (const uint8_t *)host < from + wave->queue->core->config.work_stream_bytes));
    return host ? (const void *)(uintptr_t)kvq__work_stream_at(wave->stream, host) : NULL;
}

int kvq__wave_copy(struct kvq__wave *wave)
{
    assert(wave->copied <= wave->queue->arena_used);
    int rc = kvq__work_stream_copy(wave->stream, wave->queue, wave->copied);
    wave->copied = wave->queue->arena_used;
    return rc;
}

struct kvq_gpu_work kvq__wave_work(const struct kvq__wave *wave, uint32_t n)
{
    return (struct kvq_gpu_work){wave->recipes, wave->n_recipes, n, wave->stream->gpu_stream};
}

// Tells that the GPU refused a launch, at most once a second.
static void tell_refused(struct kvq__wave *wave)
{
    struct kvq__core *core = wave->queue->core;
    if (core->refusal_event_at && core->now - core->refusal_event_at < 1000000000)
        return;
    core->refusal_event_at = core->now ? core->now : 1;
    kvq__event(core, KVQ__EVENT_GPU_REFUSED, "", "",
               wave->stream->client ? wave->stream->client->id : 0, wave->text);
}

int kvq__wave_launched(struct kvq__wave *wave, uint32_t ops, int failed)
{
    struct kvq__work_stream *stream = wave->stream;
    kvq__work_stream_count(stream, ops);
    if (!failed)
        return 0;
    int result = kvq__gpu_driver(stream->gpu)->stream_query(stream->gpu_stream);
    if (result != KVQ_GPU_OK && result != KVQ_GPU_NOT_READY)
        return kvq__gpu_faulted(stream->gpu, wave->text);
    tell_refused(wave);
    return KVQ_E_UNSUPPORTED;
}
