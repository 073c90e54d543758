// SPDX-License-Identifier: Apache-2.0
//
// Whether the catalog agrees with itself. SQLite says that the database is sound; rows that
// somebody edited or deleted are sound, too. Saving, compacting and deleting rely on counters,
// references and sums, and a wrong one would refuse every save, or delete what is alive. Each
// query gives 0 or 1, in time linear in the catalog. Sums are taken of numbers modulo a prime, so
// that one block in the place of another changes them.
#include <assert.h>
#include <stdio.h>

#include "proto/status.h"
#include "storage/catalog.h"

#define P "%1000003"

static_assert(KVQ_MAX_SESSION_TOKENS == 1 << 24 && KVQ_MAX_SHARDS == 64, "as the queries have it");

// What is wrong, and the query that finds it.
static const struct {
    const char *what, *sql;
} rules[] = {
    {"its counters are behind its rows, or missing",
     "SELECT count(*)<>1 FROM store WHERE one=1 AND typeof(id)='blob' AND length(id)=16 AND "
     "typeof(last_transaction)='integer' AND typeof(next_block)='integer' AND "
     "typeof(next_session)='integer' AND typeof(next_segment)='integer' AND "
     "last_transaction BETWEEN (SELECT coalesce(max(save),0) FROM sessions) AND 1<<62 AND "
     "next_block BETWEEN (SELECT coalesce(max(id),0)+1 FROM blocks) AND 1<<62 AND "
     "next_session BETWEEN (SELECT coalesce(max(id),0)+1 FROM sessions) AND 1<<62 AND "
     "next_segment BETWEEN (SELECT coalesce(max(number),0)+1 FROM segments) AND 1<<62"},
    {"a segment has a value that none can have",
     "SELECT count(*)>0 FROM segments WHERE number<=0 OR typeof(salt)<>'integer' OR "
     "typeof(bytes)<>'integer' OR typeof(live)<>'integer' OR typeof(sealed)<>'integer' OR "
     "live NOT BETWEEN 0 AND bytes OR sealed NOT IN (0,1)"},
    {"a block has a value that none can have, or is in no segment",
     "SELECT (SELECT count(*) FROM blocks)<>(SELECT count(*) FROM blocks WHERE id>0 AND offset "
     "BETWEEN 0 AND 1<<62 AND length BETWEEN 0 AND 1<<40 AND refs BETWEEN 1 AND 1<<40 AND bad "
     "BETWEEN 0 AND 1 AND kind BETWEEN 2 AND 5 AND (kind<4 OR refs=1) AND length(checksum)=16 AND "
     "(segment=0 OR segment IN (SELECT number FROM segments)))"},
    {"a block is behind the end of its segment",
     "SELECT count(*)>0 FROM segments g WHERE (SELECT offset+(length+63)/64*64+64 FROM blocks "
     "WHERE segment=g.number ORDER BY offset DESC LIMIT 1)>g.bytes"},
    {"what is alive in its segments is not what its blocks add up to",
     "SELECT (SELECT total(live) FROM segments)<>(SELECT total((length+63)/64*64+64) FROM blocks "
     "WHERE segment<>0)"},
    {"a session has a value that none can have",
     "SELECT count(*)>0 FROM sessions WHERE id<=0 OR typeof(save)<>'integer' OR "
     "typeof(space)<>'text' OR typeof(name)<>'text' OR typeof(shard)<>'integer' OR "
     "typeof(shards)<>'integer' OR typeof(model)<>'text' OR typeof(formats)<>'text' OR "
     "typeof(tokens)<>'integer' OR typeof(blocks)<>'integer' OR typeof(bytes)<>'integer' OR "
     "typeof(saved_at)<>'integer' OR typeof(used_at)<>'integer' OR typeof(version)<>'integer' OR "
     "typeof(meta)<>'blob' OR typeof(manifest)<>'integer' OR shard<0 OR shard>=shards OR "
     "shards>64 OR tokens NOT BETWEEN 0 AND 1<<24 OR bytes<0 OR space NOT IN (SELECT space FROM "
     "spaces)"},
    {"an entry has a value that none can have, or belongs to no session",
     "SELECT (SELECT count(*) FROM entries)<>(SELECT count(*) FROM entries WHERE layer BETWEEN 0 "
     "AND 1<<32 AND page BETWEEN 0 AND 1<<32 AND kind BETWEEN 0 AND 1<<32 AND block BETWEEN 1 AND "
     "1<<62 AND first BETWEEN 0 AND 1<<62 AND session IN (SELECT id FROM sessions))"},
    {"a session has other blocks than it lists",
     "SELECT count(*)>0 FROM sessions s LEFT JOIN (SELECT session, count(*) AS n FROM entries "
     "GROUP BY session) e ON e.session=s.id WHERE s.blocks<>coalesce(e.n,0)"},
    {"its blocks are not those that its sessions name",
     "SELECT e.n<>b.n OR e.ids<>b.ids FROM (SELECT count(*) AS n, total(block" P ") AS ids FROM "
     "entries) e, (SELECT total(refs) AS n, total(refs*(id" P ")) AS ids FROM blocks WHERE kind=2) "
     "b"},
    {"its manifests are not those that its sessions name",
     "SELECT s.n<>b.n OR s.ids<>b.ids FROM (SELECT count(*) AS n, total(manifest" P ") AS ids FROM "
     "sessions) s, (SELECT total(refs) AS n, total(refs*(id" P ")) AS ids FROM blocks WHERE "
     "kind=3) b"},
    {"what its namespaces use is not what their sessions name",
     "SELECT e.n<>u.n OR e.ids<>u.ids FROM (SELECT count(*) AS n, total((block*31+p.id*17)" P
     ") AS "
     "ids FROM entries e JOIN sessions s ON s.id=e.session JOIN spaces p ON p.space=s.space) e, "
     "(SELECT total(n) AS n, total(n*((block*31+space*17)" P ")) AS ids FROM uses) u"},
    {"what its namespaces have is not what they use",
     "SELECT (SELECT total(bytes) FROM spaces)<>(SELECT total(b.length) FROM uses u JOIN blocks b "
     "ON b.id=u.block) OR EXISTS (SELECT 1 FROM spaces WHERE typeof(bytes)<>'integer' OR "
     "typeof(space)<>'text' OR bytes<0)"},
    {"a prefix belongs to no session, or is none",
     "SELECT count(*)>0 FROM prefixes WHERE typeof(hash)<>'blob' OR length(hash)<>32 OR "
     "typeof(page)<>'integer' OR typeof(space)<>'text' OR session NOT IN (SELECT id FROM "
     "sessions)"},
};

size_t kvq__catalog_rules(void)
{
    return sizeof rules / sizeof *rules;
}

int kvq__catalog_keeps(struct kvq__catalog *k, size_t rule)
{
    int64_t wrong = 0;
    sqlite3_stmt *s = NULL;
    assert(rule < kvq__catalog_rules());
    int rc = sqlite3_prepare_v2(k->db, rules[rule].sql, -1, &s, NULL);
    int code = rc == SQLITE_OK ? kvq__number(k, s, 1, &wrong) : kvq__catalog_failed(k, rc);
    (void)sqlite3_finalize(s);
    if (code || !wrong)
        return code;
    snprintf(k->error, sizeof k->error, "%s", rules[rule].what);
    return KVQ_E_DAMAGED;
}

int kvq__catalog_agree(struct kvq__catalog *k)
{
    int rc = KVQ_OK;
    for (size_t i = 0; i < kvq__catalog_rules() && rc == KVQ_OK; i++)
        rc = kvq__catalog_keeps(k, i);
    return rc;
}
