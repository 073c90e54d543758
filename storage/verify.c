// SPDX-License-Identifier: Apache-2.0
//
// Reading all of a store to see whether it is as it was written, and its figures.
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/store_internal.h"

enum { BATCH = 64 }; // blocks of a damaged piece that are looked up at a time

struct verify {
    struct kvq_store *s;
    const struct kvq__complaint *c;
    struct kvq_store_verified *v;
    int (*progress)(void *context, uint64_t done, uint64_t all);
    void *context;
    uint64_t all;
    uint8_t *buffer;
    uint64_t segment;
    int failure; // of the catalog while a walk is under way
};

// The first record at or behind an offset that the catalog knows.
static uint64_t known_record(void *context, uint64_t from)
{
    struct verify *f = context;
    struct kvq__catalog *k = &f->s->catalog;
    int64_t at = -1;
    assert(f->segment > 0);
    pthread_mutex_lock(&f->s->catalog_lock);
    int rc = kvq__number(k, kvq__rows(k, KVQ_Q_BLOCK_AT, "ii", (int64_t)f->segment, (int64_t)from),
                         -1, &at);
    if (rc)
        f->failure = kvq__catalog_complain(f->s, rc, f->c);
    pthread_mutex_unlock(&f->s->catalog_lock);
    return at < 0 ? UINT64_MAX : (uint64_t)at;
}

// Blocks of the catalog from an offset of the segment on: KVQ_Q_BLOCK_IN or, of these the marked
// ones, KVQ_Q_BLOCK_BAD_IN.
static int blocks_from(struct verify *f, enum kvq__query which, uint64_t from,
                       struct kvq_stored blocks[BATCH], size_t *count)
{
    struct kvq__catalog *k = &f->s->catalog;
    assert(which == KVQ_Q_BLOCK_IN || which == KVQ_Q_BLOCK_BAD_IN);
    *count = 0;
    pthread_mutex_lock(&f->s->catalog_lock);
    sqlite3_stmt *rows =
        kvq__rows(k, which, "iii", (int64_t)f->segment, (int64_t)from, (int64_t)BATCH);
    int rc;
    while ((rc = kvq__next(k, rows)) == 1 && *count < BATCH)
        blocks[(*count)++] = (struct kvq_stored){
            .id = (uint64_t)sqlite3_column_int64(rows, 0),
            .segment = f->segment,
            .offset = (uint64_t)sqlite3_column_int64(rows, 1),
            .bytes = (uint64_t)sqlite3_column_int64(rows, 2),
            .bad = sqlite3_column_int64(rows, 4) != 0,
            .checksum = kvq__column_checksum(rows, 5),
        };
    (void)sqlite3_reset(rows);
    if (rc < 0)
        rc = kvq__catalog_complain(f->s, rc, f->c);
    pthread_mutex_unlock(&f->s->catalog_lock);
    return rc < 0 ? rc : KVQ_OK;
}

// Reads a block, whether it is marked or not; where it is damaged it is marked by that.
static int read_block(struct verify *f, struct kvq_stored block)
{
    void *bytes = malloc(block.bytes + 1);
    if (!bytes)
        return kvq__complain(f->c, KVQ_E_NO_MEMORY, "no memory for a block of %llu bytes",
                             (unsigned long long)block.bytes);
    block.bad = false;
    int rc = kvq__block_read(f->s, &block, bytes, true, f->c);
    free(bytes);
    return rc;
}

// Whether a block can still be read although its record is damaged.
static int try_block(struct verify *f, const struct kvq_stored *block)
{
    int rc = block->bad ? KVQ_OK : read_block(f, *block);
    f->v->bad_blocks += rc == KVQ_E_DAMAGED;
    return rc == KVQ_E_DAMAGED || rc == KVQ_E_NO_SESSION ? KVQ_OK : rc;
}

// Whether a block that is marked is as it was written after all.
static int try_again(struct verify *f, const struct kvq_stored *block)
{
    int rc = read_block(f, *block);
    if (rc != KVQ_OK)
        return rc == KVQ_E_DAMAGED || rc == KVQ_E_NO_SESSION ? KVQ_OK : rc;
    pthread_mutex_lock(&f->s->catalog_lock);
    rc = kvq__run(&f->s->catalog, KVQ_Q_BLOCK_GOOD, "iii", (int64_t)block->id,
                  (int64_t)block->segment, (int64_t)block->offset);
    if (rc)
        rc = kvq__catalog_complain(f->s, rc, f->c);
    pthread_mutex_unlock(&f->s->catalog_lock);
    f->v->good_again += rc == KVQ_OK;
    return rc;
}

// The marks of the segment, before a look at what it holds now.
static int look_at_marks(struct verify *f)
{
    struct kvq_stored blocks[BATCH];
    size_t count = BATCH;
    uint64_t at = 0;
    int rc = KVQ_OK;
    while (rc == KVQ_OK && count == BATCH) {
        rc = blocks_from(f, KVQ_Q_BLOCK_BAD_IN, at, blocks, &count);
        for (size_t i = 0; i < count && rc == KVQ_OK; i++)
            rc = try_again(f, &blocks[i]);
        assert(count == 0 || blocks[count - 1].offset >= at); // it comes to an end
        if (count)
            at = blocks[count - 1].offset + 1;
    }
    return rc;
}

// A piece of the segment is not as it was written: which blocks does that concern?
static int look_at_damage(struct verify *f, uint64_t at, uint64_t end)
{
    struct kvq_stored blocks[BATCH];
    size_t count = BATCH;
    int rc = KVQ_OK;
    while (rc == KVQ_OK && count == BATCH && at < end) {
        rc = blocks_from(f, KVQ_Q_BLOCK_IN, at, blocks, &count);
        for (size_t i = 0; i < count && rc == KVQ_OK && blocks[i].offset < end; i++)
            rc = try_block(f, &blocks[i]);
        assert(count == 0 || blocks[count - 1].offset >= at);
        if (count)
            at = blocks[count - 1].offset + 1;
    }
    return rc;
}

static int tell_progress(struct verify *f)
{
    if (f->progress && f->progress(f->context, f->v->bytes, f->all))
        return kvq__complain(f->c, KVQ_E_CANCELLED, "verifying was stopped");
    return KVQ_OK;
}

// Whether the front is as it was written; if not the damage is the front alone, for the catalog has
// the salt.
static int check_front(struct verify *f, const struct kvq__segment *g)
{
    struct kvq_file_head head;
    uint16_t version;
    int rc = kvq_segment_front(f->s->io, g->file, &head, &version);
    if (rc < 0 && rc != -EIO)
        return kvq__io_complain(f->c, rc, "a segment", "read");
    if (rc || head.number != g->number || head.salt != g->salt)
        f->v->damaged_bytes += KVQ_SEGMENT_FRONT;
    f->v->bytes += KVQ_SEGMENT_FRONT;
    return KVQ_OK;
}

static int walk_committed(struct verify *f, const struct kvq__segment *g, uint64_t end)
{
    struct kvq_walk w = {.io = f->s->io,
                         .file = g->file,
                         .salt = g->salt,
                         .next = KVQ_SEGMENT_FRONT,
                         .end = end,
                         .known = known_record,
                         .context = f,
                         .past_errors = true,
                         .buffer = f->buffer,
                         .buffer_bytes = KVQ__WALK_BYTES};
    int find, rc = check_front(f, g);
    while (rc == KVQ_OK && (find = kvq_walk_next(&w)) != KVQ_WALK_END) {
        if (find < 0)
            return kvq__io_complain(f->c, find, "a segment", "read");
        f->v->bytes += w.bytes;
        if (find != KVQ_WALK_RECORD) {
            f->v->damaged_bytes += w.bytes;
            rc = f->failure ? f->failure : look_at_damage(f, w.at, w.at + w.bytes);
        }
        if (rc == KVQ_OK)
            rc = tell_progress(f);
    }
    return rc;
}

// A segment that cannot be opened. If its file is gone, so are its blocks; whatever else it is (too
// few descriptors, say) may pass.
static int lose_segment(struct verify *f, int rc)
{
    struct kvq_store *s = f->s;
    if (!kvq__segment_missing(s, f->segment))
        return rc;
    f->v->missing++;
    pthread_mutex_lock(&s->catalog_lock);
    rc = kvq__run(&s->catalog, KVQ_Q_BLOCK_CUT, "ii", (int64_t)f->segment, (int64_t)0);
    if (rc)
        rc = kvq__catalog_complain(s, rc, f->c);
    else
        f->v->bad_blocks += (uint64_t)sqlite3_changes64(s->catalog.db);
    pthread_mutex_unlock(&s->catalog_lock);
    return rc;
}

static int verify_segment(struct verify *f)
{
    struct kvq_store *s = f->s;
    struct kvq__segment *g;
    struct kvq_io_status status = {0};
    int rc = kvq__segment_pin(s, f->segment, &g, f->c);
    if (rc == KVQ_E_NO_SESSION) // compaction has removed it meanwhile
        return KVQ_OK;
    if (rc)
        return lose_segment(f, rc);
    pthread_mutex_lock(&s->lock);
    uint64_t end = g->bytes;
    pthread_mutex_unlock(&s->lock);
    int error = kvq_io_status(s->io, g->file, &status);
    f->v->segments++;
    if (error) {
        rc = kvq__io_complain(f->c, error, "a segment", "looked at");
    } else if (end > 0) { // else nothing is committed in it yet
        f->v->missing += status.bytes < end;
        rc = look_at_marks(f);
        rc = rc ? rc : walk_committed(f, g, end);
    }
    kvq__segment_unpin(s, g);
    return rc;
}

static uint64_t all_bytes(struct kvq_store *s)
{
    uint64_t sum = 0;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n_segments; i++)
        sum += s->segments[i]->bytes;
    pthread_mutex_unlock(&s->lock);
    return sum;
}

// How many sessions bad blocks cut.
static int count_cut(struct verify *f)
{
    struct kvq__catalog *k = &f->s->catalog;
    int64_t cut = 0;
    int rc = kvq__number(k, kvq__rows(k, KVQ_Q_SESSION_CUT, ""), 0, &cut);
    f->v->sessions = (uint64_t)cut;
    return rc;
}

// The catalog itself, and what it says of bad blocks. Others have the catalog between two rules.
static int verify_catalog(struct verify *f)
{
    struct kvq_store *s = f->s;
    const size_t rules = kvq__catalog_rules();
    int rc = KVQ_OK;
    for (size_t i = 0; i <= rules + 1 && rc == KVQ_OK; i++) {
        pthread_mutex_lock(&s->catalog_lock);
        rc = i == 0       ? kvq__catalog_check(&s->catalog)
             : i <= rules ? kvq__catalog_keeps(&s->catalog, i - 1)
                          : count_cut(f);
        if (rc)
            rc = kvq__catalog_complain(s, rc, f->c);
        pthread_mutex_unlock(&s->catalog_lock);
    }
    f->v->catalog_bad = rc == KVQ_E_DAMAGED;
    return f->v->catalog_bad ? KVQ_OK : rc;
}

static void summarize_damage(struct kvq_store_verified *v)
{
    int n = 0;
    if (v->good_again)
        n = snprintf(v->text, sizeof v->text,
                     "%llu blocks that were marked as damaged are as they were written again; "
                     "their marks are taken off. ",
                     (unsigned long long)v->good_again);
    if (v->damaged_bytes == 0 && v->missing == 0 && v->sessions == 0 && !v->catalog_bad)
        return;
    snprintf(v->text + n, sizeof v->text - (size_t)n,
             "%llu bytes are not as they were written, %u segments are missing or too short; %llu "
             "blocks were newly found bad, and %llu sessions are cut.%s",
             (unsigned long long)v->damaged_bytes, v->missing, (unsigned long long)v->bad_blocks,
             (unsigned long long)v->sessions,
             v->catalog_bad ? " The catalog is damaged; opening the store anew makes it anew."
                            : "");
}

int kvq_store_verify(struct kvq_store *store,
                     int (*progress)(void *context, uint64_t done, uint64_t all), void *context,
                     struct kvq_store_verified *verified, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct verify f = {.s = store,
                       .c = &c,
                       .v = verified,
                       .progress = progress,
                       .context = context,
                       .all = all_bytes(store),
                       .buffer = malloc(KVQ__WALK_BYTES)};
    memset(verified, 0, sizeof *verified);
    int rc = f.buffer ? KVQ_OK : kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory");
    for (f.segment = kvq__segment_after(store, 0); f.segment && rc == KVQ_OK;
         f.segment = kvq__segment_after(store, f.segment))
        rc = verify_segment(&f);
    if (rc == KVQ_OK)
        rc = verify_catalog(&f);
    if (rc == KVQ_OK)
        summarize_damage(verified);
    free(f.buffer);
    return rc;
}

// ---- Status ----

static int count_sessions(struct kvq_store *s, struct kvq_store_status *status)
{
    struct kvq__catalog *k = &s->catalog;
    int64_t sessions = 0;
    int rc = kvq__number(k, kvq__rows(k, KVQ_Q_SESSION_COUNT, ""), 0, &sessions);
    status->sessions = (uint64_t)sessions;
    return rc;
}

static int catalog_figures(struct kvq_store *s, struct kvq_store_status *status)
{
    struct kvq__catalog *k = &s->catalog;
    int rc = count_sessions(s, status);
    sqlite3_stmt *rows = rc ? NULL : kvq__rows(k, KVQ_Q_BLOCK_COUNT, "");
    rc = rc ? rc : kvq__next(k, rows);
    if (rc == 1) {
        status->blocks = (uint64_t)sqlite3_column_int64(rows, 0);
        status->bad_blocks = (uint64_t)sqlite3_column_int64(rows, 1);
        (void)sqlite3_reset(rows);
    }
    rows = rc < 0 ? NULL : kvq__rows(k, KVQ_Q_SEGMENT_SUMS, "");
    rc = rc < 0 ? rc : kvq__next(k, rows);
    if (rc == 1) {
        status->segments = (uint32_t)sqlite3_column_int64(rows, 0);
        status->live_bytes = (uint64_t)sqlite3_column_int64(rows, 2);
        status->dead_bytes = (uint64_t)sqlite3_column_int64(rows, 1) - status->live_bytes;
        (void)sqlite3_reset(rows);
    }
    return rc < 0 ? rc : kvq__empty_bytes(s, &status->empty_bytes);
}

static int fill_status(struct kvq_store *store,
                       int (*count)(struct kvq_store *, struct kvq_store_status *),
                       struct kvq_store_status *status, const struct kvq__complaint *c)
{
    memset(status, 0, sizeof *status);
    pthread_mutex_lock(&store->catalog_lock);
    int rc = count(store, status);
    if (rc)
        rc = kvq__catalog_complain(store, rc, c);
    pthread_mutex_unlock(&store->catalog_lock);
    if (rc)
        return rc;
    pthread_mutex_lock(&store->lock);
    status->read_only = store->read_only;
    memcpy(status->why, store->why, sizeof status->why);
    pthread_mutex_unlock(&store->lock);
    (void)kvq__measure_other(store); // else it is as it was
    status->cap_bytes = store->cap_bytes;
    status->catalog_bytes = kvq__physical_catalog(store);
    status->physical_bytes = kvq__physical(store);
    rc = kvq_io_space(store->io, store->folder, &status->free_bytes);
    if (rc)
        return kvq__io_complain(c, rc, "free space", "asked for");
    pthread_mutex_lock(&store->catalog_lock); // what the catalog holds changes under it
    status->room_bytes =
        status->read_only ? 0 : kvq__room(store, status->physical_bytes, status->free_bytes);
    pthread_mutex_unlock(&store->catalog_lock);
    return KVQ_OK;
}

int kvq_store_status(struct kvq_store *store, struct kvq_store_status *status, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    return fill_status(store, catalog_figures, status, &c);
}

int kvq_store_brief(struct kvq_store *store, struct kvq_store_status *status, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    return fill_status(store, count_sessions, status, &c);
}
