// SPDX-License-Identifier: Apache-2.0
//
// Which function runs which command; see dispatch.h. Messages have passed proto/wire.c, so strings
// are bounded and printable; what they mean is checked by the core.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/commands/internal.h"

struct command {
    kvq__run_command *run;
    Kvq__Reply__ResultCase result; // of a success; NOT_SET: it tells nothing
    bool for_clients;              // attached ones alone
};

#define COMMAND(name) [KVQ__REQUEST__COMMAND_##name]
#define RESULT(name)  KVQ__REPLY__RESULT_##name
#define NOTHING       KVQ__REPLY__RESULT__NOT_SET

// Who may ask: clients on their own connections alone, or people as well.
enum { ANYBODY = false, CLIENTS = true };

static const struct command commands[] = {
    COMMAND(OPEN_SESSION) = {kvq__run_open_session, RESULT(SESSION), CLIENTS},
    COMMAND(CLOSE_SESSION) = {kvq__run_close_session, NOTHING, CLIENTS},
    COMMAND(DROP_SESSION) = {kvq__run_drop_session, NOTHING, ANYBODY},
    COMMAND(SESSION_INFO) = {kvq__run_session_info, RESULT(SESSION), ANYBODY},
    COMMAND(PIN_SESSION) = {kvq__run_pin_session, NOTHING, ANYBODY},
    COMMAND(MOVE_SESSION) = {kvq__run_move_session, RESULT(MOVE), ANYBODY},
    COMMAND(PARK_SESSION) = {kvq__run_park_session, RESULT(MOVE), ANYBODY},
    COMMAND(PREFETCH_SESSION) = {kvq__run_prefetch_session, RESULT(MOVE), ANYBODY},
    COMMAND(ASK_MOVE) = {kvq__run_ask_move, RESULT(MOVE), ANYBODY},
    COMMAND(LOOKUP_PREFIX) = {kvq__run_lookup_prefix, RESULT(LOOKUP_PREFIX), CLIENTS},
    COMMAND(TELL_SPANS) = {kvq__run_tell_spans, NOTHING, CLIENTS},
    COMMAND(DROP_PREFIXES) = {kvq__run_drop_prefixes, RESULT(DROPPED_PREFIXES), ANYBODY},
    COMMAND(PING) = {kvq__run_ping, RESULT(PONG), ANYBODY},
    COMMAND(STATUS) = {kvq__run_status, RESULT(STATUS_REPLY), ANYBODY},
    COMMAND(KICK_CLIENT) = {kvq__run_kick_client, NOTHING, ANYBODY},
    COMMAND(LIST_SESSIONS) = {kvq__run_list_sessions, RESULT(SESSIONS), ANYBODY},
    COMMAND(LIST_CLIENTS) = {kvq__run_list_clients, RESULT(CLIENTS), ANYBODY},
    COMMAND(LIST_FORMATS) = {kvq__run_list_formats, RESULT(FORMATS), ANYBODY},
    COMMAND(LIST_PREFIXES) = {kvq__run_list_prefixes, RESULT(PREFIXES), ANYBODY},
    COMMAND(LIST_QUOTAS) = {kvq__run_list_quotas, RESULT(QUOTAS), ANYBODY},
};

static const struct command *find_command_row(Kvq__Request__CommandCase command)
{
    bool inside = (size_t)command < sizeof commands / sizeof *commands;
    return inside && commands[command].run ? &commands[command] : NULL;
}

bool kvq__dispatch_takes(Kvq__Request__CommandCase command)
{
    return find_command_row(command) != NULL;
}

bool kvq__dispatch_is_for_clients(Kvq__Request__CommandCase command)
{
    const struct command *row = find_command_row(command);
    return row && row->for_clients;
}

// A message with a namespace names it, and what is in it, by fields of these names. An option of a
// configuration has a name, too, which may be longer.
static bool is_name(const ProtobufCMessageDescriptor *message,
                    const ProtobufCFieldDescriptor *field)
{
    return field->type == PROTOBUF_C_TYPE_STRING &&
           (strcmp(field->name, "namespace") == 0 || strcmp(field->name, "name") == 0) &&
           protobuf_c_message_descriptor_get_field_by_name(message, "namespace");
}

static int check_names_in(const ProtobufCMessage *message, char *text)
{
    const ProtobufCMessageDescriptor *descriptor = message->descriptor;
    int error = 0;
    for (unsigned i = 0; i < descriptor->n_fields && error == 0; i++) {
        const ProtobufCFieldDescriptor *field = &descriptor->fields[i];
        const void *at = (const char *)message + field->offset;
        if (field->label == PROTOBUF_C_LABEL_REPEATED || !kvq_field_held(message, field))
            continue;
        const ProtobufCMessage *inner =
            field->type == PROTOBUF_C_TYPE_MESSAGE ? *(ProtobufCMessage *const *)at : NULL;
        if (inner)
            error = check_names_in(inner, text);
        size_t n = is_name(descriptor, field) ? strlen(*(char *const *)at) : 0;
        if (n >= KVQ_NAME_BYTES) {
            snprintf(text, KVQ_TEXT_BYTES, "%s.%s is a name of %zu bytes; it can have %d at most",
                     descriptor->short_name, field->name, n, KVQ_NAME_BYTES - 1);
            error = KVQ_E_LIMIT;
        }
    }
    return error;
}

int kvq__dispatch_check_names(const Kvq__Request *request, char *text)
{
    assert(request->command_case != KVQ__REQUEST__COMMAND__NOT_SET);
    return check_names_in(&request->base, text);
}

void kvq__reply_status(Kvq__Reply *reply, struct kvq_arena *arena, int status, const char *text)
{
    const char *plain = status == 0 ? "" : kvq_status_text(status);
    assert(status <= 0);
    reply->status = status;
    reply->text = kvq_arena_text(arena, status != 0 && *text ? text : plain);
    if (status != 0 && !reply->text[0]) // no room left; packing only reads it
        reply->text = (char *)(uintptr_t)plain;
    reply->result_case = KVQ__REPLY__RESULT__NOT_SET;
}

int kvq__call_needs_client(struct kvq__call *call)
{
    if (call->d->client)
        return 0;
    snprintf(call->text, sizeof call->text,
             "handles belong to attached clients; name the session instead");
    return KVQ_E_INVALID;
}

int kvq__call_no_room(struct kvq__call *call)
{
    snprintf(call->text, sizeof call->text, "no room left for the reply");
    return KVQ_E_NO_MEMORY;
}

void kvq__dispatch_run(const struct kvq__dispatch *d, const Kvq__Request *request,
                       struct kvq_arena *arena, Kvq__Reply *reply)
{
    const struct command *command = find_command_row(request->command_case);
    struct kvq__call call = {.d = d, .request = request, .arena = arena, .reply = reply};
    int error = KVQ_E_INVALID;
    if (command)
        error = command->run(&call);
    else
        snprintf(call.text, sizeof call.text, "command %d is not taken on this socket",
                 (int)request->command_case);
    assert(error != 0 || reply->result_case == command->result);
    if (error)
        kvq__reply_status(reply, arena, error, call.text);
}
