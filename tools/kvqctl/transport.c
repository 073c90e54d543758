// SPDX-License-Identifier: Apache-2.0
// The ZeroMQ side of kvqctl; the only file here that knows zmq.h.
#include "tools/kvqctl/transport.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

struct kvq__transport {
    void *context;
    void *socket;
};

// Whether anybody listens at the path: 0 or a negative errno.
static int probe(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(path);
    int result = 0;
    if (length >= sizeof address.sun_path)
        return -ENAMETOOLONG;
    memcpy(address.sun_path, path, length + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        result = -errno;
    close(fd);
    return result;
}

int kvq__transport_open(struct kvq__transport **transport, const char *path)
{
    char endpoint[sizeof "ipc://" + sizeof((struct sockaddr_un *)0)->sun_path];
    int none = 0;
    int result = probe(path);
    *transport = NULL;
    if (result)
        return result;
    snprintf(endpoint, sizeof endpoint, "ipc://%s", path);
    struct kvq__transport *made = calloc(1, sizeof *made);
    if (!made)
        return -ENOMEM;
    made->context = zmq_ctx_new();
    made->socket = made->context ? zmq_socket(made->context, ZMQ_DEALER) : NULL;
    if (!made->socket || zmq_setsockopt(made->socket, ZMQ_LINGER, &none, sizeof none) != 0 ||
        zmq_connect(made->socket, endpoint) != 0) {
        result = -zmq_errno();
        kvq__transport_close(&made);
        return result;
    }
    *transport = made;
    return 0;
}

void kvq__transport_close(struct kvq__transport **transport)
{
    if (!*transport)
        return;
    if ((*transport)->socket)
        zmq_close((*transport)->socket);
    if ((*transport)->context)
        zmq_ctx_term((*transport)->context);
    free(*transport);
    *transport = NULL;
}

int kvq__transport_send(struct kvq__transport *transport, const void *data, size_t size)
{
    return zmq_send(transport->socket, data, size, 0) < 0 ? -zmq_errno() : 0;
}

int kvq__transport_receive(struct kvq__transport *transport, void *data, size_t capacity,
                           int timeout_ms)
{
    zmq_pollitem_t item = {.socket = transport->socket, .events = ZMQ_POLLIN};
    int ready = zmq_poll(&item, 1, timeout_ms);
    if (ready < 0)
        return -zmq_errno();
    if (ready == 0)
        return -ETIMEDOUT;
    int size = zmq_recv(transport->socket, data, capacity, ZMQ_DONTWAIT);
    if (size < 0)
        return -zmq_errno();
    // zmq_recv cuts a longer message short and returns its full size.
    return (size_t)size > capacity ? -EMSGSIZE : size;
}
