// SPDX-License-Identifier: Apache-2.0
//
// The core's functions that the poller calls, without any sessions behind them; see fake_core.h.
#include "tests/kits/fake_core.h"

#include <assert.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "proto/sync.h"

// Of the core that was asked last; requests have no other way to it here. Poller's thread.
static bool background_open;
static uint32_t started; // requests of all queues
static uint32_t turns;   // of the poller
static _Thread_local bool poller_thread;

struct fake_time fake_time;

uint64_t fake_clock(void)
{
    return fake_time.now;
}

static void pass_look(void)
{
    fake_time.now += fake_time.look_ns;
    fake_time.items = 0;
}

static void pass_item(void)
{
    if (!fake_time.item_ns)
        return;
    fake_time.now += fake_time.item_ns;
    fake_time.items++;
    fake_time.most = fake_time.items > fake_time.most ? fake_time.items : fake_time.most;
}

struct kvq__queue *fake_queue_new(void)
{
    return calloc(1, sizeof(struct kvq__queue));
}

void fake_queue_free(struct kvq__queue *queue)
{
    free(queue);
}

void kvq__core_clock(struct kvq__core *core, uint64_t now_ns)
{
    (void)core;
    fake_time.told = now_ns;
    poller_thread = true;
}

bool kvq__core_poll(struct kvq__core *core)
{
    turns = ++core->turns;
    if (fake_time.item_ns)
        pass_look();
    return false;
}

void kvq__core_hush(struct kvq__core *core)
{
    (void)core;
}

bool kvq__core_moves(const struct kvq__core *core)
{
    (void)core;
    return false;
}

bool kvq__core_wake(struct kvq__core *core, void (*wake)(void *context), void *context)
{
    (void)core;
    (void)wake;
    (void)context;
    return false;
}

bool kvq__queue_gpu_idle(const struct kvq__queue *queue)
{
    (void)queue;
    return true;
}

void kvq__queue_ending(struct kvq__queue *queue)
{
    kvq_word_add(&queue->endings, 1);
}

void kvq__core_tick(struct kvq__core *core)
{
    kvq_word_add(&core->ticks, 1);
}

struct kvq_request *kvq__queue_header(struct kvq__queue *queue)
{
    return &queue->header;
}

struct kvq_entry_wire *kvq__queue_entries(struct kvq__queue *queue)
{
    return queue->entries;
}

struct kvq_step_layer *kvq__queue_layers(struct kvq__queue *queue)
{
    return queue->layers;
}

static void run_item(struct kvq__job *job, uint32_t item, void *workspace)
{
    struct kvq__queue *queue =
        (struct kvq__queue *)((char *)job - offsetof(struct kvq__queue, job));
    assert(workspace);
    while (queue->gate && kvq_word_load_acquire(queue->gate) == 0)
        sched_yield();
    if (queue->worker_gate && !poller_thread) {
        kvq_word_add(&queue->held_by_worker, 1);
        while (kvq_word_load_acquire(queue->worker_gate) == 0)
            sched_yield();
    }
    if (job->n_items <= FAKE_ITEMS)
        queue->runs[item]++;
    pass_item();
}

static enum kvq__progress done(struct kvq__queue *queue, uint64_t value)
{
    queue->under_way = false;
    queue->done_at = started;
    queue->done_turn = turns;
    queue->completion = (struct kvq_completion){
        .seq = queue->header.seq, .count = queue->header.count, .value = value};
    for (uint32_t i = 0; i < queue->header.count; i++)
        queue->results[i] = (struct kvq_result){.value = queue->entries[i].position};
    return KVQ__DONE;
}

enum kvq__progress kvq__request_start(struct kvq__queue *queue)
{
    assert(!queue->under_way && !queue->closed);
    while (queue->start_gate && kvq_word_load_acquire(queue->start_gate) == 0)
        sched_yield();
    queue->under_way = true;
    queue->started_at = ++started;
    if (queue->header.op == KVQ_OP_ATTEND) {
        memset(queue->runs, 0, sizeof queue->runs);
        queue->job = (struct kvq__job){queue->header.layer, run_item, false};
        return KVQ__RUN;
    }
    if (queue->header.op == KVQ_OP_APPEND) {
        queue->waits = queue->header.layer;
        return KVQ__WAIT;
    }
    if (queue->header.op == KVQ_OP_READ && background_open)
        return KVQ__WAIT;
    return done(queue, 0);
}

enum kvq__progress kvq__request_continue(struct kvq__queue *queue)
{
    assert(queue->under_way);
    if (fake_time.item_ns && fake_time.now - fake_time.told > fake_time.behind)
        fake_time.behind = fake_time.now - fake_time.told;
    if (queue->header.op == KVQ_OP_APPEND)
        return --queue->waits > 0 ? KVQ__WAIT : done(queue, 0);
    if (queue->header.op == KVQ_OP_READ)
        return background_open ? KVQ__WAIT : done(queue, 0);
    uint64_t run = 0;
    for (uint32_t i = 0; i < queue->job.n_items && i < FAKE_ITEMS; i++)
        run += queue->runs[i] == 1;
    return done(queue, run);
}

struct kvq__job *kvq__queue_job(struct kvq__queue *queue)
{
    return &queue->job;
}

const struct kvq_completion *kvq__queue_completion(const struct kvq__queue *queue)
{
    return &queue->completion;
}

const struct kvq_result *kvq__queue_results(const struct kvq__queue *queue)
{
    return queue->results;
}

void kvq__queue_close(struct kvq__queue **queue)
{
    assert(!(*queue)->under_way);
    (*queue)->closed = true;
    *queue = NULL;
}

static void run_background(struct kvq__job *job, uint32_t item, void *workspace)
{
    struct kvq__core *core =
        (struct kvq__core *)((char *)job - offsetof(struct kvq__core, background));
    assert(workspace);
    if (item == 0)
        kvq_word_add(&core->background_begun, 1);
    while (core->background_gate && kvq_word_load_acquire(core->background_gate) == 0)
        sched_yield();
    kvq_word_add(&core->background_run, 1);
    pass_item();
}

struct kvq__job *kvq__background_start(struct kvq__core *core)
{
    uint32_t items = kvq_word_load_acquire(&core->background_items);
    if (items == 0)
        return NULL;
    kvq_word_store(&core->background_items, 0);
    background_open = true;
    core->background = (struct kvq__job){items, run_background, false};
    return &core->background;
}

void kvq__background_done(struct kvq__core *core)
{
    background_open = false;
    kvq_word_store_release(&core->background_done, core->background_done + 1);
}
