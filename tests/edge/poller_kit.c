// SPDX-License-Identifier: Apache-2.0
//
// See poller_kit.h.
#include "tests/edge/poller_kit.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/sync.h"
#include "tests/kits/unit.h"

struct rig rig;
struct fake_client c;

void wait_for_word(const uint32_t *word, uint32_t value)
{
    while (kvq_word_load_acquire(word) != value)
        sched_yield();
}

// ---- The rig ----

void rig_open(struct rig *rig, uint32_t workers, uint64_t spin_ns)
{
    char text[KVQ_TEXT_BYTES];
    memset(rig, 0, sizeof *rig);
    rig->page.cpus = 64; // so that spinning is allowed wherever the test runs
    rig->page.awake = 1;
    struct kvq__poller_config config = {.core = &rig->core,
                                        .page = &rig->page,
                                        .workers = workers,
                                        .spin_ns = spin_ns,
                                        .clock = fake_time.item_ns || fake_time.still ? fake_clock
                                                                                      : NULL};
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

void queue_open(struct fake_client *c, struct rig *rig, struct fake_client *of)
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

void client_open(struct fake_client *c, struct rig *rig)
{
    queue_open(c, rig, NULL);
}

void client_free(struct fake_client *c)
{
    assert_true(c->queue->closed);
    fake_queue_free(c->queue);
    free(c->req);
    free(c->cq);
    close(c->event);
    close(c->wake_daemon_side);
    close(c->wake);
}

void client_leave(struct fake_client *c)
{
    kvq__mailbox_post(kvq__poller_box(c->rig->poller), &c->remove, remove_port);
}

void client_close(struct fake_client *c)
{
    client_leave(c);
    wait_for_word(&c->closed, 1);
    client_free(c);
}

void begin(uint32_t workers, uint64_t spin_ns)
{
    rig_open(&rig, workers, spin_ns);
    client_open(&c, &rig);
}

void end(void)
{
    client_close(&c);
    kvq__poller_close(&rig.poller);
}

// ---- Requests ----

void wake_poller(struct fake_client *c)
{
    const uint64_t one = 1;
    if (kvq_ring_sleeps(&c->rig->page.poller_sleeping))
        assert_int_equal(write(c->event, &one, sizeof one), sizeof one);
}

void begin_background(struct fake_client *c, uint32_t items, const uint32_t *gate)
{
    c->rig->core.background_gate = gate;
    kvq_word_store_release(&c->rig->core.background_items, items);
    while (kvq_word_load_acquire(&c->rig->core.background_begun) == 0)
        wake_poller(c);
}

struct kvq_request make_request(uint8_t op, uint32_t seq, uint32_t layer, uint16_t count)
{
    struct kvq_request r = {.op = op, .seq = seq, .layer = layer, .count = count};
    r.slots = (uint16_t)kvq_request_slots(count, 0);
    return r;
}

void put_request(struct fake_client *c, const struct kvq_request *r)
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

bool try_completion(struct fake_client *c, struct kvq_completion *out)
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

void await_completion(struct fake_client *c, struct kvq_completion *out)
{
    while (!try_completion(c, out))
        sched_yield();
}

struct kvq_completion call(struct fake_client *c, uint8_t op, uint32_t seq, uint32_t layer,
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

void hold_poller(struct kvq__mail *mail)
{
    struct held *held = (struct held *)mail;
    kvq_word_store_release(&held->there, 1);
    wait_for_word(&held->gate, 1);
}
