// SPDX-License-Identifier: Apache-2.0
//
// Reading a cache back as fp32 in the engine's own basis, and merging finished attentions.
#include <assert.h>

#include "kernels/internal.h"

struct reader {
    const struct kvq_kernels *k;
    const struct kvq_reading *in;
    struct kvq__codec codec;
    struct kvq__extras extras;
    struct kvq_raw_layout raw;
    uint32_t head, dim;
    struct kvq__workspace *w;
};

// K of one group, out of the transformed basis.
static void undo_k(const struct reader *r, float *rows)
{
    float factors[KVQ_MAX_HEAD_DIM];
    const struct kvq_format *f = r->in->format;
    kvq__rotate(r->k, f->k_rotation, rows, KVQ_GROUP_TOKENS, r->dim, true);
    if (!kvq__factors(r->k, f, &r->extras, r->in->book, r->head, r->dim, factors))
        return;
    for (uint32_t i = 0; i < KVQ_GROUP_TOKENS * r->dim; i++)
        rows[i] *= factors[i % r->dim];
}

static void read_packed(const struct reader *r, const uint8_t *block, uint32_t at, uint32_t n,
                        float *k_out, float *v_out)
{
    float *rows = r->w->group_f32;
    const uint8_t *record = block + (size_t)r->head * r->codec.layout.record_bytes;
    struct kvq_packed packed =
        kvq_packed_at(&r->codec.layout, (uint8_t *)record, at / KVQ_GROUP_TOKENS);
    size_t first = (size_t)(at % KVQ_GROUP_TOKENS) * r->dim, bytes = sizeof(float) * n * r->dim;
    r->k->dequant_k[r->codec.k.kind](&r->codec, &packed, rows);
    undo_k(r, rows);
    memcpy(k_out, rows + first, bytes);
    r->k->dequant_v[r->codec.v.kind](&r->codec, &packed, rows);
    kvq__rotate(r->k, kvq__v_rotation(r->in->format, r->in->shape), rows, KVQ_GROUP_TOKENS, r->dim,
                true);
    memcpy(v_out, rows + first, bytes);
}

// Outliers among the packed tokens from `position` on.
static void read_outliers(const struct reader *r, uint64_t position, uint32_t n, float *k_out,
                          float *v_out)
{
    const struct kvq_outliers *p = r->extras.pool;
    size_t dim = r->dim;
    for (uint32_t i = 0; i < r->extras.pool_count; i++) {
        if (p->position[i] < position || p->position[i] - position >= n)
            continue;
        uint64_t t = p->position[i] - position;
        r->k->load(r->extras.pool_k + i * dim, r->in->shape->dtype, k_out + t * dim, dim);
        r->k->load(r->extras.pool_v + i * dim, r->in->shape->dtype, v_out + t * dim, dim);
    }
}

// Tokens of one strip.
static void read_raw(const struct reader *r, const uint8_t *block, uint32_t at, uint32_t n,
                     float *k_out, float *v_out)
{
    size_t dim = r->dim;
    const uint8_t *k = block + kvq_raw_at(&r->raw, r->head, at, false);
    r->k->load(k, r->in->shape->dtype, k_out, n * dim);
    r->k->load(k + r->raw.v_offset, r->in->shape->dtype, v_out, n * dim);
}

static void read_sink(const struct reader *r, uint32_t at, uint32_t n, float *k_out, float *v_out)
{
    size_t dim = r->dim;
    r->k->load(r->extras.sink_k + at * dim, r->in->shape->dtype, k_out, n * dim);
    r->k->load(r->extras.sink_v + at * dim, r->in->shape->dtype, v_out, n * dim);
}

// Tokens [at, at + n) of the page that starts at `start` and holds them all.
static void read_page(const struct reader *r, const struct kvq_page *page, uint64_t start,
                      uint32_t at, uint32_t n, float *k_out, float *v_out)
{
    size_t dim = r->dim;
    bool raw_format = kvq_is_raw(r->in->format);
    for (uint32_t i = 0, some; i < n; i += some) {
        uint32_t t = at + i;
        bool packed = t < page->packed_tokens;
        float *k = k_out + i * dim, *v = v_out + i * dim;
        some = kvq__min_u32(n - i, KVQ_GROUP_TOKENS - t % KVQ_GROUP_TOKENS);
        if (packed)
            some = kvq__min_u32(some, page->packed_tokens - t);
        if (packed && !raw_format && start + t < r->in->format->sink_tokens) {
            read_sink(r, t, some, k, v);
        } else if (packed && !raw_format) {
            read_packed(r, page->packed, t, some, k, v);
            read_outliers(r, start + t, some, k, v);
        } else {
            read_raw(r, packed ? page->packed : page->raw, t, some, k, v);
        }
    }
}

uint32_t kvq_read_rows(const struct kvq_kernels *k, const struct kvq_reading *in, uint64_t from,
                       uint32_t n, uint32_t head, float *k_out, float *v_out, void *workspace)
{
    struct reader r = {.k = k, .in = in, .head = head, .dim = in->shape->k_dim, .w = workspace};
    uint32_t count = 0;
    assert(head < in->shape->kv_heads);
    r.codec = kvq__codec_of(in->format, in->shape, in->book, head);
    r.extras = kvq__extras_of(in->format, in->shape, in->extras, in->pool, head);
    r.raw = kvq_raw_layout_of(in->shape);
    for (uint32_t i = 0, some; i < n; i += some) {
        uint64_t page = (from + i) / KVQ_BLOCK_TOKENS, slot = page - in->first_page;
        uint32_t at = (uint32_t)((from + i) % KVQ_BLOCK_TOKENS);
        some = kvq__min_u32(n - i, KVQ_BLOCK_TOKENS - at);
        if (page < in->first_page || slot >= in->n_pages || in->pages[slot].tokens <= at)
            continue;
        uint32_t held = kvq__min_u32(some, in->pages[slot].tokens - at);
        read_page(&r, &in->pages[slot], page * KVQ_BLOCK_TOKENS, at, held,
                  k_out + (size_t)i * r.dim, v_out + (size_t)i * r.dim);
        count += held;
    }
    return count;
}

void kvq_merge_rows(const float *out_a, const float *lse_a, const float *out_b, const float *lse_b,
                    float *out, float *lse, size_t rows, size_t dim)
{
    for (size_t r = 0; r < rows; r++) {
        struct kvq__merge m = kvq__merge_of(lse_a[r], lse_b[r]);
        for (size_t i = r * dim; i < (r + 1) * dim; i++)
            out[i] = kvq__merged(&m, out_a[i], out_b[i]);
        lse[r] = m.lse;
    }
}
