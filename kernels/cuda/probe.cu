// SPDX-License-Identifier: Apache-2.0
//
// The kernels of probe.h.
#include "kernels/cuda/probe.h"

#include "kernels/emu/dialect.h"

KVQ_KERNEL(kvq_gpu_probe_mma, kvq_gpu_probe_mma_args, p)
{
    const int lane = gpu::lane();
    float d[4];
    gpu::mma(d, p.a + 4 * lane, p.b[2 * lane], p.b[2 * lane + 1], p.c + 4 * lane);
    for (int i = 0; i < 4; i++)
        p.d[4 * lane + i] = d[i];
}

// ---- Reading ----

// Starts the copy of a record into a stage, if there is one left.
KVQ_DEVICE void probe_fetch(const kvq_gpu_probe_read_args &p, uint32_t record, int stage)
{
    const gpu::smem to = gpu::smem_start() + 64 + stage * p.record_bytes;
    const uint8_t *from = p.records + (size_t)record * p.record_bytes;
    const bool wanted = record < p.n_records;
    if (gpu::HAS_BULK) {
        const gpu::smem barrier = gpu::smem_start() + 8 * stage;
        if (gpu::lane() == 0 && wanted) {
            gpu::barrier_expect(barrier, p.record_bytes);
            gpu::copy_bulk(to, from, p.record_bytes, barrier);
        }
    } else {
        uint32_t at = 16 * gpu::lane();
        for (; at < p.record_bytes; at += 16 * gpu::WARP)
            gpu::copy16(to + at, from + at, wanted);
        gpu::copy_commit();
    }
}

KVQ_DEVICE void probe_wait(int stage, uint32_t parity)
{
    if (gpu::HAS_BULK)
        gpu::barrier_wait(gpu::smem_start() + 8 * stage, parity);
    else
        gpu::copy_wait<KVQ_GPU_PROBE_STAGES - 1>();
    gpu::warp_sync();
}

KVQ_KERNEL_FOR(kvq_gpu_probe_read, kvq_gpu_probe_read_args, p, 32, 1)
{
    uint32_t sum = 0, parity = 0;
    if (gpu::HAS_BULK && gpu::lane() == 0)
        for (int i = 0; i < KVQ_GPU_PROBE_STAGES; i++)
            gpu::barrier_init(gpu::smem_start() + 8 * i, 1);
    if (gpu::HAS_BULK)
        gpu::barrier_fence();
    gpu::warp_sync();
    uint32_t next = gpu::block_x();
    for (int i = 0; i < KVQ_GPU_PROBE_STAGES; i++, next += gpu::grid_x())
        probe_fetch(p, next, i);
    int stage = 0;
    for (uint32_t record = gpu::block_x(); record < p.n_records; record += gpu::grid_x()) {
        probe_wait(stage, parity);
        sum += gpu::lds32(gpu::smem_start() + 64 + stage * p.record_bytes + 4 * gpu::lane());
        gpu::warp_sync();
        probe_fetch(p, next, stage);
        next += gpu::grid_x();
        stage = (stage + 1) % KVQ_GPU_PROBE_STAGES;
        parity ^= stage == 0;
    }
    gpu::stg32(p.sums + (size_t)gpu::block_x() * gpu::WARP + gpu::lane(), sum);
}

// ---- Rates ----

KVQ_KERNEL(kvq_gpu_probe_mma_rate, kvq_gpu_probe_rate_args, p)
{
    const uint32_t x = p.seed * (uint32_t)(gpu::thread() + 1);
    const uint32_t a[4] = {x, x >> 3, x << 2, x ^ 0x3c003c00u};
    float d[KVQ_GPU_PROBE_CHAINS][4] = {};
    KVQ_NO_UNROLL
    for (uint32_t i = 0; i < p.rounds; i++) {
        KVQ_UNROLL
        for (int chain = 0; chain < KVQ_GPU_PROBE_CHAINS; chain++)
            gpu::mma(d[chain], a, x, x >> 1, d[chain]);
    }
    float sum = 0;
    for (int chain = 0; chain < KVQ_GPU_PROBE_CHAINS; chain++)
        sum += d[chain][0] + d[chain][1] + d[chain][2] + d[chain][3];
    gpu::stg32(p.sums + (size_t)gpu::block_x() * 128 + gpu::thread(), gpu::as_bits(sum));
}

// (x & y) ^ n is one LOP3; y, the neighbour, changes all the time, so nothing is folded.
KVQ_KERNEL(kvq_gpu_probe_logic_rate, kvq_gpu_probe_rate_args, p)
{
    uint32_t x[KVQ_GPU_PROBE_CHAINS];
    for (int chain = 0; chain < KVQ_GPU_PROBE_CHAINS; chain++)
        x[chain] = p.seed + (uint32_t)(gpu::thread() + chain);
    KVQ_UNROLL_BY(8)
    for (uint32_t i = 0; i < p.rounds; i++) {
        KVQ_UNROLL
        for (int chain = 0; chain < KVQ_GPU_PROBE_CHAINS; chain++)
            x[chain] = (x[chain] & x[(chain + 1) % KVQ_GPU_PROBE_CHAINS]) ^ p.seed;
    }
    uint32_t sum = 0;
    for (int chain = 0; chain < KVQ_GPU_PROBE_CHAINS; chain++)
        sum ^= x[chain];
    gpu::stg32(p.sums + (size_t)gpu::block_x() * 128 + gpu::thread(), sum);
}
