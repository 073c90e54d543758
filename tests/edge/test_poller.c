// SPDX-License-Identifier: Apache-2.0
//
// The poller and its workers with real threads and rings, over a fake core. Clients are threads of
// this program. Nothing depends on timing: waits are for a state, and end by it.
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/runtime/poller.h"
#include "proto/sync.h"
#include "tests/kits/fake_core.h"
#include "tests/kits/unit.h"

static struct kvq_completion done; // that came last

struct rig {
    struct kvq__core core;
    struct kvq_daemon_page page;
    struct kvq__poller *poller;
};

// One client with one queue, or another queue of the client `of`. What the poller's thread touches
// comes first.
struct fake_client {
    struct kvq__member member;
    struct fake_client *of; // NULL: it is a client of its own
    struct kvq__port port;
    struct kvq__mail add, remove;
    struct rig *rig;
    struct kvq__queue *queue;
    uint32_t added, closed, complaints;
    char complaint[128];
    // The client's side.
    struct kvq_req_page *req;
    struct kvq_cq_page *cq;
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
    int event, wake_daemon_side, wake;
};

static struct rig rig;
static struct fake_client c; // the first one of most tests

static void wait_for_word(const uint32_t *word, uint32_t value)
{
    while (kvq_word_load_acquire(word) != value)
        sched_yield();
}

// ---- The rig ----

static void rig_open(struct rig *rig, uint32_t workers, uint64_t spin_ns)
{
    char text[KVQ_TEXT_BYTES];
    memset(rig, 0, sizeof *rig);
    rig->page.cpus = 64; // so that spinning is allowed wherever the test runs
    rig->page.awake = 1;
    struct kvq__poller_config config = {.core = &rig->core,
                                        .page = &rig->page,
                                        .workers = workers,
                                        .spin_ns = spin_ns,
                                        .clock = fake_time.item_ns ? fake_clock : NULL};
    assert_int_equal(kvq__poller_open(&config, &rig->poller, text), 0);
}

static void on_complaint(struct kvq__member *member, const char *text)
{
    struct fake_client *c = (struct fake_client *)member;
    strncpy(c->complaint, text, sizeof c->complaint - 1);
    kvq_word_store_release(&c->complaints, c->complaints + 1);
}

static void on_closed(struct kvq__port *port)
{
    struct fake_client *c =
        (struct fake_client *)((char *)port - offsetof(struct fake_client, port));
    kvq_word_store_release(&c->closed, 1);
}

static void add_port(struct kvq__mail *mail)
{
    struct fake_client *c =
        (struct fake_client *)((char *)mail - offsetof(struct fake_client, add));
    char text[KVQ_TEXT_BYTES];
    c->port.member = c->of ? &c->of->member : &c->member;
    if (!c->of) {
        kvq__share_init(&c->member.share);
        c->member.complain = on_complaint;
    }
    c->port.queue = c->queue;
    c->port.req = c->req;
    c->port.cq = c->cq;
    c->port.request_event = c->event;
    c->port.client_wake = c->wake_daemon_side;
    c->port.closed = on_closed;
    assert_int_equal(kvq__port_add(c->rig->poller, &c->port, text), 0);
    kvq_word_store_release(&c->added, 1);
}

static void remove_port(struct kvq__mail *mail)
{
    struct fake_client *c =
        (struct fake_client *)((char *)mail - offsetof(struct fake_client, remove));
    kvq__port_remove(c->rig->poller, &c->port);
}

static void queue_open(struct fake_client *c, struct rig *rig, struct fake_client *of)
{
    int pair[2];
    memset(c, 0, sizeof *c);
    c->rig = rig;
    c->of = of;
    c->queue = fake_queue_new();
    c->req = calloc(1, KVQ_REQ_RING_BYTES);
    c->cq = calloc(1, KVQ_CQ_RING_BYTES);
    c->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    c->wake_daemon_side = pair[0];
    c->wake = pair[1];
    kvq_ring_client_side(c->req, c->cq, &c->tx, &c->rx);
    kvq__mailbox_post(kvq__poller_box(rig->poller), &c->add, add_port);
    wait_for_word(&c->added, 1);
}

static void client_open(struct fake_client *c, struct rig *rig)
{
    queue_open(c, rig, NULL);
}

static void client_free(struct fake_client *c)
{
    assert_true(c->queue->closed);
    fake_queue_free(c->queue);
    free(c->req);
    free(c->cq);
    close(c->event);
    close(c->wake_daemon_side);
    close(c->wake);
}

static void client_close(struct fake_client *c)
{
    kvq__mailbox_post(kvq__poller_box(c->rig->poller), &c->remove, remove_port);
    wait_for_word(&c->closed, 1);
    client_free(c);
}

// The rig with one client.
static void begin(uint32_t workers, uint64_t spin_ns)
{
    rig_open(&rig, workers, spin_ns);
    client_open(&c, &rig);
}

static void end(void)
{
    client_close(&c);
    kvq__poller_close(&rig.poller);
}

// ---- Requests ----

static void wake_poller(struct fake_client *c)
{
    const uint64_t one = 1;
    if (kvq_ring_sleeps(&c->rig->page.poller_sleeping))
        assert_int_equal(write(c->event, &one, sizeof one), sizeof one);
}

// Background work of so many items has begun, which waits at the gate.
static void begin_background(struct fake_client *c, uint32_t items, const uint32_t *gate)
{
    c->rig->core.background_gate = gate;
    kvq_word_store_release(&c->rig->core.background_items, items);
    while (kvq_word_load_acquire(&c->rig->core.background_begun) == 0)
        wake_poller(c);
}

static struct kvq_request make_request(uint8_t op, uint32_t seq, uint32_t layer, uint16_t count)
{
    struct kvq_request r = {.op = op, .seq = seq, .layer = layer, .count = count};
    r.slots = (uint16_t)kvq_request_slots(count, 0);
    return r;
}

static void put_request(struct fake_client *c, const struct kvq_request *r)
{
    uint32_t room;
    assert_int_equal(kvq_ring_room(&c->tx, &room), 0);
    assert_true(room >= r->slots);
    kvq_ring_write(&c->tx, 0, r, sizeof *r);
    for (uint32_t i = 0; i < r->count; i++) {
        struct kvq_entry_wire entry = {.position = r->seq * 1000ull + i, .queries = 1};
        kvq_ring_write(&c->tx, sizeof *r + i * sizeof entry, &entry, sizeof entry);
    }
    kvq_ring_publish(&c->tx, r->slots);
    wake_poller(c);
}

static bool try_completion(struct fake_client *c, struct kvq_completion *out)
{
    uint32_t ready;
    assert_int_equal(kvq_ring_poll(&c->rx, &ready), 0);
    if (ready == 0)
        return false;
    kvq_ring_copy(&c->rx, 0, out, sizeof *out);
    assert_int_equal(out->slots, kvq_completion_slots(out->count));
    assert_true(ready >= out->slots);
    for (uint32_t i = 0; i < out->count; i++) {
        struct kvq_result result;
        kvq_ring_copy(&c->rx, sizeof *out + i * sizeof result, &result, sizeof result);
        assert_int_equal(result.status, 0);
        assert_int_equal(result.value, out->seq * 1000ull + i);
    }
    kvq_ring_consume(&c->rx, out->slots);
    return true;
}

static void await_completion(struct fake_client *c, struct kvq_completion *out)
{
    while (!try_completion(c, out))
        sched_yield();
}

static struct kvq_completion call(struct fake_client *c, uint8_t op, uint32_t seq, uint32_t layer,
                                  uint16_t count)
{
    struct kvq_request r = make_request(op, seq, layer, count);
    struct kvq_completion done; // clients are threads
    put_request(c, &r);
    await_completion(c, &done);
    assert_int_equal(done.seq, seq);
    assert_int_equal(done.status, 0);
    assert_int_equal(done.count, count);
    return done;
}

// ---- Tests ----

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

struct held {
    struct kvq__mail mail; // first
    uint32_t there, gate;
};

static void hold_poller(struct kvq__mail *mail)
{
    struct held *held = (struct held *)mail;
    kvq_word_store_release(&held->there, 1);
    wait_for_word(&held->gate, 1);
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
    rig_open(&rig, 2, 0);
    for (int i = 0; i < 2; i++)
        client_open(&c[i], &rig);
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
    kvq__mailbox_post(kvq__poller_box(rig.poller), &c.remove, remove_port);
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
