// SPDX-License-Identifier: Apache-2.0
//
// Parts of open.c and fork.c for files that make sessions in other ways: of a prefix, of a saved
// session.
#ifndef KVQ_DAEMON_CORE_SESSION_OPEN_H
#define KVQ_DAEMON_CORE_SESSION_OPEN_H

#include "daemon/core/state.h"

// ---- Opening (open.c) ----

// A new session that nobody sees yet.
int kvq__session_build(struct kvq__namespace *ns, const struct kvq__session_spec *spec,
                       struct kvq__session **out, char *text);
// Checks everything in a spec but its layers.
int kvq__spec_check(const struct kvq__session_spec *spec, char *text);
// Publishes a new session, in the group of its name. 0, KVQ_E_EXISTS, KVQ_E_NO_MEMORY.
int kvq__session_enter(struct kvq__session *s, char *text);
// Checks that the session of that name has as many shards as the spec says. 0 or KVQ_E_EXISTS.
int kvq__shards_check(const struct kvq__session *first, const struct kvq__session_spec *spec,
                      char *text);

// ---- Where a session can be cut (fork.c) ----

// fork_possible: the highest count at or below `at` where the session can be forked; 0 always is
// one. fork_floor: the floor of a fork at that count. fork_base: of a layer of that fork, the count
// below which tokens exist in packed form only; false if it cannot be cut there.
uint64_t kvq__fork_possible(const struct kvq__session *s, uint64_t at);
uint64_t kvq__fork_floor(const struct kvq__session *s, uint64_t at);
bool kvq__fork_base(const struct kvq__session *s, const struct kvq__layer *l, uint64_t at,
                    uint64_t *base);
// Copies the tokens of every head. Any thread.
void kvq__copy_tokens(const struct kvq__layer *l, const struct kvq__copy *c);

#endif
