// SPDX-License-Identifier: Apache-2.0
//
// Commands of administrators: the daemon as a whole, its places, and its clients.
#include <assert.h>
#include <string.h>

#include "daemon/commands/internal.h"

int kvq__run_ping(struct kvq__call *call)
{
    const struct kvq__identity *us = call->d->identity;
    Kvq__Pong *pong = kvq_arena_alloc(call->arena, sizeof *pong);
    assert(call->d->now_ns >= us->start_ns);
    if (!pong)
        return kvq__call_no_room(call);
    kvq__pong__init(pong);
    pong->version = kvq_arena_text(call->arena, us->version);
    pong->pid = us->pid;
    pong->uptime_ms = (call->d->now_ns - us->start_ns) / 1000000;
    call->reply->pong = pong;
    call->reply->result_case = KVQ__REPLY__RESULT_PONG;
    return 0;
}

int kvq__run_kick_client(struct kvq__call *call)
{
    return kvq__core_kick(call->d->core, call->d->peer, call->request->kick_client->id, call->text);
}

// ---- Status ----

static void add_gpus(const struct kvq__dispatch *d, struct kvq_arena *arena, Kvq__StatusReply *s)
{
    struct kvq__place_info infos[KVQ_MAX_GPUS];
    uint32_t n = kvq__core_places(d->core, infos);
    assert(n <= KVQ_MAX_GPUS);
    s->gpus = kvq_arena_alloc(arena, (n + 1) * sizeof(Kvq__PlaceStatus *));
    for (uint32_t i = 0; s->gpus && i < n; i++) {
        Kvq__PlaceStatus *one = kvq_arena_alloc(arena, sizeof *one);
        if (!one)
            return;
        kvq__place_status__init(one);
        one->place = kvq_arena_text(arena, infos[i].place);
        one->name = kvq_arena_text(arena, infos[i].name);
        one->pool_bytes = infos[i].pool_bytes;
        one->extent_bytes = infos[i].extent_bytes;
        one->used_bytes = infos[i].used_bytes;
        one->sessions = infos[i].sessions;
        s->gpus[s->n_gpus++] = one;
    }
}

static int add_counters(struct kvq__call *call, Kvq__StatusReply *s)
{
    struct kvq__counts counts;
    uint64_t values[KVQ__COUNTERS];
    Kvq__Counter *all = kvq_arena_alloc(call->arena, KVQ__COUNTERS * sizeof *all);
    s->counters = kvq_arena_alloc(call->arena, KVQ__COUNTERS * sizeof(Kvq__Counter *));
    if (!all || !s->counters)
        return kvq__call_no_room(call);
    kvq__core_counts(call->d->core, &counts);
    memcpy(values, &counts, sizeof values);
    for (uint32_t i = 0; i < KVQ__COUNTERS; i++) {
        kvq__counter__init(&all[i]);
        all[i].name = (char *)(uintptr_t)kvq__counter_names[i]; // packing only reads it
        all[i].value = values[i];
        s->counters[s->n_counters++] = &all[i];
    }
    return 0;
}

int kvq__run_status(struct kvq__call *call)
{
    const struct kvq__dispatch *d = call->d;
    struct kvq_arena *arena = call->arena;
    struct kvq__status status;
    Kvq__StatusReply *s = kvq_arena_alloc(arena, sizeof *s);
    assert(d->now_ns >= d->identity->start_ns);
    if (!s)
        return kvq__call_no_room(call);
    kvq__core_status(d->core, &status);
    kvq__status_reply__init(s);
    s->version = kvq_arena_text(arena, d->identity->version);
    s->pid = d->identity->pid;
    s->uptime_ms = (d->now_ns - d->identity->start_ns) / 1000000;
    s->backend = kvq_arena_text(arena, d->identity->backend);
    s->isa = kvq_arena_text(arena, d->identity->isa);
    s->workers = d->identity->workers;
    s->pool_bytes = status.pool_bytes;
    s->pool_extent_bytes = status.pool_extent_bytes;
    s->pool_used_bytes = status.pool_used_bytes;
    s->pool_largest_free = status.pool_largest_free;
    s->pool_huge_bytes = status.pool_huge_bytes;
    s->sessions = status.sessions;
    s->clients = status.clients;
    s->tokens = status.tokens;
    s->draining = status.draining;
    s->runtime_dir = kvq_arena_text(arena, d->identity->runtime_dir);
    add_gpus(d, arena, s);
    int error = add_counters(call, s);
    call->reply->status_reply = s;
    call->reply->result_case = KVQ__REPLY__RESULT_STATUS_REPLY;
    return error ? error : kvq__status_namespaces(call, s);
}
