// SPDX-License-Identifier: Apache-2.0
//
// Work streams: the work that the core has enqueued on GPUs. A client has a work stream on each GPU
// where it has sessions: a CUDA stream (its own, as long as there are hardware queues left: gpu.h),
// memory for the arguments of its work, and a list of what the work holds until it has ended. A
// client that never signals stops its own work stream, and no other.
//
// The arguments of one request stand in one chunk of the work stream's memory, which exists twice:
// on the host and on the GPU. The core writes page tables and jobs into the host's chunk as into a
// queue's arena; each wave begins with a copy to the GPU. Chunks form a ring.
//
// Order. What is enqueued on one work stream runs in that order. Between work streams there is no
// order, so work on one never depends on work on another: readers see tokens only when the work
// that stored them has ended, a request waits for units that another work stream packs, and blocks
// are given out again only when the flights have ended.
#ifndef KVQ_DAEMON_CORE_SESSION_WORK_STREAM_H
#define KVQ_DAEMON_CORE_SESSION_WORK_STREAM_H

#include "daemon/core/gpu/gpu.h"
#include "daemon/core/state.h"

enum {
    KVQ__CHUNKS = 16, // a chunk starts with this part of the work stream's memory at least
};

// What an enqueued request holds of one session.
struct kvq__held {
    struct kvq__session *session;
    struct kvq__table *table; // NULL = none
    uint8_t reading;          // of kvq__reading_begin; 0: it does not read it
    bool tail_use, commits_on_gpu;
};

// Enqueued work, and what it holds until it has ended.
struct kvq__pending {
    uint64_t number; // the work stream's word has this number when the work has ended
    uint64_t memory; // chunks below this count are free then
    uint64_t since;  // when it was enqueued
    uint32_t ops;    // operations that it is
    uint32_t n_held;
    struct kvq__flight flight;
    struct kvq__buffer_set buffers;
};

// The use of a stream: of one work stream's own, or of the one that all other work streams of a GPU
// share.
struct kvq__stream_use {
    uint32_t ops;      // operations enqueued and not seen to end
    uint32_t watching; // 1 while a wake-up is asked for and has not come
    void (*wake)(void *context);
    void *wake_context;
};

enum {
    KVQ__CHUNK_OPS = 4, // operations of a chunk besides its waves: wait, tell, number, event
    KVQ__WAVE_OPS = 8,  // operations of a wave at most, besides those of its entries
};

struct kvq__work_stream {
    LIST_ENTRY(kvq__work_stream) link; // in the core
    struct kvq__core *core;
    struct kvq__client *client; // NULL: it is gone
    struct kvq__gpu *gpu;
    bool ready; // all of it was made
    // Its streams are its own and have hardware queues alone, so that they may wait for the client.
    // Other work streams share streams, on which work never waits for a client.
    bool alone;
    struct kvq_gpu_stream *gpu_stream;
    struct kvq_gpu_stream *watch; // waits for `event`, then wakes the poller
    struct kvq_gpu_event *event;
    struct kvq__stream_use own_use, *use; // of `gpu_stream`; own_use if it is alone
    uint32_t open_ops;                    // enqueued since the last number
    uint64_t *word;          // host memory that the stream writes: work up to this number has ended
    kvq_gpu_ptr word_at;     // the same for the GPU
    uint64_t given, ended;   // numbers
    uint64_t stall_reported; // number of the last work that was said to stall
    uint64_t pack_again_at;  // the GPU has refused to pack in the background; not before then
    uint8_t *host;           // config.work_stream_bytes, and the GPU's side of them
    kvq_gpu_ptr device;
    uint64_t head, tail;   // of the chunks, counted on without end
    kvq_gpu_ptr workspace; // config.work_stream_workspace, zeros between requests where it matters
    uint32_t first, n;     // of pending, a ring
    struct kvq__pending *pending; // KVQ_MAX_GPU_PENDING
    uint32_t first_held, n_held;
    struct kvq__held *held;                           // KVQ__WORK_STREAM_HELD, a ring
    struct kvq_gpu_event *marks[KVQ_MAX_GPU_PENDING]; // where there are no memory operations
};
enum { KVQ__WORK_STREAM_HELD = 16 * KVQ_MAX_BATCH };

// The client's work stream on a GPU, made if need be. KVQ_E_NO_MEMORY, KVQ_E_SYSTEM. Not on the hot
// path.
int kvq__work_stream_get(struct kvq__client *client, struct kvq__gpu *gpu,
                         struct kvq__work_stream **stream);
// The client is gone. Its requests have ended, but background work may still run; when that has
// ended the work stream is for another client. It is not freed: freeing GPU memory or pinned memory
// waits for the whole GPU, and so for every client whose stream has yet to signal. NULL is fine.
void kvq__work_stream_leave(struct kvq__work_stream **stream);
// When no client is left: returns once no thread of the driver's calls a `wake` any more.
void kvq__work_streams_hush(struct kvq__core *core);
// When no client is left: waits until all work streams are idle.
void kvq__work_streams_drain(struct kvq__core *core);
// Frees all work streams then.
void kvq__work_streams_close(struct kvq__core *core);

// Opens a chunk on the client's work stream of the GPU q->gpu. For the first chunk of a request
// with KVQ_REQ_ON_STREAM the work stream also waits for the client's stream. Returns 1, or 0 if
// there is no room: then q->gpu_wait is KVQ__GPU_ROOM, and the queue goes on when it has settled. 0
// as well if no stream may be made to wait for a client now: then it is KVQ__GPU_GATE. A negative
// code if the driver refused the wait: the chunk is open, but nothing of the request may run in it.
int kvq__work_stream_open_for(struct kvq__queue *queue);
// Closes the queue's chunk, so that the queue gets a larger one. Returns false: it waits for room.
bool kvq__work_stream_again(struct kvq__queue *queue);
// Opens a chunk as the arena of the queue's request. False if no chunk is free, the ring of holds
// has no room, or much is under way on the stream; then something has to end first.
bool kvq__work_stream_open(struct kvq__work_stream *stream, struct kvq__queue *queue);
// Whether the work stream of the queue's timeline has room for a request's signal. False: as above.
bool kvq__work_stream_takes(struct kvq__queue *queue);
// Enqueues the signal to the client's stream that the queue's request is done, behind all earlier
// work and so in the order of the requests. Without an open chunk the signal is work of its own,
// with a number: the word that it writes must exist until then.
void kvq__work_stream_signal(struct kvq__queue *queue);
// Counts operations on the work stream's stream. Whoever enqueues some has to call it.
void kvq__work_stream_count(struct kvq__work_stream *stream, uint32_t ops);
// How many more operations may be enqueued. With many more the driver would block the poller until
// some have ended.
static inline uint32_t kvq__work_stream_ops_left(const struct kvq__work_stream *stream)
{
    return stream->use->ops < KVQ_MAX_GPU_OPS ? KVQ_MAX_GPU_OPS - stream->use->ops : 0;
}
// Enqueues the copy of the arena's bytes [from, used). 0 or KVQ_E_SYSTEM.
int kvq__work_stream_copy(struct kvq__work_stream *stream, struct kvq__queue *queue, size_t from);
// Ends the queue's chunk: the work enqueued so far gets a number, which becomes the queue's last
// one. With `hold` the work stream takes over what the request holds, also its flight.
int kvq__work_stream_close(struct kvq__work_stream *stream, struct kvq__queue *queue, bool hold);
// Lets go of what ended work held. True if any work had ended.
bool kvq__work_stream_poll(struct kvq__work_stream *stream);
// Has wake(context) called when the work enqueued so far has ended; false if there is none. Work
// streams that share a stream share one wake-up: it comes after the work that was there when it was
// asked for.
bool kvq__work_stream_wake(struct kvq__work_stream *stream, void (*wake)(void *context),
                           void *context);

// Whether the work stream's oldest work is older than config.stall_ns; true once for each such
// work.
bool kvq__work_stream_stalls(struct kvq__work_stream *stream);
// A session that other clients have open as well and cannot read, since the work stream has yet to
// pack units of it. NULL if there is none.
const struct kvq__session *kvq__work_stream_withholds(const struct kvq__work_stream *stream);

static inline bool kvq__work_stream_busy(const struct kvq__work_stream *stream)
{
    return stream->ended < stream->given;
}
static inline bool kvq__work_stream_ended(const struct kvq__work_stream *stream, uint64_t number)
{
    return !stream || stream->ended >= number;
}
// The address that the GPU knows a place in the queue's arena by.
static inline kvq_gpu_ptr kvq__work_stream_at(const struct kvq__work_stream *stream,
                                              const void *host)
{
    return stream->device + (uint64_t)((const uint8_t *)host - stream->host);
}

#endif
