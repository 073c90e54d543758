// SPDX-License-Identifier: Apache-2.0
//
// kvqd: arguments, signals, and the exit status (0 after an orderly end, 1 when something failed,
// 2 for a wrong configuration).
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/lifecycle.h"
#include "daemon/log/log.h"
#include "daemon/runtime/descriptors.h"
#include "daemon/runtime/server.h"
#include "daemon/runtime/service.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/store.h"
#include "proto/status.h"

enum { QUIT_MS = 50 };
enum { ECHO_NS = 200000000 }; // a signal this soon after another is the same one, told twice

static const int ends[] = {SIGTERM, SIGINT};
enum { ENDS = sizeof ends / sizeof *ends };

static struct kvq__server server;
static uv_signal_t watchers[ENDS], hangup;
static bool hangup_ignored; // from the start on
static uv_poll_t lifetime;
static uv_timer_t quit;
static uint64_t signalled_ns; // when the first signal to end came; 0: none has
static bool stop;

static void on_drained(struct kvq__server *s)
{
    stop = true;
    uv_stop(&s->loop);
}

static void on_signal(uv_signal_t *handle, int number)
{
    (void)handle;
    uint64_t now = kvq_now_ns();
    // timeout(1) and other wrappers pass on what the whole process group was sent already.
    if (signalled_ns && now - signalled_ns < ECHO_NS)
        return;
    if (signalled_ns) {
        kvq__log(KVQ_LOG_WARN, "quit", "signal=%d reason=\"second signal\"", number);
        _exit(1);
    }
    signalled_ns = now;
    kvq__log(KVQ_LOG_INFO, "signal", "signal=%d", number);
    if (!server.draining) // kvqctl may have asked before
        kvq__server_drain(&server);
}

static void on_quit(uv_timer_t *timer)
{
    (void)timer;
    _exit(1);
}

// kvqctl. The reply that is to say so gets a moment to leave.
static void on_asked(struct kvq__server *s, bool now)
{
    if (now) {
        kvq__log(KVQ_LOG_WARN, "quit", "reason=\"kvqctl shutdown --now\"");
        uv_timer_start(&quit, on_quit, QUIT_MS, 0);
        return;
    }
    if (server.draining)
        return;
    kvq__log(KVQ_LOG_INFO, "asked_to_end", "reason=kvqctl");
    kvq__server_drain(s);
}

static void on_hangup(uv_signal_t *handle, int number)
{
    (void)handle;
    kvq__log(KVQ_LOG_INFO, "signal", "signal=%d", number);
    kvq__jobs_reload(server.jobs);
}

// The process that started the daemon holds the write end of the pipe whose read end this is. When
// that process ends, killed or not, the kernel closes the write end, and read() returns 0.
static void on_lifetime(uv_poll_t *handle, int status, int events)
{
    char unused[64];
    (void)events;
    ssize_t n = status ? 0 : read(server.config.lifetime_fd, unused, sizeof unused);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    uv_poll_stop(handle);
    kvq__log(KVQ_LOG_INFO, "lifetime", "fd=%d reason=\"the process that started it is gone\"",
             server.config.lifetime_fd);
    if (server.draining)
        return;
    kvq__server_drain(&server);
}

// The first file opened must not become the standard error that the log goes to.
static void hold_standard_descriptors(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) != fd)
            _exit(1); // nobody could be told
}

// Clients and extents hold descriptors; the soft limit is often small for no reason. libuv and
// ZeroMQ end the process without a word when they lack one, so a start without is refused here;
// descriptors.h says what keeps them from it later.
static int raise_descriptor_limit(char *text)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (kvq__descriptors_limit() < KVQ__FILES_NEEDED) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%u files may be open at once; at least %d are needed, and 6 more for each "
                 "client; raise the limit (ulimit -n, LimitNOFILE=)",
                 kvq__descriptors_limit(), KVQ__FILES_NEEDED);
        return KVQ_E_SYSTEM;
    }
    if (kvq__descriptors_free() == 0) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "cannot count open files in /proc/self/fd; mount /proc for kvqd");
        return KVQ_E_SYSTEM;
    }
    return 0;
}

// nohup(1) and the like have it ignored, and mean it. Until it is watched, it does not end the
// daemon either: the configuration was only just read.
static void hold_hangup(void)
{
    struct sigaction action;
    hangup_ignored = sigaction(SIGHUP, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
    signal(SIGHUP, SIG_IGN);
}

static int watch_signals(char *text)
{
    int error = 0;
    for (int i = 0; i < ENDS && error == 0; i++) {
        error = uv_signal_init(&server.loop, &watchers[i]);
        error = error ? error : uv_signal_start(&watchers[i], on_signal, ends[i]);
    }
    if (error == 0 && !hangup_ignored) {
        error = uv_signal_init(&server.loop, &hangup);
        error = error ? error : uv_signal_start(&hangup, on_hangup, SIGHUP);
    }
    if (error == 0)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES, "cannot watch for signals: %s", uv_strerror(error));
    return KVQ_E_SYSTEM;
}

// All is done but for giving back what the daemon has. libuv would let a signal have its way then.
static void ignore_signals(void)
{
    for (int i = 0; i < ENDS; i++) {
        if (uv_is_active((uv_handle_t *)&watchers[i]))
            uv_signal_stop(&watchers[i]);
        signal(ends[i], SIG_IGN);
    }
    if (!hangup_ignored)
        uv_signal_stop(&hangup);
    signal(SIGHUP, SIG_IGN);
}

static int watch_lifetime(char *text)
{
    int fd = server.config.lifetime_fd;
    if (fd < 0)
        return 0;
    int error = uv_poll_init(&server.loop, &lifetime, fd);
    error = error ? error : uv_poll_start(&lifetime, UV_READABLE | UV_DISCONNECT, on_lifetime);
    if (error == 0)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "cannot watch descriptor %d (--lifetime-fd): %s; give the read "
             "end of a pipe",
             fd, uv_strerror(error));
    return KVQ_E_SYSTEM;
}

// Standard descriptors stay taken: libuv does not close what has such a number.
static void give_up_descriptor(int fd)
{
    if (fd > STDERR_FILENO) {
        close(fd);
        return;
    }
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0 && dup2(null, fd) == fd)
        close(null);
}

static void tell_ready(void)
{
    const struct kvq_config *c = &server.config;
    char quoted[KVQ_CONFIG_PATH + 16];
    kvq__log(KVQ_LOG_INFO, "ready",
             "version=%s pid=%d runtime_dir=%s isa=%s workers=%llu pool_mib=%llu", KVQ_VERSION_TEXT,
             (int)getpid(), kvq__log_quote(quoted, sizeof quoted, c->runtime_dir),
             server.identity.isa, (unsigned long long)c->workers,
             (unsigned long long)(c->pool_bytes >> 20));
    if (c->ready_fd < 0)
        return;
    if (write(c->ready_fd, "ready\n", 6) != 6)
        kvq__log(KVQ_LOG_WARN, "ready_fd", "fd=%d error=\"cannot write\"", c->ready_fd);
    give_up_descriptor(c->ready_fd);
}

// What the GPU holds is lost, and every call to it fails from now on; a process that is started
// anew finds it whole.
static void on_fault(void *context, const char *place, const char *text)
{
    char quoted[KVQ_TEXT_BYTES + 16];
    (void)context;
    kvq__log(KVQ_LOG_ERROR, "gpu_fault",
             "place=%s error=%s text=\"sessions there are lost; the daemon ends\" remedy=\"start "
             "it again\"",
             place, kvq__log_quote(quoted, sizeof quoted, text));
    _exit(EXIT_FAILURE);
}

// A client's stream that never gets to its signal, where events order it, or that somebody keeps
// from being let go: as long as it is there the GPU's driver gives nothing back.
static void on_stuck(uint32_t clients)
{
    kvq__log(
        KVQ_LOG_ERROR, "left_behind",
        "clients=%u text=\"their work on a GPU does not come to an end; the daemon ends without "
        "them\" remedy=\"end their processes\"",
        clients);
    _exit(EXIT_FAILURE);
}

// Of libuv's: those that read and write the store block, and opens are to find one besides.
#define POOL_THREADS "8"

static int serve_until_stopped(char *text)
{
    (void)setenv("UV_THREADPOOL_SIZE", POOL_THREADS, 0); // before the first of its threads
    server.fault = on_fault;
    server.stuck = on_stuck;
    int error = kvq__server_open(&server, text);
    error = error ? error : watch_signals(text);
    error = error ? error : watch_lifetime(text);
    error = error ? error : kvq__service_open(&server, &server.service, text);
    if (error == 0) {
        server.drained = on_drained;
        uv_timer_init(&server.loop, &quit);
        server.end = on_asked;
        tell_ready();
        while (!stop)
            uv_run(&server.loop, UV_RUN_DEFAULT);
        ignore_signals();
    }
    kvq__server_close(&server);
    return error;
}

// An exit status. The configuration is shown also to who may not read the daemon's keys.
static int show(const struct kvq_config *config)
{
    static char out[1 << 19]; // all sections that a file can have
    char text[KVQ_TEXT_BYTES];
    if (config->version) {
        printf("kvqd %s\n", KVQ_VERSION_TEXT);
        return 0;
    }
    if (config->help)
        kvq__config_help(out, sizeof out);
    else
        kvq__config_print(config, out, sizeof out);
    fputs(out, stdout);
    if (config->help || kvq__config_check_files(config, text) == 0)
        return 0;
    fprintf(stderr, "kvqd: %s\n", text);
    return 2;
}

int main(int argc, char **argv)
{
    char text[KVQ_TEXT_BYTES] = "", quoted[KVQ_TEXT_BYTES + 16];
    struct kvq_config *config = &server.config;
    hold_standard_descriptors();
    int error = kvq__config_load(config, argc, argv, environ, text);
    if (error) {
        fprintf(stderr, "kvqd: %s\n", text);
        return 2;
    }
    if (config->help || config->version || config->print)
        return show(config);
    server.argc = argc;
    server.argv = argv;
    server.environment = environ;
    hold_hangup();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); // under ulimit -f: an error of the call, not the daemon's end
    error = kvq__log_open(config->log_file, (enum kvq_log_level)config->log_level, text);
    error = error ? error : raise_descriptor_limit(text);
    error = error ? error : kvq__server_lock(&server, text);
    error = error ? error : serve_until_stopped(text);
    if (error) {
        fprintf(stderr, "kvqd: %s (%s)\n", text, kvq_status_name(error));
        if (config->log_file[0])
            kvq__log(KVQ_LOG_ERROR, "failed", "status=%s error=%s", kvq_status_name(error),
                     kvq__log_quote(quoted, sizeof quoted, text));
        return 1;
    }
    kvq__log(KVQ_LOG_INFO, "end", "pid=%d", (int)getpid());
    kvq__log_close();
    return 0;
}
