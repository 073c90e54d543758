// SPDX-License-Identifier: Apache-2.0
//
// Pushing and removing sessions where others do so at the same time, or something was left undone,
// against a server whose answers are written out here.
#include <dirent.h>
#include <sys/resource.h>

#include "storage/store.h"
#include "tests/store/remote_check.h"

// ---- Chunks ----

// Of a file of any size a chunk is no longer than what a pull reads.
PLAIN_TEST(chunks_can_be_read)
{
    enum { ROOM = 513 << 20 };
    static const uint64_t sizes[] = {1ull << 30, 256ull << 30, 1ull << 40, 8ull << 40};
    uint8_t *zeros = calloc(1, ROOM); // a sum over zeros ends no chunk
    assert_non_null(zeros);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct kvq__index index = {.bytes = 0}, again;
        const char *why = "";
        char *head = NULL;
        size_t n = 0;
        uint64_t fresh = 0, about = kvq__chunk_about(sizes[i], 16 << 20);
        size_t chunk = kvq__chunk_end(zeros, ROOM, about);
        assert_int_equal(chunk, kvq__chunk_most(about));
        assert_true(sizes[i] / (about / 4 < chunk ? about / 4 : chunk) <= KVQ__INDEX_CHUNKS);
        assert_int_equal(kvq__index_add(&index, zeros, chunk), 0);
        assert_int_equal(kvq__index_place(&index, NULL, &fresh), 0);
        memset(index.packs[0].digest, 'a', KVQ__SHA_HEX - 1);
        assert_int_equal(kvq__index_write(&index, &head, &n), 0);
        if (kvq__index_read(head, n, &again, &why) != 0)
            fail_msg("a chunk of %zu bytes: %s", chunk, why);
        kvq__index_free(&again);
        kvq__index_free(&index);
        free(head);
    }
    free(zeros);
}

static bool no_memory;
void *__real_realloc(void *data, size_t n);
void *__wrap_realloc(void *data, size_t n);

void *__wrap_realloc(void *data, size_t n)
{
    return no_memory ? NULL : __real_realloc(data, n);
}

#define HEX32 "0123456789abcdef0123456789abcdef"
#define OLD   HEX32 HEX32
#define OLDER "fedcba9876543210fedcba9876543210" HEX32
// The head of a session that was pushed before, of which nothing is in the file that is pushed now.
#define OLD_HEAD                                                                                   \
    "kvq-session 2\nbytes 20\npacks 2\n" OLD " 10\n" OLDER " 10\nchunks 2\n"                       \
    "10 0 0 " OLD "\n10 1 0 " OLDER "\nend\n"
#define OLDEST_HEAD "kvq-session 1\nbytes 20\npart 20\n" OLD "\nend\n"

// A head that finds no memory is not called damaged: the bucket is whole.
PLAIN_TEST(a_head_without_memory)
{
    static const char *const heads[] = {OLD_HEAD, OLDEST_HEAD};
    for (size_t i = 0; i < 2; i++) {
        struct kvq__index index;
        const char *why = "";
        no_memory = true;
        int rc = kvq__index_read(heads[i], strlen(heads[i]), &index, &why);
        no_memory = false;
        assert_int_equal(rc, KVQ_E_NO_MEMORY);
        assert_string_equal(why, "no memory");
        assert_int_equal(kvq__index_read(heads[i], strlen(heads[i]), &index, &why), 0);
        kvq__index_free(&index);
    }
}

// ---- Pushing ----

enum { SMALL = 1000, CANCELLED_BYTES = 1 << 20 };
#define SMALL_THERE OK "Content-Length: 1000\r\n\r\n"

// The head that the request puts.
static const char *head_put(int request)
{
    assert_says(server.asked[request], "PUT /sessions/s/n/head");
    const char *body = strstr(server.asked[request], "\r\n\r\n");
    assert_non_null(body);
    return body + 4;
}

// Counts what reads ask for: a buffer is as long as the longest of them.
struct counting_io {
    struct kvq_io io; // first
    size_t longest;
    uint64_t bytes; // of all
};

static int64_t read_counted(struct kvq_io *io, int file, void *data, size_t n, uint64_t at)
{
    struct counting_io *c = (struct counting_io *)io;
    c->longest = n > c->longest ? n : c->longest;
    c->bytes += n;
    return kvq_io_posix()->read(io, file, data, n, at);
}

// A file is cut in memory for two of its longest chunks, each of which may be 256 MiB.
PLAIN_TEST(memory_to_cut_a_file)
{
    enum { BYTES = 1 << 20 };
    static const struct script_reply refuses[] = {{.bytes = "HTTP/1.1 403 No\r\n\r\n"}};
    struct counting_io counting = {.io = *kvq_io_posix()};
    counting.io.read = read_counted;
    make_file(source, BYTES, 1);
    script_start(&server, refuses, 1);
    test_clock_init(&test_clock);
    struct kvq_remote_options o = remote_options(server.port, &test_clock);
    o.io = &counting.io;
    open_with(&o);
    assert_int_equal(push(), KVQ_E_PERMISSION); // as soon as it is cut
    end();
    size_t chunk = kvq__chunk_most(kvq__chunk_about(BYTES, KVQ_REMOTE_PART_MIN));
    assert_true(chunk < BYTES / 8);
    assert_in_range(counting.longest, chunk, 2 * chunk);
}

static int cancel_in_second_half(void *context, uint64_t done, uint64_t all)
{
    const struct counting_io *c = context;
    (void)done, (void)all;
    return c->bytes > CANCELLED_BYTES + CANCELLED_BYTES / 4;
}

// A file is read twice before anything of it is sent: to cut it, and for its pack's checksums.
PLAIN_TEST(a_push_that_reads_can_be_cancelled)
{
    static const struct script_reply none[] = {{.bytes = ABSENT}};
    struct counting_io counting = {.io = *kvq_io_posix()};
    const struct kvq_remote_watch watch = {cancel_in_second_half, &counting};
    counting.io.read = read_counted;
    make_file(source, CANCELLED_BYTES, 1);
    script_start(&server, none, 1);
    test_clock_init(&test_clock);
    struct kvq_remote_options o = remote_options(server.port, &test_clock);
    o.io = &counting.io;
    o.watch = watch;
    open_with(&o);
    assert_int_equal(push(), KVQ_E_CANCELLED);
    end();
    assert_true(counting.bytes < CANCELLED_BYTES + CANCELLED_BYTES / 2);
}

// Another push has put its head behind ours, and may need the packs that we would remove: before we
// have listed them, before we have deleted the first one, or the second.
PLAIN_TEST(packs_of_another_push_stay)
{
    enum { LOOKS = 3, REPLIES = 13 };
    static const int looks[LOOKS] = {6, 8, 10}; // at the head, once ours is there
    char *ours = NULL;
    make_file(source, SMALL, 1);
    for (int is_ours = 0; is_ours <= LOOKS; is_ours++) { // at so many looks
        struct script_reply replies[REPLIES] = {
            {.bytes = OLD_HEAD, .end = SCRIPT_BODY},
            {.bytes = ABSENT}, // the new pack
            {.bytes = PART_DONE},
            {.bytes = SMALL_THERE},
            {.bytes = PART_DONE}, // the new head
            {.bytes = SMALL_THERE},
            [7] = {.bytes = LIST(KEY("s/n/data/" OLD, "10") KEY("s/n/data/" OLDER, "10"))},
            [9] = {.bytes = PART_DONE}, // an old pack is deleted
            [11] = {.bytes = PART_DONE},
            [12] = {.bytes = NO_UPLOADS},
        };
        for (int i = 0; i < LOOKS; i++)
            replies[looks[i]] =
                (struct script_reply){.bytes = i < is_ours ? ours : OLD_HEAD, .end = SCRIPT_BODY};
        pushed_to(replies, REPLIES);
        int deleted = 0;
        for (int i = 0; i < server.n_asked; i++)
            deleted += strncmp(server.asked[i], "DELETE /sessions/s/n/data/", 26) == 0;
        assert_int_equal(deleted, is_ours > 1 ? is_ours - 1 : 0);
        assert_int_equal(server.n_asked, is_ours < LOOKS ? looks[is_ours] + 1 : REPLIES);
        ours = ours ? ours : strdup(head_put(4));
        assert_non_null(ours);
    }
    free(ours);
}

// Packs of pushes that ended before their heads are removed when they are a day old.
PLAIN_TEST(packs_without_a_head)
{
#define AGED(NAME, YEAR)                                                                           \
    "<Contents><Key>s/n/data/" NAME "</Key><LastModified>" YEAR "-02-03T04:05:06.000Z"             \
    "</LastModified><Size>10</Size></Contents>"
    char *ours = NULL, list[2048], digest[80] = "";
    make_file(source, SMALL, 1);
    for (int round = 0; round < 2; round++) {
        snprintf(list, sizeof list,
                 LIST(AGED("old", "1999") AGED("new", "2999") KEY("s/n/data/no-time", "10")
                          AGED("%s", "1999")),
                 digest);
        const struct script_reply replies[] = {
            {.bytes = ABSENT},
            {.bytes = ABSENT},
            {.bytes = PART_DONE},
            {.bytes = SMALL_THERE},
            {.bytes = PART_DONE}, // the new head
            {.bytes = ours ? ours : "", .end = SCRIPT_BODY},
            {.bytes = list},
            {.bytes = ours ? ours : "", .end = SCRIPT_BODY},
            {.bytes = PART_DONE},
            {.bytes = NO_UPLOADS},
        };
        pushed_to(replies, sizeof replies / sizeof *replies);
        free(ours);
        ours = round ? NULL : strdup(head_put(4));
        if (!round)
            assert_int_equal(sscanf(server.asked[1], "HEAD /sessions/s/n/data/%64s ", digest), 1);
    }
    assert_says(server.asked[8], "DELETE /sessions/s/n/data/old HTTP");
    assert_int_equal(server.n_asked, 10); // that one alone
}

// Whoever cannot get the old head does not know its packs, and pushes nothing; one that is too long
// to be any is replaced.
PLAIN_TEST(the_old_head_is_known_first)
{
    static const struct script_reply busy[] = {
        {.bytes = BUSY},   {.bytes = BUSY},      {.bytes = BUSY},        {.bytes = BUSY},
        {.bytes = ABSENT}, {.bytes = PART_DONE}, {.bytes = SMALL_THERE},
    };
    static const struct script_reply replies[] = {
        {.bytes = OK "Content-Length: 99999999\r\n\r\n", .end = SCRIPT_ENDLESS},
        {.bytes = OK "Content-Length: 99999999\r\n\r\n"},
        {.bytes = ABSENT},
        {.bytes = PART_DONE},
        {.bytes = SMALL_THERE},
        {.bytes = PART_DONE},
    };
    make_file(source, SMALL, 1);
    assert_int_equal(push_to(busy, sizeof busy / sizeof *busy), KVQ_E_REMOTE);
    for (int i = 0; i < server.n_asked; i++)
        assert_null(strstr(server.asked[i], "PUT "));
    pushed_to(replies, sizeof replies / sizeof *replies);
    assert_non_null(head_put(5));
}

// Somebody removes each pack as soon as it is there: that is no session's absence here.
PLAIN_TEST(packs_that_are_removed_meanwhile)
{
    static const struct script_reply replies[] = {
        {.bytes = ABSENT},                                          // the head
        {.bytes = ABSENT}, {.bytes = PART_DONE}, {.bytes = ABSENT}, // the pack
        {.bytes = ABSENT}, {.bytes = PART_DONE}, {.bytes = ABSENT}, // once more
    };
    make_file(source, SMALL, 1);
    int rc = push_to(replies, sizeof replies / sizeof *replies);
    assert_int_equal(rc, KVQ_E_REMOTE);
    assert_says(text, "its packs were removed while it was pushed, twice; push it again");
    assert_int_equal(server.n_asked, sizeof replies / sizeof *replies);
}

// A store that has forgotten an upload may have completed it, unless the object is to be replaced:
// the one that is there then was there before.
PLAIN_TEST(an_object_to_replace_is_not_the_new_one)
{
    static const struct script_reply replies[] = {
        {.bytes = ABSENT}, // the head; nobody asks for the pack
        {.bytes = NO_UPLOADS},
        {.bytes = BEGUN},
        {.bytes = PART_DONE},
        {.bytes = PART_DONE},
        {.bytes = ABSENT}, // the upload is forgotten
        {.bytes = BEGUN},
        {.bytes = PART_DONE},
        {.bytes = PART_DONE},
        {.bytes = XML "<CompleteMultipartUploadResult></CompleteMultipartUploadResult>"},
        {.bytes = OK "Content-Length: 131072\r\n\r\n"},
        {.bytes = PART_DONE}, // the head
        {.bytes = OK "Content-Length: 131072\r\n\r\n"},
    };
    make_file(source, 2 * KVQ_REMOTE_PART_MIN, 1);
    push_again = true;
    pushed_to(replies, sizeof replies / sizeof *replies);
    push_again = false;
    assert_int_equal(moved.transferred, 4 * KVQ_REMOTE_PART_MIN);
    assert_non_null(head_put(11));
}

// ---- Exports that were left ----

// A store with one session of so many tokens, in the folder of the one before.
static struct kvq_store *begin_store(const char *path, uint64_t tokens)
{
    struct kvq_store *store;
    struct kvq_save *save;
    struct kvq_store_meta meta = {.space = "s",
                                  .name = "n",
                                  .model = "m",
                                  .formats = "f",
                                  .shards = 1,
                                  .tokens = tokens,
                                  .saved_at = 1,
                                  .version = 1};
    remove_folder(path);
    assert_int_equal(
        kvq_store_open(path, &(struct kvq_store_options){0}, &store, NULL, text, sizeof text), 0);
    assert_int_equal(kvq_save_begin(store, &save, text, sizeof text), 0);
    assert_int_equal(kvq_save_session(save, &meta, text, sizeof text), 0);
    assert_int_equal(kvq_save_commit(&save, text, sizeof text), 0);
    return store;
}

// The tokens of the one export in the folder, and its path.
static uint64_t exported(struct kvq_store *store, const char *transfers, char path[512])
{
    uint32_t files = 0;
    struct kvq_store_session session;
    DIR *dir = opendir(transfers);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, 512, "%s/%s", transfers, entry->d_name);
        files++;
    }
    closedir(dir);
    assert_int_equal(files, 1);
    assert_int_equal(kvq_store_exported(store, path, &session, text, sizeof text), 0);
    return session.tokens;
}

static void push_in_vain(struct kvq_store *store, const char *transfers)
{
    static const struct script_reply refuses[] = {{.bytes = "HTTP/1.1 403 No\r\n\r\n"}};
    begin(refuses, 1);
    int rc =
        kvq_remote_push(remote, store, transfers, "s", "n", false, NULL, &moved, text, sizeof text);
    end();
    assert_int_equal(rc, KVQ_E_PERMISSION);
}

// A push that fails leaves its export for the next one, but not for a store that was begun anew in
// the same folder, whose sessions and saves have the same numbers.
PLAIN_TEST(an_export_is_of_one_store)
{
    char here[64], transfers[64], first[512], again[512];
    snprintf(here, sizeof here, "%s/here", folder);
    snprintf(transfers, sizeof transfers, "%s/transfers", folder);
    struct kvq_store *store = begin_store(here, 128);
    push_in_vain(store, transfers);
    assert_int_equal(exported(store, transfers, first), 128);
    push_in_vain(store, transfers);
    assert_int_equal(exported(store, transfers, again), 128);
    assert_string_equal(first, again);
    kvq_store_close(&store);
    for (uint64_t tokens = 128; tokens <= 256; tokens += 128) { // also one that looks the same
        store = begin_store(here, tokens);
        push_in_vain(store, transfers);
        assert_int_equal(exported(store, transfers, again), tokens);
        assert_string_not_equal(first, again);
        kvq_store_close(&store);
    }
    remove_folder(here);
    remove_folder(transfers);
}

// A disk that cannot read a file until another one takes its name.
static struct sick_io {
    struct kvq_io io; // first
    char path[512];   // empty: none
    int file;
} sick;

static int open_sick(struct kvq_io *io, const char *path, unsigned flags)
{
    int file = kvq_io_posix()->open(kvq_io_posix(), path, flags);
    bool same = strcmp(path, sick.path) == 0;
    sick.file = same ? file : sick.file == file ? -1 : sick.file; // numbers are used again
    return file;
}

static int64_t read_sick(struct kvq_io *io, int file, void *data, size_t n, uint64_t at)
{
    return sick.path[0] && file == sick.file
               ? -EIO
               : kvq_io_posix()->read(kvq_io_posix(), file, data, n, at);
}

static int rename_sick(struct kvq_io *io, const char *from, const char *to)
{
    if (strcmp(to, sick.path) == 0)
        sick.path[0] = '\0';
    return kvq_io_posix()->rename(kvq_io_posix(), from, to);
}

// An export that was left is looked through before it is sent: one that was spoiled since then,
// was cut, or cannot be read, is made anew.
PLAIN_TEST(an_export_is_looked_through)
{
    char here[64], transfers[64], path[512], good[512];
    sick = (struct sick_io){.io = *kvq_io_posix(), .file = -1};
    sick.io.open = open_sick;
    sick.io.read = read_sick;
    sick.io.rename = rename_sick;
    snprintf(here, sizeof here, "%s/here", folder);
    snprintf(transfers, sizeof transfers, "%s/transfers", folder);
    snprintf(good, sizeof good, "%s/good", folder);
    struct kvq_store *store = begin_store(here, 128);
    kvq_store_close(&store);
    const struct kvq_store_options options = {.io = &sick.io};
    assert_int_equal(kvq_store_open(here, &options, &store, NULL, text, sizeof text), 0);
    assert_int_equal(kvq_store_export(store, "s", "n", good, true, text, sizeof text), 0);
    for (int how = 0; how < 3; how++) {
        struct stat status;
        push_in_vain(store, transfers);
        assert_int_equal(exported(store, transfers, path), 128);
        assert_true(same_file(path, good));
        assert_int_equal(stat(path, &status), 0);
        if (how == 0) { // a byte in its last record
            FILE *file = fopen(path, "r+b");
            assert_non_null(file);
            assert_int_equal(fseek(file, -64, SEEK_END), 0);
            putc('!', file);
            fclose(file);
        } else if (how == 1) {
            assert_int_equal(truncate(path, status.st_size - 1), 0);
        } else {
            snprintf(sick.path, sizeof sick.path, "%s", path);
        }
        push_in_vain(store, transfers);
        assert_true(same_file(path, good));
        assert_int_equal(sick.path[0], 0);
    }
    kvq_store_close(&store);
    unlink(good);
    remove_folder(here);
    remove_folder(transfers);
}

// ---- Downloads that were not imported ----

// A file that was fetched stays while an import of it may go better, and goes when it is imported,
// or cannot be, or may not be.
PLAIN_TEST(a_download_stays)
{
    static const struct {
        const char *as_name;
        int rc;
        bool replace, no_room, spoiled, stays;
    } tries[] = {{"n", KVQ_E_EXISTS, .stays = true}, // somebody has saved that name meanwhile
                 {"n", KVQ_E_SYSTEM, .replace = true, .no_room = true, .stays = true},
                 {"n", KVQ_E_DAMAGED, .replace = true, .spoiled = true},
                 {"", KVQ_E_INVALID, .replace = false},
                 {"n", 0, .replace = true},
                 {"copy", 0, .replace = false}};
    char here[64], file[64];
    snprintf(here, sizeof here, "%s/here", folder);
    snprintf(file, sizeof file, "%s/pull.kvq", folder);
    struct kvq_store *store = begin_store(here, 128);
    for (size_t i = 0; i < sizeof tries / sizeof *tries; i++) {
        struct rlimit files;
        struct kvq_remote_pull what = {
            .space = "s", .name = "n", .as_name = tries[i].as_name, .replace = tries[i].replace};
        assert_int_equal(kvq_store_export(store, "s", "n", file, true, text, sizeof text), 0);
        if (tries[i].spoiled)
            assert_int_equal(truncate(file, 4096), 0);
        assert_int_equal(getrlimit(RLIMIT_NOFILE, &files), 0);
        const struct rlimit none = {0, files.rlim_max};
        if (tries[i].no_room) // for another descriptor
            assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
        int rc = kvq_remote_take(store, &what, file, NULL, text, sizeof text);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
        if (rc != tries[i].rc)
            fail_msg("%zu: %s: %s", i, kvq_status_name(rc), text);
        assert_int_equal(access(file, F_OK) == 0, tries[i].stays);
    }
    kvq_store_close(&store);
    unlink(file);
    remove_folder(here);
}

// ---- Removing ----

// A removal that failed behind the head goes on with the data, whose list may be longer than one
// look, and says that there is no session only where there is nothing.
PLAIN_TEST(a_removal_is_finished)
{
    static const struct script_reply replies[] = {
        {.bytes = OK "Content-Length: 9\r\n\r\n"},
        {.bytes = PART_DONE},
        {.bytes = "HTTP/1.1 403 No\r\n\r\n"},
        {.bytes = ABSENT},
        {.bytes = LIST(KEY("s/n/data/1", "5") KEY("s/n/data/2", "5"))},
        {.bytes = PART_DONE},
        {.bytes = PART_DONE},
        {.bytes = LIST(KEY("s/n/data/3", "5"))},
        {.bytes = PART_DONE},
        {.bytes = LIST("")},
        {.bytes = NO_UPLOADS},
        {.bytes = ABSENT},
        {.bytes = LIST("")},
        {.bytes = NO_UPLOADS},
    };
    begin(replies, sizeof replies / sizeof *replies);
    assert_int_equal(kvq_remote_forget(remote, "s", "n", text, sizeof text), KVQ_E_PERMISSION);
    if (kvq_remote_forget(remote, "s", "n", text, sizeof text) != 0)
        fail_msg("%s", text);
    assert_int_equal(kvq_remote_forget(remote, "s", "n", text, sizeof text), KVQ_E_NO_SESSION);
    assert_says(text, "there is no such session");
    end();
    assert_int_equal(server.n_asked, sizeof replies / sizeof *replies);
    assert_says(server.asked[1], "DELETE /sessions/s/n/head");
    assert_says(server.asked[6], "DELETE /sessions/s/n/data/2");
    assert_says(server.asked[8], "DELETE /sessions/s/n/data/3");
}

// A store that lists what it was told to delete again and again is left in the end.
PLAIN_TEST(a_removal_has_an_end)
{
    static const struct script_reply again[] = {
        {.bytes = OK "Content-Length: 9\r\n\r\n"},
        {.bytes = PART_DONE},
        {.bytes = LIST(KEY("s/n/data/1", "5"))},
    };
    begin(again, 3);
    assert_int_equal(kvq_remote_forget(remote, "s", "n", text, sizeof text), KVQ_E_REMOTE);
    assert_says(text, "after 100 deletions the store still lists objects there");
    end();
}

int main(void)
{
    return run_all(start, stop);
}
