// SPDX-License-Identifier: Apache-2.0
//
// What the sessions of a namespace take, and the limits on it. The catalog counts how many entries
// of a namespace's sessions name a block: the first adds the block's bytes, the last takes them
// away. So a block that sessions of one namespace share counts once, and one that two namespaces
// share counts in both.
#include "storage/quota.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"

// ---- The catalog's part, within a transaction ----

int kvq__space_id(struct kvq_store *s, const char *space, int64_t *id)
{
    struct kvq__catalog *k = &s->catalog;
    int rc = kvq__run(k, KVQ_Q_SPACE_ADD, "t", space);
    if (rc == KVQ_OK)
        rc = kvq__number(k, kvq__rows(k, KVQ_Q_SPACE_ID, "t", space), 0, id);
    return rc; // an edited catalog may have any number there
}

int kvq__space_of(struct kvq_store *s, uint64_t session, int64_t *id)
{
    struct kvq__catalog *k = &s->catalog;
    return kvq__number(k, kvq__rows(k, KVQ_Q_SPACE_OF, "i", (int64_t)session), 0, id);
}

// Whether it was the first use, or the last one. Queries that say nothing back take half the time.
static int count_use(struct kvq_store *s, int64_t space, int64_t block, int64_t change, bool *edge)
{
    struct kvq__catalog *k = &s->catalog;
    int rc = kvq__run(k, change > 0 ? KVQ_Q_USE_NEW : KVQ_Q_USE_LESS, "ii", space, block);
    bool changed = rc == KVQ_OK && sqlite3_changes(k->db) > 0;
    *edge = changed == (change > 0);
    if (rc || changed)
        return rc;
    return kvq__run(k, change > 0 ? KVQ_Q_USE_MORE : KVQ_Q_USE_DROP, "ii", space, block);
}

int kvq__space_use(struct kvq_store *s, int64_t space, uint64_t block, int64_t change,
                   int64_t *bytes)
{
    struct kvq__catalog *k = &s->catalog;
    assert(change == 1 || change == -1);
    int64_t length = 0, id = (int64_t)block;
    bool edge = false;
    int rc = kvq__run(k, KVQ_Q_BLOCK_REF, "ii", change, id);
    if (rc == KVQ_OK)
        rc = count_use(s, space, id, change, &edge);
    if (rc == KVQ_OK && edge)
        rc = kvq__number(k, kvq__rows(k, KVQ_Q_BLOCK_LENGTH, "i", id), 0, &length);
    *bytes += change > 0 ? length : -length;
    return rc;
}

int kvq__space_add(struct kvq_store *s, int64_t space, int64_t bytes)
{
    return bytes == 0 ? KVQ_OK : kvq__run(&s->catalog, KVQ_Q_SPACE_BYTES, "ii", bytes, space);
}

// ---- Limits ----

// The caller holds the lock. NULL: the namespace has none.
static struct kvq__limit *find_limit(struct kvq_store *s, const char *space)
{
    for (size_t i = 0; i < s->n_limits; i++)
        if (strcmp(s->limits[i].space, space) == 0)
            return &s->limits[i];
    return NULL;
}

static uint64_t limit_of(struct kvq_store *s, const char *space)
{
    pthread_mutex_lock(&s->lock);
    const struct kvq__limit *limit = find_limit(s, space);
    uint64_t bytes = limit ? limit->bytes : s->default_limit;
    pthread_mutex_unlock(&s->lock);
    return bytes;
}

int kvq_store_limit(struct kvq_store *store, const char *space, uint64_t bytes, char *text,
                    size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    size_t used = space ? strlen(space) : 0;
    if (!space) {
        pthread_mutex_lock(&store->lock);
        store->default_limit = bytes;
        pthread_mutex_unlock(&store->lock);
        return KVQ_OK;
    }
    if (used == 0 || used >= KVQ_NAME_BYTES)
        return kvq__complain(&c, KVQ_E_LIMIT, "a namespace of %zu bytes; 1 to %d are allowed", used,
                             KVQ_NAME_BYTES - 1);
    int rc = KVQ_OK;
    pthread_mutex_lock(&store->lock);
    struct kvq__limit *limit = find_limit(store, space);
    if (!limit) {
        if (kvq__grow((void **)&store->limits, &store->room_limits, store->n_limits,
                      sizeof *limit)) {
            limit = &store->limits[store->n_limits++];
            memcpy(limit->space, space, used + 1);
        } else {
            rc = kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory");
        }
    }
    if (limit)
        limit->bytes = bytes;
    pthread_mutex_unlock(&store->lock);
    return rc;
}

void kvq_store_limit_forget(struct kvq_store *store, const char *space)
{
    pthread_mutex_lock(&store->lock);
    struct kvq__limit *limit = find_limit(store, space);
    assert(!limit || store->n_limits > 0);
    if (limit)
        *limit = store->limits[--store->n_limits];
    pthread_mutex_unlock(&store->lock);
}

// ---- Usage ----

int kvq__space_bytes(struct kvq_store *s, const char *space, uint64_t *bytes)
{
    int64_t sum;
    struct kvq__catalog *k = &s->catalog;
    int rc = kvq__number(k, kvq__rows(k, KVQ_Q_SPACE_GET, "t", space), 0, &sum);
    *bytes = (uint64_t)sum;
    return rc;
}

int kvq_store_usage(struct kvq_store *store, const char *space, uint64_t *bytes, uint64_t *sessions,
                    char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__catalog *k = &store->catalog;
    int64_t count = 0;
    pthread_mutex_lock(&store->catalog_lock);
    int rc = kvq__space_bytes(store, space, bytes);
    if (rc == KVQ_OK)
        rc = kvq__number(k, kvq__rows(k, KVQ_Q_SESSION_NAMES, "t", space), 0, &count);
    if (rc)
        rc = kvq__catalog_complain(store, rc, &c);
    pthread_mutex_unlock(&store->catalog_lock);
    *sessions = (uint64_t)count;
    return rc;
}

static int list_spaces(struct kvq__catalog *k, struct kvq_store_space **spaces, size_t *count)
{
    size_t room = 0;
    sqlite3_stmt *rows = kvq__rows(k, KVQ_Q_SPACE_LIST, "");
    int rc = kvq__next(k, rows);
    while (rc == 1 && kvq__grow((void **)spaces, &room, *count, sizeof **spaces)) {
        struct kvq_store_space *at = &(*spaces)[(*count)++];
        const unsigned char *name = sqlite3_column_text(rows, 0);
        snprintf(at->space, sizeof at->space, "%s", name ? (const char *)name : "");
        at->bytes = (uint64_t)sqlite3_column_int64(rows, 1);
        rc = kvq__next(k, rows);
    }
    if (rc == 1) // no memory
        (void)sqlite3_reset(rows);
    return rc == 1 ? KVQ_E_NO_MEMORY : rc;
}

int kvq_store_spaces(struct kvq_store *store, struct kvq_store_space **spaces, size_t *count,
                     char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    *spaces = NULL;
    *count = 0;
    pthread_mutex_lock(&store->catalog_lock);
    int rc = list_spaces(&store->catalog, spaces, count);
    if (rc)
        rc = kvq__catalog_complain(store, rc, &c);
    pthread_mutex_unlock(&store->catalog_lock);
    if (rc) {
        free(*spaces);
        *spaces = NULL;
    }
    return rc;
}

// ---- Saves ----

static int refuse_quota(const char *space, uint64_t limit, uint64_t used, uint64_t more,
                        const struct kvq__complaint *c)
{
    assert(limit > 0 && more > 0);
    return kvq__complain(c, KVQ_E_QUOTA,
                         "namespace %s may keep %llu bytes, %llu are used, and this save needs "
                         "%llu more: drop saved sessions of it, or raise its limit",
                         space, (unsigned long long)limit, (unsigned long long)used,
                         (unsigned long long)more);
}

int kvq__quota_begin(struct kvq_save *v, struct kvq__save_session *session,
                     const struct kvq__complaint *c)
{
    struct kvq_store *s = v->store;
    assert(session->put == 0 && session->put_before == 0 && session->old_before == 0);
    const struct kvq_manifest_head *h = &session->head;
    int64_t old = 0;
    bool other_shard = false;
    session->limit = limit_of(s, h->space);
    for (size_t i = 0; i < v->n; i++) {
        const struct kvq__save_session *before = &v->sessions[i];
        if (strcmp(before->head.space, h->space) != 0)
            continue;
        session->put_before += before->put;
        session->old_before += before->old_bytes;
        other_shard |= strcmp(before->head.name, h->name) == 0;
    }
    pthread_mutex_lock(&s->catalog_lock);
    int rc = kvq__space_bytes(s, h->space, &session->used);
    if (rc == KVQ_OK)
        rc = kvq__number(&s->catalog,
                         kvq__rows(&s->catalog, KVQ_Q_SESSION_BYTES, "tt", h->space, h->name), 0,
                         &old);
    if (rc)
        rc = kvq__catalog_complain(s, rc, c);
    pthread_mutex_unlock(&s->catalog_lock);
    session->old_bytes = other_shard ? 0 : (uint64_t)old;
    return rc;
}

int kvq__quota_put(const struct kvq_save *v, const struct kvq__complaint *c)
{
    assert(v->n > 0);
    const struct kvq__save_session *last = &v->sessions[v->n - 1];
    uint64_t old = last->old_before + last->old_bytes;
    uint64_t freed = old < last->used ? old : last->used;
    if (last->limit == 0)
        return KVQ_OK;
    uint64_t after = last->used - freed + last->put_before + last->put;
    return after <= last->limit || after <= last->used
               ? KVQ_OK
               : refuse_quota(last->head.space, last->limit, last->used, after - last->used, c);
}

int kvq__quota_end(struct kvq_save *v, const struct kvq__complaint *c)
{
    int rc = KVQ_OK;
    assert(!sqlite3_get_autocommit(v->store->catalog.db));
    for (size_t i = 0; i < v->n && rc == KVQ_OK; i++) {
        const struct kvq__save_session *session = &v->sessions[i];
        const char *space = session->head.space;
        uint64_t after = 0, limit = limit_of(v->store, space); // as it is by now
        if (limit)
            rc = kvq__space_bytes(v->store, space, &after);
        if (rc == KVQ_OK && limit && after > limit && after > session->used)
            rc = refuse_quota(space, limit, session->used, after - session->used, c);
    }
    return rc;
}

static int look_quota(struct kvq_store *s, struct kvq__save_session *session, uint64_t bytes,
                      const struct kvq__complaint *c)
{
    struct kvq_save v = {.store = s};
    int rc = kvq__quota_begin(&v, session, c);
    session->put = bytes;
    v.sessions = session;
    v.n = 1;
    return rc ? rc : kvq__quota_put(&v, c);
}

// What a save of so many blocks takes, the catalog's rows included: not all of the padding.
static uint64_t need_of(const struct kvq_store_session *session)
{
    enum { A_BLOCK = KVQ_RECORD_HEAD + KVQ__RESERVE_ROW };
    return session->bytes + session->blocks * A_BLOCK;
}

static int refuse_disk(const struct kvq_store_status *status, uint64_t room, uint64_t need,
                       const struct kvq__complaint *c)
{
    uint64_t used = status->physical_bytes, cap = status->cap_bytes;
    bool by_cap = cap && (used >= cap || cap - used <= status->free_bytes);
    assert(need > room);
    return kvq__complain(c, KVQ_E_NO_SPACE,
                         "%s about %llu bytes, and the session needs about %llu: %s",
                         by_cap ? "there is room for" : "the disk is full but for",
                         (unsigned long long)room, (unsigned long long)need,
                         by_cap ? "drop saved sessions, or raise storage_bytes"
                                : "free some of the disk, or drop saved sessions");
}

// An import finds room in what is dead, too; what is empty, and may be larger on disk, is dead.
static int look_disk(struct kvq_store *s, const struct kvq_store_session *session,
                     const struct kvq__complaint *c)
{
    struct kvq_store_status status;
    int rc = kvq_store_status(s, &status, c->text, c->size);
    if (rc)
        return rc;
    if (status.read_only)
        return kvq__complain(c, KVQ_E_READ_ONLY, "is read-only until it is opened again: %s",
                             status.why);
    uint64_t dead = status.dead_bytes, empty = status.empty_bytes, need = need_of(session);
    uint64_t room = status.room_bytes + (empty > dead ? empty : dead);
    return need <= room ? KVQ_OK : refuse_disk(&status, room, need, c);
}

int kvq_store_look_room(struct kvq_store *store, const struct kvq_store_file *file,
                        const char *space, const char *name, char *text, size_t n)
{
    const struct kvq__complaint c = kvq__store_complaint(store, text, n);
    struct kvq__save_session *session = calloc(1, sizeof *session);
    if (!session)
        return kvq__complain(&c, KVQ_E_NO_MEMORY, "no memory");
    snprintf(session->head.space, sizeof session->head.space, "%s", space);
    snprintf(session->head.name, sizeof session->head.name, "%s", name);
    int rc = look_quota(store, session, file->session.bytes, &c);
    free(session);
    return rc ? rc : look_disk(store, &file->session, &c);
}
