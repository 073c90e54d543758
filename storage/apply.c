// SPDX-License-Identifier: Apache-2.0
//
// A session's rows in the catalog: only what differs from its last save is changed, so that saving
// a few new blocks of a long session costs a few rows.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/quota.h"

static int reference(struct kvq_store *s, uint64_t block, int64_t change)
{
    return kvq__run(&s->catalog, KVQ_Q_BLOCK_REF, "ii", change, (int64_t)block);
}

// ---- Entries ----

// The session's entries as they stand in the catalog, *entries to be freed.
static int old_entries(struct kvq_store *s, uint64_t session, struct kvq_manifest_entry **entries,
                       size_t *count)
{
    struct kvq__catalog *k = &s->catalog;
    size_t room = 0;
    *entries = NULL;
    *count = 0;
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_ENTRY_ALL, "i", (int64_t)session);
    int rc = kvq__next(k, rows);
    while (rc == 1) {
        if (!kvq__grow((void **)entries, &room, *count, sizeof **entries)) {
            (void)sqlite3_reset(rows);
            return KVQ_E_NO_MEMORY;
        }
        (*entries)[(*count)++] = (struct kvq_manifest_entry){
            .layer = (uint32_t)sqlite3_column_int64(rows, 0),
            .page = (uint32_t)sqlite3_column_int64(rows, 1),
            .kind = (uint32_t)sqlite3_column_int64(rows, 2),
            .block = (uint64_t)sqlite3_column_int64(rows, 3),
            .from = (uint64_t)sqlite3_column_int64(rows, 4),
        };
        rc = kvq__next(k, rows);
    }
    return rc;
}

// A session whose entries change, and by how much its namespace grows.
struct change {
    struct kvq_store *s;
    int64_t session, space, bytes;
};

static int drop_entry(struct change *c, const struct kvq_manifest_entry *e)
{
    int rc = kvq__space_use(c->s, c->space, e->block, -1, &c->bytes);
    return rc ? rc
              : kvq__run(&c->s->catalog, KVQ_Q_ENTRY_DROP, "iiii", c->session, (int64_t)e->layer,
                         (int64_t)e->page, (int64_t)e->kind);
}

static int put_entry(struct change *c, const struct kvq_manifest_entry *e)
{
    int rc = kvq__space_use(c->s, c->space, e->block, 1, &c->bytes);
    return rc ? rc
              : kvq__run(&c->s->catalog, KVQ_Q_ENTRY_PUT, "iiiiii", c->session, (int64_t)e->layer,
                         (int64_t)e->page, (int64_t)e->kind, (int64_t)e->block, (int64_t)e->from);
}

// Both entries are at the same place.
static int replace_entry(struct change *c, const struct kvq_manifest_entry *was,
                         const struct kvq_manifest_entry *is)
{
    if (was->block == is->block && was->from == is->from)
        return KVQ_OK;
    int rc = drop_entry(c, was);
    return rc ? rc : put_entry(c, is);
}

// Walks along the old entries and the new ones, both ascending, and changes what differs.
static int merge_entries(struct kvq_store *s, const struct kvq__save_session *session)
{
    struct kvq_manifest_entry *old = NULL;
    const struct kvq_manifest_entry *new = session->entries;
    size_t n_old = 0, i = 0, j = 0, n_new = session->head.entries;
    struct change c = {.s = s, .session = (int64_t)session->head.session};
    int rc = kvq__space_id(s, session->head.space, &c.space);
    if (rc == KVQ_OK && session->known)
        rc = old_entries(s, session->head.session, &old, &n_old);
    while (rc == KVQ_OK && (i < n_old || j < n_new)) {
        assert(j == 0 || j == n_new || kvq_manifest_order(&new[j - 1], &new[j]) < 0);
        int order = i == n_old ? 1 : j == n_new ? -1 : kvq_manifest_order(&old[i], &new[j]);
        if (order < 0)
            rc = drop_entry(&c, &old[i++]);
        else if (order > 0)
            rc = put_entry(&c, &new[j++]);
        else
            rc = replace_entry(&c, &old[i++], &new[j++]);
    }
    free(old);
    return rc ? rc : kvq__space_add(s, c.space, c.bytes);
}

// ---- Prefixes ----

// How many of the hashes in the catalog are the first ones of the new list.
static int same_prefixes(struct kvq_store *s, const struct kvq__save_session *session,
                         uint32_t *same)
{
    struct kvq__catalog *k = &s->catalog;
    *same = 0;
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_PREFIX_ALL, "i", (int64_t)session->head.session);
    int rc = kvq__next(k, rows);
    while (rc == 1 && *same < session->head.prefixes &&
           sqlite3_column_bytes(rows, 0) == KVQ_PREFIX_BYTES &&
           memcmp(sqlite3_column_blob(rows, 0), session->prefixes[*same], KVQ_PREFIX_BYTES) == 0) {
        ++*same;
        rc = kvq__next(k, rows);
    }
    if (rc == 1)
        (void)sqlite3_reset(rows);
    return rc < 0 ? rc : KVQ_OK;
}

static int merge_prefixes(struct kvq_store *s, const struct kvq__save_session *session)
{
    uint32_t same = 0;
    int64_t id = (int64_t)session->head.session;
    int rc = session->known ? same_prefixes(s, session, &same) : KVQ_OK;
    if (rc == KVQ_OK && session->known)
        rc = kvq__run(&s->catalog, KVQ_Q_PREFIX_CUT, "ii", id, (int64_t)same);
    assert(same <= session->head.prefixes);
    for (uint32_t i = same; i < session->head.prefixes && rc == KVQ_OK; i++)
        rc = kvq__run(&s->catalog, KVQ_Q_PREFIX_PUT, "tbii", session->head.space,
                      (const void *)session->prefixes[i], (size_t)KVQ_PREFIX_BYTES, id, (int64_t)i);
    return rc;
}

// ---- Sessions ----

static int put_session(struct kvq_store *s, const struct kvq__save_session *session)
{
    const struct kvq_manifest_head *h = &session->head;
    return kvq__run(&s->catalog, KVQ_Q_SESSION_PUT, "iittiittiiiiiibi", (int64_t)h->session,
                    (int64_t)s->next_transaction, h->space, h->name, (int64_t)h->shard,
                    (int64_t)h->shards, h->model, h->formats, (int64_t)h->tokens,
                    (int64_t)h->entries, (int64_t)session->bytes, h->saved_at, h->saved_at,
                    (int64_t)h->opaque_version, (const void *)session->opaque,
                    (size_t)h->opaque_bytes, (int64_t)session->manifest);
}

int kvq__apply_session(struct kvq_store *s, struct kvq__save_session *session)
{
    assert(session->manifest > 0 && !sqlite3_get_autocommit(s->catalog.db));
    int rc = merge_entries(s, session);
    if (rc == KVQ_OK)
        rc = merge_prefixes(s, session);
    if (rc == KVQ_OK && session->known)
        rc = reference(s, session->old_manifest, -1);
    if (rc == KVQ_OK)
        rc = reference(s, session->manifest, 1);
    return rc ? rc : put_session(s, session);
}

int kvq__apply_drop(struct kvq_store *s, uint64_t session, uint64_t manifest)
{
    struct kvq__catalog *k = &s->catalog;
    assert(!sqlite3_get_autocommit(k->db));
    struct kvq_manifest_entry *old;
    size_t n_old;
    int64_t space = 0, bytes = 0;
    int rc = old_entries(s, session, &old, &n_old);
    if (rc == KVQ_OK)
        rc = kvq__space_of(s, session, &space);
    for (size_t i = 0; i < n_old && rc == KVQ_OK; i++)
        rc = kvq__space_use(s, space, old[i].block, -1, &bytes);
    free(old);
    if (rc == KVQ_OK)
        rc = kvq__space_add(s, space, bytes);
    if (rc == KVQ_OK)
        rc = kvq__run(k, KVQ_Q_ENTRY_CLEAR, "i", (int64_t)session);
    if (rc == KVQ_OK)
        rc = kvq__run(k, KVQ_Q_PREFIX_CUT, "ii", (int64_t)session, (int64_t)0);
    if (rc == KVQ_OK)
        rc = reference(s, manifest, -1);
    return rc ? rc : kvq__run(k, KVQ_Q_SESSION_DROP, "i", (int64_t)session);
}
