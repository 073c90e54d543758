// SPDX-License-Identifier: Apache-2.0
//
// What a queue's requests on streams are ordered by, as its client asks for it: a page of words
// (made in gpu.c), or events of the daemon's, whose handles go to the client. Nothing that
// a client makes is opened here.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/attach/internal.h"

static bool is_events(const struct kvq__connection *c)
{
    return c->request->command_case == KVQ__REQUEST__COMMAND_OPEN_EVENTS;
}

static int prepare_events(struct kvq__connection *c, char *text)
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

int kvq__order_prepare(struct kvq__connection *c, char *text)
{
    if (is_events(c))
        return prepare_events(c, text);
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

// ---- Making ----

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

static void make_events(struct kvq__connection *c)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(c->gpu);
    struct kvq__line_events *made = calloc(1, sizeof *made);
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

void kvq__order_make(struct kvq__connection *c)
{
    if (is_events(c))
        make_events(c);
    else
        kvq__timeline_make(c);
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

// ---- Opening ----

// What a queue was refused is given back with the queue, so that a client has no more of it than
// queues, however often it asks.
static void keep_refused(struct kvq__connection *c, struct kvq__line *line)
{
    if (c->events && !line->events) {
        line->events = c->events;
        c->events = NULL;
    }
    if (c->timeline.shm.map && !line->timeline.shm.map) {
        close(c->timeline.shm.fd);
        line->timeline = c->timeline;
        line->timeline.shm.fd = -1;
        c->timeline = (struct kvq__pinned){.shm.fd = -1};
    }
}

int kvq__order_open(struct kvq__connection *c, char *text)
{
    uint32_t id = is_events(c) ? c->request->open_events->queue : c->request->open_timeline->queue;
    struct kvq__line *line;
    LIST_FOREACH (line, &c->lines, link)
        if (line->id == id)
            break;
    if (!line) {
        snprintf(text, KVQ_TEXT_BYTES, "no queue %u is open", id);
        return KVQ_E_INVALID;
    }
    struct kvq__queue *queue = line->port.queue;
    if (is_events(c) ? line->events != NULL : line->timeline.shm.map != NULL) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "this queue has a timeline already, or was refused one; open another queue");
        return KVQ_E_EXISTS;
    }
    if (is_events(c)) {
        int error = kvq__queue_events(queue, c->gpu, &c->events->all, text);
        if (error)
            keep_refused(c, line);
        else
            line->events = c->events;
        return error;
    }
    struct kvq_timeline_page *page = c->timeline.shm.map;
    int error = kvq__queue_timeline(
        queue, c->gpu, c->timeline.at + offsetof(struct kvq_timeline_page, ready),
        c->timeline.at + offsetof(struct kvq_timeline_page, done), &page->ready, text);
    if (error) {
        keep_refused(c, line);
        return error;
    }
    line->timeline = c->timeline;
    line->timeline.shm.fd = -1; // sent beside the reply, then closed
    return 0;
}

static void put_handles(ProtobufCBinaryData *to, size_t *n, struct kvq_gpu_ipc_event *handles)
{
    *n = KVQ_QUEUE_EVENTS;
    for (uint32_t i = 0; i < KVQ_QUEUE_EVENTS; i++)
        to[i] = (ProtobufCBinaryData){sizeof handles[i].bytes, handles[i].bytes};
}

void kvq__order_put(struct kvq__connection *c)
{
    if (is_events(c)) {
        put_handles(c->reply.open_events->ready, &c->reply.open_events->n_ready, c->events->ready);
        put_handles(c->reply.open_events->done, &c->reply.open_events->n_done, c->events->done);
        return;
    }
    c->fds[0] = c->timeline.shm.fd;
    c->n_fds = 1;
}
