// SPDX-License-Identifier: Apache-2.0
//
// For core_kit.c alone: pools, their extents, and the blocks in these.
#ifndef KVQ_TESTS_CORE_POOLS_H
#define KVQ_TESTS_CORE_POOLS_H

#include "tests/core/core_refs.h"

// Deferred frees that belong to the extent; all of them must be unreferenced.
static uint32_t count_deferred(const struct kvq__core *core, const struct kvq__extent *e)
{
    const struct kvq__block *b;
    uint32_t n = 0;
    TAILQ_FOREACH (b, &core->deferred, deferred_link) {
        MUST(b->refs == 0 && !b->free);
        n += b->extent == e;
    }
    return n;
}

// Each session that has given blocks up stands among the givers, and all of them are deferred
// frees.
static void check_givers(const struct kvq__core *core)
{
    const struct kvq__session *s;
    const struct kvq__block *b;
    uint32_t givers = 0, given = 0, marked = 0;
    TAILQ_FOREACH (s, &core->givers, giver.link) {
        MUST(s->giver.listed);
        givers++;
        LIST_FOREACH (b, &s->giver.given, given_link) {
            MUST(b->refs == 0 && !b->free && b->retired.by == s->serial);
            given++;
        }
    }
    TAILQ_FOREACH (b, &core->deferred, deferred_link)
        marked += b->given_link.le_prev != NULL;
    MUST(givers == core->n_givers && given == marked);
}

// What the extent's blocks add up to.
struct cut {
    uint64_t at, used, refs, exempt;
    uint32_t unreferenced, free[2]; // free: stretches of extents that hold what stays, what passes
};

static void check_block(const struct kvq__block *b, struct cut *c)
{
    const struct kvq__block *next = TAILQ_NEXT(b, beside);
    MUST(b->at == c->at && b->bytes > 0 && b->bytes % 64 == 0 && b->at % 64 == 0);
    MUST(!b->free || (b->refs == 0 && !b->exempt && !(next && next->free)));
    MUST(b->refs == 0 || b->refs == references_to(b));
    c->at += b->bytes;
    c->used += b->free ? 0 : b->bytes;
    c->refs += b->refs;
    c->exempt += b->exempt ? b->bytes : 0;
    c->unreferenced += b->refs == 0 && !b->free;
    c->free[b->extent->passing] += b->free;
}

static void check_extent(const struct kvq__core *core, const struct kvq__arena *arena,
                         const struct kvq__extent *e, struct cut *sum)
{
    const struct kvq__block *b;
    struct cut c = {0};
    MUST(e->owner == arena && e->last == arena->ns);
    MUST(e->serial <= arena->last_serial && (e->serial > 0 || e->passing));
    TAILQ_FOREACH (b, &e->blocks, beside) {
        MUST(b->extent == e);
        check_block(b, &c);
    }
    MUST(c.at == arena->pool->extent_bytes && c.used == e->used_bytes && c.used > 0);
    MUST(c.unreferenced == count_deferred(core, e));
    sum->used += c.used;
    sum->refs += c.refs;
    sum->exempt += c.exempt;
    for (int i = 0; i < 2; i++)
        sum->free[i] += c.free[i];
}

static uint32_t tree_size(const struct kvq__block *b)
{
    if (!b)
        return 0;
    MUST(b->free);
    return 1 + tree_size(b->free_entry.rbe_left) + tree_size(b->free_entry.rbe_right);
}

// Adds up the namespace's blocks in one pool.
static void check_arena(const struct kvq__core *core, const struct kvq__arena *arena,
                        struct cut *sum)
{
    const struct kvq__extent *e;
    sum->free[0] = sum->free[1] = 0;
    TAILQ_FOREACH (e, &arena->extents, link)
        check_extent(core, arena, e, sum);
    for (int i = 0; i < 2; i++)
        MUST(sum->free[i] == tree_size(RB_ROOT(&arena->free[i])));
}

// All extents of a pool, and those in huge pages.
static uint64_t count_extents(const struct kvq__core *core, const struct kvq__pool *pool,
                              uint64_t *huge)
{
    const struct kvq__namespace *ns;
    const struct kvq__extent *e;
    uint64_t n = 0;
    TAILQ_FOREACH (e, &pool->empty, link) {
        MUST(e->used_bytes == 0 && !e->owner && SLIST_EMPTY(&e->records));
        n++;
        *huge += e->memory.huge;
    }
    TAILQ_FOREACH (ns, &core->namespaces, link)
        TAILQ_FOREACH (e, &ns->arenas[pool - core->pools].extents, link) {
            n++;
            *huge += e->memory.huge;
        }
    return n;
}

static void check_pools(const struct kvq__core *core)
{
    for (uint32_t i = 0; i < core->n_pools; i++) {
        const struct kvq__pool *pool = &core->pools[i];
        uint64_t huge = 0, extents = count_extents(core, pool, &huge);
        MUST(extents * pool->extent_bytes == pool->extents_taken);
        MUST(huge * pool->extent_bytes == pool->huge_bytes && pool->extents_taken <= pool->budget);
    }
    check_givers(core);
}

#endif
