// SPDX-License-Identifier: Apache-2.0
//
// What the tests of sessions that get another number of shards stand on: one client with all shards
// of a session, by KV heads or by layers, fed from one tensor of all heads, and a store in memory.
#ifndef KVQ_TESTS_RESHARD_KIT_H
#define KVQ_TESTS_RESHARD_KIT_H

#include "daemon/core/residency/saved_internal.h"
#include "tests/core/vault.h"
#include "tests/kits/unit.h"

enum {
    HEADS = 8, // of all shards
    RATIO = 2,
    DIM = 64,
    LAYERS = 3,
    QUERIES = 3,
    MIB = 1 << 20,
    BUFFER = 8 * MIB,
    ROWS = 1700,
    Q_AT = BUFFER / 2 - 128 * 1024,
    OUT_AT = Q_AT + 64 * 1024,
    OUT_BYTES = QUERIES * RATIO * HEADS * DIM * 4,
};

// Those of the table have no outliers in a model's first layers; these have.
#define OUTLIERS "kivi2:outliers=3:displaced=32:recent=32"

extern struct kit kit;
extern struct member m;
extern struct vault vault;
extern char text[KVQ_TEXT_BYTES];
extern const struct kvq__peer admin;

// One session with all its shards, by KV heads or by layers.
struct set {
    char name[32];
    uint32_t shards, layers; // of each
    uint32_t heads;          // of each
    uint32_t more;           // of the last one; the first has as many less
    uint64_t handles[HEADS];
    bool stages; // shards are layers
};
int setup(void **state);
int teardown(void **state);

// ---- Sets ----

extern const char *format;
extern uint32_t rollback;
int open_shard(struct set *s, uint32_t i, uint32_t flags);
void open_all(struct set *s);
struct set by_heads(const char *name, uint32_t shards);
struct set by_layers(const char *name, uint32_t shards);
const struct kvq__session *shard_of(const struct set *s, uint32_t i);
uint64_t tokens_of(const struct set *s);
void drop(const struct set *s);

// ---- Steps ----

void feed(const struct set *s, uint64_t to);
void truncate_by(const struct set *s, uint32_t n);
void attend_shard(const struct set *s, uint32_t shard, uint32_t layer, uint64_t out_at);

// All heads of layer i of the model.
void attend(const struct set *s, uint32_t i, uint8_t out[OUT_BYTES]);
void same_bits(const struct set *a, const struct set *b);

// The same is packed, and kept, to the byte.
void same_blocks(const struct set *a, const struct set *b);

// ---- Saving and restoring ----

void save(const struct set *s);
int restore_shard(const struct set *s, uint32_t i, uint64_t good);
void restore(struct set *s, uint64_t good);
void go_on_alike(const struct set *a, const struct set *b);

#endif
