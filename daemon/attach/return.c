// SPDX-License-Identifier: Apache-2.0
//
// Giving back what clients had, on one thread of libuv's at a time: memory of GPUs, events and
// imports by descriptor, which the driver unmaps and closes without a look at what runs; and large
// host memory, which the system unmaps page by page. A close of an import or of a large buffer and
// the end of a connection wait for these. What the driver takes back only when nothing runs is in
// let_go.c.
#include <assert.h>
#include <stdlib.h>

#include "daemon/attach/internal.h"
#include "daemon/runtime/descriptors.h"

enum { LARGE_BYTES = 1 << 20 }; // host memory that is not unmapped on the loop's thread

static const struct kvq_gpu_driver *driver_of(const struct kvq__gpu *gpu)
{
    return kvq__gpu_driver(gpu);
}

static void return_next(struct kvq__attach *a);

static void run_return(uv_work_t *work)
{
    struct kvq__attach *a = work->data;
    struct kvq__return *what = STAILQ_FIRST(&a->returns);
    what->run(what);
}

static void end_return(uv_work_t *work, int status)
{
    struct kvq__attach *a = work->data;
    struct kvq__return *what = STAILQ_FIRST(&a->returns);
    struct kvq__connection *c = what->connection;
    bool awaited = what->awaited;
    assert(a->returning && c->giving_back > 0);
    (void)status;
    a->returning = false;
    STAILQ_REMOVE_HEAD(&a->returns, link);
    what->done(what);
    kvq__connection_gave_back(c, awaited);
    if (!STAILQ_EMPTY(&a->returns))
        return_next(a);
}

static void return_next(struct kvq__attach *a)
{
    if (a->returning)
        return;
    a->returning = true;
    a->return_work.data = a;
    uv_queue_work(&a->server->loop, &a->return_work, run_return, end_return);
}

static void give_back_later(struct kvq__connection *c, struct kvq__return *what, bool awaited,
                            void (*run)(struct kvq__return *), void (*done)(struct kvq__return *))
{
    struct kvq__attach *a = c->attach;
    assert(run && done);
    *what = (struct kvq__return){.connection = c, .awaited = awaited, .run = run, .done = done};
    c->giving_back++;
    c->awaited += awaited;
    STAILQ_INSERT_TAIL(&a->returns, what, link);
    return_next(a);
}

static struct kvq__region *region_of(struct kvq__return *what)
{
    return (struct kvq__region *)((char *)what - offsetof(struct kvq__region, back));
}

static void run_region(struct kvq__return *what)
{
    struct kvq__region *r = region_of(what);
    assert(r->gpu || r->large);
    kvq__shm_close(&r->host.shm);
    if (!r->gpu)
        return;
    kvq__gpu_enter(r->gpu);
    assert(!r->import || r->import->piece.kind == KVQ_GPU_PIECE_MAPPED);
    if (r->import)
        kvq_gpu_piece_release(driver_of(r->gpu), &r->import->piece);
    else
        kvq_gpu_piece_release(driver_of(r->gpu), &r->piece);
}

static void free_region(struct kvq__region *r)
{
    assert(!r->import || (r->import->users == 0 && r->import->closing));
    if (r->import) {
        LIST_REMOVE(r->import, link);
        free(r->import->letting_go);
        free(r->import);
    }
    free(r);
}

static void end_region(struct kvq__return *what)
{
    struct kvq__region *r = region_of(what);
    if (r->large)
        kvq__region_uncount(r);
    free_region(r);
}

// A client may go on using memory that it has closed: it counts on until the client is gone.
static bool keep_as_spare(struct kvq__region *r)
{
    struct kvq__connection *c = r->connection;
    if (!r->shared || c->state == KVQ__CONNECTION_ENDING)
        return false;
    struct kvq__spare *spare = calloc(1, sizeof *spare);
    if (!spare)
        return false;
    spare->gpu = r->gpu;
    spare->piece = r->piece;
    LIST_INSERT_HEAD(&c->spares, spare, link);
    kvq__connection_count(c, spare->piece.bytes, 0);
    r->piece = (struct kvq_gpu_piece){0};
    return true;
}

// Its client waits for the end of an import: only then may it free the memory. And a command that
// closes large host memory waits for that, which counts on until it is back.
void kvq__region_give_back(struct kvq__region *r)
{
    struct kvq__connection *c = r->connection;
    assert(!r->import || r->import->users > 0);
    kvq__region_close_fd(r);
    r->large = r->host.shm.map && !r->host.letting_go && r->host.shm.bytes >= LARGE_BYTES;
    if (!r->large)
        kvq__region_uncount(r);
    if (r->import && --r->import->users > 0)
        r->import = NULL; // others use it
    else if (r->import)
        r->import->closing = true;
    if (r->import && r->import->piece.kind == KVQ_GPU_PIECE_OPENED) {
        kvq__let_go_of_import(c, r->import);
        r->import = NULL;
    }
    keep_as_spare(r);
    bool awaited = r->import || (r->large && c->state == KVQ__CONNECTION_BUSY);
    bool slow = r->large || r->piece.kind != KVQ_GPU_PIECE_NONE ||
                (r->import && r->import->piece.kind != KVQ_GPU_PIECE_NONE);
    if (r->host.letting_go)
        kvq__let_go_of_pinned(c, &r->host, r->counted, false);
    if (slow) {
        give_back_later(c, &r->back, awaited, run_region, end_region);
        return;
    }
    kvq__shm_close(&r->host.shm);
    free_region(r);
}

static struct kvq__line *line_of(struct kvq__return *what)
{
    return (struct kvq__line *)((char *)what - offsetof(struct kvq__line, back));
}

static void run_line(struct kvq__return *what)
{
    kvq__line_events_close(&line_of(what)->events);
}

static void end_line(struct kvq__return *what)
{
    kvq__line_free(line_of(what));
}

void kvq__line_give_back(struct kvq__line *line)
{
    assert(!line->port.queue);
    if (line->timeline.letting_go)
        kvq__let_go_of_pinned(line->connection, &line->timeline, 0, true);
    if (line->events)
        give_back_later(line->connection, &line->back, false, run_line, end_line);
    else
        kvq__line_free(line);
}

static void run_events(struct kvq__return *what)
{
    kvq__line_events_close(&what->connection->events);
}

static void end_nothing(struct kvq__return *what)
{
    (void)what;
}

void kvq__stream_sync_undo(struct kvq__connection *c)
{
    assert(!c->timeline.letting_go || !c->events);
    if (c->timeline.letting_go)
        kvq__let_go_of_pinned(c, &c->timeline, 0, true);
    if (c->events)
        give_back_later(c, &c->back, true, run_events, end_nothing);
}

static void run_spares(struct kvq__return *what)
{
    struct kvq__spare *spare;
    LIST_FOREACH (spare, &what->connection->spares, link) {
        kvq__gpu_enter(spare->gpu);
        kvq_gpu_piece_release(driver_of(spare->gpu), &spare->piece);
    }
}

static void end_spares(struct kvq__return *what)
{
    struct kvq__connection *c = what->connection;
    struct kvq__spare *spare;
    while ((spare = LIST_FIRST(&c->spares))) {
        LIST_REMOVE(spare, link);
        free(spare);
    }
}

void kvq__spares_give_back(struct kvq__connection *c)
{
    struct kvq__spare *spare;
    LIST_FOREACH (spare, &c->spares, link)
        kvq__connection_count(c, 0, spare->piece.bytes);
    if (!LIST_EMPTY(&c->spares))
        give_back_later(c, &c->back, false, run_spares, end_spares);
}
