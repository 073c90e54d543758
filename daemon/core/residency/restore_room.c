// SPDX-License-Identifier: Apache-2.0
//
// The memory of sessions that are restored or fetched is taken bit by bit. If there is none, other
// sessions make room (evict.h).
#include "daemon/core/residency/evict.h"
#include "daemon/core/residency/saved_internal.h"

// ---- Blocks ----

// What a turn may take: one more extent for the session's namespace, and so much work.
struct room_turn {
    uint64_t extents;
    uint64_t work; // page visits, and KiB that the poller takes from the system
};

// Takes the memory pages of a block into which nothing is read: no thread takes them later. Where
// the system has no pages, the core gives it back those of empty extents.
static int take_pages(struct kvq__restore *r, struct kvq__ref *ref, struct room_turn *turn)
{
    if (!ref->block->extent->bare)
        return 0;
    turn->work += ref->block->bytes / 1024;
    int rc = kvq__block_back(r->session->pool, ref->block);
    uint64_t given = UINT64_MAX;
    while (rc < 0 && given > 0) { // an extent at a time: unmapping gigabytes takes long
        given = kvq__pool_trim(r->core, r->session->pool, 1);
        rc = given ? kvq__block_back(r->session->pool, ref->block) : rc;
        turn->work += given / 1024;
    }
    if (rc < 0)
        kvq__block_drop_idle(r->core, ref, false);
    return rc;
}

// Takes a block, unless an earlier try has taken it. arrives: something is read into the block
// before anybody else writes to it.
static int reserve_block(struct kvq__restore *r, uint64_t bytes, bool arrives, struct kvq__ref *ref,
                         struct room_turn *turn)
{
    const struct kvq__session *s = r->session;
    if (bytes == 0 || ref->block)
        return 0;
    r->grant.bare = true;
    int rc = kvq__block_new(s->core, s->ns, s->pool, bytes, &r->grant, ref);
    rc = rc || arrives ? rc : take_pages(r, ref, turn);
    r->reserved += rc ? 0 : bytes;
    return rc;
}

static int reserve_page(struct kvq__restore *r, struct kvq__layer *l, uint32_t page,
                        struct room_turn *turn)
{
    const struct kvq__session *s = r->session;
    struct kvq__pageref *p = kvq__page(l, page);
    int rc = 0;
    if (page < kvq__packed_pages(s, l, s->tokens))
        rc = reserve_block(r, kvq__packed_block_bytes(l, page), kvq__page_part(l->packed, page) > 0,
                           &p->packed, turn);
    if (rc || page < l->raw_page)
        return rc;
    // All of the block: a step may append to the session before all layers have come, and must not
    // have to replace the block then.
    return reserve_block(r, l->raw_bytes, true, &p->raw, turn);
}

static int reserve_extras(struct kvq__restore *r, struct kvq__layer *l, struct room_turn *turn)
{
    return reserve_block(r, r->session->n_pages ? l->extras_bytes : 0, true, &l->extras, turn);
}

static uint64_t extents_of(const struct kvq__session *s)
{
    const struct kvq__arena *a = &s->ns->arenas[s->pool - s->core->pools];
    return a->extents_taken[0] + a->extents_taken[1];
}

// Goes on with a layer. KVQ__MORE: the turn may take no more.
static int reserve_layer(struct kvq__restore *r, struct kvq__layer *l, struct room_turn *turn)
{
    const struct kvq__session *s = r->session;
    if (r->page < l->first_page)
        r->page = l->first_page;
    for (; r->page < s->n_pages; r->page++) {
        if (extents_of(s) != turn->extents || turn->work >= s->core->config.restore_work)
            return KVQ__MORE;
        turn->work++;
        int rc = reserve_page(r, l, r->page, turn);
        if (rc)
            return rc;
    }
    return reserve_extras(r, l, turn);
}

static int reserve_some(struct kvq__restore *r)
{
    struct kvq__session *s = r->session;
    struct room_turn turn = {.extents = extents_of(s)};
    for (; r->layer < s->n_layers; r->layer++) {
        int rc = kvq__layer_owns(s, r->layer) ? reserve_layer(r, &s->layers[r->layer], &turn) : 0;
        if (rc)
            return rc;
        r->page = 0;
    }
    return 0;
}

uint32_t kvq__restore_back(const struct kvq__restore *r, const uint32_t *which, uint32_t n)
{
    const struct kvq__pool *pool = r->session->pool;
    for (uint32_t i = 0; i < n; i++) {
        const struct kvq__arriving *a = &r->arriving[which[i]];
        if (a->bare && kvq__block_back(pool, a->ref.block) < 0)
            return i;
    }
    return n;
}

static uint64_t need_of_restored(const struct kvq__session *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i) || s->n_pages == 0)
            continue;
        bytes += kvq__layer_block_bytes(s, l, s->pool, (uint64_t)s->n_pages * KVQ_BLOCK_TOKENS);
        bytes += l->extras_bytes;
    }
    return bytes;
}

// The pool has room, and the system has no pages for it.
static int refuse_pages(const struct kvq__session *s, uint64_t need, char *text)
{
    kvq__namespace_full(s->core, s->ns, s->pool, need, KVQ_E_NO_MEMORY,
                        "the system has no pages for what is free there");
    return kvq__fail(text, KVQ_E_NO_MEMORY,
                     "the system has no memory for session \"%s\" of %llu tokens and %llu bytes, "
                     "though %s has room; end other processes, or give the pool less memory",
                     s->name, (unsigned long long)s->tokens, (unsigned long long)need,
                     kvq__pool_name(s->pool));
}

// The session's blocks so far are given back here: what is refused is all its memory. in_the_way:
// NULL if no session was asked to make room.
static int refuse_restore_room(struct kvq__restore *r, int rc,
                               const struct kvq__in_the_way *in_the_way, char *text)
{
    char way[KVQ_TEXT_BYTES / 4];
    struct kvq__session *s = r->session;
    uint64_t need = need_of_restored(s);
    kvq__pages_empty(s);
    if (rc == KVQ_E_NO_MEMORY && r->grant.refused.code == 0) // by take_pages
        return refuse_pages(s, need, text);
    if (rc == KVQ_E_QUOTA)
        return kvq__quota_refuse(s->ns, kvq__pool_limit(s->pool), need, text);
    if (in_the_way)
        kvq__in_the_way_text(s->core, in_the_way, way, sizeof way);
    kvq__namespace_full(s->core, s->ns, s->pool, need, rc, in_the_way ? way : NULL);
    return kvq__fail(text, rc,
                     "no room on %s for session \"%s\" of %llu tokens and %llu bytes; drop "
                     "others, or give the pool more memory",
                     kvq__pool_name(s->pool), s->name, (unsigned long long)s->tokens,
                     (unsigned long long)need);
}

// ---- Room ----

static bool is_beside(const struct kvq__restore *r, const struct kvq__restore *other)
{
    return other != r && !other->entered && other->session->pool == r->session->pool;
}

// Whether the restore waits only for its own namespace's limit.
static bool waits_at_limit(const struct kvq__restore *r)
{
    return r->grant.refused.code == KVQ_E_QUOTA;
}

// Whether another restore has waited for longer for room there that both may have.
static bool comes_later(const struct kvq__restore *r)
{
    const struct kvq__restore *other;
    LIST_FOREACH (other, &r->core->disk.restores, link)
        if (is_beside(r, other) && other->ticket && (!r->ticket || other->ticket < r->ticket) &&
            (!waits_at_limit(other) || other->session->ns == r->session->ns))
            return true;
    return false;
}

// Whether other restores hold memory there: they came later, and so are about to give it back.
static bool others_hold(const struct kvq__restore *r)
{
    const struct kvq__restore *other;
    LIST_FOREACH (other, &r->core->disk.restores, link)
        if (is_beside(r, other) && other->reserved > 0)
            return true;
    return false;
}

static void take_restore_ticket(struct kvq__restore *r)
{
    if (r->ticket)
        return;
    r->ticket = ++r->core->room.last_ticket;
    r->since = r->core->now;
}

// Restores that each hold what the other waits for would wait for ever. No waiter is woken: the
// blocks are about to be taken again.
static void give_blocks_back(struct kvq__restore *r)
{
    struct kvq__session *s = r->session;
    if (r->reserved == 0 && r->layer == 0 && r->page == 0) // nothing to give back
        return;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        for (uint32_t p = 0; kvq__layer_owns(s, i) && p < s->n_pages; p++) {
            kvq__block_drop_idle(r->core, &kvq__page(l, p)->packed, false);
            kvq__block_drop_idle(r->core, &kvq__page(l, p)->raw, false);
        }
        kvq__block_drop_idle(r->core, &l->extras, false);
    }
    r->layer = r->page = 0;
    r->reserved = 0;
}

// The restore was refused a block. True if it is to wait for room.
static bool waits(struct kvq__restore *r, struct kvq__in_the_way *way)
{
    struct kvq__core *core = r->core;
    const struct kvq__shortage *refused = &r->grant.refused;
    uint64_t look_at = UINT64_MAX, need = need_of_restored(r->session);
    if (refused->code == 0 || need > kvq__shortage_limit(refused))
        return false;
    if (kvq__ended_helps(core, refused))
        return true;
    if (r->spec.prefix_tokens)
        return false;
    take_restore_ticket(r);
    if (r->looked && core->now < r->looked + KVQ__LEAST_LOOK_NS &&
        (r->evictions == core->evict.ended || core->evict.n > 0))
        return true;
    struct kvq__eviction_request asked = {.shortage = refused,
                                          .since = r->since,
                                          .need = need - r->reserved,
                                          .ticket = r->ticket,
                                          .own = r->session,
                                          .in_the_way = way,
                                          .look_at = &look_at};
    enum kvq__help help = kvq__evict_for(core, &asked);
    if (help == KVQ__HELP_LATER && kvq__admission_too_late(r->since, look_at))
        help = KVQ__HELP_NONE;
    r->looked = core->now;
    r->evictions = core->evict.ended;
    return help != KVQ__HELP_NONE || others_hold(r);
}

int kvq__restore_take(struct kvq__restore *r, char *text)
{
    if (comes_later(r)) {
        take_restore_ticket(r);
        give_blocks_back(r);
        return KVQ__LATER;
    }
    struct kvq__in_the_way way = {0};
    r->grant = (struct kvq__grant){.may_wait = true};
    int rc = reserve_some(r);
    if (rc == KVQ_E_BUSY) { // extents are being made
        kvq__pool_want(r->session->ns, r->session->pool,
                       need_of_restored(r->session) - r->reserved);
        return KVQ__LATER;
    }
    if (rc < 0 && waits(r, &way))
        return KVQ__LATER;
    return rc < 0 ? refuse_restore_room(r, rc, r->ticket ? &way : NULL, text) : rc;
}
