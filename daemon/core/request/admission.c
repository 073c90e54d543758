// SPDX-License-Identifier: Apache-2.0
//
// Requests that wait for room: what they need, their turns, and when they are refused. See evict.h.
#include "daemon/core/request/admission.h"

#include <assert.h>
#include <stdio.h>

#include "daemon/core/session/exact.h"

#define NS_PER_MS   1000000ull
#define PATIENCE_NS 2000000000ull // for a session to become old enough
#define LOOK_NS     50000000ull   // a request that waits looks again so often, whatever was freed,
#define APART_NS    1000000ull    // or less often: so far apart are the looks of all together

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

// Of a request, in the place or namespace that has no room for it.
struct need {
    uint64_t missing; // that is yet to be had
    uint64_t whole;   // with what its sessions have there
};

// `least`: so much is missing at least; what a fork needs is known by that alone.
static struct need need_of_request(const struct kvq__queue *q, const struct kvq__shortage *shortage,
                                   uint64_t least)
{
    struct need need = {0};
    assert(shortage->code < 0 && shortage->pool);
    for (uint32_t i = 0; i < q->header.count; i++) {
        const struct kvq__session *s = q->work[i].session;
        if (!kvq__entry_alive(q, i) || q->entries[i].append == 0 ||
            !kvq__shortage_counts(shortage, s))
            continue;
        uint64_t now = kvq__session_held_bytes(s);
        uint64_t then = kvq__session_bytes_at(s, s->pool, s->tokens + q->entries[i].append);
        need.missing += then > now ? then - now : 0;
        uint64_t whole = kvq__max(then, now), prompt = kvq__exact_bytes(s);
        need.whole += whole > prompt ? whole - prompt : 0;
    }
    if (need.missing < least)
        need.missing = least;
    if (need.whole < need.missing)
        need.whole = need.missing;
    return need;
}

// ---- Claims ----

// While a request waits, those after it have no session evicted that it names.
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

// What changes when a request that waits like this one should look again.
static uint64_t changes(const struct kvq__queue *q)
{
    return q->turn.extents ? q->core->extents_made : q->core->freed;
}

// A look costs the more the more requests wait. So all together take the same part of the time,
// however many they are.
static uint64_t looks_apart(const struct kvq__core *core, uint64_t least)
{
    return kvq__max(least, core->n_waiters * APART_NS);
}

// Its ticket mostly is the newest: not that of a request that was refused before for other entries.
static void add_waiter(struct kvq__queue *q)
{
    struct kvq__core *core = q->core;
    struct kvq__queue *before = TAILQ_LAST(&core->waiters, kvq__waiters);
    while (before && before->turn.ticket > q->turn.ticket)
        before = TAILQ_PREV(before, kvq__waiters, waiter_link);
    if (before)
        TAILQ_INSERT_AFTER(&core->waiters, before, q, waiter_link);
    else
        TAILQ_INSERT_HEAD(&core->waiters, q, waiter_link);
    core->n_waiters++;
    q->turn.in_line = true;
}

static void drop_waiter(struct kvq__queue *q)
{
    struct kvq__core *core = q->core;
    assert(core->n_waiters > 0 && q->turn.in_line);
    if (core->shown.next == q)
        core->shown.next = TAILQ_NEXT(q, waiter_link);
    TAILQ_REMOVE(&core->waiters, q, waiter_link);
    core->n_waiters--;
    q->turn.in_line = q->turn.listed = false;
}

static void enlist(struct kvq__queue *q, const struct kvq__shortage *refused, uint64_t look_at)
{
    struct kvq__core *core = q->core;
    assert(!q->turn.listed && q->turn.ticket > 0);
    if (!q->turn.in_line)
        add_waiter(q);
    claim_sessions(q);
    q->turn.listed = true;
    q->turn.place = refused->pool;
    q->turn.ns = refused->ns;
    q->turn.quota = refused->code == KVQ_E_QUOTA;
    q->turn.extents = refused->code == KVQ_E_BUSY;
    q->turn.seen = changes(q);
    q->turn.look_at =
        kvq__max(kvq__min(look_at, core->now + LOOK_NS), core->now + looks_apart(core, 0));
}

// Of those that wait, the oldest for which something has changed; NULL: none. After a change each
// is passed once, and not once for each of the others.
static const struct kvq__queue *first_unseen(struct kvq__core *core)
{
    struct kvq__shown *shown = &core->shown;
    if (shown->freed != core->freed || shown->extents_made != core->extents_made)
        *shown = (struct kvq__shown){TAILQ_FIRST(&core->waiters), core->freed, core->extents_made};
    assert(!shown->next || shown->next->turn.in_line);
    while (shown->next &&
           (!shown->next->turn.listed || shown->next->turn.seen == changes(shown->next)))
        shown->next = TAILQ_NEXT(shown->next, waiter_link);
    return shown->next;
}

// Whether what got free may be for the older of two that wait. One whose namespace is at its limit
// waits for the namespace's own memory.
static bool comes_first(const struct kvq__queue *before, const struct kvq__queue *q)
{
    return before->turn.listed && before->turn.place == q->turn.place &&
           (!before->turn.quota || before->turn.ns == q->turn.ns) &&
           before->turn.seen != changes(before);
}

bool kvq__admission_turn(struct kvq__queue *q)
{
    struct kvq__core *core = q->core;
    const struct kvq__queue *before;
    if (!q->turn.listed)
        return true;
    if (q->turn.seen == changes(q) && core->now < q->turn.look_at)
        return false;
    assert(q->turn.ticket > 0 && q->turn.since <= core->now);
    for (before = first_unseen(core); before && before->turn.ticket < q->turn.ticket;
         before = TAILQ_NEXT(before, waiter_link))
        if (comes_first(before, q))
            return false;
    drop_claims(q);
    q->turn.listed = false;
    return true;
}

void kvq__admission_leave(struct kvq__queue *q)
{
    if (q->turn.in_line)
        drop_waiter(q);
    drop_claims(q);
    q->turn.ticket = 0;
    q->turn.looked = 0;
    q->turn.refused.code = 0;
}

// ---- Asking ----

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
    q->turn.ticket = ++q->core->last_ticket;
    q->turn.since = q->core->now;
}

// Whether it was told to wait just now, and the last session that goes has not gone since.
static bool has_just_looked(const struct kvq__queue *q)
{
    const struct kvq__core *core = q->core;
    return q->turn.looked && core->now < q->turn.looked + looks_apart(core, KVQ__LEAST_LOOK_NS) &&
           (q->turn.evictions == core->evictions_ended || core->n_evicting > 0);
}

static bool wait_for_room(struct kvq__queue *q, const struct kvq__session *own,
                          const struct kvq__shortage *refused, struct need need, bool reports)
{
    uint64_t missing = need.missing, whole = need.whole;
    struct kvq__core *core = q->core;
    struct kvq__in_the_way way = {0};
    uint64_t look_at = UINT64_MAX;
    enum kvq__help help = KVQ__HELP_NONE;
    bool fits = whole <= kvq__shortage_limit(refused), first = q->turn.ticket == 0;
    assert(refused->code < 0 && refused->pool);
    take_request_ticket(q);
    if (refused->code == KVQ_E_BUSY) { // there is room, and nobody has to go for it
        kvq__pool_want(refused->ns, refused->pool, missing);
        enlist(q, refused, look_at);
        return true;
    }
    struct kvq__eviction_request asked = {refused, missing, q->turn.since, q->turn.ticket,
                                          own,     &way,    &look_at};
    if (fits && !core->draining && has_just_looked(q)) {
        enlist(q, refused, q->turn.looked + looks_apart(core, KVQ__LEAST_LOOK_NS));
        return true;
    }
    claim_sessions(q); // its own as well, as of its ticket
    if (fits && !core->draining)
        help = core->up->evict_for(core, &asked);
    if (help == KVQ__HELP_LATER && kvq__admission_too_late(q->turn.since, look_at))
        help = KVQ__HELP_NONE;
    bool patient = fits && !core->draining && (q->header.flags & KVQ_REQ_WAIT_ROOM);
    if (help == KVQ__HELP_NONE && !patient) {
        if (reports)
            kvq__admission_refuse(core, refused, missing, fits ? &way : NULL);
        drop_claims(q);
        return false;
    }
    core->counts.waited_for_room += first;
    q->turn.looked = core->now;
    q->turn.evictions = core->evictions_ended;
    enlist(q, refused, look_at);
    return true;
}

bool kvq__admission_wait(struct kvq__queue *q, const struct kvq__session *own,
                         const struct kvq__shortage *refused, uint64_t missing, uint64_t whole)
{
    return wait_for_room(q, own, refused, (struct need){missing, whole}, true);
}

static bool ask_for_room(struct kvq__queue *q, uint32_t i, const struct kvq__shortage *refused,
                         struct need need, bool reports)
{
    q->turn.entry = i;
    q->turn.refused = *refused;
    return wait_for_room(q, q->work[i].session, refused, need, reports);
}

bool kvq__admission_ask(struct kvq__queue *q, uint32_t i, const struct kvq__shortage *refused,
                        uint64_t least)
{
    if (refused->code == 0) // what was missing is no block
        return false;
    return ask_for_room(q, i, refused, need_of_request(q, refused, least), true);
}

// ---- Taking pages ----

static bool is_short(struct kvq__core *core, const struct kvq__shortage *s, uint64_t missing)
{
    return missing > kvq__shortage_free(s) &&
           !(kvq__deferred_free(core, true) && missing <= kvq__shortage_free(s));
}

// Whether the session could not have so many tokens now even if all prefixes gave way: then none
// does, and nothing is taken to be given back. `refused` is 0 if it could.
static bool needs_more_room(const struct kvq__session *s, uint64_t tokens,
                            struct kvq__shortage *refused)
{
    static const int codes[] = {KVQ_E_QUOTA, KVQ_E_NO_MEMORY};
    uint64_t now = kvq__session_held_bytes(s), then = kvq__session_bytes_at(s, s->pool, tokens);
    for (uint32_t i = 0; i < 2; i++) {
        *refused = (struct kvq__shortage){.ns = s->ns, .pool = s->pool, .code = codes[i]};
        if (is_short(s->core, refused, then > now ? then - now : 0))
            return true;
    }
    *refused = (struct kvq__shortage){0};
    return false;
}

static bool is_full(const struct kvq__shortage *refused)
{
    return refused->code == KVQ_E_QUOTA || refused->code == KVQ_E_NO_MEMORY;
}

// Whether the request waits until it can have all it needs, prefixes included that would give way.
static bool waits_for_all(struct kvq__queue *q, uint32_t i, const struct kvq__shortage *refused)
{
    struct need need = need_of_request(q, refused, 0);
    return is_short(q->core, refused, need.missing) && ask_for_room(q, i, refused, need, false);
}

// The same of a request that has waited, without another try.
static bool waits_still(struct kvq__queue *q)
{
    struct kvq__shortage refused = q->turn.refused;
    uint32_t i = q->turn.entry;
    if (!is_full(&refused))
        return false;
    assert(q->turn.ticket && i < q->header.count);
    if (!kvq__entry_alive(q, i))
        return false;
    refused.later = false; // that may be over
    const struct kvq__session *s = q->work[i].session;
    return s->ns == refused.ns && kvq__shortage_counts(&refused, s) &&
           waits_for_all(q, i, &refused);
}

static bool take_entry(struct kvq__queue *q, uint32_t i)
{
    struct kvq__session *s = q->work[i].session;
    if (!kvq__entry_alive(q, i) || q->entries[i].append == 0 || s->evict.taker == q)
        return true;
    assert(!s->evict.taker);
    uint64_t tokens = s->tokens + q->entries[i].append;
    struct kvq__grant grant = {.may_wait = true, .spares_prefixes = true};
    bool lacks = kvq__pages_of(tokens) > s->n_pages && needs_more_room(s, tokens, &grant.refused);
    int rc = lacks ? grant.refused.code : kvq__pages_reserve(s, tokens, &grant);
    if (rc < 0 && !lacks && is_full(&grant.refused)) {
        if (waits_for_all(q, i, &grant.refused))
            return false;
        grant = (struct kvq__grant){.may_wait = true};
        rc = kvq__pages_reserve(s, tokens, &grant);
    }
    if (rc < 0 && kvq__admission_ask(q, i, &grant.refused, grant.refused.bytes))
        return false;
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

bool kvq__admission_take(struct kvq__queue *q)
{
    uint32_t i;
    bool all = true;
    if (waits_still(q))
        return false;
    for (i = 0; i < q->header.count && all; i++)
        all = take_entry(q, i);
    while (i-- > 0) {
        struct kvq__session *s = q->work[i].session;
        if (!s || s->evict.taker != q)
            continue;
        s->evict.taker = NULL;
        if (!all)
            kvq__admission_untake(q, i);
    }
    return all;
}
