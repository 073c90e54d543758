// SPDX-License-Identifier: Apache-2.0
//
// Requests that wait for room: what they need, their turns, and when they are refused. See evict.h.
#include "daemon/core/request/admission.h"

#include <assert.h>
#include <stdio.h>

#include "daemon/core/session/exact.h"

#define NS_PER_MS   1000000ull
#define PATIENCE_NS 2000000000ull // how long a request waits for a session to become old enough
#define LOOK_NS     50000000ull   // a waiter looks again so often even if nothing was freed,
#define APART_NS    1000000ull    // or less often: the looks of all waiters are so far apart,
#define VISIT_NS    100ull        // or so far for each layer and block that the last look visited
#define TRY_NS      500ull        // tries from the start are so far apart for each layer visited
enum {
    ENTRY_WORK = 16, // work of an entry besides its layers, counted in layers
    BLOCK_WORK = 16, // of a block that is taken and given back
};

// ---- What is needed ----

uint64_t kvq__session_bytes_at(const struct kvq__session *s, const struct kvq__pool *pool,
                               uint64_t tokens)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        bytes += kvq__layer_block_bytes(s, l, pool, tokens);
        bytes += tokens ? l->extras_bytes : 0;
    }
    return bytes;
}

// The attempt's demand on the pool, or on the namespace's limit, that has no room.
static struct kvq__demand *demand_of(const struct kvq__queue *q, const struct kvq__shortage *s)
{
    enum kvq__limit which = kvq__pool_limit(s->pool);
    struct kvq__demand *d = s->code == KVQ_E_QUOTA
                                ? &s->ns->demands[which]
                                : &q->core->evict.demands[s->pool - q->core->pools];
    assert(q->turn.attempt > 0);
    if (d->attempt != q->turn.attempt)
        *d = (struct kvq__demand){.attempt = q->turn.attempt};
    return d;
}

// The demands that count an entry's session: on the namespace's limit and on the pool.
static void demands_of(const struct kvq__queue *q, uint32_t i, struct kvq__demand *both[2])
{
    const struct kvq__session *s = q->work[i].session;
    both[0] = demand_of(q, &(struct kvq__shortage){s->ns, s->pool, .code = KVQ_E_QUOTA});
    both[1] = demand_of(q, &(struct kvq__shortage){s->ns, s->pool, .code = KVQ_E_NO_MEMORY});
}

static bool takes_pages(const struct kvq__queue *q, uint32_t i)
{
    return kvq__entry_alive(q, i) && q->entries[i].append > 0;
}

static struct kvq__need need_of_entry(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__session *s = q->work[i].session;
    uint64_t now = kvq__session_held_bytes(s);
    uint64_t then = kvq__session_bytes_at(s, s->pool, s->tokens + q->entries[i].append);
    uint64_t whole = kvq__max(then, now), prompt = kvq__exact_bytes(s);
    q->core->room.counted_layers += s->n_layers;
    return (struct kvq__need){.missing = then > now ? then - now : 0,
                              .whole = whole > prompt ? whole - prompt : 0};
}

// Once in an attempt: from then on each entry that gets its pages or is refused lowers the demands.
static void count_needs(struct kvq__queue *q)
{
    struct kvq__demand *both[2];
    for (uint32_t i = 0; i < q->header.count && !q->turn.counted; i++) {
        if (!takes_pages(q, i))
            continue;
        struct kvq__need need = q->work[i].need = need_of_entry(q, i);
        demands_of(q, i, both);
        for (uint32_t k = 0; k < 2; k++) {
            both[k]->need.missing += need.missing;
            both[k]->need.whole += need.whole;
        }
    }
    q->turn.counted = true;
}

void kvq__admission_took(struct kvq__queue *q, uint32_t i, uint64_t bytes)
{
    struct kvq__demand *both[2];
    demands_of(q, i, both);
    for (uint32_t k = 0; k < 2; k++)
        both[k]->in_the_way.reach -= kvq__min(both[k]->in_the_way.reach, bytes);
}

static void entry_is_over(struct kvq__queue *q, uint32_t i, bool refused)
{
    const struct kvq__need *need = &q->work[i].need;
    struct kvq__demand *both[2];
    if (!q->turn.counted)
        return;
    demands_of(q, i, both);
    if (!refused)
        kvq__admission_took(q, i, need->missing);
    for (uint32_t k = 0; k < 2; k++) {
        assert(both[k]->need.missing >= need->missing && both[k]->need.whole >= need->whole);
        both[k]->need.missing -= need->missing;
        both[k]->need.whole -= refused ? need->whole : 0;
    }
}

static struct kvq__need need_of_request(struct kvq__queue *q, const struct kvq__shortage *shortage,
                                        uint64_t least)
{
    assert(shortage->code < 0 && shortage->pool);
    count_needs(q);
    struct kvq__need need = demand_of(q, shortage)->need;
    need.missing = kvq__max(need.missing, least);
    need.whole = kvq__max(need.whole, need.missing);
    return need;
}

// ---- Claims ----

// Requests with later tickets have no session evicted that the request names while it waits.
static void claim_sessions(struct kvq__queue *q)
{
    struct kvq__handle *h;
    assert(q->turn.ticket > 0);
    for (uint32_t i = 0; i < q->header.count && !q->turn.claims; i++)
        if (kvq__handle_get(q->client, q->entries[i].handle, &h) == 0)
            kvq__claim_make(&q->work[i].claim, h->session, q->turn.ticket);
    q->turn.claims = true;
}

static void drop_claims(struct kvq__queue *q)
{
    for (uint32_t i = 0; i < q->header.count && q->turn.claims; i++)
        kvq__claim_drop(&q->work[i].claim);
    q->turn.claims = false;
}

// ---- Turns ----

// The counter that changes when a waiter of this kind should look again.
static uint64_t changes(const struct kvq__queue *q)
{
    return q->turn.extents ? q->core->room.extents_made : q->turn.line->freed;
}

// Waiters share the time for looks and tries: namespaces equally, then the pools and limits where a
// namespace waits, then the requests there. So the many waiters of a namespace slow down only each
// other. A request's share is one in the returned number.
static uint64_t sharers(const struct kvq__queue *q)
{
    const struct kvq__waits *w = q->turn.waits;
    assert(q->turn.in_line && w->n > 0 && q->turn.ns->n_waits > 0 && q->core->room.n_waiting > 0);
    return (uint64_t)q->core->room.n_waiting * q->turn.ns->n_waits * w->n;
}

// The time between the request's looks, by the work of the last one.
static uint64_t looks_apart(const struct kvq__queue *q, uint64_t least)
{
    uint64_t apart = kvq__max(APART_NS, q->turn.look_work * VISIT_NS);
    return kvq__max(least, sharers(q) * apart);
}

// When the next try from the start may be, by the work of the last one. `not_before`: by the last
// tries of those requests of its namespace that wait at the same place.
static uint64_t next_try(const struct kvq__queue *q, uint64_t least, uint64_t not_before)
{
    uint64_t apart = sharers(q) * q->turn.work * TRY_NS;
    return kvq__max(not_before, q->turn.tried + kvq__max(least, apart));
}

// Blocks count where there was no room. Where extents were missing, what the try took stays for the
// next one, and there are no more such tries than extents that are made.
static uint64_t work_of_try(const struct kvq__queue *q)
{
    uint64_t blocks = q->turn.took + q->core->room.taken - q->turn.taken;
    uint64_t work = q->turn.extents ? 0 : blocks * BLOCK_WORK;
    struct kvq__handle *h;
    for (uint32_t i = 0; i < q->header.count; i++) {
        work += ENTRY_WORK;
        if (kvq__handle_get(q->client, q->entries[i].handle, &h) == 0)
            work += h->session->n_layers;
    }
    return work;
}

// A try has ended, and the request waits.
static void note_try(struct kvq__queue *q)
{
    struct kvq__waits *w = q->turn.waits;
    uint64_t theirs = (uint64_t)q->core->room.n_waiting * q->turn.ns->n_waits;
    q->turn.tried = q->core->now;
    q->turn.work = work_of_try(q);
    w->next_try = q->core->now + theirs * q->turn.work * TRY_NS;
    if (q->turn.extents)
        q->turn.hoped = NULL;
    if (q->turn.hoped == w && q->turn.refused.code) // there is no room for others there either
        w->next_hope = w->next_try;
}

static struct kvq__line *its_line(const struct kvq__queue *q, const struct kvq__shortage *s)
{
    return s->code == KVQ_E_QUOTA ? &s->ns->lines[kvq__pool_limit(s->pool)]
                                  : &q->core->room.lines[s->pool - q->core->pools];
}

static struct kvq__waits *its_waits(const struct kvq__queue *q, const struct kvq__shortage *s)
{
    return s->code == KVQ_E_QUOTA ? &s->ns->at_limit[kvq__pool_limit(s->pool)]
                                  : &s->ns->at_pool[s->pool - q->core->pools];
}

static void drop_waiter(struct kvq__queue *q)
{
    struct kvq__core *core = q->core;
    struct kvq__line *line = q->turn.line;
    assert(q->turn.in_line && q->turn.waits->n > 0);
    if (line->unseen == q)
        line->unseen = TAILQ_NEXT(q, line_link);
    TAILQ_REMOVE(&line->waiters, q, line_link);
    TAILQ_REMOVE(&core->room.waiters, q, waiter_link);
    if (--q->turn.waits->n == 0 && --q->turn.ns->n_waits == 0)
        core->room.n_waiting--;
    q->turn.in_line = q->turn.listed = false;
}

// The line stays in the order of tickets. A ticket is older than the line's last one only if the
// request has waited in another line or was refused before for other entries.
static void add_waiter(struct kvq__queue *q, const struct kvq__shortage *refused)
{
    struct kvq__core *core = q->core;
    struct kvq__line *line = q->turn.line = its_line(q, refused);
    struct kvq__queue *before = TAILQ_LAST(&line->waiters, kvq__waiters);
    while (before && before->turn.ticket > q->turn.ticket)
        before = TAILQ_PREV(before, kvq__waiters, line_link);
    if (before)
        TAILQ_INSERT_AFTER(&line->waiters, before, q, line_link);
    else
        TAILQ_INSERT_HEAD(&line->waiters, q, line_link);
    TAILQ_INSERT_TAIL(&core->room.waiters, q, waiter_link);
    q->turn.ns = refused->ns;
    q->turn.waits = its_waits(q, refused);
    if (q->turn.waits->n++ == 0 && q->turn.ns->n_waits++ == 0)
        core->room.n_waiting++;
    q->turn.in_line = true;
}

static void enlist(struct kvq__queue *q, const struct kvq__shortage *refused)
{
    bool was_tried = !q->turn.listed;
    assert(q->turn.ticket > 0);
    if (q->turn.in_line && q->turn.waits != its_waits(q, refused))
        drop_waiter(q);
    if (!q->turn.in_line)
        add_waiter(q, refused);
    claim_sessions(q);
    q->turn.extents = refused->code == KVQ_E_BUSY;
    if (was_tried)
        note_try(q);
    q->turn.listed = true;
    q->turn.place = refused->pool;
    q->turn.quota = refused->code == KVQ_E_QUOTA;
    q->turn.seen = changes(q);
}

static void look_again(struct kvq__queue *q, uint64_t look_at)
{
    uint64_t now = q->core->now;
    q->turn.look_at = kvq__max(kvq__min(look_at, now + LOOK_NS), now + looks_apart(q, 0));
}

// The oldest waiter in the line that has not looked since something changed; NULL: none. The line
// passes each waiter once after a change, and not once for each of the others.
static const struct kvq__queue *first_unseen(const struct kvq__core *core, struct kvq__line *line)
{
    if (line->shown != line->freed || line->extents != core->room.extents_made) {
        line->unseen = TAILQ_FIRST(&line->waiters);
        line->shown = line->freed;
        line->extents = core->room.extents_made;
    }
    assert(!line->unseen || line->unseen->turn.line == line);
    while (line->unseen &&
           (!line->unseen->turn.listed || line->unseen->turn.seen == changes(line->unseen)))
        line->unseen = TAILQ_NEXT(line->unseen, line_link);
    return line->unseen;
}

// Whether what became free may be for an older waiter: for the same pool or limit.
static bool others_come_first(const struct kvq__queue *q)
{
    struct kvq__core *core = q->core;
    struct kvq__line *both[] = {&core->room.lines[q->turn.place - core->pools],
                                &q->turn.ns->lines[kvq__pool_limit(q->turn.place)]};
    bool any = false;
    for (uint32_t i = 0; i < 2; i++) {
        const struct kvq__queue *first = first_unseen(core, both[i]);
        any |= first && first->turn.ticket < q->turn.ticket;
    }
    return any;
}

void kvq__admission_leave(struct kvq__queue *q)
{
    if (q->turn.in_line)
        drop_waiter(q);
    drop_claims(q);
    q->turn.hoped = NULL;
    q->turn.ticket = 0;
    q->turn.looked = 0;
    q->turn.refused.code = 0;
}

// ---- Asking ----

static bool is_full(const struct kvq__shortage *refused)
{
    return refused->code == KVQ_E_QUOTA || refused->code == KVQ_E_NO_MEMORY;
}

bool kvq__admission_too_late(uint64_t since, uint64_t look_at)
{
    return look_at > since + PATIENCE_NS;
}

void kvq__in_the_way_text(const struct kvq__core *core, const struct kvq__in_the_way *w, char *text,
                          size_t room)
{
    int n = snprintf(text, room, "of the sessions there %u are in use", w->in_use);
    if (w->pinned && n > 0 && (size_t)n < room)
        n += snprintf(text + n, room - (size_t)n, ", %u pinned", w->pinned);
    if (w->young && n > 0 && (size_t)n < room)
        n += snprintf(text + n, room - (size_t)n, ", %u were used in the last %llu ms", w->young,
                      (unsigned long long)(core->config.evict_idle_ns / NS_PER_MS));
    if (w->nowhere && n > 0 && (size_t)n < room)
        snprintf(text + n, room - (size_t)n, ", %u have nowhere to go%s", w->nowhere,
                 core->config.saves ? "" : " (set storage_dir: then idle ones go to disk)");
}

void kvq__admission_refuse(struct kvq__core *core, const struct kvq__shortage *s, uint64_t missing,
                           const struct kvq__in_the_way *in_the_way)
{
    char text[KVQ_TEXT_BYTES / 2] = "more than there can be at all";
    assert(s->code < 0 && s->pool);
    if (in_the_way)
        kvq__in_the_way_text(core, in_the_way, text, sizeof text);
    core->counts.refused_for_room++;
    kvq__namespace_full(core, s->ns, s->pool, missing, s->code, text);
}

static void take_request_ticket(struct kvq__queue *q)
{
    if (q->turn.ticket)
        return;
    q->turn.ticket = ++q->core->room.last_ticket;
    q->turn.since = q->core->now;
}

// Whether the request looked for sessions to evict too recently to look again. Once the last
// eviction under way has ended, one waiter of its `waits` looks at once.
static bool has_just_looked(const struct kvq__queue *q)
{
    const struct kvq__core *core = q->core;
    return q->turn.looked && q->turn.in_line &&
           core->now < q->turn.looked + looks_apart(q, KVQ__LEAST_LOOK_NS) &&
           (q->turn.waits->evictions == core->evict.ended || core->evict.n > 0);
}

// Asks for evictions, unless the attempt has learned that they cannot make so much room.
static enum kvq__help ask_for_help(struct kvq__queue *q, const struct kvq__eviction_request *asked,
                                   struct kvq__demand *d)
{
    if (d && d->refused && asked->need > d->in_the_way.reach) {
        *asked->in_the_way = d->in_the_way;
        return KVQ__HELP_NONE;
    }
    claim_sessions(q); // so the sessions that the request itself names stay as well
    uint64_t before = q->core->evict.work;
    enum kvq__help help = q->core->up->evict_for(q->core, asked);
    if (q->core->evict.work != before)
        q->turn.look_work = q->core->evict.work - before;
    if (help == KVQ__HELP_LATER && kvq__admission_too_late(asked->since, *asked->look_at))
        help = KVQ__HELP_NONE;
    if (d && help == KVQ__HELP_NONE)
        d->in_the_way = *asked->in_the_way;
    if (d)
        d->refused = help == KVQ__HELP_NONE;
    return help;
}

// d: the demand in the attempt to take pages; NULL outside of an attempt.
static bool wait_for_room(struct kvq__queue *q, const struct kvq__session *own,
                          const struct kvq__shortage *refused, struct kvq__need need,
                          struct kvq__demand *d, bool reports)
{
    struct kvq__core *core = q->core;
    struct kvq__in_the_way way = {0};
    uint64_t look_at = UINT64_MAX;
    enum kvq__help help = KVQ__HELP_NONE;
    bool fits = need.whole <= kvq__shortage_limit(refused), first = q->turn.ticket == 0;
    assert(refused->code < 0 && refused->pool);
    take_request_ticket(q);
    q->turn.need = need;
    if (refused->code == KVQ_E_BUSY) { // extents are being made: no session has to go
        kvq__pool_want(refused->ns, refused->pool, need.missing);
        enlist(q, refused);
        look_again(q, look_at);
        return true;
    }
    struct kvq__eviction_request asked = {.shortage = refused,
                                          .need = need.missing,
                                          .since = q->turn.since,
                                          .ticket = q->turn.ticket,
                                          .own = own,
                                          .in_the_way = &way,
                                          .look_at = &look_at};
    if (fits && !core->draining && has_just_looked(q)) {
        enlist(q, refused);
        look_again(q, q->turn.looked + looks_apart(q, KVQ__LEAST_LOOK_NS));
        return true;
    }
    if (fits && !core->draining)
        help = ask_for_help(q, &asked, d);
    bool patient = fits && !core->draining && (q->header.flags & KVQ_REQ_WAIT_ROOM);
    if (help == KVQ__HELP_NONE && !patient) {
        if (reports)
            kvq__admission_refuse(core, refused, need.missing, fits ? &way : NULL);
        return false;
    }
    core->counts.waited_for_room += first;
    enlist(q, refused);
    q->turn.looked = core->now;
    q->turn.waits->evictions = core->evict.ended;
    look_again(q, look_at);
    return true;
}

static bool waits_or_drops(struct kvq__queue *q)
{
    if (!q->turn.listed)
        drop_claims(q);
    return q->turn.listed;
}

bool kvq__admission_wait(struct kvq__queue *q, const struct kvq__session *own,
                         const struct kvq__shortage *refused, uint64_t missing, uint64_t whole)
{
    assert(!q->turn.listed);
    q->turn.refused.code = 0;
    wait_for_room(q, own, refused, (struct kvq__need){missing, whole}, demand_of(q, refused), true);
    return waits_or_drops(q);
}

static bool ask_for_room(struct kvq__queue *q, uint32_t i, const struct kvq__shortage *refused,
                         struct kvq__need need, bool reports)
{
    q->turn.entry = i;
    q->turn.refused = *refused;
    return wait_for_room(q, q->work[i].session, refused, need, demand_of(q, refused), reports);
}

void kvq__admission_begin(struct kvq__queue *q)
{
    q->turn.took = 0;
    kvq__admission_go_on(q);
}

void kvq__admission_pause(struct kvq__queue *q)
{
    q->turn.took += q->core->room.taken - q->turn.taken;
}

void kvq__admission_go_on(struct kvq__queue *q)
{
    q->turn.attempt = ++q->core->room.last_attempt;
    q->turn.taken = q->core->room.taken;
    q->turn.counted = q->turn.swept = false;
}

bool kvq__admission_ask(struct kvq__queue *q, uint32_t i, const struct kvq__shortage *refused,
                        uint64_t least)
{
    if (refused->code == 0) // what was missing is not a block
        return false;
    ask_for_room(q, i, refused, (struct kvq__need){least, least}, true);
    return waits_or_drops(q);
}

void kvq__admission_gave_back(struct kvq__queue *q, const struct kvq__session *s, uint64_t bytes)
{
    if (q->turn.listed && is_full(&q->turn.refused) && kvq__shortage_counts(&q->turn.refused, s))
        q->turn.need.missing += bytes;
}

// ---- Waiting on ----

// The session of the refused entry; NULL if it has gone or no longer counts against the shortage.
static const struct kvq__session *refused_session(const struct kvq__queue *q)
{
    const struct kvq__shortage *refused = &q->turn.refused;
    struct kvq__handle *h;
    if (!is_full(refused) || kvq__handle_get(q->client, q->entries[q->turn.entry].handle, &h) < 0)
        return NULL;
    const struct kvq__session *s = h->session;
    return s->ns == refused->ns && kvq__shortage_counts(refused, s) ? s : NULL;
}

// The request waits until then unless something changes; younger waiters may go first.
static bool waits_until(struct kvq__queue *q, uint64_t at)
{
    q->turn.seen = changes(q);
    q->turn.look_at = at;
    return true;
}

// Whether a request whose turn it is waits on, since the room that it lacked at its last try seems
// not to be there. Only the next try sees what has changed of its sessions.
static bool waits_on(struct kvq__queue *q)
{
    const struct kvq__core *core = q->core;
    const struct kvq__session *s = refused_session(q);
    const struct kvq__waits *hoped = q->turn.hoped; // the last try was in vain there
    struct kvq__shortage refused = q->turn.refused;
    uint64_t at = next_try(q, LOOK_NS, q->turn.waits->next_try);
    q->turn.hoped = NULL;
    if (core->now >= at)
        return false;
    if (q->turn.extents)
        return q->turn.seen == changes(q) && waits_until(q, at);
    refused.later = false; // that may be over
    if (s && q->turn.need.missing > kvq__shortage_free(&refused)) {
        bool waits = wait_for_room(q, s, &refused, q->turn.need, NULL, false);
        q->turn.hoped = waits ? hoped : NULL; // else it is refused now
        return waits;
    }
    at = q->turn.waits->next_hope;
    at = hoped ? next_try(q, 0, at) : at;
    q->turn.hoped = core->now >= at ? q->turn.waits : hoped;
    return core->now < at && waits_until(q, at);
}

bool kvq__admission_turn(struct kvq__queue *q)
{
    if (!q->turn.listed)
        return true;
    if (q->turn.seen == changes(q) && q->core->now < q->turn.look_at)
        return false;
    assert(q->turn.ticket > 0 && q->turn.since <= q->core->now);
    if (others_come_first(q) || waits_on(q))
        return false;
    drop_claims(q);
    q->turn.listed = false;
    return true;
}

// ---- Taking pages ----

// Whether the bytes are missing even after deferred frees were swept. An attempt sweeps once:
// readers of deferred blocks do not end meanwhile.
static bool is_short(struct kvq__queue *q, const struct kvq__shortage *s, uint64_t missing)
{
    if (missing <= kvq__shortage_free(s))
        return false;
    if (!q->turn.swept)
        kvq__deferred_free(q->core, true);
    q->turn.swept = true;
    return missing > kvq__shortage_free(s);
}

// Whether the entry's pages could not be had even if all prefixes gave way: then no prefix gives
// way, and no page is taken only to be given back. `refused` says where; code 0: they could.
static bool needs_more_room(struct kvq__queue *q, uint32_t entry, struct kvq__shortage *refused)
{
    static const int codes[] = {KVQ_E_QUOTA, KVQ_E_NO_MEMORY};
    const struct kvq__session *s = q->work[entry].session;
    struct kvq__need need = q->turn.counted ? q->work[entry].need : need_of_entry(q, entry);
    for (uint32_t i = 0; i < 2; i++) {
        *refused = (struct kvq__shortage){.ns = s->ns, .pool = s->pool, .code = codes[i]};
        if (is_short(q, refused, need.missing))
            return true;
    }
    *refused = (struct kvq__shortage){0};
    return false;
}

// Whether the request waits for what all its entries need, after all prefixes have given way.
static bool waits_for_all(struct kvq__queue *q, uint32_t i, const struct kvq__shortage *refused)
{
    struct kvq__need need = need_of_request(q, refused, 0);
    return is_short(q, refused, need.missing) && ask_for_room(q, i, refused, need, false);
}

// As waits_for_all, for a request that has waited, without another try.
static bool waits_still(struct kvq__queue *q)
{
    struct kvq__shortage refused = q->turn.refused;
    uint32_t i = q->turn.entry;
    if (!is_full(&refused))
        return false;
    assert(q->turn.ticket && i < q->header.count);
    if (!kvq__entry_alive(q, i))
        return false;
    refused.later = false; // what was free only later may be free now
    const struct kvq__session *s = q->work[i].session;
    return s->ns == refused.ns && kvq__shortage_counts(&refused, s) &&
           waits_for_all(q, i, &refused);
}

// Whether the request waits for what its entries not refused lack; reports the refusal if not.
static bool waits_for_the_rest(struct kvq__queue *q, uint32_t i,
                               const struct kvq__shortage *refused)
{
    if (refused->code == 0) // what was missing is not a block
        return false;
    return ask_for_room(q, i, refused, need_of_request(q, refused, refused->bytes), true);
}

static bool take_entry(struct kvq__queue *q, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    if (!takes_pages(q, i))
        return true;
    if (s->evict.taker == q) { // an earlier entry names the same session
        entry_is_over(q, i, false);
        return true;
    }
    assert(!s->evict.taker);
    uint64_t tokens = s->tokens + q->entries[i].append;
    struct kvq__grant grant = {.may_wait = true, .spares_prefixes = true};
    bool lacks = kvq__pages_of(tokens) > s->n_pages && needs_more_room(q, i, &grant.refused);
    int rc = lacks ? grant.refused.code : kvq__pages_reserve(s, tokens, &grant);
    if (rc < 0 && !lacks && is_full(&grant.refused)) {
        if (waits_for_all(q, i, &grant.refused))
            return false;
        grant = (struct kvq__grant){.may_wait = true};
        rc = kvq__pages_reserve(s, tokens, &grant);
    }
    if (rc < 0 && waits_for_the_rest(q, i, &grant.refused))
        return false;
    entry_is_over(q, i, rc < 0);
    if (rc < 0)
        kvq__entry_fail(q, i, rc, s->tokens);
    else
        s->evict.taker = q;
    return true;
}

void kvq__admission_untake(struct kvq__queue *q, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    kvq__pages_unreserve(s, kvq__pages_of(s->tokens + s->in_step.tokens));
}

static void give_back(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__session *s = q->work[i].session;
    uint64_t had = kvq__session_held_bytes(s);
    kvq__admission_untake(q, i);
    uint64_t has = kvq__session_held_bytes(s);
    kvq__admission_gave_back(q, s, had > has ? had - has : 0);
}

bool kvq__admission_take(struct kvq__queue *q)
{
    uint32_t i;
    bool all = !waits_still(q);
    for (i = 0; i < q->header.count && all; i++)
        all = take_entry(q, i);
    if (all)
        drop_claims(q);
    while (i-- > 0) {
        struct kvq__session *s = q->work[i].session;
        if (!s || s->evict.taker != q)
            continue;
        s->evict.taker = NULL;
        if (!all)
            give_back(q, i);
    }
    return all;
}
