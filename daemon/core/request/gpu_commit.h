// SPDX-License-Identifier: Apache-2.0
//
// STEPs whose work is under way on a GPU. Nobody on the host waits for it: the request of a stream
// is answered when its work is enqueued, and the session `settles` until the lane has come past it.
// Then its step commits, or it is as it was before.
//
// Which of the two, one word says that nobody writes any more once the step's stores have run: how
// many of its values were not finite (struct kvq_gpu_store_counts). The GPU packs and publishes
// only if it is 0, and here it is looked at when all has ended. A step is cancelled by having its
// stores count one more such value; where they have run already, the step commits all the same, for
// its tokens are the client's and complete. So what the GPU has done and what the session has
// become are always the same.
//
// Until it has settled, requests that would change the session or name another count than the
// committed one wait; readers at the committed count do not.
#ifndef KVQ_DAEMON_CORE_REQUEST_GPU_COMMIT_H
#define KVQ_DAEMON_CORE_REQUEST_GPU_COMMIT_H

#include "daemon/core/state.h"

// The session's first stores are enqueued: it leaves its step, whose end is the GPU's now.
void kvq__gpu_commit_begin(struct kvq__session *session);
// It is not to commit, if that can still be: another writer has it, or its client is gone. Of a
// shard that is sure.
void kvq__gpu_commit_cancel(struct kvq__session *session);
// All of it has ended on the GPU. `table`: that was published, or NULL. With `result` its status
// and value are told there; without, the session's writer is told by its next request what it could
// not know.
void kvq__gpu_commit(struct kvq__session *session, struct kvq__table *table,
                     struct kvq_result *result);
// As parts of it (step.c): out of its client's step, and its end, whatever became of its tokens.
void kvq__step_part(struct kvq__session *session);
void kvq__step_over(struct kvq__session *session);
// Whether entry i of a request, which has this handle, is to wait.
bool kvq__gpu_commit_asks(const struct kvq__queue *queue, uint32_t i,
                          const struct kvq__handle *handle);

#endif
