// SPDX-License-Identifier: Apache-2.0
//
// kvqd: arguments, signals, and the exit status (0 after an orderly end, 1 when something failed,
// 2 for a wrong configuration).
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/server.h"
#include "proto/status.h"

static struct kvq__server server;
static uv_signal_t terminate, interrupt;
static bool stop;

static void on_drained(struct kvq__server *s)
{
    stop = true;
    uv_stop(&s->loop);
}

static void on_signal(uv_signal_t *handle, int number)
{
    (void)handle;
    if (server.draining || stop) {
        kvq__log(KVQ_LOG_WARN, "quit", "signal=%d reason=\"second signal\"", number);
        _exit(1);
    }
    kvq__log(KVQ_LOG_INFO, "signal", "signal=%d", number);
    kvq__server_drain(&server);
}

// Clients and extents hold descriptors; the soft limit is often small for no reason.
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
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
    close(c->ready_fd);
}

static int serve(char *text)
{
    int error = kvq__server_open(&server, text);
    if (error == 0) {
        server.drained = on_drained;
        uv_signal_init(&server.loop, &terminate);
        uv_signal_init(&server.loop, &interrupt);
        uv_signal_start(&terminate, on_signal, SIGTERM);
        uv_signal_start(&interrupt, on_signal, SIGINT);
        tell_ready();
        while (!stop)
            uv_run(&server.loop, UV_RUN_DEFAULT);
    }
    kvq__server_close(&server);
    return error;
}

static int show(const struct kvq_config *config)
{
    static char out[65536];
    if (config->version) {
        printf("kvqd %s\n", KVQ_VERSION_TEXT);
        return 0;
    }
    if (config->help)
        kvq__config_help(out, sizeof out);
    else
        kvq__config_print(config, out, sizeof out);
    fputs(out, stdout);
    return 0;
}

int main(int argc, char **argv)
{
    char text[KVQ_TEXT_BYTES] = "";
    struct kvq_config *config = &server.config;
    int error = kvq__config_load(config, argc, argv, environ, text);
    if (error) {
        fprintf(stderr, "kvqd: %s\n", text);
        return 2;
    }
    if (config->help || config->version || config->print)
        return show(config);
    signal(SIGPIPE, SIG_IGN);
    raise_descriptor_limit();
    error = kvq__log_open(config->log_file, (enum kvq_log_level)config->log_level, text);
    error = error ? error : kvq__server_lock(&server, text);
    error = error ? error : serve(text);
    if (error) {
        fprintf(stderr, "kvqd: %s (%s)\n", text, kvq_status_name(error));
        return 1;
    }
    kvq__log(KVQ_LOG_INFO, "end", "pid=%d", (int)getpid());
    kvq__log_close();
    return 0;
}
