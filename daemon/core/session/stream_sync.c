// SPDX-License-Identifier: Apache-2.0
//
// See stream_sync.h; and the functions of core.h about a queue's timeline.
#include "daemon/core/session/stream_sync.h"

#include <assert.h>

#include "proto/ring.h"

// ---- Opening ----

static int open_on(struct kvq__queue *q, struct kvq__gpu *gpu, char *text)
{
    struct kvq__work_stream *stream;
    int rc = kvq__work_stream_get(q->client, gpu, &stream);
    if (rc < 0)
        return kvq__fail(text, rc, "no memory on %s for a client's stream",
                         kvq__gpu_uuid_text(gpu));
    if (!stream->alone)
        return kvq__fail(text, KVQ_E_UNSUPPORTED,
                         "of %u hardware queues on %s (CUDA_DEVICE_MAX_CONNECTIONS of the daemon) "
                         "none is left for a stream that waits for this client; wait on the host",
                         kvq__gpu_connections(gpu), kvq__gpu_uuid_text(gpu));
    q->timeline.gpu = gpu;
    return 0;
}

int kvq__queue_timeline(struct kvq__queue *q, struct kvq__gpu *gpu, uint64_t ready, uint64_t done,
                        uint64_t *ready_here, char *text)
{
    if (q->timeline.gpu)
        return kvq__fail(text, KVQ_E_EXISTS,
                         "this queue has a timeline already, on %s; open "
                         "another queue for another GPU",
                         kvq__gpu_uuid_text(q->timeline.gpu));
    if (!kvq__gpu_has_memory_ops(gpu))
        return kvq__fail(text, KVQ_E_UNSUPPORTED,
                         "%s has no 64-bit stream memory operations; use events, or wait on the "
                         "host",
                         kvq__gpu_uuid_text(gpu));
    int rc = open_on(q, gpu, text);
    if (rc == 0) {
        q->timeline.ready = ready;
        q->timeline.done = done;
        q->timeline.ready_here = ready_here;
    }
    return rc;
}

// A client that has opened words and found that its own streams cannot wait for them comes here.
int kvq__queue_events(struct kvq__queue *q, struct kvq__gpu *gpu, const struct kvq__events *events,
                      char *text)
{
    struct kvq__gpu *had = q->timeline.gpu;
    if (had && (had != gpu || q->timeline.events || q->timeline.used))
        return kvq__fail(text, KVQ_E_EXISTS,
                         "this queue has a timeline already, on %s; open another queue",
                         kvq__gpu_uuid_text(had));
    int rc = open_on(q, gpu, text);
    if (rc == 0)
        q->timeline.events = events;
    return rc;
}

// By a store, since a stream's write could stand behind the very wait that it is to end; and by the
// daemon's own stream, since a store of the host's need not wake a stream. The store comes first:
// it needs no driver, which another thread's call may hold until the stream goes on. The write may
// find no memory, and a client that lives on may write over it, so the poller calls this again and
// again until the queue is idle.
void kvq__queue_ending(struct kvq__queue *q)
{
    q->ending = true;
    if (!q->timeline.gpu || q->timeline.events || kvq__queue_gpu_idle(q))
        return;
    kvq_word64_store_release(q->timeline.ready_here, INT64_MAX);
    kvq__gpu_poke(q->timeline.gpu, q->timeline.ready, INT64_MAX);
}

// ---- Requests ----

static uint32_t turn(const struct kvq__queue *q)
{
    return q->header.signal % KVQ_QUEUE_EVENTS;
}

int kvq__stream_sync_await(const struct kvq__work_stream *stream, const struct kvq__queue *q)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    assert(stream->alone && stream->gpu == q->timeline.gpu);
    if (q->timeline.events)
        return d->stream_wait(stream->gpu_stream, q->timeline.events->ready[turn(q)], 0);
    return d->stream_wait64(stream->gpu_stream, q->timeline.ready, q->header.signal,
                            KVQ_GPU_WAIT_AT_LEAST);
}

int kvq__stream_sync_tell(const struct kvq__work_stream *stream, const struct kvq__queue *q)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(stream->gpu);
    assert(stream->alone && stream->gpu == q->timeline.gpu);
    if (q->timeline.events)
        return d->event_record(q->timeline.events->done[turn(q)], stream->gpu_stream);
    return d->stream_write64(stream->gpu_stream, q->timeline.done, q->header.signal, 0);
}
