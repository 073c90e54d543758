// SPDX-License-Identifier: Apache-2.0
//
// Ends of steps in the engine's own context that fail: which of them leave the step open, to be
// tried again, and which end it.
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/limits.h"
#include "tests/client/local_kit.h"
#include "tests/client/own_clock.h"

enum { LAYERS = 3, KV_HEADS = 2, DIM = 64 };

static void open_local(void)
{
    struct kvq_local_options o = {
        .size = sizeof o, .max_tokens = 2048, .flags = KVQ_LOCAL_REQUIRE, .threads = 1};
    fine(kvq_local_open(rig.queue, &o, &rig.local));
}

// ---- Ends that are refused ----

static void test_refused_ends(void **state)
{
    struct local_model m;
    (void)state;
    open_local();
    local_model(&m, 2, 4, KV_HEADS, DIM);
    struct kvq_entry e = {.session = local_open_small("a", 0, 2), .append = 3, .queries = 1};
    struct kvq_work w = local_small_work(&m, 0);
    fine(kvq_local_add(rig.local, e.session));
    fine(kvq_local_begin(rig.local, &e, 1));
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    fine(e.status);
    // A layer is lacking.
    fine(kvq_local_end(rig.local, NULL, &e, 1));
    assert_int_not_equal(e.status, 0);
    fine(local_small_step(rig.local, &e, 2, 3));
    assert_int_equal(e.value, 3);
    // An attend has failed for one of two.
    struct kvq_entry two[2] = {e,
                               {.session = local_open_small("b", 0, 2), .append = 3, .queries = 1}};
    fine(kvq_local_add(rig.local, two[1].session));
    two[0].position = 3;
    fine(kvq_local_begin(rig.local, two, 2));
    for (uint32_t i = 0; i < 2; i++) {
        w = local_small_work(&m, i);
        two[1].q_row = i ? 1 : 1 << 20;
        fine(kvq_local_attend(rig.local, &w, two, 2));
    }
    fine(kvq_local_end(rig.local, NULL, two, 2));
    refused(KVQ_E_INCOMPLETE, two[1].status, "entry 1");
    assert_int_equal(two[0].value, 6);
    // Given twice, differently.
    w = local_small_work(&m, 0);
    e.position = 6;
    fine(kvq_local_begin(rig.local, &e, 1));
    w.k.offset += 4096;
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    w.k.offset = 0;
    fine(kvq_local_attend(rig.local, &w, &e, 1));
    refused(KVQ_E_INVALID, kvq_local_end(rig.local, NULL, &e, 1), "given twice");
    struct kvq_tensor k[2] = {w.k, w.k}, v[2] = {w.v, w.v};
    const struct kvq_step_work said = {.k = k, .v = v, .n_layers = 2};
    fine(kvq_local_end(rig.local, &said, &e, 1));
    fine(e.status);
    // What the daemon alone can see, at the end.
    e.position = e.value;
    *(uint32_t *)kvq_buffer_data(rig.buffer) = 0x7fc00000;
    refused(KVQ_E_NONFINITE, local_small_step(rig.local, &e, 2, 1), "NaN");
    *(uint32_t *)kvq_buffer_data(rig.buffer) = 0;
    fine(local_small_step(rig.local, &e, 2, 1));
}

// ---- Ends that may be tried again ----

enum { IDS_AT = 8 << 20, HOGS = 1024 };

// A step of sessions of one layer, up to its end.
static void unended_step(struct kvq_entry *entries, uint32_t n)
{
    struct local_model m;
    local_model(&m, 1, 4, KV_HEADS, DIM);
    for (uint32_t i = 0; i < n; i++) {
        entries[i].append = 3;
        entries[i].queries = 1;
        entries[i].row = 3 * i;
        entries[i].q_row = i;
    }
    const struct kvq_work w = local_small_work(&m, 0);
    fine(kvq_local_begin(rig.local, entries, n));
    fine(kvq_local_attend(rig.local, &w, entries, n));
    for (uint32_t i = 0; i < n; i++)
        fine(entries[i].status);
}

static int end_with_ids(struct kvq_entry *entries, uint32_t n, uint64_t offset)
{
    const struct kvq_step_work work = {.ids = {rig.buffer, offset}};
    for (uint32_t i = 0; i < n; i++)
        entries[i].q_row = 3 * i;
    return kvq_local_end(rig.local, &work, entries, n);
}

// Opens sessions until there is no room for the tables of another. How many.
static uint32_t open_hogs(kvq_session *hogs)
{
    struct local_model m;
    local_model(&m, 1, 4, KV_HEADS, DIM);
    const struct kvq_session_options o = {
        .size = sizeof o, .format = "oscar2", .layers = m.rows, .n_layers = 1};
    uint32_t n = 0;
    int rc;
    while ((rc = kvq_session_open(rig.client, &o, &hogs[n], NULL)) == 0)
        assert_true(++n < HOGS);
    refused(KVQ_E_QUOTA, rc, "table");
    return n;
}

// Of two sessions one has no room for its ids: it stays in the step, and ends when there is room.
static void ends_again(const char *first, const char *second)
{
    static kvq_session hogs[HOGS];
    struct kvq_entry e[2] = {{.session = local_open_small(first, 0, 1)},
                             {.session = local_open_small(second, 0, 1)}};
    struct kvq_local_options o = {.size = sizeof o, .max_tokens = 2048};
    fine(kvq_local_open(rig.queue, &o, &rig.local));
    fine(kvq_local_add(rig.local, e[0].session));
    fine(kvq_local_add(rig.local, e[1].session));
    unended_step(&e[1], 1); // it gets room for more ids than these
    fine(end_with_ids(&e[1], 1, IDS_AT));
    fine(e[1].status);
    e[1].position = 3;
    unended_step(e, 2);
    uint32_t n = open_hogs(hogs);
    fine(end_with_ids(e, 2, IDS_AT));
    refused(KVQ_E_QUOTA, e[0].status, "entry 0");
    fine(e[1].status);
    assert_int_equal(e[1].value, 6);
    refused(KVQ_E_BUSY, kvq_local_begin(rig.local, e, 1), "still open");
    for (uint32_t i = 0; i < n; i++)
        fine(kvq_session_close(rig.client, hogs[i]));
    fine(end_with_ids(e, 1, IDS_AT));
    fine(e[0].status);
    assert_int_equal(e[0].value, 3);
    kvq_local_close(&rig.local);
}

// Two sessions of which K and V of both layers come with the end alone, and one has no room for its
// ids: it ends when there is room, from the same `work`, whatever of that the daemon has already.
static void ends_again_with_all(const char *first, const char *second)
{
    static kvq_session hogs[HOGS];
    struct local_model m;
    struct kvq_tensor kv[2];
    struct kvq_entry e[2] = {{.session = local_open_small(first, 0, 2), .append = 3},
                             {.session = local_open_small(second, 0, 2), .append = 3, .row = 3}};
    const struct kvq_step_work work = {
        .k = kv, .v = kv, .n_layers = 2, .ids = {rig.buffer, IDS_AT}};
    struct kvq_local_options o = {.size = sizeof o, .max_tokens = 2048};
    local_model(&m, 2, 4, KV_HEADS, DIM);
    for (uint32_t i = 0; i < 2; i++)
        kv[i] = local_small_work(&m, i).k;
    fine(kvq_local_open(rig.queue, &o, &rig.local));
    for (uint32_t i = 0; i < 2; i++)
        fine(kvq_local_add(rig.local, e[i].session));
    fine(kvq_local_begin(rig.local, &e[1], 1)); // it gets room for more ids than these
    fine(kvq_local_end(rig.local, &work, &e[1], 1));
    fine(e[1].status);
    e[1].position = 3;
    fine(kvq_local_begin(rig.local, e, 2));
    uint32_t n = open_hogs(hogs);
    for (uint32_t i = 0; i < 2; i++) {
        fine(kvq_local_end(rig.local, &work, e, 2 - i));
        refused(KVQ_E_QUOTA, e[0].status, "entry 0");
    }
    fine(e[1].status);
    for (uint32_t i = 0; i < n; i++)
        fine(kvq_session_close(rig.client, hogs[i]));
    fine(kvq_local_end(rig.local, &work, e, 1));
    fine(e[0].status);
    assert_int_equal(e[0].value, 3);
    kvq_local_close(&rig.local);
}

static int narrow_setup(void **state)
{
    static const char *const narrow[] = {
        "--pool-bytes",   "256mb", "--extent-bytes", "2mb", "--workers", "1",
        "--client-bytes", "256mb", "--table-bytes",  "1mb", NULL};
    const char *const *flags = rig.daemon.flags;
    rig.daemon.flags = narrow;
    int rc = local_setup(state);
    rig.daemon.flags = flags;
    return rc;
}

static void test_ends_again(void **state)
{
    (void)state;
    ends_again("a", "b");
    setenv("KVQ_LOCAL", "daemon", 1);
    ends_again("c", "d");
    unsetenv("KVQ_LOCAL");
}

static void test_ends_again_with_all(void **state)
{
    (void)state;
    ends_again_with_all("a", "b");
    setenv("KVQ_LOCAL", "daemon", 1);
    ends_again_with_all("c", "d");
    unsetenv("KVQ_LOCAL");
}

// An end that may not be tried again is the step's end for the daemon, too.
static void test_ends_for_both(void **state)
{
    (void)state;
    setenv("KVQ_LOCAL", "daemon", 1);
    struct kvq_local_options o = {.size = sizeof o, .max_tokens = 2048};
    struct kvq_entry e = {.session = local_open_small("a", 0, 1)};
    fine(kvq_local_open(rig.queue, &o, &rig.local));
    unsetenv("KVQ_LOCAL");
    fine(kvq_local_add(rig.local, e.session));
    unended_step(&e, 1);
    fine(end_with_ids(&e, 1, LOCAL_BUFFER - 4)); // one id of three
    assert_int_equal(e.status, KVQ_E_BOUNDS);
    unended_step(&e, 1);
    fine(end_with_ids(&e, 1, IDS_AT));
    fine(e.status);
    assert_int_equal(e.value, 3);
}

// Sessions without an entry at the end are out of the step for the daemon, too, though all tickets
// of the queue are open; and all sessions are behind an abort.
static void test_ends_without_tickets(void **state)
{
    kvq_ticket tickets[KVQ_QUEUE_CREDITS];
    (void)state;
    setenv("KVQ_LOCAL", "daemon", 1);
    struct kvq_local_options o = {.size = sizeof o, .max_tokens = 2048};
    struct kvq_entry e[2] = {{.session = local_open_small("a", 0, 1)},
                             {.session = local_open_small("b", 0, 1)}};
    fine(kvq_local_open(rig.queue, &o, &rig.local));
    unsetenv("KVQ_LOCAL");
    for (uint32_t i = 0; i < 2; i++)
        fine(kvq_local_add(rig.local, e[i].session));
    for (uint32_t aborts = 0; aborts < 2; aborts++) {
        e[0].append = aborts ? 3 : 0;
        e[1].append = 3;
        fine(kvq_local_begin(rig.local, e, 2));
        for (uint32_t i = 0; i < KVQ_QUEUE_CREDITS; i++)
            fine(kvq_submit(rig.queue, KVQ_DO_NOP, NULL, NULL, 0, &tickets[i]));
        if (aborts)
            kvq_local_abort(rig.local);
        else
            fine(kvq_local_end(rig.local, NULL, e, 1)); // which has only read
        for (uint32_t i = 0; i < KVQ_QUEUE_CREDITS; i++)
            fine(kvq_wait(rig.queue, tickets[i], UINT64_MAX));
        unended_step(e, 2);
        fine(end_with_ids(e, 2, IDS_AT));
        for (uint32_t i = 0; i < 2; i++) {
            fine(e[i].status);
            assert_int_equal(e[i].value, e[i].position + 3);
            e[i].position = e[i].value;
        }
    }
}

// ---- A daemon that is stopped ----

enum { SOME = 200 }; // with a second packet for each there would be more than a socket takes

static uint64_t waited_ms(void)
{
    return own_clock.now_ns / 1000000;
}

// Closes a kvq_local of n sessions while the daemon is stopped, and lets the daemon go on.
static void close_many_stopped(kvq_session *sessions, int n)
{
    char name[8];
    open_local();
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof name, "s%d", i);
        sessions[i] = local_open_small(name, 0, 1);
        fine(kvq_local_add(rig.local, sessions[i]));
    }
    assert_int_equal(kill(rig.daemon.pid, SIGSTOP), 0);
    own_clock = (struct own_clock){.on = true, .skips = UINT32_MAX};
    kvq_local_close(&rig.local);
    own_clock.on = false;
    assert_int_equal(kill(rig.daemon.pid, SIGCONT), 0);
    assert_int_equal(waited_ms(), 20000); // what the rig's client waits
}

// However many sessions a kvq_local has, closing it waits for the daemon once; the daemon hears of
// all of them when it goes on.
static void test_closes_before_a_stopped_daemon(void **state)
{
    kvq_session sessions[SOME];
    (void)state;
    close_many_stopped(sessions, SOME);
    assert_int_equal(own_clock.waited_ms[0], 20000);
    open_local();
    for (int i = 0; i < SOME; i++)
        fine(kvq_local_add(rig.local, sessions[i]));
    // A client that leaves tells of none.
    assert_int_equal(kill(rig.daemon.pid, SIGSTOP), 0);
    own_clock = (struct own_clock){.on = true, .skips = UINT32_MAX};
    kvq_disconnect(&rig.client);
    rig.local = NULL; // it went with the client
    own_clock.on = false;
    assert_int_equal(kill(rig.daemon.pid, SIGCONT), 0);
    assert_int_equal(own_clock.n, 1); // for the end of the connection
    assert_int_equal(waited_ms(), 20000);
}

// More closes than the connection takes do not end it.
static void test_closes_that_fill_the_connection(void **state)
{
    enum { MANY = 2 * SOME, MOST_TOLD = 240 };
    struct kvq_session_info info = {.size = sizeof info};
    kvq_session sessions[MANY];
    uint32_t closed = 0;
    (void)state;
    close_many_stopped(sessions, MANY);
    fine(kvq_session_info(rig.client, sessions[0], &info));
    // No more were told than have room for their replies, besides the one that was waited for.
    open_local();
    for (int i = 0; i < MANY; i++)
        closed += kvq_local_add(rig.local, sessions[i]) == KVQ_OK;
    assert_int_equal(closed, 1 + MOST_TOLD);
    fine(kvq_session_close(rig.client, sessions[MANY - 1]));
}

// ---- Beside a call that takes long ----

static struct {
    sem_t waits, goes_on;
} closing;

static void stand_still(void)
{
    sem_post(&closing.waits);
    sem_wait(&closing.goes_on);
}

static void go_on(void)
{
    sem_post(&closing.goes_on);
}

static void *close_buffer(void *arg)
{
    kvq_buffer *buffer = arg;
    own_wait = stand_still;
    kvq_buffer_close(&buffer);
    return NULL;
}

// A session is out for the daemon, too, when the call that takes it out returns.
static void test_removes_beside_a_call_that_takes_long(void **state)
{
    kvq_buffer *buffer;
    pthread_t other;
    (void)state;
    open_local();
    kvq_session session = local_open_small("a", 0, 1);
    fine(kvq_local_add(rig.local, session));
    fine(kvq_buffer_create(rig.client, 4096, &buffer));
    sem_init(&closing.waits, 0, 0);
    sem_init(&closing.goes_on, 0, 0);
    assert_int_equal(pthread_create(&other, NULL, close_buffer, buffer), 0);
    sem_wait(&closing.waits);
    own_turn_wait = go_on;
    own_clock = (struct own_clock){.on = true}; // at 0: any deadline would be over
    fine(kvq_local_remove(rig.local, session));
    own_clock.on = false;
    if (own_turn_wait)
        go_on();
    pthread_join(other, NULL);
    assert_null(own_turn_wait); // it has waited
    fine(kvq_local_add(rig.local, session));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_refused_ends, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_ends_again, narrow_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_ends_again_with_all, narrow_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_ends_for_both, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_ends_without_tickets, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_closes_before_a_stopped_daemon, local_setup,
                                        local_teardown),
        cmocka_unit_test_setup_teardown(test_closes_that_fill_the_connection, local_setup,
                                        local_teardown),
        cmocka_unit_test_setup_teardown(test_removes_beside_a_call_that_takes_long, local_setup,
                                        local_teardown),
    };
    local_prepare(LAYERS, KV_HEADS, DIM);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return local_cleanup() || failed;
}
