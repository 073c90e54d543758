// SPDX-License-Identifier: Apache-2.0
//
// The daemon in a thread, the client and the counting; see attach_kit.h.
#include "tests/edge/attach_kit.h"

#include <dirent.h>
#include <semaphore.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/attach/attach.h"
#include "daemon/core/gpu/gpu.h"
#include "daemon/lifecycle.h"
#include "daemon/runtime/poller.h"
#include "proto/status.h"
#include "tests/kits/unit.h"

// ---- The daemon ----

static struct {
    struct kvq__server server;
    pthread_t thread;
    bool up;
    uv_async_t stop;
    char directory[64], codebook_dir[64], storage_dir[64];
    uint64_t storage_bytes;
    const char *gpu_driver; // NULL: no GPU
} rig;

static void on_stop(uv_async_t *async)
{
    uv_stop(async->loop);
}

static void *serve(void *context)
{
    uv_run(&rig.server.loop, UV_RUN_DEFAULT);
    kvq__server_close(&rig.server);
    return NULL;
}

void attach_codebooks(const char *folder)
{
    snprintf(rig.codebook_dir, sizeof rig.codebook_dir, "%s", folder);
}

void attach_storage(const char *folder, uint64_t bytes)
{
    snprintf(rig.storage_dir, sizeof rig.storage_dir, "%s", folder);
    rig.storage_bytes = bytes;
}

void attach_gpus(const char *library)
{
    rig.gpu_driver = library;
}

static void open_gpus(void)
{
    char text[KVQ_TEXT_BYTES];
    const struct kvq__gpus_config config = {
        .driver = rig.gpu_driver, .bytes = 64 << 20, .extent_bytes = 2 << 20};
    if (rig.gpu_driver && kvq__gpus_open(&config, &rig.server.gpus, text) != 0)
        fail_msg("%s", text);
}

int attach_start(void **state)
{
    char text[KVQ_TEXT_BYTES], *none[] = {NULL};
    memset(&rig.server, 0, sizeof rig.server);
    snprintf(rig.directory, sizeof rig.directory, "/tmp/kvq-test-attach-XXXXXX");
    assert_non_null(mkdtemp(rig.directory));
    kvq__config_defaults(&rig.server.config, none);
    snprintf(rig.server.config.runtime_dir, sizeof rig.server.config.runtime_dir, "%s",
             rig.directory);
    rig.server.config.pool_bytes = 64 << 20;
    rig.server.config.host_extent_bytes = 2 << 20;
    rig.server.config.gpu_extent_bytes = 2 << 20;
    rig.server.config.client_bytes = 8 << 20;
    rig.server.config.buffer_bytes = 20 << 20;
    rig.server.config.max_clients = 8;
    rig.server.config.workers = 2;
    snprintf(rig.server.config.codebook_dir, sizeof rig.server.config.codebook_dir, "%s",
             rig.codebook_dir);
    snprintf(rig.server.config.storage_dir, sizeof rig.server.config.storage_dir, "%s",
             rig.storage_dir);
    rig.server.config.storage_bytes = rig.storage_bytes;
    open_gpus();
    assert_int_equal(kvq__server_lock(&rig.server, text), 0);
    assert_int_equal(kvq__server_open(&rig.server, text), 0);
    uv_async_init(&rig.server.loop, &rig.stop, on_stop);
    rig.up = pthread_create(&rig.thread, NULL, serve, NULL) == 0;
    return rig.up ? 0 : -1;
}

int attach_stop(void **state)
{
    char path[96];
    if (!rig.up)
        return 0;
    rig.up = false;
    uv_async_send(&rig.stop);
    pthread_join(rig.thread, NULL);
    close(rig.server.lock_fd);
    snprintf(path, sizeof path, "%s/kvqd.lock", rig.directory);
    unlink(path);
    return rmdir(rig.directory); // nothing else is left there
}

const struct kvq_config *attach_config(void)
{
    return &rig.server.config;
}

const char *attach_directory(void)
{
    return rig.directory;
}

struct letter {
    struct kvq__mail mail;
    void (*run)(struct kvq__server *server, void *context);
    void *context;
    sem_t read;
};

static void read_letter(struct kvq__mail *mail)
{
    struct letter *letter = (struct letter *)mail;
    letter->run(&rig.server, letter->context);
    sem_post(&letter->read);
}

static void wait_for(sem_t *sem)
{
    while (sem_wait(sem) != 0)
        assert_int_equal(errno, EINTR);
}

void attach_in_loop(void (*run)(struct kvq__server *server, void *context), void *context)
{
    struct letter letter = {.run = run, .context = context};
    sem_init(&letter.read, 0, 0);
    kvq__mailbox_post(&rig.server.box, &letter.mail, read_letter);
    wait_for(&letter.read);
    sem_destroy(&letter.read);
}

pthread_t attach_loop_thread(void)
{
    return rig.thread;
}

static struct {
    struct kvq__mail mail;
    sem_t held, released;
} hold;

static void hold_poller(struct kvq__mail *mail)
{
    sem_post(&hold.held);
    wait_for(&hold.released);
}

void attach_hold_poller(void)
{
    sem_init(&hold.held, 0, 0);
    sem_init(&hold.released, 0, 0);
    kvq__mailbox_post(kvq__poller_box(rig.server.poller), &hold.mail, hold_poller);
    wait_for(&hold.held);
}

void attach_release_poller(void)
{
    sem_post(&hold.released);
}

// ---- A client ----

static struct peer *peers; // that are there

struct peer *peer_new(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct peer *p = calloc(1, sizeof *p);
    p->next = peers;
    peers = p;
    p->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s/attach.sock", rig.directory);
    assert_int_equal(connect(p->fd, (struct sockaddr *)&address, sizeof address), 0);
    return p;
}

void peer_send(struct peer *p, const void *bytes, size_t n, const int *fds, uint32_t n_fds)
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

void peer_close_fds(struct peer *p)
{
    for (uint32_t i = 0; i < p->n_fds; i++)
        close(p->fds[i]);
    p->n_fds = 0;
}

bool peer_receive(struct peer *p)
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
    peer_close_fds(p);
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c) {
        p->n_fds = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(p->fds, CMSG_DATA(c), p->n_fds * sizeof(int));
    }
    kvq_arena_init(&p->arena, p->memory, sizeof p->memory);
    assert_int_equal(kvq_reply_unpack(p->packet, (size_t)got, &p->arena, &p->reply, text), 0);
    return true;
}

void peer_free(struct peer *p)
{
    struct peer **at = &peers;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    shutdown(p->fd, SHUT_WR);
    while (peer_receive(p))
        ;
    peer_close_fds(p);
    close(p->fd);
    free(p);
}

void peer_send_request(struct peer *p, Kvq__Request *request, const int *fds, uint32_t n_fds)
{
    uint8_t bytes[KVQ_MAX_MESSAGE];
    size_t length;
    request->id = ++p->next_id;
    if (request->protocol == 0)
        request->protocol = KVQ_PROTOCOL_MAX;
    assert_int_equal(kvq_request_pack(request, bytes, sizeof bytes, &length), 0);
    peer_send(p, bytes, length, fds, n_fds);
}

int peer_answer(struct peer *p)
{
    if (!peer_receive(p))
        return 1;
    assert_int_equal(p->reply->id, p->next_id);
    assert_true(p->reply->status == 0 || p->reply->text[0]);
    return p->reply->status;
}

int peer_ask(struct peer *p, Kvq__Request *request, const int *fds, uint32_t n_fds)
{
    peer_send_request(p, request, fds, n_fds);
    return peer_answer(p);
}

void peer_send_hello(struct peer *p, uint32_t min, uint32_t max)
{
    Kvq__Hello hello = KVQ__HELLO__INIT;
    hello.protocol_min = min;
    hello.protocol_max = max;
    hello.client_name = (char *)"test";
    peer_send_request(p, &REQUEST(HELLO, hello, &hello), NULL, 0);
}

int peer_hello(struct peer *p, uint32_t min, uint32_t max)
{
    peer_send_hello(p, min, max);
    return peer_answer(p);
}

struct peer *peer_attached(void)
{
    struct peer *p = peer_new();
    assert_int_equal(peer_hello(p, KVQ_PROTOCOL_MIN, KVQ_PROTOCOL_MAX), 0);
    assert_int_equal(p->n_fds, 1);
    return p;
}

int peer_import(struct peer *p, const int *fds, uint32_t n_fds, uint64_t offset, uint64_t bytes)
{
    Kvq__ImportBuffer import = KVQ__IMPORT_BUFFER__INIT;
    import.offset = offset;
    import.bytes = bytes;
    return peer_ask(p, &REQUEST(IMPORT_BUFFER, import_buffer, &import), fds, n_fds);
}

int peer_create_buffer(struct peer *p, uint64_t bytes)
{
    Kvq__CreateBuffer create = KVQ__CREATE_BUFFER__INIT;
    create.bytes = bytes;
    return peer_ask(p, &REQUEST(CREATE_BUFFER, create_buffer, &create), NULL, 0);
}

void peer_send_close(struct peer *p, uint32_t buffer)
{
    Kvq__CloseBuffer close = KVQ__CLOSE_BUFFER__INIT;
    close.buffer = buffer;
    peer_send_request(p, &REQUEST(CLOSE_BUFFER, close_buffer, &close), NULL, 0);
}

int peer_close_buffer(struct peer *p, uint32_t buffer)
{
    peer_send_close(p, buffer);
    return peer_answer(p);
}

int peer_ping(struct peer *p, uint32_t protocol, const int *fds, uint32_t n_fds)
{
    Kvq__Ping ping = KVQ__PING__INIT;
    Kvq__Request request = REQUEST(PING, ping, &ping);
    request.protocol = protocol;
    return peer_ask(p, &request, fds, n_fds);
}

int peer_open_queue(struct peer *p)
{
    Kvq__OpenQueue open = KVQ__OPEN_QUEUE__INIT;
    return peer_ask(p, &REQUEST(OPEN_QUEUE, open_queue, &open), NULL, 0);
}

uint32_t peer_queue(struct peer *p)
{
    assert_int_equal(peer_open_queue(p), 0);
    return p->reply->open_queue->queue;
}

uint32_t peer_buffer(struct peer *p, uint64_t bytes)
{
    assert_int_equal(peer_create_buffer(p, bytes), 0);
    return p->reply->create_buffer->buffer;
}

int peer_close_queue(struct peer *p, uint32_t queue)
{
    Kvq__CloseQueue close = KVQ__CLOSE_QUEUE__INIT;
    close.queue = queue;
    return peer_ask(p, &REQUEST(CLOSE_QUEUE, close_queue, &close), NULL, 0);
}

int peer_open_session(struct peer *p, const char *name)
{
    peer_send_open(p, name, "f16");
    return peer_answer(p);
}

void peer_send_open(struct peer *p, const char *name, const char *format)
{
    Kvq__OpenSession open = KVQ__OPEN_SESSION__INIT;
    Kvq__Layer row = KVQ__LAYER__INIT, *rows[] = {&row};
    row.q_heads = row.kv_heads = 1;
    row.k_dim = row.v_dim = 64;
    open.name = (char *)(uintptr_t)name;
    open.format = (char *)(uintptr_t)format;
    open.dtype = 1;
    open.layers = rows;
    open.n_layers = 1;
    peer_send_request(p, &REQUEST(OPEN_SESSION, open_session, &open), NULL, 0);
}

int peer_open_table(struct peer *p, uint64_t handle, uint32_t layers, ProtobufCBinaryData gpu,
                    bool copy)
{
    Kvq__OpenTable open = KVQ__OPEN_TABLE__INIT;
    open.handle = handle;
    open.pool_at = UINT64_C(1) << 40;
    open.tokens = PEER_TABLE_TOKENS;
    open.layers = layers;
    open.gpu = gpu;
    open.copy = copy;
    return peer_ask(p, &REQUEST(OPEN_TABLE, open_table, &open), NULL, 0);
}

void peer_cancel(struct peer *p, uint32_t number)
{
    Kvq__Cancel cancel = KVQ__CANCEL__INIT;
    Kvq__Request request = REQUEST(CANCEL, cancel, &cancel);
    cancel.request = number;
    assert_int_equal(peer_ask(p, &request, NULL, 0), 0);
    assert_int_equal(p->n_fds, 0);
}

// ---- What must not leak ----

int count_mappings(void)
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

// Without codebooks, which stay for the next session.
static int count_fds(void)
{
    DIR *directory = opendir("/proc/self/fd");
    const struct dirent *entry;
    char target[64];
    int n = 0;
    while ((entry = readdir(directory))) {
        ssize_t length = readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1);
        target[length > 0 ? length : 0] = 0;
        n += !strstr(target, "memfd:kvq-codebook");
    }
    closedir(directory);
    return n;
}

static int fds_before;

// The daemon closes its side of a connection last of all, and peer_free has waited for that; but
// the loop may still be at the next line. And the first client makes the daemon and its libraries
// open what they keep.
void peer_free_all(void)
{
    while (peers)
        peer_free(peers);
    peer_free(peer_attached());
}

void begin_counting(void)
{
    peer_free_all();
    fds_before = count_fds();
    assert_int_equal(count_mappings(), 0);
}

int attach_start_counting(void **state)
{
    int rc = attach_start(state);
    begin_counting();
    return rc;
}

int attach_stop_counting(void **state)
{
    peer_free_all();
    const int fds = count_fds(), mappings = count_mappings();
    int rc = attach_stop(state);
    assert_int_equal(fds, fds_before);
    assert_int_equal(mappings, 0);
    return rc;
}
