// SPDX-License-Identifier: Apache-2.0
//
// Control calls: one request and its reply on the attach socket, by turns: the daemon carries out a
// connection's commands one after the other.
//
// A call that stops waiting leaves nothing behind: the next packet tells the daemon to give back
// what the call may have made, its late reply is skipped by the next call, and a connection
// of which the daemon took no packet for all of timeout_ms, though it was full, is ended.
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

// ---- Turns ----

struct kvq__turn_wait {
    TAILQ_ENTRY(kvq__turn_wait) link;
    bool over; // the turn was passed to it
};

void kvq__turn_open(struct kvq__turn *turn)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&turn->mutex, NULL);
    pthread_cond_init(&turn->passed, &clock);
    pthread_condattr_destroy(&clock);
    turn->taken = false;
    TAILQ_INIT(&turn->waits);
}

void kvq__turn_close(struct kvq__turn *turn)
{
    assert(!turn->taken && TAILQ_EMPTY(&turn->waits));
    pthread_cond_destroy(&turn->passed);
    pthread_mutex_destroy(&turn->mutex);
}

// Behind those that wait already. Whether it came in time. Under the turn's mutex.
static bool stand_in_line(struct kvq__turn *turn, uint64_t deadline_ns)
{
    const struct timespec until = {(time_t)(deadline_ns / 1000000000u),
                                   (long)(deadline_ns % 1000000000u)};
    struct kvq__turn_wait wait = {.over = false};
    int error = 0;
    TAILQ_INSERT_TAIL(&turn->waits, &wait, link);
    while (!wait.over && error == 0)
        error = deadline_ns == KVQ__NO_DEADLINE
                    ? pthread_cond_wait(&turn->passed, &turn->mutex)
                    : pthread_cond_timedwait(&turn->passed, &turn->mutex, &until);
    assert(error == 0 || error == ETIMEDOUT);
    if (!wait.over)
        TAILQ_REMOVE(&turn->waits, &wait, link);
    return wait.over;
}

int kvq__turn_take(kvq_client *client, const char *what, uint64_t deadline_ns)
{
    struct kvq__turn *turn = &client->turn;
    pthread_mutex_lock(&turn->mutex);
    bool waits = turn->taken, ours = !waits || stand_in_line(turn, deadline_ns);
    turn->taken = true;
    pthread_mutex_unlock(&turn->mutex);
    // A call that has no time left is not begun.
    bool late = ours && waits && kvq_now_ns() >= deadline_ns;
    if (late)
        kvq__turn_pass(client);
    return ours && !late
               ? KVQ_OK
               : kvq__set_error(KVQ_E_DEADLINE,
                                "%s: calls of other threads had this client's connection until "
                                "the time for the call was over",
                                what);
}

void kvq__turn_pass(kvq_client *client)
{
    struct kvq__turn *turn = &client->turn;
    pthread_mutex_lock(&turn->mutex);
    struct kvq__turn_wait *next = TAILQ_FIRST(&turn->waits);
    assert(turn->taken);
    if (next) {
        TAILQ_REMOVE(&turn->waits, next, link);
        next->over = true;
        pthread_cond_broadcast(&turn->passed);
    }
    turn->taken = next != NULL;
    pthread_mutex_unlock(&turn->mutex);
}

// ---- Calls ----

static uint64_t deadline_in(uint32_t ms)
{
    return kvq_now_ns() + (uint64_t)ms * 1000000u;
}

uint64_t kvq__deadline(const kvq_client *client)
{
    return deadline_in(client->timeout_ms);
}

// The reply to this call: earlier ones, whose callers gave up, are skipped with their descriptors.
static int receive_reply(kvq_client *client, struct kvq__call *call, uint32_t *n_fds, bool *lost,
                         uint64_t deadline_ns)
{
    assert(*n_fds == 0);
    for (;;) {
        char text[KVQ_TEXT_BYTES] = "";
        size_t n;
        int rc = kvq__socket_receive(client->socket, client->packet, sizeof client->packet, &n,
                                     call->fds, n_fds, lost, deadline_ns);
        if (rc)
            return rc;
        client->arena.used = 0;
        client->arena.full = false;
        rc = kvq_reply_unpack(client->packet, n, &client->arena, &call->reply, text);
        if (rc == KVQ_OK && call->reply->id == call->request.id)
            return KVQ_OK;
        kvq__close_fds(call->fds, *n_fds);
        *n_fds = 0;
        if (rc)
            return kvq__set_error(KVQ_E_PROTOCOL, "%s: the daemon's reply cannot be read: %s",
                                  call->what, text);
        // Number 0 answers no call: the daemon says why it is about to close the connection.
        if (call->reply->id == 0 && call->reply->status < 0)
            return kvq__set_error(call->reply->status, "%s: %s", call->what, call->reply->text);
    }
}

static int check_call_reply(struct kvq__call *call, uint32_t n_fds)
{
    const Kvq__Reply *reply = call->reply;
    if (reply->status < 0)
        return kvq__set_error(reply->status, "%s: %s", call->what,
                              *reply->text ? reply->text : kvq_strerror(reply->status));
    bool counted = n_fds == call->want_fds || call->want_fds == KVQ__ANY_FDS;
    if (reply->status > 0 || reply->result_case != call->want || !counted)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "%s: the daemon answered status %d, result %d and %u descriptors; %d "
                              "and %u belong to it",
                              call->what, reply->status, (int)reply->result_case, n_fds,
                              (int)call->want, call->want_fds);
    return KVQ_OK;
}

// Numbers, packs and sends a request. KVQ_E_DEADLINE, without a text: the connection is full.
static int send_call(kvq_client *client, struct kvq__call *call, uint64_t deadline_ns)
{
    size_t length;
    assert(client->socket >= 0 && call->request.command_case != KVQ__REQUEST__COMMAND__NOT_SET);
    call->request.id = ++client->next_id ? client->next_id : ++client->next_id;
    call->request.protocol = client->info.protocol;
    int rc = kvq_request_pack(&call->request, client->packet, sizeof client->packet, &length);
    if (rc)
        return kvq__set_error(rc, "%s: the request does not fit a packet of %d bytes", call->what,
                              KVQ_MAX_MESSAGE);
    rc = kvq__socket_send(client->socket, client->packet, length, call->send_fd, deadline_ns);
    if (rc == KVQ_OK)
        client->sent_ns = kvq_now_ns();
    return rc;
}

// Asks the daemon to undo a request, for a caller that cannot use its result.
static int send_cancel(kvq_client *client, uint32_t id, uint64_t deadline_ns)
{
    Kvq__Cancel message = KVQ__CANCEL__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "giving up a request"};
    message.request = id;
    call.request.command_case = KVQ__REQUEST__COMMAND_CANCEL;
    call.request.cancel = &message;
    return send_call(client, &call, deadline_ns);
}

// Has the daemon undo the last exchange. Waits for nothing, and keeps the error text: where the
// connection is full, the next call says it first.
static void give_back(kvq_client *client)
{
    char text[KVQ__TEXT_BYTES];
    uint32_t id = client->next_id;
    snprintf(text, sizeof text, "%s", kvq_error_text());
    int rc = send_cancel(client, id, 0);
    client->given_up = rc == KVQ_E_DEADLINE ? id : 0;
    if (rc)
        kvq__set_error(rc, "%s", text);
}

// Sends a request behind what is to be said first.
static int send_in_order(kvq_client *client, struct kvq__call *call, uint64_t deadline_ns)
{
    int rc = client->given_up ? send_cancel(client, client->given_up, deadline_ns) : KVQ_OK;
    if (rc)
        return rc;
    client->given_up = 0;
    return send_call(client, call, deadline_ns);
}

// The connection is full. Since the last packet that went in the daemon has taken none; where that
// was long ago the connection is ended, of whose requests nobody knows what becomes. The daemon
// sees its end when it looks again, behind all that it has not taken yet.
static int not_taken(kvq_client *client, const char *what)
{
    if (kvq_now_ns() < client->sent_ns + (uint64_t)client->timeout_ms * 1000000u)
        return kvq__set_error(KVQ_E_DEADLINE,
                              "%s: earlier requests filled the connection until the time for the "
                              "call was over, so it was not sent",
                              what);
    shutdown(client->socket, SHUT_RDWR);
    return kvq__set_error(KVQ_E_DISCONNECTED,
                          "%s: the daemon took no requests for %u ms and earlier ones fill the "
                          "connection, so it was closed; see whether kvqd is stopped; kvq_reattach "
                          "connects again",
                          what, client->timeout_ms);
}

// What the daemon made is no use without its descriptors.
static int give_back_lost(kvq_client *client, const struct kvq__call *call)
{
    struct rlimit limit = {0};
    give_back(client);
    getrlimit(RLIMIT_NOFILE, &limit);
    return kvq__set_error(KVQ_E_SYSTEM,
                          "%s: the daemon's file descriptors do not fit: this process has as many "
                          "open as it may have, %llu; raise its limit (ulimit -n) or close some",
                          call->what, (unsigned long long)limit.rlim_cur);
}

// A reply that came in time.
static int take_reply(kvq_client *client, struct kvq__call *call, uint32_t n_fds, bool lost)
{
    int rc = lost ? give_back_lost(client, call) : check_call_reply(call, n_fds);
    call->n_fds = n_fds;
    if (rc == KVQ_OK && call->take) {
        rc = call->take(call->to, call);
        if (rc && call->request.command_case != KVQ__REQUEST__COMMAND_HELLO) // that ends
            give_back(client);
    }
    kvq__close_fds(call->fds, n_fds);
    return rc;
}

static uint32_t patience_of(const kvq_client *client, const struct kvq__call *call)
{
    return call->patience_ms ? call->patience_ms : client->timeout_ms;
}

int kvq__exchange(kvq_client *client, struct kvq__call *call, uint64_t deadline_ns)
{
    uint32_t timeout_ms = patience_of(client, call);
    uint32_t n_fds = 0;
    bool lost = false;
    assert(call->what && call->n_fds == 0);
    if (client->socket < 0)
        return kvq__set_error(KVQ_E_DISCONNECTED, "%s: not connected; call kvq_reattach first",
                              call->what);
    int rc = send_in_order(client, call, deadline_ns);
    if (rc == KVQ_E_DEADLINE)
        return not_taken(client, call->what);
    // Even where the connection is closed there may be words why.
    if (rc == 0 || rc == KVQ_E_DISCONNECTED)
        rc = receive_reply(client, call, &n_fds, &lost, deadline_ns);
    if (rc == KVQ_E_DEADLINE) {
        give_back(client);
        return kvq__set_error(rc, "%s: the daemon did not answer within %u ms", call->what,
                              timeout_ms);
    }
    if (rc == KVQ_OK) // replies come in the order of the requests
        client->told = 0;
    return rc ? rc : take_reply(client, call, n_fds, lost);
}

void kvq__tell(kvq_client *client, struct kvq__call *call)
{
    uint8_t rest[64]; // of a reply that nobody waits for
    int fds[KVQ_MAX_PACKET_FDS], rc;
    uint32_t n_fds;
    size_t n;
    bool lost;
    assert(call->what && !call->take);
    if (client->socket < 0)
        return;
    do {
        rc = kvq__socket_receive(client->socket, rest, sizeof rest, &n, fds, &n_fds, &lost, 0);
        if (rc == KVQ_OK)
            kvq__close_fds(fds, n_fds);
        client->told -= client->told && (rc == KVQ_OK || rc == KVQ_E_PROTOCOL);
    } while (rc == KVQ_OK || rc == KVQ_E_PROTOCOL);
    if (client->told < KVQ__MAX_TOLD && send_in_order(client, call, 0) == KVQ_OK)
        client->told++;
}

int kvq__ask_in_any_case(kvq_client *client, struct kvq__call *call)
{
    int rc = kvq__turn_take(client, call->what, KVQ__NO_DEADLINE);
    assert(rc == KVQ_OK);
    rc = kvq__exchange(client, call, deadline_in(patience_of(client, call)));
    kvq__turn_pass(client);
    return rc;
}

int kvq__ask(kvq_client *client, struct kvq__call *call)
{
    uint64_t deadline = deadline_in(patience_of(client, call));
    int rc = kvq__turn_take(client, call->what, deadline);
    if (rc)
        return rc;
    rc = kvq__exchange(client, call, deadline);
    kvq__turn_pass(client);
    return rc;
}
