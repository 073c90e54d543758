// SPDX-License-Identifier: Apache-2.0
//
// See extents.h.
#include "daemon/core/gpu/extents.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/cuda/share.h"
#include "proto/ring.h"

struct kvq__reserve {
    struct kvq__reserve_config config;
    uint32_t most; // extents that the budget has room for
    uint32_t made; // changes when whoever found none ready should look again; read without the lock
    pthread_mutex_t lock;             // of all below
    struct kvq__memory *ready, *back; // stacks of at most `most`; back: given back, to be freed
    uint32_t n_ready, n_back;
    uint32_t there; // extents that there are: in the core's pool, ready, given back, being made
    uint32_t goal;  // so many are to be ready: the mark, or what somebody waits for
    bool awaited;   // somebody found none ready
    int failed;     // what came of the last attempt to make one; 0: not known to fail
    char fault[KVQ_TEXT_BYTES]; // its sentence, if it was KVQ_E_SYSTEM
    uint64_t in_place;
};

// ---- One extent ----

// Zeroes memory on a stream of the daemon's own, and waits for that.
static int zero_all(struct kvq__gpu *gpu, enum kvq__gpu_stream which, kvq_gpu_ptr at, size_t bytes)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(gpu);
    int result = d->fill8(at, 0, bytes, kvq__gpu_stream(gpu, which));
    return result ? result : d->stream_sync(kvq__gpu_stream(gpu, which));
}

// Makes memory that clients can map, or, if the GPU has none, memory that they cannot map.
static int make_piece(struct kvq__gpu *gpu, size_t bytes, struct kvq_gpu_piece *piece)
{
    char text[KVQ_GPU_TEXT];
    *piece = (struct kvq_gpu_piece){.bytes = bytes};
    if (!kvq__gpu_maps(gpu))
        return kvq__gpu_driver(gpu)->memory_alloc(&piece->at, bytes);
    return kvq_gpu_piece_make(kvq__gpu_driver(gpu), kvq__gpu_device(gpu), bytes, piece, text,
                              sizeof text);
}

static void release_piece(struct kvq__gpu *gpu, struct kvq_gpu_piece *piece)
{
    if (kvq__gpu_maps(gpu))
        kvq_gpu_piece_release(kvq__gpu_driver(gpu), piece);
    else
        kvq__gpu_free_later(gpu, piece->at);
}

// Makes, zeroes and exports an extent. The export is not left for the first client that asks, since
// the driver may take long. Returns a result of the driver; *what says what has failed.
static int make_extent(struct kvq__gpu *gpu, enum kvq__gpu_stream which, size_t bytes,
                       struct kvq__memory *memory, const char **what)
{
    struct kvq_gpu_piece piece;
    char text[KVQ_GPU_TEXT];
    *what = "taking memory for caches";
    int result = kvq__gpu_enter(gpu);
    result = result ? result : make_piece(gpu, bytes, &piece);
    if (result)
        return result;
    assert(piece.bytes >= bytes); // the driver's granule
    *memory = (struct kvq__memory){.base = (uint8_t *)(uintptr_t)piece.at,
                                   .bytes = piece.bytes,
                                   .fd = -1,
                                   .handle = piece.memory};
    *what = "zeroing memory for caches";
    result = zero_all(gpu, which, piece.at, bytes);
    if (result == KVQ_GPU_OK && kvq__gpu_exports(gpu)) {
        *what = "exporting memory for caches";
        result = kvq_gpu_piece_export(kvq__gpu_driver(gpu), &piece, &memory->fd, text, sizeof text);
    }
    if (result)
        release_piece(gpu, &piece);
    return result;
}

// The same for a GPU whose reserve, if it has one, may refuse. Without a descriptor to spare the
// driver could not export the extent, and its other calls that need one would be faults.
static int make_if_allowed(struct kvq__gpu *gpu, enum kvq__gpu_stream which, size_t bytes,
                           struct kvq__memory *memory, const char **what)
{
    const struct kvq__reserve *r = *kvq__gpu_reserve(gpu);
    *what = "exporting memory for caches";
    if (r && r->config.may_make && kvq__gpu_exports(gpu) && !r->config.may_make(r->config.context))
        return KVQ_GPU_OUT_OF_MEMORY;
    return make_extent(gpu, which, bytes, memory, what);
}

static void unmake_extent(struct kvq__gpu *gpu, struct kvq__memory *memory)
{
    assert(memory->base && memory->bytes > 0);
    struct kvq_gpu_piece piece = {KVQ_GPU_PIECE_MADE, (uintptr_t)memory->base, memory->bytes,
                                  memory->handle};
    if (memory->fd >= 0)
        close(memory->fd);
    kvq__gpu_enter(gpu);
    release_piece(gpu, &piece);
}

// ---- The reserve ----

// With the lock held, as for all of these.
static bool should_make(const struct kvq__reserve *r)
{
    return !r->failed && r->n_ready < r->goal && r->there < r->most;
}

static bool has_work(const struct kvq__reserve *r)
{
    return should_make(r) || r->n_back > 0;
}

// Has the waiting caller look again when the goal is reached, or no more extents can be made.
static void tell_reserve(struct kvq__reserve *r)
{
    bool more = r->n_back > 0 || (!r->failed && r->there < r->most);
    if (!r->awaited || (r->n_ready < r->goal && more))
        return;
    r->awaited = false;
    r->goal = r->config.mark;
    kvq_word_store_release(&r->made, r->made + 1);
}

static void note_extent_result(struct kvq__gpu *gpu, struct kvq__reserve *r, int result,
                               const char *what)
{
    r->failed = result == KVQ_GPU_OUT_OF_MEMORY ? KVQ_E_NO_MEMORY : KVQ_E_SYSTEM;
    if (r->failed == KVQ_E_SYSTEM)
        kvq_gpu_fault(kvq__gpu_driver(gpu), result, what, r->fault, sizeof r->fault);
}

static void work_make(struct kvq__gpu *gpu, struct kvq__reserve *r)
{
    struct kvq__memory memory;
    const char *what;
    assert(should_make(r));
    r->there++;
    pthread_mutex_unlock(&r->lock);
    int result =
        make_if_allowed(gpu, KVQ__GPU_STREAM_COPIES, r->config.extent_bytes, &memory, &what);
    pthread_mutex_lock(&r->lock);
    if (result) {
        r->there--;
        note_extent_result(gpu, r, result, what);
    } else {
        assert(r->n_ready <= r->most); // the stack has room for one more
        r->ready[r->n_ready++] = memory;
    }
}

static void work_free(struct kvq__gpu *gpu, struct kvq__reserve *r)
{
    struct kvq__memory memory = r->back[--r->n_back];
    assert(r->n_back < r->there);
    pthread_mutex_unlock(&r->lock);
    unmake_extent(gpu, &memory);
    pthread_mutex_lock(&r->lock);
    assert(r->there > r->n_ready + r->n_back);
    r->there--;
    r->failed = 0; // there is more memory than there was
}

// Making goes before freeing, unless the budget has no room: then freeing makes some.
bool kvq__reserve_work(struct kvq__gpu *gpu)
{
    struct kvq__reserve *r = *kvq__gpu_reserve(gpu);
    if (!r)
        return false;
    pthread_mutex_lock(&r->lock);
    bool any = has_work(r);
    if (should_make(r))
        work_make(gpu, r);
    else if (any)
        work_free(gpu, r);
    tell_reserve(r);
    pthread_mutex_unlock(&r->lock);
    return any;
}

static void unlock_and_ask(struct kvq__reserve *r)
{
    bool work = has_work(r);
    assert(r->n_ready + r->n_back <= r->there);
    pthread_mutex_unlock(&r->lock);
    if (work && r->config.ask)
        r->config.ask(r->config.context);
}

void kvq__reserve_tick(struct kvq__gpu *gpu)
{
    struct kvq__reserve *r = *kvq__gpu_reserve(gpu);
    if (!r)
        return;
    pthread_mutex_lock(&r->lock);
    r->failed = 0;
    for (; !r->awaited && r->n_ready > r->config.mark; r->n_back++)
        r->back[r->n_back] = r->ready[--r->n_ready];
    assert(r->n_back <= r->most && r->n_ready + r->n_back <= r->there);
    bool surplus = r->n_back > 0;
    pthread_mutex_unlock(&r->lock);
    if (surplus && r->config.ask)
        r->config.ask(r->config.context);
}

uint64_t kvq__reserve_made_in_place(const struct kvq__gpu *gpu)
{
    const struct kvq__reserve *r = *kvq__gpu_reserve((struct kvq__gpu *)gpu);
    return r ? r->in_place : 0;
}

int kvq__reserve_open(struct kvq__gpu *gpu, const struct kvq__reserve_config *config)
{
    assert(!*kvq__gpu_reserve(gpu) && config->extent_bytes > 0);
    if (!kvq__gpu_maps(gpu))
        return 0;
    struct kvq__reserve *r = calloc(1, sizeof *r);
    if (!r)
        return KVQ_E_NO_MEMORY;
    r->config = *config;
    r->most = (uint32_t)(kvq__gpu_budget(gpu) / config->extent_bytes);
    r->goal = config->mark;
    r->ready = calloc(r->most + 1, sizeof *r->ready);
    r->back = calloc(r->most + 1, sizeof *r->back);
    if (!r->ready || !r->back) {
        free(r->ready);
        free(r->back);
        free(r);
        return KVQ_E_NO_MEMORY;
    }
    pthread_mutex_init(&r->lock, NULL);
    *kvq__gpu_reserve(gpu) = r;
    return 0;
}

void kvq__reserve_close(struct kvq__gpu *gpu)
{
    struct kvq__reserve *r = *kvq__gpu_reserve(gpu);
    if (!r)
        return;
    *kvq__gpu_reserve(gpu) = NULL;
    assert(r->there == r->n_ready + r->n_back); // the core has none
    while (r->n_ready > 0)
        unmake_extent(gpu, &r->ready[--r->n_ready]);
    while (r->n_back > 0)
        unmake_extent(gpu, &r->back[--r->n_back]);
    pthread_mutex_destroy(&r->lock);
    free(r->ready);
    free(r->back);
    free(r);
}

// ---- For the core ----

static int take_extent(void *context, size_t bytes, struct kvq__memory *memory)
{
    struct kvq__gpu *gpu = context;
    struct kvq__reserve *r = *kvq__gpu_reserve(gpu);
    assert(bytes == r->config.extent_bytes);
    (void)bytes;
    pthread_mutex_lock(&r->lock);
    int rc = r->n_ready > 0 ? 0 : r->failed ? r->failed : KVQ_E_BUSY;
    if (rc == 0)
        *memory = r->ready[--r->n_ready];
    else if (rc == KVQ_E_SYSTEM)
        kvq__gpu_faulted(gpu, r->fault);
    r->awaited |= rc == KVQ_E_BUSY;
    unlock_and_ask(r);
    return rc;
}

static void want(void *context, uint32_t n)
{
    struct kvq__reserve *r = *kvq__gpu_reserve(context);
    assert(r && n > 0);
    pthread_mutex_lock(&r->lock);
    r->goal = n > r->goal ? n : r->goal;
    r->awaited = true;
    tell_reserve(r); // if there are so many
    unlock_and_ask(r);
}

static uint32_t made(void *context)
{
    const struct kvq__reserve *r = *kvq__gpu_reserve(context);
    return kvq_word_load_acquire(&r->made);
}

// For callers that cannot wait: takes a ready extent, or makes one within the call. If the budget
// is used up an extent that was given back is freed first.
static int acquire_extent(void *context, size_t bytes, struct kvq__memory *memory)
{
    struct kvq__gpu *gpu = context;
    struct kvq__reserve *r = *kvq__gpu_reserve(gpu);
    const char *what;
    if (r) {
        pthread_mutex_lock(&r->lock);
        assert(bytes == r->config.extent_bytes);
        bool ready = r->n_ready > 0;
        if (ready)
            *memory = r->ready[--r->n_ready];
        else if (r->there >= r->most && r->n_back > 0)
            work_free(gpu, r);
        r->there += !ready;
        r->in_place += !ready;
        unlock_and_ask(r);
        if (ready)
            return 0;
    }
    int result = make_if_allowed(gpu, KVQ__GPU_STREAM_SMALL, bytes, memory, &what);
    if (!result)
        return 0;
    if (r) {
        pthread_mutex_lock(&r->lock);
        r->there--;
        pthread_mutex_unlock(&r->lock);
    }
    return kvq__gpu_failed(gpu, result, what);
}

static void zero_extent(void *context, struct kvq__memory *memory)
{
    struct kvq__gpu *gpu = context;
    int result = kvq__gpu_enter(gpu);
    result = result ? result
                    : zero_all(gpu, KVQ__GPU_STREAM_SMALL, (uintptr_t)memory->base, memory->bytes);
    if (result)
        kvq__gpu_failed(gpu, result, "zeroing memory for caches");
}

static void release_extent(void *context, struct kvq__memory *memory)
{
    struct kvq__gpu *gpu = context;
    struct kvq__reserve *r = *kvq__gpu_reserve(gpu);
    if (!r) {
        unmake_extent(gpu, memory);
        return;
    }
    pthread_mutex_lock(&r->lock);
    assert(r->n_back < r->most);
    assert(r->n_ready + r->n_back < r->there && memory->bytes >= r->config.extent_bytes);
    r->back[r->n_back++] = *memory;
    unlock_and_ask(r);
}

struct kvq__memory_ops kvq__gpu_memory(struct kvq__gpu *gpu)
{
    struct kvq__memory_ops ops = {
        .context = gpu, .acquire = acquire_extent, .zero = zero_extent, .release = release_extent};
    if (*kvq__gpu_reserve(gpu)) {
        ops.take = take_extent;
        ops.want = want;
        ops.made = made;
    }
    return ops;
}
