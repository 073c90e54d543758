/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/ticket.h: the calls of step.h and edit.h without waiting. For engines that do other work
 * while the daemon works on a request.
 *
 * kvq_submit opens a ticket, kvq_wait waits for the result and closes the ticket.
 */
#ifndef KVQ_PUBLIC_TICKET_H
#define KVQ_PUBLIC_TICKET_H

#include "step.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kvq_operation {
    KVQ_DO_NOP = 0,
    KVQ_DO_STEP_BEGIN = 1,
    KVQ_DO_APPEND = 2,
    KVQ_DO_ATTEND = 3,
    KVQ_DO_APPEND_ATTEND = 4,
    KVQ_DO_STEP_END = 5,
    KVQ_DO_STEP_ABORT = 6,
    KVQ_DO_TRUNCATE = 7, /* entry.list_token: tokens to drop */
    KVQ_DO_FORK = 8,
    KVQ_DO_ACCEPT = 9, /* the list in work->pages.list */
    KVQ_DO_READ = 10,
    KVQ_DO_STEP = 11 /* by kvq_step alone: kvq_submit refuses it */
};

typedef uint64_t kvq_ticket;

/* Submits a request. Up to 8 tickets per queue may be open (else KVQ_E_CREDITS). The daemon runs
 * the requests of one queue in the order submitted. `entries` must stay until kvq_wait has closed
 * the ticket, which writes results there. For KVQ_DO_STEP_BEGIN the call writes the step's number
 * to work->step at once. */
KVQ_API KVQ_CHECK int kvq_submit(kvq_queue *queue, enum kvq_operation op, struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n, kvq_ticket *ticket);

/* Waits for a ticket. timeout_ns: 0 polls, UINT64_MAX waits as long as the daemon lives. Returns
 * the request's status and closes the ticket. KVQ_E_DEADLINE: the request is not done yet (entries
 * are untouched, the ticket stays open). KVQ_E_DISCONNECTED (the daemon died), KVQ_E_SYSTEM (the
 * system cannot wait; kvq_reattach connects again) and KVQ_E_CANCELLED (kvq_reattach was called)
 * close the ticket. If the request's own deadline passed, the code is KVQ_E_DEADLINE, too, but so
 * is the status of each entry, and the ticket is closed. */
KVQ_API KVQ_CHECK int kvq_wait(kvq_queue *queue, kvq_ticket ticket, uint64_t timeout_ns);

#ifdef __cplusplus
}
#endif

#endif
