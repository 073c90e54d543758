// SPDX-License-Identifier: Apache-2.0
//
// Storing what an engine hands over, and packing units of it: the stages of a format in order.
#include <assert.h>

#include "kernels/internal.h"

// Norms of 32 tokens.
struct norms {
    _Alignas(64) float stored[KVQ_GROUP_TOKENS];  // as the record holds them
    _Alignas(64) float inverse[KVQ_GROUP_TOKENS]; // 1 / stored
};

struct packing {
    const struct kvq_kernels *k;
    const struct kvq_format *f;
    const struct kvq_shape *s;
    const struct kvq_unit *unit;
    struct kvq__codec codec;
    struct kvq_layout raw;
    struct kvq__extras extras;
    struct kvq__workspace *w;
    uint8_t *record;                 // the head's, packed
    bool replaced[KVQ_BLOCK_TOKENS]; // tokens of the block that are read raw: sinks and outliers
};

enum { AHEAD = 8 }; // rows of a head lie apart, where the hardware does not look ahead

// A hint: the address may lie behind what there is, so it is no pointer.
static void fetch_row(uintptr_t row, uint8_t dtype, uint32_t dim)
{
    for (uint32_t i = 0; i < dim * (dtype == KVQ_F32 ? 4u : 2u); i += 64)
        __builtin_prefetch((const void *)(row + i));
}

void kvq_store(const struct kvq_kernels *k, const struct kvq_shape *s, const struct kvq_view *kv_k,
               const struct kvq_view *kv_v, uint32_t head, uint32_t slot, uint32_t tokens,
               uint8_t *raw_record, struct kvq_store_counts *counts)
{
    struct kvq_layout raw = kvq_layout_raw(s);
    assert(slot + tokens <= KVQ_BLOCK_TOKENS);
    const uint8_t *src_k = (const uint8_t *)kv_k->data + head * kv_k->head_stride;
    const uint8_t *src_v = (const uint8_t *)kv_v->data + head * kv_v->head_stride;
    uint8_t *dst_k = raw_record + (size_t)slot * 2 * s->k_dim;
    uint8_t *dst_v = raw_record + raw.v_offset + (size_t)slot * 2 * s->v_dim;
    for (uint32_t t = 0; t < tokens; t++) {
        if (t + AHEAD < tokens) {
            fetch_row((uintptr_t)(src_k + (t + AHEAD) * kv_k->token_stride), kv_k->dtype, s->k_dim);
            fetch_row((uintptr_t)(src_v + (t + AHEAD) * kv_v->token_stride), kv_v->dtype, s->v_dim);
        }
        k->store(src_k + t * kv_k->token_stride, kv_k->dtype, dst_k + (size_t)t * 2 * s->k_dim,
                 s->dtype, s->k_dim, counts);
        k->store(src_v + t * kv_v->token_stride, kv_v->dtype, dst_v + (size_t)t * 2 * s->v_dim,
                 s->dtype, s->v_dim, counts);
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

static const uint8_t *raw_record(const struct packing *p, uint32_t head)
{
    return p->unit->raw_block + (size_t)head * p->raw.record_bytes;
}

// `n` tokens of K (offset 0) or V (offset raw.v_offset) of one head as fp32.
static void load_rows(const struct packing *p, uint32_t head, uint32_t first, uint32_t n,
                      uint32_t offset, float *rows)
{
    const uint32_t dim = p->codec.dim, bytes = 2 * dim;
    const uint8_t *at = raw_record(p, head) + offset + (size_t)first * bytes;
    for (uint32_t t = 0; t < n; t++) {
        fetch_row((uintptr_t)at + (size_t)(t + AHEAD) * bytes, KVQ_F16, dim);
        load_packable(p, at + (size_t)t * bytes, rows + (size_t)t * dim, dim);
    }
}

// Tokens that stay raw must not widen the scales of others: their rows become the mean of the
// others, added up in ascending order (OTT, section 4).
static void replace(const struct packing *p, uint32_t first, uint32_t n, float *rows)
{
    float mean[KVQ_MAX_HEAD_DIM] = {0};
    uint32_t dim = p->codec.dim, others = 0;
    for (uint32_t t = 0; t < n; t++)
        others += !p->replaced[first + t];
    if (others == n)
        return;
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < dim && !p->replaced[first + t]; c++)
            mean[c] += rows[(size_t)t * dim + c];
    for (uint32_t c = 0; c < dim; c++)
        mean[c] = others ? mean[c] / (float)others : 0.0f;
    for (uint32_t t = 0; t < n; t++)
        if (p->replaced[first + t])
            memcpy(rows + (size_t)t * dim, mean, dim * sizeof *mean);
}

// ---- Token norms ----

// Sums of squares of 32 tokens over all heads, in ascending order.
static void sums_across(const struct packing *p, uint32_t first, float *total)
{
    _Alignas(64) float sums[KVQ_GROUP_TOKENS];
    memset(total, 0, KVQ_GROUP_TOKENS * sizeof *total);
    for (uint32_t h = 0; h < p->s->kv_heads; h++) {
        load_rows(p, h, first, KVQ_GROUP_TOKENS, 0, p->w->group_f32);
        p->k->sumsq(p->w->group_f32, KVQ_GROUP_TOKENS, p->codec.dim, sums);
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
            total[t] += sums[t];
    }
}

static float highest(const float *row, uint32_t n)
{
    float top = 0.0f;
    for (uint32_t i = 0; i < n; i++)
        top = fabsf(row[i]) > top ? fabsf(row[i]) : top;
    return top;
}

// Of 32 tokens. Lengths do not change with a rotation and are taken before it, the others after.
static void norms_of(const struct packing *p, uint32_t first, const float *rows, bool rotated,
                     struct norms *norms)
{
    uint8_t scale = p->f->k_token_scale;
    bool length = scale == KVQ_SCALE_L2_HEAD || scale == KVQ_SCALE_L2_CROSS;
    _Alignas(64) float norm[KVQ_GROUP_TOKENS];
    uint32_t dim = p->codec.dim;
    if (length == rotated)
        return;
    if (scale == KVQ_SCALE_L2_CROSS)
        sums_across(p, first, norm);
    else if (scale == KVQ_SCALE_L2_HEAD)
        p->k->sumsq(rows, KVQ_GROUP_TOKENS, dim, norm);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        const float *row = rows + (size_t)t * dim;
        if (scale == KVQ_SCALE_MAX)
            norm[t] = highest(row, dim);
        else if (scale == KVQ_SCALE_MEAN_ABS)
            norm[t] = kvq__sum_abs(row, dim) / (float)dim;
        else
            norm[t] = sqrtf(norm[t]);
        norms->stored[t] = kvq__f16_to_f32(kvq__stored_norm(norm[t]));
        norms->inverse[t] = 1.0f / norms->stored[t];
    }
}

// ---- K and V ----

static void divide_by_factors(const struct packing *p, float *rows, uint32_t n)
{
    float factors[KVQ_MAX_HEAD_DIM];
    uint32_t dim = p->codec.dim;
    if (!kvq__factors(p->f, &p->extras, p->unit->book, p->unit->head, dim, factors))
        return;
    for (uint32_t c = 0; c < dim; c++)
        factors[c] = 1.0f / factors[c];
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t c = 0; c < dim; c++)
            rows[(size_t)t * dim + c] *= factors[c];
}

// One span of tokens that share scales, from `first` of the block on.
static void pack_k(const struct packing *p, uint32_t first)
{
    float *rows = p->w->span_f32;
    uint32_t dim = p->codec.dim, n = p->codec.k.span;
    struct norms norms[KVQ_BLOCK_GROUPS];
    load_rows(p, p->unit->head, first, n, 0, rows);
    replace(p, first, n, rows);
    divide_by_factors(p, rows, n);
    for (uint32_t t = 0; p->codec.has_norms && t < n; t += KVQ_GROUP_TOKENS)
        norms_of(p, first + t, rows + (size_t)t * dim, false, &norms[t / KVQ_GROUP_TOKENS]);
    kvq__rotate(p->k, p->f->k_rotation, rows, n, dim, false);
    for (uint32_t t = 0; p->codec.has_norms && t < n; t += KVQ_GROUP_TOKENS) {
        struct norms *own = &norms[t / KVQ_GROUP_TOKENS];
        float *at = rows + (size_t)t * dim;
        norms_of(p, first + t, at, true, own);
        struct kvq_packed packed =
            kvq_packed_at(&p->codec.layout, p->record, (first + t) / KVQ_GROUP_TOKENS);
        p->k->scale_rows(at, own->inverse, KVQ_GROUP_TOKENS, dim);
        p->k->save(own->stored, KVQ_F16, packed.group + p->codec.layout.k_norms, KVQ_GROUP_TOKENS);
    }
    p->k->quant_k[p->codec.k.kind](&p->codec, rows, p->record, first / KVQ_GROUP_TOKENS);
}

static void pack_v(const struct packing *p, uint32_t first)
{
    float *rows = p->w->span_f32;
    uint32_t n = p->codec.v.span;
    load_rows(p, p->unit->head, first, n, p->raw.v_offset, rows);
    replace(p, first, n, rows);
    kvq__rotate(p->k, kvq__v_rotation(p->f, p->s), rows, n, p->codec.dim, false);
    p->k->quant_v[p->codec.v.kind](&p->codec, rows, p->record, first / KVQ_GROUP_TOKENS);
}

// ---- Tokens that stay raw ----

static const uint16_t *raw_rows(const struct packing *p, bool v)
{
    const uint8_t *record = raw_record(p, p->unit->head) + (v ? p->raw.v_offset : 0);
    return (const uint16_t *)(const void *)record;
}

static void keep_sinks(struct packing *p)
{
    const struct kvq_unit *u = p->unit;
    size_t dim = p->codec.dim;
    for (uint32_t t = u->first; t < u->first + p->f->unit_tokens; t++) {
        if (u->block_start + t >= p->f->sink_tokens)
            return;
        memcpy(p->extras.sink_k + t * dim, raw_rows(p, false) + t * dim, 2 * dim);
        memcpy(p->extras.sink_v + t * dim, raw_rows(p, true) + t * dim, 2 * dim);
        p->replaced[t] = true;
    }
}

static void keep_outliers(struct packing *p)
{
    const struct kvq_unit *u = p->unit;
    struct kvq_outliers *pool = p->extras.pool;
    float scores[KVQ_BLOCK_TOKENS];
    if (!pool)
        return;
    for (uint32_t t = 0; t < p->f->unit_tokens; t++) {
        load_rows(p, u->head, u->first + t, 1, 0, p->w->group_f32);
        scores[t] = kvq__score(kvq__sum_abs(p->w->group_f32, p->codec.dim));
    }
    kvq__compete(p->f, &p->extras, p->codec.dim, u, scores, raw_rows(p, false), raw_rows(p, true));
    for (uint32_t i = 0; i < pool->count; i++)
        if (pool->position[i] >= u->block_start &&
            pool->position[i] - u->block_start < KVQ_BLOCK_TOKENS)
            p->replaced[pool->position[i] - u->block_start] = true;
}

// ---- A unit ----

// A raw format's sealed block is the window's block: the same bytes.
static void copy_unit(const struct packing *p)
{
    size_t at = (size_t)p->unit->head * p->raw.record_bytes;
    at += (size_t)p->unit->first * 2 * p->codec.dim;
    size_t n = (size_t)p->f->unit_tokens * 2 * p->codec.dim;
    memcpy(p->unit->packed_block + at, p->unit->raw_block + at, n);
    memcpy(p->unit->packed_block + at + p->raw.v_offset, p->unit->raw_block + at + p->raw.v_offset,
           n);
}

void kvq_pack(const struct kvq_kernels *k, const struct kvq_format *f, const struct kvq_shape *s,
              const struct kvq_unit *unit, void *workspace)
{
    struct packing p = {.k = k, .f = f, .s = s, .unit = unit, .raw = kvq_layout_raw(s)};
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
