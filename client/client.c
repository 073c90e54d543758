// SPDX-License-Identifier: Apache-2.0
//
// Connecting, disconnecting, and connecting again after the daemon was lost.
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/runtime_dir.h"

enum { DEFAULT_TIMEOUT_MS = 5000 };

static void copy_text(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from ? from : "");
}

static int choose_runtime_dir(kvq_client *client, const char *given)
{
    int n = kvq_runtime_dir(given, KVQ_SYSTEM_RUNTIME_DIR, client->runtime_dir,
                            sizeof client->runtime_dir);
    if (n < 0 || (size_t)n >= sizeof client->runtime_dir)
        return kvq__set_error(KVQ_E_INVALID,
                              "the runtime directory's path has %d bytes, at most %zu fit", n,
                              sizeof client->runtime_dir - 1);
    return KVQ_OK;
}

static int choose_name(kvq_client *client, const char *given)
{
    const char *name = given ? given : program_invocation_short_name;
    bool valid = kvq_text_valid(name, strlen(name)), fits = strlen(name) < sizeof client->name;
    // Nobody chose a program's name for this, so it can be no reason to fail.
    if (!given && !(valid && fits))
        name = "unnamed";
    else if (!valid)
        return kvq__set_error(KVQ_E_INVALID,
                              "the client's name is not UTF-8 without control characters");
    else if (!fits)
        return kvq__set_error(KVQ_E_LIMIT,
                              "the client's name has %zu bytes, at most %zu are allowed",
                              strlen(name), sizeof client->name - 1);
    copy_text(client->name, sizeof client->name, name);
    return KVQ_OK;
}

static int client_make(const struct kvq_connect_options *options, kvq_client **made)
{
    kvq_client *client = calloc(1, sizeof *client);
    void *arena = malloc(KVQ_WIRE_ARENA);
    int rc;
    if (!client || !arena) {
        free(client);
        free(arena);
        kvq__set_error(KVQ_E_SYSTEM, "this process is out of memory");
        return KVQ_E_SYSTEM;
    }
    client->socket = -1;
    client->timeout_ms = options->timeout_ms ? options->timeout_ms : DEFAULT_TIMEOUT_MS;
    client->spin_us = options->spin_us;
    client->arena_memory = arena;
    kvq_arena_init(&client->arena, arena, KVQ_WIRE_ARENA);
    client->watch.wake = -1;
    kvq__turn_open(&client->turn);
    pthread_mutex_init(&client->own, NULL);
    pthread_mutex_init(&client->table, NULL);
    TAILQ_INIT(&client->queues);
    TAILQ_INIT(&client->buffers);
    LIST_INIT(&client->pools);
    LIST_INIT(&client->locals);
    *made = client;
    rc = choose_runtime_dir(client, options->runtime_dir);
    return rc ? rc : choose_name(client, options->name);
}

static void client_free(kvq_client *client)
{
    assert(client->socket < 0 && !client->page && !client->watch.running);
    assert(TAILQ_EMPTY(&client->queues) && TAILQ_EMPTY(&client->buffers));
    assert(LIST_EMPTY(&client->pools) && LIST_EMPTY(&client->locals));
    kvq__handle_clear(client);
    pthread_mutex_destroy(&client->table);
    pthread_mutex_destroy(&client->own);
    kvq__turn_close(&client->turn);
    free(client->arena_memory);
    free(client);
}

static int map_page(kvq_client *client, int fd, uint64_t epoch)
{
    void *mapping;
    assert(!client->page);
    int rc = kvq__map(fd, sizeof(struct kvq_daemon_page), PROT_READ, "the daemon's page", &mapping);
    if (rc)
        return rc;
    client->page = mapping;
    if (client->page->magic != KVQ_SHM_MAGIC_DAEMON || client->page->epoch != epoch)
        return kvq__set_error(
            KVQ_E_PROTOCOL, "the daemon's page has mark %#x and epoch %llx, its reply %#x and %llx",
            client->page->magic, (unsigned long long)client->page->epoch, KVQ_SHM_MAGIC_DAEMON,
            (unsigned long long)epoch);
    return KVQ_OK;
}

static int check_agreed(const Kvq__HelloReply *hello)
{
    if (hello->protocol >= KVQ_PROTOCOL_MIN && hello->protocol <= KVQ_PROTOCOL_MAX)
        return KVQ_OK;
    return kvq__set_error(
        KVQ_E_VERSION,
        "the daemon (version %s) speaks protocol %u, this library (%s) speaks %d to "
        "%d; install matching versions",
        hello->daemon_version, hello->protocol, kvq_version(), KVQ_PROTOCOL_MIN, KVQ_PROTOCOL_MAX);
}

static int take_hello(void *to, struct kvq__call *call)
{
    kvq_client *client = to;
    const Kvq__HelloReply *reply = call->reply->hello;
    int rc = check_agreed(reply);
    if (rc == KVQ_OK)
        rc = kvq__gpus_learn(client, reply);
    if (rc == KVQ_OK)
        rc = map_page(client, call->fds[0], call->reply->epoch);
    if (rc)
        return rc;
    client->info.epoch = call->reply->epoch;
    client->info.client_id = reply->client_id;
    client->info.protocol = reply->protocol;
    copy_text(client->info.version, sizeof client->info.version, reply->daemon_version);
    copy_text(client->info.backend, sizeof client->info.backend, reply->backend);
    copy_text(client->info.isa, sizeof client->info.isa, reply->isa);
    return KVQ_OK;
}

static int say_hello(kvq_client *client)
{
    Kvq__Hello hello = KVQ__HELLO__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = 1,
                             .want = KVQ__REPLY__RESULT_HELLO,
                             .what = "connecting",
                             .take = take_hello,
                             .to = client};
    hello.protocol_min = KVQ_PROTOCOL_MIN;
    hello.protocol_max = KVQ_PROTOCOL_MAX;
    hello.client_name = client->name;
    hello.last_epoch = client->epoch;
    call.request.command_case = KVQ__REQUEST__COMMAND_HELLO;
    call.request.hello = &hello;
    client->info.protocol = KVQ_PROTOCOL_MAX;
    return kvq__ask(client, &call);
}

static void hang_up(kvq_client *client)
{
    kvq__pools_leave(client);
    if (client->socket >= 0)
        close(client->socket);
    client->socket = -1;
    if (client->page)
        munmap((void *)(uintptr_t)client->page, sizeof *client->page);
    client->page = NULL;
}

static int attach(kvq_client *client)
{
    assert(client->socket < 0);
    client->given_up = client->told = 0;
    int rc = kvq__socket_connect(client->runtime_dir, client->timeout_ms, &client->socket);
    if (rc)
        return rc;
    rc = say_hello(client);
    if (rc)
        hang_up(client);
    client->connection++;
    return rc;
}

int kvq_connect(const struct kvq_connect_options *options, kvq_client **client)
{
    struct kvq_connect_options o = {0};
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_connect: client is NULL");
    *client = NULL;
    kvq_client *made = NULL;
    int rc = options ? KVQ__SIZED_TAKE(&o, options, "kvq_connect_options") : KVQ_OK;
    if (rc == KVQ_OK)
        rc = client_make(&o, &made);
    if (rc == KVQ_OK)
        rc = attach(made);
    if (rc == KVQ_OK) {
        made->epoch = made->info.epoch;
        *client = made;
    } else if (made) {
        client_free(made);
    }
    return rc;
}

// The daemon detaches us when our end is shut, and closes its own when that is done: a session
// that this client held is free for the next one when this returns.
void kvq_disconnect(kvq_client **client)
{
    kvq_client *c = client ? *client : NULL;
    struct kvq_queue *queue;
    if (!c)
        return;
    c->leaving = true;
    while (!LIST_EMPTY(&c->locals)) {
        kvq_local *local = LIST_FIRST(&c->locals);
        kvq_local_close(&local);
    }
    TAILQ_FOREACH (queue, &c->queues, entry)
        kvq__timeline_close(queue);
    kvq__watch_stop(c);
    if (c->socket >= 0)
        kvq__socket_finish(c->socket, c->timeout_ms);
    while (!TAILQ_EMPTY(&c->queues))
        kvq__queue_free(TAILQ_FIRST(&c->queues));
    while (!TAILQ_EMPTY(&c->buffers))
        kvq__buffer_free(TAILQ_FIRST(&c->buffers));
    hang_up(c);
    client_free(c);
    *client = NULL;
}

int kvq_daemon_gpus(kvq_client *client, struct kvq_gpu_info *gpus, uint32_t max, uint32_t *n)
{
    if (!client || !n || (max > 0 && !gpus))
        return kvq__set_error(KVQ_E_INVALID, "kvq_daemon_gpus: an argument is NULL");
    *n = client->n_gpus;
    for (uint32_t i = 0; i < client->n_gpus && i < max; i++) {
        kvq__gpu_place(client, client->gpus[i].uuid, gpus[i].place);
        copy_text(gpus[i].name, sizeof gpus[i].name, client->gpus[i].name);
    }
    return KVQ_OK;
}

int kvq_daemon_info(kvq_client *client, struct kvq_daemon_info *info)
{
    if (!client || !info)
        return kvq__set_error(KVQ_E_INVALID, "kvq_daemon_info: an argument is NULL");
    int rc = kvq__sized_check(info, "kvq_daemon_info");
    if (rc == KVQ_OK)
        kvq__sized_give(info, &client->info, sizeof client->info);
    return rc;
}

static int attach_again(kvq_client *client)
{
    struct kvq_queue *queue;
    struct kvq_buffer *buffer;
    int rc = attach(client);
    if (rc)
        return rc;
    TAILQ_FOREACH (buffer, &client->buffers, entry) {
        rc = kvq__buffer_register(buffer);
        if (rc)
            return rc;
    }
    TAILQ_FOREACH (queue, &client->queues, entry) {
        rc = kvq__queue_attach(queue);
        if (rc == KVQ_OK)
            rc = kvq__timeline_again(queue);
        if (rc)
            return rc;
    }
    return KVQ_OK;
}

// Streams first: nothing may wait for a daemon that no longer hears of it. Keeps the error text,
// unless it is to wait for the daemon's end.
static void leave(kvq_client *client, bool wait)
{
    struct kvq_queue *queue;
    struct kvq_buffer *buffer;
    kvq__watch_give_up(client);
    TAILQ_FOREACH (queue, &client->queues, entry)
        kvq__timeline_close(queue);
    kvq__watch_stop(client);
    if (wait && client->socket >= 0)
        kvq__socket_finish(client->socket, client->timeout_ms);
    TAILQ_FOREACH (queue, &client->queues, entry)
        kvq__queue_detach(queue, KVQ_E_CANCELLED);
    TAILQ_FOREACH (buffer, &client->buffers, entry)
        buffer->id = 0;
    hang_up(client);
}

int kvq_reattach(kvq_client *client, uint32_t *lost)
{
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_reattach: client is NULL");
    uint64_t epoch = client->epoch;
    leave(client, true);
    int rc = attach_again(client);
    if (rc) {
        // Half a connection is none: queues answer KVQ_E_DISCONNECTED until it works.
        leave(client, false);
        return rc;
    }
    client->epoch = client->info.epoch;
    uint32_t held = kvq__handle_clear(client);
    if (lost)
        *lost = held;
    if (client->info.epoch != epoch)
        return kvq__set_error(
            KVQ_E_EPOCH,
            "the daemon was restarted; %u session handles of this client are lost; "
            "open named sessions again and see what they hold",
            held);
    return KVQ_OK;
}
