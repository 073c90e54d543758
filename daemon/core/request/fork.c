// SPDX-License-Identifier: Apache-2.0
//
// Fork: a new session with the first tokens of another. Both share whole pages that neither can
// change any more; the rest is copied. The request holds the new session exclusively until the
// copies are done, so that whoever guesses its handle waits.
#include "daemon/core/request/fork.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/request/admission.h"
#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/session/open.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

// ---- Where a session can be forked ----

// The token from which on raw rows are there, however far packing and releasing have come.
static uint64_t raw_start(const struct kvq__session *s, const struct kvq__layer *l)
{
    uint64_t packed = kvq__packed_at(s, l, s->floor) / KVQ_BLOCK_TOKENS * KVQ_BLOCK_TOKENS;
    return kvq__max(packed, l->base);
}

// Decided by counts alone, as is everything about where a session can be forked.
static bool has_learned(const struct kvq__session *s, const struct kvq__layer *l)
{
    return l->learn && s->floor >= l->learn && s->floor >= s->prompt.exact;
}

// The new session's base: tokens below it are there packed only. False if `at` cuts into a unit
// whose raw rows are gone, or into the tokens that the format has learned from.
bool kvq__fork_base(const struct kvq__session *s, const struct kvq__layer *l, uint64_t at,
                    uint64_t *base)
{
    uint64_t start = raw_start(s, l);
    *base = 0;
    if (l->packed_bytes == 0)
        return true;
    if (has_learned(s, l) && at < l->learn)
        return at == 0;
    *base = at >= start ? start : at;
    return at >= start || at % l->format->unit_tokens == 0;
}

// The new session's floor: what its views need must be there.
uint64_t kvq__fork_floor(const struct kvq__session *s, uint64_t at)
{
    uint64_t floor = at > s->max_rollback ? at - s->max_rollback : 0, base;
    if (at == 0) // no view needs anything
        return 0;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (!kvq__layer_owns(s, i))
            continue;
        uint64_t kept = kvq__first_kept(l, s->floor);
        if (kept && kept + l->keep - 1 > floor)
            floor = kept + l->keep - 1;
        if (kvq__fork_base(s, l, at, &base) && base > floor)
            floor = base;
    }
    return floor;
}

// The highest count at or below `at` where the session can be forked; 0 always can be.
uint64_t kvq__fork_possible(const struct kvq__session *s, uint64_t at)
{
    uint64_t lower = at, base;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if (kvq__layer_owns(s, i) && !kvq__fork_base(s, l, at, &base)) {
            uint64_t whole = at / l->format->unit_tokens * l->format->unit_tokens;
            whole = has_learned(s, l) && whole < l->learn ? 0 : whole;
            lower = kvq__min(whole, lower);
        }
    }
    return kvq__fork_floor(s, lower) <= lower ? lower : 0;
}

static int check_fork(struct kvq__queue *q, uint32_t i)
{
    uint64_t at = q->entries[i].position;
    int rc = kvq__entry_open(q, i, false);
    if (rc < 0)
        return rc;
    struct kvq__session *s = q->work[i].session;
    if (kvq__in_step(s))
        return kvq__entry_fail(q, i, KVQ_E_BUSY, s->tokens);
    if (at > s->tokens)
        return kvq__entry_fail(q, i, KVQ_E_POSITION, s->tokens);
    if (kvq__fork_possible(s, at) != at)
        return kvq__entry_fail(q, i, KVQ_E_ROLLBACK, kvq__fork_possible(s, at));
    return 0;
}

// ---- The new session ----

static int copy_identity(struct kvq__session *to, const struct kvq__session *from)
{
    const struct kvq__core_config *config = &from->core->config;
    assert(to->n_layers == from->n_layers && !to->published);
    for (uint32_t i = 0; i < from->n_layers; i++) {
        const struct kvq__layer *l = &from->layers[i];
        to->layers[i] = (struct kvq__layer){
            .shape = l->shape,
            .layout = l->layout,
            .book = l->book,
            .book_hold = l->book_hold,
            .raw_layout = l->raw_layout,
            .packed_bytes = l->packed_bytes,
            .sink_bytes = l->sink_bytes,
            .extras_bytes = l->extras_bytes,
            .raw_bytes = l->raw_bytes,
            .source = l->source,
            .keep = l->keep,
            .learn = l->learn,
        };
        if (l->book_hold)
            config->codebook_share(config->context, l->book_hold);
    }
    snprintf(to->spec.model, sizeof to->spec.model, "%s", from->spec.model);
    snprintf(to->spec.salt, sizeof to->spec.salt, "%s", from->spec.salt);
    snprintf(to->spec.adapter, sizeof to->spec.adapter, "%s", from->spec.adapter);
    to->foreign = from->foreign;
    to->pool = from->pool;
    to->n_owned = from->n_owned;
    to->shard = from->shard;
    to->shards = from->shards;
    to->max_rollback = from->max_rollback;
    to->prompt.tokens = from->prompt.tokens;
    to->prompt.exact = from->prompt.exact;
    to->prompt.packs_early = from->prompt.packs_early;
    to->path = from->path;
    to->v_rotation = from->v_rotation;
    to->dtype = from->dtype;
    to->spec.drop_on_detach = true;
    int rc = kvq__formats_copy(to, from);
    return rc ? rc : kvq__session_place(to);
}

struct cloning {
    struct kvq__session *to;
    struct kvq__copy *copies;
    uint32_t n_copies, room;
    uint64_t at, floor;
    uint32_t shared; // pages of sheets that both sessions share
    uint64_t bytes;  // of blocks needed so far
    uint64_t work;   // sheets, id parts and pages visited
    struct kvq__grant grant;
};

static void add_fork_copy(struct cloning *c, const struct kvq__copy *copy, uint64_t tokens)
{
    assert(tokens > 0);
    assert(c->n_copies < c->room && copy->from);
    c->copies[c->n_copies] = *copy;
    c->copies[c->n_copies++].tokens = (uint32_t)kvq__min(tokens, KVQ_BLOCK_TOKENS);
}

// How many packed tokens of a page have their raw rows behind the page's codes.
static uint32_t sinks_of(const struct kvq__layer *l, uint64_t start)
{
    return l->sink_bytes && start == 0 ? (uint32_t)kvq__min(l->format->sink_tokens, l->packed) : 0;
}

static int take_block(struct cloning *c, uint64_t bytes, struct kvq__ref *ref)
{
    c->bytes += bytes;
    return kvq__block_new(c->to->core, c->to->ns, c->to->pool, bytes, &c->grant, ref);
}

static int clone_packed(struct cloning *c, uint32_t layer, const struct kvq__pageref *from,
                        struct kvq__pageref *to, uint64_t start)
{
    struct kvq__layer *l = &c->to->layers[layer];
    assert(!to->packed.block);
    if (l->packed_bytes == 0)
        return 0;
    if (start >= (uint64_t)kvq__packed_pages(c->to, l, c->at) * KVQ_BLOCK_TOKENS)
        return 0;
    if (start + KVQ_BLOCK_TOKENS <= l->packed) {
        to->packed = kvq__block_share(from->packed);
        return 0;
    }
    uint32_t page = (uint32_t)(start / KVQ_BLOCK_TOKENS);
    int rc = take_block(c, kvq__packed_block_bytes(l, page), &to->packed);
    struct kvq__copy copy = {.from = from->packed.data,
                             .to = to->packed.data,
                             .layer = layer,
                             .sinks = sinks_of(l, start),
                             .packed = true};
    if (rc == 0 && l->packed > start)
        add_fork_copy(c, &copy, l->packed - start);
    return rc;
}

static int clone_raw(struct cloning *c, uint32_t layer, const struct kvq__pageref *from,
                     struct kvq__pageref *to, uint64_t start)
{
    uint64_t end = start + KVQ_BLOCK_TOKENS;
    assert(!to->raw.block && start < c->at);
    if (!from->raw.data && end <= c->at)
        return 0;
    if (from->raw.data && end <= c->floor) { // neither session can change it any more
        to->raw = kvq__block_share(from->raw);
        return 0;
    }
    uint32_t tokens = end < c->at ? KVQ_BLOCK_TOKENS : (uint32_t)(c->at - start);
    uint64_t bytes = kvq__raw_block_bytes(c->to->pool, &c->to->layers[layer], tokens);
    int rc = take_block(c, bytes, &to->raw);
    struct kvq__copy copy = {.from = from->raw.data, .to = to->raw.data, .layer = layer};
    if (rc == 0 && from->raw.data)
        add_fork_copy(c, &copy, c->at - start);
    return rc;
}

// Copies the extras before the blocks: packing the source's next units would change them.
static int clone_extras(struct cloning *c, const struct kvq__layer *from, struct kvq__layer *to)
{
    if (from->extras_bytes == 0 || !from->extras.data)
        return 0;
    int rc = take_block(c, from->extras_bytes, &to->extras);
    if (rc < 0)
        return rc;
    to->learned = from->learned && to->packed > 0;
    return to->packed ? kvq__extras_fork(c->to, from, to) : kvq__extras_init(c->to, to);
}

// Sheets of the page table in which neither session can change anything any more: all is packed, or
// stored for good, and behind every window.
static uint32_t final_sheets(const struct cloning *c, const struct kvq__session *from)
{
    uint64_t pages = c->floor / KVQ_BLOCK_TOKENS;
    for (uint32_t i = 0; i < from->n_layers; i++) {
        const struct kvq__layer *l = &from->layers[i];
        uint64_t final = c->floor / l->format->unit_tokens * l->format->unit_tokens;
        uint64_t packed = kvq__min(final, l->packed) / KVQ_BLOCK_TOKENS;
        if (!kvq__layer_owns(from, i))
            continue;
        if (l->keep)
            pages = kvq__min(pages, l->first_page);
        if (l->packed_bytes)
            pages = kvq__min(pages, packed);
        if (l->packed_bytes)
            pages = kvq__min(pages, l->raw_page);
    }
    return (uint32_t)(pages / KVQ__SHEET_PAGES);
}

static int clone_layer(struct cloning *c, const struct kvq__session *from, uint32_t layer)
{
    const struct kvq__layer *a = &from->layers[layer];
    struct kvq__layer *b = &c->to->layers[layer];
    uint32_t whole = (uint32_t)(c->at / KVQ_BLOCK_TOKENS);
    // The source may have packed units that the new session can still cut into.
    uint64_t final = c->floor / a->format->unit_tokens * a->format->unit_tokens;
    int rc;
    if (c->at == 0)
        return 0;
    kvq__fork_base(from, a, c->at, &b->base);
    b->packed = kvq__min(final, a->packed);
    rc = clone_extras(c, a, b);
    if (a->learn == 0 || a->learned)
        b->first_page = (uint32_t)(kvq__first_kept(a, from->floor) / KVQ_BLOCK_TOKENS);
    b->raw_page = a->raw_page < whole ? a->raw_page : whole;
    b->raw_page = b->raw_page > b->first_page ? b->raw_page : b->first_page;
    assert(b->first_page <= b->raw_page && b->raw_page <= c->to->n_pages);
    for (uint32_t p = b->first_page > c->shared ? b->first_page : c->shared;
         rc == 0 && p < c->to->n_pages; p++) {
        uint64_t start = (uint64_t)p * KVQ_BLOCK_TOKENS;
        c->work++;
        rc = clone_packed(c, layer, kvq__page(a, p), kvq__page(b, p), start);
        if (rc == 0)
            rc = clone_raw(c, layer, kvq__page(a, p), kvq__page(b, p), start);
    }
    return rc;
}

// Pages above the floor are copied raw and packed; below it at most one packed in part.
static uint32_t most_copies(const struct cloning *c)
{
    return c->to->n_owned * (2 * (uint32_t)((c->at - c->floor) / KVQ_BLOCK_TOKENS + 2) + 1);
}

static int clone_pages(struct cloning *c, const struct kvq__session *from)
{
    struct kvq__core *core = from->core;
    uint32_t sheets = final_sheets(c, from);
    int rc = kvq__sheets_share(c->to, from, sheets);
    c->shared = c->to->n_pages;
    assert(c->shared <= kvq__pages_of(c->at));
    rc = rc ? rc : kvq__pages_grow(c->to, kvq__pages_of(c->at));
    c->to->floor = c->floor;
    c->work += c->to->n_sheets + c->at / KVQ__IDS_PART;
    rc = rc ? rc : kvq__ids_fork(c->to, from, c->at);
    if (rc < 0)
        return rc;
    c->room = most_copies(c);
    c->copies = kvq__allocate(core, c->room * sizeof *c->copies);
    if (!c->copies)
        return KVQ_E_NO_MEMORY;
    c->to->n_pages = kvq__pages_of(c->at);
    c->to->tokens = c->at;
    for (uint32_t i = 0; rc == 0 && i < from->n_layers; i++)
        if (kvq__layer_owns(from, i))
            rc = clone_layer(c, from, i);
    return rc;
}

// Frees a session that nobody has seen.
static void clone_free(struct kvq__session *s)
{
    assert(!s->published && s->refs == 0);
    kvq__pages_unreserve(s, 0);
    kvq__session_free(s);
}

static int clone(struct cloning *c, struct kvq__session *from)
{
    int rc = kvq__session_new(from->ns, from->n_layers, &c->to);
    if (rc < 0)
        return rc;
    rc = copy_identity(c->to, from);
    if (rc == 0)
        rc = clone_pages(c, from);
    if (rc < 0) {
        kvq__deallocate(from->core, c->copies, c->room * sizeof *c->copies);
        clone_free(c->to);
    }
    return rc;
}

// ---- The request ----

// Makes the entry's new session, which nobody sees yet. False if the request is to wait for room.
// Adds the work to *work, also if it was in vain.
static bool clone_entry(struct kvq__queue *q, uint32_t i, uint64_t *work)
{
    struct kvq__entry *w = &q->work[i];
    struct cloning c = {.at = q->entries[i].position, .work = 1, .grant.may_wait = true};
    assert(!w->forked);
    c.floor = kvq__fork_floor(w->session, c.at);
    int rc = kvq__namespace_room(w->session->ns, NULL);
    rc = rc ? rc : clone(&c, w->session);
    *work += c.work;
    if (rc < 0 && kvq__admission_ask(q, i, &c.grant.refused, c.bytes))
        return false;
    if (rc < 0) {
        kvq__entry_fail(q, i, rc, w->session->tokens);
        return true;
    }
    w->forked = c.to;
    w->fork.copies = c.copies;
    w->fork.room = c.room;
    w->fork.work = c.work;
    w->fork.bytes = c.bytes;
    kvq__admission_took(q, i, c.bytes);
    w->n_items = c.n_copies;
    return true;
}

static void clone_undo(struct kvq__queue *q, struct kvq__entry *w)
{
    assert(w->forked && !w->forked->published);
    kvq__admission_gave_back(q, w->forked, w->fork.bytes);
    kvq__deallocate(q->core, w->fork.copies, w->fork.room * sizeof *w->fork.copies);
    clone_free(w->forked);
    w->forked = NULL;
}

// Likewise, but the session's memory is freed in pieces: there may be many sessions.
static void clone_discard(struct kvq__queue *q, struct kvq__entry *w)
{
    assert(w->forked && !w->forked->published);
    kvq__deallocate(q->core, w->fork.copies, w->fork.room * sizeof *w->fork.copies);
    kvq__session_free(w->forked);
    w->forked = NULL;
}

static void start_entry(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    struct kvq__handle *h = NULL;
    assert(w->forked);
    int rc = kvq__namespace_room(w->session->ns, NULL); // sessions were published since
    if (rc == 0)
        rc = kvq__handle_new(q->client, &h);
    if (rc < 0) {
        clone_discard(q, w);
        kvq__entry_fail(q, i, rc, w->session->tokens);
        return;
    }
    assert(h);
    kvq__session_publish(w->forked);
    kvq__handle_attach(h, w->forked, false);
    kvq__session_ref(w->forked);
    w->forked->exclusive = q;
    w->fork.handle = kvq__handle_value(h);
}

void kvq__fork_release(struct kvq__queue *q, struct kvq__entry *w)
{
    struct kvq__session *s = w->forked;
    if (!s)
        return;
    assert(s->exclusive == q && s->refs > 0);
    w->forked = NULL;
    s->exclusive = NULL;
    kvq__deallocate(q->core, w->fork.copies, w->fork.room * sizeof *w->fork.copies);
    if (!s->dropped && q->results[w - q->work].status < 0) {
        kvq__session_end(s, "the GPU failed"); // the GPU did not take the copies
    } else if (!s->dropped) {
        kvq__pages_release(s);
        kvq__pack_queue(s);
    }
    kvq__session_unref(s);
}

// Whether packing is changing the session's extras, or a GPU has yet to pack units to be copied.
static bool is_being_packed(const struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        if ((l->packer && l->extras.data) ||
            !kvq__work_stream_ended(l->pack_stream, l->pack_number))
            return true;
    }
    return false;
}

// Gives the new sessions back, which nobody has seen, until the turn's work is used up. Afterwards
// nothing of the request is held any more.
static enum kvq__progress undo_on(struct kvq__queue *q)
{
    uint64_t work = 0;
    assert(q->undoing && q->cloned <= q->header.count);
    for (; q->cloned > 0; q->cloned--) {
        struct kvq__entry *w = &q->work[q->cloned - 1];
        if (work >= q->core->config.fork_work)
            return KVQ__AGAIN;
        work += w->forked ? w->fork.work : 1;
        if (w->forked)
            clone_undo(q, w);
    }
    q->cloning = q->undoing = false;
    kvq__request_release(q);
    kvq__flight_end(q->core, &q->flight);
    return q->client->gone || q->ending ? kvq__request_end(q, KVQ_E_CANCELLED) : KVQ__WAIT;
}

// Checks the entry's session again: the request holds it, but it may have changed.
static int check_again(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__session *s = q->work[i].session;
    uint64_t at = q->entries[i].position;
    if (s->dropped)
        return kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
    if (kvq__fork_possible(s, at) != at)
        return kvq__entry_fail(q, i, KVQ_E_ROLLBACK, kvq__fork_possible(s, at));
    return 0;
}

// Makes new sessions until the turn's work is used up, or all are there. If the request is to wait
// for room, or is late, it gives all of them back.
enum kvq__progress kvq__fork_on(struct kvq__queue *q)
{
    static const struct kvq__pass *const passes[] = {&kvq__pass_fork};
    uint64_t work = 0;
    assert(q->cloning && q->cloned <= q->header.count);
    q->undoing |= q->client->gone || q->ending || kvq__request_is_late(q);
    if (q->undoing)
        return undo_on(q);
    kvq__admission_go_on(q);
    for (; q->cloned < q->header.count; q->cloned++) {
        uint32_t i = q->cloned;
        bool enough = work >= q->core->config.fork_work;
        if (!enough && (!kvq__entry_alive(q, i) || check_again(q, i) < 0))
            continue;
        if (enough || is_being_packed(q->work[i].session)) {
            kvq__admission_pause(q);
            return enough ? KVQ__AGAIN : KVQ__WAIT;
        }
        if (!clone_entry(q, i, &work)) {
            q->undoing = true;
            return undo_on(q);
        }
    }
    q->cloning = false;
    for (uint32_t i = 0; i < q->header.count; i++)
        if (q->work[i].forked)
            start_entry(q, i);
    return kvq__request_run(q, passes, 1);
}

enum kvq__progress kvq__op_fork(struct kvq__queue *q)
{
    assert(!q->cloning);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (check_fork(q, i) == 0 &&
            (q->work[i].session->exclusive || is_being_packed(q->work[i].session)))
            return KVQ__WAIT;
    kvq__flight_begin(q->core, &q->flight);
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i))
            kvq__hold_reading(q, i);
    q->cloning = true;
    q->undoing = false;
    q->cloned = 0;
    return kvq__fork_on(q);
}

static bool prepare_fork(struct kvq__queue *q, uint32_t i)
{
    (void)q;
    (void)i;
    return true;
}

static uint32_t count_fork(const struct kvq__entry *w)
{
    return w->n_items;
}

static void copy_packed(const struct kvq__layer *l, const struct kvq__copy *c)
{
    size_t n = l->layout.groups + (size_t)(c->tokens / KVQ_GROUP_TOKENS) * l->layout.group_bytes;
    assert(c->tokens % KVQ_GROUP_TOKENS == 0);
    for (uint32_t h = 0; h < l->shape.kv_heads; h++) {
        size_t record = (size_t)h * l->layout.record_bytes;
        memcpy(c->to + record, c->from + record, n);
    }
    if (c->sinks)
        kvq_sinks_copy(l->format, &l->shape, c->from + l->packed_bytes, c->to + l->packed_bytes,
                       c->sinks);
}

// Copies only committed rows: a step of the source may be writing those behind them.
static void copy_raw(const struct kvq__layer *l, const struct kvq__copy *c)
{
    const struct kvq_raw_layout *raw = &l->raw_layout;
    uint32_t whole = c->tokens / KVQ_GROUP_TOKENS * KVQ_GROUP_TOKENS, rest = c->tokens - whole;
    memcpy(c->to, c->from, kvq_raw_bytes(raw, whole));
    for (uint32_t h = 0; h < l->shape.kv_heads && rest; h++) {
        uint32_t k = kvq_raw_at(raw, h, whole, false), v = k + raw->v_offset;
        memcpy(c->to + k, c->from + k, (size_t)rest * raw->row_bytes);
        memcpy(c->to + v, c->from + v, (size_t)rest * raw->row_bytes);
    }
}

void kvq__copy_tokens(const struct kvq__layer *l, const struct kvq__copy *c)
{
    if (c->packed)
        copy_packed(l, c);
    else
        copy_raw(l, c);
}

static void run_fork(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace)
{
    const struct kvq__copy *c = &q->work[i].fork.copies[item];
    assert(item < q->work[i].n_items);
    (void)workspace;
    kvq__copy_tokens(&q->work[i].session->layers[c->layer], c);
}

static void end_fork(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__entry *w = &q->work[i];
    if (w->forked->dropped)
        kvq__entry_fail(q, i, KVQ_E_CANCELLED, 0);
    else
        q->results[i].value = w->fork.handle;
}

const struct kvq__pass kvq__pass_fork = {.prepare = prepare_fork,
                                         .stages = {{count_fork, run_fork}},
                                         .n_stages = 1,
                                         .end = end_fork,
                                         .gpu_wave = kvq__gpu_fork_wave,
                                         .gpu_room = kvq__gpu_fork_room};
