// SPDX-License-Identifier: Apache-2.0
//
// The few words that a GPU kernel of ours is written in. Under nvcc each is one instruction
// (kernels/cuda/ptx.h); under a C++ compiler each is a call of the emulator (kernels/emu/emu.h),
// which runs every thread of a block as a fiber on the CPU. So the same source is tested on
// machines without a GPU. What the words mean (namespace gpu; "lane" is a thread of a warp of 32):
//
//   thread(), warp(), lane(), block_x(), block_y(), grid_x()     where this thread stands
//   smem                    an address in the block's shared memory; smem_start() is the first
//   lds32/64/128, sts32/128 shared loads and stores, naturally aligned
//   ldmatrix(r, at)         four 8x8 matrices of 16-bit values from shared memory: lanes 8 i to
//                           8 i + 7 give the addresses of the eight 16-byte rows of matrix i;
//                           r[i] is values 2j and 2j+1 of row g of matrix i (lane = 4 g + j).
//                           ldmatrix_trans: rows 2j and 2j+1 of column g
//   copy16(to, from, wanted), copy_commit, copy_wait<N>
//                           asynchronous 16-byte copies from device to shared memory (nothing if
//                           not wanted), in batches; the wait leaves at most N batches of this
//                           thread under way. Other threads see the bytes after this thread's
//                           wait and a sync.
//   copy_bulk(to, from, bytes, barrier)
//                           one asynchronous copy by one thread, all in multiples of 16 bytes;
//                           tells the barrier how many bytes have landed. Only where HAS_BULK
//   barrier_init(at, count) makes 8 aligned shared bytes a barrier that counts phases: one ends
//                           when `count` threads have arrived and all expected bytes have landed.
//                           One thread makes it, then barrier_fence(), then a sync before use
//   barrier_arrive(at), barrier_expect(at, bytes)
//                           arrives; the second also adds bytes that must land in this phase
//   barrier_wait(at, parity)
//                           until phase number `parity` (0, 1, 0, ..) has ended; sees what was
//                           copied, and what the threads did before they arrived
//   warp_sync, block_sync   all threads arrive; memory written before is seen after
//   warps_sync(number, first, count)
//                           the same for `count` warps from `first`; number 1 to 15, one for each
//                           set of warps
//   ldg16/32/64/128, stg16/32/64/128
//                           loads and stores of device memory, naturally aligned. What a kernel
//                           writes, and what another block wrote, is reached by these alone
//   prefetch(at)            has the line of device memory come into the nearest cache, or does
//                           nothing
//   fetch_count(at, x)      adds x to a word in device memory; returns what it was. An acquire and
//                           a release: whoever comes later sees what was done, and synced, before
//   fetch_add(at, x), fetch_max(at, x)
//                           the sum, the larger; return what it was, and order nothing
//   load_acquire(at), store_release(at, x)
//   mma(d, a, b0, b1, c)    d = a b + c; m16n8k16, fp16 in, fp32 out, fragments as PTX has them:
//                           a[0] row g, k 2j and 2j+1; a[1] row g+8; a[2], a[3] the same, k + 8;
//                           b0 k 2j and 2j+1 of column g, b1 k + 8; c[0], c[1] row g, columns 2j
//                           and 2j+1; c[2], c[3] row g+8 (lane = 4 g + j)
//   mma_bf16                the same with bf16 in
//   transpose(x)            of an 8x8 matrix of 16-bit values, two to a lane
//   shuffle(x, lane), shuffle_xor(x, mask), and with _bits for integers
//   any(x), all(x), ballot(x)
//                           ballot: bit l is what lane l says
//   fma2(a, b, c)           two fp16 a b + c, rounded once
//   mul2(a, b)              two fp16 products; pack2(lo, hi) rounds two floats to fp16, to nearest
//                           even; low(x), high(x) the halves as floats
//   pack2_bf16(lo, hi)      rounds two floats to bf16, to nearest even
//   power2(x), reciprocal(x) 2^x and 1/x in fp32, to the last bits but one or two
//   permute(a, b, picks)    four bytes, each picked by 4 bits (the lowest first): 0 to 3 are a's,
//                           4 to 7 b's
//   popcount(x)             bits that are set
//   as_float, as_bits       the same 32 bits
//
// All lanes of a warp must reach the same collective: warp_sync, ldmatrix, mma, transpose, the
// shuffles and votes. KVQ_DEVICE marks a function, KVQ_KERNEL(name, type, arg) heads a kernel of
// one argument and blocks of at most 128 threads; KVQ_KERNEL_FOR(name, type, arg, threads, blocks)
// one of at most `threads`, of which `blocks` shall run on a multiprocessor at a time. KVQ_UNROLL,
// KVQ_UNROLL_BY(n) and KVQ_NO_UNROLL stand before loops.
#ifndef KVQ_KERNELS_EMU_DIALECT_H
#define KVQ_KERNELS_EMU_DIALECT_H

#include <stdint.h>

namespace gpu
{
enum { WARP = 32 };

struct u32x2 {
    uint32_t v[2];
};

struct u32x4 {
    uint32_t v[4];
};
} // namespace gpu

#ifdef __CUDACC__
#include "kernels/cuda/ptx.h"
#else
#include "kernels/emu/emu.h"
#endif

#endif
