// SPDX-License-Identifier: Apache-2.0
//
// From rows in shared memory (rows.h) to the codes and parameters of a record. Device code; the
// arithmetic is that of kernels/codec_math.h, the places are those of kernels/planes.h.
#ifndef KVQ_KERNELS_CUDA_QUANT_H
#define KVQ_KERNELS_CUDA_QUANT_H

#include "kernels/cuda/rows.h"
#include "kernels/planes.h"

// Where one side's parts of a group of 32 tokens are.
struct kvq_gpu_parts {
    uint8_t *codes;
    uint16_t *scales, *zeros; // zeros NULL if there are none
};

KVQ_DEVICE kvq_gpu_parts kvq_gpu_parts_of(const kvq_recipe &r, bool v, uint8_t *record,
                                          uint32_t group)
{
    const kvq_packed p = kvq_packed_at(&r.layout, record, group);
    kvq_gpu_parts at = {p.group + (v ? r.layout.v_codes : r.layout.k_codes),
                        (uint16_t *)(v ? p.v_scales : p.k_scales), NULL};
    if ((v ? r.v : r.k).has_zeros)
        at.zeros = (uint16_t *)(v ? p.v_zeros : p.k_zeros);
    return at;
}

// Channels of the `set`-th scale of a token.
struct kvq_gpu_set {
    uint32_t from, n;
};

KVQ_DEVICE kvq_gpu_set kvq_gpu_set_of(kvq_side row, uint32_t dim, uint32_t set)
{
    kvq_gpu_set s = {set * row.group, row.group};
    if (row.wide) {
        s.from = set ? dim / 4 : 0;
        s.n = set ? dim - dim / 4 : dim / 4;
    }
    return s;
}

KVQ_DEVICE uint32_t kvq_gpu_sets(kvq_side row, uint32_t dim)
{
    return row.wide ? 2 : dim / row.group;
}

// Which of a group's parameters belongs to token t in set `set`.
KVQ_DEVICE uint32_t kvq_gpu_token_slot(bool v, uint32_t set, uint32_t t)
{
    return set * KVQ_GROUP_TOKENS + (v ? kvq_v_slot(t) : t);
}

KVQ_DEVICE void kvq_gpu_put_params(const kvq_gpu_parts &at, uint32_t i, kvq__params p)
{
    gpu::stg16(at.scales + i, p.scale);
    if (at.zeros)
        gpu::stg16(at.zeros + i, p.zero);
}

// ---- One scale's values, by one thread ----

// n values in shared memory, `step` bytes apart. Codes take their places, as integers.
struct kvq_gpu_values {
    gpu::smem at;
    uint32_t step, n;
};

KVQ_DEVICE void kvq_gpu_put_codes(kvq_gpu_values x, const kvq__grid &grid)
{
    for (uint32_t i = 0; i < x.n; i++) {
        const gpu::smem at = x.at + i * x.step;
        gpu::sts32(at, (uint32_t)kvq__code(&grid, kvq_gpu_get(at)));
    }
}

struct kvq_gpu_range {
    float min, max;
};

KVQ_DEVICE kvq_gpu_range kvq_gpu_range_of(kvq_gpu_values x)
{
    const float first = kvq_gpu_get(x.at);
    kvq_gpu_range r = {first, first};
    for (uint32_t i = 1; i < x.n; i++) {
        const float own = kvq_gpu_get(x.at + i * x.step);
        r.min = own < r.min ? own : r.min;
        r.max = own > r.max ? own : r.max;
    }
    return r;
}

// Of the absolute values.
KVQ_DEVICE float kvq_gpu_top_of(kvq_gpu_values x)
{
    float top = 0.0f;
    for (uint32_t i = 0; i < x.n; i++) {
        const float own = fabsf(kvq_gpu_get(x.at + i * x.step));
        top = own > top ? own : top;
    }
    return top;
}

KVQ_DEVICE float kvq_gpu_error_of(kvq_gpu_values x, kvq__params p, const kvq__grid &grid)
{
    const float scale = kvq__f16_to_f32(p.scale), zero = kvq__f16_to_f32(p.zero);
    float sum = 0.0f;
    for (uint32_t i = 0; i < x.n; i++) {
        const float own = kvq_gpu_get(x.at + i * x.step);
        sum += kvq__error(own, scale, kvq__code(&grid, own), zero);
    }
    return sum;
}

// One scale's parameters, and the way to its codes.
struct kvq_gpu_choice {
    kvq__params params;
    kvq__grid grid;
};

KVQ_DEVICE kvq__params kvq_gpu_fitted(kvq_gpu_values x, kvq_gpu_range range, uint32_t bits)
{
    kvq__fit fit = kvq__fit_from(range.min, range.max, bits);
    for (int round = 0; round < KVQ__FIT_ROUNDS; round++) {
        const float inverse = 1.0f / fit.scale;
        kvq__fit_sums sums = kvq__fit_ends(&fit, inverse, x.n);
        for (uint32_t i = 0; i < x.n; i++)
            kvq__fit_add(&fit, inverse, kvq_gpu_get(x.at + i * x.step), &sums);
        kvq__fit_line(&fit, &sums, x.n);
    }
    return kvq__fit_params(&fit);
}

KVQ_DEVICE kvq_gpu_choice kvq_gpu_affine(kvq_gpu_values x, uint32_t bits, uint8_t zero)
{
    const kvq_gpu_range range = kvq_gpu_range_of(x);
    kvq__params p = kvq__affine_params(range.min, range.max, bits, zero == KVQ_ZERO_INTEGER);
    if (zero == KVQ_ZERO_FITTED && kvq__f16_to_f32(p.scale) > 0.0f)
        p = kvq_gpu_fitted(x, range, bits);
    const kvq_gpu_choice c = {p, kvq__affine_grid(p, bits)};
    return c;
}

KVQ_DEVICE kvq_gpu_choice kvq_gpu_symmetric(kvq_gpu_values x, uint32_t bits, bool full)
{
    const kvq__params p = kvq__symmetric_params(kvq_gpu_top_of(x), bits, full);
    const kvq_gpu_choice c = {p, kvq__symmetric_grid(p, bits, full)};
    return c;
}

KVQ_DEVICE kvq_gpu_choice kvq_gpu_hybrid(kvq_gpu_values x, uint32_t bits, bool full)
{
    const kvq_gpu_choice s = kvq_gpu_symmetric(x, bits, full);
    kvq_gpu_choice a = kvq_gpu_affine(x, kvq__hybrid_bits(bits, full), KVQ_ZERO_MINIMUM);
    if (kvq_gpu_error_of(x, a.params, a.grid) > kvq_gpu_error_of(x, s.params, s.grid))
        return s;
    a.params.scale |= KVQ__HYBRID_AFFINE;
    return a;
}

KVQ_DEVICE kvq__params kvq_gpu_quantize(kvq_side row, kvq_gpu_values x)
{
    const kvq_gpu_choice c = row.codec == KVQ_CODEC_AFFINE ? kvq_gpu_affine(x, row.bits, row.zero)
                             : row.codec == KVQ_CODEC_SYMMETRIC
                                 ? kvq_gpu_symmetric(x, row.bits, row.full)
                                 : kvq_gpu_hybrid(x, row.bits, row.full);
    kvq_gpu_put_codes(x, c.grid);
    return c.params;
}

// ---- Lloyd-Max, a token's set by a team ----

KVQ_DEVICE float kvq_gpu_team_squares(gpu::smem at, uint32_t n)
{
    float sum = 0.0f;
    for (uint32_t j = 0; j < n; j += KVQ_GPU_TEAM) {
        const float x = kvq_gpu_get(at + 4 * j);
        sum += x * x;
    }
    return kvq_gpu_team_sum(sum);
}

// at: this lane's first value. Returns the scale.
KVQ_DEVICE uint16_t kvq_gpu_lloyd(gpu::smem at, uint32_t n, const float *levels, uint32_t bits)
{
    const float sum = kvq_gpu_team_squares(at, n), norm = kvq__lloyd_norm(sum, n);
    const float inverse = kvq__lloyd_inverse(norm);
    float squares = 0.0f;
    for (uint32_t j = 0; j < n; j += KVQ_GPU_TEAM) {
        const float x = kvq_gpu_get(at + 4 * j) * inverse;
        const uint32_t code = norm > 0.0f ? kvq__nearest_level(x, levels, 1u << bits) : 0;
        squares += levels[code] * levels[code];
        gpu::sts32(at + 4 * j, code);
    }
    return kvq__lloyd_scale(sum, kvq_gpu_team_sum(squares));
}

KVQ_DEVICE void kvq_gpu_lloyd_tokens(const kvq_recipe_side &side, bool v, uint32_t dim,
                                     kvq_gpu_rows rows, const kvq_gpu_parts &at)
{
    for (uint32_t i = 0; i < 4 * kvq_gpu_sets(side.row, dim); i++) {
        const uint32_t t = kvq_gpu_team_token(i % 4), set = i / 4;
        const kvq_gpu_set channels = kvq_gpu_set_of(side.row, dim, set);
        const uint32_t wide = side.row.wide && set == 0;
        const uint16_t scale =
            kvq_gpu_lloyd(kvq_gpu_at(rows, t, channels.from + kvq_gpu_team_lane()), channels.n,
                          side.levels[wide], side.row.bits + wide);
        if (kvq_gpu_team_lane() == 0)
            gpu::stg16(at.scales + kvq_gpu_token_slot(v, set, t), scale);
    }
}

// ---- Parameters, and codes in place of values ----

// `width` channels from c0 on of `side.span` tokens; `rows` begins with channel c0.
KVQ_DEVICE void kvq_gpu_quantize_rows(const kvq_recipe_side &side, bool v, uint32_t dim,
                                      kvq_gpu_rows rows, uint32_t c0, uint32_t width,
                                      const kvq_gpu_parts &at)
{
    const uint32_t step = 4 * rows.stride;
    if (side.row.axis == KVQ_PER_CHANNEL) {
        for (uint32_t c = gpu::thread(); c < width; c += KVQ_GPU_CACHE_THREADS) {
            const kvq_gpu_values x = {kvq_gpu_at(rows, 0, c), step, side.span};
            kvq_gpu_put_params(at, c0 + c, kvq_gpu_quantize(side.row, x));
        }
        return;
    }
    if (side.row.codec == KVQ_CODEC_LLOYD) {
        kvq_gpu_lloyd_tokens(side, v, dim, rows, at);
        return;
    }
    const uint32_t n = KVQ_GROUP_TOKENS * kvq_gpu_sets(side.row, dim);
    for (uint32_t i = gpu::thread(); i < n; i += KVQ_GPU_CACHE_THREADS) {
        const uint32_t t = i % KVQ_GROUP_TOKENS, set = i / KVQ_GROUP_TOKENS;
        const kvq_gpu_set channels = kvq_gpu_set_of(side.row, dim, set);
        const kvq_gpu_values x = {kvq_gpu_at(rows, t, channels.from), 4, channels.n};
        kvq_gpu_put_params(at, kvq_gpu_token_slot(v, set, t), kvq_gpu_quantize(side.row, x));
    }
}

// ---- Planes, gathered from the codes in shared memory ----

// Codes of one group of 32 tokens; `rows` begins with its first token and with channel c0.
struct kvq_gpu_codes {
    kvq_gpu_rows rows;
    uint32_t c0, width;
};

template <int D>
KVQ_DEVICE uint32_t kvq_gpu_code_at(const kvq_gpu_codes &codes, bool v, const kvq__place &p, int i,
                                    int s)
{
    const kvq__cell c = v ? kvq__v_cell(&p, D, i, s) : kvq__k_cell(&p, i, s);
    return gpu::lds32(kvq_gpu_at(codes.rows, c.token, c.channel - codes.c0));
}

template <int D> KVQ_DEVICE kvq__place kvq_gpu_place(bool v, uint32_t bits, uint32_t i)
{
    return v ? kvq__v_place(bits, D, i) : kvq__k_place(bits, D, i);
}

// The low word of a place (high = 0) or its share of the high one.
template <int D>
KVQ_DEVICE uint32_t kvq_gpu_word(const kvq_gpu_codes &codes, bool v, uint32_t bits,
                                 const kvq__place &p, bool high)
{
    uint32_t word = 0;
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) {
        KVQ_UNROLL
        for (int s = 0; s < 4; s++) {
            const uint32_t code = kvq_gpu_code_at<D>(codes, v, p, i, s);
            const uint32_t bit = kvq__cell_bit(i, s);
            word |= high ? kvq__high_bits(bits, bit, p.odd, code) : kvq__low_bits(bits, bit, code);
        }
    }
    return word;
}

template <int D>
KVQ_DEVICE void kvq_gpu_put_bytes(const kvq_gpu_codes &codes, bool v, const kvq__place &p,
                                  uint8_t *planes)
{
    for (int s = 0; s < 4; s++) {
        uint32_t word = 0;
        KVQ_UNROLL
        for (int i = 0; i < 4; i++)
            word |= kvq_gpu_code_at<D>(codes, v, p, i, s) << 8 * i;
        gpu::stg32(planes + kvq__byte_word(D, p.low, s), word);
    }
}

// High words that two places share.
template <int D>
KVQ_DEVICE void kvq_gpu_put_shared(const kvq_gpu_codes &codes, bool v, uint32_t bits,
                                   uint8_t *planes)
{
    const uint32_t run = kvq__run_of(v, D), first = codes.c0 * 2;
    for (uint32_t i = gpu::thread(); i < codes.width; i += KVQ_GPU_CACHE_THREADS) {
        const uint32_t place = first + i / run * 2 * run + i % run;
        const kvq__place even = kvq_gpu_place<D>(v, bits, place);
        const kvq__place odd = kvq_gpu_place<D>(v, bits, place + run);
        gpu::stg32(planes + even.high, kvq_gpu_word<D>(codes, v, bits, even, true) |
                                           kvq_gpu_word<D>(codes, v, bits, odd, true));
    }
}

template <int D>
KVQ_DEVICE void kvq_gpu_put_planes(const kvq_gpu_codes &codes, bool v, uint32_t bits,
                                   uint8_t *planes)
{
    const uint32_t first = codes.c0 * 2, end = first + codes.width * 2;
    for (uint32_t n = first + gpu::thread(); n < end; n += KVQ_GPU_CACHE_THREADS) {
        const kvq__place p = kvq_gpu_place<D>(v, bits, n);
        if (bits == 8)
            kvq_gpu_put_bytes<D>(codes, v, p, planes);
        else if (bits != 1)
            gpu::stg32(planes + p.low, kvq_gpu_word<D>(codes, v, bits, p, false));
        if (bits == 4)
            gpu::stg32(planes + p.high, kvq_gpu_word<D>(codes, v, bits, p, true));
    }
    if (kvq__shares_high(bits))
        kvq_gpu_put_shared<D>(codes, v, bits, planes);
}

// The third bits of the first quarter, 32 to a word.
template <int D> KVQ_DEVICE void kvq_gpu_put_wide(const kvq_gpu_codes &codes, uint8_t *wide)
{
    const uint32_t i = gpu::thread();
    uint32_t word = 0;
    if (i >= D / 4)
        return;
    for (uint32_t k = 0; k < 32; k++) {
        const uint32_t byte = 4 * i + k / 8, t = byte / (D / 32), c = byte % (D / 32) * 8 + k % 8;
        word |= gpu::lds32(kvq_gpu_at(codes.rows, t, c)) >> 2 << k;
    }
    gpu::stg32(wide + 4 * i, word);
}

// ---- Codebooks ----

// `width` bits of each lane, lane 0's first: as many words as that takes.
KVQ_DEVICE void kvq_gpu_put_row(uint8_t *row, uint32_t bits, uint32_t width)
{
    const uint32_t lane = gpu::lane(), sharing = 32 / width;
    uint32_t word = 0;
    for (uint32_t k = 0; k < sharing; k++)
        word |= gpu::shuffle_bits(bits, (int)(lane / sharing * sharing + k)) << width * k;
    if (lane % sharing == 0)
        gpu::stg32(row + lane / sharing * 4, word);
}

// A warp searches for a sub-vector of 32 tokens, so that its lanes read the same centroids.
template <int D, int VECTOR>
KVQ_DEVICE void kvq_gpu_search(kvq_gpu_rows rows, const float *tables, size_t sub, uint32_t bits,
                               uint8_t *codes)
{
    const uint32_t subs = D / VECTOR;
    for (uint32_t m = gpu::warp(); m < subs; m += KVQ_GPU_CACHE_THREADS / gpu::WARP) {
        float x[VECTOR];
        KVQ_UNROLL
        for (int j = 0; j < VECTOR; j++)
            x[j] = kvq_gpu_get(kvq_gpu_at(rows, gpu::lane(), m * VECTOR + j));
        const uint32_t code = kvq__nearest_centroid(x, tables + m * sub, VECTOR, 1u << bits);
        const uint32_t low = kvq__book_low(bits), high = kvq__book_high(bits);
        kvq_gpu_put_row(codes + kvq__book_low_row(bits, m), code & ((1u << low) - 1), low);
        if (high)
            kvq_gpu_put_row(codes + kvq__book_high_row(bits, subs, m), code >> low, high);
    }
}

KVQ_DEVICE const float *kvq_gpu_tables(const kvq_book *book, bool v, uint32_t head)
{
    return v ? book->v + head * book->v_head : book->k + head * book->k_head;
}

template <int D>
KVQ_DEVICE void kvq_gpu_search_rows(const kvq_side &row, bool v, const kvq_book *book,
                                    uint32_t head, kvq_gpu_rows rows, uint8_t *codes)
{
    const float *tables = kvq_gpu_tables(book, v, head);
    const size_t sub = v ? book->v_sub : book->k_sub;
    if (row.vector == 2)
        kvq_gpu_search<D, 2>(rows, tables, sub, row.bits, codes);
    else if (row.vector == 4)
        kvq_gpu_search<D, 4>(rows, tables, sub, row.bits, codes);
    else
        kvq_gpu_search<D, 8>(rows, tables, sub, row.bits, codes);
}

#endif
