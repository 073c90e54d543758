// SPDX-License-Identifier: Apache-2.0
//
// What the core asks of whoever saves sessions, so that they can be parked (saved.h), and what
// clients and administration ask of the core.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/residency/park.h"
#include "daemon/core/residency/residency.h"
#include "daemon/core/residency/saved.h"
#include "daemon/core/session/group.h"

#define FORGOT_NS 60000000000ull // a copy that was deleted counts as gone for so long
#define AGAIN_NS  10000000000ull // a deletion that failed is tried again so much later

void kvq__park_want(struct kvq__core *core)
{
    if (core->config.wants)
        core->config.wants(core->config.context);
}

void kvq__stored_name(const struct kvq__session *s, char *name)
{
    if (s->name[0])
        snprintf(name, KVQ_NAME_BYTES, "%s", s->name);
    else
        snprintf(name, KVQ_NAME_BYTES, "#%llu", (unsigned long long)s->id);
}

// ---- What is to be forgotten ----

void kvq__park_forget(struct kvq__core *core, const struct kvq__namespace *ns, const char *name,
                      uint64_t stamp)
{
    struct kvq__forget *f;
    if (core->closing || stamp == 0)
        return;
    TAILQ_FOREACH (f, &core->forgets, link)
        if (f->stamp == stamp)
            return;
    f = kvq__allocate(core, sizeof *f);
    if (!f) // the next start sees to those without names
        return;
    snprintf(f->ns, sizeof f->ns, "%s", ns->name);
    snprintf(f->name, sizeof f->name, "%s", name);
    f->stamp = stamp;
    TAILQ_INSERT_TAIL(&core->forgets, f, link);
    core->n_forgets++;
    kvq__park_want(core);
}

static struct kvq__forget *forget_of(const struct kvq__core *core, uint64_t stamp)
{
    struct kvq__forget *f;
    TAILQ_FOREACH (f, &core->forgets, link)
        if (f->stamp == stamp)
            return f;
    return NULL;
}

bool kvq__park_forgot(struct kvq__core *core, uint64_t stamp, bool gone)
{
    struct kvq__forget *f = forget_of(core, stamp);
    if (!f)
        return false;
    assert(f->taken && f->done_at == 0);
    bool first = !gone && f->again_at == 0;
    f->taken = gone;
    if (gone)
        f->done_at = core->now ? core->now : 1;
    else
        f->again_at = core->now + AGAIN_NS;
    return first;
}

bool kvq__park_forgotten(const struct kvq__core *core, uint64_t stamp)
{
    return stamp && forget_of(core, stamp);
}

static void forget_free(struct kvq__core *core, struct kvq__forget *f)
{
    TAILQ_REMOVE(&core->forgets, f, link);
    core->n_forgets--;
    kvq__deallocate(core, f, sizeof *f);
}

static bool has_to_go(const struct kvq__core *core, const struct kvq__forget *f)
{
    return !f->taken && f->again_at <= core->now;
}

void kvq__forgets_tick(struct kvq__core *core)
{
    struct kvq__forget *f, *next;
    for (f = TAILQ_FIRST(&core->forgets); f; f = next) {
        next = TAILQ_NEXT(f, link);
        if (f->done_at && core->now - f->done_at >= FORGOT_NS)
            forget_free(core, f);
        else if (has_to_go(core, f))
            kvq__park_want(core);
    }
}

void kvq__forgets_close(struct kvq__core *core)
{
    while (!TAILQ_EMPTY(&core->forgets))
        forget_free(core, TAILQ_FIRST(&core->forgets));
}

// ---- What is wanted of whoever saves sessions ----

static bool next_forget(struct kvq__core *core, struct kvq__store_job *job)
{
    struct kvq__forget *f;
    TAILQ_FOREACH (f, &core->forgets, link) {
        if (!has_to_go(core, f))
            continue;
        f->taken = true;
        *job = (struct kvq__store_job){.kind = KVQ__JOB_FORGET, .stamp = f->stamp};
        memcpy(job->ns, f->ns, sizeof job->ns);
        memcpy(job->name, f->name, sizeof job->name);
        return true;
    }
    return false;
}

static void name_job(struct kvq__store_job *job, const struct kvq__session *s)
{
    snprintf(job->ns, sizeof job->ns, "%s", s->ns->name);
    snprintf(job->session, sizeof job->session, "#%llu", (unsigned long long)s->id);
    kvq__stored_name(s, job->name);
}

bool kvq__park_unsaved(const struct kvq__park *t)
{
    bool unsaved = false;
    for (uint32_t i = 0; i < t->n; i++)
        unsaved |=
            t->members[i] && (kvq__is_unsaved(t->members[i]) || !t->members[i]->saving.stored);
    return unsaved;
}

static bool next_save(struct kvq__core *core, struct kvq__store_job *job)
{
    struct kvq__park *t;
    for (t = kvq__park_after(core, NULL); t; t = kvq__park_after(core, t)) {
        if (t->ticket.phase != KVQ__QUEUED || kvq__park_is_loading(t))
            continue;
        kvq__ticket_enter(&t->ticket, KVQ__WRITING);
        *job = (struct kvq__store_job){.kind = KVQ__JOB_SAVE,
                                       .id = t->ticket.id,
                                       .stamp = t->members[0]->saving.stamp,
                                       .stored = !kvq__park_unsaved(t)};
        name_job(job, t->members[0]);
        return true;
    }
    return false;
}

static bool next_fetch(struct kvq__core *core, struct kvq__store_job *job)
{
    struct kvq__session *s;
    TAILQ_FOREACH (s, &core->fetches, fetch.link) {
        if (s->park && s->park->ticket.kind == KVQ__TICKET_PARK) // its blocks are still going
            continue;
        kvq__residency_set(s, KVQ__FETCH_TAKEN);
        *job = (struct kvq__store_job){.kind = KVQ__JOB_FETCH,
                                       .id = s->id,
                                       .shard = s->group ? s->shard : 0,
                                       .stamp = s->saving.stamp};
        name_job(job, s);
        return true;
    }
    return false;
}

bool kvq__park_next(struct kvq__core *core, struct kvq__store_job *job)
{
    return next_forget(core, job) || next_fetch(core, job) || next_save(core, job);
}

// ---- Pinning ----

static void set_stay(struct kvq__session *s, bool stay)
{
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (m)
            m->pinned = stay;
    }
    if (stay)
        kvq__fetch_ask(s);
}

// ---- Asking ----

int kvq__session_park_named(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                            const char *name, struct kvq__move_info *info, char *text)
{
    struct kvq__session *s;
    int rc = kvq__session_get(core, peer, ns, name, &s, text);
    return rc ? rc : kvq__park_start(s, KVQ__PARK_ASKED, info, text);
}

int kvq__session_prefetch_named(struct kvq__core *core, const struct kvq__peer *peer,
                                const char *ns, const char *name, struct kvq__move_info *info,
                                char *text)
{
    struct kvq__session *s;
    int rc = kvq__session_get(core, peer, ns, name, &s, text);
    return rc ? rc : kvq__prefetch_start(s, info, text);
}

int kvq__session_pin_named(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                           const char *name, bool stay, char *text)
{
    struct kvq__session *s;
    int rc = kvq__session_get(core, peer, ns, name, &s, text);
    if (rc == 0)
        set_stay(s, stay);
    return rc;
}

// What is asked through a handle is for those who may write.
static int get_writer(struct kvq__client *client, uint64_t value, const char *what,
                      struct kvq__session **s, char *text)
{
    struct kvq__handle *h;
    int rc = kvq__handle_attached(client, value, &h, text);
    if (rc == 0 && h->read_only)
        rc = kvq__fail(text, KVQ_E_READ_ONLY,
                       "a session opened read-only cannot be %s through that handle; do it by "
                       "name, or open it for writing",
                       what);
    *s = rc ? NULL : h->session;
    return rc;
}

int kvq__session_park(struct kvq__client *client, uint64_t handle, struct kvq__move_info *info,
                      char *text)
{
    struct kvq__session *s;
    int rc = get_writer(client, handle, "parked", &s, text);
    return rc ? rc : kvq__park_start(s, KVQ__PARK_ASKED, info, text);
}

int kvq__session_prefetch(struct kvq__client *client, uint64_t handle, struct kvq__move_info *info,
                          char *text)
{
    struct kvq__handle *h;
    int rc = kvq__handle_attached(client, handle, &h, text);
    return rc ? rc : kvq__prefetch_start(h->session, info, text);
}

int kvq__session_pin(struct kvq__client *client, uint64_t handle, bool stay, char *text)
{
    struct kvq__session *s;
    int rc = get_writer(client, handle, stay ? "pinned" : "unpinned", &s, text);
    if (rc == 0)
        set_stay(s, stay);
    return rc;
}
