// SPDX-License-Identifier: Apache-2.0
//
// The simulation's whole steps in one request, and the page tables that they publish.
//
// On the host a step commits while its request goes on to pack; on a GPU when its work has ended,
// whoever has the session by then: a client that is gone has its step or has it not, as a whole.
// So commits are looked for as soon as the core has gone on.
#include <stdlib.h>
#include <string.h>

#include "daemon/core/residency/evict.h"
#include "daemon/core/session/table.h"
#include "tests/core/sim.h"

enum { PAGES = (SIM_MAX_TOKENS + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS };

// ---- Building one ----

void whole_fill(struct actor *a)
{
    const struct track *t = a->parts[0].hold->track;
    a->header.layer = MODEL_LAYERS;
    a->header.slots = (uint16_t)kvq_request_slots(a->header.count, MODEL_LAYERS);
    for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
        bool own = !t || t->model.layers[i].source == i;
        a->member.layers[i] = (struct kvq_step_layer){0};
        if (own)
            a->member.layers[i] = (struct kvq_step_layer){a->header.k, a->header.v};
    }
}

// ---- What must come of it ----

int whole_predict(struct actor *a, uint32_t i)
{
    const struct track *t = a->parts[i].track;
    if (a->entries[i].append == 0)
        return 0;
    if (t->stepper)
        return KVQ_E_BUSY;
    for (uint32_t l = 0; l < MODEL_LAYERS; l++)
        if ((t->model.layers[l].source == l) != (a->member.layers[l].k.buffer != 0))
            return t->model.layers[l].source == l ? KVQ_E_INCOMPLETE : KVQ_E_INVALID;
    return 0;
}

void whole_began(struct actor *a, uint32_t i)
{
    struct part *p = &a->parts[i];
    p->table = p->hold->table;
    if (a->entries[i].append == 0)
        return;
    p->track->stepper = a;
    p->track->step_tokens = a->entries[i].append;
    p->serial = ++p->track->step_serial;
    p->whole = true;
}

// ---- Whether it did ----

static void commit(struct sim *sim, struct actor *a, uint32_t i)
{
    const struct kvq_entry_wire *e = &a->entries[i];
    struct part *p = &a->parts[i];
    MUST(!p->poisoned);
    for (uint32_t l = 0; l < MODEL_LAYERS; l++)
        if (p->track->model.layers[l].source == l)
            model_write(&p->track->model, l, p->past, e->append,
                        actor_k(a) + (size_t)e->row * SIM_ROW,
                        actor_v(a) + (size_t)e->row * SIM_ROW, SIM_ROW);
    model_commit(&p->track->model, e->append);
    sim->committed += e->append;
    if (p->track->step_serial == p->serial)
        track_leave_step(p->track);
}

// The request has ended and this is not committed.
static void undone(struct actor *a, uint32_t i, bool untold)
{
    struct part *p = &a->parts[i];
    bool ours = p->track->step_serial == p->serial;
    p->whole = false;
    p->track->untold = untold && ours && p->track->writer == a;
    if (ours)
        track_leave_step(p->track);
}

void whole_follow(struct sim *sim, struct actor *a)
{
    const struct kvq_result *results = kvq__queue_results(a->member.queue);
    for (uint32_t i = 0; a->header.op == KVQ_OP_STEP && i < a->header.count; i++) {
        struct part *p = &a->parts[i];
        bool no_memory = results[i].status == KVQ_E_NO_MEMORY || results[i].status == KVQ_E_QUOTA;
        if (p->whole && no_memory)
            undone(a, i, false);
        const struct kvq__session *s =
            p->whole && p->track->alive ? find_session(sim, p->track->id) : NULL;
        if (!s || s->in_step.committing || s->tokens == p->past)
            continue;
        MUST(s->tokens == p->past + a->entries[i].append);
        commit(sim, a, i);
        p->whole = false;
        p->committed = true;
    }
}

static const struct kvq_table_entry *entries_of(const struct kvq_table_page *page, uint32_t layer)
{
    return (const void *)((const uint8_t *)(page + 1) + layer * kvq_table_layer_bytes(PAGES) +
                          sizeof(struct kvq_table_layer));
}

// The table says what the session's own view says, as far as the session has not gone on.
static void check_table(struct sim *sim, const struct hold *h, uint64_t tokens)
{
    const struct kvq__session *s = h->track ? find_session(sim, h->track->id) : NULL;
    struct kvq_page pages[PAGES];
    MUST(h->table->tokens == tokens);
    for (uint32_t l = 0; s && s->tokens == tokens && l < MODEL_LAYERS; l++) {
        if (!kvq__layer_owns(s, l))
            continue;
        uint32_t n = kvq__pages_view(s, l, tokens, tokens, pages);
        for (uint32_t i = s->layers[l].first_page; i < n; i++) {
            const struct kvq_table_entry *e = &entries_of(h->table, l)[i];
            MUST(e->tokens == pages[i].tokens && e->packed_tokens == pages[i].packed_tokens);
            MUST(!e->packed_tokens || e->packed);
            MUST(e->packed_tokens == e->tokens || e->raw);
        }
    }
    sim->tables += s && s->tokens == tokens;
}

void whole_done(struct sim *sim, struct actor *a, uint32_t i, const struct kvq_result *r)
{
    struct part *p = &a->parts[i];
    // A reader of the host's sees what is committed when its turn comes.
    bool later = a->entries[i].append == 0 && !p->on_gpu;
    uint64_t tokens = later ? r->value : p->past + a->entries[i].append;
    bool committed = p->committed;
    if (r->status == 0) {
        MUST(r->value == tokens);
        // On a stream it was answered before anybody knew.
        MUST(committed || a->entries[i].append == 0 || a->header.flags & KVQ_REQ_ON_STREAM);
        MUST(committed || !p->whole || p->poisoned || !p->track->alive ||
             p->track->step_serial != p->serial);
        bool published = committed || a->entries[i].append == 0;
        if (published && p->table && p->hold->table == p->table && p->hold->track == p->track)
            check_table(sim, p->hold, tokens);
    } else {
        MUST(!committed || !p->track->alive);
        MUST(r->status != KVQ_E_NONFINITE || p->poisoned);
    }
    if (p->whole)
        undone(a, i, r->status == 0 && p->poisoned);
}

// ---- Tables ----

void table_open(struct sim *sim, struct actor *a, struct hold *h)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__table_memory memory = {.layers = MODEL_LAYERS, .pages = PAGES};
    size_t bytes = kvq_table_bytes(MODEL_LAYERS, PAGES);
    if (h->table || !h->track)
        return;
    // Where it belongs: what has made room is elsewhere only until it is used.
    memory.on = kvq__home_of(find_session(sim, h->track->id))->gpu;
    bool on_gpu = memory.on != NULL;
    void *page = on_gpu ? sim_gpus()->memory_new(bytes) : malloc(bytes);
    memset(page, 0, bytes);
    if (on_gpu)
        memory.gpu = (uintptr_t)page;
    else
        memory.host = page;
    int rc = kvq__table_open(a->member.client, h->handle, 1ull << 40, &memory, text);
    MUST(rc == 0 || rc == KVQ_E_BUSY || (rc == KVQ_E_NO_MEMORY && sim->kit.fail_one_in)); // moved
    h->table = rc ? NULL : page;
    if (rc)
        table_free(sim, &memory);
}

void table_close(struct actor *a, struct hold *h)
{
    if (h->table)
        MUST(kvq__table_close(a->member.client, h->handle, NULL) == 0);
    h->table = NULL;
}

void table_free(void *context, const struct kvq__table_memory *memory)
{
    (void)context;
    if (memory->host)
        free(memory->host);
    else
        sim_gpus()->memory_free((void *)(uintptr_t)memory->gpu);
}
