// SPDX-License-Identifier: Apache-2.0
//
// Caches in ggml's own types, filled with the tokens of one of ours, and a graph of one flash
// attention a layer over them, as llama.cpp builds it.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/peer_ggml.h"

enum {
    ALIGNMENT = 64,          // of ggml's buffers
    TENSORS_A_LAYER = 6,     // K, V, both permuted, queries, outputs
    MAX_VALUE_BYTES = 4,     // no type takes more; a bigger row is nonsense
    CONTEXT_SLACK = 1 << 16, // for what a library keeps besides
};

const struct peer_kind peer_kinds[PEERS] = {
    {"ggml-f16", GGML_F16, "f16", PEER_HEADS, "heads"},
    {"ggml-f16", GGML_F16, "f16", PEER_TOKENS, "tokens"},
    {"ggml-q8_0", GGML_Q8_0, "q8_0", PEER_HEADS, "heads"},
    {"ggml-q8_0", GGML_Q8_0, "q8_0", PEER_TOKENS, "tokens"},
    {"ggml-q4_0", GGML_Q4_0, "q4_0", PEER_HEADS, "heads"},
    {"ggml-q4_0", GGML_Q4_0, "q4_0", PEER_TOKENS, "tokens"},
};

static bool complain(const struct peer_cache *c, const char *what)
{
    fprintf(stderr, "kvq-bench: %s %s: %s\n", c->kind->name, c->kind->layout_name, what);
    return false;
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

// ---- Filling ----

static size_t rows_of_a_head(void)
{
    return (size_t)BENCH_SOURCES * KVQ_BLOCK_TOKENS;
}

// One chunk of memory: the random blocks, the mask, the layers.
static bool take_memory(struct peer_cache *c)
{
    const struct kvq_shape *s = &c->like->shape;
    c->row_bytes = c->p->ggml_row_size(c->kind->type, s->k_dim);
    if (c->row_bytes == 0 || c->row_bytes > (size_t)MAX_VALUE_BYTES * s->k_dim)
        return complain(c, "the library's rows have a size that cannot be");
    c->layer_bytes = 2 * c->like->tokens * s->kv_heads * c->row_bytes;
    c->side_bytes = aligned(c->layer_bytes / 2);
    c->layers = bench_walk_layers(c->like->walk_mib, c->layer_bytes);
    size_t rows = aligned(s->kv_heads * rows_of_a_head() * c->row_bytes);
    size_t mask = aligned(c->like->tokens * GGML_MASK_ROWS * sizeof(uint16_t));
    if (!bench_memory_take(&c->memory, 2 * rows + mask + 2 * c->layers * c->side_bytes))
        return false;
    c->rows[0] = c->memory.data;
    c->rows[1] = c->rows[0] + rows;
    c->mask = c->rows[1] + rows; // f16 zeros, as the memory comes
    c->data = c->mask + mask;
    return true;
}

// Our random blocks in the library's type, converted by the library.
static bool convert_rows(struct peer_cache *c)
{
    const struct kvq_shape *s = &c->like->shape;
    struct bench_memory m;
    size_t n = rows_of_a_head(), bytes = n * c->row_bytes;
    bool ok = bench_memory_take(&m, kvq_workspace_bytes() + 2 * n * s->k_dim * sizeof(float));
    if (!ok)
        return false;
    float *values = (float *)(void *)((char *)m.data + kvq_workspace_bytes());
    for (uint32_t h = 0; ok && h < s->kv_heads; h++) {
        bench_cache_rows(c->like, h, false, values, values + n * s->k_dim, m.data);
        for (uint32_t side = 0; ok && side < 2; side++)
            ok = c->p->ggml_quantize_chunk(c->kind->type, values + side * n * s->k_dim,
                                           c->rows[side] + h * bytes, 0, (int64_t)n, s->k_dim,
                                           NULL) == bytes;
    }
    bench_memory_give(&m);
    return ok || complain(c, "the library does not convert to this type");
}

// Copies `tokens` rows of a head, the first of them token `first`, to where the layout has them.
static void place_rows(const struct peer_cache *c, uint8_t *side, uint32_t head, uint64_t first,
                       uint32_t tokens, const uint8_t *rows)
{
    uint64_t heads = c->like->shape.kv_heads;
    if (c->kind->layout == PEER_HEADS) {
        memcpy(side + (head * c->like->tokens + first) * c->row_bytes, rows, tokens * c->row_bytes);
        return;
    }
    for (uint32_t t = 0; t < tokens; t++)
        memcpy(side + ((first + t) * heads + head) * c->row_bytes, rows + t * c->row_bytes,
               c->row_bytes);
}

static void fill_side(const struct peer_cache *c, uint32_t layer, uint32_t side)
{
    uint8_t *to = c->data + (2 * (size_t)layer + side) * c->side_bytes;
    size_t block = KVQ_BLOCK_TOKENS * c->row_bytes;
    for (uint32_t page = 0; page < c->like->n_pages; page++)
        for (uint32_t h = 0; h < c->like->shape.kv_heads; h++)
            place_rows(
                c, to, h, (uint64_t)page * KVQ_BLOCK_TOKENS, bench_page_tokens(c->like, page),
                c->rows[side] + ((size_t)h * BENCH_SOURCES + bench_source_of(layer, page)) * block);
}

// ---- The graph ----

static struct ggml_context *make_context(const struct peer *p, size_t tensors)
{
    return p->ggml_init((struct ggml_init_params){
        .mem_size = tensors * p->ggml_tensor_overhead() +
                    p->ggml_graph_overhead_custom(tensors, false) + CONTEXT_SLACK,
        .no_alloc = true});
}

// A tensor over memory of ours.
static struct ggml_tensor *place_tensor(const struct peer_cache *c, struct ggml_context *ctx,
                                        int type, const int64_t n[3], uint8_t *data)
{
    struct ggml_tensor *t = c->p->ggml_new_tensor_4d(ctx, type, n[0], n[1], n[2], 1);
    if (t)
        c->p->ggml_backend_tensor_alloc(c->ours, t, data);
    return t;
}

// K or V of a layer as ggml wants it, [head_dim, tokens, kv_heads], however it lies in memory.
static struct ggml_tensor *make_side(const struct peer_cache *c, uint32_t layer, uint32_t side)
{
    const struct kvq_shape *s = &c->like->shape;
    int64_t tokens = (int64_t)c->like->tokens;
    uint8_t *data = c->data + (2 * (size_t)layer + side) * c->side_bytes;
    if (c->kind->layout == PEER_HEADS)
        return place_tensor(c, c->ctx, c->kind->type, (int64_t[]){s->k_dim, tokens, s->kv_heads},
                            data);
    struct ggml_tensor *t =
        place_tensor(c, c->ctx, c->kind->type, (int64_t[]){s->k_dim, s->kv_heads, tokens}, data);
    return t ? c->p->ggml_permute(c->ctx, t, 0, 2, 1, 3) : NULL;
}

static bool add_layer(struct peer_cache *c, uint32_t layer, struct ggml_tensor *mask)
{
    const struct peer *p = c->p;
    const struct kvq_shape *s = &c->like->shape;
    struct ggml_tensor *k = make_side(c, layer, 0), *v = make_side(c, layer, 1);
    c->q[layer] = p->ggml_new_tensor_4d(c->ctx, GGML_F32, s->k_dim, 1, s->q_heads, 1);
    if (!k || !v || !mask || !c->q[layer])
        return complain(c, "the library makes no tensors");
    c->out[layer] = p->ggml_flash_attn_ext(c->ctx, c->q[layer], k, v, mask, s->scale, 0, 0);
    if (!c->out[layer])
        return complain(c, "ggml_flash_attn_ext fails");
    p->ggml_build_forward_expand(c->graph, c->out[layer]);
    if (!p->ggml_backend_supports_op(p->backend, c->out[layer]))
        return complain(c, "the library has no flash attention over this type on the CPU");
    return true;
}

// The queries of a layer. Ours has fewer layers than a smaller type needs, so they come again.
static const float *queries_of(const struct peer_cache *c, uint32_t layer)
{
    const struct kvq_shape *s = &c->like->shape;
    return c->like->queries + (size_t)(layer % c->like->layers) * s->q_heads * s->k_dim;
}

static bool make_graph(struct peer_cache *c)
{
    const struct peer *p = c->p;
    const struct kvq_shape *s = &c->like->shape;
    size_t tensors = (size_t)TENSORS_A_LAYER * c->layers + 1;
    c->ours = p->ggml_backend_cpu_buffer_from_ptr(c->memory.data, c->memory.bytes);
    c->ctx = make_context(p, tensors);
    c->graph = c->ctx ? p->ggml_new_graph_custom(c->ctx, tensors, false) : NULL;
    if (!c->ours || !c->graph)
        return complain(c, "the library makes no graph");
    struct ggml_tensor *mask = place_tensor(
        c, c->ctx, GGML_F16, (int64_t[]){(int64_t)c->like->tokens, GGML_MASK_ROWS, 1}, c->mask);
    for (uint32_t i = 0; i < c->layers; i++)
        if (!add_layer(c, i, mask))
            return false;
    c->theirs = p->ggml_backend_alloc_ctx_tensors(c->ctx, p->backend);
    if (!c->theirs)
        return complain(c, "the library has no memory for queries and outputs");
    for (uint32_t i = 0; i < c->layers; i++)
        p->ggml_backend_tensor_set(c->q[i], queries_of(c, i), 0,
                                   (size_t)s->q_heads * s->k_dim * sizeof(float));
    return true;
}

static bool make_parts(struct peer_cache *c)
{
    if (!take_memory(c) || !convert_rows(c))
        return false;
    for (uint32_t i = 0; i < c->layers; i++) {
        fill_side(c, i, 0);
        fill_side(c, i, 1);
    }
    c->q = calloc(c->layers, sizeof(struct ggml_tensor *));
    c->out = calloc(c->layers, sizeof(struct ggml_tensor *));
    return c->q && c->out && make_graph(c);
}

bool peer_cache_make(struct peer_cache *c, struct peer *p, const struct peer_kind *kind,
                     const struct bench_cache *like)
{
    *c = (struct peer_cache){.p = p, .kind = kind, .like = like};
    peer_enter(p);
    bool ok = make_parts(c);
    peer_leave(p);
    if (!ok)
        peer_cache_free(c);
    return ok;
}

void peer_cache_free(struct peer_cache *c)
{
    if (c->theirs)
        c->p->ggml_backend_buffer_free(c->theirs);
    if (c->ctx)
        c->p->ggml_free(c->ctx);
    if (c->ours)
        c->p->ggml_backend_buffer_free(c->ours);
    bench_memory_give(&c->memory);
    free(c->q);
    free(c->out);
    *c = (struct peer_cache){.p = NULL};
}

double peer_cache_walk(struct peer_cache *c, unsigned threads)
{
    peer_enter(c->p);
    c->p->ggml_backend_cpu_set_n_threads(c->p->backend, (int)threads);
    double start = bench_seconds();
    int status = c->p->ggml_backend_graph_compute(c->p->backend, c->graph);
    double time = (bench_seconds() - start) / c->layers;
    peer_leave(c->p);
    if (status == 0)
        return time;
    fprintf(stderr, "kvq-bench: %s %s: ggml_backend_graph_compute returns %d\n", c->kind->name,
            c->kind->layout_name, status);
    return NAN;
}

// ---- What it holds ----

// A small graph of its own: all rows of a head's random blocks, one after the other, as fp32.
static bool read_rows(const struct peer_cache *c, uint32_t head, uint32_t side, float *values)
{
    const struct peer *p = c->p;
    int64_t dim = c->like->shape.k_dim, n = (int64_t)rows_of_a_head();
    int32_t index[BENCH_SOURCES * KVQ_BLOCK_TOKENS];
    for (int32_t i = 0; i < n; i++)
        index[i] = i;
    struct ggml_context *ctx = make_context(p, TENSORS_A_LAYER);
    if (!ctx)
        return false;
    struct ggml_cgraph *graph = p->ggml_new_graph_custom(ctx, TENSORS_A_LAYER, false);
    struct ggml_tensor *from = place_tensor(c, ctx, c->kind->type, (int64_t[]){dim, n, 1},
                                            c->rows[side] + head * (size_t)n * c->row_bytes);
    struct ggml_tensor *which = p->ggml_new_tensor_4d(ctx, GGML_I32, n, 1, 1, 1);
    struct ggml_tensor *read = p->ggml_get_rows(ctx, from, which);
    p->ggml_build_forward_expand(graph, read);
    struct ggml_backend_buffer *buffer = p->ggml_backend_alloc_ctx_tensors(ctx, p->backend);
    bool ok = buffer;
    if (ok) {
        p->ggml_backend_tensor_set(which, index, 0, sizeof index);
        ok = p->ggml_backend_graph_compute(p->backend, graph) == 0;
        p->ggml_backend_tensor_get(read, values, 0, (size_t)(n * dim) * sizeof *values);
        p->ggml_backend_buffer_free(buffer);
    }
    p->ggml_free(ctx);
    return ok;
}

// The error of one KV head; `values` is for K and V of a head's random blocks and for the outputs.
static double error_of(const struct peer_cache *c, uint32_t layer, uint32_t head, float *values)
{
    const struct kvq_shape *s = &c->like->shape;
    size_t n = rows_of_a_head() * s->k_dim;
    float *v = values + n, *out = v + n;
    if (!read_rows(c, head, 0, values) || !read_rows(c, head, 1, v))
        return NAN;
    c->p->ggml_backend_tensor_get(c->out[layer], out, 0,
                                  (size_t)s->q_heads * s->k_dim * sizeof *out);
    return bench_exact_error(&(struct bench_exact){.c = c->like,
                                                   .layer = layer,
                                                   .head = head,
                                                   .k = {values},
                                                   .v = {v},
                                                   .q = queries_of(c, layer),
                                                   .out = out});
}

double peer_cache_error(struct peer_cache *c)
{
    const struct kvq_shape *s = &c->like->shape;
    struct bench_memory m;
    size_t n = 2 * rows_of_a_head() * s->k_dim + (size_t)s->q_heads * s->k_dim;
    if (!bench_memory_take(&m, n * sizeof(float)))
        return NAN;
    peer_enter(c->p);
    double first = error_of(c, 0, 0, m.data);
    double last = error_of(c, c->layers - 1, s->kv_heads - 1u, m.data);
    peer_leave(c->p);
    bench_memory_give(&m);
    return first > last || isnan(first) ? first : last;
}
