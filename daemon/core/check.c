// SPDX-License-Identifier: Apache-2.0
//
// See check.h.
#include "daemon/core/check.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/core/residency/move.h"
#include "daemon/core/residency/saved.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/table.h"
#include "daemon/core/state.h"

// Sheets that several sessions have are at most half as many.
enum { KVQ__CHECK_SHEETS = 1 << 14, KVQ__CHECK_NAMESPACES = 64 };

// References to a block, as they were counted.
struct tally {
    const struct kvq__block *block;
    uint64_t refs, check;
};

// A sheet that several have: who has it first, and how many do.
struct shared_sheet {
    const struct kvq__sheet *sheet;
    const void *first;
    uint32_t owners;
    uint64_t check;
};

struct kvq__check {
    void (*broken)(const char *file, int line, const char *what);
    uint64_t n_checks; // entries of earlier ones, in both tables, are free
    struct {
        struct tally *tallies; // by a hash of blocks' addresses
        uint64_t room, used;
    } counted;
    struct shared_sheet sheets[KVQ__CHECK_SHEETS]; // by a hash of their addresses
    // What each namespace had under each limit in the last check, by its place in the list.
    uint64_t seen[KVQ__CHECK_NAMESPACES][KVQ__LIMITS];
};

#define HOLDS(c, condition) ((condition) ? (void)0 : (c)->broken(__FILE__, __LINE__, #condition))

struct kvq__check *kvq__check_new(void (*broken)(const char *file, int line, const char *what))
{
    struct kvq__check *c = calloc(1, sizeof *c);
    if (c)
        c->broken = broken;
    return c;
}

void kvq__check_free(struct kvq__check **check)
{
    if (*check)
        free((*check)->counted.tallies);
    free(*check);
    *check = NULL;
}

void kvq__check_forget(struct kvq__check *c)
{
    memset(c->seen, 0, sizeof c->seen);
}

// ---- Sheets of page tables ----

static uint32_t sheet_place(struct kvq__check *c, const struct kvq__sheet *sheet)
{
    uint32_t n = KVQ__CHECK_SHEETS, tries = 0;
    uint32_t at = (uint32_t)((uintptr_t)sheet >> 6) * 0x9e3779b1u % n;
    while (c->sheets[at].check == c->n_checks && c->sheets[at].sheet != sheet) {
        at = (at + 1) % n;
        HOLDS(c, ++tries < n);
    }
    return at;
}

static void note_sheets(struct kvq__check *c, struct kvq__sheet *const *all, uint32_t n,
                        const void *owner)
{
    for (uint32_t i = 0; i < n; i++) {
        HOLDS(c, all[i]->refs > 0);
        if (all[i]->refs == 1)
            continue;
        uint32_t at = sheet_place(c, all[i]);
        if (c->sheets[at].check != c->n_checks) {
            c->sheets[at].sheet = all[i];
            c->sheets[at].first = owner;
            c->sheets[at].owners = 0;
            c->sheets[at].check = c->n_checks;
        }
        c->sheets[at].owners++;
    }
}

// Whether the sheet's blocks are to be counted where this one has it.
static bool counts(struct kvq__check *c, const struct kvq__sheet *sheet, const void *owner)
{
    return sheet->refs == 1 || c->sheets[sheet_place(c, sheet)].first == owner;
}

// Likewise of a move's reference there.
static bool counts_moved(struct kvq__check *c, const struct kvq__moved *m, uint64_t ref)
{
    uint64_t page = ref % (2 * (uint64_t)m->n_pages + 1) / 2; // behind the last one: the extras
    return page == m->n_pages || counts(c, m->sheets[page / KVQ__SHEET_PAGES], m);
}

// Those that have ended, first the ones that are being finished; NULL: the first.
static const struct kvq__session *ended_after(const struct kvq__core *core,
                                              const struct kvq__session *s)
{
    const struct kvq__session *next = s ? TAILQ_NEXT(s, link) : TAILQ_FIRST(&core->finishing);
    return next || (s && s->ended.listed) ? next : TAILQ_FIRST(&core->freeing.ended);
}

static void audit_sheets(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__namespace *ns;
    const struct kvq__session *s;
    const struct kvq__move *move;
    c->n_checks++;
    TAILQ_FOREACH (ns, &core->namespaces, link)
        TAILQ_FOREACH (s, &ns->sessions, link)
            note_sheets(c, s->sheets, s->n_sheets, s);
    for (s = ended_after(core, NULL); s; s = ended_after(core, s))
        note_sheets(c, s->sheets, s->n_sheets, s);
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        for (uint32_t i = 0; i < move->n; i++)
            note_sheets(c, move->moved[i].sheets, move->moved[i].n_sheets, &move->moved[i]);
    for (uint32_t i = 0; i < KVQ__CHECK_SHEETS; i++)
        HOLDS(c,
              c->sheets[i].check != c->n_checks || c->sheets[i].owners == c->sheets[i].sheet->refs);
}

// ---- The count ----

static struct tally *tally_of_block(const struct kvq__check *c, const struct kvq__block *b)
{
    uint64_t at = ((uintptr_t)b >> 5) * 0x9e3779b97f4a7c15u >> 20;
    while (c->counted.tallies[at % c->counted.room].check == c->n_checks &&
           c->counted.tallies[at % c->counted.room].block != b)
        at++;
    return &c->counted.tallies[at % c->counted.room];
}

static void grow_count(struct kvq__check *c)
{
    struct tally *old = c->counted.tallies;
    uint64_t n = c->counted.room;
    c->counted.room = n ? 2 * n : 1 << 12;
    c->counted.tallies = calloc(c->counted.room, sizeof *c->counted.tallies);
    HOLDS(c, c->counted.tallies);
    for (uint64_t i = 0; i < n; i++)
        if (old[i].check == c->n_checks)
            *tally_of_block(c, old[i].block) = old[i];
    free(old);
}

static void see_ref(struct kvq__check *c, const struct kvq__ref *ref)
{
    if (!ref->block)
        return;
    if (2 * c->counted.used >= c->counted.room)
        grow_count(c);
    struct tally *t = tally_of_block(c, ref->block);
    if (t->check != c->n_checks) {
        *t = (struct tally){ref->block, 0, c->n_checks};
        c->counted.used++;
    }
    t->refs++;
}

// ---- Who holds some ----

static void see_page(struct kvq__check *c, const struct kvq__pageref *page)
{
    see_ref(c, &page->raw);
    see_ref(c, &page->packed);
}

// A client can only map extents that have a number for it.
static void see_shown(struct kvq__check *c, const struct kvq__ref *ref)
{
    HOLDS(c, !ref->block || ref->block->extent->serial > 0);
    see_ref(c, ref);
}

static void see_table(struct kvq__check *c, const struct kvq__table *t)
{
    for (uint32_t i = 0; i < t->memory.layers; i++) {
        see_shown(c, &t->layers[i].extras);
        for (uint32_t p = 0; p < t->memory.pages; p++) {
            see_shown(c, &t->layers[i].pages[p].raw);
            see_shown(c, &t->layers[i].pages[p].packed);
        }
    }
}

static void see_tables(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__client *client;
    const struct kvq__table *t;
    TAILQ_FOREACH (client, &core->clients, link)
        LIST_FOREACH (t, &client->tables, client_link)
            see_table(c, t);
    LIST_FOREACH (t, &core->closed_tables, client_link)
        see_table(c, t);
}

static void see_any(void *context, const struct kvq__ref *ref)
{
    see_ref(context, ref);
}

static void see_prefixes(struct kvq__check *c, const struct kvq__prefixes *prefixes)
{
    const struct kvq__node *node;
    for (uint32_t b = 0; b < prefixes->n_buckets; b++)
        LIST_FOREACH (node, &prefixes->buckets[b], link)
            for (uint32_t i = 0; i < node->n_layers; i++)
                see_page(c, &node->pages[i]);
}

static void see_session(struct kvq__check *c, const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        see_ref(c, &s->layers[i].extras);
        for (uint32_t p = 0; kvq__layer_owns(s, i) && p < s->n_pages; p++)
            if (counts(c, s->sheets[p / KVQ__SHEET_PAGES], s))
                see_page(c, kvq__page(&s->layers[i], p));
    }
}

// What moves have taken, or have yet to give back.
static void see_moves(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__move *move;
    for (move = kvq__move_after(core, NULL); move; move = kvq__move_after(core, move))
        for (uint32_t i = 0; i < move->n; i++) {
            const struct kvq__moved *m = &move->moved[i];
            for (uint64_t ref = 0; ref < kvq__moved_refs(m); ref++)
                if (counts_moved(c, m, ref))
                    see_ref(c, kvq__moved_there(m, ref));
        }
}

static void count_references(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__namespace *ns;
    const struct kvq__session *s;
    c->counted.used = 0;
    if (c->counted.room == 0)
        grow_count(c);
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        TAILQ_FOREACH (s, &ns->sessions, link)
            see_session(c, s);
        see_prefixes(c, &ns->prefixes);
    }
    for (s = ended_after(core, NULL); s; s = ended_after(core, s))
        see_session(c, s);
    see_tables(c, core);
    kvq__saves_each_ref(core, see_any, c);
    kvq__restores_each_ref(core, see_any, c);
    see_moves(c, core);
}

// ---- What was counted ----

static uint64_t references_to(struct kvq__check *c, const struct kvq__block *b)
{
    const struct tally *t = tally_of_block(c, b);
    return t->check == c->n_checks ? t->refs : 0;
}

static uint64_t references_to_all(struct kvq__check *c, const struct kvq__namespace *ns)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < c->counted.room; i++) {
        const struct tally *t = &c->counted.tallies[i];
        if (t->check == c->n_checks && t->block->extent->owner->ns == ns)
            n += t->refs;
    }
    return n;
}

// Deferred frees that belong to the extent; all of them must be unreferenced.
static uint32_t count_deferred(struct kvq__check *c, const struct kvq__core *core,
                               const struct kvq__extent *e)
{
    const struct kvq__block *b;
    uint32_t n = 0;
    TAILQ_FOREACH (b, &core->freeing.deferred, deferred_link) {
        HOLDS(c, b->refs == 0 && !b->free);
        n += b->extent == e;
    }
    return n;
}

// Each session that has given blocks up stands among the givers, and all of them are deferred
// frees.
static void audit_givers(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__session *s;
    const struct kvq__block *b;
    uint32_t givers = 0, given = 0, marked = 0;
    TAILQ_FOREACH (s, &core->freeing.givers, giver.link) {
        HOLDS(c, s->giver.listed);
        givers++;
        LIST_FOREACH (b, &s->giver.given, given_link) {
            HOLDS(c, b->refs == 0 && !b->free && b->retired.by == s->serial);
            given++;
        }
    }
    TAILQ_FOREACH (b, &core->freeing.deferred, deferred_link)
        marked += b->given_link.le_prev != NULL;
    HOLDS(c, givers == core->freeing.n_givers && given == marked);
}

// What the extent's blocks add up to.
struct cut {
    uint64_t at, used, refs, exempt, alone; // alone: of blocks that one index alone has
    uint32_t unreferenced, free[2]; // free: stretches of extents that hold what stays, what passes
};

static void audit_block(struct kvq__check *c, const struct kvq__block *b, struct cut *sum)
{
    const struct kvq__block *next = TAILQ_NEXT(b, beside);
    HOLDS(c, b->at == sum->at && b->bytes > 0 && b->bytes % 64 == 0 && b->at % 64 == 0);
    HOLDS(c, !b->free || (b->refs == 0 && !b->exempt && !(next && next->free)));
    HOLDS(c, b->refs == 0 || b->refs == references_to(c, b));
    HOLDS(c, b->indexes <= b->refs && (b->indexes > 0 || b->index == 0));
    sum->at += b->bytes;
    sum->used += b->free ? 0 : b->bytes;
    sum->refs += b->refs;
    sum->exempt += b->exempt ? b->bytes : 0;
    sum->alone += kvq__block_is_alone(b) ? b->bytes : 0;
    sum->unreferenced += b->refs == 0 && !b->free;
    sum->free[b->extent->passing] += b->free;
}

static void audit_extent(struct kvq__check *c, const struct kvq__core *core,
                         const struct kvq__arena *arena, const struct kvq__extent *e,
                         struct cut *sum)
{
    const struct kvq__block *b;
    struct cut cut = {0};
    HOLDS(c, e->owner == arena && e->last == arena->ns);
    HOLDS(c, e->serial <= arena->last_serial && (e->serial > 0 || e->passing));
    TAILQ_FOREACH (b, &e->blocks, beside) {
        HOLDS(c, b->extent == e);
        audit_block(c, b, &cut);
    }
    HOLDS(c, cut.at == e->size->bytes && cut.used == e->used_bytes && cut.used > 0);
    HOLDS(c, cut.unreferenced == count_deferred(c, core, e));
    sum->used += cut.used;
    sum->refs += cut.refs;
    sum->exempt += cut.exempt;
    sum->alone += cut.alone;
    for (int i = 0; i < 2; i++)
        sum->free[i] += cut.free[i];
}

static uint32_t tree_size(struct kvq__check *c, const struct kvq__block *b)
{
    if (!b)
        return 0;
    HOLDS(c, b->free);
    return 1 + tree_size(c, b->free_entry.rbe_left) + tree_size(c, b->free_entry.rbe_right);
}

// Adds up the namespace's blocks in one pool.
static void audit_arena(struct kvq__check *c, const struct kvq__core *core,
                        const struct kvq__arena *arena, struct cut *sum)
{
    const struct kvq__extent *e;
    uint64_t taken[2] = {0};
    sum->free[0] = sum->free[1] = 0;
    TAILQ_FOREACH (e, &arena->extents, link) {
        audit_extent(c, core, arena, e, sum);
        taken[e->passing] += e->size->bytes;
    }
    for (int i = 0; i < 2; i++) {
        HOLDS(c, sum->free[i] == tree_size(c, RB_ROOT(&arena->free[i])));
        HOLDS(c, taken[i] == arena->extents_taken[i]);
    }
}

// The extents of a pool: bytes, those in huge pages, and how many of each size.
struct extents {
    uint64_t bytes, huge;
    uint32_t n[KVQ__EXTENT_SIZES];
};

static void count_extent(struct kvq__check *c, const struct kvq__pool *pool,
                         const struct kvq__extent *e, struct extents *sum)
{
    const struct kvq__extent_size *size = e->size;
    uint64_t units = size->bytes / kvq__extent_unit(pool), at = (e->number - size->first) / units;
    HOLDS(c, size >= pool->sizes && size < pool->sizes + pool->n_sizes);
    HOLDS(c, e->number >= size->first && (e->number - size->first) % units == 0);
    HOLDS(c, at < size->most && (size->taken[at / 64] >> at % 64 & 1));
    sum->bytes += size->bytes;
    sum->huge += e->memory.huge ? size->bytes : 0;
    sum->n[size - pool->sizes]++;
}

static struct extents count_extents(struct kvq__check *c, const struct kvq__core *core,
                                    const struct kvq__pool *pool)
{
    const struct kvq__namespace *ns;
    const struct kvq__extent *e;
    struct extents sum = {0};
    TAILQ_FOREACH (e, &pool->empty, link) {
        HOLDS(c, e->used_bytes == 0 && !e->owner && SLIST_EMPTY(&e->records));
        count_extent(c, pool, e, &sum);
    }
    TAILQ_FOREACH (ns, &core->namespaces, link)
        TAILQ_FOREACH (e, &ns->arenas[pool - core->pools].extents, link)
            count_extent(c, pool, e, &sum);
    return sum;
}

// No two extents have a number: there are as many numbers taken as extents.
static void audit_sizes(struct kvq__check *c, const struct kvq__pool *pool,
                        const struct extents *sum)
{
    for (uint32_t i = 0; i < pool->n_sizes; i++) {
        const struct kvq__extent_size *size = &pool->sizes[i];
        uint32_t taken = 0;
        for (uint32_t word = 0; 64 * word < size->most; word++)
            taken += (uint32_t)__builtin_popcountll(size->taken[word]);
        HOLDS(c, size->n == sum->n[i] && size->n == taken && size->n <= size->most);
    }
}

static void audit_pools(struct kvq__check *c, const struct kvq__core *core)
{
    for (uint32_t i = 0; i < core->n_pools; i++) {
        const struct kvq__pool *pool = &core->pools[i];
        struct extents extents = count_extents(c, core, pool);
        uint64_t alone = 0;
        const struct kvq__namespace *ns;
        TAILQ_FOREACH (ns, &core->namespaces, link)
            alone += ns->arenas[i].index_bytes;
        HOLDS(c, alone == pool->index_bytes);
        HOLDS(c, extents.bytes == pool->extents_taken && pool->extents_taken <= pool->budget);
        HOLDS(c, extents.huge == pool->huge_bytes);
        audit_sizes(c, pool, &extents);
    }
    audit_givers(c, core);
}

// ---- Counting everything anew ----

struct counting {
    const struct kvq__core *core;
    uint64_t used, tokens;
    uint32_t on[1 + KVQ_MAX_GPUS], unsaved;
    uint32_t sessions, prepared, namespaces, offloaded;
};

// A session that is away has blocks only while they go, or before all of them are there.
static void audit_away(struct kvq__check *c, const struct kvq__session *s,
                       const struct kvq__layer *l)
{
    HOLDS(c,
          !l->packer && !l->loading && !kvq__in_step(s) && !kvq__is_unsaved(s) && s->saving.stored);
    HOLDS(c,
          !s->exclusive && !s->pack.queued && !s->move && !kvq__is_read(s) && s->entries.tail == 0);
    HOLDS(c, s->refs == (s->restore != NULL));
    if (!s->park && !s->restore)
        HOLDS(c, s->n_pages == 0 && !s->sheets && !l->sheets && !l->extras.data);
}

static bool has_room(const struct kvq__session *s, const struct kvq__layer *l, uint32_t page)
{
    uint32_t tokens = kvq__page_part(s->tokens + s->in_step.tokens, page);
    return kvq__page(l, page)->raw.block->bytes >= kvq_raw_bytes(&l->raw_layout, tokens);
}

static void audit_layer(struct kvq__check *c, const struct kvq__session *s,
                        const struct kvq__layer *l)
{
    uint64_t packed = kvq__packed_at(s, l, s->floor);
    uint64_t from = kvq__follows_loading(s, (uint32_t)(l - s->layers));
    HOLDS(c, l->loading == from || (l->loading == 1 && s->restore && from == 0 && s->n_loading));
    HOLDS(c, l->first_page <= l->raw_page && l->raw_page <= s->n_pages);
    HOLDS(c, l->packed <= s->tokens && (!l->packer || s->refs > 0));
    HOLDS(c, !!l->extras.data == (s->n_pages && l->extras_bytes));
    for (uint32_t p = 0; p < s->n_pages; p++) {
        bool kept = p >= l->first_page;
        HOLDS(c, !!kvq__page(l, p)->raw.data == (kept && p >= l->raw_page));
        bool packs = p < kvq__packed_pages(s, l, s->tokens + s->in_step.tokens);
        HOLDS(c, kept || !kvq__page(l, p)->packed.data);
        const struct kvq__block *packed_block = kvq__page(l, p)->packed.block;
        HOLDS(c, !packed_block || packed_block->bytes == kvq__packed_block_bytes(l, p));
        HOLDS(c, !kept || !packs || kvq__page(l, p)->packed.data);
        HOLDS(c, !kept || p < l->raw_page || has_room(s, l, p));
    }
    HOLDS(c, l->raw_page <= l->first_page || (uint64_t)l->raw_page * KVQ_BLOCK_TOKENS <= packed);
}

// A shard stands in its group, and of those of a group at least one has yet to end its step.
static void audit_group(struct kvq__check *c, const struct kvq__session *s)
{
    uint32_t prepared = 0;
    HOLDS(c,
          !s->group == (s->shards == 1 || s->name[0] == 0) && kvq__group_member(s, s->shard) == s);
    HOLDS(c, !s->in_step.prepared || (s->group && kvq__group_is_open(s) && !s->step));
    for (uint32_t i = 0; s->group && i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        HOLDS(c, !m || (m->group == s->group && m->shard == i && m->shards == s->shards &&
                        m->ns == s->ns && strcmp(m->name, s->name) == 0));
        prepared += m && m->in_step.prepared;
    }
    HOLDS(c, prepared < s->shards);
}

static void audit_session(struct kvq__check *c, const struct kvq__session *s)
{
    const struct kvq__handle *h;
    uint32_t readers = 0, writers = 0, owned = 0;
    LIST_FOREACH (h, &s->handles, link) {
        HOLDS(c, h->used && !h->taken && h->session == s);
        readers += h->read_only;
        writers += !h->read_only;
    }
    HOLDS(c, readers == s->readers && writers == (s->writer != NULL) && !s->dropped);
    HOLDS(c, kvq__is_offloaded(s) || s->n_pages == kvq__pages_of(s->tokens + s->in_step.tokens));
    audit_group(c, s);
    HOLDS(c, s->floor <= s->tokens && s->tokens - s->floor <= s->max_rollback);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        owned += kvq__layer_owns(s, i);
        if (kvq__layer_owns(s, i) && kvq__is_offloaded(s))
            audit_away(c, s, &s->layers[i]);
        else if (kvq__layer_owns(s, i))
            audit_layer(c, s, &s->layers[i]);
    }
    HOLDS(c, owned == s->n_owned);
}

static uint64_t audit_node(struct kvq__check *c, const struct kvq__node *node)
{
    uint64_t bytes = 0, alone = 0;
    HOLDS(c, node->page == (node->parent ? node->parent->page + 1 : 0));
    HOLDS(c, !node->parent || (node->parent->children > 0 && node->parent->pool == node->pool &&
                               memcmp(node->parent->layers, node->layers, KVQ__HASH_BYTES) == 0));
    for (uint32_t i = 0; i < node->n_layers; i++) {
        const struct kvq__pageref *page = &node->pages[i];
        const struct kvq__block *b = page->packed.block ? page->packed.block : page->raw.block;
        HOLDS(c, !page->packed.block || !page->raw.block);
        HOLDS(c, !b || b->extent->owner->pool == node->pool);
        HOLDS(c, !b || b->indexes > 0);
        bytes += b ? b->bytes : 0;
        alone += b && b->refs == 1 ? b->bytes : 0;
    }
    HOLDS(c, bytes == node->bytes && alone == node->alone.bytes);
    return bytes;
}

// Every node is in the table and, without children, among the leaves in the order of their use.
static void audit_prefixes(struct kvq__check *c, const struct kvq__prefixes *p)
{
    const struct kvq__node *node;
    const struct kvq__alone *a;
    uint64_t bytes = 0, alone = 0, last = 0;
    uint32_t n = 0, children = 0, with_parent = 0, leaves = 0, childless = 0;
    for (uint32_t b = 0; b < p->n_buckets; b++)
        LIST_FOREACH (node, &p->buckets[b], link) {
            bytes += audit_node(c, node);
            children += node->children;
            with_parent += node->parent != NULL;
            childless += node->children == 0;
            n++;
        }
    TAILQ_FOREACH (node, &p->leaves, leaf) {
        HOLDS(c, node->children == 0 && node->used_at >= last);
        last = node->used_at;
        leaves++;
    }
    for (uint32_t i = 0; i < 2; i++)
        TAILQ_FOREACH (a, &p->alone.lists[i], link)
            alone += a->leaf == i ? a->bytes : 0;
    HOLDS(c, n == p->n_nodes && bytes == p->bytes && alone == p->alone.bytes);
    HOLDS(c, children == with_parent && leaves == childless);
}

// No limit is ever exceeded, and what is above one that was lowered never grows.
static void audit_limits(struct kvq__check *c, const struct kvq__namespace *ns, uint64_t *had)
{
    for (int i = 0; i < KVQ__LIMITS; i++) {
        uint64_t limit = ns->quota.limit[i], counted = ns->used[i] - ns->exempt[i];
        HOLDS(c, ns->exempt[i] <= ns->used[i]);
        HOLDS(c, limit == 0 || counted <= limit || counted <= had[i]);
        had[i] = counted;
    }
}

// Where recent.c has put it.
static void audit_lists(struct kvq__check *c, const struct kvq__session *s)
{
    HOLDS(c, s->published && (s->last_used.listed || s->n_pages == 0));
    HOLDS(c, (s->saving.list != KVQ__SAVED) == (s->name[0] && kvq__is_unsaved(s)));
}

static void audit_namespace(struct kvq__check *c, struct counting *t,
                            const struct kvq__namespace *ns)
{
    const struct kvq__session *s;
    uint64_t used[KVQ__LIMITS] = {0}, exempt[KVQ__LIMITS] = {0}, refs = 0, sessions = 0;
    for (uint32_t i = 0; i < t->core->n_pools; i++) {
        const struct kvq__arena *arena = &ns->arenas[i];
        enum kvq__limit which = kvq__pool_limit(&t->core->pools[i]);
        struct cut sum = {0};
        HOLDS(c, arena->ns == ns && arena->pool == &t->core->pools[i]);
        audit_arena(c, t->core, arena, &sum);
        HOLDS(c, sum.alone == arena->index_bytes);
        used[which] += sum.used;
        exempt[which] += sum.exempt;
        refs += sum.refs;
    }
    HOLDS(c, refs == references_to_all(c, ns));
    for (int i = KVQ__HOST_BYTES; i <= KVQ__DEVICE_BYTES; i++)
        HOLDS(c, exempt[i] == ns->exempt[i] && used[i] == ns->used[i]);
    HOLDS(c, t->namespaces < KVQ__CHECK_NAMESPACES);
    audit_limits(c, ns, c->seen[t->namespaces++]);
    TAILQ_FOREACH (s, &ns->sessions, link) {
        audit_session(c, s);
        audit_lists(c, s);
        t->tokens += s->tokens;
        t->unsaved += s->saving.list != KVQ__SAVED;
        t->on[s->pool - t->core->pools]++;
        t->prepared += s->in_step.prepared;
        t->offloaded += kvq__is_offloaded(s);
        sessions++;
    }
    HOLDS(c, sessions == ns->used[KVQ__SESSIONS]);
    audit_prefixes(c, &ns->prefixes);
    t->used += used[KVQ__HOST_BYTES] + used[KVQ__DEVICE_BYTES];
    t->sessions += (uint32_t)sessions;
}

static void audit_clients(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__client *client;
    const struct kvq__session *s;
    uint32_t clients = 0, steps = 0;
    TAILQ_FOREACH (client, &core->clients, link) {
        uint32_t named = 0;
        clients++;
        for (uint32_t i = 0; i < KVQ_MAX_STEPS; i++) {
            const struct kvq__step *step = &client->steps[i];
            if (!step->number)
                continue;
            named++;
            HOLDS(c, !LIST_EMPTY(&step->sessions) && step->queue->client == client);
            LIST_FOREACH (s, &step->sessions, in_step.link)
                HOLDS(c, s->step == step && s->writer && s->writer->client == client);
        }
        HOLDS(c, client->n_steps - named <= client->n_queues); // STEPs of queues
        steps += client->n_steps;
    }
    HOLDS(c, clients == core->n_clients && steps == core->n_steps);
}

// All that is to be packed has room, and is there.
static void audit_finishing(struct kvq__check *c, const struct kvq__session *s)
{
    bool first = s == TAILQ_FIRST(&s->core->finishing);
    HOLDS(c, s->dropped && !s->pool->gpu && s->n_loading == 0 && !s->core->draining);
    HOLDS(c, s->ended.finish.due <= s->ids.known && s->ended.finish.due <= s->tokens);
    HOLDS(c, first || s->ended.finish.phase == KVQ__FINISH_QUEUED);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i) || l->packed_bytes == 0)
            continue;
        HOLDS(c, l->extras_bytes == 0 && l->raw_page <= kvq__pages_of(l->packed));
        for (uint32_t p = l->first_page; p < s->ended.finish.due / KVQ_BLOCK_TOKENS; p++)
            HOLDS(c, kvq__page(l, p)->packed.data);
    }
}

// Nobody finds those that have ended; whoever is refused a block sees where some have pages.
static void audit_ended(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__namespace *ns;
    const struct kvq__session *s;
    for (uint32_t i = 0; i < core->n_pools; i++) {
        uint32_t n = 0, noted = 0;
        TAILQ_FOREACH (ns, &core->namespaces, link) {
            noted += ns->arenas[i].n_ended;
            for (s = ended_after(core, NULL); s; s = ended_after(core, s))
                n += s->ns == ns && s->pool == &core->pools[i] && s->n_pages > 0;
            HOLDS(c, n == noted);
        }
        HOLDS(c, noted == core->pools[i].n_ended);
    }
    for (s = ended_after(core, NULL); s; s = ended_after(core, s))
        HOLDS(c, s->ended.listed == !s->ended.finish.phase && LIST_EMPTY(&s->handles) && !s->park &&
                     !s->seal.listed && !s->last_used.listed && !s->timer.listed &&
                     !s->pack.queued && (s->ids.known == 0 || s->ended.finish.phase));
    TAILQ_FOREACH (s, &core->finishing, link)
        audit_finishing(c, s);
}

// Requests that wait claim the sessions that they name, and nobody else does.
static void audit_claims(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__namespace *ns;
    const struct kvq__session *s;
    const struct kvq__queue *q;
    struct kvq__handle *h;
    uint64_t claims = 0, claimed = 0;
    TAILQ_FOREACH (q, &core->room.waiters, waiter_link) {
        HOLDS(c, q->turn.claims == q->turn.listed);
        for (uint32_t i = 0; i < q->header.count; i++) {
            const struct kvq__session *of = q->work[i].claim.session;
            HOLDS(c, !of || (q->turn.listed && kvq__claims_have(of, q->turn.ticket)));
            claims += of != NULL;
            if (q->turn.listed && kvq__handle_get(q->client, q->entries[i].handle, &h) == 0)
                HOLDS(c, kvq__claims_have(h->session, q->turn.ticket));
        }
    }
    TAILQ_FOREACH (ns, &core->namespaces, link)
        TAILQ_FOREACH (s, &ns->sessions, link)
            claimed += s->evict.n_claims;
    HOLDS(c, claims == claimed);
}

// Those that wait for room there stand in the order of their tickets. How many these are.
static uint32_t audit_line(struct kvq__check *c, const struct kvq__line *line)
{
    const struct kvq__queue *q;
    uint64_t last = 0;
    uint32_t n = 0;
    TAILQ_FOREACH (q, &line->waiters, line_link) {
        HOLDS(c, q->turn.in_line && q->turn.line == line && q->turn.ticket > last);
        last = q->turn.ticket;
        n++;
    }
    return n;
}

static uint32_t audit_waits(struct kvq__check *c, const struct kvq__core *core,
                            const struct kvq__waits *waits, uint32_t *some)
{
    const struct kvq__queue *q;
    uint32_t n = 0;
    TAILQ_FOREACH (q, &core->room.waiters, waiter_link)
        n += q->turn.waits == waits;
    HOLDS(c, n == waits->n);
    *some += n > 0;
    return n;
}

static void audit_waiters(struct kvq__check *c, const struct kvq__core *core)
{
    const struct kvq__namespace *ns;
    uint32_t n = 0, waiting = 0;
    for (uint32_t i = 0; i < core->n_pools; i++)
        n += audit_line(c, &core->room.lines[i]);
    TAILQ_FOREACH (ns, &core->namespaces, link) {
        uint32_t waits = 0;
        for (uint32_t i = 0; i < KVQ__LIMITS; i++)
            n += audit_line(c, &ns->lines[i]) - audit_waits(c, core, &ns->at_limit[i], &waits);
        for (uint32_t i = 0; i < core->n_pools; i++)
            n -= audit_waits(c, core, &ns->at_pool[i], &waits);
        HOLDS(c, waits == ns->n_waits);
        waiting += waits > 0;
    }
    HOLDS(c, n == 0 && waiting == core->room.n_waiting);
    audit_claims(c, core);
}

void kvq__check_core(struct kvq__check *c, const struct kvq__core *core)
{
    struct counting t = {.core = core};
    const struct kvq__namespace *ns;
    audit_sheets(c, core);
    count_references(c, core);
    TAILQ_FOREACH (ns, &core->namespaces, link)
        audit_namespace(c, &t, ns);
    for (uint32_t i = 0; i < core->n_pools; i++)
        t.used -= core->pools[i].used_bytes;
    HOLDS(c, t.used == 0);
    HOLDS(c, t.sessions == core->n_sessions && t.prepared == core->n_prepared);
    HOLDS(c, t.offloaded == core->disk.n_offloaded);
    HOLDS(c, t.tokens == core->tokens && t.unsaved == core->unsaved.n);
    for (uint32_t i = 0; i < core->n_pools; i++)
        HOLDS(c, t.on[i] == core->pools[i].sessions);
    audit_pools(c, core);
    HOLDS(c, !TAILQ_EMPTY(&core->flights) || TAILQ_EMPTY(&core->freeing.deferred) ||
                 core->freeing.left == 0);
    audit_ended(c, core);
    audit_clients(c, core);
    audit_waiters(c, core);
}
