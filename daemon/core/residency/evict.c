// SPDX-License-Identifier: Apache-2.0
//
// Which sessions are evicted, where to, and what becomes of them. See evict.h.
#include "daemon/core/residency/evict.h"

#include <assert.h>

#include "daemon/core/residency/move.h"
#include "daemon/core/residency/park.h"
#include "daemon/core/residency/saved_internal.h"
#include "daemon/core/session/activity.h"
#include "daemon/core/session/group.h"

enum {
    SAMPLES = 32,         // blocks that are looked at of a session, which may have 100,000
    FIXED_COST = 1 << 20, // in bytes: evicting many small sessions is no gain
    RECLAIM_AT_ONCE = 64, // pages of prefixes between two looks at the rings
    WAIT_MS = 50,         // how long a demotion waits for work under way
    LOOKS = 256,          // sessions that one look visits, if there are more
    LEAST_LOOKS = 8,      // in each namespace
    OF_ONE = KVQ__EVICT_AT_ONCE / 2, // evictions in a pool that one namespace asks for at a time
};
enum { NODES_AT_ONCE = 256 }; // pages of prefixes that one tick gives up
#define NS_PER_MS    1000000ull
#define GIVEN_UP_NS  200000000ull   // how long blocks that were given up are waited for
#define TRY_AGAIN_NS 10000000000ull // a session that could not be evicted is left alone for so long

// ---- What a session is worth ----

double kvq__score(const struct kvq__score *s)
{
    double cost = (double)s->write + (double)s->read + FIXED_COST;
    return (double)s->idle * (double)s->gain / cost;
}

// The part of a session's blocks that nobody else has. The index of prefixes gives way, and
// restores and saves let go soon. With `shared` also the session's share of blocks that others have
// as well.
static double own_part(const struct kvq__session *s, const struct kvq__namespace *ns, bool shared)
{
    uint32_t seen = 0, passing = kvq__session_saves(s) + (s->restore && s->restore->entered);
    uint32_t offered = s->restore ? s->restore->offered : 0;
    uint32_t indexed = s->ids.sealed > offered ? s->ids.sealed : offered;
    double own = 0;
    for (uint32_t k = 0; k < SAMPLES; k++) {
        const struct kvq__layer *l =
            kvq__source_layer(s, (uint32_t)((uint64_t)k * s->n_layers / SAMPLES));
        uint32_t n = s->n_pages > l->first_page ? s->n_pages - l->first_page : 0;
        if (n == 0)
            continue;
        uint32_t page = l->first_page + (uint32_t)((uint64_t)n * (k * 7 % SAMPLES) / SAMPLES);
        const struct kvq__pageref *p = kvq__page(l, page);
        const struct kvq__block *block = p->packed.block ? p->packed.block : p->raw.block;
        bool sinks = page == 0 && l->sink_bytes && l->packed; // a part of their own to a save
        uint32_t others = passing * (sinks ? 2 : 1) + (page < indexed);
        seen += block != NULL;
        if (!block || (ns && block->extent->owner->ns != ns))
            continue;
        uint32_t owners = block->refs - others + kvq__page_owners(l, page) - 1;
        if (block->refs <= others || owners <= 1)
            own++;
        else if (shared)
            own += 1.0 / owners;
    }
    return seen ? own / seen : 0;
}

static uint64_t evictable_bytes(const struct kvq__session *s)
{
    return kvq__session_bytes_at(s, s->pool, s->tokens);
}

// Bytes by which the shortage shrinks if the session goes.
static uint64_t gain_of(const struct kvq__session *s, const struct kvq__shortage *shortage,
                        bool shared)
{
    const struct kvq__namespace *ns = shortage->code == KVQ_E_QUOTA ? s->ns : NULL;
    if (!kvq__shortage_counts(shortage, s))
        return 0;
    bool begun = s->restore && !s->restore->entered; // it is coming back, and lacks blocks as yet
    uint64_t bytes = begun ? s->restore->reserved : evictable_bytes(s);
    return (uint64_t)((double)bytes * own_part(s, ns, shared));
}

// ---- Where it can go ----

enum way { NOWHERE, TO_HOST, TO_DISK };

// Bytes that can be had on the host once all prefixes have given way.
static uint64_t host_room(const struct kvq__core *core)
{
    const struct kvq__pool *host = &core->pools[0];
    const struct kvq__namespace *ns;
    uint64_t room = host->budget - host->used_bytes;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        room += ns->prefixes.bytes;
    return room;
}

static enum way way_of(const struct kvq__session *s, const struct kvq__shortage *shortage,
                       uint64_t bytes)
{
    const struct kvq__core *core = s->core;
    if (shortage->pool->gpu && core->now >= core->evict.demote_after && bytes <= host_room(core) &&
        kvq__quota_allows(s->ns, KVQ__HOST_BYTES, bytes))
        return TO_HOST;
    return kvq__session_parkable(s, NULL) == 0 ? TO_DISK : NOWHERE;
}

// ---- Looking at sessions ----

struct victim {
    struct kvq__session *session; // the first of its group
    enum way way;
    double score;
    uint64_t gain;
};

struct choice {
    const struct kvq__eviction_request *asked;
    bool shared; // shared blocks count: they are free once all who share them have gone
    struct victim victims[KVQ__EVICT_AT_ONCE]; // those of the highest scores, the best first
    uint32_t n;
    uint64_t all;  // bytes gained by all sessions that may go, now or once old enough
    uint64_t busy; // and by those that may go once the work that uses them has ended
    bool some;     // more sessions may help than were looked at
};

// Of two victims with one score the one found first stays first.
static void note_victim(struct choice *c, struct victim v)
{
    uint32_t at = c->n;
    assert(at <= KVQ__EVICT_AT_ONCE && v.session && v.way != NOWHERE);
    if (at < KVQ__EVICT_AT_ONCE)
        c->n++;
    else if (c->victims[--at].score >= v.score)
        return;
    for (; at > 0 && c->victims[at - 1].score < v.score; at--)
        c->victims[at] = c->victims[at - 1];
    c->victims[at] = v;
}

// The caller waits for what ends by itself, and is to look again.
static void look_soon(const struct kvq__core *core, const struct kvq__eviction_request *asked)
{
    *asked->look_at = kvq__min(*asked->look_at, core->now + KVQ__LEAST_LOOK_NS);
}

// Of a group of shards as a whole.
struct look {
    bool used, held, pinned, own, claimed; // held: in use for as long as a client likes
    uint64_t gain, bytes, unsaved, idle, back, try_after;
};

static void consider_session(const struct kvq__session *s, const struct choice *c,
                             struct look *look)
{
    const struct kvq__eviction_request *asked = c->asked;
    const struct kvq__core *core = s->core;
    uint64_t idle = core->now - s->idle_since, bytes = evictable_bytes(s);
    s->core->evict.work += SAMPLES + 2 * s->n_layers;
    look->used |= kvq__session_uses(s, KVQ__USES_EVICT) != 0;
    look->used |=
        s->pool->gpu && kvq__session_saves(s); // saves hold the blocks: moving frees none yet
    look->held |= kvq__in_step(s) || !LIST_EMPTY(&s->tables);
    look->pinned |= s->pinned;
    look->own |= s == asked->own;
    look->claimed |= kvq__claims_oldest(s) <= asked->ticket;
    look->gain += gain_of(s, asked->shortage, c->shared);
    look->bytes += bytes;
    look->unsaved += kvq__is_unsaved(s) ? bytes : 0;
    look->idle = idle < look->idle ? idle : look->idle;
    look->back = s->evict.back_at > look->back ? s->evict.back_at : look->back;
    look->try_after = s->evict.try_after > look->try_after ? s->evict.try_after : look->try_after;
}

static struct look consider_all(const struct kvq__session *s, const struct choice *c)
{
    struct look look = {.idle = UINT64_MAX};
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        if (m)
            consider_session(m, c, &look);
    }
    return look;
}

// How long until the group has been idle, and in this pool, for evict_idle_ns.
static uint64_t too_young(const struct kvq__core *core, const struct look *look)
{
    uint64_t least = core->config.evict_idle_ns, here = core->now - look->back;
    uint64_t wait = look->idle < least ? least - look->idle : 0;
    if (look->back && here < least && least - here > wait)
        wait = least - here;
    return wait;
}

// False if the group cannot go, whatever its age.
static bool consider(struct choice *c, struct kvq__session *s)
{
    const struct kvq__core *core = s->core;
    const struct kvq__eviction_request *asked = c->asked;
    struct look look = consider_all(s, c);
    if (look.gain == 0 || look.own)
        return false;
    if (look.used || look.claimed || look.pinned) {
        asked->in_the_way->pinned += look.pinned;
        asked->in_the_way->in_use += !look.pinned;
        if (!look.pinned && !look.held && !look.claimed) { // such a use ends by itself
            c->busy += look.gain;
            look_soon(core, asked);
        }
        return false;
    }
    enum way way = look.try_after > core->now ? NOWHERE : way_of(s, asked->shortage, look.bytes);
    uint64_t wait = too_young(core, &look);
    asked->in_the_way->nowhere += way == NOWHERE;
    if (way == NOWHERE)
        return false;
    c->all += look.gain;
    if (wait) {
        asked->in_the_way->young++;
        if (core->now + wait < *asked->look_at)
            *asked->look_at = core->now + wait;
        return true;
    }
    struct kvq__score score = {look.idle, look.gain, look.unsaved, look.bytes};
    note_victim(c, (struct victim){s, way, kvq__score(&score), look.gain});
    return true;
}

// Counts sessions that are being read from disk or moved here: such work ends by itself, and then
// these sessions can go, or their memory is free.
static void consider_coming(const struct kvq__core *core, struct choice *c)
{
    const struct kvq__eviction_request *asked = c->asked;
    const struct kvq__restore *r;
    const struct kvq__move *move;
    uint64_t bytes = 0;
    LIST_FOREACH (r, &core->disk.restores, link)
        if (!r->entered && !r->fetches && r->session != asked->own &&
            kvq__shortage_counts(asked->shortage, r->session))
            bytes += r->reserved;
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        if ((move->ticket.phase == KVQ__RESERVING || move->ticket.phase == KVQ__COPYING) &&
            asked->shortage->code == KVQ_E_NO_MEMORY && move->to == asked->shortage->pool)
            bytes += move->reserved_bytes;
    if (bytes == 0)
        return;
    c->busy += bytes;
    asked->in_the_way->in_use++;
    look_soon(core, asked);
}

// ---- Which sessions are looked at ----

static bool may_help(const struct kvq__shortage *shortage, const struct kvq__arena *arena)
{
    if (shortage->code == KVQ_E_QUOTA)
        return arena->ns == shortage->ns &&
               kvq__pool_limit(arena->pool) == kvq__pool_limit(shortage->pool);
    return arena->pool == shortage->pool;
}

// The first member that is there of the session's group; NULL: this look has visited the group.
static struct kvq__session *group_of(struct kvq__session *s)
{
    struct kvq__session *first = s;
    for (uint32_t i = s->shards; i-- > 0;)
        if (kvq__group_member(s, i))
            first = kvq__group_member(s, i);
    if (first->evict.look == s->core->evict.looks)
        return NULL;
    first->evict.look = s->core->evict.looks;
    return first;
}

// Looks at the `most` sessions used longest ago, and estimates the gain of the others. If there are
// others, sessions that cannot go move behind them.
static void consider_some(struct choice *c, struct kvq__arena *arena, uint32_t most)
{
    uint64_t before = c->all;
    uint32_t n = arena->n_sessions, looks = 0;
    struct kvq__session *s = TAILQ_FIRST(&arena->sessions), *next;
    for (; s && looks < n && looks < most; looks++, s = next) {
        next = TAILQ_NEXT(s, last_used.link);
        s->core->lookup.looks++;
        if (s->n_pages == 0 && !s->restore && !s->move) { // off the list until its next use
            kvq__recent_forget(s);
            continue;
        }
        struct kvq__session *first = group_of(s);
        bool goes = first && consider(c, first);
        if (!goes && n > most)
            kvq__recent_put(s);
    }
    if (looks == n)
        return;
    c->all += (c->all - before) / looks * (n - looks);
    c->some = true;
}

static void choose(struct kvq__core *core, const struct kvq__eviction_request *asked, bool shared,
                   struct choice *c)
{
    struct kvq__namespace *ns;
    uint32_t arenas = 0, most = LOOKS;
    uint64_t sessions = 0;
    *c = (struct choice){.asked = asked, .shared = shared};
    *asked->in_the_way = (struct kvq__in_the_way){0};
    core->evict.looks++;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        for (uint32_t i = 0; i < core->n_pools; i++)
            if (may_help(asked->shortage, &ns->arenas[i]) && ns->arenas[i].n_sessions) {
                sessions += ns->arenas[i].n_sessions;
                arenas++;
            }
    if (sessions > LOOKS && arenas)
        most = LOOKS / arenas < LEAST_LOOKS ? LEAST_LOOKS : LOOKS / arenas;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        for (uint32_t i = 0; i < core->n_pools; i++)
            if (may_help(asked->shortage, &ns->arenas[i]))
                consider_some(c, &ns->arenas[i], most);
    if (c->some && c->n == 0) { // the next look visits others
        c->busy = asked->need;
        look_soon(core, asked);
    }
    consider_coming(core, c);
}

// ---- What is under way ----

// Evictions under way that may help a caller.
struct under_way {
    uint32_t n, own; // own: those that the caller has asked for
    uint64_t coming; // bytes that the pool gains by the own ones
    bool takes;      // another one can begin
};

// The slot for one more eviction for the namespace `by`; NULL: there are enough. None begins beside
// a demotion, since moves copy one at a time.
static struct kvq__evicting *free_slot(struct kvq__core *core, const struct kvq__pool *pool,
                                       const struct kvq__namespace *by)
{
    struct kvq__evicting *free = NULL;
    uint32_t n = 0;
    assert(pool >= core->pools && pool < core->pools + core->n_pools);
    for (uint32_t i = 0; i < KVQ__EVICT_AT_ONCE; i++) {
        struct kvq__evicting *e = &core->evict.places[pool - core->pools][i];
        if (e->ticket && e->demotes)
            return NULL;
        n += e->ticket && e->by == by;
        free = free || e->ticket ? free : e;
    }
    return n < OF_ONE ? free : NULL;
}

static void count_eviction(struct under_way *u, const struct kvq__eviction_request *asked,
                           const struct kvq__evicting *e)
{
    if (!e->ticket || (asked->shortage->code == KVQ_E_QUOTA && e->ns != asked->shortage->ns))
        return;
    u->n++;
    if (e->asker != asked->ticket)
        return;
    u->own++;
    u->coming += e->bytes;
}

static struct under_way look_under_way(struct kvq__core *core,
                                       const struct kvq__eviction_request *asked)
{
    const struct kvq__shortage *shortage = asked->shortage;
    struct under_way u = {0};
    for (uint32_t i = 0; i < core->n_pools; i++) {
        if (shortage->code != KVQ_E_QUOTA && &core->pools[i] != shortage->pool)
            continue;
        for (uint32_t k = 0; k < KVQ__EVICT_AT_ONCE && core->evict.n; k++)
            count_eviction(&u, asked, &core->evict.places[i][k]);
        u.takes |= free_slot(core, &core->pools[i], shortage->ns) != NULL;
    }
    return u;
}

// Whether the evictions that the caller has asked for make up for what is missing.
static bool is_on_its_way(const struct kvq__eviction_request *asked, const struct under_way *u)
{
    return u->own > 0 && kvq__shortage_free(asked->shortage) + u->coming >= asked->need;
}

// ---- Evicting ----

static int send(struct kvq__session *s, enum way way, enum kvq__park_reason reason,
                uint64_t *ticket)
{
    struct kvq__move_spec spec = {.place = "host", .wait_ms = WAIT_MS, .demotes = true};
    struct kvq__move_info info = {0};
    char text[KVQ_TEXT_BYTES];
    int rc = way == TO_HOST ? kvq__move_start(s, &spec, &info, text)
                            : kvq__park_start(s, reason, &info, text);
    *ticket = info.id;
    return rc;
}

// Leaves the session, or all demotions, alone for a while: the reason may last. A session in use
// again stays for that alone.
static void note_failed(struct kvq__session *s, bool demotes, int status)
{
    uint64_t after = s->core->now + TRY_AGAIN_NS;
    if (demotes && (status == KVQ_E_NO_MEMORY || status == KVQ_E_QUOTA))
        s->core->evict.demote_after = after; // there is disk
    else if (status != KVQ_E_BUSY)
        s->evict.try_after = after;
}

// No ticket, or no memory for one, says nothing against the session.
static bool lacks_ticket(const struct victim *v, int status)
{
    return status == KVQ_E_LIMIT || (status == KVQ_E_NO_MEMORY && v->way == TO_DISK);
}

enum start {
    STARTED,
    FULL,      // as many evictions are under way there as may be
    NO_TICKET, // there is no ticket just now
    REFUSED,   // the session stays
};

static enum start start_eviction(struct kvq__core *core, const struct victim *v,
                                 const struct kvq__eviction_request *asked,
                                 enum kvq__park_reason reason)
{
    struct kvq__session *s = v->session;
    struct kvq__evicting *e = free_slot(core, s->pool, asked->shortage->ns);
    uint64_t ticket;
    if (!e)
        return FULL;
    int rc = send(s, v->way, reason, &ticket);
    if (rc < 0 && lacks_ticket(v, rc))
        return NO_TICKET;
    if (rc < 0) {
        note_failed(s, v->way == TO_HOST, rc);
        s->evict.try_after = rc == KVQ_E_BUSY ? core->now + TRY_AGAIN_NS : s->evict.try_after;
        return REFUSED;
    }
    *e = (struct kvq__evicting){.ticket = ticket,
                                .session = s->id,
                                .bytes = v->gain,
                                .asker = asked->ticket,
                                .ns = s->ns,
                                .by = asked->shortage->ns,
                                .demotes = v->way == TO_HOST};
    core->evict.n++;
    return STARTED;
}

// Whether a move that has ended has yet to give back blocks of the pool.
static bool gives_back(const struct kvq__move *move, const struct kvq__pool *pool)
{
    bool ends = move->ticket.phase == KVQ__DRAINING || move->ticket.phase == KVQ__RELEASING;
    for (uint32_t i = move->at; ends && i < move->n; i++)
        for (uint64_t ref = i == move->at ? move->ref : 0; ref < kvq__moved_refs(&move->moved[i]);
             ref++) {
            const struct kvq__block *b = kvq__moved_there(&move->moved[i], ref)->block;
            if (b)
                return b->extent->owner->pool == pool;
        }
    return false;
}

// Bytes of blocks that no session has, but that work under way may still look at. A client's stream
// may stand still for ever, and others may be quicker to take the blocks: a caller that has waited
// for GIVEN_UP_NS does not count them.
static uint64_t given_up(const struct kvq__core *core, const struct kvq__eviction_request *asked)
{
    const struct kvq__namespace *ns;
    uint64_t bytes = 0;
    if (core->now - asked->since > GIVEN_UP_NS)
        return 0;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        for (uint32_t i = 0; i < core->n_pools; i++)
            if (may_help(asked->shortage, &ns->arenas[i]))
                bytes += ns->arenas[i].deferred_bytes;
    return bytes;
}

// Whether enough given-up blocks, or any blocks that a move gives back, are about to be free.
static bool comes_free(const struct kvq__core *core, const struct kvq__eviction_request *asked)
{
    const struct kvq__move *move;
    uint64_t given = given_up(core, asked);
    if (given && kvq__shortage_free(asked->shortage) + given >= asked->need)
        return true;
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        if (gives_back(move, asked->shortage->pool))
            return true;
    return false;
}

// Whether the sessions that may go, now or soon, and `busy` bytes have what is missing.
static bool is_enough(const struct choice *c, uint64_t busy)
{
    const struct kvq__eviction_request *asked = c->asked;
    return kvq__shortage_free(asked->shortage) + c->all + busy >= asked->need &&
           (c->n > 0 || *asked->look_at != UINT64_MAX);
}

// `reach` (struct kvq__in_the_way) of the answer that what may go, now or soon, is not enough.
static uint64_t reach_of(const struct choice *c)
{
    const struct kvq__eviction_request *asked = c->asked;
    bool some = c->n > 0 || *asked->look_at != UINT64_MAX;
    return some ? kvq__shortage_free(asked->shortage) + c->all + c->busy : 0;
}

// `reach` of the answer to wait for work that ends by itself.
static uint64_t ready_of(const struct choice *c)
{
    return c->n > 0 ? kvq__shortage_free(c->asked->shortage) + c->all : 0;
}

// The sessions that may go are not enough: none goes in vain; the caller waits for busy ones.
static enum kvq__help wait_for_busy(const struct kvq__core *core, const struct choice *c)
{
    const struct kvq__eviction_request *asked = c->asked;
    bool later = is_enough(c, c->busy) && *asked->look_at != UINT64_MAX;
    uint64_t given = given_up(core, asked), reach = reach_of(c);
    if (given && !later)
        reach = kvq__max(reach, kvq__shortage_free(asked->shortage) + given);
    asked->in_the_way->reach = later ? ready_of(c) : reach;
    return later ? KVQ__HELP_LATER : KVQ__HELP_NONE;
}

// Begins as many evictions as the need takes, the best victims first.
static enum start start_some(struct kvq__core *core, const struct choice *c, struct under_way *u)
{
    const struct kvq__eviction_request *asked = c->asked;
    bool quota = asked->shortage->code == KVQ_E_QUOTA;
    enum start start = REFUSED;
    for (uint32_t i = 0; i < c->n && !is_on_its_way(asked, u); i++) {
        const struct victim *v = &c->victims[i];
        start = start_eviction(core, v, asked, quota ? KVQ__PARK_QUOTA : KVQ__PARK_ROOM);
        if (start == FULL || start == NO_TICKET)
            break;
        u->own += start == STARTED;
        u->coming += start == STARTED ? v->gain : 0;
    }
    return u->own ? STARTED : start;
}

static enum kvq__help evict(struct kvq__core *core, struct choice *c, struct under_way *u)
{
    const struct kvq__eviction_request *asked = c->asked;
    if (comes_free(core, asked)) {
        look_soon(core, asked);
        return KVQ__HELP_LATER;
    }
    if (!is_enough(c, c->busy)) // one of several forks frees nothing, but all of them do
        choose(core, asked, true, c);
    if (!is_enough(c, 0) && asked->shortage->later) {
        look_soon(core, asked);
        asked->in_the_way->reach = ready_of(c);
        return KVQ__HELP_LATER;
    }
    if (!is_enough(c, 0))
        return wait_for_busy(core, c);
    u->coming += given_up(core, asked);
    while (c->n > 0) {
        enum start start = start_some(core, c, u);
        if (start == STARTED || start == FULL) // the end of any wakes all waiters
            return KVQ__HELP_NOW;
        if (start == NO_TICKET) {
            look_soon(core, asked);
            return KVQ__HELP_LATER;
        }
        choose(core, asked, c->shared, c);
    }
    return *asked->look_at != UINT64_MAX ? KVQ__HELP_LATER : KVQ__HELP_NONE;
}

static enum kvq__help make_room_for(struct kvq__core *core,
                                    const struct kvq__eviction_request *asked, struct under_way *u)
{
    struct choice c;
    uint64_t reach = 0;
    choose(core, asked, false, &c);
    enum kvq__help prompts = kvq__exact_give_way(core, asked, kvq__shortage_free(asked->shortage),
                                                 c.all + c.busy, &reach);
    if (prompts == KVQ__HELP_NOW)
        return prompts;
    enum kvq__help others = evict(core, &c, u);
    if (others != KVQ__HELP_NOW)
        asked->in_the_way->reach = kvq__max(asked->in_the_way->reach, reach);
    if (prompts == KVQ__HELP_NONE || others != KVQ__HELP_NONE)
        return others;
    look_soon(core, asked);
    return prompts;
}

enum kvq__help kvq__evict_for(struct kvq__core *core, const struct kvq__eviction_request *asked)
{
    if (core->draining)
        return KVQ__HELP_NONE;
    if (kvq__ended_helps(core, asked->shortage)) // no session has to go
        return KVQ__HELP_NOW;
    struct under_way u = look_under_way(core, asked);
    if (u.n > 0 && (!u.takes || is_on_its_way(asked, &u)))
        return KVQ__HELP_NOW;
    enum kvq__help help = make_room_for(core, asked, &u);
    return u.n > 0 ? KVQ__HELP_NOW : help; // an eviction under way may do, whoever asked for it
}

// ---- How evictions end ----

// Has all waiters look again: one pool may have room, and in each another eviction may begin.
static void wake_all(struct kvq__core *core)
{
    struct kvq__namespace *ns;
    for (uint32_t i = 0; i < core->n_pools; i++)
        core->room.lines[i].freed++;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        for (uint32_t i = 0; i < KVQ__LIMITS; i++)
            ns->lines[i].freed++;
}

static void ended(struct kvq__core *core, struct kvq__evicting *e, int status, uint64_t bytes)
{
    struct kvq__session *s = kvq__session_by_id(core, e->session);
    if (status == 0 && e->demotes) {
        core->counts.demoted++;
        core->counts.demoted_bytes += bytes;
    } else if (status < 0) {
        core->counts.evictions_failed++;
        if (s)
            note_failed(s, e->demotes, status);
    }
    assert(e->ticket && core->evict.n > 0);
    e->ticket = 0;
    core->evict.n--;
    core->evict.ended++;
    wake_all(core); // also after a failure
}

// Whether the eviction has ended: its memory is free, or the session stays.
static bool look_at_end(struct kvq__core *core, const struct kvq__evicting *e, int *status,
                        uint64_t *bytes)
{
    const struct kvq__ticket *t = kvq__ticket_find(core, e->ticket);
    *status = t ? t->status : KVQ_E_CANCELLED;
    *bytes = t && e->demotes ? t->moved_bytes : 0;
    return !t || t->phase == KVQ__OVER;
}

bool kvq__evict_poll(struct kvq__core *core)
{
    uint64_t before = core->evict.ended;
    for (uint32_t i = 0; i < core->n_pools * KVQ__EVICT_AT_ONCE && core->evict.n; i++) {
        struct kvq__evicting *e =
            &core->evict.places[i / KVQ__EVICT_AT_ONCE][i % KVQ__EVICT_AT_ONCE];
        int status;
        uint64_t bytes;
        if (e->ticket && look_at_end(core, e, &status, &bytes))
            ended(core, e, status, bytes);
    }
    return core->evict.ended != before;
}

// ---- Before a request needs the room ----

static bool is_above(const struct kvq__core *core, const struct kvq__pool *pool)
{
    uint32_t above = core->config.evict_above;
    return above && above < 100 && pool->used_bytes > pool->budget / 100 * above;
}

static void relieve(struct kvq__core *core, const struct choice *c)
{
    struct kvq__pool *pool = c->asked->shortage->pool;
    for (uint32_t i = 0; i < RECLAIM_AT_ONCE; i++)
        if (!is_above(core, pool) || !kvq__prefix_reclaim(core, NULL, pool, KVQ_E_NO_MEMORY, NULL))
            break;
    if (is_above(core, pool)) {
        kvq__ended_give_way(core, c->asked->shortage); // their last pages would have to go again
        start_eviction(core, &c->victims[0], c->asked, KVQ__PARK_ROOM);
    }
}

// Parks an idle session on disk, also from a GPU: no request needs the room.
static void park_idle(struct kvq__core *core, const struct choice *c)
{
    uint64_t least = core->config.park_idle_ns;
    struct victim v = c->victims[0];
    if (least == 0 || core->now - v.session->idle_since < least ||
        kvq__session_parkable(v.session, NULL) < 0)
        return;
    v.way = TO_DISK;
    start_eviction(core, &v, c->asked, KVQ__PARK_IDLE);
}

static void look_at_pool(struct kvq__core *core, struct kvq__pool *pool)
{
    struct kvq__shortage shortage = {.pool = pool, .code = KVQ_E_NO_MEMORY};
    struct kvq__in_the_way way;
    uint64_t look_at = UINT64_MAX;
    struct kvq__eviction_request asked = {
        .shortage = &shortage, .in_the_way = &way, .look_at = &look_at};
    struct choice c;
    choose(core, &asked, false, &c);
    if (c.n > 0 && is_above(core, pool))
        relieve(core, &c);
    else if (c.n > 0)
        park_idle(core, &c);
}

static bool is_evicting(const struct kvq__core *core, uint32_t pool)
{
    bool any = false;
    for (uint32_t i = 0; i < KVQ__EVICT_AT_ONCE; i++)
        any |= core->evict.places[pool][i].ticket != 0;
    return any;
}

void kvq__evict_tick(struct kvq__core *core)
{
    bool idle = core->config.park_idle_ns > 0;
    for (uint32_t i = 0; i < core->n_pools && !core->draining; i++)
        if (!is_evicting(core, i) && (idle || is_above(core, &core->pools[i])))
            look_at_pool(core, &core->pools[i]);
}

void kvq__evict_back(struct kvq__session *s)
{
    s->evict.back_at = s->core->now;
}

// ---- Above a limit that was lowered ----

// Works towards a limit that was lowered: prefixes that no session has go first, some in each tick,
// then idle sessions, one after the other.
static void work_towards(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool)
{
    struct kvq__shortage shortage = {.pool = pool, .ns = ns, .code = KVQ_E_QUOTA};
    struct kvq__in_the_way way;
    uint64_t look_at = UINT64_MAX;
    // A need of 0: any session may go. `since` is 0: given-up blocks do not count.
    const struct kvq__eviction_request asked = {
        .shortage = &shortage, .in_the_way = &way, .look_at = &look_at};
    for (uint32_t i = 0; i < RECLAIM_AT_ONCE && kvq__quota_excess(ns, kvq__pool_limit(pool)); i++)
        if (!kvq__prefix_reclaim(core, ns, pool, KVQ_E_QUOTA, NULL)) {
            kvq__evict_for(core, &asked);
            return;
        }
}

// Likewise towards a lowered limit of bookkeeping memory, in which no blocks count.
static void shrink_index(struct kvq__namespace *ns)
{
    for (uint32_t i = 0; i < NODES_AT_ONCE && kvq__quota_excess(ns, KVQ__TABLE_BYTES) > 0; i++)
        if (!kvq__prefix_reclaim_node(ns))
            return;
}

void kvq__quotas_tick(struct kvq__core *core)
{
    struct kvq__namespace *ns;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        shrink_index(ns);
    TAILQ_FOREACH (ns, &core->namespaces, link)
        for (uint32_t i = 0; i < core->n_pools && i < 2; i++) // all GPUs have one limit
            work_towards(core, ns, &core->pools[i]);
}
