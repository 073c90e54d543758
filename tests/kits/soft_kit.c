// SPDX-License-Identifier: Apache-2.0
//
// See soft_kit.h.
#include "tests/kits/soft_kit.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda/probe.h"
#include "tests/kits/unit.h"

struct kvq_gpu_driver drv;
struct kvq_gpu_context *soft_context;
uint64_t (*soft_brought)(void);
uint64_t (*soft_calls)(const char *call);
int (*soft_fail)(const char *call, uint64_t n, bool every_later, int result);
struct kvq_soft_control *(*soft_control)(void);
void (*soft_stall)(struct kvq_gpu_stream *stream, bool held);
void (*soft_seed)(uint64_t seed);
static void (*counts_into)(struct kvq_soft_counts *counts);
static struct kvq_gpu_stream *stream; // of a peer

static struct kvq_soft_counts get_counts(void)
{
    struct kvq_soft_counts counts;
    counts_into(&counts);
    return counts;
}

struct kvq_soft_counts (*soft_counts)(void) = get_counts;

const char *const soft_daemon_flags[] = {"--backend",      "emu",          "--gpu-driver",
                                         KVQ_EMU_LIBRARY,  "--pool-bytes", "64mb",
                                         "--extent-bytes", "2mb",          "--gpu-bytes",
                                         "64mb",           "--workers",    "1",
                                         "--client-bytes", "64mb",         NULL};

static void find(const char *name, void *function)
{
    void *symbol = dlsym(drv.library, name);
    if (!symbol) {
        printf("%s\n", dlerror());
        exit(1);
    }
    memcpy(function, &symbol, sizeof symbol);
}

void soft_open(void)
{
    char text[KVQ_GPU_TEXT];
    const char *why = NULL, *library = getenv("KVQ_GPU_DRIVER");
    if (kvq_gpu_driver_open(&drv, library ? library : KVQ_EMU_LIBRARY, text, sizeof text)) {
        printf("%s\n", text);
        exit(1);
    }
    find("kvq_soft_counts", &counts_into);
    find("kvq_soft_brought", &soft_brought);
    find("kvq_soft_calls", &soft_calls);
    find("kvq_soft_fail", &soft_fail);
    find("kvq_soft_control", &soft_control);
    find("kvq_soft_stall", &soft_stall);
    find("kvq_soft_seed", &soft_seed);
    const int result = drv.init(0);
    if (result || drv.context_retain(&soft_context, 0) || drv.context_set(soft_context)) {
        drv.error_text(result, &why);
        printf("the software driver does not start: %d, %s\n", result, why ? why : "");
        exit(1);
    }
}

void soft_ok(int result, const char *what, const char *file, int line)
{
    char text[KVQ_GPU_TEXT];
    if (result == KVQ_GPU_OK)
        return;
    kvq_gpu_fault(&drv, result, what, text, sizeof text);
    print_error("%s:%d: %s\n", file, line, text);
    fail();
}

int soft_open_files(void)
{
    int n = 0;
    DIR *all = opendir("/proc/self/fd");
    while (readdir(all))
        n++;
    closedir(all);
    return n;
}

struct kvq_soft_counts soft_before;
static int files_before, maps_before;

// Pieces of the software driver's memory that are mapped here.
static int count_maps(void)
{
    char line[512];
    int n = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (fgets(line, sizeof line, maps))
        n += strstr(line, "/memfd:kvq-emu-") != NULL;
    fclose(maps);
    return n;
}

int soft_remember(void **state)
{
    soft_before = get_counts();
    files_before = soft_open_files();
    maps_before = count_maps();
    return 0;
}

int soft_compare(void **state)
{
    OK(drv.context_sync());
    const struct kvq_soft_counts now = get_counts();
    assert_memory_equal(&now, &soft_before, sizeof now);
    assert_int_equal(soft_open_files(), files_before);
    assert_int_equal(count_maps(), maps_before);
    return 0;
}

// ---- Messages ----

static bool send_message(int socket, const void *message, size_t bytes, int fd)
{
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {(void *)message, bytes};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        m.msg_control = control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    return sendmsg(socket, &m, MSG_NOSIGNAL) == (ssize_t)bytes;
}

static bool receive_message(int socket, void *message, size_t bytes, int *fd)
{
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {message, bytes};
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control,
                       .msg_controllen = sizeof control};
    *fd = -1;
    if (recvmsg(socket, &m, MSG_CMSG_CLOEXEC) != (ssize_t)bytes)
        return false;
    const struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (c)
        memcpy(fd, CMSG_DATA(c), sizeof *fd);
    return true;
}

struct soft_peer soft_start(const char *environment)
{
    struct soft_peer peer;
    char number[16];
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    fflush(stdout);
    peer.pid = fork();
    assert_true(peer.pid >= 0);
    if (peer.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        snprintf(number, sizeof number, "%d", dup(pair[1]));
        if (environment)
            putenv((char *)environment);
        execl("/proc/self/exe", "peer", "peer", number, (char *)NULL);
        _exit(127);
    }
    close(pair[1]);
    peer.socket = pair[0];
    return peer;
}

struct soft_answer soft_ask_fd(const struct soft_peer *peer, const struct soft_question *question,
                               int fd, int *got)
{
    struct soft_answer answer;
    int received;
    assert_true(send_message(peer->socket, question, sizeof *question, fd));
    assert_true(receive_message(peer->socket, &answer, sizeof answer, &received));
    if (got)
        *got = received;
    return answer;
}

static struct soft_answer ask(const struct soft_peer *peer, enum soft_op op, uint64_t a, uint64_t b,
                              uint64_t c)
{
    const struct soft_question question = {.op = op, .a = a, .b = b, .c = c};
    return soft_ask_fd(peer, &question, -1, NULL);
}

uint64_t soft_ask(const struct soft_peer *peer, enum soft_op op, uint64_t a, uint64_t b, uint64_t c)
{
    const struct soft_answer answer = ask(peer, op, a, b, c);
    assert_int_equal(answer.result, KVQ_GPU_OK);
    return answer.value;
}

int soft_result(const struct soft_peer *peer, enum soft_op op, uint64_t a, uint64_t b, uint64_t c)
{
    return ask(peer, op, a, b, c).result;
}

void soft_tell(const struct soft_peer *peer, enum soft_op op, uint64_t a, uint64_t b, uint64_t c)
{
    const struct soft_question question = {.op = op, .a = a, .b = b, .c = c};
    assert_true(send_message(peer->socket, &question, sizeof question, -1));
}

void soft_kill(struct soft_peer *peer)
{
    kill(peer->pid, SIGKILL);
    waitpid(peer->pid, NULL, 0);
    close(peer->socket);
}

int soft_end(struct soft_peer *peer)
{
    int status = -1;
    soft_tell(peer, SOFT_EXIT, 0, 0, 0);
    waitpid(peer->pid, &status, 0);
    close(peer->socket);
    return status;
}

// ---- The other side ----

static int create(const struct soft_question *q, struct soft_answer *r)
{
    struct kvq_gpu_allocation what = {.type = KVQ_GPU_ALLOCATION_PINNED,
                                      .handle_types = q->b ? KVQ_GPU_HANDLE_FD : 0,
                                      .location = {KVQ_GPU_LOCATION_DEVICE, 0}};
    return drv.memory_create(&r->value, q->a, &what, 0);
}

static int map(const struct soft_question *q, struct soft_answer *r)
{
    const struct kvq_gpu_access access = {{KVQ_GPU_LOCATION_DEVICE, 0}, (int)q->c};
    int result = drv.address_reserve(&r->value, q->b, 0, 0, 0);
    if (!result)
        result = drv.memory_map(r->value, q->b, 0, q->a, 0);
    return result ? result : drv.memory_access(r->value, q->b, &access, 1);
}

static int unmap(const struct soft_question *q)
{
    const int result = drv.memory_unmap(q->a, q->b);
    return result ? result : drv.address_free(q->a, q->b);
}

int soft_launch_reading(kvq_gpu_ptr at, struct kvq_gpu_stream *on)
{
    static struct kvq_gpu gpu;
    const struct kvq_gpu_probe_read_args args = {(const uint8_t *)at, 512, 4, NULL};
    const struct kvq_gpu_grid grid = {1, 1, 32, KVQ_GPU_PROBE_STAGES * 512 + 64, on};
    char text[KVQ_GPU_TEXT];
    if (!gpu.driver && kvq_gpu_open(&gpu, &drv, text, sizeof text))
        return -1;
    return kvq_gpu_launch(&gpu, KVQ_KERNEL_PROBE_READ, &grid, &args, sizeof args, text,
                          sizeof text);
}

int soft_bad_launch(struct kvq_gpu_stream *on)
{
    return soft_launch_reading(0x70000000, on);
}

static int do_memory(const struct soft_question *q, struct soft_answer *r, int fd, int *back)
{
    struct kvq_gpu_ipc_memory handle;
    unsigned long long buffer = 0;
    int result;
    memcpy(&handle, q->handle, sizeof handle);
    switch ((enum soft_op)q->op) {
    case SOFT_ALLOC:
        return drv.memory_alloc(&r->value, q->a);
    case SOFT_FREE:
        return drv.memory_free(q->a);
    case SOFT_CREATE:
        return create(q, r);
    case SOFT_EXPORT:
        return drv.memory_export(back, q->a, KVQ_GPU_HANDLE_FD, 0);
    case SOFT_IMPORT:
        return drv.memory_import(&r->value, (void *)(intptr_t)fd, KVQ_GPU_HANDLE_FD);
    case SOFT_MAP:
        return map(q, r);
    case SOFT_UNMAP:
        return unmap(q);
    case SOFT_RELEASE:
        return drv.memory_release(q->a);
    case SOFT_MEMORY_GET:
        result = drv.ipc_memory_get(&handle, q->a);
        memcpy(r->handle, &handle, sizeof handle);
        return result;
    case SOFT_MEMORY_OPEN:
        return drv.ipc_memory_open(&r->value, handle, KVQ_GPU_IPC_LAZY_PEER);
    case SOFT_MEMORY_CLOSE:
        return drv.ipc_memory_close(q->a);
    case SOFT_BUFFER:
        result = drv.pointer_get(&buffer, KVQ_GPU_POINTER_BUFFER, q->a);
        r->value = buffer;
        return result;
    default:
        return -1;
    }
}

static int do_event(const struct soft_question *q, struct soft_answer *r)
{
    struct kvq_gpu_event *event = (struct kvq_gpu_event *)q->a;
    struct kvq_gpu_ipc_event handle;
    int result;
    memcpy(&handle, q->handle, sizeof handle);
    switch ((enum soft_op)q->op) {
    case SOFT_EVENT_CREATE:
        result = drv.event_create(&event, KVQ_GPU_EVENT_SHARED | KVQ_GPU_EVENT_UNTIMED);
        r->value = (uintptr_t)event;
        return result;
    case SOFT_EVENT_GET:
        result = drv.ipc_event_get(&handle, event);
        memcpy(r->handle, &handle, sizeof handle);
        return result;
    case SOFT_EVENT_OPEN:
        result = drv.ipc_event_open(&event, handle);
        r->value = (uintptr_t)event;
        return result;
    case SOFT_EVENT_DESTROY:
        return drv.event_destroy(event);
    case SOFT_RECORD:
        return drv.event_record(event, stream);
    case SOFT_STREAM_WAIT:
        return drv.stream_wait(stream, event, 0);
    default:
        return -1;
    }
}

static int do_work(const struct soft_question *q, struct soft_answer *r)
{
    struct kvq_soft_counts counts;
    switch ((enum soft_op)q->op) {
    case SOFT_FILL:
        return drv.fill32(q->a, (unsigned)q->b, q->c, stream);
    case SOFT_READ:
        return drv.copy_out(&r->value, q->a, sizeof r->value, stream);
    case SOFT_WRITE64:
        return drv.stream_write64(stream, q->a, q->b, 0);
    case SOFT_WAIT64:
        return drv.stream_wait64(stream, q->a, q->b, KVQ_GPU_WAIT_AT_LEAST);
    case SOFT_SYNC:
        return drv.stream_sync(stream);
    case SOFT_QUERY:
        return drv.stream_query(stream);
    case SOFT_BAD_LAUNCH:
        return q->a ? soft_launch_reading(q->a, stream) : soft_bad_launch(stream);
    case SOFT_COUNTS:
        counts = get_counts();
        memcpy(&r->value, (uint64_t *)&counts + q->a, sizeof r->value);
        return 0;
    case SOFT_STORE:
        *(volatile uint64_t *)q->a = q->b;
        return 0;
    default:
        return -1;
    }
}

static void answer(int socket, const struct soft_question *q, int fd)
{
    struct soft_answer r = {0};
    int back = -1;
    if (q->op < SOFT_FILL)
        r.result = do_memory(q, &r, fd, &back);
    else if (q->op >= SOFT_EVENT_CREATE && q->op <= SOFT_STREAM_WAIT)
        r.result = do_event(q, &r);
    else
        r.result = do_work(q, &r);
    send_message(socket, &r, sizeof r, back);
    if (back >= 0)
        close(back);
    if (fd >= 0)
        close(fd);
}

// ---- Calls that may wait for a stalled stream ----

static pthread_mutex_t in_call = PTHREAD_MUTEX_INITIALIZER; // the main thread is
static pthread_t releaser;

static void *let_stream_go(void *stalled)
{
    enum { LOOKS = 100000 };
    int others = 1;
    for (int i = 0; i < LOOKS && others; i++) {
        drv.stream_query(stalled);
        others = pthread_mutex_trylock(&in_call);
    }
    if (!others)
        pthread_mutex_unlock(&in_call);
    soft_stall(stalled, false);
    return NULL;
}

void soft_call_begin(struct kvq_gpu_stream *stalled)
{
    pthread_mutex_lock(&in_call);
    assert_int_equal(pthread_create(&releaser, NULL, let_stream_go, stalled), 0);
}

void soft_call_end(void)
{
    pthread_mutex_unlock(&in_call);
    pthread_join(releaser, NULL);
}

void soft_serve_if_peer(int argc, char **argv)
{
    struct soft_question q;
    int fd;
    if (argc < 3 || strcmp(argv[1], "peer"))
        return;
    const int socket = (int)strtol(argv[2], NULL, 10);
    soft_open();
    if (drv.stream_create(&stream, KVQ_GPU_STREAM_OWN))
        exit(1);
    while (receive_message(socket, &q, sizeof q, &fd) && q.op != SOFT_EXIT)
        answer(socket, &q, fd);
    exit(0);
}
