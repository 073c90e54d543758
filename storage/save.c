// SPDX-License-Identifier: Apache-2.0
//
// Saving: blocks are written as they come; manifests, the sync and the catalog come at the end.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "proto/wire.h"
#include "storage/quota.h"

bool kvq__grow(void **array, size_t *room, size_t n, size_t size)
{
    assert(n <= *room && size > 0);
    if (n < *room)
        return true;
    size_t more = *room ? 2 * *room : 16;
    void *moved = realloc(*array, more * size);
    if (!moved)
        return false;
    *array = moved;
    *room = more;
    return true;
}

// ---- Beginning ----

// Space is kept to delete them.
static int find_largest(struct kvq_store *s, struct kvq__largest *largest,
                        const struct kvq__complaint *c)
{
    struct kvq__catalog *k = &s->catalog;
    *largest = (struct kvq__largest){0};
    pthread_mutex_lock(&s->catalog_lock);
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_SESSION_LARGEST, "");
    int rc = kvq__next(k, rows);
    if (rc == 1) { // NULLs, where there are no sessions, are 0
        largest->blocks = (uint64_t)sqlite3_column_int64(rows, 0);
        largest->hashes = (uint64_t)sqlite3_column_int64(rows, 1) / KVQ__HASH_TOKENS;
        (void)sqlite3_reset(rows);
    }
    rc = rc < 0 ? kvq__catalog_complain(s, rc, c) : KVQ_OK;
    pthread_mutex_unlock(&s->catalog_lock);
    return rc;
}

int kvq_save_begin(struct kvq_store *store, struct kvq_save **save, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__largest largest = {0};
    *save = NULL;
    int rc = kvq__write_begin(store, &c);
    if (rc)
        return rc;
    struct kvq_save *v = calloc(1, sizeof *v);
    rc = v ? find_largest(store, &largest, &c) : kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory");
    if (rc == KVQ_OK)
        rc = kvq__writer_begin(store, false, largest.blocks / 2, &c); // they take half of a new row
    if (rc == KVQ_OK)
        rc = kvq__catalog_hold(store, &largest, &c);
    if (rc) {
        free(v);
        kvq__write_end(store);
        return rc;
    }
    v->store = store;
    v->first_block = store->next_block;
    store->writer.largest = largest;
    *save = v;
    return KVQ_OK;
}

static void free_session(struct kvq__save_session *session)
{
    free(session->entries);
    free(session->prefixes);
    free(session->opaque);
}

static void free_save(struct kvq_save **save)
{
    struct kvq_save *v = *save;
    assert(v->n <= v->room && v->n_written <= v->room_written && v->n_gone <= v->room_gone);
    for (size_t i = 0; i < v->n; i++)
        free_session(&v->sessions[i]);
    free(v->sessions);
    free(v->gone);
    free(v->written);
    kvq__write_end(v->store);
    free(v);
    *save = NULL;
}

void kvq_save_abort(struct kvq_save **save)
{
    if (!save || !*save)
        return;
    kvq__writer_undo((*save)->store);
    free_save(save);
}

// ---- Sessions ----

// Copies a string of less than n bytes that is to be shown and searched.
static int copy_text(char *to, size_t n, const char *what, const char *from, bool needed,
                     const struct kvq__complaint *c)
{
    size_t used = from ? strlen(from) : 0;
    if (used >= n)
        return kvq__complain(c, KVQ_E_LIMIT, "the %s has %zu bytes; at most %zu are allowed", what,
                             used, n - 1);
    if (used == 0 && needed)
        return kvq__complain(c, KVQ_E_INVALID, "the %s is empty", what);
    if (used && !kvq_text_valid(from, used))
        return kvq__complain(c, KVQ_E_INVALID, "the %s holds control characters or is not UTF-8",
                             what);
    memset(to, 0, n);
    if (used)
        memcpy(to, from, used); // NOLINT(bugprone-not-null-terminated-result): zeros stand behind
    return KVQ_OK;
}

static int make_head(struct kvq_manifest_head *h, const struct kvq_store_meta *meta,
                     const struct kvq__complaint *c)
{
    *h = (struct kvq_manifest_head){.version = KVQ_MANIFEST_VERSION,
                                    .opaque_version = meta->version,
                                    .tokens = meta->tokens,
                                    .saved_at = meta->saved_at,
                                    .shard = meta->shard,
                                    .shards = meta->shards,
                                    .opaque_bytes = (uint32_t)meta->n_bytes};
    if (meta->n_bytes > KVQ_MAX_STORE_META)
        return kvq__complain(c, KVQ_E_LIMIT, "%zu opaque bytes; at most %d are allowed",
                             meta->n_bytes, KVQ_MAX_STORE_META);
    if (meta->shards == 0 || meta->shards > KVQ_MAX_SHARDS || meta->shard >= meta->shards)
        return kvq__complain(c, KVQ_E_INVALID, "shard %u of %u: at most %d are allowed",
                             meta->shard, meta->shards, KVQ_MAX_SHARDS);
    if (meta->tokens > KVQ_MAX_SESSION_TOKENS)
        return kvq__complain(c, KVQ_E_LIMIT, "%llu tokens; at most %d are allowed",
                             (unsigned long long)meta->tokens, KVQ_MAX_SESSION_TOKENS);
    int rc = copy_text(h->space, sizeof h->space, "namespace", meta->space, true, c);
    if (rc == KVQ_OK)
        rc = copy_text(h->name, sizeof h->name, "name", meta->name, true, c);
    if (rc == KVQ_OK)
        rc = copy_text(h->model, sizeof h->model, "model", meta->model, false, c);
    if (rc == KVQ_OK)
        rc = copy_text(h->formats, sizeof h->formats, "list of formats", meta->formats, false, c);
    return rc;
}

static bool same_session(const struct kvq_manifest_head *a, const struct kvq_manifest_head *b)
{
    return a->shard == b->shard && strcmp(a->space, b->space) == 0 && strcmp(a->name, b->name) == 0;
}

static int add_session(struct kvq_save *v, const struct kvq_store_meta *meta,
                       const struct kvq__complaint *c)
{
    struct kvq__save_session session = {0};
    int rc = make_head(&session.head, meta, c);
    if (rc)
        return rc;
    for (size_t i = 0; i < v->n; i++)
        if (same_session(&v->sessions[i].head, &session.head))
            return kvq__complain(c, KVQ_E_INVALID, "shard %u of %s is in this save already",
                                 meta->shard, meta->name);
    if (v->n == KVQ_MAX_STORE_SESSIONS)
        return kvq__complain(c, KVQ_E_LIMIT, "a save has at most %d sessions",
                             KVQ_MAX_STORE_SESSIONS);
    rc = kvq__quota_begin(v, &session, c);
    if (rc)
        return rc;
    session.opaque = malloc(meta->n_bytes + 1);
    if (!session.opaque || !kvq__grow((void **)&v->sessions, &v->room, v->n, sizeof session)) {
        free(session.opaque);
        return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory");
    }
    if (meta->n_bytes)
        memcpy(session.opaque, meta->bytes, meta->n_bytes);
    v->sessions[v->n++] = session;
    return KVQ_OK;
}

// The first failure makes the commit fail.
static int note_failure(struct kvq_save *v, size_t session, int rc)
{
    assert(rc <= 0 && session <= v->n);
    if (rc && !v->failure) {
        v->failure = rc;
        v->failed = session;
    }
    return rc;
}

int kvq_save_session(struct kvq_save *save, const struct kvq_store_meta *meta, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(save->store, text, n);
    size_t at = save->n;
    assert(save->store->writing);
    return note_failure(save, at, add_session(save, meta, &c));
}

static size_t last_session(const struct kvq_save *v)
{
    return v->n ? v->n - 1 : 0;
}

uint32_t kvq_save_count(const struct kvq_save *save)
{
    return (uint32_t)save->n;
}

bool kvq_save_cut(struct kvq_save *save, uint32_t sessions)
{
    assert(sessions <= save->n);
    if (save->torn || (save->failure && save->failed < sessions))
        return false;
    save->failure = 0;
    while (save->n > sessions)
        free_session(&save->sessions[--save->n]);
    return true;
}

// ---- Blocks ----

static int add_entry(struct kvq_save *v, const struct kvq_place *place, uint64_t id, uint64_t bytes,
                     const struct kvq__complaint *c)
{
    if (v->n == 0)
        return kvq__complain(c, KVQ_E_INVALID, "no session was named yet");
    if (place->from >= KVQ_MAX_STORE_NUMBER)
        return kvq__complain(c, KVQ_E_LIMIT, "token %llu; fewer than 2^62 are allowed",
                             (unsigned long long)place->from);
    struct kvq__save_session *session = &v->sessions[v->n - 1];
    assert(id > 0 && id < v->store->next_block);
    if (session->head.entries == UINT32_MAX ||
        !kvq__grow((void **)&session->entries, &session->room_entries, session->head.entries,
                   sizeof *session->entries))
        return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory");
    session->entries[session->head.entries++] = (struct kvq_manifest_entry){.block = id,
                                                                            .from = place->from,
                                                                            .layer = place->layer,
                                                                            .page = place->page,
                                                                            .kind = place->kind};
    session->bytes += bytes;
    v->store->writer.rows++;
    return KVQ_OK;
}

int kvq__save_block(struct kvq_save *v, const void *data, size_t bytes, uint64_t *id,
                    const struct kvq__complaint *c)
{
    struct kvq_store *s = v->store;
    assert(s->writing && s->next_block == v->first_block + v->n_written);
    if (bytes >> KVQ_MAX_STORE_BLOCK_LOG2)
        return kvq__complain(c, KVQ_E_LIMIT, "a block of %zu bytes; fewer than 2^%d are allowed",
                             bytes, KVQ_MAX_STORE_BLOCK_LOG2);
    if (!kvq__grow((void **)&v->written, &v->room_written, v->n_written, sizeof *v->written))
        return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory");
    int rc =
        kvq__append(s, KVQ_RECORD_BLOCK, s->next_block, data, bytes, &v->written[v->n_written], c);
    v->torn |= rc != KVQ_OK;
    if (rc)
        return rc;
    v->n_written++;
    *id = s->next_block++;
    return KVQ_OK;
}

int kvq_save_put(struct kvq_save *save, const struct kvq_place *place, const void *data,
                 size_t bytes, uint64_t *id, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(save->store, text, n);
    *id = 0;
    if (save->n)
        save->sessions[save->n - 1].put += bytes;
    int rc = save->n ? kvq__quota_put(save, &c) : KVQ_OK;
    if (rc == KVQ_OK)
        rc = kvq__save_block(save, data, bytes, id, &c);
    if (rc == KVQ_OK)
        rc = add_entry(save, place, *id, bytes, &c);
    return note_failure(save, last_session(save), rc);
}

// Looks among the blocks of this save, then in the catalog.
static int find_block(struct kvq_save *v, uint64_t id, uint64_t *bytes,
                      const struct kvq__complaint *c)
{
    struct kvq_store *s = v->store;
    struct kvq_stored block;
    enum kvq_record_kind kind = KVQ_RECORD_BLOCK;
    if (id >= v->first_block && id < s->next_block) {
        assert(v->written[id - v->first_block].id == id);
        *bytes = v->written[id - v->first_block].length; // one after the other since the beginning
        return KVQ_OK;
    }
    pthread_mutex_lock(&s->catalog_lock);
    int rc = kvq__block_find(s, id, &block, &kind);
    pthread_mutex_unlock(&s->catalog_lock);
    if (rc == KVQ_E_NO_SESSION || (rc == KVQ_OK && kind != KVQ_RECORD_BLOCK))
        return kvq__complain(c, KVQ_E_NO_SESSION, "there is no block %llu (any more); put it again",
                             (unsigned long long)id);
    if (rc)
        return kvq__catalog_complain(s, rc, c);
    if (block.bad)
        return kvq__complain(c, KVQ_E_DAMAGED, "block %llu is damaged; put it again",
                             (unsigned long long)id);
    *bytes = block.bytes;
    return KVQ_OK;
}

int kvq_save_keep(struct kvq_save *save, const struct kvq_place *place, uint64_t id, char *text,
                  size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(save->store, text, n);
    uint64_t bytes = 0;
    int rc = find_block(save, id, &bytes, &c);
    if (rc == KVQ_OK)
        rc = note_failure(save, last_session(save), add_entry(save, place, id, bytes, &c));
    return rc;
}

int kvq_save_prefix(struct kvq_save *save, const uint8_t hash[KVQ_PREFIX_BYTES], char *text,
                    size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(save->store, text, n);
    struct kvq__save_session *session = save->n ? &save->sessions[save->n - 1] : NULL;
    int rc = KVQ_OK;
    if (!session)
        rc = kvq__complain(&c, KVQ_E_INVALID, "no session was named yet");
    else if (!kvq__grow((void **)&session->prefixes, &session->room_prefixes,
                        session->head.prefixes, KVQ_PREFIX_BYTES))
        rc = kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory");
    else
        memcpy(session->prefixes[session->head.prefixes++], hash, KVQ_PREFIX_BYTES);
    save->store->writer.rows++;
    return note_failure(save, last_session(save), rc);
}

// ---- Committing ----

static int by_entry_place(const void *a, const void *b)
{
    return kvq_manifest_order(a, b);
}

static int sort_entries(struct kvq__save_session *session, const struct kvq__complaint *c)
{
    uint32_t n = session->head.entries;
    if (n > 1)
        qsort(session->entries, n, sizeof *session->entries, by_entry_place);
    for (uint32_t i = 1; i < n; i++)
        if (by_entry_place(&session->entries[i - 1], &session->entries[i]) == 0)
            return kvq__complain(c, KVQ_E_INVALID,
                                 "%s has two blocks at layer %u, page %u, kind %u",
                                 session->head.name, session->entries[i].layer,
                                 session->entries[i].page, session->entries[i].kind);
    return KVQ_OK;
}

// A session that replaces one has its id; another one gets the next.
static int name_session(struct kvq_store *s, struct kvq__save_session *session,
                        const struct kvq__complaint *c)
{
    struct kvq_store_session old;
    pthread_mutex_lock(&s->catalog_lock);
    sqlite3_stmt *rows = kvq__rows(&s->catalog, KVQ_Q_SESSION_FIND, "tti", session->head.space,
                                   session->head.name, (int64_t)session->head.shard);
    int rc = kvq__next(&s->catalog, rows);
    session->known = rc == 1;
    if (rc == 1) {
        kvq__session_row(rows, &old, &session->old_manifest);
        (void)sqlite3_reset(rows);
    }
    if (rc < 0)
        rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    session->head.session = session->known ? old.id : s->next_session++;
    return rc < 0 ? rc : KVQ_OK;
}

static int write_manifest(struct kvq_save *v, struct kvq__save_session *session,
                          const struct kvq__complaint *c)
{
    struct kvq_store *s = v->store;
    assert(session->head.session > 0 && session->manifest == 0);
    const struct kvq_manifest parts = {&session->head, session->entries,
                                       (const uint8_t(*)[KVQ_PREFIX_BYTES])session->prefixes,
                                       session->opaque};
    void *bytes = kvq_manifest_make(&parts);
    if (!bytes ||
        !kvq__grow((void **)&v->written, &v->room_written, v->n_written, sizeof *v->written)) {
        free(bytes);
        return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory for the manifest of %s",
                             session->head.name);
    }
    session->manifest = s->next_block++;
    int rc = kvq__append(s, KVQ_RECORD_MANIFEST, session->manifest, bytes,
                         kvq_manifest_bytes(&session->head), &v->written[v->n_written], c);
    v->n_written += rc == KVQ_OK;
    free(bytes);
    return rc;
}

static bool is_saved_here(const struct kvq_save *v, const struct kvq_store_session *s)
{
    for (size_t i = 0; i < v->n; i++)
        if (v->sessions[i].known && v->sessions[i].head.session == s->id)
            return true;
    return false;
}

// Notes the shards of a session that are there from a save with another number of shards.
static int find_gone(struct kvq_save *v, const struct kvq_manifest_head *h,
                     const struct kvq__complaint *c)
{
    struct kvq_store *s = v->store;
    pthread_mutex_lock(&s->catalog_lock);
    sqlite3_stmt *rows = kvq__rows(&s->catalog, KVQ_Q_SESSION_SHARDS, "tt", h->space, h->name);
    int rc = kvq__next(&s->catalog, rows);
    while (rc == 1) {
        struct kvq_store_session old;
        struct kvq__save_gone gone = {0};
        kvq__session_row(rows, &old, &gone.manifest);
        if (old.shards != h->shards && !is_saved_here(v, &old)) {
            if (!kvq__grow((void **)&v->gone, &v->room_gone, v->n_gone, sizeof gone)) {
                (void)sqlite3_reset(rows);
                rc = KVQ_E_NO_MEMORY;
                break;
            }
            gone.session = old.id;
            v->gone[v->n_gone++] = gone;
            s->writer.rows += old.blocks;
        }
        rc = kvq__next(&s->catalog, rows);
    }
    if (rc < 0)
        rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    return rc;
}

static bool is_first_shard(const struct kvq_save *v, size_t i)
{
    const struct kvq_manifest_head *h = &v->sessions[i].head;
    for (size_t j = 0; j < i; j++)
        if (strcmp(v->sessions[j].head.space, h->space) == 0 &&
            strcmp(v->sessions[j].head.name, h->name) == 0)
            return false;
    return true;
}

// What a catalog that is made anew must know not to count any more.
static int write_gone(struct kvq_save *v, const struct kvq__complaint *c)
{
    int rc = KVQ_OK;
    for (size_t i = 0; i < v->n && rc == KVQ_OK; i++)
        if (is_first_shard(v, i))
            rc = find_gone(v, &v->sessions[i].head, c);
    for (size_t i = 0; i < v->n_gone && rc == KVQ_OK; i++)
        rc = kvq__append(v->store, KVQ_RECORD_DROP, v->store->next_block++, &v->gone[i].session,
                         sizeof v->gone[i].session, &v->gone[i].drop, c);
    return rc;
}

static int write_records(struct kvq_save *v, const struct kvq__complaint *c)
{
    int rc = v->failure;
    if (rc)
        return kvq__complain(c, rc, "a part of the save had failed before");
    if (v->n == 0)
        return kvq__complain(c, KVQ_E_INVALID, "the save has no session in it");
    for (size_t i = 0; i < v->n && rc == KVQ_OK; i++) {
        rc = sort_entries(&v->sessions[i], c);
        if (rc == KVQ_OK)
            rc = name_session(v->store, &v->sessions[i], c);
        if (rc == KVQ_OK)
            rc = write_manifest(v, &v->sessions[i], c);
    }
    if (rc == KVQ_OK)
        rc = write_gone(v, c);
    return rc ? rc : kvq__writer_sync(v->store, v->n + v->n_gone, c);
}

static int catalog_gone(struct kvq_save *v)
{
    int rc = KVQ_OK;
    for (size_t i = 0; i < v->n_gone && rc == KVQ_OK; i++) {
        rc = kvq__catalog_own(v->store, &v->gone[i].drop);
        if (rc == KVQ_OK)
            rc = kvq__apply_drop(v->store, v->gone[i].session, v->gone[i].manifest);
    }
    return rc;
}

static int catalog_records(struct kvq_save *v, const struct kvq__complaint *c)
{
    struct kvq_store *s = v->store;
    struct kvq__largest all = {0}, *most = &s->writer.largest;
    assert(v->n > 0 && !v->failure);
    for (size_t i = 0; i < v->n; i++) {
        const struct kvq_manifest_head *head = &v->sessions[i].head;
        uint64_t hashes = (uint64_t)head->prefixes * head->shards;
        all.blocks += head->entries; // as if they were one
        all.hashes = hashes > all.hashes ? hashes : all.hashes;
    }
    most->blocks = all.blocks > most->blocks ? all.blocks : most->blocks;
    most->hashes = all.hashes > most->hashes ? all.hashes : most->hashes;
    int rc = kvq__catalog_hold(s, most, c);
    if (rc == KVQ_OK)
        rc = kvq__catalog_begin(s, c);
    if (rc)
        return rc;
    rc = kvq__catalog_segments(s);
    if (rc == KVQ_OK)
        rc = kvq__catalog_blocks(s, v->written, v->n_written);
    for (size_t i = 0; i < v->n && rc == KVQ_OK; i++)
        rc = kvq__apply_session(s, &v->sessions[i]);
    if (rc == KVQ_OK)
        rc = catalog_gone(v);
    if (rc == KVQ_OK)
        rc = kvq__quota_end(v, c);
    if (rc == KVQ_OK)
        rc = kvq__catalog_free_blocks(s);
    return kvq__catalog_end(s, rc, c);
}

int kvq_save_commit(struct kvq_save **save, char *text, size_t n)
{
    assert((*save)->store->writing);
    const struct kvq__complaint c = kvq__store_complaint((*save)->store, text, n);
    int rc = write_records(*save, &c);
    if (rc == KVQ_OK)
        rc = catalog_records(*save, &c);
    if (rc)
        kvq__writer_undo((*save)->store);
    free_save(save);
    return rc;
}
