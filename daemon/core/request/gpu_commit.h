// SPDX-License-Identifier: Apache-2.0
//
// STEPs whose work is under way on a GPU. The host does not wait for them: a request on a stream is
// answered when its work is enqueued, and the session is `committing` until the work stream has
// ended that work. Then the step commits, or the session is as it was before.
//
// One word decides which: the number of values that were not finite (struct kvq_gpu_store_counts).
// It is final when the step's stores have run. The GPU packs and publishes only if it is 0, and the
// core reads it when all work has ended. To cancel a step, the core has its stores count one more
// such value; if they have run already the step commits nevertheless, since its tokens are
// complete. So the GPU and the core always agree about the step.
//
// Until then, requests wait that would change the session or that name another count than the
// committed one. Readers at the committed count go on.
#ifndef KVQ_DAEMON_CORE_REQUEST_GPU_COMMIT_H
#define KVQ_DAEMON_CORE_REQUEST_GPU_COMMIT_H

#include "daemon/core/state.h"

// The session's first stores are enqueued: the session leaves its step, and the GPU ends it.
void kvq__gpu_commit_begin(struct kvq__session *session);
// Cancels the STEP if its stores have not run yet, since another writer has the session or its
// client is gone. A shard's STEP is always cancelled.
void kvq__gpu_commit_cancel(struct kvq__session *session);
// All of the STEP's work has ended: commits or undoes it. `table`: the page table that the STEP has
// published, or NULL. `result` gets status and value; without it the writer's next request says
// that values were not finite.
void kvq__gpu_commit(struct kvq__session *session, struct kvq__table *table,
                     struct kvq_result *result);
// All work of the queue's request has ended: ends its STEPs, and fills in their results.
void kvq__gpu_commit_all(struct kvq__queue *queue);
// Whether entry i of a request, on this handle, has to wait for a STEP to commit.
bool kvq__gpu_commit_asks(const struct kvq__queue *queue, uint32_t i,
                          const struct kvq__handle *handle);

#endif
