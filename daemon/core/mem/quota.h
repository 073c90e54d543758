// SPDX-License-Identifier: Apache-2.0
//
// Hard limits of namespaces: the host's memory, that of GPUs, disk, sessions, and the host's tables
// of these. What a limit
// counts never grows beyond it. One that was lowered below what is used takes nothing away: nothing
// more is had until enough was given up. Part of state.h.
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
// What is used beyond the limit; 0 unless that was lowered.
uint64_t kvq__quota_excess(const struct kvq__namespace *ns, enum kvq__limit which);
// So much more was refused: notes it, tells of it at most once a second for each namespace, says in
// text (NULL is accepted) which limit, what is used, what was asked for and what to do, and returns
// KVQ_E_QUOTA.
int kvq__quota_refuse(struct kvq__namespace *ns, enum kvq__limit which, uint64_t more, char *text);
// Whether there is room for one more session: 0 or KVQ_E_QUOTA, as above.
int kvq__namespace_room(struct kvq__namespace *ns, char *text);
// Zeroed memory for what the host keeps of a namespace's sessions besides blocks: it counts under
// KVQ__TABLE_BYTES, and pages of the index of prefixes go for it. NULL if that or the machine has
// no room; then *rc is KVQ_E_QUOTA, which is noted and told of as above, or KVQ_E_NO_MEMORY.
void *kvq__ns_allocate(struct kvq__namespace *ns, size_t bytes, int *rc);
// The same, but tells nobody of a refusal: where it can be done without.
void *kvq__ns_try(struct kvq__namespace *ns, size_t bytes);
void kvq__ns_deallocate(struct kvq__namespace *ns, void *memory, size_t bytes); // accepts NULL
// Says in text what kvq__ns_allocate has refused by this code, for what ("a session of 3 layers").
// Returns the code.
int kvq__ns_refused(const struct kvq__namespace *ns, int rc, const char *what, char *text);
void kvq__quota_fill_info(const struct kvq__namespace *ns, struct kvq__namespace_info *info);

#endif
