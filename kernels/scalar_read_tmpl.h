// SPDX-License-Identifier: Apache-2.0
//
// Reading groups of scalar codecs, for any instruction set: include lanes_avx2.h or lanes_avx512.h
// first. Dequantizing, and the two steps of attention's exact path.
//
// Attention takes a group piece by piece (scalar_unpack_tmpl.h): a piece is unpacked once into 2 to
// 8 KB that stay in the first level cache, and then serves all query rows. Unpacking needs shuffles
// and stores, the products need multiplications and loads, and a piece is short enough that the
// processor does part of one piece's unpacking beside the other's products.
#ifndef KVQ_KERNELS_SCALAR_READ_TMPL_H
#define KVQ_KERNELS_SCALAR_READ_TMPL_H

#include "kernels/scalar_unpack_tmpl.h"

enum { LINE = 64, SUM_REGS = 4 };

// ---- Dequantizing ----

static unpack_fn *k_row_function(const struct unpacking *u, uint32_t r)
{
    bool wider = u->side->row.wide && r < u->dim / 64;
    return k_function(u, u->side->row.bits + wider);
}

// 16 channels of all tokens, times the tokens' norms.
static void put_k_rows(const float *piece, const float *norm, uint32_t dim, float *rows)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += KVQ__LANES)
        for (uint32_t c = 0; c < PIECE_CHANNELS; c += KVQ__LANES) {
            kvq__floats x[KVQ__LANES], n = kvq__load(norm + t);
            for (uint32_t i = 0; i < KVQ__LANES; i++)
                x[i] = kvq__load(piece + (size_t)(c + i) * KVQ_GROUP_TOKENS + t) * n;
            kvq__transpose(x);
            for (uint32_t i = 0; i < KVQ__LANES; i++)
                kvq__store(rows + (size_t)(t + i) * dim + c, x[i]);
        }
}

static void load_norms(const struct kvq__codec *c, const struct kvq_packed *packed, float *norm)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += KVQ__LANES) {
        kvq__floats x = kvq__all(1.0f);
        if (c->has_norms)
            x = kvq__load_half(packed->group + c->layout.k_norms + 2 * t);
        kvq__store(norm + t, x);
    }
}

static void dequant_k(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    _Alignas(64) float piece[PIECE_CHANNELS * KVQ_GROUP_TOKENS], norm[KVQ_GROUP_TOKENS];
    struct unpacking u;
    prepare(&u, c, packed, false);
    load_norms(c, packed, norm);
    for (uint32_t r = 0; r < c->dim / PIECE_CHANNELS; r++) {
        k_row_function(&u, r)(&u, r, piece);
        put_k_rows(piece, norm, c->dim, rows + (size_t)r * PIECE_CHANNELS);
    }
}

static void dequant_v(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows)
{
    struct unpacking u;
    prepare(&u, c, packed, true);
    unpack_fn *unpack = v_function(&u);
    for (uint32_t j = 0; j < KVQ_GROUP_TOKENS / PIECE_TOKENS; j++)
        unpack(&u, j, rows + (size_t)j * PIECE_TOKENS * c->dim);
}

// ---- What comes next ----

// Lines to be prefetched while a piece is computed on; `at` NULL for none.
struct ahead {
    const uint8_t *at;
    uint32_t lines;
};

// Line i of them.
KVQ__INLINE void fetch_line(const struct ahead *a, uint32_t i)
{
    if (i < a->lines)
        kvq__fetch(a->at + LINE * i);
}

// The share of piece i of n, of `bytes` bytes. Scales that stand apart from the group are asked for
// with it: they are as far from the next chunk's group as from this one's.
static struct ahead ahead_of(const uint8_t *at, size_t bytes, uint32_t i, uint32_t n)
{
    uint32_t lines = (uint32_t)(bytes / LINE), from = lines * i / n, to = lines * (i + 1) / n;
    if (!at)
        return (struct ahead){NULL, 0};
    return (struct ahead){at + (size_t)LINE * from, to - from};
}

// ---- Logits ----

// Adds a piece's share to the logits of `rows` query rows.
KVQ__INLINE void dot_rows(const float *q, uint32_t dim, const float *piece, float *logits,
                          const struct ahead *ahead, int rows)
{
    kvq__floats acc[KVQ__BLOCK_ROWS][KVQ__CHAINS][KVQ__TOKEN_REGS];
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < KVQ__TOKEN_REGS; n++) {
            acc[i][0][n] = kvq__load(logits + i * KVQ__LOGITS_STRIDE + n * KVQ__LANES);
            if (KVQ__CHAINS > 1)
                acc[i][1][n] = kvq__all(0.0f);
        }
    for (uint32_t c = 0; c < PIECE_CHANNELS; c += KVQ__CHAINS)
        for (uint32_t chain = 0; chain < KVQ__CHAINS; chain++) {
            kvq__floats x[KVQ__TOKEN_REGS];
            fetch_line(ahead, c + chain);
            for (int n = 0; n < KVQ__TOKEN_REGS; n++)
                x[n] = kvq__load(piece + (c + chain) * KVQ_GROUP_TOKENS + (uint32_t)n * KVQ__LANES);
            for (int i = 0; i < rows; i++) {
                kvq__floats y = kvq__all(q[(uint32_t)i * dim + c + chain]);
                for (int n = 0; n < KVQ__TOKEN_REGS; n++)
                    acc[i][chain][n] = kvq__fma(x[n], y, acc[i][chain][n]);
            }
        }
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < KVQ__TOKEN_REGS; n++) {
            kvq__floats sum = acc[i][0][n];
            if (KVQ__CHAINS > 1)
                sum = sum + acc[i][1][n];
            kvq__store(logits + i * KVQ__LOGITS_STRIDE + n * KVQ__LANES, sum);
        }
}

static void dot_piece(const struct kvq__tile *tile, const float *q, const float *piece,
                      struct ahead ahead, float *logits)
{
    for (uint32_t r = 0; r < tile->rows; r += KVQ__BLOCK_ROWS) {
        uint32_t left = tile->rows - r;
        if (left >= KVQ__BLOCK_ROWS)
            dot_rows(q, tile->dim, piece, logits, &ahead, KVQ__BLOCK_ROWS);
        else if (left == 1)
            dot_rows(q, tile->dim, piece, logits, &ahead, 1);
        else if (left == 2)
            dot_rows(q, tile->dim, piece, logits, &ahead, 2);
        else
            dot_rows(q, tile->dim, piece, logits, &ahead, 3);
        ahead.lines = 0; // what was asked for once is on its way
        q += KVQ__BLOCK_ROWS * tile->dim;
        logits += KVQ__BLOCK_ROWS * KVQ__LOGITS_STRIDE;
    }
}

static void apply_norms(const struct kvq__tile *tile, const struct kvq_packed *packed,
                        float *logits)
{
    const uint8_t *norms = packed->group + tile->codec->layout.k_norms;
    for (uint32_t r = 0; r < tile->rows; r++, logits += KVQ__LOGITS_STRIDE)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += KVQ__LANES)
            kvq__store(logits + t, kvq__load(logits + t) * kvq__load_half(norms + 2 * t));
}

static void qk_packed(const struct kvq__tile *tile, const struct kvq_packed *packed, float *logits)
{
    const struct kvq__codec *c = tile->codec;
    _Alignas(64) float piece[PIECE_CHANNELS * KVQ_GROUP_TOKENS];
    uint32_t pieces = c->dim / PIECE_CHANNELS;
    struct unpacking u;
    prepare(&u, c, packed, false);
    for (uint32_t r = 0; r < tile->rows; r++)
        memset(logits + (size_t)r * KVQ__LOGITS_STRIDE, 0, KVQ_GROUP_TOKENS * sizeof *logits);
    for (uint32_t i = 0; i < pieces; i++) {
        k_row_function(&u, i)(&u, i, piece);
        dot_piece(tile, tile->qt + (size_t)i * PIECE_CHANNELS, piece,
                  ahead_of(tile->ahead, c->layout.v_codes, i, pieces), logits);
    }
    if (c->has_norms)
        apply_norms(tile, packed, logits);
}

// ---- Values ----

// Adds the piece's values, weighted, to SUM_REGS registers of channels of `rows` rows. `ahead`
// starts at the block's own lines.
KVQ__INLINE void sum_block(const float *p, const float *piece, uint32_t dim, float *o,
                           const struct ahead *ahead, uint32_t line, int rows)
{
    kvq__floats acc[KVQ__BLOCK_ROWS][SUM_REGS];
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < SUM_REGS; n++)
            acc[i][n] = kvq__load(o + (uint32_t)i * dim + n * KVQ__LANES);
    for (uint32_t t = 0; t < PIECE_TOKENS; t++) {
        kvq__floats x[SUM_REGS];
        fetch_line(ahead, line + 2 * t);
        fetch_line(ahead, line + 2 * t + 1);
        for (int n = 0; n < SUM_REGS; n++)
            x[n] = kvq__load(piece + t * dim + (uint32_t)n * KVQ__LANES);
        for (int i = 0; i < rows; i++) {
            kvq__floats w = kvq__all(p[(uint32_t)i * KVQ__LOGITS_STRIDE + t]);
            for (int n = 0; n < SUM_REGS; n++)
                acc[i][n] = kvq__fma(x[n], w, acc[i][n]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < SUM_REGS; n++)
            kvq__store(o + (uint32_t)i * dim + n * KVQ__LANES, acc[i][n]);
}

KVQ__INLINE void sum_rows(const float *p, const float *piece, uint32_t dim, float *o,
                          const struct ahead *ahead, int rows)
{
    const uint32_t step = SUM_REGS * KVQ__LANES;
    for (uint32_t i = 0; i < dim / step; i++)
        sum_block(p, piece + i * step, dim, o + i * step, ahead, 2 * PIECE_TOKENS * i, rows);
}

static void sum_piece(const struct kvq__tile *tile, const float *p, const float *piece,
                      struct ahead ahead)
{
    float *o = tile->ot;
    for (uint32_t r = 0; r < tile->rows; r += KVQ__BLOCK_ROWS) {
        uint32_t left = tile->rows - r;
        if (left >= KVQ__BLOCK_ROWS)
            sum_rows(p, piece, tile->dim, o, &ahead, KVQ__BLOCK_ROWS);
        else if (left == 1)
            sum_rows(p, piece, tile->dim, o, &ahead, 1);
        else if (left == 2)
            sum_rows(p, piece, tile->dim, o, &ahead, 2);
        else
            sum_rows(p, piece, tile->dim, o, &ahead, 3);
        ahead.lines = 0;
        p += KVQ__BLOCK_ROWS * KVQ__LOGITS_STRIDE;
        o += KVQ__BLOCK_ROWS * tile->dim;
    }
}

static void pv_packed(const struct kvq__tile *tile, const struct kvq_packed *packed, const float *p)
{
    const struct kvq__codec *c = tile->codec;
    _Alignas(64) float piece[PIECE_FLOATS];
    const uint32_t pieces = KVQ_GROUP_TOKENS / PIECE_TOKENS;
    size_t bytes = c->layout.group_bytes - c->layout.v_codes;
    struct unpacking u;
    prepare(&u, c, packed, true);
    unpack_fn *unpack = v_function(&u);
    for (uint32_t j = 0; j < pieces; j++) {
        unpack(&u, j, piece);
        sum_piece(tile, p + j * PIECE_TOKENS, piece, ahead_of(tile->ahead, bytes, j, pieces));
    }
}

// ---- The table ----

// Kinds that have loops of their own for one side come here with the other.
static void enter(struct kvq_kernels *k)
{
    static const enum kvq__kind k_kinds[] = {KVQ__SCALAR, KVQ__PER_TOKEN_32};
    static const enum kvq__kind v_kinds[] = {KVQ__SCALAR, KVQ__PER_CHANNEL_32};
    for (int i = 0; i < 2; i++) {
        k->dequant_k[k_kinds[i]] = dequant_k;
        k->qk_packed[k_kinds[i]] = qk_packed;
        k->dequant_v[v_kinds[i]] = dequant_v;
        k->pv_packed[v_kinds[i]] = pv_packed;
    }
}

#endif
