// SPDX-License-Identifier: Apache-2.0
//
// The dialect of dialect.h for a C++ compiler, and launching of kernels in the emulator.
//
// Every thread of a block is a fiber. Fibers of a block take turns in an order drawn from a seed,
// changing only at collectives and waits, where real lanes may drift apart. What the emulator
// refuses, with the source line of each thread concerned:
//   - collectives that not all lanes of a warp (or warps of a block) reach, or at different lines;
//   - shared loads and stores out of bounds or not aligned to their size, loads of bytes that
//     nothing wrote (they also hold NaN) or that an asynchronous copy is still bringing;
//   - two threads touching the same word of shared memory, one of them writing, with no
//     warp_sync or block_sync between. Warp collectives other than warp_sync order nothing.
// Asynchronous copies land as late as they may, at the wait, in an order drawn from the seed.
//
// It also counts, for every shared load of a whole warp, the passes its bank conflicts cost: 32
// banks of 4 bytes; loads of 8 and 16 bytes go in halves and quarters of a warp.
//
// An mma sums exactly and rounds once, or, as hardware does in one way or another, cuts every term
// to 24 bits counted from the largest (emu_shape.truncate).
//
// Not modelled: timing, weak ordering of global memory, the last bits of power2.
//
// One launch at a time in a process. Written for tests: memory that runs out ends the process.
#ifndef KVQ_KERNELS_EMU_EMU_H
#define KVQ_KERNELS_EMU_EMU_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/emu/dialect.h"

#define KVQ_DEVICE static inline
#define KVQ_UNROLL
#define KVQ_NO_UNROLL
#define KVQ_KERNEL(name, type, arg)                      void name(const type &arg)
#define KVQ_KERNEL_FOR(name, type, arg, threads, blocks) void name(const type &arg)

// The source line of the caller, as a default argument.
#define KVQ_EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace gpu
{
typedef uint32_t smem;

// Where a launch ended.
struct emu_report {
    char text[1024];        // what was refused, and where; empty if nothing was
    uint64_t collectives;   // of warps and blocks
    uint64_t loads;         // shared loads of whole warps
    uint64_t passes, least; // shared memory passes they cost, and would cost without conflicts
    char conflict[256];     // line of the first load with a conflict
    uint64_t uneven;        // shared loads that only some lanes of a warp made
};

// Runs `kernel` over a grid of blocks of `threads` (a multiple of 32) with `shared` bytes each,
// blocks one after the other. 0, or -1 with report->text set. `seed` draws every order.
struct emu_shape {
    int grid_x, grid_y, threads;
    uint32_t shared;
    uint64_t seed;
    bool truncate;
};
int emu_launch(void (*kernel)(const void *), const void *args, const emu_shape &shape,
               emu_report *report);

// The same for a kernel made by KVQ_KERNEL.
template <typename Args> struct emu_call {
    void (*kernel)(const Args &);
    const Args *args;
    static void run(const void *call)
    {
        const emu_call *c = (const emu_call *)call;
        c->kernel(*c->args);
    }
};

template <typename Args>
int launch(void (*kernel)(const Args &), const Args &args, const emu_shape &shape,
           emu_report *report)
{
    const emu_call<Args> call = {kernel, &args};
    return emu_launch(emu_call<Args>::run, &call, shape, report);
}

// How many times each byte of shared memory was loaded by lanes of the last block that ran.
const uint32_t *emu_byte_loads();

float half_to_float(uint16_t x);
uint16_t float_to_half(float x); // to nearest even

// ---- The words of the dialect ----

int thread();
int block_x();
int block_y();
int grid_x();

static inline int warp()
{
    return thread() / WARP;
}

static inline int lane()
{
    return thread() % WARP;
}

static inline smem smem_start()
{
    return 0;
}

void emu_load(void *to, smem at, uint32_t bytes, const char *file, int line);
void emu_store(smem at, const void *from, uint32_t bytes, const char *file, int line);

static inline uint32_t lds32(smem at, KVQ_EMU_HERE)
{
    uint32_t r;
    emu_load(&r, at, sizeof(r), file, line);
    return r;
}

static inline u32x2 lds64(smem at, KVQ_EMU_HERE)
{
    u32x2 r;
    emu_load(&r, at, sizeof(r), file, line);
    return r;
}

static inline u32x4 lds128(smem at, KVQ_EMU_HERE)
{
    u32x4 r;
    emu_load(&r, at, sizeof(r), file, line);
    return r;
}

static inline void sts32(smem at, uint32_t x, KVQ_EMU_HERE)
{
    emu_store(at, &x, sizeof(x), file, line);
}

static inline void sts128(smem at, const u32x4 &x, KVQ_EMU_HERE)
{
    emu_store(at, &x, sizeof(x), file, line);
}

void ldmatrix(uint32_t r[4], smem at, KVQ_EMU_HERE);
void ldmatrix_trans(uint32_t r[4], smem at, KVQ_EMU_HERE);
void copy16(smem to, const void *from, bool wanted, KVQ_EMU_HERE);
void copy_commit();
void emu_copy_wait(int left);

template <int N> static inline void copy_wait()
{
    emu_copy_wait(N);
}

void warp_sync(KVQ_EMU_HERE);
void block_sync(KVQ_EMU_HERE);
void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const float c[4], KVQ_EMU_HERE);
void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const float c[4],
              KVQ_EMU_HERE);
uint32_t transpose(uint32_t x, KVQ_EMU_HERE);
float shuffle_xor(float x, int mask, KVQ_EMU_HERE);
float shuffle(float x, int from, KVQ_EMU_HERE);
uint32_t shuffle_bits(uint32_t x, int from, KVQ_EMU_HERE);
bool any(bool x, KVQ_EMU_HERE);
uint32_t ballot(bool x, KVQ_EMU_HERE);
uint32_t atomic_inc(uint32_t *at, uint32_t last);

uint32_t mul2(uint32_t a, uint32_t b);
uint32_t pack2(float lo, float hi);
uint32_t pack2_bf16(float lo, float hi);
float low(uint32_t x);
float high(uint32_t x);

static inline float power2(float x)
{
    return exp2f(x);
}

static inline float reciprocal(float x)
{
    return 1 / x;
}

static inline int popcount(uint32_t x)
{
    return __builtin_popcount(x);
}

static inline float as_float(uint32_t x)
{
    float r;
    memcpy(&r, &x, sizeof(r));
    return r;
}

static inline uint32_t as_bits(float x)
{
    uint32_t r;
    memcpy(&r, &x, sizeof(r));
    return r;
}
} // namespace gpu

#endif
