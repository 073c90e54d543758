/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/ticket.h: the calls of step.h and edit.h without waiting. For engines that do other work
 * meanwhile.
 *
 * kvq_submit gives a ticket, kvq_wait takes it back with the result.
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

/* Submits; up to 8 tickets per queue may be open (else KVQ_E_CREDITS). Requests of one queue run
 * in the order submitted. `entries` must stay until the ticket is waited for; results go there.
 * For KVQ_DO_STEP_BEGIN the step's number is written to work->step at once. */
KVQ_API KVQ_CHECK int kvq_submit(kvq_queue *queue, enum kvq_operation op, struct kvq_work *work,
                                 struct kvq_entry *entries, uint32_t n, kvq_ticket *ticket);

/* Waits for a ticket. timeout_ns: 0 polls, UINT64_MAX waits as long as the daemon lives. Returns
 * the request's status and closes the ticket; KVQ_E_DEADLINE if it is not done yet (entries are
 * untouched, the ticket stays open); KVQ_E_DISCONNECTED if the daemon died and KVQ_E_CANCELLED
 * after kvq_reattach (the ticket is closed). A request's own deadline that passed is
 * KVQ_E_DEADLINE too, but in the status of its entries as well, and closes the ticket. */
KVQ_API KVQ_CHECK int kvq_wait(kvq_queue *queue, kvq_ticket ticket, uint64_t timeout_ns);

#ifdef __cplusplus
}
#endif

#endif
