// SPDX-License-Identifier: Apache-2.0
//
// Cursors of lists (proto/kvq.proto), for the lists of the core and of the store. A cursor names
// the element that was listed last. The order of a list never changes, so a cursor stays right
// while elements come and go. Thread-safe: every function touches only its arguments.
#ifndef KVQ_DAEMON_COMMANDS_CURSOR_H
#define KVQ_DAEMON_COMMANDS_CURSOR_H

#include "proto/wire.h"

// Lists end before the reply would grow beyond a message.
enum { KVQ__LIST_BYTES = KVQ_MAX_MESSAGE - 4096 };

// Checks that the cursor belongs to that list and to this run of the daemon. NULL, for the first
// page, is fine. 0, KVQ_E_INVALID or KVQ_E_EPOCH.
int kvq__cursor_check(const Kvq__Cursor *cursor, uint64_t epoch, Kvq__Request__CommandCase list,
                      char *text);
// A cursor without a place yet. NULL when the arena is full.
Kvq__Cursor *kvq__cursor_new(struct kvq_arena *arena, uint64_t epoch,
                             Kvq__Request__CommandCase list);

#endif
