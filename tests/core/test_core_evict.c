// SPDX-License-Identifier: Apache-2.0
//
// Eviction and waiting for room: who goes and who never does, when a request waits and when it is
// refused, in what order, and that nobody waits for ever.
#include "tests/core/evict_kit.h"

// ---- Who ----

PLAIN_TEST(test_score)
{
    static const struct {
        struct kvq__score better, worse;
    } pairs[] = {
        // Used longer ago.
        {{20 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}, {10 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}},
        // Saved already.
        {{10 * SECOND, 64 * MIB, 0, 64 * MIB}, {10 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}},
        // Its blocks are its own.
        {{10 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}, {10 * SECOND, 8 * MIB, 64 * MIB, 64 * MIB}},
        // Large enough to be worth it.
        {{10 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}, {10 * SECOND, 4096, 4096, 4096}},
        // Twice as long outweighs that another is saved, just about.
        {{21 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}, {10 * SECOND, 64 * MIB, 0, 64 * MIB}},
        // Whatever frees nothing is last.
        {{1, 1, 64 * MIB, 64 * MIB}, {3600 * SECOND, 0, 0, 64 * MIB}},
    };
    for (uint32_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        assert_true(kvq__score(&pairs[i].better) > kvq__score(&pairs[i].worse));
    assert_true(kvq__score(&pairs[5].worse) == 0);
}

// Who maps the GPU's pool is told of extents of that pool, also of a session that has gone from
// there: numbers of the host's would be mapped over them.
TEST(test_extents_of_home)
{
    struct kvq__extent_export told[8];
    const struct kvq__extent *e;
    uint64_t handles[5], known;
    bool more;
    int found = 0;
    for (uint32_t i = 0; i < 5; i++) {
        handles[i] = fed(&m, "");
        pass(2 * SECOND);
    }
    assert_false(is_home(&m, handles[0]));
    const struct kvq__arena *arena = &kit_of(&m, handles[0])->ns->arenas[home];
    int n = kvq__extents_tell(m.client, handles[0], told, 8, &known, &more, text);
    assert_in_range(n, 1, 8);
    assert_int_equal(known, arena->last_serial);
    for (int i = 0; i < n; i++)
        TAILQ_FOREACH (e, &arena->extents, link)
            found += told[i].memory == &e->memory;
    assert_int_equal(found, n);
}

// Six sessions where four fit, used in turns by two engines: all of them work, to the bit.
TEST(test_turns)
{
    static uint8_t bits[6][LAYERS][OUT_BYTES];
    struct member *of[6] = {&m, &other, &m, &other, &m, &other};
    uint64_t handles[6];
    for (uint32_t i = 0; i < 6; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%u", i);
        handles[i] = fed(of[i], name);
        attend(of[i], handles[i], bits[i]);
        pass(2 * SECOND);
    }
    assert_true(kit.core->counts.demoted >= 2);
    for (uint32_t turn = 0; turn < 2; turn++)
        for (uint32_t i = 0; i < 6; i++) {
            same_bits(of[i], handles[i], bits[i]);
            assert_true(is_home(of[i], handles[i]));
            pass(2 * SECOND);
        }
    assert_true(kit.core->counts.promoted >= 8);
    assert_int_equal(kit.core->counts.refused_for_room, 0);
    assert_int_equal(kit.core->counts.demoted_bytes, kit.core->counts.demoted * SESSION_BYTES);
    assert_int_equal(kit.core->moving.n_demoted, 2);
    // They go on where they are wanted, and are dropped wherever they are.
    for (uint32_t i = 0; i < 6; i++)
        kit_drop(of[i], handles[i]);
    rest();
    assert_int_equal(kit.core->moving.n_demoted, 0);
}

// A request that names two sessions which have gone waits for room for both.
TEST(test_two_at_once)
{
    uint64_t handles[6];
    for (uint32_t i = 0; i < 6; i++) {
        handles[i] = fed(&m, "");
        pass(2 * SECOND);
    }
    assert_false(is_home(&m, handles[0]) || is_home(&m, handles[1]));
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 2, 99);
    struct kvq_entry_wire e[2] = {entry(&m, handles[0], 1), entry(&m, handles[1], 1)};
    assert_int_equal(finish(&m, kit_request(&m, &r, e)), 0);
    assert_true(is_home(&m, handles[0]) && is_home(&m, handles[1]));
    r = kit_of_step(KVQ_OP_STEP_ABORT, 2, 99);
    assert_int_equal(finish(&m, kit_request(&m, &r, e)), 0);
}

// What a refused batch was short of is no business of the queue's next request, which has fewer
// entries.
TEST(test_after_a_batch)
{
    uint64_t gone = fed(&m, "gone"), held[4];
    pass(2 * SECOND);
    hold_all(held);
    assert_false(is_home(&m, gone));
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 2, 99);
    struct kvq_entry_wire e[2] = {entry(&m, opened(&m, "x"), SESSION),
                                  entry(&m, opened(&m, "y"), SESSION)};
    assert_int_equal(finish(&m, kit_request(&m, &r, e)), KVQ_E_NO_MEMORY);
    assert_int_equal(kvq__queue_results(m.queue)[1].status, KVQ_E_NO_MEMORY);
    assert_int_equal(step(&m, gone, 1), KVQ_E_NO_MEMORY);
    let_go(held);
    pass(2 * SECOND);
    assert_int_equal(step(&m, gone, 1), 0);
}

// The one that was used longest ago goes, one in a step never does.
SAVING_TEST(test_who)
{
    uint64_t a = fed(&m, "a"), b, c, d;
    b = fed(&m, "b");
    c = fed(&other, "c");
    d = fed(&other, "d");
    pass(2 * SECOND);
    assert_int_equal(finish(&m, begin(&m, a, 99, 1, 0)), 0);
    assert_int_equal(evicted(), 1);
    assert_true(is_home(&m, a));
    rest();
    // b, c, d were idle for as long; one of them is gone, and a is in a step.
    uint32_t home = is_home(&m, b) + is_home(&other, c) + is_home(&other, d);
    assert_int_equal(home, 2);
    pass(20 * SECOND);
    uint64_t e = opened(&other, "e");
    for (uint32_t i = 0; i < 2; i++) { // all but a go for it
        assert_int_equal(step(&other, e, SESSION), 0);
        pass(2 * SECOND);
    }
    assert_true(is_home(&m, a) && is_home(&other, e));
    assert_non_null(kit_of(&m, a)->step);
}

// ---- Refusals ----

// What is in use by work that ends by itself is waited for, but not for ever.
SAVING_TEST(test_in_use)
{
    uint64_t handles[4];
    fill_home(handles);
    for (uint32_t i = 0; i < 3; i++)
        kvq__session_ref(kit_of(&m, handles[i])); // as requests under way do
    pass(2 * SECOND);
    uint64_t moved = kit.core->tickets.last;
    int rc = begin(&m, handles[3], 9, 1, 0); // and its own is not to go
    assert_int_equal(rc, 1);
    assert_int_equal(finish(&m, rc), KVQ_E_NO_MEMORY);
    assert_int_equal(refused(), 1);
    assert_int_equal(kit.core->tickets.last, moved);
    assert_int_equal(kit.events[KVQ__EVENT_MEMORY_FULL], 1);
    rc = begin(&m, handles[3], 99, 1, 0);
    assert_int_equal(rc, 1);
    for (uint32_t i = 0; i < 3; i++)
        kvq__session_unref(kit_of(&m, handles[i]));
    assert_int_equal(finish(&m, rc), 0);
    assert_int_equal(refused(), 1);
    assert_int_equal(go_on(&m, handles[3], 1), 0);
}

// What could never fit is refused at once, and nobody goes for it.
SAVING_TEST(test_too_much)
{
    fed(&m, "a");
    uint64_t b = fed(&m, "b");
    pass(2 * SECOND);
    assert_int_equal(begin(&m, b, 9, 4 * SESSION, 10 * SECOND), 0);
    assert_int_equal(status_of(&m), KVQ_E_NO_MEMORY);
    assert_int_equal(kit.core->tickets.last, 0);
}

// Nobody goes for a request that would not fit even then.
SAVING_TEST(test_in_vain)
{
    uint64_t handles[4];
    fill_home(handles);
    kvq__session_ref(kit_of(&m, handles[0]));
    kvq__session_ref(kit_of(&m, handles[1]));
    pass(2 * SECOND);
    int rc = begin(&other, opened(&other, "x"), 9, 3 * SESSION, 0);
    assert_int_equal(finish(&other, rc), KVQ_E_NO_MEMORY);
    assert_int_equal(kit.core->tickets.last, 0);
    kvq__session_unref(kit_of(&m, handles[0]));
    kvq__session_unref(kit_of(&m, handles[1]));
}

// One that was used a moment ago is waited for, but not for ever.
SAVING_TEST(test_too_young)
{
    uint64_t handles[4];
    fill_home(handles);
    assert_int_equal(begin(&m, handles[0], 9, 1, 0), 1);
    pass(500 * MS);
    assert_int_equal(kit_again(&m), 1);
    assert_int_equal(kit.core->tickets.last, 0);
    pass(501 * MS);
    assert_int_equal(finish(&m, kit_again(&m)), 0);
    assert_int_equal(evicted(), 1);
    assert_int_equal(kit.core->counts.waited_for_room, 1);
    // The others are used all the time.
    rest();
    for (uint32_t i = 0; i < 4; i++)
        kit_of(&m, handles[i])->idle_since = kit.now;
    assert_int_equal(begin(&other, opened(&other, "x"), 9, SESSION, 0), 1);
    int rc = 1;
    for (uint32_t i = 0; i < 40 && rc == 1; i++) {
        for (uint32_t j = 0; j < 4; j++)
            kit_of(&m, handles[j])->idle_since = kit.now;
        pass(100 * MS);
        poll_core();
        rc = kit_again(&other);
    }
    assert_int_equal(rc ? rc : status_of(&other), KVQ_E_NO_MEMORY);
}

// ---- Waiting by request ----

SAVING_TEST(test_flag)
{
    uint64_t handles[4];
    hold_all(handles);
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, 9);
    struct kvq_entry_wire e = entry(&other, opened(&other, "x"), 1);
    r.flags = KVQ_REQ_WAIT_ROOM;
    assert_int_equal(kit_request(&other, &r, &e), KVQ_E_INVALID); // it needs a deadline
    r.deadline_ns = kit.now + SECOND;
    assert_int_equal(kit_request(&other, &r, &e), 1);
    uint64_t free = kit.core->pools[home].used_bytes;
    for (uint32_t i = 0; i < 9; i++) {
        pass(100 * MS);
        assert_int_equal(kit_again(&other), 1);
        core_check(kit.core);
        assert_int_equal(kit.core->pools[home].used_bytes, free); // it holds nothing meanwhile
    }
    pass(101 * MS);
    assert_int_equal(kit_again(&other), KVQ_E_DEADLINE);
    assert_true(TAILQ_EMPTY(&kit.core->room.waiters));
    // Somebody frees some.
    r.deadline_ns = kit.now + SECOND;
    assert_int_equal(kit_request(&other, &r, &e), 1);
    let_go(handles);
    kit_drop(&m, handles[0]);
    assert_int_equal(kit_again(&other), 0);
    assert_int_equal(status_of(&other), 0);
    assert_int_equal(evicted(), 0);
}

// A queue that its client closes, or that goes with its client, does not wait on.
SAVING_TEST(test_ending)
{
    uint64_t handles[4];
    hold_all(handles);
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, 9);
    struct kvq_entry_wire e = entry(&other, opened(&other, "x"), 1);
    r.flags = KVQ_REQ_WAIT_ROOM;
    r.deadline_ns = UINT64_MAX;
    assert_int_equal(kit_request(&other, &r, &e), 1);
    assert_int_equal(kit_again(&other), 1);
    kvq__queue_ending(other.queue);
    assert_int_equal(kit_again(&other), KVQ_E_CANCELLED);
    assert_true(TAILQ_EMPTY(&kit.core->room.waiters));
    let_go(handles);
    core_check(kit.core);
}

// ---- Turns, and what nobody waits for for ever ----

// The one that came first has the first turn, and smaller ones pass it by when it finds no room.
SAVING_TEST(test_order)
{
    struct kvq__session *s[4];
    uint64_t handles[4];
    for (uint32_t i = 0; i < 4; i++) {
        handles[i] = fed(&m, "");
        s[i] = kit_of(&m, handles[i]);
        kvq__session_ref(s[i]);
    }
    assert_int_equal(begin(&m, opened(&m, "x"), 9, SESSION, 10 * SECOND), 1);
    assert_int_equal(begin(&other, opened(&other, "y"), 9, SESSION, 10 * SECOND), 1);
    kvq__session_unref(s[0]);
    kit_drop(&m, handles[0]);
    assert_int_equal(kit_again(&other), 1); // not its turn
    assert_int_equal(kit_again(&m), 0);
    assert_int_equal(status_of(&m), 0);
    assert_int_equal(kit_again(&other), 1); // its turn, and no room
    // The next one asks for more than gets free, and a smaller one behind it does not mind.
    assert_int_equal(begin(&m, handles[1], 10, SESSION, 10 * SECOND), 1);
    kvq__session_unref(s[3]);
    kit_drop(&m, handles[3]);
    assert_int_equal(kit_again(&m), 1);
    assert_int_equal(kit_again(&other), 0);
    assert_int_equal(kit_again(&m), 1);
    kvq__session_unref(s[1]);
    kvq__session_unref(s[2]);
    pass(2 * SECOND);
    assert_int_equal(finish(&m, kit_again(&m)), 0); // handles[2] goes
    assert_int_equal(evicted(), 1);
}

// One whose namespace is at its limit is in nobody's way but its namespace's.
SAVING_TEST(test_order_beside_a_limit)
{
    struct member third; // of another namespace
    struct kvq__session *s[4];
    uint64_t handles[4];
    attach(&third, 1001);
    for (uint32_t i = 0; i < 4; i++) {
        handles[i] = fed(&m, "");
        s[i] = kit_of(&m, handles[i]);
        kvq__session_ref(s[i]);
    }
    kit_limit(&kit, "uid-1000", KVQ__HOST_BYTES, 4 * SESSION_BYTES);
    assert_int_equal(begin(&m, opened(&m, "x"), 9, SESSION, 10 * SECOND), 1);
    assert_int_equal(m.queue->turn.refused.code, KVQ_E_QUOTA);
    assert_int_equal(begin(&third, opened(&third, "y"), 9, SESSION, 10 * SECOND), 1);
    kvq__session_unref(s[0]);
    kit_drop(&m, handles[0]);
    (void)kit_again(&third);
    const bool looked = third.queue->turn.seen == third.queue->turn.line->freed;
    for (uint32_t i = 1; i < 4; i++)
        kvq__session_unref(s[i]);
    kvq__queue_ending(m.queue);
    kvq__queue_ending(third.queue);
    assert_int_equal(kit_again(&m), KVQ_E_CANCELLED);
    assert_int_equal(kit_again(&third), KVQ_E_CANCELLED);
    assert_true(looked); // though the first had not
}

// Two that wait and have what the other one needs: the first gets it, then the second.
SAVING_TEST(test_each_other)
{
    uint64_t a = fed(&m, "a"), b = fed(&other, "b"), c = fed(&m, "c"), d = fed(&m, "d");
    kvq__session_ref(kit_of(&m, c));
    kvq__session_ref(kit_of(&m, d));
    assert_int_equal(begin(&m, a, 99, SESSION, 60 * SECOND), 1);
    assert_int_equal(begin(&other, b, 99, SESSION, 60 * SECOND), 1);
    pass(1100 * MS);
    assert_int_equal(kit_again(&other), 1); // may not have a, which came first
    assert_int_equal(kit.core->tickets.last, 0);
    assert_int_equal(finish(&m, kit_again(&m)), 0); // may have b
    assert_int_equal(kit_again(&other), 1);
    assert_false(is_home(&other, b));
    assert_int_equal(go_on(&m, a, SESSION), 0);
    assert_int_equal(finish(&other, kit_again(&other)), 0); // a has gone for it, and b is back
    assert_int_equal(go_on(&other, b, SESSION), 0);
    assert_int_equal(kit_of(&m, a)->tokens, 2 * SESSION);
    assert_int_equal(kit_of(&other, b)->tokens, 2 * SESSION);
    kvq__session_unref(kit_of(&m, c));
    kvq__session_unref(kit_of(&m, d));
}

static void open_shards(struct member *member, const char *name, uint64_t *shards)
{
    struct kvq__session_spec spec = {
        .name = name, .place = place(home), .layers = rows, .n_layers = 1, .shards = 2};
    for (; spec.shard < 2; spec.shard++) {
        shards[spec.shard] = kit_opened(member, &spec);
    }
}

// Two sessions have each begun the step of one shard, and there is no room for the other ones: who
// does not wait is told, and undoing that makes room for who does.
SAVING_TEST(test_half_begun)
{
    uint64_t one[2], two[2], held[2];
    for (uint32_t i = 0; i < 2; i++) {
        held[i] = fed(&m, "");
        kvq__session_ref(kit_of(&m, held[i]));
    }
    open_shards(&m, "one", one);
    open_shards(&other, "two", two);
    assert_int_equal(finish(&m, begin(&m, one[0], 7, SESSION, 0)), 0);
    assert_int_equal(finish(&other, begin(&other, two[0], 7, SESSION, 0)), 0);
    pass(2 * SECOND);
    assert_int_equal(begin(&m, one[1], 8, SESSION, 60 * SECOND), 1);
    assert_int_equal(finish(&other, begin(&other, two[1], 8, SESSION, 0)), KVQ_E_NO_MEMORY);
    assert_int_equal(kit_again(&m), 1);
    struct kvq_entry_wire e = entry(&other, two[0], 0);
    assert_int_equal(kit_simple(&other, KVQ_OP_STEP_ABORT, 7, e, NULL), 0);
    assert_int_equal(kit_again(&m), 0);
    assert_int_equal(status_of(&m), 0);
    for (uint32_t i = 0; i < 2; i++)
        kvq__session_unref(kit_of(&m, held[i]));
}

// A request of several sessions takes the memory of all of them, or none while it waits.
SAVING_TEST(test_all_or_nothing)
{
    uint64_t handles[4], x = opened(&other, "x"), y = opened(&other, "y");
    fill_home(handles);
    kvq__session_ref(kit_of(&m, handles[2]));
    kvq__session_ref(kit_of(&m, handles[3]));
    kit_drop(&m, handles[0]);
    uint64_t used = kit.core->pools[home].used_bytes;
    struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 2);
    struct kvq_entry_wire e[2] = {entry(&other, x, SESSION), entry(&other, y, SESSION)};
    r.step = 9;
    assert_int_equal(kit_request(&other, &r, e), 1);
    core_check(kit.core);
    assert_int_equal(kit.core->pools[home].used_bytes, used);
    assert_null(kit_of(&other, x)->step);
    pass(2 * SECOND);
    assert_int_equal(finish(&other, kit_again(&other)), 0); // handles[1] went
    assert_int_equal(kvq__queue_results(other.queue)[1].status, 0);
    assert_non_null(kit_of(&other, x)->step);
    assert_non_null(kit_of(&other, y)->step);
    assert_int_equal(evicted(), 1);
    kvq__session_unref(kit_of(&m, handles[2]));
    kvq__session_unref(kit_of(&m, handles[3]));
}

// Whole steps and forks wait as well.
SAVING_TEST(test_operations)
{
    uint64_t fork[2];
    uint64_t a = opened(&m, "a");
    assert_int_equal(step(&m, a, SESSION - PAGE - 5), 0); // a fork has a copy of its last page
    for (uint32_t i = 0; i < 3; i++)
        fed(&m, "");
    uint64_t used = kit.core->pools[home].used_bytes; // so that there is room for one fork
    struct kvq_entry_wire e[2] = {entry(&m, a, 0), entry(&m, a, 0)};
    struct kvq_request r = kit_header(KVQ_OP_FORK, 2);
    assert_int_equal(kit_request(&m, &r, e), 1);
    core_check(kit.core);
    assert_int_equal(kit.core->pools[home].used_bytes, used);
    pass(2 * SECOND);
    assert_int_equal(finish(&m, kit_again(&m)), 0);
    for (uint32_t i = 0; i < 2; i++)
        fork[i] = kvq__queue_results(m.queue)[i].value;
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kit_of(&m, fork[i])->tokens, SESSION - PAGE - 5);
    assert_int_equal(evicted(), 1);
    pass(2 * SECOND);
    // As much again, twice: the others that are left go for it.
    assert_int_equal(finish(&other, kit_whole(&other, opened(&other, "b"), SESSION, HEADS, DIM)),
                     0);
    pass(2 * SECOND);
    assert_int_equal(finish(&other, kit_whole(&other, opened(&other, "c"), SESSION, HEADS, DIM)),
                     0);
    assert_true(evicted() >= 2);
    assert_int_equal(refused(), 0);
}

// Who waits when the daemon drains is told, and so is nobody whose client is gone.
SAVING_TEST(test_drain)
{
    uint64_t handles[4];
    hold_all(handles);
    assert_int_equal(begin(&other, opened(&other, "x"), 9, SESSION, 10 * SECOND), 1);
    struct member third;
    attach(&third, 1000);
    assert_int_equal(begin(&third, opened(&third, "y"), 9, SESSION, 10 * SECOND), 1);
    kvq__client_detach(third.client);
    assert_int_equal(kit_again(&third), KVQ_E_CANCELLED);
    kvq__queue_close(&third.queue);
    member_free(&third);
    core_check(kit.core);
    kvq__core_drain(kit.core);
    assert_true(kvq__core_idle(kit.core));
    assert_int_equal(kit_again(&other), KVQ_E_DRAINING);
    let_go(handles);
}

// A session that has gone to the host does not come back then. A request in the order of a stream
// cannot be served there: the host would not wait for what the stream is yet to write.
TEST(test_stream_while_draining)
{
    uint64_t handles[5], *words = sim_gpus()->memory_new(4096);
    struct kvq__gpu *gpu = kit.core->pools[home].gpu;
    memset(words, 0, 4096);
    for (uint32_t i = 0; i < 5; i++) {
        handles[i] = fed(&m, "");
        pass(2 * SECOND);
    }
    kit_drop(&m, handles[4]); // there is room to go back to
    assert_false(is_home(&m, handles[0]));
    int rc =
        kvq__queue_timeline(m.queue, gpu, (uintptr_t)words, (uintptr_t)(words + 1), words, text);
    kvq__core_drain(kit.core);
    struct kvq_entry_wire e = entry(&m, handles[0], 0);
    struct kvq_request r = kit_attend(&m, 0, Q_AT, OUT_AT, 2 * HEADS, DIM);
    e.queries = QUERIES;
    assert_int_equal(finish(&m, kit_request(&m, &r, &e)), 0);
    r.flags = KVQ_REQ_ON_STREAM;
    r.signal = 1;
    if (rc == 0) // else this GPU has too few hardware queues
        assert_int_equal(finish(&m, kit_request(&m, &r, &e)), KVQ_E_DRAINING);
    kit_settle(&m);
    assert_int_equal(words[1], rc == 0);
    sim_gpus()->memory_free(words);
}

// ---- Limits, groups, what has just come back ----

SAVING_TEST(test_quota)
{
    struct member stranger;
    kit.core->pools[0].budget = 8 * MIB;
    attach(&stranger, 2000);
    uint64_t theirs = fed(&stranger, "theirs");
    pass(10 * SECOND); // idle for longer than ours
    uint64_t a = fed(&m, "a"), b = opened(&m, "b");
    kit_of(&m, a)->ns->quota.limit[KVQ__HOST_BYTES] = SESSION_BYTES + SESSION_BYTES / 2;
    pass(2 * SECOND);
    assert_int_equal(step(&m, b, SESSION), 0);
    assert_false(is_home(&m, a));
    assert_true(is_home(&stranger, theirs));
    // More than its limit at all.
    assert_int_equal(begin(&m, b, 9, SESSION, 10 * SECOND), 0);
    assert_int_equal(status_of(&m), KVQ_E_QUOTA);
}

// All shards go, and each comes back when it is used.
TEST(test_group)
{
    struct kvq__session_info info;
    struct kvq__session_spec spec = {
        .name = "g", .place = place(1), .layers = rows, .n_layers = 1, .shards = 2};
    uint64_t shards[2];
    for (spec.shard = 0; spec.shard < 2; spec.shard++) {
        assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
        shards[spec.shard] = info.handle;
    }
    struct kvq_request r = kit_header(KVQ_OP_STEP, 2);
    r.layer = LAYERS;
    r.slots = (uint16_t)kvq_request_slots(r.count, LAYERS);
    for (uint32_t i = 0; i < LAYERS; i++)
        m.layers[i] = (struct kvq_step_layer){kit_view(&m, 0, HEADS, DIM, KVQ_F32),
                                              kit_view(&m, BUFFER / 2, HEADS, DIM, KVQ_F32)};
    struct kvq_entry_wire e[2] = {entry(&m, shards[0], SESSION), entry(&m, shards[1], SESSION)};
    assert_int_equal(finish(&m, kit_request(&m, &r, e)), 0);
    rest();
    pass(2 * SECOND);
    fed(&other, "");
    fed(&other, "");
    assert_int_equal(kit.core->counts.demoted, 0);
    uint64_t x = opened(&other, "x");
    assert_int_equal(step(&other, x, 1), 0); // for one page
    assert_int_equal(kit.core->counts.demoted, 1);
    assert_false(is_home(&m, shards[0]) || is_home(&m, shards[1]));
    pass(2 * SECOND);
    // Who opens it sees where it belongs, and that it is on its way there.
    assert_int_equal(kvq__session_info(m.client, shards[0], &info, text), 0);
    assert_true(info.demoted);
    assert_string_equal(info.place, place(1));
    uint8_t out[LAYERS][OUT_BYTES];
    attend(&m, shards[1], out);
    assert_true(is_home(&m, shards[1]) && !is_home(&m, shards[0]));
    spec.shard = 0;
    spec.flags = KVQ__OPEN_READ_ONLY;
    kvq__session_drop(other.client, x, text);
    rest();
    assert_int_equal(kvq__session_open(other.client, &spec, &info, text), 0);
    rest();
    assert_true(is_home(&m, shards[0]));
    // One that is moved to the host belongs there from then on.
    pass(2 * SECOND);
    assert_int_equal(step(&m, opened(&m, ""), 3 * SESSION), 0);
    assert_false(is_home(&m, shards[0]) || is_home(&m, shards[1]));
    static const struct kvq__peer admin = {.admin = true};
    struct kvq__move_spec to = {.place = "host"};
    struct kvq__move_info moved;
    assert_int_equal(kvq__session_move_named(kit.core, &admin, "uid-1000", "g", &to, &moved, text),
                     0);
    rest();
    assert_null(kit_of(&m, shards[0])->demoted.home);
    assert_int_equal(kvq__session_info(m.client, shards[0], &info, text), 0);
    assert_string_equal(info.place, "host");
}

// The first request of a queue may be for a session that was demoted.
TEST(test_first_request)
{
    uint64_t handles[5], reader;
    uint8_t out[LAYERS][OUT_BYTES];
    for (uint32_t i = 0; i < 5; i++) {
        handles[i] = fed(&m, i ? "" : "first");
        pass(2 * SECOND);
    }
    assert_false(is_home(&m, handles[0]));
    const struct kvq__session_spec spec = {.name = "first",
                                           .place = place(home),
                                           .layers = rows,
                                           .n_layers = 1,
                                           .flags = KVQ__OPEN_READ_ONLY};
    reader = kit_opened(&other, &spec);
    kit_drop(&m, handles[4]);
    rest();
    assert_false(is_home(&m, handles[0])); // nobody has asked since there is room
    attend(&other, reader, out);
    assert_true(is_home(&m, handles[0]));
}

// Sessions that have just come back stay, however long nobody had used them before.
SAVING_TEST(test_back)
{
    uint64_t handles[4];
    fill_home(handles);
    pass(10 * SECOND);
    kit_of(&m, handles[2])->idle_since = kit.now - 5 * SECOND; // the one used last
    for (uint32_t i = 0; i < 4; i++)
        if (i != 2)
            kvq__evict_back(kit_of(&m, handles[i]));
    assert_int_equal(step(&other, opened(&other, "x"), 1), 0);
    for (uint32_t i = 0; i < 4; i++)
        assert_true(is_home(&m, handles[i]) == (i != 2));
}

// A limit that is lowered: those that nobody uses go, one after the other, and nobody else; and
// they come back as far as it allows.
SAVING_TEST(test_lowered)
{
    uint64_t a = fed(&m, "a"), b = fed(&m, "b"), c = fed(&m, "c");
    const struct kvq__namespace *ns = kit_of(&m, a)->ns;
    enum kvq__limit which = kvq__pool_limit(&kit.core->pools[home]);
    uint8_t before[LAYERS][OUT_BYTES], after[LAYERS][OUT_BYTES];
    attend(&m, a, before);
    assert_int_equal(ns->used[which], 3 * SESSION_BYTES);
    assert_int_equal(begin(&m, c, 7, 1, 0), 0); // into another page
    uint64_t in_step = ns->used[which] - 2 * SESSION_BYTES;
    core_check(kit.core);
    kit_limit(&kit, "uid-1000", which, in_step / 2);
    for (uint32_t i = 0; i < 10; i++) {
        pass(SECOND);
        kvq__core_tick(kit.core);
        rest();
    }
    assert_int_equal(ns->used[which], in_step); // what is in a step stays
    assert_false(is_home(&m, a) || is_home(&m, b));
    struct kvq_entry_wire e = entry(&m, c, 1);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 7, e, NULL), 0);
    kit_drop(&m, c);
    kit_limit(&kit, "uid-1000", which, SESSION_BYTES);
    attend(&m, a, after);
    assert_memory_equal(before, after, sizeof before);
    assert_true(ns->used[which] <= SESSION_BYTES && is_home(&m, a));
}
TEST(test_lowered);

// Prefixes are given up only where the limit counts them that is met.
TEST(test_prefixes_elsewhere)
{
    struct kvq__session_info info;
    struct kvq__session_spec spec = {
        .name = "a", .model = "m", .place = place(1), .layers = rows, .n_layers = 1};
    m.ids_at = 3 * MIB;
    for (uint32_t i = 0; i < SESSION; i++)
        ((int32_t *)(void *)(m.memory + m.ids_at))[i] = (int32_t)i;
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    uint64_t a = info.handle;
    const struct kvq__namespace *ns = kit_of(&m, a)->ns;
    assert_int_equal(kit_step(&m, a, SESSION, HEADS, DIM), 0);
    rest();
    kvq__core_tick(kit.core);
    kit_drop(&m, a);
    rest();
    uint64_t kept = ns->used[KVQ__DEVICE_BYTES];
    assert_true(kept > 0);
    m.ids_at = 0;
    kit_limit(&kit, "uid-1000", KVQ__HOST_BYTES, 1);
    spec.name = spec.place = "host";
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    assert_int_equal(kit_step(&m, info.handle, 1, HEADS, DIM), KVQ_E_QUOTA);
    assert_int_equal(ns->used[KVQ__DEVICE_BYTES], kept);
    // On their own tier they go at once, when its limit is lowered.
    core_check(kit.core);
    kit_limit(&kit, "uid-1000", KVQ__DEVICE_BYTES, kept / 2);
    kvq__core_tick(kit.core);
    assert_true(ns->used[KVQ__DEVICE_BYTES] <= kept / 2);
}

// ---- Prefixes ----

// A prefix of 512 KiB that no session has. Returns the bytes that only the index has.
static uint64_t idle_prefix(void)
{
    m.ids_at = 3 * MIB;
    for (uint32_t i = 0; i < SESSION; i++)
        ((int32_t *)(void *)(m.memory + m.ids_at))[i] = (int32_t)i;
    struct kvq__session_spec spec = {
        .name = "a", .model = "m", .place = place(home), .layers = rows, .n_layers = 1};
    uint64_t a = kit_opened(&m, &spec);
    assert_int_equal(kit_step(&m, a, SESSION, HEADS, DIM), 0);
    rest();
    kvq__core_tick(kit.core);
    kit_drop(&m, a);
    rest();
    m.ids_at = 0;
    return kit.core->pools[home].index_bytes;
}

// They give way to a session that comes back, before any other session does.
TEST(test_back_before_prefixes)
{
    static uint8_t out[LAYERS][OUT_BYTES];
    uint64_t handles[5];
    for (uint32_t i = 0; i < 5; i++) {
        handles[i] = fed(&m, "");
        pass(2 * SECOND);
    }
    assert_false(is_home(&m, handles[0]));
    uint64_t demoted = kit.core->counts.demoted;
    kit_drop(&m, handles[4]);
    assert_int_equal(idle_prefix(), SESSION_BYTES);
    assert_int_equal(kit.core->pools[home].used_bytes, GPU);
    pass(2 * SECOND);
    attend(&m, handles[0], out);
    assert_true(is_home(&m, handles[0]));
    assert_int_equal(kit.core->counts.demoted, demoted);
    assert_int_equal(kit.core->pools[home].index_bytes, 0);
}

// A request that could not be served without them either leaves prefixes alone.
SAVING_TEST(test_spared)
{
    const struct kvq__pool *pool = &kit.core->pools[0];
    uint64_t kept = idle_prefix(), small = opened(&m, "small"), large = opened(&m, "large");
    assert_int_equal(kept, SESSION_BYTES);
    assert_int_equal(begin(&m, large, 9, 5 * SESSION, 10 * SECOND), 0);
    assert_int_equal(status_of(&m), KVQ_E_NO_MEMORY);
    assert_int_equal(pool->index_bytes, kept);
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 2, 99);
    struct kvq_entry_wire e[2] = {entry(&m, small, SESSION), entry(&m, large, 7 * SESSION / 2)};
    assert_int_equal(finish(&m, kit_request(&m, &r, e)), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, 0);
    assert_int_equal(kvq__queue_results(m.queue)[1].status, KVQ_E_NO_MEMORY);
    assert_int_equal(pool->index_bytes, kept);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 99, entry(&m, small, 1), NULL), 0);
    kit_limit(&kit, "uid-1000", KVQ__HOST_BYTES, 2 * SESSION_BYTES);
    assert_int_equal(begin(&m, large, 9, 3 * SESSION, 10 * SECOND), 0);
    assert_int_equal(status_of(&m), KVQ_E_QUOTA);
    assert_int_equal(pool->index_bytes, kept);
    assert_int_equal(pool->used_bytes, kept);
    // What one entry can have alone it gets, whatever the others are refused.
    kit_limit(&kit, "uid-1000", KVQ__HOST_BYTES, 0);
    e[0] = entry(&m, small, 7 * SESSION / 2);
    e[1] = entry(&m, large, SESSION);
    assert_int_equal(finish(&m, kit_request(&m, &r, e)), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, 0);
    assert_int_equal(kvq__queue_results(m.queue)[1].status, KVQ_E_NO_MEMORY);
    assert_int_equal(pool->index_bytes, kept / 2);
}

// One that waits takes nothing, however often it looks; with the last it needs prefixes give way.
SAVING_TEST(test_spared_while_waiting)
{
    const struct kvq__pool *pool = &kit.core->pools[0];
    uint64_t kept = idle_prefix(), held[2] = {fed(&m, "a"), fed(&m, "b")};
    uint64_t used = pool->used_bytes, large[2] = {opened(&other, "c"), opened(&other, "d")};
    for (uint32_t i = 0; i < 2; i++)
        kvq__session_ref(kit_of(&m, held[i]));
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 2, 9);
    struct kvq_entry_wire e[2] = {entry(&other, large[0], SESSION / 2 * 3),
                                  entry(&other, large[1], SESSION / 2 * 3)};
    r.flags = KVQ_REQ_WAIT_ROOM;
    r.deadline_ns = kit.now + 60 * SECOND;
    int rc = kit_request(&other, &r, e);
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(rc, 1);
        assert_int_equal(pool->used_bytes, used);
        assert_int_equal(pool->index_bytes, kept);
        pass(100 * MS);
        rc = kit_again(&other);
    }
    for (uint32_t i = 0; i < 2; i++)
        kvq__session_unref(kit_of(&m, held[i]));
    pass(2 * SECOND);
    assert_int_equal(finish(&other, rc), 0);
    assert_int_equal(evicted(), 1);
    assert_int_equal(pool->index_bytes, 0);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
