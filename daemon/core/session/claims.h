// SPDX-License-Identifier: Apache-2.0
//
// Claims: which requests that wait for room name a session (claims.c). A request has no session
// evicted that one before it claims (evict.h). A claim is made when a request begins to wait and
// dropped when it waits no more, so that a look at a session finds its oldest claim as it stands,
// however many requests wait and however many sessions they name. Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_CLAIMS_H
#define KVQ_DAEMON_CORE_SESSION_CLAIMS_H

#include <stdbool.h>
#include <stdint.h>
#include <uv/tree.h>

struct kvq__session;

// Of one request to one session.
struct kvq__claim {
    RB_ENTRY(kvq__claim) entry;   // of the session's claims, by ticket
    struct kvq__session *session; // NULL: there is none
    uint64_t ticket;              // the request's
};
RB_HEAD(kvq__claims, kvq__claim);

// Does nothing if the request claims the session already.
void kvq__claim_make(struct kvq__claim *claim, struct kvq__session *session, uint64_t ticket);
void kvq__claim_drop(struct kvq__claim *claim); // accepts none
// The session ends, and with it all claims to it.
void kvq__claims_end(struct kvq__session *session);
// The oldest ticket that claims the session; UINT64_MAX: none does.
uint64_t kvq__claims_oldest(const struct kvq__session *session);
// Whether the request with this ticket claims it.
bool kvq__claims_have(const struct kvq__session *session, uint64_t ticket);

#endif
