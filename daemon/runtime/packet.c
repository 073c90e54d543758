// SPDX-License-Identifier: Apache-2.0
//
// recvmsg and sendmsg with SCM_RIGHTS, and the credentials of a peer; see packet.h.
#include "daemon/runtime/packet.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/runtime/descriptors.h"
#include "proto/status.h"

#ifndef SO_PEERPIDFD // Linux 6.5
#define SO_PEERPIDFD 77
#endif

enum {
    ROOM_FDS = 2,   // a request has one at the most; one more is seen and told
    MOST_FDS = 253, // beside a packet: the kernel's SCM_MAX_FD
};

union received {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(MOST_FDS * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
};

// A packet must not use up the daemon's descriptors, not even until it is refused. But the kernel
// closes what is not taken, on this thread, which may take as long as the sender likes.
static size_t room_for_fds(void)
{
    bool plenty = kvq__descriptors_free() >= MOST_FDS + KVQ__FILES_SPARE;
    return CMSG_SPACE((plenty ? MOST_FDS : ROOM_FDS) * sizeof(int));
}

// The last one of a socket that lingers would keep this thread for as long as the sender chose.
static void close_foreign(int fd)
{
    const struct linger none = {.l_onoff = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none); // fails for all that is no socket
    close(fd);
}

void kvq__packet_close_fds(struct kvq__packet *packet)
{
    assert(packet->n_fds <= ROOM_FDS);
    for (uint32_t i = 0; i < packet->n_fds; i++)
        close_foreign(packet->fds[i]);
    packet->n_fds = 0;
}

// Collects the descriptors of a message; what does not fit is closed. Returns how many came.
static uint32_t collect(struct kvq__packet *packet, struct msghdr *message)
{
    uint32_t came = 0;
    packet->n_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            came++;
            if (packet->n_fds < ROOM_FDS)
                packet->fds[packet->n_fds++] = fd;
            else
                close_foreign(fd);
        }
    }
    return came;
}

int kvq__packet_receive(int socket, struct kvq__packet *packet, char *text)
{
    union received control;
    struct iovec part = {packet->bytes, sizeof packet->bytes};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = room_for_fds()};
    packet->n_fds = 0;
    ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : KVQ_E_DISCONNECTED;
    uint32_t came = collect(packet, &message);
    packet->length = (size_t)got;
    const char *complaint = NULL;
    if (message.msg_flags & MSG_TRUNC)
        complaint = "a packet is longer than 65536 bytes";
    else if (message.msg_flags & MSG_CTRUNC || came > ROOM_FDS)
        complaint = "more descriptors beside a packet than were taken (or the daemon's limit of "
                    "open files is reached)";
    if (complaint) {
        kvq__packet_close_fds(packet);
        snprintf(text, KVQ_TEXT_BYTES, "%s", complaint);
        return KVQ_E_PROTOCOL;
    }
    if (got == 0 && came == 0)
        return KVQ_E_DISCONNECTED;
    return 1;
}

void kvq__packet_end(int socket, struct kvq__packet *packet)
{
    const int yes = 1;
    ssize_t got;
    shutdown(socket, SHUT_RD); // no more can come
    // From here on credentials are beside each packet, an empty one too, but not at the end.
    setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes);
    for (;;) {
        union received control;
        struct iovec part = {packet->bytes, sizeof packet->bytes};
        struct msghdr message = {.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = &control,
                                 .msg_controllen =
                                     room_for_fds() + CMSG_SPACE(sizeof(struct ucred))};
        got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got < 0 && (errno == ECONNRESET || errno == EINTR)) // told once, before what is there
            continue;
        if (got < 0 || !CMSG_FIRSTHDR(&message))
            break;
        collect(packet, &message);
        kvq__packet_close_fds(packet);
    }
    close(socket);
}

int kvq__packet_send(int socket, const void *bytes, size_t length, const int *fds, uint32_t n_fds)
{
    assert(length <= KVQ_MAX_MESSAGE);
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(KVQ_MAX_PACKET_FDS * sizeof(int))];
    } control;
    assert(n_fds <= KVQ_MAX_PACKET_FDS);
    struct iovec part = {(void *)(uintptr_t)bytes, length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (n_fds) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    ssize_t sent;
    do {
        sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0)
        return errno == ETOOMANYREFS ? KVQ_E_LIMIT : KVQ_E_DISCONNECTED;
    return 0;
}

// User, process and primary group at the other end; the rest of peer is cleared.
static int credentials_of(int socket, struct kvq__peer *peer)
{
    struct ucred credentials;
    socklen_t bytes = sizeof credentials;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0)
        return KVQ_E_SYSTEM;
    memset(peer, 0, sizeof *peer);
    peer->uid = credentials.uid;
    peer->pid = (uint32_t)credentials.pid;
    peer->gids[0] = credentials.gid;
    peer->n_gids = 1;
    return 0;
}

static void add_groups(int socket, struct kvq__peer *peer)
{
    assert(peer->n_gids == 1);
    gid_t groups[KVQ_MAX_GROUPS - 1];
    socklen_t bytes = sizeof groups;
    // Fails with ERANGE for members of more groups.
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes) != 0)
        return;
    for (size_t i = 0; i < bytes / sizeof *groups; i++)
        peer->gids[peer->n_gids++] = groups[i];
}

int kvq__socket_peer(int socket, struct kvq__peer *peer, int *pidfd, char *text)
{
    socklen_t bytes = sizeof *pidfd;
    if (credentials_of(socket, peer) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "the kernel does not say who connected: %s",
                 strerror(errno));
        return KVQ_E_SYSTEM;
    }
    add_groups(socket, peer);
    if (!pidfd)
        return 0;
    *pidfd = -1;
    // By the socket the descriptor is sure to be the peer's; by number the process could have
    // ended and the number been given away. Both are close-on-exec.
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, pidfd, &bytes) != 0)
        *pidfd = (int)syscall(SYS_pidfd_open, (pid_t)peer->pid, 0);
    if (*pidfd < 0)
        snprintf(text, KVQ_TEXT_BYTES, "cannot watch process %u: %s", peer->pid, strerror(errno));
    return 0;
}
