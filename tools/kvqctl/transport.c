// SPDX-License-Identifier: Apache-2.0
// The ZeroMQ side of kvqctl; the only file here that knows zmq.h.
#include "tools/kvqctl/transport.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include "proto/clock.h"
#include "proto/refusal.h"

struct kvq__transport {
    void *context;
    void *socket;
    void *monitor; // of what happens to its connection
    bool met;      // both ends have said who they are
    bool lost;     // after that, and since the last send
};

int64_t kvq__ctl_now_ms(void)
{
    return (int64_t)(kvq_now_ns() / 1000000);
}

// Reads to the end, or as far as a refusal may be long. The number of bytes or a negative errno.
static int read_answer(int fd, int timeout_ms, uint8_t *bytes, size_t capacity)
{
    size_t n = 0;
    int64_t end = kvq__ctl_now_ms() + timeout_ms;
    while (n < capacity) {
        int64_t left = end - kvq__ctl_now_ms();
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        int ready = poll(&wait, 1, left > 0 ? (int)left : 0);
        if (ready == 0)
            return -ETIMEDOUT;
        ssize_t got = ready < 0 ? -1 : recv(fd, bytes + n, capacity - n, MSG_DONTWAIT);
        if (got < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (got <= 0) // reset: it has closed its side with our end unread
            return (int)n;
        n += (size_t)got;
    }
    return (int)n;
}

// Reads one message of two frames; the second one goes to data. Its size or a negative errno.
static int receive_pair(void *socket, void *first, size_t n, void *data, size_t capacity)
{
    int more = 0;
    size_t bytes = sizeof more;
    if (zmq_recv(socket, first, n, ZMQ_DONTWAIT) < 0)
        return -zmq_errno();
    if (zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &bytes) != 0 || !more)
        return -EPROTO;
    int size = zmq_recv(socket, data, capacity, ZMQ_DONTWAIT);
    if (size < 0)
        return -zmq_errno();
    return (size_t)size > capacity ? -EMSGSIZE : size;
}

// ---- Connecting ----

enum { MOST_NAME = 256 };

// A connected socket, with its numeric address as ZeroMQ takes it. Or a negative errno.
static int connect_path(const char *path, char endpoint[MOST_NAME])
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(path);
    if (length >= sizeof address.sun_path)
        return -ENAMETOOLONG;
    memcpy(address.sun_path, path, length + 1);
    snprintf(endpoint, MOST_NAME, "ipc://%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd < 0 ? -errno : fd;
    int error = -errno;
    close(fd);
    return error;
}

// "host:port" or "[host]:port". False: it is neither.
static bool split_host(const char *far, char host[MOST_NAME], char port[16])
{
    const char *colon = strrchr(far, ':');
    size_t n = colon ? (size_t)(colon - far) : 0;
    bool braces = n > 2 && far[0] == '[' && far[n - 1] == ']';
    if (n == 0 || n >= MOST_NAME || !colon[1] || strlen(colon + 1) >= 16)
        return false;
    snprintf(host, MOST_NAME, "%.*s", (int)(braces ? n - 2 : n), braces ? far + 1 : far);
    snprintf(port, 16, "%s", colon + 1);
    return true;
}

static int connect_address(const struct addrinfo *a, int timeout_ms)
{
    int error = 0;
    socklen_t size = sizeof error;
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, a->ai_addr, a->ai_addrlen) != 0)
        error = errno;
    if (error == EINPROGRESS) {
        struct pollfd wait = {.fd = fd, .events = POLLOUT};
        error = poll(&wait, 1, timeout_ms) > 0 ? 0 : ETIMEDOUT;
        if (error == 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
            error = errno;
    }
    if (error == 0)
        return fd;
    close(fd);
    return error == EACCES || error == EPERM ? -ENETUNREACH : -error; // a firewall of this machine
}

// As connect_path. The first of the host's addresses where somebody listens.
static int connect_far(const char *far, int timeout_ms, char endpoint[MOST_NAME], char *text)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *all = NULL;
    char host[MOST_NAME], port[16], number[64];
    if (!split_host(far, host, port))
        return -EINVAL;
    int fd = -EHOSTUNREACH, wrong = getaddrinfo(host, port, &hints, &all);
    if (wrong)
        snprintf(text, KVQ_TEXT_BYTES, "%s", gai_strerror(wrong));
    for (const struct addrinfo *a = wrong ? NULL : all; a && fd < 0; a = a->ai_next) {
        if (getnameinfo(a->ai_addr, a->ai_addrlen, number, sizeof number, NULL, 0, NI_NUMERICHOST))
            continue;
        fd = connect_address(a, timeout_ms);
        snprintf(endpoint, MOST_NAME, strchr(number, ':') ? "tcp://[%s]:%s" : "tcp://%s:%s", number,
                 port);
    }
    if (all)
        freeaddrinfo(all);
    return fd;
}

// The try, with the address that answered.
static int try_at(const struct kvq__transport_at *at, int timeout_ms, char endpoint[MOST_NAME],
                  char *text)
{
    uint8_t bytes[KVQ_REFUSAL_BYTES + 1];
    int fd = at->far ? connect_far(at->far, timeout_ms, endpoint, text)
                     : connect_path(at->path, endpoint);
    if (fd < 0)
        return fd;
    // The daemon answers our end by its own, and a refusal comes before that.
    shutdown(fd, SHUT_WR);
    int result = read_answer(fd, timeout_ms, bytes, KVQ_REFUSAL_BYTES);
    const char *refusal = result < 0 ? NULL : kvq_refusal_text(bytes, (size_t)result);
    if (refusal)
        snprintf(text, KVQ_TEXT_BYTES, "%.*s", KVQ_TEXT_BYTES - 1, refusal);
    close(fd);
    return refusal ? -EUSERS : result < 0 ? result : 0;
}

int kvq__transport_try(const struct kvq__transport_at *at, int timeout_ms,
                       char text[KVQ_TEXT_BYTES])
{
    char endpoint[MOST_NAME];
    return try_at(at, timeout_ms, endpoint, text);
}

static bool set_keys(void *socket, const struct kvq_key_file *key)
{
    const int yes = 1;
    return zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, key->server, KVQ_KEY_BYTES) == 0 &&
           zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, key->public_key, KVQ_KEY_BYTES) == 0 &&
           zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, key->secret, KVQ_KEY_BYTES) == 0 &&
           zmq_setsockopt(socket, ZMQ_IPV6, &yes, sizeof yes) == 0;
}

// How the exchange of keys went: 0, -EACCES, -EPROTO or -ETIMEDOUT.
static int wait_for_keys(void *monitor, int timeout_ms)
{
    uint8_t event[6], address[MOST_NAME];
    int64_t end = kvq__ctl_now_ms() + timeout_ms;
    for (;;) {
        uint16_t kind;
        int64_t left = end - kvq__ctl_now_ms();
        zmq_pollitem_t item = {.socket = monitor, .events = ZMQ_POLLIN};
        if (zmq_poll(&item, 1, left > 0 ? (long)left : 0) == 0)
            return -ETIMEDOUT;
        if (receive_pair(monitor, event, sizeof event, address, sizeof address) < 0)
            continue;
        memcpy(&kind, event, sizeof kind);
        if (kind == ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
            return 0;
        return kind == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH ? -EACCES : -EPROTO;
    }
}

// Connects, watched. 0 or a negative errno.
static int connect_watched(struct kvq__transport *t, const char *endpoint)
{
    static const char watch[] = "inproc://connection";
    const int events = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                       ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
                       ZMQ_EVENT_DISCONNECTED;
    t->monitor = zmq_socket(t->context, ZMQ_PAIR);
    bool watched = t->monitor && zmq_socket_monitor(t->socket, watch, events) == 0 &&
                   zmq_connect(t->monitor, watch) == 0;
    return watched && zmq_connect(t->socket, endpoint) == 0 ? 0 : -EIO;
}

static int make_sockets(struct kvq__transport *t, const struct kvq__transport_at *at,
                        const char *endpoint, int timeout_ms)
{
    int none = 0;
    t->context = zmq_ctx_new();
    t->socket = t->context ? zmq_socket(t->context, ZMQ_DEALER) : NULL;
    if (!t->socket || zmq_setsockopt(t->socket, ZMQ_LINGER, &none, sizeof none) != 0 ||
        (at->far && !set_keys(t->socket, at->key)))
        return -EIO;
    int result = connect_watched(t, endpoint);
    result = result == 0 && at->far ? wait_for_keys(t->monitor, timeout_ms) : result;
    t->met = result == 0 && at->far;
    return result;
}

int kvq__transport_open(struct kvq__transport **transport, const struct kvq__transport_at *at,
                        int timeout_ms, char text[KVQ_TEXT_BYTES])
{
    char endpoint[MOST_NAME];
    int result = try_at(at, timeout_ms, endpoint, text);
    *transport = NULL;
    if (result)
        return result;
    struct kvq__transport *made = calloc(1, sizeof *made);
    if (!made)
        return -ENOMEM;
    result = make_sockets(made, at, endpoint, timeout_ms);
    if (result)
        kvq__transport_close(&made);
    *transport = made;
    return result;
}

void kvq__transport_close(struct kvq__transport **transport)
{
    if (!*transport)
        return;
    if ((*transport)->monitor) {
        zmq_socket_monitor((*transport)->socket, NULL, 0);
        zmq_close((*transport)->monitor);
    }
    if ((*transport)->socket)
        zmq_close((*transport)->socket);
    if ((*transport)->context)
        zmq_ctx_term((*transport)->context);
    free(*transport);
    *transport = NULL;
}

// Takes all that has happened to the connection. Where it is lost ZeroMQ makes another one, and
// what was asked on it is asked by nobody. A connection that ends before both ends have met is one
// that the daemon has no room for: what was asked goes out on the next.
static void look_at_connection(struct kvq__transport *t)
{
    uint8_t event[6], address[MOST_NAME];
    while (receive_pair(t->monitor, event, sizeof event, address, sizeof address) >= 0) {
        uint16_t kind;
        memcpy(&kind, event, sizeof kind);
        if (kind == ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
            t->met = true;
        if (kind != ZMQ_EVENT_DISCONNECTED)
            continue;
        t->lost |= t->met;
        t->met = false;
    }
}

int kvq__transport_send(struct kvq__transport *transport, const void *data, size_t size)
{
    look_at_connection(transport);
    transport->lost = false; // that was about what was asked before
    return zmq_send(transport->socket, data, size, 0) < 0 ? -zmq_errno() : 0;
}

int kvq__transport_receive(struct kvq__transport *transport, void *data, size_t capacity,
                           int timeout_ms, int stop_fd)
{
    zmq_pollitem_t items[] = {{.socket = transport->socket, .events = ZMQ_POLLIN},
                              {.socket = transport->monitor, .events = ZMQ_POLLIN},
                              {.fd = stop_fd, .events = ZMQ_POLLIN}};
    int ready = zmq_poll(items, stop_fd < 0 ? 2 : 3, timeout_ms);
    if (ready < 0)
        return -zmq_errno();
    if (stop_fd >= 0 && items[2].revents)
        return -ECANCELED;
    if (ready == 0)
        return -ETIMEDOUT;
    look_at_connection(transport);
    int size = zmq_recv(transport->socket, data, capacity, ZMQ_DONTWAIT);
    if (size < 0 && zmq_errno() == EAGAIN)
        return transport->lost ? -ECONNRESET : -EINTR; // or both ends have met
    if (size < 0)
        return -zmq_errno();
    // zmq_recv cuts a longer message short and returns its full size.
    return (size_t)size > capacity ? -EMSGSIZE : size;
}
