// SPDX-License-Identifier: Apache-2.0
//
// Listening, connections and routes. libmicrohttpd reads and writes HTTP; it has no thread of its
// own: the loop calls it when its epoll set or its next timeout says so. A connection whose answer
// comes from the core is suspended meanwhile.
#include "daemon/http/http.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/http/internal.h"
#include "daemon/http/page.h"
#include "daemon/log/log.h"
#include "daemon/runtime/packet.h"
#include "proto/clock.h"
#include "proto/shm.h"

enum { TICK_MS = 1000 };

// ---- The loop ----

static void on_timer(uv_timer_t *timer);

static void run_http(struct kvq__http *h)
{
    MHD_UNSIGNED_LONG_LONG ms;
    if (!h->open)
        return;
    MHD_run(h->daemon);
    if (MHD_get_timeout(h->daemon, &ms) == MHD_YES)
        uv_timer_start(&h->timer, on_timer, ms, 0);
    else
        uv_timer_stop(&h->timer);
}

static void on_timer(uv_timer_t *timer)
{
    run_http(timer->data);
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    run_http(poll->data);
}

static void on_late_tick(uv_timer_t *timer)
{
    struct kvq__http *h = timer->data;
    kvq__http_ask_tick(h);
    kvq__http_guests_tick(&h->guests, kvq_now_ns());
}

void kvq__http_answered(struct kvq__http_ask *ask)
{
    struct kvq__http *h = ask->http;
    assert(ask->connection && (ask->answered || ask->late));
    MHD_resume_connection(ask->connection);
    run_http(h);
}

// ---- Answers ----

// Takes the text over.
static enum MHD_Result answer(struct MHD_Connection *connection, int status, const char *type,
                              struct kvq__http_text text)
{
    static const char *const headers[][2] = {
        {"Cache-Control", "no-store"},
        {"X-Content-Type-Options", "nosniff"},
        {"Referrer-Policy", "no-referrer"},
        {"Content-Security-Policy",
         "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
         "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"},
    };
    struct MHD_Response *response =
        MHD_create_response_from_buffer(text.n, text.at, MHD_RESPMEM_MUST_FREE);
    if (!response) {
        free(text.at);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++)
        MHD_add_response_header(response, headers[i][0], headers[i][1]);
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    if (status == MHD_HTTP_UNAUTHORIZED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    enum MHD_Result result = MHD_queue_response(connection, (unsigned)status, response);
    MHD_destroy_response(response);
    return result;
}

__attribute__((format(printf, 3, 4))) static enum MHD_Result answer_text(
    struct MHD_Connection *connection, int status, const char *format, ...)
{
    struct kvq__http_text text = {0};
    FILE *out = open_memstream(&text.at, &text.n);
    va_list args;
    if (!out)
        return MHD_NO;
    va_start(args, format);
    vfprintf(out, format, args);
    va_end(args);
    fputc('\n', out);
    if (fclose(out) != 0) {
        free(text.at);
        return MHD_NO;
    }
    return answer(connection, status, "text/plain; charset=utf-8", text);
}

// ---- Who asks ----

static bool has_token(const struct kvq__http *h, struct MHD_Connection *connection)
{
    static const char scheme[] = "Bearer "; // in whatever case: RFC 9110, 11.1
    const char *given =
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
    unsigned differ = 0;
    if (!given || strncasecmp(given, scheme, sizeof scheme - 1) != 0 ||
        strlen(given + sizeof scheme - 1) != sizeof h->token - 1)
        return false;
    given += sizeof scheme - 1;
    for (size_t i = 0; i < sizeof h->token - 1; i++) // in the same time wherever it differs
        differ |= (unsigned)(given[i] ^ h->token[i]);
    return differ == 0;
}

// A page of another site that a browser shows may send requests here, by a name that its owner lets
// lead to this address. The Host header then has that name. Whoever sends an address in figures was
// led here by no name.
static bool is_for_us(const struct kvq__http *h, const struct kvq__http_guest *guest,
                      struct MHD_Connection *connection)
{
    const char *own = h->server->config.http_address, *colon = strrchr(own, ':');
    const struct {
        const char *name;
        size_t n;
    } hosts[] = {{"localhost", 9},
                 {"127.0.0.1", 9},
                 {"[::1]", 5},
                 {own, colon ? (size_t)(colon - own) : strlen(own)}};
    const char *host =
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
    if (guest->local || !host)
        return true;
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        if (strncasecmp(host, hosts[i].name, hosts[i].n) == 0 &&
            (host[hosts[i].n] == 0 || host[hosts[i].n] == ':'))
            return true;
    return false;
}

// ---- Routes ----

static enum MHD_Result show_version(struct kvq__http *h, struct MHD_Connection *connection)
{
    const struct kvq__identity *us = &h->server->identity;
    struct kvq__http_text text = {0};
    FILE *out = open_memstream(&text.at, &text.n);
    if (!out)
        return MHD_NO;
    fprintf(out,
            "{\"version\":\"%s\",\"backend\":\"%s\",\"isa\":\"%s\",\"pid\":%llu,"
            "\"protocol\":[%d,%d],\"epoch\":\"%016llx\"}\n",
            us->version, us->backend, us->isa, (unsigned long long)us->pid, KVQ_PROTOCOL_MIN,
            KVQ_PROTOCOL_MAX, (unsigned long long)us->epoch);
    if (fclose(out) != 0) {
        free(text.at);
        return MHD_NO;
    }
    return answer(connection, MHD_HTTP_OK, "application/json", text);
}

static enum MHD_Result show_events(struct kvq__http *h, struct MHD_Connection *connection)
{
    const char *given = MHD_lookup_connection_value(connection, MHD_GET_ARGUMENT_KIND, "after");
    char *end = "";
    errno = 0;
    unsigned long long after = given ? strtoull(given, &end, 10) : 0;
    if (given && (*given < '0' || *given > '9' || *end || errno))
        return answer_text(connection, MHD_HTTP_BAD_REQUEST,
                           "after=%.40s is no number; give the number of the last event that you "
                           "have, or 0 for all that are kept",
                           given);
    struct kvq__http_text text = kvq__http_events_since(h->server->history, after);
    return text.at ? answer(connection, MHD_HTTP_OK, "application/json", text) : MHD_NO;
}

static enum MHD_Result show_storage(struct kvq__http *h, struct MHD_Connection *connection)
{
    struct kvq__http_text text = kvq__http_storage(h->server);
    return text.at ? answer(connection, MHD_HTTP_OK, "application/json", text) : MHD_NO;
}

// A file of the page.
static enum MHD_Result show_file(struct MHD_Connection *connection, const char *type,
                                 const unsigned char *bytes, size_t n)
{
    struct kvq__http_text text = {malloc(n), n};
    if (!text.at)
        return MHD_NO;
    memcpy(text.at, bytes, n);
    return answer(connection, MHD_HTTP_OK, type, text);
}

static enum MHD_Result show_html(struct kvq__http *h, struct MHD_Connection *connection)
{
    (void)h;
    return show_file(connection, "text/html; charset=utf-8", kvq__kvq_html, kvq__kvq_html_bytes);
}

static enum MHD_Result show_css(struct kvq__http *h, struct MHD_Connection *connection)
{
    (void)h;
    return show_file(connection, "text/css; charset=utf-8", kvq__kvq_css, kvq__kvq_css_bytes);
}

static enum MHD_Result show_js(struct kvq__http *h, struct MHD_Connection *connection)
{
    (void)h;
    return show_file(connection, "text/javascript; charset=utf-8", kvq__kvq_js, kvq__kvq_js_bytes);
}

static enum MHD_Result show_paths(struct kvq__http *h, struct MHD_Connection *connection);

// Who may ask for it. What names sessions is for users that are known: the Unix socket shows what
// `kvqctl` would show them; by the loopback address the token opens all.
enum audience { ANYBODY, USERS, READERS };

struct route {
    const char *path, *about;
    enum audience audience;
    enum kvq__http_topic topic; // of the core; unless there is a function
    enum MHD_Result (*show)(struct kvq__http *h, struct MHD_Connection *connection);
};
static const struct route routes[] = {
    {"/", "the page that shows all this", ANYBODY, 0, show_html},
    {"/kvq.css", "its style", ANYBODY, 0, show_css},
    {"/kvq.js", "its program", ANYBODY, 0, show_js},
    {"/help", "this list", ANYBODY, 0, show_paths},
    {"/metrics", "metrics for Prometheus, also as OpenMetrics", ANYBODY, KVQ__HTTP_METRICS, NULL},
    {"/health", "whether the daemon answers", ANYBODY, KVQ__HTTP_HEALTH, NULL},
    {"/health/live", "the same", ANYBODY, KVQ__HTTP_HEALTH, NULL},
    {"/health/ready", "whether it takes new work: 503 while it ends", ANYBODY, KVQ__HTTP_READY,
     NULL},
    {"/version", "versions of daemon and protocol", ANYBODY, 0, show_version},
    {"/status", "as `kvqctl status --json`", USERS, KVQ__HTTP_STATUS, NULL},
    {"/sessions", "as `kvqctl session list --json`", USERS, KVQ__HTTP_SESSIONS, NULL},
    {"/clients", "as `kvqctl client list --json`", USERS, KVQ__HTTP_CLIENTS, NULL},
    {"/prefixes", "as `kvqctl prefix status --json`", USERS, KVQ__HTTP_PREFIXES, NULL},
    {"/quotas", "as `kvqctl quota list --json`", USERS, KVQ__HTTP_QUOTAS, NULL},
    {"/storage", "the store and the remote store in figures", USERS, 0, show_storage},
    {"/events", "the last events; ?after=N: those behind number N", READERS, 0, show_events},
};

static enum MHD_Result show_paths(struct kvq__http *h, struct MHD_Connection *connection)
{
    struct kvq__http_text text = {0};
    FILE *out = open_memstream(&text.at, &text.n);
    if (!out)
        return MHD_NO;
    fprintf(out, "kvqd %s\n\n", h->server->identity.version);
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++)
        fprintf(out, "%-15s %s\n", routes[i].path, routes[i].about);
    if (fclose(out) != 0) {
        free(text.at);
        return MHD_NO;
    }
    return answer(connection, MHD_HTTP_OK, "text/plain; charset=utf-8", text);
}

static bool wants_open_metrics(struct MHD_Connection *connection)
{
    const char *accept =
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_ACCEPT);
    return accept && strstr(accept, "application/openmetrics-text");
}

static enum MHD_Result ask_core(struct kvq__http *h, struct MHD_Connection *connection,
                                const struct route *route, const struct kvq__peer *peer,
                                struct kvq__http_ask **out)
{
    struct kvq__http_ask *ask = calloc(1, sizeof *ask);
    if (!ask)
        return MHD_NO;
    ask->topic = route->topic;
    ask->peer = *peer;
    ask->connection = connection;
    if (ask->topic == KVQ__HTTP_METRICS && wants_open_metrics(connection))
        ask->topic = KVQ__HTTP_OPEN_METRICS;
    if (kvq__http_ask(h, ask) < 0)
        return MHD_NO;
    *out = ask;
    MHD_suspend_connection(connection);
    return MHD_YES;
}

static enum MHD_Result route_request(struct kvq__http *h, struct MHD_Connection *connection,
                                     const struct kvq__http_guest *guest, const char *path,
                                     const char *method, struct kvq__http_ask **ask)
{
    const struct route *route = NULL;
    struct kvq__peer peer = guest->peer;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return answer_text(connection, MHD_HTTP_METHOD_NOT_ALLOWED,
                           "this shows and changes nothing: GET or HEAD; kvqctl changes things");
    if (!is_for_us(h, guest, connection))
        return answer_text(connection, MHD_HTTP_MISDIRECTED_REQUEST,
                           "ask for localhost, 127.0.0.1, [::1] or the address of http_address");
    for (size_t i = 0; i < sizeof routes / sizeof *routes && !route; i++)
        if (strcmp(path, routes[i].path) == 0)
            route = &routes[i];
    if (!route)
        return answer_text(connection, MHD_HTTP_NOT_FOUND,
                           "there is no such page; /help lists all");
    bool token = has_token(h, connection);
    // All that is asked for here only reads.
    peer.admin = token || (guest->local && kvq__server_role(h->server, &peer) >= KVQ__ROLE_READ);
    if (route->audience != ANYBODY && !guest->local && !token)
        return answer_text(
            connection, MHD_HTTP_UNAUTHORIZED,
            "here only the token in %s/" KVQ_ADMIN_DIR "/http-token opens %s "
            "(Authorization: Bearer TOKEN); the socket %s/" KVQ_HTTP_SOCKET " knows its users",
            h->server->config.runtime_dir, route->path, h->server->config.runtime_dir);
    if (route->audience == READERS && !peer.admin)
        return answer_text(connection, MHD_HTTP_FORBIDDEN,
                           "user %u may not see events: they name sessions of every user; users "
                           "with a role may (read_uids, read_gids)",
                           peer.uid);
    return route->show ? route->show(h, connection) : ask_core(h, connection, route, &peer, ask);
}

static struct kvq__http_guest *guest_of(const struct kvq__http *h,
                                        struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct kvq__http_guest *guest;
    LIST_FOREACH (guest, &h->guests, link)
        if (info && guest->fd == info->connect_fd)
            return guest;
    return NULL;
}

static void note_request(struct kvq__http_guest *guest, bool asking)
{
    guest->asking = asking;
    guest->since_ns = kvq_now_ns();
}

// Called for a request's headers, again when all of it is there, and once more when its suspended
// connection goes on. An answer in the first call would end the connection.
static enum MHD_Result on_request(void *context, struct MHD_Connection *connection,
                                  const char *path, const char *method, const char *version,
                                  const char *data, size_t *bytes, void **request)
{
    struct kvq__http *h = context;
    struct kvq__http_guest *guest = guest_of(h, connection);
    (void)version;
    (void)data;
    assert(guest);
    if (!*request) {
        *request = h; // seen
        return MHD_YES;
    }
    if (*bytes) { // a body is nobody's
        *bytes = 0;
        return MHD_YES;
    }
    struct kvq__http_ask *ask = *request == h ? NULL : *request;
    if (ask && ask->late)
        return answer_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE,
                           "the poller has not answered for %d seconds; look at kvqd's log",
                           KVQ__HTTP_PATIENCE_MS / 1000);
    if (ask) {
        struct kvq__http_text text = ask->text;
        assert(ask->answered);
        ask->text = (struct kvq__http_text){0};
        return answer(connection, ask->status, ask->type, text);
    }
    note_request(guest, true);
    return route_request(h, connection, guest, path, method, (struct kvq__http_ask **)request);
}

static void on_completed(void *context, struct MHD_Connection *connection, void **request,
                         enum MHD_RequestTerminationCode code)
{
    struct kvq__http_guest *guest = guest_of(context, connection);
    (void)code;
    if (guest)
        note_request(guest, false);
    if (*request && *request != context)
        kvq__http_ask_leave(*request);
    *request = NULL;
}

// ---- Connections ----

static void on_guest(void *context, struct MHD_Connection *connection, void **own,
                     enum MHD_ConnectionNotificationCode code)
{
    struct kvq__http *h = context;
    struct kvq__http_guest *guest = guest_of(h, connection);
    (void)own;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED && guest)
        kvq__http_guest_leave(&h->guests, guest);
}

static void admit(struct kvq__http *h, int fd, bool local)
{
    static const struct sockaddr_un nowhere = {.sun_family = AF_UNIX};
    struct kvq__http_guest *guest = calloc(1, sizeof *guest);
    enum kvq__role role = KVQ__ROLE_NONE;
    char text[KVQ_TEXT_BYTES] = "no memory", quoted[KVQ_TEXT_BYTES + 16];
    bool good = guest && (!local || kvq__socket_peer(fd, &guest->peer, NULL, text) == 0);
    if (good) {
        guest->fd = fd;
        guest->local = local;
        guest->since_ns = kvq_now_ns();
        role = local ? kvq__server_role(h->server, &guest->peer) : KVQ__ROLE_NONE;
        good = kvq__http_guest_check(&h->guests, guest, role, guest->since_ns, text) == 0;
    }
    if (!good) {
        kvq__log_client(&h->log_budget, KVQ_LOG_WARN, "http_refused", "socket=%s text=%s",
                        local ? "unix" : "tcp", kvq__log_quote(quoted, sizeof quoted, text));
        close(fd);
        free(guest);
        return;
    }
    run_http(h); // who was displaced is gone then
    LIST_INSERT_HEAD(&h->guests, guest, link);
    // Takes the descriptor over, and closes it also if it fails, maybe with a call of on_guest.
    if (MHD_add_connection(h->daemon, fd, (const struct sockaddr *)&nowhere, sizeof nowhere) !=
        MHD_YES)
        kvq__http_guest_leave(&h->guests, guest);
    run_http(h);
}

static void on_local(void *context, int fd)
{
    admit(context, fd, true);
}

static void on_loopback(void *context, int fd)
{
    admit(context, fd, false);
}

// ---- Opening and closing ----

// The address as it is: port 0 is one that the kernel chose.
static void tell_address(const struct kvq__http *h)
{
    const char *given = h->server->config.http_address, *colon = strrchr(given, ':');
    struct sockaddr_storage at = {0};
    socklen_t size = sizeof at;
    assert(colon && h->loopback.open);
    getsockname(h->loopback.fd, (struct sockaddr *)&at, &size);
    uint16_t port = at.ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)&at)->sin6_port
                                             : ((const struct sockaddr_in *)&at)->sin_port;
    kvq__log(KVQ_LOG_INFO, "http", "address=%.*s:%u", (int)(colon - given), given, ntohs(port));
}

static int open_loopback(struct kvq__http *h, char *text)
{
    const struct kvq_config *c = &h->server->config;
    struct kvq__listen_address address;
    char why[KVQ_TEXT_BYTES], quoted[KVQ_TEXT_BYTES];
    if (!c->http_address[0])
        return 0;
    bool good = kvq__listen_address_parse(c->http_address, &address);
    assert(good && address.loopback); // kvq__config_check
    (void)good;
    int error = kvq__door_open_tcp(&h->loopback, &h->server->loop, &address, why);
    if (error == 0) {
        tell_address(h);
        return 0;
    }
    snprintf(text, KVQ_TEXT_BYTES,
             "cannot listen at http_address %.60s: %.200s; another kvqd may: choose another port, "
             "or leave it empty",
             c->http_address, why);
    if (kvq__config_was_given(c, "http_address"))
        return error;
    kvq__log(KVQ_LOG_WARN, "http_address", "error=%s text=\"the Unix socket serves all the same\"",
             kvq__log_quote(quoted, sizeof quoted, text));
    return 0;
}

// For those who may read the daemon's own directory.
static int write_token(struct kvq__http *h, char *text)
{
    uint8_t random[KVQ__HTTP_TOKEN_BYTES];
    char path[KVQ_CONFIG_PATH + 64];
    if (getrandom(random, sizeof random, 0) != sizeof random) {
        snprintf(text, KVQ_TEXT_BYTES, "no random bytes for the token of HTTP");
        return KVQ_E_SYSTEM;
    }
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(h->token + 2 * i, 3, "%02x", random[i]);
    snprintf(path, sizeof path, "%s/" KVQ_ADMIN_DIR "/http-token", h->server->config.runtime_dir);
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool good = fd >= 0 && write(fd, h->token, sizeof h->token - 1) == sizeof h->token - 1;
    if (!good)
        snprintf(text, KVQ_TEXT_BYTES, "cannot write %.200s: %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return good ? 0 : KVQ_E_SYSTEM;
}

static int open_daemon(struct kvq__http *h, char *text)
{
    h->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL,
        on_request, h, MHD_OPTION_NOTIFY_COMPLETED, on_completed, h, MHD_OPTION_NOTIFY_CONNECTION,
        on_guest, h, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)KVQ__HTTP_IDLE_SECONDS,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)KVQ__HTTP_MEMORY, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)(2 * KVQ__HTTP_MOST), MHD_OPTION_END);
    const union MHD_DaemonInfo *info =
        h->daemon ? MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
    if (info && uv_poll_init(&h->server->loop, &h->poll, info->epoll_fd) == 0) {
        uv_timer_init(&h->server->loop, &h->timer);
        uv_timer_init(&h->server->loop, &h->tick);
        h->poll.data = h->timer.data = h->tick.data = h;
        uv_poll_start(&h->poll, UV_READABLE, on_ready);
        uv_timer_start(&h->tick, on_late_tick, TICK_MS, TICK_MS);
        h->open = true;
        return 0;
    }
    snprintf(text, KVQ_TEXT_BYTES, "cannot start HTTP: %s", strerror(errno));
    return KVQ_E_SYSTEM;
}

int kvq__http_open(struct kvq__server *server, struct kvq__http **out, char *text)
{
    *out = NULL;
    if (!server->config.http)
        return 0;
    struct kvq__http *h = calloc(1, sizeof *h);
    void *arena = h ? malloc(KVQ_WIRE_ARENA) : NULL;
    *out = h;
    if (!arena) {
        free(h);
        *out = NULL;
        snprintf(text, KVQ_TEXT_BYTES, "no memory for HTTP");
        return KVQ_E_NO_MEMORY;
    }
    h->server = server;
    LIST_INIT(&h->guests);
    TAILQ_INIT(&h->asking.waiting);
    kvq_arena_init(&h->asking.arena, arena, KVQ_WIRE_ARENA);
    h->local.context = h->loopback.context = h;
    h->local.enter = on_local;
    h->loopback.enter = on_loopback;
    int error = open_daemon(h, text);
    error = error ? error : write_token(h, text);
    error = error ? error
                  : kvq__door_open(&h->local, &server->loop, server->config.runtime_dir,
                                   KVQ_HTTP_SOCKET, SOCK_STREAM, text);
    return error ? error : open_loopback(h, text);
}

void kvq__http_end(struct kvq__http *h)
{
    struct kvq__http_ask *ask, *next;
    if (!h || !h->open)
        return;
    kvq__door_close(&h->local);
    kvq__door_close(&h->loopback);
    // Suspended connections have to go on before libmicrohttpd can end.
    if (h->asking.current && h->asking.current->connection && !h->asking.current->late)
        MHD_resume_connection(h->asking.current->connection);
    for (ask = TAILQ_FIRST(&h->asking.waiting); ask; ask = next) {
        next = TAILQ_NEXT(ask, link);
        if (!ask->late)
            MHD_resume_connection(ask->connection);
    }
    h->open = false;
    uv_poll_stop(&h->poll);
    uv_close((uv_handle_t *)&h->poll, NULL);
    uv_close((uv_handle_t *)&h->timer, NULL);
    uv_close((uv_handle_t *)&h->tick, NULL);
    MHD_stop_daemon(h->daemon); // each request is completed, and each question left
    assert(LIST_EMPTY(&h->guests) && TAILQ_EMPTY(&h->asking.waiting));
}

bool kvq__http_idle(const struct kvq__http *h)
{
    return !h || !h->asking.current;
}

void kvq__http_free(struct kvq__http **http)
{
    struct kvq__http *h = *http;
    char path[KVQ_CONFIG_PATH + 64];
    if (!h)
        return;
    assert(!h->open && !h->asking.current);
    snprintf(path, sizeof path, "%s/" KVQ_ADMIN_DIR "/http-token", h->server->config.runtime_dir);
    unlink(path);
    free(h->asking.arena.memory);
    free(h);
    *http = NULL;
}
