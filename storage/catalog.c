// SPDX-License-Identifier: Apache-2.0
//
// The connection to the catalog: opening, and running its queries.
#include "storage/catalog.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/status.h"

enum { APPLICATION_ID = 0x6b767173 }; // "kvqs", at byte 68 of the database

static const char *const sql_of[KVQ__QUERIES] = {
#define X(name, sql) [KVQ_Q_##name] = (sql),
    KVQ_QUERIES(X)
#undef X
};

int kvq__catalog_failed(struct kvq__catalog *k, int code)
{
    assert(code != SQLITE_OK && code != SQLITE_ROW && code != SQLITE_DONE);
    k->last = code;
    const char *why = code == SQLITE_NOMEM || !k->db ? sqlite3_errstr(code) : sqlite3_errmsg(k->db);
    snprintf(k->error, sizeof k->error, "SQLite says \"%s\"", why);
    switch (code & 0xff) {
    case SQLITE_FULL:
        return KVQ_E_NO_SPACE;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
        return KVQ_E_DAMAGED;
    case SQLITE_NOMEM:
        return KVQ_E_NO_MEMORY;
    case SQLITE_READONLY:
        return KVQ_E_READ_ONLY;
    default:
        return KVQ_E_SYSTEM;
    }
}

static int execute(struct kvq__catalog *k, const char *sql)
{
    int rc = sqlite3_exec(k->db, sql, NULL, NULL, NULL);
    return rc == SQLITE_OK ? KVQ_OK : kvq__catalog_failed(k, rc);
}

// ---- Queries ----

static int bind(sqlite3_stmt *s, const char *types, va_list args)
{
    int rc = SQLITE_OK;
    for (int i = 1; types[i - 1] && rc == SQLITE_OK; i++) {
        const void *p;
        switch (types[i - 1]) {
        case 'i':
            rc = sqlite3_bind_int64(s, i, va_arg(args, int64_t));
            break;
        case 't':
            p = va_arg(args, const char *);
            rc = p ? sqlite3_bind_text(s, i, p, -1, SQLITE_STATIC) : sqlite3_bind_null(s, i);
            break;
        default:
            p = va_arg(args, const void *);
            assert(types[i - 1] == 'b');
            rc = sqlite3_bind_blob64(s, i, p ? p : "", va_arg(args, size_t), SQLITE_STATIC);
        }
    }
    return rc;
}

static sqlite3_stmt *prepared(struct kvq__catalog *k, enum kvq__query q, const char *types,
                              va_list args)
{
    int rc = SQLITE_OK;
    assert(k->db && q < KVQ__QUERIES);
    if (!k->query[q])
        rc =
            sqlite3_prepare_v3(k->db, sql_of[q], -1, SQLITE_PREPARE_PERSISTENT, &k->query[q], NULL);
    if (rc == SQLITE_OK) {
        (void)sqlite3_reset(k->query[q]);
        assert(sqlite3_bind_parameter_count(k->query[q]) == (int)strlen(types));
        rc = bind(k->query[q], types, args);
    }
    if (rc == SQLITE_OK)
        return k->query[q];
    (void)kvq__catalog_failed(k, rc);
    return NULL;
}

sqlite3_stmt *kvq__rows(struct kvq__catalog *k, enum kvq__query q, const char *types, ...)
{
    va_list args;
    va_start(args, types);
    sqlite3_stmt *s = prepared(k, q, types, args);
    va_end(args);
    return s;
}

int kvq__next(struct kvq__catalog *k, sqlite3_stmt *rows)
{
    if (!rows) { // it could not be prepared, and k->last says why
        assert(k->last != SQLITE_OK);
        return kvq__catalog_failed(k, k->last);
    }
    int rc = sqlite3_step(rows);
    if (rc == SQLITE_ROW)
        return 1;
    int code = rc == SQLITE_DONE ? KVQ_OK : kvq__catalog_failed(k, rc);
    (void)sqlite3_reset(rows);
    return code;
}

int kvq__run(struct kvq__catalog *k, enum kvq__query q, const char *types, ...)
{
    va_list args;
    va_start(args, types);
    sqlite3_stmt *s = prepared(k, q, types, args);
    va_end(args);
    int rc = kvq__next(k, s);
    if (rc == 1)
        (void)sqlite3_reset(s);
    return rc < 0 ? rc : KVQ_OK;
}

int kvq__number(struct kvq__catalog *k, sqlite3_stmt *rows, int64_t none, int64_t *value)
{
    *value = none;
    int rc = kvq__next(k, rows);
    if (rc == 1 && sqlite3_column_type(rows, 0) != SQLITE_NULL)
        *value = sqlite3_column_int64(rows, 0);
    if (rc == 1)
        (void)sqlite3_reset(rows);
    return rc < 0 ? rc : KVQ_OK;
}

struct kvq_checksum kvq__column_checksum(sqlite3_stmt *rows, int column)
{
    struct kvq_checksum c = {0};
    if (sqlite3_column_bytes(rows, column) == (int)sizeof c)
        memcpy(&c, sqlite3_column_blob(rows, column), sizeof c);
    return c;
}

// ---- Opening ----

static int pragma_number(struct kvq__catalog *k, const char *sql, int64_t *value)
{
    sqlite3_stmt *s = NULL;
    int rc = sqlite3_prepare_v2(k->db, sql, -1, &s, NULL);
    int code = rc == SQLITE_OK ? kvq__number(k, s, 0, value) : kvq__catalog_failed(k, rc);
    (void)sqlite3_finalize(s);
    return code;
}

// The order matters: exclusive locking before the first access to the WAL keeps SQLite from
// asking for shared memory. FULL syncs the WAL with every commit.
#define SETTINGS_TO_READ                                                                           \
    "PRAGMA locking_mode=EXCLUSIVE;"                                                               \
    "PRAGMA temp_store=MEMORY;"                                                                    \
    "PRAGMA trusted_schema=OFF;"                                                                   \
    "PRAGMA cell_size_check=ON;"
static const char settings[] = SETTINGS_TO_READ "PRAGMA auto_vacuum=INCREMENTAL;"
                                                "PRAGMA journal_mode=WAL;"
                                                "PRAGMA synchronous=FULL;"
                                                "PRAGMA wal_autocheckpoint=256;"
                                                "PRAGMA journal_size_limit=4194304";

static int check_version(struct kvq__catalog *k, int64_t *version)
{
    int64_t application, tables = 0;
    int rc = pragma_number(k, "PRAGMA application_id", &application);
    if (rc == KVQ_OK)
        rc = pragma_number(k, "PRAGMA user_version", version);
    if (rc == KVQ_OK && application == 0 && *version == 0) // the marks alone may have been lost
        rc = pragma_number(k, "SELECT count(*) FROM sqlite_master", &tables);
    if (rc)
        return rc;
    if (application == 0 && *version == 0 && tables == 0) {
        snprintf(k->error, sizeof k->error, "it is empty");
        return KVQ_E_NO_SESSION;
    }
    if (application != APPLICATION_ID || *version < 1) {
        snprintf(k->error, sizeof k->error, "it is no catalog of ours");
        return KVQ_E_DAMAGED;
    }
    if (*version > KVQ_CATALOG_VERSION) {
        snprintf(k->error, sizeof k->error,
                 "it is of version %lld, and this program knows up to %d", (long long)*version,
                 KVQ_CATALOG_VERSION);
        return KVQ_E_VERSION;
    }
    return KVQ_OK;
}

static int connect_catalog(struct kvq__catalog *k, struct kvq_io *io, const char *path,
                           bool read_only, int64_t *version)
{
    int how = read_only ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
    memset(k, 0, sizeof *k);
    int rc = kvq__vfs_add(&k->vfs, io, read_only);
    if (rc == SQLITE_OK)
        rc = sqlite3_open_v2(path, &k->db, how | SQLITE_OPEN_NOMUTEX, k->vfs.name);
    if (rc != SQLITE_OK) {
        int code = kvq__catalog_failed(k, rc);
        return read_only && (rc & 0xff) == SQLITE_CANTOPEN ? KVQ_E_NO_SESSION : code;
    }
    (void)sqlite3_extended_result_codes(k->db, 1);
    int code = execute(k, read_only ? SETTINGS_TO_READ : settings);
    return code ? code : check_version(k, version);
}

// A connection that can write checkpoints the WAL and changes the database's settings, which a
// newer version may not want: the first look only reads. What else it finds is not its business.
static int refuse_newer(struct kvq__catalog *k, struct kvq_io *io, const char *path)
{
    int64_t version = 0;
    if (connect_catalog(k, io, path, true, &version) == KVQ_E_VERSION)
        return KVQ_E_VERSION;
    kvq__catalog_close(k);
    return KVQ_OK;
}

int kvq__catalog_open(struct kvq__catalog *k, struct kvq_io *io, const char *path, bool read_only)
{
    int64_t version = 0;
    int code = read_only ? KVQ_OK : refuse_newer(k, io, path);
    if (code == KVQ_OK)
        code = connect_catalog(k, io, path, read_only, &version);
    if (code)
        return code;
    assert(version >= 1 && version <= KVQ_CATALOG_VERSION);
    if (version == KVQ_CATALOG_VERSION)
        return read_only ? execute(k, KVQ_CATALOG_MARKS) : KVQ_OK;
    if (!read_only)
        return execute(k, KVQ_CATALOG_FROM_1);
    snprintf(k->error, sizeof k->error, "it is of version 1, and cannot be brought up to date");
    return KVQ_E_READ_ONLY;
}

void kvq__catalog_close(struct kvq__catalog *k)
{
    for (int i = 0; i < KVQ__QUERIES; i++)
        (void)sqlite3_finalize(k->query[i]);
    memset(k->query, 0, sizeof k->query);
    (void)sqlite3_close(k->db);
    k->db = NULL;
    kvq__vfs_remove(&k->vfs);
}

int kvq__catalog_check(struct kvq__catalog *k)
{
    sqlite3_stmt *s = NULL;
    int rc = sqlite3_prepare_v2(k->db, "PRAGMA integrity_check(1)", -1, &s, NULL);
    int code = rc == SQLITE_OK ? kvq__next(k, s) : kvq__catalog_failed(k, rc);
    if (code == 1) {
        const char *says = (const char *)sqlite3_column_text(s, 0);
        code = says && strcmp(says, "ok") == 0 ? KVQ_OK : KVQ_E_DAMAGED;
        if (code)
            snprintf(k->error, sizeof k->error, "SQLite's check says \"%s\"", says ? says : "");
    }
    (void)sqlite3_finalize(s);
    return code;
}

int kvq__catalog_create(struct kvq__catalog *k)
{
    char marks[96];
    assert(!sqlite3_get_autocommit(k->db));
    snprintf(marks, sizeof marks, "PRAGMA application_id=%d; PRAGMA user_version=%d",
             APPLICATION_ID, KVQ_CATALOG_VERSION);
    int rc = execute(k, KVQ_CATALOG_SCHEMA);
    return rc ? rc : execute(k, marks);
}
