// SPDX-License-Identifier: Apache-2.0
//
// The control socket (ZeroMQ ROUTER): with keys.c the only file that knows ZeroMQ. Each connection
// that the front (front.h) lets in has a ROUTER of its own, so what comes out of it is that peer's.
// One request is at the poller at a time; others wait in ZeroMQ's queues, and connections take
// turns.
//
// ZeroMQ's descriptor is edge-triggered: it tells once that something changed, and any call on the
// socket, sending included, may use that up. So messages are looked for in its callback and
// again before and after each time the loop sleeps (prepare and check), and while some are left
// an idle handle keeps the loop from sleeping.
#include "daemon/control/control.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include "daemon/attach/attach.h"
#include "daemon/commands/dispatch.h"
#include "daemon/commands/doctor.h"
#include "daemon/control/audit.h"
#include "daemon/control/front.h"
#include "daemon/control/keys.h"
#include "daemon/control/roles.h"
#include "daemon/log/log.h"
#include "daemon/runtime/descriptors.h"
#include "daemon/runtime/history.h"
#include "daemon/runtime/server.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/store.h"
#include "proto/key_file.h"

enum {
    DRAIN = 32, // messages looked at before others get a turn
    ENVELOPE = 512,
    MOST_TASKS = 16,     // each has an arena
    KEY_CONNECTIONS = 8, // of a key that nobody displaces
    MOST_EVENTS = 64,    // in a reply, and so below the longest message
};

static_assert(MOST_EVENTS * (KVQ__EVENT_BYTES + 4) + KVQ_TEXT_BYTES < KVQ_MAX_MESSAGE, "they fit");

// What answers one connection.
struct backend {
    struct kvq__control *control;
    uint64_t serial; // never used twice
    uint32_t number; // the front's
    struct kvq__asker asker;
    uint32_t requests; // under way
    bool awaits;       // the daemon's end, or a reply shortly before it
    void *router;
    uv_poll_t poll;
};

// The way back to a ZeroMQ peer.
struct sender {
    uint64_t backend; // its serial
    uint8_t identity[ENVELOPE];
    size_t bytes;
    bool delimiter; // a REQ socket's empty frame
};

struct kvq__control {
    struct kvq__server *server;
    void *context;
    struct kvq__keys *keys; // NULL: nobody comes from another machine
    struct kvq__front *front;
    struct backend *backends[KVQ__FRONT_MOST]; // by the front's number
    uint32_t turn;                             // the number that is looked at next
    uint64_t last_serial;
    uv_prepare_t prepare;
    uv_check_t check;
    uv_idle_t idle;
    bool open, ending; // ending: no more messages are taken
    // Each of its own, so that those who may come in hide nobody who may not.
    struct kvq_log_budget refused_budget, connected_budget, audit_budget, asked_budget;

    // The request under way.
    bool busy; // at the poller
    struct kvq__mail mail;
    struct kvq__asker asker;
    struct sender sender;
    uint32_t n_tasks;
    LIST_HEAD(, control_task) tasks;
    Kvq__Request *request;
    Kvq__Reply reply;
    struct kvq_arena arena;
    uint8_t out[KVQ_MAX_MESSAGE];
    uint8_t arena_memory[KVQ_WIRE_ARENA];
};

// A request that the store's jobs have: others go on meanwhile.
struct control_task {
    struct kvq__task task;
    LIST_ENTRY(control_task) link;
    struct kvq__control *control;
    bool asks_again; // how far the daemon's end is
    struct kvq__asker asker;
    struct sender sender;
    Kvq__Request *request;
    Kvq__Reply reply;
    struct kvq_arena arena;
    uint8_t arena_memory[KVQ_WIRE_ARENA]; // last: most of it is never touched
};

static void drain_control(struct kvq__control *c);

// ---- Replies ----

// NULL: its connection has ended.
static struct backend *find_backend(const struct kvq__control *c, uint64_t serial)
{
    for (uint32_t i = 0; i < KVQ__FRONT_MOST; i++)
        if (c->backends[i] && c->backends[i]->serial == serial)
            return c->backends[i];
    return NULL;
}

static void count_request(const struct kvq__control *c, uint64_t serial, bool ended)
{
    struct backend *b = find_backend(c, serial);
    assert(!b || !ended || b->requests > 0);
    if (b)
        b->requests += ended ? -1u : 1u;
}

static void send_to(struct kvq__control *c, const struct sender *to, Kvq__Reply *reply,
                    struct kvq_arena *arena)
{
    size_t length;
    const struct backend *b = find_backend(c, to->backend);
    assert(to->bytes > 0 && to->bytes <= sizeof to->identity);
    if (!b)
        return;
    if (kvq_reply_pack(reply, c->out, sizeof c->out, &length) != 0) {
        kvq__reply_status(reply, arena, KVQ_E_LIMIT, "the reply is longer than a message");
        kvq_reply_pack(reply, c->out, sizeof c->out, &length);
    }
    if (reply->status < 0)
        kvq__refused_add(&c->server->control_refused, reply->status);
    // A peer that is gone or does not read is nobody's loss: ROUTER drops what it cannot send.
    if (zmq_send(b->router, to->identity, to->bytes, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return;
    if (to->delimiter)
        zmq_send(b->router, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT);
    zmq_send(b->router, c->out, length, ZMQ_DONTWAIT);
}

static void send_reply(struct kvq__control *c)
{
    send_to(c, &c->sender, &c->reply, &c->arena);
}

static void refuse_request(struct kvq__control *c, int status, const char *text)
{
    char quoted[256], who[256];
    assert(status < 0 && !c->busy);
    kvq__reply_status(&c->reply, &c->arena, status, text);
    kvq__log_client(&c->refused_budget, KVQ_LOG_WARN, "control_refused", "%s status=%s text=%s",
                    kvq__asker_text(&c->asker, who, sizeof who), kvq_status_name(status),
                    kvq__log_quote(quoted, sizeof quoted, text));
    send_reply(c);
}

// The end cuts off what is on its way to somebody: it waits a moment until he has gone.
static void wait_for_reader(struct kvq__control *c, uint64_t serial)
{
    struct backend *b = c->server->draining ? find_backend(c, serial) : NULL;
    if (b)
        b->awaits = true;
}

// In the log: changes always, questions at level debug.
static void tell_of(struct kvq__control *c, const struct kvq__asker *asker,
                    const Kvq__Request *request, int status)
{
    if (kvq__role_only_asks(request))
        kvq__audit_question(&c->asked_budget, asker, request, status);
    else
        kvq__audit(&c->audit_budget, asker, request, status);
}

static void came_back(struct kvq__mail *mail)
{
    struct kvq__control *c =
        (struct kvq__control *)((char *)mail - offsetof(struct kvq__control, mail));
    assert(c->busy);
    c->busy = false;
    count_request(c, c->sender.backend, true);
    if (!c->open)
        return;
    if (c->request->command_case == KVQ__REQUEST__COMMAND_KICK_CLIENT && c->reply.status == 0)
        kvq__attach_kick(c->server->attach, c->request->kick_client->id);
    kvq__role_explain(&c->asker, c->request, &c->arena, &c->reply);
    tell_of(c, &c->asker, c->request, c->reply.status);
    send_reply(c);
    wait_for_reader(c, c->sender.backend);
    drain_control(c);
}

// Poller's thread.
static void run_command(struct kvq__mail *mail)
{
    struct kvq__control *c =
        (struct kvq__control *)((char *)mail - offsetof(struct kvq__control, mail));
    struct kvq__dispatch d = {.core = c->server->core,
                              .identity = &c->server->identity,
                              .peer = &c->asker.peer,
                              .now_ns = kvq_now_ns()};
    assert(c->busy && c->request);
    kvq__dispatch_run(&d, c->request, &c->arena, &c->reply);
    kvq__mailbox_post(&c->server->box, &c->mail, came_back);
}

// ---- Requests ----

static void task_done(struct kvq__task *task)
{
    struct control_task *e = (struct control_task *)task; // its first member
    struct kvq__control *c = e->control;
    assert(c->n_tasks > 0);
    c->n_tasks--;
    LIST_REMOVE(e, link);
    count_request(c, e->sender.backend, true);
    kvq__role_explain(&e->asker, e->request, &e->arena, &e->reply);
    if (!e->asks_again)
        tell_of(c, &e->asker, e->request, e->reply.status);
    if (c->open)
        send_to(c, &e->sender, &e->reply, &e->arena);
    wait_for_reader(c, e->sender.backend);
    free(e);
}

// Whether this peer may have one more request with the store jobs.
static bool task_allowed(const struct kvq__control *c)
{
    const struct control_task *e;
    uint32_t own = 0;
    LIST_FOREACH (e, &c->tasks, link)
        own += e->asker.peer.uid == c->asker.peer.uid;
    return c->asker.role == KVQ__ROLE_ADMIN ? c->n_tasks < MOST_TASKS
                                            : kvq__share_allows(own, 1, c->n_tasks, MOST_TASKS);
}

// The message was unpacked before, so it can be again.
static void start_task(struct kvq__control *c, zmq_msg_t *body)
{
    char text[KVQ_TEXT_BYTES] = "";
    struct control_task *e = task_allowed(c) ? calloc(1, sizeof *e) : NULL;
    if (!e) {
        refuse_request(c, KVQ_E_BUSY, "too many saves and the like are under way; try again");
        return;
    }
    e->control = c;
    e->asker = c->asker;
    e->sender = c->sender;
    kvq_arena_init(&e->arena, e->arena_memory, sizeof e->arena_memory);
    kvq__reply__init(&e->reply);
    e->reply.epoch = c->reply.epoch;
    e->reply.id = c->reply.id;
    int error =
        kvq_request_unpack(zmq_msg_data(body), zmq_msg_size(body), &e->arena, &e->request, text);
    if (error) {
        refuse_request(c, error, text);
        free(e);
        return;
    }
    e->task = (struct kvq__task){.request = e->request,
                                 .arena = &e->arena,
                                 .reply = &e->reply,
                                 .peer = &e->asker.peer,
                                 .done = task_done};
    struct backend *b = find_backend(c, e->sender.backend);
    if (e->request->command_case == KVQ__REQUEST__COMMAND_DRAIN) {
        e->asks_again = c->server->draining && !e->request->drain->now;
        if (b && e->asker.role == KVQ__ROLE_ADMIN)
            b->awaits = true;
    }
    assert(c->n_tasks < MOST_TASKS);
    c->n_tasks++;
    LIST_INSERT_HEAD(&c->tasks, e, link);
    count_request(c, e->sender.backend, false);
    kvq__jobs_start(c->server->jobs, &e->task);
}

// Those of all namespaces, so only for somebody with a role.
static void list_events(struct kvq__control *c)
{
    const struct kvq__history *history = c->server->history;
    char text[KVQ_TEXT_BYTES];
    Kvq__EventList *list = kvq_arena_alloc(&c->arena, sizeof *list);
    Kvq__Event **events = kvq_arena_alloc(&c->arena, MOST_EVENTS * sizeof(Kvq__Event *));
    if (!c->asker.peer.admin) {
        kvq__role_text(&c->asker, c->request, text);
        refuse_request(c, KVQ_E_PERMISSION, text);
        return;
    }
    if (!events) {
        refuse_request(c, KVQ_E_NO_MEMORY, "no room left for the reply");
        return;
    }
    kvq__event_list__init(list);
    list->last = history->last;
    list->events = events;
    uint64_t number = kvq__history_first(history, c->request->list_events->after);
    while (number <= history->last && list->n_events < MOST_EVENTS) {
        if ((events[list->n_events] = kvq__history_get(history, number, &c->arena)))
            list->n_events++;
        number = kvq__history_first(history, number);
    }
    c->reply.events = list;
    c->reply.result_case = KVQ__REPLY__RESULT_EVENTS;
    send_reply(c);
}

// Of what is checked before anything else of a request: whether it can be meant as it is read.
static int check_request(const Kvq__Request *request, char *text)
{
    uint32_t protocol = request->protocol;
    assert(request->base.descriptor);
    if (protocol >= KVQ_PROTOCOL_MIN && protocol <= KVQ_PROTOCOL_MAX)
        return kvq__dispatch_check_names(request, text);
    snprintf(text, KVQ_TEXT_BYTES, "protocol %u; this daemon (%s) speaks %d to %d", protocol,
             KVQ_VERSION_TEXT, KVQ_PROTOCOL_MIN, KVQ_PROTOCOL_MAX);
    return KVQ_E_VERSION;
}

static void take_request(struct kvq__control *c, zmq_msg_t *body, bool extra)
{
    char text[KVQ_TEXT_BYTES] = "";
    assert(!c->busy && c->open);
    c->arena.used = 0;
    kvq__reply__init(&c->reply);
    c->reply.epoch = c->server->identity.epoch;
    if (extra) {
        refuse_request(c, KVQ_E_PROTOCOL, "a request is one frame (behind an optional empty one)");
        return;
    }
    int error =
        kvq_request_unpack(zmq_msg_data(body), zmq_msg_size(body), &c->arena, &c->request, text);
    if (error) {
        c->reply.id = kvq_request_id(zmq_msg_data(body), zmq_msg_size(body));
        refuse_request(c, error, text);
        return;
    }
    c->reply.id = c->request->id;
    c->asker.peer.admin = c->asker.role >= kvq__role_needed(c->request);
    error = check_request(c->request, text);
    if (error) {
        refuse_request(c, error, text);
    } else if (kvq__dispatch_is_for_clients(c->request->command_case)) {
        refuse_request(c, KVQ_E_INVALID, "that command belongs to the attach socket");
    } else if ((error = kvq__role_check(&c->asker, c->request, text)) != 0) {
        kvq__reply_status(&c->reply, &c->arena, error, text);
        tell_of(c, &c->asker, c->request, error);
        send_reply(c);
    } else if (c->request->command_case == KVQ__REQUEST__COMMAND_DOCTOR) {
        kvq__doctor(c->server, &c->arena, &c->reply);
        send_reply(c);
    } else if (c->request->command_case == KVQ__REQUEST__COMMAND_LIST_EVENTS) {
        list_events(c);
    } else if (kvq__jobs_takes(c->server->jobs, c->request)) {
        start_task(c, body);
    } else if (!kvq__dispatch_takes(c->request->command_case)) {
        refuse_request(c, KVQ_E_INVALID,
                       "that command belongs to the attach socket, or to a newer daemon");
    } else {
        c->busy = true;
        count_request(c, c->sender.backend, false);
        kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, run_command);
    }
}

// The key that this connection has shown, as the configuration has it now. NULL: it does not.
static const struct kvq_config_key *key_of(const struct kvq__control *c, const struct backend *b)
{
    static const uint8_t none[KVQ_KEY_BYTES];
    bool shown = memcmp(b->asker.peer.key, none, sizeof none) != 0;
    return shown ? kvq__config_key_of(&c->server->config, b->asker.peer.key) : NULL;
}

// Who asks by this connection, with the role that the configuration gives now.
static struct kvq__asker asker_of(const struct kvq__control *c, const struct backend *b)
{
    struct kvq__asker asker = b->asker;
    const struct kvq_config_key *key = key_of(c, b);
    if (asker.address[0]) {
        asker.role = key ? (enum kvq__role)key->role : KVQ__ROLE_NONE;
        snprintf(asker.key, sizeof asker.key, "%s", key ? key->name : "");
    } else {
        asker.role = kvq__server_role(c->server, &asker.peer);
    }
    return asker;
}

static bool readable(const struct backend *b)
{
    int events = 0;
    size_t size = sizeof events;
    return zmq_getsockopt(b->router, ZMQ_EVENTS, &events, &size) == 0 && (events & ZMQ_POLLIN);
}

// Receives one whole message: identity, maybe an empty frame, body. False if there is none.
static bool receive(struct kvq__control *c, const struct backend *b)
{
    assert(!c->busy);
    zmq_msg_t frame, body;
    int parts = 0;
    size_t taken = 0;
    bool more = true, have_body = false;
    c->sender.backend = b->serial;
    c->sender.delimiter = false;
    c->sender.bytes = 0;
    c->asker = asker_of(c, b);
    zmq_msg_init(&body);
    while (more) {
        zmq_msg_init(&frame);
        if (zmq_msg_recv(&frame, b->router, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&frame);
            zmq_msg_close(&body);
            return false;
        }
        more = zmq_msg_more(&frame);
        size_t size = zmq_msg_size(&frame);
        taken += size + KVQ__FRONT_FRAME;
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
    // When nothing whole is left, what ZeroMQ has is less than one message.
    kvq__front_took(c->front, b->number, readable(b) ? taken : SIZE_MAX);
    if (have_body && c->sender.bytes)
        take_request(c, &body, parts > 2 + c->sender.delimiter);
    zmq_msg_close(&body);
    return true;
}

static bool any_readable(const struct kvq__control *c)
{
    for (uint32_t i = 0; i < KVQ__FRONT_MOST; i++)
        if (c->backends[i] && readable(c->backends[i]))
            return true;
    return false;
}

// A message of each connection in turn.
static void drain_control(struct kvq__control *c)
{
    uint32_t quiet = 0; // so many in a row had none
    for (int taken = 0;
         taken < DRAIN && quiet < KVQ__FRONT_MOST && c->open && !c->ending && !c->busy;) {
        const struct backend *b = c->backends[c->turn];
        c->turn = (c->turn + 1) % KVQ__FRONT_MOST;
        bool got = b && receive(c, b);
        taken += got;
        quiet = got ? 0 : quiet + 1;
    }
}

static void on_idle(uv_idle_t *handle)
{
    (void)handle; // its being active keeps the loop from sleeping
}

static void on_prepare(uv_prepare_t *handle)
{
    struct kvq__control *c = handle->data;
    kvq__keys_look(c->keys);
    if (!c->busy && !c->ending && any_readable(c))
        uv_idle_start(&c->idle, on_idle);
    else
        uv_idle_stop(&c->idle);
}

static void on_check(uv_check_t *handle)
{
    drain_control(handle->data);
}

static void on_poll(uv_poll_t *handle, int status, int events)
{
    const struct backend *b = handle->data;
    (void)status;
    (void)events;
    drain_control(b->control);
}

// ---- Opening and closing ----

static int fail_control(const char *what, char *text)
{
    snprintf(text, KVQ_TEXT_BYTES, "cannot %s: %s", what, zmq_strerror(zmq_errno()));
    return KVQ_E_SYSTEM;
}

// far: with the connection of that serial, which has to show a key; 0: one of this machine.
static void *bind_router(struct kvq__control *c, const char *path, uint64_t far)
{
    char address[KVQ_CONFIG_PATH + 64];
    const int waiting = KVQ__FRONT_WAITING, queue = 64;
    const int linger = 0, patience = KVQ_ATTACH_TIMEOUT_MS;
    const int64_t longest = KVQ_MAX_MESSAGE;
    void *socket = zmq_socket(c->context, ZMQ_ROUTER);
    if (!socket)
        return NULL;
    zmq_setsockopt(socket, ZMQ_RCVHWM, &waiting, sizeof waiting);
    zmq_setsockopt(socket, ZMQ_SNDHWM, &queue, sizeof queue);
    zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(socket, ZMQ_HANDSHAKE_IVL, &patience, sizeof patience);
    zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &longest, sizeof longest);
    snprintf(address, sizeof address, "ipc://%s", path);
    bool good = far == 0 || kvq__keys_secure(c->keys, socket, far);
    if (good && zmq_bind(socket, address) == 0 && chmod(path, 0600) == 0)
        return socket;
    zmq_close(socket);
    return NULL;
}

static void on_backend_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static void close_backend(void *context, uint32_t number)
{
    struct kvq__control *c = context;
    struct backend *b = c->backends[number];
    assert(number < KVQ__FRONT_MOST);
    if (!b)
        return;
    c->backends[number] = NULL;
    uv_close((uv_handle_t *)&b->poll, on_backend_closed);
    zmq_close(b->router);
}

// A connected socket to a ROUTER that nobody else can reach: its path is in a directory of the
// daemon's user alone, and only there until it is connected to. ZeroMQ goes on listening: ending
// that would end the connection.
static int connect_router(struct kvq__control *c, struct backend *b, char *text)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.80s/" KVQ_ADMIN_DIR "/c%u",
             c->server->config.runtime_dir, (unsigned)(b->serial % 100000));
    b->router = bind_router(c, address.sun_path, b->asker.address[0] ? b->serial : 0);
    if (!b->router)
        return fail_control("serve another connection", text);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0) {
        unlink(address.sun_path);
        return fd;
    }
    snprintf(text, KVQ_TEXT_BYTES, "cannot serve another connection: %s", strerror(errno));
    unlink(address.sun_path);
    zmq_close(b->router);
    if (fd >= 0)
        close(fd);
    return KVQ_E_SYSTEM;
}

static int open_router(void *context, uint32_t number, const struct kvq__asker *asker, char *text)
{
    struct kvq__control *c = context;
    int event;
    size_t size = sizeof event;
    struct backend *b = calloc(1, sizeof *b);
    assert(!c->backends[number]);
    if (!b) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for another connection");
        return KVQ_E_NO_MEMORY;
    }
    b->control = c;
    b->serial = ++c->last_serial;
    b->number = number;
    b->asker = *asker;
    int fd = connect_router(c, b, text);
    if (fd < 0) {
        free(b);
        return fd;
    }
    if (zmq_getsockopt(b->router, ZMQ_FD, &event, &size) != 0 ||
        uv_poll_init(&c->server->loop, &b->poll, event) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot watch another connection");
        zmq_close(b->router);
        close(fd);
        free(b);
        return KVQ_E_SYSTEM;
    }
    b->poll.data = b;
    uv_poll_start(&b->poll, UV_READABLE, on_poll);
    c->backends[number] = b;
    return fd;
}

static bool is_backend_busy(void *context, uint32_t number)
{
    const struct kvq__control *c = context;
    const struct backend *b = c->backends[number];
    assert(number < KVQ__FRONT_MOST);
    return b && (b->requests > 0 || readable(b));
}

// One of the first few connections of a key that the configuration has: no key keeps out others.
static bool is_backend_known(void *context, uint32_t number)
{
    const struct kvq__control *c = context;
    const struct backend *b = c->backends[number];
    uint32_t earlier = 0;
    assert(number < KVQ__FRONT_MOST);
    if (!b || !key_of(c, b))
        return false;
    for (uint32_t i = 0; i < KVQ__FRONT_MOST; i++)
        earlier += c->backends[i] && c->backends[i]->serial < b->serial &&
                   memcmp(c->backends[i]->asker.peer.key, b->asker.peer.key, KVQ_KEY_BYTES) == 0;
    return earlier < KEY_CONNECTIONS;
}

// Whether a key may come in by that connection; from then on it is that key's.
static bool admit_key(void *context, uint64_t serial, const uint8_t *public_key)
{
    struct kvq__control *c = context;
    struct backend *b = find_backend(c, serial);
    const struct kvq_config_key *key = kvq__config_key_of(&c->server->config, public_key);
    char hex[KVQ_KEY_HEX], who[256];
    if (!b || !b->asker.address[0])
        return false;
    if (key)
        memcpy(b->asker.peer.key, public_key, KVQ_KEY_BYTES);
    kvq_key_to_hex(public_key, hex);
    const struct kvq__asker asker = asker_of(c, b);
    kvq__asker_text(&asker, who, sizeof who);
    if (key)
        kvq__log_client(&c->connected_budget, KVQ_LOG_INFO, "control_connected", "%s role=%s", who,
                        kvq__role_name(asker.role));
    else
        kvq__log_client(&c->refused_budget, KVQ_LOG_WARN, "control_refused",
                        "%s status=%s text=\"no [key NAME] has public = %s\"", who,
                        kvq_status_name(KVQ_E_PERMISSION), hex);
    return key != NULL;
}

static int open_sockets(struct kvq__control *c, char *text)
{
    char path[KVQ_CONFIG_PATH + 32];
    const char *directory = c->server->config.runtime_dir;
    c->context = zmq_ctx_new();
    if (!c->context)
        return fail_control("start ZeroMQ", text);
    // For sockets of connections, which nobody else may get at, and for HTTP's token.
    snprintf(path, sizeof path, "%s/" KVQ_ADMIN_DIR, directory);
    if ((mkdir(path, 0700) != 0 && errno != EEXIST) || chmod(path, 0700) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot make %.200s: %s", path, strerror(errno));
        return KVQ_E_SYSTEM;
    }
    const struct kvq_config *config = &c->server->config;
    int error = config->control_address[0]
                    ? kvq__keys_open(&c->server->loop, c->context, config->control_key_file,
                                     admit_key, c, &c->keys, text)
                    : 0;
    if (error)
        return error;
    const struct kvq__front_backend backend = {.context = c,
                                               .open = open_router,
                                               .busy = is_backend_busy,
                                               .known = is_backend_known,
                                               .close = close_backend};
    return kvq__front_open(c->server, &backend, &c->front, text);
}

int kvq__control_open(struct kvq__server *server, struct kvq__control **out, char *text)
{
    struct kvq__control *c = calloc(1, sizeof *c); // its arena stays untouched
    *out = c;
    if (!c) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for the control socket");
        return KVQ_E_NO_MEMORY;
    }
    c->server = server;
    LIST_INIT(&c->tasks);
    kvq_arena_init(&c->arena, c->arena_memory, sizeof c->arena_memory);
    int error = open_sockets(c, text);
    if (error)
        return error;
    c->prepare.data = c->check.data = c->idle.data = c;
    uv_prepare_init(&server->loop, &c->prepare);
    uv_check_init(&server->loop, &c->check);
    uv_idle_init(&server->loop, &c->idle);
    uv_prepare_start(&c->prepare, on_prepare);
    uv_check_start(&c->check, on_check);
    c->open = true;
    return 0;
}

void kvq__control_hush(struct kvq__control *c)
{
    if (c)
        c->ending = true;
}

void kvq__control_end(struct kvq__control *c)
{
    if (!c)
        return;
    kvq__front_end(c->front);
    kvq__keys_end(c->keys);
    if (!c->open) // it was never opened whole
        return;
    c->open = false;
    for (uint32_t i = 0; i < KVQ__FRONT_MOST; i++)
        close_backend(c, i);
    uv_close((uv_handle_t *)&c->prepare, NULL);
    uv_close((uv_handle_t *)&c->check, NULL);
    uv_close((uv_handle_t *)&c->idle, NULL);
}

bool kvq__control_awaited(const struct kvq__control *c)
{
    for (uint32_t i = 0; c && i < KVQ__FRONT_MOST; i++)
        if (c->backends[i] && c->backends[i]->awaits)
            return true;
    return false;
}

bool kvq__control_idle(const struct kvq__control *c)
{
    return !c || (!c->busy && c->n_tasks == 0);
}

void kvq__control_free(struct kvq__control **control)
{
    struct kvq__control *c = *control;
    char path[KVQ_CONFIG_PATH + 32], quoted[sizeof path + 16];
    if (!c)
        return;
    assert(!c->busy && !c->open);
    assert(c->n_tasks == 0 && LIST_EMPTY(&c->tasks));
    kvq__front_free(&c->front);
    kvq__keys_free(&c->keys);
    if (c->context)
        zmq_ctx_term(c->context);
    snprintf(path, sizeof path, "%s/" KVQ_ADMIN_DIR, c->server->config.runtime_dir);
    if (remove(path) != 0 && errno != ENOENT)
        kvq__log(KVQ_LOG_WARN, "not_removed", "path=%s error=\"%s\"",
                 kvq__log_quote(quoted, sizeof quoted, path), strerror(errno));
    free(c);
    *control = NULL;
}
