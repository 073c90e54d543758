// SPDX-License-Identifier: Apache-2.0
//
// Who changed what by the control socket: a line of the log, event=audit, for each command that
// may change something, done or refused, whatever log_level is. Loop's thread.
#ifndef KVQ_DAEMON_CONTROL_AUDIT_H
#define KVQ_DAEMON_CONTROL_AUDIT_H

#include "daemon/control/roles.h"
#include "daemon/log/log.h"
#include "proto/wire.h"

// Tells of a command that has been answered with that status. Those that only read are not told of.
// Every line is written of somebody whose role does for it; others share a budget.
void kvq__audit(struct kvq_log_budget *budget, const struct kvq__asker *asker,
                const Kvq__Request *request, int status);
// Tells of a question at level debug, event=control_asked: who asks, and what was refused.
void kvq__audit_question(struct kvq_log_budget *budget, const struct kvq__asker *asker,
                         const Kvq__Request *request, int status);

#endif
