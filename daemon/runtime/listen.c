// SPDX-License-Identifier: Apache-2.0
//
// Listening and accepting; see listen.h.
#include "daemon/runtime/listen.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/log/log.h"
#include "proto/limits.h"
#include "proto/status.h"

#ifndef SO_PASSRIGHTS // Linux 6.16
#define SO_PASSRIGHTS 83
#endif

enum { BACKLOG = 128, PAUSE_MS = 100 };

static void on_connect(uv_poll_t *handle, int status, int events);

static void on_pause_over(uv_timer_t *timer)
{
    struct kvq__door *door = timer->data;
    if (door->open)
        uv_poll_start(&door->poll, UV_READABLE, on_connect);
}

static void on_connect(uv_poll_t *handle, int status, int events)
{
    struct kvq__door *door = handle->data;
    assert(door->open && door->enter);
    (void)events;
    if (status < 0)
        return;
    int fd = accept4(door->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
        door->enter(door->context, fd);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        kvq__log(KVQ_LOG_ERROR, "accept_failed", "error=\"%s\" remedy=\"raise LimitNOFILE\"",
                 strerror(errno));
        uv_poll_stop(&door->poll);
        uv_timer_start(&door->pause, on_pause_over, PAUSE_MS, 0);
    }
}

static int listen_at(struct kvq__door *door, const char *directory, const char *name, int type,
                     char *text)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    static_assert(sizeof door->path == sizeof address.sun_path, "a path fits its socket");
    int length = snprintf(door->path, sizeof door->path, "%s/%s", directory, name);
    if (length < 0 || (size_t)length >= sizeof door->path) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "the runtime directory's path has %zu bytes; at most %zu fit the sockets in it",
                 strlen(directory), sizeof door->path - strlen(name) - 2);
        return KVQ_E_SYSTEM;
    }
    memcpy(address.sun_path, door->path, sizeof door->path);
    unlink(door->path); // ours alone: the directory's lock is held
    door->fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    // Only packets have descriptors beside them. Elsewhere they would come to whoever reads plain
    // bytes, whom closing them could make wait; what is accepted here inherits that. Older kernels
    // do not know it.
    const int no = 0;
    if (door->fd >= 0 && type == SOCK_STREAM)
        setsockopt(door->fd, SOL_SOCKET, SO_PASSRIGHTS, &no, sizeof no);
    // Whoever may enter the directory may connect; what each may do is checked by user.
    if (door->fd >= 0 && bind(door->fd, (struct sockaddr *)&address, sizeof address) == 0 &&
        chmod(door->path, 0666) == 0 && listen(door->fd, BACKLOG) == 0)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES, "cannot listen at %s: %s", door->path, strerror(errno));
    if (door->fd >= 0)
        close(door->fd);
    return KVQ_E_SYSTEM;
}

int kvq__door_open_fd(struct kvq__door *door, uv_loop_t *loop, int fd, char *text)
{
    assert(!door->open && door->enter);
    door->fd = fd;
    int error = uv_poll_init(loop, &door->poll, fd);
    if (error) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot watch %s: %s",
                 door->path[0] ? door->path : "a socket", uv_strerror(error));
        close(fd);
        if (door->path[0])
            unlink(door->path);
        return KVQ_E_SYSTEM;
    }
    uv_timer_init(loop, &door->pause);
    door->poll.data = door->pause.data = door;
    door->open = true;
    uv_poll_start(&door->poll, UV_READABLE, on_connect);
    return 0;
}

int kvq__door_open(struct kvq__door *door, uv_loop_t *loop, const char *directory, const char *name,
                   int type, char *text)
{
    assert(!door->open && (type == SOCK_STREAM || type == SOCK_SEQPACKET));
    int error = listen_at(door, directory, name, type, text);
    return error ? error : kvq__door_open_fd(door, loop, door->fd, text);
}

int kvq__door_open_tcp(struct kvq__door *door, uv_loop_t *loop,
                       const struct kvq__listen_address *address, char *text)
{
    const int one = 1;
    int fd = socket(address->at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert(address->bytes > 0 && !door->path[0]);
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd >= 0 && bind(fd, (const struct sockaddr *)&address->at, address->bytes) == 0 &&
        listen(fd, BACKLOG) == 0)
        return kvq__door_open_fd(door, loop, fd, text);
    snprintf(text, KVQ_TEXT_BYTES, "%s", strerror(errno));
    if (fd >= 0)
        close(fd);
    return KVQ_E_SYSTEM;
}

void kvq__door_close(struct kvq__door *door)
{
    if (!door->open)
        return;
    door->open = false;
    uv_close((uv_handle_t *)&door->poll, NULL);
    uv_close((uv_handle_t *)&door->pause, NULL);
    close(door->fd);
    if (door->path[0])
        unlink(door->path);
}
