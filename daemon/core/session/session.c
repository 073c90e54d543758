// SPDX-License-Identifier: Apache-2.0
//
// Sessions: their life from the first open to the last reference, and what can be told about them.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/gpu/gpu.h"
#include "daemon/core/session/activity.h"
#include "daemon/core/session/exact.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/table.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// ---- Life ----

int kvq__session_new(struct kvq__namespace *ns, uint32_t n_layers, struct kvq__session **out)
{
    int rc = 0;
    struct kvq__session *s = kvq__ns_allocate(ns, sizeof *s, &rc);
    assert(n_layers > 0 && n_layers <= KVQ_MAX_LAYERS);
    *out = NULL;
    if (!s)
        return rc;
    s->layers = kvq__ns_allocate(ns, n_layers * sizeof *s->layers, &rc);
    if (!s->layers) {
        kvq__ns_deallocate(ns, s, sizeof *s);
        return rc;
    }
    s->core = ns->core;
    s->ns = ns;
    s->n_layers = n_layers;
    s->idle_since = ns->core->now;
    s->saving.commits = 1;
    s->serial = ++ns->core->last.serial;
    LIST_INIT(&s->handles);
    LIST_INIT(&s->tables);
    *out = s;
    return 0;
}

int kvq__extras_init(const struct kvq__session *s, const struct kvq__layer *l)
{
    assert(l->extras.data);
    size_t bytes = l->extras_bytes;
    if (!s->pool->gpu) {
        kvq_extras_init(l->format, &l->shape, l->extras.data);
        return 0;
    }
    uint8_t *image = kvq__allocate(s->core, bytes);
    if (!image)
        return KVQ_E_NO_MEMORY;
    kvq_extras_init(l->format, &l->shape, image);
    int rc = kvq__gpu_put(s->pool->gpu, (uintptr_t)l->extras.data, image, bytes);
    kvq__deallocate(s->core, image, bytes);
    return rc;
}

int kvq__extras_fork(const struct kvq__session *s, const struct kvq__layer *from,
                     const struct kvq__layer *to)
{
    size_t bytes = to->extras_bytes;
    if (!s->pool->gpu) {
        kvq_extras_fork(to->format, &to->shape, from->extras.data, to->extras.data, to->packed);
        return 0;
    }
    uint8_t *image = kvq__allocate(s->core, bytes);
    if (!image)
        return KVQ_E_NO_MEMORY;
    int rc = kvq__gpu_take(s->pool->gpu, image, (uintptr_t)from->extras.data, bytes);
    if (rc == 0) {
        kvq_extras_fork(to->format, &to->shape, image, image, to->packed);
        rc = kvq__gpu_put(s->pool->gpu, (uintptr_t)to->extras.data, image, bytes);
    }
    kvq__deallocate(s->core, image, bytes);
    return rc;
}

static void free_gpu(struct kvq__session *s)
{
    struct kvq__gpu *gpu = s->pool ? s->pool->gpu : NULL;
    assert(gpu || !s->in_step.counts);
    for (uint32_t i = 0; gpu && i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        if (l->gpu_book.k || l->gpu_book.v)
            kvq__gpu_book_release(gpu, &l->book);
        l->gpu_book = (struct kvq_book){0};
    }
    if (s->in_step.counts)
        kvq__gpu_counts_free(gpu, s->in_step.counts);
    s->in_step.counts = NULL;
}

int kvq__session_place(struct kvq__session *s)
{
    struct kvq__gpu *gpu = s->pool->gpu;
    int rc = 0;
    assert(!s->in_step.counts);
    if (gpu && !(s->in_step.counts = kvq__gpu_counts_new(gpu)))
        return KVQ_E_NO_MEMORY;
    for (uint32_t i = 0; gpu && rc == 0 && i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        if (l->book.k || l->book.v)
            rc = kvq__gpu_book(gpu, l->format, &l->shape, &l->book, &l->gpu_book);
    }
    return rc;
}

int kvq__session_replace(struct kvq__session *s, struct kvq__pool *to)
{
    struct kvq__session there = *s; // what it has on the other place, in its layers' stead
    size_t bytes = s->n_layers * sizeof *s->layers;
    assert(s->pool != to && s->n_pages == 0);
    there.layers = kvq__allocate(s->core, bytes);
    if (!there.layers)
        return KVQ_E_NO_MEMORY;
    memcpy(there.layers, s->layers, bytes);
    for (uint32_t i = 0; i < s->n_layers; i++)
        there.layers[i].gpu_book = (struct kvq_book){0};
    there.in_step.counts = NULL;
    there.pool = to;
    int rc = kvq__session_place(&there);
    if (rc < 0) {
        free_gpu(&there);
    } else {
        free_gpu(s);
        for (uint32_t i = 0; i < s->n_layers; i++)
            s->layers[i].gpu_book = there.layers[i].gpu_book;
        s->in_step.counts = there.in_step.counts;
        kvq__session_lies_in(s, to);
    }
    kvq__deallocate(s->core, there.layers, bytes);
    return rc;
}

void kvq__session_free(struct kvq__session *s)
{
    s->core->up->follow_leave(s);
    kvq__ended_add(s);
}

void kvq__session_dispose(struct kvq__session *s)
{
    const struct kvq__core_config *config = &s->core->config;
    assert(!s->published && !s->group && !s->step && s->n_pages == 0);
    assert(s->n_sheets == 0 && s->refs == 0 && !s->ended.listed && !s->giver.listed);
    kvq__ids_free(s);
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (s->layers[i].book_hold)
            config->codebook_release(config->context, s->layers[i].book_hold);
    free_gpu(s);
    kvq__sheets_free(s);
    kvq__formats_free(s);
    kvq__ns_deallocate(s->ns, s->layers, s->n_layers * sizeof *s->layers);
    kvq__ns_deallocate(s->ns, s, sizeof *s);
}

void kvq__session_publish(struct kvq__session *s)
{
    assert(!s->published && !s->dropped && s->id == 0);
    s->id = ++s->core->last.session;
    s->ns->used[KVQ__SESSIONS]++;
    s->core->n_sessions++;
    TAILQ_INSERT_TAIL(&s->ns->sessions, s, link);
    kvq__lookup_add(s);
    kvq__recent_enter(s);
    kvq__due_set(s);
    kvq__prefix_note(s);
}

// Why it ends, and whether anything is lost by it.
static void tell_end(const struct kvq__session *s, const char *why)
{
    char text[160];
    int used = snprintf(text, sizeof text, "%s", why);
    if (s->tokens && kvq__is_unsaved(s))
        snprintf(text + used, sizeof text - (size_t)used, "; its %llu tokens %s",
                 (unsigned long long)s->tokens,
                 s->saving.stored ? "have changed since they were saved" : "were not saved");
    kvq__event(s->core, KVQ__EVENT_SESSION_DROPPED, s->ns->name, s->name, 0, text);
}

void kvq__session_end(struct kvq__session *s, const char *why)
{
    struct kvq__handle *h;
    assert(!s->dropped);
    assert(s->published && s->core->n_sessions > 0 && s->ns->used[KVQ__SESSIONS] > 0);
    s->core->up->ending(s);
    s->dropped = true;
    s->core->up->step_leave(s);
    while ((h = LIST_FIRST(&s->handles))) {
        kvq__handle_detach(h);
        kvq__handle_free(h);
    }
    assert(!s->step && !s->writer && s->readers == 0);
    kvq__claims_end(s);
    kvq__group_part(s);
    kvq__pack_unqueue(s);
    kvq__tables_orphan(s);
    TAILQ_REMOVE(&s->ns->sessions, s, link);
    kvq__lookup_remove(s);
    kvq__recent_leave(s);
    kvq__due_clear(s);
    kvq__prefix_unnote(s);
    s->ns->used[KVQ__SESSIONS]--;
    s->core->n_sessions--;
    tell_end(s, why);
    kvq__session_free(s);
}

void kvq__session_give_up(struct kvq__session *s, int status)
{
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        struct kvq__handle *h;
        while (m && (h = LIST_FIRST(&m->handles))) {
            kvq__handle_detach(h);
            h->taken = true;
            h->lost = status;
        }
    }
    kvq__group_end(s, "what was stored of it could not be read");
}

void kvq__session_ref(struct kvq__session *s)
{
    s->refs++;
    kvq__session_used(s);
}

void kvq__session_unref(struct kvq__session *s)
{
    assert(s->refs > 0);
    if (--s->refs == 0 && s->dropped)
        kvq__session_free(s);
    else if (s->prompt.gives_way)
        kvq__exact_unused(s);
}

uint8_t kvq__reading_begin(struct kvq__session *s)
{
    struct kvq__readers *r = &s->entries.readers;
    uint8_t other = r->newer ^ 1;
    assert(s->refs > 0 && r->newer < 2);
    if (r->group[r->newer].n > 0 && r->group[other].n == 0 && r->group[r->newer].floor < s->floor)
        r->newer = other;
    if (r->group[r->newer].n++ == 0)
        r->group[r->newer].floor = s->floor; // it only rises
    return r->newer + 1;
}

void kvq__reading_end(struct kvq__session *s, uint8_t reading)
{
    struct kvq__readers *r = &s->entries.readers;
    assert(reading >= 1 && reading <= 2 && s->refs > 0);
    assert(r->group[reading - 1].n > 0);
    if (--r->group[reading - 1].n == 0 && r->release_due && !s->dropped)
        kvq__pages_release(s);
}

uint64_t kvq__release_floor(const struct kvq__session *s)
{
    uint64_t floor = s->floor;
    for (uint32_t i = 0; i < 2; i++)
        if (s->entries.readers.group[i].n > 0)
            floor = kvq__min(floor, s->entries.readers.group[i].floor);
    return floor;
}

// On a GPU what the step has made is only now there for others.
void kvq__tail_end(struct kvq__session *s)
{
    assert(s->entries.tail > 0 && s->refs > 0);
    if (--s->entries.tail == 0 && s->pool->gpu && !s->dropped)
        kvq__prefix_seal(s);
}

void kvq__hold_end(struct kvq__session *s, uint8_t reading, bool tail_use)
{
    if (reading)
        kvq__reading_end(s, reading);
    if (tail_use)
        kvq__tail_end(s);
    kvq__session_unref(s);
}

bool kvq__session_quiet(const struct kvq__session *s)
{
    return !kvq__session_uses(s, KVQ__USES_BLOCKS);
}

struct kvq__drop kvq__session_drop_by(struct kvq__session *s, uint64_t last)
{
    return kvq__drop_by(s, kvq__session_quiet(s) ? 0 : last);
}

void kvq__session_detached(struct kvq__session *s, bool sound)
{
    if (!LIST_EMPTY(&s->handles))
        return;
    assert(!s->writer && s->readers == 0 && s->published);
    kvq__session_used(s);
    if (kvq__group_is_open(s))
        return;
    for (uint32_t i = 0; i < s->shards; i++)
        if (kvq__group_member(s, i))
            kvq__unsaved_note(kvq__group_member(s, i));
    kvq__due_set(s);
    if (!s->in_step.committing) // nobody is left to end the others' part
        s->core->up->step_leave(s);
    if (s->spec.drop_on_detach && sound)
        kvq__ended_finish_first(s);
    if (s->spec.drop_on_detach)
        kvq__group_end(s, !s->name[0] ? "nobody has it open any more, and it has no name"
                          : s->saving.kept
                              ? "nobody has it open any more, and on_detach is drop; what is saved "
                                "of it stays on disk"
                              : "nobody has it open any more, and on_detach is drop");
}

// ---- Telling ----

// The newest raw block may be shorter than the others.
static uint64_t raw_bytes_of(const struct kvq__session *s, const struct kvq__layer *l)
{
    uint64_t bytes = (uint64_t)(s->n_pages - l->raw_page) * l->raw_bytes;
    const struct kvq__block *newest =
        s->n_pages > l->raw_page ? kvq__page(l, s->n_pages - 1)->raw.block : NULL;
    return newest ? bytes - l->raw_bytes + newest->bytes : bytes;
}

// The newest pages may have no packed block yet.
static uint64_t packed_bytes_of(const struct kvq__session *s, const struct kvq__layer *l)
{
    uint32_t end = kvq__is_offloaded(s) || l->packed_bytes == 0 ? l->first_page : s->n_pages;
    while (end > l->first_page && !kvq__page(l, end - 1)->packed.block)
        end--;
    return kvq__packed_run_bytes(l, l->first_page, end);
}

uint64_t kvq__session_held_bytes(const struct kvq__session *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_layers && !kvq__is_offloaded(s); i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        bytes += raw_bytes_of(s, l) + packed_bytes_of(s, l);
        bytes += l->extras.block ? l->extras.block->bytes : 0;
    }
    return bytes;
}

// Sums over the layers that have pages of their own.
struct sums {
    double bits, record_bytes, plain_bytes;
    uint64_t heads, layers;
};

static struct sums sum_layers(const struct kvq__session *s, struct kvq__session_info *info)
{
    struct sums sums = {0};
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        uint64_t raw = kvq__is_offloaded(s) ? 0 : raw_bytes_of(s, l);
        // A raw format's blocks are both window and cache; they count as the latter.
        info->packed_bytes += l->packed_bytes ? packed_bytes_of(s, l) : raw;
        info->window_bytes += l->packed_bytes ? raw : 0;
        info->window_bytes += l->extras.data ? l->extras_bytes : 0;
        uint64_t full = s->tokens - kvq__packed_at(s, l, s->tokens);
        if (full > info->full_precision_tokens)
            info->full_precision_tokens = full;
        sums.bits += kvq_bits_per_value(l->format, &l->shape);
        sums.record_bytes += (double)l->layout.record_bytes * l->shape.kv_heads / KVQ_BLOCK_TOKENS;
        sums.plain_bytes += 2.0 * l->shape.kv_heads * 2 * kvq_row_dim(&l->shape);
        sums.heads += l->shape.kv_heads;
        sums.layers++;
    }
    return sums;
}

static const char *commonest_format(const struct kvq__session *s)
{
    uint32_t best = 0, best_count = 0;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        uint32_t count = 0;
        if (i && s->layers[i].format == s->layers[i - 1].format)
            continue; // it is counted
        for (uint32_t j = 0; j < s->n_layers; j++)
            count += s->layers[j].format == s->layers[i].format;
        if (count >= best_count) { // of several the last: the first layers may be special
            best = i;
            best_count = count;
        }
    }
    return s->layers[best].format->name;
}

static void fill_sizes(const struct kvq__session *s, struct kvq__session_info *info)
{
    struct sums sums = sum_layers(s, info);
    assert(sums.layers == s->n_owned);
    info->table_bytes = kvq__sheets_bytes(s) + s->n_layers * sizeof *s->layers +
                        kvq__formats_bytes(s) + kvq__ids_bytes(s) + sizeof *s;
    double total = (double)(info->packed_bytes + info->window_bytes + info->table_bytes);
    info->bits_per_value = sums.bits / (double)sums.layers;
    info->bytes_per_token_head = sums.record_bytes / (double)sums.heads;
    if (s->tokens && !kvq__is_offloaded(s)) {
        info->bytes_per_token_head_total = total / (double)s->tokens / (double)sums.heads;
        info->compression = sums.plain_bytes * (double)s->tokens / total;
    }
}

void kvq__session_fill_info(const struct kvq__session *s, struct kvq__session_info *info)
{
    uint64_t idle = s->core->now - s->idle_since;
    const struct kvq__pool *home = kvq__home_of(s);
    assert(s->idle_since <= s->core->now);
    *info = (struct kvq__session_info){
        .id = s->id,
        .ns_number = s->ns->number,
        .tokens = s->tokens,
        .layers = s->n_layers,
        .writer_client = s->writer ? s->writer->client->id : 0,
        .idle_ms = s->refs ? 0 : idle / 1000000,
        .saturated_values = s->saturated,
        .readers = s->readers,
        .max_rollback = s->max_rollback,
        .q_heads = s->layers[0].shape.q_heads,
        .kv_heads = s->layers[0].shape.kv_heads,
        .head_dim = kvq_row_dim(&s->layers[0].shape),
        .path = s->path,
        .v_rotation = s->v_rotation,
        .step_open = kvq__in_step(s),
        .shard = s->shard,
        .shards = s->shards,
        .group_tokens = kvq__group_tokens(s),
        .loading = s->n_loading,
        .saved = !kvq__is_unsaved(s),
        .offloaded = kvq__is_offloaded(s),
        .pinned = s->pinned,
        .prefix_tokens = s->prefix_tokens,
        .exact_tokens = s->prompt.exact,
        .packs_early = s->prompt.packs_early,
        .demoted = s->demoted.home != NULL,
    };
    if (!kvq__group_is_open(s) && s->spec.keep_ns)
        info->keep_ms = idle < s->spec.keep_ns ? (s->spec.keep_ns - idle) / 1000000 : 0;
    snprintf(info->ns, sizeof info->ns, "%s", s->ns->name);
    snprintf(info->name, sizeof info->name, "%s", s->name);
    snprintf(info->model, sizeof info->model, "%s", s->spec.model);
    snprintf(info->format, sizeof info->format, "%s",
             s->composed.name[0] ? s->composed.name : commonest_format(s));
    snprintf(info->place, sizeof info->place, "%s", kvq__pool_name(home));
    if (home->gpu)
        snprintf(info->isa, sizeof info->isa, "sm_%d", kvq__gpu_kernels(home->gpu)->capability);
    kvq__formats_text(s, info->layer_formats, sizeof info->layer_formats);
    fill_sizes(s, info);
}

// Of what packed_bytes counts.
static uint64_t shared_bytes(const struct kvq__session *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_layers && !kvq__is_offloaded(s); i++) {
        const struct kvq__layer *l = &s->layers[i];
        for (uint32_t p = l->first_page; kvq__layer_owns(s, i) && p < s->n_pages; p++) {
            const struct kvq__pageref *page = kvq__page(l, p);
            const struct kvq__ref *ref = l->packed_bytes ? &page->packed : &page->raw;
            if (ref->block && (ref->block->refs > 1 || kvq__page_owners(l, p) > 1))
                bytes += ref->block->bytes;
        }
    }
    return bytes;
}

void kvq__session_count_shared(const struct kvq__session *s, struct kvq__session_info *info,
                               uint64_t *looks)
{
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < s->n_layers && !kvq__is_offloaded(s); i++)
        blocks += kvq__layer_owns(s, i) ? s->n_pages - s->layers[i].first_page : 0;
    info->shared_unknown = blocks > *looks;
    if (info->shared_unknown)
        return;
    *looks -= blocks;
    info->shared_bytes = shared_bytes(s);
}

static void fill_whole_info(const struct kvq__session *s, struct kvq__session_info *info)
{
    uint64_t looks = KVQ__LIST_LOOKS;
    kvq__session_fill_info(s, info);
    kvq__session_count_shared(s, info, &looks);
}

// ---- By handle ----

int kvq__handle_attached(struct kvq__client *client, uint64_t value, struct kvq__handle **h,
                         char *text)
{
    int rc = kvq__handle_get(client, value, h);
    if (rc == KVQ_E_TAKEN)
        return kvq__fail(text, rc,
                         "another writer took this session over; close the handle, and open the "
                         "session again when it is free");
    if (rc == KVQ_E_STALE)
        kvq__fail(text, rc,
                  "handle %#llx is none of this client's: its session was closed or dropped; "
                  "open the session again",
                  (unsigned long long)value);
    else if (rc < 0)
        kvq__fail(text, rc,
                  "what was stored of this session could not be read; close the handle and open "
                  "the session again: it comes back with the tokens that are good");
    return rc;
}

int kvq__session_close(struct kvq__client *client, uint64_t value, char *text)
{
    struct kvq__handle *h;
    int rc = kvq__handle_attached(client, value, &h, text);
    if (rc == KVQ_E_STALE)
        return rc;
    kvq__table_close(client, value, NULL);
    kvq__handle_close(h);
    return 0;
}

int kvq__session_drop(struct kvq__client *client, uint64_t value, char *text)
{
    struct kvq__handle *h;
    int rc = kvq__handle_attached(client, value, &h, text);
    if (rc < 0)
        return rc;
    if (h->read_only)
        return kvq__fail(text, KVQ_E_READ_ONLY,
                         "a session opened read-only cannot be dropped through that handle; drop "
                         "it by name, or open it for writing");
    kvq__table_close(client, value, NULL);
    kvq__ended_finish_first(h->session);
    kvq__group_end(h->session, "its client dropped it");
    return 0;
}

int kvq__session_info(struct kvq__client *client, uint64_t value, struct kvq__session_info *info,
                      char *text)
{
    struct kvq__handle *h;
    int rc = kvq__handle_attached(client, value, &h, text);
    if (rc < 0)
        return rc;
    fill_whole_info(h->session, info);
    info->handle = value;
    info->read_only = h->read_only;
    return 0;
}

// ---- By name ----

static struct kvq__session *find_by_id(struct kvq__core *core, const struct kvq__peer *peer,
                                       uint64_t id)
{
    struct kvq__session *s = kvq__session_by_id(core, id);
    return s && kvq__namespace_allows(s->ns, peer) ? s : NULL;
}

// "#ID"
static struct kvq__session *find_by_number(struct kvq__core *core, const struct kvq__peer *peer,
                                           const char *name)
{
    char *end;
    uint64_t id = strtoull(name + 1, &end, 10);
    return *end || end == name + 1 ? NULL : find_by_id(core, peer, id);
}

// It may be in another namespace, or on disk alone, as all are after a start.
static int not_there(const struct kvq__peer *peer, const char *ns_name, const char *name,
                     char *text)
{
    char who[32] = "there is", where[KVQ_NAME_BYTES + 24] = "";
    if (peer->uid != KVQ__NO_UID)
        snprintf(who, sizeof who, "user %u sees", peer->uid);
    if (*name != '#')
        snprintf(where, sizeof where, " of namespace \"%s\"", ns_name);
    return kvq__fail(
        text, KVQ_E_NO_SESSION,
        "%s no session \"%.*s\"%s in memory; `kvqctl session list` shows the names with "
        "their namespaces (--namespace), `kvqctl storage list` those on disk, which "
        "`kvqctl session restore` loads",
        who, KVQ_NAME_BYTES, name, where);
}

int kvq__session_get(struct kvq__core *core, const struct kvq__peer *peer, const char *ns_name,
                     const char *name, struct kvq__session **s, char *text)
{
    struct kvq__namespace *ns;
    char full[KVQ_NAME_BYTES];
    *s = NULL;
    if (!name || !*name)
        return kvq__fail(text, KVQ_E_INVALID,
                         "no session named; give its name, or \"#ID\" as `kvqctl session list` "
                         "shows it");
    if (*name == '#') {
        *s = find_by_number(core, peer, name);
    } else {
        int rc = kvq__namespace_find(core, peer, ns_name, &ns, full, text);
        if (rc < 0)
            return rc;
        *s = ns ? kvq__session_named(ns, name) : NULL;
    }
    return *s ? 0 : not_there(peer, full, name, text);
}

int kvq__namespace_check(struct kvq__core *core, const struct kvq__peer *peer, const char *ns_name,
                         char *name, char *text)
{
    struct kvq__namespace *ns;
    char full[KVQ_NAME_BYTES]; // ns_name may be name itself
    int rc = kvq__namespace_find(core, peer, ns_name, &ns, full, text);
    if (rc == 0)
        memcpy(name, full, sizeof full);
    return rc;
}

int kvq__session_find(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                      const char *name, struct kvq__session_info *info, char *text)
{
    struct kvq__session *s;
    int rc = kvq__session_get(core, peer, ns, name, &s, text);
    if (rc == 0)
        fill_whole_info(s, info);
    return rc;
}

uint32_t kvq__session_shards(struct kvq__core *core, const struct kvq__peer *peer, uint64_t id,
                             struct kvq__shard_info *out)
{
    const struct kvq__session *s = find_by_id(core, peer, id);
    uint32_t n = 0;
    for (uint32_t i = 0; s && s->group && i < s->shards; i++) {
        const struct kvq__session *m = kvq__group_member(s, i);
        if (m)
            out[n++] =
                (struct kvq__shard_info){.shard = i,
                                         .id = m->id,
                                         .tokens = m->tokens,
                                         .writer_client = m->writer ? m->writer->client->id : 0,
                                         .place = kvq__pool_name(kvq__home_of(m)),
                                         .ended = m->in_step.prepared};
    }
    return n;
}

int kvq__session_drop_named(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                            const char *name, char *text)
{
    struct kvq__session *s;
    int rc = kvq__session_get(core, peer, ns, name, &s, text);
    if (rc == 0)
        kvq__group_end(s, "it was dropped by name");
    return rc;
}

bool kvq__shortage_counts(const struct kvq__shortage *s, const struct kvq__session *session)
{
    session->core->freeing.shortage_looks++;
    if (s->code != KVQ_E_QUOTA)
        return session->pool == s->pool;
    return session->ns == s->ns && kvq__pool_limit(session->pool) == kvq__pool_limit(s->pool);
}
