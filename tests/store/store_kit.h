// SPDX-License-Identifier: Apache-2.0
//
// What tests of the store share: a small world of sessions as they should be, random changes to it,
// and comparing a store with it, byte by byte.
#ifndef KVQ_TESTS_STORE_KIT_H
#define KVQ_TESTS_STORE_KIT_H

#include "storage/store.h"
#include "tests/kits/fault_io.h"

enum { WORLD_SESSIONS = 10, WORLD_BLOCKS = 48, WORLD_MAX_BYTES = 9000 };

struct world_block {
    struct kvq_place place;
    uint64_t seed, bytes; // its content is a function of these
    uint64_t id;
};

struct world_session {
    bool used;
    char name[16];
    uint32_t shard, shards;
    uint64_t tokens, seed; // seed: of the opaque bytes and prefix hashes
    uint32_t pages;
    size_t n;
    struct world_block blocks[WORLD_BLOCKS];
};

// A value: copied to have what was before.
struct world {
    uint64_t random;
    struct world_session sessions[WORLD_SESSIONS];
};

struct kit {
    struct kvq_io *io;
    struct kvq_store *store;
    struct kvq_store_options options;
    struct kvq_store_report report;
    bool stays_open; // kit_change does not reopen it
    char text[KVQ_TEXT_BYTES];
};

uint64_t world_random(struct world *w, uint64_t below);
void world_fill(uint64_t seed, void *data, size_t n);

// Opens the store at "/store" of the disk, with segments of 64 KiB and buffers of 8 KiB.
int kit_open(struct kit *k, struct kvq_io *io);
// Saves all sessions of `after` that are used and bear the name, as one save: blocks with an id are
// kept, others put, and their ids noted.
int kit_save(struct kit *k, struct world *after, const char *name);
// One random change of the store: saves, forks, groups, deletes, gc, compaction, reopening. *after
// is what the world is if it works. Returns what the store said.
int kit_change(struct kit *k, const struct world *before, struct world *after);
// Whether the store holds exactly the world; if not, `why` says what is different. With `cut`,
// sessions may have damaged blocks, and are right up to their good tokens.
bool kit_same(struct kit *k, const struct world *w, bool cut, char why[256]);
// What must hold in any catalog: references, sums, no entry without its block.
bool kit_sound(struct kit *k, char why[256]);

#endif
