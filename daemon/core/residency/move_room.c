// SPDX-License-Identifier: Apache-2.0
//
// The memory that a move takes at the other place, bit by bit: a block for each of the session's.
#include "daemon/core/residency/evict.h"
#include "daemon/core/residency/move.h"

enum { RESERVE_AT_ONCE = 256 }; // blocks between two looks at the rings

// ---- References ----

static uint64_t refs_of_layer(const struct kvq__moved *m)
{
    return 2 * (uint64_t)m->n_pages + 1;
}

struct kvq__ref *kvq__moved_there(const struct kvq__moved *m, uint64_t ref)
{
    uint64_t layer = ref / refs_of_layer(m), i = ref % refs_of_layer(m);
    if (i == refs_of_layer(m) - 1)
        return &m->extras[m->owned[layer]];
    struct kvq__sheet *sheet = m->sheets[i / 2 / KVQ__SHEET_PAGES];
    struct kvq__pageref *page = &sheet->pages[layer * KVQ__SHEET_PAGES + i / 2 % KVQ__SHEET_PAGES];
    return i % 2 ? &page->packed : &page->raw;
}

struct kvq__ref *kvq__moved_here(const struct kvq__moved *m, uint64_t ref)
{
    uint64_t i = ref % refs_of_layer(m);
    struct kvq__layer *l = &m->session->layers[m->owned[ref / refs_of_layer(m)]];
    if (i == refs_of_layer(m) - 1)
        return &l->extras;
    struct kvq__pageref *page = kvq__page(l, (uint32_t)(i / 2));
    return i % 2 ? &page->packed : &page->raw;
}

bool kvq__moved_is_shared(const struct kvq__moved *m, struct kvq__sheet *const *sheets,
                          uint64_t ref)
{
    uint64_t i = ref % refs_of_layer(m);
    return i < refs_of_layer(m) - 1 && sheets[i / 2 / KVQ__SHEET_PAGES]->refs > 1;
}

static bool is_raw_ref(const struct kvq__moved *m, uint64_t ref)
{
    uint64_t i = ref % refs_of_layer(m);
    return i < refs_of_layer(m) - 1 && i % 2 == 0;
}

uint64_t kvq__moved_bytes(const struct kvq__moved *m, uint64_t ref)
{
    const struct kvq__layer *l = &m->session->layers[m->owned[ref / refs_of_layer(m)]];
    uint32_t page = (uint32_t)(ref % refs_of_layer(m) / 2);
    if (is_raw_ref(m, ref))
        return kvq_raw_bytes(&l->raw_layout, kvq__page_part(m->session->tokens, page));
    return kvq__moved_here(m, ref)->block->bytes;
}

// Bytes of the block there. A raw one may be longer than what is copied.
static uint64_t bytes_there(const struct kvq__move *move, const struct kvq__moved *m, uint64_t ref)
{
    const struct kvq__layer *l = &m->session->layers[m->owned[ref / refs_of_layer(m)]];
    uint32_t page = (uint32_t)(ref % refs_of_layer(m) / 2);
    if (is_raw_ref(m, ref))
        return kvq__raw_block_bytes(move->to, l, kvq__page_part(m->session->tokens, page));
    return kvq__moved_bytes(m, ref);
}

// ---- What a session needs on another place ----

static uint64_t need_of_moved(const struct kvq__session *s, const struct kvq__pool *to)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        bytes += kvq__layer_block_bytes(s, l, to, s->tokens);
        bytes += l->extras.data ? l->extras_bytes : 0;
    }
    return bytes;
}

uint64_t kvq__move_need(const struct kvq__move *move)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < move->n; i++)
        bytes += need_of_moved(move->moved[i].session, move->to);
    return bytes;
}

static int refuse_move_room(const struct kvq__move *move, int rc, char *text)
{
    const struct kvq__pool *to = move->to;
    enum kvq__limit which = kvq__pool_limit(to);
    if (rc == KVQ_E_QUOTA)
        kvq__quota_refuse(move->ticket.ns, which, kvq__move_need(move), text);
    if (rc == KVQ_E_QUOTA && which == KVQ__DEVICE_BYTES && move->ticket.shared_bytes)
        return kvq__fail(
            text, rc,
            "session \"%s\" shares blocks with forks or with a prefix that is kept, and "
            "these stay; with copies of them namespace \"%s\" would have more than "
            "its limit of %llu bytes in the memory of GPUs; drop the forks or raise the limit",
            move->ticket.name, move->ticket.ns->name,
            (unsigned long long)move->ticket.ns->quota.limit[which]);
    if (rc == KVQ_E_QUOTA)
        return rc;
    return kvq__fail(text, rc,
                     "no room on %s for session \"%s\": it takes %llu bytes, %llu of %llu are "
                     "free (in extents of up to %llu, each for one namespace); move "
                     "or drop others there, or give it more memory",
                     kvq__pool_name(to), move->ticket.name,
                     (unsigned long long)kvq__move_need(move),
                     (unsigned long long)(to->budget - to->used_bytes + move->reserved_bytes),
                     (unsigned long long)to->budget, (unsigned long long)to->extent_bytes);
}

// Whether no session of the move counts yet under the limit that the new place asks of it.
static bool changes_tier(const struct kvq__move *move)
{
    bool changes = true;
    for (uint32_t i = 0; i < move->n; i++)
        changes &= kvq__pool_limit(move->moved[i].session->pool) != kvq__pool_limit(move->to);
    return changes;
}

// Checks what could ever fit. Only reserving tells what is free, as others may give way.
int kvq__move_check_room(const struct kvq__move *move, char *text)
{
    uint64_t need = kvq__move_need(move),
             limit = move->ticket.ns->quota.limit[kvq__pool_limit(move->to)];
    if (need > move->to->budget)
        return refuse_move_room(move, KVQ_E_NO_MEMORY, text);
    return limit && need > limit && changes_tier(move) ? refuse_move_room(move, KVQ_E_QUOTA, text)
                                                       : 0;
}

// ---- Reserving ----

bool kvq__move_next(struct kvq__move *move)
{
    while (move->at < move->n && move->ref >= kvq__moved_refs(&move->moved[move->at])) {
        move->at++;
        move->ref = 0;
    }
    return move->at < move->n;
}

// KVQ__COMPLETE, KVQ__MORE if the next turn is to try again, or a code.
static int reserve_one(struct kvq__move *move, struct kvq__moved *m, uint64_t ref,
                       struct kvq__grant *grant)
{
    const struct kvq__ref *here = kvq__moved_here(m, ref);
    if (!here->block)
        return KVQ__COMPLETE;
    uint64_t bytes = bytes_there(move, m, ref);
    // A block that a fork shares stays as well; other blocks only change their place.
    bool shared = kvq__moved_is_shared(m, m->session->sheets, ref);
    bool stays = shared || here->block->refs > 1;
    struct kvq__ref *there = kvq__moved_there(m, ref);
    int rc = shared
                 ? kvq__block_new(move->ticket.core, move->ticket.ns, move->to, bytes, grant, there)
                 : kvq__block_replace(move->ticket.core, move->ticket.ns, move->to, bytes,
                                      here->block, grant, there);
    if (rc == KVQ_E_BUSY)
        return rc;
    if (rc < 0 && kvq__ended_helps(move->ticket.core, &grant->refused))
        return KVQ__MORE; // ended sessions give memory back first
    move->ticket.shared_bytes += stays ? bytes : 0;
    if (rc == 0) {
        there->block->saved = here->block->saved;
        there->block->saved_sinks = here->block->saved_sinks;
        move->reserved_bytes += bytes;
    }
    return rc;
}

// Notes a refusal: sessions that wanted to go home try again when there may be more room.
static void note_refused(const struct kvq__move *move, int rc)
{
    bool home = false;
    for (uint32_t i = 0; i < move->n; i++) {
        struct kvq__session *s = move->moved[i].session;
        home |= s->demoted.home == move->to;
        if (s->demoted.home == move->to)
            kvq__demoted_refused(s);
    }
    if (!home && !move->demotes)
        kvq__namespace_full(move->ticket.core, move->ticket.ns, move->to, kvq__move_need(move), rc,
                            NULL);
}

int kvq__move_reserve(struct kvq__move *move)
{
    struct kvq__grant grant = {.may_wait = true};
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < RESERVE_AT_ONCE && kvq__move_next(move); i++) {
        rc = reserve_one(move, &move->moved[move->at], move->ref, &grant);
        move->ref += rc == 0;
    }
    if (rc == KVQ_E_BUSY) { // extents are being made
        uint64_t need = kvq__move_need(move), has = move->reserved_bytes;
        kvq__pool_want(move->ticket.ns, move->to, need > has ? need - has : 1);
        return KVQ__LATER;
    }
    if (rc < 0) {
        refuse_move_room(move, rc, move->ticket.text);
        note_refused(move, rc);
        return rc;
    }
    return kvq__move_next(move) ? KVQ__MORE : KVQ__COMPLETE;
}
