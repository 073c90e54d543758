// SPDX-License-Identifier: Apache-2.0
//
// Clients with their handles, buffers and steps; see client.c. Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_CLIENT_H
#define KVQ_DAEMON_CORE_SESSION_CLIENT_H

#include "daemon/core/session/session.h"

// ---- Clients (client.c) ----

enum {
    KVQ__HANDLE_CHUNK = 64, // handles allocated at a time
    KVQ__HANDLE_CHUNKS = KVQ_MAX_OPEN / KVQ__HANDLE_CHUNK,
};

struct kvq__buffer {
    uint32_t id; // 0 = free
    uint32_t generation;
    struct kvq__buffer_memory memory;
    uint32_t uses; // by requests under way
    bool removed;
};

// A set of a client's buffers: a bit for each place in client->buffers.
struct kvq__buffer_set {
    uint64_t bits[KVQ_MAX_BUFFERS / 64];
};

// Begun by a request of a queue, and open until its last session leaves it, or the queue closes.
// Meanwhile requests of any queue of the client may name it.
struct kvq__step {
    uint64_t number; // the client's; 0 = free
    struct kvq__queue *queue;
    LIST_HEAD(, kvq__session) sessions;
};

struct kvq__work_stream;

struct kvq__client {
    TAILQ_ENTRY(kvq__client) link;
    struct kvq__core *core;
    struct kvq__peer peer;
    char name[KVQ_NAME_BYTES];
    uint64_t id, requests, connected_at;
    uint64_t refused_event_at; // when the last event told of a refused request of its; 0: never
    uint32_t refused_untold;   // refused requests since
    bool faulty;               // it is cut off for what it did: kvq__client_distrust
    bool gone;                 // its handles are closed, and it gets no others
    bool detached;             // it is freed with the last of its queues
    uint32_t n_queues, n_buffers, n_handles, n_steps;
    uint32_t first_generation; // of each of its handles
    uint64_t buffer_bytes;
    struct kvq__handle *handles[KVQ__HANDLE_CHUNKS];
    struct kvq__handle_list free_handles;
    LIST_HEAD(, kvq__table) tables;
    struct kvq__export_record *told; // of extents, the last time; NULL: that was taken back
    struct kvq__work_stream *streams[KVQ_MAX_GPUS]; // by GPU; NULL = none yet
    struct kvq__buffer buffers[KVQ_MAX_BUFFERS];
    struct kvq__step steps[KVQ_MAX_STEPS];
};

// 0, KVQ_E_STALE or KVQ_E_TAKEN.
int kvq__handle_get(struct kvq__client *client, uint64_t value, struct kvq__handle **handle);
// KVQ_E_LIMIT or KVQ_E_NO_MEMORY. The handle has no session yet.
int kvq__handle_new(struct kvq__client *client, struct kvq__handle **handle);
void kvq__handle_free(struct kvq__handle *handle);
// Ties a new handle to a session, as its writer or as a reader.
void kvq__handle_attach(struct kvq__handle *handle, struct kvq__session *session, bool read_only);
// Detaches the handle from its session, whose open step is undone if it was the writer's. The
// handle stays.
void kvq__handle_detach(struct kvq__handle *handle);
// Detaches and frees the handle. After the last one on_detach decides about the session.
void kvq__handle_close(struct kvq__handle *handle);
static inline uint64_t kvq__handle_value(const struct kvq__handle *handle)
{
    return (uint64_t)handle->generation << 32 | handle->index;
}
struct kvq__buffer *kvq__buffer_get(struct kvq__client *client, uint32_t id); // NULL = none
// Counts a use of the buffer, unless the set has it already. NULL is fine.
void kvq__buffer_use(struct kvq__client *client, struct kvq__buffer *buffer,
                     struct kvq__buffer_set *set);
// Ends the uses of all buffers in the set, and empties it.
void kvq__buffers_unuse(struct kvq__client *client, struct kvq__buffer_set *set);

// The session is in a step, has ended it and waits for the other shards, or waits for a GPU to
// commit.
static inline bool kvq__in_step(const struct kvq__session *s)
{
    return s->step || s->in_step.prepared || s->in_step.committing;
}

// ---- Arenas: memory that a request's work is described in ----

// 64-byte aligned memory until the wave ends; NULL if the arena is used up.
void *kvq__arena_take(struct kvq__queue *q, size_t bytes);

#endif
