// SPDX-License-Identifier: Apache-2.0
//
// Storing what an engine hands over, and packing units of it: the stages of a format in order.
#include <assert.h>

#include "kernels/simd.h"

// Norms of 32 tokens.
struct norms {
    _Alignas(64) float stored[KVQ_GROUP_TOKENS];  // as the record holds them
    _Alignas(64) float inverse[KVQ_GROUP_TOKENS]; // 1 / stored
};

// Cache lines.
struct lines {
    uintptr_t at;
    uint32_t n;
};

struct packing {
    const struct kvq_kernels *k;
    const struct kvq_format *f;
    const struct kvq_shape *s;
    const struct kvq_unit *unit;
    struct kvq__codec codec;
    struct kvq_raw_layout raw;
    struct kvq__extras extras;
    struct kvq__workspace *w;
    uint8_t *record;                 // the head's, packed
    bool replaced[KVQ_BLOCK_TOKENS]; // tokens of the block that are read raw: sinks and outliers
    bool replaces;                   // whether there are any
};

enum {
    AHEAD = 8, // rows of a head lie apart, where the hardware does not look ahead
    PIECE = 4, // rows that are loaded at a time; packed units are multiples
};

// A hint: the address may lie behind what there is, so it is no pointer.
KVQ__INLINE void fetch(uintptr_t at, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const void *)(at + i));
}

KVQ__INLINE void fetch_row(uintptr_t row, uint8_t dtype, uint32_t dim)
{
    fetch(row, dim * (dtype == KVQ_F32 ? 4 : 2));
}

void kvq__store_row(const struct kvq_kernels *k, const struct kvq_shape *s, const void *src,
                    uint8_t dtype, void *dst, struct kvq_store_counts *counts)
{
    uint32_t dim = kvq_row_dim(s);
    assert(dim <= s->k_dim && s->k_dim == s->v_dim);
    k->store(src, dtype, dst, s->dtype, dim, counts);
    if (dim < s->k_dim)
        memset((uint16_t *)dst + dim, 0, sizeof(uint16_t) * (s->k_dim - dim));
}

void kvq_store(const struct kvq_kernels *k, const struct kvq_shape *s, const struct kvq_view *kv_k,
               const struct kvq_view *kv_v, uint32_t head, uint32_t slot, uint32_t tokens,
               uint8_t *raw_block, struct kvq_store_counts *counts)
{
    const struct kvq_raw_layout raw = kvq_raw_layout_of(s);
    assert(slot + tokens <= KVQ_BLOCK_TOKENS);
    const uint8_t *src_k = (const uint8_t *)kv_k->data + head * kv_k->head_stride;
    const uint8_t *src_v = (const uint8_t *)kv_v->data + head * kv_v->head_stride;
    const uint32_t dim = kvq_row_dim(s);
    for (uint32_t t = 0; t < tokens; t++) {
        if (t + AHEAD < tokens) {
            fetch_row((uintptr_t)(src_k + (t + AHEAD) * kv_k->token_stride), kv_k->dtype, dim);
            fetch_row((uintptr_t)(src_v + (t + AHEAD) * kv_v->token_stride), kv_v->dtype, dim);
        }
        uint8_t *dst = raw_block + kvq_raw_at(&raw, head, slot + t, false);
        kvq__store_row(k, s, src_k + t * kv_k->token_stride, kv_k->dtype, dst, counts);
        kvq__store_row(k, s, src_v + t * kv_v->token_stride, kv_v->dtype, dst + raw.v_offset,
                       counts);
    }
}

// What is packed of raw numbers, fp16 by the instruction set's own means: it needs no limit.
static void load_packable(const struct packing *p, const uint8_t *at, float *x, size_t n)
{
    const uint16_t *half = (const uint16_t *)(const void *)at;
    if (p->s->dtype == KVQ_F16)
        p->k->load(at, KVQ_F16, x, n);
    for (size_t i = 0; p->s->dtype == KVQ_BF16 && i < n; i++)
        x[i] = kvq__packable(half[i], KVQ_BF16);
}

// The rows of K or V of one head, from a token of the block to the end of its strip.
static const uint8_t *raw_rows(const struct packing *p, uint32_t head, uint32_t token, bool v)
{
    return p->unit->raw_block + kvq_raw_at(&p->raw, head, token, v);
}

// `n` tokens of K or V of one head as fp32. Meanwhile the lines of `out` are fetched; not all at
// once, which memory answers slowest.
static void load_rows(const struct packing *p, uint32_t head, uint32_t first, uint32_t n, bool v,
                      struct lines out, float *rows)
{
    const uint32_t dim = p->codec.dim;
    const uintptr_t ahead = p->k->isa < KVQ_ISA_AVX512 ? p->codec.ahead : 0; // that does it later
    for (uint32_t t = 0; t < n; t += PIECE) {
        uint32_t from = t * out.n / n, to = (t + PIECE) * out.n / n;
        fetch(out.at + (size_t)64 * from, 64 * (to - from));
        if (ahead && t < KVQ_GROUP_TOKENS) // the rows of a strip lie beside each other
            fetch(ahead + (size_t)2 * t * dim, PIECE * 2 * dim);
        load_packable(p, raw_rows(p, head, first + t, v), rows + (size_t)t * dim, PIECE * dim);
    }
}

// ---- Memory: what comes next is fetched while arithmetic goes on ----

// What is loaded after n tokens from `first` on: more of the unit's, its V after K, and after V the
// next head's K, which usually comes next.
static uintptr_t after(const struct packing *p, uint32_t first, uint32_t n, bool v)
{
    uint32_t head = p->unit->head, start = p->unit->first;
    if (first + n < start + p->f->unit_tokens)
        return (uintptr_t)raw_rows(p, head, first + n, v);
    if (!v)
        return (uintptr_t)raw_rows(p, head, start, true);
    return head + 1 < p->s->kv_heads ? (uintptr_t)raw_rows(p, head + 1, start, false) : 0;
}

// Where n tokens' codes go: stores that miss the cache hold up what is stored after them. Only of
// the first group; it is not worth more.
static struct lines packed_at(const struct packing *p, uint32_t first, bool v)
{
    const struct kvq_layout *l = &p->codec.layout;
    struct kvq_packed packed = kvq_packed_at(l, p->record, first / KVQ_GROUP_TOKENS);
    if (v)
        return (struct lines){(uintptr_t)packed.group + l->v_codes,
                              (l->group_bytes - l->v_codes) / 64};
    return (struct lines){(uintptr_t)packed.group, l->v_codes / 64};
}

// Tokens that stay raw must not widen the scales of others: their rows become the mean of the
// others, added up in ascending order (OTT, section 4).
static void replace(const struct packing *p, uint32_t first, uint32_t n, float *rows)
{
    _Alignas(64) float mean[KVQ_MAX_HEAD_DIM];
    uint32_t dim = p->codec.dim, others = 0;
    for (uint32_t t = 0; p->replaces && t < n; t++)
        others += !p->replaced[first + t];
    if (!p->replaces || others == n)
        return;
    p->k->sum_columns(rows, n, dim, p->replaced + first, mean);
    for (uint32_t c = 0; c < dim; c++)
        mean[c] = others ? mean[c] / (float)others : 0.0f;
    for (uint32_t t = 0; t < n; t++)
        if (p->replaced[first + t])
            memcpy(rows + (size_t)t * dim, mean, dim * sizeof *mean);
}

// ---- Token norms ----

// What norms are taken of: lengths of all heads' keys as they came, since other heads' factors may
// not be known yet; lengths of a head's before the rotation, which does not change them; the rest
// after it.
enum norm_stage { GIVEN, DIVIDED, ROTATED };

static enum norm_stage stage_of(uint8_t scale)
{
    if (scale == KVQ_SCALE_L2_CROSS)
        return GIVEN;
    return scale == KVQ_SCALE_L2_HEAD ? DIVIDED : ROTATED;
}

// Sums of squares of 32 tokens over all heads, in ascending order. A placeholder's are those of
// this head's, as if the others had it, too.
static void sums_across(const struct packing *p, uint32_t first, const float *rows, float *total)
{
    _Alignas(64) float sums[KVQ_GROUP_TOKENS], own[KVQ_GROUP_TOKENS];
    memset(total, 0, KVQ_GROUP_TOKENS * sizeof *total);
    p->k->sumsq(rows, KVQ_GROUP_TOKENS, p->codec.dim, own);
    for (uint32_t h = 0; h < p->s->kv_heads; h++) {
        load_rows(p, h, first, KVQ_GROUP_TOKENS, false, (struct lines){0}, p->w->group_f32);
        p->k->sumsq(p->w->group_f32, KVQ_GROUP_TOKENS, p->codec.dim, sums);
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
            total[t] += p->replaced[first + t] ? own[t] : sums[t];
    }
}

static float highest(const float *row, uint32_t n)
{
    float top = 0.0f;
    for (uint32_t i = 0; i < n; i++)
        top = fabsf(row[i]) > top ? fabsf(row[i]) : top;
    return top;
}

// Of 32 tokens.
static void norms_of(const struct packing *p, uint32_t first, const float *rows,
                     struct norms *norms)
{
    uint8_t scale = p->f->k_token_scale;
    _Alignas(64) float norm[KVQ_GROUP_TOKENS];
    uint32_t dim = p->codec.dim;
    if (scale == KVQ_SCALE_MEAN_ABS)
        p->k->sum_abs(rows, KVQ_GROUP_TOKENS, dim, norm);
    if (scale == KVQ_SCALE_L2_CROSS)
        sums_across(p, first, rows, norm);
    else if (scale == KVQ_SCALE_L2_HEAD)
        p->k->sumsq(rows, KVQ_GROUP_TOKENS, dim, norm);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        const float *row = rows + (size_t)t * dim;
        if (scale == KVQ_SCALE_MAX)
            norm[t] = highest(row, dim);
        else if (scale == KVQ_SCALE_MEAN_ABS)
            norm[t] /= (float)dim;
        else
            norm[t] = sqrtf(norm[t]);
        norms->stored[t] = kvq__f16_to_f32(kvq__stored_norm(norm[t]));
        norms->inverse[t] = 1.0f / norms->stored[t];
    }
}

// Of a span, if they are taken of rows at this stage.
static void norms_at(const struct packing *p, uint32_t first, const float *rows,
                     enum norm_stage stage, struct norms *norms)
{
    if (!p->codec.has_norms || stage_of(p->f->k_token_scale) != stage)
        return;
    for (uint32_t t = 0; t < p->codec.k.span; t += KVQ_GROUP_TOKENS)
        norms_of(p, first + t, rows + (size_t)t * p->codec.dim, &norms[t / KVQ_GROUP_TOKENS]);
}

// ---- K and V ----

// A factor below 1 takes bf16 beyond the limits again; fp16 does not get there.
static void divide_by_factors(const struct packing *p, float *rows, uint32_t n)
{
    _Alignas(64) float factors[KVQ_MAX_HEAD_DIM];
    uint32_t dim = p->codec.dim;
    bool grows = false;
    if (!kvq__factors(p->k, p->f, &p->extras, p->unit->book, p->unit->head, dim, factors))
        return;
    for (uint32_t c = 0; c < dim; c++) {
        grows |= factors[c] < 1.0f && p->s->dtype == KVQ_BF16;
        factors[c] = 1.0f / factors[c];
    }
    p->k->scale_columns(rows, factors, n, dim);
    for (size_t i = 0; grows && i < (size_t)n * dim; i++)
        rows[i] = kvq__limited(rows[i]);
}

// One span of tokens that share scales, from `first` of the block on.
static void pack_k(struct packing *p, uint32_t first)
{
    float *rows = p->w->span_f32;
    uint32_t dim = p->codec.dim, n = p->codec.k.span;
    struct norms norms[KVQ_BLOCK_GROUPS];
    p->codec.ahead = after(p, first, n, false);
    load_rows(p, p->unit->head, first, n, false, packed_at(p, first, false), rows);
    replace(p, first, n, rows);
    norms_at(p, first, rows, GIVEN, norms);
    divide_by_factors(p, rows, n);
    norms_at(p, first, rows, DIVIDED, norms);
    kvq__rotate(p->k, p->f->k_rotation, rows, n, dim, false);
    norms_at(p, first, rows, ROTATED, norms);
    for (uint32_t t = 0; p->codec.has_norms && t < n; t += KVQ_GROUP_TOKENS) {
        const struct norms *own = &norms[t / KVQ_GROUP_TOKENS];
        float *at = rows + (size_t)t * dim;
        struct kvq_packed packed =
            kvq_packed_at(&p->codec.layout, p->record, (first + t) / KVQ_GROUP_TOKENS);
        p->k->scale_rows(at, own->inverse, KVQ_GROUP_TOKENS, dim);
        p->k->save(own->stored, KVQ_F16, packed.group + p->codec.layout.k_norms, KVQ_GROUP_TOKENS);
    }
    p->k->quant_k[p->codec.k.kind](&p->codec, rows, p->record, first / KVQ_GROUP_TOKENS);
}

static void pack_v(struct packing *p, uint32_t first)
{
    float *rows = p->w->span_f32;
    uint32_t n = p->codec.v.span;
    p->codec.ahead = after(p, first, n, true);
    load_rows(p, p->unit->head, first, n, true, packed_at(p, first, true), rows);
    replace(p, first, n, rows);
    kvq__rotate(p->k, kvq__v_rotation(p->f, p->s), rows, n, p->codec.dim, false);
    p->k->quant_v[p->codec.v.kind](&p->codec, rows, p->record, first / KVQ_GROUP_TOKENS);
}

// ---- Tokens that stay raw ----

static void keep_sinks(struct packing *p)
{
    const struct kvq_unit *u = p->unit;
    size_t dim = p->codec.dim;
    for (uint32_t t = u->first; t < u->first + p->f->unit_tokens; t++) {
        if (u->block_start + t >= p->f->sink_tokens)
            return;
        memcpy(p->extras.sink_k + t * dim, raw_rows(p, u->head, t, false), 2 * dim);
        memcpy(p->extras.sink_v + t * dim, raw_rows(p, u->head, t, true), 2 * dim);
        p->replaced[t] = p->replaces = true;
    }
}

static void keep_outliers(struct packing *p)
{
    const struct kvq_unit *u = p->unit;
    struct kvq_outliers *pool = p->extras.pool;
    float scores[KVQ_BLOCK_TOKENS];
    if (!pool)
        return;
    for (uint32_t t = 0; t < p->f->unit_tokens; t += KVQ_GROUP_TOKENS) {
        load_rows(p, u->head, u->first + t, KVQ_GROUP_TOKENS, false, (struct lines){0},
                  p->w->group_f32);
        p->k->sum_abs(p->w->group_f32, KVQ_GROUP_TOKENS, p->codec.dim, scores + t);
    }
    for (uint32_t t = 0; t < p->f->unit_tokens; t++)
        scores[t] = kvq__score(scores[t]);
    kvq__compete(p->f, &p->extras, p->codec.dim, u, scores, &p->raw);
    for (uint32_t i = 0; i < pool->count; i++)
        if (pool->position[i] >= u->block_start &&
            pool->position[i] - u->block_start < KVQ_BLOCK_TOKENS)
            p->replaced[pool->position[i] - u->block_start] = p->replaces = true;
}

// ---- A unit ----

// A raw format's sealed block is the window's block: the same bytes.
static void copy_unit(const struct packing *p)
{
    const struct kvq_unit *u = p->unit;
    for (uint32_t t = u->first; t < u->first + p->f->unit_tokens; t += KVQ_GROUP_TOKENS) {
        uint32_t at = kvq_raw_at(&p->raw, u->head, t, false);
        memcpy(u->packed_block + at, u->raw_block + at, p->raw.part_bytes);
    }
}

void kvq_pack(const struct kvq_kernels *k, const struct kvq_format *f, const struct kvq_shape *s,
              const struct kvq_unit *unit, void *workspace)
{
    struct packing p = {.k = k, .f = f, .s = s, .unit = unit, .raw = kvq_raw_layout_of(s)};
    uint32_t first = unit->first, end = first + f->unit_tokens;
    assert(first % f->unit_tokens == 0 && end <= KVQ_BLOCK_TOKENS && unit->head < s->kv_heads);
    p.codec = kvq__codec_of(f, s, unit->book, unit->head);
    p.w = workspace;
    if (kvq_is_raw(f)) {
        copy_unit(&p);
        return;
    }
    p.extras = kvq__extras_of(f, s, unit->extras, NULL, unit->head);
    p.record = unit->packed_block + (size_t)unit->head * p.codec.layout.record_bytes;
    keep_sinks(&p);
    keep_outliers(&p);
    for (uint32_t t = first; t < end; t += p.codec.k.span)
        pack_k(&p, t);
    for (uint32_t t = first; t < end; t += p.codec.v.span)
        pack_v(&p, t);
}
