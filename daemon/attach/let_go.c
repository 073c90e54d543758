// SPDX-License-Identifier: Apache-2.0
//
// What GPUs have yet to let go of: host memory that they reach, and imports by handle. To take it
// from them is to wait for all work that they were given, and some of that may wait for a client
// that never signals. The driver would let nobody give work to GPUs meanwhile, so it is asked
// behind the gate (gpu/gate.h), on one thread of libuv's at a time.
//
// Nobody waits for host memory: it leaves its connection at once and counts on until it is back
// (for its client, and for all). Whoever closes an import waits, since only then may he free that
// memory; so does the end of a connection, but only a while. A user of whose memory much is to
// be let go of gets no other host memory made known to GPUs, and no imports by handle.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/attach/internal.h"
#include "daemon/core/gpu/gate.h"
#include "daemon/runtime/descriptors.h"
#include "proto/clock.h"
#include "proto/ring.h"

// ---- On a thread of libuv's ----

static void let_go_of(const struct kvq__gpus *gpus, struct kvq__letting_go *l)
{
    const struct kvq__gpu *gpu = l->import ? l->import->gpu : kvq__gpus_get(gpus, 0);
    assert(!l->done && !l->import == (l->shm.map != NULL));
    kvq__gpu_enter(gpu);
    if (l->import)
        kvq_gpu_piece_release(kvq__gpu_driver(gpu), &l->import->piece);
    else
        kvq_gpu_host_unregister(kvq__gpu_driver(gpu), l->shm.map);
    l->done = true;
}

// Behind the gate. True if there is more to do.
static bool let_some_go(void *context)
{
    const struct kvq__attach *a = context;
    const uint64_t until = kvq_now_ns() + KVQ__GATE_UP_NS;
    struct kvq__letting_go *l;
    STAILQ_FOREACH (l, &a->let_go, link) {
        if (l->done)
            continue;
        if (kvq_now_ns() >= until)
            return true;
        let_go_of(a->server->gpus, l);
    }
    return false;
}

// A word of a timeline may be about to be written that lets a queue's work go on.
static void await_pokes(const struct kvq__gpus *gpus)
{
    for (uint32_t i = 0; i < kvq__gpus_count(gpus); i++) {
        const struct kvq__gpu *gpu = kvq__gpus_get(gpus, i);
        if (kvq__gpu_enter(gpu) == KVQ_GPU_OK)
            kvq__gpu_driver(gpu)->stream_sync(kvq__gpu_stream(gpu, KVQ__GPU_STREAM_SMALL));
    }
}

static void run_letting_go(uv_work_t *work)
{
    struct kvq__attach *a = work->data;
    struct kvq__letting_go *l;
    bool timelines = false;
    STAILQ_FOREACH (l, &a->let_go, link)
        timelines |= l->timeline;
    if (timelines)
        await_pokes(a->server->gpus);
    kvq__gate_pass(kvq__gpu_gate(kvq__gpus_get(a->server->gpus, 0)), let_some_go, a);
    STAILQ_FOREACH (l, &a->let_go, link)
        if (!l->import)
            kvq__shm_close(&l->shm);
}

// ---- Loop's thread ----

static void let_go_next(struct kvq__attach *a);

static void end_let_go(struct kvq__attach *a, struct kvq__letting_go *l)
{
    struct kvq__connection *awaiting = l->awaiting;
    assert(l->done && a->n_letting_go > 0 && a->buffer_bytes >= l->counted);
    assert(!l->connection || l->connection->buffer_bytes >= l->counted);
    a->n_letting_go--;
    if (l->connection)
        l->connection->buffer_bytes -= l->counted;
    a->buffer_bytes -= l->counted;
    free(l->import);
    free(l);
    if (awaiting)
        kvq__connection_gave_back(awaiting, true);
}

static void end_letting_go(uv_work_t *work, int status)
{
    struct kvq__attach *a = work->data;
    struct kvq__letting_gos ended = STAILQ_HEAD_INITIALIZER(ended);
    struct kvq__letting_go *l;
    (void)status;
    STAILQ_CONCAT(&ended, &a->let_go);
    while ((l = STAILQ_FIRST(&ended))) {
        STAILQ_REMOVE_HEAD(&ended, link);
        end_let_go(a, l);
    }
    let_go_next(a);
}

// All that there is goes together.
static void let_go_next(struct kvq__attach *a)
{
    if (!STAILQ_EMPTY(&a->let_go) || STAILQ_EMPTY(&a->letting_go))
        return;
    STAILQ_CONCAT(&a->let_go, &a->letting_go);
    a->letting_go_work.data = a;
    uv_queue_work(&a->server->loop, &a->letting_go_work, run_letting_go, end_letting_go);
}

static void let_go_later(struct kvq__connection *c, struct kvq__letting_go *l)
{
    struct kvq__attach *a = c->attach;
    l->connection = c;
    l->uid = c->peer.uid;
    l->client = c->id;
    STAILQ_INSERT_TAIL(&a->letting_go, l, link);
    a->n_letting_go++;
    let_go_next(a);
}

void kvq__let_go_of_pinned(struct kvq__connection *c, struct kvq__pinned *p, uint64_t counted,
                           bool timeline)
{
    struct kvq__letting_go *l = p->letting_go;
    assert(l && p->shm.map);
    if (p->shm.fd >= 0)
        close(p->shm.fd);
    if (l->ready)
        LIST_REMOVE(l, timeline_link);
    *l = (struct kvq__letting_go){.shm = {.fd = -1, .map = p->shm.map, .bytes = p->shm.bytes},
                                  .counted = counted,
                                  .timeline = timeline};
    *p = (struct kvq__pinned){.shm.fd = -1};
    kvq__connection_count(c, counted, 0);
    let_go_later(c, l);
}

void kvq__let_go_of_import(struct kvq__connection *c, struct kvq__import *import)
{
    struct kvq__letting_go *l = import->letting_go;
    assert(l && import->closing && import->piece.kind == KVQ_GPU_PIECE_OPENED);
    LIST_REMOVE(import, link);
    *l = (struct kvq__letting_go){.import = import};
    if (!c->end_is_late) {
        l->awaiting = c;
        c->giving_back++;
        c->awaited++;
    }
    let_go_later(c, l);
}

// How many of these the connection has waited for.
static uint32_t await_no_more(struct kvq__letting_gos *list, const struct kvq__connection *c)
{
    struct kvq__letting_go *l;
    uint32_t n = 0;
    STAILQ_FOREACH (l, list, link)
        if (l->awaiting == c) {
            l->awaiting = NULL;
            n++;
        }
    return n;
}

void kvq__imports_leave(struct kvq__connection *c)
{
    struct kvq__attach *a = c->attach;
    c->end_is_late = true;
    uint32_t n = await_no_more(&a->letting_go, c) + await_no_more(&a->let_go, c);
    for (; n > 0; n--)
        kvq__connection_gave_back(c, true);
}

// ---- Limits ----

static uint32_t count_of(const struct kvq__letting_gos *list, uint32_t uid)
{
    const struct kvq__letting_go *l;
    uint32_t n = 0;
    STAILQ_FOREACH (l, list, link)
        n += l->uid == uid;
    return n;
}

int kvq__attach_check_pins(const struct kvq__connection *c, char *text)
{
    const struct kvq__attach *a = c->attach;
    if (a->n_letting_go == 0)
        return 0;
    uint32_t own = count_of(&a->letting_go, c->peer.uid) + count_of(&a->let_go, c->peer.uid);
    if (kvq__share_allows(own, 1, a->n_letting_go, KVQ_MAX_LETTING_GO))
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "user %u has closed %u pieces of memory that the GPUs have yet to let go of, and all "
             "users %u of %d; one user gets as many as stay free for others; they go when no "
             "client's stream keeps its work waiting (kvqd's log names such a client)",
             c->peer.uid, own, a->n_letting_go, KVQ_MAX_LETTING_GO);
    return KVQ_E_LIMIT;
}

static void leave_all(struct kvq__letting_gos *list, const struct kvq__connection *c)
{
    struct kvq__letting_go *l;
    STAILQ_FOREACH (l, list, link) {
        assert(l->awaiting != c);
        if (l->connection == c)
            l->connection = NULL;
    }
}

void kvq__pins_leave(const struct kvq__connection *c)
{
    leave_all(&c->attach->letting_go, c);
    leave_all(&c->attach->let_go, c);
}

// ---- Timelines that queues have ----

void kvq__timeline_note(struct kvq__connection *c, const struct kvq__pinned *p)
{
    struct kvq_timeline_page *page = p->shm.map;
    assert(p->letting_go && !p->letting_go->ready);
    p->letting_go->ready = &page->ready;
    LIST_INSERT_HEAD(&c->timelines, p->letting_go, timeline_link);
}

void kvq__timelines_end(struct kvq__connection *c)
{
    struct kvq__letting_go *l;
    LIST_FOREACH (l, &c->timelines, timeline_link)
        kvq_word64_store_release(l->ready, INT64_MAX);
}
