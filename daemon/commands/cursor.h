// SPDX-License-Identifier: Apache-2.0
//
// Where a list goes on: what all lists, of the core and of the store, do alike with the cursors of
// proto/kvq.proto. A cursor names what was listed last, in an order that never changes, so it
// stays right while elements come and go. Thread-safe: every function touches only its arguments.
#ifndef KVQ_DAEMON_COMMANDS_CURSOR_H
#define KVQ_DAEMON_COMMANDS_CURSOR_H

#include "proto/wire.h"

// Lists end before the reply would grow beyond a message.
enum { KVQ__LIST_BYTES = KVQ_MAX_MESSAGE - 4096 };

// Whether it is one of that list and of this run of the daemon; NULL, the first page, is.
// KVQ_E_INVALID, KVQ_E_EPOCH.
int kvq__cursor_check(const Kvq__Cursor *cursor, uint64_t epoch, Kvq__Request__CommandCase list,
                      char *text);
// One that is yet to be told its place. NULL when the arena is full.
Kvq__Cursor *kvq__cursor_new(struct kvq_arena *arena, uint64_t epoch,
                             Kvq__Request__CommandCase list);

#endif
