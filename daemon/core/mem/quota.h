// SPDX-License-Identifier: Apache-2.0
//
// Hard limits of namespaces (enum kvq__limit). Nothing grows beyond its limit. A limit that is
// lowered below what is used takes nothing away, but refuses everything until enough was freed.
// Part of state.h.
#ifndef KVQ_DAEMON_CORE_MEM_QUOTA_H
#define KVQ_DAEMON_CORE_MEM_QUOTA_H

#include "daemon/core/core.h"

struct kvq__namespace;

// Of one limit, since the daemon has started.
struct kvq__refusals {
    uint64_t times;
    uint64_t last_at, last_more; // when, and how much was asked for
};

// Whether there may be so much more.
bool kvq__quota_allows(const struct kvq__namespace *ns, enum kvq__limit which, uint64_t more);
// By how much the namespace is above the limit; 0 unless the limit was lowered.
uint64_t kvq__quota_excess(const struct kvq__namespace *ns, enum kvq__limit which);
// Refuses so much more: counts the refusal, sends an event (at most one a second for each
// namespace), explains in text (NULL is accepted) which limit it is, what is used, what was asked
// for and what to do, and returns KVQ_E_QUOTA.
int kvq__quota_refuse(struct kvq__namespace *ns, enum kvq__limit which, uint64_t more, char *text);
// Whether there is room for one more session: 0 or KVQ_E_QUOTA, as above.
int kvq__namespace_room(struct kvq__namespace *ns, char *text);
// Zeroed bookkeeping memory for a namespace's sessions. It counts as KVQ__TABLE_BYTES; at the limit
// ended sessions and pages of the prefix index are freed first. NULL with *rc KVQ_E_QUOTA (refused
// as kvq__quota_refuse does) or KVQ_E_NO_MEMORY.
void *kvq__ns_allocate(struct kvq__namespace *ns, size_t bytes, int *rc);
// The same for memory that the caller can do without: a refusal is not reported.
void *kvq__ns_try(struct kvq__namespace *ns, size_t bytes);
void kvq__ns_deallocate(struct kvq__namespace *ns, void *memory, size_t bytes); // accepts NULL
// Explains in text why kvq__ns_allocate has refused memory with this code; `what` it was for ("a
// session of 3 layers"). Returns the code.
int kvq__ns_refused(const struct kvq__namespace *ns, int rc, const char *what, char *text);
void kvq__quota_fill_info(const struct kvq__namespace *ns, struct kvq__namespace_info *info);

#endif
