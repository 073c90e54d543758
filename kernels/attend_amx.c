// SPDX-License-Identifier: Apache-2.0
//
// Attention of many query rows at once, as prompts bring them: products of matrices by AMX.
//
// A tile register is 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 bf16 numbers
// with 32 by 16 others, and adds the sums of two neighbours at a time in fp32. So on the exact path
// an fp32 number is written as the sum of three bf16 ones: the number rounded, what is left,
// rounded, and once more. Six products of these parts are as good as one in fp32; five do for keys
// and values that are stored as fp16, which two parts hold, and three for bf16. The fast path takes
// the product of the first parts alone where keys and values are packed.
//
// The 32 numbers that one instruction sums may stand in any order, if both factors have the same:
// words pair number i with number i + 16, which needs no shuffle from two registers of 16 floats.
//
//     logits   16 query rows, words of channels (as stored)  x  words of channels, 16 tokens
//     values   16 query rows, words of tokens (as computed)  x  words of tokens, 16 channels
//
// Keys alone have to be transposed, once for all rows of the item. Four accumulators, of two by two
// tiles, meet four factors in the eight registers: 14 loads for 24 instructions of 16 cycles each.
// On the fast path the softmax step writes the words of packed groups' weights itself. Groups that
// are part packed and part raw, and outliers, take the loops of AVX-512.
#include "kernels/softmax_avx512.h"

enum {
    SIDE = 16,           // rows of a tile, and words of one of its rows
    WORDS = SIDE * SIDE, // of a tile
    SPAN = 32,           // numbers that one instruction sums: channels, or a group's tokens
    GROUPS = KVQ__CHUNK_GROUPS,
    STRIPE = KVQ_TILE_ROWS, // rows whose logits there are at a time
    SPANS = KVQ_MAX_HEAD_DIM / SPAN,
    COLUMNS = KVQ_MAX_HEAD_DIM / SIDE,
    MOST_PARTS = 3,
};
static_assert((int)SPAN == (int)KVQ_GROUP_TOKENS, "a group is summed by one instruction");
static_assert(KVQ__TALL_ROWS % STRIPE == 0 && STRIPE % (2 * SIDE) == 0,
              "rows go in pairs of tiles");

typedef uint32_t words[WORDS]; // of a tile

enum { OF_RAW, OF_PACKED, BASES }; // queries as they came, and transformed as packed keys are

// In the tile's scratch memory: factors by their parts. Keys and values are those of the chunk.
// Tiles that a loop takes one after the other stand one after the other.
struct amx {
    uint32_t dim;
    bool exact;
    bool summed[BASES]; // values were added to the sums of raw, of packed ones
    _Alignas(64) words q[BASES][MOST_PARTS][KVQ__TALL_ROWS / SIDE][SPANS];
    words k[MOST_PARTS][GROUPS][2][SPANS]; // of 16 tokens each
    words v[MOST_PARTS][COLUMNS / 2][GROUPS][2];
    words p[MOST_PARTS][STRIPE / SIDE][GROUPS];
};

// Tiles from one part of a factor to its next one.
enum {
    Q_PART = KVQ__TALL_ROWS / SIDE * SPANS,
    K_PART = GROUPS * 2 * SPANS,
    V_PART = COLUMNS * GROUPS,
    P_PART = STRIPE / SIDE * GROUPS,
};
static_assert(sizeof(struct amx) <= KVQ__SCRATCH_BYTES, "the workspace holds the state");

// ---- Into bf16 ----

// Words of 32 numbers, with a's lanes below and b's above: rounded to nearest even, subnormal ones
// to 0, as tiles take them. NaN stays NaN.
KVQ__INLINE __m512i round_words(__m512 a, __m512 b)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

// Row `at` of the parts of 32 numbers, `step` tiles apart.
KVQ__INLINE void split(__m512 a, __m512 b, int parts, words *part, size_t step, uint32_t at)
{
    for (int i = 0; i < parts; i++) {
        __m512i w = round_words(a, b);
        _mm512_store_si512(part[i * step] + SIDE * at, w);
        __m512i above = _mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000));
        a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)));
        b = _mm512_sub_ps(b, _mm512_castsi512_ps(above));
    }
}

// The same of 16 rows, `stride` floats apart; rows from n on are 0.
KVQ__INLINE void split_rows(const float *rows, size_t stride, uint32_t n, int parts, words *part,
                            size_t step)
{
    for (uint32_t r = 0; r < SIDE; r++) {
        const float *x = rows + r * stride;
        __m512 a = r < n ? _mm512_loadu_ps(x) : _mm512_setzero_ps();
        __m512 b = r < n ? _mm512_loadu_ps(x + SIDE) : _mm512_setzero_ps();
        split(a, b, parts, part, step, r);
    }
}

// Word i of rows r, r + 4, r + 8 and r + 12 to word i + 3, in the four lanes of a register.
KVQ__INLINE __m512i load_lanes(const uint32_t *x)
{
    __m512i y = _mm512_castsi128_si512(_mm_load_si128((const __m128i *)(const void *)x));
    y = _mm512_inserti32x4(y, _mm_load_si128((const __m128i *)(const void *)(x + 4 * SIDE)), 1);
    y = _mm512_inserti32x4(y, _mm_load_si128((const __m128i *)(const void *)(x + 8 * SIDE)), 2);
    return _mm512_inserti32x4(y, _mm_load_si128((const __m128i *)(const void *)(x + 12 * SIDE)), 3);
}

static inline void transpose(const uint32_t *from, uint32_t *to)
{
    for (uint32_t i = 0; i < SIDE; i += 4, to += 4 * SIDE) {
        __m512i a = load_lanes(from + i), b = load_lanes(from + SIDE + i);
        __m512i c = load_lanes(from + 2 * SIDE + i), d = load_lanes(from + 3 * SIDE + i);
        __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
        _mm512_store_si512(to, _mm512_unpacklo_epi64(ab, cd));
        _mm512_store_si512(to + SIDE, _mm512_unpackhi_epi64(ab, cd));
        ab = _mm512_unpackhi_epi32(a, b), cd = _mm512_unpackhi_epi32(c, d);
        _mm512_store_si512(to + 2 * SIDE, _mm512_unpacklo_epi64(ab, cd));
        _mm512_store_si512(to + 3 * SIDE, _mm512_unpackhi_epi64(ab, cd));
    }
}

// ---- Keys and values of a group ----

static bool is_raw(const struct kvq__group *g)
{
    return g->raw_from == 0 && g->raw_to == KVQ_GROUP_TOKENS;
}

// Whether all 32 rows of keys and of values are there to be multiplied.
static bool is_whole(const struct kvq__group *g)
{
    return g->packed_tokens > 0 || is_raw(g);
}

// Parts of queries and weights, and of the keys and values that they meet. What is stored in 16
// bits is multiplied exactly on either path, by exact weights, as the loops of few rows do.
static int parts_of_rows(const struct amx *x, bool packed)
{
    return x->exact || !packed ? MOST_PARTS : 1;
}

static int parts_of_group(const struct amx *x, const struct kvq__codec *c, bool packed)
{
    if (packed)
        return parts_of_rows(x, true);
    return c->raw_dtype == KVQ_F16 ? 2 : 1;
}

// Written out for each number of parts.
#define BY_PARTS(parts, call)                                                                      \
    do {                                                                                           \
        switch (parts) {                                                                           \
        case 1: {                                                                                  \
            enum { PARTS = 1 };                                                                    \
            call;                                                                                  \
        } break;                                                                                   \
        case 2: {                                                                                  \
            enum { PARTS = 2 };                                                                    \
            call;                                                                                  \
        } break;                                                                                   \
        default: {                                                                                 \
            enum { PARTS = MOST_PARTS };                                                           \
            call;                                                                                  \
        }                                                                                          \
        }                                                                                          \
    } while (0)

KVQ__INLINE void make_keys(const float *rows, uint32_t dim, words (*to)[SPANS], int parts)
{
    _Alignas(64) words rounded[MOST_PARTS];
    for (uint32_t half = 0; half < 2; half++)
        for (uint32_t s = 0; s < dim / SPAN; s++) {
            split_rows(rows + (size_t)SIDE * half * dim + (size_t)SPAN * s, dim, SIDE, parts,
                       rounded, 1);
            for (int i = 0; i < parts; i++)
                transpose(rounded[i], (&to[half][s])[(size_t)i * K_PART]);
        }
}

// Tiles of 16 channels; those of channel 32 and the next 16 stand behind those of all other groups.
KVQ__INLINE void make_values(const float *rows, uint32_t dim, words (*to)[GROUPS][2], int parts)
{
    for (uint32_t c = 0; c < dim / SIDE; c++)
        for (uint32_t t = 0; t < SIDE; t++) {
            const float *a = rows + (size_t)t * dim + (size_t)SIDE * c;
            split(_mm512_load_ps(a), _mm512_load_ps(a + (size_t)SIDE * dim), parts,
                  &to[c / 2][0][c % 2], V_PART, t);
        }
}

static void make_group(const struct kvq_kernels *k, const struct kvq__tile *tile,
                       const struct kvq__group *g, struct amx *x, uint32_t i)
{
    const struct kvq__codec *c = tile->codec;
    size_t n = (size_t)KVQ_GROUP_TOKENS * x->dim;
    int parts = parts_of_group(x, c, g->packed_tokens > 0);
    if (g->packed_tokens)
        k->dequant_k[c->k.kind](c, &g->packed, tile->group_f32);
    else
        k->load(g->raw_k, c->raw_dtype, tile->group_f32, n);
    BY_PARTS(parts, make_keys(tile->group_f32, x->dim, x->k[0][i], PARTS));
    if (g->packed_tokens)
        k->dequant_v[c->v.kind](c, &g->packed, tile->group_f32);
    else
        k->load(g->raw_v, c->raw_dtype, tile->group_f32, n);
    BY_PARTS(parts, make_values(tile->group_f32, x->dim, (void *)&x->v[0][0][i], PARTS));
}

static void make_queries(const float *q, const struct kvq__tile *tile, struct amx *x, int base)
{
    for (uint32_t r = 0; r < tile->rows; r += SIDE) {
        uint32_t n = tile->rows - r < SIDE ? tile->rows - r : SIDE;
        for (uint32_t s = 0; s < x->dim / SPAN; s++) {
            words *to = &x->q[base][0][r / SIDE][s];
            const float *at = q + (size_t)r * x->dim + (size_t)SPAN * s;
            BY_PARTS(parts_of_rows(x, base == OF_PACKED),
                     split_rows(at, x->dim, n, PARTS, to, Q_PART));
        }
    }
}

// ---- Products ----

// Tile registers; gcc's intrinsics take digits alone.
#define C00 0
#define C01 1
#define C10 2
#define C11 3
#define A0  4
#define A1  5
#define B0  6
#define B1  7

// Eight whole registers, as ldtilecfg reads it. Constant, because gcc 12 believes that the
// intrinsic reads 8 bytes, and leaves out stores behind them.
static const struct {
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} whole_registers = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
static_assert(sizeof whole_registers == 64, "no padding");

// What the thread's tiles were before: an engine's libraries, as ggml, configure them once.
struct tile_config {
    _Alignas(64) uint8_t bytes[64]; // 0: there was none
};

KVQ__INLINE void take_tiles(struct tile_config *before)
{
#ifdef KVQ_AVX512_IN_SOFTWARE
    before->bytes[0] = 0;
#else
    __asm__ volatile("sttilecfg %0" : "=m"(*before));
#endif
    _tile_loadconfig(&whole_registers);
}

// Where there was none, none is left: each switch of threads would save the registers.
KVQ__INLINE void give_tiles_back(const struct tile_config *before)
{
    _tile_release();
#ifdef KVQ_AVX512_IN_SOFTWARE
    (void)before;
#else
    if (before->bytes[0])
        __asm__ volatile("ldtilecfg %0" ::"m"(*before));
#endif
}

// gcc 12 does not know that loads of tiles read memory: what was written must be there by now.
KVQ__INLINE void finish_stores(void)
{
    __asm__ volatile("" ::: "memory");
}

KVQ__INLINE void dots(void)
{
    _tile_dpbf16ps(C00, A0, B0);
    _tile_dpbf16ps(C01, A0, B1);
    _tile_dpbf16ps(C10, A1, B0);
    _tile_dpbf16ps(C11, A1, B1);
}

KVQ__INLINE void load_factors_a(const words a0, const words a1)
{
    _tile_loadd(A0, a0, SIDE * sizeof(uint32_t));
    _tile_loadd(A1, a1, SIDE * sizeof(uint32_t));
}

KVQ__INLINE void load_factors_b(const words b0, const words b1)
{
    _tile_loadd(B0, b0, SIDE * sizeof(uint32_t));
    _tile_loadd(B1, b1, SIDE * sizeof(uint32_t));
}

// Two factors: the first tile of each, and how many tiles its next part is behind.
struct pair {
    const words *first, *second;
    size_t step;
};

// Parts that are multiplied, in an order in which each step changes one of the two.
static const struct {
    int a, b;
} steps[] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};
enum { STEPS = sizeof steps / sizeof *steps };

// Adds two factors times two others to the accumulators: of `parts` parts, and of `others` no more.
KVQ__INLINE void multiply(struct pair a, struct pair b, int parts, int others)
{
    int i = -1, j = -1;
#pragma GCC unroll 6
    for (int s = 0; s < STEPS; s++) {
        if (steps[s].a >= parts || steps[s].b >= others)
            continue;
        if (steps[s].a != i)
            load_factors_a(a.first[steps[s].a * a.step], a.second[steps[s].a * a.step]);
        if (steps[s].b != j)
            load_factors_b(b.first[steps[s].b * b.step], b.second[steps[s].b * b.step]);
        i = steps[s].a;
        j = steps[s].b;
        dots();
    }
}

KVQ__INLINE void load_sums(const float *at, size_t stride)
{
    _tile_loadd(C00, at, stride * sizeof(float));
    _tile_loadd(C01, at + SIDE, stride * sizeof(float));
    _tile_loadd(C10, at + SIDE * stride, stride * sizeof(float));
    _tile_loadd(C11, at + SIDE * stride + SIDE, stride * sizeof(float));
}

KVQ__INLINE void store_sums(float *at, size_t stride)
{
    _tile_stored(C00, at, stride * sizeof(float));
    _tile_stored(C01, at + SIDE, stride * sizeof(float));
    _tile_stored(C10, at + SIDE * stride, stride * sizeof(float));
    _tile_stored(C11, at + SIDE * stride + SIDE, stride * sizeof(float));
}

// Logits of 32 rows for a group.
KVQ__INLINE void qk_tiles(const words (*q)[SPANS], const words (*k)[SPANS], uint32_t spans,
                          float *logits, int parts, int others)
{
    _tile_zero(C00);
    _tile_zero(C01);
    _tile_zero(C10);
    _tile_zero(C11);
    finish_stores();
    for (uint32_t s = 0; s < spans; s++)
        multiply((struct pair){&q[0][s], &q[1][s], Q_PART},
                 (struct pair){&k[0][s], &k[1][s], K_PART}, parts, others);
    store_sums(logits, KVQ__LOGITS_STRIDE);
}

static void qk_group(const words (*q)[SPANS], const words (*k)[SPANS], uint32_t spans,
                     float *logits, bool exact, int others)
{
    if (exact)
        BY_PARTS(others, qk_tiles(q, k, spans, logits, MOST_PARTS, PARTS));
    else
        qk_tiles(q, k, spans, logits, 1, 1);
}

// Adds p * v of 32 rows and 32 channels over the groups whose bits are set.
KVQ__INLINE void pv_tiles(const words (*p)[GROUPS], const words (*v)[2], uint32_t groups, float *o,
                          uint32_t dim, int parts, int others)
{
    finish_stores();
    load_sums(o, dim);
    for (; groups; groups &= groups - 1) {
        uint32_t g = (uint32_t)__builtin_ctz(groups);
        multiply((struct pair){&p[0][g], &p[1][g], P_PART},
                 (struct pair){&v[g][0], &v[g][1], V_PART}, parts, others);
    }
    store_sums(o, dim);
}

static void pv_groups(const words (*p)[GROUPS], const words (*v)[2], uint32_t groups, float *o,
                      uint32_t dim, bool exact, int others)
{
    if (exact)
        BY_PARTS(others, pv_tiles(p, v, groups, o, dim, MOST_PARTS, PARTS));
    else
        pv_tiles(p, v, groups, o, dim, 1, 1);
}

// ---- A chunk ----

static void logits_of_stripe(const struct kvq_kernels *k, const struct kvq__tile *stripe,
                             const struct kvq__chunk *chunk, const struct amx *x, uint32_t first)
{
    uint32_t packed_base = stripe->qt != stripe->q ? OF_PACKED : OF_RAW;
    for (uint32_t i = 0; i < chunk->groups; i++) {
        const struct kvq__group *g = &chunk->group[i];
        float *logits = stripe->logits + (size_t)i * KVQ_GROUP_TOKENS;
        bool packed = g->packed_tokens > 0;
        for (uint32_t r = 0; is_whole(g) && r < stripe->rows; r += 2 * SIDE) {
            const words(*q)[SPANS] = &x->q[packed ? packed_base : OF_RAW][0][(first + r) / SIDE];
            qk_group(q, x->k[0][i], x->dim / SPAN, logits + (size_t)r * KVQ__LOGITS_STRIDE,
                     x->exact || !packed, parts_of_group(x, stripe->codec, packed));
        }
        if (g->pooled)
            kvq__logits_of_outliers(k, stripe, g, logits);
        if (g->raw_from < g->raw_to && !is_raw(g))
            k->qk_raw(stripe, g->raw_k, g->raw_from, g->raw_to, logits);
    }
}

// Whether the softmax step itself makes the words of the group's weights.
static bool has_words(const struct amx *x, const struct kvq__group *g)
{
    return !x->exact && g->packed_tokens == KVQ_GROUP_TOKENS && !g->pooled;
}

KVQ__INLINE void take_words(void *to, uint32_t group, __m512 a, __m512 b)
{
    words *p = to;
    _mm512_store_si512(p[group], round_words(a, b));
}

// As kvq__weigh. The others' weights are as exact as on the exact path.
static void weigh_stripe(const struct kvq_kernels *k, struct kvq__tile *stripe,
                         const struct kvq__chunk *chunk, struct amx *x)
{
    struct kvq__taker taker = {.take = take_words};
    uint32_t n = chunk->groups * KVQ_GROUP_TOKENS;
    for (uint32_t i = 0; i < chunk->groups; i++)
        taker.groups |= (uint32_t)has_words(x, &chunk->group[i]) << i;
    kvq__finish_logits(k, stripe, chunk);
    if (taker.groups == 0)
        k->softmax(stripe, n);
    for (uint32_t r = 0; taker.groups && r < stripe->rows; r++) {
        taker.to = &x->p[0][r / SIDE][0][(size_t)SIDE * (r % SIDE)];
        stripe->factor[r] =
            kvq__softmax_row(stripe->logits + (size_t)r * KVQ__LOGITS_STRIDE, (int32_t)n,
                             stripe->lo[r], stripe->hi[r], &stripe->m[r], &stripe->l[r], taker);
    }
    if (x->summed[OF_RAW] || (x->summed[OF_PACKED] && stripe->ot == stripe->o))
        kvq__rescale(k, stripe, stripe->o);
    if (x->summed[OF_PACKED] && stripe->ot != stripe->o)
        kvq__rescale(k, stripe, stripe->ot);
}

// Adds the values of the groups whose bits are set, all packed ones or all raw ones.
static void sum_groups(const struct kvq__tile *stripe, const struct amx *x, uint32_t groups,
                       bool packed)
{
    float *o = packed ? stripe->ot : stripe->o;
    int others = parts_of_group(x, stripe->codec, packed);
    for (uint32_t c = 0; groups && c < x->dim; c += SPAN)
        for (uint32_t r = 0; r < stripe->rows; r += 2 * SIDE)
            pv_groups(&x->p[0][r / SIDE], x->v[0][c / SPAN], groups, o + (size_t)r * x->dim + c,
                      x->dim, x->exact || !packed, others);
}

static void values_of_stripe(const struct kvq_kernels *k, const struct kvq__tile *stripe,
                             const struct kvq__chunk *chunk, struct amx *x)
{
    uint32_t packed = 0, raw = 0;
    for (uint32_t i = 0; i < chunk->groups; i++) {
        const struct kvq__group *g = &chunk->group[i];
        float *p = stripe->logits + (size_t)i * KVQ_GROUP_TOKENS;
        if (g->raw_from < g->raw_to && !is_raw(g))
            k->pv_raw(stripe, g->raw_v, g->raw_from, g->raw_to, p);
        kvq__leave_packed(k, stripe, g, p);
        if (!is_whole(g))
            continue;
        *(g->packed_tokens ? &packed : &raw) |= 1u << i;
        for (uint32_t r = 0; !has_words(x, g) && r < stripe->rows; r += SIDE) {
            uint32_t n = stripe->rows - r < SIDE ? stripe->rows - r : SIDE;
            const float *at = p + (size_t)r * KVQ__LOGITS_STRIDE;
            BY_PARTS(parts_of_rows(x, g->packed_tokens > 0),
                     split_rows(at, KVQ__LOGITS_STRIDE, n, PARTS, &x->p[0][r / SIDE][i], P_PART));
        }
    }
    sum_groups(stripe, x, packed, true);
    sum_groups(stripe, x, raw, false);
}

static struct kvq__tile stripe_of(const struct kvq__tile *tile, uint32_t first)
{
    struct kvq__tile s = *tile;
    size_t at = (size_t)first * tile->dim;
    s.rows = tile->rows - first < STRIPE ? tile->rows - first : STRIPE;
    s.q += at;
    s.qt += at;
    s.m += first;
    s.l += first;
    s.factor += first;
    s.lo += first;
    s.hi += first;
    s.o += at;
    s.ot += at;
    return s;
}

static void attend_chunk_tall_amx(const struct kvq_kernels *k, struct kvq__tile *tile,
                                  const struct kvq__chunk *chunk, bool fast)
{
    struct amx *x = tile->scratch;
    if (!tile->ready) {
        x->dim = tile->dim;
        x->exact = !fast;
        memset(x->summed, 0, sizeof x->summed);
        make_queries(tile->q, tile, x, OF_RAW);
        if (tile->qt != tile->q)
            make_queries(tile->qt, tile, x, OF_PACKED);
        tile->ready = 1;
    }
    for (uint32_t i = 0; i < chunk->groups; i++)
        if (is_whole(&chunk->group[i]))
            make_group(k, tile, &chunk->group[i], x, i);
    struct tile_config before;
    take_tiles(&before);
    for (uint32_t first = 0; first < tile->rows; first += STRIPE) {
        struct kvq__tile stripe = stripe_of(tile, first);
        logits_of_stripe(k, &stripe, chunk, x, first);
        weigh_stripe(k, &stripe, chunk, x);
        values_of_stripe(k, &stripe, chunk, x);
    }
    give_tiles_back(&before);
    for (uint32_t i = 0; i < chunk->groups; i++) {
        const struct kvq__group *g = &chunk->group[i];
        x->summed[OF_PACKED] |= g->packed_tokens > 0;
        x->summed[OF_RAW] |= g->raw_from < g->raw_to || g->pooled;
    }
}

void kvq__init_amx(struct kvq_kernels *k)
{
    k->attend_chunk_tall = attend_chunk_tall_amx;
}
