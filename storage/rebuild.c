// SPDX-License-Identifier: Apache-2.0
//
// Making a catalog from segments alone. Records count if the COMMIT of the transaction that wrote
// them is there, or one that names this transaction as the one before its own. The newest manifest
// of a session is the session, unless a DROP names it; an entry whose block is damaged or missing
// makes a block that is marked as bad.
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/save.h"

// A record of any kind but FILE.
struct found {
    struct kvq__written w;
    uint64_t transaction;
    bool bad; // its payload is not as it was written
};

// A manifest or a DROP, by session.
struct claim {
    uint64_t session, transaction;
    size_t found;
    bool drop;
};

struct rebuild {
    struct kvq_store *s;
    struct kvq_store_report *report;
    const struct kvq__complaint *c;
    uint8_t *buffer;
    struct found *found;
    size_t n_found, room_found;
    uint64_t *committed; // transactions
    size_t n_committed, room_committed;
    struct kvq_commit *commits; // COMMITs that were found, believed or not
    size_t n_commits, room_commits;
    uint64_t *oldest; // [i]: the oldest transaction that commits[i] or a later one comes after
    uint64_t proven;  // a later one was begun after this one was acknowledged, so it was synced
    struct claim *claims;
    size_t n_claims, room_claims;
    uint64_t last_seen; // transaction, committed or not
};

static int no_memory_to_rebuild(const struct rebuild *r)
{
    return kvq__complain(r->c, KVQ_E_NO_MEMORY, "no memory to make the catalog anew");
}

// ---- Reading segments ----

static int note_commit(struct rebuild *r, const struct kvq_walk *w)
{
    struct kvq_commit commit;
    if (w->record.length != sizeof commit)
        return KVQ_OK;
    int rc = kvq_io_read(w->io, w->file, &commit, sizeof commit, w->at + KVQ_RECORD_HEAD, NULL);
    if (rc)
        return kvq__io_complain(r->c, rc, "a segment", "read");
    if (!kvq_commit_sane(&commit))
        return KVQ_OK;
    if (!kvq__grow((void **)&r->commits, &r->room_commits, r->n_commits, sizeof *r->commits))
        return no_memory_to_rebuild(r);
    r->commits[r->n_commits++] = commit;
    r->proven = commit.before > r->proven ? commit.before : r->proven;
    return KVQ_OK;
}

static int note_record(struct rebuild *r, const struct kvq__segment *g, const struct kvq_walk *w,
                       bool bad)
{
    const struct kvq_record *h = &w->record;
    if (h->transaction > r->last_seen)
        r->last_seen = h->transaction;
    if (h->kind == KVQ_RECORD_COMMIT && !bad) {
        int rc = note_commit(r, w);
        if (rc)
            return rc;
    }
    if (!kvq__grow((void **)&r->found, &r->room_found, r->n_found, sizeof *r->found))
        return no_memory_to_rebuild(r);
    r->found[r->n_found++] = (struct found){
        .w = {h->id, g->number, w->at, h->length, (enum kvq_record_kind)h->kind, h->payload},
        .transaction = h->transaction,
        .bad = bad};
    return KVQ_OK;
}

static int walk_segment(struct rebuild *r, struct kvq__segment *g, int file)
{
    struct kvq_walk w = {.io = r->s->io,
                         .file = file,
                         .salt = g->salt,
                         .next = KVQ_SEGMENT_FRONT,
                         .end = g->length,
                         .past_errors = true, // of what else there is nothing is lost
                         .buffer = r->buffer,
                         .buffer_bytes = KVQ__WALK_BYTES};
    int find, rc = KVQ_OK;
    assert(g->length >= KVQ_SEGMENT_FRONT);
    while (rc == KVQ_OK && (find = kvq_walk_next(&w)) != KVQ_WALK_END) {
        if (find < 0)
            return kvq__io_complain(r->c, find, "a segment", "read");
        bool sane = find != KVQ_WALK_DAMAGE && kvq_record_sane(&w.record);
        if (find != KVQ_WALK_RECORD || !sane)
            r->report->damaged_bytes += w.bytes;
        if (sane)
            rc = note_record(r, g, &w, find == KVQ_WALK_PAYLOAD);
    }
    return rc;
}

// What is no segment of this store, or has lost its front. Empty files are removed later.
static int pass_by(struct rebuild *r, uint64_t number, bool foreign, uint64_t bytes)
{
    if (foreign) {
        r->report->foreign++;
    } else {
        r->report->damaged_bytes += bytes;
        r->report->aside += bytes > 0;
    }
    return bytes ? kvq__segment_set_aside(r->s, number, r->c) : KVQ_OK;
}

static int read_segment(struct rebuild *r, uint64_t number)
{
    struct kvq_store *s = r->s;
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    struct kvq_file_head head = {0};
    struct kvq_io_status status;
    uint16_t version = 0;
    kvq__segment_name(number, name);
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_READ);
    if (file < 0)
        return kvq__io_complain(r->c, file, name, "opened");
    int rc = kvq_io_status(s->io, file, &status);
    int front = rc ? rc : kvq_segment_front(s->io, file, &head, &version);
    front = front == -EIO ? KVQ_WALK_DAMAGE : front;
    if (front < 0) {
        rc = kvq__io_complain(r->c, front, name, "read");
    } else if (version > KVQ_RECORD_VERSION) {
        rc = kvq__complain(r->c, KVQ_E_VERSION, "%s is of version %u; this program knows up to %d",
                           name, version, KVQ_RECORD_VERSION);
    } else if (front || head.number != number || memcmp(head.store, s->id, sizeof s->id) != 0) {
        rc = pass_by(r, number, front == 0, status.bytes);
    } else {
        struct kvq__segment *g = kvq__segment_add(s, number, head.salt);
        if (g) {
            g->sealed = true;
            g->length = status.bytes;
            g->physical = status.physical;
        }
        rc = g ? walk_segment(r, g, file) : no_memory_to_rebuild(r);
    }
    s->io->close(s->io, file);
    return rc;
}

// Stores that the files say they are of.
struct owner {
    uint8_t id[KVQ_STORE_ID_BYTES];
    size_t segments;
};

// Counts the file for its store if it has a front that says so; what it has else is seen later.
static void count_owner(struct kvq_store *s, uint64_t number, struct owner *owners, size_t *n)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    struct kvq_file_head head = {0};
    uint16_t version = 0;
    size_t i = 0;
    assert(number > 0);
    kvq__segment_name(number, name);
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_READ);
    int front = file < 0 ? file : kvq_segment_front(s->io, file, &head, &version);
    if (file >= 0)
        s->io->close(s->io, file);
    if (front || head.number != number)
        return;
    while (i < *n && memcmp(owners[i].id, head.store, sizeof head.store) != 0)
        i++;
    if (i == *n) {
        owners[i].segments = 0;
        memcpy(owners[i].id, head.store, sizeof head.store);
        *n += 1;
    }
    owners[i].segments++;
}

// Whose store it is: s->id, if a catalog has said so and there is a segment of it; else that which
// most segments are of, and of two with as many the one with the newest.
static int find_owner(struct rebuild *r, const uint64_t *numbers, size_t n)
{
    struct kvq_store *s = r->s;
    struct owner *owners = calloc(n + 1, sizeof *owners);
    size_t n_owners = 0, best = 0;
    int rc = owners ? KVQ_OK : no_memory_to_rebuild(r);
    for (size_t i = n; i-- > 0 && rc == KVQ_OK;)
        count_owner(s, numbers[i], owners, &n_owners);
    for (size_t i = 0; i < n_owners; i++) {
        if (memcmp(owners[i].id, s->id, sizeof s->id) == 0)
            owners[i].segments = SIZE_MAX;
        best = owners[i].segments > owners[best].segments ? i : best;
    }
    if (n_owners) {
        memcpy(s->id, owners[best].id, sizeof s->id);
    } else if (rc == KVQ_OK) {
        rc = kvq_io_random(s->io, s->id, sizeof s->id);
        rc = rc ? kvq__io_complain(r->c, rc, "a random number", "had") : KVQ_OK;
    }
    free(owners);
    return rc;
}

static int read_segments(struct rebuild *r, const uint64_t *numbers, size_t n)
{
    int rc = find_owner(r, numbers, n);
    for (size_t i = n; i-- > 0 && rc == KVQ_OK;) {
        assert(i == 0 || numbers[i - 1] < numbers[i]);
        rc = read_segment(r, numbers[i]);
    }
    return rc;
}

// ---- What counts ----

static bool is_committed(const struct rebuild *r, uint64_t transaction)
{
    return r->n_committed &&
           bsearch(&transaction, r->committed, r->n_committed, sizeof transaction, kvq__by_number);
}

static int by_transaction(const void *a, const void *b)
{
    uint64_t x = ((const struct kvq_commit *)a)->transaction;
    uint64_t y = ((const struct kvq_commit *)b)->transaction;
    return (x > y) - (x < y);
}

// A COMMIT may have reached the disk before what it commits did, when the power failed before the
// sync had ended. So the last transaction, which nothing proves to have been synced, counts only if
// all of its records are there and sound.
static bool is_whole(const struct rebuild *r, const struct kvq_commit *commit)
{
    uint64_t sound = 0;
    for (size_t i = 0; i < r->n_found; i++) {
        const struct found *f = &r->found[i];
        sound += f->transaction == commit->transaction && !f->bad && f->w.id != 0;
    }
    return sound == commit->records + 1; // and itself
}

static int order_commits(struct rebuild *r)
{
    uint64_t oldest = UINT64_MAX;
    r->oldest = malloc((r->n_commits + 1) * sizeof *r->oldest);
    if (!r->oldest)
        return no_memory_to_rebuild(r);
    if (r->n_commits)
        qsort(r->commits, r->n_commits, sizeof *r->commits, by_transaction);
    for (size_t i = r->n_commits; i-- > 0;) {
        oldest = r->commits[i].before < oldest ? r->commits[i].before : oldest;
        r->oldest[i] = oldest;
    }
    return KVQ_OK;
}

// Whether a later COMMIT names an older transaction as the one before it: then the save of this one
// had failed. It may be on the disk all the same, if cutting it off was not synced.
static bool is_refuted(const struct rebuild *r, uint64_t transaction)
{
    size_t low = 0, high = r->n_commits; // where the later ones start
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (r->commits[middle].transaction > transaction)
            high = middle;
        else
            low = middle + 1;
    }
    return low < r->n_commits && r->oldest[low] < transaction;
}

static int note_committed(struct rebuild *r, uint64_t transaction)
{
    if (!kvq__grow((void **)&r->committed, &r->room_committed, r->n_committed,
                   sizeof *r->committed))
        return no_memory_to_rebuild(r);
    r->committed[r->n_committed++] = transaction;
    return KVQ_OK;
}

// Which transactions count. The one before a COMMIT was in the catalog when that was written: it
// counts even if its own COMMIT is damaged.
static int judge_commits(struct rebuild *r)
{
    int rc = order_commits(r);
    for (size_t i = 0; i < r->n_commits && rc == KVQ_OK; i++) {
        const struct kvq_commit *commit = &r->commits[i];
        if (commit->before)
            rc = note_committed(r, commit->before);
        if (rc == KVQ_OK && !is_refuted(r, commit->transaction) &&
            (commit->transaction <= r->proven || is_whole(r, commit)))
            rc = note_committed(r, commit->transaction);
    }
    if (r->n_committed)
        qsort(r->committed, r->n_committed, sizeof *r->committed, kvq__by_number);
    return rc;
}

// By id; of the copies of one, the best comes first: sound, and then the latest.
static int by_record_id(const void *a, const void *b)
{
    const struct found *x = a, *y = b;
    if (x->w.id != y->w.id)
        return x->w.id < y->w.id ? -1 : 1;
    if (x->bad != y->bad)
        return x->bad ? 1 : -1;
    return (x->transaction < y->transaction) - (x->transaction > y->transaction);
}

static int by_record_place(const void *a, const void *b)
{
    const struct found *x = a, *y = b;
    if (x->w.segment != y->w.segment)
        return x->w.segment < y->w.segment ? -1 : 1;
    return (x->w.offset > y->w.offset) - (x->w.offset < y->w.offset);
}

static void note_end(struct kvq_store *s, const struct found *f)
{
    for (size_t i = 0; i < s->n_segments; i++) {
        struct kvq__segment *g = s->segments[i];
        uint64_t end = f->w.offset + kvq_record_bytes(f->w.length);
        if (g->number == f->w.segment && g->bytes < end)
            g->bytes = end;
    }
}

// Counts the manifests that were written by transactions of which nobody knows whether they were
// committed: their COMMITs are damaged, or the power failed before they were there. r->found is in
// the order of ids.
static void count_lost(struct rebuild *r)
{
    for (size_t i = 0, next; i < r->n_found; i = next) {
        bool counts = false, lost = false;
        for (next = i; next < r->n_found && r->found[next].w.id == r->found[i].w.id; next++) {
            const struct found *f = &r->found[next];
            counts |= is_committed(r, f->transaction);
            lost |= f->w.kind == KVQ_RECORD_MANIFEST && !is_refuted(r, f->transaction);
        }
        r->report->lost_sessions += lost && !counts;
    }
}

// Leaves one record for each id in r->found, in the order of their places.
static void select_records(struct rebuild *r)
{
    size_t kept = 0;
    if (r->n_found)
        qsort(r->found, r->n_found, sizeof *r->found, by_record_id);
    count_lost(r);
    for (size_t i = 0; i < r->n_found; i++) {
        const struct found *f = &r->found[i];
        if (!is_committed(r, f->transaction))
            continue;
        note_end(r->s, f);
        if (f->w.id == 0) // a PAD
            continue;
        if (kept == 0 || r->found[kept - 1].w.id != f->w.id)
            r->found[kept++] = *f;
    }
    r->n_found = kept;
    if (kept)
        qsort(r->found, kept, sizeof *r->found, by_record_place);
}

// ---- Sessions ----

// Reads the payload of a record, or its first n bytes.
static int read_payload(struct rebuild *r, const struct found *f, void *out, uint64_t n)
{
    struct kvq__segment *g;
    size_t got = 0;
    assert(n <= f->w.length);
    int rc = kvq__segment_pin(r->s, f->w.segment, &g, r->c);
    if (rc)
        return rc;
    int error = kvq_io_read(r->s->io, g->file, out, n, f->w.offset + KVQ_RECORD_HEAD, &got);
    kvq__segment_unpin(r->s, g);
    if (error || got != n)
        return kvq__io_complain(r->c, error ? error : -EIO, "a segment", "read");
    return KVQ_OK;
}

static int note_claim(struct rebuild *r, size_t i)
{
    const struct found *f = &r->found[i];
    struct kvq_manifest_head h;
    bool drop = f->w.kind == KVQ_RECORD_DROP;
    uint64_t n = drop ? sizeof h.session : sizeof h;
    if (!drop && f->w.kind != KVQ_RECORD_MANIFEST)
        return KVQ_OK;
    if (f->bad || f->w.length < n) {
        r->report->lost_sessions += !drop;
        return KVQ_OK;
    }
    int rc = read_payload(r, f, drop ? (void *)&h.session : &h, n);
    if (rc)
        return rc;
    if (h.session == 0 || h.session >= KVQ_MAX_STORE_NUMBER) {
        r->report->lost_sessions += !drop;
        return KVQ_OK;
    }
    if (!kvq__grow((void **)&r->claims, &r->room_claims, r->n_claims, sizeof *r->claims))
        return no_memory_to_rebuild(r);
    r->claims[r->n_claims++] = (struct claim){h.session, f->transaction, i, drop};
    return KVQ_OK;
}

// By session: a DROP first, then the newest.
static int by_session(const void *a, const void *b)
{
    const struct claim *x = a, *y = b;
    if (x->session != y->session)
        return x->session < y->session ? -1 : 1;
    if (x->drop != y->drop)
        return x->drop ? -1 : 1;
    return (x->transaction < y->transaction) - (x->transaction > y->transaction);
}

static int by_age(const void *a, const void *b)
{
    const struct claim *x = a, *y = b;
    return (x->transaction > y->transaction) - (x->transaction < y->transaction);
}

// Leaves in r->claims what is to be in the catalog, oldest first: one of each session.
static int select_claims(struct rebuild *r)
{
    int rc = KVQ_OK;
    for (size_t i = 0; i < r->n_found && rc == KVQ_OK; i++)
        rc = note_claim(r, i);
    if (rc || r->n_claims == 0)
        return rc;
    qsort(r->claims, r->n_claims, sizeof *r->claims, by_session);
    size_t kept = 0;
    for (size_t i = 0; i < r->n_claims; i++)
        if (i == 0 || r->claims[i].session != r->claims[i - 1].session)
            r->claims[kept++] = r->claims[i];
    r->n_claims = kept;
    qsort(r->claims, kept, sizeof *r->claims, by_age);
    return KVQ_OK;
}

// Entries whose blocks nobody has found get a block that is marked as bad. KVQ_E_INVALID: an entry
// names what is no block.
static int fill_gaps(struct rebuild *r, struct kvq__save_session *v)
{
    struct kvq_store *s = r->s;
    int rc = KVQ_OK;
    for (uint32_t i = 0; i < v->head.entries && rc == KVQ_OK; i++) {
        struct kvq_stored block;
        enum kvq_record_kind kind;
        rc = kvq__block_find(s, v->entries[i].block, &block, &kind);
        if (rc == KVQ_OK && kind != KVQ_RECORD_BLOCK)
            return KVQ_E_INVALID;
        if (rc == KVQ_OK)
            v->bytes += block.bytes;
        if (rc != KVQ_E_NO_SESSION)
            continue;
        struct kvq_checksum none = {0};
        rc = kvq__run(&s->catalog, KVQ_Q_BLOCK_PUT, "iiiiiiib", (int64_t)v->entries[i].block,
                      (int64_t)0, (int64_t)0, (int64_t)0, (int64_t)KVQ_RECORD_BLOCK, (int64_t)0,
                      (int64_t)1, (const void *)&none, sizeof none);
        if (v->entries[i].block >= s->next_block)
            s->next_block = v->entries[i].block + 1;
        r->report->bad_blocks++;
    }
    return rc;
}

// If two sessions have one name, the one that comes later counts.
static int replace_namesake(struct rebuild *r, const struct kvq_manifest_head *h)
{
    struct kvq__catalog *k = &r->s->catalog;
    struct kvq_store_session old;
    uint64_t manifest = 0;
    sqlite3_stmt *rows =
        kvq__rows(k, KVQ_Q_SESSION_FIND, "tti", h->space, h->name, (int64_t)h->shard);
    int rc = kvq__next(k, rows);
    if (rc != 1)
        return rc;
    kvq__session_row(rows, &old, &manifest);
    (void)sqlite3_reset(rows);
    return kvq__apply_drop(r->s, old.id, manifest);
}

static int apply_manifest(struct rebuild *r, const struct claim *claim, const void *bytes,
                          const struct found *f)
{
    struct kvq_manifest m;
    const struct kvq__complaint quiet = {0};
    assert(f->w.kind == KVQ_RECORD_MANIFEST && !f->bad);
    if (kvq_manifest_read(bytes, f->w.length, &m, &quiet)) {
        r->report->lost_sessions++;
        return KVQ_OK;
    }
    struct kvq__save_session v = {.head = *m.head,
                                  .entries = (struct kvq_manifest_entry *)m.entries,
                                  .prefixes = (uint8_t(*)[KVQ_PREFIX_BYTES])m.prefixes,
                                  .opaque = (uint8_t *)m.opaque,
                                  .manifest = f->w.id};
    r->s->next_transaction = claim->transaction;
    int rc = fill_gaps(r, &v);
    if (rc == KVQ_E_INVALID) {
        r->report->lost_sessions++;
        return KVQ_OK;
    }
    if (rc == KVQ_OK)
        rc = replace_namesake(r, m.head);
    return rc ? rc : kvq__apply_session(r->s, &v);
}

static int apply_claim(struct rebuild *r, const struct claim *claim)
{
    assert(claim->found < r->n_found);
    const struct found *f = &r->found[claim->found];
    if (claim->session >= r->s->next_session)
        r->s->next_session = claim->session + 1;
    if (claim->drop)
        return kvq__run(&r->s->catalog, KVQ_Q_BLOCK_REF, "ii", (int64_t)1, (int64_t)f->w.id);
    void *bytes = malloc(f->w.length);
    if (!bytes)
        return KVQ_E_NO_MEMORY;
    int rc = read_payload(r, f, bytes, f->w.length);
    if (rc == KVQ_OK)
        rc = apply_manifest(r, claim, bytes, f);
    free(bytes);
    return rc;
}

// ---- The catalog ----

static int put_records(struct rebuild *r)
{
    struct kvq_store *s = r->s;
    int rc = KVQ_OK;
    for (size_t i = 0; i < s->n_segments && rc == KVQ_OK; i++) {
        const struct kvq__segment *g = s->segments[i];
        if (g->bytes > 0)
            rc = kvq__run(&s->catalog, KVQ_Q_SEGMENT_PUT, "iiii", (int64_t)g->number,
                          (int64_t)g->salt, (int64_t)g->bytes, (int64_t)1);
    }
    for (size_t i = 0; i < r->n_found && rc == KVQ_OK; i++) {
        const struct found *f = &r->found[i];
        if (f->w.id >= s->next_block)
            s->next_block = f->w.id + 1;
        rc = f->w.kind == KVQ_RECORD_COMMIT ? kvq__catalog_own(s, &f->w)
                                            : kvq__catalog_blocks(s, &f->w, 1);
        if (rc == KVQ_OK && f->bad)
            rc = kvq__run(&s->catalog, KVQ_Q_BLOCK_BAD, "iii", (int64_t)f->w.id,
                          (int64_t)f->w.segment, (int64_t)f->w.offset);
        r->report->bad_blocks += f->bad && f->w.kind == KVQ_RECORD_BLOCK;
    }
    return rc;
}

static int fill_catalog(struct rebuild *r)
{
    struct kvq_store *s = r->s;
    assert(!sqlite3_get_autocommit(s->catalog.db));
    int rc = kvq__catalog_create(&s->catalog);
    if (rc == KVQ_OK)
        rc = put_records(r);
    for (size_t i = 0; i < r->n_claims && rc == KVQ_OK; i++)
        rc = apply_claim(r, &r->claims[i]);
    if (rc == KVQ_OK)
        rc = kvq__catalog_free_blocks(s);
    // Not every transaction writes records: the last one may be known only by who came after it.
    s->last_transaction = r->n_committed ? r->committed[r->n_committed - 1] : 0;
    if (s->last_transaction < r->proven)
        s->last_transaction = r->proven;
    s->next_transaction = r->last_seen + 1;
    return rc ? rc : kvq__catalog_counters(s, s->last_transaction);
}

// Segments in which nothing was committed are none of this store's.
static void forget_segments(struct kvq_store *s)
{
    size_t kept = 0;
    for (size_t i = 0; i < s->n_segments; i++) {
        struct kvq__segment *g = s->segments[i];
        if (g->bytes > 0) {
            s->segments[kept++] = g;
            continue;
        }
        assert(g->pins == 0);
        if (g->file >= 0)
            s->io->close(s->io, g->file);
        free(g);
    }
    s->n_segments = kept;
}

static int make_catalog(struct rebuild *r)
{
    struct kvq__catalog *k = &r->s->catalog;
    assert(sqlite3_get_autocommit(k->db));
    int rc = kvq__run(k, KVQ_Q_BEGIN, "");
    if (rc == KVQ_OK)
        rc = fill_catalog(r);
    if (rc == KVQ_OK)
        rc = kvq__run(k, KVQ_Q_COMMIT, "");
    return rc ? kvq__catalog_complain(r->s, rc, r->c) : KVQ_OK;
}

int kvq__rebuild(struct kvq_store *s, const uint64_t *numbers, size_t n,
                 struct kvq_store_report *report, const struct kvq__complaint *c)
{
    assert(s->n_segments == 0 && !s->read_only);
    struct rebuild r = {.s = s, .report = report, .c = c, .buffer = malloc(KVQ__WALK_BYTES)};
    s->next_block = s->next_session = 1;
    s->next_segment = n ? numbers[n - 1] + 1 : 1;
    int rc = r.buffer ? read_segments(&r, numbers, n) : no_memory_to_rebuild(&r);
    if (rc == KVQ_OK)
        rc = judge_commits(&r);
    if (rc == KVQ_OK) {
        select_records(&r);
        rc = select_claims(&r);
    }
    if (rc == KVQ_OK)
        rc = make_catalog(&r);
    if (rc == KVQ_OK)
        forget_segments(s);
    free(r.claims);
    free(r.commits);
    free(r.oldest);
    free(r.committed);
    free(r.found);
    free(r.buffer);
    return rc;
}
