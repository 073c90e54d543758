// SPDX-License-Identifier: Apache-2.0
//
// The daemon's pool of a place in our addresses: extent number i lies at pool->at + i *
// extent_bytes, so that page tables can hold addresses. Addresses are kept for all of it from the
// start; extents are mapped over them, read-only, as sessions come to use them.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HUGE_PAGE = 2 << 20 };        // extents may be made of these
#define MAX_SPAN (UINT64_C(3) << 45) // three quarters of what a process has

// ---- Opening ----

static int check_pool_reply(const Kvq__OpenPoolReply *r)
{
    if (r->tables < KVQ_TABLE_VERSION_MIN || r->tables > KVQ_TABLE_VERSION_MAX)
        return kvq__set_error(
            KVQ_E_VERSION,
            "the daemon's page tables are of version %u, this library reads %d to %d", r->tables,
            KVQ_TABLE_VERSION_MIN, KVQ_TABLE_VERSION_MAX);
    if (r->layout != KVQ_LAYOUT_ID)
        return kvq__set_error(KVQ_E_VERSION,
                              "the daemon's blocks are of layout %u, this library reads %d",
                              r->layout, KVQ_LAYOUT_ID);
    if (r->span == 0 || r->span > MAX_SPAN || r->extent_bytes == 0 || r->extent_bytes % HUGE_PAGE ||
        r->span % r->extent_bytes)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon says that its pool has %llu bytes in extents of %llu",
                              (unsigned long long)r->span, (unsigned long long)r->extent_bytes);
    return KVQ_OK;
}

static int reserve_addresses(struct kvq__pool *pool)
{
    void *mapping = mmap(NULL, pool->span + HUGE_PAGE, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        kvq__set_error_errno("no addresses for the daemon's pool of %llu bytes (is ulimit -v set?)",
                             (unsigned long long)pool->span);
        return KVQ_E_UNSUPPORTED;
    }
    uintptr_t start = ((uintptr_t)mapping + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    assert(start - (uintptr_t)mapping < HUGE_PAGE);
    pool->mapping = mapping;
    pool->at = (uint8_t *)start;
    return KVQ_OK;
}

static int take_pool(void *to, struct kvq__call *call)
{
    struct kvq__pool *pool = to;
    const Kvq__OpenPoolReply *r = call->reply->open_pool;
    assert(!pool->at);
    int rc = check_pool_reply(r);
    if (rc)
        return rc;
    pool->span = r->span;
    pool->extent_bytes = r->extent_bytes;
    pool->tells_again = r->tells_again;
    if (!pool->here.driver)
        return call->n_fds
                   ? kvq__set_error(KVQ_E_PROTOCOL, "the daemon gave a descriptor with its pool")
                   : reserve_addresses(pool);
    if (call->n_fds > 1)
        return kvq__set_error(KVQ_E_PROTOCOL, "the daemon gave %u descriptors with its pool",
                              call->n_fds);
    return kvq__pool_gpu_open(pool, r, call->n_fds ? call->fds[0] : -1);
}

static int ask_for_pool(kvq_client *client, const char *place, uint64_t deadline_ns,
                        struct kvq__pool *pool)
{
    Kvq__OpenPool message = KVQ__OPEN_POOL__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = KVQ__ANY_FDS,
                             .want = KVQ__REPLY__RESULT_OPEN_POOL,
                             .what = "opening a pool",
                             .take = take_pool,
                             .to = pool};
    message.place = (char *)(uintptr_t)place;
    message.tables_min = KVQ_TABLE_VERSION_MIN;
    message.tables_max = KVQ_TABLE_VERSION_MAX;
    call.request.command_case = KVQ__REQUEST__COMMAND_OPEN_POOL;
    call.request.open_pool = &message;
    snprintf(pool->place, sizeof pool->place, "%s", place);
    return kvq__exchange(client, &call, deadline_ns);
}

// With a reference for the caller, or NULL.
static struct kvq__pool *find_pool(kvq_client *client, const char *place)
{
    struct kvq__pool *pool;
    pthread_mutex_lock(&client->table);
    LIST_FOREACH (pool, &client->pools, link)
        if (strcmp(pool->place, place) == 0)
            break;
    assert(!pool || pool->refs > 0);
    if (pool)
        pool->refs++;
    pthread_mutex_unlock(&client->table);
    return pool;
}

static int make_pool(kvq_client *client, const char *place, const struct kvq__gpu_context *here,
                     uint64_t deadline_ns, struct kvq__pool **out)
{
    struct kvq__pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
    if (here)
        pool->here = *here;
    int rc = ask_for_pool(client, place, deadline_ns, pool);
    if (rc) {
        free(pool);
        return rc;
    }
    pool->refs = 2; // the client's and the caller's
    pthread_mutex_lock(&client->table);
    LIST_INSERT_HEAD(&client->pools, pool, link);
    pthread_mutex_unlock(&client->table);
    *out = pool;
    return KVQ_OK;
}

int kvq__pool_get(kvq_client *client, const char *place, const struct kvq__gpu_context *here,
                  struct kvq__pool **out)
{
    *out = NULL;
    uint64_t deadline = kvq__deadline(client);
    int rc = kvq__turn_take(client, "opening a pool", deadline);
    if (rc)
        return rc;
    struct kvq__pool *pool = find_pool(client, place);
    if (!pool)
        rc = make_pool(client, place, here, deadline, &pool);
    assert(rc || pool);
    kvq__turn_pass(client);
    if (rc == KVQ_OK && here && pool->here.context != here->context) {
        kvq__pool_put(client, pool);
        rc = kvq__set_error(KVQ_E_INVALID,
                            "this client attends on %s in another CUDA context already", place);
    }
    *out = rc ? NULL : pool;
    return rc;
}

// ---- Closing ----

static void destroy_pool(struct kvq__pool *pool)
{
    struct kvq__book *book;
    struct kvq__row *row;
    assert(pool->refs == 0);
    struct kvq_gpu_context *before = pool->here.driver ? kvq__context_enter(&pool->here) : NULL;
    while ((book = LIST_FIRST(&pool->books))) {
        LIST_REMOVE(book, link);
        munmap(book->values, book->bytes);
        if (pool->here.driver && book->there)
            pool->here.driver->memory_free(book->there);
        free(book);
    }
    while ((row = LIST_FIRST(&pool->rows))) {
        LIST_REMOVE(row, link);
        free(row);
    }
    if (pool->here.driver)
        kvq__pool_gpu_close(pool);
    else
        munmap(pool->mapping, pool->span + HUGE_PAGE);
    if (pool->here.driver)
        kvq__context_leave(&pool->here, before);
    free(pool);
}

void kvq__pool_put(kvq_client *client, struct kvq__pool *pool)
{
    pthread_mutex_lock(&client->table);
    assert(pool->refs > 0);
    bool last = --pool->refs == 0;
    pthread_mutex_unlock(&client->table);
    if (last)
        destroy_pool(pool);
}

void kvq__pools_leave(kvq_client *client)
{
    struct kvq__pool *pool;
    while ((pool = LIST_FIRST(&client->pools))) {
        LIST_REMOVE(pool, link);
        kvq__pool_put(client, pool);
    }
}

// ---- Extents ----

// An extent may be several times extent_bytes long; then it has the numbers that it covers.
static int map_extent(struct kvq__pool *pool, uint32_t number, int fd)
{
    struct stat st;
    assert(pool->at && !pool->here.driver);
    uint64_t at = (uint64_t)number * pool->extent_bytes;
    int rc = kvq__check_memfd(fd, pool->extent_bytes, "an extent");
    if (rc)
        return rc;
    if (fstat(fd, &st) < 0)
        return kvq__set_error_errno("an extent: cannot ask for the size of the daemon's memory");
    if (number >= pool->span / pool->extent_bytes || (uint64_t)st.st_size > pool->span - at ||
        (uint64_t)st.st_size % pool->extent_bytes)
        return kvq__set_error(
            KVQ_E_PROTOCOL,
            "the daemon gave extent %u of %llu bytes, but its pool has %llu in units of %llu",
            number, (unsigned long long)st.st_size, (unsigned long long)pool->span,
            (unsigned long long)pool->extent_bytes);
    size_t bytes = (size_t)st.st_size;
    if (mmap(pool->at + at, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return kvq__set_error_errno("an extent: cannot map %zu bytes", bytes);
    return KVQ_OK;
}

// What a reply of extents goes to.
struct extending {
    struct kvq__pool *pool;
    uint64_t *known;
    bool more;   // are to be asked for
    bool failed; // to map what came
};

static int take_extents(void *to, struct kvq__call *call)
{
    struct extending *e = to;
    struct kvq__pool *pool = e->pool;
    const Kvq__MapExtentsReply *r = call->reply->map_extents;
    int rc = KVQ_OK;
    if (r->n_numbers != call->n_fds || (r->more && r->n_numbers == 0))
        return kvq__set_error(KVQ_E_PROTOCOL, "the daemon gave %zu extents and %u descriptors",
                              r->n_numbers, call->n_fds);
    for (uint32_t i = 0; i < call->n_fds && rc == KVQ_OK; i++)
        rc = pool->here.driver ? kvq__pool_gpu_extent(pool, r->numbers[i], call->fds[i])
                               : map_extent(pool, r->numbers[i], call->fds[i]);
    e->failed = rc != KVQ_OK;
    if (rc)
        return rc;
    *e->known = r->known;
    e->more = r->more;
    return KVQ_OK;
}

// The daemon has told of extents that we lack, and they are in no later reply.
static void lose_extents(struct kvq__pool *pool, const char *why)
{
    assert(!pool->broken);
    pool->broken = true;
    snprintf(pool->cause, sizeof pool->cause, "%s", why);
}

static int map_more(kvq_client *client, struct extending *e, uint64_t handle, uint64_t deadline_ns)
{
    Kvq__MapExtents message = KVQ__MAP_EXTENTS__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = KVQ__ANY_FDS,
                             .want = KVQ__REPLY__RESULT_MAP_EXTENTS,
                             .what = "mapping extents",
                             .take = take_extents,
                             .to = e};
    message.handle = handle;
    call.request.command_case = KVQ__REQUEST__COMMAND_MAP_EXTENTS;
    call.request.map_extents = &message;
    e->more = false;
    int rc = kvq__exchange(client, &call, deadline_ns);
    // Their reply was late, or its descriptors were lost, or they could not be mapped. The daemon
    // tells of them again if it can, since the call was cancelled.
    bool lost = rc == KVQ_E_DEADLINE || rc == KVQ_E_SYSTEM || e->failed;
    if (rc == KVQ_E_PROTOCOL || (lost && !e->pool->tells_again))
        lose_extents(e->pool, kvq_error_text());
    return rc;
}

// One packet of them, in a turn of its own. What other threads are told of meanwhile they map in
// their turns, so all that this client was told of is mapped in any turn.
static int extend_once(kvq_client *client, struct extending *e, uint64_t handle)
{
    const struct kvq__pool *pool = e->pool;
    uint64_t deadline = kvq__deadline(client);
    int rc = kvq__turn_take(client, "mapping extents", deadline);
    if (rc)
        return rc;
    assert(pool->refs > 0);
    if (pool->broken)
        rc = kvq__set_error(KVQ_E_SYSTEM,
                            "an extent of the daemon's pool could not be mapped earlier (%s); "
                            "kvq_disconnect, or kvq_reattach, to begin anew",
                            pool->cause);
    else
        rc = map_more(client, e, handle, deadline);
    kvq__turn_pass(client);
    return rc;
}

int kvq__pool_extend(kvq_client *client, struct kvq__pool *pool, uint64_t handle, uint64_t *known)
{
    struct extending e = {.pool = pool, .known = known, .more = true};
    int rc = KVQ_OK;
    while (rc == KVQ_OK && e.more)
        rc = extend_once(client, &e, handle);
    return rc;
}
