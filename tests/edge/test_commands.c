// SPDX-License-Identifier: Apache-2.0
//
// Every command of the protocol is somebody's: a row of dispatch, of the attach socket or of the
// store jobs, or the doctor's. A number that is no command is nobody's.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/attach/attach.h"
#include "daemon/commands/dispatch.h"
#include "daemon/store/store.h"

static bool is_taken(Kvq__Request__CommandCase command)
{
    return kvq__dispatch_takes(command) || kvq__attach_takes(command) || kvq__jobs_knows(command) ||
           command == KVQ__REQUEST__COMMAND_DOCTOR;
}

// In kvq.proto a command is a message of the request; its other fields are numbers.
static bool is_command(const ProtobufCFieldDescriptor *field)
{
    return field && field->type == PROTOBUF_C_TYPE_MESSAGE;
}

static void test_every_command(void **state)
{
    const ProtobufCMessageDescriptor *request = &kvq__request__descriptor;
    uint32_t commands = 0;
    (void)state;
    for (unsigned i = 0; i < request->n_fields; i++) {
        if (!is_command(&request->fields[i]))
            continue;
        commands++;
        if (!is_taken((Kvq__Request__CommandCase)request->fields[i].id))
            fail_msg("nobody takes %s", request->fields[i].name);
    }
    assert_in_range(commands, 50, 200);
}

static void test_no_other(void **state)
{
    (void)state;
    for (unsigned id = 0; id < 300; id++)
        if (!is_command(protobuf_c_message_descriptor_get_field(&kvq__request__descriptor, id)))
            assert_false(is_taken((Kvq__Request__CommandCase)id));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_command),
        cmocka_unit_test(test_no_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
