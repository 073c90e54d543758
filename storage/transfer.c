// SPDX-License-Identifier: Apache-2.0
//
// Exporting a session to one file, and importing such a file, which is foreign.
//
// The file is one of records (segment.h): FILE, a MANIFEST for each shard, the blocks in ascending
// order of their ids, each once, and a COMMIT that counts them. Nothing stands behind it.
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/save.h"
#include "storage/unfinished.h"

enum { BUFFER = 4 << 20 };

static int tell_transfer(const struct kvq_store_watch *watch, uint64_t done, uint64_t all,
                         const struct kvq__complaint *c)
{
    if (!watch || watch->tell(watch->context, done, all) == 0)
        return KVQ_OK;
    return kvq__complain(c, KVQ_E_CANCELLED, "it was cancelled");
}

// ---- Exporting ----

// What is written to the file goes through one large buffer.
struct export
{
    struct kvq_store *s;
    const struct kvq__complaint *c; // about the file
    int file;
    uint64_t salt, at;
    uint8_t *buffer;
    size_t used;
    struct kvq_store_session *shards;
    uint32_t n_shards;
    struct kvq_stored *blocks; // of all shards, by id, each once
    size_t n_blocks, room_blocks;
    const struct kvq_store_watch *watch;
};

static int write_out(struct export *e)
{
    assert(e->file >= 0 && e->used <= BUFFER);
    int rc = kvq_io_write(e->s->io, e->file, e->buffer, e->used, e->at);
    e->at += e->used;
    e->used = 0;
    return rc ? kvq__io_complain(e->c, rc, "the file", "written") : KVQ_OK;
}

static int add_bytes(struct export *e, const void *data, uint64_t n)
{
    int rc = KVQ_OK;
    for (uint64_t done = 0; done < n && rc == KVQ_OK;) {
        assert(e->used < BUFFER);
        size_t room = BUFFER - e->used, some = n - done < room ? (size_t)(n - done) : room;
        memcpy(e->buffer + e->used, (const uint8_t *)data + done, some);
        e->used += some;
        done += some;
        if (e->used == BUFFER)
            rc = write_out(e);
    }
    return rc;
}

static int add_record(struct export *e, enum kvq_record_kind kind, uint64_t id, const void *data,
                      uint64_t n)
{
    static const uint8_t zeros[KVQ_RECORD_HEAD];
    struct kvq_record r;
    assert((e->at + e->used) % KVQ_RECORD_HEAD == 0);
    kvq_record_make(&r, kind, id, 1, n, kvq_checksum(data, (size_t)n),
                    kind == KVQ_RECORD_FILE ? 0 : e->salt);
    int rc = add_bytes(e, &r, sizeof r);
    if (rc == KVQ_OK)
        rc = add_bytes(e, data, n);
    return rc ? rc : add_bytes(e, zeros, kvq_record_bytes(n) - sizeof r - n);
}

// The same saves make the same file, and a block has the same record in the files of all saves of
// its session, so that who has sent it need not send it again. What its salt is made of no client
// knows: the store's id is random.
static int add_front(struct export *e)
{
    struct kvq_file_head head = {0};
    assert(e->at == 0 && e->used == 0 && e->n_shards > 0 && e->n_shards <= KVQ_MAX_SHARDS);
    struct {
        uint8_t store[sizeof e->s->id];
        uint64_t sessions[KVQ_MAX_SHARDS];
    } of = {0};
    memcpy(head.store, e->s->id, sizeof head.store);
    memcpy(of.store, e->s->id, sizeof of.store);
    for (uint32_t i = 0; i < e->n_shards; i++)
        of.sessions[i] = e->shards[i].id;
    struct kvq_checksum sum = kvq_checksum(&of, sizeof of);
    memcpy(&head.salt, &sum, sizeof head.salt);
    e->salt = head.salt;
    return add_record(e, KVQ_RECORD_FILE, 0, &head, sizeof head);
}

static int gather_shards(struct export *e, const char *space, const char *name)
{
    struct kvq__catalog *k = &e->s->catalog;
    pthread_mutex_lock(&e->s->catalog_lock);
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_SESSION_SHARDS, "tt", space, name);
    int rc = kvq__next(k, rows);
    while (rc == 1 && e->n_shards < KVQ_MAX_SHARDS) {
        kvq__session_row(rows, &e->shards[e->n_shards++], NULL);
        rc = kvq__next(k, rows);
    }
    if (rc == 1)
        (void)sqlite3_reset(rows);
    if (rc < 0)
        rc = kvq__catalog_complain(e->s, rc, e->c);
    pthread_mutex_unlock(&e->s->catalog_lock);
    if (rc >= 0 && e->n_shards == 0)
        return kvq__complain(
            e->c, KVQ_E_NO_SESSION,
            "the store holds no session %s of %s; save one that is in memory first "
            "(kvqctl session save)",
            name, space);
    return rc < 0 ? rc : KVQ_OK;
}

// The entries of a manifest, to be freed; their blocks are noted.
static int manifest_lists(struct export *e, const struct kvq_stored *blocks, size_t n,
                          struct kvq_manifest_entry **entries)
{
    *entries = calloc(n + 1, sizeof **entries);
    if (!*entries)
        return kvq__complain(e->c, KVQ_E_NO_MEMORY, "no memory");
    for (size_t i = 0; i < n; i++) {
        const struct kvq_stored *b = &blocks[i];
        (*entries)[i] = (struct kvq_manifest_entry){b->id,         b->place.from, b->place.layer,
                                                    b->place.page, b->place.kind, 0};
        if (!kvq__grow((void **)&e->blocks, &e->room_blocks, e->n_blocks, sizeof *e->blocks))
            return kvq__complain(e->c, KVQ_E_NO_MEMORY, "no memory");
        e->blocks[e->n_blocks++] = *b;
    }
    return KVQ_OK;
}

static void manifest_head(const struct kvq_store_session *x, struct kvq_manifest_head *h)
{
    *h = (struct kvq_manifest_head){.version = KVQ_MANIFEST_VERSION,
                                    .opaque_version = x->version,
                                    .session = x->id,
                                    .tokens = x->tokens,
                                    .saved_at = x->saved_at,
                                    .shard = x->shard,
                                    .shards = x->shards,
                                    .opaque_bytes = x->n_bytes};
    memcpy(h->space, x->space, sizeof h->space);
    memcpy(h->name, x->name, sizeof h->name);
    memcpy(h->model, x->model, sizeof h->model);
    memcpy(h->formats, x->formats, sizeof h->formats);
}

static int add_manifest(struct export *e, const struct kvq_store_session *shard)
{
    const struct kvq__complaint *c = e->c;
    struct kvq_manifest_head head;
    struct kvq_stored *blocks = NULL;
    struct kvq_manifest_entry *entries = NULL;
    uint8_t(*prefixes)[KVQ_PREFIX_BYTES] = NULL;
    uint8_t *opaque = malloc(shard->n_bytes + 1);
    void *bytes = NULL;
    size_t n = 0;
    manifest_head(shard, &head);
    int rc = opaque ? kvq_store_blocks(e->s, shard, &blocks, &n, c->text, c->size)
                    : kvq__complain(c, KVQ_E_NO_MEMORY, "no memory");
    if (rc == KVQ_OK)
        rc = kvq_store_prefixes(e->s, shard, &prefixes, &head.prefixes, c->text, c->size);
    if (rc == KVQ_OK)
        rc = kvq_store_meta_read(e->s, shard, opaque, c->text, c->size);
    if (rc == KVQ_OK)
        rc = manifest_lists(e, blocks, n, &entries);
    if (rc)
        goto out;
    assert(n == shard->blocks && n <= UINT32_MAX);
    head.entries = (uint32_t)n;
    const struct kvq_manifest m = {&head, entries, (const uint8_t(*)[KVQ_PREFIX_BYTES])prefixes,
                                   opaque};
    bytes = kvq_manifest_make(&m);
    rc = bytes ? add_record(e, KVQ_RECORD_MANIFEST, shard->id, bytes, kvq_manifest_bytes(&head))
               : kvq__complain(c, KVQ_E_NO_MEMORY, "no memory");
out:
    free(bytes);
    free(entries);
    free(prefixes);
    free(blocks);
    free(opaque);
    return rc;
}

static int by_block_id(const void *a, const void *b)
{
    const struct kvq_stored *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

// A block is gone with its segment: the session was saved again since the export began, or deleted.
static int tell_overtaken(const struct export *e)
{
    struct kvq_store_session now;
    const struct kvq_store_session *was = &e->shards[0];
    assert(e->n_shards > 0);
    int rc = kvq_store_find(e->s, was->space, was->name, was->shard, &now, NULL, 0);
    if (rc == KVQ_E_NO_SESSION)
        return kvq__complain(e->c, rc, "the store holds no session %s of %s any more", was->name,
                             was->space);
    return kvq__complain(e->c, KVQ_E_STALE,
                         "session %s of %s was saved again meanwhile; export it again", was->name,
                         was->space);
}

static int add_blocks(struct export *e)
{
    size_t kept = 0;
    uint64_t done = 0, all = 0;
    int rc = KVQ_OK;
    if (e->n_blocks)
        qsort(e->blocks, e->n_blocks, sizeof *e->blocks, by_block_id);
    for (size_t i = 0; i < e->n_blocks; i++)
        if (kept == 0 || e->blocks[kept - 1].id != e->blocks[i].id)
            e->blocks[kept++] = e->blocks[i];
    e->n_blocks = kept;
    for (size_t i = 0; i < kept; i++)
        all += e->blocks[i].bytes;
    for (size_t i = 0; i < kept && rc == KVQ_OK; i++) {
        const struct kvq_stored *b = &e->blocks[i];
        void *bytes = malloc(b->bytes + 1);
        rc = bytes ? kvq_store_read(e->s, b, bytes, e->c->text, e->c->size)
                   : kvq__complain(e->c, KVQ_E_NO_MEMORY, "no memory");
        if (rc == KVQ_OK)
            rc = add_record(e, KVQ_RECORD_BLOCK, b->id, bytes, b->bytes);
        else if (rc == KVQ_E_NO_SESSION)
            rc = tell_overtaken(e);
        free(bytes);
        done += b->bytes;
        rc = rc ? rc : tell_transfer(e->watch, done, all, e->c);
    }
    assert(rc || done == all);
    return rc;
}

static int write_export(struct export *e, const char *space, const char *name)
{
    int rc = gather_shards(e, space, name);
    if (rc == KVQ_OK)
        rc = add_front(e);
    for (uint32_t i = 0; i < e->n_shards && rc == KVQ_OK; i++)
        rc = add_manifest(e, &e->shards[i]);
    if (rc == KVQ_OK)
        rc = add_blocks(e);
    const struct kvq_commit commit = {1, 0, e->n_shards, e->n_shards + e->n_blocks};
    if (rc == KVQ_OK)
        rc = add_record(e, KVQ_RECORD_COMMIT, 1, &commit, sizeof commit);
    if (rc == KVQ_OK)
        rc = write_out(e);
    if (rc)
        return rc;
    rc = kvq_io_sync(e->s->io, e->file);
    return rc ? kvq__io_complain(e->c, rc, "the file", "synced") : KVQ_OK;
}

int kvq_store_export(struct kvq_store *store, const char *space, const char *name, const char *path,
                     bool replace, char *text, size_t n)
{
    return kvq_store_export_watched(store, space, name, path, replace, NULL, text, n);
}

int kvq_store_export_watched(struct kvq_store *store, const char *space, const char *name,
                             const char *path, bool replace, const struct kvq_store_watch *watch,
                             char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    char unfinished[KVQ__FILE_PATH];
    struct export e = {.s = store, .c = &c, .file = -1, .watch = watch};
    e.buffer = malloc(BUFFER);
    e.shards = calloc(KVQ_MAX_SHARDS, sizeof *e.shards);
    int rc = KVQ_E_NO_MEMORY;
    if (!e.buffer || !e.shards) {
        (void)kvq__complain(&c, rc, "no memory");
        goto out;
    }
    e.file = kvq__make_unfinished(store->io, path, unfinished);
    rc = e.file < 0 ? kvq__io_complain(&c, e.file, "the file", "made")
                    : write_export(&e, space, name);
    if (rc == KVQ_OK)
        rc = kvq__place_finished(store->io, unfinished, path, replace, &c);
    if (rc && e.file >= 0)
        (void)kvq_io_unlink(store->io, unfinished);
    if (e.file >= 0)
        store->io->close(store->io, e.file);
out:
    free(e.blocks);
    free(e.shards);
    free(e.buffer);
    return rc;
}

// ---- Importing ----

struct pair {
    uint64_t theirs, ours; // block ids
};

struct import {
    struct kvq_store *s;
    const struct kvq__complaint *c;
    const char *space, *name; // NULL: as in the file
    bool replace;
    struct kvq_walk walk;
    struct kvq_save *save; // NULL: it is only looked at
    uint64_t bytes;        // of its blocks
    void **manifests;      // bytes of each, checked
    struct kvq_manifest *parts;
    size_t n, room_manifests, room_parts;
    struct pair *pairs; // ascending
    size_t n_pairs, room_pairs;
    bool ended; // COMMIT was there
    const struct kvq_store_watch *watch;
};

// A file to be imported is only read.
static int complain_of_reading(const struct kvq__complaint *c, int error, const char *verb)
{
    assert(error < 0);
    if (error != -EACCES && error != -EPERM)
        return kvq__io_complain(c, error, "the file", verb);
    return kvq__complain(c, KVQ_E_SYSTEM, // not KVQ_E_PERMISSION: it is not who asked
                         "the file cannot be %s: %s; give the daemon's user the right to read it, "
                         "and to enter the folders above it",
                         verb, strerror(-error));
}

static int spoiled(const struct import *m, const char *what)
{
    return kvq__complain(m->c, KVQ_E_DAMAGED, "at byte %llu: %s", (unsigned long long)m->walk.at,
                         what);
}

// The payload of the record that the walk is at, to be freed. The walk has checked it; it is
// checked again, since the file may change under us.
static int load_payload(struct import *m, void **bytes)
{
    const struct kvq_record *r = &m->walk.record;
    size_t got = 0;
    *bytes = NULL;
    assert(r->length < m->walk.too_long);
    *bytes = malloc(r->length + 1);
    if (!*bytes)
        return kvq__complain(m->c, KVQ_E_NO_MEMORY, "no memory for a record of %llu bytes",
                             (unsigned long long)r->length);
    int rc = kvq_io_read(m->walk.io, m->walk.file, *bytes, r->length, m->walk.at + KVQ_RECORD_HEAD,
                         &got);
    if (rc)
        rc = complain_of_reading(m->c, rc, "read");
    else if (got != r->length || !kvq_checksum_equal(kvq_checksum(*bytes, got), r->payload))
        rc = spoiled(m, "the record changed while it was read");
    if (rc) {
        free(*bytes);
        *bytes = NULL;
    }
    return rc;
}

static int take_manifest(struct import *m)
{
    struct kvq_manifest parts;
    void *bytes;
    if (m->n_pairs || m->n == KVQ_MAX_SHARDS)
        return spoiled(m, m->n_pairs ? "a session behind blocks" : "too many sessions");
    int rc = load_payload(m, &bytes);
    if (rc == KVQ_OK)
        rc = kvq_manifest_read(bytes, m->walk.record.length, &parts, m->c);
    if (rc == KVQ_OK && m->n > 0 &&
        (strcmp(parts.head->space, m->parts[0].head->space) != 0 ||
         strcmp(parts.head->name, m->parts[0].head->name) != 0 ||
         parts.head->shards != m->parts[0].head->shards))
        rc = spoiled(m, "it holds shards of more than one session");
    if (rc == KVQ_OK &&
        (!kvq__grow((void **)&m->manifests, &m->room_manifests, m->n, sizeof *m->manifests) ||
         !kvq__grow((void **)&m->parts, &m->room_parts, m->n, sizeof *m->parts)))
        rc = kvq__complain(m->c, KVQ_E_NO_MEMORY, "no memory");
    if (rc) {
        free(bytes);
        return rc;
    }
    m->manifests[m->n] = bytes;
    m->parts[m->n++] = parts;
    return KVQ_OK;
}

static int take_block(struct import *m)
{
    uint64_t id = m->walk.record.id;
    void *bytes;
    if (m->n == 0)
        return spoiled(m, "a block before any session");
    if (m->walk.record.length == 0) // each would take more memory than it has bytes in the file
        return spoiled(m, "a block of 0 bytes");
    if (m->n_pairs && id <= m->pairs[m->n_pairs - 1].theirs)
        return spoiled(m, "blocks are not in the order of their ids");
    if (!kvq__grow((void **)&m->pairs, &m->room_pairs, m->n_pairs, sizeof *m->pairs))
        return kvq__complain(m->c, KVQ_E_NO_MEMORY, "no memory");
    int rc = load_payload(m, &bytes);
    if (rc)
        return rc;
    struct pair *p = &m->pairs[m->n_pairs];
    p->theirs = id;
    p->ours = 0;
    if (m->save)
        rc = kvq__save_block(m->save, bytes, m->walk.record.length, &p->ours, m->c);
    m->n_pairs += rc == KVQ_OK;
    m->bytes += m->walk.record.length;
    free(bytes);
    return rc;
}

static int take_end(struct import *m)
{
    struct kvq_commit commit;
    void *bytes;
    int rc = load_payload(m, &bytes);
    if (rc)
        return rc;
    bool whole = m->walk.record.length == sizeof commit;
    if (whole)
        memcpy(&commit, bytes, sizeof commit);
    free(bytes);
    if (!whole || commit.sessions != m->n || commit.records != m->n + m->n_pairs || m->n == 0)
        return spoiled(m, "its end counts other sessions and records than there are");
    m->ended = true;
    return KVQ_OK;
}

static int take_imported(struct import *m)
{
    if (m->ended)
        return spoiled(m, "something stands behind its end");
    if (m->walk.record.version != KVQ_RECORD_VERSION)
        return kvq__complain(m->c, KVQ_E_VERSION, "a record of version %u; this program knows %d",
                             m->walk.record.version, KVQ_RECORD_VERSION);
    switch (m->walk.record.kind) {
    case KVQ_RECORD_MANIFEST:
        return take_manifest(m);
    case KVQ_RECORD_BLOCK:
        return take_block(m);
    case KVQ_RECORD_COMMIT:
        return take_end(m);
    default:
        return spoiled(m, "a record that does not belong there");
    }
}

// Of a record whose payload is not as it was written, or too long to be looked at.
static int refuse_payload(const struct import *m)
{
    if (m->walk.record.length < m->walk.too_long)
        return spoiled(m, "it is damaged or cut off here");
    return kvq__complain(m->c, KVQ_E_LIMIT,
                         "at byte %llu: a record of %llu bytes; fewer than 2^%d are allowed",
                         (unsigned long long)m->walk.at, (unsigned long long)m->walk.record.length,
                         KVQ_MAX_STORE_BLOCK_LOG2);
}

static int take_all_records(struct import *m)
{
    int find, rc = KVQ_OK;
    while (rc == KVQ_OK && (find = kvq_walk_next(&m->walk)) != KVQ_WALK_END) {
        if (find < 0)
            rc = complain_of_reading(m->c, find, "read");
        else if (find == KVQ_WALK_DAMAGE)
            rc = spoiled(m, "it is damaged or cut off here");
        else
            rc = find == KVQ_WALK_RECORD ? take_imported(m) : refuse_payload(m);
        rc = rc ? rc : tell_transfer(m->watch, m->walk.next, m->walk.end, m->c);
    }
    return rc ? rc : m->ended ? KVQ_OK : spoiled(m, "it is cut off here");
}

static int by_theirs(const void *a, const void *b)
{
    const struct pair *x = a, *y = b;
    return (x->theirs > y->theirs) - (x->theirs < y->theirs);
}

// Keeps the blocks, or, where the file is only looked at, sees that they are there.
static int save_entries(struct import *m, const struct kvq_manifest *parts)
{
    int rc = KVQ_OK;
    for (uint32_t i = 0; i < parts->head->entries && rc == KVQ_OK; i++) {
        const struct kvq_manifest_entry *e = &parts->entries[i];
        const struct pair key = {.theirs = e->block};
        const struct pair *p =
            m->n_pairs ? bsearch(&key, m->pairs, m->n_pairs, sizeof key, by_theirs) : NULL;
        const struct kvq_place place = {e->layer, e->page, e->kind, e->from};
        if (!p)
            return kvq__complain(m->c, KVQ_E_DAMAGED, "block %llu of layer %u is not in it",
                                 (unsigned long long)e->block, e->layer);
        assert(p->theirs == e->block && (p->ours > 0 || !m->save));
        if (m->save)
            rc = kvq_save_keep(m->save, &place, p->ours, m->c->text, m->c->size);
    }
    return rc;
}

static int save_shard(struct import *m, const struct kvq_manifest *parts)
{
    const struct kvq_manifest_head *h = parts->head;
    const struct kvq_store_meta meta = {.space = m->space ? m->space : h->space,
                                        .name = m->name ? m->name : h->name,
                                        .model = h->model,
                                        .formats = h->formats,
                                        .shard = h->shard,
                                        .shards = h->shards,
                                        .tokens = h->tokens,
                                        .saved_at = h->saved_at,
                                        .version = h->opaque_version,
                                        .bytes = parts->opaque,
                                        .n_bytes = h->opaque_bytes};
    int rc = kvq_save_session(m->save, &meta, m->c->text, m->c->size);
    if (rc == KVQ_OK)
        rc = save_entries(m, parts);
    for (uint32_t i = 0; i < h->prefixes && rc == KVQ_OK; i++)
        rc = kvq_save_prefix(m->save, parts->prefixes[i], m->c->text, m->c->size);
    return rc;
}

// Whether there is such a session already.
static int check_name(struct kvq_store *s, const char *space, const char *name, uint32_t shards,
                      bool replace, const struct kvq__complaint *c)
{
    for (uint32_t i = 0; i < KVQ_MAX_SHARDS; i++) {
        struct kvq_store_session there;
        int rc = kvq_store_find(s, space, name, i, &there, c->text, c->size);
        if (rc == KVQ_E_NO_SESSION)
            continue;
        if (rc)
            return rc;
        if (!replace)
            return kvq__complain(c, KVQ_E_EXISTS,
                                 "there is a session %s of %s; give another "
                                 "name, or replace it",
                                 name, space);
        if (there.shards != shards)
            return kvq__complain(c, KVQ_E_EXISTS,
                                 "the session %s of %s has %u shards, this "
                                 "one %u; delete it first",
                                 name, space, there.shards, shards);
    }
    return KVQ_OK;
}

static int check_own_name(struct import *m)
{
    assert(m->ended && m->n > 0);
    const struct kvq_manifest_head *h = m->parts[0].head;
    return check_name(m->s, m->space ? m->space : h->space, m->name ? m->name : h->name, h->shards,
                      m->replace, m->c);
}

// A session is opened with all its shards, of which a file has each once.
static int check_shards(const struct import *m)
{
    assert(m->ended && m->n > 0);
    uint32_t shards = m->parts[0].head->shards;
    for (size_t i = 1; i < m->n; i++)
        for (size_t j = 0; j < i; j++)
            if (m->parts[i].head->shard == m->parts[j].head->shard)
                return kvq__complain(m->c, KVQ_E_DAMAGED, "it holds shard %u twice",
                                     m->parts[i].head->shard);
    return m->n == shards ? KVQ_OK
                          : kvq__complain(m->c, KVQ_E_DAMAGED,
                                          "it holds %zu of %u shards, and a session is opened with "
                                          "all of them: export it again where it came from",
                                          m->n, shards);
}

static int import_sessions(struct import *m)
{
    int rc = take_all_records(m);
    if (rc == KVQ_OK)
        rc = check_shards(m);
    if (rc == KVQ_OK)
        rc = check_own_name(m);
    for (size_t i = 0; i < m->n && rc == KVQ_OK; i++)
        rc = save_shard(m, &m->parts[i]);
    return rc ? rc : kvq_save_commit(&m->save, m->c->text, m->c->size);
}

// Front and length of the file.
static int open_walk(struct import *m)
{
    struct kvq_file_head head;
    struct kvq_io_status status;
    uint16_t version;
    int rc = kvq_io_status(m->s->io, m->walk.file, &status);
    if (rc)
        return complain_of_reading(m->c, rc, "looked at");
    rc = kvq_segment_front(m->s->io, m->walk.file, &head, &version);
    if (rc < 0)
        return complain_of_reading(m->c, rc, "read");
    if (version > KVQ_RECORD_VERSION)
        return kvq__complain(m->c, KVQ_E_VERSION, "is of version %u; this program knows up to %d",
                             version, KVQ_RECORD_VERSION);
    if (rc || head.number != 0)
        return kvq__complain(m->c, KVQ_E_INVALID, "is no session that was exported");
    m->walk.salt = head.salt;
    m->walk.end = status.bytes;
    m->walk.next = KVQ_SEGMENT_FRONT;
    return KVQ_OK;
}

// A file with damage is refused, so an import does not look for what stands behind the damage: the
// file may have any length, and nobody else writes to the store meanwhile.
static uint64_t nothing_behind(void *context, uint64_t from)
{
    (void)context, (void)from;
    return UINT64_MAX;
}

// Opens the file, with a walk that is to start behind its front. close_import frees what that took.
static int open_import(struct import *m, const char *path)
{
    struct kvq_io *io = m->s->io;
    m->walk = (struct kvq_walk){
        .io = io, .file = -1, .known = nothing_behind, .buffer_bytes = KVQ__WALK_BYTES};
    m->walk.too_long = 1ull << KVQ_MAX_STORE_BLOCK_LOG2;
    m->walk.buffer = malloc(KVQ__WALK_BYTES);
    if (!m->walk.buffer)
        return kvq__complain(m->c, KVQ_E_NO_MEMORY, "no memory");
    m->walk.file = kvq_io_open(io, path, KVQ_IO_READ);
    return m->walk.file < 0 ? complain_of_reading(m->c, m->walk.file, "opened") : open_walk(m);
}

static void close_import(struct import *m)
{
    for (size_t i = 0; i < m->n; i++)
        free(m->manifests[i]);
    free(m->manifests);
    free(m->parts);
    free(m->pairs);
    if (m->walk.file >= 0)
        m->s->io->close(m->s->io, m->walk.file);
    free(m->walk.buffer);
}

static void fill_session(const struct import *m, struct kvq_store_session *out)
{
    const struct kvq_manifest_head *h = m->parts[0].head;
    memcpy(out->space, h->space, sizeof out->space);
    memcpy(out->name, h->name, sizeof out->name);
    out->tokens = h->tokens;
    out->shard = h->shard;
    out->shards = h->shards;
}

int kvq_store_exported(struct kvq_store *store, const char *path, struct kvq_store_session *out,
                       char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    struct import m = {.s = store, .c = &c};
    memset(out, 0, sizeof *out);
    int rc = open_import(&m, path);
    int find = rc ? 0 : kvq_walk_next(&m.walk);
    if (find < 0)
        rc = complain_of_reading(&c, find, "read");
    else if (rc == KVQ_OK && (find != KVQ_WALK_RECORD || m.walk.record.kind != KVQ_RECORD_MANIFEST))
        rc = spoiled(&m, "no session stands there");
    if (rc == KVQ_OK)
        rc = take_manifest(&m);
    if (rc == KVQ_OK)
        fill_session(&m, out);
    close_import(&m);
    return rc;
}

static int fill_file(const struct import *m, struct kvq_store_file *out)
{
    const struct kvq_manifest_head *h = m->parts[0].head;
    out->opaque = malloc(h->opaque_bytes + 1);
    if (!out->opaque)
        return kvq__complain(m->c, KVQ_E_NO_MEMORY, "no memory");
    memcpy(out->opaque, m->parts[0].opaque, h->opaque_bytes);
    fill_session(m, &out->session);
    out->session.version = h->opaque_version;
    out->session.n_bytes = h->opaque_bytes;
    out->session.blocks = m->n_pairs;
    out->session.bytes = m->bytes;
    return KVQ_OK;
}

int kvq_store_look(struct kvq_store *store, const char *path, const struct kvq_store_watch *watch,
                   struct kvq_store_file *out, char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    struct import m = {.s = store, .c = &c, .watch = watch};
    memset(out, 0, sizeof *out);
    int rc = open_import(&m, path);
    if (rc == KVQ_OK)
        rc = take_all_records(&m);
    if (rc == KVQ_OK)
        rc = check_shards(&m);
    for (size_t i = 0; i < m.n && rc == KVQ_OK; i++)
        rc = save_entries(&m, &m.parts[i]);
    if (rc == KVQ_OK)
        rc = fill_file(&m, out);
    close_import(&m);
    return rc;
}

int kvq_store_look_name(struct kvq_store *store, const char *path,
                        const struct kvq_store_file *file, const char *space, const char *name,
                        bool replace, char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    return check_name(store, space, name, file->session.shards, replace, &c);
}

int kvq_store_import(struct kvq_store *store, const char *path, const char *space, const char *name,
                     bool replace, char *text, size_t n)
{
    return kvq_store_import_watched(store, path, space, name, replace, NULL, text, n);
}

int kvq_store_import_watched(struct kvq_store *store, const char *path, const char *space,
                             const char *name, bool replace, const struct kvq_store_watch *watch,
                             char *text, size_t n)
{
    const struct kvq__complaint c = {path, text, n};
    struct import m = {.s = store, .c = &c, .space = space, .name = name, .replace = replace};
    m.watch = watch;
    int rc = open_import(&m, path);
    if (rc == KVQ_OK)
        rc = kvq_save_begin(store, &m.save, text, n);
    if (rc == KVQ_OK)
        rc = import_sessions(&m);
    kvq_save_abort(&m.save);
    close_import(&m);
    return rc;
}
