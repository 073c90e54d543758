// SPDX-License-Identifier: Apache-2.0
//
// What the files of kernels/ share: the table of functions that each instruction set fills, and
// the state that the attention driver hands to them. Nobody outside kernels/ and the checker of
// tests/ includes this file.
//
// The driver (attend.c) walks splits, pages and masks and knows no instruction set. Work on many
// numbers is done by the functions of the table. An instruction set starts from a copy of the
// table of the next lower one and replaces what it does better (kvq__init_*), so that every
// entry but the fast path's is always there. Rules for all entries:
//
// - All fp32 arrays of the driver are 64-byte aligned with rows of `dim` floats, dim 64, 128 or
//   256. Packed groups and raw records are 64-byte aligned. The caller's tensors (load, save,
//   store) are aligned to their dtype only.
// - What ends up in packed or raw bytes (store, hadamard, sums, scale_*, quant_k, quant_v) is the
//   same to the bit on every instruction set: one operation after the other, as written at the C
//   functions, no fused multiply-add, no approximate reciprocals.
// - Everything else agrees with C within 1e-5, relative to the largest value of a row.
// - A result for one row never depends on which other rows stand in the tile.
#ifndef KVQ_KERNELS_INTERNAL_H
#define KVQ_KERNELS_INTERNAL_H

#include <math.h>
#include <string.h>

#include "kernels/codec_math.h"
#include "kernels/kernels.h"

enum {
    KVQ__CHUNK = 512, // tokens whose logits are computed before one softmax step
    KVQ__CHUNK_GROUPS = KVQ__CHUNK / KVQ_GROUP_TOKENS,
    KVQ__LOGITS_STRIDE = 528, // floats from row to row; not a power of two, for the cache's sake
    KVQ__SCRATCH_BYTES = 3520 * 1024, // an instruction set's own memory in the workspace
    // Tall tiles, of calls with many query rows, where attend_chunk_tall is there.
    KVQ__TALL_FROM = 64,  // rows of a call that make them pay
    KVQ__TALL_ROWS = 512, // rows of a tile
};

// Kinds of codecs that instruction sets may have functions of their own for.
enum kvq__kind {
    KVQ__SCALAR,         // any composition of scalar stages
    KVQ__PER_CHANNEL_32, // affine, 2 to 4 bits, scales and zeros per channel of 32 tokens
    KVQ__PER_TOKEN_32,   // affine, 2 to 4 bits, scales and zeros per token of 32 channels
    KVQ__PER_CHANNEL,    // affine, 2 to 4 bits, scales and zeros per channel of 64 or 128 tokens
    KVQ__FOUR_LEVELS,    // Lloyd-Max of 2 bits, one scale per token
    KVQ__BOOK,           // codebooks; those before have scalar codecs
    KVQ__KINDS,
};

// What the codec of one side of one session's layer needs.
struct kvq__side {
    struct kvq_side row;               // group resolved: channels or tokens per scale
    uint8_t kind;                      // enum kvq__kind
    uint32_t span;                     // tokens that are quantized together: 32, 64 or 128
    const float *levels, *wide_levels; // Lloyd-Max; NULL otherwise
    const float *book;                 // centroids of sub-vector 0; NULL for scalar codecs
    size_t book_sub;                   // floats to those of the next sub-vector
};

// The codec of one KV head; made once per call from format and shape.
struct kvq__codec {
    struct kvq_layout layout;
    uint32_t dim;           // of K and of V
    uint8_t k_bits, v_bits; // 0 if raw
    bool has_norms;         // the record has a norm for each token
    uint8_t raw_dtype;      // of raw records: KVQ_F16 or KVQ_BF16
    // Raw rows that will be read soon, as many as are being quantized, to be fetched meanwhile; 0
    // for none. No pointer, for it may lie behind what there is. kvq_pack alone sets it.
    uintptr_t ahead;
    struct kvq__side k, v;
};

static inline uint32_t kvq__min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

// The four levels of Lloyd-Max are whole numbers of this unit.
#define KVQ__LLOYD2_UNIT 0.15104176f
enum { KVQ__LLOYD2_INNER = 3, KVQ__LLOYD2_OUTER = 10 };

static inline int kvq__lloyd2_byte(int code)
{
    int size = code == 1 || code == 2 ? KVQ__LLOYD2_INNER : KVQ__LLOYD2_OUTER;
    return code < 2 ? -size : size;
}

// Whether the loops over bytes, the fast path, know both sides: scales of 32 values on both (oscar,
// KIVI), or K of 3 bits whose scales stand before a record's groups, with V of four levels (kvq2).
static inline bool kvq__fits_bytes(const struct kvq__codec *c)
{
    if (c->v.kind == KVQ__FOUR_LEVELS)
        return c->k.kind == KVQ__PER_CHANNEL && c->k_bits == 3;
    return c->k.kind == KVQ__PER_CHANNEL_32 && c->v.kind == KVQ__PER_TOKEN_32;
}

// The 32 positions of one group and where their keys lie. Positions [0, packed_tokens) are in the
// packed group, [raw_from, raw_to) in the raw rows; both pointers stand for position 0, and raw
// rows are `dim` elements apart. Everything in these ranges is finite and may be computed with,
// but only positions with their bit in `held` are keys: the others get logit -inf.
// Outliers: positions with their bit in `pooled` (all below packed_tokens) are packed as well, but
// what counts are their raw rows: row pool_row[t] of pool_k and pool_v, which are set for these
// alone.
struct kvq__group {
    uint32_t held;            // bit t: position t is a key; 0 if the group is empty
    uint32_t pooled;          // bit t: position t is an outlier
    struct kvq_packed packed; // laid out as codec->layout says; .group NULL if none
    const uint16_t *raw_k, *raw_v;
    const uint16_t *pool_k, *pool_v;
    uint32_t packed_tokens;
    uint32_t raw_from, raw_to; // equal if none; raw_from >= packed_tokens
    uint8_t pool_row[KVQ_GROUP_TOKENS];
};

// Up to 512 consecutive positions that start at a multiple of 32. Groups that no row of the tile
// sees are empty (nothing held, no packed, no raw).
struct kvq__chunk {
    uint64_t start;
    uint32_t groups; // 1 to KVQ__CHUNK_GROUPS
    struct kvq__group group[KVQ__CHUNK_GROUPS];
    const struct kvq__chunk *next; // what comes after, of any head, to prefetch; NULL if unknown
    bool fetched;                  // whether this one was the next of another
};

// For each packed group the first one that has the same scales of K: itself, or where scales stand
// before a record's groups, the first of its record.
static inline void kvq__find_own_k(const struct kvq__chunk *chunk, uint8_t *own)
{
    const uint8_t *scales = NULL;
    uint8_t first = 0;
    for (uint32_t i = 0; i < chunk->groups; i++) {
        if (chunk->group[i].packed_tokens == 0)
            continue;
        if (scales != chunk->group[i].packed.k_scales)
            first = (uint8_t)i;
        scales = chunk->group[i].packed.k_scales;
        own[i] = first;
    }
}

// The queries of one KV head in an item (tokens x heads that share it, of one or more sessions),
// and their state on the way through the keys. The softmax state is in powers of
// two: p = 2^(logit - m), l = sum of p, both o accumulate p * v and are not divided by l.
struct kvq__tile {
    const struct kvq__codec *codec;
    uint32_t slot; // rows of the item before this tile's; slot + rows is at most KVQ_TILE_ROWS
    uint32_t rows; // 1 to KVQ_TILE_ROWS; of a tall one, whose slot is 0, to KVQ__TALL_ROWS
    uint32_t dim;
    // Without soft-cap q is scaled by softmax scale * log2(e), and q * k is the logit. With it, q
    // is scaled by softmax scale / softcap, and the logit is cap * tanh(q * k).
    float cap;
    const float *q;  // [rows][dim] for raw keys
    const float *qt; // [rows][dim] for packed keys: transformed as the format transforms K
    float *logits;   // [rows][KVQ__LOGITS_STRIDE]; the softmax step turns them into p in place
    float *m, *l;    // [rows]
    float *factor;   // [rows]; what the softmax step multiplied the old sums with
    // Row r sees the positions [lo[r], hi[r]) of the current chunk, counted from its start. Both
    // are within 0..32 * groups; lo[r] == hi[r] if it sees none.
    int32_t *lo, *hi;
    float *o;         // [rows][dim] sums of raw values
    float *ot;        // [rows][dim] sums of packed values; equals o unless the daemon rotates V
    float *group_f32; // [32][dim] for a dequantized group
    // KVQ__SCRATCH_BYTES, the same for all tiles of an item, which take turns chunk by chunk: what
    // is to survive from prepare_fast to the last chunk must be kept by row, from `slot` on. Only
    // tiles of codebook formats have it for themselves, one after the other.
    void *scratch;
    uint32_t ready; // what qk_chunk, pv_chunk and attend_chunk_tall keep in scratch; 0: new tile
    // Memory that will be read soon, to be prefetched line by line by a step over a group, as much
    // as the step itself reads; NULL for none. Only kvq__attend_chunk sets and clears it.
    const uint8_t *ahead;
};

struct kvq_kernels {
    int isa; // KVQ_ISA_*

    // ---- Numbers ----

    // n elements to fp32, exactly.
    void (*load)(const void *src, uint8_t dtype, float *dst, size_t n);
    // n elements from fp32, to nearest even, finite values saturating, NaN stays NaN.
    void (*save)(const float *src, uint8_t dtype, void *dst, size_t n);
    // n elements to a 16-bit dtype as kvq_store promises; adds to counts.
    void (*store)(const void *src, uint8_t from, void *dst, uint8_t to, size_t n,
                  struct kvq_store_counts *counts);
    // Each of n rows becomes row * H / sqrt(dim), Sylvester order: for h = 1, 2, 4 .. dim / 2 all
    // pairs (i, i + h) with bit h of i clear become (a + b, a - b); last, * (float)(1/sqrt(dim)).
    // Channels whose bit (c % 32 of word c / 32) is set change their signs before or after; NULL
    // for none.
    void (*hadamard)(float *rows, uint32_t n, uint32_t dim, const uint32_t *before,
                     const uint32_t *after);
    // sums[r] = sum of squares of row r: 16 lanes, lane i adding x * x of the elements 16 j + i
    // with j ascending (starting from +0), then lane i += lane i + 8, + 4, + 2, + 1.
    void (*sumsq)(const float *rows, uint32_t n, uint32_t dim, float *sums);
    // The same of |x|.
    void (*sum_abs)(const float *rows, uint32_t n, uint32_t dim, float *sums);
    // sums[c] = sum of column c over the rows that `left_out` does not name, in ascending order.
    void (*sum_columns)(const float *rows, uint32_t n, uint32_t dim, const bool *left_out,
                        float *sums);
    // Row r *= factor[r].
    void (*scale_rows)(float *rows, const float *factor, uint32_t n, uint32_t dim);
    // Column c *= factor[c].
    void (*scale_columns)(float *rows, const float *factor, uint32_t n, uint32_t dim);
    // Row r = row r * fa[r] + b's row r * fb[r].
    void (*blend_rows)(float *a, const float *fa, const float *b, const float *fb, uint32_t n,
                       uint32_t dim);

    // logits[r * KVQ__LOGITS_STRIDE + t] = q[r] * rows[t]; q is [tile->rows][dim].
    void (*dot_rows)(const struct kvq__tile *tile, const float *q, const float *rows,
                     float *logits);
    // o[r] += sum of p[r * KVQ__LOGITS_STRIDE + t] * rows[t] over all 32 tokens.
    void (*sum_rows)(const struct kvq__tile *tile, const float *p, const float *rows, float *o);

    // ---- Groups of 32 tokens, by the kind of the side's codec ----

    // Codes, scales and zeros of K (of V) from [span][dim] into the groups from `first` on of a
    // record. Writes nothing else.
    void (*quant_k[KVQ__KINDS])(const struct kvq__codec *c, const float *rows, uint8_t *record,
                                uint32_t first);
    void (*quant_v[KVQ__KINDS])(const struct kvq__codec *c, const float *rows, uint8_t *record,
                                uint32_t first);
    // Back to [32][dim], norms applied, still in the transformed basis.
    void (*dequant_k[KVQ__KINDS])(const struct kvq__codec *c, const struct kvq_packed *packed,
                                  float *rows);
    void (*dequant_v[KVQ__KINDS])(const struct kvq__codec *c, const struct kvq_packed *packed,
                                  float *rows);

    // ---- Attention, exact path: the steps of a chunk ----

    // logits[r * KVQ__LOGITS_STRIDE + t] = qt[r] * k[t] for all 32 tokens of the packed group.
    // NULL where the kind has no loop of its own: then dequant_k and dot_rows do it.
    void (*qk_packed[KVQ__KINDS])(const struct kvq__tile *tile, const struct kvq_packed *packed,
                                  float *logits);
    // The same from q and raw rows for tokens [from, to); k is token 0's row.
    void (*qk_raw)(const struct kvq__tile *tile, const uint16_t *k, uint32_t from, uint32_t to,
                   float *logits);
    // The first n logits of each row become cap * tanh(logit).
    void (*softcap)(const struct kvq__tile *tile, uint32_t n);
    // The first n (a multiple of 32) logits of each row become p, 0 outside [lo, hi) and where
    // they are -inf; m, l and factor follow. A row that sees nothing keeps m and l, factor 1.
    void (*softmax)(struct kvq__tile *tile, uint32_t n);
    // ot[r] += sum of p[r * KVQ__LOGITS_STRIDE + t] * v[t] over the 32 tokens of a packed group.
    // NULL as for qk_packed: then dequant_v and sum_rows do it.
    void (*pv_packed[KVQ__KINDS])(const struct kvq__tile *tile, const struct kvq_packed *packed,
                                  const float *p);
    // o[r] likewise over tokens [from, to) of raw rows; v is token 0's row.
    void (*pv_raw)(const struct kvq__tile *tile, const uint16_t *v, uint32_t from, uint32_t to,
                   const float *p);

    // The same of all packed groups of a chunk at once, for codecs that gain by it: logits of group
    // i into tile->logits + 32 i, values by the weights there. They prefetch what they will read of
    // the next chunk. Returns false if this codec is better done group by group, which depends on
    // the codec alone; nothing was done then. NULL: no codec of this kind gains.
    bool (*qk_chunk[KVQ__KINDS])(struct kvq__tile *tile, const struct kvq__chunk *chunk);
    bool (*pv_chunk[KVQ__KINDS])(struct kvq__tile *tile, const struct kvq__chunk *chunk);

    // The whole step. kvq__attend_chunk does it with the entries above; it may be replaced.
    void (*attend_chunk)(const struct kvq_kernels *k, struct kvq__tile *tile,
                         const struct kvq__chunk *chunk);

    // The whole step of a tall tile, on either path; NULL where there is none. Memory of rows up to
    // the next multiple of 32 (q and qt left out) may be overwritten. `fast`: products as good as
    // those of bf16 do.
    void (*attend_chunk_tall)(const struct kvq_kernels *k, struct kvq__tile *tile,
                              const struct kvq__chunk *chunk, bool fast);

    // ---- Attention, fast path; all three NULL where there is none ----

    bool (*has_fast)(const struct kvq__codec *c, uint32_t rows);
    // Called once per tile when q, qt and all pointers stand; may keep things in scratch.
    void (*prepare_fast)(struct kvq__tile *tile);
    void (*attend_chunk_fast)(const struct kvq_kernels *k, struct kvq__tile *tile,
                              const struct kvq__chunk *chunk);
};

// What the CPU has of what was built, whatever KVQ_CPU_MASK says; AMX only where that asks for it.
int kvq__cpu_isa(void);
bool kvq__cpu_has_avxvnni(void); // vpdpbusd in AVX's encoding, as CPUs without AVX-512 may have it

void kvq__init_c(struct kvq_kernels *k);
void kvq__init_avx2(struct kvq_kernels *k);   // on top of C
void kvq__init_avx512(struct kvq_kernels *k); // on top of AVX2
void kvq__init_amx(struct kvq_kernels *k);    // on top of AVX-512

// AVX2's fast path, by vpmaddubsw or by AVX-VNNI's vpdpbusd: the same results to the bit.
void kvq__init_avx2_bytes(struct kvq_kernels *k);
void kvq__init_avxvnni_bytes(struct kvq_kernels *k);

void kvq__attend_chunk(const struct kvq_kernels *k, struct kvq__tile *tile,
                       const struct kvq__chunk *chunk);
// Parts of that. Outliers are packed, too, but their raw rows count.
void kvq__logits_of_outliers(const struct kvq_kernels *k, const struct kvq__tile *tile,
                             const struct kvq__group *g, float *logits);
// All that comes between the products of a chunk and the softmax step: the soft-cap, and -inf for
// what nobody holds.
void kvq__finish_logits(const struct kvq_kernels *k, struct kvq__tile *tile,
                        const struct kvq__chunk *chunk);
// Scales sums of the tile, [rows][dim], by its factors.
void kvq__rescale(const struct kvq_kernels *k, const struct kvq__tile *tile, float *o);
// Logits of a chunk become weights; what was summed before is scaled to go with them.
void kvq__weigh(const struct kvq_kernels *k, struct kvq__tile *tile,
                const struct kvq__chunk *chunk);
// Outliers of a packed group count with their raw rows. Then weights of what does not count packed
// are 0, for a packed group is summed whole.
void kvq__leave_packed(const struct kvq_kernels *k, const struct kvq__tile *tile,
                       const struct kvq__group *g, float *p);
// A packed group's logits and values by the kind's own loop, or dequantized if it has none.
void kvq__qk_packed(const struct kvq_kernels *k, const struct kvq__tile *tile,
                    const struct kvq_packed *packed, float *logits);
void kvq__pv_packed(const struct kvq_kernels *k, const struct kvq__tile *tile,
                    const struct kvq_packed *packed, const float *p);
// `book` may be NULL; codebook formats then can do nothing but tell sizes.
struct kvq__codec kvq__codec_of(const struct kvq_format *f, const struct kvq_shape *s,
                                const struct kvq_book *book, uint32_t head);
const float *kvq__lloyd(uint32_t bits); // 2^bits levels, ascending; bits 2 to 4

// ---- Extras and transforms (extras.c) ----

// One KV head's record of a session's extras, all pointers NULL where the format has no such part.
struct kvq__extras {
    uint16_t *factors; // channel factors, fp16
    struct kvq_outliers *pool;
    uint16_t *pool_k, *pool_v; // [entries][dim]
    uint16_t *sink_k, *sink_v; // [sink tokens][dim]
    uint32_t pool_count;       // entries to look at
};
struct kvq_extras_layout kvq__extras_layout(const struct kvq_format *f, const struct kvq_shape *s);

// `pool` as in struct kvq_attend. extras may be NULL.
struct kvq__extras kvq__extras_of(const struct kvq_format *f, const struct kvq_shape *s,
                                  const uint8_t *extras, const uint8_t *pool, uint32_t head);

// n rows, transformed in place; back = the inverse.
void kvq__rotate(const struct kvq_kernels *k, enum kvq_rotation rotation, float *rows, uint32_t n,
                 uint32_t dim, bool back);
// How packed V is rotated.
enum kvq_rotation kvq__v_rotation(const struct kvq_format *f, const struct kvq_shape *s);

// What K was divided by and q is multiplied with: 1 for each channel, or the factors that were
// learned or made. Returns false (and writes nothing) if the format has none.
bool kvq__factors(const struct kvq_kernels *k, const struct kvq_format *f,
                  const struct kvq__extras *e, const struct kvq_book *book, uint32_t head,
                  uint32_t dim, float *factors);

// A unit's tokens compete for the pool with what is in it; the winners' rows are copied. scores are
// of the unit's tokens, raw is the layout of its raw block.
void kvq__compete(const struct kvq_format *f, const struct kvq__extras *e, uint32_t dim,
                  const struct kvq_unit *unit, const float *scores,
                  const struct kvq_raw_layout *raw);

// One row of K or V as an engine has it, rounded to the raw dtype, and zeros to its stored dim.
void kvq__store_row(const struct kvq_kernels *k, const struct kvq_shape *s, const void *src,
                    uint8_t dtype, void *dst, struct kvq_store_counts *counts);

// ---- Workspace: one thread's memory, cut up ----

enum { KVQ__ROWS = KVQ__TALL_ROWS * KVQ_MAX_HEAD_DIM, KVQ__GROUP_F32 = 32 * KVQ_MAX_HEAD_DIM };

// Softmax state and sums of the rows of an item; o and ot as in struct kvq__tile.
struct kvq__sums {
    float m[KVQ__TALL_ROWS], l[KVQ__TALL_ROWS];
    float o[KVQ__ROWS], ot[KVQ__ROWS];
};

// Keys and values of groups that do not lie in one piece anywhere, put together for one chunk.
struct kvq__assembled {
    uint16_t k[KVQ__CHUNK * KVQ_MAX_HEAD_DIM], v[KVQ__CHUNK * KVQ_MAX_HEAD_DIM];
};

// One KV head of an item.
struct kvq__lane {
    _Alignas(64) struct kvq__codec codec;
    struct kvq__extras extras;
    struct kvq__tile tile;
};

// All members are multiples of 64 bytes.
struct kvq__workspace {
    struct kvq__lane lane[KVQ_TILE_ROWS];
    float q[KVQ__ROWS], qt[KVQ__ROWS];
    float logits[KVQ_TILE_ROWS * KVQ__LOGITS_STRIDE];
    float factor[KVQ__TALL_ROWS];
    int32_t lo[KVQ__TALL_ROWS], hi[KVQ__TALL_ROWS];
    struct kvq__sums part, total;
    float group_f32[KVQ__GROUP_F32];
    float span_f32[KVQ_BLOCK_GROUPS * KVQ__GROUP_F32];
    struct kvq__assembled assembled[2]; // of this chunk and of the next
    uint8_t scratch[KVQ__SCRATCH_BYTES];
};

// ---- One number at a time; more in codec_math.h ----

// 2^x for x <= 0, within 2 units in the last place; 0 below -126 and for -inf, NaN for NaN.
static inline float kvq__exp2(float x)
{
    if (!(x >= -126.0f))
        return x != x ? x : 0.0f;
    float n = rintf(x);
    float f = x - n; // in [-0.5, 0.5]; the polynomial is 2^f's Taylor series in f * ln(2)
    float p = 1.5252734e-5f;
    p = p * f + 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return p * kvq__float((uint32_t)(int32_t)(n + 127.0f) << 23);
}

// ---- Rows of NaN ----

// Whether a softmax step that finds no number among what a row sees, [lo, hi), finds NaN there.
// Maxima leave NaN out, so such rows look like those that see nothing. Rare: not for every row.
static inline bool kvq__sees_nan(const float *x, int32_t lo, int32_t hi)
{
    for (int32_t t = lo; t < hi; t++)
        if (x[t] != x[t])
            return true;
    return false;
}

// The end of a softmax step for a row that sees NaN or an infinite logit: its state and, by the
// factor that is returned, what was summed so far become NaN for good. Its weights are 0, for bytes
// cannot be made of NaN.
static inline float kvq__spoil_row(float *x, int32_t n, float *m, float *l)
{
    memset(x, 0, (size_t)n * sizeof *x);
    *m = *l = NAN;
    return NAN;
}

#endif
