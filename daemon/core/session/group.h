// SPDX-License-Identifier: Apache-2.0
//
// Groups: sessions of one name that hold the shards of one model. See group.c.
#ifndef KVQ_DAEMON_CORE_SESSION_GROUP_H
#define KVQ_DAEMON_CORE_SESSION_GROUP_H

#include "daemon/core/state.h"

// Joins those of its name; the first makes the group. Sessions without a name, and those of one
// shard, have none. 0 or KVQ_E_NO_MEMORY.
int kvq__group_join(struct kvq__session *session);
void kvq__group_part(struct kvq__session *session);
// The session itself, or another shard of its group; NULL if there is none of that number.
struct kvq__session *kvq__group_member(const struct kvq__session *session, uint32_t shard);
// True if not all shards are there yet, and the first that is not.
bool kvq__group_missing(const struct kvq__session *session, uint32_t *shard);
// What all shards have committed: the least of their counts, 0 if one is missing.
uint64_t kvq__group_tokens(const struct kvq__session *session);
bool kvq__group_is_open(const struct kvq__session *session);    // some shard, by anybody
bool kvq__group_is_unsaved(const struct kvq__session *session); // some shard
// Nobody has had any shard of it for as long as it is kept.
bool kvq__group_outlived(const struct kvq__session *session);
// And it need not be saved first.
bool kvq__group_expired(const struct kvq__session *session);
// Ends the session with all its shards. The log says why.
void kvq__group_end(struct kvq__session *session, const char *why);
// That a new shard was opened like another. 0 or KVQ_E_EXISTS.
int kvq__group_agrees(const struct kvq__session *session, const struct kvq__session *other,
                      char *text);
// Takes all other shards out of their steps.
void kvq__group_undo(const struct kvq__session *session);
// False if ending the session's step would end the group's, and its shards differ in their counts.
bool kvq__group_fits(const struct kvq__session *session);
// Commits the group if all of it is prepared. 0, or KVQ_E_POSITION and the shard that stands or
// ends at another count.
int kvq__group_commit(struct kvq__session *session, const struct kvq__session **other);

// What a request through this handle is to do about its session's being prepared: nothing, wait,
// or fail, since the shard that is waited for could only be ended through the same queue.
enum kvq__prepared { KVQ__PREPARED_NOT, KVQ__PREPARED_WAITS, KVQ__PREPARED_NEVER };
enum kvq__prepared kvq__group_asks(const struct kvq__queue *queue,
                                   const struct kvq__handle *handle);
// The first shard that a prepared session waits for.
uint32_t kvq__group_awaited(const struct kvq__session *session);

// Says that it is there with another number. KVQ_E_EXISTS.
int kvq__shards_refuse(const struct kvq__core *core, const char *name, uint32_t there,
                       uint32_t asked, char *text);

#endif
