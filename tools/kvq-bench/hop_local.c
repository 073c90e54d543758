// SPDX-License-Identifier: Apache-2.0
//
// Attention by the plain kernel, launched by this process over caches of its own. They hold the
// bytes that the daemon's hold for the same tokens, so the outputs must be the same to the bit.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attend.h"
#include "kernels/kernels.h"
#include "tools/kvq-bench/hop.h"

// One attention of a layer, ready to be launched.
struct launch {
    struct kvq_gpu_attend_launch launch;
    kvq_gpu_ptr memory;
};

struct hop_local {
    const struct hop_gpu *gpu;
    const struct kvq_format *format;
    struct kvq_shape shape;
    uint32_t layers;
    struct kvq_gpu kernels;
    struct kvq_gpu_layer layer;
    // The case.
    uint64_t packed_bytes, raw_bytes; // of a block
    uint32_t n_pages, packed_pages, first_raw;
    size_t cache_bytes; // of one session and layer: packed blocks, then raw ones
    kvq_gpu_ptr caches, pages, workspace;
    struct launch *launches; // [layers][2]: without a fresh token, with one
};

static int fault(const struct hop_local *l, int result, const char *what, char *text)
{
    return result == KVQ_GPU_OK ? 0 : kvq_gpu_fault(&l->gpu->driver, result, what, text, HOP_TEXT);
}

// What a session keeps beside its blocks would have to be made as the daemon does.
static int check_format(const struct hop_local *l, const char *name, char *text)
{
    if (!l->format || kvq_extras_bytes(l->format, &l->shape) > 0 || kvq_has_centroids(l->format)) {
        snprintf(
            text, HOP_TEXT,
            "--format %s: it must be one without codebooks, sinks, outliers and learning, such "
            "as f16, oscar2 or kivi2",
            name);
        return -1;
    }
    return kvq_shape_check(&l->shape, l->format, text, HOP_TEXT) ? -1 : 0;
}

int hop_local_open(struct hop_local **out, const struct hop_gpu *gpu, const struct hop_options *o,
                   char *text)
{
    struct hop_local *l = calloc(1, sizeof *l);
    *out = l;
    if (!l) {
        snprintf(text, HOP_TEXT, "no memory");
        return -1;
    }
    l->gpu = gpu;
    l->layers = o->layers;
    l->format = kvq_format_by_name(o->format);
    l->shape = (struct kvq_shape){.q_heads = (uint16_t)o->q_heads,
                                  .kv_heads = (uint16_t)o->kv_heads,
                                  .k_dim = (uint16_t)o->head_dim,
                                  .v_dim = (uint16_t)o->head_dim,
                                  .dtype = KVQ_F16};
    l->shape.v_rotation = l->format ? (uint8_t)kvq_v_rotation_by_paper(l->format) : 0;
    l->shape.scale = 1.0f / sqrtf((float)o->head_dim);
    l->layer = (struct kvq_gpu_layer){.format = l->format, .shape = &l->shape};
    int rc = check_format(l, o->format, text);
    rc = rc ? rc : kvq_gpu_open(&l->kernels, &gpu->driver, text, HOP_TEXT);
    if (rc == 0)
        l->layer.wide_rows = kvq_gpu_attend_wide_rows(&l->kernels, l->shape.k_dim);
    return rc;
}

// ---- Caches ----

// Writes a page's tokens: into its raw block, and those that are packed into the other as well. The
// scales of some formats span heads, so all are stored before any is packed.
static void fill_page(const struct hop_local *l, const struct hop_case *c, uint32_t page,
                      uint8_t *raw, uint8_t *packed, void *workspace)
{
    const struct kvq_kernels *k = kvq_kernels_get(KVQ_ISA_BEST);
    const struct kvq_shape *s = &l->shape;
    const size_t row = (size_t)s->kv_heads * s->k_dim;
    const uint64_t start = (uint64_t)page * KVQ_BLOCK_TOKENS, left = c->tokens - start;
    const uint32_t n = left < KVQ_BLOCK_TOKENS ? (uint32_t)left : KVQ_BLOCK_TOKENS;
    struct kvq_view vk = {c->k + start * row, (int64_t)(2 * row), 2 * s->k_dim, KVQ_F16};
    struct kvq_view vv = {c->v + start * row, (int64_t)(2 * row), 2 * s->k_dim, KVQ_F16};
    struct kvq_store_counts counts = {0};
    for (uint32_t h = 0; h < s->kv_heads; h++)
        kvq_store(k, s, &vk, &vv, h, 0, n, raw, &counts);
    for (uint32_t t = 0; t < n && start + t < c->packed; t += l->format->unit_tokens)
        for (uint32_t h = 0; h < s->kv_heads; h++)
            kvq_pack(k, l->format, s,
                     &(struct kvq_unit){.raw_block = raw,
                                        .packed_block = packed,
                                        .head = h,
                                        .first = t,
                                        .block_start = start},
                     workspace);
}

// Writes the blocks of the tokens: packed ones to `at`, and those that are not, in whole or in
// part, behind them.
static void fill_image(const struct hop_local *l, const struct hop_case *c, uint8_t *at,
                       uint8_t *scratch)
{
    uint8_t *raw = at + l->packed_pages * l->packed_bytes;
    for (uint32_t page = 0; page < l->n_pages; page++)
        fill_page(l, c, page,
                  page < l->first_raw ? scratch : raw + (page - l->first_raw) * l->raw_bytes,
                  at + page * l->packed_bytes, scratch + l->raw_bytes);
}

static void lay_out(struct hop_local *l, const struct hop_case *c)
{
    struct kvq_raw_layout raw = kvq_raw_layout_of(&l->shape);
    struct kvq_layout packed = {0};
    if (!kvq_is_raw(l->format))
        packed = kvq_layout_of(l->format, &l->shape);
    l->raw_bytes = kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS);
    l->packed_bytes = c->packed ? kvq_block_bytes(&packed, &l->shape) : 0;
    l->n_pages = (uint32_t)((c->tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS);
    l->packed_pages = (uint32_t)((c->packed + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS);
    l->first_raw = (uint32_t)(c->packed / KVQ_BLOCK_TOKENS);
    l->cache_bytes = l->packed_pages * l->packed_bytes + (l->n_pages - l->first_raw) * l->raw_bytes;
}

static void fill_pages(const struct hop_local *l, const struct hop_case *c, uint32_t number,
                       struct kvq_page *pages)
{
    const uint8_t *at = (const uint8_t *)(uintptr_t)(l->caches + number * l->cache_bytes);
    for (uint32_t i = 0; i < l->n_pages; i++) {
        uint64_t start = (uint64_t)i * KVQ_BLOCK_TOKENS, left = c->tokens - start;
        uint64_t packed = c->packed > start ? c->packed - start : 0;
        pages[i].tokens = (uint16_t)(left < KVQ_BLOCK_TOKENS ? left : KVQ_BLOCK_TOKENS);
        pages[i].packed_tokens = (uint16_t)(packed < pages[i].tokens ? packed : pages[i].tokens);
        pages[i].packed = i < l->packed_pages ? at + i * l->packed_bytes : NULL;
        pages[i].raw = i < l->first_raw ? NULL
                                        : at + l->packed_pages * l->packed_bytes +
                                              (i - l->first_raw) * l->raw_bytes;
    }
}

static int put(struct hop_local *l, kvq_gpu_ptr to, const void *from, size_t bytes, char *text)
{
    const struct kvq_gpu_driver *d = &l->gpu->driver;
    int result = d->copy_in(to, from, bytes, l->gpu->stream);
    return fault(l, result ? result : d->stream_sync(l->gpu->stream), "copying to the GPU", text);
}

static int fill_caches(struct hop_local *l, const struct hop_case *c, char *text)
{
    const struct kvq_gpu_driver *d = &l->gpu->driver;
    const uint32_t n = c->sessions * l->layers;
    uint8_t *image = aligned_alloc(64, (l->cache_bytes + 63) / 64 * 64);
    uint8_t *scratch = aligned_alloc(64, (l->raw_bytes + kvq_workspace_bytes() + 63) / 64 * 64);
    struct kvq_page *pages = calloc((size_t)n * l->n_pages, sizeof *pages);
    int rc = -1, result = KVQ_GPU_OK;
    if (!image || !scratch || !pages) {
        snprintf(text, HOP_TEXT, "no memory for a cache of %llu tokens",
                 (unsigned long long)c->tokens);
        goto out;
    }
    memset(image, 0, l->cache_bytes);
    fill_image(l, c, image, scratch);
    result = d->memory_alloc(&l->caches, n * l->cache_bytes);
    result = result ? result : d->memory_alloc(&l->pages, n * l->n_pages * sizeof *pages);
    for (uint32_t i = 0; i < n; i++)
        fill_pages(l, c, i, pages + (size_t)i * l->n_pages);
    rc = fault(l, result, "taking memory for local caches", text);
    rc = rc ? rc : put(l, l->caches, image, l->cache_bytes, text);
    rc = rc ? rc : put(l, l->pages, pages, n * l->n_pages * sizeof *pages, text);
    for (uint32_t i = 1; rc == 0 && i < n; i++)
        rc = fault(l,
                   d->copy_device(l->caches + i * l->cache_bytes, l->caches, l->cache_bytes,
                                  l->gpu->stream),
                   "copying local caches", text);
out:
    free(image);
    free(scratch);
    free(pages);
    return rc;
}

// ---- Launches ----

static void describe(const struct hop_local *l, const struct hop_case *c, uint32_t layer,
                     bool fresh, struct kvq_attend *calls)
{
    const struct kvq_shape *s = &l->shape;
    const int64_t head = 2 * s->k_dim, token = head * s->q_heads;
    const struct kvq_page *pages = (const struct kvq_page *)(uintptr_t)l->pages;
    const uint64_t row = (uint64_t)s->q_heads * s->k_dim;
    for (uint32_t i = 0; i < c->sessions; i++)
        calls[i] = (struct kvq_attend){
            .pages = pages + (size_t)(layer * c->sessions + i) * l->n_pages,
            .n_pages = l->n_pages,
            .past_tokens = c->tokens,
            .step_tokens = fresh,
            .fresh_start = c->tokens,
            .fresh_tokens = fresh,
            .fresh_k = {(const void *)(uintptr_t)c->fresh_k, head * s->kv_heads, head, KVQ_F16},
            .fresh_v = {(const void *)(uintptr_t)c->fresh_v, head * s->kv_heads, head, KVQ_F16},
            .q_start = c->tokens,
            .q_tokens = 1,
            .q = {(const void *)(uintptr_t)(c->q + 2 * i * row), token, head, KVQ_F16},
            .out = (void *)(uintptr_t)(c->out + 4 * i * row),
            .out_token_stride = 2 * token,
            .out_head_stride = 2 * head,
            .out_dtype = KVQ_F32};
}

// One for all launches: which of the two kinds needs more depends on where splits grow.
static int make_workspace(struct hop_local *l, const struct hop_case *c, struct kvq_attend *calls,
                          char *text)
{
    size_t most = 0;
    for (int fresh = 0; fresh < 2; fresh++) {
        struct kvq_gpu_attend_limits needs;
        describe(l, c, 0, fresh, calls);
        if (kvq_gpu_attend_needs(&l->layer, calls, NULL, c->sessions, &needs, text, HOP_TEXT))
            return -1;
        size_t bytes = kvq_gpu_attend_workspace_bytes(&l->layer, &needs);
        most = bytes > most ? bytes : most;
    }
    int result = l->gpu->driver.memory_alloc(&l->workspace, most);
    result = result ? result : l->gpu->driver.fill8(l->workspace, 0, most, l->gpu->stream);
    return fault(l, result, "taking memory for local sums", text);
}

static int make_launch(struct hop_local *l, const struct kvq_attend *calls, uint32_t n,
                       struct launch *made, char *text)
{
    struct kvq_gpu_attend_limits needs;
    if (kvq_gpu_attend_needs(&l->layer, calls, NULL, n, &needs, text, HOP_TEXT))
        return -1;
    size_t bytes = kvq_gpu_attend_batch_bytes(&needs);
    void *batch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    int result = batch ? KVQ_GPU_OK : KVQ_GPU_OUT_OF_MEMORY, rc = -1;
    result = result ? result : l->gpu->driver.memory_alloc(&made->memory, bytes);
    rc = fault(l, result, "taking memory for local launches", text);
    rc = rc ? rc : kvq_gpu_attend_fill(&l->layer, calls, NULL, n, &needs, batch, text, HOP_TEXT);
    rc = rc ? rc : put(l, made->memory, batch, bytes, text);
    made->launch = (struct kvq_gpu_attend_launch){.layer = l->layer,
                                                  .limits = needs,
                                                  .batch = made->memory,
                                                  .workspace = l->workspace,
                                                  .stream = l->gpu->stream};
    free(batch);
    return rc;
}

int hop_local_fill(struct hop_local *l, const struct hop_case *c, char *text)
{
    struct kvq_attend *calls = calloc(c->sessions, sizeof *calls);
    l->launches = calloc(2 * l->layers, sizeof *l->launches);
    lay_out(l, c);
    int rc = calls && l->launches ? fill_caches(l, c, text) : -1;
    rc = rc ? rc : make_workspace(l, c, calls, text);
    for (uint32_t i = 0; rc == 0 && i < 2 * l->layers; i++) {
        describe(l, c, i / 2, i % 2, calls);
        rc = make_launch(l, calls, c->sessions, &l->launches[i], text);
    }
    free(calls);
    return rc;
}

int hop_local_attend(struct hop_local *l, uint32_t layer, bool fresh, char *text)
{
    return kvq_gpu_attend(&l->kernels, &l->launches[2 * layer + fresh].launch, text, HOP_TEXT);
}

void hop_local_empty(struct hop_local *l)
{
    const struct kvq_gpu_driver *d = &l->gpu->driver;
    for (uint32_t i = 0; l->launches && i < 2 * l->layers; i++)
        if (l->launches[i].memory)
            d->memory_free(l->launches[i].memory);
    const kvq_gpu_ptr all[] = {l->caches, l->pages, l->workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i])
            d->memory_free(all[i]);
    free(l->launches);
    l->launches = NULL;
    l->caches = l->pages = l->workspace = 0;
}

void hop_local_close(struct hop_local **local)
{
    struct hop_local *l = *local;
    *local = NULL;
    if (!l)
        return;
    hop_local_empty(l);
    if (l->kernels.driver)
        kvq_gpu_close(&l->kernels);
    free(l);
}
