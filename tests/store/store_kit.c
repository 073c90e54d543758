// SPDX-License-Identifier: Apache-2.0
//
// A world of sessions beside a store.
#include "tests/store/store_kit.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/store_internal.h"

static const char space[] = "uid-1";

static uint64_t mix(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t world_random(struct world *w, uint64_t below)
{
    return mix(&w->random) % below;
}

void world_fill(uint64_t seed, void *data, size_t n)
{
    uint8_t *to = data;
    for (size_t i = 0; i < n; i += 8) {
        uint64_t x = mix(&seed);
        memcpy(to + i, &x, n - i < 8 ? n - i : 8);
    }
}

__attribute__((format(printf, 2, 3))) static bool differs(char why[256], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, 256, format, args);
    va_end(args);
    return false;
}

int kit_open(struct kit *k, struct kvq_io *io)
{
    k->io = io;
    k->options.io = io;
    if (k->options.segment_bytes == 0)
        k->options.segment_bytes = 64 << 10;
    if (k->options.buffer_bytes == 0)
        k->options.buffer_bytes = 8 << 10;
    k->text[0] = '\0';
    return kvq_store_open("/store", &k->options, &k->store, &k->report, k->text, sizeof k->text);
}

// ---- Saving ----

static size_t meta_bytes(const struct world_session *s)
{
    return (size_t)(s->seed % 200);
}

static int save_block(struct kit *k, struct kvq_save *save, struct world_block *b)
{
    uint8_t bytes[WORLD_MAX_BYTES];
    if (b->id)
        return kvq_save_keep(save, &b->place, b->id, k->text, sizeof k->text);
    world_fill(b->seed, bytes, (size_t)b->bytes);
    return kvq_save_put(save, &b->place, bytes, (size_t)b->bytes, &b->id, k->text, sizeof k->text);
}

static int save_one(struct kit *k, struct kvq_save *save, struct world_session *s)
{
    uint8_t meta[200], hash[KVQ_PREFIX_BYTES];
    world_fill(s->seed, meta, meta_bytes(s));
    const struct kvq_store_meta m = {.space = space,
                                     .name = s->name,
                                     .model = "model",
                                     .formats = "oscar2",
                                     .shard = s->shard,
                                     .shards = s->shards,
                                     .tokens = s->tokens,
                                     .saved_at = (int64_t)(s->seed % 1000),
                                     .version = 3,
                                     .bytes = meta,
                                     .n_bytes = meta_bytes(s)};
    int rc = kvq_save_session(save, &m, k->text, sizeof k->text);
    for (size_t i = 0; i < s->n && rc == 0; i++)
        rc = save_block(k, save, &s->blocks[i]);
    for (uint32_t i = 0; i < s->pages && rc == 0; i++) {
        world_fill(s->seed + i, hash, sizeof hash);
        rc = kvq_save_prefix(save, hash, k->text, sizeof k->text);
    }
    return rc;
}

int kit_save(struct kit *k, struct world *after, const char *name)
{
    struct kvq_save *save;
    int rc = kvq_save_begin(k->store, &save, k->text, sizeof k->text);
    for (int i = 0; i < WORLD_SESSIONS && rc == 0; i++)
        if (after->sessions[i].used && strcmp(after->sessions[i].name, name) == 0)
            rc = save_one(k, save, &after->sessions[i]);
    if (rc == 0)
        return kvq_save_commit(&save, k->text, sizeof k->text);
    kvq_save_abort(&save);
    return rc;
}

// ---- Random changes ----

static struct world_session *some_session(struct world *w, bool used)
{
    uint64_t from = world_random(w, WORLD_SESSIONS);
    for (int i = 0; i < WORLD_SESSIONS; i++) {
        struct world_session *s = &w->sessions[(from + (uint64_t)i) % WORLD_SESSIONS];
        if (s->used == used)
            return s;
    }
    return NULL;
}

static void add_block(struct world *w, struct world_session *s, uint32_t layer, uint32_t page,
                      uint32_t kind)
{
    static const uint64_t sizes[] = {0, 1, 63, 64, 65, 500, 2000, 4032, 4096, WORLD_MAX_BYTES};
    if (s->n == WORLD_BLOCKS)
        return;
    s->blocks[s->n++] = (struct world_block){.place = {layer, page, kind, page * 128},
                                             .seed = world_random(w, UINT64_MAX),
                                             .bytes = sizes[world_random(w, 10)]};
}

// Adds pages of two layers, and a window (kind 2) behind them in place of the one before.
static void grow(struct world *w, struct world_session *s, uint32_t pages)
{
    for (size_t i = s->n; i-- > 0;)
        if (s->blocks[i].place.kind == 2)
            s->blocks[i] = s->blocks[--s->n];
    for (uint32_t i = 0; i < pages; i++, s->pages++)
        for (uint32_t layer = 0; layer < 2; layer++)
            add_block(w, s, layer, s->pages, 1);
    for (uint32_t layer = 0; layer < 2; layer++)
        add_block(w, s, layer, s->pages, 2);
    s->tokens = s->pages * 128 + world_random(w, 128);
}

static struct world_session *make_session(struct world *w, const char *name, uint32_t shard,
                                          uint32_t shards)
{
    struct world_session *s = some_session(w, false);
    if (!s)
        return NULL;
    *s = (struct world_session){
        .used = true, .shard = shard, .shards = shards, .seed = world_random(w, UINT32_MAX)};
    snprintf(s->name, sizeof s->name, "%s", name);
    return s;
}

static int change_new(struct kit *k, struct world *after)
{
    char name[16];
    uint32_t shards = world_random(after, 3) == 0 ? 2 : 1;
    snprintf(name, sizeof name, "s%u", (unsigned)world_random(after, 1000000));
    for (uint32_t i = 0; i < shards; i++) {
        struct world_session *s = make_session(after, name, i, shards);
        if (!s && i == 0)
            return KVQ_OK;
        if (s)
            grow(after, s, (uint32_t)world_random(after, 4));
    }
    return kit_save(k, after, name);
}

static int change_grow(struct kit *k, struct world *after)
{
    struct world_session *s = some_session(after, true);
    if (!s)
        return KVQ_OK;
    for (int i = 0; i < WORLD_SESSIONS; i++)
        if (after->sessions[i].used && strcmp(after->sessions[i].name, s->name) == 0)
            grow(after, &after->sessions[i], (uint32_t)world_random(after, 3));
    return kit_save(k, after, s->name);
}

// Another session with the first blocks of one.
static int change_fork(struct kit *k, struct world *after)
{
    char name[16];
    const struct world_session *from = some_session(after, true);
    snprintf(name, sizeof name, "f%u", (unsigned)world_random(after, 1000000));
    struct world_session *s = from ? make_session(after, name, 0, 1) : NULL;
    if (!s)
        return KVQ_OK;
    s->pages = from->pages / 2;
    s->seed = from->seed;
    for (size_t i = 0; i < from->n; i++)
        if (from->blocks[i].place.kind == 1 && from->blocks[i].place.page < s->pages)
            s->blocks[s->n++] = from->blocks[i];
    grow(after, s, 1);
    return kit_save(k, after, name);
}

// The same name with another number of shards: the first has the old first one's blocks.
static int change_shards(struct kit *k, struct world *after)
{
    const struct world_session *of = some_session(after, true);
    if (!of)
        return KVQ_OK;
    struct world_session old = *of;
    uint32_t shards = 1 + (old.shards + (uint32_t)world_random(after, 2)) % 3; // another one
    for (int i = 0; i < WORLD_SESSIONS; i++)
        if (strcmp(after->sessions[i].name, old.name) == 0)
            after->sessions[i] = (struct world_session){0};
    for (uint32_t i = 0; i < shards; i++) {
        struct world_session *s = make_session(after, old.name, i, shards);
        if (s && i == 0) {
            memcpy(s->blocks, old.blocks, sizeof s->blocks);
            s->n = old.n;
            s->pages = old.pages;
            s->seed = old.seed;
        }
        if (s)
            grow(after, s, (uint32_t)world_random(after, 2));
    }
    return kit_save(k, after, old.name);
}

static int change_delete(struct kit *k, struct world *after)
{
    struct world_session *s = some_session(after, true);
    char name[16];
    if (!s)
        return KVQ_OK;
    snprintf(name, sizeof name, "%s", s->name);
    for (int i = 0; i < WORLD_SESSIONS; i++)
        if (strcmp(after->sessions[i].name, name) == 0)
            after->sessions[i] = (struct world_session){0};
    return kvq_store_delete(k->store, space, name, k->text, sizeof k->text);
}

static int change_space(struct kit *k, struct world *after)
{
    struct kvq_store_freed freed;
    if (world_random(after, 3) == 0)
        return kvq_store_gc(k->store, &freed, k->text, sizeof k->text);
    return kvq_store_compact(k->store, 20000, 30, &freed, k->text, sizeof k->text);
}

int kit_change(struct kit *k, const struct world *before, struct world *after)
{
    *after = *before;
    switch (world_random(after, 13)) {
    case 0:
    case 1:
    case 2:
        return change_new(k, after);
    case 3:
    case 4:
    case 5:
        return change_grow(k, after);
    case 6:
        return change_fork(k, after);
    case 7:
    case 8:
        return change_delete(k, after);
    case 9:
    case 10:
        return change_space(k, after);
    case 11:
        return change_shards(k, after);
    default:
        if (k->stays_open)
            return change_grow(k, after);
        kvq_store_close(&k->store);
        return kit_open(k, k->io);
    }
}

// ---- Comparing ----

static bool same_block(struct kit *k, const struct world_session *s, const struct kvq_stored *have,
                       uint64_t good, char why[256])
{
    uint8_t want[WORLD_MAX_BYTES], is[WORLD_MAX_BYTES];
    for (size_t i = 0; i < s->n; i++) {
        const struct world_block *b = &s->blocks[i];
        if (b->place.layer != have->place.layer || b->place.page != have->place.page ||
            b->place.kind != have->place.kind)
            continue;
        if (have->place.from != b->place.from || (have->bytes != b->bytes && !have->bad))
            return differs(why, "%s: a block is of another size or place", s->name);
        if (have->bad && have->place.from >= good)
            return true;
        int rc = kvq_store_read(k->store, have, is, k->text, sizeof k->text);
        if (rc)
            return differs(why, "%s: block %" PRIu64 ": %s", s->name, have->id, k->text);
        world_fill(b->seed, want, (size_t)b->bytes);
        if (memcmp(want, is, (size_t)b->bytes) != 0)
            return differs(why, "%s: block %" PRIu64 " has other bytes", s->name, have->id);
        return true;
    }
    return differs(why, "%s: a block at layer %u, page %u, kind %u", s->name, have->place.layer,
                   have->place.page, have->place.kind);
}

static int by_offset(const void *a, const void *b)
{
    const struct kvq_stored *x = a, *y = b;
    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

// Reading them all at once gives what reading them one by one does.
static bool same_at_once(struct kit *k, const struct world_session *s, struct kvq_stored *blocks,
                         size_t n, char why[256])
{
    static uint8_t bytes[WORLD_BLOCKS][WORLD_MAX_BYTES], one[WORLD_MAX_BYTES];
    void *out[WORLD_BLOCKS];
    size_t done;
    if (n)
        qsort(blocks, n, sizeof *blocks, by_offset);
    for (size_t i = 0; i < n; i++)
        out[i] = bytes[i];
    if (kvq_store_read_many(k->store, blocks, out, n, &done, k->text, sizeof k->text))
        return differs(why, "%s: block %zu of all at once: %s", s->name, done, k->text);
    for (size_t i = 0; i < n; i++)
        if (done != n || kvq_store_read(k->store, &blocks[i], one, k->text, sizeof k->text) ||
            memcmp(one, bytes[i], blocks[i].bytes) != 0)
            return differs(why, "%s: block %zu read at once has other bytes", s->name, i);
    return true;
}

static bool same_lists(struct kit *k, const struct world_session *s,
                       const struct kvq_store_session *found, uint64_t good, char why[256])
{
    struct kvq_stored *blocks = NULL;
    uint8_t(*hashes)[KVQ_PREFIX_BYTES] = NULL, hash[KVQ_PREFIX_BYTES], meta[200], is[200];
    size_t n = 0;
    uint32_t pages = 0;
    bool same = true;
    int rc = kvq_store_blocks(k->store, found, &blocks, &n, k->text, sizeof k->text);
    if (rc == 0)
        rc = kvq_store_prefixes(k->store, found, &hashes, &pages, k->text, sizeof k->text);
    if (rc == 0)
        rc = kvq_store_meta_read(k->store, found, is, k->text, sizeof k->text);
    world_fill(s->seed, meta, meta_bytes(s));
    if (rc)
        same = differs(why, "%s: %s", s->name, k->text);
    else if (n != s->n || pages != s->pages || memcmp(meta, is, meta_bytes(s)) != 0)
        same = differs(why, "%s: %zu blocks of %zu, %u prefixes of %u, or opaque bytes", s->name, n,
                       s->n, pages, s->pages);
    for (size_t i = 0; i < n && same; i++)
        same = same_block(k, s, &blocks[i], good, why);
    for (uint32_t i = 0; i < pages && same; i++) {
        world_fill(s->seed + i, hash, sizeof hash);
        if (memcmp(hash, hashes[i], sizeof hash) != 0)
            same = differs(why, "%s: prefix %u", s->name, i);
    }
    if (same && good == s->tokens)
        same = same_at_once(k, s, blocks, n, why);
    free(hashes);
    free(blocks);
    return same;
}

static bool same_session(struct kit *k, const struct world_session *s, bool cut, char why[256])
{
    struct kvq_store_session found;
    uint64_t good = 0;
    int rc = kvq_store_find(k->store, space, s->name, s->shard, &found, k->text, sizeof k->text);
    if (rc == 0)
        rc = kvq_store_good_tokens(k->store, &found, &good, k->text, sizeof k->text);
    if (rc)
        return differs(why, "%s", k->text);
    if (found.tokens != s->tokens || found.shards != s->shards || found.n_bytes != meta_bytes(s) ||
        found.blocks != s->n || found.version != 3 || strcmp(found.model, "model") != 0 ||
        found.saved_at != (int64_t)(s->seed % 1000))
        return differs(why, "%s: %" PRIu64 " tokens of %" PRIu64 ", or another column", s->name,
                       found.tokens, s->tokens);
    if (good != s->tokens && !cut)
        return differs(why, "%s: only %" PRIu64 " tokens are good", s->name, good);
    return same_lists(k, s, &found, good, why);
}

bool kit_same(struct kit *k, const struct world *w, bool cut, char why[256])
{
    struct kvq_store_status status;
    uint64_t sessions = 0;
    for (int i = 0; i < WORLD_SESSIONS; i++) {
        sessions += w->sessions[i].used;
        if (w->sessions[i].used && !same_session(k, &w->sessions[i], cut, why))
            return false;
    }
    if (kvq_store_status(k->store, &status, k->text, sizeof k->text))
        return differs(why, "%s", k->text);
    if (status.sessions != sessions)
        return differs(why, "%" PRIu64 " sessions, not %" PRIu64, status.sessions, sessions);
    return true;
}

bool kit_sound(struct kit *k, char why[256])
{
    static const char *const queries[] = {
        "SELECT count(*) FROM blocks b WHERE kind=2 AND (refs=0 OR refs<>(SELECT count(*) FROM "
        "entries e WHERE e.block=b.id))",
        "SELECT count(*) FROM blocks b WHERE kind=3 AND refs<>(SELECT count(*) FROM sessions s "
        "WHERE s.manifest=b.id)",
        "SELECT count(*) FROM blocks WHERE kind>3 AND refs<>1",
        "SELECT count(*) FROM entries WHERE block NOT IN (SELECT id FROM blocks WHERE kind=2)",
        "SELECT count(*) FROM entries WHERE session NOT IN (SELECT id FROM sessions)",
        "SELECT count(*) FROM prefixes WHERE session NOT IN (SELECT id FROM sessions)",
        "SELECT count(*) FROM sessions WHERE manifest NOT IN (SELECT id FROM blocks WHERE kind=3)",
        "SELECT count(*) FROM blocks WHERE segment<>0 AND segment NOT IN (SELECT number FROM "
        "segments)",
        "SELECT count(*) FROM segments g WHERE live<>(SELECT total((length+63)/64*64+64) FROM "
        "blocks WHERE segment=g.number) OR live>bytes",
        "SELECT count(*) FROM sessions s WHERE blocks<>(SELECT count(*) FROM entries e WHERE "
        "e.session=s.id)",
        "SELECT count(*) FROM uses u WHERE n<>(SELECT count(*) FROM entries e JOIN sessions s ON "
        "s.id=e.session JOIN spaces p ON p.space=s.space WHERE p.id=u.space AND e.block=u.block)",
        "SELECT count(*) FROM spaces p WHERE bytes<>(SELECT total(length) FROM blocks WHERE id IN "
        "(SELECT block FROM entries e JOIN sessions s ON s.id=e.session WHERE s.space=p.space))",
        "SELECT count(*) FROM sessions WHERE space NOT IN (SELECT space FROM spaces)",
    };
    for (size_t i = 0; i < sizeof queries / sizeof *queries; i++) {
        sqlite3_stmt *s = NULL;
        sqlite3 *db = k->store->catalog.db;
        int rc = sqlite3_prepare_v2(db, queries[i], -1, &s, NULL);
        rc = rc == SQLITE_OK ? sqlite3_step(s) : rc;
        int count = rc == SQLITE_ROW ? sqlite3_column_int(s, 0) : -1;
        (void)sqlite3_finalize(s);
        if (count != 0)
            return differs(why, "%d rows of: %.200s", count, queries[i]);
    }
    return true;
}
