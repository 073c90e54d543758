// SPDX-License-Identifier: Apache-2.0
//
// Packs and unpacks control messages: the only user of the generated code of kvq.proto and
// saved.proto.
//
// Unpacking takes hostile bytes. Before it builds a message, it walks the bytes once and checks
// them against the message's description: sizes, wire types, counts, repeated single fields, text
// (valid UTF-8 without control characters, at most KVQ_TEXT_BYTES - 1 bytes) and other bytes (at
// most KVQ_MAX_FIELD_BYTES). It builds the message in the caller's arena, allocates nothing else,
// and leaves nothing to free. Thread-safe: every function touches only its arguments.
#ifndef KVQ_PROTO_WIRE_H
#define KVQ_PROTO_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/kvq.pb-c.h"
#include "proto/limits.h"
#include "proto/saved.pb-c.h"

// Bits of Gpu.orders.
enum { KVQ_GPU_ORDERS_TIMELINES = 1, KVQ_GPU_ORDERS_EVENTS = 2 };

// Memory that is allocated front to back and freed all at once.
struct kvq_arena {
    uint8_t *memory;
    size_t size, used;
    bool full; // an allocation failed
};

// The memory stays the caller's. KVQ_WIRE_ARENA bytes are enough for any message that fits
// KVQ_MAX_MESSAGE and passes the checks.
void kvq_arena_init(struct kvq_arena *arena, void *memory, size_t size);
// Zeroed and aligned for any type; NULL when the arena is full.
void *kvq_arena_alloc(struct kvq_arena *arena, size_t bytes);
// A copy of a text, cut at KVQ_TEXT_BYTES - 1 bytes; never NULL ("" when the arena is full).
// Bytes that the wire refuses (control characters, broken UTF-8) become '?'.
char *kvq_arena_text(struct kvq_arena *arena, const char *text);

// Small numbers travel as 32 bits. One that is larger than its place is noted and cut, so that a
// whole message can be taken apart before its reader looks.
struct kvq_narrow {
    bool wrong;
};

static inline uint8_t kvq_narrow_byte(struct kvq_narrow *n, uint32_t value, uint32_t most)
{
    n->wrong |= value > most;
    return (uint8_t)value;
}

static inline uint16_t kvq_narrow_short(struct kvq_narrow *n, uint32_t value)
{
    n->wrong |= value > UINT16_MAX;
    return (uint16_t)value;
}

// Packs a message into buffer. 0, or KVQ_E_LIMIT if it does not fit in size bytes.
int kvq_request_pack(const Kvq__Request *message, void *buffer, size_t size, size_t *length);
int kvq_reply_pack(const Kvq__Reply *message, void *buffer, size_t size, size_t *length);
int kvq_event_pack(const Kvq__Event *message, void *buffer, size_t size, size_t *length);

int kvq_saved_pack(const Kvq__SavedSession *message, void *buffer, size_t size, size_t *length);

// Unpacks bytes into the arena. 0, or KVQ_E_PROTOCOL (KVQ_E_LIMIT for a message that is too long
// or a full arena) with a sentence in text that names the field. text is KVQ_TEXT_BYTES long. A
// Request holds exactly one command. The message is valid as long as the arena's contents.
int kvq_request_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                       Kvq__Request **message, char *text);
// The checks of it alone.
int kvq_request_check(const void *bytes, size_t length, char *text);
// The id of a request that need not pass the checks, so that its sender can be told why: his reply
// is the one with this id. 0: it has none, or its fields cannot be told apart.
uint32_t kvq_request_id(const void *bytes, size_t length);
int kvq_reply_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                     Kvq__Reply **message, char *text);
int kvq_event_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                     Kvq__Event **message, char *text);

int kvq_saved_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                     Kvq__SavedSession **message, char *text);

// Whether a message has this field of its description, as all but the members of a oneof that are
// not its choice. These share the memory of the one that is, so nobody may read them.
bool kvq_field_held(const ProtobufCMessage *message, const ProtobufCFieldDescriptor *field);

// Whether a message may hold this text: valid UTF-8, no control characters, no NUL in its bytes.
int kvq_text_valid(const char *bytes, size_t length);

#endif
