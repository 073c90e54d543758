// SPDX-License-Identifier: Apache-2.0
//
// Counts what attention over packed groups costs when memory costs nothing: core cycles and
// instructions per token and KV head, for 4 query heads that share it. Not a test; run it on a
// quiet machine:
//
//     count_kernels [c|avx2|avx512]
//
// One chunk of 512 tokens, 4 groups that stay in the first level cache, taken 4 times each.
// Instructions are counted by single-stepping a child, so no performance counters are needed.
// Cycles are the shortest of many runs times the clock, and that comes from dependent additions,
// one a cycle.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/internal.h"

enum { ROWS = 4, GROUPS = 4, TOKENS = KVQ__CHUNK, RUNS = 2000 };

struct job {
    const struct kvq_kernels *k;
    struct kvq__codec codec;
    struct kvq__tile tile;
    struct kvq__chunk chunk;
    bool fast;
};

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static double clock_ghz(void)
{
    double best = 1e30;
    for (int run = 0; run < 200; run++) {
        uint64_t x = (uint64_t)run;
        double start = now_ns();
        for (int i = 0; i < 5000; i++) {
            __asm__ volatile("add $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0" : "+r"(x));
        }
        double time = now_ns() - start;
        best = time < best ? time : best;
    }
    return 20000 / best;
}

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p)
        abort();
    memset(p, 0, bytes);
    return p;
}

// Numbers without a pattern, in [-1, 1).
static void fill(float *x, size_t n)
{
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)state * 0x1p-31f;
    }
}

static void make_tile(struct job *j)
{
    struct kvq__tile *t = &j->tile;
    uint32_t dim = j->codec.dim;
    float *q = memory(ROWS * dim * sizeof(float));
    fill(q, ROWS * dim);
    *t = (struct kvq__tile){.codec = &j->codec, .rows = ROWS, .dim = dim, .q = q, .qt = q};
    t->logits = memory(ROWS * KVQ__LOGITS_STRIDE * sizeof(float));
    t->m = memory(ROWS * sizeof(float));
    t->l = memory(ROWS * sizeof(float));
    t->factor = memory(ROWS * sizeof(float));
    t->lo = memory(ROWS * sizeof(int32_t));
    t->hi = memory(ROWS * sizeof(int32_t));
    t->o = t->ot = memory(ROWS * dim * sizeof(float));
    t->group_f32 = memory(KVQ_GROUP_TOKENS * dim * sizeof(float));
    t->scratch = memory(KVQ__SCRATCH_BYTES);
    for (uint32_t r = 0; r < ROWS; r++)
        t->hi[r] = TOKENS;
}

static void make_chunk(struct job *j)
{
    uint8_t *groups = memory(GROUPS * j->codec.layout.group_bytes);
    float *rows = memory(KVQ_GROUP_TOKENS * j->codec.dim * sizeof(float));
    fill(rows, KVQ_GROUP_TOKENS * j->codec.dim);
    for (uint32_t i = 0; i < GROUPS; i++) {
        uint8_t *group = groups + i * j->codec.layout.group_bytes;
        j->k->quant_k[j->codec.k.kind](&j->codec, rows, group, 0);
        j->k->quant_v[j->codec.v.kind](&j->codec, rows, group, 0);
    }
    j->chunk = (struct kvq__chunk){.groups = KVQ__CHUNK_GROUPS};
    for (uint32_t i = 0; i < KVQ__CHUNK_GROUPS; i++)
        j->chunk.group[i] =
            (struct kvq__group){.packed = kvq_packed_at(&j->codec.layout, groups, i % GROUPS),
                                .packed_tokens = KVQ_GROUP_TOKENS,
                                .held = UINT32_MAX};
    free(rows);
}

static void run(struct job *j)
{
    (j->fast ? j->k->attend_chunk_fast : j->k->attend_chunk)(j->k, &j->tile, &j->chunk);
}

static double cycles(struct job *j, double ghz)
{
    double best = 1e30;
    for (int i = 0; i < RUNS; i++) {
        double start = now_ns();
        run(j);
        double time = now_ns() - start;
        best = time < best ? time : best;
    }
    return best * ghz / TOKENS;
}

// Steps a child through one run, between two signals it sends itself.
static double instructions(struct job *j)
{
    int status;
    long n = 0;
    pid_t child = fork();
    if (child == 0) {
        run(j); // libraries bind their symbols the first time
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGUSR1);
        run(j);
        raise(SIGUSR2);
        _exit(0);
    }
    waitpid(child, &status, 0);
    for (; WIFSTOPPED(status) && WSTOPSIG(status) != SIGUSR2; n++) {
        ptrace(PTRACE_SINGLESTEP, child, NULL, NULL);
        waitpid(child, &status, 0);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return (double)n / TOKENS;
}

static void count(const struct kvq_kernels *k, const struct kvq_format *f, uint16_t dim, double ghz)
{
    struct kvq_shape s = {.q_heads = ROWS, .kv_heads = 1, .k_dim = dim, .v_dim = dim};
    s.dtype = KVQ_F16;
    struct job j = {.k = k, .codec = kvq__codec_of(f, &s, NULL, 0)};
    make_tile(&j);
    make_chunk(&j);
    for (int fast = 0; fast < (k->has_fast && k->has_fast(&j.codec, ROWS) ? 2 : 1); fast++) {
        j.fast = fast;
        if (fast)
            k->prepare_fast(&j.tile);
        printf("%-8s %8u  %-6s %6.1f %13.1f\n", f->name, (unsigned)dim, fast ? "fast" : "exact",
               cycles(&j, ghz), instructions(&j));
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    static const char *const formats[] = {"oscar2", "oscar3", "oscar4"};
    if (argc > 1)
        setenv("KVQ_CPU_MASK", argv[1], 1);
    const struct kvq_kernels *k = kvq_kernels_get(KVQ_ISA_BEST);
    double ghz = clock_ghz();
    printf("%s, %.2f GHz, %d query heads to a KV head; per token and KV head:\n",
           kvq_kernels_isa(k), ghz, ROWS);
    printf("%-8s %8s  %-6s %6s %13s\n", "format", "head_dim", "path", "cycles", "instructions");
    for (uint16_t dim = 64; dim <= 256; dim *= 2)
        for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
            count(k, kvq_format_by_name(formats[i]), dim, ghz);
    return 0;
}
