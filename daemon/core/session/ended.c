// SPDX-License-Identifier: Apache-2.0
//
// Sessions that have ended. A session is gone for everybody at once; its memory goes back in pieces
// between two looks at the rings, since a client may leave thousands of sessions behind, each of
// thousands of sheets and blocks. Requests that need this memory wait for the pieces (evict.c).
// Some sessions are finished before (finish.c), and given up where somebody needs their memory.
#include <assert.h>

#include "daemon/core/session/group.h"
#include "daemon/core/state.h"

// ---- One session ----

static void spend_work(struct kvq__core *core, uint64_t work)
{
    core->freeing.left -= work < core->freeing.left ? work : core->freeing.left;
    core->freeing.done += work;
}

// Keeps n_ended of the session's arena right: it counts ending sessions that still have pages.
static void note_pages(struct kvq__session *s)
{
    struct kvq__arena *was = s->ended.arena, *now = NULL;
    if ((s->ended.listed || s->ended.finish.phase) && s->n_pages > 0)
        now = &s->ns->arenas[s->pool - s->core->pools];
    if (was == now)
        return;
    if (was) {
        assert(was->n_ended > 0 && was->pool->n_ended > 0);
        was->n_ended--;
        was->pool->n_ended--;
    }
    if (now) {
        now->n_ended++;
        now->pool->n_ended++;
    }
    s->ended.arena = now;
}

// While a request references the session its sheets stay, without blocks: it may read the page
// table.
static uint32_t pop_ended_page(struct kvq__session *s, const struct kvq__drop *drop)
{
    assert(s->ended.listed);
    if (s->refs == 0)
        return kvq__sheets_pop(s, drop);
    return s->n_pages > 0 ? kvq__pages_pop(s, drop) : 0;
}

static bool has_pages(const struct kvq__session *s)
{
    return s->n_pages > 0 || (s->refs == 0 && s->n_sheets > 0);
}

static void drop_extras(struct kvq__session *s, const struct kvq__drop *drop)
{
    for (uint32_t i = 0; i < s->n_layers; i++)
        kvq__block_drop(s->core, &s->layers[i].extras, drop);
}

// Gives back as much as this turn may. True if nothing is left but what waits for requests under
// way: the last of these brings the session here again.
static bool give_session_back(struct kvq__session *s)
{
    struct kvq__core *core = s->core;
    assert(s->ended.listed && !s->published && s->ended.flight <= core->last.flight);
    // Requests that began since it ended have not found it.
    struct kvq__drop drop = kvq__session_drop_by(s, s->ended.flight);
    while (core->freeing.left > 0 && has_pages(s))
        spend_work(core, pop_ended_page(s, &drop));
    note_pages(s);
    if (!has_pages(s))
        drop_extras(s, &drop);
    if (has_pages(s))
        return false;
    if (s->refs > 0)
        return true;
    while (core->freeing.left > 0 && s->ids.n_parts > 0) {
        kvq__ids_pop(s);
        spend_work(core, 1);
    }
    return s->ids.n_parts == 0 && core->freeing.left > 0 && kvq__given_end(s);
}

static void leave_list(struct kvq__session *s)
{
    assert(s->ended.listed);
    TAILQ_REMOVE(&s->core->freeing.ended, s, link);
    s->ended.listed = false;
    note_pages(s);
}

static void go_on_with_ended(struct kvq__core *core)
{
    struct kvq__session *s;
    while (core->freeing.left > 0 && (s = TAILQ_FIRST(&core->freeing.ended))) {
        if (!give_session_back(s))
            return;
        leave_list(s);
        if (s->refs > 0)
            continue;
        spend_work(core, 1 + s->n_layers);
        kvq__session_dispose(s);
    }
}

// ---- What is finished before ----

// All of it is in the host's memory and stays as it is: on a GPU units are packed on the stream of
// a session's writer, who is gone.
static bool can_be_finished(const struct kvq__session *s)
{
    const struct kvq__core *core = s->core;
    if (core->draining || core->closing || s->pool->gpu || s->residency != KVQ__RESIDENT)
        return false;
    if (s->exclusive || s->move || s->park || s->restore || s->n_loading > 0 ||
        !LIST_EMPTY(&s->follows))
        return false;
    return kvq__ended_pages(s) > s->ids.sealed && kvq__ids_shareable(s, NULL) == 0;
}

void kvq__ended_finish_first(struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (m)
            m->ended.finish.wanted = can_be_finished(m);
    }
}

static void list_finishing(struct kvq__session *s)
{
    assert(s->dropped && !s->published && !s->ended.finish.phase && !s->ended.listed);
    s->ended.finish.wanted = false;
    s->ended.finish.phase = KVQ__FINISH_QUEUED;
    TAILQ_INSERT_TAIL(&s->core->finishing, s, link);
    note_pages(s);
}

static void list_ended(struct kvq__session *s)
{
    assert(!s->published && !s->writer && LIST_EMPTY(&s->handles) && LIST_EMPTY(&s->tables));
    assert(!s->ended.listed && !s->ended.finish.phase);
    s->ended.listed = true;
    s->ended.flight = s->core->last.flight;
    kvq__ids_cut(s, 0);
    TAILQ_INSERT_TAIL(&s->core->freeing.ended, s, link);
    note_pages(s);
}

void kvq__ended_finished(struct kvq__session *s)
{
    assert(s->ended.finish.phase != KVQ__FINISH_NOT && !s->ended.listed);
    TAILQ_REMOVE(&s->core->finishing, s, link);
    s->ended.finish.phase = KVQ__FINISH_NOT;
    list_ended(s);
}

void kvq__ended_give_up(struct kvq__core *core)
{
    struct kvq__session *s;
    while ((s = TAILQ_FIRST(&core->finishing)))
        kvq__ended_finished(s);
}

void kvq__ended_give_way(struct kvq__core *core, const struct kvq__shortage *shortage)
{
    struct kvq__session *s = TAILQ_FIRST(&core->finishing), *next;
    for (; s; s = next) {
        next = TAILQ_NEXT(s, link);
        if (kvq__shortage_counts(shortage, s))
            kvq__ended_finished(s);
    }
}

// ---- All of them ----

void kvq__ended_add(struct kvq__session *s)
{
    struct kvq__core *core = s->core;
    if (s->ended.listed || s->ended.finish.phase)
        return;
    if (s->ended.finish.wanted) {
        list_finishing(s);
        return;
    }
    list_ended(s);
    go_on_with_ended(core);
}

bool kvq__ended_poll(struct kvq__core *core)
{
    core->freeing.left = core->config.release_work;
    bool any = kvq__deferred_free(core, false) || !TAILQ_EMPTY(&core->freeing.ended);
    go_on_with_ended(core);
    return any;
}

bool kvq__ended_helps(struct kvq__core *core, const struct kvq__shortage *shortage)
{
    uint32_t n = 0;
    if (shortage->code == KVQ_E_NO_MEMORY || shortage->code == KVQ_E_QUOTA)
        kvq__ended_give_way(core, shortage);
    if (shortage->code == KVQ_E_NO_MEMORY)
        return shortage->pool->n_ended > 0;
    for (uint32_t i = 0; shortage->code == KVQ_E_QUOTA && i < core->n_pools; i++) {
        const struct kvq__arena *arena = &shortage->ns->arenas[i];
        if (kvq__pool_limit(arena->pool) == kvq__pool_limit(shortage->pool))
            n += arena->n_ended;
    }
    return n > 0;
}

// The first of the namespace's that no request references.
static struct kvq__session *find_unused(const struct kvq__session_list *list,
                                        const struct kvq__namespace *ns)
{
    struct kvq__session *s;
    TAILQ_FOREACH (s, list, link)
        if (s->ns == ns && s->refs == 0)
            return s;
    return NULL;
}

// Frees the first one's bookkeeping memory, also when the turn's work is used up. That memory is
// some kilobytes at the least, so a caller that asks for little causes little work.
bool kvq__ended_reclaim(struct kvq__namespace *ns)
{
    struct kvq__core *core = ns->core;
    struct kvq__session *s = find_unused(&core->freeing.ended, ns);
    uint64_t left = core->freeing.left;
    if (!s && (s = find_unused(&core->finishing, ns)))
        kvq__ended_finished(s);
    if (!s)
        return false;
    core->freeing.left = UINT64_MAX;
    give_session_back(s);
    leave_list(s);
    kvq__session_dispose(s);
    core->freeing.left = left;
    return true;
}

void kvq__ended_close(struct kvq__core *core)
{
    core->freeing.left = UINT64_MAX;
    go_on_with_ended(core);
    kvq__deferred_free(core, true);
    assert(TAILQ_EMPTY(&core->freeing.ended) && TAILQ_EMPTY(&core->freeing.deferred));
}
