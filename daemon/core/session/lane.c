// SPDX-License-Identifier: Apache-2.0
//
// See lane.h.
#include "daemon/core/session/lane.h"

#include <assert.h>

#include "daemon/core/session/stream_sync.h"
#include "daemon/core/session/table.h"
#include "proto/ring.h"

// ---- Life ----

// Makes only what an earlier attempt has not made: see kvq__lane_get.
static int open_lane_streams(struct kvq__lane *lane)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(lane->gpu);
    int result = kvq__gpu_enter(lane->gpu);
    if (!lane->stream)
        lane->alone = lane->alone || kvq__gpu_take_queues(lane->gpu);
    lane->use = lane->alone ? &lane->own_use
                            : &lane->core->common_use[kvq__gpu_index(lane->core, lane->gpu)];
    if (!lane->alone) {
        lane->stream = kvq__gpu_stream(lane->gpu, KVQ__GPU_STREAM_COMMON);
        lane->watch = kvq__gpu_stream(lane->gpu, KVQ__GPU_STREAM_COMMON_WATCH);
    }
    if (result == KVQ_GPU_OK && !lane->stream)
        result = d->stream_create(&lane->stream, KVQ_GPU_STREAM_OWN);
    if (result == KVQ_GPU_OK && !lane->watch)
        result = d->stream_create(&lane->watch, KVQ_GPU_STREAM_OWN);
    if (result == KVQ_GPU_OK && !lane->event)
        result = d->event_create(&lane->event, KVQ_GPU_EVENT_UNTIMED);
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

static int open_lane_memory(struct kvq__lane *lane)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(lane->gpu);
    const struct kvq__core_config *c = &lane->core->config;
    void *word = lane->word, *host = lane->host;
    int result = open_host(d, 4096, &word);
    lane->word = word;
    result = result ? result : d->host_device(&lane->word_at, word, 0);
    result = result ? result : open_host(d, c->lane_bytes, &host);
    lane->host = host;
    result = result ? result : open_device(d, c->lane_bytes, &lane->device);
    result = result ? result : open_device(d, c->lane_workspace, &lane->workspace);
    result = result ? result : d->fill8(lane->workspace, 0, c->lane_workspace, lane->stream);
    if (result == KVQ_GPU_OK)
        *lane->word = 0;
    return result;
}

static void close_streams(struct kvq__lane *lane)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(lane->gpu);
    if (lane->stream) { // its memory may still be being cleared
        d->stream_sync(lane->stream);
        if (lane->alone)
            d->stream_destroy(lane->stream);
    }
    if (lane->watch) { // its function may still run
        d->stream_sync(lane->watch);
        if (lane->alone)
            d->stream_destroy(lane->watch);
    }
    if (lane->event)
        d->event_destroy(lane->event);
    for (uint32_t i = 0; i < KVQ_MAX_GPU_PENDING; i++)
        if (lane->marks[i])
            d->event_destroy(lane->marks[i]);
}

static void lane_free(struct kvq__lane *lane)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(lane->gpu);
    struct kvq__core *core = lane->core;
    assert(!lane->client && lane->n == 0 && lane->n_held == 0);
    kvq__gpu_enter(lane->gpu);
    close_streams(lane);
    if (lane->alone)
        kvq__gpu_give_queues(lane->gpu);
    if (lane->workspace)
        d->memory_free(lane->workspace);
    if (lane->device)
        d->memory_free(lane->device);
    if (lane->host)
        d->host_free(lane->host);
    if (lane->word)
        d->host_free(lane->word);
    kvq__deallocate(core, lane->pending, KVQ_MAX_GPU_PENDING * sizeof *lane->pending);
    kvq__deallocate(core, lane->held, KVQ__LANE_HELD * sizeof *lane->held);
    kvq__deallocate(core, lane, sizeof *lane);
}

static int lane_open(struct kvq__lane *lane)
{
    struct kvq__core *core = lane->core;
    assert(!lane->ready && !lane->client);
    if (!lane->pending)
        lane->pending = kvq__allocate(core, KVQ_MAX_GPU_PENDING * sizeof *lane->pending);
    if (!lane->held)
        lane->held = kvq__allocate(core, KVQ__LANE_HELD * sizeof *lane->held);
    if (!lane->pending || !lane->held)
        return KVQ_E_NO_MEMORY;
    int result = open_lane_streams(lane);
    result = result ? result : open_lane_memory(lane);
    lane->ready = result == KVQ_GPU_OK;
    return result ? kvq__gpu_failed(lane->gpu, result, "making a client's stream") : 0;
}

// A spare lane of this GPU, if possible one with streams of its own. NULL: there is none.
static struct kvq__lane *take_spare(struct kvq__core *core, const struct kvq__gpu *gpu)
{
    struct kvq__lane *lane, *spare = NULL;
    LIST_FOREACH (lane, &core->spare_lanes, link)
        if (lane->gpu == gpu && (!spare || lane->alone))
            spare = lane;
    if (spare)
        LIST_REMOVE(spare, link);
    return spare;
}

static struct kvq__lane *lane_new(struct kvq__core *core, struct kvq__gpu *gpu)
{
    struct kvq__lane *lane = kvq__allocate(core, sizeof *lane);
    if (lane) {
        lane->core = core;
        lane->gpu = gpu;
    }
    return lane;
}

static size_t uses_bytes(const struct kvq__core *core)
{
    return (core->n_pools - 1) * sizeof *core->common_use;
}

// Makes what all lanes share.
static bool open_common(struct kvq__core *core)
{
    if (!core->common_use)
        core->common_use = kvq__allocate(core, uses_bytes(core));
    if (!core->background)
        core->background = kvq__allocate(core, sizeof *core->background);
    if (core->background)
        core->background->core = core;
    return core->common_use && core->background;
}

// A lane that could not be made completely becomes a spare one, for the next attempt to go on with:
// freeing it would wait for the whole GPU.
int kvq__lane_get(struct kvq__client *client, struct kvq__gpu *gpu, struct kvq__lane **out)
{
    struct kvq__core *core = client->core;
    struct kvq__lane **slot = &client->lanes[kvq__gpu_index(core, gpu)];
    if (!open_common(core))
        return KVQ_E_NO_MEMORY;
    if (!*slot) {
        struct kvq__lane *lane = take_spare(core, gpu);
        lane = lane ? lane : lane_new(core, gpu);
        int error = !lane ? KVQ_E_NO_MEMORY : lane->ready ? 0 : lane_open(lane);
        if (error && lane)
            LIST_INSERT_HEAD(&core->spare_lanes, lane, link);
        if (error)
            return error;
        lane->client = client;
        *slot = lane;
        LIST_INSERT_HEAD(&core->lanes, lane, link);
    }
    assert((*slot)->ready && (*slot)->client == client && (*slot)->gpu == gpu);
    *out = *slot;
    return 0;
}

// Layers may still name the lane as the one that has packed them. That stays right for its next
// client: the work has ended, and numbers go on.
static void spare(struct kvq__lane *lane)
{
    assert(!lane->client && lane->n == 0 && lane->n_held == 0);
    assert(lane->ended == lane->given);
    LIST_REMOVE(lane, link);
    LIST_INSERT_HEAD(&lane->core->spare_lanes, lane, link);
}

void kvq__lane_leave(struct kvq__lane **pointer)
{
    struct kvq__lane *lane = *pointer;
    if (!lane)
        return;
    assert(lane->client && lane->n_held == 0);
    *pointer = NULL;
    lane->client = NULL;
    if (!kvq__lane_busy(lane))
        spare(lane);
}

void kvq__lanes_drain(struct kvq__core *core)
{
    struct kvq__lane *lane;
    while ((lane = LIST_FIRST(&core->lanes))) {
        if (kvq__gpu_enter(lane->gpu) == KVQ_GPU_OK)
            kvq__gpu_driver(lane->gpu)->stream_sync(lane->stream);
        kvq__lane_poll(lane);
        assert(LIST_FIRST(&core->lanes) != lane);
    }
}

static void hush(const struct kvq__lane *lane)
{
    for (; lane; lane = LIST_NEXT(lane, link))
        if (lane->watch && kvq__gpu_enter(lane->gpu) == KVQ_GPU_OK)
            kvq__gpu_driver(lane->gpu)->stream_sync(lane->watch);
}

void kvq__lanes_hush(struct kvq__core *core)
{
    hush(LIST_FIRST(&core->lanes));
    hush(LIST_FIRST(&core->spare_lanes));
}

void kvq__lanes_close(struct kvq__core *core)
{
    struct kvq__lane *lane;
    assert(LIST_EMPTY(&core->lanes));
    kvq__deallocate(core, core->background, sizeof *core->background);
    while ((lane = LIST_FIRST(&core->spare_lanes))) {
        LIST_REMOVE(lane, link);
        lane_free(lane);
    }
    kvq__deallocate(core, core->common_use, uses_bytes(core));
}

// ---- Operations under way ----

void kvq__lane_count(struct kvq__lane *lane, uint32_t ops)
{
    lane->open_ops += ops;
    lane->use->ops += ops;
}

// The operations that were counted since the last number end with this work.
static void take_ops(struct kvq__lane *lane, struct kvq__pending *p)
{
    assert(lane->use->ops >= lane->open_ops);
    p->ops += lane->open_ops;
    lane->open_ops = 0;
}

// ---- Chunks ----

// Contiguous free bytes from the tail on. Skips the end of the ring if it is too short for a chunk.
static uint64_t chunk_room(struct kvq__lane *lane)
{
    if (lane->n == 0)
        lane->head = lane->tail = 0;
    assert(lane->head <= lane->tail && lane->tail - lane->head <= lane->core->config.lane_bytes);
    uint64_t all = lane->core->config.lane_bytes, free = all - (lane->tail - lane->head);
    uint64_t to_end = all - lane->tail % all;
    if (to_end < all / KVQ__CHUNKS && to_end < free) {
        lane->tail += to_end;
        free -= to_end;
        to_end = all;
    }
    return to_end < free ? to_end : free;
}

bool kvq__lane_open(struct kvq__lane *lane, struct kvq__queue *q)
{
    assert(lane->ready && !q->lane);
    uint64_t room = chunk_room(lane), all = lane->core->config.lane_bytes;
    if (kvq__lane_ops_left(lane) < KVQ_MAX_GPU_OPS / 2 || room < all / KVQ__CHUNKS ||
        lane->n + 1 >= KVQ_MAX_GPU_PENDING || lane->n_held + q->header.count > KVQ__LANE_HELD)
        return false;
    q->arena = lane->host + lane->tail % all;
    q->arena_bytes = room;
    q->arena_used = 0;
    q->lane = lane;
    kvq__lane_count(lane, KVQ__CHUNK_OPS);
    return true;
}

// The lane goes on when the client's stream has come to its signal.
static int wait_for_client(struct kvq__lane *lane, struct kvq__queue *q)
{
    bool waits = (q->header.flags & KVQ_REQ_ON_STREAM) && !q->told;
    q->told = true;
    if (!waits)
        return 0;
    assert(lane->alone && q->timeline.gpu == lane->gpu);
    q->timeline.used = true;
    int result = kvq__stream_sync_await(lane, q);
    return result ? kvq__gpu_failed(lane->gpu, result, "waiting for a client") : 0;
}

bool kvq__lane_open_for(struct kvq__queue *q)
{
    uint32_t i = kvq__gpu_index(q->core, q->gpu);
    struct kvq__lane *lane = q->client->lanes[i];
    assert(lane); // from when the client opened a session there
    if (kvq__lane_open(lane, q)) {
        kvq__gpu_enter(q->gpu);
        wait_for_client(lane, q);
        return true;
    }
    q->given[i] = lane->given;
    q->gpu_wait = KVQ__GPU_ROOM;
    return false;
}

bool kvq__lane_again(struct kvq__queue *q)
{
    assert(q->lane);
    kvq__lane_close(q->lane, q, false);
    q->gpu_wait = KVQ__GPU_ROOM;
    return false;
}

bool kvq__lane_takes(struct kvq__queue *q)
{
    uint32_t i = kvq__gpu_index(q->core, q->timeline.gpu);
    const struct kvq__lane *lane = q->client->lanes[i];
    assert(lane && lane->ended <= lane->given);
    if (lane->given - lane->ended < KVQ_MAX_GPU_PENDING &&
        kvq__lane_ops_left(lane) >= KVQ__CHUNK_OPS)
        return true;
    q->given[i] = lane->given;
    q->gpu_wait = KVQ__GPU_ROOM;
    return false;
}

int kvq__lane_copy(struct kvq__lane *lane, struct kvq__queue *q, size_t from)
{
    const uint8_t *host = q->arena + from;
    assert(q->lane == lane && from <= q->arena_used);
    if (q->arena_used == from)
        return 0;
    kvq__lane_count(lane, 1);
    int result = kvq__gpu_driver(lane->gpu)->copy_in(kvq__lane_at(lane, host), host,
                                                     q->arena_used - from, lane->stream);
    return result ? kvq__gpu_failed(lane->gpu, result, "handing work to the GPU") : 0;
}

// ---- What is held ----

static void take_holds(struct kvq__lane *lane, struct kvq__queue *q, struct kvq__pending *p)
{
    for (uint32_t i = 0; i < q->header.count; i++) {
        struct kvq__entry *w = &q->work[i];
        if (!w->pinned)
            continue;
        uint32_t at = (lane->first_held + lane->n_held++) % KVQ__LANE_HELD;
        assert(!w->exclusive && lane->n_held <= KVQ__LANE_HELD);
        assert(w->session->refs > 0);
        lane->held[at] =
            (struct kvq__held){w->session, w->table, w->reading, w->tail_use, w->settles};
        w->pinned = w->reading = w->tail_use = w->settles = false;
        w->table = NULL;
        p->n_held++;
    }
    p->buffers = q->held_buffers;
    q->held_buffers = (struct kvq__buffer_set){0};
    kvq__flight_move(lane->core, &q->flight, &p->flight);
}

// Enqueues the lane's next number, for the pending work at `at`: a write of the word, or, without
// memory operations, an event.
static int write_number(struct kvq__lane *lane, uint32_t at)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(lane->gpu);
    lane->given++;
    if (kvq__gpu_has_memory_ops(lane->gpu))
        return d->stream_write64(lane->stream, lane->word_at, lane->given, 0);
    int result = lane->marks[at] ? 0 : d->event_create(&lane->marks[at], KVQ_GPU_EVENT_UNTIMED);
    return result ? result : d->event_record(lane->marks[at], lane->stream);
}

// Gives work that was enqueued without a chunk a number of its own. If the ring of pending work is
// full it joins the last pending work.
static int number_alone(struct kvq__lane *lane, struct kvq__queue *q)
{
    bool full = lane->n == KVQ_MAX_GPU_PENDING;
    uint32_t at = (lane->first + lane->n - full) % KVQ_MAX_GPU_PENDING;
    assert(lane->n <= KVQ_MAX_GPU_PENDING);
    if (!full) {
        lane->pending[at] = (struct kvq__pending){.memory = lane->tail, .since = lane->core->now};
        lane->n++;
    }
    kvq__lane_count(lane, KVQ__CHUNK_OPS);
    take_ops(lane, &lane->pending[at]);
    int result = write_number(lane, at);
    lane->pending[at].number = lane->given;
    q->given[kvq__gpu_index(lane->core, lane->gpu)] = lane->given;
    return result;
}

void kvq__lane_signal(struct kvq__queue *q)
{
    struct kvq__gpu *gpu = q->timeline.gpu;
    struct kvq__lane *lane = q->client->lanes[kvq__gpu_index(q->core, gpu)];
    assert(lane && lane->alone);
    q->timeline.used = true;
    int result = kvq__gpu_enter(gpu);
    result = result ? result : kvq__stream_sync_tell(lane, q);
    if (result == KVQ_GPU_OK && !q->lane)
        result = number_alone(lane, q);
    if (result)
        kvq__gpu_failed(gpu, result, "signalling a client");
}

int kvq__lane_close(struct kvq__lane *lane, struct kvq__queue *q, bool hold)
{
    uint32_t at = (lane->first + lane->n++) % KVQ_MAX_GPU_PENDING;
    struct kvq__pending *p = &lane->pending[at];
    assert(q->lane == lane && lane->n <= KVQ_MAX_GPU_PENDING);
    *p = (struct kvq__pending){.since = lane->core->now};
    take_ops(lane, p);
    lane->tail += (q->arena_used + 63) & ~(uint64_t)63;
    assert(lane->tail - lane->head <= lane->core->config.lane_bytes);
    int result = write_number(lane, at);
    p->number = lane->given;
    p->memory = lane->tail;
    q->given[kvq__gpu_index(lane->core, lane->gpu)] = lane->given;
    if (hold)
        take_holds(lane, q, p);
    q->lane = NULL;
    q->arena = q->own_arena;
    q->arena_bytes = q->own_arena_bytes;
    q->arena_used = 0;
    return result ? kvq__gpu_failed(lane->gpu, result, "ending work on the GPU") : 0;
}

static void let_pending_go(struct kvq__lane *lane, struct kvq__pending *p)
{
    assert(lane->n_held >= p->n_held && p->number <= lane->ended);
    for (; p->n_held > 0; p->n_held--) {
        struct kvq__held *h = &lane->held[lane->first_held];
        lane->first_held = (lane->first_held + 1) % KVQ__LANE_HELD;
        lane->n_held--;
        if (h->settles)
            h->session->core->up->gpu_commit(h->session, h->table, NULL);
        kvq__hold_end(h->session, h->reading, h->tail_use);
        if (h->table)
            kvq__table_unuse(h->table);
    }
    kvq__buffers_unuse(lane->client, &p->buffers);
    lane->head = p->memory;
    assert(lane->head <= lane->tail);
    assert(lane->use->ops >= p->ops);
    lane->use->ops -= p->ops;
    if (p->flight.number)
        kvq__flight_end(lane->core, &p->flight);
}

// How far the stream has come.
static uint64_t stream_progress(const struct kvq__lane *lane)
{
    if (kvq__gpu_has_memory_ops(lane->gpu))
        return kvq_word64_load_acquire(lane->word);
    const struct kvq_gpu_driver *d = kvq__gpu_driver(lane->gpu);
    uint64_t ended = lane->ended;
    kvq__gpu_enter(lane->gpu);
    for (uint32_t i = 0; i < lane->n; i++) {
        uint32_t at = (lane->first + i) % KVQ_MAX_GPU_PENDING;
        if (d->event_query(lane->marks[at]) != KVQ_GPU_OK)
            break;
        ended = lane->pending[at].number;
    }
    return ended;
}

bool kvq__lane_poll(struct kvq__lane *lane)
{
    bool any = false;
    if (!kvq__lane_busy(lane))
        return false;
    lane->ended = stream_progress(lane);
    assert(lane->ended <= lane->given);
    while (lane->n > 0 && lane->pending[lane->first].number <= lane->ended) {
        struct kvq__pending *p = &lane->pending[lane->first];
        lane->first = (lane->first + 1) % KVQ_MAX_GPU_PENDING;
        lane->n--;
        let_pending_go(lane, p);
        any = true;
    }
    if (!lane->client && !kvq__lane_busy(lane))
        spare(lane);
    return any;
}

bool kvq__lane_stalls(struct kvq__lane *lane)
{
    const struct kvq__pending *p = &lane->pending[lane->first];
    assert(lane->n == 0 || p->since <= lane->core->now);
    if (lane->n == 0 || lane->told == p->number ||
        lane->core->now - p->since < lane->core->config.stall_ns)
        return false;
    lane->told = p->number;
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

static bool lane_packs(const struct kvq__lane *lane, const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (s->layers[i].pack_lane == lane && !kvq__lane_ended(lane, s->layers[i].pack_number))
            return true;
    return false;
}

const struct kvq__session *kvq__lane_withholds(const struct kvq__lane *lane)
{
    const struct kvq__client *c = lane->client;
    assert(c);
    for (uint32_t i = 0; i < KVQ__HANDLE_CHUNKS && c->handles[i]; i++)
        for (uint32_t j = 0; j < KVQ__HANDLE_CHUNK; j++) {
            const struct kvq__session *s = c->handles[i][j].session;
            lane->core->lookup.looks += s != NULL;
            if (s && is_shared(s, c) && lane_packs(lane, s))
                return s;
        }
    return NULL;
}

// ---- Waking ----

// A thread of the driver's. The word is written last: the lane may be gone right behind it.
static void on_watch(void *context)
{
    struct kvq__stream_use *use = context;
    void (*wake)(void *) = use->wake;
    void *wake_context = use->wake_context;
    kvq_word_store_release(&use->watching, 0);
    wake(wake_context);
}

bool kvq__lane_wake(struct kvq__lane *lane, void (*wake)(void *context), void *context)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(lane->gpu);
    if (!kvq__lane_busy(lane))
        return false;
    struct kvq__stream_use *use = lane->use;
    if (kvq_word_load_acquire(&use->watching))
        return true;
    use->wake = wake;
    use->wake_context = context;
    kvq_word_store_release(&use->watching, 1);
    int result = kvq__gpu_enter(lane->gpu);
    result = result ? result : d->event_record(lane->event, lane->stream);
    result = result ? result : d->stream_wait(lane->watch, lane->event, 0);
    result = result ? result : d->launch_host(lane->watch, on_watch, use);
    if (result)
        kvq__gpu_failed(lane->gpu, result, "watching the GPU");
    return true;
}
