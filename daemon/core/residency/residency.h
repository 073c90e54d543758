// SPDX-License-Identifier: Apache-2.0
//
// Where a session's blocks are, and what its beginning and end are to residency.
//
//   published --> RESIDENT <------- all layers are there ------- LOADING, FETCHING
//                  |    \--- it is restored from a store ------> LOADING
//                  | its ticket lets its blocks go (park.c)
//                  v
//              OFFLOADED --- somebody asks ---> FETCH_WANTED --- a job ---> FETCH_TAKEN
//                  ^                                                            |
//                  |<------------------- it could not be read ------------------|
//                  |<-- TURNING_BACK <-- a layer could not --- FETCHING <-------' layers come
//
//   any of them --> ENDED
//
// Moves between places in memory (move.h) and tickets for parking (park.h) have phases of their
// own: a session takes part in one of them at a time. For a LOADING session both can be asked for,
// and wait; for a FETCHING session only parking. An OFFLOADED or FETCHING session has no move.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_RESIDENCY_H
#define KVQ_DAEMON_CORE_RESIDENCY_RESIDENCY_H

#include "daemon/core/state.h"

// Changes the session's residency, the core's count of offloaded sessions and the list of wanted
// ones. Asserts that the diagram above has that way.
void kvq__residency_set(struct kvq__session *session, enum kvq__residency to);

// The session has taken the blocks of the node and of those before it, and follows the restores
// that are yet to read them. 0 or KVQ_E_NO_MEMORY.
int kvq__follow(struct kvq__session *session, const struct kvq__node *last);
// The session ends, or no client will ever see it.
void kvq__follow_leave(struct kvq__session *session);
// The session is about to end: work that reads its blocks may stop.
void kvq__restore_drop(struct kvq__session *session);
// Ends restores that turn back; true if any has ended.
bool kvq__restores_poll(struct kvq__core *core);

// Ways to and from GPUs, which nobody uses any more.
void kvq__stagings_close(struct kvq__core *core);

#endif
