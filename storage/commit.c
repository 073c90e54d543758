// SPDX-License-Identifier: Apache-2.0
//
// One transaction of the catalog, made only when the records that it names are synced.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "proto/status.h"
#include "storage/store_internal.h"

// ---- Space ----

// Pages of the database as the transaction under way leaves it; 0 if SQLite does not say, and
// whoever asks next is told why. Holding the catalog's lock.
static uint64_t database_pages(struct kvq_store *s)
{
    struct kvq__catalog *k = &s->catalog;
    int64_t pages = 0;
    return kvq__number(k, kvq__rows(k, KVQ_Q_PAGES, ""), 0, &pages) ? 0 : (uint64_t)pages;
}

// Space for the database, and for a little more. Holding the catalog's lock.
static int hold_database(struct kvq_store *s, uint64_t pages)
{
    return pages == 0 ? 0
                      : kvq__vfs_hold(&s->catalog.vfs, KVQ__VFS_DATABASE,
                                      pages * KVQ_IO_PAGE + KVQ__CATALOG_SPARE);
}

static uint64_t wal_bytes(const struct kvq__largest *l, uint64_t pages)
{
    uint64_t hashes = l->hashes < pages ? l->hashes : pages;
    uint64_t bytes = KVQ__RESERVE + l->blocks * KVQ__RESERVE_BLOCK + hashes * KVQ__RESERVE_HASH;
    return (bytes + KVQ_IO_PAGE - 1) / KVQ_IO_PAGE * KVQ_IO_PAGE;
}

static int hold_catalog(struct kvq_store *s, const struct kvq__largest *largest)
{
    pthread_mutex_lock(&s->catalog_lock);
    uint64_t pages = database_pages(s);
    int rc = kvq__vfs_hold(&s->catalog.vfs, KVQ__VFS_WAL, wal_bytes(largest, pages));
    if (rc == 0)
        rc = hold_database(s, pages);
    pthread_mutex_unlock(&s->catalog_lock);
    return rc;
}

int kvq__catalog_hold(struct kvq_store *s, const struct kvq__largest *largest,
                      const struct kvq__complaint *c)
{
    assert(s->writing);
    uint64_t left, need = KVQ__RESERVE + s->writer.rows * KVQ__RESERVE_ROW;
    if (kvq_io_space(s->io, s->folder, &left) == 0 && left < need)
        kvq__writer_spare(s);
    int rc = hold_catalog(s, largest);
    if (kvq_io_is_full(rc)) { // a quota, of which the space above says nothing
        kvq__writer_spare(s);
        rc = hold_catalog(s, largest);
    }
    return rc ? kvq__io_complain(c, rc, "the catalog", "given the room that deleting will need")
              : KVQ_OK;
}

void kvq__catalog_hold_some(struct kvq_store *s)
{
    pthread_mutex_lock(&s->catalog_lock);
    uint64_t bytes = KVQ__RESERVE;
    while (bytes >= KVQ_IO_PAGE && kvq__vfs_hold(&s->catalog.vfs, KVQ__VFS_WAL, bytes))
        bytes /= 2;
    (void)hold_database(s, database_pages(s));
    pthread_mutex_unlock(&s->catalog_lock);
}

// ---- A transaction ----

int kvq__catalog_begin(struct kvq_store *s, const struct kvq__complaint *c)
{
    pthread_mutex_lock(&s->catalog_lock);
    assert(s->writing && sqlite3_get_autocommit(s->catalog.db));
    int rc = kvq__run(&s->catalog, KVQ_Q_BEGIN, "");
    if (rc == KVQ_OK)
        return KVQ_OK;
    rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    return rc;
}

static int add_live(struct kvq_store *s, uint64_t segment, int64_t bytes)
{
    return bytes == 0 || segment == 0
               ? KVQ_OK
               : kvq__run(&s->catalog, KVQ_Q_SEGMENT_LIVE, "ii", bytes, (int64_t)segment);
}

int kvq__catalog_blocks(struct kvq_store *s, const struct kvq__written *w, size_t n)
{
    int rc = KVQ_OK;
    int64_t live = 0; // of a run of blocks in the same segment
    assert(!sqlite3_get_autocommit(s->catalog.db));
    for (size_t i = 0; i < n && rc == KVQ_OK; i++) {
        assert(w[i].id > 0 && w[i].segment > 0);
        rc = kvq__run(&s->catalog, KVQ_Q_BLOCK_PUT, "iiiiiiib", (int64_t)w[i].id,
                      (int64_t)w[i].segment, (int64_t)w[i].offset, (int64_t)w[i].length,
                      (int64_t)w[i].kind, (int64_t)0, (int64_t)0, (const void *)&w[i].checksum,
                      sizeof w[i].checksum);
        live += (int64_t)kvq_record_bytes(w[i].length);
        if (rc == KVQ_OK && (i + 1 == n || w[i + 1].segment != w[i].segment)) {
            rc = add_live(s, w[i].segment, live);
            live = 0;
        }
    }
    return rc;
}

int kvq__catalog_own(struct kvq_store *s, const struct kvq__written *w)
{
    assert(w->kind == KVQ_RECORD_DROP || w->kind == KVQ_RECORD_COMMIT);
    int rc = kvq__catalog_blocks(s, w, 1);
    return rc ? rc : kvq__run(&s->catalog, KVQ_Q_BLOCK_REF, "ii", (int64_t)1, (int64_t)w->id);
}

int kvq__catalog_free_blocks(struct kvq_store *s)
{
    struct kvq__catalog *k = &s->catalog;
    assert(!sqlite3_get_autocommit(k->db));
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_BLOCK_FREE, "");
    int rc = kvq__next(k, rows);
    while (rc == 1) {
        int64_t bytes = (int64_t)kvq_record_bytes((uint64_t)sqlite3_column_int64(rows, 1));
        rc = add_live(s, (uint64_t)sqlite3_column_int64(rows, 0), -bytes);
        if (rc == KVQ_OK)
            rc = kvq__next(k, rows);
        else
            (void)sqlite3_reset(rows);
    }
    return rc < 0 ? rc : kvq__run(k, KVQ_Q_BLOCK_SWEEP, "");
}

int kvq__catalog_counters(struct kvq_store *s, uint64_t transaction)
{
    assert(s->next_block > 0 && s->next_session > 0 && s->next_segment > 0);
    return kvq__run(&s->catalog, KVQ_Q_STORE_PUT, "biiii", (const void *)s->id, sizeof s->id,
                    (int64_t)transaction, (int64_t)s->next_block, (int64_t)s->next_session,
                    (int64_t)s->next_segment);
}

int kvq__catalog_segments(struct kvq_store *s)
{
    const struct kvq__writer *w = &s->writer;
    int rc = KVQ_OK;
    assert(w->segment && w->used == 0); // its COMMIT is written
    // Only the writer adds and removes segments, and so may look at the table without the lock.
    // The others have not changed, but for those that a failure sealed, which are rare.
    for (size_t i = s->n_segments; i-- > 0 && rc == KVQ_OK;) {
        const struct kvq__segment *g = s->segments[i];
        uint64_t bytes = g == w->segment ? w->at : g->end ? g->end : g->bytes;
        bool changed = g == w->begun || g->number >= w->first_new || i + 2 >= s->n_segments;
        if (changed)
            rc = kvq__run(&s->catalog, KVQ_Q_SEGMENT_PUT, "iiii", (int64_t)g->number,
                          (int64_t)g->salt, (int64_t)bytes, (int64_t)g->sealed);
    }
    for (size_t i = 0; i < w->n_drops && rc == KVQ_OK; i++)
        rc = kvq__catalog_own(s, &w->drops[i]);
    if (rc == KVQ_OK && w->n_drops)
        rc = kvq__run(&s->catalog, KVQ_Q_OWED_CLEAR, "");
    if (rc == KVQ_OK && s->next_segment - w->first_new + (w->begun != NULL) > 1)
        rc = kvq__catalog_own(s, &w->commit); // other segments need it to count
    return rc ? rc : kvq__catalog_counters(s, s->next_transaction);
}

int kvq__catalog_end(struct kvq_store *s, int rc, const struct kvq__complaint *c)
{
    struct kvq__catalog *k = &s->catalog;
    assert(rc || !sqlite3_get_autocommit(k->db));
    // A checkpoint that finds no room for the database would leave no room in the WAL.
    int held = rc == KVQ_OK ? hold_database(s, database_pages(s)) : 0;
    if (kvq_io_is_full(held) && !s->writer.frees) {
        snprintf(k->error, sizeof k->error, "there is no room to make it longer: free some");
        rc = KVQ_E_NO_SPACE;
    }
    bool committing = rc == KVQ_OK;
    if (committing)
        rc = kvq__run(k, KVQ_Q_COMMIT, "");
    if (rc == KVQ_OK) {
        s->last_transaction = s->next_transaction++;
        kvq__writer_done(s);
        pthread_mutex_unlock(&s->catalog_lock);
        return KVQ_OK;
    }
    if (rc != KVQ_E_QUOTA) // that has said what is wrong, and nothing is unclear
        rc = kvq__catalog_complain(s, rc, c);
    // A full disk is found before the commit is written. After anything else the commit may be on
    // disk or not: only opening the store again tells, and nothing may be undone before that. Where
    // memory is lacking it may be for the index of the WAL, whose frames are on disk then.
    bool undone = rc == KVQ_E_NO_MEMORY && !committing;
    bool unclear = rc != KVQ_E_NO_SPACE && rc != KVQ_E_QUOTA && !undone;
    char why[sizeof k->error];
    snprintf(why, sizeof why, "%s", k->error);
    if (sqlite3_get_autocommit(k->db) == 0)
        (void)kvq__run(k, KVQ_Q_ROLLBACK, "");
    s->next_transaction++;
    if (unclear) {
        kvq__catalog_doubt(s);
        kvq__set_read_only(s, why);
    }
    pthread_mutex_unlock(&s->catalog_lock);
    return rc;
}
