// SPDX-License-Identifier: Apache-2.0
//
// What open does before anything else: makes catalog and segments agree.
//
//   1. The catalog is opened, and checked unless it is as an orderly end has left it (closed.c). If
//      it is damaged or missing it is made anew (rebuild.c).
//   2. Behind what the catalog has committed in a segment, and in segments that it does not name,
//      there may be COMMIT records. One that names a transaction before it which the catalog does
//      not have means that the catalog has lost transactions: it is made anew as well.
//   3. Otherwise all of that was never acknowledged. It is cut off, and the files are removed.
//   4. Files of another store, in the folder by mistake, say nothing about this one: they are set
//      aside. Only if no segment is of the catalog's store is the catalog the stranger.
#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/store_internal.h"

enum { BEHIND = 1, OTHER = 2 }; // what makes a catalog that is sound useless

// A file with the name of a segment.
struct seen {
    uint64_t behind; // bytes that do not count
    bool own;        // its front is that of a segment of this store, as far as can be told
    bool foreign;    // it is sound, and of another store, or of a segment with another number
};

static const char *const catalog_files[] = {"catalog.db", "catalog.db-wal", "catalog.db-journal"};

// Adds a sentence to the report's text.
__attribute__((format(printf, 2, 3))) static void add_sentence(struct kvq_store_report *report,
                                                               const char *format, ...)
{
    size_t used = strlen(report->text);
    va_list args;
    va_start(args, format);
    if (used + 2 < sizeof report->text) {
        if (used)
            report->text[used++] = ' ';
        vsnprintf(report->text + used, sizeof report->text - used, format, args);
    }
    va_end(args);
}

// ---- The files of the folder ----

struct files {
    struct kvq_store *s;
    uint64_t *numbers; // of segments
    size_t n, room;
};

static int note_file(void *context, const char *name)
{
    struct files *f = context;
    uint64_t number = kvq__segment_number(name);
    if (number == 0)
        return 0;
    if (f->n == f->room) {
        size_t room = f->room ? 2 * f->room : 64;
        uint64_t *more = realloc(f->numbers, room * sizeof *more);
        if (!more)
            return -ENOMEM;
        f->numbers = more;
        f->room = room;
    }
    f->numbers[f->n++] = number;
    return 0;
}

int kvq__by_number(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int list_files(struct kvq_store *s, struct files *f, const struct kvq__complaint *c)
{
    *f = (struct files){.s = s};
    int rc = s->io->list(s->io, s->folder, note_file, f);
    if (rc)
        return kvq__io_complain(c, rc, "the folder", "listed");
    if (f->n)
        qsort(f->numbers, f->n, sizeof *f->numbers, kvq__by_number);
    return KVQ_OK;
}

static bool has_file(const struct files *f, uint64_t number)
{
    return f->n && bsearch(&number, f->numbers, f->n, sizeof number, kvq__by_number);
}

static struct kvq__segment *known_segment(struct kvq_store *s, uint64_t number)
{
    for (size_t i = 0; i < s->n_segments; i++)
        if (s->segments[i]->number == number)
            return s->segments[i];
    return NULL;
}

// ---- The catalog ----

static int load_counters(struct kvq_store *s)
{
    struct kvq__catalog *k = &s->catalog;
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_STORE_GET, "");
    int rc = kvq__next(k, rows);
    if (rc != 1 || sqlite3_column_bytes(rows, 0) != (int)sizeof s->id) {
        (void)sqlite3_reset(rows);
        return rc < 0 ? rc : KVQ_E_DAMAGED;
    }
    memcpy(s->id, sqlite3_column_blob(rows, 0), sizeof s->id);
    s->last_transaction = (uint64_t)sqlite3_column_int64(rows, 1);
    s->next_transaction = s->last_transaction + 1;
    s->next_block = (uint64_t)sqlite3_column_int64(rows, 2);
    s->next_session = (uint64_t)sqlite3_column_int64(rows, 3);
    s->next_segment = (uint64_t)sqlite3_column_int64(rows, 4);
    (void)sqlite3_reset(rows);
    return KVQ_OK;
}

static int load_owed(struct kvq_store *s)
{
    struct kvq__catalog *k = &s->catalog;
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_OWED_ALL, "");
    int rc = kvq__next(k, rows);
    while (rc == 1) {
        if (!kvq__grow((void **)&s->owed, &s->room_owed, s->n_owed, sizeof *s->owed)) {
            (void)sqlite3_reset(rows);
            return KVQ_E_NO_MEMORY;
        }
        s->owed[s->n_owed++] = (uint64_t)sqlite3_column_int64(rows, 0);
        rc = kvq__next(k, rows);
    }
    return rc;
}

static int load_segments(struct kvq_store *s)
{
    struct kvq__catalog *k = &s->catalog;
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_SEGMENT_ALL, "");
    int rc = kvq__next(k, rows);
    while (rc == 1) {
        struct kvq__segment *g = kvq__segment_add(s, (uint64_t)sqlite3_column_int64(rows, 0),
                                                  (uint64_t)sqlite3_column_int64(rows, 1));
        if (!g) {
            (void)sqlite3_reset(rows);
            return KVQ_E_NO_MEMORY;
        }
        g->bytes = (uint64_t)sqlite3_column_int64(rows, 2);
        g->sealed = sqlite3_column_int64(rows, 3) != 0;
        rc = kvq__next(k, rows);
    }
    return rc;
}

// Whether all that it has is as it must be.
static int check_catalog(struct kvq_store *s)
{
    int rc = kvq__catalog_check(&s->catalog);
    if (rc == KVQ_OK && !s->read_only) // where it cannot be made anew, what it has is better
        rc = kvq__catalog_agree(&s->catalog);
    return rc;
}

static int load_catalog(struct kvq_store *s, struct kvq_store_report *report)
{
    char path[KVQ__PATH_BYTES];
    bool in_order = kvq__closed_in_order(s);
    kvq__path(s, catalog_files[0], path);
    int rc = kvq__catalog_open(&s->catalog, s->io, path, s->read_only);
    report->checked = rc == KVQ_OK && !in_order;
    if (report->checked)
        rc = check_catalog(s);
    if (rc == KVQ_OK)
        rc = load_counters(s);
    if (rc == KVQ_OK)
        rc = load_owed(s);
    if (rc == KVQ_OK)
        rc = load_segments(s);
    // The name of a table or column is not what it was, which SQLite's check does not see; or a
    // number in its front is, by which SQLite may read it alone.
    bool damaged = (rc == KVQ_E_SYSTEM && (s->catalog.last & 0xff) == SQLITE_ERROR) ||
                   (rc == KVQ_E_READ_ONLY && !s->read_only);
    return damaged ? KVQ_E_DAMAGED : rc;
}

// Whether the disk has room for a catalog beside the one there is, as large, with a WAL as large.
static bool has_room_for_two(struct kvq_store *s)
{
    struct kvq_io_status status;
    uint64_t free_bytes = 0, need = KVQ__RESERVE;
    for (int i = 0; i < 2; i++) { // the catalog and its WAL
        char path[KVQ__PATH_BYTES];
        kvq__path(s, catalog_files[i], path);
        int file = kvq_io_open(s->io, path, 0);
        if (file < 0)
            continue;
        need += kvq_io_status(s->io, file, &status) == 0 ? 2 * status.physical : 0;
        s->io->close(s->io, file);
    }
    return kvq_io_space(s->io, s->folder, &free_bytes) != 0 || free_bytes >= need;
}

// Renames the catalog to catalog.db.bad, over one that was set aside before, and its WAL likewise.
// On a disk without room for another one both are removed: what counts is in the segments.
static int set_catalog_aside(struct kvq_store *s, struct kvq_store_report *report,
                             const struct kvq__complaint *c)
{
    int rc = 0;
    assert(!s->read_only);
    kvq__catalog_close(&s->catalog);
    kvq__segments_free(s);
    s->n_owed = 0; // these sessions are back
    bool keep = has_room_for_two(s);
    if (!keep)
        add_sentence(report, "The disk is full, so that no copy of it was kept.");
    for (int i = 0; i < 3 && (rc == 0 || rc == -ENOENT); i++) {
        char from[KVQ__PATH_BYTES], to[KVQ__PATH_BYTES], name[KVQ__NAME_BYTES];
        snprintf(name, sizeof name, "catalog.db.bad%s", catalog_files[i] + 10);
        kvq__path(s, catalog_files[i], from);
        kvq__path(s, name, to);
        rc = keep ? kvq_io_rename(s->io, from, to) : kvq_io_unlink(s->io, from);
        if (!keep && (rc == 0 || rc == -ENOENT))
            rc = kvq_io_unlink(s->io, to);
    }
    if (rc == 0 || rc == -ENOENT)
        rc = kvq_io_sync_dir(s->io, s->folder);
    return rc ? kvq__io_complain(c, rc, "the damaged catalog", "set aside") : KVQ_OK;
}

static int rebuild_catalog(struct kvq_store *s, const struct files *f,
                           struct kvq_store_report *report, const struct kvq__complaint *c)
{
    char path[KVQ__PATH_BYTES];
    assert(!s->read_only && s->n_segments == 0 && s->n_owed == 0);
    kvq__path(s, catalog_files[0], path);
    kvq__catalog_close(&s->catalog);
    int rc = kvq__catalog_open(&s->catalog, s->io, path, false);
    if (rc != KVQ_E_NO_SESSION)
        return rc ? kvq__catalog_complain(s, rc, c)
                  : kvq__complain(c, KVQ_E_INTERNAL, "the catalog is there after all");
    report->rebuilt = !report->created;
    return kvq__rebuild(s, f->numbers, f->n, report, c);
}

// ---- What lies behind the commits ----

// Whether [from, end) of a segment has a COMMIT behind one that the catalog lacks: BEHIND, 0,
// negative.
static int look_behind(struct kvq_store *s, int file, uint64_t salt, uint64_t from, uint64_t end,
                       uint8_t *buffer)
{
    struct kvq_walk w = {.io = s->io,
                         .file = file,
                         .salt = salt,
                         .next = from,
                         .end = end,
                         .buffer = buffer,
                         .buffer_bytes = KVQ__WALK_BYTES};
    int find;
    assert(from <= end);
    while ((find = kvq_walk_next(&w)) > KVQ_WALK_END) {
        struct kvq_commit commit;
        if (find != KVQ_WALK_RECORD || w.record.kind != KVQ_RECORD_COMMIT ||
            !kvq_record_sane(&w.record) || w.record.length != sizeof commit)
            continue;
        int rc = kvq_io_read(s->io, file, &commit, sizeof commit, w.at + KVQ_RECORD_HEAD, NULL);
        if (rc)
            return rc;
        if (kvq_commit_sane(&commit) && commit.before > s->last_transaction)
            return BEHIND;
    }
    return find < 0 ? find : 0;
}

static bool is_foreign(const struct kvq_store *s, uint64_t number, const struct kvq_file_head *head)
{
    assert(number > 0);
    return head->number != number || memcmp(head->store, s->id, sizeof s->id) != 0;
}

// One file: known to the catalog or not.
static int look_at(struct kvq_store *s, uint64_t number, struct seen *seen, uint8_t *buffer,
                   const struct kvq__complaint *c)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    struct kvq__segment *g = known_segment(s, number);
    struct kvq_file_head head = {0};
    struct kvq_io_status status = {0};
    uint16_t version = 0;
    kvq__segment_name(number, name);
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_READ);
    if (file < 0)
        return kvq__io_complain(c, file, name, "opened");
    int rc = kvq_io_status(s->io, file, &status);
    int front = rc ? rc : kvq_segment_front(s->io, file, &head, &version);
    if (front == -EIO && g) // the catalog knows what stands there
        front = KVQ_WALK_DAMAGE;
    uint64_t from = g ? g->bytes : KVQ_SEGMENT_FRONT;
    uint64_t salt = g ? g->salt : head.salt;
    *seen = (struct seen){.behind = status.bytes > from ? status.bytes - from : 0,
                          .foreign = front == 0 && is_foreign(s, number, &head)};
    seen->own = !seen->foreign && (front == 0 || g);
    rc = front < 0 ? front : 0;
    if (front > 0 && version > KVQ_RECORD_VERSION) {
        rc = kvq__complain(c, KVQ_E_VERSION, "%s is of version %u; this program knows up to %d",
                           name, version, KVQ_RECORD_VERSION);
        goto out;
    }
    if (rc == 0 && seen->own && seen->behind)
        rc = look_behind(s, file, salt, from, status.bytes, buffer);
    if (rc == -EIO) // it might be cut off where something stands that counts
        rc =
            kvq__complain(c, KVQ_E_SYSTEM,
                          "%s cannot be read (%s): bring it back from a copy, or move it away, and "
                          "the store opens without what it holds",
                          name, strerror(EIO));
    else if (rc < 0)
        rc = kvq__io_complain(c, rc, name, "read");
    if (g) {
        g->physical = status.physical;
        g->length = status.bytes;
        g->sealed |= front != 0; // without its front a catalog made anew has nothing of it
        if (rc == 0 && front == 0 && !seen->foreign && head.salt != g->salt)
            rc = OTHER;
    }
out:
    s->io->close(s->io, file);
    return rc;
}

static int cut_tail(struct kvq_store *s, struct kvq__segment *g, const struct kvq__complaint *c)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    struct kvq_io_status status;
    assert(!s->read_only);
    kvq__segment_name(g->number, name);
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_WRITE);
    int rc = file < 0 ? file : kvq_io_truncate(s->io, file, g->bytes);
    if (rc == 0)
        rc = kvq_io_sync(s->io, file);
    if (rc == 0)
        rc = kvq_io_status(s->io, file, &status);
    if (rc == 0)
        g->physical = status.physical;
    if (file >= 0)
        s->io->close(s->io, file);
    return rc ? kvq__io_complain(c, rc, name, "cut") : KVQ_OK;
}

static int remove_unknown(struct kvq_store *s, uint64_t number, const struct kvq__complaint *c)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    assert(!s->read_only && number > 0);
    kvq__segment_name(number, name);
    kvq__path(s, name, path);
    int rc = kvq_io_unlink(s->io, path);
    return rc ? kvq__io_complain(c, rc, name, "removed") : KVQ_OK;
}

// Cuts tails and removes files: only after nothing was found that the catalog lacks.
static int drop_behind(struct kvq_store *s, const struct files *f, const struct seen *seen,
                       struct kvq_store_report *report, const struct kvq__complaint *c)
{
    int rc = KVQ_OK;
    assert(!s->read_only);
    for (size_t i = 0; i < f->n && rc == KVQ_OK; i++) {
        struct kvq__segment *g = known_segment(s, f->numbers[i]);
        bool foreign = seen[i].foreign;
        if (g && !foreign && seen[i].behind == 0)
            continue;
        rc = foreign ? kvq__segment_set_aside(s, f->numbers[i], c)
             : g     ? cut_tail(s, g, c)
                     : remove_unknown(s, f->numbers[i], c);
        report->foreign += foreign;
        report->tails += g && !foreign;
        report->tail_bytes += g && !foreign ? seen[i].behind : 0;
        report->removed += !g && !foreign;
    }
    if (rc == KVQ_OK && (report->removed || report->foreign)) {
        rc = kvq_io_sync_dir(s->io, s->folder);
        rc = rc ? kvq__io_complain(c, rc, "the folder", "synced") : KVQ_OK;
    }
    return rc;
}

// The catalog's segments that others stand in the place of are missing.
static void lose_replaced(struct kvq_store *s, const struct files *f, const struct seen *seen)
{
    for (size_t i = 0; i < f->n; i++) {
        struct kvq__segment *g = known_segment(s, f->numbers[i]);
        if (g && seen[i].foreign)
            g->length = g->physical = 0;
    }
}

// What all files say of the catalog: BEHIND, OTHER, 0, negative.
static int look_at_all(struct kvq_store *s, const struct files *f, struct seen *seen,
                       uint8_t *buffer, const struct kvq__complaint *c)
{
    size_t own = 0, foreign = 0;
    int rc = KVQ_OK, verdict = 0;
    for (size_t i = 0; i < f->n && rc >= 0; i++) {
        rc = look_at(s, f->numbers[i], &seen[i], buffer, c);
        verdict = verdict ? verdict : rc;
        own += seen[i].own;
        foreign += seen[i].foreign;
    }
    if (rc < 0) // of what has to be read anew, errors are looked at then
        return verdict > 0 ? verdict : rc;
    return foreign && !own ? OTHER : verdict;
}

// BEHIND: the catalog has lost transactions; OTHER: it has another segment in the place of one, or
// is of another store than all of them; 0: all that does not count was dropped; negative.
static int check_segments(struct kvq_store *s, const struct files *f,
                          struct kvq_store_report *report, const struct kvq__complaint *c)
{
    uint8_t *buffer = malloc(KVQ__WALK_BYTES);
    struct seen *seen = calloc(f->n + 1, sizeof *seen);
    int rc = buffer && seen ? KVQ_OK : kvq__complain(c, KVQ_E_NO_MEMORY, "no memory");
    if (rc == KVQ_OK)
        rc = look_at_all(s, f, seen, buffer, c);
    if (rc == KVQ_OK && !s->read_only)
        rc = drop_behind(s, f, seen, report, c);
    if (rc == KVQ_OK)
        lose_replaced(s, f, seen);
    free(seen);
    free(buffer);
    return rc;
}

// Marks the blocks of segments that are missing or too short.
static int mark_missing(struct kvq_store *s, const struct files *f, struct kvq_store_report *report,
                        const struct kvq__complaint *c)
{
    int rc = KVQ_OK;
    for (size_t i = 0; i < s->n_segments && rc == KVQ_OK; i++) {
        struct kvq__segment *g = s->segments[i];
        if (has_file(f, g->number) && g->length >= g->bytes)
            continue;
        report->missing++;
        g->sealed = true; // there is nothing to be added to
        rc = kvq__run(&s->catalog, KVQ_Q_BLOCK_CUT, "ii", (int64_t)g->number, (int64_t)g->length);
        report->bad_blocks += rc ? 0 : (uint64_t)sqlite3_changes64(s->catalog.db);
    }
    return rc ? kvq__catalog_complain(s, rc, c) : KVQ_OK;
}

// ---- All of it ----

// Makes the catalog anew and drops what no transaction had committed.
static int start_over(struct kvq_store *s, const struct files *f, struct kvq_store_report *report,
                      const struct kvq__complaint *c)
{
    struct files left = {0}; // some may have been set aside
    int rc = rebuild_catalog(s, f, report, c);
    if (rc == KVQ_OK)
        rc = list_files(s, &left, c);
    if (rc == KVQ_OK)
        rc = check_segments(s, &left, report, c);
    free(left.numbers);
    return rc > 0 ? kvq__complain(c, KVQ_E_INTERNAL, "the new catalog lacks transactions") : rc;
}

// What a read-only file system rules out.
static int refuse_anew(const char *what, const struct kvq__complaint *c)
{
    return kvq__complain(c, KVQ_E_READ_ONLY,
                         "%s, and cannot be made anew, since the file system is read-only: mount "
                         "it so that it can be written, once",
                         what);
}

// Without changing anything.
static int recover_read_only(struct kvq_store *s, const struct files *f,
                             struct kvq_store_report *report, const struct kvq__complaint *c)
{
    assert(s->read_only);
    int rc = load_catalog(s, report);
    if (rc == KVQ_E_NO_SESSION)
        return refuse_anew("the catalog is missing", c);
    if (rc == KVQ_E_DAMAGED)
        return refuse_anew("the catalog is damaged", c);
    if (rc)
        return kvq__catalog_complain(s, rc, c);
    add_sentence(report, "It is read-only: %s.", s->why);
    rc = check_segments(s, f, report, c);
    if (rc > KVQ_OK)
        return refuse_anew("the catalog is not that of the segments", c);
    return rc ? rc : mark_missing(s, f, report, c);
}

static int recover_writable(struct kvq_store *s, const struct files *f,
                            struct kvq_store_report *report, const struct kvq__complaint *c)
{
    int rc = load_catalog(s, report);
    if (rc == KVQ_E_NO_SESSION) {
        report->created = f->n == 0;
        if (f->n)
            add_sentence(report, "The catalog was missing.");
        return start_over(s, f, report, c);
    }
    if (rc != KVQ_OK && rc != KVQ_E_DAMAGED)
        return kvq__catalog_complain(s, rc, c);
    if (rc == KVQ_E_DAMAGED) {
        add_sentence(report, "The catalog was damaged: %s.", s->catalog.error);
    } else {
        rc = check_segments(s, f, report, c);
        if (rc <= KVQ_OK)
            return rc ? rc : mark_missing(s, f, report, c);
        add_sentence(report, rc == BEHIND ? "The catalog was older than the segments."
                                          : "The catalog was not that of the segments.");
    }
    rc = set_catalog_aside(s, report, c);
    return rc ? rc : start_over(s, f, report, c);
}

static void summarize_recovery(struct kvq_store_report *r)
{
    if (r->rebuilt)
        add_sentence(
            r,
            "It was made anew from the segments: %llu blocks and %llu sessions are lost or "
            "damaged, %llu bytes made no sense.",
            (unsigned long long)r->bad_blocks, (unsigned long long)r->lost_sessions,
            (unsigned long long)r->damaged_bytes);
    else if (r->missing)
        add_sentence(r, "%u segments are missing or too short; %llu blocks are lost.", r->missing,
                     (unsigned long long)r->bad_blocks);
    if (r->aside)
        add_sentence(r, "%u segments made no sense and are kept as .bad; what was in them is lost.",
                     r->aside);
    if (r->foreign)
        add_sentence(r,
                     "%u files are segments of another store, or have the name of another segment; "
                     "they are kept as .bad, and do not count.",
                     r->foreign);
    if (r->tails || r->removed)
        add_sentence(r,
                     "%llu bytes at the end of %u segments, and %u whole segments, had not been "
                     "committed and were removed.",
                     (unsigned long long)r->tail_bytes, r->tails, r->removed);
}

int kvq__recover(struct kvq_store *s, struct kvq_store_report *report,
                 const struct kvq__complaint *c)
{
    struct files f;
    assert(s->lock_file >= 0 || s->read_only);
    int rc = list_files(s, &f, c);
    if (rc == KVQ_OK)
        rc =
            s->read_only ? recover_read_only(s, &f, report, c) : recover_writable(s, &f, report, c);
    if (rc == KVQ_OK) {
        if (!s->read_only)
            kvq__catalog_hold_some(s);
        s->sound = !s->read_only;
        s->found_transaction = s->last_transaction;
        summarize_recovery(report);
        rc = kvq__measure_other(s);
        rc = rc ? kvq__io_complain(c, rc, "the folder", "listed") : KVQ_OK;
    }
    free(f.numbers);
    return rc;
}
