// SPDX-License-Identifier: Apache-2.0
//
// Packing on a GPU: one launch for the units of any layers and sessions. It serves requests that
// are about to read the units packed, and sessions whose steps have made units due that no request
// has asked for.
#include <assert.h>

#include "daemon/core/request/gpu_wave.h"

// Units of one layer; lies in the arena, and is of no use to the GPU.
struct kvq__pack_part {
    STAILQ_ENTRY(kvq__pack_part) link;
    struct kvq__session *session;
    struct kvq__layer *layer;
    uint64_t first, end; // tokens
    kvq_gpu_ptr guard;
};

static uint64_t units_between(const struct kvq__layer *l, uint64_t first, uint64_t end)
{
    assert(first <= end && (end - first) % l->format->unit_tokens == 0);
    return (end - first) / l->format->unit_tokens;
}

static bool has_lesson(const struct kvq__layer *l, uint64_t first)
{
    return l->learn && !l->learned && first == 0;
}

// What a part takes of the arena besides its units, at most.
static size_t part_room(const struct kvq__layer *l, uint64_t first)
{
    size_t pages =
        has_lesson(l, first) ? kvq__pages_of(l->learn) * sizeof(struct kvq_page) + 64 : 0;
    return sizeof(struct kvq__pack_part) + sizeof(struct kvq_gpu_lesson) + sizeof(uint32_t) +
           KVQ__RECIPE_ROOM + 2 * sizeof(void *) + pages;
}

size_t kvq__packs_room(const struct kvq__layer *l, uint64_t first, uint64_t end)
{
    return part_room(l, first) + units_between(l, first, end) * sizeof(struct kvq_gpu_unit);
}

void kvq__packs_begin(struct kvq__packs *p, struct kvq__queue *q)
{
    *p = (struct kvq__packs){.queue = q};
    STAILQ_INIT(&p->parts);
}

uint64_t kvq__packs_add(struct kvq__packs *p, struct kvq__session *s, uint32_t layer, uint64_t end,
                        kvq_gpu_ptr guard)
{
    struct kvq__queue *q = p->queue;
    struct kvq__layer *l = &s->layers[layer];
    uint64_t first = l->enqueued > l->packed ? l->enqueued : l->packed;
    uint64_t units = end > first ? units_between(l, first, end) : 0;
    size_t used = q->arena_used + p->room + KVQ__WAVE_ROOM + part_room(l, first) + 64;
    uint64_t left = used < q->arena_bytes ? q->arena_bytes - used : 0;
    uint64_t most = left / sizeof(struct kvq_gpu_unit);
    assert(q->stream && kvq__layer_owns(s, layer));
    p->cut |= units > most;
    units = units < most ? units : most;
    if (units == 0)
        return first;
    end = first + units * l->format->unit_tokens;
    struct kvq__pack_part *part = kvq__arena_take(q, sizeof *part);
    assert(part);
    *part = (struct kvq__pack_part){
        .session = s, .layer = l, .first = first, .end = end, .guard = guard};
    STAILQ_INSERT_TAIL(&p->parts, part, link);
    p->room += kvq__packs_room(l, first, end);
    p->n_parts++;
    p->n_units += (uint32_t)units;
    p->n_lessons += has_lesson(l, first);
    l->enqueued = guard ? end : 0;
    l->pack_stream = q->stream;
    l->pack_number = q->stream->given + 1; // which closing the chunk gives
    return end;
}

bool kvq__packs_add_all(struct kvq__packs *p, struct kvq__session *s, uint64_t tokens,
                        kvq_gpu_ptr guard)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        uint64_t due = kvq__layer_owns(s, i) ? kvq__packed_at(s, l, tokens) : 0;
        if (due > l->packed && due > l->enqueued && kvq__packs_add(p, s, i, due, guard) < due)
            return false;
    }
    return true;
}

// What is launched.
struct packing {
    struct kvq__wave wave;
    struct kvq_gpu_unit *units;
    struct kvq_gpu_lesson *lessons;
    uint32_t *runs;
    uint32_t n_units, n_lessons, n_runs;
};

static void fill_lesson(struct packing *p, const struct kvq__pack_part *part,
                        const struct kvq_gpu_unit *unit)
{
    const struct kvq__layer *l = part->layer;
    uint32_t n = kvq__pages_of(l->learn);
    struct kvq_page *pages = kvq__wave_take(&p->wave, n * sizeof *pages);
    for (uint32_t i = 0; i < n; i++)
        pages[i] = (struct kvq_page){.raw = kvq__page(l, i)->raw.data};
    p->lessons[p->n_lessons++] = (struct kvq_gpu_lesson){
        unit->recipe, kvq__wave_there(&p->wave, pages), unit->extras, unit->guard, l->learn};
}

static void fill_part(struct packing *p, const struct kvq__pack_part *part)
{
    const struct kvq__layer *l = part->layer;
    struct kvq_gpu_unit unit = {
        .recipe = kvq__wave_there(&p->wave, kvq__wave_recipe(&p->wave, l)),
        .book = kvq__wave_there(&p->wave, kvq__wave_book(&p->wave, l)),
        .extras = kvq__extras_ref(part->session, l).data,
        .guard = (const uint32_t *)(uintptr_t)part->guard,
        .learned = l->learn,
    };
    if (has_lesson(l, part->first))
        fill_lesson(p, part, &unit);
    p->runs[p->n_runs++] = p->n_units;
    for (uint64_t t = part->first; t < part->end; t += l->format->unit_tokens) {
        const struct kvq__pageref *page = kvq__page(l, (uint32_t)(t / KVQ_BLOCK_TOKENS));
        assert(page->raw.data && page->packed.data);
        unit.raw_block = page->raw.data;
        unit.packed_block = page->packed.data;
        unit.first = (uint32_t)(t % KVQ_BLOCK_TOKENS);
        unit.block_start = t - unit.first;
        p->units[p->n_units++] = unit;
    }
}

#define THERE(p, array) ((kvq_gpu_ptr)(uintptr_t)kvq__wave_there(&(p)->wave, array))

static int launch_pack(struct packing *p)
{
    struct kvq__wave *wave = &p->wave;
    const struct kvq_gpu *gpu = kvq__gpu_kernels(wave->stream->gpu);
    struct kvq_gpu_work lessons = kvq__wave_work(wave, p->n_lessons);
    struct kvq_gpu_work units = kvq__wave_work(wave, p->n_units);
    int failed = kvq_gpu_learn(gpu, &lessons, THERE(p, p->lessons), wave->text, sizeof wave->text);
    failed = failed ? failed
                    : kvq_gpu_pack(gpu, &units, THERE(p, p->units), THERE(p, p->runs), p->n_runs,
                                   wave->text, sizeof wave->text);
    return kvq__wave_launched(wave, KVQ_GPU_LEARN_LAUNCHES + KVQ_GPU_PACK_LAUNCHES, failed);
}

int kvq__packs_launch(struct kvq__packs *packs)
{
    struct packing p = {0};
    struct kvq__pack_part *part;
    if (packs->n_parts == 0)
        return 0;
    packs->queue->wave_start = packs->queue->arena_used; // parts are not handed over
    kvq__wave_begin_for(&p.wave, packs->queue, packs->n_parts);
    p.units = kvq__wave_take(&p.wave, packs->n_units * sizeof *p.units);
    p.lessons = kvq__wave_take(&p.wave, packs->n_lessons * sizeof *p.lessons);
    p.runs = kvq__wave_take(&p.wave, (packs->n_parts + 1) * sizeof *p.runs);
    STAILQ_FOREACH (part, &packs->parts, link)
        fill_part(&p, part);
    p.runs[p.n_runs] = p.n_units;
    assert(p.n_units == packs->n_units && p.n_lessons == packs->n_lessons);
    assert(p.n_runs == packs->n_parts);
    int rc = kvq__wave_copy(&p.wave);
    return rc ? rc : launch_pack(&p);
}

void kvq__packs_done(const struct kvq__packs *packs)
{
    const struct kvq__pack_part *part, *next;
    for (part = STAILQ_FIRST(&packs->parts); part; part = next) {
        next = STAILQ_NEXT(part, link);
        if (part->guard)
            continue;
        assert(part->first == part->layer->packed && part->end > part->first);
        part->layer->packed = part->end;
        part->layer->learned = part->layer->learn > 0;
        if (!next || next->session != part->session)
            kvq__pages_release(part->session);
    }
}

void kvq__packs_refused(const struct kvq__packs *packs)
{
    const struct kvq__pack_part *part;
    STAILQ_FOREACH (part, &packs->parts, link) {
        struct kvq__layer *l = part->layer;
        assert(part->first >= l->packed);
        if (part->guard && l->enqueued > part->first)
            l->enqueued = part->first > l->packed ? part->first : 0;
    }
}

bool kvq__packs_must_wait(const struct kvq__session *s, const struct kvq__layer *l,
                          const struct kvq__work_stream *stream)
{
    return l->packer || s->in_step.committing ||
           (l->pack_stream != stream && !kvq__work_stream_ended(l->pack_stream, l->pack_number)) ||
           (l->format->outliers && kvq__is_read(s));
}

// ---- In a request ----

static struct kvq__layer *layer_of_pack_entry(const struct kvq__queue *q, uint32_t i)
{
    return kvq__source_layer(q->work[i].session, q->header.layer);
}

size_t kvq__gpu_pack_room(const struct kvq__queue *q, uint32_t i)
{
    const struct kvq__entry *w = &q->work[i];
    return w->n_items ? kvq__packs_room(layer_of_pack_entry(q, i), w->pack.first, w->pack.end) + 64
                      : 0;
}

int kvq__gpu_pack_wave(struct kvq__queue *q)
{
    struct kvq__packs packs;
    kvq__packs_begin(&packs, q);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++) {
        const struct kvq__entry *w = &q->work[i];
        if (!kvq__wave_has(q, i))
            continue;
        uint32_t layer = w->session->layers[q->header.layer].source;
        uint64_t end = kvq__packs_add(&packs, w->session, layer, w->pack.end, 0);
        assert(end == w->pack.end); // its room was asked for
        (void)end;
    }
    return kvq__packs_launch(&packs);
}

// ---- Before anybody asks ----

// The work stream that packs the session's units: behind its writer's work. NULL: no writer.
static struct kvq__work_stream *stream_of(const struct kvq__session *s)
{
    const struct kvq__core *core = s->core;
    for (uint32_t i = 0; s->writer && i + 1 < core->n_pools; i++)
        if (core->pools[i + 1].gpu == s->pool->gpu)
            return s->writer->client->streams[i];
    return NULL;
}

enum state { NOTHING_DUE, WAITS, READY };

static enum state state_of(const struct kvq__session *s, const struct kvq__work_stream *stream)
{
    enum state state = NOTHING_DUE;
    for (uint32_t i = 0; state != READY && i < s->n_layers; i++)
        if (kvq__pack_due(s, i) > s->layers[i].packed)
            state = kvq__packs_must_wait(s, &s->layers[i], stream) ? WAITS : READY;
    return state;
}

static void add_packed_session(struct kvq__packs *packs, struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct kvq__layer *l = &s->layers[i];
        uint64_t due = kvq__pack_due(s, i);
        if (due > l->packed && !kvq__packs_must_wait(s, l, packs->queue->stream))
            kvq__packs_add(packs, s, i, due, 0);
    }
}

static bool open_background(struct kvq__packs *packs, struct kvq__work_stream *stream)
{
    struct kvq__queue *q = stream->core->packing.queue;
    if (!kvq__work_stream_open(stream, q))
        return false;
    kvq__flight_begin(stream->core, &q->flight);
    kvq__packs_begin(packs, q);
    return true;
}

// A launch that is refused may be refused for as long as the daemon runs.
#define PACK_AGAIN_NS 1000000000ull

// The work stream takes over the flight: it may still read what the session gives back now.
static void close_background(struct kvq__packs *packs)
{
    struct kvq__queue *q = packs->queue;
    int rc = kvq__gpu_enter(q->stream->gpu) ? KVQ_E_SYSTEM : kvq__packs_launch(packs);
    if (rc == 0)
        kvq__packs_done(packs);
    else
        q->stream->pack_again_at = q->core->now + PACK_AGAIN_NS;
    kvq__work_stream_close(q->stream, q, true);
}

// One launch on a work stream. True if there is more to pack, for another launch.
static bool pack_on(struct kvq__work_stream *stream)
{
    struct kvq__packs packs = {0};
    struct kvq__session *s = TAILQ_FIRST(&stream->core->packing.gpus), *next;
    for (; s && !packs.cut; s = next) {
        next = TAILQ_NEXT(s, pack.link);
        if (stream_of(s) != stream)
            continue;
        enum state state = state_of(s, stream);
        if (state == NOTHING_DUE)
            kvq__pack_unqueue(s);
        if (state != READY)
            continue;
        if (!packs.queue && !open_background(&packs, stream))
            return false; // until something has ended there
        add_packed_session(&packs, s);
    }
    if (packs.queue)
        close_background(&packs);
    return packs.cut && packs.n_parts > 0;
}

static void forget_unwritten(struct kvq__core *core)
{
    struct kvq__session *s = TAILQ_FIRST(&core->packing.gpus), *next;
    for (; s; s = next) {
        next = TAILQ_NEXT(s, pack.link);
        if (!stream_of(s))
            kvq__pack_unqueue(s);
    }
}

void kvq__pack_on_gpus(struct kvq__core *core)
{
    struct kvq__work_stream *stream;
    if (TAILQ_EMPTY(&core->packing.gpus))
        return;
    forget_unwritten(core);
    LIST_FOREACH (stream, &core->streams.used, link)
        while (core->now >= stream->pack_again_at && pack_on(stream))
            ;
}
