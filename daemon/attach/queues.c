// SPDX-License-Identifier: Apache-2.0
//
// Commands of queues: opening and closing one, and what orders its requests on streams, as its
// client asks for it: a page of words (made in gpu.c), or events of the daemon's, whose handles go
// to the client. Nothing that a client makes is opened here.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/attach/internal.h"

static struct kvq__line *find_line(const struct kvq__connection *c, uint32_t id, char *text)
{
    struct kvq__line *line;
    LIST_FOREACH (line, &c->lines, link)
        if (line->id == id)
            return line;
    snprintf(text, KVQ_TEXT_BYTES, "no queue %u is open", id);
    return NULL;
}

// ---- Opening and closing ----

int kvq__open_queue_prepare(struct kvq__connection *c, char *text)
{
    int error;
    Kvq__OpenQueueReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (!reply)
        return kvq__attach_no_room(text);
    c->line = kvq__line_new(c, &error, text);
    if (!c->line)
        return error;
    kvq__open_queue_reply__init(reply);
    reply->request_slots = KVQ_REQ_SLOTS;
    reply->reply_slots = KVQ_CQ_SLOTS;
    c->reply.open_queue = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_OPEN_QUEUE;
    const int fds[] = {c->line->request.fd, c->line->reply.fd, c->line->request_event,
                       c->line->wake_theirs};
    memcpy(c->fds, fds, sizeof fds);
    c->n_fds = 4;
    return 0;
}

static void line_gone_on_loop(struct kvq__mail *mail)
{
    kvq__line_give_back((struct kvq__line *)((char *)mail - offsetof(struct kvq__line, mail)));
}

// Poller's thread, behind the last request of the queue.
static void line_closed(struct kvq__port *port)
{
    struct kvq__line *line = (struct kvq__line *)port; // its first member
    struct kvq__connection *c = line->connection;
    assert(line->port.closing && !line->port.queue);
    LIST_REMOVE(line, link);
    kvq__mailbox_post(&c->server->box, &line->mail, line_gone_on_loop);
    if (c->detaching)
        kvq__connection_check_gone(c);
    else
        kvq__connection_to_loop(c);
}

int kvq__open_queue_run(struct kvq__connection *c, char *text)
{
    struct kvq__line *line = c->line;
    assert(line->id == 0 && !line->port.queue);
    int error = kvq__queue_open(c->client, &line->port.queue, text);
    if (error)
        return error;
    line->id = ++c->next_line;
    line->port.closed = line_closed;
    error = kvq__port_add(c->server->poller, &line->port, text);
    if (error) {
        kvq__queue_close(&line->port.queue);
        return error;
    }
    LIST_INSERT_HEAD(&c->lines, line, link);
    c->reply.open_queue->queue = line->id;
    return 0;
}

// The client has its end of the wake-up now.
void kvq__open_queue_sent(struct kvq__connection *c)
{
    assert(c->line && c->line->wake_theirs >= 0);
    close(c->line->wake_theirs);
    c->line->wake_theirs = -1;
}

void kvq__open_queue_undo(struct kvq__connection *c)
{
    assert(c->line);
    kvq__line_free(c->line);
}

uint64_t kvq__open_queue_made(const struct kvq__connection *c)
{
    return c->reply.open_queue->queue;
}

int kvq__close_queue_run(struct kvq__connection *c, char *text)
{
    struct kvq__line *line = find_line(c, c->request->close_queue->queue, text);
    if (!line)
        return KVQ_E_INVALID;
    kvq__port_remove(c->server->poller, &line->port); // then line_closed
    return KVQ__COMES_BACK;
}

// ---- Events ----

int kvq__open_events_prepare(struct kvq__connection *c, char *text)
{
    int error = kvq__attach_gpu(c, &c->request->open_events->gpu, &c->gpu, text);
    if (error)
        return error;
    if (!kvq__gpu_has_events(c->gpu)) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%s has no events that other processes can open; wait on the host",
                 kvq__gpu_uuid_text(c->gpu));
        return KVQ_E_UNSUPPORTED;
    }
    Kvq__OpenEventsReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    ProtobufCBinaryData *handles =
        kvq_arena_alloc(&c->arena, 2 * KVQ_QUEUE_EVENTS * sizeof *handles);
    if (!reply || !handles)
        return kvq__attach_no_room(text);
    kvq__open_events_reply__init(reply);
    reply->ready = handles;
    reply->done = handles + KVQ_QUEUE_EVENTS;
    c->reply.open_events = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_OPEN_EVENTS;
    return 0;
}

static int make_event(const struct kvq_gpu_driver *d, struct kvq_gpu_event **event,
                      struct kvq_gpu_ipc_event *handle)
{
    int result = d->event_create(event, KVQ_GPU_EVENT_UNTIMED | KVQ_GPU_EVENT_SHARED);
    if (result != KVQ_GPU_OK) {
        *event = NULL;
        return result;
    }
    return d->ipc_event_get(handle, *event);
}

void kvq__open_events_make(struct kvq__connection *c)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(c->gpu);
    struct kvq__line_events *made = calloc(1, sizeof *made);
    assert(!c->events);
    c->events = made; // given back by its command if this fails
    c->error = made ? 0 : KVQ_E_NO_MEMORY;
    if (!made)
        return;
    made->gpu = c->gpu;
    int result = kvq__gpu_enter(c->gpu);
    for (uint32_t i = 0; i < KVQ_QUEUE_EVENTS && result == KVQ_GPU_OK; i++) {
        result = make_event(d, &made->all.ready[i], &made->ready[i]);
        result = result ? result : make_event(d, &made->all.done[i], &made->done[i]);
    }
    if (result == KVQ_GPU_OK)
        return;
    kvq_gpu_fault(d, result, "making events that other processes can open", c->text,
                  sizeof c->text);
    c->error = result == KVQ_GPU_OUT_OF_MEMORY ? KVQ_E_NO_MEMORY : KVQ_E_UNSUPPORTED;
}

void kvq__line_events_close(struct kvq__line_events **pointer)
{
    struct kvq__line_events *events = *pointer;
    *pointer = NULL;
    if (!events)
        return;
    const struct kvq_gpu_driver *d = kvq__gpu_driver(events->gpu);
    kvq__gpu_enter(events->gpu);
    for (uint32_t i = 0; i < KVQ_QUEUE_EVENTS; i++) {
        if (events->all.ready[i])
            d->event_destroy(events->all.ready[i]);
        if (events->all.done[i])
            d->event_destroy(events->all.done[i]);
    }
    free(events);
}

// A queue has one order. What it was refused is given back with the queue, so that a client has no
// more of it than queues, however often it asks.
static int refuse_second_order(char *text)
{
    snprintf(text, KVQ_TEXT_BYTES,
             "this queue has a timeline already, or was refused one; open another queue");
    return KVQ_E_EXISTS;
}

int kvq__open_events_run(struct kvq__connection *c, char *text)
{
    struct kvq__line *line = find_line(c, c->request->open_events->queue, text);
    assert(c->events && c->events->gpu == c->gpu);
    if (!line)
        return KVQ_E_INVALID;
    if (line->events)
        return refuse_second_order(text);
    int error = kvq__queue_events(line->port.queue, c->gpu, &c->events->all, text);
    line->events = c->events;
    if (error)
        c->events = NULL; // the queue's
    return error;
}

static void put_handles(ProtobufCBinaryData *to, size_t *n, struct kvq_gpu_ipc_event *handles)
{
    *n = KVQ_QUEUE_EVENTS;
    for (uint32_t i = 0; i < KVQ_QUEUE_EVENTS; i++)
        to[i] = (ProtobufCBinaryData){sizeof handles[i].bytes, handles[i].bytes};
}

void kvq__open_events_put(struct kvq__connection *c)
{
    Kvq__OpenEventsReply *reply = c->reply.open_events;
    assert(c->events);
    put_handles(reply->ready, &reply->n_ready, c->events->ready);
    put_handles(reply->done, &reply->n_done, c->events->done);
}

// ---- Timelines ----

int kvq__open_timeline_prepare(struct kvq__connection *c, char *text)
{
    int error = kvq__attach_gpu(c, &c->request->open_timeline->gpu, &c->gpu, text);
    if (error == 0 && kvq__attach_check_pins(c, text))
        error = KVQ_E_UNSUPPORTED; // clients go on to the next order
    Kvq__OpenTimelineReply *reply = kvq_arena_alloc(&c->arena, sizeof *reply);
    if (error || !reply)
        return error ? error : kvq__attach_no_room(text);
    kvq__open_timeline_reply__init(reply);
    c->reply.open_timeline = reply;
    c->reply.result_case = KVQ__REPLY__RESULT_OPEN_TIMELINE;
    return 0;
}

int kvq__open_timeline_run(struct kvq__connection *c, char *text)
{
    struct kvq__line *line = find_line(c, c->request->open_timeline->queue, text);
    assert(c->timeline.at && c->timeline.shm.map);
    if (!line)
        return KVQ_E_INVALID;
    if (line->timeline.shm.map)
        return refuse_second_order(text);
    struct kvq_timeline_page *page = c->timeline.shm.map;
    int error = kvq__queue_timeline(
        line->port.queue, c->gpu, c->timeline.at + offsetof(struct kvq_timeline_page, ready),
        c->timeline.at + offsetof(struct kvq_timeline_page, done), &page->ready, text);
    line->timeline = c->timeline;
    line->timeline.shm.fd = -1; // sent beside the reply, then closed
    if (error) {
        close(c->timeline.shm.fd);
        c->timeline = (struct kvq__pinned){.shm.fd = -1}; // the queue's
    }
    return error;
}

void kvq__open_timeline_put(struct kvq__connection *c)
{
    c->fds[0] = c->timeline.shm.fd;
    c->n_fds = 1;
    kvq__timeline_note(c, &c->timeline);
}

void kvq__open_timeline_sent(struct kvq__connection *c)
{
    assert(c->timeline.shm.fd >= 0);
    close(c->timeline.shm.fd);
}
