// SPDX-License-Identifier: Apache-2.0
//
// The attach socket against clients that misbehave: a whole daemon runs in a thread of this
// program, and the tests speak to it byte by byte. At the end of each test every descriptor and
// mapping that it made must be gone again.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/log.h"
#include "daemon/packet.h"
#include "daemon/server.h"
#include "proto/ring.h"
#include "proto/wire.h"

// ---- The daemon ----

static struct {
    struct kvq__server server;
    pthread_t thread;
    uv_async_t stop;
    char directory[64];
} rig;

static void on_stop(uv_async_t *async)
{
    uv_stop(async->loop);
}

static void *serve(void *context)
{
    (void)context;
    uv_run(&rig.server.loop, UV_RUN_DEFAULT);
    kvq__server_close(&rig.server);
    return NULL;
}

static int start(void **state)
{
    char text[KVQ_TEXT_BYTES], *none[] = {NULL};
    (void)state;
    memset(&rig.server, 0, sizeof rig.server);
    snprintf(rig.directory, sizeof rig.directory, "/tmp/kvq-test-attach-XXXXXX");
    assert_non_null(mkdtemp(rig.directory));
    kvq__config_defaults(&rig.server.config, none);
    snprintf(rig.server.config.runtime_dir, sizeof rig.server.config.runtime_dir, "%s",
             rig.directory);
    rig.server.config.pool_bytes = 64 << 20;
    rig.server.config.extent_bytes = 2 << 20;
    rig.server.config.client_bytes = 8 << 20;
    rig.server.config.max_clients = 8;
    rig.server.config.workers = 2;
    assert_int_equal(kvq__server_lock(&rig.server, text), 0);
    assert_int_equal(kvq__server_open(&rig.server, text), 0);
    uv_async_init(&rig.server.loop, &rig.stop, on_stop);
    return pthread_create(&rig.thread, NULL, serve, NULL);
}

static int stop(void **state)
{
    char path[96];
    (void)state;
    uv_async_send(&rig.stop);
    pthread_join(rig.thread, NULL);
    close(rig.server.lock_fd);
    snprintf(path, sizeof path, "%s/kvqd.lock", rig.directory);
    unlink(path);
    return rmdir(rig.directory); // nothing else is left there
}

// ---- A client ----

struct peer {
    int fd;
    uint32_t next_id;
    uint8_t packet[KVQ_MAX_MESSAGE];
    uint8_t memory[KVQ_WIRE_ARENA];
    struct kvq_arena arena;
    int fds[16];
    uint32_t n_fds;
    Kvq__Reply *reply;
};

static struct peer *peer_new(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct peer *p = calloc(1, sizeof *p);
    p->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s/attach.sock", rig.directory);
    assert_int_equal(connect(p->fd, (struct sockaddr *)&address, sizeof address), 0);
    return p;
}

static void send_bytes(struct peer *p, const void *bytes, size_t n, const int *fds, uint32_t n_fds)
{
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(32 * sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)(uintptr_t)bytes, n};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (n_fds) {
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    assert_int_equal(sendmsg(p->fd, &message, MSG_NOSIGNAL), n);
}

static void close_fds(struct peer *p)
{
    for (uint32_t i = 0; i < p->n_fds; i++)
        close(p->fds[i]);
    p->n_fds = 0;
}

// Receives one reply into p->reply and p->fds; false at the end of the connection.
static bool receive(struct peer *p)
{
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(16 * sizeof(int))];
    } control;
    char text[KVQ_TEXT_BYTES];
    struct iovec part = {p->packet, sizeof p->packet};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t got = recvmsg(p->fd, &message, MSG_CMSG_CLOEXEC);
    if (got <= 0)
        return false;
    close_fds(p);
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c) {
        p->n_fds = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(p->fds, CMSG_DATA(c), p->n_fds * sizeof(int));
    }
    kvq_arena_init(&p->arena, p->memory, sizeof p->memory);
    assert_int_equal(kvq_reply_unpack(p->packet, (size_t)got, &p->arena, &p->reply, text), 0);
    return true;
}

// Ends the connection from our side and waits until the daemon has let go of it.
static void peer_free(struct peer *p)
{
    shutdown(p->fd, SHUT_WR);
    while (receive(p))
        ;
    close_fds(p);
    close(p->fd);
    free(p);
}

static int ask(struct peer *p, Kvq__Request *request, const int *fds, uint32_t n_fds)
{
    uint8_t bytes[KVQ_MAX_MESSAGE];
    size_t length;
    request->id = ++p->next_id;
    if (request->protocol == 0)
        request->protocol = KVQ_PROTOCOL_MAX;
    assert_int_equal(kvq_request_pack(request, bytes, sizeof bytes, &length), 0);
    send_bytes(p, bytes, length, fds, n_fds);
    if (!receive(p))
        return 1;
    assert_int_equal(p->reply->id, p->next_id);
    assert_true(p->reply->status == 0 || p->reply->text[0]);
    return p->reply->status;
}

static int say_hello(struct peer *p, uint32_t min, uint32_t max)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Hello hello = KVQ__HELLO__INIT;
    hello.protocol_min = min;
    hello.protocol_max = max;
    hello.client_name = (char *)"test";
    request.command_case = KVQ__REQUEST__COMMAND_HELLO;
    request.hello = &hello;
    return ask(p, &request, NULL, 0);
}

static struct peer *attached(void)
{
    struct peer *p = peer_new();
    assert_int_equal(say_hello(p, KVQ_PROTOCOL_MIN, KVQ_PROTOCOL_MAX), 0);
    assert_int_equal(p->n_fds, 1);
    return p;
}

static int import_memfd(struct peer *p, const int *fds, uint32_t n_fds, uint64_t offset,
                        uint64_t bytes)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ImportBuffer import = KVQ__IMPORT_BUFFER__INIT;
    import.offset = offset;
    import.bytes = bytes;
    request.command_case = KVQ__REQUEST__COMMAND_IMPORT_BUFFER;
    request.import_buffer = &import;
    return ask(p, &request, fds, n_fds);
}

static int create_buffer(struct peer *p, uint64_t bytes)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__CreateBuffer create = KVQ__CREATE_BUFFER__INIT;
    create.bytes = bytes;
    request.command_case = KVQ__REQUEST__COMMAND_CREATE_BUFFER;
    request.create_buffer = &create;
    return ask(p, &request, NULL, 0);
}

static int close_buffer(struct peer *p, uint32_t buffer)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__CloseBuffer close = KVQ__CLOSE_BUFFER__INIT;
    close.buffer = buffer;
    request.command_case = KVQ__REQUEST__COMMAND_CLOSE_BUFFER;
    request.close_buffer = &close;
    return ask(p, &request, NULL, 0);
}

static int open_queue(struct peer *p)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__OpenQueue open = KVQ__OPEN_QUEUE__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_OPEN_QUEUE;
    request.open_queue = &open;
    return ask(p, &request, NULL, 0);
}

static int close_queue(struct peer *p, uint32_t queue)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__CloseQueue close = KVQ__CLOSE_QUEUE__INIT;
    close.queue = queue;
    request.command_case = KVQ__REQUEST__COMMAND_CLOSE_QUEUE;
    request.close_queue = &close;
    return ask(p, &request, NULL, 0);
}

static int open_session(struct peer *p, const char *name)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__OpenSession open = KVQ__OPEN_SESSION__INIT;
    Kvq__Layer row = KVQ__LAYER__INIT, *rows[] = {&row};
    row.q_heads = row.kv_heads = 1;
    row.k_dim = row.v_dim = 64;
    open.name = (char *)(uintptr_t)name;
    open.format = (char *)"f16";
    open.dtype = 1;
    open.layers = rows;
    open.n_layers = 1;
    request.command_case = KVQ__REQUEST__COMMAND_OPEN_SESSION;
    request.open_session = &open;
    return ask(p, &request, NULL, 0);
}

static void cancel(struct peer *p, uint32_t number)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Cancel cancel = KVQ__CANCEL__INIT;
    cancel.request = number;
    request.command_case = KVQ__REQUEST__COMMAND_CANCEL;
    request.cancel = &cancel;
    assert_int_equal(ask(p, &request, NULL, 0), 0);
    assert_int_equal(p->n_fds, 0);
}

// ---- What must not leak ----

static int count_entries(const char *path)
{
    int n = 0;
    DIR *directory = opendir(path);
    while (readdir(directory))
        n++;
    closedir(directory);
    return n;
}

static int count_mappings(void)
{
    char line[512];
    int n = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, file))
        n += strstr(line, "memfd:kvq-re") || strstr(line, "memfd:kvq-buffer") ||
             strstr(line, "memfd:test");
    fclose(file);
    return n;
}

static int fds_before;

static void begin_counting(void)
{
    // A first client makes the daemon and its libraries open what they keep.
    peer_free(attached());
    fds_before = count_entries("/proc/self/fd");
    assert_int_equal(count_mappings(), 0);
}

// The daemon closes its side of a connection last of all, and peer_free has waited for that; but
// the loop may still be at the next line.
static void end_counting(void)
{
    peer_free(attached());
    assert_int_equal(count_entries("/proc/self/fd"), fds_before);
    assert_int_equal(count_mappings(), 0);
}

// ---- Tests ----

static void test_hello(void **state)
{
    (void)state;
    begin_counting();
    struct peer *p = peer_new();
    assert_int_equal(say_hello(p, KVQ_PROTOCOL_MAX + 1, KVQ_PROTOCOL_MAX + 3), KVQ_E_VERSION);
    assert_non_null(strstr(p->reply->text, "speaks protocol 2 to 4"));
    assert_false(receive(p)); // and the connection is closed
    peer_free(p);

    p = peer_new();
    assert_int_equal(say_hello(p, 5, 1), KVQ_E_VERSION); // an empty range
    peer_free(p);

    p = peer_new();
    assert_int_equal(open_queue(p), KVQ_E_PROTOCOL);
    assert_non_null(strstr(p->reply->text, "first request must be hello"));
    peer_free(p);

    p = attached();
    assert_int_equal(say_hello(p, 1, 1), KVQ_E_PROTOCOL);
    assert_non_null(strstr(p->reply->text, "second hello"));
    assert_false(receive(p));
    peer_free(p);

    p = attached();
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Ping ping = KVQ__PING__INIT;
    request.protocol = 9;
    request.command_case = KVQ__REQUEST__COMMAND_PING;
    request.ping = &ping;
    assert_int_equal(ask(p, &request, NULL, 0), KVQ_E_VERSION);
    peer_free(p);
    end_counting();
}

static void test_daemon_page(void **state)
{
    (void)state;
    begin_counting();
    struct peer *p = attached();
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
    peer_free(p);
    end_counting();
}

static void test_garbage(void **state)
{
    (void)state;
    begin_counting();
    static const char *const packets[] = {"x", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
                                          "\x0a\x03\x61\x62\x63"};
    for (int i = 0; i < 3; i++) {
        struct peer *p = i ? attached() : peer_new();
        send_bytes(p, packets[i], strlen(packets[i]), NULL, 0);
        assert_true(receive(p));
        assert_int_equal(p->reply->status, KVQ_E_PROTOCOL);
        assert_false(receive(p));
        peer_free(p);
    }
    struct peer *p = attached();
    uint8_t *large = calloc(1, KVQ_MAX_MESSAGE + 1);
    send_bytes(p, large, KVQ_MAX_MESSAGE + 1, NULL, 0);
    assert_false(receive(p));
    free(large);
    peer_free(p);
    end_counting();
}

static void test_descriptors_are_counted(void **state)
{
    (void)state;
    begin_counting();
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING), fds[24];
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    for (int i = 0; i < 24; i++)
        fds[i] = fd;
    static const uint32_t counts[] = {0, 2, 8};
    for (int i = 0; i < 3; i++) {
        struct peer *p = attached();
        assert_int_equal(import_memfd(p, fds, counts[i], 0, 4096), KVQ_E_PROTOCOL);
        assert_non_null(strstr(p->reply->text, "1 belong there"));
        assert_false(receive(p));
        peer_free(p);
    }
    // More than are taken: the control data is cut, nothing is kept.
    static const uint32_t too_many[] = {9, 16, 24};
    for (int i = 0; i < 3; i++) {
        struct peer *p = attached();
        send_bytes(p, "x", 1, fds, too_many[i]);
        assert_false(receive(p));
        peer_free(p);
    }
    // Descriptors beside a request that takes none.
    struct peer *p = attached();
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Ping ping = KVQ__PING__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_PING;
    request.ping = &ping;
    assert_int_equal(ask(p, &request, fds, 1), KVQ_E_PROTOCOL);
    peer_free(p);
    close(fd);
    end_counting();
}

static void import_refused(int fd, uint64_t offset, uint64_t bytes, int code, const char *words)
{
    struct peer *p = attached();
    assert_int_equal(import_memfd(p, &fd, 1, offset, bytes), code);
    if (!strstr(p->reply->text, words))
        fail_msg("\"%s\" does not say \"%s\"", p->reply->text, words);
    assert_int_equal(create_buffer(p, 4096), 0); // the client itself goes on
    peer_free(p);
}

static void test_imports(void **state)
{
    (void)state;
    begin_counting();
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 16384), 0);
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
    int sealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(sealed, 4096), 0);
    assert_int_equal(fcntl(sealed, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_WRITE), 0);
    import_refused(sealed, 0, 4096, KVQ_E_BUFFER, "open for writing");
    close(sealed);

    struct peer *p = attached();
    assert_int_equal(import_memfd(p, &fd, 1, 4096, 8192), 0);
    assert_int_equal(p->n_fds, 0);
    uint32_t buffer = p->reply->create_buffer->buffer;
    assert_true(buffer != 0);
    assert_int_equal(count_mappings(), 1);
    assert_int_equal(close_buffer(p, buffer + 1), KVQ_E_BUFFER);
    assert_int_equal(close_buffer(p, buffer), 0);
    assert_int_equal(close_buffer(p, buffer), KVQ_E_BUFFER);
    assert_int_equal(import_memfd(p, &fd, 1, 0, 16384), 0); // left for the end
    peer_free(p);
    close(fd);
    end_counting();
}

static void test_buffers(void **state)
{
    (void)state;
    begin_counting();
    struct peer *p = attached();
    assert_int_equal(create_buffer(p, 0), KVQ_E_INVALID);
    assert_int_equal(create_buffer(p, (8 << 20) + 1), KVQ_E_LIMIT);
    assert_int_equal(create_buffer(p, 6 << 20), 0);
    uint32_t first = p->reply->create_buffer->buffer;
    assert_int_equal(p->n_fds, 1);
    assert_int_equal(ftruncate(p->fds[0], 0), -1); // sealed
    assert_int_equal(errno, EPERM);
    assert_int_equal(create_buffer(p, 3 << 20), KVQ_E_LIMIT); // together too much
    assert_int_equal(close_buffer(p, first), 0);
    assert_int_equal(create_buffer(p, 3 << 20), 0);
    peer_free(p);
    end_counting();
}

// A cancel gives back what the request before it made, and nothing else.
static void test_cancel(void **state)
{
    (void)state;
    begin_counting();
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    struct peer *p = attached(), *other = attached();
    cancel(p, p->next_id); // of hello
    cancel(p, 12345);
    for (int i = 0; i < KVQ_MAX_BUFFERS; i++) { // far more than one client may have at once
        assert_int_equal(create_buffer(p, 8 << 20), 0);
        cancel(p, p->next_id);
        assert_int_equal(import_memfd(p, &fd, 1, 0, 4096), 0);
        cancel(p, p->next_id);
        assert_int_equal(open_queue(p), 0);
        cancel(p, p->next_id);
        assert_int_equal(open_session(p, "late"), 0);
        cancel(p, p->next_id);
        assert_int_equal(open_session(other, "late"), 0); // it has no writer
        cancel(other, other->next_id);
    }
    close_fds(p);
    assert_int_equal(count_mappings(), 0);
    // Only the last request, and only once: the buffer stays.
    assert_int_equal(create_buffer(p, 4096), 0);
    uint32_t made = p->next_id, buffer = p->reply->create_buffer->buffer;
    cancel(p, made - 1);
    assert_int_equal(create_buffer(p, 0), KVQ_E_INVALID);
    cancel(p, made);
    cancel(p, p->next_id);
    assert_int_equal(close_buffer(p, buffer), 0);
    assert_int_equal(open_queue(p), 0);
    made = p->next_id;
    cancel(p, made);
    cancel(p, made);
    peer_free(other);
    peer_free(p);
    close(fd);
    end_counting();
}

// A ring pair of ours, mapped like a client does.
struct lane {
    struct kvq_req_page *req;
    struct kvq_cq_page *cq;
    int event, wake;
};

static struct lane lane_open(struct peer *p)
{
    assert_int_equal(open_queue(p), 0);
    assert_int_equal(p->n_fds, 4);
    assert_int_equal(p->reply->open_queue->request_slots, KVQ_REQ_SLOTS);
    struct lane lane = {.event = dup(p->fds[2]), .wake = dup(p->fds[3])};
    lane.req = mmap(NULL, KVQ_REQ_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds[0], 0);
    assert_true(lane.req != MAP_FAILED);
    assert_true(mmap(NULL, KVQ_CQ_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds[1], 0) ==
                MAP_FAILED); // replies are the daemon's to write
    lane.cq = mmap(NULL, KVQ_CQ_RING_BYTES, PROT_READ, MAP_SHARED, p->fds[1], 0);
    assert_true(lane.cq != MAP_FAILED);
    assert_int_equal(ftruncate(p->fds[0], 0), -1);
    assert_int_equal(lane.req->magic, KVQ_SHM_MAGIC_REQUEST);
    assert_int_equal(lane.cq->magic, KVQ_SHM_MAGIC_REPLY);
    close_fds(p);
    return lane;
}

static void lane_close(struct lane *lane)
{
    munmap(lane->req, KVQ_REQ_RING_BYTES);
    munmap((void *)lane->cq, KVQ_CQ_RING_BYTES);
    close(lane->event);
    close(lane->wake);
}

static void lane_wake(const struct lane *lane)
{
    const uint64_t one = 1;
    assert_int_equal(write(lane->event, &one, sizeof one), sizeof one);
}

static void test_queues(void **state)
{
    (void)state;
    begin_counting();
    struct peer *p = attached();
    struct lane lane = lane_open(p);
    uint32_t queue = p->reply->open_queue->queue;
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
    kvq_ring_client_side(lane.req, lane.cq, &tx, &rx);
    struct kvq_request nop = {.op = KVQ_OP_NOP, .seq = 5, .slots = KVQ_REQ_HEADER_SLOTS};
    kvq_ring_write(&tx, 0, &nop, sizeof nop);
    kvq_ring_publish(&tx, nop.slots);
    lane_wake(&lane);
    uint32_t ready = 0;
    while (ready == 0) {
        assert_int_equal(kvq_ring_poll(&rx, &ready), 0);
        sched_yield();
    }
    assert_int_equal(close_queue(p, queue + 1), KVQ_E_INVALID);
    assert_int_equal(close_queue(p, queue), 0);
    assert_int_equal(close_queue(p, queue), KVQ_E_INVALID);
    lane_close(&lane);
    for (int i = 0; i < KVQ_MAX_QUEUES; i++)
        assert_int_equal(open_queue(p), 0);
    assert_int_equal(open_queue(p), KVQ_E_LIMIT);
    peer_free(p);
    end_counting();
}

static void test_scribbler_is_closed(void **state)
{
    (void)state;
    begin_counting();
    struct peer *p = attached(), *other = attached();
    struct lane lane = lane_open(p);
    kvq_word_store_release(&lane.req->tail, 123456789);
    lane_wake(&lane);
    assert_false(receive(p));
    lane_close(&lane);
    peer_free(p);
    assert_int_equal(create_buffer(other, 4096), 0);
    peer_free(other);
    end_counting();
}

// A client may change the flags of descriptors that it shares, fill and empty them: the daemon must
// not wait for it.
static void test_hostile_wakers(void **state)
{
    (void)state;
    begin_counting();
    struct peer *p = attached(), *other = attached();
    struct lane lane = lane_open(p);
    uint64_t most = UINT64_MAX - 1, got;
    fcntl(lane.event, F_SETFL, 0);
    fcntl(lane.wake, F_SETFL, 0);
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
    kvq_ring_client_side(lane.req, lane.cq, &tx, &rx);
    kvq_ring_sleep_begin(&lane.req->client_sleeping); // for ever: each completion is a wake-up
    for (uint32_t i = 0; i < 3000; i++) {
        struct kvq_request nop = {.op = KVQ_OP_NOP, .seq = i, .slots = KVQ_REQ_HEADER_SLOTS};
        kvq_ring_write(&tx, 0, &nop, sizeof nop);
        kvq_ring_publish(&tx, nop.slots);
        if (i == 0)
            assert_int_equal(write(lane.event, &most, sizeof most), sizeof most);
        else if (i == 1)
            assert_int_equal(read(lane.event, &got, sizeof got), sizeof got);
        if (i > 0)
            lane_wake(&lane);
        uint32_t ready = 0, room;
        while (ready == 0) {
            assert_int_equal(kvq_ring_poll(&rx, &ready), 0);
            sched_yield();
        }
        kvq_ring_consume(&rx, ready);
        assert_int_equal(kvq_ring_room(&tx, &room), 0);
    }
    assert_int_equal(create_buffer(other, 4096), 0);
    peer_free(other);
    lane_close(&lane);
    peer_free(p);
    end_counting();
}

static void test_too_many_clients(void **state)
{
    (void)state;
    begin_counting();
    struct peer *peers[8];
    for (int i = 0; i < 8; i++)
        peers[i] = attached();
    struct peer *p = peer_new();
    assert_int_equal(say_hello(p, 1, 1), KVQ_E_LIMIT);
    assert_non_null(strstr(p->reply->text, "max_clients"));
    peer_free(p);
    for (int i = 0; i < 8; i++)
        peer_free(peers[i]);
    end_counting();
}

// Groups of the process at the other end, and only if it is the one that is meant.
static void test_groups(void **state)
{
    (void)state;
    gid_t before[KVQ_MAX_GROUPS], groups[KVQ_MAX_GROUPS] = {4242, 70000};
    int pair[2], n_before = getgroups(KVQ_MAX_GROUPS, before);
    if (geteuid() == 0) // others test with what they have, maybe none
        assert_int_equal(setgroups(2, groups), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    int n = getgroups(KVQ_MAX_GROUPS, groups);
    if (geteuid() == 0)
        assert_int_equal(setgroups((size_t)n_before, before), 0);
    const struct kvq__peer us = {
        .uid = geteuid(), .pid = (uint32_t)getpid(), .gids = {getegid()}, .n_gids = 1};
    struct kvq__peer peer = us;
    kvq__socket_groups(pair[0], &peer);
    assert_int_equal(peer.n_gids, 1 + n);
    for (int i = 0; i < n; i++)
        assert_int_equal(peer.gids[1 + i], groups[i]);
    for (int i = 0; i < 3; i++) {
        peer = us;
        peer.uid += i == 0;
        peer.pid += i == 1;
        peer.gids[0] += i == 2;
        kvq__socket_groups(pair[0], &peer);
        assert_int_equal(peer.n_gids, 1);
    }
    peer = us;
    kvq__socket_groups(-1, &peer);
    kvq__socket_groups(STDIN_FILENO, &peer); // no socket
    assert_int_equal(peer.n_gids, 1);
    close(pair[0]);
    close(pair[1]);
}

// The process that connected dies while a child of it holds the socket open.
static void test_death_with_a_child(void **state)
{
    (void)state;
    begin_counting();
    int report[2];
    char byte;
    assert_int_equal(pipe2(report, O_CLOEXEC), 0);
    pid_t parent = fork();
    if (parent == 0) {
        struct peer *p = attached();
        if (create_buffer(p, 4096) != 0 || open_queue(p) != 0)
            _exit(1);
        if (fork() == 0) { // holds the socket; hears when the daemon closes it
            close_fds(p);
            struct pollfd wait = {.fd = p->fd, .events = POLLIN};
            poll(&wait, 1, 20000);
            byte = receive(p) ? 'r' : 'c';
            _exit(write(report[1], &byte, 1) == 1 ? 0 : 1);
        }
        _exit(0);
    }
    close(report[1]);
    waitpid(parent, NULL, 0);
    assert_int_equal(read(report[0], &byte, 1), 1);
    assert_int_equal(byte, 'c');
    close(report[0]);
    end_counting();
}

static void test_second_daemon(void **state)
{
    (void)state;
    static struct kvq__server second;
    char text[KVQ_TEXT_BYTES], pid[32];
    second.config = rig.server.config;
    assert_int_equal(kvq__server_lock(&second, text), KVQ_E_BUSY);
    snprintf(pid, sizeof pid, "(pid %d)", (int)getpid());
    assert_non_null(strstr(text, pid));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hello),
        cmocka_unit_test(test_daemon_page),
        cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_descriptors_are_counted),
        cmocka_unit_test(test_imports),
        cmocka_unit_test(test_buffers),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_queues),
        cmocka_unit_test(test_scribbler_is_closed),
        cmocka_unit_test(test_hostile_wakers),
        cmocka_unit_test(test_too_many_clients),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_death_with_a_child),
        cmocka_unit_test(test_second_daemon),
    };
    kvq__log_open(NULL, KVQ_LOG_ERROR, NULL);
    return cmocka_run_group_tests(tests, start, stop);
}
