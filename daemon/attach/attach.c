// SPDX-License-Identifier: Apache-2.0
//
// The attach socket: listening, and the life of connections. Descriptors, credentials and the
// end of a client travel here; its requests go through the rings.
#include "daemon/attach/attach.h"

#include <assert.h>
#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/attach/internal.h"
#include "daemon/commands/dispatch.h"
#include "daemon/runtime/descriptors.h"
#include "daemon/runtime/workers.h"

enum {
    STRANGERS = 64, // connections beyond max_clients, so that they can be told why not
    END_MS = 500,   // the poller has seen an end by then, and imports are closed, unless held up
};

// ---- Connections ----

static void free_connection(uv_handle_t *handle)
{
    struct kvq__connection *c = handle->data;
    assert(c->handles > 0);
    if (--c->handles > 0)
        return;
    if (c->pidfd >= 0)
        close(c->pidfd);
    // Last: to the client this says that all it had is returned, but what kvq__pins_leave is about.
    kvq__packet_end(c->fd, &c->attach->packet);
    kvq__pins_leave(c);
    TAILQ_REMOVE(&c->attach->connections, c, link);
    c->attach->count--;
    assert(c->n_lines == 0 && c->giving_back == 0);
    assert(LIST_EMPTY(&c->imports) && LIST_EMPTY(&c->spares) && LIST_EMPTY(&c->timelines));
    free(c);
}

void kvq__connection_gone(struct kvq__connection *c)
{
    assert(c->state == KVQ__CONNECTION_ENDING && c->giving_back == 0);
    assert(LIST_EMPTY(&c->lines) && LIST_EMPTY(&c->regions) && LIST_EMPTY(&c->tables));
    uv_close((uv_handle_t *)&c->poll, free_connection);
    uv_close((uv_handle_t *)&c->timer, free_connection);
    if (c->pidfd >= 0)
        uv_close((uv_handle_t *)&c->pid_poll, free_connection);
}

static void stop_watching(struct kvq__connection *c)
{
    uv_poll_stop(&c->poll);
    uv_timer_stop(&c->timer);
    if (c->pidfd >= 0)
        uv_poll_stop(&c->pid_poll);
}

// The driver may hold the poller up until a stream goes on that waits for this client: its signals
// are given here then. Not before, since the poller has to cancel the client's steps first; else
// what waits would store what has not arrived, and be committed. And another client may keep the
// imports of this one from being closed, which its end waits for no longer.
static void on_end_late(uv_timer_t *timer)
{
    struct kvq__connection *c = timer->data;
    assert(c->end_when_back || c->state == KVQ__CONNECTION_ENDING);
    if (!kvq_word_load_acquire(&c->end_seen))
        kvq__timelines_end(c);
    kvq__imports_leave(c);
}

static void post_end(struct kvq__connection *c, struct kvq__mail *mail,
                     void (*run)(struct kvq__mail *mail))
{
    kvq_word_store_release(&c->end_seen, 0);
    uv_timer_start(&c->timer, on_end_late, END_MS, 0);
    kvq__mailbox_post(kvq__poller_box(c->server->poller), mail, run);
}

// Poller's thread. The command under way may take hours (a save behind others), and nobody waits
// that long for the client's steps and sessions. Then the loop gives the signals that GPUs wait for
// in the place of the client: the command may be one that comes back only when their work has
// ended.
static void break_member(struct kvq__mail *mail)
{
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)mail - offsetof(struct kvq__connection, ended_mail));
    assert(!c->detaching);
    if (c->client && c->member.broken)
        kvq__client_distrust(c->client);
    c->member.broken = true;
    if (c->client)
        kvq__client_leave(c->client);
    kvq_word_store_release(&c->end_seen, 1);
}

void kvq__connection_end(struct kvq__connection *c, const char *reason)
{
    char quoted[192];
    if (c->state == KVQ__CONNECTION_ENDING || c->end_when_back)
        return;
    // Of a client there is one such line, beside those of its coming and going.
    if (c->id)
        kvq__log(KVQ_LOG_INFO, "connection_end", "client=%llu uid=%u pid=%u reason=%s",
                 (unsigned long long)c->id, c->peer.uid, c->peer.pid,
                 kvq__log_quote(quoted, sizeof quoted, reason));
    else
        kvq__log_client(&c->attach->stranger_budget, KVQ_LOG_INFO, "connection_end",
                        "client=0 uid=%u pid=%u reason=%s", c->peer.uid, c->peer.pid,
                        kvq__log_quote(quoted, sizeof quoted, reason));
    stop_watching(c);
    if (c->state != KVQ__CONNECTION_BUSY) {
        kvq__connection_detach(c);
        return;
    }
    c->end_when_back = true;
    post_end(c, &c->ended_mail, break_member);
}

// The kernel counts descriptors beside packets that nobody has read for the user who sent them.
static void say_unread(const struct kvq__connection *c, char *text)
{
    snprintf(text, KVQ_TEXT_BYTES,
             "%u descriptors cannot be sent: as many of kvqd's as it may have open (%u, "
             "LimitNOFILE=) lie in replies and other packets of its user that nobody has read; ask "
             "again, end processes that stand still (kvqctl client list), or have LimitNOFILE= "
             "raised",
             c->n_fds, kvq__descriptors_limit());
    kvq__log_client(&c->attach->log_budget, KVQ_LOG_WARN, "not_sent",
                    "client=%llu uid=%u pid=%u descriptors=%u limit=%u", (unsigned long long)c->id,
                    c->peer.uid, c->peer.pid, c->n_fds, kvq__descriptors_limit());
}

// Whether the client has read its replies, so that one more with descriptors can be sent. How many
// it has read of several is not known until it has read all.
static int check_unread(struct kvq__connection *c, char *text)
{
    int bytes;
    if (ioctl(c->fd, SIOCOUTQ, &bytes) != 0 || bytes == 0)
        c->unread_fds = 0;
    if (c->unread_fds + c->n_fds <= KVQ_MAX_UNREAD_FDS)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "%u descriptors cannot be sent: %u lie in replies that this client has not read, and "
             "%d may; read the replies, then ask again",
             c->n_fds, c->unread_fds, KVQ_MAX_UNREAD_FDS);
    return KVQ_E_LIMIT;
}

int kvq__connection_reply(struct kvq__connection *c, char *text)
{
    size_t length;
    assert(c->n_fds <= KVQ_MAX_PACKET_FDS);
    if (c->end_when_back || c->state == KVQ__CONNECTION_ENDING)
        return 0;
    int error = c->n_fds > 0 ? check_unread(c, text) : 0;
    if (error)
        return error;
    error = kvq_reply_pack(&c->reply, c->attach->out, sizeof c->attach->out, &length);
    if (error) {
        kvq__reply_status(&c->reply, &c->arena, KVQ_E_LIMIT, "the reply is longer than a message");
        c->n_fds = 0;
        error = kvq_reply_pack(&c->reply, c->attach->out, sizeof c->attach->out, &length);
        assert(error == 0);
    }
    if (c->reply.status < 0)
        kvq__refused_add(&c->server->attach_refused, c->reply.status);
    error = kvq__packet_send(c->fd, c->attach->out, length, c->fds, c->n_fds);
    if (error == KVQ_E_LIMIT && c->n_fds > 0) {
        say_unread(c, text);
        return error;
    }
    if (error)
        kvq__connection_end(c, "does not read its replies");
    else
        c->unread_fds += c->n_fds;
    return 0;
}

static void on_readable(uv_poll_t *handle, int status, int events);

// The loop looks at timers before it looks at sockets: where the loop itself was late, a hello may
// lie there unread. So who is late is given one more pass of the loop.
static void on_hello_late(uv_timer_t *timer)
{
    struct kvq__connection *c = timer->data;
    assert(c->id == 0);
    if (c->is_late) {
        kvq__connection_end(c, "said no hello in time");
        return;
    }
    c->is_late = true;
    uv_timer_start(timer, on_hello_late, 1, 0);
}

void kvq__connection_back(struct kvq__connection *c)
{
    assert(c->state != KVQ__CONNECTION_BUSY);
    if (c->end_when_back)
        kvq__connection_detach(c);
    else if (c->state != KVQ__CONNECTION_ENDING)
        uv_poll_start(&c->poll, UV_READABLE | UV_DISCONNECT, on_readable);
}

static void on_readable(uv_poll_t *handle, int status, int events)
{
    struct kvq__connection *c = handle->data;
    struct kvq__packet *packet = &c->attach->packet;
    char text[KVQ_TEXT_BYTES] = "";
    (void)events;
    if (c->state == KVQ__CONNECTION_BUSY)
        status = KVQ_E_DISCONNECTED; // nothing else was watched for
    int got = status < 0 ? KVQ_E_DISCONNECTED : kvq__packet_receive(c->fd, packet, text);
    if (got == 0)
        return;
    if (got < 0) {
        kvq__connection_end(c, got == KVQ_E_DISCONNECTED ? "closed by the client" : text);
        return;
    }
    kvq__connection_request(c, packet);
    // While the command is at the poller the socket is only watched for its end, and how long that
    // takes is not the client's doing.
    if (c->state == KVQ__CONNECTION_BUSY && !c->end_when_back) {
        uv_timer_stop(&c->timer);
        uv_poll_start(&c->poll, UV_DISCONNECT, on_readable);
    }
}

static void on_exit_of_peer(uv_poll_t *handle, int status, int events)
{
    (void)status;
    (void)events;
    kvq__connection_end(handle->data, "its process ended");
}

// Takes over fd and pidfd.
static void add_connection(struct kvq__attach *a, int fd, int pidfd, const struct kvq__peer *peer)
{
    struct kvq__connection *c = calloc(1, sizeof *c); // its arena stays untouched
    if (!c) {
        close(fd);
        if (pidfd >= 0)
            close(pidfd);
        kvq__log(KVQ_LOG_ERROR, "no_memory", "what=connection");
        return;
    }
    c->attach = a;
    c->server = a->server;
    c->fd = fd;
    c->pidfd = pidfd;
    c->peer = *peer;
    c->poll.data = c->pid_poll.data = c->timer.data = c;
    kvq_arena_init(&c->arena, c->arena_memory, sizeof c->arena_memory);
    int error = uv_poll_init(&a->server->loop, &c->poll, fd);
    if (error) {
        kvq__log(KVQ_LOG_ERROR, "not_watched", "what=connection error=\"%s\"", uv_strerror(error));
        close(fd);
        if (pidfd >= 0)
            close(pidfd);
        free(c);
        return;
    }
    TAILQ_INSERT_TAIL(&a->connections, c, link);
    a->count++;
    uv_timer_init(&a->server->loop, &c->timer);
    c->handles = 2;
    if (pidfd >= 0 && uv_poll_init(&a->server->loop, &c->pid_poll, pidfd) == 0) {
        c->handles++;
        uv_poll_start(&c->pid_poll, UV_READABLE, on_exit_of_peer);
    } else if (pidfd >= 0) {
        close(pidfd);
        c->pidfd = -1;
    }
    uv_timer_start(&c->timer, on_hello_late, KVQ_ATTACH_TIMEOUT_MS, 0);
    uv_poll_start(&c->poll, UV_READABLE | UV_DISCONNECT, on_readable);
}

// ---- The end of a client ----

static void gone_on_loop(struct kvq__mail *mail)
{
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)mail - offsetof(struct kvq__connection, mail));
    assert(c->state == KVQ__CONNECTION_ENDING && !c->gone_due);
    kvq__spares_give_back(c);
    c->gone_due = true;
    if (c->giving_back == 0)
        kvq__connection_gone(c);
}

void kvq__connection_check_gone(struct kvq__connection *c)
{
    assert(c->detaching);
    if (c->holding || !LIST_EMPTY(&c->lines) || !LIST_EMPTY(&c->regions) || !LIST_EMPTY(&c->tables))
        return;
    if (c->client)
        LIST_REMOVE(c, client_link);
    kvq__mailbox_post(&c->server->box, &c->mail, gone_on_loop);
}

// Poller's thread.
static void detach_client(struct kvq__mail *mail)
{
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)mail - offsetof(struct kvq__connection, mail));
    assert(!c->detaching && c->state == KVQ__CONNECTION_ENDING);
    c->detaching = true;
    c->holding = true; // until all lines were told, nobody posts the end
    if (c->client && c->member.broken)
        kvq__client_distrust(c->client);
    c->member.broken = true;
    if (c->client)
        kvq__client_detach(c->client);
    struct kvq__line *line = LIST_FIRST(&c->lines), *next;
    for (; line; line = next) {
        next = LIST_NEXT(line, link);
        kvq__port_remove(c->server->poller, &line->port);
    }
    c->holding = false;
    kvq_word_store_release(&c->end_seen, 1);
    kvq__connection_check_gone(c);
}

void kvq__connection_detach(struct kvq__connection *c)
{
    assert(c->state != KVQ__CONNECTION_BUSY && c->state != KVQ__CONNECTION_ENDING);
    c->state = KVQ__CONNECTION_ENDING;
    post_end(c, &c->mail, detach_client);
}

// ---- Accepting ----

// Tells somebody who is let in no further why.
static void refuse_stranger(struct kvq__attach *a, int fd, const struct kvq__peer *peer,
                            const char *text)
{
    size_t length;
    uint8_t bytes[2 * KVQ_TEXT_BYTES];
    char quoted[KVQ_TEXT_BYTES];
    Kvq__Reply reply = KVQ__REPLY__INIT; // number 0: to no request
    reply.epoch = a->server->identity.epoch;
    reply.status = KVQ_E_LIMIT;
    reply.text = (char *)(uintptr_t)text;
    kvq__refused_add(&a->server->attach_refused, reply.status);
    kvq__log_client(&a->log_budget, KVQ_LOG_WARN, "attach_refused", "uid=%u pid=%u text=%s",
                    peer->uid, peer->pid, kvq__log_quote(quoted, sizeof quoted, text));
    if (kvq_reply_pack(&reply, bytes, sizeof bytes, &length) == 0)
        kvq__packet_send(fd, bytes, length, NULL, 0);
}

static int check_connections(const struct kvq__attach *a, const struct kvq__peer *peer, char *text)
{
    uint64_t most = a->server->config.max_clients + STRANGERS;
    uint32_t own = kvq__attach_held(a, peer->uid).connections;
    if (a->count >= most || (!peer->admin && !kvq__share_allows(own, 1, a->count, most))) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "user %u has %u connections and all users have %u; max_clients = %llu allows %llu "
                 "together, and one user as many as stay free for others",
                 peer->uid, own, a->count, (unsigned long long)a->server->config.max_clients,
                 (unsigned long long)most);
        return KVQ_E_LIMIT;
    }
    return kvq__attach_check_files(a, peer, KVQ__FILES_OF_CONNECTION, text);
}

static void on_connection(void *context, int fd)
{
    struct kvq__attach *a = context;
    struct kvq__peer peer;
    char text[KVQ_TEXT_BYTES] = "";
    int pidfd;
    if (kvq__socket_peer(fd, &peer, &pidfd, text) != 0) {
        kvq__log_client(&a->log_budget, KVQ_LOG_WARN, "unknown_peer", "error=\"%s\"", text);
        kvq__packet_end(fd, &a->packet);
        return;
    }
    peer.admin = kvq__server_role(a->server, &peer) == KVQ__ROLE_ADMIN;
    if (check_connections(a, &peer, text) != 0) {
        refuse_stranger(a, fd, &peer, text);
        kvq__packet_end(fd, &a->packet);
        if (pidfd >= 0)
            close(pidfd);
        return;
    }
    add_connection(a, fd, pidfd, &peer);
}

int kvq__attach_open(struct kvq__server *server, struct kvq__attach **out, char *text)
{
    struct kvq__attach *a = calloc(1, sizeof *a);
    *out = NULL;
    if (!a) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for the attach socket");
        return KVQ_E_NO_MEMORY;
    }
    a->server = server;
    a->door.context = a;
    a->door.enter = on_connection;
    int error = kvq__door_open(&a->door, &server->loop, server->config.runtime_dir,
                               KVQ_ATTACH_SOCKET, SOCK_SEQPACKET, text);
    if (error) {
        free(a);
        return error;
    }
    TAILQ_INIT(&a->connections);
    LIST_INIT(&a->clients);
    STAILQ_INIT(&a->returns);
    STAILQ_INIT(&a->letting_go);
    STAILQ_INIT(&a->let_go);
    kvq__bundles_open(a);
    *out = a;
    return 0;
}

void kvq__attach_refuse(struct kvq__attach *a)
{
    kvq__door_close(&a->door);
}

void kvq__attach_end_all(struct kvq__attach *a)
{
    struct kvq__connection *c;
    TAILQ_FOREACH (c, &a->connections, link)
        kvq__connection_end(c, "the daemon is leaving");
}

uint32_t kvq__attach_count(const struct kvq__attach *a)
{
    return a ? a->count : 0;
}

bool kvq__attach_idle(const struct kvq__attach *a)
{
    return !a || (a->count == 0 && a->n_letting_go == 0);
}

void kvq__attach_kick(struct kvq__attach *a, uint64_t client)
{
    struct kvq__connection *c;
    TAILQ_FOREACH (c, &a->connections, link)
        if (c->id == client)
            break;
    if (c)
        kvq__connection_end(c, "kicked by an administrator");
}

void kvq__attach_free(struct kvq__attach **attach)
{
    const struct kvq__attach *a = *attach;
    assert(!a || (STAILQ_EMPTY(&a->returns) && a->n_lines == 0 && a->buffer_bytes == 0));
    assert(kvq__attach_idle(*attach));
    if (*attach)
        kvq__bundles_close(*attach);
    free(*attach);
    *attach = NULL;
}
