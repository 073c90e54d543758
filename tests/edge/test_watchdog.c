// SPDX-License-Identifier: Apache-2.0
//
// The watchdog over mailboxes that are served, or not.
#include <unistd.h>

#include "daemon/runtime/service.h"
#include "daemon/runtime/watchdog.h"
#include "tests/kits/unit.h"

static struct kvq__mailbox there, here;
static struct kvq__watchdog w; // its mail may be away when a test ends

static void stay_quiet(void *context)
{
}

static int setup(void **state)
{
    kvq__mailbox_open(&there, stay_quiet, NULL);
    kvq__mailbox_open(&here, stay_quiet, NULL);
    return 0;
}

static int teardown(void **state)
{
    kvq__mailbox_deliver(&there);
    kvq__mailbox_deliver(&here);
    kvq__mailbox_close(&there);
    kvq__mailbox_close(&here);
    return 0;
}

// As long as both serve their boxes, every look is good.
TEST(test_both_serve)
{
    kvq__watchdog_begin(&w, &there, &here);
    for (int i = 0; i < 10; i++) {
        kvq__mailbox_deliver(&there);
        kvq__mailbox_deliver(&here);
        assert_true(kvq__watchdog_look(&w));
    }
}

// From the start on: the first look has to find it, too.
TEST(test_hangs_at_once)
{
    kvq__watchdog_begin(&w, &there, &here);
    assert_false(kvq__watchdog_look(&w));
    assert_false(kvq__watchdog_look(&w));
}

TEST(test_hangs_later)
{
    kvq__watchdog_begin(&w, &there, &here);
    kvq__mailbox_deliver(&there);
    kvq__mailbox_deliver(&here);
    assert_true(kvq__watchdog_look(&w));
    assert_false(kvq__watchdog_look(&w));
    kvq__mailbox_deliver(&there); // the other one has answered, and this one has not heard it yet
    assert_false(kvq__watchdog_look(&w));
    kvq__mailbox_deliver(&here); // it was late, and goes on
    assert_true(kvq__watchdog_look(&w));
    assert_false(kvq__watchdog_look(&w));
}

PLAIN_TEST(test_environment)
{
    char own[32], other[32];
    snprintf(own, sizeof own, "%d", (int)getpid());
    snprintf(other, sizeof other, "%d", (int)getppid());
    assert_int_equal(kvq__watchdog_usec("30000000", own), 30000000);
    assert_int_equal(kvq__watchdog_usec("30000000", NULL), 30000000);
    assert_int_equal(kvq__watchdog_usec("30000000", other), 0);
    assert_int_equal(kvq__watchdog_usec("30000000", ""), 0);
    assert_int_equal(kvq__watchdog_usec(NULL, own), 0);
    static const char *const wrong[] = {"", "0", "-1", "1s", " 1", "99999999999999999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(kvq__watchdog_usec(wrong[i], own), 0);
}

PLAIN_TEST(test_line)
{
    char line[KVQ__SERVICE_LINE];
    struct kvq__service_figures f = {
        .sessions = 3, .clients = 2, .used_bytes = 3ull << 29, .pool_bytes = 30ull << 30};
    kvq__service_line(&f, line);
    assert_string_equal(line, "3 sessions, 2 clients, 1.5 of 30.0 GiB of memory in use");
    f.ends = true;
    f.clients = 1;
    kvq__service_line(&f, line);
    assert_string_equal(line, "ends; 3 sessions, 1 client, 1.5 of 30.0 GiB of memory in use");
}

int main(void)
{
    return run_all(NULL, NULL);
}
