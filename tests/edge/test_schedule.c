// SPDX-License-Identifier: Apache-2.0
//
// The scheduler with made-up costs: fair by time, not by items; decode before prefill, which still
// moves on; every item given out once.
#include "daemon/runtime/schedule.h"
#include "tests/kits/unit.h"

enum { ITEMS = 100000 };

struct side {
    struct kvq__share share;
    struct kvq__work work[2];
    struct kvq__job job;
    uint64_t item_ns, picks, time;
};

static struct kvq__schedule schedule;

static void side_add(struct side *side, uint64_t item_ns, enum kvq__urgency urgency, int n_works)
{
    memset(side, 0, sizeof *side);
    kvq__share_init(&side->share);
    side->item_ns = item_ns;
    side->job.n_items = ITEMS;
    for (int i = 0; i < n_works; i++) {
        side->work[i].job = &side->job;
        side->work[i].share = &side->share;
        side->work[i].urgency = urgency;
        side->work[i].n_items = ITEMS;
        kvq__schedule_add(&schedule, &side->work[i]);
    }
}

// Runs picks, each costing what its side says, at once known.
static void run(struct side *sides, int n_sides, int picks)
{
    for (int i = 0; i < picks; i++) {
        uint32_t item;
        struct kvq__work *work = kvq__schedule_pick(&schedule, &item);
        assert_non_null(work);
        assert_int_equal(item, work->picked - 1);
        for (int s = 0; s < n_sides; s++)
            if (work->share == &sides[s].share) {
                sides[s].picks++;
                sides[s].time += sides[s].item_ns;
                sides[s].share.cost_ns += sides[s].item_ns;
            }
    }
}

PLAIN_TEST(test_time_is_shared_evenly)
{
    struct side sides[3];
    kvq__schedule_init(&schedule);
    side_add(&sides[0], 1000, KVQ__DECODE, 1);
    side_add(&sides[1], 50000, KVQ__DECODE, 1);
    side_add(&sides[2], 3000000, KVQ__DECODE, 2); // far beyond a quantum, and two queues
    run(sides, 3, 60000);
    for (int s = 0; s < 3; s++) {
        uint64_t all = sides[0].time + sides[1].time + sides[2].time;
        assert_true(sides[s].time > all / 3 * 9 / 10 && sides[s].time < all / 3 * 11 / 10);
    }
}

// All may be in debt at once, and still somebody is next.
PLAIN_TEST(test_debts)
{
    struct side sides[2];
    kvq__schedule_init(&schedule);
    side_add(&sides[0], 90000000, KVQ__DECODE, 1);
    run(sides, 1, 100);
    side_add(&sides[1], 30000000, KVQ__DECODE, 1);
    run(sides, 2, 400);
    assert_true(sides[1].picks > 280 && sides[1].picks < 320);
}

PLAIN_TEST(test_queues_of_a_client_take_turns)
{
    struct side side;
    kvq__schedule_init(&schedule);
    side_add(&side, 1000, KVQ__DECODE, 2);
    run(&side, 1, 1000);
    assert_int_equal(side.work[0].picked, 500);
    assert_int_equal(side.work[1].picked, 500);
}

PLAIN_TEST(test_decode_goes_first)
{
    struct side sides[2];
    kvq__schedule_init(&schedule);
    side_add(&sides[0], 1000, KVQ__PREFILL, 1);
    side_add(&sides[1], 1000, KVQ__DECODE, 1);
    run(sides, 2, 8000);
    assert_int_equal(sides[0].picks, 8000 / KVQ__PREFILL_SHARE); // and prefill moves on
    assert_int_equal(sides[1].picks, 8000 - 8000 / KVQ__PREFILL_SHARE);
}

PLAIN_TEST(test_nobody_saves_up)
{
    struct side sides[2];
    uint32_t item;
    kvq__schedule_init(&schedule);
    side_add(&sides[0], 1000, KVQ__DECODE, 1);
    side_add(&sides[1], 1000, KVQ__DECODE, 1);
    sides[1].work[0].n_items = 1; // ends at once and stays away for long
    run(sides, 2, 50000);
    sides[1].work[0].n_items = ITEMS;
    kvq__schedule_add(&schedule, &sides[1].work[0]);
    uint64_t before[2] = {sides[0].time, sides[1].time};
    run(sides, 2, 10000);
    uint64_t gained = sides[1].time - before[1], other = sides[0].time - before[0];
    assert_true(gained < other + 2 * KVQ__QUANTUM_NS && other < gained + 2 * KVQ__QUANTUM_NS);
    // To the end: each item once, then nothing.
    run(sides, 2, (int)(2 * ITEMS - sides[0].work[0].picked - sides[1].work[0].picked));
    assert_null(kvq__schedule_pick(&schedule, &item));
    assert_true(kvq__schedule_empty(&schedule));
}

// Of brief work others only hear if something else waits as well.
PLAIN_TEST(test_only_work)
{
    struct side sides[2];
    uint32_t item;
    for (int other = KVQ__DECODE; other < KVQ__URGENCIES; other++) {
        kvq__schedule_init(&schedule);
        side_add(&sides[0], 1000, KVQ__DECODE, 1);
        sides[0].work[0].n_items = 2;
        const struct kvq__work *work = &sides[0].work[0];
        assert_true(kvq__schedule_only(&schedule, work));
        side_add(&sides[1], 1000, (enum kvq__urgency)other, 1);
        assert_false(kvq__schedule_only(&schedule, work));
        sides[1].work[0].n_items = 1;
        while (kvq__schedule_pick(&schedule, &item))
            continue;
        assert_true(kvq__schedule_only(&schedule, work)); // nothing waits
    }
    kvq__schedule_init(&schedule);
    side_add(&sides[0], 1000, KVQ__DECODE, 2);
    assert_false(kvq__schedule_only(&schedule, &sides[0].work[0]));
}

PLAIN_TEST(test_urgency_of_requests)
{
    struct kvq_request request = {.count = 3};
    struct kvq_entry_wire entries[3] = {{.append = 1}, {.queries = 16}, {.append = 16}};
    assert_int_equal(kvq__urgency_of(&request, entries), KVQ__DECODE);
    entries[1].queries = 17;
    assert_int_equal(kvq__urgency_of(&request, entries), KVQ__PREFILL);
    entries[1].queries = 0;
    entries[2].append = 17;
    assert_int_equal(kvq__urgency_of(&request, entries), KVQ__PREFILL);
    request.count = 2;
    assert_int_equal(kvq__urgency_of(&request, entries), KVQ__DECODE);
}

int main(void)
{
    return run_all(NULL, NULL);
}
