// SPDX-License-Identifier: Apache-2.0
//
// Memory of extents for the core: memfds, so that they can be exported one by one.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/server.h"

static int acquire(void *context, size_t bytes, struct kvq__memory *memory)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__shm shm;
    (void)context;
    int error = kvq__shm_create(&shm, "kvq-extent", bytes, false, text);
    if (error)
        return error;
    // Pages are taken now: later, in the middle of a step, the system might have none left, and
    // would then end the daemon instead of refusing. Where the kernel cannot say, we go on.
    int failed = posix_fallocate(shm.fd, 0, (off_t)bytes);
    if (failed == ENOSPC || failed == ENOMEM) {
        kvq__shm_close(&shm);
        return KVQ_E_NO_MEMORY;
    }
    madvise(shm.map, bytes, MADV_HUGEPAGE); // a wish; refused where the system has it off
    *memory = (struct kvq__memory){shm.map, bytes, shm.fd};
    return 0;
}

static void zero(void *context, struct kvq__memory *memory)
{
    (void)context;
    // A hole reads as zeros and costs no writing, but gives the pages away; take them back.
    int hole =
        fallocate(memory->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)memory->bytes);
    if (hole != 0 || posix_fallocate(memory->fd, 0, (off_t)memory->bytes) != 0)
        memset(memory->base, 0, memory->bytes);
}

static void release(void *context, struct kvq__memory *memory)
{
    struct kvq__shm shm = {memory->fd, memory->base, memory->bytes};
    (void)context;
    kvq__shm_close(&shm);
}

struct kvq__memory_ops kvq__memory_ops(void)
{
    // Bookkeeping memory is the core's default: a queue's scratch is large and most of it seldom
    // used, so it must become real page by page only.
    return (struct kvq__memory_ops){.acquire = acquire, .zero = zero, .release = release};
}
