// SPDX-License-Identifier: Apache-2.0
//
// Sessions that move from store to store in a file, and readers beside a writer.
//
// What is imported is what was exported; a file that was cut, or spoiled at any byte, is refused,
// and nothing of it is visible. KVQ_FULL=1 spoils every byte.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "proto/sync.h"
#include "tests/store/move_check.h"

static struct kvq_store_freed freed; // by the last call

TEST(there_and_back)
{
    char why[256];
    make_group();
    take_over("group");
    assert_int_equal(import_it(false), 0);
    if (!kit_same(&other, &w, false, why) || !kit_sound(&other, why))
        fail_msg("%s", why);
    struct kvq_store_status status; // the shared block is one there, too
    assert_int_equal(kvq_store_status(other.store, &status, other.text, sizeof other.text), 0);
    assert_int_equal(status.blocks, 9);
    assert_int_equal(import_it(false), KVQ_E_EXISTS);
    assert_int_equal(import_it(true), 0);
    if (!kit_same(&other, &w, false, why) || !kit_sound(&other, why))
        fail_msg("replaced: %s", why);
    struct kvq_store_session found;
    assert_int_equal(
        kvq_store_exported(other.store, file_path, &found, other.text, sizeof other.text), 0);
    assert_string_equal(found.space, "uid-1");
    assert_string_equal(found.name, "group");
    assert_int_equal(found.tokens, 700);
    assert_int_equal(found.shards, 2);
    assert_int_equal(kvq_store_import(other.store, file_path, "uid-2", "copy", false, other.text,
                                      sizeof other.text),
                     0);
    assert_int_equal(
        kvq_store_find(other.store, "uid-2", "copy", 1, &found, other.text, sizeof other.text), 0);
    assert_int_equal(found.tokens, 700);
    assert_int_equal(export_it("none"), KVQ_E_NO_SESSION);
}

TEST(spoiled_files)
{
    make_group();
    assert_int_equal(export_it("group"), 0);
    uint64_t bytes = fault_find(&disk, file_path)->bytes;
    for (uint64_t n = 0; n < bytes; n += long_tier() ? 64 : 331) {
        carry(&disk, &other_disk, n);
        refused("cut at", n);
    }
    carry(&disk, &other_disk, bytes);
    struct fault_file *file = fault_find(&other_disk, file_path);
    for (uint64_t at = 0; at < bytes; at += long_tier() ? 1 : 97) {
        file->data[at] ^= (uint8_t)(1u << (at % 8));
        refused("spoiled at", at);
        file->data[at] ^= (uint8_t)(1u << (at % 8));
    }
    assert_int_equal(import_it(false), 0);
}

static int room_for(uint64_t blocks, uint64_t bytes)
{
    const struct kvq_store_file file = {.session = {.blocks = blocks, .bytes = bytes}};
    return kvq_store_look_room(other.store, &file, "uid-1", "new", other.text, sizeof other.text);
}

static struct kvq_store_status other_status(void)
{
    struct kvq_store_status status;
    assert_int_equal(kvq_store_status(other.store, &status, other.text, sizeof other.text), 0);
    return status;
}

TEST(room_in_a_namespace)
{
    assert_int_equal(kvq_store_limit(other.store, "uid-1", 10000, NULL, 0), 0);
    assert_int_equal(room_for(10, 10000), 0);
    assert_int_equal(room_for(10, 10001), KVQ_E_QUOTA);
    assert_says(other.text, "namespace uid-1 may keep 10000 bytes");
}

// What is dead is room, and is so once, though a part of it is empty, too.
TEST(room_on_a_disk)
{
    struct world_session *gone = &w.sessions[0];
    *gone = (struct world_session){.used = true, .name = "it", .shards = 1, .n = 20};
    for (uint32_t i = 0; i < 20; i++)
        gone->blocks[i] = (struct world_block){.place = {0, i, 1, i}, .seed = i, .bytes = 9000};
    assert_int_equal(kit_save(&other, &w, "it"), 0);
    assert_int_equal(kvq_store_delete(other.store, "uid-1", "it", NULL, 0), 0);
    struct kvq_store_status s = other_status();
    assert_true(s.dead_bytes > 0 && s.empty_bytes > 0);
    uint64_t dead = s.dead_bytes > s.empty_bytes ? s.dead_bytes : s.empty_bytes;
    other_disk.capacity = fault_physical(&other_disk) + s.free_bytes - s.room_bytes + (1 << 20);
    assert_int_equal(other_status().room_bytes, 1 << 20);
    uint64_t most = (1 << 20) + dead - 100ull * (512 + KVQ_RECORD_HEAD);
    assert_int_equal(room_for(100, most), 0);
    assert_int_equal(room_for(100, most + 1), KVQ_E_NO_SPACE);
    assert_says(other.text, "the disk is full but for about ");
    assert_says(other.text, "free some of the disk");
}

TEST(room_under_a_cap)
{
    kvq_store_close(&other.store);
    other.options.cap_bytes = KVQ_STORE_MIN_CAP;
    assert_int_equal(kit_open(&other, &other_disk.io), 0);
    uint64_t most = other_status().room_bytes;
    assert_int_equal(room_for(0, most), 0);
    assert_int_equal(room_for(0, most + 1), KVQ_E_NO_SPACE);
    assert_says(other.text, "drop saved sessions, or raise storage_bytes");
    other_disk.capacity = fault_physical(&other_disk) + (8 << 20); // less than the cap leaves
    assert_int_equal(room_for(0, most), KVQ_E_NO_SPACE);
    assert_says(other.text, "free some of the disk");
}

TEST(room_where_nothing_is_written)
{
    kvq_store_close(&other.store);
    other_disk.read_only = true;
    assert_int_equal(kit_open(&other, &other_disk.io), 0);
    assert_int_equal(room_for(1, 1), KVQ_E_READ_ONLY);
    assert_says(other.text, "is read-only until it is opened again: ");
}

// A disk that fills up while the file is written leaves no file, and not the old one spoiled.
TEST(no_room)
{
    make_group();
    disk.capacity = fault_physical(&disk) + 4096;
    assert_int_equal(export_it("group"), KVQ_E_NO_SPACE);
    assert_null(fault_find(&disk, file_path));
    assert_null(fault_find(&disk, "/exported.kvqs.tmp"));
}

// What did not change makes the same file, whoever exports it when; a block that is in the files of
// two saves has the same record in both.
TEST(same_saves_same_file)
{
    make_group();
    uint64_t salts[3], bytes[3];
    struct kvq_checksum sums[3];
    for (int i = 0; i < 3; i++) {
        if (i == 1) {
            assert_int_equal(kvq_store_compact(k.store, UINT64_MAX, 0, &freed, NULL, 0), 0);
            kvq_store_close(&k.store);
            assert_int_equal(kit_open(&k, &disk.io), 0);
        } else if (i == 2) {
            assert_int_equal(kit_save(&k, &w, "group"), 0);
        }
        assert_int_equal(export_it("group"), 0);
        const struct fault_file *file = fault_find(&disk, file_path);
        bytes[i] = file->bytes;
        sums[i] = kvq_checksum(file->data, file->bytes);
        memcpy(&salts[i], file->data + KVQ_RECORD_HEAD + 24, sizeof salts[i]);
    }
    assert_int_equal(bytes[0], bytes[1]);
    assert_true(kvq_checksum_equal(sums[0], sums[1]));
    assert_true(salts[0] != 0 && salts[0] == salts[1] && salts[1] == salts[2]);
}

struct onlooker {
    uint32_t told, until; // how often it lets the call go on
    uint64_t done;
};

static int look_on(void *context, uint64_t done, uint64_t all)
{
    struct onlooker *o = context;
    assert_true(done >= o->done && done <= all && all > 0);
    o->done = done;
    return o->told++ == o->until;
}

// All can be ended at every step, and nothing has changed then.
TEST(cancelled)
{
    struct onlooker o;
    const struct kvq_store_watch watch = {look_on, &o};
    uint32_t n = 0;
    int rc;
    make_group();
    do {
        o = (struct onlooker){.until = n++};
        rc = kvq_store_export_watched(k.store, "uid-1", "group", file_path, true, &watch, k.text,
                                      sizeof k.text);
        if (rc < 0)
            assert_null(fault_find(&disk, file_path));
    } while (rc == KVQ_E_CANCELLED);
    assert_int_equal(rc, 0);
    assert_int_equal(n, 10); // blocks, and one more
    assert_int_equal(o.done, 2 * (100 + 433 + 766 + 1099 + 1432) - 100);
    carry(&disk, &other_disk, fault_find(&disk, file_path)->bytes);
    n = 0;
    do {
        struct kvq_store_file file;
        o = (struct onlooker){.until = n++};
        rc = kvq_store_look(other.store, file_path, &watch, &file, other.text, sizeof other.text);
        assert_true((rc == 0) == (file.opaque != NULL));
        free(file.opaque);
    } while (rc == KVQ_E_CANCELLED);
    assert_int_equal(rc, 0);
    assert_int_equal(n, 13); // two manifests and the commit, too
    n = 0;
    do {
        struct kvq_store_status status;
        o = (struct onlooker){.until = n++};
        rc = kvq_store_import_watched(other.store, file_path, NULL, NULL, false, &watch, other.text,
                                      sizeof other.text);
        assert_int_equal(kvq_store_status(other.store, &status, NULL, 0), 0);
        assert_int_equal(status.sessions, rc < 0 ? 0 : 2);
    } while (rc == KVQ_E_CANCELLED);
    assert_int_equal(rc, 0);
    assert_int_equal(n, 13);
}

// What happens to the session while it is exported, at the first block.
struct overtaking {
    struct kit *k;
    struct world *w; // NULL: it is deleted
    bool done;
};

static int overtake(void *context, uint64_t done, uint64_t all)
{
    struct overtaking *o = context;
    (void)done, (void)all;
    if (o->done)
        return 0;
    o->done = true;
    if (o->w)
        assert_int_equal(kit_save(o->k, o->w, "it"), 0);
    else
        assert_int_equal(kvq_store_delete(o->k->store, "uid-1", "it", NULL, 0), 0);
    assert_int_equal(kvq_store_gc(o->k->store, &freed, NULL, 0), 0);
    assert_true(freed.segments > 0);
    return 0;
}

// A session is saved again while it is exported, and the blocks that it had are gone with their
// segments: who exports it is told to do so again, and not that there is no such session.
TEST(overtaken)
{
    struct world_session *s = &w.sessions[0];
    *s = (struct world_session){.used = true, .name = "it", .shards = 1, .tokens = 20, .n = 20};
    for (uint32_t i = 0; i < 20; i++)
        s->blocks[i] = (struct world_block){.place = {0, i, 1, i}, .seed = i, .bytes = 9000};
    assert_int_equal(kit_save(&k, &w, "it"), 0);
    for (int deleted = 0; deleted < 2; deleted++) {
        struct overtaking o = {&k, deleted ? NULL : &w, false};
        const struct kvq_store_watch watch = {overtake, &o};
        for (uint32_t i = 0; i < 20; i++)
            s->blocks[i] = (struct world_block){.place = {0, i, 1, i}, .seed = 50 + i, .bytes = 99};
        int rc = kvq_store_export_watched(k.store, "uid-1", "it", file_path, true, &watch, k.text,
                                          sizeof k.text);
        assert_true(o.done);
        if (rc != (deleted ? KVQ_E_NO_SESSION : KVQ_E_STALE) ||
            !strstr(k.text, deleted ? "no session it of uid-1" : "saved again meanwhile"))
            fail_msg("%s: %s", kvq_status_name(rc), k.text);
        assert_null(fault_find(&disk, file_path));
        for (uint32_t i = 0; i < 20; i++)
            s->blocks[i] = (struct world_block){.place = {0, i, 1, i}, .seed = i, .bytes = 9000};
        assert_int_equal(kit_save(&k, &w, "it"), 0);
    }
    assert_int_equal(export_it("it"), 0);
}

// ---- Readers beside a writer ----

struct reader {
    struct kvq_store *store;
    const uint64_t *stop;
    uint64_t blocks; // read
    char failure[KVQ_TEXT_BYTES];
};

static int read_session(struct reader *r, const struct kvq_store_session *session)
{
    struct kvq_stored *blocks = NULL;
    uint8_t bytes[WORLD_MAX_BYTES];
    uint64_t good;
    size_t n = 0;
    int rc = kvq_store_blocks(r->store, session, &blocks, &n, r->failure, sizeof r->failure);
    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = kvq_store_read(r->store, &blocks[i], bytes, r->failure, sizeof r->failure);
        kvq_long_add(&r->blocks, 1);
    }
    free(blocks);
    if (rc == 0)
        rc = kvq_store_good_tokens(r->store, session, &good, r->failure, sizeof r->failure);
    return rc == KVQ_E_STALE || rc == KVQ_E_NO_SESSION ? 0 : rc;
}

static void *reader_main(void *argument)
{
    struct reader *r = argument;
    struct kvq_store_session all[WORLD_SESSIONS];
    struct kvq_store_verified v;
    uint32_t n = 0;
    int rc = 0;
    while (!kvq_long_load(r->stop) && rc == 0) {
        rc = kvq_store_list(r->store, NULL, 0, all, WORLD_SESSIONS, &n, r->failure,
                            sizeof r->failure);
        for (uint32_t i = 0; i < n && rc == 0; i++)
            rc = read_session(r, &all[i]);
        if (rc == 0)
            rc = kvq_store_verify(r->store, NULL, NULL, &v, r->failure, sizeof r->failure);
        if (rc == 0 && v.text[0]) {
            memcpy(r->failure, v.text, sizeof r->failure);
            rc = KVQ_E_DAMAGED;
        }
    }
    if (rc == 0)
        r->failure[0] = '\0';
    return NULL;
}

// As the daemon does: on, until there is no more to do. What is left is worth its space.
static void tidy(struct kit *k)
{
    struct kvq_store_status status;
    do {
        if (kvq_store_compact(k->store, 20000, 30, &freed, k->text, sizeof k->text))
            fail_msg("%s", k->text);
    } while (freed.more);
    assert_int_equal(kvq_store_status(k->store, &status, NULL, 0), 0);
    // 24 KiB of a segment of 64 may be dead without it being the worst.
    assert_in_range(status.segments, 0, 2 + status.live_bytes / (40 << 10));
}

TEST(readers_beside_a_writer)
{
    struct world after;
    struct reader readers[2];
    pthread_t threads[2];
    const int least = long_tier() ? 2000 : 100, most = 5000;
    uint64_t stop = 0;
    w.random = 9;
    for (int i = 0; i < 2; i++) {
        readers[i] = (struct reader){.store = k.store, .stop = &stop};
        assert_int_equal(pthread_create(&threads[i], NULL, reader_main, &readers[i]), 0);
    }
    for (int i = 0; i < most && (i < least || kvq_long_load(&readers[0].blocks) < 50); i++) {
        if (kit_change(&k, &w, &after))
            fail_msg("%s", k.text);
        w = after;
        if (i % 50 == 49)
            tidy(&k);
    }
    kvq_long_store(&stop, 1);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_string_equal(readers[i].failure, "");
    }
    char why[256];
    if (!kit_same(&k, &w, false, why))
        fail_msg("%s", why);
}

// Who imports need not write to the file.
TEST(not_readable)
{
    struct kvq_store_session of;
    struct kvq_store_file file;
    make_group();
    take_over("group");
    for (int which = 0; which < 3; which++) {
        fault_reset_counts(&other_disk);
        other_disk.fail_read = 1;
        other_disk.fail_with = EACCES;
        int rc = which == 0   ? import_it(false)
                 : which == 1 ? kvq_store_exported(other.store, file_path, &of, other.text,
                                                   sizeof other.text)
                              : kvq_store_look(other.store, file_path, NULL, &file, other.text,
                                               sizeof other.text);
        assert_int_equal(rc, KVQ_E_SYSTEM);
        assert_non_null(strstr(other.text, "give the daemon's user the right to read it, and"));
    }
}

static int make_file(const char *path)
{
    int file = disk.io.open(&disk.io, path, KVQ_IO_WRITE | KVQ_IO_NEW);
    assert_true(file >= 0);
    return file;
}

static int export_new(const char *path, bool replace)
{
    return kvq_store_export(k.store, "uid-1", "group", path, replace, k.text, sizeof k.text);
}

// An export takes no place before it has all, overwrites nothing unasked, and removes what killed
// ones to its path have left, and nothing else.
TEST(unfinished)
{
    static const char *const path = "/out/it", *const left = "/out/it-0123456789abcdef.kvq.tmp";
    static const char *const stay[] = {
        "/out/it-00000000000000ff.kvq.tmp",  // locked: it is being written
        "/out/it-1.kvq.tmp",                 // these have other names
        "/out/it2-0123456789abcdef.kvq.tmp", //
        "/out/it-0123456789ABCDEF.kvq.tmp",
    };
    enum { N = sizeof stay / sizeof *stay };
    make_group();
    int locked = make_file(stay[0]);
    assert_int_equal(disk.io.lock(&disk.io, locked), 0);
    disk.io.close(&disk.io, make_file(left));
    for (int i = 1; i < N; i++)
        disk.io.close(&disk.io, make_file(stay[i]));
    assert_int_equal(export_new(path, false), 0);
    uint64_t bytes = fault_find(&disk, path)->bytes;
    assert_true(bytes > 0);
    assert_null(fault_find(&disk, left));
    for (int i = 0; i < N; i++)
        assert_non_null(fault_find(&disk, stay[i]));
    disk.io.close(&disk.io, locked);
    const struct fault_file *before = fault_find(&disk, path);
    assert_int_equal(export_new(path, false), KVQ_E_EXISTS);
    assert_says(k.text, "/out/it: is there; give another name, or replace it");
    assert_ptr_equal(fault_find(&disk, path), before);
    assert_int_equal(export_new(path, true), 0);
    assert_ptr_not_equal(fault_find(&disk, path), before);
    for (int i = 0; i < FAULT_FILES; i++) // but for those that are not its own
        if (disk.now[i].file && strstr(disk.now[i].path, ".kvq.tmp"))
            assert_true(strcmp(disk.now[i].path, stay[1]) == 0 ||
                        strcmp(disk.now[i].path, stay[2]) == 0 ||
                        strcmp(disk.now[i].path, stay[3]) == 0);
}

// Another export to the path takes a file that is not locked yet for one that was left.
static struct {
    int (*lock)(struct kvq_io *io, int file);
    int times;   // that it comes in between
    bool has_it; // still, while this one would lock it
} other_export;

static int lock_behind_another(struct kvq_io *io, int file)
{
    if (other_export.times == 0)
        return other_export.lock(io, file);
    other_export.times--;
    for (int i = 0; i < FAULT_FILES; i++)
        if (disk.now[i].file && strstr(disk.now[i].path, ".kvq.tmp"))
            assert_int_equal(io->unlink(io, disk.now[i].path), 0);
    return other_export.has_it ? -EWOULDBLOCK : other_export.lock(io, file);
}

TEST(taken_for_one_that_was_left)
{
    make_group();
    other_export.lock = disk.io.lock;
    disk.io.lock = lock_behind_another;
    for (int has_it = 0; has_it < 2; has_it++) {
        other_export.times = 2;
        other_export.has_it = has_it;
        assert_int_equal(export_new(has_it ? "/out/locked" : "/out/gone", false), 0);
        assert_int_equal(other_export.times, 0);
        assert_non_null(fault_find(&disk, has_it ? "/out/locked" : "/out/gone"));
    }
    disk.io.lock = other_export.lock;
}

static int sync_nothing(struct kvq_io *io, const char *path)
{
    return -EACCES;
}

// An export that has failed has taken no place.
TEST(folder_not_synced)
{
    make_group();
    int (*sync_dir)(struct kvq_io *, const char *) = disk.io.sync_dir;
    disk.io.sync_dir = sync_nothing;
    assert_int_equal(export_new("/out/it", false), KVQ_E_SYSTEM);
    disk.io.sync_dir = sync_dir;
    assert_says(k.text, "the folder of the file cannot be synced");
    assert_null(fault_find(&disk, "/out/it"));
    assert_int_equal(export_new("/out/it", false), 0);
}

static void write_file(const char *path, const char *text)
{
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_int_equal(write(file, text, 1), 1);
    close(file);
}

static char first_of(const char *path)
{
    char c = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    assert_int_equal(read(file, &c, 1), 1);
    close(file);
    return c;
}

// The operating system's way to give a name that is free.
PLAIN_TEST(rename_new)
{
    struct kvq_io *io = kvq_io_posix();
    char folder[] = "/tmp/kvq-move-XXXXXX", from[64], to[64];
    assert_non_null(mkdtemp(folder));
    snprintf(from, sizeof from, "%s/from", folder);
    snprintf(to, sizeof to, "%s/to", folder);
    write_file(from, "1");
    write_file(to, "2");
    assert_int_equal(kvq_io_rename_new(io, from, to), -EEXIST);
    assert_int_equal(first_of(from), '1');
    assert_int_equal(first_of(to), '2');
    assert_int_equal(unlink(to), 0);
    assert_int_equal(kvq_io_rename_new(io, from, to), 0);
    assert_int_equal(first_of(to), '1');
    assert_int_equal(access(from, F_OK), -1);
    assert_int_equal(unlink(to), 0);
    assert_int_equal(rmdir(folder), 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
