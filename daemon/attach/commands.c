// SPDX-License-Identifier: Apache-2.0
//
// How a command of the attach socket goes from thread to thread, and the table of what each one
// does on its way; see internal.h.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/attach/attach.h"
#include "daemon/attach/internal.h"
#include "daemon/commands/dispatch.h"
#include "daemon/commands/doctor.h"
#include "daemon/runtime/descriptors.h"
#include "daemon/runtime/workers.h"

struct command {
    // Poller's thread, before anything is made: whether the core would take it now. 0, or a code
    // with a text. For what costs much to make and is asked for until the core takes it.
    kvq__run *look;
    // Loop's thread: checks the request, and makes what the system gives at once. 0, or a code with
    // a text; then nothing was made.
    kvq__prepare *prepare;
    // A thread of libuv's: makes what may take long, and sets the connection's error and text.
    // is_slow NULL: it always may.
    kvq__is_slow *is_slow;
    kvq__part *make;
    // Poller's thread: the core's part. 0, a code with a text, or KVQ__COMES_BACK. NULL: the
    // command is dispatch's (commands/dispatch.h).
    kvq__run *run;
    // Loop's thread, after a success: puts into the reply what is known only now; and once the
    // reply is sent, closes what it carried.
    kvq__part *put;
    kvq__part *sent;
    // Loop's thread, after a refusal: gives back what prepare and make have made.
    kvq__part *undo;
    // What a success has made, and the command that gives it back: the client may cancel before the
    // reply arrives, or the reply cannot be sent. The message of that command has one field, the
    // number of what was made. CANCEL gives back what no command of clients does.
    kvq__made *made;
    Kvq__Request__CommandCase closed_by;
    Kvq__Reply__ResultCase result; // of a success, where prepare makes it
    bool passes;                   // it is for dispatch or the store jobs alone
};

// Makes the request one of the given command, about `what`. False: no room left for its message.
static bool become_closing(struct kvq__connection *c, Kvq__Request__CommandCase command,
                           uint64_t what)
{
    const ProtobufCFieldDescriptor *member =
        protobuf_c_message_descriptor_get_field(&kvq__request__descriptor, (unsigned)command);
    const ProtobufCMessageDescriptor *type = member->descriptor;
    const ProtobufCFieldDescriptor *number = &type->fields[0];
    char *message = kvq_arena_alloc(&c->arena, type->sizeof_message);
    assert(type->n_fields == 1);
    if (!message)
        return false;
    protobuf_c_message_init(type, message);
    if (number->type == PROTOBUF_C_TYPE_UINT32)
        *(uint32_t *)(message + number->offset) = (uint32_t)what;
    else
        *(uint64_t *)(message + number->offset) = what;
    memcpy((char *)c->request + member->offset, &message, sizeof message);
    c->request->command_case = command;
    return true;
}

// Whether the cancel has something to give back.
static bool is_about_made(const struct kvq__connection *c)
{
    return c->made.closed_by && c->made.request == c->request->cancel->request;
}

// Turns a cancel into the command that gives back what was made; leaves it if there is nothing.
static int prepare_cancel(struct kvq__connection *c, char *text)
{
    if (!is_about_made(c))
        return 0;
    return become_closing(c, c->made.closed_by, c->made.what) ? 0 : kvq__attach_no_room(text);
}

#define COMMAND(name) [KVQ__REQUEST__COMMAND_##name]
#define RESULT(name)  .result = KVQ__REPLY__RESULT_##name

// Commands that are not here are administration: they belong to the control socket, which looks up
// the asker's role for each of them and writes down what they change. Here a role is that of the
// moment when the engine connected.
static const struct command commands[] = {
    COMMAND(HELLO) = {.prepare = kvq__hello_prepare, .run = kvq__hello_run, RESULT(HELLO)},
    COMMAND(CANCEL) = {.prepare = prepare_cancel, .run = kvq__map_extents_unsay},
    COMMAND(OPEN_QUEUE) = {.prepare = kvq__open_queue_prepare,
                           .run = kvq__open_queue_run,
                           .sent = kvq__open_queue_sent,
                           .undo = kvq__open_queue_undo,
                           .made = kvq__open_queue_made,
                           .closed_by = KVQ__REQUEST__COMMAND_CLOSE_QUEUE,
                           RESULT(OPEN_QUEUE)},
    COMMAND(CLOSE_QUEUE) = {.run = kvq__close_queue_run},
    COMMAND(OPEN_TIMELINE) = {.prepare = kvq__open_timeline_prepare,
                              .make = kvq__open_timeline_make,
                              .run = kvq__open_timeline_run,
                              .put = kvq__open_timeline_put,
                              .sent = kvq__open_timeline_sent,
                              .undo = kvq__stream_sync_undo,
                              RESULT(OPEN_TIMELINE)},
    COMMAND(OPEN_EVENTS) = {.prepare = kvq__open_events_prepare,
                            .make = kvq__open_events_make,
                            .run = kvq__open_events_run,
                            .put = kvq__open_events_put,
                            .undo = kvq__stream_sync_undo,
                            RESULT(OPEN_EVENTS)},
    COMMAND(CREATE_BUFFER) = {.prepare = kvq__create_buffer_prepare,
                              .is_slow = kvq__buffer_is_slow,
                              .make = kvq__buffer_make,
                              .run = kvq__buffer_run,
                              .put = kvq__create_buffer_put,
                              .sent = kvq__create_buffer_sent,
                              .undo = kvq__buffer_undo,
                              .made = kvq__buffer_made,
                              .closed_by = KVQ__REQUEST__COMMAND_CLOSE_BUFFER,
                              RESULT(CREATE_BUFFER)},
    COMMAND(IMPORT_BUFFER) = {.prepare = kvq__import_buffer_prepare,
                              .is_slow = kvq__buffer_is_slow,
                              .make = kvq__buffer_make,
                              .run = kvq__buffer_run,
                              .put = kvq__import_buffer_put,
                              .undo = kvq__buffer_undo,
                              .made = kvq__buffer_made,
                              .closed_by = KVQ__REQUEST__COMMAND_CLOSE_BUFFER,
                              RESULT(CREATE_BUFFER)},
    COMMAND(CLOSE_BUFFER) = {.run = kvq__close_buffer_run},
    COMMAND(OPEN_SESSION) = {.is_slow = kvq__session_needs_codebooks,
                             .make = kvq__session_read_codebooks,
                             .made = kvq__open_session_made,
                             .closed_by = KVQ__REQUEST__COMMAND_CLOSE_SESSION},
    COMMAND(LOOKUP_PREFIX) = {.is_slow = kvq__session_needs_codebooks,
                              .make = kvq__session_read_codebooks},
    COMMAND(OPEN_POOL) = {.prepare = kvq__open_pool_prepare,
                          .run = kvq__open_pool_run,
                          .put = kvq__open_pool_put,
                          RESULT(OPEN_POOL)},
    COMMAND(OPEN_TABLE) = {.look = kvq__open_table_look,
                           .prepare = kvq__open_table_prepare,
                           .is_slow = kvq__open_table_is_slow,
                           .make = kvq__open_table_make,
                           .run = kvq__open_table_run,
                           .put = kvq__open_table_put,
                           .sent = kvq__open_table_sent,
                           .undo = kvq__open_table_undo,
                           .made = kvq__open_table_made,
                           .closed_by = KVQ__REQUEST__COMMAND_CLOSE_TABLE,
                           RESULT(OPEN_TABLE)},
    COMMAND(CLOSE_TABLE) = {.run = kvq__close_table_run},
    COMMAND(MAP_EXTENTS) = {.prepare = kvq__map_extents_prepare,
                            .run = kvq__map_extents_run,
                            .made = kvq__map_extents_made,
                            .closed_by = KVQ__REQUEST__COMMAND_CANCEL,
                            RESULT(MAP_EXTENTS)},
    COMMAND(MAP_BOOK) = {.prepare = kvq__map_book_prepare,
                         .run = kvq__map_book_run,
                         .sent = kvq__map_book_sent,
                         RESULT(MAP_BOOK)},
    COMMAND(CLOSE_SESSION) = {.passes = true},
    COMMAND(DROP_SESSION) = {.passes = true},
    COMMAND(SESSION_INFO) = {.passes = true},
    COMMAND(SAVE_SESSION) = {.passes = true},
    COMMAND(RESTORE_SESSION) = {.passes = true},
    COMMAND(MOVE_SESSION) = {.passes = true},
    COMMAND(PARK_SESSION) = {.passes = true},
    COMMAND(PREFETCH_SESSION) = {.passes = true},
    COMMAND(PIN_SESSION) = {.passes = true},
    COMMAND(ASK_MOVE) = {.passes = true},
    COMMAND(TELL_SPANS) = {.passes = true},
    COMMAND(LIST_PREFIXES) = {.passes = true},
    COMMAND(PING) = {.passes = true},
    COMMAND(STATUS) = {.passes = true},
    COMMAND(LIST_SESSIONS) = {.passes = true},
    COMMAND(LIST_CLIENTS) = {.passes = true},
    COMMAND(LIST_FORMATS) = {.passes = true},
    COMMAND(DOCTOR) = {.passes = true},
};

static const struct command nothing; // of commands that are not in the table

static const struct command *find_command(Kvq__Request__CommandCase command)
{
    size_t i = (size_t)command;
    return i < sizeof commands / sizeof *commands ? &commands[i] : &nothing;
}

static const struct command *command_of(const struct kvq__connection *c)
{
    assert(c->request);
    return find_command(c->request->command_case);
}

bool kvq__attach_takes(Kvq__Request__CommandCase command)
{
    const struct command *found = find_command(command);
    return found->prepare || found->make || found->run;
}

bool kvq__attach_refuses(Kvq__Request__CommandCase command)
{
    return !kvq__attach_takes(command) && !find_command(command)->passes &&
           (kvq__dispatch_takes(command) || kvq__jobs_knows(command));
}

static int check_socket(Kvq__Request__CommandCase command, char *text)
{
    if (!kvq__attach_refuses(command))
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "that command is administration and belongs to the control socket, as kvqctl's do");
    return KVQ_E_INVALID;
}

static struct kvq__connection *connection_of_mail(struct kvq__mail *mail)
{
    return (struct kvq__connection *)((char *)mail - offsetof(struct kvq__connection, mail));
}

static void set_status(struct kvq__connection *c, int status, const char *text)
{
    kvq__reply_status(&c->reply, &c->arena, status, text);
}

int kvq__attach_no_room(char *text)
{
    snprintf(text, KVQ_TEXT_BYTES, "no room left for the reply");
    return KVQ_E_NO_MEMORY;
}

// ---- Back on the loop's thread: the reply ----

// Notes what a command has made, in case that its client does not wait for the reply.
static void note_made(struct kvq__connection *c)
{
    const struct command *command = command_of(c);
    bool made = c->reply.status == 0 && command->made;
    assert(!command->made == !command->closed_by);
    c->made.request = c->request->id;
    c->made.closed_by = made ? command->closed_by : KVQ__REQUEST__COMMAND__NOT_SET;
    c->made.what = made ? command->made(c) : 0;
}

static void run_at_poller(struct kvq__mail *mail);

static void answer_unsent(struct kvq__connection *c)
{
    c->n_fds = 0;
    set_status(c, KVQ_E_LIMIT, c->text);
    int error = kvq__connection_reply(c, c->text);
    assert(error == 0); // nothing is beside it
    (void)error;
}

// The descriptors of the reply could not be sent, and what the command has made is no use to its
// client without them. False: it has made nothing that a command gives back.
static bool take_back(struct kvq__connection *c)
{
    uint32_t id = c->request->id;
    assert(c->state == KVQ__CONNECTION_BUSY && !c->unsent);
    if (!c->made.closed_by)
        return false;
    c->unsent = true;
    c->n_fds = 0;
    c->arena.used = 0; // it may be full, and nothing in it is needed any more
    c->request = kvq_arena_alloc(&c->arena, sizeof *c->request);
    kvq__request__init(c->request);
    kvq__reply__init(&c->reply);
    c->request->id = c->reply.id = id;
    c->reply.epoch = c->server->identity.epoch;
    bool fits = become_closing(c, c->made.closed_by, c->made.what);
    assert(fits);
    (void)fits;
    kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, run_at_poller);
    return true;
}

// In the log at level debug: what a client asked for, and why it was refused. A client that asks on
// and on uses up its lines, and not those for what is refused.
static void tell_asked(struct kvq__connection *c)
{
    char text[300];
    const Kvq__Reply *reply = &c->reply;
    struct kvq_log_budget *budget = reply->status ? &c->refused_budget : &c->asked_budget;
    const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(
        &kvq__request__descriptor, (unsigned)c->request->command_case);
    if (!kvq__log_has(KVQ_LOG_DEBUG))
        return;
    kvq__log_client(budget, KVQ_LOG_DEBUG, "asked",
                    "client=%llu uid=%u pid=%u command=%s status=%s text=%s",
                    (unsigned long long)c->id, c->peer.uid, (unsigned)c->peer.pid,
                    field ? field->name : "unknown", kvq_status_name(reply->status),
                    kvq__log_quote(text, sizeof text, reply->text));
}

// Once all is back that the command waits for.
static void send_answer(struct kvq__connection *c)
{
    const struct command *command = command_of(c);
    bool hello = c->request->command_case == KVQ__REQUEST__COMMAND_HELLO;
    assert(c->state == KVQ__CONNECTION_BUSY && c->awaited == 0);
    c->finish_due = false;
    if (c->unsent) // what was made is given back
        set_status(c, KVQ_E_LIMIT, c->text);
    bool refused = c->reply.status != 0;
    assert(refused || !command->result || c->reply.result_case == command->result);
    if (!refused && command->put)
        command->put(c);
    note_made(c);
    tell_asked(c);
    // Still busy: if the reply cannot be sent, the poller takes the client down, and what is used
    // here with it, only once kvq__connection_back has said so.
    int error = kvq__connection_reply(c, c->text);
    if (!refused && command->sent)
        command->sent(c);
    c->line = NULL;
    c->region = NULL;
    if (error && take_back(c))
        return; // comes here again
    if (error)
        answer_unsent(c);
    c->state = c->id ? KVQ__CONNECTION_READY : KVQ__CONNECTION_HELLO;
    if (hello && c->reply.status != 0)
        kvq__connection_end(c, "its hello was refused");
    kvq__connection_back(c);
}

static void finish_command(struct kvq__connection *c)
{
    assert(c->state == KVQ__CONNECTION_BUSY && !c->finish_due);
    c->finish_due = true;
    if (c->awaited == 0)
        send_answer(c);
}

static void command_came_back(struct kvq__connection *c)
{
    const struct command *command = command_of(c);
    assert(c->state == KVQ__CONNECTION_BUSY);
    kvq__codebooks_let_go(&c->books);
    c->id = c->client_id;
    if (c->reply.status != 0) {
        c->n_fds = 0;
        if (command->undo)
            command->undo(c);
    }
    finish_command(c);
}

void kvq__connection_gave_back(struct kvq__connection *c, bool awaited)
{
    assert(c->giving_back > 0 && c->awaited >= (uint32_t)awaited);
    c->giving_back--;
    c->awaited -= awaited;
    if (c->finish_due && c->awaited == 0)
        send_answer(c);
    else if (c->gone_due && c->giving_back == 0)
        kvq__connection_gone(c);
}

// ---- At the poller ----

static void take_mail_back(struct kvq__mail *mail)
{
    command_came_back(connection_of_mail(mail));
}

void kvq__connection_to_loop(struct kvq__connection *c)
{
    assert(c->state == KVQ__CONNECTION_BUSY);
    kvq__mailbox_post(&c->server->box, &c->mail, take_mail_back);
}

static void run_at_poller(struct kvq__mail *mail)
{
    struct kvq__connection *c = connection_of_mail(mail);
    const struct command *command = command_of(c);
    char text[KVQ_TEXT_BYTES] = "";
    int error = 0;
    assert(c->state == KVQ__CONNECTION_BUSY);
    if (command->run) {
        error = command->run(c, text);
    } else {
        struct kvq__dispatch d = {.core = c->server->core,
                                  .identity = &c->server->identity,
                                  .peer = &c->peer,
                                  .client = c->client,
                                  .now_ns = kvq_now_ns()};
        kvq__dispatch_run(&d, c->request, &c->arena, &c->reply);
    }
    if (error == KVQ__COMES_BACK)
        return;
    if (error)
        set_status(c, error, text);
    kvq__connection_to_loop(c);
}

// ---- On a thread of libuv's: what takes long ----

static void make_at_work(uv_work_t *work)
{
    struct kvq__connection *c = work->data;
    c->error = 0;
    command_of(c)->make(c);
}

static void made_at_work(uv_work_t *work, int status)
{
    struct kvq__connection *c = work->data;
    assert(c->state == KVQ__CONNECTION_BUSY);
    (void)status;
    if (c->error == 0) {
        kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, run_at_poller);
        return;
    }
    set_status(c, c->error, c->text);
    command_came_back(c);
}

// ---- On its way ----

static bool may_take_long(const struct kvq__connection *c)
{
    const struct command *command = command_of(c);
    return command->make && (!command->is_slow || command->is_slow(c));
}

static struct kvq__connection *connection_of_task(struct kvq__task *task)
{
    return (struct kvq__connection *)((char *)task - offsetof(struct kvq__connection, task));
}

// A thread of libuv's, before the store is read.
static void make_before_task(struct kvq__task *task)
{
    struct kvq__connection *c = connection_of_task(task);
    if (may_take_long(c))
        command_of(c)->make(c);
}

static void task_came_back(struct kvq__task *task)
{
    command_came_back(connection_of_task(task));
}

// Sends a command that was prepared on its way.
static void send_command_on(struct kvq__connection *c)
{
    assert(c->state != KVQ__CONNECTION_ENDING);
    c->state = KVQ__CONNECTION_BUSY;
    c->work.data = c;
    if (kvq__jobs_takes(c->server->jobs, c->request)) {
        c->task = (struct kvq__task){.request = c->request,
                                     .arena = &c->arena,
                                     .reply = &c->reply,
                                     .peer = &c->peer,
                                     .client = c->client,
                                     .before = command_of(c)->make ? make_before_task : NULL,
                                     .done = task_came_back};
        kvq__jobs_start(c->server->jobs, &c->task);
    } else if (may_take_long(c)) {
        int error = uv_queue_work(&c->server->loop, &c->work, make_at_work, made_at_work);
        assert(error == 0); // only for what is none of libuv's
        (void)error;
    } else {
        kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, run_at_poller);
    }
}

// ---- Before it is made ----

static void looked(struct kvq__mail *mail)
{
    struct kvq__connection *c = connection_of_mail(mail);
    const struct command *command = command_of(c);
    char text[KVQ_TEXT_BYTES] = "";
    int error = c->error ? c->error : command->prepare(c, text);
    assert(c->state == KVQ__CONNECTION_BUSY);
    if (error == 0) {
        send_command_on(c);
        return;
    }
    set_status(c, error, c->error ? c->text : text);
    c->n_fds = 0;
    finish_command(c);
}

static void look_at_poller(struct kvq__mail *mail)
{
    struct kvq__connection *c = connection_of_mail(mail);
    c->error = command_of(c)->look(c, c->text);
    kvq__mailbox_post(&c->server->box, &c->mail, looked);
}

static void send_to_look(struct kvq__connection *c)
{
    assert(c->state != KVQ__CONNECTION_BUSY && c->state != KVQ__CONNECTION_ENDING);
    c->state = KVQ__CONNECTION_BUSY;
    kvq__mailbox_post(kvq__poller_box(c->server->poller), &c->mail, look_at_poller);
}

// ---- Taking requests ----

// Descriptors that belong beside a request.
static uint32_t fds_of(const Kvq__Request *r)
{
    if (r->command_case != KVQ__REQUEST__COMMAND_IMPORT_BUFFER)
        return 0;
    return r->import_buffer->gpu && r->import_buffer->gpu->handle.len > 0 ? 0 : 1;
}

// What the message alone tells: its turn, its version, its socket, the descriptors beside it.
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

void kvq__connection_request(struct kvq__connection *c, struct kvq__packet *packet)
{
    char text[KVQ_TEXT_BYTES] = "";
    assert(c->state != KVQ__CONNECTION_BUSY && !c->finish_due && c->awaited == 0);
    c->timeline = (struct kvq__pinned){.shm.fd = -1};
    c->events = NULL;
    c->arena.used = 0;
    c->n_fds = 0;
    c->line = NULL;
    c->region = c->table = NULL;
    c->unsent = false;
    kvq__reply__init(&c->reply);
    c->reply.epoch = c->server->identity.epoch;
    int error = kvq_request_unpack(packet->bytes, packet->length, &c->arena, &c->request, text);
    if (error == 0) {
        c->reply.id = c->request->id;
        error = check_request(c, packet, text);
    }
    bool fatal = error != 0;
    if (error == 0)
        error = check_socket(c->request->command_case, text);
    if (error == 0)
        error = kvq__dispatch_check_names(c->request, text);
    if (error == 0 && c->request->command_case == KVQ__REQUEST__COMMAND_DOCTOR)
        kvq__doctor(c->server, &c->arena, &c->reply);
    else if (error == 0 && command_of(c)->prepare && !command_of(c)->look)
        error = command_of(c)->prepare(c, text);
    kvq__packet_close_fds(packet);
    bool local = error || c->request->command_case == KVQ__REQUEST__COMMAND_DOCTOR ||
                 (c->request->command_case == KVQ__REQUEST__COMMAND_CANCEL && !is_about_made(c));
    if (!local) {
        if (command_of(c)->look)
            send_to_look(c);
        else
            send_command_on(c);
        return;
    }
    if (error)
        set_status(c, error, text);
    c->n_fds = 0;
    c->made.closed_by = KVQ__REQUEST__COMMAND__NOT_SET;
    kvq__connection_reply(c, text);
    if (fatal || (error && c->state == KVQ__CONNECTION_HELLO))
        kvq__connection_end(c, text);
}
