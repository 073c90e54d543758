// SPDX-License-Identifier: Apache-2.0
//
// What the tests of prefixes stand on: two clients of one namespace, sessions that are fed from one
// tensor and tell their tokens' ids, and a store in memory.
#ifndef KVQ_TESTS_PREFIX_KIT_H
#define KVQ_TESTS_PREFIX_KIT_H

#include "tests/core/vault.h"
#include "tests/kits/unit.h"

enum {
    HEADS = 2,
    DIM = 64,
    ROW = HEADS * DIM * 4,
    TOKENS = 1600,
    BUFFER = 4 << 20,
    IDS = 3 << 20, // where in the second half they stand
    OUT = BUFFER - (64 << 10),
    MIB = 1 << 20,
    PAGE = KVQ_BLOCK_TOKENS,
};

extern struct kit kit;
extern struct member one, two;
extern struct vault vault;
extern char text[KVQ_TEXT_BYTES];
int32_t *ids(struct member *m);
void attach(struct member *m, uint32_t uid);
void open_kit(uint64_t pool, uint64_t limit);
int setup(void **state);
int setup_small(void **state); // a namespace may have 1.5 MiB
int teardown(void **state);
struct kvq__session_spec spec_of(const struct member *m, uint64_t tokens);
uint64_t open_as(struct member *m, const struct kvq__session_spec *spec,
                 struct kvq__session_info *info);
uint64_t lookup(struct member *m, const struct kvq__session_spec *spec);

// A session of the first member with so many tokens, in steps, all packed that can be.
uint64_t feed(struct member *m, const struct kvq__session_spec *spec, uint32_t tokens);
void drop(struct member *m, uint64_t handle);

// Attention of one query behind all tokens.
void attend(struct member *m, uint64_t handle, uint32_t layer, float *out);
// Both sessions, of whichever member, have the same outputs of this layer.
void same_numbers(struct member *m, uint64_t a, struct member *n, uint64_t b, uint32_t layer);

// The daemon ends, and another begins with what is stored.
void restart(void);
// As spec_of, of the name "it".
struct kvq__session_spec named(const struct member *m, uint64_t tokens);
// Packs what has to be, and saves.
void save(const char *name);
// Feeds one of the first member, saves it as "it", and restarts.
void leave_saved(const struct kvq__session_spec *spec, uint32_t tokens);

#endif
