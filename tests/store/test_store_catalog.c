// SPDX-License-Identifier: Apache-2.0
//
// A catalog that is damaged, missing, older than the segments, or of another version.
#include "tests/store/store_check.h"

struct spoil {
    const char *name, *says;
    void (*spoil)(struct fault_file *db, struct fault_file *wal);
    const char *before, *renamed; // where that is NULL: this name in the schema, behind this
};

static void spoil_head(struct fault_file *db, struct fault_file *wal)
{
    memset(db->data, 0x5a, 100);
}

static void spoil_root(struct fault_file *db, struct fault_file *wal)
{
    memset(db->data + 100, 0xff, 2000);
}

static void spoil_inside(struct fault_file *db, struct fault_file *wal)
{
    for (uint64_t page = 1; page < db->bytes / 4096; page++)
        memset(db->data + page * 4096, 0xee, 64);
}

static void cut_short(struct fault_file *db, struct fault_file *wal)
{
    db->bytes = db->bytes / 2 / 4096 * 4096;
}

static void empty(struct fault_file *db, struct fault_file *wal)
{
    db->bytes = 0;
    if (wal)
        wal->bytes = 0;
}

// The first letter of a name in the schema, which SQLite finds as sound as any other.
static void rename_in_schema(struct fault_file *db, const char *before, const char *name)
{
    size_t skip = strlen(before);
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", before, name);
    uint8_t *at = memmem(db->data, db->bytes, whole, strlen(whole));
    assert_non_null(at);
    at[skip] ^= 1;
}

static void raise_write_version(struct fault_file *db, struct fault_file *wal)
{
    db->data[18] ^= 4;
}

// What says whose database it is, and of which version.
static void clear_marks(struct fault_file *db, struct fault_file *wal)
{
    memset(db->data + 60, 0, 4);
    memset(db->data + 68, 0, 4);
}

PLAIN_TEST(spoiled_catalog)
{
    static const struct spoil spoils[] = {
        {"head", "damaged", spoil_head, NULL, NULL},
        {"schema", "damaged", spoil_root, NULL, NULL},
        {"inside", "damaged", spoil_inside, NULL, NULL},
        {"cut short", "damaged", cut_short, NULL, NULL},
        {"empty", "missing", empty, NULL, NULL},
        {"a table's name", "damaged", NULL, "CREATE TABLE ", "entries("},
        {"a column", "damaged", NULL, "meta BLOB, ", "manifest INT"},
        {"the last table", "damaged", NULL, "CREATE TABLE ", "owed("},
        {"write version", "damaged", raise_write_version, NULL, NULL},
        {"marks", "damaged", clear_marks, NULL, NULL},
    };
    for (size_t i = 0; i < sizeof spoils / sizeof *spoils; i++) {
        begin_store(i, 20 + i);
        change(&k, &w, 40);
        kvq_store_close(&k.store);
        struct fault_file *db = fault_find(&disk, catalog);
        if (spoils[i].spoil)
            spoils[i].spoil(db, fault_find(&disk, "/store/catalog.db-wal"));
        else
            rename_in_schema(db, spoils[i].before, spoils[i].renamed);
        if (kit_open(&k, &disk.io))
            fail_msg("%s: %s", spoils[i].name, k.text);
        if (!k.report.rebuilt || !strstr(k.report.text, spoils[i].says) || k.report.bad_blocks)
            fail_msg("%s: \"%s\"", spoils[i].name, k.report.text);
        check(&k, &w, spoils[i].name);
        if (strcmp(spoils[i].says, "damaged") == 0)
            assert_non_null(fault_find(&disk, "/store/catalog.db.bad"));
        change(&k, &w, 10);
        check(&k, &w, spoils[i].name);
    }
}

static void save_small(struct kit *k, struct world *w, int i)
{
    struct world_session *s = &w->sessions[i];
    *s = (struct world_session){.used = true, .shards = 1, .n = 1, .seed = 60 + (uint64_t)i};
    snprintf(s->name, sizeof s->name, "s%d", i);
    s->blocks[0] = (struct world_block){.seed = 1 + (uint64_t)i, .bytes = 500};
    if (kit_save(k, w, s->name))
        fail_msg("%s: %s", s->name, k->text);
}

// A bit flips in an index, and its table has a row that the index does not know: a session that is
// listed is not found by its name, and a block that is to go cannot be deleted, at every start.
PLAIN_TEST(spoiled_index)
{
    static const char *const names[] = {"sqlite_autoindex_sessions_1", "blocks_place"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        sqlite3_stmt *rows = NULL;
        begin_store(i, 33);
        save_small(&k, &w, 0);
        save_small(&k, &w, 1);
        assert_int_equal(sqlite3_prepare_v2(k.store->catalog.db,
                                            "SELECT rootpage FROM sqlite_master WHERE name=?", -1,
                                            &rows, NULL),
                         SQLITE_OK);
        assert_int_equal(sqlite3_bind_text(rows, 1, names[i], -1, SQLITE_STATIC), SQLITE_OK);
        assert_int_equal(sqlite3_step(rows), SQLITE_ROW);
        // Where the first cell ends.
        uint64_t end = 4096 * (uint64_t)sqlite3_column_int64(rows, 0);
        sqlite3_finalize(rows);
        kvq_store_close(&k.store);
        fault_find(&disk, catalog)->data[end - 4] ^= 1;
        assert_int_equal(kit_open(&k, &disk.io), 0);
        if (!k.report.rebuilt)
            fail_msg("%s: nobody has seen it", names[i]);
        check(&k, &w, names[i]);
        assert_int_equal(drop_session("s0"), 0);
    }
}

// A store whose catalog somebody has put an older one in the place of.
static void begin_older(void)
{
    begin_store(30, 30);
    change(&k, &w, 15);
    kvq_store_close(&k.store);
    struct fault_file *db = fault_find(&disk, catalog);
    uint64_t bytes = db->bytes;
    uint8_t *copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, db->data, bytes);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    change(&k, &w, 25);
    kvq_store_close(&k.store);
    db = fault_find(&disk, catalog);
    memcpy(db->data, copy, bytes < db->bytes ? bytes : db->bytes);
    db->bytes = bytes;
    free(copy);
}

// What came after an older catalog is in the segments, and not cut off.
PLAIN_TEST(older_catalog)
{
    begin_older();
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_true(k.report.rebuilt);
    assert_says(k.report.text, "older than the segments");
    check(&k, &w, "older catalog");
}

// The disk cannot read all of the last segment, and one before it tells that the catalog is old.
PLAIN_TEST(older_catalog_on_a_sick_disk)
{
    begin_older();
    const struct fault_name *last = NULL;
    for (int i = 0; i < FAULT_FILES; i++) {
        const struct fault_name *name = &disk.now[i];
        bool is_segment = name->file && strstr(name->path, "/segment-");
        if (is_segment && (!last || strcmp(name->path, last->path) > 0))
            last = name;
    }
    assert_non_null(last);
    disk.sick = last->file;
    disk.sick_at = KVQ_SEGMENT_FRONT + 17; // not where the last save may end
    if (kit_open(&k, &disk.io))
        fail_msg("%s", k.text);
    assert_true(k.report.rebuilt);
    assert_says(k.report.text, "older than the segments");
}

// An edit of an open store, after which saves go on: verify finds it, as nothing else does before
// the next end that is none in order, and the next opening says what is wrong, and undoes it.
static void edit_is_undone(const char *sql)
{
    begin_store(31, 31);
    for (uint32_t i = 0; i < 2; i++)
        w.sessions[i] = (struct world_session){
            .used = true, .name = "group", .shard = i, .shards = 2, .tokens = 5};
    w.sessions[2] = (struct world_session){.used = true, .name = "other", .shards = 1};
    assert_int_equal(kit_save(&k, &w, "group"), 0);
    assert_int_equal(sqlite3_exec(k.store->catalog.db, sql, NULL, NULL, NULL), SQLITE_OK);
    if (kit_save(&k, &w, "other"))
        fail_msg("%s: %s", sql, k.text);
    assert_true(verified().catalog_bad);
    reopen_store();
    if (!k.report.rebuilt || !strstr(k.report.text, "a session has a value that none can have"))
        fail_msg("%s: \"%s\"", sql, k.report.text);
    check(&k, &w, sql);
}

PLAIN_TEST(values_that_none_can_have)
{
    edit_is_undone("UPDATE sessions SET tokens=9223372036854775807"); // which nobody can add up
    edit_is_undone("UPDATE sessions SET tokens=16777217 WHERE shard=1");
    edit_is_undone("UPDATE sessions SET shards=65 WHERE name='group'");
}

// ---- What an orderly end leaves ----

static const char *const sum_file = "/store/catalog.sum";

static void power_fails(void)
{
    disk.crashed = true;
    kvq_store_close(&k.store);
    fault_crash(&disk);
}

static void edit_catalog(const char *sql)
{
    struct kvq__catalog edited;
    assert_int_equal(kvq__catalog_open(&edited, &disk.io, catalog, false), 0);
    assert_int_equal(sqlite3_exec(edited.db, sql, NULL, NULL, NULL), SQLITE_OK);
    kvq__catalog_close(&edited);
}

// All rows are looked at after an end that was none in order, and only then.
PLAIN_TEST(checked_after_a_crash)
{
    begin_store(32, 32);
    save_small(&k, &w, 0);
    for (int i = 1; i < 4; i++) {
        reopen_store();
        assert_false(k.report.checked);
        save_small(&k, &w, i);
    }
    power_fails();
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_true(k.report.checked && !k.report.rebuilt);
    check(&k, &w, "after a crash");
    reopen_store();
    assert_false(k.report.checked);
    kvq_store_close(&k.store);
    disk.read_only = true;
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_false(k.report.checked);
}

// Rows that disagree, under an end in order and under a crash.
PLAIN_TEST(damage_is_found_after_any_end)
{
    for (int crash = 0; crash < 2; crash++) {
        begin_store(33, 33);
        save_small(&k, &w, 0);
        reopen_store();
        save_small(&k, &w, 1);
        if (crash)
            power_fails();
        else
            kvq_store_close(&k.store);
        edit_catalog("UPDATE blocks SET refs=refs+1");
        assert_int_equal(kit_open(&k, &disk.io), 0);
        assert_true(k.report.checked && k.report.rebuilt);
        check(&k, &w, "edited");
    }
}

// A run that meets rows which contradict each other leaves no note: the next one makes them anew.
PLAIN_TEST(contradictions_leave_no_note)
{
    struct kvq_store_session it;
    struct kvq_stored *blocks;
    size_t n;
    begin_store(37, 37);
    save_small(&k, &w, 0);
    assert_int_equal(
        sqlite3_exec(k.store->catalog.db, "UPDATE sessions SET blocks=blocks+1", NULL, NULL, NULL),
        SQLITE_OK);
    assert_int_equal(kvq_store_find(k.store, "uid-1", "s0", 0, &it, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_store_blocks(k.store, &it, &blocks, &n, k.text, sizeof k.text),
                     KVQ_E_DAMAGED);
    reopen_store();
    assert_true(k.report.checked && k.report.rebuilt);
    check(&k, &w, "contradicted");
}

// The note of an earlier end comes back, beside a later catalog: with what came since in the WAL,
// in the database, and with the database as it was then.
PLAIN_TEST(note_of_an_earlier_end)
{
    for (int i = 0; i < 3; i++) {
        begin_store(34, 34);
        save_small(&k, &w, 0);
        kvq_store_close(&k.store);
        struct fault_file note = *fault_find(&disk, sum_file);
        uint8_t bytes[64];
        assert_true(note.bytes <= sizeof bytes);
        memcpy(bytes, note.data, note.bytes);
        assert_int_equal(kit_open(&k, &disk.io), 0);
        save_small(&k, &w, 1);
        save_small(&k, &w, 2);
        if (i == 1)
            assert_int_equal(
                sqlite3_exec(k.store->catalog.db, "PRAGMA wal_checkpoint", NULL, NULL, NULL),
                SQLITE_OK);
        power_fails();
        int file = disk.io.open(&disk.io, sum_file, KVQ_IO_WRITE | KVQ_IO_CREATE);
        assert_int_equal(disk.io.write(&disk.io, file, bytes, note.bytes, 0), (int)note.bytes);
        disk.io.close(&disk.io, file);
        if (i == 2)
            (void)disk.io.unlink(&disk.io, "/store/catalog.db-wal");
        assert_int_equal(kit_open(&k, &disk.io), 0);
        assert_int_equal(k.report.checked, i < 2);
        assert_int_equal(k.report.rebuilt, i == 2); // for it is older than the segments
        check(&k, &w, "an earlier note");
    }
}

// Whatever the note says that no end has written, all is checked.
PLAIN_TEST(note_that_is_none)
{
    begin_store(35, 35);
    save_small(&k, &w, 0);
    for (uint64_t i = 0; i < 50; i++) {
        kvq_store_close(&k.store);
        struct fault_file *note = fault_find(&disk, sum_file);
        assert_int_equal(note->bytes, 48);
        if (i < 48)
            note->data[i] ^= (uint8_t)(1u << i % 8);
        else if (i == 48)
            note->bytes = 47;
        else
            assert_int_equal(disk.io.unlink(&disk.io, sum_file), 0);
        assert_int_equal(kit_open(&k, &disk.io), 0);
        assert_true(k.report.checked && !k.report.rebuilt);
    }
    check(&k, &w, "no note");
}

// At the cap no page is taken for it.
PLAIN_TEST(note_at_the_cap)
{
    begin_disk(36, (struct kit){.options = {.cap_bytes = KVQ_STORE_MIN_CAP}}, 36);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    save_small(&k, &w, 0);
    k.store->cap_bytes = status_of_store().physical_bytes;
    kvq_store_close(&k.store);
    assert_null(fault_find(&disk, sum_file));
    assert_int_equal(kit_open(&k, &disk.io), 0);
    kvq_store_close(&k.store);
    assert_non_null(fault_find(&disk, sum_file));
}

// ---- Damage that the segments have as well ----

// The n-th COMMIT of a segment, from 0 on.
static uint8_t *find_commit(struct fault_file *file, int n)
{
    struct kvq_record r;
    for (uint64_t at = KVQ_SEGMENT_FRONT; at + sizeof r <= file->bytes;) {
        memcpy(&r, file->data + at, sizeof r);
        if (r.kind == KVQ_RECORD_COMMIT && n-- == 0)
            return file->data + at;
        at += kvq_record_bytes(r.length);
    }
    fail_msg("there are fewer COMMITs");
    return NULL;
}

// Three saves, of which the COMMITs of some are damaged: what the next one proves is there, and
// what is lost is told.
PLAIN_TEST(damaged_commits)
{
    static const struct {
        unsigned damaged, lost; // by bits: which saves
    } cases[] = {{1, 0}, {2, 0}, {4, 4}, {3, 1}, {5, 4}, {6, 6}, {7, 7}};
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        unsigned damaged = cases[i / 2].damaged, lost = cases[i / 2].lost;
        char when[80];
        snprintf(when, sizeof when, "%s of COMMITs %x", i % 2 ? "payloads" : "headers", damaged);
        begin_store(50, 1);
        for (int save = 0; save < 3; save++)
            save_small(&k, &w, save);
        kvq_store_close(&k.store);
        struct fault_file *file = fault_find(&disk, "/store/segment-0000000000000001.kvqs");
        for (int save = 0; save < 3; save++) {
            if (damaged >> save & 1)
                find_commit(file, save)[i % 2 ? sizeof(struct kvq_record) : 17] ^= 1;
            w.sessions[save].used = !(lost >> save & 1);
        }
        for (int round = 0; round < 2; round++) {
            lose_catalog();
            assert_int_equal(kit_open(&k, &disk.io), 0);
            if (round == 0 && k.report.lost_sessions != (uint64_t)__builtin_popcount(lost))
                fail_msg("%s: %s", when, k.report.text);
            same_world(&k, &w, false, when);
            if (round == 0)
                save_small(&k, &w, 3);
            same_world(&k, &w, false, when);
            kvq_store_close(&k.store);
        }
    }
}

// The catalog is lost, and the disk cannot read a sector of a segment: what else there is is back.
PLAIN_TEST(sick_without_a_catalog)
{
    static const char *const path = "/store/segment-0000000000000002.kvqs";
    for (int front = 0; front < 2; front++) {
        char why[256];
        uint32_t all = 0, left = 0;
        begin_store(34, 34);
        change(&k, &w, 40);
        kvq_store_close(&k.store);
        struct fault_file *file = fault_find(&disk, path);
        assert_non_null(file);
        disk.sick = file;
        for (disk.sick_at = front ? 100 : KVQ_SEGMENT_FRONT + 17; disk.sick_at < file->bytes;
             disk.sick_at += front ? file->bytes : 5003) {
            lose_catalog();
            if (kit_open(&k, &disk.io))
                fail_msg("byte %" PRIu64 ": %s", disk.sick_at, k.text);
            assert_true(k.report.rebuilt && k.report.damaged_bytes > 0);
            assert_true(front == (fault_find(&disk, path) == NULL)); // without one it is set aside
            for (int i = 0; i < WORLD_SESSIONS; i++) {
                struct kvq_store_session it;
                const struct world_session *s = &w.sessions[i];
                all += s->used;
                left += s->used && kvq_store_find(k.store, "uid-1", s->name, s->shard, &it, why,
                                                  sizeof why) == 0;
            }
            kvq_store_close(&k.store);
        }
        assert_true(all > 0 && left * 2 > all);
        disk.sick = fault_find(&disk, "/store/segment-0000000000000006.kvqs"); // the last
        assert_non_null(disk.sick);
        disk.sick_at = disk.sick->bytes - 3946; // in what was saved last
        lose_catalog();
        assert_int_equal(kit_open(&k, &disk.io), KVQ_E_SYSTEM);
        assert_says(k.text, "move it away");
        disk.sick = NULL;
        if (!front) { // mended: nothing was lost by what was done meanwhile
            lose_catalog();
            assert_int_equal(kit_open(&k, &disk.io), 0);
            check(&k, &w, "mended");
            kvq_store_close(&k.store);
        }
    }
}

static const uint64_t most = UINT64_MAX, most_signed = INT64_MAX, far_off = 1ull << 40, other = 7;

// What somebody appends to a segment, with sums that are right and a COMMIT of its own.
struct forgery {
    const char *what;
    uint16_t kind;
    uint64_t id, transaction, before;
    const uint64_t *session, *block; // in place of those of the first session's manifest
};

static const struct forgery forgeries[] = {
    {"a kind that there is not", 77, 900, 100, 2, NULL, NULL},
    {"a front", KVQ_RECORD_FILE, 900, 100, 2, NULL, NULL},
    {"padding with an id", KVQ_RECORD_PAD, 900, 100, 2, NULL, NULL},
    {"a block without an id", KVQ_RECORD_BLOCK, 0, 100, 2, NULL, NULL},
    {"an id of 64 bits", KVQ_RECORD_BLOCK, UINT64_MAX, 100, 2, NULL, NULL},
    {"an id of 63 bits", KVQ_RECORD_BLOCK, INT64_MAX, 100, 2, NULL, NULL},
    {"a transaction of 64 bits", KVQ_RECORD_BLOCK, 900, UINT64_MAX, 2, NULL, NULL},
    {"a transaction before it", KVQ_RECORD_BLOCK, 900, 100, UINT64_MAX, NULL, NULL},
    {"DROP of a session of 64 bits", KVQ_RECORD_DROP, 900, 100, 2, &most, NULL},
    {"a session of 64 bits", KVQ_RECORD_MANIFEST, 900, 100, 2, &most, NULL},
    {"a session of 63 bits", KVQ_RECORD_MANIFEST, 900, 100, 2, &most_signed, NULL},
    {"a session without an id", KVQ_RECORD_MANIFEST, 900, 100, 2, &forgeries[3].id, NULL},
    {"an entry of 63 bits", KVQ_RECORD_MANIFEST, 900, 100, 2, &other, &most_signed},
    {"a block that nobody has", KVQ_RECORD_MANIFEST, 900, 100, 2, &other, &far_off},
};

static void append_record(struct fault_file *file, const struct forgery *f, uint16_t kind,
                          const void *payload, size_t n)
{
    struct kvq_file_head head;
    struct kvq_record r;
    uint64_t end = file->bytes + kvq_record_bytes(n);
    memcpy(&head, file->data + sizeof r, sizeof head);
    kvq_record_make(&r, KVQ_RECORD_BLOCK, f->id + (kind == KVQ_RECORD_COMMIT), f->transaction, n,
                    kvq_checksum(payload, n), head.salt);
    r.kind = kind;
    r.head = kvq_record_checksum(&r, head.salt);
    file->data = realloc(file->data, end);
    assert_non_null(file->data);
    memset(file->data + file->bytes, 0, end - file->bytes);
    memcpy(file->data + file->bytes, &r, sizeof r);
    memcpy(file->data + file->bytes + sizeof r, payload, n);
    file->bytes = end;
}

static void forge(struct fault_file *file, const struct forgery *f)
{
    static uint8_t bytes[4096];
    const struct kvq_commit commit = {f->transaction, f->before, 1, 1};
    struct kvq_record r = {.length = 64};
    uint64_t at = KVQ_SEGMENT_FRONT;
    if (f->kind == KVQ_RECORD_MANIFEST) {
        for (; r.kind != f->kind; at += kvq_record_bytes(r.length))
            memcpy(&r, file->data + at, sizeof r);
        assert_true(r.length <= sizeof bytes);
        memcpy(bytes, file->data + at - kvq_record_bytes(r.length) + sizeof r, r.length);
        if (f->session)
            memcpy(bytes + offsetof(struct kvq_manifest_head, session), f->session, 8);
        if (f->block)
            memcpy(bytes + sizeof(struct kvq_manifest_head), f->block, 8);
        bytes[offsetof(struct kvq_manifest_head, name)] = 'f';
    } else if (f->session) {
        r.length = sizeof *f->session;
        memcpy(bytes, f->session, sizeof *f->session);
    }
    append_record(file, f, f->kind, bytes, r.length);
    append_record(file, f, KVQ_RECORD_COMMIT, &commit, sizeof commit);
    fault_settle(file);
}

// Numbers that somebody made up, with sums that are right: the store opens, with what else it has,
// goes on, and does not make its catalog anew at every start.
PLAIN_TEST(forged_numbers)
{
    for (size_t i = 0; i < 2 * sizeof forgeries / sizeof *forgeries; i++) {
        const struct forgery *f = &forgeries[i / 2];
        begin_store(51, 1);
        save_small(&k, &w, 0);
        save_small(&k, &w, 1);
        kvq_store_close(&k.store);
        forge(fault_find(&disk, "/store/segment-0000000000000001.kvqs"), f);
        if (i % 2)
            lose_catalog();
        for (int start = 0; start < 3; start++) {
            if (kit_open(&k, &disk.io) || (start && k.report.rebuilt))
                fail_msg("%s, start %d: %s%s", f->what, start, k.text, k.report.text);
            if (start == 1) {
                (void)kvq_store_delete(k.store, "uid-1", "f0", NULL, 0); // the forged one
                save_small(&k, &w, 2);
            }
            if (start)
                same_world(&k, &w, false, f->what);
            kvq_store_close(&k.store);
        }
    }
}

// A file whose name has a number that no segment has is none.
PLAIN_TEST(forged_name)
{
    static const char *const path = "/store/segment-ffffffffffffffff.kvqs";
    begin_store(52, 1);
    save_small(&k, &w, 0);
    kvq_store_close(&k.store);
    lose_catalog();
    int file = disk.io.open(&disk.io, path, KVQ_IO_WRITE | KVQ_IO_NEW);
    assert_true(file >= 0);
    disk.io.close(&disk.io, file);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    same_world(&k, &w, false, "forged name");
    assert_non_null(fault_find(&disk, path));
}

// ---- Segments of another store ----

enum { FOREIGN_BYTES = 1 << 20 };
static uint8_t foreign_bytes[FOREIGN_BYTES];
static uint64_t n_foreign; // of these, that a segment of another store has

static const char *const first = "/store/segment-0000000000000001.kvqs";
static const char *const second = "/store/segment-0000000000000002.kvqs";

static void save_some(int from, int to)
{
    for (int i = from; i < to; i++)
        save_small(&k, &w, i);
}

// A store whose segments have two saves each.
static void begin_small_segments(uint64_t seed)
{
    begin_disk(seed, (struct kit){.options = {.segment_bytes = 16 << 10}}, seed);
    assert_int_equal(kit_open(&k, &disk.io), 0);
}

// The third and the fourth transaction of another store.
static void make_foreign(void)
{
    begin_small_segments(60);
    save_some(0, 6);
    struct fault_file *file = fault_find(&disk, second);
    assert_non_null(file);
    n_foreign = file->bytes;
    assert_true(n_foreign <= FOREIGN_BYTES);
    memcpy(foreign_bytes, file->data, n_foreign);
}

// Under that name; over the file that has it.
static void put_foreign(const char *path)
{
    int file = disk.io.open(&disk.io, path, KVQ_IO_WRITE | KVQ_IO_NEW);
    assert_true(file >= 0);
    assert_int_equal(disk.io.write(&disk.io, file, foreign_bytes, n_foreign, 0), (int)n_foreign);
    disk.io.close(&disk.io, file);
    fault_settle(fault_find(&disk, path));
}

static void is_set_aside(const char *path)
{
    char bad[KVQ__PATH_BYTES + 8];
    snprintf(bad, sizeof bad, "%s.bad", path);
    assert_non_null(fault_find(&disk, bad));
    assert_int_equal(k.report.foreign, 1);
    assert_says(k.report.text, "kept as .bad");
}

// A segment of another store with a number that this one has not: with transactions above ours,
// which is what a catalog looks like that has lost some, and below. Neither is it read or removed,
// nor is anything else set aside.
PLAIN_TEST(foreign_segment)
{
    for (int i = 0; i < 4; i++) {
        bool lost = i / 2; // and without the catalog
        make_foreign();
        begin_store(61, 61);
        save_some(0, i % 2 ? 1 : 7);
        kvq_store_close(&k.store);
        put_foreign(second);
        if (lost)
            lose_catalog();
        assert_int_equal(kit_open(&k, &disk.io), 0);
        assert_int_equal(k.report.rebuilt, lost);
        // With one segment of each store nothing but the catalog says whose folder it is.
        if (!lost) {
            is_set_aside(second);
            assert_null(fault_find(&disk, "/store/catalog.db.bad"));
            same_world(&k, &w, false, "beside a foreign segment");
        } else {
            is_set_aside(first);
        }
    }
}

// It stands in the place of one of ours, whose blocks are lost then; what others have is there.
PLAIN_TEST(foreign_in_place)
{
    for (int lost = 0; lost < 2; lost++) {
        make_foreign();
        begin_small_segments(62);
        save_some(0, 9);
        kvq_store_close(&k.store);
        assert_int_equal(disk.io.unlink(&disk.io, second), 0);
        put_foreign(second);
        if (lost)
            lose_catalog();
        assert_int_equal(kit_open(&k, &disk.io), 0);
        is_set_aside(second);
        assert_int_equal(k.report.rebuilt, lost);
        if (!lost)
            assert_true(k.report.missing == 1 && k.report.bad_blocks > 0);
        assert_true(is_there("s1") && is_there("s4"));
        assert_int_equal(is_there("s2"), !lost);
        save_small(&k, &w, 9);
        reopen_store();
        assert_true(is_there("s9") && !k.report.rebuilt && !k.report.foreign);
    }
}

// A catalog that is of none of the segments is the stranger.
PLAIN_TEST(foreign_catalog)
{
    begin_store(63, 63);
    save_some(0, 2);
    kvq_store_close(&k.store);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_int_equal(
        sqlite3_exec(k.store->catalog.db, "UPDATE store SET id=randomblob(16)", NULL, NULL, NULL),
        SQLITE_OK);
    kvq_store_close(&k.store);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_true(k.report.rebuilt && !k.report.foreign);
    same_world(&k, &w, false, "another catalog");
}

// ---- Versions ----

PLAIN_TEST(newer_catalog)
{
    begin_store(40, 40);
    change(&k, &w, 10);
    assert_int_equal(sqlite3_exec(k.store->catalog.db, "PRAGMA user_version=99", NULL, NULL, NULL),
                     SQLITE_OK);
    kvq_store_close(&k.store);
    assert_int_equal(kit_open(&k, &disk.io), KVQ_E_VERSION);
    assert_says(k.text, "is of version 99, and this program knows up to 2");
    assert_null(fault_find(&disk, "/store/catalog.db.bad"));
}

// Of all files but the lock, what they hold and the space that is taken for them.
static uint64_t sum_of_files(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < FAULT_FILES; i++) {
        const struct fault_name *name = &disk.now[i];
        if (!name->file || strcmp(name->path, "/store/lock") == 0)
            continue;
        uint64_t of_name = kvq_checksum(name->path, strlen(name->path)).low;
        uint64_t of_data = kvq_checksum(name->file->data, name->file->bytes).low;
        sum += (of_data ^ name->file->allocated) * (2 * of_name + 1);
    }
    return sum;
}

// What a newer version has written last may be in the WAL alone, and its space on disk is its own.
PLAIN_TEST(newer_is_left_alone)
{
    begin_store(43, 43);
    change(&k, &w, 10);
    assert_int_equal(sqlite3_exec(k.store->catalog.db, "PRAGMA user_version=3", NULL, NULL, NULL),
                     SQLITE_OK);
    disk.crashed = true;
    kvq_store_close(&k.store);
    fault_crash(&disk);
    assert_int_equal(fault_find(&disk, catalog)->data[63], 2);
    uint64_t before = sum_of_files();
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kit_open(&k, &disk.io), KVQ_E_VERSION);
        assert_says(k.text, "is of version 3");
        assert_int_equal(sum_of_files(), before);
    }
}

// A catalog as the first version made it is brought up to date, with what namespaces use.
PLAIN_TEST(first_version)
{
    uint64_t before, after, sessions;
    begin_store(42, 42);
    change(&k, &w, 30);
    assert_int_equal(kvq_store_usage(k.store, "uid-1", &before, &sessions, NULL, 0), 0);
    assert_true(before > 0 && sessions > 0);
    assert_int_equal(
        sqlite3_exec(k.store->catalog.db,
                     "DROP TABLE spaces; DROP TABLE uses; DROP TABLE owed; PRAGMA user_version=1",
                     NULL, NULL, NULL),
        SQLITE_OK);
    reopen_store();
    assert_false(k.report.rebuilt);
    check(&k, &w, "first version");
    assert_int_equal(kvq_store_usage(k.store, "uid-1", &after, &sessions, NULL, 0), 0);
    assert_int_equal(after, before);
    change(&k, &w, 10);
    check(&k, &w, "changed since");
}

PLAIN_TEST(newer_segment)
{
    char path[KVQ__PATH_BYTES];
    struct kvq_record front;
    begin_store(41, 41);
    change(&k, &w, 20);
    segment_path(kvq__segment_after(k.store, 0), path);
    kvq_store_close(&k.store);
    struct fault_file *file = fault_find(&disk, path);
    memcpy(&front, file->data, sizeof front);
    front.version = 2;
    front.head = kvq_record_checksum(&front, 0);
    memcpy(file->data, &front, sizeof front);
    assert_int_equal(kit_open(&k, &disk.io), KVQ_E_VERSION);
    assert_says(k.text, "is of version 2; this program knows up to 1");
    // The same without the catalog.
    lose_catalog();
    assert_int_equal(kit_open(&k, &disk.io), KVQ_E_VERSION);
    assert_non_null(fault_find(&disk, path));
}

int main(void)
{
    return run_all(NULL, end_store);
}
