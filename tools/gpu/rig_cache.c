// SPDX-License-Identifier: Apache-2.0
//
// See rig.h: caches of random tokens, and what is launched over them.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/gpu/rig_internal.h"

enum {
    SOURCES = 16,  // different blocks of tokens
    FAR = 1 << 20, // where they are packed: behind the tokens that formats keep apart
};

struct layer {
    uint64_t pages; // device: of all sessions, one after the other
    uint64_t batch, workspace;
    struct kvq_gpu_attend_limits limits;
    struct kvq_attend *calls; // host, with device pointers; NULL before it is bound
};

struct rig_cache {
    struct rig *rig;
    struct kvq_format format;
    struct kvq_shape shape;
    struct kvq_recipe recipe;
    uint64_t device_recipe;
    size_t raw_bytes, packed_bytes; // of a block
    uint32_t sessions, n_layers, pages;
    uint32_t *tokens, *packed, *first_page; // [sessions]
    uint64_t bytes;                         // that one attention over a layer reads

    uint8_t *raw, *codes, *extras; // the source blocks, and what they were packed with; host
    uint64_t device_raw, device_codes, device_extras, no_outliers;
    struct kvq_book book, device_book;
    uint64_t smooth, k_table, v_table, book_at; // device; book_at: a copy of device_book, or 0

    uint64_t pool; // blocks of all layers
    struct layer *layer;
    uint64_t units, scratch;        // what rig_pack packs, and where to
    uint64_t jobs, job_pages, room; // what rig_store stores, and where to
};

// ---- Random numbers ----

static float uniform(uint64_t *state) // SplitMix64, (0, 1]
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((float)((z ^ z >> 31) >> 40) + 1) * 0x1p-24f;
}

static void fill_normal(float *x, size_t n, uint64_t *state)
{
    for (size_t i = 0; i < n; i++)
        x[i] = sqrtf(-2 * logf(uniform(state))) * cosf(6.2831853f * uniform(state));
}

// Which source stands at a page; a shuffle that is the same for all formats.
static uint32_t source_of(uint32_t layer, uint32_t session, uint32_t page)
{
    uint64_t state = ((uint64_t)layer << 40) + ((uint64_t)session << 20) + page;
    return (uint32_t)(uniform(&state) * SOURCES) % SOURCES;
}

// ---- Codebooks ----

static int make_table(struct rig_cache *c, const struct kvq_side *side, const float **host,
                      uint64_t *device, uint64_t *state, char *text)
{
    size_t n = ((size_t)1 << side->bits) * side->vector;
    if (side->codec != KVQ_CODEC_BOOK)
        return 0;
    float *table = malloc(n * sizeof *table);
    *host = table;
    if (!table) {
        snprintf(text, RIG_TEXT, "no memory for a codebook");
        return -1;
    }
    fill_normal(table, n, state);
    return rig__put(c->rig, device, table, n * sizeof *table, text);
}

static bool has_book(const struct rig_cache *c)
{
    return kvq_has_centroids(&c->format);
}

static int make_book(struct rig_cache *c, uint64_t *state, char *text)
{
    size_t n = (size_t)c->shape.kv_heads * c->shape.k_dim;
    if (make_table(c, &c->format.k, &c->book.k, &c->k_table, state, text) ||
        make_table(c, &c->format.v, &c->book.v, &c->v_table, state, text))
        return -1;
    if (c->format.k_channel == KVQ_CHANNEL_BOOK) {
        float *smooth = malloc(n * sizeof *smooth);
        c->book.smooth = smooth;
        for (size_t i = 0; smooth && i < n; i++)
            smooth[i] = 0.5f + uniform(state);
        if (!smooth || rig__put(c->rig, &c->smooth, smooth, n * sizeof *smooth, text))
            return -1;
    }
    c->device_book = c->book;
    c->device_book.smooth = (const float *)(uintptr_t)c->smooth;
    c->device_book.k = (const float *)(uintptr_t)c->k_table;
    c->device_book.v = (const float *)(uintptr_t)c->v_table;
    return has_book(c) ? rig__put(c->rig, &c->book_at, &c->device_book, sizeof c->device_book, text)
                       : 0;
}

// ---- Source blocks, made on the host ----

static void store_source(struct rig_cache *c, const struct kvq_kernels *k, const float *x,
                         uint8_t *block)
{
    struct kvq_store_counts counts = {0};
    int64_t row = (int64_t)sizeof *x * c->shape.k_dim;
    struct kvq_view view_k = {x, row * c->shape.kv_heads, row, KVQ_F32}, view_v = view_k;
    view_v.data = x + (size_t)KVQ_BLOCK_TOKENS * c->shape.kv_heads * c->shape.k_dim;
    for (uint32_t h = 0; h < c->shape.kv_heads; h++)
        kvq_store(k, &c->shape, &view_k, &view_v, h, 0, KVQ_BLOCK_TOKENS, block, &counts);
}

// What formats learn, they learn from the sources as if those were a session's first tokens.
static void learn(struct rig_cache *c, const struct kvq_kernels *k, void *workspace)
{
    struct kvq_page pages[SOURCES];
    uint32_t tokens = kvq_learn_tokens(&c->format, SOURCES * KVQ_BLOCK_TOKENS);
    if (!c->extras)
        return;
    for (uint32_t i = 0; i < SOURCES; i++)
        pages[i] = (struct kvq_page){.raw = c->raw + i * c->raw_bytes, .tokens = KVQ_BLOCK_TOKENS};
    kvq_extras_init(&c->format, &c->shape, c->extras);
    for (uint32_t h = 0; h < c->shape.kv_heads && tokens; h++)
        kvq_learn(k, &c->format, &c->shape, pages, tokens, h, c->extras, workspace);
}

static void pack_sources(struct rig_cache *c, const struct kvq_kernels *k, void *workspace)
{
    struct kvq_unit unit = {.book = has_book(c) ? &c->book : NULL,
                            .block_start = FAR,
                            .extras = c->extras,
                            .learned = c->format.sink_tokens};
    for (uint32_t i = 0; i < SOURCES; i++)
        for (unit.head = 0; unit.head < c->shape.kv_heads; unit.head++)
            for (unit.first = 0; unit.first < KVQ_BLOCK_TOKENS;
                 unit.first += c->format.unit_tokens) {
                unit.raw_block = c->raw + i * c->raw_bytes;
                unit.packed_block = c->codes + i * c->packed_bytes;
                kvq_pack(k, &c->format, &c->shape, &unit, workspace);
            }
}

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static int make_sources(struct rig_cache *c, uint64_t *state, char *text)
{
    const struct kvq_kernels *k = kvq_kernels_get(KVQ_ISA_BEST);
    size_t n = 2u * KVQ_BLOCK_TOKENS * c->shape.kv_heads * c->shape.k_dim;
    size_t extras = kvq_extras_bytes(&c->format, &c->shape);
    void *workspace = aligned_alloc(64, aligned(kvq_workspace_bytes()));
    float *x = malloc(n * sizeof *x);
    c->raw = aligned_alloc(64, aligned(SOURCES * c->raw_bytes));
    c->codes = aligned_alloc(64, aligned(SOURCES * c->packed_bytes));
    c->extras = extras ? aligned_alloc(64, aligned(extras)) : NULL;
    bool ok = workspace && x && c->raw && c->codes && (c->extras || !extras);
    for (uint32_t i = 0; ok && i < SOURCES; i++) {
        fill_normal(x, n, state);
        store_source(c, k, x, c->raw + i * c->raw_bytes);
    }
    if (ok) {
        learn(c, k, workspace);
        if (kvq_is_raw(&c->format))
            memcpy(c->codes, c->raw, SOURCES * c->raw_bytes);
        else
            pack_sources(c, k, workspace);
    } else {
        snprintf(text, RIG_TEXT, "no memory for the source blocks");
    }
    free(x);
    free(workspace);
    return ok ? 0 : -1;
}

// Each session's layer has extras of its own, alike as they are: they are read from memory.
static int put_extras(struct rig_cache *c, char *text)
{
    size_t bytes = kvq_extras_bytes(&c->format, &c->shape), n = (size_t)c->n_layers * c->sessions;
    uint8_t *all = bytes ? malloc(n * bytes) : NULL;
    if (bytes && !all)
        snprintf(text, RIG_TEXT, "no memory for the extras of %zu layers", n);
    for (size_t i = 0; all && i < n; i++)
        memcpy(all + i * bytes, c->extras, bytes);
    int error = bytes && (!all || rig__put(c->rig, &c->device_extras, all, n * bytes, text));
    free(all);
    return error ? -1 : 0;
}

static uint64_t extras_at(const struct rig_cache *c, uint32_t layer, uint32_t session)
{
    size_t bytes = kvq_extras_bytes(&c->format, &c->shape);
    return c->device_extras ? c->device_extras + (layer * c->sessions + session) * bytes : 0;
}

static int put_sources(struct rig_cache *c, char *text)
{
    const uint8_t none[KVQ_MAX_GQA * 16] = {0};
    if (rig__put(c->rig, &c->device_raw, c->raw, SOURCES * c->raw_bytes, text) ||
        rig__put(c->rig, &c->device_codes, c->codes, SOURCES * c->packed_bytes, text) ||
        rig__put(c->rig, &c->device_recipe, &c->recipe, sizeof c->recipe, text) ||
        rig__put(c->rig, &c->no_outliers, none, sizeof none, text))
        return -1;
    return put_extras(c, text);
}

// ---- Sessions ----

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

// Tokens that are packed once a step has ended with so many.
static uint32_t packed_of(const struct rig_cache *c, uint32_t tokens)
{
    const struct kvq_format *f = &c->format;
    if (kvq_is_raw(f))
        return tokens;
    return tokens < f->recent_tokens
               ? 0
               : (tokens - f->recent_tokens) / f->unit_tokens * f->unit_tokens;
}

static uint32_t pages_of(uint32_t tokens)
{
    return (tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS;
}

static int make_sessions(struct rig_cache *c, const uint32_t *tokens, char *text)
{
    c->tokens = malloc(c->sessions * sizeof *c->tokens);
    c->packed = malloc(c->sessions * sizeof *c->packed);
    c->first_page = malloc(c->sessions * sizeof *c->first_page);
    c->layer = calloc(c->n_layers, sizeof *c->layer);
    if (!c->tokens || !c->packed || !c->first_page || !c->layer) {
        snprintf(text, RIG_TEXT, "no memory for %u sessions", c->sessions);
        return -1;
    }
    for (uint32_t i = 0; i < c->sessions; i++) {
        c->tokens[i] = tokens[i];
        c->packed[i] = packed_of(c, tokens[i]);
        c->first_page[i] = c->pages;
        c->pages += pages_of(tokens[i]);
        uint32_t raw = kvq_is_raw(&c->format) ? tokens[i] : tokens[i] - c->packed[i];
        raw += min_u32(c->format.sink_tokens, c->packed[i]);
        uint32_t packed = tokens[i] - raw;
        c->bytes += (uint64_t)packed * c->packed_bytes / KVQ_BLOCK_TOKENS +
                    (uint64_t)raw * c->raw_bytes / KVQ_BLOCK_TOKENS;
    }
    return 0;
}

// Page `i` of a session, as a page table has it with the session's blocks from `at` on. Returns
// where the next page's begin.
static uint64_t make_page(const struct rig_cache *c, uint32_t session, uint32_t i, uint64_t at,
                          struct kvq_page *page)
{
    uint32_t start = i * KVQ_BLOCK_TOKENS;
    page->tokens = (uint16_t)min_u32(c->tokens[session] - start, KVQ_BLOCK_TOKENS);
    uint32_t packed = c->packed[session] > start ? c->packed[session] - start : 0;
    page->packed_tokens = (uint16_t)min_u32(packed, page->tokens);
    if (page->packed_tokens) {
        page->packed = (const uint8_t *)(uintptr_t)at;
        at += c->packed_bytes;
    }
    if (page->packed_tokens < page->tokens || start < c->format.sink_tokens) {
        page->raw = (const uint8_t *)(uintptr_t)at;
        at += c->raw_bytes;
    }
    return at;
}

// Fills the page tables of a layer, or, without `pages`, only tells how much memory it takes.
static uint64_t walk_pages(const struct rig_cache *c, uint64_t at, struct kvq_page *pages)
{
    for (uint32_t s = 0; s < c->sessions; s++)
        for (uint32_t i = 0; i < pages_of(c->tokens[s]); i++) {
            struct kvq_page page = {0};
            at = make_page(c, s, i, at, &page);
            if (pages)
                pages[c->first_page[s] + i] = page;
        }
    return at;
}

static int copy_block(const struct rig_cache *c, const void *to, uint64_t sources, uint32_t source,
                      size_t bytes, char *text)
{
    if (!to)
        return 0;
    return rig__fault(c->rig,
                      c->rig->driver->copy_device((kvq_gpu_ptr)(uintptr_t)to,
                                                  sources + source * bytes, bytes, NULL),
                      "filling a cache", text);
}

static int fill_layer(struct rig_cache *c, uint32_t layer, const struct kvq_page *pages, char *text)
{
    for (uint32_t s = 0; s < c->sessions; s++)
        for (uint32_t i = 0; i < pages_of(c->tokens[s]); i++) {
            const struct kvq_page *page = &pages[c->first_page[s] + i];
            uint32_t source = source_of(layer, s, i);
            if (copy_block(c, page->packed, c->device_codes, source, c->packed_bytes, text) ||
                copy_block(c, page->raw, c->device_raw, source, c->raw_bytes, text))
                return -1;
        }
    return 0;
}

static int make_layers(struct rig_cache *c, char *text)
{
    uint64_t each = walk_pages(c, 0, NULL);
    struct kvq_page *pages = malloc(c->pages * sizeof *pages);
    int error = pages ? rig_take(c->rig, &c->pool, each * c->n_layers, text) : -1;
    for (uint32_t i = 0; !error && i < c->n_layers; i++) {
        walk_pages(c, c->pool + i * each, pages);
        error = fill_layer(c, i, pages, text) ||
                rig__put(c->rig, &c->layer[i].pages, pages, c->pages * sizeof *pages, text);
    }
    free(pages);
    return error ? -1 : 0;
}

// ---- A cache ----

static int make(struct rig_cache *c, const struct rig_wish *w, char *text)
{
    uint64_t state = w->seed;
    if (kvq_format_parse(w->format, &c->format, text, RIG_TEXT))
        return -1;
    c->shape = (struct kvq_shape){
        .q_heads = (uint16_t)w->q_heads,
        .kv_heads = (uint16_t)w->kv_heads,
        .k_dim = (uint16_t)w->head_dim,
        .v_dim = (uint16_t)w->head_dim,
        .dtype = c->format.raw_dtype ? c->format.raw_dtype : (uint8_t)w->dtype,
        .scale = 1 / sqrtf((float)w->head_dim),
    };
    if (kvq_shape_check(&c->shape, &c->format, text, RIG_TEXT))
        return -1;
    struct kvq_raw_layout raw = kvq_raw_layout_of(&c->shape);
    struct kvq_layout l = kvq_layout_of(&c->format, &c->shape);
    c->raw_bytes = kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS);
    c->packed_bytes = kvq_is_raw(&c->format) ? c->raw_bytes : kvq_block_bytes(&l, &c->shape);
    c->recipe = kvq_recipe_of(&c->format, &c->shape);
    c->sessions = w->sessions;
    c->n_layers = w->layers;
    return make_book(c, &state, text) || make_sources(c, &state, text) || put_sources(c, text) ||
                   make_sessions(c, w->tokens, text) || make_layers(c, text)
               ? -1
               : rig_sync(c->rig, text);
}

int rig_cache_make(struct rig *rig, const struct rig_wish *wish, struct rig_cache **cache,
                   char *text)
{
    struct rig_cache *c = calloc(1, sizeof *c);
    snprintf(text, RIG_TEXT, "no memory");
    *cache = NULL;
    if (!c)
        return -1;
    c->rig = rig;
    if (make(c, wish, text)) {
        rig_cache_free(c);
        return -1;
    }
    *cache = c;
    return 0;
}

void rig_cache_free(struct rig_cache *c)
{
    uint64_t all[] = {c->device_recipe, c->device_raw, c->device_codes, c->device_extras,
                      c->no_outliers,   c->smooth,     c->k_table,      c->v_table,
                      c->book_at,       c->pool,       c->units,        c->scratch,
                      c->jobs,          c->job_pages,  c->room};
    for (uint32_t i = 0; c->layer && i < c->n_layers; i++) {
        rig_give(c->rig, c->layer[i].pages);
        rig_give(c->rig, c->layer[i].batch);
        rig_give(c->rig, c->layer[i].workspace);
        free(c->layer[i].calls);
    }
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        rig_give(c->rig, all[i]);
    free(c->layer);
    free(c->tokens);
    free(c->packed);
    free(c->first_page);
    free(c->raw);
    free(c->codes);
    free(c->extras);
    free((void *)(uintptr_t)c->book.k);
    free((void *)(uintptr_t)c->book.v);
    free((void *)(uintptr_t)c->book.smooth);
    free(c);
}

uint64_t rig_cache_bytes(const struct rig_cache *cache)
{
    return cache->bytes;
}

double rig_cache_bits(const struct rig_cache *cache)
{
    return kvq_bits_per_value(&cache->format, &cache->shape);
}

// ---- Attending ----

static const void *on_device(uint64_t at)
{
    return (const void *)(uintptr_t)at;
}

static struct kvq_attend call_of(const struct rig_cache *c, uint32_t layer, uint32_t session,
                                 const struct rig_query *query)
{
    uint64_t element = query->dtype == KVQ_F32 ? 4 : 2, dim = c->shape.k_dim;
    uint64_t q_row = element * dim * c->shape.q_heads, kv_row = element * dim * c->shape.kv_heads;
    uint64_t tokens = c->tokens[session], q = session * query->q_tokens * q_row;
    uint64_t fresh = session * query->fresh_tokens * kv_row;
    int64_t row = (int64_t)(element * dim);
    struct kvq_attend a = {
        .pages = (const struct kvq_page *)on_device(c->layer[layer].pages) + c->first_page[session],
        .n_pages = pages_of(c->tokens[session]),
        .extras = on_device(extras_at(c, layer, session)),
        .pool = c->format.outliers ? on_device(c->no_outliers) : NULL,
        .past_tokens = query->fresh_tokens ? tokens : tokens - query->q_tokens,
        .step_tokens = query->fresh_tokens ? query->fresh_tokens : query->q_tokens,
        .fresh_start = tokens,
        .fresh_tokens = query->fresh_tokens,
        .fresh_k = {on_device(query->fresh_k + fresh), (int64_t)kv_row, row, (uint8_t)query->dtype},
        .fresh_v = {on_device(query->fresh_v + fresh), (int64_t)kv_row, row, (uint8_t)query->dtype},
        .q_start = tokens + query->fresh_tokens - query->q_tokens,
        .q_tokens = query->q_tokens,
        .q = {on_device(query->q + q), (int64_t)q_row, row, (uint8_t)query->dtype},
        .out = (void *)(uintptr_t)(query->out + q),
        .out_token_stride = (int64_t)q_row,
        .out_head_stride = row,
        .out_dtype = (uint8_t)query->dtype,
        .lse_token_stride = (int64_t)sizeof(float) * c->shape.q_heads,
    };
    if (query->lse)
        a.lse =
            (float *)(uintptr_t)query->lse + (size_t)session * query->q_tokens * c->shape.q_heads;
    return a;
}

static struct kvq_gpu_layer gpu_layer(const struct rig_cache *c)
{
    return (struct kvq_gpu_layer){&c->format, &c->shape, has_book(c) ? &c->device_book : NULL,
                                  kvq_gpu_attend_wide_rows(&c->rig->gpu, c->shape.k_dim), 0};
}

// Device memory for a batch within its limits, and the batch in it.
static int put_batch(struct rig_cache *c, struct layer *l, char *text)
{
    struct kvq_gpu_layer of = gpu_layer(c);
    size_t bytes = kvq_gpu_attend_batch_bytes(&l->limits);
    size_t workspace = kvq_gpu_attend_workspace_bytes(&of, &l->limits);
    void *batch = aligned_alloc(64, aligned(bytes));
    void *zeros = calloc(1, workspace);
    int error =
        !batch || !zeros ||
        kvq_gpu_attend_fill(&of, l->calls, NULL, c->sessions, &l->limits, batch, text, RIG_TEXT) ||
        rig__put(c->rig, &l->batch, batch, bytes, text) ||
        rig__put(c->rig, &l->workspace, zeros, workspace, text);
    free(batch);
    free(zeros);
    return error ? -1 : 0;
}

int rig_cache_bind(struct rig_cache *cache, uint32_t layer, const struct rig_query *query,
                   char *text)
{
    struct layer *l = &cache->layer[layer];
    struct kvq_gpu_layer of = gpu_layer(cache);
    rig_give(cache->rig, l->batch);
    rig_give(cache->rig, l->workspace);
    free(l->calls);
    l->batch = l->workspace = 0;
    l->calls = malloc(cache->sessions * sizeof *l->calls);
    if (!l->calls) {
        snprintf(text, RIG_TEXT, "no memory for %u calls", cache->sessions);
        return -1;
    }
    for (uint32_t i = 0; i < cache->sessions; i++)
        l->calls[i] = call_of(cache, layer, i, query);
    if (kvq_gpu_attend_needs(&of, l->calls, NULL, cache->sessions, &l->limits, text, RIG_TEXT))
        return -1;
    return put_batch(cache, l, text);
}

int rig_attend(const struct rig_cache *cache, uint32_t layer, uint64_t stream, uint32_t blocks,
               char *text)
{
    const struct layer *l = &cache->layer[layer];
    struct kvq_gpu_attend_launch launch = {
        .layer = gpu_layer(cache),
        .limits = l->limits,
        .batch = l->batch,
        .workspace = l->workspace,
        .blocks = blocks,
        .stream = (struct kvq_gpu_stream *)(uintptr_t)stream,
    };
    return kvq_gpu_attend(&cache->rig->gpu, &launch, text, RIG_TEXT);
}

// ---- Reading and packing ----

static struct kvq_gpu_work work_of(const struct rig_cache *c, const struct kvq_recipe **recipe,
                                   uint32_t n, uint64_t stream)
{
    *recipe = &c->recipe;
    return (struct kvq_gpu_work){recipe, 1, n, (struct kvq_gpu_stream *)(uintptr_t)stream};
}

int rig_read(const struct rig_cache *cache, uint32_t layer, uint32_t session, uint64_t k,
             uint64_t v, uint64_t stream, char *text)
{
    const struct kvq_recipe *recipe;
    struct kvq_gpu_work work = work_of(cache, &recipe, 1, stream);
    struct kvq_gpu_read_job job = {
        .recipe = on_device(cache->device_recipe),
        .pages = (const struct kvq_page *)on_device(cache->layer[layer].pages) +
                 cache->first_page[session],
        .book = on_device(cache->book_at),
        .extras = on_device(extras_at(cache, layer, session)),
        .pool = cache->format.outliers ? on_device(cache->no_outliers) : NULL,
        .k_out = (float *)(uintptr_t)k,
        .v_out = (float *)(uintptr_t)v,
        .n = cache->tokens[session],
        .n_pages = pages_of(cache->tokens[session]),
    };
    uint64_t at = 0;
    int error = rig__put(cache->rig, &at, &job, sizeof job, text) ||
                kvq_gpu_read(&cache->rig->gpu, &work, at, job.n, text, RIG_TEXT) ||
                rig_sync(cache->rig, text);
    rig_give(cache->rig, at);
    return error ? -1 : 0;
}

// A job for each session and layer, into a raw block of its own.
static int make_jobs(struct rig_cache *c, uint32_t n, char *text)
{
    struct kvq_gpu_store_job *jobs = calloc(n, sizeof *jobs);
    struct kvq_page *pages = calloc(n, sizeof *pages);
    int error = !jobs || !pages || rig_take(c->rig, &c->room, n * c->raw_bytes, text) ||
                rig_take(c->rig, &c->job_pages, n * sizeof *pages, text);
    for (uint32_t i = 0; !error && i < n; i++) {
        const struct kvq_attend *call = &c->layer[i / c->sessions].calls[i % c->sessions];
        pages[i].raw = on_device(c->room + i * c->raw_bytes);
        jobs[i] = (struct kvq_gpu_store_job){
            .recipe = on_device(c->device_recipe),
            .k = call->fresh_k,
            .v = call->fresh_v,
            .pages = (const struct kvq_page *)on_device(c->job_pages) + i,
            .tokens = call->fresh_tokens,
        };
    }
    error = error || rig_copy_in(c->rig, c->job_pages, pages, n * sizeof *pages, text) ||
            rig__put(c->rig, &c->jobs, jobs, n * sizeof *jobs, text);
    free(jobs);
    free(pages);
    return error ? -1 : 0;
}

int rig_store(struct rig_cache *cache, uint64_t stream, char *text)
{
    const struct kvq_recipe *recipe;
    uint32_t n = cache->sessions * cache->n_layers;
    for (uint32_t i = 0; i < cache->n_layers; i++)
        if (!cache->layer[i].calls || cache->layer[i].calls[0].fresh_tokens == 0) {
            snprintf(text, RIG_TEXT, "layer %u is not bound to fresh tokens", i);
            return -1;
        }
    if (!cache->jobs && make_jobs(cache, n, text))
        return -1;
    struct kvq_gpu_work work = work_of(cache, &recipe, n, stream);
    return kvq_gpu_store(&cache->rig->gpu, &work, cache->jobs, KVQ_BLOCK_TOKENS, text, RIG_TEXT);
}

// Units of a block of each session and layer: from the sources into blocks of their own.
static int make_units(struct rig_cache *c, uint32_t n, char *text)
{
    uint32_t each = KVQ_BLOCK_TOKENS / c->format.unit_tokens;
    struct kvq_gpu_unit *units = calloc((size_t)n * each, sizeof *units);
    int error = !units || rig_take(c->rig, &c->scratch, n * c->packed_bytes, text);
    for (uint32_t i = 0; !error && i < n * each; i++)
        units[i] = (struct kvq_gpu_unit){
            .recipe = on_device(c->device_recipe),
            .book = on_device(c->book_at),
            .raw_block = on_device(c->device_raw + i / each % SOURCES * c->raw_bytes),
            .packed_block = (uint8_t *)(uintptr_t)(c->scratch + i / each * c->packed_bytes),
            .extras = (uint8_t *)(uintptr_t)c->device_extras,
            .block_start = FAR,
            .first = i % each * c->format.unit_tokens,
        };
    error = error || rig__put(c->rig, &c->units, units, (size_t)n * each * sizeof *units, text);
    free(units);
    return error ? -1 : 0;
}

int rig_pack(struct rig_cache *cache, uint64_t stream, uint64_t *bytes, char *text)
{
    const struct kvq_recipe *recipe;
    uint32_t n = cache->sessions * cache->n_layers;
    if (kvq_is_raw(&cache->format) || cache->format.outliers) {
        snprintf(text, RIG_TEXT, "%s: only formats that pack each unit by itself are timed",
                 cache->format.name);
        return -1;
    }
    if (!cache->units && make_units(cache, n, text))
        return -1;
    uint32_t each = KVQ_BLOCK_TOKENS / cache->format.unit_tokens;
    struct kvq_gpu_work work = work_of(cache, &recipe, n * each, stream);
    *bytes = (uint64_t)n * cache->raw_bytes;
    return kvq_gpu_pack(&cache->rig->gpu, &work, cache->units, 0, 0, text, RIG_TEXT);
}
