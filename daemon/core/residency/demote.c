// SPDX-License-Identifier: Apache-2.0
//
// Demoted sessions belong on a GPU, stand in the host's memory because others needed the room
// there, and go back when a request uses them. See evict.h.
#include "daemon/core/residency/evict.h"
#include "daemon/core/residency/move.h"
#include "daemon/core/session/table.h"

#define AGAIN_NS 50000000ull // a refused session tries again so often even without evictions

// Requests on the session wait for the move, and no longer than for any other.
static int go_home(struct kvq__session *s)
{
    struct kvq__move_spec spec = {.place = kvq__pool_name(s->demoted.home),
                                  .one_shard = true,
                                  .shard = s->shard,
                                  .wait_ms = 1000};
    struct kvq__move_info info;
    char text[KVQ_TEXT_BYTES];
    return kvq__move_start(s, &spec, &info, text);
}

// Extents belong to one namespace each: there may be no block although there are bytes.
static bool was_refused(const struct kvq__session *s)
{
    return s->demoted.refused == s->core->evict.ended + 1 &&
           s->core->now - s->demoted.refused_at < AGAIN_NS;
}

// Whether the session's home has room for so many bytes; if the session `needs` them, prefixes that
// give way count as room. If not, `refused` says what is in the way.
static bool has_place_room(const struct kvq__session *s, uint64_t bytes, bool needs,
                           struct kvq__shortage *refused)
{
    *refused = (struct kvq__shortage){s->ns, s->demoted.home, bytes, KVQ_E_QUOTA, !needs};
    if (kvq__shortage_free(refused) < bytes)
        return false;
    refused->code = KVQ_E_NO_MEMORY;
    return kvq__shortage_free(refused) >= bytes && !was_refused(s);
}

void kvq__demoted_refused(struct kvq__session *s)
{
    s->demoted.refused = s->core->evict.ended + 1;
    s->demoted.refused_at = s->core->now;
}

void kvq__demoted_ask(struct kvq__session *s)
{
    uint64_t bytes = s->demoted.home ? kvq__session_bytes_at(s, s->demoted.home, s->tokens) : 0;
    struct kvq__shortage refused;
    if (s->demoted.home && !kvq__is_offloaded(s) && !kvq__is_fetching(s) && !s->move &&
        has_place_room(s, bytes, false, &refused))
        go_home(s);
}

bool kvq__demoted_asks(struct kvq__queue *q, uint32_t i, const struct kvq__handle *h)
{
    struct kvq__session *s = h->session;
    struct kvq__core *core = s->core;
    if (!s->demoted.home || kvq__is_offloaded(s) || kvq__is_turning_back(s))
        return false;
    kvq__session_used(s); // no other request has it evicted now
    if (s->move || s->park || s->n_loading || kvq__is_fetching(s))
        return true;
    uint64_t bytes = kvq__session_bytes_at(s, s->demoted.home, s->tokens);
    struct kvq__shortage refused;
    if (has_place_room(s, bytes, true, &refused)) {
        int rc = go_home(s);
        bool only_home = h->table && !h->table->memory.host; // the client's table is at home alone
        q->work[i].no_room = rc == KVQ_E_NO_MEMORY || (rc < 0 && only_home) ? rc : 0;
        return rc != KVQ_E_NO_MEMORY && !core->draining;
    }
    if (q->turn.listed) // another session of the request waits for room
        return true;
    if (kvq__admission_wait(q, s, &refused, bytes, bytes))
        return true;
    q->work[i].no_room = refused.code;
    return false;
}

void kvq__demoted_left(struct kvq__session *s, struct kvq__pool *from, bool demotes)
{
    struct kvq__core *core = s->core;
    bool back = s->demoted.home == s->pool;
    if (demotes && !s->demoted.home) {
        s->demoted.home = from;
        core->moving.n_demoted++;
    } else if (!demotes && s->demoted.home) {
        s->demoted.home = NULL;
        core->moving.n_demoted--;
    }
    if (back) {
        core->counts.promoted++;
        core->counts.promoted_bytes += kvq__session_bytes_at(s, s->pool, s->tokens);
    }
    kvq__evict_back(s);
}

void kvq__demoted_lost(struct kvq__session *s)
{
    s->core->moving.n_demoted -= s->demoted.home != NULL;
    s->demoted.home = NULL;
}
