// SPDX-License-Identifier: Apache-2.0
//
// What administration sees: counters, and lists of what the asking user may know of.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/state.h"

void kvq__core_status(const struct kvq__core *core, struct kvq__status *status)
{
    const struct kvq__pool *pool = &core->pools[0];
    assert(pool->used_bytes <= pool->extents_taken && pool->extents_taken <= pool->budget);
    *status = (struct kvq__status){
        .pool_bytes = pool->budget,
        .pool_extent_bytes = pool->extents_taken,
        .pool_used_bytes = pool->used_bytes,
        .pool_largest_free =
            pool->budget / kvq__extent_unit(pool) * kvq__extent_unit(pool) - pool->extents_taken,
        .pool_huge_bytes = pool->huge_bytes,
        .sessions = core->n_sessions,
        .clients = core->n_clients,
        .tokens = core->tokens,
        .draining = core->draining,
    };
    const struct kvq__extent *e;
    TAILQ_FOREACH (e, &pool->empty, link)
        status->pool_largest_free += e->size->bytes;
    assert(status->pool_largest_free <= pool->budget);
}

void kvq__core_counts(const struct kvq__core *core, struct kvq__counts *counts)
{
    const struct kvq__queue *q;
    assert(core->disk.n_offloaded <= core->n_sessions &&
           core->moving.n_demoted <= core->n_sessions);
    *counts = core->counts;
    counts->offloaded_now = core->disk.n_offloaded;
    counts->demoted_now = core->moving.n_demoted;
    counts->unsaved_now = core->unsaved.n;
    TAILQ_FOREACH (q, &core->room.waiters, waiter_link)
        counts->waiting_for_room_now += q->turn.listed;
}

const struct kvq__refused *kvq__core_refused(const struct kvq__core *core)
{
    return &core->refused;
}

uint32_t kvq__core_places(const struct kvq__core *core, struct kvq__place_info *out)
{
    assert(core->n_pools >= 1 && core->n_pools <= 1 + KVQ_MAX_GPUS);
    for (uint32_t i = 1; i < core->n_pools; i++) {
        const struct kvq__pool *pool = &core->pools[i];
        out[i - 1] = (struct kvq__place_info){.place = kvq__pool_name(pool),
                                              .name = kvq__gpu_name(pool->gpu),
                                              .pool_bytes = pool->budget,
                                              .extent_bytes = pool->extents_taken,
                                              .used_bytes = pool->used_bytes,
                                              .sessions = pool->sessions};
    }
    return core->n_pools - 1;
}

struct kvq__newest kvq__core_newest(const struct kvq__core *core)
{
    return (struct kvq__newest){core->last.namespace, core->last.session, core->last.client};
}

uint32_t kvq__core_sessions(struct kvq__core *core, const struct kvq__peer *peer,
                            const char *ns_name, struct kvq__list_at after, uint64_t *looks,
                            struct kvq__session_info *out, uint32_t max)
{
    struct kvq__namespace *ns;
    uint32_t n = 0;
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        if (ns->number < after.ns || (ns_name && *ns_name && strcmp(ns_name, ns->name) != 0) ||
            !kvq__namespace_allows(ns, peer))
            continue;
        const struct kvq__session *s =
            kvq__session_after(ns, ns->number == after.ns ? after.id : 0);
        for (; s && n < max; s = TAILQ_NEXT(s, link)) {
            kvq__session_fill_info(s, &out[n]);
            kvq__session_count_shared(s, &out[n++], looks);
            core->lookup.looks++;
        }
        if (n == max)
            break;
    }
    return n;
}

uint32_t kvq__core_namespaces(const struct kvq__core *core, const struct kvq__peer *peer,
                              uint64_t after, struct kvq__namespace_info *out, uint32_t max)
{
    const struct kvq__namespace *ns;
    uint32_t n = 0;
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        if (n == max)
            break;
        if (ns->number > after && kvq__namespace_allows(ns, peer))
            kvq__quota_fill_info(ns, &out[n++]);
    }
    return n;
}

static bool may_see(const struct kvq__peer *peer, const struct kvq__client *client)
{
    return peer->admin || peer->uid == client->peer.uid;
}

uint32_t kvq__core_clients(const struct kvq__core *core, const struct kvq__peer *peer,
                           uint64_t after, struct kvq__client_info *out, uint32_t max)
{
    const struct kvq__client *c;
    uint32_t n = 0;
    TAILQ_FOREACH (c, &core->clients, link) {
        if (n == max)
            break;
        if (c->id <= after || !may_see(peer, c))
            continue;
        assert(c->connected_at <= core->now && c->n_handles <= KVQ_MAX_OPEN);
        struct kvq__client_info *info = &out[n++];
        *info = (struct kvq__client_info){
            .id = c->id,
            .pid = c->peer.pid,
            .uid = c->peer.uid,
            .queues = c->n_queues,
            .buffers = c->n_buffers,
            .sessions = c->n_handles,
            .buffer_bytes = c->buffer_bytes,
            .requests = c->requests,
            .connected_ms = (core->now - c->connected_at) / 1000000,
        };
        snprintf(info->name, sizeof info->name, "%s", c->name);
    }
    return n;
}

int kvq__core_kick(struct kvq__core *core, const struct kvq__peer *peer, uint64_t id, char *text)
{
    const struct kvq__client *c;
    if (!peer->admin)
        return kvq__fail(text, KVQ_E_PERMISSION,
                         "user %u may not end clients: that takes the role operate (operate_uids, "
                         "operate_gids)",
                         peer->uid);
    TAILQ_FOREACH (c, &core->clients, link) {
        if (c->id != id)
            continue;
        core->counts.kicked_clients++;
        return 0;
    }
    return kvq__fail(text, KVQ_E_NO_CLIENT,
                     "no client %llu is attached (any more); `kvqctl client list` shows all",
                     (unsigned long long)id);
}
