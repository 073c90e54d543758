// SPDX-License-Identifier: Apache-2.0
//
// The attach socket: listening, and the life of connections. Descriptors, credentials and the
// end of a client travel here; its requests go through the rings.
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/attach_internal.h"

enum {
    STRANGERS = 64, // connections beyond max_clients, so that they can be told why not
    BACKLOG = 128,
    PAUSE_MS = 100, // without free descriptors, accept again after so long
};

// ---- Connections ----

static void free_connection(uv_handle_t *handle)
{
    struct kvq__connection *c = handle->data;
    if (--c->handles > 0)
        return;
    if (c->pidfd >= 0)
        close(c->pidfd);
    close(c->fd); // last: to the client this says that all it had is returned
    TAILQ_REMOVE(&c->attach->connections, c, link);
    c->attach->count--;
    free(c);
}

void kvq__connection_gone(struct kvq__connection *c)
{
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

void kvq__connection_end(struct kvq__connection *c, const char *reason)
{
    char quoted[192];
    if (c->state == KVQ__CONNECTION_ENDING || c->end_when_back)
        return;
    kvq__log(KVQ_LOG_INFO, "connection_end", "client=%llu uid=%u pid=%u reason=%s",
             (unsigned long long)c->id, c->peer.uid, c->peer.pid,
             kvq__log_quote(quoted, sizeof quoted, reason));
    stop_watching(c);
    if (c->state == KVQ__CONNECTION_BUSY)
        c->end_when_back = true;
    else
        kvq__connection_detach(c);
}

void kvq__connection_reply(struct kvq__connection *c)
{
    size_t length;
    if (c->end_when_back || c->state == KVQ__CONNECTION_ENDING)
        return;
    int error = kvq_reply_pack(&c->reply, c->attach->out, sizeof c->attach->out, &length);
    if (error) {
        kvq__reply_status(&c->reply, &c->arena, KVQ_E_LIMIT, "the reply is longer than a message");
        c->n_fds = 0;
        error = kvq_reply_pack(&c->reply, c->attach->out, sizeof c->attach->out, &length);
        assert(error == 0);
    }
    if (kvq__packet_send(c->fd, c->attach->out, length, c->fds, c->n_fds) != 0)
        kvq__connection_end(c, "does not read its replies");
}

static void on_readable(uv_poll_t *handle, int status, int events);

void kvq__connection_back(struct kvq__connection *c)
{
    if (c->end_when_back) {
        kvq__connection_detach(c);
    } else if (c->state != KVQ__CONNECTION_ENDING) {
        if (c->id)
            uv_timer_stop(&c->timer);
        uv_poll_start(&c->poll, UV_READABLE | UV_DISCONNECT, on_readable);
    }
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
    // While the command is at the poller the socket is only watched for its end.
    if (c->state == KVQ__CONNECTION_BUSY && !c->end_when_back)
        uv_poll_start(&c->poll, UV_DISCONNECT, on_readable);
}

static void on_exit_of_peer(uv_poll_t *handle, int status, int events)
{
    (void)status;
    (void)events;
    kvq__connection_end(handle->data, "its process ended");
}

static void on_hello_late(uv_timer_t *timer)
{
    kvq__connection_end(timer->data, "said no hello in time");
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
    c->peer.admin = kvq__server_is_admin(a->server, peer->uid);
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

// ---- Listening ----

static void on_connect(uv_poll_t *handle, int status, int events);

static void on_pause_over(uv_timer_t *timer)
{
    struct kvq__attach *a = timer->data;
    if (a->listening)
        uv_poll_start(&a->poll, UV_READABLE, on_connect);
}

static void on_connect(uv_poll_t *handle, int status, int events)
{
    struct kvq__attach *a = handle->data;
    struct kvq__peer peer;
    char text[KVQ_TEXT_BYTES] = "";
    int pidfd;
    (void)events;
    if (status < 0)
        return;
    int fd = accept4(a->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            kvq__log(KVQ_LOG_ERROR, "accept_failed", "error=\"%s\" remedy=\"raise LimitNOFILE\"",
                     strerror(errno));
            uv_poll_stop(&a->poll);
            uv_timer_start(&a->pause, on_pause_over, PAUSE_MS, 0);
        }
        return;
    }
    if (a->count >= a->server->config.max_clients + STRANGERS) {
        kvq__log(KVQ_LOG_WARN, "too_many_connections", "connections=%u", a->count);
        close(fd);
        return;
    }
    if (kvq__socket_peer(fd, &peer, &pidfd, text) != 0) {
        kvq__log(KVQ_LOG_WARN, "unknown_peer", "error=\"%s\"", text);
        close(fd);
        return;
    }
    add_connection(a, fd, pidfd, &peer);
}

static int listen_at(const char *directory, int *out, char *text)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.80s/" KVQ_ATTACH_SOCKET, directory);
    unlink(address.sun_path); // ours alone: the directory's lock is held
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    // Whoever may enter the directory may connect; what each may do is checked by user.
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 ||
        chmod(address.sun_path, 0666) != 0 || listen(fd, BACKLOG) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot listen at %s: %s", address.sun_path,
                 strerror(errno));
        if (fd >= 0)
            close(fd);
        return KVQ_E_SYSTEM;
    }
    *out = fd;
    return 0;
}

int kvq__attach_open(struct kvq__server *server, struct kvq__attach **out, char *text)
{
    int fd;
    *out = NULL;
    int error = listen_at(server->config.runtime_dir, &fd, text);
    if (error)
        return error;
    struct kvq__attach *a = calloc(1, sizeof *a);
    if (!a || uv_poll_init(&server->loop, &a->poll, fd) != 0) {
        close(fd);
        snprintf(text, KVQ_TEXT_BYTES, "cannot watch the attach socket: out of memory or watches");
        free(a);
        return KVQ_E_SYSTEM;
    }
    a->server = server;
    a->fd = fd;
    a->poll.data = a->pause.data = a;
    a->listening = true;
    TAILQ_INIT(&a->connections);
    LIST_INIT(&a->clients);
    STAILQ_INIT(&a->returns);
    uv_timer_init(&server->loop, &a->pause);
    kvq__local_open(a);
    uv_poll_start(&a->poll, UV_READABLE, on_connect);
    *out = a;
    return 0;
}

void kvq__attach_refuse(struct kvq__attach *a)
{
    char path[KVQ_CONFIG_PATH + 16];
    if (!a->listening)
        return;
    a->listening = false;
    uv_close((uv_handle_t *)&a->poll, NULL);
    uv_close((uv_handle_t *)&a->pause, NULL);
    close(a->fd);
    snprintf(path, sizeof path, "%s/" KVQ_ATTACH_SOCKET, a->server->config.runtime_dir);
    unlink(path);
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
    assert(!*attach || (*attach)->count == 0);
    if (*attach)
        kvq__local_close(*attach);
    free(*attach);
    *attach = NULL;
}
