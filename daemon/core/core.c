// SPDX-License-Identifier: Apache-2.0
//
// The core as a whole: opening and closing it, time, draining, and the small helpers of its files.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/gpu/extents.h"
#include "daemon/core/request/gpu_commit.h"
#include "daemon/core/request/gpu_wave.h"
#include "daemon/core/residency/evict.h"
#include "daemon/core/residency/move.h"
#include "daemon/core/residency/park.h"
#include "daemon/core/residency/residency.h"
#include "daemon/core/session/finish.h"
#include "daemon/core/session/group.h"
#include "daemon/core/session/work_stream.h"
#include "daemon/core/state.h"

enum { DEFAULT_EXTENT = 64 << 20, DEFAULT_PARTIALS = 20 << 20 };
enum { DEFAULT_WORK_STREAM = 16 << 20, DEFAULT_WORKSPACE = 64 << 20, DEFAULT_FORK_WORK = 8192 };
enum { DEFAULT_RELEASE_WORK = 2048, DEFAULT_RESTORE_WORK = 4096 };
enum { DEFAULT_SEAL_PAGES = 512 };
enum { TRIM_AT_ONCE = 128 << 20 }; // bytes that a tick gives back to the system
#define EMPTY_EXTENT_NS  10000000000ull
#define DEFAULT_STALL_NS 2000000000ull

// ---- Opening and closing ----

static int check_config(const struct kvq__core_config *c, char *text)
{
    if (c->extent_bytes % KVQ__SMALLEST_EXTENT)
        return kvq__fail(text, KVQ_E_INVALID,
                         "extents of %llu bytes; their size must be a multiple of 2 MiB",
                         (unsigned long long)c->extent_bytes);
    if (c->pool_bytes < c->extent_bytes)
        return kvq__fail(text, KVQ_E_INVALID,
                         "a pool of %llu bytes holds no extent of %llu; make the pool larger or "
                         "extents smaller",
                         (unsigned long long)c->pool_bytes, (unsigned long long)c->extent_bytes);
    return 0;
}

static bool reclaim_table(struct kvq__namespace *ns)
{
    return kvq__ended_reclaim(ns) || kvq__prefix_reclaim_node(ns);
}

static void on_opened(struct kvq__session *s)
{
    kvq__fetch_ask(s);
    kvq__demoted_ask(s);
}

static void on_ending(struct kvq__session *s)
{
    kvq__move_lost(s);
    kvq__demoted_lost(s);
    kvq__restore_drop(s);
    kvq__park_lost(s);
}

static const struct kvq__upward upward = {.block_reclaim = kvq__prefix_reclaim,
                                          .table_reclaim = reclaim_table,
                                          .session_quiet = kvq__session_quiet,
                                          .step_leave = kvq__step_leave,
                                          .step_undo = kvq__step_undo,
                                          .step_publish = kvq__step_publish,
                                          .gpu_commit = kvq__gpu_commit,
                                          .opened = on_opened,
                                          .ending = on_ending,
                                          .follow_leave = kvq__follow_leave,
                                          .follow = kvq__follow,
                                          .move_asks = kvq__move_asks,
                                          .move_place = kvq__move_place,
                                          .park_asks = kvq__park_asks,
                                          .demoted_asks = kvq__demoted_asks,
                                          .evict_for = kvq__evict_for};

static void set_defaults(struct kvq__core_config *c)
{
    kvq__memory_defaults(&c->memory);
    if (c->extent_bytes == 0)
        c->extent_bytes = DEFAULT_EXTENT;
    if (c->partial_bytes == 0)
        c->partial_bytes = DEFAULT_PARTIALS;
    if (c->stall_ns == 0)
        c->stall_ns = DEFAULT_STALL_NS;
    if (c->work_stream_bytes == 0)
        c->work_stream_bytes = DEFAULT_WORK_STREAM;
    if (c->work_stream_workspace == 0)
        c->work_stream_workspace = DEFAULT_WORKSPACE;
    if (c->fork_work == 0)
        c->fork_work = DEFAULT_FORK_WORK;
    if (c->restore_work == 0)
        c->restore_work = DEFAULT_RESTORE_WORK;
    if (c->release_work == 0)
        c->release_work = DEFAULT_RELEASE_WORK;
    if (c->seal_pages == 0)
        c->seal_pages = DEFAULT_SEAL_PAGES;
    if (c->workers == 0)
        c->workers = 1;
}

static void open_pools(struct kvq__core *core)
{
    const struct kvq__core_config *c = &core->config;
    assert(c->n_gpus <= KVQ_MAX_GPUS);
    core->n_pools = 1 + c->n_gpus;
    for (uint32_t i = 0; i < core->n_pools; i++) {
        struct kvq__pool *pool = &core->pools[i];
        pool->gpu = i ? c->gpus[i - 1] : NULL;
        pool->memory = i ? kvq__gpu_memory(pool->gpu) : c->memory;
        pool->budget = i ? kvq__gpu_budget(pool->gpu) : c->pool_bytes;
        pool->extent_bytes = c->extent_bytes;
    }
}

static void close_memory(struct kvq__core *core)
{
    assert(TAILQ_EMPTY(&core->namespaces) && TAILQ_EMPTY(&core->clients));
    for (uint32_t i = 0; i < core->n_pools; i++)
        kvq__extents_close(core, &core->pools[i]);
    kvq__lookup_close(core);
    kvq__deallocate(core, core->packing.packer.pages,
                    KVQ__PACKER_PAGES * sizeof *core->packing.packer.pages);
    kvq__deallocate(core, core->packing.errors, KVQ_MAX_PACK_ERRORS * sizeof *core->packing.errors);
    struct kvq__memory_ops memory = core->config.memory;
    memory.deallocate(memory.context, core, sizeof *core);
}

// What pools, packer and its samples need of bookkeeping memory.
static int open_core_memory(struct kvq__core *core)
{
    core->packing.packer.pages =
        kvq__allocate(core, KVQ__PACKER_PAGES * sizeof *core->packing.packer.pages);
    core->packing.errors = kvq__allocate(core, KVQ_MAX_PACK_ERRORS * sizeof *core->packing.errors);
    bool enough = core->packing.packer.pages && core->packing.errors && kvq__lookup_open(core) == 0;
    for (uint32_t i = 0; i < core->n_pools && enough; i++) {
        struct kvq__pool *pool = &core->pools[i];
        uint64_t smallest = pool->gpu ? pool->extent_bytes : KVQ__SMALLEST_EXTENT;
        enough = kvq__extents_open(core, pool, smallest) == 0;
    }
    return enough ? 0 : KVQ_E_NO_MEMORY;
}

int kvq__core_open(const struct kvq__core_config *config, struct kvq__core **out, char *text)
{
    struct kvq__core_config c = *config;
    *out = NULL;
    set_defaults(&c);
    int rc = check_config(&c, text);
    if (rc < 0)
        return rc;
    struct kvq__core *core = c.memory.allocate(c.memory.context, sizeof *core);
    if (!core)
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for the daemon's own state");
    core->config = c;
    core->up = &upward;
    open_pools(core);
    TAILQ_INIT(&core->freeing.deferred);
    TAILQ_INIT(&core->freeing.givers);
    TAILQ_INIT(&core->freeing.ended);
    TAILQ_INIT(&core->finishing);
    core->freeing.left = c.release_work;
    TAILQ_INIT(&core->clients);
    TAILQ_INIT(&core->namespaces);
    TAILQ_INIT(&core->flights);
    TAILQ_INIT(&core->packing.host);
    TAILQ_INIT(&core->tickets.list);
    kvq__forgets_open(core);
    TAILQ_INIT(&core->prompts.list);
    core->last.stamp = c.run;
    TAILQ_INIT(&core->room.waiters);
    for (uint32_t i = 0; i < 1 + KVQ_MAX_GPUS; i++)
        kvq__line_open(&core->room.lines[i]);
    kvq__dues_open(core);
    for (uint32_t i = 0; i < KVQ__UNSAVED_LISTS; i++)
        TAILQ_INIT(&core->unsaved.lists[i]);
    TAILQ_INIT(&core->packing.gpus);
    TAILQ_INIT(&core->seals);
    if (open_core_memory(core) < 0) {
        close_memory(core);
        return kvq__fail(text, KVQ_E_NO_MEMORY, "no memory for the daemon's own state");
    }
    *out = core;
    return 0;
}

void kvq__core_close(struct kvq__core **pointer)
{
    struct kvq__core *core = *pointer;
    struct kvq__client *client;
    struct kvq__namespace *ns;
    struct kvq__session *s;
    if (!core)
        return;
    *pointer = NULL;
    core->closing = true; // what is stored stays: the next run sees to it
    kvq__ended_give_up(core);
    kvq__moves_close(core);
    kvq__parks_close(core);
    while ((client = TAILQ_FIRST(&core->clients)))
        kvq__client_detach(client);
    kvq__work_streams_drain(core);
    assert(!core->packing.packer.session && TAILQ_EMPTY(&core->flights));
    TAILQ_FOREACH (ns, &core->namespaces, link)
        while ((s = TAILQ_FIRST(&ns->sessions)))
            kvq__session_end(s,
                             kvq__is_kept(s) ? "the daemon ends; it is saved" : "the daemon ends");
    kvq__restores_poll(core); // which had turned back
    kvq__ended_close(core);
    TAILQ_FOREACH (ns, &core->namespaces, link)
        kvq__prefixes_close(core, ns);
    kvq__work_streams_close(core);
    assert(LIST_EMPTY(&core->disk.saves) && LIST_EMPTY(&core->disk.restores));
    kvq__stagings_close(core);
    kvq__pools_trim(core, 0, UINT64_MAX);
    for (uint32_t i = 0; i < core->n_pools; i++)
        assert(core->pools[i].extents_taken == 0 && core->pools[i].used_bytes == 0);
    assert(core->n_sessions == 0 && core->n_steps == 0 && core->tokens == 0);
    assert(core->unsaved.n == 0 && core->n_prepared == 0 && core->n_committing == 0);
    assert(core->moving.n == 0 && core->moving.n_demoted == 0 && core->disk.n_loading == 0);
    assert(core->prompts.n == 0 && TAILQ_EMPTY(&core->prompts.list));
    assert(core->disk.n_wanted == 0 && core->disk.n_reading == 0 && core->disk.n_turning_back == 0);
    assert(core->disk.n_offloaded == 0 && TAILQ_EMPTY(&core->tickets.list) &&
           core->freeing.n_givers == 0);
    assert(TAILQ_EMPTY(&core->freeing.deferred) && TAILQ_EMPTY(&core->freeing.ended));
    assert(TAILQ_EMPTY(&core->finishing));
    kvq__namespaces_close(core);
    close_memory(core);
}

// ---- Time ----

void kvq__core_clock(struct kvq__core *core, uint64_t now_ns)
{
    if (now_ns > core->now)
        core->now = now_ns;
}

// Names a session that others wait for because of it, if there is one.
static void tell_stalled(struct kvq__core *core, const struct kvq__work_stream *stream)
{
    const struct kvq__session *s = kvq__work_stream_withholds(stream);
    assert(stream->client && (!s || s->core == core));
    kvq__event(core, KVQ__EVENT_CLIENT_STALLED, s ? s->ns->name : "", s ? s->name : "",
               stream->client->id,
               s ? "its stream does not signal, so its work on the GPU waits, and so do all others "
                   "who read the session that it packs; end the client"
                 : "its stream does not signal, so its work on the GPU waits; nobody else's does");
}

// A fault is told once; a client whose stream a work stream waits for, once each time that it
// stalls.
static void look_at_gpu(struct kvq__core *core, struct kvq__gpu *gpu)
{
    struct kvq__work_stream *stream;
    const char *fault = kvq__gpu_look(gpu);
    kvq__reserve_tick(gpu);
    if (fault && !core->faulted && core->config.fault) {
        core->faulted = true;
        core->config.fault(core->config.context, kvq__gpu_uuid_text(gpu), fault);
    }
    bool busy = false;
    LIST_FOREACH (stream, &core->streams.used, link)
        busy |= stream->gpu == gpu && kvq__work_stream_busy(stream);
    if (!busy)
        kvq__gpu_sweep(gpu);
    LIST_FOREACH (stream, &core->streams.used, link)
        if (stream->gpu == gpu && stream->client && kvq__work_stream_stalls(stream))
            tell_stalled(core, stream);
}

void kvq__core_tick(struct kvq__core *core)
{
    kvq__dues_tick(core);
    kvq__prefixes_tick(core);
    kvq__quotas_tick(core);
    for (uint32_t i = 1; i < core->n_pools; i++)
        look_at_gpu(core, core->pools[i].gpu);
    kvq__tickets_tick(core);
    kvq__forgets_tick(core);
    kvq__evict_tick(core);
    kvq__pools_trim(core, EMPTY_EXTENT_NS, TRIM_AT_ONCE);
}

void kvq__core_drain(struct kvq__core *core)
{
    if (!core->draining)
        kvq__event(core, KVQ__EVENT_DRAINING, "", "", 0, "");
    core->draining = true;
    kvq__ended_give_up(core);
}

bool kvq__core_poll(struct kvq__core *core)
{
    struct kvq__work_stream *stream, *next;
    bool any = kvq__pools_poll(core);
    assert(core->disk.n_offloaded <= core->n_sessions && core->moving.n <= core->n_sessions);
    for (stream = LIST_FIRST(&core->streams.used); stream; stream = next) {
        next = LIST_NEXT(stream, link);
        any |= kvq__work_stream_poll(stream);
    }
    any |= kvq__finish_poll(core);
    any |= kvq__ended_poll(core);
    any |= kvq__moves_poll(core);
    any |= kvq__parks_poll(core);
    any |= kvq__evict_poll(core);
    if (any)
        kvq__pack_on_gpus(core);
    return any;
}

bool kvq__core_wake(struct kvq__core *core, void (*wake)(void *context), void *context)
{
    struct kvq__work_stream *stream;
    bool any = false;
    assert(wake);
    LIST_FOREACH (stream, &core->streams.used, link)
        any |= kvq__work_stream_wake(stream, wake, context);
    return any;
}

void kvq__core_hush(struct kvq__core *core)
{
    kvq__work_streams_hush(core);
}

bool kvq__core_idle(const struct kvq__core *core)
{
    return core->n_steps == 0 && TAILQ_EMPTY(&core->flights);
}
