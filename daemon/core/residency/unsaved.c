// SPDX-License-Identifier: Apache-2.0
//
// Sessions to save without being asked: those that nobody has open any more, or that were not used
// for a while. Only sessions whose last change is not saved are looked at, and of those in use as
// many as were not used for long enough.
#include <stdio.h>
#include <string.h>

#include "daemon/core/residency/saved.h"
#include "daemon/core/session/activity.h"
#include "daemon/core/session/group.h"
#include "daemon/core/state.h"

enum { LOOKS = 1024 }; // looks at sessions that were put off

bool kvq__unsaved_failed(struct kvq__core *core, const char *space, const char *name)
{
    const uint64_t first = 1000000000u, minute = 60 * first; // ns
    struct kvq__namespace *ns;
    struct kvq__session *s = NULL;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        if (strcmp(ns->name, space) == 0)
            s = kvq__session_named(ns, name);
    if (s)
        s = kvq__group_member(s, 0);
    if (!s)
        return false;
    uint64_t longer = s->saving.wait ? 2 * s->saving.wait : first;
    s->saving.wait = kvq__min(longer, minute);
    s->saving.after = core->now + s->saving.wait;
    bool tell = s->saving.failure_event_at == 0 || core->now - s->saving.failure_event_at >= minute;
    if (tell)
        s->saving.failure_event_at = core->now;
    return tell;
}

// `s` is the first shard that is there.
static bool is_wanted(const struct kvq__session *s, uint32_t which, uint64_t idle_ns)
{
    const struct kvq__core *core = s->core;
    bool left = (s->spec.save_on_detach && !kvq__group_is_open(s)) || kvq__group_outlived(s);
    bool idle = !kvq__session_uses(s, KVQ__USES_IDLE) && core->now - s->idle_since >= idle_ns;
    uint32_t missing;
    if (!s->name[0] || !kvq__group_is_unsaved(s))
        return false;
    if (kvq__group_missing(s, &missing))
        return which == KVQ__UNSAVED_ALL && s->tokens > 0;
    if (which == KVQ__UNSAVED_ALL)
        return true;
    return core->now >= s->saving.after &&
           (((which & KVQ__UNSAVED_LEFT) && left) || ((which & KVQ__UNSAVED_IDLE) && idle));
}

struct ask {
    struct kvq__core *core;
    uint32_t which;
    uint64_t idle_ns;
    struct kvq__unsaved *out;
    uint32_t n, max;
};

static struct kvq__session *first_shard(struct kvq__session *s)
{
    struct kvq__session *first = s;
    for (uint32_t i = s->shard; i-- > 0;)
        if (kvq__group_member(s, i))
            first = kvq__group_member(s, i);
    return first;
}

// Takes the session's group, once. False if the group is not wanted.
static bool take_if_unsaved(struct ask *ask, struct kvq__session *s)
{
    struct kvq__session *first = first_shard(s);
    if (!is_wanted(first, ask->which, ask->idle_ns))
        return false;
    if (first->saving.ask == ask->core->unsaved.asks)
        return true;
    first->saving.ask = ask->core->unsaved.asks;
    if (ask->n < ask->max) {
        struct kvq__unsaved *out = &ask->out[ask->n];
        snprintf(out->ns, sizeof out->ns, "%s", first->ns->name);
        snprintf(out->name, sizeof out->name, "%s", first->name);
        out->id = first->id;
        out->tokens = first->tokens;
    }
    ask->n++;
    return true;
}

// Moves a session that is not wanted now to another list.
static void put_back(struct kvq__session *s)
{
    if (s->core->now < first_shard(s)->saving.after)
        kvq__unsaved_put_off(s);
    else
        kvq__unsaved_note(s);
}

// Looks at a list as it is now: a session that is put back may come to its end again.
static void look_at_list(struct ask *ask, enum kvq__unsaved_list which, uint32_t looks)
{
    struct kvq__session_list *list = &ask->core->unsaved.lists[which];
    struct kvq__session *s = TAILQ_FIRST(list), *next;
    const struct kvq__session *last = TAILQ_LAST(list, kvq__session_list);
    for (; s && ask->n < ask->max && looks-- > 0; s = next) {
        next = s == last ? NULL : TAILQ_NEXT(s, saving.link);
        ask->core->lookup.looks++;
        if (!take_if_unsaved(ask, s))
            put_back(s);
    }
}

// Looks at the sessions in use in the order of their last use, oldest first.
static void look_at_used(struct ask *ask)
{
    struct kvq__session *s = TAILQ_FIRST(&ask->core->unsaved.lists[KVQ__UNSAVED_IN_USE]), *next;
    for (; s && ask->n < ask->max; s = next) {
        next = TAILQ_NEXT(s, saving.link);
        ask->core->lookup.looks++;
        if (ask->core->now - s->idle_since < ask->idle_ns)
            break;
        if (!take_if_unsaved(ask, s) && ask->core->now < first_shard(s)->saving.after)
            kvq__unsaved_put_off(s);
    }
}

static void take_all_unsaved(struct ask *ask)
{
    struct kvq__session *s;
    for (uint32_t i = 0; i < KVQ__UNSAVED_LISTS; i++)
        TAILQ_FOREACH (s, &ask->core->unsaved.lists[i], saving.link)
            take_if_unsaved(ask, s);
}

uint32_t kvq__core_unsaved(struct kvq__core *core, uint32_t which, uint64_t idle_ns,
                           struct kvq__unsaved *out, uint32_t max)
{
    struct ask ask = {core, which, idle_ns, out, 0, max};
    core->unsaved.asks++;
    if (which == KVQ__UNSAVED_ALL) {
        take_all_unsaved(&ask);
        return ask.n;
    }
    look_at_list(&ask, KVQ__UNSAVED_AT_ONCE, UINT32_MAX);
    if (which & KVQ__UNSAVED_IDLE)
        look_at_used(&ask);
    look_at_list(&ask, KVQ__UNSAVED_PUT_OFF, LOOKS);
    return ask.n;
}
