// SPDX-License-Identifier: Apache-2.0
//
// The control socket of a daemon that closes: a client that always has one more request waiting
// keeps nobody from the end. Here ZeroMQ tells the test when that request has come.
#include <sched.h>

#include <zmq.h>

#include "daemon/commands/dispatch.h"
#include "daemon/control/control.h"
#include "daemon/http/http.h"
#include "daemon/log/log.h"
#include "proto/ring.h"
#include "proto/shm.h"
#include "proto/sync.h"
#include "tests/edge/attach_kit.h"
#include "tests/kits/unit.h"

// ---- What the daemon does ----

static void *router;     // of the one connection; the loop's thread
static uint32_t ran;     // a word: commands at the poller
static uint32_t closing; // a word: the poller is held until the daemon closes

int __real_zmq_getsockopt(void *socket, int option, void *value, size_t *size);
int __wrap_zmq_getsockopt(void *socket, int option, void *value, size_t *size);

int __wrap_zmq_getsockopt(void *socket, int option, void *value, size_t *size)
{
    if (option == ZMQ_EVENTS)
        router = socket;
    return __real_zmq_getsockopt(socket, option, value, size);
}

void __real_kvq__dispatch_run(const struct kvq__dispatch *d, const Kvq__Request *request,
                              struct kvq_arena *arena, Kvq__Reply *reply);
void __wrap_kvq__dispatch_run(const struct kvq__dispatch *d, const Kvq__Request *request,
                              struct kvq_arena *arena, Kvq__Reply *reply);

void __wrap_kvq__dispatch_run(const struct kvq__dispatch *d, const Kvq__Request *request,
                              struct kvq_arena *arena, Kvq__Reply *reply)
{
    kvq_word_add(&ran, 1);
    __real_kvq__dispatch_run(d, request, arena, reply);
}

void __real_kvq__http_end(struct kvq__http *http);
void __wrap_kvq__http_end(struct kvq__http *http);

// Comes behind the control socket's turn in the daemon's closing.
void __wrap_kvq__http_end(struct kvq__http *http)
{
    if (kvq_word_load(&closing))
        attach_release_poller();
    __real_kvq__http_end(http);
}

struct seen {
    bool idle, readable; // readable: a request has come that was not taken
};

static void look(struct kvq__server *server, void *context)
{
    struct seen *seen = context;
    int events = 0;
    size_t size = sizeof events;
    if (router)
        assert_int_equal(__real_zmq_getsockopt(router, ZMQ_EVENTS, &events, &size), 0);
    seen->idle = kvq__control_idle(server->control);
    seen->readable = events & ZMQ_POLLIN;
}

static struct seen seen_now(void)
{
    struct seen seen;
    attach_in_loop(look, &seen);
    return seen;
}

static void hush(struct kvq__server *server, void *context)
{
    kvq__control_hush(server->control);
}

// ---- Its client ----

static void *zmq, *client;

static void ask(void)
{
    uint8_t bytes[KVQ_MAX_MESSAGE];
    size_t length;
    Kvq__Ping ping = KVQ__PING__INIT;
    Kvq__Request request = REQUEST(PING, ping, &ping);
    request.protocol = KVQ_PROTOCOL_MAX;
    assert_int_equal(kvq_request_pack(&request, bytes, sizeof bytes, &length), 0);
    assert_int_equal(zmq_send(client, bytes, length, 0), length);
}

static int start(void **state)
{
    char address[128];
    const int none = 0;
    router = NULL;
    kvq_word_store(&ran, 0);
    kvq_word_store(&closing, 0);
    int rc = attach_start(state);
    zmq = zmq_ctx_new();
    client = zmq_socket(zmq, ZMQ_DEALER);
    zmq_setsockopt(client, ZMQ_LINGER, &none, sizeof none);
    snprintf(address, sizeof address, "ipc://%s/" KVQ_CONTROL_SOCKET, attach_directory());
    return rc ? rc : zmq_connect(client, address);
}

static int stop(void **state)
{
    zmq_close(client);
    int rc = zmq_ctx_term(zmq);
    return attach_stop(state) || rc;
}

// One request is at the poller, which stands still.
static void one_under_way(void)
{
    attach_hold_poller();
    ask();
    while (seen_now().idle)
        sched_yield();
}

static void one_waits(void)
{
    ask();
    while (!seen_now().readable)
        sched_yield();
}

// ---- Tests ----

// Hushed, it is idle when what was under way has ended, whatever waits.
TEST_BETWEEN(test_hushed, start, stop)
{
    uint8_t reply[KVQ_MAX_MESSAGE];
    kvq__control_hush(NULL);
    one_under_way();
    attach_in_loop(hush, NULL);
    one_waits();
    assert_false(seen_now().idle);
    attach_release_poller();
    assert_true(zmq_recv(client, reply, sizeof reply, 0) > 0);
    for (int i = 0; i < 3; i++) { // turns of the loop
        struct seen seen = seen_now();
        assert_true(seen.idle && seen.readable);
    }
    assert_int_equal(kvq_word_load(&ran), 1);
}

// A daemon that closes waits for what is under way, and takes nothing that waits.
TEST_BETWEEN(test_closes, start, stop)
{
    one_under_way();
    one_waits();
    kvq_word_store(&closing, 1);
    assert_int_equal(attach_stop(state), 0);
    assert_int_equal(kvq_word_load(&ran), 1);
}

int main(void)
{
    kvq__log_open(NULL, KVQ_LOG_ERROR, NULL);
    return run_all(NULL, NULL);
}
