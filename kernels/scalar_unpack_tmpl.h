// SPDX-License-Identifier: Apache-2.0
//
// Groups of scalar codecs back to values, for any instruction set: include lanes_avx2.h or
// lanes_avx512.h first. See scalar_read_tmpl.h for what is made of it.
//
// A group is unpacked in pieces that stay in the first level cache: 16 channels of all tokens for
// K, as [channel][token]; the 8 tokens 8 j to 8 j + 7 for V, as [token][channel]. Words of K are
// tokens and words of V are channels, so the lanes of both are the piece's inner index, and one
// function serves both: the 16 codes of a word stand in bytes 0 to 3 at positions 0 to 3.
//
// A scale either belongs to one code of all words (K per channel, V per token): then it goes into
// the table that codes are looked up in. Or it belongs to one lane (K per token, V per channel):
// then values are looked up and multiplied.
#ifndef KVQ_KERNELS_SCALAR_UNPACK_TMPL_H
#define KVQ_KERNELS_SCALAR_UNPACK_TMPL_H

enum {
    SLAB = 128,
    ROW_BYTES = 128,     // a row of a plane of K: a word for each token
    PIECE_CHANNELS = 16, // of K
    PIECE_TOKENS = 8,    // of V
    PIECE_FLOATS = PIECE_TOKENS * KVQ_MAX_HEAD_DIM,
    WORD_REGS = 4, // registers of 32 words at most
};

// One side of a group, ready to be unpacked.
struct unpacking {
    const struct kvq__side *side;
    const uint8_t *codes;
    uint32_t dim;
    bool by_lane;                               // scales belong to lanes
    uint8_t set[KVQ_MAX_HEAD_DIM / 16];         // which scale of a token serves 16 channels
    _Alignas(64) float scale[KVQ_MAX_HEAD_DIM]; // [channel], or [set][token]
    _Alignas(64) float zero[KVQ_MAX_HEAD_DIM];
};

// ---- Scales and zeros ----

static uint32_t sets_of(const struct kvq__side *side, uint32_t dim)
{
    return side->row.wide ? 2 : dim / side->row.group;
}

// Which scale of a token serves a channel.
static uint32_t set_of(const struct kvq__side *side, uint32_t dim, uint32_t channel)
{
    return side->row.wide ? channel >= dim / 4 : channel / side->row.group;
}

KVQ__INLINE kvq__floats zero_of(const struct kvq__side *side, kvq__floats scale,
                                const uint8_t *zeros)
{
    if (side->row.codec == KVQ_CODEC_LLOYD)
        return kvq__all(0.0f);
    if (side->row.codec == KVQ_CODEC_SYMMETRIC)
        return scale * kvq__all(-(float)(1u << (side->row.bits - 1)));
    return kvq__load_half(zeros);
}

static void load_params(struct unpacking *u, const uint8_t *scales, const uint8_t *zeros, bool v)
{
    bool slots = v && !u->by_lane, per_token = u->side->row.axis == KVQ_PER_TOKEN;
    uint32_t n = per_token ? KVQ_GROUP_TOKENS * sets_of(u->side, u->dim) : u->dim;
    for (uint32_t i = 0; i < n; i += KVQ__LANES) {
        kvq__floats scale = kvq__abs(kvq__load_half(scales + 2 * i));
        kvq__floats zero = zero_of(u->side, scale, zeros + 2 * i);
        kvq__store(u->scale + i, slots ? kvq__from_slots(scale) : scale);
        kvq__store(u->zero + i, slots ? kvq__from_slots(zero) : zero);
    }
    for (uint32_t c = 0; c < u->dim; c += 16)
        u->set[c / 16] = per_token ? (uint8_t)set_of(u->side, u->dim, c) : 0;
}

static void prepare(struct unpacking *u, const struct kvq__codec *c,
                    const struct kvq_packed *packed, bool v)
{
    u->side = v ? &c->v : &c->k;
    u->dim = c->dim;
    u->by_lane = v == (u->side->row.axis == KVQ_PER_CHANNEL);
    u->codes = packed->group + (v ? c->layout.v_codes : c->layout.k_codes);
    load_params(u, v ? packed->v_scales : packed->k_scales, v ? packed->v_zeros : packed->k_zeros,
                v);
}

// ---- One code of all words ----

// What a function is specialized for.
struct how {
    int bits;     // of a code; 3 where some have 2 and others 3
    bool by_lane; // scales belong to lanes
    bool narrow;  // head_dim 64
    bool wide;    // V: the first quarter of the channels has 3 bits, the others 2
};

// Words of a row, parted as kvq__look_up wants them: codes of 1 and 2 bits as they stand, of 3 and
// 4 bits as nibbles of even and of odd positions.
struct fields {
    kvq__words even[WORD_REGS], odd[WORD_REGS];
    int regs;
};

// Scale and zero of each lane.
struct factors {
    kvq__floats scale[WORD_REGS], zero[WORD_REGS];
};

KVQ__INLINE void load_factors(struct factors *f, const struct unpacking *u, uint32_t at, int regs)
{
    for (int n = 0; n < regs; n++) {
        f->scale[n] = kvq__load(u->scale + at + n * KVQ__LANES);
        f->zero[n] = kvq__load(u->zero + at + n * KVQ__LANES);
    }
}

// Values of the code in this byte and at this position of all words; `at` is where its scale is,
// unless lanes have their own.
KVQ__INLINE void values_of(kvq__floats *x, const struct fields *f, int byte, int position,
                           const struct kvq__levels *levels, const struct factors *lanes,
                           const struct unpacking *u, uint32_t at, struct how how)
{
    const kvq__words *words = position % 2 ? f->odd : f->even;
    int bit = 8 * byte + (how.bits <= 2 ? 2 * position : 4 * (position / 2));
    struct kvq__levels own = *levels;
    if (!how.by_lane)
        own = kvq__scale_levels(levels, u->scale[at], u->zero[at], how.bits);
    for (int n = 0; n < f->regs; n++) {
        x[n] = kvq__look_up(&own, words[n], bit, how.bits);
        if (how.by_lane)
            x[n] = kvq__fma(x[n], lanes->scale[n], lanes->zero[n]);
    }
}

// The same of codes of 8 bits, from the words of the position's own plane.
KVQ__INLINE void values_of_bytes(kvq__floats *x, const kvq__words *words, int byte,
                                 const struct factors *lanes, const struct unpacking *u,
                                 uint32_t at, int regs, bool by_lane)
{
    for (int n = 0; n < regs; n++) {
        kvq__floats scale = by_lane ? lanes->scale[n] : kvq__all(u->scale[at]);
        kvq__floats zero = by_lane ? lanes->zero[n] : kvq__all(u->zero[at]);
        x[n] = kvq__fma(kvq__byte(words[n], byte), scale, zero);
    }
}

KVQ__INLINE void put_values(float *out, const struct fields *f, int byte, int position,
                            const struct kvq__levels *levels, const struct factors *lanes,
                            const struct unpacking *u, uint32_t at, struct how how)
{
    kvq__floats x[WORD_REGS];
    values_of(x, f, byte, position, levels, lanes, u, at, how);
    for (int n = 0; n < f->regs; n++)
        kvq__store(out + n * KVQ__LANES, x[n]);
}

KVQ__INLINE void put_bytes(float *out, const kvq__words *words, int byte,
                           const struct factors *lanes, const struct unpacking *u, uint32_t at,
                           int regs, bool by_lane)
{
    kvq__floats x[WORD_REGS];
    values_of_bytes(x, words, byte, lanes, u, at, regs, by_lane);
    for (int n = 0; n < regs; n++)
        kvq__store(out + n * KVQ__LANES, x[n]);
}

// Fields of a 1-bit plane whose rows serve two rows of codes.
KVQ__INLINE kvq__words own_bits(kvq__words x, uint32_t odd)
{
    return kvq__right(x, (int)odd) & kvq__all_words(0x55555555);
}

// Fields from low and high words.
KVQ__INLINE void part(struct fields *f, const kvq__words *low, const kvq__words *high, int regs,
                      int bits)
{
    f->regs = regs;
    for (int n = 0; n < regs; n++)
        if (bits > 2)
            kvq__join(low[n], high[n], &f->even[n], &f->odd[n]);
        else
            f->even[n] = f->odd[n] = low[n];
}

// ---- K ----

// The words of row r of a 1-bit plane. Rows r and r + half of a slab, of 4 or 8, stand in one.
KVQ__INLINE void load_k_bits(const uint8_t *plane, uint32_t dim, uint32_t r, kvq__words *words)
{
    uint32_t log = dim == 64 ? 1 : 2, half = 1u << log, row = r % half;
    kvq__load_k_row(plane + ROW_BYTES * ((r >> (log + 1) << log) + row), row, words);
    for (int n = 0; n < KVQ__TOKEN_REGS; n++)
        words[n] = own_bits(words[n], r >> log & 1);
}

// Row r's third bits of a format whose first quarter has them, where a 1-bit plane has them. Reads
// two bytes more than it needs; scales follow.
KVQ__INLINE void load_k_wide(const uint8_t *wide, uint32_t dim, uint32_t r, kvq__words *words)
{
    const uint32_t stride = dim / 32;
    for (uint32_t n = 0; n < (uint32_t)KVQ__TOKEN_REGS; n++) {
        kvq__words x = kvq__words_apart(wide + n * KVQ__LANES * stride + 2 * r, stride);
        words[n] = kvq__all_words(0);
        // Bit 2 e + h of a nibble goes to bit 16 h + 8 e: four copies, far enough apart.
        for (int s = 0; s < 4; s++) {
            kvq__words bits = kvq__right(x, 4 * s) & kvq__all_words(15);
            bits = kvq__multiply(bits, 0x00208041u) & kvq__all_words(0x01010101u);
            words[n] = words[n] | kvq__left(bits, 2 * s);
        }
    }
}

KVQ__INLINE void load_k_fields(const struct unpacking *u, uint32_t r, struct fields *f, int bits)
{
    const uint8_t *high = u->codes + 8 * u->dim;
    kvq__words low[WORD_REGS], other[WORD_REGS];
    if (bits == 1) {
        load_k_bits(u->codes, u->dim, r, low);
    } else {
        kvq__load_k_row(u->codes + ROW_BYTES * r, r & 3, low);
        if (bits == 4)
            kvq__load_k_row(high + ROW_BYTES * r, r & 3, other);
        else if (bits == 3 && u->side->row.wide)
            load_k_wide(high, u->dim, r, other);
        else if (bits == 3)
            load_k_bits(high, u->dim, r, other);
    }
    part(f, low, other, KVQ__TOKEN_REGS, bits);
}

// Channels 4 position + 2 e + h, with byte 2 h + e.
KVQ__INLINE void unpack_k_byte(const struct unpacking *u, const struct fields *f,
                               const struct kvq__levels *levels, const struct factors *lanes,
                               uint32_t r, float *out, int byte, struct how how)
{
    uint32_t c = 2 * ((uint32_t)byte & 1) + (uint32_t)byte / 2, at = PIECE_CHANNELS * r + c;
    const uint32_t step = 4 * KVQ_GROUP_TOKENS;
    out += c * KVQ_GROUP_TOKENS;
    put_values(out, f, byte, 0, levels, lanes, u, at, how);
    put_values(out + step, f, byte, 1, levels, lanes, u, at + 4, how);
    put_values(out + 2 * step, f, byte, 2, levels, lanes, u, at + 8, how);
    put_values(out + 3 * step, f, byte, 3, levels, lanes, u, at + 12, how);
}

KVQ__INLINE void unpack_k_bytes(const struct unpacking *u, const struct factors *lanes, uint32_t r,
                                float *out, bool by_lane)
{
    for (uint32_t s = 0; s < 4; s++) {
        kvq__words words[WORD_REGS];
        kvq__load_k_row(u->codes + (size_t)s * 8 * u->dim + ROW_BYTES * r, r & 3, words);
        for (uint32_t c = 4 * s; c < 4 * s + 4; c++)
            put_bytes(out + (size_t)c * KVQ_GROUP_TOKENS, words, (int)(2 * (c & 1) + (c >> 1 & 1)),
                      lanes, u, PIECE_CHANNELS * r + c, KVQ__TOKEN_REGS, by_lane);
    }
}

// Channels 16 r to 16 r + 15 of all tokens.
KVQ__INLINE void unpack_k(const struct unpacking *u, uint32_t r, float *out, struct how how)
{
    bool wider = how.bits > u->side->row.bits;
    const float *levels_from = wider ? u->side->wide_levels : u->side->levels;
    struct factors lanes;
    struct fields f;
    if (how.by_lane)
        load_factors(&lanes, u, KVQ_GROUP_TOKENS * u->set[r], KVQ__TOKEN_REGS);
    if (how.bits == 8) {
        unpack_k_bytes(u, &lanes, r, out, how.by_lane);
        return;
    }
    const struct kvq__levels levels = kvq__levels_of(levels_from, how.bits, how.bits);
    load_k_fields(u, r, &f, how.bits);
    unpack_k_byte(u, &f, &levels, &lanes, r, out, 0, how);
    unpack_k_byte(u, &f, &levels, &lanes, r, out, 1, how);
    unpack_k_byte(u, &f, &levels, &lanes, r, out, 2, how);
    unpack_k_byte(u, &f, &levels, &lanes, r, out, 3, how);
}

// ---- V ----

// Four tokens of one slab.
struct v_set {
    uint32_t slab, j, half;
    uint32_t width, row; // words of a row; which row of the low plane
};

KVQ__INLINE struct v_set v_set_of(uint32_t slab, uint32_t j, uint32_t half, bool narrow)
{
    return (struct v_set){slab, j, half, narrow ? 16 : 32,
                          2 * j + (narrow ? half ^ (j & 1u) : half)};
}

// The third bits of the first quarter, of the channels at `position`, where high words have them.
KVQ__INLINE void add_v_wide(const uint8_t *wide, uint32_t dim, const struct v_set *set,
                            uint32_t position, kvq__words *high, int regs)
{
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t t = 8 * set->j + 2 * k + set->half, bits = 0;
        memcpy(&bits, wide + t * (dim / 32) + 4 * position, set->width / 8);
        for (int n = 0; n < regs; n++) {
            kvq__words x = kvq__right_by_lane(kvq__all_words(bits), n * KVQ__LANES);
            x = x & kvq__all_words(1);
            high[n] = high[n] | kvq__left(x, (int)(8 * k + 2 * position));
        }
    }
}

KVQ__INLINE void load_v_high(const struct unpacking *u, const struct v_set *set, kvq__words *high,
                             int regs, struct how how)
{
    uint32_t bytes = 4 * set->width; // of a row
    const uint8_t *plane = u->codes + (how.bits == 1 ? 0 : 8 * u->dim);
    if (how.bits == 4) {
        kvq__load_v_row(plane + set->slab * 8 * bytes + set->row * bytes, set->j, high, how.narrow);
        return;
    }
    for (int n = 0; n < regs && how.wide; n++)
        high[n] = kvq__all_words(0);
    if (how.wide) {
        for (uint32_t s = 0; s < (u->dim == 256 ? 2 : 1) && set->slab == 0; s++)
            add_v_wide(plane, u->dim, set, s, high, regs);
        return;
    }
    kvq__load_v_row(plane + set->slab * 4 * bytes + set->j * bytes, set->j, high, how.narrow);
    for (int n = 0; n < regs; n++)
        high[n] = own_bits(high[n], set->half);
}

KVQ__INLINE void load_v_fields(const struct unpacking *u, const struct v_set *set, struct fields *f,
                               int regs, struct how how)
{
    uint32_t bytes = 4 * set->width;
    const uint8_t *row = u->codes + set->slab * 8 * bytes + set->row * bytes;
    kvq__words low[WORD_REGS], high[WORD_REGS];
    if (how.bits != 2)
        load_v_high(u, set, high, regs, how);
    if (how.bits != 1)
        kvq__load_v_row(row, set->j, low, how.narrow);
    part(f, how.bits == 1 ? high : low, high, regs, how.bits);
}

// What the codes of V stand for: those of the first quarter of channels, and the others.
struct v_levels {
    struct kvq__levels wide, rest;
};

// The values at one position of all four bytes: 16 or 32 channels of four tokens.
KVQ__INLINE void unpack_v_position(const struct unpacking *u, const struct v_set *set,
                                   const struct fields *f, const struct v_levels *all, float *out,
                                   int position, struct how how)
{
    uint32_t c = set->slab * SLAB + (uint32_t)position * set->width, dim = u->dim;
    uint32_t at = KVQ_GROUP_TOKENS * u->set[c / 16] + 8 * set->j + set->half;
    const struct kvq__levels *levels = how.wide && c < dim / 4 ? &all->wide : &all->rest;
    struct factors lanes;
    if (how.by_lane)
        load_factors(&lanes, u, c, f->regs);
    out += set->half * dim + c;
    put_values(out, f, 0, position, levels, &lanes, u, at, how);
    put_values(out + 2 * dim, f, 1, position, levels, &lanes, u, at + 2, how);
    put_values(out + 4 * dim, f, 2, position, levels, &lanes, u, at + 4, how);
    put_values(out + 6 * dim, f, 3, position, levels, &lanes, u, at + 6, how);
}

KVQ__INLINE void unpack_v_bytes(const struct unpacking *u, const struct v_set *set, float *out,
                                int regs, struct how how)
{
    uint32_t bytes = 4 * set->width, dim = u->dim;
    const uint8_t *row = u->codes + set->slab * 8 * bytes + set->row * bytes;
    for (uint32_t s = 0; s < 4; s++) {
        uint32_t c = set->slab * SLAB + s * set->width;
        uint32_t at = KVQ_GROUP_TOKENS * u->set[c / 16] + 8 * set->j + set->half;
        struct factors lanes;
        kvq__words words[WORD_REGS];
        if (how.by_lane)
            load_factors(&lanes, u, c, regs);
        kvq__load_v_row(row + (size_t)s * 8 * dim, set->j, words, how.narrow);
        for (uint32_t k = 0; k < 4; k++)
            put_bytes(out + (set->half + 2 * k) * dim + c, words, (int)k, &lanes, u, at + 2 * k,
                      regs, how.by_lane);
    }
}

// Tokens 8 j to 8 j + 7.
KVQ__INLINE void unpack_v(const struct unpacking *u, uint32_t j, float *out, struct how how)
{
    const int regs = (how.narrow ? 16 : 32) / KVQ__LANES;
    uint32_t slabs = how.narrow ? 1 : u->dim / SLAB;
    struct v_levels levels;
    struct fields f;
    levels.rest = kvq__levels_of(u->side->levels, how.wide ? 2 : how.bits, how.bits);
    levels.wide = how.wide ? kvq__levels_of(u->side->wide_levels, 3, 3) : levels.rest;
    for (uint32_t i = 0; i < 2 * slabs; i++) {
        struct v_set set = v_set_of(i / 2, j, i % 2, how.narrow);
        if (how.bits == 8) {
            unpack_v_bytes(u, &set, out, regs, how);
            continue;
        }
        load_v_fields(u, &set, &f, regs, how);
        unpack_v_position(u, &set, &f, &levels, out, 0, how);
        unpack_v_position(u, &set, &f, &levels, out, 1, how);
        unpack_v_position(u, &set, &f, &levels, out, 2, how);
        unpack_v_position(u, &set, &f, &levels, out, 3, how);
    }
}

// ---- By the codec ----

// Values of one piece: K's 16 channels from 16 i on, [16][32], or V's tokens from 8 i on, [8][dim].
typedef void unpack_fn(const struct unpacking *u, uint32_t i, float *out);

#define UNPACK_K(bits)                                                                             \
    static void k_codes_##bits(const struct unpacking *u, uint32_t r, float *out)                  \
    {                                                                                              \
        unpack_k(u, r, out, (struct how){bits, false, false, false});                              \
    }                                                                                              \
    static void k_lanes_##bits(const struct unpacking *u, uint32_t r, float *out)                  \
    {                                                                                              \
        unpack_k(u, r, out, (struct how){bits, true, false, false});                               \
    }
#define UNPACK_V(bits, wide, name)                                                                 \
    static void v_codes_##name(const struct unpacking *u, uint32_t j, float *out)                  \
    {                                                                                              \
        if (u->dim == 64)                                                                          \
            unpack_v(u, j, out, (struct how){bits, false, true, wide});                            \
        else                                                                                       \
            unpack_v(u, j, out, (struct how){bits, false, false, wide});                           \
    }
#define UNPACK_V_LANES(bits)                                                                       \
    static void v_lanes_##bits(const struct unpacking *u, uint32_t j, float *out)                  \
    {                                                                                              \
        if (u->dim == 64)                                                                          \
            unpack_v(u, j, out, (struct how){bits, true, true, false});                            \
        else                                                                                       \
            unpack_v(u, j, out, (struct how){bits, true, false, false});                           \
    }

UNPACK_K(1)
UNPACK_K(2)
UNPACK_K(3)
UNPACK_K(4)
UNPACK_K(8)
UNPACK_V(1, false, 1)
UNPACK_V(2, false, 2)
UNPACK_V(3, false, 3)
UNPACK_V(4, false, 4)
UNPACK_V(8, false, 8)
UNPACK_V(3, true, wide)
UNPACK_V_LANES(1)
UNPACK_V_LANES(2)
UNPACK_V_LANES(3)
UNPACK_V_LANES(4)
UNPACK_V_LANES(8)

// `bits` of a row of K may be one more than the side's.
static unpack_fn *k_function(const struct unpacking *u, uint32_t bits)
{
    static unpack_fn *const codes[] = {k_codes_1, k_codes_2, k_codes_3, k_codes_4, k_codes_8};
    static unpack_fn *const lanes[] = {k_lanes_1, k_lanes_2, k_lanes_3, k_lanes_4, k_lanes_8};
    uint32_t i = bits == 8 ? 4 : bits - 1;
    return u->by_lane ? lanes[i] : codes[i];
}

static unpack_fn *v_function(const struct unpacking *u)
{
    static unpack_fn *const codes[] = {v_codes_1, v_codes_2, v_codes_3, v_codes_4, v_codes_8};
    static unpack_fn *const lanes[] = {v_lanes_1, v_lanes_2, v_lanes_3, v_lanes_4, v_lanes_8};
    uint32_t i = u->side->row.bits == 8 ? 4 : u->side->row.bits - 1u;
    if (u->side->row.wide)
        return v_codes_wide;
    return u->by_lane ? lanes[i] : codes[i];
}

#endif
