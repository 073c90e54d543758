// SPDX-License-Identifier: Apache-2.0
//
// See quota.h.
#include "daemon/core/mem/quota.h"

#include <assert.h>
#include <stdio.h>

#include "daemon/core/state.h"

static const struct {
    const char *where, *unit, *option;
} names[KVQ__LIMITS] = {
    [KVQ__HOST_BYTES] = {"in the host's memory", "bytes", "--host-bytes"},
    [KVQ__DEVICE_BYTES] = {"in the memory of GPUs", "bytes", "--device-bytes"},
    [KVQ__DISK_BYTES] = {"on disk", "bytes", "--disk-bytes"},
    [KVQ__SESSIONS] = {"in memory", "sessions", "--sessions"},
    [KVQ__TABLE_BYTES] = {"for tables of sessions", "bytes", "--table-bytes"},
};

static uint64_t counted_of(const struct kvq__namespace *ns, enum kvq__limit which)
{
    assert(ns->used[which] >= ns->exempt[which]);
    return ns->used[which] - ns->exempt[which];
}

bool kvq__quota_allows(const struct kvq__namespace *ns, enum kvq__limit which, uint64_t more)
{
    uint64_t limit = ns->quota.limit[which];
    return limit == 0 || counted_of(ns, which) + more <= limit;
}

uint64_t kvq__quota_excess(const struct kvq__namespace *ns, enum kvq__limit which)
{
    uint64_t limit = ns->quota.limit[which], used = counted_of(ns, which);
    return limit && used > limit ? used - limit : 0;
}

// ---- Refusals ----

static void tell_refusal(struct kvq__namespace *ns, const char *text)
{
    struct kvq__core *core = ns->core;
    if (ns->quota_event_at && core->now - ns->quota_event_at < 1000000000u)
        return;
    ns->quota_event_at = core->now ? core->now : 1;
    kvq__event(core, KVQ__EVENT_QUOTA_REACHED, ns->name, "", 0, text);
}

static void note_refusal(struct kvq__namespace *ns, enum kvq__limit which, uint64_t more)
{
    assert(which < KVQ__LIMITS && ns->refused[which].last_at <= ns->core->now);
    ns->refused[which].times++;
    ns->refused[which].last_at = ns->core->now;
    ns->refused[which].last_more = more;
    ns->last_refused = which;
}

int kvq__quota_refuse(struct kvq__namespace *ns, enum kvq__limit which, uint64_t more, char *text)
{
    char brief[KVQ_TEXT_BYTES / 2];
    snprintf(brief, sizeof brief, "%llu of %llu %s %s are used, %llu more were asked for",
             (unsigned long long)counted_of(ns, which), (unsigned long long)ns->quota.limit[which],
             names[which].unit, names[which].where, (unsigned long long)more);
    note_refusal(ns, which, more);
    tell_refusal(ns, brief);
    return kvq__fail(
        text, KVQ_E_QUOTA,
        "namespace \"%s\" may have %llu %s %s; it has %llu, and %llu more are asked "
        "for: park or drop sessions of it, or raise the limit with kvqctl quota set %s %s N",
        ns->name, (unsigned long long)ns->quota.limit[which], names[which].unit, names[which].where,
        (unsigned long long)counted_of(ns, which), (unsigned long long)more, ns->name,
        names[which].option);
}

int kvq__namespace_room(struct kvq__namespace *ns, char *text)
{
    return kvq__quota_allows(ns, KVQ__SESSIONS, 1) ? 0
                                                   : kvq__quota_refuse(ns, KVQ__SESSIONS, 1, text);
}

// ---- What is no block ----

// At the limit ended sessions are freed first, then pages of the prefix index are evicted.
static bool has_quota_room(struct kvq__namespace *ns, size_t bytes)
{
    while (!ns->lenient && !kvq__quota_allows(ns, KVQ__TABLE_BYTES, bytes))
        if (!ns->core->up->table_reclaim(ns))
            return false;
    return true;
}

void *kvq__ns_try(struct kvq__namespace *ns, size_t bytes)
{
    void *memory = has_quota_room(ns, bytes) ? kvq__allocate(ns->core, bytes) : NULL;
    if (memory)
        ns->used[KVQ__TABLE_BYTES] += bytes;
    return memory;
}

void *kvq__ns_allocate(struct kvq__namespace *ns, size_t bytes, int *rc)
{
    void *memory = kvq__ns_try(ns, bytes);
    if (memory)
        return memory;
    *rc = has_quota_room(ns, bytes) ? KVQ_E_NO_MEMORY
                                    : kvq__quota_refuse(ns, KVQ__TABLE_BYTES, bytes, NULL);
    return NULL;
}

void kvq__ns_deallocate(struct kvq__namespace *ns, void *memory, size_t bytes)
{
    if (!memory)
        return;
    assert(ns->used[KVQ__TABLE_BYTES] >= bytes);
    ns->used[KVQ__TABLE_BYTES] -= bytes;
    kvq__deallocate(ns->core, memory, bytes);
}

int kvq__ns_refused(const struct kvq__namespace *ns, int rc, const char *what, char *text)
{
    assert(rc == KVQ_E_QUOTA || rc == KVQ_E_NO_MEMORY);
    if (rc != KVQ_E_QUOTA)
        return kvq__fail(text, rc, "no memory for %s", what);
    return kvq__fail(text, rc,
                     "no room for %s: namespace \"%s\" may have %llu bytes for page tables, token "
                     "ids and the like, and has %llu; drop sessions of it, or raise the limit with "
                     "kvqctl quota set %s --table-bytes SIZE",
                     what, ns->name, (unsigned long long)ns->quota.limit[KVQ__TABLE_BYTES],
                     (unsigned long long)ns->used[KVQ__TABLE_BYTES], ns->name);
}

// ---- What is told of it ----

void kvq__quota_fill_info(const struct kvq__namespace *ns, struct kvq__namespace_info *info)
{
    const struct kvq__refusals *last = &ns->refused[ns->last_refused];
    assert(last->last_at <= ns->core->now);
    *info = (struct kvq__namespace_info){.number = ns->number,
                                         .quota = ns->quota,
                                         .configured = ns->base_quota,
                                         .set = ns->quota_set,
                                         .last_refused = ns->last_refused,
                                         .last_more = last->last_more,
                                         .last_ms = (ns->core->now - last->last_at) / 1000000};
    snprintf(info->name, sizeof info->name, "%s", ns->name);
    for (int i = 0; i < KVQ__LIMITS; i++) {
        info->used[i] = counted_of(ns, (enum kvq__limit)i);
        info->refused[i] = ns->refused[i].times;
    }
}

int kvq__core_namespace_info(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                             struct kvq__namespace_info *out, char *text)
{
    struct kvq__namespace *ns;
    char full[KVQ_NAME_BYTES];
    int rc = kvq__namespace_find(core, peer, name, &ns, full, text);
    if (rc)
        return rc;
    if (ns) {
        kvq__quota_fill_info(ns, out);
    } else { // it has had nothing yet
        *out = (struct kvq__namespace_info){.quota = core->config.quota,
                                            .configured = core->config.quota};
        snprintf(out->name, sizeof out->name, "%s", full);
    }
    return 0;
}

// ---- At run time ----

static uint64_t most(enum kvq__limit which)
{
    return which == KVQ__SESSIONS ? UINT32_MAX : KVQ_MAX_QUOTA_BYTES;
}

static int check(const struct kvq__override *o, char *text)
{
    if (o->set >> KVQ__LIMITS)
        return kvq__fail(text, KVQ_E_INVALID,
                         "limits %#x are to be set; this daemon knows %d of them, bits 0 to %d",
                         o->set, KVQ__LIMITS, KVQ__LIMITS - 1);
    for (int i = 0; i < KVQ__LIMITS; i++)
        if ((o->set >> i & 1) && o->quota.limit[i] > most((enum kvq__limit)i))
            return kvq__fail(text, KVQ_E_LIMIT,
                             "a limit of %llu %s %s; at most %llu can be set, or 0 for no limit",
                             (unsigned long long)o->quota.limit[i], names[i].unit, names[i].where,
                             (unsigned long long)most((enum kvq__limit)i));
    return 0;
}

int kvq__quota_change(struct kvq__core *core, const struct kvq__peer *peer,
                      const struct kvq__override *change, struct kvq__override *out, char *text)
{
    struct kvq__namespace *ns;
    if (!peer->admin)
        return kvq__fail(text, KVQ_E_PERMISSION,
                         "user %u may not change limits: that takes the role admin (admin_uids, "
                         "admin_gids)",
                         peer->uid);
    if (!change->ns[0])
        return kvq__fail(text, KVQ_E_INVALID, "no namespace is named whose limits to change");
    int rc = check(change, text);
    rc = rc ? rc : kvq__namespace_get(core, peer, change->ns, &ns, text);
    if (rc < 0)
        return rc;
    *out = (struct kvq__override){.set = change->set ? ns->quota_set | change->set : 0};
    snprintf(out->ns, sizeof out->ns, "%s", ns->name);
    for (int i = 0; i < KVQ__LIMITS; i++) {
        uint64_t had = ns->quota_set >> i & 1 ? ns->quota.limit[i] : 0;
        out->quota.limit[i] = change->set >> i & 1 ? change->quota.limit[i] : had;
    }
    return 0;
}

int kvq__quota_apply(struct kvq__core *core, const struct kvq__override *o, char *text)
{
    static const struct kvq__peer self = {.admin = true};
    struct kvq__namespace *ns;
    int rc = check(o, text);
    rc = rc ? rc : kvq__namespace_get(core, &self, o->ns, &ns, text);
    if (rc == KVQ_E_NO_NAMESPACE)
        return kvq__fail(
            text, KVQ_E_INVALID,
            "there is no namespace \"%s\" (any more): the configuration has no section "
            "of that name",
            o->ns);
    if (rc < 0)
        return rc;
    ns->quota_set = o->set;
    for (int i = 0; i < KVQ__LIMITS; i++)
        ns->quota.limit[i] = o->set >> i & 1 ? o->quota.limit[i] : ns->base_quota.limit[i];
    return 0;
}

// ---- On disk ----

static struct kvq__namespace *find_quota_namespace(struct kvq__core *core, const char *name)
{
    static const struct kvq__peer self = {.admin = true};
    struct kvq__namespace *ns;
    return kvq__namespace_get(core, &self, name, &ns, NULL) == 0 ? ns : NULL;
}

void kvq__disk_used(struct kvq__core *core, const char *name, uint64_t bytes)
{
    struct kvq__namespace *ns = find_quota_namespace(core, name);
    if (ns)
        ns->used[KVQ__DISK_BYTES] = bytes;
}

void kvq__disk_refused(struct kvq__core *core, const char *name, const char *text)
{
    struct kvq__namespace *ns = find_quota_namespace(core, name);
    if (!ns)
        return;
    note_refusal(ns, KVQ__DISK_BYTES, 0);
    tell_refusal(ns, text);
}
