// SPDX-License-Identifier: Apache-2.0
//
// Power fails at every sync of a seeded workload of saves, incremental saves, groups of shards,
// and whatever else kit_change() draws.
// The workload is run again and again, up to sync 1, 2, 3, ..., until it ends before the crash.
//
// After each crash the store is opened and compared with what it had acknowledged: all of it must
// be there, byte for byte. What was under way when the power failed is there as a whole or not at
// all. References in the catalog must be sound, verify must find nothing, and the store must go on.
//
// KVQ_FULL=1 takes more seeds, and crashes at every change of the disk, not at syncs alone.
#include "tests/store/store_check.h"

enum { CHANGES = 26 };

// Runs changes until one fails. *before is acknowledged, *after what the last change would make.
static int run(struct kit *k, struct world *before, struct world *after, int changes)
{
    int rc = kit_open(k, &disk.io);
    *after = *before;
    for (int i = 0; i < changes && rc == 0; i++) {
        rc = kit_change(k, before, after);
        if (rc == 0)
            *before = *after;
    }
    return rc;
}

// The store holds one world or the other; which is copied to *now.
static void one_of(struct kit *k, struct world *now, const struct world *after, const char *when)
{
    char why[256], neither[256];
    struct kvq_store_verified v;
    if (!kit_same(k, now, false, why)) {
        if (!kit_same(k, after, false, neither))
            fail_msg("%s: not as before (%s), nor as after (%s)", when, why, neither);
        *now = *after;
    }
    if (!kit_sound(k, why))
        fail_msg("%s: %s", when, why);
    if (kvq_store_verify(k->store, NULL, NULL, &v, k->text, sizeof k->text) || v.text[0])
        fail_msg("%s: verify: %s%s", when, k->text, v.text);
}

// The disk comes back read-only: what was acknowledged can be had there as well, out of a WAL that
// nobody may change.
static void look_read_only(struct kit *k, const struct world *now, const struct world *after,
                           const char *when)
{
    struct world either = *now;
    disk.read_only = true;
    int rc = kit_open(k, &disk.io);
    for (int i = 0; i < WORLD_SESSIONS && rc; i++)
        if (rc != KVQ_E_READ_ONLY || now->sessions[i].used)
            fail_msg("%s: it does not open read-only: %s", when, k->text);
    if (rc == 0)
        one_of(k, &either, after, when);
    kvq_store_close(&k->store);
    disk.read_only = false;
}

// If there is one.
static void lose_any_catalog(void)
{
    (void)disk.io.unlink(&disk.io, catalog);
    (void)disk.io.unlink(&disk.io, "/store/catalog.db-wal");
}

// One run that crashes. False: it ended before.
static bool crash_once(uint64_t seed, uint64_t at, bool changes, bool catalog_too)
{
    struct world now = {.random = seed}, after;
    char when[80];
    snprintf(when, sizeof when, "seed %" PRIu64 ", %s %" PRIu64 "%s", seed,
             changes ? "change" : "sync", at, catalog_too ? ", catalog lost" : "");
    begin_disk(seed * 1000003 + at, (struct kit){0}, seed);
    *(changes ? &disk.crash_at_change : &disk.crash_at_sync) = at;
    int rc = run(&k, &now, &after, CHANGES);
    bool crashed = disk.crashed;
    if (rc && !crashed)
        fail_msg("%s: it failed without a crash: %s", when, k.text);
    kvq_store_close(&k.store);
    fault_crash(&disk);
    if (catalog_too)
        lose_any_catalog();
    else
        look_read_only(&k, &now, &after, when);
    if (kit_open(&k, &disk.io))
        fail_msg("%s: it does not open: %s", when, k.text);
    one_of(&k, &now, &after, when);
    kvq_store_close(&k.store);
    // It goes on, and what came after the crash is kept as well.
    rc = run(&k, &now, &after, 4);
    if (rc)
        fail_msg("%s: it does not go on: %s", when, k.text);
    one_of(&k, &now, &now, when);
    kvq_store_close(&k.store);
    // Nothing of what was cut off comes back, even if all there is are the segments.
    lose_any_catalog();
    if (kit_open(&k, &disk.io))
        fail_msg("%s: it cannot be made anew: %s", when, k.text);
    one_of(&k, &now, &now, when);
    return crashed;
}

PLAIN_TEST(every_sync)
{
    uint64_t at = 0, runs = 0;
    for (uint64_t seed = 1; seed <= (long_tier() ? 60 : 3); seed++)
        for (at = 1; crash_once(seed, at, false, false); at++)
            runs++;
    print_message("%" PRIu64 " crashes\n", runs);
    assert_true(runs > 100);
}

PLAIN_TEST(every_change)
{
    uint64_t runs = 0, step = long_tier() ? 1 : 17;
    for (uint64_t seed = 101; seed <= (long_tier() ? 110 : 101); seed++)
        for (uint64_t at = 1; crash_once(seed, at, true, false); at += step)
            runs++;
    print_message("%" PRIu64 " crashes\n", runs);
}

// The catalog is lost with the crash: all that was acknowledged is in the segments.
PLAIN_TEST(catalog_lost)
{
    uint64_t runs = 0, step = long_tier() ? 1 : 3;
    for (uint64_t seed = 201; seed <= (long_tier() ? 230 : 202); seed++)
        for (uint64_t at = 1; crash_once(seed, at, false, true); at += step)
            runs++;
    print_message("%" PRIu64 " crashes\n", runs);
}

// Power fails between two changes, and nothing at all survives that was not synced.
PLAIN_TEST(between_changes)
{
    for (uint64_t seed = 301; seed <= (long_tier() ? 340 : 302); seed++) {
        struct world after;
        begin_disk(seed, (struct kit){0}, seed);
        disk.lose_all = true;
        for (int i = 0; i < 40; i++) {
            char when[80];
            snprintf(when, sizeof when, "seed %" PRIu64 ", change %d", seed, i);
            int rc = k.store ? 0 : kit_open(&k, &disk.io);
            if (rc == 0)
                rc = kit_change(&k, &w, &after);
            if (rc)
                fail_msg("%s: %s", when, k.text);
            w = after;
            if (i % 2 == 0)
                continue;
            disk.crashed = true;
            kvq_store_close(&k.store);
            fault_crash(&disk);
            if (kit_open(&k, &disk.io))
                fail_msg("%s: it does not open: %s", when, k.text);
            one_of(&k, &w, &w, when);
        }
    }
}

// ---- The catalog is lost, and what was done away with is not to come back ----

static void add_session(struct kit *k, struct world *w, const char *name)
{
    for (int i = 0; i < WORLD_SESSIONS; i++) {
        struct world_session *s = &w->sessions[i];
        if (s->used)
            continue;
        *s = (struct world_session){.used = true, .shards = 1, .seed = world_random(w, 1000)};
        snprintf(s->name, sizeof s->name, "%s", name);
        s->blocks[s->n++] =
            (struct world_block){.place = {0, 0, 1, 0}, .seed = (uint64_t)i, .bytes = 9000};
        if (kit_save(k, w, name))
            memset(s, 0, sizeof *s);
        return;
    }
}

static void drop_known(struct world *w, const char *name)
{
    for (int i = 0; i < WORLD_SESSIONS; i++)
        if (strcmp(w->sessions[i].name, name) == 0)
            memset(&w->sessions[i], 0, sizeof w->sessions[i]);
    if (drop_session(name))
        fail_msg("%s", k.text);
}

// The power fails, the catalog with it, and the store is what *w is.
static void only_segments(struct kit *k, const struct world *w, uint64_t seed)
{
    char when[40], why[256];
    snprintf(when, sizeof when, "seed %" PRIu64, seed);
    disk.crashed = true;
    kvq_store_close(&k->store);
    fault_crash(&disk);
    lose_any_catalog();
    if (kit_open(k, &disk.io))
        fail_msg("%s: it does not open: %s", when, k->text);
    if (!kit_same(k, w, false, why))
        fail_msg("%s: %s", when, why);
    kvq_store_close(&k->store);
}

static void drop_some(struct world *w, const char *series)
{
    char name[8];
    for (int i = 1; i <= 3; i++) {
        snprintf(name, sizeof name, "%s%d", series, i);
        drop_known(w, name);
    }
}

static void add_some(struct kit *k, struct world *w, const char *series, int n)
{
    char name[8];
    for (int i = 1; i <= n; i++) {
        snprintf(name, sizeof name, "%s%d", series, i);
        add_session(k, w, name);
        assert_int_equal(k->text[0], '\0');
    }
}

// Removed files come back one by one, as file systems may have it: the first segment, which had
// sessions that were dropped, without the second, which had their DROPs.
PLAIN_TEST(dropped_stays_dropped)
{
    for (uint64_t seed = 1; seed <= 64; seed++) {
        begin_store(seed, seed);
        add_some(&k, &w, "a", 5);
        drop_some(&w, "a");
        add_some(&k, &w, "b", 4);
        compact_all(UINT64_MAX, 1); // what is left of the first goes to the third
        if (seed % 2) // the next process does not know what the one before it has removed
            reopen_store();
        drop_some(&w, "b");
        compact_all(UINT64_MAX, 1);
        assert_null(fault_find(&disk, "/store/segment-0000000000000002.kvqs"));
        only_segments(&k, &w, seed);
    }
}

// A save fails and its bytes are cut off, but the power fails before the cut was synced.
PLAIN_TEST(refused_stays_refused)
{
    uint64_t refused = 0;
    for (uint64_t seed = 1; seed <= 64; seed++) {
        begin_store(seed, seed);
        add_session(&k, &w, "first");
        fault_reset_counts(&disk);
        disk.fail_sync = 1;
        disk.fail_count = 1;
        disk.fail_with = EIO;
        add_session(&k, &w, "refused");
        disk.fail_sync = 0;
        refused += !w.sessions[1].used;
        add_session(&k, &w, "third");
        add_session(&k, &w, "fourth");
        add_session(&k, &w, "fifth");
        assert_true(w.sessions[3].used); // all but the refused one are saved
        only_segments(&k, &w, seed);
    }
    assert_int_equal(refused, 64);
}

int main(void)
{
    return run_all(NULL, end_store);
}
