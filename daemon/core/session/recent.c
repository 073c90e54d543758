// SPDX-License-Identifier: Apache-2.0
//
// What is known of published sessions without looking at each: how many there are in a pool and how
// many tokens they have; in which order they were used; and whose last change is not saved. Kept up
// to date where it changes, so that sessions that do not matter cost nothing.
#include <assert.h>

#include "daemon/core/session/exact.h"
#include "daemon/core/session/group.h"
#include "daemon/core/state.h"

// ---- In the order of their last use ----

static struct kvq__arena *arena_of(const struct kvq__session *s)
{
    assert((size_t)(s->pool - s->core->pools) < s->core->n_pools);
    return &s->ns->arenas[s->pool - s->core->pools];
}

void kvq__recent_forget(struct kvq__session *s)
{
    struct kvq__arena *arena = arena_of(s);
    if (!s->last_used.listed)
        return;
    assert(arena->n_sessions > 0);
    TAILQ_REMOVE(&arena->sessions, s, last_used.link);
    arena->n_sessions--;
    s->last_used.listed = false;
}

void kvq__recent_put(struct kvq__session *s)
{
    struct kvq__arena *arena = arena_of(s);
    assert(s->published);
    kvq__recent_forget(s);
    TAILQ_INSERT_TAIL(&arena->sessions, s, last_used.link);
    arena->n_sessions++;
    s->last_used.listed = true;
}

// ---- Whose last change is not saved ----

static void list(struct kvq__session *s, enum kvq__unsaved_list at)
{
    struct kvq__core *core = s->core;
    assert(s->published || at == KVQ__SAVED);
    assert(s->saving.list < KVQ__UNSAVED_LISTS && (!s->saving.list || core->unsaved.n > 0));
    if (s->saving.list)
        TAILQ_REMOVE(&core->unsaved.lists[s->saving.list], s, saving.link);
    if (at)
        TAILQ_INSERT_TAIL(&core->unsaved.lists[at], s, saving.link);
    core->unsaved.n += (at != 0) - (s->saving.list != 0);
    s->saving.list = at;
}

void kvq__unsaved_note(struct kvq__session *s)
{
    if (!s->published || !s->name[0] || !kvq__is_unsaved(s))
        list(s, KVQ__SAVED);
    else if (s->spec.save_on_detach && !kvq__group_is_open(s))
        list(s, KVQ__UNSAVED_AT_ONCE);
    else
        list(s, KVQ__UNSAVED_IN_USE);
}

void kvq__unsaved_outlived(struct kvq__session *s)
{
    if (s->saving.list == KVQ__UNSAVED_IN_USE)
        list(s, KVQ__UNSAVED_AT_ONCE);
}

void kvq__unsaved_put_off(struct kvq__session *s)
{
    if (s->saving.list)
        list(s, KVQ__UNSAVED_PUT_OFF);
}

// ---- What happens to a session ----

void kvq__session_used(struct kvq__session *s)
{
    assert(s->idle_since <= s->core->now);
    s->idle_since = s->core->now;
    if (!s->published)
        return;
    kvq__recent_put(s);
    kvq__unsaved_note(s);
}

void kvq__session_changed(struct kvq__session *s)
{
    s->saving.commits++;
    kvq__session_used(s);
}

void kvq__session_saved(struct kvq__session *s, uint64_t commits)
{
    assert(commits <= s->saving.commits);
    s->saving.saved = commits;
    kvq__unsaved_note(s);
}

void kvq__session_count(struct kvq__session *s, uint64_t tokens)
{
    assert(!s->published || s->core->tokens >= s->tokens);
    if (s->published)
        s->core->tokens += tokens - s->tokens;
    s->tokens = tokens;
    kvq__exact_note(s);
}

void kvq__session_lies_in(struct kvq__session *s, struct kvq__pool *pool)
{
    assert(!s->pack.queued || !pool->gpu == !s->pool->gpu); // each has a queue of its own
    assert(!s->published || s->pool->sessions > 0);
    if (s->published) {
        kvq__recent_forget(s);
        s->pool->sessions--;
        pool->sessions++;
    }
    s->pool = pool;
    if (s->published)
        kvq__recent_put(s);
}

void kvq__recent_enter(struct kvq__session *s)
{
    assert(!s->published);
    s->published = true;
    s->pool->sessions++;
    s->core->tokens += s->tokens;
    kvq__exact_note(s);
    kvq__recent_put(s);
    kvq__unsaved_note(s);
}

void kvq__recent_leave(struct kvq__session *s)
{
    assert(s->published);
    kvq__exact_leave(s);
    kvq__recent_forget(s);
    assert(s->pool->sessions > 0 && s->core->tokens >= s->tokens);
    s->published = false;
    s->pool->sessions--;
    s->core->tokens -= s->tokens;
    kvq__unsaved_note(s);
}
