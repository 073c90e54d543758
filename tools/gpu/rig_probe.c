// SPDX-License-Identifier: Apache-2.0
//
// See rig.h: what the device gives at best, and whether it computes as the kernels expect.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/probe.h"
#include "tools/gpu/rig_internal.h"

enum { WARP = 32, RATE_THREADS = 128, SUMS = 1 << 20 }; // words that any grid writes

// Taken once, kept until the end.
static int take_sums(struct rig *rig, char *text)
{
    return rig->sums ? 0 : rig_take(rig, &rig->sums, SUMS * sizeof(uint32_t), text);
}

int rig_probe_read(struct rig *rig, uint64_t records, uint32_t record_bytes, uint32_t n,
                   uint64_t stream, uint32_t *blocks, char *text)
{
    struct kvq_gpu_grid grid = {.threads = WARP,
                                .shared = 64 + KVQ_GPU_PROBE_STAGES * record_bytes,
                                .stream = (struct kvq_gpu_stream *)(uintptr_t)stream};
    int each;
    if (take_sums(rig, text) || kvq_gpu_blocks(&rig->gpu, KVQ_KERNEL_PROBE_READ, grid.threads,
                                               grid.shared, &each, text, RIG_TEXT))
        return -1;
    *blocks = grid.x = (uint32_t)(each * rig->gpu.multiprocessors);
    struct kvq_gpu_probe_read_args args = {(const uint8_t *)(uintptr_t)records, record_bytes, n,
                                           (uint32_t *)(uintptr_t)rig->sums};
    return kvq_gpu_launch(&rig->gpu, KVQ_KERNEL_PROBE_READ, &grid, &args, sizeof args, text,
                          RIG_TEXT);
}

int rig_probe_rate(struct rig *rig, enum rig_probe probe, uint32_t rounds, uint64_t stream,
                   double *operations, char *text)
{
    enum kvq_gpu_kernel kernel =
        probe == RIG_PROBE_MMA ? KVQ_KERNEL_PROBE_MMA_RATE : KVQ_KERNEL_PROBE_LOGIC_RATE;
    struct kvq_gpu_grid grid = {
        .x = 1, .threads = RATE_THREADS, .stream = (struct kvq_gpu_stream *)(uintptr_t)stream};
    struct kvq_gpu_probe_rate_args args = {rounds, 0x3c013c01u, NULL};
    int each = 1;
    if (take_sums(rig, text))
        return -1;
    args.sums = (uint32_t *)(uintptr_t)rig->sums;
    if (probe == RIG_PROBE_NOTHING) {
        args.rounds = 0;
    } else {
        if (kvq_gpu_blocks(&rig->gpu, kernel, RATE_THREADS, 0, &each, text, RIG_TEXT))
            return -1;
        grid.x = (uint32_t)(each * rig->gpu.multiprocessors);
    }
    double threads = (double)grid.x * RATE_THREADS;
    *operations = threads * args.rounds * KVQ_GPU_PROBE_CHAINS;
    if (probe == RIG_PROBE_MMA)
        *operations *= 4096.0 / WARP;
    return kvq_gpu_launch(&rig->gpu, kernel, &grid, &args, sizeof args, text, RIG_TEXT);
}

// ---- Subnormals ----

struct product {
    uint32_t a[WARP][4], b[WARP][2];
    float c[WARP][4], d[WARP][4];
};

// A code of 2 bits at place p of a half is code * 4^p * 2^-24.
static uint32_t codes_of(uint32_t i)
{
    uint32_t place = i % 5, low = i * 7 % 4, high = i * 5 % 4;
    return low << 2 * place | high << (16 + 2 * place);
}

static void fill(struct product *p)
{
    for (uint32_t lane = 0; lane < WARP; lane++) {
        for (uint32_t i = 0; i < 4; i++) {
            p->a[lane][i] = codes_of(4 * lane + i);
            p->c[lane][i] = 0;
        }
        for (uint32_t i = 0; i < 2; i++) // fp16 of 1 to 2, and of -1 to -2
            p->b[lane][i] = (0x3c00u + 31 * lane + i) | (0xbc00u + 17 * lane + i) << 16;
    }
}

static double half(uint32_t bits)
{
    double fraction = bits & 0x3ffu, sign = bits & 0x8000u ? -1 : 1;
    int exponent = bits >> 10 & 31;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

// Row m, column n of the product, from the fragments (kernels/emu/dialect.h).
static double exact(const struct product *p, int m, int n)
{
    double sum = 0;
    for (int k = 0; k < 16; k++) {
        int a = m % 8 * 4 + k % 8 / 2, b = n * 4 + k % 8 / 2, shift = 16 * (k % 2);
        sum += half(p->a[a][m / 8 + 2 * (k / 8)] >> shift & 0xffffu) *
               half(p->b[b][k / 8] >> shift & 0xffffu);
    }
    return sum;
}

int rig_probe_subnormals(struct rig *rig, double *error, char *text)
{
    struct product p;
    struct kvq_gpu_grid grid = {.x = 1, .threads = WARP};
    uint64_t at = 0;
    fill(&p);
    if (rig__put(rig, &at, &p, sizeof p, text))
        return -1;
    const struct product *device = (const struct product *)(uintptr_t)at;
    struct kvq_gpu_probe_mma_args args = {device->a[0], device->b[0], device->c[0],
                                          (float *)(uintptr_t)device->d[0]};
    int failed = kvq_gpu_launch(&rig->gpu, KVQ_KERNEL_PROBE_MMA, &grid, &args, sizeof args, text,
                                RIG_TEXT) ||
                 rig_copy_out(rig, &p, at, sizeof p, text);
    rig_give(rig, at);
    *error = 0;
    for (int lane = 0; !failed && lane < WARP; lane++)
        for (int i = 0; i < 4; i++) {
            double want = exact(&p, lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
            double off = fabs((double)p.d[lane][i] - want) / fmax(fabs(want), 0x1p-24);
            *error = fmax(*error, off);
        }
    return failed ? -1 : 0;
}
