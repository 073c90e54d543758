// SPDX-License-Identifier: Apache-2.0
//
// Steps: begun, joined, committed or undone (step.c).
#ifndef KVQ_DAEMON_CORE_REQUEST_STEP_H
#define KVQ_DAEMON_CORE_REQUEST_STEP_H

#include "daemon/core/session/client.h"

struct kvq__step *kvq__step_find(struct kvq__client *client, uint64_t number); // NULL = none
// Undoes the session's step, and the steps of all other shards of its group. A session without a
// step is fine: the other shards' steps are undone all the same.
void kvq__step_leave(struct kvq__session *session);
// Opens queue->own_step, which no client can name; opening an open one does nothing.
void kvq__step_open_own(struct kvq__queue *queue);
void kvq__step_join(struct kvq__step *step, struct kvq__session *session, uint32_t tokens);
void kvq__step_close_if_empty(struct kvq__step *step);
// Undoes the step of this session alone, which is in a step.
void kvq__step_undo(struct kvq__session *session);
// Ends the session's open step. A session alone commits; a shard of a group is prepared, and the
// group's last shard commits all. 0, KVQ_E_NONFINITE, KVQ_E_INCOMPLETE, or KVQ_E_POSITION if
// another shard of the group stands elsewhere: after these the session, and its group, are as
// before the step. `result` gets the status and what goes with it; its value on success is the
// token count that the session has, or will have once the group has committed.
int kvq__step_commit(struct kvq__session *session, struct kvq_result *result);
// Corrects, at the end of the request, the result of a session that kvq__step_commit has prepared:
// a later entry may have undone its step.
void kvq__step_recheck(const struct kvq__session *session, struct kvq_result *result);
// Commits the tokens of a step that was checked.
void kvq__step_publish(struct kvq__session *session);
// Takes the session out of its client's step, which ends with its last session. Appended tokens
// stay.
void kvq__step_part(struct kvq__session *session);
// Ends the step for the session: uncommitted tokens are dropped.
void kvq__step_over(struct kvq__session *session);
// On a GPU: whether the open step's stores, as far as they have ended, met values that are not
// finite.
bool kvq__step_nonfinite(const struct kvq__session *s);
// Whether work of the open step is still under way on a GPU.
static inline bool kvq__step_under_way(const struct kvq__session *s)
{
    return s->pool->gpu && s->entries.tail > 0;
}

#endif
