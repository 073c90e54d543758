// SPDX-License-Identifier: Apache-2.0
//
// How the stream of a client and its work stream wait for each other (docs/protocol.md, "In the
// order of a stream"): by the words of a queue's timeline, or by events that both processes have
// opened.
//
// An event is waited for as of its latest record. So the client records `ready` before it sends
// the request, and waits for `done` only once the completion says that it was recorded here. Each
// request uses the next event of its kind, and then the first again.
//
// The daemon makes the events of both kinds: it opens nothing of a client's, and the events exist
// as long as the work stream may wait for them. With events, unlike with words, the daemon cannot
// release a work stream whose client has recorded an event that its stream never reaches: CUDA has
// no call for that. Such a work stream waits until the client's stream goes on or its process ends.
#ifndef KVQ_DAEMON_CORE_SESSION_STREAM_SYNC_H
#define KVQ_DAEMON_CORE_SESSION_STREAM_SYNC_H

#include "daemon/core/session/work_stream.h"

// Enqueues on the work stream a wait until the client's stream has reached the queue's request.
// Returns a result of the driver, as all below.
int kvq__stream_sync_await(const struct kvq__work_stream *stream, const struct kvq__queue *queue);
// Enqueues the signal that lets the client's stream go on after the queue's request.
int kvq__stream_sync_tell(const struct kvq__work_stream *stream, const struct kvq__queue *queue);

#endif
