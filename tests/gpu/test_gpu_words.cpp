// SPDX-License-Identifier: Apache-2.0
//
// What the words of the GPU dialect compute in the emulator, against formulas written from the
// PTX manual's fragment layouts: matrices, transposes, shuffles, votes, counters, 16-bit numbers.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <random>
#include <vector>

#include "kernels/emu/emu.h"

extern "C" {
#include <cmocka.h>
}

using std::vector;

enum { LANES = 32 };

// Words of each lane in and out.
struct lanes {
    const uint32_t *in; // [32][16]
    uint32_t *out;      // [32][8]
};

typedef vector<uint32_t> words;

static words run(void (*kernel)(const lanes &), const words &in, bool truncate = false)
{
    words out(LANES * 8, 0xdeadbeef);
    const lanes l = {in.data(), out.data()};
    gpu::emu_report report;
    const gpu::emu_shape shape = {1, 1, LANES, 2048, 5, truncate};
    if (gpu::launch(kernel, l, shape, &report) != 0)
        fail_msg("%s", report.text);
    return out;
}

static words random_words(uint32_t seed)
{
    std::mt19937 random(seed);
    words w(LANES * 16);
    for (uint32_t &x : w)
        x = (uint32_t)random();
    return w;
}

static const uint32_t *own_in(const lanes &l)
{
    return l.in + 16 * gpu::lane();
}

static uint32_t *own_out(const lanes &l)
{
    return l.out + 8 * gpu::lane();
}

// ---- mma ----

static void mma_kernel(const lanes &l)
{
    const uint32_t *in = own_in(l);
    float c[4], d[4];
    for (int i = 0; i < 4; i++)
        c[i] = gpu::as_float(in[6 + i]);
    gpu::mma(d, in, in[4], in[5], c);
    for (int i = 0; i < 4; i++)
        own_out(l)[i] = gpu::as_bits(d[i]);
}

static void mma_bf16_kernel(const lanes &l)
{
    const uint32_t *in = own_in(l);
    float c[4], d[4];
    for (int i = 0; i < 4; i++)
        c[i] = gpu::as_float(in[6 + i]);
    gpu::mma_bf16(d, in, in[4], in[5], c);
    for (int i = 0; i < 4; i++)
        own_out(l)[i] = gpu::as_bits(d[i]);
}

typedef double matrix[16][16];

static void put16(words &w, int lane, int word, int half, uint32_t bits)
{
    w[16 * lane + word] |= bits << 16 * half;
}

// Matrices a (16x16), b (16x8) and c (16x8) to the words of lanes, as the manual draws them.
static words fragments(const matrix a, const matrix b, const matrix c, uint32_t (*round)(double))
{
    words w(LANES * 16, 0);
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            put16(w, row % 8 * 4 + k % 8 / 2, row / 8 + 2 * (k / 8), k % 2, round(a[row][k]));
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < 8; n++)
            put16(w, n * 4 + k % 8 / 2, 4 + k / 8, k % 2, round(b[k][n]));
    for (int row = 0; row < 16; row++)
        for (int n = 0; n < 8; n++)
            w[16 * (row % 8 * 4 + n / 2) + 6 + n % 2 + 2 * (row / 8)] =
                gpu::as_bits((float)c[row][n]);
    return w;
}

static uint32_t as_half(double x)
{
    return gpu::float_to_half((float)x);
}

static uint32_t as_bf16(double x)
{
    return gpu::as_bits((float)x) >> 16;
}

// Small integers times powers of two, exact in fp16, bf16 and any order of sums; some subnormal.
static void check_mma(void (*kernel)(const lanes &), uint32_t (*round)(double), int lowest)
{
    std::mt19937 random(3);
    matrix a, b, c;
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 16; j++) {
            a[i][j] = ldexp((double)(random() % 15) - 7, lowest);
            b[i][j] = (double)(random() % 15) - 7;
            c[i][j] = ldexp((double)(random() % 1001) - 500, lowest);
        }
    }
    const words in = fragments(a, b, c, round);
    for (const bool truncate : {false, true}) {
        const words out = run(kernel, in, truncate);
        for (int row = 0; row < 16; row++) {
            for (int n = 0; n < 8; n++) {
                double want = c[row][n];
                for (int k = 0; k < 16; k++)
                    want += a[row][k] * b[k][n];
                const int lane = row % 8 * 4 + n / 2;
                const float got = gpu::as_float(out[8 * lane + n % 2 + 2 * (row / 8)]);
                if (got != (float)want)
                    fail_msg("row %d, column %d: %g, not %g", row, n, (double)got, want);
            }
        }
    }
}

static void test_mma(void **)
{
    check_mma(mma_kernel, as_half, 0);
    check_mma(mma_kernel, as_half, -24); // fp16 subnormals count in full
    check_mma(mma_bf16_kernel, as_bf16, 0);
    check_mma(mma_bf16_kernel, as_bf16, -60);
}

// 1 and sixteen times 2^-25: exactly 1 + 2^-21, of which cutting to 24 bits leaves nothing.
static void test_rounding_of_sums(void **)
{
    matrix a, b, c;
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 16; j++) {
            a[i][j] = ldexp(1, -12);
            b[i][j] = ldexp(1, -13);
            c[i][j] = 1;
        }
    }
    const words in = fragments(a, b, c, as_half);
    assert_true(gpu::as_float(run(mma_kernel, in, false)[0]) == 1 + 0x1p-21f);
    assert_true(gpu::as_float(run(mma_kernel, in, true)[0]) == 1);
}

// ---- Matrices of 8 by 8 ----

static void ldmatrix_kernel(const lanes &l)
{
    const uint32_t *in = own_in(l);
    const int row = gpu::lane() ^ 5; // rows lie in another order than matrices want them
    const gpu::u32x4 x = {{in[0], in[1], in[2], in[3]}};
    gpu::sts128(32 * row, x);
    gpu::warp_sync();
    uint32_t r[4];
    gpu::ldmatrix(r, 32 * (gpu::lane() ^ 5));
    for (int i = 0; i < 4; i++)
        own_out(l)[i] = r[i];
    gpu::ldmatrix_trans(r, 32 * (gpu::lane() ^ 5));
    for (int i = 0; i < 4; i++)
        own_out(l)[4 + i] = r[i];
}

// Value `column` of the row that lane `lane` brought.
static uint32_t value(const words &in, int lane, int column)
{
    return in[16 * lane + column / 2] >> 16 * (column % 2) & 0xffff;
}

static void test_ldmatrix(void **)
{
    const words in = random_words(7), out = run(ldmatrix_kernel, in);
    for (int lane = 0; lane < LANES; lane++) {
        const int g = lane / 4, j = lane % 4;
        for (int i = 0; i < 4; i++) {
            const uint32_t as_is = value(in, 8 * i + g, 2 * j) | value(in, 8 * i + g, 2 * j + 1)
                                                                     << 16;
            const uint32_t trans = value(in, 8 * i + 2 * j, g) | value(in, 8 * i + 2 * j + 1, g)
                                                                     << 16;
            assert_int_equal(out[8 * lane + i], as_is);
            assert_int_equal(out[8 * lane + 4 + i], trans);
        }
    }
}

static void transpose_kernel(const lanes &l)
{
    own_out(l)[0] = gpu::transpose(own_in(l)[0]);
}

static void test_transpose(void **)
{
    const words in = random_words(9), out = run(transpose_kernel, in);
    for (int row = 0; row < 8; row++) {
        for (int column = 0; column < 8; column++) {
            const uint32_t before = in[16 * (row * 4 + column / 2)] >> 16 * (column % 2) & 0xffff;
            const uint32_t after = out[8 * (column * 4 + row / 2)] >> 16 * (row % 2) & 0xffff;
            assert_int_equal(before, after);
        }
    }
}

// ---- Shuffles, votes, counters ----

static void exchange_kernel(const lanes &l)
{
    const uint32_t x = own_in(l)[0];
    const int lane = gpu::lane();
    const float f = (float)(x % 1000);
    uint32_t *out = own_out(l);
    out[0] = gpu::shuffle_bits(x, 31 - lane);
    out[1] = gpu::shuffle_xor_bits(x, 6);
    out[2] = gpu::as_bits(gpu::shuffle(f, lane / 2));
    out[3] = gpu::as_bits(gpu::shuffle_xor(f, 17));
    out[4] = gpu::ballot(x & 1);
    out[5] = gpu::any(lane == 13) + 2 * gpu::any(lane > 31);
    out[6] = gpu::all(lane < 32) + 2 * gpu::all(lane != 13);
    out[7] = (uint32_t)gpu::popcount(x);
}

static void test_exchange(void **)
{
    const words in = random_words(11), out = run(exchange_kernel, in);
    uint32_t odd = 0;
    for (int lane = 0; lane < LANES; lane++)
        odd |= (in[16 * lane] & 1) << lane;
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t *o = &out[8 * lane];
        assert_int_equal(o[0], in[16 * (31 - lane)]);
        assert_int_equal(o[1], in[16 * (lane ^ 6)]);
        assert_true(gpu::as_float(o[2]) == (float)(in[16 * (lane / 2)] % 1000));
        assert_true(gpu::as_float(o[3]) == (float)(in[16 * (lane ^ 17)] % 1000));
        assert_int_equal(o[4], odd);
        assert_int_equal(o[5], 1);
        assert_int_equal(o[6], 1);
        int bits = 0;
        for (uint32_t x = in [16 * lane]; x; x >>= 1)
            bits += x & 1;
        assert_int_equal(o[7], bits);
    }
}

static void count_kernel(const lanes &l)
{
    uint32_t *out = l.out;
    gpu::fetch_add(out, (uint32_t)gpu::lane());
    gpu::fetch_max(out + 1, (uint32_t)(gpu::lane() * 7 % 32));
    gpu::fetch_count(out + 2, 3);
    if (gpu::lane() == 4)
        gpu::store_release(out + 3, 77);
    gpu::warp_sync();
    if (gpu::lane() == 5) {
        gpu::stg32(out + 4, gpu::load_acquire(out + 3));
        const gpu::u32x2 x = {{1, 2}};
        gpu::stg64(out + 6, x);
        gpu::stg16((char *)(out + 5) + 2, 0x1234);
        gpu::stg16(out + 5, gpu::ldg16((const char *)l.in + 2));
    }
}

static void test_counters(void **)
{
    words in(LANES * 16, 0xabcd0000), out(LANES * 8, 0);
    const lanes l = {in.data(), out.data()};
    gpu::emu_report report;
    const gpu::emu_shape shape = {1, 1, LANES, 0, 5, false};
    if (gpu::launch(count_kernel, l, shape, &report) != 0)
        fail_msg("%s", report.text);
    assert_int_equal(out[0], 31 * 32 / 2);
    assert_int_equal(out[1], 31);
    assert_int_equal(out[2], 96);
    assert_int_equal(out[4], 77);
    assert_int_equal(out[5], 0x1234abcd);
    assert_true(out[6] == 1 && out[7] == 2);
}

// ---- Numbers ----

// Every fp16 comes back, and halfway between neighbours goes to the even one.
static void test_half(void **)
{
    for (uint32_t x = 0; x < 0x7c00; x++) {
        const float here = gpu::half_to_float((uint16_t)x);
        assert_true(here == (float)ldexp((x & 0x3ff) + (x >= 0x400 ? 0x400 : 0),
                                         (int)(x >= 0x400 ? x >> 10 : 1) - 25));
        assert_int_equal(gpu::float_to_half(here), x);
        assert_int_equal(gpu::float_to_half(-here), x | 0x8000);
        if (x + 1 < 0x7c00) {
            const float next = gpu::half_to_float((uint16_t)(x + 1)), middle = (here + next) / 2;
            assert_int_equal(gpu::float_to_half(middle), x & 1 ? x + 1 : x);
            assert_int_equal(gpu::float_to_half(nextafterf(middle, 0)), x);
            assert_int_equal(gpu::float_to_half(nextafterf(middle, 1e6f)), x + 1);
        }
    }
    assert_int_equal(gpu::float_to_half(65519.996f), 0x7bff);
    assert_int_equal(gpu::float_to_half(65520), 0x7c00);
    assert_true(isinf(gpu::half_to_float(0x7c00)) && gpu::half_to_float(0xfc00) < 0);
    assert_true(isnan(gpu::half_to_float(gpu::float_to_half(NAN))));
}

static void test_bf16(void **)
{
    for (uint32_t x = 0; x < 0x7f80; x++) {
        const float here = gpu::low_bf16(x);
        assert_int_equal(gpu::pack2_bf16(here, -here), x | (x | 0x8000) << 16);
        if (x + 1 < 0x7f80) {
            const float middle = gpu::as_float(x << 16 | 0x8000);
            assert_int_equal(gpu::pack2_bf16(middle, 0), x & 1 ? x + 1 : x);
            assert_int_equal(gpu::pack2_bf16(nextafterf(middle, 0), 0), x);
            assert_int_equal(gpu::pack2_bf16(nextafterf(middle, INFINITY), 0), x + 1);
        }
    }
    assert_true(isnan(gpu::high_bf16(gpu::pack2_bf16(0, NAN))));
}

static void test_pairs(void **)
{
    const uint32_t x = gpu::pack2(1.5f, -0x1p-24f), y = gpu::pack2(3, 0.75f);
    assert_true(gpu::low(x) == 1.5f && gpu::high(x) == -0x1p-24f);
    assert_int_equal(gpu::mul2(x, y), gpu::pack2(4.5f, -0x1p-24f));
    assert_true(gpu::power2(3) == 8 && gpu::power2(-127) == 0 && gpu::power2(-126) == 0x1p-126f);
    assert_true(gpu::reciprocal(4) == 0.25f && gpu::reciprocal(0x1.8p126f) == 0);
}

static void test_permute(void **)
{
    const uint32_t a = 0x33221100, b = 0x77665544;
    assert_int_equal(gpu::permute(a, b, 0x3210), a);
    assert_int_equal(gpu::permute(a, b, 0x7654), b);
    assert_int_equal(gpu::permute(a, b, 0x0527), 0x00552277);
}

int main(void)
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(test_mma),      cmocka_unit_test(test_rounding_of_sums),
        cmocka_unit_test(test_ldmatrix), cmocka_unit_test(test_transpose),
        cmocka_unit_test(test_exchange), cmocka_unit_test(test_counters),
        cmocka_unit_test(test_half),     cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_pairs),    cmocka_unit_test(test_permute),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
