// SPDX-License-Identifier: Apache-2.0
//
// The block pool: a budget cut into extents, extents into blocks of one size that belong to one
// namespace. Blocks are counted references; those that lose their last one while requests are
// under way wait in limbo until every request that may still read them has ended.
#include <assert.h>
#include <string.h>

#include "daemon/state.h"

const char *kvq__pool_name(const struct kvq__pool *pool)
{
    return pool->gpu ? kvq__gpu_uuid_text(pool->gpu) : "host";
}

// ---- Extents ----

// The lowest number that no extent has: what clients map stays close together.
static uint32_t number_take(struct kvq__pool *pool)
{
    uint32_t word = 0;
    while (pool->numbers[word] == UINT64_MAX)
        word++;
    uint32_t bit = (uint32_t)__builtin_ctzll(~pool->numbers[word]);
    pool->numbers[word] |= 1ull << bit;
    assert(64 * word + bit < kvq__pool_extents(pool));
    return 64 * word + bit;
}

static void number_give(struct kvq__pool *pool, uint32_t number)
{
    pool->numbers[number / 64] &= ~(1ull << number % 64);
}

static struct kvq__extent *find_own(struct kvq__pool *pool, const struct kvq__namespace *ns)
{
    struct kvq__extent *e;
    TAILQ_FOREACH (e, &pool->empty, link)
        if (e->last == ns)
            return e;
    return NULL;
}

// One that may get another owner. Clients may still look at those that they were told of.
static struct kvq__extent *find_untold(struct kvq__pool *pool)
{
    struct kvq__extent *e;
    TAILQ_FOREACH (e, &pool->empty, link)
        if (!e->told)
            return e;
    return NULL;
}

static int extent_acquire(struct kvq__core *core, struct kvq__pool *pool, struct kvq__extent **out)
{
    struct kvq__memory_ops *ops = &pool->memory;
    if (pool->extents_taken + pool->extent_bytes > pool->budget)
        return KVQ_E_NO_MEMORY;
    struct kvq__extent *e = kvq__allocate(core, sizeof *e);
    if (!e)
        return KVQ_E_NO_MEMORY;
    int rc = ops->acquire(ops->context, pool->extent_bytes, &e->memory);
    if (rc < 0) {
        kvq__deallocate(core, e, sizeof *e);
        return rc;
    }
    e->number = number_take(pool);
    pool->extents_taken += pool->extent_bytes;
    pool->huge_bytes += e->memory.huge ? pool->extent_bytes : 0;
    TAILQ_INSERT_TAIL(&pool->empty, e, link);
    *out = e;
    return 0;
}

static void extent_release(struct kvq__core *core, struct kvq__pool *pool, struct kvq__extent *e)
{
    assert(e->used == 0 && !e->blocks);
    TAILQ_REMOVE(&pool->empty, e, link);
    number_give(pool, e->number);
    pool->huge_bytes -= e->memory.huge ? pool->extent_bytes : 0;
    pool->memory.release(pool->memory.context, &e->memory);
    pool->extents_taken -= pool->extent_bytes;
    kvq__deallocate(core, e, sizeof *e);
}

static void trim(struct kvq__core *core, struct kvq__pool *pool, uint64_t age_ns)
{
    struct kvq__extent *e = TAILQ_FIRST(&pool->empty), *next;
    for (; e; e = next) {
        next = TAILQ_NEXT(e, link);
        if (core->now - e->empty_since >= age_ns && !kvq__extent_is_told(e, pool))
            extent_release(core, pool, e);
    }
}

// Gives an extent back that nobody looks at any more, though somebody did. False if there is none.
static bool release_told(struct kvq__core *core, struct kvq__pool *pool)
{
    struct kvq__extent *e;
    TAILQ_FOREACH (e, &pool->empty, link)
        if (e->told && !kvq__extent_is_told(e, pool)) {
            extent_release(core, pool, e);
            return true;
        }
    return false;
}

void kvq__pools_trim(struct kvq__core *core, uint64_t age_ns)
{
    for (uint32_t i = 0; i < core->n_pools; i++)
        trim(core, &core->pools[i], age_ns);
}

// Finds an extent that nobody owns: one this namespace had before, a fresh one, or another's,
// which is zeroed first, or gives way to a fresh one if clients were told of it.
static int extent_find(struct kvq__core *core, struct kvq__pool *pool,
                       const struct kvq__namespace *ns, struct kvq__extent **out)
{
    int rc = 0;
    *out = find_own(pool, ns);
    if (!*out)
        rc = extent_acquire(core, pool, out);
    if (!*out && (*out = find_untold(pool)))
        rc = 0;
    if (!*out && rc == KVQ_E_NO_MEMORY && release_told(core, pool))
        rc = extent_acquire(core, pool, out);
    if (*out && (*out)->last && (*out)->last != ns) {
        pool->memory.zero(pool->memory.context, &(*out)->memory);
        (*out)->last = NULL;
    }
    return rc;
}

// Cuts an empty extent into the class's blocks.
static int extent_cut(struct kvq__core *core, struct kvq__extent *e, struct kvq__class *class)
{
    uint32_t n = (uint32_t)(class->pool->extent_bytes / class->block_bytes);
    e->blocks = kvq__allocate(core, n * sizeof *e->blocks);
    if (!e->blocks)
        return KVQ_E_NO_MEMORY;
    TAILQ_REMOVE(&class->pool->empty, e, link);
    e->n_blocks = n;
    e->owner = class;
    if (e->last != class->ns)
        e->serial = ++class->ns->extents[class->pool - core->pools];
    e->last = class->ns;
    STAILQ_INIT(&e->free);
    for (uint32_t i = 0; i < n; i++) {
        e->blocks[i].extent = e;
        STAILQ_INSERT_TAIL(&e->free, &e->blocks[i], link);
    }
    TAILQ_INSERT_HEAD(&class->extents, e, link);
    return 0;
}

static void extent_empty(struct kvq__core *core, struct kvq__extent *e)
{
    struct kvq__class *class = e->owner;
    TAILQ_REMOVE(&class->extents, e, link);
    TAILQ_INSERT_HEAD(&class->pool->empty, e, link);
    kvq__deallocate(core, e->blocks, e->n_blocks * sizeof *e->blocks);
    e->blocks = NULL;
    e->owner = NULL;
    e->empty_since = core->now;
    if (TAILQ_EMPTY(&class->extents)) {
        LIST_REMOVE(class, link);
        kvq__deallocate(core, class, sizeof *class);
    }
}

// ---- Classes ----

static struct kvq__class *class_find(struct kvq__namespace *ns, const struct kvq__pool *pool,
                                     uint64_t block_bytes)
{
    struct kvq__class *c;
    LIST_FOREACH (c, &ns->classes, link)
        if (c->pool == pool && c->block_bytes == block_bytes)
            return c;
    return NULL;
}

static struct kvq__class *class_new(struct kvq__core *core, struct kvq__namespace *ns,
                                    struct kvq__pool *pool, uint64_t block_bytes)
{
    struct kvq__class *c = kvq__allocate(core, sizeof *c);
    if (c) {
        c->ns = ns;
        c->pool = pool;
        c->block_bytes = block_bytes;
        TAILQ_INIT(&c->extents);
        LIST_INSERT_HEAD(&ns->classes, c, link);
    }
    return c;
}

// An extent of the class with a free block.
static int class_extent(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                        uint64_t block_bytes, struct kvq__extent **out)
{
    struct kvq__class *class = class_find(ns, pool, block_bytes);
    *out = class ? TAILQ_FIRST(&class->extents) : NULL;
    if (*out && !STAILQ_EMPTY(&(*out)->free))
        return 0;
    bool made = !class;
    if (made && !(class = class_new(core, ns, pool, block_bytes)))
        return KVQ_E_NO_MEMORY;
    int rc = extent_find(core, pool, ns, out);
    if (rc == 0)
        rc = extent_cut(core, *out, class);
    if (rc < 0 && made) {
        LIST_REMOVE(class, link);
        kvq__deallocate(core, class, sizeof *class);
    }
    return rc;
}

// ---- Blocks ----

static int block_take(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                      uint64_t bytes, struct kvq__ref *ref)
{
    struct kvq__extent *e = NULL;
    assert(bytes > 0 && bytes <= pool->extent_bytes && !ref->block);
    int rc = class_extent(core, ns, pool, bytes, &e);
    if (rc < 0)
        return rc;
    struct kvq__block *b = STAILQ_FIRST(&e->free);
    STAILQ_REMOVE_HEAD(&e->free, link);
    if (STAILQ_EMPTY(&e->free)) { // full ones stand last
        TAILQ_REMOVE(&e->owner->extents, e, link);
        TAILQ_INSERT_TAIL(&e->owner->extents, e, link);
    }
    b->refs = 1;
    b->saved = 0;
    e->used++;
    pool->used_bytes += bytes;
    ns->used[kvq__pool_limit(pool)] += bytes;
    ref->block = b;
    ref->data = e->memory.base + (size_t)(b - e->blocks) * bytes;
    return 0;
}

static int note_shortage(struct kvq__core *core, const struct kvq__shortage *shortage)
{
    if (shortage->code == KVQ_E_QUOTA || shortage->code == KVQ_E_NO_MEMORY)
        core->shortage = *shortage;
    return shortage->code;
}

int kvq__block_new(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                   uint64_t bytes, struct kvq__ref *ref)
{
    enum kvq__limit which = kvq__pool_limit(pool);
    int rc;
    do
        rc = kvq__quota_allows(ns, which, bytes) ? block_take(core, ns, pool, bytes, ref)
                                                 : KVQ_E_QUOTA;
    while ((rc == KVQ_E_QUOTA || rc == KVQ_E_NO_MEMORY) && kvq__prefix_reclaim(core, ns, pool, rc));
    return note_shortage(core, &(struct kvq__shortage){ns, pool, bytes, rc});
}

int kvq__block_replace(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                       uint64_t bytes, struct kvq__block *old, struct kvq__ref *ref)
{
    const struct kvq__class *class = old->extent->owner;
    if (old->refs > 1 || class->ns != ns || class->block_bytes != bytes ||
        kvq__pool_limit(class->pool) != kvq__pool_limit(pool))
        return kvq__block_new(core, ns, pool, bytes, ref);
    int rc;
    do
        rc = block_take(core, ns, pool, bytes, ref);
    while (rc == KVQ_E_NO_MEMORY && kvq__prefix_reclaim(core, ns, pool, rc));
    if (rc == 0)
        kvq__block_exempt(old, true);
    return note_shortage(core, &(struct kvq__shortage){ns, pool, bytes, rc});
}

struct kvq__ref kvq__block_share(struct kvq__ref ref)
{
    if (ref.block)
        ref.block->refs++;
    return ref;
}

void kvq__block_exempt(struct kvq__block *b, bool exempt)
{
    const struct kvq__class *class = b->extent->owner;
    uint64_t *bytes = &class->ns->exempt[kvq__pool_limit(class->pool)];
    if (exempt && !b->exempt)
        *bytes += class->block_bytes;
    else if (!exempt && b->exempt)
        *bytes -= class->block_bytes;
    b->exempt = exempt;
}

static void block_free(struct kvq__core *core, struct kvq__block *b)
{
    struct kvq__extent *e = b->extent;
    struct kvq__class *class = e->owner;
    if (STAILQ_EMPTY(&e->free)) {
        TAILQ_REMOVE(&class->extents, e, link);
        TAILQ_INSERT_HEAD(&class->extents, e, link);
    }
    STAILQ_INSERT_HEAD(&e->free, b, link);
    kvq__block_exempt(b, false);
    class->pool->used_bytes -= class->block_bytes;
    class->ns->used[kvq__pool_limit(class->pool)] -= class->block_bytes;
    core->freed++;
    if (--e->used == 0)
        extent_empty(core, e);
}

void kvq__block_drop(struct kvq__core *core, struct kvq__ref *ref)
{
    struct kvq__block *b = ref->block;
    *ref = (struct kvq__ref){0};
    if (!b)
        return;
    assert(b->refs > 0);
    b->retired_at = core->last_flight;
    if (--b->refs > 0)
        return;
    if (TAILQ_EMPTY(&core->flights)) {
        block_free(core, b);
        return;
    }
    STAILQ_INSERT_TAIL(&core->limbo, b, link);
}

bool kvq__block_is_idle(const struct kvq__core *core, const struct kvq__block *b)
{
    const struct kvq__flight *oldest = TAILQ_FIRST(&core->flights);
    return b->refs == 1 && (!oldest || oldest->number > b->retired_at);
}

void kvq__block_drop_idle(struct kvq__core *core, struct kvq__ref *ref)
{
    struct kvq__block *b = ref->block;
    if (!b || !kvq__block_is_idle(core, b)) {
        kvq__block_drop(core, ref);
        return;
    }
    *ref = (struct kvq__ref){0};
    b->refs = 0;
    block_free(core, b);
}

// ---- Flights ----

void kvq__flight_begin(struct kvq__core *core, struct kvq__flight *flight)
{
    assert(flight->number == 0);
    flight->number = ++core->last_flight;
    TAILQ_INSERT_TAIL(&core->flights, flight, link);
}

void kvq__flight_move(struct kvq__core *core, struct kvq__flight *from, struct kvq__flight *to)
{
    to->number = from->number;
    if (from->number) {
        TAILQ_INSERT_BEFORE(from, to, link);
        TAILQ_REMOVE(&core->flights, from, link);
        from->number = 0;
    }
}

void kvq__flight_end(struct kvq__core *core, struct kvq__flight *flight)
{
    assert(flight->number != 0);
    TAILQ_REMOVE(&core->flights, flight, link);
    flight->number = 0;
    struct kvq__flight *oldest = TAILQ_FIRST(&core->flights);
    struct kvq__block *b;
    while ((b = STAILQ_FIRST(&core->limbo)) && (!oldest || b->retired_at < oldest->number)) {
        STAILQ_REMOVE_HEAD(&core->limbo, link);
        block_free(core, b);
    }
}
