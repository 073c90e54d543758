// SPDX-License-Identifier: Apache-2.0
//
// A campaign: somebody edits, cuts and removes segments and rows of the catalog at random
// while the store is closed. It must open after that, give out no wrong byte, say what was lost,
// and save, verify, compact and delete as any other.
//
// 150 seeds; KVQ_FULL=1: 4000. KVQ_SEED=N: that one alone.
#include "tests/store/store_check.h"

static struct kvq_store_verified v; // that verify found last

static uint64_t state, seed;
static char did[512]; // what was edited

static uint64_t below(uint64_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 20) % n;
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
    size_t used = strlen(did);
    va_list args;
    va_start(args, format);
    vsnprintf(did + used, sizeof did - used, format, args);
    va_end(args);
}

// ---- Segments ----

static struct fault_name *some_segment(void)
{
    uint64_t from = below(FAULT_FILES);
    for (uint64_t i = 0; i < FAULT_FILES; i++) {
        struct fault_name *name = &disk.now[(from + i) % FAULT_FILES];
        if (name->file && strstr(name->path, "segment-") && !strstr(name->path, ".bad"))
            return name;
    }
    return NULL;
}

static struct fault_name *newest_segment(void)
{
    struct fault_name *last = NULL;
    for (int i = 0; i < FAULT_FILES; i++) {
        struct fault_name *name = &disk.now[i];
        if (name->file && strstr(name->path, "segment-") &&
            (!last || strcmp(name->path, last->path) > 0))
            last = name;
    }
    return last;
}

static void resize_file(struct fault_file *file, uint64_t bytes)
{
    file->data = realloc(file->data, bytes + 1);
    assert_non_null(file->data);
    for (uint64_t i = file->bytes; i < bytes; i++)
        file->data[i] = (uint8_t)below(256);
    file->bytes = bytes;
}

static void edit_segment(void)
{
    struct fault_name *name = below(3) ? some_segment() : newest_segment();
    if (!name)
        return;
    struct fault_file *file = name->file;
    const char *base = strrchr(name->path, '/') + 10;
    switch (below(6)) {
    case 0:
    case 1:
        note(" %s removed;", base);
        assert_int_equal(disk.io.unlink(&disk.io, name->path), 0);
        return;
    case 2:
        resize_file(file, below(file->bytes + 1));
        note(" %s cut to %" PRIu64 ";", base, file->bytes);
        break;
    case 3:
        resize_file(file, file->bytes + 1 + below(20000));
        note(" %s longer;", base);
        break;
    case 4:
        for (uint64_t i = 1 + below(5); i > 0 && file->bytes; i--)
            file->data[below(file->bytes)] ^= (uint8_t)(1u << below(8));
        note(" bits of %s;", base);
        break;
    default:
        for (uint64_t at = below(file->bytes + 1), n = below(9000); n > 0 && at < file->bytes; n--)
            file->data[at++] = below(2) ? 0 : (uint8_t)below(256);
        note(" bytes of %s;", base);
    }
    fault_settle(file);
}

// ---- Rows ----

static int64_t number(sqlite3 *db, const char *sql)
{
    sqlite3_stmt *s = NULL;
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &s, NULL), SQLITE_OK);
    int64_t n = sqlite3_step(s) == SQLITE_ROW ? sqlite3_column_int64(s, 0) : 0;
    sqlite3_finalize(s);
    return n;
}

static void column(sqlite3 *db, const char *table, char *out, size_t n)
{
    char sql[200];
    sqlite3_stmt *s = NULL;
    snprintf(sql, sizeof sql, "SELECT count(*) FROM pragma_table_info('%s')", table);
    uint64_t which = below((uint64_t)number(db, sql));
    snprintf(sql, sizeof sql, "SELECT name FROM pragma_table_info('%s') LIMIT 1 OFFSET %d", table,
             (int)which);
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &s, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(s), SQLITE_ROW);
    snprintf(out, n, "%s", (const char *)sqlite3_column_text(s, 0));
    sqlite3_finalize(s);
}

// Rows are found by what makes them unlike others.
static const struct {
    const char *name, *key;
} tables[] = {{"store", "one"},
              {"segments", "number"},
              {"blocks", "id"},
              {"sessions", "id"},
              {"entries", "(session,layer,page,kind)"},
              {"prefixes", "(space,hash,session)"},
              {"spaces", "id"},
              {"uses", "(space,block)"},
              {"owed", "session"}};

static void edit_row(sqlite3 *db)
{
    static const char *const values[] = {"0",   "-1", "1",     "NULL",  "9223372036854775807",
                                         "'x'", "7",  "x'00'", "C+1",   "C-1",
                                         "C*2", "-C", "''",    "1e300", "64",
                                         "5000"};
    char sql[400], c[64], value[80], keys[80];
    size_t t = below(sizeof tables / sizeof *tables);
    const char *table = tables[t].name, *key = tables[t].key;
    snprintf(sql, sizeof sql, "SELECT count(*) FROM %s", table);
    int64_t rows = number(db, sql);
    int row = rows ? (int)below((uint64_t)rows) : 0;
    snprintf(keys, sizeof keys, "%.*s", (int)strcspn(key + (*key == '('), ")"),
             key + (*key == '('));
    column(db, table, c, sizeof c);
    const char *v = values[below(sizeof values / sizeof *values)];
    snprintf(value, sizeof value, "%s", v);
    if (strchr(v, 'C'))
        snprintf(value, sizeof value, "%s%s%s", *v == '-' ? "-" : "", c, *v == '-' ? "" : v + 1);
    uint64_t what = below(10);
    if (what == 0)
        snprintf(sql, sizeof sql, "DELETE FROM %s", table);
    else if (what < 4)
        snprintf(sql, sizeof sql,
                 "DELETE FROM %s WHERE %s IN (SELECT %s FROM %s LIMIT 1 OFFSET %d)", table, key,
                 keys, table, row);
    else if (what == 4)
        snprintf(sql, sizeof sql, "UPDATE OR IGNORE %s SET %s=%s", table, c, value);
    else
        snprintf(sql, sizeof sql,
                 "UPDATE OR IGNORE %s SET %s=%s WHERE %s IN (SELECT %s FROM %s LIMIT 1 OFFSET %d)",
                 table, c, value, key, keys, table, row);
    (void)sqlite3_exec(db, sql, NULL, NULL, NULL); // what SQLite itself refuses is no edit
    note(" %s;", sql);
}

static void edit_rows(void)
{
    struct kvq__catalog k;
    assert_int_equal(kvq__catalog_open(&k, &disk.io, catalog, false), 0);
    for (uint64_t n = 1 + below(2); n > 0; n--)
        edit_row(k.db);
    kvq__catalog_close(&k);
    fault_settle(fault_find(&disk, catalog));
}

// ---- What must hold ----

// Every block that is given out is one that somebody saved: the sum in its record is its bytes', so
// all that is left to ask is whether it is the block of that id, below those of new blocks.
static void no_wrong_byte(struct kit *k, const struct world *w, uint64_t end)
{
    static uint8_t is[WORLD_MAX_BYTES], want[WORLD_MAX_BYTES];
    struct kvq_store_session all[2 * WORLD_SESSIONS];
    uint32_t n = 0;
    const size_t room = sizeof k->text;
    if (kvq_store_list(k->store, NULL, 0, all, 2 * WORLD_SESSIONS, &n, k->text, room))
        fail_msg("seed %" PRIu64 ":%s list: %s", seed, did, k->text);
    for (uint32_t i = 0; i < n; i++) {
        struct kvq_stored *blocks = NULL;
        size_t count = 0;
        if (kvq_store_blocks(k->store, &all[i], &blocks, &count, k->text, room))
            fail_msg("seed %" PRIu64 ":%s blocks of %s: %s", seed, did, all[i].name, k->text);
        for (size_t j = 0; j < count; j++) {
            if (blocks[j].bad || blocks[j].id >= end || blocks[j].bytes > WORLD_MAX_BYTES ||
                kvq_store_read(k->store, &blocks[j], is, k->text, room))
                continue;
            for (int s = 0; s < WORLD_SESSIONS; s++)
                for (size_t b = 0; b < w->sessions[s].n; b++) {
                    const struct world_block *of = &w->sessions[s].blocks[b];
                    if (!w->sessions[s].used || of->id != blocks[j].id)
                        continue;
                    world_fill(of->seed, want, (size_t)of->bytes);
                    if (of->bytes != blocks[j].bytes || memcmp(is, want, (size_t)of->bytes) != 0)
                        fail_msg("seed %" PRIu64 ":%s block %" PRIu64 " has other bytes", seed, did,
                                 of->id);
                }
        }
        free(blocks);
    }
}

static void save_new(struct kit *k, const char *name)
{
    static uint8_t bytes[9000];
    struct kvq_save *save;
    uint64_t id;
    const struct kvq_store_meta meta = {.space = "uid-1", .name = name, .shards = 1, .tokens = 256};
    const size_t room = sizeof k->text;
    int rc = kvq_save_begin(k->store, &save, k->text, room);
    if (rc == 0)
        rc = kvq_save_session(save, &meta, k->text, room);
    for (uint32_t i = 0; i < 12 && rc == 0; i++) {
        const struct kvq_place place = {i % 2, i / 2, 1, i / 2 * 128};
        world_fill(i, bytes, sizeof bytes);
        rc = kvq_save_put(save, &place, bytes, sizeof bytes, &id, k->text, room);
    }
    if (rc == 0)
        rc = kvq_save_commit(&save, k->text, room);
    if (rc)
        fail_msg("seed %" PRIu64 ":%s nothing is saved: %s", seed, did, k->text);
}

static void check_new(struct kit *k, const char *name)
{
    static uint8_t is[9000], want[9000];
    struct kvq_store_session it;
    struct kvq_stored *blocks = NULL;
    size_t n = 0;
    const size_t room = sizeof k->text;
    if (kvq_store_find(k->store, "uid-1", name, 0, &it, k->text, room) ||
        kvq_store_blocks(k->store, &it, &blocks, &n, k->text, room))
        fail_msg("seed %" PRIu64 ":%s %s", seed, did, k->text);
    assert_int_equal(n, 12);
    for (size_t i = 0; i < n; i++) {
        if (kvq_store_read(k->store, &blocks[i], is, k->text, room))
            fail_msg("seed %" PRIu64 ":%s %s: %s", seed, did, name, k->text);
        world_fill(blocks[i].place.page * 2 + blocks[i].place.layer, want, sizeof want);
        assert_memory_equal(is, want, sizeof is);
    }
    free(blocks);
}

static void compact(struct kit *k)
{
    struct kvq_store_freed freed = {.more = true};
    for (int i = 0; i < 200 && freed.more; i++)
        if (kvq_store_compact(k->store, 1 << 20, 10, &freed, k->text, sizeof k->text))
            fail_msg("seed %" PRIu64 ":%s compact: %s", seed, did, k->text);
    if (freed.more)
        fail_msg("seed %" PRIu64 ":%s compaction never ends", seed, did);
}

static void verify(struct kit *k, struct kvq_store_verified *v)
{
    if (kvq_store_verify(k->store, NULL, NULL, v, k->text, sizeof k->text))
        fail_msg("seed %" PRIu64 ":%s verify: %s", seed, did, k->text);
}

static void delete_all(struct kit *k)
{
    struct kvq_store_session one;
    uint32_t n = 0;
    const size_t room = sizeof k->text;
    while (kvq_store_list(k->store, NULL, 0, &one, 1, &n, k->text, room) == 0 && n)
        if (kvq_store_delete(k->store, one.space, one.name, k->text, room))
            fail_msg("seed %" PRIu64 ":%s delete %s: %s", seed, did, one.name, k->text);
    assert_int_equal(n, 0);
}

static void open_again(void)
{
    kvq_store_close(&k.store);
    if (kit_open(&k, &disk.io))
        fail_msg("seed %" PRIu64 ":%s it does not open: %s", seed, did, k.text);
}

static uint64_t reported;

static void trial(void)
{
    char why[256];
    state = seed * 77 + 1;
    did[0] = '\0';
    begin_store(seed, seed);
    change(&k, &w, 25);
    kvq_store_close(&k.store);
    uint64_t what = below(4);
    if (what < 3)
        edit_rows();
    for (uint64_t n = what == 3 ? 1 + below(3) : what == 0; n > 0; n--)
        edit_segment();
    open_again();
    bool told = k.report.text[0] != '\0';
    verify(&k, &v);
    told |= v.text[0] != '\0';
    reported += told;
    if (!told && what == 3 && !kit_same(&k, &w, false, why))
        fail_msg("seed %" PRIu64 ":%s nobody says that %s", seed, did, why);
    uint64_t end = k.store->next_block;
    no_wrong_byte(&k, &w, end);
    save_new(&k, "new");
    compact(&k);
    check_new(&k, "new");
    save_new(&k, "newer");
    open_again();
    if (k.report.rebuilt)
        fail_msg("seed %" PRIu64 ":%s made anew once more: %s", seed, did, k.report.text);
    check_new(&k, "new");
    check_new(&k, "newer");
    if (!kit_sound(&k, why))
        fail_msg("seed %" PRIu64 ":%s %s", seed, did, why);
    no_wrong_byte(&k, &w, end);
    delete_all(&k);
    compact(&k);
    save_new(&k, "last");
    open_again();
    check_new(&k, "last");
}

PLAIN_TEST(edited)
{
    const char *full = getenv("KVQ_FULL"), *one = getenv("KVQ_SEED");
    uint64_t first = one ? strtoull(one, NULL, 10) : 1;
    uint64_t last = one ? first : full && strcmp(full, "1") == 0 ? 4000 : 150;
    for (seed = first; seed <= last; seed++)
        trial();
    print_message("%" PRIu64 " trials, of which %" PRIu64 " told of damage\n", last - first + 1,
                  reported);
    assert_true(one || reported > (last - first) / 4);
}

// The newest segment is gone: the next save begins another one.
PLAIN_TEST(newest_missing)
{
    seed = 0;
    did[0] = '\0';
    for (int cut = 0; cut < 2; cut++) {
        begin_store(5, 5);
        change(&k, &w, 25);
        check(&k, &w, "before");
        save_new(&k, "old");
        kvq_store_close(&k.store);
        struct fault_name *name = newest_segment();
        if (cut) {
            resize_file(name->file, name->file->bytes - 4096);
            fault_settle(name->file);
        } else {
            assert_int_equal(disk.io.unlink(&disk.io, name->path), 0);
        }
        open_again();
        assert_int_equal(k.report.missing, 1);
        save_new(&k, "new");
        compact(&k);
        check_new(&k, "new");
        verify(&k, &v);
        open_again();
        check_new(&k, "new");
    }
}

// A segment goes while the store is open: verify marks what was in it, and takes the marks off when
// the file is there again.
PLAIN_TEST(gone_meanwhile)
{
    seed = 0;
    did[0] = '\0';
    begin_store(7, 7);
    change(&k, &w, 40);
    open_again();
    struct fault_name *name = newest_segment();
    char path[sizeof name->path];
    snprintf(path, sizeof path, "%s", name->path);
    assert_int_equal(disk.io.rename(&disk.io, path, "/store/elsewhere"), 0);
    int rc = kvq_store_verify(k.store, NULL, NULL, &v, k.text, sizeof k.text);
    if (rc || v.missing != 1 || v.bad_blocks == 0)
        fail_msg("%s: %s", kvq_status_name(rc), k.text);
    uint64_t marked = v.bad_blocks;
    same_world(&k, &w, true, "cut");
    assert_int_equal(disk.io.rename(&disk.io, "/store/elsewhere", path), 0);
    verify(&k, &v);
    assert_true(v.good_again == marked && v.sessions == 0);
    check(&k, &w, "with the file there again");
}

// Three segments of six sessions each: of the first one session stays, of the second two. blocks[i]
// has the block of one of them, to be freed, and path[i] is its segment's.
static void begin_sparse_store(struct kvq_stored *blocks[2], char path[2][KVQ__PATH_BYTES])
{
    char name[KVQ__NAME_BYTES];
    size_t n;
    begin_store(9, 9);
    for (int i = 0; i < 18; i++) {
        struct world_session *s = &w.sessions[0];
        *s = (struct world_session){.used = true, .shards = 1, .n = 1};
        snprintf(s->name, sizeof s->name, "s%d", i);
        s->blocks[0] = (struct world_block){.seed = (uint64_t)i, .bytes = 9000};
        assert_int_equal(kit_save(&k, &w, s->name), 0);
    }
    for (int i = 1; i < 12; i++) {
        snprintf(name, sizeof name, "s%d", i);
        if (i != 6 && i != 7)
            assert_int_equal(drop_session(name), 0);
    }
    for (int i = 0; i < 2; i++) {
        struct kvq_store_session it = found(i ? "s7" : "s0");
        blocks[i] = blocks_of(&it, &n);
        segment_path(blocks[i]->segment, path[i]);
    }
    assert_string_not_equal(path[0], path[1]);
}

// Of the segment with most that is dead a record that is alive cannot be read: others are compacted
// all the same, and only when there are no others is that an error.
PLAIN_TEST(compacts_past_a_sick_sector)
{
    struct kvq_stored *blocks[2];
    struct kvq_store_freed freed;
    char path[2][KVQ__PATH_BYTES];
    int rc;
    begin_sparse_store(blocks, path);
    disk.sick = fault_find(&disk, path[0]);
    disk.sick_at = blocks[0]->offset + KVQ_RECORD_HEAD + 10;
    do
        rc = kvq_store_compact(k.store, UINT64_MAX, 10, &freed, k.text, sizeof k.text);
    while (rc == 0 && freed.more);
    assert_int_equal(rc, KVQ_E_SYSTEM);
    assert_says(k.text, "kvqctl storage verify");
    assert_non_null(fault_find(&disk, path[0]));
    assert_null(fault_find(&disk, path[1]));
    disk.sick = NULL;
    assert_int_equal(kvq_store_compact(k.store, UINT64_MAX, 10, &freed, k.text, sizeof k.text), 0);
    assert_null(fault_find(&disk, path[0]));
    free(blocks[0]);
    free(blocks[1]);
}

// A block that verify has marked is read once more before its segment goes: it is lost where that
// cannot be done now either, and its mark goes where it can. A failure that tells nothing about the
// block (no memory, say) costs nothing.
PLAIN_TEST(compacts_what_is_marked)
{
    enum { MENDED, SICK, GONE, CASES };
    for (int i = 0; i < CASES; i++) {
        struct kvq_stored *blocks[2];
        struct kvq_store_freed freed;
        char path[2][KVQ__PATH_BYTES], out[9000];
        begin_sparse_store(blocks, path);
        disk.sick = fault_find(&disk, path[0]);
        disk.sick_at = blocks[0]->offset + KVQ_RECORD_HEAD + 10;
        verify(&k, &v);
        assert_int_equal(v.bad_blocks, 1);
        if (i != SICK)
            disk.sick = NULL;
        fault_reset_counts(&disk);
        disk.fail_read = 1;
        disk.fail_with = ENOMEM;
        assert_int_equal(kvq_store_compact(k.store, UINT64_MAX, 10, &freed, k.text, sizeof k.text),
                         KVQ_E_SYSTEM);
        fault_reset_counts(&disk);
        assert_non_null(fault_find(&disk, path[0]));
        if (i == GONE) {
            kvq_store_close(&k.store); // it has the file open
            assert_int_equal(disk.io.unlink(&disk.io, path[0]), 0);
            assert_int_equal(kit_open(&k, &disk.io), 0);
        }
        compact_all(UINT64_MAX, 10);
        assert_null(fault_find(&disk, path[0]));
        disk.sick = NULL;
        for (int again = 0; again < 2; again++, reopen_store()) {
            assert_int_equal(status_of_store().bad_blocks > 0, i != MENDED);
            assert_int_equal(kvq_store_read(k.store, blocks[0], out, k.text, sizeof k.text),
                             i == MENDED ? 0 : KVQ_E_DAMAGED);
            verify(&k, &v);
            assert_int_equal(v.sessions, i == MENDED ? 0 : 1);
        }
        free(blocks[0]);
        free(blocks[1]);
    }
}

int main(void)
{
    return run_all(NULL, end_store);
}
