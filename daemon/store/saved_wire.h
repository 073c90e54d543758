// SPDX-License-Identifier: Apache-2.0
//
// Sessions as messages: what a store keeps of a session besides its blocks.
#ifndef KVQ_DAEMON_STORE_SAVED_WIRE_H
#define KVQ_DAEMON_STORE_SAVED_WIRE_H

#include "daemon/core/residency/saved.h"
#include "proto/wire.h"

// What is written is of the oldest version that can say it.
enum { KVQ__SAVED_OLDEST = 1, KVQ__SAVED_NEWEST = 2, KVQ__SAVED_BYTES = KVQ_MAX_MESSAGE };

// The version that is written of it.
uint32_t kvq__saved_version(const struct kvq__saved *saved);
// Packs into KVQ__SAVED_BYTES; the arena is for what is needed meanwhile. 0, KVQ_E_LIMIT or
// KVQ_E_NO_MEMORY with a text.
int kvq__saved_pack(const struct kvq__saved *saved, struct kvq_arena *arena, void *out,
                    size_t *length, char *text);
// Takes foreign bytes apart. 0, or KVQ_E_VERSION, KVQ_E_DAMAGED or KVQ_E_NO_MEMORY with a text;
// saved->layers is then the caller's to free().
int kvq__saved_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                      struct kvq__saved *saved, char *text);

#endif
