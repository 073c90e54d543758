// SPDX-License-Identifier: Apache-2.0
//
// Which extents clients are told of that attend in their own context, and so may have mapped.
//
// Nothing takes a mapping away from a client. So an extent that any client was ever told of is
// never given to another namespace: when it is empty and those clients are gone, its memory goes
// back to the system, and the next owner gets other memory.
#include <assert.h>
#include <string.h>

#include "daemon/core/state.h"

// Kept for those who look at extents, since there may be many of these and of clients.
static void note_mapped(struct kvq__namespace *ns, const struct kvq__pool *pool)
{
    const struct kvq__export_record *t;
    uint32_t mapped = 0;
    LIST_FOREACH (t, &ns->exports, link)
        if (t->pool == pool && t->mapped > mapped)
            mapped = t->mapped;
    ns->arenas[pool - ns->core->pools].mapped = mapped;
}

void kvq__exports_drop(struct kvq__client *client)
{
    struct kvq__namespace *ns;
    TAILQ_FOREACH (ns, &client->core->namespaces, link) {
        struct kvq__export_record *t = LIST_FIRST(&ns->exports), *next;
        for (; t; t = next) {
            next = LIST_NEXT(t, link);
            if (t->client != client)
                continue;
            LIST_REMOVE(t, link);
            note_mapped(ns, t->pool);
            kvq__deallocate(client->core, t, sizeof *t);
        }
    }
}

static struct kvq__export_record *export_of(struct kvq__client *client, struct kvq__namespace *ns,
                                            const struct kvq__pool *pool)
{
    struct kvq__export_record *t;
    LIST_FOREACH (t, &ns->exports, link)
        if (t->client == client && t->pool == pool)
            return t;
    t = kvq__allocate(client->core, sizeof *t);
    if (!t)
        return NULL;
    t->client = client;
    t->pool = pool;
    LIST_INSERT_HEAD(&ns->exports, t, link);
    return t;
}

enum { AT_ONCE = 32 }; // extents that one walk finds

// The namespace's extents of a pool are in its arena, and among the pool's empty ones.
struct walk {
    const struct kvq__namespace *ns;
    uint32_t after;                     // looked for: those with the lowest serials above this,
    struct kvq__extent *found[AT_ONCE]; // ascending
    uint32_t n;
};

static void export_if_new(struct walk *w, struct kvq__extent *e)
{
    uint32_t i;
    if (e->last != w->ns || e->serial <= w->after)
        return;
    if (w->n == AT_ONCE && e->serial > w->found[AT_ONCE - 1]->serial)
        return;
    w->n -= w->n == AT_ONCE;
    for (i = w->n++; i > 0 && w->found[i - 1]->serial > e->serial; i--)
        w->found[i] = w->found[i - 1];
    w->found[i] = e;
}

static void find_extents(struct walk *w, struct kvq__pool *pool)
{
    const struct kvq__arena *arena = &w->ns->arenas[pool - w->ns->core->pools];
    struct kvq__extent *e;
    w->n = 0;
    TAILQ_FOREACH (e, &arena->extents, link)
        export_if_new(w, e);
    TAILQ_FOREACH (e, &pool->empty, link)
        export_if_new(w, e);
    assert(w->n == 0 || w->found[w->n - 1]->serial <= arena->last_serial);
}

// Tells of extents behind *serial, up to `max`, and moves *serial. How many; *more: there are
// others.
static uint32_t tell_extents(const struct kvq__namespace *ns, struct kvq__pool *pool,
                             uint32_t *serial, struct kvq__extent_export *out, uint32_t max,
                             bool *more)
{
    struct walk w = {.ns = ns};
    uint32_t n = 0;
    do {
        w.after = *serial;
        find_extents(&w, pool);
        uint32_t some = w.n < max - n ? w.n : max - n;
        for (uint32_t i = 0; i < some; i++) {
            w.found[i]->exported = true;
            *serial = w.found[i]->serial;
            out[n++] = (struct kvq__extent_export){&w.found[i]->memory, w.found[i]->number};
        }
        *more = some < w.n;
    } while (!*more && w.n == AT_ONCE);
    return n;
}

int kvq__extents_tell(struct kvq__client *client, uint64_t handle, struct kvq__extent_export *out,
                      uint32_t max, uint64_t *known, bool *more, char *text)
{
    struct kvq__handle *h;
    client->told = NULL;
    int rc = kvq__handle_get(client, handle, &h);
    if (rc < 0)
        return kvq__fail(text, rc, "handle %#llx is no open session of this client",
                         (unsigned long long)handle);
    struct kvq__namespace *ns = h->session->ns;
    // The client maps the pool of the place where the session belongs: numbers of another pool's
    // extents would go over what is mapped there.
    struct kvq__pool *pool = kvq__home_of(h->session);
    struct kvq__export_record *t = export_of(client, ns, pool);
    if (!t)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory to note what this client maps");
    t->before = t->serial;
    uint32_t n = tell_extents(ns, pool, &t->serial, out, max, more);
    *known = *more ? t->serial : ns->arenas[pool - client->core->pools].last_serial;
    assert(t->serial <= *known);
    t->serial = (uint32_t)*known;
    t->mapped = t->serial > t->mapped ? t->serial : t->mapped;
    struct kvq__arena *arena = &ns->arenas[pool - client->core->pools];
    arena->mapped = arena->mapped > t->mapped ? arena->mapped : t->mapped;
    client->told = t;
    return (int)n;
}

void kvq__extents_untell(struct kvq__client *client)
{
    struct kvq__export_record *t = client->told;
    client->told = NULL;
    if (!t)
        return;
    assert(t->client == client && t->before <= t->serial && t->serial <= t->mapped);
    t->serial = t->before;
}

int kvq__pool_span(const struct kvq__core *core, const char *place, struct kvq__pool_span *out,
                   char *text)
{
    for (uint32_t i = 0; i < core->n_pools; i++) {
        const struct kvq__pool *pool = &core->pools[i];
        if (strcmp(place, kvq__pool_name(pool)) != 0)
            continue;
        *out = (struct kvq__pool_span){kvq__extents_span(pool), kvq__extent_unit(pool), pool->gpu};
        return 0;
    }
    return kvq__fail(text, KVQ_E_INVALID,
                     "place \"%.47s\" is none of this daemon's; `kvqctl status` lists them", place);
}
