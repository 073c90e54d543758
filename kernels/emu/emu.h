// SPDX-License-Identifier: Apache-2.0
//
// The dialect of dialect.h for a C++ compiler, and launching of kernels in the emulator.
// docs/emulator.md says how it works and what it cannot see.
//
// Every thread of a block is a fiber. Blocks run one after the other, fibers of a block take turns,
// changing only at collectives and waits, where real lanes may drift apart; every order is drawn
// from a seed. What the emulator refuses, with the source line of each thread concerned:
//   - collectives that not all lanes of a warp (or warps of a block) reach, or at different lines;
//     threads that wait for ever;
//   - shared loads and stores out of bounds or not aligned to their size, loads of bytes that
//     nothing wrote (they also hold NaN) or that an asynchronous copy is still bringing;
//   - two threads touching the same word of shared memory, one of them writing, with nothing
//     between that orders them: warp_sync, block_sync, warps_sync or a barrier. Other collectives
//     order nothing;
//   - loads and stores of device memory out of its pieces (launched by kernels/emu/driver.h) or
//     not aligned, and loads and stores of what another thread wrote, in this block or another,
//     without having seen it;
//   - barriers used before they are ready, and blocks that end before their bulk copies landed.
// Asynchronous copies land as late as they may, in an order drawn from the seed: those of 16 bytes
// at the wait, bulk copies most often when nothing else can run.
//
// It also counts, for every shared load of a warp, the passes its bank conflicts cost: 32 banks of
// 4 bytes; loads of 8 and 16 bytes go in halves and quarters of a warp.
//
// An mma sums exactly and rounds once, or, as hardware does in one way or another, cuts every term
// to 24 bits counted from the largest (emu_shape.truncate).
//
// Not modelled: timing, weak ordering of memory beyond the above, the last bits of power2.
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
#define KVQ_UNROLL_BY(n)
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
    uint64_t blocks;        // that ran
    uint64_t collectives;   // of warps and blocks
    uint64_t loads;         // shared loads of whole warps
    uint64_t passes, least; // shared memory passes they cost, and would cost without conflicts
    char conflict[256];     // line of the first load with a conflict
    uint64_t brought;       // bytes of device memory, by asynchronous copies
    uint64_t uneven;        // shared loads, of those, that only some lanes of a warp made
};

// Runs `kernel` over a grid of blocks of `threads` (a multiple of 32) with `shared` bytes each,
// blocks one after the other. 0, or -1 with report->text set. `seed` draws every order. `driver`:
// all device memory is the emulated driver's, so that accesses can be held to its pieces.
struct emu_shape {
    int grid_x, grid_y, threads;
    uint32_t shared;
    uint64_t seed;
    bool truncate;
    bool driver = false;
    int device = 0; // the bit of its pieces, see global.h
    bool count_bytes = false;
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

// How many times each byte of shared memory was loaded by lanes of the last block that ran, if
// count_bytes was set.
const uint32_t *emu_byte_loads();

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

enum : bool { HAS_BULK = true };

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

void copy_bulk(smem to, const void *from, uint32_t bytes, smem barrier, KVQ_EMU_HERE);
void barrier_init(smem at, uint32_t count, KVQ_EMU_HERE);
void barrier_fence();
void barrier_arrive(smem at, KVQ_EMU_HERE);
void barrier_expect(smem at, uint32_t bytes, KVQ_EMU_HERE);
void barrier_wait(smem at, uint32_t parity, KVQ_EMU_HERE);

void warp_sync(KVQ_EMU_HERE);
void block_sync(KVQ_EMU_HERE);
void warps_sync(int number, int first, int count, KVQ_EMU_HERE);
void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const float c[4], KVQ_EMU_HERE);
void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const float c[4],
              KVQ_EMU_HERE);
uint32_t transpose(uint32_t x, KVQ_EMU_HERE);
float shuffle_xor(float x, int mask, KVQ_EMU_HERE);
float shuffle(float x, int from, KVQ_EMU_HERE);
uint32_t shuffle_bits(uint32_t x, int from, KVQ_EMU_HERE);
uint32_t shuffle_xor_bits(uint32_t x, int mask, KVQ_EMU_HERE);
bool any(bool x, KVQ_EMU_HERE);
bool all(bool x, KVQ_EMU_HERE);
uint32_t ballot(bool x, KVQ_EMU_HERE);

void emu_global_load(void *to, const void *from, uint32_t bytes, const char *file, int line);
void emu_global_store(void *at, const void *from, uint32_t bytes, const char *file, int line);

static inline uint16_t ldg16(const void *at, KVQ_EMU_HERE)
{
    uint16_t r;
    emu_global_load(&r, at, sizeof(r), file, line);
    return r;
}

static inline uint32_t ldg32(const void *at, KVQ_EMU_HERE)
{
    uint32_t r;
    emu_global_load(&r, at, sizeof(r), file, line);
    return r;
}

static inline u32x2 ldg64(const void *at, KVQ_EMU_HERE)
{
    u32x2 r;
    emu_global_load(&r, at, sizeof(r), file, line);
    return r;
}

static inline u32x4 ldg128(const void *at, KVQ_EMU_HERE)
{
    u32x4 r;
    emu_global_load(&r, at, sizeof(r), file, line);
    return r;
}

static inline void stg16(void *at, uint16_t x, KVQ_EMU_HERE)
{
    emu_global_store(at, &x, sizeof(x), file, line);
}

static inline void stg32(void *at, uint32_t x, KVQ_EMU_HERE)
{
    emu_global_store(at, &x, sizeof(x), file, line);
}

static inline void stg64(void *at, const u32x2 &x, KVQ_EMU_HERE)
{
    emu_global_store(at, &x, sizeof(x), file, line);
}

static inline void stg128(void *at, const u32x4 &x, KVQ_EMU_HERE)
{
    emu_global_store(at, &x, sizeof(x), file, line);
}

static inline void prefetch(const void *)
{
}

uint32_t fetch_count(uint32_t *at, uint32_t x, KVQ_EMU_HERE);
uint32_t fetch_add(uint32_t *at, uint32_t x, KVQ_EMU_HERE);
uint32_t fetch_max(uint32_t *at, uint32_t x, KVQ_EMU_HERE);
uint32_t load_acquire(const uint32_t *at, KVQ_EMU_HERE);
void store_release(uint32_t *at, uint32_t x, KVQ_EMU_HERE);

static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t picks)
{
    const uint64_t bytes = a | (uint64_t)b << 32;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++)
        r |= (uint32_t)(bytes >> 8 * (picks >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
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

// Moves the exponent's bias by a multiplication, which is exact for subnormals as well.
static inline float half_to_float(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7fff) << 13;
    const float value = as_float(rest) * 0x1p112f;
    return as_float(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : as_bits(value)));
}

static inline float low(uint32_t x)
{
    return half_to_float((uint16_t)x);
}

static inline float high(uint32_t x)
{
    return half_to_float((uint16_t)(x >> 16));
}

static inline float low_bf16(uint32_t x)
{
    return as_float(x << 16);
}

static inline float high_bf16(uint32_t x)
{
    return as_float(x & 0xffff0000u);
}

static inline uint32_t pack2(float lo, float hi)
{
    return float_to_half(lo) | (uint32_t)float_to_half(hi) << 16;
}

uint32_t pack2_bf16(float lo, float hi);

// The product of two fp16 is exact in fp32.
static inline uint32_t mul2(uint32_t a, uint32_t b)
{
    return pack2(low(a) * low(b), high(a) * high(b));
}

// A number that rounds to fp16 as `x` does: cut to fp32, its last bit set if anything was cut off.
static inline float to_odd(double x)
{
    float r = (float)x;
    if ((double)r == x || isnan(r))
        return r;
    r = fabs((double)r) > fabs(x) ? nextafterf(r, 0) : r;
    return as_float(as_bits(r) | 1);
}

// A product of two fp16 and its sum with a third are exact in a double, or differ from it where
// that does not show.
static inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c)
{
    return pack2(to_odd((double)low(a) * low(b) + low(c)),
                 to_odd((double)high(a) * high(b) + high(c)));
}

// Where the GPU's own functions give zero instead of a subnormal, so do these.
static inline float flushed(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}

static inline float power2(float x)
{
    return flushed(exp2f(flushed(x)));
}

static inline float reciprocal(float x)
{
    return flushed(1 / flushed(x));
}
} // namespace gpu

#endif
