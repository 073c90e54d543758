// SPDX-License-Identifier: Apache-2.0
//
// Namespaces: who may use them, and their limits.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/state.h"

static bool contains(const uint32_t *list, uint32_t n, uint32_t value)
{
    for (uint32_t i = 0; i < n; i++)
        if (list[i] == value)
            return true;
    return false;
}

bool kvq__namespace_allows(const struct kvq__namespace *ns, const struct kvq__peer *peer)
{
    assert(peer->n_gids <= KVQ_MAX_GROUPS);
    if (peer->admin || contains(ns->uids, ns->n_uids, peer->uid))
        return true;
    for (uint32_t i = 0; i < peer->n_gids; i++)
        if (contains(ns->gids, ns->n_gids, peer->gids[i]))
            return true;
    return false;
}

static struct kvq__namespace *find_namespace(struct kvq__core *core, const char *name)
{
    struct kvq__namespace *ns;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        if (strcmp(ns->name, name) == 0)
            return ns;
    return NULL;
}

// What a namespace has of its section besides limits.
struct lists {
    uint32_t *uids, *gids;
    char (*share_with)[KVQ_NAME_BYTES];
    uint32_t n_uids, n_gids, n_share_with;
};

static bool copy_uid_list(struct kvq__core *core, const uint32_t *from, uint32_t n, uint32_t **to,
                          uint32_t *n_to)
{
    assert(!*to && *n_to == 0);
    if (n == 0)
        return true;
    *to = kvq__allocate(core, n * sizeof **to);
    if (!*to)
        return false;
    memcpy(*to, from, n * sizeof **to);
    *n_to = n;
    return true;
}

static bool copy_names(struct kvq__core *core, const struct kvq__namespace_config *c,
                       struct lists *to)
{
    if (c->n_share_with == 0)
        return true;
    to->share_with = kvq__allocate(core, c->n_share_with * sizeof *to->share_with);
    if (!to->share_with)
        return false;
    to->n_share_with = c->n_share_with;
    for (uint32_t i = 0; i < c->n_share_with; i++)
        snprintf(to->share_with[i], sizeof to->share_with[i], "%s", c->share_with[i]);
    return true;
}

static void free_lists(struct kvq__core *core, const struct lists *l)
{
    kvq__deallocate(core, l->uids, l->n_uids * sizeof *l->uids);
    kvq__deallocate(core, l->gids, l->n_gids * sizeof *l->gids);
    kvq__deallocate(core, l->share_with, l->n_share_with * sizeof *l->share_with);
}

// False if there is no memory; what was copied is to be freed all the same.
static bool copy_lists(struct kvq__core *core, const struct kvq__namespace_config *c,
                       struct lists *to)
{
    *to = (struct lists){0};
    return copy_uid_list(core, c->uids, c->n_uids, &to->uids, &to->n_uids) &&
           copy_uid_list(core, c->gids, c->n_gids, &to->gids, &to->n_gids) &&
           copy_names(core, c, to);
}

// The namespace takes them over; returns those that it had.
static struct lists take_lists(struct kvq__namespace *ns, const struct lists *l)
{
    struct lists before = {ns->uids,   ns->gids,   ns->share_with,
                           ns->n_uids, ns->n_gids, ns->n_share_with};
    ns->uids = l->uids;
    ns->n_uids = l->n_uids;
    ns->gids = l->gids;
    ns->n_gids = l->n_gids;
    ns->share_with = l->share_with;
    ns->n_share_with = l->n_share_with;
    return before;
}

static void namespace_free(struct kvq__core *core, struct kvq__namespace *ns)
{
    struct lists lists = take_lists(ns, &(struct lists){0});
    assert(TAILQ_EMPTY(&ns->sessions) && RB_EMPTY(&ns->by_id) && LIST_EMPTY(&ns->exports));
    assert(ns->used[KVQ__HOST_BYTES] == 0 && ns->used[KVQ__DEVICE_BYTES] == 0);
    assert(ns->used[KVQ__TABLE_BYTES] == 0);
    free_lists(core, &lists);
    kvq__deallocate(core, ns, sizeof *ns);
}

bool kvq__namespace_shares(const struct kvq__namespace *ns, const char *with)
{
    for (uint32_t i = 0; i < ns->n_share_with; i++)
        if (strcmp(ns->share_with[i], "*") == 0 || strcmp(ns->share_with[i], with) == 0)
            return true;
    return false;
}

static struct kvq__namespace *make_namespace(struct kvq__core *core,
                                             const struct kvq__namespace_config *c)
{
    struct lists lists;
    struct kvq__namespace *ns = kvq__allocate(core, sizeof *ns);
    assert(strlen(c->name) < KVQ_NAME_BYTES && !find_namespace(core, c->name));
    if (!ns)
        return NULL;
    ns->core = core;
    snprintf(ns->name, sizeof ns->name, "%s", c->name);
    ns->quota = ns->base_quota = c->quota;
    for (uint32_t i = 0; i < core->n_pools; i++)
        kvq__arena_open(&ns->arenas[i], ns, &core->pools[i]);
    LIST_INIT(&ns->exports);
    TAILQ_INIT(&ns->sessions);
    TAILQ_INIT(&ns->fetches);
    RB_INIT(&ns->by_id);
    for (uint32_t i = 0; i < KVQ__LIMITS; i++)
        kvq__line_open(&ns->lines[i]);
    kvq__prefixes_init(&ns->prefixes, ns);
    bool copied = copy_lists(core, c, &lists);
    take_lists(ns, &lists);
    if (!copied) {
        namespace_free(core, ns);
        return NULL;
    }
    ns->number = ++core->last.namespace;
    TAILQ_INSERT_TAIL(&core->namespaces, ns, link);
    return ns;
}

int kvq__core_namespace(struct kvq__core *core, const struct kvq__namespace_config *config,
                        char *text)
{
    size_t n = config->name ? strlen(config->name) : 0;
    if (n == 0 || n >= KVQ_NAME_BYTES)
        return kvq__fail(text, KVQ_E_INVALID,
                         "a namespace's name has %zu bytes; it can have 1 to %d", n,
                         KVQ_NAME_BYTES - 1);
    if (find_namespace(core, config->name))
        return kvq__fail(text, KVQ_E_EXISTS,
                         "namespace \"%s\" is configured twice; remove one of the two",
                         config->name);
    struct kvq__namespace *ns = make_namespace(core, config);
    if (!ns)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for namespace \"%s\"", config->name);
    ns->configured = true;
    return 0;
}

// "uid-N" without leading zeros; false if it is none.
static bool parse_uid(const char *name, uint32_t *uid)
{
    char again[16], *end;
    if (strncmp(name, "uid-", 4) != 0)
        return false;
    unsigned long value = strtoul(name + 4, &end, 10);
    snprintf(again, sizeof again, "uid-%lu", value & 0xffffffffu);
    *uid = (uint32_t)value;
    return *end == '\0' && strcmp(again, name) == 0;
}

// Those of users alone are made when they are needed.
static int make_default(struct kvq__core *core, const char *name, struct kvq__namespace **ns,
                        char *text)
{
    uint32_t uid = 0;
    bool good = parse_uid(name, &uid);
    assert(good);
    (void)good;
    struct kvq__namespace_config config = {
        .name = name,
        .quota = core->config.quota,
        .uids = &uid,
        .n_uids = 1,
    };
    *ns = make_namespace(core, &config);
    return *ns ? 0 : kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for namespace \"%s\"", name);
}

// Administrators alone are told: to others what does not exist is like what is another's.
static int no_namespace(const char *name, char *text)
{
    return kvq__fail(text, KVQ_E_NO_NAMESPACE,
                     "there is no namespace \"%.*s\": the configuration has no section of that "
                     "name, and it is none of a user's own, uid-N",
                     KVQ_NAME_BYTES, name);
}

int kvq__core_may_list(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                       char *text)
{
    uint32_t uid;
    if (!peer->admin || !name || !*name || find_namespace(core, name) || parse_uid(name, &uid))
        return 0;
    return no_namespace(name, text);
}

int kvq__namespace_find(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                        struct kvq__namespace **ns, char full[KVQ_NAME_BYTES], char *text)
{
    char own[32];
    uint32_t uid;
    *ns = NULL;
    snprintf(own, sizeof own, "uid-%u", peer->uid);
    if ((!name || !*name) && peer->uid == KVQ__NO_UID)
        return kvq__fail(text, KVQ_E_NO_NAMESPACE,
                         "who comes with a key has no namespace of its own; name one "
                         "(--namespace), as kvqctl session list shows them");
    snprintf(full, KVQ_NAME_BYTES, "%s", name && *name ? name : own);
    *ns = find_namespace(core, full);
    bool of_user = !*ns && parse_uid(full, &uid);
    if (of_user && uid != peer->uid && !peer->admin)
        return kvq__fail(text, KVQ_E_PERMISSION,
                         "user %u may not use namespace \"%s\"; use \"%s\" or one that the "
                         "configuration gives to this user or its groups",
                         peer->uid, full, own);
    if (!*ns && !of_user && peer->admin)
        return no_namespace(full, text);
    // One answer for what does not exist and what is another's, so that names stay secret.
    if (!of_user && (!*ns || !kvq__namespace_allows(*ns, peer)))
        return kvq__fail(text, KVQ_E_PERMISSION,
                         "user %u may not use namespace \"%s\"; use \"%s\", or have this user "
                         "or its group added to it in the configuration",
                         peer->uid, full, own);
    return 0;
}

int kvq__namespace_get(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                       struct kvq__namespace **ns, char *text)
{
    char full[KVQ_NAME_BYTES];
    int rc = kvq__namespace_find(core, peer, name, ns, full, text);
    return rc || *ns ? rc : make_default(core, full, ns, text);
}

// ---- At run time ----

// One entry of new settings, with memory for all that it says.
struct draft {
    struct kvq__namespace *ns;
    struct lists lists; // of a namespace that was there; a new one has its own
    bool made;
};

static bool draft_namespace(struct kvq__core *core, const struct kvq__namespace_config *c,
                            struct draft *d)
{
    d->ns = find_namespace(core, c->name);
    if (d->ns)
        return copy_lists(core, c, &d->lists);
    d->ns = make_namespace(core, c);
    d->made = d->ns != NULL;
    return d->made;
}

static void undo_draft(struct kvq__core *core, const struct draft *d)
{
    free_lists(core, &d->lists);
    if (!d->made)
        return;
    TAILQ_REMOVE(&core->namespaces, d->ns, link);
    namespace_free(core, d->ns);
}

static void rebase(struct kvq__namespace *ns, const struct kvq__quota *base)
{
    ns->base_quota = *base;
    for (int i = 0; i < KVQ__LIMITS; i++)
        if (!(ns->quota_set >> i & 1))
            ns->quota.limit[i] = base->limit[i];
}

static void put_draft(struct kvq__core *core, const struct kvq__namespace_config *c,
                      const struct draft *d)
{
    if (!d->made) {
        struct lists before = take_lists(d->ns, &d->lists);
        free_lists(core, &before);
    }
    d->ns->configured = true;
    rebase(d->ns, &c->quota);
}

static void put_settings(struct kvq__core *core, const struct kvq__core_settings *s)
{
    struct kvq__core_config *c = &core->config;
    struct kvq__namespace *ns;
    c->keep_ns = s->keep_ns;
    c->prefix_keep_ns = s->prefix_keep_ns;
    c->evict_idle_ns = s->evict_idle_ns;
    c->park_idle_ns = s->park_idle_ns;
    if (c->pack_error_ns != s->pack_error_ns)
        core->packing.sample.next_at = 0; // at once, whatever the interval was
    c->pack_error_ns = s->pack_error_ns;
    c->evict_above = s->evict_above;
    c->path = s->path;
    c->quota = s->quota;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        if (!ns->configured)
            rebase(ns, &s->quota);
}

int kvq__core_reconfigure(struct kvq__core *core, const struct kvq__core_settings *s, char *text)
{
    size_t bytes = (s->n_namespaces + 1) * sizeof(struct draft);
    struct draft *drafts = kvq__allocate(core, bytes);
    uint32_t n = 0;
    bool ok = drafts != NULL;
    while (ok && n < s->n_namespaces) {
        ok = draft_namespace(core, &s->namespaces[n], &drafts[n]);
        n++;
    }
    for (uint32_t i = 0; i < n && ok; i++)
        put_draft(core, &s->namespaces[i], &drafts[i]);
    while (!ok && n > 0)
        undo_draft(core, &drafts[--n]);
    if (ok)
        put_settings(core, s);
    kvq__deallocate(core, drafts, drafts ? bytes : 0);
    return ok ? 0
              : kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for the namespaces of new settings");
}

void kvq__namespaces_close(struct kvq__core *core)
{
    struct kvq__namespace *ns;
    assert(core->n_clients == 0 && core->n_sessions == 0);
    while ((ns = TAILQ_FIRST(&core->namespaces))) {
        TAILQ_REMOVE(&core->namespaces, ns, link);
        namespace_free(core, ns);
    }
}

void kvq__namespace_full(struct kvq__core *core, struct kvq__namespace *ns,
                         const struct kvq__pool *pool, uint64_t bytes, int code, const char *why)
{
    char text[KVQ_TEXT_BYTES];
    assert(pool->used_bytes <= pool->extents_taken && pool->extents_taken <= pool->budget);
    if (code == KVQ_E_QUOTA)
        kvq__quota_refuse(ns, kvq__pool_limit(pool), bytes, NULL);
    if (code != KVQ_E_NO_MEMORY ||
        (ns->full_event_at && core->now - ns->full_event_at < 1000000000u))
        return;
    ns->full_event_at = core->now ? core->now : 1;
    snprintf(text, sizeof text, "%llu of %llu bytes on %s are used, %llu more were asked for%s%s",
             (unsigned long long)pool->used_bytes, (unsigned long long)pool->budget,
             kvq__pool_name(pool), (unsigned long long)bytes, why ? "; " : "", why ? why : "");
    kvq__event(core, KVQ__EVENT_MEMORY_FULL, ns->name, "", 0, text);
}
