// SPDX-License-Identifier: Apache-2.0
//
// Namespaces' limits, and what they use of them, as messages.
#include <stdio.h>

#include "daemon/dispatch.h"

// Lists end before the reply would grow beyond a message.
enum { LIST_BYTES = KVQ_MAX_MESSAGE - 4096 };

Kvq__Quota *kvq__quota_message(struct kvq_arena *arena, const uint64_t limits[KVQ__LIMITS])
{
    Kvq__Quota *q = kvq_arena_alloc(arena, sizeof *q);
    if (!q)
        return NULL;
    kvq__quota__init(q);
    q->host_bytes = limits[KVQ__HOST_BYTES];
    q->device_bytes = limits[KVQ__DEVICE_BYTES];
    q->disk_bytes = limits[KVQ__DISK_BYTES];
    q->sessions = limits[KVQ__SESSIONS];
    q->table_bytes = limits[KVQ__TABLE_BYTES];
    return q;
}

static Kvq__QuotaStatus *status_message(struct kvq_arena *arena,
                                        const struct kvq__namespace_info *info)
{
    static const char *const names[KVQ__LIMITS] = {[KVQ__HOST_BYTES] = "host_bytes",
                                                   [KVQ__DEVICE_BYTES] = "device_bytes",
                                                   [KVQ__DISK_BYTES] = "disk_bytes",
                                                   [KVQ__SESSIONS] = "sessions",
                                                   [KVQ__TABLE_BYTES] = "table_bytes"};
    Kvq__QuotaStatus *q = kvq_arena_alloc(arena, sizeof *q);
    if (!q)
        return NULL;
    kvq__quota_status__init(q);
    q->namespace_ = kvq_arena_text(arena, info->name);
    q->used = kvq__quota_message(arena, info->used);
    q->limit = kvq__quota_message(arena, info->quota.limit);
    q->configured = kvq__quota_message(arena, info->configured.limit);
    q->which = info->set;
    q->refused = kvq__quota_message(arena, info->refused);
    if (info->refused[info->last_refused] == 0)
        return q;
    q->last_refused = kvq_arena_text(arena, names[info->last_refused]);
    q->last_more = info->last_more;
    q->last_ms = info->last_ms;
    return q;
}

// What is asked for: one namespace, or all that the peer may see.
static int find(const struct kvq__dispatch *d, const char *ns, struct kvq__namespace_info *infos,
                uint32_t *n, char *text)
{
    *n = 1;
    if (*ns)
        return kvq__core_namespace_info(d->core, d->peer, ns, infos, text);
    *n = kvq__core_namespaces(d->core, d->peer, infos, KVQ_MAX_LIST);
    return 0;
}

int kvq__dispatch_quotas(const struct kvq__dispatch *d, const char *ns, struct kvq_arena *arena,
                         Kvq__Reply *reply, char *text)
{
    uint32_t n;
    size_t bytes = 0;
    Kvq__QuotaList *list = kvq_arena_alloc(arena, sizeof *list);
    struct kvq__namespace_info *infos = kvq_arena_alloc(arena, KVQ_MAX_LIST * sizeof *infos);
    Kvq__QuotaStatus **quotas = kvq_arena_alloc(arena, KVQ_MAX_LIST * sizeof *quotas);
    if (!list || !infos || !quotas)
        return KVQ_E_NO_MEMORY;
    kvq__quota_list__init(list);
    list->quotas = quotas;
    list->kept = d->identity->stores;
    int error = find(d, ns, infos, &n, text);
    for (uint32_t i = 0; error == 0 && i < n && i < KVQ_MAX_LIST; i++) {
        Kvq__QuotaStatus *q = status_message(arena, &infos[i]);
        bytes += q ? kvq__quota_status__get_packed_size(q) + 4 : 0;
        if (!q || arena->full || bytes > LIST_BYTES)
            break;
        quotas[list->n_quotas++] = q;
    }
    list->truncated = list->n_quotas < n;
    reply->quotas = list;
    if (error == 0)
        reply->result_case = KVQ__REPLY__RESULT_QUOTAS;
    return error;
}
