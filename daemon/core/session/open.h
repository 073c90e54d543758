// SPDX-License-Identifier: Apache-2.0
//
// Parts of open.c for files that make sessions in other ways: of a prefix, of a saved session.
#ifndef KVQ_DAEMON_CORE_SESSION_OPEN_H
#define KVQ_DAEMON_CORE_SESSION_OPEN_H

#include "daemon/core/state.h"

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

// The pool of a place. NULL with a text if there is none of that name.
struct kvq__pool *kvq__place_find(struct kvq__core *core, const char *place, char *text);

#endif
