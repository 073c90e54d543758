// SPDX-License-Identifier: Apache-2.0
//
// Caches to walk.
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/recipe.h"
#include "tools/kvq-bench/cache.h"

enum {
    WALK_CACHES = 4,   // a walk reads at least so many times the last level cache
    MAX_LAYERS = 1024, // however small the cache of one is
    FAR = 1 << 20,     // where blocks are packed: behind the tokens that a format keeps apart
};

// ---- Random numbers ----

static uint64_t next_random(uint64_t *state) // SplitMix64
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void bench_normal(uint64_t seed, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) { // Box and Muller
        double u = ((double)(next_random(&seed) >> 11) + 1) * 0x1p-53;
        double v = (double)(next_random(&seed) >> 11) * 0x1p-53;
        x[i] = (float)(sqrt(-2 * log(u)) * cos(2 * M_PI * v));
    }
}

uint32_t bench_source_of(uint64_t layer, uint64_t page)
{
    uint64_t state = layer << 32 | page;
    return (uint32_t)(next_random(&state) % BENCH_SOURCES);
}

// ---- What a format keeps besides blocks ----

static uint8_t *extras_of(const struct bench_cache *c, uint32_t layer)
{
    return c->extras_bytes ? (uint8_t *)c->extras.data + layer * c->extras_bytes : NULL;
}

// A head's part of them; heads' records follow each other.
static uint8_t *record_of(const struct bench_cache *c, uint32_t layer, uint32_t head)
{
    return extras_of(c, layer) + c->extras_bytes / c->shape.kv_heads * head;
}

const struct kvq_outliers *bench_outliers_of(const struct bench_cache *c, uint32_t layer,
                                             uint32_t head)
{
    if (!c->format->outliers)
        return NULL;
    const struct kvq_extras_layout l = kvq_recipe_of(c->format, &c->shape).extras;
    return (const struct kvq_outliers *)(const void *)(record_of(c, layer, head) + l.pool);
}

// ---- Making a cache ----

static size_t packed_bytes(const struct bench_cache *c)
{
    if (kvq_is_raw(c->format))
        return 0;
    struct kvq_layout l = kvq_layout_of(c->format, &c->shape);
    return kvq_block_bytes(&l, &c->shape);
}

static size_t raw_bytes(const struct bench_cache *c)
{
    struct kvq_raw_layout l = kvq_raw_layout_of(&c->shape);
    return kvq_raw_bytes(&l, KVQ_BLOCK_TOKENS);
}

uint32_t bench_page_tokens(const struct bench_cache *c, uint32_t page)
{
    uint64_t left = c->tokens - (uint64_t)page * KVQ_BLOCK_TOKENS;
    return left < KVQ_BLOCK_TOKENS ? (uint32_t)left : KVQ_BLOCK_TOKENS;
}

bool bench_page_packed(const struct bench_cache *c, uint32_t page)
{
    return !kvq_is_raw(c->format) && bench_page_tokens(c, page) == KVQ_BLOCK_TOKENS;
}

// Whether attention reads tokens of this packed page from raw rows: the first of the session.
static bool has_sinks(const struct bench_cache *c, uint32_t page)
{
    return page == 0 && c->format->sink_tokens && bench_page_packed(c, page);
}

static void make_raw_source(const struct bench_cache *c, const struct kvq_kernels *k, uint32_t i,
                            float *tokens)
{
    const struct kvq_shape *s = &c->shape;
    uint32_t dim = kvq_row_dim(s);
    size_t n = (size_t)KVQ_BLOCK_TOKENS * s->kv_heads * dim, row = sizeof(float) * dim;
    struct kvq_store_counts counts = {0};
    bench_normal(i + 1, tokens, 2 * n);
    struct kvq_view view_k = {tokens, (int64_t)(row * s->kv_heads), (int64_t)row, KVQ_F32};
    struct kvq_view view_v = view_k;
    view_v.data = tokens + n;
    uint8_t *block = (uint8_t *)c->sources.data + i * raw_bytes(c);
    for (uint32_t h = 0; h < s->kv_heads; h++)
        kvq_store(k, s, &view_k, &view_v, h, 0, KVQ_BLOCK_TOKENS, block, &counts);
}

// Factors are learned from one of the blocks, as a session learns them from its prompt.
static void learn_factors(const struct bench_cache *c, const struct kvq_kernels *k, void *workspace)
{
    const struct kvq_page page = {.raw = c->sources.data, .tokens = KVQ_BLOCK_TOKENS};
    if (!c->extras_bytes)
        return;
    kvq_extras_init(c->format, &c->shape, extras_of(c, c->layers));
    bool learns = c->format->k_channel == KVQ_CHANNEL_PROMPT;
    for (uint32_t h = 0; h < c->shape.kv_heads && learns; h++)
        kvq_learn(k, c->format, &c->shape, &page, KVQ_BLOCK_TOKENS, h, extras_of(c, c->layers),
                  workspace);
}

static void pack_source(const struct bench_cache *c, const struct kvq_kernels *k, uint32_t i,
                        void *workspace)
{
    for (uint32_t h = 0; packed_bytes(c) && h < c->shape.kv_heads; h++)
        for (uint32_t t = 0; t < KVQ_BLOCK_TOKENS; t += c->format->unit_tokens)
            kvq_pack(
                k, c->format, &c->shape,
                &(struct kvq_unit){.raw_block = (const uint8_t *)c->sources.data + i * raw_bytes(c),
                                   .packed_block = (uint8_t *)c->packed.data + i * packed_bytes(c),
                                   .head = h,
                                   .first = t,
                                   .block_start = FAR,
                                   // Outliers are chosen layer by layer: nobody competes here.
                                   .learned = UINT32_MAX,
                                   .extras = extras_of(c, c->layers),
                                   .book = bench_book_of(&c->books, 0)},
                workspace);
}

// The first tokens of a layer, as packing its first block keeps them; the codes are not used, and
// nobody competes to be an outlier.
static void keep_sinks(const struct bench_cache *c, const struct kvq_kernels *k, uint32_t layer,
                       uint8_t *codes, void *workspace)
{
    struct kvq_unit unit = {.packed_block = codes,
                            .extras = extras_of(c, layer),
                            .learned = UINT32_MAX,
                            .book = bench_book_of(&c->books, layer)};
    unit.raw_block = (const uint8_t *)c->sources.data + bench_source_of(layer, 0) * raw_bytes(c);
    for (; unit.head < c->shape.kv_heads; unit.head++)
        for (unit.first = 0; unit.first < KVQ_BLOCK_TOKENS; unit.first += c->format->unit_tokens)
            kvq_pack(k, c->format, &c->shape, &unit, workspace);
}

// What each layer has: the factors that its blocks were packed with, its first tokens, and as many
// outliers as there is room for, chosen among all of its packed tokens.
static bool make_extras(const struct bench_cache *c, const struct kvq_kernels *k)
{
    struct bench_memory pages, codes;
    const struct kvq_extras_layout l = kvq_recipe_of(c->format, &c->shape).extras;
    struct kvq_format all = *c->format; // all at once
    uint32_t packed = 0;
    if (!c->extras_bytes)
        return true;
    all.outliers = (uint8_t)(all.outliers + all.extra_outliers);
    all.extra_outliers = 0;
    if (!bench_memory_take(&pages, kvq_workspace_bytes() + c->n_pages * sizeof(struct kvq_page)) ||
        !bench_memory_take(&codes, packed_bytes(c)))
        return false;
    struct kvq_page *raw = (void *)((char *)pages.data + kvq_workspace_bytes());
    while (packed < c->n_pages && bench_page_packed(c, packed))
        packed++;
    for (uint32_t i = 0; i < c->layers; i++) {
        uint8_t *extras = extras_of(c, i);
        memcpy(extras, extras_of(c, c->layers), c->extras_bytes);
        if (has_sinks(c, 0))
            keep_sinks(c, k, i, codes.data, pages.data);
        for (uint32_t j = 0; j < packed; j++)
            raw[j] = (struct kvq_page){.raw = (const uint8_t *)c->sources.data +
                                              bench_source_of(i, j) * raw_bytes(c),
                                       .tokens = KVQ_BLOCK_TOKENS};
        for (uint32_t h = 0; h < c->shape.kv_heads && all.outliers; h++) {
            kvq_learn(k, &all, &c->shape, raw, packed * KVQ_BLOCK_TOKENS, h, extras, pages.data);
            // Its factors are not those that the blocks were packed with.
            memcpy(record_of(c, i, h) + l.factors, record_of(c, c->layers, h) + l.factors,
                   l.pool - l.factors);
        }
        kvq_outliers_publish(c->format, &c->shape, extras);
    }
    bench_memory_give(&pages);
    bench_memory_give(&codes);
    return true;
}

static bool make_sources(struct bench_cache *c, const struct kvq_kernels *k)
{
    const struct kvq_shape *s = &c->shape;
    struct bench_memory scratch;
    size_t n = (size_t)KVQ_BLOCK_TOKENS * s->kv_heads * s->k_dim;
    if (!bench_memory_take(&c->sources, BENCH_SOURCES * raw_bytes(c)) ||
        !bench_memory_take(&c->packed, BENCH_SOURCES * packed_bytes(c)) ||
        !bench_memory_take(&scratch, 2 * n * sizeof(float) + kvq_workspace_bytes()))
        return false;
    void *workspace = (char *)scratch.data + 2 * n * sizeof(float);
    for (uint32_t i = 0; i < BENCH_SOURCES; i++)
        make_raw_source(c, k, i, scratch.data);
    learn_factors(c, k, workspace);
    for (uint32_t i = 0; i < BENCH_SOURCES; i++)
        pack_source(c, k, i, workspace);
    bench_memory_give(&scratch);
    return make_extras(c, k);
}

// Fills the pages of a layer from `at` on and returns where the next layer starts.
static uint8_t *fill_layer(struct bench_cache *c, uint32_t layer, uint8_t *at)
{
    for (uint32_t i = 0; i < c->n_pages; i++) {
        bool packed = bench_page_packed(c, i);
        size_t bytes = packed ? packed_bytes(c) : raw_bytes(c);
        const struct bench_memory *from = packed ? &c->packed : &c->sources;
        memcpy(at, (const uint8_t *)from->data + bench_source_of(layer, i) * bytes, bytes);
        c->pages[(size_t)layer * c->n_pages + i] = (struct kvq_page){
            .packed = packed ? at : NULL,
            .raw = packed ? NULL : at,
            .tokens = (uint16_t)bench_page_tokens(c, i),
            .packed_tokens = packed ? KVQ_BLOCK_TOKENS : 0,
        };
        at += bytes;
    }
    return at;
}

static size_t page_bytes(const struct bench_cache *c, uint32_t page)
{
    return bench_page_packed(c, page) ? packed_bytes(c) : raw_bytes(c);
}

// Memory that a layer takes, and the bytes of it that hold tokens.
static size_t size_layer(struct bench_cache *c)
{
    size_t taken = 0;
    c->layer_bytes = 0;
    for (uint32_t i = 0; i < c->n_pages; i++) {
        taken += page_bytes(c, i);
        c->layer_bytes += page_bytes(c, i) * bench_page_tokens(c, i) / KVQ_BLOCK_TOKENS;
        if (has_sinks(c, i))
            c->layer_bytes += raw_bytes(c) * c->format->sink_tokens / KVQ_BLOCK_TOKENS;
    }
    uint32_t room = c->format->outliers ? c->format->outliers + c->format->extra_outliers : 0;
    c->layer_bytes += 2 * sizeof(uint16_t) * room * c->shape.kv_heads * c->shape.k_dim;
    return taken;
}

uint32_t bench_walk_layers(uint32_t walk_mib, size_t layer_bytes)
{
    size_t walk = walk_mib ? (size_t)walk_mib << 20 : WALK_CACHES * bench_last_level_cache();
    size_t layers = (walk + layer_bytes - 1) / layer_bytes;
    if (layers <= MAX_LAYERS)
        return (uint32_t)layers;
    fprintf(stderr,
            "kvq-bench: %d layers make a walk of %.1f MiB, not of %zu: what is read may come from "
            "the processor's cache; give more --tokens\n",
            MAX_LAYERS, (double)(MAX_LAYERS * layer_bytes) / (1 << 20), walk >> 20);
    return MAX_LAYERS;
}

static void make_attends(struct bench_cache *c)
{
    const struct kvq_shape *s = &c->shape;
    int64_t row = (int64_t)sizeof(float) * kvq_row_dim(s), token = row * s->q_heads;
    size_t n = (size_t)c->q_tokens * s->q_heads * kvq_row_dim(s);
    bool prompt = c->q_tokens > 1; // its tokens stand after what is cached, and see all of it
    bench_normal(0, c->queries, c->layers * n);
    for (uint32_t i = 0; i < c->layers; i++)
        c->attends[i] = (struct kvq_attend){
            .format = c->format,
            .shape = s,
            .pages = c->pages + (size_t)i * c->n_pages,
            .n_pages = c->n_pages,
            .extras = extras_of(c, i),
            .book = bench_book_of(&c->books, i),
            .past_tokens = c->tokens,
            .flags = prompt ? KVQ_ATTEND_PAST_ONLY : 0,
            .q_start = prompt ? c->tokens : c->tokens - 1,
            .q_tokens = c->q_tokens,
            .q = {c->queries + i * n, token, row, KVQ_F32},
            .out = c->out + i * n,
            .out_token_stride = token,
            .out_head_stride = row,
            .out_dtype = KVQ_F32,
        };
    assert(!kvq_extras_bytes(c->format, s) || c->attends[0].extras);
}

bool bench_cache_make(struct bench_cache *c, const struct bench_options *o,
                      const struct kvq_format *format, uint64_t tokens)
{
    const struct kvq_kernels *k = kvq_kernels_get(KVQ_ISA_BEST);
    size_t values = (size_t)o->queries * o->q_heads * o->head_dim;
    *c = (struct bench_cache){
        .format = format, .tokens = tokens, .walk_mib = o->walk_mib, .q_tokens = o->queries};
    c->shape = bench_shape(o, format->raw_dtype ? format->raw_dtype : KVQ_F16);
    c->shape.v_rotation = (uint8_t)kvq_v_rotation_by_paper(format); // as sessions have it
    c->n_pages = (uint32_t)((tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS);
    size_t taken = size_layer(c);
    c->extras_bytes = kvq_extras_bytes(format, &c->shape);
    c->layers = bench_walk_layers(c->walk_mib, c->layer_bytes);
    if (c->layers < o->layers)
        c->layers = o->layers;
    c->pages = calloc((size_t)c->layers * c->n_pages, sizeof *c->pages);
    c->attends = calloc(c->layers, sizeof *c->attends);
    c->queries = calloc(c->layers * values, sizeof(float));
    c->out = calloc(c->layers * values, sizeof(float));
    if (!c->pages || !c->attends || !c->queries || !c->out ||
        !bench_books_make(&c->books, format, &c->shape, c->layers) ||
        (c->extras_bytes &&
         !bench_memory_take(&c->extras, ((size_t)c->layers + 1) * c->extras_bytes)) ||
        !make_sources(c, k) || !bench_memory_take(&c->memory, c->layers * taken)) {
        fprintf(stderr, "kvq-bench: no memory for %llu tokens of %s\n", (unsigned long long)tokens,
                format->name);
        bench_cache_free(c);
        return false;
    }
    uint8_t *at = c->memory.data;
    for (uint32_t i = 0; i < c->layers; i++)
        at = fill_layer(c, i, at);
    make_attends(c);
    return true;
}

void bench_cache_free(struct bench_cache *c)
{
    bench_memory_give(&c->memory);
    bench_memory_give(&c->sources);
    bench_memory_give(&c->packed);
    bench_memory_give(&c->extras);
    bench_books_free(&c->books);
    free(c->pages);
    free(c->attends);
    free(c->queries);
    free(c->out);
    *c = (struct bench_cache){0};
}

void bench_cache_rows(const struct bench_cache *c, uint32_t head, bool packed, float *k, float *v,
                      void *workspace)
{
    size_t n = (size_t)KVQ_BLOCK_TOKENS * c->shape.k_dim;
    for (uint32_t i = 0; i < BENCH_SOURCES; i++) {
        // The second of two pages, since the first may have tokens that are kept apart.
        struct kvq_page page[2] = {{0}, {.tokens = KVQ_BLOCK_TOKENS}};
        page[1].raw = (const uint8_t *)c->sources.data + i * raw_bytes(c);
        page[1].packed = (const uint8_t *)c->packed.data + i * packed_bytes(c);
        page[1].packed_tokens = packed ? KVQ_BLOCK_TOKENS : 0;
        struct kvq_reading reading = {.format = c->format,
                                      .shape = &c->shape,
                                      .pages = page,
                                      .n_pages = 2,
                                      .extras = extras_of(c, c->layers),
                                      .book = bench_book_of(&c->books, 0)};
        kvq_read_rows(kvq_kernels_get(KVQ_ISA_C), &reading, KVQ_BLOCK_TOKENS, KVQ_BLOCK_TOKENS,
                      head, k + i * n, v + i * n, workspace);
    }
}
