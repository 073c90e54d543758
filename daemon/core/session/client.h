// SPDX-License-Identifier: Apache-2.0
//
// Clients with their handles, buffers and steps; see client.c and step.c. Part of state.h.
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

// Some of a client's buffers, by their places.
struct kvq__buffer_set {
    uint64_t bits[KVQ_MAX_BUFFERS / 64];
};

struct kvq__step {
    uint64_t number; // the client's; 0 = free
    struct kvq__client *client;
    LIST_HEAD(, kvq__session) sessions;
};

struct kvq__lane;

struct kvq__client {
    TAILQ_ENTRY(kvq__client) link;
    struct kvq__core *core;
    struct kvq__peer peer;
    char name[KVQ_NAME_BYTES];
    uint64_t id, requests, connected_at;
    bool gone;
    uint32_t n_queues, n_buffers, n_handles, n_steps;
    uint64_t buffer_bytes;
    struct kvq__handle *handles[KVQ__HANDLE_CHUNKS];
    struct kvq__handle_list free_handles;
    LIST_HEAD(, kvq__table) tables;
    struct kvq__lane *lanes[KVQ_MAX_GPUS]; // in the order of the core's GPUs; NULL = none yet
    struct kvq__buffer buffers[KVQ_MAX_BUFFERS];
    struct kvq__step steps[KVQ_MAX_STEPS];
};

// 0, KVQ_E_STALE or KVQ_E_TAKEN.
int kvq__handle_get(struct kvq__client *client, uint64_t value, struct kvq__handle **handle);
// The same, and a text; also how its session was lost.
int kvq__handle_attached(struct kvq__client *client, uint64_t value, struct kvq__handle **handle,
                         char *text);
// KVQ_E_LIMIT or KVQ_E_NO_MEMORY. The handle has no session yet.
int kvq__handle_new(struct kvq__client *client, struct kvq__handle **handle);
void kvq__handle_free(struct kvq__handle *handle);
// Ties a new handle to a session, as its writer or as a reader.
void kvq__handle_attach(struct kvq__handle *handle, struct kvq__session *session, bool read_only);
// Takes the handle off its session (with its part of an open step); the handle stays.
void kvq__handle_detach(struct kvq__handle *handle);
// Detaches and frees it; the session goes by its on_detach if this was the last handle.
void kvq__handle_close(struct kvq__handle *handle);
static inline uint64_t kvq__handle_value(const struct kvq__handle *handle)
{
    return (uint64_t)handle->generation << 32 | handle->index;
}
struct kvq__buffer *kvq__buffer_get(struct kvq__client *client, uint32_t id); // NULL = none
// Uses a buffer until the set is released; a buffer that is in it already only once. NULL is fine.
void kvq__buffer_use(struct kvq__client *client, struct kvq__buffer *buffer,
                     struct kvq__buffer_set *set);
// Lets go of all of them, and empties the set.
void kvq__buffers_unuse(struct kvq__client *client, struct kvq__buffer_set *set);

// ---- Steps (step.c) ----

struct kvq__step *kvq__step_find(struct kvq__client *client, uint64_t number); // NULL = none
// It is in a step, or has ended it and waits for the other shards of its group.
static inline bool kvq__in_step(const struct kvq__session *s)
{
    return s->step || s->prepared || s->settling;
}
// Takes a session out of its step, as it was before, and all shards of its group out of theirs.
// Accepts sessions without a step: their groups' steps end all the same.
void kvq__step_leave(struct kvq__session *session);
// A step of a queue's own, which no client can name; opening an open one does nothing.
void kvq__step_open(struct kvq__step *step, struct kvq__client *client);
void kvq__step_join(struct kvq__step *step, struct kvq__session *session, uint32_t tokens,
                    uint64_t queue);
void kvq__step_close_if_empty(struct kvq__step *step);
// This session alone, which is in a step.
void kvq__step_undo(struct kvq__session *session);
// Ends the session's open step. Alone it commits; a shard of a group is prepared, and the last one
// commits all of them. 0, KVQ_E_NONFINITE, KVQ_E_INCOMPLETE, or KVQ_E_POSITION if another shard of
// the group stands elsewhere: after these the session, and its group, are as before the step.
// `result` gets the status and what goes with it; its value on success is the token count that the
// session has, or will have once the group has committed.
int kvq__step_commit(struct kvq__session *session, struct kvq_result *result);
// What became of a session that kvq__step_commit prepared, once the whole request has been looked
// at: another of its entries may have undone it.
void kvq__step_recheck(const struct kvq__session *session, struct kvq_result *result);
// Makes the tokens of a step that was checked the session's.
void kvq__step_publish(struct kvq__session *session);

#endif
