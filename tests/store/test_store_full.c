// SPDX-License-Identifier: Apache-2.0
//
// A disk that is nearly full, and one that is full to its last byte: what there is room for is
// saved, the rest is refused with words, and deleting works, however little is left. On a disk in
// memory, and on file systems of Linux, ext4 and tmpfs, where this program may mount them.
#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/status.h"
#include "tests/kits/unit.h"
#include "tests/store/store_kit.h"

enum {
    DISK_MIB = 64,
    FREE_MIB = 23,
    SMALL = 60,           // sessions of one block each
    LARGE_BLOCKS = 12000, // of the session that takes most to delete
    BLOCK = 64 << 10,
    PROMPTS = 80, // whose hashes fill more pages of the catalog than a WAL of 4 MiB has
    PROMPT_PAGES = 2048,
};

static struct fault_io disk;
static int disk_says; // where the one in memory is full; 0: ENOSPC
static char top[] = "/tmp/kvq-full-XXXXXX", dir[64], image[64];

// ---- Places ----

struct place {
    const char *name;
    bool (*make)(void); // false: it cannot be had here, and why was said
    void (*fill)(uint64_t leave);
    void (*drain)(void); // takes away all of what filled it
    void (*read_only)(bool on);
    void (*end)(void);
};

static const struct place *place;

static struct kvq_io *io(void)
{
    return strcmp(place->name, "memory") == 0 ? &disk.io : kvq_io_posix();
}

static const char *folder(void)
{
    static char path[80];
    snprintf(path, sizeof path, "%s/store", dir);
    return strcmp(place->name, "memory") == 0 ? "/store" : path;
}

static uint64_t free_bytes(void)
{
    uint64_t n;
    assert_int_equal(io()->space(io(), folder(), &n), 0);
    return n;
}

static bool make_memory(void)
{
    fault_open(&disk, 1);
    disk.full_with = disk_says;
    disk.capacity = (uint64_t)DISK_MIB << 20;
    return true;
}

// What others have on it stands for in what it can hold at all.
static void fill_memory(uint64_t leave)
{
    disk.capacity = fault_physical(&disk) + leave;
}

static void drain_memory(void)
{
    disk.capacity = (uint64_t)DISK_MIB << 20;
}

static void read_only_memory(bool on)
{
    disk.read_only = on;
}

static void end_memory(void)
{
    fault_close(&disk);
}

static bool in_a_namespace(void)
{
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) {
        print_message("skipped: this process may not mount: %s\n", strerror(errno));
        return false;
    }
    return true;
}

static bool make_tmpfs(void)
{
    char size[32];
    snprintf(size, sizeof size, "size=%dm", DISK_MIB);
    if (!in_a_namespace())
        return false;
    if (mount("none", dir, "tmpfs", 0, size) == 0)
        return true;
    print_message("skipped: no tmpfs can be mounted: %s\n", strerror(errno));
    return false;
}

static bool run_tool(char *const *words)
{
    extern char **environ;
    pid_t child;
    int status = 1;
    return posix_spawnp(&child, words[0], NULL, NULL, words, environ) == 0 &&
           waitpid(child, &status, 0) == child && status == 0;
}

static bool make_ext4(void)
{
    char *const make[] = {"mkfs.ext4", "-q", "-F", "-m", "0", image, NULL};
    char *const put[] = {"mount", "-o", "loop", image, dir, NULL};
    if (!in_a_namespace())
        return false;
    int file = open(image, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(file >= 0 && ftruncate(file, (off_t)DISK_MIB << 20) == 0);
    close(file);
    if (run_tool(make) && run_tool(put))
        return true;
    (void)unlink(image);
    print_message("skipped: no image of ext4 can be made and mounted\n");
    return false;
}

// A file that takes what is free, but for `leave` bytes.
static void fill_mount(uint64_t leave)
{
    static uint8_t page[4096];
    char path[96];
    snprintf(path, sizeof path, "%s/filling", dir);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    assert_true(file >= 0);
    while (free_bytes() > leave && write(file, page, sizeof page) > 0)
        ;
    assert_int_equal(fsync(file), 0);
    close(file);
}

static void drain_mount(void)
{
    char path[96];
    snprintf(path, sizeof path, "%s/filling", dir);
    assert_int_equal(unlink(path), 0);
}

static void read_only_mount(bool on)
{
    assert_int_equal(mount(NULL, dir, NULL, MS_REMOUNT | (on ? MS_RDONLY : 0), NULL), 0);
}

static void end_mount(void)
{
    assert_int_equal(umount(dir), 0);
    (void)unlink(image);
}

static const struct place places[] = {
    {"memory", make_memory, fill_memory, drain_memory, read_only_memory, end_memory},
    {"tmpfs", make_tmpfs, fill_mount, drain_mount, read_only_mount, end_mount},
    {"ext4", make_ext4, fill_mount, drain_mount, read_only_mount, end_mount},
};

// ---- Sessions ----

static struct kvq_store *store;
static char text[KVQ_TEXT_BYTES];
static uint64_t left; // on disk, before the last save was committed

static const char *numbered(const char *name, uint32_t number)
{
    static char whole[32];
    snprintf(whole, sizeof whole, "%s%u", name, number);
    return whole;
}

static int open_it(void)
{
    const struct kvq_store_options options = {.io = io()};
    struct kvq_store_report report;
    return kvq_store_open(folder(), &options, &store, &report, text, sizeof text);
}

static int save(const char *name, uint32_t blocks, size_t bytes)
{
    static uint8_t data[BLOCK];
    struct kvq_save *save;
    uint64_t id;
    const struct kvq_store_meta meta = {.space = "full", .name = name, .shards = 1, .tokens = 9};
    int rc = kvq_save_begin(store, &save, text, sizeof text);
    if (rc)
        return rc;
    rc = kvq_save_session(save, &meta, text, sizeof text);
    for (uint32_t i = 0; i < blocks && rc == 0; i++) {
        const struct kvq_place at = {i % 16, i / 16, 1, 0};
        world_fill(i, data, bytes);
        rc = kvq_save_put(save, &at, data, bytes, &id, text, sizeof text);
    }
    left = free_bytes();
    if (rc == 0)
        return kvq_save_commit(&save, text, sizeof text);
    kvq_save_abort(&save);
    return rc;
}

static void drop(const char *name)
{
    if (kvq_store_delete(store, "full", name, text, sizeof text))
        fail_msg("%s: %s is not deleted with %" PRIu64 " bytes free: %s", place->name, name,
                 free_bytes(), text);
}

static void check_session(const char *name, uint32_t blocks, size_t bytes)
{
    static uint8_t want[BLOCK], is[BLOCK];
    struct kvq_store_session found;
    struct kvq_stored *all;
    size_t n;
    assert_int_equal(kvq_store_find(store, "full", name, 0, &found, text, sizeof text), 0);
    assert_int_equal(kvq_store_blocks(store, &found, &all, &n, text, sizeof text), 0);
    assert_int_equal(n, blocks);
    for (size_t i = 0; i < n; i++) {
        world_fill(all[i].place.page * 16 + all[i].place.layer, want, bytes);
        assert_int_equal(all[i].bytes, bytes);
        assert_int_equal(kvq_store_read(store, &all[i], is, text, sizeof text), 0);
        assert_memory_equal(is, want, bytes);
    }
    free(all);
}

static void check_store(void)
{
    struct kvq_store_verified v;
    assert_int_equal(kvq_store_verify(store, NULL, NULL, &v, text, sizeof text), 0);
    assert_string_equal(v.text, "");
}

static void fill_up(void)
{
    place->fill(0);
    assert_true(free_bytes() < 4096);
}

// ---- What must hold ----

// Of 23 MiB most can be used, and what is refused is refused for the disk's sake.
static uint32_t save_until_full(void)
{
    uint32_t n = 0;
    int rc = 0;
    for (; n < DISK_MIB; n++) {
        rc = save(numbered("big", n), (1 << 20) / BLOCK, BLOCK);
        if (rc)
            break;
        if (n == 0 && left < 1 << 20) // what was tried to be taken in advance, in vain
            fail_msg("%s: a save of 1 MiB leaves %" PRIu64 " bytes of %d MiB", place->name, left,
                     FREE_MIB);
    }
    if (n < FREE_MIB / 2)
        fail_msg("%s: only %u MiB are saved of %d: %s", place->name, n, FREE_MIB, text);
    assert_int_equal(rc, KVQ_E_NO_SPACE);
    assert_says(text, "full");
    return n;
}

// Space that a segment took in advance is the catalog's if it needs it.
static void save_with_what_is_there(void)
{
    fill_up();
    if (save("rows", 3000, 64))
        fail_msg("%s: space that was taken in advance does not help: %s", place->name, text);
    drop("rows");
    place->drain();
    place->fill((uint64_t)FREE_MIB << 20);
}

// What the database has no room for is refused, and not left in the WAL, where deleting needs the
// room.
static void save_too_many_rows(void)
{
    fill_up();
    place->drain();
    place->fill(1400 << 10);
    assert_int_equal(save("rows", 12000, 0), KVQ_E_NO_SPACE);
    assert_says(text, "catalog");
    assert_int_equal(save("row", 1, 64), 0);
}

// Nothing but the store's own reserve is there.
static void delete_at_nothing(uint32_t big)
{
    struct kvq_store_freed freed;
    const struct kvq_store_use use = {1, 77};
    fill_up();
    drop("large");
    for (uint32_t i = 0; i < SMALL; i++) {
        fill_up();
        drop(numbered("small", i));
    }
    fill_up();
    assert_int_equal(kvq_store_touch(store, &use, 1, text, sizeof text), 0);
    check_session("big0", (1 << 20) / BLOCK, BLOCK);
    check_store();
    // The reserve is there also for who opens a store on a disk that is full.
    kvq_store_close(&store);
    fill_up();
    assert_int_equal(open_it(), 0);
    fill_up();
    for (uint32_t i = 1; i < big; i++) {
        drop(numbered("big", i));
        fill_up();
    }
    check_session("big0", (1 << 20) / BLOCK, BLOCK);
    drop("big0");
    drop("first");
    drop("row");
    fill_up();
    do { // nothing is alive but DROP records, which nothing needs any more
        int rc = kvq_store_compact(store, 1 << 30, 10, &freed, text, sizeof text);
        if (rc)
            fail_msg("%s: what is deleted takes room for ever: %s", place->name, text);
    } while (freed.more);
    if (free_bytes() < (uint64_t)FREE_MIB / 2 << 20)
        fail_msg("%s: %" PRIu64 " bytes are free", place->name, free_bytes());
}

static void refuses_to_write(void)
{
    place->read_only(true);
    assert_int_equal(open_it(), 0);
    check_session("again", 4, BLOCK);
    check_store();
    assert_int_equal(save("no", 1, 10), KVQ_E_READ_ONLY);
    assert_int_equal(kvq_store_delete(store, "full", "again", text, sizeof text), KVQ_E_READ_ONLY);
    kvq_store_close(&store);
    place->read_only(false);
    assert_int_equal(open_it(), 0);
    drop("again");
    kvq_store_close(&store);
}

static void run(const struct place *at)
{
    place = at;
    if (!place->make()) {
        skip();
        return;
    }
    assert_int_equal(open_it(), 0);
    assert_int_equal(save("large", LARGE_BLOCKS, 64), 0);
    for (uint32_t i = 0; i < SMALL; i++)
        assert_int_equal(save(numbered("small", i), 1, 64), 0);
    kvq_store_close(&store);
    place->fill((uint64_t)FREE_MIB << 20);
    assert_int_equal(open_it(), 0);
    assert_int_equal(save("first", 4, BLOCK), 0);
    save_with_what_is_there();
    uint32_t big = save_until_full();
    print_message("%s: %u MiB saved of %d\n", place->name, big, FREE_MIB);
    check_store();
    save_too_many_rows();
    delete_at_nothing(big);
    place->drain();
    assert_int_equal(save("again", 4, BLOCK), 0);
    check_session("again", 4, BLOCK);
    check_store();
    kvq_store_close(&store);
    refuses_to_write();
    place->end();
}

PLAIN_TEST(in_memory)
{
    run(&places[0]);
}

PLAIN_TEST(on_tmpfs)
{
    run(&places[1]);
}

PLAIN_TEST(on_ext4)
{
    run(&places[2]);
}

// A quota on a disk is a full disk to who writes: all of the above once more.
PLAIN_TEST(over_quota)
{
    disk_says = EDQUOT;
    run(&places[0]);
    disk_says = 0;
}

// Opening a store where nothing can be written: the process id, which nobody needs, and the
// catalog's WAL, without which the store is not opened, and nothing is lost.
PLAIN_TEST(opened_at_nothing)
{
    static const int errors[] = {ENOSPC, EDQUOT};
    static const char *const lock = "/store/lock", *const wal = "/store/catalog.db-wal";
    place = &places[0];
    for (int i = 0; i < 2; i++) {
        disk_says = errors[i];
        assert_true(place->make());
        assert_int_equal(open_it(), 0);
        assert_int_equal(save("it", 4, BLOCK), 0);
        kvq_store_close(&store);
        fault_find(&disk, lock)->bytes = 0;
        fill_up();
        if (open_it())
            fail_msg("%s: %s", strerror(disk_says), text);
        assert_int_equal(fault_find(&disk, lock)->bytes, 0);
        kvq_store_close(&store);
        assert_int_equal(disk.io.unlink(&disk.io, wal), 0);
        disk.no_new = true;
        int rc = open_it();
        if (rc != KVQ_E_NO_SPACE)
            fail_msg("%s: %s: %s", strerror(disk_says), kvq_status_name(rc), text);
        assert_says(text, "full");
        disk.no_new = false;
        place->drain();
        assert_int_equal(open_it(), 0);
        check_session("it", 4, BLOCK);
        kvq_store_close(&store);
        place->end();
    }
    disk_says = 0;
}

// ---- A catalog that is much larger than what deleting has ----

// A session of a long prompt: it shares its first page with all others, and has the hashes of all
// pages, which lie wherever they belong among those of all sessions.
static int save_prompt(const char *name, uint32_t number, uint32_t pages)
{
    struct kvq_save *save;
    uint8_t data[64], hash[KVQ_PREFIX_BYTES];
    uint64_t id;
    const struct kvq_place at = {0, 0, 1, 0};
    const struct kvq_store_meta meta = {
        .space = "full", .name = name, .shards = 1, .tokens = pages * 128};
    assert_int_equal(kvq_save_begin(store, &save, text, sizeof text), 0);
    int rc = kvq_save_session(save, &meta, text, sizeof text);
    world_fill(number, data, sizeof data);
    rc = rc ? rc : kvq_save_put(save, &at, data, sizeof data, &id, text, sizeof text);
    for (uint32_t i = 0; i < pages && rc == 0; i++) {
        world_fill(number * PROMPT_PAGES + i, hash, sizeof hash);
        rc = kvq_save_prefix(save, hash, text, sizeof text);
    }
    if (rc == 0)
        return kvq_save_commit(&save, text, sizeof text);
    kvq_save_abort(&save);
    return rc;
}

PLAIN_TEST(scattered)
{
    char name[16];
    place = &places[0];
    assert_true(place->make());
    assert_int_equal(open_it(), 0);
    for (uint32_t i = 0; i < PROMPTS; i++) {
        snprintf(name, sizeof name, "prompt%u", i);
        if (save_prompt(name, i, PROMPT_PAGES))
            fail_msg("%s: %s", name, text);
    }
    for (uint32_t i = 0; i < PROMPTS; i++) {
        fill_up();
        drop(numbered("prompt", i));
    }
    check_store();
    kvq_store_close(&store);
    place->end();
}

// More of them than one transaction has room to delete.
PLAIN_TEST(swept_at_nothing)
{
    char name[16];
    const uint32_t sessions = 4 * PROMPTS, pages = PROMPT_PAGES / 4;
    uint32_t n, sum = 0;
    place = &places[0];
    assert_true(place->make());
    assert_int_equal(open_it(), 0);
    for (uint32_t i = 0; i < sessions; i++) {
        snprintf(name, sizeof name, "#%u", i);
        assert_int_equal(save_prompt(name, i, pages), 0);
    }
    assert_int_equal(save_prompt("prompt", sessions, pages), 0);
    kvq_store_close(&store);
    assert_int_equal(open_it(), 0);
    do {
        fill_up();
        if (kvq_store_sweep(store, NULL, sessions, &n, text, sizeof text))
            fail_msg("%u are deleted: %s", sum, text);
        sum += n;
    } while (n);
    assert_int_equal(sum, sessions);
    drop("prompt");
    check_store();
    kvq_store_close(&store);
    place->end();
}

static int set_up(void **state)
{
    if (!mkdtemp(top))
        return -1;
    snprintf(dir, sizeof dir, "%s/mount", top);
    snprintf(image, sizeof image, "%s/image", top);
    return mkdir(dir, 0700);
}

static int tear_down(void **state)
{
    return rmdir(dir) || rmdir(top) ? -1 : 0;
}

int main(void)
{
    return run_all(set_up, tear_down);
}
