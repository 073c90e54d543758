// SPDX-License-Identifier: Apache-2.0
//
// Commands of the attach socket. Each has up to three parts: prepare (loop's thread: system
// objects), run (poller's thread: the core), finish (loop's thread: reply, or clean up).
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/attach/internal.h"
#include "daemon/commands/dispatch.h"
#include "daemon/commands/doctor.h"
#include "daemon/runtime/descriptors.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/codebooks.h"
#include "kernels/layout.h"

static void finish(struct kvq__mail *mail);

static struct kvq__connection *of_mail(struct kvq__mail *mail)
{
    return (struct kvq__connection *)((char *)mail - offsetof(struct kvq__connection, mail));
}

static void set_status(struct kvq__connection *c, int status, const char *text)
{
    kvq__reply_status(&c->reply, &c->arena, status, text);
}

static void back_to_loop(struct kvq__connection *c)
{
    kvq__mailbox_post(&c->server->box, &c->mail, finish);
}

// ---- Poller's thread ----

static void line_gone_on_loop(struct kvq__mail *mail)
{
    kvq__line_give_back((struct kvq__line *)((char *)mail - offsetof(struct kvq__line, mail)));
}

static void line_closed(struct kvq__port *port)
{
    struct kvq__line *line = (struct kvq__line *)port; // its first member
    struct kvq__connection *c = line->connection;
    LIST_REMOVE(line, link);
    if (c->detaching) {
        kvq__mailbox_post(&c->server->box, &line->mail, line_gone_on_loop);
        kvq__connection_check_gone(c);
    } else {
        back_to_loop(c); // c->line is it
    }
}

static void region_gone_on_loop(struct kvq__mail *mail)
{
    kvq__region_give_back((struct kvq__region *)mail); // its first member
}

void kvq__attach_buffer_gone(struct kvq__attach *attach, uint64_t client, uint32_t buffer)
{
    struct kvq__connection *c;
    struct kvq__region *region = NULL;
    LIST_FOREACH (c, &attach->clients, client_link)
        if (c->client_id == client)
            break;
    if (c)
        LIST_FOREACH (region, &c->regions, link)
            if (region->id == buffer)
                break;
    assert(region);
    LIST_REMOVE(region, link);
    bool asked = c->region == region && !c->detaching;
    kvq__mailbox_post(&c->server->box, &region->mail, region_gone_on_loop);
    if (asked)
        back_to_loop(c);
    else if (c->detaching)
        kvq__connection_check_gone(c);
}

static void complain_on_loop(struct kvq__mail *mail)
{
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)mail - offsetof(struct kvq__connection, broken_mail));
    kvq__connection_end(c, c->broken_text);
}

static void complain(struct kvq__member *member, const char *text)
{
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)member - offsetof(struct kvq__connection, member));
    snprintf(c->broken_text, sizeof c->broken_text, "%s", text);
    kvq__mailbox_post(&c->server->box, &c->broken_mail, complain_on_loop);
}

static int run_hello(struct kvq__connection *c, char *text)
{
    int error =
        kvq__client_attach(c->server->core, &c->peer, c->name, &c->client, &c->client_id, text);
    if (error)
        return error;
    kvq__share_init(&c->member.share);
    c->member.complain = complain;
    LIST_INSERT_HEAD(&c->attach->clients, c, client_link);
    c->reply.hello->client_id = c->client_id;
    return 0;
}

static int run_open_queue(struct kvq__connection *c, char *text)
{
    struct kvq__line *line = c->line;
    int error = kvq__queue_open(c->client, &line->port.queue, text);
    if (error)
        return error;
    line->id = ++c->next_line;
    line->port.closed = line_closed;
    error = kvq__port_add(c->server->poller, &line->port, text);
    if (error) {
        kvq__queue_close(&line->port.queue);
        return error;
    }
    LIST_INSERT_HEAD(&c->lines, line, link);
    c->reply.open_queue->queue = line->id;
    return 0;
}

// Returns 1 when the line's closing will bring the command back.
static int run_close_queue(struct kvq__connection *c, char *text)
{
    uint32_t id = c->request->close_queue->queue;
    LIST_FOREACH (c->line, &c->lines, link)
        if (c->line->id == id)
            break;
    if (!c->line) {
        snprintf(text, KVQ_TEXT_BYTES, "no queue %u is open", id);
        return KVQ_E_INVALID;
    }
    kvq__port_remove(c->server->poller, &c->line->port);
    return 1;
}

static int run_add_buffer(struct kvq__connection *c, char *text)
{
    struct kvq__region *region = c->region;
    struct kvq__buffer_memory memory = {
        .host = region->host.shm.map, .gpu = region->at, .bytes = region->bytes, .on = region->gpu};
    int error = kvq__buffer_add(c->client, &memory, &region->id, text);
    if (error)
        return error;
    LIST_INSERT_HEAD(&c->regions, region, link);
    c->reply.create_buffer->buffer = region->id;
    return 0;
}

// Returns 1 when buffer_gone will bring the command back.
static int run_close_buffer(struct kvq__connection *c, char *text)
{
    uint32_t id = c->request->close_buffer->buffer;
    LIST_FOREACH (c->region, &c->regions, link)
        if (c->region->id == id)
            break;
    if (!c->region) {
        snprintf(text, KVQ_TEXT_BYTES, "no buffer %u is registered", id);
        return KVQ_E_BUFFER;
    }
    int error = kvq__buffer_remove(c->client, id, text);
    if (error)
        c->region = NULL;
    return error ? error : 1;
}

static void run(struct kvq__mail *mail)
{
    struct kvq__connection *c = of_mail(mail);
    char text[KVQ_TEXT_BYTES] = "";
    int error = 0;
    switch (c->request->command_case) {
    case KVQ__REQUEST__COMMAND_HELLO:
        error = run_hello(c, text);
        break;
    case KVQ__REQUEST__COMMAND_OPEN_QUEUE:
        error = run_open_queue(c, text);
        break;
    case KVQ__REQUEST__COMMAND_CLOSE_QUEUE:
        error = run_close_queue(c, text);
        break;
    case KVQ__REQUEST__COMMAND_CREATE_BUFFER:
    case KVQ__REQUEST__COMMAND_IMPORT_BUFFER:
        error = run_add_buffer(c, text);
        break;
    case KVQ__REQUEST__COMMAND_CLOSE_BUFFER:
        error = run_close_buffer(c, text);
        break;
    case KVQ__REQUEST__COMMAND_OPEN_TIMELINE:
    case KVQ__REQUEST__COMMAND_OPEN_EVENTS:
        error = kvq__order_open(c, text);
        break;
    default: {
        if (kvq__local_run(c, &error, text))
            break;
        struct kvq__dispatch d = {.core = c->server->core,
                                  .identity = &c->server->identity,
                                  .peer = &c->peer,
                                  .client = c->client,
                                  .now_ns = kvq__now_ns()};
        kvq__dispatch_run(&d, c->request, &c->arena, &c->reply);
        break;
    }
    }
    if (error == 1)
        return;
    if (error)
        set_status(c, error, text);
    back_to_loop(c);
}

static void gone_on_loop(struct kvq__mail *mail)
{
    struct kvq__connection *c = of_mail(mail);
    kvq__spares_give_back(c);
    c->gone_due = true;
    if (c->giving_back == 0)
        kvq__connection_gone(c);
}

void kvq__connection_check_gone(struct kvq__connection *c)
{
    if (c->holding || !LIST_EMPTY(&c->lines) || !LIST_EMPTY(&c->regions) || !LIST_EMPTY(&c->tables))
        return;
    if (c->client)
        LIST_REMOVE(c, client_link);
    kvq__mailbox_post(&c->server->box, &c->mail, gone_on_loop);
}

static void detach(struct kvq__mail *mail)
{
    struct kvq__connection *c = of_mail(mail);
    c->detaching = true;
    c->holding = true; // until all lines were told, nobody posts the end
    c->member.broken = true;
    if (c->client)
        kvq__client_detach(c->client);
    struct kvq__line *line = LIST_FIRST(&c->lines), *next;
    for (; line; line = next) {
        next = LIST_NEXT(line, link);
        kvq__port_remove(c->server->poller, &line->port);
    }
    c->holding = false;
    kvq__connection_check_gone(c);
}

// ---- Loop's thread ----

void kvq__connection_detach(struct kvq__connection *c)
{
    c->state = KVQ__CONNECTION_ENDING;
    kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, detach);
}

int kvq__attach_no_room(char *text)
{
    snprintf(text, KVQ_TEXT_BYTES, "no room left for the reply");
    return KVQ_E_NO_MEMORY;
}

int kvq__attach_agree(uint32_t min, uint32_t max, uint32_t our_min, uint32_t our_max,
                      const char *what, uint32_t *agreed, char *text)
{
    *agreed = max < our_max ? max : our_max;
    if (min <= max && *agreed >= our_min && *agreed >= min)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "the client speaks %s %u to %u, this daemon (%s) %u to %u; update the older one", what,
             min, max, KVQ_VERSION_TEXT, our_min, our_max);
    return KVQ_E_VERSION;
}

static bool put_gpus(struct kvq__connection *c, Kvq__HelloReply *reply)
{
    uint32_t n = kvq__gpus_count(c->server->gpus);
    Kvq__Gpu *gpus = kvq_arena_alloc(&c->arena, n * sizeof *gpus);
    reply->gpus = kvq_arena_alloc(&c->arena, n * sizeof *reply->gpus);
    if (!gpus || !reply->gpus)
        return n == 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct kvq__gpu *gpu = kvq__gpus_get(c->server->gpus, i);
        kvq__gpu__init(&gpus[i]);
        gpus[i].uuid.data = (uint8_t *)(uintptr_t)kvq__gpu_uuid(gpu);
        gpus[i].uuid.len = sizeof(struct kvq_gpu_uuid);
        gpus[i].name = kvq_arena_text(&c->arena, kvq__gpu_name(gpu));
        gpus[i].orders = kvq__gpu_has_memory_ops(gpu) + 2u * kvq__gpu_has_events(gpu);
        reply->gpus[i] = &gpus[i];
    }
    reply->n_gpus = n;
    return true;
}

// Whether there is room for one more client; its connection is counted already.
static int check_clients(const struct kvq__connection *c, char *text)
{
    uint64_t most = c->server->config.max_clients;
    uint32_t all = c->attach->count - 1;
    uint32_t own = kvq__attach_held(c->attach, c->peer.uid).connections - 1;
    if (all >= most) {
        snprintf(text, KVQ_TEXT_BYTES, "%llu clients are attached already (max_clients)",
                 (unsigned long long)most);
        return KVQ_E_LIMIT;
    }
    if (!c->peer.admin && !kvq__share_allows(own, 1, all, most)) {
        snprintf(
            text, KVQ_TEXT_BYTES,
            "user %u has %u of %u clients and max_clients = %llu; one user gets as many as stay "
            "free for others; close some, or have max_clients raised",
            c->peer.uid, own, all, (unsigned long long)most);
        return KVQ_E_LIMIT;
    }
    return 0;
}

static int prepare_hello(struct kvq__connection *c, const Kvq__Hello *hello, char *text)
{
    const struct kvq__identity *us = &c->server->identity;
    uint32_t layout = 0;
    int error = kvq__attach_agree(hello->protocol_min, hello->protocol_max, KVQ_PROTOCOL_MIN,
                                  KVQ_PROTOCOL_MAX, "protocol", &c->protocol, text);
    if (error == 0 && (hello->layout_min || hello->layout_max))
        error = kvq__attach_agree(hello->layout_min, hello->layout_max, KVQ_LAYOUT_ID,
                                  KVQ_LAYOUT_ID, "block layout", &layout, text);
    if (error)
        return error;
    error = check_clients(c, text);
    if (error)
        return error;
    Kvq__HelloReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    snprintf(c->name, sizeof c->name, "%s", hello->client_name);
    kvq__hello_reply__init(reply);
    reply->protocol = c->protocol;
    reply->layout = layout;
    reply->daemon_version = kvq_arena_text(&c->arena, us->version);
    reply->backend = kvq_arena_text(&c->arena, us->backend);
    reply->isa = kvq_arena_text(&c->arena, us->isa);
    if (!put_gpus(c, reply))
        return kvq__attach_no_room(text);
    reply->epoch_changed = hello->last_epoch != 0 && hello->last_epoch != us->epoch;
    c->reply.hello = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_HELLO;
    c->fds[0] = c->server->page.fd;
    c->n_fds = 1;
    return 0;
}

static int prepare_open_queue(struct kvq__connection *c, char *text)
{
    int error;
    Kvq__OpenQueueReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    c->line = kvq__line_new(c, &error, text);
    if (!c->line)
        return error;
    kvq__open_queue_reply__init(reply);
    reply->request_slots = KVQ_REQ_SLOTS;
    reply->reply_slots = KVQ_CQ_SLOTS;
    c->reply.open_queue = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_OPEN_QUEUE;
    const int fds[] = {c->line->request.fd, c->line->reply.fd, c->line->request_event,
                       c->line->wake_theirs};
    memcpy(c->fds, fds, sizeof fds);
    c->n_fds = 4;
    return 0;
}

static struct kvq__region *make_region(struct kvq__connection *c, struct kvq__packet *packet,
                                       int *error, char *text)
{
    const Kvq__CreateBuffer *create = c->request->create_buffer;
    const Kvq__ImportBuffer *import = c->request->import_buffer;
    const bool makes = c->request->command_case == KVQ__REQUEST__COMMAND_CREATE_BUFFER;
    const bool on_host = makes ? create->gpu.len == 0 : !import->gpu;
    *error = on_host ? kvq__attach_check_pins(c, text) : 0;
    if (*error)
        return NULL;
    if (makes)
        return create->gpu.len ? kvq__region_new_on(c, create->bytes, &create->gpu, error, text)
                               : kvq__region_new(c, create->bytes, error, text);
    if (!import->gpu)
        return kvq__region_import(c, packet->fds[0], import->offset, import->bytes, error, text);
    struct kvq__region *region =
        kvq__region_import_on(c, packet->n_fds ? packet->fds[0] : -1, import, error, text);
    if (region)
        packet->n_fds = 0; // the region has it now
    return region;
}

static int prepare_buffer(struct kvq__connection *c, struct kvq__packet *packet, char *text)
{
    int error;
    Kvq__CreateBufferReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    c->region = make_region(c, packet, &error, text);
    if (!c->region)
        return error;
    kvq__region_count(c->region);
    kvq__create_buffer_reply__init(reply);
    reply->bytes = c->region->bytes;
    c->reply.create_buffer = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_CREATE_BUFFER;
    return 0;
}

// ---- What takes long ----

// A thread of libuv's.
static void make_on_gpu(uv_work_t *work)
{
    struct kvq__connection *c = work->data;
    c->error = 0;
    if (c->region)
        kvq__region_make(c->region);
    else if (c->table)
        kvq__local_make(c);
    else
        kvq__order_make(c);
}

static void made_on_gpu(uv_work_t *work, int status)
{
    struct kvq__connection *c = work->data;
    (void)status;
    if (c->error == 0) {
        kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, run);
        return;
    }
    set_status(c, c->error, c->text);
    finish(&c->mail);
}

// Whether a GPU's driver has a part in the command, which the core does not have.
static bool needs_gpu(const struct kvq__connection *c)
{
    return c->request->command_case == KVQ__REQUEST__COMMAND_OPEN_TIMELINE ||
           c->request->command_case == KVQ__REQUEST__COMMAND_OPEN_EVENTS ||
           (c->region && kvq__gpus_count(c->server->gpus) > 0) || (c->table && c->table->gpu);
}

// What can be told of a buffer or timeline once it is made.
static void put_made(struct kvq__connection *c)
{
    kvq__local_put_made(c);
    Kvq__Request__CommandCase command = c->request->command_case;
    if (command == KVQ__REQUEST__COMMAND_OPEN_TIMELINE ||
        command == KVQ__REQUEST__COMMAND_OPEN_EVENTS) {
        kvq__order_put(c);
    } else if (command == KVQ__REQUEST__COMMAND_CREATE_BUFFER) {
        c->reply.create_buffer->allocation_bytes = c->region->piece.bytes;
        c->fds[0] = c->region->gpu ? c->region->fd : c->region->host.shm.fd;
        c->n_fds = 1;
    }
    if (c->region && c->reply.result_case == KVQ__REPLY__RESULT_CREATE_BUFFER)
        c->reply.create_buffer->on_gpu = c->region->at != 0;
}

// Notes what a command has made, in case that its client does not wait for the reply.
static void note_made(struct kvq__connection *c)
{
    const Kvq__Reply *r = &c->reply;
    c->made.request = c->request->id;
    c->made.back = KVQ__REQUEST__COMMAND__NOT_SET;
    if (r->status != 0)
        return;
    switch (c->request->command_case) {
    case KVQ__REQUEST__COMMAND_OPEN_QUEUE:
        c->made.back = KVQ__REQUEST__COMMAND_CLOSE_QUEUE;
        c->made.what = r->open_queue->queue;
        break;
    case KVQ__REQUEST__COMMAND_CREATE_BUFFER:
    case KVQ__REQUEST__COMMAND_IMPORT_BUFFER:
        c->made.back = KVQ__REQUEST__COMMAND_CLOSE_BUFFER;
        c->made.what = r->create_buffer->buffer;
        break;
    case KVQ__REQUEST__COMMAND_OPEN_SESSION:
        c->made.back = KVQ__REQUEST__COMMAND_CLOSE_SESSION;
        c->made.what = r->session->handle;
        break;
    case KVQ__REQUEST__COMMAND_OPEN_TABLE:
        c->made.back = KVQ__REQUEST__COMMAND_CLOSE_TABLE;
        c->made.what = c->request->open_table->handle;
        break;
    default:
        break;
    }
}

union closing {
    Kvq__CloseQueue queue;
    Kvq__CloseBuffer buffer;
    Kvq__CloseSession session;
    Kvq__CloseTable table;
};

// Turns a cancel into the command that gives back what was made; leaves it if there is nothing.
static int prepare_cancel(struct kvq__connection *c, char *text)
{
    Kvq__Request *r = c->request;
    if (c->made.back == KVQ__REQUEST__COMMAND__NOT_SET || c->made.request != r->cancel->request)
        return 0;
    union closing *close = kvq_arena_alloc(&c->arena, sizeof *close);
    if (!close)
        return kvq__attach_no_room(text);
    r->command_case = c->made.back;
    if (c->made.back == KVQ__REQUEST__COMMAND_CLOSE_QUEUE) {
        kvq__close_queue__init(r->close_queue = &close->queue);
        close->queue.queue = (uint32_t)c->made.what;
    } else if (c->made.back == KVQ__REQUEST__COMMAND_CLOSE_BUFFER) {
        kvq__close_buffer__init(r->close_buffer = &close->buffer);
        close->buffer.buffer = (uint32_t)c->made.what;
    } else if (c->made.back == KVQ__REQUEST__COMMAND_CLOSE_TABLE) {
        kvq__close_table__init(r->close_table = &close->table);
        close->table.handle = c->made.what;
    } else {
        kvq__close_session__init(r->close_session = &close->session);
        close->session.handle = c->made.what;
    }
    return 0;
}

// Gives back what prepare made for a command that then failed.
static void undo(struct kvq__connection *c)
{
    Kvq__Request__CommandCase command = c->request->command_case;
    c->n_fds = 0;
    if (command == KVQ__REQUEST__COMMAND_OPEN_QUEUE)
        kvq__line_free(c->line);
    if (c->region && (command == KVQ__REQUEST__COMMAND_CREATE_BUFFER ||
                      command == KVQ__REQUEST__COMMAND_IMPORT_BUFFER))
        kvq__region_give_back(c->region);
    if (c->timeline.shm.map || c->events)
        kvq__order_give_back(c);
    kvq__local_undo(c);
}

// Once all is back that the command waits for.
static void answer(struct kvq__connection *c)
{
    Kvq__Request__CommandCase command = c->request->command_case;
    bool refused = c->reply.status != 0;
    c->finish_due = false;
    if (!refused)
        put_made(c);
    note_made(c);
    // Still busy: if the reply cannot be sent, the poller takes the client down, and what is used
    // here with it, only once kvq__connection_back has said so.
    kvq__connection_reply(c);
    if (!refused && command == KVQ__REQUEST__COMMAND_CREATE_BUFFER)
        kvq__region_close_fd(c->region);
    if (!refused && command == KVQ__REQUEST__COMMAND_OPEN_QUEUE) {
        close(c->line->wake_theirs);
        c->line->wake_theirs = -1;
    }
    if (!refused && command == KVQ__REQUEST__COMMAND_OPEN_TIMELINE)
        close(c->timeline.shm.fd);
    kvq__local_sent(c);
    c->line = NULL;
    c->region = NULL;
    c->state = c->id ? KVQ__CONNECTION_READY : KVQ__CONNECTION_HELLO;
    kvq__connection_back(c);
}

static void finish(struct kvq__mail *mail)
{
    struct kvq__connection *c = of_mail(mail);
    bool refused = c->reply.status != 0;
    c->id = c->client_id;
    if (refused)
        undo(c);
    else if (c->request->command_case == KVQ__REQUEST__COMMAND_CLOSE_QUEUE)
        kvq__line_give_back(c->line);
    c->line = refused ? NULL : c->line;
    c->finish_due = true;
    if (c->awaited == 0)
        answer(c);
}

void kvq__connection_gave_back(struct kvq__connection *c, bool awaited)
{
    c->giving_back--;
    c->awaited -= awaited;
    if (c->finish_due && c->awaited == 0)
        answer(c);
    else if (c->gone_due && c->giving_back == 0)
        kvq__connection_gone(c);
}

// Descriptors that belong beside a request.
static uint32_t fds_of(const Kvq__Request *r)
{
    if (r->command_case != KVQ__REQUEST__COMMAND_IMPORT_BUFFER)
        return 0;
    return r->import_buffer->gpu && r->import_buffer->gpu->handle.len > 0 ? 0 : 1;
}

// What the message alone tells: its turn, its version, the descriptors beside it.
static int check_request(const struct kvq__connection *c, const struct kvq__packet *packet,
                         char *text)
{
    Kvq__Request__CommandCase command = c->request->command_case;
    bool hello = command == KVQ__REQUEST__COMMAND_HELLO;
    uint32_t fds = fds_of(c->request);
    if (hello != (c->state == KVQ__CONNECTION_HELLO)) {
        snprintf(text, KVQ_TEXT_BYTES,
                 hello ? "a second hello" : "the first request must be hello");
        return KVQ_E_PROTOCOL;
    }
    if (packet->n_fds != fds) {
        snprintf(text, KVQ_TEXT_BYTES, "%u descriptors beside command %d; %u belong there",
                 packet->n_fds, (int)command, fds);
        return KVQ_E_PROTOCOL;
    }
    if (!hello && c->request->protocol != c->protocol) {
        snprintf(text, KVQ_TEXT_BYTES, "protocol %u in a request; %u was agreed",
                 c->request->protocol, c->protocol);
        return KVQ_E_VERSION;
    }
    return 0;
}

// ---- Codebooks ----

// Codebooks that a format name asks for, itself or by what the configuration says of it.
static void read_codebooks_of(const struct kvq__server *server, const char *format)
{
    const char *at = strchr(format, '@');
    if (at)
        kvq__codebooks_load(server->codebooks, at + 1);
    const struct kvq__own_format *own = kvq__config_own_format(&server->config, format);
    if (!own)
        return;
    if ((at = strchr(own->rest.name, '@')))
        kvq__codebooks_load(server->codebooks, at + 1);
    for (uint32_t i = 0; i < own->n_ranges; i++)
        if ((at = strchr(own->ranges[i].row.name, '@')))
            kvq__codebooks_load(server->codebooks, at + 1);
}

// The session that a command describes; NULL = none.
static const Kvq__OpenSession *described(const struct kvq__connection *c)
{
    return c->request->command_case == KVQ__REQUEST__COMMAND_OPEN_SESSION ? c->request->open_session
           : c->request->command_case == KVQ__REQUEST__COMMAND_LOOKUP_PREFIX
               ? c->request->lookup_prefix->session
               : NULL;
}

// A thread of libuv's.
static void read_codebooks(uv_work_t *work)
{
    const struct kvq__connection *c = work->data;
    const Kvq__OpenSession *open = described(c);
    read_codebooks_of(c->server, open->format);
    for (size_t i = 0; i < open->n_layers; i++) {
        const char *format = open->layers[i]->format;
        size_t before = 0;
        while (before < i && strcmp(open->layers[before]->format, format) != 0)
            before++;
        if (before == i && strcmp(open->format, format) != 0) // each once, also if it fails
            read_codebooks_of(c->server, format);
    }
}

static void to_poller(uv_work_t *work, int status)
{
    struct kvq__connection *c = work->data;
    (void)status;
    kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, run);
}

// Whether any file may have to be read before the session can be opened.
static bool needs_reading(const struct kvq__connection *c)
{
    const Kvq__OpenSession *open = described(c);
    if (!open || open->n_layers == 0 || !c->server->config.codebook_dir[0])
        return false;
    bool any =
        strchr(open->format, '@') || kvq__config_own_format(&c->server->config, open->format);
    for (size_t i = 0; i < open->n_layers && !any; i++)
        any = strchr(open->layers[i]->format, '@') ||
              kvq__config_own_format(&c->server->config, open->layers[i]->format);
    return any;
}

// ---- Taking requests ----

static int prepare(struct kvq__connection *c, struct kvq__packet *packet, char *text)
{
    switch (c->request->command_case) {
    case KVQ__REQUEST__COMMAND_HELLO:
        return prepare_hello(c, c->request->hello, text);
    case KVQ__REQUEST__COMMAND_OPEN_QUEUE:
        return prepare_open_queue(c, text);
    case KVQ__REQUEST__COMMAND_CREATE_BUFFER:
    case KVQ__REQUEST__COMMAND_IMPORT_BUFFER:
        return prepare_buffer(c, packet, text);
    case KVQ__REQUEST__COMMAND_CANCEL:
        return prepare_cancel(c, text);
    case KVQ__REQUEST__COMMAND_OPEN_TIMELINE:
    case KVQ__REQUEST__COMMAND_OPEN_EVENTS:
        return kvq__order_prepare(c, text);
    case KVQ__REQUEST__COMMAND_KICK_CLIENT:
        snprintf(text, KVQ_TEXT_BYTES, "clients are kicked on the control socket");
        return KVQ_E_INVALID;
    default:
        return kvq__local_prepare(c, text);
    }
}

static void before_open(struct kvq__task *task)
{
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)task - offsetof(struct kvq__connection, task));
    if (needs_reading(c))
        read_codebooks(&c->work);
}

static void kept(struct kvq__task *task)
{
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)task - offsetof(struct kvq__connection, task));
    finish(&c->mail);
}

// Sends a command that was prepared on its way.
static void start(struct kvq__connection *c)
{
    int error = -1;
    c->state = KVQ__CONNECTION_BUSY;
    c->work.data = c;
    if (kvq__jobs_takes(c->server->jobs, c->request)) {
        bool opens = described(c) != NULL;
        c->task = (struct kvq__task){.request = c->request,
                                     .arena = &c->arena,
                                     .reply = &c->reply,
                                     .peer = &c->peer,
                                     .client = c->client,
                                     .before = opens ? before_open : NULL,
                                     .done = kept};
        kvq__jobs_start(c->server->jobs, &c->task);
        return;
    }
    if (needs_gpu(c))
        error = uv_queue_work(&c->server->loop, &c->work, make_on_gpu, made_on_gpu);
    else if (needs_reading(c))
        error = uv_queue_work(&c->server->loop, &c->work, read_codebooks, to_poller);
    if (error)
        kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, run);
}

void kvq__connection_request(struct kvq__connection *c, struct kvq__packet *packet)
{
    char text[KVQ_TEXT_BYTES] = "";
    c->timeline = (struct kvq__pinned){.shm.fd = -1};
    c->events = NULL;
    c->arena.used = 0;
    c->n_fds = 0;
    c->line = NULL;
    c->region = c->table = NULL;
    kvq__reply__init(&c->reply);
    c->reply.epoch = c->server->identity.epoch;
    int error = kvq_request_unpack(packet->bytes, packet->length, &c->arena, &c->request, text);
    if (error == 0) {
        c->reply.id = c->request->id;
        error = check_request(c, packet, text);
    }
    bool fatal = error != 0;
    if (error == 0 && c->request->command_case == KVQ__REQUEST__COMMAND_DOCTOR)
        kvq__doctor(c->server, &c->arena, &c->reply);
    else if (error == 0)
        error = prepare(c, packet, text);
    kvq__packet_close_fds(packet);
    // A cancel that is still one found nothing to give back.
    bool local = error || c->request->command_case == KVQ__REQUEST__COMMAND_DOCTOR ||
                 c->request->command_case == KVQ__REQUEST__COMMAND_CANCEL;
    if (!local) {
        start(c);
        return;
    }
    if (error)
        set_status(c, error, text);
    c->n_fds = 0;
    c->made.back = KVQ__REQUEST__COMMAND__NOT_SET;
    kvq__connection_reply(c);
    if (fatal || (error && c->state == KVQ__CONNECTION_HELLO))
        kvq__connection_end(c, text);
}
