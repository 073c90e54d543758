// SPDX-License-Identifier: Apache-2.0
//
// Walks foreign bytes against the descriptors that protoc-c generated, then unpacks them into an
// arena. protobuf-c by itself checks neither UTF-8 nor NUL characters, and takes a single field
// that appears twice.
#include "proto/wire.h"

#include <assert.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "proto/status.h"

enum { ARENA_ALIGN = 16, MAX_DEPTH = 8, MAX_FIELDS = 64 };

enum wire_type { WIRE_VARINT = 0, WIRE_64BIT = 1, WIRE_LENGTH = 2, WIRE_32BIT = 5 };

void kvq_arena_init(struct kvq_arena *arena, void *memory, size_t size)
{
    size_t skew = (uintptr_t)memory % ARENA_ALIGN;
    size_t skip = skew ? ARENA_ALIGN - skew : 0;
    arena->memory = (uint8_t *)memory + (skip < size ? skip : size);
    arena->size = skip < size ? size - skip : 0;
    arena->used = 0;
    arena->full = false;
}

void *kvq_arena_alloc(struct kvq_arena *arena, size_t bytes)
{
    if (bytes > arena->size - arena->used) {
        arena->full = true;
        return NULL;
    }
    uint8_t *memory = arena->memory + arena->used;
    size_t rounded = (bytes + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    size_t left = arena->size - arena->used;
    arena->used += rounded < left ? rounded : left;
    memset(memory, 0, bytes);
    return memory;
}

// Length of the valid UTF-8 character at the front of the bytes, or 0.
static size_t character_length(const uint8_t *s, size_t n)
{
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t length = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (length == 0 || length > n || s[0] > 0xf4)
        return 0;
    if (length == 1)
        return s[0] >= 0x20 && s[0] != 0x7f;
    uint32_t value = s[0] & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        value = value << 6 | (s[i] & 0x3f);
    }
    bool surrogate = value >= 0xd800 && value < 0xe000;
    bool control = value < 0xa0 || value == 0x2028 || value == 0x2029;
    bool valid = value >= smallest[length] && value <= 0x10ffff && !surrogate && !control;
    return valid ? length : 0;
}

int kvq_text_valid(const char *bytes, size_t length)
{
    for (size_t at = 0; at < length;) {
        size_t step = character_length((const uint8_t *)bytes + at, length - at);
        if (step == 0)
            return 0;
        at += step;
    }
    return 1;
}

bool kvq_field_held(const ProtobufCMessage *message, const ProtobufCFieldDescriptor *field)
{
    const char *base = (const char *)message;
    assert(field >= message->descriptor->fields &&
           field < message->descriptor->fields + message->descriptor->n_fields);
    return !(field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) ||
           *(const uint32_t *)(base + field->quantifier_offset) == field->id;
}

char *kvq_arena_text(struct kvq_arena *arena, const char *text)
{
    static char empty[1];
    size_t length = strnlen(text, KVQ_TEXT_BYTES - 1);
    char *copy = kvq_arena_alloc(arena, length + 1);
    if (!copy)
        return empty;
    for (size_t at = 0; at < length;) {
        size_t step = character_length((const uint8_t *)text + at, length - at);
        if (step == 0) {
            copy[at++] = '?';
        } else {
            memcpy(copy + at, text + at, step);
            at += step;
        }
    }
    return copy;
}

// ---- Walking ----

struct walk {
    const uint8_t *at, *end;
    char *text;        // where a complaint goes
    uint32_t elements; // of lists, and unknown fields, in the whole message
};

__attribute__((format(printf, 2, 3))) static int complain(struct walk *w, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(w->text, KVQ_TEXT_BYTES, format, arguments);
    va_end(arguments);
    return KVQ_E_PROTOCOL;
}

static bool read_varint(struct walk *w, uint64_t *value)
{
    *value = 0;
    for (unsigned shift = 0; shift < 64 && w->at < w->end; shift += 7) {
        uint8_t byte = *w->at++;
        if (shift == 63 && byte > 1)
            return false;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return true;
    }
    return false;
}

static unsigned wire_type_of(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
        return WIRE_32BIT;
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return WIRE_64BIT;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE:
        return WIRE_LENGTH;
    default:
        return WIRE_VARINT;
    }
}

// Steps over the payload of one field and gives its length-delimited part, if it has one.
static bool skip_payload(struct walk *w, unsigned type, const uint8_t **bytes, uint64_t *length)
{
    uint64_t value;
    *bytes = w->at;
    *length = 0;
    switch (type) {
    case WIRE_VARINT:
        return read_varint(w, &value);
    case WIRE_64BIT:
        *length = 8;
        break;
    case WIRE_32BIT:
        *length = 4;
        break;
    case WIRE_LENGTH:
        if (!read_varint(w, length))
            return false;
        *bytes = w->at;
        break;
    default:
        return false;
    }
    if (*length > (uint64_t)(w->end - w->at))
        return false;
    w->at += *length;
    return true;
}

// Fields already seen in one message: single ones may come once, of a oneof only one.
struct seen {
    uint64_t fields;
    unsigned oneofs[4];
    unsigned n_oneofs;
};

static int note_single(struct walk *w, struct seen *seen, const ProtobufCMessageDescriptor *message,
                       const ProtobufCFieldDescriptor *field)
{
    uint64_t bit = 1ull << (field - message->fields);
    if (seen->fields & bit)
        return complain(w, "%s.%s appears twice", message->short_name, field->name);
    seen->fields |= bit;
    if (!(field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF))
        return 0;
    for (unsigned i = 0; i < seen->n_oneofs; i++)
        if (seen->oneofs[i] == field->quantifier_offset)
            return complain(w, "%s holds %s besides another of the same choice; send one",
                            message->short_name, field->name);
    if (seen->n_oneofs < 4)
        seen->oneofs[seen->n_oneofs++] = field->quantifier_offset;
    return 0;
}

static int check_text(struct walk *w, const ProtobufCMessageDescriptor *message,
                      const ProtobufCFieldDescriptor *field, const uint8_t *bytes, uint64_t length)
{
    if (length >= KVQ_TEXT_BYTES)
        return complain(w, "%s.%s is %llu bytes long; at most %d are taken", message->short_name,
                        field->name, (unsigned long long)length, KVQ_TEXT_BYTES - 1);
    if (!kvq_text_valid((const char *)bytes, length))
        return complain(w, "%s.%s holds control characters or is not UTF-8", message->short_name,
                        field->name);
    return 0;
}

static int check_message(struct walk *w, const ProtobufCMessageDescriptor *message, int depth);

// Checks a field that the description knows; bytes and length are its payload.
static int check_field(struct walk *w, struct seen *seen, const ProtobufCMessageDescriptor *message,
                       const ProtobufCFieldDescriptor *field, const uint8_t *bytes, uint64_t length,
                       int depth)
{
    if (field->label == PROTOBUF_C_LABEL_REPEATED) {
        if (++w->elements > KVQ_MAX_LIST)
            return complain(w, "%s.%s: more than %d list elements in one message",
                            message->short_name, field->name, KVQ_MAX_LIST);
    } else {
        int error = note_single(w, seen, message, field);
        if (error)
            return error;
    }
    if (field->type == PROTOBUF_C_TYPE_STRING)
        return check_text(w, message, field, bytes, length);
    if (field->type == PROTOBUF_C_TYPE_BYTES && length > KVQ_MAX_FIELD_BYTES)
        return complain(w, "%s.%s is %llu bytes long; at most %d are taken", message->short_name,
                        field->name, (unsigned long long)length, KVQ_MAX_FIELD_BYTES);
    if (field->type != PROTOBUF_C_TYPE_MESSAGE)
        return 0;
    struct walk inner = *w;
    inner.at = bytes;
    inner.end = bytes + length;
    int error = check_message(&inner, field->descriptor, depth + 1);
    w->elements = inner.elements;
    return error;
}

// Checks every field of one message. Unknown fields are stepped over.
static int check_message(struct walk *w, const ProtobufCMessageDescriptor *message, int depth)
{
    struct seen seen = {0};
    if (depth > MAX_DEPTH || message->n_fields > MAX_FIELDS)
        return complain(w, "%s is nested too deeply", message->short_name);
    while (w->at < w->end) {
        uint64_t tag, length;
        const uint8_t *bytes;
        if (!read_varint(w, &tag) || tag >> 32 || tag >> 3 == 0)
            return complain(w, "%s: broken field number", message->short_name);
        unsigned type = tag & 7;
        if (!skip_payload(w, type, &bytes, &length))
            return complain(w, "%s: field %llu is cut short or of unknown wire type %u",
                            message->short_name, (unsigned long long)(tag >> 3), type);
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field(message, (unsigned)(tag >> 3));
        if (!field) {
            if (++w->elements > KVQ_MAX_LIST)
                return complain(w, "%s: more than %d unknown fields", message->short_name,
                                KVQ_MAX_LIST);
            continue;
        }
        if (type != wire_type_of(field))
            return complain(w, "%s.%s has wire type %u; %u is right", message->short_name,
                            field->name, type, wire_type_of(field));
        int error = check_field(w, &seen, message, field, bytes, length, depth);
        if (error)
            return error;
    }
    return 0;
}

// ---- Packing and unpacking ----

static void *arena_alloc(void *arena, size_t bytes)
{
    return kvq_arena_alloc(arena, bytes);
}

static void arena_free(void *arena, void *memory)
{
    (void)arena;
    (void)memory;
}

static const uint8_t nothing[1]; // in place of the bytes of an empty message

static int check(const ProtobufCMessageDescriptor *descriptor, const void *bytes, size_t length,
                 char *text)
{
    if (length > KVQ_MAX_MESSAGE) {
        snprintf(text, KVQ_TEXT_BYTES, "a message of %zu bytes; at most %d are taken", length,
                 KVQ_MAX_MESSAGE);
        return KVQ_E_LIMIT;
    }
    const uint8_t *start = bytes ? bytes : nothing;
    struct walk w = {.at = start, .end = start + length, .text = text};
    return check_message(&w, descriptor, 0);
}

static int unpack(const ProtobufCMessageDescriptor *descriptor, const void *bytes, size_t length,
                  struct kvq_arena *arena, ProtobufCMessage **message, char *text)
{
    const uint8_t *start = bytes ? bytes : nothing;
    *message = NULL;
    int error = check(descriptor, bytes, length, text);
    if (error)
        return error;
    arena->full = false;
    ProtobufCAllocator allocator = {arena_alloc, arena_free, arena};
    *message = protobuf_c_message_unpack(descriptor, &allocator, length, start);
    if (*message)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES, arena->full ? "no room left to unpack a %s" : "malformed %s",
             descriptor->short_name);
    return arena->full ? KVQ_E_LIMIT : KVQ_E_PROTOCOL;
}

static int pack(const ProtobufCMessage *message, void *buffer, size_t size, size_t *length)
{
    *length = protobuf_c_message_get_packed_size(message);
    if (*length > size)
        return KVQ_E_LIMIT;
    protobuf_c_message_pack(message, buffer);
    return 0;
}

int kvq_request_pack(const Kvq__Request *message, void *buffer, size_t size, size_t *length)
{
    return pack(&message->base, buffer, size, length);
}

int kvq_reply_pack(const Kvq__Reply *message, void *buffer, size_t size, size_t *length)
{
    return pack(&message->base, buffer, size, length);
}

int kvq_event_pack(const Kvq__Event *message, void *buffer, size_t size, size_t *length)
{
    return pack(&message->base, buffer, size, length);
}

int kvq_saved_pack(const Kvq__SavedSession *message, void *buffer, size_t size, size_t *length)
{
    return pack(&message->base, buffer, size, length);
}

int kvq_request_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                       Kvq__Request **message, char *text)
{
    ProtobufCMessage *base;
    int error = unpack(&kvq__request__descriptor, bytes, length, arena, &base, text);
    *message = (Kvq__Request *)base;
    if (error || (*message)->command_case != KVQ__REQUEST__COMMAND__NOT_SET)
        return error;
    snprintf(text, KVQ_TEXT_BYTES, "the request holds no command that this daemon knows");
    *message = NULL;
    return KVQ_E_PROTOCOL;
}

int kvq_request_check(const void *bytes, size_t length, char *text)
{
    return check(&kvq__request__descriptor, bytes, length, text);
}

uint32_t kvq_request_id(const void *bytes, size_t length)
{
    const uint8_t *start = bytes ? bytes : nothing;
    const unsigned id_field =
        protobuf_c_message_descriptor_get_field_by_name(&kvq__request__descriptor, "id")->id;
    struct walk w = {.at = start, .end = start + length};
    uint64_t tag, size, id = 0;
    while (w.at < w.end) {
        const uint8_t *payload;
        if (!read_varint(&w, &tag) || !skip_payload(&w, tag & 7, &payload, &size))
            return 0;
        struct walk value = {.at = payload, .end = w.at};
        if (tag != (id_field << 3 | WIRE_VARINT))
            continue;
        if (id || !read_varint(&value, &id) || id > UINT32_MAX)
            return 0;
    }
    return (uint32_t)id;
}

int kvq_reply_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                     Kvq__Reply **message, char *text)
{
    ProtobufCMessage *base;
    int error = unpack(&kvq__reply__descriptor, bytes, length, arena, &base, text);
    *message = (Kvq__Reply *)base;
    return error;
}

int kvq_event_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                     Kvq__Event **message, char *text)
{
    ProtobufCMessage *base;
    int error = unpack(&kvq__event__descriptor, bytes, length, arena, &base, text);
    *message = (Kvq__Event *)base;
    return error;
}

int kvq_saved_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                     Kvq__SavedSession **message, char *text)
{
    ProtobufCMessage *base;
    int error = unpack(&kvq__saved_session__descriptor, bytes, length, arena, &base, text);
    *message = (Kvq__SavedSession *)base;
    return error;
}
