// SPDX-License-Identifier: Apache-2.0
//
// Control calls: one request and its reply on the attach socket.
//
// A call that stops waiting leaves nothing behind: the next packet tells the daemon to give back
// what the call may have made, its late reply is skipped by the next call, and a connection
// whose packets the daemon does not even take is ended.
#include "client/internal.h"

#include <assert.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>

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

// Numbers, packs and sends a request. Without a text when the deadline passes.
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
    // What cannot even be handed over can never be taken back. The daemon sees the connection's
    // end when it looks again, behind all that it has not taken yet.
    if (rc == KVQ_E_DEADLINE)
        shutdown(client->socket, SHUT_RDWR);
    return rc;
}

void kvq__give_back(kvq_client *client)
{
    Kvq__Cancel message = KVQ__CANCEL__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "giving up a request"};
    message.request = client->next_id;
    call.request.command_case = KVQ__REQUEST__COMMAND_CANCEL;
    call.request.cancel = &message;
    send_call(client, &call, 0);
}

// What the daemon made is no use without its descriptors.
static int give_back_lost(kvq_client *client, const struct kvq__call *call)
{
    struct rlimit limit = {0};
    kvq__give_back(client);
    getrlimit(RLIMIT_NOFILE, &limit);
    return kvq__set_error(KVQ_E_SYSTEM,
                          "%s: the daemon's file descriptors do not fit: this process has as many "
                          "open as it may have, %llu; raise its limit (ulimit -n) or close some",
                          call->what, (unsigned long long)limit.rlim_cur);
}

int kvq__exchange(kvq_client *client, struct kvq__call *call)
{
    uint32_t timeout_ms = call->patience_ms ? call->patience_ms : client->timeout_ms;
    uint64_t deadline = kvq_now_ns() + (uint64_t)timeout_ms * 1000000u;
    uint32_t n_fds = 0;
    bool lost = false;
    assert(call->what && call->n_fds == 0);
    if (client->socket < 0)
        return kvq__set_error(KVQ_E_DISCONNECTED, "%s: not connected; call kvq_reattach first",
                              call->what);
    int rc = send_call(client, call, deadline);
    if (rc == KVQ_E_DEADLINE)
        return kvq__set_error(
            KVQ_E_DISCONNECTED,
            "%s: the daemon took no requests for %u ms and earlier ones fill the "
            "connection, so it was closed; see whether kvqd is stopped; kvq_reattach "
            "connects again",
            call->what, timeout_ms);
    // Even where the connection is closed there may be words why.
    if (rc == 0 || rc == KVQ_E_DISCONNECTED)
        rc = receive_reply(client, call, &n_fds, &lost, deadline);
    if (rc == KVQ_E_DEADLINE) {
        kvq__give_back(client);
        return kvq__set_error(rc, "%s: the daemon did not answer within %u ms", call->what,
                              timeout_ms);
    }
    if (rc)
        return rc;
    rc = lost ? give_back_lost(client, call) : check_call_reply(call, n_fds);
    call->n_fds = rc ? 0 : n_fds;
    if (rc)
        kvq__close_fds(call->fds, n_fds);
    return rc;
}
