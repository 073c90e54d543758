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

// Lines that are prefetched bit by bit while a group is computed on.
struct ahead {
    const uint8_t *at;
    uint32_t step, due; // lines for each share, and in all shares so far, in 1 / 65536
    uint32_t done;
};

// `bytes` bytes in so many shares; at NULL for none. `apart` bytes of scales that stand apart from
// the group are asked for at once: `from` is this group's part of the record and `scales` where its
// scales are, and those of the group ahead are as far from it.
static struct ahead start_ahead(const uint8_t *at, size_t bytes, uint32_t shares,
                                const uint8_t *from, const uint8_t *scales, uint32_t apart)
{
    struct ahead a = {.at = at};
    if (!at)
        return a;
    a.step = ((uint32_t)(bytes / LINE << 16) + shares - 1) / shares;
    for (uint32_t i = 0; i < apart; i += LINE)
        kvq__fetch(at + (scales - from) + i);
    return a;
}

KVQ__INLINE void fetch_share(struct ahead *a)
{
    for (a->due += a->step; a->done < a->due >> 16; a->done++)
        kvq__fetch(a->at + (size_t)LINE * a->done);
}

static struct ahead ahead_of_k(const struct kvq__tile *tile, const struct kvq_packed *packed,
                               uint32_t shares)
{
    const struct kvq_layout *l = &tile->codec->layout;
    return start_ahead(tile->ahead, l->v_codes, shares, packed->group, packed->k_scales, l->k_set);
}

static struct ahead ahead_of_v(const struct kvq__tile *tile, const struct kvq_packed *packed,
                               uint32_t shares)
{
    const struct kvq_layout *l = &tile->codec->layout;
    return start_ahead(tile->ahead, l->group_bytes - l->v_codes, shares, packed->group + l->v_codes,
                       packed->v_scales, l->v_set);
}

// ---- Logits ----

// A row's sums: [chain][token].
enum { ROW_SUMS = KVQ__CHAINS * KVQ_GROUP_TOKENS };

// The order of a piece's channels. Sums must not depend on whether a tile has few rows or many
// (scalar_avx512.c), so it is the one in which words are unpacked: byte by byte, and with 8
// bits plane by plane. Even and odd positions go to chains of their own.
static const uint8_t channels_by_byte[] = {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15};
static const uint8_t channels_by_plane[] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};

// Adds a piece's share to the sums of `rows` query rows.
KVQ__INLINE void dot_rows(const float *q, uint32_t dim, const float *piece, const uint8_t *order,
                          float *sums, struct ahead *ahead, int rows)
{
    kvq__floats acc[KVQ__BLOCK_ROWS][KVQ__CHAINS][KVQ__TOKEN_REGS];
    for (int i = 0; i < rows; i++)
        for (int chain = 0; chain < KVQ__CHAINS; chain++)
            for (int n = 0; n < KVQ__TOKEN_REGS; n++)
                acc[i][chain][n] =
                    kvq__load(sums + i * ROW_SUMS + chain * KVQ_GROUP_TOKENS + n * KVQ__LANES);
    for (uint32_t at = 0; at < PIECE_CHANNELS; at += KVQ__CHAINS)
        for (uint32_t chain = 0; chain < KVQ__CHAINS; chain++) {
            uint32_t c = order[at + chain];
            kvq__floats x[KVQ__TOKEN_REGS];
            if (ahead)
                fetch_share(ahead);
            for (int n = 0; n < KVQ__TOKEN_REGS; n++)
                x[n] = kvq__load(piece + c * KVQ_GROUP_TOKENS + (uint32_t)n * KVQ__LANES);
            for (int i = 0; i < rows; i++) {
                kvq__floats y = kvq__all(q[(uint32_t)i * dim + c]);
                for (int n = 0; n < KVQ__TOKEN_REGS; n++)
                    acc[i][chain][n] = kvq__fma(x[n], y, acc[i][chain][n]);
            }
        }
    for (int i = 0; i < rows; i++)
        for (int chain = 0; chain < KVQ__CHAINS; chain++)
            for (int n = 0; n < KVQ__TOKEN_REGS; n++)
                kvq__store(sums + i * ROW_SUMS + chain * KVQ_GROUP_TOKENS + n * KVQ__LANES,
                           acc[i][chain][n]);
}

static void dot_piece(const struct kvq__tile *tile, const float *q, const float *piece,
                      const uint8_t *order, struct ahead *ahead, float *sums)
{
    for (uint32_t r = 0; r < tile->rows; r += KVQ__BLOCK_ROWS) {
        uint32_t left = tile->rows - r;
        if (left >= KVQ__BLOCK_ROWS)
            dot_rows(q, tile->dim, piece, order, sums, ahead, KVQ__BLOCK_ROWS);
        else if (left == 1)
            dot_rows(q, tile->dim, piece, order, sums, ahead, 1);
        else if (left == 2)
            dot_rows(q, tile->dim, piece, order, sums, ahead, 2);
        else
            dot_rows(q, tile->dim, piece, order, sums, ahead, 3);
        ahead = NULL; // what was asked for once is on its way
        q += KVQ__BLOCK_ROWS * tile->dim;
        sums += KVQ__BLOCK_ROWS * ROW_SUMS;
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

static void put_logits(const struct kvq__tile *tile, const float *sums, float *logits)
{
    for (uint32_t r = 0; r < tile->rows; r++, sums += ROW_SUMS, logits += KVQ__LOGITS_STRIDE)
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += KVQ__LANES) {
            kvq__floats sum = kvq__load(sums + t);
            if (KVQ__CHAINS > 1)
                sum = sum + kvq__load(sums + KVQ_GROUP_TOKENS + t);
            kvq__store(logits + t, sum);
        }
}

static void qk_packed(const struct kvq__tile *tile, const struct kvq_packed *packed, float *logits)
{
    const struct kvq__codec *c = tile->codec;
    _Alignas(64) float piece[PIECE_CHANNELS * KVQ_GROUP_TOKENS], sums[KVQ_TILE_ROWS * ROW_SUMS];
    const uint8_t *order = c->k_bits == 8 ? channels_by_plane : channels_by_byte;
    struct ahead ahead = ahead_of_k(tile, packed, c->dim);
    struct unpacking u;
    prepare(&u, c, packed, false);
    memset(sums, 0, sizeof(float) * ROW_SUMS * tile->rows);
    for (uint32_t i = 0; i < c->dim / PIECE_CHANNELS; i++) {
        k_row_function(&u, i)(&u, i, piece);
        dot_piece(tile, tile->qt + (size_t)i * PIECE_CHANNELS, piece, order, &ahead, sums);
    }
    put_logits(tile, sums, logits);
    if (c->has_norms)
        apply_norms(tile, packed, logits);
}

// ---- Values ----

// The order of a piece's tokens, as they are unpacked; for the same reason as K's channels.
static const uint8_t tokens_by_set[PIECE_TOKENS] = {0, 2, 4, 6, 1, 3, 5, 7};

// Adds the piece's values, weighted, to SUM_REGS registers of channels of `rows` rows.
KVQ__INLINE void sum_block(const float *p, const float *piece, uint32_t dim, float *o,
                           struct ahead *ahead, int rows)
{
    kvq__floats acc[KVQ__BLOCK_ROWS][SUM_REGS];
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < SUM_REGS; n++)
            acc[i][n] = kvq__load(o + (uint32_t)i * dim + n * KVQ__LANES);
    for (uint32_t at = 0; at < PIECE_TOKENS; at++) {
        uint32_t t = tokens_by_set[at];
        kvq__floats x[SUM_REGS];
        if (ahead)
            fetch_share(ahead);
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
                          struct ahead *ahead, int rows)
{
    for (uint32_t c = 0; c < dim; c += SUM_REGS * KVQ__LANES)
        sum_block(p, piece + c, dim, o + c, ahead, rows);
}

static void sum_piece(const struct kvq__tile *tile, const float *p, const float *piece,
                      struct ahead *ahead)
{
    float *o = tile->ot;
    for (uint32_t r = 0; r < tile->rows; r += KVQ__BLOCK_ROWS) {
        uint32_t left = tile->rows - r;
        if (left >= KVQ__BLOCK_ROWS)
            sum_rows(p, piece, tile->dim, o, ahead, KVQ__BLOCK_ROWS);
        else if (left == 1)
            sum_rows(p, piece, tile->dim, o, ahead, 1);
        else if (left == 2)
            sum_rows(p, piece, tile->dim, o, ahead, 2);
        else
            sum_rows(p, piece, tile->dim, o, ahead, 3);
        ahead = NULL;
        p += KVQ__BLOCK_ROWS * KVQ__LOGITS_STRIDE;
        o += KVQ__BLOCK_ROWS * tile->dim;
    }
}

static void pv_packed(const struct kvq__tile *tile, const struct kvq_packed *packed, const float *p)
{
    const struct kvq__codec *c = tile->codec;
    _Alignas(64) float piece[PIECE_FLOATS];
    struct ahead ahead =
        ahead_of_v(tile, packed, KVQ_GROUP_TOKENS * (c->dim / (SUM_REGS * KVQ__LANES)));
    struct unpacking u;
    prepare(&u, c, packed, true);
    unpack_fn *unpack = v_function(&u);
    for (uint32_t j = 0; j < KVQ_GROUP_TOKENS / PIECE_TOKENS; j++) {
        unpack(&u, j, piece);
        sum_piece(tile, p + j * PIECE_TOKENS, piece, &ahead);
    }
}

// ---- The table ----

// Kinds that have loops of their own for one side come here with the other: K per channel and V per
// token of 32 have all, K per channel of more tokens and V of four levels have attention's.
static void enter(struct kvq_kernels *k)
{
    for (int kind = KVQ__SCALAR; kind < KVQ__BOOK; kind++) {
        if (kind != KVQ__PER_CHANNEL_32)
            k->dequant_k[kind] = dequant_k;
        if (kind != KVQ__PER_CHANNEL_32 && kind != KVQ__PER_CHANNEL)
            k->qk_packed[kind] = qk_packed;
        if (kind != KVQ__PER_TOKEN_32)
            k->dequant_v[kind] = dequant_v;
        if (kind != KVQ__PER_TOKEN_32 && kind != KVQ__FOUR_LEVELS)
            k->pv_packed[kind] = pv_packed;
    }
}

#endif
