// SPDX-License-Identifier: Apache-2.0
//
// The attach socket against clients that misbehave. At the end of each test every descriptor and
// mapping that it made must be gone again.
#include <fcntl.h>
#include <grp.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/attach/attach.h"
#include "daemon/attach/internal.h"
#include "daemon/commands/dispatch.h"
#include "daemon/lifecycle.h"
#include "daemon/log/log.h"
#include "daemon/runtime/packet.h"
#include "daemon/runtime/server.h"
#include "proto/ring.h"
#include "tests/edge/attach_kit.h"
#include "tests/kits/unit.h"

static int memfd_of(off_t bytes, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

COUNTED_TEST(test_hello)
{
    struct peer *p = peer_new();
    assert_int_equal(peer_hello(p, KVQ_PROTOCOL_MAX + 1, KVQ_PROTOCOL_MAX + 3), KVQ_E_VERSION);
    assert_says(p->reply->text, "speaks protocol 2 to 4");
    assert_false(peer_receive(p)); // and the connection is closed
    peer_free(p);

    p = peer_new();
    assert_int_equal(peer_hello(p, 5, 1), KVQ_E_VERSION); // an empty range
    peer_free(p);

    p = peer_new();
    assert_int_equal(peer_open_queue(p), KVQ_E_PROTOCOL);
    assert_says(p->reply->text, "first request must be hello");
    peer_free(p);

    p = peer_attached();
    assert_int_equal(peer_hello(p, 1, 1), KVQ_E_PROTOCOL);
    assert_says(p->reply->text, "second hello");
    assert_false(peer_receive(p));
    peer_free(p);

    p = peer_attached();
    assert_int_equal(peer_ping(p, 9, NULL, 0), KVQ_E_VERSION);
}

COUNTED_TEST(test_daemon_page)
{
    struct peer *p = peer_attached();
    int fd = p->fds[0], seals = fcntl(fd, F_GET_SEALS);
    assert_true(seals & F_SEAL_SHRINK && seals & F_SEAL_GROW && seals & F_SEAL_SEAL);
    assert_true(mmap(NULL, 384, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    assert_int_equal(write(fd, "x", 1), -1);
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    struct kvq_daemon_page *page = mmap(NULL, 384, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(page != MAP_FAILED);
    assert_int_equal(page->magic, KVQ_SHM_MAGIC_DAEMON);
    assert_true(page->epoch == p->reply->epoch && page->epoch != 0);
    munmap(page, 384);
}

COUNTED_TEST(test_garbage)
{
    static const char *const packets[] = {"x", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
                                          "\x0a\x03\x61\x62\x63"};
    for (int i = 0; i < 3; i++) {
        struct peer *p = i ? peer_attached() : peer_new();
        peer_send(p, packets[i], strlen(packets[i]), NULL, 0);
        assert_true(peer_receive(p));
        assert_int_equal(p->reply->status, KVQ_E_PROTOCOL);
        assert_false(peer_receive(p));
        peer_free(p);
    }
    struct peer *p = peer_attached();
    uint8_t *large = calloc(1, KVQ_MAX_MESSAGE + 1);
    peer_send(p, large, KVQ_MAX_MESSAGE + 1, NULL, 0);
    assert_false(peer_receive(p));
    free(large);
}

COUNTED_TEST(test_descriptors_are_counted)
{
    int fd = memfd_of(4096, F_SEAL_SHRINK), fds[24];
    for (int i = 0; i < 24; i++)
        fds[i] = fd;
    static const uint32_t counts[] = {0, 2};
    for (int i = 0; i < 2; i++) {
        struct peer *p = peer_attached();
        assert_int_equal(peer_import(p, fds, counts[i], 0, 4096), KVQ_E_PROTOCOL);
        assert_says(p->reply->text, "1 belong there");
        assert_false(peer_receive(p));
        peer_free(p);
    }
    // More than are taken: the control data is cut, nothing is kept.
    static const uint32_t too_many[] = {3, 8, 16, 24};
    for (int i = 0; i < 4; i++) {
        struct peer *p = peer_attached();
        peer_send(p, "x", 1, fds, too_many[i]);
        assert_false(peer_receive(p));
        peer_free(p);
    }
    // Descriptors beside a request that takes none.
    struct peer *p = peer_attached();
    assert_int_equal(peer_ping(p, KVQ_PROTOCOL_MAX, fds, 1), KVQ_E_PROTOCOL);
    close(fd);
}

// A socket whose last close would wait for an hour: there is data that nobody reads.
static int lingering(int *reader)
{
    const struct linger linger = {1, 3600};
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    static const char bytes[65536];
    int door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(door, (struct sockaddr *)&at, size), 0);
    assert_int_equal(listen(door, 1), 0);
    assert_int_equal(getsockname(door, (struct sockaddr *)&at, &size), 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, size), 0);
    *reader = accept4(door, NULL, NULL, SOCK_CLOEXEC);
    assert_true(*reader >= 0);
    close(door);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger), 0);
    while (send(fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
        ;
    assert_int_equal(errno, EAGAIN);
    return fd;
}

struct passing {
    struct peer *peer;
    int fds[8];
    uint32_t before, at; // packets without descriptors; the lingering one's place beside the last
};

// In the loop's thread, so that all of it is there before the daemon looks.
static void pass_packets(struct kvq__server *server, void *context)
{
    const struct passing *p = context;
    for (uint32_t i = 0; i < p->before; i++)
        peer_send(p->peer, "x", i == 0, NULL, 0); // those behind the first are empty
    peer_send(p->peer, "x", 1, p->fds, p->at + 1);
}

// Beside a packet that is refused, beyond those that are looked at, and beside one that nobody
// reads: the daemon serves others, and does not wait for the hour.
COUNTED_TEST(test_sockets_that_linger)
{
    static const struct passing cases[] = {
        {.at = 0}, {.at = 7}, {.before = 2}, {.before = 3, .at = 7}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct passing p = cases[i];
        int reader, other = open("/dev/null", O_RDONLY | O_CLOEXEC);
        p.peer = peer_attached();
        for (uint32_t k = 0; k < 8; k++)
            p.fds[k] = other;
        p.fds[p.at] = lingering(&reader);
        attach_in_loop(pass_packets, &p);
        close(p.fds[p.at]);
        peer_free(p.peer);
        peer_free(peer_attached());
        close(other);
        close(reader);
    }
}

static void import_refused(int fd, uint64_t offset, uint64_t bytes, int code, const char *words)
{
    struct peer *p = peer_attached();
    assert_int_equal(peer_import(p, &fd, 1, offset, bytes), code);
    assert_says(p->reply->text, words);
    assert_int_equal(peer_create_buffer(p, 4096), 0); // the client itself goes on
    peer_free(p);
}

COUNTED_TEST(test_imports)
{
    int fd = memfd_of(16384, 0);
    import_refused(fd, 0, 4096, KVQ_E_BUFFER, "F_SEAL_SHRINK");
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    import_refused(fd, 0, 16385, KVQ_E_BUFFER, "16384 bytes long");
    import_refused(fd, 16384, 1, KVQ_E_BUFFER, "end behind it");
    import_refused(fd, 100, 4096, KVQ_E_INVALID, "multiple of 4096");
    import_refused(fd, UINT64_MAX - 4095, 8192, KVQ_E_INVALID, "multiple of");
    import_refused(fd, 0, 0, KVQ_E_INVALID, "0 bytes");
    import_refused(fd, 0, 1ull << 40, KVQ_E_LIMIT, "client_bytes");
    int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    import_refused(file, 0, 4096, KVQ_E_BUFFER, "not a memfd");
    close(file);
    int sealed = memfd_of(4096, F_SEAL_SHRINK | F_SEAL_WRITE);
    import_refused(sealed, 0, 4096, KVQ_E_BUFFER, "open for writing");
    close(sealed);

    struct peer *p = peer_attached();
    assert_int_equal(peer_import(p, &fd, 1, 4096, 8192), 0);
    assert_int_equal(p->n_fds, 0);
    uint32_t buffer = p->reply->create_buffer->buffer;
    assert_true(buffer != 0);
    assert_int_equal(count_mappings(), 1);
    assert_int_equal(peer_close_buffer(p, buffer + 1), KVQ_E_BUFFER);
    assert_int_equal(peer_close_buffer(p, buffer), 0);
    assert_int_equal(peer_close_buffer(p, buffer), KVQ_E_BUFFER);
    assert_int_equal(peer_import(p, &fd, 1, 0, 16384), 0); // left for the end
    close(fd);
}

COUNTED_TEST(test_buffers)
{
    struct peer *p = peer_attached();
    assert_int_equal(peer_create_buffer(p, 0), KVQ_E_INVALID);
    assert_int_equal(peer_create_buffer(p, (8 << 20) + 1), KVQ_E_LIMIT);
    uint32_t first = peer_buffer(p, 6 << 20);
    assert_int_equal(p->n_fds, 1);
    assert_int_equal(ftruncate(p->fds[0], 0), -1); // sealed
    assert_int_equal(errno, EPERM);
    assert_int_equal(peer_create_buffer(p, 3 << 20), KVQ_E_LIMIT); // together too much
    assert_int_equal(peer_close_buffer(p, first), 0);
    assert_int_equal(peer_create_buffer(p, 3 << 20), 0);
}

// Buffers of all clients together are bounded, made and imported ones, and come back with whoever
// had them.
COUNTED_TEST(test_buffers_of_all)
{
    int fd = memfd_of(8 << 20, F_SEAL_SHRINK);
    struct peer *p[3] = {peer_attached(), peer_attached(), peer_attached()};
    assert_int_equal(peer_create_buffer(p[0], 8 << 20), 0);
    assert_int_equal(peer_import(p[1], &fd, 1, 0, 8 << 20), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(i ? peer_import(p[2], &fd, 1, 0, 5 << 20)
                           : peer_create_buffer(p[2], 5 << 20),
                         KVQ_E_LIMIT);
        assert_says(p[2]->reply->text, "5242880 bytes besides 16777216 that all");
        assert_says(p[2]->reply->text, "buffer_bytes allows 20971520");
    }
    uint32_t buffer = peer_buffer(p[2], 4 << 20); // to the last byte
    assert_int_equal(peer_create_buffer(p[2], 1), KVQ_E_LIMIT);
    assert_int_equal(peer_close_buffer(p[2], buffer), 0);
    assert_int_equal(peer_create_buffer(p[2], 4 << 20), 0);
    peer_free(p[1]);
    assert_int_equal(peer_create_buffer(p[2], 4 << 20), 0);
    peer_free(p[0]);
    peer_free(p[2]);
    struct peer *last = peer_attached();
    for (int i = 0; i < 3; i++) // what was refused was never counted
        assert_int_equal(peer_import(last, &fd, 1, 4096 * 4096, 4096), KVQ_E_BUFFER);
    assert_int_equal(peer_create_buffer(last, 8 << 20), 0);
    close(fd);
}

// Clients that have shut their ears while the command is at the poller: what it made is given back
// once, by one thread.
COUNTED_TEST(test_replies_nobody_hears)
{
    Kvq__OpenQueue open = KVQ__OPEN_QUEUE__INIT;
    Kvq__CreateBuffer create = KVQ__CREATE_BUFFER__INIT;
    Kvq__Request queue = REQUEST(OPEN_QUEUE, open_queue, &open);
    Kvq__Request buffer = REQUEST(CREATE_BUFFER, create_buffer, &create);
    create.bytes = 4096;
    for (int i = 0; i < 200; i++) {
        struct peer *p = peer_attached();
        assert_int_equal(shutdown(p->fd, SHUT_RD), 0); // sending to it fails from now on
        peer_send_request(p, i % 2 ? &queue : &buffer, NULL, 0);
        struct pollfd end = {.fd = p->fd};
        while (!(end.revents & POLLHUP)) // the daemon has closed its end, last of all
            assert_true(poll(&end, 1, -1) >= 0);
        peer_free(p);
    }
}

// A cancel gives back what the request before it made, and nothing else.
COUNTED_TEST(test_cancel)
{
    int fd = memfd_of(4096, F_SEAL_SHRINK);
    struct peer *p = peer_attached(), *other = peer_attached();
    peer_cancel(p, p->next_id); // of hello
    peer_cancel(p, 12345);
    for (int i = 0; i < KVQ_MAX_BUFFERS; i++) { // far more than one client may have at once
        assert_int_equal(peer_create_buffer(p, 8 << 20), 0);
        peer_cancel(p, p->next_id);
        assert_int_equal(peer_import(p, &fd, 1, 0, 4096), 0);
        peer_cancel(p, p->next_id);
        assert_int_equal(peer_open_queue(p), 0);
        peer_cancel(p, p->next_id);
        assert_int_equal(peer_open_session(p, "late"), 0);
        peer_cancel(p, p->next_id);
        assert_int_equal(peer_open_session(other, "late"), 0); // it has no writer
        peer_cancel(other, other->next_id);
    }
    peer_close_fds(p);
    assert_int_equal(count_mappings(), 0);
    // Only the last request, and only once: the buffer stays.
    assert_int_equal(peer_create_buffer(p, 4096), 0);
    uint32_t made = p->next_id, buffer = p->reply->create_buffer->buffer;
    peer_cancel(p, made - 1);
    assert_int_equal(peer_create_buffer(p, 0), KVQ_E_INVALID);
    peer_cancel(p, made);
    peer_cancel(p, p->next_id);
    assert_int_equal(peer_close_buffer(p, buffer), 0);
    assert_int_equal(peer_open_queue(p), 0);
    made = p->next_id;
    peer_cancel(p, made);
    peer_cancel(p, made);
    close(fd);
}

// A ring pair of ours, mapped like a client does.
struct rings {
    struct kvq_req_page *req;
    struct kvq_cq_page *cq;
    int event, wake;
};

static struct rings rings_open(struct peer *p)
{
    assert_int_equal(peer_open_queue(p), 0);
    assert_int_equal(p->n_fds, 4);
    assert_int_equal(p->reply->open_queue->request_slots, KVQ_REQ_SLOTS);
    struct rings rings = {.event = dup(p->fds[2]), .wake = dup(p->fds[3])};
    rings.req = mmap(NULL, KVQ_REQ_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds[0], 0);
    assert_true(rings.req != MAP_FAILED);
    assert_true(mmap(NULL, KVQ_CQ_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds[1], 0) ==
                MAP_FAILED); // replies are the daemon's to write
    rings.cq = mmap(NULL, KVQ_CQ_RING_BYTES, PROT_READ, MAP_SHARED, p->fds[1], 0);
    assert_true(rings.cq != MAP_FAILED);
    assert_int_equal(ftruncate(p->fds[0], 0), -1);
    assert_int_equal(rings.req->magic, KVQ_SHM_MAGIC_REQUEST);
    assert_int_equal(rings.cq->magic, KVQ_SHM_MAGIC_REPLY);
    peer_close_fds(p);
    return rings;
}

static void rings_close(struct rings *rings)
{
    munmap(rings->req, KVQ_REQ_RING_BYTES);
    munmap((void *)rings->cq, KVQ_CQ_RING_BYTES);
    close(rings->event);
    close(rings->wake);
}

static void rings_wake(const struct rings *rings)
{
    const uint64_t one = 1;
    assert_int_equal(write(rings->event, &one, sizeof one), sizeof one);
}

static uint32_t await_ready(struct kvq_ring_rx *rx)
{
    uint32_t ready = 0;
    while (ready == 0) {
        assert_int_equal(kvq_ring_poll(rx, &ready), 0);
        sched_yield();
    }
    return ready;
}

COUNTED_TEST(test_queues)
{
    struct peer *p = peer_attached();
    struct rings rings = rings_open(p);
    uint32_t queue = p->reply->open_queue->queue;
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
    kvq_ring_client_side(rings.req, rings.cq, &tx, &rx);
    struct kvq_request nop = {.op = KVQ_OP_NOP, .seq = 5, .slots = KVQ_REQ_HEADER_SLOTS};
    kvq_ring_write(&tx, 0, &nop, sizeof nop);
    kvq_ring_publish(&tx, nop.slots);
    rings_wake(&rings);
    await_ready(&rx);
    assert_int_equal(peer_close_queue(p, queue + 1), KVQ_E_INVALID);
    assert_int_equal(peer_close_queue(p, queue), 0);
    assert_int_equal(peer_close_queue(p, queue), KVQ_E_INVALID);
    rings_close(&rings);
    for (int i = 0; i < KVQ_MAX_QUEUES; i++)
        assert_int_equal(peer_open_queue(p), 0);
    assert_int_equal(peer_open_queue(p), KVQ_E_LIMIT);
}

COUNTED_TEST(test_scribbler_is_closed)
{
    struct peer *p = peer_attached(), *other = peer_attached();
    struct rings rings = rings_open(p);
    kvq_word_store_release(&rings.req->tail, 123456789);
    rings_wake(&rings);
    assert_false(peer_receive(p));
    rings_close(&rings);
    peer_free(p);
    assert_int_equal(peer_create_buffer(other, 4096), 0);
}

// A client may change the flags of descriptors that it shares, fill and empty them: the daemon must
// not wait for it.
COUNTED_TEST(test_hostile_wakers)
{
    struct peer *p = peer_attached(), *other = peer_attached();
    struct rings rings = rings_open(p);
    uint64_t most = UINT64_MAX - 1, got;
    fcntl(rings.event, F_SETFL, 0);
    fcntl(rings.wake, F_SETFL, 0);
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
    kvq_ring_client_side(rings.req, rings.cq, &tx, &rx);
    kvq_ring_sleep_begin(&rings.req->client_sleeping); // for ever: each completion is a wake-up
    for (uint32_t i = 0; i < 3000; i++) {
        struct kvq_request nop = {.op = KVQ_OP_NOP, .seq = i, .slots = KVQ_REQ_HEADER_SLOTS};
        kvq_ring_write(&tx, 0, &nop, sizeof nop);
        kvq_ring_publish(&tx, nop.slots);
        if (i == 0)
            assert_int_equal(write(rings.event, &most, sizeof most), sizeof most);
        else if (i == 1)
            assert_int_equal(read(rings.event, &got, sizeof got), sizeof got);
        if (i > 0)
            rings_wake(&rings);
        uint32_t room, ready = await_ready(&rx);
        kvq_ring_consume(&rx, ready);
        assert_int_equal(kvq_ring_room(&tx, &room), 0);
    }
    assert_int_equal(peer_create_buffer(other, 4096), 0);
    rings_close(&rings);
}

COUNTED_TEST(test_too_many_clients)
{
    for (int i = 0; i < 8; i++)
        peer_attached();
    struct peer *p = peer_new();
    assert_int_equal(peer_hello(p, 1, 1), KVQ_E_LIMIT);
    assert_says(p->reply->text, "max_clients");
    assert_false(peer_receive(p)); // and the connection is closed
}

// Root's engine, too: administration belongs to the control socket. The connection goes on.
COUNTED_TEST(test_administration_is_elsewhere)
{
    struct peer *p = peer_attached();
    Kvq__SetQuota quota = KVQ__SET_QUOTA__INIT;
    Kvq__SetConfig config = KVQ__SET_CONFIG__INIT;
    Kvq__KickClient kick = KVQ__KICK_CLIENT__INIT;
    quota.namespace_ = (char *)"uid-0";
    config.name = (char *)"admin_uids";
    config.value = (char *)"12345";
    Kvq__Request requests[] = {REQUEST(SET_QUOTA, set_quota, &quota),
                               REQUEST(SET_CONFIG, set_config, &config),
                               REQUEST(KICK_CLIENT, kick_client, &kick)};
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(peer_ask(p, &requests[i], NULL, 0), KVQ_E_INVALID);
        assert_non_null(strstr(p->reply->text, "control socket"));
    }
    assert_int_equal(peer_ping(p, KVQ_PROTOCOL_MAX, NULL, 0), 0);
    peer_free(p);
}

// A name that no session can have is refused as one, and the connection goes on.
COUNTED_TEST(test_long_name)
{
    char name[KVQ_NAME_BYTES + 1] = {0};
    struct peer *p = peer_attached();
    Kvq__DropSession drop = KVQ__DROP_SESSION__INIT;
    Kvq__Request request = REQUEST(DROP_SESSION, drop_session, &drop);
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    memset(name, 'n', KVQ_NAME_BYTES - 1);
    assert_int_equal(peer_open_session(p, name), 0);
    ref.name = memset(name, 'n', KVQ_NAME_BYTES);
    drop.which_case = KVQ__DROP_SESSION__WHICH_REF;
    drop.ref = &ref;
    assert_int_equal(peer_ask(p, &request, NULL, 0), KVQ_E_LIMIT);
    assert_string_equal(p->reply->text,
                        "SessionRef.name is a name of 128 bytes; it can have 127 at most");
    name[KVQ_NAME_BYTES - 1] = '\0';
    assert_int_equal(peer_ask(p, &request, NULL, 0), 0);
}

// Groups of the process at the other end.
PLAIN_TEST(test_groups)
{
    char text[KVQ_TEXT_BYTES];
    gid_t before[KVQ_MAX_GROUPS], groups[KVQ_MAX_GROUPS] = {4242, 70000};
    int pair[2], n_before = getgroups(KVQ_MAX_GROUPS, before);
    if (geteuid() == 0) // others test with what they have, maybe none
        assert_int_equal(setgroups(2, groups), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    int n = getgroups(KVQ_MAX_GROUPS, groups);
    if (geteuid() == 0)
        assert_int_equal(setgroups((size_t)n_before, before), 0);
    struct kvq__peer peer;
    assert_int_equal(kvq__socket_peer(pair[0], &peer, NULL, text), 0);
    assert_int_equal(peer.uid, geteuid());
    assert_int_equal(peer.pid, getpid());
    assert_int_equal(peer.gids[0], getegid());
    assert_int_equal(peer.n_gids, 1 + n);
    for (int i = 0; i < n; i++)
        assert_int_equal(peer.gids[1 + i], groups[i]);
    assert_int_equal(kvq__socket_peer(STDIN_FILENO, &peer, NULL, text), KVQ_E_SYSTEM); // no socket
    close(pair[0]);
    close(pair[1]);
}

// The process that connected dies while a child of it holds the socket open.
COUNTED_TEST(test_death_with_a_child)
{
    int report[2];
    char byte;
    assert_int_equal(pipe2(report, O_CLOEXEC), 0);
    pid_t parent = fork();
    if (parent == 0) {
        struct peer *p = peer_attached();
        if (peer_create_buffer(p, 4096) != 0 || peer_open_queue(p) != 0)
            _exit(1);
        if (fork() == 0) { // holds the socket; hears when the daemon closes it
            peer_close_fds(p);
            struct pollfd wait = {.fd = p->fd, .events = POLLIN};
            poll(&wait, 1, 20000);
            byte = peer_receive(p) ? 'r' : 'c';
            _exit(write(report[1], &byte, 1) == 1 ? 0 : 1);
        }
        _exit(0);
    }
    close(report[1]);
    waitpid(parent, NULL, 0);
    assert_int_equal(read(report[0], &byte, 1), 1);
    assert_int_equal(byte, 'c');
    close(report[0]);
}

COUNTED_TEST(test_second_daemon)
{
    static struct kvq__server second;
    char text[KVQ_TEXT_BYTES], pid[32];
    second.config = *attach_config();
    assert_int_equal(kvq__server_lock(&second, text), KVQ_E_BUSY);
    snprintf(pid, sizeof pid, "(pid %d)", (int)getpid());
    assert_says(text, pid);
}

// A request may leave no room for words of the reply to it; it gets the status's own.
PLAIN_TEST(test_no_room_for_words)
{
    uint8_t memory[64];
    struct kvq_arena arena;
    Kvq__Reply reply = KVQ__REPLY__INIT;
    kvq_arena_init(&arena, memory, sizeof memory);
    while (kvq_arena_alloc(&arena, 1)) {
    }
    kvq__reply_status(&reply, &arena, KVQ_E_NO_MEMORY, "a sentence");
    assert_int_equal(reply.status, KVQ_E_NO_MEMORY);
    assert_string_equal(reply.text, kvq_status_text(KVQ_E_NO_MEMORY));
    kvq__reply_status(&reply, &arena, 0, "");
    assert_string_equal(reply.text, "");
}

// ---- Hellos that come late ----

// The newest connection, as the loop sees it.
struct seen {
    enum kvq__connection_state state;
    uint64_t now; // milliseconds
};

static void look(struct kvq__server *server, void *context)
{
    struct seen *seen = context;
    const struct kvq__connection *c = TAILQ_LAST(&server->attach->connections, kvq__connections);
    seen->state = c ? c->state : KVQ__CONNECTION_ENDING;
    seen->now = uv_now(&server->loop);
}

// The newest connection's time for a hello is up, if it is still counted.
static void expire(struct kvq__server *server, void *context)
{
    struct kvq__connection *c = TAILQ_LAST(&server->attach->connections, kvq__connections);
    if (uv_is_active((uv_handle_t *)&c->timer))
        uv_timer_start(&c->timer, c->timer.timer_cb, 1, 0);
}

static struct peer *peer_accepted(void)
{
    struct seen seen;
    struct peer *p = peer_new();
    do
        attach_in_loop(look, &seen);
    while (seen.state != KVQ__CONNECTION_HELLO);
    return p;
}

COUNTED_TEST(test_no_hello)
{
    struct peer *p = peer_accepted();
    attach_in_loop(expire, NULL);
    assert_false(peer_receive(p));
}

// The time that the daemon takes to answer is not the client's.
COUNTED_TEST(test_hello_at_a_slow_poller)
{
    struct seen seen, later;
    struct peer *p = peer_accepted();
    attach_hold_poller();
    peer_send_hello(p, 1, KVQ_PROTOCOL_MAX);
    do
        attach_in_loop(look, &seen);
    while (seen.state != KVQ__CONNECTION_BUSY);
    attach_in_loop(expire, NULL);
    do
        attach_in_loop(look, &later);
    while (later.now < seen.now + 10); // timers of 1 ms and 1 ms have run
    attach_release_poller();
    assert_int_equal(peer_answer(p), 0);
}

static sem_t loop_stands, hello_sent;

// The loop stands still beyond the connection's time, and meanwhile a hello comes.
static void stand(struct kvq__server *server, void *context)
{
    expire(server, context);
    sem_post(&loop_stands);
    while (sem_wait(&hello_sent) != 0)
        ;
    const uint64_t end = uv_hrtime() + 10000000;
    while (uv_hrtime() < end)
        sched_yield();
}

static void *run_stand(void *context)
{
    attach_in_loop(stand, context);
    return NULL;
}

COUNTED_TEST(test_hello_at_a_slow_loop)
{
    pthread_t thread;
    sem_init(&loop_stands, 0, 0);
    sem_init(&hello_sent, 0, 0);
    struct peer *p = peer_accepted();
    assert_int_equal(pthread_create(&thread, NULL, run_stand, NULL), 0);
    while (sem_wait(&loop_stands) != 0)
        ;
    peer_send_hello(p, 1, KVQ_PROTOCOL_MAX);
    sem_post(&hello_sent);
    pthread_join(thread, NULL);
    assert_int_equal(peer_answer(p), 0);
    sem_destroy(&loop_stands);
    sem_destroy(&hello_sent);
}

int main(void)
{
    kvq__log_open(NULL, KVQ_LOG_ERROR, NULL);
    return run_all(NULL, NULL);
}
