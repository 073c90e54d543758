// SPDX-License-Identifier: Apache-2.0
//
// The attach socket: connecting, packets with file descriptors, and the daemon's memory.
//
// What comes from the daemon is checked like any foreign thing: cut packets are refused, and
// descriptors are counted and closed wherever they are not wanted.
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static int explain_connect(const char *path, uint32_t timeout_ms)
{
    switch (errno) {
    case ENOENT:
    case ECONNREFUSED:
    case ENOTDIR:
        return kvq__set_error(
            KVQ_E_NO_DAEMON,
            "nothing listens at %s (%s); start kvqd, or name its runtime directory in "
            "KVQ_RUNTIME_DIR",
            path, errno == ENOENT ? "no such file" : "connection refused");
    case EACCES:
    case EPERM:
        return kvq__set_error(KVQ_E_PERMISSION,
                              "user %u may not enter %s; ask for its group or runtime_mode",
                              (unsigned)geteuid(), path);
    case EAGAIN:
        return kvq__set_error(KVQ_E_NO_DAEMON,
                              "the daemon at %s took no connection within %u ms; is it stopped?",
                              path, timeout_ms);
    default:
        return kvq__set_error_errno("cannot connect to %s", path);
    }
}

int kvq__socket_connect(const char *runtime_dir, uint32_t timeout_ms, int *fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length =
        snprintf(address.sun_path, sizeof address.sun_path, "%s/" KVQ_ATTACH_SOCKET, runtime_dir);
    if (length < 0 || (size_t)length >= sizeof address.sun_path)
        return kvq__set_error(
            KVQ_E_INVALID,
            "the runtime directory's path has %zu bytes, at most %zu fit a socket: %s",
            strlen(runtime_dir), sizeof address.sun_path - sizeof "/" KVQ_ATTACH_SOCKET,
            runtime_dir);
    *fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (*fd < 0)
        return kvq__set_error_errno("cannot make a socket");
    // Also bounds a connect that waits for a full backlog.
    struct timeval limit = {timeout_ms / 1000, timeout_ms % 1000 * 1000};
    setsockopt(*fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    int rc;
    do {
        rc = connect(*fd, (struct sockaddr *)&address, sizeof address);
    } while (rc < 0 && errno == EINTR);
    if (rc == 0)
        return KVQ_OK;
    rc = explain_connect(address.sun_path, timeout_ms);
    close(*fd);
    *fd = -1;
    return rc;
}

// Waits for events on fd. KVQ_E_DEADLINE when the time is over.
static int wait_for(int fd, short events, uint64_t deadline_ns)
{
    struct pollfd p = {.fd = fd, .events = events};
    for (;;) {
        uint64_t now = kvq_now_ns();
        uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
        struct timespec t = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
        int n = ppoll(&p, 1, &t, NULL);
        if (n > 0)
            return KVQ_OK;
        if (n == 0)
            return KVQ_E_DEADLINE;
        if (errno != EINTR)
            return kvq__set_error_errno("cannot wait for the daemon");
    }
}

static int disconnected(void)
{
    return kvq__set_error(KVQ_E_DISCONNECTED,
                          "the daemon is gone or has closed this connection; its log says why; "
                          "kvq_reattach connects again");
}

int kvq__socket_send(int fd, const void *bytes, size_t n, int send_fd, uint64_t deadline_ns)
{
    assert(fd >= 0 && n > 0 && n <= KVQ_MAX_MESSAGE);
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {(void *)(uintptr_t)bytes, n};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (send_fd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &send_fd, sizeof(int));
    }
    for (;;) {
        if (sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
            return KVQ_OK;
        if (errno == EPIPE || errno == ECONNRESET)
            return disconnected();
        if (errno != EAGAIN && errno != EINTR)
            return kvq__set_error_errno("cannot send %zu bytes to the daemon", n);
        int rc = wait_for(fd, POLLOUT, deadline_ns);
        if (rc)
            return rc;
    }
}

static void collect_fds(struct msghdr *message, int *fds, uint32_t *n_fds)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n && *n_fds < KVQ_MAX_PACKET_FDS; i++)
            memcpy(&fds[(*n_fds)++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
    }
}

int kvq__socket_receive(int fd, void *bytes, size_t size, size_t *n, int *fds, uint32_t *n_fds,
                        bool *lost, uint64_t deadline_ns)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int) * KVQ_MAX_PACKET_FDS)];
    } control;
    struct iovec part = {bytes, size};
    struct msghdr message;
    ssize_t got;
    int resets = 0;
    assert(fd >= 0 && size > 0);
    *n_fds = 0;
    do {
        int rc = wait_for(fd, POLLIN, deadline_ns);
        if (rc)
            return rc;
        message = (struct msghdr){.msg_iov = &part,
                                  .msg_iovlen = 1,
                                  .msg_control = &control,
                                  .msg_controllen = sizeof control};
        got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        // The kernel tells of a reset once, and then gives what was sent before it.
    } while (got < 0 &&
             (errno == EAGAIN || errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    if (got == 0 || (got < 0 && errno == ECONNRESET))
        return disconnected();
    if (got < 0)
        return kvq__set_error_errno("cannot receive from the daemon");
    collect_fds(&message, fds, n_fds);
    *lost = message.msg_flags & MSG_CTRUNC;
    if (message.msg_flags & MSG_TRUNC) {
        kvq__close_fds(fds, *n_fds);
        *n_fds = 0;
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon sent a packet longer than the protocol allows");
    }
    *n = (size_t)got;
    return KVQ_OK;
}

void kvq__close_fds(int *fds, uint32_t n)
{
    assert(n <= KVQ_MAX_PACKET_FDS);
    for (uint32_t i = 0; i < n; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = -1;
    }
}

void kvq__socket_finish(int fd, uint32_t timeout_ms)
{
    uint64_t deadline = kvq_now_ns() + (uint64_t)timeout_ms * 1000000u;
    char rest[64];
    int fds[KVQ_MAX_PACKET_FDS];
    uint32_t n_fds;
    size_t n;
    bool lost;
    assert(fd >= 0);
    shutdown(fd, SHUT_WR);
    int rc;
    do { // late replies, which are longer than there is room here
        rc = kvq__socket_receive(fd, rest, sizeof rest, &n, fds, &n_fds, &lost, deadline);
        if (rc == KVQ_OK)
            kvq__close_fds(fds, n_fds);
    } while (rc == KVQ_OK || rc == KVQ_E_PROTOCOL);
}

int kvq__check_memfd(int memfd, size_t bytes, const char *what)
{
    struct stat st;
    int seals = fcntl(memfd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "%s: the daemon's memory is not sealed against shrinking", what);
    if (fstat(memfd, &st) < 0)
        return kvq__set_error_errno("%s: cannot ask for the size of the daemon's memory", what);
    if ((uint64_t)st.st_size < bytes)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "%s: the daemon's memory has %llu bytes, %zu are needed", what,
                              (unsigned long long)st.st_size, bytes);
    return KVQ_OK;
}

int kvq__map(int memfd, size_t bytes, int prot, const char *what, void **mapping)
{
    assert(memfd >= 0 && bytes > 0);
    int rc = kvq__check_memfd(memfd, bytes, what);
    if (rc)
        return rc;
    *mapping = mmap(NULL, bytes, prot, MAP_SHARED, memfd, 0);
    if (*mapping == MAP_FAILED) {
        *mapping = NULL;
        return kvq__set_error_errno("%s: cannot map %zu bytes", what, bytes);
    }
    return KVQ_OK;
}
