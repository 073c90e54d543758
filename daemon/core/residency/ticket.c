// SPDX-License-Identifier: Apache-2.0
//
// See ticket.h.
#include "daemon/core/residency/ticket.h"

#include <assert.h>

enum {
    MOST = 64, // tickets of moves, and of parks and fetches, at a time
    // So many more tickets for evictions, which go to the host one at a time.
    DEMOTIONS = 1 + KVQ_MAX_GPUS,
    EVICTIONS = (1 + KVQ_MAX_GPUS) * KVQ__EVICT_AT_ONCE,
};

#define KEEP_NS 60000000000ull // how long a ticket that is over is kept

void kvq__ticket_enter(struct kvq__ticket *t, enum kvq__phase to)
{
    enum { OVER = 1 << KVQ__OVER };
    static const uint16_t ways[KVQ__PHASES] = {
        [KVQ__QUEUED] = OVER | 1 << KVQ__WAITING | 1 << KVQ__WRITING | 1 << KVQ__READING,
        [KVQ__WAITING] = OVER | 1 << KVQ__RESERVING,
        [KVQ__RESERVING] = 1 << KVQ__COPYING | 1 << KVQ__DRAINING,
        [KVQ__COPYING] = 1 << KVQ__RELEASING | 1 << KVQ__DRAINING,
        [KVQ__DRAINING] = 1 << KVQ__RELEASING,
        [KVQ__WRITING] = OVER | 1 << KVQ__LEAVING,
        [KVQ__LEAVING] = OVER | 1 << KVQ__RELEASING,
        [KVQ__READING] = OVER,
        [KVQ__RELEASING] = OVER,
    };
    static const uint8_t kinds[KVQ__PHASES] = {
        [KVQ__WAITING] = 1 << KVQ__TICKET_MOVE,
        [KVQ__RESERVING] = 1 << KVQ__TICKET_MOVE,
        [KVQ__COPYING] = 1 << KVQ__TICKET_MOVE,
        [KVQ__DRAINING] = 1 << KVQ__TICKET_MOVE,
        [KVQ__WRITING] = 1 << KVQ__TICKET_PARK,
        [KVQ__LEAVING] = 1 << KVQ__TICKET_PARK,
        [KVQ__READING] = 1 << KVQ__TICKET_FETCH,
        [KVQ__RELEASING] = 1 << KVQ__TICKET_MOVE | 1 << KVQ__TICKET_PARK,
        [KVQ__OVER] = 0xff,
    };
    assert(to < KVQ__PHASES && ways[t->phase] & 1u << to && kinds[to] & 1u << t->kind);
    assert(to != KVQ__OVER || t->finished);
    t->phase = to;
}

struct kvq__ticket *kvq__ticket_after(const struct kvq__core *core,
                                      const struct kvq__ticket *ticket, uint32_t kinds)
{
    struct kvq__ticket *t = ticket ? TAILQ_NEXT(ticket, link) : TAILQ_FIRST(&core->tickets.list);
    while (t && !(kinds & 1u << t->kind))
        t = TAILQ_NEXT(t, link);
    return t;
}

// Moves have a limit of their own; parks and fetches share one.
int kvq__ticket_room(struct kvq__core *core, enum kvq__ticket_kind kind, bool evicts, char *text)
{
    const bool moves = kind == KVQ__TICKET_MOVE;
    const uint32_t *n = core->tickets.n;
    uint32_t all = moves ? n[KVQ__TICKET_MOVE] : n[KVQ__TICKET_PARK] + n[KVQ__TICKET_FETCH];
    uint32_t kinds = moves ? KVQ__MOVE_TICKETS : KVQ__PARK_TICKETS;
    struct kvq__ticket *t = kvq__ticket_after(core, NULL, kinds);
    if (all < MOST)
        return 0;
    while (t && t->phase != KVQ__OVER)
        t = kvq__ticket_after(core, t, kinds);
    if (!t && evicts && all < MOST + (moves ? DEMOTIONS : EVICTIONS))
        return 0;
    if (!t)
        return kvq__fail(
            text, KVQ_E_LIMIT,
            moves ? "%u moves are under way; wait until some have ended"
                  : "%u sessions are on their way to disk or back; wait until some are there",
            all);
    kvq__ticket_free(t);
    return 0;
}

void kvq__ticket_begin(struct kvq__ticket *t)
{
    struct kvq__core *core = t->core;
    assert(t->id == 0 && t->phase == KVQ__QUEUED && t->ns && t->place && t->name[0]);
    assert(t->size >= sizeof *t);
    t->id = ++core->tickets.last;
    TAILQ_INSERT_TAIL(&core->tickets.list, t, link);
    core->tickets.n[t->kind]++;
}

void kvq__ticket_finish(struct kvq__ticket *t, int status)
{
    assert(!t->finished && status <= 0);
    t->finished = true;
    t->finished_at = t->core->now;
    t->status = status;
}

void kvq__ticket_fill_info(const struct kvq__ticket *t, struct kvq__move_info *info)
{
    static const char *const phases[KVQ__PHASES] = {
        [KVQ__QUEUED] = "queued",   [KVQ__WAITING] = "waiting", [KVQ__RESERVING] = "reserving",
        [KVQ__COPYING] = "copying", [KVQ__DRAINING] = "failed", [KVQ__WRITING] = "writing",
        [KVQ__LEAVING] = "leaving", [KVQ__READING] = "reading", [KVQ__RELEASING] = "releasing",
        [KVQ__OVER] = "done",
    };
    const char *phase = t->finished ? "done" : phases[t->phase];
    *info = (struct kvq__move_info){.id = t->id,
                                    .phase = t->status ? "failed" : phase,
                                    .place = t->place,
                                    .name = t->name,
                                    .text = t->text,
                                    .finished = t->finished,
                                    .status = t->status,
                                    .bytes = t->bytes,
                                    .moved_bytes = t->moved_bytes,
                                    .shared_bytes = t->shared_bytes};
}

const struct kvq__ticket *kvq__ticket_find(const struct kvq__core *core, uint64_t id)
{
    const struct kvq__ticket *t;
    TAILQ_FOREACH (t, &core->tickets.list, link)
        if (t->id == id)
            return t;
    return NULL;
}

int kvq__move_info(struct kvq__core *core, const struct kvq__peer *peer, uint64_t id,
                   struct kvq__move_info *info, char *text)
{
    const struct kvq__ticket *t = kvq__ticket_find(core, id);
    if (!t || !kvq__namespace_allows(t->ns, peer))
        return kvq__fail(text, KVQ_E_NO_SESSION,
                         "no move %llu that user %u may see; what became of one is told for a "
                         "minute",
                         (unsigned long long)id, peer->uid);
    kvq__ticket_fill_info(t, info);
    return 0;
}

void kvq__tickets_tick(struct kvq__core *core)
{
    struct kvq__ticket *t, *after;
    for (t = TAILQ_FIRST(&core->tickets.list); t; t = after) {
        after = TAILQ_NEXT(t, link);
        if (t->phase == KVQ__OVER && core->now - t->finished_at >= KEEP_NS)
            kvq__ticket_free(t);
    }
}

void kvq__ticket_free(struct kvq__ticket *t)
{
    struct kvq__core *core = t->core;
    assert(t->phase == KVQ__OVER && core->tickets.n[t->kind] > 0);
    TAILQ_REMOVE(&core->tickets.list, t, link);
    core->tickets.n[t->kind]--;
    kvq__deallocate(core, t, t->size);
}
