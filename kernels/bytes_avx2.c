// SPDX-License-Identifier: Apache-2.0
//
// Attention over packed groups with byte products (vpmaddubsw): AVX2's fast path.
//
// The method is that of vnni_avx512.c: codes on one side, q * scale as int8 (or p * scale as u8) on
// the other, rounded once for each row and group; the middle of the codes stays in fp32. What
// differs is what the instruction leaves: sums of two products in 16 bits, which are added up in
// 16 bits as long as they cannot overflow (32, 16 and 8 steps for K with 2, 3 and 4 bits, 8, 8 and
// 4 for V) and then widened. Four rows are always computed; those that are missing multiply zeros.
//
// Registers: 8 accumulators (4 rows, 16 words), 2 of codes, the broadcast operand, masks.
#include "kernels/avx2.h"

enum { ROWS = 4, SLAB = 128, MAX_VGROUPS = KVQ_MAX_HEAD_DIM / KVQ_GROUP_CHANNELS };

// Lives in the tile's scratch memory.
struct state {
    _Alignas(64) int8_t q[ROWS][KVQ_MAX_HEAD_DIM];           // of one group, as they meet the codes
    uint8_t w[ROWS][MAX_VGROUPS][KVQ_GROUP_TOKENS];          // likewise, in the order of sets
    float unit[ROWS], bias[ROWS];                            // value of 1; of logits
    float scale[KVQ_MAX_HEAD_DIM], middle[KVQ_MAX_HEAD_DIM]; // of the group
    float o[KVQ_TILE_ROWS][KVQ_MAX_HEAD_DIM];                // of the chunk, in the layout's order
    float v_middle[KVQ_TILE_ROWS][MAX_VGROUPS];              // of the chunk, sums of p * middle
};
static_assert(sizeof(struct state) <= KVQ__SCRATCH_BYTES, "the workspace holds the state");

static float centre_of(uint32_t bits)
{
    return 0.5f * (float)((1 << bits) - 1);
}

static inline __m256i broadcast(const void *p)
{
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm256_set1_epi32(word);
}

static inline __m256i load(const uint8_t *p)
{
    return _mm256_load_si256((const void *)p);
}

// Codes at position s of every byte.
KVQ__INLINE __m256i part(__m256i low, __m256i high, int s, int bits)
{
    const __m256i mask = _mm256_set1_epi8(3);
    __m256i x = _mm256_and_si256(_mm256_srli_epi16(low, 2 * s), mask);
    if (bits == 2)
        return x;
    __m256i y = _mm256_and_si256(_mm256_srli_epi16(high, 2 * s), mask);
    return _mm256_or_si256(x, _mm256_slli_epi16(y, 2));
}

// Four registers of int32, natural order, as 32 bytes with signed (or unsigned) saturation.
KVQ__INLINE __m256i to_bytes(const __m256i *x, bool is_signed)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i a = _mm256_packs_epi32(x[0], x[1]), b = _mm256_packs_epi32(x[2], x[3]);
    __m256i y = is_signed ? _mm256_packs_epi16(a, b) : _mm256_packus_epi16(a, b);
    return _mm256_permutevar8x32_epi32(y, order);
}

static inline __m256 size_of(__m256 x)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

// The 1 / n-th of the lines ahead that falls to step i: b + 1 lines for each 16 channels of K, or
// for each 16 words of V, are codes and parameters.
KVQ__INLINE void fetch_step(const struct kvq__tile *tile, uint32_t i, int bits)
{
    for (int line = 0; tile->ahead && line <= bits; line++)
        kvq__fetch(tile->ahead + 64 * (i * (uint32_t)(bits + 1) + (uint32_t)line));
}

// ---- K ----

static void open_k(struct state *v, const struct kvq__codec *c, const struct kvq_packed *packed)
{
    const __m256 centre = _mm256_set1_ps(centre_of(c->k_bits));
    const uint8_t *scales = packed->k_scales, *zeros = packed->k_zeros;
    for (uint32_t i = 0; i < c->dim; i += 8) {
        __m256 scale = kvq__load8(scales + 2 * i, KVQ_F16);
        __m256 zero = kvq__load8(zeros + 2 * i, KVQ_F16);
        _mm256_store_ps(v->scale + i, scale);
        _mm256_store_ps(v->middle + i, _mm256_fmadd_ps(scale, centre, zero));
    }
}

// The bytes of one row; the largest becomes 127. Channels 4 s + {0, 1, 2, 3} of a row of the
// layout stand in bytes 0, 2, 1, 3 of word s.
static void scale_query(struct state *v, const float *q, uint32_t dim, uint32_t n, float centre)
{
    const __m256i order = _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, 0,
                                           2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    __m256 top = _mm256_set1_ps(1e-30f), bias = _mm256_setzero_ps();
    for (uint32_t i = 0; i < dim; i += 8) {
        __m256 x = _mm256_load_ps(q + i);
        top = _mm256_max_ps(top, size_of(_mm256_mul_ps(x, _mm256_load_ps(v->scale + i))));
        bias = _mm256_fmadd_ps(x, _mm256_load_ps(v->middle + i), bias);
    }
    float max = kvq__max_all(top);
    __m256 factor = _mm256_set1_ps(127.0f / max);
    __m256i sum = _mm256_setzero_si256();
    for (uint32_t i = 0; i < dim; i += 32) {
        __m256i x[4];
        for (uint32_t k = 0; k < 4; k++) {
            __m256 y = _mm256_mul_ps(_mm256_load_ps(q + i + 8 * k), factor);
            x[k] = _mm256_cvtps_epi32(_mm256_mul_ps(y, _mm256_load_ps(v->scale + i + 8 * k)));
            sum = _mm256_add_epi32(sum, x[k]);
        }
        _mm256_store_si256((void *)(v->q[n] + i), _mm256_shuffle_epi8(to_bytes(x, true), order));
    }
    v->unit[n] = max / 127.0f;
    // What rounding did to the middle is taken off.
    float taken = kvq__sum_all(_mm256_cvtepi32_ps(sum)) * centre * v->unit[n];
    v->bias[n] = kvq__sum_all(bias) - taken;
}

// The high plane of row r as 2-bit fields, tokens 8 y to 8 y + 7.
KVQ__INLINE __m256i k_high(const uint8_t *high, uint32_t dim, uint32_t r, uint32_t y, int bits)
{
    if (bits == 4)
        return load(high + 128 * r + 32 * (y ^ (r & 3)));
    uint32_t in_slab = dim < SLAB ? dim / 16 : SLAB / 16, half = in_slab / 2;
    uint32_t row = r / in_slab * half + r % half;
    __m256i x = load(high + 128 * row + 32 * (y ^ (r % half & 3)));
    x = r % in_slab >= half ? _mm256_srli_epi16(x, 1) : x;
    return _mm256_and_si256(x, _mm256_set1_epi8(0x55));
}

KVQ__INLINE void widen(__m256i sum[][2], __m256i acc[][2])
{
    for (int i = 0; i < ROWS; i++)
        for (int z = 0; z < 2; z++) {
            __m256i x = _mm256_madd_epi16(acc[i][z], _mm256_set1_epi16(1));
            sum[i][z] = _mm256_add_epi32(sum[i][z], x);
        }
}

// Row r of the planes, sixteen tokens from 8 y on.
KVQ__INLINE void k_row(const struct kvq__tile *tile, const struct state *v, const uint8_t *low,
                       uint32_t r, uint32_t y, __m256i acc[][2], int bits)
{
    __m256i x[2], h[2];
    if (y == 0)
        fetch_step(tile, r, bits);
    for (uint32_t z = 0; z < 2; z++) {
        x[z] = load(low + 128 * r + 32 * ((y + z) ^ (r & 3)));
        h[z] = bits > 2 ? k_high(low + 8 * tile->dim, tile->dim, r, y + z, bits) : x[z];
    }
    for (int s = 0; s < 4; s++) {
        __m256i c0 = part(x[0], h[0], s, bits), c1 = part(x[1], h[1], s, bits);
        for (int i = 0; i < ROWS; i++) {
            __m256i q = broadcast(v->q[i] + 16 * r + 4 * (uint32_t)s);
            acc[i][0] = _mm256_add_epi16(acc[i][0], _mm256_maddubs_epi16(c0, q));
            acc[i][1] = _mm256_add_epi16(acc[i][1], _mm256_maddubs_epi16(c1, q));
        }
    }
}

// Sixteen tokens, from 8 y on.
KVQ__INLINE void qk_half(const struct kvq__tile *tile, const struct state *v, const uint8_t *group,
                         uint32_t y, __m256i sum[][2], int bits)
{
    const uint32_t rows = tile->dim / 16, at_once = 8 >> (bits - 2);
    const uint8_t *low = group + tile->codec->layout.k_codes;
    for (int i = 0; i < ROWS; i++)
        sum[i][0] = sum[i][1] = _mm256_setzero_si256();
    for (uint32_t from = 0; from < rows; from += at_once) {
        __m256i acc[ROWS][2];
        uint32_t to = from + at_once < rows ? from + at_once : rows;
        for (int i = 0; i < ROWS; i++)
            acc[i][0] = acc[i][1] = _mm256_setzero_si256();
        for (uint32_t r = from; r < to; r++)
            k_row(tile, v, low, r, y, acc, bits);
        widen(sum, acc);
    }
}

KVQ__INLINE void qk_rows(const struct kvq__tile *tile, const uint8_t *group, float *logits,
                         uint32_t rows, int bits)
{
    const struct state *v = tile->scratch;
    const struct kvq__codec *c = tile->codec;
    for (uint32_t y = 0; y < 4; y += 2) {
        __m256i sum[ROWS][2];
        qk_half(tile, v, group, y, sum, bits);
        for (uint32_t z = 0; z < 2; z++) {
            const uint8_t *norms = group + c->layout.k_norms + 16 * (y + z);
            __m256 norm = c->has_norms ? kvq__load8(norms, KVQ_F16) : _mm256_set1_ps(1.0f);
            for (uint32_t i = 0; i < rows; i++) {
                __m256 x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][z]),
                                           _mm256_set1_ps(v->unit[i]), _mm256_set1_ps(v->bias[i]));
                _mm256_storeu_ps(logits + i * KVQ__LOGITS_STRIDE + 8 * (y + z),
                                 _mm256_mul_ps(x, norm));
            }
        }
    }
}

static void qk_bytes(const struct kvq__tile *tile, const struct kvq_packed *packed, float *logits)
{
    struct state *v = tile->scratch;
    const uint8_t *group = packed->group;
    open_k(v, tile->codec, packed);
    for (uint32_t r = 0; r < tile->rows; r += ROWS, logits += ROWS * KVQ__LOGITS_STRIDE) {
        uint32_t rows = tile->rows - r < ROWS ? tile->rows - r : ROWS;
        for (uint32_t i = 0; i < rows; i++)
            scale_query(v, tile->qt + (size_t)(r + i) * tile->dim, tile->dim, i,
                        centre_of(tile->codec->k_bits));
        if (rows < ROWS)
            memset(v->q[rows], 0, (ROWS - rows) * sizeof v->q[0]);
        if (tile->codec->k_bits == 2)
            qk_rows(tile, group, logits, rows, 2);
        else if (tile->codec->k_bits == 3)
            qk_rows(tile, group, logits, rows, 3);
        else
            qk_rows(tile, group, logits, rows, 4);
    }
}

// ---- V ----

// Scales and middles of [channel group][token], from slots 0, 4, 1, 5, .. of each 8 tokens.
static void open_v(struct state *v, const struct kvq__codec *c, const struct kvq_packed *packed)
{
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256 centre = _mm256_set1_ps(centre_of(c->v_bits));
    for (uint32_t i = 0; i < c->dim; i += 8) {
        __m128i s = _mm_load_si128((const void *)(packed->v_scales + 2 * i));
        __m128i z = _mm_load_si128((const void *)(packed->v_zeros + 2 * i));
        __m256 scale = _mm256_cvtph_ps(_mm_shuffle_epi8(s, order));
        __m256 zero = _mm256_cvtph_ps(_mm_shuffle_epi8(z, order));
        _mm256_store_ps(v->scale + i, scale);
        _mm256_store_ps(v->middle + i, _mm256_fmadd_ps(scale, centre, zero));
    }
}

// The bytes of one row; the largest p * scale becomes 255. Of 8 tokens the even ones come first.
static void scale_weights(struct state *v, const float *p, uint32_t dim, uint32_t n, float *middle)
{
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 0,
                                           2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    __m256 top = _mm256_set1_ps(1e-30f);
    for (uint32_t i = 0; i < dim; i += 8) {
        __m256 x = _mm256_load_ps(p + i % KVQ_GROUP_TOKENS);
        top = _mm256_max_ps(top, _mm256_mul_ps(x, _mm256_load_ps(v->scale + i)));
    }
    float max = kvq__max_all(top);
    __m256 factor = _mm256_set1_ps(255.0f / max);
    __m256 sums[MAX_VGROUPS];
    for (uint32_t g = 0; g < MAX_VGROUPS; g++)
        sums[g] = _mm256_setzero_ps();
    for (uint32_t g = 0; g < dim / KVQ_GROUP_CHANNELS; g++) {
        __m256 sum = _mm256_setzero_ps();
        __m256i x[4];
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t at = g * KVQ_GROUP_TOKENS + 8 * k;
            __m256 y = _mm256_load_ps(p + 8 * k);
            sum = _mm256_fmadd_ps(y, _mm256_load_ps(v->middle + at), sum);
            y = _mm256_mul_ps(_mm256_mul_ps(y, _mm256_load_ps(v->scale + at)), factor);
            x[k] = _mm256_cvtps_epi32(y);
        }
        __m256i b = _mm256_shuffle_epi8(to_bytes(x, false), order);
        _mm256_store_si256((void *)v->w[n][g], b);
        sums[g] = sum;
    }
    for (uint32_t g = 0; g < dim / KVQ_GROUP_CHANNELS; g += 4) {
        __m128 sum = kvq__sum4(sums[g], sums[g + 1], sums[g + 2], sums[g + 3]);
        _mm_storeu_ps(middle + g, _mm_add_ps(_mm_loadu_ps(middle + g), sum));
    }
    v->unit[n] = 0.5f * max / 255.0f; // codes are multiplied as 2 * code - (2^bits - 1)
}

// The codes of set (j, half) at position s, centred and doubled. `at` are the first of 8 words.
KVQ__INLINE __m256i v_codes(const uint8_t *low, const uint8_t *high, uint32_t half, int s, int bits)
{
    __m256i x = load(low), h = x;
    if (bits == 4)
        h = load(high);
    if (bits == 3) {
        h = load(high);
        h = _mm256_and_si256(half ? _mm256_srli_epi16(h, 1) : h, _mm256_set1_epi8(0x55));
    }
    x = part(x, h, s, bits);
    return _mm256_sub_epi8(_mm256_add_epi8(x, x), _mm256_set1_epi8((char)((1 << bits) - 1)));
}

// Where the words 8 y to 8 y + 7 of set (j, half) stand in a plane with a row for each set, and
// in one of single bits with a row for each j.
KVQ__INLINE uint32_t word_at(uint32_t dim, uint32_t y, uint32_t j, uint32_t half)
{
    if (dim == 64)
        return 64 * (2 * j + (half ^ (j & 1))) + 32 * (y ^ (j >> 1));
    return 128 * (2 * j + half) + 32 * (y ^ j);
}

KVQ__INLINE uint32_t bit_at(uint32_t dim, uint32_t y, uint32_t j)
{
    return dim == 64 ? 64 * j + 32 * (y ^ (j >> 1)) : 128 * j + 32 * (y ^ j);
}

// Sets 4 n to 4 n + 3, words 8 y to 8 y + 15 of a slab at position s.
KVQ__INLINE void v_sets(const struct state *v, const uint8_t *low, const uint8_t *high,
                        uint32_t dim, uint32_t group, uint32_t y, uint32_t n, __m256i acc[][2],
                        int s, int bits)
{
    for (uint32_t set = 4 * n; set < 4 * n + 4; set++) {
        uint32_t j = set / 2, half = set % 2;
        __m256i c[2];
        for (uint32_t z = 0; z < 2; z++) {
            uint32_t at = word_at(dim, y + z, j, half);
            c[z] =
                v_codes(low + at, high + (bits == 3 ? bit_at(dim, y + z, j) : at), half, s, bits);
        }
        for (int i = 0; i < ROWS; i++) {
            __m256i w = broadcast(v->w[i][group] + 4 * set);
            acc[i][0] = _mm256_add_epi16(acc[i][0], _mm256_maddubs_epi16(w, c[0]));
            acc[i][1] = _mm256_add_epi16(acc[i][1], _mm256_maddubs_epi16(w, c[1]));
        }
    }
}

// Words 8 y to 8 y + 15 of a slab at position s: adds them to the sums o.
KVQ__INLINE void pv_words(const struct state *v, const uint8_t *low, const uint8_t *high,
                          uint32_t dim, uint32_t group, uint32_t y, float *o, uint32_t rows, int s,
                          int bits)
{
    __m256i acc[ROWS][2], sum[ROWS][2];
    for (int i = 0; i < ROWS; i++)
        acc[i][0] = acc[i][1] = sum[i][0] = sum[i][1] = _mm256_setzero_si256();
    v_sets(v, low, high, dim, group, y, 0, acc, s, bits);
    if (bits == 4) {
        widen(sum, acc);
        for (int i = 0; i < ROWS; i++)
            acc[i][0] = acc[i][1] = _mm256_setzero_si256();
    }
    v_sets(v, low, high, dim, group, y, 1, acc, s, bits);
    widen(sum, acc);
    for (uint32_t i = 0; i < rows; i++, o += KVQ_MAX_HEAD_DIM)
        for (uint32_t z = 0; z < 2; z++) {
            __m256 x = _mm256_cvtepi32_ps(sum[i][z]), unit = _mm256_set1_ps(v->unit[i]);
            _mm256_store_ps(o + 8 * z, _mm256_fmadd_ps(x, unit, _mm256_load_ps(o + 8 * z)));
        }
}

// Position s of all slabs. A slab's position has 32 words, at head_dim 64 there are 16.
KVQ__INLINE void pv_position(const struct kvq__tile *tile, const uint8_t *group, uint32_t first,
                             uint32_t rows, int s, int bits)
{
    struct state *v = tile->scratch;
    const uint32_t dim = tile->dim, words = dim == 64 ? 16 : 32;
    const uint8_t *low = group + tile->codec->layout.v_codes, *high = low + 8 * dim;
    for (uint32_t slab = 0; slab < (dim + SLAB - 1) / SLAB; slab++) {
        uint32_t channels = dim == 64 ? (uint32_t)s / 2 : 4 * slab + (uint32_t)s;
        for (uint32_t y = 0; y < words / 8; y += 2) {
            fetch_step(tile, 8 * slab + 2 * (uint32_t)s + y / 2, bits);
            pv_words(v, low + slab * 1024, high + slab * (bits == 3 ? 512 : 1024), dim, channels, y,
                     v->o[first] + slab * SLAB + words * (uint32_t)s + 8 * y, rows, s, bits);
        }
    }
}

KVQ__INLINE void pv_rows(const struct kvq__tile *tile, const uint8_t *group, uint32_t first,
                         uint32_t rows, int bits)
{
    pv_position(tile, group, first, rows, 0, bits);
    pv_position(tile, group, first, rows, 1, bits);
    pv_position(tile, group, first, rows, 2, bits);
    pv_position(tile, group, first, rows, 3, bits);
}

static void pv_bytes(const struct kvq__tile *tile, const struct kvq_packed *packed, const float *p)
{
    struct state *v = tile->scratch;
    const uint8_t *group = packed->group;
    open_v(v, tile->codec, packed);
    for (uint32_t r = 0; r < tile->rows; r += ROWS, p += ROWS * KVQ__LOGITS_STRIDE) {
        uint32_t rows = tile->rows - r < ROWS ? tile->rows - r : ROWS;
        for (uint32_t i = 0; i < rows; i++)
            scale_weights(v, p + i * KVQ__LOGITS_STRIDE, tile->dim, i, v->v_middle[r + i]);
        if (rows < ROWS)
            memset(v->w[rows], 0, (ROWS - rows) * sizeof v->w[0]);
        if (tile->codec->v_bits == 2)
            pv_rows(tile, group, r, rows, 2);
        else if (tile->codec->v_bits == 3)
            pv_rows(tile, group, r, rows, 3);
        else
            pv_rows(tile, group, r, rows, 4);
    }
}

// ---- The chunk ----

// A position's sums stand in the order of words: word n * g + a, with n of 4, or 2 at head_dim 64,
// is channel 8 * a + g.
static void flush(const struct kvq__tile *tile)
{
    const struct state *v = tile->scratch;
    const uint32_t n = tile->dim == 64 ? 2 : 4;
    const __m256i order =
        _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)n));
    for (uint32_t r = 0; r < tile->rows; r++) {
        float *out = tile->ot + (size_t)r * tile->dim;
        for (uint32_t c = 0; c < tile->dim; c += 8) {
            const float *from = v->o[r] + c / (8 * n) * (8 * n) + c / 8 % n;
            __m256 x = _mm256_i32gather_ps(from, order, 4);
            x = _mm256_add_ps(x, _mm256_set1_ps(v->v_middle[r][c / KVQ_GROUP_CHANNELS]));
            _mm256_store_ps(out + c, _mm256_add_ps(_mm256_load_ps(out + c), x));
        }
    }
}

static bool has_fast_bytes(const struct kvq__codec *c, uint32_t rows)
{
    return c->k.kind == KVQ__PER_CHANNEL_32 && c->v.kind == KVQ__PER_TOKEN_32 &&
           rows <= KVQ_TILE_ROWS;
}

static void prepare_bytes(struct kvq__tile *tile)
{
    (void)tile; // queries are turned into bytes group by group
}

static void attend_chunk_bytes(const struct kvq_kernels *k, struct kvq__tile *tile,
                               const struct kvq__chunk *chunk)
{
    struct state *v = tile->scratch;
    struct kvq_kernels fast = *k;
    fast.qk_packed[KVQ__PER_CHANNEL_32] = qk_bytes;
    fast.pv_packed[KVQ__PER_TOKEN_32] = pv_bytes;
    for (uint32_t r = 0; r < tile->rows; r++) {
        memset(v->o[r], 0, tile->dim * sizeof(float));
        memset(v->v_middle[r], 0, sizeof v->v_middle[r]);
    }
    kvq__attend_chunk(&fast, tile, chunk);
    flush(tile);
}

void kvq__init_avx2_bytes(struct kvq_kernels *k)
{
    k->has_fast = has_fast_bytes;
    k->prepare_fast = prepare_bytes;
    k->attend_chunk_fast = attend_chunk_bytes;
}
