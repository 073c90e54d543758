// SPDX-License-Identifier: Apache-2.0
//
// Messages as JSON, by their own descriptors: a new field of kvq.proto needs no line here. For
// people and scripts; nothing reads it back. Any thread.
#ifndef KVQ_PROTO_JSON_H
#define KVQ_PROTO_JSON_H

#include <cJSON.h>
#include <protobuf-c/protobuf-c.h>
#include <stdint.h>

// An object of all fields, by their names; null for NULL. Leaves out handles, which belong to one
// client's attachment, cursors, which belong to a page, and what a oneof does not hold. The
// caller deletes it (cJSON_Delete). Where there is no memory, parts of it are missing, or it is
// NULL.
cJSON *kvq_json_of_message(const ProtobufCMessage *message);
// A whole number to its last digit; cJSON's own numbers are doubles.
cJSON *kvq_json_of_whole(uint64_t value);

#endif
