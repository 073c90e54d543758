// SPDX-License-Identifier: Apache-2.0
//
// Page tables: opening and closing them, and what of them can be checked before every step.
#include "client/in_context/in_context.h"

#include <assert.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

// Between two attempts at a table of a session that is being moved.
enum { BUSY_ASK_NS = 1000000, BUSY_ASK_MOST_NS = 20000000 };

static_assert(sizeof(struct kvq_table_entry) == sizeof(struct kvq_page) &&
                  offsetof(struct kvq_table_entry, raw) == offsetof(struct kvq_page, raw) &&
                  offsetof(struct kvq_table_entry, tokens) == offsetof(struct kvq_page, tokens) &&
                  offsetof(struct kvq_table_entry, packed_tokens) ==
                      offsetof(struct kvq_page, packed_tokens),
              "kernels take a table's entries as pages");

// ---- What it says ----

static int nonsense(const char *what, uint64_t value, uint64_t most)
{
    return kvq__set_error(
        KVQ_E_PROTOCOL,
        "the daemon's page table makes no sense: %s is %llu, at most %llu can be; "
        "kvq_reattach connects again",
        what, (unsigned long long)value, (unsigned long long)most);
}

static uint64_t pages_of(uint64_t tokens)
{
    return (tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS;
}

int kvq__page_table_check(const struct kvq__local_session *s)
{
    const struct kvq_table_page *t = s->table;
    assert(t && s->layers);
    if (t->tokens > (uint64_t)t->pages * KVQ_BLOCK_TOKENS)
        return nonsense("its count of tokens", t->tokens, (uint64_t)t->pages * KVQ_BLOCK_TOKENS);
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (s->layers[i].source == i && s->layers[i].pages->n_pages > pages_of(t->tokens))
            return nonsense("a layer's count of pages", s->layers[i].pages->n_pages,
                            pages_of(t->tokens));
    return KVQ_OK;
}

// What is written once.
static int check_head(const struct kvq_table_page *t, uint32_t layers, uint64_t tokens)
{
    if (t->magic == KVQ_SHM_MAGIC_TABLE && t->version >= KVQ_TABLE_VERSION_MIN &&
        t->version <= KVQ_TABLE_VERSION_MAX && t->layers == layers &&
        t->pages == pages_of(tokens) && t->layer_bytes == kvq_table_layer_bytes(t->pages))
        return KVQ_OK;
    return kvq__set_error(
        KVQ_E_PROTOCOL,
        "the daemon's page table has mark %#x, version %u, %u layers of %u pages and "
        "%llu bytes; %#x, %u layers of %llu pages are expected",
        t->magic, t->version, t->layers, t->pages, (unsigned long long)t->layer_bytes,
        KVQ_SHM_MAGIC_TABLE, layers, (unsigned long long)pages_of(tokens));
}

// ---- Opening ----

static int map_table(struct kvq_local *local, struct kvq__local_session *s,
                     const Kvq__OpenTableReply *reply, int fd)
{
    uint64_t pages = pages_of(local->max_tokens);
    size_t bytes = kvq_table_bytes(s->n_layers, pages);
    void *mapping;
    assert(!s->table && s->layers);
    if (reply->bytes < bytes)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon's page table has %llu bytes, %zu are needed",
                              (unsigned long long)reply->bytes, bytes);
    int rc = kvq__map(fd, bytes, PROT_READ, "a page table", &mapping);
    if (rc)
        return rc;
    s->table = mapping;
    s->table_bytes = bytes;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const uint8_t *at = (const uint8_t *)mapping + sizeof(struct kvq_table_page);
        assert(s->layers[i].source < s->n_layers);
        at += s->layers[i].source * kvq_table_layer_bytes(pages);
        s->layers[i].pages = (const struct kvq_table_layer *)(const void *)at;
    }
    return check_head(s->table, s->n_layers, local->max_tokens);
}

// On a GPU there are two: what kernels read, and its copy.
static int map_tables(struct kvq_local *local, struct kvq__local_session *s,
                      const Kvq__OpenTableReply *reply, const int *fds, uint32_t n)
{
    assert(local->here.driver || n == 1);
    if (!local->here.driver)
        return map_table(local, s, reply, fds[0]);
    if (n != 2)
        return kvq__set_error(
            n == 1 ? KVQ_E_VERSION : KVQ_E_PROTOCOL,
            "the daemon gave %u descriptors of a page table on a GPU, 2 are needed%s", n,
            n == 1 ? "; it is of an earlier version: install matching ones" : "");
    int rc = kvq__page_table_gpu_map(local, s, reply, fds[0]);
    return rc ? rc : map_table(local, s, reply, fds[1]);
}

// Whose table it is.
struct reader {
    struct kvq_local *local;
    struct kvq__local_session *session;
};

static int take_table(void *to, struct kvq__call *call)
{
    const struct reader *r = to;
    const Kvq__OpenTableReply *reply = call->reply->open_table;
    int rc = kvq__reading_take(r->local->pool, reply, r->session);
    return rc ? rc : map_tables(r->local, r->session, reply, call->fds, call->n_fds);
}

static int open_table(struct kvq_local *local, struct kvq__local_session *s)
{
    assert(local->pool && local->pool->at);
    struct reader reader = {local, s};
    Kvq__OpenTable message = KVQ__OPEN_TABLE__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = local->here.driver ? KVQ__ANY_FDS : 1,
                             .want = KVQ__REPLY__RESULT_OPEN_TABLE,
                             .what = "opening a page table",
                             .take = take_table,
                             .to = &reader};
    message.handle = s->handle;
    message.pool_at = (uintptr_t)local->pool->at;
    message.tokens = local->max_tokens;
    message.layers = s->n_layers;
    call.request.command_case = KVQ__REQUEST__COMMAND_OPEN_TABLE;
    call.request.open_table = &message;
    if (local->here.driver)
        message.gpu = (ProtobufCBinaryData){sizeof local->here.uuid, local->here.uuid};
    message.copy = local->here.driver != NULL;
    return kvq__ask(local->client, &call);
}

// A session that had to leave its GPU goes back there when it is opened, and the table can wait for
// that as well as its caller. Other threads use the connection meanwhile.
int kvq__page_table_open(struct kvq_local *local, struct kvq__local_session *s)
{
    uint64_t deadline = kvq__deadline(local->client);
    struct timespec pause = {.tv_nsec = BUSY_ASK_NS};
    for (;;) {
        int rc = open_table(local, s);
        if (rc != KVQ_E_BUSY || kvq_now_ns() >= deadline)
            return rc;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < BUSY_ASK_MOST_NS)
            pause.tv_nsec *= 2;
    }
}

// ---- Closing ----

// Nothing has to come back of it. So while the daemon stands still the first one waits for it, and
// the others only send theirs.
static void tell_closed(kvq_client *client, uint64_t handle, uint64_t *patience_ns)
{
    Kvq__CloseTable message = KVQ__CLOSE_TABLE__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "closing a page table"};
    message.handle = handle;
    call.request.command_case = KVQ__REQUEST__COMMAND_CLOSE_TABLE;
    call.request.close_table = &message;
    int rc = kvq__turn_take(client, call.what, KVQ__NO_DEADLINE);
    assert(rc == KVQ_OK);
    uint64_t begun = kvq_now_ns();
    if (*patience_ns)
        rc = kvq__exchange(client, &call, begun + *patience_ns);
    else
        kvq__tell(client, &call);
    uint64_t taken = kvq_now_ns() - begun;
    *patience_ns = rc == KVQ_E_DEADLINE || taken >= *patience_ns ? 0 : *patience_ns - taken;
    kvq__turn_pass(client);
}

uint64_t kvq__closing_patience(const kvq_client *client)
{
    return (uint64_t)client->timeout_ms * 1000000u;
}

void kvq__page_table_close(struct kvq_local *local, struct kvq__local_session *s,
                           uint64_t *patience_ns)
{
    kvq_client *client = local->client;
    assert(!s->in_step);
    bool there = s->table || s->piece.at;
    if (s->piece.at)
        kvq__page_table_gpu_unmap(local, s);
    bool heard = local->connection == client->connection && !local->queue->dead && !client->leaving;
    if (there && heard)
        tell_closed(client, s->handle, patience_ns);
    if (s->table)
        munmap((void *)(uintptr_t)s->table, s->table_bytes);
    s->table = NULL;
}
