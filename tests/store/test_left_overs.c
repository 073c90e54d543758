// SPDX-License-Identifier: Apache-2.0
//
// What an earlier run has parked without a name makes way for an import, and for a save at the
// daemon's end, that is refused at its namespace's limit: that namespace's alone. The daemon's own
// deletion of it finds nothing here.
#include <unistd.h>

#include "client/kvq.h"
#include "storage/store.h"
#include "tests/edge/order.h"
#include "tests/kits/folder.h"
#include "tests/kits/unit.h"

enum { BYTES = 64 << 10, LEFT = 4 };

static char folder[] = "/tmp/kvq-left-overs-XXXXXX", store_dir[64], file[64];
static char text[KVQ_TEXT_BYTES], own[16]; // own: this user's namespace
static struct kvq_store_options options;
static uint32_t n_swept; // calls for a namespace

int __real_kvq_store_sweep(struct kvq_store *store, const char *space, uint32_t most,
                           uint32_t *deleted, char *why, size_t n);
int __wrap_kvq_store_sweep(struct kvq_store *store, const char *space, uint32_t most,
                           uint32_t *deleted, char *why, size_t n);

int __wrap_kvq_store_sweep(struct kvq_store *store, const char *space, uint32_t most,
                           uint32_t *deleted, char *why, size_t n)
{
    *deleted = 0;
    if (!space)
        return 0;
    n_swept++;
    return __real_kvq_store_sweep(store, space, most, deleted, why, n);
}

int __real_kvq_store_limit(struct kvq_store *store, const char *space, uint64_t bytes, char *why,
                           size_t n);
int __wrap_kvq_store_limit(struct kvq_store *store, const char *space, uint64_t bytes, char *why,
                           size_t n);

// All namespaces may keep what is left in one, and half of what is imported.
int __wrap_kvq_store_limit(struct kvq_store *store, const char *space, uint64_t bytes, char *why,
                           size_t n)
{
    return __real_kvq_store_limit(store, space, space ? bytes : LEFT * BYTES + BYTES / 2, why, n);
}

static void save_session(struct kvq_store *store, const char *space, const char *name)
{
    static const uint8_t data[BYTES];
    const struct kvq_store_meta meta = {
        .space = space, .name = name, .model = "", .formats = "f16", .shards = 1, .bytes = ""};
    const struct kvq_place place = {.kind = 1};
    struct kvq_save *save;
    uint64_t id;
    assert_int_equal(kvq_save_begin(store, &save, text, sizeof text), 0);
    assert_int_equal(kvq_save_session(save, &meta, text, sizeof text), 0);
    assert_int_equal(kvq_save_put(save, &place, data, sizeof data, &id, text, sizeof text), 0);
    assert_int_equal(kvq_save_commit(&save, text, sizeof text), 0);
}

static int start(void **state)
{
    struct kvq_store *store;
    n_swept = 0;
    snprintf(own, sizeof own, "uid-%u", getuid());
    snprintf(folder, sizeof folder, "/tmp/kvq-left-overs-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(store_dir, sizeof store_dir, "%s/store", folder);
    snprintf(file, sizeof file, "%s/it.kvq", folder);
    assert_int_equal(mkdir(store_dir, 0700), 0);
    assert_int_equal(kvq_store_open(store_dir, &options, &store, NULL, text, sizeof text), 0);
    save_session(store, own, "it");
    assert_int_equal(kvq_store_export(store, own, "it", file, false, text, sizeof text), 0);
    assert_int_equal(kvq_store_delete(store, own, "it", text, sizeof text), 0);
    for (uint32_t i = 0; i < LEFT; i++) {
        const char name[] = {'#', (char)('1' + i), 0};
        save_session(store, own, name);
        save_session(store, "others", name);
    }
    kvq_store_close(&store);
    attach_storage(store_dir, 0);
    return attach_start(state);
}

static int stop(void **state)
{
    int rc = attach_stop(state);
    return remove_folder(folder) || rc;
}

static bool is_stored(const char *space, const char *name)
{
    struct kvq_store_session found;
    struct kvq_store *store;
    assert_int_equal(kvq_store_open(store_dir, &options, &store, NULL, text, sizeof text), 0);
    int rc = kvq_store_find(store, space, name, 0, &found, text, sizeof text);
    kvq_store_close(&store);
    return rc == 0;
}

TEST_BETWEEN(test_import_at_a_limit, start, stop)
{
    static struct order o;
    Kvq__SessionRef ref;
    Kvq__ImportSession import;
    order_make(&o);
    kvq__session_ref__init(&ref);
    ref.namespace_ = own;
    ref.name = "one";
    kvq__import_session__init(&import);
    import.path = file;
    import.ref = &ref;
    o.request.command_case = KVQ__REQUEST__COMMAND_IMPORT_SESSION;
    o.request.import_session = &import;
    order_give(&o);
    sem_wait(&o.done);
    assert_int_equal(o.reply.status, 0);
    assert_int_equal(n_swept, 2); // until there are none
    assert_int_equal(attach_stop(state), 0);
    assert_true(is_stored(own, "one"));
    assert_false(is_stored(own, "#1") || is_stored(own, "#4"));
    assert_true(is_stored("others", "#1") && is_stored("others", "#4"));
}

// A session of twice the room that is left, which is committed and not saved.
static void make_unsaved(kvq_client *client, const char *name)
{
    enum { HEADS = 4, DIM = 64, TOKENS = 128 };
    const struct kvq_layer layer = {
        .q_heads = HEADS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .repeat = 1};
    const struct kvq_session_options as = {
        .size = sizeof as, .name = name, .layers = &layer, .n_layers = 1, .format = "f16"};
    struct kvq_entry e = {.append = TOKENS};
    struct kvq_work work = {0};
    kvq_queue *queue;
    kvq_buffer *buffer;
    assert_int_equal(kvq_queue_open(client, &queue), 0);
    assert_int_equal(kvq_buffer_create(client, TOKENS * HEADS * DIM * 4, &buffer), 0);
    work.k = work.v = kvq_tensor_make(buffer, 0, HEADS, DIM, KVQ_DTYPE_F32);
    assert_int_equal(kvq_session_open(client, &as, &e.session, NULL), 0);
    assert_int_equal(kvq_step_begin(queue, &e, 1, &work.step), 0);
    assert_int_equal(kvq_append(queue, &work, &e, 1), 0);
    assert_int_equal(kvq_step_end(queue, work.step, &e, 1), 0);
    assert_int_equal(e.status, 0);
}

TEST_BETWEEN(test_drained_at_a_limit, start, stop)
{
    const struct kvq_connect_options to = {
        .size = sizeof to, .timeout_ms = 60000, .runtime_dir = attach_directory()};
    kvq_client *client;
    assert_int_equal(kvq_connect(&to, &client), 0);
    make_unsaved(client, "one");
    order_jobs_to_drain();
    order_wait_drained();
    kvq_disconnect(&client);
    assert_int_equal(n_swept, 2); // until there are none
    assert_int_equal(attach_stop(state), 0);
    assert_true(is_stored(own, "one"));
    assert_false(is_stored(own, "#1") || is_stored(own, "#4"));
    assert_true(is_stored("others", "#1") && is_stored("others", "#4"));
}

int main(void)
{
    return run_all(NULL, NULL);
}
