// SPDX-License-Identifier: Apache-2.0
//
// Saves; see saved.h. While its changing blocks are copied, a session is held as for readers, and
// all its layers count as being packed. So nothing is packed, truncated or moved, and requests that
// need that wait.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/request/fork.h"
#include "daemon/core/residency/move.h"
#include "daemon/core/residency/park.h"
#include "daemon/core/residency/saved_internal.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/open.h"
#include "daemon/core/session/work_stream.h"

// ---- Parts ----

uint32_t kvq__session_saves(const struct kvq__session *s)
{
    const struct kvq__save *save;
    uint32_t n = 0;
    LIST_FOREACH (save, &s->core->disk.saves, link)
        for (uint32_t i = 0; i < save->n_shards; i++)
            n += save->ids[i] == s->id;
    return n;
}

static uint32_t tokens_in(uint64_t tokens, uint32_t page)
{
    uint64_t start = (uint64_t)page * KVQ_BLOCK_TOKENS;
    uint64_t n = tokens > start ? tokens - start : 0;
    return n < KVQ_BLOCK_TOKENS ? (uint32_t)n : KVQ_BLOCK_TOKENS;
}

struct walking {
    struct kvq__session *session;
    uint32_t layer;
    int (*each)(void *context, const struct kvq__part_of *p);
    void *context;
};

// Of a layer's first packed block only the codes: the sinks behind these are its extras.
static int tell_page(struct walking *w, uint32_t page, enum kvq__part_kind kind)
{
    const struct kvq__session *s = w->session;
    struct kvq__layer *l = &s->layers[w->layer];
    bool packed = kind == KVQ__PART_PACKED;
    uint64_t start = (uint64_t)page * KVQ_BLOCK_TOKENS;
    uint32_t tokens = tokens_in(packed ? l->packed : s->tokens, page);
    uint64_t bytes = packed ? l->packed_bytes : kvq_raw_bytes(&l->raw_layout, tokens);
    struct kvq__part_of p = {
        .part = {w->layer, page, kind, bytes, start, 0},
        .ref = packed ? kvq__page(l, page)->packed : kvq__page(l, page)->raw,
        .tokens = tokens,
        .final = start + KVQ_BLOCK_TOKENS <= (packed ? l->packed : s->floor),
    };
    return p.tokens ? w->each(w->context, &p) : 0;
}

static int tell_extras(struct walking *w)
{
    const struct kvq__layer *l = &w->session->layers[w->layer];
    uint64_t bytes = l->sink_bytes ? l->sink_bytes : l->extras_bytes;
    struct kvq__part_of p = {
        .part = {w->layer, UINT32_MAX, KVQ__PART_EXTRAS, bytes, 0, 0},
        .ref = kvq__extras_ref(w->session, l),
        .final = l->sink_bytes && l->packed >= KVQ_BLOCK_TOKENS,
    };
    bool there = l->sink_bytes ? l->first_page == 0 && l->packed > 0 : w->session->tokens > 0;
    return bytes && there ? w->each(w->context, &p) : 0;
}

int kvq__parts_walk(struct kvq__session *s,
                    int (*each)(void *context, const struct kvq__part_of *p), void *context)
{
    struct walking w = {.session = s, .each = each, .context = context};
    uint32_t pages = kvq__pages_of(s->tokens);
    int rc = 0;
    for (; w.layer < s->n_layers && rc == 0; w.layer++) {
        const struct kvq__layer *l = &s->layers[w.layer];
        if (!kvq__layer_owns(s, w.layer))
            continue;
        for (uint32_t p = l->first_page; p < pages && rc == 0; p++) {
            rc = l->packed_bytes ? tell_page(&w, p, KVQ__PART_PACKED) : 0;
            if (rc == 0 && p >= l->raw_page)
                rc = tell_page(&w, p, KVQ__PART_RAW);
        }
        rc = rc ? rc : tell_extras(&w);
    }
    return rc;
}

// ---- What a session is ----

static struct kvq__saved_layer saved_layer(const struct kvq__session *s, uint32_t i)
{
    const struct kvq__layer *l = &s->layers[i];
    const struct kvq_shape *shape = &l->shape;
    return (struct kvq__saved_layer){
        .row = {.q_heads = shape->q_heads,
                .kv_heads = shape->kv_heads,
                .k_dim = kvq_row_dim(shape),
                .v_dim = kvq_row_dim(shape),
                .window = shape->window,
                .softcap = shape->softcap,
                .scale = shape->scale,
                .kv_from = kvq__layer_owns(s, i) ? -1 : (int32_t)l->source,
                .repeat = 1},
        .format = *l->format,
        .v_rotation = shape->v_rotation,
        .first_page = l->first_page,
        .raw_page = l->raw_page,
        .base = l->base,
        .packed = l->packed,
        .learned = l->learned,
        .book = kvq__layer_book(s, l),
    };
}

static int describe_session(const struct kvq__session *s, struct kvq__saved *out)
{
    *out = (struct kvq__saved){
        .shard = s->group ? s->shard : 0, // without a name each shard is by itself
        .shards = s->group ? s->shards : 1,
        .dtype = s->dtype,
        .path = s->path,
        .max_rollback = s->max_rollback,
        .on_detach = s->spec.drop_on_detach   ? KVQ__DETACH_DROP
                     : s->spec.save_on_detach ? KVQ__DETACH_SAVE
                                              : KVQ__DETACH_KEEP,
        .prompt_tokens = s->prompt.tokens,
        .exact_tokens = s->prompt.exact,
        .keep_seconds = s->spec.keep_ns / 1000000000,
        .tokens = s->tokens,
        .floor = s->floor,
        .saturated = s->saturated,
        .n_layers = s->n_layers,
        .layers = kvq__allocate(s->core, s->n_layers * sizeof *out->layers),
        .known = s->ids.known,
        .n_spans = s->ids.n_spans,
    };
    if (!out->layers)
        return KVQ_E_NO_MEMORY;
    kvq__stored_name(s, out->name);
    snprintf(out->model, sizeof out->model, "%s", s->spec.model);
    snprintf(out->salt, sizeof out->salt, "%s", s->spec.salt);
    snprintf(out->adapter, sizeof out->adapter, "%s", s->spec.adapter);
    snprintf(out->own_format, sizeof out->own_format, "%s", s->composed.name);
    snprintf(out->isa, sizeof out->isa, "%s", kvq_kernels_isa(s->core->config.kernels));
    for (uint32_t i = 0; i < s->n_layers; i++) {
        out->layers[i] = saved_layer(s, i);
        out->layers[i].row.format = out->layers[i].format.name;
    }
    return 0;
}

// ---- Holding ----

static int count_saved_part(void *context, const struct kvq__part_of *p)
{
    (void)p;
    ++*(uint32_t *)context;
    return 0;
}

static int take_saved_part(void *context, const struct kvq__part_of *p)
{
    struct kvq__save_shard *shard = context;
    struct kvq__kept *held = &shard->held[shard->n];
    shard->parts[shard->n] = p->part;
    shard->parts[shard->n].id = p->final ? *kvq__saved_id(p->ref.block, p->part.kind) : 0;
    *held =
        (struct kvq__kept){.ref = kvq__block_share(p->ref), .tokens = p->tokens, .final = p->final};
    shard->n++;
    return 0;
}

static void copy_saved_spans(struct kvq__save_shard *shard, const struct kvq__ids *ids)
{
    for (uint32_t i = 0; i < ids->n_spans; i++) {
        shard->spans[i] =
            (struct kvq__saved_span){.first = ids->spans[i].first, .tokens = ids->spans[i].tokens};
        memcpy(shard->spans[i].digest, ids->spans[i].digest, sizeof shard->spans[i].digest);
    }
}

// Copies ids and spans here and now: a step that begins may move them in memory. They are few bytes
// beside the list of parts.
static int take_saved_ids(struct kvq__save_shard *shard, struct kvq__session *s)
{
    const struct kvq__ids *ids = &s->ids;
    if (ids->known) {
        shard->ids = kvq__allocate(s->core, ids->known * sizeof *shard->ids);
        if (!shard->ids)
            return KVQ_E_NO_MEMORY;
        kvq__ids_read(ids, shard->ids);
    }
    if (ids->n_spans) {
        shard->spans = kvq__allocate(s->core, ids->n_spans * sizeof *shard->spans);
        if (!shard->spans)
            return KVQ_E_NO_MEMORY;
        copy_saved_spans(shard, ids);
    }
    for (uint32_t i = 0; i < shard->n_ids; i++) {
        struct kvq__part *part = &shard->parts[shard->n + i];
        *part = kvq__saved_ids_part(&shard->saved, i);
        if (part->kind == KVQ__PART_IDS)
            part->id = ids->parts[i]->stored;
    }
    shard->shares = ids->known >= KVQ_BLOCK_TOKENS && kvq__ids_identify(s, NULL) == 0;
    memcpy(shard->root, ids->root, sizeof shard->root);
    memcpy(shard->layers, ids->layers, sizeof shard->layers);
    return 0;
}

static int take_shard(struct kvq__save *save, struct kvq__session *s)
{
    struct kvq__save_shard *shard = &save->shards[save->n_shards];
    struct kvq__core *core = save->core;
    int rc = describe_session(s, &shard->saved);
    if (rc < 0)
        return rc;
    shard->saved.stamp = save->stamp;
    save->kept |= s->saving.kept;
    save->ids[save->n_shards] = s->id;
    save->commits[save->n_shards++] = s->saving.commits;
    kvq__parts_walk(s, count_saved_part, &shard->room);
    shard->n_ids = kvq__saved_ids_parts(&shard->saved);
    shard->parts = kvq__allocate(core, (shard->room + shard->n_ids) * sizeof *shard->parts);
    shard->held = kvq__allocate(core, shard->room * sizeof *shard->held);
    if (s->pool->gpu)
        shard->staging = kvq__staging_take(core, s->pool->gpu);
    if (!shard->parts || !shard->held || (s->pool->gpu && !shard->staging))
        return KVQ_E_NO_MEMORY;
    shard->session = s;
    rc = kvq__parts_walk(s, take_saved_part, shard);
    return rc ? rc : take_saved_ids(shard, s);
}

static void hold_saved(struct kvq__save *save, struct kvq__save_shard *shard)
{
    struct kvq__session *s = shard->session;
    s->refs++; // saving is not a use that ends its idle time
    shard->reading = kvq__reading_begin(s);
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i))
            s->layers[i].packer = save;
}

static void let_saved_go(const struct kvq__save *save, const struct kvq__save_shard *shard)
{
    struct kvq__session *s = shard->session;
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (s->layers[i].packer == save)
            s->layers[i].packer = NULL;
    kvq__pack_queue(s);
    kvq__hold_end(s, shard->reading, false);
}

// Whether something under way changes what is committed, or its form.
static bool is_busy(const struct kvq__session *s)
{
    bool busy = s->exclusive || s->n_loading || s->in_step.committing || kvq__move_asks(s);
    for (uint32_t i = 0; i < s->n_layers && !busy; i++)
        busy = s->layers[i].packer ||
               !kvq__work_stream_ended(s->layers[i].pack_stream, s->layers[i].pack_number);
    return busy;
}

// ---- Beginning ----

// Whether units are being packed behind a shard's last step. Once all shards have ended that, all
// have the same units packed, so that their KV heads can be dealt out anew. (On a GPU no unit is
// queued of a session without a writer, since nobody packs it.)
static bool is_packing_session(const struct kvq__session *s)
{
    bool due = false;
    for (uint32_t i = 0; i < s->n_layers; i++)
        due |= kvq__pack_due(s, i) > s->layers[i].packed;
    return due && s->pack.queued;
}

// Shards at different counts come together by steps, and no step begins while the daemon drains.
static int check_saved_counts(const struct kvq__session *s, char *text)
{
    const struct kvq__session *first = s->group ? kvq__group_member(s, 0) : s, *other = NULL;
    bool in_step = false;
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        other = m && m->tokens != first->tokens ? m : other;
        in_step |= m && kvq__in_step(m);
    }
    if (!other || in_step || !s->core->draining)
        return 0;
    return kvq__fail(text, KVQ_E_INCOMPLETE,
                     "shard %u of session \"%s\" stands at %llu tokens and shard %u at %llu; a "
                     "session is saved with all its shards at one count, and while the daemon "
                     "drains no step begins that could bring them there",
                     first->shard, s->name, (unsigned long long)first->tokens, other->shard,
                     (unsigned long long)other->tokens);
}

// 1 if something has to end first in a shard.
static int check_shards(const struct kvq__session *s, char *text)
{
    uint32_t missing;
    int rc = 0;
    if (kvq__group_missing(s, &missing))
        return kvq__fail(text, KVQ_E_INCOMPLETE,
                         "shard %u of session \"%s\" is not there; a session is saved with all its "
                         "%u shards: open that shard first",
                         missing, s->name, s->shards);
    rc = check_saved_counts(s, text);
    for (uint32_t i = 0; i < s->shards && rc == 0; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        // Shards are truncated one by one.
        if (m && (is_busy(m) || m->tokens != s->tokens || (s->group && is_packing_session(m))))
            rc = 1;
    }
    return rc;
}

static bool any_away(const struct kvq__session *s)
{
    bool any = false;
    for (uint32_t i = 0; i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        any |= m && kvq__is_offloaded(m);
    }
    return any;
}

// The answer if no save begins: 0 if all of the session is stored; 1 if some is not, and shards
// that are away have to come back first.
static int unchanged(struct kvq__session *s, const struct kvq__save_spec *spec)
{
    if (kvq__group_is_unsaved(s)) {
        kvq__fetch_ask(s);
        return 1;
    }
    for (uint32_t i = 0; i < s->shards && !spec->parks; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (m)
            m->saving.kept = true;
    }
    return 0;
}

static void save_free(struct kvq__save *save)
{
    struct kvq__core *core = save->core;
    for (uint32_t i = 0; i < save->n_shards; i++) {
        struct kvq__save_shard *shard = &save->shards[i];
        for (uint32_t j = 0; j < shard->n; j++) {
            kvq__block_let_go(core, &shard->held[j].ref);
            free(shard->held[j].copy);
        }
        kvq__staging_give(core, &shard->staging);
        kvq__deallocate(core, shard->held, shard->room * sizeof *shard->held);
        kvq__deallocate(core, shard->parts, (shard->room + shard->n_ids) * sizeof *shard->parts);
        kvq__deallocate(core, shard->ids, shard->saved.known * sizeof *shard->ids);
        kvq__deallocate(core, shard->spans, shard->saved.n_spans * sizeof *shard->spans);
        kvq__deallocate(core, shard->saved.layers,
                        shard->saved.n_layers * sizeof *shard->saved.layers);
    }
    kvq__deallocate(core, save, sizeof *save);
}

static int begin_save(struct kvq__session *s, bool parks, struct kvq__save **out, char *text)
{
    struct kvq__save *save = kvq__allocate(s->core, sizeof *save);
    int rc = save ? 0 : KVQ_E_NO_MEMORY;
    if (save) {
        save->core = s->core;
        save->ns = s->ns;
        save->parks = parks;
        save->stamp = ++s->core->last.stamp;
    }
    for (uint32_t i = 0; i < s->shards && rc == 0; i++)
        if (kvq__group_member(s, i))
            rc = take_shard(save, kvq__group_member(s, i));
    if (rc < 0) {
        if (save)
            save_free(save);
        return kvq__fail(text, rc, "no memory to save session \"%s\"", s->name);
    }
    for (uint32_t i = 0; i < save->n_shards; i++)
        hold_saved(save, &save->shards[i]);
    save->holding = true;
    LIST_INSERT_HEAD(&s->core->disk.saves, save, link);
    *out = save;
    return 0;
}

int kvq__save_begin(struct kvq__core *core, const struct kvq__peer *peer,
                    const struct kvq__save_spec *spec, struct kvq__save **save, char *text)
{
    struct kvq__session *s;
    *save = NULL;
    int rc = kvq__session_get(core, peer, spec->ns, spec->name, &s, text);
    if (rc < 0)
        return rc;
    if (!s->name[0] && !spec->unnamed)
        return kvq__fail(text, KVQ_E_INVALID,
                         "session #%llu has no name, by which it could be found again; only "
                         "sessions with names are saved",
                         (unsigned long long)s->id);
    rc = check_shards(s, text);
    if (rc)
        return rc;
    if (any_away(s) || (!spec->again && !kvq__group_is_unsaved(s)))
        return unchanged(s, spec);
    return spec->looks ? KVQ__SAVE_THERE_IS : begin_save(s, spec->parks, save, text);
}

// ---- What is there ----

uint32_t kvq__save_shards(const struct kvq__save *save)
{
    return save->n_shards;
}

const char *kvq__save_namespace(const struct kvq__save *save)
{
    return save->ns->name;
}

const struct kvq__saved *kvq__save_shard(const struct kvq__save *save, uint32_t shard,
                                         struct kvq__part **parts, uint32_t *n_parts)
{
    const struct kvq__save_shard *s = &save->shards[shard];
    *parts = s->parts;
    *n_parts = s->n + s->n_ids;
    return &s->saved;
}

// ---- Copying, on any thread ----

// A part's bytes where this process sees them; NULL if they could not be fetched.
static const uint8_t *see(struct kvq__save_shard *shard, uint32_t i)
{
    const struct kvq__kept *held = &shard->held[i];
    if (!shard->staging)
        return held->ref.data;
    uint8_t *memory = kvq__staging_memory(shard->staging, shard->parts[i].bytes);
    if (!memory || kvq__staging_fetch(shard->staging, held->ref.data, shard->parts[i].bytes) < 0)
        return NULL;
    return memory;
}

static void copy_extras(const struct kvq__layer *l, const uint8_t *from, uint8_t *to)
{
    if (l->sink_bytes)
        kvq_sinks_copy(l->format, &l->shape, from, to,
                       (uint32_t)kvq__min(l->format->sink_tokens, l->packed));
    else
        memcpy(to, from, l->extras_bytes);
}

// Copies only what is committed, and packed: what stands behind it may be written just now.
static int copy_part(struct kvq__save_shard *shard, uint32_t i)
{
    const struct kvq__part *part = &shard->parts[i];
    struct kvq__kept *held = &shard->held[i];
    const uint8_t *from = see(shard, i);
    held->copy = from ? calloc(1, part->bytes) : NULL;
    if (!held->copy)
        return from ? KVQ_E_NO_MEMORY : KVQ_E_SYSTEM;
    const struct kvq__layer *l = &shard->session->layers[part->layer];
    if (part->kind == KVQ__PART_EXTRAS) {
        copy_extras(l, from, held->copy);
        return 0;
    }
    struct kvq__copy copy = {.from = from,
                             .to = held->copy,
                             .tokens = held->tokens,
                             .packed = part->kind == KVQ__PART_PACKED};
    kvq__copy_tokens(l, &copy);
    return 0;
}

int kvq__save_copy(struct kvq__save *save)
{
    int rc = 0;
    for (uint32_t i = 0; i < save->n_shards; i++)
        for (uint32_t j = 0; j < save->shards[i].n && rc == 0; j++)
            if (!save->shards[i].held[j].final)
                rc = copy_part(&save->shards[i], j);
    return rc;
}

const void *kvq__save_shared(const struct kvq__save *save, uint32_t shard, uint32_t part)
{
    const struct kvq__save_shard *s = &save->shards[shard];
    return part < s->n && s->held[part].final ? s->held[part].ref.data : NULL;
}

const void *kvq__save_bytes(struct kvq__save *save, uint32_t shard, uint32_t part)
{
    struct kvq__save_shard *s = &save->shards[shard];
    const struct kvq__part *p = &s->parts[part];
    if (p->kind == KVQ__PART_IDS)
        return s->ids + (size_t)p->page * KVQ__IDS_PART;
    if (p->kind == KVQ__PART_SPANS)
        return s->spans;
    return s->held[part].copy ? s->held[part].copy : see(s, part);
}

// ---- Ending ----

void kvq__save_copied(struct kvq__save *save)
{
    assert(save->holding);
    save->holding = false;
    for (uint32_t i = 0; i < save->n_shards; i++) {
        struct kvq__save_shard *shard = &save->shards[i];
        for (uint32_t j = 0; j < shard->n; j++)
            if (!shard->held[j].final)
                kvq__block_let_go(save->core, &shard->held[j].ref);
        let_saved_go(save, shard);
        shard->session = NULL; // the session may end
    }
}

// The shard's session, if it is still there.
static struct kvq__session *still_there(const struct kvq__save *save, uint32_t shard)
{
    return kvq__session_by_id(save->core, save->ids[shard]);
}

// Notes what full parts of ids below the floor, which stay as they are, are stored as.
static void note_ids(const struct kvq__save_shard *shard, struct kvq__session *s)
{
    for (uint32_t i = 0; i < shard->n_ids; i++) {
        const struct kvq__part *part = &shard->parts[shard->n + i];
        uint64_t end = ((uint64_t)part->page + 1) * KVQ__IDS_PART;
        if (part->kind == KVQ__PART_IDS && end <= shard->saved.known && end <= shard->saved.floor)
            s->ids.parts[part->page]->stored = part->id;
    }
}

// From here on the stored copy counts as the session's.
static void note_saved(struct kvq__save *save, uint32_t shard)
{
    struct kvq__session *s = still_there(save, shard);
    if (s) {
        note_ids(&save->shards[shard], s);
        s->saving.after = s->saving.wait = 0;
        kvq__session_saved(s, save->commits[shard]);
        s->saving.stamp = save->stamp;
        s->saving.stored = true;
        s->saving.kept |= !save->parks;
        kvq__due_set(s);                     // the session may be kept for nothing but the save
    } else if (save->parks && !save->kept) { // the session has ended, and nobody wants its copy
        kvq__park_forget(save->core, save->ns, save->shards[shard].saved.name, save->stamp);
    }
}

void kvq__save_end(struct kvq__save **pointer, bool saved)
{
    struct kvq__save *save = pointer ? *pointer : NULL;
    if (!save)
        return;
    *pointer = NULL;
    if (save->holding)
        kvq__save_copied(save);
    for (uint32_t i = 0; i < save->n_shards && saved; i++) {
        struct kvq__save_shard *shard = &save->shards[i];
        note_saved(save, i);
        for (uint32_t j = 0; j < shard->n; j++)
            if (shard->held[j].final)
                *kvq__saved_id(shard->held[j].ref.block, shard->parts[j].kind) = shard->parts[j].id;
    }
    LIST_REMOVE(save, link);
    save_free(save);
}

void kvq__saves_each_ref(const struct kvq__core *core,
                         void (*see)(void *context, const struct kvq__ref *ref), void *context)
{
    const struct kvq__save *save;
    LIST_FOREACH (save, &core->disk.saves, link)
        for (uint32_t i = 0; i < save->n_shards; i++)
            for (uint32_t j = 0; j < save->shards[i].n; j++)
                see(context, &save->shards[i].held[j].ref);
}
