// SPDX-License-Identifier: Apache-2.0
//
// See queue.h.
#include "daemon/store/queue.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

// ---- Names ----

static struct kvq__holds *bucket_of(struct kvq__names *names, const char *ns, const char *name)
{
    uint32_t hash = 2166136261u; // FNV-1a
    for (const char *p = ns; *p; p++)
        hash = (hash ^ (uint8_t)*p) * 16777619u;
    hash = (hash ^ '/') * 16777619u;
    for (const char *p = name; *p; p++)
        hash = (hash ^ (uint8_t)*p) * 16777619u;
    return &names->buckets[hash % KVQ__NAME_BUCKETS];
}

static bool holds_clash(const struct kvq__hold *a, const struct kvq__hold *b)
{
    bool shared = a->kind == KVQ__HOLD_LOOK && b->kind == KVQ__HOLD_LOOK;
    return !shared && strcmp(a->name, b->name) == 0 && strcmp(a->ns, b->ns) == 0;
}

// Whether nobody who came before is in its way.
static bool may_go(const struct kvq__holds *bucket, const struct kvq__hold *h)
{
    const struct kvq__hold *other;
    TAILQ_FOREACH (other, bucket, link) {
        if (other == h)
            return true;
        if (holds_clash(h, other))
            return false;
    }
    assert(!"a hold is in its bucket");
    return false;
}

void kvq__names_init(struct kvq__names *names)
{
    for (uint32_t i = 0; i < KVQ__NAME_BUCKETS; i++)
        TAILQ_INIT(&names->buckets[i]);
}

bool kvq__names_empty(const struct kvq__names *names)
{
    bool empty = true;
    for (uint32_t i = 0; i < KVQ__NAME_BUCKETS; i++)
        empty &= TAILQ_EMPTY(&names->buckets[i]);
    return empty;
}

void kvq__name_take(struct kvq__names *names, struct kvq__hold *h, const char *ns, const char *name,
                    void (*go)(struct kvq__hold *hold))
{
    struct kvq__holds *bucket = bucket_of(names, ns, name);
    assert(h->kind != KVQ__HOLD_NONE && !h->queued && name[0]);
    snprintf(h->ns, sizeof h->ns, "%s", ns);
    snprintf(h->name, sizeof h->name, "%s", name);
    h->go = go;
    h->queued = true;
    h->held = false;
    TAILQ_INSERT_TAIL(bucket, h, link);
    if (may_go(bucket, h)) {
        h->held = true;
        go(h);
    }
}

bool kvq__name_is_free(struct kvq__names *names, const char *ns, const char *name)
{
    const struct kvq__hold *h;
    TAILQ_FOREACH (h, bucket_of(names, ns, name), link)
        if (strcmp(h->name, name) == 0 && strcmp(h->ns, ns) == 0)
            return false;
    return true;
}

// One of those who may go now, and does not yet.
static struct kvq__hold *next_to_go(struct kvq__holds *bucket)
{
    struct kvq__hold *h;
    TAILQ_FOREACH (h, bucket, link)
        if (!h->held && may_go(bucket, h))
            return h;
    return NULL;
}

void kvq__name_give(struct kvq__names *names, struct kvq__hold *h)
{
    struct kvq__hold *next;
    if (!h->queued)
        return;
    struct kvq__holds *bucket = bucket_of(names, h->ns, h->name);
    TAILQ_REMOVE(bucket, h, link);
    h->queued = h->held = false;
    h->kind = KVQ__HOLD_NONE;
    while ((next = next_to_go(bucket))) { // from the start: going, one may give it back at once
        next->held = true;
        next->go(next);
    }
}

// ---- Turns ----

void kvq__turns_init(struct kvq__turns *turns, uint32_t most, uint32_t most_of)
{
    assert(most_of > 0 && most >= most_of);
    *turns = (struct kvq__turns){.most = most, .most_of = most_of};
    TAILQ_INIT(&turns->first);
    TAILQ_INIT(&turns->going);
}

// The one who stands for his namespace; NULL: nobody of it waits.
static struct kvq__write_turn *first_of(const struct kvq__turns *turns, const char *ns)
{
    struct kvq__write_turn *t;
    TAILQ_FOREACH (t, &turns->first, link)
        if (strcmp(t->ns, ns) == 0)
            return t;
    return NULL;
}

struct kvq__write_turn *kvq__turn_after(const struct kvq__turns *turns, const char *ns,
                                        const struct kvq__write_turn *turn)
{
    struct kvq__write_turn *first = first_of(turns, ns);
    if (!turn)
        return first;
    assert(first && turn->queued);
    return turn == first ? TAILQ_FIRST(&first->behind) : TAILQ_NEXT(turn, link);
}

// Whoever stands next behind him in his namespace stands for it from now on; NULL: nobody does.
static struct kvq__write_turn *heir_of(struct kvq__write_turn *t)
{
    struct kvq__write_turn *heir = TAILQ_FIRST(&t->behind);
    if (heir) {
        TAILQ_REMOVE(&t->behind, heir, link);
        TAILQ_INIT(&heir->behind);
        TAILQ_CONCAT(&heir->behind, &t->behind, link);
    }
    return heir;
}

void kvq__turn_leave(struct kvq__turns *turns, struct kvq__write_turn *t)
{
    struct kvq__write_turn *first = first_of(turns, t->ns);
    assert(first && t->queued && turns->n > 0);
    struct kvq__write_turn *heir = t == first ? heir_of(t) : NULL;
    if (heir)
        TAILQ_INSERT_AFTER(&turns->first, t, heir, link);
    TAILQ_REMOVE(t == first ? &turns->first : &first->behind, t, link);
    turns->n--;
    t->queued = false;
}

static bool has_its_share(const struct kvq__turns *turns, const char *ns)
{
    const struct kvq__write_turn *t;
    uint32_t n = 0;
    TAILQ_FOREACH (t, &turns->going, link)
        n += strcmp(t->ns, ns) == 0;
    return n >= turns->most_of;
}

static void start_next_turn(struct kvq__turns *turns)
{
    struct kvq__write_turn *t = TAILQ_FIRST(&turns->first), *heir;
    while (t && has_its_share(turns, t->ns))
        t = TAILQ_NEXT(t, link);
    if (turns->under_way == turns->most || !t)
        return;
    TAILQ_REMOVE(&turns->first, t, link);
    heir = heir_of(t);
    if (heir) // his namespace's next turn comes after those of all others
        TAILQ_INSERT_TAIL(&turns->first, heir, link);
    turns->n--;
    turns->under_way++;
    TAILQ_INSERT_TAIL(&turns->going, t, link);
    turns->now = t;
    t->go(t);
}

void kvq__turn_wait(struct kvq__turns *turns, struct kvq__write_turn *t, const char *ns,
                    void (*go)(struct kvq__write_turn *turn))
{
    struct kvq__write_turn *first = first_of(turns, ns);
    assert(!t->queued);
    t->queued = true;
    t->go = go;
    snprintf(t->ns, sizeof t->ns, "%s", ns);
    TAILQ_INIT(&t->behind);
    if (first)
        TAILQ_INSERT_TAIL(&first->behind, t, link);
    else
        TAILQ_INSERT_TAIL(&turns->first, t, link);
    turns->n++;
    start_next_turn(turns);
}

void kvq__turn_end(struct kvq__turns *turns, struct kvq__write_turn *t)
{
    assert(t->queued && turns->under_way > 0);
    turns->under_way--;
    TAILQ_REMOVE(&turns->going, t, link);
    if (turns->now == t)
        turns->now = NULL;
    t->queued = false;
    start_next_turn(turns);
}
