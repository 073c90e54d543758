// SPDX-License-Identifier: Apache-2.0
//
// A STEP on a GPU: one launch that stores all layers of the wave's sessions, one that packs what
// will be due then (gpu_pack.c), and one that publishes the client's page tables, all behind each
// other on the work stream. Work that asks for more than a chunk of the work stream is cut between
// layers.
//
// What is packed and published depends on the stores' counts of values that are not finite, which
// nobody on the host has seen by then: see gpu_commit.h.
#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "daemon/core/request/append.h"
#include "daemon/core/request/gpu_commit.h"
#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/request/step_all.h"
#include "daemon/core/request/views.h"
#include "daemon/core/session/table.h"

#define THERE(wave, array) ((kvq_gpu_ptr)(uintptr_t)kvq__wave_there(wave, array))

// Its first word is the one to look at.
static kvq_gpu_ptr guard_of(const struct kvq__queue *q, uint32_t i)
{
    assert(q->entries[i].append == 0 || q->work[i].session->in_step.counts);
    static_assert(offsetof(struct kvq_gpu_store_counts, nonfinite) == 0, "guards");
    return q->entries[i].append ? q->work[i].session->in_step.counts->at : 0;
}

// Takes layers from the end of the entry's last wave on, as many as there is room for. False if
// there is room for none.
static bool take_layers(struct kvq__queue *q, uint32_t i,
                        size_t (*room_of)(const struct kvq__queue *q, uint32_t i, uint32_t layer))
{
    struct kvq__entry *w = &q->work[i];
    uint32_t from = w->part.more ? w->part.to : 0, to = from, n = w->session->n_layers;
    size_t used = q->arena_used + q->wave_room + KVQ__WAVE_ROOM, room = 0;
    assert(from < n);
    for (; to < n; to++) {
        size_t more = kvq__layer_owns(w->session, to) ? room_of(q, i, to) : 0;
        if (used + room + more > q->arena_bytes)
            break;
        room += more;
    }
    if (to == from)
        return false;
    w->part.from = from;
    w->part.to = to;
    w->part.room = room;
    w->part.more = to < n;
    return true;
}

size_t kvq__gpu_part_room(const struct kvq__queue *q, uint32_t i)
{
    return q->work[i].part.room;
}

void kvq__gpu_part_none(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    w->part.from = w->part.to = 0;
    w->part.room = 0;
    w->part.more = false;
}

// ---- Storing ----

static uint32_t count_step_all_stores(const struct kvq__queue *q, uint32_t i)
{
    return q->work[i].all.list ? kvq__paged_count(&q->header, &q->entries[i]) : 1;
}

static size_t store_room(const struct kvq__queue *q, uint32_t i, uint32_t layer)
{
    (void)layer;
    return q->work[i].n_pages * sizeof(struct kvq_page) + 64 + KVQ__RECIPE_ROOM +
           2 * sizeof(void *) + count_step_all_stores(q, i) * sizeof(struct kvq_gpu_store_job);
}

bool kvq__gpu_store_all_prepare(struct kvq__queue *q, uint32_t i)
{
    return take_layers(q, i, store_room);
}

// Jobs of one layer.
static void fill_layer(struct kvq__wave *wave, uint32_t i, uint32_t layer,
                       struct kvq_gpu_store_job **next)
{
    struct kvq__queue *q = wave->queue;
    const struct kvq__entry *w = &q->work[i];
    const struct kvq__layer *l = &w->session->layers[layer];
    struct kvq__source source = kvq__step_all_source(q, i, layer);
    const struct kvq_recipe *recipe = kvq__wave_recipe(wave, l);
    uint32_t first = (uint32_t)(w->past / KVQ_BLOCK_TOKENS), n = q->entries[i].append;
    assert(first + w->n_pages <= w->session->n_pages);
    struct kvq_page *pages = kvq__wave_take(wave, w->n_pages * sizeof *pages);
    for (uint32_t p = 0; p < w->n_pages; p++)
        pages[p] = (struct kvq_page){.raw = kvq__page(l, first + p)->raw.data};
    for (uint32_t t = 0; t < n; (*next)++) {
        struct kvq_gpu_store_job job = {
            .recipe = kvq__wave_there(wave, recipe),
            .pages = (const struct kvq_page *)kvq__wave_there(wave, pages) - first,
            .start = w->past + t,
            .counts = (void *)(uintptr_t)w->session->in_step.counts->at,
        };
        uint32_t run = kvq__store_run(q, i, &source, t, &job.k, &job.v);
        job.tokens = run < n - t ? run : n - t;
        t += job.tokens;
        **next = job;
    }
}

static void fill_entry(struct kvq__wave *wave, uint32_t i, struct kvq_gpu_store_job **next)
{
    struct kvq__entry *w = &wave->queue->work[i];
    for (uint32_t l = w->part.from; l < w->part.to; l++)
        if (kvq__layer_owns(w->session, l)) {
            fill_layer(wave, i, l, next);
            assert(w->session->in_step.layers < w->session->n_owned);
            w->session->in_step.layers++;
        }
    if (!w->session->in_step.committing)
        kvq__gpu_commit_begin(w->session);
    w->commits_on_gpu = true;
}

static bool entry_stores(const struct kvq__queue *q, uint32_t i)
{
    return kvq__entry_alive(q, i) && q->work[i].part.to > q->work[i].part.from;
}

// A step that lacks the layers of a failed wave is no step: the commit undoes it.
static void forget_stores(struct kvq__queue *q)
{
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (entry_stores(q, i))
            q->work[i].session->in_step.layers = 0;
}

int kvq__gpu_store_all_wave(struct kvq__queue *q)
{
    struct kvq__wave wave;
    uint32_t n = 0, layers = 0, most = 0;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (entry_stores(q, i)) {
            const struct kvq__entry *w = &q->work[i];
            layers += w->part.to - w->part.from;
            n += (w->part.to - w->part.from) * count_step_all_stores(q, i);
            most = q->entries[i].append > most ? q->entries[i].append : most;
        }
    if (n == 0)
        return 0;
    kvq__wave_begin_for(&wave, q, layers);
    struct kvq_gpu_store_job *jobs = kvq__wave_take(&wave, n * sizeof *jobs), *next = jobs;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (entry_stores(q, i))
            fill_entry(&wave, i, &next);
    assert((size_t)(next - jobs) <= n);
    int rc = kvq__wave_copy(&wave);
    struct kvq_gpu_work work = kvq__wave_work(&wave, (uint32_t)(next - jobs));
    rc = rc ? rc
            : kvq__wave_launched(&wave, 1,
                                 kvq_gpu_store(kvq__gpu_kernels(wave.stream->gpu), &work,
                                               THERE(&wave, jobs), most, wave.text,
                                               sizeof wave.text));
    if (rc < 0)
        forget_stores(q);
    return rc;
}

// ---- Packing ----

// A group is not packed or published before all its shards have committed.
static bool waits_for_group(const struct kvq__queue *q, uint32_t i)
{
    return q->work[i].session->group && q->entries[i].append > 0;
}

bool kvq__gpu_pack_all_prepare(struct kvq__queue *q, uint32_t i)
{
    struct kvq__entry *w = &q->work[i];
    if (!q->packs.queue)
        kvq__packs_begin(&q->packs, q);
    kvq__gpu_part_none(q, i);
    if (waits_for_group(q, i) || w->unpacked)
        return true;
    uint32_t had = q->packs.n_parts;
    w->part.more =
        !kvq__packs_add_all(&q->packs, w->session, w->past + q->entries[i].append, guard_of(q, i));
    return !w->part.more || q->packs.n_parts > had;
}

static bool has_units_due(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq__session *s = q->work[i].session;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        const struct kvq__layer *layer = &s->layers[l];
        uint64_t due = kvq__layer_owns(s, l)
                           ? kvq__packed_at(s, layer, q->work[i].past + q->entries[i].append)
                           : 0;
        if (due > layer->packed && due > layer->enqueued)
            return true;
    }
    return false;
}

// Fails an entry behind its stores, which are enqueued and will commit: no code may say to try
// again. The value is the count that the session will have.
static void fail_behind_stores(struct kvq__queue *q, uint32_t i, int rc)
{
    uint32_t n = q->entries[i].append;
    kvq__entry_fail(q, i, n > 0 && rc == KVQ_E_NO_MEMORY ? KVQ_E_UNSUPPORTED : rc,
                    q->work[i].past + n);
}

// If packing fails the stored tokens commit all the same, and their units stay due for others to
// pack. An entry that stores nothing came only to pack, and fails.
int kvq__gpu_pack_all_wave(struct kvq__queue *q)
{
    if (!q->packs.queue) // the sessions of all its entries were dropped
        return 0;
    int rc = kvq__packs_launch(&q->packs);
    if (rc < 0)
        kvq__packs_refused(&q->packs);
    else
        kvq__packs_done(&q->packs);
    q->packs.queue = NULL;
    for (uint32_t i = q->wave_from; rc < 0 && i < q->wave_to; i++)
        if (kvq__entry_alive(q, i) && has_units_due(q, i)) {
            q->work[i].unpacked = true;
            if (q->entries[i].append == 0)
                kvq__entry_fail(q, i, rc, q->work[i].past);
        }
    return rc == KVQ_E_SYSTEM ? rc : 0;
}

// ---- Publishing ----

enum { ROW = 4096 }; // bytes that a block of threads copies at a time

// Pieces of tables on their way: written to the chunk, then copied to where the tables lie.
struct publishing {
    struct kvq__wave wave;
    struct kvq_gpu_copy *jobs;
    uint32_t n;
    kvq_gpu_ptr table;
    const uint32_t *guard;
    // The table's copy on the host, and the piece that is yet to be written there.
    uint8_t *copy, *piece;
    uint64_t piece_at;
    size_t piece_bytes;
};

static struct kvq__table *table_of(const struct kvq__queue *q, uint32_t i)
{
    struct kvq__table *t = q->work[i].table;
    return t && !t->closed && t->session && !waits_for_group(q, i) ? t : NULL;
}

// A piece is rows and what is left of them; the table's own head comes with the last layer.
static size_t publish_room(const struct kvq__queue *q, uint32_t i, uint32_t layer)
{
    const struct kvq__table *t = q->work[i].table;
    struct kvq__table_run run =
        kvq__table_changes(t, layer, q->work[i].past + q->entries[i].append);
    return (run.to > run.from ? run.to - run.from : 0) * sizeof(struct kvq_table_entry) +
           sizeof(struct kvq_table_layer) + 3 * 64 + 6 * sizeof(struct kvq_gpu_copy);
}

// A table names due units as packed ones. If they are not packed, the table stays as it was.
bool kvq__gpu_publish_prepare(struct kvq__queue *q, uint32_t i)
{
    bool has_table = table_of(q, i) != NULL;
    if (has_table && !q->work[i].unpacked)
        return take_layers(q, i, publish_room);
    kvq__gpu_part_none(q, i);
    if (has_table && kvq__entry_alive(q, i))
        fail_behind_stores(q, i, KVQ_E_NO_MEMORY);
    return true;
}

static void add_publish_copy(struct publishing *p, uint64_t offset, const uint8_t *from,
                             size_t bytes, uint32_t rows)
{
    if (bytes > 0 && rows > 0)
        p->jobs[p->n++] = (struct kvq_gpu_copy){.to = (uint8_t *)(uintptr_t)(p->table + offset),
                                                .from = kvq__wave_there(&p->wave, from),
                                                .guard = p->guard,
                                                .stride = bytes,
                                                .bytes = (uint32_t)bytes,
                                                .rows = rows};
}

// The client reads the copy once the request is answered, wherever the GPU is by then.
static void write_copy(struct publishing *p)
{
    if (p->copy && p->piece_bytes > 0)
        memcpy(p->copy + p->piece_at, p->piece, p->piece_bytes);
    p->piece_bytes = 0;
}

static uint8_t *place(void *context, uint64_t offset, size_t bytes)
{
    struct publishing *p = context;
    assert(p->table && bytes > 0);
    uint8_t *memory = kvq__wave_take(&p->wave, bytes);
    write_copy(p);
    p->piece = memory;
    p->piece_at = offset;
    p->piece_bytes = bytes;
    uint32_t rows = (uint32_t)(bytes / ROW);
    add_publish_copy(p, offset, memory, ROW, rows);
    add_publish_copy(p, offset + (uint64_t)rows * ROW, memory + (size_t)rows * ROW, bytes % ROW, 1);
    return memory;
}

static void publish_entry(struct publishing *p, uint32_t i)
{
    struct kvq__queue *q = p->wave.queue;
    const struct kvq__entry *w = &q->work[i];
    struct kvq__table *t = table_of(q, i);
    uint64_t tokens = w->past + q->entries[i].append;
    struct kvq__table_writer writer = {p, place};
    assert(t->memory.gpu && kvq__pages_of(tokens) <= t->memory.pages);
    p->table = t->memory.gpu;
    p->guard = (const uint32_t *)(uintptr_t)guard_of(q, i);
    p->copy = t->memory.copy;
    for (uint32_t l = w->part.from; l < w->part.to; l++)
        if (kvq__layer_owns(w->session, l))
            kvq__table_publish_layer(t, l, tokens, &writer);
    if (!w->part.more)
        kvq__table_publish_head(t, tokens, &writer);
    write_copy(p);
}

int kvq__gpu_publish_wave(struct kvq__queue *q)
{
    struct publishing p = {0};
    uint32_t most = 0;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (entry_stores(q, i) && table_of(q, i))
            most += 4 * (q->work[i].part.to - q->work[i].part.from) + 1;
    if (most == 0)
        return 0;
    kvq__wave_begin_for(&p.wave, q, 0);
    p.jobs = kvq__wave_take(&p.wave, most * sizeof *p.jobs);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (entry_stores(q, i) && table_of(q, i))
            publish_entry(&p, i);
    assert(p.n <= most);
    int rc = kvq__wave_copy(&p.wave);
    struct kvq_gpu_work work = kvq__wave_work(&p.wave, p.n);
    rc = rc ? rc
            : kvq__wave_launched(&p.wave, 1,
                                 kvq_gpu_copy_rows(kvq__gpu_kernels(p.wave.stream->gpu), &work,
                                                   THERE(&p.wave, p.jobs), p.wave.text,
                                                   sizeof p.wave.text));
    for (uint32_t i = q->wave_from; rc < 0 && i < q->wave_to; i++)
        if (entry_stores(q, i) && table_of(q, i)) {
            kvq__table_lost(table_of(q, i)); // the next step writes all of the table
            fail_behind_stores(q, i, rc);
        }
    return rc == KVQ_E_SYSTEM ? rc : 0;
}
