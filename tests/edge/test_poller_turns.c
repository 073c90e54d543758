// SPDX-License-Identifier: Apache-2.0
//
// What the poller's turns do for whom: background work, slices of time, floods. Over a fake core;
// nothing depends on timing.
#include <sched.h>

#include "proto/sync.h"
#include "tests/edge/poller_kit.h"
#include "tests/kits/unit.h"

static struct kvq_completion done; // that came last

PLAIN_TEST(test_background_work)
{
    for (uint32_t workers = 1; workers <= 3; workers++) {
        begin(workers, 0);
        for (uint32_t round = 1; round <= 20; round++) {
            kvq_word_store_release(&rig.core.background_items, 9);
            call(&c, KVQ_OP_NOP, 1, 0, 1);
            wait_for_word(&rig.core.background_done, round);
            assert_int_equal(kvq_word_load_acquire(&rig.core.background_run), 9 * round);
        }
        end();
    }
}

// What has begun is ended before the poller is closed; what has not does not begin. The items take
// long enough for the close to come before their end.
PLAIN_TEST(test_background_ends_with_the_poller)
{
    for (uint32_t workers = 1; workers <= 3; workers++) {
        begin(workers, 0);
        begin_background(&c, 1000000, NULL);
        kvq_word_store_release(&rig.core.background_items, 5);
        end();
        assert_int_equal(kvq_word_load_acquire(&rig.core.background_run) % 1000000,
                         rig.core.background_done == 1 ? 0 : 5);
    }
}

// A request that waits for background work which has begun gets it, however busy others are. A
// turn of the poller runs one item of the background and far fewer than 1,000 of the others', so
// the background's 200 items are done long before the other's 2,000,000.
PLAIN_TEST(test_background_under_load)
{
    struct fake_client busy, waiting;
    uint32_t gate = 0;
    rig_open(&rig, 1, 0);
    client_open(&busy, &rig);
    client_open(&waiting, &rig);
    begin_background(&busy, 200, &gate);
    struct kvq_request work = make_request(KVQ_OP_ATTEND, 1, 2000000, 0);
    struct kvq_request r = make_request(KVQ_OP_READ, 1, 0, 0); // waits for the background's end
    put_request(&busy, &work);
    put_request(&waiting, &r);
    kvq_word_store_release(&gate, 1);
    await_completion(&waiting, &done);
    assert_int_equal(kvq_word_load_acquire(&rig.core.background_run), 200);
    assert_false(try_completion(&busy, &done)); // still under way
    await_completion(&busy, &done);
    client_close(&waiting);
    client_close(&busy);
    kvq__poller_close(&rig.poller);
}

// Runs 5,000 items for one client, or in the background while a client waits for their end, where a
// look at the rings takes so long and an item 5 us. Returns how many were run between two looks.
static uint32_t most_between_looks(uint64_t look_ns, bool background)
{
    uint32_t gate = 0;
    fake_time = (struct fake_time){.now = 1, .look_ns = look_ns, .item_ns = 5000};
    begin(1, 0);
    if (background)
        begin_background(&c, 5000, &gate);
    struct kvq_request r =
        make_request(background ? KVQ_OP_READ : KVQ_OP_ATTEND, 1, background ? 0 : 5000, 0);
    put_request(&c, &r);
    kvq_word_store_release(&gate, 1);
    await_completion(&c, &done);
    end();
    fake_time.item_ns = 0;
    return fake_time.most;
}

// Items have a slice of 20 us of each turn, or as long as the look took, but 10 ms at most.
PLAIN_TEST(test_slices)
{
    for (uint32_t background = 0; background < 2; background++) {
        assert_in_range(most_between_looks(0, background), 4, 5);
        assert_in_range(most_between_looks(200000, background), 40, 41);
        assert_in_range(most_between_looks(5000000, background), 1000, 1001);
        assert_in_range(most_between_looks(50000000, background), 2000, 2001);
    }
}

// A worker that is awake has an item while the poller still looks at the client behind.
PLAIN_TEST(test_workers_get_items_during_a_look)
{
    struct fake_client c[2];
    uint32_t gate = 0;
    struct held held = {0};
    struct kvq_request r = make_request(KVQ_OP_ATTEND, 1, 2, 0);
    struct kvq_request none = make_request(KVQ_OP_NOP, 1, 0, 0);
    fake_time = (struct fake_time){.still = true, .now = 1}; // both stay warm, in this order
    rig_open(&rig, 2, 0);
    for (int i = 0; i < 2; i++) {
        client_open(&c[i], &rig);
        call(&c[i], KVQ_OP_NOP, 1, 0, 0);
    }
    c[0].queue->worker_gate = &gate;
    c[1].queue->start_gate = &c[0].queue->held_by_worker;
    kvq_word_add(&rig.page.awake, 1); // else nobody would wake it for so little
    kvq__mailbox_post(kvq__poller_box(rig.poller), &held.mail, hold_poller);
    wait_for_word(&held.there, 1);
    put_request(&c[0], &r);
    put_request(&c[1], &none);
    kvq_word_store_release(&held.gate, 1);
    await_completion(&c[1], &done);
    kvq_word_store_release(&gate, 1);
    await_completion(&c[0], &done);
    for (int i = 0; i < 2; i++)
        client_close(&c[i]);
    kvq__poller_close(&rig.poller);
    fake_time.still = false;
}

// What waits is looked at by the core's time of this turn, so that a deadline is not answered a
// tick late.
PLAIN_TEST(test_time_goes_on_while_requests_wait)
{
    fake_time = (struct fake_time){.now = 1, .look_ns = 2000000, .item_ns = 5000};
    begin(1, 0);
    call(&c, KVQ_OP_APPEND, 1, 30, 0); // waits for so many looks
    end();
    fake_time.item_ns = 0;
    assert_in_range(fake_time.behind, 1, 2000000);
}

struct slow_mail {
    struct kvq__mail mail; // first
    uint64_t at;
};

static void take_a_millisecond(struct kvq__mail *mail)
{
    ((struct slow_mail *)mail)->at = fake_time.now;
    fake_time.now += 1000000;
}

// Mail has a slice of a turn as well: however much there is, items have as much time.
PLAIN_TEST(test_slices_of_mail)
{
    enum { MAILS = 50, ITEMS = 200 }; // of 5 us
    static struct slow_mail mails[MAILS];
    struct held held = {0};
    struct kvq_request r = make_request(KVQ_OP_ATTEND, 1, MAILS * ITEMS, 0);
    fake_time = (struct fake_time){.now = 1, .item_ns = 5000};
    begin(1, 0);
    kvq__mailbox_post(kvq__poller_box(rig.poller), &held.mail, hold_poller);
    wait_for_word(&held.there, 1);
    put_request(&c, &r);
    for (uint32_t i = 0; i < MAILS; i++)
        kvq__mailbox_post(kvq__poller_box(rig.poller), &mails[i].mail, take_a_millisecond);
    kvq_word_store_release(&held.gate, 1);
    await_completion(&c, &done);
    end();
    fake_time.item_ns = 0;
    assert_true(mails[MAILS - 1].at - mails[0].at >= (MAILS - 1) * 2000000);
}

// Of two requests that the poller sees at once, one begins when items of the other have been run.
// One that has nothing to run has begun at once.
PLAIN_TEST(test_queue_time)
{
    struct fake_client c[2];
    struct held held = {0};
    struct kvq_request r = make_request(KVQ_OP_ATTEND, 1, 2, 0);
    fake_time = (struct fake_time){.now = 1, .item_ns = 5000};
    rig_open(&rig, 1, 0);
    const struct kvq__latencies *l = kvq__poller_latencies(rig.poller);
    for (int i = 0; i < 2; i++)
        client_open(&c[i], &rig);
    call(&c[0], KVQ_OP_NOP, 1, 0, 0);
    call(&c[0], KVQ_OP_ATTEND, 1, 3, 0);
    assert_int_equal(l->queue.count[0], 2);
    kvq__mailbox_post(kvq__poller_box(rig.poller), &held.mail, hold_poller);
    wait_for_word(&held.there, 1);
    for (int i = 0; i < 2; i++)
        put_request(&c[i], &r);
    kvq_word_store_release(&held.gate, 1);
    for (int i = 0; i < 2; i++)
        await_completion(&c[i], &done);
    assert_int_equal(l->queue.count[0], 3);
    assert_true(l->queue.sum_ns == 5000 || l->queue.sum_ns == 10000);
    for (int i = 0; i < 2; i++)
        client_close(&c[i]);
    kvq__poller_close(&rig.poller);
    fake_time.item_ns = 0;
}

// ---- A client that floods ----

enum { FLOOD_QUEUES = 64 };

// A client that keeps the poller (which has no workers) in an item until the gate opens, one that
// has put 8 requests into each of its queues meanwhile, and one that has put in `r`.
struct flood {
    struct rig rig;
    struct fake_client holder, flooder[FLOOD_QUEUES], victim;
    uint32_t gate;
};

static void flood_open(struct flood *f, uint32_t background, const struct kvq_request *r)
{
    struct kvq_request hold = make_request(KVQ_OP_ATTEND, 1, 1, 0);
    f->gate = 0;
    rig_open(&f->rig, 1, 0);
    client_open(&f->victim, &f->rig);
    client_open(&f->holder, &f->rig);
    for (int i = 0; i < FLOOD_QUEUES; i++)
        queue_open(&f->flooder[i], &f->rig, i ? &f->flooder[0] : NULL);
    if (background) {
        begin_background(&f->holder, background, &f->gate);
    } else {
        f->holder.queue->gate = &f->gate;
        put_request(&f->holder, &hold);
        wait_for_word(&f->holder.cq->req_head, hold.slots);
    }
    for (int i = 0; i < FLOOD_QUEUES; i++)
        for (uint32_t seq = 0; seq < KVQ_QUEUE_CREDITS; seq++) {
            struct kvq_request nop = make_request(KVQ_OP_NOP, seq, 0, 0);
            put_request(&f->flooder[i], &nop);
        }
    put_request(&f->victim, r);
}

// Opens the gate and waits until everything is answered.
static void flood_run(struct flood *f)
{
    kvq_word_store_release(&f->gate, 1);
    while (!try_completion(&f->victim, &done))
        sched_yield();
    while (f->holder.queue->gate && !try_completion(&f->holder, &done))
        sched_yield();
    for (int i = 0; i < FLOOD_QUEUES; i++)
        for (uint32_t n = 0; n < KVQ_QUEUE_CREDITS;)
            n += try_completion(&f->flooder[i], &done);
}

static void flood_close(struct flood *f)
{
    for (int i = FLOOD_QUEUES; i-- > 0;)
        client_close(&f->flooder[i]);
    client_close(&f->holder);
    client_close(&f->victim);
    kvq__poller_close(&f->rig.poller);
}

// Clients take turns, however many queues they have.
PLAIN_TEST(test_clients_before_queues)
{
    static struct flood f;
    struct kvq_request r = make_request(KVQ_OP_NOP, 1, 0, 0);
    flood_open(&f, 0, &r);
    flood_run(&f);
    assert_in_range(f.victim.queue->started_at - f.holder.queue->started_at, 1,
                    1 + FLOOD_QUEUES / 2);
    flood_close(&f);
}

// A request that waits for the background does not get one item of it for each turn in which the
// flood's queues are looked at: its 200 items end before the flood's 512 requests.
PLAIN_TEST(test_background_under_flood)
{
    static struct flood f;
    struct kvq_request r = make_request(KVQ_OP_READ, 1, 0, 0); // waits for the background's end
    flood_open(&f, 200, &r);
    flood_run(&f);
    assert_in_range(f.victim.queue->done_at - f.victim.queue->started_at, 0,
                    FLOOD_QUEUES * KVQ_QUEUE_CREDITS / 2);
    flood_close(&f);
}

int main(void)
{
    // A test that fails leaves threads that work on its stack: what came next would crash, and say
    // nothing. The same for assertions that fail on other threads.
    setenv("CMOCKA_TEST_ABORT", "1", 1);
    return run_all(NULL, NULL);
}
