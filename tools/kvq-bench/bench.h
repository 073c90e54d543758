// SPDX-License-Identifier: Apache-2.0
//
// What the parts of kvq-bench share: options, memory, output. It knows neither the kernels nor the
// client library, since their names overlap; see cache.h and ring.c.
#ifndef KVQ_TOOLS_BENCH_H
#define KVQ_TOOLS_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

struct kvq_format;
struct kvq_pool;

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
    uint32_t queries; // query tokens of a call in `attend`
    bool exact, fast;
    int isa; // KVQ_ISA_*, the highest to use
    uint32_t reps;
    uint32_t walk_mib; // what a walk reads at least; 0: more than the last level cache
    uint32_t layers;   // at least so many in a cache; set by the command
    bool json;
    const char *peer; // ggml library to time beside us in `attend`; NULL: none
    uint32_t idle;    // clients that do nothing beside the one of `ring`
    const char *kvqd; // program to start for `ring`; NULL: the one beside this program
};

const char *bench_format_name(const struct bench_options *o, uint32_t i);
bool bench_format_is_fast(const struct bench_options *o, uint32_t i); // has a fast path, that is

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
int bench_shared(const struct bench_options *o);
int bench_ring(const struct bench_options *o);
int bench_step(const struct bench_options *o);
int hop_main(int argc, char **argv);     // has options of its own (hop.h)
int storage_main(int argc, char **argv); // and so has this (storage.c)

#endif
