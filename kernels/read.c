// SPDX-License-Identifier: Apache-2.0
//
// Reading a cache back as fp32 in the engine's own basis, and merging finished attentions.
#include <assert.h>

#include "kernels/internal.h"

struct reading {
    const struct kvq_kernels *k;
    const struct kvq_format *f;
    const struct kvq_shape *s;
    struct kvq__codec codec;
    struct kvq_layout raw;
    uint32_t head;
    struct kvq__workspace *w;
};

// One group's K (or V) as fp32 [32][dim] in the workspace.
static const float *group_rows(const struct reading *r, const uint8_t *block, uint32_t at, bool v)
{
    float *rows = r->w->group_f32;
    uint32_t dim = r->codec.dim;
    const uint8_t *record = block + (size_t)r->head * r->codec.layout.record_bytes;
    const uint8_t *group = record + (size_t)(at / KVQ_GROUP_TOKENS) * r->codec.layout.group_bytes;
    (v ? r->k->dequant_v : r->k->dequant_k)(&r->codec, group, rows);
    bool rotated = v ? r->s->v_rotation == KVQ_V_ROT_DAEMON : r->f->k_transform == KVQ_K_HADAMARD;
    if (rotated)
        r->k->hadamard(rows, KVQ_GROUP_TOKENS, dim); // its own inverse
    return rows;
}

static void read_packed(const struct reading *r, const uint8_t *block, uint32_t at, uint32_t n,
                        float *k_out, float *v_out)
{
    uint32_t first = at % KVQ_GROUP_TOKENS, dim = r->codec.dim;
    const float *rows = group_rows(r, block, at, false);
    memcpy(k_out, rows + (size_t)first * dim, sizeof(float) * n * dim);
    rows = group_rows(r, block, at, true);
    memcpy(v_out, rows + (size_t)first * dim, sizeof(float) * n * dim);
}

static void read_raw(const struct reading *r, const uint8_t *block, uint32_t at, uint32_t n,
                     float *k_out, float *v_out)
{
    size_t dim = r->codec.dim;
    const uint8_t *k = block + (size_t)r->head * r->raw.record_bytes + at * 2 * dim;
    r->k->load(k, r->s->dtype, k_out, n * dim);
    r->k->load(k + r->raw.v_offset, r->s->dtype, v_out, n * dim);
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

// Tokens [at, at + n) of one page, which holds them all.
static void read_page(const struct reading *r, const struct kvq_page *page, uint32_t at, uint32_t n,
                      float *k_out, float *v_out)
{
    size_t dim = r->codec.dim;
    for (uint32_t i = 0, some; i < n; i += some) {
        uint32_t t = at + i;
        bool packed = t < page->packed_tokens;
        some = min_u32(n - i, KVQ_GROUP_TOKENS - t % KVQ_GROUP_TOKENS);
        if (packed)
            some = min_u32(some, page->packed_tokens - t);
        if (packed && r->f->codec == KVQ_CODEC_AFFINE)
            read_packed(r, page->packed, t, some, k_out + i * dim, v_out + i * dim);
        else
            read_raw(r, packed ? page->packed : page->raw, t, some, k_out + i * dim,
                     v_out + i * dim);
    }
}

uint32_t kvq_read_rows(const struct kvq_kernels *k, const struct kvq_format *f,
                       const struct kvq_shape *s, const struct kvq_page *pages, uint32_t n_pages,
                       uint64_t from, uint32_t n, uint32_t head, float *k_out, float *v_out,
                       void *workspace)
{
    struct reading r = {.k = k, .f = f, .s = s, .head = head, .w = workspace};
    uint32_t count = 0;
    assert(head < s->kv_heads);
    r.codec = kvq__codec_of(f, s);
    r.raw = kvq_layout_raw(s);
    for (uint32_t i = 0, some; i < n; i += some) {
        uint64_t page = (from + i) / KVQ_BLOCK_TOKENS;
        uint32_t at = (uint32_t)((from + i) % KVQ_BLOCK_TOKENS);
        some = min_u32(n - i, KVQ_BLOCK_TOKENS - at);
        if (page >= n_pages || pages[page].tokens <= at)
            continue;
        uint32_t held = min_u32(some, pages[page].tokens - at);
        read_page(&r, &pages[page], at, held, k_out + (size_t)i * s->k_dim,
                  v_out + (size_t)i * s->v_dim);
        count += held;
    }
    return count;
}

void kvq_merge_rows(const float *out_a, const float *lse_a, const float *out_b, const float *lse_b,
                    float *out, float *lse, size_t rows, size_t dim)
{
    for (size_t r = 0; r < rows; r++) {
        float a = lse_a[r], b = lse_b[r];
        float max = a > b ? a : b;
        bool none = max == -INFINITY;
        float wa = none ? 0.0f : expf(a - max), wb = none ? 0.0f : expf(b - max);
        float inverse = none ? 0.0f : 1.0f / (wa + wb);
        for (size_t i = r * dim; i < (r + 1) * dim; i++) {
            // A side without weight may hold anything, even NaN.
            float from_a = wa == 0.0f ? 0.0f : wa * inverse * out_a[i];
            float from_b = wb == 0.0f ? 0.0f : wb * inverse * out_b[i];
            out[i] = from_a + from_b;
        }
        lse[r] = none ? -INFINITY : max + logf(wa + wb);
    }
}
