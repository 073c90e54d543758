// SPDX-License-Identifier: Apache-2.0
//
// See work_stream.h.
#include "daemon/core/session/work_stream.h"

#include <assert.h>

#include "daemon/core/gpu/gate.h"
#include "daemon/core/session/stream_sync.h"
#include "daemon/core/session/table.h"
#include "proto/ring.h"

// ---- Life ----

// Makes only what an earlier attempt has not made: see kvq__work_stream_get.
static int open_own_streams(struct kvq__work_stream *stream)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    int result = kvq__gpu_enter(stream->gpu);
    if (!stream->gpu_stream)
        stream->alone = stream->alone || kvq__gpu_take_queues(stream->gpu);
    stream->use = stream->alone
                      ? &stream->own_use
                      : &stream->core->streams.common[kvq__gpu_index(stream->core, stream->gpu)];
    if (!stream->alone) {
        stream->gpu_stream = kvq__gpu_stream(stream->gpu, KVQ__GPU_STREAM_COMMON);
        stream->watch = kvq__gpu_stream(stream->gpu, KVQ__GPU_STREAM_COMMON_WATCH);
    }
    if (result == KVQ_GPU_OK && !stream->gpu_stream) {
        result = d->stream_create(&stream->gpu_stream, KVQ_GPU_STREAM_OWN);
        if (result == KVQ_GPU_OK)
            kvq__gate_add(kvq__gpu_gate(stream->gpu), stream->gpu, stream->gpu_stream);
    }
    if (result == KVQ_GPU_OK && !stream->watch)
        result = d->stream_create(&stream->watch, KVQ_GPU_STREAM_OWN);
    if (result == KVQ_GPU_OK && !stream->event)
        result = d->event_create(&stream->event, KVQ_GPU_EVENT_UNTIMED);
    // All of them now: where work has been enqueued, its number must not want for an event.
    bool by_events = !kvq__gpu_has_memory_ops(stream->gpu);
    for (uint32_t i = 0; by_events && result == KVQ_GPU_OK && i < KVQ_MAX_GPU_PENDING; i++)
        if (!stream->marks[i])
            result = d->event_create(&stream->marks[i], KVQ_GPU_EVENT_UNTIMED);
    return result;
}

static int open_host(const struct kvq_gpu_driver *d, size_t bytes, void **at)
{
    return *at ? KVQ_GPU_OK : d->host_alloc(at, bytes, KVQ_GPU_HOST_PORTABLE | KVQ_GPU_HOST_MAPPED);
}

static int open_device(const struct kvq_gpu_driver *d, size_t bytes, kvq_gpu_ptr *at)
{
    return *at ? KVQ_GPU_OK : d->memory_alloc(at, bytes);
}

static int open_stream_memory(struct kvq__work_stream *stream)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    const struct kvq__core_config *c = &stream->core->config;
    void *word = stream->word, *host = stream->host;
    int result = open_host(d, 4096, &word);
    stream->word = word;
    result = result ? result : d->host_device(&stream->word_at, word, 0);
    result = result ? result : open_host(d, c->work_stream_bytes, &host);
    stream->host = host;
    result = result ? result : open_device(d, c->work_stream_bytes, &stream->device);
    result = result ? result : open_device(d, c->work_stream_workspace, &stream->workspace);
    result = result ? result
                    : d->fill8(stream->workspace, 0, c->work_stream_workspace, stream->gpu_stream);
    if (result == KVQ_GPU_OK)
        *stream->word = 0;
    return result;
}

static void close_streams(struct kvq__work_stream *stream)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    if (stream->gpu_stream) { // its memory may still be being cleared
        d->stream_sync(stream->gpu_stream);
        if (stream->alone) {
            kvq__gate_remove(kvq__gpu_gate(stream->gpu), stream->gpu_stream);
            d->stream_destroy(stream->gpu_stream);
        }
    }
    if (stream->watch) { // its function may still run
        d->stream_sync(stream->watch);
        if (stream->alone)
            d->stream_destroy(stream->watch);
    }
    if (stream->event)
        d->event_destroy(stream->event);
    for (uint32_t i = 0; i < KVQ_MAX_GPU_PENDING; i++)
        if (stream->marks[i])
            d->event_destroy(stream->marks[i]);
}

static void stream_free(struct kvq__work_stream *stream)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    struct kvq__core *core = stream->core;
    assert(!stream->client && stream->n == 0 && stream->n_held == 0);
    kvq__gpu_enter(stream->gpu);
    close_streams(stream);
    if (stream->alone)
        kvq__gpu_give_queues(stream->gpu);
    if (stream->workspace)
        d->memory_free(stream->workspace);
    if (stream->device)
        d->memory_free(stream->device);
    if (stream->host)
        d->host_free(stream->host);
    if (stream->word)
        d->host_free(stream->word);
    kvq__deallocate(core, stream->pending, KVQ_MAX_GPU_PENDING * sizeof *stream->pending);
    kvq__deallocate(core, stream->held, KVQ__WORK_STREAM_HELD * sizeof *stream->held);
    kvq__deallocate(core, stream, sizeof *stream);
}

static int stream_open(struct kvq__work_stream *stream)
{
    struct kvq__core *core = stream->core;
    assert(!stream->ready && !stream->client);
    if (!stream->pending)
        stream->pending = kvq__allocate(core, KVQ_MAX_GPU_PENDING * sizeof *stream->pending);
    if (!stream->held)
        stream->held = kvq__allocate(core, KVQ__WORK_STREAM_HELD * sizeof *stream->held);
    if (!stream->pending || !stream->held)
        return KVQ_E_NO_MEMORY;
    int result = open_own_streams(stream);
    result = result ? result : open_stream_memory(stream);
    stream->ready = result == KVQ_GPU_OK;
    return result ? kvq__gpu_failed(stream->gpu, result, "making a client's stream") : 0;
}

// A spare work stream of this GPU, if possible one with streams of its own. NULL: there is none.
static struct kvq__work_stream *take_spare(struct kvq__core *core, const struct kvq__gpu *gpu)
{
    struct kvq__work_stream *stream, *spare = NULL;
    LIST_FOREACH (stream, &core->streams.spare, link)
        if (stream->gpu == gpu && (!spare || stream->alone))
            spare = stream;
    if (spare)
        LIST_REMOVE(spare, link);
    return spare;
}

static struct kvq__work_stream *stream_new(struct kvq__core *core, struct kvq__gpu *gpu)
{
    struct kvq__work_stream *stream = kvq__allocate(core, sizeof *stream);
    if (stream) {
        stream->core = core;
        stream->gpu = gpu;
    }
    return stream;
}

static size_t uses_bytes(const struct kvq__core *core)
{
    return (core->n_pools - 1) * sizeof *core->streams.common;
}

// Makes what all work streams share.
static bool open_common(struct kvq__core *core)
{
    if (!core->streams.common)
        core->streams.common = kvq__allocate(core, uses_bytes(core));
    if (!core->packing.queue)
        core->packing.queue = kvq__allocate(core, sizeof *core->packing.queue);
    if (core->packing.queue)
        core->packing.queue->core = core;
    return core->streams.common && core->packing.queue;
}

// A work stream that could not be made completely becomes a spare one, for the next attempt to go
// on with: freeing it would wait for the whole GPU.
int kvq__work_stream_get(struct kvq__client *client, struct kvq__gpu *gpu,
                         struct kvq__work_stream **out)
{
    struct kvq__core *core = client->core;
    struct kvq__work_stream **slot = &client->streams[kvq__gpu_index(core, gpu)];
    if (!open_common(core))
        return KVQ_E_NO_MEMORY;
    if (!*slot) {
        struct kvq__work_stream *stream = take_spare(core, gpu);
        stream = stream ? stream : stream_new(core, gpu);
        int error = !stream ? KVQ_E_NO_MEMORY : stream->ready ? 0 : stream_open(stream);
        if (error && stream)
            LIST_INSERT_HEAD(&core->streams.spare, stream, link);
        if (error)
            return error;
        stream->client = client;
        *slot = stream;
        LIST_INSERT_HEAD(&core->streams.used, stream, link);
    }
    assert((*slot)->ready && (*slot)->client == client && (*slot)->gpu == gpu);
    *out = *slot;
    return 0;
}

// Layers may still name the work stream as the one that has packed them. That stays right for its
// next client: the work has ended, and numbers go on.
static void spare(struct kvq__work_stream *stream)
{
    assert(!stream->client && stream->n == 0 && stream->n_held == 0);
    assert(stream->ended == stream->given);
    LIST_REMOVE(stream, link);
    LIST_INSERT_HEAD(&stream->core->streams.spare, stream, link);
}

void kvq__work_stream_leave(struct kvq__work_stream **pointer)
{
    struct kvq__work_stream *stream = *pointer;
    if (!stream)
        return;
    assert(stream->client && stream->n_held == 0);
    *pointer = NULL;
    stream->client = NULL;
    if (!kvq__work_stream_busy(stream))
        spare(stream);
}

void kvq__work_streams_drain(struct kvq__core *core)
{
    struct kvq__work_stream *stream;
    while ((stream = LIST_FIRST(&core->streams.used))) {
        if (kvq__gpu_enter(stream->gpu) == KVQ_GPU_OK)
            kvq__gpu_driver(stream->gpu)->stream_sync(stream->gpu_stream);
        kvq__work_stream_poll(stream);
        assert(LIST_FIRST(&core->streams.used) != stream);
    }
}

static void hush(const struct kvq__work_stream *stream)
{
    for (; stream; stream = LIST_NEXT(stream, link))
        if (stream->watch && kvq__gpu_enter(stream->gpu) == KVQ_GPU_OK)
            kvq__gpu_driver(stream->gpu)->stream_sync(stream->watch);
}

void kvq__work_streams_hush(struct kvq__core *core)
{
    hush(LIST_FIRST(&core->streams.used));
    hush(LIST_FIRST(&core->streams.spare));
}

void kvq__work_streams_close(struct kvq__core *core)
{
    struct kvq__work_stream *stream;
    assert(LIST_EMPTY(&core->streams.used));
    kvq__deallocate(core, core->packing.queue, sizeof *core->packing.queue);
    while ((stream = LIST_FIRST(&core->streams.spare))) {
        LIST_REMOVE(stream, link);
        stream_free(stream);
    }
    kvq__deallocate(core, core->streams.common, uses_bytes(core));
}

// ---- Operations under way ----

void kvq__work_stream_count(struct kvq__work_stream *stream, uint32_t ops)
{
    stream->open_ops += ops;
    stream->use->ops += ops;
}

// The operations that were counted since the last number end with this work.
static void take_ops(struct kvq__work_stream *stream, struct kvq__pending *p)
{
    assert(stream->use->ops >= stream->open_ops);
    p->ops += stream->open_ops;
    stream->open_ops = 0;
}

// ---- Chunks ----

// Contiguous free bytes from the tail on. Skips the end of the ring if it is too short for a chunk.
static uint64_t chunk_room(struct kvq__work_stream *stream)
{
    if (stream->n == 0)
        stream->head = stream->tail = 0;
    assert(stream->head <= stream->tail &&
           stream->tail - stream->head <= stream->core->config.work_stream_bytes);
    uint64_t all = stream->core->config.work_stream_bytes,
             free = all - (stream->tail - stream->head);
    uint64_t to_end = all - stream->tail % all;
    if (to_end < all / KVQ__CHUNKS && to_end < free) {
        stream->tail += to_end;
        free -= to_end;
        to_end = all;
    }
    return to_end < free ? to_end : free;
}

bool kvq__work_stream_open(struct kvq__work_stream *stream, struct kvq__queue *q)
{
    assert(stream->ready && !q->stream);
    uint64_t room = chunk_room(stream), all = stream->core->config.work_stream_bytes;
    if (kvq__work_stream_ops_left(stream) < KVQ_MAX_GPU_OPS / 2 || room < all / KVQ__CHUNKS ||
        stream->n + 1 >= KVQ_MAX_GPU_PENDING ||
        stream->n_held + q->header.count > KVQ__WORK_STREAM_HELD)
        return false;
    q->arena = stream->host + stream->tail % all;
    q->arena_bytes = room;
    q->arena_used = 0;
    q->stream = stream;
    kvq__work_stream_count(stream, KVQ__CHUNK_OPS);
    return true;
}

// The work stream goes on when the client's stream has come to its signal.
static int wait_for_client(struct kvq__work_stream *stream, struct kvq__queue *q)
{
    assert(stream->alone && q->timeline.gpu == stream->gpu);
    q->timeline.used = true;
    int result = kvq__stream_sync_await(stream, q);
    return result ? kvq__gpu_failed(stream->gpu, result, "waiting for a client") : 0;
}

int kvq__work_stream_open_for(struct kvq__queue *q)
{
    uint32_t i = kvq__gpu_index(q->core, q->gpu);
    struct kvq__work_stream *stream = q->client->streams[i];
    assert(stream); // from when the client opened a session there
    bool waits = (q->header.flags & KVQ_REQ_ON_STREAM) && !q->stream_noted;
    if (waits && !kvq__gate_enter(kvq__gpu_gate(q->gpu))) {
        q->gpu_wait = KVQ__GPU_GATE;
        return 0;
    }
    int opened = kvq__work_stream_open(stream, q);
    if (opened) {
        kvq__gpu_enter(q->gpu);
        q->stream_noted = true;
        int rc = waits ? wait_for_client(stream, q) : 0;
        opened = rc < 0 ? rc : 1;
    } else {
        q->given[i] = stream->given;
        q->gpu_wait = KVQ__GPU_ROOM;
    }
    if (waits)
        kvq__gate_leave(kvq__gpu_gate(q->gpu));
    return opened;
}

bool kvq__work_stream_again(struct kvq__queue *q)
{
    assert(q->stream);
    kvq__work_stream_close(q->stream, q, false);
    q->gpu_wait = KVQ__GPU_ROOM;
    return false;
}

bool kvq__work_stream_takes(struct kvq__queue *q)
{
    uint32_t i = kvq__gpu_index(q->core, q->timeline.gpu);
    const struct kvq__work_stream *stream = q->client->streams[i];
    assert(stream && stream->ended <= stream->given);
    if (stream->given - stream->ended < KVQ_MAX_GPU_PENDING &&
        kvq__work_stream_ops_left(stream) >= KVQ__CHUNK_OPS)
        return true;
    q->given[i] = stream->given;
    q->gpu_wait = KVQ__GPU_ROOM;
    return false;
}

int kvq__work_stream_copy(struct kvq__work_stream *stream, struct kvq__queue *q, size_t from)
{
    const uint8_t *host = q->arena + from;
    assert(q->stream == stream && from <= q->arena_used);
    if (q->arena_used == from)
        return 0;
    kvq__work_stream_count(stream, 1);
    int result = kvq__gpu_driver(stream->gpu)
                     ->copy_in(kvq__work_stream_at(stream, host), host, q->arena_used - from,
                               stream->gpu_stream);
    return result ? kvq__gpu_failed(stream->gpu, result, "handing work to the GPU") : 0;
}

// ---- What is held ----

static void take_holds(struct kvq__work_stream *stream, struct kvq__queue *q,
                       struct kvq__pending *p)
{
    for (uint32_t i = 0; i < q->header.count; i++) {
        struct kvq__entry *w = &q->work[i];
        if (!w->held)
            continue;
        uint32_t at = (stream->first_held + stream->n_held++) % KVQ__WORK_STREAM_HELD;
        assert(!w->exclusive && stream->n_held <= KVQ__WORK_STREAM_HELD);
        assert(w->session->refs > 0);
        stream->held[at] =
            (struct kvq__held){w->session, w->table, w->reading, w->tail_use, w->commits_on_gpu};
        w->held = w->tail_use = w->commits_on_gpu = false;
        w->reading = 0;
        w->table = NULL;
        p->n_held++;
    }
    p->buffers = q->held_buffers;
    q->held_buffers = (struct kvq__buffer_set){0};
    kvq__flight_move(stream->core, &q->flight, &p->flight);
}

// Enqueues the work stream's next number, for the pending work at `at`: a write of the word, or,
// without memory operations, an event.
static int write_number(struct kvq__work_stream *stream, uint32_t at)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    stream->given++;
    if (kvq__gpu_has_memory_ops(stream->gpu))
        return d->stream_write64(stream->gpu_stream, stream->word_at, stream->given, 0);
    return d->event_record(stream->marks[at], stream->gpu_stream);
}

// Gives work that was enqueued without a chunk a number of its own. If the ring of pending work is
// full it joins the last pending work.
static int number_alone(struct kvq__work_stream *stream, struct kvq__queue *q)
{
    bool full = stream->n == KVQ_MAX_GPU_PENDING;
    uint32_t at = (stream->first + stream->n - full) % KVQ_MAX_GPU_PENDING;
    assert(stream->n <= KVQ_MAX_GPU_PENDING);
    if (!full) {
        stream->pending[at] =
            (struct kvq__pending){.memory = stream->tail, .since = stream->core->now};
        stream->n++;
    }
    kvq__work_stream_count(stream, KVQ__CHUNK_OPS);
    take_ops(stream, &stream->pending[at]);
    int result = write_number(stream, at);
    stream->pending[at].number = stream->given;
    q->given[kvq__gpu_index(stream->core, stream->gpu)] = stream->given;
    return result;
}

void kvq__work_stream_signal(struct kvq__queue *q)
{
    struct kvq__gpu *gpu = q->timeline.gpu;
    struct kvq__work_stream *stream = q->client->streams[kvq__gpu_index(q->core, gpu)];
    assert(stream && stream->alone);
    q->timeline.used = true;
    int result = kvq__gpu_enter(gpu);
    result = result ? result : kvq__stream_sync_tell(stream, q);
    if (result == KVQ_GPU_OK && !q->stream)
        result = number_alone(stream, q);
    if (result) // the client's stream would wait for ever
        kvq__gpu_order_lost(gpu, result, "signalling a client");
}

int kvq__work_stream_close(struct kvq__work_stream *stream, struct kvq__queue *q, bool hold)
{
    uint32_t at = (stream->first + stream->n++) % KVQ_MAX_GPU_PENDING;
    struct kvq__pending *p = &stream->pending[at];
    assert(q->stream == stream && stream->n <= KVQ_MAX_GPU_PENDING);
    *p = (struct kvq__pending){.since = stream->core->now};
    take_ops(stream, p);
    stream->tail += (q->arena_used + 63) & ~(uint64_t)63;
    assert(stream->tail - stream->head <= stream->core->config.work_stream_bytes);
    int result = write_number(stream, at);
    p->number = stream->given;
    p->memory = stream->tail;
    q->given[kvq__gpu_index(stream->core, stream->gpu)] = stream->given;
    if (hold)
        take_holds(stream, q, p);
    q->stream = NULL;
    q->arena = q->own_arena;
    q->arena_bytes = q->own_arena_bytes;
    q->arena_used = 0;
    // Without the number the work would never be seen to end.
    return result ? kvq__gpu_order_lost(stream->gpu, result, "ending work on the GPU") : 0;
}

static void let_pending_go(struct kvq__work_stream *stream, struct kvq__pending *p)
{
    assert(stream->n_held >= p->n_held && p->number <= stream->ended);
    for (; p->n_held > 0; p->n_held--) {
        struct kvq__held *h = &stream->held[stream->first_held];
        stream->first_held = (stream->first_held + 1) % KVQ__WORK_STREAM_HELD;
        stream->n_held--;
        if (h->commits_on_gpu)
            h->session->core->up->gpu_commit(h->session, h->table, NULL);
        kvq__hold_end(h->session, h->reading, h->tail_use);
        if (h->table)
            kvq__table_unuse(h->table);
    }
    kvq__buffers_unuse(stream->client, &p->buffers);
    stream->head = p->memory;
    assert(stream->head <= stream->tail);
    assert(stream->use->ops >= p->ops);
    stream->use->ops -= p->ops;
    if (p->flight.number)
        kvq__flight_end(stream->core, &p->flight);
}

// How far the stream has come.
static uint64_t stream_progress(const struct kvq__work_stream *stream)
{
    if (kvq__gpu_has_memory_ops(stream->gpu))
        return kvq_word64_load_acquire(stream->word);
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    uint64_t ended = stream->ended;
    kvq__gpu_enter(stream->gpu);
    for (uint32_t i = 0; i < stream->n; i++) {
        uint32_t at = (stream->first + i) % KVQ_MAX_GPU_PENDING;
        if (d->event_query(stream->marks[at]) != KVQ_GPU_OK)
            break;
        ended = stream->pending[at].number;
    }
    return ended;
}

bool kvq__work_stream_poll(struct kvq__work_stream *stream)
{
    bool any = false;
    if (!kvq__work_stream_busy(stream))
        return false;
    stream->ended = stream_progress(stream);
    assert(stream->ended <= stream->given);
    while (stream->n > 0 && stream->pending[stream->first].number <= stream->ended) {
        struct kvq__pending *p = &stream->pending[stream->first];
        stream->first = (stream->first + 1) % KVQ_MAX_GPU_PENDING;
        stream->n--;
        let_pending_go(stream, p);
        any = true;
    }
    if (!stream->client && !kvq__work_stream_busy(stream))
        spare(stream);
    return any;
}

bool kvq__work_stream_stalls(struct kvq__work_stream *stream)
{
    const struct kvq__pending *p = &stream->pending[stream->first];
    assert(stream->n == 0 || p->since <= stream->core->now);
    if (stream->n == 0 || stream->stall_reported == p->number ||
        stream->core->now - p->since < stream->core->config.stall_ns)
        return false;
    stream->stall_reported = p->number;
    return true;
}

static bool is_shared(const struct kvq__session *s, const struct kvq__client *client)
{
    const struct kvq__handle *h;
    LIST_FOREACH (h, &s->handles, link)
        if (h->client != client)
            return true;
    return false;
}

static bool stream_packs(const struct kvq__work_stream *stream, const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (s->layers[i].pack_stream == stream &&
            !kvq__work_stream_ended(stream, s->layers[i].pack_number))
            return true;
    return false;
}

const struct kvq__session *kvq__work_stream_withholds(const struct kvq__work_stream *stream)
{
    const struct kvq__client *c = stream->client;
    assert(c);
    for (uint32_t i = 0; i < KVQ__HANDLE_CHUNKS && c->handles[i]; i++)
        for (uint32_t j = 0; j < KVQ__HANDLE_CHUNK; j++) {
            const struct kvq__session *s = c->handles[i][j].session;
            stream->core->lookup.looks += s != NULL;
            if (s && is_shared(s, c) && stream_packs(stream, s))
                return s;
        }
    return NULL;
}

// ---- Waking ----

// A thread of the driver's. The word is written last: the work stream may be gone right behind it.
static void on_watch(void *context)
{
    struct kvq__stream_use *use = context;
    void (*wake)(void *) = use->wake;
    void *wake_context = use->wake_context;
    kvq_word_store_release(&use->watching, 0);
    wake(wake_context);
}

bool kvq__work_stream_wake(struct kvq__work_stream *stream, void (*wake)(void *context),
                           void *context)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    if (!kvq__work_stream_busy(stream))
        return false;
    struct kvq__stream_use *use = stream->use;
    if (kvq_word_load_acquire(&use->watching))
        return true;
    use->wake = wake;
    use->wake_context = context;
    kvq_word_store_release(&use->watching, 1);
    int result = kvq__gpu_enter(stream->gpu);
    result = result ? result : d->event_record(stream->event, stream->gpu_stream);
    result = result ? result : d->stream_wait(stream->watch, stream->event, 0);
    result = result ? result : d->launch_host(stream->watch, on_watch, use);
    if (result) { // the next call asks again
        kvq_word_store_release(&use->watching, 0);
        kvq__gpu_failed(stream->gpu, result, "watching the GPU");
    }
    return true;
}
