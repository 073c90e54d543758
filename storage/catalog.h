// SPDX-License-Identifier: Apache-2.0
//
// The catalog: an SQLite database in WAL mode that says which records of the segments count. Here
// are its schema and queries; the files that use them explain them.
//
// One connection, used under the store's catalog lock. Functions return 0 or a negative KVQ_E code
// and leave a sentence in k->error.
#ifndef KVQ_STORAGE_CATALOG_H
#define KVQ_STORAGE_CATALOG_H

#include "proto/limits.h"
#include "storage/complain.h"
#include "storage/segment.h"
#include "storage/vfs.h"

enum { KVQ_CATALOG_VERSION = 2 };

// Tables. A block with segment 0 is lost. refs: how many entries of sessions name it, plus one for
// the manifest of a session and for a DROP record. live: bytes of a segment's records that stand in
// `blocks`. prefixes.page counts from 0. spaces.bytes: of the blocks that its sessions have, each
// once; uses.n: how many of their entries name the block. owed: sessions that were deleted when
// there was no room for a DROP record.
#define KVQ_CATALOG_SCHEMA                                                                         \
    "CREATE TABLE store(one INTEGER PRIMARY KEY CHECK(one=1), id BLOB, last_transaction INT,"      \
    " next_block INT, next_session INT, next_segment INT);"                                        \
    "CREATE TABLE segments(number INTEGER PRIMARY KEY, salt INT, bytes INT, live INT,"             \
    " sealed INT);"                                                                                \
    "CREATE TABLE blocks(id INTEGER PRIMARY KEY, segment INT, offset INT, length INT, kind INT,"   \
    " refs INT, bad INT, checksum BLOB);"                                                          \
    "CREATE INDEX blocks_place ON blocks(segment, offset);"                                        \
    "CREATE INDEX blocks_free ON blocks(refs) WHERE refs=0;"                                       \
    "CREATE INDEX blocks_bad ON blocks(bad) WHERE bad=1;"                                          \
    "CREATE TABLE sessions(id INTEGER PRIMARY KEY, save INT, space TEXT, name TEXT, shard INT,"    \
    " shards INT, model TEXT, formats TEXT, tokens INT, blocks INT, bytes INT, saved_at INT,"      \
    " used_at INT, version INT, meta BLOB, manifest INT, UNIQUE(space, name, shard));"             \
    "CREATE TABLE entries(session INT, layer INT, page INT, kind INT, block INT, first INT,"       \
    " PRIMARY KEY(session, layer, page, kind)) WITHOUT ROWID;"                                     \
    "CREATE TABLE prefixes(space TEXT, hash BLOB, session INT, page INT,"                          \
    " PRIMARY KEY(space, hash, session)) WITHOUT ROWID;"                                           \
    "CREATE INDEX prefixes_session ON prefixes(session, page);" KVQ_CATALOG_USAGE

// Since version 2, and how these tables are made of what version 1 has.
#define KVQ_CATALOG_USAGE                                                                          \
    "CREATE TABLE spaces(id INTEGER PRIMARY KEY, space TEXT UNIQUE, bytes INT);"                   \
    "CREATE TABLE uses(space INT, block INT, n INT, PRIMARY KEY(space, block)) WITHOUT ROWID;"     \
    "CREATE TABLE owed(session INTEGER PRIMARY KEY);"
#define KVQ_CATALOG_FROM_1                                                                         \
    "BEGIN IMMEDIATE;" KVQ_CATALOG_USAGE                                                           \
    "INSERT INTO spaces(space, bytes) SELECT DISTINCT space, 0 FROM sessions;"                     \
    "INSERT INTO uses SELECT p.id, e.block, count(*) FROM entries e JOIN sessions s ON "           \
    "s.id=e.session JOIN spaces p ON p.space=s.space GROUP BY 1, 2;"                               \
    "UPDATE spaces SET bytes=(SELECT coalesce(sum(length),0) FROM uses u JOIN blocks b ON "        \
    "b.id=u.block WHERE u.space=spaces.id);"                                                       \
    "PRAGMA user_version=2; COMMIT"

// Of a catalog that cannot be written, marks of damage are kept in memory until it is closed: to
// all queries `blocks` is then this view of it, and changing `bad` in it is noted.
#define KVQ_CATALOG_MARKS                                                                          \
    "CREATE TEMP TABLE marks(id INTEGER PRIMARY KEY);"                                             \
    "CREATE TEMP VIEW blocks AS SELECT id, segment, offset, length, kind, refs,"                   \
    " bad=1 OR id IN (SELECT id FROM marks) AS bad, checksum FROM main.blocks;"                    \
    "CREATE TEMP TRIGGER mark INSTEAD OF UPDATE OF bad ON blocks WHEN new.bad=1 BEGIN"             \
    " INSERT OR IGNORE INTO marks VALUES(old.id); END;"                                            \
    "CREATE TEMP TRIGGER unmark INSTEAD OF UPDATE OF bad ON blocks WHEN new.bad=0 BEGIN"           \
    " DELETE FROM marks WHERE id=old.id; END"

// X(name, SQL)
#define KVQ_QUERIES(X)                                                                             \
    X(BEGIN, "BEGIN IMMEDIATE")                                                                    \
    X(COMMIT, "COMMIT")                                                                            \
    X(ROLLBACK, "ROLLBACK")                                                                        \
    X(STORE_GET, "SELECT id,last_transaction,next_block,next_session,next_segment FROM store")     \
    X(STORE_PUT, "REPLACE INTO store VALUES(1,?,?,?,?,?)")                                         \
    X(SEGMENT_ALL, "SELECT number,salt,bytes,sealed FROM segments ORDER BY number")                \
    X(SEGMENT_PUT, "INSERT INTO segments VALUES(?,?,?,0,?) ON CONFLICT(number) DO UPDATE SET "     \
                   "bytes=excluded.bytes, sealed=excluded.sealed")                                 \
    X(SEGMENT_LIVE, "UPDATE segments SET live=live+? WHERE number=?")                              \
    X(SEGMENT_DROP, "DELETE FROM segments WHERE number=?")                                         \
    X(SEGMENT_EMPTY, "SELECT number FROM segments WHERE live=0 AND number<>? AND number NOT IN "   \
                     "(SELECT segment FROM blocks WHERE segment=number) ORDER BY number")          \
    X(SEGMENT_WORST,                                                                               \
      "SELECT number FROM segments WHERE number<>? AND live>0 AND (bytes-live)*100>=bytes*? AND "  \
      "bytes-live>=? ORDER BY live*1.0/bytes, number")                                             \
    X(SEGMENT_DEAD, "SELECT number FROM segments WHERE number=? AND (bytes-live)*100>=bytes*? "    \
                    "AND bytes-live>=?")                                                           \
    X(SEGMENT_SUMS, "SELECT count(*), total(bytes), total(live) FROM segments")                    \
    X(BLOCK_PUT, "INSERT INTO blocks VALUES(?,?,?,?,?,?,?,?)")                                     \
    X(BLOCK_GET, "SELECT segment,offset,length,kind,bad,checksum FROM blocks WHERE id=?")          \
    X(BLOCK_REF, "UPDATE blocks SET refs=refs+? WHERE id=?")                                       \
    X(BLOCK_FREE, "SELECT segment,length FROM blocks WHERE refs=0")                                \
    X(BLOCK_SWEEP, "DELETE FROM blocks WHERE refs=0")                                              \
    X(BLOCK_MOVE, "UPDATE blocks SET segment=?,offset=?,bad=? WHERE id=?")                         \
    X(BLOCK_BAD, "UPDATE blocks SET bad=1 WHERE id=? AND segment=? AND offset=? AND bad=0")        \
    X(BLOCK_GOOD, "UPDATE blocks SET bad=0 WHERE id=? AND segment=? AND offset=? AND bad=1")       \
    X(BLOCK_CUT, "UPDATE blocks SET bad=1 WHERE segment=? AND offset+length+64>? AND bad=0")       \
    X(BLOCK_AT, "SELECT min(offset) FROM blocks WHERE segment=? AND offset>=?")                    \
    X(BLOCK_IN, "SELECT id,offset,length,kind,bad,checksum FROM blocks WHERE segment=? AND "       \
                "offset>=? ORDER BY offset LIMIT ?")                                               \
    X(BLOCK_BAD_IN, "SELECT id,offset,length,kind,bad,checksum FROM blocks WHERE segment=? AND "   \
                    "offset>=? AND bad=1 ORDER BY offset LIMIT ?")                                 \
    X(BLOCK_COUNT, "SELECT (SELECT count(*) FROM blocks WHERE kind=2), (SELECT count(*) FROM "     \
                   "blocks WHERE bad=1)")                                                          \
    X(SESSION_PUT, "REPLACE INTO sessions VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)")                \
    X(SESSION_FIND, "SELECT id,save,space,name,shard,shards,model,formats,tokens,blocks,bytes,"    \
                    "saved_at,used_at,version,length(meta),manifest FROM sessions WHERE space=? "  \
                    "AND name=? AND shard=?")                                                      \
    X(SESSION_SHARDS, "SELECT id,save,space,name,shard,shards,model,formats,tokens,blocks,bytes,"  \
                      "saved_at,used_at,version,length(meta),manifest FROM sessions WHERE "        \
                      "space=? AND name=? ORDER BY shard")                                         \
    X(SESSION_LIST, "SELECT id,save,space,name,shard,shards,model,formats,tokens,blocks,bytes,"    \
                    "saved_at,used_at,version,length(meta),manifest FROM sessions WHERE id>? "     \
                    "AND (space=?2 OR ?2 IS NULL) ORDER BY id LIMIT ?3")                           \
    X(SESSION_LEFT, "SELECT s.id,manifest,blocks FROM spaces p CROSS JOIN sessions s ON "          \
                    "s.space=p.space WHERE name>=? AND name<? AND save<=? AND "                    \
                    "(p.space=?4 OR ?4 IS NULL) LIMIT ?5")                                         \
    X(SESSION_META, "SELECT meta FROM sessions WHERE id=?")                                        \
    X(SESSION_SAVE, "SELECT save,tokens FROM sessions WHERE id=?")                                 \
    X(SESSION_DROP, "DELETE FROM sessions WHERE id=?")                                             \
    X(SESSION_TOUCH, "UPDATE sessions SET used_at=? WHERE id=?")                                   \
    X(SESSION_LARGEST, "SELECT max(b),max(t) FROM (SELECT total(blocks) b,total(tokens) t FROM "   \
                       "sessions GROUP BY space,name)")                                            \
    X(SESSION_COUNT, "SELECT count(*) FROM sessions")                                              \
    X(SESSION_CUT, "SELECT count(DISTINCT session) FROM entries WHERE block IN (SELECT id FROM "   \
                   "blocks WHERE bad=1)")                                                          \
    X(OWED_PUT, "INSERT OR IGNORE INTO owed VALUES(?)")                                            \
    X(OWED_ALL, "SELECT session FROM owed")                                                        \
    X(OWED_CLEAR, "DELETE FROM owed")                                                              \
    X(SESSION_NAMES, "SELECT count(DISTINCT name) FROM sessions WHERE space=?")                    \
    X(SESSION_BYTES, "SELECT sum(bytes) FROM sessions WHERE space=? AND name=?")                   \
    X(SPACE_ADD, "INSERT INTO spaces(space,bytes) VALUES(?,0) ON CONFLICT DO NOTHING")             \
    X(SPACE_ID, "SELECT id FROM spaces WHERE space=?")                                             \
    X(SPACE_OF, "SELECT p.id FROM sessions s JOIN spaces p ON p.space=s.space WHERE s.id=?")       \
    X(SPACE_GET, "SELECT bytes FROM spaces WHERE space=?")                                         \
    X(SPACE_LIST, "SELECT space,bytes FROM spaces ORDER BY id")                                    \
    X(SPACE_BYTES, "UPDATE spaces SET bytes=bytes+? WHERE id=?")                                   \
    X(USE_NEW, "INSERT OR IGNORE INTO uses VALUES(?,?,1)")                                         \
    X(USE_MORE, "UPDATE uses SET n=n+1 WHERE space=? AND block=?")                                 \
    X(USE_LESS, "UPDATE uses SET n=n-1 WHERE space=? AND block=? AND n>1")                         \
    X(USE_DROP, "DELETE FROM uses WHERE space=? AND block=?")                                      \
    X(BLOCK_LENGTH, "SELECT length FROM blocks WHERE id=?")                                        \
    X(ENTRY_PUT, "REPLACE INTO entries VALUES(?,?,?,?,?,?)")                                       \
    X(ENTRY_DROP, "DELETE FROM entries WHERE session=? AND layer=? AND page=? AND kind=?")         \
    X(ENTRY_CLEAR, "DELETE FROM entries WHERE session=?")                                          \
    X(ENTRY_ALL, "SELECT layer,page,kind,block,first FROM entries WHERE session=? ORDER BY "       \
                 "layer,page,kind")                                                                \
    X(ENTRY_BLOCKS, "SELECT layer,page,e.kind,block,first,segment,offset,length,bad,checksum "     \
                    "FROM entries e JOIN blocks b ON b.id=e.block WHERE session=? ORDER BY "       \
                    "layer,page,e.kind")                                                           \
    X(ENTRY_BAD, "SELECT min(first) FROM entries WHERE session=? AND block IN (SELECT id FROM "    \
                 "blocks WHERE bad=1)")                                                            \
    X(PREFIX_PUT, "REPLACE INTO prefixes VALUES(?,?,?,?)")                                         \
    X(PREFIX_CUT, "DELETE FROM prefixes WHERE session=? AND page>=?")                              \
    X(PREFIX_ALL, "SELECT hash FROM prefixes WHERE session=? ORDER BY page")                       \
    X(PREFIX_FIND, "SELECT session FROM prefixes CROSS JOIN sessions s ON s.id=session WHERE "     \
                   "prefixes.space=?1 AND hash=?2 AND NOT (name>=?3 AND name<?4 AND save<=?5) "    \
                   "ORDER BY session")                                                             \
    X(PAGES, "PRAGMA page_count")                                                                  \
    X(SESSION_ID, "SELECT id,save,space,name,shard,shards,model,formats,tokens,blocks,bytes,"      \
                  "saved_at,used_at,version,length(meta),manifest FROM sessions WHERE id=?")

enum kvq__query {
#define X(name, sql) KVQ_Q_##name,
    KVQ_QUERIES(X)
#undef X
        KVQ__QUERIES
};

struct kvq__catalog {
    struct kvq__vfs vfs;
    sqlite3 *db;
    sqlite3_stmt *query[KVQ__QUERIES];
    int last; // SQLite's code of the last failure
    char error[200];
};

// Opens catalog.db. 0, or: KVQ_E_NO_SESSION, there is none, or none that was finished;
// KVQ_E_DAMAGED; KVQ_E_VERSION; or what else went wrong. In any case it is closed with
// kvq__catalog_close. read_only: nothing is made and nothing brought up to date (KVQ_E_READ_ONLY);
// marks are kept, in memory.
int kvq__catalog_open(struct kvq__catalog *k, struct kvq_io *io, const char *path, bool read_only);
void kvq__catalog_close(struct kvq__catalog *k);
// Whether SQLite finds the whole of it in order: 0, KVQ_E_DAMAGED, or what went wrong.
int kvq__catalog_check(struct kvq__catalog *k);
// Whether its rows agree with each other: 0, KVQ_E_DAMAGED with what does not, or what went wrong
// (agree.c). Of one that is sound to SQLite. The second looks whether they keep one rule, of those
// from 0 to kvq__catalog_rules() - 1.
int kvq__catalog_agree(struct kvq__catalog *k);
int kvq__catalog_keeps(struct kvq__catalog *k, size_t rule);
size_t kvq__catalog_rules(void);
// Keeps what SQLite says about one of its codes, and gives ours for it.
int kvq__catalog_failed(struct kvq__catalog *k, int code);
// Makes the tables, within a transaction that the caller began.
int kvq__catalog_create(struct kvq__catalog *k);

// A query with its parameters: i int64_t, t const char * (NULL allowed), b const void * and size_t.
// Run: rows that it gives are not looked at. Rows: the statement to be stepped; NULL: failed, as
// k->error says.
int kvq__run(struct kvq__catalog *k, enum kvq__query q, const char *types, ...);
sqlite3_stmt *kvq__rows(struct kvq__catalog *k, enum kvq__query q, const char *types, ...);
// 1: a row, 0: no more, or negative.
int kvq__next(struct kvq__catalog *k, sqlite3_stmt *rows);
// The first column of the first row as a number, `none` where there is no row or it is NULL.
int kvq__number(struct kvq__catalog *k, sqlite3_stmt *rows, int64_t none, int64_t *value);

struct kvq_checksum kvq__column_checksum(sqlite3_stmt *rows, int column);

#endif
