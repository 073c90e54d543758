// SPDX-License-Identifier: Apache-2.0
//
// libkvq's rings and in-context mode against a daemon that misbehaves at every place where it
// could: each call ends with the right code and a text, nothing hangs, no descriptor is left open.
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/internal.h"
#include "kernels/layout.h"
#include "proto/limits.h"
#include "proto/wire.h"
#include "tests/client/client_kit.h"
#include "tests/client/own_clock.h"

// ---- The rings ----

struct rig {
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_queue *queue;
    struct kvq_entry entries[KVQ_MAX_BATCH];
};

static void rig_up(struct rig *r, enum fake_ring ring, uint32_t cpus)
{
    struct fake_script s = fake_good();
    s.ring = ring;
    s.cpus = cpus; // 0: nobody spins; many: everybody may
    memset(r->entries, 0, sizeof r->entries);
    assert_int_equal(connect_to(s, 0, &r->daemon, &r->client), KVQ_OK);
    assert_int_equal(kvq_queue_open(r->client, &r->queue), KVQ_OK);
}

static void rig_down(struct rig *r)
{
    kvq_queue_close(&r->queue);
    kvq_disconnect(&r->client);
    fake_stop(&r->daemon);
}

static const uint32_t few_and_many_cpus[] = {0, 1000};

static void test_answers(void **unused)
{
    (void)unused;
    static struct rig r;
    const uint32_t sizes[] = {0, 1, 2, 3, 4, 5, 31, 32, 33, 64, 65, 1023, KVQ_MAX_BATCH};
    for (int c = 0; c < 2; c++) {
        rig_up(&r, FAKE_ANSWER, few_and_many_cpus[c]);
        for (int round = 0; round < 20; round++) { // both rings wrap around several times
            for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                memset(r.entries, 0, sizeof r.entries);
                assert_int_equal(kvq_nop(r.queue, r.entries, sizes[i]), KVQ_OK);
                for (uint32_t e = 0; e < sizes[i]; e++) {
                    assert_int_equal(r.entries[e].status, e % 2 ? KVQ_E_POSITION : KVQ_OK);
                    assert_int_equal(r.entries[e].value, 77);
                }
                for (uint32_t e = sizes[i]; e < KVQ_MAX_BATCH; e++)
                    assert_int_equal(r.entries[e].value, 0);
                if (sizes[i] > 1)
                    expect_text("holds 77 tokens");
            }
        }
        rig_down(&r);
    }
}

// Steps are as long as their layers and entries say, wherever the ring's end is.
static void test_steps_of_all_sizes(void **unused)
{
    (void)unused;
    static struct rig r;
    static struct kvq_tensor none[KVQ_MAX_LAYERS + 1];
    const uint32_t sizes[] = {1, 2, 3, 33, KVQ_MAX_BATCH};
    struct kvq_step_work w = {.k = none, .v = none};
    rig_up(&r, FAKE_ANSWER, 4);
    for (uint32_t round = 0; round < 100; round++) {
        w.n_layers = 1 + round * 7 % KVQ_MAX_LAYERS;
        uint32_t n = sizes[round % 5];
        memset(r.entries, 0, sizeof r.entries);
        assert_int_equal(kvq_step(r.queue, &w, r.entries, n), KVQ_OK);
        for (uint32_t e = 0; e < KVQ_MAX_BATCH; e++)
            assert_int_equal(r.entries[e].value, e < n ? 77 : 0);
    }
    assert_int_equal(kvq_step(r.queue, &w, r.entries, 0), KVQ_E_INVALID);
    assert_int_equal(kvq_step(r.queue, NULL, r.entries, 1), KVQ_E_INVALID);
    w.n_layers = KVQ_MAX_LAYERS + 1;
    assert_int_equal(kvq_step(r.queue, &w, r.entries, 1), KVQ_E_SHAPE);
    expect_text("257");
    w.n_layers = 0;
    assert_int_equal(kvq_step(r.queue, &w, r.entries, 1), KVQ_E_SHAPE);
    w = (struct kvq_step_work){.k = none, .n_layers = 1};
    assert_int_equal(kvq_step(r.queue, &w, r.entries, 1), KVQ_E_INVALID);
    w = (struct kvq_step_work){.k = none, .v = none, .n_layers = 1, .pages.page_tokens = 16};
    assert_int_equal(kvq_step(r.queue, &w, r.entries, 1), KVQ_E_BUFFER);
    expect_text("list");
    rig_down(&r);
}

static void test_calls_that_cannot_be(void **unused)
{
    (void)unused;
    static struct rig r;
    uint64_t step, tokens[1] = {5};
    kvq_ticket ticket;
    struct kvq_work work = {.flags = 2};
    rig_up(&r, FAKE_ANSWER, 0);
    assert_int_equal(kvq_nop(r.queue, r.entries, KVQ_MAX_BATCH + 1), KVQ_E_LIMIT);
    expect_text("1025");
    expect_text("1024");
    assert_int_equal(kvq_nop(r.queue, NULL, 1), KVQ_E_INVALID);
    assert_int_equal(kvq_nop(NULL, r.entries, 1), KVQ_E_INVALID);
    assert_int_equal(kvq_step_begin(r.queue, r.entries, 0, &step), KVQ_E_INVALID);
    assert_int_equal(kvq_attend(r.queue, &work, r.entries, 1), KVQ_E_INVALID);
    expect_text("0x2");
    work = (struct kvq_work){0};
    assert_int_equal(kvq_attend(r.queue, &work, r.entries, 1), KVQ_E_BUFFER);
    expect_text("q");
    assert_int_equal(kvq_append(r.queue, NULL, r.entries, 1), KVQ_E_INVALID);
    assert_int_equal(kvq_truncate(r.queue, r.entries, tokens, 1), KVQ_E_INVALID);
    expect_text("to 5 tokens, but the session has 0");
    assert_int_equal(kvq_submit(r.queue, (enum kvq_operation)99, NULL, r.entries, 1, &ticket),
                     KVQ_E_INVALID);
    expect_text("99");
    assert_int_equal(kvq_submit(r.queue, KVQ_DO_STEP, NULL, r.entries, 1, &ticket), KVQ_E_INVALID);
    expect_text("kvq_step");
    assert_int_equal(kvq_wait(r.queue, 0, 0), KVQ_E_INVALID);
    assert_int_equal(kvq_wait(r.queue, 4242, 0), KVQ_E_INVALID);
    rig_down(&r);
}

// Every lie on the ring ends with KVQ_E_PROTOCOL, and the queue stays shut after it.
static void test_lies_on_the_ring(void **unused)
{
    (void)unused;
    static struct rig r;
    const enum fake_ring lies[] = {FAKE_WRONG_SEQ,       FAKE_WRONG_COUNT, FAKE_WRONG_SLOTS,
                                   FAKE_POSITIVE_STATUS, FAKE_TAIL_FAR,    FAKE_TWICE,
                                   FAKE_TAIL_BACK,       FAKE_HEAD_AHEAD,  FAKE_POSITIVE_RESULT};
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        rig_up(&r, lies[i], few_and_many_cpus[i % 2]);
        int rc = KVQ_OK;
        for (int call = 0; call < 3 && rc == KVQ_OK; call++) // some show at the next call only
            rc = kvq_nop(r.queue, r.entries, 3);
        assert_int_equal(rc, KVQ_E_PROTOCOL);
        expect_text("kvq_reattach");
        assert_int_equal(kvq_nop(r.queue, r.entries, 3), KVQ_E_PROTOCOL);
        rig_down(&r);
    }
}

// A connection that closes ends the wait, asleep and spinning. No hang is the point: the test
// program's time limit is what would end it.
static void test_death_while_waiting(void **unused)
{
    (void)unused;
    static struct rig r;
    for (int c = 0; c < 2; c++) {
        rig_up(&r, FAKE_CLOSE, few_and_many_cpus[c]);
        assert_int_equal(kvq_nop(r.queue, r.entries, 2), KVQ_E_DISCONNECTED);
        assert_int_equal(r.entries[0].status, KVQ_E_DISCONNECTED);
        assert_int_equal(r.entries[1].status, KVQ_E_DISCONNECTED);
        expect_text("kvq_reattach");
        assert_int_equal(kvq_nop(r.queue, r.entries, 2), KVQ_E_DISCONNECTED);
        rig_down(&r);
        // What was published before the end still counts.
        rig_up(&r, FAKE_LAST_WORD, few_and_many_cpus[c]);
        assert_int_equal(kvq_nop(r.queue, r.entries, 1), KVQ_OK);
        assert_int_equal(kvq_nop(r.queue, r.entries, 1), KVQ_E_DISCONNECTED);
        rig_down(&r);
    }
}

// With spinning asked for without end the socket is still looked at.
static void test_death_while_spinning(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    struct kvq_connect_options options = {
        .size = sizeof options, .runtime_dir = client_dir, .spin_us = UINT32_MAX};
    struct kvq_entry entry = {0};
    kvq_client *client;
    kvq_queue *queue;
    s.ring = FAKE_CLOSE;
    s.cpus = 1000;
    daemon = fake_start(client_dir, &s);
    assert_int_equal(kvq_connect(&options, &client), KVQ_OK);
    assert_int_equal(kvq_queue_open(client, &queue), KVQ_OK);
    assert_int_equal(kvq_nop(queue, &entry, 1), KVQ_E_DISCONNECTED);
    kvq_disconnect(&client);
    fake_stop(&daemon);
}

// ---- Tickets ----

static void test_tickets(void **unused)
{
    (void)unused;
    static struct rig r;
    kvq_ticket tickets[9];
    rig_up(&r, FAKE_SILENT, 0);
    for (int i = 0; i < 8; i++)
        assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, &r.entries[i], 1, &tickets[i]), 0);
    assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, r.entries, 1, &tickets[8]),
                     KVQ_E_CREDITS);
    expect_text("8 tickets");
    assert_int_equal(kvq_wait(r.queue, tickets[3], 0), KVQ_E_DEADLINE);
    assert_int_equal(kvq_wait(r.queue, tickets[3], 1000000), KVQ_E_DEADLINE);
    expect_text("stays open");
    fake_stop(&r.daemon);
    for (int i = 7; i >= 0; i--) // whoever only polls learns of the end as well
        assert_int_equal(kvq_wait(r.queue, tickets[i], 0), KVQ_E_DISCONNECTED);
    assert_int_equal(kvq_wait(r.queue, tickets[3], 0), KVQ_E_INVALID);
    kvq_disconnect(&r.client);
}

// An abort needs no ticket, and leaves those that are open alone; it waits while the daemon has as
// many requests as it takes.
static void test_abort_without_tickets(void **unused)
{
    (void)unused;
    static struct rig r;
    kvq_ticket tickets[KVQ_QUEUE_CREDITS], none;
    for (uint32_t round = 0; round < 2; round++) {
        rig_up(&r, round ? FAKE_CLOSE : FAKE_ANSWER, 0);
        for (uint32_t i = 0; i < KVQ_QUEUE_CREDITS; i++)
            assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, &r.entries[i], 1, &tickets[i]),
                             0);
        assert_int_equal(kvq_step_abort(r.queue, 1, &r.entries[KVQ_QUEUE_CREDITS], 1),
                         round ? KVQ_E_DISCONNECTED : KVQ_OK);
        assert_int_equal(r.entries[KVQ_QUEUE_CREDITS].value, round ? 0 : 77);
        assert_int_equal(r.queue->seq, KVQ_QUEUE_CREDITS + !round); // requests that were sent
        assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, r.entries, 1, &none),
                         round ? KVQ_E_DISCONNECTED : KVQ_E_CREDITS);
        for (uint32_t i = 0; i < KVQ_QUEUE_CREDITS; i++)
            assert_int_equal(kvq_wait(r.queue, tickets[i], UINT64_MAX),
                             round ? KVQ_E_DISCONNECTED : KVQ_OK);
        assert_int_equal(kvq_step_abort(r.queue, 1, NULL, 0), round ? KVQ_E_DISCONNECTED : KVQ_OK);
        rig_down(&r);
    }
}

// The system refuses to wait: the ticket ends and so does the queue, for an answer that came later
// would be written to entries that the caller has given up.
static void test_no_waiting(void **unused)
{
    (void)unused;
    static struct rig r;
    kvq_ticket ticket;
    rig_up(&r, FAKE_SILENT, 0);
    assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, r.entries, 1, &ticket), KVQ_OK);
    own_wait_fails = true;
    assert_int_equal(kvq_wait(r.queue, ticket, UINT64_MAX), KVQ_E_SYSTEM);
    own_wait_fails = false;
    expect_text("cannot wait for the daemon");
    assert_int_equal(r.entries[0].status, KVQ_E_SYSTEM);
    assert_int_equal(kvq_wait(r.queue, ticket, 0), KVQ_E_INVALID);
    assert_int_equal(kvq_nop(r.queue, r.entries + 1, 1), KVQ_E_SYSTEM);
    rig_down(&r);
}

static void test_completions_out_of_order(void **unused)
{
    (void)unused;
    static struct rig r;
    kvq_ticket first, second;
    rig_up(&r, FAKE_REVERSED, 0);
    assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, r.entries, 4, &first), KVQ_OK);
    assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, r.entries + 8, 2, &second), KVQ_OK);
    assert_int_not_equal(first, second);
    assert_int_equal(kvq_wait(r.queue, first, UINT64_MAX), KVQ_OK);
    assert_int_equal(kvq_wait(r.queue, second, 0), KVQ_OK);
    assert_int_equal(r.entries[3].value, 77);
    assert_int_equal(r.entries[9].status, KVQ_E_POSITION);
    assert_int_equal(kvq_wait(r.queue, first, 0), KVQ_E_INVALID);
    rig_down(&r);
}

// ---- Another daemon in the same place ----

static void test_reattach(void **unused)
{
    (void)unused;
    static struct rig r;
    struct fake_script s = fake_good();
    struct kvq_daemon_info info = {.size = sizeof info};
    kvq_ticket ticket;
    uint32_t lost = 99;
    rig_up(&r, FAKE_SILENT, 0);
    assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, r.entries, 1, &ticket), KVQ_OK);
    fake_stop(&r.daemon);
    assert_int_equal(kvq_reattach(r.client, &lost), KVQ_E_NO_DAEMON);
    assert_int_equal(kvq_nop(r.queue, r.entries + 1, 1), KVQ_E_DISCONNECTED);
    assert_int_equal(kvq_session_close(r.client, 1), KVQ_E_DISCONNECTED);
    r.daemon =
        fake_start(client_dir, &s); // the same epoch: the same run, as far as a client can see
    assert_int_equal(kvq_reattach(r.client, &lost), KVQ_OK);
    assert_int_equal(lost, 0);
    assert_int_equal(kvq_wait(r.queue, ticket, UINT64_MAX), KVQ_E_CANCELLED);
    assert_int_equal(r.entries[0].status, KVQ_E_CANCELLED);
    assert_int_equal(kvq_nop(r.queue, r.entries, 1), KVQ_OK);
    fake_stop(&r.daemon);
    s.epoch = 4712;
    s.queue_fds = 3; // half of the way
    r.daemon = fake_start(client_dir, &s);
    assert_int_equal(kvq_nop(r.queue, r.entries, 1), KVQ_E_DISCONNECTED);
    assert_int_equal(kvq_reattach(r.client, NULL), KVQ_E_PROTOCOL);
    fake_stop(&r.daemon);
    s.queue_fds = 4;
    r.daemon = fake_start(client_dir, &s);
    assert_int_equal(kvq_reattach(r.client, NULL), KVQ_E_EPOCH);
    expect_text("restarted");
    assert_int_equal(kvq_daemon_info(r.client, &info), KVQ_OK);
    assert_int_equal(info.epoch, 4712);
    assert_int_equal(kvq_nop(r.queue, r.entries, 1), KVQ_OK);
    // A ticket that is open when the new daemon is there already.
    fake_stop(&r.daemon);
    s.ring = FAKE_SILENT;
    r.daemon = fake_start(client_dir, &s);
    assert_int_equal(kvq_reattach(r.client, NULL), KVQ_OK);
    assert_int_equal(kvq_submit(r.queue, KVQ_DO_NOP, NULL, r.entries, 1, &ticket), KVQ_OK);
    fake_stop(&r.daemon);
    r.daemon = fake_start(client_dir, &s);
    assert_int_equal(kvq_reattach(r.client, NULL), KVQ_OK);
    assert_int_equal(kvq_wait(r.queue, ticket, UINT64_MAX), KVQ_E_CANCELLED);
    assert_int_equal(r.entries[0].status, KVQ_E_CANCELLED);
    rig_down(&r);
}

// ---- Without a daemon ----

// ---- In-context mode ----

struct local_rig {
    struct rig r;
    kvq_local *local;
    kvq_session session;
};

// What kvq_local_open says of a daemon with this script; the rest of the way, if it says nothing.
static int local_up(struct local_rig *l, struct fake_script script, uint32_t flags)
{
    const struct kvq_local_options o = {.size = sizeof o, .max_tokens = 1024, .flags = flags};
    const struct kvq_session_options so = {.size = sizeof so, .format = "f16"};
    uint32_t timeout_ms = script.late_first ? 500 : 2000;
    assert_int_equal(connect_to(script, timeout_ms, &l->r.daemon, &l->r.client), KVQ_OK);
    assert_int_equal(kvq_queue_open(l->r.client, &l->r.queue), KVQ_OK);
    int rc = kvq_local_open(l->r.queue, &o, &l->local);
    if (rc)
        return rc;
    assert_int_equal(kvq_session_open(l->r.client, &so, &l->session, NULL), KVQ_OK);
    rc = kvq_local_add(l->local, l->session);
    if (rc || kvq_local_why(l->local))
        return rc;
    struct kvq_entry entry = {.session = l->session, .position = 77};
    return kvq_local_begin(l->local, &entry, 1);
}

static void local_down(struct local_rig *l)
{
    kvq_local_close(&l->local);
    kvq_disconnect(&l->r.client);
    fake_stop(&l->r.daemon);
}

// It goes through the daemon and says so, or is refused if that was not wanted.
static void expect_through(struct fake_script s, const char *words)
{
    static struct local_rig l;
    int before = client_fds();
    assert_int_equal(local_up(&l, s, 0), KVQ_OK);
    assert_non_null(kvq_local_why(l.local));
    if (!strstr(kvq_local_why(l.local), words))
        fail_msg("\"%s\" lacks \"%s\"", kvq_local_why(l.local), words);
    local_down(&l);
    assert_int_equal(local_up(&l, s, KVQ_LOCAL_REQUIRE), KVQ_E_UNSUPPORTED);
    expect_text(words);
    local_down(&l);
    assert_int_equal(client_fds(), before);
}

static void test_other_versions(void **unused)
{
    (void)unused;
    static struct local_rig l;
    struct fake_script s = fake_good();
    unsetenv("KVQ_LOCAL");
    assert_int_equal(local_up(&l, s, KVQ_LOCAL_REQUIRE), KVQ_OK);
    local_down(&l);
    s.isa = "sve2";
    expect_through(s, "sve2");
    s = fake_good();
    s.layout = KVQ_LAYOUT_ID + 1;
    expect_through(s, "layout 3");
    s = fake_good();
    s.tables = 9;
    expect_through(s, "version 9");
    s = fake_good();
    s.pool_status = KVQ_E_UNSUPPORTED;
    expect_through(s, "opening a pool");
    s = fake_good();
    s.codec = 77; // a format of a later version
    expect_through(s, "does not know a format");
}

// Extents that the daemon tells of too late are in no later reply of a daemon that does not tell of
// them again: a page table may name them, so the mode ends. With others it goes on.
static void test_late_extents(void **unused)
{
    (void)unused;
    static struct local_rig l;
    int before = client_fds();
    for (int again = 0; again < 2; again++) {
        struct fake_script s = fake_good();
        s.late_first = true;
        s.late_command = KVQ__REQUEST__COMMAND_MAP_EXTENTS;
        s.extents = s.extent_fds = 1;
        s.tells_again = again;
        assert_int_equal(local_up(&l, s, KVQ_LOCAL_REQUIRE), KVQ_E_DEADLINE);
        expect_text("500 ms");
        int rc = kvq_local_add(l.local, l.session);
        assert_int_equal(rc, again ? KVQ_OK : KVQ_E_SYSTEM);
        if (!again)
            expect_text("could not be mapped earlier");
        assert_int_equal(fake_cancels(l.r.daemon), 1);
        local_down(&l);
        assert_int_equal(client_fds(), before);
    }
}

// In-context mode up to its session, which is not taken in.
static void open_local(struct local_rig *l, struct fake_script script)
{
    const struct kvq_local_options o = {
        .size = sizeof o, .max_tokens = 1024, .flags = KVQ_LOCAL_REQUIRE};
    const struct kvq_session_options so = {.size = sizeof so, .format = "f16"};
    assert_int_equal(connect_to(script, 500, &l->r.daemon, &l->r.client), KVQ_OK);
    assert_int_equal(kvq_queue_open(l->r.client, &l->r.queue), KVQ_OK);
    assert_int_equal(kvq_local_open(l->r.queue, &o, &l->local), KVQ_OK);
    assert_int_equal(kvq_session_open(l->r.client, &so, &l->session, NULL), KVQ_OK);
}

// Extents whose descriptors do not fit are given back, and told of again when there is room. With a
// daemon that does not tell of them again the mode ends, and goes on saying why. Those that cannot
// be mapped are given back as well.
static void test_lost_extents(void **unused)
{
    (void)unused;
    enum { INFO, TABLE, EXTENTS, PACKETS };
    static struct local_rig l;
    int before = client_fds();
    for (int again = 0; again < 2; again++) {
        struct fake_script s = fake_good();
        s.extents = s.extent_fds = 1;
        s.tells_again = again;
        open_local(&l, s);
        own_loss = PACKETS;
        assert_int_equal(kvq_local_add(l.local, l.session), KVQ_E_SYSTEM);
        assert_int_equal(own_loss, 0);
        expect_text("ulimit -n");
        int rc = kvq_local_add(l.local, l.session);
        assert_int_equal(rc, again ? KVQ_OK : KVQ_E_SYSTEM);
        if (!again) {
            expect_text("could not be mapped earlier");
            expect_text("ulimit -n");
        }
        assert_int_equal(fake_cancels(l.r.daemon), 1);
        local_down(&l);
        assert_int_equal(client_fds(), before);
    }
    struct fake_script s = fake_good();
    s.extents = s.extent_fds = 2; // the second one has an impossible number
    open_local(&l, s);
    assert_int_equal(kvq_local_add(l.local, l.session), KVQ_E_PROTOCOL);
    assert_int_equal(kvq_session_close(l.r.client, l.session), KVQ_OK);
    assert_int_equal(fake_cancels(l.r.daemon), 1);
    local_down(&l);
    assert_int_equal(client_fds(), before);
}

// ---- In-context mode beside a save ----

static void *save(void *arg)
{
    const struct local_rig *l = arg;
    return (void *)(intptr_t)kvq_session_save(l->r.client, l->session);
}

// A step's end maps what is new, and a session is taken in, while another thread saves.
static void test_local_beside_a_save(void **unused)
{
    (void)unused;
    static struct local_rig l;
    kvq_buffer *buffer;
    pthread_t saver;
    void *saved;
    int before = client_fds();
    struct fake_script s = fake_good();
    s.saves = s.buffers = true;
    s.step_extents = 9;
    open_local(&l, s);
    assert_int_equal(kvq_buffer_create(l.r.client, 4096, &buffer), KVQ_OK);
    struct kvq_tensor kv = kvq_tensor_make(buffer, 0, 1, 64, KVQ_DTYPE_F16);
    const struct kvq_step_work work = {.k = &kv, .v = &kv, .n_layers = 1};
    struct kvq_entry e = {.session = l.session, .position = 77, .append = 1};
    assert_int_equal(pthread_create(&saver, NULL, save, &l), 0);
    fake_await_save(l.r.daemon);
    assert_int_equal(kvq_local_add(l.local, l.session), KVQ_OK);
    assert_int_equal(kvq_local_begin(l.local, &e, 1), KVQ_OK);
    assert_int_equal(kvq_local_end(l.local, &work, &e, 1), KVQ_OK);
    assert_int_equal(e.status, KVQ_OK);
    assert_int_equal(kvq_local_begin(l.local, &e, 1), KVQ_OK); // all is mapped
    fake_end_save(l.r.daemon);
    pthread_join(saver, &saved);
    assert_int_equal((intptr_t)saved, KVQ_OK);
    kvq_buffer_close(&buffer);
    local_down(&l);
    assert_int_equal(client_fds(), before);
}

// Where the daemon takes no further connection a save has the client's own. Where the daemon is
// gone, a restore says so.
static void test_saves_without_another_connection(void **unused)
{
    (void)unused;
    static struct local_rig l;
    pthread_t saver;
    void *saved;
    int before = client_fds();
    struct fake_script s = fake_good();
    s.saves = true;
    s.other_hello_status = KVQ_E_LIMIT;
    open_local(&l, s);
    assert_int_equal(pthread_create(&saver, NULL, save, &l), 0);
    fake_await_save(l.r.daemon);
    fake_end_save(l.r.daemon);
    pthread_join(saver, &saved);
    assert_int_equal((intptr_t)saved, KVQ_OK);
    fake_stop(&l.r.daemon);
    assert_int_equal(kvq_session_restore(l.r.client, NULL, "s", 0, 0), KVQ_E_DISCONNECTED);
    expect_text("kvq_reattach");
    kvq_local_close(&l.local);
    kvq_disconnect(&l.r.client);
    assert_int_equal(client_fds(), before);
}

// A session that is on its way to its place is waited for, but no longer than the client waits.
static void test_local_of_a_moving_session(void **unused)
{
    (void)unused;
    static struct local_rig l;
    struct fake_script s = fake_good();
    s.moving = 3;
    assert_int_equal(local_up(&l, s, KVQ_LOCAL_REQUIRE), KVQ_OK);
    local_down(&l);
    s.moving = UINT32_MAX;
    assert_int_equal(local_up(&l, s, KVQ_LOCAL_REQUIRE), KVQ_E_BUSY);
    local_down(&l);
}

static void expect_nonsense(struct fake_script s, const char *words)
{
    static struct local_rig l;
    int before = client_fds();
    assert_int_equal(local_up(&l, s, 0), KVQ_E_PROTOCOL);
    expect_text(words);
    local_down(&l);
    assert_int_equal(client_fds(), before);
}

// Pools, tables and extents that make no sense are errors, and nothing else.
static void test_local_nonsense(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
#define NONSENSE(field, value, words)                                                              \
    s = fake_good();                                                                               \
    s.field = value;                                                                               \
    expect_nonsense(s, words)
    NONSENSE(span, 0, "0 bytes");
    NONSENSE(span, (8 << 21) + 1, "extents of");
    NONSENSE(span, UINT64_MAX / 2, "its pool has");
    NONSENSE(extent_bytes, 4096, "extents of 4096");
    NONSENSE(pool_fds, 1, "descriptor");
    NONSENSE(table_magic, 1, "mark 0x1");
    NONSENSE(table_version, 7, "version 7");
    NONSENSE(table_layers, 2, "2 layers");
    NONSENSE(table_pages, 9, "9 pages");
    NONSENSE(table_bytes, 512, "512 bytes");
    NONSENSE(table_tokens, 1025, "count of tokens is 1025");
    NONSENSE(table_tokens, 76, "for 76 tokens");
    NONSENSE(layer_pages, 2, "count of pages is 2");
    NONSENSE(repeat, 2, "more than 1 layers");
    NONSENSE(repeat, 0, "tells of 0 layers");
    NONSENSE(source, 5, "reads layer 4");
    NONSENSE(extents, 1, "1 extents and 0 descriptors");
    s = fake_good();
    s.extents = s.extent_fds = 2;
    expect_nonsense(s, "extent 99");
    s = fake_good(); // times its bytes, the number is 0 in 64 bits
    s.span = s.extent_bytes = UINT64_C(1) << 36;
    s.extent = 1 << 28;
    s.extents = s.extent_fds = 1;
    expect_nonsense(s, "extent 268435456");
#undef NONSENSE
}

// An extent may have several times the bytes that numbers count, as far as the pool goes.
static void test_local_extents(void **unused)
{
    (void)unused;
    static struct local_rig l;
    struct fake_script s = fake_good();
    s.extents = s.extent_fds = 1;
    s.extent = 2;
    s.extent_memory = 6 << 21; // the pool has eight times 2 MiB
    assert_int_equal(local_up(&l, s, KVQ_LOCAL_REQUIRE), KVQ_OK);
    local_down(&l);
    s.extent_memory = 7 << 21;
    expect_nonsense(s, "extent 2 of 14680064 bytes");
    s.extent_memory = 3 << 20;
    expect_nonsense(s, "extent 2 of 3145728 bytes");
    s.extent_memory = 1 << 20;
    expect_nonsense(s, "extent");
}

// An append that failed for want of memory at the end of a step is made again by the next end.
static void test_local_appends_again(void **unused)
{
    (void)unused;
    static struct local_rig l;
    struct fake_script s = fake_good();
    struct kvq_tensor kv[2];
    kvq_buffer *buffer;
    int before = client_fds();
    s.ring = FAKE_NO_ROOM;
    s.buffers = true;
    setenv("KVQ_LOCAL", "daemon", 1);
    assert_int_equal(local_up(&l, s, 0), KVQ_OK);
    unsetenv("KVQ_LOCAL");
    assert_non_null(kvq_local_why(l.local));
    assert_int_equal(kvq_buffer_create(l.r.client, 4096, &buffer), KVQ_OK);
    kv[0] = kv[1] = kvq_tensor_make(buffer, 0, 1, 64, KVQ_DTYPE_F32);
    const struct kvq_step_work work = {.k = kv, .v = kv, .n_layers = 2};
    struct kvq_entry entry = {.session = l.session, .position = 77, .append = 1};
    assert_int_equal(kvq_local_begin(l.local, &entry, 1), KVQ_OK);
    assert_int_equal(entry.status, KVQ_OK);
    assert_int_equal(kvq_local_end(l.local, &work, &entry, 1), KVQ_OK);
    assert_int_equal(entry.status, KVQ_E_QUOTA);
    assert_int_equal(fake_appends(l.r.daemon), 1); // of two layers
    assert_int_equal(kvq_local_end(l.local, &work, &entry, 1), KVQ_OK);
    assert_int_equal(entry.status, KVQ_OK);
    assert_int_equal(fake_appends(l.r.daemon), 3);
    local_down(&l);
    assert_int_equal(client_fds(), before);
}

static void test_merge(void **unused)
{
    (void)unused;
    float a[4] = {1, 2, NAN, NAN}, b[4] = {5, 6, 7, 8}, out[4], lse[2];
    float lse_a[2] = {logf(3), -INFINITY}, lse_b[2] = {0, 1};
    kvq_merge_states(a, lse_a, b, lse_b, out, lse, 2, 2);
    assert_true(fabsf(out[0] - 2) < 1e-6f && fabsf(out[1] - 3) < 1e-6f);
    assert_true(fabsf(lse[0] - logf(4)) < 1e-6f);
    assert_true(out[2] == 7 && out[3] == 8 && lse[1] == 1); // exactly: a side without keys
    kvq_merge_states(b, lse_b, a, lse_a, b, lse_b, 2, 2);   // onto an input
    assert_memory_equal(b, out, sizeof out);
    assert_memory_equal(lse_b, lse, sizeof lse);
    float none[2] = {-INFINITY, -INFINITY};
    kvq_merge_states(a, none, a, none, out, lse, 2, 2);
    assert_true(out[2] == 0 && lse[0] == -INFINITY);
    float far[2] = {1000, 1000}, near[2] = {-1000, -1000};
    float x[4] = {1, 1, 1, 1}, y[4] = {2, 2, 2, 2};
    kvq_merge_states(x, far, y, near, out, lse, 2, 2);
    assert_true(out[0] == 1 && lse[0] == 1000);
    float any[4] = {NAN, NAN, INFINITY, INFINITY}; // of a side whose weight is too small for fp32
    kvq_merge_states(x, far, any, near, out, lse, 2, 2);
    assert_true(out[0] == 1 && out[2] == 1 && lse[0] == 1000);
}

static void test_texts(void **unused)
{
    (void)unused;
    for (int code = KVQ_E_NO_NAMESPACE; code <= 0; code++)
        assert_string_not_equal(kvq_strerror(code), "unknown status");
    assert_string_equal(kvq_strerror(KVQ_E_NO_NAMESPACE - 1), "unknown status");
    assert_string_equal(kvq_strerror(1), "unknown status");
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", KVQ_VERSION_MAJOR, KVQ_VERSION_MINOR,
             KVQ_VERSION_PATCH);
    assert_string_equal(kvq_version(), version);
}

static void *own_text(void *seen)
{
    *(bool *)seen = *kvq_error_text() == 0;
    return NULL;
}

static void test_text_is_of_the_thread(void **unused)
{
    (void)unused;
    bool empty_elsewhere = false;
    pthread_t thread;
    assert_int_equal(kvq_nop(NULL, NULL, 0), KVQ_E_INVALID);
    assert_int_equal(pthread_create(&thread, NULL, own_text, &empty_elsewhere), 0);
    pthread_join(thread, NULL);
    assert_true(empty_elsewhere);
    expect_text("queue");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_steps_of_all_sizes),
        cmocka_unit_test(test_calls_that_cannot_be),
        cmocka_unit_test(test_lies_on_the_ring),
        cmocka_unit_test(test_death_while_waiting),
        cmocka_unit_test(test_death_while_spinning),
        cmocka_unit_test(test_tickets),
        cmocka_unit_test(test_abort_without_tickets),
        cmocka_unit_test(test_no_waiting),
        cmocka_unit_test(test_completions_out_of_order),
        cmocka_unit_test(test_reattach),
        cmocka_unit_test(test_other_versions),
        cmocka_unit_test(test_late_extents),
        cmocka_unit_test(test_lost_extents),
        cmocka_unit_test(test_local_beside_a_save),
        cmocka_unit_test(test_saves_without_another_connection),
        cmocka_unit_test(test_local_of_a_moving_session),
        cmocka_unit_test(test_local_nonsense),
        cmocka_unit_test(test_local_extents),
        cmocka_unit_test(test_local_appends_again),
        cmocka_unit_test(test_merge),
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_text_is_of_the_thread),
    };
    client_prepare();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    client_cleanup();
    return failed != 0;
}
