// SPDX-License-Identifier: Apache-2.0
//
// Deleting sessions, and getting back the space of what nothing refers to.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/save.h"

enum {
    MOVES = 256,         // records that one call moves at most
    SWEEP_BLOCKS = 4096, // of the sessions that one transaction deletes, while others wait
};

// What has to be dead in a segment for it to be worth copying the rest: more than the copy adds,
// the front of a segment, a COMMIT and what fills its page, or compaction would never end; and an
// eighth of a full segment, or of what the disk has left if that is less.
static int64_t worthwhile(const struct kvq_store *s)
{
    uint64_t left, part = s->segment_bytes;
    if (kvq_io_space(s->io, s->folder, &left) == 0 && left < part)
        part = left;
    return (int64_t)(part / 8 + 4 * KVQ_IO_PAGE);
}

// ---- Deleting ----

struct shard {
    uint64_t session, manifest, blocks;
    struct kvq__written drop; // its DROP record
};

static int find_shards(struct kvq_store *s, const char *space, const char *name,
                       struct shard shards[KVQ_MAX_SHARDS], size_t *count,
                       const struct kvq__complaint *c)
{
    struct kvq__catalog *k = &s->catalog;
    *count = 0;
    pthread_mutex_lock(&s->catalog_lock);
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_SESSION_SHARDS, "tt", space, name);
    int rc = kvq__next(k, rows);
    while (rc == 1 && *count < KVQ_MAX_SHARDS) {
        struct kvq_store_session session;
        struct shard *d = &shards[(*count)++];
        kvq__session_row(rows, &session, &d->manifest);
        d->session = session.id;
        d->blocks = session.blocks;
        rc = kvq__next(k, rows);
    }
    if (rc == 1)
        (void)sqlite3_reset(rows);
    if (rc < 0)
        rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    if (rc == KVQ_OK && *count == 0)
        return kvq__complain(c, KVQ_E_NO_SESSION, "holds no session %s of %s", name, space);
    return rc < 0 ? rc : KVQ_OK;
}

static int write_drops(struct kvq_store *s, struct shard *shards, size_t n,
                       const struct kvq__complaint *c)
{
    int rc = KVQ_OK;
    assert(n > 0);
    for (size_t i = 0; i < n && rc == KVQ_OK; i++)
        rc = kvq__append(s, KVQ_RECORD_DROP, s->next_block++, &shards[i].session,
                         sizeof shards[i].session, &shards[i].drop, c);
    return rc ? rc : kvq__writer_sync(s, n, c);
}

static int catalog_drops(struct kvq_store *s, const struct shard *shards, size_t n, bool written,
                         const struct kvq__complaint *c)
{
    int rc = kvq__catalog_begin(s, c);
    if (rc)
        return rc;
    if (written)
        rc = kvq__catalog_segments(s);
    for (size_t i = 0; i < n && rc == KVQ_OK; i++) {
        if (written)
            rc = kvq__catalog_own(s, &shards[i].drop);
        if (rc == KVQ_OK)
            rc = kvq__apply_drop(s, shards[i].session, shards[i].manifest);
        if (rc == KVQ_OK && !written)
            rc = kvq__run(&s->catalog, KVQ_Q_OWED_PUT, "i", (int64_t)shards[i].session);
    }
    if (rc == KVQ_OK)
        rc = kvq__catalog_free_blocks(s);
    if (rc == KVQ_OK && !written)
        rc = kvq__catalog_counters(s, s->next_transaction);
    return kvq__catalog_end(s, rc, c);
}

static int delete_shards(struct kvq_store *s, struct shard *shards, size_t n,
                         const struct kvq__complaint *c)
{
    uint64_t rows = 0;
    for (size_t i = 0; i < n; i++)
        rows += 2 * shards[i].blocks;
    int rc = kvq__writer_begin(s, true, rows, c);
    if (rc)
        return rc;
    rc = write_drops(s, shards, n, c);
    bool written = rc == KVQ_OK;
    if (rc == KVQ_E_NO_SPACE) {
        // Who deletes wants space. Until the record is written, with the next transaction that has
        // any, a catalog that is made anew from the segments would have the session again; that is
        // the lesser evil.
        kvq__writer_undo(s);
        rc = kvq__writer_begin(s, true, rows, c);
    }
    if (rc == KVQ_OK)
        rc = catalog_drops(s, shards, n, written, c);
    for (size_t i = 0; i < n && rc == KVQ_OK && !written; i++)
        if (kvq__grow((void **)&s->owed, &s->room_owed, s->n_owed, sizeof *s->owed))
            s->owed[s->n_owed++] = shards[i].session; // else the next open has it
    if (rc)
        kvq__writer_undo(s);
    return rc;
}

int kvq_store_delete(struct kvq_store *store, const char *space, const char *name, char *text,
                     size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    size_t count = 0;
    int rc = kvq__write_begin(store, &c);
    if (rc)
        return rc;
    struct shard *shards = calloc(KVQ_MAX_SHARDS, sizeof *shards);
    rc = shards ? find_shards(store, space, name, shards, &count, &c)
                : kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory");
    if (rc == KVQ_OK)
        rc = delete_shards(store, shards, count, &c);
    free(shards);
    kvq__write_end(store);
    return rc;
}

// Up to *count of them into shards, which has room for so many, and no more blocks than fit well
// into one transaction.
static int find_left(struct kvq_store *s, const char *space, struct shard *shards, size_t *count,
                     const struct kvq__complaint *c)
{
    struct kvq__catalog *k = &s->catalog;
    uint64_t blocks = 0;
    size_t n = 0;
    pthread_mutex_lock(&s->catalog_lock);
    sqlite3_stmt *rows =
        kvq__rows(k, KVQ_Q_SESSION_LEFT, "ttiti", KVQ_STORE_LEFT_FROM, KVQ_STORE_LEFT_BELOW,
                  (int64_t)s->found_transaction, space, (int64_t)*count);
    int rc = kvq__next(k, rows);
    while (rc == 1) {
        uint64_t more = (uint64_t)sqlite3_column_int64(rows, 2);
        if (n && blocks + more > SWEEP_BLOCKS)
            break;
        assert(n < *count);
        blocks += more;
        shards[n++] = (struct shard){.session = (uint64_t)sqlite3_column_int64(rows, 0),
                                     .manifest = (uint64_t)sqlite3_column_int64(rows, 1),
                                     .blocks = more};
        rc = kvq__next(k, rows);
    }
    if (rc == 1)
        (void)sqlite3_reset(rows);
    if (rc < 0)
        rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    *count = n;
    return rc < 0 ? rc : KVQ_OK;
}

int kvq_store_sweep(struct kvq_store *store, const char *space, uint32_t most, uint32_t *deleted,
                    char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    size_t count = most;
    *deleted = 0;
    assert(most > 0);
    int rc = kvq__write_begin(store, &c);
    if (rc)
        return rc;
    struct shard *shards = calloc(most, sizeof *shards);
    rc = shards ? find_left(store, space, shards, &count, &c)
                : kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory");
    if (rc == KVQ_OK && count > 0)
        rc = delete_shards(store, shards, count, &c);
    if (rc == KVQ_E_NO_SPACE && count > 1) { // there is always room to delete one
        count = 1;
        rc = delete_shards(store, shards, count, &c);
    }
    if (rc == KVQ_OK)
        *deleted = (uint32_t)count;
    free(shards);
    kvq__write_end(store);
    return rc;
}

// ---- Empty segments ----

// The segment that is written to is left alone, unless so much of it is dead that it ends here.
static int retire_dead(struct kvq_store *s, uint32_t dead_percent, const struct kvq__complaint *c)
{
    int64_t found = 0;
    uint64_t last = s->n_segments ? s->segments[s->n_segments - 1]->number : 0;
    pthread_mutex_lock(&s->catalog_lock);
    int rc = kvq__number(&s->catalog,
                         kvq__rows(&s->catalog, KVQ_Q_SEGMENT_DEAD, "iii", (int64_t)last,
                                   (int64_t)dead_percent, worthwhile(s)),
                         0, &found);
    if (rc)
        rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    if (rc == KVQ_OK && found)
        kvq__writer_retire(s);
    return rc;
}

static int64_t number_of_open_segment(const struct kvq_store *s)
{
    return s->writer.segment ? (int64_t)s->writer.segment->number : 0;
}

// Whether there is an empty one: a transaction is more than is needed to find out.
static int has_empty(struct kvq_store *s, bool *found, const struct kvq__complaint *c)
{
    struct kvq__catalog *k = &s->catalog;
    int64_t number = 0;
    pthread_mutex_lock(&s->catalog_lock);
    int rc = kvq__number(k, kvq__rows(k, KVQ_Q_SEGMENT_EMPTY, "i", number_of_open_segment(s)), 0,
                         &number);
    if (rc)
        rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    *found = number != 0;
    return rc;
}

// Has the catalog forget segments in which nothing is alive, but for the one that is written to.
// *numbers, to be freed, says which.
static int drop_empty(struct kvq_store *s, uint64_t **numbers, size_t *count,
                      const struct kvq__complaint *c)
{
    struct kvq__catalog *k = &s->catalog;
    size_t room = 0;
    assert(!*numbers && *count == 0);
    int rc = kvq__catalog_begin(s, c);
    if (rc)
        return rc;
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_SEGMENT_EMPTY, "i", number_of_open_segment(s));
    while ((rc = kvq__next(k, rows)) == 1) {
        if (!kvq__grow((void **)numbers, &room, *count, sizeof **numbers)) {
            (void)sqlite3_reset(rows);
            rc = KVQ_E_NO_MEMORY;
            break;
        }
        (*numbers)[(*count)++] = (uint64_t)sqlite3_column_int64(rows, 0);
    }
    for (size_t i = 0; i < *count && rc == KVQ_OK; i++)
        rc = kvq__run(k, KVQ_Q_SEGMENT_DROP, "i", (int64_t)(*numbers)[i]);
    if (rc == KVQ_OK)
        rc = kvq__catalog_counters(s, s->next_transaction);
    return kvq__catalog_end(s, rc, c);
}

// The files go after the catalog has forgotten them: a crash in between leaves files that the next
// open removes.
static int remove_empty(struct kvq_store *s, struct kvq_store_freed *freed,
                        const struct kvq__complaint *c)
{
    uint64_t *numbers = NULL, before = kvq__physical(s);
    size_t count = 0;
    bool found = false;
    int rc = kvq__writer_begin(s, true, 0, c);
    if (rc == KVQ_OK)
        rc = has_empty(s, &found, c);
    if (rc == KVQ_OK && found)
        rc = drop_empty(s, &numbers, &count, c);
    for (size_t i = 0; i < count && rc == KVQ_OK; i++)
        kvq__segment_remove(s, numbers[i]);
    free(numbers);
    if (rc)
        return rc;
    uint64_t after = kvq__physical(s);
    freed->segments += (uint32_t)count;
    freed->bytes += after < before ? before - after : 0;
    return KVQ_OK;
}

int kvq_store_gc(struct kvq_store *store, struct kvq_store_freed *freed, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    memset(freed, 0, sizeof *freed);
    int rc = kvq__write_begin(store, &c);
    if (rc)
        return rc;
    rc = retire_dead(store, 100, &c);
    if (rc == KVQ_OK)
        rc = remove_empty(store, freed, &c);
    kvq__write_end(store);
    return rc;
}

// Whoever asks may not be the writer: the last segment counts as open unless it is sealed.
int kvq__empty_bytes(struct kvq_store *s, uint64_t *bytes)
{
    struct kvq__catalog *k = &s->catalog;
    int64_t open = 0, dead = 0;
    *bytes = 0;
    pthread_mutex_lock(&s->lock);
    const struct kvq__segment *last = s->n_segments ? s->segments[s->n_segments - 1] : NULL;
    if (last && !last->sealed)
        open = (int64_t)last->number;
    pthread_mutex_unlock(&s->lock);
    int rc =
        open ? kvq__number(
                   k, kvq__rows(k, KVQ_Q_SEGMENT_DEAD, "iii", open, (int64_t)100, worthwhile(s)), 0,
                   &dead)
             : KVQ_OK;
    sqlite3_stmt *rows = rc ? NULL : kvq__rows(k, KVQ_Q_SEGMENT_EMPTY, "i", dead ? 0 : open);
    rc = rc ? rc : kvq__next(k, rows);
    while (rc == 1) {
        *bytes += kvq__segment_physical(s, (uint64_t)sqlite3_column_int64(rows, 0));
        rc = kvq__next(k, rows);
    }
    return rc;
}

// ---- Compaction ----

struct move {
    struct kvq_stored from;
    enum kvq_record_kind kind;
    struct kvq__written to; // segment 0: it is lost, or not needed any more
    bool needless;
};

// The segment with most that is dead, 0: none with enough. Those that are sick come last: one that
// the disk cannot read is not to keep the others from being compacted.
static int worst_segment(struct kvq_store *s, uint32_t dead_percent, uint64_t *number,
                         const struct kvq__complaint *c)
{
    struct kvq__catalog *k = &s->catalog;
    uint64_t found = 0, sick = 0;
    pthread_mutex_lock(&s->catalog_lock);
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_SEGMENT_WORST, "iii", number_of_open_segment(s),
                                   (int64_t)dead_percent, worthwhile(s));
    int rc = kvq__next(k, rows);
    while (rc == 1 && !found) {
        uint64_t next = (uint64_t)sqlite3_column_int64(rows, 0);
        if (!kvq__segment_sick(s, next, false))
            found = next;
        else
            sick = sick ? sick : next;
        rc = found ? rc : kvq__next(k, rows);
    }
    if (rc == 1)
        (void)sqlite3_reset(rows);
    rc = rc < 0 ? kvq__catalog_complain(s, rc, c) : KVQ_OK;
    pthread_mutex_unlock(&s->catalog_lock);
    *number = found ? found : sick;
    return rc;
}

// The first records that are alive in a segment, up to the budget.
static int choose_moves(struct kvq_store *s, uint64_t segment, uint64_t budget, struct move *moves,
                        size_t *count, const struct kvq__complaint *c)
{
    struct kvq__catalog *k = &s->catalog;
    uint64_t bytes = 0;
    *count = 0;
    pthread_mutex_lock(&s->catalog_lock);
    sqlite3_stmt *rows =
        kvq__rows(k, KVQ_Q_BLOCK_IN, "iii", (int64_t)segment, (int64_t)0, (int64_t)MOVES);
    int rc = kvq__next(k, rows);
    while (rc == 1 && *count < MOVES && (*count == 0 || bytes < budget)) {
        struct move *m = &moves[(*count)++];
        *m = (struct move){
            .from = {.id = (uint64_t)sqlite3_column_int64(rows, 0),
                     .segment = segment,
                     .offset = (uint64_t)sqlite3_column_int64(rows, 1),
                     .bytes = (uint64_t)sqlite3_column_int64(rows, 2),
                     .bad = sqlite3_column_int64(rows, 4) != 0,
                     .checksum = kvq__column_checksum(rows, 5)},
            .kind = (enum kvq_record_kind)sqlite3_column_int64(rows, 3),
        };
        bytes += kvq_record_bytes(m->from.bytes);
        rc = kvq__next(k, rows);
    }
    if (rc == 1)
        (void)sqlite3_reset(rows);
    if (rc < 0)
        rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    return rc < 0 ? rc : KVQ_OK;
}

// Reads a record that is to move, also one that is marked: if it is not copied now it is gone for
// good, and it may be as it was written again, though nobody has looked since (or verify has, after
// the moves were chosen). Of a marked one, what the disk cannot read is lost, and so is a file that
// is not there; other failures say nothing about it.
static int read_record(struct kvq_store *s, struct move *m, void *bytes,
                       const struct kvq__complaint *c)
{
    struct kvq_stored from = m->from;
    bool marked = from.bad;
    assert(from.segment > 0);
    from.bad = false;
    int rc = kvq__block_read(s, &from, bytes, marked, c);
    if (rc == KVQ_E_SYSTEM && marked && kvq__segment_missing(s, from.segment))
        rc = KVQ_E_DAMAGED;
    m->from.bad = rc == KVQ_E_DAMAGED;
    return rc;
}

static int copy_record(struct kvq_store *s, struct move *m, struct kvq_store_freed *freed,
                       const struct kvq__complaint *c)
{
    bool own = m->kind == KVQ_RECORD_DROP || m->kind == KVQ_RECORD_COMMIT;
    assert(m->to.segment == 0);
    m->needless = own && kvq__segment_after(s, 0) == m->from.segment;
    if (m->needless)
        return KVQ_OK;
    void *bytes = malloc(m->from.bytes + 1);
    if (!bytes)
        return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory for a block of %llu bytes",
                             (unsigned long long)m->from.bytes);
    int rc = read_record(s, m, bytes, c);
    if (rc == KVQ_E_SYSTEM)
        (void)kvq__segment_sick(s, m->from.segment, true);
    else if (rc == KVQ_OK)
        rc = kvq__append(s, m->kind, m->from.id, bytes, m->from.bytes, &m->to, c);
    assert(m->to.segment == 0 || m->to.segment != m->from.segment); // that one is to go
    if (rc == KVQ_OK)
        freed->moved += kvq_record_bytes(m->from.bytes);
    free(bytes);
    return rc == KVQ_E_DAMAGED ? KVQ_OK : rc;
}

// What is known of a block that is damaged stays, so that its sessions are cut and not whole.
static int catalog_move(struct kvq_store *s, const struct move *m)
{
    struct kvq__catalog *k = &s->catalog;
    assert(m->to.segment || m->needless || m->from.bad);
    int64_t bytes = (int64_t)kvq_record_bytes(m->from.bytes), id = (int64_t)m->from.id;
    int rc = kvq__run(k, KVQ_Q_SEGMENT_LIVE, "ii", (int64_t)-bytes, (int64_t)m->from.segment);
    if (rc == KVQ_OK && m->to.segment)
        rc = kvq__run(k, KVQ_Q_SEGMENT_LIVE, "ii", bytes, (int64_t)m->to.segment);
    if (rc == KVQ_OK)
        rc = kvq__run(k, KVQ_Q_BLOCK_MOVE, "iiii", (int64_t)m->to.segment, (int64_t)m->to.offset,
                      (int64_t)m->from.bad, id);
    if (rc == KVQ_OK && m->needless)
        rc = kvq__run(k, KVQ_Q_BLOCK_REF, "ii", (int64_t)-1, id);
    return rc;
}

static int move_records(struct kvq_store *s, struct move *moves, size_t n,
                        struct kvq_store_freed *freed, const struct kvq__complaint *c)
{
    assert(n > 0 && n <= MOVES);
    int rc = kvq__writer_begin(s, true, 2 * n, c);
    for (size_t i = 0; i < n && rc == KVQ_OK; i++)
        rc = copy_record(s, &moves[i], freed, c);
    bool written = s->writer.records > 0; // else it needs no space, and a full disk has none
    if (rc == KVQ_OK && written)
        rc = kvq__writer_sync(s, 0, c);
    if (rc == KVQ_OK)
        rc = kvq__catalog_begin(s, c);
    if (rc) {
        kvq__writer_undo(s);
        return rc;
    }
    rc = written ? kvq__catalog_segments(s) : kvq__catalog_counters(s, s->next_transaction);
    for (size_t i = 0; i < n && rc == KVQ_OK; i++)
        rc = catalog_move(s, &moves[i]);
    if (rc == KVQ_OK)
        rc = kvq__catalog_free_blocks(s);
    rc = kvq__catalog_end(s, rc, c);
    if (rc)
        kvq__writer_undo(s);
    return rc;
}

static int compact_segment(struct kvq_store *s, uint64_t budget, uint32_t dead_percent,
                           struct kvq_store_freed *freed, const struct kvq__complaint *c)
{
    uint64_t number;
    size_t count = 0;
    struct move *moves = NULL;
    int rc = worst_segment(s, dead_percent, &number, c);
    if (rc == KVQ_OK && number) {
        moves = malloc(MOVES * sizeof *moves);
        rc = moves ? choose_moves(s, number, budget, moves, &count, c)
                   : kvq__complain(c, KVQ_E_NO_MEMORY, "no memory");
    }
    if (rc == KVQ_OK && count)
        rc = move_records(s, moves, count, freed, c);
    free(moves);
    if (rc == KVQ_OK)
        rc = remove_empty(s, freed, c);
    if (rc == KVQ_OK)
        rc = worst_segment(s, dead_percent, &number, c);
    freed->more = rc == KVQ_OK && number && count;
    return rc;
}

int kvq_store_compact(struct kvq_store *store, uint64_t budget, uint32_t dead_percent,
                      struct kvq_store_freed *freed, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    memset(freed, 0, sizeof *freed);
    int rc = kvq__write_begin(store, &c);
    if (rc)
        return rc;
    dead_percent = dead_percent ? dead_percent : 1;
    rc = retire_dead(store, dead_percent, &c);
    uint32_t sick = 0;
    bool again = rc == KVQ_OK;
    while (again) { // with another segment, where this one has turned out to be sick
        sick = store->n_sick;
        freed->moved = 0;
        rc = compact_segment(store, budget, dead_percent, freed, &c);
        again = rc == KVQ_E_SYSTEM && store->n_sick > sick;
    }
    kvq__write_end(store);
    return rc;
}
