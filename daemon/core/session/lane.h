// SPDX-License-Identifier: Apache-2.0
//
// Lanes: what the core has enqueued on GPUs. A client has one on each GPU that it has sessions on:
// a stream (its own, while hardware queues last: gpu.h), memory that the arguments of its work
// travel in, and a list of what is held until the work has ended. A client that never signals keeps
// its own lane from going on, and no other's.
//
// Work of one request stands in one chunk of the lane's memory, which is host memory and GPU memory
// side by side: the core writes page tables and jobs there as it does into a queue's arena, and
// what a wave needs is copied over in front of its kernels. Chunks are used in turn.
//
// Order. Everything of a lane runs in the order it was enqueued. Between lanes nothing is ordered,
// so nothing crosses: readers see tokens whose work has ended, a session that another lane has
// packed is waited for, and memory is given out again only when the flights have ended.
#ifndef KVQ_DAEMON_CORE_SESSION_LANE_H
#define KVQ_DAEMON_CORE_SESSION_LANE_H

#include "daemon/core/gpu/gpu.h"
#include "daemon/core/state.h"

enum {
    KVQ__CHUNKS = 16, // a chunk starts with this part of the lane's memory at least
};

// What an enqueued request holds of one session.
struct kvq__held {
    struct kvq__session *session;
    struct kvq__table *table; // NULL = none
    bool reading, tail_use, settles;
};

// Enqueued work that is let go of together.
struct kvq__pending {
    uint64_t number; // reached by the lane's word when it has ended
    uint64_t memory; // chunks below it are free then
    uint64_t since;  // when it was enqueued
    uint32_t ops;    // operations that it is
    uint32_t n_held;
    struct kvq__flight flight;
    struct kvq__buffer_set buffers;
};

// What is known of a stream that lanes give work to, one or all of a GPU's that share it.
struct kvq__stream_use {
    uint32_t ops;      // that it was given and that were not seen to end
    uint32_t watching; // 1 from the wish to be woken until it was fulfilled
    void (*wake)(void *context);
    void *wake_context;
};

enum {
    KVQ__CHUNK_OPS = 4, // that a chunk is besides its waves: wait, tell, number, event
    KVQ__WAVE_OPS = 8,  // that a wave is at most, besides what its entries are
};

struct kvq__lane {
    LIST_ENTRY(kvq__lane) link; // in the core
    struct kvq__core *core;
    struct kvq__client *client; // NULL: it is gone
    struct kvq__gpu *gpu;
    bool ready; // all of it was made
    // Its streams are its own and have hardware queues alone, so that they may wait for the client.
    // Other lanes share streams, on which work never waits for a client.
    bool alone;
    struct kvq_gpu_stream *stream;
    struct kvq_gpu_stream *watch; // waits for `event`, then wakes the poller
    struct kvq_gpu_event *event;
    struct kvq__stream_use own_use, *use; // of `stream`; own_use if it is alone
    uint32_t open_ops;                    // enqueued since the last number
    uint64_t *word;        // host memory that the stream writes: work up to this number has ended
    kvq_gpu_ptr word_at;   // the same for the GPU
    uint64_t given, ended; // numbers
    uint64_t told;         // number of the last work that was said to stall
    uint8_t *host;         // KVQ__LANE_BYTES, and the GPU's side of them
    kvq_gpu_ptr device;
    uint64_t head, tail;          // of the chunks, counted on without end
    kvq_gpu_ptr workspace;        // KVQ__LANE_WORKSPACE, zeros between requests where it matters
    uint32_t first, n;            // of pending, a ring
    struct kvq__pending *pending; // KVQ_MAX_GPU_PENDING
    uint32_t first_held, n_held;
    struct kvq__held *held;                           // KVQ__LANE_HELD, a ring
    struct kvq_gpu_event *marks[KVQ_MAX_GPU_PENDING]; // where there are no memory operations
};
enum { KVQ__LANE_HELD = 16 * KVQ_MAX_BATCH };

// The client's lane on a GPU, made if need be. KVQ_E_NO_MEMORY, KVQ_E_SYSTEM. Not on the hot path.
int kvq__lane_get(struct kvq__client *client, struct kvq__gpu *gpu, struct kvq__lane **lane);
// The client is gone and all its work has ended, but maybe some that nobody waits for: the lane is
// there for another client when that has, too. It is not freed: to free GPU memory or pinned memory
// is to wait for the whole GPU, and so for every client whose stream has yet to signal. NULL is
// fine.
void kvq__lane_leave(struct kvq__lane **lane);
// When no client is left: returns once no thread of the driver's calls a `wake` any more.
void kvq__lanes_hush(struct kvq__core *core);
// When no client is left: waits for what they still do.
void kvq__lanes_drain(struct kvq__core *core);
// Frees them then.
void kvq__lanes_close(struct kvq__core *core);

// Opens a chunk on its client's lane for the GPU that the queue's wave is for, and on the first one
// of a request with KVQ_REQ_ON_STREAM has the lane wait for the client. False if there is no room:
// then it says so to the queue, which goes on when it has settled.
bool kvq__lane_open_for(struct kvq__queue *queue);
// Closes the queue's chunk for another one. False: as above.
bool kvq__lane_again(struct kvq__queue *queue);
// Opens a chunk for the queue's request as its arena. False if there is none, no room to hold what
// the request holds, or much under way on the stream, before something has ended.
bool kvq__lane_open(struct kvq__lane *lane, struct kvq__queue *queue);
// Whether the lane of the queue's timeline has room for a request's signal. False: as above.
bool kvq__lane_takes(struct kvq__queue *queue);
// Has the lane tell the client's stream that the queue's request is done, behind all that was
// enqueued, and so in the order of the requests. Without an open chunk that is work of its own,
// with a number: the word must be there until it is written.
void kvq__lane_signal(struct kvq__queue *queue);
// Operations that are enqueued on its stream: each must be counted, by whoever enqueues it.
void kvq__lane_count(struct kvq__lane *lane, uint32_t ops);
// How many more may be enqueued before something has ended: with many more the stream could make
// the caller, who is the poller, wait for that.
static inline uint32_t kvq__lane_ops_left(const struct kvq__lane *lane)
{
    return lane->use->ops < KVQ_MAX_GPU_OPS ? KVQ_MAX_GPU_OPS - lane->use->ops : 0;
}
// Enqueues the copy of the arena's bytes [from, used). 0 or KVQ_E_SYSTEM.
int kvq__lane_copy(struct kvq__lane *lane, struct kvq__queue *queue, size_t from);
// Ends the queue's chunk: everything enqueued so far gets a number, which is the queue's last. With
// `hold` the lane takes over what the request holds, its flight included.
int kvq__lane_close(struct kvq__lane *lane, struct kvq__queue *queue, bool hold);
// Lets go of what has ended. True if anything had.
bool kvq__lane_poll(struct kvq__lane *lane);
// Has wake(context) called once work that was enqueued so far has ended, if there is any: all of it
// where the stream is the lane's alone, else what was there when one of the lanes asked last.
bool kvq__lane_wake(struct kvq__lane *lane, void (*wake)(void *context), void *context);

// Whether its oldest work has been there for config.stall_ns; true once for each such work.
bool kvq__lane_stalls(struct kvq__lane *lane);
// A session that the lane's client has open, and others too, who cannot read it before the lane has
// packed what it was given to pack of it. NULL if there is none.
const struct kvq__session *kvq__lane_withholds(const struct kvq__lane *lane);

static inline bool kvq__lane_busy(const struct kvq__lane *lane)
{
    return lane->ended < lane->given;
}
static inline bool kvq__lane_ended(const struct kvq__lane *lane, uint64_t number)
{
    return !lane || lane->ended >= number;
}
// The address that the GPU knows a place in the queue's arena by.
static inline kvq_gpu_ptr kvq__lane_at(const struct kvq__lane *lane, const void *host)
{
    return lane->device + (uint64_t)((const uint8_t *)host - lane->host);
}

#endif
