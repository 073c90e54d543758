// SPDX-License-Identifier: Apache-2.0
//
// Walks a message by its descriptor; see json.h.
#include "proto/json.h"

#include <stdbool.h>
#include <string.h>

#include "proto/wire.h"

// To the last digit: cJSON's own numbers are doubles, which it writes and reads back to see whether
// all digits are there.
static cJSON *json_of_whole(uint64_t value, bool negative)
{
    char text[24];
    char *at = text + sizeof text - 1; // by hand: a long list has hundreds of thousands of them
    *at = 0;
    do
        *--at = (char)('0' + value % 10);
    while (value /= 10);
    if (negative)
        *--at = '-';
    return cJSON_CreateRaw(at);
}

static cJSON *json_of_signed(int64_t value)
{
    return json_of_whole(value < 0 ? 0 - (uint64_t)value : (uint64_t)value, value < 0);
}

static cJSON *json_of_real(double value)
{
    bool small = value > -1e15 && value < 1e15;
    return small && value == (double)(int64_t)value ? json_of_signed((int64_t)value)
                                                    : cJSON_CreateNumber(value);
}

// The value at `at`, a member of the given type as protobuf-c lays it out.
static cJSON *json_of_value(const ProtobufCFieldDescriptor *field, const char *at)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_BOOL:
        return cJSON_CreateBool(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_UINT32:
        return json_of_whole(*(const uint32_t *)at, false);
    case PROTOBUF_C_TYPE_ENUM:
    case PROTOBUF_C_TYPE_SINT32:
        return json_of_signed(*(const int32_t *)at);
    case PROTOBUF_C_TYPE_UINT64:
        return json_of_whole(*(const uint64_t *)at, false);
    case PROTOBUF_C_TYPE_INT64:
        return json_of_signed(*(const int64_t *)at);
    case PROTOBUF_C_TYPE_FLOAT:
        return json_of_real(*(const float *)at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return json_of_real(*(const double *)at);
    case PROTOBUF_C_TYPE_STRING:
        return cJSON_CreateString(*(char *const *)at);
    case PROTOBUF_C_TYPE_MESSAGE:
        return kvq_json_of_message(*(ProtobufCMessage *const *)at);
    default:
        return cJSON_CreateNull(); // no message that is printed has another type
    }
}

// One object for all: {"steps": 7, ..}.
static cJSON *json_of_counters(Kvq__Counter *const *counters, size_t n)
{
    cJSON *object = cJSON_CreateObject();
    for (size_t i = 0; i < n; i++)
        cJSON_AddItemToObject(object, counters[i]->name, json_of_whole(counters[i]->value, false));
    return object;
}

static cJSON *json_of_repeated(const ProtobufCFieldDescriptor *field, const char *base)
{
    size_t n = *(const size_t *)(base + field->quantifier_offset);
    ProtobufCMessage *const *messages = *(ProtobufCMessage * *const *)(base + field->offset);
    if (field->descriptor == &kvq__counter__descriptor)
        return json_of_counters((Kvq__Counter *const *)messages, n);
    cJSON *array = cJSON_CreateArray();
    if (field->type == PROTOBUF_C_TYPE_MESSAGE)
        for (size_t i = 0; i < n; i++)
            cJSON_AddItemToArray(array, kvq_json_of_message(messages[i]));
    return array;
}

cJSON *kvq_json_of_message(const ProtobufCMessage *message)
{
    if (!message)
        return cJSON_CreateNull();
    cJSON *object = cJSON_CreateObject();
    const char *base = (const char *)message;
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        // A handle belongs to a client's attachment, a cursor to a page: here they say nothing.
        if (strcmp(field->name, "handle") == 0 || strcmp(field->name, "next") == 0 ||
            !kvq_field_held(message, field))
            continue;
        cJSON_AddItemToObjectCS(object, field->name,
                                field->label == PROTOBUF_C_LABEL_REPEATED
                                    ? json_of_repeated(field, base)
                                    : json_of_value(field, base + field->offset));
    }
    return object;
}

cJSON *kvq_json_of_whole(uint64_t value)
{
    return json_of_whole(value, false);
}
