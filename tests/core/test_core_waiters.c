// SPDX-License-Identifier: Apache-2.0
//
// Many requests that wait for room at once: how often they look for it, and who gets it.
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
    assert_true(TAILQ_EMPTY(&kit.core->waiters));
    assert_int_equal(kit.core->n_waiters, 0);
}

// A look takes the longer the more wait. All together have one in a millisecond, and each has one.
SAVING_TEST(test_looks_of_many)
{
    uint64_t looked[MANY];
    all_wait();
    for (uint32_t i = 0; i < MANY; i++)
        looked[i] = many[i].queue->turn.looked;
    uint64_t before = kit.core->evict_looks;
    for (uint32_t ms = 0; ms < 3 * MANY; ms++) {
        pass(MS);
        for (uint32_t i = 0; i < MANY; i++)
            assert_int_equal(kit_again(&many[i]), 1);
    }
    assert_in_range(kit.core->evict_looks - before, 2 * MANY, 3 * MANY);
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
    assert_ptr_equal(TAILQ_FIRST(&kit.core->waiters), m.queue);
    assert_int_equal(kit.core->n_waiters, 2);
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

// Sessions that stay have all of the memory.
static void pin_all(uint64_t h[4])
{
    fill_all(h);
    for (uint32_t i = 0; i < 4; i++)
        kit_of(&m, h[i])->pinned = true;
    rest();
    pass(2 * SECOND);
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
