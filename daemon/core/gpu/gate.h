// SPDX-License-Identifier: Apache-2.0
//
// The gate: when the driver may be asked for what waits for everything. cuMemFree, cuMemFreeHost,
// cuMemHostUnregister and cuIpcCloseMemHandle return when all streams have ended what they were
// given, and let no thread give work to any until then (seen on an H100). Streams wait for clients,
// so one client that stands still would stop all others, and for ever: what lets its stream go
// would wait for the driver as well.
//
// So they are asked only while no stream waits for a client and none is made to. Whoever wants them
// raises the gate; while it is up the poller makes no stream wait, and tries again later. When all
// streams that may wait have ended what they were given, the calls are made and the gate is
// lowered. It is lowered as well when they have not ended soon: then a client stands still, or has
// much under way, and the next attempt comes later.
//
// Calls that do not wait need no gate: to make, map, unmap and export memory, also to open it by a
// handle, and all about streams and events (tools/gpu/waits.py asks a driver).
#ifndef KVQ_DAEMON_CORE_GPU_GATE_H
#define KVQ_DAEMON_CORE_GPU_GATE_H

#include <pthread.h>

#include "daemon/core/gpu/gpu.h"
#include "proto/limits.h"
#include "proto/ring.h"

enum {
    KVQ__GATE_UP_NS = 20000000,      // the gate is up for so long, if streams do not end before
    KVQ__GATE_LOOK_NS = 100000,      // between two looks at the streams meanwhile
    KVQ__GATE_LEAST_NS = 1000000,    // between two attempts; twice as long after each one
    KVQ__GATE_MOST_NS = 1000000000,  // at most
    KVQ__GATE_STREAMS_OF_A_GPU = 16, // that may wait: as many as pairs of hardware queues
};

struct kvq__gate_stream {
    const struct kvq__gpu *gpu;
    struct kvq_gpu_stream *stream;
};

// One for all GPUs, since host memory is known to all of them. Zero-initialize and open it.
struct kvq__gate {
    uint32_t up;             // 1: no stream is made to wait for a client
    uint32_t giving;         // 1: the poller makes one wait just now
    uint64_t attempts;       // to go through; for tests
    pthread_mutex_t passing; // held by whoever raises it
    pthread_mutex_t lock;    // of all below
    struct kvq__gate_stream streams[KVQ_MAX_GPUS * KVQ__GATE_STREAMS_OF_A_GPU];
    uint32_t n;
};

void kvq__gate_open(struct kvq__gate *gate);
void kvq__gate_close(struct kvq__gate *gate);

// A stream that may wait for a client, until it does no more. Any thread.
void kvq__gate_add(struct kvq__gate *gate, const struct kvq__gpu *gpu,
                   struct kvq_gpu_stream *stream);
void kvq__gate_remove(struct kvq__gate *gate, struct kvq_gpu_stream *stream);

// The poller's thread, around the call that makes a stream wait for a client. False if the gate is
// up: the stream must not be made to wait, and kvq__gate_leave is not called.
static inline bool kvq__gate_enter(struct kvq__gate *gate)
{
    if (kvq_word_load(&gate->up))
        return false;
    kvq_word_store(&gate->giving, 1);
    kvq_word_fence(); // whoever raises the gate sees this, or is seen
    if (kvq_word_load_acquire(&gate->up) == 0)
        return true;
    kvq_word_store_release(&gate->giving, 0);
    return false;
}

static inline void kvq__gate_leave(struct kvq__gate *gate)
{
    kvq_word_store_release(&gate->giving, 0);
}

// Whether no stream of the GPU waits for a client (NULL: of any GPU). What cannot be known counts
// as one that waits. Any thread; that holds on only if the thread is the poller's, or the gate is
// up.
bool kvq__gate_is_clear(struct kvq__gate *gate, const struct kvq__gpu *gpu);

// Calls run(context) behind the gate, again for as long as it returns true: there is more to do,
// and the gate was up for long. Returns when it has returned false: never, while a client stands
// still. Any thread that has nothing else to do.
void kvq__gate_pass(struct kvq__gate *gate, bool (*run)(void *context), void *context);

#endif
