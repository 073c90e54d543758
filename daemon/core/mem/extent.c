// SPDX-License-Identifier: Apache-2.0
//
// Extents without an owner: how large they are, how they are made, found and given back. See
// extent.h.
#include "daemon/core/mem/extent.h"

#include <assert.h>

#include "daemon/core/state.h"

// What extents leave that are not full: one beyond the smallest has at most this part of what its
// namespace has, and blocks of one size leave at most this part of an extent that is made for them.
enum { LAST_PART = 16, END_PART = 8 };

// ---- Sizes and numbers ----

// By how much the number of an extent of this size is below the next one's.
static uint32_t units_of(const struct kvq__pool *pool, const struct kvq__extent_size *size)
{
    return (uint32_t)(size->bytes / kvq__extent_unit(pool));
}

// Behind the last number of a size.
static uint64_t numbers_end(const struct kvq__pool *pool, const struct kvq__extent_size *size)
{
    return size->first + (uint64_t)size->most * units_of(pool, size);
}

static void size_add(struct kvq__pool *pool, uint64_t bytes, uint64_t most)
{
    struct kvq__extent_size *size = &pool->sizes[pool->n_sizes];
    uint64_t first = pool->n_sizes ? numbers_end(pool, size - 1) : 0;
    assert(pool->n_sizes < KVQ__EXTENT_SIZES && first <= UINT32_MAX && most <= UINT32_MAX);
    *size = (struct kvq__extent_size){bytes, (uint32_t)first, (uint32_t)most, 0, NULL};
    pool->n_sizes++;
    pool->number_words += (most + 63) / 64;
}

static uint64_t most_small(uint64_t budget, uint64_t bytes)
{
    return kvq__min(budget / bytes, KVQ__SMALL_EXTENTS);
}

int kvq__extents_open(struct kvq__core *core, struct kvq__pool *pool, uint64_t smallest)
{
    uint64_t bytes = smallest;
    assert(smallest > 0 && pool->extent_bytes >= smallest && pool->extent_bytes % smallest == 0);
    TAILQ_INIT(&pool->empty);
    for (; bytes < pool->extent_bytes && pool->n_sizes < KVQ__EXTENT_SIZES - 1; bytes *= 2)
        size_add(pool, bytes, most_small(pool->budget, bytes));
    size_add(pool, pool->extent_bytes, pool->budget / pool->extent_bytes);
    pool->numbers = kvq__allocate(core, pool->number_words * sizeof *pool->numbers);
    if (!pool->numbers)
        return KVQ_E_NO_MEMORY;
    uint64_t *words = pool->numbers;
    for (uint32_t i = 0; i < pool->n_sizes; i++) {
        pool->sizes[i].taken = words;
        words += (pool->sizes[i].most + 63) / 64;
    }
    assert(words == pool->numbers + pool->number_words);
    return 0;
}

void kvq__extents_close(struct kvq__core *core, struct kvq__pool *pool)
{
    assert(TAILQ_EMPTY(&pool->empty) && pool->extents_taken == 0);
    kvq__deallocate(core, pool->numbers, pool->number_words * sizeof *pool->numbers);
    pool->numbers = NULL;
}

uint64_t kvq__host_extents_most(uint64_t pool_bytes, uint64_t extent_bytes)
{
    uint64_t n = 0, left = pool_bytes;
    for (uint64_t bytes = KVQ__SMALLEST_EXTENT; bytes < extent_bytes; bytes *= 2) {
        n += most_small(left, bytes);
        left -= most_small(left, bytes) * bytes;
    }
    return n + left / extent_bytes;
}

uint64_t kvq__extents_span(const struct kvq__pool *pool)
{
    return numbers_end(pool, &pool->sizes[pool->n_sizes - 1]) * kvq__extent_unit(pool);
}

static bool has_number(const struct kvq__extent_size *size)
{
    return size->n < size->most;
}

// Takes the lowest free number, so that the extents that clients map lie close together.
static uint32_t number_take(const struct kvq__pool *pool, struct kvq__extent_size *size)
{
    uint32_t word = 0;
    assert(has_number(size));
    while (size->taken[word] == UINT64_MAX)
        word++;
    uint32_t at = 64 * word + (uint32_t)__builtin_ctzll(~size->taken[word]);
    assert(at < size->most);
    size->taken[word] |= 1ull << at % 64;
    size->n++;
    return size->first + at * units_of(pool, size);
}

static void number_give(const struct kvq__pool *pool, struct kvq__extent_size *size,
                        uint32_t number)
{
    uint32_t at = (number - size->first) / units_of(pool, size);
    assert(number >= size->first && at < size->most && size->n > 0);
    assert(size->taken[at / 64] >> at % 64 & 1);
    size->taken[at / 64] &= ~(1ull << at % 64);
    size->n--;
}

// Of the extent that the namespace is to have next, for this block and others like it.
static struct kvq__extent_size *next_size(const struct kvq__arena *arena,
                                          const struct kvq__wanted *wanted)
{
    struct kvq__pool *pool = arena->pool;
    struct kvq__extent_size *size = pool->sizes, *last = &pool->sizes[pool->n_sizes - 1];
    uint64_t part = arena->extents_taken[wanted->passing] / LAST_PART;
    assert(wanted->bytes > 0 && wanted->bytes <= last->bytes);
    while (size < last &&
           (size[1].bytes <= part || !has_number(size) ||
            size->bytes % wanted->bytes > size->bytes / END_PART)) // so if the block is longer
        size++;
    return size;
}

// ---- Making and giving back ----

// Finds an empty extent that another namespace may get: no client may have mapped it.
static struct kvq__extent *find_unexported(struct kvq__pool *pool, uint64_t bytes)
{
    struct kvq__extent *e;
    TAILQ_FOREACH (e, &pool->empty, link)
        if (!e->exported && e->size->bytes >= bytes)
            return e;
    return NULL;
}

static int extent_make(struct kvq__core *core, struct kvq__pool *pool,
                       struct kvq__extent_size *size, const struct kvq__grant *grant,
                       struct kvq__extent **out)
{
    if (pool->extents_taken + size->bytes > pool->budget || !has_number(size))
        return KVQ_E_NO_MEMORY;
    struct kvq__extent *e = kvq__allocate(core, sizeof *e);
    if (!e)
        return KVQ_E_NO_MEMORY;
    e->size = size;
    int rc = kvq__extent_memory(pool, grant, e);
    if (rc < 0) {
        kvq__deallocate(core, e, sizeof *e);
        return rc;
    }
    assert(e->memory.bytes >= size->bytes && (uintptr_t)e->memory.base % KVQ__BLOCK_GRAIN == 0);
    e->number = number_take(pool, size);
    pool->extents_taken += size->bytes;
    pool->huge_bytes += e->memory.huge ? size->bytes : 0;
    TAILQ_INSERT_TAIL(&pool->empty, e, link);
    *out = e;
    return 0;
}

// Where there is no room for an extent as large as it should be, a smaller one may do.
static int extent_acquire(struct kvq__core *core, const struct kvq__arena *arena,
                          const struct kvq__wanted *wanted, struct kvq__extent **out)
{
    struct kvq__extent_size *size = next_size(arena, wanted);
    int rc = extent_make(core, arena->pool, size, wanted->grant, out);
    while (rc == KVQ_E_NO_MEMORY && size > arena->pool->sizes && size[-1].bytes >= wanted->bytes)
        rc = extent_make(core, arena->pool, --size, wanted->grant, out);
    return rc;
}

static void extent_release(struct kvq__core *core, struct kvq__pool *pool, struct kvq__extent *e)
{
    assert(pool->extents_taken >= e->size->bytes);
    assert(!e->memory.huge || pool->huge_bytes >= e->size->bytes);
    assert(e->used_bytes == 0 && !e->owner && SLIST_EMPTY(&e->records));
    TAILQ_REMOVE(&pool->empty, e, link);
    number_give(pool, e->size, e->number);
    pool->huge_bytes -= e->memory.huge ? e->size->bytes : 0;
    pool->memory.release(pool->memory.context, &e->memory);
    pool->extents_taken -= e->size->bytes;
    kvq__deallocate(core, e, sizeof *e);
}

// Whether a client that is still attached was told of the extent, and so may have mapped it.
static bool may_be_mapped(const struct kvq__extent *e, const struct kvq__pool *pool)
{
    if (!e->exported)
        return false;
    assert(e->last && e->serial > 0);
    return e->last->arenas[pool - e->last->core->pools].mapped >= e->serial;
}

static void trim(struct kvq__core *core, struct kvq__pool *pool, uint64_t age_ns, uint64_t *left)
{
    struct kvq__extent *e = TAILQ_FIRST(&pool->empty), *next;
    for (; e && *left > 0; e = next) {
        next = TAILQ_NEXT(e, link);
        assert(!e->owner && e->empty_since <= core->now);
        if (core->now - e->empty_since < age_ns || may_be_mapped(e, pool))
            continue;
        *left -= kvq__min(*left, e->size->bytes);
        extent_release(core, pool, e);
    }
}

void kvq__pools_trim(struct kvq__core *core, uint64_t age_ns, uint64_t bytes)
{
    for (uint32_t i = 0; i < core->n_pools; i++)
        trim(core, &core->pools[i], age_ns, &bytes);
}

uint64_t kvq__pool_trim(struct kvq__core *core, struct kvq__pool *pool, uint64_t bytes)
{
    uint64_t before = pool->extents_taken;
    trim(core, pool, 0, &bytes);
    assert(pool->extents_taken <= before);
    return before - pool->extents_taken;
}

// ---- Finding one ----

// Zeroes an empty extent of another namespace. Where zeroing takes long, where the extent is bare
// or is to be, or is larger than it should be, it goes back to the system, and a new one is made
// in its place.
static int take_over(struct kvq__core *core, const struct kvq__arena *arena,
                     const struct kvq__wanted *wanted, struct kvq__extent *e,
                     struct kvq__extent **out)
{
    struct kvq__pool *pool = arena->pool;
    assert(!e->owner && !e->exported && e->used_bytes == 0);
    bool bare = e->bare || (pool->memory.reserve && wanted->grant && wanted->grant->bare);
    if (pool->memory.take || bare || e->size->bytes > next_size(arena, wanted)->bytes) {
        extent_release(core, pool, e);
        return extent_acquire(core, arena, wanted, out);
    }
    pool->memory.zero(pool->memory.context, &e->memory);
    e->last = NULL;
    *out = e;
    return 0;
}

// Gives an empty extent back that no client can have mapped. False if there is none.
static bool release_unmapped(struct kvq__core *core, struct kvq__pool *pool)
{
    struct kvq__extent *e;
    TAILQ_FOREACH (e, &pool->empty, link)
        if (!may_be_mapped(e, pool)) {
            extent_release(core, pool, e);
            return true;
        }
    return false;
}

// An empty extent that this namespace had before, of so many bytes, with all of its pages unless
// whoever wants it takes them himself.
static struct kvq__extent *find_own(struct kvq__core *core, const struct kvq__arena *arena,
                                    const struct kvq__wanted *wanted, uint64_t most, bool unseen)
{
    struct kvq__extent *e;
    TAILQ_FOREACH (e, &arena->pool->empty, link)
        if (e->last == arena->ns && e->size->bytes >= wanted->bytes && e->size->bytes <= most &&
            !(unseen && e->exported) && kvq__extent_back(core, arena->pool, e, wanted->grant) == 0)
            return e;
    return NULL;
}

int kvq__extent_find(struct kvq__core *core, const struct kvq__arena *arena,
                     const struct kvq__wanted *wanted, bool unseen, struct kvq__extent **out)
{
    struct kvq__pool *pool = arena->pool;
    *out = find_own(core, arena, wanted, next_size(arena, wanted)->bytes, unseen);
    if (*out)
        return 0;
    int rc = extent_acquire(core, arena, wanted, out);
    if (rc == 0 || rc == KVQ_E_BUSY)
        return rc;
    *out = find_own(core, arena, wanted, UINT64_MAX, false);
    if (*out)
        return 0;
    struct kvq__extent *other = find_unexported(pool, wanted->bytes);
    if (other)
        rc = take_over(core, arena, wanted, other, out);
    while (rc == KVQ_E_NO_MEMORY && release_unmapped(core, pool))
        rc = extent_acquire(core, arena, wanted, out);
    return rc;
}

// ---- Extents of a GPU, which others make ----

void kvq__pool_want(const struct kvq__namespace *ns, const struct kvq__pool *pool, uint64_t bytes)
{
    const struct kvq__extent *e;
    uint64_t n = (bytes + pool->extent_bytes - 1) / pool->extent_bytes;
    uint64_t most = (pool->budget - pool->extents_taken) / pool->extent_bytes;
    assert(pool->memory.want && pool->extents_taken <= pool->budget && pool->n_sizes == 1);
    TAILQ_FOREACH (e, &pool->empty, link)
        if (e->last == ns && n > 0) // it has this one already
            n--;
    n = n == 0 ? 1 : kvq__min(n, most);
    pool->memory.want(pool->memory.context, (uint32_t)n);
}

bool kvq__pools_poll(struct kvq__core *core)
{
    bool any = false;
    for (uint32_t i = 0; i < core->n_pools; i++) {
        struct kvq__pool *pool = &core->pools[i];
        uint32_t made = pool->memory.made ? pool->memory.made(pool->memory.context) : pool->made;
        any |= made != pool->made;
        pool->made = made;
    }
    core->room.extents_made += any;
    return any;
}
