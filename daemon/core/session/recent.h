// SPDX-License-Identifier: Apache-2.0
//
// What happens to a published session, for lists and counts: how many there are in a pool, in which
// order they were used, whose last change is not saved (recent.c). It owns core->unsaved.lists,
// core->tokens, and the arenas' lists of sessions. Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_RECENT_H
#define KVQ_DAEMON_CORE_SESSION_RECENT_H

#include "daemon/core/session/session.h"

void kvq__recent_enter(struct kvq__session *session);                    // it is published
void kvq__recent_leave(struct kvq__session *session);                    // it ends
void kvq__session_used(struct kvq__session *session);                    // now
void kvq__session_changed(struct kvq__session *session);                 // and used
void kvq__session_saved(struct kvq__session *session, uint64_t commits); // up to that change
void kvq__session_count(struct kvq__session *session, uint64_t tokens);  // it has so many
void kvq__session_lies_in(struct kvq__session *session,
                          struct kvq__pool *pool); // it is there now
// An arena lists its sessions in the order of their last use; a session that could not be evicted
// goes to the end as well. Every published session with blocks is in the list; others may be.
void kvq__recent_put(struct kvq__session *session);    // to the end of the list
void kvq__recent_forget(struct kvq__session *session); // it has no blocks
// Moves it to the right list of core->unsaved.lists, after it was opened or closed.
void kvq__unsaved_note(struct kvq__session *session);
void kvq__unsaved_outlived(struct kvq__session *session); // the time that it is kept is over
void kvq__unsaved_put_off(struct kvq__session *session);  // saving it has failed

#endif
