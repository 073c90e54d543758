// SPDX-License-Identifier: Apache-2.0
//
// What a status says of places: the GPUs', and what has gone from one to another.
#include "daemon/commands/dispatch.h"

static void add_gpus(const struct kvq__dispatch *d, struct kvq_arena *arena, Kvq__StatusReply *s)
{
    struct kvq__place_info infos[KVQ_MAX_GPUS];
    uint32_t n = kvq__core_places(d->core, infos);
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

static void add_eviction(const struct kvq__dispatch *d, struct kvq_arena *arena,
                         Kvq__StatusReply *s)
{
    struct kvq__evict_counts e;
    struct kvq__park_stats p;
    Kvq__EvictionStatus *out = kvq_arena_alloc(arena, sizeof *out);
    if (!out)
        return;
    kvq__core_evictions(d->core, &e);
    kvq__core_parks(d->core, &p);
    kvq__eviction_status__init(out);
    out->room = p.parked[KVQ__PARK_ROOM];
    out->room_bytes = p.freed_bytes[KVQ__PARK_ROOM];
    out->quota = p.parked[KVQ__PARK_QUOTA];
    out->quota_bytes = p.freed_bytes[KVQ__PARK_QUOTA];
    out->idle = p.parked[KVQ__PARK_IDLE];
    out->idle_bytes = p.freed_bytes[KVQ__PARK_IDLE];
    out->asked = p.parked[KVQ__PARK_ASKED];
    out->asked_bytes = p.freed_bytes[KVQ__PARK_ASKED];
    out->demoted = e.demoted;
    out->demoted_bytes = e.demoted_bytes;
    out->returned = e.promoted;
    out->returned_bytes = e.promoted_bytes;
    out->fetched = p.fetched;
    out->fetched_bytes = p.fetched_bytes;
    out->fetch_ms = p.fetch_ns / 1000000;
    out->fetch_longest_ms = p.fetch_ms[1];
    out->fetch_failed = p.fetch_failed;
    out->waited = e.waited;
    out->refused = e.refused;
    out->failed = e.failed;
    out->prompts_packed = e.prompts_packed;
    out->prompts_packed_bytes = e.prompts_packed_bytes;
    out->parked = p.offloaded;
    out->demoted_now = e.demoted_now;
    out->waiting_now = e.waiting_now;
    s->eviction = out;
}

void kvq__dispatch_places(const struct kvq__dispatch *d, struct kvq_arena *arena,
                          Kvq__StatusReply *s)
{
    add_gpus(d, arena, s);
    add_eviction(d, arena, s);
}
