// SPDX-License-Identifier: Apache-2.0
//
// See service.h. Four times as often as systemd wants a sign of life, a timer looks whether the
// mail of the look before has been at the poller and has come back. So a sign is given only while
// loop and poller both take their mail, and a look that fails does not yet end the daemon.
#include "daemon/runtime/service.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/log/log.h"
#include "daemon/runtime/watchdog.h"
#include "proto/clock.h"

enum {
    LINE_MS = 2000, // between two looks at whether the line has changed
    SEND_MS = 1000, // how long a message may wait for a manager that does not read
    SAVE_S = 300,   // for which the manager waits at the end while no session more is saved
    CLOSE_S = 30,   // behind drain_ms
};

struct kvq__service {
    struct kvq__server *server;
    int fd;
    struct sockaddr_un address;
    socklen_t address_bytes;
    struct kvq_log_budget log_budget;
    bool ended;
    bool owes_ready;  // the manager waits for it since a reload, and could not be told
    uint32_t drained; // sessions that were saved, or could not be, when it last asked for time

    uv_timer_t watch_timer;
    struct kvq__watchdog watchdog;

    uv_timer_t line_timer;
    struct kvq__mail mail;
    bool asked; // the mail is at the poller
    struct kvq__service_figures figures;
    char line[KVQ__SERVICE_LINE]; // that was told last
};

// ---- The socket ----

// "/path", or "@name" for a name that is in no file system.
static int take_address(struct kvq__service *s, const char *address, char *text)
{
    size_t length = strlen(address);
    if ((address[0] != '/' && address[0] != '@') || !address[1] ||
        length >= sizeof s->address.sun_path) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "NOTIFY_SOCKET is \"%.100s\"; it has to be a path from / on, or @ and a name, of "
                 "%zu bytes at most; unset NOTIFY_SOCKET if nobody is to be told",
                 address, sizeof s->address.sun_path - 1);
        return KVQ_E_INVALID;
    }
    s->address.sun_family = AF_UNIX;
    memcpy(s->address.sun_path, address, length + 1);
    s->address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    if (address[0] == '@')
        s->address.sun_path[0] = 0;
    else
        s->address_bytes++;
    return 0;
}

static int open_socket(struct kvq__service *s, char *text)
{
    const struct timeval patience = {.tv_sec = SEND_MS / 1000};
    s->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (s->fd >= 0 && setsockopt(s->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) == 0)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES, "cannot make a socket for NOTIFY_SOCKET: %s", strerror(errno));
    return KVQ_E_SYSTEM;
}

// To the address anew each time: a manager that was started again has another socket there.
static bool tell(struct kvq__service *s, const char *message)
{
    char quoted[64];
    ssize_t sent;
    do
        sent = sendto(s->fd, message, strlen(message), MSG_NOSIGNAL, (struct sockaddr *)&s->address,
                      s->address_bytes);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return true;
    const char *why = strerror(errno);
    kvq__log_client(&s->log_budget, KVQ_LOG_WARN, "not_notified", "message=%s error=\"%s\"",
                    kvq__log_quote(quoted, sizeof quoted, message), why);
    return false;
}

// ---- The line ----

void kvq__service_line(const struct kvq__service_figures *f, char *line)
{
    snprintf(line, KVQ__SERVICE_LINE,
             "%s%u session%s, %u client%s, %.1f of %.1f GiB of memory in use",
             f->ends ? "ends; " : "", f->sessions, f->sessions == 1 ? "" : "s", f->clients,
             f->clients == 1 ? "" : "s", (double)f->used_bytes / (1 << 30),
             (double)f->pool_bytes / (1 << 30));
}

static void tell_line(struct kvq__service *s)
{
    char line[KVQ__SERVICE_LINE], message[KVQ__SERVICE_LINE + 16];
    s->figures.ends = s->server->draining;
    kvq__service_line(&s->figures, line);
    if (strcmp(line, s->line) == 0)
        return;
    snprintf(message, sizeof message, "STATUS=%s", line);
    if (tell(s, message))
        memcpy(s->line, line, sizeof line);
}

static struct kvq__service *service_of(struct kvq__mail *mail)
{
    return (struct kvq__service *)((char *)mail - offsetof(struct kvq__service, mail));
}

static void take_figures(struct kvq__mail *mail)
{
    struct kvq__service *s = service_of(mail);
    s->asked = false;
    if (!s->ended)
        tell_line(s);
}

// Poller's thread.
static void read_figures(struct kvq__mail *mail)
{
    struct kvq__service *s = service_of(mail);
    const struct kvq__core *core = s->server->core;
    struct kvq__place_info places[KVQ_MAX_GPUS];
    struct kvq__status status;
    kvq__core_status(core, &status);
    s->figures = (struct kvq__service_figures){.sessions = status.sessions,
                                               .clients = status.clients,
                                               .used_bytes = status.pool_used_bytes,
                                               .pool_bytes = status.pool_bytes};
    uint32_t n = kvq__core_places(core, places);
    for (uint32_t i = 0; i < n; i++) {
        s->figures.used_bytes += places[i].used_bytes;
        s->figures.pool_bytes += places[i].pool_bytes;
    }
    kvq__mailbox_post(&s->server->box, mail, take_figures);
}

static void tell_time(struct kvq__service *s, uint64_t seconds)
{
    char message[64];
    snprintf(message, sizeof message, "EXTEND_TIMEOUT_USEC=%llu",
             (unsigned long long)seconds * 1000000);
    tell(s, message);
}

// However long saves take at the end: the manager waits as long as they get on.
static void ask_for_time(struct kvq__service *s)
{
    const struct kvq__drain_state *drain = &s->server->drain;
    uint32_t drained = drain->saved + drain->not_saved;
    if (drain->phase != KVQ__DRAIN_SAVES || drained + drain->unsaved == 0 || s->drained == drained)
        return;
    s->drained = drained;
    tell_time(s, SAVE_S);
}

static void on_line(uv_timer_t *timer)
{
    struct kvq__service *s = timer->data;
    ask_for_time(s);
    if (s->owes_ready)
        kvq__service_reloaded(s);
    if (s->asked)
        return;
    s->asked = true;
    kvq__mailbox_post(kvq__poller_box(s->server->poller), &s->mail, read_figures);
}

// ---- Signs of life ----

static void on_sign_due(uv_timer_t *timer)
{
    struct kvq__service *s = timer->data;
    if (kvq__watchdog_look(&s->watchdog))
        tell(s, "WATCHDOG=1");
    else
        kvq__log_client(&s->log_budget, KVQ_LOG_WARN, "poller_silent",
                        "ms=%llu text=\"the service manager is not told that the daemon is well\"",
                        (unsigned long long)uv_timer_get_repeat(timer));
}

static void begin_watch(struct kvq__service *s)
{
    uint64_t ms = kvq__watchdog_usec(getenv("WATCHDOG_USEC"), getenv("WATCHDOG_PID")) / 4000;
    uv_timer_init(&s->server->loop, &s->watch_timer);
    s->watch_timer.data = s;
    if (ms == 0)
        return;
    kvq__watchdog_begin(&s->watchdog, kvq__poller_box(s->server->poller), &s->server->box);
    uv_timer_start(&s->watch_timer, on_sign_due, ms, ms);
}

// ---- What happens to the daemon ----

void kvq__service_reloading(struct kvq__service *s)
{
    char message[64];
    if (!s || s->ended)
        return;
    snprintf(message, sizeof message, "RELOADING=1\nMONOTONIC_USEC=%llu",
             (unsigned long long)(kvq_now_ns() / 1000));
    tell(s, message);
}

void kvq__service_reloaded(struct kvq__service *s)
{
    if (s && !s->ended && !s->server->draining)
        s->owes_ready = !tell(s, "READY=1");
}

void kvq__service_stopping(struct kvq__service *s)
{
    if (!s)
        return;
    assert(s->server->draining && !s->ended);
    tell(s, "STOPPING=1");
    tell_time(s, s->server->config.drain_ms / 1000 + CLOSE_S); // steps may take so long to end
    on_line(&s->line_timer);
}

void kvq__service_saving(struct kvq__service *s)
{
    if (!s)
        return;
    assert(s->server->drain.phase == KVQ__DRAIN_SAVES && !s->ended);
    ask_for_time(s);
}

// ---- Opening and closing ----

int kvq__service_open(struct kvq__server *server, struct kvq__service **service, char *text)
{
    const char *address = getenv("NOTIFY_SOCKET");
    *service = NULL;
    if (!address || !*address || server->config.lifetime_fd >= 0)
        return 0;
    struct kvq__service *s = calloc(1, sizeof *s);
    if (!s) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for what the service manager is told");
        return KVQ_E_NO_MEMORY;
    }
    s->server = server;
    s->drained = UINT32_MAX; // it has not asked
    s->fd = -1;
    int error = take_address(s, address, text);
    error = error ? error : open_socket(s, text);
    if (error) {
        free(s);
        return error;
    }
    begin_watch(s);
    uv_timer_init(&server->loop, &s->line_timer);
    s->line_timer.data = s;
    uv_timer_start(&s->line_timer, on_line, 0, LINE_MS);
    tell(s, "READY=1");
    *service = s;
    return 0;
}

void kvq__service_end(struct kvq__service *s)
{
    if (!s || s->ended)
        return;
    s->ended = true;
    uv_close((uv_handle_t *)&s->watch_timer, NULL);
    uv_close((uv_handle_t *)&s->line_timer, NULL);
}

bool kvq__service_idle(const struct kvq__service *s)
{
    return !s || (!s->asked && !s->watchdog.away);
}

void kvq__service_free(struct kvq__service **service)
{
    struct kvq__service *s = *service;
    if (!s)
        return;
    assert(s->ended && kvq__service_idle(s));
    close(s->fd);
    free(s);
    *service = NULL;
}
