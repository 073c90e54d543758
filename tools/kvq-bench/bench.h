// SPDX-License-Identifier: Apache-2.0
//
// What the parts of kvq-bench share: options, memory, caches to walk, output.
#ifndef KVQ_TOOLS_BENCH_H
#define KVQ_TOOLS_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#include "kernels/kernels.h"
#include "kernels/pool.h"

enum {
    BENCH_MAX_LIST = 16,  // values of one option
    BENCH_MAX_REPS = 101, // timed walks of one row
};

// ---- Options (options.c) ----

struct bench_list {
    uint64_t value[BENCH_MAX_LIST];
    uint32_t n;
};

struct bench_options {
    const char *command;
    const struct kvq_format *format[BENCH_MAX_LIST];
    uint32_t n_formats;
    struct bench_list tokens, threads, sessions;
    uint32_t q_heads, kv_heads, head_dim;
    bool exact, fast;
    int isa; // KVQ_ISA_*, the highest to use
    uint32_t reps;
    bool json;
    const char *kvqd; // program to start for `ring`; NULL: the one beside this program
};

// The shape the options ask for, with the usual softmax scale.
struct kvq_shape bench_shape(const struct bench_options *o, uint8_t dtype);

// Reads the command line. 0: go on; 1: help or version was printed, end well; -1: complained.
int bench_options_read(struct bench_options *o, int argc, char **argv);

// ---- Memory and the floor (memory.c) ----

struct bench_memory {
    void *data;
    size_t bytes;
};

// Zeroed, 2 MiB aligned, in huge pages where the system has them. False: no memory, complained.
bool bench_memory_take(struct bench_memory *m, size_t bytes);
void bench_memory_give(struct bench_memory *m);

// How much of this process's memory is in huge pages, 0 to 1.
double bench_huge_share(void);

size_t bench_last_level_cache(void); // bytes; 32 MiB where the system does not say

// The best of 5 reads of 1 GiB with the widest loads on the pool's threads, in bytes a second.
// Not positive: no memory, complained.
double bench_floor(struct kvq_pool *pool);

double bench_seconds(void); // monotonic
long bench_cpus(void);      // that this process may use

// ---- Caches (cache.c) ----

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

// ---- Output (table.c) ----

// Rows as a table for people, as they come, or at the end as one JSON array.
struct bench_output {
    bool json;
    cJSON *rows;
};

void bench_output_open(struct bench_output *out, bool json);
void bench_output_close(struct bench_output *out); // prints the array

// A line for people; nothing with --json.
void bench_note(const struct bench_output *out, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

double bench_median(double *x, uint32_t n); // sorts x

// ---- Commands: each returns the exit status ----

int bench_attend(const struct bench_options *o);
int bench_pack(const struct bench_options *o);

#endif
