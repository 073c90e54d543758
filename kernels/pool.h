// SPDX-License-Identifier: Apache-2.0
//
// A worker pool for programs that run kernels in their own process: benchmarks, tests, engines
// that attend in their own threads. The daemon schedules its workers itself.
//
// A pool belongs to one thread at a time: the one that calls it, which also does its share of the
// work. Results do not depend on the number of threads.
#ifndef KVQ_KERNELS_POOL_H
#define KVQ_KERNELS_POOL_H

#include "kernels/kernels.h"

enum { KVQ_POOL_MAX_THREADS = 256 };

struct kvq_pool;

// Makes a pool of `threads` threads (1 to KVQ_POOL_MAX_THREADS), the first of which is the caller.
// `pinned` binds each thread to a CPU of its own, as far as the process may use so many CPUs, and
// the caller until the pool is closed. Returns 0 or a negative errno; *pool is then NULL.
int kvq_pool_open(struct kvq_pool **pool, unsigned threads, bool pinned);

// Ends the threads and frees everything; *pool becomes NULL. NULL is allowed.
void kvq_pool_close(struct kvq_pool **pool);

unsigned kvq_pool_threads(const struct kvq_pool *pool);

// Calls fn(ctx, item, workspace) for every item below n_items, in any order on any thread, and
// returns when all are done. The workspace is the thread's own, kvq_workspace_bytes() long.
typedef void kvq_pool_fn(void *ctx, uint32_t item, void *workspace);
void kvq_pool_run(struct kvq_pool *pool, kvq_pool_fn *fn, void *ctx, uint32_t n_items);

// Attends for n sessions (or layers) at once. Returns 0, or -ENOMEM if there is no memory for
// plans and partial results; nothing is written then. Memory is kept for the next call.
int kvq_pool_attend(struct kvq_pool *pool, const struct kvq_kernels *k,
                    const struct kvq_attend *const *attends, uint32_t n);

// One unit of one layer to pack, all its KV heads: `head` of the unit is not looked at.
struct kvq_pack_job {
    const struct kvq_format *format;
    const struct kvq_shape *shape;
    struct kvq_unit unit;
};

// Packs n units. All of them have the same number of KV heads.
void kvq_pool_pack(struct kvq_pool *pool, const struct kvq_kernels *k,
                   const struct kvq_pack_job *jobs, uint32_t n);

#endif
