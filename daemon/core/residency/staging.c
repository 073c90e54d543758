// SPDX-License-Identifier: Apache-2.0
//
// Ways to and from a GPU for threads that may wait; see saved_internal.h.
#include "daemon/core/residency/saved_internal.h"

// Outgrown memory is kept: freeing pinned memory waits for the whole GPU, which may wait for a
// client. Kept memory is at most as much again, since each is at least twice the one before.
enum { OUTGROWN = 40 };
struct kvq__staging {
    LIST_ENTRY(kvq__staging) link;
    struct kvq__gpu *gpu;
    struct kvq_gpu_stream *stream; // shared by all stagings of the GPU
    void *memory, *outgrown[OUTGROWN];
    uint32_t n_outgrown;
    size_t bytes;
};

struct kvq__staging *kvq__staging_take(struct kvq__core *core, struct kvq__gpu *gpu)
{
    struct kvq__staging *f;
    LIST_FOREACH (f, &core->disk.stagings, link)
        if (f->gpu == gpu) {
            LIST_REMOVE(f, link);
            return f;
        }
    f = kvq__allocate(core, sizeof *f);
    if (f) {
        f->gpu = gpu;
        f->stream = kvq__gpu_stream(gpu, KVQ__GPU_STREAM_COPIES);
    }
    return f;
}

void kvq__staging_give(struct kvq__core *core, struct kvq__staging **staging)
{
    if (*staging)
        LIST_INSERT_HEAD(&core->disk.stagings, *staging, link);
    *staging = NULL;
}

void *kvq__staging_memory(struct kvq__staging *f, size_t bytes)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(f->gpu);
    if (bytes <= f->bytes)
        return f->memory;
    void *memory = NULL;
    size_t more = bytes > 2 * f->bytes ? bytes : 2 * f->bytes;
    int result = kvq__gpu_enter(f->gpu);
    if (result == 0)
        result = d->host_alloc(&memory, more, 0);
    if (result)
        return NULL;
    if (f->memory)
        f->outgrown[f->n_outgrown++] = f->memory;
    f->memory = memory;
    f->bytes = more;
    return f->memory;
}

// A GPU's fault is the poller's to find and tell.
static int wait_for_staging(struct kvq__staging *f, int result)
{
    result = result ? result : kvq__gpu_driver(f->gpu)->stream_sync(f->stream);
    return result ? KVQ_E_SYSTEM : 0;
}

int kvq__staging_fetch(struct kvq__staging *f, const uint8_t *from, size_t bytes)
{
    int result = kvq__gpu_enter(f->gpu);
    if (result == 0)
        result = kvq__gpu_driver(f->gpu)->copy_out(f->memory, (uintptr_t)from, bytes, f->stream);
    return wait_for_staging(f, result);
}

int kvq__staging_bring(struct kvq__staging *f, uint8_t *to, size_t at, size_t bytes)
{
    const uint8_t *from = (const uint8_t *)f->memory + at;
    int result = kvq__gpu_enter(f->gpu);
    if (result == 0)
        result = kvq__gpu_driver(f->gpu)->copy_in((uintptr_t)to, from, bytes, f->stream);
    return wait_for_staging(f, result);
}

void kvq__stagings_close(struct kvq__core *core)
{
    struct kvq__staging *f;
    while ((f = LIST_FIRST(&core->disk.stagings))) {
        const struct kvq_gpu_driver *d = kvq__gpu_driver(f->gpu);
        LIST_REMOVE(f, link);
        if (kvq__gpu_enter(f->gpu) == 0) {
            if (f->memory)
                d->host_free(f->memory);
            while (f->n_outgrown > 0)
                d->host_free(f->outgrown[--f->n_outgrown]);
        }
        kvq__deallocate(core, f, sizeof *f);
    }
}
