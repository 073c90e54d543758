// SPDX-License-Identifier: Apache-2.0
//
// Events on their way to those who ask: their numbers, and what happens when they come faster than
// the loop takes them.
#include "daemon/runtime/events.h"

#include "daemon/log/log.h"
#include "daemon/runtime/history.h"
#include "daemon/runtime/server.h"
#include "tests/kits/unit.h"

static struct kvq__server server;
static uint64_t told; // events, by the core

static void nobody_sleeps(void *context)
{
}

static int setup(void **state)
{
    memset(&server, 0, sizeof server);
    server.history = calloc(1, sizeof *server.history);
    assert_non_null(server.history);
    kvq__mailbox_open(&server.box, nobody_sleeps, NULL);
    told = 0;
    return 0;
}

static int teardown(void **state)
{
    assert_true(kvq__events_idle());
    kvq__mailbox_close(&server.box);
    free(server.history);
    return 0;
}

static void tell(enum kvq__event_kind kind, uint32_t times)
{
    for (uint32_t i = 0; i < times; i++) {
        told++;
        const struct kvq__event event = {
            .kind = kind, .client = told, .ns = "uid-1", .session = "it", .text = ""};
        kvq__event_from_core(&server, &event);
    }
}

// How many are kept behind that number; each has the number that it happened as.
static uint32_t count_kept(uint64_t after)
{
    static uint8_t memory[1 << 16];
    struct kvq_arena arena;
    uint32_t n = 0;
    for (uint64_t at = kvq__history_first(server.history, after); at <= server.history->last;
         at = kvq__history_first(server.history, at)) {
        kvq_arena_init(&arena, memory, sizeof memory);
        const Kvq__Event *event = kvq__history_get(server.history, at, &arena);
        assert_non_null(event);
        assert_int_equal(event->number, at);
        assert_int_equal(event->client, at);
        n++;
    }
    return n;
}

// ---- Tests ----

TEST(test_in_time)
{
    for (int i = 0; i < 10; i++) {
        tell(KVQ__EVENT_SESSION_OPENED, 100);
        kvq__mailbox_deliver(&server.box);
    }
    assert_int_equal(server.history->last, 1000);
    assert_int_equal(count_kept(0), KVQ__HISTORY_EVENTS);
    assert_int_equal(count_kept(990), 10);
    assert_int_equal(count_kept(1000), 0);
}

// What is dropped leaves a gap, where it happened; warnings are dropped last.
TEST(test_too_fast)
{
    tell(KVQ__EVENT_SESSION_OPENED, 300);
    tell(KVQ__EVENT_STORAGE_FAILED, 3);
    tell(KVQ__EVENT_SESSION_OPENED, 20);
    kvq__mailbox_deliver(&server.box);
    assert_int_equal(server.history->last, 303);
    uint32_t kept = count_kept(0);
    assert_int_equal(count_kept(300), 3); // all warnings
    assert_true(kept > 3 && kept < 300);
    assert_int_equal(kvq__history_first(server.history, kept - 3), 301);
    tell(KVQ__EVENT_SESSION_OPENED, 1);
    kvq__mailbox_deliver(&server.box);
    assert_int_equal(server.history->last, 324);
    assert_int_equal(kvq__history_first(server.history, 303), 324);
    assert_int_equal(count_kept(0), kept + 1);
    tell(KVQ__EVENT_STORAGE_FAILED, 300); // more than there is room for
    kvq__mailbox_deliver(&server.box);
    tell(KVQ__EVENT_STORAGE_FAILED, 1);
    kvq__mailbox_deliver(&server.box);
    assert_int_equal(server.history->last, told);
    assert_true(count_kept(324) < 301);
}

// Details are told at their level alone, and in the log alone; they leave half of the room to
// others, and nobody misses those for which there was none.
TEST(test_details)
{
    tell(KVQ__EVENT_REQUEST_REFUSED, 3);
    kvq__mailbox_deliver(&server.box);
    assert_int_equal(server.history->last, 0);
    char text[KVQ_TEXT_BYTES];
    assert_int_equal(kvq__log_open("/dev/null", KVQ_LOG_DEBUG, text), 0);
    tell(KVQ__EVENT_REQUEST_REFUSED, 300);
    told = 0;
    tell(KVQ__EVENT_SESSION_OPENED, 50);
    kvq__mailbox_deliver(&server.box);
    assert_int_equal(server.history->last, 50);
    assert_int_equal(count_kept(0), 50);
    kvq__log_close();
    assert_int_equal(kvq__log_open(NULL, KVQ_LOG_INFO, text), 0);
}

// A gap that is longer than what is kept, too.
TEST(test_long_gap)
{
    tell(KVQ__EVENT_SESSION_OPENED, 2000);
    kvq__mailbox_deliver(&server.box);
    tell(KVQ__EVENT_SESSION_OPENED, 2);
    kvq__mailbox_deliver(&server.box);
    assert_int_equal(server.history->last, 2002);
    assert_int_equal(count_kept(0), 2);
    assert_int_equal(kvq__history_first(server.history, 0), 2001);
}

int main(void)
{
    return run_all(NULL, NULL);
}
