// SPDX-License-Identifier: Apache-2.0
//
// What queues and buffers are made of: memfds, mappings, eventfds and wake-up sockets.
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/attach/internal.h"
#include "daemon/runtime/descriptors.h"
#include "proto/ring.h"

// ---- What users hold ----

struct kvq__held kvq__attach_held(const struct kvq__attach *attach, uint32_t uid)
{
    const struct kvq__connection *c;
    struct kvq__held held = {0, 0};
    TAILQ_FOREACH (c, &attach->connections, link)
        if (c->peer.uid == uid) {
            held.connections++;
            held.queues += c->n_lines;
        }
    return held;
}

int kvq__attach_check_files(const struct kvq__attach *attach, const struct kvq__peer *peer,
                            uint32_t more, char *text)
{
    struct kvq__held held = kvq__attach_held(attach, peer->uid);
    uint32_t own = held.connections * KVQ__FILES_OF_CONNECTION + held.queues * KVQ__FILES_OF_QUEUE;
    uint32_t free = kvq__descriptors_free(), kept = kvq__descriptors_kept();
    uint32_t left = free > kept ? free - kept : 0;
    if (peer->admin ? more <= left : kvq__share_allows(own, more, 0, left))
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "user %u has %u descriptors of kvqd and asks for %u; of its %u (LimitNOFILE=) %u are "
             "free for engines, and one user gets as many as stay free for others; close queues or "
             "clients, or have LimitNOFILE= raised",
             peer->uid, own, more, kvq__descriptors_limit(), left);
    return KVQ_E_LIMIT;
}

// ---- Queues ----

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

void kvq__line_free(struct kvq__line *line)
{
    if (!line)
        return;
    assert(!line->timeline.shm.map && !line->events);
    assert(line->connection->n_lines > 0);
    assert(line->connection->attach->n_lines >= line->connection->n_lines);
    kvq__shm_close(&line->request);
    kvq__shm_close(&line->reply);
    close_fd(line->request_event);
    close_fd(line->wake_ours);
    close_fd(line->wake_theirs);
    line->connection->n_lines--;
    line->connection->attach->n_lines--;
    free(line);
}

static int open_wakers(struct kvq__line *line, char *text)
{
    int pair[2];
    line->request_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (line->request_event < 0 ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot make what wakes a queue: %s%s", strerror(errno),
                 errno == EMFILE ? "; raise the daemon's limit of open files (LimitNOFILE=)" : "");
        return KVQ_E_SYSTEM;
    }
    line->wake_ours = pair[0];
    line->wake_theirs = pair[1];
    // A few wake-ups in the socket are enough, and bound what a client can make us hold.
    const int small = 4096;
    setsockopt(line->wake_ours, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    return 0;
}

static int check_line(const struct kvq__connection *c, char *text)
{
    uint32_t own = kvq__attach_held(c->attach, c->peer.uid).queues, all = c->attach->n_lines;
    if (!c->peer.admin && !kvq__share_allows(own, 1, all, KVQ_MAX_PORTS)) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "user %u has %u queues and all users have %u of %d; one user gets as many as stay "
                 "free for others; close some",
                 c->peer.uid, own, all, KVQ_MAX_PORTS);
        return KVQ_E_LIMIT;
    }
    return kvq__attach_check_files(c->attach, &c->peer, KVQ__FILES_OF_QUEUE, text);
}

struct kvq__line *kvq__line_new(struct kvq__connection *connection, int *error, char *text)
{
    *error = check_line(connection, text);
    struct kvq__line *line = *error ? NULL : calloc(1, sizeof *line);
    if (!line) {
        *error = *error ? *error : KVQ_E_NO_MEMORY;
        return NULL;
    }
    line->connection = connection;
    connection->n_lines++;
    connection->attach->n_lines++;
    line->request.fd = line->reply.fd = line->timeline.shm.fd = -1;
    line->request_event = line->wake_ours = line->wake_theirs = -1;
    *error = kvq__shm_create(&line->request, "kvq-requests", KVQ_REQ_RING_BYTES, false, text);
    if (*error == 0)
        *error = kvq__shm_create(&line->reply, "kvq-replies", KVQ_CQ_RING_BYTES, true, text);
    if (*error == 0)
        *error = open_wakers(line, text);
    if (*error) {
        kvq__line_free(line);
        return NULL;
    }
    struct kvq_req_page *req = line->request.map;
    struct kvq_cq_page *cq = line->reply.map;
    *req = (struct kvq_req_page){
        KVQ_SHM_MAGIC_REQUEST, KVQ_PROTOCOL_MAX, KVQ_REQ_SLOTS, {0}, 0, {0}, 0, {0}, 0, {0}};
    *cq = (struct kvq_cq_page){
        KVQ_SHM_MAGIC_REPLY, KVQ_PROTOCOL_MAX, KVQ_CQ_SLOTS, {0}, 0, {0}, 0, {0}};
    line->port.member = &connection->member;
    line->port.req = req;
    line->port.cq = cq;
    line->port.request_event = line->request_event;
    line->port.client_wake = line->wake_ours;
    return line;
}

// ---- Buffers ----

// Whether there is room for so many bytes, of this client's and of all clients'.
static int check_buffer_room(const struct kvq__connection *connection, uint64_t bytes, char *text)
{
    const struct kvq_config *config = &connection->server->config;
    uint64_t own = connection->buffer_bytes, all = connection->attach->buffer_bytes;
    assert(own <= all);
    if (bytes == 0 || bytes > config->client_bytes || own > config->client_bytes - bytes) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "a buffer of %llu bytes besides %llu that this client has; client_bytes allows "
                 "1 to %llu together",
                 (unsigned long long)bytes, (unsigned long long)own,
                 (unsigned long long)config->client_bytes);
        return bytes == 0 ? KVQ_E_INVALID : KVQ_E_LIMIT;
    }
    if (bytes > config->buffer_bytes || all > config->buffer_bytes - bytes) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "a buffer of %llu bytes besides %llu that all clients have; buffer_bytes allows "
                 "%llu together; close buffers (kvqctl client list shows whose), or have it raised",
                 (unsigned long long)bytes, (unsigned long long)all,
                 (unsigned long long)config->buffer_bytes);
        return KVQ_E_LIMIT;
    }
    return 0;
}

struct kvq__region *kvq__region_alloc(struct kvq__connection *connection, uint64_t bytes,
                                      uint64_t counted, int *error, char *text)
{
    *error = counted || bytes == 0 ? check_buffer_room(connection, counted, text) : 0;
    if (*error)
        return NULL;
    struct kvq__region *region = calloc(1, sizeof *region);
    *error = region ? 0 : KVQ_E_NO_MEMORY;
    if (!region)
        return NULL;
    region->connection = connection;
    region->bytes = bytes;
    region->counted = counted;
    region->host.shm.fd = region->fd = -1;
    return region;
}

void kvq__connection_count(struct kvq__connection *c, uint64_t more, uint64_t less)
{
    assert(c->buffer_bytes <= c->attach->buffer_bytes && c->buffer_bytes + more >= less);
    c->buffer_bytes = c->buffer_bytes + more - less;
    c->attach->buffer_bytes = c->attach->buffer_bytes + more - less;
}

void kvq__region_count(struct kvq__region *region)
{
    kvq__connection_count(region->connection, region->counted, 0);
}

void kvq__region_uncount(struct kvq__region *region)
{
    kvq__connection_count(region->connection, 0, region->counted);
}

void kvq__region_close_fd(struct kvq__region *region)
{
    close_fd(region->host.shm.fd);
    close_fd(region->fd);
    region->host.shm.fd = region->fd = -1;
}

static struct kvq__region *make_region(struct kvq__connection *connection, const char *name,
                                       uint64_t bytes, bool read_only, int *error, char *text)
{
    struct kvq__region *region = kvq__region_alloc(connection, bytes, bytes, error, text);
    if (!region)
        return NULL;
    *error = kvq__shm_create(&region->host.shm, name, bytes, read_only, text);
    if (*error == 0)
        return region;
    free(region);
    return NULL;
}

struct kvq__region *kvq__region_new(struct kvq__connection *connection, uint64_t bytes, int *error,
                                    char *text)
{
    return make_region(connection, "kvq-buffer", bytes, false, error, text);
}

struct kvq__region *kvq__region_new_table(struct kvq__connection *connection, uint64_t bytes,
                                          int *error, char *text)
{
    return make_region(connection, "kvq-table", bytes, true, error, text);
}

int kvq__region_add_copy(struct kvq__region *region, uint64_t bytes, char *text)
{
    assert(!region->host.shm.map);
    int error = check_buffer_room(region->connection, bytes, text);
    if (error == 0)
        error = kvq__shm_create(&region->host.shm, "kvq-table", bytes, true, text);
    if (error)
        return error;
    kvq__connection_count(region->connection, bytes, 0);
    region->counted += bytes;
    return 0;
}

struct kvq__region *kvq__region_import(struct kvq__connection *connection, int fd, uint64_t offset,
                                       uint64_t bytes, int *error, char *text)
{
    struct kvq__region *region = kvq__region_alloc(connection, bytes, bytes, error, text);
    if (!region)
        return NULL;
    *error = kvq__shm_import(&region->host.shm, fd, offset, bytes, text);
    if (*error == 0)
        return region;
    free(region);
    return NULL;
}
