// SPDX-License-Identifier: Apache-2.0
//
// Namespaces' limits, and what they use of them, as messages.
#include <assert.h>
#include <stdio.h>

#include "daemon/commands/internal.h"

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

ProtobufCMessage *kvq__quota_status_message(struct kvq_arena *arena,
                                            const struct kvq__namespace_info *info)
{
    assert(info->last_refused < KVQ__LIMITS);
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
        return &q->base;
    q->last_refused = kvq_arena_text(arena, names[info->last_refused]);
    q->last_more = info->last_more;
    q->last_ms = info->last_ms;
    return &q->base;
}

int kvq__dispatch_quota(const struct kvq__dispatch *d, const char *ns, struct kvq_arena *arena,
                        Kvq__Reply *reply, char *text)
{
    struct kvq__namespace_info info;
    Kvq__QuotaList *list = kvq_arena_alloc(arena, sizeof *list);
    Kvq__QuotaStatus **quotas = kvq_arena_alloc(arena, sizeof *quotas);
    if (!list || !quotas)
        return KVQ_E_NO_MEMORY;
    int error = kvq__core_namespace_info(d->core, d->peer, ns, &info, text);
    if (error)
        return error;
    quotas[0] = (Kvq__QuotaStatus *)kvq__quota_status_message(arena, &info);
    if (!quotas[0])
        return KVQ_E_NO_MEMORY;
    kvq__quota_list__init(list);
    list->quotas = quotas;
    list->n_quotas = 1;
    list->kept = d->identity->stores;
    reply->quotas = list;
    reply->result_case = KVQ__REPLY__RESULT_QUOTAS;
    return 0;
}
