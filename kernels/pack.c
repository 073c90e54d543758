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
    struct kvq__codec codec;
    struct kvq_layout raw;
    const uint8_t *raw_block;
    struct kvq__workspace *w;
};

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
        k->store(src_k + t * kv_k->token_stride, kv_k->dtype, dst_k + (size_t)t * 2 * s->k_dim,
                 s->dtype, s->k_dim, counts);
        k->store(src_v + t * kv_v->token_stride, kv_v->dtype, dst_v + (size_t)t * 2 * s->v_dim,
                 s->dtype, s->v_dim, counts);
    }
}

// Keeps what follows finite: bf16 reaches 2^128, and 256 such numbers are added in a transform.
// NaN, which kvq_store reports and callers refuse, becomes the lower limit.
static void limit(float *x, size_t n)
{
    const float most = 0x1p119f;
    for (size_t i = 0; i < n; i++) {
        x[i] = x[i] > -most ? x[i] : -most;
        x[i] = x[i] < most ? x[i] : most;
    }
}

// 32 tokens of K (offset 0) or V (offset raw.v_offset) of one head as fp32.
static void load_rows(const struct packing *p, uint32_t head, uint32_t first, uint32_t offset,
                      float *rows)
{
    size_t n = (size_t)KVQ_GROUP_TOKENS * p->codec.dim;
    const uint8_t *record = p->raw_block + (size_t)head * p->raw.record_bytes;
    p->k->load(record + offset + (size_t)first * 2 * p->codec.dim, p->s->dtype, rows, n);
    if (p->s->dtype == KVQ_BF16)
        limit(rows, n);
}

static float stored_norm(float sum)
{
    float norm = sqrtf(sum);
    uint16_t half = kvq__f32_to_f16(norm < 65504.0f ? norm : 65504.0f);
    return half == 0 ? 1.0f : kvq__f16_to_f32(half);
}

// Norms of 32 tokens: each over the channels of `head`, or of all heads in ascending order.
static void norms_of(const struct packing *p, uint32_t head, uint32_t first, struct norms *norms)
{
    bool cross = p->f->k_token_scale == KVQ_SCALE_L2_CROSS;
    uint32_t from = cross ? 0 : head, to = cross ? p->s->kv_heads : head + 1;
    _Alignas(64) float sums[KVQ_GROUP_TOKENS];
    float total[KVQ_GROUP_TOKENS] = {0};
    for (uint32_t h = from; h < to; h++) {
        load_rows(p, h, first, 0, p->w->group_f32);
        p->k->sumsq(p->w->group_f32, KVQ_GROUP_TOKENS, p->codec.dim, sums);
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
            total[t] += sums[t];
    }
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        norms->stored[t] = stored_norm(total[t]);
        norms->inverse[t] = 1.0f / norms->stored[t];
    }
}

static void pack_k(const struct packing *p, uint32_t head, uint32_t first, uint8_t *group)
{
    float *rows = p->w->group_f32;
    struct norms norms;
    if (p->codec.has_norms)
        norms_of(p, head, first, &norms);
    load_rows(p, head, first, 0, rows);
    if (p->f->k_transform == KVQ_K_HADAMARD)
        p->k->hadamard(rows, KVQ_GROUP_TOKENS, p->codec.dim);
    if (p->codec.has_norms) {
        p->k->scale_rows(rows, norms.inverse, KVQ_GROUP_TOKENS, p->codec.dim);
        p->k->save(norms.stored, KVQ_F16, group + p->codec.layout.k_norms, KVQ_GROUP_TOKENS);
    }
    p->k->quant_k(&p->codec, rows, group);
}

static void pack_v(const struct packing *p, uint32_t head, uint32_t first, uint8_t *group)
{
    float *rows = p->w->group_f32;
    load_rows(p, head, first, p->raw.v_offset, rows);
    if (p->s->v_rotation == KVQ_V_ROT_DAEMON)
        p->k->hadamard(rows, KVQ_GROUP_TOKENS, p->codec.dim);
    p->k->quant_v(&p->codec, rows, group);
}

// A raw format's sealed block is the window's block: the same bytes.
static void copy_unit(const struct packing *p, uint8_t *packed_block, uint32_t head, uint32_t first)
{
    size_t at = (size_t)head * p->raw.record_bytes + (size_t)first * 2 * p->codec.dim;
    size_t n = (size_t)p->f->unit_tokens * 2 * p->codec.dim;
    memcpy(packed_block + at, p->raw_block + at, n);
    memcpy(packed_block + at + p->raw.v_offset, p->raw_block + at + p->raw.v_offset, n);
}

void kvq_pack(const struct kvq_kernels *k, const struct kvq_format *f, const struct kvq_shape *s,
              const uint8_t *raw_block, uint8_t *packed_block, uint32_t head, uint32_t first,
              void *workspace)
{
    struct packing p = {.k = k, .f = f, .s = s, .codec = kvq__codec_of(f, s)};
    p.raw = kvq_layout_raw(s);
    p.raw_block = raw_block;
    p.w = workspace;
    assert(first % f->unit_tokens == 0 && first < KVQ_BLOCK_TOKENS && head < s->kv_heads);
    if (f->codec == KVQ_CODEC_RAW) {
        copy_unit(&p, packed_block, head, first);
        return;
    }
    uint8_t *record = packed_block + (size_t)head * p.codec.layout.record_bytes;
    for (uint32_t t = first; t < first + f->unit_tokens; t += KVQ_GROUP_TOKENS) {
        uint8_t *group = record + (size_t)(t / KVQ_GROUP_TOKENS) * p.codec.layout.group_bytes;
        pack_k(&p, head, t, group);
        pack_v(&p, head, t, group);
    }
}
