// SPDX-License-Identifier: Apache-2.0
//
// The store on a disk that is full, broken, read-only or damaged: a clear error, nothing that was
// acknowledged is lost or served wrong, and the store goes on or says that it does not.
//
// KVQ_FULL=1 flips 30 times as many bits of the segments, and fails at every write and sync.
#include "tests/store/store_check.h"

// ---- A disk that fails ----

struct fault {
    const char *name;
    int error, code; // errno; what the store says
    bool sync;       // else a write
    bool crash;      // power fails right after
    uint64_t count;  // how many fail; 0: all from then on
};

static bool store_read_only(struct kit *k)
{
    struct kvq_store_status status;
    if (!k->store || kvq_store_status(k->store, &status, k->text, sizeof k->text))
        return false;
    assert_true(!status.read_only || status.why[0]);
    return status.read_only;
}

// Nothing stands behind what counts of a segment, and there are no other segments: what a save that
// failed had written is gone.
static void nothing_behind(struct kit *k, const char *when)
{
    uint64_t files = 0, known = 0;
    for (int i = 0; i < FAULT_FILES; i++) {
        const struct fault_name *name = &disk.now[i];
        files += name->file && kvq__segment_number(strrchr(name->path, '/') + 1) != 0;
    }
    for (size_t i = 0; i < k->store->n_segments; i++) {
        const struct kvq__segment *g = k->store->segments[i];
        char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
        segment_path(g->number, path);
        const struct fault_file *file = fault_find(&disk, path);
        known++;
        if (!file || file->bytes != g->bytes)
            fail_msg("%s: %s has %" PRIu64 " bytes, of which %" PRIu64 " count", when, name,
                     file ? file->bytes : 0, g->bytes);
    }
    if (files != known)
        fail_msg("%s: %" PRIu64 " segments, of which %" PRIu64 " count", when, files, known);
}

// The change failed. What was acknowledged must be there, at once and after opening again.
static void after_failure(struct kit *k, struct world *now, const struct world *after, bool crash,
                          const char *when)
{
    char why[256], neither[256];
    bool stopped = store_read_only(k);
    if (k->store && !kit_same(k, now, false, why))
        fail_msg("%s: at once: %s", when, why);
    if (k->store && !stopped)
        nothing_behind(k, when);
    fault_reset_counts(&disk);
    if (stopped) {
        struct kvq_save *save;
        assert_int_equal(kvq_save_begin(k->store, &save, k->text, sizeof k->text), KVQ_E_READ_ONLY);
    }
    if (stopped || crash || !k->store) { // only opening tells what the catalog has
        disk.crashed = crash;
        kvq_store_close(&k->store);
        if (crash)
            fault_crash(&disk);
        if (kit_open(k, &disk.io))
            fail_msg("%s: it does not open again: %s", when, k->text);
        if (!kit_same(k, now, false, why)) {
            if (!kit_same(k, after, false, neither))
                fail_msg("%s: opened again: not as before (%s), nor as after (%s)", when, why,
                         neither);
            *now = *after;
        }
    }
}

// What is owed to the segments is written with whatever is written next.
static void write_something(struct kit *k, struct world *w)
{
    int i = 0;
    while (i < WORLD_SESSIONS && !w->sessions[i].used)
        i++;
    i = i < WORLD_SESSIONS ? i : 0;
    if (!w->sessions[i].used)
        w->sessions[i] = (struct world_session){.used = true, .name = "any", .shards = 1};
    assert_int_equal(kit_save(k, w, w->sessions[i].name), 0);
}

// A run in which write or sync number `at` fails. False: it ended before.
static bool fail_once(uint64_t seed, uint64_t at, const struct fault *fault)
{
    struct world now = {.random = seed}, after;
    char when[100];
    int rc = 0;
    snprintf(when, sizeof when, "%s, seed %" PRIu64 ", number %" PRIu64, fault->name, seed, at);
    begin_store(seed, 0);
    fault_reset_counts(&disk);
    *(fault->sync ? &disk.fail_sync : &disk.fail_write) = at;
    disk.fail_count = fault->count;
    disk.fail_with = fault->error;
    after = now;
    for (int i = 0; i < 20 && rc == 0; i++) {
        rc = kit_change(&k, &now, &after);
        now = rc ? now : after;
    }
    // SQLite does not tell why a sync failed.
    if (rc && rc != fault->code && !(fault->sync && rc == KVQ_E_SYSTEM))
        fail_msg("%s: it says %d: %s", when, rc, k.text);
    if (rc && !k.text[0])
        fail_msg("%s: it says nothing", when);
    if (rc)
        after_failure(&k, &now, &after, fault->crash, when);
    fault_reset_counts(&disk);
    change(&k, &now, 5);
    write_something(&k, &now);
    check(&k, &now, when);
    kvq_store_close(&k.store);
    fault_crash(&disk); // what the failure lost must not be missed now
    if (kit_open(&k, &disk.io))
        fail_msg("%s: it does not open after all: %s", when, k.text);
    check(&k, &now, when);
    kvq_store_close(&k.store);
    // Nothing of what failed comes back, even if all there is are the segments.
    lose_catalog();
    if (kit_open(&k, &disk.io))
        fail_msg("%s: it cannot be made anew: %s", when, k.text);
    check(&k, &now, when);
    return rc != 0;
}

PLAIN_TEST(disk_fails)
{
    static const struct fault faults[] = {
        {"full", ENOSPC, KVQ_E_NO_SPACE, false, false, 0},
        {"full for a moment", ENOSPC, KVQ_E_NO_SPACE, false, false, 1},
        {"write fails", EIO, KVQ_E_SYSTEM, false, false, 1},
        {"writes fail", EIO, KVQ_E_SYSTEM, false, false, 0},
        {"sync fails", EIO, KVQ_E_SYSTEM, true, false, 1},
        {"syncs fail", EIO, KVQ_E_SYSTEM, true, false, 0},
        {"write fails, then power", EIO, KVQ_E_SYSTEM, false, true, 1},
        {"sync fails, then power", EIO, KVQ_E_SYSTEM, true, true, 1},
        {"full at a sync", ENOSPC, KVQ_E_NO_SPACE, true, false, 1},
    };
    uint64_t runs = 0;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        for (uint64_t seed = 1; seed <= (long_tier() || faults[i].crash ? 8 : 1); seed++)
            for (uint64_t at = 1, step = long_tier() ? 1 : 1 + at / 8;
                 fail_once(seed, at, &faults[i]); at += step, step = long_tier() ? 1 : 1 + at / 8)
                runs++;
    print_message("%" PRIu64 " failures\n", runs);
    assert_true(runs > 50);
}

// What is to go wrong with the next change, if anything.
static void plan(void)
{
    fault_reset_counts(&disk);
    disk.capacity = 0;
    switch (fault_number(&disk, 6)) {
    case 0:
        disk.capacity = fault_physical(&disk) + fault_number(&disk, 200 << 10);
        break;
    case 1:
        disk.fail_write = 1 + fault_number(&disk, 12);
        disk.fail_count = 1 + fault_number(&disk, 3);
        disk.fail_with = fault_number(&disk, 2) ? EIO : ENOSPC;
        break;
    case 2:
        disk.fail_sync = 1 + fault_number(&disk, 4);
        disk.fail_count = 1;
        disk.fail_with = EIO;
        break;
    case 3:
        disk.crash_at_change = 1 + fault_number(&disk, 30);
        break;
    default:
        break;
    }
}

// One store through one fault after the other: full, failing, crashing, and whole in between.
PLAIN_TEST(storm)
{
    uint64_t failures = 0, crashes = 0, seeds = long_tier() ? 300 : 8;
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        struct world after;
        char when[100];
        begin_store(7000 + seed, seed);
        for (int i = 0; i < 60; i++) {
            plan();
            snprintf(when, sizeof when, "storm, seed %" PRIu64 ", change %d", seed, i);
            int rc = kit_change(&k, &w, &after);
            bool crash = disk.crashed;
            disk.capacity = 0;
            w = rc ? w : after;
            failures += rc != 0;
            crashes += crash;
            if (rc && !k.text[0])
                fail_msg("%s: it says nothing", when);
            if (crash) {
                kvq_store_close(&k.store);
                fault_crash(&disk);
            }
            if (rc || crash)
                after_failure(&k, &w, &after, false, when);
        }
        fault_reset_counts(&disk);
        write_something(&k, &w);
        check(&k, &w, when);
        reopen_without_catalog();
        check(&k, &w, when);
    }
    print_message("%" PRIu64 " failures, %" PRIu64 " crashes\n", failures, crashes);
    assert_true(failures > seeds && crashes > seeds);
}

static uint64_t segment_of(struct kit *k, const char *name)
{
    size_t n;
    struct kvq_store_session it = found(name);
    struct kvq_stored *blocks = blocks_of(&it, &n);
    assert_int_equal(n, 1);
    uint64_t segment = blocks[0].segment;
    free(blocks);
    return segment;
}

static int save_one(struct kit *k, struct world *w, int at, const char *name)
{
    w->sessions[at] = (struct world_session){.used = true, .shards = 1, .n = 1};
    snprintf(w->sessions[at].name, sizeof w->sessions[at].name, "%s", name);
    w->sessions[at].blocks[0] = (struct world_block){.seed = (uint64_t)at, .bytes = 5000};
    int rc = kit_save(k, w, name);
    w->sessions[at].used = rc == 0;
    return rc;
}

// A session that is deleted on a full disk stays deleted, also if the catalog is lost: its DROP is
// written as soon as there is room, by whoever writes, also after the store was opened again.
PLAIN_TEST(deleted_when_full)
{
    for (int reopen = 0; reopen < 2; reopen++) {
        begin_store(60, 60);
        assert_int_equal(save_one(&k, &w, 0, "a"), 0);
        assert_int_equal(save_one(&k, &w, 1, "b"), 0);
        fault_reset_counts(&disk);
        disk.fail_write = 1; // the DROP's; the catalog's goes through
        disk.fail_count = 1;
        disk.fail_with = ENOSPC;
        assert_int_equal(drop_session("a"), 0);
        assert_true(disk.n_writes > 1);
        fault_reset_counts(&disk);
        w.sessions[0].used = false;
        check(&k, &w, "deleted");
        if (reopen) {
            reopen_store();
        }
        assert_int_equal(k.store->n_owed, 1);
        assert_int_equal(save_one(&k, &w, 2, "c"), 0);
        assert_int_equal(k.store->n_owed, 0);
        check(&k, &w, "saved");
        reopen_store();
        assert_int_equal(k.store->n_owed, 0);
        reopen_without_catalog();
        check(&k, &w, "made anew");
    }
}

// A damaged catalog is made anew on a disk without a free byte: its own space has to do.
PLAIN_TEST(anew_when_full)
{
    uint64_t free_bytes = 0;
    begin_store(61, 61);
    change(&k, &w, 40);
    kvq_store_close(&k.store);
    struct fault_file *file = fault_find(&disk, catalog);
    memset(file->data + 100, 0xff, 500);
    disk.capacity = 1ull << 40;
    assert_int_equal(disk.io.space(&disk.io, "/store", &free_bytes), 0);
    disk.capacity -= free_bytes;
    assert_int_equal(disk.io.space(&disk.io, "/store", &free_bytes), 0);
    assert_int_equal(free_bytes, 0);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_true(k.report.rebuilt);
    assert_says(k.report.text, "no copy of it was kept");
    check(&k, &w, "made anew");
    kvq_store_close(&k.store);
    assert_null(fault_find(&disk, "/store/catalog.db.bad"));
}

// Nobody knows what a write or sync that failed has left, so that nothing is written there again: a
// segment that has failed is never added to, and the next save begins another one. After a disk
// that was full, and after a save that was given up, the segment goes on.
PLAIN_TEST(failed_segment)
{
    static const struct {
        const char *name;
        int error;
        bool sync, abort, again;
    } cases[] = {{"sync", EIO, true, false, false},
                 {"write", EIO, false, false, false},
                 {"full", ENOSPC, false, false, true},
                 {"abort", 0, false, true, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kvq_save *save;
        const struct kvq_store_meta meta = {.space = "uid-1", .name = "lost", .shards = 1};
        const struct kvq_place place = {0};
        static uint8_t bytes[30000];
        uint64_t id;
        begin_store(50 + i, 50 + i);
        assert_int_equal(save_one(&k, &w, 0, "before"), 0);
        fault_reset_counts(&disk);
        *(cases[i].sync ? &disk.fail_sync : &disk.fail_write) = cases[i].error != 0;
        disk.fail_count = 1;
        disk.fail_with = cases[i].error;
        assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
        assert_int_equal(kvq_save_session(save, &meta, k.text, sizeof k.text), 0);
        (void)kvq_save_put(save, &place, bytes, sizeof bytes, &id, k.text, sizeof k.text);
        if (cases[i].abort)
            kvq_save_abort(&save);
        else
            assert_true(kvq_save_commit(&save, k.text, sizeof k.text) < 0);
        fault_reset_counts(&disk);
        nothing_behind(&k, cases[i].name);
        assert_int_equal(save_one(&k, &w, 1, "after"), 0);
        if ((segment_of(&k, "after") == segment_of(&k, "before")) != cases[i].again)
            fail_msg("%s: the segment was %s", cases[i].name, cases[i].again ? "left" : "reused");
        check(&k, &w, cases[i].name);
    }
}

// That this process may not use a file is no lack of rights of who asks. The text says what to do.
PLAIN_TEST(no_right_to_files)
{
    static const int errors[] = {EACCES, EPERM};
    struct world w = {0};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        begin_store(60 + i, 60 + i);
        assert_int_equal(save_one(&k, &w, 0, "before"), 0);
        fault_reset_counts(&disk);
        disk.fail_write = 1;
        disk.fail_with = errors[i];
        assert_int_equal(save_one(&k, &w, 1, "after"), KVQ_E_SYSTEM);
        assert_says(k.text, "/store: ");
        assert_says(k.text, strerror(errors[i]));
        assert_says(k.text, "give the daemon's user the right");
        w = (struct world){0};
    }
}

static void refuse_to_write(struct kit *k, const struct world *w)
{
    struct world after = *w;
    struct kvq_store_freed freed;
    struct kvq_store_session one;
    uint64_t bytes, sessions;
    uint32_t n;
    const char *name = NULL;
    char *text = k->text;
    size_t room = sizeof k->text;
    for (int i = 0; i < WORLD_SESSIONS; i++)
        name = w->sessions[i].used ? w->sessions[i].name : name;
    assert_non_null(name);
    assert_int_equal(kit_save(k, &after, name), KVQ_E_READ_ONLY);
    assert_says(k->text, "its file system is read-only");
    assert_int_equal(kvq_store_delete(k->store, "uid-1", name, text, room), KVQ_E_READ_ONLY);
    assert_int_equal(kvq_store_gc(k->store, &freed, text, room), KVQ_E_READ_ONLY);
    assert_int_equal(kvq_store_compact(k->store, 1 << 20, 1, &freed, text, room), KVQ_E_READ_ONLY);
    assert_int_equal(kvq_store_list(k->store, NULL, 0, &one, 1, &n, text, room), 0);
    assert_int_equal(n, 1);
    const struct kvq_store_use use = {one.id, 5};
    assert_int_equal(kvq_store_touch(k->store, &use, 1, text, room), KVQ_E_READ_ONLY);
    assert_int_equal(kvq_store_usage(k->store, "uid-1", &bytes, &sessions, text, room), 0);
    assert_true(bytes > 0);
    // To where it can be written, which is not this disk, it can be exported.
    assert_int_equal(kvq_store_export(k->store, "uid-1", name, "/file", true, text, room),
                     KVQ_E_READ_ONLY);
    disk.read_only = false;
    assert_int_equal(kvq_store_export(k->store, "uid-1", name, "/file", true, text, room), 0);
    disk.read_only = true;
    assert_int_equal(kvq_store_import(k->store, "/file", NULL, "x", false, text, room),
                     KVQ_E_READ_ONLY);
    assert_true(store_read_only(k));
}

// Damage that is found on a disk that cannot be written cuts the sessions that have it, until the
// store is closed.
static void damage_is_marked(struct kit *k, const struct world *w)
{
    struct kvq_store_session all[WORLD_SESSIONS];
    uint64_t good;
    uint32_t n, cut = 0;
    size_t count, i = 0;
    char path[KVQ__PATH_BYTES];
    const size_t room = sizeof k->text;
    assert_int_equal(kvq_store_list(k->store, NULL, 0, all, WORLD_SESSIONS, &n, k->text, room), 0);
    struct kvq_stored *blocks = blocks_of(&all[n - 1], &count);
    while (i + 1 < count && blocks[i].bytes == 0)
        i++;
    assert_true(count > 0 && blocks[i].bytes > 0);
    segment_path(blocks[i].segment, path);
    uint8_t *byte = fault_find(&disk, path)->data + blocks[i].offset + KVQ_RECORD_HEAD;
    free(blocks);
    *byte ^= 1;
    struct kvq_store_verified v = verified();
    assert_int_equal(v.bad_blocks, 1);
    *byte ^= 1;
    for (uint32_t j = 0; j < n; j++) {
        assert_int_equal(kvq_store_good_tokens(k->store, &all[j], &good, k->text, room), 0);
        cut += good < all[j].tokens;
    }
    assert_true(cut > 0);
    assert_int_equal(v.sessions, cut);
    same_world(k, w, true, "marked");
    kvq_store_close(&k->store);
    assert_int_equal(kit_open(k, &disk.io), 0);
    check(k, w, "opened read-only again");
}

PLAIN_TEST(read_only_disk)
{
    begin_store(4, 4);
    change(&k, &w, 20);
    struct world after = w;
    disk.read_only = true;
    assert_int_equal(drop_session("none"), KVQ_E_NO_SESSION);
    after.sessions[0] = (struct world_session){.used = true, .name = "x", .shards = 1, .n = 1};
    assert_int_equal(kit_save(&k, &after, "x"), KVQ_E_READ_ONLY);
    check(&k, &w, "read-only");
    kvq_store_close(&k.store);
    // Opened there, it serves what it has, and refuses what would write.
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_says(k.report.text, "read-only: its file system is read-only");
    check(&k, &w, "opened read-only");
    refuse_to_write(&k, &w);
    check(&k, &w, "still read-only");
    damage_is_marked(&k, &w);
    kvq_store_close(&k.store);
    // Without a catalog there is nothing to be had, and a store cannot be made.
    disk.read_only = false;
    assert_int_equal(disk.io.rename(&disk.io, catalog, "/store/kept"), 0);
    disk.read_only = true;
    assert_int_equal(kit_open(&k, &disk.io), KVQ_E_READ_ONLY);
    assert_says(k.text, "the catalog is missing, and cannot be made anew");
    disk.read_only = false;
    assert_int_equal(disk.io.rename(&disk.io, "/store/kept", catalog), 0);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    kvq_store_close(&k.store);
    assert_int_equal(disk.io.unlink(&disk.io, "/store/catalog.db-wal"), 0);
    disk.read_only = true;
    assert_int_equal(kit_open(&k, &disk.io), 0);
    check(&k, &w, "without a WAL");
    kvq_store_close(&k.store);
    disk.read_only = false;
    struct fault_file *file = fault_find(&disk, catalog);
    file->data[0] ^= 0xff;
    disk.read_only = true;
    assert_int_equal(kit_open(&k, &disk.io), KVQ_E_READ_ONLY);
    file->data[0] ^= 0xff;
    disk.read_only = false;
    assert_int_equal(kit_open(&k, &disk.io), 0);
    check(&k, &w, "writable again");
}

// A failed read is an error of that read alone, and no reason to mark a block.
PLAIN_TEST(read_fails)
{
    struct kvq_stored *blocks;
    uint8_t bytes[WORLD_MAX_BYTES];
    size_t n;
    begin_store(5, 5);
    struct world_session *s = &w.sessions[0];
    *s = (struct world_session){.used = true, .name = "x", .shards = 1, .n = 1};
    s->blocks[0] = (struct world_block){.seed = 1, .bytes = 5000};
    assert_int_equal(kit_save(&k, &w, "x"), 0);
    struct kvq_store_session it = found("x");
    blocks = blocks_of(&it, &n);
    fault_reset_counts(&disk);
    disk.fail_read = 1;
    disk.fail_with = EIO;
    assert_int_equal(kvq_store_read(k.store, blocks, bytes, k.text, sizeof k.text), KVQ_E_SYSTEM);
    fault_reset_counts(&disk);
    check(&k, &w, "read again");
    free(blocks);
}

// ---- Damage ----

// Whether a session has a block (or its record's header) at an offset of a segment.
static bool has_byte(struct kit *k, const struct kvq_store_session *s, uint64_t segment,
                     uint64_t at)
{
    size_t n;
    bool has = false;
    struct kvq_stored *blocks = blocks_of(s, &n);
    for (size_t i = 0; i < n; i++)
        has |= blocks[i].segment == segment && at >= blocks[i].offset &&
               at < blocks[i].offset + kvq_record_bytes(blocks[i].bytes);
    free(blocks);
    return has;
}

static void flip_at(struct kit *k, const struct world *w, uint64_t segment, struct fault_file *file,
                    uint64_t at)
{
    char why[256], when[80];
    struct kvq_store_session all[WORLD_SESSIONS];
    uint32_t n;
    uint8_t bit = (uint8_t)(1u << (at * 7 % 8));
    snprintf(when, sizeof when, "segment %" PRIu64 ", byte %" PRIu64, segment, at);
    file->data[at] ^= bit;
    struct kvq_store_verified v = verified();
    if (v.damaged_bytes == 0 || !v.text[0])
        fail_msg("%s: verify did not find it", when);
    if (!kit_same(k, w, true, why) || !kit_sound(k, why))
        fail_msg("%s: %s", when, why);
    assert_int_equal(
        kvq_store_list(k->store, NULL, 0, all, WORLD_SESSIONS, &n, k->text, sizeof k->text), 0);
    uint64_t cut = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t good;
        assert_int_equal(kvq_store_good_tokens(k->store, &all[i], &good, k->text, sizeof k->text),
                         0);
        bool concerned = has_byte(k, &all[i], segment, at);
        if (good < all[i].tokens && !concerned)
            fail_msg("%s: session %s is cut, which has nothing there", when, all[i].name);
        cut += good < all[i].tokens;
    }
    if (cut > v.sessions)
        fail_msg("%s: verify tells of fewer sessions than are cut", when);
    file->data[at] ^= bit; // as it was written: the marks go, and nothing is cut any more
    uint64_t marked = v.bad_blocks;
    v = verified();
    if (v.good_again != marked || v.sessions || v.damaged_bytes)
        fail_msg("%s: %" PRIu64 " blocks marked, %" PRIu64 " good again; %s", when, marked,
                 v.good_again, v.text);
}

PLAIN_TEST(flipped_bits)
{
    uint64_t step = long_tier() ? 29 : 911, flips = 0;
    begin_store(6, 6);
    change(&k, &w, long_tier() ? 12 : 40);
    for (uint64_t number = kvq__segment_after(k.store, 0); number;
         number = kvq__segment_after(k.store, number)) {
        char path[KVQ__PATH_BYTES];
        struct kvq__segment *g;
        const struct kvq__complaint quiet = {0};
        segment_path(number, path);
        assert_int_equal(kvq__segment_pin(k.store, number, &g, &quiet), 0);
        for (uint64_t at = number % step; at < g->bytes; at += step, flips++)
            flip_at(&k, &w, number, fault_find(&disk, path), at);
        kvq__segment_unpin(k.store, g);
    }
    print_message("%" PRIu64 " bits\n", flips);
    assert_true(flips > 100);
    check(&k, &w, "all bits as they were");
}

// A block whose bytes are records of another segment, sound ones that would make a session: when
// its header is damaged and the catalog is lost, the search for the next record must not take them.
PLAIN_TEST(planted_records)
{
    const char *path = "/store/segment-0000000000000001.kvqs";
    const struct kvq_store_meta mine = {.space = "uid-1", .name = "mine", .shards = 1};
    const struct kvq_place place = {0};
    struct kvq_save *save;
    uint64_t id;
    begin_store(8, 8);
    static const char *const names[] = {"a", "b", "c", "evil"};
    for (int i = 0; i < 4; i++) {
        w.sessions[i] = (struct world_session){.used = true, .shards = 1};
        snprintf(w.sessions[i].name, sizeof w.sessions[i].name, "%s", names[i]);
        assert_int_equal(kit_save(&k, &w, names[i]), 0);
    }
    kvq_store_close(&k.store);
    struct fault_file *file = fault_find(&disk, path);
    uint64_t n = file->bytes - KVQ_SEGMENT_FRONT;
    uint8_t *planted = malloc(n);
    assert_non_null(planted);
    memcpy(planted, file->data + KVQ_SEGMENT_FRONT, n);
    fault_close(&disk);
    fault_open(&disk, 9);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_session(save, &mine, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_put(save, &place, planted, n, &id, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_commit(&save, k.text, sizeof k.text), 0);
    kvq_store_close(&k.store);
    free(planted);
    fault_find(&disk, path)->data[KVQ_SEGMENT_FRONT + 20] ^= 1;
    lose_catalog();
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_true(k.report.rebuilt && k.report.damaged_bytes > 0);
    assert_false(is_there("evil"));
}

// A sector that the disk cannot read: a reader is told so and marks nothing, for it may be the
// cable. verify goes past it and marks what lies there, and takes the marks off when it is mended.
PLAIN_TEST(sick_sector)
{
    struct kvq_store_verified v;
    struct kvq_store_session it;
    uint32_t sessions;
    size_t n;
    char path[KVQ__PATH_BYTES], why[256];
    begin_store(8, 8);
    change(&k, &w, 40);
    assert_int_equal(kvq_store_list(k.store, NULL, 0, &it, 1, &sessions, k.text, sizeof k.text), 0);
    assert_int_equal(sessions, 1);
    struct kvq_stored *blocks = blocks_of(&it, &n);
    struct kvq_stored block = blocks[n / 2];
    uint8_t *out = malloc(block.bytes + 1);
    segment_path(block.segment, path);
    uint64_t end = block.offset + kvq_record_bytes(block.bytes);
    for (disk.sick_at = block.offset; disk.sick_at < end; disk.sick_at += 41) {
        bool head = disk.sick_at < block.offset + KVQ_RECORD_HEAD;
        bool pad = disk.sick_at >= block.offset + KVQ_RECORD_HEAD + block.bytes;
        disk.sick = fault_find(&disk, path);
        int rc = kvq_store_read(k.store, &block, out, k.text, sizeof k.text);
        assert_int_equal(rc, head || pad ? 0 : KVQ_E_SYSTEM);
        if (rc)
            assert_says(k.text, "kvqctl storage verify");
        uint64_t good;
        assert_int_equal(kvq_store_good_tokens(k.store, &it, &good, k.text, sizeof k.text), 0);
        assert_int_equal(good, it.tokens);
        v = verified();
        assert_int_equal(v.bad_blocks, head || pad ? 0 : 1);
        assert_true(v.damaged_bytes > 0);
        if (!kit_same(&k, &w, true, why))
            fail_msg("byte %" PRIu64 ": %s", disk.sick_at, why);
        disk.sick = NULL;
        uint64_t marked = v.bad_blocks;
        v = verified();
        assert_true(v.good_again == marked && v.damaged_bytes == 0 && v.sessions == 0);
    }
    free(out);
    free(blocks);
    kvq_store_close(&k.store); // the front is not needed to open the store, nor to read the rest
    disk.sick = fault_find(&disk, path);
    disk.sick_at = 100;
    if (kit_open(&k, &disk.io))
        fail_msg("with its front sick: %s", k.text);
    same_world(&k, &w, false, "with its front sick");
    change(&k, &w, 1);
    disk.sick = NULL;
    check(&k, &w, "with the disk mended");
}

// A segment is gone: the sessions that had nothing in it do not notice.
PLAIN_TEST(missing_segment)
{
    char path[KVQ__PATH_BYTES], elsewhere[KVQ__PATH_BYTES + 8];
    begin_store(7, 7);
    change(&k, &w, 40);
    segment_path(kvq__segment_after(k.store, 0), path);
    kvq_store_close(&k.store);
    snprintf(elsewhere, sizeof elsewhere, "%s.away", path);
    assert_int_equal(disk.io.rename(&disk.io, path, elsewhere), 0);
    disk.read_only = true;
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_int_equal(k.report.missing, 1);
    same_world(&k, &w, true, "read-only");
    kvq_store_close(&k.store);
    disk.read_only = false;
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_int_equal(k.report.missing, 1);
    assert_says(k.report.text, "1 segments are missing");
    same_world(&k, &w, true, "cut");
    kvq_store_close(&k.store);
    // Somebody finds the file and puts it back.
    assert_int_equal(disk.io.rename(&disk.io, elsewhere, path), 0);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    struct kvq_store_verified v = verified();
    assert_true(v.good_again > 0 && v.sessions == 0);
    assert_says(v.text, "their marks are taken off");
    check(&k, &w, "with the segment again");
    change(&k, &w, 0);
}

// ---- No memory ----

static sqlite3_mem_methods sqlite_memory;
static uint32_t refused; // requests of SQLite for memory
static bool no_index;    // no page of the WAL's index is to be had, each 32 KiB

static void *give_memory(int n)
{
    bool refuse = no_index && n >= 32 << 10 && n < 40 << 10;
    refused += refuse;
    return refuse ? NULL : sqlite_memory.xMalloc(n);
}

// SQLite has synced the commit and finds no memory to note it in the WAL's index: the commit has
// failed, and is there after a loss of power. So nothing that it names may be taken back.
PLAIN_TEST(no_memory_for_the_index)
{
    struct world after;
    int rc = 0;
    begin_store(70, 70);
    assert_int_equal(
        sqlite3_exec(k.store->catalog.db, "PRAGMA wal_autocheckpoint=0", NULL, NULL, NULL),
        SQLITE_OK);
    refused = 0;
    no_index = true;
    for (uint64_t i = 1; rc == 0 && i < 5000; i++) { // the index's first page has 4,062 frames
        after = w;
        after.sessions[0] = (struct world_session){.used = true, .name = "it", .shards = 1, .n = 8};
        for (uint32_t j = 0; j < 8; j++)
            after.sessions[0].blocks[j] =
                (struct world_block){.place = {0, j, 1, 0}, .seed = 8 * i + j, .bytes = 100};
        rc = kit_save(&k, &after, "it");
        if (rc == 0)
            w = after;
    }
    no_index = false;
    assert_int_equal(rc, KVQ_E_NO_MEMORY);
    assert_true(refused > 0 && store_read_only(&k));
    after_failure(&k, &w, &after, true, "no memory for the index");
}

int main(void)
{
    sqlite3_mem_methods counted;
    if (sqlite3_config(SQLITE_CONFIG_GETMALLOC, &sqlite_memory) != SQLITE_OK)
        return 1;
    counted = sqlite_memory;
    counted.xMalloc = give_memory;
    if (sqlite3_config(SQLITE_CONFIG_MALLOC, &counted) != SQLITE_OK)
        return 1;
    return run_all(NULL, end_store);
}
