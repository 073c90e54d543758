// SPDX-License-Identifier: Apache-2.0
//
// What tests of a store on a disk in memory share: the disk, the store and what it is to hold, and
// random changes and comparisons that end the test if they fail.
#ifndef KVQ_TESTS_STORE_CHECK_H
#define KVQ_TESTS_STORE_CHECK_H

#include "proto/status.h"
#include "storage/store_internal.h"
#include "tests/kits/unit.h"
#include "tests/store/store_kit.h"

static struct fault_io disk;
static struct kit k;   // the store on it
static struct world w; // what it is to hold
static const char *const catalog = "/store/catalog.db";

static bool on_disk; // there is one

static inline int end_store(void **state)
{
    kvq_store_close(&k.store);
    if (on_disk)
        fault_close(&disk);
    on_disk = false;
    return 0;
}

// A new disk, for a store that is opened like this. Who runs the tests ends the last one.
static inline void begin_disk(uint64_t disk_seed, struct kit options, uint64_t seed)
{
    end_store(NULL);
    k = options;
    w = (struct world){.random = seed};
    fault_open(&disk, disk_seed);
    on_disk = true;
}

// A new store on a new disk.
static inline void begin_store(uint64_t disk_seed, uint64_t seed)
{
    begin_disk(disk_seed, (struct kit){0}, seed);
    assert_int_equal(kit_open(&k, &disk.io), 0);
}

static inline void reopen_store(void)
{
    kvq_store_close(&k.store);
    assert_int_equal(kit_open(&k, &disk.io), 0);
}

static inline void lose_catalog(void)
{
    assert_int_equal(disk.io.unlink(&disk.io, catalog), 0);
    (void)disk.io.unlink(&disk.io, "/store/catalog.db-wal");
}

static inline void reopen_without_catalog(void)
{
    kvq_store_close(&k.store);
    lose_catalog();
    assert_int_equal(kit_open(&k, &disk.io), 0);
}

static inline struct kvq_store_verified verified(void)
{
    struct kvq_store_verified v;
    if (kvq_store_verify(k.store, NULL, NULL, &v, k.text, sizeof k.text))
        fail_msg("verify: %s", k.text);
    return v;
}

static inline struct kvq_store_status status_of_store(void)
{
    struct kvq_store_status status;
    if (kvq_store_status(k.store, &status, k.text, sizeof k.text))
        fail_msg("status: %s", k.text);
    return status;
}

// Shard 0 of a session that is there.
static inline struct kvq_store_session found(const char *name)
{
    struct kvq_store_session session;
    if (kvq_store_find(k.store, "uid-1", name, 0, &session, k.text, sizeof k.text))
        fail_msg("%s: %s", name, k.text);
    return session;
}

static inline bool is_there(const char *name)
{
    struct kvq_store_session session;
    int rc = kvq_store_find(k.store, "uid-1", name, 0, &session, k.text, sizeof k.text);
    if (rc && rc != KVQ_E_NO_SESSION)
        fail_msg("%s: %s", name, k.text);
    return rc == 0;
}

// Its blocks, to be freed.
static inline struct kvq_stored *blocks_of(const struct kvq_store_session *session, size_t *n)
{
    struct kvq_stored *blocks;
    if (kvq_store_blocks(k.store, session, &blocks, n, k.text, sizeof k.text))
        fail_msg("%s: %s", session->name, k.text);
    return blocks;
}

static inline void segment_path(uint64_t number, char path[KVQ__PATH_BYTES])
{
    char name[KVQ__NAME_BYTES];
    kvq__segment_name(number, name);
    kvq__path(k.store, name, path);
}

static inline int drop_session(const char *name)
{
    return kvq_store_delete(k.store, "uid-1", name, k.text, sizeof k.text);
}

// Until there is no more to do, in steps of so many bytes, of segments of which so much is dead.
static inline void compact_all(uint64_t step_bytes, uint32_t dead_percent)
{
    struct kvq_store_freed freed;
    do {
        if (kvq_store_compact(k.store, step_bytes, dead_percent, &freed, k.text, sizeof k.text))
            fail_msg("%s", k.text);
    } while (freed.more);
}

static inline void change(struct kit *k, struct world *w, int n)
{
    struct world after;
    for (int i = 0; i < n; i++) {
        int rc = kit_change(k, w, &after);
        if (rc)
            fail_msg("a change failed with %d: %s", rc, k->text);
        *w = after;
    }
}

// With `cut`, sessions may have damaged blocks.
static inline void same_world(struct kit *k, const struct world *w, bool cut, const char *when)
{
    char why[256];
    if (!kit_same(k, w, cut, why) || !kit_sound(k, why))
        fail_msg("%s: %s", when, why);
}

static inline void check(struct kit *k, const struct world *w, const char *when)
{
    struct kvq_store_verified v;
    same_world(k, w, false, when);
    if (kvq_store_verify(k->store, NULL, NULL, &v, k->text, sizeof k->text) || v.text[0])
        fail_msg("%s: verify: %s%s", when, k->text, v.text);
}

#endif
