// SPDX-License-Identifier: Apache-2.0
//
// How much of the index of prefixes is looked at where memory is short: no more than what may go.
// And how much of what is not needed any more goes in one tick.
#include "tests/core/prefix_kit.h"

enum { SESSIONS = 40 };

static uint64_t looks(void)
{
    return kit.core->lookup.looks;
}

static struct kvq__namespace *namespace_of(const char *name)
{
    static const struct kvq__peer admin = {.admin = true};
    struct kvq__namespace *ns = NULL;
    assert_int_equal(kvq__namespace_get(kit.core, &admin, name, &ns, text), 0);
    return ns;
}

// A session with a prefix of its own, of so many pages, some time after the one before.
static uint64_t feed_own(const char *ns, uint32_t which, uint32_t pages)
{
    char salt[16];
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    snprintf(salt, sizeof salt, "%u", which);
    spec.ns = ns;
    spec.salt = salt;
    uint64_t handle = feed(&one, &spec, pages * PAGE + 1);
    kvq__prefix_seal_all(kit.core);
    kvq__core_clock(kit.core, ++kit.now);
    return handle;
}

// Drops a session, and waits until none of its blocks is its own any more.
static void end(uint64_t handle)
{
    drop(&one, handle);
    while (kvq__core_poll(kit.core))
        ;
}

static uint64_t idle_of(const char *ns)
{
    static const struct kvq__peer admin = {.admin = true};
    struct kvq__prefix_info list[8];
    uint32_t n = kvq__core_prefixes(kit.core, &admin, 0, list, 8);
    for (uint32_t i = 0; i < n; i++)
        if (strcmp(list[i].ns, ns) == 0)
            return list[i].idle_bytes;
    return 0;
}

// An index whose blocks all have sessions is not looked at, however often somebody asks for room or
// drops it.
TEST(all_in_use)
{
    struct kvq__namespace *team = namespace_of("team");
    struct kvq__pool *pool = &kit.core->pools[0];
    static const struct kvq__peer admin = {.admin = true};
    uint64_t handles[SESSIONS], pages, bytes;
    for (uint32_t i = 0; i < SESSIONS; i++)
        handles[i] = feed_own("team", i, 2);
    assert_int_equal(team->prefixes.n_nodes, 2 * SESSIONS);
    uint64_t before = looks();
    for (uint32_t i = 0; i < 100; i++) {
        assert_false(kvq__prefix_reclaim(kit.core, team, pool, KVQ_E_NO_MEMORY, NULL));
        assert_false(kvq__prefix_reclaim(kit.core, team, pool, KVQ_E_QUOTA, NULL));
        assert_int_equal(kvq__core_drop_prefixes(kit.core, &admin, "team", &pages, &bytes, text),
                         0);
    }
    assert_int_equal(looks(), before);
    assert_int_equal(idle_of("team"), 0);
    // What one leaves goes, by a look or two at each page; then nobody looks again.
    uint64_t used = pool->used_bytes;
    end(handles[0]);
    assert_in_range(idle_of("team"), 1, used);
    core_check(kit.core);
    before = looks();
    assert_true(kvq__prefix_reclaim(kit.core, team, pool, KVQ_E_QUOTA, NULL));
    assert_true(kvq__prefix_reclaim(kit.core, team, pool, KVQ_E_NO_MEMORY, NULL));
    assert_in_range(looks() - before, 2, 8);
    assert_int_equal(idle_of("team"), 0);
    before = looks();
    assert_false(kvq__prefix_reclaim(kit.core, team, pool, KVQ_E_NO_MEMORY, NULL));
    assert_int_equal(looks(), before);
    assert_int_equal(team->prefixes.n_nodes, 2 * SESSIONS - 2);
}

// Leaves whose blocks sessions have are passed by, however many stand before one that may go.
TEST(held_leaves_cost_nothing)
{
    struct kvq__namespace *team = namespace_of("team");
    struct kvq__pool *pool = &kit.core->pools[0];
    for (uint32_t i = 0; i < SESSIONS; i++)
        feed_own("team", i, 1);
    for (uint32_t i = 0; i < 5; i++) {
        end(feed_own("team", SESSIONS + i, 2));
        uint64_t before = looks();
        for (uint32_t page = 0; page < 2; page++)
            assert_true(kvq__prefix_reclaim(kit.core, team, pool, KVQ_E_NO_MEMORY, NULL));
        assert_in_range(looks() - before, 2, 4);
        core_check(kit.core);
    }
    assert_int_equal(idle_of("team"), 0);
    assert_int_equal(team->prefixes.n_nodes, SESSIONS);
}

// Of two namespaces the one gives a page up whose page was let go first, as within one index,
// whichever was read first.
TEST(let_go_first)
{
    struct kvq__namespace *team = namespace_of("team"), *open = namespace_of("open");
    struct kvq__pool *pool = &kit.core->pools[0];
    uint64_t early = feed_own("team", 0, 1), late = feed_own("open", 1, 1);
    end(late);
    kvq__core_clock(kit.core, ++kit.now);
    end(early);
    assert_int_equal(team->prefixes.n_nodes, 1);
    assert_true(kvq__prefix_reclaim(kit.core, team, pool, KVQ_E_NO_MEMORY, NULL));
    assert_int_equal(open->prefixes.n_nodes, 0);
    assert_int_equal(team->prefixes.n_nodes, 1);
    core_check(kit.core);
}

// A block that is replaced by a longer one is no room for anybody, and nobody is told.
TEST(replaced)
{
    struct kvq__namespace *team = namespace_of("team");
    struct kvq__pool *pool = &kit.core->pools[0];
    struct kvq__session *s = kit_of(&one, feed_own("team", 0, 1));
    struct kvq__freed before = kvq__freed_of(team, pool);
    struct kvq__grant grant = {.may_wait = true};
    uint64_t used = pool->used_bytes, taken = kit.core->room.taken;
    assert_int_equal(kvq__pages_reserve(s, 2 * PAGE, &grant), 0);
    assert_true(pool->used_bytes > used && kit.core->room.taken > taken);
    struct kvq__freed after = kvq__freed_of(team, pool);
    assert_int_equal(after.in_pool, before.in_pool);
    assert_int_equal(after.below_limit, before.below_limit);
    core_check(kit.core);
}

// What gives way for a session that is refused nevertheless is free for others, who are told.
TEST(freed_in_vain)
{
    struct kvq__namespace *team = namespace_of("team");
    struct kvq__pool *pool = &kit.core->pools[0];
    uint64_t handle = feed_own("team", 0, 1);
    end(feed_own("team", 1, 2));
    pool->budget = pool->extents_taken;
    struct kvq__freed before = kvq__freed_of(team, pool);
    struct kvq__grant grant = {.may_wait = true};
    struct kvq__session *s = kit_of(&one, handle);
    assert_int_equal(kvq__pages_reserve(s, s->tokens + 4000 * PAGE, &grant), KVQ_E_NO_MEMORY);
    assert_int_equal(idle_of("team"), 0);
    struct kvq__freed after = kvq__freed_of(team, pool);
    assert_true(after.in_pool > before.in_pool && after.below_limit > before.below_limit);
    core_check(kit.core);
}

// So are pages whose blocks all have sessions, where what may go are blocks of pages that stay.
TEST(held_pages_cost_nothing)
{
    static const struct kvq__layer_row sliding[] = {
        {4, HEADS, DIM, DIM, .kv_from = -1},
        {4, HEADS, DIM, DIM, .window = 200, .kv_from = -1},
    };
    struct kvq__namespace *team = namespace_of("team");
    struct kvq__pool *pool = &kit.core->pools[0];
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    for (uint32_t i = 0; i < SESSIONS; i++)
        feed_own("team", i, 1);
    spec.ns = "team";
    spec.salt = "sliding";
    spec.layers = sliding;
    spec.n_layers = 2;
    feed(&one, &spec, 8 * PAGE);
    while (kvq__core_poll(kit.core))
        ;
    uint64_t idle = idle_of("team"), before = looks(), n = 0;
    assert_true(idle > 0);
    for (; kvq__prefix_reclaim(kit.core, team, pool, KVQ_E_NO_MEMORY, NULL); n++)
        core_check(kit.core);
    assert_true(n >= 3 && idle_of("team") == 0);
    assert_in_range(looks() - before, n, 2 * n);
}

// At a namespace's limit the blocks of others do not help, and nobody looks for them.
TEST(of_others)
{
    struct kvq__pool *pool = &kit.core->pools[0];
    for (uint32_t i = 0; i < SESSIONS / 4; i++)
        end(feed_own("open", i, 2));
    feed_own("team", 0, 2);
    uint64_t before = looks();
    assert_false(kvq__prefix_reclaim(kit.core, namespace_of("team"), pool, KVQ_E_QUOTA, NULL));
    assert_int_equal(looks(), before);
    assert_true(kvq__prefix_reclaim(kit.core, namespace_of("team"), pool, KVQ_E_NO_MEMORY, NULL));
    assert_true(kvq__prefix_reclaim(kit.core, namespace_of("open"), pool, KVQ_E_QUOTA, NULL));
}

// The page before an evicted one is as old, and is put beside it at once.
TEST(old_pages_go_first)
{
    enum { PAGES = 5 };
    struct kvq__namespace *team = namespace_of("team");
    end(feed_own("team", 0, PAGES));
    for (uint32_t i = 1; i < SESSIONS; i++)
        end(feed_own("team", i, 1));
    uint64_t before = looks();
    for (uint32_t i = 0; i < PAGES; i++) {
        struct kvq__node *first = TAILQ_FIRST(&team->prefixes.leaves);
        assert_int_equal(first->page, PAGES - 1 - i);
        assert_true(
            kvq__prefix_reclaim(kit.core, team, &kit.core->pools[0], KVQ_E_NO_MEMORY, NULL));
        core_check(kit.core);
    }
    assert_in_range(looks() - before, PAGES, 3 * PAGES);
    assert_int_equal(team->prefixes.n_nodes, SESSIONS - 1);
}

// But not if it was used since: then it goes after others.
TEST(used_pages_go_last)
{
    struct kvq__session_spec spec = spec_of(&one, PAGE);
    struct kvq__session_info info;
    end(feed_own("team", 0, 3));
    end(feed_own("team", 1, 1));
    spec.ns = "team";
    spec.salt = "0";
    uint64_t handle = open_as(&one, &spec, &info);
    assert_int_equal(info.tokens, PAGE);
    kvq__core_clock(kit.core, ++kit.now);
    end(handle);
    for (uint32_t i = 0; i < 3; i++)
        assert_true(
            kvq__prefix_reclaim(kit.core, NULL, &kit.core->pools[0], KVQ_E_NO_MEMORY, NULL));
    core_check(kit.core);
    assert_int_equal(lookup(&one, &spec), PAGE);
    spec.salt = "1";
    assert_int_equal(lookup(&one, &spec), 0);
}

// A block that two indexes have is idle in neither, until one of them gives it up.
TEST(in_two_indexes)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS), other = spec_of(&two, TOKENS);
    struct kvq__namespace *open = namespace_of("open");
    struct kvq__session_info info;
    spec.ns = "open";
    uint64_t a = feed(&one, &spec, 600), b = open_as(&two, &other, &info); // "team" may
    assert_int_equal(info.tokens, 4 * PAGE);
    assert_int_equal(kit_step(&two, b, 200, HEADS, DIM), 0);
    kit_pack(&kit);
    kvq__prefix_seal_all(kit.core);
    drop(&one, a);
    drop(&two, b);
    core_check(kit.core);
    uint64_t own = idle_of("team"); // of the fifth page
    assert_int_equal(idle_of("open"), 0);
    while (kvq__prefix_reclaim_node(open))
        core_check(kit.core);
    assert_int_equal(idle_of("open"), 0);
    assert_in_range(idle_of("team"), own + 1, kit.core->pools[0].used_bytes);
    assert_int_equal(idle_of("team"), kit.core->pools[0].used_bytes);
    assert_true(kvq__prefix_reclaim(kit.core, NULL, &kit.core->pools[0], KVQ_E_NO_MEMORY, NULL));
}

// ---- Some at a time ----

// Sessions whose pages were evicted add them again, some in each tick, in turn; and with the last
// of them what is new, all at once.
TEST(pages_come_by_turns)
{
    enum { AT_ONCE = 2, PAGES = 6, NEW = 3 };
    struct kvq__namespace *team = namespace_of("team");
    uint64_t handles[2];
    for (uint32_t i = 0; i < 2; i++)
        handles[i] = feed_own("team", i, PAGES);
    assert_int_equal(team->prefixes.n_nodes, 2 * PAGES);
    while (kvq__prefix_reclaim_node(team))
        core_check(kit.core);
    kit.core->config.seal_pages = AT_ONCE;
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kit_step(&one, handles[i], NEW * PAGE, HEADS, DIM), 0);
    assert_int_equal(team->prefixes.n_nodes, 0);
    kit_pack(&kit);
    assert_int_equal(team->prefixes.n_nodes, 2 * AT_ONCE); // each when it is packed
    for (uint32_t n = 3; n <= 6; n++) {
        kvq__prefix_seal_all(kit.core);
        core_check(kit.core);
        assert_int_equal(team->prefixes.n_nodes, n * AT_ONCE + (n > 4 ? (n - 4) * NEW : 0));
        if (n == 4) // in turn
            assert_int_equal(kit_of(&one, handles[0])->ids.sealed, 2 * AT_ONCE);
    }
    assert_int_equal(team->prefixes.n_nodes, 2 * (PAGES + NEW));
}

// So do pages with which a session begins, where its index has none of them; then its own.
TEST(foreign_pages_come_by_turns)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS), other = spec_of(&two, TOKENS);
    const struct kvq__prefixes *index = &namespace_of("team")->prefixes;
    struct kvq__session_info info;
    spec.ns = "open";
    feed(&one, &spec, 600);
    uint64_t b = open_as(&two, &other, &info); // "team" may
    assert_int_equal(info.tokens, 4 * PAGE);
    kit.core->config.seal_pages = 1;
    assert_int_equal(kit_step(&two, b, 200, HEADS, DIM), 0);
    for (uint32_t n = 1; n <= 4; n++) {
        assert_int_equal(index->n_nodes, n);
        kvq__prefix_seal_all(kit.core);
    }
    kit_pack(&kit);
    assert_int_equal(index->n_nodes, 5);
}

// What nobody has used for long goes, and what is left of a limit that was lowered, but not all of
// it in one tick.
TEST(pages_go_by_turns)
{
    enum { AT_ONCE = 64, PAGES = AT_ONCE + 20 };
    struct kvq__namespace *team = namespace_of("team");
    uint64_t *limit = &team->quota.limit[KVQ__HOST_BYTES];
    for (int lowered = 0; lowered < 2; lowered++) {
        for (uint32_t i = 0; i < PAGES / 4; i++)
            end(feed_own("team", i, 4));
        assert_int_equal(team->prefixes.n_nodes, PAGES);
        if (lowered)
            *limit = 64;
        else
            kit_pass(&kit, kit.core->config.prefix_keep_ns);
        kvq__core_tick(kit.core);
        assert_int_equal(team->prefixes.n_nodes, PAGES - AT_ONCE);
        kvq__core_tick(kit.core);
        assert_int_equal(team->prefixes.n_nodes, 0);
        *limit = 0;
    }
}

// Leaves that sessions have are looked at by turns as well, and hold nobody else's up.
TEST(leaves_in_use_hold_nothing_up)
{
    struct kvq__namespace *team = namespace_of("team");
    for (uint32_t i = 0; i < 100; i++)
        feed_own("team", i, 1);
    end(feed_own("team", 100, 1));
    kit_tick(&kit, kit.core->config.prefix_keep_ns);
    assert_int_equal(team->prefixes.n_nodes, 101);
    kvq__core_tick(kit.core);
    assert_int_equal(team->prefixes.n_nodes, 100);
}

static int setup_large(void **state)
{
    open_kit(512 * MIB, 0);
    return 0;
}

// Empty extents go back to the system after some seconds, a few in each tick.
TEST_BETWEEN(extents_go_by_turns, setup_large, teardown)
{
    enum { EXTENT = 2 * MIB, AT_ONCE = 64, ALL = 2 * AT_ONCE + 5 };
    struct kvq__pool *pool = &kit.core->pools[0];
    struct kvq__namespace *team = namespace_of("team");
    struct kvq__ref refs[ALL] = {0};
    for (uint32_t i = 0; i < ALL; i++)
        assert_int_equal(kvq__block_new(kit.core, team, pool, EXTENT, NULL, &refs[i]), 0);
    for (uint32_t i = 0; i < ALL; i++)
        kvq__block_drop(kit.core, &refs[i], NULL);
    kit_tick(&kit, 9999999999u);
    assert_int_equal(pool->extents_taken, (uint64_t)ALL * EXTENT);
    kit_pass(&kit, 1);
    for (uint32_t left = ALL; left > 0;) {
        kvq__core_tick(kit.core);
        left -= left < AT_ONCE ? left : AT_ONCE;
        assert_int_equal(pool->extents_taken, (uint64_t)left * EXTENT);
    }
}

// Nothing fails for room as long as the index has some that nobody uses.
TEST_BETWEEN(gives_way, setup_small, teardown)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    struct kvq__session_info info;
    char salt[16];
    spec.ns = NULL; // whose limit is small
    spec.salt = salt;
    for (uint32_t i = 0; i < 17; i++) {
        snprintf(salt, sizeof salt, "%u", i);
        drop(&one, feed(&one, &spec, 600));
        core_check(kit.core);
    }
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
    snprintf(salt, sizeof salt, "0"); // used longest ago
    assert_int_equal(lookup(&one, &spec), 0);
    // What a session has stays, and so it can be had again.
    snprintf(salt, sizeof salt, "16");
    uint64_t held = open_as(&one, &spec, &info);
    assert_int_equal(info.tokens, 4 * PAGE);
    for (uint32_t i = 20; i < 32; i++) {
        snprintf(salt, sizeof salt, "%u", i);
        drop(&one, feed(&one, &spec, 400));
    }
    snprintf(salt, sizeof salt, "16");
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
    assert_int_equal(kit.events[KVQ__EVENT_MEMORY_FULL], 0);
    drop(&one, held);
}

int main(void)
{
    return run_all(NULL, NULL);
}
