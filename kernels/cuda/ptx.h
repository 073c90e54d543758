// SPDX-License-Identifier: Apache-2.0
//
// The dialect of kernels/emu/dialect.h as PTX, for compute capability 8.0 and later.
#ifndef KVQ_KERNELS_CUDA_PTX_H
#define KVQ_KERNELS_CUDA_PTX_H

#include <stdint.h>

#include "kernels/emu/dialect.h"

#define KVQ_DEVICE                  __device__ __forceinline__
#define KVQ_UNROLL                  _Pragma("unroll")
#define KVQ_NO_UNROLL               _Pragma("unroll 1")
#define KVQ_PRAGMA(x)               _Pragma(#x)
#define KVQ_UNROLL_BY(n)            KVQ_PRAGMA(unroll n)
#define KVQ_KERNEL(name, type, arg) KVQ_KERNEL_FOR(name, type, arg, 128, 1)
#define KVQ_KERNEL_FOR(name, type, arg, threads, blocks)                                           \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                  \
        name(const __grid_constant__ type arg)

namespace gpu
{
typedef uint32_t smem;

KVQ_DEVICE int thread()
{
    return threadIdx.x;
}

KVQ_DEVICE int warp()
{
    return threadIdx.x / WARP;
}

KVQ_DEVICE int lane()
{
    return threadIdx.x % WARP;
}

KVQ_DEVICE int block_x()
{
    return blockIdx.x;
}

KVQ_DEVICE int block_y()
{
    return blockIdx.y;
}

KVQ_DEVICE int grid_x()
{
    return gridDim.x;
}

KVQ_DEVICE smem smem_start()
{
    extern __shared__ __align__(128) uint8_t bytes[];
    return (smem)__cvta_generic_to_shared(bytes);
}

KVQ_DEVICE uint32_t lds32(smem at)
{
    uint32_t r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(at) : "memory");
    return r;
}

KVQ_DEVICE u32x2 lds64(smem at)
{
    u32x2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(r.v[0]), "=r"(r.v[1])
                 : "r"(at)
                 : "memory");
    return r;
}

KVQ_DEVICE u32x4 lds128(smem at)
{
    u32x4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                 : "r"(at)
                 : "memory");
    return r;
}

KVQ_DEVICE void sts32(smem at, uint32_t x)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

KVQ_DEVICE void sts128(smem at, const u32x4 &x)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.v[0]), "r"(x.v[1]),
                 "r"(x.v[2]), "r"(x.v[3])
                 : "memory");
}

KVQ_DEVICE void ldmatrix(uint32_t r[4], smem at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

KVQ_DEVICE void ldmatrix_trans(uint32_t r[4], smem at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

KVQ_DEVICE void copy16(smem to, const void *from, bool wanted)
{
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, %2, 0;\n"
                 " @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to),
                 "l"(from), "r"((int)wanted)
                 : "memory");
}

KVQ_DEVICE void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> KVQ_DEVICE void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
enum : bool { HAS_BULK = true };

KVQ_DEVICE void barrier_init(smem at, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

KVQ_DEVICE void barrier_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::
                     : "memory");
}

KVQ_DEVICE void barrier_arrive(smem at)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

KVQ_DEVICE void barrier_expect(smem at, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
}

KVQ_DEVICE void barrier_wait(smem at, uint32_t parity)
{
    uint32_t done;
    do
        asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     " selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(at), "r"(parity & 1)
                     : "memory");
    while (!done);
}

KVQ_DEVICE void copy_bulk(smem to, const void *from, uint32_t bytes, smem barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
#else
// Before 9.0 there are none; code that uses them must not be reached.
enum : bool { HAS_BULK = false };

KVQ_DEVICE void barrier_init(smem, uint32_t)
{
    __trap();
}

KVQ_DEVICE void barrier_fence()
{
    __trap();
}

KVQ_DEVICE void barrier_arrive(smem)
{
    __trap();
}

KVQ_DEVICE void barrier_expect(smem, uint32_t)
{
    __trap();
}

KVQ_DEVICE void barrier_wait(smem, uint32_t)
{
    __trap();
}

KVQ_DEVICE void copy_bulk(smem, const void *, uint32_t, smem)
{
    __trap();
}
#endif

KVQ_DEVICE void warp_sync()
{
    __syncwarp();
}

KVQ_DEVICE void block_sync()
{
    __syncthreads();
}

KVQ_DEVICE void warps_sync(int number, int first, int count)
{
    (void)first;
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(count * WARP) : "memory");
}

KVQ_DEVICE void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, const float c[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

KVQ_DEVICE void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1,
                         const float c[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

KVQ_DEVICE uint32_t transpose(uint32_t x)
{
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

KVQ_DEVICE float shuffle_xor(float x, int mask)
{
    return __shfl_xor_sync(~0u, x, mask);
}

KVQ_DEVICE float shuffle(float x, int from)
{
    return __shfl_sync(~0u, x, from);
}

KVQ_DEVICE uint32_t shuffle_bits(uint32_t x, int from)
{
    return __shfl_sync(~0u, x, from);
}

KVQ_DEVICE uint32_t ballot(bool x)
{
    return __ballot_sync(~0u, x);
}

KVQ_DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t picks)
{
    return __byte_perm(a, b, picks);
}

KVQ_DEVICE int popcount(uint32_t x)
{
    return __popc(x);
}

KVQ_DEVICE uint32_t shuffle_xor_bits(uint32_t x, int mask)
{
    return __shfl_xor_sync(~0u, x, mask);
}

// ---- Device memory ----

KVQ_DEVICE uint16_t ldg16(const void *at)
{
    return *(const uint16_t *)at;
}

KVQ_DEVICE uint32_t ldg32(const void *at)
{
    return *(const uint32_t *)at;
}

KVQ_DEVICE u32x2 ldg64(const void *at)
{
    const uint2 x = *(const uint2 *)at;
    const u32x2 r = {{x.x, x.y}};
    return r;
}

KVQ_DEVICE u32x4 ldg128(const void *at)
{
    const uint4 x = *(const uint4 *)at;
    const u32x4 r = {{x.x, x.y, x.z, x.w}};
    return r;
}

KVQ_DEVICE void stg16(void *at, uint16_t x)
{
    *(uint16_t *)at = x;
}

KVQ_DEVICE void stg32(void *at, uint32_t x)
{
    *(uint32_t *)at = x;
}

KVQ_DEVICE void stg64(void *at, const u32x2 &x)
{
    *(uint2 *)at = make_uint2(x.v[0], x.v[1]);
}

KVQ_DEVICE void stg128(void *at, const u32x4 &x)
{
    *(uint4 *)at = make_uint4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

KVQ_DEVICE void prefetch(const void *at)
{
    asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
}

KVQ_DEVICE uint32_t fetch_count(uint32_t *at, uint32_t x)
{
    uint32_t r;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(r)
                 : "l"(at), "r"(x)
                 : "memory");
    return r;
}

KVQ_DEVICE uint32_t fetch_add(uint32_t *at, uint32_t x)
{
    uint32_t r;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(r)
                 : "l"(at), "r"(x)
                 : "memory");
    return r;
}

KVQ_DEVICE uint32_t fetch_max(uint32_t *at, uint32_t x)
{
    uint32_t r;
    asm volatile("atom.relaxed.gpu.global.max.u32 %0, [%1], %2;"
                 : "=r"(r)
                 : "l"(at), "r"(x)
                 : "memory");
    return r;
}

KVQ_DEVICE uint32_t load_acquire(const uint32_t *at)
{
    uint32_t r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
    return r;
}

KVQ_DEVICE void store_release(uint32_t *at, uint32_t x)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

KVQ_DEVICE bool any(bool x)
{
    return __any_sync(~0u, x);
}

KVQ_DEVICE bool all(bool x)
{
    return __all_sync(~0u, x);
}

KVQ_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

KVQ_DEVICE uint32_t mul2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

KVQ_DEVICE uint32_t pack2(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

KVQ_DEVICE uint32_t pack2_bf16(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

KVQ_DEVICE float low(uint32_t x)
{
    float r;
    asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(x));
    return r;
}

KVQ_DEVICE float high(uint32_t x)
{
    float r;
    asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(x));
    return r;
}

KVQ_DEVICE float power2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

KVQ_DEVICE float reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

KVQ_DEVICE float as_float(uint32_t x)
{
    return __uint_as_float(x);
}

KVQ_DEVICE uint32_t as_bits(float x)
{
    return __float_as_uint(x);
}
} // namespace gpu

#endif
