// SPDX-License-Identifier: Apache-2.0
//
// The rings of proto/ring.h: wrap-around of slots and indices, a peer that lies about its index,
// both sides wired together, and two threads that sleep for every single message.
// test_ring_model.c tries all interleavings; this file runs on the real CPU.
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "proto/ring.h"
#include "tests/kits/unit.h"

enum { SMALL = 16 };

// A ring of SMALL slots whose indices start anywhere.
struct small {
    uint8_t slots[SMALL * KVQ_SLOT_BYTES];
    uint32_t tail, head;
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
};

static void small_init(struct small *s, uint32_t start)
{
    memset(s, 0, sizeof *s);
    s->tail = s->head = start;
    s->tx = (struct kvq_ring_tx){s->slots, SMALL, start, start, &s->tail, &s->head};
    s->rx = (struct kvq_ring_rx){s->slots, SMALL, start, start, &s->head, &s->tail};
}

static void fill(uint8_t *bytes, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(seed * 31 + i * 7 + (i >> 8));
}

PLAIN_TEST(test_wrap_around)
{
    // The indices themselves wrap past 2^32 on the way.
    static struct small s;
    uint32_t lcg = 1, sent = 0;
    small_init(&s, UINT32_MAX - 500);
    for (int round = 0; round < 3000; round++) {
        lcg = lcg * 1664525 + 1013904223;
        uint32_t slots = 1 + (lcg >> 16) % SMALL, room, ready;
        uint8_t in[SMALL * KVQ_SLOT_BYTES], out[sizeof in];
        size_t bytes = slots * KVQ_SLOT_BYTES, cut = (lcg >> 8) % bytes;
        assert_int_equal(kvq_ring_room(&s.tx, &room), KVQ_OK);
        assert_int_equal(room, SMALL);
        fill(in, bytes, lcg);
        kvq_ring_write(&s.tx, 0, in, cut);
        kvq_ring_write(&s.tx, cut, in + cut, bytes - cut);
        assert_int_equal(kvq_ring_poll(&s.rx, &ready), KVQ_OK);
        assert_int_equal(ready, 0); // not published, not seen
        kvq_ring_publish(&s.tx, slots);
        assert_int_equal(kvq_ring_poll(&s.rx, &ready), KVQ_OK);
        assert_int_equal(ready, slots);
        kvq_ring_copy(&s.rx, cut, out + cut, bytes - cut);
        kvq_ring_copy(&s.rx, 0, out, cut);
        assert_memory_equal(in, out, bytes);
        assert_int_equal(kvq_ring_room(&s.tx, &room), KVQ_OK);
        assert_int_equal(room, SMALL - slots); // read, but not given back
        kvq_ring_consume(&s.rx, slots);
        sent += slots;
    }
    assert_true(sent > 1000);
    assert_true(s.tail < UINT32_MAX - 500);
}

// For every index near the honest ones: taken if and only if honest work could have put it there.
PLAIN_TEST(test_hostile_tail)
{
    static struct small s;
    const uint32_t starts[] = {0, 5, UINT32_MAX - 3, 0x7fffffff};
    for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++) {
        for (int seen = 0; seen <= SMALL; seen++) {
            for (int32_t claim = -2 * SMALL; claim <= 3 * SMALL; claim++) {
                uint32_t ready = 99;
                small_init(&s, starts[i]);
                s.rx.tail = s.rx.head + (uint32_t)seen;
                s.tail = s.rx.head + (uint32_t)claim;
                bool honest = claim >= seen && claim <= SMALL;
                assert_int_equal(kvq_ring_poll(&s.rx, &ready), honest ? 0 : KVQ_E_PROTOCOL);
                assert_int_equal(ready, honest ? claim : 99);
                assert_int_equal(s.rx.tail - s.rx.head, honest ? claim : seen);
            }
        }
        s.rx.tail = s.rx.head;
        s.tail = s.rx.head + 0x80000000u;
        uint32_t ready;
        assert_int_equal(kvq_ring_poll(&s.rx, &ready), KVQ_E_PROTOCOL);
    }
}

PLAIN_TEST(test_hostile_head)
{
    static struct small s;
    const uint32_t starts[] = {0, 5, UINT32_MAX - 3, 0x7fffffff};
    for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++) {
        for (int filled = 0; filled <= SMALL; filled++) {
            for (int32_t claim = -2 * SMALL; claim <= 2 * SMALL; claim++) {
                uint32_t room = 99;
                small_init(&s, starts[i]);
                s.tx.tail = starts[i] + (uint32_t)filled;
                s.head = starts[i] + (uint32_t)claim;
                bool honest = claim >= 0 && claim <= filled;
                assert_int_equal(kvq_ring_room(&s.tx, &room), honest ? 0 : KVQ_E_PROTOCOL);
                assert_int_equal(room, honest ? SMALL - filled + claim : 99);
            }
        }
    }
}

// What the peer writes after the copy does not reach it, and the peer cannot move our own index.
PLAIN_TEST(test_own_index_is_private)
{
    static struct small s;
    uint32_t word = 7, got, room, ready;
    small_init(&s, 0);
    assert_int_equal(kvq_ring_room(&s.tx, &room), KVQ_OK);
    kvq_ring_write(&s.tx, 0, &word, sizeof word);
    s.tail = 12345; // the consumer scribbles over the producer's word
    kvq_ring_publish(&s.tx, 1);
    assert_int_equal(s.tail, 1);
    assert_int_equal(kvq_ring_poll(&s.rx, &ready), KVQ_OK);
    kvq_ring_copy(&s.rx, 0, &got, sizeof got);
    memset(s.slots, 0xff, sizeof s.slots);
    assert_int_equal(got, 7);
    s.head = 999;
    kvq_ring_consume(&s.rx, 1);
    assert_int_equal(s.head, 1);
}

PLAIN_TEST(test_both_sides_meet)
{
    struct kvq_req_page *req = calloc(1, KVQ_REQ_RING_BYTES);
    struct kvq_cq_page *cq = calloc(1, KVQ_CQ_RING_BYTES);
    struct kvq_ring_tx client_tx, daemon_tx;
    struct kvq_ring_rx client_rx, daemon_rx;
    uint32_t n;
    assert_non_null(req);
    assert_non_null(cq);
    kvq_ring_client_side(req, cq, &client_tx, &client_rx);
    kvq_ring_daemon_side(req, cq, &daemon_rx, &daemon_tx);
    for (uint32_t round = 0; round < 3 * KVQ_REQ_SLOTS / KVQ_REQ_MAX_SLOTS; round++) {
        struct kvq_request request = {.seq = round, .slots = KVQ_REQ_MAX_SLOTS}, seen;
        struct kvq_completion done = {.seq = round, .slots = KVQ_CQ_MAX_SLOTS}, back;
        assert_int_equal(kvq_ring_room(&client_tx, &n), KVQ_OK);
        assert_int_equal(n, KVQ_REQ_SLOTS);
        kvq_ring_write(&client_tx, 0, &request, sizeof request);
        kvq_ring_publish(&client_tx, request.slots);
        assert_int_equal(kvq_ring_poll(&daemon_rx, &n), KVQ_OK);
        assert_int_equal(n, KVQ_REQ_MAX_SLOTS);
        kvq_ring_copy(&daemon_rx, 0, &seen, sizeof seen);
        kvq_ring_consume(&daemon_rx, seen.slots);
        assert_int_equal(seen.seq, round);
        assert_int_equal(kvq_ring_room(&daemon_tx, &n), KVQ_OK);
        assert_int_equal(n, KVQ_CQ_SLOTS);
        kvq_ring_write(&daemon_tx, 0, &done, sizeof done);
        kvq_ring_publish(&daemon_tx, done.slots);
        assert_int_equal(kvq_ring_poll(&client_rx, &n), KVQ_OK);
        kvq_ring_copy(&client_rx, 0, &back, sizeof back);
        kvq_ring_consume(&client_rx, back.slots);
        assert_int_equal(back.seq, round);
    }
    free(req);
    free(cq);
}

PLAIN_TEST(test_spin_rule)
{
    struct kvq_daemon_page page = {.cpus = 4, .awake = 2};
    kvq_ring_set_runnable(&page, 2);
    assert_true(kvq_ring_may_spin(&page));
    kvq_ring_set_runnable(&page, 3);
    assert_false(kvq_ring_may_spin(&page));
    kvq_ring_set_runnable(&page, UINT32_MAX); // must not wrap around to a small number
    assert_false(kvq_ring_may_spin(&page));
}

// ---- Two threads that sleep for every message ----

enum { TRIPS = 20000 };

struct side {
    struct small *in, *out;
    uint32_t *own_flag;
    const uint32_t *peer_flag;
    int own_event, peer_event;
    uint32_t sleeps;
};

static void sleep_for_message(struct side *me)
{
    uint32_t ready;
    uint64_t count;
    kvq_ring_sleep_begin(me->own_flag);
    if (kvq_ring_poll(&me->in->rx, &ready) == KVQ_OK && ready == 0) {
        struct pollfd p = {.fd = me->own_event, .events = POLLIN};
        me->sleeps++;
        while (poll(&p, 1, -1) < 0 && errno == EINTR)
            ;
        if (read(me->own_event, &count, sizeof count) < 0 && errno != EAGAIN)
            abort();
    }
    kvq_ring_sleep_end(me->own_flag);
}

static void send_message(struct side *me, uint32_t value)
{
    uint32_t room;
    uint8_t bytes[3 * KVQ_SLOT_BYTES];
    fill(bytes, sizeof bytes, value);
    if (kvq_ring_room(&me->out->tx, &room) || room < 3)
        abort();
    kvq_ring_write(&me->out->tx, 0, bytes, sizeof bytes);
    kvq_ring_publish(&me->out->tx, 3);
    if (kvq_ring_sleeps(me->peer_flag) && write(me->peer_event, &(uint64_t){1}, 8) != 8)
        abort();
}

static void receive_message(struct side *me, uint32_t value)
{
    uint8_t bytes[3 * KVQ_SLOT_BYTES], want[sizeof bytes];
    uint32_t ready;
    while (kvq_ring_poll(&me->in->rx, &ready) == KVQ_OK && ready == 0)
        sleep_for_message(me);
    if (ready != 3)
        abort();
    kvq_ring_copy(&me->in->rx, 0, bytes, sizeof bytes);
    kvq_ring_consume(&me->in->rx, 3);
    fill(want, sizeof want, value);
    if (memcmp(bytes, want, sizeof want) != 0)
        abort();
}

static void *echo(void *arg)
{
    for (uint32_t i = 0; i < TRIPS; i++) {
        receive_message(arg, i);
        send_message(arg, ~i);
    }
    return NULL;
}

PLAIN_TEST(test_no_wake_up_is_lost)
{
    static struct small forth, back;
    static uint32_t flags[2];
    int events[2] = {eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC),
                     eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    struct side here = {&back, &forth, &flags[0], &flags[1], events[0], events[1], 0};
    struct side there = {&forth, &back, &flags[1], &flags[0], events[1], events[0], 0};
    pthread_t thread;
    small_init(&forth, UINT32_MAX - TRIPS);
    small_init(&back, 0);
    assert_int_equal(pthread_create(&thread, NULL, echo, &there), 0);
    alarm(50); // a lost wake-up would wait for ever: end loudly instead
    for (uint32_t i = 0; i < TRIPS; i++) {
        send_message(&here, i);
        receive_message(&here, ~i);
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    alarm(0);
    close(events[0]);
    close(events[1]);
    assert_true(here.sleeps + there.sleeps > 0);
}

// ---- Two threads without a system call between them ----

enum { STREAMED = 30000 };

static void *stream(void *arg)
{
    struct kvq_ring_tx *tx = arg;
    for (uint32_t i = 0; i < STREAMED;) {
        uint8_t bytes[KVQ_SLOT_BYTES];
        uint32_t room = 0;
        if (kvq_ring_room(tx, &room))
            abort();
        if (room == 0)
            sched_yield();
        for (; room > 0 && i < STREAMED; room--, i++) {
            fill(bytes, sizeof bytes, i);
            kvq_ring_write(tx, 0, bytes, sizeof bytes);
            kvq_ring_publish(tx, 1);
        }
    }
    return NULL;
}

// The bytes are ordered by the indices alone: ThreadSanitizer would see it if they were not.
PLAIN_TEST(test_stream)
{
    static struct small s;
    pthread_t thread;
    small_init(&s, 0);
    assert_int_equal(pthread_create(&thread, NULL, stream, &s.tx), 0);
    for (uint32_t i = 0; i < STREAMED;) {
        uint8_t bytes[KVQ_SLOT_BYTES], want[KVQ_SLOT_BYTES];
        uint32_t ready = 0;
        assert_int_equal(kvq_ring_poll(&s.rx, &ready), KVQ_OK);
        if (ready == 0)
            sched_yield();
        for (; ready > 0; ready--, i++) {
            kvq_ring_copy(&s.rx, 0, bytes, sizeof bytes);
            kvq_ring_consume(&s.rx, 1);
            fill(want, sizeof want, i);
            assert_memory_equal(bytes, want, sizeof want);
        }
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
