// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench pack: storing 128 tokens of one layer as they come, and packing them, beside a plain
// copy of the same tokens over the same memory.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/cache.h"

enum {
    MIN_BLOCKS = 8,
    MAX_BLOCKS = 1024,
    PIECE = 8,                       // blocks that are timed at a time
    PIECES = MAX_BLOCKS / PIECE + 1, // of a round, at most
    FAR = 1 << 20,                   // position of the blocks, behind the sinks
};

struct run {
    const struct bench_options *o;
    struct bench_output *out;
    const struct kvq_kernels *k;
    struct kvq_pool *pool;
    unsigned threads;
    uint32_t blocks; // different ones in a round: their tokens are twice the last level cache
    uint32_t first;  // block of the piece that is being timed
    struct kvq_pack_job *jobs; // [blocks]
    struct kvq_shape shape;
    struct bench_memory tokens, raw, packed; // fp16 as handed over; blocks
    size_t raw_bytes, packed_bytes;          // of a block
    struct bench_books books;                // of the format
    struct bench_memory extras, learned;     // of the format, for each block its own; as learned
    size_t extras_bytes;
};

static size_t tokens_bytes(const struct run *r)
{
    return (size_t)KVQ_BLOCK_TOKENS * r->shape.kv_heads * r->shape.k_dim * sizeof(uint16_t);
}

// The tokens of one head, a share of what the block's record is made of.
static void copy_item(void *ctx, uint32_t item, void *workspace)
{
    const struct run *r = ctx;
    size_t share = 2 * tokens_bytes(r) / r->shape.kv_heads;
    (void)workspace;
    item += r->first * r->shape.kv_heads;
    memcpy((uint8_t *)r->raw.data + item * share, (const uint8_t *)r->tokens.data + item * share,
           share);
}

static void store_item(void *ctx, uint32_t item, void *workspace)
{
    const struct run *r = ctx;
    const struct kvq_shape *s = &r->shape;
    uint32_t block = r->first + item / s->kv_heads, head = item % s->kv_heads;
    int64_t row = (int64_t)sizeof(uint16_t) * s->k_dim;
    const uint8_t *from = (const uint8_t *)r->tokens.data + 2 * block * tokens_bytes(r);
    struct kvq_view k = {from, row * s->kv_heads, row, KVQ_F16}, v = k;
    struct kvq_store_counts counts = {0};
    (void)workspace;
    v.data = from + tokens_bytes(r);
    kvq_store(r->k, s, &k, &v, head, 0, KVQ_BLOCK_TOKENS,
              (uint8_t *)r->raw.data + block * r->raw_bytes, &counts);
}

// Blocks of the piece that starts at r->first.
static uint32_t in_piece(const struct run *r)
{
    return r->blocks - r->first < PIECE ? r->blocks - r->first : PIECE;
}

// Seconds for one block of what is done head by head: of a round's pieces the median, so that what
// other programs do in the meantime does not count.
static double time_items(struct run *r, void (*item)(void *, uint32_t, void *))
{
    double piece[PIECES];
    uint32_t n = 0;
    for (r->first = 0; r->first < r->blocks; r->first += PIECE) {
        double start = bench_seconds();
        kvq_pool_run(r->pool, item, r, in_piece(r) * r->shape.kv_heads);
        piece[n++] = (bench_seconds() - start) / in_piece(r);
    }
    return bench_median(piece, n);
}

static uint8_t *extras_of(const struct run *r, uint32_t block)
{
    return r->extras_bytes ? (uint8_t *)r->extras.data + block * r->extras_bytes : NULL;
}

// What the format learns, for each block from the one before it, as from the beginning of a prompt:
// tokens of the block itself can still become outliers. False: no memory, complained.
static bool learn(struct run *r, const struct kvq_format *f)
{
    r->extras_bytes = kvq_extras_bytes(f, &r->shape);
    if (r->extras_bytes == 0)
        return true;
    void *workspace = aligned_alloc(KVQ_RECORD_ALIGN, kvq_workspace_bytes());
    bool ok = workspace && bench_memory_take(&r->extras, r->blocks * r->extras_bytes) &&
              bench_memory_take(&r->learned, r->blocks * r->extras_bytes);
    for (uint32_t i = 0; ok && i < r->blocks; i++) {
        uint32_t other = (i + r->blocks - 1) % r->blocks;
        struct kvq_page page = {.raw = (const uint8_t *)r->raw.data + other * r->raw_bytes,
                                .tokens = KVQ_BLOCK_TOKENS};
        kvq_extras_init(f, &r->shape, extras_of(r, i));
        for (uint32_t head = 0; head < r->shape.kv_heads; head++)
            kvq_learn(r->k, f, &r->shape, &page, KVQ_BLOCK_TOKENS, head, extras_of(r, i),
                      workspace);
    }
    if (ok)
        memcpy(r->learned.data, r->extras.data, r->blocks * r->extras_bytes);
    free(workspace);
    if (!ok)
        fprintf(stderr, "kvq-bench: no memory for what %s learns\n", f->name);
    return ok;
}

// The same of packing the units that start at token `first`.
static double time_units(struct run *r, const struct kvq_format *f, uint32_t first)
{
    struct kvq_pack_job *jobs = r->jobs;
    double piece[PIECES];
    uint32_t n = 0;
    for (r->first = 0; r->first < r->blocks; r->first += PIECE) {
        double start = bench_seconds();
        for (uint32_t i = r->first; i < r->first + in_piece(r); i++)
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
        kvq_pool_pack(r->pool, r->k, jobs + r->first, in_piece(r));
        piece[n++] = (bench_seconds() - start) / in_piece(r);
    }
    return bench_median(piece, n);
}

static double time_pack(struct run *r, const struct kvq_format *f)
{
    double sum = 0;
    if (r->extras_bytes) // outliers of the round before would be in the way of this one's
        memcpy(r->extras.data, r->learned.data, r->blocks * r->extras_bytes);
    for (uint32_t first = 0; first < KVQ_BLOCK_TOKENS; first += f->unit_tokens)
        sum += time_units(r, f, first);
    return sum;
}

struct times {
    double copy[BENCH_MAX_REPS], store[BENCH_MAX_REPS], pack[BENCH_MAX_REPS];
};

// How many tokens of the last round's blocks have become outliers.
static double entered(const struct run *r, const struct kvq_format *f)
{
    uint64_t n = 0;
    for (uint32_t i = 0; f->outliers && i < r->blocks; i++) {
        kvq_outliers_publish(f, &r->shape, extras_of(r, i));
        for (uint32_t h = 0; h < r->shape.kv_heads; h++)
            n += kvq_outliers_published(f, &r->shape, extras_of(r, i), h) - f->outliers;
    }
    return (double)n / r->blocks / r->shape.kv_heads;
}

static void print_row(const struct run *r, const struct kvq_format *f, struct times *t)
{
    double copy = bench_median(t->copy, r->o->reps) * 1e6;
    double store = bench_median(t->store, r->o->reps) * 1e6;
    double pack = bench_median(t->pack, r->o->reps) * 1e6;
    double values = 2.0 * KVQ_BLOCK_TOKENS * r->shape.kv_heads * r->shape.k_dim;
    bench_note(r->out, "%-16s %-6s %7u %8.1f %8.1f %8.1f %10.2f %9.2f %10.0f", f->name,
               kvq_kernels_isa(r->k), r->threads, copy, store, pack, store / copy, pack / copy,
               pack > 0 ? values / pack : 0);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "format", f->name);
    cJSON_AddStringToObject(row, "isa", kvq_kernels_isa(r->k));
    cJSON_AddNumberToObject(row, "threads", r->threads);
    cJSON_AddNumberToObject(row, "tokens", KVQ_BLOCK_TOKENS);
    cJSON_AddNumberToObject(row, "kv_heads", r->shape.kv_heads);
    cJSON_AddNumberToObject(row, "head_dim", r->shape.k_dim);
    cJSON_AddNumberToObject(row, "copy_us", copy);
    cJSON_AddNumberToObject(row, "store_us", store);
    cJSON_AddNumberToObject(row, "pack_us", pack);
    cJSON_AddNumberToObject(row, "outliers", entered(r, f)); // of a block and head
    cJSON_AddItemToArray(r->out->rows, row);
}

// False: no memory, complained.
static bool bench_format(struct run *r, const struct kvq_format *f)
{
    struct times t = {0};
    r->shape.v_rotation = (uint8_t)kvq_v_rotation_by_paper(f); // as sessions have it
    struct kvq_layout l = kvq_layout_of(f, &r->shape);
    r->packed_bytes = kvq_block_bytes(&l, &r->shape);
    time_items(r, store_item); // so that there is something to learn from
    if (!bench_books_make(&r->books, f, &r->shape, 1) || !learn(r, f))
        return false;
    for (uint32_t i = 0; i < r->o->reps; i++) {
        t.copy[i] = time_items(r, copy_item);
        t.store[i] = time_items(r, store_item);
        t.pack[i] = kvq_is_raw(f) ? 0 : time_pack(r, f);
    }
    bench_books_free(&r->books);
    print_row(r, f, &t);
    bench_memory_give(&r->extras);
    bench_memory_give(&r->learned);
    return true;
}

// fp16 tokens, as an engine hands them over, rounded by the function that is measured.
static bool fill_tokens(struct run *r)
{
    struct bench_memory numbers = {0};
    struct kvq_shape one = r->shape;
    struct kvq_store_counts counts = {0};
    size_t n = 2 * tokens_bytes(r) / sizeof(uint16_t); // of a block
    size_t half = (size_t)KVQ_BLOCK_TOKENS * r->shape.k_dim;
    one.kv_heads = one.q_heads = 1;
    struct kvq_raw_layout l = kvq_raw_layout_of(&one);
    if (!bench_memory_take(&numbers, n * sizeof(float)))
        return false;
    for (uint32_t block = 0; block < r->blocks; block++) {
        bench_normal(1 + block, numbers.data, n);
        for (size_t i = 0; i < r->shape.kv_heads; i++) {
            struct kvq_view k = {(const float *)numbers.data + 2 * i * half,
                                 (int64_t)sizeof(float) * r->shape.k_dim, 0, KVQ_F32},
                            v = k;
            v.data = (const float *)k.data + half;
            kvq_store(r->k, &one, &k, &v, 0, 0, KVQ_BLOCK_TOKENS,
                      (uint8_t *)r->tokens.data + 2 * block * tokens_bytes(r) +
                          i * kvq_raw_bytes(&l, KVQ_BLOCK_TOKENS),
                      &counts);
        }
    }
    bench_memory_give(&numbers);
    return true;
}

static bool take_memory(struct run *r)
{
    struct kvq_raw_layout l = kvq_raw_layout_of(&r->shape);
    size_t blocks = 2 * bench_last_level_cache() / (2 * tokens_bytes(r));
    r->blocks = blocks < MIN_BLOCKS   ? MIN_BLOCKS
                : blocks > MAX_BLOCKS ? MAX_BLOCKS
                                      : (uint32_t)blocks;
    r->raw_bytes = kvq_raw_bytes(&l, KVQ_BLOCK_TOKENS); // no packed block is larger
    r->jobs = calloc(r->blocks, sizeof *r->jobs);
    return r->jobs && bench_memory_take(&r->tokens, r->blocks * 2 * tokens_bytes(r)) &&
           bench_memory_take(&r->raw, r->blocks * r->raw_bytes) &&
           bench_memory_take(&r->packed, r->blocks * r->raw_bytes) && fill_tokens(r);
}

int bench_pack(const struct bench_options *o)
{
    struct bench_output out;
    struct run r = {.o = o, .out = &out, .k = kvq_kernels_get(o->isa)};
    r.shape = bench_shape(o, KVQ_F16);
    int status = take_memory(&r) ? 0 : 1;
    bench_output_open(&out, o->json);
    bench_note(
        &out,
        "%u KV heads, head_dim %u, fp16; us for %d tokens, median of %u rounds by turns over "
        "%u such blocks",
        o->kv_heads, o->head_dim, KVQ_BLOCK_TOKENS, o->reps, r.blocks);
    bench_note(&out, "%-16s %-6s %7s %8s %8s %8s %10s %9s %10s", "format", "isa", "threads", "copy",
               "store", "pack", "store/copy", "pack/copy", "Mvalues/s");
    for (uint32_t i = 0; !status && i < o->threads.n; i++) {
        r.threads = (unsigned)o->threads.value[i];
        int error = kvq_pool_open(&r.pool, r.threads, true);
        if (error) {
            fprintf(stderr, "kvq-bench: %u threads cannot be started (error %d)\n", r.threads,
                    -error);
            status = 1;
        }
        for (uint32_t j = 0; !error && j < o->n_formats; j++)
            if (!bench_format(&r, o->format[j]))
                status = 1;
        kvq_pool_close(&r.pool);
    }
    free(r.jobs);
    bench_memory_give(&r.tokens);
    bench_memory_give(&r.raw);
    bench_memory_give(&r.packed);
    bench_output_close(&out);
    return status;
}
