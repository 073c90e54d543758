// SPDX-License-Identifier: Apache-2.0
//
// How much there is where a block was refused. See room.h.
#include "daemon/core/mem/room.h"

#include <assert.h>

#include "daemon/core/state.h"

void kvq__line_open(struct kvq__line *line)
{
    *line = (struct kvq__line){0};
    TAILQ_INIT(&line->waiters);
}

static uint64_t *freed_in_pool(const struct kvq__namespace *ns, const struct kvq__pool *pool)
{
    assert(pool >= ns->core->pools && pool < ns->core->pools + ns->core->n_pools);
    return &ns->core->room.lines[pool - ns->core->pools].freed;
}

static uint64_t *freed_below_limit(struct kvq__namespace *ns, const struct kvq__pool *pool)
{
    return &ns->lines[kvq__pool_limit(pool)].freed;
}

struct kvq__freed kvq__freed_of(struct kvq__namespace *ns, const struct kvq__pool *pool)
{
    return (struct kvq__freed){*freed_in_pool(ns, pool), *freed_below_limit(ns, pool)};
}

void kvq__freed_set(struct kvq__namespace *ns, const struct kvq__pool *pool,
                    struct kvq__freed freed)
{
    *freed_in_pool(ns, pool) = freed.in_pool;
    *freed_below_limit(ns, pool) = freed.below_limit;
}

void kvq__freed_note(struct kvq__namespace *ns, const struct kvq__pool *pool)
{
    ++*freed_in_pool(ns, pool);
    ++*freed_below_limit(ns, pool);
}

uint64_t kvq__shortage_limit(const struct kvq__shortage *s)
{
    assert(s->code < 0 && s->pool);
    return s->code == KVQ_E_QUOTA ? s->ns->quota.limit[kvq__pool_limit(s->pool)] : s->pool->budget;
}

// What indexes have alone of the blocks that a limit of the namespace counts.
static uint64_t index_bytes_of(const struct kvq__namespace *ns, enum kvq__limit which)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < ns->core->n_pools; i++)
        if (kvq__pool_limit(&ns->core->pools[i]) == which)
            bytes += ns->arenas[i].index_bytes;
    return bytes;
}

uint64_t kvq__shortage_free(const struct kvq__shortage *s)
{
    enum kvq__limit which = kvq__pool_limit(s->pool);
    assert(s->pool->used_bytes <= s->pool->budget && s->pool->index_bytes <= s->pool->used_bytes);
    if (s->code != KVQ_E_QUOTA)
        return s->pool->budget - s->pool->used_bytes + (s->later ? 0 : s->pool->index_bytes);
    if (s->ns->quota.limit[which] == 0)
        return UINT64_MAX / 2; // so that sums with it are as good
    uint64_t may = s->ns->quota.limit[which] + s->ns->exempt[which];
    may += s->later ? 0 : index_bytes_of(s->ns, which);
    return may > s->ns->used[which] ? may - s->ns->used[which] : 0;
}
