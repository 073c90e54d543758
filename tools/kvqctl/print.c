// SPDX-License-Identifier: Apache-2.0
// Printing: messages as JSON by their own descriptors, and numbers in short forms for people.
#include <cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvqctl/kvqctl.h"

enum { ELEMENT_BYTES = 4096 }; // that printing one begins with

// A ring of static buffers, so that one printf may use several short forms.
static char *short_buffer(size_t *size)
{
    static char buffers[16][512];
    static unsigned next;
    *size = sizeof buffers[0];
    return buffers[next++ % 16];
}

const char *kvq__ctl_bytes(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0, size;
    char *text = short_buffer(&size);
    while (value >= 1024 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1024;
        unit++;
    }
    snprintf(text, size, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}

const char *kvq__ctl_of_bytes(uint64_t used, uint64_t limit)
{
    size_t size;
    char is[32], most[32];
    snprintf(is, sizeof is, "%s", kvq__ctl_bytes(used));
    snprintf(most, sizeof most, "%s", kvq__ctl_bytes(limit));
    char *text = short_buffer(&size);
    snprintf(text, size, limit ? "%s of %s" : "%s", is, most);
    return text;
}

const char *kvq__ctl_of(uint64_t used, uint64_t limit)
{
    size_t size;
    char *text = short_buffer(&size);
    if (limit)
        snprintf(text, size, "%llu of %llu", (unsigned long long)used, (unsigned long long)limit);
    else
        snprintf(text, size, "%llu", (unsigned long long)used);
    return text;
}

const char *kvq__ctl_duration(uint64_t ms)
{
    size_t size;
    char *text = short_buffer(&size);
    unsigned long long s = ms / 1000;
    if (s < 10)
        snprintf(text, size, "%.1f s", (double)ms / 1000);
    else if (s < 120)
        snprintf(text, size, "%llu s", s);
    else if (s < 7200)
        snprintf(text, size, "%llu min", s / 60);
    else if (s < 48 * 3600)
        snprintf(text, size, "%llu h %llu min", s / 3600, s / 60 % 60);
    else
        snprintf(text, size, "%llu days", s / 86400);
    return text;
}

const char *kvq__ctl_clean(const char *text)
{
    size_t size, i = 0;
    char *clean = short_buffer(&size);
    for (; text && text[i] && i + 1 < size; i++) {
        unsigned char c = (unsigned char)text[i];
        clean[i] = c < 32 || c == 127 ? '?' : text[i];
    }
    clean[i] = 0;
    return clean;
}

uint64_t kvq__ctl_counter(const Kvq__StatusReply *status, const char *name)
{
    for (size_t i = 0; i < status->n_counters; i++)
        if (strcmp(status->counters[i]->name, name) == 0)
            return status->counters[i]->value;
    return 0;
}

static cJSON *json_of_message(const ProtobufCMessage *message);

// To the last digit: cJSON's own numbers are doubles, which it writes and reads back to see whether
// all digits are there.
static cJSON *json_of_whole(uint64_t value, bool negative)
{
    char text[24];
    snprintf(text, sizeof text, "%s%llu", negative ? "-" : "", (unsigned long long)value);
    return cJSON_CreateRaw(text);
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
        return json_of_message(*(ProtobufCMessage *const *)at);
    default:
        return cJSON_CreateNull(); // kvq.proto has no other type
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
            cJSON_AddItemToArray(array, json_of_message(messages[i]));
    return array;
}

static cJSON *json_of_message(const ProtobufCMessage *message)
{
    if (!message)
        return cJSON_CreateNull();
    cJSON *object = cJSON_CreateObject();
    const char *base = (const char *)message;
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        // A handle belongs to a client's attachment, a cursor to a page: here they say nothing.
        if (strcmp(field->name, "handle") == 0 || strcmp(field->name, "next") == 0)
            continue;
        cJSON_AddItemToObjectCS(object, field->name,
                                field->label == PROTOBUF_C_LABEL_REPEATED
                                    ? json_of_repeated(field, base)
                                    : json_of_value(field, base + field->offset));
    }
    return object;
}

static void print_and_free(cJSON *json)
{
    char *text = cJSON_Print(json);
    printf("%s\n", text ? text : "null");
    cJSON_free(text);
    cJSON_Delete(json);
}

void kvq__ctl_print_json(const ProtobufCMessage *message)
{
    print_and_free(json_of_message(message));
}

// As an element of an array: the brackets of one that holds nothing else are left out.
static void print_element(const ProtobufCMessage *message, bool formatted)
{
    cJSON *array = cJSON_CreateArray();
    cJSON_AddItemToArray(array, json_of_message(message));
    char *text = cJSON_PrintBuffered(array, ELEMENT_BYTES, formatted);
    size_t n = text ? strlen(text) : 0;
    if (n > 2)
        fwrite(text + 1, 1, n - 2, stdout);
    else
        fputs("null", stdout);
    cJSON_free(text);
    cJSON_Delete(array);
}

// One element after the other: a list may be long.
static void print_elements(ProtobufCMessage *const *messages, size_t n, bool formatted)
{
    putchar('[');
    for (size_t i = 0; i < n; i++) {
        if (i > 0)
            fputs(formatted ? ", " : ",", stdout);
        print_element(messages[i], formatted);
    }
    putchar(']');
}

void kvq__ctl_print_json_array(ProtobufCMessage *const *messages, size_t n)
{
    print_elements(messages, n, true);
    putchar('\n');
}

void kvq__ctl_print_json_line(const ProtobufCMessage *status, ProtobufCMessage *const *sessions,
                              size_t n)
{
    cJSON *json = json_of_message(status);
    char *text = cJSON_PrintUnformatted(json);
    printf("{\"status\":%s,\"sessions\":", text ? text : "null");
    print_elements(sessions, n, false);
    fputs("}\n", stdout);
    fflush(stdout);
    cJSON_free(text);
    cJSON_Delete(json);
}

void kvq__ctl_print_done(const struct kvq__ctl *ctl, const char *what, const char *name)
{
    if (!ctl->json) {
        printf("%s %s\n", what, kvq__ctl_clean(name));
        return;
    }
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, what, name);
    print_and_free(object);
}

void kvq__ctl_print_versions(const char *ours, const char *theirs)
{
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "kvqctl", ours);
    cJSON_AddItemToObject(object, "kvqd", theirs ? cJSON_CreateString(theirs) : cJSON_CreateNull());
    print_and_free(object);
}
