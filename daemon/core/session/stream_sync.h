// SPDX-License-Identifier: Apache-2.0
//
// How the streams of a client and its lane wait for each other (docs/protocol.md, "In the order of
// a stream"): by the words of a queue's timeline, or by events that both processes have open.
//
// An event is waited for as of its latest record. So the client records `ready` before it sends
// the request, and waits for `done` only once the completion says that it was recorded here. Each
// request uses the next event of its kind, and then the first again.
//
// The daemon makes the events of both kinds, so nothing of a client's is opened here, and they are
// there as long as the lane may wait for them. What it cannot do, unlike with words, is to let a
// lane go on whose client has recorded and never gets there: CUDA has no such call. That lane waits
// until the client's stream goes on or its process ends.
#ifndef KVQ_DAEMON_CORE_SESSION_STREAM_SYNC_H
#define KVQ_DAEMON_CORE_SESSION_STREAM_SYNC_H

#include "daemon/core/session/lane.h"

// Enqueues that the lane waits for the client's stream to have come to the queue's request. A
// result of the driver, as of all below.
int kvq__stream_sync_await(const struct kvq__lane *lane, const struct kvq__queue *queue);
// Enqueues that the client's stream may go on behind the queue's request.
int kvq__stream_sync_tell(const struct kvq__lane *lane, const struct kvq__queue *queue);

#endif
