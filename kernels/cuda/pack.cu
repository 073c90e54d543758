// SPDX-License-Identifier: Apache-2.0
//
// Packing: a block of threads for each part of a unit, which is one span of tokens of K or of V of
// one KV head; any formats beside each other in a launch. The stages and their order are those of
// kernels/pack.c.
//
// Shared memory: 32 rows in which tokens are transformed; if a span is longer than that, its rows,
// of as many channels as there is room for; flags and norms.
#include "kernels/cuda/quant.h"

struct kvq_gpu_part {
    const kvq_gpu_unit &unit;
    const kvq_recipe &recipe;
    const kvq_recipe_side &side;
    bool v;
    uint32_t head, first, tokens; // first: within the block
    uint8_t *record;
    kvq_gpu_rows rows, span; // span: its rows; the same as `rows` if it has 32 tokens
    uint32_t width;          // channels of a row of the span
    gpu::smem flags;         // for each token: 1 if it stays raw
    gpu::smem inverse;       // of 32 norms
};

// ---- Tokens that stay raw ----

KVQ_DEVICE const kvq_outliers *kvq_gpu_pool(const kvq_gpu_part &p)
{
    const kvq_recipe &r = p.recipe;
    if (!r.outliers)
        return NULL;
    return (const kvq_outliers *)(p.unit.extras + (size_t)p.head * r.extras.record_bytes +
                                  r.extras.pool);
}

KVQ_DEVICE bool kvq_gpu_has_raw(const kvq_gpu_part &p)
{
    return p.unit.block_start + p.first < p.recipe.sink_tokens || p.recipe.outliers;
}

// The pool may have entries of later units as well, which are of other tokens.
KVQ_DEVICE void kvq_gpu_find_raw(const kvq_gpu_part &p)
{
    const kvq_outliers *pool = kvq_gpu_pool(p);
    const uint32_t t = gpu::thread();
    if (t >= p.tokens)
        return;
    const uint64_t position = p.unit.block_start + p.first + t;
    uint32_t raw = position < p.recipe.sink_tokens;
    for (uint32_t i = 0; pool && i < pool->count; i++)
        raw |= pool->position[i] == position;
    gpu::sts32(p.flags + 4 * t, raw);
}

// Sink tokens go to the extras.
template <int D> KVQ_DEVICE void kvq_gpu_keep_sinks(const kvq_gpu_part &p)
{
    const kvq_recipe &r = p.recipe;
    if (p.unit.block_start + p.first >= r.sink_tokens)
        return;
    uint8_t *to = p.unit.extras + (size_t)p.head * r.extras.record_bytes +
                  (p.v ? r.extras.sink_v : r.extras.sink_k) + p.first * 2 * D;
    const uint32_t left = r.sink_tokens - (uint32_t)(p.unit.block_start + p.first);
    const uint32_t n = (left < p.tokens ? left : p.tokens) * D / 2;
    for (uint32_t i = gpu::thread(); i < n; i += KVQ_GPU_CACHE_THREADS) {
        const uint8_t *from =
            p.unit.raw_block + kvq_raw_at(&r.raw, p.head, p.first + i / (D / 2), p.v);
        gpu::stg32(to + 4 * i, gpu::ldg32(from + 4 * (i % (D / 2))));
    }
}

// The mean of the span's tokens that do not stay raw, in place of those of 32 tokens from `from`
// on that do. Between syncs.
template <int D> KVQ_DEVICE void kvq_gpu_replace(const kvq_gpu_part &p, uint32_t from)
{
    for (uint32_t c = gpu::thread(); c < D; c += KVQ_GPU_CACHE_THREADS) {
        float mean = 0.0f;
        uint32_t others = 0;
        for (uint32_t t = 0; t < p.tokens; t++) {
            if (gpu::lds32(p.flags + 4 * t))
                continue;
            others++;
            const uint16_t *raw =
                kvq_gpu_raw_rows(p.recipe, p.unit.raw_block, p.head, p.first + t, p.v);
            mean += kvq__packable(gpu::ldg16(raw + c), p.recipe.dtype);
        }
        mean = others ? mean / (float)others : 0.0f;
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
            if (gpu::lds32(p.flags + 4 * (from + t)))
                kvq_gpu_put(kvq_gpu_at(p.rows, t, c), mean);
    }
    gpu::block_sync();
}

// ---- Norms of 32 tokens of K ----

// What norms are taken of, as in kernels/pack.c.
enum kvq_gpu_norm_stage { KVQ_GPU_GIVEN, KVQ_GPU_DIVIDED, KVQ_GPU_ROTATED };

KVQ_DEVICE kvq_gpu_norm_stage kvq_gpu_norm_stage_of(uint8_t scale)
{
    if (scale == KVQ_SCALE_L2_CROSS)
        return KVQ_GPU_GIVEN;
    return scale == KVQ_SCALE_L2_HEAD ? KVQ_GPU_DIVIDED : KVQ_GPU_ROTATED;
}

// A token's sum of squares over all heads, ascending, from the raw rows, or, of a placeholder,
// from its own row for every head.
template <int D>
KVQ_DEVICE float kvq_gpu_cross_squares(const kvq_gpu_part &p, uint32_t from, uint32_t t)
{
    const bool replaced = gpu::lds32(p.flags + 4 * (from + t));
    const uint32_t token = p.first + from + t;
    float total = 0.0f;
    for (uint32_t h = 0; h < p.recipe.kv_heads; h++) {
        const uint16_t *row = kvq_gpu_raw_rows(p.recipe, p.unit.raw_block, h, token, false);
        float sum = 0.0f;
        for (uint32_t c = kvq_gpu_team_lane(); c < D; c += KVQ_GPU_TEAM) {
            const float x = replaced ? kvq_gpu_get(kvq_gpu_at(p.rows, t, c))
                                     : kvq__packable(gpu::ldg16(row + c), p.recipe.dtype);
            sum += x * x;
        }
        total += kvq_gpu_team_sum(sum);
    }
    return total;
}

template <int D> KVQ_DEVICE float kvq_gpu_norm_of(const kvq_gpu_part &p, gpu::smem row)
{
    const bool most = p.recipe.k_token_scale == KVQ_SCALE_MAX;
    const gpu::smem at = row + 4 * kvq_gpu_team_lane();
    float x = 0.0f;
    if (p.recipe.k_token_scale == KVQ_SCALE_L2_HEAD)
        return sqrtf(kvq_gpu_team_squares(at, D));
    for (uint32_t j = 0; j < D; j += KVQ_GPU_TEAM) {
        const float own = fabsf(kvq_gpu_get(at + 4 * j));
        if (most)
            x = own > x ? own : x;
        else
            x += own;
    }
    return most ? kvq_gpu_team_most(x) : kvq_gpu_team_sum(x) / (float)D;
}

// If they are taken of rows at this stage. `from`: the first token, within the span.
template <int D>
KVQ_DEVICE void kvq_gpu_norms(const kvq_gpu_part &p, uint32_t from, kvq_gpu_norm_stage stage)
{
    const uint8_t scale = p.recipe.k_token_scale;
    if (p.v || scale == KVQ_SCALE_NONE || kvq_gpu_norm_stage_of(scale) != stage)
        return;
    const uint32_t group = (p.first + from) / KVQ_GROUP_TOKENS;
    uint16_t *norms = (uint16_t *)(kvq_packed_at(&p.recipe.layout, p.record, group).group +
                                   p.recipe.layout.k_norms);
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t t = kvq_gpu_team_token(i);
        const float norm = scale == KVQ_SCALE_L2_CROSS
                               ? sqrtf(kvq_gpu_cross_squares<D>(p, from, t))
                               : kvq_gpu_norm_of<D>(p, kvq_gpu_at(p.rows, t, 0));
        const uint16_t stored = kvq__stored_norm(norm);
        if (kvq_gpu_team_lane() == 0) {
            gpu::stg16(norms + t, stored);
            kvq_gpu_put(p.inverse + 4 * t, 1.0f / kvq__f16_to_f32(stored));
        }
    }
    gpu::block_sync();
}

template <int D> KVQ_DEVICE void kvq_gpu_divide_by_norms(const kvq_gpu_part &p)
{
    if (p.v || p.recipe.k_token_scale == KVQ_SCALE_NONE)
        return;
    for (uint32_t i = gpu::thread(); i < KVQ_GROUP_TOKENS * D; i += KVQ_GPU_CACHE_THREADS) {
        const gpu::smem at = kvq_gpu_at(p.rows, i / D, i % D);
        kvq_gpu_put(at, kvq_gpu_get(at) * kvq_gpu_get(p.inverse + 4 * (i / D)));
    }
    gpu::block_sync();
}

// ---- A span ----

// 32 tokens from `from` on, ready to be quantized.
template <int D> KVQ_DEVICE void kvq_gpu_prepare(const kvq_gpu_part &p, uint32_t from)
{
    const kvq_recipe &r = p.recipe;
    const uint16_t *raw = kvq_gpu_raw_rows(r, p.unit.raw_block, p.head, p.first + from, p.v);
    kvq_gpu_load_rows<D>(p.rows, raw, r.dtype, KVQ_GROUP_TOKENS);
    gpu::block_sync();
    if (kvq_gpu_has_raw(p))
        kvq_gpu_replace<D>(p, from);
    kvq_gpu_norms<D>(p, from, KVQ_GPU_GIVEN);
    if (!p.v)
        kvq_gpu_scale_channels<D>(r, p.unit.extras, p.unit.book, p.head, p.rows, false);
    kvq_gpu_norms<D>(p, from, KVQ_GPU_DIVIDED);
    kvq_gpu_rotate<D>(r, p.side.rotation, p.rows, false);
    kvq_gpu_norms<D>(p, from, KVQ_GPU_ROTATED);
    kvq_gpu_divide_by_norms<D>(p);
}

// Channels [c0, c0 + width) of the span's rows, transformed 32 tokens at a time.
template <int D> KVQ_DEVICE void kvq_gpu_fill_span(const kvq_gpu_part &p, uint32_t c0)
{
    for (uint32_t from = 0; from < p.tokens; from += KVQ_GROUP_TOKENS) {
        kvq_gpu_prepare<D>(p, from);
        if (p.span.at == p.rows.at)
            return;
        const uint32_t n = KVQ_GROUP_TOKENS * p.width;
        for (uint32_t i = gpu::thread(); i < n; i += KVQ_GPU_CACHE_THREADS) {
            const uint32_t t = i / p.width, c = i % p.width;
            gpu::sts32(kvq_gpu_at(p.span, from + t, c), gpu::lds32(kvq_gpu_at(p.rows, t, c0 + c)));
        }
        gpu::block_sync();
    }
}

template <int D> KVQ_DEVICE void kvq_gpu_pack_span(const kvq_gpu_part &p, uint32_t c0)
{
    const uint32_t group = p.first / KVQ_GROUP_TOKENS;
    kvq_gpu_parts at = kvq_gpu_parts_of(p.recipe, p.v, p.record, group);
    kvq_gpu_fill_span<D>(p, c0);
    if (p.side.row.codec == KVQ_CODEC_BOOK) {
        kvq_gpu_search_rows<D>(p.side.row, p.v, p.unit.book, p.head, p.rows, at.codes);
        return;
    }
    kvq_gpu_quantize_rows(p.side, p.v, D, p.span, c0, p.width, at);
    gpu::block_sync();
    for (uint32_t i = 0; i < p.tokens / KVQ_GROUP_TOKENS; i++) {
        const kvq_gpu_rows rows = {kvq_gpu_at(p.span, i * KVQ_GROUP_TOKENS, 0), p.span.stride};
        const kvq_gpu_codes codes = {rows, c0, p.width};
        uint8_t *planes = kvq_gpu_parts_of(p.recipe, p.v, p.record, group + i).codes;
        kvq_gpu_put_planes<D>(codes, p.v, p.side.row.bits, planes);
        if (p.side.row.wide)
            kvq_gpu_put_wide<D>(codes, planes + KVQ_GROUP_TOKENS * D * p.side.row.bits / 8);
    }
}

// A raw format's sealed block is the window's block: the same bytes.
template <int D> KVQ_DEVICE void kvq_gpu_copy_part(const kvq_gpu_part &p)
{
    for (uint32_t i = gpu::thread(); i < p.tokens * D / 8; i += KVQ_GPU_CACHE_THREADS) {
        const uint32_t at =
            kvq_raw_at(&p.recipe.raw, p.head, p.first + i / (D / 8), p.v) + 16 * (i % (D / 8));
        gpu::stg128(p.unit.packed_block + at, gpu::ldg128(p.unit.raw_block + at));
    }
}

// ---- The kernel ----

// The block's part of a unit. Shared memory is cut up as pack_shared of cache.c counts it.
template <int D> KVQ_DEVICE void kvq_gpu_pack_unit(const kvq_gpu_pack_args &a)
{
    const kvq_gpu_unit &unit = a.units[gpu::block_x() / a.parts];
    const uint32_t index = gpu::block_x() % a.parts, head = gpu::block_y();
    if (!unit.recipe || unit.recipe->dim != D || head >= unit.recipe->kv_heads ||
        !KVQ_GPU_GOES(unit))
        return;
    const kvq_recipe &r = *unit.recipe;
    const uint32_t of_k = r.unit_tokens / r.k.span;
    if (index >= kvq_recipe_parts(&r))
        return;
    const bool v = index >= of_k;
    const kvq_recipe_side &side = v ? r.v : r.k;
    const kvq_gpu_rows rows = {gpu::smem_start(), D + 1};
    const gpu::smem behind = rows.at + 4 * KVQ_GROUP_TOKENS * (D + 1);
    const uint32_t width = kvq_gpu_span_width(D, side.span);
    const bool apart = side.span > KVQ_GROUP_TOKENS;
    const gpu::smem flags = behind + (apart ? 4 * side.span * (width + 1) : 0);
    const kvq_gpu_rows span = {behind, width + 1};
    const kvq_gpu_part p = {unit,
                            r,
                            side,
                            v,
                            head,
                            unit.first + (v ? index - of_k : index) * side.span,
                            side.span,
                            unit.packed_block + (size_t)head * r.layout.record_bytes,
                            rows,
                            apart ? span : rows,
                            width,
                            flags,
                            flags + 4 * KVQ_BLOCK_TOKENS};
    if (r.is_raw) {
        kvq_gpu_copy_part<D>(p);
        return;
    }
    kvq_gpu_keep_sinks<D>(p);
    kvq_gpu_find_raw(p);
    for (uint32_t c0 = 0; c0 < D; c0 += width) {
        kvq_gpu_pack_span<D>(p, c0);
        gpu::block_sync();
    }
}

KVQ_KERNEL_FOR(kvq_gpu_pack_d64, kvq_gpu_pack_args, a, 128, 5)
{
    kvq_gpu_pack_unit<64>(a);
}

KVQ_KERNEL_FOR(kvq_gpu_pack_d128, kvq_gpu_pack_args, a, 128, 5)
{
    kvq_gpu_pack_unit<128>(a);
}

KVQ_KERNEL_FOR(kvq_gpu_pack_d256, kvq_gpu_pack_args, a, 128, 5)
{
    kvq_gpu_pack_unit<256>(a);
}
