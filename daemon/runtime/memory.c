// SPDX-License-Identifier: Apache-2.0
//
// Memory of extents for the core: memfds, so that they can be exported one by one, for reading.
#include "daemon/runtime/memory.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/log/log.h"
#include "daemon/runtime/descriptors.h"
#include "daemon/runtime/shm.h"

// ---- What the system has ----

// The first line of a small file; empty if it cannot be read.
static void read_line(const char *path, char *out, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, out, size - 1);
    if (fd >= 0)
        close(fd);
    out[got > 0 ? got : 0] = 0;
    out[strcspn(out, "\n")] = 0;
}

static uint64_t page_count(const char *name)
{
    char path[96], line[32];
    snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-2048kB/%s", name);
    read_line(path, line, sizeof line);
    return strtoull(line, NULL, 10);
}

struct kvq__huge_counts kvq__huge_counts(void)
{
    char mode[64];
    uint64_t free = page_count("free_hugepages"), promised = page_count("resv_hugepages");
    uint64_t more = page_count("nr_overcommit_hugepages"), taken = page_count("surplus_hugepages");
    read_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled", mode, sizeof mode);
    struct kvq__huge_counts counts = {.total = page_count("nr_hugepages")};
    counts.available = (free > promised ? free - promised : 0) + (more > taken ? more - taken : 0);
    counts.transparent = *mode && !strstr(mode, "[never]") && !strstr(mode, "[deny]");
    return counts;
}

int kvq__memory_check(const struct kvq__memory_source *source,
                      const struct kvq__huge_counts *counts, char *text)
{
    uint64_t need = source->pool_bytes / KVQ__HUGE_PAGE;
    if (source->huge != KVQ__HUGE_REQUIRE || counts->available >= need)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "huge_pages = require: the pool of %llu MiB needs %llu huge pages of 2 MiB, and %llu "
             "are available; set vm.nr_hugepages to %llu (sysctl), lower pool_bytes, or set "
             "huge_pages = auto",
             (unsigned long long)(source->pool_bytes >> 20), (unsigned long long)need,
             (unsigned long long)counts->available,
             (unsigned long long)(counts->total + need - counts->available));
    return KVQ_E_NO_MEMORY;
}

static bool takes_huge_pages(const struct kvq__memory_source *source)
{
    bool automatic = source->huge == KVQ__HUGE_AUTO && !source->transparent;
    return automatic || source->huge == KVQ__HUGE_REQUIRE;
}

uint64_t kvq__memory_set_aside(const struct kvq__memory_source *source,
                               const struct kvq__huge_counts *counts)
{
    if (!takes_huge_pages(source))
        return 0;
    return counts->available < source->pool_bytes / KVQ__HUGE_PAGE
               ? counts->available * KVQ__HUGE_PAGE
               : source->pool_bytes;
}

// ---- Extents ----

static void tell_memory_source(struct kvq__memory_source *source)
{
    if (source->told)
        return;
    struct kvq__huge_counts counts = kvq__huge_counts();
    uint64_t need = source->pool_bytes / KVQ__HUGE_PAGE;
    source->told = true;
    kvq__log(KVQ_LOG_INFO, "small_pages",
             "huge_pages_available=%llu pool_needs=%llu text=\"caches lie in small pages\" "
             "remedy=\"sysctl vm.nr_hugepages=%llu before the start, or huge_pages = off\"",
             (unsigned long long)counts.available, (unsigned long long)need,
             (unsigned long long)(counts.total > need ? counts.total : need));
}

// All pages are taken before anybody uses them: touching one that the system cannot give would end
// the daemon, and clients that map the extent with it. Where the kernel cannot say, we go on.
static int back_host(const struct kvq__memory *memory, uint64_t at, uint64_t bytes)
{
    assert(at + bytes <= memory->bytes);
    int failed;
    do
        failed = fallocate(memory->fd, 0, (off_t)at, (off_t)bytes) ? errno : 0;
    while (failed == EINTR);
    if (memory->huge)
        return failed ? KVQ_E_NO_MEMORY : 0;
    return failed == ENOSPC || failed == ENOMEM ? KVQ_E_NO_MEMORY : 0;
}

// A mapping of explicit huge pages reserves them for itself, so that these cannot run out later,
// unless the control group may have none of them.
static int reserve_huge(size_t bytes, struct kvq__memory *memory)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__shm shm;
    assert(bytes % KVQ__HUGE_PAGE == 0);
    if (kvq__shm_create_huge(&shm, "kvq-extent", bytes, text) != 0)
        return KVQ_E_NO_MEMORY;
    *memory = (struct kvq__memory){shm.map, bytes, shm.fd, true, 0};
    return 0;
}

static int reserve_small(size_t bytes, struct kvq__memory *memory)
{
    char text[KVQ_TEXT_BYTES];
    struct kvq__shm shm;
    int error = kvq__shm_create(&shm, "kvq-extent", bytes, true, text);
    if (error)
        return error;
    madvise(shm.map, bytes, MADV_HUGEPAGE); // a wish; refused where the system has it off
    *memory = (struct kvq__memory){shm.map, bytes, shm.fd, false, 0};
    return 0;
}

static void release_host(void *context, struct kvq__memory *memory)
{
    struct kvq__shm shm = {memory->fd, memory->base, memory->bytes};
    assert(memory->fd >= 0 && memory->base);
    (void)context;
    kvq__shm_close(&shm);
}

// So many of its pages, of an extent that was reserved just now.
static int with_pages(int rc, struct kvq__memory *memory, uint64_t bytes)
{
    if (rc == 0 && (rc = back_host(memory, 0, bytes)) < 0)
        release_host(NULL, memory);
    return rc;
}

static int make_host_extent(struct kvq__memory_source *source, size_t bytes, bool pages,
                            struct kvq__memory *memory)
{
    if (kvq__descriptors_free() <= kvq__descriptors_kept()) {
        kvq__log_client(&source->log_budget, KVQ_LOG_ERROR, "no_descriptors",
                        "what=extent free=%u limit=%u remedy=\"raise LimitNOFILE=\"",
                        kvq__descriptors_free(), kvq__descriptors_limit());
        return KVQ_E_NO_MEMORY;
    }
    if (takes_huge_pages(source)) {
        int rc = reserve_huge(bytes, memory);
        rc = with_pages(rc, memory, pages ? bytes : KVQ__HUGE_PAGE); // one shows that we may
        if (rc == 0 || source->huge == KVQ__HUGE_REQUIRE)
            return rc;
        tell_memory_source(source);
    }
    int rc = reserve_small(bytes, memory);
    return pages ? with_pages(rc, memory, bytes) : rc;
}

static int acquire_host(void *context, size_t bytes, struct kvq__memory *memory)
{
    return make_host_extent(context, bytes, true, memory);
}

static int reserve_host(void *context, size_t bytes, struct kvq__memory *memory)
{
    return make_host_extent(context, bytes, false, memory);
}

static void zero_host(void *context, struct kvq__memory *memory)
{
    assert(memory->fd >= 0 && memory->bytes > 0);
    (void)context;
    // Not by a hole: the seal that keeps clients from writing keeps us from that.
    memset(memory->base, 0, memory->bytes);
}

struct kvq__memory_ops kvq__memory_ops(struct kvq__memory_source *source)
{
    // Bookkeeping memory is the core's default: a queue's scratch is large and most of it seldom
    // used, so it must become real page by page only.
    return (struct kvq__memory_ops){.context = source,
                                    .acquire = acquire_host,
                                    .reserve = reserve_host,
                                    .back = back_host,
                                    .zero = zero_host,
                                    .release = release_host};
}
