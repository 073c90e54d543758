// SPDX-License-Identifier: Apache-2.0
//
// Accepting, refusing and passing bytes; see front.h.
#include "daemon/control/front.h"

#include <arpa/inet.h>
#include <assert.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/log/log.h"
#include "daemon/runtime/descriptors.h"
#include "daemon/runtime/listen.h"
#include "daemon/runtime/packet.h"
#include "proto/refusal.h"

enum { FLOW_BYTES = 16 * 1024, FAR_ALIVE_SECONDS = 60 };

enum guest_state { SILENT, PASSING, ENDING };

// Bytes on their way from one side to the other: read, written, then the next are read.
struct flow {
    struct guest *guest;
    uv_stream_t *from, *to;
    uv_write_t write;
    bool writing;
    char bytes[FLOW_BYTES];
};

struct guest {
    struct kvq__front *front;
    TAILQ_ENTRY(guest) link; // the one that was quiet for longest is first
    enum guest_state state;
    uint32_t number;
    struct kvq__asker asker;
    union {
        uv_stream_t stream;
        uv_pipe_t pipe;
        uv_tcp_t tcp; // from another machine
    } peer_side;
    uv_pipe_t back_side;
    int open_handles;
    bool backed;    // the back side is, or was, open
    bool accepted;  // ZeroMQ has answered there
    size_t untaken; // bytes passed to ZeroMQ, less those that came out of it
    struct flow in, out;
};

TAILQ_HEAD(guests, guest);

struct kvq__front {
    struct kvq__server *server;
    struct kvq__front_backend backend;
    struct kvq__door door, far_door;
    struct guests guests;
    // standing: not ENDING; pending: ZeroMQ has yet to accept them, so no count has that end
    uint32_t places, standing, pending;
    bool used[KVQ__FRONT_MOST];
    struct kvq_log_budget log_budget;
};

// ---- The end of a connection ----

static void on_closed(uv_handle_t *handle)
{
    struct guest *g = handle->data;
    struct kvq__front *f = g->front;
    assert(g->state == ENDING && g->open_handles > 0 && f->used[g->number]);
    if (--g->open_handles > 0)
        return;
    if (g->backed)
        f->backend.close(f->backend.context, g->number);
    f->used[g->number] = false;
    TAILQ_REMOVE(&f->guests, g, link);
    free(g);
}

static void close_side(void *side)
{
    if (!uv_is_closing(side))
        uv_close(side, on_closed);
}

static void set_ending(struct guest *g)
{
    assert(g->state == ENDING || g->front->standing > 0);
    if (g->state != ENDING)
        g->front->standing--;
    g->state = ENDING;
}

// ZeroMQ's end is closed, or there is none: nothing is waited for.
static void end_now(struct guest *g)
{
    assert(g->accepted || !g->backed || g->front->pending > 0);
    set_ending(g);
    g->front->pending -= g->backed && !g->accepted;
    g->accepted = true;
    close_side(&g->peer_side);
    if (g->backed)
        close_side(&g->back_side);
}

static void shut_backend(struct guest *g)
{
    assert(g->backed && g->state == ENDING);
    uv_os_fd_t fd;
    if (uv_fileno((uv_handle_t *)&g->back_side, &fd) == 0)
        shutdown(fd, SHUT_WR);
}

static void on_alloc(uv_handle_t *handle, size_t wanted, uv_buf_t *buffer);
static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer);

// The peer has gone or must go. What it has sent still reaches ZeroMQ, which then closes its end.
// Until it has, its descriptors are in use.
static void end_guest(struct guest *g)
{
    if (g->state == ENDING)
        return;
    if (!g->backed) {
        end_now(g);
        return;
    }
    set_ending(g);
    close_side(&g->peer_side);
    if (!g->in.writing)
        shut_backend(g);
    uv_read_start((uv_stream_t *)&g->back_side, on_alloc, on_read); // to its end
}

// ---- Refusing ----

static void refuse_guest(struct kvq__front *f, int fd, const struct kvq__asker *asker,
                         const char *text)
{
    uint8_t bytes[KVQ_REFUSAL_BYTES];
    char quoted[KVQ_TEXT_BYTES], who[256];
    size_t n = kvq_refusal_put(bytes, text);
    kvq__log_client(&f->log_budget, KVQ_LOG_WARN, "control_refused", "%s status=%s text=%s",
                    kvq__asker_text(asker, who, sizeof who), kvq_status_name(KVQ_E_LIMIT),
                    kvq__log_quote(quoted, sizeof quoted, text));
    // To an empty socket this fits; a peer that has gone is told nothing.
    (void)!send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Lets go of the connection that was quiet for longest and may go; those that never spoke first.
static bool displace(struct kvq__front *f, const struct kvq__asker *by)
{
    bool admin = by->role == KVQ__ROLE_ADMIN;
    struct guest *g;
    for (int spoken = 0; spoken < 2; spoken++)
        TAILQ_FOREACH (g, &f->guests, link) {
            if (g->state == ENDING || (g->state == PASSING) != (spoken == 1) ||
                (g->asker.peer.uid != by->peer.uid && !admin))
                continue;
            if (by->address[0] && f->backend.known(f->backend.context, g->number))
                continue;
            if (g->state == PASSING && f->backend.busy(f->backend.context, g->number))
                continue;
            end_guest(g);
            return true;
        }
    return false;
}

static int no_descriptors(const struct kvq__asker *asker, uint32_t free, char *text)
{
    if (asker->address[0]) // anybody can ask
        snprintf(text, KVQ_TEXT_BYTES, "kvqd has no room for another connection");
    else
        snprintf(text, KVQ_TEXT_BYTES,
                 "kvqd has %u of %u descriptors left, which it keeps for itself; raise its "
                 "LimitNOFILE=",
                 free, kvq__descriptors_limit());
    return KVQ_E_LIMIT;
}

// Whether one more connection of this user may be.
static int check_guest_room(struct kvq__front *f, const struct kvq__asker *asker, char *text)
{
    uint32_t uid = asker->peer.uid;
    uint32_t own = 0, ending = 0, free = kvq__descriptors_free();
    struct guest *g;
    assert(f->standing <= f->places && f->pending <= KVQ__FRONT_MOST);
    TAILQ_FOREACH (g, &f->guests, link) {
        own += g->state != ENDING && g->asker.peer.uid == uid;
        ending += g->state == ENDING && g->asker.peer.uid == uid;
    }
    bool allowed = asker->role == KVQ__ROLE_ADMIN
                       ? f->standing < f->places
                       : kvq__share_allows(own, 1, f->standing, f->places);
    if (ending > f->places || (!allowed && !displace(f, asker))) {
        if (asker->address[0])
            snprintf(text, KVQ_TEXT_BYTES,
                     "other machines have %u connections, and no more are free; end some, or wait",
                     own);
        else
            snprintf(text, KVQ_TEXT_BYTES,
                     "user %u has %u of the %u connections that the control socket has for %u "
                     "users, all with requests under way; wait for some to end",
                     uid, own, f->standing, f->places);
        return KVQ_E_LIMIT;
    }
    if (free < KVQ__FILES_SPARE)
        return no_descriptors(asker, free, text);
    return 0;
}

// ---- Passing bytes ----

// Opens what is behind a connection that has begun to speak.
static int open_guest_backend(struct guest *g, char *text)
{
    struct kvq__front *f = g->front;
    uint32_t free = kvq__descriptors_free();
    assert(g->state == SILENT && !g->backed);
    if (free < f->pending + KVQ__FILES_OF_CONTROL + KVQ__FILES_SPARE)
        return no_descriptors(&g->asker, free, text);
    int fd = f->backend.open(f->backend.context, g->number, &g->asker, text);
    if (fd < 0)
        return fd;
    g->backed = true;
    f->pending++;
    g->open_handles++;
    uv_pipe_init(&f->server->loop, &g->back_side, 0);
    g->back_side.data = g;
    int error = uv_pipe_open(&g->back_side, fd);
    if (error)
        close(fd);
    error = error ? error : uv_read_start((uv_stream_t *)&g->back_side, on_alloc, on_read);
    if (error == 0) {
        g->state = PASSING;
        return 0;
    }
    snprintf(text, KVQ_TEXT_BYTES, "cannot serve another connection: %s", uv_strerror(error));
    return KVQ_E_SYSTEM;
}

static struct flow *flow_of(struct guest *g, const void *from)
{
    assert(from == &g->peer_side || from == &g->back_side);
    return from == &g->peer_side ? &g->in : &g->out;
}

static void on_alloc(uv_handle_t *handle, size_t wanted, uv_buf_t *buffer)
{
    struct flow *flow = flow_of(handle->data, handle);
    (void)wanted;
    *buffer = uv_buf_init(flow->bytes, sizeof flow->bytes);
}

static void on_written(uv_write_t *write, int status)
{
    struct flow *flow = write->data;
    struct guest *g = flow->guest;
    assert(flow->writing);
    flow->writing = false;
    if (g->state == ENDING) {
        if (flow == &g->in && !uv_is_closing((uv_handle_t *)&g->back_side))
            shut_backend(g);
    } else if (status < 0) {
        end_guest(g);
    } else {
        uv_read_start(flow->from, on_alloc, on_read);
    }
}

static void pass_on(struct flow *flow, size_t n)
{
    assert(!flow->writing && n > 0 && n <= sizeof flow->bytes);
    uv_buf_t buffer = uv_buf_init(flow->bytes, (unsigned)n);
    uv_read_stop(flow->from);
    flow->write.data = flow;
    flow->writing = true;
    if (uv_write(&flow->write, flow->to, &buffer, 1, on_written) != 0) {
        flow->writing = false;
        end_guest(flow->guest);
    }
}

// Whether ZeroMQ may have so many bytes more of this peer; ends it if not.
static bool check_untaken(struct guest *g, size_t n)
{
    char quoted[KVQ_TEXT_BYTES], who[256];
    const char *text = "a request has no end: a message is one frame behind an optional empty one";
    g->untaken += n;
    if (g->untaken <= KVQ__FRONT_UNTAKEN)
        return true;
    kvq__log_client(&g->front->log_budget, KVQ_LOG_WARN, "control_refused", "%s status=%s text=%s",
                    kvq__asker_text(&g->asker, who, sizeof who), kvq_status_name(KVQ_E_LIMIT),
                    kvq__log_quote(quoted, sizeof quoted, text));
    end_guest(g);
    return false;
}

void kvq__front_took(struct kvq__front *f, uint32_t number, size_t bytes)
{
    struct guest *g;
    assert(number < KVQ__FRONT_MOST && f->used[number]);
    TAILQ_FOREACH (g, &f->guests, link)
        if (g->number == number)
            g->untaken -= bytes < g->untaken ? bytes : g->untaken;
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer)
{
    struct guest *g = stream->data;
    struct kvq__front *f = g->front;
    struct flow *flow = flow_of(g, stream);
    char text[KVQ_TEXT_BYTES] = "";
    uv_os_fd_t fd;
    (void)buffer;
    if (n == 0)
        return;
    if (n < 0 && flow == &g->out) {
        end_now(g);
    } else if (n < 0) {
        end_guest(g);
    } else if (g->state == SILENT && open_guest_backend(g, text) != 0) {
        if (uv_fileno((uv_handle_t *)&g->peer_side, &fd) == 0)
            refuse_guest(f, fd, &g->asker, text);
        end_now(g);
    } else {
        if (flow == &g->out && !g->accepted) {
            g->accepted = true;
            f->pending--;
        }
        if (g->state == ENDING) // nobody is left to read it
            return;
        TAILQ_REMOVE(&f->guests, g, link);
        TAILQ_INSERT_TAIL(&f->guests, g, link);
        if (flow == &g->out || check_untaken(g, (size_t)n))
            pass_on(flow, (size_t)n);
    }
}

// ---- Accepting ----

static int start_side(struct guest *g, uv_loop_t *loop)
{
    if (!g->asker.address[0])
        return uv_pipe_init(loop, &g->peer_side.pipe, 0);
    return uv_tcp_init(loop, &g->peer_side.tcp);
}

// Takes the descriptor over, also if it fails.
static int open_side(struct guest *g, int fd)
{
    bool far = g->asker.address[0] != 0;
    int error = far ? uv_tcp_open(&g->peer_side.tcp, fd) : uv_pipe_open(&g->peer_side.pipe, fd);
    if (error)
        close(fd);
    if (error == 0 && far) { // if these fail, it is slower or ends later
        uv_tcp_nodelay(&g->peer_side.tcp, 1);
        uv_tcp_keepalive(&g->peer_side.tcp, 1, FAR_ALIVE_SECONDS);
    }
    return error ? error : uv_read_start(&g->peer_side.stream, on_alloc, on_read);
}

// Takes the descriptor over.
static int add_guest(struct kvq__front *f, int fd, const struct kvq__asker *asker)
{
    uint32_t number = 0;
    while (number < KVQ__FRONT_MOST && f->used[number])
        number++;
    struct guest *g = number < KVQ__FRONT_MOST ? calloc(1, sizeof *g) : NULL;
    if (g)
        g->asker = *asker;
    if (!g || start_side(g, &f->server->loop) != 0) {
        free(g);
        close(fd);
        return KVQ_E_NO_MEMORY;
    }
    g->front = f;
    g->number = number;
    g->in.guest = g->out.guest = g;
    g->in.from = g->out.to = &g->peer_side.stream;
    g->in.to = g->out.from = (uv_stream_t *)&g->back_side;
    g->peer_side.stream.data = g;
    g->open_handles = 1;
    f->used[number] = true;
    f->standing++;
    TAILQ_INSERT_TAIL(&f->guests, g, link);
    int error = open_side(g, fd);
    if (error)
        end_now(g);
    return error ? KVQ_E_SYSTEM : 0;
}

static void let_in(struct kvq__front *f, int fd, const struct kvq__asker *asker)
{
    char text[KVQ_TEXT_BYTES] = "";
    if (check_guest_room(f, asker, text) != 0) {
        refuse_guest(f, fd, asker, text);
        close(fd);
    } else if (add_guest(f, fd, asker) != 0) {
        kvq__log_client(&f->log_budget, KVQ_LOG_ERROR, "no_memory", "what=connection");
    }
}

static void on_enter(void *context, int fd)
{
    struct kvq__front *f = context;
    struct kvq__asker asker = {0};
    char text[KVQ_TEXT_BYTES] = "";
    if (kvq__socket_peer(fd, &asker.peer, NULL, text) != 0) {
        kvq__log_client(&f->log_budget, KVQ_LOG_WARN, "unknown_peer", "error=\"%s\"", text);
        close(fd);
        return;
    }
    asker.role = kvq__server_role(f->server, &asker.peer);
    let_in(f, fd, &asker);
}

// "10.0.0.7:40100", "[fe80::1]:40100": of a connection's other end, or where it listens here.
static void far_address(int fd, bool peer, char out[KVQ__ADDRESS_BYTES])
{
    struct sockaddr_storage at = {0};
    socklen_t size = sizeof at;
    char host[INET6_ADDRSTRLEN] = "?";
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&at;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&at;
    if ((peer ? getpeername : getsockname)(fd, (struct sockaddr *)&at, &size) != 0)
        at.ss_family = AF_UNSPEC; // it has gone already
    if (at.ss_family == AF_INET6 && inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host))
        snprintf(out, KVQ__ADDRESS_BYTES, "[%s]:%u", host, ntohs(v6->sin6_port));
    else if (at.ss_family == AF_INET && inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host))
        snprintf(out, KVQ__ADDRESS_BYTES, "%s:%u", host, ntohs(v4->sin_port));
    else
        snprintf(out, KVQ__ADDRESS_BYTES, "?");
}

// Nobody's, until ZeroMQ has asked for the key.
static void on_enter_far(void *context, int fd)
{
    struct kvq__asker asker = {.peer.uid = KVQ__NO_UID};
    far_address(fd, true, asker.address);
    let_in(context, fd, &asker);
}

static int open_far_door(struct kvq__front *f, char *text)
{
    const char *given = f->server->config.control_address;
    struct kvq__listen_address address;
    char why[KVQ_TEXT_BYTES], here[KVQ__ADDRESS_BYTES];
    if (!given[0])
        return 0;
    bool good = kvq__listen_address_parse(given, &address);
    assert(good); // kvq__config_check
    (void)good;
    int error = kvq__door_open_tcp(&f->far_door, &f->server->loop, &address, why);
    if (error) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot listen at control_address %.60s: %.200s", given,
                 why);
        return error;
    }
    far_address(f->far_door.fd, false, here);
    kvq__log(KVQ_LOG_INFO, "control_address", "address=%s keys=%u", here, f->server->config.n_keys);
    return 0;
}

int kvq__front_open(struct kvq__server *server, const struct kvq__front_backend *backend,
                    struct kvq__front **out, char *text)
{
    struct kvq__front *f = calloc(1, sizeof *f);
    assert(backend->open && backend->busy && backend->known && backend->close);
    *out = f;
    if (!f) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for the control socket");
        return KVQ_E_NO_MEMORY;
    }
    uint32_t places = (kvq__descriptors_kept() - KVQ__FILES_SPARE) / KVQ__FILES_OF_CONTROL;
    f->server = server;
    f->backend = *backend;
    f->places = places < KVQ__FRONT_PLACES ? places : KVQ__FRONT_PLACES;
    f->door.context = f->far_door.context = f;
    f->door.enter = on_enter;
    f->far_door.enter = on_enter_far;
    TAILQ_INIT(&f->guests);
    int error = kvq__door_open(&f->door, &server->loop, server->config.runtime_dir,
                               KVQ_CONTROL_SOCKET, SOCK_STREAM, text);
    return error ? error : open_far_door(f, text);
}

void kvq__front_end(struct kvq__front *f)
{
    struct guest *g;
    if (!f)
        return;
    kvq__door_close(&f->door);
    kvq__door_close(&f->far_door);
    TAILQ_FOREACH (g, &f->guests, link)
        end_now(g);
}

void kvq__front_free(struct kvq__front **front)
{
    assert(!*front || TAILQ_EMPTY(&(*front)->guests));
    free(*front);
    *front = NULL;
}
