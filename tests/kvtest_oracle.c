// SPDX-License-Identifier: Apache-2.0
//
// The oracle of kvtest.h: dequantization and attention, written from prose, in double precision.
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/kvtest.h"

double kvt_f16(uint16_t h)
{
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double x = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    if (exponent == 31)
        x = fraction ? NAN : INFINITY;
    return h >> 15 ? -x : x;
}

double kvt_bf16(uint16_t h)
{
    int exponent = h >> 7 & 255, fraction = h & 127;
    double x = exponent ? ldexp(128 + fraction, exponent - 134) : ldexp(fraction, -133);
    if (exponent == 255)
        x = fraction ? NAN : INFINITY;
    return h >> 15 ? -x : x;
}

// To the nearest number with `bits` bits and exponents from `lowest` on, ties to even.
static double round_to(double x, int bits, int lowest, double largest)
{
    int exponent;
    frexp(x, &exponent);
    int unit = exponent - bits < lowest ? lowest : exponent - bits;
    double y = ldexp(nearbyint(ldexp(x, -unit)), unit);
    return fmin(fmax(y, -largest), largest);
}

static double as_dtype(double x, uint8_t dtype)
{
    if (dtype == KVQ_F16)
        return round_to(x, 11, -24, 65504.0);
    return dtype == KVQ_BF16 ? round_to(x, 8, -133, ldexp(255, 120)) : x;
}

static double element(const struct kvq_view *view, uint64_t token, uint32_t head, uint32_t c)
{
    const uint8_t *p = view->data;
    p += (int64_t)token * view->token_stride + (int64_t)head * view->head_stride;
    uint16_t half;
    float single;
    memcpy(&half, p + 2 * c, 2);
    if (view->dtype == KVQ_F16)
        return kvt_f16(half);
    if (view->dtype == KVQ_BF16)
        return kvt_bf16(half);
    memcpy(&single, p + 4 * c, 4);
    return single;
}

// ---- Groups ----

static uint32_t word_le(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static double f16_at(const uint8_t *p, uint32_t i)
{
    return kvt_f16((uint16_t)(p[2 * i] | p[2 * i + 1] << 8));
}

static uint32_t k_row_word(uint32_t row, uint32_t t)
{
    return ((t / 4) ^ (2 * (row % 4))) * 4 + t % 4;
}

static uint32_t k_code(const uint8_t *codes, uint32_t dim, uint32_t bits, uint32_t t, uint32_t c)
{
    uint32_t slab_channels = dim == 256 ? 128 : dim, slab = c / slab_channels;
    uint32_t in_slab = c % slab_channels, row = in_slab / 16;
    uint32_t s = in_slab % 16 / 4, e = in_slab % 4 / 2, h = in_slab % 2;
    uint32_t bit = 16 * h + 8 * e + 2 * s, rows = slab_channels / 16;
    const uint8_t *high = codes + 32 * dim * 2 / 8;
    uint32_t at = (slab * rows + row) * 128 + 4 * k_row_word(row, t);
    uint32_t code = word_le(codes + at) >> bit & 3;
    if (bits == 4)
        return code + 4 * (word_le(high + at) >> bit & 3);
    if (bits == 2)
        return code;
    uint32_t upper = row >= rows / 2, shared = upper ? row - rows / 2 : row;
    at = (slab * rows / 2 + shared) * 128 + 4 * k_row_word(shared, t);
    return code + 4 * (word_le(high + at) >> (bit + upper) & 1);
}

// Where a value of V lies within a row, and at which position of each byte.
static void v_place(uint32_t dim, uint32_t j, uint32_t c, uint32_t *word, uint32_t *s)
{
    uint32_t g = c % 8, rh = c / 8 % 2;
    if (dim == 64) {
        *word = (2 * g + rh) ^ (8 * (j / 2));
        *s = 2 * (c / 32) + c / 16 % 2;
    } else {
        *word = 4 * (g ^ (2 * j)) + 2 * (c / 16 % 2) + rh;
        *s = c / 32;
    }
}

static uint32_t v_code(const uint8_t *codes, uint32_t dim, uint32_t bits, uint32_t t, uint32_t c)
{
    uint32_t j = t / 8, half = t % 2, k = t % 8 / 2;
    uint32_t slab = dim == 256 ? c / 128 : 0, word, s;
    uint32_t row_bytes = dim == 64 ? 64 : 128;
    uint32_t row = dim == 64 ? 2 * j + (half ^ (j & 1)) : 2 * j + half;
    v_place(dim, j, dim == 256 ? c % 128 : c, &word, &s);
    const uint8_t *high = codes + 32 * dim * 2 / 8;
    uint32_t at = (slab * 8 + row) * row_bytes + 4 * word;
    uint32_t code = word_le(codes + at) >> (8 * k + 2 * s) & 3;
    if (bits == 4)
        return code + 4 * (word_le(high + at) >> (8 * k + 2 * s) & 3);
    if (bits == 2)
        return code;
    at = (slab * 4 + j) * row_bytes + 4 * word;
    return code + 4 * (word_le(high + at) >> (8 * k + 2 * s + half) & 1);
}

static uint32_t k_bytes(uint32_t dim, uint32_t bits, bool norms)
{
    return 32 * dim * bits / 8 + 2 * dim + 2 * dim + (norms ? 64 : 0);
}

double kvt_group_k(const uint8_t *group, uint32_t dim, uint32_t bits, bool norms, uint32_t t,
                   uint32_t c)
{
    const uint8_t *scales = group + 32 * dim * bits / 8;
    double norm = norms ? f16_at(scales + 4 * dim, t) : 1.0;
    return norm *
           (f16_at(scales, c) * k_code(group, dim, bits, t, c) + f16_at(scales + 2 * dim, c));
}

double kvt_group_v(const uint8_t *codes, uint32_t dim, uint32_t bits, uint32_t t, uint32_t c)
{
    const uint8_t *scales = codes + 32 * dim * bits / 8;
    uint32_t slot = c / 32 * 32 + 8 * (t / 8) + 2 * (t % 4) + t / 4 % 2;
    return f16_at(scales, slot) * v_code(codes, dim, bits, t, c) + f16_at(scales + 2 * dim, slot);
}

// ---- Keys ----

static void hadamard(double *x, uint32_t dim)
{
    double y[KVQ_MAX_HEAD_DIM];
    for (uint32_t h = dim / 2; h > 0; h /= 2) {
        for (uint32_t i = 0; i < dim; i++)
            y[i] = i & h ? x[i ^ h] - x[i] : x[i] + x[i ^ h];
        memcpy(x, y, sizeof *x * dim);
    }
    for (uint32_t i = 0; i < dim; i++)
        x[i] /= sqrt(dim);
}

static void packed_key(const struct kvq_attend *a, uint32_t head, const uint8_t *block, uint32_t t,
                       double *k, double *v)
{
    uint32_t dim = a->shape->k_dim;
    bool norms = a->format->k_token_scale != KVQ_SCALE_NONE;
    uint32_t kb = a->format->k.bits, vb = a->format->v.bits;
    uint32_t group_bytes = k_bytes(dim, kb, norms) + k_bytes(dim, vb, false);
    const uint8_t *group = block + (size_t)(head * 4 + t / 32) * group_bytes;
    for (uint32_t c = 0; c < dim; c++) {
        k[c] = kvt_group_k(group, dim, kb, norms, t % 32, c);
        v[c] = kvt_group_v(group + k_bytes(dim, kb, norms), dim, vb, t % 32, c);
    }
    if (a->format->k_rotation == KVQ_ROTATE_HADAMARD)
        hadamard(k, dim);
    if (a->shape->v_rotation == KVQ_V_ROT_DAEMON)
        hadamard(v, dim);
}

static void raw_key(const struct kvq_attend *a, uint32_t head, const uint8_t *block, uint32_t t,
                    double *k, double *v)
{
    uint32_t dim = a->shape->k_dim;
    const uint8_t *row = block + (size_t)head * 128 * 4 * dim + (size_t)t * 2 * dim;
    for (uint32_t c = 0; c < dim; c++) {
        uint16_t bits_k, bits_v;
        memcpy(&bits_k, row + 2 * c, 2);
        memcpy(&bits_v, row + (size_t)128 * 2 * dim + 2 * c, 2);
        k[c] = a->shape->dtype == KVQ_F16 ? kvt_f16(bits_k) : kvt_bf16(bits_k);
        v[c] = a->shape->dtype == KVQ_F16 ? kvt_f16(bits_v) : kvt_bf16(bits_v);
    }
}

bool kvt_knows(const struct kvq_format *f)
{
    bool k = f->k.codec == KVQ_CODEC_AFFINE && f->k.axis == KVQ_PER_CHANNEL && f->k.group == 32;
    bool v = f->v.codec == KVQ_CODEC_AFFINE && f->v.axis == KVQ_PER_TOKEN && f->v.group == 32;
    return kvq_is_raw(f) || (k && v && f->k.bits > 1 && !f->sink_tokens && !f->outliers);
}

bool kvt_key(const struct kvq_attend *a, uint32_t head, uint64_t position, double *k, double *v)
{
    uint64_t fresh = position - a->fresh_start;
    if (position >= a->fresh_start && fresh < a->fresh_tokens) {
        for (uint32_t c = 0; c < a->shape->k_dim; c++) {
            k[c] = as_dtype(element(&a->fresh_k, fresh, head, c), a->shape->dtype);
            v[c] = as_dtype(element(&a->fresh_v, fresh, head, c), a->shape->dtype);
        }
        return true;
    }
    uint32_t t = (uint32_t)(position % 128);
    if (position / 128 >= a->n_pages || t >= a->pages[position / 128].tokens)
        return false;
    const struct kvq_page *page = &a->pages[position / 128];
    if (t >= page->packed_tokens)
        raw_key(a, head, page->raw, t, k, v);
    else if (kvq_is_raw(a->format))
        raw_key(a, head, page->packed, t, k, v);
    else
        packed_key(a, head, page->packed, t, k, v);
    return true;
}

// ---- Attention ----

static bool sees(const struct kvq_attend *a, uint32_t query, uint64_t position)
{
    uint64_t own = a->q_start + query;
    if (a->flags & KVQ_ATTEND_PAST_ONLY ? position >= a->past_tokens : position > own)
        return false;
    return a->shape->window == 0 || position + a->shape->window > own;
}

struct keys {
    double *k, *v; // [total][dim]
    bool *held;
    uint64_t total;
};

static void attend_row(const struct kvq_attend *a, const struct keys *keys, uint32_t query,
                       uint32_t head, double *out, double *lse)
{
    uint32_t dim = a->shape->k_dim;
    double *logit = malloc(sizeof(double) * (keys->total + 1)), max = -INFINITY, sum = 0;
    for (uint64_t p = 0; p < keys->total; p++) {
        logit[p] = -INFINITY;
        if (!keys->held[p] || !sees(a, query, p))
            continue;
        double dot = 0, cap = a->shape->softcap;
        for (uint32_t c = 0; c < dim; c++)
            dot += element(&a->q, query, head, c) * keys->k[p * dim + c];
        dot *= a->shape->scale;
        logit[p] = cap != 0 ? cap * tanh(dot / cap) : dot;
        max = fmax(max, logit[p]);
    }
    memset(out, 0, sizeof *out * dim);
    for (uint64_t p = 0; p < keys->total && max > -INFINITY; p++) {
        double weight = exp(logit[p] - max);
        sum += weight;
        for (uint32_t c = 0; c < dim && weight > 0; c++)
            out[c] += weight * keys->v[p * dim + c];
    }
    for (uint32_t c = 0; c < dim && sum > 0; c++)
        out[c] /= sum;
    *lse = sum > 0 ? max + log(sum) : -INFINITY;
    free(logit);
}

void kvt_oracle(const struct kvq_attend *a, double *out, double *lse)
{
    uint32_t heads = a->shape->q_heads, gqa = heads / a->shape->kv_heads, dim = a->shape->k_dim;
    struct keys keys = {.total = a->past_tokens + a->step_tokens};
    keys.k = calloc(keys.total * dim + 1, sizeof(double));
    keys.v = calloc(keys.total * dim + 1, sizeof(double));
    keys.held = calloc(keys.total + 1, sizeof(bool));
    for (uint32_t h = 0; h < heads; h++) {
        for (uint64_t p = 0; p < keys.total && h % gqa == 0; p++)
            keys.held[p] = kvt_key(a, h / gqa, p, keys.k + p * dim, keys.v + p * dim);
        for (uint32_t i = 0; i < a->q_tokens; i++)
            attend_row(a, &keys, i, h, out + ((size_t)i * heads + h) * dim, lse + i * heads + h);
    }
    free(keys.k);
    free(keys.v);
    free(keys.held);
}

double kvt_rel_error(const float *out, const double *want, size_t rows, size_t dim)
{
    double worst = 0;
    for (size_t r = 0; r < rows; r++) {
        double largest = DBL_MIN, difference = 0;
        for (size_t i = r * dim; i < (r + 1) * dim; i++) {
            largest = fmax(largest, fabs(want[i]));
            difference = fmax(difference, isnan(out[i]) ? INFINITY : fabs(out[i] - want[i]));
        }
        worst = fmax(worst, difference / largest);
    }
    return worst;
}
