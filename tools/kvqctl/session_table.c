// SPDX-License-Identifier: Apache-2.0
// Sessions as a list shows them.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tools/kvqctl/table.h"

static const Kvq__Session *session(const ProtobufCMessage *message)
{
    return (const Kvq__Session *)message;
}

static const char *name_text(const ProtobufCMessage *message)
{
    const Kvq__Session *s = session(message);
    return s->name && *s->name ? s->name : kvq__ctl_text("#%" PRIu64, s->id);
}

static const char *label_text(const ProtobufCMessage *message)
{
    const Kvq__Session *s = session(message);
    const char *name = kvq__ctl_clean(name_text(message));
    bool sharded = s->name && *s->name && s->shards > 1;
    return sharded ? kvq__ctl_text("%s %" PRIu32 "/%" PRIu32, name, s->shard, s->shards) : name;
}

const char *kvq__ctl_session_label(const Kvq__Session *s)
{
    return label_text(&s->base);
}

static const char *state_text(const ProtobufCMessage *message)
{
    const Kvq__Session *s = session(message);
    bool away = s->tier && strcmp(s->tier, "disk") == 0;
    const char *first = kvq__ctl_text("%s%s", away ? "on disk, " : "", s->pinned ? "pinned, " : "");
    if (s->writer_client)
        return kvq__ctl_text("%sclient %" PRIu64 "%s", first, s->writer_client,
                             s->step_open ? ", in a step" : "");
    if (s->readers)
        return kvq__ctl_text("%s%s", first, kvq__ctl_count(s->readers, "reader"));
    if (s->keep_ms)
        return kvq__ctl_text("%skept %s more", first, kvq__ctl_duration(s->keep_ms));
    return kvq__ctl_text("%sidle %s", first, kvq__ctl_duration(s->idle_ms));
}

const char *kvq__ctl_session_state(const Kvq__Session *s)
{
    return state_text(&s->base);
}

static uint64_t memory_of(const ProtobufCMessage *message)
{
    const Kvq__Session *s = session(message);
    return s->packed_bytes + s->window_bytes + s->table_bytes;
}

static const char *shared_text(const ProtobufCMessage *message)
{
    const Kvq__Session *s = session(message);
    return s->shared_unknown ? "?" : kvq__ctl_bytes(s->shared_bytes);
}

// Of what is on disk alone, or empty, nothing is in memory that could be compared.
static const char *token_bytes_text(const ProtobufCMessage *message)
{
    double bytes = session(message)->bytes_per_token_head_total;
    return bytes > 0 ? kvq__ctl_text("%.1f", bytes) : "-";
}

static const char *compression_text(const ProtobufCMessage *message)
{
    double times = session(message)->compression;
    return times > 0 ? kvq__ctl_text("%.2fx", times) : "-";
}

// No client has the number 0.
static const char *writer_text(const ProtobufCMessage *message)
{
    uint64_t client = ((const Kvq__Session *)message)->writer_client;
    return client ? kvq__ctl_text("%" PRIu64, client) : "-";
}

// What a list shows comes first, in this order.
static const struct kvq__ctl_column columns[] = {
    {.name = "namespace", .heading = "NAMESPACE", .field = "namespace", .width = -14},
    {.name = "name", .heading = "NAME", .text = name_text, .people = label_text, .width = -20},
    {.name = "tokens",
     .heading = "TOKENS",
     .field = "tokens",
     .show = KVQ__CTL_AS_NUMBER,
     .width = 9},
    {.name = "format", .heading = "FORMAT", .field = "format", .width = -10},
    {.name = "bits",
     .heading = "BITS/VAL",
     .field = "bits_per_value",
     .show = KVQ__CTL_AS_2_PLACES,
     .width = 8},
    {.name = "token-bytes",
     .heading = "B/TOK/HD",
     .field = "bytes_per_token_head_total",
     .show = KVQ__CTL_AS_1_PLACE,
     .people = token_bytes_text,
     .width = 8},
    {.name = "memory",
     .heading = "MEMORY",
     .whole = memory_of,
     .show = KVQ__CTL_AS_BYTES,
     .width = 11},
    {.name = "shared",
     .heading = "SHARED",
     .field = "shared_bytes",
     .show = KVQ__CTL_AS_BYTES,
     .people = shared_text,
     .width = 11},
    {.name = "compression",
     .heading = "COMPR.",
     .field = "compression",
     .show = KVQ__CTL_AS_TIMES,
     .people = compression_text,
     .width = 7},
    {.name = "state", .heading = "STATE", .text = state_text, .width = -5, .apart = true},
#define EXTRA(NAME, HEADING, FIELD, SHOW, WIDTH)                                                   \
    {                                                                                              \
        .name = (NAME), .heading = (HEADING), .field = (FIELD), .show = KVQ__CTL_AS_##SHOW,        \
        .width = (WIDTH), .apart = (WIDTH) < 0, .extra = true                                      \
    }
    EXTRA("id", "ID", "id", NUMBER, 8),
    EXTRA("model", "MODEL", "model", TEXT, -12),
    EXTRA("layers", "LAYERS", "layers", NUMBER, 6),
    EXTRA("shard", "SHARD", "shard", NUMBER, 5),
    EXTRA("shards", "SHARDS", "shards", NUMBER, 6),
    EXTRA("place", "PLACE", "place", TEXT, -8),
    EXTRA("tier", "TIER", "tier", TEXT, -6),
    EXTRA("path", "PATH", "path", TEXT, -5),
    EXTRA("packed", "PACKED", "packed_bytes", BYTES, 11),
    EXTRA("windows", "WINDOWS", "window_bytes", BYTES, 11),
    EXTRA("tables", "TABLES", "table_bytes", BYTES, 11),
    EXTRA("prefix", "PREFIX", "prefix_tokens", NUMBER, 9),
    {.name = "client",
     .heading = "CLIENT",
     .field = "writer_client",
     .show = KVQ__CTL_AS_NUMBER,
     .width = 8,
     .extra = true,
     .people = writer_text},
    EXTRA("readers", "READERS", "readers", NUMBER, 7),
    EXTRA("idle", "IDLE", "idle_ms", DURATION, 12),
    EXTRA("keep", "KEPT", "keep_ms", DURATION, 12),
    EXTRA("saved", "SAVED", "saved", YES_NO, 5),
    EXTRA("pinned", "PINNED", "pinned", YES_NO, 6),
};

const struct kvq__ctl_table kvq__ctl_sessions = {
    KVQ__CTL_TABLE(columns, "sessions", "no sessions", "no sessions in that namespace")};
