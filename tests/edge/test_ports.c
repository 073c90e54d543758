// SPDX-License-Identifier: Apache-2.0
//
// Warm and cold ports: that a turn looks at few of many idle ones, that none waits longer than
// promised, and that the poller serves cold ports as it does warm ones.
#include "daemon/runtime/ports.h"
#include "proto/sync.h"
#include "tests/edge/poller_kit.h"
#include "tests/kits/unit.h"

enum { MANY = 1000 };

static struct kvq__ports ports;
static struct kvq__member member[MANY];
static struct kvq__port port[MANY];
static uint32_t tail[MANY];

// So many cold ports, each of a client of its own.
static void open_cold(uint32_t n)
{
    memset(member, 0, sizeof member);
    memset(port, 0, sizeof port);
    memset(tail, 0, sizeof tail);
    kvq__ports_init(&ports);
    for (uint32_t i = 0; i < n; i++) {
        port[i].member = &member[i];
        port[i].rx.shared_tail = &tail[i];
        kvq__ports_join(&ports, &port[i]);
        kvq__ports_cool(&ports, &port[i]);
    }
    assert_int_equal(ports.n_cold, n);
    assert_true(TAILQ_EMPTY(&ports.members));
}

static bool is_cold(uint32_t i)
{
    return port[i].cold != UINT32_MAX;
}

// How many cold ports a turn looks at that begins so long after the one before.
static uint32_t looks_after(uint64_t ns)
{
    open_cold(MANY);
    for (uint32_t i = 0; i < MANY; i++)
        tail[i] = 1; // each is seen where it is looked at
    kvq__ports_sweep(&ports, ns);
    return MANY - ports.n_cold;
}

PLAIN_TEST(test_looks_of_a_turn)
{
    assert_int_equal(looks_after(0), KVQ__COLD_LOOKS);
    assert_int_equal(looks_after(KVQ__COLD_NS / 100), KVQ__COLD_LOOKS);
    assert_int_equal(looks_after(KVQ__COLD_NS / 10), MANY / 10);
    assert_int_equal(looks_after(KVQ__COLD_NS - 1), MANY);
    assert_int_equal(looks_after(KVQ__COLD_NS), MANY);
    assert_int_equal(looks_after(UINT64_MAX), MANY);
    open_cold(0);
    kvq__ports_sweep(&ports, 1);
    open_cold(3);
    tail[2] = 1;
    kvq__ports_sweep(&ports, 1);
    assert_int_equal(ports.n_cold, 2);
    assert_false(is_cold(2));
}

// Whatever ports become warm and cold meanwhile, and however turns are cut, one with a request is
// found within the time.
PLAIN_TEST(test_no_cold_port_is_missed)
{
    uint32_t seed = 1;
    uint64_t now = 0;
    open_cold(MANY);
    for (uint32_t round = 0; round < 2000; round++) {
        uint32_t one = (seed = seed * 1664525 + 1013904223) % MANY;
        kvq__ports_warm(&ports, &port[one]);
        kvq__ports_cool(&ports, &port[one]);
        tail[one]++;
        for (uint64_t end = now + KVQ__COLD_NS; now < end;) {
            seed = seed * 1664525 + 1013904223;
            uint64_t turn = KVQ__COLD_NS / (1 + (seed >> 16) % 12);
            now = now + turn < end ? now + turn : end;
            kvq__ports_sweep(&ports, now);
            for (uint32_t k = 0; k < seed >> 28; k++) {
                uint32_t other = ((seed >> 8) + 37 * k) % MANY;
                if (other == one)
                    continue;
                kvq__ports_warm(&ports, &port[other]);
                if (k % 2)
                    kvq__ports_cool(&ports, &port[other]);
            }
        }
        assert_false(is_cold(one));
        port[one].rx.head = tail[one];
        for (uint32_t i = 0; i < MANY; i++)
            if (!is_cold(i))
                kvq__ports_cool(&ports, &port[i]);
    }
}

// A client's warm ports take turns; the rest of its ports, and clients without warm ones, are not
// in the way.
PLAIN_TEST(test_warm_ports_of_a_client)
{
    memset(member, 0, sizeof member);
    memset(port, 0, sizeof port);
    kvq__ports_init(&ports);
    for (uint32_t i = 0; i < 6; i++) {
        port[i].member = &member[i / 3];
        port[i].rx.shared_tail = &tail[i];
        kvq__ports_join(&ports, &port[i]);
    }
    assert_true(kvq__ports_after(&port[2]) == &port[0]);
    kvq__ports_cool(&ports, &port[0]);
    assert_true(member[0].next == &port[1] && member[0].n_warm == 2 && member[0].n_ports == 3);
    assert_true(kvq__ports_after(&port[2]) == &port[1]);
    for (uint32_t i = 3; i < 6; i++)
        kvq__ports_cool(&ports, &port[i]);
    assert_true(!member[1].next && TAILQ_FIRST(&ports.members) == &member[0]);
    assert_true(!TAILQ_NEXT(&member[0], link));
    kvq__ports_warm_member(&ports, &member[1]);
    assert_true(member[1].n_warm == 3 && TAILQ_NEXT(&member[0], link) == &member[1]);
    for (uint32_t i = 0; i < 6; i++) {
        kvq__ports_warm(&ports, &port[i]);
        kvq__ports_leave(&ports, &port[i]);
    }
    assert_true(ports.n == 0 && ports.n_cold == 0 && TAILQ_EMPTY(&ports.members));
}

// ---- The poller ----

enum { QUEUES = 300 };

static struct fake_client clients[QUEUES];

// Requests of cold queues are taken, one by one and all at once, awake and asleep. Time stands
// still, so that a queue is cold until its first request and then warm.
PLAIN_TEST(test_cold_queues_are_served)
{
    struct kvq_completion done;
    for (uint32_t spin = 0; spin < 2; spin++) {
        fake_time = (struct fake_time){.still = true, .now = 1};
        rig_open(&rig, 1, spin ? 1000000 : 0);
        for (uint32_t i = 0; i < QUEUES; i++)
            client_open(&clients[i], &rig);
        for (uint32_t i = 0; i < QUEUES; i += 3)
            call(&clients[i], KVQ_OP_NOP, i, 0, 1);
        for (uint32_t i = 0; i < QUEUES; i++) {
            struct kvq_request r = make_request(KVQ_OP_NOP, i, 0, 1);
            put_request(&clients[i], &r);
        }
        for (uint32_t i = 0; i < QUEUES; i++)
            await_completion(&clients[i], &done);
        for (uint32_t i = 0; i < QUEUES; i++)
            client_close(&clients[i]);
        kvq__poller_close(&rig.poller);
    }
    fake_time.still = false;
}

// A request that came while the poller was awake, into a queue that is not due for a look: the
// poller finds it before it sleeps. It sleeps in the turn after that with the mail at the earliest.
PLAIN_TEST(test_cold_queues_before_sleep)
{
    struct kvq_completion done;
    fake_time = (struct fake_time){.still = true, .now = 1};
    rig_open(&rig, 1, 0);
    for (uint32_t i = 0; i < QUEUES; i++)
        client_open(&clients[i], &rig);
    for (uint32_t i = 0; i < QUEUES; i++) {
        struct held held = {0};
        struct kvq_request r = make_request(KVQ_OP_NOP, i, 0, 1);
        kvq__mailbox_post(kvq__poller_box(rig.poller), &held.mail, hold_poller);
        wait_for_word(&held.there, 1);
        uint32_t turns = rig.core.turns;
        put_request(&clients[i], &r);
        kvq_word_store_release(&held.gate, 1);
        await_completion(&clients[i], &done);
        assert_in_range(clients[i].queue->done_turn - turns, 1, 3);
    }
    for (uint32_t i = 0; i < QUEUES; i++)
        client_close(&clients[i]);
    kvq__poller_close(&rig.poller);
    fake_time.still = false;
}

// A client that breaks the rules on one queue: what the others gave to GPUs is ended, too.
PLAIN_TEST(test_cold_queues_of_a_broken_client)
{
    struct fake_client *bad = clients;
    fake_time = (struct fake_time){.still = true, .now = 1000000000};
    rig_open(&rig, 1, 0);
    for (uint32_t i = 0; i < 3; i++)
        queue_open(&bad[i], &rig, i ? bad : NULL);
    call(&bad[1], KVQ_OP_NOP, 1, 0, 0); // the first and the last one stay cold
    kvq_ring_publish(&bad[1].tx, 1);    // less than a request
    wake_poller(&bad[1]);
    wait_for_word(&bad[0].complaints, 1);
    for (uint32_t i = 0; i < 3; i++)
        wait_for_word(&bad[i].queue->endings, 1);
    for (uint32_t i = 3; i-- > 0;)
        client_close(&bad[i]);
    kvq__poller_close(&rig.poller);
    fake_time.still = false;
}

int main(void)
{
    setenv("CMOCKA_TEST_ABORT", "1", 1); // as in test_poller
    return run_all(NULL, NULL);
}
