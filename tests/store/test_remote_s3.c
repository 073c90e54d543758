// SPDX-License-Identifier: Apache-2.0
//
// The remote tier against a real S3-compatible server: rclone's, which checks signatures, on
// loopback. Skipped where there is none, see remote_kit.h.

#include <dirent.h>
#include <unistd.h>

#include "proto/status.h"
#include "storage/remote_index.h"
#include "storage/store.h"
#include "tests/kits/unit.h"
#include "tests/store/remote_kit.h"

enum { PART = KVQ_REMOTE_PART_MIN, FILE_BYTES = 5 * PART + 4321 };

static struct s3 s3;
static struct test_clock test_clock;
static struct kvq_remote *remote;
static char text[512];
static char folder[] = "/tmp/kvq-remote-XXXXXX";
static char source[64], target[64], part[64], moving[64];
static struct kvq_remote_moved moved; // by the last transfer
static uint32_t connections = 1;      // which tests of what a broken transfer keeps count on

static void good(int rc)
{
    if (rc != 0)
        fail_msg("%s: %s", kvq_status_name(rc), text);
}

static void reopen(void)
{
    kvq_remote_close(&remote);
    struct kvq_remote_options o = remote_options(s3.port, &test_clock);
    o.prefix = "team/kv";
    o.connections = connections;
    good(kvq_remote_open(&o, &remote, text, sizeof text));
}

static int setup(void **state)
{
    test_clock_init(&test_clock);
    reopen();
    unlink(target);
    unlink(part);
    return 0;
}

static int teardown(void **state)
{
    kvq_remote_close(&remote);
    return 0;
}

// ---- Who looks on ----

// Ends a transfer when that many bytes are done, by cancelling it or by killing the server.
struct breaker {
    uint64_t at;
    bool kill_server, done;
};

static struct breaker breaker;

static int break_it(void *context, uint64_t done, uint64_t all)
{
    struct breaker *b = context;
    if (b->done || done < b->at || all == 0)
        return 0;
    b->done = true;
    if (b->kill_server)
        s3_kill(&s3);
    return b->kill_server ? 0 : 1;
}

static const struct kvq_remote_watch *breaks_at(uint64_t at, bool kill_server)
{
    static const struct kvq_remote_watch watch = {break_it, &breaker};
    breaker = (struct breaker){.at = at, .kill_server = kill_server};
    return &watch;
}

// ---- Transfers ----

static int push_file(const char *space, const char *name, const struct kvq_remote_watch *watch)
{
    return kvq_remote_push_file(remote, source, space, name, false, watch, &moved, text,
                                sizeof text);
}

static int pull_file(const char *space, const char *name, const struct kvq_remote_watch *watch)
{
    return kvq_remote_pull_file(remote, space, name, target, watch, &moved, text, sizeof text);
}

static int push_session(struct kvq_store *store, const char *name,
                        const struct kvq_remote_watch *watch)
{
    return kvq_remote_push(remote, store, moving, "u", name, false, watch, &moved, text,
                           sizeof text);
}

static int pull_session(struct kvq_store *store, const struct kvq_remote_pull *what,
                        const struct kvq_remote_watch *watch)
{
    return kvq_remote_pull(remote, store, moving, what, watch, &moved, text, sizeof text);
}

// ---- Objects ----

static int count_object(void *context, const struct kvq_remote_object *object)
{
    ++*(int *)context;
    return 0;
}

static int count_objects(const char *start)
{
    int n = 0;
    good(kvq_remote_list(remote, start, "", count_object, &n, text, sizeof text));
    return n;
}

TEST(objects_come_back)
{
    char *big = malloc(300 * 1024);
    void *data = NULL;
    size_t n = 0;
    struct kvq_remote_object object;
    memset(big, 'b', 300 * 1024);
    good(kvq_remote_put(remote, "a/small", "hello", 5, NULL, text, sizeof text));
    good(kvq_remote_put(remote, "a/empty", NULL, 0, NULL, text, sizeof text));
    good(kvq_remote_put(remote, "a/big-1_2.x", big, 300 * 1024, NULL, text, sizeof text));
    good(kvq_remote_get(remote, "a/small", 5, &data, &n, NULL, text, sizeof text));
    assert_int_equal(n, 5);
    assert_memory_equal(data, "hello", 6); // with a NUL behind
    free(data);
    good(kvq_remote_get(remote, "a/empty", 5, &data, &n, NULL, text, sizeof text));
    assert_int_equal(n, 0);
    free(data);
    good(kvq_remote_get(remote, "a/big-1_2.x", 1 << 20, &data, &n, NULL, text, sizeof text));
    assert_int_equal(n, 300 * 1024);
    assert_memory_equal(data, big, n);
    free(data);
    good(kvq_remote_head(remote, "a/big-1_2.x", &object, text, sizeof text));
    assert_int_equal(object.bytes, 300 * 1024);
    assert_int_equal(count_objects("a/"), 3);
    good(kvq_remote_delete(remote, "a/big-1_2.x", text, sizeof text));
    good(kvq_remote_delete(remote, "a/big-1_2.x", text, sizeof text)); // is gone, as was asked for
    assert_int_equal(count_objects("a/"), 2);
    assert_int_equal(kvq_remote_head(remote, "a/big-1_2.x", &object, text, sizeof text),
                     KVQ_E_NO_SESSION);
    assert_int_equal(kvq_remote_get(remote, "a/small", 4, &data, &n, NULL, text, sizeof text),
                     KVQ_E_REMOTE); // larger than was allowed
    assert_null(data);
    free(big);
}

TEST(wrong_keys_and_buckets_are_named)
{
    struct kvq_remote_options o = remote_options(s3.port, &test_clock);
    struct kvq_remote *other;
    snprintf(o.keys.secret, sizeof o.keys.secret, "another-secret-that-is-wrong");
    good(kvq_remote_open(&o, &other, text, sizeof text));
    assert_int_equal(kvq_remote_put(other, "x", "y", 1, NULL, text, sizeof text), KVQ_E_PERMISSION);
    assert_says(text, "403");
    assert_says(text, "check the secret key");
    assert_null(strstr(text, "another-secret"));
    kvq_remote_close(&other);

    o = remote_options(s3.port, &test_clock);
    o.bucket = "no-such-bucket";
    good(kvq_remote_open(&o, &other, text, sizeof text));
    assert_int_equal(kvq_remote_put(other, "x", "y", 1, NULL, text, sizeof text), KVQ_E_REMOTE);
    assert_says(text, "no-such-bucket");
    assert_says(text, "make the bucket");
    kvq_remote_close(&other);
    assert_int_equal(test_clock.waits, 0); // neither is worth another try
}

// ---- Sessions ----

static uint64_t push_some(const char *name)
{
    good(push_file("team a", name, NULL));
    return moved.transferred;
}

static void push(const char *name, uint64_t transferred)
{
    assert_int_equal(push_some(name), transferred);
    assert_int_equal(moved.bytes, FILE_BYTES);
}

static uint64_t pull_some(const char *name)
{
    good(pull_file("team a", name, NULL));
    assert_true(same_file(source, target));
    assert_int_not_equal(access(part, F_OK), 0);
    return moved.transferred;
}

static void pull(const char *name, uint64_t transferred)
{
    assert_int_equal(pull_some(name), transferred);
}

// Where the server has a session's data, if it is one pack.
static void data_path(const char *name, char *out, size_t size)
{
    char where[512];
    snprintf(where, sizeof where, "%s/" REMOTE_BUCKET "/team/kv/team_20a/%s/data", s3.folder, name);
    DIR *dir = opendir(where);
    assert_non_null(dir);
    struct dirent *entry;
    *out = '\0';
    while ((entry = readdir(dir))) {
        if (entry->d_name[0] != '.')
            snprintf(out, size, "%s/%s", where, entry->d_name);
    }
    closedir(dir);
    assert_true(*out);
}

TEST(a_session_goes_there_and_back)
{
    make_file(source, FILE_BYTES, 1);
    push("chat", FILE_BYTES);
    pull("chat", FILE_BYTES);
    pull("chat", 0); // the file is there, and every part of it is right
    push("chat", 0);
    assert_int_equal(count_objects("team_20a/chat/"), 2);
    make_file(source, FILE_BYTES, 2);
    push("chat", FILE_BYTES);
    assert_int_equal(count_objects("team_20a/chat/"), 2); // the old data is gone
    pull("chat", FILE_BYTES);
}

TEST(a_session_of_one_part)
{
    make_file(source, 1000, 3);
    good(push_file("s", "tiny", NULL));
    good(pull_file("s", "tiny", NULL));
    assert_true(same_file(source, target));
}

TEST(a_push_goes_on_where_it_broke)
{
    make_file(source, FILE_BYTES, 4);
    push("broken", FILE_BYTES);
    make_file(source, FILE_BYTES, 5);
    assert_int_equal(push_file("team a", "broken", breaks_at(2 * PART + 1, false)),
                     KVQ_E_CANCELLED);
    uint64_t first = moved.transferred;
    assert_in_range(first, PART, 3 * PART);
    make_file(source, FILE_BYTES, 4);
    pull("broken", FILE_BYTES); // what was there before is still there, as a whole
    make_file(source, FILE_BYTES, 5);
    reopen();                            // as another process would
    uint64_t sent = push_some("broken"); // the part that broke may have arrived as a whole
    assert_true(sent == FILE_BYTES - first || sent == FILE_BYTES - first - PART);
    unlink(target);
    pull("broken", FILE_BYTES);
}

TEST(a_pull_goes_on_where_it_broke)
{
    make_file(source, FILE_BYTES, 6);
    push("long", FILE_BYTES);
    assert_int_equal(pull_file("team a", "long", breaks_at(3 * PART, false)), KVQ_E_CANCELLED);
    uint64_t first = moved.transferred;
    assert_in_range(first, PART, 4 * PART);
    assert_int_not_equal(access(target, F_OK), 0); // nothing that is partial has the name
    assert_int_equal(access(part, F_OK), 0);
    // A part that is spoilt while it lies there is fetched again, too.
    FILE *file = fopen(part, "r+b");
    assert_non_null(file);
    fseek(file, 100, SEEK_SET);
    putc('!', file);
    fclose(file);
    reopen();
    uint64_t rest = pull_some("long");
    assert_in_range(rest, FILE_BYTES - first + 1, FILE_BYTES - first + PART / 4); // a chunk more
}

// Many parts over several connections, broken off in the middle, and gone on with.
TEST(parts_go_side_by_side)
{
    enum { MANY = 40 * PART + 17 };
    connections = 4;
    reopen();
    connections = 1;
    make_file(source, MANY, 8);
    assert_int_equal(push_file("s", "side", breaks_at(20 * PART, false)), KVQ_E_CANCELLED);
    uint64_t first = moved.transferred;
    assert_in_range(first, 12 * PART, 24 * PART); // parts that were under way do not count
    good(push_file("s", "side", NULL));
    assert_in_range(moved.transferred, MANY - first - 4 * PART, MANY - first);
    assert_int_equal(pull_file("s", "side", breaks_at(20 * PART, false)), KVQ_E_CANCELLED);
    first = moved.transferred;
    assert_in_range(first, 12 * PART, 24 * PART);
    good(pull_file("s", "side", NULL));
    assert_int_equal(moved.transferred, MANY - first);
    assert_true(same_file(source, target));
}

// ---- What is new ----

static int add_bytes(void *context, const struct kvq_remote_object *object)
{
    *(uint64_t *)context += object->bytes;
    return 0;
}

// Of all packs, as the server has them.
static uint64_t bytes_there(const char *name)
{
    char start[128];
    uint64_t sum = 0;
    snprintf(start, sizeof start, "team_20a/%s/data/", name);
    good(kvq_remote_list(remote, start, "", add_bytes, &sum, text, sizeof text));
    return sum;
}

// Puts n bytes into the source at `at`, in the place of others or before them.
static void edit(size_t at, size_t n, bool insert)
{
    static uint8_t bytes[FILE_BYTES + 64 * 1024];
    FILE *file = fopen(source, "rb");
    assert_non_null(file);
    size_t had = fread(bytes, 1, sizeof bytes / 2, file);
    fclose(file);
    if (insert)
        memmove(bytes + at + n, bytes + at, had - at);
    for (size_t i = 0; i < n; i++)
        bytes[at + i] ^= 0x5a;
    had = insert ? had + n : at + n > had ? at + n : had;
    file = fopen(source, "wb");
    assert_int_equal(fwrite(bytes, 1, had, file), had);
    fclose(file);
}

TEST(only_what_is_new_is_sent)
{
    make_file(source, FILE_BYTES / 2, 8);
    assert_int_equal(push_some("new"), FILE_BYTES / 2);
    uint64_t there = bytes_there("new");
    assert_int_equal(there, FILE_BYTES / 2);
    edit(10, 100, true); // all behind it has moved
    edit(FILE_BYTES / 4, 1, false);
    edit(FILE_BYTES / 2 + 100, 500, false);
    good(push_file("team a", "new", NULL));
    assert_int_equal(moved.bytes, FILE_BYTES / 2 + 600);
    assert_in_range(moved.transferred, 602, FILE_BYTES / 8);
    assert_int_equal(bytes_there("new"), there + moved.transferred);
    assert_int_equal(count_objects("team_20a/new/"), 3);
    (void)pull_some("new");
    assert_int_equal(push_some("new"), 0);
    make_file(source, FILE_BYTES, 9); // nothing of it is there: the packs go
    push("new", FILE_BYTES);
    assert_int_equal(count_objects("team_20a/new/"), 2);
    (void)pull_some("new");
}

// However often it is pushed: what is dead there is never more than what is alive.
TEST(packs_have_an_end)
{
    make_file(source, FILE_BYTES / 2, 10);
    for (uint32_t i = 0; i < 30; i++) {
        edit((i * 7919) % (FILE_BYTES / 2 - 3000), 3000, false);
        good(push_file("team a", "often", NULL));
        assert_true(bytes_there("often") <= FILE_BYTES);
    }
    (void)pull_some("often");
}

// A pack that somebody has removed is sent again, whatever the head says.
TEST(a_pack_that_is_gone_is_sent_again)
{
    char path[1024];
    make_file(source, FILE_BYTES / 2, 11);
    (void)push_some("gone");
    data_path("gone", path, sizeof path);
    edit(1000, 10, false);
    assert_in_range(push_some("gone"), 10, FILE_BYTES / 8);
    s3_kill(&s3);
    assert_int_equal(unlink(path), 0);
    s3_again(&s3);
    reopen();
    edit(2000, 10, false);
    assert_int_equal(push_some("gone"), FILE_BYTES / 2);
    (void)pull_some("gone");
}

// What was pushed before there were packs is pulled, and replaced by a push.
TEST(older_pushes_are_read)
{
    char head[1024], hex[KVQ__SHA_HEX], key[256];
    uint8_t bytes[3000], sha[KVQ__SHA_BYTES];
    make_file(source, sizeof bytes, 12);
    FILE *file = fopen(source, "rb");
    assert_int_equal(fread(bytes, 1, sizeof bytes, file), sizeof bytes);
    fclose(file);
    int used = snprintf(head, sizeof head, "kvq-session 1\nbytes 3000\npart 2000\n");
    for (size_t at = 0; at < sizeof bytes; at += 2000) {
        assert_int_equal(kvq__sha256(bytes + at, at ? 1000 : 2000, sha), 0);
        kvq__sha_hex(sha, hex);
        used += snprintf(head + used, sizeof head - (size_t)used, "%s\n", hex);
    }
    used += snprintf(head + used, sizeof head - (size_t)used, "end\n");
    assert_int_equal(kvq__sha256(head, (size_t)used, sha), 0);
    kvq__sha_hex(sha, hex);
    snprintf(key, sizeof key, "team_20a/old/data/%s", hex);
    good(kvq_remote_put(remote, key, bytes, sizeof bytes, NULL, text, sizeof text));
    good(kvq_remote_put(remote, "team_20a/old/head", head, (size_t)used, NULL, text, sizeof text));
    assert_int_equal(pull_some("old"), sizeof bytes);
    unlink(target);
    edit(100, 1, false);
    (void)push_some("old");
    assert_int_equal(count_objects("team_20a/old/"), 2);
    (void)pull_some("old");
}

TEST(a_server_that_dies_is_survived)
{
    make_file(source, FILE_BYTES, 7);
    assert_int_equal(push_file("team a", "dies", breaks_at(2 * PART, true)), KVQ_E_REMOTE);
    assert_says(text, "after 4 tries");
    assert_int_equal(test_clock.waits, 3);
    s3_again(&s3); // it has forgotten the parts, which it had in memory
    push("dies", FILE_BYTES);
    assert_int_equal(pull_file("team a", "dies", breaks_at(2 * PART, true)), KVQ_E_REMOTE);
    uint64_t had = moved.transferred;
    assert_true(had >= PART && had < FILE_BYTES);
    s3_again(&s3);
    pull("dies", FILE_BYTES - had);
}

// ---- Damage ----

// After files of the server's have been changed behind its back.
static int try_pull(const char *name)
{
    s3_kill(&s3);
    s3_again(&s3);
    unlink(target);
    unlink(part);
    return pull_file("team a", name, NULL);
}

static void flip_byte(const char *path, long at)
{
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    fseek(file, at, SEEK_SET);
    int was = getc(file);
    fseek(file, -1, SEEK_CUR);
    putc(was ^ 1, file);
    fclose(file);
}

// What a pull has found damaged a push replaces when it is told to, though the damaged objects are
// as long as they should be: a pack of several parts, one of a single part, and two packs.
TEST(damage_is_mended)
{
    static const size_t sizes[] = {FILE_BYTES, PART / 2, FILE_BYTES};
    char path[1024];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char name[16];
        snprintf(name, sizeof name, "mend-%zu", i);
        make_file(source, sizes[i], 20 + (uint32_t)i);
        assert_int_equal(push_some(name), sizes[i]);
        data_path(name, path, sizeof path);
        if (i == 2) {
            edit(1000, 10, false);
            (void)push_some(name);
            assert_int_equal(count_objects("team_20a/mend-2/data/"), 2);
        }
        flip_byte(path, (long)sizes[i] / 2);
        assert_int_equal(try_pull(name), KVQ_E_DAMAGED);
        assert_says(text, "kvqctl session push NAME --again");
        assert_int_equal(push_some(name), 0); // it looks as if all were there
        assert_int_equal(try_pull(name), KVQ_E_DAMAGED);
        good(kvq_remote_push_file(remote, source, "team a", name, true, NULL, &moved, text,
                                  sizeof text));
        assert_int_equal(moved.transferred, moved.bytes);
        good(try_pull(name));
        assert_true(same_file(source, target));
        assert_int_equal(bytes_there(name), moved.bytes); // of the damaged packs nothing is left
        assert_int_equal(push_some(name), 0);
    }
}

TEST(damage_is_found)
{
    char path[1024], head[1024];
    make_file(source, FILE_BYTES, 8);
    push("hurt", FILE_BYTES);
    data_path("hurt", path, sizeof path);
    flip_byte(path, 4 * PART + 7);
    assert_int_equal(try_pull("hurt"), KVQ_E_DAMAGED);
    assert_says(text, "wrong checksum");
    assert_int_not_equal(access(target, F_OK), 0);
    assert_int_equal(truncate(path, FILE_BYTES - 1), 0);
    assert_int_equal(try_pull("hurt"), KVQ_E_DAMAGED);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(try_pull("hurt"), KVQ_E_DAMAGED);
    assert_says(text, "push it again");
    snprintf(head, sizeof head, "%s/" REMOTE_BUCKET "/team/kv/team_20a/hurt/head", s3.folder);
    make_file(head, 100, 1);
    assert_int_equal(try_pull("hurt"), KVQ_E_DAMAGED);
    push("hurt", FILE_BYTES); // makes all of it good
    assert_int_equal(try_pull("hurt"), 0);
}

// ---- Names ----

static int note_name(void *context, const char *space, const char *name, uint64_t bytes)
{
    char *all = context;
    size_t used = strlen(all);
    snprintf(all + used, 256 - used, "[%s|%s|%d]", space, name, (int)bytes);
    return 0;
}

TEST(names_of_all_kinds)
{
    char all[256] = "";
    make_file(source, 100, 9);
    good(push_file("odd", "../a b/\xc3\xa9%_?", NULL));
    make_file(source, 200, 9);
    good(push_file("odd", "..", NULL));
    good(kvq_remote_sessions(remote, "odd", NULL, note_name, all, text, sizeof text));
    assert_says(all, "[odd|../a b/\xc3\xa9%_?|100]");
    assert_says(all, "[odd|..|200]");
    good(pull_file("odd", "..", NULL));
    good(kvq_remote_forget(remote, "odd", "..", text, sizeof text));
    unlink(target);
    assert_int_equal(kvq_remote_forget(remote, "odd", "..", text, sizeof text), KVQ_E_NO_SESSION);
    assert_int_equal(pull_file("odd", "..", NULL), KVQ_E_NO_SESSION);
    assert_int_not_equal(access(part, F_OK), 0); // nothing came, nothing is left
    assert_int_equal(count_objects("odd/_2E./"), 0);
    assert_int_equal(count_objects("odd/"), 2);
}

// ---- Stores ----

enum { SHARDS = 2, BLOCKS = 3, BLOCK_BYTES = 50000 };

static void fill(uint8_t *block, uint32_t shard, uint32_t page, uint32_t seed)
{
    for (size_t i = 0; i < BLOCK_BYTES; i++)
        block[i] = (uint8_t)(i * 2654435761u >> 13 ^ shard * 31 ^ page * 7 ^ seed);
}

static struct kvq_store *open_store(const char *name)
{
    char path[128];
    struct kvq_store_options options = {0};
    struct kvq_store *store;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    good(kvq_store_open(path, &options, &store, NULL, text, sizeof text));
    return store;
}

static struct kvq_store_meta meta_of(uint32_t shard, int64_t saved_at, const char *bytes)
{
    return (struct kvq_store_meta){.space = "u",
                                   .name = "s",
                                   .model = "m",
                                   .formats = "f",
                                   .shard = shard,
                                   .shards = SHARDS,
                                   .tokens = 384,
                                   .saved_at = saved_at,
                                   .version = 1,
                                   .bytes = bytes,
                                   .n_bytes = strlen(bytes)};
}

static void save_session(struct kvq_store *store, uint32_t seed)
{
    uint8_t block[BLOCK_BYTES];
    uint64_t id;
    struct kvq_save *save;
    good(kvq_save_begin(store, &save, text, sizeof text));
    for (uint32_t shard = 0; shard < SHARDS; shard++) {
        const struct kvq_store_meta meta = meta_of(shard, 1, "meta");
        good(kvq_save_session(save, &meta, text, sizeof text));
        for (uint32_t page = 0; page < BLOCKS; page++) {
            struct kvq_place place = {.page = page, .from = page * 128};
            fill(block, shard, page, seed);
            good(kvq_save_put(save, &place, block, sizeof block, &id, text, sizeof text));
        }
    }
    good(kvq_save_commit(&save, text, sizeof text));
}

// The same blocks, of which the last ones are put anew, with the same bytes, and the others kept.
static void save_again(struct kvq_store *store)
{
    uint8_t block[BLOCK_BYTES];
    uint64_t id;
    struct kvq_save *save;
    good(kvq_save_begin(store, &save, text, sizeof text));
    for (uint32_t shard = 0; shard < SHARDS; shard++) {
        struct kvq_store_session was;
        struct kvq_stored *blocks;
        size_t n;
        good(kvq_store_find(store, "u", "s", shard, &was, text, sizeof text));
        good(kvq_store_blocks(store, &was, &blocks, &n, text, sizeof text));
        const struct kvq_store_meta meta = meta_of(shard, 2, "");
        good(kvq_save_session(save, &meta, text, sizeof text));
        for (uint32_t i = 0; i + 1 < n; i++)
            good(kvq_save_keep(save, &blocks[i].place, blocks[i].id, text, sizeof text));
        good(kvq_store_read(store, &blocks[n - 1], block, text, sizeof text));
        good(kvq_save_put(save, &blocks[n - 1].place, block, sizeof block, &id, text, sizeof text));
        free(blocks);
    }
    good(kvq_save_commit(&save, text, sizeof text));
}

static void check_session(struct kvq_store *store, const char *name, uint32_t seed)
{
    uint8_t want[BLOCK_BYTES], have[BLOCK_BYTES];
    for (uint32_t shard = 0; shard < SHARDS; shard++) {
        struct kvq_store_session session;
        struct kvq_stored *blocks;
        size_t n;
        good(kvq_store_find(store, "u", name, shard, &session, text, sizeof text));
        good(kvq_store_blocks(store, &session, &blocks, &n, text, sizeof text));
        assert_int_equal(n, BLOCKS);
        for (uint32_t page = 0; page < BLOCKS; page++) {
            fill(want, shard, page, seed);
            assert_int_equal(blocks[page].bytes, BLOCK_BYTES);
            good(kvq_store_read(store, &blocks[page], have, text, sizeof text));
            assert_memory_equal(want, have, BLOCK_BYTES);
        }
        free(blocks);
    }
}

// Files that are left in the folder for transfers.
static int left_behind(const char *name)
{
    char path[128];
    int n = 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        n += entry->d_name[0] != '.';
    if (dir)
        closedir(dir);
    return n;
}

TEST(a_session_moves_between_stores)
{
    struct kvq_remote_pull what = {.space = "u", .name = "s", .as_name = "copy"};
    struct kvq_store *here = open_store("here"), *there = open_store("there");
    save_session(here, 1);
    // A push that breaks leaves its file, and the next one goes on with it.
    assert_int_equal(push_session(here, "s", breaks_at(2 * PART + 1, false)), KVQ_E_CANCELLED);
    uint64_t first = moved.transferred;
    assert_true(first >= PART);
    assert_int_equal(left_behind("moving"), 1);
    good(push_session(here, "s", NULL));
    assert_true(moved.bytes > SHARDS * BLOCKS * BLOCK_BYTES);
    assert_true(moved.transferred <= moved.bytes - first);
    assert_int_equal(left_behind("moving"), 0);
    // What has not changed is not sent again.
    good(push_session(here, "s", NULL));
    assert_int_equal(moved.transferred, 0);
    // So does a pull, unless the session was pushed anew meanwhile: then that one is pulled.
    assert_int_equal(pull_session(there, &what, breaks_at(2 * PART, false)), KVQ_E_CANCELLED);
    first = moved.transferred;
    assert_true(first >= PART);
    assert_int_equal(left_behind("moving"), 1);
    good(pull_session(there, &what, NULL));
    assert_int_equal(moved.transferred, moved.bytes - first);
    check_session(there, "copy", 1);
    assert_int_equal(left_behind("moving"), 0);
    assert_int_equal(pull_session(there, &what, NULL), KVQ_E_EXISTS);
    assert_int_equal(moved.transferred, 0);
    save_session(here, 2);
    good(push_session(here, "s", NULL));
    what.replace = true;
    good(pull_session(there, &what, NULL));
    check_session(there, "copy", 2);
    // A save of which most blocks were there before: their records are the same ones.
    save_again(here);
    good(push_session(here, "s", NULL));
    assert_in_range(moved.transferred, 1, moved.bytes / 4);
    good(pull_session(there, &what, NULL));
    check_session(there, "copy", 2);
    // What a limit refuses does not stay in the folder.
    what.as_name = "more";
    good(kvq_store_limit(there, "u", SHARDS * BLOCKS * BLOCK_BYTES + 1, text, sizeof text));
    assert_int_equal(pull_session(there, &what, NULL), KVQ_E_QUOTA);
    assert_int_equal(left_behind("moving"), 0);
    what.name = "nobody";
    assert_int_equal(pull_session(there, &what, NULL), KVQ_E_NO_SESSION);
    assert_int_equal(push_session(here, "nobody", NULL), KVQ_E_NO_SESSION);
    kvq_store_close(&here);
    kvq_store_close(&there);
}

// A file that is whole, by its head, and is no session: nothing of it gets into the store.
TEST(what_is_no_session_is_not_imported)
{
    struct kvq_remote_pull what = {.space = "u", .name = "noise"};
    struct kvq_store *there = open_store("there");
    struct kvq_store_session session;
    make_file(source, FILE_BYTES, 11);
    good(push_file("u", "noise", NULL));
    assert_int_equal(pull_session(there, &what, NULL), KVQ_E_INVALID);
    assert_int_equal(left_behind("moving"), 0);
    assert_int_equal(kvq_store_find(there, "u", "noise", 0, &session, text, sizeof text),
                     KVQ_E_NO_SESSION);
    kvq_store_close(&there);
}

// More parts than a server lists at a time, and more bytes than it likes to have in memory.
TEST(large_sessions)
{
    const size_t bytes = 1100ul * PART;
    if (!getenv("KVQ_FULL"))
        skip();
    make_file(source, bytes, 10);
    assert_int_equal(push_file("s", "large", breaks_at(1050ul * PART + 1, false)), KVQ_E_CANCELLED);
    reopen();
    good(push_file("s", "large", NULL));
    // rclone counts parts of a list's second page from 1 again: these are not trusted.
    assert_in_range(moved.transferred, 48ul * PART, 100ul * PART);
    good(pull_file("s", "large", NULL));
    assert_true(same_file(source, target));
}

static int start(void **state)
{
    assert_non_null(mkdtemp(folder));
    snprintf(source, sizeof source, "%s/source", folder);
    snprintf(target, sizeof target, "%s/target", folder);
    snprintf(part, sizeof part, "%s/target.part", folder);
    snprintf(moving, sizeof moving, "%s/moving", folder);
    return 0;
}

static int stop(void **state)
{
    remove_folder(folder);
    s3_stop(&s3);
    return 0;
}

int main(void)
{
    if (!kvq_remote_built()) {
        printf("skipped: this build has no remote tier\n");
        return 77;
    }
    if (!s3_start(&s3))
        return 77;
    return run_all(start, stop);
}
