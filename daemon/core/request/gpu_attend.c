// SPDX-License-Identifier: Apache-2.0
//
// Attention of a wave's entries on a GPU: one launch for all that have the same format and shape,
// or several where their partial results are more than the work stream's workspace holds. The
// results are the same to the bit: parts of a call stay on its kernels and keep its splits.
#include <assert.h>
#include <stdlib.h>

#include "daemon/core/request/gpu_wave.h"
#include "kernels/cuda/attend.h"

static_assert((int)KVQ_MAX_GPU_QUERIES == (int)KVQ_GPU_MAX_QUERIES,
              "the protocol promises what the kernels can");

// Entries of one format, shape and codebook, as a launch takes them.
struct batch {
    struct kvq_gpu_layer layer;
    struct kvq_attend *calls;
    uint64_t *shared;
};

static bool is_same_layer(const struct kvq_attend *a, const struct kvq_attend *b)
{
    return kvq_format_same(a->format, b->format) && kvq_shape_same(a->shape, b->shape) &&
           a->book->k == b->book->k && a->book->v == b->book->v &&
           a->book->smooth == b->book->smooth;
}

static struct kvq_gpu_layer gpu_layer_of(const struct kvq__queue *q, const struct kvq_attend *a)
{
    return (struct kvq_gpu_layer){
        a->format, a->shape, a->book->k || a->book->v ? a->book : NULL,
        kvq_gpu_attend_wide_rows(kvq__gpu_kernels(q->gpu), a->shape->k_dim), 0};
}

// ---- What sessions share ----

static int order_by_block(const void *a, const void *b)
{
    const struct kvq_attend *x = a, *y = b;
    uintptr_t p = x->n_pages ? (uintptr_t)x->pages[0].packed : 0;
    uintptr_t r = y->n_pages ? (uintptr_t)y->pages[0].packed : 0;
    return (p > r) - (p < r);
}

static uint64_t shared_tokens(const struct kvq_attend *a, const struct kvq_attend *b)
{
    return kvq_gpu_attend_common(a->pages, a->n_pages, b->pages, b->n_pages);
}

// ---- Launching ----

static int launch_attend(struct kvq__wave *wave, const struct batch *b,
                         const struct kvq_gpu_attend_limits *limits, uint32_t n)
{
    struct kvq__work_stream *stream = wave->stream;
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    size_t counters = (size_t)limits->tiles * b->layer.shape->kv_heads * sizeof(uint32_t);
    assert(n > 0);
    void *batch = kvq__wave_take(wave, kvq_gpu_attend_batch_bytes(limits));
    if (kvq_gpu_attend_fill(&b->layer, b->calls, b->shared, n, limits, batch, wave->text,
                            sizeof wave->text))
        return kvq__wave_launched(wave, 0, -1);
    struct kvq_gpu_attend_launch l = {.layer = b->layer,
                                      .limits = *limits,
                                      .batch = kvq__work_stream_at(stream, batch),
                                      .workspace = stream->workspace,
                                      .stream = stream->gpu_stream};
    int rc = kvq__wave_copy(wave);
    if (rc)
        return rc;
    int result = d->fill8(stream->workspace, 0, counters, stream->gpu_stream);
    if (result)
        return kvq__gpu_failed(stream->gpu, result, "preparing attention");
    const uint32_t kernels = (limits->narrow_items > 0) + (limits->wide_items > 0);
    return kvq__wave_launched(
        wave, 1 + kernels,
        kvq_gpu_attend(kvq__gpu_kernels(stream->gpu), &l, wave->text, sizeof wave->text));
}

// The first half of a call's queries, and the rest of them.
static void cut_queries(const struct kvq_attend *a, struct kvq_attend halves[2])
{
    uint32_t n = a->q_tokens / 2;
    assert(a->q_tokens > 1);
    halves[0] = halves[1] = *a;
    halves[0].q_tokens = n;
    halves[1].q_tokens = a->q_tokens - n;
    halves[1].q_start += n;
    halves[1].q.data = (const uint8_t *)a->q.data + (int64_t)n * a->q.token_stride;
    halves[1].out = (uint8_t *)a->out + (int64_t)n * a->out_token_stride;
    if (a->lse)
        halves[1].lse = (float *)(void *)((uint8_t *)a->lse + (int64_t)n * a->lse_token_stride);
}

// Halves work that needs more than the workspace: first the sessions, then a session's queries.
static int attend(struct kvq__wave *wave, const struct batch *b, uint32_t n)
{
    struct kvq_gpu_attend_limits needs;
    struct kvq_attend halves[2];
    if (kvq_gpu_attend_needs(&b->layer, b->calls, b->shared, n, &needs, wave->text,
                             sizeof wave->text))
        return kvq__wave_launched(wave, 0, -1);
    if (kvq_gpu_attend_workspace_bytes(&b->layer, &needs) <=
        wave->queue->core->config.work_stream_workspace)
        return launch_attend(wave, b, &needs, n);
    struct batch first = *b, rest = *b;
    uint32_t half = n / 2;
    assert(n > 1 || b->calls->q_tokens > 1); // kvq__gpu_attend_fits
    if (n == 1) {
        cut_queries(b->calls, halves);
        first.layer.wide_split = rest.layer.wide_split =
            kvq_gpu_attend_wide_split(&b->layer, b->calls);
        first.calls = &halves[0];
        rest.calls = &halves[1];
        first.shared = rest.shared = NULL;
        half = 1;
    } else {
        rest.calls += half;
        rest.shared += half;
        rest.shared[0] = 0;
    }
    int rc = attend(wave, &first, half);
    return rc ? rc : attend(wave, &rest, n == 1 ? 1 : n - half);
}

// ---- What calls take ----

// A window that has as many splits as `window`, wherever in a split that begins; 0: no window.
static uint32_t wider(uint32_t window)
{
    return window && window < KVQ_MAX_SESSION_TOKENS ? window + KVQ_GPU_WIDE_SPLIT_MAX : 0;
}

bool kvq__gpu_attend_fits(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq_entry_wire *e = &q->entries[i];
    const struct kvq__session *s = q->work[i].session;
    const struct kvq__layer *l = &s->layers[q->header.layer];
    struct kvq_shape shape = l->shape;
    const uint64_t past = q->work[i].past, tokens = past + e->append;
    const size_t room = q->core->config.work_stream_workspace;
    // No token has more splits than this, nor more counters than sums of two.
    const uint64_t splits = tokens / KVQ_GPU_SPLIT_MIN + 4;
    if (splits * shape.q_heads * (shape.k_dim + 2) * sizeof(float) + 256 <= room)
        return true;
    struct kvq_gpu_layer layer = {
        .format = l->format,
        .shape = &shape,
        .wide_rows = kvq_gpu_attend_wide_rows(kvq__gpu_kernels(s->pool->gpu), shape.k_dim)};
    struct kvq_attend call = {.past_tokens = past,
                              .step_tokens = e->append,
                              .q_start = tokens - (e->append ? e->queries : 0),
                              .q_tokens = e->queries};
    struct kvq_gpu_attend_limits needs;
    char text[KVQ_GPU_TEXT];
    layer.wide_split = kvq_gpu_attend_wide_split(&layer, &call);
    shape.window = wider(shape.window); // wherever the window ends within a split
    call.q_start = tokens - (e->append ? 1 : 0);
    call.q_tokens = 1; // queries can be cut down to one
    return kvq_gpu_attend_needs(&layer, &call, NULL, 1, &needs, text, sizeof text) == 0 &&
           kvq_gpu_attend_workspace_bytes(&layer, &needs) <= room;
}

// What the launches of one call take, as `attend` cuts the call.
struct cost {
    uint32_t launches;
    size_t batches; // bytes of the arena
};

static void add_costs(const struct kvq_gpu_layer *layer, const struct kvq_attend *call,
                      size_t workspace, struct cost *cost)
{
    struct kvq_gpu_attend_limits needs;
    struct kvq_attend halves[2];
    char text[KVQ_GPU_TEXT];
    int rc = kvq_gpu_attend_needs(layer, call, NULL, 1, &needs, text, sizeof text);
    assert(rc == 0); // the request was checked
    (void)rc;
    if (call->q_tokens > 1 && kvq_gpu_attend_workspace_bytes(layer, &needs) > workspace) {
        struct kvq_gpu_layer part = *layer;
        part.wide_split = kvq_gpu_attend_wide_split(layer, call);
        cut_queries(call, halves);
        add_costs(&part, &halves[0], workspace, cost);
        add_costs(&part, &halves[1], workspace, cost);
        return;
    }
    cost->launches++;
    cost->batches += kvq_gpu_attend_batch_bytes(&needs);
}

static struct cost cost_of(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq_attend *call = &q->work[i].attend.call;
    const struct kvq_gpu_layer layer = gpu_layer_of(q, call);
    struct cost cost = {0, 0};
    add_costs(&layer, call, q->core->config.work_stream_workspace, &cost);
    return cost;
}

// Sessions launched together take no more than each by itself.
size_t kvq__gpu_attend_room(const struct kvq__queue *q, uint32_t i)
{
    return cost_of(q, i).batches + sizeof(struct kvq_attend) + sizeof(uint64_t) + 256;
}

// A copy and zeros come before each launch, which is of one kernel: a session's rows are all narrow
// or all wide, also where they are cut. Sessions that are launched together may have both, and take
// less than each alone.
enum { OPS = 3 };

uint32_t kvq__gpu_attend_ops(const struct kvq__queue *q, uint32_t i)
{
    uint32_t launches = q->work[i].attend.call.q_tokens == 1 ? 1 : cost_of(q, i).launches;
    return launches * OPS;
}

// Moves all calls of the wave from `from` on that are of the layer of the first to the front.
// Returns how many.
static uint32_t gather_calls(struct kvq_attend *calls, uint32_t from, uint32_t n)
{
    uint32_t end = from + 1;
    assert(from < n);
    for (uint32_t i = end; i < n; i++)
        if (is_same_layer(&calls[from], &calls[i])) {
            struct kvq_attend moved = calls[i];
            calls[i] = calls[end];
            calls[end++] = moved;
        }
    return end - from;
}

int kvq__gpu_attend_wave(struct kvq__queue *q)
{
    struct kvq__wave wave;
    uint32_t room = kvq__wave_alive(q), n = 0, group;
    int rc = 0;
    kvq__wave_begin(&wave, q);
    struct kvq_attend *calls = kvq__wave_take(&wave, room * sizeof *calls);
    uint64_t *shared = kvq__wave_take(&wave, room * sizeof *shared);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (kvq__entry_alive(q, i))
            calls[n++] = q->work[i].attend.call;
    assert(n == room);
    for (uint32_t i = 0; rc == 0 && i < n; i += group) {
        group = gather_calls(calls, i, n);
        qsort(calls + i, group, sizeof *calls, order_by_block);
        for (uint32_t j = i; j < i + group; j++)
            shared[j] = j > i ? shared_tokens(&calls[j - 1], &calls[j]) : 0;
        for (uint32_t j = i; j < i + group; j++)
            calls[j].pages = kvq__wave_there(&wave, calls[j].pages);
        struct batch b = {gpu_layer_of(q, &calls[i]), calls + i, shared + i};
        rc = attend(&wave, &b, group);
    }
    return rc;
}
