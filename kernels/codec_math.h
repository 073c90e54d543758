// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of the formats, number by number: what decides which bytes are written and which
// values are read. Plain functions over scalars and short arrays, in C that is also CUDA C, so
// that the reference on the CPU and the kernels of a GPU are the same code. Compiled without fused
// multiply-add (-ffp-contract=off, nvcc -fmad=false), with IEEE division and square root, and with
// subnormal numbers. The vector kernels of CPUs (kernels/scalar_*, book_pack_*) do the same by
// other means and are held against this.
//
// All in fp32, each operation rounded to nearest even, scales and zeros used as stored:
//
// Affine, b bits:
//   range = max - min;  s = fp16(range / (2^b - 1))                 (saturating)
//   s > 0:   zero = fp16(0 - rint(-min / s) * s), or fp16(min + 0) for float minimums
//            inv = 1 / s;  code = clamp(rint((x - zero) * inv), 0, 2^b - 1)
//   s == 0:  zero = fp16(min + 0);  code = 0
// "0 -" and "+ 0" turn a negative zero into a positive one, so that the order in which a kernel
// finds the minimum cannot show.
// Fitted zeros: KVQ__FIT_ROUNDS times, from a = 1 and o = 0 on, with w = range / (2^b - 1),
//   u = (x - min) * (1 / w);  q = clamp(rint((u - o) * (1 / a)), 0, 2^b - 1)
//   and a and o of the line a * q + o that is nearest to all u in squares, where the smallest and
//   the largest u count as n / 16 numbers more each; they stay what they are if there is no such
//   line that ascends. Sums begin with these two and are added in ascending order.
//   s = fp16(a * w);  zero = fp16(min + o * w); codes as above. s == 0 above: nothing is fitted.
//
// Symmetric, b bits, h = 2^(b-1), n = h - 1 (with `full` n = h):
//   s = fp16(max |x| / n);  s > 0: code = clamp(rint(x * (1 / s)), -n, h - 1) + h, else code = h
//
// Hybrid, b bits: symmetric as above, and affine with float minimums and b - 1 bits (with `full`
// b bits), whichever has the smaller sum of |x - value|, added in ascending order; affine if they
// are equal. Affine groups have the sign bit of their scale set. Symmetric groups store the value
// of code 0 as zero: -h * s.
//
// Lloyd-Max: sums of squares as of `sumsq` (internal.h), of x and of levels.
//   n = sqrt(sum x^2 / channels);  n > 0: code = number of the level nearest to x * (1 / n), the
//   lower of two (found as the count of midpoints below it);  s = sqrt(sum x^2 / sum level^2), at
//   most 65504, as fp16
//   n == 0: s = 0, code = 0
//
// Codebooks: the number of the centroid with the smallest sum of squared differences, added up
// channel by channel, the lowest number of equals (VecInfer, section 3; MILLION, section 3).
#ifndef KVQ_KERNELS_CODEC_MATH_H
#define KVQ_KERNELS_CODEC_MATH_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

// ---- 16-bit numbers, one at a time ----

KVQ_INLINE uint32_t kvq__bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

KVQ_INLINE float kvq__float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

KVQ_INLINE float kvq__f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t rest = h & 0x7fffu;
    if (rest >= 0x7c00u)
        return kvq__float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // Moves the exponent's bias by a multiplication, which is exact for subnormals as well.
    float f = kvq__float(rest << 13) * 0x1p112f;
    return kvq__float(sign | kvq__bits(f));
}

// To nearest even; finite values saturate at 65504, infinities and NaN stay what they are.
KVQ_INLINE uint16_t kvq__f32_to_f16(float f)
{
    uint32_t sign = kvq__bits(f) >> 16 & 0x8000u;
    uint32_t u = kvq__bits(f) & 0x7fffffffu;
    if (u >= 0x7f800000u)
        return (uint16_t)(sign | (u > 0x7f800000u ? 0x7e00u | (u >> 13 & 0x3ffu) : 0x7c00u));
    if (u > 0x477fe000u) // 65504
        return (uint16_t)(sign | 0x7bffu);
    if (u < 0x38800000u) // below 2^-14: adding 1/2 rounds to multiples of 2^-24
        return (uint16_t)(sign | (kvq__bits(kvq__float(u) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((u + 0xfffu + (u >> 13 & 1u) - 0x38000000u) >> 13));
}

KVQ_INLINE float kvq__bf16_to_f32(uint16_t h)
{
    return kvq__float((uint32_t)h << 16);
}

// To nearest even; finite values saturate, infinities and NaN stay what they are.
KVQ_INLINE uint16_t kvq__f32_to_bf16(float f)
{
    uint32_t u = kvq__bits(f);
    uint32_t rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    if (rest > 0x7f7f0000u && rest != 0x7f800000u)
        return (uint16_t)((u >> 16 & 0x8000u) | 0x7f7fu);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

// ---- Raw rows ----

KVQ_INLINE float kvq__from_raw(uint16_t raw, uint8_t dtype)
{
    return dtype == KVQ_F16 ? kvq__f16_to_f32(raw) : kvq__bf16_to_f32(raw);
}

// Element i of a tensor of any enum kvq_dtype.
KVQ_INLINE float kvq__element(const void *src, uint8_t dtype, size_t i)
{
    if (dtype == KVQ_F32)
        return ((const float *)src)[i];
    return kvq__from_raw(((const uint16_t *)src)[i], dtype);
}

// A 16-bit number as kvq_store promises it.
KVQ_INLINE uint16_t kvq__stored(float x, uint8_t dtype)
{
    return dtype == KVQ_F16 ? kvq__f32_to_f16(x) : kvq__f32_to_bf16(x);
}

KVQ_INLINE bool kvq__is_finite(float x)
{
    return (kvq__bits(x) & 0x7f800000u) != 0x7f800000u;
}

// Whether storing clamps this finite number.
KVQ_INLINE bool kvq__saturates(float x, uint8_t dtype)
{
    return kvq__is_finite(x) && fabsf(x) > (dtype == KVQ_F16 ? 65504.0f : 0x1.fep127f);
}

// bf16 reaches 2^128, and 256 such numbers are added in a transform: limits keep what follows
// finite. NaN becomes the lower limit.
KVQ_INLINE float kvq__limited(float x)
{
    const float most = 0x1p119f;
    x = x > -most ? x : -most;
    return x < most ? x : most;
}

// What is packed of a raw number. NaN is what kvq_store reports and callers refuse.
KVQ_INLINE float kvq__packable(uint16_t raw, uint8_t dtype)
{
    if (dtype == KVQ_F16)
        return kvq__f16_to_f32(raw);
    return kvq__limited(kvq__bf16_to_f32(raw));
}

// ---- Transforms and norms ----

// What a Hadamard transform is multiplied with at its end: (float)(1 / sqrt(dim)).
KVQ_INLINE float kvq__hadamard_norm(uint32_t dim)
{
    return dim == 64 ? 0.125f : dim == 128 ? 0x1.6a09e6p-4f : 0.0625f;
}

// A token's norm as the record holds it.
KVQ_INLINE uint16_t kvq__stored_norm(float norm)
{
    uint16_t half = kvq__f32_to_f16(norm < 65504.0f ? norm : 65504.0f);
    return half == 0 ? 0x3c00u : half; // 1
}

// A channel factor learned from the largest |K_c| (InnerQ, section 5; the floor is ours, for
// channels that are always 0).
KVQ_INLINE uint16_t kvq__factor(float top)
{
    uint16_t half = kvq__f32_to_f16(sqrtf(top));
    return kvq__f16_to_f32(half) < 1e-6f ? 0x3c00u : half;
}

// Whether one token's score beats another's in the competition for outliers (OTT, section 3): the
// smaller one, the earlier token of two equal ones.
KVQ_INLINE bool kvq__wins(float score, uint64_t position, float other, uint64_t other_position)
{
    return score < other || (score == other && position < other_position);
}

// The score of a token whose |K|_1 is this: a token that is not a number wins against nobody.
KVQ_INLINE float kvq__score(float sum)
{
    return sum == sum ? sum : INFINITY;
}

// ---- Scalar codecs ----

// A group's scale and zero as stored.
struct kvq__params {
    uint16_t scale, zero;
};

// How a group's numbers become codes: clamp(rint((x - zero) * inverse) + offset, low, high).
struct kvq__grid {
    float zero, inverse, offset, low, high;
};

KVQ_INLINE float kvq__code(const struct kvq__grid *g, float x)
{
    float code = rintf((x - g->zero) * g->inverse) + g->offset;
    code = code > g->low ? code : g->low;
    return code < g->high ? code : g->high;
}

KVQ_INLINE struct kvq__params kvq__affine_params(float min, float max, uint32_t bits, bool integer)
{
    struct kvq__params p;
    p.scale = kvq__f32_to_f16((max - min) / (float)((1u << bits) - 1));
    p.zero = kvq__f32_to_f16(min + 0.0f);
    float scale = kvq__f16_to_f32(p.scale);
    if (integer && scale > 0.0f)
        p.zero = kvq__f32_to_f16(0.0f - rintf(-min / scale) * scale);
    return p;
}

KVQ_INLINE struct kvq__grid kvq__affine_grid(struct kvq__params p, uint32_t bits)
{
    struct kvq__grid g;
    float scale = kvq__f16_to_f32(p.scale);
    g.zero = kvq__f16_to_f32(p.zero);
    g.inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    g.offset = g.low = 0.0f;
    g.high = (float)((1u << bits) - 1);
    return g;
}

// ---- Fitted zeros: scale and zero by least squares ----

enum { KVQ__FIT_ROUNDS = 3, KVQ__FIT_ENDS = 16 };

// Numbers are counted in steps from the smallest on, so that no sum of squares overflows and no
// large mean takes digits: u = (x - min) * inverse, which scale * code + offset shall be near to.
struct kvq__fit {
    float min, step, inverse, most, top; // most: the largest u; top: the highest code
    float scale, offset;
};

struct kvq__fit_sums {
    float q, qq, u, uq; // of codes q and numbers u
};

KVQ_INLINE struct kvq__fit kvq__fit_from(float min, float max, uint32_t bits)
{
    struct kvq__fit f;
    f.min = min;
    f.top = (float)((1u << bits) - 1);
    f.step = (max - min) / f.top;
    f.inverse = 1.0f / f.step;
    f.most = (max - min) * f.inverse;
    f.scale = 1.0f;
    f.offset = 0.0f;
    return f;
}

// inverse: 1 / f->scale.
KVQ_INLINE float kvq__fit_code(const struct kvq__fit *f, float inverse, float u)
{
    float q = rintf((u - f->offset) * inverse);
    q = q > 0.0f ? q : 0.0f;
    return q < f->top ? q : f->top;
}

// The sums that a round over n numbers begins with. Without this weight on the ends, keys of two of
// three models lost more than with their ends as they are (docs/quality/kvq2.md).
KVQ_INLINE struct kvq__fit_sums kvq__fit_ends(const struct kvq__fit *f, float inverse, uint32_t n)
{
    struct kvq__fit_sums sums;
    float more = (float)n / KVQ__FIT_ENDS;
    float low = kvq__fit_code(f, inverse, 0.0f), high = kvq__fit_code(f, inverse, f->most);
    sums.q = more * (low + high);
    sums.qq = more * (low * low + high * high);
    sums.u = more * f->most;
    sums.uq = sums.u * high;
    return sums;
}

KVQ_INLINE void kvq__fit_add(const struct kvq__fit *f, float inverse, float x,
                             struct kvq__fit_sums *sums)
{
    float u = (x - f->min) * f->inverse, q = kvq__fit_code(f, inverse, u);
    sums->q += q;
    sums->qq += q * q;
    sums->u += u;
    sums->uq += u * q;
}

// The end of a round: the line through its sums.
KVQ_INLINE void kvq__fit_line(struct kvq__fit *f, const struct kvq__fit_sums *sums, uint32_t n)
{
    float all = (float)n + 2.0f * ((float)n / KVQ__FIT_ENDS);
    float spread = all * sums->qq - sums->q * sums->q;
    float scale = (all * sums->uq - sums->u * sums->q) / spread;
    if (!(spread > 0.0f) || !(scale > 0.0f))
        return;
    f->offset = (sums->u - scale * sums->q) / all;
    f->scale = scale;
}

KVQ_INLINE struct kvq__params kvq__fit_params(const struct kvq__fit *f)
{
    struct kvq__params p;
    p.scale = kvq__f32_to_f16(f->scale * f->step);
    p.zero = kvq__f32_to_f16(f->min + f->offset * f->step + 0.0f);
    return p;
}

// The value of code 0 of a symmetric group, which has no zero of its own.
KVQ_INLINE float kvq__symmetric_zero(float scale, uint32_t bits)
{
    return 0.0f - (float)(1u << (bits - 1)) * scale;
}

// top: the largest |x|.
KVQ_INLINE struct kvq__params kvq__symmetric_params(float top, uint32_t bits, bool full)
{
    struct kvq__params p;
    float half = (float)(1u << (bits - 1));
    p.scale = kvq__f32_to_f16(top / (full ? half : half - 1.0f));
    p.zero = kvq__f32_to_f16(kvq__symmetric_zero(kvq__f16_to_f32(p.scale), bits));
    return p;
}

KVQ_INLINE struct kvq__grid kvq__symmetric_grid(struct kvq__params p, uint32_t bits, bool full)
{
    struct kvq__grid g;
    float scale = kvq__f16_to_f32(p.scale), half = (float)(1u << (bits - 1));
    g.zero = 0.0f;
    g.inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    g.offset = half;
    g.low = full ? 0.0f : 1.0f;
    g.high = half + half - 1.0f;
    return g;
}

// The value of a code of an affine, symmetric or hybrid group, or of a level.
KVQ_INLINE float kvq__value(float scale, float code, float zero)
{
    return scale * code + zero;
}

// How far a number is from what is read back of it.
KVQ_INLINE float kvq__error(float x, float scale, float code, float zero)
{
    return fabsf(x - kvq__value(scale, code, zero));
}

enum { KVQ__HYBRID_AFFINE = 0x8000 }; // in a hybrid group's scale

// Bits of a hybrid group's affine codes.
KVQ_INLINE uint32_t kvq__hybrid_bits(uint32_t bits, bool full)
{
    return full ? bits : bits - 1;
}

// ---- Lloyd-Max ----

// From the sum of n squares.
KVQ_INLINE float kvq__lloyd_norm(float sum, uint32_t n)
{
    return sqrtf(sum / (float)n);
}

KVQ_INLINE float kvq__lloyd_inverse(float norm)
{
    return norm > 0.0f ? 1.0f / norm : 0.0f;
}

// x: a number times the inverse, where the norm is not 0.
KVQ_INLINE uint32_t kvq__nearest_level(float x, const float *levels, uint32_t count)
{
    uint32_t code = 0;
    for (uint32_t i = 1; i < count; i++)
        code += x > 0.5f * (levels[i - 1] + levels[i]);
    return code;
}

// Sums of bf16 squares may be infinite.
KVQ_INLINE uint16_t kvq__lloyd_scale(float sum, float level_sum)
{
    float scale = sqrtf(sum / level_sum);
    return kvq__f32_to_f16(scale < 65504.0f ? scale : 65504.0f);
}

// ---- Codebooks ----

// `vector` is 2, 4 or 8 and best known to the compiler.
KVQ_INLINE uint32_t kvq__nearest_centroid(const float *x, const float *table, uint32_t vector,
                                          uint32_t count)
{
    float least = INFINITY;
    uint32_t code = 0;
    for (uint32_t i = 0; i < count; i++) {
        float sum = 0.0f;
        for (uint32_t j = 0; j < vector; j++) {
            float d = x[j] - table[i * vector + j];
            sum += d * d;
        }
        if (sum < least) {
            least = sum;
            code = i;
        }
    }
    return code;
}

// ---- Merging two attentions over disjoint keys ----

struct kvq__merge {
    float a, b, lse; // what each side is multiplied with; both 0 if there is nothing
};

KVQ_INLINE struct kvq__merge kvq__merge_of(float a, float b)
{
    struct kvq__merge m = {0.0f, 0.0f, -INFINITY};
    float max = a > b || a != a ? a : b; // NaN beside nothing is NaN
    if (max == -INFINITY)
        return m;
    float wa = expf(a - max), wb = expf(b - max);
    float inverse = 1.0f / (wa + wb);
    m.a = wa * inverse;
    m.b = wb * inverse;
    m.lse = max + logf(wa + wb);
    return m;
}

// A side without weight may hold anything, even NaN.
KVQ_INLINE float kvq__merged(const struct kvq__merge *m, float a, float b)
{
    return (m->a == 0.0f ? 0.0f : m->a * a) + (m->b == 0.0f ? 0.0f : m->b * b);
}

#endif
