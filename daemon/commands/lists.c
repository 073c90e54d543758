// SPDX-License-Identifier: Apache-2.0
//
// Lists, page by page: each ends before its reply would grow beyond a message, and says where the
// next one begins.
#include "daemon/commands/cursor.h"
#include "daemon/commands/internal.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "kernels/choice.h"

enum {
    PIECE = 64,         // elements that the core is asked for at a time
    REST_BYTES = 16384, // of a status that is not its namespaces: GPUs, a folder, evictions
};

// A page that is being filled.
struct page {
    struct kvq__call *call;
    struct kvq__list_at at; // what is listed by now
    ProtobufCMessage **elements;
    size_t n, most, bytes, room; // most: elements, since a message has so many of all lists
    bool truncated;
};

// Begins behind what the cursor says was listed; `newest` is the last that there could be.
static int begin_page(struct page *p, const Kvq__Cursor *cursor, struct kvq__list_at newest)
{
    p->elements = kvq_arena_alloc(p->call->arena, KVQ_MAX_LIST * sizeof *p->elements);
    p->room = p->room ? p->room : KVQ__LIST_BYTES;
    p->most = p->most ? p->most : KVQ_MAX_LIST;
    assert(p->most <= KVQ_MAX_LIST && p->room <= KVQ_MAX_MESSAGE);
    if (!p->elements)
        return kvq__call_no_room(p->call);
    int error = kvq__cursor_check(cursor, p->call->d->identity->epoch,
                                  p->call->request->command_case, p->call->text);
    if (error || !cursor)
        return error;
    if (cursor->namespace_ > newest.ns || cursor->id > newest.id) {
        snprintf(p->call->text, sizeof p->call->text,
                 "the cursor is behind namespace %llu and element %llu; the daemon has given none "
                 "above %llu and %llu: begin the list anew",
                 (unsigned long long)cursor->namespace_, (unsigned long long)cursor->id,
                 (unsigned long long)newest.ns, (unsigned long long)newest.id);
        return KVQ_E_INVALID;
    }
    p->at = (struct kvq__list_at){cursor->namespace_, cursor->id};
    return 0;
}

// Takes an element that stands at a place of the list. False: the page is full.
static bool add_element(struct page *p, ProtobufCMessage *element, struct kvq__list_at at)
{
    assert(at.ns > p->at.ns || (at.ns == p->at.ns && at.id > p->at.id)); // the list's order
    assert(!p->truncated && p->n <= p->most);
    p->bytes += element ? protobuf_c_message_get_packed_size(element) + 4 : 0;
    p->truncated = !element || p->call->arena->full || p->bytes > p->room || p->n == p->most;
    if (p->truncated)
        return false;
    p->elements[p->n++] = element;
    p->at = at;
    return true;
}

// Where the next page begins; NULL where there is none.
static Kvq__Cursor *next_cursor(const struct page *p)
{
    Kvq__Cursor *next = NULL;
    assert(p->n <= p->most);
    if (p->truncated && p->n)
        next = kvq__cursor_new(p->call->arena, p->call->d->identity->epoch,
                               p->call->request->command_case);
    if (next) {
        next->namespace_ = p->at.ns;
        next->id = p->at.id;
    }
    return next;
}

// ---- Sessions ----

int kvq__run_list_sessions(struct kvq__call *call)
{
    const Kvq__ListSessions *ask = call->request->list_sessions;
    struct page page = {.call = call}, *p = &page;
    uint64_t looks = KVQ__LIST_LOOKS;
    struct kvq__newest newest = kvq__core_newest(call->d->core);
    Kvq__SessionList *list = kvq_arena_alloc(call->arena, sizeof *list);
    struct kvq__session_info *infos = kvq_arena_alloc(call->arena, PIECE * sizeof *infos);
    if (!list || !infos)
        return kvq__call_no_room(call);
    int error = kvq__core_may_list(call->d->core, call->d->peer, ask->namespace_, call->text);
    error = error ? error
                  : begin_page(p, ask->cursor, (struct kvq__list_at){newest.ns, newest.session});
    for (uint32_t n = PIECE; !error && n == PIECE && !p->truncated;) {
        n = kvq__core_sessions(call->d->core, call->d->peer, ask->namespace_, p->at, &looks, infos,
                               PIECE);
        for (uint32_t i = 0; i < n && !p->truncated; i++) {
            Kvq__Session *s = kvq__session_message(call->arena, &infos[i], call->d->identity->isa);
            add_element(p, s ? &s->base : NULL,
                        (struct kvq__list_at){infos[i].ns_number, infos[i].id});
        }
    }
    kvq__session_list__init(list);
    list->sessions = (Kvq__Session **)p->elements;
    list->n_sessions = p->n;
    list->truncated = p->truncated;
    list->next = next_cursor(p);
    call->reply->sessions = list;
    call->reply->result_case = KVQ__REPLY__RESULT_SESSIONS;
    return error;
}

// ---- Clients ----

static Kvq__Client *client_message(struct kvq_arena *arena, const struct kvq__client_info *info)
{
    Kvq__Client *c = kvq_arena_alloc(arena, sizeof *c);
    if (!c)
        return NULL;
    kvq__client__init(c);
    c->id = info->id;
    c->name = kvq_arena_text(arena, info->name);
    c->pid = info->pid;
    c->uid = info->uid;
    c->queues = info->queues;
    c->buffers = info->buffers;
    c->buffer_bytes = info->buffer_bytes;
    c->sessions = info->sessions;
    c->requests = info->requests;
    c->connected_ms = info->connected_ms;
    return c;
}

int kvq__run_list_clients(struct kvq__call *call)
{
    const Kvq__ListClients *ask = call->request->list_clients;
    struct page page = {.call = call}, *p = &page;
    struct kvq__newest newest = kvq__core_newest(call->d->core);
    Kvq__ClientList *list = kvq_arena_alloc(call->arena, sizeof *list);
    struct kvq__client_info *infos = kvq_arena_alloc(call->arena, PIECE * sizeof *infos);
    if (!list || !infos)
        return kvq__call_no_room(call);
    int error = begin_page(p, ask->cursor, (struct kvq__list_at){0, newest.client});
    for (uint32_t n = PIECE; !error && n == PIECE && !p->truncated;) {
        n = kvq__core_clients(call->d->core, call->d->peer, p->at.id, infos, PIECE);
        for (uint32_t i = 0; i < n && !p->truncated; i++) {
            Kvq__Client *c = client_message(call->arena, &infos[i]);
            add_element(p, c ? &c->base : NULL, (struct kvq__list_at){0, infos[i].id});
        }
    }
    kvq__client_list__init(list);
    list->clients = (Kvq__Client **)p->elements;
    list->n_clients = p->n;
    list->truncated = p->truncated;
    list->next = next_cursor(p);
    call->reply->clients = list;
    call->reply->result_case = KVQ__REPLY__RESULT_CLIENTS;
    return error;
}

// ---- Formats, which stay the same for the daemon's whole run ----

static Kvq__Format *format_message(struct kvq_arena *arena, const struct kvq__format_info *info)
{
    const struct kvq_shape shape = {.kv_heads = 1, .k_dim = 128, .v_dim = 128};
    char layers[32] = "";
    Kvq__Format *f = kvq_arena_alloc(arena, sizeof *f);
    if (!f)
        return NULL;
    if (info->others && info->last == UINT32_MAX)
        snprintf(layers, sizeof layers, "others");
    else if (info->others)
        snprintf(layers, sizeof layers, info->first == info->last ? "%u" : "%u-%u", info->first,
                 info->last);
    kvq__format__init(f);
    f->name = kvq_arena_text(arena, info->name);
    f->layers = kvq_arena_text(arena, layers);
    f->row = kvq_arena_text(arena, info->row->name);
    f->own = info->own;
    f->bits_per_value = kvq_bits_per_value(info->row, &shape);
    f->unit_tokens = info->row->unit_tokens;
    f->recent_tokens = info->row->recent_tokens;
    f->sink_tokens = info->row->sink_tokens;
    f->source = kvq_arena_text(arena, info->row->source);
    f->recommended = !info->own && kvq_format_is_recommended(info->row);
    f->fast = kvq_has_fast_path(info->row);
    f->gpu_loop = kvq_has_gpu_loop(info->row);
    f->shares_prefix = kvq_shares_prefixes(info->row);
    bool book = kvq_has_centroids(info->row) && !strchr(info->row->name, '@');
    f->needs = kvq_arena_text(arena, book ? "codebook" : "");
    return f;
}

int kvq__run_list_formats(struct kvq__call *call)
{
    const Kvq__ListFormats *ask = call->request->list_formats;
    struct page page = {.call = call}, *p = &page;
    enum { MOST = KVQ_MAX_OWN_FORMATS * (KVQ_MAX_FORMAT_RANGES + 1) + KVQ_MAX_LIST };
    Kvq__FormatList *list = kvq_arena_alloc(call->arena, sizeof *list);
    struct kvq__format_info *infos = kvq_arena_alloc(call->arena, MOST * sizeof *infos);
    if (!list || !infos)
        return kvq__call_no_room(call);
    uint32_t n = kvq__core_formats(call->d->core, infos, MOST);
    assert(n <= MOST);
    int error = begin_page(p, ask->cursor, (struct kvq__list_at){0, n});
    for (uint64_t i = p->at.id; !error && i < n && !p->truncated; i++) {
        Kvq__Format *f = format_message(call->arena, &infos[i]);
        add_element(p, f ? &f->base : NULL, (struct kvq__list_at){0, i + 1});
    }
    kvq__format_list__init(list);
    list->formats = (Kvq__Format **)p->elements;
    list->n_formats = p->n;
    list->truncated = p->truncated;
    list->next = next_cursor(p);
    call->reply->formats = list;
    call->reply->result_case = KVQ__REPLY__RESULT_FORMATS;
    return error;
}

// ---- Namespaces: their prefixes, their limits, and what a status tells of them ----

static Kvq__PrefixStatus *prefix_message(struct kvq_arena *arena,
                                         const struct kvq__prefix_info *info)
{
    Kvq__PrefixStatus *p = kvq_arena_alloc(arena, sizeof *p);
    if (!p)
        return NULL;
    kvq__prefix_status__init(p);
    p->namespace_ = kvq_arena_text(arena, info->ns);
    p->pages = info->pages;
    p->bytes = info->bytes;
    p->idle_bytes = info->idle_bytes;
    p->lookups = info->lookups;
    p->hits = info->hits;
    p->hit_tokens = info->hit_tokens;
    p->asked_tokens = info->asked_tokens;
    p->evicted = info->evicted;
    return p;
}

int kvq__run_list_prefixes(struct kvq__call *call)
{
    const Kvq__ListPrefixes *ask = call->request->list_prefixes;
    struct page page = {.call = call}, *p = &page;
    struct kvq__newest newest = kvq__core_newest(call->d->core);
    Kvq__PrefixList *list = kvq_arena_alloc(call->arena, sizeof *list);
    struct kvq__prefix_info *infos = kvq_arena_alloc(call->arena, PIECE * sizeof *infos);
    if (!list || !infos)
        return kvq__call_no_room(call);
    int error = begin_page(p, ask->cursor, (struct kvq__list_at){newest.ns, 0});
    for (uint32_t n = PIECE; !error && n == PIECE && !p->truncated;) {
        n = kvq__core_prefixes(call->d->core, call->d->peer, p->at.ns, infos, PIECE);
        for (uint32_t i = 0; i < n && !p->truncated; i++) {
            Kvq__PrefixStatus *s = prefix_message(call->arena, &infos[i]);
            add_element(p, s ? &s->base : NULL, (struct kvq__list_at){infos[i].ns_number, 0});
        }
    }
    kvq__prefix_list__init(list);
    list->prefixes = (Kvq__PrefixStatus **)p->elements;
    list->n_prefixes = p->n;
    list->truncated = p->truncated;
    list->next = next_cursor(p);
    call->reply->prefixes = list;
    call->reply->result_case = KVQ__REPLY__RESULT_PREFIXES;
    return error;
}

typedef ProtobufCMessage *make_message(struct kvq_arena *, const struct kvq__namespace_info *);

// Fills a page with what is made of each namespace that the peer may see.
static int add_namespaces(struct page *p, const Kvq__Cursor *cursor, make_message *make)
{
    struct kvq__newest newest = kvq__core_newest(p->call->d->core);
    struct kvq__namespace_info *infos = kvq_arena_alloc(p->call->arena, PIECE * sizeof *infos);
    if (!infos)
        return kvq__call_no_room(p->call);
    int error = begin_page(p, cursor, (struct kvq__list_at){newest.ns, 0});
    for (uint32_t n = PIECE; !error && n == PIECE && !p->truncated;) {
        n = kvq__core_namespaces(p->call->d->core, p->call->d->peer, p->at.ns, infos, PIECE);
        for (uint32_t i = 0; i < n && !p->truncated; i++)
            add_element(p, make(p->call->arena, &infos[i]),
                        (struct kvq__list_at){infos[i].number, 0});
    }
    return error;
}

int kvq__run_list_quotas(struct kvq__call *call)
{
    const Kvq__ListQuotas *ask = call->request->list_quotas;
    struct page page = {.call = call}, *p = &page;
    if (ask->namespace_[0])
        return kvq__dispatch_quota(call->d, ask->namespace_, call->arena, call->reply, call->text);
    Kvq__QuotaList *list = kvq_arena_alloc(call->arena, sizeof *list);
    int error =
        list ? add_namespaces(p, ask->cursor, kvq__quota_status_message) : kvq__call_no_room(call);
    if (error)
        return error;
    kvq__quota_list__init(list);
    list->quotas = (Kvq__QuotaStatus **)p->elements;
    list->n_quotas = p->n;
    list->truncated = p->truncated;
    list->next = next_cursor(p);
    list->kept = call->d->identity->stores;
    call->reply->quotas = list;
    call->reply->result_case = KVQ__REPLY__RESULT_QUOTAS;
    return 0;
}

static ProtobufCMessage *namespace_message(struct kvq_arena *arena,
                                           const struct kvq__namespace_info *info)
{
    Kvq__NamespaceStatus *ns = kvq_arena_alloc(arena, sizeof *ns);
    if (!ns)
        return NULL;
    kvq__namespace_status__init(ns);
    ns->name = kvq_arena_text(arena, info->name);
    ns->limit = kvq__quota_message(arena, info->quota.limit);
    ns->used = kvq__quota_message(arena, info->used);
    return &ns->base;
}

int kvq__status_namespaces(struct kvq__call *call, Kvq__StatusReply *s)
{
    assert(s->n_counters == KVQ__COUNTERS && s->n_gpus <= KVQ_MAX_GPUS); // of the elements' number
    struct page page = {.call = call,
                        .most = KVQ_MAX_LIST - KVQ__COUNTERS - KVQ_MAX_GPUS,
                        .room = KVQ_MAX_MESSAGE - REST_BYTES};
    int error = add_namespaces(&page, call->request->status->cursor, namespace_message);
    s->namespaces = (Kvq__NamespaceStatus **)page.elements;
    s->n_namespaces = page.n;
    s->truncated = page.truncated;
    s->next = next_cursor(&page);
    return error;
}
