// SPDX-License-Identifier: Apache-2.0
//
// Caches for the benchmarks of the kernels to walk.
#ifndef KVQ_TOOLS_BENCH_CACHE_H
#define KVQ_TOOLS_BENCH_CACHE_H

#include "kernels/kernels.h"
#include "kernels/pool.h"
#include "tools/kvq-bench/bench.h"

// The shape the options ask for, with the usual softmax scale.
struct kvq_shape bench_shape(const struct bench_options *o, uint8_t dtype);

// Codebooks of some layers, each with tables of its own (books.c).
struct bench_books {
    struct kvq_book *book; // [layers]; NULL for formats that need none
    struct bench_memory memory;
};

// False: no memory, complained; nothing is held then.
bool bench_books_make(struct bench_books *b, const struct kvq_format *f, const struct kvq_shape *s,
                      uint32_t layers);
const struct kvq_book *bench_book_of(const struct bench_books *b, uint32_t layer); // or NULL
void bench_books_free(struct bench_books *b);

// The cache of one KV layer after the other, bigger together than the last level cache. Its
// blocks are copies of a few random ones; all formats hold the same tokens in the same order.
struct bench_cache {
    const struct kvq_format *format;
    struct kvq_shape shape;
    uint64_t tokens;
    uint32_t layers, n_pages;
    size_t layer_bytes;     // what one attention reads
    struct kvq_page *pages; // [layers][n_pages]
    struct bench_memory memory, sources, packed;
    struct bench_books books;
    float *queries, *out;       // [layers][q_heads][head_dim]
    struct kvq_attend *attends; // one a layer, exact path
};

// Makes a cache of `tokens` tokens. False: no memory, complained; nothing is held then.
bool bench_cache_make(struct bench_cache *c, const struct bench_options *o,
                      const struct kvq_format *format, uint64_t tokens);
void bench_cache_free(struct bench_cache *c);

// Relative error (2-norm) of the first KV head's outputs of the first layer, as they stand in
// c->out, against double precision over the same cache.
double bench_cache_error(const struct bench_cache *c);

// n numbers of N(0, 1), the same for the same seed.
void bench_normal(uint64_t seed, float *x, size_t n);

#endif
