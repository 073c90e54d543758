// SPDX-License-Identifier: Apache-2.0
//
// Imports and exports of files in a daemon that ends: what it saves then does not wait until a file
// has been read, nor does its end until one has been written. Each is held in the middle until the
// test has done what is to happen meanwhile.
#include <unistd.h>

#include "daemon/http/http.h"
#include "daemon/lifecycle.h"
#include "daemon/log/log.h"
#include "proto/status.h"
#include "storage/store.h"
#include "tests/edge/order.h"
#include "tests/kits/folder.h"
#include "tests/kits/unit.h"

enum { BLOCKS = 8 };

static char folder[] = "/tmp/kvq-file-ends-XXXXXX", store_dir[64], file[64], out[64];
static char text[KVQ_TEXT_BYTES];
static const struct kvq_store_options options;

// ---- Where imports and exports are held ----

static sem_t begun, goes_on;
static bool holds;       // the next one that comes there
static bool closing;     // the daemon's closing lets it go on
static uint32_t n_begun; // transactions

static void stand_there(void)
{
    if (!holds)
        return;
    holds = false;
    sem_post(&begun);
    sem_wait(&goes_on);
}

int __real_kvq_save_begin(struct kvq_store *store, struct kvq_save **save, char *why, size_t n);
int __wrap_kvq_save_begin(struct kvq_store *store, struct kvq_save **save, char *why, size_t n);

// The file of an import is open, and nothing of it has been read.
int __wrap_kvq_save_begin(struct kvq_store *store, struct kvq_save **save, char *why, size_t n)
{
    n_begun++;
    stand_there();
    return __real_kvq_save_begin(store, save, why, n);
}

int __real_kvq_store_read(struct kvq_store *store, const struct kvq_stored *block, void *data,
                          char *why, size_t n);
int __wrap_kvq_store_read(struct kvq_store *store, const struct kvq_stored *block, void *data,
                          char *why, size_t n);

// The first of an export's blocks.
int __wrap_kvq_store_read(struct kvq_store *store, const struct kvq_stored *block, void *data,
                          char *why, size_t n)
{
    stand_there();
    return __real_kvq_store_read(store, block, data, why, n);
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

// ---- A store, and a file ----

static void save_session(struct kvq_store *store)
{
    static const uint8_t data[1000];
    const struct kvq_store_meta meta = {
        .space = "uid-0", .name = "it", .model = "", .formats = "f16", .shards = 1, .bytes = ""};
    struct kvq_save *save;
    uint64_t id;
    assert_int_equal(kvq_save_begin(store, &save, text, sizeof text), 0);
    assert_int_equal(kvq_save_session(save, &meta, text, sizeof text), 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        const struct kvq_place place = {.page = i, .kind = 1};
        assert_int_equal(kvq_save_put(save, &place, data, sizeof data, &id, text, sizeof text), 0);
    }
    assert_int_equal(kvq_save_commit(&save, text, sizeof text), 0);
}

static int start(void **state)
{
    struct kvq_store *store;
    holds = closing = false;
    snprintf(folder, sizeof folder, "/tmp/kvq-file-ends-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(store_dir, sizeof store_dir, "%s/store", folder);
    snprintf(file, sizeof file, "%s/it.kvq", folder);
    snprintf(out, sizeof out, "%s/out.kvq", folder);
    assert_int_equal(mkdir(store_dir, 0700), 0);
    assert_int_equal(kvq_store_open(store_dir, &options, &store, NULL, text, sizeof text), 0);
    save_session(store);
    assert_int_equal(kvq_store_export(store, "uid-0", "it", file, false, text, sizeof text), 0);
    kvq_store_close(&store);
    n_begun = 0;
    sem_init(&begun, 0, 0);
    sem_init(&goes_on, 0, 0);
    attach_storage(store_dir, 0);
    return attach_start(state);
}

static int stop(void **state)
{
    sem_post(&goes_on); // after a test that failed in between
    int rc = attach_stop(state);
    return remove_folder(folder) || rc;
}

static bool is_stored(const char *name)
{
    struct kvq_store_session found;
    struct kvq_store *store;
    assert_int_equal(kvq_store_open(store_dir, &options, &store, NULL, text, sizeof text), 0);
    int rc = kvq_store_find(store, "uid-0", name, 0, &found, text, sizeof text);
    kvq_store_close(&store);
    return rc == 0;
}

// ---- Commands ----

// An order with what its command points to.
struct file_order {
    struct order order;
    Kvq__SessionRef ref;
    Kvq__ImportSession import;
    Kvq__ExportSession export;
};
static struct file_order first, second;

static void make_order(struct file_order *o, char *name)
{
    order_make(&o->order);
    kvq__session_ref__init(&o->ref);
    o->ref.name = name;
}

static void give_import(struct file_order *o, char *name)
{
    make_order(o, name);
    kvq__import_session__init(&o->import);
    o->import.path = file;
    o->import.ref = &o->ref;
    o->order.request.command_case = KVQ__REQUEST__COMMAND_IMPORT_SESSION;
    o->order.request.import_session = &o->import;
    order_give(&o->order);
}

static void begin_export(void)
{
    make_order(&first, "it");
    kvq__export_session__init(&first.export);
    first.export.path = out;
    first.export.ref = &first.ref;
    first.order.request.command_case = KVQ__REQUEST__COMMAND_EXPORT_SESSION;
    first.order.request.export_session = &first.export;
    holds = true;
    order_give(&first.order);
    sem_wait(&begun);
}

static void begin_import(void)
{
    holds = true;
    give_import(&first, "one");
    sem_wait(&begun);
}

static void drain_daemon(struct kvq__server *server, void *context)
{
    kvq__server_drain(server);
}

static void assert_not(const struct file_order *o, const char *what)
{
    char expected[KVQ_TEXT_BYTES];
    snprintf(expected, sizeof expected, "the daemon is shutting down; nothing is %s", what);
    assert_int_equal(o->order.reply.status, KVQ_E_DRAINING);
    assert_string_equal(o->order.reply.text, expected);
}

// ---- Tests ----

TEST_BETWEEN(test_without_an_end, start, stop)
{
    begin_import();
    sem_post(&goes_on);
    sem_wait(&first.order.done);
    assert_int_equal(first.order.reply.status, 0);
    assert_int_equal(attach_stop(state), 0);
    assert_true(is_stored("one"));
}

// One that is under way ends, and one that waits for its turn does not begin.
TEST_BETWEEN(test_import_drained, start, stop)
{
    begin_import();
    give_import(&second, "two");
    order_jobs_to_drain();
    sem_post(&goes_on);
    sem_wait(&first.order.done);
    sem_wait(&second.order.done);
    assert_not(&first, "imported");
    assert_not(&second, "imported");
    assert_int_equal(n_begun, 1);
    assert_int_equal(attach_stop(state), 0);
    assert_false(is_stored("one") || is_stored("two"));
}

TEST_BETWEEN(test_import_closed, start, stop)
{
    begin_import();
    closing = true;
    assert_int_equal(attach_stop(state), 0);
    sem_wait(&first.order.done);
    assert_not(&first, "imported");
    assert_false(is_stored("one"));
}

TEST_BETWEEN(test_import_refused, start, stop)
{
    attach_in_loop(drain_daemon, NULL);
    give_import(&first, "one");
    sem_wait(&first.order.done);
    assert_not(&first, "imported");
    assert_int_equal(attach_stop(state), 0);
    assert_false(is_stored("one"));
}

// Nobody waits for its turn, so it goes on for as long as the daemon is there.
TEST_BETWEEN(test_export_drained, start, stop)
{
    begin_export();
    order_jobs_to_drain();
    sem_post(&goes_on);
    sem_wait(&first.order.done);
    assert_int_equal(first.order.reply.status, 0);
    assert_int_equal(access(out, F_OK), 0);
    assert_int_equal(attach_stop(state), 0);
}

TEST_BETWEEN(test_export_closed, start, stop)
{
    begin_export();
    closing = true;
    assert_int_equal(attach_stop(state), 0);
    sem_wait(&first.order.done);
    assert_not(&first, "exported");
    assert_int_not_equal(access(out, F_OK), 0);
}

int main(void)
{
    kvq__log_open(NULL, KVQ_LOG_ERROR, NULL);
    return run_all(NULL, NULL);
}
