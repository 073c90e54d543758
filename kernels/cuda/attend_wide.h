// SPDX-License-Identifier: Apache-2.0
//
// The wide attention kernels, for up to 64 M query rows: prefill over a cached prefix, and more
// query heads to a KV head than the narrow kernels take. Queries are the M side of matrix products,
// 16 rows of each 64 to a warp:
//
//   logits   S[row][token]   = Q K^T
//   output   O[row][channel] = P V
//
// Step by step each of the four warps brings a tile of 16 tokens into shared memory, dequantized or
// raw as in attend_any.h and attend_raw.h, and attends with its rows to the tiles of all four; so a
// block is unpacked once for all rows. There are two stages where there is room: then the next
// step's tiles are brought while warps that are ahead attend to this one's. First all packed
// tokens, then, after values are rotated back, all raw ones; running maxima, sums and output stay
// with the warp all the way.
//
// A logit is s (the product times the token's norm) times the row's factor, which goes into the
// exponent's multiply-add. Masks and the soft-cap cost what they cost only in steps that need them.
#ifndef KVQ_KERNELS_CUDA_ATTEND_WIDE_H
#define KVQ_KERNELS_CUDA_ATTEND_WIDE_H

#include "kernels/cuda/attend_any.h"
#include "kernels/cuda/attend_raw.h"

// Shared memory, as struct kvq_gpu_room has it where names are the same. Queries are those of the
// phase; the stages and, after them, the output take turns. The rest of bf16 queries takes the
// second stage's place.
template <int D, int M> struct kvq_gpu_wide_room {
    typedef kvq_gpu_tile_room<D> T;
    static constexpr int ROWS = 64 * M;
    static constexpr bool TWO = D < 256;                       // stages
    static constexpr int TILES = D == 256 ? 2 : KVQ_GPU_WARPS; // attended to at once: registers
    static constexpr int RANGES = 0;
    static constexpr int OWNERS = RANGES + 8 * ROWS;
    static constexpr int PLACES = OWNERS + 8 * ROWS;
    static constexpr int FACTORS = PLACES + 16 * ROWS;
    static constexpr int STATE = FACTORS + 8 * ROWS;
    static constexpr int LAST = STATE + 8 * ROWS;
    static constexpr int HERE = LAST + 4 * ROWS;
    static constexpr int POOLED = HERE + 96;
    static constexpr int VOTES = POOLED + 256; // [warp] how many tiles
    static constexpr int KINDS = VOTES + 32;   // [stage][warp] whether the tile needs masks
    static constexpr int NOW = VOTES + 64;     // kvq_gpu_put_now
    static constexpr int PACKED = NOW + 32;
    static constexpr int LIST_BYTES = 16 * (KVQ_GPU_RUN_BLOCKS + KVQ_GPU_STAGES - 1);
    static constexpr int RAW = PACKED + KVQ_GPU_WARPS * LIST_BYTES;
    static constexpr int WHOLE = RAW + KVQ_GPU_WARPS * KVQ_GPU_RAW_TILES * 8; // kvq_gpu_list_whole
    static constexpr int RAW_END = WHOLE + KVQ_GPU_WARPS * 2 * KVQ_GPU_RUN_BLOCKS * 8;
    static constexpr int QUERIES = (RAW_END + 127) / 128 * 128;
    static constexpr int PACKED_QUERIES = QUERIES;
    static constexpr int QUERY_BYTES = ROWS * 2 * D;
    static constexpr int STAGES = QUERIES + QUERY_BYTES;
    static constexpr int STAGE_BYTES = KVQ_GPU_WARPS * T::BYTES;
    static constexpr int REST = STAGES + STAGE_BYTES;
    static constexpr int OUT = STAGES;
    static constexpr int BYTES = REST + (TWO ? STAGE_BYTES : QUERY_BYTES);
    static_assert(QUERY_BYTES <= STAGE_BYTES, "the rest of the queries fits a stage");
    static_assert(OUT + ROWS * D * 4 <= BYTES, "the output fits the stages");
};

// A warp's rows; lane = 4 g + j has rows 64 m + 16 warp + g + 8 i as [m][i].
template <int D, int M> struct kvq_gpu_rows {
    float m[M][2], l[M][2]; // l: this lane's part until the end
    float o[M][D / 8][4];   // channels 8 t + 2 j and the next: row g, row g + 8
};

// What steps need of a phase.
struct kvq_gpu_phase {
    int most, own; // steps that any warp has tiles for, and this one
    bool packed, pool;
    bool two;   // stages
    bool twice; // what bf16 leaves of queries and weights is multiplied, too
};

KVQ_DEVICE int kvq_gpu_wide_row(int m, int i)
{
    return 64 * m + 16 * gpu::warp() + (gpu::lane() >> 2) + 8 * i;
}

// The most tiles that any warp has of them. All threads.
template <class R> KVQ_DEVICE int kvq_gpu_most_tiles(int own)
{
    const gpu::smem votes = gpu::smem_start() + R::VOTES;
    gpu::block_sync(); // nobody reads the votes before any more
    if (gpu::lane() == 0)
        gpu::sts32(votes + 4 * gpu::warp(), (uint32_t)own);
    gpu::block_sync();
    int most = 0;
    for (int w = 0; w < KVQ_GPU_WARPS; w++)
        most = kvq_gpu_max(most, (int)gpu::lds32(votes + 4 * w));
    return most;
}

template <int D, int M> KVQ_DEVICE void kvq_gpu_rows_start(kvq_gpu_rows<D, M> &r)
{
    r = {};
    for (int i = 0; i < 2 * M; i++)
        r.m[i >> 1][i & 1] = KVQ_GPU_NOTHING;
}

template <class R>
KVQ_DEVICE kvq_gpu_phase kvq_gpu_phase_of(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                          const kvq_gpu_part &part, bool packed)
{
    const bool bf16 = !packed && a.recipe.dtype == KVQ_BF16;
    kvq_gpu_phase p;
    p.own = packed ? 2 * part.packed_end : part.raw_end;
    p.most = kvq_gpu_most_tiles<R>(p.own);
    p.packed = packed;
    p.pool = part.pool;
    p.twice = bf16 && (h.session->q.dtype != KVQ_BF16 || h.session->out_dtype != KVQ_BF16);
    p.two = R::TWO && !p.twice;
    return p;
}

// What steps need of the item, which is kept in shared memory, for want of registers.
template <class R> KVQ_DEVICE void kvq_gpu_put_now(const kvq_gpu_here &h)
{
    const kvq_gpu_sight sight = kvq_gpu_sight_of<R>(h);
    const uint64_t session = (uint64_t)(uintptr_t)h.session;
    const gpu::u32x4 item = {{(uint32_t)session, (uint32_t)(session >> 32), (uint32_t)h.start,
                              (uint32_t)(h.start >> 32)}};
    const gpu::u32x4 rest = {{(uint32_t)sight.full_from, (uint32_t)sight.full_to, h.item.head, 0}};
    if (gpu::thread() == 0) {
        gpu::sts128(gpu::smem_start() + R::NOW, item);
        gpu::sts128(gpu::smem_start() + R::NOW + 16, rest);
    }
}

template <class R> KVQ_DEVICE kvq_gpu_here kvq_gpu_get_now(kvq_gpu_sight *sight)
{
    const gpu::u32x4 item = gpu::lds128(gpu::smem_start() + R::NOW);
    const gpu::u32x4 rest = gpu::lds128(gpu::smem_start() + R::NOW + 16);
    const uint64_t session = item.v[0] | (uint64_t)item.v[1] << 32;
    kvq_gpu_here h = {};
    h.session = (const kvq_gpu_session *)(uintptr_t)session;
    h.start = item.v[2] | (uint64_t)item.v[3] << 32;
    h.item.head = (uint16_t)rest.v[2];
    sight->full_from = (int)rest.v[0];
    sight->full_to = (int)rest.v[1];
    return h;
}

// ---- Tiles ----

// A tile of a warp that has none left.
template <int D> KVQ_DEVICE void kvq_gpu_empty_tile(gpu::smem tile)
{
    typedef kvq_gpu_tile_room<D> T;
    const gpu::u32x4 zeros = {{0, 0, 0, 0}};
    for (int at = 16 * gpu::lane(); at < T::RELS; at += 16 * gpu::WARP)
        gpu::sts128(tile + at, zeros);
    if (gpu::lane() < KVQ_GPU_TILE_TOKENS) {
        gpu::sts32(tile + T::RELS + 4 * gpu::lane(), ~0u);
        gpu::sts32(tile + T::NORMS + 4 * gpu::lane(), 0);
    }
}

// Whether raw tile i is not seen as a whole by every row.
template <class R> KVQ_DEVICE bool kvq_gpu_raw_partly(const kvq_gpu_sight &sight, int i)
{
    const gpu::u32x2 entry =
        gpu::lds64(gpu::smem_start() + R::RAW + 8 * (gpu::warp() * KVQ_GPU_RAW_TILES + i));
    const int rel = (int)entry.v[1];
    return entry.v[0] != 0xffff || rel < sight.full_from ||
           rel + KVQ_GPU_TILE_TOKENS > sight.full_to;
}

// Where K's rows begin of raw tiles that lie in one block of raw rows as a whole; 0 of others,
// which are found row by row: also of packed sinks, whose V is not where a raw block has it.
template <int D, class R>
KVQ_DEVICE void kvq_gpu_list_whole(const kvq_gpu_attend_args &a, const kvq_gpu_here &h, int tiles)
{
    const gpu::smem raw = gpu::smem_start() + R::RAW + 8 * gpu::warp() * KVQ_GPU_RAW_TILES;
    const gpu::smem whole = gpu::smem_start() + R::WHOLE + 8 * gpu::warp() * 2 * KVQ_GPU_RUN_BLOCKS;
    for (int i = gpu::lane(); i < tiles; i += gpu::WARP) {
        const gpu::u32x2 entry = gpu::lds64(raw + 8 * i);
        const uint64_t position = h.start + entry.v[1];
        const kvq_page page = kvq_gpu_page_at(*h.session, position);
        uint64_t at = 0;
        if (entry.v[0] == 0xffff &&
            (a.recipe.is_raw || position % KVQ_BLOCK_TOKENS >= page.packed_tokens) &&
            !kvq_gpu_is_fresh(*h.session, position + KVQ_GPU_TILE_TOKENS - 1)) {
            const kvq_gpu_source first = kvq_gpu_source_of<D>(a, h, position, false);
            const kvq_gpu_source last =
                kvq_gpu_source_of<D>(a, h, position + KVQ_GPU_TILE_TOKENS - 1, false);
            at = (uint64_t)(uintptr_t)first.at;
            if (first.kind != KVQ_GPU_COPIED ||
                last.at != first.at + (KVQ_GPU_TILE_TOKENS - 1) * 2 * D)
                at = 0;
        }
        gpu::sts32(whole + 8 * i, (uint32_t)at);
        gpu::sts32(whole + 8 * i + 4, (uint32_t)(at >> 32));
    }
    gpu::warp_sync();
}

// Starts copying such a tile's rows.
template <int D>
KVQ_DEVICE void kvq_gpu_copy_whole(const kvq_recipe &recipe, uint64_t at, gpu::smem tile)
{
    constexpr int CHUNKS = D / 8, ROWS_AT_ONCE = gpu::WARP / CHUNKS;
    const int own = gpu::lane() / CHUNKS, chunk = gpu::lane() % CHUNKS;
    const uint8_t *k = (const uint8_t *)(uintptr_t)at + own * 2 * D + 16 * chunk;
    const uint8_t *v =
        k + (kvq_raw_at(&recipe.raw, 0, 0, true) - kvq_raw_at(&recipe.raw, 0, 0, false));
    KVQ_UNROLL
    for (int r = 0; r < KVQ_GPU_TILE_TOKENS; r += ROWS_AT_ONCE) {
        gpu::copy16(kvq_gpu_chunk<D>(tile, r + own, chunk), k + r * 2 * D, true);
        gpu::copy16(kvq_gpu_chunk<D>(tile, KVQ_GPU_TILE_TOKENS + r + own, chunk), v + r * 2 * D,
                    true);
    }
    gpu::copy_commit();
}

// Rel and norm of a raw tile's tokens that are all there.
template <int D> KVQ_DEVICE void kvq_gpu_label_whole(uint32_t rel, gpu::smem tile)
{
    typedef kvq_gpu_tile_room<D> T;
    if (gpu::lane() < KVQ_GPU_TILE_TOKENS) {
        gpu::sts32(tile + T::RELS + 4 * gpu::lane(), rel + (uint32_t)gpu::lane());
        kvq_gpu_put_float(tile + T::NORMS + 4 * gpu::lane(), 1);
    }
}

// Brings raw tile i of the warp's; whether it is not seen as a whole by every row.
template <int D, class R>
KVQ_DEVICE bool kvq_gpu_bring_raw(const kvq_gpu_attend_args &a, const kvq_gpu_phase &p, int i,
                                  gpu::smem tile)
{
    const gpu::smem warp = gpu::smem_start() + 8 * gpu::warp() * 2 * KVQ_GPU_RUN_BLOCKS;
    const bool pooled = p.pool && i == p.own - 1;
    gpu::u32x2 whole = {{0, 0}};
    if (!pooled)
        whole = gpu::lds64(warp + R::WHOLE + 8 * i);
    kvq_gpu_sight sight;
    const kvq_gpu_here h = kvq_gpu_get_now<R>(&sight);
    if (whole.v[0] | whole.v[1]) {
        const gpu::u32x2 entry =
            gpu::lds64(gpu::smem_start() + R::RAW + 8 * (gpu::warp() * KVQ_GPU_RAW_TILES + i));
        kvq_gpu_copy_whole<D>(a.recipe, whole.v[0] | (uint64_t)whole.v[1] << 32, tile);
        kvq_gpu_label_whole<D>(entry.v[1], tile);
    } else {
        const kvq_gpu_part part = {0, 0, 0, p.own, p.pool};
        kvq_gpu_fetch_raw<D, R>(a, h, part, i, tile);
    }
    return pooled || kvq_gpu_raw_partly<R>(sight, i);
}

// Brings the warp's tile of a step into a stage.
template <int D, int M>
KVQ_DEVICE void kvq_gpu_wide_bring(const kvq_gpu_attend_args &a, const kvq_gpu_phase &p,
                                   bool packed, int step, int stage)
{
    typedef kvq_gpu_wide_room<D, M> R;
    const gpu::smem tile = gpu::smem_start() + R::STAGES + stage * R::STAGE_BYTES +
                           gpu::warp() * kvq_gpu_tile_room<D>::BYTES;
    bool partly = true;
    if (step >= p.own) {
        kvq_gpu_empty_tile<D>(tile);
    } else if (packed) {
        kvq_gpu_sight sight;
        const kvq_gpu_here h = kvq_gpu_get_now<R>(&sight);
        partly = kvq_gpu_bring_packed<D, R>(a, h, step, tile);
    } else {
        partly = kvq_gpu_bring_raw<D, R>(a, p, step, tile);
    }
    if (gpu::lane() == 0)
        gpu::sts32(gpu::smem_start() + R::KINDS + 16 * stage + 4 * gpu::warp(), partly);
}

// ---- Attention to a step's tiles ----

// s[m][2 w + n][2 i + e]: row g + 8 i, token 8 n + 2 j + e of the tile of warp first + w; `queries`
// times K.
template <int D, int M, bool BF16>
KVQ_DEVICE void kvq_gpu_wide_products(gpu::smem queries, gpu::smem tiles,
                                      float s[M][2 * kvq_gpu_wide_room<D, M>::TILES][4])
{
    typedef kvq_gpu_wide_room<D, M> R;
    typedef kvq_gpu_tile_room<D> T;
    const int matrix = gpu::lane() >> 3, row = gpu::lane() & 7;
    KVQ_UNROLL
    for (int c = 0; c < D / 16; c++) {
        uint32_t q[M][4];
        KVQ_UNROLL
        for (int m = 0; m < M; m++)
            gpu::ldmatrix(q[m], kvq_gpu_chunk<D>(queries + 64 * m * 2 * D, row + 8 * (matrix & 1),
                                                 2 * c + (matrix >> 1)));
        KVQ_UNROLL
        for (int w = 0; w < R::TILES; w++) {
            uint32_t k[4];
            gpu::ldmatrix(k, kvq_gpu_chunk<D>(tiles + w * T::BYTES + T::K, row + 8 * (matrix >> 1),
                                              2 * c + (matrix & 1)));
            KVQ_UNROLL
            for (int m = 0; m < M; m++) {
                kvq_gpu_mma<BF16>(s[m][2 * w], q[m], k[0], k[1]);
                kvq_gpu_mma<BF16>(s[m][2 * w + 1], q[m], k[2], k[3]);
            }
        }
    }
}

// Times the tokens' norms.
template <int D, int M>
KVQ_DEVICE void kvq_gpu_wide_norms(gpu::smem tiles,
                                   float s[M][2 * kvq_gpu_wide_room<D, M>::TILES][4])
{
    typedef kvq_gpu_tile_room<D> T;
    KVQ_UNROLL
    for (int n = 0; n < 2 * kvq_gpu_wide_room<D, M>::TILES; n++) {
        const gpu::u32x2 norms = gpu::lds64(tiles + n / 2 * T::BYTES + T::NORMS +
                                            4 * (8 * (n & 1) + 2 * (gpu::lane() & 3)));
        KVQ_UNROLL
        for (int x = 0; x < 4 * M; x++)
            s[x >> 2][n][x & 3] *= gpu::as_float(norms.v[x & 1]);
    }
}

// -inf where the row does not see the token.
template <int D, int M>
KVQ_DEVICE void kvq_gpu_wide_mask(gpu::smem tiles,
                                  float s[M][2 * kvq_gpu_wide_room<D, M>::TILES][4])
{
    typedef kvq_gpu_wide_room<D, M> R;
    typedef kvq_gpu_tile_room<D> T;
    KVQ_UNROLL
    for (int x = 0; x < 2 * M; x++) {
        const int m = x >> 1, i = x & 1;
        const gpu::u32x2 range =
            gpu::lds64(gpu::smem_start() + R::RANGES + 8 * kvq_gpu_wide_row(m, i));
        KVQ_UNROLL
        for (int n = 0; n < 2 * R::TILES; n++) {
            const gpu::u32x2 rels = gpu::lds64(tiles + n / 2 * T::BYTES + T::RELS +
                                               4 * (8 * (n & 1) + 2 * (gpu::lane() & 3)));
            for (int e = 0; e < 2; e++)
                if ((int)rels.v[e] < (int)range.v[0] || (int)rels.v[e] >= (int)range.v[1])
                    s[m][n][2 * i + e] = -INFINITY;
        }
    }
}

// Raises the running maxima that a logit passes by more than 2^KVQ_GPU_GROWTH.
template <int D, int M>
KVQ_DEVICE void kvq_gpu_wide_raise(kvq_gpu_rows<D, M> &r, const float factor[M][2],
                                   const float s[M][2 * kvq_gpu_wide_room<D, M>::TILES][4])
{
    float most[M][2];
    bool some = false;
    KVQ_UNROLL
    for (int x = 0; x < 2 * M; x++) {
        const int m = x >> 1, i = x & 1;
        float y = fmaxf(s[m][0][2 * i], s[m][0][2 * i + 1]);
        for (int n = 1; n < 2 * kvq_gpu_wide_room<D, M>::TILES; n++)
            y = fmaxf(y, fmaxf(s[m][n][2 * i], s[m][n][2 * i + 1]));
        for (int d = 1; d < 4; d *= 2)
            y = fmaxf(y, gpu::shuffle_xor(y, d));
        most[m][i] = y * factor[m][i];
        some |= kvq_gpu_passes(most[m][i], r.m[m][i]);
    }
    if (!gpu::any(some))
        return;
    KVQ_UNROLL
    for (int x = 0; x < 2 * M; x++) {
        const int m = x >> 1, i = x & 1;
        const float now = kvq_gpu_passes(most[m][i], r.m[m][i]) ? most[m][i] : r.m[m][i];
        const float shrink = gpu::power2(r.m[m][i] - now);
        r.m[m][i] = now;
        r.l[m][i] *= shrink;
        for (int t = 0; t < D / 8; t++) {
            r.o[m][t][2 * i] *= shrink;
            r.o[m][t][2 * i + 1] *= shrink;
        }
    }
}

// What the rows' logits are multiplied with. A factor of 0 would make NaN of what is not seen.
template <class R, int M> KVQ_DEVICE void kvq_gpu_wide_factors(bool packed, float factor[M][2])
{
    const float least = 1e-37f;
    const gpu::smem at = gpu::smem_start() + R::FACTORS + (packed ? 4 : 0);
    KVQ_UNROLL
    for (int x = 0; x < 2 * M; x++)
        factor[x >> 1][x & 1] =
            fmaxf(least, kvq_gpu_get_float(at + 8 * kvq_gpu_wide_row(x >> 1, x & 1)));
}

// The soft-cap's logits, to be multiplied with nothing else.
template <int M, int N>
KVQ_DEVICE void kvq_gpu_wide_caps(float cap, float factor[M][2], float s[M][N][4])
{
    KVQ_UNROLL
    for (int x = 0; x < 4 * M; x++)
        for (int n = 0; n < N; n++)
            s[x >> 2][n][x & 3] =
                kvq_gpu_cap(cap, s[x >> 2][n][x & 3] * factor[x >> 2][x >> 1 & 1]);
    for (int x = 0; x < 2 * M; x++)
        factor[x >> 1][x & 1] = 1;
}

// Adds the values of a tile with weights p.
template <int D, int M, bool BF16>
KVQ_DEVICE void kvq_gpu_wide_values(kvq_gpu_rows<D, M> &r, gpu::smem tile, const uint32_t p[M][4])
{
    const int matrix = gpu::lane() >> 3, row = gpu::lane() & 7;
    KVQ_UNROLL
    for (int c = 0; c < D / 8; c += 2) {
        uint32_t v[4];
        gpu::ldmatrix_trans(v, kvq_gpu_chunk<D>(tile + kvq_gpu_tile_room<D>::V,
                                                row + 8 * (matrix & 1), c + (matrix >> 1)));
        KVQ_UNROLL
        for (int m = 0; m < M; m++) {
            kvq_gpu_mma<BF16>(r.o[m][c], p[m], v[0], v[1]);
            kvq_gpu_mma<BF16>(r.o[m][c + 1], p[m], v[2], v[3]);
        }
    }
}

// The weights of a tile as its products' operand: row g, row g + 8; then tokens from 8 on. `rest`:
// what bf16 leaves of them.
template <bool BF16>
KVQ_DEVICE void kvq_gpu_wide_weights(const float (*s)[4], bool rest, uint32_t p[4])
{
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) {
        const float lo = s[i >> 1][2 * (i & 1)], hi = s[i >> 1][2 * (i & 1) + 1];
        p[i] = BF16 ? gpu::pack2_bf16(lo, hi) : gpu::pack2(lo, hi);
        if (rest)
            p[i] = gpu::pack2_bf16(lo - gpu::as_float(p[i] << 16),
                                   hi - gpu::as_float(p[i] & 0xffff0000u));
    }
}

// Attends to TILES of a step's tiles.
template <int D, int M, bool BF16, bool TWICE>
KVQ_DEVICE void kvq_gpu_wide_some(kvq_gpu_rows<D, M> &r, const kvq_gpu_phase &p, float cap,
                                  gpu::smem tiles, bool partly)
{
    typedef kvq_gpu_wide_room<D, M> R;
    const gpu::smem queries = gpu::smem_start() + R::QUERIES + 16 * gpu::warp() * 2 * D;
    float s[M][2 * R::TILES][4] = {}, factor[M][2];
    KVQ_NO_UNROLL
    for (int rest = 0; rest < (TWICE ? 2 : 1); rest++)
        kvq_gpu_wide_products<D, M, BF16>(queries + rest * (R::REST - R::QUERIES), tiles, s);
    if (p.packed)
        kvq_gpu_wide_norms<D, M>(tiles, s);
    kvq_gpu_wide_factors<R, M>(p.packed, factor);
    if (cap != 0)
        kvq_gpu_wide_caps<M, 2 * R::TILES>(cap, factor, s);
    if (partly)
        kvq_gpu_wide_mask<D, M>(tiles, s);
    kvq_gpu_wide_raise<D, M>(r, factor, s);
    KVQ_UNROLL
    for (int n = 0; n < 2 * R::TILES; n++)
        for (int x = 0; x < 4 * M; x++) {
            const int m = x >> 2, i = x >> 1 & 1;
            float &weight = s[m][n][x & 3];
            weight = gpu::power2(fmaf(weight, factor[m][i], -r.m[m][i]));
            r.l[m][i] += weight;
        }
    KVQ_UNROLL
    for (int w = 0; w < R::TILES; w++) {
        const gpu::smem tile = tiles + w * kvq_gpu_tile_room<D>::BYTES;
        KVQ_NO_UNROLL
        for (int rest = 0; rest < (TWICE ? 2 : 1); rest++) {
            uint32_t weights[M][4];
            for (int m = 0; m < M; m++)
                kvq_gpu_wide_weights<BF16>(s[m] + 2 * w, TWICE && rest, weights[m]);
            kvq_gpu_wide_values<D, M, BF16>(r, tile, weights);
        }
    }
}

template <int D, int M, bool BF16, bool TWICE>
KVQ_DEVICE void kvq_gpu_wide_attend(kvq_gpu_rows<D, M> &r, const kvq_gpu_phase &p, float cap,
                                    int stage)
{
    typedef kvq_gpu_wide_room<D, M> R;
    const gpu::u32x4 kinds = gpu::lds128(gpu::smem_start() + R::KINDS + 16 * stage);
    const bool partly = (kinds.v[0] | kinds.v[1] | kinds.v[2] | kinds.v[3]) != 0;
    const gpu::smem tiles = gpu::smem_start() + R::STAGES + stage * R::STAGE_BYTES;
    KVQ_UNROLL
    for (int first = 0; first < KVQ_GPU_WARPS; first += R::TILES)
        kvq_gpu_wide_some<D, M, BF16, TWICE>(r, p, cap, tiles + first * kvq_gpu_tile_room<D>::BYTES,
                                             partly);
}

// ---- Sums ----

// The output to shared memory, or back from there. Between two syncs of the block.
template <int D, int M> KVQ_DEVICE gpu::smem kvq_gpu_rows_at(int m, int i)
{
    return gpu::smem_start() + kvq_gpu_wide_room<D, M>::OUT +
           4 * (kvq_gpu_wide_row(m, i) * D + 2 * (gpu::lane() & 3));
}

template <int D, int M> KVQ_DEVICE void kvq_gpu_rows_put(const kvq_gpu_rows<D, M> &r)
{
    KVQ_UNROLL
    for (int m = 0; m < M; m++)
        for (int t = 0; t < D / 8; t++)
            for (int x = 0; x < 4; x++)
                kvq_gpu_put_float(kvq_gpu_rows_at<D, M>(m, x >> 1) + 4 * (8 * t + (x & 1)),
                                  r.o[m][t][x]);
}

template <int D, int M> KVQ_DEVICE void kvq_gpu_rows_get(kvq_gpu_rows<D, M> &r)
{
    KVQ_UNROLL
    for (int m = 0; m < M; m++)
        for (int t = 0; t < D / 8; t++)
            for (int x = 0; x < 4; x++)
                r.o[m][t][x] =
                    kvq_gpu_get_float(kvq_gpu_rows_at<D, M>(m, x >> 1) + 4 * (8 * t + (x & 1)));
}

// Rotates the warp's sums of packed values back.
template <int D, int M>
KVQ_DEVICE void kvq_gpu_rows_rotate(const kvq_gpu_attend_args &a, kvq_gpu_rows<D, M> &r)
{
    typedef kvq_gpu_wide_room<D, M> R;
    kvq_gpu_rows_put<D, M>(r);
    gpu::warp_sync();
    KVQ_UNROLL_BY(2)
    for (int i = 0; i < 16 * M; i++) {
        const int row = 64 * (i / 16) + 16 * gpu::warp() + i % 16;
        const gpu::smem out = gpu::smem_start() + R::OUT + 4 * row * D;
        float x[D / 32];
        KVQ_UNROLL
        for (int k = 0; k < D / 32; k++)
            x[k] = kvq_gpu_get_float(out + 4 * (64 * (k >> 1) + 2 * gpu::lane() + (k & 1)));
        kvq_gpu_rotate<D>(a.recipe, a.recipe.v.rotation, x, true);
        KVQ_UNROLL
        for (int k = 0; k < D / 32; k++)
            kvq_gpu_put_float(out + 4 * (64 * (k >> 1) + 2 * gpu::lane() + (k & 1)), x[k]);
    }
    gpu::warp_sync();
    kvq_gpu_rows_get<D, M>(r);
    gpu::block_sync(); // the stages take the place of the output again
}

// Where kvq_gpu_wide_hand_over looks for them.
template <int D, int M> KVQ_DEVICE void kvq_gpu_rows_end(kvq_gpu_rows<D, M> &r)
{
    typedef kvq_gpu_wide_room<D, M> R;
    kvq_gpu_rows_put<D, M>(r);
    for (int x = 0; x < 2 * M; x++) {
        const int m = x >> 1, i = x & 1;
        const gpu::smem state = gpu::smem_start() + R::STATE + 8 * kvq_gpu_wide_row(m, i);
        for (int d = 1; d < 4; d *= 2)
            r.l[m][i] += gpu::shuffle_xor(r.l[m][i], d);
        if ((gpu::lane() & 3) == 0) {
            kvq_gpu_put_float(state, r.m[m][i]);
            kvq_gpu_put_float(state + 4, r.l[m][i]);
        }
    }
}

// Hands over the sums, rows by warp.
template <int D, int M>
KVQ_DEVICE void kvq_gpu_wide_hand_over(const kvq_gpu_attend_args &a, const kvq_gpu_here &h)
{
    typedef kvq_gpu_wide_room<D, M> R;
    const gpu::smem smem = gpu::smem_start();
    KVQ_NO_UNROLL
    for (int row = gpu::warp(); row < h.rows; row += KVQ_GPU_WARPS) {
        const gpu::u32x2 ml = gpu::lds64(smem + R::STATE + 8 * row);
        float o[D / 32];
        KVQ_UNROLL
        for (int i = 0; i < D / 32; i++)
            o[i] = kvq_gpu_get_float(smem + R::OUT + 4 * row * D +
                                     4 * (64 * (i >> 1) + 2 * gpu::lane() + (i & 1)));
        kvq_gpu_hand_over<D, R>(a, h, 0, row, gpu::as_float(ml.v[0]), gpu::as_float(ml.v[1]), o);
    }
}

// ---- Phases ----

// All steps of a phase. With two stages a step's tiles are brought before the last step's are
// attended to, else before its own are. In the end nobody uses the stages any more.
template <int D, int M, bool BF16, bool TWICE>
KVQ_DEVICE void kvq_gpu_wide_steps(const kvq_gpu_attend_args &a, const kvq_gpu_phase &p,
                                   kvq_gpu_rows<D, M> &r)
{
    const int behind = p.two; // steps
    KVQ_NO_UNROLL
    for (int step = 0; step < p.most + behind; step++) {
        gpu::copy_wait<0>();
        gpu::block_sync(); // the last step's tiles are there, and all have left those before
        if (step < p.most)
            kvq_gpu_wide_bring<D, M>(a, p, !BF16 && p.packed, step, step & behind);
        if (!p.two) {
            gpu::copy_wait<0>();
            gpu::block_sync();
        }
        if (step >= behind)
            kvq_gpu_wide_attend<D, M, BF16, TWICE>(r, p, a.cap, (step - behind) & behind);
    }
    gpu::block_sync();
}

// Brings a phase's queries and attends to its tiles. All threads.
template <int D, int M>
KVQ_DEVICE void kvq_gpu_wide_phase(const kvq_gpu_attend_args &a, const kvq_gpu_here &h,
                                   const kvq_gpu_part &part, bool packed, kvq_gpu_rows<D, M> &r)
{
    typedef kvq_gpu_wide_room<D, M> R;
    const kvq_gpu_phase p = kvq_gpu_phase_of<R>(a, h, part, packed);
    if (p.most == 0)
        return;
    kvq_gpu_bring_queries<D, R, 4>(a, h, !packed, packed);
    if (!packed)
        kvq_gpu_list_whole<D, R>(a, h, p.own - p.pool);
    gpu::block_sync();
    if (!packed && a.recipe.dtype == KVQ_BF16)
        p.twice ? kvq_gpu_wide_steps<D, M, true, true>(a, p, r)
                : kvq_gpu_wide_steps<D, M, true, false>(a, p, r);
    else
        kvq_gpu_wide_steps<D, M, false, false>(a, p, r);
    if (packed && a.recipe.v.rotation != KVQ_ROTATE_NONE)
        kvq_gpu_rows_rotate<D, M>(a, r);
}

// ---- Items ----

template <int D, int M> KVQ_DEVICE void kvq_gpu_wide_item(const kvq_gpu_attend_args &a, uint32_t i)
{
    typedef kvq_gpu_wide_room<D, M> R;
    kvq_gpu_here h = kvq_gpu_enter<R>(a, i, i + 1);
    gpu::block_sync();
    kvq_gpu_make_lists<R>(a, h);
    kvq_gpu_remember<R>(h);
    kvq_gpu_put_now<R>(h);
    kvq_gpu_rows<D, M> r;
    kvq_gpu_rows_start<D, M>(r);
    const kvq_gpu_part part = kvq_gpu_list_pool<R>(a, h, 0);
    kvq_gpu_wide_phase<D, M>(a, h, part, true, r);
    kvq_gpu_wide_phase<D, M>(a, h, part, false, r);
    kvq_gpu_rows_end<D, M>(r);
    gpu::block_sync();
    kvq_gpu_wide_hand_over<D, M>(a, h);
    gpu::block_sync();
    kvq_gpu_leave<D, R>(a, h);
    gpu::block_sync(); // the next item may have other rows, and things elsewhere
}

// Whether an item has more than 64 rows.
KVQ_DEVICE bool kvq_gpu_has_many(const kvq_gpu_attend_args &a, uint32_t i)
{
    uint32_t rows = 0;
    for (uint32_t t = 0; t < a.items[i].tiles; t++)
        rows += a.tiles[a.items[i].tile + t].rows;
    return rows > 64;
}

// The block's items, one at a time: their queries take long anyhow.
template <int D> KVQ_DEVICE void kvq_gpu_wide_all(const kvq_gpu_attend_args &a)
{
    constexpr int M = D == 256 ? 1 : 2;
    static_assert(kvq_gpu_wide_room<D, 1>::BYTES == KVQ_GPU_WIDE_BYTES(D, 64) &&
                      kvq_gpu_wide_room<D, M>::BYTES == KVQ_GPU_WIDE_BYTES(D, 64 * M),
                  "the host knows the size");
    KVQ_NO_UNROLL
    for (uint32_t i = (uint32_t)gpu::block_x(); i < *a.n_items; i += (uint32_t)gpu::grid_x()) {
        if (M > 1 && kvq_gpu_has_many(a, i))
            kvq_gpu_wide_item<D, M>(a, i);
        else
            kvq_gpu_wide_item<D, 1>(a, i);
    }
}

#endif
