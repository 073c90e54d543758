// SPDX-License-Identifier: Apache-2.0
//
// Attention over packed groups with byte dot products (AVX-512 VNNI): the fast path of oscar's and
// KIVI's formats and of kvq2, and their exact one.
//
// vpdpbusd multiplies 64 unsigned bytes with 64 signed ones and adds them up in fours, so one
// instruction does four times the work of an fp32 FMA. What it needs are bytes on both sides:
//
// - K: the codes as they come out of the planes are the unsigned side; a word is one token and
//   four channels. The signed side is q * scale, rounded to int8 once per group of 32 tokens and
//   broadcast. Sums over channels stay in their lane: no horizontal adds.
// - V: a word is one channel and four tokens. The unsigned side is p * scale, rounded to u8 with
//   a step of its own for each row and group, which the largest p * scale sets; the codes are the
//   signed side.
//
// Rounding noise is proportional to what is multiplied with it, so codes are taken as centred on
// zero. For V a table lookup makes a multiple of code - 1.5 (for 2 bits) of a code, at the price of
// a mask, or a difference does of a code in the upper bits of a byte. K's are unsigned, so there
// the middle times the rounded sum is taken off again. What the middle code stands for (zero + 1.5
// * scale) goes with exact fp32 weights into a bias of the logits, and into sums of its own for the
// values; it never passes through 8 bits.
//
// V of four levels (kvq2) has one scale for a token and none for channels: a weight is a byte for
// each token, made of p * scale at once, and the table has the levels as small whole numbers.
//
// Both operands are turned into bytes for all groups of a chunk (512 tokens) before the first of
// them is multiplied, and in steps that each run over all groups: from scales to bytes is a chain
// of some hundred cycles, which thus hides behind those of other groups.
//
// On the exact path q * scale and p * scale are whole numbers of 24 bits, with a step of 2^-23 (or
// 2^-24) of the largest of their row: about as fine as what fp32 loses in sums of so many products.
// Such a number is three digits of base 256, so three dot products of bytes do what four FMA would,
// and codes need not become floats. Sums of digits are exact, and put together once: those of K for
// each group, where the digits are balanced, from -128 to 127, for codes are the unsigned side;
// those of V for each chunk, in which a row's weights have one step for each 32 channels. Codes of
// K are not centred here: what code 0 stands for goes into the bias. An error is relative to the
// largest q * scale of the group (p * scale of the chunk), so where one token is far from all
// others of its group, the others' logits are as exact as its own.
#include "kernels/vnni_avx512.h"

// Record n of a chunk; where there is none, what was read already.
static const uint8_t *record_of(const struct kvq__vnni *v, const struct kvq__chunk *chunk,
                                uint32_t n)
{
    uint32_t group = n * KVQ_BLOCK_GROUPS;
    bool packed = chunk && group < chunk->groups && chunk->group[group].packed_tokens;
    return packed ? chunk->group[group].packed.group : (const uint8_t *)v->q16;
}

// Records 2 n and 2 n + 1 of the next chunk. Before its first one this chunk's last was fetched.
static void set_ahead(const struct kvq__tile *tile, uint32_t n)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const struct kvq__chunk *next = v->chunk->next;
    size_t end = (size_t)KVQ_BLOCK_GROUPS * tile->codec->layout.group_bytes - kvq__lag(tile->dim);
    const uint8_t *before = n ? record_of(v, next, KVQ__RECORDS_AHEAD * n - 1)
                              : record_of(v, v->chunk, 2 * KVQ__RECORDS_AHEAD - 1);
    for (uint32_t i = 0; i < KVQ__RECORDS_AHEAD; i++) {
        v->behind[i] = before + end;
        v->ahead[i] = before = record_of(v, next, KVQ__RECORDS_AHEAD * n + i);
    }
}

// Keys of a chunk that nobody fetched, in one burst.
KVQ__INLINE void fetch_cold(const struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    for (uint32_t i = 0; i < chunk->groups; i++)
        for (uint32_t at = 0; at < tile->codec->layout.v_codes; at += 64)
            if (chunk->group[i].packed_tokens)
                kvq__fetch(chunk->group[i].packed.group + at);
}

static void begin_k(struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    v->chunk = chunk;
    v->ahead_of_dots = tile->codec->layout.k_set ? 0 : 4 * KVQ__GROUPS_A_RECORD * tile->dim;
    set_ahead(tile, 0);
    kvq__find_own_k(chunk, v->k_of);
    if (!chunk->fetched)
        fetch_cold(tile, chunk);
}

static void begin_v(struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    v->chunk = chunk;
    set_ahead(tile, 1);
}

// Bytes of q * scale have one step for all channels of a row and group, set by the strongest. If
// some channels of keys that are neither rotated nor divided (KIVI's) are much stronger than the
// others, that costs up to 0.4 of what quantizing to 4 bits does. There the others set the step,
// and the strong ones have a second digit, which is multiplied for their words alone.
static bool may_have_strong(const struct kvq__codec *c)
{
    return c->k_bits == 4 && !c->has_norms;
}

static bool qk_chunk_vnni(struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    begin_k(tile, chunk);
    if (may_have_strong(tile->codec)) {
        kvq__vnni_qk_strong(tile);
        return true;
    }
    kvq__vnni_prepare_k(tile);
    kvq__vnni_qk(tile);
    return true;
}

static bool pv_chunk_vnni(struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    begin_v(tile, chunk);
    kvq__vnni_prepare_v(tile);
    kvq__vnni_pv(tile);
    kvq__vnni_flush(tile);
    return true;
}

// The exact path of formats that have a fast one.
static bool qk_chunk_digits(struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    if (!kvq__fits_bytes(tile->codec))
        return false;
    begin_k(tile, chunk);
    kvq__digits_qk(tile);
    return true;
}

static bool pv_chunk_digits(struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    if (!kvq__fits_bytes(tile->codec))
        return false;
    begin_v(tile, chunk);
    kvq__digits_pv(tile);
    kvq__vnni_flush(tile);
    return true;
}

static bool has_fast_vnni(const struct kvq__codec *c, uint32_t rows)
{
    return kvq__fits_bytes(c) && rows <= KVQ_TILE_ROWS;
}

static void prepare_vnni(struct kvq__tile *tile)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t r = 0; r < tile->rows; r++) {
        const float *q = tile->qt + (size_t)r * tile->dim;
        __m512 top = _mm512_set1_ps(1e-30f);
        for (uint32_t i = 0; i < tile->dim; i += 16)
            top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_load_ps(q + i)));
        top = kvq__max_all(top);
        __m512 factor = _mm512_div_ps(_mm512_set1_ps(KVQ__INT16_TOP), top);
        uint32_t slot = tile->slot + r;
        v->q_unit[slot] = _mm512_cvtss_f32(top) / KVQ__INT16_TOP;
        for (uint32_t i = 0; i < tile->dim; i += 32) {
            __m512i x =
                kvq__to_int16(_mm512_load_ps(q + i), _mm512_load_ps(q + i + 16), factor, factor);
            x = _mm512_shuffle_epi8(x, kvq__byte_order());
            _mm512_store_si512(v->q16[slot] + i, x);
            _mm512_store_si512(v->abs16[slot] + i, _mm512_abs_epi16(x));
        }
    }
}

// The steps are the common ones, but packed groups are multiplied here.
static void attend_chunk_vnni(const struct kvq_kernels *k, struct kvq__tile *tile,
                              const struct kvq__chunk *chunk)
{
    struct kvq_kernels fast = *k;
    fast.qk_chunk[tile->codec->k.kind] = qk_chunk_vnni;
    fast.pv_chunk[tile->codec->v.kind] = pv_chunk_vnni;
    kvq__attend_chunk(&fast, tile, chunk);
}

void kvq__init_avx512_vnni(struct kvq_kernels *k)
{
    k->qk_chunk[KVQ__PER_CHANNEL_32] = k->qk_chunk[KVQ__PER_CHANNEL] = qk_chunk_digits;
    k->pv_chunk[KVQ__PER_TOKEN_32] = k->pv_chunk[KVQ__FOUR_LEVELS] = pv_chunk_digits;
    k->has_fast = has_fast_vnni;
    k->prepare_fast = prepare_vnni;
    k->attend_chunk_fast = attend_chunk_vnni;
}
