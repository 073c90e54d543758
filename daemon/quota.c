// SPDX-License-Identifier: Apache-2.0
//
// See quota.h.
#include "daemon/quota.h"

#include <stdio.h>

#include "daemon/state.h"

static const struct {
    const char *where, *unit, *option;
} names[KVQ__LIMITS] = {
    [KVQ__HOST_BYTES] = {"in the host's memory", "bytes", "--host-bytes"},
    [KVQ__DEVICE_BYTES] = {"in the memory of GPUs", "bytes", "--device-bytes"},
    [KVQ__DISK_BYTES] = {"on disk", "bytes", "--disk-bytes"},
    [KVQ__SESSIONS] = {"in memory", "sessions", "--sessions"},
};

static uint64_t counted(const struct kvq__namespace *ns, enum kvq__limit which)
{
    return ns->used[which] - ns->exempt[which];
}

bool kvq__quota_allows(const struct kvq__namespace *ns, enum kvq__limit which, uint64_t more)
{
    uint64_t limit = ns->quota.limit[which];
    return limit == 0 || counted(ns, which) + more <= limit;
}

uint64_t kvq__quota_excess(const struct kvq__namespace *ns, enum kvq__limit which)
{
    uint64_t limit = ns->quota.limit[which], used = counted(ns, which);
    return limit && used > limit ? used - limit : 0;
}

// ---- Refusals ----

static void tell(struct kvq__namespace *ns, enum kvq__limit which, uint64_t more)
{
    char text[KVQ_TEXT_BYTES / 2];
    struct kvq__core *core = ns->core;
    if (ns->told_quota_at && core->now - ns->told_quota_at < 1000000000u)
        return;
    ns->told_quota_at = core->now ? core->now : 1;
    snprintf(text, sizeof text, "%llu of %llu %s %s are used, %llu more were asked for",
             (unsigned long long)counted(ns, which), (unsigned long long)ns->quota.limit[which],
             names[which].unit, names[which].where, (unsigned long long)more);
    kvq__event(core, KVQ__EVENT_QUOTA_REACHED, ns->name, "", 0, text);
}

int kvq__quota_refuse(struct kvq__namespace *ns, enum kvq__limit which, uint64_t more, char *text)
{
    struct kvq__refusals *r = &ns->refused[which];
    r->times++;
    r->last_at = ns->core->now;
    r->last_more = more;
    tell(ns, which, more);
    return kvq__fail(text, KVQ_E_QUOTA,
                     "namespace \"%s\" may have %llu %s %s; it has %llu, and %llu more are asked "
                     "for: drop sessions of it, or raise the limit with kvqctl quota set %s %s N",
                     ns->name, (unsigned long long)ns->quota.limit[which], names[which].unit,
                     names[which].where, (unsigned long long)counted(ns, which),
                     (unsigned long long)more, ns->name, names[which].option);
}

int kvq__namespace_room(struct kvq__namespace *ns, char *text)
{
    return kvq__quota_allows(ns, KVQ__SESSIONS, 1) ? 0
                                                   : kvq__quota_refuse(ns, KVQ__SESSIONS, 1, text);
}

// ---- Above the limit ----

// Whose pool's limit has been lowered below what the namespace uses there.
static void give_up_prefixes(struct kvq__core *core, struct kvq__namespace *ns,
                             const struct kvq__pool *pool)
{
    while (kvq__quota_excess(ns, kvq__pool_limit(pool)) > 0 &&
           kvq__prefix_reclaim(core, ns, pool, KVQ_E_QUOTA))
        ;
}

void kvq__quotas_tick(struct kvq__core *core)
{
    struct kvq__namespace *ns;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        for (uint32_t i = 0; i < core->n_pools && i < 2; i++) // all GPUs have one limit
            give_up_prefixes(core, ns, &core->pools[i]);
}
