// SPDX-License-Identifier: Apache-2.0
//
// What orders actors' requests on streams: the words of a timeline, which the actor writes and
// reads itself, or events, with a stream of the actor's own between them and the same words: it
// waits until the actor writes `ready`, and writes `done` once the daemon's event is reached.
#include <stdlib.h>

#include "daemon/core/gpu/gpu.h"
#include "proto/ring.h"
#include "tests/core/sim.h"

struct sim_events {
    struct kvq__gpu *gpu;
    struct kvq_gpu_stream *stream;
    struct kvq__events all;
};

static const struct kvq_gpu_driver *enter(const struct kvq__gpu *gpu)
{
    MUST(kvq__gpu_enter(gpu) == KVQ_GPU_OK);
    return kvq__gpu_driver(gpu);
}

static void events_free(struct sim_events *e)
{
    const struct kvq_gpu_driver *d = enter(e->gpu);
    MUST(d->stream_sync(e->stream) == KVQ_GPU_OK);
    MUST(d->stream_destroy(e->stream) == KVQ_GPU_OK);
    for (uint32_t i = 0; i < KVQ_QUEUE_EVENTS; i++)
        MUST(d->event_destroy(e->all.ready[i]) == 0 && d->event_destroy(e->all.done[i]) == 0);
    free(e);
}

static struct sim_events *events_new(struct kvq__gpu *gpu)
{
    struct sim_events *e = calloc(1, sizeof *e);
    const struct kvq_gpu_driver *d = enter(gpu);
    e->gpu = gpu;
    MUST(d->stream_create(&e->stream, KVQ_GPU_STREAM_OWN) == KVQ_GPU_OK);
    for (uint32_t i = 0; i < KVQ_QUEUE_EVENTS; i++)
        MUST(d->event_create(&e->all.ready[i], KVQ_GPU_EVENT_UNTIMED) == 0 &&
             d->event_create(&e->all.done[i], KVQ_GPU_EVENT_UNTIMED) == 0);
    return e;
}

void order_open(struct sim *sim, struct actor *a)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__gpu *gpu = sim->kit.core->pools[1].gpu;
    uint64_t *words = sim_gpus()->memory_new(2 * sizeof *words);
    struct sim_events *events =
        sim_runs_late() && kit_chance(&sim->kit, 50) ? events_new(gpu) : NULL;
    words[0] = words[1] = 0;
    int rc = events ? kvq__queue_events(a->member.queue, gpu, &events->all, text)
                    : kvq__queue_timeline(a->member.queue, gpu, (uintptr_t)words,
                                          (uintptr_t)(words + 1), words, text);
    MUST(rc == 0 || (rc == KVQ_E_NO_MEMORY && sim->kit.fail_one_in) ||
         (rc == KVQ_E_UNSUPPORTED && kvq__gpu_clients_alone(gpu) == 0));
    if (rc == 0) {
        a->timeline = words;
        a->events = events;
        return;
    }
    sim_gpus()->memory_free(words);
    if (events)
        events_free(events);
}

void order_ask(struct actor *a)
{
    struct sim_events *e = a->events;
    if (!sim_runs_late())
        a->timeline[0] = a->signal;
    if (!e)
        return;
    const struct kvq_gpu_driver *d = enter(e->gpu);
    MUST(d->stream_wait64(e->stream, (uintptr_t)a->timeline, a->signal, KVQ_GPU_WAIT_AT_LEAST) ==
         KVQ_GPU_OK);
    MUST(d->event_record(e->all.ready[a->signal % KVQ_QUEUE_EVENTS], e->stream) == KVQ_GPU_OK);
}

void order_answered(struct actor *a)
{
    struct sim_events *e = a->events;
    if (!e)
        return;
    const struct kvq_gpu_driver *d = enter(e->gpu);
    MUST(d->stream_wait(e->stream, e->all.done[a->signal % KVQ_QUEUE_EVENTS], 0) == KVQ_GPU_OK);
    MUST(d->stream_write64(e->stream, (uintptr_t)(a->timeline + 1), a->signal, 0) == KVQ_GPU_OK);
}

void order_end(struct actor *a)
{
    if (a->events)
        kvq_word64_store_release(&a->timeline[0], INT64_MAX);
}

void order_close(struct actor *a)
{
    if (a->events)
        events_free(a->events);
    if (a->timeline)
        sim_gpus()->memory_free(a->timeline);
    a->timeline = NULL;
    a->events = NULL;
}
