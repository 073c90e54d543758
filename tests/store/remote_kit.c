// SPDX-License-Identifier: Apache-2.0
//
// Servers and clock for tests of the remote tier, see remote_kit.h.
#include "tests/store/remote_kit.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { DRIP_MS = 20 };

static void need(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "remote_kit: %s: %s\n", what, strerror(errno));
    exit(1);
}

// ---- A server with a script ----

// Reads a request with its body, as far as Content-Length says so.
static void read_request(int fd, char *out, size_t size)
{
    static char buffer[1 << 20];
    size_t used = 0, whole = 0;
    while (used < sizeof buffer - 1) {
        ssize_t some = recv(fd, buffer + used, sizeof buffer - 1 - used, 0);
        if (some <= 0)
            break;
        used += (size_t)some;
        buffer[used] = '\0';
        const char *body = strstr(buffer, "\r\n\r\n");
        const char *length = strcasestr(buffer, "\r\nContent-Length: ");
        if (body)
            whole = (size_t)(body + 4 - buffer) + (length ? strtoul(length + 18, NULL, 10) : 0);
        if (body && used >= whole)
            break;
    }
    used = used < size - 1 ? used : size - 1;
    memcpy(out, buffer, used);
    out[used] = '\0';
}

// True when the test has ended.
static bool wait_for(struct script *s, int fd, short events)
{
    struct pollfd p[2] = {{.fd = s->wake[0], .events = POLLIN}, {.fd = fd, .events = events}};
    while (poll(p, 2, -1) < 0 && errno == EINTR) {
    }
    return p[0].revents != 0;
}

static bool serve(struct script *s, int fd, const struct script_reply *reply)
{
    static char filler[64 << 10];
    char byte;
    size_t n = reply->n ? reply->n : strlen(reply->bytes);
    bool over = false;
    memset(filler, 'x', sizeof filler);
    if (reply->end == SCRIPT_BODY)
        dprintf(fd, "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", n);
    if (send(fd, reply->bytes, n, MSG_NOSIGNAL) < 0)
        return false;
    while (!over && reply->end == SCRIPT_ENDLESS) {
        over = wait_for(s, fd, POLLOUT);
        if (!over && send(fd, filler, sizeof filler, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 &&
            errno != EAGAIN)
            return false;
    }
    while (!over && reply->end == SCRIPT_DRIP) {
        struct pollfd p = {.fd = s->wake[0], .events = POLLIN};
        over = poll(&p, 1, DRIP_MS) > 0;
        if (!over && send(fd, "x", 1, MSG_NOSIGNAL) < 0)
            return false;
    }
    while (!over && reply->end == SCRIPT_HANG) {
        over = wait_for(s, fd, POLLIN);
        if (!over && recv(fd, &byte, 1, 0) <= 0)
            return false;
    }
    return over;
}

// The next request, whose reply is *reply. Its connection, or -1 when the test has ended.
static int next_request(struct script *s, const struct script_reply **reply)
{
    if (wait_for(s, s->listener, POLLIN))
        return -1;
    int fd = accept(s->listener, NULL, NULL);
    need(fd >= 0, "accept");
    int i = s->n_asked < s->count ? s->n_asked : s->count - 1;
    int slot = s->n_asked < SCRIPT_REQUESTS ? s->n_asked : SCRIPT_REQUESTS - 1;
    read_request(fd, s->asked[slot], sizeof s->asked[slot]);
    s->n_asked++;
    *reply = &s->replies[i];
    return fd;
}

static void *run_script(void *context)
{
    struct script *s = context;
    const struct script_reply *reply[SCRIPT_REQUESTS];
    int fd[SCRIPT_REQUESTS], n = 0;
    bool over = false;
    while (!over) {
        int most = s->n_asked == 0 && s->at_first ? s->at_first : 1;
        for (n = 0; !over && n < most; n += !over)
            over = (fd[n] = next_request(s, &reply[n])) < 0;
        for (int i = 0; i < n; i++) {
            over = over || serve(s, fd[i], reply[i]);
            shutdown(fd[i], SHUT_WR);
            close(fd[i]);
        }
    }
    return NULL;
}

void script_start(struct script *s, const struct script_reply *replies, int count)
{
    script_start_together(s, replies, count, 1);
}

void script_start_together(struct script *s, const struct script_reply *replies, int count,
                           int at_first)
{
    need(at_first <= SCRIPT_REQUESTS, "fewer requests at first");
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof at;
    memset(s, 0, sizeof *s);
    s->replies = replies;
    s->count = count;
    s->at_first = at_first;
    s->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    need(s->listener >= 0 && bind(s->listener, (struct sockaddr *)&at, n) == 0 &&
             listen(s->listener, 16) == 0 &&
             getsockname(s->listener, (struct sockaddr *)&at, &n) == 0 && pipe(s->wake) == 0,
         "listening on loopback");
    s->port = ntohs(at.sin_port);
    need(pthread_create(&s->thread, NULL, run_script, s) == 0, "a thread");
}

void script_stop(struct script *s)
{
    need(write(s->wake[1], "x", 1) == 1, "waking the server");
    pthread_join(s->thread, NULL);
    close(s->listener);
    close(s->wake[0]);
    close(s->wake[1]);
}

// ---- A clock ----

static uint64_t clock_now(struct kvq_remote_clock *clock)
{
    struct test_clock *c = (struct test_clock *)clock;
    return c->real->now_ms(c->real);
}

static void clock_sleep(struct kvq_remote_clock *clock, uint32_t ms)
{
    struct test_clock *c = (struct test_clock *)clock;
    c->slept[c->waits > 0 ? (c->waits - 1) % 64 : 0] += ms;
}

static uint32_t clock_random(struct kvq_remote_clock *clock) // asked for once before each wait
{
    struct test_clock *c = (struct test_clock *)clock;
    c->waits++;
    c->seed = c->seed * 1664525 + 1013904223;
    return c->seed;
}

void test_clock_init(struct test_clock *c)
{
    memset(c, 0, sizeof *c);
    c->clock = (struct kvq_remote_clock){clock_now, clock_sleep, clock_random};
    c->real = kvq_remote_clock_real();
    c->seed = 1;
}

// ---- rclone ----

// KVQ_RCLONE, or where tools/deps.sh puts it, or nothing.
static bool find_rclone(char *out, size_t size)
{
    const char *named = getenv("KVQ_RCLONE"), *source = getenv("KVQ_SOURCE_DIR");
    if (named)
        snprintf(out, size, "%s", named);
    else
        snprintf(out, size, "%s/build/s3/rclone/bin/rclone-linux-amd64", source ? source : ".");
    return access(out, X_OK) == 0;
}

// Waits for the line that names the port.
static bool read_port(struct s3 *s)
{
    static const char mark[] = "http://127.0.0.1:";
    char log[8192];
    size_t used = 0;
    for (;;) {
        ssize_t some = read(s->log, log + used, sizeof log - 1 - used);
        if (some <= 0) {
            log[used] = '\0';
            fprintf(stderr, "rclone did not start:\n%s\n", log);
            return false;
        }
        used += (size_t)some;
        log[used] = '\0';
        const char *at = strstr(log, mark);
        if (at && strchr(at + sizeof mark - 1, '/')) {
            s->port = (int)strtol(at + sizeof mark - 1, NULL, 10);
            return true;
        }
    }
}

static bool spawn(struct s3 *s)
{
    int pipes[2];
    char address[64];
    snprintf(address, sizeof address, "127.0.0.1:%d", s->port);
    need(pipe(pipes) == 0, "a pipe");
    s->pid = fork();
    need(s->pid >= 0, "fork");
    if (s->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(pipes[1], 2);
        dup2(pipes[1], 1);
        close(pipes[0]);
        execl(s->program, s->program, "serve", "s3", "--config", "", "--auth-key",
              REMOTE_ID "," REMOTE_SECRET, "--addr", address, s->folder, (char *)NULL);
        _exit(127);
    }
    close(pipes[1]);
    s->log = pipes[0];
    return read_port(s);
}

bool s3_start(struct s3 *s)
{
    char bucket[300];
    memset(s, 0, sizeof *s);
    if (!find_rclone(s->program, sizeof s->program)) {
        printf("skipped: there is no rclone to test with at %s; tools/deps.sh s3 gets it, or name "
               "one of version 1.65 or later with KVQ_RCLONE\n",
               s->program);
        return false;
    }
    snprintf(s->folder, sizeof s->folder, "/tmp/kvq-s3-XXXXXX");
    need(mkdtemp(s->folder) != NULL, "a folder");
    snprintf(bucket, sizeof bucket, "%s/%s", s->folder, REMOTE_BUCKET);
    need(mkdir(bucket, 0700) == 0, "a bucket");
    return spawn(s);
}

void s3_kill(struct s3 *s)
{
    kill(s->pid, SIGKILL);
    waitpid(s->pid, NULL, 0);
    close(s->log);
}

void s3_again(struct s3 *s)
{
    need(spawn(s), "rclone once more");
}

void s3_stop(struct s3 *s)
{
    s3_kill(s);
    remove_folder(s->folder);
}

// ---- Both ----

struct kvq_remote_options remote_options(int port, struct test_clock *clock)
{
    static char endpoint[64];
    struct kvq_remote_options o = {.endpoint = endpoint,
                                   .bucket = REMOTE_BUCKET,
                                   .retries = 3,
                                   .connections = 1,
                                   .part_bytes = KVQ_REMOTE_PART_MIN,
                                   .clock = &clock->clock};
    snprintf(endpoint, sizeof endpoint, "http://127.0.0.1:%d", port);
    snprintf(o.keys.id, sizeof o.keys.id, "%s", REMOTE_ID);
    snprintf(o.keys.secret, sizeof o.keys.secret, "%s", REMOTE_SECRET);
    setenv("no_proxy", "127.0.0.1,localhost", 1);
    return o;
}

void make_file(const char *path, size_t bytes, uint32_t seed)
{
    FILE *file = fopen(path, "wb");
    need(file != NULL, path);
    for (size_t i = 0; i < bytes; i++) {
        seed = seed * 1664525 + 1013904223;
        putc((int)(seed >> 24), file);
    }
    need(fclose(file) == 0, path);
}

bool same_file(const char *a, const char *b)
{
    FILE *x = fopen(a, "rb"), *y = fopen(b, "rb");
    bool same = x && y;
    for (int c = 0; same && c != EOF;) {
        c = getc(x);
        same = c == getc(y);
    }
    if (x)
        fclose(x);
    if (y)
        fclose(y);
    return same;
}
