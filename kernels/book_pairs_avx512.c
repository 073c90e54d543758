// SPDX-License-Identifier: Apache-2.0
//
// Attention over codebook groups whose codes have 8 bits and stand for 2 channels, AVX-512: the
// exact path. Centroids of 8 bytes are too small to be gathered one by one (book_avx512.c).
//
// A lane is a token. 64 codes are looked up at once, in tables of 256 bytes that hold one byte of
// one channel of all centroids: two instructions that look up 128 entries each, and a choice by the
// code's highest bit. Four such bytes make a float; unpacking puts them together.
//
// K adds up the products of 64 tokens and 4 rows in registers. V stays with a channel
// for a whole chunk, so that its tables stay in registers and sums across lanes are made once.
#include "kernels/avx512.h"

enum {
    CODES = 256,
    BYTES = 4 * CODES, // of one channel's tables
    VALUES = 4,        // registers that 64 codes become
    STEP = 64,         // tokens at a time: two groups
    STEPS = KVQ__CHUNK / STEP,
    BLOCK = 16, // sub-vectors of K whose tables stay in the first level cache if each has its own
    READY_K = 1,
    READY_V = 2,
};

// The packed groups of a chunk, by twos. Which of them the tile sees decides who stands beside
// whom: an odd number of groups that are missing at the front exchanges the halves of all pairs.
// That changes no bit, for tokens of one half are added up in order, and the halves at the end.
struct steps {
    const uint8_t *codes[STEPS][2]; // of K or V; the last pair may be one group twice
    const uint8_t *ahead[STEPS][2]; // what to prefetch; NULL for none
    float *logits[STEPS][2];        // row 0
    uint32_t n;
    bool odd; // the last group is there twice
};

static struct steps steps_of(const struct kvq__tile *tile, const struct kvq__chunk *chunk,
                             uint32_t codes)
{
    struct steps s = {0};
    uint32_t groups = 0;
    for (uint32_t i = 0; i < chunk->groups; i++) {
        const struct kvq__group *g = &chunk->group[i];
        const struct kvq__chunk *next = chunk->next;
        if (g->packed_tokens == 0)
            continue;
        uint32_t at = groups / 2, half = groups % 2;
        s.codes[at][half] = s.codes[at][1] = g->packed.group + codes;
        s.logits[at][half] = s.logits[at][1] = tile->logits + i * KVQ_GROUP_TOKENS;
        if (next && i < next->groups && next->group[i].packed_tokens)
            s.ahead[at][half] = next->group[i].packed.group + codes;
        groups++;
    }
    s.n = (groups + 1) / 2;
    s.odd = groups % 2;
    return s;
}

// ---- Tables ----

// 64 centroids of 2 channels to their places in both channels' tables.
KVQ__INLINE void split_centroids(const float *from, uint8_t *to)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i four = _mm512_set1_epi32(0x0c080400); // byte 0 of four floats
    const __m512i first =
        _mm512_add_epi8(four, _mm512_mullo_epi32(_mm512_and_si512(lanes, _mm512_set1_epi32(7)),
                                                 _mm512_set1_epi32(0x10101010)));
    __m512i x[8];
    for (int i = 0; i < 8; i++)
        x[i] = _mm512_loadu_si512(from + 16 * i);
    for (int e = 0; e < 2; e++) {
        __m512i of = _mm512_add_epi32(_mm512_slli_epi32(lanes, 1), _mm512_set1_epi32(e)), y[4];
        for (int i = 0; i < 4; i++)
            y[i] = _mm512_permutex2var_epi32(x[2 * i], of, x[2 * i + 1]);
        for (int b = 0; b < 4; b++) {
            __m512i at = _mm512_add_epi8(first, _mm512_set1_epi8((char)b));
            __m512i low = _mm512_permutex2var_epi8(y[0], at, y[1]);
            __m512i high = _mm512_permutex2var_epi8(y[2], at, y[3]);
            _mm512_store_si512(to + e * BYTES + b * CODES,
                               _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1));
        }
    }
}

// [tables][2 channels][4 bytes][256 codes].
static void make_tables(const struct kvq__side *side, uint32_t subs, uint8_t *tables)
{
    uint32_t n = side->book_sub ? subs : 1;
    for (uint32_t m = 0; m < n; m++)
        for (uint32_t i = 0; i < CODES; i += 64)
            split_centroids(side->book + m * side->book_sub + 2 * i,
                            tables + (size_t)m * 2 * BYTES + i);
}

// Where the tables of sub-vector m are.
KVQ__INLINE const uint8_t *tables_at(const struct kvq__side *side, const uint8_t *tables,
                                     uint32_t m)
{
    return tables + (side->book_sub ? (size_t)m * 2 * BYTES : 0);
}

KVQ__INLINE __m512i load_codes(const struct steps *s, uint32_t step, uint32_t m)
{
    const void *low = s->codes[step][0] + KVQ_GROUP_TOKENS * m;
    const void *high = s->codes[step][1] + KVQ_GROUP_TOKENS * m;
    __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256(low));
    return _mm512_inserti64x4(x, _mm256_loadu_si256(high), 1);
}

// Values of 64 tokens of one channel. Lane of 128 bits L of register j: tokens 16 L + 4 j and on.
KVQ__INLINE void look_up(__m512i codes, const uint8_t *table, __m512 x[VALUES])
{
    __mmask64 upper = _mm512_movepi8_mask(codes);
    __m512i b[4];
    for (int i = 0; i < 4; i++) {
        const uint8_t *t = table + i * CODES;
        __m512i low =
            _mm512_permutex2var_epi8(_mm512_load_si512(t), codes, _mm512_load_si512(t + 64));
        __m512i high =
            _mm512_permutex2var_epi8(_mm512_load_si512(t + 128), codes, _mm512_load_si512(t + 192));
        b[i] = _mm512_mask_blend_epi8(upper, low, high);
    }
    __m512i first = _mm512_unpacklo_epi8(b[0], b[1]), second = _mm512_unpackhi_epi8(b[0], b[1]);
    __m512i third = _mm512_unpacklo_epi8(b[2], b[3]), fourth = _mm512_unpackhi_epi8(b[2], b[3]);
    x[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(first, third));
    x[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(first, third));
    x[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(second, fourth));
    x[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(second, fourth));
}

// From the order of look_up to that of tokens, and back: lane L of register j becomes lane j of
// register L.
KVQ__INLINE void transpose_lanes(const __m512 x[4], __m512 y[4])
{
    __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    __m512 c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    y[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    y[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    y[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    y[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

// ---- K ----

KVQ__INLINE void store_logits(const struct steps *s, uint32_t step, size_t row,
                              const __m512 sum[VALUES], bool add)
{
    __m512 x[VALUES];
    transpose_lanes(sum, x);
    for (int half = 0; half < (s->odd && step == s->n - 1 ? 1 : 2); half++) {
        float *to = s->logits[step][half] + row * KVQ__LOGITS_STRIDE;
        for (int i = 0; i < 2; i++, to += 16) {
            __m512 y = x[2 * half + i];
            _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), y) : y);
        }
    }
}

// Sub-vectors [from, to) of one step.
KVQ__INLINE void qk_step(const struct kvq__tile *tile, const struct steps *s, uint32_t step,
                         uint32_t row, uint32_t from, uint32_t to, int rows)
{
    const float *q = tile->qt + row * tile->dim;
    __m512 acc[KVQ__TILE4][VALUES];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VALUES; j++)
            acc[i][j] = _mm512_setzero_ps();
    for (uint32_t m = from; m < to; m++) {
        __m512i codes = load_codes(s, step, m);
        const uint8_t *table = tables_at(&tile->codec->k, tile->scratch, m);
        for (int half = 0; half < 2; half++)
            if (s->ahead[step][half] && row == 0)
                kvq__fetch(s->ahead[step][half] + KVQ_GROUP_TOKENS * m);
        for (uint32_t e = 0; e < 2; e++) {
            __m512 x[VALUES];
            look_up(codes, table + e * BYTES, x);
            for (int i = 0; i < rows; i++) {
                __m512 y = _mm512_set1_ps(q[(uint32_t)i * tile->dim + 2 * m + e]);
                for (int j = 0; j < VALUES; j++)
                    acc[i][j] = _mm512_fmadd_ps(x[j], y, acc[i][j]);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        store_logits(s, step, row + (size_t)i, acc[i], from > 0);
}

static void multiply_norms(const struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    for (uint32_t i = 0; i < chunk->groups; i++) {
        const uint8_t *norms = chunk->group[i].packed.group + tile->codec->layout.k_norms;
        if (chunk->group[i].packed_tokens == 0)
            continue;
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += 16) {
            __m512 norm = kvq__load_f16(norms + 2 * t);
            for (uint32_t r = 0; r < tile->rows; r++) {
                float *at = tile->logits + (size_t)r * KVQ__LOGITS_STRIDE + 32 * i + t;
                _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), norm));
            }
        }
    }
}

static bool is_pairs(const struct kvq__side *side)
{
    return side->row.vector == 2 && side->row.bits == 8;
}

static bool qk_chunk(struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    const struct kvq__codec *c = tile->codec;
    uint32_t subs = c->dim / 2;
    if (!is_pairs(&c->k))
        return false;
    if (!(tile->ready & READY_K))
        make_tables(&c->k, subs, tile->scratch);
    tile->ready |= READY_K;
    struct steps s = steps_of(tile, chunk, c->layout.k_codes);
    uint32_t block = c->k.book_sub ? BLOCK : subs;
    for (uint32_t m = 0; m < subs; m += block)
        for (uint32_t step = 0; step < s.n; step++)
            for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
                KVQ__BY_ROWS(tile->rows - r, qk_step(tile, &s, step, r, m, m + block, ROWS));
    if (c->has_norms)
        multiply_norms(tile, chunk);
    return true;
}

// ---- V ----

// Weights of four rows in the order of look_up.
struct weights {
    _Alignas(64) float of[KVQ__TILE4][KVQ__CHUNK];
};

KVQ__INLINE void set_weights(const struct steps *s, uint32_t row, struct weights *w, int rows)
{
    for (uint32_t step = 0; step < s->n; step++)
        for (int i = 0; i < rows; i++) {
            __m512 x[VALUES], y[VALUES];
            for (int j = 0; j < VALUES; j++) {
                const float *p = s->logits[step][j / 2] + (row + (size_t)i) * KVQ__LOGITS_STRIDE;
                bool none = s->odd && step == s->n - 1 && j > 1;
                x[j] = none ? _mm512_setzero_ps() : _mm512_loadu_ps(p + 16 * (j % 2));
            }
            transpose_lanes(x, y);
            for (int j = 0; j < VALUES; j++)
                _mm512_store_ps(w->of[i] + step * STEP + 16 * (uint32_t)j, y[j]);
        }
}

// The codes of one sub-vector, put together: groups may lie a multiple of 4 KiB apart, and so many
// of their lines would not stay in the first level cache.
struct codes {
    __m512i of[STEPS];
};

// One channel's sums of up to four rows.
KVQ__INLINE __m128 pv_channel(const struct steps *s, const struct weights *w, const uint8_t *table,
                              const struct codes *codes, int rows)
{
    __m512 acc[KVQ__TILE4][2];
    for (int i = 0; i < KVQ__TILE4; i++)
        acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (uint32_t step = 0; step < s->n; step++) {
        __m512 x[VALUES];
        look_up(codes->of[step], table, x);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < VALUES; j++) {
                __m512 p = _mm512_load_ps(w->of[i] + step * STEP + 16 * (uint32_t)j);
                acc[i][j % 2] = _mm512_fmadd_ps(x[j], p, acc[i][j % 2]);
            }
    }
    for (int i = 0; i < rows; i++)
        acc[i][0] = _mm512_add_ps(acc[i][0], acc[i][1]);
    return _mm512_castps512_ps128(kvq__sum4(acc[0][0], acc[1][0], acc[2][0], acc[3][0]));
}

KVQ__INLINE void pv_rows(struct kvq__tile *tile, const struct steps *s, const uint8_t *tables,
                         uint32_t row, int rows)
{
    struct weights w;
    struct codes codes;
    set_weights(s, row, &w, rows);
    for (uint32_t m = 0; m < tile->dim / 2; m++) {
        const uint8_t *table = tables_at(&tile->codec->v, tables, m);
        for (uint32_t step = 0; step < s->n; step++) {
            codes.of[step] = load_codes(s, step, m);
            for (int half = 0; half < 2; half++)
                if (s->ahead[step][half] && row == 0 && m % 2 == 0)
                    kvq__fetch(s->ahead[step][half] + KVQ_GROUP_TOKENS * m);
        }
        for (uint32_t e = 0; e < 2; e++) {
            float sum[KVQ__TILE4], *o = tile->ot + row * tile->dim + 2 * m + e;
            _mm_storeu_ps(sum, pv_channel(s, &w, table + e * BYTES, &codes, rows));
            for (int i = 0; i < rows; i++)
                o[(uint32_t)i * tile->dim] += sum[i];
        }
    }
}

static bool pv_chunk(struct kvq__tile *tile, const struct kvq__chunk *chunk)
{
    const struct kvq__codec *c = tile->codec;
    uint32_t subs = c->dim / 2;
    uint8_t *tables = (uint8_t *)tile->scratch + KVQ__SCRATCH_BYTES / 2;
    if (!is_pairs(&c->v))
        return false;
    if (!(tile->ready & READY_V))
        make_tables(&c->v, subs, tables);
    tile->ready |= READY_V;
    struct steps s = steps_of(tile, chunk, c->layout.v_codes);
    for (uint32_t r = 0; r < tile->rows && s.n; r += KVQ__TILE4)
        KVQ__BY_ROWS(tile->rows - r, pv_rows(tile, &s, tables, r, ROWS));
    return true;
}

static_assert(KVQ_MAX_HEAD_DIM / 2 * 2 * BYTES <= KVQ__SCRATCH_BYTES / 2, "tables fit the scratch");

void kvq__init_avx512_book_pairs(struct kvq_kernels *k)
{
    k->qk_chunk[KVQ__BOOK] = qk_chunk;
    k->pv_chunk[KVQ__BOOK] = pv_chunk;
}
