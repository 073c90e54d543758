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

#define FORGOT_NS 60000000000ull // a deleted copy counts as gone for so long
#define AGAIN_NS  10000000000ull // a copy that was not deleted is tried again so much later

// Copies that are being deleted at a time. Each deletion is a task of the store's, with a stack,
// and a client with a hundred thousand parked sessions may end.
enum { FORGETS_OUT = 4 };

// Sessions that are being fetched at a time, and those of one namespace. A fetch is a task of the
// store's as well, which looks for room every few milliseconds; the store reads three at a time.
enum { FETCHES_OUT = 32, FETCHES_OF_ONE = 16 };

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

static int compare_forgets(const struct kvq__forget *a, const struct kvq__forget *b)
{
    int order = strcmp(a->ns, b->ns);
    order = order ? order : strcmp(a->name, b->name);
    return order ? order : (a->stamp > b->stamp) - (a->stamp < b->stamp);
}

RB_GENERATE_STATIC(kvq__forget_tree, kvq__forget, tree, compare_forgets)

static void set_phase(struct kvq__core *core, struct kvq__forget *f, enum kvq__forget_phase phase)
{
    struct kvq__forgets *all = &core->disk.forgets;
    assert(phase < KVQ__FORGET_PHASES);
    TAILQ_REMOVE(&all->in[f->phase], f, link);
    all->n_out -= f->phase == KVQ__FORGET_TAKEN;
    f->phase = phase;
    all->n_out += f->phase == KVQ__FORGET_TAKEN;
    TAILQ_INSERT_TAIL(&all->in[phase], f, link);
}

static bool has_to_go(const struct kvq__core *core)
{
    return core->disk.forgets.n_out < FORGETS_OUT &&
           !TAILQ_EMPTY(&core->disk.forgets.in[KVQ__FORGET_WAITS]);
}

static struct kvq__forget forget_key(const char *ns, const char *name, uint64_t stamp)
{
    struct kvq__forget key = {.stamp = stamp};
    snprintf(key.ns, sizeof key.ns, "%s", ns);
    snprintf(key.name, sizeof key.name, "%s", name);
    return key;
}

static struct kvq__forget *forget_of(const struct kvq__core *core, const char *ns, const char *name,
                                     uint64_t stamp)
{
    struct kvq__forget key = forget_key(ns, name, stamp);
    struct kvq__forget_tree tree = core->disk.forgets.tree; // finding changes nothing
    return RB_FIND(kvq__forget_tree, &tree, &key);
}

void kvq__forgets_open(struct kvq__core *core)
{
    RB_INIT(&core->disk.forgets.tree);
    for (uint32_t i = 0; i < KVQ__FORGET_PHASES; i++)
        TAILQ_INIT(&core->disk.forgets.in[i]);
}

void kvq__park_forget(struct kvq__core *core, const struct kvq__namespace *ns, const char *name,
                      uint64_t stamp)
{
    if (core->closing || stamp == 0 || forget_of(core, ns->name, name, stamp))
        return;
    struct kvq__forget *f = kvq__allocate(core, sizeof *f);
    if (!f) // the next start deletes copies of unnamed sessions
        return;
    *f = forget_key(ns->name, name, stamp);
    RB_INSERT(kvq__forget_tree, &core->disk.forgets.tree, f);
    TAILQ_INSERT_TAIL(&core->disk.forgets.in[f->phase], f, link);
    if (has_to_go(core))
        kvq__park_want(core);
}

bool kvq__park_forgot(struct kvq__core *core, const struct kvq__store_job *order,
                      enum kvq__forget_outcome outcome)
{
    assert(order->kind == KVQ__JOB_FORGET);
    struct kvq__forget *f = forget_of(core, order->ns, order->name, order->stamp);
    if (!f || (f->phase != KVQ__FORGET_TAKEN && f->phase != KVQ__FORGET_IN_LINE))
        return false; // the order was called off
    static const enum kvq__forget_phase then[] = {[KVQ__FORGET_GONE] = KVQ__FORGET_DONE,
                                                  [KVQ__FORGET_FAILED] = KVQ__FORGET_LATER,
                                                  [KVQ__FORGET_IN_USE] = KVQ__FORGET_IN_LINE};
    const bool first = outcome == KVQ__FORGET_FAILED && !f->failed;
    f->failed |= first;
    f->at = core->now + (outcome == KVQ__FORGET_GONE ? FORGOT_NS : AGAIN_NS);
    set_phase(core, f, then[outcome]);
    if (has_to_go(core))
        kvq__park_want(core);
    return first;
}

bool kvq__park_forgotten(const struct kvq__core *core, const char *ns, const char *name,
                         uint64_t stamp)
{
    return stamp && forget_of(core, ns, name, stamp);
}

static void forget_free(struct kvq__core *core, struct kvq__forget *f)
{
    RB_REMOVE(kvq__forget_tree, &core->disk.forgets.tree, f);
    TAILQ_REMOVE(&core->disk.forgets.in[f->phase], f, link);
    core->disk.forgets.n_out -= f->phase == KVQ__FORGET_TAKEN;
    kvq__deallocate(core, f, sizeof *f);
}

void kvq__park_keep(struct kvq__core *core, const char *ns, const char *name)
{
    struct kvq__forget_tree *tree = &core->disk.forgets.tree;
    struct kvq__forget key = forget_key(ns, name, 0), *next;
    assert(ns[0] && name[0]);
    struct kvq__forget *f = RB_NFIND(kvq__forget_tree, tree, &key);
    for (; f && strcmp(f->ns, ns) == 0 && strcmp(f->name, name) == 0; f = next) {
        next = RB_NEXT(kvq__forget_tree, tree, f);
        forget_free(core, f);
    }
    if (has_to_go(core))
        kvq__park_want(core);
}

// The first copy in a phase whose time has come; NULL: none. Copies wait in a phase for the same
// time, so they stand in its order.
static struct kvq__forget *first_due(const struct kvq__core *core, enum kvq__forget_phase phase)
{
    struct kvq__forget *f = TAILQ_FIRST(&core->disk.forgets.in[phase]);
    return f && core->now >= f->at ? f : NULL;
}

void kvq__forgets_tick(struct kvq__core *core)
{
    struct kvq__forget *f;
    while ((f = first_due(core, KVQ__FORGET_DONE)))
        forget_free(core, f);
    while ((f = first_due(core, KVQ__FORGET_LATER)))
        set_phase(core, f, KVQ__FORGET_WAITS);
    if (has_to_go(core))
        kvq__park_want(core);
}

void kvq__forgets_close(struct kvq__core *core)
{
    struct kvq__forget *f;
    while ((f = RB_MIN(kvq__forget_tree, &core->disk.forgets.tree)))
        forget_free(core, f);
}

// ---- What is wanted of whoever saves sessions ----

static void take_forget(struct kvq__core *core, struct kvq__forget *f, struct kvq__store_job *job)
{
    set_phase(core, f, KVQ__FORGET_TAKEN);
    *job = (struct kvq__store_job){.kind = KVQ__JOB_FORGET, .stamp = f->stamp};
    memcpy(job->ns, f->ns, sizeof job->ns);
    memcpy(job->name, f->name, sizeof job->name);
}

static bool next_forget(struct kvq__core *core, struct kvq__store_job *job)
{
    bool some = has_to_go(core);
    if (some)
        take_forget(core, TAILQ_FIRST(&core->disk.forgets.in[KVQ__FORGET_WAITS]), job);
    return some;
}

bool kvq__park_last_forget(struct kvq__core *core, struct kvq__store_job *job)
{
    struct kvq__forgets *all = &core->disk.forgets;
    struct kvq__forget *f;
    while ((f = TAILQ_FIRST(&all->in[KVQ__FORGET_WAITS])) ||
           (f = TAILQ_FIRST(&all->in[KVQ__FORGET_LATER]))) {
        if (f->name[0] != '#') {
            take_forget(core, f, job);
            return true;
        }
        forget_free(core, f);
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

// The first session that can be read back: the blocks of a session being parked are still going.
static struct kvq__session *first_fetch(const struct kvq__namespace *ns)
{
    struct kvq__session *s;
    TAILQ_FOREACH (s, &ns->fetches, fetch.link)
        if (!s->park || s->park->ticket.kind != KVQ__TICKET_PARK)
            return s;
    return NULL;
}

// Whether `a` is read before `b`: its namespace has fewer fetches under way, or as many and the
// fetch was asked for earlier.
static bool is_before(const struct kvq__session *a, const struct kvq__session *b)
{
    return a->ns->n_reading != b->ns->n_reading ? a->ns->n_reading < b->ns->n_reading
                                                : a->fetch.at < b->fetch.at;
}

static bool next_fetch(struct kvq__core *core, struct kvq__store_job *job)
{
    const struct kvq__namespace *ns;
    struct kvq__session *s = NULL, *first;
    if (core->disk.n_wanted == 0 || core->disk.n_reading >= FETCHES_OUT)
        return false;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        if (ns->n_reading < FETCHES_OF_ONE && (first = first_fetch(ns)) &&
            (!s || is_before(first, s)))
            s = first;
    if (!s)
        return false;
    kvq__residency_set(s, KVQ__FETCH_TAKEN);
    *job = (struct kvq__store_job){.kind = KVQ__JOB_FETCH,
                                   .id = s->id,
                                   .shard = s->group ? s->shard : 0,
                                   .stamp = s->saving.stamp};
    name_job(job, s);
    return true;
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

// The session of a handle that may write, as parking and pinning need.
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
