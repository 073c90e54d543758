// SPDX-License-Identifier: Apache-2.0
//
// Replies whose descriptors cannot be sent: the kernel counts those that nobody has read for the
// user who sent them, so one client that does not read would be in the way of all. A client whose
// reply that befalls is told so, keeps its connection, and nothing of what was made is left.
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/core/state.h"
#include "daemon/log/log.h"
#include "daemon/runtime/poller.h"
#include "proto/ring.h"
#include "proto/status.h"
#include "tests/edge/attach_kit.h"
#include "tests/kits/unit.h"

// ---- A kernel that sends no descriptors of the daemon's ----

static pthread_t loop;
static uint32_t full, refused; // words

ssize_t __real_sendmsg(int socket, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int socket, const struct msghdr *message, int flags);

ssize_t __wrap_sendmsg(int socket, const struct msghdr *message, int flags)
{
    bool daemons = message->msg_control && pthread_equal(pthread_self(), loop);
    if (!daemons || !kvq_word_load(&full))
        return __real_sendmsg(socket, message, flags);
    kvq_word_store(&refused, kvq_word_load(&refused) + 1);
    errno = ETOOMANYREFS;
    return -1;
}

static int start(void **state)
{
    int rc = attach_start_counting(state);
    kvq_word_store(&full, 0);
    loop = attach_loop_thread();
    return rc;
}

// ---- Commands whose replies have descriptors ----

static int open_table(struct peer *p, uint64_t handle)
{
    return peer_open_table(p, handle, 1, (ProtobufCBinaryData){0}, false);
}

static int map_extents(struct peer *p, uint64_t handle)
{
    Kvq__MapExtents map = KVQ__MAP_EXTENTS__INIT;
    map.handle = handle;
    return peer_ask(p, &REQUEST(MAP_EXTENTS, map_extents, &map), NULL, 0);
}

static void told_why(const struct peer *p, int status)
{
    assert_int_equal(status, KVQ_E_LIMIT);
    assert_int_equal(p->n_fds, 0);
    assert_says(p->reply->text, "descriptors cannot be sent");
    assert_says(p->reply->text, "LimitNOFILE=");
}

// More often than a client may have of each.
TEST_BETWEEN(test_queues_and_buffers, start, attach_stop_counting)
{
    struct peer *p = peer_attached(), *other = peer_attached();
    kvq_word_store(&full, 1);
    for (int i = 0; i <= KVQ_MAX_BUFFERS; i++) {
        told_why(p, peer_open_queue(p));
        told_why(p, peer_create_buffer(p, 8 << 20)); // all that it may have
        peer_cancel(p, p->next_id);                  // finds nothing
        assert_int_equal(peer_ping(other, KVQ_PROTOCOL_MAX, NULL, 0), 0);
    }
    assert_int_equal(kvq_word_load(&refused), 2 * (KVQ_MAX_BUFFERS + 1));
    assert_int_equal(count_mappings(), 0);
    kvq_word_store(&full, 0);
    for (int i = 0; i < KVQ_MAX_QUEUES; i++)
        assert_int_equal(peer_open_queue(p), 0);
    assert_int_equal(peer_create_buffer(p, 8 << 20), 0);
}

TEST_BETWEEN(test_hello, start, attach_stop_counting)
{
    struct peer *other = peer_attached();
    kvq_word_store(&full, 1);
    for (int i = 0; i < 20; i++) { // more than there may be clients
        struct peer *p = peer_new();
        told_why(p, peer_hello(p, KVQ_PROTOCOL_MIN, KVQ_PROTOCOL_MAX));
        assert_false(peer_receive(p)); // it can say hello on another connection
        peer_free(p);
        assert_int_equal(peer_ping(other, KVQ_PROTOCOL_MAX, NULL, 0), 0);
    }
    kvq_word_store(&full, 0);
    peer_free(peer_attached());
}

TEST_BETWEEN(test_tables, start, attach_stop_counting)
{
    struct peer *p = peer_attached();
    assert_int_equal(peer_open_session(p, ""), 0);
    uint64_t handle = p->reply->session->handle;
    kvq_word_store(&full, 1);
    for (int i = 0; i < 3; i++)
        told_why(p, open_table(p, handle));
    kvq_word_store(&full, 0);
    assert_int_equal(open_table(p, handle), 0); // a session has one table
    assert_int_equal(p->n_fds, 1);
    assert_int_equal(open_table(p, handle), KVQ_E_EXISTS);
}

// ---- The kernel itself ----

enum { STRANGER = 65534, OPEN_FILES = 160, AT_ONCE = 253 }; // AT_ONCE: the kernel's SCM_MAX_FD

// The limit is not for those who have root's capabilities, which this thread has again later.
static void give_rights_up(struct kvq__server *server, void *context)
{
    assert_true(geteuid() != 0 || syscall(SYS_setresuid, -1, STRANGER, -1) == 0);
}

static void have_rights(struct kvq__server *server, void *context)
{
    assert_true(getuid() != 0 || syscall(SYS_setresuid, -1, 0, -1) == 0);
}

// Descriptors that lie unread in a socket of this process's own.
static void leave_unread(int socket)
{
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(AT_ONCE * sizeof(int))];
    } control = {0};
    struct iovec part = {(char *)"x", 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(AT_ONCE * sizeof(int));
    for (int i = 0; i < AT_ONCE; i++)
        memcpy(CMSG_DATA(c) + i * sizeof(int), &(int){STDOUT_FILENO}, sizeof(int));
    assert_int_equal(sendmsg(socket, &message, 0), 1);
}

TEST_BETWEEN(test_limit_of_files, start, attach_stop_counting)
{
    struct rlimit before, low;
    char byte;
    int pair[2];
    struct peer *p = peer_attached(), *other = peer_attached();
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    getrlimit(RLIMIT_NOFILE, &before);
    low = (struct rlimit){OPEN_FILES, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    attach_in_loop(give_rights_up, NULL);
    leave_unread(pair[0]);
    for (int i = 0; i < 3; i++) {
        told_why(p, peer_open_queue(p));
        assert_int_equal(peer_ping(other, KVQ_PROTOCOL_MAX, NULL, 0), 0);
    }
    assert_int_equal(recv(pair[1], &byte, 1, 0), 1);
    while (peer_open_queue(p) == KVQ_E_LIMIT) // another process of this user may be at this, too
        sched_yield();
    assert_int_equal(p->reply->status, 0);
    assert_int_equal(p->n_fds, 4);
    attach_in_loop(have_rights, NULL);
    setrlimit(RLIMIT_NOFILE, &before);
    close(pair[0]);
    close(pair[1]);
}

// ---- A client that does not read ----

static int unread_bytes(const struct peer *p)
{
    int bytes = 0;
    assert_int_equal(ioctl(p->fd, FIONREAD, &bytes), 0);
    return bytes;
}

// Asks for a queue, and lets the answer lie.
static void ask_and_leave(struct peer *p)
{
    Kvq__OpenQueue open = KVQ__OPEN_QUEUE__INIT;
    int before = unread_bytes(p);
    peer_send_request(p, &REQUEST(OPEN_QUEUE, open_queue, &open), NULL, 0);
    while (unread_bytes(p) == before)
        sched_yield();
}

// However often it asks, few descriptors are on their way to it, and it has what it was told of.
TEST_BETWEEN(test_reads_nothing, start, attach_stop_counting)
{
    enum { SENT = KVQ_MAX_UNREAD_FDS / 4 }; // queues
    struct peer *p = peer_attached();
    for (int i = 0; i < SENT + KVQ_MAX_QUEUES; i++)
        ask_and_leave(p);
    for (int i = 0; i < SENT + KVQ_MAX_QUEUES; i++) {
        assert_true(peer_receive(p));
        assert_int_equal(p->reply->status, i < SENT ? 0 : KVQ_E_LIMIT);
        assert_int_equal(p->n_fds, i < SENT ? 4 : 0);
    }
    assert_says(p->reply->text, "4 descriptors cannot be sent: 16 lie in replies");
    for (int i = SENT; i < KVQ_MAX_QUEUES; i++)
        assert_int_equal(peer_open_queue(p), 0);
    assert_int_equal(peer_open_queue(p), KVQ_E_LIMIT);
    assert_says(p->reply->text, "queues");
}

// ---- Extents ----

static struct {
    struct kvq__mail mail;
    struct kvq__core *core;
    struct kvq__ref block;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;
} taken = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

// Poller's thread. Takes a block in the namespace, or lets go of it.
static void take_or_drop(struct kvq__mail *mail)
{
    struct kvq__core *core = taken.core;
    if (taken.block.block)
        kvq__block_drop(core, &taken.block, NULL);
    else
        kvq__block_new(core, TAILQ_FIRST(&core->namespaces), &core->pools[0], 4096, NULL,
                       &taken.block);
    pthread_mutex_lock(&taken.lock);
    taken.done = true;
    pthread_cond_signal(&taken.changed);
    pthread_mutex_unlock(&taken.lock);
}

static void post_block(struct kvq__server *server, void *context)
{
    taken.core = server->core;
    taken.done = false;
    kvq__mailbox_post(kvq__poller_box(server->poller), &taken.mail, take_or_drop);
}

static void change_block(void)
{
    attach_in_loop(post_block, NULL);
    pthread_mutex_lock(&taken.lock);
    while (!taken.done)
        pthread_cond_wait(&taken.changed, &taken.lock);
    pthread_mutex_unlock(&taken.lock);
}

static bool tells_again(struct peer *p)
{
    Kvq__OpenPool open = KVQ__OPEN_POOL__INIT;
    open.place = (char *)"host";
    open.tables_min = open.tables_max = KVQ_TABLE_VERSION_MAX;
    assert_int_equal(peer_ask(p, &REQUEST(OPEN_POOL, open_pool, &open), NULL, 0), 0);
    return p->reply->open_pool->tells_again;
}

static void mapped(struct peer *p, uint64_t handle, uint32_t extents)
{
    assert_int_equal(map_extents(p, handle), 0);
    assert_int_equal(p->reply->map_extents->n_numbers, extents);
    assert_int_equal(p->reply->map_extents->known, 1);
    assert_int_equal(p->n_fds, extents);
}

// What a client did not hear is told again: after a reply that could not be sent, and after one
// that it did not wait for. What it did hear is not.
TEST_BETWEEN(test_extents, start, attach_stop)
{
    struct peer *p = peer_attached();
    assert_int_equal(peer_open_session(p, ""), 0);
    uint64_t handle = p->reply->session->handle;
    assert_true(tells_again(p));
    change_block();
    assert_non_null(taken.block.block);
    kvq_word_store(&full, 1);
    for (int i = 0; i < 3; i++)
        told_why(p, map_extents(p, handle));
    kvq_word_store(&full, 0);
    for (int i = 0; i < 3; i++) {
        mapped(p, handle, 1);
        peer_cancel(p, p->next_id);
    }
    mapped(p, handle, 1);
    peer_cancel(p, p->next_id - 1); // of an earlier request
    mapped(p, handle, 0);
    change_block();
    peer_free(p);
}

int main(void)
{
    kvq__log_open(NULL, KVQ_LOG_ERROR, NULL);
    return run_all(NULL, NULL);
}
