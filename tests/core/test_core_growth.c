// SPDX-License-Identifier: Apache-2.0
//
// Extents that grow with who has them: how large they are, how many there may be, and that a block
// is refused only if no memory is left that would hold it.
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, UNIT = 2 * MIB, HELD = 1 << 15 };

static struct kit kit;
static struct kvq__ref held[HELD];
static uint32_t n_held;

static struct kvq__pool *pool(void)
{
    return &kit.core->pools[0];
}

static void start(uint64_t seed, uint64_t pool_bytes, uint64_t extent_bytes)
{
    snprintf(kit_context, sizeof kit_context, "seed %llu, pool of %llu MiB",
             (unsigned long long)seed, (unsigned long long)pool_bytes / MIB);
    kit_extents(extent_bytes);
    kit_open(&kit, seed, pool_bytes, 0);
    kit_extents(UNIT);
    memset(held, 0, sizeof held); // by a test that failed
    n_held = 0;
}

static int take(struct kvq__namespace *ns, uint64_t bytes)
{
    assert_true(n_held < HELD);
    int rc = kvq__block_new(kit.core, ns, pool(), bytes, NULL, &held[n_held]);
    n_held += rc == 0;
    return rc;
}

static void give(uint32_t i)
{
    kvq__block_drop(kit.core, &held[i], NULL);
    held[i] = held[--n_held];
    held[n_held] = (struct kvq__ref){0};
}

static void finish(void)
{
    while (n_held)
        give(n_held - 1);
    assert_int_equal(pool()->used_bytes, 0);
    kit_close(&kit);
}

static uint64_t size_of_last(void)
{
    return held[n_held - 1].block->extent->size->bytes;
}

// Fewer extents of each small size than there may be.
static void limit_small(uint32_t most)
{
    for (uint32_t i = 0; i + 1 < pool()->n_sizes; i++)
        if (pool()->sizes[i].most > most)
            pool()->sizes[i].most = most;
}

static uint32_t extents(void)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < pool()->n_sizes; i++)
        n += pool()->sizes[i].n;
    return n;
}

// ---- Sizes ----

// What a namespace takes beyond its blocks is a sixteenth of all, or the smallest extent, however
// much it has; and it has few extents all the same.
PLAIN_TEST(test_takes_little_more)
{
    enum { BLOCK = MIB / 8, POOL = 2048 };
    start(1, (uint64_t)POOL * MIB, 64 * MIB);
    struct kvq__namespace *ns = kit_namespace(&kit, 1000);
    uint64_t before = 0;
    while (take(ns, BLOCK) == 0) {
        uint64_t spare = pool()->extents_taken - pool()->used_bytes;
        assert_true(spare < UNIT || spare <= pool()->extents_taken / 16);
        assert_true(pool()->extents_taken >= before);
        before = pool()->extents_taken;
    }
    assert_int_equal(pool()->used_bytes, pool()->budget);
    assert_in_range(extents(), POOL / 64, 32 + 5 * 16 + POOL / 64);
    finish();
}

// Blocks that fill no small extent well get larger ones, and the largest block its own.
PLAIN_TEST(test_sizes_fit_blocks)
{
    static const struct {
        uint64_t block, extent; // in KiB
    } cases[] = {{64, 2048},     {512, 2048},   {640, 2048},   {1024, 2048}, {1088, 8192},
                 {1280, 4096},   {2048, 2048},  {2560, 8192},  {4096, 4096}, {5120, 16384},
                 {16384, 16384}, {9216, 65536}, {65536, 65536}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        start(i, 128 * MIB, 64 * MIB);
        assert_int_equal(take(kit_namespace(&kit, 1000), cases[i].block * 1024), 0);
        assert_int_equal(size_of_last(), cases[i].extent * 1024);
        finish();
    }
}

// What a long step takes for a moment does not make what stays take more.
PLAIN_TEST(test_kinds_grow_apart)
{
    start(1, 512 * MIB, 64 * MIB);
    struct kvq__namespace *ns = kit_namespace(&kit, 1000);
    for (; n_held < 128; n_held++)
        assert_int_equal(kvq__block_new_passing(kit.core, ns, pool(), MIB, NULL, &held[n_held]), 0);
    assert_int_equal(size_of_last(), 4 * MIB);
    assert_int_equal(take(ns, MIB), 0);
    assert_int_equal(size_of_last(), UNIT);
    finish();
}

// Nor does what a long step has left empty: an extent that is too large for what comes then is
// taken only where there is no room for another.
PLAIN_TEST(test_large_empty_ones_stay_empty)
{
    for (uint64_t pool_bytes = 8; pool_bytes <= 16; pool_bytes += 8) {
        start(pool_bytes, pool_bytes * MIB, 8 * MIB);
        struct kvq__namespace *ns = kit_namespace(&kit, 1000);
        assert_int_equal(take(ns, 8 * MIB), 0);
        give(0);
        assert_int_equal(take(ns, 64), 0);
        assert_int_equal(size_of_last(), pool_bytes == 8 ? 8 * MIB : UNIT);
        finish();
    }
}

// However many namespaces there are, small extents stay few.
PLAIN_TEST(test_small_ones_are_few)
{
    enum { MOST = 3 };
    start(1, 4096ull * MIB, 8 * MIB);
    assert_int_equal(pool()->n_sizes, 3);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(pool()->sizes[i].most, KVQ__SMALL_EXTENTS);
    limit_small(MOST);
    for (uint32_t i = 0; i < 3 * MOST; i++) {
        assert_int_equal(take(kit_namespace(&kit, 1000 + i), 64), 0);
        assert_int_equal(size_of_last(), UNIT << i / MOST);
    }
    give(0);
    kit_tick(&kit, 11 * 1000000000ull); // it goes back
    assert_int_equal(take(kit_namespace(&kit, 999), 64), 0);
    assert_int_equal(size_of_last(), UNIT);
    finish();
}

// ---- Numbers ----

// Each extent has addresses of its own, within what clients keep for the pool.
static void check_places(void)
{
    static uint8_t seen[4096];
    struct kvq__pool_span span;
    char text[KVQ_TEXT_BYTES];
    const struct kvq__namespace *ns;
    const struct kvq__extent *e;
    assert_int_equal(kvq__pool_span(kit.core, "host", &span, text), 0);
    assert_true(span.unit == UNIT && span.span % UNIT == 0 && span.span / UNIT <= sizeof seen);
    memset(seen, 0, sizeof seen);
    TAILQ_FOREACH (ns, &kit.core->namespaces, link)
        TAILQ_FOREACH (e, &ns->arenas[0].extents, link)
            for (uint64_t i = 0; i < e->size->bytes / UNIT; i++) {
                assert_true(e->number + i < span.span / UNIT);
                assert_int_equal(seen[e->number + i]++, 0);
            }
}

PLAIN_TEST(test_places)
{
    for (uint64_t seed = 1; seed <= 30; seed++) {
        static const uint64_t largest[] = {2, 4, 6, 16, 26};
        uint64_t extent = largest[seed % 5] * MIB;
        start(seed, 16 * extent + seed % 3 * UNIT, extent);
        limit_small(1 + kit_below(&kit, 6));
        for (uint32_t i = 0; i < 300; i++) {
            if (kit_chance(&kit, 60) || !n_held)
                take(kit_namespace(&kit, 1000 + kit_below(&kit, 4)),
                     (1 + kit_below(&kit, (uint32_t)(extent / 64))) * 64ull);
            else
                give(kit_below(&kit, n_held));
            if (kit_chance(&kit, 10))
                kit_tick(&kit, 11 * 1000000000ull);
            check_places();
        }
        finish();
    }
}

// ---- Refusals ----

// Whether the pool has room for an extent that holds so many bytes.
static bool has_room(uint64_t bytes)
{
    for (uint32_t i = 0; i < pool()->n_sizes; i++) {
        const struct kvq__extent_size *size = &pool()->sizes[i];
        if (size->bytes >= bytes && size->n < size->most &&
            pool()->extents_taken + size->bytes <= pool()->budget)
            return true;
    }
    return false;
}

// What the header of pools promises of a block that was refused.
static void check_refused(const struct kvq__namespace *ns, uint64_t bytes)
{
    const struct kvq__extent *e;
    const struct kvq__block *b;
    TAILQ_FOREACH (e, &ns->arenas[0].extents, link)
        TAILQ_FOREACH (b, &e->blocks, beside)
            assert_false(b->free && b->bytes >= bytes);
    assert_true(TAILQ_EMPTY(&pool()->empty)); // nobody was told of any
    assert_false(has_room(bytes));
}

PLAIN_TEST(test_refusals)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct kvq__namespace *ns[3];
        start(seed, (4 + seed % 30) * UNIT, 8 * MIB);
        for (uint32_t i = 0; i < 3; i++)
            ns[i] = kit_namespace(&kit, 1000 + i);
        limit_small(kit_chance(&kit, 50) ? 1 + kit_below(&kit, 4) : UINT32_MAX);
        for (uint32_t round = 0; round < 20; round++) {
            uint32_t i,
                most = kit_chance(&kit, 20) ? 8 * MIB / 64 : 1024 + kit_below(&kit, MIB / 64);
            uint64_t bytes;
            do {
                i = kit_below(&kit, 3);
                bytes = (1 + kit_below(&kit, most)) * 64ull;
            } while (take(ns[i], bytes) == 0);
            check_refused(ns[i], bytes);
            for (uint32_t n = kit_below(&kit, n_held + 1); n > 0; n--)
                give(kit_below(&kit, n_held));
        }
        finish();
    }
}

// Small extents that are empty, be they the namespace's or another one's, give way to a large one.
PLAIN_TEST(test_small_ones_give_way)
{
    for (uint32_t other = 0; other < 2; other++) {
        start(other, 16 * MIB, 8 * MIB);
        struct kvq__namespace *ns = kit_namespace(&kit, 1000);
        while (take(ns, UNIT) == 0)
            ;
        assert_int_equal(pool()->sizes[0].n, 8);
        while (n_held > 3) // 6 MiB stay taken
            give(n_held - 1);
        ns = kit_namespace(&kit, 1000 + other);
        assert_int_equal(take(ns, 8 * MIB), 0);
        assert_int_equal(size_of_last(), 8 * MIB);
        assert_int_equal(take(ns, 4 * MIB), KVQ_E_NO_MEMORY);
        assert_int_equal(take(ns, UNIT), 0);
        assert_int_equal(take(ns, 64), KVQ_E_NO_MEMORY);
        finish();
    }
}

// But not while a client may have them mapped.
PLAIN_TEST(test_mapped_ones_stay)
{
    static const struct kvq__layer_row row = {1, 1, 64, 64, .format = "f16", .kv_from = -1};
    struct member m;
    struct kvq__extent_export told[4];
    uint64_t handle, known;
    char text[KVQ_TEXT_BYTES];
    bool more;
    start(1, 8 * MIB, 8 * MIB);
    assert_int_equal(member_open(&kit, &m, 1000, MIB), 0);
    assert_true((handle = kit_session(&m, &row, 1, 0)) != 0);
    assert_int_equal(kit_step(&m, handle, 1, 1, 64), 0);
    assert_int_equal(kvq__extents_tell(m.client, handle, told, 4, &known, &more, text), 1);
    assert_int_equal(told[0].memory->bytes, UNIT);
    kit_drop(&m, handle);
    assert_int_equal(take(kit_namespace(&kit, 1000), 8 * MIB), KVQ_E_NO_MEMORY);
    assert_int_equal(take(kit_namespace(&kit, 1001), 8 * MIB), KVQ_E_NO_MEMORY);
    assert_int_equal(pool()->extents_taken, UNIT);
    member_close(&m);
    assert_int_equal(take(kit_namespace(&kit, 1001), 8 * MIB), 0);
    finish();
}

static int (*real_acquire)(void *context, size_t bytes, struct kvq__memory *memory);

static int acquire_small(void *context, size_t bytes, struct kvq__memory *memory)
{
    return bytes > UNIT ? KVQ_E_NO_MEMORY : real_acquire(context, bytes, memory);
}

// Where the system has no memory for so large an extent, or the budget's rest is less than that.
PLAIN_TEST(test_smaller_for_want_of_room)
{
    start(1, 128 * MIB, 32 * MIB);
    struct kvq__namespace *ns = kit_namespace(&kit, 1000);
    while (pool()->extents_taken < 64 * MIB)
        assert_int_equal(take(ns, UNIT), 0);
    real_acquire = pool()->memory.acquire;
    pool()->memory.acquire = acquire_small;
    assert_int_equal(take(ns, UNIT), 0);
    assert_int_equal(size_of_last(), UNIT);
    assert_int_equal(take(ns, 2 * UNIT), KVQ_E_NO_MEMORY);
    pool()->memory.acquire = real_acquire;
    assert_int_equal(take(ns, UNIT), 0);
    assert_int_equal(size_of_last(), 2 * UNIT);
    finish();
    start(2, 14 * MIB, 8 * MIB);
    ns = kit_namespace(&kit, 1000);
    assert_int_equal(take(ns, 8 * MIB), 0);
    assert_int_equal(take(ns, 8 * MIB), KVQ_E_NO_MEMORY);
    assert_int_equal(take(ns, 3 * MIB), 0);
    assert_int_equal(size_of_last(), 4 * MIB);
    assert_int_equal(take(ns, UNIT), 0);
    assert_int_equal(pool()->extents_taken, pool()->budget);
    finish();
}

int main(void)
{
    return run_all(NULL, NULL);
}
