// SPDX-License-Identifier: Apache-2.0
//
// For core_kit.c alone: the references that the core's parts hold to blocks, counted in one walk.
#ifndef KVQ_TESTS_CORE_REFS_H
#define KVQ_TESTS_CORE_REFS_H

#include <stdlib.h>

#include "daemon/core/residency/saved_internal.h"
#include "daemon/core/session/table.h"
#include "tests/core/core_kit.h"
#include "tests/core/core_sheets.h"

// ---- The count ----

// By a hash of blocks' addresses. Entries of earlier counts are free.
static struct {
    struct tally {
        const struct kvq__block *block;
        uint64_t refs, count;
    } * tallies;
    uint64_t room, used, count;
} counted;

static struct tally *tally_of(const struct kvq__block *b)
{
    uint64_t at = ((uintptr_t)b >> 5) * 0x9e3779b97f4a7c15u >> 20;
    while (counted.tallies[at % counted.room].count == counted.count &&
           counted.tallies[at % counted.room].block != b)
        at++;
    return &counted.tallies[at % counted.room];
}

static void grow_count(void)
{
    struct tally *old = counted.tallies;
    uint64_t n = counted.room;
    counted.room = n ? 2 * n : 1 << 12;
    counted.tallies = calloc(counted.room, sizeof *counted.tallies);
    MUST(counted.tallies);
    for (uint64_t i = 0; i < n; i++)
        if (old[i].count == counted.count)
            *tally_of(old[i].block) = old[i];
    free(old);
}

static void see(const struct kvq__ref *ref)
{
    if (!ref->block)
        return;
    if (2 * counted.used >= counted.room)
        grow_count();
    struct tally *t = tally_of(ref->block);
    if (t->count != counted.count) {
        *t = (struct tally){ref->block, 0, counted.count};
        counted.used++;
    }
    t->refs++;
}

// ---- Who holds some ----

static void see_page(const struct kvq__pageref *page)
{
    see(&page->raw);
    see(&page->packed);
}

// A client can only map extents that have a number for it.
static void see_shown(const struct kvq__ref *ref)
{
    MUST(!ref->block || ref->block->extent->serial > 0);
    see(ref);
}

static void see_table(const struct kvq__table *t)
{
    for (uint32_t i = 0; i < t->memory.layers; i++) {
        see_shown(&t->layers[i].extras);
        for (uint32_t p = 0; p < t->memory.pages; p++) {
            see_shown(&t->layers[i].pages[p].raw);
            see_shown(&t->layers[i].pages[p].packed);
        }
    }
}

static void see_tables(const struct kvq__core *core)
{
    const struct kvq__client *c;
    const struct kvq__table *t;
    TAILQ_FOREACH (c, &core->clients, link)
        LIST_FOREACH (t, &c->tables, client_link)
            see_table(t);
    LIST_FOREACH (t, &core->closed_tables, client_link)
        see_table(t);
}

static void see_saves(const struct kvq__core *core)
{
    const struct kvq__save *save;
    const struct kvq__restore *restore;
    LIST_FOREACH (save, &core->saves, link)
        for (uint32_t i = 0; i < save->n_shards; i++)
            for (uint32_t j = 0; j < save->shards[i].n; j++)
                see(&save->shards[i].held[j].ref);
    LIST_FOREACH (restore, &core->restores, link)
        for (uint32_t i = 0; i < restore->n; i++)
            see(&restore->arriving[i].ref);
}

static void see_prefixes(const struct kvq__prefixes *prefixes)
{
    const struct kvq__node *node;
    for (uint32_t b = 0; b < prefixes->n_buckets; b++)
        LIST_FOREACH (node, &prefixes->buckets[b], link)
            for (uint32_t i = 0; i < node->n_layers; i++)
                see_page(&node->pages[i]);
}

static void see_session(const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        see(&s->layers[i].extras);
        for (uint32_t p = 0; kvq__layer_owns(s, i) && p < s->n_pages; p++)
            if (counts(s->sheets[p / KVQ__SHEET_PAGES], s))
                see_page(kvq__page(&s->layers[i], p));
    }
}

// What moves have taken, or have yet to give back.
static void see_moves(const struct kvq__core *core)
{
    const struct kvq__move *move;
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        for (uint32_t i = 0; i < move->n; i++) {
            const struct kvq__moved *m = &move->moved[i];
            for (uint64_t ref = 0; ref < kvq__moved_refs(m); ref++)
                if (counts_moved(m, ref))
                    see(kvq__moved_there(m, ref));
        }
}

static void count_references(const struct kvq__core *core)
{
    const struct kvq__namespace *ns;
    const struct kvq__session *s;
    counted.used = 0;
    counted.count++;
    if (counted.room == 0)
        grow_count();
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        TAILQ_FOREACH (s, &ns->sessions, link)
            see_session(s);
        see_prefixes(&ns->prefixes);
    }
    TAILQ_FOREACH (s, &core->ended, link)
        see_session(s);
    see_tables(core);
    see_saves(core);
    see_moves(core);
}

// ---- What was counted ----

static uint64_t references_to(const struct kvq__block *b)
{
    const struct tally *t = tally_of(b);
    return t->count == counted.count ? t->refs : 0;
}

static uint64_t references_to_all(const struct kvq__namespace *ns)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < counted.room; i++) {
        const struct tally *t = &counted.tallies[i];
        if (t->count == counted.count && t->block->extent->owner->ns == ns)
            n += t->refs;
    }
    return n;
}

#endif
