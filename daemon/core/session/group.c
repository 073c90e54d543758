// SPDX-License-Identifier: Apache-2.0
//
// Groups: sessions of one name that hold the shards of one model, by KV heads or by layers. Each
// shard is a session of its own, on a place of its own, with a writer of its own; what is common to
// them is their step. It commits when all shards have ended theirs, and is undone for all when one
// of them leaves it.
//
// A shard that has ended its step is `prepared`: its tokens are complete, checked and finite, and
// wait in its pages for the others. It is in no step of its client's any more. What its writer asks
// for next waits until the group has committed or gone back; readers see the committed tokens
// meanwhile, as ever.
#include "daemon/core/session/group.h"

#include <assert.h>
#include <string.h>

#define LAST_SAVE_NS 60000000000ull // for which what cannot be saved is kept longer

// ---- Members ----

struct kvq__group {
    uint32_t shards, n; // that there are to be; that there are
    struct kvq__session *member[KVQ_MAX_SHARDS];
};

int kvq__group_join(struct kvq__session *s)
{
    const struct kvq__session *other = kvq__session_named(s->ns, s->name);
    if (s->shards == 1 || s->name[0] == '\0')
        return 0;
    int rc = 0;
    s->group = other ? other->group : kvq__ns_allocate(s->ns, sizeof *s->group, &rc);
    if (!s->group)
        return rc;
    assert(!s->group->member[s->shard] && (!other || other->shards == s->shards));
    s->group->shards = s->shards;
    s->group->member[s->shard] = s;
    s->group->n++;
    assert(s->shard < s->shards && s->group->n <= s->shards);
    return 0;
}

void kvq__group_part(struct kvq__session *s)
{
    struct kvq__group *g = s->group;
    if (!g)
        return;
    assert(g->n > 0 && g->member[s->shard] == s);
    s->group = NULL;
    g->member[s->shard] = NULL;
    if (--g->n == 0)
        kvq__ns_deallocate(s->ns, g, sizeof *g);
}

struct kvq__session *kvq__group_member(const struct kvq__session *s, uint32_t shard)
{
    assert(!s->group || s->group->shards == s->shards);
    if (!s->group)
        return s->shard == shard ? (struct kvq__session *)s : NULL;
    return shard < s->shards ? s->group->member[shard] : NULL;
}

bool kvq__group_missing(const struct kvq__session *s, uint32_t *shard)
{
    for (uint32_t i = 0; s->group && i < s->shards; i++)
        if (!s->group->member[i]) {
            *shard = i;
            return true;
        }
    return false;
}

uint64_t kvq__group_tokens(const struct kvq__session *s)
{
    uint64_t least = s->tokens;
    for (uint32_t i = 0; s->group && i < s->shards; i++) {
        const struct kvq__session *m = s->group->member[i];
        uint64_t tokens = m ? m->tokens : 0;
        least = kvq__min(least, tokens);
    }
    return least;
}

bool kvq__group_is_open(const struct kvq__session *s)
{
    bool open = !LIST_EMPTY(&s->handles);
    for (uint32_t i = 0; s->group && i < s->shards; i++)
        open |= s->group->member[i] && !LIST_EMPTY(&s->group->member[i]->handles);
    return open;
}

bool kvq__group_is_unsaved(const struct kvq__session *s)
{
    bool unsaved = false;
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        unsaved |= m && kvq__is_unsaved(m);
    }
    return unsaved;
}

bool kvq__group_outlived(const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        if (m && (!LIST_EMPTY(&m->handles) || m->refs > 0 || m->spec.keep_ns == 0 ||
                  m->core->now - m->idle_since < m->spec.keep_ns))
            return false;
    }
    return true;
}

// Whether the session waits to be saved before it ends. With on_detach = save it waits as long as
// that takes; else, if saving has failed, for LAST_SAVE_NS after its keep time.
static bool waits_to_be_saved(const struct kvq__session *s)
{
    const struct kvq__session *first = kvq__group_member(s, 0);
    uint64_t over = s->idle_since + s->spec.keep_ns;
    uint32_t missing;
    if (!kvq__is_unsaved(s))
        return false;
    if (s->spec.save_on_detach)
        return true;
    if (!s->core->config.saves || !s->name[0] || s->tokens == 0 || kvq__group_missing(s, &missing))
        return false;
    assert(first);
    return first->saving.wait == 0 || s->core->now - over < LAST_SAVE_NS;
}

bool kvq__group_expired(const struct kvq__session *s)
{
    if (!kvq__group_outlived(s))
        return false;
    for (uint32_t i = 0; i < s->shards; i++)
        if (kvq__group_member(s, i) && waits_to_be_saved(kvq__group_member(s, i)))
            return false;
    return true;
}

void kvq__group_end(struct kvq__session *s, const char *why)
{
    struct kvq__group *g = s->group;
    uint32_t left = g ? g->n : 0; // with the last member the group is gone
    assert(!g || (g->member[s->shard] == s && g->n <= g->shards));
    if (!g)
        kvq__session_end(s, why);
    for (uint32_t i = 0; left > 0; i++)
        if (g->member[i]) {
            left--;
            kvq__session_end(g->member[i], why);
        }
}

// ---- What all shards have in common ----

// Shards by layers may have other formats, and so other rotations by their papers. What the engine
// does it does in all.
static bool rotates_alike(const struct kvq__session *a, const struct kvq__session *b)
{
    for (uint32_t i = 0; i < a->n_layers && i < b->n_layers; i++)
        if (a->layers[i].shape.v_rotation != b->layers[i].shape.v_rotation &&
            strcmp(a->layers[i].format->name, b->layers[i].format->name) == 0)
            return false;
    return (a->v_rotation == KVQ_V_ROT_ENGINE) == (b->v_rotation == KVQ_V_ROT_ENGINE);
}

static const char *shard_difference(const struct kvq__session *a, const struct kvq__session *b)
{
    return a->shards != b->shards                      ? "number of shards"
           : strcmp(a->spec.model, b->spec.model) != 0 ? "model fingerprint"
           : a->max_rollback != b->max_rollback        ? "max_rollback"
           : a->prompt.tokens != b->prompt.tokens      ? "prompt_tokens"
           : !rotates_alike(a, b)                      ? "v_rotation"
           : a->dtype != b->dtype                      ? "dtype"
           : a->spec.drop_on_detach != b->spec.drop_on_detach ||
                   a->spec.save_on_detach != b->spec.save_on_detach ||
                   a->spec.keep_ns != b->spec.keep_ns
               ? "on_detach"
               : NULL;
}

int kvq__group_agrees(const struct kvq__session *s, const struct kvq__session *other, char *text)
{
    const char *what = shard_difference(s, other);
    if (!what)
        return 0;
    return kvq__fail(text, KVQ_E_EXISTS,
                     "shard %u of session \"%s\" was opened with another %s than this one, shard "
                     "%u; all shards of a session have the same: open them alike, or drop the "
                     "session",
                     other->shard, s->name, what, s->shard);
}

// ---- The step of all ----

void kvq__group_undo(const struct kvq__session *s)
{
    for (uint32_t i = 0; s->group && i < s->shards; i++) {
        struct kvq__session *m = s->group->member[i];
        if (!m || m == s || !kvq__in_step(m))
            continue;
        m->core->up->step_undo(m);
        assert(!m->step && !m->in_step.prepared);
        m->in_step.undone_by = s->shard + 1;
    }
}

// The first shard that is not prepared; NULL if all are.
static struct kvq__session *unprepared(const struct kvq__session *s)
{
    assert(s->group->n == s->group->shards);
    for (uint32_t i = 0; i < s->shards; i++)
        if (!s->group->member[i]->in_step.prepared)
            return s->group->member[i];
    return NULL;
}

bool kvq__group_fits(const struct kvq__session *s)
{
    bool whole = s->group != NULL, same = true;
    assert(!s->group || s->group->n == s->group->shards);
    for (uint32_t i = 0; whole && i < s->shards; i++) {
        const struct kvq__session *m = s->group->member[i];
        whole = m->in_step.prepared || (m->step && m->step == s->step);
        same &= m->tokens == s->tokens && m->in_step.tokens == s->in_step.tokens;
    }
    return !whole || same;
}

int kvq__group_commit(struct kvq__session *s, const struct kvq__session **other)
{
    struct kvq__session **member = s->group->member;
    assert(s->in_step.prepared);
    *other = NULL;
    if (unprepared(s))
        return 0;
    for (uint32_t i = 0; i < s->shards; i++)
        if (member[i]->tokens != s->tokens || member[i]->in_step.tokens != s->in_step.tokens) {
            *other = member[i];
            return KVQ_E_POSITION;
        }
    for (uint32_t i = 0; i < s->shards; i++)
        s->core->up->step_publish(member[i]);
    return 0;
}

// Whether the queue would wait for ever: for a shard that only the queue itself could end.
static bool waits_for_itself(const struct kvq__queue *q, const struct kvq__session *s)
{
    assert(s->in_step.prepared && s->group->n == s->group->shards);
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = s->group->member[i];
        bool own = !m->in_step.prepared && !m->in_step.committing && m->writer &&
                   m->writer->client == q->client;
        if (own && (q->client->n_queues == 1 || (m->step && m->step->queue == q)))
            return true;
    }
    return false;
}

enum kvq__prepared kvq__group_asks(const struct kvq__queue *q, const struct kvq__handle *h)
{
    const struct kvq__session *s = h->session;
    if (!s->in_step.prepared || h->read_only)
        return KVQ__PREPARED_NOT;
    return waits_for_itself(q, s) ? KVQ__PREPARED_NEVER : KVQ__PREPARED_WAITS;
}

uint32_t kvq__group_awaited(const struct kvq__session *s)
{
    assert(s->in_step.prepared);
    return unprepared(s)->shard;
}

int kvq__shards_refuse(const struct kvq__core *core, const char *name, uint32_t there,
                       uint32_t asked, char *text)
{
    assert(there != asked);
    return kvq__fail(text, KVQ_E_EXISTS,
                     "session \"%s\" exists with %u shards, %u are asked for; open it with as many "
                     "as it has, %s, or use another name",
                     name, there, asked,
                     core->config.saves
                         ? "close it everywhere and save it (kvqctl session save), so that it can "
                           "leave memory and come back with others"
                         : "drop it");
}
