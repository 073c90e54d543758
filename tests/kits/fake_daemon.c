// SPDX-License-Identifier: Apache-2.0
//
// The scripted daemon of test_client.c: one thread, one connection, one queue at a time.
#include "tests/kits/fake_daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "kernels/layout.h"
#include "proto/ring.h"
#include "proto/sync.h"
#include "proto/wire.h"

struct fake_daemon {
    struct fake_script script;
    char path[108];
    pthread_t thread;
    int listener, stop, connection;
    int other;                  // a second connection
    int saving, saved, save_on; // eventfds: a save has begun, is to end; its connection
    uint32_t save_id;
    struct kvq_daemon_page *page;
    int page_fd;
    struct kvq_req_page *req;
    struct kvq_cq_page *cq;
    struct kvq_ring_rx rx;
    struct kvq_ring_tx tx;
    int request_event, wake_ours;
    bool deaf;
    uint8_t held[KVQ_MAX_MESSAGE]; // the request whose reply is late
    size_t held_bytes;
    uint32_t held_id, answered;        // requests: whose reply is late, the last answered one
    uint32_t moving;                   // attempts to open a table that it has refused
    uint32_t cancels, closes, appends; // words: a test reads them while the thread serves
    uint32_t queue_closes, restores;   // words
    struct kvq_arena arena;
    uint8_t packet[KVQ_MAX_MESSAGE];
};

static void must(bool good, const char *what)
{
    if (good)
        return;
    perror(what);
    abort();
}

struct fake_script fake_good(void)
{
    return (struct fake_script){.hello_fds = 1,
                                .protocol = KVQ_PROTOCOL_MAX,
                                .page_magic = KVQ_SHM_MAGIC_DAEMON,
                                .page_bytes = sizeof(struct kvq_daemon_page),
                                .queue_fds = 4,
                                .ring_magic = KVQ_SHM_MAGIC_REQUEST,
                                .isa = "c",
                                .tables = KVQ_TABLE_VERSION_MAX,
                                .layout = KVQ_LAYOUT_ID,
                                .span = 8 << 21,
                                .extent_bytes = 1 << 21,
                                .table_magic = KVQ_SHM_MAGIC_TABLE,
                                .table_version = KVQ_TABLE_VERSION_MAX,
                                .table_layers = 1,
                                .table_pages = 8,
                                .table_tokens = 77,
                                .layer_pages = 1,
                                .repeat = 1,
                                .epoch = 4711};
}

static int make_memory(size_t bytes, bool sealed, void **map)
{
    int fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    must(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "memfd");
    *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(*map != MAP_FAILED, "mmap");
    if (sealed)
        must(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0, "seal");
    return fd;
}

// ---- Packets ----

static void send_packet(struct fake_daemon *d, const void *bytes, size_t n, const int *fds,
                        uint32_t n_fds)
{
    char space[CMSG_SPACE(sizeof(int) * KVQ_MAX_PACKET_FDS)] = {0};
    struct iovec part = {(void *)(uintptr_t)bytes, n};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (n_fds) {
        message.msg_control = space;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * n_fds);
    }
    // The client may have hung up by now.
    if (sendmsg(d->connection, &message, MSG_NOSIGNAL) < 0 && errno != EPIPE)
        must(false, "sendmsg");
}

static void send_reply(struct fake_daemon *d, const Kvq__Reply *reply, const int *fds, uint32_t n)
{
    uint8_t bytes[4096];
    size_t length;
    must(kvq_reply_pack(reply, bytes, sizeof bytes, &length) == 0, "pack");
    send_packet(d, bytes, length, fds, n);
}

static void hang_up(struct fake_daemon *d)
{
    if (d->connection < 0)
        return;
    close(d->connection);
    d->connection = -1;
    if (d->req)
        munmap(d->req, KVQ_REQ_RING_BYTES);
    if (d->cq)
        munmap(d->cq, KVQ_CQ_RING_BYTES);
    if (d->request_event >= 0)
        close(d->request_event);
    if (d->wake_ours >= 0)
        close(d->wake_ours);
    d->req = NULL;
    d->cq = NULL;
    d->request_event = d->wake_ours = -1;
}

// ---- Commands ----

static void answer_hello(struct fake_daemon *d, Kvq__Reply *reply)
{
    Kvq__HelloReply hello = KVQ__HELLO_REPLY__INIT;
    const struct fake_script *s = &d->script;
    int status = d->connection == d->other ? s->other_hello_status : s->hello_status;
    uint32_t n_fds = status == s->hello_status ? s->hello_fds : 0;
    int fds[KVQ_MAX_PACKET_FDS];
    void *map;
    d->page_fd = make_memory(sizeof(struct kvq_daemon_page), !s->unsealed, &map);
    d->page = map;
    *d->page = (struct kvq_daemon_page){
        .magic = s->page_magic,
        .version = 1,
        .epoch = s->epoch,
        .cpus = s->cpus,
        .awake = 1,
        .poller_sleeping = 1, // for ever: every request writes the eventfd
    };
    if (s->page_bytes < sizeof *d->page) { // another one, too short
        close(d->page_fd);
        munmap(d->page, sizeof *d->page);
        d->page_fd = make_memory(s->page_bytes, true, &map);
        munmap(map, s->page_bytes);
        d->page = NULL;
    }
    for (uint32_t i = 0; i < n_fds; i++)
        fds[i] = d->page_fd;
    hello.protocol = s->protocol;
    hello.client_id = 7;
    if (s->isa)
        hello.isa = (char *)(uintptr_t)s->isa;
    hello.daemon_version = (char *)(uintptr_t) "fake";
    if (!s->hello_only && status == 0) {
        reply->result_case = KVQ__REPLY__RESULT_HELLO;
        reply->hello = &hello;
    }
    reply->status = status;
    send_reply(d, reply, fds, n_fds);
    close(d->page_fd);
    if (d->page)
        munmap(d->page, sizeof *d->page);
    d->page = NULL;
}

static void answer_open_queue(struct fake_daemon *d, Kvq__Reply *reply)
{
    Kvq__OpenQueueReply result = KVQ__OPEN_QUEUE_REPLY__INIT;
    int fds[KVQ_MAX_PACKET_FDS], pair[2];
    void *req, *cq;
    fds[0] = make_memory(KVQ_REQ_RING_BYTES, true, &req);
    fds[1] = make_memory(KVQ_CQ_RING_BYTES, true, &cq);
    fds[2] = d->request_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0, "pair");
    d->wake_ours = pair[0];
    fds[3] = pair[1];
    fds[4] = fds[5] = pair[1];
    d->req = req;
    d->cq = cq;
    d->req->magic = d->script.ring_magic;
    d->cq->magic = KVQ_SHM_MAGIC_REPLY;
    d->req->version = d->cq->version = KVQ_PROTOCOL_MAX;
    d->req->slots = KVQ_REQ_SLOTS;
    d->cq->slots = KVQ_CQ_SLOTS;
    kvq_ring_daemon_side(d->req, d->cq, &d->rx, &d->tx);
    result.queue = 1;
    reply->result_case = KVQ__REPLY__RESULT_OPEN_QUEUE;
    reply->open_queue = &result;
    send_reply(d, reply, fds, d->script.queue_fds);
    close(fds[0]);
    close(fds[1]);
    close(pair[1]);
}

// ---- Buffers ----

static void answer_create_buffer(struct fake_daemon *d, const Kvq__CreateBuffer *ask,
                                 Kvq__Reply *reply)
{
    Kvq__CreateBufferReply result = KVQ__CREATE_BUFFER_REPLY__INIT;
    void *map;
    int fd = d->script.no_memory ? d->listener : make_memory(ask->bytes, true, &map);
    if (fd != d->listener)
        munmap(map, ask->bytes);
    result.buffer = 1;
    result.bytes = ask->bytes;
    reply->result_case = KVQ__REPLY__RESULT_CREATE_BUFFER;
    reply->create_buffer = &result;
    send_reply(d, reply, &fd, 1);
    if (fd != d->listener)
        close(fd);
}

static bool answer_buffers(struct fake_daemon *d, const Kvq__Request *request, Kvq__Reply *reply)
{
    if (!d->script.buffers)
        return false;
    if (request->command_case == KVQ__REQUEST__COMMAND_CREATE_BUFFER) {
        answer_create_buffer(d, request->create_buffer, reply);
        return true;
    }
    return request->command_case == KVQ__REQUEST__COMMAND_CLOSE_BUFFER &&
           kvq_word_add(&d->closes, 1) <= d->script.busy_closes;
}

// ---- In-context mode ----

static void answer_open_pool(struct fake_daemon *d, Kvq__Reply *reply)
{
    Kvq__OpenPoolReply result = KVQ__OPEN_POOL_REPLY__INIT;
    const struct fake_script *s = &d->script;
    result.span = s->span;
    result.extent_bytes = s->extent_bytes;
    result.tables = s->tables;
    result.layout = s->layout;
    result.tells_again = s->tells_again;
    reply->status = s->pool_status;
    if (s->pool_status == 0) {
        reply->result_case = KVQ__REPLY__RESULT_OPEN_POOL;
        reply->open_pool = &result;
    }
    send_reply(d, reply, &d->listener, s->pool_fds);
}

static void answer_session(struct fake_daemon *d, Kvq__Reply *reply)
{
    Kvq__Session session = KVQ__SESSION__INIT;
    session.handle = UINT64_C(1) << 32;
    session.layers = 1;
    session.tokens = 77;
    session.name = (char *)(uintptr_t) "s";
    session.place = (char *)(uintptr_t) "host";
    reply->result_case = KVQ__REPLY__RESULT_SESSION;
    reply->session = &session;
    send_reply(d, reply, NULL, 0);
}

static int make_table(const struct fake_script *s, size_t bytes)
{
    void *map;
    int fd = make_memory(bytes, true, &map);
    const struct kvq_table_page page = {.magic = s->table_magic,
                                        .version = s->table_version,
                                        .layers = s->table_layers,
                                        .pages = s->table_pages,
                                        .layer_bytes = kvq_table_layer_bytes(s->table_pages),
                                        .tokens = s->table_tokens,
                                        .number = 1};
    const struct kvq_table_layer layer = {.n_pages = s->layer_pages};
    memcpy(map, &page, sizeof page);
    memcpy((char *)map + sizeof page, &layer, sizeof layer);
    munmap(map, bytes);
    return fd;
}

static void answer_open_table(struct fake_daemon *d, Kvq__Reply *reply)
{
    Kvq__OpenTableReply result = KVQ__OPEN_TABLE_REPLY__INIT;
    Kvq__TableLayer layer = KVQ__TABLE_LAYER__INIT, *rows[1] = {&layer};
    Kvq__TableFormat format = KVQ__TABLE_FORMAT__INIT;
    Kvq__TableSide side = KVQ__TABLE_SIDE__INIT;
    const struct fake_script *s = &d->script;
    if (d->moving < s->moving) {
        d->moving++;
        reply->status = KVQ_E_BUSY;
        send_reply(d, reply, NULL, 0);
        return;
    }
    size_t bytes = s->table_bytes ? s->table_bytes : kvq_table_bytes(1, 8);
    side.codec = s->codec; // 0 is raw
    side.bits = 16;
    format.unit_tokens = 128;
    format.k = format.v = &side;
    layer.repeat = s->repeat;
    layer.source_plus1 = s->source;
    layer.q_heads = layer.kv_heads = 1;
    layer.dim = 64;
    layer.dtype = 1;
    layer.scale = 1;
    layer.format = &format;
    result.bytes = bytes;
    result.layers = rows;
    result.n_layers = 1;
    int fd = make_table(s, bytes);
    reply->result_case = KVQ__REPLY__RESULT_OPEN_TABLE;
    reply->open_table = &result;
    send_reply(d, reply, &fd, 1);
    close(fd);
}

static void answer_map_extents(struct fake_daemon *d, Kvq__Reply *reply)
{
    Kvq__MapExtentsReply result = KVQ__MAP_EXTENTS_REPLY__INIT;
    uint32_t numbers[KVQ_MAX_PACKET_FDS] = {d->script.extent, 99};
    uint64_t bytes = d->script.extent_memory ? d->script.extent_memory : d->script.extent_bytes;
    int fds[KVQ_MAX_PACKET_FDS];
    void *map;
    for (uint32_t i = 0; i < d->script.extent_fds; i++) {
        fds[i] = make_memory(bytes, true, &map);
        munmap(map, bytes);
    }
    result.numbers = numbers;
    result.n_numbers = d->script.extents;
    result.known = 2;
    reply->result_case = KVQ__REPLY__RESULT_MAP_EXTENTS;
    reply->map_extents = &result;
    send_reply(d, reply, fds, d->script.extent_fds);
    for (uint32_t i = 0; i < d->script.extent_fds; i++)
        close(fds[i]);
}

static bool answer_local(struct fake_daemon *d, const Kvq__Request *request, Kvq__Reply *reply)
{
    switch (request->command_case) {
    case KVQ__REQUEST__COMMAND_OPEN_POOL:
        answer_open_pool(d, reply);
        return true;
    case KVQ__REQUEST__COMMAND_OPEN_SESSION:
    case KVQ__REQUEST__COMMAND_SESSION_INFO:
        answer_session(d, reply);
        return true;
    case KVQ__REQUEST__COMMAND_OPEN_TABLE:
        answer_open_table(d, reply);
        return true;
    case KVQ__REQUEST__COMMAND_MAP_EXTENTS:
        answer_map_extents(d, reply);
        return true;
    default:
        return false;
    }
}

static void answer(struct fake_daemon *d, const Kvq__Request *request);

// Keeps the first command, and answers it when it is cancelled. False: not its business.
static bool hold(struct fake_daemon *d, const Kvq__Request *request, size_t bytes)
{
    char text[KVQ_TEXT_BYTES];
    Kvq__Request *held;
    if (!d->script.late_first || request->command_case == KVQ__REQUEST__COMMAND_HELLO)
        return false;
    if (d->held_id == 0) {
        if (d->script.late_command && d->script.late_command != (int)request->command_case)
            return false;
        d->held_id = request->id;
        d->held_bytes = bytes;
        memcpy(d->held, d->packet, bytes);
        return true;
    }
    if (request->command_case != KVQ__REQUEST__COMMAND_CANCEL || d->held_bytes == 0)
        return false;
    must(kvq_request_unpack(d->held, d->held_bytes, &d->arena, &held, text) == 0, text);
    d->held_bytes = 0;
    answer(d, held);
    return false;
}

static void answer(struct fake_daemon *d, const Kvq__Request *request)
{
    Kvq__Reply reply = KVQ__REPLY__INIT;
    const struct fake_script *s = &d->script;
    reply.epoch = s->epoch;
    if (s->stale_first) {
        reply.id = request->id - 1;
        send_reply(d, &reply, &d->listener, 1);
    }
    reply.id = request->id;
    if (request->command_case == KVQ__REQUEST__COMMAND_CANCEL)
        kvq_word_add(&d->cancels, request->cancel->request == d->answered);
    kvq_word_add(&d->queue_closes, request->command_case == KVQ__REQUEST__COMMAND_CLOSE_QUEUE);
    kvq_word_add(&d->restores, d->connection != d->other &&
                                   request->command_case == KVQ__REQUEST__COMMAND_RESTORE_SESSION);
    d->answered = request->id;
    if (s->garbage) {
        send_packet(d, "\xff\xff\xff", 3, NULL, 0);
    } else if (request->command_case == KVQ__REQUEST__COMMAND_HELLO) {
        answer_hello(d, &reply);
    } else if (s->farewell) {
        reply.id = 0;
        reply.status = KVQ_E_DRAINING;
        reply.text = (char *)(uintptr_t) "the lights go out";
        send_reply(d, &reply, NULL, 0);
        hang_up(d);
    } else if (s->hang_up) {
        hang_up(d);
    } else if (request->command_case == KVQ__REQUEST__COMMAND_OPEN_QUEUE) {
        answer_open_queue(d, &reply);
    } else if (s->saves && request->command_case == KVQ__REQUEST__COMMAND_SAVE_SESSION) {
        d->save_id = request->id;
        d->save_on = d->connection;
        must(write(d->saving, &(uint64_t){1}, 8) == 8, "saving");
    } else if (!answer_buffers(d, request, &reply) && !answer_local(d, request, &reply)) {
        send_reply(d, &reply, NULL, 0);
    }
}

static void receive_command(struct fake_daemon *d)
{
    char text[KVQ_TEXT_BYTES];
    Kvq__Request *request;
    ssize_t n = recv(d->connection, d->packet, sizeof d->packet, 0);
    if (n <= 0) {
        hang_up(d);
        return;
    }
    if (d->script.silent)
        return;
    d->arena.used = 0;
    must(kvq_request_unpack(d->packet, (size_t)n, &d->arena, &request, text) == 0, text);
    d->deaf = d->script.deaf && request->command_case == KVQ__REQUEST__COMMAND_OPEN_QUEUE;
    if (!hold(d, request, (size_t)n))
        answer(d, request);
}

// ---- A second connection, and saves ----

static void receive_other(struct fake_daemon *d)
{
    char text[KVQ_TEXT_BYTES];
    Kvq__Request *request;
    int first = d->connection;
    ssize_t n = recv(d->other, d->packet, sizeof d->packet, 0);
    if (n <= 0) {
        close(d->other);
        d->other = -1;
        return;
    }
    d->arena.used = 0;
    must(kvq_request_unpack(d->packet, (size_t)n, &d->arena, &request, text) == 0, text);
    if (d->script.other_hang_up && request->command_case != KVQ__REQUEST__COMMAND_HELLO) {
        close(d->other);
        d->other = -1;
        return;
    }
    d->connection = d->other;
    answer(d, request);
    d->connection = first;
}

static void answer_save(struct fake_daemon *d)
{
    Kvq__SaveReply result = KVQ__SAVE_REPLY__INIT;
    Kvq__Reply reply = KVQ__REPLY__INIT;
    int first = d->connection;
    uint64_t count;
    must(read(d->saved, &count, sizeof count) == sizeof count, "saved");
    reply.id = d->save_id;
    reply.result_case = KVQ__REPLY__RESULT_SAVE;
    reply.save = &result;
    d->connection = d->save_on;
    send_reply(d, &reply, NULL, 0);
    d->connection = first;
}

void fake_await_save(const struct fake_daemon *daemon)
{
    uint64_t count;
    must(read(daemon->saving, &count, sizeof count) == sizeof count, "saving");
}

void fake_end_save(const struct fake_daemon *daemon)
{
    must(write(daemon->saved, &(uint64_t){1}, 8) == 8, "saved");
}

// ---- The rings ----

static void complete(struct fake_daemon *d, const struct kvq_request *r, uint32_t seq,
                     uint32_t count, int status, uint32_t extra_slots)
{
    bool full =
        d->script.ring == FAKE_NO_ROOM && r->op == KVQ_OP_APPEND && kvq_word_load(&d->appends) == 1;
    int first = full ? KVQ_E_QUOTA : 0;
    int second = d->script.ring == FAKE_POSITIVE_RESULT ? 5 : first ? first : KVQ_E_POSITION;
    uint32_t extents = r->op == KVQ_OP_STEP ? d->script.step_extents : 0;
    struct kvq_completion done = {.seq = seq, .status = status, .count = (uint16_t)count};
    uint32_t room = 0, slots = kvq_completion_slots(count);
    must(kvq_ring_room(&d->tx, &room) == 0 && room >= slots, "room");
    done.slots = (uint16_t)(slots + extra_slots);
    done.value = r->step;
    kvq_ring_write(&d->tx, 0, &done, sizeof done);
    for (uint32_t i = 0; i < count; i++) {
        struct kvq_result result = {
            .status = i % 2 ? second : first, .extents = extents, .value = 77};
        kvq_ring_write(&d->tx, sizeof done + i * sizeof result, &result, sizeof result);
    }
    kvq_ring_publish(&d->tx, slots);
}

static void wake(struct fake_daemon *d)
{
    if (kvq_ring_sleeps(&d->req->client_sleeping))
        send(d->wake_ours, "12345678", 8, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Takes the oldest request.
static bool take(struct fake_daemon *d, struct kvq_request *r)
{
    uint32_t ready = 0;
    must(kvq_ring_poll(&d->rx, &ready) == 0, "poll");
    if (ready == 0)
        return false;
    kvq_ring_copy(&d->rx, 0, r, sizeof *r);
    kvq_ring_consume(&d->rx, r->slots);
    return true;
}

static void misbehave(struct fake_daemon *d, const struct kvq_request *r)
{
    uint32_t count = r->count;
    kvq_word_add(&d->appends, r->op == KVQ_OP_APPEND);
    switch (d->script.ring) {
    case FAKE_WRONG_SEQ:
        complete(d, r, r->seq + 99, count, 0, 0);
        break;
    case FAKE_TWICE:
        complete(d, r, r->seq, count, 0, 0);
        complete(d, r, r->seq, count, 0, 0);
        break;
    case FAKE_WRONG_COUNT:
        complete(d, r, r->seq, count + 1, 0, 0);
        break;
    case FAKE_WRONG_SLOTS:
        complete(d, r, r->seq, count, 0, 1);
        break;
    case FAKE_POSITIVE_STATUS:
        complete(d, r, r->seq, count, 5, 0);
        break;
    case FAKE_TAIL_FAR:
        d->tx.tail += KVQ_CQ_SLOTS + 1;
        kvq_word_store_release(d->tx.shared_tail, d->tx.tail);
        break;
    case FAKE_TAIL_BACK:
        complete(d, r, r->seq, count, 0, 0);
        wake(d);
        kvq_word_store_release(d->tx.shared_tail, UINT32_MAX);
        break;
    case FAKE_HEAD_AHEAD:
        kvq_word_store_release(d->rx.shared_head, d->rx.head + 100);
        complete(d, r, r->seq, count, 0, 0);
        break;
    default:
        complete(d, r, r->seq, count, 0, 0);
    }
    wake(d);
}

static void serve_ring(struct fake_daemon *d)
{
    struct kvq_request r, second;
    enum fake_ring what = d->script.ring;
    uint64_t count;
    if (read(d->request_event, &count, sizeof count) < 0)
        must(errno == EAGAIN, "eventfd");
    if (what == FAKE_SILENT)
        return;
    if (what == FAKE_CLOSE) {
        hang_up(d);
        return;
    }
    if (what == FAKE_REVERSED) {
        if (kvq_word_load_acquire(d->rx.shared_tail) - d->rx.head < 2 * KVQ_REQ_HEADER_SLOTS)
            return;
        must(take(d, &r) && take(d, &second), "two requests");
        complete(d, &second, second.seq, second.count, 0, 0);
        complete(d, &r, r.seq, r.count, 0, 0);
        wake(d);
        return;
    }
    while (take(d, &r)) {
        misbehave(d, &r);
        if (what == FAKE_LAST_WORD) {
            hang_up(d);
            return;
        }
    }
}

// Until stopped.
static void *serve(void *arg)
{
    struct fake_daemon *d = arg;
    for (;;) {
        bool full = d->connection >= 0 && (d->other >= 0 || !d->script.saves);
        struct pollfd p[6] = {{.fd = d->stop, .events = POLLIN},
                              {.fd = full ? -1 : d->listener, .events = POLLIN},
                              {.fd = d->deaf ? -1 : d->connection, .events = POLLIN},
                              {.fd = d->request_event, .events = POLLIN},
                              {.fd = d->other, .events = POLLIN},
                              {.fd = d->saved, .events = POLLIN}};
        must(poll(p, 6, -1) >= 0 || errno == EINTR, "poll");
        if (p[0].revents)
            break;
        if (p[3].revents)
            serve_ring(d);
        else if (p[2].revents)
            receive_command(d);
        else if (p[5].revents)
            answer_save(d);
        else if (p[4].revents)
            receive_other(d);
        else if (p[1].revents)
            *(d->connection < 0 ? &d->connection : &d->other) =
                accept4(d->listener, NULL, NULL, SOCK_CLOEXEC);
    }
    hang_up(d);
    if (d->other >= 0)
        close(d->other);
    return NULL;
}

struct fake_daemon *fake_start(const char *dir, const struct fake_script *script)
{
    struct fake_daemon *d = calloc(1, sizeof *d);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    void *memory = malloc(KVQ_WIRE_ARENA);
    must(d && memory, "malloc");
    d->script = *script;
    d->connection = d->other = d->request_event = d->wake_ours = -1;
    kvq_arena_init(&d->arena, memory, KVQ_WIRE_ARENA);
    snprintf(d->path, sizeof d->path, "%s/attach.sock", dir);
    memcpy(address.sun_path, d->path, sizeof address.sun_path);
    unlink(d->path);
    d->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    d->stop = eventfd(0, EFD_CLOEXEC);
    d->saving = eventfd(0, EFD_CLOEXEC);
    d->saved = eventfd(0, EFD_CLOEXEC);
    must(bind(d->listener, (struct sockaddr *)&address, sizeof address) == 0, "bind");
    must(listen(d->listener, 8) == 0, "listen");
    must(pthread_create(&d->thread, NULL, serve, d) == 0, "thread");
    return d;
}

void fake_stop(struct fake_daemon **daemon)
{
    struct fake_daemon *d = *daemon;
    must(write(d->stop, &(uint64_t){1}, 8) == 8, "stop");
    pthread_join(d->thread, NULL);
    close(d->listener);
    close(d->stop);
    close(d->saving);
    close(d->saved);
    unlink(d->path);
    free(d->arena.memory);
    free(d);
    *daemon = NULL;
}

uint32_t fake_cancels(const struct fake_daemon *daemon)
{
    return kvq_word_load_acquire(&daemon->cancels);
}

uint32_t fake_closes(const struct fake_daemon *daemon)
{
    return kvq_word_load_acquire(&daemon->closes);
}

uint32_t fake_restores(const struct fake_daemon *daemon)
{
    return kvq_word_load_acquire(&daemon->restores);
}

uint32_t fake_queue_closes(const struct fake_daemon *daemon)
{
    return kvq_word_load_acquire(&daemon->queue_closes);
}

uint32_t fake_appends(const struct fake_daemon *daemon)
{
    return kvq_word_load_acquire(&daemon->appends);
}
