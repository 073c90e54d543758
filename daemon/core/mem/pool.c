// SPDX-License-Identifier: Apache-2.0
//
// The block pool: a budget cut into extents that belong to one namespace each, and these into
// blocks of any sizes, best fit (see pool.h). Free stretches stand in a tree, so taking and giving
// back take the logarithm of their number. Blocks are counted references; those that lose their
// last one while requests are under way wait among the deferred frees until every request that may
// still read them has ended.
#include <assert.h>
#include <string.h>

#include "daemon/core/mem/extent.h"
#include "daemon/core/state.h"

enum { FEWEST_RECORDS = 16, MOST_RECORDS = 1024 };

uint32_t kvq__gpu_index(const struct kvq__core *core, const struct kvq__gpu *gpu)
{
    uint32_t i = 1;
    while (i < KVQ_MAX_GPUS && core->pools[i].gpu != gpu)
        i++;
    assert(core->pools[i].gpu == gpu);
    return i - 1;
}

const char *kvq__pool_name(const struct kvq__pool *pool)
{
    return pool->gpu ? kvq__gpu_uuid_text(pool->gpu) : "host";
}

// ---- Stretches of extents ----

static int compare_blocks(const struct kvq__block *a, const struct kvq__block *b)
{
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes ? -1 : 1;
    if (a->extent->number != b->extent->number)
        return a->extent->number < b->extent->number ? -1 : 1;
    return a->at < b->at ? -1 : a->at > b->at;
}

RB_GENERATE_STATIC(kvq__block_tree, kvq__block, free_entry, compare_blocks)

// As many records as the rest of the extent has room for blocks like this one, within bounds.
static int records_add(struct kvq__core *core, struct kvq__extent *e, uint64_t bytes)
{
    uint64_t n = (e->size->bytes - e->used_bytes) / bytes + 1;
    assert(bytes > 0 && e->used_bytes <= e->size->bytes);
    n = kvq__min(kvq__max(n, FEWEST_RECORDS), MOST_RECORDS);
    struct kvq__records *r = kvq__allocate(core, sizeof *r + n * sizeof *r->blocks);
    if (!r)
        return KVQ_E_NO_MEMORY;
    r->n = (uint32_t)n;
    SLIST_INSERT_HEAD(&e->records, r, link);
    for (uint32_t i = 0; i < r->n; i++)
        STAILQ_INSERT_TAIL(&e->spare, &r->blocks[i], link);
    return 0;
}

static struct kvq__block *record_take(struct kvq__extent *e)
{
    struct kvq__block *b = STAILQ_FIRST(&e->spare);
    assert(b && b->refs == 0);
    STAILQ_REMOVE_HEAD(&e->spare, link);
    *b = (struct kvq__block){.extent = e};
    return b;
}

static struct kvq__block_tree *tree_of(const struct kvq__block *b)
{
    assert(b->extent->owner);
    return &b->extent->owner->free[b->extent->passing];
}

static void set_free(struct kvq__block *b)
{
    assert(!b->free && b->refs == 0 && b->bytes > 0);
    b->free = true;
    RB_INSERT(kvq__block_tree, tree_of(b), b);
}

static void set_used(struct kvq__block *b)
{
    assert(b->free && b->refs == 0);
    b->free = false;
    RB_REMOVE(kvq__block_tree, tree_of(b), b);
}

// The shortest free stretch that holds the block, of extents of either kind that have their pages
// or can have them. NULL: there is none.
static struct kvq__block *find_stretch(struct kvq__core *core, struct kvq__arena *arena,
                                       const struct kvq__wanted *wanted, bool passing)
{
    struct kvq__extent first = {.number = 0};
    struct kvq__block least = {.bytes = wanted->bytes, .extent = &first};
    struct kvq__block *b = RB_NFIND(kvq__block_tree, &arena->free[passing], &least);
    while (b && kvq__extent_back(core, arena->pool, b->extent, wanted->grant) < 0)
        b = RB_NEXT(kvq__block_tree, &arena->free[passing], b);
    return b;
}

// Takes the first bytes of a free stretch; the rest stays free.
static int stretch_cut(struct kvq__core *core, struct kvq__block *b, uint64_t bytes)
{
    struct kvq__extent *e = b->extent;
    assert(b->free && b->bytes >= bytes);
    if (b->bytes > bytes && STAILQ_EMPTY(&e->spare) && records_add(core, e, bytes) < 0)
        return KVQ_E_NO_MEMORY;
    set_used(b);
    if (b->bytes > bytes) {
        struct kvq__block *rest = record_take(e);
        rest->at = b->at + bytes;
        rest->bytes = b->bytes - bytes;
        b->bytes = bytes;
        TAILQ_INSERT_AFTER(&e->blocks, b, rest, beside);
        set_free(rest);
    }
    return 0;
}

// `b` takes in the free stretch behind it.
static void join_blocks(struct kvq__block *b, struct kvq__block *next)
{
    struct kvq__extent *e = b->extent;
    assert(next->free && next->extent == e);
    assert(b->at + b->bytes == next->at);
    set_used(next);
    b->bytes += next->bytes;
    TAILQ_REMOVE(&e->blocks, next, beside);
    STAILQ_INSERT_HEAD(&e->spare, next, link);
}

static void stretch_free(struct kvq__block *b)
{
    struct kvq__block *before = TAILQ_PREV(b, kvq__block_row, beside);
    struct kvq__block *next = TAILQ_NEXT(b, beside);
    assert(!before || before->at + before->bytes == b->at);
    if (next && next->free)
        join_blocks(b, next);
    if (before && before->free) {
        set_used(before); // its length changes, and with it its place in the tree
        set_free(b);
        join_blocks(before, b);
        b = before;
    }
    set_free(b);
}

void kvq__extent_show(struct kvq__extent *e)
{
    assert(e->owner && e->serial <= e->owner->last_serial);
    if (e->serial == 0)
        e->serial = ++e->owner->last_serial;
}

// Gives an empty extent to a namespace.
static int extent_give(struct kvq__core *core, struct kvq__extent *e, struct kvq__arena *arena,
                       bool passing, uint64_t bytes)
{
    assert(!e->owner && e->used_bytes == 0);
    SLIST_INIT(&e->records);
    STAILQ_INIT(&e->spare);
    TAILQ_INIT(&e->blocks);
    if (records_add(core, e, bytes) < 0)
        return KVQ_E_NO_MEMORY;
    TAILQ_REMOVE(&arena->pool->empty, e, link);
    TAILQ_INSERT_HEAD(&arena->extents, e, link);
    e->owner = arena;
    e->passing = passing;
    if (e->last != arena->ns)
        e->serial = 0;
    if (!passing)
        kvq__extent_show(e);
    e->last = arena->ns;
    struct kvq__block *all = record_take(e);
    all->bytes = e->size->bytes;
    arena->extents_taken[passing] += e->size->bytes;
    TAILQ_INSERT_HEAD(&e->blocks, all, beside);
    set_free(all);
    return 0;
}

static void extent_empty(struct kvq__core *core, struct kvq__extent *e)
{
    struct kvq__arena *arena = e->owner;
    struct kvq__records *r;
    struct kvq__block *all = TAILQ_FIRST(&e->blocks);
    assert(e->used_bytes == 0 && !TAILQ_NEXT(all, beside));
    assert(all->free && all->bytes == e->size->bytes);
    assert(arena->extents_taken[e->passing] >= all->bytes);
    arena->extents_taken[e->passing] -= all->bytes;
    set_used(all);
    TAILQ_INIT(&e->blocks);
    STAILQ_INIT(&e->spare);
    while ((r = SLIST_FIRST(&e->records))) {
        SLIST_REMOVE_HEAD(&e->records, link);
        kvq__deallocate(core, r, sizeof *r + r->n * sizeof *r->blocks);
    }
    TAILQ_REMOVE(&arena->extents, e, link);
    TAILQ_INSERT_HEAD(&arena->pool->empty, e, link);
    e->owner = NULL;
    e->empty_since = core->now;
}

void kvq__arena_open(struct kvq__arena *arena, struct kvq__namespace *ns, struct kvq__pool *pool)
{
    *arena = (struct kvq__arena){.ns = ns, .pool = pool};
    TAILQ_INIT(&arena->extents);
    TAILQ_INIT(&arena->sessions);
    RB_INIT(&arena->free[false]);
    RB_INIT(&arena->free[true]);
}

// ---- Blocks ----

// A free stretch: in extents of the wanted kind, then in a further extent, then in extents of the
// other kind. Once half of the pool is taken, both kinds come before a further extent.
static int stretch_find(struct kvq__core *core, struct kvq__arena *arena,
                        const struct kvq__wanted *wanted, struct kvq__block **out)
{
    struct kvq__pool *pool = arena->pool;
    struct kvq__extent *e = NULL;
    bool apart = pool->extents_taken + kvq__extent_unit(pool) <= pool->budget / 2;
    *out = find_stretch(core, arena, wanted, wanted->passing);
    if (!*out && !apart)
        *out = find_stretch(core, arena, wanted, !wanted->passing);
    if (*out)
        return 0;
    int rc = kvq__extent_find(core, arena, wanted, wanted->passing && apart, &e);
    rc = rc ? rc : extent_give(core, e, arena, wanted->passing, wanted->bytes);
    if (rc == 0)
        *out = TAILQ_FIRST(&e->blocks);
    else if (rc != KVQ_E_BUSY)
        *out = find_stretch(core, arena, wanted, !wanted->passing);
    return *out ? 0 : rc;
}

static int block_take(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                      const struct kvq__wanted *wanted, struct kvq__ref *ref)
{
    struct kvq__arena *arena = &ns->arenas[pool - core->pools];
    uint64_t bytes = wanted->bytes;
    struct kvq__block *b;
    assert((size_t)(pool - core->pools) < core->n_pools && arena->pool == pool);
    assert(bytes > 0 && bytes % KVQ__BLOCK_GRAIN == 0 && bytes <= pool->extent_bytes &&
           !ref->block);
    int rc = stretch_find(core, arena, wanted, &b);
    if (rc < 0)
        return rc;
    rc = stretch_cut(core, b, bytes);
    if (rc < 0)
        return rc;
    assert(b->refs == 0 && !b->exempt && b->at + bytes <= b->extent->size->bytes);
    b->refs = 1;
    b->retired = (struct kvq__retired){0};
    b->saved = b->saved_sinks = 0;
    b->extent->used_bytes += bytes;
    core->room.taken++;
    pool->used_bytes += bytes;
    ns->used[kvq__pool_limit(pool)] += bytes;
    assert(pool->used_bytes <= pool->extents_taken && pool->extents_taken <= pool->budget);
    ref->block = b;
    ref->data = b->extent->memory.base + b->at;
    return 0;
}

// True if something was freed since the block was refused.
static bool free_some(struct kvq__core *core, const struct kvq__wanted *wanted,
                      struct kvq__shortage *s)
{
    bool spares = wanted->grant && wanted->grant->spares_prefixes;
    return kvq__deferred_free(core, true) ||
           (!spares && core->up->block_reclaim(core, s->ns, s->pool, s->code, &s->later));
}

static int note_refused_block(struct kvq__grant *grant, const struct kvq__shortage *shortage)
{
    int rc = shortage->code;
    if (grant && (rc == KVQ_E_QUOTA || rc == KVQ_E_NO_MEMORY || rc == KVQ_E_BUSY))
        grant->refused = *shortage;
    return rc;
}

static int block_new(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                     const struct kvq__wanted *wanted, struct kvq__ref *ref)
{
    enum kvq__limit which = kvq__pool_limit(pool);
    struct kvq__shortage s = {.ns = ns, .pool = pool, .bytes = wanted->bytes};
    do
        s.code = kvq__quota_allows(ns, which, s.bytes) ? block_take(core, ns, pool, wanted, ref)
                                                       : KVQ_E_QUOTA;
    while ((s.code == KVQ_E_QUOTA || s.code == KVQ_E_NO_MEMORY) && free_some(core, wanted, &s));
    assert((s.code == 0) == (ref->block != NULL));
    return note_refused_block(wanted->grant, &s);
}

int kvq__block_new(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                   uint64_t bytes, struct kvq__grant *grant, struct kvq__ref *ref)
{
    return block_new(core, ns, pool, &(struct kvq__wanted){bytes, false, grant}, ref);
}

int kvq__block_new_passing(struct kvq__core *core, struct kvq__namespace *ns,
                           struct kvq__pool *pool, uint64_t bytes, struct kvq__grant *grant,
                           struct kvq__ref *ref)
{
    return block_new(core, ns, pool, &(struct kvq__wanted){bytes, true, grant}, ref);
}

int kvq__block_replace(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                       uint64_t bytes, struct kvq__block *old, struct kvq__grant *grant,
                       struct kvq__ref *ref)
{
    const struct kvq__wanted wanted = {bytes, false, grant};
    const struct kvq__arena *arena = old->extent->owner;
    enum kvq__limit which = kvq__pool_limit(pool);
    assert(old->refs > 0 && !old->free);
    if (old->refs > 1 || arena->ns != ns || old->bytes > bytes ||
        kvq__pool_limit(arena->pool) != which ||
        (old->bytes < bytes && !kvq__quota_allows(ns, which, bytes - old->bytes)))
        return kvq__block_new(core, ns, pool, bytes, grant, ref);
    struct kvq__shortage s = {.ns = ns, .pool = pool, .bytes = bytes};
    do
        s.code = block_take(core, ns, pool, &wanted, ref);
    while (s.code == KVQ_E_NO_MEMORY && free_some(core, &wanted, &s));
    if (s.code == 0)
        kvq__block_exempt(old, true);
    return note_refused_block(grant, &s);
}

struct kvq__ref kvq__block_share(struct kvq__ref ref)
{
    assert(!ref.block || (ref.block->refs > 0 && !ref.block->free));
    if (ref.block && kvq__block_is_alone(ref.block))
        kvq__alone_count(ref.block, false);
    if (ref.block)
        ref.block->refs++;
    return ref;
}

void kvq__block_exempt(struct kvq__block *b, bool exempt)
{
    const struct kvq__arena *arena = b->extent->owner;
    uint64_t *bytes = &arena->ns->exempt[kvq__pool_limit(arena->pool)];
    assert(!b->free && (!b->exempt || *bytes >= b->bytes));
    if (exempt && !b->exempt)
        *bytes += b->bytes;
    else if (!exempt && b->exempt)
        *bytes -= b->bytes;
    b->exempt = exempt;
}

static void block_free(struct kvq__core *core, struct kvq__block *b, bool gain)
{
    struct kvq__extent *e = b->extent;
    struct kvq__arena *arena = e->owner;
    assert(e->used_bytes >= b->bytes && arena->pool->used_bytes >= b->bytes);
    assert(arena->ns->used[kvq__pool_limit(arena->pool)] >= b->bytes);
    assert(!b->free && b->refs == 0 && b->indexes == 0);
    kvq__block_exempt(b, false);
    e->used_bytes -= b->bytes;
    arena->pool->used_bytes -= b->bytes;
    arena->ns->used[kvq__pool_limit(arena->pool)] -= b->bytes;
    if (gain)
        kvq__freed_note(arena->ns, arena->pool);
    stretch_free(b);
    if (e->used_bytes == 0)
        extent_empty(core, e);
}

// ---- Deferred frees ----

// How many givers free_quiet visits in a call.
enum { GIVERS_AT_ONCE = 4, GIVERS_FOR_ROOM = 256 };

// Whether all flights until this one have ended.
static bool is_over(const struct kvq__core *core, uint64_t flight)
{
    const struct kvq__flight *oldest = TAILQ_FIRST(&core->flights);
    return !oldest || oldest->number > flight;
}

struct kvq__drop kvq__drop_by(struct kvq__session *giver, uint64_t last)
{
    return (struct kvq__drop){giver, last, giver ? giver->serial : KVQ__BY_SEVERAL};
}

void kvq__retire(const struct kvq__core *core, struct kvq__retired *r, const struct kvq__drop *drop)
{
    static const struct kvq__drop any = {NULL, UINT64_MAX, KVQ__BY_SEVERAL};
    const struct kvq__drop *d = drop ? drop : &any;
    uint64_t last = kvq__min(core->last.flight, d->last);
    assert(r->at <= core->last.flight);
    if (is_over(core, last))
        return;
    r->by = is_over(core, r->at) || r->by == d->by ? d->by : KVQ__BY_SEVERAL;
    r->at = kvq__max(last, r->at);
}

static void deferred_add(struct kvq__core *core, struct kvq__block *b, struct kvq__session *giver)
{
    const struct kvq__block *first = TAILQ_FIRST(&core->freeing.deferred);
    assert(b->refs == 0 && !b->free && !is_over(core, b->retired.at));
    if (first && first->retired.at > b->retired.at)
        TAILQ_INSERT_HEAD(&core->freeing.deferred, b, deferred_link);
    else
        TAILQ_INSERT_TAIL(&core->freeing.deferred, b, deferred_link);
    b->extent->owner->deferred_bytes += b->bytes;
    b->given_link.le_prev = NULL;
    if (!giver || giver->serial != b->retired.by)
        return;
    LIST_INSERT_HEAD(&giver->giver.given, b, given_link);
    if (!giver->giver.listed) {
        TAILQ_INSERT_TAIL(&core->freeing.givers, giver, giver.link);
        core->freeing.n_givers++;
    }
    giver->giver.listed = true;
}

static void take_back(struct kvq__block *b)
{
    if (b->given_link.le_prev)
        LIST_REMOVE(b, given_link);
    b->given_link.le_prev = NULL;
}

static void deferred_end(struct kvq__core *core, struct kvq__block *b)
{
    assert(b->refs == 0 && !b->free);
    take_back(b);
    TAILQ_REMOVE(&core->freeing.deferred, b, deferred_link);
    assert(b->extent->owner->deferred_bytes >= b->bytes);
    b->extent->owner->deferred_bytes -= b->bytes;
    block_free(core, b, true);
}

static void spend_budget(struct kvq__core *core)
{
    if (core->freeing.left > 0)
        core->freeing.left--;
    core->freeing.done++;
}

static bool free_given(struct kvq__session *s, bool all)
{
    struct kvq__block *b;
    bool any = false;
    while ((all || s->core->freeing.left > 0) && (b = LIST_FIRST(&s->giver.given))) {
        deferred_end(s->core, b);
        spend_budget(s->core);
        any = true;
    }
    return any;
}

// Frees what quiet sessions have given up. Visits some of the givers, by turns.
static bool free_quiet(struct kvq__core *core, bool all)
{
    uint32_t most = all ? GIVERS_FOR_ROOM : GIVERS_AT_ONCE;
    bool any = false;
    for (uint32_t n = core->freeing.n_givers < most ? core->freeing.n_givers : most; n > 0; n--) {
        struct kvq__session *s = TAILQ_FIRST(&core->freeing.givers);
        assert(s && s->giver.listed && core->freeing.n_givers > 0);
        if (!LIST_EMPTY(&s->giver.given) && s->core->up->session_quiet(s))
            any |= free_given(s, all);
        TAILQ_REMOVE(&core->freeing.givers, s, giver.link);
        s->giver.listed = !LIST_EMPTY(&s->giver.given);
        if (s->giver.listed)
            TAILQ_INSERT_TAIL(&core->freeing.givers, s, giver.link);
        else
            core->freeing.n_givers--;
    }
    return any;
}

bool kvq__deferred_free(struct kvq__core *core, bool all)
{
    struct kvq__block *b;
    bool any = false;
    while ((all || core->freeing.left > 0) && (b = TAILQ_FIRST(&core->freeing.deferred)) &&
           is_over(core, b->retired.at)) {
        deferred_end(core, b);
        spend_budget(core);
        any = true;
    }
    return free_quiet(core, all) || any;
}

bool kvq__given_end(struct kvq__session *s)
{
    struct kvq__block *b;
    if (s->core->up->session_quiet(s))
        free_given(s, false);
    else // a stream still packs it: what that has waits for flights, like everything else
        while (s->core->freeing.left > 0 && (b = LIST_FIRST(&s->giver.given))) {
            take_back(b);
            spend_budget(s->core);
        }
    if (!LIST_EMPTY(&s->giver.given))
        return false;
    if (s->giver.listed) {
        TAILQ_REMOVE(&s->core->freeing.givers, s, giver.link);
        s->core->freeing.n_givers--;
    }
    assert(TAILQ_EMPTY(&s->core->freeing.givers) == (s->core->freeing.n_givers == 0));
    s->giver.listed = false;
    return true;
}

// ---- References ----

void kvq__block_drop(struct kvq__core *core, struct kvq__ref *ref, const struct kvq__drop *drop)
{
    struct kvq__block *b = ref->block;
    *ref = (struct kvq__ref){0};
    if (!b)
        return;
    assert(b->refs > 0 && !b->free);
    kvq__retire(core, &b->retired, drop);
    if (--b->refs > 0) {
        if (kvq__block_is_alone(b))
            kvq__alone_count(b, true);
        return;
    }
    if (is_over(core, b->retired.at))
        block_free(core, b, true);
    else
        deferred_add(core, b, drop ? drop->giver : NULL);
}

void kvq__block_drop_as(struct kvq__core *core, struct kvq__ref *ref,
                        const struct kvq__retired *retired, const struct kvq__drop *drop)
{
    struct kvq__drop as = {drop ? drop->giver : NULL, retired->at, retired->by};
    kvq__block_drop(core, ref, &as);
}

void kvq__block_let_go(struct kvq__core *core, struct kvq__ref *ref)
{
    struct kvq__drop none = kvq__drop_by(NULL, 0);
    kvq__block_drop(core, ref, &none);
}

bool kvq__block_is_idle(const struct kvq__core *core, const struct kvq__block *b)
{
    return b->refs == 1 && is_over(core, b->retired.at);
}

void kvq__block_drop_idle(struct kvq__core *core, struct kvq__ref *ref, bool gain)
{
    struct kvq__block *b = ref->block;
    if (!b || !kvq__block_is_idle(core, b)) {
        kvq__block_drop(core, ref, NULL);
        return;
    }
    *ref = (struct kvq__ref){0};
    b->refs = 0;
    block_free(core, b, gain);
}

void kvq__block_shrink(struct kvq__core *core, struct kvq__block *b, uint64_t bytes, bool gain)
{
    struct kvq__extent *e = b->extent;
    assert(bytes > 0 && bytes % KVQ__BLOCK_GRAIN == 0 && bytes < b->bytes);
    if (b->refs > 1 || b->exempt || !is_over(core, core->last.flight) ||
        (STAILQ_EMPTY(&e->spare) && records_add(core, e, bytes) < 0))
        return;
    assert(b->indexes == 0); // which would be a second reference
    struct kvq__block *rest = record_take(e);
    rest->at = b->at + bytes;
    rest->bytes = b->bytes - bytes;
    b->bytes = bytes;
    TAILQ_INSERT_AFTER(&e->blocks, b, rest, beside);
    block_free(core, rest, gain);
}

// ---- Flights ----

void kvq__flight_begin(struct kvq__core *core, struct kvq__flight *flight)
{
    assert(TAILQ_EMPTY(&core->flights) ||
           TAILQ_LAST(&core->flights, kvq__flight_list)->number <= core->last.flight);
    assert(flight->number == 0);
    flight->number = ++core->last.flight;
    TAILQ_INSERT_TAIL(&core->flights, flight, link);
}

void kvq__flight_move(struct kvq__core *core, struct kvq__flight *from, struct kvq__flight *to)
{
    assert(from != to && to->number == 0);
    to->number = from->number;
    if (from->number) {
        TAILQ_INSERT_BEFORE(from, to, link);
        TAILQ_REMOVE(&core->flights, from, link);
        from->number = 0;
    }
}

void kvq__flight_end(struct kvq__core *core, struct kvq__flight *flight)
{
    assert(flight->number <= core->last.flight);
    assert(flight->number != 0);
    TAILQ_REMOVE(&core->flights, flight, link);
    flight->number = 0;
    kvq__deferred_free(core, false);
}
