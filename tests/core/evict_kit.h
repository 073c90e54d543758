// SPDX-License-Identifier: Apache-2.0
//
// What the tests of eviction share: two engines, sessions of four pages that fit four at a time on
// the first GPU (or, with a store, in the host's memory), and requests that may wait.
#ifndef KVQ_TESTS_EVICT_KIT_H
#define KVQ_TESTS_EVICT_KIT_H

#include "daemon/core/residency/evict.h"
#include "daemon/core/residency/move.h"
#include "daemon/core/residency/park.h"
#include "daemon/core/residency/saved_internal.h"
#include "tests/core/sim.h"
#include "tests/kits/unit.h"

enum {
    HEADS = 2,
    DIM = 64,
    LAYERS = 2,
    QUERIES = 2,
    MIB = 1 << 20,
    PAGE = KVQ_BLOCK_TOKENS,
    SESSION = 4 * PAGE,                              // tokens of most sessions
    BLOCK = 4 * HEADS * DIM * PAGE,                  // bytes of a page of one layer, as f16
    SESSION_BYTES = LAYERS * SESSION / PAGE * BLOCK, // 512 KiB
    GPU = 2 * MIB,                                   // so that 4 of them fit
    BUFFER = 4 * MIB,
    Q_AT = BUFFER / 4,
    OUT_AT = Q_AT + 64 * 1024,
    OUT_BYTES = QUERIES * 2 * HEADS * DIM * 4,
};

#define MS     1000000ull
#define SECOND (1000 * MS)

extern const struct kvq__layer_row rows[1];
extern struct kit kit;
extern struct member m, other;
extern struct vault vault;
extern char text[KVQ_TEXT_BYTES];
extern uint32_t home; // where sessions are opened: the first GPU, or 0, the host

void attach(struct member *member, uint32_t uid);
int setup(void **state);

// With a store, and sessions in 2 MiB of the host's memory.
int setup_saves(void **state);
void poll_core(void);
void pass(uint64_t ns);

// All that GPUs, moves and evictions do has ended.
void rest(void);
int teardown(void **state);
const char *place(uint32_t pool);
uint64_t opened(struct member *member, const char *name);

// ---- Requests that may wait ----

int status_of(const struct member *member);

// Until it is answered. A request that waits for ever ends the test.
int finish(struct member *member, int rc);
struct kvq_entry_wire entry(struct member *member, uint64_t handle, uint32_t append);

// Begins to ask for a step; as kit_request.
int begin(struct member *member, uint64_t handle, uint64_t step, uint32_t n, uint64_t wait);
int go_on(struct member *member, uint64_t handle, uint32_t n);
int step(struct member *member, uint64_t handle, uint32_t n);

// A session of 512 KiB.
uint64_t fed(struct member *member, const char *name);

// Sessions of the first member that take all of the memory there.
void fill_home(uint64_t handles[4]);
// The same, of which none is evicted until they are let go.
void hold_all(uint64_t handles[4]);
void let_go(const uint64_t handles[4]);

// What a token behind the session sees, of all layers.
void attend(struct member *member, uint64_t handle, uint8_t out[LAYERS][OUT_BYTES]);
// The same outputs as then.
void same_bits(struct member *member, uint64_t handle, uint8_t then[LAYERS][OUT_BYTES]);
bool is_home(struct member *member, uint64_t handle);
// As if a block of the first user's sessions had become free.
void something_is_freed(void);

// How many have gone since others needed the room.
uint64_t evicted(void);
struct kvq__counts counts(void);
uint32_t refused(void);

#define SAVING_TEST(name) TEST_BETWEEN(name, setup_saves, teardown)

#endif
