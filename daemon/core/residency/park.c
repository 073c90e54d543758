// SPDX-License-Identifier: Apache-2.0
//
// See park.h.
#include "daemon/core/residency/park.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/residency/evict.h"
#include "daemon/core/residency/move.h"
#include "daemon/core/residency/residency.h"
#include "daemon/core/residency/saved_internal.h"
#include "daemon/core/session/activity.h"
#include "daemon/core/session/exact.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/table.h"
#include "daemon/core/session/work_stream.h"

enum { RELEASE_AT_ONCE = 512 }; // references between two looks at the rings

#define LEAVE_NS      10000000000ull // how long saves and packing may delay a session's leaving
#define AGAIN_NS      50000000ull    // a request that waits for room asks for a fetch so often
#define TURN_NS       2000000000ull  // how long a request waits for a session that turns back
#define NS_PER_MS     1000000ull
#define NS_PER_SECOND 1000000000ull

// The name by which people know the session.
static const char *shown_name(const struct kvq__session *s, char *text)
{
    kvq__stored_name(s, text);
    return text;
}

// ---- Who can be parked ----

static bool is_loading_session(const struct kvq__session *s)
{
    return s->n_loading || s->residency == KVQ__LOADING || s->residency == KVQ__FETCHING;
}

static int refuse_use(const struct kvq__session *s, char *text)
{
    char who[KVQ_NAME_BYTES];
    unsigned long long client = s->writer ? (unsigned long long)s->writer->client->id : 0;
    shown_name(s, who);
    if (!LIST_EMPTY(&s->tables))
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is read by client %llu in its own context, which has its "
                         "memory mapped; close it there first",
                         who, (unsigned long long)LIST_FIRST(&s->tables)->client->id);
    if (s->move)
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is being moved to %s; wait until it is "
                         "there",
                         who, kvq__pool_name(s->move->to));
    if (is_loading_session(s))
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is being read from disk just now; wait "
                         "until it is there",
                         who);
    if (kvq__in_step(s))
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is in a step of client %llu; end the step first", who,
                         client);
    return kvq__fail(text, KVQ_E_BUSY,
                     "session \"%s\" is in use: requests of its %u readers, of client %llu, which "
                     "writes it, or of whoever saves it are under way; try again when they have "
                     "ended",
                     who, s->readers, client);
}

static int refuse_turning_back(const struct kvq__session *s, char *text)
{
    char who[KVQ_NAME_BYTES];
    return kvq__fail(text, KVQ_E_BUSY,
                     "session \"%s\" could not be read back, and is on disk alone again once "
                     "requests that read some of it have ended; try again then",
                     shown_name(s, who));
}

// `own`: a ticket that is not in the way. `soon`: a session that is being read from disk may be
// parked when it is there.
static int check_member(const struct kvq__session *s, const struct kvq__park *own, bool soon,
                        char *text)
{
    char who[KVQ_NAME_BYTES];
    shown_name(s, who);
    if (s->pinned)
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is pinned; `kvqctl session unpin` lets it go", who);
    if (s->park && s->park != own)
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is being %s already; wait until that "
                         "has ended",
                         who, s->park->ticket.kind == KVQ__TICKET_FETCH ? "read back" : "parked");
    if (kvq__is_offloaded(s))
        return kvq__fail(text, KVQ_E_BUSY, "session \"%s\" is on disk already%s", who,
                         kvq__is_fetching(s) ? ", and about to come back" : "");
    if (kvq__is_turning_back(s))
        return refuse_turning_back(s, text);
    bool used = kvq__session_uses(s, KVQ__USES_PARK) || (is_loading_session(s) && !soon);
    return used ? refuse_use(s, text) : 0;
}

static int check_members(const struct kvq__session *s, const struct kvq__park *own, bool soon,
                         char *text)
{
    int rc = 0;
    for (uint32_t i = 0; i < s->shards && rc == 0; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        if (m && !(kvq__is_offloaded(m) && !m->park && !kvq__is_fetching(m) &&
                   m != s)) // a shard that is away needs nothing
            rc = check_member(m, own, soon, text);
    }
    return rc;
}

static int check_start(const struct kvq__session *s, bool soon, char *text)
{
    uint32_t missing;
    if (!s->core->config.saves)
        return kvq__fail(text, KVQ_E_UNSUPPORTED,
                         "this daemon has no storage to park sessions in; set storage_dir in its "
                         "configuration");
    if (s->core->draining)
        return kvq__fail(text, KVQ_E_DRAINING, "the daemon is shutting down; nothing is parked");
    if (kvq__group_missing(s, &missing))
        return kvq__fail(text, KVQ_E_INCOMPLETE,
                         "shard %u of session \"%s\" is not there; a session is parked with all "
                         "its %u shards: open that shard first",
                         missing, s->name, s->shards);
    return check_members(s, NULL, soon, text);
}

int kvq__session_parkable(const struct kvq__session *s, char *text)
{
    return check_start(s, false, text);
}

bool kvq__park_is_loading(const struct kvq__park *t)
{
    bool loading = false;
    for (uint32_t i = 0; i < t->n; i++)
        loading |= t->members[i] && is_loading_session(t->members[i]);
    return loading;
}

static uint64_t frees_ref(const struct kvq__ref *ref)
{
    return ref->block && ref->block->refs == 1 ? ref->block->bytes : 0;
}

static uint64_t frees_member(const struct kvq__session *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        for (uint32_t p = l->first_page; p < s->n_pages; p++)
            if (kvq__page_owners(l, p) == 1)
                bytes += frees_ref(&kvq__page(l, p)->packed) + frees_ref(&kvq__page(l, p)->raw);
        bytes += frees_ref(&l->extras);
    }
    return bytes;
}

uint64_t kvq__park_frees(const struct kvq__session *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        bytes += m && !kvq__is_offloaded(m) ? frees_member(m) : 0;
    }
    return bytes;
}

// ---- Tickets ----

struct kvq__park *kvq__park_after(const struct kvq__core *core, const struct kvq__park *park)
{
    return (struct kvq__park *)kvq__ticket_after(core, park ? &park->ticket : NULL,
                                                 KVQ__PARK_TICKETS);
}

static int park_new(struct kvq__session *s, enum kvq__ticket_kind kind, bool evicts,
                    struct kvq__park **out, char *text)
{
    struct kvq__core *core = s->core;
    int rc = kvq__ticket_room(core, kind, evicts, text);
    *out = NULL;
    if (rc < 0)
        return rc;
    struct kvq__park *t = kvq__allocate(core, sizeof *t);
    if (!t)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for a ticket");
    t->ticket.core = core;
    t->ticket.ns = s->ns;
    t->ticket.kind = kind;
    t->ticket.size = sizeof *t;
    t->ticket.place = kind == KVQ__TICKET_PARK ? "disk" : kvq__pool_name(s->pool);
    shown_name(s, t->ticket.name);
    kvq__ticket_begin(&t->ticket);
    *out = t;
    return 0;
}

static void add_member(struct kvq__park *t, struct kvq__session *s)
{
    assert(!s->park && !s->move && t->n < KVQ_MAX_SHARDS);
    s->park = t;
    t->members[t->n++] = s;
}

static void let_go_of_parked(struct kvq__park *t)
{
    for (uint32_t i = 0; i < t->n; i++) {
        if (t->members[i])
            t->members[i]->park = NULL;
        t->members[i] = NULL;
    }
}

static void tell_parked(const struct kvq__park *t)
{
    static const char *const why[KVQ__PARK_REASONS] = {
        [KVQ__PARK_ASKED] = "as asked",
        [KVQ__PARK_ROOM] = "for room in its pool",
        [KVQ__PARK_QUOTA] = "for its namespace's limit",
        [KVQ__PARK_IDLE] = "since nobody used it",
    };
    char text[KVQ_TEXT_BYTES / 2];
    snprintf(text, sizeof text, "to disk, %s: %llu bytes are free", why[t->reason],
             (unsigned long long)t->ticket.moved_bytes);
    kvq__event(t->ticket.core, KVQ__EVENT_SESSION_PARKED, t->ticket.ns->name, t->ticket.name, 0,
               text);
}

// A full disk refuses each idle session, again and again. One that is in use or was dropped
// meanwhile is no fault.
static void tell_not_parked(const struct kvq__park *t)
{
    struct kvq__namespace *ns = t->ticket.ns;
    uint64_t now = t->ticket.core->now;
    if (t->ticket.status == KVQ_E_BUSY || t->ticket.status == KVQ_E_CANCELLED ||
        (ns->not_parked_event_at && now - ns->not_parked_event_at < NS_PER_SECOND))
        return;
    ns->not_parked_event_at = now ? now : 1;
    kvq__event(t->ticket.core, KVQ__EVENT_NOT_PARKED, ns->name, t->ticket.name, 0, t->ticket.text);
}

static void finish_park(struct kvq__park *t, int status)
{
    let_go_of_parked(t);
    kvq__ticket_finish(&t->ticket, status);
    kvq__ticket_enter(&t->ticket, KVQ__OVER);
    if (t->ticket.kind == KVQ__TICKET_PARK && status < 0)
        tell_not_parked(t);
    else if (t->ticket.kind == KVQ__TICKET_PARK)
        tell_parked(t);
    if (t->ticket.core->disk.n_wanted) // a fetch may have been asked for meanwhile
        kvq__park_want(t->ticket.core);
}

// ---- Parking ----

static void leave_park(struct kvq__park *t)
{
    kvq__ticket_enter(&t->ticket, KVQ__LEAVING);
    t->deadline = t->ticket.core->now + LEAVE_NS;
}

int kvq__park_start(struct kvq__session *s, enum kvq__park_reason reason,
                    struct kvq__move_info *info, char *text)
{
    struct kvq__park *t;
    bool here = false;
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        here |= m && (!kvq__is_offloaded(m) || m->park || kvq__is_fetching(m));
    }
    int rc = here ? check_start(s, reason == KVQ__PARK_ASKED, text) : 0;
    rc = rc ? rc : park_new(s, KVQ__TICKET_PARK, reason != KVQ__PARK_ASKED, &t, text);
    if (rc < 0)
        return rc;
    t->reason = reason;
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (m && !kvq__is_offloaded(m)) {
            add_member(t, m);
            t->ticket.bytes += frees_member(m);
        }
    }
    if (t->n == 0)
        finish_park(t, 0);
    else
        kvq__park_want(s->core);
    if (info)
        kvq__ticket_fill_info(&t->ticket, info);
    return 0;
}

void kvq__park_saved(struct kvq__core *core, uint64_t ticket, int status, const char *text)
{
    struct kvq__park *t;
    for (t = kvq__park_after(core, NULL); t; t = kvq__park_after(core, t))
        if (t->ticket.id == ticket && t->ticket.phase == KVQ__WRITING)
            break;
    if (!t) // the session was dropped meanwhile
        return;
    if (status < 0) {
        snprintf(t->ticket.text, sizeof t->ticket.text, "%s", text);
        finish_park(t, status);
    } else {
        leave_park(t);
    }
}

// ---- Leaving ----

// 1 if all members can go, 0 if something has to end first, or why they stay.
static int check_leaving(struct kvq__park *t)
{
    bool quiet = true;
    int rc = check_members(t->members[0], t, false, t->ticket.text);
    if (rc < 0)
        return rc;
    if (kvq__park_unsaved(t))
        return kvq__fail(t->ticket.text, KVQ_E_BUSY,
                         "session \"%s\" was changed while it was written; it stays in memory",
                         t->ticket.name);
    for (uint32_t i = 0; i < t->n; i++)
        quiet &= !kvq__session_uses(t->members[i], KVQ__USES_LEAVE) &&
                 kvq__session_saves(t->members[i]) == 0;
    if (!quiet && t->ticket.core->now >= t->deadline)
        return kvq__fail(t->ticket.text, KVQ_E_BUSY,
                         "session \"%s\" was saved or packed for %llu s without a break; try again",
                         t->ticket.name, LEAVE_NS / 1000000000);
    return quiet;
}

// Forgets how far the layers are: the store knows, and packing has gone on since the save.
static void forget_layers(struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        l->first_page = l->raw_page = 0;
        l->packed = 0;
        l->learned = false;
        l->pack_stream = NULL;
    }
}

void kvq__park_leave(struct kvq__session *s)
{
    kvq__pack_unqueue(s);
    kvq__exact_leave(s);
    forget_layers(s);
    kvq__residency_set(s, KVQ__OFFLOADED);
}

static bool go_on_leaving(struct kvq__park *t)
{
    int rc = check_leaving(t);
    if (rc < 0) {
        finish_park(t, rc);
        return true;
    }
    if (rc == 0)
        return false;
    for (uint32_t i = 0; i < t->n; i++) {
        t->ticket.moved_bytes += frees_member(t->members[i]);
        kvq__park_leave(t->members[i]);
    }
    kvq__ticket_enter(&t->ticket, KVQ__RELEASING);
    return true;
}

void kvq__park_empty(struct kvq__session *s)
{
    struct kvq__drop drop = kvq__session_drop_by(s, UINT64_MAX);
    forget_layers(s);
    while (s->n_pages > 0)
        kvq__pages_pop(s, &drop);
    for (uint32_t i = 0; i < s->n_layers; i++)
        kvq__block_drop(s->core, &s->layers[i].extras, &drop);
    kvq__sheets_free(s);
}

static void count_parked(const struct kvq__park *t)
{
    struct kvq__counts *c = &t->ticket.core->counts;
    uint64_t *const parked[KVQ__PARK_REASONS] = {[KVQ__PARK_ROOM] = &c->parked_room,
                                                 [KVQ__PARK_QUOTA] = &c->parked_quota,
                                                 [KVQ__PARK_IDLE] = &c->parked_idle,
                                                 [KVQ__PARK_ASKED] = &c->parked_asked};
    uint64_t *const freed[KVQ__PARK_REASONS] = {[KVQ__PARK_ROOM] = &c->parked_room_bytes,
                                                [KVQ__PARK_QUOTA] = &c->parked_quota_bytes,
                                                [KVQ__PARK_IDLE] = &c->parked_idle_bytes,
                                                [KVQ__PARK_ASKED] = &c->parked_asked_bytes};
    assert(t->reason < KVQ__PARK_REASONS && parked[t->reason] && freed[t->reason]);
    ++*parked[t->reason];
    *freed[t->reason] += t->ticket.moved_bytes;
}

// Gives the members' blocks back; `done` counts the references of this turn.
static void release_parked(struct kvq__park *t, uint32_t *done)
{
    for (uint32_t i = 0; i < t->n; i++) {
        struct kvq__session *s = t->members[i];
        if (!s)
            continue;
        struct kvq__drop drop = kvq__session_drop_by(s, UINT64_MAX);
        while (s->n_sheets > 0 && *done < RELEASE_AT_ONCE)
            *done += kvq__sheets_pop(s, &drop);
        if (s->n_sheets > 0)
            return;
        kvq__park_empty(s);
    }
    count_parked(t);
    finish_park(t, 0);
}

bool kvq__parks_poll(struct kvq__core *core)
{
    struct kvq__park *t;
    uint32_t done = 0;
    bool any = kvq__restores_poll(core);
    for (t = kvq__park_after(core, NULL); t; t = kvq__park_after(core, t)) {
        if (t->ticket.phase == KVQ__LEAVING)
            any |= go_on_leaving(t);
        if (t->ticket.phase == KVQ__RELEASING) {
            release_parked(t, &done);
            any = true;
        }
    }
    return any;
}

bool kvq__parks_busy(const struct kvq__core *core)
{
    const struct kvq__park *t;
    for (t = kvq__park_after(core, NULL); t; t = kvq__park_after(core, t))
        if (t->ticket.phase == KVQ__LEAVING || t->ticket.phase == KVQ__RELEASING)
            return true;
    return core->disk.n_turning_back > 0;
}

// ---- Coming back ----

static void ask_one(struct kvq__session *s)
{
    if (s->residency == KVQ__OFFLOADED)
        kvq__residency_set(s, KVQ__FETCH_WANTED);
}

// Asks for all shards: no request uses one alone.
void kvq__fetch_ask(struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->shards; i++)
        if (kvq__group_member(s, i))
            ask_one(kvq__group_member(s, i));
    if (s->core->disk.n_wanted)
        kvq__park_want(s->core);
}

static bool is_room(int status)
{
    return status == KVQ_E_NO_MEMORY || status == KVQ_E_QUOTA;
}

bool kvq__park_asks(struct kvq__queue *q, uint32_t i, struct kvq__session *s)
{
    struct kvq__entry *w = &q->work[i];
    bool turns = kvq__is_turning_back(s); // it is fetched anew after that
    if (!kvq__is_offloaded(s) && !turns)
        return false;
    if (!w->fetch_asked)
        w->fetch_serial = s->fetch.serial;
    w->fetch_asked = true;
    bool failed = w->fetch_serial != s->fetch.serial ||
                  (turns && s->core->now - s->fetch.failed_at >= TURN_NS);
    if (failed && !(q->header.flags & KVQ_REQ_WAIT_ROOM && is_room(s->fetch.error)))
        return false;
    if (turns || (failed && s->core->now - s->fetch.at < AGAIN_NS))
        return true;
    w->fetch_serial = s->fetch.serial;
    if (!kvq__is_fetching(s))
        kvq__fetch_ask(s);
    return true;
}

static void tell_fetched(struct kvq__session *s, int status, uint64_t bytes, const char *why)
{
    struct kvq__core *core = s->core;
    struct kvq__counts *counts = &core->counts;
    char text[KVQ_TEXT_BYTES / 2], who[KVQ_NAME_BYTES];
    uint64_t ns = core->now - s->fetch.at, ms = ns / NS_PER_MS;
    if (status < 0) {
        counts->fetch_failed++;
        snprintf(text, sizeof text, "not back from disk: %.200s",
                 why[0] ? why : "it could not be read");
    } else {
        counts->fetched++;
        counts->fetched_bytes += bytes;
        counts->fetch_ns += ns;
        counts->fetch_longest_ms = ms > counts->fetch_longest_ms ? ms : counts->fetch_longest_ms;
        snprintf(text, sizeof text, "back on %s: %llu tokens, %llu bytes, after %llu ms",
                 kvq__pool_name(s->pool), (unsigned long long)s->tokens, (unsigned long long)bytes,
                 (unsigned long long)ms);
    }
    kvq__event(core, KVQ__EVENT_SESSION_FETCHED, s->ns->name, shown_name(s, who), 0, text);
}

// Parking was asked for while the session came back.
static void go_on_parking(struct kvq__park *t, int status, const char *text)
{
    if (status < 0) {
        snprintf(t->ticket.text, sizeof t->ticket.text, "%s",
                 text[0] ? text : "it could not be read");
        finish_park(t, status);
    } else {
        kvq__park_want(t->ticket.core);
    }
}

// A member of a ticket for bringing a session back has come, or has failed to.
static void count_down(struct kvq__session *s, int status, const char *text)
{
    struct kvq__park *t = s->park;
    if (!t)
        return;
    if (t->ticket.kind == KVQ__TICKET_PARK) {
        go_on_parking(t, status, text);
        return;
    }
    for (uint32_t i = 0; i < t->n; i++)
        if (t->members[i] == s)
            t->members[i] = NULL;
    s->park = NULL;
    t->left--;
    if (status < 0 && t->failed == 0) {
        t->failed = status;
        snprintf(t->ticket.text, sizeof t->ticket.text, "%s",
                 text[0] ? text : "it could not be read");
    }
    if (t->left == 0)
        finish_park(t, t->failed);
}

void kvq__fetch_ended(struct kvq__session *s, int status, uint64_t bytes, const char *text)
{
    if (status < 0) {
        s->fetch.error = status;
        s->fetch.failed_at = s->core->now;
        s->fetch.serial++;
    } else {
        kvq__session_used(s);
        kvq__evict_back(s);
    }
    tell_fetched(s, status, bytes, text);
    count_down(s, status, text);
}

int kvq__prefetch_start(struct kvq__session *s, struct kvq__move_info *info, char *text)
{
    struct kvq__park *t;
    if (s->core->draining)
        return kvq__fail(text, KVQ_E_DRAINING, "the daemon is shutting down; nothing is fetched");
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        if (m && m->park)
            return kvq__fail(text, KVQ_E_BUSY,
                             "session \"%s\" is being %s just now; wait until "
                             "that has ended",
                             m->park->ticket.name,
                             m->park->ticket.kind == KVQ__TICKET_FETCH ? "read back" : "parked");
        if (m && kvq__is_turning_back(m))
            return refuse_turning_back(m, text);
    }
    int rc = park_new(s, KVQ__TICKET_FETCH, false, &t, text);
    if (rc < 0)
        return rc;
    kvq__ticket_enter(&t->ticket, KVQ__READING);
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (m && (kvq__is_offloaded(m) || kvq__is_fetching(m))) {
            add_member(t, m);
        }
    }
    t->left = t->n;
    if (t->n == 0)
        finish_park(t, 0);
    kvq__fetch_ask(s);
    if (info)
        kvq__ticket_fill_info(&t->ticket, info);
    return 0;
}

// ---- The end of a session ----

// The session ends, and gives back its memory by itself. True if other members of the ticket are
// left.
static bool part_with(struct kvq__park *t, struct kvq__session *s)
{
    bool others = false;
    for (uint32_t i = 0; i < t->n; i++) {
        if (t->members[i] == s)
            t->members[i] = NULL;
        others |= t->members[i] != NULL;
    }
    s->park = NULL;
    return others;
}

static void ticket_lost(struct kvq__session *s)
{
    struct kvq__park *t = s->park;
    if (!t)
        return;
    if (t->ticket.phase == KVQ__RELEASING && part_with(t, s))
        return; // the other members are away, and go on giving memory back
    kvq__fail(t->ticket.text, KVQ_E_CANCELLED, "session \"%s\" was dropped meanwhile",
              t->ticket.name);
    finish_park(t, KVQ_E_CANCELLED);
}

void kvq__park_lost(struct kvq__session *s)
{
    char name[KVQ_NAME_BYTES];
    ticket_lost(s);
    kvq__residency_set(s, KVQ__ENDED);
    if (s->saving.stored && !s->saving.kept)
        kvq__park_forget(s->core, s->ns, shown_name(s, name), s->saving.stamp);
}

void kvq__parks_close(struct kvq__core *core)
{
    struct kvq__park *t;
    while ((t = kvq__park_after(core, NULL))) {
        if (!t->ticket.finished) {
            let_go_of_parked(t);
            kvq__ticket_finish(&t->ticket, KVQ_E_CANCELLED);
            kvq__ticket_enter(&t->ticket, KVQ__OVER);
        }
        kvq__ticket_free(&t->ticket);
    }
    kvq__forgets_close(core);
}
