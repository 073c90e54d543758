// SPDX-License-Identifier: Apache-2.0
//
// Restores; see saved.h. What was saved is foreign: a session is built as if a client had asked for
// it, and its layers and counts are checked against each other.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/request/fork.h"
#include "daemon/core/request/step.h"
#include "daemon/core/residency/park.h"
#include "daemon/core/residency/residency.h"
#include "daemon/core/residency/saved_internal.h"
#include "daemon/core/session/activity.h"
#include "daemon/core/session/exact.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/open.h"
#include "daemon/core/session/work_stream.h"
#include "proto/sync.h"

#define NS_PER_SECOND 1000000000ull

// ---- The session as it was ----

// Codes of one codebook mean nothing with another.
static int check_books(const struct kvq__session *s, const struct kvq__saved *saved, char *text)
{
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (saved->layers[i].book && saved->layers[i].book != kvq__layer_book(s, &s->layers[i]))
            return kvq__fail(text, KVQ_E_FORMAT,
                             "session \"%s\" was saved with another codebook of the name that "
                             "layer %u's format %s has; put that one back, or drop the session",
                             saved->name, i, saved->layers[i].format.name);
    return 0;
}

// The V rotation to ask for so that a layer gets the one that it had.
static uint8_t asked_of(uint8_t v_rotation)
{
    return v_rotation == KVQ_V_ROT_ENGINE   ? KVQ__V_ENGINE
           : v_rotation == KVQ_V_ROT_DAEMON ? KVQ__V_DAEMON
                                            : KVQ__V_NONE;
}

static int build(struct kvq__core *core, struct kvq__namespace *ns,
                 const struct kvq__restore_spec *spec, struct kvq__session **out, char *text)
{
    const struct kvq__saved *saved = spec->saved;
    size_t bytes = saved->n_layers * sizeof(struct kvq__layer_row);
    struct kvq__layer_row *rows = kvq__allocate(core, bytes);
    const char *name = spec->prefix_tokens ? "" : saved->name;
    struct kvq__session_spec as = {
        .name = name,
        .model = saved->model,
        .salt = saved->salt,
        .adapter = saved->adapter,
        .place = spec->place,
        .layers = rows,
        .n_layers = saved->n_layers,
        .shard = saved->shard,
        .shards = saved->shards,
        .dtype = saved->dtype,
        .path = saved->path,
        .max_rollback = saved->max_rollback,
        .on_detach = spec->prefix_tokens ? KVQ__DETACH_DROP : saved->on_detach,
        .prompt_tokens = saved->prompt_tokens,
    };
    const struct kvq__session *first = name[0] ? kvq__session_named(ns, name) : NULL;
    if (!rows)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory to restore session \"%s\"", saved->name);
    for (uint32_t i = 0; i < saved->n_layers; i++) {
        rows[i] = saved->layers[i].row;
        rows[i].format = saved->layers[i].format.name;
        rows[i].exact = &saved->layers[i].format;
        rows[i].v_rotation = asked_of(saved->layers[i].v_rotation);
    }
    int rc = kvq__spec_check(&as, text);
    rc = rc || !first ? rc : kvq__shards_check(first, &as, text);
    rc = rc ? rc : kvq__namespace_room(ns, text);
    rc = rc ? rc : kvq__session_build(ns, &as, out, text);
    if (rc == 0 && (rc = check_books(*out, saved, text)) < 0)
        kvq__session_free(*out);
    kvq__deallocate(core, rows, bytes);
    return rc;
}

// A layer must have what a view at any count that is still possible may ask for, and nothing that
// the counts rule out. NULL, or what is wrong.
static const char *layer_fault(const struct kvq__session *s, const struct kvq__layer *l)
{
    uint64_t first = (uint64_t)l->first_page * KVQ_BLOCK_TOKENS;
    uint64_t raw = (uint64_t)l->raw_page * KVQ_BLOCK_TOKENS;
    uint64_t unit = l->format->unit_tokens;
    if (l->first_page > l->raw_page || l->raw_page > s->n_pages)
        return "pages that it cannot have";
    if (first > kvq__first_kept(l, s->floor) || (l->learn && !l->learned && first > 0))
        return "no pages that it needs";
    if (l->packed_bytes == 0)
        return l->raw_page != l->first_page || l->base || l->packed > first || l->learned
                   ? "packed tokens that its format does not have"
                   : NULL;
    if (l->packed < first)
        return "unpacked tokens in pages that it does not have";
    // Below a fork's base all units are due that its source had not packed; they stand there raw.
    if (l->base > s->floor || l->base % unit || l->packed % unit)
        return "a base that it cannot have";
    if (l->learn && l->packed && !l->learned)
        return "packed tokens of which it has not learned";
    uint64_t due = kvq__packed_at(s, l, s->floor + s->max_rollback); // before it was truncated
    uint64_t final = s->floor / unit * unit; // a fork may have these units from its source
    due = kvq__max(due, final);
    if (l->packed > kvq__max(due, first) || l->packed > s->tokens)
        return "more packed tokens than are due";
    if (raw > first && (raw > l->packed || raw > kvq__packed_at(s, l, s->floor)))
        return "no raw tokens where it needs them";
    return l->learned && !l->learn ? "something learned, which its format does not" : NULL;
}

static int refuse_layer(const struct kvq__session *s, uint32_t layer, const char *why, char *text)
{
    return kvq__fail(text, KVQ_E_DAMAGED,
                     "what was stored of session \"%s\" makes no sense: layer %u has %s; drop it, "
                     "or restore it from an export",
                     s->name, layer, why);
}

static int check_restored_counts(const struct kvq__session *s, char *text)
{
    if (s->prompt.exact && s->prompt.exact != s->prompt.tokens)
        return kvq__fail(text, KVQ_E_DAMAGED,
                         "what was stored of session \"%s\" makes no sense: %llu tokens of a "
                         "prompt of %llu are to be read in 16 bits; it can be all of them or none",
                         s->name, (unsigned long long)s->prompt.exact,
                         (unsigned long long)s->prompt.tokens);
    if (s->tokens <= KVQ_MAX_SESSION_TOKENS && s->floor <= s->tokens &&
        s->tokens - s->floor <= s->max_rollback)
        return 0;
    return kvq__fail(text, KVQ_E_DAMAGED,
                     "what was stored of session \"%s\" makes no sense: %llu tokens (%d at most) "
                     "that can go back to %llu with a max_rollback of %u",
                     s->name, (unsigned long long)s->tokens, KVQ_MAX_SESSION_TOKENS,
                     (unsigned long long)s->floor, s->max_rollback);
}

static int set_layers(struct kvq__session *s, const struct kvq__saved *saved, char *text)
{
    const char *why;
    s->n_pages = kvq__pages_of(s->tokens);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__saved_layer *from = &saved->layers[i];
        struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        l->first_page = from->first_page;
        l->raw_page = from->raw_page;
        l->base = from->base;
        l->packed = from->packed;
        l->learned = from->learned;
        if ((why = layer_fault(s, l)))
            return refuse_layer(s, i, why, text);
    }
    return 0;
}

static int set_counts(struct kvq__session *s, const struct kvq__saved *saved, char *text)
{
    uint64_t most = UINT64_MAX / NS_PER_SECOND;
    s->prompt.exact = saved->exact_tokens; // what is packed was decided by it
    kvq__session_count(s, saved->tokens);
    s->floor = saved->floor;
    s->saturated = saved->saturated;
    s->spec.keep_ns = kvq__min(saved->keep_seconds, most) * NS_PER_SECOND;
    snprintf(s->composed.name, sizeof s->composed.name, "%s", saved->own_format);
    int rc = check_restored_counts(s, text);
    return rc ? rc : set_layers(s, saved, text);
}

// ---- A cut session, if not all is good ----

static void cut_layer(struct kvq__session *s, struct kvq__layer *l, uint64_t at, uint64_t floor)
{
    uint64_t final = floor / l->format->unit_tokens * l->format->unit_tokens, base = 0;
    uint32_t whole = (uint32_t)(at / KVQ_BLOCK_TOKENS);
    kvq__fork_base(s, l, at, &base);
    l->base = base;
    l->packed = kvq__min(final, l->packed);
    l->learned = l->learned && l->packed > 0;
    l->raw_page = l->raw_page < whole ? l->raw_page : whole;
    if (at == 0)
        l->first_page = l->raw_page = 0;
}

// Makes the session what a fork of it would be at a good count.
static void cut_at_good(struct kvq__session *s, uint64_t good)
{
    uint64_t at = kvq__fork_possible(s, good), floor = kvq__fork_floor(s, at);
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i))
            cut_layer(s, &s->layers[i], at, floor);
    kvq__session_count(s, at);
    s->floor = floor;
    s->n_pages = kvq__pages_of(at);
}

// ---- The page table ----

static int make_table(struct kvq__session *s, char *text)
{
    uint32_t pages = s->n_pages;
    s->n_pages = 0;
    int rc = kvq__pages_grow(s, pages);
    s->n_pages = rc ? 0 : pages;
    return rc ? kvq__ns_refused(s->ns, rc, "the page table of a stored session", text) : 0;
}

// ---- What is to be read ----

struct matching {
    struct kvq__restore *restore;
    const struct kvq__restore_spec *spec;
    uint32_t at; // index in the spec's parts
    bool missing;
    struct kvq__part wanted; // the missing part
};

static int count_restored_part(void *context, const struct kvq__part_of *p)
{
    (void)p;
    ++*(uint32_t *)context;
    return 0;
}

// Bytes of a part as it was saved: the page in which a session is cut had more tokens then.
static uint64_t stored_bytes(const struct matching *m, const struct kvq__part *part)
{
    const struct kvq__layer *l = &m->restore->session->layers[part->layer];
    if (part->kind != KVQ__PART_RAW)
        return part->bytes;
    return kvq_raw_bytes(&l->raw_layout, kvq__page_part(m->spec->saved->tokens, part->page));
}

// Session and spec list parts in one order, so one pass matches all.
static int match(void *context, const struct kvq__part_of *p)
{
    struct matching *m = context;
    const struct kvq__part *parts = m->spec->parts;
    while (m->at < m->spec->n_parts && kvq__part_order(&parts[m->at], &p->part) < 0)
        m->at++;
    const struct kvq__part *found = &parts[m->at];
    m->wanted = p->part;
    m->wanted.bytes = stored_bytes(m, &p->part);
    m->missing = m->at == m->spec->n_parts || kvq__part_order(&p->part, found) < 0 ||
                 found->bytes != m->wanted.bytes;
    if (m->missing)
        return KVQ_E_DAMAGED;
    m->restore->arriving[m->restore->n++] = (struct kvq__arriving){
        .ref = kvq__block_share(p->ref),
        .bytes = found->bytes,
        .id = found->id,
        .part = m->at,
        .layer = p->part.layer,
        .kind = p->part.kind,
        .final = p->final,
        .bare = p->ref.block->extent->bare,
    };
    m->restore->bytes += found->bytes;
    return 0;
}

static int list_parts(struct kvq__restore *r, const struct kvq__restore_spec *spec, char *text)
{
    static const char *const kinds[] = {"", "packed block", "raw block", "extras"};
    struct matching m = {.restore = r, .spec = spec};
    kvq__parts_walk(r->session, count_restored_part, &r->room);
    r->arriving = kvq__allocate(r->core, r->room * sizeof *r->arriving);
    if (!r->arriving)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory to restore session \"%s\"",
                         r->session->name);
    if (kvq__parts_walk(r->session, match, &m) == 0)
        return 0;
    return kvq__fail(text, KVQ_E_DAMAGED,
                     "what was stored of session \"%s\" has no %s of %llu bytes for page %u of "
                     "layer %u; drop it, or restore it from an export",
                     r->session->name, kinds[m.wanted.kind], (unsigned long long)m.wanted.bytes,
                     m.wanted.page, m.wanted.layer);
}

// ---- Beginning ----

static void take_blocks(struct kvq__restore *r)
{
    kvq__session_ref(r->session);
    r->session->restore = r;
}

// From here on requests wait for the session's layers.
static void hold_layers(struct kvq__restore *r)
{
    struct kvq__session *s = r->session;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i)) {
            s->layers[i].loading = 1;
            s->layers[i].packer = r; // keeps layers that are not there from being packed
            s->n_loading++;
        }
    r->core->disk.n_loading++;
}

static void restore_free(struct kvq__restore *r)
{
    for (uint32_t i = 0; i < r->n; i++)
        kvq__block_let_go(r->core, &r->arriving[i].ref);
    kvq__staging_give(r->core, &r->staging);
    kvq__deallocate(r->core, r->arriving, r->room * sizeof *r->arriving);
    kvq__deallocate(r->core, r, sizeof *r);
}

// Makes the session one that only begins with the spec's prefix.
static int cut_to_prefix(struct kvq__session *s, const struct kvq__saved *saved,
                         const struct kvq__restore_spec *spec, char *text)
{
    uint64_t at = spec->prefix_tokens;
    if (at % KVQ_BLOCK_TOKENS || at > spec->good_tokens || !kvq__saved_can_begin(saved, at)) {
        s->n_pages = 0;
        return kvq__fail(text, KVQ_E_DAMAGED,
                         "session \"%s\" has no %llu tokens that another can begin with",
                         saved->name, (unsigned long long)at);
    }
    kvq__prefix_counts(s, at);
    return 0;
}

static int prepare_restored(struct kvq__restore *r, char *text)
{
    struct kvq__session *s = r->session;
    const struct kvq__saved *saved = r->spec.saved;
    int rc = set_counts(s, saved, text);
    if (rc < 0) {
        s->n_pages = 0;
        return rc;
    }
    r->cut = r->spec.good_tokens < s->tokens;
    if (r->spec.prefix_tokens)
        rc = cut_to_prefix(s, saved, &r->spec, text);
    else if (r->cut)
        cut_at_good(s, r->spec.good_tokens);
    rc = rc ? rc : make_table(s, text);
    return rc ? rc : kvq__ids_restore(s, saved, r->spec.parts, r->spec.n_parts, text);
}

static int begin_restore(struct kvq__core *core, struct kvq__namespace *ns,
                         const struct kvq__restore_spec *spec, struct kvq__restore **out,
                         char *text)
{
    struct kvq__restore *r = kvq__allocate(core, sizeof *r);
    if (!r)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory to restore a session");
    r->core = core;
    r->spec = *spec;
    int rc = build(core, ns, spec, &r->session, text);
    if (rc == 0 && (rc = prepare_restored(r, text)) < 0)
        kvq__session_free(r->session);
    if (rc < 0) {
        restore_free(r);
        return rc;
    }
    LIST_INSERT_HEAD(&core->disk.restores, r, link);
    *out = r;
    return 0;
}

// A client may have made a session of that name meanwhile.
static int check_name_is_free(const struct kvq__session *s, char *text)
{
    const struct kvq__session_spec as = {.shards = s->shards, .n_layers = 1};
    const struct kvq__session *first = s->name[0] ? kvq__session_named(s->ns, s->name) : NULL;
    if (first && kvq__group_member(first, s->shard))
        return kvq__fail(text, KVQ_E_EXISTS, "session \"%s\" is in memory already", s->name);
    int rc = first ? kvq__shards_check(first, &as, text) : 0;
    return rc ? rc : kvq__namespace_room(s->ns, text);
}

static int publish_restored(struct kvq__restore *r, char *text)
{
    struct kvq__session *s = r->session;
    int rc = kvq__session_enter(s, text);
    if (rc < 0)
        return rc;
    take_blocks(r);
    s->saving.stored = s->saving.kept = true;
    if (!r->cut && !r->spec.resharded) {
        kvq__session_saved(s, s->saving.commits);
        s->saving.stamp = r->spec.saved->stamp;
    }
    return 0;
}

static int enter(struct kvq__restore *r, char *text)
{
    struct kvq__session *s = r->session;
    int rc = r->fetches ? 0 : check_name_is_free(s, text);
    rc = rc ? rc : list_parts(r, &r->spec, text);
    if (rc == 0 && s->pool->gpu && !(r->staging = kvq__staging_take(r->core, s->pool->gpu)))
        rc = kvq__fail(text, KVQ_E_NO_MEMORY, "no memory to restore session \"%s\"", s->name);
    rc = rc || r->fetches ? rc : publish_restored(r, text);
    if (rc < 0)
        return rc;
    r->entered = true;
    hold_layers(r);
    kvq__residency_set(s, r->fetches ? KVQ__FETCHING : KVQ__LOADING);
    return 0;
}

int kvq__restore_reserve(struct kvq__restore *r, char *text)
{
    if (r->fetches && r->session->dropped)
        return kvq__fail(text, KVQ_E_CANCELLED, "the session was dropped meanwhile");
    int rc = r->entered ? KVQ__COMPLETE : kvq__restore_take(r, text);
    if (rc == KVQ__COMPLETE && !r->entered)
        rc = enter(r, text);
    if (rc < 0)
        snprintf(r->why, sizeof r->why, "%s", text);
    return rc == KVQ__COMPLETE && r->spec.prefix_tokens ? kvq__restore_offer(r) : rc;
}

int kvq__restore_begin(struct kvq__core *core, const struct kvq__peer *peer,
                       const struct kvq__restore_spec *spec, struct kvq__restore **restore,
                       char *text)
{
    struct kvq__namespace *ns;
    const struct kvq__saved *saved = spec->saved;
    *restore = NULL;
    if (core->draining)
        return kvq__fail(text, KVQ_E_DRAINING, "the daemon is shutting down; nothing is restored");
    int rc = kvq__namespace_get(core, peer, spec->ns, &ns, text);
    if (rc < 0)
        return rc;
    if (!saved->name[0] || saved->n_layers == 0 || saved->n_layers > KVQ_MAX_LAYERS)
        return kvq__fail(text, KVQ_E_DAMAGED,
                         "what was stored has no name, or %u layers; a session has 1 to %d",
                         saved->n_layers, KVQ_MAX_LAYERS);
    const struct kvq__session *first =
        spec->prefix_tokens ? NULL : kvq__session_named(ns, saved->name);
    if (first && kvq__group_member(first, saved->shard))
        return kvq__fail(text, KVQ_E_EXISTS, "session \"%s\" is in memory already", saved->name);
    return begin_restore(core, ns, spec, restore, text);
}

// ---- Fetches: of parked sessions ----

static struct kvq__session *find_away(struct kvq__core *core, uint64_t id)
{
    struct kvq__session *s = kvq__session_by_id(core, id);
    return s && s->residency == KVQ__FETCH_TAKEN ? s : NULL;
}

// What is stored must be what was parked.
static int check_parked(const struct kvq__session *s, const struct kvq__restore_spec *spec,
                        char *text)
{
    const struct kvq__saved *saved = spec->saved;
    char who[KVQ_NAME_BYTES];
    kvq__stored_name(s, who);
    bool same = saved->stamp == s->saving.stamp && saved->n_layers == s->n_layers &&
                saved->tokens == s->tokens && saved->floor == s->floor;
    for (uint32_t i = 0; i < s->n_layers && same; i++)
        same = !kvq__layer_owns(s, i) || saved->layers[i].base == s->layers[i].base;
    if (!same)
        return kvq__fail(text, KVQ_E_DAMAGED,
                         "what is stored of session \"%s\" is not what was parked: %llu tokens, "
                         "%llu are there; somebody has replaced it",
                         who, (unsigned long long)s->tokens, (unsigned long long)saved->tokens);
    if (spec->good_tokens < s->tokens)
        return kvq__fail(text, KVQ_E_DAMAGED,
                         "of the %llu tokens of session \"%s\" %llu are good on disk%s",
                         (unsigned long long)s->tokens, who, (unsigned long long)spec->good_tokens,
                         s->name[0] ? "; opening it again brings these back" : "");
    return 0;
}

int kvq__fetch_begin(struct kvq__core *core, uint64_t session, const struct kvq__restore_spec *spec,
                     struct kvq__restore **restore, char *text)
{
    struct kvq__session *s = find_away(core, session);
    *restore = NULL;
    if (!s)
        return kvq__fail(text, KVQ_E_CANCELLED, "the session was dropped meanwhile");
    struct kvq__restore *r = kvq__allocate(core, sizeof *r);
    if (!r)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory to read a session back");
    r->core = core;
    r->spec = *spec;
    r->session = s;
    r->fetches = true;
    int rc = check_parked(s, spec, text);
    rc = rc ? rc : set_layers(s, spec->saved, text);
    if (rc < 0)
        s->n_pages = 0;
    rc = rc ? rc : make_table(s, text);
    if (rc < 0) {
        kvq__park_empty(s);
        restore_free(r);
        return rc;
    }
    take_blocks(r);
    LIST_INSERT_HEAD(&core->disk.restores, r, link);
    *restore = r;
    return 0;
}

// Whether a fetch that failed with the status fails at any later try, too.
static bool is_lost(int status)
{
    return status == KVQ_E_DAMAGED || status == KVQ_E_NO_SESSION || status == KVQ_E_VERSION;
}

// Gives the session up. What is stored of it stays for whoever opens it again.
static void lose(struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (m)
            m->saving.kept |= m->name[0] != 0;
    }
    kvq__session_give_up(s, KVQ_E_DAMAGED);
}

void kvq__fetch_failed(struct kvq__core *core, uint64_t session, int status, const char *text)
{
    struct kvq__session *s = find_away(core, session);
    if (!s)
        return;
    kvq__residency_set(s, KVQ__OFFLOADED);
    kvq__fetch_ended(s, status, 0, text);
    if (is_lost(status))
        lose(s);
}

uint64_t kvq__restore_tokens(const struct kvq__restore *r)
{
    return r->session->tokens;
}

// ---- Reading, on any thread ----

bool kvq__restore_wanted(const struct kvq__restore *r, uint32_t i, struct kvq__wanted *out)
{
    if (i >= r->n)
        return false;
    *out = (struct kvq__wanted){r->arriving[i].part, r->arriving[i].layer, r->arriving[i].bytes};
    return true;
}

// On a GPU, places the first of the parts in staging memory; returns how many. The memory has one
// size for all batches, since making it larger would wait for the whole GPU.
static uint32_t place_in_staging(struct kvq__restore *r, const uint32_t *which, uint32_t n)
{
    enum { BATCH = 8 << 20, LINE = 64 };
    uint64_t bytes = 0;
    uint32_t count = 0;
    for (; count < n; count++) {
        struct kvq__arriving *a = &r->arriving[which[count]];
        if (count > 0 && bytes + a->bytes > BATCH)
            break;
        a->at = bytes;
        bytes += (a->bytes + LINE - 1) / LINE * LINE;
    }
    return kvq__staging_memory(r->staging, bytes > BATCH ? bytes : BATCH) ? count : 0;
}

static uint8_t *room_of(struct kvq__restore *r, const struct kvq__arriving *a)
{
    return r->staging ? (uint8_t *)kvq__staging_memory(r->staging, 0) + a->at : a->ref.data;
}

uint32_t kvq__restore_rooms(struct kvq__restore *r, const uint32_t *which, uint32_t n, void **rooms)
{
    uint32_t count = r->staging ? place_in_staging(r, which, n) : kvq__restore_back(r, which, n);
    for (uint32_t i = 0; i < count; i++)
        rooms[i] = room_of(r, &r->arriving[which[i]]);
    return count;
}

// Checks extras, whose token numbers kernels believe: none may be of a token behind those that are
// packed or that the format has learned from.
static int check_extras(const struct kvq__restore *r, const struct kvq__arriving *a,
                        uint8_t *extras)
{
    const struct kvq__session *s = r->session;
    const struct kvq__layer *l = &s->layers[a->layer];
    if (kvq_extras_check(l->format, &l->shape, extras))
        return KVQ_E_DAMAGED;
    bool back = r->cut || r->spec.ahead;
    uint64_t end = l->learned && !back ? kvq__max(l->packed, l->learn) : l->packed;
    if (back && l->packed == 0)
        kvq_extras_init(l->format, &l->shape, extras);
    else
        kvq_extras_fork(l->format, &l->shape, extras, extras, end);
    return 0;
}

int kvq__restore_fill(struct kvq__restore *r, uint32_t i)
{
    const struct kvq__arriving *a = &r->arriving[i];
    uint8_t *memory = room_of(r, a);
    int rc = a->kind == KVQ__PART_EXTRAS ? check_extras(r, a, memory) : 0;
    return rc || !r->staging ? rc : kvq__staging_bring(r->staging, a->ref.data, a->at, a->bytes);
}

bool kvq__restore_lost(const struct kvq__restore *r)
{
    return kvq_word_load(&r->lost) != 0;
}

// ---- Arriving ----

static void let_layer_go(struct kvq__restore *r, uint32_t layer)
{
    r->session->layers[layer].packer = NULL;
    kvq__layer_came(r->session, layer);
}

void kvq__restore_layer(struct kvq__restore *r, uint32_t layer)
{
    struct kvq__session *s = r->session;
    if (s->dropped)
        return;
    struct kvq__layer *l = &s->layers[layer];
    assert(l->loading);
    for (; r->at < r->n && r->arriving[r->at].layer <= layer; r->at++)
        if (r->arriving[r->at].final)
            *kvq__saved_id(r->arriving[r->at].ref.block, r->arriving[r->at].kind) =
                r->arriving[r->at].id;
    if (l->extras.data && l->packed && !s->pool->gpu)
        kvq_outliers_publish(l->format, &l->shape, l->extras.data);
    let_layer_go(r, layer);
    kvq__pack_queue(s);
    kvq__follow_layer(r, layer);
}

void kvq__restore_drop(struct kvq__session *s)
{
    struct kvq__restore *r = s->restore;
    kvq__follow_leave(s);
    if (!r)
        return;
    kvq_word_store_release(&r->lost, 1);
    s->restore = NULL;
    kvq__follow_failed(r, KVQ_E_CANCELLED);
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (s->layers[i].loading)
            let_layer_go(r, i);
}

// Offloads the session again, as it was before the fetch.
static void turn_back(struct kvq__restore *r, struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        if (s->layers[i].loading)
            let_layer_go(r, i);
    }
    kvq__park_leave(s);
    kvq__park_empty(s);
}

// Whether work under way still looks at the layers that have come.
static bool is_looked_at(const struct kvq__session *s)
{
    return s->refs > 1 || kvq__session_uses(s, KVQ__USE_STREAM);
}

// Ends the turning back of a session. False while work under way still looks at its layers.
static bool end_turning_back(struct kvq__restore *r)
{
    struct kvq__session *s = r->session;
    assert(r->turns_back && r->core->disk.n_turning_back > 0);
    if (!s->dropped && is_looked_at(s))
        return false;
    LIST_REMOVE(r, link);
    r->core->disk.n_turning_back--;
    if (!s->dropped) {
        turn_back(r, s);
        s->restore = NULL;
    }
    restore_free(r);
    kvq__session_unref(s);
    return true;
}

bool kvq__restores_poll(struct kvq__core *core)
{
    struct kvq__restore *r, *next;
    bool any = false;
    for (r = core->disk.n_turning_back ? LIST_FIRST(&core->disk.restores) : NULL; r; r = next) {
        next = LIST_NEXT(r, link);
        if (r->turns_back)
            any |= end_turning_back(r);
    }
    return any;
}

// A fetch has failed for a reason that may be gone at the next try, and what is stored is as good
// as before: nothing can have been committed since. So only an open step is lost. For all who count
// or await fetches the fetch is over, since requests may read layers that had come for as long as a
// client's stream likes.
static void begin_turning_back(struct kvq__restore *r, int status)
{
    struct kvq__session *s = r->session;
    assert(r->fetches && s->restore == r && !s->move);
    assert(LIST_EMPTY(&r->followers) && LIST_EMPTY(&r->nodes));
    r->turns_back = true;
    r->core->disk.n_turning_back++;
    kvq__residency_set(s, KVQ__TURNING_BACK);
    kvq__staging_give(r->core, &r->staging);
    kvq__step_leave(s);
    kvq__pack_unqueue(s);
    kvq__fetch_ended(s, status, 0, r->why);
    end_turning_back(r);
}

// The end of a fetch of which no layer has come, or whose stored session is no good.
static void fetch_failed(struct kvq__restore *r, struct kvq__session *s, int status)
{
    assert(kvq__is_offloaded(s) || is_lost(status));
    if (kvq__is_offloaded(s)) {
        kvq__park_empty(s);
        kvq__residency_set(s, KVQ__OFFLOADED);
    } else {
        kvq__residency_set(s, KVQ__RESIDENT);
    }
    kvq__fetch_ended(s, status, 0, r->why);
    if (is_lost(status))
        lose(s);
}

static void end_whole(struct kvq__restore *r, struct kvq__session *s)
{
    s->restore = NULL;
    kvq__residency_set(s, KVQ__RESIDENT);
    s->foreign = false; // the session owns all its blocks
    kvq__pages_release(s);
    kvq__pack_queue(s);
    kvq__exact_note(s);
    if (r->fetches)
        kvq__fetch_ended(s, 0, r->bytes, "");
    else if (s->park) // parking was asked for meanwhile
        kvq__park_want(s->core);
}

void kvq__restore_end(struct kvq__restore **pointer, int status)
{
    struct kvq__restore *r = *pointer;
    if (!r)
        return;
    *pointer = NULL;
    struct kvq__session *s = r->session;
    bool whole = s->n_loading == 0 && !kvq__is_offloaded(s);
    if (r->fetches && r->entered && !s->dropped && !whole && !is_lost(status)) {
        begin_turning_back(r, status);
        return;
    }
    LIST_REMOVE(r, link);
    if (!r->entered && !r->fetches) { // no client has seen the session
        kvq__session_free(s);
        restore_free(r);
        return;
    }
    assert(s->dropped || whole || status < 0);
    if (!s->dropped && whole)
        kvq__follow_done(r);
    else
        kvq__follow_failed(r, status);
    if (!s->dropped && whole)
        end_whole(r, s);
    else if (!s->dropped && r->fetches)
        fetch_failed(r, s, status);
    else if (!s->dropped) // nothing was committed since, so nothing is lost
        kvq__session_give_up(s, status);
    if (!s->dropped)
        s->restore = NULL;
    if (!s->dropped && whole && r->spec.prefix_tokens) // the index has its pages by now
        kvq__session_end(s, "its pages are in the index of prefixes");
    restore_free(r);
    if (!s->dropped && whole)
        kvq__pages_shrink_to_fit(s);
    kvq__session_unref(s);
}

void kvq__restores_each_ref(const struct kvq__core *core,
                            void (*see)(void *context, const struct kvq__ref *ref), void *context)
{
    const struct kvq__restore *r;
    LIST_FOREACH (r, &core->disk.restores, link)
        for (uint32_t i = 0; i < r->n; i++)
            see(context, &r->arriving[i].ref);
}
