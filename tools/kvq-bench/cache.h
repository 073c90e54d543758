// SPDX-License-Identifier: Apache-2.0
//
// Caches for the benchmarks of the kernels to walk.
#ifndef KVQ_TOOLS_BENCH_CACHE_H
#define KVQ_TOOLS_BENCH_CACHE_H

#include "kernels/kernels.h"
#include "kernels/layout.h"
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
    struct bench_memory extras; // [layers + 1] records of extras_bytes, the last one the sources'
    size_t extras_bytes;        // 0 if the format has none
    uint32_t walk_mib;          // as in struct bench_options
    uint32_t q_tokens;          // of a call
    float *queries, *out;       // [layers][q_tokens][q_heads][head_dim]
    struct kvq_attend *attends; // one a layer, exact path
};

// Makes a cache of `tokens` tokens. False: no memory, complained; nothing is held then.
bool bench_cache_make(struct bench_cache *c, const struct bench_options *o,
                      const struct kvq_format *format, uint64_t tokens);
void bench_cache_free(struct bench_cache *c);

// Layers of so many bytes that together have walk_mib, or if that is 0 are some times bigger than
// the last level cache.
uint32_t bench_walk_layers(uint32_t walk_mib, size_t layer_bytes);

// Which of the random blocks stands at a page of a layer; the same for all formats.
enum { BENCH_SOURCES = 16 };
uint32_t bench_source_of(uint64_t layer, uint64_t page);

// Tokens of the page, and whether it is packed: whole blocks are, if the format packs at all.
uint32_t bench_page_tokens(const struct bench_cache *c, uint32_t page);
bool bench_page_packed(const struct bench_cache *c, uint32_t page);

// Outliers of a layer's KV head, of which formats that have some hold as many as there is room for,
// all among the packed tokens. NULL for other formats.
const struct kvq_outliers *bench_outliers_of(const struct bench_cache *c, uint32_t layer,
                                             uint32_t head);

// The rows of one KV head of all random blocks, as attention sees them: fp32
// [BENCH_SOURCES][KVQ_BLOCK_TOKENS][head_dim]. Read by the C functions, which are held against an
// oracle of their own in the tests. The workspace is kvq_workspace_bytes() long.
void bench_cache_rows(const struct bench_cache *c, uint32_t head, bool packed, float *k, float *v,
                      void *workspace);

// ---- Double precision (exact.c) ----

// Outputs that somebody computed over the tokens of a layer of a cache. The rows are as
// bench_cache_rows gives them, of raw blocks and of packed ones; they may be those of another
// library that holds the same tokens in a format of its own.
struct bench_exact {
    const struct bench_cache *c;
    uint32_t layer, head;
    const float *k[2], *v[2];
    const float *q, *out; // [q_heads][head_dim]
};

// Relative error (2-norm) of the outputs of all query heads of the KV head. NAN: no memory, or
// the outputs are not finite.
double bench_exact_error(const struct bench_exact *e);

// The same of the first KV head's outputs of the first layer, as they stand in c->out.
double bench_cache_error(const struct bench_cache *c);

// n numbers of N(0, 1), the same for the same seed.
void bench_normal(uint64_t seed, float *x, size_t n);

#endif
