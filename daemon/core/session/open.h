// SPDX-License-Identifier: Apache-2.0
//
// Making sessions other than by a client's opening one: what open.c and fork.c give to the files
// that make them of something else.
#ifndef KVQ_DAEMON_CORE_SESSION_OPEN_H
#define KVQ_DAEMON_CORE_SESSION_OPEN_H

#include "daemon/core/state.h"

// ---- Opening (open.c) ----

// A new session that nobody sees yet.
int kvq__session_build(struct kvq__namespace *ns, const struct kvq__session_spec *spec,
                       struct kvq__session **out, char *text);
// Checks what a spec says of the session as a whole.
int kvq__spec_check(const struct kvq__session_spec *spec, char *text);
// Publishes a new session, in the group of its name. 0, KVQ_E_EXISTS, KVQ_E_NO_MEMORY.
int kvq__session_enter(struct kvq__session *s, char *text);
// That a session of that name can have this shard. 0 or KVQ_E_EXISTS.
int kvq__shards_check(const struct kvq__session *first, const struct kvq__session_spec *spec,
                      char *text);

// ---- Where a session can be cut (fork.c) ----

// The highest count at or below `at` where it can be forked; 0 always can be. And of a fork there
// its floor, and of a layer the count below which tokens are only there packed.
uint64_t kvq__fork_possible(const struct kvq__session *s, uint64_t at);
uint64_t kvq__fork_floor(const struct kvq__session *s, uint64_t at);
bool kvq__fork_base(const struct kvq__session *s, const struct kvq__layer *l, uint64_t at,
                    uint64_t *base);
// Copies the tokens of every head. Any thread.
void kvq__copy_tokens(const struct kvq__layer *l, const struct kvq__copy *c);

#endif
