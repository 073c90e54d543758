// SPDX-License-Identifier: Apache-2.0
//
// See move.h.
#include "daemon/core/residency/move.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/residency/evict.h"
#include "daemon/core/residency/park.h"
#include "daemon/core/session/activity.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/open.h"
#include "daemon/core/session/work_stream.h"

enum { RELEASE_AT_ONCE = 512 }; // blocks between two looks at the rings

#define DEFAULT_WAIT_NS 10000000000ull
#define NS_PER_MS       1000000ull

struct kvq__move *kvq__move_after(const struct kvq__core *core, const struct kvq__move *move)
{
    return (struct kvq__move *)kvq__ticket_after(core, move ? &move->ticket : NULL,
                                                 KVQ__MOVE_TICKETS);
}

static void move_enter(struct kvq__move *move, enum kvq__phase to)
{
    kvq__ticket_enter(&move->ticket, to);
    move->at = 0;
    move->ref = 0;
}

static void move_over(struct kvq__move *move)
{
    kvq__deallocate(move->ticket.core, move->moved, move->room * sizeof *move->moved);
    move->moved = NULL;
    move->n = move->room = 0;
    kvq__ticket_enter(&move->ticket, KVQ__OVER);
}

// The head_dim of a layer whose rows are narrower than they are stored, which kernels of a GPU do
// not take; 0 if there is none.
static uint32_t narrow_dim(const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (s->layers[i].shape.head_dim)
            return s->layers[i].shape.head_dim;
    return 0;
}

int kvq__session_movable(const struct kvq__session *s, const struct kvq__pool *to, char *text)
{
    if (s->move)
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is being moved already, to %s; wait until it is there",
                         s->name, kvq__pool_name(s->move->to));
    if (s->park || kvq__is_fetching(s))
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is on its way to disk or back; wait until it is there",
                         s->name);
    if (to->gpu && narrow_dim(s))
        return kvq__fail(text, KVQ_E_SHAPE,
                         "session \"%s\" has a head_dim of %u, which is served on the host alone",
                         s->name, narrow_dim(s));
    // A demoted session's tables will show what is at its home again.
    if (!LIST_EMPTY(&s->tables) && s->demoted.home != to)
        return kvq__fail(text, KVQ_E_BUSY,
                         "session \"%s\" is read by a client in its own context, which has its "
                         "memory mapped; close it there, then move it",
                         s->name);
    return 0;
}

// Every client that has the session open will enqueue at the new place.
static int take_streams(const struct kvq__session *s, struct kvq__pool *to)
{
    const struct kvq__handle *h;
    struct kvq__work_stream *stream;
    int rc = 0;
    LIST_FOREACH (h, &s->handles, link)
        if (rc == 0 && to->gpu)
            rc = kvq__work_stream_get(h->client, to->gpu, &stream);
    return rc;
}

// drop: of the blocks that the part still has.
static void free_part(struct kvq__namespace *ns, struct kvq__moved *m, const struct kvq__drop *drop)
{
    struct kvq__core *core = ns->core;
    kvq__deallocate(core, m->owned, m->n_owned * sizeof *m->owned);
    for (uint32_t i = 0; i < m->n_sheets; i++)
        kvq__sheet_drop(ns, &m->sheets[i], m->n_owned, drop);
    kvq__ns_deallocate(ns, m->sheets, m->room * sizeof *m->sheets);
    kvq__deallocate(core, m->extras, m->n_layers * sizeof *m->extras);
    kvq__deallocate(core, m->books, m->n_layers * sizeof *m->books);
    *m = (struct kvq__moved){0};
}

// Takes what a session has on a GPU besides blocks.
static int equip(struct kvq__moved *m, struct kvq__gpu *gpu)
{
    int rc = 0;
    if (gpu && !(m->counts = kvq__gpu_counts_new(gpu)))
        return KVQ_E_NO_MEMORY;
    for (uint32_t i = 0; gpu && rc == 0 && i < m->n_layers; i++) {
        const struct kvq__layer *l = &m->session->layers[i];
        if (l->book.k || l->book.v)
            rc = kvq__gpu_book(gpu, l->format, &l->shape, &l->book, &m->books[i]);
    }
    return rc;
}

static void unequip(struct kvq__moved *m, struct kvq__gpu *gpu)
{
    for (uint32_t i = 0; gpu && m->books && i < m->n_layers; i++)
        if (m->books[i].k || m->books[i].v)
            kvq__gpu_book_release(gpu, &m->session->layers[i].book);
    if (m->counts)
        kvq__gpu_counts_free(gpu, m->counts);
    m->counts = NULL;
}

static int take_sheets(struct kvq__namespace *ns, struct kvq__moved *m)
{
    uint32_t n = (m->n_pages + KVQ__SHEET_PAGES - 1) / KVQ__SHEET_PAGES;
    m->room = n ? n : 1;
    int rc = 0;
    m->sheets = kvq__ns_allocate(ns, m->room * sizeof *m->sheets, &rc);
    while (rc == 0 && m->n_sheets < n) {
        struct kvq__sheet *sheet = kvq__sheet_new(ns, m->n_owned, &rc);
        if (sheet)
            m->sheets[m->n_sheets++] = sheet;
    }
    return rc;
}

static int take_moved_part(struct kvq__move *move, struct kvq__moved *m)
{
    struct kvq__core *core = move->ticket.core;
    const struct kvq__session *s = m->session;
    uint32_t n = 0;
    m->n_layers = s->n_layers;
    m->n_owned = s->n_owned;
    m->n_pages = s->n_pages;
    m->owned = kvq__allocate(core, m->n_owned * sizeof *m->owned);
    m->extras = kvq__allocate(core, m->n_layers * sizeof *m->extras);
    m->books = kvq__allocate(core, m->n_layers * sizeof *m->books);
    if (!m->owned || !m->extras || !m->books)
        return KVQ_E_NO_MEMORY;
    int rc = take_sheets(move->ticket.ns, m);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i))
            m->owned[n++] = i;
    rc = take_streams(s, move->to);
    return rc ? rc : equip(m, move->to->gpu);
}

// ---- From phase to phase ----

static void finish_move(struct kvq__move *move, int status)
{
    char text[KVQ_TEXT_BYTES / 2];
    kvq__ticket_finish(&move->ticket, status);
    snprintf(text, sizeof text, status ? "not to %s: %.200s" : "to %s", kvq__pool_name(move->to),
             move->ticket.text);
    kvq__event(move->ticket.core, KVQ__EVENT_SESSION_MOVED, move->ticket.ns->name,
               move->ticket.name, 0, text);
}

// Whether the move holds its sessions, and maybe blocks for them.
static bool move_has_begun(const struct kvq__move *move)
{
    return move->ticket.phase != KVQ__QUEUED && move->ticket.phase != KVQ__WAITING;
}

// Lets the session's requests go on, wherever the session is by now.
static void let_go_of_moved(struct kvq__move *move, struct kvq__moved *m)
{
    struct kvq__session *s = m->session;
    m->session = NULL;
    s->move = NULL;
    s->core->moving.n--;
    if (move_has_begun(move))
        kvq__session_unref(s);
}

// The move has failed: of each pair the new block goes, and so is the exempt one.
static void exempt_new(struct kvq__moved *m)
{
    for (uint64_t ref = 0; ref < kvq__moved_refs(m); ref++) {
        struct kvq__block *here = kvq__moved_here(m, ref)->block;
        struct kvq__block *there = kvq__moved_there(m, ref)->block;
        if (!here || !here->exempt)
            continue;
        kvq__block_exempt(here, false);
        if (there)
            kvq__block_exempt(there, true);
    }
}

static void abandon(struct kvq__move *move, struct kvq__moved *m)
{
    exempt_new(m);
    unequip(m, move->to->gpu);
    kvq__pack_queue(m->session);
    let_go_of_moved(move, m);
}

static void fail_move(struct kvq__move *move, int status)
{
    for (uint32_t i = 0; i < move->n; i++)
        abandon(move, &move->moved[i]);
    finish_move(move, status);
    if (move_has_begun(move))
        move_enter(move, KVQ__DRAINING);
    else
        move_over(move);
}

void kvq__move_lost(struct kvq__session *s)
{
    struct kvq__move *move = s->move;
    if (!move)
        return;
    kvq__fail(move->ticket.text, KVQ_E_CANCELLED, "session \"%s\" was dropped before it was moved",
              s->name);
    fail_move(move, KVQ_E_CANCELLED);
}

static bool moved_are_idle(const struct kvq__move *move)
{
    for (uint32_t i = 0; i < move->n; i++) {
        if (kvq__session_uses(move->moved[i].session, KVQ__USES_MOVE))
            return false;
    }
    return true;
}

static void begin_move(struct kvq__move *move)
{
    int rc = kvq__mover_open(move->ticket.core);
    move_enter(move, KVQ__RESERVING);
    for (uint32_t i = 0; i < move->n; i++) {
        kvq__session_ref(move->moved[i].session);
        kvq__pack_unqueue(move->moved[i].session);
    }
    kvq__flight_begin(move->ticket.core, &move->flight);
    move->ticket.bytes = kvq__move_need(move);
    rc = rc ? rc : kvq__move_check_room(move, move->ticket.text);
    for (uint32_t i = 0; rc == 0 && i < move->n; i++)
        rc = take_moved_part(move, &move->moved[i]);
    if (rc == 0)
        return;
    if (rc == KVQ_E_QUOTA && !move->ticket.text[0])
        kvq__ns_refused(move->ticket.ns, rc, "another page table", move->ticket.text);
    if (!move->ticket.text[0])
        kvq__fail(move->ticket.text, rc,
                  "no memory on %s for a session, a client's stream or what copies",
                  kvq__pool_name(move->to));
    fail_move(move, rc);
}

static bool wait_for_moved(struct kvq__move *move)
{
    if (moved_are_idle(move)) {
        begin_move(move);
        return true;
    }
    if (move->ticket.core->now < move->deadline)
        return false;
    kvq__fail(move->ticket.text, KVQ_E_BUSY,
              "session \"%s\" was in a step, or in use by requests, for %llu ms without a break; "
              "end the step, or wait for longer",
              move->ticket.name, (unsigned long long)(move->wait_ns / NS_PER_MS));
    fail_move(move, KVQ_E_BUSY);
    return true;
}

// False while extents for the move are being made.
static bool reserve_place(struct kvq__move *move)
{
    int rc = kvq__move_reserve(move);
    if (rc < 0) {
        fail_move(move, rc);
    } else if (rc == KVQ__COMPLETE) {
        move_enter(move, KVQ__COPYING);
    }
    return rc != KVQ__LATER;
}

// ---- The moment ----

// Publishes outliers, which only the host's workers keep up to date.
static void publish_outliers(const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (kvq__layer_owns(s, i) && l->extras.data && l->packed)
            kvq_outliers_publish(l->format, &l->shape, l->extras.data);
    }
}

static void exchange_pages(struct kvq__moved *m)
{
    struct kvq__session *s = m->session;
    struct kvq__sheet **sheets = s->sheets;
    uint32_t n_sheets = s->n_sheets, room = s->sheet_room;
    s->sheets = m->sheets;
    s->n_sheets = m->n_sheets;
    s->sheet_room = m->room;
    kvq__sheets_place(s);
    m->sheets = sheets;
    m->n_sheets = n_sheets;
    m->room = room;
    for (uint32_t i = 0; i < m->n_owned; i++) {
        struct kvq__layer *l = &s->layers[m->owned[i]];
        struct kvq__ref extras = l->extras;
        l->extras = m->extras[m->owned[i]];
        m->extras[m->owned[i]] = extras;
    }
}

static void arrive(struct kvq__move *move, struct kvq__moved *m)
{
    struct kvq__session *s = m->session;
    struct kvq__pool *from = s->pool;
    struct kvq__gpu_counts *counts = s->in_step.counts;
    exchange_pages(m);
    s->in_step.counts = m->counts;
    m->counts = counts;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq_book book = s->layers[i].gpu_book;
        s->layers[i].gpu_book = m->books[i];
        s->layers[i].pack_stream = NULL;
        m->books[i] = book;
    }
    unequip(m, from->gpu);
    kvq__session_lies_in(s, move->to);
    kvq__demoted_left(s, from, move->demotes);
    if (!s->pool->gpu)
        publish_outliers(s);
    kvq__pack_queue(s);
    let_go_of_moved(move, m);
}

static void copy(struct kvq__move *move, bool *any)
{
    int rc = kvq__mover_copy(move, any);
    if (rc < 0) {
        kvq__fail(move->ticket.text, rc, "a GPU failed while session \"%s\" was copied",
                  move->ticket.name);
        fail_move(move, rc);
        return;
    }
    if (rc != KVQ__COMPLETE)
        return;
    *any = true;
    kvq__flight_end(move->ticket.core, &move->flight);
    for (uint32_t i = 0; i < move->n; i++)
        arrive(move, &move->moved[i]);
    finish_move(move, 0);
    move_enter(move, KVQ__RELEASING);
}

// ---- Afterwards ----

static void release_moved(struct kvq__move *move)
{
    // The session was quiet as the move began, and the copies of a move that failed have ended.
    struct kvq__drop drop = kvq__drop_by(NULL, 0);
    for (uint32_t i = 0; i < RELEASE_AT_ONCE && kvq__move_next(move); i++, move->ref++) {
        const struct kvq__moved *m = &move->moved[move->at];
        if (!kvq__moved_is_shared(m, m->sheets, move->ref)) // else the block goes with its sheet
            kvq__block_drop(move->ticket.core, kvq__moved_there(m, move->ref), &drop);
    }
    bool more = kvq__move_next(move);
    for (uint32_t i = 0; !more && i < move->n; i++)
        free_part(move->ticket.ns, &move->moved[i], &drop);
    if (!more)
        move_over(move);
}

static void drain_moved(struct kvq__move *move)
{
    if (!kvq__mover_drained(move->ticket.core))
        return;
    kvq__flight_end(move->ticket.core, &move->flight);
    move_enter(move, KVQ__RELEASING);
}

// True if there was something to do.
static bool move_goes_on(struct kvq__move *move)
{
    enum kvq__phase phase = move->ticket.phase;
    bool any = false;
    switch (phase) {
    case KVQ__RESERVING:
        return reserve_place(move);
    case KVQ__COPYING:
        copy(move, &any);
        return any;
    case KVQ__DRAINING:
        drain_moved(move);
        return move->ticket.phase != phase;
    case KVQ__RELEASING:
        release_moved(move);
        return true;
    default:
        return false;
    }
}

// Only one move copies at a time, since all share the streams and the pinned memory.
static bool has_copier(const struct kvq__move *move)
{
    return move->ticket.phase == KVQ__RESERVING || move->ticket.phase == KVQ__COPYING ||
           move->ticket.phase == KVQ__DRAINING;
}

static bool is_copier_free(const struct kvq__core *core)
{
    const struct kvq__move *move;
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        if (has_copier(move))
            return false;
    return true;
}

// Whether requests wait for the move: it makes room for them, or brings back what they use.
static bool is_urgent(const struct kvq__move *move)
{
    return move->demotes || (move->n > 0 && move->moved[0].session &&
                             move->moved[0].session->demoted.home == move->to);
}

// Another move copies: this session's requests go on, and the time does not count.
static void hold_up(struct kvq__move *move)
{
    uint64_t now = move->ticket.core->now;
    if (move->held_up)
        return;
    move->held_up = true;
    move->left = move->deadline > now ? move->deadline - now : 0;
}

static void wait_on(struct kvq__move *move)
{
    if (move->held_up)
        move->deadline = move->ticket.core->now + move->left;
    move->held_up = false;
}

// Moves wait side by side for their sessions to be idle, and the first whose sessions are idle
// copies. True if there was something to do.
static bool go_on_waiting(struct kvq__core *core, bool urgent)
{
    struct kvq__move *move;
    bool any = false, is_free = is_copier_free(core);
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move)) {
        if (is_free && move->ticket.phase == KVQ__QUEUED) {
            move_enter(move, KVQ__WAITING);
            move->deadline = core->now + move->wait_ns;
            any = true;
        }
        if (move->ticket.phase != KVQ__WAITING || is_urgent(move) != urgent)
            continue;
        if (!is_free) {
            hold_up(move);
            continue;
        }
        wait_on(move);
        any |= wait_for_moved(move);
        is_free = !has_copier(move);
    }
    return any;
}

bool kvq__moves_poll(struct kvq__core *core)
{
    struct kvq__move *move;
    if (core->tickets.n[KVQ__TICKET_MOVE] == 0)
        return false;
    bool any = go_on_waiting(core, true);
    any |= go_on_waiting(core, false);
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        any |= move_goes_on(move);
    return any;
}

bool kvq__core_moves(const struct kvq__core *core)
{
    const struct kvq__move *move;
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        if (move->ticket.phase != KVQ__OVER)
            return true;
    return kvq__parks_busy(core);
}

void kvq__moves_close(struct kvq__core *core)
{
    struct kvq__move *move;
    while ((move = kvq__move_after(core, NULL))) {
        if (!move->ticket.finished)
            fail_move(move, KVQ_E_CANCELLED);
        kvq__mover_sync(core);
        if (move->ticket.phase == KVQ__DRAINING)
            drain_moved(move);
        while (move->ticket.phase == KVQ__RELEASING)
            release_moved(move);
        kvq__ticket_free(&move->ticket);
    }
    kvq__mover_close(core);
}

struct kvq__pool *kvq__move_place(const struct kvq__session *s)
{
    return s->move ? s->move->to : NULL;
}

bool kvq__move_asks(const struct kvq__session *s)
{
    if (!s->move)
        return false;
    if (s->move->ticket.phase > KVQ__WAITING)
        return true;
    bool in_step = false; // a step has to end before the move
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        in_step |= m && kvq__in_step(m);
    }
    return s->move->ticket.phase == KVQ__WAITING && !s->move->held_up && !in_step;
}

// ---- Asking for a move ----

static struct kvq__move *move_new(struct kvq__core *core, struct kvq__session *s,
                                  struct kvq__pool *to, uint32_t n)
{
    struct kvq__move *move = kvq__allocate(core, sizeof *move);
    struct kvq__moved *moved = kvq__allocate(core, n * sizeof *moved);
    if (!move || !moved) {
        kvq__deallocate(core, move, sizeof *move);
        kvq__deallocate(core, moved, n * sizeof *moved);
        return NULL;
    }
    move->ticket.core = core;
    move->ticket.ns = s->ns;
    move->ticket.kind = KVQ__TICKET_MOVE;
    move->ticket.size = sizeof *move;
    move->ticket.place = kvq__pool_name(to);
    move->to = to;
    move->moved = moved;
    move->room = n;
    kvq__stored_name(s, move->ticket.name);
    return move;
}

// An offloaded session has no blocks to copy: it will come back at the new place.
static int send_back_to(struct kvq__move *move, struct kvq__session *s, char *text)
{
    int rc = take_streams(s, move->to);
    rc = rc ? rc : kvq__session_replace(s, move->to);
    if (rc == 0)
        kvq__demoted_lost(s);
    return rc ? kvq__fail(text, rc, "no memory on %s for a session or a client's stream",
                          kvq__pool_name(move->to))
              : 0;
}

static int add_moved_session(struct kvq__move *move, struct kvq__session *s, char *text)
{
    int rc = s->pool == move->to ? 0 : kvq__session_movable(s, move->to, text);
    if (rc == 0 && s->pool == move->to &&
        s->demoted.home) // its stay there no longer counts as a demotion
        kvq__demoted_lost(s);
    if (rc || s->pool == move->to)
        return rc;
    if (kvq__is_offloaded(s))
        return send_back_to(move, s, text);
    move->moved[move->n++].session = s;
    return 0;
}

// Adds the session's shards that are elsewhere, or the named one of them.
static int add_sessions(struct kvq__move *move, struct kvq__session *s,
                        const struct kvq__move_spec *spec, char *text)
{
    int rc = 0;
    if (spec->one_shard && !kvq__group_member(s, spec->shard))
        return kvq__fail(text, KVQ_E_NO_SESSION, "session \"%s\" has no shard %u; it has %u",
                         move->ticket.name, spec->shard, s->shards);
    for (uint32_t i = 0; rc == 0 && i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (m && (!spec->one_shard || i == spec->shard))
            rc = add_moved_session(move, m, text);
    }
    return rc ? rc : kvq__move_check_room(move, text);
}

static void publish_moved(struct kvq__move *move)
{
    struct kvq__core *core = move->ticket.core;
    move->ticket.bytes = kvq__move_need(move);
    kvq__ticket_begin(&move->ticket);
    for (uint32_t i = 0; i < move->n; i++) {
        struct kvq__session *s = move->moved[i].session;
        assert(!s->move && !s->park);
        s->move = move;
        core->moving.n++;
    }
    if (move->n == 0) { // all of the session is there already
        finish_move(move, 0);
        move_over(move);
    }
}

int kvq__move_start(struct kvq__session *s, const struct kvq__move_spec *spec,
                    struct kvq__move_info *info, char *text)
{
    struct kvq__core *core = s->core;
    if (core->draining)
        return kvq__fail(text, KVQ_E_DRAINING, "the daemon is shutting down; nothing is moved");
    struct kvq__pool *to = kvq__place_find(core, spec->place, text);
    if (!to)
        return KVQ_E_INVALID;
    int rc = kvq__ticket_room(core, KVQ__TICKET_MOVE, spec->demotes, text);
    if (rc < 0)
        return rc;
    struct kvq__move *move = move_new(core, s, to, s->shards);
    if (!move)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for a move");
    move->demotes = spec->demotes;
    move->wait_ns =
        spec->wait_ms ? kvq__min(spec->wait_ms, KVQ_MAX_MOVE_WAIT_MS) * NS_PER_MS : DEFAULT_WAIT_NS;
    rc = add_sessions(move, s, spec, text);
    if (rc < 0) {
        kvq__deallocate(core, move->moved, s->shards * sizeof *move->moved);
        kvq__deallocate(core, move, sizeof *move);
        return rc;
    }
    publish_moved(move);
    kvq__ticket_fill_info(&move->ticket, info);
    return 0;
}

// ---- What clients and administration ask for ----

int kvq__session_move(struct kvq__client *client, uint64_t value, const struct kvq__move_spec *spec,
                      struct kvq__move_info *info, char *text)
{
    struct kvq__handle *h;
    struct kvq__move_spec own = *spec;
    int rc = kvq__handle_attached(client, value, &h, text);
    if (rc < 0)
        return rc;
    if (h->read_only)
        return kvq__fail(text, KVQ_E_READ_ONLY,
                         "a session opened read-only cannot be moved through that handle; move it "
                         "by name (kvqctl session move), or open it for writing");
    own.one_shard = true;
    own.shard = h->session->shard;
    return kvq__move_start(h->session, &own, info, text);
}

int kvq__session_move_named(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                            const char *name, const struct kvq__move_spec *spec,
                            struct kvq__move_info *info, char *text)
{
    struct kvq__session *s;
    int rc = kvq__session_get(core, peer, ns, name, &s, text);
    return rc ? rc : kvq__move_start(s, spec, info, text);
}
