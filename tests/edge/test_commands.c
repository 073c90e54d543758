// SPDX-License-Identifier: Apache-2.0
//
// Every command of the protocol is somebody's: a row of dispatch, of the attach socket or of the
// store jobs, or the control socket's own. A number that is no command is nobody's.
#include "daemon/attach/attach.h"
#include "daemon/commands/dispatch.h"
#include "daemon/control/audit.h"
#include "daemon/control/roles.h"
#include "daemon/store/store.h"
#include "proto/json.h"
#include "tests/kits/request.h"
#include "tests/kits/unit.h"

static bool is_taken(Kvq__Request__CommandCase command)
{
    return kvq__dispatch_takes(command) || kvq__attach_takes(command) || kvq__jobs_knows(command) ||
           command == KVQ__REQUEST__COMMAND_DOCTOR || command == KVQ__REQUEST__COMMAND_LIST_EVENTS;
}

// In kvq.proto a command is a message of the request; its other fields are numbers.
static bool is_command(const ProtobufCFieldDescriptor *field)
{
    return field && field->type == PROTOBUF_C_TYPE_MESSAGE;
}

PLAIN_TEST(test_every_command)
{
    const ProtobufCMessageDescriptor *request = &kvq__request__descriptor;
    uint32_t commands = 0;
    for (unsigned i = 0; i < request->n_fields; i++) {
        if (!is_command(&request->fields[i]))
            continue;
        commands++;
        if (!is_taken((Kvq__Request__CommandCase)request->fields[i].id))
            fail_msg("nobody takes %s", request->fields[i].name);
    }
    assert_in_range(commands, 50, 200);
}

// What belongs to the attach socket alone is answered there, and needs no role.
static bool is_for_clients(Kvq__Request__CommandCase command)
{
    bool elsewhere = !kvq__dispatch_takes(command) && !kvq__jobs_knows(command) &&
                     command != KVQ__REQUEST__COMMAND_DOCTOR &&
                     command != KVQ__REQUEST__COMMAND_LIST_EVENTS;
    return elsewhere || kvq__dispatch_is_for_clients(command);
}

// Of those that dispatch or the store takes, these give or take a handle whatever they say.
PLAIN_TEST(test_for_clients)
{
    const ProtobufCMessageDescriptor *request = &kvq__request__descriptor;
    for (unsigned i = 0; i < request->n_fields; i++) {
        Kvq__Request__CommandCase command = (Kvq__Request__CommandCase)request->fields[i].id;
        bool expected = command == KVQ__REQUEST__COMMAND_OPEN_SESSION ||
                        command == KVQ__REQUEST__COMMAND_CLOSE_SESSION ||
                        command == KVQ__REQUEST__COMMAND_LOOKUP_PREFIX ||
                        command == KVQ__REQUEST__COMMAND_TELL_SPANS;
        if (kvq__dispatch_is_for_clients(command) != expected)
            fail_msg("%s", request->fields[i].name);
    }
}

// What an engine may ask for by its connection, whose role is that of the moment when it connected:
// nothing but what is about sessions and about itself.
PLAIN_TEST(test_administration)
{
    static const char *const passes[] = {
        "drop_session", "session_info", "save_session",     "restore_session", "move_session",
        "park_session", "pin_session",  "prefetch_session", "ask_move",        "list_prefixes",
        "ping",         "status",       "list_sessions",    "list_clients",    "list_formats",
        "doctor",       "list_events",
    };
    const ProtobufCMessageDescriptor *all = &kvq__request__descriptor;
    for (unsigned i = 0; i < all->n_fields; i++) {
        Kvq__Request__CommandCase command = (Kvq__Request__CommandCase)all->fields[i].id;
        bool expected = is_command(&all->fields[i]) && !is_for_clients(command);
        for (size_t n = 0; n < sizeof passes / sizeof *passes; n++)
            expected &= strcmp(all->fields[i].name, passes[n]) != 0;
        if (kvq__attach_refuses(command) != expected)
            fail_msg("%s", all->fields[i].name);
    }
}

// The commands of the control socket by the least role for them, each in one of three lists.
PLAIN_TEST(test_roles)
{
    static const char *const readers[] = {
        "ping",         "status",       "doctor",        "list_sessions",
        "list_clients", "list_formats", "list_prefixes", "list_quotas",
        "list_saved",   "list_remote",  "remote_status", "session_info",
        "ask_move",     "ask_transfer", "get_config",    "list_events",
    };
    static const char *const operators[] = {
        "kick_client", "drop_session",  "drop_prefixes",    "move_session", "park_session",
        "pin_session", "save_session",  "prefetch_session", "push_session", "restore_session",
        "storage",     "remove_remote", "cancel_transfer",
    };
    Kvq__Storage status = KVQ__STORAGE__INIT;
    const ProtobufCMessageDescriptor *all = &kvq__request__descriptor;
    for (unsigned i = 0; i < all->n_fields; i++) {
        Kvq__Request request = KVQ__REQUEST__INIT;
        const char *name = all->fields[i].name;
        enum kvq__role expected = KVQ__ROLE_ADMIN;
        request.command_case = (Kvq__Request__CommandCase)all->fields[i].id;
        request.storage = &status;
        if (!is_command(&all->fields[i]) || is_for_clients(request.command_case))
            continue;
        for (size_t k = 0; k < sizeof readers / sizeof *readers; k++)
            if (strcmp(readers[k], name) == 0)
                expected = KVQ__ROLE_READ;
        for (size_t k = 0; k < sizeof operators / sizeof *operators; k++)
            if (strcmp(operators[k], name) == 0)
                expected = KVQ__ROLE_OPERATE;
        status.action = KVQ__STORAGE_ACTION__STORAGE_GC;
        if (request.command_case == KVQ__REQUEST__COMMAND_PULL_SESSION)
            continue; // below
        if (kvq__role_needed(&request) != expected)
            fail_msg("%s needs another role", name);
    }
}

// From one namespace into another it is as an import.
PLAIN_TEST(test_role_of_pull)
{
    static const struct {
        const char *from, *into;
        enum kvq__role role;
    } rows[] = {{"a", "a", KVQ__ROLE_OPERATE},
                {"a", "b", KVQ__ROLE_ADMIN},
                {"a", "", KVQ__ROLE_ADMIN},
                {"", "a", KVQ__ROLE_ADMIN},
                {"", "", KVQ__ROLE_ADMIN}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Kvq__PullSession pull = KVQ__PULL_SESSION__INIT;
        Kvq__Request request = REQUEST(PULL_SESSION, pull_session, &pull);
        Kvq__SessionRef from = KVQ__SESSION_REF__INIT, into = KVQ__SESSION_REF__INIT;
        from.namespace_ = (char *)rows[i].from;
        into.namespace_ = (char *)rows[i].into;
        pull.ref = &from;
        pull.into = &into;
        assert_int_equal(kvq__role_needed(&request), rows[i].role);
        pull.into = NULL;
        assert_int_equal(kvq__role_needed(&request), KVQ__ROLE_ADMIN);
    }
}

static int check_of(Kvq__Request__CommandCase command, void *message, char *text)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    request.command_case = command;
    request.hello = message; // all commands are members of one union
    text[0] = '\0';
    return kvq__dispatch_check_names(&request, text);
}

// A name that does not fit KVQ_NAME_BYTES would be cut later on, and be another's.
PLAIN_TEST(test_long_names)
{
    char name[KVQ_NAME_BYTES + 1] = {0}, text[KVQ_TEXT_BYTES];
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    Kvq__DropSession drop = KVQ__DROP_SESSION__INIT;
    Kvq__PullSession pull = KVQ__PULL_SESSION__INIT;
    Kvq__OpenSession open = KVQ__OPEN_SESSION__INIT;
    Kvq__LookupPrefix lookup = KVQ__LOOKUP_PREFIX__INIT;
    Kvq__SetQuota quota = KVQ__SET_QUOTA__INIT;
    Kvq__ListSaved saved = KVQ__LIST_SAVED__INIT;
    Kvq__GetConfig option = KVQ__GET_CONFIG__INIT;
    drop.which_case = KVQ__DROP_SESSION__WHICH_REF;
    drop.ref = pull.into = &ref;
    lookup.session = &open;
    const struct {
        Kvq__Request__CommandCase command;
        void *message;
        char **name;
        const char *field;
    } rows[] = {
        {KVQ__REQUEST__COMMAND_DROP_SESSION, &drop, &ref.name, "SessionRef.name is"},
        {KVQ__REQUEST__COMMAND_DROP_SESSION, &drop, &ref.namespace_, "SessionRef.namespace is"},
        {KVQ__REQUEST__COMMAND_PULL_SESSION, &pull, &ref.name, "SessionRef.name is"},
        {KVQ__REQUEST__COMMAND_OPEN_SESSION, &open, &open.name, "OpenSession.name is"},
        {KVQ__REQUEST__COMMAND_LOOKUP_PREFIX, &lookup, &open.namespace_, "OpenSession.namespace"},
        {KVQ__REQUEST__COMMAND_SET_QUOTA, &quota, &quota.namespace_, "SetQuota.namespace is"},
        {KVQ__REQUEST__COMMAND_LIST_SAVED, &saved, &saved.namespace_, "ListSaved.namespace is"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *before = *rows[i].name;
        *rows[i].name = memset(name, 'n', KVQ_NAME_BYTES);
        assert_int_equal(check_of(rows[i].command, rows[i].message, text), KVQ_E_LIMIT);
        assert_says(text, rows[i].field);
        assert_says(text, "128 bytes; it can have 127");
        name[KVQ_NAME_BYTES - 1] = '\0';
        assert_int_equal(check_of(rows[i].command, rows[i].message, text), 0);
        *rows[i].name = before;
    }
    option.name = memset(name, 'n', KVQ_NAME_BYTES); // an option of a namespace is longer than that
    assert_int_equal(check_of(KVQ__REQUEST__COMMAND_GET_CONFIG, &option, text), 0);
    drop.which_case = KVQ__DROP_SESSION__WHICH_HANDLE;
    drop.handle = 1;
    assert_int_equal(check_of(KVQ__REQUEST__COMMAND_DROP_SESSION, &drop, text), 0);
}

static ProtobufCMessage *make_message(const ProtobufCMessageDescriptor *descriptor)
{
    ProtobufCMessage *message = calloc(1, descriptor->sizeof_message);
    assert_non_null(message);
    protobuf_c_message_init(descriptor, message);
    return message;
}

// Gives the field a value: a message without contents, or a number that is no address.
static void choose(ProtobufCMessage *message, const ProtobufCFieldDescriptor *field)
{
    char *base = (char *)message;
    *(uint32_t *)(base + field->quantifier_offset) = field->id;
    if (field->type == PROTOBUF_C_TYPE_MESSAGE)
        *(ProtobufCMessage **)(base + field->offset) = make_message(field->descriptor);
    else
        *(uint64_t *)(base + field->offset) = 1;
}

// What the JSON of the message has of the members of its oneofs: `chosen` or nothing.
static void check_json(const ProtobufCMessage *message, const ProtobufCFieldDescriptor *chosen)
{
    cJSON *json = kvq_json_of_message(message);
    assert_non_null(json);
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        bool is_left_out = (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) && field != chosen;
        if (strcmp(field->name, "handle") != 0 && strcmp(field->name, "next") != 0)
            assert_int_equal(!cJSON_GetObjectItemCaseSensitive(json, field->name), is_left_out);
    }
    cJSON_Delete(json);
}

// The members of a oneof share their memory: a handle must not be taken for the session's name.
PLAIN_TEST(test_json_of_choices)
{
    const ProtobufCMessageDescriptor *request = &kvq__request__descriptor;
    uint32_t choices = 0;
    for (unsigned i = 0; i < request->n_fields; i++) {
        if (!is_command(&request->fields[i]))
            continue;
        const ProtobufCMessageDescriptor *descriptor = request->fields[i].descriptor;
        ProtobufCMessage *command = make_message(descriptor);
        check_json(command, NULL);
        protobuf_c_message_free_unpacked(command, NULL);
        for (unsigned k = 0; k < descriptor->n_fields; k++) {
            if (!(descriptor->fields[k].flags & PROTOBUF_C_FIELD_FLAG_ONEOF))
                continue;
            command = make_message(descriptor);
            choose(command, &descriptor->fields[k]);
            check_json(command, &descriptor->fields[k]);
            protobuf_c_message_free_unpacked(command, NULL);
            choices++;
        }
    }
    assert_in_range(choices, 14, 200); // drop, info, move, park, prefetch, pin and save have two
}

static uint32_t json_allocations;

static void *count_allocation(size_t bytes)
{
    json_allocations++;
    return malloc(bytes);
}

// Who may not do what it asks for is told of within a budget, and costs no text beyond it.
PLAIN_TEST(test_audit_budget)
{
    struct kvq_log_budget budget = {0};
    struct kvq__asker asker = {.role = KVQ__ROLE_NONE};
    Kvq__DropSession drop = KVQ__DROP_SESSION__INIT;
    uint32_t dear = 0;
    cJSON_InitHooks(&(cJSON_Hooks){count_allocation, free});
    for (int i = 0; i < 100; i++) {
        json_allocations = 0;
        kvq__audit(&budget, &asker, &REQUEST(DROP_SESSION, drop_session, &drop), KVQ_E_PERMISSION);
        dear += json_allocations > 0;
    }
    cJSON_InitHooks(NULL);
    assert_in_range(dear, KVQ_LOG_BURST, 2 * KVQ_LOG_BURST); // a slow machine has some more
    assert_int_equal(budget.held_back, 100 - dear);
}

PLAIN_TEST(test_no_other)
{
    for (unsigned id = 0; id < 300; id++)
        if (!is_command(protobuf_c_message_descriptor_get_field(&kvq__request__descriptor, id)))
            assert_false(is_taken((Kvq__Request__CommandCase)id));
}

int main(void)
{
    return run_all(NULL, NULL);
}
