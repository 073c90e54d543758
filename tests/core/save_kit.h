// SPDX-License-Identifier: Apache-2.0
//
// What test_core_save.c and test_core_park.c stand on: one client, sessions of four layers fed from
// one tensor, a store in memory, and attention of both of two sessions that should be one.
#ifndef KVQ_TESTS_SAVE_KIT_H
#define KVQ_TESTS_SAVE_KIT_H

#include "daemon/core/residency/saved_internal.h"
#include "tests/core/vault.h"
#include "tests/kits/unit.h"

enum {
    HEADS = 2,
    DIM = 64,
    LAYERS = 4,
    OWNED = 3,
    QUERIES = 3,
    MIB = 1 << 20,
    BUFFER = 4 * MIB,
    ROWS = 2000,
    Q_AT = BUFFER / 2 - 128 * 1024,
    OUT_AT = Q_AT + 64 * 1024,
    OUT_BYTES = QUERIES * 2 * HEADS * DIM * 4,
};

extern struct kit kit;
extern struct member m;
extern struct vault vault;
extern struct kvq__layer_row rows[LAYERS];
extern char text[KVQ_TEXT_BYTES];
extern const struct kvq__peer admin;

// Four layers of the format: the second has a window, the last one attends to the first one's K
// and V.
void set_rows(const char *format);
void open_kit(void);
int setup(void **state);
int teardown(void **state);
uint64_t open_as(const char *name, uint32_t n_layers, uint32_t rollback);
// In steps of at most 97 tokens, until it has so many.
void feed(uint64_t handle, uint64_t to);
// A new one with so many.
uint64_t fed(const char *name, uint64_t tokens, uint32_t rollback);
struct kvq_request attend_of(uint32_t layer);

// 0, 1 if it waits, or what it failed with.
int attend(uint64_t handle, uint32_t layer, uint8_t out[OUT_BYTES]);
// Attention of both is the same to the bit.
void same_bits(uint64_t a, uint64_t b);
// Into the vault, and out of it; `good`: of so many tokens.
void save(const char *name);
// The same when all is packed; then the session is dropped, and restored.
uint64_t save_and_restore(uint64_t handle, const char *name);
// "it", which was fed so many tokens, saved and dropped.
struct vault_session *stored(uint64_t tokens, uint32_t rollback);
void restore_refused(int code, const char *words); // of "it"
uint64_t restore_up_to(const char *name, uint64_t good);
uint64_t restore(const char *name);
void drop(uint64_t handle);
void truncate_by(uint64_t handle, uint32_t n);
// Both get the same tokens, and lose some, in turns.
void go_on_alike(uint64_t a, uint64_t b, uint32_t rollback);
// The rest of a step of two shards, which has begun: K and V of all layers, and its end.
void append_both(uint64_t step, const struct kvq_entry_wire e[2]);

#endif
