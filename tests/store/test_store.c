// SPDX-License-Identifier: Apache-2.0
//
// The store on a disk that does not break: what is saved is what is read, through random changes,
// reopenings and compactions; caps, locks, prefixes, and what is refused.
#include "tests/store/store_check.h"

static struct kvq_store_freed freed; // by the last call

PLAIN_TEST(random_changes)
{
    // EINTR and short transfers everywhere are nothing that anybody should notice.
    begin_disk(7, (struct kit){0}, 1);
    disk.interrupt_percent = disk.short_percent = 20;
    assert_int_equal(kit_open(&k, &disk.io), 0);
    assert_true(k.report.created);
    for (int i = 0; i < 150; i++) {
        struct world after;
        if (kit_change(&k, &w, &after))
            fail_msg("change %d: %s", i, k.text);
        w = after;
        if (i % 10 == 0)
            check(&k, &w, "");
    }
    check(&k, &w, "");
    reopen_store();
    assert_string_equal(k.report.text, "");
    check(&k, &w, "");
}

// Segments of 64 KiB, so there are many; when all sessions are gone, so are they.
PLAIN_TEST(space_comes_back)
{
    begin_store(7, 2);
    change(&k, &w, 60);
    for (int i = 0; i < WORLD_SESSIONS; i++)
        if (w.sessions[i].used && w.sessions[i].shard == 0)
            assert_int_equal(drop_session(w.sessions[i].name), 0);
    compact_all(1 << 20, 1);
    assert_int_equal(kvq_store_gc(k.store, &freed, k.text, sizeof k.text), 0);
    struct kvq_store_status status = status_of_store();
    assert_int_equal(status.sessions, 0);
    assert_int_equal(status.blocks, 0);
    assert_true(status.segments <= 2); // records of what was deleted
    assert_int_equal(status.physical_bytes, fault_physical(&disk));
}

// What the status says that gc would free is what it frees: whole segments.
static void foretold(struct kit *k, bool some)
{
    struct kvq_store_status status = status_of_store();
    assert_int_equal(kvq_store_gc(k->store, &freed, k->text, sizeof k->text), 0);
    assert_int_equal(status.empty_bytes, freed.bytes);
    assert_true(freed.bytes > 0 || !some);
    assert_true(status.dead_bytes >= status.empty_bytes || !some);
    status = status_of_store();
    assert_int_equal(status.empty_bytes, 0);
}

PLAIN_TEST(gc_is_foretold)
{
    begin_store(7, 4);
    for (int i = 0; i < 200; i++) {
        change(&k, &w, 1);
        foretold(&k, false);
    }
    struct world_session *s = &w.sessions[0];
    w = (struct world){0};
    *s = (struct world_session){.used = true, .name = "large", .shards = 1, .n = 20};
    for (int round = 0; round < 3; round++) { // each but the first leaves what the last one had
        for (uint32_t i = 0; i < 20; i++)
            s->blocks[i] = (struct world_block){.place = {0, i, 1, 0}, .seed = i, .bytes = 9000};
        assert_int_equal(kit_save(&k, &w, "large"), 0);
        foretold(&k, round > 0);
    }
}

static struct kvq_store_prefix prefix; // that is looked for

// How many of n hashes a session of the namespace has, which is *it.
static uint32_t matches(const char *space, const uint8_t (*hashes)[KVQ_PREFIX_BYTES], uint32_t n,
                        struct kvq_store_session *it)
{
    uint32_t matched;
    prefix.space = space;
    prefix.hashes = hashes;
    prefix.pages = n;
    if (kvq_store_match(k.store, &prefix, &matched, it, k.text, sizeof k.text))
        fail_msg("%s", k.text);
    return matched;
}

// Those of the first n pages of sessions with seed 5.
static void fill_hashes(uint8_t (*hashes)[KVQ_PREFIX_BYTES], uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        world_fill(5 + i, hashes[i], KVQ_PREFIX_BYTES);
}

// A chain of hashes: sessions that share a part of it are found by the longest part.
PLAIN_TEST(prefixes)
{
    uint8_t hashes[6][KVQ_PREFIX_BYTES];
    struct kvq_store_session it;
    struct world_session *s = &w.sessions[0];
    begin_store(7, 3);
    *s = (struct world_session){.used = true, .name = "a", .shards = 1, .seed = 5, .pages = 4};
    assert_int_equal(kit_save(&k, &w, "a"), 0);
    fill_hashes(hashes, 6);
    for (uint32_t n = 0; n <= 6; n++) {
        assert_int_equal(matches("uid-1", hashes, n, &it), n < 4 ? n : 4);
        assert_string_equal(it.name, n ? "a" : "");
    }
    assert_int_equal(matches("uid-2", hashes, 6, &it), 0); // another namespace
    s->pages = 2;                                          // saved again with fewer
    assert_int_equal(kit_save(&k, &w, "a"), 0);
    assert_int_equal(matches("uid-1", hashes, 6, &it), 2);
}

// What an earlier run has left without a name counts no more, since it is about to be deleted.
PLAIN_TEST(prefixes_of_a_run)
{
    uint8_t hashes[3][KVQ_PREFIX_BYTES];
    struct kvq_store_session it;
    struct world_session *s = &w.sessions[0];
    begin_store(10, 3);
    *s = (struct world_session){.used = true, .name = "#7", .shards = 1, .seed = 5, .pages = 3};
    assert_int_equal(kit_save(&k, &w, "#7"), 0);
    fill_hashes(hashes, 3);
    assert_int_equal(matches("uid-1", hashes, 3, &it), 3);
    reopen_store();
    assert_int_equal(matches("uid-1", hashes, 3, &it), 0);
    assert_int_equal(kit_save(&k, &w, "#7"), 0);
    assert_int_equal(matches("uid-1", hashes, 3, &it), 3);
    w.sessions[1] = *s;
    snprintf(w.sessions[1].name, sizeof s->name, "%s", "named");
    assert_int_equal(kit_save(&k, &w, "named"), 0);
    reopen_store();
    assert_int_equal(matches("uid-1", hashes, 3, &it), 3);
    assert_string_equal(it.name, "named");
}

// Of those that have a prefix the longest, then the oldest comes first; those that are passed by
// do not count, and others are found by their own length.
PLAIN_TEST(prefixes_of_others)
{
    static const struct {
        const char *name;
        uint32_t pages;
    } order[] = {{"c", 5}, {"b", 4}, {"d", 4}, {"a", 2}, {"", 0}};
    uint8_t hashes[6][KVQ_PREFIX_BYTES];
    uint64_t passed[4];
    struct kvq_store_session it;
    begin_store(9, 3);
    for (int i = 0; i < 4; i++) {
        struct world_session *s = &w.sessions[i];
        *s = (struct world_session){.used = true, .shards = 1, .seed = 5};
        snprintf(s->name, sizeof s->name, "%c", 'a' + i);
        s->pages = (const uint32_t[]){2, 4, 5, 4}[i];
        assert_int_equal(kit_save(&k, &w, s->name), 0);
    }
    fill_hashes(hashes, 6);
    prefix.passed = passed;
    for (int i = 0; i < 5; i++) {
        assert_int_equal(matches("uid-1", hashes, 6, &it), order[i].pages);
        assert_string_equal(it.name, order[i].name);
        if (i < 4)
            passed[prefix.n_passed++] = it.id;
    }
    prefix = (struct kvq_store_prefix){0};
}

static int save_blocks(struct kit *k, struct world *w, const char *name, int n)
{
    struct world_session *s = &w->sessions[0];
    *s = (struct world_session){.used = true, .shards = 1, .tokens = 10};
    snprintf(s->name, sizeof s->name, "%s", name);
    for (int i = 0; i < n; i++)
        s->blocks[s->n++] = (struct world_block){
            .place = {0, (uint32_t)i, 1, 0}, .seed = (uint64_t)i, .bytes = WORLD_MAX_BYTES};
    return kit_save(k, w, name);
}

// What the store says it has room for it takes, and little more: what was taken in advance for a
// segment, and what the catalog is to have for more rows.
static void promise(struct kit *k, int blocks, int rc, int *beyond)
{
    const uint64_t takes = (uint64_t)(blocks + 8) * (kvq_record_bytes(WORLD_MAX_BYTES) + 512);
    struct kvq_store_status now, brief;
    static uint64_t room;
    if (room >= takes)
        assert_int_equal(rc, 0);
    *beyond += rc == 0 && room < takes;
    assert_int_equal(kvq_store_status(k->store, &now, k->text, sizeof k->text), 0);
    assert_int_equal(kvq_store_brief(k->store, &brief, k->text, sizeof k->text), 0);
    room = now.room_bytes;
    assert_int_equal(brief.room_bytes, room);
    assert_int_equal(brief.sessions, now.sessions);
    assert_int_equal(brief.physical_bytes, now.physical_bytes);
    assert_true(room <= now.cap_bytes - now.physical_bytes);
}

// The cap counts every byte of every file, and is refused before it is reached.
PLAIN_TEST(cap)
{
    char name[16];
    int rc = 0, saved = 0, beyond = 0, i;
    begin_disk(
        7, (struct kit){.options = {.cap_bytes = KVQ_STORE_MIN_CAP, .segment_bytes = 1 << 20}}, 4);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    for (i = 0; i < 100 && rc == 0; i++) {
        snprintf(name, sizeof name, "s%d", i);
        rc = save_blocks(&k, &w, name, 40);
        saved += rc == 0;
        if (rc)
            assert_says(k.text, "the cap is 16777216 bytes");
        promise(&k, 40, rc, &beyond);
    }
    assert_int_equal(rc, KVQ_E_NO_SPACE);
    assert_true(saved > 20);
    assert_true(beyond < 8);
    assert_true(disk.peak <= KVQ_STORE_MIN_CAP);
    assert_false(is_there(name));
    // Deleting works at the cap, compaction too, and then there is room again.
    for (i = 0; i < 8; i++) {
        snprintf(name, sizeof name, "s%d", i);
        assert_int_equal(drop_session(name), 0);
    }
    compact_all(1 << 18, 20);
    assert_int_equal(save_blocks(&k, &w, "again", 40), 0);
    assert_true(disk.peak <= KVQ_STORE_MIN_CAP);
}

// A file that is none of the store's counts while it is there, and no longer.
PLAIN_TEST(cap_and_others)
{
    static const char *const other = "/store/catalog.db.bad";
    enum { OTHER_BYTES = 13 << 20 };
    begin_disk(
        8, (struct kit){.options = {.cap_bytes = KVQ_STORE_MIN_CAP, .segment_bytes = 1 << 20}}, 5);
    assert_int_equal(kit_open(&k, &disk.io), 0);
    uint64_t before = status_of_store().physical_bytes;
    int file = disk.io.open(&disk.io, other, KVQ_IO_WRITE | KVQ_IO_NEW);
    assert_true(file >= 0);
    assert_int_equal(disk.io.allocate(&disk.io, file, OTHER_BYTES), 0);
    disk.io.close(&disk.io, file);
    assert_int_equal(status_of_store().physical_bytes, before + OTHER_BYTES);
    reopen_store();
    assert_int_equal(save_blocks(&k, &w, "it", 40), KVQ_E_NO_SPACE);
    assert_says(k.text, "the cap is 16777216 bytes");
    assert_int_equal(disk.io.unlink(&disk.io, other), 0);
    assert_int_equal(save_blocks(&k, &w, "it", 40), 0);
    assert_true(status_of_store().physical_bytes < OTHER_BYTES);
}

static uint64_t usage(struct kit *k, const char *space, uint64_t sessions)
{
    uint64_t bytes, count;
    assert_int_equal(kvq_store_usage(k->store, space, &bytes, &count, k->text, sizeof k->text), 0);
    assert_int_equal(count, sessions);
    return bytes;
}

// Adds a session with `n` blocks of its own and all blocks of another one, and saves it.
static int save_fork(struct kit *k, struct world *w, int at, const char *name, int n,
                     const struct world_session *of)
{
    struct world_session *s = &w->sessions[at];
    *s = (struct world_session){.used = true, .shards = 1, .tokens = 10};
    snprintf(s->name, sizeof s->name, "%s", name);
    for (size_t i = 0; of && i < of->n; i++)
        s->blocks[s->n++] = of->blocks[i];
    for (int i = 0; i < n; i++, s->n++)
        s->blocks[s->n] =
            (struct world_block){.place = {1, (uint32_t)s->n, 1, 0}, .seed = s->n, .bytes = 1000};
    return kit_save(k, w, name);
}

// A save of 500 bytes more, without a limit at first, and with this one before it is committed.
static int lowered_meanwhile(struct kit *k, uint64_t limit)
{
    static uint32_t n;
    struct kvq_save *save;
    char name[16], bytes[500] = {0};
    uint64_t id;
    snprintf(name, sizeof name, "more%u", n++);
    const struct kvq_store_meta meta = {
        .space = "uid-1", .name = name, .model = "", .formats = "", .shards = 1, .version = 1};
    assert_int_equal(kvq_store_limit(k->store, "uid-1", 0, k->text, sizeof k->text), 0);
    assert_int_equal(kvq_save_begin(k->store, &save, k->text, sizeof k->text), 0);
    assert_int_equal(kvq_save_session(save, &meta, k->text, sizeof k->text), 0);
    assert_int_equal(kvq_save_put(save, &(struct kvq_place){0}, bytes, sizeof bytes, &id, k->text,
                                  sizeof k->text),
                     0);
    assert_int_equal(kvq_store_limit(k->store, "uid-1", limit, k->text, sizeof k->text), 0);
    return kvq_save_commit(&save, k->text, sizeof k->text);
}

static void check_spaces(struct kit *k, uint64_t bytes)
{
    struct kvq_store_space *spaces;
    size_t n;
    assert_int_equal(kvq_store_spaces(k->store, &spaces, &n, k->text, sizeof k->text), 0);
    assert_int_equal(n, 2);
    assert_string_equal(spaces[0].space, "uid-1");
    assert_int_equal(spaces[0].bytes, bytes);
    assert_string_equal(spaces[1].space, "uid-2");
    assert_int_equal(spaces[1].bytes, 0);
    free(spaces);
}

// A limit that is forgotten leaves the default, as it is then, and the limits of others.
static void forgotten(struct kit *k, struct world *w)
{
    assert_int_equal(kvq_store_limit(k->store, "uid-3", 9999, k->text, sizeof k->text), 0);
    kvq_store_limit_forget(k->store, "uid-1");
    kvq_store_limit_forget(k->store, "uid-1");
    assert_int_equal(kvq_store_limit(k->store, NULL, 4700, k->text, sizeof k->text), 0);
    assert_int_equal(save_fork(k, w, 0, "a", 5, NULL), KVQ_E_QUOTA);
    assert_says(k->text, "may keep 4700 bytes, 4500 are used");
    assert_int_equal(
        kvq_store_import(k->store, "/a", "uid-3", NULL, false, k->text, sizeof k->text),
        KVQ_E_QUOTA);
    assert_says(k->text, "uid-3 may keep 9999 bytes, 0 are used");
}

// What a namespace may have: bytes of blocks, shared ones once, and a save or import above it is
// refused before a byte of it counts.
PLAIN_TEST(limits)
{
    struct world before;
    begin_store(7, 6);
    assert_int_equal(kvq_store_limit(k.store, "uid-1", 20000, k.text, sizeof k.text), 0);
    assert_int_equal(usage(&k, "uid-1", 0), 0);
    assert_int_equal(save_fork(&k, &w, 0, "a", 10, NULL), 0);
    assert_int_equal(usage(&k, "uid-1", 1), 10000);
    assert_int_equal(save_fork(&k, &w, 1, "fork", 4, &w.sessions[0]), 0);
    assert_int_equal(usage(&k, "uid-1", 2), 14000);
    before = w;
    uint64_t written = disk.n_writes; // 40 blocks would fill five buffers
    assert_int_equal(save_fork(&k, &w, 2, "b", 40, NULL), KVQ_E_QUOTA);
    assert_says(k.text, "namespace uid-1 may keep 20000 bytes, 14000 are used, and this "
                        "save needs 7000 more");
    assert_int_equal(disk.n_writes, written);
    assert_false(is_there("b"));
    w = before;
    check(&k, &w, "limits");
    assert_int_equal(usage(&k, "uid-1", 2), 14000);
    // What replaces a session has its room, to the byte; a shared block's does not come back.
    assert_int_equal(save_fork(&k, &w, 1, "fork", 20, NULL), KVQ_E_QUOTA);
    assert_int_equal(save_fork(&k, &w, 1, "fork", 10, NULL), 0);
    assert_int_equal(usage(&k, "uid-1", 2), 20000);
    assert_int_equal(kvq_store_export(k.store, "uid-1", "a", "/a", true, k.text, sizeof k.text), 0);
    assert_int_equal(
        kvq_store_import(k.store, "/a", NULL, "imported", false, k.text, sizeof k.text),
        KVQ_E_QUOTA);
    assert_says(k.text, "20000 are used, and this save needs 10000 more");
    // Other namespaces are none of its business.
    assert_int_equal(kvq_store_import(k.store, "/a", "uid-2", NULL, false, k.text, sizeof k.text),
                     0);
    assert_int_equal(usage(&k, "uid-2", 1), 10000);
    assert_int_equal(kvq_store_delete(k.store, "uid-2", "a", k.text, sizeof k.text), 0);
    assert_int_equal(usage(&k, "uid-2", 0), 0);
    // Above a limit that is lowered: what adds nothing is saved, what adds a byte is not.
    assert_int_equal(kvq_store_limit(k.store, "uid-1", 5, k.text, sizeof k.text), 0);
    assert_int_equal(kit_save(&k, &w, "a"), 0);
    assert_int_equal(save_fork(&k, &w, 0, "a", 1, &before.sessions[0]), KVQ_E_QUOTA);
    assert_int_equal(kvq_store_limit(k.store, "uid-1", 0, k.text, sizeof k.text), 0);
    assert_int_equal(save_fork(&k, &w, 0, "a", 11, NULL), 0);
    check(&k, &w, "limits");
    assert_int_equal(drop_session("fork"), 0);
    assert_int_equal(drop_session("a"), 0);
    assert_int_equal(usage(&k, "uid-1", 0), 0);
    // Those that were given none have the default; what is told counts until a save is committed.
    assert_int_equal(kvq_store_limit(k.store, NULL, 3000, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_store_import(k.store, "/a", "uid-3", NULL, false, k.text, sizeof k.text),
                     KVQ_E_QUOTA);
    assert_int_equal(save_fork(&k, &w, 0, "a", 4, NULL), 0); // uid-1 was given none at all
    assert_int_equal(kvq_store_limit(k.store, "uid-1", 4000, k.text, sizeof k.text), 0);
    assert_int_equal(lowered_meanwhile(&k, 4500), 0);
    assert_int_equal(lowered_meanwhile(&k, 4400), KVQ_E_QUOTA);
    assert_says(k.text, "may keep 4400 bytes, 4500 are used");
    assert_int_equal(usage(&k, "uid-1", 2), 4500);
    check_spaces(&k, 4500);
    forgotten(&k, &w);
}

// Puts n blocks of 1000 bytes into a session of its own: the id of the last, and what it said.
static int put_some(struct kit *k, struct kvq_save *save, const char *name, uint32_t n,
                    uint64_t *id)
{
    static const uint8_t bytes[1000];
    const struct kvq_store_meta meta = {
        .space = "uid-1", .name = name, .model = "", .formats = "", .shards = 1, .version = 1};
    int rc = kvq_save_session(save, &meta, k->text, sizeof k->text);
    for (uint32_t i = 0; i < n && rc == 0; i++)
        rc = kvq_save_put(save, &(struct kvq_place){.page = i}, bytes, sizeof bytes, id, k->text,
                          sizeof k->text);
    return rc;
}

// One session of a save that is refused is taken out of it; the others are saved, those that come
// after it and have a block of its included, and what it had put is dead.
PLAIN_TEST(one_of_many)
{
    struct kvq_save *save;
    uint64_t id;
    char why[256];
    begin_store(7, 0);
    assert_int_equal(kvq_store_limit(k.store, "uid-1", 6500, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
    assert_int_equal(put_some(&k, save, "a", 2, &id), 0);
    assert_int_equal(kvq_save_count(save), 1);
    assert_int_equal(put_some(&k, save, "b", 5, &id), KVQ_E_QUOTA);
    assert_true(kvq_save_cut(save, 1));
    assert_int_equal(put_some(&k, save, "c", 3, &id), 0);
    const struct kvq_place place = {.page = 9};
    assert_int_equal(kvq_save_keep(save, &place, id - 4, k.text, sizeof k.text), 0); // of b's
    assert_int_equal(kvq_save_commit(&save, k.text, sizeof k.text), 0);
    assert_true(is_there("a") && is_there("c") && !is_there("b"));
    assert_int_equal(usage(&k, "uid-1", 2), 6000);
    if (!kit_sound(&k, why))
        fail_msg("%s", why);
    // What both replace counts, whichever is put last: 3000 and 3000 in the place of 2000 and 4000.
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
    assert_int_equal(put_some(&k, save, "c", 3, &id), 0);
    assert_int_equal(put_some(&k, save, "a", 3, &id), 0);
    assert_int_equal(put_some(&k, save, "a", 0, &id), KVQ_E_INVALID); // it is in the save already
    assert_true(kvq_save_cut(save, 2));
    assert_int_equal(kvq_save_commit(&save, k.text, sizeof k.text), 0);
    assert_int_equal(usage(&k, "uid-1", 2), 6000);
    if (!kit_sound(&k, why))
        fail_msg("%s", why);
    // A record that was not written as a whole is nothing to go on behind.
    assert_int_equal(kvq_store_limit(k.store, "uid-1", 0, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
    assert_int_equal(put_some(&k, save, "d", 1, &id), 0);
    disk.capacity = 1;
    assert_int_equal(put_some(&k, save, "e", 200, &id), KVQ_E_NO_SPACE);
    disk.capacity = 0;
    assert_false(kvq_save_cut(save, 1));
    assert_int_equal(kvq_save_commit(&save, k.text, sizeof k.text), KVQ_E_NO_SPACE);
    assert_false(is_there("d"));
}

PLAIN_TEST(one_writer)
{
    struct kit other = {0};
    struct kvq_save *save, *second = NULL;
    begin_store(7, 0);
    assert_int_equal(kit_open(&other, &disk.io), KVQ_E_BUSY);
    assert_says(other.text, "another process has it open, pid ");
    assert_null(other.store);
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_begin(k.store, &second, k.text, sizeof k.text), KVQ_E_BUSY);
    assert_int_equal(drop_session("x"), KVQ_E_BUSY);
    assert_int_equal(kvq_store_gc(k.store, &freed, k.text, sizeof k.text), KVQ_E_BUSY);
    kvq_save_abort(&save);
    assert_int_equal(drop_session("x"), KVQ_E_NO_SESSION);
}

// What is found belongs together: whoever has found a session that was saved again is told so.
PLAIN_TEST(stale)
{
    struct kvq_stored *blocks;
    size_t n;
    begin_store(7, 5);
    assert_int_equal(save_blocks(&k, &w, "a", 3), 0);
    struct kvq_store_session it = found("a");
    assert_int_equal(kit_save(&k, &w, "a"), 0); // keeps all
    assert_int_equal(kvq_store_blocks(k.store, &it, &blocks, &n, k.text, sizeof k.text),
                     KVQ_E_STALE);
    assert_null(blocks);
    it = found("a");
    blocks = blocks_of(&it, &n);
    assert_int_equal(n, 3);
    assert_int_equal(drop_session("a"), 0);
    // A block that was deleted can be read for as long as its bytes are there, and then is gone.
    uint8_t bytes[WORLD_MAX_BYTES], want[WORLD_MAX_BYTES];
    world_fill(0, want, sizeof want);
    assert_int_equal(kvq_store_read(k.store, &blocks[0], bytes, k.text, sizeof k.text), 0);
    assert_memory_equal(bytes, want, sizeof want);
    assert_int_equal(kvq_store_compact(k.store, 1 << 20, 10, &freed, k.text, sizeof k.text), 0);
    assert_int_equal(freed.segments, 1);
    assert_int_equal(kvq_store_read(k.store, &blocks[0], bytes, k.text, sizeof k.text),
                     KVQ_E_NO_SESSION);
    free(blocks);
}

PLAIN_TEST(refusals)
{
    struct kvq_save *save;
    struct kvq_store_meta m = {.space = "s", .name = "n", .shards = 1};
    const struct kvq_place place = {0};
    uint64_t id;
    begin_store(7, 0);
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_put(save, &place, "x", 1, &id, k.text, sizeof k.text),
                     KVQ_E_INVALID); // no session yet
    assert_int_equal(kvq_save_commit(&save, k.text, sizeof k.text), KVQ_E_INVALID);
    assert_null(save);
    char longer[KVQ_NAME_BYTES + 1];
    memset(longer, 'a', KVQ_NAME_BYTES);
    longer[KVQ_NAME_BYTES] = '\0';
    const struct {
        struct kvq_store_meta m;
        int rc;
    } bad[] = {
        {{.space = "", .name = "n", .shards = 1}, KVQ_E_INVALID},
        {{.space = "s", .name = longer, .shards = 1}, KVQ_E_LIMIT},
        {{.space = "s", .name = "a\nb", .shards = 1}, KVQ_E_INVALID},
        {{.space = "s", .name = "n", .shards = 0}, KVQ_E_INVALID},
        {{.space = "s", .name = "n", .shard = 2, .shards = 2}, KVQ_E_INVALID},
        {{.space = "s", .name = "n", .shards = 1, .n_bytes = KVQ_MAX_STORE_META + 1}, KVQ_E_LIMIT}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
        assert_int_equal(kvq_save_session(save, &bad[i].m, k.text, sizeof k.text), bad[i].rc);
        assert_int_equal(kvq_save_commit(&save, k.text, sizeof k.text), bad[i].rc);
    }
    // A block that is not there may be put instead, and the save goes on.
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_session(save, &m, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_keep(save, &place, 12345, k.text, sizeof k.text), KVQ_E_NO_SESSION);
    assert_int_equal(kvq_save_put(save, &place, "x", 1, &id, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_commit(&save, k.text, sizeof k.text), 0);
    // Two blocks at one place.
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_session(save, &m, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_keep(save, &place, id, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_keep(save, &place, id, k.text, sizeof k.text), 0);
    assert_int_equal(kvq_save_commit(&save, k.text, sizeof k.text), KVQ_E_INVALID);
    kvq_store_close(&k.store);
    k.options.cap_bytes = 1000;
    assert_int_equal(kit_open(&k, &disk.io), KVQ_E_INVALID);
}

// However many sessions were used, noting it costs one transaction; those that are gone are passed
// over.
PLAIN_TEST(used)
{
    enum { SESSIONS = 40, GONE = 7 };
    struct kvq_save *save;
    struct kvq_store_session all[SESSIONS];
    struct kvq_store_use uses[SESSIONS + 1];
    const size_t room = sizeof k.text;
    uint32_t n;
    begin_store(7, 0);
    assert_int_equal(kvq_save_begin(k.store, &save, k.text, room), 0);
    for (int i = 0; i < SESSIONS; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        const struct kvq_store_meta m = {.space = "uid-1", .name = name, .shards = 1};
        assert_int_equal(kvq_save_session(save, &m, k.text, room), 0);
    }
    assert_int_equal(kvq_save_commit(&save, k.text, room), 0);
    assert_int_equal(kvq_store_list(k.store, NULL, 0, all, SESSIONS, &n, k.text, room), 0);
    assert_int_equal(n, SESSIONS);
    for (uint32_t i = 0; i < n; i++)
        uses[i] = (struct kvq_store_use){all[i].id, 1000 + i};
    uses[n] = (struct kvq_store_use){1u << 20, 5};
    assert_int_equal(kvq_store_delete(k.store, "uid-1", all[GONE].name, k.text, room), 0);
    fault_reset_counts(&disk);
    assert_int_equal(kvq_store_touch(k.store, uses, SESSIONS + 1, k.text, room), 0);
    assert_int_equal(disk.n_syncs, 1);
    reopen_store();
    assert_int_equal(kvq_store_list(k.store, NULL, 0, all, SESSIONS, &n, k.text, room), 0);
    assert_int_equal(n, SESSIONS - 1);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(all[i].used_at, 1000 + i + (i >= GONE));
}

static int save_empty(const char *space, const char *name, uint32_t shards)
{
    struct kvq_save *save;
    const size_t room = sizeof k.text;
    int rc = kvq_save_begin(k.store, &save, k.text, room);
    for (uint32_t i = 0; i < shards && rc == 0; i++) {
        const struct kvq_store_meta m = {
            .space = space, .name = name, .shard = i, .shards = shards, .tokens = 1};
        rc = kvq_save_session(save, &m, k.text, room);
    }
    return rc ? rc : kvq_save_commit(&save, k.text, room);
}

// Until none is left, in steps of two. How many steps it took.
static uint32_t sweep_by_two(void)
{
    for (uint32_t steps = 0, n;; steps++) {
        fault_reset_counts(&disk);
        assert_int_equal(kvq_store_sweep(k.store, NULL, 2, &n, k.text, sizeof k.text), 0);
        if (n == 0) {
            assert_int_equal(disk.n_syncs, 0);
            return steps;
        }
    }
}

// At the limit of a namespace it is that namespace's alone that go.
PLAIN_TEST(swept_of_one)
{
    uint32_t n;
    begin_store(8, 0);
    for (uint32_t i = 0; i < 3; i++) {
        const char name[] = {'#', (char)('1' + i), 0};
        assert_int_equal(save_empty("uid-1", name, 1), 0);
        assert_int_equal(save_empty("uid-2", name, 2), 0);
    }
    reopen_store();
    assert_int_equal(kvq_store_sweep(k.store, "uid-3", 9, &n, k.text, sizeof k.text), 0);
    assert_int_equal(n, 0);
    assert_int_equal(kvq_store_sweep(k.store, "uid-2", 4, &n, k.text, sizeof k.text), 0);
    assert_int_equal(n, 4);
    assert_int_equal(kvq_store_sweep(k.store, "uid-2", 9, &n, k.text, sizeof k.text), 0);
    assert_int_equal(n, 2);
    assert_int_equal(kvq_store_sweep(k.store, NULL, 9, &n, k.text, sizeof k.text), 0);
    assert_int_equal(n, 3);
}

// What an earlier run has left goes, some in each transaction, in all namespaces, and stays away if
// the catalog is lost; nothing that has a name, or that this run has saved, goes.
PLAIN_TEST(swept)
{
    static const char *const names[] = {"#1", "#2", "#2222", "named", "#3", "\"", "$", "a#"};
    struct kvq_store_session all[32];
    uint32_t n;
    begin_store(8, 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        assert_int_equal(save_empty("uid-1", names[i], 1), 0);
        assert_int_equal(save_empty("uid-2", names[i], 3), 0);
    }
    assert_int_equal(sweep_by_two(), 0);
    reopen_store();
    assert_int_equal(save_empty("uid-1", "#3", 1), 0);
    assert_int_equal(save_empty("uid-1", "#4", 1), 0);
    assert_int_equal(sweep_by_two(), (3 + 4 * 3 + 1) / 2);
    for (int lost = 0; lost < 2; lost++) {
        assert_int_equal(kvq_store_list(k.store, NULL, 0, all, 32, &n, k.text, sizeof k.text), 0);
        assert_int_equal(n, 4 + 4 * 3 + 2);
        for (uint32_t i = 0; i < n; i++)
            if (all[i].name[0] == '#')
                assert_true(strcmp(all[i].space, "uid-1") == 0 &&
                            (strcmp(all[i].name, "#3") == 0 || strcmp(all[i].name, "#4") == 0));
        reopen_without_catalog();
    }
}

// A folder that the store has made is there after a loss of power, with what was saved in it.
PLAIN_TEST(new_folder)
{
    static const struct {
        const char *path, *above;
    } folders[] = {{"/store", "/"},
                   {"/new/store", "/new"},
                   {"/new//store//", "/new"},
                   {"store", "."},
                   {"new/store", "new"}};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        static struct fault_io fresh;
        struct kvq_store *store;
        struct kvq_save *save;
        struct kvq_store_session it;
        char text[KVQ_TEXT_BYTES];
        const struct kvq_store_options options = {.io = &fresh.io, .segment_bytes = 64 << 10};
        const struct kvq_store_meta m = {.space = "uid-1", .name = "s", .shards = 1};
        fault_open(&fresh, i);
        fresh.new_folder = folders[i].path;
        fresh.above = folders[i].above;
        fresh.lose_all = true;
        for (int start = 0; start < 2; start++) {
            if (kvq_store_open(folders[i].path, &options, &store, NULL, text, sizeof text))
                fail_msg("%s: %s", folders[i].path, text);
            if (start == 0) {
                assert_int_equal(kvq_save_begin(store, &save, text, sizeof text), 0);
                assert_int_equal(kvq_save_session(save, &m, text, sizeof text), 0);
                assert_int_equal(kvq_save_commit(&save, text, sizeof text), 0);
            } else if (kvq_store_find(store, "uid-1", "s", 0, &it, text, sizeof text)) {
                fail_msg("%s: %s", folders[i].path, text);
            }
            kvq_store_close(&store);
            fault_crash(&fresh);
        }
        fault_close(&fresh);
    }
}

static int count_name(void *context, const char *name)
{
    ++*(int *)context;
    return 0;
}

// Who wants a store that is there gets none made: not in an empty folder, and not where nothing is.
PLAIN_TEST(existing_only)
{
    struct kvq_store *store;
    int names = 0;
    begin_disk(7, (struct kit){.options.existing_only = true}, 4);
    assert_int_equal(kit_open(&k, &disk.io), KVQ_E_INVALID);
    assert_says(k.text, "no store is there");
    assert_null(k.store);
    assert_int_equal(disk.io.list(&disk.io, "/store", count_name, &names), 0);
    assert_int_equal(names, 0);
    const struct kvq_store_options options = {.existing_only = true};
    const char *const wrong[] = {"/nonexistent/kvq-test-store", "/dev/null"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(kvq_store_open(wrong[i], &options, &store, NULL, k.text, sizeof k.text),
                         KVQ_E_INVALID);
        assert_says(k.text, i ? "it is no folder" : "there is no such folder");
    }
    k.options.existing_only = false;
    assert_int_equal(kit_open(&k, &disk.io), 0);
    change(&k, &w, 20);
    kvq_store_close(&k.store);
    k.options.existing_only = true;
    for (int lost = 0; lost < 2; lost++) { // the second has segments alone
        assert_int_equal(kit_open(&k, &disk.io), 0);
        check(&k, &w, "existing only");
        kvq_store_close(&k.store);
        if (lost == 0)
            assert_int_equal(kvq_io_unlink(&disk.io, catalog), 0);
    }
}

int main(void)
{
    return run_all(NULL, end_store);
}
