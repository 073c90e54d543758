// SPDX-License-Identifier: Apache-2.0
//
// Codebooks for the benchmarks of the kernels: centroids of N(0, 1), like the tokens. What time
// attention and packing take depends on which centroids are used how often, not on their values.
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/cache.h"

// Sub-vectors share a table where keys are smoothed and rotated before (VecInfer) and have one each
// where not (MILLION), as kvq-codebook makes them; heads share tables.
static size_t tables_of(const struct kvq_format *f, const struct kvq_side *side, uint32_t dim)
{
    if (side->codec != KVQ_CODEC_BOOK)
        return 0;
    return f->k_channel == KVQ_CHANNEL_BOOK ? 1 : dim / side->vector;
}

static size_t table_floats(const struct kvq_side *side)
{
    return (size_t)side->vector << side->bits;
}

bool bench_books_make(struct bench_books *b, const struct kvq_format *f, const struct kvq_shape *s,
                      uint32_t layers)
{
    size_t tables_k = tables_of(f, &f->k, s->k_dim), tables_v = tables_of(f, &f->v, s->v_dim);
    size_t factors = f->k_channel == KVQ_CHANNEL_BOOK ? (size_t)s->kv_heads * s->k_dim : 0;
    size_t k = tables_k * table_floats(&f->k), v = tables_v * table_floats(&f->v);
    size_t all = factors + k + v;
    *b = (struct bench_books){0};
    if (all == 0)
        return true;
    b->book = calloc(layers, sizeof *b->book);
    if (!b->book || !bench_memory_take(&b->memory, layers * all * sizeof(float))) {
        bench_books_free(b);
        return false;
    }
    float *first = b->memory.data;
    bench_normal(1000, first, all);
    for (size_t i = 0; i < factors; i++)
        first[i] = 1.0f;
    for (uint32_t i = 0; i < layers; i++) {
        float *own = first + i * all;
        if (i > 0)
            memcpy(own, first, all * sizeof *own);
        b->book[i] = (struct kvq_book){.smooth = factors ? own : NULL,
                                       .k = k ? own + factors : NULL,
                                       .v = v ? own + factors + k : NULL,
                                       .k_sub = tables_k > 1 ? table_floats(&f->k) : 0,
                                       .v_sub = tables_v > 1 ? table_floats(&f->v) : 0};
    }
    return true;
}

const struct kvq_book *bench_book_of(const struct bench_books *b, uint32_t layer)
{
    return b->book ? &b->book[layer] : NULL;
}

void bench_books_free(struct bench_books *b)
{
    bench_memory_give(&b->memory);
    free(b->book);
    *b = (struct bench_books){0};
}
