// SPDX-License-Identifier: Apache-2.0
//
// The poller and its workers with real threads and rings, over a fake core: requests, sleeping and
// waking, misuse, removal. Nothing depends on timing.
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "proto/sync.h"
#include "tests/edge/poller_kit.h"
#include "tests/kits/unit.h"

static struct kvq_completion done; // that came last

PLAIN_TEST(test_requests_and_jobs)
{
    for (uint32_t workers = 1; workers <= 3; workers++) {
        begin(workers, 100000);
        for (uint32_t i = 0; i < 2000; i++) {
            call(&c, KVQ_OP_NOP, i, 0, (uint16_t)(i % 65));
            uint32_t items = 1 + i % 37;
            struct kvq_completion done = call(&c, KVQ_OP_ATTEND, i, items, 1);
            assert_int_equal(done.value, items); // each exactly once
        }
        call(&c, KVQ_OP_NOP, 7, 0, KVQ_MAX_BATCH);
        call(&c, KVQ_OP_APPEND, 8, 5, 1); // waits and is looked at again
        end();
    }
}

PLAIN_TEST(test_eight_in_flight)
{
    begin(2, 0);
    for (uint32_t round = 0; round < 200; round++) {
        for (uint32_t i = 0; i < KVQ_QUEUE_CREDITS; i++) {
            struct kvq_request r =
                make_request(i % 2 ? KVQ_OP_ATTEND : KVQ_OP_NOP, round * 8 + i, 3, 200);
            put_request(&c, &r);
        }
        for (uint32_t i = 0; i < KVQ_QUEUE_CREDITS; i++) {
            struct kvq_completion done;
            await_completion(&c, &done);
            assert_int_equal(done.seq, round * 8 + i); // in the order submitted
        }
    }
    end();
}

PLAIN_TEST(test_sleep_and_wake)
{
    begin(2, 0); // never spins
    for (uint32_t i = 0; i < 50; i++) {
        struct kvq_request r = make_request(KVQ_OP_ATTEND, i, 4, 1);
        wait_for_word(&rig.page.poller_sleeping, 1);
        kvq_ring_sleep_begin(&c.req->client_sleeping);
        put_request(&c, &r);
        struct pollfd p = {.fd = c.wake, .events = POLLIN};
        assert_int_equal(poll(&p, 1, -1), 1); // the poller wakes us
        uint64_t count;
        assert_int_equal(read(c.wake, &count, sizeof count), sizeof count);
        kvq_ring_sleep_end(&c.req->client_sleeping);
        assert_true(try_completion(&c, &done)); // published before the wake-up
        assert_int_equal(done.value, 4);
    }
    end();
}

static void count_mail(struct kvq__mail *mail)
{
    kvq_word_add((uint32_t *)(mail + 1), 1);
}

// The poller looks by itself at every tick, so a wake-up that is lost costs only time. That none
// is lost shows where something is seen while no tick came: once in 50 times is proof enough. On
// a crowded machine a tick often comes between, so it is then tried for longer.
static bool try_again(uint32_t tries, uint32_t seen)
{
    return tries < 50 || (seen == 0 && tries < 400);
}

PLAIN_TEST(test_posts_wake_the_poller)
{
    struct {
        struct kvq__mail mail;
        uint32_t delivered;
    } post = {.delivered = 0};
    uint32_t woken = 0;
    rig_open(&rig, 1, 0);
    for (uint32_t i = 0; try_again(i, woken); i++) {
        wait_for_word(&rig.page.poller_sleeping, 1);
        uint32_t ticks = kvq_word_load_acquire(&rig.core.ticks);
        kvq__mailbox_post(kvq__poller_box(rig.poller), &post.mail, count_mail);
        wait_for_word(&post.delivered, i + 1);
        woken += kvq_word_load_acquire(&rig.core.ticks) == ticks;
    }
    assert_true(woken > 0);
    kvq__poller_close(&rig.poller);
}

PLAIN_TEST(test_workers_wake_the_poller)
{
    uint32_t woken = 0, held = 0;
    begin(2, 0);
    for (uint32_t i = 0; try_again(i, woken + (held == 0)); i++) {
        uint32_t gate = 0;
        c.queue->worker_gate = &gate;
        struct kvq_request r = make_request(KVQ_OP_ATTEND, i, 2, 0);
        put_request(&c, &r);
        bool over = false; // the poller may have run both items itself
        while (!(over = try_completion(&c, &done)) &&
               (kvq_word_load_acquire(&c.queue->held_by_worker) == held ||
                kvq_word_load_acquire(&rig.page.poller_sleeping) == 0))
            sched_yield();
        uint32_t ticks = kvq_word_load_acquire(&rig.core.ticks);
        kvq_word_store_release(&gate, 1);
        bool slept = !over;
        while (!over)
            over = try_completion(&c, &done);
        woken += slept && kvq_word_load_acquire(&rig.core.ticks) == ticks;
        held = kvq_word_load_acquire(&c.queue->held_by_worker);
    }
    assert_true(held == 0 || woken > 0);
    c.queue->worker_gate = NULL;
    end();
}

// Clients are told of workers that compute, and of none that sleep.
PLAIN_TEST(test_who_is_awake)
{
    uint32_t gate = 0;
    begin(3, 0);
    wait_for_word(&rig.page.awake, 1);
    c.queue->worker_gate = &gate;
    while (kvq_word_load_acquire(&c.queue->held_by_worker) == 0) {
        struct kvq_request r = make_request(KVQ_OP_ATTEND, 0, 3, 0);
        put_request(&c, &r);
        bool over = false; // the poller may have run all items itself
        while (!(over = try_completion(&c, &done)) &&
               kvq_word_load_acquire(&c.queue->held_by_worker) == 0)
            sched_yield();
        assert_true(over || kvq_word_load(&rig.page.awake) >= 2);
        if (over)
            continue;
        kvq_word_store_release(&gate, 1);
        await_completion(&c, &done);
    }
    wait_for_word(&rig.page.awake, 1);
    end();
    assert_int_equal(rig.page.awake, 1);
}

// What a client can write into its ring to be cut off.
enum scribble { TAIL_FAR, TAIL_BACK, SHORT, TOO_MANY, WRONG_LENGTH, UNFINISHED, HEAD_FAR, CREDITS };

static void scribble(struct fake_client *c, enum scribble what)
{
    struct kvq_request r = make_request(KVQ_OP_NOP, 1, 0, 1);
    switch (what) {
    case TAIL_FAR:
        kvq_word_store_release(&c->req->tail, c->tx.tail + KVQ_REQ_SLOTS + 1);
        break;
    case TAIL_BACK:
        kvq_word_store_release(&c->req->tail, c->tx.tail - 1);
        break;
    case SHORT:
        kvq_ring_publish(&c->tx, 1);
        break;
    case TOO_MANY:
        r = make_request(KVQ_OP_NOP, 1, 0, KVQ_MAX_BATCH + 1);
        kvq_ring_write(&c->tx, 0, &r, sizeof r);
        kvq_ring_publish(&c->tx, r.slots);
        break;
    case WRONG_LENGTH:
        r.slots++;
        kvq_ring_write(&c->tx, 0, &r, sizeof r);
        kvq_ring_publish(&c->tx, r.slots);
        break;
    case UNFINISHED:
        r = make_request(KVQ_OP_NOP, 1, 0, 100);
        kvq_ring_write(&c->tx, 0, &r, sizeof r);
        kvq_ring_publish(&c->tx, 8);
        break;
    case HEAD_FAR:
        kvq_word_store_release(&c->req->cq_head, 77);
        put_request(c, &r);
        break;
    case CREDITS:
        for (uint32_t i = 0; i < 20; i++) { // nobody takes the completions
            r = make_request(KVQ_OP_NOP, i, 0, KVQ_MAX_BATCH - 1);
            uint32_t room = 0;
            while (kvq_word_load_acquire(&c->complaints) == 0 && room < r.slots)
                assert_int_equal(kvq_ring_room(&c->tx, &room), 0);
            if (room >= r.slots)
                put_request(c, &r);
        }
        break;
    }
    wake_poller(c);
}

PLAIN_TEST(test_scribblers_are_cut_off)
{
    static const char *const words[] = {
        [TAIL_FAR] = "request ring's tail",    [TAIL_BACK] = "request ring's tail",
        [SHORT] = "less than a request",       [TOO_MANY] = "more entries",
        [WRONG_LENGTH] = "does not match",     [UNFINISHED] = "not published whole",
        [HEAD_FAR] = "completion ring's head", [CREDITS] = "8 credits",
    };
    struct fake_client good;
    rig_open(&rig, 1, 0);
    client_open(&good, &rig);
    for (int what = TAIL_FAR; what <= CREDITS; what++) {
        struct fake_client bad;
        client_open(&bad, &rig);
        call(&bad, KVQ_OP_NOP, 1, 0, 2);
        scribble(&bad, what);
        wait_for_word(&bad.complaints, 1);
        assert_says(bad.complaint, words[what]);
        call(&good, KVQ_OP_NOP, (uint32_t)what, 0, 3); // others are served
        assert_int_equal(kvq_word_load_acquire(&bad.complaints), 1);
        client_close(&bad);
    }
    client_close(&good);
    kvq__poller_close(&rig.poller);
}

PLAIN_TEST(test_removal_waits_for_the_job)
{
    uint32_t gate = 0;
    struct fake_client other;
    rig_open(&rig, 3, 0);
    client_open(&other, &rig);
    client_open(&c, &rig);
    c.queue->gate = &gate;
    struct kvq_request r = make_request(KVQ_OP_ATTEND, 1, 1, 1);
    struct kvq_request spare = make_request(KVQ_OP_NOP, 2, 0, 1);
    put_request(&c, &r);
    wait_for_word(&c.cq->req_head, r.slots); // it is under way
    put_request(&c, &spare);
    client_leave(&c);
    // The item holds a thread. Unless that is the poller, others go on meanwhile; in either case
    // the port is not closed before the item has ended.
    assert_int_equal(kvq_word_load_acquire(&c.closed), 0);
    kvq_word_store_release(&gate, 1);
    wait_for_word(&c.closed, 1);
    assert_int_equal(kvq_word_load_acquire(&c.cq->req_head), r.slots); // and nothing more
    call(&other, KVQ_OP_ATTEND, 3, 8, 1);
    client_free(&c);
    client_close(&other);
    kvq__poller_close(&rig.poller);
}

static void *busy_client(void *context)
{
    struct fake_client *c = context;
    uint32_t seed = (uint32_t)(uintptr_t)c;
    for (uint32_t i = 0; i < 1500; i++) {
        seed = seed * 1664525 + 1013904223;
        uint32_t kind = seed >> 30, items = 1 + (seed >> 16) % 24;
        if (kind < 2)
            call(c, KVQ_OP_NOP, i, 0, (uint16_t)(seed % 70));
        else
            assert_int_equal(call(c, KVQ_OP_ATTEND, i, items, 1).value, items);
    }
    return NULL;
}

PLAIN_TEST(test_many_clients)
{
    enum { CLIENTS = 6 };
    static struct fake_client clients[CLIENTS];
    pthread_t threads[CLIENTS];
    rig_open(&rig, 3, 20000);
    for (int i = 0; i < CLIENTS; i++)
        client_open(&clients[i], &rig);
    for (int i = 0; i < CLIENTS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, busy_client, &clients[i]), 0);
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < CLIENTS; i++) {
        assert_int_equal(clients[i].complaints, 0);
        client_close(&clients[i]);
    }
    kvq__poller_close(&rig.poller);
}

int main(void)
{
    // A test that fails leaves threads that work on its stack: what came next would crash, and say
    // nothing. The same for assertions that fail on other threads.
    setenv("CMOCKA_TEST_ABORT", "1", 1);
    return run_all(NULL, NULL);
}
