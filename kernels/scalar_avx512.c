// SPDX-License-Identifier: Apache-2.0
//
// Attention over groups of scalar codecs, AVX-512: values go from the registers they were unpacked
// into straight to the products, and the sums of four rows stay in registers (attend_avx512.c tells
// why). Beside 16 multiplications for four rows, four registers of values take 4 lookups, 3 or 4
// shifts, and 2 or 4 multiplications for their scales. More rows are unpacked for again, four by
// four: unpacking once for 64 of them into memory, as scalar_read_tmpl.h does, takes twice as long.
#include "kernels/lanes_avx512.h"

#include "kernels/scalar_read_tmpl.h"

// Rows that are computed at once. Where there are fewer, the last one several times.
struct few {
    const float *row[KVQ__BLOCK_ROWS]; // of q, or of weights
    uint32_t used;
};

static struct few few_of(const float *first, size_t stride, uint32_t left)
{
    struct few f = {.used = left < KVQ__BLOCK_ROWS ? left : KVQ__BLOCK_ROWS};
    for (uint32_t i = 0; i < KVQ__BLOCK_ROWS; i++)
        f.row[i] = first + stride * (i < f.used ? i : f.used - 1);
    return f;
}

// ---- K ----

// Sums of a row of the tile: chains of even and of odd positions, tokens from 0 and from 16.
typedef kvq__floats logit_sums[KVQ__CHAINS][KVQ__TOKEN_REGS];

KVQ__INLINE void add_channel(logit_sums *acc, const kvq__floats *x, const struct few *q, uint32_t c,
                             int position, int rows)
{
    for (int i = 0; i < rows; i++) {
        kvq__floats y = kvq__all(q->row[i][c]);
        for (int n = 0; n < KVQ__TOKEN_REGS; n++)
            acc[i][position % 2][n] = kvq__fma(x[n], y, acc[i][position % 2][n]);
    }
}

// Channels 4 position + 2 e + h of 16, with byte 2 h + e.
KVQ__INLINE void add_byte(logit_sums *acc, const struct unpacking *u, const struct fields *f,
                          const struct kvq__levels *levels, const struct factors *lanes, uint32_t r,
                          const struct few *q, int byte, int rows, struct how how)
{
    uint32_t c = PIECE_CHANNELS * r + 2 * ((uint32_t)byte & 1) + (uint32_t)byte / 2;
    kvq__floats x[KVQ__TOKEN_REGS];
    values_of(x, f, byte, 0, levels, lanes, u, c, how);
    add_channel(acc, x, q, c, 0, rows);
    values_of(x, f, byte, 1, levels, lanes, u, c + 4, how);
    add_channel(acc, x, q, c + 4, 1, rows);
    values_of(x, f, byte, 2, levels, lanes, u, c + 8, how);
    add_channel(acc, x, q, c + 8, 2, rows);
    values_of(x, f, byte, 3, levels, lanes, u, c + 12, how);
    add_channel(acc, x, q, c + 12, 3, rows);
}

// The four channels at one position, of 8 bits.
KVQ__INLINE void add_position(logit_sums *acc, const struct unpacking *u,
                              const struct factors *lanes, uint32_t r, const struct few *q,
                              int position, int rows, struct how how)
{
    const uint8_t *plane = u->codes + (size_t)position * 8 * u->dim;
    uint32_t c = PIECE_CHANNELS * r + 4 * (uint32_t)position;
    kvq__words words[KVQ__TOKEN_REGS];
    kvq__floats x[KVQ__TOKEN_REGS];
    kvq__load_k_row(plane + ROW_BYTES * r, r & 3, words);
    for (uint32_t i = 0; i < 4; i++) {
        values_of_bytes(x, words, (int)(2 * (i & 1) + i / 2), lanes, u, c + i, KVQ__TOKEN_REGS,
                        how.by_lane);
        add_channel(acc, x, q, c + i, position, rows);
    }
}

KVQ__INLINE void add_row(logit_sums *acc, const struct unpacking *u,
                         const struct kvq__levels *levels, uint32_t r, const struct few *q,
                         struct ahead *ahead, int rows, struct how how)
{
    struct factors lanes;
    struct fields f;
    if (how.by_lane)
        load_factors(&lanes, u, KVQ_GROUP_TOKENS * u->set[r], KVQ__TOKEN_REGS);
    if (how.bits == 8) {
        fetch_share(ahead);
        add_position(acc, u, &lanes, r, q, 0, rows, how);
        fetch_share(ahead);
        add_position(acc, u, &lanes, r, q, 1, rows, how);
        fetch_share(ahead);
        add_position(acc, u, &lanes, r, q, 2, rows, how);
        fetch_share(ahead);
        add_position(acc, u, &lanes, r, q, 3, rows, how);
        return;
    }
    load_k_fields(u, r, &f, how.bits);
    fetch_share(ahead);
    add_byte(acc, u, &f, levels, &lanes, r, q, 0, rows, how);
    fetch_share(ahead);
    add_byte(acc, u, &f, levels, &lanes, r, q, 1, rows, how);
    fetch_share(ahead);
    add_byte(acc, u, &f, levels, &lanes, r, q, 2, rows, how);
    fetch_share(ahead);
    add_byte(acc, u, &f, levels, &lanes, r, q, 3, rows, how);
}

// `wide`: the first quarter of the channels has one bit more.
KVQ__INLINE void few_logits(const struct unpacking *u, const struct few *few, struct ahead *ahead,
                            float *logits, int rows, struct how how)
{
    const struct kvq__levels levels = kvq__levels_of(u->side->levels, how.bits, how.bits);
    struct few q = *few;
    uint32_t r = 0;
    logit_sums acc[KVQ__BLOCK_ROWS];
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < KVQ__TOKEN_REGS; n++)
            acc[i][0][n] = acc[i][1][n] = kvq__all(0.0f);
    if (how.wide) {
        const struct kvq__levels more = kvq__levels_of(u->side->wide_levels, 3, 3);
        for (; r < u->dim / 64; r++)
            add_row(acc, u, &more, r, &q, ahead, rows, (struct how){3, how.by_lane, false, true});
    }
    for (; r < u->dim / PIECE_CHANNELS; r++)
        add_row(acc, u, &levels, r, &q, ahead, rows, how);
    for (int i = 0; i < rows && i < (int)q.used; i++)
        for (int n = 0; n < KVQ__TOKEN_REGS; n++)
            kvq__store(logits + i * KVQ__LOGITS_STRIDE + n * KVQ__LANES,
                       acc[i][0][n] + acc[i][1][n]);
}

// ---- V ----

// Sums of a row of the tile: two positions of two registers, at head_dim 64 four of one.
typedef kvq__floats value_sums[SUM_REGS];

KVQ__INLINE void add_token(value_sums *acc, const kvq__floats *x, const struct few *p, uint32_t t,
                           int first, int regs, int rows)
{
    for (int i = 0; i < rows; i++) {
        kvq__floats w = kvq__all(p->row[i][t]);
        for (int n = 0; n < regs; n++)
            acc[i][first + n] = kvq__fma(x[n], w, acc[i][first + n]);
    }
}

// What four tokens have at one position; `slot` counts the positions that are summed.
KVQ__INLINE void add_tokens(value_sums *acc, const struct unpacking *u, const struct v_set *set,
                            const struct fields *f, const struct v_levels *all, const struct few *p,
                            int position, int slot, int rows, struct how how)
{
    const int regs = how.narrow ? 1 : 2;
    uint32_t c = set->slab * SLAB + (uint32_t)position * set->width, t = 8 * set->j + set->half;
    uint32_t at = KVQ_GROUP_TOKENS * u->set[c / 16] + t;
    const struct kvq__levels *levels = how.wide && c < u->dim / 4 ? &all->wide : &all->rest;
    struct factors lanes;
    kvq__floats x[2];
    if (how.by_lane)
        load_factors(&lanes, u, c, regs);
    values_of(x, f, 0, position, levels, &lanes, u, at, how);
    add_token(acc, x, p, t, slot * regs, regs, rows);
    values_of(x, f, 1, position, levels, &lanes, u, at + 2, how);
    add_token(acc, x, p, t + 2, slot * regs, regs, rows);
    values_of(x, f, 2, position, levels, &lanes, u, at + 4, how);
    add_token(acc, x, p, t + 4, slot * regs, regs, rows);
    values_of(x, f, 3, position, levels, &lanes, u, at + 6, how);
    add_token(acc, x, p, t + 6, slot * regs, regs, rows);
}

// The same of 8 bits.
KVQ__INLINE void add_byte_tokens(value_sums *acc, const struct unpacking *u,
                                 const struct v_set *set, const struct few *p, int position,
                                 int slot, int rows, struct how how)
{
    const int regs = how.narrow ? 1 : 2;
    uint32_t c = set->slab * SLAB + (uint32_t)position * set->width, t = 8 * set->j + set->half;
    uint32_t at = KVQ_GROUP_TOKENS * u->set[c / 16] + t, bytes = 4 * set->width;
    const uint8_t *row = u->codes + set->slab * 8 * bytes + set->row * bytes;
    struct factors lanes;
    kvq__words words[2];
    kvq__floats x[2];
    if (how.by_lane)
        load_factors(&lanes, u, c, regs);
    kvq__load_v_row(row + (size_t)position * 8 * u->dim, set->j, words, how.narrow);
    for (uint32_t k = 0; k < 4; k++) {
        values_of_bytes(x, words, (int)k, &lanes, u, at + 2 * k, regs, how.by_lane);
        add_token(acc, x, p, t + 2 * k, slot * regs, regs, rows);
    }
}

// Two positions (four at head_dim 64) from `first` on of four tokens.
KVQ__INLINE void add_set(value_sums *acc, const struct unpacking *u, const struct v_set *set,
                         const struct v_levels *levels, const struct few *p, int first, int rows,
                         struct how how)
{
    struct fields f;
    if (how.bits == 8) {
        for (int i = 0; i < (how.narrow ? 4 : 2); i++)
            add_byte_tokens(acc, u, set, p, first + i, i, rows, how);
        return;
    }
    load_v_fields(u, set, &f, how.narrow ? 1 : 2, how);
    add_tokens(acc, u, set, &f, levels, p, first, 0, rows, how);
    add_tokens(acc, u, set, &f, levels, p, first + 1, 1, rows, how);
    if (how.narrow) {
        add_tokens(acc, u, set, &f, levels, p, 2, 2, rows, how);
        add_tokens(acc, u, set, &f, levels, p, 3, 3, rows, how);
    }
}

// 64 channels from channel `slab` * 128 + `first` * 32 on.
KVQ__INLINE void few_sums(const struct unpacking *u, const struct v_levels *levels,
                          const struct few *few, struct ahead *ahead, float *o, uint32_t slab,
                          int first, int rows, struct how how)
{
    struct few p = *few;
    uint32_t c = slab * SLAB + (uint32_t)first * 32;
    value_sums acc[KVQ__BLOCK_ROWS];
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < SUM_REGS; n++) {
            uint32_t row = i < (int)p.used ? (uint32_t)i : p.used - 1;
            acc[i][n] = kvq__load(o + row * u->dim + c + (uint32_t)n * KVQ__LANES);
        }
    for (uint32_t set = 0; set < 8; set++) {
        struct v_set s = v_set_of(slab, set / 2, set % 2, how.narrow);
        fetch_share(ahead);
        add_set(acc, u, &s, levels, &p, first, rows, how);
    }
    for (int i = 0; i < rows && i < (int)p.used; i++)
        for (int n = 0; n < SUM_REGS; n++)
            kvq__store(o + (uint32_t)i * u->dim + c + (uint32_t)n * KVQ__LANES, acc[i][n]);
}

KVQ__INLINE void few_values(const struct unpacking *u, const struct few *p, struct ahead *ahead,
                            float *o, int rows, struct how how)
{
    struct v_levels levels;
    levels.rest = kvq__levels_of(u->side->levels, how.wide ? 2 : how.bits, how.bits);
    levels.wide = how.wide ? kvq__levels_of(u->side->wide_levels, 3, 3) : levels.rest;
    if (how.narrow) {
        few_sums(u, &levels, p, ahead, o, 0, 0, rows, how);
        return;
    }
    // Positions 2 and 3 are never in the first quarter.
    const struct how rest = {how.wide ? 2 : how.bits, how.by_lane, false, false};
    struct v_levels others = levels;
    others.rest = kvq__levels_of(u->side->levels, rest.bits, rest.bits);
    for (uint32_t slab = 0; slab < u->dim / SLAB; slab++) {
        if (how.wide && slab > 0)
            few_sums(u, &others, p, ahead, o, slab, 0, rows, rest);
        else
            few_sums(u, &levels, p, ahead, o, slab, 0, rows, how);
        few_sums(u, &others, p, ahead, o, slab, 2, rows, rest);
    }
}

// ---- By the codec ----

typedef void few_fn(const struct unpacking *u, const struct few *few, struct ahead *ahead,
                    float *out);

// Functions for one row and for four.
#define FEW(name, compute, ...)                                                                    \
    static void name##_1(const struct unpacking *u, const struct few *few, struct ahead *ahead,    \
                         float *out)                                                               \
    {                                                                                              \
        compute(u, few, ahead, out, 1, (struct how){__VA_ARGS__});                                 \
    }                                                                                              \
    static void name##_4(const struct unpacking *u, const struct few *few, struct ahead *ahead,    \
                         float *out)                                                               \
    {                                                                                              \
        compute(u, few, ahead, out, KVQ__BLOCK_ROWS, (struct how){__VA_ARGS__});                   \
    }

#define FEW_OF_BITS(bits)                                                                          \
    FEW(few_k_codes_##bits, few_logits, bits, false, false, false)                                 \
    FEW(few_k_lanes_##bits, few_logits, bits, true, false, false)                                  \
    FEW(few_v_codes_##bits, few_values, bits, false, false, false)                                 \
    FEW(few_v_lanes_##bits, few_values, bits, true, false, false)                                  \
    FEW(few_v64_codes_##bits, few_values, bits, false, true, false)                                \
    FEW(few_v64_lanes_##bits, few_values, bits, true, true, false)
FEW_OF_BITS(1)
FEW_OF_BITS(2)
FEW_OF_BITS(3)
FEW_OF_BITS(4)
FEW_OF_BITS(8)
FEW(few_k_wide, few_logits, 2, true, false, true)
FEW(few_v_wide, few_values, 3, false, false, true)
FEW(few_v64_wide, few_values, 3, false, true, true)

struct few_pair {
    few_fn *one, *four;
};
#define PAIR(name)                                                                                 \
    {                                                                                              \
        name##_1, name##_4                                                                         \
    }
#define ALL_BITS(name)                                                                             \
    {                                                                                              \
        PAIR(name##_1), PAIR(name##_2), PAIR(name##_3), PAIR(name##_4), PAIR(name##_8)             \
    }

static struct few_pair few_k(const struct unpacking *u)
{
    static const struct few_pair all[2][5] = {ALL_BITS(few_k_codes), ALL_BITS(few_k_lanes)};
    uint32_t bits = u->side->row.bits;
    if (u->side->row.wide)
        return (struct few_pair)PAIR(few_k_wide);
    return all[u->by_lane][bits == 8 ? 4 : bits - 1];
}

static struct few_pair few_v(const struct unpacking *u)
{
    static const struct few_pair all[2][2][5] = {
        {ALL_BITS(few_v_codes), ALL_BITS(few_v_lanes)},
        {ALL_BITS(few_v64_codes), ALL_BITS(few_v64_lanes)},
    };
    uint32_t bits = u->side->row.bits;
    if (u->side->row.wide && u->dim == 64)
        return (struct few_pair)PAIR(few_v64_wide);
    if (u->side->row.wide)
        return (struct few_pair)PAIR(few_v_wide);
    return all[u->dim == 64][u->by_lane][bits == 8 ? 4 : bits - 1];
}

// ---- The table ----

static void qk_few(const struct kvq__tile *tile, const struct kvq_packed *packed, float *logits)
{
    struct unpacking u;
    prepare(&u, tile->codec, packed, false);
    struct few_pair compute = few_k(&u);
    struct ahead ahead = ahead_of_k(tile, packed, tile->dim / 4);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__BLOCK_ROWS) {
        struct few q = few_of(tile->qt + (size_t)r * tile->dim, tile->dim, tile->rows - r);
        (q.used == 1 ? compute.one : compute.four)(&u, &q, &ahead,
                                                   logits + (size_t)r * KVQ__LOGITS_STRIDE);
        ahead = (struct ahead){0}; // what was asked for once is on its way
    }
    if (tile->codec->has_norms)
        apply_norms(tile, packed, logits);
}

static void pv_few(const struct kvq__tile *tile, const struct kvq_packed *packed, const float *p)
{
    struct unpacking u;
    prepare(&u, tile->codec, packed, true);
    struct few_pair compute = few_v(&u);
    struct ahead ahead = ahead_of_v(tile, packed, tile->dim / 8);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__BLOCK_ROWS) {
        struct few w =
            few_of(p + (size_t)r * KVQ__LOGITS_STRIDE, KVQ__LOGITS_STRIDE, tile->rows - r);
        (w.used == 1 ? compute.one : compute.four)(&u, &w, &ahead,
                                                   tile->ot + (size_t)r * tile->dim);
        ahead = (struct ahead){0};
    }
}

void kvq__init_avx512_scalar(struct kvq_kernels *k)
{
    enter(k);
    for (int kind = KVQ__SCALAR; kind < KVQ__BOOK; kind++) {
        if (k->qk_packed[kind] == qk_packed)
            k->qk_packed[kind] = qk_few;
        if (k->pv_packed[kind] == pv_packed)
            k->pv_packed[kind] = pv_few;
    }
}
