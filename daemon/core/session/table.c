// SPDX-License-Identifier: Apache-2.0
//
// Page tables of clients that attend in their own context: what they say, and the leases behind
// them. A table holds a reference to each block that it names, so that nobody's truncate, drop or
// eviction takes a block away that the client may be reading; what it names changes only when the
// client has it published again, by a STEP, and so reads no more by what it was.
#include <assert.h>
#include <string.h>

#include "daemon/core/session/table.h"

static_assert(sizeof(struct kvq_table_entry) == sizeof(struct kvq_page) &&
                  offsetof(struct kvq_table_entry, raw) == offsetof(struct kvq_page, raw) &&
                  offsetof(struct kvq_table_entry, tokens) == offsetof(struct kvq_page, tokens) &&
                  offsetof(struct kvq_table_entry, packed_tokens) ==
                      offsetof(struct kvq_page, packed_tokens),
              "kernels read tables as they are");

// ---- Life ----

static size_t pages_bytes(const struct kvq__table *t)
{
    return (size_t)t->memory.layers * t->memory.pages * sizeof(struct kvq__pageref);
}

static void free_table(struct kvq__table *t)
{
    struct kvq__namespace *ns = t->ns;
    assert(t->uses == 0 && !t->session);
    kvq__ns_deallocate(ns, t->layers, t->memory.layers * sizeof *t->layers);
    kvq__ns_deallocate(ns, t->pages, pages_bytes(t));
    kvq__ns_deallocate(ns, t, sizeof *t);
}

// NULL: *rc says why.
static struct kvq__table *new_table(struct kvq__client *client, struct kvq__namespace *ns,
                                    const struct kvq__table_memory *m, int *rc)
{
    struct kvq__table *t = kvq__ns_allocate(ns, sizeof *t, rc);
    if (!t)
        return NULL;
    t->client = client;
    t->ns = ns;
    t->memory = *m;
    t->layers = kvq__ns_allocate(ns, m->layers * sizeof *t->layers, rc);
    t->pages = t->layers ? kvq__ns_allocate(ns, pages_bytes(t), rc) : NULL;
    if (!t->pages) {
        free_table(t);
        return NULL;
    }
    for (uint32_t i = 0; i < m->layers; i++)
        t->layers[i].pages = t->pages + (size_t)i * m->pages;
    return t;
}

static int handle_of_table(struct kvq__client *client, uint64_t handle, struct kvq__handle **h,
                           char *text)
{
    int rc = kvq__handle_get(client, handle, h);
    return rc == 0 ? 0
                   : kvq__fail(text, rc, "handle %#llx is no open session of this client",
                               (unsigned long long)handle);
}

// What does not depend on the table's memory.
static int check_new_table(const struct kvq__handle *h, char *text)
{
    const struct kvq__session *s = h->session;
    if (h->table)
        return kvq__fail(text, KVQ_E_EXISTS, "this session has a page table already");
    if (s->move)
        return kvq__fail(text, KVQ_E_BUSY,
                         "this session is being moved; try again when it is there");
    if (s->foreign)
        return kvq__fail(text, KVQ_E_UNSUPPORTED,
                         "the session began with another namespace's prefix, whose memory this "
                         "client cannot map; attend through the daemon");
    return 0;
}

static int check_table_memory(const struct kvq__session *s, const struct kvq__table_memory *m,
                              char *text)
{
    assert(!m->host == (m->on != NULL));
    if (m->layers != s->n_layers)
        return kvq__fail(text, KVQ_E_SHAPE, "a page table for %u layers; the session has %u",
                         m->layers, s->n_layers);
    // The session's stream writes the table: memory of another GPU would be a sticky fault.
    if (m->on != kvq__home_of(s)->gpu)
        return kvq__fail(text, KVQ_E_INVALID,
                         "a page table in memory of %s; it must lie where its session does, on %s",
                         m->on ? kvq__gpu_uuid_text(m->on) : "the host",
                         kvq__pool_name(kvq__home_of(s)));
    if (m->pages < kvq__pages_of(s->tokens))
        return kvq__fail(
            text, KVQ_E_LIMIT, "a page table for %llu tokens; the session has %llu: make it larger",
            (unsigned long long)m->pages * KVQ_BLOCK_TOKENS, (unsigned long long)s->tokens);
    return 0;
}

int kvq__table_ask(struct kvq__client *client, uint64_t handle, char *text)
{
    struct kvq__handle *h;
    int rc = handle_of_table(client, handle, &h, text);
    return rc ? rc : check_new_table(h, text);
}

int kvq__table_open(struct kvq__client *client, uint64_t handle, uint64_t pool_at,
                    const struct kvq__table_memory *memory, char *text)
{
    struct kvq__handle *h;
    int rc = handle_of_table(client, handle, &h, text);
    rc = rc ? rc : check_new_table(h, text);
    rc = rc ? rc : check_table_memory(h->session, memory, text);
    if (rc < 0)
        return rc;
    struct kvq__table *t = new_table(client, h->session->ns, memory, &rc);
    if (!t)
        return kvq__ns_refused(h->session->ns, rc, "another page table", text);
    t->handle = handle;
    t->pool_at = pool_at;
    t->session = h->session;
    h->table = t;
    LIST_INSERT_HEAD(&client->tables, t, client_link);
    LIST_INSERT_HEAD(&h->session->tables, t, session_link);
    return 0;
}

void kvq__tables_orphan(struct kvq__session *s)
{
    struct kvq__table *t;
    while ((t = LIST_FIRST(&s->tables))) {
        assert(t->session == s);
        LIST_REMOVE(t, session_link);
        t->session = NULL;
    }
}

static void drop_pages(struct kvq__table *t, struct kvq__table_layer *l)
{
    struct kvq__core *core = t->client->core;
    assert(l->first_page <= l->n_pages && l->n_pages <= t->memory.pages);
    for (uint32_t i = l->first_page; i < l->n_pages; i++) {
        kvq__block_let_go(core, &l->pages[i].packed);
        kvq__block_let_go(core, &l->pages[i].raw);
    }
    kvq__block_let_go(core, &l->extras);
}

// Gives back the references and the memory, once nothing in flight uses the table.
static void end_table(struct kvq__table *t)
{
    const struct kvq__core_config *config = &t->client->core->config;
    assert(t->closed && t->uses == 0);
    LIST_REMOVE(t, client_link);
    for (uint32_t i = 0; i < t->memory.layers; i++)
        drop_pages(t, &t->layers[i]);
    if (config->table_gone)
        config->table_gone(config->context, t->client->id, &t->memory);
    free_table(t);
}

static void close_table(struct kvq__table *t)
{
    struct kvq__handle *h;
    assert(!t->closed);
    LIST_REMOVE(t, client_link);
    if (t->session)
        LIST_REMOVE(t, session_link);
    t->session = NULL;
    t->closed = true;
    kvq__handle_get(t->client, t->handle, &h);
    if (h && h->table == t)
        h->table = NULL;
    LIST_INSERT_HEAD(&t->client->core->closed_tables, t, client_link);
    if (t->uses == 0)
        end_table(t);
}

int kvq__table_close(struct kvq__client *client, uint64_t handle, char *text)
{
    struct kvq__table *t;
    LIST_FOREACH (t, &client->tables, client_link)
        if (t->handle == handle) {
            close_table(t);
            return 0;
        }
    return kvq__fail(text, KVQ_E_STALE, "no page table of handle %#llx is open",
                     (unsigned long long)handle);
}

void kvq__tables_close(struct kvq__client *client)
{
    struct kvq__table *t;
    while ((t = LIST_FIRST(&client->tables)))
        close_table(t);
}

void kvq__table_unuse(struct kvq__table *t)
{
    assert(t->uses > 0);
    if (--t->uses == 0 && t->closed)
        end_table(t);
}

// ---- What others do to the session ----

void kvq__tables_dirty(struct kvq__session *s, uint32_t page)
{
    struct kvq__table *t;
    LIST_FOREACH (t, &s->tables, session_link)
        for (uint32_t i = 0; i < t->memory.layers; i++)
            if (t->layers[i].settled > page)
                t->layers[i].settled = page;
}

bool kvq__tables_need(const struct kvq__session *s, const struct kvq__table *but, uint64_t tokens)
{
    const struct kvq__table *t;
    LIST_FOREACH (t, &s->tables, session_link)
        if (t != but && t->tokens > tokens)
            return true;
    return false;
}

// ---- Publishing ----

// What a layer's entries are made of.
struct view {
    struct kvq__table *table;
    const struct kvq__layer *layer;
    uint64_t tokens, packed;
    uint32_t n_pages;
};

static struct view view_of(struct kvq__table *t, uint32_t layer, uint64_t tokens)
{
    const struct kvq__layer *l = &t->session->layers[layer];
    assert(layer < t->memory.layers && t->session->n_layers == t->memory.layers);
    return (struct view){t, l, tokens, kvq__packed_at(t->session, l, tokens),
                         kvq__pages_of(tokens)};
}

struct kvq__table_run kvq__table_changes(const struct kvq__table *t, uint32_t layer,
                                         uint64_t tokens)
{
    const struct kvq__table_layer *was = &t->layers[layer];
    uint32_t first_page = t->session->layers[layer].first_page, n = kvq__pages_of(tokens);
    struct kvq__table_run run = {was->settled, n > was->n_pages ? n : was->n_pages};
    if (was->first_page < first_page && was->first_page < run.from)
        run.from = was->first_page; // entries behind the window are cleared
    assert(run.to <= t->memory.pages);
    return run;
}

static uint64_t address(const struct kvq__table *t, const struct kvq__ref *ref)
{
    if (!ref->block)
        return 0;
    const struct kvq__extent *e = ref->block->extent;
    uint64_t at = (uint64_t)(ref->data - e->memory.base);
    assert(at + ref->block->bytes <= e->size->bytes);
    return t->pool_at + e->number * kvq__extent_unit(e->owner->pool) + at;
}

static void hold_page(struct kvq__core *core, struct kvq__ref *mine, const struct kvq__ref *ref,
                      const struct kvq__drop *drop)
{
    if (mine->block == ref->block)
        return;
    kvq__block_drop(core, mine, drop);
    *mine = kvq__block_share(*ref);
    if (mine->block)
        kvq__extent_show(mine->block->extent);
}

static struct kvq_table_entry table_entry_of(const struct view *v, uint32_t page,
                                             const struct kvq__drop *drop)
{
    static const struct kvq__pageref none;
    struct kvq__core *core = v->table->client->core;
    struct kvq__table_layer *was = &v->table->layers[v->layer - v->table->session->layers];
    bool there = page >= v->layer->first_page && page < v->n_pages;
    assert(page < v->table->memory.pages);
    const struct kvq__pageref *p = there ? kvq__page(v->layer, page) : &none;
    hold_page(core, &was->pages[page].packed, &p->packed, drop);
    hold_page(core, &was->pages[page].raw, &p->raw, drop);
    return (struct kvq_table_entry){.packed = address(v->table, &p->packed),
                                    .raw = address(v->table, &p->raw),
                                    .tokens = there ? kvq__page_part(v->tokens, page) : 0,
                                    .packed_tokens = there ? kvq__page_part(v->packed, page) : 0};
}

static uint64_t layer_at(const struct kvq__table *t, uint32_t layer)
{
    assert(layer < t->memory.layers);
    return sizeof(struct kvq_table_page) + layer * kvq_table_layer_bytes(t->memory.pages);
}

// 0 as long as the first page, in which sinks alone stand, has no packed block, or when it is gone.
static uint64_t extras_address(const struct view *v)
{
    const struct kvq__layer *l = v->layer;
    if (l->sink_bytes == 0)
        return address(v->table, &l->extras);
    bool there = l->first_page == 0 && v->n_pages > 0;
    uint64_t first = there ? address(v->table, &kvq__page(l, 0)->packed) : 0;
    return first ? first + l->packed_bytes : 0;
}

static void write_head(const struct view *v, uint32_t layer, const struct kvq__drop *drop,
                       const struct kvq__table_writer *writer)
{
    struct kvq__table *t = v->table;
    struct kvq__table_layer *was = &t->layers[layer];
    const struct kvq__layer *l = v->layer;
    // On a GPU kernels look at counts alone: nothing is read there before units are packed.
    bool has_extras = kvq__extras_view(t->session, l, v->tokens) != NULL || !t->memory.host;
    struct kvq_table_layer head = {.n_pages = v->n_pages};
    assert(l->shape.kv_heads <= sizeof head.outliers / sizeof *head.outliers);
    hold_page(t->client->core, &was->extras, &l->extras, drop);
    head.extras = has_extras ? extras_address(v) : 0;
    bool counts = has_extras && l->format->outliers && t->memory.host;
    for (uint32_t h = 0; counts && h < l->shape.kv_heads; h++)
        head.outliers[h] = (uint8_t)kvq_outliers_published(l->format, &l->shape, l->extras.data, h);
    if (!counts && was->n_pages == v->n_pages && was->extras_at == head.extras)
        return;
    was->extras_at = head.extras;
    memcpy(writer->place(writer->context, layer_at(t, layer), sizeof head), &head, sizeof head);
}

void kvq__table_publish_layer(struct kvq__table *t, uint32_t layer, uint64_t tokens,
                              const struct kvq__table_writer *writer)
{
    struct kvq__table_layer *was = &t->layers[layer];
    struct view v = view_of(t, layer, tokens);
    struct kvq__table_run run = kvq__table_changes(t, layer, tokens);
    struct kvq__drop drop = kvq__drop_by(t->session, UINT64_MAX);
    uint64_t at = layer_at(t, layer) + sizeof(struct kvq_table_layer);
    size_t one = sizeof(struct kvq_table_entry);
    write_head(&v, layer, &drop, writer);
    uint8_t *out = run.from < run.to ? writer->place(writer->context, at + run.from * one,
                                                     (run.to - run.from) * one)
                                     : NULL;
    for (uint32_t page = run.from; page < run.to; page++, out += one) {
        struct kvq_table_entry entry = table_entry_of(&v, page, &drop);
        memcpy(out, &entry, sizeof entry);
    }
    // Raw blocks go, and counts grow, from here on.
    uint64_t settled = v.packed / KVQ_BLOCK_TOKENS;
    was->settled = v.layer->raw_page < settled ? v.layer->raw_page : (uint32_t)settled;
    was->first_page = v.layer->first_page;
    was->n_pages = v.n_pages;
}

void kvq__table_publish(struct kvq__table *t, uint64_t tokens,
                        const struct kvq__table_writer *writer)
{
    const struct kvq__session *s = t->session;
    assert(s && kvq__pages_of(tokens) <= t->memory.pages && kvq__pages_of(tokens) <= s->n_pages);
    for (uint32_t i = 0; i < s->n_layers; i++)
        if (kvq__layer_owns(s, i))
            kvq__table_publish_layer(t, i, tokens, writer);
    kvq__table_publish_head(t, tokens, writer);
}

void kvq__table_publish_head(struct kvq__table *t, uint64_t tokens,
                             const struct kvq__table_writer *writer)
{
    assert(kvq__pages_of(tokens) <= t->memory.pages);
    t->tokens = tokens;
    uint64_t head[] = {tokens, ++t->number};
    memcpy(writer->place(writer->context, offsetof(struct kvq_table_page, tokens), sizeof head),
           head, sizeof head);
}

void kvq__table_lost(struct kvq__table *t)
{
    for (uint32_t i = 0; i < t->memory.layers; i++) {
        t->layers[i].settled = 0;
        t->layers[i].extras_at = UINT64_MAX;
    }
    if (t->session)
        t->tokens = t->session->tokens;
}

static uint8_t *place_on_host(void *context, uint64_t offset, size_t bytes)
{
    (void)bytes;
    return (uint8_t *)context + offset;
}

void kvq__table_publish_on_host(struct kvq__table *t, uint64_t tokens)
{
    struct kvq__table_writer writer = {t->memory.host, place_on_host};
    const struct kvq__session *s = t->session;
    assert(t->memory.host);
    for (uint32_t i = 0; i < s->n_layers; i++) // what the view reads packed is packed
        assert(!kvq__layer_owns(s, i) ||
               s->layers[i].packed >= kvq__packed_at(s, &s->layers[i], tokens));
    kvq__table_publish(t, tokens, &writer);
}
