// SPDX-License-Identifier: Apache-2.0
//
// The emulator of kernels/emu refuses what emu.h says it refuses, each time with the lines
// concerned, whatever the seed; and lets pass what is right. What its words compute is in
// test_gpu_words.cpp.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <set>
#include <string>
#include <vector>

#include "kernels/emu/driver.h"

extern "C" {
#include <cmocka.h>
}

using gpu::smem;
using std::vector;

enum { SEEDS = 20, SHARED = 4096, THREADS = 64 };

// Device memory of a kernel: 1024 words of which 256 were given values, and as many to write.
struct memory {
    const uint32_t *in;
    uint32_t *out;
};

typedef void (*kernel)(const memory &);

static kernel running;

static void run(const void *args)
{
    running(*(const memory *)args);
}

static const kvq_emu_kernel entry = {"kernel", run, sizeof(memory)};

struct device {
    const kvq_gpu_driver *driver;
    kvq_gpu_function *function;
    memory m;
    device()
    {
        kvq_gpu_ptr in = 0, out = 0;
        driver = kvq_emu_driver_with(&entry, 1);
        assert_int_equal(driver->module_function(&function, NULL, "kernel"), 0);
        assert_int_equal(driver->memory_alloc(&in, 4096), 0);
        assert_int_equal(driver->memory_alloc(&out, 4096), 0);
        for (uint32_t i = 0; i < 256; i++)
            assert_int_equal(driver->fill32(in + 4 * i, 100 + i, 1, NULL), 0);
        m.in = (const uint32_t *)in;
        m.out = (uint32_t *)out;
    }
    ~device()
    {
        driver->memory_free((kvq_gpu_ptr)m.in);
        driver->memory_free((kvq_gpu_ptr)m.out);
        kvq_emu_set(NULL);
    }
    int launch(kernel k, uint64_t seed, unsigned blocks)
    {
        kvq_emu_options options = {};
        options.seed = seed;
        kvq_emu_set(&options);
        running = k;
        size_t bytes = sizeof(m);
        void *extra[] = {(void *)1, &m, (void *)2, &bytes, NULL};
        return driver->launch(function, blocks, 1, 1, THREADS, 1, 1, SHARED, NULL, NULL, extra);
    }
};

static void refused(kernel k, const char *what, unsigned blocks = 1)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        device d;
        const int result = d.launch(k, seed, blocks);
        const char *text = gpu::emu_last_report()->text;
        if (result != KVQ_GPU_LAUNCH_FAILED || !strstr(text, what) ||
            !strstr(text, "test_gpu_emu.cpp:"))
            fail_msg("seed %u: wanted \"%s\" and a line, got %d: %s", (unsigned)seed, what, result,
                     text);
    }
}

// Runs with every seed; out[0] to out[n - 1] must be `want` each time.
static void passes(kernel k, const vector<uint32_t> &want, unsigned blocks = 1)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        device d;
        if (d.launch(k, seed, blocks) != KVQ_GPU_OK)
            fail_msg("seed %u: %s", (unsigned)seed, gpu::emu_last_report()->text);
        assert_memory_equal(d.m.out, want.data(), want.size() * sizeof(want[0]));
    }
}

static vector<uint32_t> counting(uint32_t from, uint32_t n)
{
    vector<uint32_t> v(n);
    for (uint32_t i = 0; i < n; i++)
        v[i] = from + i;
    return v;
}

// ---- Collectives ----

static void lane_leaves(const memory &)
{
    if (gpu::lane() != 3)
        gpu::any(true);
}

static void warp_leaves(const memory &)
{
    if (gpu::warp() == 0)
        gpu::block_sync();
}

static void lanes_part(const memory &)
{
    if (gpu::lane() < 16)
        gpu::any(true);
    else
        gpu::shuffle(1, 0);
}

static void lanes_part_in_line(const memory &)
{
    if (gpu::lane() < 16)
        gpu::warp_sync();
    else
        gpu::warp_sync();
}

static void stranger_syncs(const memory &)
{
    gpu::warps_sync(1, 0, 1);
}

static void test_collectives(void **)
{
    refused(lane_leaves, "deadlock");
    refused(warp_leaves, "deadlock");
    refused(lanes_part, "divergent collective");
    refused(lanes_part_in_line, "divergent collective");
    refused(stranger_syncs, "only those warps may call");
}

// ---- Shared memory ----

static void reads_unwritten(const memory &)
{
    gpu::lds32(4 * gpu::lane());
}

static void reads_outside(const memory &)
{
    gpu::lds128(SHARED);
}

static void writes_outside(const memory &)
{
    gpu::sts32(SHARED, 1);
}

static void reads_askew(const memory &)
{
    gpu::sts128(0, gpu::u32x4());
    gpu::lds64(4);
}

static void reads_neighbour(const memory &)
{
    gpu::sts32(4 * gpu::thread(), 1);
    gpu::block_sync();
    gpu::sts32(4 * gpu::thread(), 2);
    gpu::lds32(4 * (gpu::thread() ^ 1));
}

static void both_write(const memory &)
{
    gpu::sts32(4 * (gpu::thread() / 2), 1);
}

// Votes order nothing.
static void overwrites_read(const memory &)
{
    gpu::sts32(4 * gpu::thread(), 1);
    gpu::warp_sync();
    gpu::lds32(4 * (gpu::thread() ^ 1));
    gpu::lds32(4 * gpu::thread());
    gpu::any(true);
    gpu::sts32(4 * gpu::thread(), 2);
}

// All lanes read one word; lane 0 has not seen them do it. The writer's own read comes last.
static void overwrites_read_by_many(const memory &)
{
    if (gpu::thread() == 0)
        gpu::sts32(0, 1);
    gpu::block_sync();
    if (gpu::warp() == 0) {
        gpu::lds32(0);
        gpu::any(true);
        if (gpu::lane() == 0) {
            gpu::lds32(0);
            gpu::sts32(0, 2);
        }
    }
}

static void reads_other_warp(const memory &)
{
    gpu::sts32(4 * gpu::thread(), 1);
    gpu::block_sync();
    gpu::sts32(4 * gpu::thread(), 2);
    gpu::warp_sync();
    gpu::lds32(4 * (gpu::thread() ^ 32));
}

// Within a warp a warp_sync is enough, and it is again for writing over what was read.
static void syncs_warps(const memory &m)
{
    const uint32_t t = (uint32_t)gpu::thread();
    gpu::sts32(4 * t, t);
    gpu::warp_sync();
    const uint32_t other = gpu::lds32(4 * (t ^ 9));
    gpu::warp_sync();
    gpu::sts32(4 * t, other);
    gpu::warp_sync();
    gpu::stg32(m.out + t, gpu::lds32(4 * (t ^ 9)));
}

static void test_shared(void **)
{
    passes(syncs_warps, counting(0, 64));
    refused(reads_unwritten, "nothing wrote");
    refused(reads_outside, "the block has 4096");
    refused(writes_outside, "the block has 4096");
    refused(reads_askew, "multiple of 8");
    refused(reads_neighbour, "race on shared byte");
    refused(both_write, "race on shared byte");
    refused(overwrites_read, "race on shared byte");
    refused(overwrites_read_by_many, "race on shared byte");
    refused(reads_other_warp, "race on shared byte");
}

// ---- Copies of 16 bytes ----

static void waits_too_short(const memory &m)
{
    gpu::copy16(16 * gpu::thread(), m.in + 4 * gpu::lane(), true);
    gpu::copy_commit();
    gpu::copy_wait<1>();
    gpu::lds128(16 * gpu::thread());
}

static void waits_alone(const memory &m)
{
    gpu::copy16(16 * gpu::thread(), m.in + 4 * gpu::lane(), true);
    gpu::copy_commit();
    gpu::copy_wait<0>();
    gpu::any(true);
    gpu::lds32(16 * (gpu::thread() ^ 1));
}

static void copies_over_read(const memory &m)
{
    gpu::sts128(16 * gpu::thread(), gpu::u32x4());
    gpu::warp_sync();
    gpu::lds32(16 * (gpu::thread() ^ 1));
    gpu::any(true);
    gpu::copy16(16 * gpu::thread(), m.in, true);
}

static void copies_askew(const memory &m)
{
    gpu::copy16(16 * gpu::thread(), m.in + 1, true);
}

static void copies_from_outside(const memory &m)
{
    gpu::copy16(16 * gpu::thread(), m.in + 1024, true);
}

static void copies_rightly(const memory &m)
{
    gpu::copy16(16 * gpu::thread(), m.in + 4 * gpu::thread(), true);
    gpu::copy_commit();
    gpu::copy_wait<0>();
    gpu::block_sync();
    const int other = THREADS - 1 - gpu::thread();
    gpu::stg128(m.out + 4 * other, gpu::lds128(16 * other));
}

static void test_copies(void **)
{
    refused(waits_too_short, "under way");
    refused(waits_alone, "race on shared byte");
    refused(copies_over_read, "race on shared byte");
    refused(copies_askew, "multiple of 16");
    refused(copies_from_outside, "no piece of device memory");
    passes(copies_rightly, counting(100, 256));
}

// ---- Barriers and bulk copies ----

enum { FULL = 0, EMPTY = 16, STAGE = 64, STAGE_BYTES = 256, STAGES = 2 };

// Thread 0 makes full and empty barriers of two stages, the latter for 32 threads.
static void make_barriers(bool fence)
{
    if (gpu::thread() == 0) {
        for (int i = 0; i < STAGES; i++) {
            gpu::barrier_init(FULL + 8 * i, 1);
            gpu::barrier_init(EMPTY + 8 * i, gpu::WARP);
        }
        if (fence)
            gpu::barrier_fence();
    }
}

static void fill_stage(const memory &m, int stage, int piece)
{
    gpu::barrier_expect(FULL + 8 * stage, STAGE_BYTES);
    gpu::copy_bulk(STAGE + STAGE_BYTES * stage, m.in + STAGE_BYTES / 4 * piece, STAGE_BYTES,
                   FULL + 8 * stage);
}

// Warp 0 brings four pieces through two stages, warp 1 adds one to each word and writes them.
template <bool WAIT_FULL, bool WAIT_EMPTY, bool ARRIVE_ALL> static void pipeline(const memory &m)
{
    make_barriers(true);
    gpu::block_sync();
    for (int i = 0; i < 4; i++) {
        const int stage = i % STAGES, round = i / STAGES;
        const smem from = STAGE + STAGE_BYTES * stage;
        if (gpu::warp() == 0 && gpu::lane() == 0) {
            if (round > 0 && WAIT_EMPTY)
                gpu::barrier_wait(EMPTY + 8 * stage, (uint32_t)round - 1);
            fill_stage(m, stage, i);
            if (!WAIT_EMPTY)
                gpu::barrier_wait(FULL + 8 * stage, (uint32_t)round);
        }
        if (gpu::warp() == 1) {
            if (WAIT_FULL)
                gpu::barrier_wait(FULL + 8 * stage, (uint32_t)round);
            gpu::u32x2 x = gpu::lds64(from + 8 * gpu::lane());
            x.v[0]++;
            x.v[1]++;
            gpu::stg64(m.out + STAGE_BYTES / 4 * i + 2 * gpu::lane(), x);
            if (ARRIVE_ALL || gpu::lane() != 7)
                gpu::barrier_arrive(EMPTY + 8 * stage);
        }
    }
}

static void no_barrier(const memory &)
{
    gpu::barrier_wait(FULL, 0);
}

static void no_fence(const memory &m)
{
    make_barriers(false);
    gpu::block_sync();
    if (gpu::thread() == 0)
        fill_stage(m, 0, 0);
}

static void no_sync(const memory &)
{
    make_barriers(true);
    gpu::any(true);
    if (gpu::thread() == 1)
        gpu::barrier_wait(FULL, 1);
}

static void nobody_arrives(const memory &)
{
    gpu::barrier_init(8 * gpu::thread(), 0);
}

static void bytes_missing(const memory &m)
{
    make_barriers(true);
    gpu::block_sync();
    if (gpu::thread() == 0) {
        gpu::barrier_expect(FULL, STAGE_BYTES + 16);
        gpu::copy_bulk(STAGE, m.in, STAGE_BYTES, FULL);
    }
    gpu::barrier_wait(FULL, 0);
}

static void overwrites_barrier(const memory &)
{
    make_barriers(true);
    gpu::block_sync();
    gpu::sts32(FULL + 4 * gpu::thread(), 0);
}

static void reads_barrier(const memory &)
{
    make_barriers(true);
    gpu::block_sync();
    gpu::lds32(FULL);
}

static void bulk_askew(const memory &m)
{
    make_barriers(true);
    if (gpu::thread() == 0)
        gpu::copy_bulk(STAGE, m.in, 24, FULL);
}

static void bulk_from_outside(const memory &m)
{
    make_barriers(true);
    if (gpu::thread() == 0)
        gpu::copy_bulk(STAGE, m.in + 1000, STAGE_BYTES, FULL);
}

static void bulk_to_outside(const memory &m)
{
    make_barriers(true);
    if (gpu::thread() == 0)
        gpu::copy_bulk(SHARED - 16, m.in, STAGE_BYTES, FULL);
}

static void leaves_early(const memory &m)
{
    make_barriers(true);
    if (gpu::thread() == 0)
        gpu::copy_bulk(STAGE, m.in, STAGE_BYTES, FULL);
}

static void test_barriers(void **)
{
    vector<uint32_t> want = counting(101, 256);
    passes((pipeline<true, true, true>), want);
    refused((pipeline<true, true, false>), "deadlock");
    refused(no_barrier, "no barrier was made there");
    refused(no_fence, "without a barrier_fence");
    refused(no_sync, "without a sync after the barrier was made");
    refused(nobody_arrives, "nobody would arrive");
    refused(bytes_missing, "deadlock");
    refused(overwrites_barrier, "where a barrier stands");
    refused(reads_barrier, "where a barrier stands");
    refused(bulk_askew, "multiples of 16");
    refused(bulk_from_outside, "no piece of device memory");
    refused(bulk_to_outside, "the block has 4096");
}

// How launches with many seeds are refused: as many of the ways as occur.
static size_t count_ways(kernel k, const vector<const char *> &ways)
{
    std::set<std::string> seen;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        device d;
        assert_int_equal(d.launch(k, seed, 1), KVQ_GPU_LAUNCH_FAILED);
        for (const char *way : ways)
            if (strstr(gpu::emu_last_report()->text, way))
                seen.insert(way);
    }
    return seen.size();
}

// What is read without waiting may not be there, may be on its way or may have landed unseen. What
// is filled again without waiting may still be read.
static void test_impatience(void **)
{
    assert_int_equal(count_ways(pipeline<false, true, true>,
                                {"nothing wrote", "under way", "race on shared byte"}),
                     3);
    assert_int_equal(count_ways(pipeline<true, false, true>, {"race on shared byte"}), 1);
}

// A block must not end before its copies have landed; they land late, so this is seen.
static void test_leaving_early(void **)
{
    int seen = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        device d;
        const int result = d.launch(leaves_early, seed, 1);
        seen += result == KVQ_GPU_LAUNCH_FAILED &&
                strstr(gpu::emu_last_report()->text, "ended while the copy started at");
    }
    assert_true(seen > SEEDS / 2);
}

// ---- Device memory ----

static void loads_outside(const memory &m)
{
    gpu::ldg32(m.in + 1024);
}

static void loads_over_the_end(const memory &m)
{
    gpu::ldg128(m.in + 1021 + 3);
}

static void stores_outside(const memory &m)
{
    gpu::stg32(m.out - 1, 0);
}

static void loads_askew(const memory &m)
{
    gpu::ldg64(m.in + 1);
}

static void neighbours_race(const memory &m)
{
    gpu::stg32(m.out + gpu::thread(), 1);
    gpu::ldg32(m.out + (gpu::thread() ^ 1));
}

static void neighbours_sync(const memory &m)
{
    gpu::stg32(m.out + 64 + gpu::thread(), (uint32_t)gpu::thread());
    gpu::block_sync();
    gpu::stg32(m.out + gpu::thread(), gpu::ldg32(m.out + 64 + (gpu::thread() ^ 33)) ^ 33);
}

static void blocks_write_one(const memory &m)
{
    if (gpu::thread() == 0)
        gpu::stg32(m.out, 1);
}

// Each block writes its words; the last to arrive adds them up. Wrong ways: the counter orders
// nothing, is counted before the block has synced, or what it says is not handed on.
enum way { RIGHT, RELAXED, EARLY, ALONE };

template <way WAY> static void last_arriver(const memory &m)
{
    const uint32_t last = (uint32_t)gpu::grid_x() - 1;
    uint32_t *counter = m.out + 512, *own = m.out + 64 + gpu::block_x() * THREADS;
    uint32_t before = 0;
    if (gpu::block_x() == 0 && gpu::thread() == 0)
        gpu::stg32(m.out + 513, 1);
    gpu::stg32(own + gpu::thread(), 1);
    if (WAY != EARLY)
        gpu::block_sync();
    if (gpu::thread() == 0) {
        before = WAY == RELAXED ? gpu::fetch_add(counter, 1) : gpu::fetch_count(counter, 1);
        gpu::sts32(0, before);
    }
    if (WAY == ALONE) {
        if (gpu::thread() == 0 && before != last)
            return;
    } else {
        gpu::block_sync();
        before = gpu::lds32(0);
    }
    if (before != last)
        return;
    uint32_t sum = 0;
    for (uint32_t b = 0; b <= last; b++)
        sum += gpu::ldg32(m.out + 64 + b * THREADS + gpu::thread());
    gpu::stg32(m.out + gpu::thread(), sum);
    if (gpu::thread() == 0)
        gpu::stg32(counter, 0);
}

template <way WAY> static void arrive_from_zero(const memory &m)
{
    last_arriver<WAY>(m);
}

static void refused_arrival(kernel k)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        device d;
        d.m.out[512] = 0;
        assert_int_equal(d.launch(k, seed, 5), KVQ_GPU_LAUNCH_FAILED);
        const char *text = gpu::emu_last_report()->text;
        if (!strstr(text, "race on device memory") || !strstr(text, "test_gpu_emu.cpp:"))
            fail_msg("seed %u: %s", (unsigned)seed, text);
    }
}

static void test_device_memory(void **)
{
    refused(loads_outside, "no piece of device memory");
    refused(loads_over_the_end, "no piece of device memory");
    refused(stores_outside, "no piece of device memory");
    refused(loads_askew, "multiple of 8");
    refused(neighbours_race, "race on device memory");
    refused(blocks_write_one, "race on device memory", 2);
    passes(blocks_write_one, {1});
    passes(neighbours_sync, counting(0, 64));
}

static void test_last_arriver(void **)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        device d;
        d.m.out[512] = 0;
        for (int again = 0; again < 2; again++) {
            if (d.launch(last_arriver<RIGHT>, seed, 5) != KVQ_GPU_OK)
                fail_msg("%s", gpu::emu_last_report()->text);
            for (int i = 0; i < THREADS; i++)
                assert_int_equal(d.m.out[i], 5);
            assert_int_equal(d.m.out[512], 0); // ready for the next launch
        }
    }
    refused_arrival(last_arriver<RELAXED>);
    refused_arrival(last_arriver<EARLY>);
}

// ---- Orders ----

// The turn at which each lane, and each block, arrives.
static void notes_order(const memory &m)
{
    gpu::any(true);
    const uint32_t turn = gpu::fetch_add(m.out + 512, 1);
    if (turn < 512)
        gpu::stg32(m.out + turn, (uint32_t)(gpu::block_x() * THREADS + gpu::thread()));
}

static void test_seeds(void **)
{
    std::set<vector<uint32_t>> lanes, blocks;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        vector<uint32_t> order[2], first;
        for (int again = 0; again < 2; again++) {
            device d;
            d.m.out[512] = 0;
            assert_int_equal(d.launch(notes_order, seed, 8), KVQ_GPU_OK);
            order[again].assign(d.m.out, d.m.out + 512);
        }
        assert_true(order[0] == order[1]); // the seed says it all
        for (uint32_t i = 0; i < 512; i += THREADS)
            first.push_back(order[0][i] / THREADS);
        lanes.insert(order[0]);
        blocks.insert(first);
        const std::set<uint32_t> all(order[0].begin(), order[0].end());
        assert_int_equal(all.size(), 512);
    }
    assert_true(lanes.size() == SEEDS && blocks.size() > SEEDS / 2);
}

// New memory holds NaN, of any size.
static void test_poison(void **)
{
    device d;
    for (int i = 0; i < 1024; i++)
        assert_int_equal(d.m.out[i], 0xffffffffu);
}

// ---- Bank conflicts ----

template <int STRIDE> static void loads_apart(const memory &)
{
    gpu::sts32(STRIDE * gpu::lane() + 2048 * gpu::warp(), 1);
    gpu::lds32(STRIDE * gpu::lane() + 2048 * gpu::warp());
}

static void loads_one_word(const memory &)
{
    if (gpu::thread() == 0)
        gpu::sts32(0, 1);
    gpu::block_sync();
    gpu::lds32(0);
}

template <int STRIDE> static void loads_wide(const memory &)
{
    if (gpu::warp() == 0) {
        gpu::sts128(STRIDE * gpu::lane(), gpu::u32x4());
        gpu::lds128(STRIDE * gpu::lane());
        gpu::lds64(STRIDE * gpu::lane());
    }
}

static void loads_by_some(const memory &)
{
    gpu::sts32(4 * gpu::thread(), 1);
    if (gpu::lane() < 5)
        gpu::lds32(4 * gpu::thread());
    gpu::warp_sync();
    if (gpu::lane() < 7)
        gpu::lds32(4 * gpu::thread());
}

static gpu::emu_report report_of(kernel k)
{
    device d;
    if (d.launch(k, 3, 1) != KVQ_GPU_OK)
        fail_msg("%s", gpu::emu_last_report()->text);
    return *gpu::emu_last_report();
}

static void check_passes(kernel k, uint64_t loads, uint64_t least, uint64_t want)
{
    const gpu::emu_report r = report_of(k);
    assert_int_equal(r.loads, loads);
    assert_int_equal(r.least, least);
    assert_int_equal(r.passes, want);
    assert_int_equal(r.conflict[0] != 0, want != least);
}

static void test_bank_conflicts(void **)
{
    check_passes(loads_apart<4>, 2, 2, 2);
    check_passes(loads_apart<8>, 2, 2, 4);
    check_passes(loads_apart<64>, 2, 2, 32);
    check_passes(loads_one_word, 2, 2, 2);
    check_passes(loads_wide<16>, 2, 6, 8); // two halves of 8 bytes in 16 meet twice
    check_passes(loads_wide<32>, 2, 6, 16);
    check_passes(loads_wide<128>, 2, 6, 4 * 8 + 2 * 16);
    assert_non_null(strstr(report_of(loads_apart<64>).conflict, "16 passes instead of 1"));
    const gpu::emu_report some = report_of(loads_by_some);
    assert_int_equal(some.uneven, 4);
    assert_int_equal(some.passes, 4);
    assert_int_equal(report_of(loads_one_word).uneven, 0);
}

int main(void)
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives),    cmocka_unit_test(test_shared),
        cmocka_unit_test(test_copies),         cmocka_unit_test(test_barriers),
        cmocka_unit_test(test_impatience),     cmocka_unit_test(test_leaving_early),
        cmocka_unit_test(test_device_memory),  cmocka_unit_test(test_last_arriver),
        cmocka_unit_test(test_seeds),          cmocka_unit_test(test_poison),
        cmocka_unit_test(test_bank_conflicts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
