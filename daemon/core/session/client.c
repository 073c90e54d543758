// SPDX-License-Identifier: Apache-2.0
//
// Clients and what belongs to them: handles, buffers, queues.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/session/table.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// ---- Clients ----

// Where the generations of an attachment's handles start: far from those of any other, of this run
// or of one before, so that a handle of an earlier attachment is stale in a later one. Odd steps
// visit every number, and the golden ratio's keep all of them apart.
static uint32_t first_generation(uint64_t run, uint64_t client)
{
    assert(client > 0);
    uint32_t start = (uint32_t)(run * 0xbf58476d1ce4e5b9ull >> 32);
    uint32_t generation = start + (uint32_t)client * 0x9e3779b9u;
    return generation ? generation : 1;
}

int kvq__client_attach(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                       struct kvq__client **out, uint64_t *id, char *text)
{
    assert(TAILQ_EMPTY(&core->clients) == (core->n_clients == 0));
    *out = NULL;
    if (core->draining)
        return kvq__fail(text, KVQ_E_DRAINING, "the daemon is shutting down; nobody can attach");
    if (core->n_clients >= KVQ_MAX_CLIENTS)
        return kvq__fail(text, KVQ_E_LIMIT, "%u clients are attached, the most there can be",
                         core->n_clients);
    struct kvq__client *c = kvq__allocate(core, sizeof *c);
    if (!c)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for another client");
    c->core = core;
    c->peer = *peer;
    c->id = ++core->last.client;
    c->first_generation = first_generation(core->config.run, c->id);
    c->connected_at = core->now;
    snprintf(c->name, sizeof c->name, "%s", name ? name : "");
    LIST_INIT(&c->free_handles);
    LIST_INIT(&c->tables);
    TAILQ_INSERT_TAIL(&core->clients, c, link);
    core->n_clients++;
    *id = c->id;
    *out = c;
    kvq__event(core, KVQ__EVENT_CLIENT_ATTACHED, "", "", c->id, c->name);
    return 0;
}

static void client_free(struct kvq__client *c)
{
    assert(c->detached && c->n_queues == 0 && c->n_buffers == 0 && c->buffer_bytes == 0);
    for (uint32_t i = 0; i < KVQ_MAX_GPUS; i++)
        kvq__work_stream_leave(&c->streams[i]);
    for (uint32_t i = 0; i < KVQ__HANDLE_CHUNKS; i++)
        kvq__deallocate(c->core, c->handles[i], KVQ__HANDLE_CHUNK * sizeof **c->handles);
    kvq__deallocate(c->core, c, sizeof *c);
}

static void close_handles(struct kvq__client *c)
{
    for (uint32_t i = 0; i < KVQ__HANDLE_CHUNKS && c->handles[i]; i++)
        for (uint32_t j = 0; j < KVQ__HANDLE_CHUNK; j++)
            if (c->handles[i][j].used)
                kvq__handle_close(&c->handles[i][j]);
}

static void buffer_forget(struct kvq__client *client, struct kvq__buffer *b)
{
    struct kvq__core_config *config = &client->core->config;
    uint32_t id = b->id;
    void *owner = b->memory.owner;
    assert(b->id && b->removed && b->uses == 0);
    assert(client->n_buffers > 0 && client->buffer_bytes >= b->memory.bytes);
    b->id = 0;
    client->n_buffers--;
    client->buffer_bytes -= b->memory.bytes;
    if (config->buffer_gone)
        config->buffer_gone(config->context, owner, id);
}

static void buffer_retire(struct kvq__client *c, struct kvq__buffer *b)
{
    assert(b->id && !b->removed);
    b->removed = true;
    if (b->uses == 0)
        buffer_forget(c, b);
}

void kvq__client_distrust(struct kvq__client *c)
{
    c->faulty = true;
}

void kvq__client_leave(struct kvq__client *c)
{
    assert(!c->detached);
    c->gone = true;
    close_handles(c);
    kvq__tables_close(c);
    kvq__exports_drop(c);
    assert(c->n_steps == 0 && c->n_handles == 0);
}

void kvq__client_detach(struct kvq__client *c)
{
    struct kvq__core *core = c->core;
    kvq__client_leave(c);
    c->detached = true;
    for (uint32_t i = 0; i < KVQ_MAX_BUFFERS; i++)
        if (c->buffers[i].id && !c->buffers[i].removed)
            buffer_retire(c, &c->buffers[i]);
    TAILQ_REMOVE(&core->clients, c, link);
    assert(core->n_clients > 0);
    core->n_clients--;
    kvq__event(core, KVQ__EVENT_CLIENT_GONE, "", "", c->id, c->name);
    if (c->n_queues == 0)
        client_free(c);
}

// ---- Queues ----

int kvq__queue_open(struct kvq__client *client, struct kvq__queue **out, char *text)
{
    struct kvq__core *core = client->core;
    assert(!client->gone);
    *out = NULL;
    if (client->n_queues >= KVQ_MAX_QUEUES)
        return kvq__fail(text, KVQ_E_LIMIT,
                         "this client has %u queues, the most it can have; close some, or connect "
                         "another client",
                         client->n_queues);
    struct kvq__queue *q = kvq__allocate(core, sizeof *q);
    if (!q)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for another queue");
    q->own_arena_bytes = q->arena_bytes = KVQ__ARENA_BYTES + core->config.partial_bytes;
    q->own_arena = q->arena = kvq__allocate(core, q->arena_bytes);
    if (!q->arena) {
        kvq__deallocate(core, q, sizeof *q);
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for another queue");
    }
    q->core = core;
    q->client = client;
    client->n_queues++;
    *out = q;
    return 0;
}

// Of those that were begun through it. Requests of other queues may be under way in them, as where
// one of these aborts a step.
static void undo_steps(const struct kvq__queue *q)
{
    assert(q->own_step.number == 0);
    for (uint32_t i = 0; i < KVQ_MAX_STEPS; i++) {
        struct kvq__step *step = &q->client->steps[i];
        while (step->number && step->queue == q)
            q->core->up->step_leave(LIST_FIRST(&step->sessions));
    }
}

void kvq__queue_close(struct kvq__queue **pointer)
{
    struct kvq__queue *q = *pointer;
    if (!q)
        return;
    assert(!q->busy && q->flight.number == 0 && kvq__queue_gpu_idle(q));
    *pointer = NULL;
    struct kvq__client *client = q->client;
    struct kvq__core *core = q->core;
    undo_steps(q);
    kvq__deallocate(core, q->own_arena, q->own_arena_bytes);
    kvq__deallocate(core, q, sizeof *q);
    assert(client->n_queues > 0);
    if (--client->n_queues == 0 && client->detached)
        client_free(client);
}

bool kvq__queue_gpu_idle(const struct kvq__queue *q)
{
    for (uint32_t i = 0; i + 1 < q->core->n_pools; i++)
        if (!kvq__work_stream_ended(q->client->streams[i], q->given[i]))
            return false;
    return true;
}

// ---- Buffers ----

// An id is the slot below, a generation above, so that a stale id never names another buffer.
enum { SLOT_BITS = 8 };
static_assert(1 << SLOT_BITS == KVQ_MAX_BUFFERS, "slots fit their bits");

int kvq__buffer_add(struct kvq__client *client, const struct kvq__buffer_memory *memory,
                    uint32_t *id, char *text)
{
    uint32_t slot = 0;
    uint64_t bytes = memory->bytes;
    if (bytes == 0 || bytes > KVQ_MAX_BUFFER_BYTES)
        return kvq__fail(text, KVQ_E_LIMIT, "a buffer of %llu bytes; it can have 1 to %llu",
                         (unsigned long long)bytes, KVQ_MAX_BUFFER_BYTES);
    while (slot < KVQ_MAX_BUFFERS && client->buffers[slot].id)
        slot++;
    if (slot == KVQ_MAX_BUFFERS)
        return kvq__fail(text, KVQ_E_LIMIT,
                         "this client has %u buffers, the most it can have; close some, or use "
                         "offsets into larger ones",
                         client->n_buffers);
    struct kvq__buffer *b = &client->buffers[slot];
    assert(b->uses == 0 && client->n_buffers < KVQ_MAX_BUFFERS);
    uint32_t generation = (b->generation + 1) & (UINT32_MAX >> SLOT_BITS);
    *b = (struct kvq__buffer){.generation = generation ? generation : 1};
    b->id = b->generation << SLOT_BITS | slot;
    b->memory = *memory;
    client->n_buffers++;
    client->buffer_bytes += bytes;
    *id = b->id;
    return 0;
}

struct kvq__buffer *kvq__buffer_get(struct kvq__client *client, uint32_t id)
{
    struct kvq__buffer *b = &client->buffers[id % KVQ_MAX_BUFFERS];
    return id && b->id == id && !b->removed ? b : NULL;
}

int kvq__buffer_remove(struct kvq__client *client, uint32_t id, char *text)
{
    struct kvq__buffer *b = kvq__buffer_get(client, id);
    if (!b)
        return kvq__fail(text, KVQ_E_BUFFER, "buffer %u is none of this client's", id);
    buffer_retire(client, b);
    return 0;
}

void kvq__buffer_use(struct kvq__client *client, struct kvq__buffer *b, struct kvq__buffer_set *set)
{
    if (!b)
        return;
    uint32_t place = (uint32_t)(b - client->buffers);
    assert(place < KVQ_MAX_BUFFERS && b->id);
    uint64_t bit = 1ull << place % 64;
    b->uses += !(set->bits[place / 64] & bit);
    set->bits[place / 64] |= bit;
}

void kvq__buffers_unuse(struct kvq__client *client, struct kvq__buffer_set *set)
{
    for (uint32_t i = 0; i < KVQ_MAX_BUFFERS / 64; i++)
        for (; set->bits[i]; set->bits[i] &= set->bits[i] - 1) {
            struct kvq__buffer *b =
                &client->buffers[64 * i + (uint32_t)__builtin_ctzll(set->bits[i])];
            assert(b->uses > 0);
            if (--b->uses == 0 && b->removed)
                buffer_forget(client, b);
        }
}

// ---- Handles ----

int kvq__handle_get(struct kvq__client *client, uint64_t value, struct kvq__handle **out)
{
    uint32_t index = (uint32_t)value, generation = (uint32_t)(value >> 32);
    *out = NULL;
    if (index >= KVQ_MAX_OPEN || !client->handles[index / KVQ__HANDLE_CHUNK])
        return KVQ_E_STALE;
    struct kvq__handle *h = &client->handles[index / KVQ__HANDLE_CHUNK][index % KVQ__HANDLE_CHUNK];
    if (!h->used || h->generation != generation)
        return KVQ_E_STALE;
    assert(h->index == index && h->client == client);
    *out = h;
    return !h->taken ? 0 : h->lost ? h->lost : KVQ_E_TAKEN;
}

static int add_chunk(struct kvq__client *client)
{
    uint32_t n = 0;
    while (n < KVQ__HANDLE_CHUNKS && client->handles[n])
        n++;
    if (n == KVQ__HANDLE_CHUNKS)
        return KVQ_E_LIMIT;
    struct kvq__handle *chunk = kvq__allocate(client->core, KVQ__HANDLE_CHUNK * sizeof *chunk);
    if (!chunk)
        return KVQ_E_NO_MEMORY;
    client->handles[n] = chunk;
    for (uint32_t i = KVQ__HANDLE_CHUNK; i-- > 0;) {
        chunk[i].client = client;
        chunk[i].index = n * KVQ__HANDLE_CHUNK + i;
        chunk[i].generation = client->first_generation;
        LIST_INSERT_HEAD(&client->free_handles, &chunk[i], link);
    }
    return 0;
}

int kvq__handle_new(struct kvq__client *client, struct kvq__handle **out)
{
    if (LIST_EMPTY(&client->free_handles)) {
        int rc = add_chunk(client);
        if (rc < 0)
            return rc;
    }
    struct kvq__handle *h = LIST_FIRST(&client->free_handles);
    LIST_REMOVE(h, link);
    assert(!h->used && !h->session && !h->table);
    h->used = true;
    client->n_handles++;
    *out = h;
    return 0;
}

void kvq__handle_free(struct kvq__handle *h)
{
    assert(h->client->n_handles > 0);
    assert(h->used && !h->session);
    h->used = h->taken = h->read_only = false;
    h->table = NULL;
    h->lost = 0;
    h->generation = h->generation == UINT32_MAX ? 1 : h->generation + 1;
    h->client->n_handles--;
    LIST_INSERT_HEAD(&h->client->free_handles, h, link);
}

void kvq__handle_attach(struct kvq__handle *h, struct kvq__session *s, bool read_only)
{
    assert(h->used && !h->session && !s->dropped);
    assert(read_only || !s->writer);
    h->session = s;
    h->read_only = read_only;
    if (read_only)
        s->readers++;
    else
        s->writer = h;
    if (!read_only)
        s->in_step.undone_by = 0; // that was another writer's step
    LIST_INSERT_HEAD(&s->handles, h, link);
    kvq__unsaved_note(s);
}

// `settles`: a STEP that was answered comes to its end by itself.
static void detach_sessions(struct kvq__handle *h, bool settles)
{
    struct kvq__session *s = h->session;
    if (!s)
        return;
    assert(h->read_only == (s->writer != h) && (s->writer == h || s->readers > 0));
    if (s->writer == h) {
        if (!s->in_step.prepared && !settles) // what it has ended stands without it
            s->core->up->step_leave(s);
        s->writer = NULL;
        s->in_step.nonfinite_unreported = false;
    } else {
        s->readers--;
    }
    LIST_REMOVE(h, link);
    h->session = NULL;
}

void kvq__handle_detach(struct kvq__handle *h)
{
    detach_sessions(h, false);
}

void kvq__handle_close(struct kvq__handle *h)
{
    struct kvq__session *s = h->session;
    uint64_t client = h->client->id;
    bool faulty = h->client->faulty;
    detach_sessions(h, s && s->in_step.committing && !h->client->gone);
    kvq__handle_free(h);
    if (s) {
        kvq__event(s->core, KVQ__EVENT_SESSION_CLOSED, s->ns->name, s->name, client, "");
        kvq__session_detached(s, !faulty);
    }
}

// ---- Arenas ----

void *kvq__arena_take(struct kvq__queue *q, size_t bytes)
{
    size_t size = (bytes + 63) & ~(size_t)63;
    assert(q->arena_used <= q->arena_bytes && q->arena_used % 64 == 0);
    if (bytes > q->arena_bytes || size > q->arena_bytes - q->arena_used)
        return NULL;
    void *memory = q->arena + q->arena_used;
    q->arena_used += size;
    return memory;
}
