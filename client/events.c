// SPDX-License-Identifier: Apache-2.0
//
// Requests in the order of a GPU's stream by events of the daemon's, which are opened here. A wait
// for an event is for its latest record, so the stream can wait for the daemon only once the daemon
// has recorded: when the completion is there, which comes when the daemon has enqueued the work.
// The calling thread waits for the daemon; no host waits for a GPU.
#include "client/internal.h"

#include <assert.h>
#include <string.h>

static int open_event(const struct kvq__gpu_context *here, const ProtobufCBinaryData *from,
                      struct kvq_gpu_event **event)
{
    char text[KVQ__TEXT_BYTES / 2];
    struct kvq_gpu_ipc_event handle;
    if (from->len != sizeof handle.bytes)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon's handle of an event has %zu bytes, not %zu", from->len,
                              sizeof handle.bytes);
    memcpy(handle.bytes, from->data, sizeof handle.bytes);
    int result = here->driver->ipc_event_open(event, handle);
    if (result == KVQ_GPU_OK)
        return KVQ_OK;
    *event = NULL;
    kvq_gpu_fault(here->driver, result, "opening the daemon's events", text, sizeof text);
    return kvq__set_error(
        KVQ_E_UNSUPPORTED,
        "%s; containers must share /dev/shm (--ipc=host) and have different pids for "
        "that; KVQ_GPU_ORDER=host works without",
        text);
}

static int take_events(void *to, struct kvq__call *call)
{
    struct kvq__timeline *t = to;
    const Kvq__OpenEventsReply *reply = call->reply->open_events;
    size_t n = reply->n_ready;
    int rc = KVQ_OK;
    if (n == 0 || n > KVQ_QUEUE_EVENTS || reply->n_done != n)
        return kvq__set_error(KVQ_E_PROTOCOL,
                              "the daemon sent %zu and %zu events, 1 to %d of each are "
                              "agreed",
                              n, reply->n_done, KVQ_QUEUE_EVENTS);
    t->n_events = (uint32_t)n;
    for (size_t i = 0; i < n && rc == KVQ_OK; i++) {
        rc = open_event(&t->here, &reply->ready[i], &t->ready_events[i]);
        if (rc == KVQ_OK)
            rc = open_event(&t->here, &reply->done[i], &t->done_events[i]);
    }
    return rc;
}

static bool daemon_has_events(const kvq_client *client, const struct kvq__gpu_context *here)
{
    for (uint32_t i = 0; i < client->n_gpus; i++)
        if (memcmp(client->gpus[i].uuid, here->uuid, KVQ__UUID_BYTES) == 0)
            return client->gpus[i].orders & KVQ_GPU_ORDERS_EVENTS;
    return false;
}

int kvq__events_open(kvq_queue *queue, struct kvq__timeline *t)
{
    kvq_client *client = queue->client;
    assert(t->here.driver && t->n_events == 0);
    Kvq__OpenEvents message = KVQ__OPEN_EVENTS__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want = KVQ__REPLY__RESULT_OPEN_EVENTS,
                             .what = "opening a queue's events",
                             .take = take_events,
                             .to = t};
    if (!daemon_has_events(client, &t->here))
        return kvq__set_error(KVQ_E_UNSUPPORTED,
                              "the daemon has no events that other processes can "
                              "open on this GPU; kvqctl doctor says more");
    message.queue = queue->id;
    message.gpu.data = t->here.uuid;
    message.gpu.len = sizeof t->here.uuid;
    call.request.command_case = KVQ__REQUEST__COMMAND_OPEN_EVENTS;
    call.request.open_events = &message;
    return kvq__ask(client, &call);
}

void kvq__events_close(struct kvq__timeline *t)
{
    assert(t->n_events <= KVQ_QUEUE_EVENTS);
    const struct kvq_gpu_driver *driver = t->here.driver;
    for (uint32_t i = 0; i < t->n_events; i++) {
        if (t->ready_events[i])
            driver->event_destroy(t->ready_events[i]);
        if (t->done_events[i])
            driver->event_destroy(t->done_events[i]);
        t->ready_events[i] = t->done_events[i] = NULL;
    }
    t->n_events = 0;
}

int kvq__events_send(kvq_queue *queue, struct kvq__pending *p, struct kvq_gpu_stream *stream)
{
    struct kvq__timeline *t = &queue->timeline;
    assert(t->order == KVQ_ORDER_EVENTS && t->n_events > 0);
    const struct kvq_gpu_driver *driver = t->here.driver;
    uint32_t turn = (uint32_t)((t->last + 1) % t->n_events);
    int result = driver->event_record(t->ready_events[turn], stream);
    if (result != KVQ_GPU_OK)
        return kvq__driver_fault(&t->here, result,
                                 "having the stream tell the daemon that it has come so far");
    p->request.flags |= KVQ_REQ_ON_STREAM;
    p->request.signal = ++t->last;
    int rc = kvq__submit_send(queue, p);
    if (rc == KVQ_OK)
        rc = kvq__queue_wait(queue, p, UINT64_MAX);
    if (rc) {
        p->ticket = 0;
        return rc;
    }
    result = driver->stream_wait(stream, t->done_events[turn], 0);
    if (result == KVQ_GPU_OK)
        return KVQ_OK;
    driver->event_sync(t->done_events[turn]); // the host waits in its place
    p->ticket = 0;
    return kvq__driver_fault(&t->here, result, "having the stream wait for the daemon");
}
