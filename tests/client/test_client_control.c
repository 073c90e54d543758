// SPDX-License-Identifier: Apache-2.0
//
// libkvq's control calls against a daemon that misbehaves at every place where it could: each call
// ends with the right code and a text, nothing hangs, no descriptor is left open.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/client/client_kit.h"
#include "tests/client/own_clock.h"

// ---- Connecting ----

// Connecting to such a daemon fails with the code and the text, and leaves nothing open.
static void expect_refused(struct fake_script script, int code, const char *text)
{
    struct fake_daemon *daemon;
    kvq_client *client = (kvq_client *)&script;
    int before = client_fds();
    assert_int_equal(connect_to(script, 300, &daemon, &client), code);
    assert_null(client);
    expect_text(text);
    fake_stop(&daemon);
    assert_int_equal(client_fds(), before);
}

static void test_no_daemon(void **unused)
{
    (void)unused;
    struct kvq_connect_options options = {.size = sizeof options, .runtime_dir = client_dir};
    char path[200];
    kvq_client *client;
    assert_int_equal(kvq_connect(&options, &client), KVQ_E_NO_DAEMON);
    expect_text(client_dir);
    expect_text("start kvqd");
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = 0;
    options.runtime_dir = path;
    assert_int_equal(kvq_connect(&options, &client), KVQ_E_INVALID);
    expect_text("199 bytes");
    options = (struct kvq_connect_options){
        .size = sizeof(struct kvq_connect_options), .runtime_dir = client_dir, .name = "a\nb"};
    assert_int_equal(kvq_connect(&options, &client), KVQ_E_INVALID);
    assert_int_equal(kvq_connect(&options, NULL), KVQ_E_INVALID);
}

// A program's own name never keeps it from connecting.
static void test_program_name(void **unused)
{
    (void)unused;
    static char longest[200];
    const char *names[] = {"a\nb", "\xff", longest}, *before = program_invocation_short_name;
    memset(longest, 'x', sizeof longest - 1);
    for (int i = 0; i < 3; i++) {
        struct fake_daemon *daemon;
        kvq_client *client;
        program_invocation_short_name = (char *)(uintptr_t)names[i];
        assert_int_equal(connect_to(fake_good(), 0, &daemon, &client), KVQ_OK);
        kvq_disconnect(&client);
        fake_stop(&daemon);
    }
    program_invocation_short_name = (char *)(uintptr_t)before;
}

static void test_bad_hello(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    s.hello_status = KVQ_E_DRAINING;
    s.hello_fds = 0;
    expect_refused(s, KVQ_E_DRAINING, "connecting");
    s = fake_good();
    s.hello_fds = 0;
    expect_refused(s, KVQ_E_PROTOCOL, "0 descriptors");
    s.hello_fds = 3;
    expect_refused(s, KVQ_E_PROTOCOL, "3 descriptors");
    s = fake_good();
    s.hello_only = true;
    expect_refused(s, KVQ_E_PROTOCOL, "result 0");
    s = fake_good();
    s.protocol = 9;
    expect_refused(s, KVQ_E_VERSION, "protocol 9");
    s = fake_good();
    s.page_magic = 1;
    expect_refused(s, KVQ_E_PROTOCOL, "mark 0x1");
    s = fake_good();
    s.page_bytes = 100;
    expect_refused(s, KVQ_E_PROTOCOL, "100 bytes");
    s = fake_good();
    s.unsealed = true;
    expect_refused(s, KVQ_E_PROTOCOL, "not sealed");
    s = fake_good();
    s.garbage = true;
    expect_refused(s, KVQ_E_PROTOCOL, "cannot be read");
    s = fake_good();
    s.silent = true;
    expect_refused(s, KVQ_E_DEADLINE, "300 ms");
}

// ---- Control calls ----

static void test_late_replies_are_skipped(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_queue *queue;
    int before = client_fds();
    s.stale_first = true;
    assert_int_equal(connect_to(s, 0, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_queue_open(client, &queue), KVQ_OK);
    assert_int_equal(kvq_session_close(client, 5), KVQ_OK);
    kvq_disconnect(&client);
    assert_null(client);
    fake_stop(&daemon);
    assert_int_equal(client_fds(), before);
}

// A call that is not answered in time is cancelled, so that the daemon keeps nothing for it; its
// reply, with descriptors, comes late and is thrown away.
static void test_calls_given_up(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_queue *queue;
    int before = client_fds();
    s.late_first = true;
    assert_int_equal(connect_to(s, 500, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_queue_open(client, &queue), KVQ_E_DEADLINE);
    assert_null(queue);
    expect_text("500 ms");
    assert_int_equal(kvq_session_close(client, 5), KVQ_OK);
    assert_int_equal(fake_cancels(daemon), 1);
    kvq_disconnect(&client);
    fake_stop(&daemon);
    assert_int_equal(client_fds(), before);
}

// Requests that a stopped daemon does not take fill the connection. Then it is ended, instead of
// losing track of what the daemon will do with them.
static void test_calls_that_nobody_takes(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_queue *queue;
    kvq_session session;
    struct kvq_entry entry = {0};
    static struct kvq_layer rows[256];
    static char format[128]; // long, so that a few requests fill the socket
    struct kvq_session_options o = {.size = sizeof o, .layers = rows, .n_layers = 256};
    int before = client_fds(), rc = KVQ_E_DEADLINE;
    memset(format, 'f', sizeof format - 1);
    for (int i = 0; i < 256; i++)
        rows[i].format = format;
    s.deaf = true;
    s.ring = FAKE_SILENT;
    assert_int_equal(connect_to(s, 500, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_queue_open(client, &queue), KVQ_OK);
    for (int calls = 0; rc == KVQ_E_DEADLINE && calls < 100; calls++)
        rc = kvq_session_open(client, &o, &session, NULL);
    assert_int_equal(rc, KVQ_E_DISCONNECTED);
    expect_text("kvq_reattach");
    assert_int_equal(kvq_nop(queue, &entry, 1), KVQ_E_DISCONNECTED); // nobody would answer it
    assert_int_equal(kvq_session_close(client, 5), KVQ_E_DISCONNECTED);
    kvq_disconnect(&client);
    fake_stop(&daemon);
    assert_int_equal(client_fds(), before);
}

static void expect_no_queue(struct fake_script s, int code, const char *text)
{
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_queue *queue;
    int before = client_fds();
    assert_int_equal(connect_to(s, 0, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_queue_open(client, &queue), code);
    assert_null(queue);
    expect_text(text);
    kvq_disconnect(&client);
    fake_stop(&daemon);
    assert_int_equal(client_fds(), before);
}

static void test_bad_queue(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    s.queue_fds = 3;
    expect_no_queue(s, KVQ_E_PROTOCOL, "3 descriptors");
    s.queue_fds = 6;
    expect_no_queue(s, KVQ_E_PROTOCOL, "6 descriptors");
    s = fake_good();
    s.ring_magic = 3;
    expect_no_queue(s, KVQ_E_PROTOCOL, "mark 0x3");
    s = fake_good();
    s.hang_up = true;
    expect_no_queue(s, KVQ_E_DISCONNECTED, "kvq_reattach");
    s = fake_good();
    s.farewell = true;
    expect_no_queue(s, KVQ_E_DRAINING, "the lights go out");
}

// What cannot be used is given back.
static void test_results_given_back(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_queue *queue;
    s.ring_magic = 3;
    assert_int_equal(connect_to(s, 0, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_queue_open(client, &queue), KVQ_E_PROTOCOL);
    assert_int_equal(kvq_session_close(client, 5), KVQ_OK);
    assert_int_equal(fake_cancels(daemon), 1);
    kvq_disconnect(&client);
    fake_stop(&daemon);
}

static void test_bad_buffers(void **unused)
{
    (void)unused;
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_buffer *buffer;
    assert_int_equal(connect_to(fake_good(), 0, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_session_close(client, 5), KVQ_OK); // the daemon is done with hello now
    int before = client_fds();
    int plain = memfd_create("plain", MFD_CLOEXEC), file = open("/proc/self/exe", O_RDONLY);
    int good = memfd_create("good", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(good, 8192), 0);
    assert_int_equal(ftruncate(plain, 8192), 0);
    assert_int_equal(kvq_buffer_create(client, 0, &buffer), KVQ_E_INVALID);
    assert_int_equal(kvq_buffer_create(client, SIZE_MAX, &buffer), KVQ_E_LIMIT);
    assert_int_equal(kvq_buffer_import_memfd(client, plain, 0, 8192, &buffer), KVQ_E_BUFFER);
    expect_text("MFD_ALLOW_SEALING");
    assert_int_equal(kvq_buffer_import_memfd(client, file, 0, 10, &buffer), KVQ_E_BUFFER);
    expect_text("not a memfd");
    assert_int_equal(kvq_buffer_import_memfd(client, good, 100, 10, &buffer), KVQ_E_BUFFER);
    expect_text("multiple of the page size");
    assert_int_equal(kvq_buffer_import_memfd(client, good, 4096, 4097, &buffer), KVQ_E_BUFFER);
    expect_text("8192 bytes");
    assert_int_equal(kvq_buffer_import_memfd(client, -1, 0, 1, &buffer), KVQ_E_BUFFER);
    // The daemon's answer lacks a result: nothing stays open but the test's own three.
    assert_int_equal(kvq_buffer_import_memfd(client, good, 0, 8192, &buffer), KVQ_E_PROTOCOL);
    assert_null(buffer);
    assert_true(fcntl(good, F_GET_SEALS) & F_SEAL_SHRINK);
    assert_int_equal(kvq_buffer_create(client, 4096, &buffer), KVQ_E_PROTOCOL);
    assert_int_equal(client_fds(), before + 3);
    close(plain);
    close(file);
    close(good);
    kvq_disconnect(&client);
    fake_stop(&daemon);
}

// A buffer that requests in flight use stays until the daemon says that they are done. It is asked
// less and less often, for a daemon that is busy reads no question, but every ten minutes at least.
static void test_buffers_that_are_in_use(void **unused)
{
    enum { ASKED = 13 };
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_buffer *buffer;
    int before = client_fds();
    s.buffers = true;
    s.busy_closes = ASKED;
    assert_int_equal(connect_to(s, 500, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_buffer_create(client, 4096, &buffer), KVQ_OK);
    own_clock.skips = ASKED;
    own_clock.on = true;
    kvq_buffer_close(&buffer);
    own_clock.on = false;
    assert_null(buffer);
    assert_int_equal(own_clock.n, ASKED);
    for (uint32_t i = 0; i < ASKED; i++)
        assert_int_equal(own_clock.waited_ms[i], i < 10 ? 1000u << i : 600000);
    assert_int_equal(fake_closes(daemon), ASKED + 1);
    expect_text("within 600000 ms");
    kvq_disconnect(&client);
    fake_stop(&daemon);
    assert_int_equal(client_fds(), before);
}

static struct {
    sem_t waits, goes_on;
} closing;

static void stand_still(void)
{
    sem_post(&closing.waits);
    sem_wait(&closing.goes_on);
}

static void *close_buffer(void *arg)
{
    kvq_buffer *buffer = arg;
    own_wait = stand_still;
    kvq_buffer_close(&buffer);
    return NULL;
}

// A call waits for those of other threads no longer than for the daemon.
static void test_calls_beside_one_that_takes_long(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_buffer *buffer, *none;
    kvq_queue *queue;
    pthread_t other;
    int before = client_fds();
    s.buffers = true;
    assert_int_equal(connect_to(s, 500, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_buffer_create(client, 4096, &buffer), KVQ_OK);
    sem_init(&closing.waits, 0, 0);
    sem_init(&closing.goes_on, 0, 0);
    assert_int_equal(pthread_create(&other, NULL, close_buffer, buffer), 0);
    sem_wait(&closing.waits);
    assert_int_equal(kvq_session_close(client, 5), KVQ_E_DEADLINE);
    expect_text("closing a session: calls of other threads");
    assert_int_equal(kvq_buffer_create(client, 4096, &none), KVQ_E_DEADLINE);
    assert_null(none);
    assert_int_equal(kvq_queue_open(client, &queue), KVQ_E_DEADLINE);
    assert_null(queue);
    sem_post(&closing.goes_on);
    pthread_join(other, NULL);
    assert_int_equal(kvq_session_close(client, 5), KVQ_OK);
    assert_int_equal(fake_cancels(daemon), 0); // nothing was sent
    kvq_disconnect(&client);
    fake_stop(&daemon);
    assert_int_equal(client_fds(), before);
}

static void go_on(void)
{
    sem_post(&closing.goes_on);
}

struct beside {
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_queue *queue;
    pthread_t other;
};

// A client whose turn another thread has until go_on.
static void beside_up(struct beside *b)
{
    struct fake_script s = fake_good();
    kvq_buffer *buffer;
    s.buffers = true;
    assert_int_equal(connect_to(s, 500, &b->daemon, &b->client), KVQ_OK);
    assert_int_equal(kvq_buffer_create(b->client, 4096, &buffer), KVQ_OK);
    assert_int_equal(kvq_queue_open(b->client, &b->queue), KVQ_OK);
    sem_init(&closing.waits, 0, 0);
    sem_init(&closing.goes_on, 0, 0);
    assert_int_equal(pthread_create(&b->other, NULL, close_buffer, buffer), 0);
    sem_wait(&closing.waits);
}

static void beside_down(struct beside *b)
{
    kvq_disconnect(&b->client);
    fake_stop(&b->daemon);
}

// A queue's close, which says nothing of a failure, waits until its turn comes.
static void test_queue_closes_beside_a_call_that_takes_long(void **unused)
{
    (void)unused;
    struct beside b;
    beside_up(&b);
    own_turn_wait = go_on;
    kvq_queue_close(&b.queue);
    if (own_turn_wait)
        go_on();
    pthread_join(b.other, NULL);
    assert_null(own_turn_wait); // it has waited
    assert_int_equal(kvq_session_close(b.client, 5), KVQ_OK);
    assert_int_equal(fake_queue_closes(b.daemon), 1);
    beside_down(&b);
}

// A call whose turn comes when its time is over sends nothing, and passes the turn on.
static void test_turns_that_come_late(void **unused)
{
    (void)unused;
    struct beside b;
    beside_up(&b);
    own_clock = (struct own_clock){.on = true};
    own_late_turn = go_on;
    int rc = kvq_session_close(b.client, 5);
    own_clock.on = false;
    pthread_join(b.other, NULL);
    assert_int_equal(rc, KVQ_E_DEADLINE);
    expect_text("closing a session: calls of other threads");
    assert_int_equal(kvq_session_close(b.client, 5), KVQ_OK);
    assert_int_equal(fake_cancels(b.daemon), 0);
    beside_down(&b);
}

// ---- Saves and restores ----

// Where no other connection leads to the same run of the daemon, a restore has the client's own.
static void test_restores_without_another_connection(void **unused)
{
    (void)unused;
    static const int refusals[] = {KVQ_E_LIMIT, KVQ_E_DRAINING, KVQ_E_PERMISSION, KVQ_E_NO_MEMORY};
    enum { REFUSALS = sizeof refusals / sizeof refusals[0], GONE = REFUSALS, REPLACED, CASES };
    int before = client_fds();
    for (int i = 0; i < CASES; i++) {
        struct fake_script s = fake_good(), other_run = s;
        struct fake_daemon *daemon, *other = NULL;
        char path[200];
        kvq_client *client;
        s.saves = true;
        s.other_hello_status = i < REFUSALS ? refusals[i] : 0;
        assert_int_equal(connect_to(s, 500, &daemon, &client), KVQ_OK);
        snprintf(path, sizeof path, "%s/attach.sock", client_dir);
        if (i == GONE)
            assert_int_equal(unlink(path), 0);
        other_run.epoch++;
        if (i == REPLACED)
            other = fake_start(client_dir, &other_run);
        assert_int_equal(kvq_session_restore(client, NULL, "s", 0, 0), KVQ_OK);
        assert_int_equal(kvq_session_close(client, 5), KVQ_OK);
        assert_int_equal(fake_restores(daemon), 1);
        kvq_disconnect(&client);
        fake_stop(&daemon);
        if (other)
            fake_stop(&other);
    }
    assert_int_equal(client_fds(), before);
}

// Where only the connection that it had of its own breaks, a restore says what is known.
static void test_restores_that_lose_their_connection(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    s.saves = s.other_hang_up = true;
    assert_int_equal(connect_to(s, 500, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_session_restore(client, NULL, "s", 0, 0), KVQ_E_CANCELLED);
    expect_text("whether it was done is not known");
    assert_int_equal(kvq_session_close(client, 5), KVQ_OK);
    assert_int_equal(fake_restores(daemon), 0);
    kvq_disconnect(&client);
    fake_stop(&daemon);
}

// A save waits for the daemon for an hour, from its first question on.
static void test_saves_have_an_hour(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    assert_int_equal(connect_to(s, 500, &daemon, &client), KVQ_OK);
    own_clock = (struct own_clock){.on = true, .skips = 1};
    assert_int_equal(kvq_session_save(client, UINT64_C(1) << 32), KVQ_E_DEADLINE);
    own_clock.on = false;
    assert_int_equal(own_clock.waited_ms[0], 3600000);
    kvq_disconnect(&client);
    fake_stop(&daemon);
}

// What comes with a descriptor that this process may not have is given back.
static void test_no_more_descriptors(void **unused)
{
    (void)unused;
    struct fake_script s = fake_good();
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_buffer *buffer;
    struct rlimit old, full;
    int before = client_fds();
    s.buffers = s.no_memory = true;
    assert_int_equal(connect_to(s, 0, &daemon, &client), KVQ_OK);
    assert_int_equal(kvq_session_close(client, 5), KVQ_OK); // the daemon is done with hello now
    int next = dup(0);
    assert_true(next > 0);
    close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    full = (struct rlimit){(rlim_t)next, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &full), 0);
    int rc = kvq_buffer_create(client, 4096, &buffer);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(rc, KVQ_E_SYSTEM);
    assert_null(buffer);
    expect_text("ulimit -n");
    assert_int_equal(kvq_session_close(client, 5), KVQ_OK);
    assert_int_equal(fake_cancels(daemon), 1);
    kvq_disconnect(&client);
    fake_stop(&daemon);
    assert_int_equal(client_fds(), before);
}

static void test_texts_that_cannot_travel(void **unused)
{
    (void)unused;
    struct fake_daemon *daemon;
    kvq_client *client;
    kvq_session session;
    char name[300];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    assert_int_equal(connect_to(fake_good(), 0, &daemon, &client), KVQ_OK);
    struct kvq_session_options o = {.size = sizeof o, .name = name};
    assert_int_equal(kvq_session_open(client, &o, &session, NULL), KVQ_E_LIMIT);
    expect_text("127 bytes");
    o.name = "a\x01";
    assert_int_equal(kvq_session_open(client, &o, &session, NULL), KVQ_E_INVALID);
    o.name = "\xff";
    assert_int_equal(kvq_session_open(client, &o, &session, NULL), KVQ_E_INVALID);
    o = (struct kvq_session_options){.size = sizeof(struct kvq_session_options), .n_layers = 257};
    assert_int_equal(kvq_session_open(client, &o, &session, NULL), KVQ_E_INVALID);
    o = (struct kvq_session_options){.size = sizeof(struct kvq_session_options), .flags = 64};
    assert_int_equal(kvq_session_open(client, &o, &session, NULL), KVQ_E_INVALID);
    expect_text("0x40");
    kvq_disconnect(&client);
    fake_stop(&daemon);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_daemon),
        cmocka_unit_test(test_program_name),
        cmocka_unit_test(test_bad_hello),
        cmocka_unit_test(test_late_replies_are_skipped),
        cmocka_unit_test(test_calls_given_up),
        cmocka_unit_test(test_calls_that_nobody_takes),
        cmocka_unit_test(test_bad_queue),
        cmocka_unit_test(test_results_given_back),
        cmocka_unit_test(test_bad_buffers),
        cmocka_unit_test(test_buffers_that_are_in_use),
        cmocka_unit_test(test_calls_beside_one_that_takes_long),
        cmocka_unit_test(test_queue_closes_beside_a_call_that_takes_long),
        cmocka_unit_test(test_turns_that_come_late),
        cmocka_unit_test(test_restores_without_another_connection),
        cmocka_unit_test(test_restores_that_lose_their_connection),
        cmocka_unit_test(test_saves_have_an_hour),
        cmocka_unit_test(test_no_more_descriptors),
        cmocka_unit_test(test_texts_that_cannot_travel),
    };
    client_prepare();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    client_cleanup();
    return failed != 0;
}
