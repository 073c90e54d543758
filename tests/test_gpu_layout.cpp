// SPDX-License-Identifier: Apache-2.0
//
// The block layout serves the GPU: its attention loop, run in the emulator, over blocks that
// kvq_pack wrote. Proved here for head_dim 64, 128, 256 and 2, 3, 4 bits:
//   - the kernel's offsets are those of kvq_layout_of;
//   - each (token, channel) of K and V arrives exactly once and with exactly its own code, and
//     each byte of the planes is read once (probes with one channel of Q or one token of P);
//   - no shared load meets a bank conflict, in the probes and in the whole loop;
//   - outputs and log-sum-exp agree with double precision over the dequantized blocks, and do not
//     depend on the order in which lanes run.
// And the emulator refuses what it says it refuses.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <random>
#include <vector>

#include "kernels/cuda/attend_oscar.h"
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
    uint32_t group_bytes, shared;
    uint32_t k_scales, k_zeros, k_norms, v_codes, v_scales, v_zeros;
    void (*attend)(const kvq_gpu_attend &);
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

static int get_code(const uint8_t *planes, place_of place, int d, int bits, int t, int c)
{
    const bits_at low = place(d, false, t, c), high = place(d, bits == 3, t, c);
    const uint8_t *upper = planes + 32 * d / 4;
    int code = word_at(planes + low.byte) >> low.bit & 3;
    if (bits > 2)
        code += 4 * (word_at(upper + high.byte) >> high.bit & (bits == 3 ? 1 : 3));
    return code;
}

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

static float half_at(const uint8_t *bytes, uint32_t index)
{
    uint16_t h;
    memcpy(&h, bytes + 2 * index, sizeof(h));
    return gpu::half_to_float(h);
}

// ---- Probes ----

template <int D> static void fetch_probe(gpu::smem to, const uint8_t *group, const int bytes)
{
    for (int at = 16 * gpu::lane(); at < bytes; at += 16 * gpu::WARP)
        gpu::copy16(to + at, group + at, true);
    gpu::copy_commit();
    gpu::copy_wait<0>();
    gpu::warp_sync();
}

template <int D> static kvq_gpu_lane<D> fresh_lane()
{
    kvq_gpu_lane<D> l = {};
    l.g = gpu::lane() >> 2;
    l.j = gpu::lane() & 3;
    return l;
}

// Logits of one group; with norms, scales of 1 and zeros of 0 they are sums of q times code.
template <int D, int BITS> static void probe_k(const probe &a)
{
    kvq_gpu_lane<D> l = fresh_lane<D>();
    kvq_gpu_attend attend = {};
    attend.q = a.q;
    attend.heads = 8;
    attend.scale = 1;
    fetch_probe<D>(0, a.group, kvq_gpu_group<D, BITS>::BYTES);
    kvq_gpu_load_q<D>(l, attend, 0);
    float s[2][4];
    kvq_gpu_logits<D, BITS>(l, 0, s);
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < 4; i++)
            a.out[(4 * l.g + 2 * m + (i >> 1)) * 8 + 2 * l.j + (i & 1)] =
                s[m][i] * l.to_log2[i & 1];
}

// Output of one group for P with a single 1 for each head.
template <int D, int BITS> static void probe_v(const probe &a)
{
    typedef kvq_gpu_merge<D> M;
    const gpu::smem group = (4 * M::FLOATS + 127) / 128 * 128;
    kvq_gpu_lane<D> l = fresh_lane<D>();
    fetch_probe<D>(group, a.group, kvq_gpu_group<D, BITS>::BYTES);
    uint32_t p[2][2];
    for (int x = 0; x < 4; x++) {
        const int token = 8 * l.j + x, wanted = a.tokens + l.g;
        p[x >> 1][x & 1] = gpu::pack2(token == wanted, token + 4 == wanted);
    }
    kvq_gpu_values<D, BITS>(l, group, p);
    kvq_gpu_publish<D>(l);
    gpu::warp_sync();
    for (int head = 0; head < 8; head++)
        for (int c = gpu::lane(); c < D; c += gpu::WARP)
            a.out[head * D + c] = kvq_gpu_get(M::OUT + head * M::STRIDE + c);
}

#define VARIANT(D, BITS)                                                                           \
    {D,                                                                                            \
     BITS,                                                                                         \
     kvq_gpu_group<D, BITS>::BYTES,                                                                \
     kvq_gpu_group<D, BITS>::SMEM,                                                                 \
     kvq_gpu_group<D, BITS>::K_SCALES,                                                             \
     kvq_gpu_group<D, BITS>::K_ZEROS,                                                              \
     kvq_gpu_group<D, BITS>::K_NORMS,                                                              \
     kvq_gpu_group<D, BITS>::V_CODES,                                                              \
     kvq_gpu_group<D, BITS>::V_SCALES,                                                             \
     kvq_gpu_group<D, BITS>::V_ZEROS,                                                              \
     kvq_gpu_attend_d##D##_b##BITS,                                                                \
     probe_k<D, BITS>,                                                                             \
     probe_v<D, BITS>},
static const variant variants[] = {KVQ_GPU_ATTEND_OSCAR_ALL(VARIANT)};

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
        assert_int_equal(l.v_scales, v.v_scales);
        assert_int_equal(l.v_zeros, v.v_zeros);
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
        memcpy(&group[v.v_scales + 2 * i], &one, 2);
    }
    return group;
}

static gpu::emu_report run_probe(void (*kernel)(const probe &), const probe &p)
{
    const gpu::emu_shape shape = {1, 1, 32, 128 * 1024, 7, false};
    gpu::emu_report report;
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
    check_coverage(v, 0, v.k_scales, v.d == 64 && v.bits == 3 ? 2 : 1);
}

static void check_v_codes(const variant &v, const vector<uint8_t> &group, const vector<int> &codes)
{
    vector<float> out(8 * v.d);
    const uint32_t floats = v.d == 64    ? kvq_gpu_merge<64>::FLOATS
                            : v.d == 128 ? kvq_gpu_merge<128>::FLOATS
                                         : kvq_gpu_merge<256>::FLOATS;
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
    check_coverage(v, (4 * floats + 127) / 128 * 128 + v.v_codes, v.v_scales - v.v_codes, 1);
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

// ---- The whole loop ----

enum { BLOCKS = 3, SPLIT_BLOCKS = 2, SPLITS = 2, KV_HEADS = 2, TOKENS = 128 * BLOCKS };

struct cache {
    vector<uint8_t> pool;   // blocks in another order than the table's
    vector<uint32_t> table; // of BLOCKS entries
    kvq_layout layout;
    size_t block_bytes;
};

// Random keys with outlier channels and tokens, random values, packed by kvq_pack.
static cache packed_cache(const variant &v, const kvq_shape &shape, std::mt19937 &random)
{
    std::normal_distribution<float> normal;
    const kvq_layout raw = kvq_layout_raw(&shape);
    const kvq_format *format = format_of(v);
    const kvq_kernels *kernels = kvq_kernels_get(KVQ_ISA_C);
    cache c = {{}, {2, 0, 1}, kvq_layout_of(format, &shape), 0};
    c.block_bytes = kvq_block_bytes(&c.layout, &shape);
    c.pool.assign(BLOCKS * c.block_bytes, 0xff);
    vector<uint8_t> block(kvq_block_bytes(&raw, &shape) + 64), space(kvq_workspace_bytes() + 64);
    uint8_t *aligned = (uint8_t *)(((uintptr_t)block.data() + 63) / 64 * 64);
    uint8_t *workspace = (uint8_t *)(((uintptr_t)space.data() + 63) / 64 * 64);
    for (const uint32_t place : c.table) {
        for (int head = 0; head < KV_HEADS; head++) {
            uint8_t *record = aligned + head * raw.record_bytes;
            for (int i = 0; i < 128 * v.d; i++) {
                const float token = i / v.d % 29 == 0 ? 0.05f : 1, channel = i % 37 == 0 ? 8 : 1;
                const uint16_t k = gpu::float_to_half(normal(random) * token * channel);
                const uint16_t x = gpu::float_to_half(normal(random) * (1 + 0.5f * (i % 7)));
                memcpy(record + 2 * i, &k, 2);
                memcpy(record + raw.v_offset + 2 * i, &x, 2);
            }
        }
        for (int head = 0; head < KV_HEADS; head++)
            for (uint32_t first = 0; first < 128; first += format->unit_tokens) {
                kvq_unit unit = {};
                unit.raw_block = aligned;
                unit.packed_block = c.pool.data() + place * c.block_bytes;
                unit.head = (uint32_t)head;
                unit.first = first;
                kvq_pack(kernels, format, &shape, &unit, workspace);
            }
    }
    return c;
}

// K and V of one token as the packed bytes say.
static void dequantize(const variant &v, const cache &c, int head, int token, vector<double> &k,
                       vector<double> &values)
{
    const uint8_t *group = c.pool.data() + c.table[token / 128] * c.block_bytes +
                           (size_t)head * c.layout.record_bytes +
                           (size_t)(token % 128 / 32) * v.group_bytes;
    const int t = token % 32;
    const double norm = half_at(group + v.k_norms, t);
    for (int i = 0; i < v.d; i++) {
        const int code = get_code(group, k_place, v.d, v.bits, t, i);
        k[i] = norm * ((double)half_at(group + v.k_scales, i) * code +
                       (double)half_at(group + v.k_zeros, i));
        const int slot = 32 * (i / 32) + (int)kvq_v_slot(t);
        const int of_v = get_code(group + v.v_codes, v_place, v.d, v.bits, t, i);
        values[i] = (double)half_at(group + v.v_scales, slot) * of_v +
                    (double)half_at(group + v.v_zeros, slot);
    }
}

struct attention {
    vector<double> out; // [D]
    double lse, spread; // spread: standard deviation of the logits
};

static attention exact_attention(const variant &v, const cache &c, const uint16_t *q, int kv_head,
                                 int tokens)
{
    attention a = {vector<double>(v.d, 0), 0, 0};
    vector<double> k(v.d), values(v.d), logits(tokens);
    double most = -1e300, sum = 0;
    for (int t = 0; t < tokens; t++) {
        dequantize(v, c, kv_head, t, k, values);
        double dot = 0;
        for (int i = 0; i < v.d; i++)
            dot += (double)gpu::half_to_float(q[i]) * k[i];
        logits[t] = dot / sqrt((double)v.d);
        most = logits[t] > most ? logits[t] : most;
    }
    for (int t = 0; t < tokens; t++) {
        dequantize(v, c, kv_head, t, k, values);
        const double p = exp(logits[t] - most);
        sum += p;
        for (int i = 0; i < v.d; i++)
            a.out[i] += p * values[i];
    }
    for (double &x : a.out)
        x /= sum;
    a.lse = most + log(sum);
    double mean = 0, squares = 0;
    for (const double x : logits) {
        mean += x / tokens;
        squares += x * x / tokens;
    }
    a.spread = sqrt(squares - mean * mean);
    return a;
}

// Merges the splits that the kernel wrote for one query head.
static attention merged(const variant &v, const vector<float> &ml, const vector<float> &o,
                        int kv_head, int head, int heads)
{
    attention a = {vector<double>(v.d, 0), 0, 0};
    double most = -1e300, sum = 0;
    for (int s = 0; s < SPLITS; s++)
        most = fmax(most, ml[((kv_head * SPLITS + s) * heads + head) * 2]);
    for (int s = 0; s < SPLITS; s++) {
        const int row = (kv_head * SPLITS + s) * heads + head;
        const double weight = exp2(ml[row * 2] - most);
        sum += weight * ml[row * 2 + 1];
        for (int i = 0; i < v.d; i++)
            a.out[i] += weight * o[row * v.d + i];
    }
    for (double &x : a.out)
        x /= sum;
    a.lse = most * log(2) + log(sum);
    return a;
}

static void run_attend(const variant &v, const cache &c, const vector<uint16_t> &q, int heads,
                       int groups, uint64_t seed, bool truncate, vector<float> &ml,
                       vector<float> &o)
{
    kvq_gpu_attend a = {};
    a.pool = c.pool.data();
    a.table = c.table.data();
    a.block_bytes = c.block_bytes;
    a.groups = groups;
    a.split_blocks = SPLIT_BLOCKS;
    a.heads = heads;
    a.scale = (float)(log2(exp(1)) / sqrt((double)v.d));
    a.q = q.data();
    ml.assign(KV_HEADS * SPLITS * heads * 2, NAN);
    o.assign(KV_HEADS * SPLITS * heads * v.d, NAN);
    a.ml = ml.data();
    a.o = o.data();
    const gpu::emu_shape shape = {SPLITS, KV_HEADS, KVQ_GPU_THREADS, v.shared, seed, truncate};
    gpu::emu_report report;
    if (gpu::launch(v.attend, a, shape, &report) != 0)
        fail_msg("head_dim %d, %d bits: %s", v.d, v.bits, report.text);
    if (report.passes != report.least)
        fail_msg("head_dim %d, %d bits: bank conflict at %s", v.d, v.bits, report.conflict);
    assert_true(report.loads > 0);
    assert_int_equal(report.uneven, 0);
}

// Queries of quite different sizes: a large one makes the softmax peaked.
static vector<uint16_t> random_queries(const variant &v, int heads, std::mt19937 &random)
{
    std::normal_distribution<float> normal;
    vector<uint16_t> q(KV_HEADS * heads * v.d);
    for (size_t i = 0; i < q.size(); i++) {
        const int head = (int)(i / v.d);
        q[i] = gpu::float_to_half(normal(random) * (head % 3 == 0 ? 0.02f : head % 3 == 1 ? 1 : 4));
    }
    return q;
}

// Error of a head over what it may be: 2e-3 relative. Q times a scale is rounded to fp16, which
// moves a logit by about 5e-4 of the logits' spread; so a peaked softmax, of a spread above 2, is
// granted its share.
static double compare(const attention &got, const attention &want)
{
    double error = 0, size = 0;
    for (size_t i = 0; i < got.out.size(); i++) {
        error += (got.out[i] - want.out[i]) * (got.out[i] - want.out[i]);
        size += want.out[i] * want.out[i];
    }
    assert_true(isfinite(got.lse) && fabs(got.lse - want.lse) <= 1e-3 * fmax(1, fabs(want.lse)));
    return sqrt(error / size) / (1e-3 * fmax(2, want.spread));
}

// The worst head's error over what it may be.
static double worst_error(const variant &v, const cache &c, const vector<uint16_t> &q, int heads,
                          int groups, const vector<float> &ml, const vector<float> &o)
{
    double worst = 0;
    for (int kv_head = 0; kv_head < KV_HEADS; kv_head++) {
        for (int head = 0; head < heads; head++) {
            const attention want =
                exact_attention(v, c, &q[(kv_head * heads + head) * v.d], kv_head, 32 * groups);
            worst = fmax(worst, compare(merged(v, ml, o, kv_head, head, heads), want));
        }
    }
    return worst;
}

static void check_attention(const variant &v, int heads, int groups, std::mt19937 &random)
{
    const kvq_shape shape = shape_of(v, heads, KV_HEADS);
    const cache c = packed_cache(v, shape, random);
    const vector<uint16_t> q = random_queries(v, heads, random);
    vector<float> ml, o, ml2, o2;
    run_attend(v, c, q, heads, groups, 1, false, ml, o);
    run_attend(v, c, q, heads, groups, 20261, false, ml2, o2);
    assert_memory_equal(ml.data(), ml2.data(), ml.size() * sizeof(ml[0]));
    assert_memory_equal(o.data(), o2.data(), o.size() * sizeof(o[0]));
    run_attend(v, c, q, heads, groups, 1, true, ml2, o2);
    assert_memory_not_equal(o.data(), o2.data(), o.size() * sizeof(o[0]));
    const double exact = worst_error(v, c, q, heads, groups, ml, o);
    const double cut = worst_error(v, c, q, heads, groups, ml2, o2);
    print_message("head_dim %d, %d bits, %d heads, %d tokens: %.2f of the error allowed, %.2f with "
                  "truncating sums\n",
                  v.d, v.bits, heads, 32 * groups, exact, cut);
    assert_true(exact <= 1 && cut <= 1);
}

static void test_attention(void **)
{
    std::mt19937 random(5);
    for (const variant &v : variants) {
        check_attention(v, 8, 4 * BLOCKS, random);
        if (v.bits == 2) {
            check_attention(v, 1, 4 * BLOCKS - 1, random);       // the last block lacks a group
            check_attention(v, 3, 4 * SPLIT_BLOCKS - 3, random); // nothing in the second split
        }
    }
}

// ---- The emulator itself ----

struct nothing {
    int unused;
};

static void one_lane_leaves(const nothing &)
{
    if (gpu::lane() != 3)
        gpu::any(true);
}

static void lanes_part(const nothing &)
{
    if (gpu::lane() < 16)
        gpu::any(true);
    else
        gpu::shuffle(1, 0);
}

static void reads_unwritten(const nothing &)
{
    gpu::lds32(4 * gpu::lane());
}

static void reads_neighbour(const nothing &)
{
    gpu::sts32(4 * gpu::thread(), 1);
    gpu::block_sync();
    gpu::sts32(4 * gpu::thread(), 2);
    gpu::lds32(4 * (gpu::thread() ^ 1));
}

static void overwrites_read(const nothing &)
{
    gpu::sts32(4 * gpu::thread(), 1);
    gpu::warp_sync();
    gpu::lds32(4 * (gpu::thread() ^ 1));
    gpu::lds32(4 * gpu::thread());
    gpu::any(true); // orders nothing
    gpu::sts32(4 * gpu::thread(), 2);
}

static void reads_other_warp(const nothing &)
{
    gpu::sts32(4 * gpu::thread(), 1);
    gpu::block_sync();
    gpu::sts32(4 * gpu::thread(), 2);
    gpu::warp_sync();
    gpu::lds32(4 * (gpu::thread() ^ 32));
}

static const uint8_t source[32 * 16] = {1};

static void reads_too_early(const nothing &)
{
    gpu::copy16(16 * gpu::lane(), source + 16 * gpu::lane(), true);
    gpu::copy_commit();
    gpu::copy_wait<1>();
    gpu::lds128(16 * gpu::lane());
}

static void leaves_memory(const nothing &)
{
    gpu::lds128(16 * 4096);
}

static void behaves(const nothing &)
{
    gpu::sts32(4 * gpu::thread(), 1);
    gpu::block_sync();
    gpu::lds32(4 * (gpu::thread() ^ 32));
    gpu::warp_sync();
    gpu::block_sync();
    gpu::copy16(16 * gpu::thread(), source + 16 * gpu::lane(), true);
    gpu::copy_commit();
    gpu::copy_wait<0>();
    gpu::warp_sync();
    gpu::lds128(16 * (gpu::thread() ^ 1));
}

static void meets_conflicts(const nothing &)
{
    gpu::sts32(128 * gpu::lane(), 1);
    gpu::lds32(128 * gpu::lane());
}

static gpu::emu_report run_small(void (*kernel)(const nothing &), int want)
{
    const nothing args = {0};
    for (uint64_t seed = 1; seed < 20; seed++) {
        const gpu::emu_shape shape = {1, 1, 64, 4096, seed, false};
        gpu::emu_report report;
        assert_int_equal(gpu::launch(kernel, args, shape, &report), want);
        if (seed == 19)
            return report;
    }
    return gpu::emu_report();
}

static void refused(void (*kernel)(const nothing &), const char *what)
{
    const gpu::emu_report report = run_small(kernel, -1);
    if (!strstr(report.text, what) || !strstr(report.text, "test_gpu_layout.cpp:"))
        fail_msg("wanted \"%s\" and a line, got: %s", what, report.text);
}

static void test_refusals(void **)
{
    refused(one_lane_leaves, "deadlock");
    refused(lanes_part, "divergent collective");
    refused(reads_unwritten, "nothing wrote");
    refused(reads_neighbour, "race");
    refused(overwrites_read, "race");
    refused(reads_other_warp, "race");
    refused(reads_too_early, "under way");
    refused(leaves_memory, "must be a multiple");
    run_small(behaves, 0);
}

static void test_bank_conflicts(void **)
{
    const nothing args = {0};
    const gpu::emu_shape shape = {1, 1, 32, 4096, 1, false};
    gpu::emu_report report;
    assert_int_equal(gpu::launch(meets_conflicts, args, shape, &report), 0);
    assert_int_equal(report.least, 1);
    assert_int_equal(report.passes, 32);
    assert_non_null(strstr(report.conflict, "32 passes instead of 1"));
}

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
    const CMUnitTest tests[] = {
        cmocka_unit_test(test_half),           cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_bank_conflicts), cmocka_unit_test(test_offsets),
        cmocka_unit_test(test_codes),          cmocka_unit_test(test_attention),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
