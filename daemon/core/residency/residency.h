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
// own: a session takes part in one of them at a time. While it is LOADING both can be asked for,
// and wait; while it is FETCHING a parking can. What is OFFLOADED or FETCHING has no move.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_RESIDENCY_H
#define KVQ_DAEMON_CORE_RESIDENCY_RESIDENCY_H

#include "daemon/core/state.h"

// Changes it, with the core's count of offloaded sessions and its list of those that are wanted.
// Asserts that the diagram above has that way.
void kvq__residency_set(struct kvq__session *session, enum kvq__residency to);

// The session, which has taken the blocks of the node and of those before it, follows whatever is
// yet to read them. 0 or KVQ_E_NO_MEMORY.
int kvq__follow(struct kvq__session *session, const struct kvq__node *last);
// The session ends, or is never to be seen.
void kvq__follow_leave(struct kvq__session *session);
// The session is about to end: what reads its blocks may stop.
void kvq__restore_drop(struct kvq__session *session);
// Ends restores that turn back; true if any has ended.
bool kvq__restores_poll(struct kvq__core *core);

// Ways to and from GPUs, which nobody uses any more.
void kvq__stagings_close(struct kvq__core *core);

#endif
