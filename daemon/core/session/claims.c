// SPDX-License-Identifier: Apache-2.0
//
// Claims of requests that wait to the sessions that they name. See claims.h.
#include "daemon/core/session/claims.h"

#include <assert.h>

#include "daemon/core/state.h"

static int by_ticket(struct kvq__claim *a, struct kvq__claim *b)
{
    return a->ticket < b->ticket ? -1 : a->ticket > b->ticket;
}

RB_GENERATE_STATIC(kvq__claims, kvq__claim, entry, by_ticket)

void kvq__claim_make(struct kvq__claim *claim, struct kvq__session *s, uint64_t ticket)
{
    assert(!claim->session && ticket > 0 && !s->dropped);
    claim->ticket = ticket;
    if (RB_INSERT(kvq__claims, &s->evict.claims, claim))
        return;
    claim->session = s;
    s->evict.n_claims++;
}

void kvq__claim_drop(struct kvq__claim *claim)
{
    if (!claim->session)
        return;
    assert(claim->session->evict.n_claims > 0);
    RB_REMOVE(kvq__claims, &claim->session->evict.claims, claim);
    claim->session->evict.n_claims--;
    claim->session = NULL;
}

void kvq__claims_end(struct kvq__session *s)
{
    struct kvq__claim *claim;
    while ((claim = RB_ROOT(&s->evict.claims)))
        kvq__claim_drop(claim);
}

uint64_t kvq__claims_oldest(const struct kvq__session *s)
{
    const struct kvq__claim *claim = RB_ROOT(&s->evict.claims);
    while (claim && RB_LEFT(claim, entry))
        claim = RB_LEFT(claim, entry);
    assert(!claim == (s->evict.n_claims == 0));
    return claim ? claim->ticket : UINT64_MAX;
}

bool kvq__claims_have(const struct kvq__session *s, uint64_t ticket)
{
    const struct kvq__claim *claim = RB_ROOT(&s->evict.claims);
    while (claim && claim->ticket != ticket)
        claim = ticket < claim->ticket ? RB_LEFT(claim, entry) : RB_RIGHT(claim, entry);
    return claim;
}
