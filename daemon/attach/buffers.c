// SPDX-License-Identifier: Apache-2.0
//
// Commands of buffers: memory that a client's K, V, queries and results lie in.
#include <assert.h>
#include <stdio.h>

#include "daemon/attach/attach.h"
#include "daemon/attach/internal.h"

static Kvq__CreateBufferReply *begin_reply(struct kvq__connection *c)
{
    Kvq__CreateBufferReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return NULL;
    kvq__create_buffer_reply__init(reply);
    c->reply.create_buffer = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_CREATE_BUFFER;
    return reply;
}

static void count_region(struct kvq__connection *c)
{
    assert(c->region && c->region->connection == c);
    kvq__region_count(c->region);
    c->reply.create_buffer->bytes = c->region->bytes;
}

int kvq__create_buffer_prepare(struct kvq__connection *c, char *text)
{
    const Kvq__CreateBuffer *create = c->request->create_buffer;
    bool on_host = create->gpu.len == 0;
    assert(!c->region);
    if (!begin_reply(c))
        return kvq__attach_no_room(text);
    int error = on_host ? kvq__attach_check_pins(c, text) : 0;
    if (error)
        return error;
    c->region = on_host ? kvq__region_new(c, create->bytes, &error, text)
                        : kvq__region_new_on(c, create->bytes, &create->gpu, &error, text);
    if (c->region)
        count_region(c);
    return error;
}

int kvq__import_buffer_prepare(struct kvq__connection *c, char *text)
{
    const Kvq__ImportBuffer *import = c->request->import_buffer;
    struct kvq__packet *packet = &c->attach->packet; // the one that the request came in
    int fd = packet->n_fds ? packet->fds[0] : -1;
    assert(!c->region);
    if (!begin_reply(c))
        return kvq__attach_no_room(text);
    int error = import->gpu ? 0 : kvq__attach_check_pins(c, text);
    if (error)
        return error;
    c->region = import->gpu
                    ? kvq__region_import_on(c, fd, import, &error, text)
                    : kvq__region_import(c, fd, import->offset, import->bytes, &error, text);
    if (!c->region)
        return error;
    if (import->gpu)
        packet->n_fds = 0; // the region has it now
    count_region(c);
    return 0;
}

// Whether a GPU has to be told of the memory, or makes it.
bool kvq__buffer_is_slow(const struct kvq__connection *c)
{
    return kvq__gpus_count(c->server->gpus) > 0;
}

void kvq__buffer_make(struct kvq__connection *c)
{
    kvq__region_make(c->region);
}

int kvq__buffer_run(struct kvq__connection *c, char *text)
{
    struct kvq__region *region = c->region;
    assert(region && region->id == 0);
    struct kvq__buffer_memory memory = {.host = region->host.shm.map,
                                        .gpu = region->at,
                                        .bytes = region->bytes,
                                        .on = region->gpu,
                                        .owner = c};
    int error = kvq__buffer_add(c->client, &memory, &region->id, text);
    if (error)
        return error;
    LIST_INSERT_HEAD(&c->regions, region, link);
    c->reply.create_buffer->buffer = region->id;
    return 0;
}

void kvq__create_buffer_put(struct kvq__connection *c)
{
    assert(c->n_fds == 0);
    c->reply.create_buffer->allocation_bytes = c->region->piece.bytes;
    c->fds[0] = c->region->gpu ? c->region->fd : c->region->host.shm.fd;
    c->n_fds = 1;
    kvq__import_buffer_put(c);
}

void kvq__import_buffer_put(struct kvq__connection *c)
{
    c->reply.create_buffer->on_gpu = c->region->at != 0;
}

void kvq__create_buffer_sent(struct kvq__connection *c)
{
    kvq__region_close_fd(c->region);
}

void kvq__buffer_undo(struct kvq__connection *c)
{
    assert(c->region && c->reply.status != 0);
    kvq__region_give_back(c->region);
    c->region = NULL;
}

uint64_t kvq__buffer_made(const struct kvq__connection *c)
{
    return c->reply.create_buffer->buffer;
}

// ---- Closing ----

static struct kvq__region *find_region(const struct kvq__connection *c, uint32_t id)
{
    struct kvq__region *region;
    LIST_FOREACH (region, &c->regions, link)
        if (region->id == id)
            break;
    return region;
}

static void region_gone_on_loop(struct kvq__mail *mail)
{
    kvq__region_give_back((struct kvq__region *)mail); // its first member
}

void kvq__attach_buffer_gone(void *owner, uint32_t buffer)
{
    struct kvq__connection *c = owner;
    struct kvq__region *region = find_region(c, buffer);
    assert(region);
    LIST_REMOVE(region, link);
    bool asked = c->region == region && !c->detaching;
    kvq__mailbox_post(&c->server->box, &region->mail, region_gone_on_loop);
    if (asked)
        kvq__connection_to_loop(c);
    else if (c->detaching)
        kvq__connection_check_gone(c);
}

int kvq__close_buffer_run(struct kvq__connection *c, char *text)
{
    uint32_t id = c->request->close_buffer->buffer;
    c->region = find_region(c, id);
    if (!c->region) {
        snprintf(text, KVQ_TEXT_BYTES, "no buffer %u is registered", id);
        return KVQ_E_BUFFER;
    }
    int error = kvq__buffer_remove(c->client, id, text); // then kvq__attach_buffer_gone
    if (error)
        c->region = NULL;
    return error ? error : KVQ__COMES_BACK;
}
