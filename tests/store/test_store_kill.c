// SPDX-License-Identifier: Apache-2.0
//
// kill -9 of a program that saves, on the real file system, again and again: what it had told to be
// saved is there when the store is opened, as told or newer, byte for byte.
//
// The program is this one, run with the folder as its argument. It saves a few sessions round and
// round, each time a version more, deletes and compacts in between, and writes a line for each save
// that was acknowledged. 20 kills; KVQ_FULL=1: 200.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/status.h"
#include "tests/kits/unit.h"
#include "tests/store/store_kit.h"

enum { SESSIONS = 3, BLOCKS = 12, BYTES = 3000 };

static int open_store(const char *folder, struct kvq_store **store, char text[KVQ_TEXT_BYTES])
{
    const struct kvq_store_options options = {.segment_bytes = 256 << 10, .buffer_bytes = 16 << 10};
    return kvq_store_open(folder, &options, store, NULL, text, KVQ_TEXT_BYTES);
}

static uint64_t seed_of(uint32_t session, uint64_t version, uint32_t block)
{
    return version * 1000 + session * 100 + block;
}

// ---- The program that is killed ----

static int save_version(struct kvq_store *store, uint32_t session, uint64_t version, char *text)
{
    char name[16];
    uint8_t bytes[BYTES];
    uint64_t id;
    snprintf(name, sizeof name, "s%u", session);
    const struct kvq_store_meta meta = {
        .space = "kill", .name = name, .shards = 1, .tokens = version};
    struct kvq_save *save;
    int rc = kvq_save_begin(store, &save, text, KVQ_TEXT_BYTES);
    if (rc)
        return rc;
    rc = kvq_save_session(save, &meta, text, KVQ_TEXT_BYTES);
    for (uint32_t i = 0; i < BLOCKS && rc == 0; i++) {
        const struct kvq_place place = {0, i, 0, 0};
        world_fill(seed_of(session, version, i), bytes, BYTES);
        rc = kvq_save_put(save, &place, bytes, BYTES, &id, text, KVQ_TEXT_BYTES);
    }
    return rc ? (kvq_save_abort(&save), rc) : kvq_save_commit(&save, text, KVQ_TEXT_BYTES);
}

// Saves until it is killed. Starts behind what is there.
static int saver(const char *folder)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq_store *store;
    struct kvq_store_session found;
    struct kvq_store_freed freed;
    uint64_t version = 1;
    if (open_store(folder, &store, text))
        return dprintf(STDOUT_FILENO, "failed: %s\n", text), 1;
    for (uint32_t i = 0; i < SESSIONS; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%u", i);
        if (kvq_store_find(store, "kill", name, 0, &found, text, sizeof text) == 0 &&
            found.tokens >= version)
            version = found.tokens + 1;
    }
    for (;; version++)
        for (uint32_t i = 0; i < SESSIONS; i++) {
            int rc = save_version(store, i, version, text);
            if (rc == 0 && version % 5 == 0)
                rc = kvq_store_compact(store, 1 << 20, 30, &freed, text, sizeof text);
            if (rc)
                return dprintf(STDOUT_FILENO, "failed: %s\n", text), 1;
            if (dprintf(STDOUT_FILENO, "%u %" PRIu64 "\n", i, version) < 0)
                return 1;
        }
}

// ---- The test ----

static char folder[] = "/tmp/kvq-kill-XXXXXX";

static pid_t start(FILE **from)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "test_store_kill", folder, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    *from = fdopen(ends[0], "r");
    assert_non_null(*from);
    return child;
}

// Reads acknowledgements, kills after some of them, and reads what had been written until then.
static void run_and_kill(uint32_t lines, uint64_t acknowledged[SESSIONS])
{
    FILE *from;
    char line[KVQ_TEXT_BYTES];
    pid_t child = start(&from);
    uint32_t seen = 0;
    while (fgets(line, sizeof line, from)) {
        unsigned session;
        uint64_t version;
        if (sscanf(line, "%u %" SCNu64, &session, &version) != 2 || session >= SESSIONS)
            fail_msg("the saver says: %s", line);
        acknowledged[session] = version;
        if (++seen == lines)
            kill(child, SIGKILL);
    }
    fclose(from);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

// One save more than was acknowledged may be there: the next version, or the one that the program
// began with, behind all that it found.
static void check_session(struct kvq_store *store, uint32_t session, uint64_t acknowledged,
                          uint64_t before)
{
    uint64_t most = (acknowledged > before ? acknowledged : before) + 1;
    char text[KVQ_TEXT_BYTES], name[16];
    uint8_t is[BYTES], want[BYTES];
    struct kvq_store_session found;
    struct kvq_stored *blocks;
    size_t n;
    snprintf(name, sizeof name, "s%u", session);
    int rc = kvq_store_find(store, "kill", name, 0, &found, text, sizeof text);
    if (rc == KVQ_E_NO_SESSION && acknowledged == 0)
        return;
    if (rc || found.tokens < acknowledged || found.tokens > most)
        fail_msg("session %u: %" PRIu64 " was acknowledged, there is %" PRIu64 "; %s", session,
                 acknowledged, rc ? 0 : found.tokens, text);
    if (kvq_store_blocks(store, &found, &blocks, &n, text, sizeof text))
        fail_msg("%s", text);
    assert_int_equal(n, BLOCKS);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (kvq_store_read(store, &blocks[i], is, text, sizeof text))
            fail_msg("%s", text);
        world_fill(seed_of(session, found.tokens, i), want, BYTES);
        assert_memory_equal(is, want, BYTES);
    }
    free(blocks);
}

static int remove_one(void *context, const char *name)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%.200s", folder, name);
    return unlink(path);
}

PLAIN_TEST(killed)
{
    uint64_t acknowledged[SESSIONS] = {0}, random = 12345;
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < (long_tier() ? 200 : 20); i++) {
        char text[KVQ_TEXT_BYTES];
        struct kvq_store *store;
        struct kvq_store_verified v;
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint64_t before = 0;
        for (uint32_t j = 0; j < SESSIONS; j++)
            before = acknowledged[j] > before ? acknowledged[j] : before;
        run_and_kill(1 + (uint32_t)(random >> 33) % 6, acknowledged);
        if (open_store(folder, &store, text))
            fail_msg("kill %d: %s", i, text);
        for (uint32_t j = 0; j < SESSIONS; j++)
            check_session(store, j, acknowledged[j], before);
        assert_int_equal(kvq_store_verify(store, NULL, NULL, &v, text, sizeof text), 0);
        assert_string_equal(v.text, "");
        for (uint32_t j = 0; j < SESSIONS; j++) { // what was on its way counts from now on
            struct kvq_store_session found;
            char name[16];
            snprintf(name, sizeof name, "s%u", j);
            if (kvq_store_find(store, "kill", name, 0, &found, text, sizeof text) == 0)
                acknowledged[j] = found.tokens;
        }
        kvq_store_close(&store);
    }
    struct kvq_io *io = kvq_io_posix();
    (void)io->list(io, folder, remove_one, NULL);
    assert_int_equal(rmdir(folder), 0);
}

int main(int argc, char **argv)
{
    if (argc == 2)
        return saver(argv[1]);
    return run_all(NULL, NULL);
}
