// SPDX-License-Identifier: Apache-2.0
//
// Many requests that wait for room at once, and large ones: how often they look for it, what that
// takes, counted and not timed, and who gets it.
#include "tests/core/evict_kit.h"

enum { MANY = 150 };

static struct member many[MANY];
static uint64_t held[4];

// Sessions that are in use take all of the memory, and so many clients wait for a page of it.
static void all_wait(void)
{
    hold_all(held);
    for (uint32_t i = 0; i < MANY; i++) {
        assert_int_equal(member_open(&kit, &many[i], 1000, 4096), 0);
        assert_int_equal(begin(&many[i], opened(&many[i], ""), 9, 1, 3600 * SECOND), 1);
    }
    assert_int_equal(counts().waiting_for_room_now, MANY);
}

static void all_leave(void)
{
    for (uint32_t i = 0; i < MANY; i++) {
        kvq__queue_ending(many[i].queue);
        if (many[i].queue->busy)
            assert_int_equal(kit_again(&many[i]), KVQ_E_CANCELLED);
        member_close(&many[i]);
    }
    assert_true(TAILQ_EMPTY(&kit.core->room.waiters));
    assert_int_equal(kit.core->room.n_waiting, 0);
}

// A look takes the longer the more wait. All together have one in a millisecond, and each has one.
SAVING_TEST(test_looks_of_many)
{
    uint64_t looked[MANY];
    all_wait();
    for (uint32_t i = 0; i < MANY; i++)
        looked[i] = many[i].queue->turn.looked;
    uint64_t before = kit.core->evict.looks;
    for (uint32_t ms = 0; ms < 3 * MANY; ms++) {
        pass(MS);
        for (uint32_t i = 0; i < MANY; i++)
            assert_int_equal(kit_again(&many[i]), 1);
    }
    assert_in_range(kit.core->evict.looks - before, 2 * MANY, 3 * MANY);
    for (uint32_t i = 0; i < MANY; i++)
        assert_true(many[i].queue->turn.looked > looked[i]);
    all_leave();
    let_go(held);
}

// Room for some of them is for those that came first, though the last ones ask first.
SAVING_TEST(test_room_for_the_first_of_many)
{
    uint32_t served = 0;
    all_wait();
    kvq__session_unref(kit_of(&m, held[0]));
    kit_drop(&m, held[0]);
    for (uint32_t round = 0; round < 10; round++)
        for (uint32_t i = MANY; i-- > 0;) {
            if (!many[i].queue->busy)
                continue;
            int rc = kit_again(&many[i]);
            assert_true(rc == 1 || (rc == 0 && i == served));
            served += rc == 0;
        }
    assert_true(served >= 4);
    assert_int_equal(counts().waiting_for_room_now, MANY - served);
    // The one whose turn it is gives up.
    kvq__queue_ending(many[served].queue);
    assert_int_equal(kit_again(&many[served]), KVQ_E_CANCELLED);
    assert_int_equal(kit_again(&many[MANY - 1]), 1);
    core_check(kit.core);
    all_leave();
    for (uint32_t i = 1; i < 4; i++)
        kvq__session_unref(kit_of(&m, held[i]));
}

// Sessions have all of the memory; the first one is not whole, so that a fork of it needs a block.
static void fill_all(uint64_t h[4])
{
    h[0] = opened(&m, "a");
    assert_int_equal(step(&m, h[0], SESSION - 5), 0);
    for (uint32_t i = 1; i < 4; i++)
        h[i] = fed(&m, "");
}

// A request that was refused for one of its entries, and asks for another one once a newer request
// waits, stands before that one.
SAVING_TEST(test_that_was_refused_before)
{
    uint64_t h[4];
    fill_all(h);
    for (uint32_t i = 0; i < 4; i++)
        kit_of(&m, h[i])->pinned = true;
    pass(2 * SECOND);
    kit.core->config.fork_work = 1;
    struct kvq_entry_wire e[2] = {entry(&m, h[0], 0), entry(&m, h[0], 0)};
    struct kvq_request r = kit_header(KVQ_OP_FORK, 2);
    kit_load(&m, &r, e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__AGAIN);
    assert_true(m.queue->turn.ticket > 0 && !m.queue->turn.in_line);
    assert_int_equal(begin(&other, opened(&other, ""), 9, 1, 3600 * SECOND), 1);
    for (uint32_t i = 0; i < 4; i++)
        kit_of(&m, h[i])->pinned = false;
    assert_int_equal(kvq__request_continue(m.queue), KVQ__WAIT);
    assert_ptr_equal(TAILQ_FIRST(&other.queue->turn.line->waiters), m.queue);
    assert_ptr_equal(TAILQ_NEXT(m.queue, line_link), other.queue);
    core_check(kit.core);
    struct member *both[] = {&m, &other};
    for (uint32_t i = 0; i < 2; i++) {
        kvq__queue_ending(both[i]->queue);
        assert_int_equal(kit_again(both[i]), KVQ_E_CANCELLED);
    }
}

// One that has waited, and uses sessions now, makes nobody be refused who would wait else.
SAVING_TEST(test_beside_one_that_waited)
{
    uint64_t h[4];
    fill_all(h);
    for (uint32_t i = 0; i < 4; i++)
        kvq__session_ref(kit_of(&m, h[i]));
    rest();
    struct kvq_entry_wire e = entry(&m, h[0], 0);
    struct kvq_request r = kit_header(KVQ_OP_FORK, 1);
    kit_load(&m, &r, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__WAIT);
    kvq__session_unref(kit_of(&m, h[3]));
    kit_drop(&m, h[3]);
    rest();
    pass(MS);
    enum kvq__progress p = kvq__request_continue(m.queue);
    assert_true(p != KVQ__WAIT && m.queue->busy && m.queue->turn.in_line);
    kvq__session_unref(kit_of(&m, h[0])); // the fork alone reads it
    for (uint32_t i = 1; i < 3; i++)
        kit_of(&m, h[i])->pinned = true;
    pass(2 * SECOND);
    assert_int_equal(begin(&other, opened(&other, "c"), 9, SESSION + 2 * PAGE, 0), 1);
    struct member *both[] = {&m, &other};
    for (uint32_t i = 0; i < 2; i++) {
        kvq__queue_ending(both[i]->queue);
        while (both[i]->queue->busy)
            kit_again(both[i]);
    }
    for (uint32_t i = 1; i < 3; i++)
        kvq__session_unref(kit_of(&m, h[i]));
}

// ---- One namespace beside others ----

// So many of one namespace's wait at its own limit, and one of another namespace for the pool.
static void many_and_one(struct member *one)
{
    kit_limit(&kit, "uid-1000", KVQ__HOST_BYTES, 4 * SESSION_BYTES);
    all_wait();
    for (uint32_t i = 0; i < MANY; i++)
        assert_true(many[i].queue->turn.quota);
    attach(one, 1001);
    assert_int_equal(begin(one, opened(one, "y"), 9, 1, 3600 * SECOND), 1);
    core_check(kit.core);
}

static void one_leaves(struct member *one)
{
    kvq__queue_ending(one->queue);
    if (one->queue->busy)
        assert_int_equal(kit_again(one), KVQ_E_CANCELLED);
    member_close(one);
    all_leave();
}

// However many of one namespace wait, another one's request looks every five milliseconds: theirs
// have half of the time together.
SAVING_TEST(test_looks_beside_many)
{
    struct member one;
    uint32_t looks = 0;
    many_and_one(&one);
    uint64_t before = kit.core->evict.looks;
    for (uint32_t ms = 0; ms < 4 * MANY; ms++) {
        uint64_t looked = one.queue->turn.looked;
        pass(MS);
        assert_int_equal(kit_again(&one), 1);
        looks += one.queue->turn.looked != looked;
        for (uint32_t i = 0; i < MANY; i++)
            assert_int_equal(kit_again(&many[i]), 1);
    }
    assert_in_range(looks, 4 * MANY / 5 - 1, 4 * MANY / 5 + 1);
    uint64_t theirs = kit.core->evict.looks - before - looks;
    assert_in_range(theirs, MANY, 2 * MANY); // one in two milliseconds: half of the time
    one_leaves(&one);
    let_go(held);
}

// What one namespace gives back is shown at once to those who wait for the pool, and to nobody who
// waits at another namespace's limit.
SAVING_TEST(test_freed_beside_many)
{
    struct member one, feeder;
    many_and_one(&one);
    attach(&feeder, 1001);
    assert_false(one.queue->turn.quota);
    kit.core->pools[0].budget += GPU; // of which nobody knows
    uint64_t h = fed(&feeder, "z"), freed = many[0].queue->turn.line->freed;
    kit_drop(&feeder, h);
    rest();
    assert_int_equal(many[0].queue->turn.line->freed, freed);
    assert_int_equal(kit_again(&one), 0);
    assert_int_equal(status_of(&one), 0);
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(kit_again(&many[i]), 1);
    core_check(kit.core);
    member_close(&feeder);
    one_leaves(&one);
    let_go(held);
}

// An eviction that has ended lets one request of many look at once, and not each of them.
SAVING_TEST(test_one_looks_after_an_eviction)
{
    all_wait();
    uint64_t before = kit.core->evict.looks;
    kit.core->evict.ended++;
    something_is_freed();
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(kit_again(&many[i]), 1);
    assert_in_range(kit.core->evict.looks - before, 1, 2);
    all_leave();
    let_go(held);
}

// ---- What a request costs the poller ----

enum { BATCH = 60 }; // that need a page each would fit, if nobody else were there

static struct kvq_entry_wire batch[BATCH];

// A step of so many new sessions, of n tokens each.
static struct kvq_request step_of_many(struct member *member, uint32_t count, uint32_t n)
{
    for (uint32_t i = 0; i < count; i++)
        batch[i] = entry(member, opened(member, ""), n);
    return kit_of_step(KVQ_OP_STEP_BEGIN, (uint16_t)count, 9);
}

// Sessions that stay have all of the memory.
static void pin_all(uint64_t h[4])
{
    fill_all(h);
    for (uint32_t i = 0; i < 4; i++)
        kit_of(&m, h[i])->pinned = true;
    rest();
    pass(2 * SECOND);
}

static uint32_t count_status(const struct member *member, uint32_t n, int status)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        count += kvq__queue_results(member->queue)[i].status == status;
    return count;
}

// What the entries of a request need is counted once, and room for them is asked for once, however
// many of them are refused.
SAVING_TEST(test_refused_in_one_go)
{
    uint64_t h[4];
    pin_all(h);
    struct kvq_request r = step_of_many(&other, BATCH, 1);
    uint64_t layers = kit.core->room.counted_layers, looks = kit.core->evict.looks;
    uint32_t before = refused();
    assert_int_equal(kit_request(&other, &r, batch), 0);
    assert_int_equal(count_status(&other, BATCH, KVQ_E_NO_MEMORY), BATCH);
    assert_int_equal(refused() - before, BATCH);
    assert_in_range(kit.core->room.counted_layers - layers, BATCH * LAYERS, (BATCH + 1) * LAYERS);
    assert_in_range(kit.core->evict.looks - looks, 1, 2);
    core_check(kit.core);
}

// The same of forks, each of which needs a block.
SAVING_TEST(test_forks_refused_in_one_go)
{
    uint64_t h[4];
    pin_all(h);
    for (uint32_t i = 0; i < BATCH; i++)
        batch[i] = entry(&m, h[0], 0);
    struct kvq_request r = kit_header(KVQ_OP_FORK, BATCH);
    uint64_t looks = kit.core->evict.looks;
    assert_int_equal(kit_request(&m, &r, batch), 0);
    assert_int_equal(count_status(&m, BATCH, KVQ_E_NO_MEMORY), BATCH);
    assert_in_range(kit.core->evict.looks - looks, 1, 2);
    core_check(kit.core);
}

// Where nothing can go, the first entries have what is free, and later ones are refused.
SAVING_TEST(test_room_for_the_first_entries)
{
    enum { SOME = 6, ROOM = 2 };
    uint64_t h[4];
    pin_all(h);
    for (uint32_t i = 0; i < ROOM; i++)
        kit_drop(&m, h[i]);
    rest();
    struct kvq_request r = step_of_many(&other, SOME, SESSION);
    assert_int_equal(kit_request(&other, &r, batch), 0);
    for (uint32_t i = 0; i < SOME; i++)
        assert_int_equal(kvq__queue_results(other.queue)[i].status, i < ROOM ? 0 : KVQ_E_NO_MEMORY);
    core_check(kit.core);
}

// An entry that finds no room is refused, unless there can be room for it and all behind it; for
// that the request waits. Then those that came first have it.
SAVING_TEST(test_room_for_some_entries)
{
    enum { SOME = 6 };
    uint64_t h[4];
    pin_all(h);
    kit_drop(&m, h[3]);               // there is room for one of them,
    kit_of(&m, h[2])->pinned = false; // and for another one if this session goes
    rest();
    struct kvq_request r = step_of_many(&other, SOME, SESSION);
    uint64_t looks = kit.core->evict.looks;
    assert_int_equal(kit_request(&other, &r, batch), 1);
    assert_true(other.queue->turn.listed && other.queue->turn.entry == SOME - 1);
    assert_int_equal(other.queue->turn.need.missing, 2 * SESSION_BYTES);
    assert_in_range(kit.core->evict.looks - looks, 2, 6); // for all, for the rest
    assert_int_equal(count_status(&other, SOME, KVQ_E_NO_MEMORY), SOME - 2);
    core_check(kit.core);
    assert_int_equal(finish(&other, 1), 0);
    for (uint32_t i = 0; i < SOME; i++)
        assert_int_equal(kvq__queue_results(other.queue)[i].status, i < 2 ? 0 : KVQ_E_NO_MEMORY);
    assert_int_equal(evicted(), 1);
    core_check(kit.core);
}

// Begins to wait for a page for each of many sessions.
static void wait_for_many(struct member *member)
{
    struct kvq_request r = step_of_many(member, BATCH, 1);
    r.flags = KVQ_REQ_WAIT_ROOM;
    r.deadline_ns = UINT64_MAX;
    assert_int_equal(kit_request(member, &r, batch), 1);
    const struct kvq__session *s = kit_of(member, batch[0].handle);
    assert_int_equal(member->queue->turn.need.missing,
                     BATCH * kvq__session_bytes_at(s, s->pool, 1));
}

static void wait_no_more(struct member *member)
{
    kvq__queue_ending(member->queue);
    assert_int_equal(kit_again(member), KVQ_E_CANCELLED);
}

// Both are asked again, somewhat later and after something was freed. How many of them are tried
// from the start.
static uint64_t tries_of_both(void)
{
    uint64_t before = kit.core->room.counted_layers;
    pass(MS);
    something_is_freed();
    assert_int_equal(kit_again(&other), 1);
    assert_int_equal(kit_again(&m), 1);
    return (kit.core->room.counted_layers - before) / (BATCH * LAYERS);
}

// A request that waits, and knows what it needs, visits its entries no more when it looks, whatever
// is freed meanwhile, but once in a while; and then another one does so later.
SAVING_TEST(test_looks_of_large_ones)
{
    uint64_t h[4];
    pin_all(h);
    wait_for_many(&other);
    wait_for_many(&m);
    uint64_t looks = kit.core->evict.looks;
    for (uint32_t ms = 0; ms < 49; ms++)
        assert_int_equal(tries_of_both(), 0);
    assert_in_range(kit.core->evict.looks - looks, 32, 40); // each visits the sessions twice
    assert_int_equal(tries_of_both(), 1);
    assert_int_equal(tries_of_both(), 1);
    assert_int_equal(tries_of_both(), 0);
    core_check(kit.core);
    wait_no_more(&other);
    wait_no_more(&m);
}

// Where there seems to be room and is none, say since it lies in extents of others, it tries anew
// only as often as its work allows.
SAVING_TEST(test_tries_in_vain)
{
    uint64_t h[4];
    pin_all(h);
    wait_for_many(&other);
    uint32_t tries = 0;
    for (uint32_t i = 0; i < 100; i++) {
        uint64_t layers = kit.core->room.counted_layers;
        pass(MS / 10);
        something_is_freed();
        other.queue->turn.need.missing = 0;
        assert_int_equal(kit_again(&other), 1);
        tries += kit.core->room.counted_layers > layers;
    }
    assert_in_range(tries, 10, 20); // each visits 1,080 layers, as it were, and so has 0.5 ms
    wait_no_more(&other);
}

// Where another namespace has an extent, there is room by count and none for a block. A try counts
// the blocks that it takes and gives back.
SAVING_TEST(test_tries_of_blocks_in_vain)
{
    struct member third;
    attach(&third, 1001);
    uint64_t h = fed(&third, "z");
    kvq__session_ref(kit_of(&third, h));
    kit.core->pools[0].budget = 2 * GPU;
    pass(2 * SECOND);
    assert_int_equal(begin(&other, opened(&other, "x"), 9, 5 * SESSION, 3600 * SECOND), 1);
    uint64_t before = kit.core->room.taken, tries = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        uint64_t taken = kit.core->room.taken;
        pass(MS / 10);
        something_is_freed();
        assert_int_equal(kit_again(&other), 1);
        tries += kit.core->room.taken > taken;
    }
    uint64_t blocks = (kit.core->room.taken - before) / kvq__max(tries, 1);
    assert_in_range(blocks, 32, 80);
    assert_in_range(tries, 100, 100 * MS / (blocks * 16 * 500) + 1);
    core_check(kit.core);
    kvq__session_unref(kit_of(&third, h));
    wait_no_more(&other);
    member_close(&third);
}

// A large request whose tries are in vain where it waits holds back nobody of its namespace who
// waits elsewhere.
TEST_BETWEEN(test_in_vain_elsewhere, setup, teardown)
{
    struct member big, third;
    hold_all(held);
    home = 0;
    attach(&big, 1000);
    attach(&third, 1001);
    uint64_t h = fed(&third, "z");
    kvq__session_ref(kit_of(&third, h));
    pass(2 * SECOND);
    assert_int_equal(begin(&big, opened(&big, "x"), 9, 244 * PAGE, 3600 * SECOND), 1);
    home = 1;
    assert_int_equal(begin(&other, opened(&other, "s"), 9, 1, 3600 * SECOND), 1);
    assert_ptr_not_equal(big.queue->turn.waits, other.queue->turn.waits);
    uint64_t taken = kit.core->room.taken;
    for (uint32_t i = 0, tries = 0; tries < 3; i++) {
        assert_true(i < 10000);
        pass(MS / 10);
        kvq__freed_note(kit_namespace(&kit, 1000), &kit.core->pools[0]);
        assert_int_equal(kit_again(&big), 1);
        tries += kit.core->room.taken != taken;
        taken = kit.core->room.taken;
    }
    kvq__session_unref(kit_of(&m, held[0]));
    kit_drop(&m, held[0]);
    rest();
    assert_int_equal(kit_again(&other), 0);
    assert_int_equal(status_of(&other), 0);
    for (uint32_t i = 1; i < 4; i++)
        kvq__session_unref(kit_of(&m, held[i]));
    kvq__session_unref(kit_of(&third, h));
    wait_no_more(&big);
    member_close(&big);
    member_close(&third);
}

// One that is to be refused after its two seconds is refused then, whenever the next try of those
// who wait there may be.
SAVING_TEST(test_refused_in_time)
{
    hold_all(held);
    for (uint32_t i = 0; i < 4; i++)
        kvq__session_used(kit_of(&m, held[i]));
    assert_int_equal(begin(&other, opened(&other, "x"), 9, 1, 0), 1);
    let_go(held);
    for (uint32_t i = 0; i < 4; i++)
        kit_of(&m, held[i])->pinned = true;
    struct kvq__waits *w = other.queue->turn.waits;
    w->next_try = w->next_hope = kit.now + 3600 * SECOND;
    for (uint32_t i = 0; i < 21 && other.queue->busy; i++) {
        pass(SECOND / 10);
        something_is_freed();
        kit_again(&other);
    }
    assert_false(other.queue->busy);
    assert_int_equal(status_of(&other), KVQ_E_NO_MEMORY);
}

// A demoted session's request does not know what it needs, and so what its tries in vain say of the
// room for others.
TEST_BETWEEN(test_demoted_in_vain, setup, teardown)
{
    uint64_t h[5];
    uint32_t tries = 0;
    for (uint32_t i = 0; i < 5; i++) {
        h[i] = fed(&m, "");
        pass(2 * SECOND);
    }
    assert_false(is_home(&m, h[0]));
    for (uint32_t i = 1; i < 5; i++)
        kvq__session_ref(kit_of(&m, h[i]));
    assert_int_equal(begin(&m, h[0], 9, 1, 3600 * SECOND), 1);
    const struct kvq__waits *w = m.queue->turn.waits;
    for (uint32_t i = 0; i < 20; i++) {
        uint64_t tried = m.queue->turn.tried;
        pass(MS);
        something_is_freed();
        assert_int_equal(kit_again(&m), 1);
        assert_int_equal(w->next_hope, 0);
        tries += m.queue->turn.tried != tried;
    }
    assert_true(tries > 2);
    for (uint32_t i = 1; i < 5; i++)
        kvq__session_unref(kit_of(&m, h[i]));
    wait_no_more(&m);
}

// A FORK that is made in several turns counts the blocks of all of them, when it has to wait.
SAVING_TEST(test_work_of_a_fork)
{
    uint64_t h[5];
    fill_all(h);
    kit_drop(&m, h[3]);
    rest();
    h[4] = opened(&m, "");
    assert_int_equal(step(&m, h[4], 3 * PAGE), 0); // there is room for one page
    for (uint32_t i = 0; i < 5; i++)
        if (i != 3)
            kit_of(&m, h[i])->pinned = true;
    pass(2 * SECOND);
    kit.core->config.fork_work = 1;
    struct kvq_entry_wire e[2] = {entry(&m, h[0], 0), entry(&m, h[0], 0)};
    struct kvq_request r = kit_header(KVQ_OP_FORK, 2);
    r.flags = KVQ_REQ_WAIT_ROOM;
    r.deadline_ns = UINT64_MAX;
    uint64_t before = kit.core->room.taken;
    kit_load(&m, &r, e);
    enum kvq__progress p = kvq__request_start(m.queue);
    assert_int_equal(p, KVQ__AGAIN);
    assert_int_equal(kit.core->room.taken - before, LAYERS);
    while (p == KVQ__AGAIN)
        p = kvq__request_continue(m.queue);
    assert_int_equal(p, KVQ__WAIT);
    uint64_t layers = 2 * (16 + LAYERS), blocks = kit.core->room.taken - before;
    assert_int_equal(m.queue->turn.work, layers + blocks * 16);
    wait_no_more(&m);
}

// ---- Claims ----

// A request for a page for a new session, and with it another one.
static void wait_beside(struct member *member, uint64_t handle)
{
    struct kvq_entry_wire e[3] = {
        entry(member, opened(member, ""), 1), {.handle = handle}, {.handle = handle}};
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 3, 9);
    r.flags = KVQ_REQ_WAIT_ROOM;
    r.deadline_ns = UINT64_MAX;
    assert_int_equal(kit_request(member, &r, e), 1);
    core_check(kit.core);
}

// The oldest of the requests that name a session counts, while it waits and the session is there.
SAVING_TEST(test_claims)
{
    const struct kvq__session_spec spec = {.name = "a", .flags = KVQ__OPEN_READ_ONLY};
    uint64_t h[4];
    pin_all(h);
    const struct kvq__session *s = kit_of(&m, h[0]);
    assert_int_equal(kvq__claims_oldest(s), UINT64_MAX);
    wait_beside(&other, kit_opened(&other, &spec));
    wait_beside(&m, h[0]);
    assert_int_equal(member_open(&kit, &many[0], 1000, 4096), 0);
    wait_beside(&many[0], kit_opened(&many[0], &spec));
    assert_int_equal(kvq__claims_oldest(s), other.queue->turn.ticket);
    assert_int_equal(s->evict.n_claims, 3);
    kvq__queue_ending(many[0].queue);
    assert_int_equal(kit_again(&many[0]), KVQ_E_CANCELLED);
    member_close(&many[0]);
    for (uint32_t i = 0; i < 60; i++) { // however often they look
        pass(MS);
        assert_int_equal(kit_again(&m), 1);
        assert_int_equal(kit_again(&other), 1);
    }
    assert_int_equal(s->evict.n_claims, 2);
    kvq__queue_ending(other.queue);
    assert_int_equal(kit_again(&other), KVQ_E_CANCELLED);
    assert_int_equal(kvq__claims_oldest(s), m.queue->turn.ticket);
    kit_of(&m, h[0])->pinned = false;
    kit_drop(&m, h[0]);
    core_check(kit.core);
    rest();
    assert_int_equal(kit_again(&m), 0); // there is room now
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
