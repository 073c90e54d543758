// SPDX-License-Identifier: Apache-2.0
//
// The first command of a connection: the versions that both sides speak, and a client of the core.
#include <assert.h>
#include <stdio.h>

#include "daemon/attach/internal.h"
#include "daemon/runtime/descriptors.h"
#include "kernels/layout.h"

int kvq__attach_agree(uint32_t min, uint32_t max, uint32_t our_min, uint32_t our_max,
                      const char *what, uint32_t *agreed, char *text)
{
    *agreed = max < our_max ? max : our_max;
    if (min <= max && *agreed >= our_min && *agreed >= min)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "the client speaks %s %u to %u, this daemon (%s) %u to %u; update the older one", what,
             min, max, KVQ_VERSION_TEXT, our_min, our_max);
    return KVQ_E_VERSION;
}

static bool put_gpus(struct kvq__connection *c, Kvq__HelloReply *reply)
{
    uint32_t n = kvq__gpus_count(c->server->gpus);
    Kvq__Gpu *gpus = kvq_arena_alloc(&c->arena, n * sizeof *gpus);
    reply->gpus = kvq_arena_alloc(&c->arena, n * sizeof *reply->gpus);
    if (!gpus || !reply->gpus)
        return n == 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct kvq__gpu *gpu = kvq__gpus_get(c->server->gpus, i);
        kvq__gpu__init(&gpus[i]);
        gpus[i].uuid.data = (uint8_t *)(uintptr_t)kvq__gpu_uuid(gpu);
        gpus[i].uuid.len = sizeof(struct kvq_gpu_uuid);
        gpus[i].name = kvq_arena_text(&c->arena, kvq__gpu_name(gpu));
        gpus[i].orders = (kvq__gpu_has_memory_ops(gpu) ? KVQ_GPU_ORDERS_TIMELINES : 0u) |
                         (kvq__gpu_has_events(gpu) ? KVQ_GPU_ORDERS_EVENTS : 0u);
        reply->gpus[i] = &gpus[i];
    }
    reply->n_gpus = n;
    return true;
}

// Whether there is room for one more client; its connection is counted already.
static int check_clients(const struct kvq__connection *c, char *text)
{
    uint64_t most = c->server->config.max_clients;
    uint32_t all = c->attach->count - 1;
    uint32_t own = kvq__attach_held(c->attach, c->peer.uid).connections - 1;
    assert(c->attach->count > 0);
    if (all >= most) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%llu clients are attached already (max_clients); end one (kvqctl client list), "
                 "or raise max_clients",
                 (unsigned long long)most);
        return KVQ_E_LIMIT;
    }
    if (!c->peer.admin && !kvq__share_allows(own, 1, all, most)) {
        snprintf(
            text, KVQ_TEXT_BYTES,
            "user %u has %u of %u clients and max_clients = %llu; one user gets as many as stay "
            "free for others; close some, or have max_clients raised",
            c->peer.uid, own, all, (unsigned long long)most);
        return KVQ_E_LIMIT;
    }
    return 0;
}

int kvq__hello_prepare(struct kvq__connection *c, char *text)
{
    const Kvq__Hello *hello = c->request->hello;
    const struct kvq__identity *us = &c->server->identity;
    uint32_t layout = 0;
    assert(c->state == KVQ__CONNECTION_HELLO && c->id == 0);
    int error = kvq__attach_agree(hello->protocol_min, hello->protocol_max, KVQ_PROTOCOL_MIN,
                                  KVQ_PROTOCOL_MAX, "protocol", &c->protocol, text);
    if (error == 0 && (hello->layout_min || hello->layout_max))
        error = kvq__attach_agree(hello->layout_min, hello->layout_max, KVQ_LAYOUT_ID,
                                  KVQ_LAYOUT_ID, "block layout", &layout, text);
    if (error)
        return error;
    error = check_clients(c, text);
    if (error)
        return error;
    Kvq__HelloReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    snprintf(c->name, sizeof c->name, "%s", hello->client_name);
    kvq__hello_reply__init(reply);
    reply->protocol = c->protocol;
    reply->layout = layout;
    reply->daemon_version = kvq_arena_text(&c->arena, us->version);
    reply->backend = kvq_arena_text(&c->arena, us->backend);
    reply->isa = kvq_arena_text(&c->arena, us->isa);
    if (!put_gpus(c, reply))
        return kvq__attach_no_room(text);
    reply->epoch_changed = hello->last_epoch != 0 && hello->last_epoch != us->epoch;
    c->reply.hello = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_HELLO;
    c->fds[0] = c->server->page.fd;
    c->n_fds = 1;
    return 0;
}

static void complain_on_loop(struct kvq__mail *mail)
{
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)mail - offsetof(struct kvq__connection, broken_mail));
    kvq__connection_end(c, c->broken_text);
}

static void complain_of_client(struct kvq__member *member, const char *text)
{
    assert(member->broken);
    struct kvq__connection *c =
        (struct kvq__connection *)((char *)member - offsetof(struct kvq__connection, member));
    snprintf(c->broken_text, sizeof c->broken_text, "%s", text);
    kvq__mailbox_post(&c->server->box, &c->broken_mail, complain_on_loop);
}

int kvq__hello_run(struct kvq__connection *c, char *text)
{
    assert(!c->client && c->member.n_ports == 0);
    int error =
        kvq__client_attach(c->server->core, &c->peer, c->name, &c->client, &c->client_id, text);
    if (error)
        return error;
    kvq__share_init(&c->member.share);
    c->member.complain = complain_of_client;
    LIST_INSERT_HEAD(&c->attach->clients, c, client_link);
    c->reply.hello->client_id = c->client_id;
    return 0;
}
