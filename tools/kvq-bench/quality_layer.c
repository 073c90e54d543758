// SPDX-License-Identifier: Apache-2.0
//
// A layer's cache in this process, packed by the kernels and read back by them.
//
// Attention goes over what was read back, rounded to fp16, and not over packed bytes: that serves
// controls and formats alike, and formats that have no fast kernels yet. Tests of the kernels hold
// attention over packed bytes to the same numbers.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"

static const struct kvq_kernels *kernels(void)
{
    return kvq_kernels_get(KVQ_ISA_BEST);
}

static size_t blocks_of(const struct quality_layer *l)
{
    return (l->room + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS;
}

static void *take(size_t bytes)
{
    size_t whole = (bytes + 63) / 64 * 64;
    void *p = aligned_alloc(64, whole ? whole : 64);
    if (p)
        memset(p, 0, whole);
    return p;
}

static bool take_memory(struct quality_layer *l)
{
    struct kvq_raw_layout raw = kvq_raw_layout_of(&l->shape);
    struct kvq_layout packed = kvq_layout_of(&l->m.f, &l->shape);
    size_t n = blocks_of(l), extras = kvq_extras_bytes(&l->m.f, &l->shape);
    l->raw_bytes = kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS);
    l->packed_bytes = kvq_block_bytes(&packed, &l->shape);
    l->raw = take(n * l->raw_bytes);
    l->seen = take(n * l->raw_bytes);
    l->blocks = take(n * l->packed_bytes);
    l->pages = take(n * sizeof *l->pages);
    l->seen_pages = take(n * sizeof *l->seen_pages);
    l->rows = take(2 * sizeof(float) * KVQ_BLOCK_TOKENS * l->shape.k_dim);
    l->workspace = take(kvq_workspace_bytes());
    l->extras = extras ? take(extras) : NULL;
    return l->raw && l->seen && l->blocks && l->pages && l->seen_pages && l->rows && l->workspace &&
           (l->extras || !extras);
}

int quality_layer_open(struct quality_layer *l, const struct quality_method *m,
                       const struct kvq_shape *shape, uint32_t layer, uint64_t room,
                       uint64_t prompt_tokens, const struct kvq_book *book, char *text, size_t n)
{
    *l = (struct quality_layer){.m = *m, .shape = *shape, .room = room, .book = book};
    l->shape.v_rotation = (uint8_t)kvq_v_rotation_by_paper(&m->f); // as sessions have it
    if (layer < m->f.plain_layers)
        l->m.f.outliers = l->m.f.extra_outliers = 0;
    if (quality_wants_book(m) && !book) {
        snprintf(text, n, "%s needs codebooks", m->name);
        return -1;
    }
    if (kvq_shape_check(&l->shape, &l->m.f, text, n))
        return -1;
    l->learn = kvq_learn_tokens(&l->m.f, prompt_tokens);
    if (!take_memory(l)) {
        snprintf(text, n, "no memory for a cache of %llu tokens", (unsigned long long)room);
        return -1;
    }
    quality_layer_clear(l);
    return 0;
}

void quality_layer_close(struct quality_layer *l)
{
    void *rooms[] = {l->raw,        l->seen, l->blocks,    l->pages,
                     l->seen_pages, l->rows, l->workspace, l->extras};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        free(rooms[i]);
    *l = (struct quality_layer){0};
}

void quality_layer_clear(struct quality_layer *l)
{
    l->tokens = l->packed = 0;
    l->learned = false;
    if (l->extras)
        kvq_extras_init(&l->m.f, &l->shape, l->extras);
    for (size_t i = 0; i < blocks_of(l); i++) {
        uint8_t *seen = l->seen + i * l->raw_bytes;
        l->pages[i] =
            (struct kvq_page){l->blocks + i * l->packed_bytes, l->raw + i * l->raw_bytes, 0, 0};
        l->seen_pages[i] = (struct kvq_page){seen, seen, 0, 0};
    }
}

// ---- Storing ----

static void store(const struct quality_layer *l, uint8_t *blocks, uint64_t at, uint32_t head,
                  const struct kvq_view *k, const struct kvq_view *v, uint32_t n)
{
    struct kvq_store_counts counts = {0};
    kvq_store(kernels(), &l->shape, k, v, head, (uint32_t)(at % KVQ_BLOCK_TOKENS), n,
              blocks + at / KVQ_BLOCK_TOKENS * l->raw_bytes, &counts);
}

static void set_page_tokens(struct quality_layer *l)
{
    for (size_t i = 0; i < blocks_of(l); i++) {
        uint64_t start = i * KVQ_BLOCK_TOKENS;
        uint64_t held = l->tokens > start ? l->tokens - start : 0;
        uint64_t packed = l->packed > start ? l->packed - start : 0;
        held = held < KVQ_BLOCK_TOKENS ? held : KVQ_BLOCK_TOKENS;
        packed = packed < KVQ_BLOCK_TOKENS ? packed : KVQ_BLOCK_TOKENS;
        bool gone = l->m.kind == QUALITY_DROPPED && packed;
        l->pages[i].tokens = (uint16_t)held;
        l->pages[i].packed_tokens = (uint16_t)(l->m.kind == QUALITY_FORMAT ? packed : 0);
        l->seen_pages[i].tokens = (uint16_t)(gone ? 0 : held);
    }
}

void quality_layer_append(struct quality_layer *l, const float *k, const float *v, uint32_t n)
{
    uint32_t dim = kvq_row_dim(&l->shape);
    int64_t row = (int64_t)sizeof(float) * dim, token = row * l->shape.kv_heads;
    for (uint32_t done = 0, some; done < n; done += some) {
        some = KVQ_BLOCK_TOKENS - (uint32_t)(l->tokens % KVQ_BLOCK_TOKENS);
        some = some < n - done ? some : n - done;
        size_t at = (size_t)done * l->shape.kv_heads * dim;
        struct kvq_view view_k = {k + at, token, row, KVQ_F32};
        struct kvq_view view_v = {v + at, token, row, KVQ_F32};
        for (uint32_t h = 0; h < l->shape.kv_heads; h++) {
            store(l, l->raw, l->tokens, h, &view_k, &view_v, some);
            store(l, l->seen, l->tokens, h, &view_k, &view_v, some);
        }
        l->tokens += some;
    }
    set_page_tokens(l);
}

// ---- Packing ----

// What n numbers become with 2 bits, the smallest as zero, scale and zero in full precision.
static void round_int2(float *x, uint32_t n)
{
    float min = x[0], max = x[0];
    for (uint32_t i = 1; i < n; i++) {
        min = fminf(min, x[i]);
        max = fmaxf(max, x[i]);
    }
    float step = (max - min) / 3;
    for (uint32_t i = 0; i < n && step > 0; i++)
        x[i] = min + step * rintf((x[i] - min) / step);
}

// A unit of one head as attention will see it, into l->rows.
static void rebuild_unit(struct quality_layer *l, uint64_t at, uint32_t head)
{
    uint32_t n = l->m.f.unit_tokens, dim = l->shape.k_dim;
    float *k = l->rows, *v = l->rows + (size_t)KVQ_BLOCK_TOKENS * dim;
    struct kvq_unit unit = {.raw_block = l->raw + at / KVQ_BLOCK_TOKENS * l->raw_bytes,
                            .packed_block = l->blocks + at / KVQ_BLOCK_TOKENS * l->packed_bytes,
                            .head = head,
                            .first = (uint32_t)(at % KVQ_BLOCK_TOKENS),
                            .block_start = at / KVQ_BLOCK_TOKENS * KVQ_BLOCK_TOKENS,
                            .extras = l->extras,
                            .learned = l->learn,
                            .book = l->book};
    const struct kvq_reading packed = {.format = &l->m.f,
                                       .shape = &l->shape,
                                       .pages = l->pages,
                                       .n_pages = (uint32_t)blocks_of(l),
                                       .extras = l->extras,
                                       .book = l->book};
    if (l->m.kind == QUALITY_FORMAT)
        kvq_pack(kernels(), &l->m.f, &l->shape, &unit, l->workspace);
    kvq_read_rows(kernels(), &packed, at, n, head, k, v, l->workspace);
    for (uint32_t t = 0; t < n && l->m.kind == QUALITY_INT2; t++) {
        round_int2(k + (size_t)t * dim, dim);
        round_int2(v + (size_t)t * dim, dim);
    }
}

static void pack_unit(struct quality_layer *l, uint64_t at)
{
    uint32_t n = l->m.f.unit_tokens, dim = l->shape.k_dim;
    int64_t row = (int64_t)sizeof(float) * dim;
    l->packed = at + n;
    set_page_tokens(l);
    for (uint32_t h = 0; h < l->shape.kv_heads && at + n > l->m.f.sink_tokens; h++) {
        rebuild_unit(l, at, h);
        // The rows are of this head alone: a head stride of 0 stands for it.
        struct kvq_view k = {l->rows, row, 0, KVQ_F32};
        struct kvq_view v = {l->rows + (size_t)KVQ_BLOCK_TOKENS * dim, row, 0, KVQ_F32};
        store(l, l->seen, at, h, &k, &v, n);
    }
}

void quality_layer_settle(struct quality_layer *l, uint64_t recent)
{
    if (kvq_is_raw(&l->m.f) && l->m.kind == QUALITY_FORMAT)
        return;
    if (l->learn && !l->learned) {
        if (l->tokens < l->learn)
            return;
        for (uint32_t h = 0; h < l->shape.kv_heads; h++)
            kvq_learn(kernels(), &l->m.f, &l->shape, l->pages, l->learn, h, l->extras,
                      l->workspace);
        l->learned = true;
    }
    while (l->packed + l->m.f.unit_tokens + recent <= l->tokens)
        pack_unit(l, l->packed);
}

// ---- Reading and attention ----

static const struct kvq_format *f16(void)
{
    return kvq_format_by_name("f16");
}

void quality_layer_read(const struct quality_layer *l, bool seen, uint32_t head, float *k, float *v)
{
    uint32_t stored = l->shape.k_dim, dim = kvq_row_dim(&l->shape);
    float *rows_k = l->rows, *rows_v = rows_k + (size_t)KVQ_BLOCK_TOKENS * stored;
    for (uint64_t at = 0; at < l->tokens; at += KVQ_BLOCK_TOKENS) {
        struct kvq_page page = (seen ? l->seen_pages : l->pages)[at / KVQ_BLOCK_TOKENS];
        const struct kvq_reading r = {
            .format = f16(), .shape = &l->shape, .pages = &page, .n_pages = 1};
        page.packed_tokens = 0;
        memset(l->rows, 0, 2 * sizeof(float) * KVQ_BLOCK_TOKENS * stored);
        kvq_read_rows(kernels(), &r, 0, page.tokens, head, rows_k, rows_v, l->workspace);
        for (uint64_t t = 0; t < KVQ_BLOCK_TOKENS && at + t < l->tokens; t++) {
            memcpy(k + (at + t) * dim, rows_k + t * stored, dim * sizeof *k);
            memcpy(v + (at + t) * dim, rows_v + t * stored, dim * sizeof *v);
        }
    }
}

void quality_layer_attend(const struct quality_layer *l, const float *q, uint32_t n, float *out)
{
    int64_t row = (int64_t)sizeof(float) * kvq_row_dim(&l->shape), token = row * l->shape.q_heads;
    const struct kvq_attend a = {.format = f16(),
                                 .shape = &l->shape,
                                 .pages = l->seen_pages,
                                 .n_pages = (uint32_t)blocks_of(l),
                                 .path = KVQ_PATH_EXACT,
                                 .past_tokens = l->tokens - n,
                                 .step_tokens = n,
                                 .q_start = l->tokens - n,
                                 .q_tokens = n,
                                 .q = {q, token, row, KVQ_F32},
                                 .out = out,
                                 .out_token_stride = token,
                                 .out_head_stride = row,
                                 .out_dtype = KVQ_F32};
    struct kvq_attend_job job = {.call = a};
    kvq_attend_plan(kernels(), &a, 1, &job.plan);
    for (uint32_t i = 0; i < job.plan.items; i++)
        kvq_attend_item(kernels(), &job, i, l->workspace);
}
