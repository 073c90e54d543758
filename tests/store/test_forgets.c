// SPDX-License-Identifier: Apache-2.0
//
// The copy of a parked session that ends while somebody else has its name: it is deleted as soon as
// the name is free, and not a while later.
#include <unistd.h>

#include "daemon/core/residency/saved.h"
#include "daemon/log/log.h"
#include "daemon/store/queue.h"
#include "proto/status.h"
#include "storage/store.h"
#include "tests/edge/order.h"
#include "tests/kits/folder.h"
#include "tests/kits/unit.h"

static char folder[] = "/tmp/kvq-forgets-XXXXXX";

// ---- What the daemon does ----

static sem_t parked, looks, goes_on, takes_name, deleted;

void __real_kvq__park_saved(struct kvq__core *core, uint64_t ticket, int status, const char *why);
void __wrap_kvq__park_saved(struct kvq__core *core, uint64_t ticket, int status, const char *why);

void __wrap_kvq__park_saved(struct kvq__core *core, uint64_t ticket, int status, const char *why)
{
    __real_kvq__park_saved(core, ticket, status, why);
    assert_int_equal(status, 0);
    sem_post(&parked);
}

int __real_kvq_store_find(struct kvq_store *store, const char *space, const char *name,
                          uint32_t shard, struct kvq_store_session *out, char *why, size_t n);
int __wrap_kvq_store_find(struct kvq_store *store, const char *space, const char *name,
                          uint32_t shard, struct kvq_store_session *out, char *why, size_t n);

// Whoever looks for a second shard has the name until the test lets him go on.
int __wrap_kvq_store_find(struct kvq_store *store, const char *space, const char *name,
                          uint32_t shard, struct kvq_store_session *out, char *why, size_t n)
{
    if (shard == 1) {
        sem_post(&looks);
        sem_wait(&goes_on);
    }
    return __real_kvq_store_find(store, space, name, shard, out, why, n);
}

void __real_kvq__name_take(struct kvq__names *names, struct kvq__hold *hold, const char *ns,
                           const char *name, void (*go)(struct kvq__hold *taken));
void __wrap_kvq__name_take(struct kvq__names *names, struct kvq__hold *hold, const char *ns,
                           const char *name, void (*go)(struct kvq__hold *taken));

void __wrap_kvq__name_take(struct kvq__names *names, struct kvq__hold *hold, const char *ns,
                           const char *name, void (*go)(struct kvq__hold *taken))
{
    bool alone = hold->kind == KVQ__HOLD_ALONE;
    __real_kvq__name_take(names, hold, ns, name, go);
    if (alone)
        sem_post(&takes_name);
}

int __real_kvq_store_delete(struct kvq_store *store, const char *space, const char *name, char *why,
                            size_t n);
int __wrap_kvq_store_delete(struct kvq_store *store, const char *space, const char *name, char *why,
                            size_t n);

int __wrap_kvq_store_delete(struct kvq_store *store, const char *space, const char *name, char *why,
                            size_t n)
{
    int rc = __real_kvq_store_delete(store, space, name, why, n);
    assert_int_equal(rc, 0);
    sem_post(&deleted);
    return rc;
}

// ---- A client ----

static uint64_t open_to_drop(struct peer *p, const char *name)
{
    Kvq__OpenSession open = KVQ__OPEN_SESSION__INIT;
    Kvq__Layer row = KVQ__LAYER__INIT, *rows[] = {&row};
    row.q_heads = row.kv_heads = 1;
    row.k_dim = row.v_dim = 64;
    open.name = (char *)(uintptr_t)name;
    open.format = "f16";
    open.dtype = 1;
    open.on_detach = KVQ__ON_DETACH__ON_DETACH_DROP;
    open.layers = rows;
    open.n_layers = 1;
    assert_int_equal(peer_ask(p, &REQUEST(OPEN_SESSION, open_session, &open), NULL, 0), 0);
    return p->reply->session->handle;
}

static void park(struct peer *p, uint64_t handle)
{
    Kvq__ParkSession ask = KVQ__PARK_SESSION__INIT;
    ask.which_case = KVQ__PARK_SESSION__WHICH_HANDLE;
    ask.handle = handle;
    assert_int_equal(peer_ask(p, &REQUEST(PARK_SESSION, park_session, &ask), NULL, 0), 0);
    sem_wait(&parked);
}

static void close_session(struct peer *p, uint64_t handle)
{
    Kvq__CloseSession ask = KVQ__CLOSE_SESSION__INIT;
    ask.handle = handle;
    assert_int_equal(peer_ask(p, &REQUEST(CLOSE_SESSION, close_session, &ask), NULL, 0), 0);
}

static int start(void **state)
{
    sem_t *all[] = {&parked, &looks, &goes_on, &takes_name, &deleted};
    for (uint32_t i = 0; i < 5; i++)
        sem_init(all[i], 0, 0);
    assert_non_null(mkdtemp(folder));
    attach_storage(folder, 0);
    return attach_start(state);
}

static int stop(void **state)
{
    int rc = attach_stop(state);
    return remove_folder(folder) || rc;
}

TEST_BETWEEN(test_name_in_use, start, stop)
{
    static struct order o;
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    Kvq__RestoreSession restore = KVQ__RESTORE_SESSION__INIT;
    struct peer *p = peer_attached();
    uint64_t handle = open_to_drop(p, "it");
    char ns[32];
    snprintf(ns, sizeof ns, "uid-%u", getuid());
    park(p, handle);
    order_make(&o);
    ref.namespace_ = ns;
    ref.name = "it";
    restore.ref = &ref;
    restore.shard = 1;
    restore.shards = 2;
    o.request.command_case = KVQ__REQUEST__COMMAND_RESTORE_SESSION;
    o.request.restore_session = &restore;
    order_give(&o);
    sem_wait(&looks); // so nobody else has the name any more
    while (sem_trywait(&takes_name) == 0)
        ;
    close_session(p, handle);
    sem_wait(&takes_name); // to delete the copy
    sem_post(&goes_on);
    sem_wait(&o.done);
    assert_true(o.reply.status < 0);
    sem_wait(&deleted);
    peer_free_all();
}

int main(void)
{
    kvq__log_open(NULL, KVQ_LOG_ERROR, NULL);
    return run_all(NULL, NULL);
}
