// SPDX-License-Identifier: Apache-2.0
//
// The control socket (ZeroMQ ROUTER) and the events socket (PUB): the only file that knows
// ZeroMQ. One request is under way at a time; others wait in ZeroMQ's queue.
//
// ZeroMQ's descriptor is edge-triggered: it tells once that something changed, and any call on the
// socket, sending included, may use that up. So messages are looked for in its callback and
// again before and after each time the loop sleeps (prepare and check), and while some are left
// an idle handle keeps the loop from sleeping.
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include "daemon/keeper.h"
#include "daemon/log.h"
#include "daemon/packet.h"
#include "daemon/server.h"
#include "daemon/workers.h"

enum {
    DRAIN = 32, // messages looked at before others get a turn
    ENVELOPE = 512,
    MOST_ERRANDS = 16, // each has an arena
};

// The way back to a ZeroMQ peer.
struct sender {
    uint8_t identity[ENVELOPE];
    size_t bytes;
    bool delimiter; // a REQ socket's empty frame
};

struct kvq__control {
    struct kvq__server *server;
    void *context, *router, *publisher;
    uv_poll_t poll;
    uv_prepare_t prepare;
    uv_check_t check;
    uv_idle_t idle;
    bool open;
    struct kvq_log_budget log_budget;

    // The request under way.
    bool busy; // at the poller
    struct kvq__mail mail;
    struct kvq__peer peer;
    struct sender sender;
    uint32_t errands;
    Kvq__Request *request;
    Kvq__Reply reply;
    struct kvq_arena arena;
    uint8_t out[KVQ_MAX_MESSAGE];
    uint8_t arena_memory[KVQ_WIRE_ARENA];
};

// A request that the keeper has: others go on meanwhile.
struct errand {
    struct kvq__task task;
    struct kvq__control *control;
    struct kvq__peer peer;
    struct sender sender;
    Kvq__Request *request;
    Kvq__Reply reply;
    struct kvq_arena arena;
    uint8_t arena_memory[KVQ_WIRE_ARENA]; // last: most of it is never touched
};

static void drain(struct kvq__control *c);

// ---- Replies ----

static void send_to(struct kvq__control *c, const struct sender *to, Kvq__Reply *reply,
                    struct kvq_arena *arena)
{
    size_t length;
    if (kvq_reply_pack(reply, c->out, sizeof c->out, &length) != 0) {
        kvq__reply_status(reply, arena, KVQ_E_LIMIT, "the reply is longer than a message");
        kvq_reply_pack(reply, c->out, sizeof c->out, &length);
    }
    // A peer that is gone or does not read is nobody's loss: ROUTER drops what it cannot send.
    if (zmq_send(c->router, to->identity, to->bytes, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return;
    if (to->delimiter)
        zmq_send(c->router, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT);
    zmq_send(c->router, c->out, length, ZMQ_DONTWAIT);
}

static void send_reply(struct kvq__control *c)
{
    send_to(c, &c->sender, &c->reply, &c->arena);
}

static void refuse(struct kvq__control *c, int status, const char *text)
{
    char quoted[256];
    kvq__reply_status(&c->reply, &c->arena, status, text);
    kvq__log_client(&c->log_budget, KVQ_LOG_WARN, "control_refused", "uid=%u status=%s text=%s",
                    c->peer.uid, kvq_status_name(status),
                    kvq__log_quote(quoted, sizeof quoted, text));
    send_reply(c);
}

static void back(struct kvq__mail *mail)
{
    struct kvq__control *c =
        (struct kvq__control *)((char *)mail - offsetof(struct kvq__control, mail));
    c->busy = false;
    if (!c->open)
        return;
    if (c->request->command_case == KVQ__REQUEST__COMMAND_KICK_CLIENT && c->reply.status == 0)
        kvq__attach_kick(c->server->attach, c->request->kick_client->id);
    send_reply(c);
    drain(c);
}

// Poller's thread.
static void run(struct kvq__mail *mail)
{
    struct kvq__control *c =
        (struct kvq__control *)((char *)mail - offsetof(struct kvq__control, mail));
    struct kvq__dispatch d = {.core = c->server->core,
                              .identity = &c->server->identity,
                              .peer = &c->peer,
                              .now_ns = kvq__now_ns()};
    kvq__dispatch_run(&d, c->request, &c->arena, &c->reply);
    kvq__mailbox_post(&c->server->box, &c->mail, back);
}

// ---- Requests ----

// Who sent a message: ZeroMQ's note of the socket's credentials, "host:uid:gid:pid". It has none of
// the other groups, but tells the socket.
static bool peer_of(const struct kvq__control *c, zmq_msg_t *message, struct kvq__peer *peer)
{
    unsigned long number[3];
    const char *at = zmq_msg_gets(message, "Peer-Address");
    memset(peer, 0, sizeof *peer);
    peer->uid = UINT32_MAX; // nobody
    for (int i = 0; i < 3; i++) {
        char *end;
        at = at ? strchr(at, ':') : NULL;
        if (!at || at[1] < '0' || at[1] > '9')
            return false;
        errno = 0;
        number[i] = strtoul(at + 1, &end, 10);
        if (errno || number[i] > UINT32_MAX || *end != (i < 2 ? ':' : 0))
            return false;
        at = end;
    }
    peer->uid = (uint32_t)number[0];
    peer->gids[0] = (uint32_t)number[1];
    peer->n_gids = 1;
    peer->pid = (uint32_t)number[2];
    kvq__socket_groups(zmq_msg_get(message, ZMQ_SRCFD), peer);
    peer->admin = kvq__server_is_admin(c->server, peer->uid);
    return true;
}

static void errand_done(struct kvq__task *task)
{
    struct errand *e = (struct errand *)task; // its first member
    struct kvq__control *c = e->control;
    c->errands--;
    if (c->open)
        send_to(c, &e->sender, &e->reply, &e->arena);
    free(e);
}

// The message was unpacked before, so it can be again.
static void start_errand(struct kvq__control *c, zmq_msg_t *body)
{
    char text[KVQ_TEXT_BYTES] = "";
    struct errand *e = c->errands < MOST_ERRANDS ? calloc(1, sizeof *e) : NULL;
    if (!e) {
        refuse(c, KVQ_E_BUSY, "too many saves and the like are under way; try again");
        return;
    }
    e->control = c;
    e->peer = c->peer;
    e->sender = c->sender;
    kvq_arena_init(&e->arena, e->arena_memory, sizeof e->arena_memory);
    kvq__reply__init(&e->reply);
    e->reply.epoch = c->reply.epoch;
    e->reply.id = c->reply.id;
    int error =
        kvq_request_unpack(zmq_msg_data(body), zmq_msg_size(body), &e->arena, &e->request, text);
    if (error) {
        refuse(c, error, text);
        free(e);
        return;
    }
    e->task = (struct kvq__task){.request = e->request,
                                 .arena = &e->arena,
                                 .reply = &e->reply,
                                 .peer = &e->peer,
                                 .done = errand_done};
    c->errands++;
    kvq__keeper_start(c->server->keeper, &e->task);
}

static void take_request(struct kvq__control *c, zmq_msg_t *body, bool extra)
{
    char text[KVQ_TEXT_BYTES] = "";
    c->arena.used = 0;
    kvq__reply__init(&c->reply);
    c->reply.epoch = c->server->identity.epoch;
    if (!peer_of(c, body, &c->peer)) {
        refuse(c, KVQ_E_PERMISSION, "the kernel does not say which user this connection is of");
        return;
    }
    if (extra) {
        refuse(c, KVQ_E_PROTOCOL, "a request is one frame (behind an optional empty one)");
        return;
    }
    int error =
        kvq_request_unpack(zmq_msg_data(body), zmq_msg_size(body), &c->arena, &c->request, text);
    if (error) {
        refuse(c, error, text);
        return;
    }
    c->reply.id = c->request->id;
    if (c->request->protocol < KVQ_PROTOCOL_MIN || c->request->protocol > KVQ_PROTOCOL_MAX) {
        snprintf(text, sizeof text, "protocol %u; this daemon (%s) speaks %d to %d",
                 c->request->protocol, KVQ_VERSION_TEXT, KVQ_PROTOCOL_MIN, KVQ_PROTOCOL_MAX);
        refuse(c, KVQ_E_VERSION, text);
    } else if (c->request->command_case == KVQ__REQUEST__COMMAND_DOCTOR) {
        kvq__doctor(c->server, &c->arena, &c->reply);
        send_reply(c);
    } else if (kvq__keeper_takes(c->server->keeper, c->request)) {
        start_errand(c, body);
    } else if (!kvq__dispatch_knows(c->request->command_case)) {
        refuse(c, KVQ_E_INVALID, "that command belongs to the attach socket");
    } else {
        c->busy = true;
        kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, run);
    }
}

// Receives one whole message: identity, maybe an empty frame, body. False if there is none.
static bool receive(struct kvq__control *c)
{
    zmq_msg_t frame, body;
    int parts = 0;
    bool more = true, have_body = false;
    c->sender.delimiter = false;
    c->sender.bytes = 0;
    zmq_msg_init(&body);
    while (more) {
        zmq_msg_init(&frame);
        if (zmq_msg_recv(&frame, c->router, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&frame);
            zmq_msg_close(&body);
            return false;
        }
        more = zmq_msg_more(&frame);
        size_t size = zmq_msg_size(&frame);
        if (parts == 0 && size <= sizeof c->sender.identity) {
            memcpy(c->sender.identity, zmq_msg_data(&frame), size);
            c->sender.bytes = size;
        } else if (parts == 1 && size == 0 && more) {
            c->sender.delimiter = true;
        } else if (parts > 0 && !have_body) {
            zmq_msg_move(&body, &frame);
            have_body = true;
        }
        parts++;
        zmq_msg_close(&frame);
    }
    if (have_body && c->sender.bytes)
        take_request(c, &body, parts > 2 + c->sender.delimiter);
    zmq_msg_close(&body);
    return true;
}

static bool readable(struct kvq__control *c)
{
    int events = 0;
    size_t size = sizeof events;
    return zmq_getsockopt(c->router, ZMQ_EVENTS, &events, &size) == 0 && (events & ZMQ_POLLIN);
}

static void drain(struct kvq__control *c)
{
    for (int i = 0; i < DRAIN && c->open && !c->busy; i++)
        if (!receive(c))
            break;
}

static void on_idle(uv_idle_t *handle)
{
    (void)handle; // its being active keeps the loop from sleeping
}

static void on_prepare(uv_prepare_t *handle)
{
    struct kvq__control *c = handle->data;
    if (!c->busy && readable(c))
        uv_idle_start(&c->idle, on_idle);
    else
        uv_idle_stop(&c->idle);
}

static void on_check(uv_check_t *handle)
{
    drain(handle->data);
}

static void on_poll(uv_poll_t *handle, int status, int events)
{
    (void)status;
    (void)events;
    drain(handle->data);
}

// ---- Events ----

void kvq__control_publish(struct kvq__control *c, const Kvq__Event *event)
{
    uint8_t bytes[4 * KVQ_TEXT_BYTES];
    size_t length;
    if (!c || !c->open || kvq_event_pack(event, bytes, sizeof bytes, &length) != 0)
        return;
    if (zmq_send(c->publisher, event->kind, strlen(event->kind), ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0)
        zmq_send(c->publisher, bytes, length, ZMQ_DONTWAIT);
}

// ---- Opening and closing ----

static int fail(const char *what, char *text)
{
    snprintf(text, KVQ_TEXT_BYTES, "cannot %s: %s", what, zmq_strerror(zmq_errno()));
    return KVQ_E_SYSTEM;
}

static void *bind_at(struct kvq__control *c, int type, const char *path, mode_t mode)
{
    char address[KVQ_CONFIG_PATH + 64];
    const int queue = 64, linger = 200;
    const int64_t longest = KVQ_MAX_MESSAGE;
    void *socket = zmq_socket(c->context, type);
    if (!socket)
        return NULL;
    zmq_setsockopt(socket, ZMQ_RCVHWM, &queue, sizeof queue);
    zmq_setsockopt(socket, ZMQ_SNDHWM, &queue, sizeof queue);
    zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &longest, sizeof longest);
    snprintf(address, sizeof address, "ipc://%s", path);
    if (zmq_bind(socket, address) == 0 && chmod(path, mode) == 0)
        return socket;
    zmq_close(socket);
    return NULL;
}

static int open_sockets(struct kvq__control *c, char *text)
{
    char path[KVQ_CONFIG_PATH + 32];
    const char *directory = c->server->config.runtime_dir;
    c->context = zmq_ctx_new();
    if (!c->context)
        return fail("start ZeroMQ", text);
    snprintf(path, sizeof path, "%s/" KVQ_CONTROL_SOCKET, directory);
    c->router = bind_at(c, ZMQ_ROUTER, path, 0666);
    if (!c->router)
        return fail("bind " KVQ_CONTROL_SOCKET " in the runtime directory", text);
    // Events name sessions of everybody: their directory is the daemon's user's alone.
    snprintf(path, sizeof path, "%s/" KVQ_ADMIN_DIR, directory);
    if ((mkdir(path, 0700) != 0 && errno != EEXIST) || chmod(path, 0700) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot make %.200s: %s", path, strerror(errno));
        return KVQ_E_SYSTEM;
    }
    snprintf(path, sizeof path, "%s/" KVQ_EVENTS_SOCKET, directory);
    c->publisher = bind_at(c, ZMQ_PUB, path, 0600);
    return c->publisher ? 0 : fail("bind " KVQ_EVENTS_SOCKET " in the runtime directory", text);
}

int kvq__control_open(struct kvq__server *server, struct kvq__control **out, char *text)
{
    int fd;
    size_t size = sizeof fd;
    struct kvq__control *c = calloc(1, sizeof *c); // its arena stays untouched
    *out = c;
    if (!c) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for the control socket");
        return KVQ_E_NO_MEMORY;
    }
    c->server = server;
    kvq_arena_init(&c->arena, c->arena_memory, sizeof c->arena_memory);
    int error = open_sockets(c, text);
    if (error)
        return error;
    if (zmq_getsockopt(c->router, ZMQ_FD, &fd, &size) != 0)
        return fail("watch the control socket", text);
    error = uv_poll_init(&server->loop, &c->poll, fd);
    if (error) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot watch the control socket: %s", uv_strerror(error));
        return KVQ_E_SYSTEM;
    }
    c->poll.data = c->prepare.data = c->check.data = c->idle.data = c;
    uv_prepare_init(&server->loop, &c->prepare);
    uv_check_init(&server->loop, &c->check);
    uv_idle_init(&server->loop, &c->idle);
    uv_poll_start(&c->poll, UV_READABLE, on_poll);
    uv_prepare_start(&c->prepare, on_prepare);
    uv_check_start(&c->check, on_check);
    c->open = true;
    return 0;
}

void kvq__control_end(struct kvq__control *c)
{
    if (!c || !c->open)
        return;
    c->open = false;
    uv_close((uv_handle_t *)&c->poll, NULL);
    uv_close((uv_handle_t *)&c->prepare, NULL);
    uv_close((uv_handle_t *)&c->check, NULL);
    uv_close((uv_handle_t *)&c->idle, NULL);
}

bool kvq__control_idle(const struct kvq__control *c)
{
    return !c || (!c->busy && c->errands == 0);
}

void kvq__control_free(struct kvq__control **control)
{
    struct kvq__control *c = *control;
    char path[KVQ_CONFIG_PATH + 32];
    if (!c)
        return;
    assert(!c->busy && !c->open);
    if (c->router)
        zmq_close(c->router);
    if (c->publisher)
        zmq_close(c->publisher);
    if (c->context)
        zmq_ctx_term(c->context);
    static const char *const left[] = {KVQ_CONTROL_SOCKET, KVQ_EVENTS_SOCKET, KVQ_ADMIN_DIR};
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", c->server->config.runtime_dir, left[i]);
        if (remove(path) != 0 && errno != ENOENT)
            kvq__log(KVQ_LOG_WARN, "not_removed", "path=%s error=\"%s\"", path, strerror(errno));
    }
    free(c);
    *control = NULL;
}
