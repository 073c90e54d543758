// SPDX-License-Identifier: Apache-2.0
//
// See core_model.h.
#include "tests/core/core_model.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static bool is_packing(const struct model_layer *l)
{
    return !kvq_is_raw(l->format);
}

static uint8_t *raw_page(struct model *m, uint32_t layer, uint64_t page)
{
    struct model_layer *l = &m->layers[layer];
    struct kvq_raw_layout raw = kvq_raw_layout_of(&l->shape);
    assert(page < MODEL_PAGES);
    if (!l->raw[page])
        l->raw[page] = aligned_alloc(64, kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS));
    return l->raw[page];
}

void model_write(struct model *m, uint32_t layer, uint64_t position, uint32_t n, const float *k,
                 const float *v, uint32_t row_floats)
{
    const struct kvq_shape *s = &m->layers[layer].shape;
    struct kvq_store_counts ignored = {0};
    int64_t head_stride = (int64_t)(s->k_dim * sizeof(float));
    for (uint32_t t = 0; t < n; t++) {
        uint64_t at = position + t;
        uint8_t *block = raw_page(m, layer, at / KVQ_BLOCK_TOKENS);
        struct kvq_view kv = {k + (size_t)t * row_floats, 0, head_stride, KVQ_F32};
        struct kvq_view vv = {v + (size_t)t * row_floats, 0, head_stride, KVQ_F32};
        for (uint32_t h = 0; h < s->kv_heads; h++)
            kvq_store(m->kernels, s, &kv, &vv, h, at % KVQ_BLOCK_TOKENS, 1, block, &ignored);
    }
}

void model_commit(struct model *m, uint32_t tokens)
{
    m->tokens += tokens;
    if (m->tokens > m->max_rollback)
        m->floor = max_u64(m->floor, m->tokens - m->max_rollback);
}

uint64_t model_packed(const struct model *m, uint32_t layer, uint64_t past)
{
    const struct model_layer *l = &m->layers[m->layers[layer].source];
    uint64_t units = 0;
    if (!is_packing(l))
        return 0;
    if (past < (uint64_t)l->learn + m->max_rollback)
        return l->base;
    // The definition, unit by unit.
    while ((units + 1) * l->format->unit_tokens + m->max_rollback + l->format->recent_tokens <=
           past)
        units++;
    return max_u64(units * l->format->unit_tokens, l->base);
}

uint64_t model_kept(const struct model *m, uint32_t layer)
{
    const struct model_layer *l = &m->layers[m->layers[layer].source];
    uint64_t kept = 0;
    // A page stays if the query behind `floor` tokens sees any of it.
    while (l->keep && kept + KVQ_BLOCK_TOKENS + l->keep <= m->floor + 1)
        kept += KVQ_BLOCK_TOKENS;
    return kept;
}

static void pack_unit(const struct model *m, const struct model_layer *l, uint32_t page,
                      uint32_t head, uint32_t first)
{
    struct kvq_unit unit = {.raw_block = l->raw[page],
                            .packed_block = l->packed[page],
                            .head = head,
                            .first = first,
                            .block_start = (uint64_t)page * KVQ_BLOCK_TOKENS,
                            .extras = l->extras,
                            .learned = l->learn};
    kvq_pack(m->kernels, l->format, &l->shape, &unit, m->workspace);
}

// Extras as they are after learning; packing goes on from there.
static void learn(const struct model *m, struct model_layer *l)
{
    struct kvq_page pages[KVQ_MAX_LEARN / KVQ_BLOCK_TOKENS] = {0};
    size_t bytes = kvq_extras_bytes(l->format, &l->shape);
    if (bytes == 0)
        return;
    if (!l->extras)
        l->extras = aligned_alloc(64, bytes);
    kvq_extras_init(l->format, &l->shape, l->extras);
    for (uint32_t i = 0; i * KVQ_BLOCK_TOKENS < l->learn; i++)
        pages[i].raw = l->raw[i];
    for (uint32_t h = 0; h < l->shape.kv_heads && l->learn; h++)
        kvq_learn(m->kernels, l->format, &l->shape, pages, l->learn, h, l->extras, m->workspace);
}

// The pages of `tokens` tokens as seen from `past`.
static uint32_t view(const struct model *m, uint32_t layer, uint64_t past, uint64_t tokens,
                     struct kvq_page *pages)
{
    struct model_layer *l = (struct model_layer *)&m->layers[m->layers[layer].source];
    struct kvq_layout layout = kvq_layout_of(l->format, &l->shape);
    uint64_t packed = model_packed(m, layer, past);
    uint32_t n = 0;
    if (packed)
        learn(m, l);
    for (uint64_t at = 0; at < tokens; at += KVQ_BLOCK_TOKENS, n++) {
        uint64_t here = tokens - at < KVQ_BLOCK_TOKENS ? tokens - at : KVQ_BLOCK_TOKENS;
        pages[n] = (struct kvq_page){.raw = l->raw[n], .tokens = (uint16_t)here};
        if (packed <= at)
            continue;
        if (!l->packed[n])
            l->packed[n] = aligned_alloc(64, kvq_block_bytes(&layout, &l->shape));
        pages[n].packed = l->packed[n];
        pages[n].packed_tokens = (uint16_t)(packed - at < here ? packed - at : here);
        for (uint32_t t = 0; t < pages[n].packed_tokens; t += l->format->unit_tokens)
            for (uint32_t h = 0; h < l->shape.kv_heads; h++)
                pack_unit(m, l, n, h, t);
    }
    return n;
}

void model_attend(const struct model *m, uint32_t layer, uint64_t past, uint32_t step,
                  uint32_t flags, const struct kvq_view *q, uint32_t q_tokens, float *out,
                  float *lse)
{
    const struct model_layer *l = &m->layers[layer];
    const struct kvq_shape *s = &l->shape;
    struct kvq_page pages[MODEL_PAGES] = {0};
    struct kvq_attend a = {
        .format = l->format,
        .shape = s,
        .pages = pages,
        .n_pages = view(m, layer, past, past + (flags ? 0 : step), pages),
        .flags = flags,
        .path = KVQ_PATH_EXACT,
        .past_tokens = past,
        .step_tokens = step,
        .q_start = past + (step ? step - q_tokens : 0),
        .q_tokens = q_tokens,
        .q = *q,
        .out = out,
        .out_token_stride = (int64_t)(sizeof(float) * s->q_heads * s->v_dim),
        .out_head_stride = (int64_t)(sizeof(float) * s->v_dim),
        .out_dtype = KVQ_F32,
        .lse = lse,
        .lse_token_stride = (int64_t)(sizeof(float) * s->q_heads),
    };
    a.extras = model_packed(m, layer, past) ? m->layers[l->source].extras : NULL;
    struct kvq_attend_job job = {.call = a};
    kvq_attend_plan(m->kernels, &a, 1, &job.plan);
    for (uint32_t i = 0; i < job.plan.items; i++)
        kvq_attend_item(m->kernels, &job, i, m->workspace);
}

void model_read(const struct model *m, uint32_t layer, uint64_t past, uint64_t from, uint32_t n,
                uint32_t head, float *k, float *v)
{
    const struct model_layer *l = &m->layers[layer];
    struct kvq_page pages[MODEL_PAGES] = {0};
    uint32_t n_pages = view(m, layer, past, past, pages);
    struct kvq_reading reading = {
        .format = l->format,
        .shape = &l->shape,
        .pages = pages,
        .n_pages = n_pages,
        .extras = model_packed(m, layer, past) ? m->layers[l->source].extras : NULL,
    };
    kvq_read_rows(m->kernels, &reading, from, n, head, k, v, m->workspace);
}

static void move(struct model *m, uint32_t layer, uint64_t from, uint64_t to)
{
    const struct kvq_shape *s = &m->layers[layer].shape;
    struct kvq_raw_layout raw = kvq_raw_layout_of(s);
    uint8_t *a = raw_page(m, layer, from / KVQ_BLOCK_TOKENS);
    uint8_t *b = raw_page(m, layer, to / KVQ_BLOCK_TOKENS);
    uint32_t at = from % KVQ_BLOCK_TOKENS, to_at = to % KVQ_BLOCK_TOKENS;
    for (uint32_t h = 0; h < s->kv_heads; h++)
        for (int v = 0; v < 2; v++)
            memmove(b + kvq_raw_at(&raw, h, to_at, v), a + kvq_raw_at(&raw, h, at, v),
                    raw.row_bytes);
}

void model_accept(struct model *m, uint32_t append, const int32_t *list, uint32_t n)
{
    uint64_t start = m->tokens - append;
    for (uint32_t i = 0; i < MODEL_LAYERS; i++)
        for (uint32_t j = 0; m->layers[i].source == i && j < n; j++)
            move(m, i, start + (uint64_t)list[j], start + j);
    m->tokens = start + n;
}

// ---- Forks ----

// Raw rows are kept from the page on in which the view at the floor reads raw tokens.
static uint64_t raw_from(const struct model *m, uint32_t layer)
{
    uint64_t packed = model_packed(m, layer, m->floor);
    return max_u64(packed / KVQ_BLOCK_TOKENS * KVQ_BLOCK_TOKENS, m->layers[layer].base);
}

static bool is_learned(const struct model *m, const struct model_layer *l)
{
    return l->learn && m->floor >= l->learn;
}

static bool fork_cuts(const struct model *m, uint32_t layer, uint64_t at)
{
    const struct model_layer *l = &m->layers[layer];
    if (is_learned(m, l) && at < l->learn)
        return at > 0;
    return is_packing(l) && at < raw_from(m, layer) && at % l->format->unit_tokens != 0;
}

static uint64_t fork_base(const struct model *m, uint32_t layer, uint64_t at)
{
    uint64_t raw = raw_from(m, layer);
    return is_packing(&m->layers[layer]) ? (at < raw ? at : raw) : 0;
}

static uint64_t fork_floor(const struct model *m, uint64_t at)
{
    uint64_t floor = at > m->max_rollback ? at - m->max_rollback : 0;
    for (uint32_t i = 0; at > 0 && i < MODEL_LAYERS; i++) {
        if (m->layers[i].source != i)
            continue;
        uint64_t kept = model_kept(m, i);
        if (kept)
            floor = max_u64(floor, kept + m->layers[i].keep - 1);
        if (!fork_cuts(m, i, at))
            floor = max_u64(floor, fork_base(m, i, at));
    }
    return floor;
}

uint64_t model_fork_at(const struct model *m, uint64_t at)
{
    uint64_t lower = at;
    for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
        const struct model_layer *l = &m->layers[i];
        uint64_t whole = at / l->format->unit_tokens * l->format->unit_tokens;
        if (is_learned(m, l) && whole < l->learn)
            whole = 0;
        if (l->source == i && fork_cuts(m, i, at) && whole < lower)
            lower = whole;
    }
    return fork_floor(m, lower) <= lower ? lower : 0;
}

void model_fork(const struct model *m, struct model *to, uint64_t at)
{
    *to = *m;
    to->tokens = at;
    to->floor = fork_floor(m, at);
    for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
        struct model_layer *l = &to->layers[i];
        struct kvq_raw_layout raw = kvq_raw_layout_of(&l->shape);
        size_t bytes = kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS);
        l->base = at && l->source == i ? fork_base(m, i, at) : 0;
        for (uint32_t p = 0; p < MODEL_PAGES; p++) {
            l->packed[p] = NULL;
            l->extras = NULL;
            if (l->raw[p])
                l->raw[p] = memcpy(aligned_alloc(64, bytes), m->layers[i].raw[p], bytes);
        }
    }
}

void model_free(struct model *m)
{
    for (uint32_t i = 0; i < MODEL_LAYERS; i++) {
        for (uint32_t p = 0; p < MODEL_PAGES; p++) {
            free(m->layers[i].raw[p]);
            free(m->layers[i].packed[p]);
            m->layers[i].raw[p] = m->layers[i].packed[p] = NULL;
        }
        free(m->layers[i].extras);
        m->layers[i].extras = NULL;
    }
}
