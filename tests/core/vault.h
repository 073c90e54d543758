// SPDX-License-Identifier: Apache-2.0
//
// A store in memory, for tests of the core's saves and restores: what it was given it gives back,
// and it counts. Bytes can be spoilt.
#ifndef KVQ_TESTS_VAULT_H
#define KVQ_TESTS_VAULT_H

#include "daemon/core/residency/reshard.h"
#include "daemon/core/residency/saved.h"
#include "tests/core/core_kit.h"

struct vault_block {
    uint64_t id, bytes;
    uint8_t *data;
};

// A session's shard as it was saved last.
struct vault_session {
    char ns[KVQ_NAME_BYTES];
    struct kvq__saved saved;
    struct kvq__part *parts;
    uint32_t n;
    uint8_t (*hashes)[32]; // of its pages, for prefixes
    uint32_t pages;
};

struct vault {
    struct vault_block *blocks;
    uint32_t n_blocks;
    struct vault_session sessions[80];
    uint32_t n_sessions;
    uint64_t last_id;
    uint64_t put, kept; // blocks that were written, and that were there already
    int fail;           // what orders of parking fail with; 0 = they do not
    bool serves;        // fetches and restores that wait for room have others served meanwhile
    uint64_t lost_from; // tokens from here on are damaged, for those fetches; 0: none are
    void (*turn)(void); // is called after each turn in which a restore takes memory; may be NULL
};

void vault_close(struct vault *v);

// Saves it to the end. 1: something has to end first. *stored may be NULL: whether anything was.
// A save that has begun, and whose blocks are copied.
struct kvq__save *vault_copied(struct kvq__core *core, const struct kvq__save_spec *spec);
int vault_save(struct vault *v, struct kvq__core *core, const struct kvq__save_spec *spec,
               bool *stored);
// Packs what has to be, and saves, which works.
void vault_save_packed(struct vault *v, struct kit *kit, const char *ns, const char *name);
// Writes what was copied and ends the save.
void vault_write(struct vault *v, struct kvq__save **save);
struct vault_session *vault_find(struct vault *v, const char *name, uint32_t shard);
// Begins a restore of it, up to so many tokens.
int vault_restore(struct vault *v, struct kvq__core *core, const char *name, uint32_t shard,
                  const char *place, uint64_t good, struct kvq__restore **restore, char *text);
// The same of the first tokens alone, for the index of a namespace.
int vault_prefix(struct vault *v, struct kvq__core *core, const char *ns,
                 const struct vault_session *from, uint64_t tokens, struct kvq__restore **restore,
                 char *text);
// Reads the layer and lets its requests go on. 0, or the code that it failed with.
int vault_layer(struct vault *v, struct kvq__restore *restore, const struct vault_session *from,
                uint32_t layer);
// The same for a session that is wanted back. 0, or what it failed with: then that was told.
int vault_fetch(struct vault *v, struct kvq__core *core, const struct kvq__store_job *order,
                struct kvq__restore **restore);
// What the store jobs do for sessions that are parked: carries all of them out, to their ends.
// Returns how many there were.
uint32_t vault_serve(struct vault *v, struct kvq__core *core);
// Takes a session out, with all its shards, if it has that stamp.
void vault_forget(struct vault *v, const char *name, uint64_t stamp);
// All layers, and the end.
int vault_rest(struct vault *v, struct kvq__restore **restore, const struct vault_session *from);

// Restores one shard of so many, to its end, of what was saved with another number.
int vault_reshard(struct vault *v, struct kvq__core *core, const char *name,
                  const struct kvq__reshard_as *as, uint64_t good, char *text);

#endif
