// SPDX-License-Identifier: Apache-2.0
//
// The block layout serves the GPU: the fast attention loop (kernels/cuda/attend_affine.h), a group
// at a time in the emulator. Proved for head_dim 64, 128, 256 and 2, 3, 4 bits:
//   - the kernel's offsets are those of kvq_layout_of;
//   - each (token, channel) of K and V arrives exactly once and with exactly its own code, and
//     each byte of the planes is read once (probes with one channel of Q or one token of P);
//   - no shared load of the loop meets a bank conflict.
// tests/gpu/test_gpu_attend.cpp proves the whole kernels.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <random>
#include <vector>

#include "kernels/cuda/attend_affine.h"
#include "kernels/emu/emu.h"

extern "C" {
#include <cmocka.h>

#include "kernels/kernels.h"
}

using std::vector;

struct probe {
    const uint8_t *group;
    const uint16_t *q; // [8][D]
    int tokens;        // V: head n has p = 1 at token `tokens` + n
    float *out;        // K: [32 tokens][8 heads]; V: [8 heads][D]
};

// One row for each head_dim and number of bits.
struct variant {
    int d, bits;
    uint32_t group_bytes;
    uint32_t stage; // where the group stands in shared memory
    uint32_t k_scales, k_zeros, k_norms, v_codes;
    uint32_t v_scales, v_zeros; // from V's codes on
    void (*probe_k)(const probe &);
    void (*probe_v)(const probe &);
};

// ---- The layout once more, cell by cell, from the words of kernels/layout.h ----

struct bits_at {
    uint32_t byte, bit; // of a 32-bit word in the planes
};

static bits_at k_place(int d, bool one_bit, int t, int channel)
{
    const uint32_t rows = (d > 128 ? 128 : d) / 16, slab = channel / 128;
    const uint32_t c = channel % 128, r = c / 16;
    if (!one_bit) {
        const bits_at p = {(slab * rows + r) * 128 + 4 * kvq_k_word(r, t), kvq_k_bit(c)};
        return p;
    }
    const uint32_t half = rows / 2, row = r % half;
    const bits_at p = {(slab * half + row) * 128 + 4 * kvq_k_word(row, t), kvq_k_bit(c) + r / half};
    return p;
}

static bits_at v_place(int d, bool one_bit, int t, int channel)
{
    const uint32_t j = t / 8, k = t % 8 / 2, half = t % 2;
    const uint32_t c = channel % 128, slab = channel / 128, u = c % 32 / 16, g = c % 8;
    const uint32_t rh = c % 16 / 8, s = d == 64 ? c / 32 * 2 + u : c / 32;
    uint32_t row_bytes = 128, row = 2 * j + half, word = 4 * (g ^ 2 * j) + 2 * u + rh;
    if (d == 64) {
        row_bytes = 64;
        row = 2 * j + (half ^ (j & 1));
        word = (2 * g + rh) ^ 8 * (j >> 1);
    }
    bits_at p = {(slab * 8 + row) * row_bytes + 4 * word, 8 * k + 2 * s};
    if (one_bit) {
        p.byte = (slab * 4 + j) * row_bytes + 4 * word;
        p.bit += half;
    }
    return p;
}

static uint32_t word_at(const uint8_t *bytes)
{
    uint32_t w;
    memcpy(&w, bytes, sizeof(w));
    return w;
}

typedef bits_at (*place_of)(int d, bool one_bit, int t, int channel);

static void or_word(uint8_t *bytes, uint32_t x)
{
    x |= word_at(bytes);
    memcpy(bytes, &x, sizeof(x));
}

static void put_code(uint8_t *planes, place_of place, int d, int bits, int t, int c, uint32_t code)
{
    const bits_at low = place(d, false, t, c), high = place(d, bits == 3, t, c);
    or_word(planes + low.byte, (code & 3) << low.bit);
    if (bits > 2)
        or_word(planes + 32 * d / 4 + high.byte, code >> 2 << high.bit);
}

// ---- Probes ----

static void fetch_probe(gpu::smem to, const uint8_t *group, const int bytes)
{
    for (int at = 16 * gpu::lane(); at < bytes; at += 16 * gpu::WARP)
        gpu::copy16(to + at, group + at, true);
    gpu::copy_commit();
    gpu::copy_wait<0>();
    gpu::warp_sync();
}

// The queries as attend_query.h leaves them, but natural.
template <int D> static void bring_queries(const uint16_t *q)
{
    typedef kvq_gpu_room<D, 1> R;
    const gpu::smem rows = gpu::smem_start() + R::PACKED_QUERIES;
    for (int i = gpu::lane(); i < 8 * D / 8; i += gpu::WARP) {
        gpu::u32x4 chunk;
        memcpy(&chunk, q + 8 * i, sizeof(chunk));
        gpu::sts128(kvq_gpu_chunk<D>(rows, i / (D / 8), i % (D / 8)), chunk);
    }
    if (gpu::lane() < 8)
        kvq_gpu_put_float(gpu::smem_start() + R::FACTORS + 8 * gpu::lane() + 4, 1);
    gpu::warp_sync();
}

// Logits of one group; with norms, scales of 1 and zeros of 0 they are sums of q times code.
template <int D, int BITS> static void probe_k(const probe &a)
{
    typedef kvq_gpu_room<D, 1> R;
    fetch_probe(R::STAGES, a.group, kvq_gpu_affine<D, BITS>::BYTES);
    bring_queries<D>(a.q);
    kvq_gpu_lane<D, 1> l = {};
    kvq_gpu_begin<D, 1>(l, 0, (float)(1 << 21));
    kvq_gpu_keep_q<D, 1>(l);
    float s[1][2][4];
    kvq_gpu_logits<D, BITS, 1>(l, R::STAGES, R::STAGES + kvq_gpu_affine<D, BITS>::K_SCALES, s);
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < 4; i++)
            a.out[(4 * l.g + 2 * m + (i >> 1)) * 8 + 2 * l.j + (i & 1)] =
                s[0][m][i] * l.to_log2[0][i & 1];
}

// Output of one group for P with a single 1 for each row.
template <int D, int BITS> static void probe_v(const probe &a)
{
    typedef kvq_gpu_affine<D, BITS> G;
    typedef kvq_gpu_room<D, 1> R;
    kvq_gpu_lane<D, 1> l = {};
    fetch_probe(R::STAGES, a.group, G::BYTES);
    l.g = gpu::lane() >> 2;
    l.j = gpu::lane() & 3;
    uint32_t p[1][2][2];
    for (int x = 0; x < 4; x++) {
        const int token = 8 * l.j + x, wanted = a.tokens + l.g;
        p[0][x >> 1][x & 1] = gpu::pack2(token == wanted, token + 4 == wanted);
    }
    kvq_gpu_values<D, BITS, 1>(l, R::STAGES + G::K_NORMS + G::NORMS, p);
    kvq_gpu_finish<D, 1>(l, 1, 1);
    for (int t = 0; t < D / 16; t++)
        for (int i = 0; i < 4; i++)
            a.out[(2 * l.j + (i & 1)) * D + 16 * t + 8 * (i >> 1) + l.g] = l.sums.o[0][t][i];
}

#define VARIANT(D, BITS)                                                                           \
    {                                                                                              \
        D, BITS, kvq_gpu_affine<D, BITS>::BYTES, kvq_gpu_room<D, 1>::STAGES,                       \
            kvq_gpu_affine<D, BITS>::K_SCALES, kvq_gpu_affine<D, BITS>::K_ZEROS,                   \
            kvq_gpu_affine<D, BITS>::K_NORMS,                                                      \
            kvq_gpu_affine<D, BITS>::K_NORMS + kvq_gpu_affine<D, BITS>::NORMS,                     \
            kvq_gpu_affine<D, BITS>::V_SCALES, kvq_gpu_affine<D, BITS>::V_ZEROS, probe_k<D, BITS>, \
            probe_v<D, BITS>                                                                       \
    }
static const variant variants[] = {VARIANT(64, 2),  VARIANT(64, 3),  VARIANT(64, 4),
                                   VARIANT(128, 2), VARIANT(128, 3), VARIANT(128, 4),
                                   VARIANT(256, 2), VARIANT(256, 3), VARIANT(256, 4)};

static const kvq_format *format_of(const variant &v)
{
    char name[16];
    snprintf(name, sizeof(name), "oscar%d", v.bits);
    const kvq_format *f = kvq_format_by_name(name);
    assert_non_null(f);
    return f;
}

static kvq_shape shape_of(const variant &v, int heads, int kv_heads)
{
    kvq_shape s = {};
    s.q_heads = (uint16_t)(heads * kv_heads);
    s.kv_heads = (uint16_t)kv_heads;
    s.k_dim = s.v_dim = (uint16_t)v.d;
    s.dtype = KVQ_F16;
    s.scale = 1 / sqrtf((float)v.d);
    return s;
}

static void test_offsets(void **)
{
    for (const variant &v : variants) {
        const kvq_shape shape = shape_of(v, 1, 1);
        const kvq_layout l = kvq_layout_of(format_of(v), &shape);
        assert_int_equal(l.k_codes, 0);
        assert_int_equal(l.k_scales, v.k_scales);
        assert_int_equal(l.k_zeros, v.k_zeros);
        assert_int_equal(l.k_norms, v.k_norms);
        assert_int_equal(l.v_codes, v.v_codes);
        assert_int_equal(l.v_scales, v.v_codes + v.v_scales);
        assert_int_equal(l.v_zeros, v.v_codes + v.v_zeros);
        assert_int_equal(l.group_bytes, v.group_bytes);
        assert_int_equal(l.record_bytes, KVQ_BLOCK_GROUPS * v.group_bytes);
    }
}

// A group of random codes with scales 1, zeros 0; codes are kept in `k` and `v` [32][D].
static vector<uint8_t> random_group(const variant &v, std::mt19937 &random, vector<int> &k,
                                    vector<int> &codes_v)
{
    vector<uint8_t> group(v.group_bytes, 0);
    for (int t = 0; t < 32; t++) {
        for (int c = 0; c < v.d; c++) {
            k.push_back((int)(random() % (1u << v.bits)));
            codes_v.push_back((int)(random() % (1u << v.bits)));
            put_code(group.data(), k_place, v.d, v.bits, t, c, k.back());
            put_code(group.data() + v.v_codes, v_place, v.d, v.bits, t, c, codes_v.back());
        }
    }
    const uint16_t one = gpu::float_to_half(1);
    for (int i = 0; i < v.d; i++) {
        memcpy(&group[v.k_scales + 2 * i], &one, 2);
        memcpy(&group[v.v_codes + v.v_scales + 2 * i], &one, 2);
    }
    return group;
}

static gpu::emu_report run_probe(void (*kernel)(const probe &), const probe &p)
{
    gpu::emu_shape shape = {1, 1, 32, 128 * 1024, 7, false};
    gpu::emu_report report;
    shape.count_bytes = true;
    if (gpu::launch(kernel, p, shape, &report) != 0)
        fail_msg("%s", report.text);
    if (report.conflict[0])
        fail_msg("bank conflict at %s", report.conflict);
    assert_int_equal(report.uneven, 0);
    return report;
}

// Every byte of the planes at `at` was loaded once, or `times` for the high plane.
static void check_coverage(const variant &v, uint32_t at, uint32_t bytes, uint32_t times_high)
{
    const uint32_t *loads = gpu::emu_byte_loads();
    const uint32_t low = 32 * v.d / 4;
    for (uint32_t i = 0; i < bytes; i++)
        if (loads[at + i] != (i < low ? 1 : times_high))
            fail_msg("head_dim %d, %d bits: byte %u of the codes was loaded %u times", v.d, v.bits,
                     i, loads[at + i]);
}

static void check_k_codes(const variant &v, const vector<uint8_t> &group, const vector<int> &codes)
{
    vector<float> out(32 * 8);
    const uint16_t one = gpu::float_to_half(1);
    for (int channels = 0; channels < v.d; channels += 8) {
        vector<uint16_t> q(8 * v.d, 0);
        for (int n = 0; n < 8; n++)
            q[n * v.d + channels + n] = one;
        const probe p = {group.data(), q.data(), 0, out.data()};
        run_probe(v.probe_k, p);
        for (int t = 0; t < 32; t++)
            for (int n = 0; n < 8; n++)
                if (out[t * 8 + n] != codes[t * v.d + channels + n])
                    fail_msg("head_dim %d, %d bits: K of token %d, channel %d arrives as %g, not "
                             "%d",
                             v.d, v.bits, t, channels + n, (double)out[t * 8 + n],
                             codes[t * v.d + channels + n]);
    }
    // Two lanes share a row of the 1-bit plane where there are only two.
    check_coverage(v, v.stage, v.k_scales, v.d == 64 && v.bits == 3 ? 2 : 1);
}

static void check_v_codes(const variant &v, const vector<uint8_t> &group, const vector<int> &codes)
{
    vector<float> out(8 * v.d);
    for (int tokens = 0; tokens < 32; tokens += 8) {
        const probe p = {group.data(), NULL, tokens, out.data()};
        run_probe(v.probe_v, p);
        for (int n = 0; n < 8; n++)
            for (int c = 0; c < v.d; c++)
                if (out[n * v.d + c] != codes[(tokens + n) * v.d + c])
                    fail_msg("head_dim %d, %d bits: V of token %d, channel %d arrives as %g, not "
                             "%d",
                             v.d, v.bits, tokens + n, c, (double)out[n * v.d + c],
                             codes[(tokens + n) * v.d + c]);
    }
    check_coverage(v, v.stage + v.v_codes, v.v_scales, 1);
}

static void test_codes(void **)
{
    std::mt19937 random(11);
    for (const variant &v : variants) {
        vector<int> k, codes_v;
        const vector<uint8_t> group = random_group(v, random, k, codes_v);
        check_k_codes(v, group, k);
        check_v_codes(v, group, codes_v);
    }
}

// ---- The emulator's fp16 ----

// Every fp16 comes back, and halfway between neighbours goes to the even one.
static void test_half(void **)
{
    for (uint32_t x = 0; x < 0x7c00; x++) {
        const float here = gpu::half_to_float((uint16_t)x);
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
    assert_true(isnan(gpu::half_to_float(gpu::float_to_half(NAN))));
}

int main(void)
{
    const CMUnitTest tests[] = {cmocka_unit_test(test_half), cmocka_unit_test(test_offsets),
                                cmocka_unit_test(test_codes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
