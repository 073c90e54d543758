// SPDX-License-Identifier: Apache-2.0
//
// See gate.h.
#include "daemon/core/gpu/gate.h"

#include <assert.h>
#include <time.h>

#include "proto/clock.h"
#include "proto/sync.h"

void kvq__gate_open(struct kvq__gate *gate)
{
    pthread_mutex_init(&gate->passing, NULL);
    pthread_mutex_init(&gate->lock, NULL);
}

void kvq__gate_close(struct kvq__gate *gate)
{
    assert(gate->n == 0 && !gate->up && !gate->giving);
    pthread_mutex_destroy(&gate->passing);
    pthread_mutex_destroy(&gate->lock);
}

// ---- Streams that may wait ----

void kvq__gate_add(struct kvq__gate *gate, const struct kvq__gpu *gpu,
                   struct kvq_gpu_stream *stream)
{
    pthread_mutex_lock(&gate->lock);
    assert(stream && gate->n < sizeof gate->streams / sizeof *gate->streams);
    gate->streams[gate->n++] = (struct kvq__gate_stream){gpu, stream};
    pthread_mutex_unlock(&gate->lock);
}

void kvq__gate_remove(struct kvq__gate *gate, struct kvq_gpu_stream *stream)
{
    pthread_mutex_lock(&gate->lock);
    uint32_t i = 0;
    while (i < gate->n && gate->streams[i].stream != stream)
        i++;
    assert(i < gate->n);
    gate->streams[i] = gate->streams[--gate->n];
    pthread_mutex_unlock(&gate->lock);
}

// A stream about which the driver has no answer may wait. But after a fault no call waits for
// anything, and a call that never fails otherwise tells that.
static bool has_ended(const struct kvq__gate_stream *s)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(s->gpu);
    size_t left, all;
    if (kvq__gpu_enter(s->gpu) != KVQ_GPU_OK)
        return false;
    int result = d->stream_query(s->stream);
    if (result == KVQ_GPU_OK || result == KVQ_GPU_NOT_READY)
        return result == KVQ_GPU_OK;
    return d->memory_info(&left, &all) != KVQ_GPU_OK;
}

bool kvq__gate_is_clear(struct kvq__gate *gate, const struct kvq__gpu *gpu)
{
    bool clear = true;
    pthread_mutex_lock(&gate->lock);
    for (uint32_t i = 0; i < gate->n && clear; i++)
        if (!gpu || gate->streams[i].gpu == gpu)
            clear = has_ended(&gate->streams[i]);
    pthread_mutex_unlock(&gate->lock);
    return clear;
}

// ---- Going through ----

static void nap(uint64_t ns)
{
    struct timespec pause = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    nanosleep(&pause, NULL);
}

// True if nothing waits for a client, and nothing will as long as the gate is up.
static bool raise_gate(struct kvq__gate *gate)
{
    const uint64_t until = kvq_now_ns() + KVQ__GATE_UP_NS;
    kvq_word_store(&gate->up, 1);
    kvq_word_fence(); // the poller sees this, or is seen
    while (kvq_word_load_acquire(&gate->giving) || !kvq__gate_is_clear(gate, NULL)) {
        if (kvq_now_ns() >= until)
            return false;
        nap(KVQ__GATE_LOOK_NS);
    }
    return true;
}

void kvq__gate_pass(struct kvq__gate *gate, bool (*run)(void *context), void *context)
{
    uint64_t pause = KVQ__GATE_LEAST_NS;
    pthread_mutex_lock(&gate->passing);
    for (bool more = true; more;) {
        bool through = raise_gate(gate);
        if (through)
            more = run(context);
        kvq_word_store_release(&gate->up, 0);
        kvq_long_add(&gate->attempts, 1);
        if (more)
            nap(pause);
        pause = through ? KVQ__GATE_LEAST_NS : 2 * pause;
        pause = pause < KVQ__GATE_MOST_NS ? pause : KVQ__GATE_MOST_NS;
    }
    pthread_mutex_unlock(&gate->passing);
}
