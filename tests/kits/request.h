// SPDX-License-Identifier: Apache-2.0
//
// A client's request as one expression.
#ifndef KVQ_TESTS_REQUEST_H
#define KVQ_TESTS_REQUEST_H

#include "proto/wire.h"

// With a message of its command: REQUEST(CANCEL, cancel, &message).
#define REQUEST(command, member, message)                                                          \
    ((Kvq__Request){.base = PROTOBUF_C_MESSAGE_INIT(&kvq__request__descriptor),                    \
                    .command_case = KVQ__REQUEST__COMMAND_##command,                               \
                    .member = (message)})

#endif
