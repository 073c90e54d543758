// SPDX-License-Identifier: Apache-2.0
//
// Reading caches back as fp32 in the engine's own basis: a block of threads for 32 tokens of one
// KV head. What is computed is that of kernels/read.c.
#include "kernels/cuda/quant.h"

// ---- From planes to values in shared memory ----

// Codes of one group to their tokens and channels.
template <int D>
KVQ_DEVICE void kvq_gpu_scatter(kvq_gpu_rows rows, bool v, uint32_t bits, const uint8_t *planes)
{
    for (uint32_t n = gpu::thread(); n < 2 * D; n += KVQ_GPU_CACHE_THREADS) {
        const kvq__place p = v ? kvq__v_place(bits, D, n) : kvq__k_place(bits, D, n);
        const uint32_t low = bits == 1 ? 0 : gpu::ldg32(planes + p.low);
        const uint32_t high = bits == 2 ? 0 : gpu::ldg32(planes + p.high);
        KVQ_UNROLL
        for (int i = 0; i < 4; i++) {
            KVQ_UNROLL
            for (int s = 0; s < 4; s++) {
                const kvq__cell c = v ? kvq__v_cell(&p, D, i, s) : kvq__k_cell(&p, i, s);
                gpu::sts32(kvq_gpu_at(rows, c.token, c.channel),
                           kvq__code_of(bits, kvq__cell_bit(i, s), p.odd, low, high));
            }
        }
    }
}

template <int D>
KVQ_DEVICE void kvq_gpu_scatter_bytes(kvq_gpu_rows rows, bool v, const uint8_t *planes)
{
    for (uint32_t n = gpu::thread(); n < 2 * D; n += KVQ_GPU_CACHE_THREADS) {
        const kvq__place p = v ? kvq__v_place(8, D, n) : kvq__k_place(8, D, n);
        for (int s = 0; s < 4; s++) {
            const uint32_t word = gpu::ldg32(planes + kvq__byte_word(D, p.low, s));
            for (int i = 0; i < 4; i++) {
                const kvq__cell c = v ? kvq__v_cell(&p, D, i, s) : kvq__k_cell(&p, i, s);
                gpu::sts32(kvq_gpu_at(rows, c.token, c.channel), word >> 8 * i & 0xff);
            }
        }
    }
}

struct kvq_gpu_side_bytes {
    const kvq_recipe_side &side;
    kvq_gpu_parts at;
    const float *tables; // codebooks: of the head
    size_t sub;
    bool v;
};

template <int D>
KVQ_DEVICE float kvq_gpu_book_value(const kvq_gpu_side_bytes &b, uint32_t t, uint32_t c)
{
    const uint32_t vector = b.side.row.vector, m = c / vector;
    const uint32_t code = kvq__book_code(b.at.codes, b.side.row.bits, D / vector, m, t);
    return b.tables[m * b.sub + code * vector + c % vector];
}

template <int D>
KVQ_DEVICE float kvq_gpu_scalar_value(const kvq_gpu_side_bytes &b, uint32_t t, uint32_t c,
                                      uint32_t code)
{
    const kvq_side &row = b.side.row;
    const bool wide = row.wide && c < D / 4;
    const uint32_t set = row.wide ? !wide : c / row.group;
    const uint32_t i = row.axis == KVQ_PER_CHANNEL ? c : kvq_gpu_token_slot(b.v, set, t);
    const float scale = fabsf(kvq__f16_to_f32(gpu::ldg16(b.at.scales + i)));
    if (row.codec == KVQ_CODEC_LLOYD) {
        const uint8_t *third = b.at.codes + KVQ_GROUP_TOKENS * D * row.bits / 8;
        if (wide)
            code |= (third[kvq__wide_byte(D, t, c)] >> c % 8 & 1u) << 2;
        return kvq__value(scale, b.side.levels[wide][code], 0.0f);
    }
    const float zero = b.at.zeros ? kvq__f16_to_f32(gpu::ldg16(b.at.zeros + i))
                                  : kvq__symmetric_zero(scale, row.bits);
    return kvq__value(scale, (float)code, zero);
}

// One side of a group, still in the transformed basis and without norms.
template <int D> KVQ_DEVICE void kvq_gpu_dequantize(const kvq_gpu_side_bytes &b, kvq_gpu_rows rows)
{
    const bool book = b.side.row.codec == KVQ_CODEC_BOOK;
    if (b.side.row.bits == 8 && !book)
        kvq_gpu_scatter_bytes<D>(rows, b.v, b.at.codes);
    else if (!book)
        kvq_gpu_scatter<D>(rows, b.v, b.side.row.bits, b.at.codes);
    gpu::block_sync();
    for (uint32_t i = gpu::thread(); i < KVQ_GROUP_TOKENS * D; i += KVQ_GPU_CACHE_THREADS) {
        const uint32_t t = i / D, c = i % D;
        const gpu::smem at = kvq_gpu_at(rows, t, c);
        kvq_gpu_put(at, book ? kvq_gpu_book_value<D>(b, t, c)
                             : kvq_gpu_scalar_value<D>(b, t, c, gpu::lds32(at)));
    }
    gpu::block_sync();
}

template <int D>
KVQ_DEVICE void kvq_gpu_apply_norms(const kvq_recipe &r, const uint8_t *group, kvq_gpu_rows rows)
{
    const uint16_t *norms = (const uint16_t *)(group + r.layout.k_norms);
    if (r.k_token_scale == KVQ_SCALE_NONE)
        return;
    for (uint32_t i = gpu::thread(); i < KVQ_GROUP_TOKENS * D; i += KVQ_GPU_CACHE_THREADS) {
        const gpu::smem at = kvq_gpu_at(rows, i / D, i % D);
        kvq_gpu_put(at, kvq_gpu_get(at) * kvq__f16_to_f32(gpu::ldg16(norms + i / D)));
    }
    gpu::block_sync();
}

// ---- 32 positions ----

struct kvq_gpu_piece {
    const kvq_gpu_read_job &job;
    const kvq_recipe &r;
    const kvq_page &page;
    uint64_t start;    // position of the first of the 32
    uint32_t head, at; // at: of the first, within the page
    uint32_t from, to; // of the 32, those that are asked for and held
    uint32_t packed;   // of the 32, those below packed_tokens
    kvq_gpu_rows rows;
    gpu::smem pooled; // for each of the 32: 1 + its row in the pool, or 0
};

KVQ_DEVICE const uint8_t *kvq_gpu_piece_extras(const kvq_gpu_piece &p)
{
    return p.job.extras + (size_t)p.head * p.r.extras.record_bytes;
}

KVQ_DEVICE void kvq_gpu_find_pooled(const kvq_gpu_piece &p)
{
    const uint32_t t = gpu::thread();
    uint32_t entry = 0;
    if (t >= KVQ_GROUP_TOKENS)
        return;
    if (p.r.outliers && p.job.extras) {
        const kvq_outliers *pool =
            (const kvq_outliers *)(kvq_gpu_piece_extras(p) + p.r.extras.pool);
        const uint32_t count = p.job.pool ? p.job.pool[p.head] : pool->count;
        for (uint32_t i = 0; i < count; i++)
            if (pool->position[i] == p.start + t)
                entry = 1 + i;
    }
    gpu::sts32(p.pooled + 4 * t, entry);
}

// A token's raw row; NULL if it is to be read packed.
template <int D>
KVQ_DEVICE const uint16_t *kvq_gpu_raw_row(const kvq_gpu_piece &p, uint32_t t, bool v)
{
    const kvq_recipe &r = p.r;
    const uint32_t pooled = gpu::lds32(p.pooled + 4 * t);
    const bool sink = p.start + t < r.sink_tokens;
    if (sink && t < p.packed)
        return (const uint16_t *)(kvq_gpu_piece_extras(p) +
                                  (v ? r.extras.sink_v : r.extras.sink_k)) +
               (p.start + t) * D;
    if (t >= p.packed || r.is_raw) {
        const uint8_t *block = r.is_raw && t < p.packed ? p.page.packed : p.page.raw;
        return kvq_gpu_raw_rows(r, block, p.head, p.at + t, v);
    }
    if (pooled)
        return (const uint16_t *)(kvq_gpu_piece_extras(p) +
                                  (v ? r.extras.pool_v : r.extras.pool_k)) +
               (pooled - 1) * D;
    return NULL;
}

// One side of the group, in the engine's basis.
template <int D> KVQ_DEVICE void kvq_gpu_read_group(const kvq_gpu_piece &p, bool v)
{
    uint8_t *record = (uint8_t *)p.page.packed + (size_t)p.head * p.r.layout.record_bytes;
    const uint32_t group = p.at / KVQ_GROUP_TOKENS;
    const kvq_recipe_side &side = v ? p.r.v : p.r.k;
    kvq_gpu_side_bytes b = {side, kvq_gpu_parts_of(p.r, v, record, group), NULL, 0, v};
    if (side.row.codec == KVQ_CODEC_BOOK) {
        b.tables = kvq_gpu_tables(p.job.book, v, p.head);
        b.sub = v ? p.job.book->v_sub : p.job.book->k_sub;
    }
    kvq_gpu_dequantize<D>(b, p.rows);
    if (!v)
        kvq_gpu_apply_norms<D>(p.r, kvq_packed_at(&p.r.layout, record, group).group, p.rows);
    kvq_gpu_rotate<D>(p.r, side.rotation, p.rows, true);
    if (!v)
        kvq_gpu_scale_channels<D>(p.r, p.job.extras, p.job.book, p.head, p.rows, true);
}

template <int D> KVQ_DEVICE void kvq_gpu_read_piece(const kvq_gpu_piece &p, bool v)
{
    float *out = (v ? p.job.v_out : p.job.k_out) +
                 ((size_t)p.head * p.job.n + (p.start + p.from - p.job.from)) * D;
    if (p.packed > p.from && !p.r.is_raw)
        kvq_gpu_read_group<D>(p, v);
    const uint32_t n = (p.to - p.from) * D;
    for (uint32_t i = gpu::thread(); i < n; i += KVQ_GPU_CACHE_THREADS) {
        const uint32_t t = p.from + i / D, c = i % D;
        const uint16_t *raw = kvq_gpu_raw_row<D>(p, t, v);
        const float x = raw ? kvq__from_raw(gpu::ldg16(raw + c), p.r.dtype)
                            : kvq_gpu_get(kvq_gpu_at(p.rows, t, c));
        gpu::stg32(out + i, gpu::as_bits(x));
    }
    gpu::block_sync();
}

// ---- The kernel ----

KVQ_DEVICE uint32_t kvq_gpu_clamp(uint64_t position, uint64_t start, uint32_t most)
{
    const uint64_t n = position > start ? position - start : 0;
    return n < most ? (uint32_t)n : most;
}

// Positions [start, start + 32) of a job's.
template <int D>
KVQ_DEVICE void kvq_gpu_read_32(const kvq_gpu_read_job &job, uint32_t head, uint64_t start)
{
    const uint64_t index = start / KVQ_BLOCK_TOKENS;
    if (index >= job.n_pages)
        return;
    const kvq_page &page = job.pages[index];
    const uint32_t at = start % KVQ_BLOCK_TOKENS;
    const uint32_t held = kvq_gpu_clamp(page.tokens, at, KVQ_GROUP_TOKENS);
    const uint32_t asked = kvq_gpu_clamp(job.from + job.n, start, KVQ_GROUP_TOKENS);
    const kvq_gpu_rows rows = {gpu::smem_start(), D + 1};
    const kvq_gpu_piece p = {job,
                             *job.recipe,
                             page,
                             start,
                             head,
                             at,
                             kvq_gpu_clamp(job.from, start, KVQ_GROUP_TOKENS),
                             asked < held ? asked : held,
                             kvq_gpu_clamp(page.packed_tokens, at, KVQ_GROUP_TOKENS),
                             rows,
                             rows.at + 4 * KVQ_GROUP_TOKENS * (D + 1)};
    if (p.from >= p.to)
        return;
    kvq_gpu_find_pooled(p);
    gpu::block_sync();
    kvq_gpu_read_piece<D>(p, false);
    kvq_gpu_read_piece<D>(p, true);
}

template <int D> KVQ_DEVICE void kvq_gpu_read_pieces(const kvq_gpu_read_args &a)
{
    const kvq_gpu_read_job &job = a.jobs[gpu::block_x() / a.heads];
    const uint32_t head = gpu::block_x() % a.heads;
    if (!job.recipe || job.recipe->dim != D || head >= job.recipe->kv_heads)
        return;
    const uint64_t first = job.from / KVQ_GROUP_TOKENS * KVQ_GROUP_TOKENS;
    const uint64_t step = (uint64_t)a.blocks * KVQ_GROUP_TOKENS;
    for (uint64_t start = first + (uint64_t)gpu::block_y() * KVQ_GROUP_TOKENS;
         start < job.from + job.n; start += step)
        kvq_gpu_read_32<D>(job, head, start);
}

KVQ_KERNEL_FOR(kvq_gpu_read_d64, kvq_gpu_read_args, a, 128, 5)
{
    kvq_gpu_read_pieces<64>(a);
}

KVQ_KERNEL_FOR(kvq_gpu_read_d128, kvq_gpu_read_args, a, 128, 5)
{
    kvq_gpu_read_pieces<128>(a);
}

KVQ_KERNEL_FOR(kvq_gpu_read_d256, kvq_gpu_read_args, a, 128, 5)
{
    kvq_gpu_read_pieces<256>(a);
}
