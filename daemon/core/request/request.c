// SPDX-License-Identifier: Apache-2.0
//
// Requests: how they start, wait, are cut into jobs, and end with what they hold given back.
// entries.c has what every operation does with its entries; the operations have files of their own.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core/request/admission.h"
#include "daemon/core/request/append.h"
#include "daemon/core/request/fork.h"
#include "daemon/core/request/gpu_commit.h"
#include "daemon/core/request/pack.h"
#include "daemon/core/request/pack_error.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/prefix.h"
#include "daemon/core/session/table.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

enum { BRIEF_TOKENS = 16 }; // a request that only appends, and no more than these, is brief

enum { NEED_COUNT = 1, NEW_WORK = 2 }; // the operation needs entries; is refused while draining

struct operation {
    const char *name;
    kvq__operation *start;
    uint16_t flags; // request flags it takes
    uint8_t needs;
};

static kvq__operation op_nop;

static const struct operation operations[KVQ_OP_COUNT] = {
    [KVQ_OP_NOP] = {"NOP", op_nop, 0, 0},
    [KVQ_OP_STEP_BEGIN] = {"STEP_BEGIN", kvq__op_step_begin, KVQ_REQ_TOKEN_IDS | KVQ_REQ_WAIT_ROOM,
                           NEED_COUNT | NEW_WORK},
    [KVQ_OP_APPEND] = {"APPEND", kvq__op_append, KVQ_REQ_PAGED_KV | KVQ_REQ_ON_STREAM, NEED_COUNT},
    [KVQ_OP_ATTEND] = {"ATTEND", kvq__op_attend, KVQ_REQ_PAST_ONLY | KVQ_REQ_ON_STREAM, NEED_COUNT},
    [KVQ_OP_APPEND_ATTEND] = {"APPEND_ATTEND", kvq__op_append_attend,
                              KVQ_REQ_PAST_ONLY | KVQ_REQ_PAGED_KV | KVQ_REQ_ON_STREAM, NEED_COUNT},
    [KVQ_OP_STEP_END] = {"STEP_END", kvq__op_step_end, KVQ_REQ_TOKEN_IDS, 0},
    [KVQ_OP_STEP_ABORT] = {"STEP_ABORT", kvq__op_step_abort, 0, 0},
    [KVQ_OP_TRUNCATE] = {"TRUNCATE", kvq__op_truncate, 0, NEED_COUNT},
    [KVQ_OP_FORK] = {"FORK", kvq__op_fork, KVQ_REQ_WAIT_ROOM, NEED_COUNT | NEW_WORK},
    [KVQ_OP_ACCEPT] = {"ACCEPT", kvq__op_accept, 0, NEED_COUNT},
    [KVQ_OP_READ] = {"READ", kvq__op_read, KVQ_REQ_ON_STREAM, NEED_COUNT},
    [KVQ_OP_STEP] = {"STEP", kvq__op_step,
                     KVQ_REQ_PAGED_KV | KVQ_REQ_ON_STREAM | KVQ_REQ_TOKEN_IDS | KVQ_REQ_WAIT_ROOM,
                     NEED_COUNT | NEW_WORK},
};

// ---- What the poller sees ----

struct kvq_request *kvq__queue_header(struct kvq__queue *q)
{
    return &q->header;
}

struct kvq_entry_wire *kvq__queue_entries(struct kvq__queue *q)
{
    return q->entries;
}

struct kvq_step_layer *kvq__queue_layers(struct kvq__queue *q)
{
    return q->layers;
}

struct kvq__job *kvq__queue_job(struct kvq__queue *q)
{
    return &q->job;
}

const struct kvq_completion *kvq__queue_completion(const struct kvq__queue *q)
{
    return &q->completion;
}

const struct kvq_result *kvq__queue_results(const struct kvq__queue *q)
{
    return q->results;
}

// ---- What a request gives back ----

// Leaves the step of a STEP that did not get as far as its commit. Runs before the stream takes
// over what the request holds, since the stream's end tells nobody.
static void leave_own_step(struct kvq__queue *q, struct kvq__entry *w)
{
    if (w->tail_use && w->session->step == &q->own_step)
        kvq__step_leave(w->session);
}

static void release_work(struct kvq__queue *q, struct kvq__entry *w)
{
    struct kvq__session *s = w->session;
    assert(w->held || !(w->reading || w->tail_use || w->exclusive || w->packing));
    assert(!w->exclusive || s->exclusive == q);
    if (w->reading)
        kvq__reading_end(s, w->reading);
    leave_own_step(q, w);
    if (w->commits_on_gpu)
        kvq__gpu_commit(s, w->table, &(struct kvq_result){0});
    w->commits_on_gpu = false;
    if (w->tail_use)
        kvq__tail_end(s);
    if (w->exclusive)
        s->exclusive = NULL;
    if (w->packing)
        kvq__packing_release_layer(q, s);
    if (w->packing_all)
        kvq__packing_release_all(q, w);
    kvq__pack_sample_end(q->core, &w->sample); // of an entry that failed
    if (w->table)
        kvq__table_unuse(w->table);
    w->table = NULL;
    if (w->held)
        kvq__session_unref(s);
    w->tail_use = w->exclusive = w->packing = w->held = false;
    w->reading = 0;
}

void kvq__request_release(struct kvq__queue *q)
{
    if (q->holding)
        for (uint32_t i = 0; i < q->header.count; i++) {
            kvq__fork_release(q, &q->work[i]);
            release_work(q, &q->work[i]);
        }
    kvq__buffers_unuse(q->client, &q->held_buffers);
    q->holding = false;
}

// ---- Waves, stages, jobs ----

// The wave's entry that an item belongs to: the last one that starts at or before the item.
static uint32_t entry_of_item(const struct kvq__queue *q, uint32_t item)
{
    uint32_t low = 0, high = q->wave_to - q->wave_from;
    assert(item < q->job.n_items);
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (q->first_item[middle] <= item)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void run_wave_item(struct kvq__job *job, uint32_t item, void *workspace)
{
    struct kvq__queue *q = (void *)((char *)job - offsetof(struct kvq__queue, job));
    uint32_t entry = entry_of_item(q, item);
    const struct kvq__stage *stage = &q->passes[q->pass]->stages[q->stage];
    stage->item(q, q->wave_from + entry, item - q->first_item[entry], workspace);
}

// Opens a chunk for the next wave; false if there is no room yet. If the stream cannot wait for the
// client, all entries fail: the client is yet to write what they would read.
static bool open_chunk(struct kvq__queue *q)
{
    int rc = kvq__work_stream_open_for(q);
    for (uint32_t i = 0; rc < 0 && i < q->header.count; i++)
        if (kvq__entry_alive(q, i))
            kvq__entry_fail(q, i, rc, q->work[i].past);
    return rc != 0;
}

// Finds the place of the next entries; a wave is for one place. False if the place's work stream
// has no room yet. After the last pass the chunk stays open: closing it hands over what the request
// holds.
static bool wave_place(struct kvq__queue *q)
{
    uint32_t i = q->wave_to;
    while (i < q->header.count && !kvq__entry_alive(q, i))
        i++;
    bool any = i < q->header.count;
    q->gpu = any ? q->work[i].session->pool->gpu : NULL;
    if (any && q->stream && q->stream->gpu != q->gpu)
        kvq__work_stream_close(q->stream, q, false);
    if (q->gpu && !q->stream)
        return open_chunk(q);
    if (!q->stream)
        q->arena_used = 0;
    return true;
}

// The most operations of a wave, so that the driver does not block the poller. A single entry may
// have more, on an idle stream.
static uint32_t most_ops(const struct kvq__queue *q, uint32_t i)
{
    bool idle = i == q->wave_from && q->stream->use->ops <= KVQ__CHUNK_OPS;
    return idle ? KVQ_MAX_GPU_BURST : kvq__work_stream_ops_left(q->stream);
}

// Prepares an entry. True if it fits into the wave, with what its work on a GPU will take.
static bool fits(struct kvq__queue *q, uint32_t i)
{
    const struct kvq__pass *pass = q->passes[q->pass];
    if (q->gpu && q->wave_ops > kvq__work_stream_ops_left(q->stream))
        return false;
    if (!pass->prepare(q, i))
        return false;
    if (!q->gpu || !kvq__entry_alive(q, i))
        return true;
    q->wave_room += pass->gpu_room(q, i);
    q->wave_ops += pass->gpu_ops ? pass->gpu_ops(q, i) : 0;
    if (q->wave_ops > most_ops(q, i))
        return false;
    return q->arena_used + q->wave_room + KVQ__WAVE_ROOM <= q->arena_bytes;
}

// Fills the next wave with entries; false if none is left, or if q->gpu_wait says to wait for room.
static bool wave_next(struct kvq__queue *q)
{
    const struct kvq__pass *pass = q->passes[q->pass];
    assert(q->wave_to >= q->wave_more && q->pass < q->n_passes);
    if (q->wave_more) // the last wave cut its last entry short
        q->wave_to--;
    uint32_t i = q->wave_to;
    q->wave_more = false;
    q->wave_from = i;
    q->wave_room = 0;
    q->wave_ops = KVQ__WAVE_OPS;
    if (!wave_place(q))
        return false;
    q->wave_start = q->arena_used;
    for (; i < q->header.count; i++) {
        size_t used = q->arena_used, room = q->wave_room;
        uint32_t ops = q->wave_ops;
        if (kvq__entry_alive(q, i) && q->work[i].session->pool->gpu != q->gpu)
            break;
        if (!kvq__entry_alive(q, i) || fits(q, i)) {
            q->wave_more = q->gpu && kvq__entry_alive(q, i) && q->work[i].part.more;
            if (!q->wave_more)
                continue;
            i++;
            break;
        }
        q->arena_used = used;
        q->wave_room = room;
        q->wave_ops = ops;
        if (i > q->wave_from)
            break;
        if (q->gpu && (used > 0 || q->arena_bytes < q->core->config.work_stream_bytes ||
                       q->stream->use->ops > KVQ__CHUNK_OPS))
            return kvq__work_stream_again(q);  // for a larger chunk on an idle stream
        kvq__entry_fail(q, i, KVQ_E_LIMIT, 0); // the entry needs more than the whole arena
    }
    q->wave_to = i;
    if (pass->gather && i > q->wave_from && !q->gpu)
        pass->gather(q);
    return i > q->wave_from;
}

// Enqueues the wave's work. If that fails, all entries of the wave fail.
static void wave_enqueue(struct kvq__queue *q)
{
    assert(q->stream && q->stream->gpu == q->gpu);
    int rc = kvq__gpu_enter(q->gpu) ? KVQ_E_SYSTEM : q->passes[q->pass]->gpu_wave(q);
    if (rc >= 0)
        return;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (kvq__entry_alive(q, i))
            kvq__entry_fail(q, i, rc, 0);
}

static bool is_brief(const struct kvq__queue *q)
{
    uint64_t appended = 0;
    if (q->header.op == KVQ_OP_ATTEND || q->header.op == KVQ_OP_APPEND_ATTEND)
        return kvq__attend_brief(q);
    if (q->header.op != KVQ_OP_APPEND && q->header.op != KVQ_OP_STEP)
        return false;
    for (uint32_t i = 0; i < q->header.count; i++)
        appended += q->entries[i].append;
    return appended <= BRIEF_TOKENS;
}

// Sets the job up for the current stage; false if it has no items.
static bool stage_begin(struct kvq__queue *q)
{
    const struct kvq__stage *stage = &q->passes[q->pass]->stages[q->stage];
    uint32_t items = 0;
    assert(!q->gpu && q->stage < q->passes[q->pass]->n_stages);
    for (uint32_t i = q->wave_from; i < q->wave_to; i++) {
        q->first_item[i - q->wave_from] = items;
        if (kvq__entry_alive(q, i))
            items += stage->count(&q->work[i]);
    }
    q->job = (struct kvq__job){items, run_wave_item, is_brief(q)};
    return items > 0;
}

static void wave_finish(struct kvq__queue *q)
{
    const struct kvq__pass *pass = q->passes[q->pass];
    if (!pass->finish)
        return;
    for (uint32_t i = q->wave_from; i < q->wave_to; i++)
        if (kvq__entry_alive(q, i))
            pass->finish(q, i);
}

static bool request_stores(const struct kvq__queue *q)
{
    return q->header.op == KVQ_OP_APPEND || q->header.op == KVQ_OP_APPEND_ATTEND;
}

// What the GPU found out about appended values, once it is done.
static void tell_nonfinite(struct kvq__queue *q)
{
    if (!request_stores(q))
        return;
    for (uint32_t i = 0; i < q->header.count; i++) {
        struct kvq__entry *w = &q->work[i];
        if (!kvq__entry_alive(q, i) || !w->tail_use ||
            w->session->in_step.serial != w->step_serial || !kvq__step_nonfinite(w->session))
            continue;
        kvq__step_leave(w->session);
        kvq__entry_fail(q, i, KVQ_E_NONFINITE, w->session->tokens);
    }
}

static void end_entries(struct kvq__queue *q)
{
    const struct kvq__pass *pass = q->passes[q->n_passes - 1];
    if (!pass->end)
        return;
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__entry_alive(q, i))
            pass->end(q, i);
}

static enum kvq__progress all_ended(struct kvq__queue *q)
{
    assert(q->running && kvq__queue_gpu_idle(q));
    tell_nonfinite(q);
    kvq__gpu_commit_all(q);
    end_entries(q);
    return kvq__request_end(q, 0);
}

static enum kvq__progress passes_end(struct kvq__queue *q)
{
    assert(q->pass == q->n_passes);
    q->gpu = NULL;
    if (kvq__is_on_stream(q)) // the work stream takes over what it holds
        return kvq__request_end(q, 0);
    if (q->stream)
        kvq__work_stream_close(q->stream, q, false);
    if (kvq__queue_gpu_idle(q))
        return all_ended(q);
    q->gpu_wait = KVQ__GPU_END;
    return KVQ__GPU;
}

// Goes on from the start of stage q->stage of the current wave.
static enum kvq__progress run_stages(struct kvq__queue *q)
{
    for (;;) {
        for (; !q->gpu && q->stage < q->passes[q->pass]->n_stages; q->stage++)
            if (stage_begin(q))
                return KVQ__RUN;
        if (q->gpu && q->wave_to > q->wave_from)
            wave_enqueue(q);
        wave_finish(q);
        q->wave_from = q->wave_to;
        while (!wave_next(q)) {
            if (q->gpu_wait)
                return q->gpu_wait == KVQ__GPU_GATE ? KVQ__WAIT : KVQ__GPU;
            if (++q->pass == q->n_passes)
                return passes_end(q);
            q->wave_to = 0;
        }
        q->stage = 0;
    }
}

enum kvq__progress kvq__request_run(struct kvq__queue *q, const struct kvq__pass *const *passes,
                                    uint32_t n)
{
    assert(n > 0 && n <= sizeof q->passes / sizeof *q->passes && !q->running);
    for (uint32_t i = 0; i < n; i++)
        q->passes[i] = passes[i];
    q->n_passes = n;
    q->pass = q->wave_from = q->wave_to = 0;
    q->wave_more = false;
    q->stage = passes[0]->n_stages; // an empty wave has just been done
    q->running = true;
    q->gpu = NULL;
    if (!q->flight.number)
        kvq__flight_begin(q->core, &q->flight);
    return run_stages(q);
}

// ---- Start, continue, end ----

// Tells what was refused, and why, for whoever looks for a client's fault without the client's own
// log. Once a second and client, as requests come at any rate. `failed`: the entry that was
// refused; NULL: the request as a whole was.
static void tell_refused_request(struct kvq__queue *q, const struct kvq_entry_wire *failed,
                                 int status)
{
    const uint64_t second = 1000000000;
    struct kvq__core *core = q->core;
    struct kvq__client *c = q->client;
    const struct operation *op = q->header.op < KVQ_OP_COUNT ? &operations[q->header.op] : NULL;
    struct kvq__handle *h = NULL;
    char text[KVQ_TEXT_BYTES];
    if (c->refused_event_at && core->now - c->refused_event_at < second) {
        c->refused_untold++;
        return;
    }
    bool known = failed && kvq__handle_get(c, failed->handle, &h) == 0 && h->session;
    snprintf(text, sizeof text, "%s of step %llu, layer %u: %s (%s); %u more since",
             op ? op->name : "an unknown operation", (unsigned long long)q->header.step,
             q->header.layer, kvq_status_text(status), kvq_status_name(status), c->refused_untold);
    kvq__event(core, KVQ__EVENT_REQUEST_REFUSED, known ? h->session->ns->name : "",
               known ? h->session->name : "", c->id, text);
    c->refused_event_at = core->now ? core->now : 1;
    c->refused_untold = 0;
}

static void count_refusal(struct kvq__queue *q)
{
    int status = q->completion.status;
    uint32_t i = 0;
    while (status == 0 && i < q->completion.count) {
        status = q->results[i].status < 0 ? q->results[i].status : 0;
        i += status == 0;
    }
    if (status == 0)
        return;
    q->core->counts.refused_requests++;
    kvq__refused_add(&q->core->refused, status);
    tell_refused_request(q, q->completion.status == 0 ? &q->entries[i] : NULL, status);
}

// Nobody reads the results of a request that has failed as a whole: what its entries would report
// is left to the writer's next request, unless another step has begun since.
static void take_reports_back(struct kvq__queue *q)
{
    struct kvq__handle *h;
    for (uint32_t i = 0; i < q->completion.count && i < KVQ_MAX_BATCH; i++)
        if (q->work[i].reports_nonfinite &&
            kvq__handle_get(q->client, q->entries[i].handle, &h) == 0 && !h->read_only)
            h->session->in_step.nonfinite_unreported |=
                h->session->in_step.serial == q->work[i].reported_serial;
}

enum kvq__progress kvq__request_end(struct kvq__queue *q, int status)
{
    assert(q->busy && status <= 0);
    q->gpu_wait = KVQ__GPU_NONE;
    if (q->holding && request_stores(q))
        for (uint32_t i = 0; i < q->header.count; i++)
            if (q->results[i].status < 0)
                kvq__append_failed(q, i);
    for (uint32_t i = 0; q->holding && i < q->header.count; i++)
        leave_own_step(q, &q->work[i]);
    if (kvq__is_on_stream(q) && q->timeline.gpu)
        kvq__work_stream_signal(q);
    if (q->stream)
        kvq__work_stream_close(q->stream, q, kvq__is_on_stream(q));
    kvq__request_release(q);
    kvq__admission_leave(q);
    if (q->flight.number)
        kvq__flight_end(q->core, &q->flight);
    q->busy = q->running = false;
    q->completion.status = status;
    if (status < 0) {
        take_reports_back(q);
        q->completion.count = 0;
    }
    count_refusal(q);
    return KVQ__DONE;
}

static int check_header(const struct kvq__queue *q)
{
    const struct kvq_request *r = &q->header;
    uint32_t layers = r->op == KVQ_OP_STEP ? r->layer : 0;
    if (r->count > KVQ_MAX_BATCH || layers > KVQ_MAX_LAYERS ||
        r->slots != kvq_request_slots(r->count, layers))
        return KVQ_E_PROTOCOL;
    if (r->op >= KVQ_OP_COUNT)
        return KVQ_E_UNSUPPORTED;
    bool on_stream = r->flags & KVQ_REQ_ON_STREAM;
    if (r->pad0 || r->pad1 || !r->signal == on_stream || (r->flags & ~operations[r->op].flags))
        return KVQ_E_INVALID;
    if (r->signal > INT64_MAX) // GPUs compare signed differences
        return KVQ_E_INVALID;
    if (r->count == 0 && (operations[r->op].needs & NEED_COUNT))
        return KVQ_E_INVALID;
    if (on_stream && !q->timeline.gpu)
        return KVQ_E_INVALID;
    if ((r->flags & KVQ_REQ_WAIT_ROOM) && r->deadline_ns == 0) // so that each wait has an end
        return KVQ_E_INVALID;
    if (q->core->draining && (operations[r->op].needs & NEW_WORK))
        return KVQ_E_DRAINING;
    return 0;
}

static void reset_works(struct kvq__queue *q)
{
    for (uint32_t i = 0; i < q->header.count; i++) {
        struct kvq__entry *w = &q->work[i];
        assert(!w->held && !w->forked && !w->table && !w->sample);
        q->results[i] = (struct kvq_result){0};
        w->session = NULL;
        w->held = w->tail_use = w->exclusive = w->packing = false;
        w->reading = 0;
        w->packing_all = w->commits_on_gpu = w->unpacked = false;
        w->table = NULL;
        w->sample = NULL;
        w->forked = NULL;
        w->no_room = 0;
    }
}

// Whether the operation needs layers of the session that are yet to be read.
static bool waits_for_loading(const struct kvq__queue *q, const struct kvq__session *s)
{
    uint32_t layer = q->header.layer;
    if (s->n_loading == 0 || kvq__is_turning_back(s)) // layers of a session turning back never come
        return false;
    switch (q->header.op) {
    case KVQ_OP_NOP:
    case KVQ_OP_STEP_BEGIN:
    case KVQ_OP_STEP_END:
    case KVQ_OP_STEP_ABORT:
        return false;
    case KVQ_OP_APPEND:
    case KVQ_OP_ATTEND:
    case KVQ_OP_APPEND_ATTEND:
    case KVQ_OP_READ:
        return layer < s->n_layers && kvq__source_layer(s, layer)->loading;
    default: // all layers
        return true;
    }
}

// Whether a session of the request is not ready: offloaded, moving, prepared, committing, loading.
static bool request_must_wait(struct kvq__queue *q)
{
    struct kvq__handle *h;
    const struct kvq__core *core = q->core;
    const struct kvq__upward *up = core->up;
    bool any = core->n_prepared + core->moving.n + core->n_committing + core->disk.n_loading +
                   core->disk.n_offloaded + core->moving.n_demoted >
               0;
    bool wait = false;
    if (!any)
        return false;
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__handle_get(q->client, q->entries[i].handle, &h) == 0)
            wait |= up->park_asks(q, i, h->session) || // asks for all that are away
                    kvq__group_asks(q, h) == KVQ__PREPARED_WAITS || up->move_asks(h->session) ||
                    kvq__gpu_commit_asks(q, i, h) || waits_for_loading(q, h->session) ||
                    up->demoted_asks(q, i, h);
    return wait;
}

// Marks the request's other sessions as used: while it waits, evictions should not take them.
static void keep_others(const struct kvq__queue *q)
{
    struct kvq__handle *h;
    if (q->core->disk.n_offloaded + q->core->moving.n_demoted == 0)
        return;
    for (uint32_t i = 0; i < q->header.count; i++)
        if (kvq__handle_get(q->client, q->entries[i].handle, &h) == 0)
            kvq__session_used(h->session);
}

int kvq__request_step(struct kvq__queue *q)
{
    q->step = NULL;
    if (q->header.step == 0)
        return 0;
    q->step = kvq__step_find(q->client, q->header.step);
    return q->step ? 0 : KVQ_E_NO_STEP;
}

bool kvq__request_is_late(const struct kvq__queue *q)
{
    assert(q->busy);
    return q->header.deadline_ns && q->core->now > q->header.deadline_ns;
}

// Tries the request from the start, after giving back what an earlier attempt holds.
static enum kvq__progress attempt(struct kvq__queue *q)
{
    assert(!q->running && !q->stream);
    kvq__request_release(q);
    if (q->client->gone || q->ending)
        return kvq__request_end(q, KVQ_E_CANCELLED);
    if (kvq__request_is_late(q))
        return kvq__request_end(q, KVQ_E_DEADLINE);
    if (q->turn.listed && !q->turn.extents && q->core->draining)
        return kvq__request_end(q, KVQ_E_DRAINING);
    if (!kvq__admission_turn(q))
        return KVQ__WAIT;
    kvq__admission_begin(q);
    q->step = NULL;
    q->n_written = 0;
    memset(q->buffers, 0, sizeof q->buffers);
    reset_works(q);
    if (request_must_wait(q)) {
        keep_others(q);
        return KVQ__WAIT;
    }
    return operations[q->header.op].start(q);
}

// The work stream of a request on a stream always signals in the end, so it must have room for that
// signal.
static enum kvq__progress begin_request(struct kvq__queue *q)
{
    if (kvq__is_on_stream(q) && q->timeline.gpu && !kvq__work_stream_takes(q))
        return KVQ__GPU;
    q->gpu_wait = KVQ__GPU_NONE;
    int rc = check_header(q);
    if (rc < 0)
        return kvq__request_end(q, rc);
    return attempt(q);
}

enum kvq__progress kvq__request_start(struct kvq__queue *q)
{
    assert(!q->stream && !q->cloning && !q->turn.listed && q->flight.number == 0);
    assert(!q->busy);
    q->busy = true;
    q->running = q->holding = q->stream_noted = false;
    for (uint32_t i = 0; i < q->header.count && i < KVQ_MAX_BATCH; i++)
        q->work[i].reports_nonfinite = q->work[i].part.more = q->work[i].fetch_asked = false;
    q->client->requests++;
    q->completion = (struct kvq_completion){.seq = q->header.seq, .count = q->header.count};
    return begin_request(q);
}

enum kvq__progress kvq__request_continue(struct kvq__queue *q)
{
    assert(q->busy);
    if (q->cloning)
        return kvq__fork_on(q);
    if (!q->running)
        return q->gpu_wait ? begin_request(q) : attempt(q);
    if (q->gpu_wait == KVQ__GPU_END && !q->client->gone)
        return all_ended(q);
    // An ACCEPT has moved committed rows by now, so it goes on to its end.
    if (q->client->gone && q->header.op != KVQ_OP_ACCEPT) {
        if (kvq__queue_gpu_idle(q))
            return kvq__request_end(q, KVQ_E_CANCELLED);
        q->gpu_wait = KVQ__GPU_END; // the GPU uses what the request holds
        return KVQ__GPU;
    }
    if (q->gpu_wait == KVQ__GPU_END)
        return all_ended(q);
    if (q->gpu_wait == KVQ__GPU_NONE) // a stage of the host has ended
        q->stage++;
    q->gpu_wait = KVQ__GPU_NONE;
    return run_stages(q);
}

static enum kvq__progress op_nop(struct kvq__queue *q)
{
    for (uint32_t i = 0; i < q->header.count; i++)
        kvq__entry_open_at(q, i, false);
    return kvq__request_end(q, 0);
}
