// SPDX-License-Identifier: Apache-2.0
//
// Prompts that are attended in full precision: nothing of them is packed before they have ended,
// if there is memory for that. Where somebody else is refused a block they give way: what is due
// without that is packed at once, and its raw blocks go. See evict.h.
#include <assert.h>

#include "daemon/core/session/activity.h"
#include "daemon/core/session/exact.h"
#include "daemon/core/session/group.h"
#include "daemon/core/state.h"

// ---- At open ----

// Memory of so many tokens while nothing of them is packed.
static uint64_t unpacked_bytes(const struct kvq__session *s, uint64_t tokens)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i))
            bytes += s->layers[i].raw_bytes + s->layers[i].packed_bytes;
    return bytes * kvq__pages_of(tokens);
}

uint64_t kvq__exact_fits(const struct kvq__session *s, uint64_t prompt_tokens)
{
    uint64_t most = s->pool->budget, limit = s->ns->quota.limit[kvq__pool_limit(s->pool)];
    if (limit && limit < most)
        most = limit;
    bool fits = unpacked_bytes(s, prompt_tokens) <= most / KVQ_EXACT_PROMPT_SHARE;
    return fits ? prompt_tokens : 0;
}

// ---- What a prompt holds ----

// Bytes of the raw blocks that the session would not have if its prompt were packed as it comes. Of
// a session that gives way: bytes that are yet to be freed.
static uint64_t held_bytes(const struct kvq__session *s)
{
    uint64_t bytes = 0;
    assert(!kvq__is_offloaded(s));
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        uint64_t first = kvq__packed_early(s, l, s->floor) / KVQ_BLOCK_TOKENS;
        if (kvq__layer_owns(s, i) && first > l->raw_page)
            bytes += (first - l->raw_page) * l->raw_bytes;
    }
    return bytes;
}

uint64_t kvq__exact_bytes(const struct kvq__session *s)
{
    return s->prompt.exact && !kvq__is_offloaded(s) ? held_bytes(s) : 0;
}

// Whether prompt.exact keeps no token in 16 bits any more.
static bool exact_prompt_has_ended(const struct kvq__session *s)
{
    return s->prompt.packs_early || s->floor >= s->prompt.exact + s->max_rollback;
}

void kvq__exact_note(struct kvq__session *s)
{
    bool within = s->tokens > 0 && s->tokens <= s->prompt.exact + 2 * (uint64_t)s->max_rollback;
    assert(!s->prompt.listed || s->published);
    if (s->prompt.listed && exact_prompt_has_ended(s) && held_bytes(s) == 0)
        kvq__exact_leave(s); // for good, or until it goes back
    if (!s->published || s->prompt.listed || !s->prompt.exact || !within)
        return;
    TAILQ_INSERT_TAIL(&s->core->prompts.list, s, prompt.link);
    s->core->prompts.n++;
    s->prompt.listed = true;
}

void kvq__exact_leave(struct kvq__session *s)
{
    if (s->prompt.listed)
        TAILQ_REMOVE(&s->core->prompts.list, s, prompt.link);
    s->core->prompts.n -= s->prompt.listed;
    s->prompt.listed = false;
}

// ---- Giving way ----

static void pack_early(struct kvq__session *s)
{
    struct kvq__counts *counts = &s->core->counts;
    assert(s->prompt.gives_way && s->refs == 0);
    s->prompt.gives_way = false;
    if (!s->prompt.exact || kvq__is_offloaded(s) || s->dropped)
        return;
    counts->prompts_packed++;
    counts->prompts_packed_bytes += held_bytes(s);
    s->prompt.exact = 0;
    s->prompt.packs_early = true;
    kvq__pack_queue(s);
}

void kvq__exact_unused(struct kvq__session *s)
{
    // Requests under way have decided how they read it. What is stored or moved is left as it is.
    if (s->prompt.gives_way && !kvq__session_uses(s, KVQ__USES_PACK_PROMPT))
        pack_early(s);
}

// Whether background packing will free its raw blocks. On a GPU that waits for the writer's stream.
static bool packs_prompt(const struct kvq__session *s)
{
    return s->prompt.packs_early && s->pack.queued && !kvq__is_offloaded(s) && !s->pool->gpu;
}

enum {
    AT_ONCE = 16, // sessions that give way at once; more do at the next look
    LOOKS = 256,  // sessions that are looked at, and others at the next look
};

struct held_prompt {
    struct kvq__session *session;
    uint64_t bytes; // that it holds
};

// What prompts hold in the place of a shortage.
struct prompts {
    struct held_prompt largest[AT_ONCE]; // of sessions that do not give way yet, in this order
    uint32_t n;
    uint64_t there;  // bytes that all such sessions hold
    uint64_t coming; // bytes that sessions which give way will free
    bool sure;       // all of those are being packed
    bool some;       // there are others, which were not looked at
};

static void note_largest(struct prompts *p, struct kvq__session *s, uint64_t bytes)
{
    uint32_t at = p->n;
    assert(p->n <= AT_ONCE && bytes > 0);
    if (p->n < AT_ONCE)
        p->n++;
    else if (bytes > p->largest[AT_ONCE - 1].bytes)
        at = AT_ONCE - 1;
    else
        return;
    for (; at > 0 && p->largest[at - 1].bytes < bytes; at--)
        p->largest[at] = p->largest[at - 1];
    p->largest[at] = (struct held_prompt){s, bytes};
}

static void note_coming(struct prompts *p, const struct kvq__session *s, uint64_t bytes)
{
    assert(s->prompt.gives_way || s->prompt.packs_early);
    p->coming += bytes;
    p->sure &= packs_prompt(s);
}

// All shards of a session alike, so that they stay packed to the same count.
static void give_way(struct prompts *p, const struct kvq__shortage *shortage,
                     const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (!m || !m->prompt.exact || m->prompt.gives_way)
            continue;
        bool counts = kvq__shortage_counts(shortage, m) && (!m->pool->gpu || m->writer);
        uint64_t bytes = counts ? kvq__exact_bytes(m) : 0;
        m->prompt.gives_way = true;
        if (m->prompt.listed) {
            TAILQ_REMOVE(&m->core->prompts.list, m, prompt.link);
            TAILQ_INSERT_HEAD(&m->core->prompts.list, m, prompt.link);
        }
        kvq__exact_unused(m);
        if (bytes)
            note_coming(p, m, bytes);
    }
}

// False if the next look need not begin with it.
static bool look_at_prompt(struct kvq__session *s, const struct kvq__shortage *shortage,
                           struct prompts *p)
{
    assert(s->prompt.listed && s->published);
    uint64_t bytes = held_bytes(s);
    if (bytes == 0 && exact_prompt_has_ended(s)) { // for good, or until it goes back
        kvq__exact_leave(s);
        return true;
    }
    if (bytes == 0 || (s->pool->gpu && !s->writer) || !kvq__shortage_counts(shortage, s))
        return false;
    if (s->prompt.gives_way || s->prompt.packs_early) {
        note_coming(p, s, bytes);
        return true;
    }
    p->there += bytes;
    note_largest(p, s, bytes);
    return false;
}

// Those that give way already stand first. Of many others some are looked at, and what the rest
// hold is estimated from these.
static void look_at_prompts(struct kvq__core *core, const struct kvq__shortage *shortage,
                            struct prompts *p)
{
    struct kvq__session *s = TAILQ_FIRST(&core->prompts.list), *next;
    uint32_t n = core->prompts.n, looks = 0;
    p->some = n > LOOKS;
    for (; s && looks < n && looks < LOOKS; looks++, s = next) {
        next = TAILQ_NEXT(s, prompt.link);
        core->lookup.looks++;
        core->evict.work += s->n_layers;
        if (look_at_prompt(s, shortage, p) || n <= LOOKS)
            continue;
        TAILQ_REMOVE(&core->prompts.list, s, prompt.link);
        TAILQ_INSERT_TAIL(&core->prompts.list, s, prompt.link);
    }
    if (looks < n)
        p->there += p->there / looks * (n - looks);
}

enum kvq__help kvq__exact_give_way(struct kvq__core *core,
                                   const struct kvq__eviction_request *asked, uint64_t free,
                                   uint64_t others, uint64_t *reach)
{
    struct prompts p = {.sure = true};
    look_at_prompts(core, asked->shortage, &p);
    *reach = p.there + p.coming ? p.there + p.coming + free + others : 0;
    const enum kvq__help none =
        p.some ? KVQ__HELP_LATER : KVQ__HELP_NONE;        // others at the next look
    if (p.there + p.coming + free + others < asked->need) // nobody gives way in vain
        return none;
    // What is free may be of no use, lying in extents of other namespaces.
    for (uint32_t i = 0; i < p.n && (p.coming == 0 || p.coming + free < asked->need); i++) {
        const struct kvq__session *s = p.largest[i].session;
        if (!s->prompt.gives_way && !s->prompt.packs_early) // else it does with another shard
            give_way(&p, asked->shortage, s);
    }
    if (p.coming == 0)
        return none;
    return p.sure ? KVQ__HELP_NOW : KVQ__HELP_LATER;
}
