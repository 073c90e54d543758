// SPDX-License-Identifier: Apache-2.0
//
// Groups: sessions of one name that hold the shards of one model. See group.c.
#ifndef KVQ_DAEMON_CORE_SESSION_GROUP_H
#define KVQ_DAEMON_CORE_SESSION_GROUP_H

#include "daemon/core/state.h"

// Puts the session into the group of its name; the first shard makes the group. Sessions without a
// name or with one shard only have no group. 0, or as kvq__ns_allocate.
int kvq__group_join(struct kvq__session *session);
void kvq__group_part(struct kvq__session *session);
// The session itself, or another shard of its group; NULL if there is none of that number.
struct kvq__session *kvq__group_member(const struct kvq__session *session, uint32_t shard);
// True if a shard of the group is missing; *shard is the first that is.
bool kvq__group_missing(const struct kvq__session *session, uint32_t *shard);
// The tokens that all shards have committed: the least of their counts, 0 if one is missing.
uint64_t kvq__group_tokens(const struct kvq__session *session);
bool kvq__group_is_open(const struct kvq__session *session);    // somebody has a shard open
bool kvq__group_is_unsaved(const struct kvq__session *session); // some shard is not saved
// Nobody has used any of its shards for as long as they are kept.
bool kvq__group_outlived(const struct kvq__session *session);
// The same, and no shard waits to be saved before it ends.
bool kvq__group_expired(const struct kvq__session *session);
// Ends the session with all its shards. The event says why.
void kvq__group_end(struct kvq__session *session, const char *why);
// Checks that a new shard was opened with the same properties as another. 0 or KVQ_E_EXISTS.
int kvq__group_agrees(const struct kvq__session *session, const struct kvq__session *other,
                      char *text);
// Takes all other shards out of their steps.
void kvq__group_undo(const struct kvq__session *session);
// False if this session is the last that the group's step waits for, and the shards would not agree
// in their counts.
bool kvq__group_fits(const struct kvq__session *session);
// Commits the step of the group if all shards are prepared. 0, or KVQ_E_POSITION with *other, a
// shard that began or ended its step at another count.
int kvq__group_commit(struct kvq__session *session, const struct kvq__session **other);

// What a request does whose session is prepared: NOT: it is not, the request goes on. WAITS: the
// request waits for the other shards. NEVER: it fails, since only the same queue could end the
// shard that it would wait for.
enum kvq__prepared { KVQ__PREPARED_NOT, KVQ__PREPARED_WAITS, KVQ__PREPARED_NEVER };
enum kvq__prepared kvq__group_asks(const struct kvq__queue *queue,
                                   const struct kvq__handle *handle);
// The first shard that a prepared session waits for.
uint32_t kvq__group_awaited(const struct kvq__session *session);

// Explains that the session exists with another number of shards. Returns KVQ_E_EXISTS.
int kvq__shards_refuse(const struct kvq__core *core, const char *name, uint32_t there,
                       uint32_t asked, char *text);

#endif
