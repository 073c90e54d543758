// SPDX-License-Identifier: Apache-2.0
//
// A store that takes several passes to be compacted, by a command: who else writes has a turn
// between two of them, and a daemon that ends waits for one alone. The first pass is held until
// the test has done what is to happen meanwhile.
#include "daemon/http/http.h"
#include "daemon/log/log.h"
#include "proto/status.h"
#include "storage/store.h"
#include "tests/edge/order.h"
#include "tests/kits/folder.h"
#include "tests/kits/unit.h"

enum {
    CAP = KVQ_STORE_MIN_CAP, // so a segment has 2 MiB
    DEAD = 8,                // blocks of 64 KiB
    LIVE = 600,              // of 1,000 bytes, more than two passes move
    PERCENT = 31,            // of it is dead at least; the daemon itself compacts from 50 on
};

static char folder[] = "/tmp/kvq-compact-XXXXXX";
static char text[KVQ_TEXT_BYTES];

// ---- What the daemon does to the store ----

static char did[32]; // a letter each: c compact, g gc. In a turn to write
static sem_t begun, goes_on;
static bool closing; // the first pass is held until the daemon closes

int __real_kvq_store_compact(struct kvq_store *store, uint64_t budget, uint32_t dead_percent,
                             struct kvq_store_freed *freed, char *why, size_t n);
int __wrap_kvq_store_compact(struct kvq_store *store, uint64_t budget, uint32_t dead_percent,
                             struct kvq_store_freed *freed, char *why, size_t n);

static void note(char what)
{
    size_t n = strlen(did);
    assert_true(n + 1 < sizeof did);
    did[n] = what;
}

int __wrap_kvq_store_compact(struct kvq_store *store, uint64_t budget, uint32_t dead_percent,
                             struct kvq_store_freed *freed, char *why, size_t n)
{
    if (dead_percent == PERCENT) { // else the daemon does so by itself
        bool first = did[0] == 0;
        note('c');
        if (first) {
            sem_post(&begun);
            sem_wait(&goes_on);
        }
    }
    return __real_kvq_store_compact(store, budget, dead_percent, freed, why, n);
}

int __real_kvq_store_gc(struct kvq_store *store, struct kvq_store_freed *freed, char *why,
                        size_t n);
int __wrap_kvq_store_gc(struct kvq_store *store, struct kvq_store_freed *freed, char *why,
                        size_t n);

int __wrap_kvq_store_gc(struct kvq_store *store, struct kvq_store_freed *freed, char *why, size_t n)
{
    note('g');
    return __real_kvq_store_gc(store, freed, why, n);
}

void __real_kvq__http_end(struct kvq__http *http);
void __wrap_kvq__http_end(struct kvq__http *http);

// Comes behind the store jobs' turn in the daemon's closing.
void __wrap_kvq__http_end(struct kvq__http *http)
{
    if (closing)
        sem_post(&goes_on);
    __real_kvq__http_end(http);
}

// ---- A store ----

static void save_blocks(struct kvq_store *store, const char *name, uint32_t n, size_t bytes)
{
    static uint8_t data[64 << 10];
    const struct kvq_store_meta meta = {
        .space = "s", .name = name, .model = "", .formats = "f16", .shards = 1, .bytes = ""};
    struct kvq_save *save;
    uint64_t id;
    assert_int_equal(kvq_save_begin(store, &save, text, sizeof text), 0);
    assert_int_equal(kvq_save_session(save, &meta, text, sizeof text), 0);
    for (uint32_t i = 0; i < n; i++) {
        const struct kvq_place place = {.page = i, .kind = 1};
        memset(data, (int)i, bytes);
        assert_int_equal(kvq_save_put(save, &place, data, bytes, &id, text, sizeof text), 0);
    }
    assert_int_equal(kvq_save_commit(&save, text, sizeof text), 0);
}

static int start(void **state)
{
    const struct kvq_store_options options = {.cap_bytes = CAP};
    struct kvq_store *store;
    snprintf(folder, sizeof folder, "/tmp/kvq-compact-XXXXXX");
    assert_non_null(mkdtemp(folder));
    assert_int_equal(kvq_store_open(folder, &options, &store, NULL, text, sizeof text), 0);
    save_blocks(store, "dead", DEAD, 64 << 10);
    save_blocks(store, "live", LIVE, 1000);
    assert_int_equal(kvq_store_delete(store, "s", "dead", text, sizeof text), 0);
    kvq_store_close(&store);
    memset(did, 0, sizeof did);
    closing = false;
    sem_init(&begun, 0, 0);
    sem_init(&goes_on, 0, 0);
    attach_storage(folder, CAP);
    return attach_start(state);
}

static int stop(void **state)
{
    sem_post(&goes_on); // after a test that failed in between
    int rc = attach_stop(state);
    return remove_folder(folder) || rc;
}

// ---- Commands ----

static struct order compaction, collection;

static void give(struct order *o, Kvq__Storage *storage, Kvq__StorageAction action)
{
    order_make(o);
    kvq__storage__init(storage);
    storage->action = action;
    storage->dead_percent = PERCENT;
    o->request.command_case = KVQ__REQUEST__COMMAND_STORAGE;
    o->request.storage = storage;
    order_give(o);
}

// The first pass is under way.
static void begin_compaction(void)
{
    static Kvq__Storage storage;
    give(&compaction, &storage, KVQ__STORAGE_ACTION__STORAGE_COMPACT);
    sem_wait(&begun);
}

// ---- Tests ----

TEST_BETWEEN(test_turns, start, stop)
{
    Kvq__Storage storage;
    begin_compaction();
    give(&collection, &storage, KVQ__STORAGE_ACTION__STORAGE_GC);
    sem_post(&goes_on);
    sem_wait(&collection.done);
    sem_wait(&compaction.done);
    assert_string_equal(did, "cgcc");
    assert_int_equal(collection.reply.status, 0);
    assert_int_equal(compaction.reply.status, 0);
    assert_int_equal(compaction.reply.storage->freed_segments, 1);
    assert_true(compaction.reply.storage->moved_bytes > LIVE * 1000);
    assert_int_equal(attach_stop(state), 0);
}

TEST_BETWEEN(test_drained, start, stop)
{
    begin_compaction();
    order_jobs_to_drain();
    sem_post(&goes_on);
    sem_wait(&compaction.done);
    assert_string_equal(did, "c");
    assert_int_equal(attach_stop(state), 0);
}

TEST_BETWEEN(test_closed, start, stop)
{
    begin_compaction();
    closing = true;
    assert_int_equal(attach_stop(state), 0);
    sem_wait(&compaction.done);
    assert_string_equal(did, "c");
}

int main(void)
{
    kvq__log_open(NULL, KVQ_LOG_ERROR, NULL);
    return run_all(NULL, NULL);
}
