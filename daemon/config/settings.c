// SPDX-License-Identifier: Apache-2.0
//
// What of the configuration the core has; see change.h.
#include <stdlib.h>

#include "daemon/config/change.h"
#include "kernels/kernels.h"

enum { NS_PER_MS = 1000000, NS_PER_SECOND = 1000000000 };

struct plan {
    struct kvq__core_settings settings; // first
    struct kvq__namespace_config namespaces[KVQ_MAX_NAMESPACES];
    const char *share_with[KVQ_MAX_NAMESPACES][KVQ_MAX_SHARE_WITH];
};

// Where the configuration does not say how much the tables of sessions may take: a quarter of what
// their blocks may, so that many empty sessions cannot have more memory than full ones.
static uint64_t table_bytes(const struct kvq_config *c, uint64_t given, uint64_t host)
{
    const uint64_t least = 64 << 20;
    uint64_t part = (host && host < c->pool_bytes ? host : c->pool_bytes) / 4;
    return given ? given : part > least ? part : least;
}

// ns NULL: of those without a section.
static struct kvq__quota quota_of(const struct kvq_config *c, const struct kvq_config_namespace *ns)
{
    uint64_t host = ns ? ns->host_bytes : c->host_bytes;
    uint64_t tables = table_bytes(c, ns ? ns->table_bytes : c->table_bytes, host);
    return (struct kvq__quota){
        .limit = {[KVQ__HOST_BYTES] = host,
                  [KVQ__DEVICE_BYTES] = ns ? ns->device_bytes : c->device_bytes,
                  [KVQ__DISK_BYTES] = ns ? ns->disk_bytes : c->disk_bytes,
                  [KVQ__SESSIONS] = ns ? kvq__config_sessions(c, ns) : c->max_sessions,
                  [KVQ__TABLE_BYTES] = tables}};
}

static void plan_namespace(const struct kvq_config *c, uint32_t i, struct plan *plan)
{
    const struct kvq_config_namespace *ns = &c->namespaces[i];
    plan->namespaces[i] = (struct kvq__namespace_config){.name = ns->name,
                                                         .quota = quota_of(c, ns),
                                                         .uids = ns->uids.id,
                                                         .n_uids = ns->uids.n,
                                                         .gids = ns->gids.id,
                                                         .n_gids = ns->gids.n,
                                                         .share_with = plan->share_with[i],
                                                         .n_share_with = ns->n_share_with};
    for (uint32_t j = 0; j < ns->n_share_with; j++)
        plan->share_with[i][j] = ns->share_with[j];
}

struct kvq__core_settings *kvq__config_settings(const struct kvq_config *c)
{
    struct plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return NULL;
    plan->settings =
        (struct kvq__core_settings){.keep_ns = c->keep_seconds * NS_PER_SECOND,
                                    .prefix_keep_ns = c->prefix_keep_seconds * NS_PER_SECOND,
                                    .evict_idle_ns = c->evict_idle_ms * NS_PER_MS,
                                    .evict_above = (uint32_t)c->evict_above,
                                    .park_idle_ns = c->park_idle_seconds * NS_PER_SECOND,
                                    .pack_error_ns = c->pack_error_ms * NS_PER_MS,
                                    .path = c->fast ? KVQ_PATH_FAST : KVQ_PATH_EXACT,
                                    .quota = quota_of(c, NULL),
                                    .namespaces = plan->namespaces,
                                    .n_namespaces = c->n_namespaces};
    for (uint32_t i = 0; i < c->n_namespaces; i++)
        plan_namespace(c, i, plan);
    return &plan->settings;
}
