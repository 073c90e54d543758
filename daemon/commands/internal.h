// SPDX-License-Identifier: Apache-2.0
//
// What the files of commands share: one function a command, which dispatch.c's table names.
#ifndef KVQ_DAEMON_COMMANDS_INTERNAL_H
#define KVQ_DAEMON_COMMANDS_INTERNAL_H

#include "daemon/commands/dispatch.h"

// One request and its reply, while it runs.
struct kvq__call {
    const struct kvq__dispatch *d;
    const Kvq__Request *request;
    struct kvq_arena *arena; // of what the reply points to
    Kvq__Reply *reply;
    char text[KVQ_TEXT_BYTES]; // why it was refused
};

// 0, or a code with a text. On success the reply's result is the one that the table has.
typedef int kvq__run_command(struct kvq__call *call);

// sessions.c
kvq__run_command kvq__run_open_session, kvq__run_close_session, kvq__run_drop_session,
    kvq__run_session_info, kvq__run_pin_session, kvq__run_lookup_prefix, kvq__run_tell_spans,
    kvq__run_drop_prefixes;
// moves.c
kvq__run_command kvq__run_move_session, kvq__run_park_session, kvq__run_prefetch_session,
    kvq__run_ask_move;
// status.c
kvq__run_command kvq__run_ping, kvq__run_status, kvq__run_kick_client;
// lists.c: pages, each refused with what cursors are refused with (cursor.h), too
kvq__run_command kvq__run_list_sessions, kvq__run_list_clients, kvq__run_list_formats,
    kvq__run_list_prefixes, kvq__run_list_quotas;

// Handles are an attached client's: KVQ_E_INVALID with a text on a socket without one.
int kvq__call_needs_client(struct kvq__call *call);
// Says that the reply does not fit its arena; returns KVQ_E_NO_MEMORY.
int kvq__call_no_room(struct kvq__call *call);

// The part of a status that is a page of namespaces (lists.c).
int kvq__status_namespaces(struct kvq__call *call, Kvq__StatusReply *status);

// Parts of replies. NULL when the arena is full.
Kvq__Session *kvq__session_message(struct kvq_arena *arena, const struct kvq__session_info *info,
                                   const char *isa);
Kvq__Quota *kvq__quota_message(struct kvq_arena *arena, const uint64_t limits[KVQ__LIMITS]);
ProtobufCMessage *kvq__quota_status_message(struct kvq_arena *arena, // a Kvq__QuotaStatus
                                            const struct kvq__namespace_info *info);

#endif
