// SPDX-License-Identifier: Apache-2.0
//
// Finding sessions that are published (lookup.c). It owns the tables by id and by name
// (core->lookup) and the namespaces' trees of ids. Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_LOOKUP_H
#define KVQ_DAEMON_CORE_SESSION_LOOKUP_H

#include "daemon/core/session/session.h"

int kvq__lookup_open(struct kvq__core *core); // 0 or KVQ_E_NO_MEMORY
void kvq__lookup_close(struct kvq__core *core);
void kvq__lookup_add(struct kvq__session *session);
void kvq__lookup_remove(struct kvq__session *session);
struct kvq__session *kvq__session_by_id(struct kvq__core *core, uint64_t id); // NULL = none
// The first of the namespace with an id above `id`; NULL = none.
struct kvq__session *kvq__session_after(struct kvq__namespace *ns, uint64_t id);
// Some shard of the session of that name; NULL = none.
struct kvq__session *kvq__session_named(struct kvq__namespace *ns, const char *name);

#endif
