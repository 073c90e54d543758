// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench pack: storing 128 tokens of one layer as they come, and packing them.
#include <stdio.h>
#include <stdlib.h>

#include "tools/kvq-bench/cache.h"

enum {
    BLOCKS = 8,    // different ones in a round, so that no cache holds the answers
    FAR = 1 << 20, // their position, behind the sinks
};

struct run {
    const struct bench_options *o;
    struct bench_output *out;
    const struct kvq_kernels *k;
    struct kvq_pool *pool;
    unsigned threads;
    struct kvq_shape shape;
    struct bench_memory tokens, raw, packed; // fp16 as handed over; blocks
    size_t raw_bytes, packed_bytes;          // of a block
    struct bench_books books;                // of the format
    struct bench_memory extras;              // of the format, for each block its own
    size_t extras_bytes;
};

static size_t tokens_bytes(const struct run *r)
{
    return (size_t)KVQ_BLOCK_TOKENS * r->shape.kv_heads * r->shape.k_dim * sizeof(uint16_t);
}

static void store_item(void *ctx, uint32_t item, void *workspace)
{
    const struct run *r = ctx;
    const struct kvq_shape *s = &r->shape;
    uint32_t block = item / s->kv_heads, head = item % s->kv_heads;
    int64_t row = (int64_t)sizeof(uint16_t) * s->k_dim;
    const uint8_t *from = (const uint8_t *)r->tokens.data + 2 * block * tokens_bytes(r);
    struct kvq_view k = {from, row * s->kv_heads, row, KVQ_F16}, v = k;
    struct kvq_layout l = kvq_layout_raw(s);
    struct kvq_store_counts counts = {0};
    (void)workspace;
    v.data = from + tokens_bytes(r);
    uint8_t *record = (uint8_t *)r->raw.data + block * r->raw_bytes + head * l.record_bytes;
    kvq_store(r->k, s, &k, &v, head, 0, KVQ_BLOCK_TOKENS, record, &counts);
}

static double time_store(struct run *r)
{
    double start = bench_seconds();
    kvq_pool_run(r->pool, store_item, r, BLOCKS * r->shape.kv_heads);
    return (bench_seconds() - start) / BLOCKS;
}

static uint8_t *extras_of(const struct run *r, uint32_t block)
{
    return r->extras_bytes ? (uint8_t *)r->extras.data + block * r->extras_bytes : NULL;
}

// What the format learns, of each block from the block itself. False: no memory, complained.
static bool learn(struct run *r, const struct kvq_format *f)
{
    r->extras_bytes = kvq_extras_bytes(f, &r->shape);
    if (r->extras_bytes == 0)
        return true;
    void *workspace = aligned_alloc(KVQ_RECORD_ALIGN, kvq_workspace_bytes());
    bool ok = workspace && bench_memory_take(&r->extras, BLOCKS * r->extras_bytes);
    for (uint32_t i = 0; ok && i < BLOCKS; i++) {
        struct kvq_page page = {.raw = (const uint8_t *)r->raw.data + i * r->raw_bytes,
                                .tokens = KVQ_BLOCK_TOKENS};
        kvq_extras_init(f, &r->shape, extras_of(r, i));
        for (uint32_t head = 0; head < r->shape.kv_heads; head++)
            kvq_learn(r->k, f, &r->shape, &page, KVQ_BLOCK_TOKENS, head, extras_of(r, i),
                      workspace);
    }
    free(workspace);
    if (!ok)
        fprintf(stderr, "kvq-bench: no memory for what %s learns\n", f->name);
    return ok;
}

static double time_pack(const struct run *r, const struct kvq_format *f)
{
    struct kvq_pack_job jobs[BLOCKS];
    double start = bench_seconds();
    for (uint32_t first = 0; first < KVQ_BLOCK_TOKENS; first += f->unit_tokens) {
        for (uint32_t i = 0; i < BLOCKS; i++)
            jobs[i] = (struct kvq_pack_job){
                .format = f,
                .shape = &r->shape,
                .unit = {.raw_block = (const uint8_t *)r->raw.data + i * r->raw_bytes,
                         .packed_block = (uint8_t *)r->packed.data + i * r->packed_bytes,
                         .first = first,
                         .block_start = FAR,
                         .extras = extras_of(r, i),
                         .book = bench_book_of(&r->books, 0)},
            };
        kvq_pool_pack(r->pool, r->k, jobs, BLOCKS);
    }
    return (bench_seconds() - start) / BLOCKS;
}

// False: no memory, complained.
static bool bench_format(struct run *r, const struct kvq_format *f)
{
    double store[BENCH_MAX_REPS], pack[BENCH_MAX_REPS] = {0};
    bool packs = !kvq_is_raw(f);
    struct kvq_layout l = kvq_layout_of(f, &r->shape);
    r->packed_bytes = kvq_block_bytes(&l, &r->shape);
    time_store(r); // so that there is something to learn from
    if (!bench_books_make(&r->books, f, &r->shape, 1) || !learn(r, f))
        return false;
    for (uint32_t i = 0; i < r->o->reps; i++) {
        store[i] = time_store(r);
        pack[i] = packs ? time_pack(r, f) : 0;
    }
    bench_books_free(&r->books);
    bench_memory_give(&r->extras);
    double store_us = bench_median(store, r->o->reps) * 1e6;
    double pack_us = bench_median(pack, r->o->reps) * 1e6;
    double values = 2.0 * KVQ_BLOCK_TOKENS * r->shape.kv_heads * r->shape.k_dim;
    bench_note(r->out, "%-10s %-6s %7u %9.1f %9.1f %12.0f", f->name, kvq_kernels_isa(r->k),
               r->threads, store_us, pack_us, packs ? values / pack_us : 0);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "format", f->name);
    cJSON_AddStringToObject(row, "isa", kvq_kernels_isa(r->k));
    cJSON_AddNumberToObject(row, "threads", r->threads);
    cJSON_AddNumberToObject(row, "tokens", KVQ_BLOCK_TOKENS);
    cJSON_AddNumberToObject(row, "kv_heads", r->shape.kv_heads);
    cJSON_AddNumberToObject(row, "head_dim", r->shape.k_dim);
    cJSON_AddNumberToObject(row, "store_us", store_us);
    cJSON_AddNumberToObject(row, "pack_us", pack_us);
    cJSON_AddItemToArray(r->out->rows, row);
    return true;
}

static bool take_memory(struct run *r)
{
    struct kvq_layout l = kvq_layout_raw(&r->shape);
    r->raw_bytes = kvq_block_bytes(&l, &r->shape); // no packed block is larger
    size_t n = BLOCKS * 2 * tokens_bytes(r) / sizeof(uint16_t);
    struct bench_memory numbers = {0};
    bool ok = bench_memory_take(&r->tokens, BLOCKS * 2 * tokens_bytes(r)) &&
              bench_memory_take(&r->raw, BLOCKS * r->raw_bytes) &&
              bench_memory_take(&r->packed, BLOCKS * r->raw_bytes) &&
              bench_memory_take(&numbers, n * sizeof(float));
    if (ok) {
        // Rounded by the function that is measured: fp16 tokens, as an engine hands them over.
        struct kvq_view from = {numbers.data, (int64_t)sizeof(float) * r->shape.k_dim, 0, KVQ_F32};
        struct kvq_store_counts counts = {0};
        struct kvq_shape one = r->shape;
        one.kv_heads = one.q_heads = 1;
        bench_normal(1, numbers.data, n);
        for (size_t i = 0; i < n / r->shape.k_dim / (2 * KVQ_BLOCK_TOKENS); i++) {
            struct kvq_view k = from, v = from;
            k.data = (const float *)numbers.data + 2 * i * KVQ_BLOCK_TOKENS * r->shape.k_dim;
            v.data = (const float *)k.data + (size_t)KVQ_BLOCK_TOKENS * r->shape.k_dim;
            l = kvq_layout_raw(&one);
            kvq_store(r->k, &one, &k, &v, 0, 0, KVQ_BLOCK_TOKENS,
                      (uint8_t *)r->tokens.data + i * l.record_bytes, &counts);
        }
    }
    bench_memory_give(&numbers);
    return ok;
}

int bench_pack(const struct bench_options *o)
{
    struct bench_output out;
    struct run r = {.o = o, .out = &out, .k = kvq_kernels_get(o->isa)};
    r.shape = bench_shape(o, KVQ_F16);
    int status = take_memory(&r) ? 0 : 1;
    bench_output_open(&out, o->json);
    bench_note(&out, "%u KV heads, head_dim %u, %d tokens; median of %u rounds", o->kv_heads,
               o->head_dim, KVQ_BLOCK_TOKENS, o->reps);
    bench_note(&out, "%-10s %-6s %7s %9s %9s %12s", "format", "isa", "threads", "store us",
               "pack us", "Mvalues/s");
    for (uint32_t i = 0; !status && i < o->threads.n; i++) {
        r.threads = (unsigned)o->threads.value[i];
        int error = kvq_pool_open(&r.pool, r.threads, true);
        if (error) {
            fprintf(stderr, "kvq-bench: %u threads cannot be started (error %d)\n", r.threads,
                    -error);
            status = 1;
        }
        for (uint32_t j = 0; !error && j < o->n_formats; j++)
            if (o->format[j]->raw_dtype != KVQ_BF16 && !bench_format(&r, o->format[j]))
                status = 1;
        kvq_pool_close(&r.pool);
    }
    bench_memory_give(&r.tokens);
    bench_memory_give(&r.raw);
    bench_memory_give(&r.packed);
    bench_output_close(&out);
    return status;
}
