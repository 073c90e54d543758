// SPDX-License-Identifier: Apache-2.0
//
// Looking up sessions, and reading their blocks. Beside a writer: what is asked of the catalog is
// asked in one query each, and blocks are read without it.
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/save.h"

// ---- Sessions ----

static void column_text(sqlite3_stmt *rows, int column, char *out, size_t n)
{
    const char *text = (const char *)sqlite3_column_text(rows, column);
    size_t used = text ? strnlen(text, n - 1) : 0;
    memset(out, 0, n);
    if (used)
        memcpy(out, text, used);
}

void kvq__session_row(sqlite3_stmt *rows, struct kvq_store_session *out, uint64_t *manifest)
{
    *out = (struct kvq_store_session){
        .id = (uint64_t)sqlite3_column_int64(rows, 0),
        .save = (uint64_t)sqlite3_column_int64(rows, 1),
        .shard = (uint32_t)sqlite3_column_int64(rows, 4),
        .shards = (uint32_t)sqlite3_column_int64(rows, 5),
        .tokens = (uint64_t)sqlite3_column_int64(rows, 8),
        .blocks = (uint64_t)sqlite3_column_int64(rows, 9),
        .bytes = (uint64_t)sqlite3_column_int64(rows, 10),
        .saved_at = sqlite3_column_int64(rows, 11),
        .used_at = sqlite3_column_int64(rows, 12),
        .version = (uint32_t)sqlite3_column_int64(rows, 13),
        .n_bytes = (uint32_t)sqlite3_column_int64(rows, 14),
    };
    column_text(rows, 2, out->space, sizeof out->space);
    column_text(rows, 3, out->name, sizeof out->name);
    column_text(rows, 6, out->model, sizeof out->model);
    column_text(rows, 7, out->formats, sizeof out->formats);
    if (manifest)
        *manifest = (uint64_t)sqlite3_column_int64(rows, 15);
}

// Rows of sessions into out, up to `room`.
static int session_rows(struct kvq__catalog *k, sqlite3_stmt *rows, struct kvq_store_session *out,
                        uint32_t room, uint32_t *count)
{
    *count = 0;
    int rc = kvq__next(k, rows);
    while (rc == 1 && *count < room) {
        kvq__session_row(rows, &out[(*count)++], NULL);
        rc = kvq__next(k, rows);
    }
    if (rc == 1)
        (void)sqlite3_reset(rows);
    return rc < 0 ? rc : KVQ_OK;
}

int kvq_store_find(struct kvq_store *store, const char *space, const char *name, uint32_t shard,
                   struct kvq_store_session *out, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    uint32_t count = 0;
    pthread_mutex_lock(&store->catalog_lock);
    int rc = session_rows(k, kvq__rows(k, KVQ_Q_SESSION_FIND, "tti", space, name, (int64_t)shard),
                          out, 1, &count);
    if (rc)
        rc = kvq__catalog_complain(store, rc, &c);
    else if (count == 0)
        rc = kvq__complain(&c, KVQ_E_NO_SESSION, "holds no shard %u of session %s of %s", shard,
                           name, space);
    pthread_mutex_unlock(&store->catalog_lock);
    return rc;
}

int kvq_store_list(struct kvq_store *store, const char *space, uint64_t after,
                   struct kvq_store_session *out, uint32_t room, uint32_t *count, char *text,
                   size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    pthread_mutex_lock(&store->catalog_lock);
    int rc = session_rows(
        k, kvq__rows(k, KVQ_Q_SESSION_LIST, "iti", (int64_t)after, space, (int64_t)room), out, room,
        count);
    if (rc)
        rc = kvq__catalog_complain(store, rc, &c);
    pthread_mutex_unlock(&store->catalog_lock);
    return rc;
}

// Whether the session still is as it was found. The caller holds catalog_lock.
static int check_current(struct kvq_store *s, const struct kvq_store_session *session,
                         const struct kvq__complaint *c)
{
    int64_t save;
    struct kvq__catalog *k = &s->catalog;
    int rc = kvq__number(k, kvq__rows(k, KVQ_Q_SESSION_SAVE, "i", (int64_t)session->id), -1, &save);
    if (rc)
        return kvq__catalog_complain(s, rc, c);
    if (save < 0)
        return kvq__complain(c, KVQ_E_NO_SESSION, "session %s of %s was deleted meanwhile",
                             session->name, session->space);
    if ((uint64_t)save != session->save)
        return kvq__complain(c, KVQ_E_STALE,
                             "session %s of %s was saved again meanwhile; find it "
                             "again",
                             session->name, session->space);
    return KVQ_OK;
}

int kvq_store_meta_read(struct kvq_store *store, const struct kvq_store_session *session, void *out,
                        char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    pthread_mutex_lock(&store->catalog_lock);
    int rc = check_current(store, session, &c);
    if (rc == KVQ_OK) {
        sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_SESSION_META, "i", (int64_t)session->id);
        rc = kvq__next(k, rows);
        if (rc == 1 && sqlite3_column_bytes(rows, 0) == (int)session->n_bytes) {
            if (session->n_bytes)
                memcpy(out, sqlite3_column_blob(rows, 0), session->n_bytes);
            rc = KVQ_OK;
        } else {
            if (rc >= 0)
                kvq__catalog_doubt(store);
            rc = rc < 0 ? kvq__catalog_complain(store, rc, &c)
                        : kvq__complain(&c, KVQ_E_DAMAGED, "the catalog contradicts itself");
        }
        (void)sqlite3_reset(rows);
    }
    pthread_mutex_unlock(&store->catalog_lock);
    return rc;
}

int kvq_store_touch(struct kvq_store *store, const struct kvq_store_use *uses, size_t count,
                    char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    int rc = count ? kvq__write_begin(store, &c) : KVQ_OK;
    if (rc || count == 0)
        return rc;
    pthread_mutex_lock(&store->catalog_lock);
    rc = kvq__run(k, KVQ_Q_BEGIN, "");
    for (size_t i = 0; i < count && rc == KVQ_OK; i++)
        rc = kvq__run(k, KVQ_Q_SESSION_TOUCH, "ii", uses[i].used_at, (int64_t)uses[i].session);
    if (rc == KVQ_OK)
        rc = kvq__run(k, KVQ_Q_COMMIT, "");
    if (rc)
        rc = kvq__catalog_complain(store, rc, &c);
    if (sqlite3_get_autocommit(k->db) == 0)
        (void)kvq__run(k, KVQ_Q_ROLLBACK, "");
    pthread_mutex_unlock(&store->catalog_lock);
    kvq__write_end(store);
    return rc;
}

// ---- Prefixes ----

static bool is_passed(const struct kvq_store_prefix *prefix, uint64_t session)
{
    bool is = false;
    for (uint32_t i = 0; i < prefix->n_passed; i++)
        is |= prefix->passed[i] == session;
    return is;
}

// The oldest session that has that page and counts, 0: none. What kvq_store_sweep is to delete does
// not: it would go while it is read.
static int prefix_of(struct kvq_store *s, const struct kvq_store_prefix *prefix, uint32_t page,
                     int64_t *session)
{
    struct kvq__catalog *k = &s->catalog;
    assert(page < prefix->pages);
    sqlite3_stmt *rows =
        kvq__rows(k, KVQ_Q_PREFIX_FIND, "tbtti", prefix->space, (const void *)prefix->hashes[page],
                  (size_t)KVQ_PREFIX_BYTES, KVQ_STORE_LEFT_FROM, KVQ_STORE_LEFT_BELOW,
                  (int64_t)s->found_transaction);
    int rc = kvq__next(k, rows);
    while (rc == 1 && is_passed(prefix, (uint64_t)sqlite3_column_int64(rows, 0)))
        rc = kvq__next(k, rows);
    *session = rc == 1 ? sqlite3_column_int64(rows, 0) : 0;
    if (rc == 1)
        (void)sqlite3_reset(rows);
    return rc < 0 ? rc : KVQ_OK;
}

int kvq_store_match(struct kvq_store *store, const struct kvq_store_prefix *prefix,
                    uint32_t *matched, struct kvq_store_session *out, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    // The first `low` are there, page `high` is not.
    uint32_t low = 0, high = prefix->pages, count = 0;
    int64_t best = 0, session = 0;
    int rc = KVQ_OK;
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&store->catalog_lock);
    while (low < high && rc == KVQ_OK) { // who has a page has all before it
        uint32_t middle = low + (high - low) / 2;
        rc = prefix_of(store, prefix, middle, &session);
        if (session) {
            best = session;
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    assert(low <= prefix->pages && (best != 0) == (low > 0));
    if (rc == KVQ_OK && best)
        rc = session_rows(k, kvq__rows(k, KVQ_Q_SESSION_ID, "i", best), out, 1, &count);
    *matched = count ? low : 0;
    if (rc)
        rc = kvq__catalog_complain(store, rc, &c);
    pthread_mutex_unlock(&store->catalog_lock);
    return rc;
}

int kvq_store_prefixes(struct kvq_store *store, const struct kvq_store_session *session,
                       uint8_t (**hashes)[KVQ_PREFIX_BYTES], uint32_t *pages, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    size_t room = 0;
    *hashes = NULL;
    *pages = 0;
    pthread_mutex_lock(&store->catalog_lock);
    int rc = check_current(store, session, &c);
    if (rc == KVQ_OK) {
        sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_PREFIX_ALL, "i", (int64_t)session->id);
        while ((rc = kvq__next(k, rows)) == 1) {
            if (sqlite3_column_bytes(rows, 0) != KVQ_PREFIX_BYTES)
                rc = KVQ_E_DAMAGED;
            else if (!kvq__grow((void **)hashes, &room, *pages, sizeof **hashes))
                rc = KVQ_E_NO_MEMORY;
            else
                memcpy((*hashes)[(*pages)++], sqlite3_column_blob(rows, 0), KVQ_PREFIX_BYTES);
            if (rc < 0)
                break;
        }
        (void)sqlite3_reset(rows);
        if (rc < 0)
            rc = kvq__catalog_complain(store, rc, &c);
    }
    pthread_mutex_unlock(&store->catalog_lock);
    if (rc) {
        free(*hashes);
        *hashes = NULL;
    }
    return rc;
}

// ---- Blocks ----

int kvq__block_find(struct kvq_store *s, uint64_t id, struct kvq_stored *out,
                    enum kvq_record_kind *kind)
{
    struct kvq__catalog *k = &s->catalog;
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_BLOCK_GET, "i", (int64_t)id);
    int rc = kvq__next(k, rows);
    if (rc != 1)
        return rc < 0 ? rc : KVQ_E_NO_SESSION;
    *out = (struct kvq_stored){
        .id = id,
        .segment = (uint64_t)sqlite3_column_int64(rows, 0),
        .offset = (uint64_t)sqlite3_column_int64(rows, 1),
        .bytes = (uint64_t)sqlite3_column_int64(rows, 2),
        .bad = sqlite3_column_int64(rows, 4) != 0,
        .checksum = kvq__column_checksum(rows, 5),
    };
    *kind = (enum kvq_record_kind)sqlite3_column_int64(rows, 3);
    (void)sqlite3_reset(rows);
    return KVQ_OK;
}

static struct kvq_stored stored_row(sqlite3_stmt *rows)
{
    return (struct kvq_stored){
        .place = {(uint32_t)sqlite3_column_int64(rows, 0), (uint32_t)sqlite3_column_int64(rows, 1),
                  (uint32_t)sqlite3_column_int64(rows, 2), (uint64_t)sqlite3_column_int64(rows, 4)},
        .id = (uint64_t)sqlite3_column_int64(rows, 3),
        .segment = (uint64_t)sqlite3_column_int64(rows, 5),
        .offset = (uint64_t)sqlite3_column_int64(rows, 6),
        .bytes = (uint64_t)sqlite3_column_int64(rows, 7),
        .bad = sqlite3_column_int64(rows, 8) != 0,
        .checksum = kvq__column_checksum(rows, 9),
    };
}

int kvq_store_blocks(struct kvq_store *store, const struct kvq_store_session *session,
                     struct kvq_stored **blocks, size_t *count, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    size_t room = 0;
    *blocks = NULL;
    *count = 0;
    pthread_mutex_lock(&store->catalog_lock);
    int rc = check_current(store, session, &c);
    if (rc == KVQ_OK) {
        sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_ENTRY_BLOCKS, "i", (int64_t)session->id);
        while ((rc = kvq__next(k, rows)) == 1) {
            if (!kvq__grow((void **)blocks, &room, *count, sizeof **blocks)) {
                rc = KVQ_E_NO_MEMORY;
                break;
            }
            (*blocks)[(*count)++] = stored_row(rows);
        }
        (void)sqlite3_reset(rows);
        if (rc < 0)
            rc = kvq__catalog_complain(store, rc, &c);
        else if (*count != session->blocks) {
            kvq__catalog_doubt(store);
            rc = kvq__complain(&c, KVQ_E_DAMAGED,
                               "the catalog has %zu blocks of %s and %llu of "
                               "them listed",
                               *count, session->name, (unsigned long long)session->blocks);
        }
    }
    pthread_mutex_unlock(&store->catalog_lock);
    if (rc) {
        free(*blocks);
        *blocks = NULL;
    }
    return rc;
}

int kvq_store_good_tokens(struct kvq_store *store, const struct kvq_store_session *session,
                          uint64_t *tokens, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    int64_t least = 0;
    pthread_mutex_lock(&store->catalog_lock);
    int rc = check_current(store, session, &c);
    if (rc == KVQ_OK) {
        rc = kvq__number(k, kvq__rows(k, KVQ_Q_ENTRY_BAD, "i", (int64_t)session->id), INT64_MAX,
                         &least);
        if (rc)
            rc = kvq__catalog_complain(store, rc, &c);
    }
    pthread_mutex_unlock(&store->catalog_lock);
    *tokens = (uint64_t)least < session->tokens ? (uint64_t)least : session->tokens;
    return rc;
}

// ---- Reading a block ----

void kvq__block_mark(struct kvq_store *s, uint64_t id, uint64_t segment, uint64_t offset)
{
    pthread_mutex_lock(&s->catalog_lock);
    // If it fails, the next reader finds the damage as this one did.
    int rc = kvq__run(&s->catalog, KVQ_Q_BLOCK_BAD, "iii", (int64_t)id, (int64_t)segment,
                      (int64_t)offset);
    pthread_mutex_unlock(&s->catalog_lock);
    if (rc == KVQ_E_DAMAGED)
        kvq__catalog_doubt(s);
}

// Tells the system what is likely to be read next, some way ahead and not for every block.
static void read_ahead(struct kvq_store *s, struct kvq__segment *segment, uint64_t end)
{
    uint64_t from = 0;
    pthread_mutex_lock(&s->lock);
    assert(segment->pins > 0);
    bool far = segment->ahead < end || segment->ahead > end + KVQ__READ_AHEAD;
    if (far || segment->ahead < end + KVQ__READ_AHEAD / 2) {
        from = far ? end : segment->ahead;
        segment->ahead = end + KVQ__READ_AHEAD;
    }
    pthread_mutex_unlock(&s->lock);
    assert(from <= end + KVQ__READ_AHEAD);
    if (from)
        s->io->will_read(s->io, segment->file, from, end + KVQ__READ_AHEAD - from);
}

static int complain_block(const struct kvq_stored *block, int code, const char *what,
                          const char *why, const struct kvq__complaint *c)
{
    return kvq__complain(c, code, "block %llu (segment %llu, byte %llu, %llu bytes) %s: %s",
                         (unsigned long long)block->id, (unsigned long long)block->segment,
                         (unsigned long long)block->offset, (unsigned long long)block->bytes, what,
                         why);
}

// Reads it where it is said to be. What the disk cannot read (EIO) may be there again when its
// cable is mended: it is marked as damaged only if `past_errors`.
static int read_there(struct kvq_store *s, const struct kvq_stored *block, void *out,
                      bool past_errors, const struct kvq__complaint *c)
{
    struct kvq__segment *segment;
    size_t got = 0;
    int rc = kvq__segment_pin(s, block->segment, &segment, c);
    if (rc)
        return rc;
    uint64_t at = block->offset + KVQ_RECORD_HEAD;
    read_ahead(s, segment, at + block->bytes);
    int error = kvq_io_read(s->io, segment->file, out, block->bytes, at, &got);
    kvq__segment_unpin(s, segment);
    if (error == -EIO && !past_errors)
        return complain_block(block, KVQ_E_SYSTEM, "cannot be read",
                              "the disk failed (Input/output error). If it does so again, "
                              "\"kvqctl storage verify\" marks what is lost, and the tokens "
                              "before that can be had",
                              c);
    if (error && error != -EIO)
        return kvq__io_complain(c, error, "a segment", "read");
    if (!error && got == block->bytes &&
        kvq_checksum_equal(kvq_checksum(out, block->bytes), block->checksum))
        return KVQ_OK;
    kvq__block_mark(s, block->id, block->segment, block->offset);
    return complain_block(block, KVQ_E_DAMAGED, "is damaged",
                          error                 ? "the disk cannot read it"
                          : got == block->bytes ? "its checksum is wrong"
                                                : "the file ends before",
                          c);
}

int kvq__block_read(struct kvq_store *store, const struct kvq_stored *block, void *out,
                    bool past_errors, const struct kvq__complaint *c)
{
    struct kvq_stored now = *block;
    enum kvq_record_kind kind;
    if (!block->bad) {
        int rc = read_there(store, block, out, past_errors, c);
        if (rc != KVQ_E_NO_SESSION)
            return rc;
    }
    pthread_mutex_lock(&store->catalog_lock); // it has moved, or is gone
    int rc = kvq__block_find(store, block->id, &now, &kind);
    pthread_mutex_unlock(&store->catalog_lock);
    if (rc == KVQ_E_NO_SESSION)
        return kvq__complain(c, rc, "block %llu was deleted", (unsigned long long)block->id);
    if (rc)
        return kvq__catalog_complain(store, rc, c);
    if (now.bad || now.bytes != block->bytes)
        return kvq__complain(c, KVQ_E_DAMAGED, "block %llu is damaged, as was found before",
                             (unsigned long long)block->id);
    return read_there(store, &now, out, past_errors, c);
}

int kvq_store_read(struct kvq_store *store, const struct kvq_stored *block, void *out, char *text,
                   size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    return kvq__block_read(store, block, out, false, &c);
}
