// SPDX-License-Identifier: Apache-2.0
//
// See residency.h.
#include "daemon/core/residency/residency.h"

#include <assert.h>

#include "daemon/core/residency/park.h"

static bool is_read_back(enum kvq__residency residency)
{
    return residency == KVQ__FETCH_TAKEN || residency == KVQ__FETCHING;
}

// Counts sessions being read back; where one fewer is, another fetch may begin.
static void count_reading(struct kvq__session *s, enum kvq__residency from, enum kvq__residency to)
{
    struct kvq__core *core = s->core;
    s->ns->n_reading += is_read_back(to);
    s->ns->n_reading -= is_read_back(from);
    core->disk.n_reading += is_read_back(to);
    core->disk.n_reading -= is_read_back(from);
    if (is_read_back(from) && !is_read_back(to) && core->disk.n_wanted)
        kvq__park_want(core);
}

void kvq__residency_set(struct kvq__session *s, enum kvq__residency to)
{
    enum { END = 1 << KVQ__ENDED };
    static const uint8_t ways[KVQ__RESIDENCIES] = {
        [KVQ__RESIDENT] = END | 1 << KVQ__LOADING | 1 << KVQ__OFFLOADED,
        [KVQ__LOADING] = END | 1 << KVQ__RESIDENT,
        [KVQ__OFFLOADED] = END | 1 << KVQ__FETCH_WANTED,
        [KVQ__FETCH_WANTED] = END | 1 << KVQ__FETCH_TAKEN,
        [KVQ__FETCH_TAKEN] = END | 1 << KVQ__FETCHING | 1 << KVQ__OFFLOADED,
        [KVQ__FETCHING] = END | 1 << KVQ__RESIDENT | 1 << KVQ__TURNING_BACK,
        [KVQ__TURNING_BACK] = END | 1 << KVQ__OFFLOADED,
        [KVQ__ENDED] = 0,
    };
    struct kvq__core *core = s->core;
    enum kvq__residency from = s->residency;
    assert(to < KVQ__RESIDENCIES && ways[from] & 1u << to);
    assert(!s->move || to == KVQ__RESIDENT || to == KVQ__LOADING || to == KVQ__ENDED);
    if (from == KVQ__FETCH_WANTED) {
        TAILQ_REMOVE(&s->ns->fetches, s, fetch.link);
        core->disk.n_wanted--;
    }
    core->disk.n_offloaded -= kvq__is_offloaded(s);
    s->residency = to;
    core->disk.n_offloaded += kvq__is_offloaded(s);
    if (to == KVQ__FETCH_WANTED) {
        s->fetch.at = core->now;
        TAILQ_INSERT_TAIL(&s->ns->fetches, s, fetch.link);
        core->disk.n_wanted++;
    }
    count_reading(s, from, to);
}
