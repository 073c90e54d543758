// SPDX-License-Identifier: Apache-2.0
//
// Sessions that have ended and have yet to leave their last pages to the index of prefixes. While a
// session lives its newest tokens stay in 16 bits: it may go back by max_rollback, its format reads
// the newest ones so, and its prompt is packed when that has ended. Nothing of this matters to a
// session that has ended. So all whole pages of which the ids are known are packed in the
// background, behind what sessions that live have to be packed, and go to the index. A unit's bytes
// depend on its own tokens alone, so they are those that a longer session has.
//
// Meanwhile the session is gone for everybody, and has its memory. Whoever is refused memory gets
// that first: then the session is given up. They are finished one after the other.
#include "daemon/core/session/finish.h"

#include "daemon/core/state.h"

// Takes the packed blocks that the layer's pages lack. Returns how many of its pages can be packed
// then: `pages`, or fewer if there is no room.
static uint32_t provide_packed(struct kvq__session *s, const struct kvq__layer *l, uint32_t pages)
{
    uint32_t page = (uint32_t)kvq__max(l->first_page, l->packed / KVQ_BLOCK_TOKENS);
    for (; page < pages; page++) {
        struct kvq__ref *packed = &kvq__page(l, page)->packed;
        uint64_t bytes = kvq__packed_block_bytes(l, page);
        if (packed->block)
            continue;
        if (kvq__page_owners(l, page) > 1 ||
            kvq__block_new(s->core, s->ns, s->pool, bytes, NULL, packed) < 0)
            return page;
    }
    return pages;
}

static uint32_t provide_all(struct kvq__session *s)
{
    uint32_t pages = kvq__ended_pages(s);
    for (uint32_t i = 0; i < s->n_layers && pages > s->ids.sealed; i++)
        if (kvq__layer_owns(s, i) && s->layers[i].packed_bytes > 0)
            pages = provide_packed(s, &s->layers[i], pages);
    return pages;
}

static bool is_yet_to_pack(const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__pack_due(s, i) > s->layers[i].packed)
            return true;
    return false;
}

static void prepare_finishing(struct kvq__session *s)
{
    uint32_t pages = provide_all(s);
    if (pages <= s->ids.sealed) {
        kvq__ended_finished(s);
        return;
    }
    s->ended.finish.due = (uint64_t)pages * KVQ_BLOCK_TOKENS;
    s->ended.finish.phase = KVQ__FINISH_PACKS;
    kvq__finish_packed(s);
}

// If the index has lost pages all of them come again, some in each turn.
static void leave_pages(struct kvq__session *s)
{
    s->refs++; // where tables need room for the nodes other sessions are given up, not this one
    kvq__prefix_seal(s);
    s->refs--;
    bool more = s->ids.sealed > s->ended.finish.sealed;
    s->ended.finish.sealed = s->ids.sealed;
    if (!more || (uint64_t)s->ids.sealed * KVQ_BLOCK_TOKENS >= s->ended.finish.due)
        kvq__ended_finished(s); // all that it can give is given
}

struct kvq__session *kvq__finish_next(const struct kvq__core *core)
{
    struct kvq__session *s = TAILQ_FIRST(&core->finishing);
    return s && s->ended.finish.phase == KVQ__FINISH_PACKS ? s : NULL;
}

void kvq__finish_packed(struct kvq__session *s)
{
    if (s->ended.finish.phase == KVQ__FINISH_PACKS && !is_yet_to_pack(s))
        s->ended.finish.phase = KVQ__FINISH_SEALS;
}

bool kvq__finish_poll(struct kvq__core *core)
{
    struct kvq__session *s = TAILQ_FIRST(&core->finishing);
    if (!s || s->ended.finish.phase == KVQ__FINISH_PACKS)
        return false;
    if (s->ended.finish.phase == KVQ__FINISH_QUEUED)
        prepare_finishing(s);
    else
        leave_pages(s);
    return true;
}
