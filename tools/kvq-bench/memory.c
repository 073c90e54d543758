// SPDX-License-Identifier: Apache-2.0
//
// Memory in huge pages, and what this machine reads from it at best.
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/pool.h"
#include "tools/kvq-bench/bench.h"

static const size_t HUGE_PAGE = 2u << 20;
static const size_t FLOOR_BYTES = 1u << 30, FLOOR_PIECE = 4u << 20;
enum { FLOOR_READS = 5, VECTORS = 8 };

long bench_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return 1;
    return CPU_COUNT(&set);
}

bool bench_memory_take(struct bench_memory *m, size_t bytes)
{
    // Rounded up, and mapped with one page more, so that the start can be moved to a multiple.
    m->bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    size_t mapped = m->bytes + HUGE_PAGE;
    char *p = mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "kvq-bench: no %zu MiB of memory (%s); give fewer --tokens\n",
                m->bytes >> 20, strerror(errno));
        *m = (struct bench_memory){0};
        return false;
    }
    size_t skip = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    if (skip)
        munmap(p, skip);
    munmap(p + skip + m->bytes, HUGE_PAGE - skip);
    m->data = p + skip;
    madvise(m->data, m->bytes, MADV_HUGEPAGE); // a wish: bench_huge_share says what came of it
    return true;
}

void bench_memory_give(struct bench_memory *m)
{
    if (m->data)
        munmap(m->data, m->bytes);
    *m = (struct bench_memory){0};
}

// The number behind a name at the front of the line; else what it was.
static double field(const char *line, const char *name, double before)
{
    size_t length = strlen(name);
    return strncmp(line, name, length) == 0 ? strtod(line + length, NULL) : before;
}

double bench_huge_share(void)
{
    char line[128];
    double all = 0, huge = 0;
    FILE *f = fopen("/proc/self/smaps_rollup", "r");
    if (!f)
        return 0;
    while (fgets(line, sizeof line, f)) {
        all = field(line, "Anonymous:", all);
        huge = field(line, "AnonHugePages:", huge);
    }
    fclose(f);
    return all > 0 ? huge / all : 0;
}

// What the kernel says of the first CPU; 0 where it does not. The C library counts the caches of
// all dies of a socket, of which a core has one.
static size_t kernels_last_level_cache(void)
{
    char line[32];
    unsigned long kib = 0;
    FILE *f = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
    if (!f)
        return 0;
    if (fgets(line, sizeof line, f))
        kib = strtoul(line, NULL, 10); // "32768K"
    fclose(f);
    return kib * 1024;
}

size_t bench_last_level_cache(void)
{
    size_t kernels = kernels_last_level_cache();
    long bytes = kernels ? (long)kernels : sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > 0 ? (size_t)bytes : 32u << 20;
}

// ---- The floor ----

typedef uint64_t v8 __attribute__((vector_size(64)));
typedef uint64_t v4 __attribute__((vector_size(32)));
typedef uint64_t v2 __attribute__((vector_size(16)));

// One reader for each width. Eight sums, so that no addition waits for the one before.
#define READER(name, vector, isa)                                                                  \
    __attribute__((target(isa))) static uint64_t name(const void *from, size_t bytes)              \
    {                                                                                              \
        const vector *p = from, *end = p + bytes / sizeof *p;                                      \
        vector sum[VECTORS] = {{0}};                                                               \
        uint64_t all = 0;                                                                          \
        for (; p < end; p += VECTORS)                                                              \
            for (int i = 0; i < VECTORS; i++)                                                      \
                sum[i] ^= p[i];                                                                    \
        for (int i = 0; i < VECTORS; i++)                                                          \
            for (size_t lane = 0; lane < sizeof *p / sizeof all; lane++)                           \
                all ^= sum[i][lane];                                                               \
        return all;                                                                                \
    }

READER(read_64_bytes, v8, "avx512f")
READER(read_32_bytes, v4, "avx2")
READER(read_16_bytes, v2, "sse2")

struct floor_read {
    const char *data;
    uint64_t (*read)(const void *from, size_t bytes);
    uint64_t *sums; // one a piece, so that no read is for nothing
};

static void read_piece(void *ctx, uint32_t item, void *workspace)
{
    const struct floor_read *r = ctx;
    (void)workspace;
    r->sums[item] = r->read(r->data + item * FLOOR_PIECE, FLOOR_PIECE);
}

double bench_floor(struct kvq_pool *pool)
{
    struct bench_memory m;
    uint64_t sums[(1u << 30) / (4u << 20)];
    if (!bench_memory_take(&m, FLOOR_BYTES))
        return 0;
    memset(m.data, 1, m.bytes);
    struct floor_read r = {.data = m.data, .read = read_16_bytes, .sums = sums};
    if (__builtin_cpu_supports("avx512f"))
        r.read = read_64_bytes;
    else if (__builtin_cpu_supports("avx2"))
        r.read = read_32_bytes;
    double best = 0;
    for (int i = 0; i < FLOOR_READS; i++) {
        double start = bench_seconds();
        kvq_pool_run(pool, read_piece, &r, (uint32_t)(FLOOR_BYTES / FLOOR_PIECE));
        double speed = (double)FLOOR_BYTES / (bench_seconds() - start);
        best = speed > best ? speed : best;
    }
    bench_memory_give(&m);
    return best;
}
